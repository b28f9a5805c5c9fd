"""How little of microbatches is padding, and how even they are: `python -m benchmarks.composition`.

Two tables, of microbatches that a loader delivers of samples with the sizes of `benchmarks.balance`:

- unpacked rows: fixed numbers of rows, groups of similar length (`LengthGrouper`), and `max_tokens_per_microbatch`:
  the share of padding, and the largest cost of 64 microbatches over their mean, the cost being the padded tokens;
- packs of 8,192 tokens, without and with a limit for their cost (`cost_limit`): how full they are, and the largest cost
  of 64 packs over their mean, the cost being that of tokens, attention and patches.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.balance import HIDDEN, MIXES, PATCH_COST, ROW, Sizes, write
from energon_bridge import BatchCost, DefaultTaskEncoder, Packer, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.models.packing.grouping import LengthGrouper
from energon_bridge.trainers.replica.costs import cost_limit

COST = BatchCost(attention=1 / (12 * HIDDEN), patches=PATCH_COST)
BUDGET, RANKS, LANES = 16_384, 64, 24


class Rows(DefaultTaskEncoder):
    """Microbatches are the sizes of their samples."""

    def __init__(self, sizes: Sizes, *, grouper: LengthGrouper[Any] | None = None, limit: int | None = None) -> None:
        super().__init__()
        self._sizes = {name: column.tolist() for name, column in sizes.items()}
        limits = {"tokens": ROW} | ({} if limit is None else {"cost": limit})
        self._packer: Packer[Any] = Packer(limits=limits, size_of=lambda one: {name: one[name] for name in limits})
        if grouper is not None:
            self.batch_group_criterion = grouper.group  # type: ignore[method-assign]

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        number = int(sample.__key__)
        tokens, patches = self._sizes["tokens"][number], self._sizes["patches"][number]
        return {"tokens": tokens, "cost": round(COST.of_sizes(tokens, patches)), "__key__": sample.__key__}

    def sample_length(self, sample: Any) -> int:
        tokens: int = sample["tokens"]
        return tokens

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return self._packer.select(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"sizes": [(one["tokens"], one["cost"]) for one in samples], "__key__": "pack"}

    def batch(self, samples: list[Any]) -> Any:
        return samples[0]["sizes"] if "sizes" in samples[0] else [(one["tokens"], one["cost"]) for one in samples]


def delivered(folder: Path, encoder: Any, tokens: int, **settings: Any) -> list[list[tuple[int, int]]]:
    """Return the sizes of the samples of each microbatch of about an epoch."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=LANES)
    dataset = get_train_dataset(folder, task_encoder=encoder, worker_config=config, **settings)
    loader = get_savable_loader(dataset)
    found: list[list[tuple[int, int]]] = []
    seen = 0
    for batch in loader:
        found.append(batch)
        seen += sum(size for size, _ in batch)
        if seen >= tokens:
            break
    loader.close()
    return found


def unevenness(costs: np.ndarray[Any, Any]) -> float:
    """Return the largest of 64 consecutive costs over their mean, on average."""
    steps = costs[: len(costs) // RANKS * RANKS].reshape(-1, RANKS)
    return float((steps.max(1) / steps.mean(1)).mean())


def rows_table(folder: Path, samples: int) -> Iterator[str]:
    """Yield the table of unpacked rows."""
    yield "| samples | microbatches | padding | rows | largest over mean of 64 | mean tokens of 16,384 |"
    for mix in ("photographs", "conversations", "videos"):
        sizes = MIXES[mix](np.random.default_rng(7), samples)
        total, longest = int(sizes["tokens"].sum()), int(sizes["tokens"].max())
        fixed = max(1, round(BUDGET / sizes["tokens"].mean() / 2))
        grouper: LengthGrouper[Any] = LengthGrouper.geometric(
            longest=longest, length_of=lambda one: one["tokens"], max_tokens=BUDGET
        )
        for name, encoder, settings in (
            (f"{fixed} rows", Rows(sizes), {"batch_size": fixed}),
            ("groups of length", Rows(sizes, grouper=grouper), {"batch_size": None}),
            ("max_tokens_per_microbatch", Rows(sizes), {"batch_size": None, "max_tokens_per_microbatch": BUDGET}),
        ):
            batches = delivered(folder, encoder, total, **settings)
            held = np.array([len(batch) * max(size for size, _ in batch) for batch in batches], np.float64)
            padding = 1 - sum(size for batch in batches for size, _ in batch) / held.sum()
            rows = float(np.mean([len(batch) for batch in batches]))
            yield (
                f"| {mix} | {name} | {padding:.1%} | {rows:.1f} | {unevenness(held):.3f} | {held.mean() / BUDGET:.2f} |"
            )


def packs_table(folder: Path, samples: int) -> Iterator[str]:
    """Yield the table of packs."""
    yield "| samples | packs | full | largest over mean of 64 |"
    for mix in ("image mix", "conversations", "videos"):
        sizes = MIXES[mix](np.random.default_rng(7), samples)
        total = int(sizes["tokens"].sum())
        some = slice(0, 2_000)
        costs = [round(COST.of_sizes(*one)) for one in zip(sizes["tokens"][some], sizes["patches"][some], strict=True)]
        for name, limit in (("tokens", None), ("tokens and cost", cost_limit(sizes["tokens"][some], costs, ROW))):
            packs = delivered(folder, Rows(sizes, limit=limit), total, batch_size=1, packing_buffer_size=200)
            cost = np.array([sum(value for _, value in pack) for pack in packs], np.float64)
            full = sum(size for pack in packs for size, _ in pack) / (ROW * len(packs))
            yield f"| {mix} | {name} | {full:.1%} | {unevenness(cost):.3f} |"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="samples of each mix")
    samples = parser.parse_args().samples
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "texts"
        write(folder, samples)
        for table in (rows_table, packs_table):
            for line in table(folder, samples):
                print(line, flush=True)
            print()


if __name__ == "__main__":
    main()

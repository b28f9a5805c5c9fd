"""How even balance makes the ranks, and what it costs: `python -m benchmarks.balance`, a simulator without ranks.

Texts are written whose sizes are drawn, seeded, as those of photographs, conversations and videos are; a loader streams
them, packed into rows of 8,192 tokens by the ready-made `Packer`, or as microbatches of four samples; what a microbatch
costs is counted from that as `BatchCost` does: tokens, pairs of tokens that attend to each other, and patches.
Consecutive microbatches are global batches; where the stream that was read is too short for one, it is drawn from it.

For each mix, number of ranks and of microbatches that each runs: the largest cost of a rank over the mean (`step`) and
the sum of the largest costs of the rounds over the mean (`round`: FSDP and pipelines wait in every round), as they come
and balanced, means of some global batches, each with the least that an assignment of equally many can have; the steps
of Karmarkar and Karp's differencing with equal counts, as verl and slime have it, and of longest first with equal
counts; and the processor time to assign a global batch.

`--run 4` trains instead, on so many processes: each microbatch sleeps for as long as it costs, ranks wait for each
other after every step, and the time of a step is measured, without balance and with it, beside what costs predict.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from energon_bridge import (
    DefaultTaskEncoder,
    EnergonDataloader,
    Packer,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    make_balance,
)
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard
from energon_bridge.trainers.replica.assignment import Imbalance, assign_microbatches, imbalance

SAMPLES, SHARDS, ROW, ROWS_PER_BATCH = 60_000, 12, 8_192, 4
HIDDEN, PATCH_COST = 4_096, 0.1
RANKS, ROUNDS = (8, 64, 256, 1024), (1, 2, 4, 8, 32)
GLOBAL_BATCHES = 8

Sizes = dict[str, np.ndarray[Any, np.dtype[np.int64]]]
Costs = np.ndarray[Any, np.dtype[np.float64]]


def photographs(rng: np.random.Generator, count: int) -> Sizes:
    """One photograph of a mixed size, as a Qwen-VL model sees it (28 x 28 pixels a token), and a caption."""
    sides = np.array([(256, 256), (640, 480), (1024, 768), (1280, 720), (1600, 1200), (4032, 3024)], np.float64)
    chosen = sides[rng.choice(len(sides), count, p=[0.15, 0.3, 0.25, 0.1, 0.1, 0.1])]
    chosen *= rng.uniform(0.6, 1.1, (count, 1))
    chosen *= np.minimum(1.0, np.sqrt(1_280 * 28 * 28 / chosen.prod(1)))[:, None]
    images = np.maximum(np.rint(chosen / 28), 1).prod(1).astype(np.int64)
    return {"tokens": images + rng.lognormal(4.2, 0.8, count).astype(np.int64).clip(4, 1_000), "patches": 4 * images}


def conversations(rng: np.random.Generator, count: int) -> Sizes:
    """Texts of log-normal length."""
    tokens = rng.lognormal(6.2, 0.9, count).astype(np.int64).clip(8, 4_096)
    return {"tokens": tokens, "patches": np.zeros(count, np.int64)}


def videos(rng: np.random.Generator, count: int) -> Sizes:
    """One frame a second, up to 48 of 64 to 144 tokens each, and a text."""
    frames = rng.lognormal(2.5, 0.8, count).clip(2, 48).astype(np.int64)
    tokens = frames * rng.integers(64, 145, count)
    return {"tokens": tokens + rng.integers(20, 300, count), "patches": 4 * tokens}


def image_mix(rng: np.random.Generator, count: int) -> Sizes:
    """Four fifths photographs, and conversations."""
    photos, texts = photographs(rng, count), conversations(rng, count)
    chosen = rng.random(count) < 0.8
    return {name: np.where(chosen, photos[name], texts[name]) for name in photos}


MIXES = {"image mix": image_mix, "photographs": photographs, "conversations": conversations, "videos": videos}


class Sized(DefaultTaskEncoder):
    """Gives every sample the sizes of its number; packs or batches are what they cost."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._sizes = {name: column.tolist() for name, column in sizes.items()}
        self.packer: Packer[Any] = Packer(limits={"tokens": ROW}, size_of=lambda sample: sample["tokens"])

    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        number = int(sample.__key__)
        return {name: column[number] for name, column in self._sizes.items()} | {"__key__": sample.__key__}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return self.packer.select(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"cost": cost_of(samples, padded=False), "__key__": "pack"}

    def batch(self, samples: list[Any]) -> Any:
        if "cost" in samples[0]:
            return samples[0]["cost"]
        return cost_of(samples, padded=True)


def cost_of(samples: list[Any], *, padded: bool) -> float:
    """Return what `BatchCost(tokens=1, attention=1 / (12 * HIDDEN), patches=PATCH_COST)` gives their batch."""
    lengths = [sample["tokens"] for sample in samples]
    if padded:
        lengths = [max(lengths)] * len(lengths)
    attention = sum(length**2 for length in lengths) / (12 * HIDDEN)
    return sum(lengths) + attention + PATCH_COST * sum(sample["patches"] for sample in samples)


def write(folder: Path, samples: int) -> None:
    """Write texts whose keys are their numbers, and prepare them."""
    folder.mkdir()
    bounds = np.linspace(0, samples, SHARDS + 1).astype(int).tolist()
    for shard, (first, last) in enumerate(pairwise(bounds)):
        write_shard(folder / f"{shard:03d}.tar", {f"{number:07d}": {"txt": b"text"} for number in range(first, last)})
    dataset_yaml = render_dataset_yaml("TextSample", {"text": "txt"})
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=dataset_yaml)


def costs_of(folder: Path, sizes: Sizes, *, packed: bool) -> Costs:
    """Return the costs of the microbatches of an epoch, as a loader delivers them."""
    samples = len(sizes["tokens"])
    dataset = get_train_dataset(
        folder,
        task_encoder=Sized(sizes),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=24),
        max_samples_per_sequence=100,
        shuffle_buffer_size=100,
        batch_size=1 if packed else ROWS_PER_BATCH,
        packing_buffer_size=200 if packed else None,
    )
    loader = get_savable_loader(dataset)
    count = int(sizes["tokens"].sum()) // ROW if packed else samples // ROWS_PER_BATCH
    costs = np.fromiter(islice(loader, count), np.float64)
    loader.close()
    return costs


def differencing(costs: Costs, ranks: int) -> list[list[int]]:
    """Deal microbatches to ranks by Karmarkar and Karp's differencing with equal counts, written as verl has it."""
    line = sorted((cost, number) for number, cost in enumerate(costs.tolist()))
    states = []
    for start in range(0, len(line), ranks):
        sets = sorted(((cost, [number]) for cost, number in line[start : start + ranks]), reverse=True)
        states.append((sets[-1][0] - sets[0][0], start, sets))
    heapq.heapify(states)
    number = len(line)
    while len(states) > 1:
        first, second = heapq.heappop(states)[2], heapq.heappop(states)[2]
        joined = [(a + b, of + other) for (a, of), (b, other) in zip(first, reversed(second), strict=True)]
        joined.sort(reverse=True)
        heapq.heappush(states, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [numbers for _, numbers in states[0][2]]


def longest_first(costs: Costs, ranks: int) -> list[list[int]]:
    """Give each microbatch, the longest first, to the least loaded rank that has room."""
    room = len(costs) // ranks
    sets: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for number in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        sets[rank].append(number)
        if len(sets[rank]) < room:
            heapq.heappush(loads, (load + costs[number], rank))
    return sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Means of some global batches."""

    step_before: float
    step: float
    least_step: float
    round_before: float
    round: float
    least_round: float
    differencing: float
    longest_first: float
    milliseconds: float

    @property
    def worse(self) -> float:
        """Our step over the best one of the others."""
        return self.step / min(self.differencing, self.longest_first)


def simulated(costs: Costs, ranks: int, rounds: int) -> Figures:
    """Balance some global batches of a stream."""
    size = ranks * rounds
    rng = np.random.default_rng(size)
    rows = []
    for number in range(GLOBAL_BATCHES):
        line = costs[number * size : (number + 1) * size]
        if len(line) < size:
            line = rng.choice(costs, size)
        start = time.process_time()
        assignment = assign_microbatches(line, ranks)
        seconds = time.process_time() - start
        before = imbalance(line, np.arange(size).reshape(-1, ranks))
        after = imbalance(line, assignment)
        others = [imbalance(line, np.array(deal(line, ranks)).T).step for deal in (differencing, longest_first)]
        least = least_of(line, ranks)
        steps = (before.step, after.step, least.step)
        rows.append((*steps, before.round, after.round, least.round, *others, 1e3 * seconds))
    means = np.mean(rows, 0).tolist()
    return Figures(**dict(zip(Figures.__slots__, means, strict=True)))


def least_of(costs: Costs, ranks: int) -> Imbalance:
    """Return what no assignment of equally many microbatches to ranks can be below.

    Of the (k - 1) R + 1 largest microbatches one rank runs k, and the others that it runs are no smaller than the
    smallest there are. And the largest of a round are least where sorted neighbours are a round.
    """
    line = np.sort(costs)[::-1]
    rounds, mean = len(line) // ranks, float(line.sum()) / ranks
    tops = [(k - 1) * ranks + 1 for k in range(1, rounds + 1)]
    steps = [line[top - k : top].sum() + line[len(line) - rounds + k :].sum() for k, top in enumerate(tops, 1)]
    return Imbalance(step=max(1.0, float(max(steps)) / mean), round=float(line[::ranks].sum()) / mean)


def run(samples: int, ranks: tuple[int, ...], rounds: tuple[int, ...]) -> list[tuple[str, int, int, Figures]]:
    """Print a line for each mix, number of ranks and of rounds, and return their figures."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "texts"
        write(folder, samples)
        print("| microbatches | ranks | rounds | step | balanced | least | round | balanced | least | KK | LF | ms |")
        print("|---" * 12 + "|")
        for mix, draw in MIXES.items():
            sizes = draw(np.random.default_rng(7), samples)
            for packed in (True, False):
                costs = costs_of(folder, sizes, packed=packed)
                label = f"{mix}, {'packs' if packed else f'{ROWS_PER_BATCH} rows'}"
                for size in ranks:
                    for accumulation in rounds:
                        f = simulated(costs, size, accumulation)
                        found.append((label, size, accumulation, f))
                        print(
                            f"| {label} | {size} | {accumulation} | {f.step_before:.3f} | {f.step:.3f} | "
                            f"{f.least_step:.3f} | {f.round_before:.3f} | {f.round:.3f} | {f.least_round:.3f} | "
                            f"{f.differencing:.3f} | {f.longest_first:.3f} | {f.milliseconds:.2f} |",
                            flush=True,
                        )
    return found


SECONDS, STEPS, RUN_ROUNDS, WARMUP = 0.1, 10, 4, 2  # seconds of a microbatch of 2,000 tokens


class Tensors(Sized):
    """Batches that can be sent, of 1 MB each."""

    def batch(self, samples: list[Any]) -> Any:
        return {"cost": super().batch(samples), "pixels": torch.zeros(250_000), "__key__": ["batch"]}


def trained(rank: int, ranks: int, rendezvous: Path, folder: Path, sizes: Sizes, unit: float, answers: Any) -> None:
    """Train without balance and with it; give seconds per step, and what the costs predict."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    config = WorkerConfig(num_workers=0, num_lanes=4 * ranks, microbatches_per_global_batch=ranks * RUN_ROUNDS)
    found = []
    for balance in (None, make_balance(lambda batch: batch["cost"])):
        dataset = get_train_dataset(
            folder, task_encoder=Tensors(sizes), worker_config=config, batch_size=ROWS_PER_BATCH
        )
        loader = EnergonDataloader(get_savable_loader(dataset), balance=balance)
        predicted = start = 0.0
        for step in range(WARMUP + STEPS):
            if step == WARMUP:
                start, predicted = time.perf_counter(), 0.0
            own = 0.0
            for _ in range(RUN_ROUNDS):
                cost = next(loader)["cost"]
                time.sleep(cost * unit)
                own += cost * unit
            slowest = torch.tensor(own)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            predicted += float(slowest)
        found.append(((time.perf_counter() - start) / STEPS, predicted / STEPS))
        loader.close()
    answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(ranks: int, samples: int, seconds_of_2000: float = SECONDS) -> list[tuple[float, float]]:
    """Print and return seconds per step and their prediction: without balance, and with it."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "texts", samples)
        sizes = image_mix(np.random.default_rng(7), samples)
        answers = context.Queue()
        arguments = ranks, Path(name) / "rendezvous", Path(name) / "texts", sizes, seconds_of_2000 / 2_000, answers
        processes = [context.Process(target=trained, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        found, *_ = [answers.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    print(
        f"{ranks} ranks, {RUN_ROUNDS} microbatches each, milliseconds of a step (of these the slowest rank computes):"
    )
    (before, expected_before), *_ = found
    for name, (seconds, expected) in zip(("without balance", "exchanged"), found, strict=True):
        print(
            f"{name}: {1e3 * seconds:.1f} ({1e3 * expected:.1f}); of the step without balance {seconds / before:.3f}, "
            f"predicted {expected / expected_before:.3f}"
        )
    return found


def main() -> None:
    """Print the table, and whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of each mix")
    parser.add_argument("--run", type=int, metavar="RANKS", help="train on so many processes instead")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="with --run: of a microbatch of 2,000 tokens")
    arguments = parser.parse_args()
    if arguments.run:
        run_ranks(arguments.run, arguments.samples, arguments.seconds)
        return
    found = run(arguments.samples, RANKS, ROUNDS)
    label, ranks, rounds, worst = max(found, key=lambda row: row[3].worse)
    print(f"\nworst against the best of both: {worst.worse:.4f} ({label}, {ranks} ranks, {rounds} rounds)")


if __name__ == "__main__":
    main()

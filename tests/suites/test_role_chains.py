"""Chains of stops with roles, against an uninterrupted run on one grid.

A chain is drawn from a seed and a number: an encoder, rows or packs, a mix with filters, buckets or a join, and legs,
each with grids of sizes of its own, microbatches that encoders get at once, workers, and balance or none. The state of
the language ranks passes from one to the next; after it was saved, ranks go on for some steps, and are ended. In some
legs each rank is a process that kills itself between two steps, a language rank or an encoder rank first; the next leg
goes on from the last state that all language ranks have saved. `ENERGON_CHAINS` sets how many chains,
`ENERGON_CHAIN_SEED` which.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from grids import NUM_LANES, as_dealt, assert_same_run, delivered, killed, pictures_dataset, plain
from mixing import metadataset

pytest.importorskip("transformers")

from families import FAMILIES, encoder_of

from energon_bridge import BatchCost, Cooker, SkipSample, WorkerConfig, get_train_dataset, register_joiner
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.samples.sample import META_FIELDS
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.tools.columns.making import add_column

CHAINS = int(os.environ.get("ENERGON_CHAINS") or (300 if os.environ.get("ENERGON_LONG_TESTS") else 5))
SEED = int(os.environ.get("ENERGON_CHAIN_SEED", "9"))
"""By default one whose first chains have packs, joins, balance, workers and kills, and take little time."""
PARTS = 4
GROUP = 24
"""Microbatches of a global batch, in chains with balance."""
MOST_LOST = 3
"""Steps that a leg makes after its state was saved."""
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=NUM_LANES)


class Skipping(ChatTemplateTaskEncoder):
    """Leaves out some samples by chance, and makes two of others; where there are buckets, one of each."""

    cookers = (Cooker(cook_conversation),)
    times = (1, 1, 2)

    def preencode_sample(self, sample: Any) -> Iterator[Any]:
        if random.random() < 0.1:
            raise SkipSample
        for _ in range(random.choice(self.times)):
            made: Any = super().preencode_sample(sample)
            made.loss_mask = made.loss_mask * (1 + random.random())
            yield made


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Ranks of both grids, steps, microbatches at once, workers, and the most steps that are lost after it.

    `balance`: how microbatches are dealt between the language ranks that an encoder rank serves; None: they are not.
    `kills`: the steps after which each rank's process kills itself; None: the ranks are closed, in this process.
    """

    language: int
    vision: int
    steps: int
    macro: int
    workers: int
    lost: int
    balance: BatchCost | None
    kills: dict[tuple[str, int], int] | None

    @property
    def sizes(self) -> dict[str, int]:
        return {"language": self.language, "vision": self.vision}


def pictures_of(parts: Mapping[str, Any]) -> int:
    """Return how many pictures a sample has, for the column that filters look at."""
    return sum(name.endswith((".jpg", ".png")) for name in parts)


@register_joiner
def one_after_another(first: dict[str, Any], second: dict[str, Any] | None) -> dict[str, Any]:
    """Join two conversations to one, with the pictures of both."""
    both = [first] if second is None else [first, second]
    turns = [turn for one in both for turn in one["json"]["messages"]]
    meta = {name: value for name, value in first.items() if name in META_FIELDS}
    pictures = {
        f"{place}{name}": value
        for place, one in enumerate(both)
        for name, value in one.items()
        if name.endswith((".jpg", ".png"))
    }
    return meta | pictures | {"json": {"messages": turns}}


JOINER = {"__module__": __name__, "__function__": "one_after_another"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    logger = logging.getLogger("energon_bridge")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    folder = tmp_path_factory.mktemp("roles")
    for name, shards, side in (("a", (9, 1, 14), 40), ("b", (3, 5), 24)):
        add_column(pictures_dataset(folder / name, shards, side=side), "pictures", pictures_of, raw=True)
    yield folder
    logger.setLevel(level)


def drawn_leg(rng: random.Random, *, balanced: bool) -> Leg:
    """Draw a leg; where there is balance, it is a global batch."""
    language = rng.choice([1, 2, 3, 4, 6, 8])
    vision = rng.choice([size for size in range(1, 9) if language % size == 0 or size % language == 0])
    macro = rng.choice([1, 1, 2, 3]) if vision <= language else 1
    steps = macro * rng.randint(1, max(1, 8 // (macro * language)))
    if balanced:
        macro = 1
        steps = GROUP // language
    balance = BatchCost(attention=0.1) if balanced and vision < language and rng.random() < 0.8 else None
    workers = rng.choice([0] * 19 + [2])
    kills = drawn_kills(rng, language, vision, steps) if rng.random() < 0.2 else None
    lost = rng.choice([0, 0, 2])
    return Leg(
        language=language,
        vision=vision,
        steps=steps,
        macro=macro,
        workers=workers,
        lost=lost,
        balance=balance,
        kills=kills,
    )


def drawn_kills(rng: random.Random, language: int, vision: int, steps: int) -> dict[tuple[str, int], int]:
    """Return after how many steps each rank is killed: one of a grid first, before the state is saved or after it."""
    name, size = rng.choice([("language", language), ("vision", vision)])
    first = rng.randint(0, steps + 1)
    ranks = [("language", rank) for rank in range(language)] + [("vision", rank) for rank in range(vision)]
    later = {rank: first + rng.randint(0, 2) for rank in ranks}
    return later | {(name, rng.randrange(size)): first}


def drawn_tree(rng: random.Random) -> dict[str, Any]:
    """Return what is trained on: a dataset, some of it, a mix or a join."""

    def leaf(name: str) -> dict[str, Any]:
        more = rng.choice([{}, {}, {"filter": "pictures > 0"}, {"filter": "pictures != 1"}, {"filter": "pictures < 2"}])
        return {"path": f"./{name}"} | more

    kind = rng.choice(["one", "blend", "blend", "epochized", "join", "join"])
    if kind == "one":
        return leaf("a")
    if kind == "blend":
        return {"blend": [leaf("a") | {"weight": 2}, leaf("b") | {"weight": 1}]}
    if kind == "epochized":
        return {"blend_epochized": [leaf("a") | {"repetitions": 2}, leaf("b") | {"repetitions": 1}]}
    second = {"path": "./b", "nonmatch": rng.choice(["skip", "none"])}
    return {"join": [{"path": "./a"}, second], "joiner": JOINER}


def run_chain(data: Path, number: int, folder: Path) -> None:
    rng = random.Random(f"{SEED} {number}")
    family = rng.choice(FAMILIES)
    known = encoder_of(family, **({} if family == "llava" else {"max_pixels": 32 * 32}))
    encoder = Skipping(known.tokenizer, known.family, ChatConfig(seq_length=rng.choice([96, 300])))
    options = rng.choice(
        [{"batch_size": rng.randint(1, 3)}, {"batch_size": 1, "packing_buffer_size": rng.choice([4, 12])}]
    )
    tree = drawn_tree(rng)
    buckets = random.Random(f"{SEED} {number} buckets")
    if buckets.random() < 0.4 and tree.keys() <= {"path", "filter", "blend"}:
        options["group_by"] = buckets.choice(["pictures > 0", "tier(pictures, 0, 1, 2)"])
        options |= {"bucket_batch_size": "6 / (1 + pictures)"} if "packing_buffer_size" in options else {}
        encoder.times = (1,)
    mix = metadataset(data, train=tree)
    dataset = get_train_dataset(mix, task_encoder=encoder, worker_config=CONFIG, **options)
    balanced = rng.random() < 0.2
    if balanced:
        dataset = replace(dataset, worker_config=replace(CONFIG, microbatches_per_global_batch=GROUP))
    legs = [drawn_leg(rng, balanced=balanced) for _ in range(3)]
    (flat,) = plain(dataset, 1, GROUP * balanced + sum(leg.language * (leg.steps + MOST_LOST) for leg in legs))
    state: Any = None
    done = 0
    for place, leg in enumerate(legs):
        given = {"state": state, "workers": leg.workers, "macro": leg.macro, "balance": leg.balance}
        steps = leg.steps
        if leg.kills is None:
            found, saved = delivered(dataset, leg.sizes, steps, lost=leg.lost, **given)
        else:
            found, saved, steps = killed(dataset, leg.sizes, steps, leg.kills, folder / f"{number}-{place}", **given)
        whole = [flat[done + rank :: leg.language][:steps] for rank in range(leg.language)]
        try:
            if leg.balance is not None:
                came = whole
                whole = as_dealt(flat[done:], found)
                full = leg.steps if steps >= leg.steps else 0
                assert rows_of(whole, full) == rows_of(came, full)
            assert_same_run(leg.sizes, steps, whole, found, macro=leg.macro)
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, chain {number}, {tree}, {options}, {leg} of {legs}: {error}") from error
        if saved:
            state = merge(saved) if rng.random() < 0.5 else saved
            done += leg.language * leg.steps


def rows_of(ranks: list[list[Any]], steps: int) -> Counter[Any]:
    """Return which microbatches the ranks run in some steps."""
    return Counter(batch.__restore_key__ for rank in ranks for batch in rank[:steps])


@pytest.mark.parametrize("part", range(PARTS))
def test_a_chain_of_grids_is_the_run_on_one(data: Path, part: int, tmp_path: Path) -> None:
    for number in range(part, CHAINS, PARTS):
        run_chain(data, number, tmp_path)

"""Chains of stops with roles, against an uninterrupted run on one grid.

A chain is drawn from a seed and a number: an encoder, rows or packs, a mix, and legs, each with grids of sizes of its
own, microbatches that encoders get at once, and workers. The state of the language ranks passes from one to the next;
after it was saved, ranks go on for some steps, and are ended. `ENERGON_CHAINS` sets how many chains,
`ENERGON_CHAIN_SEED` which.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grids import NUM_LANES, assert_same_run, delivered, pictures_dataset, plain
from mixing import metadataset

pytest.importorskip("transformers")

from families import FAMILIES, encoder_of

from energon_bridge import Cooker, SkipSample, WorkerConfig, get_train_dataset
from energon_bridge.core.loader.fits import merge
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder

CHAINS = int(os.environ.get("ENERGON_CHAINS") or (300 if os.environ.get("ENERGON_LONG_TESTS") else 8))
SEED = int(os.environ.get("ENERGON_CHAIN_SEED", "0"))
PARTS = 4
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=NUM_LANES)


class Skipping(ChatTemplateTaskEncoder):
    """Leaves out some samples by chance, and makes two of others."""

    cookers = (Cooker(cook_conversation),)

    def preencode_sample(self, sample: Any) -> Iterator[Any]:
        if random.random() < 0.1:
            raise SkipSample
        for _ in range(random.choice([1, 1, 2])):
            made: Any = super().preencode_sample(sample)
            made.loss_mask = made.loss_mask * (1 + random.random())
            yield made


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Ranks of both grids, steps, microbatches at once, workers, and the most steps that are lost after it."""

    language: int
    vision: int
    steps: int
    macro: int
    workers: int
    lost: int


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    logger = logging.getLogger("energon_bridge")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    folder = tmp_path_factory.mktemp("roles")
    pictures_dataset(folder / "a", (9, 1, 14), side=40)
    pictures_dataset(folder / "b", (3, 5), side=24)
    yield folder
    logger.setLevel(level)


def drawn_leg(rng: random.Random) -> Leg:
    language = rng.choice([1, 2, 3, 4, 6, 8])
    vision = rng.choice([size for size in range(1, 9) if language % size == 0 or size % language == 0])
    macro = rng.choice([1, 1, 2, 3]) if vision <= language else 1
    steps = macro * rng.randint(1, max(1, 8 // (macro * language)))
    workers = rng.choice([0] * 19 + [2])
    return Leg(language=language, vision=vision, steps=steps, macro=macro, workers=workers, lost=rng.choice([0, 0, 2]))


def run_chain(data: Path, number: int) -> None:
    rng = random.Random(f"{SEED} {number}")
    family = rng.choice(FAMILIES)
    known = encoder_of(family, **({} if family == "llava" else {"max_pixels": 32 * 32}))
    encoder = Skipping(known.tokenizer, known.family, ChatConfig(seq_length=rng.choice([96, 300])))
    options = rng.choice(
        [{"batch_size": rng.randint(1, 3)}, {"batch_size": 1, "packing_buffer_size": rng.choice([4, 12])}]
    )
    path: Any = data / "a"
    if rng.random() < 0.5:
        blend = [{"path": "./a", "weight": 2}, {"path": "./b", "weight": 1}]
        path = metadataset(data, train={"blend": blend})
    dataset = get_train_dataset(path, task_encoder=encoder, worker_config=CONFIG, **options)
    legs = [drawn_leg(rng) for _ in range(3)]
    (flat,) = plain(dataset, 1, sum(leg.language * leg.steps for leg in legs))
    state: Any = None
    done = 0
    for leg in legs:
        sizes = {"language": leg.language, "vision": leg.vision}
        given = {"workers": leg.workers, "macro": leg.macro, "lost": leg.lost}
        found, state = delivered(dataset, sizes, leg.steps, state=state, **given)
        here = flat[done : done + leg.language * leg.steps]
        whole = [here[rank :: leg.language] for rank in range(leg.language)]
        try:
            assert_same_run(sizes, leg.steps, whole, found, macro=leg.macro)
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, chain {number}, {leg} of {legs}: {error}") from error
        done += len(here)
        state = merge(state) if rng.random() < 0.5 else state


@pytest.mark.parametrize("part", range(PARTS))
def test_a_chain_of_grids_is_the_run_on_one(data: Path, part: int) -> None:
    for number in range(part, CHAINS, PARTS):
        run_chain(data, number)

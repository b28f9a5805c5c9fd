"""Balance with roles: microbatches of each global batch are dealt alike on all grids, and encoders serve the deal."""

from __future__ import annotations

import tarfile
from bisect import bisect
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import digest
from grids import NUM_LANES, as_dealt, assert_same_run, pictures_dataset, plain, reads_counted
from made import made_once

pytest.importorskip("transformers")

from families import encoder_of
from forked import on_gloo
from grids import without_media

from energon_bridge import (
    BatchCost,
    Cooker,
    EnergonDataloader,
    EnergonMultiModalDataModule,
    SkipSample,
    WorkerConfig,
    add_column,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    make_balance,
)
from energon_bridge.core.errors import ConfigurationError, StepMismatchError, WrongUseError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.tools.columns.making import content_bytes
from energon_bridge.trainers.replica.assignment import imbalance
from energon_bridge.trainers.replica.costs import num_tokens
from energon_bridge.trainers.replica.warmup import CostWarmup
from energon_bridge.trainers.roles import make_roles
from energon_bridge.trainers.roles.roles import RoleLoader

data = made_once(partial(pictures_dataset, side=40))
GLOBAL = 24  # microbatches of a global batch
COST = BatchCost(tokens=1.0, attention=0.05)


class Chats(ChatTemplateTaskEncoder):
    """Leaves out some samples by chance."""

    cookers = (Cooker(cook_conversation),)

    def preencode_sample(self, sample: Any) -> Any:
        if torch.rand(()) < 0.1:
            raise SkipSample
        return super().preencode_sample(sample)


def task_encoder() -> Chats:
    known = encoder_of("qwen2_vl", max_pixels=32 * 32)
    return Chats(known.tokenizer, known.family, ChatConfig(seq_length=600))


def dataset_of(data: Path, rank: int = 0, size: int = 1, workers: int = 0, **options: Any) -> DatasetSpec:
    config = WorkerConfig(
        rank=rank,
        world_size=size,
        num_workers=workers,
        num_lanes=NUM_LANES,
        microbatches_per_global_batch=GLOBAL,
    )
    given = {"batch_size": 1 if "packing_buffer_size" in options else 2} | options
    return get_train_dataset(data, task_encoder=task_encoder(), worker_config=config, **given)


def role_loader(data: Path, sizes: dict[str, int], name: str, rank: int, macro: int = 1, **options: Any) -> RoleLoader:
    grids = {grid: (rank if grid == name else None, size) for grid, size in sizes.items()}
    return make_roles(grids=grids, macro=macro).loader(dataset_of(data, **options), balance=COST)


def delivered(
    data: Path, sizes: dict[str, int], steps: int, state: Any = None, **options: Any
) -> tuple[dict[str, list[list[Any]]], list[Any]]:
    """Return what the ranks of each grid get, by name, rank and step, and the states of language ranks."""
    found: dict[str, list[list[Any]]] = {name: [] for name in sizes}
    states = []
    for name, size in sizes.items():
        for rank in range(size):
            loader = role_loader(data, sizes, name, rank, **options)
            if state is not None:
                loader.restore_state_rank(state)
            before = loader.microbatches
            found[name].append([step[name] for step in islice(loader, steps) if name in step])
            assert loader.microbatches == before + steps * sizes["language"]
            states += [loader.save_state_rank()] if name == "language" else []
            loader.close()
    return found, states


def on_one_grid(data: Path, ranks: int, steps: int, options: dict[str, Any]) -> list[list[Any]]:
    """Return what the ranks of one grid run that exchange microbatches by the same costs, without their media."""

    def run(rank: int) -> list[str]:
        cost = lambda batch: COST(without_media(batch))  # noqa: E731
        loader = get_savable_loader(dataset_of(data, rank, ranks, **options))
        stream = EnergonDataloader(loader, balance=make_balance(cost))
        found = [digest(without_media(next(stream))) for _ in range(steps)]
        stream.close()
        return found

    return on_gloo(ranks, run)


KINDS: dict[str, dict[str, Any]] = {"rows": {}, "packs": {"packing_buffer_size": 8}}


@pytest.mark.parametrize("kind", KINDS)
def test_one_block_runs_what_ranks_run_that_exchange(data: Path, kind: str) -> None:
    """Each language rank runs, in each step, what it runs on one grid with balance; the encoder serves that."""
    steps = 2 * GLOBAL // 4
    sizes = {"language": 4, "vision": 1}
    found, _ = delivered(data, sizes, steps, **KINDS[kind])
    expected = on_one_grid(data, 4, steps, KINDS[kind])
    assert [[digest(batch) for batch in rank] for rank in found["language"]] == expected
    (flat,) = plain(dataset_of(data, **KINDS[kind]), 1, 2 * GLOBAL)
    assert_same_run(sizes, steps, as_dealt(flat, found), found)


@pytest.mark.parametrize(
    ("sizes", "macro"),
    [
        ({"language": 4, "vision": 2}, 1),
        ({"language": 8, "vision": 2}, 3),
        ({"language": 6, "vision": 2}, 1),
    ],
)
def test_each_block_deals_its_own(data: Path, sizes: dict[str, int], macro: int) -> None:
    """Global batches stay the same, media follow the deal, and no block has a rank with more than it must."""
    language = sizes["language"]
    rounds = GLOBAL // language
    steps = 2 * rounds
    found, _ = delivered(data, sizes, steps, macro=macro)
    (flat,) = plain(dataset_of(data), 1, 2 * GLOBAL)
    whole = as_dealt(flat, found)
    assert_same_run(sizes, steps, whole, found, macro=macro)
    block = language // sizes["vision"]
    for number in range(2):
        of_global = flat[number * GLOBAL : (number + 1) * GLOBAL]
        for first in range(0, language, block):
            ranks = range(first, first + block)
            ran = [whole[rank][number * rounds : (number + 1) * rounds] for rank in ranks]
            came = [of_global[rank::language] for rank in ranks]
            keys = [sorted(batch.__restore_key__ for rank in part for batch in rank) for part in (ran, came)]
            assert keys[0] == keys[1]
            costs = [[[COST(without_media(batch)) for batch in rank] for rank in part] for part in (ran, came)]
            after, before = (max(map(sum, part)) for part in costs)
            assert after <= before
    assert sum(a is not b for rank, one in enumerate(whole) for a, b in zip(one, flat[rank::language], strict=True))


def test_a_run_goes_on_with_other_grids_and_without_balance(data: Path) -> None:
    """From the states of all language ranks, in workers too; the global batches are those of the run."""
    sizes = {"language": 4, "vision": 2}
    first, states = delivered(data, sizes, GLOBAL // 4)
    (flat,) = plain(dataset_of(data), 1, 3 * GLOBAL)
    expected = sorted(digest(without_media(batch)) for batch in flat[GLOBAL : 2 * GLOBAL])
    for other, workers in (({"language": 8, "vision": 1}, 0), ({"language": 2, "vision": 1}, 2)):
        steps = GLOBAL // other["language"]
        found, _ = delivered(data, other, steps, states, workers=workers)
        assert sorted(digest(batch) for rank in found["language"] for batch in rank) == expected
    ((plainly, *_), *_) = plain(dataset_of(data), 3, 1, states)
    assert digest(plainly) == digest(flat[GLOBAL])
    loader = role_loader(data, sizes, "language", 1)
    loader.restore_state_rank(states)
    twice = list(islice(loader, 2))
    with pytest.raises(WrongUseError, match="8 of the 24 microbatches of this global batch were delivered"):
        loader.save_state_rank()
    loader.restore_state_rank(states)
    assert [digest(step["language"]) for step in islice(loader, 2)] == [digest(step["language"]) for step in twice]
    inside = get_savable_loader(dataset_of(data))
    list(islice(inside, 5))
    with pytest.raises(StepMismatchError, match="in the middle of a global batch of 24"):
        loader.restore_state_rank(inside.save_state_rank())
    inside.close()
    loader.close()
    assert first["language"][1][0].__key__


def test_tiers_of_bytes_level_what_encoder_ranks_read(tmp_path: Path) -> None:
    """All ranks have samples of like size in a step; and the run is that of one grid: balanced, and after a resume."""
    data = pictures_dataset(tmp_path, (480,))
    add_column(data, "bytes", content_bytes, raw=True)
    sizes_of: Counter[str] = Counter()
    with tarfile.open(data / "train" / "0.tar") as tar:
        for member in tar:
            sizes_of[member.name.split(".")[0]] += member.size
    lows = [0, *(sorted(sizes_of.values())[480 * part // 4] for part in (1, 2, 3))]
    in_tiers = {"group_by": f"tier(bytes, {', '.join(map(str, lows))})"}
    shares, tiers = [], [set[int]() for _ in range(10)]
    for options in ({}, in_tiers):
        of_rank = []
        for rank in range(4):
            loader = make_roles(grids={"language": (None, 8), "vision": (rank, 4)}).loader(dataset_of(data, **options))
            with reads_counted() as read:
                for step, batch in enumerate(islice(loader, 10)):
                    found = {bisect(lows, sizes_of[key.split("/")[-1]]) for key in batch["vision"].__key__}
                    tiers[step] |= found if options else set()
            loader.close()
            of_rank.append(sum(length for _, length in read))
        shares.append(max(of_rank) / sum(of_rank))
    assert set(map(len, tiers)) == {1}
    assert shares[1] < 0.26 < shares[0]

    dataset = dataset_of(data, **in_tiers)
    (flat,) = plain(dataset, 1, 2 * GLOBAL)
    sizes = {"language": 8, "vision": 4}
    dealt, states = delivered(data, sizes, GLOBAL // 8, **in_tiers)
    assert_same_run(sizes, GLOBAL // 8, as_dealt(flat, dealt), dealt)
    other = {"language": 4, "vision": 2}
    again, _ = delivered(data, other, GLOBAL // 4, states, **in_tiers)
    assert_same_run(other, GLOBAL // 4, as_dealt(flat[GLOBAL:], again), again)


def test_the_data_module_balances_roles(data: Path) -> None:
    """And says how even the global batches are, as without roles."""

    def module(rank: int, name: str, **options: Any) -> EnergonMultiModalDataModule:
        grids = {"language": (None, 4), "vision": (None, 1)} | {name: (rank, {"language": 4, "vision": 1}[name])}
        return EnergonMultiModalDataModule(
            str(data),
            None,
            task_encoder=task_encoder(),
            micro_batch_size=2,
            global_batch_size=2 * GLOBAL,
            num_workers=0,
            num_lanes=NUM_LANES,
            roles=make_roles(grids=grids),
            **options,
        )

    found, _ = delivered(data, {"language": 4, "vision": 1}, GLOBAL // 4)
    for rank, name in ((2, "language"), (0, "vision")):
        train = module(rank, name, balance="global_batch", balance_cost=COST)
        loader = train.train_dataloader()
        got = [next(loader)[name].__key__ for _ in range(GLOBAL // 4)]
        assert got == [batch.__key__ for batch in found[name][rank]]
        figures = loader.loader.metrics()
        if name == "language":
            table = [[COST(batch) for batch in of_rank] for of_rank in found["language"]]
            costs = [cost for turn in zip(*table, strict=True) for cost in turn]
            came = imbalance(costs, torch.arange(GLOBAL).reshape(-1, 4).numpy())
            assert figures["balance_step"] == pytest.approx(came.step)
            assert figures["balance_step_before"] >= figures["balance_step"]
            assert train.state_dict()
        train.close()


def test_what_cannot_be_dealt_is_refused(data: Path) -> None:
    roles = make_roles(grids={"language": (0, 4), "vision": (None, 2)})
    with pytest.raises(ConfigurationError, match="an encoder rank of its own"):
        role_loader(data, {"language": 4, "vision": 4}, "language", 0)
    with pytest.raises(ConfigurationError, match="cannot be fitted"):
        roles.loader(dataset_of(data), balance=CostWarmup(steps=2))
    with pytest.raises(ConfigurationError, match="5 language ranks cannot divide a global batch of 24"):
        make_roles(grids={"language": (0, 5), "vision": (None, 1)}).loader(dataset_of(data), balance=num_tokens)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(data, batch_size=2, task_encoder=task_encoder(), worker_config=config)
    with pytest.raises(ConfigurationError, match="leave it out for validation"):
        roles.loader(dataset, balance=num_tokens)

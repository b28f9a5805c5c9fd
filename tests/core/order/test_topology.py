"""Who delivers which lane: ranks and workers deal every microbatch out once and in order, whatever their number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed
from hypothesis import given, strategies as st
from strategies import rank_chains
from torch.testing._internal.distributed.fake_pg import FakeStore

from energon_bridge import WorkerConfig
from energon_bridge.core.errors import ConfigurationError, TooManyRanksError
from energon_bridge.core.order.topology import Ownership, default_num_lanes


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [*((ranks, 48) for ranks in (1, 2, 3, 4, 6, 8, 12, 24)), (5, 120), (7, 168), (16, 96), (64, 384), (96, 384)],
)
def test_default_number_of_lanes_without_a_global_batch(world_size: int, expected: int) -> None:
    assert default_num_lanes(world_size) == expected


@given(st.integers(1, 600))
def test_default_number_of_lanes_is_shared_evenly_and_leaves_lanes_for_workers(world_size: int) -> None:
    lanes = default_num_lanes(world_size)
    assert lanes % math.lcm(24, world_size) == 0
    assert lanes >= (48 if 24 % world_size == 0 else 4 * world_size)


@pytest.mark.parametrize(
    ("group_size", "expected"),
    [(1, 48), (5, 50), (8, 48), (24, 96), (32, 128), (100, 400), (256, 1024), (384, 1152), (1000, 2000), (4096, 4096)],
)
def test_default_number_of_lanes_with_a_global_batch(group_size: int, expected: int) -> None:
    assert {default_num_lanes(ranks, group_size) for ranks in range(1, 65)} == {expected}


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_with_a_global_batch_every_legal_number_of_ranks_has_the_same_lanes(group_size: int, world_size: int) -> None:
    lanes = default_num_lanes(world_size, group_size)
    assert lanes % group_size == 0
    assert lanes == default_num_lanes(1, group_size)
    assert 48 <= lanes < max(48, min(4 * group_size, 1024)) + group_size


@given(rank_chains())
def test_every_microbatch_is_delivered_once_and_in_order(run: tuple[int, list[tuple[int, int]]]) -> None:
    num_lanes, parts = run
    m = 0
    for world_size, steps in parts:
        owned, last = Ownership(num_lanes, world_size, m), dict[int, int]()
        lanes = [lane for rank in range(world_size) for lane in owned.lanes_of(rank)]
        assert sorted(lanes) == list(range(num_lanes))
        for _ in range(steps):
            delivered = [owned.lane_in_step(rank, m) for rank in range(world_size)]
            real = [(rank, lane) for rank, lane in enumerate(delivered) if lane is not None]
            assert len(real) == owned.step_size(m) >= 1
            assert [lane for _, lane in real] == [(m + i) % num_lanes for i in range(len(real))]
            assert all(lane in owned.lanes_of(rank) for rank, lane in real)
            assert owned.even == (num_lanes % world_size == 0)
            assert not owned.even or len(real) == world_size
            for rank, lane in real:
                lanes = owned.lanes_of(rank)
                assert rank not in last or lane == lanes[(lanes.index(last[rank]) + 1) % len(lanes)]
                last[rank] = lane
            m += len(real)


@pytest.mark.parametrize("num_lanes", [1, 24, 240])
def test_masked_share_is_what_a_round_of_lanes_masks(num_lanes: int) -> None:
    for world_size in range(1, min(64, num_lanes) + 1):
        owned = Ownership(num_lanes, world_size, 0)
        m = steps = 0
        while m < num_lanes:
            m += owned.step_size(m)
            steps += 1
        assert m == num_lanes
        assert owned.masked_share == pytest.approx(1 - num_lanes / (steps * world_size))
    assert Ownership(24, 5, 0).masked_share == pytest.approx(0.04)
    nearest = [Ownership(24, ranks, 0).nearest_even_world_size() for ranks in (5, 7, 10, 11)]
    assert nearest == [4, 6, 8, 12]
    with pytest.raises(TooManyRanksError, match="25 data-parallel ranks cannot share 24 lanes"):
        Ownership(24, 25, 0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank": 0}, "give rank and world_size together"),
        ({"rank": 2, "world_size": 2}, r"rank 2 is not in range\(2\)"),
        ({"rank": -1, "world_size": 2}, r"rank -1 is not in range\(2\)"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"seed_offset": 0.5}, "seed_offset must be an integer, got 0.5"),
        ({"rank": "0", "world_size": 1}, "rank must be an integer, got '0'"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
        ({"prefetch_factor": 0}, "prefetch_factor must be an integer of at least 1, got 0"),
        ({"num_lanes": 0}, "num_lanes must be an integer of at least 1 or None, got 0"),
        ({"decode_threads": 0}, "decode_threads must be an integer of at least 1 or None, got 0"),
        (
            {"microbatches_per_global_batch": 0},
            "microbatches_per_global_batch must be an integer of at least 1 or None, got 0",
        ),
        ({"buffer_bytes": -1}, "buffer_bytes must be an integer of at least 0"),
        ({"max_worker_restarts": -1}, "max_worker_restarts must be an integer of at least 0, got -1"),
    ],
)
def test_worker_config_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WorkerConfig(**kwargs)


def test_whole_numbers_of_numpy_become_ints() -> None:
    numbers = {"rank": 1, "world_size": 2, "num_workers": 3, "seed": 4, "seed_offset": 5, "prefetch_factor": 6}
    numbers |= {"num_lanes": 48, "decode_threads": 7, "buffer_bytes": 8, "microbatches_per_global_batch": 10}
    config = WorkerConfig(**{name: np.uint8(number) for name, number in numbers.items()})
    assert config == WorkerConfig(**numbers)
    assert all(type(getattr(config, name)) is int for name in numbers)


def test_worker_config_alone() -> None:
    config = WorkerConfig(num_workers=8, prefetch_factor=2, persistent_workers=True)
    assert (config.rank, config.world_size, config.num_workers) == (0, 1, 8)
    assert WorkerConfig.default_worker_config() == WorkerConfig(num_workers=4)
    assert WorkerConfig.default_worker_config(2, seed=5) == WorkerConfig(num_workers=2, seed=5)
    assert WorkerConfig(num_workers=2) != WorkerConfig(num_workers=3)
    with pytest.raises(AttributeError):
        config.rank = 3  # type: ignore[misc]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_configuration_is_resolved(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12))
    config = WorkerConfig(rank=1, world_size=4, num_workers=workers, seed=5, seed_offset=2, buffer_bytes=9)
    assert (config.dp_rank, config.dp_size, config.run_seed) == (1, 4, 7)
    assert (config.processes, config.threads) == (max(1, workers), 6 // max(1, workers))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert WorkerConfig(num_workers=workers).threads == 12 // max(1, workers)
    assert WorkerConfig(num_workers=20, decode_threads=3).threads == 3
    assert WorkerConfig(num_workers=20).threads == 1


@pytest.fixture
def rank_3_of_8() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("rank_3_of_8")
def test_rank_comes_from_torch_distributed() -> None:
    config = WorkerConfig(num_workers=0)
    assert (config.rank, config.world_size) == (3, 8)
    config = WorkerConfig(rank=1, world_size=2, num_workers=0)
    assert (config.rank, config.world_size) == (1, 2)
    group = torch.distributed.new_group([1, 3, 5])
    config = WorkerConfig(num_workers=0, data_parallel_group=group)
    assert (config.rank, config.world_size) == (1, 3)

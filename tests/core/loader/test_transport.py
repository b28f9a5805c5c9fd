"""Batches from worker processes: every kind of tensor arrives as it left, and stays as it is while it is held."""

from __future__ import annotations

import gc
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import DefaultTaskEncoder, config_of, digest, numbers_of, slots_of, text_dataset, train_dataset
from hypothesis import given, settings, strategies as st
from made import made_once

from energon_bridge import SavableDataLoader, get_savable_loader, get_val_dataset
from energon_bridge.core.loader.transport import Arena, MemoryFile, Outbox, unpack
from energon_bridge.core.samples import streaming

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.uint16,
    torch.float8_e4m3fn,
]
data = made_once(text_dataset, train=[30, 30], val=[30, 30])


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype)
    raw = torch.arange(size.numel() * size.element_size()) % 2
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and digest(a) == digest(b)


# One message ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [True, False], ids=["as it is", "by numpy"])
def test_many_large_tensors_arrive(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a header of a few bytes names, and more than a message written into the caches holds."""
    if not compiled:
        monkeypatch.setattr(streaming, "copy", streaming.copy_with_numpy)
    generator = torch.Generator().manual_seed(0)
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in range(5_000, 5_300)]
    room = Arena(1 << 22)
    got = unpack(Outbox(room, kept=1).pack(sent), room)
    assert len(got) == 300
    assert all(map(torch.equal, sent, got))


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "memory file"])
def test_tensors_arrive_as_they_left(arena: bool) -> None:
    """In the pickle, and in blocks."""
    for dtype in DTYPES:
        for times in (1, 40):
            arrives_as_it_left(dtype, arena, times)


def arrives_as_it_left(dtype: torch.dtype, arena: bool, times: int) -> None:
    whole = tensor(dtype, 2 * times, 5, 2, 3)
    views = {
        "dense": whole,
        "channels first": whole.permute(0, 3, 1, 2),
        "transposed": whole.transpose(1, 2),
        "strided": whole[:, ::2, 1:6],
        "expanded": tensor(dtype, 1, 4, 1).expand(3 * times, 4, 2),
        "scalar": tensor(dtype),
        "empty": tensor(dtype, 0, 3),
        "empty inside": tensor(dtype, 3, 0, 2).transpose(0, 2),
        "one": tensor(dtype, 1, 1, 1),
    }
    box = Arena(1 << 20) if arena else None
    with closing(Outbox(box, kept=1)) as outbox:
        received = unpack(outbox.pack(views), box)
    assert received.keys() == views.keys()
    for name, sent in views.items():
        assert same(received[name], sent), name
    # What is a view for speed stays one.
    assert received["channels first"].stride() == whole.permute(0, 3, 1, 2).stride()
    received["dense"].zero_()  # batches may be written to
    assert same(received["transposed"], views["transposed"])


def test_other_values_arrive_as_they_left() -> None:
    parameter = torch.nn.Parameter(torch.rand(3))
    sent = {
        "arrays": [np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array("text"), np.float32(3)],
        "tensors": [
            torch.rand(3, requires_grad=True),
            parameter,
            torch.eye(3).to_sparse(),
            torch.rand(2).requires_grad_(False),
        ],
        "plain": ("a", b"b" * 1000, None, {"c": [1.5, True]}, {1, 2}),
    }
    arena = Arena(1 << 20)
    received = unpack(Outbox(arena, kept=0).pack(sent), arena)
    assert received["plain"] == sent["plain"]
    for here, there in zip(received["arrays"], sent["arrays"], strict=True):
        assert here.dtype == there.dtype
        assert np.array_equal(here, there)
    for here, there in zip(received["tensors"], sent["tensors"], strict=True):
        assert type(here) is type(there)
        assert here.requires_grad == there.requires_grad
        assert torch.equal(here.to_dense(), there.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "bsc"])
def test_memory_of_sparse_tensors_is_used_again(layout: str) -> None:
    sent = torch.eye(512).to_sparse(
        layout=getattr(torch, f"sparse_{layout}"), blocksize=(2, 2) if layout[0] == "b" else None
    )
    arena = Arena(1 << 20)
    received = unpack(Outbox(arena, kept=0).pack(sent), arena)
    assert received.layout == sent.layout
    assert (layout != "coo") or received.is_coalesced()
    assert torch.equal(received.to_dense(), sent.to_dense())
    assert any(slots_of(arena))
    del received
    assert not any(slots_of(arena))


@pytest.mark.parametrize(("size", "inside"), [(1000, True), (1 << 14, True), (1 << 16, False)])
def test_what_is_small_crosses_in_its_message(size: int, inside: bool) -> None:
    arena = Arena(1 << 20)
    message = Outbox(arena, kept=1).pack(["a" * size, torch.arange(9)])
    assert isinstance(message.place, bytes) is inside
    text, numbers = unpack(message, arena)
    assert len(text) == size
    numbers += 1  # of memory that is its own
    assert numbers.tolist() == list(range(1, 10))
    assert unpack(message, arena)[1].tolist() == list(range(9)) or not inside


def test_a_tensor_that_is_named_twice_is_one_tensor() -> None:
    one = torch.zeros(4)
    arena = Arena(1 << 20)
    received = unpack(Outbox(arena, kept=0).pack([one, one]), arena)
    received[0][0] = 1
    assert received[1][0] == 1


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 5)), max_size=60))
def test_blocks_never_overlap_and_are_used_again(steps: list[tuple[int, int]]) -> None:
    """Batches of any size, some kept for a while: all stay whole, and in the end every block is free."""
    arena = Arena(16_384)
    outbox = Outbox(arena, kept=1)
    held: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for number, (size, turns) in enumerate(steps):
        sent = torch.full((size,), number % 251, dtype=torch.uint8)
        held.append((sent, unpack(outbox.pack(sent), arena), turns))
        assert all(torch.equal(sent, received) for sent, received, _ in held)
        held = [(sent, received, turns - 1) for sent, received, turns in held if turns]
    held.clear()
    gc.collect()
    assert not any(slots_of(arena))
    assert not isinstance(outbox.pack(torch.zeros(15_000, dtype=torch.uint8)).place, MemoryFile)
    outbox.close()


def test_a_fork_that_lets_go_of_a_batch_does_not_give_its_memory_back() -> None:
    arena = Arena(1 << 16)
    held = [unpack(Outbox(arena, kept=0).pack(torch.full((5000,), 3, dtype=torch.uint8)), arena)]
    process = os.fork()
    if not process:
        held.clear()
        gc.collect()
        os._exit(len(arena._open))
    assert os.waitpid(process, 0)[1] == 0
    assert any(slots_of(arena))
    held.clear()
    gc.collect()
    assert not any(slots_of(arena))


def test_a_full_arena_falls_back_to_memory_files() -> None:
    arena = Arena(10_000)
    sent = [torch.full((1000,), n, dtype=torch.int32) for n in range(5)]
    with closing(Outbox(arena, kept=3)) as outbox:
        messages = [outbox.pack(one) for one in sent]
        assert [isinstance(message.place, MemoryFile) for message in messages] == [False, False, True, True, True]
        received = [unpack(message, arena) for message in messages]
        assert isinstance(outbox.pack(torch.zeros(20_000, dtype=torch.uint8)).place, MemoryFile)
        with pytest.raises(FileNotFoundError):  # only the last three are kept
            unpack(messages[2], arena)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


# Through loaders -----------------------------------------------------------------------------------------------------


class LargeEncoder(DefaultTaskEncoder):
    """Makes batches that are a multiple of their sample numbers, of a given size."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements

    def encode_batch(self, batch: Any) -> Any:
        numbers = torch.tensor([int(key) for key in batch.__key__])
        return {"__key__": batch.__key__, "values": numbers[:, None].expand(-1, self.elements).contiguous()}


def is_whole(batch: Any) -> bool:
    return all((row == number).all() for row, number in zip(batch["values"], numbers_of(batch), strict=True))


def loader_of(data: Path, elements: int, **kwargs: Any) -> SavableDataLoader:
    dataset = train_dataset(data, task_encoder=LargeEncoder(elements))
    return get_savable_loader(dataset, worker_config=config_of(1, 2, **kwargs))


def arenas_of(loader: SavableDataLoader) -> list[Arena]:
    return [worker.arena for worker in loader._delivery.pool._workers if worker.arena is not None]


def used_slots(loader: SavableDataLoader) -> int:
    gc.collect()
    return sum(slots_of(arena).count(2) for arena in arenas_of(loader))


def test_batches_that_are_kept_stay_whole(data: Path) -> None:
    """Also when their workers are gone, others run in their place, and far more are kept than have a place."""
    with closing(loader_of(data, 100)) as loader:
        kept = [batch for _, batch in zip(range(320), loader, strict=False)]
        state = loader.save_state_rank()
        loader.restore_state_rank(state)
        kept += [batch for _, batch in zip(range(50), loader, strict=False)]
        loader.close()
        kept += [batch for _, batch in zip(range(50), loader, strict=False)]
    assert all(is_whole(batch) for batch in kept)
    part = kept[3]["values"][0, 10:20]
    number = numbers_of(kept[3])[0]
    del kept, loader
    gc.collect()
    assert (part == number).all()  # a view of a view of a batch that is gone


def test_dropped_batches_give_their_memory_back(data: Path) -> None:
    with closing(loader_of(data, 1000)) as loader:
        batches = iter(loader)
        kept = [next(batches) for _ in range(10)]
        assert used_slots(loader) == 10
        for _ in range(120):
            assert is_whole(next(batches))
        assert used_slots(loader) == 10
        del kept[:7]
        assert used_slots(loader) == 3


def test_states_of_packing_lanes_keep_no_batch_in_memory(data: Path) -> None:
    dataset = train_dataset(data, "packing")
    with closing(get_savable_loader(dataset, worker_config=config_of(1, 2))) as loader:
        batches = iter(loader)
        for _ in range(60):
            next(batches)
        assert used_slots(loader) == 0


def test_batches_larger_than_an_arena_cross_all_the_same(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_bridge.core.loader.pool.new_arena", lambda **_: Arena(1 << 16))
    with closing(loader_of(data, 20_000)) as loader:
        kept = [batch for _, batch in zip(range(40), loader, strict=False)]
        assert used_slots(loader) == 0
        assert all(is_whole(batch) for batch in kept)


def test_without_arenas_batches_cross_all_the_same(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(**_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("energon_bridge.core.loader.pool.Arena", none_left)
    with closing(loader_of(data, 1000)) as loader:
        assert all(is_whole(batch) for _, batch in zip(range(40), loader, strict=False))


def test_validation_passes_that_are_broken_off_leak_nothing(data: Path) -> None:
    dataset = get_val_dataset(data, batch_size=2, task_encoder=LargeEncoder(1000))
    config = config_of(1, 2, persistent_workers=True, prefetch_factor=3)
    with closing(get_savable_loader(dataset, worker_config=config)) as loader:
        for _ in range(24):
            batches = [batch for _, batch in zip(range(2), loader, strict=False)]
            assert [numbers_of(batch) for batch in batches] == [[0, 1], [2, 3]]
            assert all(is_whole(batch) for batch in batches)
        in_use = sum(slot > 0 for arena in arenas_of(loader) for slot in slots_of(arena))
        # The batches held here, and what two workers may have made ahead.
        assert in_use <= 2 + 2 * (3 + 1)

"""What workers stack crosses to the training process without a copy; and the memory that they free stays with them."""

from __future__ import annotations

import ctypes
import os
import resource
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made import made_once

from energon_bridge import (
    CaptioningSample,
    DefaultTaskEncoder,
    SampleDecoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.loader.transport import Arena, BatchMessage, MemoryFile, Outbox, unpack
from energon_bridge.core.samples import streaming
from energon_bridge.core.samples.stacking import LENDER, batch_pad_stack, batch_stack, concat_pad
from energon_bridge.tools.testing import create_captioning_test_dataset

ROW = (3, 400, 300)
pictures = made_once(create_captioning_test_dataset, num_val=0, image_format="jpg")


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Return shared memory that batches are stacked in."""
    arena = Arena(1 << 24)
    token = LENDER.set(arena)
    yield arena
    LENDER.reset(token)


def row(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).remainder(251).to(dtype)


def images(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return CHW views over memory in the order HWC, as decoders give them."""
    return [row(dtype, 400, 300, 3).add(n).permute(2, 0, 1) for n in range(4)]


COLUMNS = {
    "stack": (batch_stack, [row(torch.float32, *ROW) + n for n in range(4)]),
    "stack short floats": (batch_stack, [row(torch.bfloat16, *ROW) + n for n in range(4)]),
    "stack bytes": (batch_stack, [row(torch.uint8, *ROW) + n for n in range(4)]),
    "stack views": (batch_stack, images(torch.float32)),
    "pad": (batch_pad_stack, [row(torch.float32, 3, 300 + n, 310 - n) for n in range(4)]),
    "pad views": (batch_pad_stack, [one[:, : 200 + n] for n, one in enumerate(images(torch.uint8))] * 2),
    "pad kinds": (batch_pad_stack, [row(torch.uint8, 3, 300, 300), row(torch.float64, 3, 300, 301)]),
    "join": (concat_pad, [row(torch.float32, 100 + n, 1176) for n in range(4)]),
    "join padded": (concat_pad, [row(torch.int64, 100, 1000 + n) for n in range(4)]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_what_is_stacked_lies_in_shared_memory(name: str, arena: Arena) -> None:
    stack, column = COLUMNS[name]
    token = LENDER.set(None)
    expected = stack(column)
    LENDER.reset(token)
    found = stack(column)
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
    assert arena.lent_at(found.data_ptr(), found.nbytes) is not None
    outbox = Outbox(arena, kept=1)
    message = outbox.pack({"batch": found})
    del found
    assert outbox.unshared(message) is message
    assert [place[-1] for _, place in message.elsewhere] == [expected.nbytes]
    received = unpack(message, arena)["batch"]
    assert torch.equal(received, expected)
    assert received.stride() == expected.stride()


class Marked(torch.Tensor):
    """A tensor of a type of its own."""


def test_small_and_special_tensors_are_stacked_as_ever(arena: Arena) -> None:
    special = row(torch.float32, *ROW)
    for column in (
        [row(torch.uint8, 3, 20, 20)] * 4,
        [special.clone().requires_grad_() for _ in range(2)],
        [special.as_subclass(Marked)] * 2,
    ):
        for stack, torchs in ((batch_stack, torch.stack), (concat_pad, torch.cat)):
            found, expected = stack(column), torchs(column)
            assert type(found) is type(expected)
            assert found.requires_grad == expected.requires_grad
            assert torch.equal(found, expected)
    assert not arena._lent


@pytest.mark.parametrize("room", [1 << 24, 3 << 20], ids=["room", "no room"])
def test_what_the_worker_keeps_is_out_of_reach_of_the_trainer(room: int) -> None:
    arena = Arena(room)
    token = LENDER.set(arena)
    kept = batch_stack([row(torch.float32, *ROW) + n for n in range(2)])
    LENDER.reset(token)
    before = kept.clone()
    outbox = Outbox(arena, kept=1)
    message = outbox.pack({"batch": kept, "other": torch.zeros(5000)})
    ((_, place),) = message.elsewhere
    sent = outbox.unshared(message)
    ((_, moved),) = sent.elsewhere
    assert moved != place
    assert isinstance(moved, MemoryFile) == (room == 3 << 20)
    received = unpack(sent, arena)
    assert torch.equal(received["batch"], before)
    assert not received["other"].any()
    received["batch"].zero_()
    assert torch.equal(kept, before)
    kept.fill_(5)
    assert not received["batch"].any()
    del kept, received
    assert arena.lend(room - (1 << 16)) is not None, "all of it is free again"
    outbox.close()


class Enlarging(DefaultTaskEncoder):
    """Makes new tensors of the images, as resizing or normalising does."""

    decoder = SampleDecoder(image_decode="torchrgb")

    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        sample.image = sample.image.repeat(1, 8, 8)
        return sample


class Keeping(Enlarging):
    """Keeps its last batches, and says whether they are what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=8)

    def encode_batch(self, batch: Any) -> Any:
        batch.caption = [str(all(torch.equal(image, copy) for image, copy in self.kept))]
        self.kept.append((batch.image, batch.image.clone()))
        return batch


class Packing(Enlarging):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[first : first + 8] for first in range(0, len(samples), 8)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return CaptioningSample.derive_from(
            samples[0], image=batch_stack([one.image for one in samples]), caption=samples[0].caption
        )


def batches(path: Path, encoder: Any, workers: int, number: int = 12, start_method: Any = "fork") -> Iterator[Any]:
    packs = isinstance(encoder, Packing)
    dataset = get_train_dataset(
        path,
        batch_size=None if packs else 8,
        packing_buffer_size=16 if packs else None,
        shuffle_buffer_size=10,
        max_samples_per_sequence=10,
        task_encoder=encoder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers, start_method=start_method),
    )
    with closing(get_savable_loader(dataset)) as loader:
        yield from islice(loader, number)


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note of each message of a worker how many bytes crossed without a copy."""
    seen: list[int] = []

    def spy(message: BatchMessage, arena: Arena | None) -> Any:
        seen.append(sum(place[-1] for _, place in message.elsewhere))
        return unpack(message, arena)

    monkeypatch.setattr("energon_bridge.core.loader.pool.unpack", spy)
    return seen


@pytest.mark.parametrize("kind", [Enlarging, Packing])
def test_batches_are_stacked_where_they_cross(pictures: Path, kind: Any, crossed: list[int]) -> None:
    expected = [batch.image for batch in batches(pictures, kind(), 0)]
    for batch, image in zip(batches(pictures, kind(), 1), expected, strict=True):
        assert torch.equal(batch.image, image)
    assert crossed[:12] == [image.nbytes if image.nbytes >= streaming.LARGE else 0 for image in expected]


def test_batches_that_an_encoder_keeps_do_not_change(pictures: Path, crossed: list[int]) -> None:
    expected = [batch.image for batch in batches(pictures, Enlarging(), 0)]
    for batch, image in zip(batches(pictures, Keeping(), 1), expected, strict=True):
        assert torch.equal(batch.image, image)
        assert batch.caption == ["True"]
        batch.image.zero_()
    assert set(crossed) == {expected[0].nbytes}, "the copies cross without a further one"


class Allocating(DefaultTaskEncoder):
    """Says how many fresh pages it takes to make and drop arrays again."""

    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        def make() -> list[np.ndarray]:
            return [np.ones(3 << 20, np.uint8) for _ in range(8)]

        for _ in range(3):
            make()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        make()
        sample.image = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before])
        return sample


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc's malloc")
@pytest.mark.skipif(any(name.startswith("MALLOC_") for name in os.environ), reason="the user's own settings count")
def test_workers_keep_the_memory_that_they_free(pictures: Path) -> None:
    # Not forked: the heap of a process that has run many tests may have no room to grow.
    (batch,) = batches(pictures, Allocating(), 1, number=1, start_method="forkserver")
    assert batch.image.max() < 1000  # of 6,144 pages

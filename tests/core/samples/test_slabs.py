"""Slabs: images decoded side by side, batches that need no copy, and values that are those of separate memory."""

from __future__ import annotations

import gc
import io
import math
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import slots_of
from made import made_once
from PIL import Image

from energon_bridge import (
    CaptioningSample,
    DefaultTaskEncoder,
    SampleDecoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.errors import FatalSampleError
from energon_bridge.core.loader.transport import Arena, BatchMessage, Outbox, unpack
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.samples.stacking import SLABS, Slab, SlabPool, batch_stack, block_over
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

MICROBATCHES = 20
pictures = made_once(create_captioning_test_dataset, num_val=0, image_format="jpg")


class Encoder(DefaultTaskEncoder):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.decoder = SampleDecoder(image_decode=form)


class Skipping(Encoder):
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        if sample.caption.endswith("3"):
            raise SkipSample
        return sample


class Changing(Encoder):
    """Writes into the image it got, keeps every image, and replaces some."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.kept: list[torch.Tensor] = []

    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        if sample.image.dtype == torch.uint8:
            sample.image[..., 0, 0] = 7
        self.kept.append(sample.image)
        if sample.caption.endswith("5"):
            sample.image = sample.image.clone()
        return sample


def batches(path: Path, encoder: Any, *, threads: int, workers: int = 0, **options: Any) -> list[Any]:
    dataset = get_train_dataset(
        path,
        batch_size=4,
        shuffle_buffer_size=10,
        max_samples_per_sequence=10,
        task_encoder=encoder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers, decode_threads=threads),
        **options,
    )
    loader = get_savable_loader(dataset)
    stream = iter(loader)
    try:
        return [next(stream) for _ in range(MICROBATCHES)]
    finally:
        loader.close()


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each column of images whether it became a batch without a copy."""
    seen: list[bool] = []
    adopt = SlabPool.adopt

    def spy(pool: SlabPool, rows: Any) -> torch.Tensor | None:
        batch = adopt(pool, rows)
        seen.append(batch is not None)
        return batch

    monkeypatch.setattr(SlabPool, "adopt", spy)
    return seen


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("kind", "form"),
    [(Encoder, "torchrgb8"), (Encoder, "torchrgb"), (Skipping, "torchrgba8"), (Changing, "torchl8")],
)
def test_batches_hold_what_separate_memory_holds(
    pictures: Path,
    kind: type[Encoder],
    form: str,
    threads: int,
    adopted: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = batches(pictures, kind(form), threads=threads)
    assert adopted
    assert all(adopted) or kind is not Encoder
    monkeypatch.setattr(SlabPool, "slab", lambda pool, rows: None)
    expected = batches(pictures, kind(form), threads=threads)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.__key__ == theirs.__key__
        assert ours.image.shape == theirs.image.shape
        assert ours.image.stride() == theirs.image.stride()
        assert torch.equal(ours.image, theirs.image)


CODE = """
def sample_loader(parts):
    return {"image": parts["jpg"], "caption": parts["txt"]}

def part_filter(name):
    return name in ("jpg", "txt")
"""
CODE_YAML = (
    "__module__: megatron.energon\n__class__: CaptioningSample\n"
    "sample_loader: code.py:sample_loader\npart_filter: code.py:part_filter\n"
)


def test_images_that_a_sample_loader_gets_are_not_copied(tmp_path: Path, pictures: Path, adopted: list[bool]) -> None:
    folder = create_captioning_test_dataset(tmp_path, num_val=0, image_format="jpg") / ".nv-meta"
    (folder / "code.py").write_text(CODE)
    (folder / "dataset.yaml").write_text(CODE_YAML)
    found = batches(tmp_path, Encoder("torchrgb8"), threads=1, trust_remote_code=True)
    assert adopted[-1], "the names of the parts are known by then"
    plain = batches(pictures, Encoder("torchrgb8"), threads=1)
    images = {key: image for one in plain for key, image in zip(one.__key__, one.image, strict=True)}
    assert all(torch.equal(one.image, torch.stack([images[key] for key in one.__key__])) for one in found)


def test_batches_with_gaps_are_copied(pictures: Path, adopted: list[bool]) -> None:
    batches(pictures, Changing("torchrgb8"), threads=1)
    assert not all(adopted)


def test_no_batch_changes_while_it_is_kept(pictures: Path) -> None:
    encoder = Changing("torchrgb8")
    kept = batches(pictures, encoder, threads=2)
    again = batches(pictures, Changing("torchrgb8"), threads=1)
    assert all(torch.equal(one.image, other.image) for one, other in zip(kept, again, strict=True))
    memory = {image.untyped_storage().data_ptr() + image.storage_offset() for image in encoder.kept}
    assert len(memory) == len(encoder.kept)


def test_images_of_many_sizes_stop_asking_for_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples: dict[str, dict[str, bytes]] = {}
    for size in range(8, 48):
        stream = io.BytesIO()
        Image.new("RGB", (size, 16), (size, 0, 0)).save(stream, "jpeg")
        samples[f"s{size}"] = {"jpg": stream.getvalue(), "txt": b"a picture"}
    write_shard(tmp_path / "shard.tar", samples)
    yaml = render_dataset_yaml("CaptioningSample", {"image": "jpg", "caption": "txt"})
    prepare_dataset(tmp_path, split=parse_patterns(["train:shard.tar"]), dataset_yaml=yaml)
    given: list[bool] = []
    slab = SlabPool.slab

    def spy(pool: SlabPool, rows: int) -> Slab | None:
        made = slab(pool, rows)
        given.append(made is not None)
        return made

    monkeypatch.setattr(SlabPool, "slab", spy)
    found = batches(tmp_path, Encoder("torchrgb8"), threads=1)
    assert given[0]
    assert not given[-1]
    monkeypatch.setattr(SlabPool, "slab", lambda pool, rows: None)
    for ours, theirs in zip(found, batches(tmp_path, Encoder("torchrgb8"), threads=1), strict=True):
        assert torch.equal(ours.image, theirs.image)


def rows_of(
    slab: Slab, count: int, shape: tuple[int, int, int] = (2, 2, 1), dtype: Any = np.uint8
) -> list[torch.Tensor]:
    """Return the first rows of a slab, each filled with its number."""
    rows = slab.rows(shape, dtype)
    assert rows is not None
    return [row.fill_(number) for number, row in enumerate(rows[1][:count])]


def test_memory_is_used_again_only_when_nobody_has_it() -> None:
    pool = SlabPool()
    slab = Slab(pool, 3)
    rows = rows_of(slab, 3)
    address = rows[0].data_ptr()
    token = SLABS.set(pool)
    try:
        batch = batch_stack(rows)
    finally:
        SLABS.reset(token)
    assert batch.data_ptr() == address
    piece = batch[1]
    del slab, rows, batch
    gc.collect()
    assert rows_of(Slab(pool, 3), 1)[0].data_ptr() != address
    del piece
    assert rows_of(Slab(pool, 3), 1)[0].data_ptr() == address
    assert rows_of(Slab(pool, 3), 1, dtype=np.float32)[0].data_ptr() != address


@pytest.mark.parametrize("change", ["order", "gap", "foreign", "dtype", "short"])
def test_rows_that_do_not_lie_as_a_batch_are_copied(change: str) -> None:
    pool = SlabPool()
    slab = Slab(pool, 4)
    rows = rows_of(slab, 4)
    if change == "order":
        rows = rows[::-1]
    elif change == "gap":
        del rows[1]
    elif change == "foreign":
        rows = list(torch.arange(16, dtype=torch.uint8).reshape(4, 1, 2, 2))
    elif change == "dtype":
        rows[2] = rows[2].view(torch.int8)
    else:
        rows[3] = rows[3][:, :, :1]
    assert pool.adopt(rows) is None
    rows = rows_of(Slab(pool, 4), 4, (4, 4, 3), np.float32)
    inside, one, piece = pool.adopt(rows[1:3]), pool.adopt(rows[:1]), pool.adopt([rows[0][:, 1:3, 1:3]])
    assert inside is not None
    assert torch.equal(inside, torch.stack(rows[1:3]))
    assert (one is None, piece is None) == (False, True)


class Inverting(SampleDecoder):
    """Has a say in every part."""

    def decode(self, part_name: str, data: Any) -> Any:
        value = super().decode(part_name, data)
        return 255 - value if isinstance(value, torch.Tensor) else value


def test_a_decoder_with_a_decode_of_its_own_is_asked_for_every_part(pictures: Path) -> None:
    changed, plain = Encoder("torchrgb8"), Encoder("torchrgb8")
    changed.decoder = Inverting(image_decode="torchrgb8")
    pairs = zip(batches(pictures, changed, threads=1), batches(pictures, plain, threads=1), strict=True)
    assert all(torch.equal(ours.image, 255 - theirs.image) for ours, theirs in pairs)


class Whole(SampleDecoder):
    """Has a say in every sample."""

    def __call__(self, parts: Any) -> Any:
        assert isinstance(parts["jpg"], bytes)
        assert parts["__sources__"][0].shard_name == parts["__shard__"]
        made = super().__call__(parts)
        return {**made, "jpg": 255 - made["jpg"], "__key__": "another"}


def test_a_decoder_with_a_call_of_its_own_is_asked_for_every_sample(pictures: Path) -> None:
    changed, plain = Encoder("torchrgb8"), Encoder("torchrgb8")
    changed.decoder = Whole(image_decode="torchrgb8")
    pairs = zip(batches(pictures, changed, threads=1), batches(pictures, plain, threads=1), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(ours.image, 255 - theirs.image)
        assert ours.__key__ == theirs.__key__


def test_a_decoder_that_returns_nothing_stops_the_run(pictures: Path) -> None:
    encoder = Encoder("torchrgb8")
    encoder.decoder = type("Silent", (SampleDecoder,), {"__call__": lambda self, parts: None})()
    with pytest.raises(FatalSampleError, match="__call__ of the decoder returned None: return the dict of parts"):
        batches(pictures, encoder, threads=1)


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 8, 3)])
def test_pixels_do_not_start_where_they_would_be_written_past_the_caches(shape: tuple[int, int, int]) -> None:
    for dtype in (np.uint8, np.float32):
        rows = Slab(SlabPool(), 2).rows(shape, dtype)
        assert rows is not None
        assert bool(rows[0][0].ctypes.data % 16) == (dtype is np.uint8)


def test_a_batch_hook_that_fails_leaves_no_pool_behind(pictures: Path) -> None:
    class Failing(Encoder):
        def batch(self, samples: Any) -> Any:
            raise ValueError("refused")

    token = SLABS.set(None)
    try:
        with pytest.raises(FatalSampleError, match="refused"):
            batches(pictures, Failing("torchrgb8"), threads=1)
        assert SLABS.get() is None
    finally:
        SLABS.reset(token)


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each message of a worker whether something of it crossed without a copy."""
    seen: list[bool] = []

    def spy(message: BatchMessage, arena: Arena | None) -> Any:
        seen.append(bool(message.elsewhere))
        return unpack(message, arena)

    monkeypatch.setattr("energon_bridge.core.loader.pool.unpack", spy)
    return seen


@pytest.mark.parametrize(("threads", "room"), [(1, None), (2, None), (1, 1 << 16)])
def test_batches_of_workers_are_not_copied(
    pictures: Path, threads: int, room: int | None, crossed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if room:  # too little for a batch
        monkeypatch.setattr("energon_bridge.core.loader.pool.new_arena", lambda **_: Arena(room))
    found = batches(pictures, Encoder("torchrgb"), threads=threads, workers=2)
    assert len(crossed) >= MICROBATCHES
    # A loading thread may still have its hands on the last image when the batch is sent; then it is copied.
    assert room or sum(crossed) > len(crossed) - (1 if threads == 1 else MICROBATCHES // 2)
    for ours, theirs in zip(found, batches(pictures, Encoder("torchrgb"), threads=1), strict=True):
        assert ours.__key__ == theirs.__key__
        assert torch.equal(ours.image, theirs.image)


class Keeping(Encoder):
    """Keeps its last images, and says whether they are what they were."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=30)

    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        sample.caption = str(all(torch.equal(image, copy) for image, copy in self.kept))
        self.kept.append((sample.image, sample.image.clone()))
        return sample


def test_batches_of_which_a_worker_keeps_something_are_copied(pictures: Path, crossed: list[bool]) -> None:
    """The trainer may write into a batch; what an encoder keeps must not change."""
    expected = [batch.image for batch in batches(pictures, Encoder("torchrgb8"), threads=1)]
    dataset = get_train_dataset(
        pictures,
        batch_size=4,
        shuffle_buffer_size=10,
        max_samples_per_sequence=10,
        task_encoder=Keeping("torchrgb8"),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=1, decode_threads=1),
    )
    with closing(get_savable_loader(dataset)) as loader:
        for batch, image in zip(loader, expected, strict=False):
            assert torch.equal(batch.image, image)
            assert set(batch.caption) == {"True"}
            batch.image.zero_()
    assert len(crossed) >= MICROBATCHES


VIEWS: list[Callable[[Any], Any]] = [
    lambda block: block[3:7],
    lambda block: block.view(np.ndarray)[3:7],
    lambda block: np.asarray(block[1:])[2:],
    lambda block: np.ndarray((2, 2), np.uint8, block),
    lambda block: type(block)((2, 2), np.uint8, block),
    lambda block: block.view(np.float32).reshape(2, -1).T,
    lambda block: torch.from_numpy(block)[2:].view(2, -1),
    lambda block: torch.from_numpy(block.view(np.ndarray)).numpy()[1:],
    lambda block: torch.frombuffer(block, dtype=torch.uint8)[1:].untyped_storage(),
    lambda block: memoryview(block)[3:],
    lambda block: np.frombuffer(memoryview(block), np.uint8)[1:],
]


def test_a_block_stays_while_there_is_a_view_of_any_kind() -> None:
    gone: list[int] = []
    blocks = [block_over(np.zeros(16, np.uint8)) for _ in VIEWS]
    references = [weakref.ref(one, lambda _, n=number: gone.append(n)) for number, one in enumerate(blocks)]
    pieces = [view(block) for view, block in zip(VIEWS, blocks, strict=True)]
    del blocks
    gc.collect()
    assert not gone
    assert all(reference() is not None for reference in references)
    while pieces:
        pieces.pop()
        assert gone[-1:] == [len(pieces)]


def test_lent_memory_is_used_again_when_neither_side_has_it() -> None:
    arena = Arena(1 << 20)
    outbox = Outbox(arena, kept=0)
    pool = SlabPool()
    pool.lender = arena
    shape = (64, 64, 3)
    size = 4 * math.prod(shape)

    def batch_of(value: int) -> torch.Tensor:
        rows = [row.fill_(value) for row in rows_of(Slab(pool, 4), 4, shape)]
        batch = pool.adopt(rows)
        assert batch is not None
        return batch

    sent = batch_of(1)
    message = outbox.pack({"image": sent})
    assert [place[-1] for _, place in message.elsewhere] == [size]
    received = unpack(message, arena)["image"]
    assert torch.equal(received, sent)
    # A second message with the same memory gets a copy, which later writes of the receiver do not reach.
    again = outbox.pack({"image": sent})
    assert not again.elsewhere
    received.fill_(9)
    assert unpack(again, arena)["image"].eq(1).all()
    address = sent.data_ptr()
    del sent
    gc.collect()
    assert batch_of(2).data_ptr() != address, "the receiver still has it"
    del received
    gc.collect()
    assert batch_of(3).data_ptr() == address
    # A batch that is never sent leaves nothing in use, nor does one that is dropped on the way.
    del message, again
    outbox.pack({"image": batch_of(4)})
    arena.forget()
    for value in range(40):
        batch_of(value)
    assert sum(slot > 0 for slot in slots_of(arena)) <= 1


IN_A_NEW_INTERPRETER = """
import os, sys, threading
import torch
torch.set_num_threads(4)

def threads_of_torch():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

from energon_bridge import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.samples.stacking import batch_stack, concat_pad
before = threads_of_torch()
for form in ("torchrgb8", "torchrgb"):
    encoder = type("Encoder", (DefaultTaskEncoder,), {"decoder": SampleDecoder(image_decode=form)})()
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(sys.argv[1], batch_size=8, task_encoder=encoder, worker_config=config)
    batches = iter(get_savable_loader(dataset))
    shapes = {next(batches).image.shape for _ in range(4)}
rows = [torch.empty(3, 200, 200, dtype=torch.bfloat16) for _ in range(4)]
batch_stack(rows), concat_pad(rows), concat_pad([rows[0], rows[1][:, 1:]])
threads = threads_of_torch() - before
torch.ones(1 << 20).add_(1)
print(shapes, threads, threads_of_torch() - before)
"""


def test_no_batch_starts_threads_of_torch(tmp_path: Path):
    """Without workers they would compete with the loading threads, and with the training step."""
    (tmp_path / "data").mkdir()
    images = {}
    for number in range(40):
        out = io.BytesIO()
        Image.effect_noise((200 + number, 240 - number), 80).convert("RGB").save(out, "JPEG")
        images[f"{number:02}"] = {"jpg": out.getvalue(), "txt": b"noise"}
    write_shard(tmp_path / "data" / "shard.tar", images)
    yaml = render_dataset_yaml("CaptioningSample", {"image": "jpg", "caption": "txt"})
    prepare_dataset(tmp_path / "data", split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_INTERPRETER, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, ours, torchs = done.stdout.split()
    assert (int(ours), int(torchs)) == (0, 3), done.stdout

"""Pixels of a microbatch are made on the decoding threads, in the memory of the batch: values, failures, resuming."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers")

from crude import prepared
from families import encoder_of
from processors import template_of, tiny_processor

from energon_bridge import Cooker, SkipSample, WorkerConfig, basic_sample_keys, get_savable_loader, get_train_dataset
from energon_bridge.core.samples import stacking
from energon_bridge.core.samples.stacking import LENDER, SlabPool
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder
from energon_bridge.models.images.native import Uncut
from energon_bridge.models.images.transforms import normalise

NUMBER, BROKEN = 24, 7
_AREA = {"min_pixels": 64, "max_pixels": 160 * 160}


def cook(sample: Any) -> ChatSample:
    number = int(sample["json"])
    turns = [{"role": "user", "content": "<image>" * (1 + number % 2)}, {"role": "assistant", "content": str(number)}]
    return ChatSample(**basic_sample_keys(sample), messages=turns, images=[sample["jpg"]] * (1 + number % 2))


class Plain(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook),)


def cook_one(sample: Any) -> ChatSample:
    made = cook(sample)
    made.messages[0]["content"], made.images = "<image>", made.images[:1]
    return made


class OneImage(ChatTemplateTaskEncoder):
    """All samples have one image: the pixels of several are made in one call."""

    cookers = (Cooker(cook_one),)


class Doubling(Plain):
    """Some samples give two, some none."""

    def preencode_sample(self, sample: Any) -> Any:
        number = int(sample.messages[1]["content"])
        if number % 5 == 0:
            raise SkipSample
        made = super().preencode_sample(sample)
        yield made
        if number % 3 == 0:
            yield made


class Turning(Plain):
    """Sees images in its last hook."""

    def postencode_sample(self, sample: Any) -> Any:
        assert all(isinstance(image, np.ndarray | Image.Image) for image in sample.images)
        return super().postencode_sample(sample)


@cache
def known(family: str) -> ChatTemplateTaskEncoder:
    if family.endswith("Processor"):
        processor = tiny_processor(family)
        return ChatTemplateTaskEncoder.for_processor(processor, ChatConfig(chat_template=template_of(processor)))
    return encoder_of(family, **(_AREA if family != "llava" else {}))


def encoder(kind: type[ChatTemplateTaskEncoder], family: str, pixels: Any) -> ChatTemplateTaskEncoder:
    made = known(family)
    config = replace(made.config, pixels=pixels, seq_length=4096 if not family.endswith("Processor") else 30_000)
    return kind(made.tokenizer, made.family, config)


def written(folder: Path, broken: int | None) -> Path:
    samples = {}
    for number in range(NUMBER):
        size = ((160, 120), (90, 200), (64, 64))[number % 3]
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        data = file.getvalue()
        # A header that says how large it is, and nothing behind it.
        samples[f"{number:03d}"] = {
            "jpg": data[: data.index(b"\xff\xda") + 20] if number == broken else data,
            "json": json.dumps(number).encode(),
        }
    return prepared(folder, samples)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("photographs") / "data", BROKEN)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("sound") / "data", None)


def loader_of(data: Path, task_encoder: Any, *, packs: bool, workers: int = 0, batch_size: int | None = 1) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers, num_lanes=1, decode_threads=2)
    dataset = get_train_dataset(
        data,
        batch_size=batch_size if packs else 4,
        task_encoder=task_encoder,
        worker_config=config,
        packing_buffer_size=6 if packs else None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    return get_savable_loader(dataset)


def taken(loader: Any, number: int = 6) -> Iterator[Any]:
    with closing(loader):
        yield from islice(loader, number)


def pixels_of(batch: Any) -> torch.Tensor:
    made: torch.Tensor = batch.visual["pixel_values"] if hasattr(batch, "visual") else batch.pixel_values
    assert made.is_floating_point() or made.dtype == torch.uint8
    return made


@pytest.mark.parametrize(
    ("kind", "family", "packs", "batch_size", "workers"),
    [
        (Plain, "qwen2_vl", True, 1, 0),
        (Plain, "qwen2_vl", True, 1, 1),
        (Plain, "qwen2_vl", True, 2, 0),
        (Plain, "qwen2_vl", True, None, 0),
        (Plain, "qwen2_vl", False, 4, 0),
        (Plain, "llava", False, 4, 1),
        (Doubling, "llava", False, 4, 0),
        (Doubling, "qwen2_vl", True, 1, 0),
        (Turning, "qwen2_vl", True, 1, 0),
        (Plain, "Gemma3Processor", False, 4, 0),
        (Doubling, "AyaVisionProcessor", True, 1, 1),
        (Plain, "Idefics3Processor", False, 4, 0),
        (Plain, "LightOnOcrProcessor", True, 2, 0),
        (Turning, "MllamaProcessor", False, 4, 0),
    ],
)
def test_batches_are_those_of_the_processor(
    photographs: Path, kind: Any, family: str, packs: bool, batch_size: int | None, workers: int
) -> None:
    processed = loader_of(photographs, encoder(kind, family, "processor"), packs=packs, batch_size=batch_size)
    native = loader_of(photographs, encoder(kind, family, None), packs=packs, batch_size=batch_size, workers=workers)
    for made, expected in zip(taken(native), taken(processed), strict=True):
        assert made.__key__ == expected.__key__
        assert torch.equal(made.tokens, expected.tokens)
        assert torch.equal(made.labels, expected.labels)
        assert torch.equal(pixels_of(made), pixels_of(expected))


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("family", ["qwen2_vl", "Gemma3Processor"])
def test_pixels_are_not_copied_into_the_batch(
    sound: Path, packs: bool, family: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[int] = []
    join = stacking._cat
    monkeypatch.setattr(stacking, "_cat", lambda rows: joined.append(rows[0].nbytes) or join(rows))
    made = known(family)
    config = replace(made.config, pixels_dtype=dtype, seq_length=4096)
    task_encoder = (Plain if family == "qwen2_vl" else OneImage)(made.tokenizer, made.family, config)
    batches = []
    for batch in taken(loader_of(sound, task_encoder, packs=packs)):
        batches.append((batch, pixels_of(batch).clone()))
    assert joined or family != "qwen2_vl"  # tokens and grids
    assert max(joined, default=0) < 20_000
    assert all(torch.equal(pixels_of(batch), pixels) for batch, pixels in batches)  # batches that are kept stay


@pytest.mark.parametrize("kind", [Plain, Doubling])
def test_a_run_goes_on_where_it_was_saved(photographs: Path, kind: Any) -> None:
    task_encoder = encoder(kind, "llava", None)
    states, expected = [], []
    with closing(loader_of(photographs, task_encoder, packs=False)) as loader:
        for batch in islice(loader, 7):
            expected.append((batch.__key__, pixels_of(batch)))
            states.append(loader.save_state_rank())
    for number, state in enumerate(states[:4], 1):
        loader = loader_of(photographs, task_encoder, packs=False)
        loader.restore_state_rank(state)
        for batch, (key, pixels) in zip(taken(loader, 3), expected[number:], strict=False):
            assert batch.__key__ == key
            assert torch.equal(pixels_of(batch), pixels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalised_batches_lie_in_memory_that_is_lent(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    images = [torch.from_numpy(rng.integers(0, 256, (3, 400, 300), np.uint8)) for _ in range(4)]
    expected = normalise(images, 0.5, 0.25, dtype)
    pool = SlabPool()
    token = LENDER.set(pool)
    try:
        made = normalise(images, 0.5, 0.25, dtype)
        address = made.data_ptr()
        assert pool.lent_at(address, made.nbytes) is not None
        assert torch.equal(made, expected)
        kept = made[1]
        other = normalise(images[::-1], 0.5, 0.25, dtype)
        assert other.data_ptr() != address
        del made, kept
        assert normalise(images[:4], 0.5, 0.25, dtype).data_ptr() == address  # used again, now that nobody has it
    finally:
        LENDER.reset(token)


def test_pieces_of_pixels_joined_in_their_order_are_the_same_memory() -> None:
    plain = torch.arange(60.0).reshape(5, 3, 4)
    pixels = plain.as_subclass(Uncut)
    for pieces in ([pixels], [pixels[:2], pixels[2:]], [pixels[1:2], pixels[2:4]]):
        joined = torch.cat(pieces)
        start = int(pieces[0][0, 0, 0]) // 12
        assert torch.equal(joined.as_subclass(torch.Tensor), plain[start : start + len(joined)])
        assert joined.data_ptr() == pieces[0].data_ptr()
        assert type(joined.as_subclass(torch.Tensor)) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_numbers_beside_pixels_are_written_and_looked_at_as_those_of_plain_tensors(dtype: torch.dtype) -> None:
    """Emu 3's processor writes sizes into its texts, LLaVA's looks at pixels in numpy."""
    plain = torch.tensor([[46, 90]], dtype=dtype)
    sizes = plain.as_subclass(Uncut)
    height, width = sizes[0]
    assert f"{height}*{width:>4}" == f"{plain[0, 0]}*{plain[0, 1]:>4}"
    np.testing.assert_array_equal(sizes.detach().cpu().numpy(), [[46, 90]])


@pytest.mark.parametrize("dim", [0, -1])
def test_other_pieces_are_joined_as_torch_joins_them(dim: int) -> None:
    plain = torch.arange(60.0).reshape(5, 3, 4)
    orders = [[1, 0], [0, 0], [0, 2], [0, 1]]
    for order in orders:
        pieces = [plain[2 * place : 2 * place + 1] for place in order]
        joined = torch.cat([piece.as_subclass(Uncut) for piece in pieces], dim=dim)
        assert torch.equal(joined.as_subclass(torch.Tensor), torch.cat(pieces, dim=dim)), order
    columns = [plain[..., :2], plain[..., 2:]]  # adjacent in memory, but not whole rows
    joined = torch.cat([piece.as_subclass(Uncut) for piece in columns], dim=dim)
    assert torch.equal(joined.as_subclass(torch.Tensor), torch.cat(columns, dim=dim))
    assert joined.data_ptr() != plain.data_ptr()

"""Seeing what one has: texts and tables of samples, batches, datasets and loaders; and what to use instead of them."""

from __future__ import annotations

import base64
import copy
import dataclasses
import io
import logging
import os
import pickle
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import train_dataset
from made import made_once
from PIL import Image
from transformers import CLIPImageProcessorPil

from energon_bridge import (
    CaptioningSample,
    CrudeSample,
    DefaultTaskEncoder,
    EnergonDataloader,
    EnergonMultiModalDataModule,
    Sample,
    SampleDecoder,
    WorkerConfig,
    edataclass,
    get_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.compat.wrapped import EpochizeDataset, LimitDataset, RepeatDataset
from energon_bridge.core.errors import WrongUseError
from energon_bridge.core.samples import Batch
from energon_bridge.tools.testing import create_captioning_test_dataset

data = made_once(create_captioning_test_dataset)


def config(ranks: int = 1, rank: int = 0, **settings: Any) -> WorkerConfig:
    return WorkerConfig(rank=rank, world_size=ranks, **({"num_workers": 0} | settings))


def captions(**fields: Any) -> CaptioningSample:
    values = {"__key__": "k", "image": torch.zeros(3, 4, 5), "caption": "a"} | fields
    return CaptioningSample(**values)


# Texts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (captions(), "CaptioningSample('k': image float32[3, 4, 5], caption 'a')"),
        (captions(caption="x" * 500), f"CaptioningSample('k': image float32[3, 4, 5], caption '{'x' * 60}…')"),
        (
            captions(__key__=["a", "b"], image=torch.zeros(2, 3, 4, 5), caption=["a", "b"]),
            "CaptioningSample(batch of 2: image float32[2, 3, 4, 5], caption 2 x str)",
        ),
        (
            captions(__key__=["a", "b"], __valid__=torch.tensor([True, False]), caption=["a", 1]),
            "CaptioningSample(batch of 2, 1 of them valid: image float32[3, 4, 5], caption 2 x (int, str))",
        ),
        (captions(image=None, caption=b"123"), "CaptioningSample('k': caption 3 bytes)"),
        (captions(image=np.zeros((2, 2), np.uint8), caption=1), "CaptioningSample('k': image uint8[2, 2], caption 1)"),
        (
            captions(image=Image.new("L", (4, 2)), caption=[]),
            "CaptioningSample('k': image L image 4 x 2, caption empty",
        ),
        (captions(image={"a": 1, "b": 2}, caption=object()), "image dict of a, b, caption object)"),
        (Batch(__key__=["a"]), "Batch(batch of 1)"),
        (
            CrudeSample({"__key__": "k", "json": {"a": 1}, "jpg": b"12"}),
            "CrudeSample('k': json dict of a, jpg 2 bytes)",
        ),
        (CrudeSample({"txt": "a"}), "CrudeSample(no key: txt 'a')"),
    ],
)
def test_a_record_is_described_in_one_line(record: Any, text: str):
    assert text in repr(record)
    assert "\n" not in repr(record)
    assert str(record) == repr(record)


@edataclass
class Wide(Sample):
    """A sample of many fields."""

    values: Any = None
    first: str = "f" * 50
    second: str = "s" * 50
    third: str = "t" * 50


@dataclass
class Plain(CaptioningSample):
    """A sample of somebody who uses dataclasses as they are."""

    more: int = 3


class Named(CaptioningSample):
    """A sample with a text of its own."""

    def __repr__(self) -> str:
        return "mine"


class Hostile:
    """Raises when it is looked at."""

    @property
    def dtype(self) -> Any:
        raise ValueError("no")

    shape = dtype

    def __repr__(self) -> str:
        raise ValueError("no")


def test_long_records_have_a_line_for_each_field_and_users_may_describe_their_own():
    lines = [f"  first '{'f' * 50}',", f"  second '{'s' * 50}',", f"  third '{'t' * 50}')"]
    assert repr(Wide(__key__="k")).splitlines() == ["Wide('k':", *lines]
    fields = {"__key__": "k", "image": None, "caption": "a"}
    assert repr(Plain(**fields)) == "Plain('k': caption 'a', more 3)"
    assert repr(Named(**fields)) == "mine"


def test_no_value_can_break_a_text_or_make_it_long():
    record = Wide(__key__="k" * 10_000, values=[Hostile()], first="a" * 100_000, second=Hostile())
    assert len(repr(record)) < 1000
    assert "values 1 x Hostile" in repr(record)
    many = CrudeSample({f"part{number}": 1 for number in range(500)})
    assert "and 476 more fields" in repr(many)
    blank = object.__new__(CaptioningSample)  # as a debugger finds it in its constructor
    assert repr(blank) == "CaptioningSample(no key)"


def test_datasets_loaders_and_modules_are_described(data: Path):
    dataset = get_train_dataset(data, batch_size=4, worker_config=config())
    expected = [
        "DatasetSpec for training",
        "  40 samples of 1 dataset, 10 batches of 4 samples",
        f"  {data} [train]: 40 CaptioningSamples in 4 shards",
    ]
    assert repr(dataset).splitlines() == expected
    loader = get_loader(dataset)
    assert repr(loader).splitlines()[1:] == [f"  {line}" for line in expected]
    first = "SavableDataLoader of rank 0 of 1, 0 workers, 48 lanes, 0 microbatches delivered by the run"
    assert repr(loader).splitlines()[0] == first
    next(iter(loader))
    assert "1 microbatch delivered" in repr(loader)
    assert repr(EnergonDataloader(loader)).startswith("EnergonDataloader, 0 batches delivered since it was made\n  Sav")
    val = get_val_dataset(data, batch_size=None, worker_config=config())
    assert "DatasetSpec for validation\n  10 samples of 1 dataset, 10 batches of one sample" in repr(val)
    mix = get_train_dataset([(str(data), 1)] * 8, batch_size=4, worker_config=config())
    assert repr(mix).endswith("and 2 more")
    loader.close()
    module = EnergonMultiModalDataModule(str(data), None, None, task_encoder=DefaultTaskEncoder(), num_workers=0)
    assert str(module).endswith("training: not opened yet\n  validation: not opened yet")
    train = module.train_dataloader()
    assert "training: EnergonDataloader, 0 batches" in str(module) == repr(module)
    train.close()


def test_lines_and_subsets_are_described(data: Path, fixtures: Path):
    lines = get_train_dataset(fixtures / "lines.jsonl", batch_size=1, worker_config=config())
    assert re.search(r"lines\.jsonl: \d+ CrudeSamples in 1 shard$", repr(lines))
    mix = {"splits": {"train": {"path": str(data), "subset": {"range": [5, 25]}}}}
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", **mix}
    subset = get_train_dataset(document, batch_size=1, worker_config=config())
    assert repr(subset).endswith(f"{data} [train], samples 5 to 25: 20 CaptioningSamples in 3 shards")


# Tables --------------------------------------------------------------------------------------------------------------


def pictures(markup: str) -> list[Image.Image]:
    found = re.findall(r'<img alt="" src="data:image/png;base64,([A-Za-z0-9+/=]+)">', markup)
    assert markup.count("<img") == len(found)
    return [Image.open(io.BytesIO(base64.b64decode(one))) for one in found]


@pytest.mark.parametrize(
    "image",
    [
        torch.ones(3, 300, 200),
        torch.full((3, 300, 200), 255, dtype=torch.uint8),
        torch.ones(3, 300, 200, dtype=torch.bfloat16),
        torch.ones(1, 300, 200),
        np.full((300, 200, 3), 255, np.uint8),
        np.ones((300, 200, 4), np.float64),
        Image.new("RGBA", (200, 300), "white"),
    ],
    ids=lambda image: f"{type(image).__name__} {getattr(image, 'dtype', '')} {tuple(getattr(image, 'shape', ()))}",
)
def test_images_are_shown_small(image: Any):
    (picture,) = pictures(captions(image=image)._repr_html_())
    assert picture.size == (64, 96)
    assert picture.getpixel((5, 5)) == (255, 255, 255)


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(3, 0, 4),
        torch.zeros(7, 8, 9),
        torch.zeros(4, 3),
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(3, 9, 9, dtype=torch.complex64),
        torch.zeros(3, 9, 9, device="meta"),
        torch.empty(1).expand(3, 1 << 15, 1 << 15),
        Hostile(),
    ],
)
def test_what_is_no_picture_is_named(image: Any):
    markup = captions(image=image)._repr_html_()
    assert pictures(markup) == []
    assert "image" in markup


EVIL = "<script>alert('a')</script>\"><img src=x onerror=alert(1)>"


def test_content_is_escaped_and_cut():
    evil = type(EVIL, (CaptioningSample,), {})
    for record in (
        evil(__key__=EVIL, image=EVIL, caption=EVIL * 1000),
        evil(__key__=[EVIL, EVIL], image=[{EVIL: 1}, [EVIL]], caption=[EVIL, EVIL * 1000]),
        CrudeSample({"__key__": EVIL, EVIL: EVIL}),
    ):
        markup = record._repr_html_()
        assert "<script" not in markup
        assert "<img" not in markup
        assert len(markup) < 5000


def test_a_table_is_small_whatever_the_batch_is():
    rows = 500
    batch = captions(
        __key__=[f"k{row}" for row in range(rows)], image=torch.rand(rows, 3, 200, 200), caption=["word " * 1000] * rows
    )
    markup = batch._repr_html_()
    assert len(pictures(markup)) == 8
    assert "and 492 more rows" in markup
    assert "float32[500, 3, 200, 200]" in markup
    assert len(markup) < 8 * 40_000


# Batches -------------------------------------------------------------------------------------------------------------


def test_a_field_that_is_not_there_names_the_nearest():
    batch = captions()
    with pytest.raises(
        KeyError, match=r"CaptioningSample has no field 'imgae'\. Did you mean 'image'\? It has __key__, "
    ):
        _ = batch["imgae"]
    with pytest.raises(KeyError, match=r"no field 'xyzzy'\. It has __key__, .*, __valid__, image, caption, text"):
        _ = batch["xyzzy"]
    # Python itself says so of attributes; a `__getattr__` of ours would slow each access down.
    code = "from energon_bridge import CaptioningSample as S; S(__key__='k', image=0, caption='t').imgae"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "'CaptioningSample' object has no attribute 'imgae'. Did you mean: 'image'?" in result.stderr


def test_keys_know_the_aliases_and_do_not_list_them():
    sample = captions()
    assert "text" in sample.keys()  # noqa: SIM118
    assert "caption" in sample.keys()  # noqa: SIM118
    assert "video" not in sample.keys()  # noqa: SIM118
    assert "text" not in dict(sample)
    assert pickle.loads(pickle.dumps(sample.keys())) == sample.keys()
    assert "text" not in Wide(__key__="k").keys()  # noqa: SIM118


@pytest.mark.parametrize("settings", [{}, {"non_blocking": True}])
def test_a_batch_goes_to_a_device(settings: dict[str, Any]):
    inner = captions(__key__="inner")
    batch = captions(__key__=["a"], image=torch.ones(2), caption=[torch.ones(1), inner.image], __valid__=torch.ones(1))
    moved = batch.to("meta", **settings)
    assert type(moved) is CaptioningSample
    assert {moved.image.device.type, moved.__valid__.device.type, *(one.device.type for one in moved.caption)} == {
        "meta"
    }
    assert batch.image.device.type == "cpu"
    assert moved.__key__ is batch.__key__
    assert batch.to(torch.device("cpu")).image is batch.image


# What to use instead -------------------------------------------------------------------------------------------------


def torch_loader(dataset: Any, **settings: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, **settings)  # refused when it is made, before anything is iterated


@pytest.mark.parametrize(
    "use", [iter, list, lambda d: d[0], torch_loader, lambda d: torch_loader(d, batch_size=4, shuffle=True)]
)
def test_a_dataset_says_that_a_loader_is_needed(data: Path, use: Callable[[Any], Any]):
    dataset = get_train_dataset(data, batch_size=4, worker_config=config())
    for one in (dataset, LimitDataset(dataset, 3)):
        with pytest.raises(WrongUseError, match=r"`for batch in get_loader\(dataset\)`") as caught:
            use(one)
        assert isinstance(caught.value, TypeError)
        assert one.__class__ is type(one)


def test_a_loader_says_that_it_is_one(data: Path):
    loader = get_loader(get_train_dataset(data, batch_size=4, worker_config=config()))
    for one in (loader, EnergonDataloader(loader, length=3)):
        with pytest.raises(WrongUseError, match=r"not through torch\.utils\.data\.DataLoader\(loader\)"):
            torch_loader(one)
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(WrongUseError, match=r"call get_savable_loader there\. .* loader\.save_state_rank\(\)"):
            send(loader)
    loader.close()


def test_the_trainer_of_transformers_is_told_what_to_use(data: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    dataset = get_train_dataset(data, batch_size=4, worker_config=config())
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False
    )
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=dataset)
    with pytest.raises(WrongUseError, match=r"energon_bridge\.trainers\.huggingface\.EnergonTrainer"):
        trainer.train()


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, None), (3, 3), (1, 100)])
@pytest.mark.parametrize(
    ("get", "settings"),
    [
        (get_train_dataset, {}),
        (get_train_dataset, {"virtual_epoch_length": 7}),
        (get_train_dataset, {"repeat": False}),
        (get_train_dataset, {"repeat": False, "batch_drop_last": True}),
        (get_val_dataset, {}),
        (get_val_dataset, {"limit": 2}),
        (get_val_dataset, {"batch_drop_last": True}),
    ],
)
def test_the_length_of_a_dataset_is_that_of_its_loader(
    get: Callable[..., Any], settings: dict[str, Any], batch_size: int | None, ranks: int, data: Path
):
    dataset = get(data, batch_size=batch_size, worker_config=config(ranks), **settings)
    loader = get_loader(dataset)
    assert len(dataset) == len(loader)
    assert len(LimitDataset(dataset, 2)) == min(2, len(dataset)) or get is get_train_dataset
    assert len(EpochizeDataset(dataset, 5)) == 5
    assert len(RepeatDataset(dataset)) == len(dataset)
    if ranks == 1 and get is get_val_dataset:
        assert len(list(loader)) == len(dataset)
    loader.close()


# Warnings that come once ---------------------------------------------------------------------------------------------


def transparent_png() -> bytes:
    """Return an image of four pixels with a palette whose entries have opacities."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 2, 2, 8, 3, 0, 0, 0)
    palette = chunk(b"PLTE", bytes([255, 0, 0, 0, 255, 0])) + chunk(b"tRNS", bytes([0, 128]))
    rows = chunk(b"IDAT", zlib.compress(b"\0\0\1\0\1\0"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + rows + chunk(b"IEND", b"")


@pytest.fixture
def said_anew() -> Iterator[None]:
    """Forget what was said before, and afterwards."""
    from energon_bridge.core.loader.advice import _say_crowded, _say_once

    for forget in (_say_crowded.cache_clear, _say_once.cache_clear):
        forget()
    yield
    for forget in (_say_crowded.cache_clear, _say_once.cache_clear):
        forget()


@pytest.mark.usefixtures("said_anew")
@pytest.mark.parametrize("form", ["rgb8", "l8", "pil"])
def test_transparency_that_is_left_out_is_said_once(form: str, caplog: pytest.LogCaptureFixture):
    data = transparent_png()
    with pytest.warns(UserWarning, match="Palette images"):  # what Pillow makes of it
        expected = np.asarray(Image.open(io.BytesIO(data)).convert("L" if form == "l8" else "RGB"))
    decoder = SampleDecoder(image_decode=form)
    with caplog.at_level(logging.WARNING, logger="energon_bridge"):
        images = [decoder.decode("cover.png", data) for _ in range(3)]
    (message,) = caplog.messages
    assert "images in part 'cover.png'" in message
    assert "image_decode='torchrgba'" in message
    if form in ("rgb8", "l8"):
        assert all(np.array_equal(image, expected) for image in images)
    rgba = SampleDecoder(image_decode="rgba8").decode("a.png", data)
    assert rgba[..., 3].tolist() == [[0, 128], [128, 0]]


class Processed(DefaultTaskEncoder):
    """Calls a processor of transformers with what the decoder gives."""

    def __init__(self, form: str) -> None:
        super().__init__(raw_batch_type=None, batch_type=None)
        self.processor = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        self.decoder = SampleDecoder(image_decode=form)

    def encode_sample(self, sample: Any) -> Any:
        (pixels,) = self.processor(images=[sample.image], return_tensors="pt")["pixel_values"]
        return dataclasses.replace(sample, image=pixels)


@pytest.mark.usefixtures("said_anew")
def test_pixels_that_are_scaled_twice_are_said_once(data: Path, caplog: pytest.LogCaptureFixture):
    made = {}
    for form in ("pilrgb", "torchrgb8", "torchrgb", "torchrgb"):
        dataset = get_train_dataset(data, batch_size=1, worker_config=config(), task_encoder=Processed(form))
        made[form] = next(iter(get_loader(dataset))).image
        assert bool(caplog.messages) == (form == "torchrgb"), form
    (black,) = Processed("pilrgb").processor(images=[Image.new("RGB", (8, 8))], return_tensors="pt")["pixel_values"]
    assert float((made["torchrgb"] - black).abs().max()) < 0.02
    assert float((made["torchrgb8"] - black).abs().max()) > 0.5
    assert torch.equal(made["torchrgb8"], made["pilrgb"])
    (message,) = caplog.messages
    assert message.startswith("Processed decodes images as numbers from 0 to 1 (image_decode='torchrgb'), and its CLIP")


@pytest.mark.usefixtures("said_anew")
@pytest.mark.filterwarnings("error:This DataLoader will create")
def test_more_workers_than_cores_are_named_once(
    data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    with caplog.at_level(logging.WARNING, logger="energon_bridge.core.loader.advice"):
        for rank in (1, 0, 0):
            get_loader(train_dataset(data, batch_size=1, worker_config=config(2, rank, num_workers=3)))
    messages = [message for message in caplog.messages if "cores" in message]
    (message,) = messages
    assert message.startswith("num_workers=3, but this process may use 2 cores: ")
    assert "Set num_workers to 2 or less" in message

"""Collating: padding and stacking as index arithmetic says, whatever the memory behind the tensors looks like."""

from __future__ import annotations

import io
import logging
import sys
from collections import namedtuple
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from energon_bridge import WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.encoder import batch_list, batch_pad_stack, batch_samples, batch_stack, generic_batch
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.samples import (
    Batch,
    CaptioningSample,
    CrudeSample,
    Sample,
    SourceInfo,
    TextSample,
    VQASample,
    edataclass,
)
from energon_bridge.core.samples.stacking import concat_pad
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

DTYPES = (torch.uint8, torch.int64, torch.float32, torch.bool)


@st.composite
def columns(draw: st.DrawFn, same_shape: bool = False) -> list[torch.Tensor]:
    """Draw tensors of one rank and dtype whose dimensions lie in memory in any order, with gaps or without."""
    rank = draw(st.integers(0, 4))
    dtype = draw(st.sampled_from(DTYPES))
    sizes = st.tuples(*[st.integers(0, 4)] * rank)
    count = draw(st.integers(1, 4))
    shapes = [draw(sizes)] * count if same_shape else [draw(sizes) for _ in range(count)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = []
    for shape in shapes:
        order = draw(st.permutations(range(rank)))
        gap = draw(st.integers(1, 2))
        memory = torch.randint(0, 100, [shape[dim] * gap for dim in order], generator=generator).to(dtype)
        memory = memory[tuple(slice(None, None, gap) for _ in order)]
        tensors.append(memory.permute([list(order).index(dim) for dim in range(rank)]))
    return tensors


def padded(tensors: list[torch.Tensor]) -> np.ndarray:
    """What batch_pad_stack must give, written element by element."""
    largest = [max(tensor.shape[dim] for tensor in tensors) for dim in range(tensors[0].ndim)]
    result = np.zeros((len(tensors), *largest), dtype=tensors[0].numpy().dtype)
    for row, tensor in enumerate(tensors):
        for index in np.ndindex(*tensor.shape):
            result[(row, *index)] = tensor[index].item()
    return result


@given(columns())
def test_pad_stack_is_padding_at_the_end(tensors):
    batch = batch_pad_stack(tensors)
    assert batch.dtype == tensors[0].dtype
    np.testing.assert_array_equal(batch.numpy(), padded(tensors), strict=True)


@given(columns(same_shape=True))
def test_stack_is_torch_stack(tensors):
    expected = torch.stack(tensors)
    for batch in (batch_stack(tensors), batch_pad_stack(tensors)):
        assert batch.shape == expected.shape
        assert torch.equal(batch, expected)
        batch.zero_()  # of memory of its own
    assert torch.equal(torch.stack(tensors), expected)


def test_many_small_rows_are_stacked_too():
    rows = list(torch.rand(1 << 13, 3))
    assert torch.equal(batch_stack(rows), torch.stack(rows))
    assert batch_pad_stack([torch.tensor([1, 2]), torch.tensor([0.5])]).tolist() == [[1.0, 2.0], [0.5, 0.0]]


@pytest.mark.parametrize("other", [torch.int64, torch.bfloat16, torch.float16, torch.bool])
def test_types_are_promoted_as_torch_promotes_them(other):
    rows = [torch.ones(3, dtype=other), torch.full((3,), 2.5)]
    assert torch.equal(batch_stack(rows), torch.stack(rows))
    assert batch_stack(rows).dtype == batch_pad_stack([rows[0], rows[1][:2]]).dtype == torch.float32
    assert torch.equal(concat_pad(rows), torch.cat(rows))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), "sliced", "mixed"], ids=str)
def test_large_rows_are_stacked_too(order, dtype):
    """What is larger than the caches is written past them, from rows of any layout."""
    whole = torch.randint(0, 2, (4, 301, 333, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = list(whole)
    if order == "sliced":
        rows = [row[:, 1:] for row in rows]
    elif order == "mixed":
        rows = [
            row if number % 2 else row.permute(2, 0, 1).contiguous().permute(1, 2, 0) for number, row in enumerate(rows)
        ]
    else:
        rows = [row.permute(*order) for row in rows]
    assert torch.equal(batch_stack(rows), torch.stack(rows))
    assert torch.equal(
        batch_stack([rows[0], rows[1].to(torch.float64)]),
        torch.stack([rows[0].to(torch.float64), rows[1].to(torch.float64)]),
    )


SIZES = {"small": (7, 9), "middle": (90, 130), "large": (400, 500)}
"""Heights and widths of images of which four have fewer elements than torch starts threads for, more, and many more."""


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_images_of_any_size_are_padded_and_joined(size: str, dtype: torch.dtype):
    height, width = SIZES[size]
    images = [
        torch.randint(0, 100, (height + n, width - n, 3), generator=torch.Generator().manual_seed(n)).to(dtype)
        for n in range(4)
    ]
    for rows in (images, [image.permute(2, 0, 1) for image in images]):
        batch = batch_pad_stack(rows)
        for row, expected in zip(batch, rows, strict=True):
            assert torch.equal(row[tuple(map(slice, expected.shape))], expected)
        assert batch.sum(dtype=torch.float64) == sum(row.sum(dtype=torch.float64) for row in rows)
    joined = concat_pad(images)
    assert joined.shape == (4 * height + 6, width, 3)
    assert torch.equal(concat_pad([images[0], images[0]]), torch.cat([images[0], images[0]]))
    start = 0
    for image in images:
        assert torch.equal(joined[start : start + len(image), : image.shape[1]], image)
        start += len(image)


def image_view(height: int, width: int) -> torch.Tensor:
    """A CHW view over HWC memory: what the decoder gives."""
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).permute(2, 0, 1)


@pytest.mark.parametrize("sizes", [[(4, 5), (4, 5)], [(4, 5), (6, 2)]])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_stay_in_the_memory_order_of_the_decoder(sizes, dtype):
    batch = batch_pad_stack([image_view(*size).to(dtype) for size in sizes])
    assert batch.shape[:2] == (2, 3)
    assert batch.is_contiguous(memory_format=torch.channels_last)


Point = namedtuple("Point", "x y")


@dataclass
class Plain:
    name: str
    size: torch.Tensor


def test_generic_batch_goes_into_containers():
    rows = [{"a": torch.ones(1), "p": Point(torch.ones(2), "s"), "d": Plain("n", torch.ones(1))} for _ in range(2)]
    batch = generic_batch(rows)
    assert batch["a"].shape == (2, 1)
    assert type(batch["p"]) is Point
    assert batch["p"].x.shape == (2, 2)
    assert batch["p"].y == ["s", "s"]
    assert type(batch["d"]) is Plain
    assert (batch["d"].name, batch["d"].size.shape) == (["n", "n"], (2, 1))


@pytest.mark.parametrize(
    "column",
    [
        [1, 2],
        ["a", "b"],
        [[1], [2, 3]],
        [(1, 2), (3, 4)],
        [None, None],
        [np.ones(2), np.ones(2)],
        [None, torch.ones(1)],
        [{"a": 1}, Point(1, 2)],
        [],
    ],
)
def test_everything_else_stays_a_list(column):
    batch = generic_batch(column)
    assert type(batch) is list
    assert [id(entry) for entry in batch] == [id(entry) for entry in column]
    assert batch is not column


def test_a_type_may_collate_itself():
    @edataclass
    class Texts(Batch):
        text: str

        @classmethod
        def from_samples(cls, samples: Any, **values: Any) -> Any:
            return cls(__key__=["own"], text="+".join(sample.text for sample in samples))

    rows = [Texts(__key__=["a"], text="x"), Texts(__key__=["b"], text="y")]
    assert generic_batch(rows) == Texts(__key__=["own"], text="x+y")


SOURCES = [SourceInfo("/d", index, "s.tar", ("f",)) for index in range(3)]


def captions() -> list[CaptioningSample]:
    return [
        CaptioningSample(
            __key__=f"k{row}",
            __restore_key__=("d", row),
            __subflavors__={"row": row},
            __sources__=(SOURCES[row],),
            image=image_view(4, 4 + row),
            caption=f"c{row}",
        )
        for row in range(2)
    ]


def test_samples_become_a_sample_of_their_type():
    rows = captions()
    batch = batch_samples(rows, CaptioningSample)
    assert type(batch) is CaptioningSample
    assert batch.image.shape == (2, 3, 4, 5)
    assert torch.equal(batch["image"][0, :, :, :4], rows[0].image)
    assert batch["text"] == batch.caption == ["c0", "c1"]
    assert batch.__key__ == ["k0", "k1"]
    assert batch.__restore_key__ == (("d", 0), ("d", 1))
    assert batch.__subflavors__ == [{"row": 0}, {"row": 1}]
    assert batch.__sources__ == tuple(SOURCES[:2])
    assert batch.__valid__ is None


def test_subflavors_keep_their_rows():
    rows = [
        TextSample(__key__=str(row), text="t", __subflavors__=labels) for row, labels in enumerate([{"a": 1}, None])
    ]
    batch = batch_samples(rows, TextSample)
    assert batch.__subflavors__ == [{"a": 1}, None]
    assert batch.__sources__ is None


def test_dict_samples_keep_their_meta_fields():
    rows = [CrudeSample({**dict(sample), "n": torch.tensor(1)}) for sample in captions()]
    batch = batch_samples(rows, CrudeSample)
    assert type(batch) is CrudeSample
    assert (batch["__key__"], batch["__subflavors__"]) == (["k0", "k1"], [{"row": 0}, {"row": 1}])
    assert batch["__sources__"] == tuple(SOURCES[:2])
    assert batch["n"].tolist() == [1, 1]
    assert "__valid__" not in batch


def test_actions_go_before_the_default():
    rows = [VQASample(__key__=str(n), image=torch.tensor([n]), context="c", answers=["a"] * n) for n in (1, 2)]
    batch = batch_samples(rows, VQASample, actions={"answers": len, "image": torch.cat}, default_action=batch_list)
    assert batch.answers == 2
    assert batch.image.tolist() == [1, 2]
    assert batch.context == ["c", "c"]


def mixed() -> list[Sample]:
    return [TextSample(__key__="a", text="t"), captions()[0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batch_stack([torch.ones(2), torch.ones(3)]), r"row 0 has \(2,\) and row 1 has \(3,\); use batch_pad"),
        (lambda: batch_pad_stack([torch.ones(2), torch.ones(1, 2)]), r"rank.*\(2,\) and row 1 has \(1, 2\)"),
        (lambda: batch_stack([]), "at least one row"),
        (lambda: batch_pad_stack([]), "at least one row"),
        (lambda: batch_samples(mixed(), TextSample), "different fields: caption, image, text.*row 1"),
        (lambda: generic_batch([{"a": 1}, {"a": 1, "b": 2}]), "different fields: b "),
        (lambda: batch_samples([], TextSample), "of 0 samples"),
        (lambda: batch_samples([Plain("n", torch.ones(1)), Plain("n", torch.ones(1, 1))], Plain), "field 'size'.*rank"),
        (lambda: generic_batch([torch.ones(1), np.float32(1)]), "different types: some hold a tensor, some a float32"),
        (lambda: generic_batch([None, [1], torch.ones(1)]), "some hold a tensor, some a list"),
        (lambda: generic_batch([{"a": torch.ones(1)}, {"a": "x"}]), "field 'a': .* some hold a tensor, some a str"),
        (lambda: batch_samples([1, 2], dict), "a int has no fields"),
        (lambda: batch_samples(captions(), VQASample), "VQASample.*context"),
        (lambda: batch_samples(captions(), int), "cannot fill a int"),
    ],
)
def test_rows_that_do_not_fit_together(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_far_larger_than_the_others_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    """Forked workers have the bound, too, and write to the same stream."""
    monkeypatch.setattr("energon_bridge.core.samples.stacking._MUCH_PADDING", 1 << 20)
    handler = logging.StreamHandler(sys.__stderr__ or sys.stderr)
    logger = logging.getLogger("energon_bridge.core.stream.pipeline")
    logger.addHandler(handler)
    try:
        for folder, side in (("usual", 40), ("large", 600)):
            samples = {f"k{number}": png(side if number in (5, 9) else 30) for number in range(16)}
            (tmp_path / folder).mkdir()
            write_shard(tmp_path / folder / "s.tar", samples)
            yaml = render_dataset_yaml("ImageSample", {"image": "png"})
            prepare_dataset(tmp_path / folder, split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
            dataset = get_val_dataset(
                tmp_path / folder,
                split_part="train",
                worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
                batch_size=4,
            )
            with closing(get_loader(dataset)) as loader:
                assert max(batch.image.shape[-1] for batch in loader) == side
            said = capfd.readouterr().err
            if side == 40:
                assert said == ""
    finally:
        logger.removeHandler(handler)
    (line,) = said.splitlines()
    assert line.startswith(f"{tmp_path / 'large'}: shard s.tar, sample 5, key 'k5' (parts png) has the shape")
    # 4 rows of 3 x 600 x 600 floats.
    assert "(3, 600, 600), others in its batch (3, 30, 30): padded to it, 4 rows take 17,280,000 bytes." in line
    for remedy in ("image_target", "resize", "group_by", "filter"):
        assert remedy in line


def png(side: int) -> dict[str, bytes]:
    """Return the parts of a sample with a picture."""
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "png")
    return {"png": file.getvalue()}

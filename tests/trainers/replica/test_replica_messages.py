"""Batches on their way to another rank: every kind of content comes out as it went in."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import run_forked
from hypothesis import given, strategies as st

from energon_bridge import CaptioningSample, SourceInfo, make_replica
from energon_bridge.core.errors import ConfigurationError, UnknownArgumentError
from energon_bridge.core.samples import CrudeSample
from energon_bridge.models.conversations.sequences import MultiModalBatch
from energon_bridge.trainers.replica import StageKeys
from energon_bridge.trainers.replica.exchange import FRAME, Channel, pack
from energon_bridge.trainers.replica.structure import check_keys, decode, encode, select

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16]
DTYPES += [torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]


class Point(NamedTuple):
    x: Any
    y: Any


class Features(UserDict[str, Any]):
    """In the manner of transformers' BatchFeature."""


@dataclass(frozen=True)
class Record:
    """Frozen, with a field that its constructor does not take."""

    value: Any
    derived: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", [self.value])


@dataclass(slots=True)
class Picky:
    """Its constructor refuses what a stage that needs no images gets."""

    images: Any

    def __post_init__(self) -> None:
        if self.images is None:
            raise ValueError("no images")


def multimodal() -> MultiModalBatch:
    return MultiModalBatch(
        __key__=["a,b"],
        __sources__=(SourceInfo("/data", 3, "x.tar", ("a.jpg",)),),
        __subflavors__=[{"lang": "de"}],
        __valid__=torch.tensor([True]),
        tokens=torch.arange(6).reshape(1, 6),
        labels=torch.arange(6).reshape(1, 6),
        loss_mask=torch.ones(1, 6),
        position_ids=torch.arange(6).reshape(1, 6),
        attention_mask=torch.ones(1, 6, dtype=torch.int64),
        pixel_values=torch.rand(2, 3, 4, 4).to(torch.bfloat16),
        visual_inputs={"image_grid_thw": torch.tensor([[1, 2, 2]])},
        answers=["yes ✓", "\ud800"],
        cu_seqlens=torch.tensor([0, 4, 6], dtype=torch.int32),
        max_seqlen=4,
    )


CONTENTS: dict[str, Any] = {
    "nothing": None,
    "plain": [True, 0, -(2**70), 1.5, float("inf"), "", "text\n", None],
    "multimodal batch": multimodal(),
    "sample": CaptioningSample(__key__="k", __restore_key__=("a", 1), image=torch.zeros(0, 3), caption=None),
    "crude sample": CrudeSample({"__key__": "k", "json": {"a": [1, {"b": (2, 3)}]}}),
    "containers": [(), [], {}, {"a": {}}, {1: "one", (2, "x"): None}, OrderedDict(b=1, a=2), Features({"x": 1})],
    "named": Point(x=Point(1, torch.tensor(2.5)), y=[]),
    "records": [Record(torch.ones(2)), Record("x")],
    "bytes": [b"", b"\x00\xff" * 9, bytearray(b"abc")],
    "numpy": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(1.5), np.zeros((0, 2)), np.array(True)],
    "0-d and empty": [
        torch.tensor(7),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int64),
        torch.zeros(1, 1, 1, 1),
    ],
    "views": [torch.arange(12).reshape(3, 4).t(), torch.arange(10)[::3], torch.ones(1).expand(4)],
    "dtypes": {str(dtype): torch.arange(3).to(dtype) for dtype in DTYPES},
    "gradient": torch.ones(2, requires_grad=True),
    "long text": "ä" * FRAME,
}


def same(a: Any, b: Any) -> bool:
    """Compare two values, their types and their tensors' dtypes and shapes."""
    if isinstance(a, bytes | bytearray):
        return bytes(a) == b
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.to(torch.complex128), b.to(torch.complex128))
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict | UserDict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    return bool(a == b)


def start(rank: int, folder: Path, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size)


def test_everything_comes_out_as_it_went_in(tmp_path: Path) -> None:
    def move(rank: int) -> list[str]:
        start(rank, tmp_path, 3)
        channel = Channel(dist.group.WORLD, source=1)
        wrong = []
        for name, value in CONTENTS.items():
            if rank == 1:
                channel.send(pack(value, channel.device))
            elif not same(value, channel.receive()):
                wrong.append(name)
        channel.flush()
        return wrong

    assert run_forked(3, move) == [[], [], []]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=9) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(values)
def test_nodes_come_back(value: Any) -> None:
    assert same(value, decode(*encode(value)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"image": [1, object()]}, r"batch\['image'\]\[1\] is of type builtins.object, which cannot be broadcast"),
        (Record({1, 2}), r"batch.value is of type builtins.set"),
        (torch.eye(2).to_sparse(), "only dense ones"),
        (np.array(["text"]), "numpy array of dtype <U4"),
        (defaultdict(list), "collections.defaultdict"),
        (type("Local", (Features,), {"__qualname__": "f.<locals>.Local"})(), "defined inside a function"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        encode(value)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (["record", "no.such.module:Batch"], "which this rank does not have"),
        (["record", f"{__name__}:Missing"], "which this rank does not have"),
        (["record", "subprocess:Popen"], "is not a record on this rank"),
        (["named", "subprocess:Popen", "ls"], "is not a named on this rank"),
        (["mapping", "os:system", ["ls", 1]], "is not a mapping on this rank"),
    ],
)
def test_only_classes_that_hold_data_are_made(node: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        decode(node, [])


@pytest.mark.parametrize(
    ("keys", "stages", "expected"),
    [
        (StageKeys(first=["a"], last=["b"]), 1, [{"a", "b"}]),
        (StageKeys(first=["a"], last=["b"]), 3, [{"a"}, set(), {"b"}]),
        (StageKeys(first=["a"], last=None), 2, [{"a"}, None]),
        (StageKeys(middle=["m"], last=["b"]), 3, [None, {"m"}, {"b"}]),
        (StageKeys(middle=None), 3, [None, None, None]),
    ],
)
def test_stages_have_their_fields(keys: StageKeys, stages: int, expected: list[Any]) -> None:
    assert [keys.of(stage, stages) for stage in range(stages)] == expected


def test_a_selection_keeps_meta_fields_and_the_batch() -> None:
    batch = multimodal()
    chosen = select(batch, {"tokens"})
    assert chosen.tokens is batch.tokens
    assert chosen.__key__ is batch.__key__
    assert chosen.__valid__ is batch.__valid__
    assert chosen.pixel_values is chosen.labels is None
    assert batch.labels is not None
    assert select({"tokens": 1, "labels": 2}, {"tokens"}) == {"tokens": 1, "labels": None}
    assert select(Picky(images=1), set()).images is None  # its constructor is not asked
    assert select(batch, None) is batch
    with pytest.raises(ConfigurationError, match="a batch of type list has none"):
        select([1], {"tokens"})
    with pytest.raises(UnknownArgumentError, match="'tokns'"):
        check_keys(batch, {"tokns"})
    with pytest.raises(ConfigurationError, match="list of field names"):
        StageKeys(first="tokens")


def test_a_replica_needs_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match=r"needs torch\.distributed"):
        make_replica()
    with pytest.raises(ConfigurationError, match="backend must be"):
        make_replica(backend="mpi")

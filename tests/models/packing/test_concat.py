"""Joining batches: the rows of all in their order, whatever their sizes, and the meta fields with them."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from energon_bridge.core.encoder import concat_pad
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import Batch, SourceInfo, edataclass
from energon_bridge.models.packing.joining import generic_concat, homogeneous_concat_mix

Pair = namedtuple("Pair", "a b")


@dataclass
class Plain:
    size: torch.Tensor
    name: str


@edataclass
class Texts(Batch):
    tokens: torch.Tensor
    texts: list[str]


@given(st.integers(1, 3).flatmap(lambda rank: st.lists(st.tuples(*[st.integers(0, 4)] * rank), min_size=1, max_size=5)))
def test_every_row_is_there_and_the_rest_is_zero(shapes):
    tensors = [torch.full(shape, number) for number, shape in enumerate(shapes, 1)]
    joined = concat_pad(tensors)
    assert joined.shape == (sum(s[0] for s in shapes), *(max(sizes) for sizes in list(zip(*shapes, strict=True))[1:]))
    start = 0
    for tensor in tensors:
        rows = joined[start : start + len(tensor)]
        start += len(tensor)
        assert torch.equal(rows[(slice(None), *map(slice, tensor.shape[1:]))], tensor)
        assert rows.sum() == tensor.sum()


def test_records_are_joined_field_by_field() -> None:
    rows = [
        {"p": Pair(torch.ones(1, size), "s"), "d": Plain(torch.ones(size, 1), "n"), "l": [size], "n": None, "i": size}
        for size in (1, 2)
    ]
    joined: Any = generic_concat(rows)
    assert type(joined["p"]) is Pair
    assert joined["p"].a.tolist() == [[1, 0], [1, 1]]
    assert joined["p"].b == ["s", "s"]
    assert type(joined["d"]) is Plain
    assert joined["d"].size.shape == (3, 1)
    assert (joined["l"], joined["n"], joined["i"]) == ([1, 2], None, [1, 2])


def batch(keys: str, **values: Any) -> Texts:
    tokens = torch.ones(len(keys), len(keys), dtype=torch.int64)
    return Texts(__key__=list(keys), __restore_key__=tuple(keys), tokens=tokens, texts=list(keys.upper()), **values)


def test_batches_become_one_with_all_their_rows() -> None:
    source = SourceInfo("d", 0, "s", ())
    joined = homogeneous_concat_mix([batch("ab", __sources__=(source,)), batch("c", __subflavors__=[{"x": 1}])])
    assert type(joined) is Texts
    assert (joined.__key__, joined.__restore_key__, joined.texts) == (["a", "b", "c"], ("a", "b", "c"), ["A", "B", "C"])
    assert joined.tokens.tolist() == [[1, 1], [1, 1], [1, 0]]
    masked = homogeneous_concat_mix([batch("ab"), batch("c", __valid__=torch.tensor([False]))])
    assert masked.__valid__.tolist() == [True, True, False]
    assert (joined.__sources__, joined.__subflavors__, joined.__valid__) == ((source,), [None, None, {"x": 1}], None)


@pytest.mark.parametrize(
    ("join", "what", "message"),
    [
        (concat_pad, [torch.ones(2), torch.ones(2, 2)], "tensors of one rank, at least 1"),
        (concat_pad, [torch.tensor(1)], "tensors of one rank, at least 1"),
        (homogeneous_concat_mix, [], "only be joined if all have one type"),
        (homogeneous_concat_mix, [batch("a"), {"a": 1}], "only be joined if all have one type"),
        (generic_concat, [{"a": 1}, {"a": 1, "b": 2}], r"not all have \['b'\]"),
    ],
)
def test_what_cannot_be_joined(join: Any, what: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        join(what)

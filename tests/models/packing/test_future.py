"""Targets several tokens ahead: megatron-core's own roll of each sample alone, in its place in rows and packs."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from energon_bridge import FutureTargets, batch_packs, future_targets, pack_sequences, packed_seq_params
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.sequences import (
    MultiModalBatch,
    MultiModalSample,
    PaddingValues,
    batch_sequences,
)

FILLING = PaddingValues(pad_id=0, ignore=-100)
DEPTH = 3


def sample(number: int, length: int) -> MultiModalSample:
    """Tokens number*100 + 1, 2, …; every second label is learned."""
    sequence = number * 100 + torch.arange(1, length + 2)
    loss_mask = (torch.arange(length) % 2).float()
    return MultiModalSample(
        __key__=f"s{number}",
        __restore_key__=("k", number),
        tokens=sequence[:-1],
        labels=torch.where(loss_mask.bool(), sequence[1:], -100),
        loss_mask=loss_mask,
        visual={},
        answer="",
        num_images=0,
        mrope_position_ids=torch.arange(length).repeat(3, 1) * torch.tensor([[1], [2], [3]]),
    )


@functools.cache
def rolled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core says about packages that are not there
        return pytest.importorskip("megatron.core.transformer.multi_token_prediction").roll_tensor


def alone(values: Tensor, ahead: int, **arguments: Any) -> Tensor:
    for _ in range(ahead):
        values, _ = rolled()(values.clone(), **arguments)
    return values


def of_sample(targets: FutureTargets, start: int, length: int) -> dict[str, Tensor]:
    names = ("tokens", "labels", "loss_mask", "position_ids")
    return {name: getattr(targets, name).reshape(-1)[start : start + length] for name in names}


def check(batch: MultiModalBatch, samples: list[MultiModalSample], starts: list[int]) -> None:
    made = future_targets(batch, DEPTH)
    assert [targets.ahead for targets in made] == [1, 2, 3]
    for targets in made:
        counted = 0
        assert targets.mrope_position_ids is not None
        for one, start in zip(samples, starts, strict=True):
            length = len(one.tokens)
            is_there = torch.arange(length) < length - targets.ahead
            ours = of_sample(targets, start, length)
            for name, values in {"tokens": one.tokens, "position_ids": torch.arange(length)}.items():
                assert torch.equal(ours[name], alone(values, targets.ahead)), name
            assert torch.equal(ours["loss_mask"], alone(one.loss_mask, targets.ahead))
            assert torch.equal(ours["labels"], torch.where(is_there, alone(one.labels, targets.ahead), -100))
            axes = targets.mrope_position_ids.reshape(3, -1)[:, start : start + length]
            assert torch.equal(axes, alone(one.mrope_position_ids, targets.ahead))
            counted += int(ours["loss_mask"].sum())
        assert int(targets.loss_mask.sum()) == counted  # nothing is learned in padding
        assert ((targets.labels != -100) == targets.loss_mask.bool()).all()


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(lengths, st.sampled_from([1, 4]), lengths)
@settings(deadline=None)
def test_in_packs_they_are_those_of_each_sample_alone(sizes: list[int], multiple: int, more: list[int]) -> None:
    samples = [sample(number, size) for number, size in enumerate(sizes + more, 1)]
    packs = [samples[: len(sizes)], samples[len(sizes) :]]
    batch = batch_packs([pack_sequences(pack, FILLING, multiple_of=multiple) for pack in packs], FILLING)
    assert batch.cu_seqlens_padded is not None
    starts = batch.cu_seqlens_padded[:-1].tolist()
    check(batch, samples, starts)
    # megatron-core itself, told by us where samples end
    params = packed_seq_params(batch, mtp=True)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        values = getattr(batch, name).reshape(1, -1)
        theirs = alone(values, 2, packed_seq_params=params).reshape(-1)
        for one, start in zip(samples, starts, strict=True):
            length = len(one.tokens)
            learned = alone(one.loss_mask, 2).bool()
            ours = of_sample(future_targets(batch, 2)[1], start, length)[name]
            assert torch.equal(theirs[start : start + length][learned], ours[learned]), name
    assert torch.equal(alone(batch.loss_mask.reshape(1, -1), 2, packed_seq_params=params).sum(), sum_of(samples))


def sum_of(samples: list[MultiModalSample]) -> Tensor:
    return torch.stack([alone(one.loss_mask, 2).sum() for one in samples]).sum()


def test_without_mtp_the_roll_of_megatron_core_leaves_the_places_of_padded_samples() -> None:
    samples = [sample(1, 3), sample(2, 7)]
    batch = batch_packs([pack_sequences(samples, FILLING, multiple_of=4)], FILLING)
    rows = batch.tokens.reshape(1, -1)
    right = torch.tensor([[102, 103, 0, 0, 202, 203, 204, 205, 206, 207, 0, 0]])
    assert torch.equal(alone(rows, 1, packed_seq_params=packed_seq_params(batch, mtp=True)), right)
    if torch.equal(alone(rows, 1, packed_seq_params=packed_seq_params(batch)), right):
        pytest.fail("megatron-core rolls by the padded ends now: `mtp` of packed_seq_params is no longer needed")


@given(lengths)
@settings(deadline=None)
def test_in_rows_they_are_those_of_each_sample_alone(sizes: list[int]) -> None:
    samples = [sample(number, size) for number, size in enumerate(sizes, 1)]
    batch = batch_sequences(samples, max(sizes) + 2, FILLING)
    check(batch, samples, [row * batch.tokens.shape[1] for row in range(len(samples))])


def test_no_depth_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="depth must be 1 or more, got 0"):
        future_targets(batch_sequences([sample(1, 3)], 3, FILLING), 0)

"""Slices of a batch for context-parallel ranks: those of megatron-core, and for packs those of each sample."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from energon_bridge.errors import ConfigurationError
from energon_bridge.integrations.context_parallel import (
    packed_indices,
    pad_for_context_parallel,
    scheduler_pack,
    scheduler_samples,
    slice_for_context_parallel,
    zigzag_indices,
)
from energon_bridge.task_encoder.packed_sequences import batch_packs, cu_seqlens, pack_sequences
from energon_bridge.task_encoder.sequences import MultiModalBatch, MultiModalSample, PaddingValues, batch_sequences

FILLING = PaddingValues(pad_id=7, ignore=-100)


def sample(length: int, number: int) -> MultiModalSample:
    tokens = 1000 * number + torch.arange(length)
    return MultiModalSample(
        __key__=str(number),
        tokens=tokens,
        labels=tokens + 1,
        loss_mask=torch.ones(length),
        visual={"pixel_values": torch.full((1, 2), float(number))},
        answer="",
    )


def packed(rows: list[list[int]], multiple: int = 1) -> MultiModalBatch:
    numbers = iter(range(100))
    packs = [
        pack_sequences([sample(n, next(numbers)) for n in lengths], FILLING, multiple_of=multiple) for lengths in rows
    ]
    return batch_packs(packs, FILLING)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_are_those_of_megatron(size: int, tmp_path: Path) -> None:
    utils = pytest.importorskip("megatron.core.utils")
    from megatron.core import parallel_state
    from replicas import on_ranks

    hybrid = "is_hybrid_cp" in signature(utils.get_batch_on_this_cp_rank).parameters
    length = 16
    batch = {
        "tokens": torch.arange(2 * length).reshape(2, length),
        "labels": torch.arange(2 * length).reshape(2, length) + 1,
        "loss_mask": torch.rand(2, length),
        "attention_mask": torch.rand(2, 1, length, length) > 0.5,
        "position_ids": torch.arange(length).repeat(2, 1),
        "padding_mask": None,
    }

    def compare(rank: int) -> None:
        rank = parallel_state.get_context_parallel_rank()
        theirs = utils.get_batch_on_this_cp_rank(dict(batch), **({"is_hybrid_cp": False} if hybrid else {}))
        pixels = torch.rand(3, 4)
        ours = slice_for_context_parallel({**batch, "pixel_values": pixels}, rank=rank, size=size)
        assert ours.pop("pixel_values") is pixels
        assert ours.keys() == theirs.keys()
        assert ours["tokens"].shape == (2, length // size)
        for name, value in theirs.items():
            assert ours[name] is None if value is None else torch.equal(ours[name], value)

    on_ranks(tmp_path, size, compare, cp=size)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 5))
def test_ranks_share_every_sample_out(chunks: list[int], size: int) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    cuts = cu_seqlens(lengths)
    parts = [packed_indices(cuts, rank=rank, size=size) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(sum(lengths)))
    for part in parts:
        # Of each sample every rank has the same share, in order, and as many early tokens as late ones.
        for start, length in zip(cuts[:-1].tolist(), lengths, strict=True):
            own = [i - start for i in part.tolist() if start <= i < start + length]
            assert len(own) == length // size
            assert own == sorted(own)
            assert sum(own) * 2 == len(own) * (length - 1)


def test_packs_are_cut_sample_by_sample() -> None:
    batch = packed([[8, 4], [4, 4]])  # the second row is padded to the first
    parts = [slice_for_context_parallel(batch, rank=rank, size=2) for rank in range(2)]
    for rank, part in enumerate(parts):
        assert part.tokens.shape == part.labels.shape == part.position_ids.shape == (1, 12)
        assert part.pixel_values is batch.pixel_values
        assert part.cu_seqlens is batch.cu_seqlens
        assert part.cu_seqlens_padded is batch.cu_seqlens_padded
        first = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
        assert part.tokens[0, :4].tolist() == part.position_ids[0, :4].tolist() == first
    assert batch.tokens.shape == (2, 12)


def test_a_batch_is_sliced_as_it_is_rebuilt() -> None:
    batch = batch_sequences([sample(5, 1), sample(8, 2)], 8, FILLING)
    parts = [slice_for_context_parallel(batch, rank=rank, size=2) for rank in range(2)]
    for name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask"):
        rebuilt = torch.empty_like(batch[name])
        for rank, part in enumerate(parts):
            rebuilt[:, zigzag_indices(8, rank=rank, size=2)] = part[name]
        assert torch.equal(rebuilt, batch[name])


def test_mrope_positions_are_cut_along_their_tokens() -> None:
    positions = torch.arange(3 * 2 * 8).reshape(3, 2, 8)
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "position_ids": positions}
    part = slice_for_context_parallel(batch, rank=1, size=2)
    assert torch.equal(part["position_ids"], positions[..., 2:6])
    whole = {**batch, "cu_seqlens": torch.tensor([0, 8, 16], dtype=torch.int32)}
    part = slice_for_context_parallel(whole, rank=1, size=2)
    assert part["position_ids"].shape == (3, 1, 8)
    assert torch.equal(part["position_ids"][:, 0, 4:], positions[:, 1, 2:6])


# Padding -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=2), st.integers(1, 3))
def test_padding_packs_is_what_the_encoder_would_do(rows: list[list[int]], size: int) -> None:
    batch = packed(rows)
    result = pad_for_context_parallel(batch, size=size, fill={"tokens": 7})
    lengths = result.cu_seqlens_padded.diff().tolist()  # type: ignore[union-attr]
    assert all(length % (2 * size) == 0 for length in lengths)
    assert result.max_seqlen == max(lengths)
    assert torch.equal(result.cu_seqlens, batch.cu_seqlens)  # type: ignore[arg-type]
    for start, length, number in zip(result.cu_seqlens_padded.tolist(), lengths, range(100), strict=False):  # type: ignore[union-attr]
        real = [n for row in rows for n in row][number]
        place = slice(start, start + length)

        def of(value: Tensor, place: slice = place) -> list[Any]:
            return value.reshape(-1)[place].tolist()  # type: ignore[no-any-return]

        assert of(result.tokens) == [1000 * number + i for i in range(real)] + [7] * (length - real)
        assert of(result.labels)[real:] == [-100] * (length - real)
        assert of(result.loss_mask) == [1.0] * real + [0.0] * (length - real)
        assert of(result.position_ids) == list(range(length))
    for rank in range(size):
        slice_for_context_parallel(result, rank=rank, size=size)


def test_padding_equals_that_of_the_encoder() -> None:
    ours = pad_for_context_parallel(packed([[5, 3]]), size=2, fill={"tokens": 7})
    theirs = packed([[5, 3]], multiple=4)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens", "cu_seqlens_padded"):
        assert torch.equal(ours[name], theirs[name])
    assert ours.max_seqlen == theirs.max_seqlen
    assert pad_for_context_parallel(theirs, size=2) is theirs


def test_rows_are_padded_too() -> None:
    batch = batch_sequences([sample(5, 1)], 5, FILLING)
    padded = pad_for_context_parallel(batch, size=2, fill={"tokens": 7})
    assert padded.tokens.tolist() == [[1000, 1001, 1002, 1003, 1004, 7, 7, 7]]
    assert padded.position_ids.tolist() == [list(range(8))]


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (packed([[6, 4]]), "sample 0 of the packs has 6 tokens with padding, .* between 2 context-parallel ranks"),
        (batch_sequences([sample(6, 1)], 6, FILLING), "a sequence of 6 tokens cannot be divided between 2"),
        ({"pixel_values": torch.zeros(2, 2)}, "no token-level tensor of shape"),
        ({"tokens": torch.zeros(1, 8), "labels": torch.zeros(1, 7)}, r"labels has shape \(1, 7\)"),
        ({"tokens": torch.zeros(1, 8), "cu_seqlens": torch.tensor([0, 4])}, "end at token 4, but the 1 rows of 8"),
        (
            {
                "tokens": torch.zeros(1, 8),
                "cu_seqlens": torch.tensor([0, 8]),
                "attention_mask": torch.zeros(1, 1, 8, 8),
            },
            "attention_mask of shape .* is not a field of packed sequences",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        slice_for_context_parallel(batch, rank=0, size=2)


def test_a_rank_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"rank 2 is not in range\(2\)"):
        slice_for_context_parallel(packed([[4]]), rank=2, size=2)
    with pytest.raises(ConfigurationError, match="cannot be padded"):
        pad_for_context_parallel({"tokens": torch.zeros(1, 3), "attention_mask": torch.zeros(1, 1, 3, 3)}, size=2)


# Samples for megatron-core's schedulers -------------------------------------------------------------------------------


def texts(lengths: list[int]) -> list[MultiModalSample]:
    return [
        MultiModalSample(
            __key__=str(number),
            __restore_key__=(),
            tokens=torch.arange(length) + 100 * number,
            labels=torch.arange(length) + 100 * number + 1,
            loss_mask=torch.ones(length),
            visual={},
            answer="",
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("packed_rows", [False, True])
def test_the_samples_of_a_batch_for_the_schedulers_of_megatron_core(packed_rows: bool) -> None:
    filling, samples = PaddingValues(pad_id=0, ignore=-100), texts([3, 6, 5, 1])
    if packed_rows:
        packs = [pack_sequences(part, filling, multiple_of=4) for part in (samples[:2], samples[2:])]
        batch = batch_packs(packs, filling)
    else:
        batch = batch_sequences(samples, 8, filling)
    found = scheduler_samples(batch, multiple_of=4)
    assert [one["original_seq_len"].item() for one in found] == [3, 6, 5, 1]
    assert [one["padded_seq_len"].item() for one in found] == [4, 8, 8, 4]
    for one, sample in zip(found, samples, strict=True):
        size = len(sample.tokens)
        assert one["tokens"][:size].tolist() == sample.tokens.tolist()
        assert one["labels"].tolist() == [*sample.labels.tolist(), *[-100] * (-size % 4)]
        assert one["loss_mask"].sum() == size
        assert one["position_ids"].tolist() == list(range(size + -size % 4))
    batch.__valid__ = torch.tensor([False, True]) if packed_rows else torch.tensor([True, False, True, True])
    left = [one["tokens"][0].item() for one in scheduler_samples(batch)]
    assert left == ([200, 300] if packed_rows else [0, 200, 300])


def test_the_scheduler_of_megatron_core_takes_the_samples_apart_again() -> None:
    schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
    samples = scheduler_samples(batch_sequences(texts([3, 6, 5]), 8, PaddingValues(pad_id=0, ignore=-100)))
    unpack = schedule.HybridCPDataLoaderWrapper.unpack_batch
    found = unpack(None, [scheduler_pack(samples[:2]), scheduler_pack(samples[2:])])
    for one, sample in zip(found, samples, strict=True):
        assert {name: values.tolist() for name, values in one.items()} == {
            name: sample[name].tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")
        }


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"tokens": torch.zeros(1, 3), "pixel_values": torch.zeros(1)},
            "images or videos, .*: use balance='global_batch'",
        ),
        ({"tokens": torch.zeros(1, 3)}, "the batch has no labels, loss_mask, position_ids, attention_mask"),
    ],
)
def test_batches_that_the_schedulers_cannot_take(batch: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        scheduler_samples(batch)

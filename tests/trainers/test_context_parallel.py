"""Slices of a batch for context-parallel ranks: those of megatron-core, and for packs those of each sample."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.sequences import (
    MultiModalBatch,
    MultiModalSample,
    PaddingValues,
    batch_sequences,
)
from energon_bridge.models.families import ChatConfig
from energon_bridge.models.packing.packed_sequences import batch_packs, cu_seqlens, pack_sequences, packed_seq_params
from energon_bridge.trainers.context_parallel import (
    packed_indices,
    pad_for_context_parallel,
    scheduler_pack,
    scheduler_samples,
    slice_for_context_parallel,
)
from energon_bridge.trainers.feedback import losses_by_dataset

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
def test_slices_are_those_of_megatron(size: int) -> None:
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
        "of_a_user": torch.rand(2, length),
        "embeddings_of_a_user": torch.rand(2, length, 5),
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

    on_ranks(size, compare, cp=size)


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


QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def talks(family: str, multiple: int, packed: bool) -> MultiModalBatch:
    """A batch of the chat encoder, with images, in one or two rows."""
    pytest.importorskip("transformers")
    from families import chat, encoder_of, picture

    encoder = encoder_of(family, ChatConfig(pad_to_multiple_of=multiple))
    talks = [
        chat("<image> color?", "red" * (number + 1), images=[picture(16 + 8 * number, 24)], key=str(number))
        for number in range(3)
    ]
    samples = [encoder.encode(talk) for talk in talks]
    rows: Any = [encoder.pack_selected_samples(part) for part in (samples[:2], samples[2:])] if packed else samples
    return encoder.batch(rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", QWEN)
def test_positions_on_three_axes_and_token_types_are_padded_as_by_the_encoder(family: str, packed: bool) -> None:
    ours = pad_for_context_parallel(talks(family, 1, packed), size=2)
    theirs = talks(family, 4, packed)
    names = ["tokens", "labels", "loss_mask", "position_ids", "attention_mask"]
    names += ["mm_token_type_ids", "mrope_position_ids"]
    for name in names:
        wanted, found = theirs[name], ours[name]
        if packed:  # rows laid end to end; in rows the last sample is padded to the longest row
            cuts = theirs.cu_seqlens_padded.tolist()  # type: ignore[union-attr]
            starts = ours.cu_seqlens_padded.tolist()  # type: ignore[union-attr]
            wanted, found = (value.reshape(*value.shape[:-2], -1) for value in (wanted, found))
            for start, place, length in zip(starts, cuts, ours.cu_seqlens.diff().tolist(), strict=False):  # type: ignore[union-attr]
                assert torch.equal(found[..., start : start + length], wanted[..., place : place + length]), name
        else:
            assert torch.equal(found, wanted), name
        assert found.shape[-1] % 4 == 0
    for rank in range(2):
        part = slice_for_context_parallel(ours, rank=rank, size=2)
        shapes = {name: part[name].shape[-1] for name in names}
        assert set(shapes.values()) == {ours.tokens.shape[-1] // 2}


@pytest.mark.parametrize("packed_rows", [False, True])
def test_every_rank_has_the_values_of_the_same_tokens(packed_rows: bool) -> None:
    """All that has a value per token is made of the token, so that it says of which one it is."""
    batch: Any = packed([[5, 3], [7]]) if packed_rows else batch_sequences([sample(5, 1), sample(7, 2)], 7, FILLING)
    whole: dict[str, Any] = {name: batch[name] for name in ("tokens", "labels", "cu_seqlens", "cu_seqlens_padded")}
    tokens = batch.tokens
    whole |= {
        "mrope_position_ids": torch.stack([tokens, tokens + 1, tokens + 2]),
        "weights": tokens.float(),
        "hidden": torch.stack([tokens, tokens + 1], dim=-1),
        "channels": torch.stack([tokens, tokens + 1, tokens + 2, tokens + 3]),
        "visual_inputs": {"mm_token_type_ids": tokens.clone(), "image_grid_thw": torch.ones(7, 3)},
        "teacher_labels": tokens.clone(),
        "image_features": torch.zeros(*tokens.shape),
    }
    fill = dict.fromkeys(("tokens", "teacher_labels", "visual_inputs.mm_token_type_ids", "weights"), 7)
    padded = pad_for_context_parallel(whole, size=2, fill=fill)
    real = padded["tokens"] != 7
    seen = []
    for rank in range(2):
        part = slice_for_context_parallel(padded, rank=rank, size=2)
        own = part["tokens"]
        own_real = own != 7
        assert torch.equal(part["weights"].long(), own)
        assert torch.equal(part["teacher_labels"], own)
        assert torch.equal(part["visual_inputs"]["mm_token_type_ids"], own)
        for axis in range(4):
            assert torch.equal(part["channels"][axis][own_real], own[own_real] + axis)
            if axis < 3:
                assert torch.equal(part["mrope_position_ids"][axis][own_real], own[own_real] + axis)
            if axis < 2:
                assert torch.equal(part["hidden"][..., axis][own_real], own[own_real] + axis)
        assert part["visual_inputs"]["image_grid_thw"].shape == (7, 3)
        assert part["image_features"] is whole["image_features"]
        seen += own[own_real].tolist()
    assert sorted(seen) == sorted(padded["tokens"][real].tolist())
    default = pad_for_context_parallel(whole, size=2)
    assert set(default["teacher_labels"][~real].tolist()) <= {-100, 7}
    assert "mm_token_type_ids" in whole["visual_inputs"]
    assert whole["visual_inputs"]["mm_token_type_ids"] is not padded["visual_inputs"]["mm_token_type_ids"]


def test_named_fields_are_cut_and_no_others() -> None:
    batch = {"tokens": torch.arange(8)[None], "features": torch.arange(8.0)[None], "weights": torch.arange(8.0)[None]}
    part = slice_for_context_parallel(batch, rank=0, size=2, token_fields=("tokens", "weights"))
    assert part["features"] is batch["features"]
    assert part["weights"].tolist() == [[0, 1, 6, 7]]


@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 8, 8), (8,), (2, 3, 8, 8)])
def test_a_field_that_may_be_meant_is_an_error(shape: tuple[int, ...]) -> None:
    batch = {"tokens": torch.zeros(2, 8), "mine": torch.zeros(shape)}
    for call in (
        lambda: slice_for_context_parallel(batch, rank=0, size=2),
        lambda: pad_for_context_parallel(batch, size=3),
    ):
        with pytest.raises(ConfigurationError, match=r"mine has shape .* it cannot be told .* in token_fields"):
            call()
    assert slice_for_context_parallel(batch, rank=0, size=2, token_fields=["tokens"])["mine"] is batch["mine"]
    pixels = {"tokens": torch.zeros(2, 8), "pixel_values": torch.zeros(shape)}
    assert slice_for_context_parallel(pixels, rank=0, size=2)["pixel_values"] is pixels["pixel_values"]


@pytest.mark.parametrize(
    "mine",
    [
        np.zeros((2, 8)),
        np.zeros((2, 8, 3)),
        np.zeros((3, 2, 8)),
        [[0] * 8] * 2,
        [[0.5] * 8, (1,) * 8],
        [torch.zeros(8, 3)] * 2,
        (np.zeros(8), np.zeros(8)),
    ],
)
def test_a_value_per_token_that_is_no_tensor_is_an_error(mine: Any) -> None:
    batch = {"tokens": torch.zeros(2, 8), "mine": mine}
    for fields in (None, ["tokens", "mine"]):
        for call in (
            lambda fields=fields: slice_for_context_parallel(batch, rank=0, size=2, token_fields=fields),
            lambda fields=fields: pad_for_context_parallel(batch, size=3, token_fields=fields),
        ):
            with pytest.raises(ConfigurationError, match=r"mine is a (ndarray|list|tuple) with a value per token"):
                call()
    assert slice_for_context_parallel(batch, rank=0, size=2, token_fields=["tokens"])["mine"] is mine
    for other in (["a", "b"], [["a"] * 8] * 2, [(), ()], np.zeros(2), [[0] * 7, [0] * 8], [np.array(1)] * 2):
        part = slice_for_context_parallel(batch | {"mine": other}, rank=0, size=2)
        assert part["mine"] is other


def test_batches_of_megatron_bridge_are_cut_sample_by_sample() -> None:
    batch = packed([[5, 3], [7]])
    theirs: dict[str, Any] = {"input_ids": batch.tokens, "labels": batch.labels, "total_tokens": 16}
    for side in ("q", "kv"):
        theirs |= {f"cu_seqlens_{side}": batch.cu_seqlens, f"cu_seqlens_{side}_padded": batch.cu_seqlens_padded}
        theirs[f"max_seqlen_{side}"] = torch.tensor(batch.max_seqlen, dtype=torch.int32)
    ours = pad_for_context_parallel(batch, size=2)
    found = pad_for_context_parallel(theirs, size=2)
    assert found["total_tokens"] == ours.tokens.numel()
    for side in ("q", "kv"):
        assert torch.equal(found[f"cu_seqlens_{side}"], batch.cu_seqlens)  # type: ignore[arg-type]
        assert torch.equal(found[f"cu_seqlens_{side}_padded"], ours.cu_seqlens_padded)  # type: ignore[arg-type]
        assert int(found[f"max_seqlen_{side}"]) == ours.max_seqlen
    assert torch.equal(found["input_ids"], ours.tokens)
    for rank in range(2):
        part = slice_for_context_parallel(found, rank=rank, size=2)
        assert torch.equal(part["input_ids"], slice_for_context_parallel(ours, rank=rank, size=2).tokens)


def test_the_ends_with_padding_are_there_if_nothing_is_padded() -> None:
    tokens = torch.arange(8)[None]
    batch = {"tokens": tokens, "cu_seqlens": torch.tensor([0, 4, 8], dtype=torch.int32)}
    assert pad_for_context_parallel(batch, size=2)["cu_seqlens_padded"].tolist() == [0, 4, 8]
    pytest.importorskip("megatron.core.packed_seq_params")
    ready = batch_packs([pack_sequences([sample(4, 1), sample(4, 2)], FILLING)], FILLING)
    params = packed_seq_params(pad_for_context_parallel(ready, size=2))
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 4, 8]
    ready.cu_seqlens_padded = None
    assert packed_seq_params(ready).cu_seqlens_q_padded.tolist() == [0, 4, 8]


@pytest.mark.parametrize("packed_rows", [False, True])
def test_segments_and_masked_rows_follow_the_tokens(packed_rows: bool) -> None:
    samples = [sample(5, 1), sample(3, 2), sample(6, 3)]
    if packed_rows:
        packs = [pack_sequences(part, FILLING) for part in (samples[:2], samples[2:])]
        batch = batch_packs(packs, FILLING)
        batch.__valid__ = torch.tensor([True, False])
    else:
        batch = batch_sequences(samples, 6, FILLING)
        batch.__valid__ = torch.tensor([True, True, False])
    loss = lambda one: one.tokens.double() * one.loss_mask  # noqa: E731
    batch.segments = [tuple(part._replace(dataset=part.key) for part in row) for row in batch.segments]
    expected = {name: total for name, (total, _) in losses_by_dataset(batch, loss(batch)).items()}
    padded = pad_for_context_parallel(batch, size=2, fill={"tokens": 7})
    parts = [slice_for_context_parallel(padded, rank=rank, size=2) for rank in range(2)]
    found: dict[str, float] = {}
    for part in parts:
        for name, (total, _) in losses_by_dataset(part, loss(part)).items():
            found[name] = found.get(name, 0.0) + total
    if packed_rows:  # rows are joined, so that the loss mask says which are masked
        assert [int(part.__valid__.sum()) for part in parts] == [1, 1]
        assert sum(float(part.loss_mask.sum()) for part in parts) == 8
        expected["3"] = 0.0
    assert found == expected


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


def test_a_rank_that_does_not_exist_is_refused() -> None:
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

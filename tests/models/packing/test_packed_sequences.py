"""Packed sequences: what each sample would have given alone is in its place, and nothing crosses a border."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from multimodal import caption, encoder

from energon_bridge.core.errors import ConfigurationError, OverLongSampleError
from energon_bridge.core.samples import Segment, SourceInfo
from energon_bridge.models.conversations.sequences import MultiModalSample, PaddingValues, batch_sequences
from energon_bridge.models.packing.packed_sequences import (
    batch_packs,
    cu_seqlens,
    pack_sequences,
    packed_seq_params,
    unpack_batch,
)
from energon_bridge.models.packing.packing import Packer

FILLING = PaddingValues(pad_id=0, ignore=-100)


def sample(length: int, number: int, images: int = 1) -> MultiModalSample:
    """Tokens number*100 + 1, 2, …; the last half is learned; every image is a pixel of the sample's number."""
    sequence = number * 100 + torch.arange(1, length + 2)
    loss_mask = (torch.arange(length) >= length // 2).float()
    return MultiModalSample(
        __key__=f"s{number}",
        __restore_key__=("k", number),
        __sources__=(SourceInfo("data", number, "shard", ("txt",)),),
        tokens=sequence[:-1],
        labels=torch.where(loss_mask.bool(), sequence[1:], -100),
        loss_mask=loss_mask,
        visual={"pixel_values": torch.full((images, 1), number)} if images else {},
        answer=f"answer {number}",
        num_images=images,
    )


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@given(lengths, st.sampled_from([1, 2, 8]), st.integers(0, 5), st.booleans())
def test_every_sample_stands_in_its_place_as_it_was(sizes, multiple, spare, fixed):
    samples = [sample(size, number, images=number % 3) for number, size in enumerate(sizes, 1)]
    needed = sum(size + -size % multiple for size in sizes)
    row = needed + spare if fixed else None
    pack = pack_sequences(samples, FILLING, multiple_of=multiple, length=row)
    batch = batch_packs([pack], FILLING)
    starts, ends = batch.cu_seqlens_padded[:-1].tolist(), batch.cu_seqlens_padded[1:].tolist()
    assert batch.tokens.shape == (1, row or needed) == (1, ends[-1])
    assert batch.cu_seqlens.diff().tolist() == sizes
    assert all(start % multiple == 0 for start in starts)
    for one, start, end in zip(samples, starts, ends, strict=True):
        stop = start + len(one.tokens)
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(getattr(batch, name)[0, start:stop], getattr(one, name)), name
        assert batch.position_ids[0, start:end].tolist() == list(range(end - start))
        assert batch.attention_mask[0, start:end].tolist() == [1] * (stop - start) + [0] * (end - stop)
        assert (batch.labels[0, stop:end] == -100).all()
        assert not batch.loss_mask[0, stop:end].any()
        assert not batch.tokens[0, stop:end].any()
    assert batch.max_seqlen == max(end - start for start, end in zip(starts, ends, strict=True))
    pixels = [] if batch.pixel_values is None else batch.pixel_values.flatten().tolist()
    assert pixels == [number for number, one in enumerate(samples, 1) for _ in range(one.num_images)]


def test_what_a_pack_says_of_its_samples() -> None:
    packs = [pack_sequences([sample(2, 1), sample(3, 2)], FILLING), pack_sequences([sample(4, 3)], FILLING)]
    assert packs[0].__key__ == "s1,s2"
    assert packs[0].__restore_key__ == (("k", 1), ("k", 2))
    assert [source.index for source in packs[0].__sources__] == [1, 2]
    batch = batch_packs(packs, FILLING)
    assert batch.__key__ == ["s1,s2", "s3"]
    assert batch.answers == ["answer 1", "answer 2", "answer 3"]
    assert batch.num_images == [1, 1, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 9]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.segments == [(("data", "s1", 0, 2), ("data", "s2", 2, 3)), (("data", "s3", 0, 4),)]


@given(lengths, st.sampled_from([1, 4]))
def test_segments_say_where_each_sample_stands_without_its_padding(sizes, multiple):
    samples = [sample(size, number) for number, size in enumerate(sizes, 1)]
    samples[0].__sources__ = None
    short = pack_sequences([sample(1, 99)], FILLING)
    batch = batch_packs([short, pack_sequences(samples, FILLING, multiple_of=multiple)], FILLING)
    assert batch.segments[0] == (Segment("data", "s99", 0, 1),)
    for one, segment in zip(samples, batch.segments[1], strict=True):
        place = slice(segment.start, segment.start + segment.length)
        assert torch.equal(batch.tokens[1, place], one.tokens)
        assert (segment.key, segment.dataset) == (one.__key__, "data" if one.__sources__ else "")
    assert [row[0].start for row in unpack_batch(batch, FILLING).segments] == [0] * (1 + len(sizes))


def test_packs_of_unequal_length_are_rows_of_one_batch() -> None:
    packs = [pack_sequences([sample(2, 1)], FILLING), pack_sequences([sample(2, 2), sample(2, 3)], FILLING)]
    batch = batch_packs(packs, FILLING)
    assert batch.tokens.tolist() == [[101, 102, 0, 0], [201, 202, 301, 302]]
    assert batch.labels[0, 2:].tolist() == [-100, -100]
    assert batch.loss_mask[0, 2:].tolist() == [0, 0]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 6]
    assert batch.cu_seqlens_padded.tolist() == [0, 4, 6, 8]
    assert batch.max_seqlen == 4


@given(st.lists(lengths, min_size=1, max_size=3), st.sampled_from([1, 4]), st.booleans())
def test_packs_taken_apart_are_the_samples_as_they_were(sizes, multiple, kinds):
    numbers = iter(range(1, 100))
    groups = [[sample(size, number := next(numbers), images=number % 3) for size in group] for group in sizes]
    packs = [pack_sequences(group, FILLING, multiple_of=multiple) for group in groups]
    batch = batch_packs(packs, FILLING)
    batch.__valid__ = torch.arange(len(packs)) % 2 == 0
    batch.__subflavors__ = [{"pack": number} for number in range(len(packs))] if kinds else None
    samples = [one for group in groups for one in group]
    expected = batch_sequences(samples, max(len(one.tokens) for one in samples), FILLING)
    rows = unpack_batch(batch, FILLING)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name
    assert (rows.pixel_values is None) == (expected.pixel_values is None)
    assert rows.pixel_values is None or torch.equal(rows.pixel_values, expected.pixel_values)
    for name in ("__key__", "sample_keys", "answers", "num_images", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
        assert getattr(rows, name) == getattr(expected, name), name
    assert rows.segments == expected.segments
    pack_of = [number for number, group in enumerate(groups) for _ in group]
    assert rows.__valid__.tolist() == [pack % 2 == 0 for pack in pack_of]
    assert rows.__subflavors__ == ([{"pack": pack} for pack in pack_of] if kinds else None)


def test_a_batch_that_is_not_packed_cannot_be_taken_apart() -> None:
    with pytest.raises(ConfigurationError, match="not packed"):
        unpack_batch(batch_sequences([sample(3, 1)], 3, FILLING), FILLING)


@given(lengths)
def test_cumulative_lengths(sizes):
    found = cu_seqlens(sizes)
    assert found.tolist() == [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    assert found.dtype == torch.int32


def test_a_pack_beyond_its_row_is_named() -> None:
    with pytest.raises(OverLongSampleError, match=r"samples 's1,s2' has 8 tokens, .* multiple of 4, but a row holds 7"):
        pack_sequences([sample(3, 1), sample(4, 2)], FILLING, multiple_of=4, length=7)


def test_a_field_with_more_values_than_tokens_is_refused() -> None:
    broken = sample(4, 1)
    broken.labels = torch.arange(6)
    for make in (pack_sequences, lambda samples, filling: batch_sequences(samples, 5, filling)):
        with pytest.raises(ConfigurationError, match=r"6 values, but there is room for [45]"):
            make([sample(3, 2), broken], FILLING)


def test_a_pack_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one sample"):
        pack_sequences([], FILLING)


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_parameters_of_megatron_core(multiple: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core says about packages that are not there
        pytest.importorskip("megatron.core.packed_seq_params")
    batch = batch_packs([pack_sequences([sample(3, 1), sample(4, 2)], FILLING, multiple_of=multiple)], FILLING)
    params: Any = packed_seq_params(batch)
    assert params.qkv_format == "thd"
    for side in ("q", "kv"):
        assert getattr(params, f"cu_seqlens_{side}").dtype == torch.int32
        assert getattr(params, f"cu_seqlens_{side}").tolist() == [0, 3, 7]
        assert getattr(params, f"max_seqlen_{side}") == 4
        padded = getattr(params, f"cu_seqlens_{side}_padded")
        assert padded.dtype == torch.int32
        assert padded.tolist() == ([0, 3, 7] if multiple == 1 else [0, 4, 8])


def test_without_megatron_core_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)
    batch = batch_packs([pack_sequences([sample(3, 1)], FILLING)], FILLING)
    with pytest.raises(ConfigurationError, match=r"energon-bridge.megatron"):
        packed_seq_params(batch)


def test_a_batch_that_is_not_packed_has_no_such_parameters() -> None:
    task_encoder = encoder()
    with pytest.raises(ConfigurationError, match="not packed"):
        packed_seq_params(task_encoder.batch([task_encoder.encode_sample(caption())]))


@pytest.mark.parametrize(("fixed", "width"), [(False, 24), (True, 32)])
def test_the_encoder_packs_what_it_encoded(fixed: bool, width: int) -> None:
    task_encoder = encoder(30, image_tokens_per_image=2, pad_to_multiple_of=8, pad_to_max_length=fixed)
    samples = [task_encoder.encode_sample(caption(text, text, 10 * number)) for number, text in enumerate("abc", 1)]
    groups = task_encoder.select_samples_to_pack(samples)
    assert [[one.__key__ for one in group] for group in groups] == [["a", "b", "c"]]
    batch = task_encoder.batch([task_encoder.pack_selected_samples(group) for group in groups])
    assert batch.tokens.shape == (1, width)
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 16, width]
    assert batch.pixel_values[:, 0, 0, 0].mul(255).round().tolist() == [10, 20, 30]


def test_the_longest_sample_fits_into_a_pack_of_its_own() -> None:
    task_encoder = encoder(30, image_tokens_per_image=2, pad_to_multiple_of=8, pad_to_max_length=True)
    samples = [task_encoder.encode_sample(caption("word " * 50))]
    assert len(samples[0].tokens) == 30
    (group,) = task_encoder.select_samples_to_pack(samples)
    assert task_encoder.pack_selected_samples(group).tokens.shape == (32,)


def test_the_packer_is_a_setting() -> None:
    packer: Packer[MultiModalSample] = Packer(limits={"samples": 2}, size_of=lambda one: {})
    task_encoder = encoder(image_tokens_per_image=2, packer=packer)
    samples = [task_encoder.encode_sample(caption(key=key)) for key in "abcd"]
    assert [len(group) for group in task_encoder.select_samples_to_pack(samples)] == [2, 2]

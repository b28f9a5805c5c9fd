"""Ready-made packing and grouping in the stream: whole batches, every sample once, policies in the counters."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, counts_of, loaders_of, text_dataset
from keyed import write_mix
from made import made_once
from multimodal import PixelProcessor, WordTokenizer

from energon_bridge.core.datasets import get_train_dataset
from energon_bridge.core.samples import TextSample
from energon_bridge.models.conversations.conversation import Document, Piece
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.packing.grouping import LengthGrouper
from energon_bridge.models.packing.packing import Packer

SAMPLES = 240
SEQ_LENGTH = 64
BOUNDARIES = (8, 16, 32, 64)
path = made_once(text_dataset, train=[80, 80, 80])


def words_of(number: int) -> int:
    """The length of a sample's text: 1 to 50 words."""
    return number * 37 % 50 + 1


def write_words(sample: TextSample, config: Any) -> Document:
    return Document(pieces=[Piece("word " * words_of(int(sample.__key__)), learned=True)])


def encoder(kind: type[MultiModalTaskEncoder] = MultiModalTaskEncoder, **values: Any) -> MultiModalTaskEncoder:
    task_encoder = kind(WordTokenizer(), PixelProcessor(), None, SEQ_LENGTH, **values)
    task_encoder.register_encoder(TextSample, write_words)
    return task_encoder


def batches_of(path: Path, task_encoder: Any, count: int, **settings: Any) -> tuple[list[Any], Any]:
    """The first microbatches of a run in one process, and its state after them."""
    config = config_of(1, 0, num_lanes=1)
    dataset = get_train_dataset(
        path, task_encoder=task_encoder, worker_config=config, max_samples_per_sequence=20, **settings
    )
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=1)
    try:
        return list(islice(loader, count)), loader.save_state_rank()
    finally:
        loader.close()


def members(batch: Any) -> list[str]:
    return [key for row in batch.__key__ for key in row.split(",")]


@pytest.mark.parametrize("batch_size", [2])
def test_packs_of_the_multimodal_encoder_are_full_and_hold_each_sample_once(path: Path, batch_size: int) -> None:
    batches, _ = batches_of(path, encoder(), 120 // batch_size, batch_size=batch_size, packing_buffer_size=60)
    seen: Counter[str] = Counter()
    used = 0
    for batch in batches:
        lengths = batch.cu_seqlens.diff().tolist()
        # One token to begin with; the end is only a label.
        assert lengths == [words_of(int(key)) + 1 for key in members(batch)]
        assert batch.tokens.shape[0] == batch_size
        assert batch.tokens.shape[1] <= SEQ_LENGTH
        assert int(batch.attention_mask.sum()) == sum(lengths)
        seen.update(members(batch))
        used += sum(lengths)
    # Every epoch brings each sample once; at the end one may still wait, and another be an epoch ahead.
    assert max(seen.values()) - min(seen[f"{n:05d}"] for n in range(SAMPLES)) <= 2
    assert used / (120 * SEQ_LENGTH) > 0.95


@pytest.mark.parametrize("packing", [None, 40])
def test_segments_of_a_mix_come_out_of_workers_with_their_dataset(
    path: Path, tmp_path: Path, packing: int | None
) -> None:
    other = text_dataset(tmp_path / "other", train=[80, 80])
    mix = write_mix(tmp_path / "mix.yaml", train={"blend": [{"weight": 1, "path": str(one)} for one in (path, other)]})
    dataset = get_train_dataset(
        mix, task_encoder=encoder(), worker_config=config_of(1, 2, num_lanes=2), batch_size=2,
        packing_buffer_size=packing,
    )  # fmt: skip
    (loader,) = loaders_of(dataset, 1, 2, num_lanes=2)
    try:
        batches = list(islice(loader, 20))
    finally:
        loader.close()
    seen = set()
    for batch in batches:
        assert [",".join(one.key for one in row) for row in batch.segments] == batch.__key__
        assert [one.dataset for row in batch.segments for one in row] == [s.dataset_path for s in batch.__sources__]
        for row, segments in enumerate(batch.segments):
            assert [one.length for one in segments] == [words_of(int(one.key)) + 1 for one in segments]
            starts = (batch.position_ids[row] == 0).nonzero().flatten().tolist()
            assert [one.start for one in segments] == starts
            seen |= {one.dataset for one in segments}
    assert seen == {str(path), str(other)}


@pytest.mark.parametrize("batch_size", [2])
def test_dropped_samples_are_counted_as_skipped(path: Path, batch_size: int) -> None:
    packer: Packer[Any] = Packer(limits={"tokens": 30}, size_of=lambda one: len(one.tokens), over_long="drop")
    task_encoder = encoder(packer=packer)
    batches, state = batches_of(path, task_encoder, 60, batch_size=batch_size, packing_buffer_size=40)
    assert all(batch.tokens.shape[1] <= 30 for batch in batches)
    assert {words_of(int(key)) < 30 for batch in batches for key in members(batch)} == {True}
    counts = counts_of(state)
    assert counts["dropped"] == counts["skipped"] > 0


class Grouping(MultiModalTaskEncoder):
    """Rows of similar length share a batch of at most 128 tokens."""

    grouper: LengthGrouper[Any] = LengthGrouper(
        length_of=lambda one: len(one.tokens), boundaries=BOUNDARIES, max_tokens=128
    )

    def batch_group_criterion(self, sample: Any) -> tuple[int, int | None]:
        return self.grouper.group(sample)


def test_rows_of_similar_length_share_batches_of_their_own_size(path: Path) -> None:
    batches, _ = batches_of(path, encoder(Grouping), 60, batch_size=None)
    shapes = {tuple(batch.tokens.shape) for batch in batches}
    assert {rows for rows, _ in shapes} <= {16, 8, 4, 2}
    for batch in batches:
        lengths = batch.attention_mask.sum(dim=1).tolist()
        (longest,) = {next(boundary for boundary in BOUNDARIES if length <= boundary) for length in lengths}
        assert len(lengths) == 128 // longest

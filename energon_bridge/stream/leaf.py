"""One leaf of a stream: what it is, and, once it is drawn from, what reads it and turns its bytes into samples."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.jsonl import JsonlDataset
from energon_bridge.mix import AuxRef
from energon_bridge.plan.leaf import LeafOrder, Round
from energon_bridge.rng import fold
from energon_bridge.stream.activity import Activities
from energon_bridge.stream.cooking import Cook
from energon_bridge.stream.dataset_code import sample_parser
from energon_bridge.stream.joined import JoinReader, JoinValues
from energon_bridge.stream.lines import LineValues
from energon_bridge.stream.reader import LeafReader, Reader, RoundBuffer
from energon_bridge.stream.report import Place
from energon_bridge.stream.values import Barred, SampleParser

_USER_CODE = 4
_NO_PARTS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One dataset of a stream: what it is, in which order it is read, and the stores that its cooker is given."""

    identity: str
    dataset: PreparedDataset | JoinedDataset
    order: LeafOrder
    aux: Mapping[str, AuxRef] = field(default_factory=dict)


def user_key_of(leaf: Leaf) -> int:
    """Return what keys the randomness of hooks over samples of a leaf; also what names the leaf in `Activity.words`."""
    return fold(leaf.order.key, _USER_CODE)


class LeafSource:
    """A leaf that has been opened in this process.

    `barred` has user key and index of each sample, of any leaf, that is not tried again.
    """

    def __init__(
        self,
        leaf: Leaf,
        decoder: Any,
        activities: Activities,
        *,
        cook: Cook | None,
        tolerant: bool,
        barred: Collection[tuple[int, int]] = (),
    ) -> None:
        self.leaf = leaf
        self.cook = cook
        self.reader: Reader
        self.values: SampleParser | JoinValues
        dataset = leaf.dataset
        if isinstance(dataset, JoinedDataset):
            self.reader = reader = JoinReader(dataset, tolerant=tolerant)
            self.values = JoinValues(leaf.identity, dataset, reader, decoder, activities)
        else:
            is_lines = isinstance(dataset, JsonlDataset)
            unread_from = None if is_lines else getattr(decoder, "unread_from", None)
            self.reader = LeafReader(dataset, tolerant=tolerant, unread_from=unread_from)
            values = LineValues if is_lines else sample_parser
            self.values = values(leaf.identity, dataset, decoder, activities)
        self.user_key = user_key_of(leaf)
        self.values.barred = Barred(self.user_key, frozenset(index for key, index in barred if key == self.user_key))

    def where(self, index: int) -> str:
        """Name a sample for people."""
        shard, local = self.reader.place_of(index)
        return f"{self.leaf.dataset.path}: shard {shard}, sample {index} (number {local} of the shard)"

    def place(self, index: int) -> Place:
        """Name a sample with its key and parts, which are read again for it."""
        shard, _ = self.reader.place_of(index)
        key, parts = "", _NO_PARTS
        with contextlib.suppress(Exception):  # there is an error to report already
            (raw,) = self.reader.read(np.array([index], dtype=np.int64))
            key, parts = self.values.name_of(raw, index)
        return Place(self.leaf.dataset.path, shard, index, key, parts)


class Cursor:
    """The rounds that one lane reads in one leaf: those it is in, and the next ones while they are read ahead.

    Args:
        source: The leaf.
        lane: The lane.
        together: Samples that are read at once, in as many rounds as it takes: what a round has of a slice is followed
            by what the next one has, so that a read is longer. The first round is read alone, to deliver soon.
    """

    __slots__ = ("_lane", "_source", "_together", "buffer", "next_buffer")

    def __init__(self, source: LeafSource, lane: int, together: int = 0) -> None:
        self._source = source
        self._lane = lane
        self._together = 0 if source.leaf.order.is_dealt else together
        self.buffer: RoundBuffer | None = None
        self.next_buffer: RoundBuffer | None = None

    def at(self, draw: int) -> tuple[RoundBuffer, int]:
        """Return the round that holds a draw of the leaf, and the place of the draw in it."""
        if self.buffer is None or not 0 <= draw - self.buffer.first < len(self.buffer):
            ahead, self.next_buffer = self.next_buffer, None
            if ahead is None or ahead.first != draw:
                ahead = self._rounds(draw, 0 if self.buffer is None else self._together)
            self.buffer = ahead
        return self.buffer, draw - self.buffer.first

    def following(self) -> RoundBuffer:
        """Return the rounds after the current ones, to be read ahead."""
        assert self.buffer is not None
        self.next_buffer = self._rounds(self.buffer.first + len(self.buffer), self._together)
        return self.next_buffer

    def drop(self) -> None:
        """Let the bytes go; they are read again when they are needed."""
        self.buffer = self.next_buffer = None

    def _rounds(self, draw: int, fewest: int) -> RoundBuffer:
        order = self._source.leaf.order
        rounds = [order.round_at(self._lane, draw)]
        count = rounds[0].indices.size
        while count < fewest:
            rounds.append(order.round_at(self._lane, rounds[0].first + count))
            count += rounds[-1].indices.size
        indices, epochs = (
            np.concatenate(parts) for parts in zip(*((r.indices, r.epochs) for r in rounds), strict=True)
        )
        return RoundBuffer(self._source.reader, Round(rounds[0].first, indices, epochs))

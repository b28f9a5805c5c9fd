"""Samples that are out: delivered, and not done yet. A loader with `keep_until_done` has them in its state.

Prompts of reinforcement learning are done long after they were delivered, and in any order. Each that is out is kept
by its restore key, with its place in the order of delivery and the rollouts that are left. After a restore, and after
`again`, samples that are out come first, in that order, in microbatches of their own: they are encoded again by their
references, and the position in the run stays where it is.

All ranks make the same number of steps: samples that come again are listed together, in order, and each step takes as
many as one step of the run. Of a last step with fewer, each rank gets its share; one whose share is empty gets a masked
microbatch of a row of another.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, MissingRankError, WrongUseError
from energon_bridge.core.loader.ranks import gathered
from energon_bridge.core.loader.run_data import RunData
from energon_bridge.core.loader.saved_run import COUNTED, SavedOut, SavedRun
from energon_bridge.core.order.changes import LeafBans
from energon_bridge.core.order.choose import Picks
from energon_bridge.core.stream.finite import mask_loss
from energon_bridge.core.stream.lane_state import (
    COLUMNS,
    COUNTERS,
    Counts,
    LaneBatch,
    SampleKey,
    SampleRef,
    as_members,
    is_of_several,
    read_key,
    read_keys,
)
from energon_bridge.core.stream.loading import load_picks
from energon_bridge.core.stream.pipeline import Pipeline, attach
from energon_bridge.core.stream.rows import BatchRow, batch_rows

logger = logging.getLogger(__name__)

_SAMPLES = COUNTERS.index("samples")
_BANNED = COUNTERS.index("banned")
_ENCODED_AGAIN = COLUMNS.index("encoded_again")
_MANY = 100_000
"""Samples out, and none ever done, from which on a warning comes."""


class Out(NamedTuple):
    """A sample that is out: the pass and the place in the order of delivery, and the rollouts that are left."""

    number: int
    place: int
    left: int


class RepeatedStep(NamedTuple):
    """A microbatch that comes again: the samples of this rank, and those of all ranks."""

    own: Sequence[SampleKey]
    all: Sequence[SampleKey]


def check_keeps(dataset: RunData) -> None:
    """Raise if a loader cannot keep what it delivers of a dataset until it is done."""
    settings = dataset.settings
    unfit = {
        "get_val_dataset, whose passes begin again": dataset.kind == "finite",
        "packing_buffer_size, whose rows are packs of several samples": settings.selects == "packs",
        "max_tokens_per_microbatch, which chooses the samples of each microbatch": settings.selects == "microbatches",
        "group_by, which chooses the samples of each microbatch": dataset.buckets is not None,
        "batch_group_criterion, which chooses the samples of each microbatch": dataset.grouped,
    }
    for what, found in unfit.items():
        if found:
            raise ConfigurationError(f"keep_until_done delivers samples again one by one; it does not go with {what}")


class Outstanding:
    """The samples of one rank that are out.

    Args:
        repeats: Rollouts of a sample.
        rows: Samples in a full microbatch.
        rank, ranks: Whose they are.
        group: Process group of the ranks.

    Attributes:
        out: By restore key.
        due: The microbatches that come again.
        counts: How many were done, came again and were dropped.
        ended: Whether the program has seen the end of the pass. If not, the first iterator after a restore finishes
            that pass, also where nothing is left of it.
    """

    def __init__(self, repeats: int, rows: int, rank: int, ranks: int, group: Any) -> None:
        self._repeats = repeats
        self._rows = rows
        self._rank = rank
        self._ranks = ranks
        self._group = group
        self.out: dict[SampleKey, Out] = {}
        self.due: deque[RepeatedStep] = deque()
        self.counts = [0] * (len(COUNTED) - 1)
        self.ended = False
        self._has_said_many = False

    @property
    def alone(self) -> bool:
        """Whether there is one rank only."""
        return self._ranks == 1

    def copied(self) -> Self:
        """Return an independent copy."""
        other = type(self)(self._repeats, self._rows, self._rank, self._ranks, self._group)
        other.out = dict(self.out)
        other.due = deque(self.due)
        other.counts = list(self.counts)
        other.ended = self.ended
        return other

    def clear(self) -> None:
        """Forget all of them."""
        self.out.clear()
        self.due.clear()
        self.ended = False
        self.counts = [0] * (len(COUNTED) - 1)

    def metrics(self) -> dict[str, float]:
        """Return how many are out, and the counts, by name."""
        counted = zip(COUNTED, (len(self.out), *self.counts), strict=True)
        return {f"until_done/{name}": count for name, count in counted}

    def deliver(self, batch: Any, number: int, microbatch: int) -> None:
        """Note a microbatch of the run that is delivered, by its pass and its number there.

        Raises:
            ConfigurationError: It does not say which samples it has.
        """
        key = batch.get("__restore_key__") if isinstance(batch, dict) else getattr(batch, "__restore_key__", None)
        if key is None:
            raise ConfigurationError(
                f"keep_until_done: a batch of type {type(batch).__name__} cannot carry __restore_key__: return a "
                "Batch, a dataclass or a dict from encode_batch"
            )
        if is_of_several(key):
            raise ConfigurationError(
                "keep_until_done: batch or encode_batch yields several batches of the same samples: return one"
            )
        for row, sample in enumerate(read_key(key).samples):
            before = self.out.get(sample)
            left = self._repeats if before is None else before.left + self._repeats
            self.out[sample] = Out(number, microbatch * self._rows + row, left)
        if len(self.out) > _MANY and not any(self.counts) and not self._has_said_many:
            self._has_said_many = True
            logger.warning(
                "rank %d: %d samples were delivered, and none is done: the state keeps them all. Call loader.done with "
                "their __restore_key__, or leave out keep_until_done",
                *(self._rank, len(self.out)),
            )

    # What the trainer says -------------------------------------------------------------------------------------------

    def finish(self, keys: Any, *, ignore_unknown: bool) -> None:
        """Count a rollout of each key as done, for each time that it is given; a sample without any left is done."""
        for key, times in self._known("done", keys, ignore_unknown).items():
            out = self.out[key]
            if times < out.left:
                self.out[key] = out._replace(left=out.left - times)
            else:
                del self.out[key]
                self.counts[0] += 1

    def drop(self, keys: Any, *, ignore_unknown: bool) -> None:
        """Give samples up."""
        for key in self._known("drop", keys, ignore_unknown):
            del self.out[key]
            self.counts[2] += 1

    def again(self, keys: Any, *, ignore_unknown: bool) -> None:
        """Let samples come again; all ranks must call it together."""
        due = {key for step in self.due for key in step.own if key in self.out}
        new: set[SampleKey] = set()
        wrong = ""
        try:
            new = self._known("again", keys, ignore_unknown).keys() - due
        except WrongUseError as error:  # raised when the other ranks know, which would wait for this one
            wrong = str(error)
        mine = {key: self.out[key] for key in due | new}
        told = gathered("again: the ranks share out what comes again", (wrong, mine), self._ranks, self._group)
        if wrong := next((wrong for wrong, _ in told if wrong), ""):
            raise WrongUseError(wrong)
        for key in mine:
            del self.out[key]
        self.counts[1] += len(new)
        self._deal([share for _, share in told])

    def _known(self, name: str, keys: Any, ignore_unknown: bool) -> Counter[SampleKey]:
        """Return the samples of some keys that are out, each with how often it is given; check all of them."""
        try:
            given = Counter(read_keys(keys))
        except LookupError as error:
            raise WrongUseError(f"{name}: {error}") from None
        for key, times in list(given.items()):
            out = self.out.get(key)
            if out is None and ignore_unknown:
                del given[key]
            elif out is None:
                raise WrongUseError(
                    f"{name}: {key!r} is not out on rank {self._rank}: it was done or dropped before, was delivered to "
                    "another rank, or only gave a masked microbatch its shape (__valid__ is false). "
                    "ignore_unknown=True leaves such keys out; nothing was changed"
                )
            elif name == "done" and times > out.left:
                raise WrongUseError(
                    f"done: {key!r} is given {times} times, but {out.left} of its {self._repeats} rollouts are left. "
                    "Nothing was changed"
                )
        return given

    # What comes again ------------------------------------------------------------------------------------------------

    def _deal(self, shares: Sequence[Mapping[SampleKey, Out]]) -> None:
        """Share the samples that come again out between the ranks; `shares` has them of each, or of all at once."""
        found = [(out, key) for share in shares for key, out in share.items()]
        found.sort()
        self.due = deque()
        at_once = self._rows * self._ranks
        for low in range(0, len(found), at_once):
            step = found[low : low + at_once]
            first, last = (-(-len(step) * number // self._ranks) for number in (self._rank, self._rank + 1))
            own = step[first:last]
            self.out |= {key: out for out, key in own}
            self.due.append(RepeatedStep([key for _, key in own], [key for _, key in step]))

    # State -----------------------------------------------------------------------------------------------------------

    def saved(self, identities: Sequence[str]) -> SavedOut:
        """Return what a state keeps, with leaves by their numbers."""
        leaves = {identity: leaf for leaf, identity in enumerate(identities)}
        rows = [
            (out.number, out.place, leaves[key[0]], *key[1:], out.left)
            for key, out in sorted(self.out.items(), key=lambda item: item[1])
        ]
        return SavedOut(
            ranks=(self._rank,),
            size=self._ranks,
            rows=np.array(rows, dtype=np.int64).reshape(-1, len(SavedOut.COLUMNS)),
            counts=tuple(self.counts),
            ended=self.ended,
        )

    def restored(self, saved: SavedRun, here: Iterable[str]) -> Self:
        """Return what is out after a state: all of it is due, but for samples whose datasets have left the mix.

        Raises:
            MissingRankError: Some of it is in the states of other ranks.
        """
        other = type(self)(self._repeats, self._rows, self._rank, self._ranks, self._group)
        known = saved.out
        if known is None:
            return other
        other.ended = known.ended
        whole = known.ranks == tuple(range(known.size))
        own = known.ranks == (self._rank,) and known.size == self._ranks
        if not (whole or own):
            raise MissingRankError(
                f"the state has what is out on ranks {list(known.ranks)} of {known.size}, this is rank {self._rank} of "
                f"{self._ranks}: restore from a list of the states of all ranks, or from save_state_global"
            )
        identities = [leaf["identity"] for leaf in saved.leaves]
        found = {
            (identities[leaf], sample, epoch, output): Out(number, place, left)
            for number, place, leaf, sample, epoch, output, left in known.rows.tolist()
        }
        present = {*here}
        if own or not self._rank:
            other.counts = list(known.counts)
            other.out = {key: out for key, out in found.items() if key[0] not in present}
        shares = [{key: out for key, out in found.items() if key[0] in present}]
        if not whole:
            what = "keep_until_done: ranks share out what comes again: pass the list of the states of all ranks"
            shares = gathered(what, shares[0], self._ranks, self._group)
        other._deal(shares)
        return other


class AgainStream:
    """Makes the microbatches that come again, in the training process; each is the first one that is due."""

    def __init__(self, pipeline: Pipeline, outstanding: Outstanding, banned: Mapping[str, LeafBans]) -> None:
        self.pipeline = pipeline
        self._outstanding = outstanding
        self._banned = banned
        self._leaves = {leaf.identity: number for number, leaf in enumerate(pipeline.leaves)}

    def prepare(self, unit: int, count: int) -> None:
        """Load nothing ahead."""

    def produce(self, unit: int) -> LaneBatch:
        """Return the microbatch that is due; without a batch, if nothing is left of it and this is the only rank."""
        out = self._outstanding.out
        step = self._outstanding.due[0]
        counts = Counts()
        keys = [key for key in step.own if key in out]
        banned = {key for key in keys if self._is_banned(key)}
        batch, made = self._made([key for key in keys if key not in banned], counts)
        for key in banned:
            counts.of(self._leaves[key[0]])[_BANNED] += 1
        for key in {*keys} - made:  # banned, or counted as failed or skipped
            del out[key]
        for key in made:
            counts.of(self._leaves[key[0]])[_SAMPLES] -= 1  # it was counted when it came first
        if batch is not None or self._outstanding.alone:
            return LaneBatch(batch, len(made), None, counts)
        for key in step.all:  # any row gives a masked microbatch its shape
            batch, made = self._made([key], Counts())
            if batch is not None:
                attach(batch, "__valid__", torch.zeros(len(made), dtype=torch.bool))
                mask_loss(batch)
                return LaneBatch(batch, 0, None, counts)
        raise FatalSampleError(f"{self.pipeline.paths}: none of {len(step.all)} samples that come again can be encoded")

    def _is_banned(self, key: SampleKey) -> bool:
        bans = self._banned.get(key[0])
        return bans is not None and bool(bans.among(np.array([key[1]], dtype=np.int64))[0])

    def _made(self, keys: Sequence[SampleKey], counts: Counts) -> tuple[Any, set[SampleKey]]:
        """Return the batch of some samples, and those that are in it; (None, none) if none is left."""
        pipeline = self.pipeline
        out = self._outstanding.out
        number = min((out[key].place for key in keys if key in out), default=0) // pipeline.rows
        with pipeline.user_code():
            pipeline.begin(-1, number)
            rows = list(self._encoded(keys, counts))
            batches = batch_rows(pipeline, rows, -1, number, counts)
        if not batches:
            return None, set()
        return batches[0], {(pipeline.leaves[row.members[0].leaf].identity, *row.members[0][1:]) for row in rows}

    def _encoded(self, keys: Sequence[SampleKey], counts: Counts) -> Iterator[BatchRow]:
        """Yield the samples as rows; those that hooks skip or fail on now are counted, the others were."""
        pipeline = self.pipeline
        refs = [SampleRef(self._leaves[key[0]], *key[1:]) for key in keys]
        due = iter(refs)
        loads = load_picks(pipeline.loading, Picks(as_members(refs)))
        while len(loads):
            loaded = loads.take()
            for key, sample in zip(loaded.keys, loaded.samples, strict=True):
                ref = next(due)
                counted = Counts()
                encoded = pipeline.encode(ref.leaf, sample, key, counted)
                if ref.output < len(encoded):
                    counts.of(ref.leaf)[_ENCODED_AGAIN] += 1
                    yield BatchRow((ref,), content=encoded[ref.output][1])
                    continue
                if encoded:
                    gone = LookupError(f"comes again, but its encoder no longer gives output {ref.output}")
                    pipeline.code.failed(gone, [(ref.leaf, ref.sample)], counted, hook=Hook.RESTORE)
                counts.add(counted)

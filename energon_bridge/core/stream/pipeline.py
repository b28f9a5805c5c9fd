"""What all streams of one process share: loading (`loading.py`), encoding and batching of draws."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from energon_bridge.core.encoder.deferred import decode_deferred
from energon_bridge.core.encoder.hooks import BATCH, NUMBER, UNKNOWN, Hook
from energon_bridge.core.errors import SampleError
from energon_bridge.core.samples import Batch, Sample
from energon_bridge.core.samples.sample import SentSources
from energon_bridge.core.samples.sample_place import pass_on, warned
from energon_bridge.core.samples.stacking import Padded, Stacking
from energon_bridge.core.storage.store import MADE, values_of
from energon_bridge.core.stream.budget import Budget
from energon_bridge.core.stream.lane_state import COUNTERS, Counts, PlainKey, SampleKey, batch_key, samples_of
from energon_bridge.core.stream.leaf import Leaf, cooker_of
from energon_bridge.core.stream.loading import Loading
from energon_bridge.core.stream.policy import FailureTracker
from energon_bridge.core.stream.settings import StreamSettings
from energon_bridge.core.stream.user_code import AS_IT_IS, BegunDraw, OwnHooks, PendingSample, UserCode, running_hooks
from energon_bridge.core.stream.values import BANNED, FailedSample, has_code
from energon_bridge.core.stream.watchdog import Activities, Watchdog

logger = logging.getLogger(__name__)

_SAMPLES, _SKIPPED, _EXCLUDED, _BANNED = map(COUNTERS.index, ("samples", "skipped", "excluded", "banned"))


@dataclass(slots=True)
class WaitingRows:
    """Rows that waited in groups, summed over looks at the lanes of a process: one lane has many only at times."""

    looks: int = 0
    rows: int = 0
    warned: bool = False


class Pipeline:
    """Loads, encodes and batches the draws that the streams of a process choose.

    The way of a draw: it is loaded (`loading`), and goes through `encode` (hooks for a sample) and `batches`
    (collation). If `postencode_sample` is user code and nothing is selected, `begin_draw` runs the first hook of all
    draws of a microbatch before `encode`, so that their images are decoded together.
    """

    def __init__(self, leaves: Sequence[Leaf], settings: StreamSettings) -> None:
        self.leaves = leaves
        self.settings = settings
        run = settings.run
        self.rows = run.rows
        self.conventions = conventions = run.conventions
        self._delivered = conventions.delivered
        self._attach = conventions.attach or attach
        makes = any(has_code(leaf.dataset) or cooker_of(run.task_encoder, leaf.dataset) for leaf in leaves)
        words = () if settings.worker is None else settings.worker.words
        activities = Activities(words[1:])
        self.own = own = OwnHooks(run.task_encoder, selects=run.selects, makes=makes)
        # If rows are packed or grouped, a slab would stay in use until the last of its images is delivered.
        straight = run.packing_buffer_size is None and not own.groups
        self.loading = Loading(leaves, settings, activities, slabs=straight, singly=own.present)
        self.source = self.loading.source
        self.judge = FailureTracker(run.error_policy, run.task_encoder, own.all, settings.delivered)
        self.code = UserCode(run.task_encoder, own, self.judge, self.source, words[0] if words else None)
        self._ranks = settings.config.dp_size
        self._workers = settings.config.processes
        self._batch_number = conventions.batch_numbers(self._ranks)
        self._batch_seconds = 0.0
        self._asked: tuple[float, ...] = values_of(MADE)
        self.watchdog = self._new_watchdog(activities)
        self.warned_of_groups = False
        self.waiting_rows = WaitingRows()
        self.budget = Budget(settings.config.buffer_bytes, settings.lanes)

    def _new_watchdog(self, activities: Activities) -> Watchdog | None:
        settings = self.settings
        worker = self.settings.worker
        if settings.watchdog is None:
            return None
        where = f"rank {settings.config.dp_rank}"
        if worker is None:
            return Watchdog(settings.watchdog, self.code.now, activities, where)
        where += f", worker {worker.number}"
        return Watchdog(settings.watchdog, self.code.now, activities, where, worker.said)

    @cached_property
    def num_samples(self) -> int:
        """Samples of all leaves."""
        return sum(leaf.order.num_samples for leaf in self.leaves)

    @property
    def paths(self) -> str:
        """Paths of the first datasets, for messages."""
        return ", ".join([*dict.fromkeys(leaf.dataset.path for leaf in self.leaves)][:3])

    def seconds_since(self, start: float) -> tuple[float, ...]:
        """Return the seconds since `start`, and those of them spent on loading and on batching; reset both.

        The requests to servers and to the node cache since the last call follow, if there were any.
        """
        found: tuple[float, ...] = (time.perf_counter() - start, self.loading.seconds, self._batch_seconds)
        now = values_of(MADE)
        if now != self._asked:
            found += tuple(after - before for before, after in zip(self._asked, now, strict=True))
            self._asked = now
        self.loading.seconds = self._batch_seconds = 0.0
        return found

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads.

        Args:
            wait: Whether to wait for their end. The garbage collector may run on any thread, also with one of
                `threading`'s locks held, which threads need to end: what it calls must not wait.
        """
        if self.watchdog is not None:
            self.watchdog.close(wait=wait)
        self.loading.close(wait=wait)

    # Encoding and batching -------------------------------------------------------------------------------------------

    def encode(
        self,
        leaf: int,
        sample: Any,
        key: SampleKey,
        counts: Counts,
        *,
        again: bool = False,
        begun: BegunDraw | None = None,
    ) -> list[tuple[SampleKey, Any]]:
        """Return the encoded samples of one draw with their restore keys; count a draw that gives none.

        With `again`, the hooks' own counts were counted before. `begun` is what `begin` made of the draw.
        """
        identity, index, epoch, _ = key
        ref = (leaf, index, epoch, 0)
        source = self.source(leaf)
        if type(sample) is PendingSample:
            sample = self.code.made(sample, ref, counts)
        if type(sample) is FailedSample:
            if sample.error is None:
                counts.of(leaf)[_BANNED if sample is BANNED else _EXCLUDED] += 1
            else:
                self.code.failed(sample.error, [(leaf, index)], counts, hook=sample.hook, place=sample.place)
            return []
        if begun is None:
            encoded = self.code.encode(sample, source, ref, counts, again=again)
        else:
            with self.stacking(lends=False):
                encoded = self.code.encode(sample, source, ref, counts, again=again, begun=begun)
        return [((identity, index, epoch, number), one) for number, one in enumerate(encoded)]

    def begin_draw(self, leaf: int, sample: Any, key: SampleKey) -> BegunDraw | None:
        """Run the first hook on a draw, before its images are decoded; None if the draw has no sample yet."""
        if type(sample) in (PendingSample, FailedSample):
            return None
        return self.code.begin(sample, self.source(leaf), (leaf, *key[1:]))

    def stacking(self, *, lends: bool) -> Stacking:
        """Join tensors in this context without a copy, if they are already adjacent; in lent memory if they are not."""
        return Stacking(self.loading.slab_pool, lends=lends)

    def collate(
        self,
        samples: Sequence[Any],
        keys: Sequence[PlainKey],
        leaves: Sequence[int],
        lane: int,
        number: int,
        counts: Counts | None,
    ) -> list[Any] | None:
        """Return the microbatch of some rows (several if a batch hook is a generator), with mask and restore key.

        None if a hook fails; without `counts`, what it raises is raised.
        """
        if self.settings.run.batch_size is None and not self.own.groups:
            batches = [samples[0]]
            self.code.worked(Hook.BATCH, leaves)
            restore_keys = keys[:1]
        else:
            _, index, epoch, output = samples_of(keys[0])[0]
            ref = (leaves[0], index, epoch, output)
            whole = self._shown(lane, number)
            start = time.perf_counter()
            slabs = self.loading.slab_pool
            slabs.forget_padded()
            try:
                with self.stacking(lends=True):
                    made = self.code.collate(samples, ref, counts, lambda: members_of_rows(leaves, keys), number=whole)
            finally:
                self._batch_seconds += time.perf_counter() - start
                self._say_padded(slabs.padded, keys, leaves)
            if made is None:
                return None
            batches = made
            restore_keys = [
                batch_key(lane, number + output, keys, output if len(made) > 1 else None) for output in range(len(made))
            ]
        if self._delivered is not None:
            batches = list(map(self._delivered, batches))
        for batch, key in zip(batches, restore_keys, strict=True):
            self._attach(batch, "__restore_key__", key)
            if not (self.settings.worker is not None and isinstance(batch, Batch | Sample | dict)):
                self._attach(batch, "__valid__", real_rows(len(samples)))
                continue
            self._attach(batch, "__valid__", RealRows(len(samples)))
            sources = batch.get("__sources__") if isinstance(batch, dict) else getattr(batch, "__sources__", None)
            if type(sources) is tuple:
                attach(batch, "__sources__", SentSources(sources))
        return batches

    def _say_padded(self, padded: Padded | None, keys: Sequence[PlainKey], leaves: Sequence[int]) -> None:
        """Warn once of a batch that is mostly padding, because of one row."""
        if padded is None or "padded" in warned:
            return
        where: object = self.paths
        if padded.rows == len(keys) == len(leaves):  # else rows are packs, or parts of samples
            where = self.source(leaves[padded.row]).place(samples_of(keys[padded.row])[0][1])
        text = (
            f"{where} has the shape {padded.shape}, others in its batch {padded.usual}: padded to it, {padded.rows} "
            f"rows take {padded.size:,} bytes. Make images of one size (image_target of the decoder, or resize in "
            "encode_sample), batch those of like sizes (group_by), or leave such samples out by a filter on a column "
            "of their size. Later ones are not named"
        )
        pass_on((logger.name, "padded", text))

    def begin(self, lane: int, number: int) -> None:
        """Set the microbatch that hooks see, by its number in its lane (lane -1: in its pass)."""
        if not self.own.present:
            return
        BATCH.set(UNKNOWN if self.own.waits else self._shown(lane, number))
        NUMBER.set(self.conventions.no_number)

    def begin_unknown(self) -> None:
        """Tell hooks that the microbatch of the next sample is unknown."""
        BATCH.set(UNKNOWN)
        NUMBER.set(self.conventions.no_number)

    @property
    def shares_buffers(self) -> bool:
        """Whether several lanes pack from one buffer (`dealt_packs.py`)."""
        return self.settings.packs_by_epoch and self.leaves[0].order.num_lanes < self.settings.num_lanes

    def _shown(self, lane: int, number: int) -> int:
        """Return the number of a microbatch as hooks see it."""
        # In a lane, `number` counts its own microbatches; a pass has no lanes.
        whole = number if lane < 0 else number * self.settings.num_lanes + lane
        return whole if self._batch_number is None else self._batch_number(whole)

    def sample_numbers(self, lane: int) -> Callable[[int], int] | None:
        """Return the function from a draw of a lane to its number for hooks; None: draws are not numbered."""
        if self.own.waits:
            return None
        num_lanes = self.leaves[0].order.num_lanes
        return self.conventions.sample_numbers(
            lane, num_lanes=num_lanes, rows=self.rows, ranks=self._ranks, workers=self._workers
        )

    def batches(
        self,
        samples: Sequence[Any],
        keys: Sequence[PlainKey],
        leaves: list[int],
        lane: int,
        number: int,
        counts: Counts,
    ) -> list[Any]:
        """Return the microbatches of some rows; none of no rows, or if a hook skips them or fails.

        Counts the samples of each leaf as delivered or skipped.
        """
        if not samples:
            return []
        batches = self.collate(samples, keys, leaves, lane, number, counts)
        if batches is None:
            return []
        column = _SAMPLES if batches else _SKIPPED
        drawn = set(leaves)
        for leaf in drawn:
            counts.of(leaf)[column] += leaves.count(leaf)
        if batches:
            self.judge.delivered |= drawn
        return batches

    def decode_deferred(self, samples: Sequence[Any]) -> None:
        """Decode the deferred images of samples that are about to be packed or batched, on the loading threads."""
        if self.own.posts:
            self.code.now.hook, self.code.now.sample = Hook.DECODE_DEFERRED, None
            # On an error the members are decoded one by one later, so that only the broken one fails.
            with contextlib.suppress(SampleError):
                decode_deferred(samples, self.loading.map, self.loading.slab_pool.lend)

    def flush_reports(self) -> None:
        """Flush failure reports that no later microbatch will carry."""
        reports = self.judge.taken()
        failure_log = self.settings.failure_log
        if reports and failure_log is not None:
            failure_log.write(reports, self.settings.config.dp_rank, self.settings.config.dp_size)

    def user_code(self, *, restoring: bool = False) -> contextlib.AbstractContextManager[None]:
        """Set up the hook context and restore the global generators afterwards; a no-op without user hooks."""
        if not (restoring or self.own.present):
            return AS_IT_IS
        run = self.settings.run
        config = self.settings.config
        put_back = restoring or not config.num_workers  # a worker's generators are its own
        return running_hooks(run.cache_pool, self.code.tally, put_back=put_back, config=config)


def attach(batch: Any, name: str, value: Any) -> None:
    """Set a meta field of a batch: an entry of a dict, otherwise an attribute if the type allows it."""
    if isinstance(batch, dict):
        batch[name] = value
        return
    try:
        if not isinstance(batch, torch.Tensor):
            setattr(batch, name, value)
    except AttributeError:  # like tensors, tuples and foreign slotted types carry no meta fields
        pass


def members_of_rows(leaves: Sequence[int], keys: Iterable[PlainKey]) -> Iterator[tuple[int, int]]:
    """Return leaf and index of the samples of some rows."""
    return zip(leaves, (one[1] for key in keys for one in samples_of(key)), strict=True)


def real_rows(rows: int) -> torch.Tensor:
    """Return the mask of rows that are all real."""
    valid = np.empty(rows, np.bool_)
    valid.fill(True)
    return torch.from_numpy(valid)


class RealRows:
    """A mask of real rows in a worker, by their number: unpickling makes the tensor, in the training process."""

    __slots__ = ("_rows",)

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return real_rows, (self._rows,)

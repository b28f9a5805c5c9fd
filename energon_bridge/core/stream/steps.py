"""The one way to run a hook: ``with steps.step(Hook.PACK, samples, ref, counts):``.

Entering a step names the hook and its argument for the watchdog and for messages, and seeds the global generators of
`random`, numpy and torch from a key of its first sample, so that running it again gives the same result in any process.
Leaving it adds what the hook counted to the counters, and asks the error policy about what it raised.

Steps of loading, on any thread, keep what they raise as a value instead (`Attempt`): a failure is judged where the
draw has its turn. No other module of the engine catches what user code raises, seeds for it, or asks the policy.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch

from energon_bridge.core.encoder.hooks import BATCH, CACHE, CONFIG, FAILED, NUMBER, SAMPLE, TALLY, Hook, Setting
from energon_bridge.core.errors import FatalSampleError, SkipSample
from energon_bridge.core.order.rng import fold
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.storage.helpers import PerProcess
from energon_bridge.core.stores import CachePool
from energon_bridge.core.stream.failures import MAX_MEMBERS, SamplePlace, place_in
from energon_bridge.core.stream.policy import FailureTracker
from energon_bridge.core.stream.state import COUNTERS, Counts
from energon_bridge.core.stream.watchdog import Activity, Words

logger = logging.getLogger(__name__)

Ref = tuple[int, int, int, int]
"""Leaf, sample, epoch and output: a `SampleRef`, or a tuple as cheap as can be where every sample needs one."""
Members = Callable[[], Iterable[tuple[int, int]]]
"""Returns leaf and index of the samples that a hook works on; asked if it fails, or if the policy wants to know."""


class Attempt:
    """``with attempt:`` keeps in `error` what a step raises over one sample; a mistake of the program goes on."""

    __slots__ = ("error",)
    passes: ClassVar[tuple[type[BaseException], ...]] = (FatalSampleError,)

    error: Exception

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self.passes):
            return False
        self.error = error
        return True


Begin = Callable[..., None]
"""Notes which hook of a dataset runs next, on which sample (dataset, index, key), and seeds from further words."""


@dataclass(slots=True, eq=False)
class PendingSample:
    """A draw whose user code has not run yet: `make` returns its sample, or a `FailedSample` instead."""

    make: Callable[[Begin], Any]


class Source(Protocol):
    """What a step asks of a leaf: the key of its random numbers, its cooker, its path, and names of samples."""

    user_key: int
    cook: Callable[[Any], Any] | None
    path: str

    def place(self, index: int) -> SamplePlace: ...


class Steps:
    """Runs the hooks of one process, on leaves that `source` returns by their numbers.

    Attributes:
        judge: Asks the error policy about failures.
        proves: The steps that must have worked if one did, where they are more than itself.
        now: The running hook and its argument.
        tally: Counts that hooks made by `count_over_long`; those of hooks of several samples are dropped.
    """

    def __init__(
        self,
        judge: FailureTracker,
        source: Callable[[int], Source],
        proves: Mapping[Hook, Collection[Hook]],
        words: Words | None,
    ) -> None:
        self.judge = judge
        self.source = source
        self.proves = proves
        self.now = Activity(words)
        self.tally: Counter[str] = Counter()

    def step(
        self,
        hook: Hook,
        argument: Any,
        ref: Ref,
        counts: Counts | None,
        members: Members | None = None,
        *,
        again: bool = False,
        seeds: bool = True,
    ) -> Step:
        """Return a step that begins with a hook; `seeds` says whether it is user code.

        Its random numbers are keyed by `ref`, the first of its samples (`members`). Failures and the hooks' own counts
        go to `counts`, the latter not `again`; without counts, failures are raised as they are.
        """
        step = Step(self, hook).on(argument, self.source(ref[0]).user_key, ref, counts, again, members)
        if seeds:
            step.begin(hook, ref[3])
        return step

    def made(self, pending: PendingSample, ref: Ref, counts: Counts | None) -> Any:
        """Finish a draw with the code that comes with its dataset: return the sample, or a `FailedSample`.

        Raises:
            FatalSampleError: The code is wrong.
        """
        now, (leaf, index, epoch, _) = self.now, ref
        leaf_key = self.source(leaf).user_key

        def begin(hook: Hook, dataset: Any, index: int, key: str, *words: int) -> None:
            now.dataset = dataset
            now.index = index
            now.key = key
            now.hook = hook
            seed_everything(fold(leaf_key, *((hook.key, *words) if hook.key else ())))

        SAMPLE.set((leaf_key, index, epoch))
        now.at(leaf_key, index)
        try:
            made = pending.make(begin)
        except FatalSampleError as error:
            if counts is not None:
                self.failed(error, [(leaf, index)], counts)
            raise
        now.rest()
        return made

    def worked(self, hook: Hook, leaves: Iterable[int]) -> None:
        """Record that a hook, and what it proves, worked on samples of some leaves."""
        if self.judge.alert:
            self.judge.succeeded(self.proves.get(hook, (hook,)), leaves)

    def failed(
        self,
        error: Exception,
        members: Sequence[tuple[int, int]],
        counts: Counts,
        *,
        hook: Hook | None = None,
        place: SamplePlace | None = None,
    ) -> None:
        """Ask the error policy about samples that a hook (default: the one that ran last) failed on, and count them.

        `place` is where the sample comes from, if there is only one and it is known.

        Raises:
            FatalSampleError: The run stops.
        """
        now = self.now
        hook = hook or now.hook
        given = now.sample
        assert hook is not None
        now.rest()
        name = "skipped"
        if not isinstance(error, SkipSample):
            places = [place] if place else [self.source(leaf).place(index) for leaf, index in members[:MAX_MEMBERS]]
            paths = {leaf: self.source(leaf).path for leaf, _ in members}
            sources = tuple(
                SourceInfo(one.dataset, one.index, one.shard, tuple(f"{one.key}.{part}" for part in one.parts))
                for one in places
            )
            with Setting(FAILED, ({"__key__": places[0].key} if given is None else given, sources)):
                name = self.judge.failed(error, hook, places, len(members), paths)
        for leaf, _ in members:
            counts.of(leaf)[COUNTERS.index(name)] += 1


class Step:
    """One hook, or several in turn, at work on a sample or several; see the top of this module.

    `of_draw` says that the first argument is a loaded sample, which says where it comes from.
    """

    __slots__ = ("_again", "_counts", "_key", "_members", "_now", "_of_draw", "_ref", "_steps", "hook")

    def __init__(self, steps: Steps, hook: Hook, *, of_draw: bool = False) -> None:
        self._steps = steps
        self._now = steps.now
        self._of_draw = of_draw
        self.hook = hook

    def on(
        self, argument: Any, key: int, ref: Ref, counts: Counts | None, again: bool, members: Members | None = None
    ) -> Self:
        """Work on a sample, or on members of which it is the first; draws and batches use one step again and again."""
        now = self._now
        now.hook = self.hook
        now.sample = argument
        self._key = key
        self._ref = ref
        self._counts = counts
        self._members = members
        self._again = again
        return self

    def begin(self, hook: Hook, *words: int) -> None:
        """Say that a hook runs from now on, and seed the generators for it; `words` end the key."""
        now, key, (_, index, epoch, _) = self._now, self._key, self._ref
        now.hook = hook
        if hook.is_single:
            now.at(key, index)
        SAMPLE.set((key, index, epoch) if hook.is_single or hook.arguments[0] == "sample" else ())
        seed_everything(fold(key, hook.key, index, epoch, *words))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        steps = self._steps
        now = self._now
        if steps.tally:
            self._take_tally()
        if error is None:
            now.hook = now.sample = None
            if steps.judge.alert:
                steps.worked(self.hook, {leaf for leaf, _ in self._of()})
            return False
        if self._counts is None or not isinstance(error, Exception):
            return False
        steps.failed(error, list(self._of()), self._counts, place=place_in(now.sample) if self._of_draw else None)
        return True

    def _of(self) -> Iterable[tuple[int, int]]:
        return (self._ref[:2],) if self._members is None else self._members()

    def _take_tally(self) -> None:
        """Add the hooks' own counts on one sample to those of its leaf, unless they were counted before."""
        tally = self._steps.tally
        if self._counts is not None and self.hook.is_single:
            counted = self._counts.of(self._ref[0])
            for name, number in tally.items():
                counted[COUNTERS.index(name)] += 0 if self._again else number
        tally.clear()


# ---------------------------------------------------------------------------------------------------------------------
# The global generators, which hooks draw from: in the training process they are restored after each microbatch, and
# only one thread at a time uses them, so several loaders in threads deliver what each delivers alone.


def seed_everything(key: int) -> None:
    """Seed the global generators of `random`, numpy and torch (CPU) from a key."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)


_generators = PerProcess(threading.RLock)
"""Held while hooks run in the training process, since all its threads share the global generators."""
_has_warned = False


@contextlib.contextmanager
def running_hooks(cache: CachePool, tally: Counter[str], *, put_back: bool, config: Any = None) -> Iterator[None]:
    """Set the context variables that hooks read: cache pool, tally, configuration.

    With `put_back`, restore the global generators afterwards.
    """
    with (
        Setting(CONFIG, config),
        Setting(CACHE, cache),
        Setting(TALLY, tally),
        Setting(SAMPLE, ()),
        Setting(BATCH, -1),
        Setting(NUMBER, -1),
        generators_put_back() if put_back else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Restore the global generators afterwards; no other thread runs hooks meanwhile."""
    global _has_warned
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not _has_warned:
        _has_warned = True
        logger.warning(
            "hooks of a task encoder run in thread %r of the training process (num_workers=0). They seed the global "
            "generators of random, numpy and torch, so numbers that other threads draw from these meanwhile (for "
            "dropout on the CPU, say) are not reproducible. Use worker processes, or iterate in the main thread",
            thread.name,
        )
    with _generators():
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])

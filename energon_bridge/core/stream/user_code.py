"""The one place where user code runs: ``with code.step(Hook.PACK, samples, ref, counts):``.

Entering a step names the hook and its argument for the watchdog and for messages, and seeds the global generators of
`random`, numpy and torch from a key of its first sample, so that running it again gives the same result in any process.
Leaving it adds what the hook counted to the counters, and asks the error policy about what it raised.

Steps of loading, on any thread, keep what they raise as a value instead (`Attempt`): a failure is judged where the
draw has its turn. No other module of the engine catches what user code raises, seeds for it, or asks the policy.

From `postencode_sample` on, user code sees no deferred images: those in fields are decoded first, and those from stores
and caches when they are requested (`DELIVERING`). What hooks return is made plain in `returned.py`; their names and
keys, and what they can ask, are in `encoder/hooks.py`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch

from energon_bridge.core.encoder.collate import batch_of
from energon_bridge.core.encoder.deferred import decode_deferred
from energon_bridge.core.encoder.hooks import (
    BATCH,
    CACHE,
    CONFIG,
    DELIVERING,
    FAILED,
    LAST,
    NUMBER,
    SAMPLE,
    TALLY,
    UNKNOWN,
    Hook,
    Setting,
    hook_of,
    is_overridden,
)
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, SampleError, SkipSample
from energon_bridge.core.order.rng import fold
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.samples.sample import Records
from energon_bridge.core.samples.sample_place import SamplePlace, pass_on, place_in
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.core.stores import CachePool
from energon_bridge.core.stream.failures import MAX_MEMBERS
from energon_bridge.core.stream.lane_state import COUNTERS, Counts, SampleRef
from energon_bridge.core.stream.policy import FailureTracker
from energon_bridge.core.stream.returned import group_key, selected_lists, shown, whole_number
from energon_bridge.core.stream.settings import SelectionKind
from energon_bridge.core.stream.watchdog import Activity, Words

logger = logging.getLogger(__name__)

_LOADING = (Hook.READ, Hook.DECODE, Hook.FIELD_MAP, Hook.PART_FILTER, Hook.SAMPLE_LOADER, Hook.JOINER, Hook.COOK)
_LATE = (Hook.DECODE_DEFERRED, Hook.POSTENCODE)
_BATCHING = (Hook.BATCH, Hook.ENCODE_BATCH)
AS_IT_IS = contextlib.nullcontext()


class OwnHooks:
    """Which hooks of an encoder are user code, and what follows from that.

    `makes` says whether it cooks samples of a leaf, or a leaf has code of its own.

    Attributes:
        first, pre: The hook that a draw begins with, and whether it is user code.
        encodes: Whether user code sees every sample drawn.
        groups: Whether rows are batched by groups.
        by_length: Whether microbatches are selected by the lengths of samples.
        waits: Whether samples wait to be packed or grouped, so that they may be encoded again for another microbatch.
        posts, measures, batches: Whether `postencode_sample`, `sample_length`, or a hook for batches is user code.
        posts_alone: Whether samples go to `postencode_sample` right after the first hook, since nothing is selected.
        present: Whether any hook is user code.
        proves: What must have worked if a hook did, where that is more than the hook.
        all: All steps on the way to a microbatch.

    Raises:
        ConfigurationError: The encoder overrides hooks that exclude each other.
    """

    def __init__(self, encoder: Any, *, selects: SelectionKind = None, makes: bool = False) -> None:
        name = type(encoder).__name__
        packs = selects == "packs"
        self.by_length = selects == "microbatches"
        pre = is_overridden(encoder, Hook.PREENCODE)
        self.posts = is_overridden(encoder, Hook.POSTENCODE)
        encodes = is_overridden(encoder, Hook.ENCODE)
        if encodes and (pre or self.posts):
            raise ConfigurationError(
                f"{name} overrides encode_sample and also preencode_sample or postencode_sample: "
                "override either encode_sample or, for work before and after packing, the other two"
            )
        for hook in (Hook.SELECT, Hook.PACK) if packs else ():
            if not is_overridden(encoder, hook):
                raise ConfigurationError(
                    f"packing_buffer_size is set, but {name} does not override {hook.title}: override it, or take an "
                    "encoder that packs, such as MultiModalTaskEncoder"
                )
        self.first = Hook.ENCODE if encodes else Hook.PREENCODE
        self.pre = encodes or pre
        self.posts_alone = self.posts and not selects
        self.encodes = self.pre or self.posts_alone or makes
        self.groups = is_overridden(encoder, Hook.GROUP)
        if self.groups and self.by_length:
            raise ConfigurationError(
                f"max_tokens_per_microbatch is set, but {name} overrides batch_group_criterion: both "
                "choose the samples of a microbatch. Leave one of them out"
            )
        self.waits = bool(selects) or self.groups
        if self.by_length and not hasattr(encoder, Hook.LENGTH.title):
            raise ConfigurationError(
                f"max_tokens_per_microbatch is set, but {name} has no sample_length: add that "
                "method, which returns the length of a sample in tokens, or derive from TaskEncoder"
            )
        self.measures = is_overridden(encoder, Hook.LENGTH)
        self.batches = is_overridden(encoder, Hook.BATCH, Hook.ENCODE_BATCH)
        self.present = self.encodes or self.batches or self.waits
        drawing = (*_LOADING, self.first, *(() if selects else _LATE))
        self.proves = {self.first: drawing, Hook.POSTENCODE: _LATE, Hook.BATCH: _BATCHING}
        late = _LATE if self.posts else ()
        selecting = (Hook.SELECT, *late, Hook.PACK) if packs else (Hook.LENGTH, *late) if self.by_length else ()
        self.all = (*drawing, *selecting, *((Hook.GROUP,) if self.groups else ()), *_BATCHING)


Ref = tuple[int, int, int, int]
"""Leaf, sample, epoch and output: a `SampleRef`, or a plain tuple, which is cheaper, if every sample needs one."""
Members = Callable[[], Iterable[tuple[int, int]]]
"""Returns leaf and index of the samples that a hook works on; called only if it fails or the policy needs them."""


class Attempt:
    """``with attempt:`` stores in `error` what a step over one sample raises; mistakes of the program go on."""

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


class HookLeaf(Protocol):
    """What a step asks of a leaf: the key of its random numbers, its cooker, its path, and names of samples."""

    user_key: int
    cook: Callable[[Any], Any] | None
    path: str

    def place(self, index: int) -> SamplePlace: ...


class BegunDraw(Attempt):
    """A draw after its first hook: samples or exception, the hook that ran last, and its counts."""

    __slots__ = ("encoded", "failed", "hook", "tally")
    passes = ()  # kept, so that failures are counted in the order of the draws

    def __init__(self) -> None:
        self.encoded: list[Any] = []
        self.failed = True
        self.hook: Hook | None = None
        self.tally: Counter[str] = Counter()


class UserCode:
    """Calls the hooks of an encoder, each in its step, and the code that comes with datasets.

    What a method is given besides samples: their references, and the counts of the microbatch (None: what a hook
    raises is raised).

    Args:
        source: Returns a leaf by its number.
        words: Where to write what is running, for the watchdog.

    Attributes:
        own: Which hooks are the user's.
        judge: Asks the error policy about failures.
        now: The running hook and its argument.
        tally: Counts that hooks made by `count_over_long`; those of hooks of several samples are dropped.
    """

    def __init__(
        self,
        encoder: Any,
        own: OwnHooks,
        judge: FailureTracker,
        source: Callable[[int], HookLeaf],
        words: Words | None,
    ) -> None:
        self.encoder = encoder
        self.own = own
        self.judge = judge
        self.source = source
        self.now = Activity(words)
        self.tally: Counter[str] = Counter()
        self._first = hook_of(encoder, own.first)

    def encode(
        self,
        sample: Any,
        source: HookLeaf,
        ref: Ref,
        counts: Counts,
        *,
        again: bool = False,
        begun: BegunDraw | None = None,
    ) -> list[Any]:
        """Cook and encode the sample of one draw; return the encoded samples (several if the hook is a generator).

        If the encoder selects, this runs `preencode_sample` only. `begun` is what `begin` made of the draw.
        """
        if not self.own.encodes:
            self.worked(self.own.first, ref[:1])
            return [sample]
        with Step(self, self.own.first, sample, source.user_key, ref, counts, again=again, of_draw=True) as step:
            encoded = self._first_of(step, sample, source.cook) if begun is None else self._outputs(begun)
            return self._posted(step, encoded) if self.own.posts_alone else encoded
        return []

    def begin(self, sample: Any, source: HookLeaf, ref: Ref) -> BegunDraw:
        """Run the first part of `encode`, before images are decoded; `encode` raises its exception, if any."""
        begun = BegunDraw()
        tally = self.tally
        with begun:
            step = Step(self, self.own.first, sample, source.user_key, ref, None, of_draw=True)
            begun.encoded = self._first_of(step, sample, source.cook)
            begun.failed = False
        begun.hook = self.now.hook
        begun.tally.update(tally)
        tally.clear()
        return begun

    def _outputs(self, begun: BegunDraw) -> list[Any]:
        """Return the samples that `begin` made of a draw, or raise its exception."""
        self.now.hook = begun.hook
        self.tally.update(begun.tally)
        if begun.failed:
            raise begun.error
        return begun.encoded

    def _first_of(self, step: Step, sample: Any, cook: Callable[[Any], Any] | None) -> list[Any]:
        if cook is not None:
            step.begin(Hook.COOK)
            sample = cook(sample)
            if sample is None:
                raise self._nothing()
        if not self.own.pre:
            return [sample]
        step.begin(self.own.first)
        made = self._first(sample)
        if not isinstance(made, GeneratorType):
            return self._listed(made)
        with Setting(BATCH, UNKNOWN):  # its outputs may end up in several microbatches
            return self._listed(made)

    def _posted(self, step: Step, encoded: list[Any]) -> list[Any]:
        self.now.hook = Hook.DECODE_DEFERRED
        decode_deferred(encoded)
        return [self._post(step, one, output) for output, one in enumerate(encoded)]

    def post(self, sample: Any, ref: SampleRef, counts: Counts | None, *, again: bool = False) -> Any:
        """Run `postencode_sample` on a sample that will be packed or batched next; return None if it fails."""
        if not self.own.posts:
            return sample
        with self.step(Hook.POSTENCODE, None, ref, counts, again=again, seeds=False) as step:
            self.now.hook = Hook.DECODE_DEFERRED
            decode_deferred([sample])
            return self._post(step, sample, ref.output)
        return None

    def _post(self, step: Step, sample: Any, output: int) -> Any:
        step.begin(Hook.POSTENCODE, output)
        with Setting(DELIVERING, True):
            encoded = self.encoder.postencode_sample(sample)
        if isinstance(encoded, GeneratorType):
            raise FatalSampleError(
                f"postencode_sample of {type(self.encoder).__name__} must return one sample; yield several from "
                "preencode_sample instead"
            )
        if encoded is None:
            raise self._nothing()
        return encoded

    def select(
        self, samples: list[Any], refs: Sequence[SampleRef], counts: Counts, *, last: bool
    ) -> list[Iterable[Any]] | None:
        """Return groups of the samples, each of which becomes a pack; None if the hook fails.

        `last`: no samples will join those left over.
        """
        with self.step(Hook.SELECT, samples, refs[0], counts, lambda: members_of(refs)):
            with Setting(LAST, last):
                groups = self.encoder.select_samples_to_pack(samples)
                groups = list(groups) if isinstance(groups, GeneratorType) else groups
            return selected_lists(groups, samples, self._where)
        return None

    def length(self, sample: Any, ref: SampleRef, counts: Counts) -> int | None:
        """Return the length of a sample in tokens, by `sample_length`, at least 1; None if the hook fails."""
        with self.step(Hook.LENGTH, sample, ref, counts, seeds=self.own.measures):
            given = self.encoder.sample_length(sample)
            length = whole_number(given)
            if length is None:
                raise FatalSampleError(
                    f"{self._where} returned {type(given).__name__} {shown(given)}: return the length of the sample, a "
                    "whole number of tokens"
                )
            if length < 0:
                raise SampleError(f"{self._where} returned the length {length}; expected at least 0")
            return max(1, length)
        return None

    def pack(self, samples: list[Any], refs: Sequence[SampleRef], counts: Counts | None) -> list[Any]:
        """Return the rows of a pack; none if the hook fails."""
        with self.step(Hook.PACK, samples, refs[0], counts, lambda: members_of(refs)), self._delivered():
            return self._listed(self.encoder.pack_selected_samples(samples))
        return []

    def group(self, row: Any, refs: Sequence[SampleRef], counts: Counts) -> tuple[Hashable, int | None] | None:
        """Return the group of a row, as a plain value, and its batch size; None if `batch_group_criterion` fails."""
        with self.step(Hook.GROUP, row, refs[0], counts, lambda: members_of(refs)):
            given = self.encoder.batch_group_criterion(row)
            if not isinstance(given, tuple) or len(given) != 2:
                got = "None" if given is None else f"{type(given).__name__} {shown(given)}"
                raise FatalSampleError(
                    f"{self._where} returned {got}: return the group and its batch size (None: that of the loader), or "
                    "raise SkipSample"
                )
            key = group_key(given[0], self._where)
            most = given[1]
            size = None if most is None else whole_number(most)
            if most is not None and (size is None or size < 1):
                raise FatalSampleError(
                    f"{self._where} returned batch size {shown(most)} for the group {shown(key)}; expected a whole "
                    "number of at least 1"
                )
            return key, size
        return None

    def collate(
        self, samples: Sequence[Any], ref: Ref, counts: Counts | None, members: Members, *, number: int
    ) -> list[Any] | None:
        """Return the batches of some rows, None if a hook fails; their randomness is keyed by the first sample.

        (Not by the `number` of the microbatch: a hook that raises by chance must not raise on the next one, too.)
        """
        key = self.source(ref[0]).user_key
        with Step(self, Hook.BATCH, samples, key, ref, counts, members) as step, self._delivered():
            if not self.own.batches:
                return [batch_of(samples)]
            step.begin(Hook.BATCH, ref[3])
            BATCH.set(number)
            raw = self._listed(self.encoder.batch(samples), "the batch")
            self.now.hook = Hook.ENCODE_BATCH
            return [out for batch in raw for out in self._listed(self.encoder.encode_batch(batch), "the batch")]
        return None

    def _listed(self, value: Any, wanted: str = "the sample") -> list[Any]:
        """Return the value that the current hook returned or yielded, as a list; `wanted` describes it in errors."""
        values = list(value) if isinstance(value, GeneratorType) else [value]
        for one in values:
            if one is None:
                raise self._nothing(wanted, "yielded" if isinstance(value, GeneratorType) else "returned")
        return values

    def _nothing(self, wanted: str = "the sample", gave: str = "returned") -> FatalSampleError:
        verb = "return" if gave == "returned" else "yield"
        return FatalSampleError(f"{self._where} {gave} None: {verb} {wanted}, or raise SkipSample")

    @property
    def _where(self) -> str:
        """The running hook and its class, for messages."""
        hook = self.now.hook
        return f"{hook.title if hook else None} of {type(self.encoder).__name__}"

    def _delivered(self) -> contextlib.AbstractContextManager[None]:
        """Samples that went through `postencode_sample` have nothing deferred from here on."""
        return Setting(DELIVERING, True) if self.own.posts else AS_IT_IS

    # Steps -----------------------------------------------------------------------------------------------------------

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
        step = Step(self, hook, argument, self.source(ref[0]).user_key, ref, counts, members, again=again)
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
            self.judge.succeeded(self.own.proves.get(hook, (hook,)), leaves)

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
        given = list(now.sample) if type(now.sample) is Records else now.sample
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

    Args:
        hook: The first of them, or the one that says whether all worked.
        argument: What it is given.
        key: The key of the leaf that the first of its samples is of.
        ref: The first of its samples.
        counts: Those of the microbatch; None: what a hook raises is raised.
        members: All of its samples; None: there is one.
        again: Whether the hooks' own counts were counted before.
        of_draw: Whether the argument is a loaded sample, which says where it comes from.
    """

    __slots__ = ("_again", "_code", "_counts", "_key", "_members", "_now", "_of_draw", "_ref", "hook")

    def __init__(
        self,
        code: UserCode,
        hook: Hook,
        argument: Any,
        key: int,
        ref: Ref,
        counts: Counts | None,
        members: Members | None = None,
        *,
        again: bool = False,
        of_draw: bool = False,
    ) -> None:
        self._code = code
        now = self._now = code.now
        now.hook = hook
        now.sample = argument
        self.hook = hook
        self._key = key
        self._ref = ref
        self._counts = counts
        self._members = members
        self._again = again
        self._of_draw = of_draw

    def begin(self, hook: Hook, *words: int) -> None:
        """Note that a hook runs from now on, and seed the generators for it; `words` end the key."""
        now, key, (_, index, epoch, _) = self._now, self._key, self._ref
        now.hook = hook
        if hook.is_single:
            now.at(key, index)
        SAMPLE.set((key, index, epoch) if hook.is_single or hook.arguments[0] == "sample" else ())
        seed_everything(fold(key, hook.key, index, epoch, *words))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        code = self._code
        now = self._now
        if code.tally:
            self._take_tally()
        if error is None:
            now.hook = now.sample = None
            if code.judge.alert:
                code.worked(self.hook, {leaf for leaf, _ in self._of()})
            return False
        if self._counts is None or not isinstance(error, Exception):
            return False
        code.failed(error, list(self._of()), self._counts, place=place_in(now.sample) if self._of_draw else None)
        return True

    def _of(self) -> Iterable[tuple[int, int]]:
        return (self._ref[:2],) if self._members is None else self._members()

    def _take_tally(self) -> None:
        """Add the hooks' own counts on one sample to those of its leaf, unless they were counted before."""
        tally = self._code.tally
        if self._counts is not None and self.hook.is_single:
            counted = self._counts.of(self._ref[0])
            for name, number in tally.items():
                counted[COUNTERS.index(name)] += 0 if self._again else number
        tally.clear()


def members_of(refs: Iterable[SampleRef]) -> Iterator[tuple[int, int]]:
    """Return leaf and index of some samples."""
    return ((ref.leaf, ref.sample) for ref in refs)


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
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        text = (
            f"hooks of a task encoder run in thread {thread.name!r} of the training process (num_workers=0). They seed "
            "the global generators of random, numpy and torch, so numbers that other threads draw from these meanwhile "
            "(for dropout on the CPU, say) are not reproducible. Use worker processes, or iterate in the main thread"
        )
        pass_on((logger.name, "thread", text))
    with _generators():
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])

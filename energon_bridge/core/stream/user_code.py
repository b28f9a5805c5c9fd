"""The hooks of a task encoder as the engine calls them: which of them are user code, and what they may return.

Each runs in a step (`steps.py`). From `postencode_sample` on, user code sees no deferred images: those in fields are
decoded first, and those from stores and caches when they are requested (`hooks.DELIVERING`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import index as index_of
from types import GeneratorType, NoneType
from typing import Any

import numpy as np
import torch

from energon_bridge.core.encoder.deferred import decode_deferred
from energon_bridge.core.encoder.hooks import BATCH, DELIVERING, LAST, UNKNOWN, Hook, Setting, hook_of, is_overridden
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, SampleError
from energon_bridge.core.stream.settings import Selection
from energon_bridge.core.stream.state import Counts, SampleRef
from energon_bridge.core.stream.steps import Attempt, Members, Ref, Source, Step, Steps

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

    def __init__(self, encoder: Any, *, selects: Selection = None, makes: bool = False) -> None:
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


class BegunDraw(Attempt):
    """A draw after its first hook: samples or exception, the hook that ran last, and its counts."""

    __slots__ = ("encoded", "failed", "hook", "tally")
    passes = ()  # kept, so that failures are counted in the order of the draws

    def __init__(self) -> None:
        self.encoded: list[Any] = []
        self.failed = True
        self.hook: Hook | None = None
        self.tally: Counter[str] = Counter()


class HookRunner:
    """Calls the hooks of an encoder, each in its step.

    What a method is given besides samples: their references, and the counts of the microbatch (None: what a hook
    raises is raised).
    """

    def __init__(self, encoder: Any, own: OwnHooks, steps: Steps) -> None:
        self.encoder = encoder
        self.own = own
        self.steps = steps
        self._first = hook_of(encoder, own.first)
        self._draw = Step(steps, own.first, of_draw=True)
        self._batch = Step(steps, Hook.BATCH)

    def encode(
        self,
        sample: Any,
        source: Source,
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
            self.steps.worked(self.own.first, ref[:1])
            return [sample]
        with self._draw.on(sample, source.user_key, ref, counts, again) as step:
            encoded = self._first_of(step, sample, source.cook) if begun is None else self._outputs(begun)
            return self._posted(step, encoded) if self.own.posts_alone else encoded
        return []

    def begin(self, sample: Any, source: Source, ref: Ref) -> BegunDraw:
        """Run the first part of `encode`, before images are decoded; `encode` raises its exception, if any."""
        begun = BegunDraw()
        tally = self.steps.tally
        with begun:
            begun.encoded = self._first_of(
                self._draw.on(sample, source.user_key, ref, None, False), sample, source.cook
            )
            begun.failed = False
        begun.hook = self.steps.now.hook
        begun.tally.update(tally)
        tally.clear()
        return begun

    def _outputs(self, begun: BegunDraw) -> list[Any]:
        """Return what `begin` made of a draw, as if it ran now."""
        self.steps.now.hook = begun.hook
        self.steps.tally.update(begun.tally)
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
        self.steps.now.hook = Hook.DECODE_DEFERRED
        decode_deferred(encoded)
        return [self._post(step, one, output) for output, one in enumerate(encoded)]

    def post(self, sample: Any, ref: SampleRef, counts: Counts | None, *, again: bool = False) -> Any:
        """Run `postencode_sample` on a sample that will be packed or batched next; return None if it fails."""
        if not self.own.posts:
            return sample
        with self.steps.step(Hook.POSTENCODE, None, ref, counts, again=again, seeds=False) as step:
            self.steps.now.hook = Hook.DECODE_DEFERRED
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
        with self.steps.step(Hook.SELECT, samples, refs[0], counts, lambda: members_of(refs)):
            with Setting(LAST, last):
                groups = self.encoder.select_samples_to_pack(samples)
                groups = list(groups) if isinstance(groups, GeneratorType) else groups
            return selected_lists(groups, samples, self._where)
        return None

    def length(self, sample: Any, ref: SampleRef, counts: Counts) -> int | None:
        """Return the length of a sample in tokens, by `sample_length`, at least 1; None if the hook fails."""
        with self.steps.step(Hook.LENGTH, sample, ref, counts, seeds=self.own.measures):
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
        with self.steps.step(Hook.PACK, samples, refs[0], counts, lambda: members_of(refs)), self._delivered():
            return self._listed(self.encoder.pack_selected_samples(samples))
        return []

    def group(self, row: Any, refs: Sequence[SampleRef], counts: Counts) -> tuple[Hashable, int | None] | None:
        """Return the group of a row, as a plain value, and its batch size; None if `batch_group_criterion` fails."""
        with self.steps.step(Hook.GROUP, row, refs[0], counts, lambda: members_of(refs)):
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
        self, samples: list[Any], ref: Ref, counts: Counts | None, members: Members, *, number: int
    ) -> list[Any] | None:
        """Return the batches of some rows, None if a hook fails; their randomness is keyed by the first sample.

        (Not by the `number` of the microbatch: a hook that raises by chance must not raise on the next one, too.)
        """
        key = self.steps.source(ref[0]).user_key
        with self._batch.on(samples, key, ref, counts, False, members) as step, self._delivered():
            if self.own.batches:
                step.begin(Hook.BATCH, ref[3])
                BATCH.set(number)
            raw = self._listed(self.encoder.batch(samples), "the batch")
            self.steps.now.hook = Hook.ENCODE_BATCH
            return [out for batch in raw for out in self._listed(self.encoder.encode_batch(batch), "the batch")]
        return None

    def _listed(self, value: Any, wanted: str = "the sample") -> list[Any]:
        """Return the value of the current hook as a list, or all that it yields; `wanted` describes it in errors."""
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
        hook = self.steps.now.hook
        return f"{hook.title if hook else None} of {type(self.encoder).__name__}"

    def _delivered(self) -> contextlib.AbstractContextManager[None]:
        """Samples that went through `postencode_sample` have nothing deferred from here on."""
        return Setting(DELIVERING, True) if self.own.posts else AS_IT_IS


def members_of(refs: Iterable[SampleRef]) -> Iterator[tuple[int, int]]:
    """Return leaf and index of some samples."""
    return ((ref.leaf, ref.sample) for ref in refs)


# ---------------------------------------------------------------------------------------------------------------------
# What hooks return, as plain values: groups, whole numbers, and lists of samples.
#
# A group is kept as a plain value, so that equal groups are one: `3`, `np.int64(3)` and `torch.tensor(3)`, or a list
# and an array of the same numbers. What has no value that a copy of it would have, too, is an error that names the
# hook.


_AS_THEY_ARE = frozenset({int, str, bytes, bool, NoneType})
_EQUAL = tuple.__eq__
_MOST_VALUES = 1024
"""Values of an array that is a group; every waiting row would keep more of them."""


def group_key(value: Any, hook: str) -> Hashable:
    """Return a group as a plain value: equal groups are equal and have one hash, here and in other processes.

    Args:
        value: What the hook returned.
        hook: Its name and that of its class.

    Raises:
        SampleError: It is NaN, or contains it: that belongs to the sample.
        FatalSampleError: It cannot be compared by value.
    """
    try:
        return _plain(value)
    except _NotEqualToItselfError:
        raise SampleError(
            f"{hook} returned the group {shown(value)}: NaN is equal to no other group, so the sample would never be "
            "in a batch. Return a group of its own for such samples"
        ) from None
    except _NoValueError as error:
        raise FatalSampleError(
            f"{hook} returned a {type(value).__name__} as the group ({shown(value)}): {error}. Return what the samples "
            "of a batch share, as numbers, strings, or tuples of them"
        ) from error.__cause__


class _NotEqualToItselfError(Exception):
    """NaN, NaT and the like."""


class _NoValueError(Exception):
    """An object that is equal only to itself, or that cannot be compared."""


def _plain(value: Any) -> Hashable:
    kind = type(value)
    # There is one object of each class and each member of an enumeration.
    if kind in _AS_THEY_ARE or (isinstance(value, (type, Enum)) and kind.__hash__ is not None):
        return value
    if isinstance(value, list) or (isinstance(value, tuple) and vars(kind).get("__eq__", _EQUAL) == _EQUAL):
        return tuple([_plain(one) for one in value])
    if isinstance(value, Set):
        return frozenset([_plain(one) for one in value])
    if isinstance(value, Mapping):
        return frozenset([(_plain(name), _plain(one)) for name, one in value.items()])
    if isinstance(value, bytearray):
        return bytes(value)
    if callable(getattr(value, "tolist", None)):  # arrays, tensors and their scalars
        return _array_values(value)
    try:
        return _compared(value)
    except _NoValueError:
        if not (is_dataclass(value) and kind.__dataclass_params__.eq):
            raise
    return kind, *(_plain(getattr(value, field.name)) for field in fields(value) if field.compare)


def _array_values(value: Any) -> Hashable:
    if (size := math.prod(getattr(value, "shape", ()))) > _MOST_VALUES:
        raise _NoValueError(f"it has {size} values, and a group has at most {_MOST_VALUES}")
    if isinstance(value, (np.datetime64, np.timedelta64)):  # their units would be lost
        return _compared(value)
    try:
        values = value.tolist()
    except Exception as error:  # tensors without values
        raise _NoValueError(f"its values cannot be read ({type(error).__name__}: {error})") from error
    return _compared(values) if type(values) in (type(value), float, complex) else _plain(values)


def _compared(value: Any) -> Hashable:
    """Return a value that is equal to itself and to its copy."""
    try:
        if not value == value:  # NaN
            raise _NotEqualToItselfError
        if type(value) is not float:
            other = _copied(value)
            if not (other == value and hash(other) == hash(value)):
                raise _NoValueError("it is equal only to itself, so no two samples would share a group")
    except (_NotEqualToItselfError, _NoValueError):
        raise
    except Exception as error:
        raise _NoValueError(f"it cannot be compared ({type(error).__name__}: {error})") from error
    return value


def _copied(value: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(value))  # as other ranks get it
    except Exception:  # of a class within a function
        other = copy.deepcopy(value)
    if other is value:
        raise _NoValueError("it is equal only to itself, so no two samples would share a group")
    return other


def shown(value: Any) -> str:
    """Return the beginning of a value's text in one line, for messages."""
    return " ".join(f"{value!r:.300}".split())[:100]


def whole_number(value: Any) -> int | None:
    """Return a whole number that is an integer of any kind, or a tensor or an array of one; else None."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        return None
    try:
        return int(index_of(value))
    except (TypeError, ValueError, RuntimeError):
        return None


def selected_lists(value: Any, samples: Sequence[Any], hook: str) -> list[Iterable[Any]]:
    """Return what a hook selected of some samples as lists, one for each pack.

    Raises:
        FatalSampleError: It is something else.
    """
    own = {id(sample) for sample in samples}
    selected: list[Any] = list(value) if _is_list(value) else []
    wrong = [one for one in selected if id(one) in own or not _is_list(one)] if _is_list(value) else [value]
    if wrong:
        among = "a list with " if selected else ""
        got = "None" if wrong[0] is None else f"a {type(wrong[0]).__name__}"
        raise FatalSampleError(f"{hook} returned {among}{got}: return lists of its samples, one for each pack")
    return selected


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))

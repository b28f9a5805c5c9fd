"""Runs user code: the hooks of a task encoder, under keyed randomness.

Before each user hook, and before code that comes with a dataset (`dataset_code`), the global generators of `random`,
numpy and torch are seeded from a key of the draw (or of the microbatch), so that encoding a sample again gives the same
result in any process. Without user code nothing is seeded. In the training process the generators are restored after
each microbatch, and only one thread at a time uses them: several loaders in threads deliver what each delivers alone.

From `postencode_sample` on, user code sees no deferred images: those in fields are decoded first, and those from stores
and caches when they are requested (`current.DELIVERING`).

Each hook records itself and its sample in an `Activity`, so that error messages and the watchdog can name them.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import GeneratorType
from typing import Any, Literal

import numpy as np
import torch

from energon_bridge.errors import ConfigurationError, FatalSampleError, SampleError
from energon_bridge.rng import fold
from energon_bridge.storage.helpers import PerProcess
from energon_bridge.stores import CachePool
from energon_bridge.stream.dataset_code import PendingSample
from energon_bridge.stream.hook_values import group_key, selected_lists, shown, whole_number
from energon_bridge.stream.watchdog import Activity, Words
from energon_bridge.task_encoder.current import (
    BATCH,
    CACHE,
    CONFIG,
    DELIVERING,
    LAST,
    NUMBER,
    SAMPLE,
    UNKNOWN,
    tallying,
)
from energon_bridge.task_encoder.deferred import decode_deferred

logger = logging.getLogger(__name__)

_ENCODE, _BATCH, _POST, _SELECT, _PACK, _GROUP, _COOK, _LENGTH = range(1, 9)
_LOADING = ("read", "decode", "field_map", "part_filter", "sample_loader", "joiner", "cook_crude_sample")

Selection = Literal["packs", "microbatches"] | None
"""What is selected of a buffer of samples: packs, by the encoder; microbatches of similar length; None: nothing is."""


def selection_of(packing_buffer_size: int | None, max_tokens_per_microbatch: int | None) -> Selection:
    """Return what these settings of a dataset select."""
    if packing_buffer_size is None:
        return None
    return "packs" if max_tokens_per_microbatch is None else "microbatches"


@dataclass(slots=True)
class BegunDraw:
    """A draw after its first hook: samples or exception, the hook that ran last, its argument, and its counts."""

    encoded: list[Any]
    error: Exception | None
    hook: str
    sample: Any
    tally: Counter[str]


class HookRunner:
    """Calls the hooks of an encoder.

    Args:
        encoder: The task encoder.
        selects: What is selected of a buffer of samples.
        makes: Whether it cooks samples of a leaf, or a leaf has code of its own.
        words: Where to write what is running (`Activity.words`).

    Attributes:
        encodes: Whether user code sees every sample drawn.
        groups: Whether rows are batched by groups.
        by_length: Whether microbatches are selected by the lengths of samples.
        waits: Whether samples wait to be packed or grouped, so that they may be encoded again for another microbatch.
        posts: Whether `postencode_sample` is user code.
        posts_alone: Whether it is, and samples go there right after the first hook, since nothing is selected.
        now: The running hook and its argument.
        drawing: The steps that must have worked if a draw gives samples.
        hooks: All steps on the way to a microbatch.
        tally: Counts that hooks made by `count_over_long`; taken after each hook.

    Raises:
        ConfigurationError: The encoder overrides hooks that exclude each other.
    """

    def __init__(
        self, encoder: Any, *, selects: Selection = None, makes: bool = False, words: Words | None = None
    ) -> None:
        self.encoder = encoder
        packs, self.by_length = selects == "packs", selects == "microbatches"
        self._selects = selects is not None
        pre, self.posts = (not is_default(_hook(encoder, f"{name}encode_sample")) for name in ("pre", "post"))
        encodes = not is_default(encoder.encode_sample)
        if encodes and (pre or self.posts):
            raise ConfigurationError(
                f"{type(encoder).__name__} overrides encode_sample and also preencode_sample or postencode_sample: "
                "override either encode_sample or, for work before and after packing, the other two"
            )
        if packs:
            for name in ("select_samples_to_pack", "pack_selected_samples"):
                if is_default(_hook(encoder, name)):
                    raise ConfigurationError(
                        f"packing_buffer_size is set, but {type(encoder).__name__} does not override {name}"
                    )
        self._first = encoder.encode_sample if encodes else _hook(encoder, "preencode_sample")
        self._pre = encodes or pre
        self.posts_alone = self.posts and not selects
        self.encodes = self._pre or self.posts_alone or makes
        self.groups = not is_default(_hook(encoder, "batch_group_criterion"))
        if self.groups and self.by_length:
            raise ConfigurationError(
                f"max_tokens_per_microbatch is set, but {type(encoder).__name__} overrides batch_group_criterion: both "
                "choose the samples of a microbatch. Leave one of them out"
            )
        self.waits = self._selects or self.groups
        if self.by_length and not hasattr(encoder, "sample_length"):
            raise ConfigurationError(
                f"max_tokens_per_microbatch is set, but {type(encoder).__name__} has no sample_length: add that "
                "method, which returns the length of a sample in tokens, or derive from TaskEncoder"
            )
        self._seeds_length = not is_default(_hook(encoder, "sample_length"))
        self._batches = not (is_default(encoder.batch) and is_default(encoder.encode_batch))
        self.now = Activity(words)
        self.tally: Counter[str] = Counter()
        self._first_name = "encode_sample" if encodes else "preencode_sample"
        late = ("decode_deferred", "postencode_sample")
        self.drawing = (*_LOADING, self._first_name, *(() if selects else late))
        packing: tuple[str, ...] = ("select_samples_to_pack", *late, "pack_selected_samples") if packs else ()
        packing = ("sample_length", *late) if self.by_length else packing
        grouping = ("batch_group_criterion",) if self.groups else ()
        self.hooks = (*self.drawing, *packing, *grouping, "batch", "encode_batch")

    @property
    def present(self) -> bool:
        """Whether any hook is not the package's own."""
        return self.encodes or self._batches or self._selects or self.groups

    def make(self, sample: PendingSample, leaf_key: int, index: int, epoch: int) -> Any:
        """Finish a draw with the code that comes with its dataset: return the sample, or a `FailedSample`."""
        SAMPLE.set((leaf_key, index, epoch))
        self.now.at(leaf_key, index)
        made = sample.make(partial(self._begin, leaf_key))
        self.now.rest()
        return made

    def _begin(self, leaf_key: int, hook: str, dataset: Any, index: int, key: str, words: Iterable[int]) -> None:
        now = self.now
        now.dataset, now.index, now.key, now.hook = dataset, index, key, hook
        seed_everything(fold(leaf_key, *words))

    def encode(
        self, sample: Any, leaf_key: int, index: int, epoch: int, cook: Callable[[Any], Any] | None = None
    ) -> list[Any]:
        """Cook and encode the sample of one draw; return the encoded samples (several if the hook is a generator).

        If the encoder packs, this runs `preencode_sample` only.
        """
        encoded = self._first_of(sample, leaf_key, index, epoch, cook)
        return self._posted(encoded, leaf_key, index, epoch) if self.posts_alone else encoded

    def begin(
        self, sample: Any, leaf_key: int, index: int, epoch: int, cook: Callable[[Any], Any] | None = None
    ) -> BegunDraw:
        """Run the first part of `encode`, before images are decoded; `finish` raises its exception, if any."""
        error, encoded = None, []
        try:
            encoded = self._first_of(sample, leaf_key, index, epoch, cook)
        except Exception as raised:  # kept, so that failures are counted in the order of the draws
            error = raised
        begun = BegunDraw(encoded, error, self.now.hook, sample, self.tally.copy())
        self.tally.clear()
        return begun

    def finish(self, begun: BegunDraw, leaf_key: int, index: int, epoch: int) -> list[Any]:
        """Run the second part of `encode`; raises the exception of the first part, if any."""
        SAMPLE.set((leaf_key, index, epoch))
        self.now.at(leaf_key, index)
        self.now.sample, self.now.hook = begun.sample, begun.hook
        self.tally.update(begun.tally)
        if begun.error is not None:
            raise begun.error
        return self._posted(begun.encoded, leaf_key, index, epoch)

    def _first_of(
        self, sample: Any, leaf_key: int, index: int, epoch: int, cook: Callable[[Any], Any] | None
    ) -> list[Any]:
        if not self.encodes:
            return [sample]
        SAMPLE.set((leaf_key, index, epoch))
        if self.tally:  # left by a hook that had several samples
            self.tally.clear()
        now = self.now
        now.at(leaf_key, index)
        now.sample = sample
        if cook is not None:
            now.hook = "cook_crude_sample"
            seed_everything(fold(leaf_key, _COOK, index, epoch))
            sample = cook(sample)
            if sample is None:
                raise self._nothing()
        encoded = [sample]
        if self._pre:
            now.hook = self._first_name
            seed_everything(fold(leaf_key, _ENCODE, index, epoch))
            encoded = self._encoded(self._first(sample))
        if not self.posts_alone:
            now.sample = None
            now.hook = ""
        return encoded

    def _posted(self, encoded: list[Any], leaf_key: int, index: int, epoch: int) -> list[Any]:
        now = self.now
        now.hook = "decode_deferred"
        decode_deferred(encoded)
        encoded = [self.post(one, leaf_key, index, epoch, output) for output, one in enumerate(encoded)]
        now.sample = None
        now.hook = ""
        return encoded

    def _encoded(self, value: Any) -> list[Any]:
        """Return the outputs of the first hook; those of a generator may end up in several microbatches."""
        if not isinstance(value, GeneratorType):
            return self._listed(value)
        token = BATCH.set(UNKNOWN)
        try:
            return self._listed(value)
        finally:
            BATCH.reset(token)

    def post(self, sample: Any, leaf_key: int, index: int, epoch: int, output: int) -> Any:
        """Run `postencode_sample` on a sample that will be packed or batched next."""
        if not self.posts:
            return sample
        SAMPLE.set((leaf_key, index, epoch))
        if self._selects and self.tally:
            self.tally.clear()
        self.now.at(leaf_key, index)
        self.now.hook = "postencode_sample"
        seed_everything(fold(leaf_key, _POST, index, epoch, output))
        with _delivering():
            encoded = self.encoder.postencode_sample(sample)
        if isinstance(encoded, GeneratorType):
            raise FatalSampleError(
                f"postencode_sample of {type(self.encoder).__name__} must return one sample; yield several from "
                "preencode_sample instead"
            )
        if encoded is None:
            raise self._nothing()
        return encoded

    def select(self, samples: list[Any], leaf_key: int, index: int, epoch: int, output: int, *, last: bool) -> Any:
        """Return groups of the samples, each of which becomes a pack; the key is that of the first sample.

        `last`: no samples will join those left over.
        """
        SAMPLE.set(())
        self.now.hook, self.now.sample = "select_samples_to_pack", samples
        seed_everything(fold(leaf_key, _SELECT, index, epoch, output))
        token = LAST.set(last)
        try:
            groups = self.encoder.select_samples_to_pack(samples)
            groups = list(groups) if isinstance(groups, GeneratorType) else groups
        finally:
            LAST.reset(token)
        groups = selected_lists(groups, samples, self._where)
        self.now.rest()
        return groups

    def length(self, sample: Any, leaf_key: int, index: int, epoch: int, output: int) -> int:
        """Return the length of a sample in tokens, by `sample_length`; at least 1."""
        SAMPLE.set((leaf_key, index, epoch))
        self.now.hook, self.now.sample = "sample_length", sample
        if self._seeds_length:
            seed_everything(fold(leaf_key, _LENGTH, index, epoch, output))
        found = self.encoder.sample_length(sample)
        length = whole_number(found)
        if length is None:
            raise FatalSampleError(
                f"{self._where} returned {type(found).__name__} {shown(found)}: return the length of the sample, a "
                "whole number of tokens"
            )
        if length < 0:
            raise SampleError(f"{self._where} returned the length {length}; expected at least 0")
        self.now.rest()
        return max(1, length)

    def pack(self, samples: list[Any], leaf_key: int, index: int, epoch: int, output: int) -> list[Any]:
        """Return the rows of a pack; the key is that of its first sample."""
        SAMPLE.set(())
        self.now.hook, self.now.sample = "pack_selected_samples", samples
        seed_everything(fold(leaf_key, _PACK, index, epoch, output))
        with _delivering() if self.posts else contextlib.nullcontext():
            rows = self._listed(self.encoder.pack_selected_samples(samples))
        self.now.rest()
        return rows

    def group(self, row: Any, leaf_key: int, index: int, epoch: int, output: int) -> tuple[Hashable, int | None]:
        """Return the group of a row, as a plain value, and the batch size of the group, by `batch_group_criterion`."""
        self.now.hook, self.now.sample = "batch_group_criterion", row
        seed_everything(fold(leaf_key, _GROUP, index, epoch, output))
        found = self.encoder.batch_group_criterion(row)
        if not isinstance(found, tuple) or len(found) != 2:
            got = "None" if found is None else f"{type(found).__name__} {shown(found)}"
            raise FatalSampleError(
                f"{self._where} returned {got}: return the group and its batch size (None: that of the loader), or "
                "raise SkipSample"
            )
        key, given = group_key(found[0], self._where), found[1]
        size = None if given is None else whole_number(given)
        if given is not None and (size is None or size < 1):
            raise FatalSampleError(
                f"{self._where} returned batch size {shown(given)} for the group {shown(key)}; expected a whole number "
                "of at least 1"
            )
        self.now.rest()
        return key, size

    def collate(
        self, samples: list[Any], leaf_key: int, index: int, epoch: int, output: int, *, number: int
    ) -> list[Any]:
        """Return the batches of some rows; their randomness is keyed by the first sample.

        (Not by the `number` of the microbatch: a hook that raises by chance must not raise on the next one, too.)
        """
        now = self.now
        now.hook, now.sample = "batch", samples
        if self._batches:
            seed_everything(fold(leaf_key, _BATCH, index, epoch, output))
            SAMPLE.set(())
            BATCH.set(number)
        with _delivering() if self.posts else contextlib.nullcontext():
            raw = self._listed(self.encoder.batch(samples), "the batch")
            now.hook = "encode_batch"
            batches = [out for batch in raw for out in self._listed(self.encoder.encode_batch(batch), "the batch")]
        now.hook, now.sample = "", None
        return batches

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
        return f"{self.now.hook} of {type(self.encoder).__name__}"


@contextlib.contextmanager
def _delivering() -> Iterator[None]:
    token = DELIVERING.set(True)
    try:
        yield
    finally:
        DELIVERING.reset(token)


def _hook(encoder: Any, name: str) -> Any:
    """Return a hook of an encoder; encoders that do not derive from `TaskEncoder` may lack some."""
    return getattr(encoder, name, _no_hook)


def _no_hook() -> None: ...


_no_hook.__default_hook__ = True  # type: ignore[attr-defined]


def is_default(hook: Any) -> bool:
    """Whether a hook is the package's own, also for encoders that forward their hooks to another encoder."""
    return bool(getattr(hook, "__default_hook__", False))


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
    of_loader = CONFIG.set(config)
    token, sample, batch, number = CACHE.set(cache), SAMPLE.set(()), BATCH.set(-1), NUMBER.set(-1)
    try:
        with tallying(tally), generators_put_back() if put_back else contextlib.nullcontext():
            yield
    finally:
        CONFIG.reset(of_loader)
        CACHE.reset(token)
        SAMPLE.reset(sample)
        BATCH.reset(batch)
        NUMBER.reset(number)


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

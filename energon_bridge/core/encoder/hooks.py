"""The hooks: every piece of user code that runs for a sample, a pack or a microbatch, and what it can ask the engine.

The table has their names, arguments and keys. `stream/user_code.py` runs them by it: it seeds the generators, names
what is running for the watchdog and for messages, and asks the error policy about failures.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.order.rng import fold
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.stores import CachePool, NoCachePool

T = TypeVar("T")

LONGEST_WAIT = 32
"""Selections after which lanes give up a sample that was left over by all of them."""
MAX_LIMIT = 2**31 - 1
"""The largest limit of packs, or of the tokens of a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    key: int = 0
    arguments: tuple[str, ...] = ()
    loses: tuple[str, str] = ("a sample", "samples")
    is_single: bool = False
    about_bytes: bool = False


_A_MICROBATCH = "a microbatch", "microbatches"


class Hook(Enum):
    """A hook of a task encoder, code that comes with a dataset, or a step of loading.

    Attributes:
        title: Its name in messages and reports; of a task encoder's hook, the name of the method.
        key: First word of the key of its random numbers; 0: it has none of its own.
        arguments: What the method of a task encoder is given; none: it is no such method.
        loses: What is left out if it fails, in words for messages: one of them, and several.
        is_single: Whether it runs on one sample, which the watchdog names.
        about_bytes: Whether it only reads or unpacks data: its failures are no mistakes of the program, and come in a
            row, since damage hits neighbouring samples.
        code: Its number in the words of an activity.
    """

    READ = "read", _Facts(about_bytes=True)
    DECODE = "decode", _Facts(about_bytes=True, is_single=True)
    FIELD_MAP = "field_map", _Facts()
    PART_FILTER = "part_filter", _Facts(key=9, is_single=True)
    SAMPLE_LOADER = "sample_loader", _Facts(key=8, is_single=True)
    JOINER = "joiner", _Facts(key=10, is_single=True)
    COOK = "cook_crude_sample", _Facts(key=7, arguments=("sample", "cooker", "aux"), is_single=True)
    ENCODE = "encode_sample", _Facts(key=1, arguments=("sample",), is_single=True)
    PREENCODE = "preencode_sample", _Facts(key=1, arguments=("sample",), is_single=True)
    DECODE_DEFERRED = "decode_deferred", _Facts(about_bytes=True)
    POSTENCODE = "postencode_sample", _Facts(key=3, arguments=("sample",), is_single=True)
    SELECT = "select_samples_to_pack", _Facts(key=4, arguments=("samples",), loses=("a selection", "selections"))
    PACK = "pack_selected_samples", _Facts(key=5, arguments=("samples",), loses=("a pack", "packs"))
    LENGTH = "sample_length", _Facts(key=8, arguments=("sample",))  # that of sample_loader, which the order keeps
    GROUP = "batch_group_criterion", _Facts(key=6, arguments=("sample",))
    BATCH = "batch", _Facts(key=2, arguments=("samples",), loses=_A_MICROBATCH)
    ENCODE_BATCH = "encode_batch", _Facts(arguments=("batch",), loses=_A_MICROBATCH)
    RESTORE = "restore", _Facts(about_bytes=True)

    def __init__(self, title: str, facts: _Facts) -> None:
        self.title = title
        self.key = facts.key
        self.arguments = facts.arguments
        self.loses = facts.loses
        self.is_single = facts.is_single
        self.about_bytes = facts.about_bytes
        self.code = len(type(self).__members__) + 1


ENCODER_HOOKS = {hook.title: hook.arguments for hook in Hook if hook.arguments}
"""The methods of an encoder that are hooks, with their arguments."""


def hook_of(encoder: Any, hook: Hook) -> Any:
    """Return a hook of an encoder; encoders that do not derive from `TaskEncoder` may lack some."""
    return getattr(encoder, hook.title, _no_hook)


def _no_hook() -> None: ...


_no_hook.__default_hook__ = True  # type: ignore[attr-defined]


def is_overridden(encoder: Any, *hooks: Hook) -> bool:
    """Whether one of some hooks of an encoder is user code, also where it forwards them to another encoder."""
    return not all(getattr(hook_of(encoder, hook), "__default_hook__", False) for hook in hooks)


# ---------------------------------------------------------------------------------------------------------------------
# What the engine is working on while a hook runs, for hooks that ask.
#
# These are context variables, so that nested encoders see the same values and each thread sees its own.


class Setting:
    """``with Setting(VARIABLE, value):`` gives a context variable a value, and then the one before again."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable: ContextVar[Any] = variable
        self._value = value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._token)


SAMPLE: ContextVar[tuple[int, ...]] = ContextVar("energon_bridge_sample")
"""Key of the draw of the current sample."""
BATCH: ContextVar[int] = ContextVar("energon_bridge_batch")
"""Number of the microbatch in the global sequence (as a drop-in: of the rank), or `UNKNOWN`."""
NUMBER: ContextVar[int] = ContextVar("energon_bridge_number", default=-1)
"""As a drop-in: the number of the current draw as megatron-energon counts, or `UNKNOWN`; else -1."""
UNKNOWN = -2
"""For a number that might differ if the sample were encoded again."""
DELIVERING: ContextVar[bool] = ContextVar("energon_bridge_delivering", default=False)
"""Whether samples will be delivered next, so that nothing may stay deferred."""
CACHE: ContextVar[CachePool] = ContextVar("energon_bridge_cache")
"""The cache pool of the loader."""
LAST: ContextVar[bool] = ContextVar("energon_bridge_last_buffer", default=False)
"""Whether the packing buffer will not be filled again."""
FAILED: ContextVar[tuple[Any, tuple[SourceInfo, ...]]] = ContextVar("energon_bridge_failed", default=(None, ()))
"""While the policy decides about a failure: the argument of the hook, and where its samples come from."""
CONFIG: ContextVar[Any] = ContextVar("energon_bridge_config", default=None)
"""The worker configuration of the loader whose hooks run."""
TALLY: ContextVar[Counter[str]] = ContextVar("energon_bridge_tally")
"""Counts of `count_over_long` since the engine last took them."""


def current_sample_index() -> int:
    """Return a 63-bit number for the draw of the current sample, the same whenever it is encoded.

    As a drop-in for megatron-energon it is a running number of the rank, as there: each worker counts its own samples,
    and workers take turns.

    Raises:
        ConfigurationError: No hook with a sample is running or, as a drop-in, the number may not be reproducible.
    """
    keys = SAMPLE.get(())
    if not keys:
        raise ConfigurationError("current_sample_index is only available inside a hook for a single sample")
    number = NUMBER.get()
    if number == UNKNOWN:
        raise ConfigurationError(
            "current_sample_index: a sample that is encoded again (for packs and groups after a resume, and by "
            "restore_sample) has no running number. Use sample.__key__ or sample.__restore_key__, or draw from the "
            "global generators, which are seeded for each sample"
        )
    return fold(*keys) >> 1 if number < 0 else number


def current_batch_index() -> int:
    """Return the number of the microbatch being made, counted over the whole run.

    As a drop-in for megatron-energon it counts the microbatches of this rank, as there.

    Raises:
        ConfigurationError: No hook is running, or the sample may be encoded for one microbatch and again for another.
    """
    number = BATCH.get(-1)
    if number == UNKNOWN:
        raise ConfigurationError(
            "current_batch_index: this hook may run again for another microbatch after a resume, because samples are "
            "packed, grouped, or yielded by a generator. Use it in batch or encode_batch"
        )
    if number < 0:
        raise ConfigurationError("current_batch_index is only available inside a hook of a loader")
    return number


def count_over_long(what: str, number: int = 1) -> None:
    """Count a sample that is too long for a sequence or pack, for its dataset; does nothing outside of hooks.

    Args:
        what: What was done: `dropped`, `truncated`, `split` or `pieces`, as in `loader.counters()`.
    """
    tally = TALLY.get(None)
    if tally is not None:
        tally[what] += number


def current_buffer_is_last() -> bool:
    """Whether this is the last selection of an epoch, or of a pass: no sample of it will join what it leaves over.

    In a pass, the selection is called again with what it has left over alone; samples never selected are skipped. In an
    endless run of one dataset they wait for the next epoch; in a mix it is False.
    """
    return LAST.get()


def current_cache() -> CachePool:
    """Return the cache pool of the loader whose hook is running; outside of hooks, one that keeps nothing."""
    return CACHE.get(None) or NoCachePool()

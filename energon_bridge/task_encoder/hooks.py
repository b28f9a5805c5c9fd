"""The hooks: every piece of user code that runs for a sample, a pack or a microbatch, and the steps before them.

This table is the one place that knows their names. `stream/steps.py` runs them by it: it seeds the generators, names
what is running for the watchdog and for messages, and asks the error policy about failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


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
        loses: What is left out if it fails: one, and several.
        is_single: Whether it runs on one sample, which the watchdog names.
        about_bytes: Whether only the data can be wrong; damage often hits neighbouring samples.
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
    LENGTH = "sample_length", _Facts(key=8, arguments=("sample",))
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

"""Failure reports: which samples failed, where and why, as plain text without any content of a sample.

Each failure is one `Report`, whichever hook it happened in. Reports cross from a worker with the next microbatch of
their lane; the `FailureLog` of the training process logs each of them once.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

MAX_MEMBERS = 8
"""Samples that a report on a pack or microbatch names; the others are only counted."""
_MAX_MESSAGE = 1000
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


class SamplePlace(NamedTuple):
    """One sample of a dataset; `note` says which part of a join it is."""

    dataset: str
    shard: str
    # This hides tuple.index, which nobody needs on a record.
    index: int  # type: ignore[assignment]
    key: str = ""
    parts: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        note = f"{self.note}: " if self.note else ""
        return f"{note}{self.dataset}: {self.in_dataset()}"

    def in_dataset(self, after: SamplePlace | None = None) -> str:
        """Name it within its dataset, without the parts it shares with a place named before."""
        shard = "" if after and after.shard == self.shard else f"shard {self.shard}, "
        key = f"key {self.key!r}" if self.key else "unreadable key"
        parts = "" if not self.parts or (after and after.parts == self.parts) else f" (parts {', '.join(self.parts)})"
        return f"{shard}sample {self.index}, {key}{parts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One failure.

    Attributes:
        hook: The hook, or the step of loading, that failed: `read`, `decode`, `field_map`, `sample_loader`, `joiner`.
        what: What is left out: a sample, a pack, a microbatch, a selection.
        places: The samples concerned, at most `MAX_MEMBERS` of them.
        members: The number of samples concerned.
        error: The name of the exception type.
        message: Its text, shortened if long.
        trace: Its traceback, for the first failure of its kind in a process.
    """

    hook: str
    what: str
    places: tuple[SamplePlace, ...]
    members: int
    error: str
    message: str
    trace: str = ""

    @property
    def kind(self) -> tuple[str, str, str]:
        """The kind of the failure: dataset, hook and exception type."""
        return self.places[0].dataset, self.hook, self.error

    def __str__(self) -> str:
        return f"{named(self.places, self.members)}: {self.error}: {self.message}"


def named(places: Sequence[SamplePlace], members: int) -> str:
    """Return a text that names some samples."""
    more = f"; and {members - len(places)} more" if members > len(places) else ""
    texts = list(map(str, places[:1]))
    for before, place in pairwise(places):
        together = (place.dataset, place.note) == (before.dataset, before.note)
        texts.append(place.in_dataset(before) if together else str(place))
    return "; ".join(texts) + more


def text_of(error: BaseException) -> str:
    """Return the text of an exception, shortened if long, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(no text: its __str__ raises {type(second).__name__})"
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}… ({len(text)} characters)"


def trace_of(error: BaseException) -> str:
    """Return the frames an exception passed through, as file:line:function, innermost last."""
    # Not by the traceback module: it parses source lines, which on Python 3.11 disturbs other threads that parse.
    steps = traceback.walk_tb(error.__traceback__)
    return "\n".join(f"  {frame.f_code.co_filename}:{line}:{frame.f_code.co_name}" for frame, line in steps)


def code_place(error: BaseException) -> str:
    """Return the innermost line of user code that an exception passed through, as ` (FILE:LINE, in FUNCTION)`."""
    steps = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [step for step in steps if not step[0].co_filename.startswith(_PACKAGE)]
    # Installed code is less likely to be the user's, but it may be.
    own = [step for step in outside if not step[0].co_filename.startswith(_INSTALLED)] or outside
    if not own:
        return ""
    code, line = own[-1]
    return f" ({code.co_filename}:{line}, in {code.co_name})"


def place_in(sample: Any) -> SamplePlace | None:
    """Return where a sample comes from, by its own `__key__` and `__sources__`; None if it has none."""
    said = sample.get if isinstance(sample, dict) else partial(getattr, sample)
    sources = said("__sources__", None)
    if not sources:
        return None
    source, key = sources[0], str(said("__key__", ""))
    parts = tuple(name.removeprefix(f"{key}.") for name in source.file_names)
    more = ", ".join(f"shard {other.shard_name} of {other.dataset_path}" for other in sources[1:3])
    note = f"joined with {more}" if more else ""
    return SamplePlace(str(source.dataset_path), source.shard_name, source.index, key, parts, note)

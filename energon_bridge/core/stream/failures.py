"""Failures: which samples failed, where and why, as plain text without any content of a sample.

Each failure is one `Report`, whichever hook it happened in. Reports cross from a worker with the next microbatch of
their lane; the `FailureLog` of the training process logs each of them once, and adds it to the quarantine file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from energon_bridge.core.errors import MetadataError, StorageError
from energon_bridge.core.samples.sample_place import SamplePlace

MAX_MEMBERS = 8
"""Samples that a report on a pack or microbatch names; the others are only counted."""
_MAX_MESSAGE = 1000
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


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


# ---------------------------------------------------------------------------------------------------------------------
# The quarantine file: a line of JSON for each failure.
#
# A line has `dataset`, `shard`, `index` (of the sample in the dataset), `key`, `parts`, `hook`, `error` (the name of
# the exception type) and `message`. If a pack or microbatch failed, these describe its first sample, `members` lists
# up to eight of its samples as [dataset, shard, index, key], and `size` counts them. Lines are appended by single
# writes; a last line cut off by a kill is ignored. A run reads it only to add no line twice.


logger = logging.getLogger(__name__)

_BEGINS = b'{"dataset": '

T = TypeVar("T")
Named = tuple[str, int, str]
"""Identifies a failure: dataset and index of the first sample, and the hook."""


def quarantine_file(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """Return the file of one of several ranks: `bad.jsonl` is `bad.rank3.jsonl` on rank 3."""
    whole = Path(path)
    return whole if ranks == 1 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


def lines_in(file: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return what is made of the lines of a quarantine file, each a failure.

    Raises:
        StorageError: It cannot be read.
        MetadataError: It has content, but none of its lines is a failure: it is no quarantine file.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StorageError(f"{file}: cannot read the quarantine file: {error}") from error
    made = []
    foreign = 0
    for line in data.split(b"\n"):
        try:
            made.append(make(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            # A kill may have cut off our last line.
            foreign += bool(line.strip()) and not line.startswith(_BEGINS)
    if foreign and not made:
        raise MetadataError(
            f"{file}: not a quarantine file: none of its {foreign} lines is a failed sample. Pass the file that "
            "ErrorPolicy(quarantine=FILE) wrote, with one JSON object per line"
        )
    if foreign:
        logger.warning("%s: ignoring %d lines that are not failed samples", file, foreign)
    return made


def write_reports(file: Path, reports: Sequence[Report]) -> None:
    """Append failures to a file in one write.

    Raises:
        OSError: The file cannot be written; nothing of these failures is in it.
    """
    lines = "".join(json.dumps(_line(report)) + "\n" for report in reports).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(handle, lines)
        if written < len(lines):  # what fits on the disk: a cut line would spoil the next one
            os.ftruncate(handle, os.fstat(handle).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(handle)


def known_in(file: Path) -> set[Named]:
    """Return the failures that a file already has."""
    if not file.exists():
        return set()
    return set(lines_in(file, lambda line: (line["dataset"], int(line["index"]), line["hook"])))


def _line(report: Report) -> dict[str, Any]:
    first = report.places[0]._asdict()
    del first["note"]
    line = first | {"hook": report.hook, "error": report.error, "message": report.message}
    if report.members > 1:
        line |= {"members": [place[:4] for place in report.places], "size": report.members}
    return line


# ---------------------------------------------------------------------------------------------------------------------
# The log of failures: each sample once, in the log at a bounded rate and in the quarantine file.
#
# One log serves all loaders of a dataset in a process. It is not part of the state: a run that resumes in a new process
# logs a failure again, but the quarantine file, which is read first, gets no second line.


_REMEMBERED = 200_000
"""Failures remembered, to tell new ones from old ones."""

_COMPARED = 1000
"""Samples of each kind that are told apart from those of other ranks."""

FailureKind = tuple[str, str, str, int, frozenset[tuple[int, int]]]
"""Dataset, hook, exception type, number of distinct samples, and the first of these: their place and how many of a pack
or batch failed with them."""


class FailureLog:
    """Logs each failure once.

    Args:
        messages, quarantine: How much is logged, and the quarantine file, as in `ErrorPolicy`.

    Attributes:
        unwritten: Failures that the quarantine file did not take.
    """

    def __init__(self, *, messages: int, quarantine: str | os.PathLike[str] | None) -> None:
        self._messages = messages
        self._quarantine = quarantine
        self._said: set[tuple[str, int, str, int]] = set()
        self._kinds: Counter[tuple[str, str, str]] = Counter()
        self._samples: dict[tuple[str, str, str], set[tuple[int, int]]] = {}
        self._quarantined: dict[Path, set[Named]] = {}
        self._losses: set[tuple[str, str]] = set()
        self.unwritten = 0

    def write(self, reports: Sequence[Report], rank: int, ranks: int) -> None:
        """Log the failures of a rank that are new.

        Raises:
            StorageError, MetadataError: The quarantine file is there and cannot be read, or is another file.
        """
        fresh = []
        for report in reports:
            first = report.places[0]
            name = (first.dataset, first.index, report.hook, report.members)
            if name in self._said or len(self._said) >= _REMEMBERED:
                continue
            self._said.add(name)
            fresh.append(report)
            self._log(report, f"rank {rank}: " if ranks > 1 else "")
        if fresh and self._quarantine is not None:
            self._add_lines(quarantine_file(self._quarantine, rank, ranks), fresh)

    def failures(self, dataset: str) -> str:
        """Return what failed in a dataset, and how often, as seen by this process."""
        kinds = [(n, f"{n} in {kind[1]} with {kind[2]}") for kind, n in self._kinds.items() if kind[0] == dataset]
        return ", ".join(text for _, text in sorted(kinds, reverse=True)[:5])

    def kinds(self) -> list[FailureKind]:
        """Return the kinds of the failures, most frequent first."""
        return [(*kind, number, frozenset(self._samples[kind])) for kind, number in self._kinds.most_common()]

    def is_new(self, dataset: str, cause: str) -> bool:
        """Return whether this is the first question about a dataset and a cause."""
        before = len(self._losses)
        self._losses.add((dataset, cause))
        return len(self._losses) > before

    def _log(self, report: Report, who: str) -> None:
        self._kinds[report.kind] += 1
        number = self._kinds[report.kind]
        if number <= _COMPARED:
            self._samples.setdefault(report.kind, set()).add((report.places[0].index, report.members))
        if number <= self._messages:
            last = "; further ones of the kind are only counted" if number == self._messages else ""
            logger.warning("%sskipped %s that failed in %s: %s%s", who, report.what, report.hook, report, last)
            if report.trace and number == 1:  # each worker sends one
                logger.debug("the first failure of its kind:\n%s", report.trace)
        elif str(number).strip("0") == "1":
            dataset, hook, error = report.kind
            text = "%s%s: %d samples failed in %s with %s, the last one %s"
            logger.warning(text, who, dataset, number, hook, error, report)

    def _add_lines(self, file: Path, reports: Sequence[Report]) -> None:
        known = self._quarantined.get(file)
        if known is None:
            known = self._quarantined[file] = known_in(file)
        lines: dict[Named, Report] = {}
        for report in reports:
            name = (report.places[0].dataset, report.places[0].index, report.hook)
            if name not in known:
                lines.setdefault(name, report)
        if not lines:
            return
        try:
            write_reports(file, list(lines.values()))
            known |= lines.keys()
        except OSError as error:  # what tells of failures must not end a run that goes on without it
            if not self.unwritten:
                logger.warning(
                    "%s: cannot write the quarantine file: %s. The run goes on; samples that fail are counted and "
                    "logged, and come into the file only when it can be written. Make room, or give "
                    "ErrorPolicy(quarantine=…) a file that can be written",
                    file,
                    error,
                )
            self.unwritten += len(lines)

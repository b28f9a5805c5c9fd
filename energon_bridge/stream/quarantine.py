"""The quarantine file: one line of JSON for each sample that failed, added the first time it does.

Format of a line: `dataset`, `shard`, `index` (of the sample in the dataset), `key`, `parts`, `hook`, `error` (name of
the exception type) and `message`; where a pack or microbatch failed, these are of its first sample, `members` lists up
to eight of its samples as [dataset, shard, index, key], and `size` counts them. A file is only ever added to, by single
writes; a last line that was cut off by a kill is not read. Nothing reads it back into a run by itself.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_bridge.errors import MetadataError, StorageError
from energon_bridge.stream.report import Place, Report

logger = logging.getLogger(__name__)

_BEGINS = b'{"dataset": '

Named = tuple[str, int, str]
"""What tells failures apart: dataset and index of the first sample, and the hook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedSample:
    """A line of a quarantine file; `size` is 1 but where a pack or microbatch failed."""

    dataset: str
    shard: str
    index: int
    key: str
    parts: tuple[str, ...]
    hook: str
    error: str
    message: str
    members: tuple[Place, ...] = ()
    size: int = 1


def quarantine_file(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """Return the file of one of several ranks: `bad.jsonl` is `bad.rank3.jsonl` on rank 3."""
    whole = Path(path)
    return whole if ranks == 1 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


def read_quarantine(path: str | os.PathLike[str]) -> list[QuarantinedSample]:
    """Return the samples in a quarantine file and in those of its ranks, each once, in the order of their names.

    Raises:
        StorageError: There is no such file.
        MetadataError: A file is no quarantine file: it has content, but no line of it is a failure.
    """
    whole = Path(path)
    files = [whole] if whole.exists() else []
    files += sorted(whole.parent.glob(f"{whole.stem}.rank*{whole.suffix}"))
    if not files:
        raise StorageError(f"{whole}: no such quarantine file, nor one of a rank beside it")
    found: dict[Named, QuarantinedSample] = {}
    for file in files:
        for sample in _samples_in(file):
            found.setdefault((sample.dataset, sample.index, sample.hook), sample)
    return sorted(found.values(), key=lambda one: (one.dataset, one.index, one.hook))


def _samples_in(file: Path) -> list[QuarantinedSample]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StorageError(f"{file}: the quarantine file cannot be read: {error}") from error
    samples, foreign = [], 0
    for line in data.split(b"\n"):
        try:
            samples.append(_parsed(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            # A kill may have cut a line of ours off.
            foreign += bool(line.strip()) and not line.startswith(_BEGINS)
    if foreign and not samples:
        raise MetadataError(
            f"{file}: not a quarantine file: none of its {foreign} lines is a failed sample. Give the file that "
            "ErrorPolicy(quarantine=FILE) of a run wrote, one JSON object in each line"
        )
    if foreign:
        logger.warning("%s: %d lines are no failed samples; they are left out", file, foreign)
    return samples


def quarantine_excludes(samples: Sequence[QuarantinedSample]) -> dict[str, list[str]]:
    """Return for each dataset the entries that leave these samples out, for `exclude` of its split.yaml.

    Samples without a key (those whose first header cannot be read), packs and microbatches have none.
    """
    entries: dict[str, list[str]] = {}
    for sample in samples:
        if sample.key and sample.size == 1:
            entry = f"{sample.shard}/{sample.key}"
            known = entries.setdefault(sample.dataset, [])
            if entry not in known:
                known.append(entry)
    return entries


def write_reports(file: Path, reports: Sequence[Report]) -> None:
    """Add failures to a file, in one write.

    Raises:
        StorageError: It cannot be written.
    """
    lines = "".join(json.dumps(_line(report)) + "\n" for report in reports).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, lines)
        finally:
            os.close(handle)
    except OSError as error:
        raise StorageError(f"{file}: the quarantine file cannot be written: {error}") from error


def known_in(file: Path) -> set[Named]:
    """Return what a file names already."""
    if not file.exists():
        return set()
    return {(sample.dataset, sample.index, sample.hook) for sample in _samples_in(file)}


def _line(report: Report) -> dict[str, Any]:
    first = report.places[0]
    line = {
        "dataset": first.dataset,
        "shard": first.shard,
        "index": first.index,
        "key": first.key,
        "parts": first.parts,
        "hook": report.hook,
        "error": report.error,
        "message": report.message,
    }
    if report.members > 1:
        line |= {"members": [place[:4] for place in report.places], "size": report.members}
    return line


def _parsed(line: Any) -> QuarantinedSample:
    return QuarantinedSample(
        dataset=line["dataset"],
        shard=line["shard"],
        index=int(line["index"]),
        key=line["key"],
        parts=tuple(line["parts"]),
        hook=line["hook"],
        error=line["error"],
        message=line["message"],
        members=tuple(Place(*member) for member in line.get("members", ())),
        size=int(line.get("size", 1)),
    )

"""Reading quarantine files: the samples that failed in runs, and the entries of `exclude` that leave them out.

`core/stream/failures.py` writes them, and owns their format.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_bridge.core.errors import StorageError
from energon_bridge.core.samples.sample_place import SamplePlace
from energon_bridge.core.stream.failures import Named, lines_in


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedSample:
    """A line of a quarantine file; `size` is 1 unless a pack or microbatch failed."""

    dataset: str
    shard: str
    index: int
    key: str
    parts: tuple[str, ...]
    hook: str
    error: str
    message: str
    members: tuple[SamplePlace, ...] = ()
    size: int = 1


def read_quarantine(path: str | os.PathLike[str]) -> list[QuarantinedSample]:
    """Return the samples in a quarantine file and its per-rank files, each once, sorted by name.

    Examples:
        >>> [sample.key for sample in read_quarantine("bad.jsonl")]
        ['train-00003']

    Raises:
        StorageError: There is no such file.
        MetadataError: A file is no quarantine file.
    """
    whole = Path(path)
    files = [whole] if whole.exists() else []
    files += sorted(whole.parent.glob(f"{whole.stem}.rank*{whole.suffix}"))
    if not files:
        raise StorageError(f"{whole}: no such quarantine file, and none of a rank beside it. Check the path")
    samples: dict[Named, QuarantinedSample] = {}
    for file in files:
        for sample in lines_in(file, _parsed):
            samples.setdefault((sample.dataset, sample.index, sample.hook), sample)
    return sorted(samples.values(), key=lambda one: (one.dataset, one.index, one.hook))


def quarantine_excludes(samples: Sequence[QuarantinedSample]) -> dict[str, list[str]]:
    """Return for each dataset the `exclude` entries for its split.yaml that leave these samples out.

    Examples:
        >>> quarantine_excludes(read_quarantine("bad.jsonl"))
        {'data/captions': ['train/shard_000.tar/train-00003']}

    Packs, microbatches and samples without a key (whose first header cannot be read) get no entry.
    """
    entries: dict[str, list[str]] = {}
    for sample in samples:
        if sample.key and sample.size == 1:
            entry = f"{sample.shard}/{sample.key}"
            own = entries.setdefault(sample.dataset, [])
            if entry not in own:
                own.append(entry)
    return entries


def _parsed(line: Any) -> QuarantinedSample:
    texts = {name: line[name] for name in ("dataset", "shard", "key", "hook", "error", "message")}
    members = tuple(SamplePlace(*member) for member in line.get("members", ()))
    index = int(line["index"])
    size = int(line.get("size", 1))
    return QuarantinedSample(**texts, index=index, parts=tuple(line["parts"]), members=members, size=size)

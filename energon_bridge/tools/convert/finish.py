"""The end of a conversion: the records of all shards become a dataset."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from energon_bridge.core.format.media import MAX_PIXELS, kind_by_name
from energon_bridge.core.format.nvmeta import INFO_JSON, META_FOLDER, meta_path, read_info
from energon_bridge.core.format.tar_index import index_name
from energon_bridge.core.prepare.indexing import RECORD_SUFFIX, ShardRecord
from energon_bridge.core.storage import open_store
from energon_bridge.models.conversations.turns import Doubt
from energon_bridge.tools.check.media import LONG_SECONDS, far_larger
from energon_bridge.tools.convert.options import ConvertOptions, changed_options, type_name
from energon_bridge.tools.convert.shards import (
    PartsFolder,
    num_unread,
    publish,
    record_path,
)

OPTIONS = "options.json"
RECORDS = "convert"
SKIPPED = f"{META_FOLDER}/{RECORDS}/skipped.txt"
"""Names all samples that were skipped, a line each, in the order of the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Samples by shard and shards by split part, what was skipped, and how many shards were reused.

    `left_out` counts the files of a folder that were not taken, with the reason.
    `num_unread` media files could not be opened, `num_unread_images` of them images; `needed` says which packages
    would open some. `num_rejected` answers were left
    out of samples that also have a preferred one. `empty` has the places of samples with an empty answer, `missing` of
    those whose answer seems to be a missing value (`N/A`), `escaped` of those with entities of HTML in a text,
    `marked` of those with tokens of models in one. `num_long` sounds are longer than many models hear, `large` pictures
    far larger than others of their shard, `too_large` those of so many pixels that training does not decode them.
    """

    shard_counts: dict[str, int]
    split_parts: dict[str, list[str]]
    skipped: tuple[str, ...]
    num_reused: int
    num_unread: int
    num_unread_images: int
    left_out: tuple[str, ...] = ()
    num_rejected: int = 0
    empty: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    escaped: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    num_long: int = 0
    large: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()


def _is_long(row: Sequence[str]) -> bool:
    """Return whether a row of media metadata is of a long sound, and not of a video."""
    found = json.loads(row[2]) if "audio_duration" in row[2] else {}
    return "video_duration" not in found and found.get("audio_duration", 0) > LONG_SECONDS


def _sizes(record: ShardRecord) -> list[tuple[str, int, int]]:
    """Return name, width and height of the pictures of a shard."""
    found = ((name, json.loads(text)) for name, kind, text in record.media if kind == "image")
    return [(name, size["width"], size["height"]) for name, size in found]


def _places(records: Mapping[str, ShardRecord], doubt: Doubt) -> tuple[str, ...]:
    """Return the places of the samples with a doubt, in their order."""
    places = (place for record in records.values() for place in record.doubts.get(doubt, ()))
    return tuple(sorted(places, key=by_number))


def by_number(message: str) -> list[str | int]:
    """Return what sorts messages by their places, with the numbers in them as such."""
    return [int(piece) if at % 2 else piece for at, piece in enumerate(re.split(r"([0-9]+)", message))]


def load_record(root: Path, shard: str) -> ShardRecord | None:
    """Return the record of a shard, from this run or the previous one."""
    return _record(root / PartsFolder.NAME / shard) or record_before(root, shard)


def record_before(root: Path, shard: str) -> ShardRecord | None:
    """Return the record of a shard of the dataset that an earlier run finished."""
    return _record(root / META_FOLDER / RECORDS / shard)


def _record(path: Path) -> ShardRecord | None:
    try:
        return ShardRecord.decode(record_path(path).read_bytes())
    except (OSError, ValueError):
        return None


def shards_before(root: Path) -> list[str]:
    """Return the shards of the dataset that an earlier run finished."""
    folder = root / META_FOLDER / RECORDS
    return sorted(path.relative_to(folder).with_suffix(".tar").as_posix() for path in folder.rglob(f"*{RECORD_SUFFIX}"))


def is_whole(root: Path, shard: str, record: ShardRecord) -> bool:
    """Return whether the file of a shard has the size that its record says."""
    if not record.scan.keys:
        return True
    for folder in (root / PartsFolder.NAME, root):
        if (folder / shard).exists():
            return (folder / shard).stat().st_size == record.size
    return False


def finish_dataset(
    parts: PartsFolder,
    plan: Sequence[tuple[str, np.ndarray]],
    options: ConvertOptions,
    description: bytes,
    skipped: tuple[str, ...],
    reused: int,
) -> Converted:
    """Make a dataset of the shards of a plan, unless they are one already; `reused` of them were there before."""
    records = {shard: record for shard, _ in plan if (record := load_record(parts.root, shard)) is not None}
    shards = {shard: record for shard, record in records.items() if record.scan.keys}
    counts = {shard: len(record.scan.keys) for shard, record in shards.items()}
    split_parts = _split_parts(plan, shards, options)
    store = open_store(parts.root)
    old = read_info(store).shard_counts if store.exists(meta_path(INFO_JSON)) else {}
    if counts != old or reused < len(plan) or any(parts.path.rglob("*.rec")):
        written = {shard for shard in old if record_path(parts.root / META_FOLDER / RECORDS / shard).exists()}
        publish(
            parts,
            list(shards),
            load=lambda shard: shards[shard],
            sample_type=type_name(options.layout),
            split_parts=split_parts,
            extra=_files_beside(records, description, skipped),
            before=_before(parts.root, shards, description),
        )
        if not skipped and store.exists(SKIPPED):
            store.delete(SKIPPED)
        for gone in written - counts.keys():  # not the tars of others, beside which --overwrite writes
            store.delete(gone)
            store.delete(index_name(gone))
            store.delete(_record_name(gone))
    parts.remove()
    sizes = [_sizes(record) for record in shards.values()]
    too_large = [f"{name} ({width} x {height})" for name, width, height in chain(*sizes) if width * height > MAX_PIXELS]
    unread = sum(map(num_unread, shards.values()), Counter[str]()) if options.media else Counter[str]()
    return Converted(
        shard_counts=counts,
        split_parts=split_parts,
        skipped=skipped,
        num_reused=reused,
        num_unread=unread.total(),
        num_unread_images=sum(count for name, count in unread.items() if kind_by_name(f".{name}") == "image"),
        needed=tuple(sorted({one for record in shards.values() for one in record.needed})),
        num_rejected=sum(record.num_rejected for record in shards.values()),
        empty=_places(shards, "blank"),
        missing=_places(shards, "missing"),
        escaped=_places(shards, "escaped"),
        marked=_places(shards, "marked"),
        num_long=sum(map(_is_long, (row for record in shards.values() for row in record.media))),
        large=tuple(one for one in chain(*map(far_larger, sizes)) if one not in too_large),
        too_large=tuple(too_large),
    )


def _before(root: Path, shards: Iterable[str], description: bytes) -> set[str] | None:
    """Return which shards the dataset had before; None if it was made with other options, or there was none."""
    path = root / META_FOLDER / RECORDS / OPTIONS
    if not path.exists() or changed_options(path.read_bytes(), description):
        return None
    return {shard for shard in shards if record_before(root, shard) is not None}


def _split_parts(
    plan: Sequence[tuple[str, np.ndarray]], shards: Iterable[str], options: ConvertOptions
) -> dict[str, list[str]]:
    """Return the shards of each split part, also of those that are empty."""
    split_parts: dict[str, list[str]] = {shard.partition("/")[0]: [] for shard, _ in plan}
    for shard in shards:
        split_parts[shard.partition("/")[0]].append(shard)
    if options.split is not None:
        split_parts |= {name: [] for name, _ in options.split.ratios if name not in split_parts}
    return split_parts


def _files_beside(records: Mapping[str, ShardRecord], description: bytes, skipped: Sequence[str]) -> dict[str, bytes]:
    """Return the files by which another run compares itself with this one, and the list of what was skipped."""
    files = {meta_path(f"{RECORDS}/{OPTIONS}"): description}
    if skipped:
        lines = "".join(" ".join(message.split()) + "\n" for message in skipped)
        files[SKIPPED] = lines.encode("utf-8", "surrogateescape")
    return files | {_record_name(shard): record.encode() for shard, record in records.items()}


def _record_name(shard: str) -> str:
    return meta_path(f"{RECORDS}/{record_path(Path(shard)).as_posix()}")

"""Summary of a prepared dataset, from its metadata alone: for `energon info`."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from energon_bridge.core.errors import EnergonError, KeyIndexError, ShardMissingError
from energon_bridge.core.format.dataset_config import names_only
from energon_bridge.core.format.documents import read_document
from energon_bridge.core.format.foreign import ForeignFormat, format_of_unprepared
from energon_bridge.core.format.jsonl import is_jsonl, open_jsonl
from energon_bridge.core.format.key_index import connect_key_index, find_key_index, find_keys
from energon_bridge.core.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    INDEX_SQLITE,
    DatasetInfo,
    Splits,
    meta_path,
    read_info,
    read_splits,
)
from energon_bridge.core.storage import LocalStore, Store, open_store
from energon_bridge.models.conversations.parts import medium_by_name
from energon_bridge.tools.columns.stored import Column, read_columns, read_numbers
from energon_bridge.tools.convert.splits import SPLIT_ORDER

if TYPE_CHECKING:
    from energon_bridge.core.mix import Mix

_MOST_COUNTED = 10_000_000
"""Samples up to which the parts are counted, which takes some seconds."""
_MEDIA_NUMBERS = {
    "image": ("width", "height"),
    "av": ("video_duration", "video_fps", "video_width", "video_height", "audio_duration", "audio_sample_rate"),
}
JOINED = "joined"
"""How the second and further datasets of a join are mixed."""
_LASTS = {"audio_duration": "sound", "video_duration": "video"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """One split part; excluded shards are not counted, excluded samples are."""

    name: str
    num_shards: int
    num_samples: int
    num_excluded_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartType:
    """Number and bytes of the parts of one name; None in a dataset of more than 10 million samples."""

    count: int | None
    num_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaNumbers:
    """Media metadata of one kind: files, minimum and maximum of each number, such as `width`, and `hours` in all."""

    count: int
    ranges: dict[str, tuple[float, float]]
    hours: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNumbers:
    """Minimum, mean and maximum of a column of numbers."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """The numbers of a prepared dataset.

    `num_bytes` counts the shards, `missing_shards` are listed but do not exist, `new_shards` exist but are neither
    prepared nor excluded. `wrong` and `warnings` are about the split file. `part_types` and `media` come from the key
    index and are empty without one.
    """

    path: str
    num_samples: int
    num_shards: int
    num_bytes: int
    missing_shards: tuple[str, ...] = ()
    new_shards: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    energon_version: str | None = None
    sample_type: str
    field_map: dict[str, str] = field(default_factory=dict)
    subflavors: dict[str, Any] = field(default_factory=dict)
    has_key_index: bool = False
    parts: tuple[PartSummary, ...] = ()
    columns: dict[str, Column] = field(default_factory=dict)
    column_numbers: dict[str, ColumnNumbers] = field(default_factory=dict)
    part_types: dict[str, PartType] = field(default_factory=dict)
    media: dict[str, MediaNumbers] = field(default_factory=dict)

    @property
    def hours(self) -> dict[str, float | None]:
        """The hours of sound (of videos, too) and video; None: no metadata of media or column tells them."""
        kinds = {medium_by_name(name if "." in name else f"x.{name}") for name in self.part_types}
        known: dict[str, float | None] = {"sound": None} if "audio" in kinds else {}
        known |= {"video": None} if "video" in kinds else {}
        if (seconds := self.column_numbers.get("sound_seconds")) is not None:
            known["sound"] = seconds.mean * self.num_samples / 3600
        return known | dict(self.media["av"].hours if "av" in self.media else {})


def summarize_dataset(
    path: str | os.PathLike[str],
    *,
    split_config: str = DEFAULT_SPLIT_CONFIG,
    dataset_config: str = DEFAULT_DATASET_CONFIG,
) -> DatasetSummary:
    """Summarize a prepared dataset of any sample type, crude and legacy ones too; runs no code of the dataset.

    Raises DatasetNotFoundError, NotPreparedError or MetadataError.
    """
    if is_jsonl(path):
        return _summarize_jsonl(path)
    foreign = format_of_unprepared(path)
    if foreign is not None:
        return _summarize_foreign(foreign, path)
    store = open_store(path)
    store.check_root()
    info = read_info(store)
    config = _config(store, dataset_config)
    splits = read_splits(store, config.get("split_config") or split_config)
    num_bytes = 0
    missing = []
    for shard in info.shard_counts:
        try:
            num_bytes += store.size(shard)
        except ShardMissingError:
            missing.append(shard)
    unknown = _unknown_keys(store, info, splits)
    wrong = [one for one in (splits.wrong_excludes(info.shard_counts, store.exists),) if one]
    if unknown:
        shard, key = min(unknown)
        more = f" (and {len(unknown) - 1:,} more)" * (len(unknown) > 1)
        wrong.append(f"{splits.where}, field `exclude`: {f'{shard}/{key}'!r}{more}: the shard has no such sample.")
    parts = []
    order = (*SPLIT_ORDER, *sorted(splits.parts))
    for name in sorted(splits.parts, key=order.index):
        shards = splits.shards_of(name)
        parts.append(
            PartSummary(
                name=name,
                num_shards=len(shards),
                num_samples=sum(info.shard_counts.get(shard, 0) for shard in shards),
                num_excluded_samples=len(splits.excluded_samples(shards) - unknown),
            )
        )
    columns = read_columns(store)
    part_types, media = _of_key_index(store, sum(info.shard_counts.values()))
    named = config.get("sample_type")
    field_map = config.get("field_map")
    subflavors = config.get("subflavors")
    return DatasetSummary(
        path=store.root,
        num_samples=sum(info.shard_counts.values()),
        num_shards=len(info.shard_counts),
        num_bytes=num_bytes,
        missing_shards=tuple(missing),
        new_shards=_new_shards(store, {*info.shard_counts, *splits.exclude}),
        wrong=tuple(wrong),
        warnings=tuple(splits.doubts(info.shard_counts)),
        energon_version=info.energon_version,
        sample_type=_type_name(named if isinstance(named, dict) else config),
        field_map=field_map if isinstance(field_map, dict) else {},
        subflavors=subflavors if isinstance(subflavors, dict) else {},
        has_key_index=store.exists(meta_path(INDEX_SQLITE)),
        parts=tuple(parts),
        columns=columns,
        column_numbers=_column_numbers(store, columns),
        part_types=part_types,
        media=media,
    )


def _unknown_keys(store: Store, info: DatasetInfo, splits: Splits) -> set[tuple[str, str]]:
    """Return the excluded samples that do not exist, by the key index of a local folder."""
    excluded = sorted(splits.excluded_samples(list(info.shard_counts)))
    if not excluded or not isinstance(store, LocalStore) or not store.exists(meta_path(INDEX_SQLITE)):
        return set()
    shards = list(info.shard_counts)
    try:
        located = find_keys(find_key_index(store, scratch=""), [key for _, key in excluded])
    except KeyIndexError:
        return set()
    pairs = zip(excluded, located, strict=True)
    return {sample for sample, at in pairs if at is None or shards[at[0]] != sample[0]}


def _new_shards(store: Store, known: Collection[str]) -> tuple[str, ...]:
    """Return the tars that were added after the dataset was prepared; none if files cannot be listed."""
    try:
        return tuple(sorted(name for name, _ in store.list((".tar",)) if name not in known))
    except EnergonError:
        return ()


def _column_numbers(store: Store, columns: Mapping[str, Column]) -> dict[str, ColumnNumbers]:
    numbers = {}
    for name, column in columns.items():
        if column.values is None and column.num_samples:
            values = read_numbers(store, name, column)
            numbers[name] = ColumnNumbers(
                least=float(values.min()), mean=float(values.mean()), most=float(values.max())
            )
    return numbers


def _of_key_index(store: Store, num_samples: int) -> tuple[dict[str, PartType], dict[str, MediaNumbers]]:
    """Return part types and media from the key index of a local folder; elsewhere, names of parts from `tars.json`."""
    names = _names_of_parts(store)
    if not isinstance(store, LocalStore) or not store.exists(meta_path(INDEX_SQLITE)):
        return names, {}
    files = find_key_index(store, scratch="")
    try:
        with closing(connect_key_index(files)) as index:
            tables = {name for (name,) in index.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if num_samples <= _MOST_COUNTED and "sample_parts" in tables:
                query = "SELECT part_name, count(*), sum(content_byte_size) FROM sample_parts GROUP BY 1 ORDER BY 1"
                names = {name: PartType(count=count, num_bytes=size) for name, count, size in index.execute(query)}
            return names, _media(index) if "media_metadata" in tables else {}
    except (sqlite3.Error, KeyIndexError):
        return names, {}  # `energon lint` and users of the index report the damage


def _names_of_parts(store: Store) -> dict[str, PartType]:
    if not store.exists(meta_path("tars.json")):
        return {}
    try:
        names = json.loads(store.read(meta_path("tars.json")))["part_names"]
        return {str(name): PartType(count=None, num_bytes=None) for name in names}
    except (EnergonError, ValueError, KeyError, TypeError):
        return {}


def _media(index: sqlite3.Connection) -> dict[str, MediaNumbers]:
    numbers = {}
    kinds = index.execute("SELECT metadata_type, count(*) FROM media_metadata GROUP BY 1 ORDER BY 1").fetchall()
    for kind, count in kinds:
        ranges: dict[str, tuple[float, float]] = {}
        hours = {}
        for name in _MEDIA_NUMBERS.get(kind, ()):
            value = f"json_extract(metadata_json, '$.{name}')"
            least, most, total = index.execute(
                f"SELECT min({value}), max({value}), sum({value}) FROM media_metadata WHERE metadata_type = ?", (kind,)
            ).fetchone()
            if least is not None:
                ranges[name] = (least, most)
                if (medium := _LASTS.get(name)) is not None:
                    hours[medium] = total / 3600
        numbers[str(kind)] = MediaNumbers(count=count, ranges=ranges, hours=hours)
    return numbers


def _summarize_jsonl(path: str | os.PathLike[str]) -> DatasetSummary:
    dataset = open_jsonl(path)
    return DatasetSummary(
        path=dataset.path,
        num_samples=dataset.num_samples,
        num_shards=1,
        num_bytes=int(dataset.shard_sizes[0]),
        sample_type=dataset.sample_type.__name__,
    )


def _summarize_foreign(foreign: ForeignFormat, path: str | os.PathLike[str]) -> DatasetSummary:
    parts = [foreign.open(path, split_part=part) for part in foreign.split_parts(path)]
    first = parts[0]
    return DatasetSummary(
        path=first.path,
        num_samples=sum(part.num_samples for part in parts),
        num_shards=sum(len(part.shard_names) for part in parts),
        num_bytes=sum(int(part.shard_sizes.sum()) for part in parts),
        sample_type=first.sample_type.__name__,
        field_map=dict(first.fields),
        parts=tuple(
            PartSummary(name=part.split_part or "all", num_shards=len(part.shard_names), num_samples=part.num_samples)
            for part in parts
        ),
    )


def _config(store: Store, name: str) -> dict[str, Any]:
    rel = meta_path(name)
    if not store.exists(rel):
        return {}
    return read_document(store, rel).mapping()


def _type_name(named: dict[str, Any]) -> str:
    if "__class__" not in named:
        return "none (no dataset.yaml)" if not named else "unknown"
    return f"{named.get('__module__', '?')}.{named['__class__']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSummary:
    """A dataset of a mix or of one of its joins; `mixed` is its weight or its repetitions.

    `num_samples` counts the split part, before joins, subsets and filters; `in_mix` what the mix has after them: of a
    join its rows, in the summary of its first dataset. It is None for the others, and if the mix cannot be opened.
    """

    path: str
    split_part: str
    mixed: str
    num_samples: int
    in_mix: int | None


def summarize_mix(path: str) -> tuple[list[DatasetSummary], dict[str, list[LeafSummary]]]:
    """Summarize the datasets of a metadataset file, each once, and its splits.

    Raises the errors of metadatasets and of `summarize_dataset`.
    """
    from energon_bridge.core.mix import JoinRef, errors_at, load_mix, metadataset_splits, resolve_path

    path = resolve_path(path, base=os.getcwd(), where="PATH")
    datasets: dict[str, DatasetSummary] = {}
    splits: dict[str, list[LeafSummary]] = {}
    for split in metadataset_splits(path):
        splits[split] = []
        mix = load_mix(path, split_part=split)
        for leaf, in_mix in zip(mix.leaves, _counts_of(mix), strict=True):
            mixed = "" if leaf.weight is None else f"weight {float(leaf.weight):.4g}"
            if leaf.repetitions is not None:
                mixed = f"{float(leaf.repetitions):g} times"
            refs = [entry.leaf for entry in leaf.leaf.entries] if isinstance(leaf.leaf, JoinRef) else [leaf.leaf]
            for number, ref in enumerate(refs):
                with errors_at(ref):
                    if ref.path not in datasets:
                        datasets[ref.path] = summarize_dataset(
                            ref.path,
                            split_config=ref.split_config or DEFAULT_SPLIT_CONFIG,
                            dataset_config=ref.dataset_config or DEFAULT_DATASET_CONFIG,
                        )
                    stores = {store.path for store in ref.aux.values() if not store.is_filesystem} - datasets.keys()
                    datasets |= {store: summarize_dataset(store) for store in sorted(stores)}
                summary = datasets[ref.path]
                counts = {part.name: part.num_samples for part in summary.parts}
                splits[split].append(
                    LeafSummary(
                        path=ref.path,
                        split_part="" if ref.is_jsonl else ref.split_part,
                        mixed=mixed if number == 0 else JOINED,
                        num_samples=summary.num_samples if ref.is_jsonl else counts.get(ref.split_part, 0),
                        in_mix=in_mix if number == 0 else None,
                    )
                )
    return list(datasets.values()), splits


def _counts_of(mix: Mix) -> Sequence[int | None]:
    """Return the samples of each leaf of a mix, as a run counts them; None if one cannot be opened."""
    from energon_bridge.core.mix.leaves import open_leaves
    from energon_bridge.core.mix.opener import DatasetOpener

    try:
        with names_only():
            return [leaf.num_samples for leaf in open_leaves(mix, DatasetOpener(), shuffle_epochs=None)]
    except EnergonError:  # what is wrong with a dataset stands in its own summary
        return [None] * len(mix.leaves)

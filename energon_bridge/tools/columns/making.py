"""Making columns: a function that is called for every sample of a prepared dataset.

Values are kept shard by shard: making a column again computes only new and changed shards. A run that fails leaves the
columns as they were. If there are many shards, or tasks divide them, the values of each shard are kept until the
column is complete, so a killed run can continue.

    .nv-meta.columns/<hash of name and function>/<shard>.npz    "of": [samples, bytes, failed], "column <name>": values

The second half finds samples of equal content, by hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from energon_bridge.core.encoder.hooks import Hook, is_overridden
from energon_bridge.core.errors import ConfigurationError, EnergonError, MetadataError, SampleError
from energon_bridge.core.format.dataset import PreparedDataset, SplitFacts, prepared, read_index
from energon_bridge.core.format.dataset_config import DatasetConfigs
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.format.jsonl import JsonlDataset
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG, read_info
from energon_bridge.core.format.parallel import Progress, Task, Workers, map_shards, unseen
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.prepare.staging import Staging, forget
from energon_bridge.core.storage import Store, open_store
from energon_bridge.core.stores.file_store import follow_links
from energon_bridge.core.stream.policy import ALWAYS_FATAL
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.conversations.parts import medium_by_name
from energon_bridge.models.conversations.turns import read_turns, system_prompt
from energon_bridge.tools.check.lint import LEAVE_OUT, Problem, made_sample, read_rows, read_samples, wanted_parts
from energon_bridge.tools.check.media import read_image
from energon_bridge.tools.columns.stored import (
    COLUMNS_INDEX,
    Column,
    column_path,
    encode_columns,
    read_columns,
    read_numbers,
)

ColumnValue = int | float | bool | str
OfSample = Callable[[Any], ColumnValue | Mapping[str, ColumnValue]]
"""Takes a sample of the dataset's type, decoded, or, with `raw`, a dict of its parts as bytes."""

HASH_MADE_OF = "hash of the content without what names a sample, and of its media alone"
COMPARED = (
    "Compared: media and all other parts by their bytes, and the values of JSON, without ids, names of files and URLs; "
    "of conversations the turns, system prompt and tools alone; between split parts media alone, too."
)
NO_MEDIA = 0
_MOST_VALUES = 1 << 20
_KEPT = ".nv-meta.columns"
_MANY_SHARDS = 64
"""From this many shards on, each is kept until the column is complete."""


_Rows: TypeAlias = tuple[dict[str, np.ndarray], int, str]
"""Values of a shard by column, the samples that failed, and why the first did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The columns written, the samples they cover, and how many were computed or got the value for missing ones.

    `first_missing` names the first of those and says why, if any.
    """

    names: tuple[str, ...]
    num_samples: int
    num_computed: int
    num_missing: int
    first_missing: str


def add_column(
    path: str | os.PathLike[str],
    name: str | None,
    function: OfSample,
    *,
    made_of: str = "",
    raw: bool = False,
    missing: float | str | None = None,
    decoder: Any = None,
    num_workers: Workers = 1,
    dataset_config: str = DEFAULT_DATASET_CONFIG,
    trust_remote_code: bool = False,
    task: Task | None = None,
    finish: bool = False,
    progress: Progress = unseen,
) -> Added:
    """Compute a column for all samples of a prepared dataset, and write it beside the indexes.

    Args:
        path: Folder or URL of the dataset.
        name: Name of the column; None if the function returns a mapping of column names to values.
        function: Gives a number or a text for a sample; it must be importable, for worker processes.
        made_of: Describes how the column was made. If it differs from before, all shards are computed again. Default:
            the name of the function.
        raw: Give the function a dict of the sample's parts as bytes, and `__key__`, instead of a decoded sample.
        missing: Value for samples that cannot be decoded or for which the function raises; None: the first one raises.
            Errors that no data causes, such as NameError, raise in any case, and so does a function that always fails.
        decoder: A `SampleDecoder`; default: images as uint8 RGB arrays.
        task: Compute the shards of this task alone and write no column; tasks may run at once, and again.
        finish: Compute nothing: write the column of what all tasks computed.
        progress: Called with shards done and all shards.

    Raises:
        SampleError: The function or a decoder failed, and `missing` is None or all failed; the message names shard and
            key.
        ConfigurationError: The function returns something other than numbers or texts; with `finish`, a shard that no
            task has done.
        DatasetError: The dataset cannot be read; each reason has its own subclass.
    """
    dataset = _whole(path, dataset_config, trust_remote_code=trust_remote_code)
    made_of = made_of or f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    made_of += "" if missing is None else f", else {missing!r}"
    shards = _shards(dataset)
    folder = f"{_KEPT}/{hashlib.blake2b(f'{name} {made_of}'.encode(), digest_size=8).hexdigest()}"
    rows_of = partial(_rows_of_shard, dataset, function, name, raw, missing, decoder)
    if task is not None:
        return _column_task(dataset, name, made_of, partial(_rows, dataset, rows_of, folder, False), task, num_workers)
    with Staging(dataset.store) as staging, _forgetting(dataset.store, folder):
        there = read_columns(dataset.store)
        old = _kept_rows(dataset, there, name, made_of)
        new = [number for number, shard in enumerate(shards) if shard not in old]
        compute = partial(_rows, dataset, rows_of, folder if finish or len(new) >= _MANY_SHARDS else None, finish)
        rows: dict[str, dict[int, np.ndarray]] = {}
        failed, why = 0, ""
        left: list[str] = []
        with closing(map_shards(compute, new, num_workers=num_workers)) as computed:
            for number, shard in enumerate(shards):
                values_of = (old[shard], 0, "") if shard in old else next(computed)
                if values_of is None:
                    left.append(shard[0])
                    continue
                columns, bad, reason = values_of
                failed += bad
                why = why or reason
                for column, values in columns.items():
                    rows.setdefault(column, {})[number] = values
                progress(number + 1, len(shards))
        if left:
            raise _UnfinishedError(
                f"{dataset.store.root}: {len(left)} of {len(shards)} shards were not computed by any task, or changed "
                f"since; the first is {left[0]}. Run their tasks again, or run this without --finish."
            )
        if failed and failed == sum(count for _, count, _ in shards):
            raise SampleError(f"no sample of {dataset.store.root} has a value; the first: {why}. Fix that.")
        if not rows:
            raise ConfigurationError(f"{dataset.store.root}: {made_of} returned no column for any sample.")
        for column, by_shard in rows.items():
            if len(by_shard) < len(shards) and missing is None:
                raise ConfigurationError(
                    f"column {column!r}: {made_of} returned it for some shards only. Return it for all samples."
                )
            pieces = [
                by_shard[n] if n in by_shard else np.full(count, missing) for n, (_, count, _) in enumerate(shards)
            ]
            numbers, texts = _numbers(column, pieces, missing)
            file = io.BytesIO()
            np.save(file, numbers, allow_pickle=False)
            staging.add(column_path(column), file.getvalue())
            there[column] = Column(made_of=made_of, shards=tuple(shards), values=texts)
        staging.add(COLUMNS_INDEX, encode_columns(there))
        staging.commit()
    computed_samples = sum(shards[number][1] for number in new)
    return Added(
        names=tuple(rows),
        num_samples=dataset.num_samples,
        num_computed=computed_samples,
        num_missing=failed,
        first_missing=why,
    )


class _UnfinishedError(ConfigurationError):
    """Tasks are missing; what the others computed is kept."""


@contextmanager
def _forgetting(store: Store, folder: str) -> Iterator[None]:
    """Remove the kept values at the end, also after errors: the function may differ next time."""
    try:
        yield
    except (_UnfinishedError, KeyboardInterrupt):
        raise
    except BaseException:
        _forget(store, folder)
        raise
    _forget(store, folder)


def _forget(store: Store, folder: str) -> None:
    forget(store, folder, ".npz")
    with contextlib.suppress(OSError):  # of another column, or not on a disk
        os.rmdir(store.url(_KEPT))


def _column_task(
    dataset: PreparedDataset,
    name: str | None,
    made_of: str,
    compute: Callable[[int], _Rows | None],
    task: Task,
    num_workers: Workers,
) -> Added:
    """Compute the values of the shards of one task that the column does not cover yet, and keep them for `finish`."""
    old = _kept_rows(dataset, read_columns(dataset.store), name, made_of)
    mine = [number for number in task.of(range(len(dataset.shard_names))) if _shard(dataset, number) not in old]
    with closing(map_shards(compute, mine, num_workers=num_workers)) as computed:
        done = [rows[1:] for rows in computed if rows is not None]
    count = sum(_shard(dataset, number)[1] for number in mine)
    return Added(
        names=() if name is None else (name,),
        num_samples=count,
        num_computed=count,
        num_missing=sum(failed for failed, _ in done),
        first_missing=next((why for _, why in done if why), ""),
    )


def _rows(
    dataset: PreparedDataset, compute: Callable[[int], _Rows], folder: str | None, find_only: bool, shard: int
) -> _Rows | None:
    """Return the columns of a shard that an earlier run kept in `folder`, or compute them; None with `find_only`."""
    if folder is None:
        return compute(shard)
    shard_name, count, size = _shard(dataset, shard)
    path = f"{folder}/{shard_name}.npz"
    if dataset.store.exists(path):
        with contextlib.suppress(ValueError, KeyError, OSError, zipfile.BadZipFile):
            kept = np.load(io.BytesIO(dataset.store.read(path)), allow_pickle=False)
            with kept:
                if kept["of"][:2].tolist() == [count, size]:
                    columns = {
                        column.removeprefix("column "): kept[column] for column in kept if column not in ("of", "why")
                    }
                    return columns, int(kept["of"][2]), str(kept["why"])
    if find_only:
        return None
    columns, failed, why = compute(shard)
    file = io.BytesIO()
    arrays: dict[str, Any] = {f"column {column}": values for column, values in columns.items()}
    np.savez(file, of=np.array([count, size, failed]), why=np.array(why), **arrays)
    dataset.store.write(path, file.getvalue())
    return columns, failed, why


def remove_column(path: str | os.PathLike[str], name: str) -> None:
    """Remove a column; raises MetadataError if there is none of that name."""
    store = open_store(path)
    with Staging(store) as staging:
        there = read_columns(store)
        if name not in there:
            raise MetadataError(f"{store.root}: no column {name!r}. Columns: {', '.join(sorted(there)) or 'none'}.")
        del there[name]
        staging.add(COLUMNS_INDEX, encode_columns(there))
        staging.commit()
        store.delete(column_path(name))


def image_size(parts: Mapping[str, Any]) -> dict[str, int]:
    """Return `width` and `height` of a sample's first image, read from its header; for `raw=True`."""
    image = read_image(_first_image(parts)[1])
    return {"width": image.width, "height": image.height}


def turned_image_size(parts: Mapping[str, Any]) -> dict[str, int]:
    """Return `width` and `height` of a sample's first image as decoders with `autorotate` give it; for `raw=True`."""
    from energon_bridge.models.images.images import image_form, image_size as size_of

    form = image_form("rgb8", max_pixels=None, autorotate=True)
    part, data = _first_image(parts)
    width, height = size_of(data, form, part=part)
    return {"width": width, "height": height}


def _first_image(parts: Mapping[str, Any]) -> tuple[str, Any]:
    image = next(((part, data) for part, data in parts.items() if kind_by_name(part) == "image"), None)
    if image is None:
        raise ValueError(f"no image among the parts {', '.join(key for key in parts if key != '__key__')}")
    return image


def sound_seconds(parts: Mapping[str, Any]) -> float:
    """Return how long a sample's sound files are together, by their headers; for `raw=True`."""
    sounds = [(part, data) for part, data in parts.items() if part != "__key__" and medium_by_name(part) == "audio"]
    return sum((AVDecoder(data, name=part).get_audio_duration() or 0.0 for part, data in sounds), 0.0)


def content_hash(parts: Mapping[str, Any]) -> int:
    """Return a 64-bit hash of what a sample says, equal for exact duplicates; for `raw=True`.

    Media count by their bytes, other parts by name and bytes. Of JSON, what names the sample or its files is left out,
    and of a conversation all but its turns, system prompt and tools.
    """
    digest = hashlib.blake2b(digest_size=8)
    contents = {
        name: data
        for part, data in parts.items()
        if not _names_sample(part)
        for name, data in _counted_contents(part, data)
    }
    if not any(contents.values()):  # ids are all that there is
        contents = {part: bytes(data) for part, data in parts.items() if part != "__key__"}
    for name, data in sorted(contents.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def media_hash(parts: Mapping[str, Any]) -> int:
    """Return a 64-bit hash of the media of a sample alone; `NO_MEDIA` if it has none; for `raw=True`."""
    is_medium = [part for part in parts if part != "__key__" and kind_by_name(part) is not None]
    digests = sorted(hashlib.blake2b(parts[part]).digest() for part in is_medium)
    whole = hashlib.blake2b(b"".join(digests), digest_size=8).digest()
    return int.from_bytes(whole, "little", signed=True) if digests else NO_MEDIA


def hashes(parts: Mapping[str, Any]) -> dict[str, int]:
    """Return `hash` and `media_hash` of a sample; for `raw=True`."""
    return {"hash": content_hash(parts), "media_hash": media_hash(parts)}


_NAMES = re.compile(
    r"__\w*__|unnamed: ?\d+|(.*[_\- .])?(id|ids|uid|uuid|guid|key|idx|index|inx|url|urls|uri|path|paths|file|files|"
    r"filename|filenames|md5|sha1|sha256)|(image|img|video|audio|file|sample|item|question|row)(id|idx|name|path|file)"
)
"""Parts and keys of JSON that name a sample or its files, in lower case."""


def _names_sample(name: str) -> bool:
    return _NAMES.fullmatch(name.lower()) is not None or re.fullmatch(r"[a-z]+I[dD]s?", name) is not None


def _counted_contents(part: str, data: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the contents of a part that count for its hash, each with the name that it counts under."""
    stem, _, extension = part.rpartition(".")
    if kind_by_name(f".{extension}") is not None:
        yield stem, bytes(data)  # with whatever extension
        return
    if extension.lower() in ("json", "jsn"):
        try:
            values = json.loads(bytes(data))
            if isinstance(values, Mapping):
                content = _content_of(values)
                data = json.dumps(content, sort_keys=True).encode() if content else b""
        except ValueError:
            pass  # lint says so
    yield part, bytes(data)


def _content_of(values: Mapping[str, Any]) -> Any:
    """Return the values of a JSON object without those that name a sample; of a conversation, what is learned."""
    try:
        turns = read_turns(values)
    except SampleError:  # training says so
        turns = None
    if turns is not None:
        return [turns, system_prompt(values), values.get("tools") or values.get("functions")]
    return {name: value for name, value in values.items() if not _names_sample(name)}


def content_bytes(parts: Mapping[str, Any]) -> int:
    """Return how many bytes the parts of a sample have; for `raw=True`."""
    return sum(len(data) for part, data in parts.items() if part != "__key__")


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The number of tokens of an encoded sample: the length of its `tokens`, `input_ids` or `text`."""

    encoder: Any

    def __call__(self, sample: Any) -> int:
        in_two = is_overridden(self.encoder, Hook.PREENCODE)  # then it makes the tokens already
        encoded = (self.encoder.preencode_sample if in_two else self.encoder.encode_sample)(sample)
        for name in ("tokens", "input_ids", "text"):
            value = encoded.get(name) if isinstance(encoded, Mapping) else getattr(encoded, name, None)
            if value is not None and not isinstance(value, str):
                return len(value)
        raise ValueError(f"encode_sample returned {type(encoded).__name__}, which has no tokens, input_ids or text")


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """What a sample takes in a model: `tokens`, and of them `image_tokens`, `video_tokens` and `audio_tokens`.

    The encoder is a `ChatTemplateTaskEncoder`; it reads the headers of media and decodes none.
    """

    encoder: Any

    def __call__(self, sample: Any) -> dict[str, int]:
        prepared = self.encoder.preencode_sample(sample)
        counts = dict.fromkeys(("image", "video", "audio"), 0)
        for medium in prepared.plans:
            counts[medium.kind] += medium.tokens
        return {"tokens": len(prepared.tokens), **{f"{kind}_tokens": count for kind, count in counts.items()}}


def _whole(path: str | os.PathLike[str], dataset_config: str, *, trust_remote_code: bool) -> PreparedDataset:
    """Return all shards of a dataset as one split part, in the order of `.info.json`."""
    store = open_store(path)
    store.check_root()
    counts = read_info(store).shard_counts
    config = DatasetConfigs(trust_remote_code=trust_remote_code).read(store, dataset_config)
    sizes = [store.size(shard) for shard in counts]
    facts = SplitFacts(list(counts), list(counts.values()), sizes, frozenset(), "", has_checksums=False)
    return prepared(store, config, facts, split_part="", config_name=dataset_config)


_Shard = tuple[str, int, int]
"""Name, samples and bytes."""


def _shards(dataset: PreparedDataset) -> list[_Shard]:
    return [_shard(dataset, number) for number in range(len(dataset.shard_names))]


def _shard(dataset: PreparedDataset, number: int) -> _Shard:
    return dataset.shard_names[number], int(dataset.shard_counts[number]), int(dataset.shard_sizes[number])


def _kept_rows(
    dataset: PreparedDataset, there: Mapping[str, Column], name: str | None, made_of: str
) -> dict[_Shard, dict[str, np.ndarray]]:
    """Return, by shard, the values that the same function made before and that are still valid."""
    kept: dict[_Shard, dict[str, np.ndarray]] = {}
    same = {column: entry for column, entry in there.items() if entry.made_of == made_of and name in (None, column)}
    for column, entry in same.items():
        try:
            numbers = read_numbers(dataset.store, column, entry)
        except MetadataError:
            return {}
        values = numbers if entry.values is None else np.asarray(entry.values)[numbers]
        start = 0
        for shard in entry.shards:
            kept.setdefault(shard, {})[column] = values[start : start + shard[1]]
            start += shard[1]
    return {shard: rows for shard, rows in kept.items() if len(rows) == len(same)}


def _rows_of_shard(
    dataset: PreparedDataset,
    function: OfSample,
    name: str | None,
    raw: bool,
    missing: float | str | None,
    decoder: Any,
    shard: int,
) -> _Rows:
    """Return the columns of one shard, how many of its samples failed, and why the first did."""
    if multiprocessing.parent_process() is not None and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # those that the parent had are not in a fork, which would wait for them
    decode = None
    if not raw:
        from energon_bridge.core.encoder.decoder import SampleDecoder

        decode = decoder or SampleDecoder(image_decode="rgb8")
    rows: list[dict[str, Any] | None] = []
    why = ""
    follow = follow_links(dataset.path)
    for index, data in read_samples(dataset, shard):
        where = f"{dataset.store.url(dataset.shard_names[shard])}, sample {index}"
        try:
            key, parts = parse_sample(data, where=where, follow=follow)
            where = f"{dataset.store.url(dataset.shard_names[shard])}, key {key!r}"
            kept = {part: bytes(data) for part, data in (parts if raw else wanted_parts(dataset, parts)).items()}
            sample: Any = {"__key__": key, **kept}
            if decode is not None:
                decoded = {name: value for name, value in decode(sample).items() if not name.startswith("__")}
                sample, _ = made_sample(dataset, index, key, decoded)
            value = function(sample)
            rows.append(dict(value) if isinstance(value, Mapping) else {name or "": value})
        except Exception as error:
            reason = f"{where}: no value for the column: {type(error).__name__}: {error}"
            if isinstance(error, ALWAYS_FATAL):
                raise SampleError(f"{reason}. Fix it: no data causes this.") from error
            if missing is None:
                typed = not raw and isinstance(error, AttributeError | KeyError | TypeError)
                also = ", or take its parts as they are stored, with all fields of a JSON (--raw)" if typed else ""
                raise SampleError(f"{reason}. Fix it, or give a value for such samples (--missing){also}.") from error
            why = why or reason
            rows.append(None)
    names = list(dict.fromkeys(column for row in rows if row is not None for column in row))
    columns = {}
    for column in names or ([name] if name else []):  # all failed: another shard may tell which columns there are
        if not column:
            raise ConfigurationError("the function returns single values: give the column a name.")
        column_path(column)  # refuses other names
        values = [missing if row is None else row.get(column, missing) for row in rows]
        columns[column] = _array(values, column, missing)
    return columns, sum(row is None for row in rows), why


def _array(values: list[Any], column: str, missing: float | str | None) -> np.ndarray:
    """Return values as int64, float64, bool or texts; raises ConfigurationError for anything else."""
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    kinds = {type(value) for value in plain}
    for kind, dtype in (({bool}, np.bool_), ({int, bool}, np.int64), ({int, bool, float}, np.float64)):
        if kinds <= kind:
            return np.array(plain, dtype=dtype)
    if kinds == {str}:
        return np.array(plain)
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ConfigurationError(
        f"column {column!r}: expected numbers or texts, got values of the types {names}.{_one_missing(missing)}"
    )


def _one_missing(missing: float | str | None) -> str:
    """Return what to do if the value for missing samples may be of another type than the others of a column."""
    if missing is None:
        return ""
    return f" Samples without a value got {missing!r} (--missing): add columns of other types each by itself."


def _numbers(
    column: str, pieces: list[np.ndarray], missing: float | str | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return the numbers to store, and the texts that they stand for."""
    kinds: set[Literal["text", "number"]] = {"text" if piece.dtype.kind == "U" else "number" for piece in pieces}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"column {column!r}: text in some shards, numbers in others. Return one type.{_one_missing(missing)}"
        )
    whole = np.concatenate(pieces)
    if kinds == {"number"}:
        return whole, None
    values, numbers = np.unique(whole, return_inverse=True)
    if values.size > _MOST_VALUES:
        raise ConfigurationError(
            f"column {column!r}: {values.size:,} different texts, but at most {_MOST_VALUES:,} can be stored. Store a "
            "number instead of the text, such as a hash."
        )
    return numbers.astype(np.int64), tuple(values.tolist())


def duplicates(path: str | os.PathLike[str], name: str = "hash") -> list[int]:
    """Return the number of samples in each group of samples that have the same value in a column, largest first.

    Raises MetadataError if there is no such column.
    """
    store = open_store(path)
    columns = read_columns(store)
    if name not in columns:
        raise EnergonError(f"{store.root}: no column {name!r}. Run: energon columns add {store.root} --hash")
    if columns[name].made_of == "hash of the content":
        raise EnergonError(
            f"{store.root}: the column {name!r} is of an earlier version, which compared ids, too. Run: energon "
            f"columns add {store.root} --hash"
        )
    groups = groups_of_equal(np.asarray(read_numbers(store, name, columns[name])))
    return sorted((len(group) for group in groups), reverse=True)


def groups_of_equal(values: np.ndarray) -> list[np.ndarray]:
    """Return the places of equal values: a group, in order, for each value that occurs more than once."""
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(values[order][1:] != values[order][:-1]) + 1
    return sorted((group for group in np.split(order, cuts) if len(group) > 1), key=lambda group: int(group[0]))


# ---------------------------------------------------------------------------------------------------------------------
# Samples of equal content, found by a hash of their parts, from the column `hash` if there is one.


_ShardOf = tuple[int, int]
"""Number of a dataset, and of a shard in it."""


def find_equal_samples(
    datasets: Sequence[PreparedDataset], *, num_workers: Workers = 1
) -> tuple[list[Problem], list[Problem], int]:
    """Return the samples that equal an earlier one, across all datasets: of other split parts, and of the same.

    Between split parts media alone are compared, too; within one, samples that have the media of an earlier one beside
    other parts are only counted. Excluded samples are left out, and a shard in several split parts is checked once.
    Hashes that no column contains are computed, and not stored.
    """
    shards = _distinct_shards(datasets)
    kept = [_kept_hashes(dataset) for dataset in datasets]
    missing = [(number, shard) for number, shard in shards if _shard(datasets[number], shard) not in kept[number]]
    hashes: list[np.ndarray] = []
    with closing(map_shards(partial(_hashes, datasets), missing, num_workers=num_workers)) as computed:
        for number, shard in shards:
            values = kept[number].get(_shard(datasets[number], shard))
            hashes.append(next(computed) if values is None else values)
    starts = np.cumsum([0, *(len(one) for one in hashes)])
    content, media = np.concatenate(hashes).T
    leaks: dict[int, Problem] = {}
    repeats: dict[int, Problem] = {}
    for group in groups_of_equal(content):
        _name_equal(_placed(datasets, shards, starts, group), "content", leaks, repeats)
    names = [dataset.split_part for dataset in datasets]
    part_of_shard = np.array([names.index(names[number]) for number, _ in shards])
    shared = 0
    for group in groups_of_equal(media):
        if media[group[0]] == NO_MEDIA:
            continue
        if any(dataset.excluded for dataset in datasets):
            group = np.array([row for row, *_ in _placed(datasets, shards, starts, group)], dtype=np.int64)
        shared += sum(row not in leaks and row not in repeats for row in group[1:].tolist())
        parts = part_of_shard[np.searchsorted(starts, group, side="right") - 1]
        if (parts != parts[:1]).any():
            before = len(leaks)
            _name_equal(_placed(datasets, shards, starts, group), "media", leaks, None)
            shared -= len(leaks) - before
    return list(leaks.values()), list(repeats.values()), shared


_Placed = Iterator[tuple[int, PreparedDataset, str, str]]


def _placed(
    datasets: Sequence[PreparedDataset], shards: Sequence[_ShardOf], starts: np.ndarray, rows: np.ndarray
) -> _Placed:
    """Yield the samples in some rows of all hashes with dataset, shard and key, without those that are excluded."""
    for row in rows.tolist():
        at = int(np.searchsorted(starts, row, side="right")) - 1
        number, shard = shards[at]
        dataset = datasets[number]
        name = dataset.shard_names[shard]
        key = sample_key(dataset, shard, int(row - starts[at]))
        if (name, key) not in dataset.excluded:
            yield row, dataset, name, key


def _name_equal(samples: _Placed, what: str, leaks: dict[int, Problem], repeats: dict[int, Problem] | None) -> None:
    """Note samples that equal the first of them: those of other split parts in `leaks`, others in `repeats`."""
    first = next(samples, None)
    for row, dataset, shard, key in samples:
        assert first is not None
        _, other, place, other_key = first
        is_leak = dataset.split_part != other.split_part
        found = leaks if is_leak else repeats
        if found is None or row in leaks:
            continue
        where = f", of the split part {other.split_part!r}" if is_leak else ""
        found[row] = Problem(
            dataset=dataset.path,
            split_part=dataset.split_part,
            shard=shard,
            key=key,
            message=f"has the {what} of key {other_key!r} in {other.store.url(place)}{where}",
            remedy=f"If {'no split part shall know another' if is_leak else 'it is one too many'}, {LEAVE_OUT}.",
        )


def sample_key(dataset: PreparedDataset, shard: int, index: int) -> str:
    """Return the key of a sample; in a JSONL file or a table, its number."""
    if isinstance(dataset, JsonlDataset):
        return str(index)
    if isinstance(dataset, ForeignDataset):
        return f"{int(dataset.shard_counts[:shard].sum()) + index:09d}"
    offsets = read_index(dataset, shard)
    start = int(offsets[index])
    end = int(offsets[index + 1])
    data = dataset.store.read_range(dataset.shard_names[shard], start, end - start)
    where = f"{dataset.store.url(dataset.shard_names[shard])}, sample {index}"
    return parse_sample(data, where=where, parts=frozenset())[0]


def _distinct_shards(datasets: Sequence[PreparedDataset]) -> list[_ShardOf]:
    """Return all shards of some datasets, each once, also where several datasets (split parts) have it."""
    shards: dict[str, _ShardOf] = {}
    for number, dataset in enumerate(datasets):
        for shard, name in enumerate(dataset.shard_names):
            shards.setdefault(dataset.store.url(name), (number, shard))
    return list(shards.values())


def _kept_hashes(dataset: PreparedDataset) -> dict[_Shard, np.ndarray]:
    """Return the hashes of the shards covered by the columns `hash` and `media_hash`."""
    if isinstance(dataset, JsonlDataset | ForeignDataset):
        return {}
    rows = _kept_rows(dataset, read_columns(dataset.store), None, HASH_MADE_OF)
    both = {shard: columns for shard, columns in rows.items() if len(columns) == 2}  # one may have been removed
    return {shard: np.stack([columns["hash"], columns["media_hash"]], axis=1) for shard, columns in both.items()}


def _hashes(datasets: Sequence[PreparedDataset], shard_of: _ShardOf) -> np.ndarray:
    """Return the hashes of the content and of the media of each sample of a shard, int64, shape (samples, 2)."""
    dataset = datasets[shard_of[0]]
    found = [list(hashes(parts).values()) for parts in _parts_of(dataset, shard_of[1])]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _parts_of(dataset: PreparedDataset, shard: int) -> Iterator[dict[str, Any]]:
    """Yield the parts of each sample of a shard, as far as they are compared."""
    where = dataset.store.url(dataset.shard_names[shard])
    if isinstance(dataset, ForeignDataset):
        yield from (_parts_of_row(row, number) for number, row in enumerate(read_rows(dataset, shard)))
        return
    follow = follow_links(dataset.path)
    for index, data in read_samples(dataset, shard):
        if isinstance(dataset, JsonlDataset):
            yield {"json": bytes(data).strip()}
            continue
        _, parts = parse_sample(data, where=f"{where}, sample {index}", follow=follow)
        yield {part: bytes(content) for part, content in parts.items()}


def _parts_of_row(row: Any, number: int) -> dict[str, Any]:
    """Return the parts of a row of a table; of one that cannot be read, what no other row has."""
    if isinstance(row, Exception):
        return {"row": b"%d" % number, "error": str(row).encode()}
    return {part: bytes(data) for part, data in row.parts.items() if isinstance(data, bytes | memoryview)}

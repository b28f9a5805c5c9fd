"""Media indexing: metadata of images, videos and sound, read without decoding, goes into `index.sqlite`.

In a prepared dataset the metadata is stored with the key index. Any other folder gets an `index.sqlite` with nothing
else, and can then be an auxiliary store for cookers. Invariant: the new index replaces the old one atomically. Format:
`core/format/media.py`.

The work is cut into portions, a shard or some files each. Reading a portion gives *results*, and writing all results
gives the index. Both may happen in one process, or tasks (`media_task`) read, and a last run writes: then results are
stored in between, in `.nv-meta.media/<hash>.found`, by a hash of the filter and the names and sizes of the files: JSON,
a list of `[key, [type, metadata as JSON]]` or `[key, error]`.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, get_args

from energon_bridge.core.errors import (
    ConfigurationError,
    DecodeError,
    EmptyDatasetError,
    KeyIndexError,
    ShardMissingError,
    StorageError,
)
from energon_bridge.core.format.key_index import copy_key_index, sqlite_uri
from energon_bridge.core.format.media import (
    BY_EXTENSION,
    HEAD_BYTES,
    AVMetadata,
    ImageMetadata,
    MediaKind,
    MediaMetadata,
    format_by_head,
    kind_by_head,
    kind_by_name,
    load_codec,
)
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, META_FOLDER, is_prepared, meta_path, read_info
from energon_bridge.core.format.parallel import Progress, Task, Workers, map_shards, unseen, work_off
from energon_bridge.core.prepare.staging import Staging, forget
from energon_bridge.core.storage import ByteRange, Store, cannot_write, no_room, open_store
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.images.jpeg import loaded_size, may_be_cut_off, plain_jpeg

_FILES_AT_A_TIME = 256
_RESULTS_FOLDER = ".nv-meta.media"
_RESULTS_SUFFIX = ".found"
_SHARD_PARTS = """
    SELECT sample_key || '.' || part_name, content_byte_offset, content_byte_size FROM samples JOIN sample_parts
    ON sample_parts.tar_file_id = samples.tar_file_id AND sample_parts.sample_index = samples.sample_index
    WHERE samples.tar_file_id = ? ORDER BY content_byte_offset
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _File:
    """A file: its key, and the location of its content."""

    key: str
    rel: str
    offset: int
    size: int


Portion = tuple[int, str] | list[_File]
"""A shard with its number in the key index, or some files."""

Results = list[tuple[str, tuple[str, str] | str]]
"""Key of each media file, with its metadata as (type, JSON), or the error that reading it raised."""


def prepare_media(
    path: str | os.PathLike[str],
    media: MediaFilter,
    *,
    num_workers: Workers = 1,
    finish: bool = False,
    progress: Progress = unseen,
) -> IndexedMedia:
    """Write the metadata of the media files of a prepared dataset, or of any other folder.

    The metadata of other files is kept. `progress(done, total)` counts shards, or portions of files. With `finish` no
    file is read: tasks have done so (`media_task`). Raises EmptyDatasetError if a folder has no media, KeyIndexError if
    a dataset has no key index, ConfigurationError if PyAV is needed and not installed or a task is missing, and then
    changes nothing.
    """
    store = open_store(path)
    store.check_root()
    is_dataset = is_prepared(store)
    rel = meta_path(INDEX_SQLITE)
    with Staging(store) as staging:
        index = staging.path(rel)
        if store.exists(rel):
            copy_key_index(store, index)
        elif is_dataset:
            raise KeyIndexError(
                f"{store.root}: media metadata is stored in the key index, which is missing. Run `energon prepare "
                f"--tar-index-only {store.root}` first."
            )
        portions = _list_portions(store, media)
        indexed = _write_index(store, index, media, portions, num_workers=num_workers, finish=finish, progress=progress)
        if not (is_dataset or indexed.num_files):
            raise EmptyDatasetError(
                f"{store.root}: no media files match the filter {media.strategy} {media.patterns or ''}. For a folder "
                "of tars, run `energon prepare` first."
            )
        staging.commit()
    if finish:
        forget(store, _RESULTS_FOLDER, _RESULTS_SUFFIX)
    return indexed


def media_task(
    path: str | os.PathLike[str],
    media: MediaFilter,
    task: Task,
    *,
    num_workers: Workers = 1,
    progress: Progress = unseen,
) -> int:
    """Read the media files of one task, for `prepare_media(..., finish=True)`, and return the number of its portions.

    Tasks may run at the same time, anywhere where the data has the same path, and again at any time. Raises what
    `prepare_media` raises for a file.
    """
    store = open_store(path)
    store.check_root()
    portions = task.of(_list_portions(store, media))
    with tempfile.TemporaryDirectory(prefix="energon-media-") as folder:
        index = os.path.join(folder, INDEX_SQLITE)
        if is_prepared(store):
            copy_key_index(store, index)
        keep = partial(_store_results, store, media, partial(_read_portion, store, index, media))
        return work_off(keep, portions, num_workers=num_workers, progress=progress)


def _list_portions(store: Store, media: MediaFilter) -> list[Portion]:
    if is_prepared(store):
        return list(enumerate(read_info(store).shard_counts))
    files = [
        _File(name, name, 0, size)
        for name, size in store.list()
        if not name.startswith((f"{META_FOLDER}/", f"{META_FOLDER}.")) and media.may_pass(name)
    ]
    return [files[at : at + _FILES_AT_A_TIME] for at in range(0, len(files), _FILES_AT_A_TIME)]


def index_dataset_media(
    store: Store,
    shards: Sequence[str],
    index: str,
    media: MediaFilter,
    *,
    num_workers: Workers,
    progress: Progress = unseen,
) -> IndexedMedia:
    """Add the metadata of a dataset's media to its key index, a local file; `shards` are in the order of the index."""
    portions: list[Portion] = list(enumerate(shards))
    return _write_index(store, index, media, portions, num_workers=num_workers, finish=False, progress=progress)


def _write_index(
    store: Store,
    index: str,
    media: MediaFilter,
    portions: Sequence[Portion],
    *,
    num_workers: Workers,
    finish: bool,
    progress: Progress,
) -> IndexedMedia:
    """Read portions in several processes, or take what tasks have stored of them, and write their results to the index.

    The rows go to a separate file first, since the processes are still reading the index.
    """
    read_portion = partial(_stored_results, store, media) if finish else partial(_read_portion, store, index, media)
    try:
        with tempfile.TemporaryDirectory(prefix="energon-media-") as folder:
            rows = os.path.join(folder, "rows.sqlite")
            with closing(map_shards(read_portion, portions, num_workers=num_workers)) as all_results:
                indexed = _write_rows(rows, all_results, lambda number: progress(number, len(portions)))
            _merge(rows, index, media)
    except sqlite3.Error as error:
        full = no_room(error, (index, tempfile.gettempdir()))
        raise full or cannot_write(index, error, " the media metadata") from error
    return indexed


def _write_rows(path: str, all_results: Iterable[Results], advance: Callable[[int], object]) -> IndexedMedia:
    """Write results to an index of their own, and name the files that could not be read."""
    count = 0
    failed = []
    with closing(sqlite3.connect(path)) as connection:
        create_media_tables(connection)
        for number, results in enumerate(all_results, start=1):
            rows = [(key, *row) for key, row in results if not isinstance(row, str)]
            write_media_rows(connection, rows)
            count += len(rows)
            for key, error in results:
                if isinstance(error, str):
                    failed.append(key)
                    _logger.warning("%s: %s", key, error)
            advance(number)
        connection.commit()
    return IndexedMedia(num_files=count, failed=tuple(failed))


def _merge(rows: str, index: str, media: MediaFilter) -> None:
    with closing(sqlite3.connect(index, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")  # the index is still in staging
        connection.execute("ATTACH ? AS rows", (rows,))
        connection.execute("BEGIN")
        create_media_tables(connection)
        connection.execute("INSERT OR REPLACE INTO main.media_metadata SELECT * FROM rows.media_metadata")
        note_filter(connection, media.strategy, media.patterns or "")
        connection.execute("COMMIT")


def _read_portion(store: Store, index: str, media: MediaFilter, portion: Portion) -> Results:
    if isinstance(portion, list):
        return _read_files(store, media, portion)
    return _read_shard(store, index, media, portion)


def _store_results(
    store: Store, media: MediaFilter, read_portion: Callable[[Portion], Results], portion: Portion
) -> None:
    """Read a portion and store its results for the run that writes the index, unless that is done."""
    name = _results_file(store, media, portion)
    if not store.exists(name):
        store.write(name, json.dumps(read_portion(portion)).encode())


def _stored_results(store: Store, media: MediaFilter, portion: Portion) -> Results:
    """Return the results that a task has stored of a portion."""
    name = _results_file(store, media, portion)
    try:
        results = json.loads(store.read(name))
    except ShardMissingError:
        what = portion[0].rel if isinstance(portion, list) else portion[1]
        raise ConfigurationError(
            f"{store.url(what)}: no task has read it with this filter, or it changed since. Run its task again "
            "(--task NUMBER/COUNT), or run this without --finish."
        ) from None
    return [(key, result if isinstance(result, str) else (result[0], result[1])) for key, result in results]


def _results_file(store: Store, media: MediaFilter, portion: Portion) -> str:
    """Return the file for the results of a portion, named by the filter and the names and sizes of its files."""
    if isinstance(portion, list):
        files: list[Any] = [[file.rel, file.size] for file in portion]
    else:
        files = [[portion[1], store.size(portion[1])]]
    identity = json.dumps([media.strategy, media.patterns, files]).encode()
    return f"{_RESULTS_FOLDER}/{hashlib.sha256(identity).hexdigest()[:32]}{_RESULTS_SUFFIX}"


def _read_shard(store: Store, index: str, media: MediaFilter, shard: tuple[int, str]) -> Results:
    number, rel = shard
    try:
        with closing(sqlite3.connect(sqlite_uri(index), uri=True)) as connection:
            rows = connection.execute(_SHARD_PARTS, (number,)).fetchall()
    except (sqlite3.Error, ValueError) as error:  # ValueError: text that is not UTF-8
        raise KeyIndexError(
            f"{store.root}: cannot read the key index: {error}. Rebuild it with `energon prepare --tar-index-only "
            f"{store.root}`."
        ) from error
    return _read_files(
        store, media, (_File(key, rel, offset, size) for key, offset, size in rows if media.may_pass(key))
    )


def _read_files(store: Store, media: MediaFilter, files: Iterable[_File]) -> Results:
    """Return the metadata of those files that are media."""
    results: Results = []
    for file in files:
        content = ByteRange(store=store, rel=file.rel, offset=file.offset, size=file.size)
        try:
            kind = media.kind_of(file.key, content.read(HEAD_BYTES))
            if kind is not None:
                results.append((file.key, metadata_row(read_media(kind, content))))
        except (DecodeError, StorageError) as error:
            results.append((file.key, f"{store.url(file.rel)}: {error}"))
        except ConfigurationError as error:
            raise ConfigurationError(f"{store.url(file.rel)}: {file.key}: {error}") from error
    return results


# ---------------------------------------------------------------------------------------------------------------------
# The metadata of one file; neither images nor frames are decoded. Pillow reads images, from as few bytes as it needs;
# PyAV, which may not be installed, reads videos and sound. Compressed sound is decoded once to count its samples:
# nothing else gives the exact number.


_FIRST_BYTES = 64 << 10  # enough for the header of nearly every image


def read_media(kind: MediaKind, content: ByteRange | bytes) -> MediaMetadata:
    """Return the metadata of a file; reads only the needed bytes of videos and sound, and of an image in storage.

    Raises DecodeError if it is not a media file, or an image given as bytes is cut off; ConfigurationError if PyAV is
    needed and not installed.
    """
    if kind == "av":
        return AVDecoder(content).get_metadata(get_audio_num_samples=True)
    if isinstance(content, bytes):
        return read_image(content, to_its_end=True)
    if content.size > _FIRST_BYTES:
        try:
            return read_image(content.read(_FIRST_BYTES))
        except DecodeError:
            pass  # some formats have their header at the end, or a large preview before it
    return read_image(content.read())


def read_image(data: bytes, *, to_its_end: bool = False) -> ImageMetadata:
    """Return the metadata of an image; raises DecodeError, `to_its_end` also for one that is cut off.

    Only an image that lacks its end is decoded for that.
    """
    decodes = to_its_end and may_be_cut_off(data)
    header = None if decodes else plain_jpeg(data)
    if header is not None:
        return header
    from PIL import Image, UnidentifiedImageError  # the command line starts without it

    image_format = format_by_head(data[:HEAD_BYTES])
    load_codec("" if image_format is None else image_format.codec)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of images so large that they may be decompression bombs
            with Image.open(io.BytesIO(data)) as image:
                if decodes:
                    image.load()
                width, height = loaded_size(image)
                return ImageMetadata(
                    width=width, height=height, format=image.format or "UNKNOWN", mode=image.mode or "UNKNOWN"
                )
    except UnidentifiedImageError as error:  # whose message is the place of a Python object
        raise DecodeError(f"not an image that Pillow can read: its {len(data):,} bytes begin as none") from error
    except Exception as error:  # codecs raise anything
        raise DecodeError(f"not an image that Pillow can read: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The tables of `index.sqlite` (`core/format/media.py`), and which files are media.


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedMedia:
    """Number of files with metadata, and the keys of those that could not be read."""

    num_files: int
    failed: tuple[str, ...]


_TABLES = (
    """CREATE TABLE IF NOT EXISTS media_metadata (
        entry_key TEXT PRIMARY KEY,
        metadata_type TEXT NOT NULL,
        metadata_json TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS media_filters (
        filter_id INTEGER PRIMARY KEY AUTOINCREMENT,
        strategy TEXT NOT NULL,
        patterns TEXT,
        created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP,
        UNIQUE(strategy, patterns)
    )""",
)


LONG_SECONDS = 30.0
"""What many models hear of a sound: Whisper, Qwen2-Audio and others cut it off there, or refuse it."""
TO_LEAVE_OUT_LONG = (
    "Many models hear 30 s (Whisper, Qwen2-Audio): energon lint with --processor MODEL names what yours refuses. To "
    "leave long ones out: energon columns add with --sound-seconds, and `filter: sound_seconds <= 30`"
)
TO_SCALE_DOWN = (
    "A batch that is padded to one takes its size for each row. To scale such down: energon convert --max-pixels N "
    "--overwrite, or in training image_target of the decoder"
)
_FAR_ABOVE, _MUCH_PADDING = 8, (128 << 20) // 12
"""Of the pixels of a usual picture, and pixels of three floats in 128 MiB: of what training warns in a batch of two."""


def far_larger(sizes: Sequence[tuple[str, int, int]]) -> tuple[str, ...]:
    """Return the names, with their widths and heights, of pictures that are far larger than the others."""
    areas = sorted(width * height for _, width, height in sizes)
    least = max(_FAR_ABOVE * areas[(len(areas) - 1) // 2], _MUCH_PADDING) if areas else 0
    return tuple(f"{name} ({width} x {height})" for name, width, height in sizes if width * height >= least)


_KINDS = (("image", ImageMetadata), ("av", AVMetadata))
_NAMES = {kind: tuple(field.name for field in fields(cls)) for kind, cls in _KINDS}
_encode = json.JSONEncoder(separators=(",", ":")).encode


def metadata_row(metadata: MediaMetadata) -> tuple[str, str]:
    """Return type and JSON of a row."""
    kind = "image" if isinstance(metadata, ImageMetadata) else "av"
    values = ((name, getattr(metadata, name)) for name in _NAMES[kind])
    return kind, _encode({name: value for name, value in values if value is not None})


def create_media_tables(connection: sqlite3.Connection) -> None:
    """Create the two tables if they do not exist yet."""
    for statement in _TABLES:
        connection.execute(statement)


def write_media_rows(connection: sqlite3.Connection, rows: Iterable[Sequence[str]]) -> None:
    """Write rows of (key, type, JSON), as `metadata_row` makes them."""
    connection.executemany("INSERT OR REPLACE INTO media_metadata VALUES (?, ?, ?)", rows)


def note_filter(
    connection: sqlite3.Connection, strategy: str, patterns: str, *, created_at_utc: str | None = None
) -> None:
    """Record a filter by which files were chosen, once, however often it was used; the default time is now."""
    connection.execute(
        "INSERT OR IGNORE INTO media_filters (strategy, patterns, created_at_utc) "
        "VALUES (?, ?, COALESCE(?, CURRENT_TIMESTAMP))",
        (strategy, patterns, created_at_utc),
    )


def add_media(connection: sqlite3.Connection, rows: Iterable[Sequence[str]]) -> None:
    """Add the metadata of a new shard to a key index, as rows of (key, type, JSON).

    Unlike `energon prepare-media`, this records no time, so that the same rows give the same file.
    """
    create_media_tables(connection)
    note_filter(connection, "EXTENSION", "", created_at_utc="1970-01-01 00:00:00")
    write_media_rows(connection, rows)


Strategy = Literal["EXTENSION", "HEADER", "GLOB"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFilter:
    """Selects media files: by `EXTENSION`, by `HEADER`, or by `GLOB` with patterns separated by commas.

    Raises ConfigurationError for another strategy, and for patterns that are missing or have no effect.
    """

    strategy: Strategy
    patterns: str | None = None

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            strategies = ", ".join(get_args(Strategy))
            raise ConfigurationError(f"unknown media filter {self.strategy!r}; known: {strategies}")
        if (self.strategy == "GLOB") != bool(self._patterns()):
            raise ConfigurationError(f"the media filter {self.strategy} got the patterns {self.patterns!r}")

    @property
    def reads_files(self) -> bool:
        """Whether the strategy needs the first bytes of files."""
        return self.strategy == "HEADER"

    def may_pass(self, name: str) -> bool:
        """Whether a file of this name can be media."""
        if self.strategy == "GLOB":
            lower = name.lower()
            names = (lower, lower.rpartition("/")[2])
            return any(fnmatchcase(one, pattern) for pattern in self._patterns() for one in names)
        return self.reads_files or name.rpartition(".")[2].lower() in BY_EXTENSION

    def kind_of(self, name: str, head: bytes) -> MediaKind | None:
        """Return the kind of a file that may pass; None if it is no media. `head` are its first HEAD_BYTES."""
        by_name = kind_by_name(name)
        by_head = kind_by_head(head)
        return by_head or by_name if self.reads_files else by_name or by_head

    def _patterns(self) -> list[str]:
        return [pattern.strip().lower() for pattern in (self.patterns or "").split(",") if pattern.strip()]

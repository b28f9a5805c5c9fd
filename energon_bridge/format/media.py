"""Media metadata: size and form of images, length and streams of video and sound, known without decoding them.

They stand in `index.sqlite`, in the table `media_metadata(entry_key PRIMARY KEY, metadata_type, metadata_json)`: the
key is `<sample key>.<part>` in a dataset and the path in a folder of files, the type `image` or `av`, and the JSON is
compact and leaves out what is not known. `media_filters(filter_id, strategy, patterns, created_at_utc)` says by which
filters the files were chosen. Source: reference sections 1.5, 1.9 and 1.10.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from energon_bridge.errors import MediaMetadataError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMetadata:
    """Width and height in pixels, the file's format (`JPEG`) and colour mode (`RGB`), as Pillow names them."""

    width: int
    height: int
    format: str = "UNKNOWN"
    mode: str = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class AVMetadata:
    """Video and sound of one file; durations in seconds, None what it does not have or say."""

    video_duration: float | None = None
    video_num_frames: int | None = None
    video_fps: float | None = None
    video_width: int | None = None
    video_height: int | None = None
    audio_duration: float | None = None
    audio_channels: int | None = None
    audio_sample_rate: int | None = None
    audio_num_samples: int | None = None


MediaMetadata = ImageMetadata | AVMetadata

_TYPES: dict[str, type[ImageMetadata] | type[AVMetadata]] = {"image": ImageMetadata, "av": AVMetadata}


def read_metadata(kind: str, text: str, *, where: str) -> MediaMetadata:
    """Return the metadata of a row; raises MediaMetadataError, beginning with `where`."""
    cls = _TYPES.get(kind)
    if cls is None:
        raise MediaMetadataError(f"{where}: has the type {kind!r}, expected one of {', '.join(_TYPES)}.")
    try:
        values = json.loads(text)
        names = {field.name for field in fields(cls)}
        # Newer releases may know more; what this one does not know is left.
        return cls(**{name: value for name, value in values.items() if name in names})
    except (ValueError, TypeError, AttributeError) as error:
        raise MediaMetadataError(f"{where}: cannot be read: {error}. Run `energon prepare-media` again.") from error


def metadata_row(metadata: MediaMetadata) -> tuple[str, str]:
    """Return type and JSON of a row."""
    kind = "image" if isinstance(metadata, ImageMetadata) else "av"
    values = ((field.name, getattr(metadata, field.name)) for field in fields(metadata))
    known = {name: value for name, value in values if value is not None}
    return kind, json.dumps(known, separators=(",", ":"))


def create_media_tables(connection: sqlite3.Connection) -> None:
    """Create the two tables where they are not there yet."""
    for statement in _TABLES:
        connection.execute(statement)


def write_media(connection: sqlite3.Connection, rows: Iterable[tuple[str, MediaMetadata]]) -> None:
    """Write the metadata of some files by their keys, over what is known of them."""
    write_media_rows(connection, ((key, *metadata_row(found)) for key, found in rows))


def write_media_rows(connection: sqlite3.Connection, rows: Iterable[Sequence[str]]) -> None:
    """Write rows of (key, type, JSON), as `metadata_row` makes them."""
    connection.executemany("INSERT OR REPLACE INTO media_metadata VALUES (?, ?, ?)", rows)


def note_filter(
    connection: sqlite3.Connection, strategy: str, patterns: str, *, created_at_utc: str | None = None
) -> None:
    """Note that files were chosen by a filter; once, however often it was used. The time is now, if none is given."""
    connection.execute(
        "INSERT OR IGNORE INTO media_filters (strategy, patterns, created_at_utc) "
        "VALUES (?, ?, COALESCE(?, CURRENT_TIMESTAMP))",
        (strategy, patterns, created_at_utc),
    )

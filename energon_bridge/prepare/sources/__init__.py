"""Detect the kind of a source; the readers are in the other modules of this package."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from energon_bridge.errors import ConfigurationError, DatasetNotFoundError, SourceError
from energon_bridge.rows.base import Source

KINDS = ("table", "pairs", "classes", "parquet", "huggingface", "webdataset", "mix")
_TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")
_LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


def open_source(
    path: Path, *, kind: str | None = None, media: Path | None = None, numbered: bool = False, num_workers: int = 1
) -> Source:
    """Open a source of `energon convert`, of the given or the detected kind; raises the errors of its reader."""
    if not path.exists():
        return _far(path, kind, media)
    if media is not None and not media.is_dir():
        raise ConfigurationError(f"--media {media}: no such folder.")
    kind, path = (kind, path) if kind is not None else _look(path)
    readers: dict[str, Callable[[], Source]] = {
        "table": lambda: _table(path, media),
        "pairs": lambda: _folder(path, as_classes=False),
        "classes": lambda: _folder(path, as_classes=True),
        "folder": lambda: _folder(path, as_classes=None),
        "parquet": lambda: _arrow(path, media, saved=False),
        "huggingface": lambda: _arrow(path, media, saved=True),
        "mix": lambda: _mix(path, numbered=numbered),
        "webdataset": lambda: _tars(path, numbered=numbered, num_workers=num_workers),
    }
    source = readers[kind]()
    if len(source) == 0:
        raise SourceError(f"{path}: has no samples ({source.kind}).")
    return source


def _far(path: Path, kind: str | None, media: Path | None) -> Source:
    """Open the tables behind a URL, of which `Path` has left one slash."""
    scheme, colon, rest = str(path).partition(":/")
    if not colon or "/" in scheme:
        raise DatasetNotFoundError(f"{path}: no such file or folder. Check the path.")
    url = f"{scheme}://{rest}"
    from energon_bridge.rows.dataset import has_tables, open_far_source

    if kind not in (None, "parquet", "huggingface") or media is not None or not has_tables(url):
        raise DatasetNotFoundError(
            f"{url}: only parquet and arrow files can be converted from a URL, with the media in them or beside them. "
            "Check the URL, or download the files first."
        )
    return open_far_source(url)


def _look(path: Path) -> tuple[str, Path]:
    """Return the detected kind of a path, and the file that lists the samples if a folder has one."""
    suffix = path.suffix.lower()
    if path.is_file():
        if suffix in _TABLES:
            return "table", path
        kinds = {".parquet": "parquet", ".tar": "webdataset", ".yaml": "mix"}
        if suffix not in kinds:
            known = ", ".join((*_TABLES, *kinds))
            raise SourceError(
                f"{path}: cannot convert a {suffix or 'file without a suffix'}. Supported are {known} and folders."
            )
        return kinds[suffix], path
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return "huggingface", path
    names = [name for _, _, files in os.walk(path) for name in files if not name.startswith(".")]
    for suffix, kind in ((".tar", "webdataset"), (".parquet", "parquet")):
        if any(name.endswith(suffix) for name in names):
            return kind, path
    for name in _LISTS:
        if (path / name).exists():
            return "table", path / name
    tables = sorted(one for one in path.iterdir() if one.suffix.lower() in _TABLES[1:])
    if tables:
        raise SourceError(
            f"{path}: convert the folder, or the list {tables[0].name} in it? Pass the file, {tables[0]}, or "
            "--kind pairs or --kind classes."
        )
    return "folder", path


def _table(path: Path, media: Path | None) -> Source:
    from energon_bridge.rows.lists import open_table

    return open_table(path, media)


def _folder(path: Path, *, as_classes: bool | None) -> Source:
    from energon_bridge.prepare.sources.folders import FolderSource

    return FolderSource(path, as_classes=as_classes)


def _arrow(path: Path, media: Path | None, *, saved: bool) -> Source:
    from energon_bridge.rows.arrow import open_parquet, open_saved

    return open_saved(path, media) if saved else open_parquet(path, media)


def _mix(path: Path, *, numbered: bool) -> Source:
    from energon_bridge.prepare.sources.mixes import MixSource

    return MixSource(path, numbered=numbered)


def _tars(path: Path, *, numbered: bool, num_workers: int) -> Source:
    from energon_bridge.prepare.sources.tars import TarSource

    return TarSource(path, numbered=numbered, num_workers=num_workers)

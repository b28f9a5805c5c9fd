"""Paths and URLs inside a mix: makes them absolute against their file, and finds out what they name.

Rules: a path that starts with `/` or `scheme://` is absolute, any other is relative to the folder of the file; `.` and
`..` are resolved in the text, never above the root. `file://` becomes a plain path, `rclone://` is the old name of
`msc://`, and `dss://NAME@VERSION/path` lies in `$NVDATASET_CACHE_DIR/NAME/VERSION/path`.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum

from energon_bridge.core.errors import DatasetNotFoundError, MetadataError, NotPreparedError
from energon_bridge.core.format.foreign import format_at, format_named
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, is_prepared, meta_path, not_prepared
from energon_bridge.core.storage import open_store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_DSS_VARIABLE = "NVDATASET_CACHE_DIR"


def resolve_path(text: str, *, base: str, where: str) -> str:
    """Return `text` as an absolute path or URL; `base` is the folder it is relative to.

    Raises MetadataError, beginning with `where`, if the path is empty or leads above the root.
    """
    if not text.strip():
        raise MetadataError(f"{where}: expected a path, found an empty string.")
    match = _SCHEME.match(text)
    if match:
        return _resolve_url(text, match[1].lower(), text[match.end() :], where=where)
    if text.startswith("~"):
        text = os.path.expanduser(text)
    if text.startswith("/"):
        return "/" + _lexical(text, where=where, text=text)
    match = _SCHEME.match(base)
    if not match:
        return "/" + _lexical(f"{base}/{text}", where=where, text=text)
    authority, _, folder = base[match.end() :].partition("/")
    return f"{match[0]}{authority}/{_lexical(f'{folder}/{text}', where=where, text=text)}".rstrip("/")


def user_cache() -> str:
    """Return the user's cache folder: `$XDG_CACHE_HOME`, or `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return folder if os.path.isabs(folder) else os.path.expanduser("~/.cache")


def split_path(path: str) -> tuple[str, str]:
    """Split an absolute path or URL into its folder and its last name."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder or "/", name


def _resolve_url(text: str, scheme: str, rest: str, *, where: str) -> str:
    if scheme == "file":
        return "/" + _lexical(rest, where=where, text=text)
    if scheme == "dss":
        return _resolve_dss(text, rest, where=where)
    if "::" in rest:  # a chain of fsspec file systems; its parts are fsspec's business
        return text
    if scheme == "rclone":
        scheme = "msc"
    authority, slash, folder = rest.partition("/")
    return f"{scheme}://{authority}{slash}{_lexical(folder, where=where, text=text)}".rstrip("/")


def _resolve_dss(text: str, rest: str, *, where: str) -> str:
    full_name, _, folder = rest.partition("/")
    name, _, version = full_name.partition("@")
    if not name or not version:
        raise MetadataError(f"{where}: expected dss://NAME@VERSION/path, found {text!r}.")
    root = os.environ.get(_DSS_VARIABLE)
    if not root:
        raise MetadataError(f"{where}: {text!r} needs the folder in ${_DSS_VARIABLE}, which is not set. Set it.")
    return "/" + _lexical(f"{os.path.abspath(root)}/{name}/{version}/{folder}", where=where, text=text)


def _lexical(path: str, *, where: str, text: str) -> str:
    """Resolve `.`, `..` and empty parts; the result has no slash at either end."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if not parts:
                raise MetadataError(f"{where}: the path {text!r} leads above the root. Check its `..` parts.")
            parts.pop()
        elif part and part != ".":
            parts.append(part)
    return "/".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# The kind of thing a path names: a prepared dataset, a JSONL file, or the YAML file of another mix.
#
# References inside a mix are classified by name, so that a mix of a thousand datasets needs no storage requests; only
# `.yaml` names are looked up. A path given by the caller is inspected closely, so that errors can say what is wrong.


class DatasetKind(StrEnum):
    """What a path of a mix names."""

    PREPARED = "prepared"  # or tables, which are opened like it
    JSONL = "jsonl"
    METADATASET = "metadataset"


def kind_of_reference(path: str, *, where: str) -> DatasetKind:
    """Return the kind of an absolute path inside a mix; raises DatasetNotFoundError or MetadataError naming `where`."""
    if path.endswith(".jsonl"):
        return DatasetKind.JSONL
    if not path.endswith((".yaml", ".yml")):
        return DatasetKind.PREPARED
    if _is_file(path):
        _refuse_yml(path, where=f"{where}: {path}")
        return DatasetKind.METADATASET
    if _is_folder(path):
        return DatasetKind.PREPARED
    raise DatasetNotFoundError(f"{where}: {path}: no such file. Paths are relative to the file that contains them.")


def kind_of_source(path: str) -> DatasetKind:
    """Return the kind of an absolute path that a caller wants to train on.

    Raises DatasetNotFoundError, NotPreparedError or MetadataError, each saying what to do.
    """
    named_as_file = path.endswith((".jsonl", ".yaml", ".yml"))
    store = open_store(path)
    if format_named(path):
        return DatasetKind.PREPARED
    # A web server answers for folders as it does for files, so the metadata is looked for first.
    if not named_as_file and is_prepared(store):
        return DatasetKind.PREPARED
    if _is_file(path):
        if path.endswith(".jsonl"):
            return DatasetKind.JSONL
        if path.endswith(".yaml"):
            return DatasetKind.METADATASET
        _refuse_yml(path, where=path)
        if not _is_folder(path):
            raise MetadataError(
                f"{path}: expected the folder of a prepared dataset, a .jsonl file or the .yaml file of a mix, found "
                f"another file. For a tar, give the folder that `energon prepare` was run on."
            )
    if named_as_file and is_prepared(store):
        return DatasetKind.PREPARED
    store.check_root()
    if store.exists(meta_path(INDEX_SQLITE)):
        raise NotPreparedError(
            f"{path}: a folder of files with a media index can only be the `aux` of a dataset. To train on its "
            f"tars, run `energon prepare {path}`."
        )
    if format_at(path):
        return DatasetKind.PREPARED
    raise not_prepared(path)


def _refuse_yml(path: str, *, where: str) -> None:
    if path.endswith(".yml"):
        raise MetadataError(f"{where}: the name of a mix must end in .yaml, not .yml. Rename it.")


def _is_file(path: str) -> bool:
    folder, name = split_path(path)
    return bool(name) and open_store(folder).exists(name)


def _is_folder(path: str) -> bool:
    try:
        open_store(path).check_root()
    except DatasetNotFoundError:
        return False
    return True

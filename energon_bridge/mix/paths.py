"""Paths and URLs inside a mix: made absolute against the file that contains them, without touching any storage.

Rules (reference section 1.14): what starts with `/` or `scheme://` stands for itself, everything else is relative to
the folder of the file; `.` and `..` are resolved in the text, never above the root. `file://` becomes a plain path,
`rclone://` is the old name of `msc://`, and `dss://NAME@VERSION/path` lies in `$NVDATASET_CACHE_DIR/NAME/VERSION/path`.
"""

from __future__ import annotations

import os
import re

from energon_bridge.errors import MetadataError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_DSS_VARIABLE = "NVDATASET_CACHE_DIR"


def resolve_path(text: str, *, base: str, where: str) -> str:
    """Return `text` as an absolute path or URL; `base` is the folder it is relative to.

    Raises MetadataError, beginning with `where`, if the path is empty or leads above the root.
    """
    if not text.strip():
        raise MetadataError(f"{where}: expected a path, found an empty text.")
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
    """Return the folder below which programs keep what they can make again: `$XDG_CACHE_HOME`, or `~/.cache`."""
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
        raise MetadataError(
            f"{where}: {text!r} lies in the folder that ${_DSS_VARIABLE} names, and that variable is not set. Set it."
        )
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

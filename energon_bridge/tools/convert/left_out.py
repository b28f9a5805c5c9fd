"""The files of a folder that `energon convert` does not take: how many of each extension, and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from unicodedata import normalize

from energon_bridge.core.errors import SourceError
from energon_bridge.core.format.media import HEAD_BYTES, extension_by_head, kind_by_name
from energon_bridge.tools.convert.arrow import SAVED_META, ArrowSource
from energon_bridge.tools.convert.rows import FileRef, Row, Source, contents_of, first_rows

TEXTS = (".txt", ".caption", ".json")
"""Extensions of captions beside media, in order of preference: the first that exists is taken."""
_TARS = (".tar", ".tar.idx")


def files_below(root: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the files below a folder, sorted, and how many are hidden, and links to folders, which are not followed.

    Raises SourceError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise SourceError(f"{error.filename}: cannot read this folder: {error.strerror}.") from error

    files = []
    hidden = 0
    links = 0
    for folder, folders, names in os.walk(root, onerror=refuse):
        links += sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        before = "" if inside == "." else f"{inside}/"
        shown = [before + name for name in names if "/." not in f"/{before}{name}"]
        files += shown
        hidden += len(names) - len(shown)
    beside = (
        f"{hidden:,} hidden" if hidden else "",
        f"{links:,} link{'s' * (links > 1)} to folders (not followed)" if links else "",
    )
    return sorted(files), tuple(one for one in beside if one)


def stem_of(name: str) -> str:
    """Return the path of a file without its extension, in one Unicode form: systems write names in different ones."""
    return normalize("NFC", os.path.splitext(name)[0])


def extension_of(root: Path, name: str) -> str:
    """Return the extension of a file in lower case; of one without, that of its first bytes, "" for no media."""
    extension = os.path.splitext(name)[1][1:].lower()
    if extension:
        return extension
    try:
        with (root / name).open("rb") as file:
            return extension_by_head(file.read(HEAD_BYTES)) or ""
    except OSError:  # a broken link
        return ""


def lists_below(root: Path) -> list[str]:
    """Return the files below a folder that seem to list samples, those of captions first.

    Of JSON files, those with a list, with an object a line, or COCO's of images and annotations, that are not beside
    media of their name.
    """
    files = files_below(root)[0]
    stems = {stem_of(name) for name in files if kind_by_name(name) is not None}
    lists = [
        name
        for name in files
        if (suffix := os.path.splitext(name)[1].lower()) in (".jsonl", ".ndjson", ".csv", ".tsv")
        or (suffix == ".json" and stem_of(name) not in stems and _is_list(root / name))
    ]
    return sorted(lists, key=lambda name: ("caption" not in name, name.count("/"), name))


def _is_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16).lstrip()
    except OSError:  # a broken link
        return False
    has_lines = head.startswith(b"{") and b"}\n{" in head.replace(b"\r", b"")  # an object each, as NeMo's manifests
    return head.startswith(b"[") or has_lines or b'"images"' in head or b'"annotations"' in head


def beside_media(
    files: Iterable[str], beside: tuple[str, ...], extensions: Mapping[str, str], texts: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return what is left out of a folder of media.

    Args:
        beside: What else is there, as `files_below` says it.
        extensions: By file, as `extension_of` gives them.
        texts: The captions by the stem of their files, if captions are taken.
    """

    def is_media(name: str) -> bool:
        return kind_by_name(f".{extensions.get(name)}") is not None

    files = list(files)
    stems = {stem_of(name) for name in files if is_media(name)}

    def why(name: str) -> str:
        suffix = f".{extensions.get(name)}"
        if is_media(name):
            return ""
        if suffix not in TEXTS:
            return "neither media nor a caption"
        if stem_of(name) not in stems:
            return "no media beside it"
        if not texts:
            return "a folder of classes has no captions"
        stem = os.path.splitext(name)[0]
        same = [f".{extensions[one]}" for one in texts[stem_of(name)] if os.path.splitext(one)[0] == stem]
        taken = min(same, key=TEXTS.index)
        return "" if taken == suffix else f"{taken} beside it is taken"

    return _counted(files, why) + beside


def only(files: Iterable[str], beside: tuple[str, ...], extensions: Mapping[str, str]) -> str:
    """Return a sentence on what is in a folder without media."""
    others = beside_media(files, beside, extensions, {})
    return f" There are {', '.join(others)}." if others else ""


def beside_tars(root: Path, empty: Collection[str]) -> tuple[str, ...]:
    """Return what is left out of a folder of tars, some of which are empty."""

    def why(name: str) -> str:
        return "no samples" if name in empty else "" if name.endswith(_TARS) else "no tar"

    return _counted(files_below(root)[0], why)


def beside_tables(root: Path, source: ArrowSource) -> tuple[str, ...]:
    """Return what is left out of a folder of parquet files, or of one that the `datasets` library saved."""
    names_media = any(isinstance(one, FileRef) for row in first_rows(source) for one in contents_of(row))

    def why(name: str) -> str:
        if os.path.join(root, name) in source.paths or (names_media and kind_by_name(name) is not None):
            return ""
        if name.endswith(".parquet"):
            return "of no split, but others are"
        return "" if os.path.basename(name) in SAVED_META else "no table"

    files, beside = files_below(root)
    return _counted(files, why) + beside


def beside_list(root: Path, name: str, source: Source) -> tuple[str, ...]:
    """Return the files left out of a folder that is read by the list `name` in it."""
    taken = {os.path.abspath(root / name)}
    for number in range(len(source)):
        row = _row(source, number)
        taken.update(str(getattr(one, "path", "")) for one in (contents_of(row) if row is not None else ()))
    reason = f"not named in {name}"
    return _counted(files_below(root)[0], lambda file: "" if os.path.abspath(root / file) in taken else reason)


def _row(source: Source, number: int) -> Row | None:
    try:
        return source.row(number)
    except SourceError:
        return None  # named when it is converted


def _counted(files: Iterable[str], why: Callable[[str], str]) -> tuple[str, ...]:
    """Return the number of files by extension and reason; without a reason, a file is taken."""
    counts = Counter((os.path.splitext(name)[1] or "without an extension", why(name)) for name in files)
    counted = [f"{count:,} {suffix} ({reason})" for (suffix, reason), count in sorted(counts.items()) if reason]
    return tuple(one.encode("utf-8", "backslashreplace").decode() for one in counted)

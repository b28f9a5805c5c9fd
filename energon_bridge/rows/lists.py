"""Rows of JSON, JSONL, CSV and TSV files: conversations with media, COCO captions, and any table with paths in it.

A JSON file is read as a whole. For a JSONL file, only the offsets of its lines are kept; a line is parsed when its
sample is due.
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.errors import SampleError, SourceError
from energon_bridge.format.documents import UTF16, utf16_remedy
from energon_bridge.format.media import HEAD_BYTES, extension_by_head, kind_by_head, kind_by_name
from energon_bridge.rows.base import (
    Blob,
    Content,
    Layout,
    MediaRoot,
    Row,
    RowSample,
    first_rows,
    is_file_of,
    is_media_path,
    lay_out,
    located,
    media_file,
)
from energon_bridge.rows.turns import (
    BESIDE_PAIRS,
    CONVERSATIONS,
    Medium,
    check_places,
    check_sound,
    check_turns,
    has_preferences,
    medium_of,
    num_rejected,
    pair_of,
    part_kind,
    part_payload,
    part_text,
    preferred,
    turns_of,
)

_MEDIA_KEYS = {
    **dict.fromkeys(("image", "images", "img", "imgs"), "images"),
    **dict.fromkeys(("video", "videos"), "videos"),
    **dict.fromkeys(("audio", "audios"), "audios"),
}
_LOOKED_AT = 100


class TableSource:
    """Entries by number, each a mapping of columns; columns with media paths become files."""

    split_parts: tuple[tuple[str, int], ...] = ()
    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, entries: Entries, media: Path | None, kind: str) -> None:
        self.kind = kind
        self.where = str(path)
        self._entries = entries
        self._media = (path.parent if media is None else media).absolute()

    def __len__(self) -> int:
        return len(self._entries)

    def row(self, number: int) -> Row:
        """Return a row."""
        return self._row(*self._entries.entry(number))

    def _row(self, entry: Mapping[str, Any], where: str) -> Row:
        with located(where):
            if any(name in entry for name in CONVERSATIONS):
                return conversation_row(entry, where, self._media)
            values, files = dict(entry), {}
            for column in media_columns(entry, self._columns):
                value = values.pop(column, None)
                if value is not None and value != "":
                    files[column] = as_files(value, self._media, column)
            return Row(where=where, values=values, files=files)

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample to be read; raises SkipSample for one that is not preferred."""
        entry, where = self._entries.entry(number)
        with located(where):
            kept, rejected = only_preferred(entry, layout)
            sample = lay_out(learnable(self._row(kept, where), layout, self._is_chat), layout, number)
            return replace(sample, num_rejected=rejected) if rejected else sample

    def propose(self) -> Layout:
        """Propose a layout from the first rows."""
        rows = first_rows(self)
        if not self._columns and not any(row.files for row in rows):
            for row in rows[:1]:
                for name, value in row.values.items():
                    if isinstance(value, str) and "://" in value[:10] and is_media_path(value.partition("?")[0]):
                        raise SourceError(
                            f"{row.where}: the column `{name}` contains URLs ({value[:60]}), and no column contains "
                            "files. Download them first (img2dataset does), or convert without them: --sample-type "
                            "CrudeSample"
                        )
        return propose_layout(rows)

    @cached_property
    def _is_chat(self) -> bool:
        return any(is_conversation(row.values) for row in first_rows(self))

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        """Return the columns with media, judging by the first entries."""
        first: list[Mapping[str, Any]] = []
        for number in range(min(_LOOKED_AT, len(self))):
            with suppress(SourceError):
                first.append(self._entries.entry(number)[0])
        return file_columns(first, self._media, self.where)


def file_columns(rows: Iterable[Mapping[str, Any]], media: MediaRoot, where: str) -> tuple[str, ...]:
    """Return the columns with files, judging by the first rows; raises SourceError for one where few values name any.

    A column of other files than media has files, too: it is no text.
    """
    seen: dict[str, list[tuple[bool, Any]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and value not in ("", [], b""):
                found = holds_media(value) or is_file_of(value, name, media)
                seen.setdefault(name, []).append((found, value))
    columns = []
    for name, values in seen.items():
        files = [value for found, value in values if found]
        if len(files) * 2 > len(values):
            columns.append(name)
            continue
        there = next((one for one in files if is_media_path(one) and is_file_of(one, "", media)), None)
        if there is not None:
            other = next(value for found, value in values if not found)
            raise SourceError(
                f"{where}: the column `{name}` names files ({there!r}) in {len(files)} of its first {len(values)} "
                f"rows, but also has {str(other)[:60]!r}. Leave it empty where there is no file."
            )
    return tuple(columns)


def media_columns(entry: Mapping[str, Any], columns: Sequence[str]) -> Iterable[str]:
    """Return the columns of an entry with media: those of the first rows, and those that a question calls so."""
    if pair_of(entry) is None:
        return columns
    return dict.fromkeys((*columns, *(name for name in _MEDIA_KEYS if entry.get(name) and holds_media(entry[name]))))


def holds_media(value: Any) -> bool:
    if isinstance(value, list):
        return all(holds_media(item) for item in value)
    if isinstance(value, Mapping):
        return set(value) == {"bytes", "path"}
    return isinstance(value, bytes) or (is_media_path(value) and "://" not in value)


def as_files(value: Any, media: MediaRoot, column: str) -> Content | tuple[Content, ...]:
    """Return the files that a value stands for: a path, bytes, `{"bytes": …, "path": …}`, a data URI, or a list."""
    if isinstance(value, list | tuple):
        found = [as_files(item, media, column) for item in value]
        if any(isinstance(item, tuple) for item in found):
            raise SourceError(
                f"`{column}`: expected a list of files, found a list in it, {str(value)[:60]!r}. Make one file of the "
                "frames of a video."
            )
        return tuple(item for item in found if not isinstance(item, tuple))
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if data is None and isinstance(path, str):
            return media_file(path, media)
        value = data
        if isinstance(data, bytes) and isinstance(path, str) and is_media_path(path):
            return Blob(data, path.rpartition(".")[2].lower())
    if isinstance(value, bytes):
        extension = extension_by_head(value[:HEAD_BYTES])
        if extension is None:
            raise SourceError(f"`{column}`: bytes of an unknown format ({value[:8]!r}…).")
        return Blob(value, extension)
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return as_files(base64.b64decode(value.partition(",")[2], validate=True), media, column)
        except binascii.Error as error:
            raise SourceError(f"`{column}`: cannot read the data URI: {error}.") from error
    if not isinstance(value, str):
        raise SourceError(f"`{column}`: expected the path of a file, found {str(value)[:60]!r}.")
    return media_file(value, media)


def conversation_row(entry: Mapping[str, Any], where: str, media: MediaRoot) -> Row:
    """Take the media out of a conversation: its own keys, and those inside messages."""
    values: dict[str, Any] = {}
    files: dict[str, tuple[Content, ...]] = {}
    named: list[str] = []
    taken: dict[str, set[str]] = {}

    def take(column: str, value: Any, place: str) -> None:
        found = as_files(value if isinstance(value, list) else [value], media, column)
        files[column] = (*files.get(column, ()), *(found if isinstance(found, tuple) else (found,)))
        named.extend(item for item in (value if isinstance(value, list) else [value]) if is_media_path(item))
        taken.setdefault(column, set()).add(place)
        if len(taken[column]) > 1:
            raise SourceError(
                f"has {column} in {' and in '.join(sorted(taken[column]))}: write all of them in one place."
            )

    for name, value in entry.items():
        if name in _MEDIA_KEYS:
            if value:
                take(_MEDIA_KEYS[name], value, f"`{name}`")
        elif name in CONVERSATIONS and value is not None:
            if not isinstance(value, list) or not all(isinstance(turn, Mapping | list) for turn in value):
                raise SourceError(f"`{name}`: expected a list of turns, found {str(value)[:60]!r}.")
            try:
                values[name] = [_without_media(turn, take) for turn in value]
            except SampleError as error:
                raise SourceError(f"`{name}`: {error}. {_REMEDY}") from error
        else:
            values[name] = value
    if named:
        values["files"] = named
    if not files:
        _check_no_media(values)
    return Row(where=where, values=values, files=dict(files))


def _check_no_media(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not value or name.lower() in _NAMES or name in CONVERSATIONS:
            continue
        if holds_media(value) or (isinstance(value, str) and "://" in value and is_media_path(value.partition("?")[0])):
            raise SourceError(
                f"`{name}` seems to name media ({str(value)[:60]}), but those of a conversation are taken from "
                "`image`, `images`, `video` and `videos`: call it so."
            )


_REMEDY = "Change the list, or leave such samples out with --on-error skip."
_NAMES = ("id", "key", "uid", "name", "source")  # may look like paths


def _without_media(turn: Any, take: Callable[[str, Any, str], None]) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    name = "content" if turn.get("content") is not None else "value"
    content = turn.get(name)
    if not isinstance(content, list):
        return dict(turn)
    return {**turn, name: [_stored(piece, take) for piece in content]}


def _stored(piece: Any, take: Callable[[str, Any, str], None]) -> Any:
    """Return a part of a message as it is stored: its type and text, without media. Raises SampleError."""
    kind, text = part_kind(piece), None
    if kind == "text" and (text := part_text(piece)) is not None:
        return {"type": "text", "text": text}
    if kind is None or kind == "text":
        raise SampleError(f"a part of a message is not understood: {str(piece)[:200]}")
    check_sound(kind == "audio")
    payload = part_payload(piece, kind)
    if payload is not None:
        take(f"{kind}s", _content_of(payload), "messages")
    return {"type": kind}


def _content_of(payload: Any) -> Any:
    """Return the path, bytes or data URI in what a part has of a file. Raises SampleError."""
    if not isinstance(payload, Mapping) or "bytes" in payload or payload.get("path") is not None:
        return payload
    given = {name: value for name, value in payload.items() if value is not None and name not in _SAID_OF_FILES}
    if len(given) != 1 or next(iter(given)) not in ("url", "data"):
        raise SampleError(f"a part of a message is not understood: its file is {str(payload)[:200]}")
    ((name, value),) = given.items()
    return f"data:;base64,{value}" if name == "data" and isinstance(value, str) else value


_SAID_OF_FILES = ("type", "detail", "format", "media_type")


# What training takes --------------------------------------------------------------------------------------------------
#
# Of a conversation: all of it, or the row is refused here and not left out there.


def is_conversation(values: Mapping[str, Any]) -> bool:
    """Return whether a row is a conversation, a question with its answer, or has preferences."""
    return any(name in values for name in CONVERSATIONS) or pair_of(values) is not None or has_preferences(values)


def only_preferred(entry: Mapping[str, Any], layout: Layout) -> tuple[Mapping[str, Any], int]:
    """Return an entry without answers that are not preferred, if the layout says so, and how many are left out.

    Raises SourceError, and SkipSample if none is preferred.
    """
    if not layout.preferred:
        return entry, 0
    try:
        return preferred(entry), num_rejected(entry)
    except SampleError as error:
        raise SourceError(str(error)) from error


def learnable(row: Row, layout: Layout, is_chat: bool) -> Row:
    """Return a row of a crude layout, its media by their kinds, if training takes all of it; raises SourceError.

    A row that is no conversation passes, unless the first rows are (`is_chat`).
    """
    try:
        if not layout.is_crude:
            if has_preferences(row.values, tags_only=True):
                turns_of(row.values)  # says so
            return row
        turns = turns_of(row.values)
        if turns is None:
            if is_chat:
                raise SampleError(
                    f"is no conversation, as the first rows are: it has {', '.join(row.values) or 'nothing'}"
                )
            return row
        check_turns(turns)
        if not row.files:
            _check_no_media(row.values)
        files = {name: _of_known_kind(name, content) for name, content in row.files.items()}
        check_places(turns, Counter(_medium(name, one) for name, of in files.items() for one in _several(of)))
    except SampleError as error:
        raise SourceError(f"{error}. {_REMEDY}") from error
    return replace(row, files=files)


def _several(contents: Content | tuple[Content, ...]) -> tuple[Content, ...]:
    return contents if isinstance(contents, tuple) else (contents,)


def _medium(column: str, content: Content) -> Medium:
    found = medium_of(f"{column}.0.{content.extension}")
    if found is None:
        found = "image" if kind_by_head(content.read()[:HEAD_BYTES]) == "image" else None
    if found is None or (found == "image" and column in ("video", "videos")):
        what = "an image" if found else "not an image or video of a known format"
        raise SampleError(f"`{column}`: {getattr(content, 'path', content.extension)} is {what}")
    return found


def _of_known_kind(column: str, contents: Content | tuple[Content, ...]) -> Content | tuple[Content, ...]:
    """Return files with the extension of their content, where theirs says nothing."""
    if isinstance(contents, tuple):
        return tuple(_several(_of_known_kind(column, one))[0] for one in contents)
    if kind_by_name(f"x.{contents.extension}") is not None:
        return contents
    extension = extension_by_head(contents.read()[:HEAD_BYTES])
    is_known = extension is not None and kind_by_name(f"x.{extension}") is not None
    return replace(contents, extension=extension) if is_known else contents  # type: ignore[arg-type]


class Entries:
    """Mappings by number, each with its place in the source."""

    def __len__(self) -> int:
        raise NotImplementedError

    def entry(self, number: int) -> tuple[Mapping[str, Any], str]:
        """Return an entry and its place; raises SourceError."""
        raise NotImplementedError


class ListedEntries(Entries):
    """Entries in memory; `unit` and `first` number them in messages."""

    def __init__(self, path: Path, entries: Sequence[Any], *, unit: str = "entry", first: int = 0) -> None:
        self._path, self._entries, self._unit, self._first = path, entries, unit, first

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, number: int) -> tuple[Mapping[str, Any], str]:
        """Return an entry and its place."""
        entry = self._entries[number]
        where = f"{self._path}, {self._unit} {number + self._first}"
        if not isinstance(entry, Mapping):
            raise SourceError(f"{where}: expected an object, found {str(entry)[:60]!r}.")
        return entry, where + (f" (id {entry['id']})" if "id" in entry else "")


class LineEntries(Entries):
    """The lines of a JSONL file, parsed one by one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = np.memmap(file, np.uint8, "r") if size else np.zeros(0, np.uint8)
            ends = [np.flatnonzero(text[at : at + (1 << 24)] == 10) + at + 1 for at in range(0, size, 1 << 24)]
            borders = np.concatenate([np.zeros(1, np.int64), *ends])
            if borders[-1] != size:
                borders = np.append(borders, size)
        if remedy := utf16_remedy(bytes(text[:2]), str(path)):
            raise SourceError(f"{path}: {remedy}")
        filled = np.flatnonzero(np.diff(borders) > 2)  # `{}` and a line end: anything shorter is not an entry
        self._starts, self._ends, self._lines = borders[:-1][filled], borders[1:][filled], filled + 1

    def __len__(self) -> int:
        return len(self._starts)

    def entry(self, number: int) -> tuple[Mapping[str, Any], str]:
        """Return an entry and its place."""
        start, end = int(self._starts[number]), int(self._ends[number])
        where = f"{self._path}, line {self._lines[number]}"
        with self._path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        try:
            entry = json.loads(data)
        except ValueError as error:
            raise SourceError(
                f"{where}: not valid JSON: {error}. Fix the line, or leave such lines out with --on-error skip."
            ) from error
        if not isinstance(entry, Mapping):
            raise SourceError(f"{where}: expected an object, found {str(entry)[:60]!r}.")
        return entry, where + (f" (id {entry['id']})" if "id" in entry else "")


def open_table(path: Path, media: Path | None) -> TableSource | CocoSource:
    """Open a .json, .jsonl, .csv or .tsv file; raises SourceError."""
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return TableSource(path, LineEntries(path), media, "JSON lines")
    if suffix in (".csv", ".tsv"):
        return _open_csv(path, media)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise SourceError(
            f"{path}: not valid JSON: {error}. If it has one object per line, rename it to .jsonl."
        ) from error
    if isinstance(content, Mapping):
        if isinstance(content.get("images"), list) and isinstance(content.get("annotations"), list):
            return CocoSource(path, content, media)
        lists = [name for name, value in content.items() if isinstance(value, list) and value]
        if len(lists) != 1:
            raise SourceError(
                f"{path}: expected a list of objects, or COCO's `images` and `annotations`, found an object with "
                f"{', '.join(map(str, content)) or 'nothing'}."
            )
        content = content[lists[0]]
    if not isinstance(content, list):
        raise SourceError(f"{path}: expected a list of objects, found {str(content)[:60]!r}.")
    return TableSource(path, ListedEntries(path, content), media, "JSON list")


def _open_csv(path: Path, media: Path | None) -> TableSource:
    """Open a .csv or .tsv file, with whichever of the usual separators its header has."""
    csv.field_size_limit(1 << 30)
    suffix = path.suffix[1:].lower()
    try:
        data = path.read_bytes()
        text = data.decode("utf-16" if data.startswith(UTF16) else "utf-8-sig").lstrip("\r\n")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8: {error}. Write it as such (iconv -t UTF-8).") from error
    if "\0" in text:
        raise SourceError(f"{path}: has zero bytes. Is it UTF-16? Write it as UTF-8: iconv -f UTF-16LE -t UTF-8.")
    usual = "," if suffix == "csv" else "\t"
    header = text[: 1 << 20]
    found = [mark for mark in ",;\t|" if len(next(csv.reader(io.StringIO(header, ""), delimiter=mark), ())) > 1]
    delimiter = usual if usual in found or not found else found[0]
    if delimiter != usual and len(found) > 1:
        raise SourceError(
            f"{path}: the header has no {usual!r}, but {' and '.join(map(repr, found))}. Write the table with "
            f"{usual!r} between the fields."
        )
    kind = suffix.upper() + (f" with {delimiter!r} between fields" if delimiter != usual else "")
    return TableSource(path, _read_csv(path, text, delimiter), media, kind)


def _read_csv(path: Path, text: str, delimiter: str) -> ListedEntries:
    reader = csv.reader(io.StringIO(text, ""), delimiter=delimiter, strict=True)
    try:
        header, *rows = [row for row in reader if row] or [[]]
    except csv.Error as error:
        raise SourceError(
            f"{path}, line {reader.line_num}: cannot be read as {delimiter!r}-separated text: {error}. A field with a "
            'quote is between quotes, and has the quote twice: "a ""b"" c".'
        ) from error
    header = [name.strip() for name in header]
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise SourceError(f"{path}: the header has the column {twice[0]!r} twice. Give one of them another name.")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise SourceError(
                f"{path}, row {number}: has {'more' if len(row) > len(header) else 'fewer'} fields than the "
                f"{len(header)} columns of the header ({', '.join(header)})."
            )
    entries = [dict(zip(header, row, strict=True)) for row in rows]
    return ListedEntries(path, entries, unit="row", first=2)


class CocoSource:
    """COCO captions: one sample for each image, with all its captions."""

    kind = "COCO captions"
    split_parts: tuple[tuple[str, int], ...] = ()
    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, content: Mapping[str, Any], media: Path | None) -> None:
        self.where = str(path)
        self._media = (path.parent if media is None else media).absolute()
        try:
            captions: dict[Any, list[str]] = {}
            for annotation in content["annotations"]:
                captions.setdefault(annotation["image_id"], []).append(annotation["caption"])
            self._images = [(image["id"], image["file_name"]) for image in content["images"]]
        except (KeyError, TypeError) as error:
            raise SourceError(
                f"{path}: not COCO captions: {error} is missing in `images` or `annotations`. "
                "Use captions_*.json; instances_*.json contains boxes."
            ) from error
        self._captions = captions

    def __len__(self) -> int:
        return len(self._images)

    def row(self, number: int) -> Row:
        """Return an image and its captions."""
        image, name = self._images[number]
        where = f"{self.where}, image {image}"
        with located(where):
            values = {"image_id": image, "file_name": name, "captions": self._captions.get(image, [])}
            if not values["captions"]:
                raise SourceError("no captions. Leave such images out with --on-error skip.")
            key = str(Path(name).with_suffix("")).replace(".", "_")
            return Row(where=where, values=values, files={"image": media_file(name, self._media)}, key=key)

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample to be read."""
        return lay_out(self.row(number), layout, number)

    def propose(self) -> Layout:
        """Return images with their first captions."""
        fields = {"image": "image", "caption": "captions[0]"}
        return Layout(sample_type="CaptioningSample", fields=fields, bare=frozenset(["image"]))


# Proposals ------------------------------------------------------------------------------------------------------------
#
# For a table of unknown columns: the closest sample type, and the column for each of its fields.


_CAPTIONS = ("caption", "text", "txt", "captions", "description", "alt", "alt_text", "title", "prompt")
_QUESTIONS = ("question", "query", "instruction", "context")
_ANSWERS = ("answers", "answer", "response", "output")
_LABELS = ("label", "labels", "class", "category", "target", "label_name", "class_name")


def propose_layout(rows: Sequence[Row]) -> Layout:
    """Propose how rows become samples, from the names and values of their columns."""
    files = list(dict.fromkeys(name for row in rows for name in row.files))
    values = list(dict.fromkeys(name for row in rows for name in row.values))
    if _named(values, CONVERSATIONS) or any(_is_more(row) for row in rows) or len(files) > 1 or not _are_images(rows):
        lists = {name for name in files if any(isinstance(row.files.get(name), tuple) for row in rows)}
        return Layout(sample_type="CrudeSample", bare=frozenset(files if len(files) == 1 else lists & {"images"}))
    if not files:
        text = _named(values, ("text", "content", "caption"))
        if text is None:
            return Layout(sample_type="CrudeSample")
        return Layout(sample_type="TextSample", fields={"text": text})
    image = {"image": files[0]}
    bare = frozenset(files)
    question, caption = _named(values, _QUESTIONS), _named(values, _CAPTIONS)
    label = _named(values, _LABELS)
    if question is not None:
        answers = _named(values, _ANSWERS)
        fields = {**image, "context": question} | ({"answers": answers} if answers else {})
        return Layout(sample_type="VQASample", fields=fields, bare=bare)
    if caption is not None:
        access = caption + ("[0]" if any(isinstance(row.values.get(caption), list) for row in rows) else "")
        return Layout(sample_type="CaptioningSample", fields={**image, "caption": access}, bare=bare)
    if label is not None:
        numbered = all(str(row.values.get(label, "0")).lstrip("-").isdigit() for row in rows)
        fields = {**image, ("label" if numbered else "label_name"): label}
        if numbered and (name := _named(values, ("label_name", "class_name"))) and name != label:
            fields["label_name"] = name
        return Layout(sample_type="ImageClassificationSample", fields=fields, bare=bare)
    return Layout(sample_type="ImageSample", fields=image, bare=bare)


def _named(columns: Iterable[str], names: Sequence[str]) -> str | None:
    lower = {column.lower(): column for column in reversed(list(columns))}
    return next((lower[name] for name in names if name in lower), None)


def _is_more(row: Row) -> bool:
    """Whether a row says more than a question, an answer and an image: what the types for these would leave out."""
    pair = pair_of(row.values)
    if pair is None or has_preferences(row.values):
        return has_preferences(row.values)
    beside = [name for name in BESIDE_PAIRS if name in row.values and name not in pair]
    return bool(beside) or (bool(row.files) and (pair[0] not in _QUESTIONS or pair[1] not in _ANSWERS))


def _are_images(rows: Sequence[Row]) -> bool:
    """Whether each file column holds single images."""
    return all(
        not isinstance(content, tuple) and kind_by_name(f"x.{content.extension}") == "image"
        for row in rows
        for content in row.files.values()
    )

"""Rows of JSON, JSONL, CSV and TSV files: conversations with media, COCO captions, and any table with paths in it.

A JSON file is read as a whole. For a JSONL file, only the offsets of its lines are kept; a line is parsed when its
sample is due.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.core.errors import SampleError, SkipSample, SourceError
from energon_bridge.core.format.documents import UTF16, utf16_remedy
from energon_bridge.core.format.media import BASE64, kind_by_name
from energon_bridge.models.conversations.parts import (
    is_against_names,
    is_drawn,
    is_of_answer,
    medium_by_name,
    natural_order,
)
from energon_bridge.models.conversations.questions import (
    CHOICES,
    CONTEXTS,
    TOLD,
    AnswersAs,
    answers_as,
    columns_of,
    from_text,
    is_metadata,
    options_of,
    question_with,
    short_text,
    texts_of,
    unknown_texts,
)
from energon_bridge.models.conversations.segments import is_option
from energon_bridge.models.conversations.turn_media import unseen_medium
from energon_bridge.models.conversations.turns import (
    BESIDE_PAIRS,
    CONVERSATIONS,
    KNOWN_BESIDE,
    ROLES,
    SYSTEMS,
    find_pair,
    has_pairs,
    has_preferences,
    not_in_turns,
)
from energon_bridge.models.conversations.unused import has_order, unused_columns, unused_keys
from energon_bridge.models.conversations.withheld import accepted
from energon_bridge.tools.convert.conversations import (
    as_files,
    as_source,
    conversation_row,
    file_columns,
    holds_media,
    is_conversation,
    known_form,
    learnable,
    media_columns,
    names_of_files,
    only_preferred,
)
from energon_bridge.tools.convert.csv_rows import LinesAndRow, csv_rows
from energon_bridge.tools.convert.rows import (
    LOOKED_AT,
    RAW,
    Blob,
    Content,
    Layout,
    Row,
    RowSample,
    TextRef,
    contents_of,
    first_rows,
    is_filled,
    is_media_column,
    is_media_path,
    late_rows,
    lay_out,
    located,
    media_file,
    media_folder,
    shown,
)


class TableSource:
    """Entries by number, each a mapping of columns; columns with media paths become files."""

    split_parts: tuple[tuple[str, int], ...] = ()
    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, entries: ListedEntries | LineEntries, media: Path | None, kind: str) -> None:
        self.kind = kind
        self.where = str(path)
        self.entries = entries
        self._media = media_folder(path.parent, media)

    def __len__(self) -> int:
        return len(self.entries)

    def row(self, number: int) -> Row:
        return self._row(*self.entries.entry(number))

    def _row(self, entry: Mapping[str, Any], where: str) -> Row:
        with located(where):
            entry = known_form(entry)
            if any(name in entry for name in CONVERSATIONS):
                return conversation_row(entry, where, self._media)
            values = dict(entry)
            files = {}
            named = {}
            for column in media_columns(entry, self._columns):
                value = values.pop(column, None)
                if value is not None and value != "":
                    files[column] = as_files(value, self._media, column)
                    named[column] = names_of_files(value)
            return Row(where=where, values=values, files=files, named=named)

    def entry(self, number: int) -> Mapping[str, Any]:
        """Return a row as the list has it; raises SourceError."""
        return self.entries.entry(number)[0]

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample to be read; raises SkipSample for one that is not preferred."""
        entry, where = self.entries.entry(number)
        with located(where):
            if not layout.is_crude and isinstance(self.entries, LineEntries):
                self._check_seen(entry, layout)
            kept, rejected = only_preferred(entry, layout)
            sample = lay_out(learnable(self._row(kept, where), layout, self._is_chat), layout, number)
            return replace(sample, num_rejected=rejected) if rejected else sample

    def column(self, name: str) -> Iterator[object]:
        """Yield the value of a column in each entry; None where there is none, or it cannot be read."""
        for number in range(len(self)):
            value = None
            with suppress(SourceError):  # said when it is converted
                value = self.entry(number).get(name)
            yield value

    def propose(self) -> Layout:
        """Propose a layout from the first rows."""
        return propose_layout(first_rows(self))

    @cached_property
    def _is_chat(self) -> bool:
        return any(is_conversation(row.values) for row in first_rows(self))

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        """Return the columns with media, judging by the first entries."""
        numbers = (*range(min(LOOKED_AT, len(self))), *self.late)
        return file_columns([entry for _, entry in self._entries_at(numbers)], self._media, self.where)

    @cached_property
    def late(self) -> tuple[int, ...]:
        """Return the first few entries that have something in each column which the first entries leave empty.

        Of a JSONL file, which is not in memory, those among some that are spread over it.
        """
        if isinstance(self.entries, ListedEntries):
            return late_rows(self._entries_at(range(len(self))))
        spread = np.linspace(0, len(self) - 1, min(_SPREAD, len(self)), dtype=int).tolist()
        return late_rows(self._entries_at(sorted({*range(min(LOOKED_AT, len(self))), *spread})))

    def _check_seen(self, entry: Mapping[str, Any], layout: Layout) -> None:
        """Raise SourceError for a column that no entry that was looked at has, if a sample would be made without it."""
        for name in [name for name, value in entry.items() if name not in self._seen and is_filled(value)]:
            known: tuple[str, ...] = (*CONVERSATIONS, *KNOWN_BESIDE)
            known += (*CONTEXTS, *CHOICES) if "context" in layout.fields else ()
            unknown = "context" in layout.fields and unknown_texts({name: entry[name]}, known)
            if name not in layout.ignored and (name.lower() in known or unknown):
                raise SourceError(
                    f"`{name}` is {shown(entry[name])}, and empty in the lines that were looked at, so it would be "
                    f"left out of a {layout.sample_type}. Convert all lines with --sample-type CrudeSample, or write "
                    "those that have it into a list of their own."
                )

    @cached_property
    def _seen(self) -> frozenset[str]:
        numbers = (*range(min(LOOKED_AT, len(self))), *self.late)
        looked_at = self._entries_at(numbers)
        return frozenset(name for _, entry in looked_at for name, value in entry.items() if is_filled(value))

    def _entries_at(self, numbers: Iterable[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number in numbers:
            with suppress(SourceError):  # said when it is converted
                yield number, self.entry(number)


_SPREAD = 1000
"""Lines of a JSONL file that are looked at before it is converted, beside the first."""


def _checked(entry: Any, where: str) -> tuple[Mapping[str, Any], str]:
    """Return an entry and its place; raises SourceError if it is no object."""
    if not isinstance(entry, Mapping):
        raise SourceError(f"{where}: expected an object, found {str(entry)[:60]!r}.")
    return entry, where + (f" (id {entry['id']})" if "id" in entry else "")


class ListedEntries:
    """Entries in memory, of malformed ones their error; `unit` and `first` number them in messages.

    Of a file that is not UTF-8 (`is_utf8`), bytes that are not are surrogates: the entries that have any fail.
    """

    def __init__(
        self, path: Path, entries: Sequence[Any], *, unit: str = "entry", first: int = 0, is_utf8: bool = True
    ) -> None:
        self._path = path
        self._entries = entries
        self._unit = unit
        self._first = first
        self._is_utf8 = is_utf8

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, number: int) -> tuple[Mapping[str, Any], str]:
        """Return an entry and its place in the source; raises SourceError."""
        entry = self._entries[number]
        if isinstance(entry, SourceError):
            raise SourceError(str(entry))
        found, where = _checked(entry, f"{self._path}, {self._unit} {number + self._first}")
        fault = None if self._is_utf8 else _not_utf8(json.dumps(found, ensure_ascii=False))
        if fault is not None:
            raise SourceError(f"{where.encode(errors='backslashreplace').decode()}: {fault}")
        return found, where


class LineEntries:
    """The lines of a JSONL file, parsed one by one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        begin = b""
        size = 0
        ends = []
        with path.open("rb") as file:
            while block := file.read(1 << 24):  # not mapped: truncating a mapped file would kill us
                begin = begin or block[:2]
                ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + size + 1)
                size += len(block)
        borders = np.concatenate([np.zeros(1, np.int64), *ends])
        if borders[-1] != size:
            borders = np.append(borders, size)
        if remedy := utf16_remedy(begin, str(path)):
            raise SourceError(f"{path}: {remedy}")
        filled = np.flatnonzero(np.diff(borders) > 2)  # `{}` and a line end: anything shorter is not an entry
        self._starts = borders[:-1][filled]
        self._ends = borders[1:][filled]
        self._lines = filled + 1

    def __len__(self) -> int:
        return len(self._starts)

    def entry(self, number: int) -> tuple[Mapping[str, Any], str]:
        """Return an entry and its place in the source; raises SourceError."""
        start = int(self._starts[number])
        end = int(self._ends[number])
        where = f"{self._path}, line {self._lines[number]}"
        with self._path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        try:
            entry = json.loads(data, object_pairs_hook=_object)
        except ValueError as error:
            is_text = not isinstance(error, UnicodeDecodeError)
            remedy = "Fix the line" if is_text else f"Write the file as UTF-8 ({_iconv(data)})"
            raise SourceError(f"{where}: not valid JSON: {error}. {remedy}.") from error
        return _checked(entry, where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has {name[:60]!r} twice")
    return entry


def open_table(path: Path, media: Path | None) -> TableSource | CocoSource:
    """Open a .json, .jsonl, .csv or .tsv file; raises SourceError."""
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return TableSource(path, LineEntries(path), media, "JSON lines")
    if suffix in (".csv", ".tsv"):
        return _open_csv(path, media)
    data = path.read_bytes()
    text, is_utf8 = _text(data, json.detect_encoding(data))
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        remedy = "Fix it there, or download it again if it is cut off."
        if not is_utf8:
            remedy = f"Write it as UTF-8 ({_iconv(data)})."
        elif "Extra data" in str(error):
            if _has_lines(path):
                return TableSource(path, LineEntries(path), media, "JSON lines")
            remedy = "If it has one object per line, rename it to .jsonl."
        raise SourceError(f"{path}: not valid JSON: {error}. {remedy}") from error
    if isinstance(content, Mapping):
        if isinstance(content.get("images"), list) and isinstance(content.get("annotations"), list):
            return CocoSource(path, content, media)
        if _is_entry(content):
            return TableSource(path, ListedEntries(path, [content], is_utf8=is_utf8), media, "JSON object")
        if "annotations" in content and "images" not in content:
            raise SourceError(f"{path}: `annotations` without `images`: COCO's list of them names the files. Add it.")
        lists = [name for name, value in content.items() if isinstance(value, list) and value]
        if len(lists) != 1:
            names = f"{', '.join(map(str, list(content)[:10])) or 'nothing'}{', …' * (len(content) > 10)}"
            remedy = ""
            if content and all(isinstance(value, Mapping) for value in content.values()):
                remedy = " Write its objects as a list, those of each split in a file of their own."
            raise SourceError(
                f"{path}: expected a list of objects, or COCO's `images` and `annotations`, found an object with "
                f"{names}.{remedy}"
            )
        content = content[lists[0]]
    if not isinstance(content, list):
        raise SourceError(f"{path}: expected a list of objects, found {str(content)[:60]!r}.")
    return TableSource(path, ListedEntries(path, content, is_utf8=is_utf8), media, "JSON list")


def _text(data: bytes, encoding: str) -> tuple[str, bool]:
    """Return the text of a file, with surrogates for bytes that are none, and whether there are no such bytes."""
    try:
        return data.decode(encoding), True
    except UnicodeDecodeError:
        return data.decode(encoding if encoding.startswith("utf-8") else "utf-8", "surrogateescape"), False


def _not_utf8(text: str) -> str | None:
    """Return what is wrong with a text that has surrogates, and the remedy."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = ascii(text[max(0, error.start - 20) : error.end + 20]).replace(r"\udc", r"\x")
        return (
            f"{near} is not UTF-8. If others are, fix it there; if the file is of another encoding, write it as "
            f"UTF-8 ({_iconv(b'')})."
        )
    return None


def _iconv(data: bytes) -> str:
    """Return the command that makes a file UTF-8; zero bytes are those of UTF-16, else it is most likely of Windows."""
    return f"iconv -f {'UTF-16LE' if 0 in data else 'WINDOWS-1252'} -t UTF-8"


def _is_entry(content: Mapping[str, Any]) -> bool:
    """Return whether an object is one entry, not what has the list of them."""
    turns = next((content[name] for name in CONVERSATIONS if name in content), None)
    if isinstance(turns, list):
        return all(isinstance(one, Mapping) and ("role" in one or "from" in one) for one in turns)
    return "audio_filepath" in content or is_conversation(content)


def _has_lines(path: Path) -> bool:
    """Return whether the first line of a file is an object, as of NeMo's manifests, which are called .json."""
    with path.open("rb") as file, suppress(ValueError):
        return isinstance(json.loads(file.readline()), dict)
    return False


def _open_csv(path: Path, media: Path | None) -> TableSource:
    """Open a .csv or .tsv file, with whichever of the usual separators its header has."""
    csv.field_size_limit(1 << 30)
    suffix = path.suffix[1:].lower()
    data = path.read_bytes()
    text, is_utf8 = _text(data, "utf-16" if data.startswith(UTF16) else "utf-8-sig")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise SourceError(
            f"{path}: has zero bytes. Is it UTF-16? Write it as UTF-8 (iconv -f UTF-16LE -t UTF-8). If not, fix line "
            f"{line}."
        )
    usual = "," if suffix == "csv" else "\t"
    header = text.lstrip("\r\n")[: 1 << 20]
    marks = [mark for mark in ",;\t|" if len(next(csv.reader(io.StringIO(header, ""), delimiter=mark), ())) > 1]
    delimiter = usual if usual in marks or not marks else marks[0]
    if delimiter != usual and len(marks) > 1:
        raise SourceError(
            f"{path}: the header has no {usual!r}, but {' and '.join(map(repr, marks))}. Write the table with "
            f"{usual!r} between the fields."
        )
    kind = suffix.upper() + (f" with {delimiter!r} between fields" if delimiter != usual else "")
    rows, is_quoted = csv_rows(path, text, delimiter)
    kind += " (quotes are text)" * (not is_quoted)
    return TableSource(path, _read_csv(path, iter(rows), delimiter, is_utf8=is_utf8), media, kind)


def _read_csv(path: Path, rows: Iterator[LinesAndRow], delimiter: str, *, is_utf8: bool) -> ListedEntries:
    """Return rows as entries; one that is malformed fails alone. Raises SourceError for a wrong header."""
    _, header = next(rows, ("", []))
    if isinstance(header, SourceError):
        raise header
    header = [name.strip() for name in header]
    if (fault := _not_utf8(delimiter.join(header))) is not None:
        raise SourceError(f"{path}, header: {fault}")
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise SourceError(f"{path}: the header has the column {twice[0]!r} twice. Give one of them another name.")
    if entry := next((name for name in header if is_media_path(name)), None):
        raise SourceError(
            f"{path}: the first line has names of columns, but {entry[:60]!r} names a file. Write a first line with "
            "names, such as image and caption."
        )
    entries: list[dict[str, Any] | SourceError] = []
    for lines, row in rows:
        if isinstance(row, SourceError):
            entries.append(row)
        elif len(row) == len(header):
            entries.append({name: _cell(name, value) for name, value in zip(header, row, strict=True)})
        else:
            which = "more" if len(row) > len(header) else "fewer"
            columns = f"{len(header)} columns of the header ({', '.join(header)})"
            entries.append(SourceError(f"{path}, {lines}: has {which} fields than the {columns}."))
    return ListedEntries(path, entries, unit="row", first=2, is_utf8=is_utf8)


def _cell(column: str, value: str) -> Any:
    """Return the list that a field of a table is as text, if it is one of files; any other field as it is."""
    listed = from_text(value) if value.startswith("[") else None
    return listed if isinstance(listed, list) and (listed or is_media_column(column)) and holds_media(listed) else value


def _stem_key(name: str, media: Path) -> str:
    below = os.path.relpath(name, media) if os.path.isabs(name) else name
    return str(Path(below).with_suffix("")).replace(".", "_")


_SCALAR = (str, int, float)


def _coco_fault(entry: Any, **fields: type | tuple[type, ...]) -> str | None:
    """Return what is wrong with an entry that needs fields of these types; None: nothing."""
    if not isinstance(entry, Mapping):
        return f"expected an object, found {shown(entry)}"
    wrong = (name for name, kind in fields.items() if not isinstance(entry.get(name), kind))
    fault = next((f"`{name}` is {shown(entry[name]) if name in entry else 'missing'}" for name in wrong), None)
    return fault or _not_utf8(" ".join(str(entry[name]) for name in fields))


class CocoSource:
    """COCO captions: one sample for each image, with all its captions.

    A bad entry of a list is numbered as a sample, too, one that fails: its id is None, its name the error. Ids are
    compared as texts: some tools write those of `annotations` with quotes.
    """

    kind = "COCO captions"
    split_parts: tuple[tuple[str, int], ...] = ()
    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, content: Mapping[str, Any], media: Path | None) -> None:
        self.where = str(path)
        self._media = media_folder(path.parent, media)
        images = content["images"]
        annotations = content["annotations"]
        notes = [_coco_fault(one, image_id=_SCALAR, caption=_SCALAR) for one in annotations]
        faults = [_coco_fault(one, id=_SCALAR, file_name=str) for one in images]
        for name, some in (("annotations", notes), ("images", faults)):
            if some and all(some):
                remedy = "Use captions_*.json; instances_*.json contains boxes."
                if "`file_name`" in str(some[0]):
                    remedy = "Download the images, and write the name of its file to each."
                raise SourceError(f"{path}: not COCO captions: entry 0 of `{name}`: {some[0]}. {remedy}")
        captions: dict[Any, list[str]] = {}
        rejected = 0
        for one in (one for one, fault in zip(annotations, notes, strict=True) if not fault):
            of_image = captions.setdefault(str(one["image_id"]), [])
            of_image += [one["caption"]] if accepted([one]) else []
            rejected += not accepted([one])
        listed = [
            (None, f"{path}, entry {number} of `images`: {fault.removesuffix('.')}.")
            if fault
            else (one["id"], one["file_name"])
            for number, (one, fault) in enumerate(zip(images, faults, strict=True))
        ]
        self._images = list(dict.fromkeys(listed))  # one that is listed again is the same image
        self._captions = captions
        self._taken = Counter(_stem_key(name, self._media) for image, name in self._images if image is not None)
        self._files: dict[Any, list[str]] = {str(one["id"]): [] for one in images if not _coco_fault(one, id=_SCALAR)}
        for image, name in self._images:
            if image is not None:
                self._files[str(image)].append(name)
        if again := len(listed) - len(self._images):
            self.left_out = (f"{again:,} of {len(listed):,} `images` that list{'s' * (again == 1)} an image again",)
        if rejected:
            self.left_out += (f"{rejected:,} of {len(annotations):,} captions that annotators rejected",)
        if orphans := len(captions.keys() - self._files.keys()):
            self.left_out += (f"captions of {orphans:,} image{'s' * (orphans > 1)} that `images` does not list",)
        wrong = {
            number: f"entry {number} of `annotations`: {fault.removesuffix('.')}."
            for number, fault in enumerate(notes)
            if fault
        }
        self._images += [(None, f"{path}, {fault}") for fault in wrong.values()]
        of_images = ((annotations[number], fault) for number, fault in wrong.items())
        self._wrong = {str(one.get("image_id")): fault for one, fault in of_images if isinstance(one, Mapping)}

    def __len__(self) -> int:
        return len(self._images)

    def row(self, number: int) -> Row:
        """Return an image and its captions."""
        image, name = self._images[number]
        if image is None:
            raise SourceError(name)
        where = f"{self.where}, image {image}"
        with located(where):
            if len(files := self._files[str(image)]) > 1:
                raise SourceError(
                    f"`images` gives this id to {' and '.join(files)}, so whose the captions are is unknown. Give each "
                    "its own, in `annotations` too."
                )
            values = {"image_id": image, "file_name": name, "captions": self._captions.get(str(image), [])}
            if not values["captions"]:
                is_rejected = str(image) in self._captions
                wrong = self._wrong.get(str(image), "")
                why = " but those that annotators rejected." if is_rejected else f": {wrong}" if wrong else "."
                raise SourceError(f"no captions{why}")
            key = _stem_key(name, self._media)
            if self._taken[key] > 1:
                key += f"-{image}"
            return Row(where=where, values=values, files={"image": media_file(name, self._media)}, key=key)

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample to be read; raises SkipSample for one whose captions are all rejected."""
        image, _ = self._images[number]
        if image is not None and self._captions.get(str(image)) == []:
            raise SkipSample(f"{self.where}, image {image}: all its captions were rejected by annotators")
        return lay_out(self.row(number), layout, number)

    def propose(self) -> Layout:
        """Return images with their first captions."""
        fields = {"image": "image", "caption": "captions[0]"}
        return Layout(sample_type="CaptioningSample", fields=fields, bare=frozenset(["image"]))


# Proposals ------------------------------------------------------------------------------------------------------------
#
# For a table of unknown columns: the closest sample type, and the column for each of its fields.


CAPTIONS = ("caption", "text", "txt", "captions", "description", "alt", "alt_text", "title", "prompt")
_QUESTIONS = ("question", "query", "instruction", "context")
_ANSWERS = ("answers", "answer", "response", "output", "label", "gt_answer")
_LABELS = ("label", "labels", "class", "category", "target", "label_name", "class_name")


def check_media_meant(rows: Sequence[Row], without: str) -> None:
    """Raise SourceError if rows without files seem to be meant with some: by URLs, or in a column called `image`.

    `without` says how to take them without files.
    """
    if any(row.files for row in rows) or any(name in row.values for row in rows for name in CONVERSATIONS):
        return
    for row in rows:
        for name, value in row.values.items():
            if isinstance(value, str) and value.startswith(BASE64):
                what = "contains base64"
                remedy = "Write data URIs, data:image/jpeg;base64,… for a JPEG"
            elif isinstance(value, str) and "://" in value[:10] and is_media_path(value.partition("?")[0]):
                what = "contains URLs"
                remedy = "Download them first (img2dataset does)"
            elif is_media_column(name) and value not in (None, "", []):
                what = "has no files"
                remedy = "Write the paths of files, with their extensions"
            else:
                continue
            raise SourceError(
                f"{row.where}: the column `{name}` {what} ({str(value)[:60]}), and no column contains files. {remedy}, "
                f"or {without}"
            )


def check_captions(rows: Sequence[Row]) -> None:
    """Raise SourceError if all captions beside the first media are rows of numbers: boxes, as YOLO writes them."""
    texts = []
    for text in (row.files.get("caption") for row in rows):
        with suppress(SourceError):  # its sample says so
            texts += [text.read()] if isinstance(text, TextRef) else []
    if any(texts) and all(map(_NUMBERS.fullmatch, texts)):
        raise SourceError(
            f"{rows[0].where}: the text beside it has numbers only ({max(texts)[:60].decode()!r}), as boxes have, and "
            "so have others. Move these texts away; or learn them: --sample-type CaptioningSample."
        )


_NUMBERS = re.compile(rb"([0-9]+([ \t]+-?[0-9.]+){4,}[ \t]*(\r?\n|\Z))*")


def check_whole(rows: Sequence[Row], without: str) -> None:
    """Raise SourceError if each row is only a part of what was said, or the caption of something that is not there.

    `without` says how to learn the texts alone, with COLUMN for theirs.
    """
    if any(row.files or is_conversation(row.values) for row in rows):
        return
    row = rows[0]
    where = f"{row.where}: "
    column = _named(row.values, ("text", "content", "value", "message"))
    role = next((name for name in ("role", "from") if str(row.values.get(name)).lower() in _ROLES), None)
    if role is not None and column is not None:
        parts = [f"`{name}`" for name in row.values if _THREAD.fullmatch(name)]
        raise SourceError(
            f"{where}a row is one message (`{role}` is {shown(row.values[role])}), and would be learned without what "
            f"it answers. Write a conversation into each row, as `messages`, of the rows with the same "
            f"{' and '.join(parts) or 'conversation'}, or {without.replace('COLUMN', column)}"
        )
    trees = (name for name, one in row.values.items() if isinstance(one, dict) and isinstance(one.get("replies"), list))
    if column is None and (tree := next(trees, None)):
        raise SourceError(
            f"{where}`{tree}` is a tree of messages, with several `replies` to each: write a conversation for each way "
            "through it, as `messages`."
        )
    caption = _named(row.values, ("text", "content", "caption"))
    unseen = unseen_medium({**row.values, "question": "", "answer": ""})
    if caption is not None and caption.lower() == "caption" and unseen:
        raise SourceError(f"{where}{unseen}; or {without.replace('COLUMN', caption)}")


_ROLES = (*ROLES, "prompter")
_THREAD = re.compile(r"(parent|conversation|conv|message_tree|thread|dialog|dialogue|session|chat|topic)_?(id|hash)?")


def propose_layout(rows: Sequence[Row]) -> Layout:
    """Propose how rows become samples, from the names and values of their columns."""
    rows = [replace(row, files={name: of for name, of in row.files.items() if not _is_raw(of)}) for row in rows]
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
    question = _named(values, _QUESTIONS)
    caption = _named(values, CAPTIONS)
    label = _named(values, _LABELS)
    if question is None and caption is not None and _ask([row.values.get(caption) for row in rows]):
        question = caption  # of POPE, whose answers are in `label`
    answers = _named(values, _ANSWERS)
    if question is None and caption is not None and (answer := _answer_to_all(rows, caption)) is not None:
        question, answers = caption, answer
    if question is not None:
        if f"{answers}_name" in values and all(isinstance(row.values.get(answers or ""), int) for row in rows):
            answers = f"{answers}_name"  # of a class
        fields = {**image, "context": question} | ({"answers": answers} if answers else {})
        return Layout(sample_type="VQASample", fields=fields, bare=bare)
    if caption is not None:
        return Layout(sample_type="CaptioningSample", fields={**image, "caption": _first_of(rows, caption)}, bare=bare)
    if label is not None:
        labels = [row.values.get(label) for row in rows]
        numbered = all(str(one).lstrip("-").isdigit() for one in labels if one not in (None, ""))
        fields = {**image, ("label" if numbered else "label_name"): label}
        if numbered and (name := _named(values, ("label_name", "class_name"))) and name != label:
            fields["label_name"] = name
        return Layout(sample_type="ImageClassificationSample", fields=fields, bare=bare)
    if (caption := _named(values, ("caption_str", "comment", "sentence"))) is not None:  # of TextCaps, of Flickr30k
        return Layout(sample_type="CaptioningSample", fields={**image, "caption": _first_of(rows, caption)}, bare=bare)
    return Layout(sample_type="ImageSample", fields=image, bare=bare)


def _first_of(rows: Sequence[Row], column: str) -> str:
    """Return how a column is read of which one text is taken: of lists, the first."""
    texts = [texts_of(row.values[column]) or row.values[column] for row in rows if row.values.get(column)]
    return column + ("[0]" if 2 * sum(isinstance(one, list) for one in texts) > len(texts) else "")


def _answer_to_all(rows: Sequence[Row], asked: str) -> str | None:
    """Return the only other column of texts if rows have one and the same text in `asked`, as a prompt of OCR."""
    if len(rows) < 4 or len({str(row.values.get(asked)) for row in rows}) > 1:
        return None
    found = {name for row in rows for name in unknown_texts(row.values, (asked,))}
    return found.pop() if len(found) == 1 else None


def _ask(texts: Sequence[Any]) -> bool:
    """Return whether most of some texts are questions."""
    return 2 * sum(isinstance(text, str) and text.rstrip().endswith("?") for text in texts) > len(texts)


def answers_of(rows: Sequence[Row]) -> AnswersAs | None:
    """Return how answers to choices are given, judging by the first rows; None: no one way fits all of them."""
    entries = []
    for row in rows:
        with suppress(SampleError):  # its sample says so
            pair = None if any(name in row.values for name in CONVERSATIONS) else find_pair(row.values)
            if pair is not None and options_of(row.values) is not None:
                entries.append((row.values, pair[1]))
    with located(rows[0].where), as_source():
        return answers_as(entries)


_INTO_TURNS = "Write it into its turn, or leave the column out: energon convert with --ignore COLUMN."


def check_beside(rows: Sequence[Row], layout: Layout, remedy: str) -> None:
    """Raise SourceError if questions or labels of the first rows have texts beside them that may belong to them.

    `remedy` says how to leave a column out, with COLUMN for its name.
    """
    if layout.question is not None or layout.fields.get("context") in layout.templates:
        return
    _check_texts(rows, layout, remedy)
    if "label" in layout.fields or "label_name" in layout.fields or "caption" in layout.fields:
        _check_labels(rows, layout, remedy.replace("\\n{question}", ""))
    if not (layout.is_crude or "context" in layout.fields):
        return
    _check_order(rows, layout)
    mapped = layout.columns
    known = (*KNOWN_BESIDE, *mapped, *layout.ignored)
    short: dict[str, list[str]] = {}
    for at, row in enumerate(rows):
        pair = find_pair(row.values)
        if any(name in row.values for name in CONVERSATIONS):
            if lost := [name for name in not_in_turns(row.values) if name not in known]:
                raise SourceError(f"{row.where}: {_beside(lost, row.values, None, _INTO_TURNS)}")
            continue
        if pair is None and not mapped:
            continue
        with located(row.where), as_source():
            unknown = unknown_texts(row.values, known, pair)
            if not layout.is_crude:
                unknown += [name for name in columns_of(row.values) if name not in known]
            if unknown:
                asked = (layout.fields["context"], "") if "context" in layout.fields else pair
                raise SourceError(_beside(unknown, row.values, asked, remedy))
            used = (*known, *(pair or ()), *columns_of(row.values))
        said = [str(row.values[name]) for name in pair or ()]
        for name, value in row.values.items() if at < LOOKED_AT else ():
            text = None if name in used or is_metadata(name) else short_text(value)
            if text is not None and not any(text in one for one in said):
                short.setdefault(name, []).append(text)
    for name, texts in short.items():
        if len(texts) < 4 or 2 * len({*texts}) > len(texts):  # else it names categories
            raise SourceError(f"{rows[0].where}: {_beside([name], {name: texts[0]}, None, remedy)}")


def _check_texts(rows: Sequence[Row], layout: Layout, remedy: str) -> None:
    """Raise SourceError for captions or texts that are JSON of questions (RLHF-V), or have choices and an answer."""
    column = layout.fields.get("caption", layout.fields.get("text", "")).partition("[")[0]
    for row in rows if column else ():
        text = row.values.get(column)
        entry: Any = None
        if isinstance(text, str) and text.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                entry = json.loads(text)
        if isinstance(entry, Mapping) and is_conversation(entry):
            raise SourceError(
                f"{row.where}: `{column}` is JSON with {', '.join(list(entry)[:5])} ({shown(text)}), which would be "
                "learned as it is: write its entries into columns of these names."
            )
        beside = {name: value for name, value in row.values.items() if name not in (*layout.columns, *layout.ignored)}
        with located(row.where), as_source():
            options = options_of(beside) if _named(beside, _ANSWERS) else None
        if options is not None:
            raise SourceError(f"{row.where}: {_beside(options.columns, row.values, (column, ''), remedy)}")


_MAY_BE_JUDGED = ("text", "txt", "title", "prompt", "sentence")
"""Captions that a label beside them may be about, as of Hateful Memes."""
_TRUE_OR_NOT = frozenset(("0", "1", "true", "false", "none"))
"""What a label says of a caption that may be wrong, as of VSR."""
_JUDGEMENTS = ("label", "labels", "target", "gold_label")


def _check_labels(rows: Sequence[Row], layout: Layout, remedy: str) -> None:
    """Raise SourceError if labels of the first rows have texts beside them that they may be about, or the reverse.

    A text that is the same wherever its label is describes the class.
    """
    mapped = layout.columns
    values = [{name: one for name, one in row.values.items() if name not in layout.ignored} for row in rows]
    label = layout.fields.get("label_name", layout.fields.get("label", ""))
    texts: dict[str, None] = {}
    if label:
        for row in values:
            known = (name for name in row if name.lower() in (*CONTEXTS, *CHOICES) and is_filled(row[name]))
            texts |= dict.fromkeys((*unknown_texts(row, (*KNOWN_BESIDE, *mapped)), *known))
    else:
        caption = layout.fields["caption"].partition("[")[0]
        label = next((name for row in values for name in row if name.lower() in _JUDGEMENTS and name not in mapped), "")
        said = {str(row.get(label)).lower() for row in values}
        if label and (caption.lower() in _MAY_BE_JUDGED or said <= _TRUE_OR_NOT):
            texts[caption] = None
    for column in texts:
        pairs = [(str(row.get(label)), str(row[column])) for row in values if row.get(column)]
        if column not in mapped and len({*pairs}) == len({of for of, _ in pairs}) < len(pairs):
            continue
        alone = f" To learn the text as a caption: --ignore {label}." if column in mapped else ""
        raise SourceError(
            f"{rows[0].where}: `{label}` may be about the image and the text in `{column}` ({shown(pairs[0][1])}), and "
            f"only one of the two would be learned. {remedy.replace('COLUMN', column)}{alone}"
        )


def _check_order(rows: Sequence[Row], layout: Layout) -> None:
    """Raise SourceError if a question has media in columns whose names, by which they are sorted, are not in order.

    So it does for one that may be no part of the question: a mask, a map of depths, the picture of the solution.
    """
    mapped = {access.partition("[")[0] for access in layout.fields.values()}
    for row in rows:
        is_asked = "context" in layout.fields or find_pair(row.values) is not None or has_pairs(row.values)
        told = [name for name in row.files if is_of_answer(name) and (layout.is_crude or name in mapped)]
        if is_asked and (name := next((name for name in told if name not in layout.ignored), None)):
            raise SourceError(
                f"{row.where}: the file in `{name}` seems to belong to the answer, and the question would show it: "
                f"leave it out (energon convert with --ignore {name}), or write it into a column image, video or audio."
            )
        if not layout.is_crude or not is_asked:
            continue
        for kind, names in _columns_of_media(row, layout).items():
            other = next(filter(is_drawn, names), "")
            if kind is not None and other and len(names) > 1:
                raise SourceError(
                    f"{row.where}: a question has {kind}s in the columns {', '.join(names)}, and would be shown all of "
                    f"them: leave those out that it is not about (energon convert with --ignore {other}), or write the "
                    f"others into one list `{kind}s`."
                )
            ordered = sorted(names, key=_shown_at)
            is_other = ordered != names and len({re.sub(r"\d+", "", name) for name in names}) > 1
            if kind is not None and (is_other or is_against_names(ordered)):
                raise SourceError(
                    f"{row.where}: a question has {kind}s in the columns {', '.join(names)}, and they would be shown "
                    f"in the order of the names, {', '.join(ordered)}. Write one list `{kind}s` in the right order, or "
                    f"leave columns out (energon convert with --ignore {' or --ignore '.join(ordered)})."
                )


def _columns_of_media(row: Row, layout: Layout) -> dict[str | None, list[str]]:
    """Return the columns of media of a row by their kinds; raises SourceError for pictures in a column of videos."""
    kinds: dict[str | None, list[str]] = {}
    for name, of in row.files.items():
        first = of[0] if isinstance(of, tuple) and of else of
        if name in layout.ignored or isinstance(first, tuple):
            continue
        if medium_by_name(f"x.{first.extension}") == "image" and re.fullmatch(r"(video|audio|sound)s?", name.lower()):
            raise SourceError(
                f"{row.where}: `{name}` is images, which would be shown as such: make one file of the frames "
                "of a video, or call the column images."
            )
        kinds.setdefault(medium_by_name(f"{name}.{first.extension}"), []).append(name)
    return kinds


def _shown_at(column: str) -> list[tuple[int, str]]:
    return natural_order(f"{column}.")


def _beside(columns: Sequence[str], values: Mapping[str, Any], pair: tuple[str, str] | None, remedy: str) -> str:
    asked = "question" if pair is None else pair[0]
    beside = "a question" if pair is None else f"`{asked}`"
    known: list[str] = []
    with suppress(SampleError):
        options = options_of(values)
        known = [name for name in columns_of(values) if options is None or name not in options.columns]
    template = question_with(list(dict.fromkeys((*known, *columns))), asked)
    if whole := [name for name in columns if values.get(asked) and str(values[asked]) in str(values[name])]:
        template = f"{{{whole[0]}}}"
    others = f" (and so has {', '.join(f'`{name}`' for name in columns[1:])})" if columns[1:] else ""
    remedy = remedy.replace("{COLUMN}\\n{question}", template)
    return (
        f"the column `{columns[0]}` beside {beside} has a text ({shown(values[columns[0]])}) that may belong to the "
        f"question, and would not be learned{others}. {remedy.replace('COLUMN', ' --ignore '.join(columns))}"
    )


def unused(rows: Sequence[Row], layout: Layout, more: Collection[str] = ()) -> list[tuple[str, list[str]]]:
    """Return what neither fields nor conversations take, and who might; of other crude samples nothing: all is kept.

    `more` columns are taken, too.
    """
    used = {*layout.columns, *layout.ignored, *more, "files"}
    names: dict[str, None] = {}
    of_pairs: dict[str, None] = {}
    of_turns: dict[str, None] = {}
    for row in rows:
        if layout.is_crude:
            with suppress(SampleError):  # its sample says so
                found = unused_columns(row.values, has_media=bool(row.files), question=layout.question)
                names |= dict.fromkeys(name for name in found if name not in used)
                keys = unused_keys(row.values)
                of_pairs |= dict.fromkeys(keys[0])
                of_turns |= dict.fromkeys(keys[1])
        else:
            filled = (name for name, value in {**row.values, **row.files}.items() if is_filled(value))
            names |= dict.fromkeys(name for name in filled if name not in used)
    told = (("not used", names), ("not used, of pairs", of_pairs), ("for chat templates only, of turns", of_turns))
    return [(what, list(of)) for what, of in told if of]


def media_order(rows: Sequence[Row], layout: Layout) -> Iterator[tuple[str, list[str]]]:
    """Yield the kinds of media that questions have in several columns, and these in the order that is shown."""
    asking = (row for row in rows[:1] if layout.is_crude and (find_pair(row.values) or has_pairs(row.values)))
    for row in asking:
        for kind, names in _columns_of_media(row, layout).items():
            if kind is not None and has_order(names):
                yield kind, sorted(names, key=_shown_at)


def other_text(rows: Sequence[Row], layout: Layout) -> tuple[str, str] | None:
    """Return a caption beside a question, or a question beside a caption, that is not taken, and how to take it."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values if name not in layout.ignored))
    caption = _named(columns, ("caption", "captions", "alt_text", "alt", "description", "text"))
    question = _named(columns, _QUESTIONS[:3])
    if caption is None or question is None or not any(row.files for row in rows):
        return None
    if "caption" in layout.fields:
        return question, f"--sample-type VQASample --field context={question} --field answers=COLUMN"
    return caption, f"--sample-type CaptioningSample --field caption={caption}"


def text_of_media(rows: Sequence[Row]) -> tuple[str, str] | None:
    """Return the column of the text of media, or its extension, and a question for it; None if rows are others."""
    media = [[kind for one in contents_of(row) if (kind := medium_by_name(f"x.{one.extension}"))] for row in rows]
    kinds = [*{kind for of in media for kind in of}]
    column = _named(list(dict.fromkeys(name for row in rows for name in row.values)), TOLD)
    beside = [one.extension for row in rows for one in row.files.values() if isinstance(one, TextRef)]
    text = column or next((one for one in beside if one == "txt"), None)
    if text is None or len(kinds) != 1 or not all(media):
        return None
    is_said = kinds == ["audio"] and not text.lower().startswith("caption")
    what = {"audio": "sound", "video": "video"}.get(kinds[0], "picture" + "s" * (max(map(len, media)) > 1))
    return text, "Transcribe the speech." if is_said else f"Describe the {what}."


def asking_column(rows: Sequence[Row]) -> str | None:
    """Return the column that most likely asks about the media of rows beside an answer, by its question marks."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    if not any(row.files for row in rows) or _named(columns, ("answer", "answers")) is None:
        return None
    return next((name for name in columns if _ask([row.values.get(name) for row in rows])), None)


def _is_raw(contents: Content | tuple[Content, ...]) -> bool:
    return isinstance(contents, Blob) and contents.extension == RAW


def caption_of(columns: Iterable[str]) -> str | None:
    """Return the column that seems to have the caption."""
    return _named(columns, CAPTIONS)


def _named(columns: Iterable[str], names: Sequence[str]) -> str | None:
    lower = {column.lower(): column for column in reversed(list(columns))}
    return next((lower[name] for name in names if name in lower), None)


def _is_more(row: Row) -> bool:
    """Whether a row has more than a question, an answer and an image, which their sample types would leave out."""
    pair = find_pair(row.values)
    if pair is None or has_preferences(row.values):
        return has_preferences(row.values) or has_pairs(row.values)
    known = (*BESIDE_PAIRS, *SYSTEMS, "inputs", "functions")
    beside = [name for name in known if name in row.values and name not in pair]
    try:
        beside += columns_of({name: value for name, value in row.values.items() if name not in pair})
    except SampleError:  # its sample says so
        return True
    beside += [name for name in row.values if is_option(name, "image") and row.files]
    return bool(beside) or (bool(row.files) and (pair[0] not in _QUESTIONS or pair[1] not in _ANSWERS))


def _are_images(rows: Sequence[Row]) -> bool:
    """Whether each file column holds single images; some files may be of no kind of media, because they are bad.

    A list of one is a single image if other rows have no list.
    """
    contents = [(name, content) for row in rows for name, content in row.files.items()]
    single = {name for name, content in contents if not isinstance(content, tuple)}
    ones = [c[0] if isinstance(c, tuple) and len(c) == 1 and name in single else c for name, c in contents]
    kinds = [kind_by_name(f"x.{one.extension}") for one in ones if not isinstance(one, tuple)]
    return len(kinds) == len(ones) and {*kinds} <= {"image", None} and 2 * kinds.count("image") >= len(kinds)

"""Media and conversations in rows of lists: which columns have files, and what training takes of a conversation."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from energon_bridge.core.errors import SampleError, SkipSample, SourceError
from energon_bridge.core.format.media import HEAD_BYTES, extension_by_head, is_base64, kind_by_head, kind_by_name
from energon_bridge.models.conversations.parts import (
    Medium,
    check_text_part,
    medium_by_name,
    part_kind,
    part_payload,
    part_text,
    unknown_part,
)
from energon_bridge.models.conversations.places import by_place
from energon_bridge.models.conversations.questions import (
    captions_of,
    chosen,
    doubt_of_answer,
    filled,
    first_answer,
    is_unanswered,
    options_of,
)
from energon_bridge.models.conversations.segments import (
    entry_options,
    entry_segments,
    is_option,
    part_meaning,
    part_options,
)
from energon_bridge.models.conversations.turn_media import (
    NAMES,
    check_other_media,
    check_places,
    check_turns,
    unseen_medium,
)
from energon_bridge.models.conversations.turns import (
    CONVERSATIONS,
    SYSTEMS,
    find_pair,
    has_pairs,
    has_preferences,
    not_in_turns,
    num_rejected,
    of_programs,
    preferred,
    read_tools,
    read_turns,
    typed_turns,
    with_turns,
)
from energon_bridge.models.conversations.withheld import fault_of_split, fault_of_verdict, held_out_by
from energon_bridge.tools.convert.rows import (
    RAW,
    Blob,
    Content,
    Layout,
    MediaRoot,
    Row,
    is_file_of,
    is_media_column,
    is_media_path,
    media_file,
    shown,
)

_MEDIA_KEYS = {
    **dict.fromkeys(("image", "images", "img", "imgs"), "images"),
    **dict.fromkeys(("video", "videos"), "videos"),
    **dict.fromkeys(("audio", "audios", "sound", "sounds"), "audios"),
}


def file_columns(rows: Iterable[Mapping[str, Any]], media: MediaRoot, where: str) -> tuple[str, ...]:
    """Return the columns with files, judging by the first rows; raises SourceError for one where few values name any.

    A column of other files than media has files, too: it is no text. Where another column has the contents themselves,
    names of files that are not there only say where these came from.
    """
    seen: dict[str, list[tuple[bool, Any]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and value not in ("", [], b""):
                is_file = holds_media(value) or is_file_of(value, name, media)
                seen.setdefault(name, []).append((is_file, value))
    columns = []
    for name, values in seen.items():
        if not is_media_column(name) and all(raw_bytes(value) is not None for _, value in values):
            continue
        files = [value for is_file, value in values if is_file]
        if len(files) * 2 > len(values):
            columns.append(name)
            continue
        there = next((one for one in files if is_media_path(one) and is_file_of(one, "", media)), None)
        if there is not None:
            other = next(value for is_file, value in values if not is_file)
            raise SourceError(
                f"{where}: the column `{name}` names files ({there!r}) in {len(files)} of its first {len(values)} "
                f"rows, but also has {str(other)[:60]!r}. Leave it empty in rows without a file."
            )
    contents = [name for name in columns if any(map(_has_contents, (value for _, value in seen[name])))]
    if not contents:
        return tuple(columns)
    return tuple(name for name in columns if name in contents or not _is_origin(name, seen[name], contents, media))


def _has_contents(value: Any) -> bool:
    """Return whether a value has a medium itself, not only its name."""
    if isinstance(value, list):
        return any(map(_has_contents, value))
    return isinstance(value, bytes) or (isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes))


def _is_origin(column: str, values: Iterable[tuple[bool, Any]], contents: Iterable[str], media: MediaRoot) -> bool:
    """Return whether values are names of files that are not there: `file`, `image_path` or an id beside `image`."""
    texts = [value for _, value in values]
    of_contents = "|".join(re.escape(name.lower().removesuffix("s")) for name in contents)
    is_name = re.fullmatch(rf"({of_contents})s?_?(file)?_?(path|name|file)s?", column.lower()) is not None
    if is_media_column(column) and not is_name:
        return False
    if not all(isinstance(value, str) and not value.startswith("data:") for value in texts):
        return False
    return not any(is_file_of(value, "", media) for value in texts)


def media_columns(entry: Mapping[str, Any], columns: Sequence[str]) -> Iterable[str]:
    """Return the columns of an entry with media: those of the first rows, and those that a question calls so."""
    if find_pair(entry) is None and not has_pairs(entry):
        return columns
    return dict.fromkeys((*columns, *(name for name in _MEDIA_KEYS if entry.get(name) and holds_media(entry[name]))))


def holds_media(value: Any) -> bool:
    """Whether a value is one that `as_files` takes; of a list, all that are not None."""
    if isinstance(value, list):
        return all(holds_media(item) for item in value if item is not None)
    if isinstance(value, Mapping):
        return bool(value) and {"bytes", "path"}.issuperset(value)
    if isinstance(value, str) and value.startswith("data:"):
        return ";base64," in value[:100]
    if is_base64(value):
        return True
    return isinstance(value, bytes) or (is_media_path(value) and "://" not in value.removeprefix("file://"))


def raw_bytes(value: Any) -> Blob | None:
    """Return bytes of no known format, bare or with a path beside them, as a file; None for anything else."""
    data = value.get("bytes") if isinstance(value, Mapping) and holds_media(value) else value
    if not isinstance(data, bytes) or extension_by_head(data[:HEAD_BYTES]) is not None:
        return None
    if data is value:
        return Blob(data, RAW)
    extension = str(value.get("path") or "").rpartition(".")[2].lower()
    return None if kind_by_name(f"x.{extension}") else Blob(data, extension if extension.isalnum() else "dat")


def as_files(value: Any, media: MediaRoot, column: str) -> Content | tuple[Content, ...]:
    """Return the files that a value stands for: a path, bytes, `{"bytes": …, "path": …}`, a data URI, or a list."""
    if isinstance(value, list | tuple):
        files = [as_files(item, media, column) for item in value]
        if any(isinstance(item, tuple) for item in files):
            remedy = "Write one list of all files, in the order of their places."
            if _MEDIA_KEYS.get(column) == "videos":
                remedy = "Make one file of the frames of a video."
            raise SourceError(
                f"`{column}`: expected a list of files, found a list in it, {str(value)[:60]!r}. {remedy}"
            )
        return tuple(item for item in files if not isinstance(item, tuple))
    if isinstance(listed := _listed(value), list) and listed is not value:
        return as_files(listed, media, column)
    if isinstance(value, Mapping):
        told = (one for one in value if is_option(one, "video") or part_meaning(one) or one in ("caption", "text"))
        if said := [name for name in told if value[name] is not None]:
            raise SourceError(f"`{column}`: {', '.join(said)} of a file would be lost: write it beside `{column}`.")
        data = value.get("bytes")
        path = value.get("path")
        if data is None and isinstance(path, str):
            return media_file(path, media, any_kind=not is_media_column(column))
        value = value if data is None and not holds_media(value) else data
        if isinstance(data, bytes) and isinstance(path, str) and is_media_path(path):
            return Blob(data, path.rpartition(".")[2].lower())
    if isinstance(value, bytes):
        extension = extension_by_head(value[:HEAD_BYTES])
        if extension is None:
            raise SourceError(f"`{column}`: bytes of an unknown format ({value[:8]!r}…).")
        return Blob(value, extension)
    if isinstance(value, str) and (value.startswith("data:") or is_base64(value)):
        is_uri = value.startswith("data:")
        encoded = value.partition(",")[2] if is_uri else "".join(value.split())
        try:
            return as_files(base64.b64decode(encoded, validate=True), media, column)
        except binascii.Error as error:
            raise SourceError(f"`{column}`: cannot read the {'data URI' if is_uri else 'base64'}: {error}.") from error
    if not isinstance(value, str):
        remedy = "" if value is not None else _IN_TURN
        raise SourceError(f"`{column}`: expected the path of a file, found {shown(value)}.{remedy}")
    return media_file(value, media, any_kind=not is_media_column(column))


_IN_TURN = " Of texts and pictures in turn (OBELICS), make messages: each picture a part at its place in a turn."


def names_of_files(value: Any) -> list[str]:
    """Return the paths in a value that `as_files` takes; contents have none."""
    if isinstance(value, list):
        return [name for one in value for name in names_of_files(one)]
    path = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(path, str) or path.startswith("data:") or is_base64(path):
        return []
    return [path.removeprefix("file://")]


def known_form(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry whose turns are a list with a known name; raises SourceError if they are JSON text of no list."""
    try:
        return with_turns(entry)
    except SampleError as error:
        raise SourceError(f"{error}. {_REMEDY}") from error


def conversation_row(entry: Mapping[str, Any], where: str, media: MediaRoot) -> Row:
    """Take the media out of a conversation: its own keys, and those inside messages."""
    values: dict[str, Any] = {}
    files: dict[str, tuple[Content, ...]] = {}
    named: list[str] = []
    taken: dict[str, set[str]] = {}

    def take(column: str, value: Any, place: str) -> None:
        listed = by_place(value)
        listed = listed if isinstance(listed, list) else [listed]
        contents = as_files(listed, media, column)
        files[column] = (*files.get(column, ()), *(contents if isinstance(contents, tuple) else (contents,)))
        named.extend(item for item in listed if is_media_path(item))
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
                values[name] = [_without_media(turn, take) for turn in typed_turns(value)]
            except SampleError as error:
                raise SourceError(f"`{name}`: {error}. {_REMEDY}") from error
        else:
            values[name] = value
    if named:
        values["files"] = named
    return Row(where=where, values=values, files=dict(files))


def of_table(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table as a list would have it, where it differs.

    - All objects of a column have the same keys, so the arguments of one tool stand as nulls in calls of another.
    - A `Sequence` of objects, of the `datasets` library, is an object of lists.
    - That library stores mixed content as JSON, and reads a text such as `42` as a number then.
    """
    row: dict[str, Any] = {}
    for name, value in entry.items():
        if name in ("tools", "functions"):
            row[name] = _filled(_listed(value))
        elif name in CONVERSATIONS and isinstance(turns := _listed(value), list):
            row[name] = [_turn_of_table(turn) for turn in turns]
        else:
            row[name] = value
    return row


def _turn_of_table(turn: Any) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    turn = {name: _filled(_listed(one)) if name in _CALLS else one for name, one in turn.items()}
    for name in ("content", "value", "parts"):
        said = turn.get(name)
        if isinstance(said, bool | int | float):
            turn[name] = json.dumps(said)
        elif isinstance(said, Mapping):
            turn[name] = _listed(said)
    return turn


_CALLS = ("tool_calls", "function_call")


def _listed(value: Any) -> Any:
    """Return an object of lists of one length as a list of objects; anything else as it is."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(one, list) for one in value.values()):
        return value
    if len({len(one) for one in value.values()}) > 1:
        return value
    return [dict(zip(value, item, strict=True)) for item in zip(*value.values(), strict=True)]


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _filled(one) for name, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


def _check_no_media(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not value or name.lower() in NAMES or name in CONVERSATIONS:
            continue
        if holds_media(value) or (isinstance(value, str) and "://" in value and is_media_path(value.partition("?")[0])):
            raise SourceError(
                f"`{name}` seems to name media ({str(value)[:60]}), but those of a conversation are taken from "
                "`image`, `images`, `video`, `videos`, `audio` and `audios`: call it so, or leave it out (energon "
                f"convert with --ignore {name})."
            )


_REMEDY = "Change the list."


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
    kind = part_kind(piece)
    text = None
    if kind == "text" and (text := part_text(piece)) is not None:
        check_text_part(piece)
        return {"type": "text", "text": text}
    if kind is None or kind == "text":
        raise unknown_part(piece)
    payload = part_payload(piece, kind)
    if payload is not None:
        take(f"{kind}s", _content(payload), "messages")
    part_options(piece, kind)  # says what cannot be honoured
    options = sorted(name for name in piece if is_option(name, kind))
    kept = {name: piece[name] for name in ("index", *options) if piece.get(name) is not None}
    return {"type": kind, **kept}


def _content(payload: Any) -> Any:
    """Return the path, bytes or data URI in what a part has of a file. Raises SampleError."""
    if not isinstance(payload, Mapping) or "bytes" in payload or payload.get("path") is not None:
        return payload
    given = {name: value for name, value in payload.items() if value is not None and name not in _SAID_OF_FILES}
    if len(given) != 1 or next(iter(given)) not in ("url", "data"):
        raise unknown_part(payload)
    ((name, value),) = given.items()
    return f"data:;base64,{value}" if name == "data" and isinstance(value, str) else value


_SAID_OF_FILES = ("type", "detail", "format", "media_type")


# What training takes --------------------------------------------------------------------------------------------------
#
# Of a conversation: all of it, or the row is refused here and not left out there.


def is_conversation(values: Mapping[str, Any]) -> bool:
    """Return whether a row is a conversation, a question with its answer, or has preferences."""
    values = of_programs(values)
    named = any(name in values for name in CONVERSATIONS) or has_pairs(values)
    return named or find_pair(values) is not None or has_preferences(values)


def only_preferred(entry: Mapping[str, Any], layout: Layout) -> tuple[Mapping[str, Any], int]:
    """Return an entry without answers that are not preferred, if the layout says so, and how many are left out.

    Raises SourceError, and SkipSample if none is preferred.
    """
    if not layout.preferred:
        return entry, 0
    try:
        return preferred(known_form(entry)), num_rejected(entry)
    except SampleError as error:
        raise SourceError(str(error)) from error


def by_options(row: Row, layout: Layout) -> Row:
    """Return a row as the options want it: without ignored columns, question and answer made into turns.

    Raises:
        SourceError: They are not understood.
    """
    row = _with_lists(row, layout)
    if not (layout.ignored or layout.question or layout.answers_as):
        return row
    values = {name: value for name, value in row.values.items() if name not in layout.ignored}
    files = {name: content for name, content in row.files.items() if name not in layout.ignored}
    pair = find_pair(values)
    is_told = layout.question is not None or (layout.answers_as is not None and pair is not None)
    if layout.is_crude and is_told and not any(name in values for name in CONVERSATIONS):
        entry = dict(values)
        with as_source():
            if layout.question is not None:
                question, right, letter = filled(layout.question, values, pair, layout.answers_as)
                entry = {name: values[name] for name in (*SYSTEMS, "history") if name in values}
                entry |= {"question": question, "response": letter or first_answer(values[right]) or str(values[right])}
            values["messages"] = read_turns(entry, layout.answers_as)
            values = {name: value for name, value in values.items() if name not in not_in_turns(values)}
    return replace(row, values=values, files=files)


def with_choice(row: Row, layout: Layout) -> Row:
    """Return a row for a MultiChoiceVQASample with the number of the right choice, which a list may name otherwise."""
    column, choices = (layout.fields.get(name, "") for name in ("correct_choice_idx", "choices"))
    if column not in row.values or choices not in row.values:
        return row
    with as_source():
        options = options_of({"choices": row.values[choices]})
        number = options and chosen(row.values[column], options, "correct_choice_idx", layout.answers_as)
    return replace(row, values={**row.values, column: number})


def _with_lists(row: Row, layout: Layout) -> Row:
    """Return a row whose lists of captions are lists, also those that are written as JSON or by Python."""
    columns = [access.removesuffix("[0]") for access in layout.fields.values() if access.endswith("[0]")]
    lists = {name: listed for name in columns if (listed := captions_of(row.values.get(name))) is not None}
    return replace(row, values={**row.values, **lists}) if lists else row


@contextmanager
def as_source() -> Iterator[None]:
    """Raise SourceError for a SampleError raised inside."""
    try:
        yield
    except SampleError as error:
        raise SourceError(f"{error}. {_REMEDY}") from error


def learnable(row: Row, layout: Layout, is_chat: bool) -> Row:
    """Return a row of a crude layout, its media by their kinds, if training takes all of it; raises SourceError.

    Raises SkipSample for a question without an answer among questions that have one.
    A row that is no conversation passes, unless the first rows are (`is_chat`).
    """
    asked = {name: value for name, value in row.values.items() if name not in layout.ignored}
    row = by_options(row, layout)
    check_withheld(row, layout)
    if layout.sample_type == "MultiChoiceVQASample":
        return with_choice(row, layout)
    try:
        if not layout.is_crude:
            if has_preferences(row.values, tags_only=True):
                read_turns(row.values)  # says so
            check_cut(row, layout)
            return row
        turns = read_turns(row.values)
        if turns is None:
            if is_chat and is_unanswered(row.values):
                raise SkipSample(f"{row.where}: has a question without an answer: `answers` is empty")
            if is_chat:
                null = next((f"`{name}` is null" for name in CONVERSATIONS if name in row.values), None)
                names = [name for name in row.values if name != "files" or not row.files]
                said = null or f"it has {', '.join([*row.files, *names]) or 'nothing'}"
                raise SampleError(f"is no conversation, as the first rows are: {said}")
            return row
        check_turns(turns)
        read_tools(row.values)
        if row.files:
            check_other_media(row.values)
        else:
            _check_no_media(row.values)
            if unseen := unseen_medium(asked):  # as it was, before a question and answer became turns
                raise SampleError(unseen)
        files = {name: _of_known_kind(name, content) for name, content in row.files.items()}
        there = Counter(_medium(name, one) for name, of in files.items() for one in _several(of))
        check_places(turns, there)
        entry_segments(row.values, there, _extensions(row))
        entry_options(row.values, there)
    except SampleError as error:
        raise SourceError(f"{error}. {_REMEDY}") from error
    return replace(row, files=files)


def check_cut(row: Row, layout: Layout) -> None:
    """Raise SampleError if a row of a type that is never cut names a part of its file, or doubts its answer."""
    pair = [layout.fields[name] for name in ("context", "answers") if name in layout.fields]
    if len(pair) == 2 and (doubt := doubt_of_answer(_beside(row, layout, pair), pair)):
        raise SampleError(doubt)
    kinds = Counter(medium_by_name(f"x.{one.extension}") for of in row.files.values() for one in _several(of))
    if entry_segments(row.values, kinds, _extensions(row)) is not None:  # type: ignore[arg-type]
        raise SampleError(f"has a segment of its file, which a {layout.sample_type} is not cut to")
    if options := entry_options(row.values, kinds):  # type: ignore[arg-type]
        raise SampleError(f"has {' and '.join(options)} options, which a {layout.sample_type} has not")


def _beside(row: Row, layout: Layout, pair: Sequence[str]) -> dict[str, Any]:
    """Return a question, its answer, and the columns that are no other fields of a sample."""
    return {name: value for name, value in row.values.items() if name in pair or name not in layout.columns}


def _extensions(row: Row) -> set[str]:
    return {one.extension for of in row.files.values() for one in _several(of)}


def check_withheld(row: Row, layout: Layout) -> None:
    """Raise SourceError for a row that is held out, or was rejected, by a column that is no field of the layout."""
    taken = layout.columns
    beside = {name: value for name, value in row.values.items() if name not in taken}
    fault = fault_of_split(held_out_by(beside), layout.held_out) or fault_of_verdict(
        beside, find_pair(row.values) or ()
    )
    if fault is not None:
        raise SourceError(fault)


def _several(contents: Content | tuple[Content, ...]) -> tuple[Content, ...]:
    return contents if isinstance(contents, tuple) else (contents,)


def _medium(column: str, content: Content) -> Medium:
    medium = medium_by_name(f"{column}.0.{content.extension}")
    if medium is None:
        medium = "image" if kind_by_head(content.read()[:HEAD_BYTES]) == "image" else None
    if medium is None or (medium == "image" and _MEDIA_KEYS.get(column, "images") != "images"):
        what = "an image" if medium else "not an image, video or sound of a known format"
        raise SampleError(f"`{column}`: {getattr(content, 'path', content.extension)} is {what}")
    return medium


def _of_known_kind(column: str, contents: Content | tuple[Content, ...]) -> Content | tuple[Content, ...]:
    """Return files with the extension of their content, where theirs says nothing."""
    if isinstance(contents, tuple):
        return tuple(_several(_of_known_kind(column, one))[0] for one in contents)
    if kind_by_name(f"x.{contents.extension}") is not None:
        return contents
    extension = extension_by_head(contents.read()[:HEAD_BYTES])
    is_known = extension is not None and kind_by_name(f"x.{extension}") is not None
    return replace(contents, extension=extension) if is_known else contents  # type: ignore[arg-type]

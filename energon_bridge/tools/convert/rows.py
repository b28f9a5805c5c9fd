"""The interface of every source of `energon convert`: rows by number, each with plain values and files.

A reader turns its format into rows; `lay_out` turns a row into the parts of a sample, according to a `Layout`. So
readers know nothing about tars, and the writer nothing about formats.

    Row(values={"caption": "a cat"}, files={"image": FileRef("cat.jpg")})
    Layout(sample_type="CaptioningSample", fields={"image": "image", "caption": "caption"}, bare={"image"})
    -> jpg: the file, json: {"caption": "a cat"}, field map {"image": "jpg", "caption": "json[caption]"}

Invariants: samples can be pickled; they hold the paths of media files, not their bytes; reading one again gives the
same parts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import posixpath
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PosixPath
from typing import Any, Protocol, TypeVar

from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    FieldMapError,
    ShardMissingError,
    SkipSample,
    SourceError,
)
from energon_bridge.core.format.field_map import FieldMap, describe_fields, parse_access
from energon_bridge.core.format.media import HEAD_BYTES, extension_by_head, kind_by_name
from energon_bridge.core.samples import CrudeSample, MultiChoiceVQASample, sample_type_by_name, sample_type_names
from energon_bridge.core.storage import Store
from energon_bridge.models.conversations.parts import medium_by_name
from energon_bridge.models.conversations.questions import (
    AnswersAs,
    named_value,
    said_by_annotators,
    template_columns,
    texts_of,
    with_texts,
)
from energon_bridge.models.conversations.turns import LEARNED


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that becomes a part as it is."""

    path: str
    extension: str

    def head(self) -> bytes:
        """Return its first bytes; raises SourceError."""
        try:
            with open(self.path, "rb") as file:
                return file.read(HEAD_BYTES)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def read(self) -> bytes:
        """Return its bytes; raises SourceError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)  # a file object makes twice as many calls
            try:
                size = os.fstat(descriptor).st_size
                data = os.read(descriptor, size + 1)
            finally:
                os.close(descriptor)
            if len(data) == size:
                return data
            with open(self.path, "rb", buffering=0) as file:  # more than one call reads, or it grows
                return file.read()
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def size(self) -> int:
        """Return its size; raises SourceError."""
        try:
            return os.stat(self.path).st_size
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def mark(self) -> str:
        """Return what changes if the file does."""
        try:
            stat = os.stat(self.path)
        except (OSError, ValueError):
            return f"{self.path} missing"
        return f"{self.path} {stat.st_size} {stat.st_mtime_ns}"

    def _unreadable(self, error: OSError | ValueError) -> SourceError:
        """Return the error for a file that is not there, or for a name that no file can have (a ValueError)."""
        remedy = "Paths are relative to the folder of the source, or to that of energon convert --media."
        remedy = (isinstance(error, FileNotFoundError) and named_otherwise(self.path)) or remedy
        path = self.path.encode("utf-8", "backslashreplace").decode()
        return SourceError(f"{path}: cannot read: {getattr(error, 'strerror', error)}. {remedy}")


def named_otherwise(path: str) -> str:
    """Return what to do if the file is there by another name: other slashes, capitals, letters, or several; else ""."""
    folder, name = os.path.split(path.replace("\\", "/"))
    there = _names_in(folder).get(name.lower())
    if there is not None and (found := os.path.join(folder, there)) != path:
        return f"There is {found}: slashes and capitals count, so write the name as the file has it."
    for form in ("NFC", "NFD"):
        if (other := unicodedata.normalize(form, name)) != name and os.path.exists(os.path.join(folder, other)):
            wanted = "--nfc" if form == "NFD" else "--nfd"
            return (
                f"The file is there, but the letters of its name are composed otherwise ({form}) than in the list: "
                f"rename the files, convmv -r -f utf8 -t utf8 {wanted} --notest {shlex.quote(folder)}"
            )
    for mark in ",;|":
        first, *more = map(str.strip, path.split(mark))
        folders = Path(first).parents if os.path.isfile(first) else ()
        if more and all(any(os.path.isfile(os.path.join(one, name)) for one in folders) for name in more):
            return (
                f"These are {len(more) + 1} files with {mark!r} between them: write a JSON list, "
                '["a.jpg", "b.jpg"]; in a CSV with its quotes twice, "[""a.jpg"", ""b.jpg""]".'
            )
    return ""


@functools.lru_cache(maxsize=16)
def _names_in(folder: str) -> dict[str, str]:
    """Return the names in a folder by those in lower case; nothing if it cannot be read."""
    try:
        return {name.lower(): name for name in os.listdir(folder or ".")}
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True, slots=True)
class TextRef(FileRef):
    """A file of text or JSON that becomes a part as it is, if it can be decoded."""

    def read(self) -> bytes:
        """Return its bytes; raises SourceError."""
        data = FileRef.read(self)
        try:
            if self.extension == "json":
                json.loads(data)
            else:
                data.decode()
        except ValueError as error:
            what = "JSON" if self.extension == "json" else "UTF-8"
            raise SourceError(f"{self.path}: is not {what}: {error}. Write it as such.") from error
        return data


RAW = "bin"
"""The extension of bytes of unknown kind, such as hashes: no field is proposed for them."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that become a part as they are."""

    data: bytes
    extension: str

    def read(self) -> bytes:
        return self.data

    def size(self) -> int:
        """Return their number."""
        return len(self.data)

    def mark(self) -> str:
        """Return what changes if they do."""
        return self.data.hex()


_Value = TypeVar("_Value")
_MISSING = (ShardMissingError, DatasetNotFoundError)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store that becomes a part as it is."""

    store: Store
    rel: str
    extension: str

    def read(self) -> bytes:
        """Return its bytes; raises SourceError."""
        return self._found(lambda: self.store.read(self.rel))

    def head(self) -> bytes:
        """Return its first bytes; raises SourceError."""
        return self._found(lambda: self.store.read_range(self.rel, 0, min(HEAD_BYTES, self.store.size(self.rel))))

    def size(self) -> int:
        """Return its size; raises SourceError."""
        return self._found(lambda: self.store.size(self.rel))

    def _found(self, read: Callable[[], _Value]) -> _Value:
        try:
            return read()
        except _MISSING as error:
            raise SourceError(f"{self.store.url(self.rel)} is not there: {error}") from error

    def mark(self) -> str:
        """Return what changes if the file does."""
        try:
            return f"{self.store.url(self.rel)} {self.size()}"
        except SourceError:
            return f"{self.store.url(self.rel)} missing"


Content = FileRef | Blob | StoredFile
MediaRoot = Path | Store
"""Where the files lie that rows name by relative paths."""


class FolderAbove(PosixPath):
    """A folder above that of a list: relative paths of files that are not below it are looked for beside the list."""

    beside: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return media_folder, (self.beside, Path(self))


def media_folder(beside: Path, media: Path | None) -> Path:
    """Return what the paths of a list are relative to: what lies beside it, or the folder that is given for it."""
    if media is None or isinstance(media, FolderAbove):
        return media or beside.absolute()
    if Path(os.path.abspath(media)) not in (there := Path(os.path.abspath(beside))).parents:
        return media.absolute()
    above = FolderAbove(os.path.abspath(media))
    above.beside = there
    return above


def _place(text: str, root: Path) -> str:
    path = os.path.join(root, text)
    if not isinstance(root, FolderAbove) or os.path.exists(path):
        return path
    beside = os.path.join(root.beside, text)
    return beside if os.path.exists(beside) else path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a source: plain values and files by column. `where` is its place, for errors; no key: its number.

    `named` are the files of each column as the row names them, by which people find the source of a sample.
    """

    where: str
    values: dict[str, Any]
    files: dict[str, Content | tuple[Content, ...]]
    key: str | None = None
    named: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows become samples: the type, and the column (`captions[0]`) of each of its fields.

    Crude samples have no fields and keep all columns. Parts of `bare` columns are named after their format alone
    (`jpg`), others after column and format. With `preferred`, only the preferred answers of an entry are taken.
    `ignored` columns are left out; `question` is the text of a question, with columns in braces, and `answers_as` says
    what answers to choices are. Rows that are read `in_place`, not converted, have their layout from a dataset.yaml,
    others from flags. `held_out` is whether the first rows say that they are of validation or test data, and all must
    say the same; None: they say nothing of it, or the names of files tell the splits. `key` is that of a
    sample, with columns in braces; None: its number, or what the source says. Rows whose numbers are `repeated` fail,
    for the reason there.
    """

    sample_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()
    preferred: bool = False
    ignored: tuple[str, ...] = ()
    question: str | None = None
    answers_as: AnswersAs | None = None
    in_place: bool = False
    held_out: bool | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    repeated: Mapping[int, str] = field(default_factory=dict)

    def naming(self, field: str, column: str = "COLUMN") -> str:
        """Return how to say from which column a field comes."""
        return "in the field map of .nv-meta/dataset.yaml" if self.in_place else f"with --field {field}={column}"

    @property
    def columns(self) -> set[str]:
        """Return the columns that fields are made of."""
        named = {access.partition("[")[0] for access in self.fields.values()}
        return named.union(*map(template_columns, self.templates.values()))

    @property
    def is_crude(self) -> bool:
        """Whether all columns are kept, and none is a field."""
        return issubclass(sample_type_by_name(self.sample_type), CrudeSample)


class SourceSample(Protocol):
    """A sample that has not been read yet."""

    @property
    def key(self) -> str:
        """Return its key."""

    @property
    def where(self) -> str:
        """Return its place in the source, for errors."""

    @property
    def num_rejected(self) -> int:
        """Return how many answers were left out of it, because others are preferred."""

    def sizes(self) -> list[tuple[str, int]]:
        """Return its parts with their sizes in bytes; raises SourceError."""

    def mark(self) -> str:
        """Return a text that changes if the sample does; never raises."""

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts, and the access of each field to them; raises SourceError."""


class Source(Protocol):
    """Rows by number. If the source has its own splits, `split_parts` are (name, rows) in their order.

    `left_out` counts the files of a folder that are not taken, with the reason.
    """

    kind: str
    where: str
    split_parts: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Return a row; raises SourceError."""

    def sample(self, number: int, layout: Layout) -> SourceSample:
        """Return a sample, to be read in this or another process; raises SourceError."""

    def propose(self) -> Layout:
        """Propose a layout for the rows; raises SourceError if they cannot be converted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """A sample made of a row."""

    key: str
    where: str
    parts: tuple[tuple[str, Content], ...]
    fields: Mapping[str, str]
    num_rejected: int = 0

    def sizes(self) -> list[tuple[str, int]]:
        with located(self.where):
            return [(name, content.size()) for name, content in self.parts]

    def mark(self) -> str:
        return "\0".join((self.key, *(f"{name} {content.mark()}" for name, content in self.parts)))

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts, and the accesses of its fields."""
        with located(self.where):
            return [(name, content.read()) for name, content in self.parts], self.fields


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSample:
    """A sample of media and a text, each a part of its own, as a question about them and its answer."""

    key: str
    where: str
    num_rejected: int = 0
    of: SourceSample
    question: str

    @classmethod
    def by(cls, layout: Layout, sample: SourceSample) -> SourceSample:
        """Return a sample as it is, or with the question of the layout, if it has one."""
        question = layout.question
        return sample if question is None else cls(key=sample.key, where=sample.where, of=sample, question=question)

    def sizes(self) -> list[tuple[str, int]]:
        return [(name, len(data)) for name, data in self.read()[0]]

    def mark(self) -> str:
        return f"{self.of.mark()}\0{self.question}"

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts, with the text in JSON."""
        parts = dict(self.of.read()[0])
        texts = [name for name in parts if name.rpartition(".")[2] == "txt"]
        if len(texts) != 1 or "json" in parts or not any(medium_by_name(f"x.{name}") for name in parts):
            raise SourceError(
                f"{self.where}: has the parts {', '.join(parts)}; --question asks about images, videos or sounds with "
                "one text (txt) beside them, and no JSON."
            )
        try:
            entry = {"question": self.question, "answer": parts.pop(texts[0]).decode().strip()}
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.where}: its {texts[0]} is not UTF-8: {error}. Write it as such.") from error
        return [*parts.items(), ("json", json.dumps(entry, ensure_ascii=False).encode())], {}


def shown(value: object) -> str:
    """Return a value for a message: null as such, anything else as the beginning of its text."""
    return "null" if value is None else repr(str(value)[:60])


class located:  # noqa: N801 - used like a function
    """Put the place in front of the message of a SourceError raised inside."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        told = (self._where, f"{self._where.partition(', ')[0]}: ")
        if isinstance(error, SourceError) and not str(error).startswith(told):
            raise SourceError(f"{self._where}: {error}") from error


def _part_name(column: str, rest: str, bare: bool) -> str:
    """Return the name of a part; with its column if that alone says that an MP4 is sound."""
    name = f"{column}.{rest}"
    return rest if bare and medium_by_name(f"x.{rest}") == medium_by_name(name) else name


_MEDIA_OF = {"image": "image", "images": "image", "video": "video"}  # fields by their names


def lay_out(row: Row, layout: Layout, number: int) -> RowSample:
    """Make a sample of a row; raises SourceError if a column is missing or does not fit.

    Raises SkipSample if all answers in a list are rejected.
    """
    crude = not layout.fields
    if layout.templates:
        row = replace(row, values=row.values | {name: _filled(row, text) for name, text in layout.templates.items()})
    wanted = Counter(access.partition("[")[0] for access in layout.fields.values())
    parts: list[tuple[str, Content]] = []
    names: dict[str, list[str]] = {}
    for column, contents in row.files.items():
        if not crude and column not in wanted:
            continue
        bare = column in layout.bare
        if isinstance(contents, tuple):
            named = [(_part_name(column, f"{at}.{one.extension}", bare), one) for at, one in enumerate(contents)]
        else:
            named = [(_part_name(column, contents.extension, bare), contents)]
        names[column] = [name for name, _ in named]
        parts += named
    values = row.values
    fields: dict[str, str] = {}
    for name, access in layout.fields.items():
        column, bracket, steps = access.partition("[")
        if column in names:
            fields[name] = _file_access(row, names[column], layout, name, column, bracket + steps)
            medium = medium_by_name(f"x.{fields[name].partition('[')[0]}")
            if name in _MEDIA_OF and medium not in (None, _MEDIA_OF[name]):
                raise SourceError(
                    f"{row.where}: `{column}` is {medium}, but the {name} of a {layout.sample_type} is no {medium}. "
                    f"Name another column {layout.naming(name)}, or make conversations (CrudeSample) without --field: "
                    "of questions in a column, with --question '{COLUMN}'."
                )
            continue
        value = _value_at(row, layout, name, access)
        declared = _declared(layout.sample_type)[name][1]
        if (value is None or value != value) and name in LEARNED and declared == "str" and not bracket:
            value, values = "", {**values, column: ""}  # as a CSV writes it
        listed = texts_of(value) if column.lower() == "answers" and isinstance(value, str) else None  # of a CSV
        fitted = _fitted(listed or value, declared)
        if fitted == [] and value:
            raise SkipSample(f"{row.where}: all in `{access}` were rejected by annotators")
        if not _fits(fitted, declared):
            is_number = isinstance(value, int | float) and declared.startswith(_FITTED[0]) and not layout.in_place
            as_text = f"; --field '{name}={{{column}}}' makes a text of it" * is_number
            raise SourceError(
                f"{row.where}: `{access}` is {shown(value)}, but the field `{name}` is {declared}. Fix it, or name "
                f"another column {layout.naming(name)}{as_text}."
            )
        if wanted[column] > 1 and not bracket and declared.startswith(_FITTED):
            # Another field may need the original value, in this row or the next, so each gets a copy.
            column = f"{column}_{name}"
            values = {**values, column: fitted}
        elif fitted is not value:
            if bracket:
                raise SourceError(f"{row.where}: `{access}` is {value!r}, which does not fit the field `{name}`.")
            values = {**values, column: fitted}
        fields[name] = f"json[{column}]{bracket}{steps}"
    own = [name for column, of_column in row.named.items() if column not in layout.ignored for name in of_column]
    if own and "files" not in values:
        values = {**values, "files": own}
    if values:
        data = json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=_not_plain(row))
        try:
            parts.append(("json", Blob(data.encode(), "json")))
        except UnicodeEncodeError as error:
            near = data[max(0, error.start - 20) : error.end + 20]
            raise SourceError(
                f"{row.where}: {near!a} has half of a surrogate pair, not a character. Fix it."
            ) from error
    if not parts:
        raise SourceError(f"{row.where}: is empty.")
    return RowSample(key=key_of_row(row, layout, number), where=row.where, parts=tuple(parts), fields=fields)


def key_of_row(row: Row, layout: Layout, number: int) -> str:
    """Return the key of a row; of a column of files, their names without extensions. Raises SourceError."""
    if layout.key is None:
        return row.key or f"{number:09d}"
    named = {name: os.path.normpath(os.path.splitext(of[0])[0]) for name, of in row.named.items() if of}
    return _filled(replace(row, values={**named, **row.values}), layout.key).replace(".", "_")


def _filled(row: Row, template: str) -> str:
    texts = {}
    for column in template_columns(template):
        value = named_value(row.values, column)
        if not isinstance(value, str | int | float):
            raise SourceError(
                f"{row.where}: `{column}` is {shown(value)}, but {template!r} needs its text or number. Fix it, or "
                "name another column."
            )
        texts[column] = str(value)
    return with_texts(template, texts)


def _file_access(row: Row, names: Sequence[str], layout: Layout, name: str, column: str, steps: str) -> str:
    if len(names) == 1 and (not steps or names[0].endswith("json")):
        return names[0] + steps
    at = steps.strip("[]")
    if at.isdigit() and int(at) < len(names):
        return names[int(at)]
    raise SourceError(
        f"{row.where}: `{column}` has {len(names)} files, so the field `{name}` cannot be {column}{steps}. "
        f"{'Name one' if layout.in_place else 'Keep all files with --sample-type CrudeSample, or name one'} "
        f"{layout.naming(name, f'{column}[0]')}."
    )


def _value_at(row: Row, layout: Layout, name: str, access: str) -> Any:
    column = access.partition("[")[0]
    if column not in row.values:
        known = ", ".join([*row.files, *row.values]) or "none"
        raise SourceError(
            f"{row.where}: there is no `{column}` for the field `{name}`, or it is null. There is {known}. Fix it, or "
            f"name another column {layout.naming(name)}."
        )
    try:
        return _compiled(name, access)(row.values)[name]
    except KeyError as error:
        raise SourceError(f"{row.where}: there is nothing at `{access}` for the field `{name}`.") from error


@functools.cache
def _compiled(name: str, access: str) -> FieldMap:
    return FieldMap({name: access})


_FITTED = ("list[str]", "int")


def _fitted(value: Any, declared: str) -> Any:
    """Turn a single text into a list, digits into a number, and a number into text, if the field is declared so."""
    if isinstance(value, int | float) and not isinstance(value, bool) and declared.startswith("str"):
        return str(value) if value == value else None  # NaN: how floats say null
    if declared.startswith(_FITTED[0]) and (texts := said_by_annotators(value)) is not None:
        return texts
    if isinstance(value, str):
        if declared.startswith(_FITTED[0]):
            return [value]
        if declared.startswith(_FITTED[1]):
            with contextlib.suppress(ValueError):
                return int(value)
    return value


def _fits(value: Any, declared: str) -> bool:
    """Whether a value can be that of a field of texts or numbers; those of other fields are not looked at."""
    if value is None:
        return "None" in declared or not declared.startswith(("str", *_FITTED))
    if declared.startswith("str"):
        return isinstance(value, str)
    if declared.startswith(_FITTED[1]):
        return isinstance(value, int) and not isinstance(value, bool)
    return not declared.startswith(_FITTED[0]) or (
        isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    )


@functools.cache
def _declared(sample_type: str) -> dict[str, tuple[bool, str]]:
    return {name: (required, kind) for name, required, kind in describe_fields(sample_type_by_name(sample_type))}


def _not_plain(row: Row) -> Any:
    def refuse(value: Any) -> str:
        if hasattr(value, "isoformat"):
            return str(value.isoformat())
        if isinstance(value, bytes):
            column = next((name for name, one in row.values.items() if _has(one, value)), "")
            raise SourceError(
                f"{row.where}: `{column}` has bytes ({value[:8]!r}…) that are no image, video or sound of the sample, "
                f"and its JSON cannot have them: leave it out (energon convert with --ignore {column})."
            )
        return str(value)  # decimals and the like

    return refuse


def _has(value: Any, inner: bytes) -> bool:
    ones = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return value is inner or any(_has(one, inner) for one in ones)


def check_layout(layout: Layout) -> None:
    """Check that a layout names fields of its type, and all that it requires; raises ConfigurationError."""
    cls = sample_type_by_name(layout.sample_type)
    if layout.is_crude:
        if layout.fields:
            asked = next((layout.fields[name] for name in ("question", "context") if name in layout.fields), "COLUMN")
            raise ConfigurationError(
                f"{layout.sample_type} has no fields: leave out --field. The question of a conversation is written as "
                f"--question '{{{asked}}}', its answer is the column `answer`."
            )
        return
    for name, access in layout.fields.items():
        if len(parse_access(access, where="--field", field=name)) > 1:
            raise FieldMapError(f"--field {name}={access}: names several columns; a column has no comma in its name.")
    declared = _declared(layout.sample_type)
    if cls is MultiChoiceVQASample and "correct_choice_idx" not in layout.fields:
        raise FieldMapError(
            f"a {cls.__name__} without correct_choice_idx does not say which choice is right: name its column "
            f"{layout.naming('correct_choice_idx')}, or make conversations of the list (CrudeSample)."
        )
    for name in layout.fields:
        if name not in declared:
            having = [one for one in sample_type_names() if layout.fields.keys() <= _declared(one).keys()]
            other = f" To make another type: --sample-type {' or '.join(having)}." if having else ""
            raise FieldMapError(
                f"--field {name}: {cls.__name__} has no such field; it has {', '.join(declared)}.{other}"
            )
    missing = [name for name, (required, _) in declared.items() if required and name not in layout.fields]
    if missing:
        flags = " ".join(f"--field {name}=COLUMN" for name in missing)
        raise FieldMapError(f"{cls.__name__} also requires the fields {', '.join(missing)}: add {flags}.")


def media_file(text: str, root: MediaRoot, *, any_kind: bool = False) -> FileRef | StoredFile:
    """Return the file of a path below `root`; raises SourceError for a URL and for a path that leads out.

    A file without an extension must be media by its content, unless it may be of any kind.
    """
    if text != text.strip() and not (isinstance(root, Path) and os.path.exists(root / text)):
        text = text.strip()  # `a.jpg, b.jpg`, cut at the commas
    text = text.removeprefix("file://")
    if "://" in text:
        raise SourceError(f"{text[:100]!r} is a URL. Download the files first (img2dataset does), and name them.")
    if not isinstance(root, Path):
        rel = posixpath.normpath(text)
        if rel.startswith(("/", "..")):
            raise SourceError(f"the path {text!r} leads out of {root.root}.")
        extension = Path(rel).suffix[1:].lower() or _by_head(StoredFile(root, rel, ""), rel, any_kind)
        return StoredFile(root, rel, extension)
    path = os.path.normpath(_place(text, root))
    if not path.startswith(f"{os.path.normpath(root)}{os.sep}") and str(root) != os.sep:
        raise SourceError(
            f"the path {text!r} leads out of {root}. Name a folder that has all files: energon convert --media "
            f"{os.path.commonpath((os.path.abspath(root), os.path.dirname(path)))}. Relative paths are then looked for "
            "there first, then beside the list."
        )
    return FileRef(path, Path(path).suffix[1:].lower() or _by_head(FileRef(path, ""), path, any_kind))


def _by_head(file: FileRef | StoredFile, name: str, any_kind: bool) -> str:
    """Return the extension of a file without one, by its first bytes; raises SourceError for another kind of file."""
    try:
        head = file.head()
    except SourceError:
        return "bin"  # whoever reads it says what is wrong
    extension = extension_by_head(head)
    if extension is None and any_kind:
        return "bin"
    if extension is None:
        raise SourceError(
            f"{name}: has no extension, and its first bytes are not those of an image, video or sound. Give it one."
        )
    return extension


def is_media_path(value: Any) -> bool:
    """Whether a value looks like the path of a media file."""
    return _is_path(value) and kind_by_name(value.strip()) is not None


def is_file_of(value: Any, column: str, root: MediaRoot) -> bool:
    """Whether a value names a file of whatever kind: one that is there, or that the name of its column speaks of."""
    if isinstance(value, list):
        return all(is_file_of(one, column, root) for one in value)
    named = is_media_column(column)
    if not (_is_path(value) or (named and isinstance(value, str))) or "://" in value:
        return False
    extension = value.rpartition(".")[2]
    if named and len(extension) < len(value) and extension.isalnum() and len(extension) < 6:
        return True
    return isinstance(root, Path) and "\0" not in value and os.path.isfile(_place(value, root))


def is_media_column(name: str) -> bool:
    """Whether the name of a column says that it has media or names their files."""
    return name.lower() in _MEDIA_COLUMNS


_MEDIA_COLUMNS = frozenset(
    name + ending
    for name in ("image", "images", "img", "picture", "photo", "video", "videos", "audio", "audios", "sound", "sounds")
    for ending in ("", "_path", "_file", "_name", "_filename", "_url", "path", "file", "name", "url")
)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and len(value) < 4096 and "\n" not in value and ("." in value[1:] or "/" in value)


LOOKED_AT = 100
"""Rows at the start of a source that are looked at before anything is written."""
FEW = 8
"""Rows with a column that the first rows leave empty, which are looked at, too."""


def is_filled(value: Any) -> bool:
    """Return whether a value is something: no null, NaN, empty text, list or object."""
    return value is not None and value == value and not (hasattr(value, "__len__") and not len(value))


def late_rows(entries: Iterable[tuple[int, Mapping[str, Any]]], first: int = LOOKED_AT) -> tuple[int, ...]:
    """Return the numbers of the first few entries that have something in each column which the first leave empty."""
    seen: set[str] = set()
    late: dict[str, list[int]] = {}
    for number, entry in entries:
        for name in [name for name, value in entry.items() if name not in seen and is_filled(value)]:
            if number < first:
                seen.add(name)
            elif len(late.setdefault(name, [])) < FEW:
                late[name].append(number)
    return tuple(sorted({number for numbers in late.values() for number in numbers}))


def first_rows(source: Source, count: int = LOOKED_AT) -> list[Row]:
    """Return the first rows that can be read, and a few of those with columns that these leave empty (`late`).

    Raises SourceError if none can.
    """
    rows: list[Row] = []
    failed: SourceError | None = None
    for number in dict.fromkeys((*range(min(count, len(source))), *getattr(source, "late", ()))):
        try:
            rows.append(source.row(number))
        except SourceError as error:
            failed = failed or error
    if not rows and failed is not None:
        raise failed
    return rows


def contents_of(row: Row) -> Iterable[Content]:
    """Yield all files of a row."""
    for contents in row.files.values():
        yield from contents if isinstance(contents, tuple) else (contents,)

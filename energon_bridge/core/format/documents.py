"""YAML and JSON files of `.nv-meta`: parsing to plain values, and the checks that every reader of them needs.

Invariant: the result is a tree of dict (string keys), list, str, int, float, bool and None, without shared parts and of
bounded size, whatever the file contains; nothing is imported or called.

The YAML dialect is that of energon's files: keys are strings,
`true/yes/false/no` are booleans, `on` is a string, `010` is ten, `1e5` is a number, dates are strings. Anchors, aliases
and merge keys work, an empty value is None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from energon_bridge.core.errors import MetadataError, did_you_mean
from energon_bridge.core.storage import Store

BOM = "\ufeff"
UTF16 = (b"\xff\xfe", b"\xfe\xff")

_MAX_DEPTH = 100
_MAX_NODES = 20_000_000
_COPIES, _COPIES_BY_CHARACTER = 200_000, 10  # aliases of aliases multiply: a short file must not take long


_INTEGER = re.compile(r"^[-+]?[0-9]+(_[0-9]+)*$")
_FLOAT = re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")
_BOOL = re.compile(r"^(true|yes|false|no)$", re.IGNORECASE)
_NULL = re.compile(r"^(null|~|)$", re.IGNORECASE)
_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, Callable[[str], Any]] = {
    f"{_TAG}str": str,
    f"{_TAG}int": int,
    f"{_TAG}float": float,
    f"{_TAG}bool": lambda text: text.lower() in ("true", "yes"),
    f"{_TAG}null": lambda text: None,
    f"{_TAG}merge": str,
}


def utf16_remedy(head: bytes, name: str) -> str:
    """Return what to do about a file that has to be UTF-8 and begins as UTF-16 does; "" if it does not."""
    if not head.startswith(UTF16):
        return ""
    return f"is UTF-16, expected UTF-8. Write it as such: iconv -f UTF-16 -t UTF-8 {name} -o NEW"


class _Parser(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # which base, the installation says
    """PyYAML's parser; values are built directly from its events, since its node tree takes ten times their memory."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


_Parser.add_implicit_resolver(f"{_TAG}int", _INTEGER, list("-+0123456789"))
_Parser.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))
_Parser.add_implicit_resolver(f"{_TAG}bool", _BOOL, list("tTyYfFnN"))
_Parser.add_implicit_resolver(f"{_TAG}null", _NULL, ["n", "N", "~", ""])
_Parser.add_implicit_resolver(f"{_TAG}merge", re.compile(r"^<<$"), ["<"])


class _Builder:
    """Builds plain values from the events of a parser; an alias is a copy of its anchor's value."""

    def __init__(self, parser: Any, size: int) -> None:
        self._parser = parser
        self._copies = _COPIES + _COPIES_BY_CHARACTER * size
        self._anchors: dict[str, Any] = {}
        self._words: dict[str, str] = {}  # scalars as written, by anchor: an alias may be a key
        self._budget = _MAX_NODES

    def document(self) -> Any:
        """Return the only document, None if there is none."""
        parser = self._parser
        parser.get_event()  # the stream begins
        if isinstance(parser.peek_event(), yaml.StreamEndEvent):
            return None
        parser.get_event()  # the document begins
        value = self._value(parser.get_event(), 0)
        parser.get_event()
        event = parser.get_event()
        if not isinstance(event, yaml.StreamEndEvent):
            raise _refusal("it has more than one document", event)
        return value

    def _value(self, event: Any, depth: int) -> Any:
        self._count(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
            if event.anchor is not None:
                self._words[event.anchor] = event.value
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _refusal(
                    f"the alias {event.anchor!r} is undefined, or refers to something that contains it", event
                )
            return self._copy(self._anchors[event.anchor], event, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._check_tag(event, "seq")
            value = list(self._items(yaml.SequenceEndEvent, depth))
        else:
            self._check_tag(event, "map")
            value = self._mapping(depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _items(self, end: type, depth: int) -> Iterator[Any]:
        while not isinstance(event := self._parser.get_event(), end):
            yield self._value(event, depth + 1)

    def _mapping(self, depth: int) -> dict[str, Any]:
        """Build a dict with string keys; merged keys come first, and its own keys win."""
        own: dict[str, Any] = {}
        merged: list[dict[str, Any]] | None = None
        while not isinstance(event := self._parser.get_event(), yaml.MappingEndEvent):
            key, merges = self._key(event)
            if (key in own and own[key] not in (None, [], {})) or (merges and merged is not None):
                raise _refusal(f"the key {key!r} occurs twice", event)
            value = self._value(first := self._parser.get_event(), depth + 1)
            if not merges:
                own[key] = value
                continue
            merged = value if isinstance(value, list) else [value]
            if not all(isinstance(one, dict) for one in merged):
                raise _refusal("a merged value must be a mapping, or a list of mappings", first)
        if merged is None:
            return own
        result: dict[str, Any] = {}
        for one in (*reversed(merged), own):  # among merged keys, the first one wins
            result |= one
        return result

    def _key(self, event: Any) -> tuple[str, bool]:
        """Return a key, and whether it merges."""
        self._count(event, 0)
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._words:
            return self._words[event.anchor], False
        if not isinstance(event, yaml.ScalarEvent):
            raise _refusal("a key must be a plain word", event)
        if event.anchor is not None:
            self._anchors[event.anchor], self._words[event.anchor] = self._scalar(event), event.value
        return event.value, event.value == "<<" and self._tag(event) == f"{_TAG}merge"

    def _tag(self, event: Any) -> str:
        if event.tag is None or event.tag == "!":
            return str(self._parser.resolve(yaml.ScalarNode, event.value, event.implicit))
        return str(event.tag)

    def _scalar(self, event: Any) -> Any:
        make = _SCALARS.get(tag := self._tag(event))
        if make is None:
            raise _refusal(f"the tag {tag!r} is not allowed: values must be plain", event)
        return make(event.value)

    @staticmethod
    def _check_tag(event: Any, kind: str) -> None:
        if event.tag not in (None, "!", _TAG + kind):
            raise _refusal(f"the tag {event.tag!r} is not allowed: values must be plain", event)

    def _copy(self, value: Any, event: Any, depth: int) -> Any:
        self._copies -= 1
        if depth > _MAX_DEPTH or self._copies < 0:
            raise _refusal("its aliases make it nested too deeply or too large", event)
        if isinstance(value, dict):
            return {key: self._copy(item, event, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self._copy(item, event, depth + 1) for item in value]
        return value

    def _count(self, event: Any, depth: int) -> None:
        self._budget -= 1
        if depth > _MAX_DEPTH or self._budget < 0:
            raise _refusal("nested too deeply or too large", event)


def _refusal(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def tabs_hint(error: Exception, text: str) -> str:
    """Return the sentence to add to an error of YAML if its line is indented with a tab, or ""."""
    mark = getattr(error, "problem_mark", None)
    lines = text.split("\n")
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    is_tab = "\t" in line[: len(line) - len(line.lstrip())]
    return ". YAML takes no tabs to indent lines: use spaces" if is_tab else ""


def parse_document(data: bytes, *, where: str) -> Any:
    """Parse YAML, or JSON if `where` ends in `.json`, to plain values; raises MetadataError naming `where`."""
    text = ""
    try:
        text = data.decode("utf-8-sig")
        if where.endswith(".json"):
            value = json.loads(text)
        else:
            parser = _Parser(text)
            try:
                value = _Builder(parser, len(text)).document()
            finally:
                parser.dispose()
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise MetadataError(f"{where}: cannot be parsed: {error}{tabs_hint(error, text)}") from error
    if value is None:
        raise MetadataError(f"{where}: the file is empty. Write it again, for example with `energon prepare`.")
    return value


def dump_yaml(value: Any) -> bytes:
    """Write plain values as block-style YAML in the order given, as `energon prepare` does."""
    text: str = yaml.dump(value, sort_keys=False)
    return text.encode()


@dataclass(slots=True, eq=False)  # a mix of a thousand datasets reads ten thousand values
class DocumentValue:
    """A value of a document. What is not as expected raises a MetadataError that names the place.

    Attributes:
        plain: The value itself.
        where: The file.
        field: Where the value is in it, such as `splits.train.blend[0]`; empty: it is the whole document.
    """

    plain: Any
    where: str
    field: str = ""

    @property
    def at(self) -> str:
        """The place, to begin a message with."""
        return f"{self.where}, field `{self.field}`" if self.field else self.where

    def get(self, key: str, default: Any = None) -> DocumentValue:
        """Return the value of a key of a mapping; `default` if it is absent."""
        return DocumentValue(self.plain.get(key, default), self.where, f"{self.field}.{key}" if self.field else key)

    def mapping(self) -> dict[str, Any]:
        """Return a mapping."""
        if not isinstance(self.plain, dict):
            raise self.wrong("a mapping")
        return self.plain

    def string(self) -> str:
        """Return a string."""
        if not isinstance(self.plain, str):
            raise self.wrong("a string")
        return self.plain

    def text(self, key: str) -> str | None:
        """Return the string of a key of a mapping; None if it is absent or empty."""
        value = self.plain.get(key)
        return value if value is None or isinstance(value, str) else self.get(key).string()

    def strings(self) -> list[str]:
        """Return a list of strings."""
        if not isinstance(self.plain, list):
            raise self.wrong("a list of strings")
        return [item.string() for item in self]

    def __iter__(self) -> Iterator[DocumentValue]:
        """Yield the items of a list."""
        for position, item in enumerate(self.plain):
            yield DocumentValue(item, self.where, f"{self.field}[{position}]")

    def check_keys(self, allowed: Collection[str], required: Collection[str] = ()) -> None:
        """Check the keys of a mapping; the error names the key and the nearest match."""
        for key in self.mapping():
            if key not in allowed:
                names = ", ".join(f"`{name}`" for name in sorted(allowed))
                hint = did_you_mean(key, allowed)
                raise MetadataError(f"{self.at}: unknown key `{key}`; expected {names}.{hint}")
        for key in required:
            if key not in self.plain:
                raise MetadataError(f"{self.at}: the key `{key}` is missing.")

    def wrong(self, expected: str) -> MetadataError:
        """Return the error for a value of the wrong type."""
        text = repr(self.plain)
        text = text if len(text) <= 80 else text[:77] + "..."
        empty = "nothing (an empty value)"
        found = empty if self.plain is None else f"{text} ({type(self.plain).__name__})"
        return MetadataError(f"{self.at}: expected {expected}, found {found}.")


def read_document(store: Store, rel: str) -> DocumentValue:
    """Read and parse a metadata file of a store."""
    where = store.url(rel)
    return DocumentValue(parse_document(store.read(rel), where=where), where)

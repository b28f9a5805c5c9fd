"""The `field_map` of dataset.yaml: which part, or which value inside a part, becomes which field of the sample.

Grammar of one access: alternatives separated by commas, tried from left to right; each is a part name followed by any
number of `[step]`, a step being a key of a mapping or an index of a list: `jpg,png`, `json[caption]`, `json[a][0]`.
It is that of Megatron Energon 7.4.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

from energon_bridge.core.errors import FieldAccessError, FieldMapError, did_you_mean
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.samples import META_FIELDS, required_field_names

_ACCESS = re.compile(r"([^\[\],]+)((?:\[[^\[\]]+\])*)")

Alternative = tuple[str, tuple[str, ...]]


class FieldMap:
    """A compiled field map: call it with the decoded parts of a sample to get the values of the fields."""

    __slots__ = ("_getters", "_plain", "fields", "parts")

    def __init__(self, fields: Mapping[str, str], *, where: str = "field_map") -> None:
        """Compile `{field: access}`; raises FieldMapError naming `where` and the field if an access is malformed."""
        alternatives = {field: parse_access(access, where=where, field=field) for field, access in fields.items()}
        self.fields: dict[str, str] = dict(fields)
        self.parts: frozenset[str] = frozenset(part for options in alternatives.values() for part, _ in options)
        self._getters = tuple((field, _compile(field, options)) for field, options in alternatives.items())
        self._plain = all(type(getter) is itemgetter for _, getter in self._getters)

    def __call__(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return {field: value}; raises FieldAccessError naming the field, its access and the parts of the sample."""
        try:
            return {field: getter(parts) for field, getter in self._getters}
        except KeyError as error:
            raise self.missing(parts, parts) or error from None

    def columns(self, parts: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return {field: values} of many samples by their parts; KeyError if a field is missing."""
        if self._plain:
            return {field: getter(parts) for field, getter in self._getters}
        rows = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
        return {field: list(map(getter, rows)) for field, getter in self._getters}

    def missing(self, parts: Mapping[str, Any], there: Iterable[str], *, where: str = "") -> FieldAccessError | None:
        """Return the error for the first field missing from `parts`; it names the file and all parts in `there`."""
        for field, getter in self._getters:
            try:
                getter(parts)
            except KeyError:
                at = f"{where}, " if where else ""
                access = self.fields[field]
                names = [name for name in there if not name.startswith("__")]
                inner = [f"{part}[{key}]" for part, value in parts.items() if isinstance(value, dict) for key in value]
                hint = did_you_mean(access, [*names, *inner])
                shown = ", ".join(names) or "none"
                return FieldAccessError(
                    f"{at}field `{field}`: nothing at {access!r}; the sample has the parts {shown}.{hint}"
                )
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldMap, (self.fields,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FieldMap) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.fields.items())))

    def __repr__(self) -> str:
        return f"FieldMap({self.fields!r})"


def parse_access(access: str, *, where: str, field: str) -> tuple[Alternative, ...]:
    """Split an access into alternatives of (part name, steps); raises FieldMapError."""
    if not isinstance(access, str):
        raise FieldMapError(f"{where}, field `{field}`: expected an access like `json[caption]`, found {access!r}.")
    alternatives: list[Alternative] = []
    for option in access.split(","):
        match = _ACCESS.fullmatch(option.strip())
        if match is None:
            raise FieldMapError(
                f"{where}, field `{field}`: cannot read the access {access!r}; "
                f"expected a part name with steps, like `jpg,png` or `json[caption][0]`."
            )
        alternatives.append((match.group(1), tuple(re.findall(r"\[([^\[\]]+)\]", match.group(2)))))
    return tuple(alternatives)


def check_fields(field_map: FieldMap, sample_type: type, *, where: str) -> None:
    """Check that a field map names only fields of the sample type, all required ones, and parts that fit them.

    Raises FieldMapError.
    """
    fields = _fields_of(sample_type)
    offered = sorted(fields.keys() - {"__key__"})
    for name in field_map.fields:
        if name not in fields:
            hint = did_you_mean(name, offered)
            raise FieldMapError(
                f"{where}, field `{name}`: {sample_type.__name__} has no such field; it has {', '.join(offered)}.{hint}"
            )
    for name in sorted(required_field_names(sample_type) & set(offered) - field_map.fields.keys()):
        raise FieldMapError(
            f"{where}: {sample_type.__name__} requires the field `{name}`, which the field map lacks. "
            f"Add `{name}: <part>`."
        )
    check_kinds(field_map, sample_type, where=where)


def _fields_of(sample_type: type) -> dict[str, dataclasses.Field[Any]]:
    return {
        field.name: field
        for field in dataclasses.fields(sample_type)
        if field.init and (field.name == "__key__" or field.name not in META_FIELDS)
    }


def check_kinds(field_map: FieldMap, sample_type: type, *, where: str) -> None:
    """Check that no part's extension contradicts the declared type of its field.

    Raises FieldMapError.
    """
    fields = _fields_of(sample_type)
    wrong: dict[str, tuple[str, str]] = {}
    for name, access in field_map.fields.items():
        if name != "__key__":
            for part, steps in parse_access(access, where=where, field=name):
                kind = "" if steps else _kind_of_part(part)
                if kind in _refused(fields[name].type):
                    wrong[name] = part, kind
    for name, (part, kind) in wrong.items():
        declared = fields[name].type
        others = [other for other, (_, held) in wrong.items() if held not in _refused(declared) and other != name]
        if others:
            remedy = f"Are `{name}` and `{others[0]}` exchanged?"
        else:
            remedy = "Name the part that holds it, or use a sample type of your own that declares the field as Any."
        raise FieldMapError(
            f"{where}, field `{name}`: {sample_type.__name__} declares it as {_type_text(declared)}, but the part "
            f"`{part}` is {_DECODED[kind]}. {remedy}"
        )


def _type_text(declared: Any) -> str:
    return declared if isinstance(declared, str) else getattr(declared, "__name__", str(declared))


def _kind_of_part(part: str) -> str:
    """Return what a part is decoded to by its extension: a key of _DECODED, or "" if unknown."""
    name = part.removesuffix(".gz")
    extension = name.rpartition(".")[2]
    return _KINDS.get(extension) or kind_by_name(name) or ""


def _refused(declared: Any) -> frozenset[str]:
    """Return the kinds of parts that certainly do not fit the declared type of a field; none if that is unknown."""
    text = declared if isinstance(declared, str) else getattr(declared, "__name__", "")
    refused = [
        _NOT_FOR.get(option.partition("[")[0].strip().rpartition(".")[2], frozenset())
        for option in _outside_brackets(text)
        if option.strip() != "None"
    ]
    return frozenset.intersection(*refused) if refused else frozenset()


def _outside_brackets(text: str) -> list[str]:
    """Split an annotation at each `|` outside brackets."""
    options = [""]
    depth = 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "|" and not depth:
            options.append("")
        else:
            options[-1] += letter
    return options


_DECODED = {
    "image": "an image",
    "av": "video or sound",
    "text": "a text",
    "int": "an integer",
    "array": "an array",
}
_KINDS = {
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx"), "int"),
    **dict.fromkeys(("npy", "npz", "pth", "ten", "tb"), "array"),
}
# Only what cannot be intended: an encoder may expect a text for a list, say.
_NUMBER = frozenset({"image", "av", "array"})
_NOT_FOR = {
    "Tensor": frozenset({"text", "int"}),
    "ndarray": frozenset({"text", "int"}),
    "str": frozenset({"image", "av", "array", "int"}),
    "int": _NUMBER,
    "float": _NUMBER,
    "bool": _NUMBER,
    "list": frozenset({"image", "av", "int"}),
}


def _compile(field: str, alternatives: tuple[Alternative, ...]) -> Callable[[Mapping[str, Any]], Any]:
    if len(alternatives) == 1 and not alternatives[0][1]:
        return itemgetter(alternatives[0][0])  # its KeyError is that of `FieldMap`

    def get_value(parts: Mapping[str, Any]) -> Any:
        for part, steps in alternatives:
            try:
                value = parts[part]
                for step in steps:
                    value = value[int(step)] if isinstance(value, (list, tuple)) else _entry(value, step)
                return value
            except (KeyError, IndexError, ValueError, TypeError):
                continue
        raise KeyError(field)

    return get_value


def _entry(value: Any, step: str) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError  # text has indices too, but a step into it is a mistake in the map
    return value[step]


def describe_fields(sample_type: type) -> list[tuple[str, bool, str]]:
    """List the fields of a sample type as (name, required, type as text)."""
    required = required_field_names(sample_type)
    described = [field for field in dataclasses.fields(sample_type) if field.name not in META_FIELDS]
    return [(field.name, field.name in required, _type_text(field.type)) for field in described]

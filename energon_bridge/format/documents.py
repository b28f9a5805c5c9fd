"""YAML and JSON files of `.nv-meta`: parsing to plain values, and the checks that every reader of them needs.

Invariant: what comes out is a tree of dict (string keys), list, str, int, float, bool and None, without shared parts
and of bounded size, whatever the file holds; nothing is imported or called.

The YAML dialect is the one of energon's files where it is documented (reference section 1.16): keys are strings,
`true/yes/false/no` are booleans, `on` is a string, `010` is ten, `1e5` is a number, dates are strings. Anchors, aliases
and merge keys work, an empty value is None.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import yaml

from energon_bridge.errors import MetadataError
from energon_bridge.storage import Store

_MAX_DEPTH = 100
_MAX_NODES = 20_000_000  # aliases of aliases multiply: stop before memory does


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # which base, the installation says
    """PyYAML's safe loader with the scalars of the dialect above."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._flattened: set[int] = set()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Build a dict with string keys; merged keys come first, so that own ones win."""
        self.flatten_mapping(node)
        return {self._key(key): self.construct_object(value, deep=deep) for key, value in node.value}

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolve merge keys; before the first time (later they would count), refuse keys that stand twice."""
        if id(node) not in self._flattened:
            self._flattened.add(id(node))
            seen: set[str] = set()
            for key, _ in node.value:
                name = self._key(key)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name!r} stands twice", key.start_mark
                    )
                seen.add(name)
        super().flatten_mapping(node)

    @staticmethod
    def _key(node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", node.start_mark)
        return str(node.value)


def _construct_float(loader: Any, node: yaml.ScalarNode) -> float:
    return float(node.value)


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _construct_bool(loader: Any, node: yaml.ScalarNode) -> bool:
    return node.value.lower() in ("true", "yes")


_INTEGER = re.compile(r"^[-+]?[0-9]+(_[0-9]+)*$")
_FLOAT = re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|yes|false|no)$", re.IGNORECASE), list("tTyYfFnN")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(null|~|)$", re.IGNORECASE), ["n", "N", "~", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:bool", _construct_bool)


def parse_document(data: bytes, *, where: str) -> Any:
    """Parse YAML, or JSON if `where` ends in `.json`, to plain values; raises MetadataError naming `where`."""
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text) if where.endswith(".json") else yaml.load(text, Loader=_Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise MetadataError(f"{where}: cannot be parsed: {error}") from error
    if value is None:
        raise MetadataError(f"{where}: the file is empty. Write it again, for example with `energon prepare`.")
    return _plain(value, where=where, depth=0, budget=[_MAX_NODES])


def read_document(store: Store, rel: str) -> Any:
    """Read and parse a metadata file of a store."""
    return parse_document(store.read(rel), where=store.url(rel))


def _plain(value: Any, *, where: str, depth: int, budget: list[int]) -> Any:
    """Copy a parsed value so that nothing is shared; refuse cycles and exploding aliases."""
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        raise MetadataError(f"{where}: nested too deeply or too large. Does an alias refer to itself?")
    if isinstance(value, dict):
        return {key: _plain(item, where=where, depth=depth + 1, budget=budget) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, where=where, depth=depth + 1, budget=budget) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise MetadataError(f"{where}: a value of type {type(value).__name__} ({value!r}); expected plain values only.")


def dump_yaml(value: Any) -> bytes:
    """Write plain values as block-style YAML in the order given, as `energon prepare` does."""
    text: str = yaml.dump(value, sort_keys=False)
    return text.encode()


def expect_mapping(value: Any, *, where: str, field: str = "") -> dict[str, Any]:
    """Return `value` if it is a mapping; raises MetadataError naming file and field."""
    if not isinstance(value, dict):
        raise wrong_type(value, "a mapping", where=where, field=field)
    return value


def expect_strings(value: Any, *, where: str, field: str) -> list[str]:
    """Return `value` if it is a list of strings; raises MetadataError naming file and field."""
    if not isinstance(value, list):
        raise wrong_type(value, "a list of strings", where=where, field=field)
    for position, item in enumerate(value):
        if not isinstance(item, str):
            raise wrong_type(item, "a string", where=where, field=f"{field}[{position}]")
    return value


def expect_string(value: Any, *, where: str, field: str) -> str:
    """Return `value` if it is a string; raises MetadataError naming file and field."""
    if not isinstance(value, str):
        raise wrong_type(value, "a string", where=where, field=field)
    return value


def expect_keys(
    value: Mapping[str, Any], *, allowed: Collection[str], required: Collection[str] = (), where: str, field: str = ""
) -> None:
    """Check the keys of a mapping; raises MetadataError naming file, key and the nearest match."""
    place = f", field `{field}`" if field else ""
    for key in value:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise MetadataError(f"{where}{place}: unknown key `{key}`; expected {_names(allowed)}.{hint}")
    for key in required:
        if key not in value:
            raise MetadataError(f"{where}{place}: the key `{key}` is missing.")


def wrong_type(value: Any, expected: str, *, where: str, field: str) -> MetadataError:
    """Build the error for a value of the wrong type."""
    place = f", field `{field}`" if field else ""
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    found = "nothing (an empty value)" if value is None else f"{text} ({type(value).__name__})"
    return MetadataError(f"{where}{place}: expected {expected}, found {found}.")


def _names(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))

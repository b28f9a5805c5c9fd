"""`Blender`: a blend written in Python. It is accepted wherever a dataset path is.

Children are paths of datasets or metadatasets, dicts in the form of a metadataset, or other blenders; weights are
numbers in any unit, or schedules. Megatron's two spellings work as well: parallel lists of prefixes and weights, and
the flat list `[weight, path, weight, path, ...]` of its command line. Without weights Megatron draws in proportion to
the sizes of the datasets, which is a concatenation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from energon_bridge.errors import ConfigurationError, MetadataError
from energon_bridge.mix.schedule import WeightSchedule, exact_number, parse_weight


@dataclass(frozen=True, slots=True)
class Blender:
    """Datasets to blend, as (path, weight) pairs.

    Examples:
        >>> mix = Blender([("data/captions", 3), ("data/more", WeightSchedule.linear([(0, 0), (1000, 1)]))])
        >>> loader = get_savable_loader(get_train_dataset(mix, batch_size=4))

    `items` accepts pairs or Megatron's flat list and becomes (child, WeightSchedule) pairs; all schedules are None if
    the sizes of the datasets decide. Relative paths are relative to the current directory.
    Raises ConfigurationError.
    """

    items: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.items, (str, bytes, Mapping)) or not isinstance(self.items, Iterable):
            raise ConfigurationError(f"Blender expected a list of (path, weight) pairs, got {self.items!r}")
        items = list(self.items)
        pairs = [(item[0], item[1]) for item in items if _is_pair(item)]
        if len(pairs) != len(items):
            pairs = _pairs_of_flat_list(items)
        if not pairs:
            raise ConfigurationError("Blender got no datasets; expected at least one (path, weight) pair")
        by_size = all(weight is None for _, weight in pairs)
        read = [
            (_child(child, position=position), None if by_size else _schedule(weight, position=position))
            for position, (child, weight) in enumerate(pairs)
        ]
        object.__setattr__(self, "items", tuple(read))

    @classmethod
    def from_prefixes(cls, prefixes: Sequence[Any], weights: Sequence[Any] | None = None) -> Self:
        """Make a blender of Megatron's parallel lists; without weights the sizes of the datasets decide."""
        if isinstance(prefixes, (str, os.PathLike)):
            raise ConfigurationError(f"from_prefixes expected a list of paths, got {prefixes!r}")
        paths = list(prefixes)
        values = [None] * len(paths) if weights is None else list(weights)
        if len(paths) != len(values):
            raise ConfigurationError(f"from_prefixes got {len(paths)} paths but {len(values)} weights")
        return cls(list(zip(paths, values, strict=True)))


def blender_from_sequence(source: Sequence[Any]) -> Blender:
    """Make a blender of pairs, of Megatron's `(prefixes, weights)` or flat list, or of paths alone (by size)."""
    if len(source) == 2 and _is_list(source[0]) and all(_is_path(path) for path in source[0]):
        prefixes, weights = source
        if weights is None or (_is_list(weights) and all(exact_number(weight) is not None for weight in weights)):
            return Blender.from_prefixes(prefixes, weights)
    if source and all(_is_path(path) for path in source) and _number_of_text(source[0]) is None:
        return Blender.from_prefixes(source)
    return Blender(source)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, os.PathLike, Mapping, Blender))


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2


def _pairs_of_flat_list(items: list[Any]) -> list[tuple[Any, Any]]:
    """Read `[weight, path, weight, path, ...]`, whose weights may be texts, as a command line gives them."""
    weights = [_number_of_text(item) if isinstance(item, str) else item for item in items[::2]]
    is_flat = len(items) % 2 == 0 and all(exact_number(weight) is not None for weight in weights)
    if not is_flat or not all(_is_path(path) for path in items[1::2]):
        raise ConfigurationError(
            f"Blender expected (path, weight) pairs, or a flat list [weight, path, weight, path, ...], got {items!r}"
        )
    return list(zip(items[1::2], weights, strict=True))


def _number_of_text(value: Any) -> float | int | None:
    for number in (int, float):
        try:
            return number(value)
        except (TypeError, ValueError):
            continue
    return None


def _child(value: Any, *, position: int) -> Any:
    if isinstance(value, (Blender, Mapping)):
        return value
    if not _is_path(value):
        raise ConfigurationError(
            f"Blender[{position}] expected a path, a Blender or a dict, got {value!r} ({type(value).__name__}). "
            f"The path comes first, the weight second."
        )
    return os.fspath(value)


def _schedule(value: Any, *, position: int) -> WeightSchedule:
    try:
        return parse_weight(value, where=f"Blender[{position}]", field="weight")
    except MetadataError as error:
        raise ConfigurationError(str(error)) from error

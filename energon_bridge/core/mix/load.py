"""Loads a mix from any source: a path, a dict, a `Blender` (a blend written in Python), or Megatron's lists."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, Union

from energon_bridge.core.errors import ConfigurationError, MetadataError
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG, DEFAULT_SPLIT_CONFIG
from energon_bridge.core.mix.flatten import Mix, flatten
from energon_bridge.core.mix.metadataset import read_metadataset_dict, read_metadataset_file
from energon_bridge.core.mix.opener import MIN_DATASETS, MixIndex, index_folders
from energon_bridge.core.mix.paths import DatasetKind, kind_of_reference, kind_of_source, resolve_path
from energon_bridge.core.mix.schedule import WeightSchedule, exact_number, parse_weight
from energon_bridge.core.mix.tree import BlendNode, Concat, LeafRef, TreeNode, filtered
from energon_bridge.core.registry import load

MixLike = Union[str, os.PathLike[str], Mapping[str, Any], "Blender", Sequence[Any]]
_MAX_DEPTH = 100


def load_mix(
    source: MixLike,
    *,
    split_part: str,
    base: str | os.PathLike[str] | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    condition: str | None = None,
    index: MixIndex | None = None,
) -> Mix:
    """Describe a mix: its leaves, each with its effective weight or its repetitions. No dataset is opened.

    Args:
        source: Folder or URL of a prepared dataset, a `.jsonl` file, the `.yaml` file of a metadataset, the same as a
            dict, a `Blender`, a list of (path, weight) pairs, or Megatron's `(prefixes, weights)` or flat list.
        split_part: Part of the split to read; in a metadataset, the split to read.
        base: Folder that relative paths in `source` are relative to; default: the current directory.
        dataset_config, split_config: Names of files in `.nv-meta`, for datasets named directly; a metadataset gives
            them for each of its datasets.
        condition: An expression over columns that the samples of all datasets must fulfil.
        index: The index of the mix from an earlier start.

    Raises:
        DatasetNotFoundError, NotPreparedError, UnknownSplitError, MetadataError: A path or a file is wrong.
        ConfigurationError: An argument is wrong.
    """
    folder = os.getcwd() if base is None else resolve_path(os.fspath(base), base=os.getcwd(), where="base")
    direct = LeafRef(
        path="",
        split_part=split_part,
        dataset_config=None if dataset_config == DEFAULT_DATASET_CONFIG else dataset_config,
        split_config=None if split_config == DEFAULT_SPLIT_CONFIG else split_config,
    )
    tree = _read(source, base=folder, direct=direct, index=index or MixIndex(), where="", depth=0)
    if condition is not None:
        load("columns", "expressions").checked_expression(condition)  # raises if it cannot be parsed
        tree = filtered(tree, condition)
    return flatten(tree)


def open_mix_index(source: MixLike, *, split_part: str) -> MixIndex:
    """Return the index of the file of a mix; for any other source, an index that keeps nothing."""
    if isinstance(source, (str, os.PathLike)):
        path = resolve_path(os.fspath(source), base=os.getcwd(), where="path of the dataset")
        if path.endswith(".yaml"):
            return MixIndex(index_folders(path), request=split_part)
    return MixIndex()


def index_of_datasets(mix: Mix, *, split_part: str) -> MixIndex:
    """Return the index of the datasets of a mix that is not a file."""
    if len(mix.leaves) < MIN_DATASETS:
        return MixIndex()
    paths = sorted({entry.leaf.path for entry in mix.leaves if isinstance(entry.leaf, LeafRef)})
    return MixIndex(index_folders("\0".join(["", *paths])), request=split_part)


def _read(source: Any, *, base: str, direct: LeafRef, index: MixIndex, where: str, depth: int) -> TreeNode:
    """Read one source into a tree.

    Args:
        base: The folder that relative paths are relative to.
        direct: The settings of datasets that are named by path alone.
        where: Where it is in a Blender, to begin messages with; empty for the source that a caller gave.
        depth: How many Blenders are around it.
    """
    if isinstance(source, (str, os.PathLike)):
        path = resolve_path(os.fspath(source), base=base, where=where or "path of the dataset")
        kind = kind_of_reference(path, where=where) if where else kind_of_source(path)
        if kind is DatasetKind.METADATASET:
            _refuse_configs(direct, path)
            return read_metadataset_file(path, split_part=direct.split_part, index=index)
        if kind is DatasetKind.JSONL:
            _refuse_configs(direct, path)
        return LeafRef(
            path=path,
            split_part=direct.split_part,
            is_jsonl=kind is DatasetKind.JSONL,
            dataset_config=direct.dataset_config,
            split_config=direct.split_config,
            where=where or path,
        )
    if isinstance(source, Mapping):
        _refuse_configs(direct, "a mix given as a dict")
        return read_metadataset_dict(_plain(source, depth=0), split_part=direct.split_part, base=base, index=index)
    if isinstance(source, Blender):
        if depth > _MAX_DEPTH:
            raise ConfigurationError(f"blenders are nested more than {_MAX_DEPTH} deep")
        where = where or "Blender"
        children = tuple(
            _read(child, base=base, direct=direct, index=index, where=f"{where}[{position}]", depth=depth + 1)
            for position, (child, _) in enumerate(source.items)
        )
        weights = tuple(schedule for _, schedule in source.items if schedule is not None)
        if not weights:
            return Concat(children=children, where=where)
        return BlendNode(children=children, weights=weights, unit=source.unit, where=where)
    if isinstance(source, (list, tuple)):
        return _read(blender_from_sequence(source), base=base, direct=direct, index=index, where=where, depth=depth)
    raise ConfigurationError(
        f"expected a path, a dict, a Blender or a list of (path, weight) pairs, got {source!r} "
        f"({type(source).__name__})"
    )


def _refuse_configs(direct: LeafRef, what: str) -> None:
    """Raise ConfigurationError if names of configuration files were given for `what` cannot take them."""
    for name in ("dataset_config", "split_config"):
        if getattr(direct, name) is not None:
            raise ConfigurationError(
                f"{name}={getattr(direct, name)!r} is for the folder of a dataset, not for {what}. In a metadataset, "
                f"set it for each dataset."
            )


def _plain(value: Any, *, depth: int) -> Any:
    """Convert Python values to those of a file: paths to strings, tuples to lists."""
    if depth > _MAX_DEPTH:
        raise ConfigurationError(f"the dict of the mix is nested more than {_MAX_DEPTH} deep. Does it contain itself?")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth=depth + 1) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# ---------------------------------------------------------------------------------------------------------------------
# Blends written in Python. Megatron's two spellings work as well: parallel lists of prefixes and weights, and the flat
# list `[weight, path, weight, path, ...]` of its command line. Without weights Megatron draws in proportion to the
# sizes of the datasets, which is a concatenation.


@dataclass(frozen=True, slots=True)
class Blender:
    """Datasets to blend, as (path, weight) pairs.

    Children are paths of datasets or metadatasets, dicts in the form of a metadataset, or other blenders; weights are
    numbers in any unit, or schedules.

    Examples:
        >>> mix = Blender([("data/captions", 3), ("data/more", WeightSchedule.linear([(0, 0), (1000, 1)]))])
        >>> loader = get_savable_loader(get_train_dataset(mix, batch_size=4))

    `items` accepts pairs or Megatron's flat list and becomes (child, WeightSchedule) pairs; all schedules are None if
    the sizes of the datasets decide. Relative paths are relative to the current directory. With a `unit`, such as
    "tokens", weights are shares of that column (or expression of columns), and not of samples.
    Raises ConfigurationError.
    """

    items: Sequence[Any]
    unit: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.items, (str, bytes, Mapping)) or not isinstance(self.items, Iterable):
            raise ConfigurationError(f"Blender expected a list of (path, weight) pairs, got {self.items!r}")
        items = list(self.items)
        pairs = [(item[0], item[1]) for item in items if isinstance(item, (tuple, list)) and len(item) == 2]
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
        if self.unit is not None:
            if by_size or not isinstance(self.unit, str):
                what = "needs weights" if by_size else "must be a column or an expression of columns"
                raise ConfigurationError(f"Blender: unit={self.unit!r} {what}")
            object.__setattr__(self, "unit", load("columns", "expressions").checked_expression(self.unit))

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

"""Loads a mix from any source: a path, a dict, a `Blender`, or Megatron's lists."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.format.nvmeta import DEFAULT_DATASET_CONFIG, DEFAULT_SPLIT_CONFIG
from energon_bridge.mix.blender import Blender, blender_from_sequence
from energon_bridge.mix.expression import column_names
from energon_bridge.mix.flatten import Mix, flatten
from energon_bridge.mix.metadataset import read_metadataset_dict, read_metadataset_file
from energon_bridge.mix.opener import MIN_DATASETS, MixIndex, index_folders
from energon_bridge.mix.paths import DatasetKind, kind_of_reference, kind_of_source, resolve_path
from energon_bridge.mix.tree import Blend, Concat, LeafRef, Node, filtered

MixSource = str | os.PathLike[str] | Mapping[str, Any] | Blender | Sequence[Any]
_MAX_DEPTH = 100


def load_mix(
    source: MixSource,
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
    names = {"dataset_config": dataset_config, "split_config": split_config}
    tree = load_tree(source, split_part=split_part, base=base, index=index, **names)
    if condition is not None:
        column_names(condition)  # raises if it cannot be parsed
        tree = filtered(tree, condition)
    return flatten(tree)


def open_mix_index(source: MixSource, *, split_part: str) -> MixIndex:
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


def load_tree(
    source: MixSource,
    *,
    split_part: str,
    base: str | os.PathLike[str] | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    index: MixIndex | None = None,
) -> Node:
    """Read a mix to its tree; arguments and errors are those of `load_mix`."""
    folder = os.getcwd() if base is None else resolve_path(os.fspath(base), base=os.getcwd(), where="base")
    direct = LeafRef(
        path="",
        split_part=split_part,
        dataset_config=None if dataset_config == DEFAULT_DATASET_CONFIG else dataset_config,
        split_config=None if split_config == DEFAULT_SPLIT_CONFIG else split_config,
    )
    return _read(source, base=folder, direct=direct, index=index or MixIndex(), where="", depth=0)


def _read(source: Any, *, base: str, direct: LeafRef, index: MixIndex, where: str, depth: int) -> Node:
    """Read one source; `direct` has the settings of datasets named directly, `where` is the place in a Blender."""
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
        return _read_blender(source, base=base, direct=direct, index=index, where=where or "Blender", depth=depth)
    if isinstance(source, (list, tuple)):
        return _read(blender_from_sequence(source), base=base, direct=direct, index=index, where=where, depth=depth)
    raise ConfigurationError(
        f"expected a path, a dict, a Blender or a list of (path, weight) pairs, got {source!r} "
        f"({type(source).__name__})"
    )


def _read_blender(blender: Blender, *, base: str, direct: LeafRef, index: MixIndex, where: str, depth: int) -> Node:
    children = tuple(
        _read(child, base=base, direct=direct, index=index, where=f"{where}[{position}]", depth=depth + 1)
        for position, (child, _) in enumerate(blender.items)
    )
    weights = tuple(schedule for _, schedule in blender.items if schedule is not None)
    return Blend(children=children, weights=weights, where=where) if weights else Concat(children=children, where=where)


def _refuse_configs(direct: LeafRef, what: str) -> None:
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

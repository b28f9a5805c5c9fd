"""Preparing datasets by the classes that megatron-energon's scripts call; `core/prepare` does the work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any, Self

from energon_bridge.compat.table import not_provided
from energon_bridge.core.errors import ConfigurationError, ShardMissingError
from energon_bridge.core.format.jsonl import index_jsonl
from energon_bridge.core.format.key_index import NEW_KEYS
from energon_bridge.core.format.nvmeta import expand_braces
from energon_bridge.core.prepare import SplitRule, prepare_dataset, rebuild_index
from energon_bridge.core.prepare.split import find_shards
from energon_bridge.core.storage import open_store
from energon_bridge.tools.check.joins import mix_joins, prepare_join
from energon_bridge.tools.check.media import MediaFilter, prepare_media

_SHUFFLE_SEED = 42
Ratios = Sequence[tuple[str, float]]
Patterns = Sequence[tuple[str, str]]


class MediaFilterStrategy(StrEnum):
    """How media files are recognised."""

    GLOB = "GLOB"
    HEADER = "HEADER"
    EXTENSION = "EXTENSION"


@dataclass
class MediaFilterConfig:
    """Selects the media files."""

    strategy: MediaFilterStrategy
    patterns: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> Self:
        """Return the requested filter; raises ConfigurationError for none or several."""
        asked = {"GLOB": bool(glob), "HEADER": header, "EXTENSION": extension}
        names = [name for name, wanted in asked.items() if wanted]
        if len(names) != 1:
            raise ConfigurationError(f"expected exactly one media filter, found {', '.join(names) or 'none'}")
        return cls(strategy=MediaFilterStrategy(names[0]), patterns=(glob or "").split(",") if glob else [])

    def ours(self) -> MediaFilter:
        """Return the equivalent filter of energon_bridge."""
        patterns = ",".join(self.patterns) or None
        return MediaFilter(strategy=self.strategy.value, patterns=patterns)


class WebdatasetPreparator:
    """Prepares folders of tars; all errors are those of `energon_bridge.core.prepare.prepare_dataset`."""

    @classmethod
    def prepare_dataset(
        cls,
        parent_path: str | os.PathLike[str],
        paths: Iterable[str],
        *,
        split_parts_ratio: Ratios | None = None,
        split_parts_patterns: Patterns | None = None,
        split_config: str = "split.yaml",
        shuffle_seed: int | None = _SHUFFLE_SEED,
        progress_fn: Callable[[Any, int], Any] | None = None,
        workers: int = 32,
        tar_index_only: bool = False,
        media_filter: MediaFilterConfig | None = None,
        fix_duplicates: bool = False,
        index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
    ) -> set[str]:
        """Index tars (relative paths, with braces) below a folder, write `.nv-meta`, and return the part names.

        `progress_fn` and `index_sqlite_tmp_path` have no effect. Raises NotProvidedError for another shuffle seed than
        42 (or None), another name of the split file, and `fix_duplicates`.
        """
        _refuse(split_config != "split.yaml", f"split_config={split_config!r}", "the split is written to split.yaml")
        _refuse(
            shuffle_seed not in (None, _SHUFFLE_SEED),
            f"shuffle_seed={shuffle_seed}",
            f"shards are shuffled with the seed {_SHUFFLE_SEED} or, with None, not at all",
        )
        _refuse(fix_duplicates, "fix_duplicates=True", f"tars are never changed; for new, unique keys: {NEW_KEYS}")
        folder = os.fspath(parent_path)
        if tar_index_only:
            return set(rebuild_index(folder, num_workers=workers).part_names)
        exclude = _all_but(folder, paths)
        prepared = prepare_dataset(
            folder,
            split=_split(split_parts_ratio, split_parts_patterns, shuffle=shuffle_seed is not None),
            exclude=exclude,
            num_workers=workers,
            media=None if media_filter is None else media_filter.ours(),
        )
        return set(prepared.part_names)

    @classmethod
    def add_media_metadata(
        cls,
        parent_path: str | os.PathLike[str],
        *,
        media_filter: MediaFilterConfig,
        workers: int = 32,
        progress_fn: Callable[[Any, int], Any] | None = None,
        index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
    ) -> int:
        """Write media metadata of a prepared dataset and return the number of files."""
        return prepare_media(os.fspath(parent_path), media_filter.ours(), num_workers=workers).num_files


def _refuse(asked: bool, what: str, advice: str) -> None:
    if asked:
        raise not_provided(f"prepare_dataset({what})", advice)


def _split(ratios: Ratios | None, patterns: Patterns | None, *, shuffle: bool) -> SplitRule:
    if (ratios is None) == (patterns is None):
        raise ConfigurationError("prepare_dataset: pass either split_parts_ratio or split_parts_patterns")
    if patterns is not None:
        return SplitRule(patterns=tuple(patterns))
    exact = tuple((name, Fraction(str(ratio))) for name, ratio in ratios or ())
    return SplitRule(ratios=exact, shuffle=shuffle)


def _all_but(folder: str, paths: Iterable[str]) -> str | None:
    """Return a pattern for the shards below a folder that are not among `paths`, None if there are none."""
    wanted = {os.path.relpath(one, folder) if os.path.isabs(one) else one for one in _expanded(paths)}
    shards = set(find_shards(open_store(folder)))
    if missing := sorted(wanted - shards):
        raise ShardMissingError(f"{folder}: no such tar: {missing[0]}")
    others = sorted(shards - wanted)
    return f"^(?:{'|'.join(map(re.escape, others))})$" if others else None


def _expanded(paths: Iterable[str]) -> list[str]:
    return [one for path in paths for one in expand_braces(os.fspath(path))]


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    progress: bool = True,
    workers: int = 16,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
) -> int:
    """Write media metadata of a folder of files and return their number."""
    return prepare_media(os.fspath(root_path), media_filter.ours(), num_workers=workers).num_files


class JsonlPreparator:
    """Prepares JSONL files."""

    @classmethod
    def prepare_dataset(cls, path: str | os.PathLike[str]) -> int:
        """Write the index of a JSONL file and return its number of lines."""
        return index_jsonl(os.fspath(path))


def prepare_metadataset(path: str | os.PathLike[str]) -> None:
    """Look up the rows of all joins of a metadataset ahead of training, as `energon prepare MIX.yaml` does."""
    for _, join in mix_joins(os.fspath(path)):
        prepare_join(join)

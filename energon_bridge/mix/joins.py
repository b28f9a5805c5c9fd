"""Opening the joins of a mix: their datasets, the index of their rows, and what makes one sample of several."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence

from energon_bridge.errors import MetadataError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset, JoinPart, joined_dataset
from energon_bridge.format.join_index import open_index
from energon_bridge.format.parallel import available_cores
from energon_bridge.mix.joiners import resolve_joiner
from energon_bridge.mix.paths import user_cache
from energon_bridge.mix.tree import AuxRef, JoinRef, LeafRef
from energon_bridge.rows.dataset import TableDataset

_PARALLEL_SAMPLES = 50_000
_MAX_WORKERS = 16

_log = logging.getLogger(__name__)


def open_join(join: JoinRef, open_part: Callable[[LeafRef], PreparedDataset], *, trust: bool) -> JoinedDataset:
    """Open a join; its index is read, or built if there is none that fits.

    `open_part` opens one of its datasets. Raises the errors of `open_index` and `resolve_joiner`.
    """
    parts = join_parts(join, open_part)
    joiner = resolve_joiner(join, [part.dataset.sample_type for part in parts], trust=trust)
    index = open_index(parts, index_folders(join), num_workers=_num_workers(parts))
    counted = parts[0].dataset.num_samples
    if len(index.rows) < counted:
        _log.info("%s: joined %s of %s samples", join.where, f"{len(index.rows):,}", f"{counted:,}")
    return joined_dataset(
        parts,
        index.rows,
        split_part=join.split_part,
        joiner=joiner,
        joiner_name=f"{join.joiner.module}.{join.joiner.name}",
        shard_counts=index.shard_counts,
        checksum=index.checksum,
    )


def aux_of_join(join: JoinRef, dataset: JoinedDataset) -> dict[str, AuxRef]:
    """Return the stores that the entries of a join name, for the cooker of its samples.

    Raises:
        MetadataError: Two entries mean different stores by one name.
    """
    found: dict[str, AuxRef] = {}
    for entry in join.entries:
        for name, ref in entry.leaf.aux.items():
            if found.setdefault(name, ref) != ref:
                raise MetadataError(
                    f"{join.where}: two entries of the join have an auxiliary store {name!r}: {found[name].path} and "
                    f"{ref.path}. One cooker is given them all; give them different names."
                )
    if found and not dataset.is_crude:  # Energon accepts this
        _log.warning("%s: `aux` has no effect: no dataset of the join is crude, so nothing is cooked.", join.where)
        return {}
    return found


def join_parts(join: JoinRef, open_part: Callable[[LeafRef], PreparedDataset]) -> tuple[JoinPart, ...]:
    """Open the datasets of a join."""
    parts = []
    for entry in join.entries:
        dataset = open_part(entry.leaf)
        if isinstance(dataset, TableDataset):
            raise MetadataError(
                f"{join.where}: {dataset.path} is a table, whose rows have no keys to join by. Write shards of it: "
                "energon convert --help"
            )
        if entry.leaf.subflavors:
            dataset = dataclasses.replace(dataset, subflavors=dataset.subflavors | entry.leaf.subflavors)
        parts.append(JoinPart(dataset=dataset, name=entry.name, nonmatch=entry.nonmatch))
    return tuple(parts)


def index_folders(join: JoinRef) -> list[str]:
    """Return where the index of a join may lie: beside the file of the mix, or in the user's cache."""
    own = [f"{join.file}.cache"] if join.file and "://" not in join.file else []
    return [*own, os.path.join(user_cache(), "energon_bridge", "joins")]


def _num_workers(parts: Sequence[JoinPart]) -> int:
    """Return how many processes build an index; one where forking is unsafe or the work is small."""
    if threading.active_count() > 1 or parts[0].dataset.num_samples < _PARALLEL_SAMPLES:
        return 1
    return min(_MAX_WORKERS, available_cores())

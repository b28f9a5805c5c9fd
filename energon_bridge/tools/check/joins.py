"""Building the join indexes of a mix ahead of training, for all its splits."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from energon_bridge.core.format.join import JOIN_PREFIX, open_index
from energon_bridge.core.format.parallel import Progress, unseen
from energon_bridge.core.mix import DatasetOpener, JoinRef, load_mix, metadataset_splits, resolve_path
from energon_bridge.core.mix.joins import index_folders, join_parts

_OLD_SECONDS = 86400
"""Age of an unfinished file from which on its writer is taken to be dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJoin:
    """A join with its index: its rows, the samples of its primary dataset, and the file of the index."""

    primary: str
    num_rows: int
    num_samples: int
    index: str | None


def mix_joins(path: str) -> list[tuple[str, JoinRef]]:
    """Return the joins of all splits of a metadataset file, each with its split, nested files included."""
    path = resolve_path(path, base=os.getcwd(), where="PATH")
    return [
        (split_part, leaf.leaf)
        for split_part in metadataset_splits(path)
        for leaf in load_mix(path, split_part=split_part).leaves
        if isinstance(leaf.leaf, JoinRef)
    ]


def prepare_join(
    join: JoinRef, *, num_workers: int = 1, trust_remote_code: bool = False, progress: Progress = unseen
) -> PreparedJoin:
    """Look up the rows of a join, unless its index exists; the joiner is not needed.

    `progress` gets the numbers of shards done and in all. Raises the errors of `open_dataset` and `open_index`.
    """
    parts = join_parts(join, DatasetOpener(trust_remote_code=trust_remote_code).open)
    index = open_index(parts, index_folders(join), num_workers=num_workers, progress=progress)
    primary = parts[0].dataset
    return PreparedJoin(
        primary=primary.path, num_rows=len(index.rows), num_samples=primary.num_samples, index=index.path
    )


def remove_unused(path: str, indexes: set[str | None]) -> list[str]:
    """Remove the join indexes next to a metadataset file that are not among `indexes`; return their names.

    Leftovers of killed processes go, too.
    """
    folder = f"{resolve_path(path, base=os.getcwd(), where='PATH')}.cache"
    if "://" in folder or not os.path.isdir(folder):
        return []
    kept = {os.path.basename(index) for index in indexes if index is not None}
    gone = []
    for name in sorted(os.listdir(folder)):
        file = os.path.join(folder, name)
        if name.startswith(JOIN_PREFIX) and name not in kept and (name.endswith(".bin") or _is_old(file)):
            with contextlib.suppress(OSError):
                os.unlink(file)
            gone.append(name)
    return gone


def _is_old(path: str) -> bool:
    """Return whether a file is too old for anybody to be still writing it."""
    try:
        return time.time() - os.stat(path).st_mtime > _OLD_SECONDS
    except OSError:
        return False

"""Bans of a run: the keys that a loader is given become the banned samples of its leaves, looked up once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from energon_bridge.errors import ConfigurationError, EmptyDatasetError, StorageError
from energon_bridge.format.samples_by_key import samples_by_key
from energon_bridge.loader.document import SavedRun
from energon_bridge.mix.leaves import OpenLeaf
from energon_bridge.plan.bans import Ban, LeafBans, with_ban, with_samples
from energon_bridge.rng import IntArray
from energon_bridge.storage import open_store

_NAMED = 5


def load_keys(path: str | os.PathLike[str]) -> list[str]:
    """Return the keys in a text file: one on each line; blank lines, and lines that begin with `#`, are left out.

    Args:
        path: Of the file, or its URL.

    Raises:
        StorageError: It cannot be read, or is not UTF-8.
    """
    where = os.fspath(path)
    folder, _, name = (where if "://" in where else os.path.abspath(os.path.expanduser(where))).rpartition("/")
    try:
        text = open_store(folder or "/").read(name).decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"{where}: a file of keys must be UTF-8 text, one key on each line ({error})") from error
    lines = (line.strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


Found = dict[str, IntArray]
"""The samples of a dataset by key."""


def leaves_of_path(leaves: Sequence[OpenLeaf], path: str) -> list[OpenLeaf]:
    """Return the leaves of a mix that are of the dataset with a path; without one, all.

    Raises:
        ConfigurationError: There is none.
    """
    found = [leaf for leaf in leaves if path in ("", leaf.dataset.path)]
    if not found:
        raise ConfigurationError(
            f"ban: dataset={path!r} is not the path of a dataset of the mix, which has {_paths(leaves)}"
        )
    return found


def look_up(leaves: Sequence[OpenLeaf], keys: Sequence[str]) -> list[Found]:
    """Return the samples by key of the dataset of each leaf; keys that it does not have are left out."""
    known: dict[tuple[str, str, str], Found] = {}
    found = []
    for leaf in leaves:
        dataset = leaf.dataset
        place = dataset.path, dataset.split_part, dataset.fingerprint
        if place not in known:
            known[place] = samples_by_key(dataset, keys)
        found.append(known[place])
    return found


def with_found(
    banned: Mapping[str, LeafBans], leaves: Sequence[OpenLeaf], found: Sequence[Found], start: int
) -> dict[str, LeafBans]:
    """Return what is banned, by identity, with the samples found in some leaves, from a global draw on."""
    more = dict(banned)
    for leaf, of_leaf in zip(leaves, found, strict=True):
        samples = np.concatenate([np.empty(0, dtype=np.int64), *of_leaf.values()])
        bans = with_samples(more.get(leaf.identity), samples[leaf.has(samples)], start)
        if bans is not None:
            more[leaf.identity] = bans
    return more


def check_left(banned: Mapping[str, LeafBans], leaves: Sequence[OpenLeaf]) -> None:
    """Refuse bans that leave nothing of a mix.

    Raises:
        EmptyDatasetError: They do.
    """
    if all(leaf.identity in banned and banned[leaf.identity].samples.size == leaf.num_samples for leaf in leaves):
        total = sum(leaf.num_samples for leaf in leaves)
        raise EmptyDatasetError(f"ban: nothing would be left of {_paths(leaves)}: all {total} samples would be banned")


def banned_of(saved: SavedRun, bans: Sequence[Ban], leaves: Sequence[OpenLeaf]) -> dict[str, LeafBans]:
    """Return what is banned of the leaves of a mix that goes on from a state, by identity.

    The state says it of the leaves that it has; the keys of bans are looked up in the others.
    """
    here, there = {leaf.identity for leaf in leaves}, {row["identity"] for row in saved.leaves if not row["parked"]}
    banned = {identity: found for identity, found in saved.banned.items() if identity in here}
    fresh = [leaf for leaf in leaves if leaf.identity not in there]
    for ban in bans:
        some = [leaf for leaf in fresh if ban.dataset in ("", leaf.dataset.path)]
        banned = with_found(banned, some, look_up(some, ban.keys), ban.start)
    return banned


def _paths(leaves: Sequence[OpenLeaf]) -> str:
    return ", ".join(sorted({leaf.dataset.path for leaf in leaves})[:_NAMED])


def moved_bans(saved: SavedRun, leaves: Sequence[OpenLeaf]) -> tuple[Ban, ...]:
    """Return the bans of a state, those of a single dataset under the path that it has now."""
    paths = {leaf.identity: leaf.dataset.path for leaf in leaves}
    now = {row["path"]: paths[row["identity"]] for row in saved.leaves if row["identity"] in paths}
    bans: tuple[Ban, ...] = ()
    for ban in saved.bans:
        bans = with_ban(bans, replace(ban, dataset=now.get(ban.dataset, ban.dataset)))
    return bans


def checked_keys(keys: Iterable[str]) -> list[str]:
    """Return keys as a list; refuse what is none.

    Raises:
        ConfigurationError: It is one string, or something in it is none, or empty.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise ConfigurationError(
            f"ban: keys must be a list of sample keys, such as ['00017'], got {keys!r}; load_keys(FILE) reads a file"
        )
    given = list(keys)
    wrong = next((key for key in given if not isinstance(key, str) or not key), None)
    if wrong is not None:
        raise ConfigurationError(f"ban: a sample key is a string that is not empty, got {wrong!r}")
    return given


def named_keys(keys: Sequence[str]) -> str:
    """Name the first of some keys, and say how many there are."""
    shown = ", ".join(map(repr, keys[:_NAMED]))
    return shown if len(keys) <= _NAMED else f"{shown} and {len(keys) - _NAMED} more"

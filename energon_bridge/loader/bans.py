"""Bans of a run: the keys that a loader is given become the banned samples of its leaves, looked up once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from energon_bridge.errors import ConfigurationError, EmptyDatasetError, StorageError
from energon_bridge.format.samples_by_key import samples_by_key
from energon_bridge.loader.document import SavedRun
from energon_bridge.mix.leaves import OpenLeaf
from energon_bridge.plan.bans import Ban, LeafBans, with_ban
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


class BannedSamples:
    """Looks the keys of bans up in the datasets of a mix; what it has found it keeps.

    Args:
        leaves: Of the mix.
    """

    def __init__(self, leaves: Sequence[OpenLeaf]) -> None:
        self._leaves = leaves
        self._known: dict[tuple[str, str, str], tuple[set[str], dict[str, IntArray]]] = {}
        self._last: tuple[Sequence[Ban], dict[str, LeafBans]] = (), {}

    def of(self, bans: Sequence[Ban]) -> dict[str, LeafBans]:
        """Return the banned samples of each leaf that has any, by its identity."""
        if self._last[0] == bans:
            return self._last[1]
        found = {}
        keys_of = [(ban, frozenset(ban.keys)) for ban in sorted(bans, key=lambda ban: -ban.start)]
        for leaf in self._leaves:
            own = [(ban.start, keys) for ban, keys in keys_of if ban.dataset in ("", leaf.dataset.path)]
            known = self._looked_up(leaf, frozenset().union(*(keys for _, keys in own)))
            starts: dict[int, int] = {}
            for start, keys in own:  # the first ban of a sample comes last, and counts
                for key in known.keys() & keys:
                    starts |= dict.fromkeys(known[key].tolist(), start)
            samples, firsts = np.array(sorted(starts.items()), dtype=np.int64).reshape(-1, 2).T
            here = leaf.has(samples)
            if here.any():
                found[leaf.identity] = LeafBans(samples=samples[here], starts=firsts[here])
        self._last = bans, found
        return found

    def check(self, keys: Sequence[str], dataset: str) -> list[str]:
        """Return the keys that no dataset (or not the one with a path) has.

        Raises:
            ConfigurationError: The mix has no dataset of that path.
        """
        leaves = [leaf for leaf in self._leaves if dataset in ("", leaf.dataset.path)]
        if not leaves:
            paths = ", ".join(sorted({leaf.dataset.path for leaf in self._leaves})[:_NAMED])
            raise ConfigurationError(
                f"ban: dataset={dataset!r} is not the path of a dataset of the mix, which has {paths}"
            )
        unknown = frozenset(keys)
        for leaf in leaves:
            unknown -= self._looked_up(leaf, unknown).keys()
        return [key for key in dict.fromkeys(keys) if key in unknown]

    def check_left(self, bans: Sequence[Ban]) -> None:
        """Refuse bans that leave nothing of the mix.

        Raises:
            EmptyDatasetError: They do.
        """
        banned = self.of(bans)
        if all(
            leaf.identity in banned and banned[leaf.identity].samples.size == leaf.num_samples for leaf in self._leaves
        ):
            total = sum(leaf.num_samples for leaf in self._leaves)
            paths = ", ".join(sorted({leaf.dataset.path for leaf in self._leaves})[:_NAMED])
            raise EmptyDatasetError(f"ban: nothing would be left of {paths}: all {total} samples would be banned")

    def _looked_up(self, leaf: OpenLeaf, keys: frozenset[str]) -> dict[str, IntArray]:
        """Return the samples of the dataset of a leaf by key: those of all keys that were ever asked for."""
        dataset = leaf.dataset
        place = dataset.path, dataset.split_part, dataset.fingerprint
        asked, known = self._known.setdefault(place, (set(), {}))
        missing = keys - asked
        if missing:
            known |= samples_by_key(dataset, missing)
            asked |= missing
        return known


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

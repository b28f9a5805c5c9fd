"""Bans of a run: keys given to a loader become banned samples of its leaves, looked up once."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from energon_bridge.core.errors import ConfigurationError, EmptyDatasetError, StorageError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.key_index import find_keys, local_key_index, stale_key_index
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, meta_path, read_info
from energon_bridge.core.format.tar_index import scan_tar
from energon_bridge.core.loader.run_plan import RunPlan
from energon_bridge.core.loader.saved_run import SavedRun
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.mix.paths import resolve_path
from energon_bridge.core.order.changes import Ban, LeafBans, new_keys, with_ban, with_samples
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.storage import open_store
from energon_bridge.core.stream.lane_state import LARGEST

# ---------------------------------------------------------------------------------------------------------------------
# Samples by key: looked up in the key index of a dataset, or in the headers of its shards.


logger = logging.getLogger(__name__)

_MANY = 100
"""Log a message if at least this many shards have to be searched, since that takes a while."""


def samples_by_key(dataset: PreparedDataset | JoinedDataset, keys: Collection[str]) -> dict[str, IntArray]:
    """Return for each key that a dataset has the indices of its samples (of a join: of its rows), ascending.

    The key of a join's row is that of its primary; the key of a JSONL line or of a table row is its number.

    Raises:
        KeyIndexError: The key index cannot be read, or belongs to another dataset.
        CorruptShardError: There is no key index, and a shard is damaged.
    """
    if isinstance(dataset, JoinedDataset):
        key_of = {place: key for key, place in _places(dataset.datasets[0], keys)}
        primary = dataset.rows[:, 0]
        rows = np.flatnonzero(np.isin(primary, np.array(list(key_of), dtype=np.int64)))
        found: Iterable[tuple[str, int]] = ((key_of[int(primary[row])], row) for row in rows.tolist())
    else:
        found = _places(dataset, keys)
    samples: dict[str, list[int]] = {}
    for key, sample in found:
        samples.setdefault(key, []).append(sample)
    return {key: np.unique(np.array(of_key, dtype=np.int64)) for key, of_key in samples.items()}


def _places(dataset: PreparedDataset, keys: Collection[str]) -> Iterator[tuple[str, int]]:
    if dataset.key_format is not None:
        numbers = (key for key in keys if key.isascii() and key.isdecimal() and len(key) < 19)
        known = ((key, int(key)) for key in numbers if dataset.key_format.format(int(key)) == key)
        yield from (place for place in known if place[1] < dataset.num_samples)
        return
    firsts = (np.cumsum(dataset.shard_counts) - dataset.shard_counts).tolist()
    if dataset.store.exists(meta_path(INDEX_SQLITE)):
        yield from _looked_up(dataset, list(keys), firsts)
        return
    logger.log(
        logging.WARNING if len(firsts) > _MANY else logging.INFO,
        "%s has no key index: searching the headers of its %d shards for %d keys. `energon prepare "
        "--tar-index-only` writes an index, which makes this instant",
        dataset.path,
        len(firsts),
        len(keys),
    )
    wanted = {*keys}
    for shard, first in zip(dataset.shard_names, firsts, strict=True):
        found = scan_tar(dataset.store, shard).keys
        yield from ((key, first + number) for number, key in enumerate(found) if key in wanted)


def _looked_up(dataset: PreparedDataset, keys: list[str], firsts: list[int]) -> Iterator[tuple[str, int]]:
    shards = list(read_info(dataset.store).shard_counts)
    with tempfile.TemporaryDirectory(prefix="energon-keys-") as scratch:
        found = find_keys(local_key_index(dataset.store, str(Path(scratch) / INDEX_SQLITE)), keys)
    places: dict[str, list[int]] = {}  # a split may list a shard twice and omit others
    for place, shard in enumerate(dataset.shard_names):
        places.setdefault(shard, []).append(place)
    for key, one in zip(keys, found, strict=True):
        if one is None or one[0] >= len(shards):  # not listed: of a run that has not ended
            continue
        number, local = one
        of_shard = places.get(shards[number], [])
        if any(local >= dataset.shard_counts[place] for place in of_shard):
            raise stale_key_index(dataset.path)
        yield from ((key, firsts[place] + local) for place in of_shard)


# ---------------------------------------------------------------------------------------------------------------------
# The bans.


_NAMED = 5


def load_keys(path: str | os.PathLike[str]) -> list[str]:
    r"""Return the keys in a text file, one per line; blank lines are ignored, and `# notes` alone or after a key.

    Examples:
        >>> written = Path("withdrawn.txt").write_text("train-00003\n# by the licence check\ntrain-00017  # a face\n")
        >>> load_keys("withdrawn.txt")
        ['train-00003', 'train-00017']
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4))
        >>> loader.ban(load_keys("withdrawn.txt"))
        0

    Args:
        path: Path or URL of the file.

    Raises:
        StorageError: The file cannot be read, or is not UTF-8.
    """
    where = os.fspath(path)
    folder, _, name = (where if "://" in where else os.path.abspath(os.path.expanduser(where))).rpartition("/")
    try:
        text = open_store(folder or "/").read(name).decode("utf-8-sig")  # as Notepad writes
    except UnicodeDecodeError as error:
        raise StorageError(f"{where}: expected UTF-8 text with one key per line: {error}") from error
    lines = (_NOTE.split(line.strip(), maxsplit=1)[0] for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


_NOTE = re.compile(r"\s+#(?=\s|$)")
"""Where a note begins after a key, which may have the sign itself."""


Found = dict[str, IntArray]
"""The samples of a dataset by key."""


def checked_path(leaves: Sequence[OpenLeaf], path: str) -> str:
    """Return the path of the only dataset in which samples are banned; empty: all. It may be relative.

    Raises:
        ConfigurationError: The mix has no such dataset.
    """
    if path and not _leaves_of(leaves, path):
        path = resolve_path(path, base=os.getcwd(), where="ban")
    if not _leaves_of(leaves, path):
        raise ConfigurationError(
            f"ban: dataset={path!r} is not the path of a dataset of the mix, which has {_paths(leaves)}"
        )
    return path


def _leaves_of(leaves: Sequence[OpenLeaf], path: str) -> list[OpenLeaf]:
    return [leaf for leaf in leaves if path in ("", leaf.dataset.path)]


def with_new_ban(
    plan: RunPlan, bans: tuple[Ban, ...], ban: Ban, *, ignore_unknown: bool
) -> tuple[tuple[Ban, ...], RunPlan]:
    """Return the bans of a run and its plan with one more ban; as they are, if its keys are banned already.

    Raises:
        ConfigurationError: A key is unknown.
        EmptyDatasetError: Nothing would be left.
    """
    new = new_keys(bans, ban)
    if not new:
        return bans, plan
    leaves = _leaves_of(plan.data.leaves, ban.dataset)
    found = look_up(leaves, new)
    known = frozenset().union(*found)
    unknown = [key for key in new if key not in known]
    if unknown:
        read = ", ".join(sorted({_read_of(leaf.dataset) for leaf in leaves})[:_NAMED])
        text = f"ban: {len(unknown)} of {len(ban.keys)} keys are not in what this loader reads, {read}: "
        text += _named(unknown)
        if not ignore_unknown:
            raise ConfigurationError(
                f"{text}. Nothing was banned. If they are of other datasets or splits, as of one for validation, pass "
                "ignore_unknown=True, which bans the others, or take them out of the file of `data.ban`; else correct "
                "them (`energon which` shows keys)"
            )
        logger.warning(text)
    of_key = {key: {leaf.dataset.path for leaf, keys in zip(leaves, found, strict=True) if key in keys} for key in new}
    if several := [key for key, paths in of_key.items() if len(paths) > 1]:
        logger.warning(
            "ban: %d of %d keys are in several datasets, and banned in all of them: %s in %s. dataset=PATH, or "
            "data.ban_dataset of a configuration, bans in one",
            *(len(several), len(new), repr(several[0]), ", ".join(sorted(of_key[several[0]])[:_NAMED])),
        )
    banned = _with_found(plan.banned, leaves, found, ban.start)
    _check_left(banned, plan.data.leaves)
    return with_ban(bans, ban), plan.with_banned(banned)


def look_up(leaves: Sequence[OpenLeaf], keys: Sequence[str]) -> list[Found]:
    """Return the samples by key of each leaf's dataset; without keys that a dataset does not have."""
    known: dict[tuple[str, str, str], Found] = {}
    found = []
    for leaf in leaves:
        dataset = leaf.dataset
        place = dataset.path, dataset.split_part, dataset.fingerprint
        if place not in known:
            known[place] = samples_by_key(dataset, keys)
        found.append(known[place])
    return found


def _with_found(
    banned: Mapping[str, LeafBans], leaves: Sequence[OpenLeaf], found: Sequence[Found], start: int
) -> dict[str, LeafBans]:
    """Return the banned samples by identity, with those found in some leaves added from a global draw on."""
    more = dict(banned)
    for leaf, of_leaf in zip(leaves, found, strict=True):
        samples = np.concatenate([np.empty(0, dtype=np.int64), *of_leaf.values()])
        bans = with_samples(more.get(leaf.identity), samples[leaf.has(samples)], start)
        if bans is not None:
            more[leaf.identity] = bans
    return more


def _check_left(banned: Mapping[str, LeafBans], leaves: Sequence[OpenLeaf]) -> None:
    """Check that bans leave something of a mix.

    Raises:
        EmptyDatasetError: They leave nothing.
    """
    if all(leaf.identity in banned and banned[leaf.identity].samples.size == leaf.num_samples for leaf in leaves):
        total = sum(leaf.num_samples for leaf in leaves)
        raise EmptyDatasetError(f"ban: nothing would be left of {_paths(leaves)}: all {total} samples would be banned")


def banned_of(saved: SavedRun, bans: Sequence[Ban], leaves: Sequence[OpenLeaf]) -> dict[str, LeafBans]:
    """Return the banned samples of a mix that continues from a state, by identity.

    For leaves in the state they are known; in new leaves the banned keys are looked up.
    """
    here = {leaf.identity for leaf in leaves}
    there = {row["identity"] for row in saved.leaves if not row["parked"]}
    banned = {identity: found for identity, found in saved.banned.items() if identity in here}
    fresh = [leaf for leaf in leaves if leaf.identity not in there]
    for ban in bans:
        some = [leaf for leaf in fresh if ban.dataset in ("", leaf.dataset.path)]
        banned = _with_found(banned, some, look_up(some, ban.keys), ban.start)
    return banned


def newly_banned(saved: SavedRun, banned: Mapping[str, LeafBans], leaves: Sequence[OpenLeaf]) -> list[str]:
    """Return what to say of datasets that were not in a saved run, and have keys that it has banned."""
    before = {row[name] for row in saved.leaves for name in ("path", "identity")}
    new = {leaf.dataset.path: banned[leaf.identity].samples.size for leaf in leaves if leaf.identity in banned}
    known = {leaf.dataset.path for leaf in leaves if not before.isdisjoint((leaf.dataset.path, leaf.identity))}
    return [
        f"{path}: {count} of its samples are banned, too: they have keys that were banned in other datasets. If "
        "they are other samples, write this dataset with other keys."
        for path, count in new.items()
        if path not in known
    ]


def _read_of(dataset: PreparedDataset | JoinedDataset) -> str:
    return f"{dataset.path} ({dataset.split_part})" if dataset.split_part else dataset.path


def _paths(leaves: Sequence[OpenLeaf]) -> str:
    return ", ".join(sorted({leaf.dataset.path for leaf in leaves})[:_NAMED])


def moved_bans(saved: SavedRun, leaves: Sequence[OpenLeaf]) -> tuple[Ban, ...]:
    """Return the bans of a state, with the present paths of datasets that have moved."""
    paths = {leaf.identity: leaf.dataset.path for leaf in leaves}
    now = {row["path"]: paths[row["identity"]] for row in saved.leaves if row["identity"] in paths}
    bans: tuple[Ban, ...] = ()
    for ban in saved.bans:
        bans = with_ban(bans, replace(ban, dataset=now.get(ban.dataset, ban.dataset)))
    return bans


def checked_keys(keys: Iterable[str]) -> list[str]:
    """Return keys as a list, checked.

    Raises:
        ConfigurationError: It is a single string, or an entry is not a string or is empty.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise ConfigurationError(
            f"ban: keys must be a list of sample keys, such as ['00017'], got {keys!r}; load_keys(FILE) reads a file"
        )
    given = list(keys)
    wrong = next((key for key in given if not isinstance(key, str) or not key), None)
    if wrong is not None:
        raise ConfigurationError(f"ban: a sample key must be a non-empty string, got {wrong!r}")
    return given


def checked_start(from_draw: int | None) -> int | None:
    """Return the global draw from which samples are to be banned; raises ConfigurationError if it is none."""
    if from_draw is not None and (type(from_draw) is not int or not 0 <= from_draw <= LARGEST):
        raise ConfigurationError(f"ban: from_draw must be an integer of at least 0, got {from_draw!r}")
    return from_draw


def _named(keys: Sequence[str]) -> str:
    """Name the first few keys and how many there are."""
    shown = ", ".join(map(repr, keys[:_NAMED]))
    return shown if len(keys) <= _NAMED else f"{shown} and {len(keys) - _NAMED} more"

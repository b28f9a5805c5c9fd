"""What people changed by hand in the files of a conversion, kept when it is run again for a source that grew.

`split.yaml` and `dataset.yaml` are compared with what was written for the shards that were there: where they differ,
the edit wins, and only what is new is added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from energon_bridge.core.format.documents import dump_yaml, read_document
from energon_bridge.core.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    Splits,
    meta_path,
    read_splits,
    render_splits,
)
from energon_bridge.core.storage import Store
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml

_MOST_NAMED = 5
_logger = logging.getLogger(__name__)


def edited_splits(
    store: Store,
    parts: Mapping[str, Sequence[str]],
    before: Collection[str] | None,
    again: Collection[str],
    keys: Callable[[str], Sequence[str]],
) -> bytes:
    """Return the split.yaml of these parts, with the excludes, and the parts that people gave the shards `before`.

    None for these means another dataset, of which nothing stays. `again` are shards that were written again,
    `keys` returns the keys of a shard. Warns of excludes that are dropped, that leave nothing out, or that may name
    other samples now. Raises MetadataError for a file that cannot be read.
    """
    if not store.exists(meta_path(DEFAULT_SPLIT_CONFIG)):
        return render_splits(parts)
    old = read_splits(store)
    if before is None:
        _warn_of(
            old.exclude,
            "%s: was replaced, and so was its `exclude`: %s. List the samples again by their new keys.",
            old,
        )
        return render_splits(parts)
    there = {shard for of in parts.values() for shard in of}
    gone = _gone(old, there, keys)
    _warn_of(gone, "%s: `exclude` names what the dataset does not have: %s. Take it out.", old)
    doubtful = [entry for entry in old.exclude if entry not in gone and f"{entry.rpartition('.tar')[0]}.tar" in again]
    _warn_of(
        doubtful,
        "%s: `exclude` names %s, of shards that were written again: check that these are the same samples.",
        old,
    )
    were = {name: [shard for shard in of if shard in before] for name, of in parts.items()}
    had = {name: [shard for shard in of if shard in there] for name, of in old.parts.items()}
    if {name: of for name, of in were.items() if of} != {name: of for name, of in had.items() if of}:
        known = {*before, *(shard for of in had.values() for shard in of)}
        new = {name: [shard for shard in of if shard not in known] for name, of in parts.items()}
        parts = {name: [*had.get(name, ()), *new.get(name, ())] for name in {**had, **new}}
    return render_splits(parts, exclude=old.exclude)


def edited_dataset(store: Store, sample_type: str, now: Mapping[str, str], before: Mapping[str, str] | None) -> bytes:
    """Return the dataset.yaml of the field map `now`, but for what people changed in that of the field map `before`.

    Of a dataset that is replaced (None) nothing stays. Raises MetadataError for a file that cannot be read.
    """
    rel = meta_path(DEFAULT_DATASET_CONFIG)
    new = render_dataset_yaml(sample_type, now or None)
    if before is None or not store.exists(rel):
        return new
    text = store.read(rel)
    if bool(now) is not bool(before) or text == render_dataset_yaml(sample_type, before or None):
        return new
    document = read_document(store, rel).plain
    fields = document.get("field_map") if isinstance(document, dict) else None
    if not isinstance(fields, dict):
        return text
    more = {name: now[name] for name in now if now[name] != before.get(name) and fields.get(name) == before.get(name)}
    return dump_yaml({**document, "field_map": {**fields, **more}}) if more else text


def _gone(splits: Splits, shards: Collection[str], keys: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the excludes that name no shard, and no sample of one."""
    samples = splits.excluded_samples(sorted(shards))
    there = {shard: set(keys(shard)) for shard in {shard for shard, _ in samples}}
    found = {*shards, *(f"{shard}/{key}" for shard, key in samples if key in there[shard])}
    return [entry for entry in splits.exclude if entry not in found]


def _warn_of(entries: Sequence[str], message: str, splits: Splits) -> None:
    if entries:
        more = f" and {len(entries) - _MOST_NAMED:,} more" if len(entries) > _MOST_NAMED else ""
        _logger.warning(message, splits.where, ", ".join(entries[:_MOST_NAMED]) + more)

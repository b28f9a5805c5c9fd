"""Encoding again: rows whose contents are gone, and the samples and batches that restore keys name.

All randomness of a hook is keyed to its sample, so the content is the same as before, in any process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.order.choose import Picks
from energon_bridge.core.samples.sample_place import SamplePlace
from energon_bridge.core.stream.failures import MAX_MEMBERS, named
from energon_bridge.core.stream.lane_state import (
    COLUMNS,
    Counts,
    PlainKey,
    RowKey,
    SampleKey,
    SampleRef,
    as_members,
    read_key,
)
from energon_bridge.core.stream.loading import PendingLoads, load_picks
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.rows import BatchRow, size_of

_ENCODED_AGAIN = COLUMNS.index("encoded_again")
_AT_A_TIME = 64
"""Samples read at a time when rows are encoded again."""


def reencode(
    pipeline: Pipeline, rows: Sequence[BatchRow], counts: Counts, loading: PendingLoads | None = None
) -> list[BatchRow]:
    """Encode the rows whose contents were dropped; return all rows but those that no longer encode.

    A sample that no longer encodes is logged and counted for its leaf. `loading` holds their loads, if they are under
    way.
    """
    gone = [row for row in rows if row.content is None]
    at_once = _AT_A_TIME if loading is None else max(1, len(gone))
    for low in range(0, len(gone), at_once):
        part = deque(gone[low : low + at_once])
        refs = as_members([row.members[0] for row in part])
        loads = load_picks(pipeline.loading, Picks(refs)) if loading is None else loading
        while len(loads):
            loaded = loads.take()
            for key, sample, size in zip(loaded.keys, loaded.samples, loaded.sizes, strict=True):
                row = part.popleft()
                row.read = 0 if row.members[0].output else size
                _encode_again(pipeline, row, sample, key, counts)
    return [row for row in rows if row.content is not None]


def _encode_again(pipeline: Pipeline, row: BatchRow, sample: Any, key: SampleKey, counts: Counts) -> None:
    ref = row.members[0]
    counts.of(ref.leaf)[_ENCODED_AGAIN] += 1
    encoded = pipeline.encode(ref.leaf, sample, key, Counts(), again=True)
    if ref.output < len(encoded):
        row.content = encoded[ref.output][1]
        row.size = size_of(row.content, 0)
        return
    gone = LookupError(f"waited to be packed or batched, but its encoder no longer gives output {ref.output}")
    pipeline.code.failed(gone, [(ref.leaf, ref.sample)], counts, hook=Hook.RESTORE)


def restore_sample(pipeline: Pipeline, key: PlainKey) -> Any:
    """Return the microbatch or sample with a restore key, encoded again.

    Raises:
        LookupError: The key belongs to another dataset, or its sample no longer gives an output.
    """
    named = read_key(key)
    with pipeline.user_code(restoring=True):
        if isinstance(named, RowKey):
            pipeline.begin_unknown()
            return _row(pipeline, named)[0]
        number = named.number - named.output
        pipeline.begin(named.lane, number)
        rows = [_row(pipeline, row) for row in named.rows]
        leaves = [leaf for _, leaf in rows]
        keys = [row.plain for row in named.rows]
        batches = pipeline.collate([row for row, _ in rows], keys, leaves, named.lane, number, None)
    assert batches is not None, "without counts a hook that fails raises"
    return batches[named.output]


def describe(pipeline: Pipeline, key: PlainKey) -> str:
    """Return the dataset, shard and key of each sample of a restore key.

    Raises:
        LookupError: It is no restore key.
    """
    members = read_key(key).samples
    places = []
    for identity, index, _, _ in members[:MAX_MEMBERS]:
        leaf = _leaf_of(pipeline, identity)
        if leaf is None:
            places.append(SamplePlace(f"another dataset (identity {identity!r})", "unknown", index))
        else:
            places.append(pipeline.source(leaf).place(index))
    return named(places, len(members))


def _leaf_of(pipeline: Pipeline, identity: str) -> int | None:
    return next((number for number, leaf in enumerate(pipeline.leaves) if leaf.identity == identity), None)


def _row(pipeline: Pipeline, key: RowKey) -> tuple[Any, int]:
    """Return the sample or pack with a restore key, and the number of its (first sample's) leaf."""
    code = pipeline.code
    members = [_restore_one(pipeline, one) for one in key.samples]
    refs = [SampleRef(leaf, *one[1:]) for (_, leaf), one in zip(members, key.samples, strict=True)]
    row, leaf = members[0]
    if key.output is not None or pipeline.own.by_length:
        pipeline.decode_deferred([sample for sample, _ in members])
        samples = [code.post(sample, ref, None) for (sample, _), ref in zip(members, refs, strict=True)]
        row = samples[0] if key.output is None else code.pack(samples, refs, None)[key.output]
    if pipeline.settings.run.batch_size is None and not pipeline.own.groups:
        pipeline.collate([row], [key.plain], [leaf], 0, 0, None)
    return row, leaf


def _restore_one(pipeline: Pipeline, key: SampleKey) -> tuple[Any, int]:
    """Return the sample with a restore key and the number of its leaf."""
    identity, index, epoch, output = key
    leaf = _leaf_of(pipeline, identity)
    if leaf is None:
        known = ", ".join(sorted({one.dataset.path for one in pipeline.leaves})[:3])
        raise LookupError(
            f"restore key {key!r}: sample {index} belongs to a dataset that this loader does not read, or whose "
            f"content has changed (identity {identity!r}). It reads {known}"
        )
    loaded = load_picks(pipeline.loading, Picks(as_members([SampleRef(leaf, index, epoch, 0)]))).take()
    encoded = pipeline.encode(leaf, loaded.samples[0], (identity, index, epoch, 0), Counts())
    if output >= len(encoded):
        why = "".join(f": {report}" for report in pipeline.judge.taken())
        where = pipeline.source(leaf).where(index)
        raise LookupError(f"restore key {key!r}: {where} gives {len(encoded)} encoded samples now{why}")
    return encoded[output][1], leaf

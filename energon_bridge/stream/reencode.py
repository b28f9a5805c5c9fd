"""Encodes samples again: by the references in a state or listing, or by the restore keys of batches.

All randomness of a hook is keyed to its sample, so the result is the same as before, in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_bridge.plan.choose import Picks
from energon_bridge.stream.picked import PickedLoad
from energon_bridge.stream.pipeline import PendingLoads, Pipeline
from energon_bridge.stream.report import MAX_MEMBERS, SamplePlace, named
from energon_bridge.stream.state import COLUMNS, Counts, SampleRef, as_members
from energon_bridge.stream.values import RestoreKey
from energon_bridge.task_encoder.hooks import Hook

_ENCODED_AGAIN = COLUMNS.index("encoded_again")


def encode_again(
    pipeline: Pipeline, refs: Sequence[SampleRef], counts: Counts, loading: PendingLoads | None = None
) -> list[Any]:
    """Return the encoded samples of some references; None for one that no longer encodes, which is counted.

    `loading` holds their loads, if they are under way.
    """
    loading = PickedLoad(pipeline, Picks(as_members(refs))).start() if loading is None else loading
    out: list[Any] = []
    while len(loading):
        loaded = loading.take()
        for key, sample in zip(loaded.keys, loaded.samples, strict=True):
            ref = refs[len(out)]
            counts.of(ref.leaf)[_ENCODED_AGAIN] += 1
            encoded = pipeline.encode(ref.leaf, sample, key, Counts(), again=True)
            if ref.output < len(encoded):
                out.append(encoded[ref.output][1])
                continue
            out.append(None)
            gone = LookupError(f"waited to be packed or batched, but its encoder no longer gives output {ref.output}")
            pipeline.steps.failed(gone, [(ref.leaf, ref.sample)], counts, hook=Hook.RESTORE)
    return out


def restore(pipeline: Pipeline, key: tuple[Any, ...]) -> Any:
    """Return the microbatch or sample with a restore key, encoded again.

    Raises:
        LookupError: The key belongs to another dataset, or its sample no longer gives an output.
    """
    if not key or key[0] != "Batch" or len(key) < 4:
        with pipeline.user_code(restoring=True):
            pipeline.begin_unknown()
            return _row(pipeline, key)[0]
    _, lane, number, keys, *which = key
    with pipeline.user_code(restoring=True):
        pipeline.begin(lane, number - (which[0] if which else 0))
        rows = [_row(pipeline, tuple(one)) for one in keys]
        output = which[0] if which else 0
        leaves = [leaf for _, leaf in rows]
        batches = pipeline.collate([row for row, _ in rows], list(keys), leaves, lane, number - output, None)
    assert batches is not None, "without counts a hook that fails raises"
    return batches[output]


def describe(pipeline: Pipeline, key: tuple[Any, ...]) -> str:
    """Return the dataset, shard and key of each sample of a restore key.

    Raises:
        LookupError: It is no restore key.
    """
    rows = key[3] if len(key) >= 4 and key[0] == "Batch" else (key,)
    members = [_checked(tuple(one)) for row in rows for one in (row[2] if row and row[0] == "Pack" else (row,))]
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


def _checked(key: tuple[Any, ...]) -> RestoreKey:
    """Return the restore key of a sample, its type checked."""
    if len(key) != 4 or not isinstance(key[0], str) or not all(isinstance(number, int) for number in key[1:]):
        raise LookupError(
            f"{key!r} is not a restore key of this package: expected sample.__restore_key__ or batch.__restore_key__ "
            "as delivered, such as ('0123456789abcdef', 7, 0, 0)"
        )
    return key[0], key[1], key[2], key[3]


def _row(pipeline: Pipeline, key: tuple[Any, ...]) -> tuple[Any, int]:
    """Return the sample or pack with a restore key, and the number of its (first sample's) leaf."""
    code = pipeline.code
    if key and key[0] == "Pack":
        _, output, keys = key
        members = [_restore_one(pipeline, tuple(one)) for one in keys]
        refs = [SampleRef(leaf, *one[1:]) for (_, leaf), one in zip(members, keys, strict=True)]
        pipeline.decode_deferred([sample for sample, _ in members])
        samples = [code.post(sample, ref, None) for (sample, _), ref in zip(members, refs, strict=True)]
        row, leaf = code.pack(samples, refs, None)[output], members[0][1]
    else:
        row, leaf = _restore_one(pipeline, key)
        if pipeline.own.by_length:
            pipeline.decode_deferred([row])
            row = code.post(row, SampleRef(leaf, *key[1:]), None)
    if pipeline.settings.run.batch_size is None and not pipeline.own.groups:
        pipeline.collate([row], [key], [leaf], 0, 0, None)
    return row, leaf


def _restore_one(pipeline: Pipeline, key: tuple[Any, ...]) -> tuple[Any, int]:
    """Return the sample with a restore key and the number of its leaf."""
    identity, index, epoch, output = _checked(key)
    leaf = _leaf_of(pipeline, identity)
    if leaf is None:
        known = ", ".join(sorted({one.dataset.path for one in pipeline.leaves})[:3])
        raise LookupError(
            f"restore key {key!r}: sample {index} belongs to a dataset that this loader does not read, or whose "
            f"content has changed (identity {identity!r}). It reads {known}"
        )
    loaded = PickedLoad(pipeline, Picks(as_members([SampleRef(leaf, index, epoch, 0)]))).start().take()
    encoded = pipeline.encode(leaf, loaded.samples[0], (identity, index, epoch, 0), Counts())
    if output >= len(encoded):
        why = "".join(f": {report}" for report in pipeline.judge.taken())
        where = pipeline.source(leaf).where(index)
        raise LookupError(f"restore key {key!r}: {where} gives {len(encoded)} encoded samples now{why}")
    return encoded[output][1], leaf

"""A look at the first samples of a shard, before it has an index."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from energon_bridge.format.tar import parse_sample
from energon_bridge.format.tar_scan import scan_tar
from energon_bridge.storage import Store

_MAX_SAMPLES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSample:
    """The key of a sample and its parts as raw bytes."""

    key: str
    parts: dict[str, bytes]


def read_first_samples(store: Store, shard: str) -> list[FirstSample]:
    """Read up to 50 samples from the start of a shard; raises CorruptShardError."""
    offsets = scan_tar(store, shard).offsets[: _MAX_SAMPLES + 1]
    samples = []
    for start, end in pairwise(offsets):
        key, parts = parse_sample(store.read_range(shard, start, end - start), where=store.url(shard))
        samples.append(FirstSample(key=key, parts={name: bytes(data) for name, data in parts.items()}))
    return samples

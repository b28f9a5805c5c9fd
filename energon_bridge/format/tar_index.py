"""The `.tar.idx` next to each tar: where its samples are.

Format: unsigned 64-bit little-endian integers without a header: the offset of the first header block of each sample,
then the offset behind the last member; n samples take 8 * (n + 1) bytes. Sample i is bytes `[index[i], index[i + 1])`.
Source: reference section 1.4.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from energon_bridge.errors import CorruptShardError, ShardMissingError
from energon_bridge.storage import Store

_OFFSET = np.dtype("<u8")


def index_name(shard: str) -> str:
    """Return the name of the index of a shard: `a/x.tar` has `a/x.tar.idx`."""
    return f"{shard}.idx"


def encode_index(offsets: Sequence[int] | array[int] | np.ndarray) -> bytes:
    """Write offsets (of each sample, and of the end) as the content of an index file."""
    return np.asarray(offsets, dtype=_OFFSET).tobytes()


def load_index(store: Store, shard: str, *, count: int, size: int, remedy: str) -> np.ndarray:
    """Read and check the index of a shard of `count` samples and `size` bytes; `remedy` says what to do if it is wrong.

    Returns uint64 offsets, shape (count + 1,). Raises ShardMissingError if the file is not there and CorruptShardError
    if it does not fit the shard.
    """
    rel = index_name(shard)
    where = store.url(rel)
    try:
        data = store.read(rel)
    except ShardMissingError as error:
        raise ShardMissingError(f"{where}: the index of shard {shard!r} is missing. {remedy}") from error
    if len(data) != 8 * (count + 1):
        raise CorruptShardError(
            f"{where}: {len(data)} bytes, expected {8 * (count + 1)} for the {count} samples that .info.json counts. "
            f"{remedy}"
        )
    offsets = np.frombuffer(data, dtype=_OFFSET)
    # Compared as they are: a difference of unsigned numbers would wrap around.
    if count and bool((offsets[1:] <= offsets[:-1]).any()):
        sample = int(np.argmax(offsets[1:] <= offsets[:-1]))
        raise CorruptShardError(
            f"{where}: sample {sample} starts at byte {offsets[sample]} and ends at {offsets[sample + 1]}. {remedy}"
        )
    if int(offsets[-1]) > size:
        raise CorruptShardError(
            f"{where}: the last sample ends at byte {offsets[-1]}, but {store.url(shard)} has {size} bytes. "
            f"The file was cut off or replaced: copy it again, or: {remedy}"
        )
    return offsets

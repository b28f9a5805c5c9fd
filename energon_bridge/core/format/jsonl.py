"""JSONL files: a JSON object per line, each line a crude sample with the part `json`.

Beside `x.jsonl` is its index `x.jsonl.idx`, in the format of a `.tar.idx`: the offset of each sample, and the size of
the file. Blank lines belong to the sample before them, those at the start to the first. There is no `.nv-meta` and no
split; the key of a sample is its number. A byte-order mark in front of the first line is skipped.

A file without an index gets one when it is opened. A file that no longer fits its index raises an error, since samples
might have changed their numbers during a run. The fingerprint hashes name, number of samples and size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from energon_bridge.core.errors import CorruptShardError, DecodeError, EmptyDatasetError, NotPreparedError, StorageError
from energon_bridge.core.format.dataset import PreparedDataset, with_times
from energon_bridge.core.format.documents import BOM, utf16_remedy
from energon_bridge.core.format.tar_index import encode_index, index_name
from energon_bridge.core.storage import OpenFiles, Store, as_far, open_store

PART = "json"

_CHUNK_BYTES = 16 << 20
_SHOWN_BYTES = 60

_log = logging.getLogger(__name__)


class JsonlDataset(PreparedDataset):
    """A JSONL file as a dataset of one shard, whose samples are lines."""

    __slots__ = ()
    key_format: ClassVar[str | None] = "{}"

    @property
    def index_remedy(self) -> str:
        return f"Rebuild it with `energon prepare {self.path}`."


def is_jsonl(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a JSONL file, by its name alone."""
    return os.fspath(path).endswith(".jsonl")


def open_jsonl(path: str | os.PathLike[str], *, files: OpenFiles | None = None) -> JsonlDataset:
    """Open a JSONL file by path or URL; its index is written if there is none.

    Raises DatasetNotFoundError or ShardMissingError if there is no such file, EmptyDatasetError, CorruptShardError if
    it is no JSONL or changed after it was indexed, and NotPreparedError if the index cannot be written.
    """
    store, name = _locate(path, files)
    where = store.url(name)
    size = store.size(name)
    if not store.exists(index_name(name)):
        _log.info("%s has no index; writing one", where)
        index_jsonl(path)
    count = _check_index(store, name, size=size)
    content = json.dumps([1, "jsonl", name, count, size], separators=(",", ":"))
    dataset = JsonlDataset(
        path=where,
        store=store,
        split_part="",
        shard_names=(name,),
        shard_counts=np.array([count], dtype=np.int64),
        shard_sizes=np.array([size], dtype=np.int64),
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
        num_samples=count,
    )
    return with_times(dataset)


def index_jsonl(path: str | os.PathLike[str]) -> int:
    """Write the index of a JSONL file, replacing an old one; returns the number of samples.

    Raises EmptyDatasetError, CorruptShardError naming the first line that is not a JSON object, or NotPreparedError if
    the index cannot be written.
    """
    store, name = _locate(path)
    offsets = _offsets(store, name)
    try:
        store.write(index_name(name), encode_index(offsets))
    except StorageError as error:
        where = store.url(name)
        elsewhere = "Copy it to" if as_far(store) else f"Link it into (`ln -s {where} FOLDER`), or copy it to,"
        raise NotPreparedError(
            f"{where}: no index, and cannot write one beside it ({error}). Run `energon prepare {where}` on a machine "
            f"that can. {elsewhere} a folder that can be written to, and name the file there."
        ) from error
    return len(offsets) - 1


def parse_line(data: bytes | memoryview) -> Any:
    """Return the object of a sample; raises DecodeError."""
    try:
        return json.loads(str(data, "utf-8").removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not valid JSON: {error}") from error


def _locate(path: str | os.PathLike[str], files: OpenFiles | None = None) -> tuple[Store, str]:
    text = os.fspath(path)
    if "://" not in text:
        text = os.path.abspath(os.path.expanduser(text))
    folder, _, name = text.rpartition("/")
    return open_store(folder or "/", files=files), name


def _check_index(store: Store, name: str, *, size: int) -> int:
    """Return the number of samples in the index, after checking that it belongs to this file."""
    rel = index_name(name)
    length = store.size(rel)
    indexed = None
    if length >= 16 and length % 8 == 0:
        indexed = int.from_bytes(store.read_range(rel, length - 8, 8), "little")
    if indexed != size:
        what = "is damaged" if indexed is None else f"is one of a file of {indexed} bytes"
        raise CorruptShardError(
            f"{store.url(name)}: has {size} bytes, but its index {store.url(rel)} {what}: the file changed after it "
            f"was indexed, or the index belongs to another file. Rebuild it with `energon prepare {store.url(name)}`."
        )
    return length // 8 - 1


def _offsets(store: Store, name: str) -> array[int]:
    """Find where each sample starts; the last entry is the size of the file."""
    where = store.url(name)
    offsets = array("Q")
    position = 0
    for number, line in enumerate(_lines(store, name), start=1):
        text = line.strip() if number > 1 else line.removeprefix(BOM.encode()).strip()
        if text:
            if number == 1 and (remedy := utf16_remedy(text, where)):
                raise CorruptShardError(f"{where}: {remedy}")
            if not (text.startswith(b"{") and text.endswith(b"}")):
                shown = text[:_SHOWN_BYTES].decode(errors="replace") + ("…" if len(text) > _SHOWN_BYTES else "")
                raise CorruptShardError(
                    f"{where}: line {number} is not a JSON object: {shown!r}. Expected one object {{...}} per line."
                )
            offsets.append(position if offsets else 0)
        position += len(line)
    if not offsets:
        raise EmptyDatasetError(f"{where}: the file has no samples. Expected one JSON object per line.")
    offsets.append(position)
    return offsets


def _lines(store: Store, name: str) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, reading a bounded part of it at a time."""
    size = store.size(name)
    begun: list[bytes] = []  # the pieces of an unfinished line
    for start in range(0, size, _CHUNK_BYTES):
        lines = store.read_range(name, start, min(_CHUNK_BYTES, size - start)).split(b"\n")
        begun.append(lines[0])
        for following in lines[1:]:
            yield b"".join(begun) + b"\n"
            begun = [following]
    if rest := b"".join(begun):
        yield rest

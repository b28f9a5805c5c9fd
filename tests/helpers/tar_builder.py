"""Tars for tests, written by Python's tarfile in any of its header formats, and datasets read back sample by sample."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from energon_bridge.core.format.dataset import PreparedDataset, read_index
from energon_bridge.core.format.tar import parse_sample

USTAR = tarfile.USTAR_FORMAT
GNU = tarfile.GNU_FORMAT
PAX = tarfile.PAX_FORMAT

Members = Iterable[tuple[str, bytes]]


def tar_bytes(members: Members, *, tar_format: int = USTAR, end_marker: bool = True) -> bytes:
    """Return a tar with these (name, content) members; a name that ends in `/` is a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size = len(content)
            if tar_format == PAX:
                info.mtime = 1.5  # a time that takes PAX records, as webdataset's writers give every member
            tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    return buffer.getvalue() if end_marker else buffer.getvalue()[:end]


def write_tar(path: Path, members: Members, *, tar_format: int = USTAR) -> Path:
    """Write such a tar to a file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, tar_format=tar_format))
    return path


def write_texts(root: Path, shards: dict[str, Iterable[str]], *, tar_format: int = USTAR) -> Path:
    """Write shards whose samples have one part: `<key>.txt` with the text `text of <key>`."""
    for shard, keys in shards.items():
        write_tar(root / shard, [(f"{key}.txt", f"text of {key}".encode()) for key in keys], tar_format=tar_format)
    return root


def tars_of(root: Path, count: int = 10) -> Path:
    """Write tars of three texts each in two folders: `a/s_0.tar`, `b/s_1.tar`, `a/s_2.tar`, ..."""
    return write_texts(root, {f"{'ab'[n % 2]}/s_{n}.tar": [f"{n}-{k}" for k in range(3)] for n in range(count)})


def read_all(dataset: PreparedDataset) -> list[tuple[str, dict[str, bytes]]]:
    """Read (key, needed parts) of all samples in the order of the shards."""
    samples = []
    wanted = dataset.part_filter if isinstance(dataset.part_filter, frozenset) else None
    for number, shard in enumerate(dataset.shard_names):
        for start, end in pairwise(read_index(dataset, number).tolist()):
            data = dataset.store.read_range(shard, start, end - start)
            key, parts = parse_sample(data, where=shard, parts=wanted)
            samples.append((key, {name: bytes(content) for name, content in parts.items()}))
    return samples

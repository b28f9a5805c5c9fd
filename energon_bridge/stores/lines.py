"""The lines of a JSONL file as files: `0.json`, `1.json` and so on, found by the file's index."""

from __future__ import annotations

import os
import struct

from energon_bridge.errors import FileNotInStoreError
from energon_bridge.format.jsonl import PART, JsonlDataset, open_jsonl
from energon_bridge.format.tar_index import index_name
from energon_bridge.samples import SourceInfo
from energon_bridge.stores.base import FileStore


class JsonlFileStore(FileStore):
    """Random access to the samples of a JSONL file by number; any thread may read.

    Raises the errors of `open_jsonl` when the first line is asked for.

    Args:
        path: Path or URL of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._dataset: JsonlDataset | None = None

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        """Return the line `<number>.json` as bytes, without the line's end; raises FileNotInStoreError."""
        dataset = self._opened()
        number, _, part = key.partition(".")
        if part != PART or not (number.isascii() and number.isdigit()) or int(number) >= dataset.num_samples:
            raise FileNotInStoreError(
                f"{dataset.path}: no line {key!r}; expected one of 0.{PART} to {dataset.num_samples - 1}.{PART}"
            )
        (name,) = dataset.shard_names
        start, end = struct.unpack("<2Q", dataset.store.read_range(index_name(name), 8 * int(number), 16))
        data = dataset.store.read_range(name, start, end - start).strip()
        return data, SourceInfo(dataset.path, key, name, (key,))

    def get_path(self) -> str:
        """Return the path or URL of the file."""
        return self._opened().path

    def _opened(self) -> JsonlDataset:
        if self._dataset is None:
            self._dataset = open_jsonl(self._path)
        return self._dataset

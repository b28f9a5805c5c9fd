"""Facts about a dataset that programs ask for before they open it: its kind, and its number of samples."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from energon_bridge.compat.epath import EPath
from energon_bridge.compat.table import not_provided
from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.documents import parse_document
from energon_bridge.core.format.jsonl import open_jsonl
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, INFO_JSON, INFO_YAML, META_FOLDER


class EnergonDatasetType(Enum):
    """The kinds of datasets that a path can hold."""

    METADATASET = "metadataset"
    WEBDATASET = "webdataset"
    JSONL = "jsonl"
    FILESYSTEM = "filesystem"
    INVALID = "invalid"


def get_dataset_type(path: Any) -> EnergonDatasetType:
    """Return the kind of dataset at a path, judging by its files."""
    path = EPath(path)
    if path.is_file():
        kinds = {"jsonl": EnergonDatasetType.JSONL, "yaml": EnergonDatasetType.METADATASET}
        return kinds.get(path.name.rpartition(".")[2], EnergonDatasetType.INVALID)
    if check_dataset_info_present(path):
        return EnergonDatasetType.WEBDATASET
    is_indexed = (path / META_FOLDER / INDEX_SQLITE).is_file()
    return EnergonDatasetType.FILESYSTEM if is_indexed else EnergonDatasetType.INVALID


def check_dataset_info_present(path: Any) -> bool:
    """Whether a folder is a prepared dataset."""
    return any((EPath(path) / META_FOLDER / name).is_file() for name in (INFO_JSON, INFO_YAML))


def get_dataset_info(path: Any) -> dict[str, Any]:
    """Return the content of the `.info` file of a prepared dataset, such as `shard_counts`; raises MetadataError."""
    for name in (INFO_JSON, INFO_YAML):
        file = EPath(path) / META_FOLDER / name
        if file.is_file():
            data = file.read_bytes()
            info = json.loads(data) if name == INFO_JSON else parse_document(data, where=file.url)
            if isinstance(info, dict):
                return info
            raise MetadataError(f"{file.url}: expected a mapping, found {type(info).__name__}")
    raise MetadataError(f"{EPath(path).url}: not prepared ({META_FOLDER}/{INFO_JSON} is missing)")


class IJsonlIndexReader:
    """The index of a JSONL file, of which only the number of samples can be asked."""

    def __init__(self, jsonl_path: Any) -> None:
        raise not_provided("IJsonlIndexReader(…)", "open the .jsonl file with get_train_dataset")

    @staticmethod
    def count_samples(jsonl_path: Any) -> int:
        """Return the number of samples of a JSONL file."""
        return open_jsonl(EPath(jsonl_path).url).num_samples

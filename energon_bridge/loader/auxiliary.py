"""Auxiliary stores when a mix is opened: they must be there, and what they hold is part of what a leaf is.

The fingerprint of a store covers its name, and of a prepared dataset its shards and their numbers of samples, of a
JSONL file what the file's own fingerprint does. Of a folder of files only the name counts, since looking at all files
of a folder is no work for the start of a run. Where a store lies does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from energon_bridge.errors import DatasetError
from energon_bridge.format.jsonl import is_jsonl, open_jsonl
from energon_bridge.format.key_lookup import key_index_version
from energon_bridge.format.nvmeta import read_info
from energon_bridge.mix import AuxRef
from energon_bridge.storage import open_store


def aux_fingerprint(aux: Mapping[str, AuxRef], *, where: str) -> str:
    """Return a hash of the stores of a leaf, empty if it has none.

    Raises DatasetError, of the class that fits and naming the store, if one cannot be used.
    """
    if not aux:
        return ""
    content = {}
    for name, ref in aux.items():
        try:
            content[name] = _content(ref)
        except DatasetError as error:
            raise type(error)(f"{where}: auxiliary store {name!r}: {error}") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content(ref: AuxRef) -> list[object]:
    if is_jsonl(ref.path) and not ref.is_filesystem:
        return ["jsonl", open_jsonl(ref.path).fingerprint]
    store = open_store(ref.path)
    store.check_root()
    if ref.is_filesystem:
        return ["filesystem"]
    info = read_info(store)
    key_index_version(store)  # raises if nothing can be looked up
    return ["dataset", list(info.shard_counts.items())]

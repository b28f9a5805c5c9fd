"""Which tars below a folder are the shards of a dataset."""

from __future__ import annotations

import re

from energon_bridge.errors import ConfigurationError, NoShardsError
from energon_bridge.format.tar_index import compressed_shard
from energon_bridge.storage import Store

_COMPRESSED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


def find_shards(store: Store, *, exclude: str | None = None) -> list[str]:
    """List the `.tar` files below the root, without those whose path matches the pattern `exclude`.

    They are sorted folder by folder, as Megatron Energon sorts them: `a/1.tar` before `a-b/1.tar`.

    Raises NoShardsError if there are none, UnsupportedShardError for compressed tars, whose samples cannot be read by
    range, ShardMissingError for a broken link, and ConfigurationError for a pattern that is not a regular
    expression.
    """
    pattern = compile_pattern(exclude, option="--exclude") if exclude else None
    names = [name for name, _ in store.list((".tar", *_COMPRESSED)) if not (pattern and pattern.search(name))]
    compressed = [name for name in names if name.endswith(_COMPRESSED)]
    if compressed:
        suffix = next(suffix for suffix in _COMPRESSED if compressed[0].endswith(suffix))
        raise compressed_shard(store.url(compressed[0]), exclude=f"{re.escape(suffix)}$", count=len(compressed))
    shards = sorted((name for name in names if name.endswith(".tar")), key=lambda name: name.split("/"))
    if not shards:
        left_out = f" that {exclude!r} does not exclude" if exclude else ""
        raise NoShardsError(
            f"{store.root}: no .tar files{left_out} below this folder. To convert pictures, JSON, CSV or "
            f"parquet files: energon convert {store.root} OUT"
        )
    return shards


def compile_pattern(pattern: str, *, option: str) -> re.Pattern[str]:
    """Compile a regular expression of an option; raises ConfigurationError."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"{option} {pattern!r} is not a regular expression: {error}.") from error

"""Find the shards of a dataset, and assign them to split parts, by ratio or by patterns of their names.

By ratio: in the order of the names (or shuffled with a fixed seed), cut at `floor(shards * sum of ratios so far)`, in
exact arithmetic, so that the parts together hold every shard. By pattern: a shard may be in several parts or in none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from energon_bridge.core.errors import ConfigurationError, NoShardsError
from energon_bridge.core.format.nvmeta import expand_braces
from energon_bridge.core.format.tar_index import compressed_shard
from energon_bridge.core.storage import Store

_COMPRESSED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_SHUFFLE_SEED = 42  # energon's: the same shards give the same split


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Either `ratios` of (split part, ratio) or `patterns` of (split part, regular expression with braces).

    `shuffle` shuffles the shards, by a seed that never changes, before they are divided by ratio.
    """

    ratios: tuple[tuple[str, Fraction], ...] = ()
    patterns: tuple[tuple[str, str], ...] = ()
    shuffle: bool = False


def parse_ratio(text: str, *, shuffle: bool = False) -> SplitRule:
    """Read the ratios of train, val and test, like `8,1,1` or `0.8, 0.1, 0.1`; raises ConfigurationError."""
    try:
        ratios = [Fraction(ratio.strip()) for ratio in text.split(",")]
    except (ValueError, ZeroDivisionError):
        ratios = []
    if len(ratios) != 3 or min(ratios) < 0 or sum(ratios) == 0:
        raise ConfigurationError(
            f"split ratio {text!r}: expected three numbers for train, val and test that are not all zero, like 8,1,1."
        )
    return SplitRule(ratios=tuple(zip(("train", "val", "test"), ratios, strict=True)), shuffle=shuffle)


def parse_patterns(texts: Sequence[str]) -> SplitRule:
    """Read split parts like `train:images/.*`; raises ConfigurationError."""
    patterns = []
    for text in texts:
        name, colon, pattern = text.partition(":")
        if not colon or not name or not pattern:
            raise ConfigurationError(f"--split-parts {text!r}: expected NAME:PATTERN, like train:train/.*")
        _compile_all(name, pattern)
        patterns.append((name, pattern))
    return SplitRule(patterns=tuple(patterns))


def split_shards(shards: Sequence[str], rule: SplitRule) -> dict[str, list[str]]:
    """Assign the shards by a rule; raises ConfigurationError if a pattern matches no shard."""
    if rule.patterns:
        return {name: _matching(shards, name, pattern) for name, pattern in rule.patterns}
    ordered = list(shards)
    if rule.shuffle:
        random.Random(_SHUFFLE_SEED).shuffle(ordered)
    total = sum(ratio for _, ratio in rule.ratios)
    parts: dict[str, list[str]] = {}
    so_far = Fraction(0)
    start = 0
    for name, ratio in rule.ratios:
        so_far += ratio
        end = int(len(ordered) * so_far / total)
        parts[name] = ordered[start:end]
        start = end
    return parts


def _matching(shards: Sequence[str], name: str, pattern: str) -> list[str]:
    compiled = _compile_all(name, pattern)
    matching = [shard for shard in shards if any(one.match(shard) for one in compiled)]
    if not matching:
        raise ConfigurationError(
            f"--split-parts {name}:{pattern}: the pattern matches none of the {len(shards)} shards; the first is "
            f"{shards[0]!r}. Patterns match from the start of the path below the dataset's folder."
        )
    return matching


def _compile_all(name: str, pattern: str) -> list[re.Pattern[str]]:
    try:
        expanded = expand_braces(pattern)
    except ValueError as error:
        raise ConfigurationError(f"--split-parts {name}:{pattern}: {error}.") from error
    return [compile_pattern(one, option=f"--split-parts {name}:") for one in expanded]

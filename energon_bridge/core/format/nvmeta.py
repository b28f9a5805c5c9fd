"""The files of `.nv-meta` that name the shards and their split, `.info.json` and `split.yaml`; brace expressions.

`.info.json`: `{"energon_version": str, "shard_counts": {"<relative tar path>": <samples>, ...}}`, indent 2; the order
of the shards is their number in the key index. `.info.yaml` is the old spelling of the same.
`split.yaml` (or `.json`): `split_parts: {<name>: [<shard or brace expression>, ...]}` and `exclude: [...]` of shards
or `<shard>/<sample key>`. The formats are those of Megatron Energon 7.4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from energon_bridge.core import __version__
from energon_bridge.core.errors import (
    EnergonError,
    MetadataError,
    NotPreparedError,
    ShardMissingError,
    UnknownSplitError,
    did_you_mean,
)
from energon_bridge.core.format.documents import DocumentValue, dump_yaml, read_document
from energon_bridge.core.storage import Store

# ---------------------------------------------------------------------------------------------------------------------
# Brace expressions in lists of shard names: `part_{000..009}.tar`, `{a,b}/x.tar`.
#
# Expansion is bash's: numeric ranges (padded if a bound has a leading zero), letter ranges, an optional step, nested
# alternatives, a backslash before a character that is meant literally. Collapsing is its inverse for runs of names that
# count up by one in a single number, and keeps the order.


_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]+))?")
_NUMBER = re.compile(r"([0-9]+)")
_MAX_NAMES = 2_000_000  # more shards than anyone has, since a few characters can ask for any number
_MAX_CHARACTERS = 200_000_000
_PLAIN = re.compile(r"[^{},\\]+")
_SPECIAL = re.compile(r"([{},\\])")


def expand_braces(pattern: str) -> list[str]:
    """Expand a brace expression into all names; raises ValueError if braces do not match or give too many names."""
    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        return [pattern]
    try:
        names, position = _expand(pattern, 0, inside=False)
    except RecursionError as error:
        raise ValueError(f"{pattern[:80]!r}… has too deeply nested braces") from error
    if position < len(pattern):
        raise ValueError(f"unmatched `}}` at character {position} of {pattern!r}")
    return names


def _expand(text: str, position: int, *, inside: bool) -> tuple[list[str], int]:
    """Expand up to the end, or inside braces up to the `,` or `}` that ends this alternative."""
    names = [""]
    while position < len(text):
        character = text[position]
        if character == "\\" and position + 1 < len(text):
            _check_size(names, 1, text)
            names = [name + text[position + 1] for name in names]
            position += 2
        elif character == "{":
            choices, position = _expand_braced(text, position)
            if len(names) * len(choices) > _MAX_NAMES:
                raise ValueError(f"{text[:200]!r} expands to more than {_MAX_NAMES:,} names")
            names = [name + choice for name in names for choice in choices]
        elif character == "}" or (inside and character == ","):
            break
        else:
            plain = _PLAIN.match(text, position)
            run = plain[0] if plain else character
            _check_size(names, len(run), text)
            names = [name + run for name in names]
            position += len(run)
    return names, position


def _check_size(names: list[str], more: int, text: str) -> None:
    if len(names) * (len(names[-1]) + more) > _MAX_CHARACTERS:
        raise ValueError(f"{text[:80]!r}… expands to names of more than {_MAX_CHARACTERS:,} characters")


def _expand_braced(text: str, opening: int) -> tuple[list[str], int]:
    """Expand the braces that open at `opening`; returns the choices and the position after the closing brace."""
    closing = text.find("}", opening)
    body = text[opening + 1 : closing] if closing >= 0 else ""
    if match := _RANGE.fullmatch(body):
        return _numbers(*match.groups()), closing + 1
    if match := _LETTERS.fullmatch(body):
        first, last, step = match.groups()
        return [chr(code) for code in _range(ord(first), ord(last), step)], closing + 1
    alternatives: list[list[str]] = []
    position = opening
    while True:
        names, position = _expand(text, position + 1, inside=True)
        alternatives.append(names)
        if position >= len(text):
            raise ValueError(f"unmatched `{{` at character {opening} of {text!r}")
        if text[position] == "}":
            break
    if len(alternatives) == 1:  # braces around a single word are literal
        return [f"{{{name}}}" for name in alternatives[0]], position + 1
    return [name for names in alternatives for name in names], position + 1


def _numbers(first: str, last: str, step: str | None) -> list[str]:
    padded = any(len(bound.lstrip("-")) > 1 and bound.lstrip("-").startswith("0") for bound in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in _range(int(first), int(last), step)]


def _range(first: int, last: int, step: str | None) -> range:
    stride = abs(int(step or 1)) or 1
    if abs(last - first) // stride >= _MAX_NAMES:
        raise ValueError(f"{first}..{last} expands to more than {_MAX_NAMES:,} names")
    return range(first, last + 1, stride) if first <= last else range(first, last - 1, -stride)


def collapse_braces(names: Iterable[str]) -> list[str]:
    """Write names as brace expressions where one number of constant width counts up by one from name to name."""
    collapsed: list[str] = []
    run: list[list[str]] = []
    slot = -1
    for name in names:
        pieces = _NUMBER.split(_SPECIAL.sub(r"\\\1", name))
        changed = _counted_up(run[-1], pieces) if run else None
        if changed is not None and (len(run) == 1 or changed == slot):
            slot = changed
        elif run:
            collapsed.append(_expression(run, slot))
            run = []
        run.append(pieces)
    if run:
        collapsed.append(_expression(run, slot))
    return collapsed


def _counted_up(before: list[str], after: list[str]) -> int | None:
    """Return the place of the only piece that differs, if it is a number that goes up by one and keeps its width."""
    if len(before) != len(after):
        return None
    # Split by numbers, a name is text, number, text, ...: numbers have odd places.
    different = [position for position, piece in enumerate(after) if piece != before[position]]
    if len(different) != 1 or different[0] % 2 == 0:
        return None
    old = before[different[0]]
    new = after[different[0]]
    return different[0] if len(old) == len(new) and int(new) == int(old) + 1 else None


def _expression(run: list[list[str]], slot: int) -> str:
    first = run[0]
    last = run[-1]
    if len(run) == 1:
        return "".join(first)
    return "".join([*first[:slot], f"{{{first[slot]}..{last[slot]}}}", *first[slot + 1 :]])


# ---------------------------------------------------------------------------------------------------------------------
# `.info.json` and `split.yaml`: the shards and their split.


META_FOLDER = ".nv-meta"
INFO_JSON = ".info.json"
INFO_YAML = ".info.yaml"
INDEX_SQLITE = "index.sqlite"
INDEX_UUID = "index.uuid"
DEFAULT_SPLIT_CONFIG = "split.yaml"
SPLIT_JSON = "split.json"
NOTHING: frozenset[tuple[str, str]] = frozenset()
"""No excluded samples: one object for all datasets of a mix."""
DEFAULT_DATASET_CONFIG = "dataset.yaml"
PARTS_FOLDER = ".nv-meta.parts"
"""Where shards are until all of a conversion are finished."""
CHECKSUMS = ".checksums"
# The release of energon whose formats are written, and what wrote them; energon's readers take any text here.
FORMAT_VERSION = f"7.4.1+energon-bridge.{__version__}"
_MOST_SHOWN = 4
_MAX_COUNT = 1 << 48
"""More samples than a shard can have (a sample takes at least 512 bytes); sums of counts stay exact in 64 bits."""


def leads_out(path: str) -> bool:
    """Whether a path leads out of the dataset that it is relative to, or has a zero byte."""
    return path.startswith("/") or ".." in path.split("/") or "\0" in path


def meta_path(name: str) -> str:
    """Return the path of a metadata file relative to the root of the dataset; raises MetadataError if it leads out."""
    if leads_out(name):
        raise MetadataError(f"{name[:200]!r} leads out of {META_FOLDER}: use the name of a file in it, without ..")
    return f"{META_FOLDER}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """All shards of a prepared dataset with their numbers of samples, in the order of the key index."""

    shard_counts: dict[str, int]
    energon_version: str | None = None

    @property
    def has_checksums(self) -> bool:
        """Whether there are checksums of its shards (`format/checksums.py`)."""
        return bool(self.energon_version and self.energon_version.endswith(CHECKSUMS))


_HELD_OUT = ("val", "test", "valid", "validation", "dev", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The split parts, expanded to shard names, and what is excluded."""

    parts: dict[str, list[str]]
    exclude: list[str]
    where: str

    def shards_of(self, split_part: str) -> list[str]:
        """Return the shards of a split part in its order, without excluded ones; raises UnknownSplitError."""
        if split_part not in self.parts:
            known = ", ".join(self.parts) or "none"
            raise UnknownSplitError(f"{self.where}: no split part {split_part!r}. Known split parts: {known}.")
        excluded = set(self.exclude)
        return [shard for shard in self.parts[split_part] if shard not in excluded]

    def excluded_samples(self, shards: Sequence[str]) -> frozenset[tuple[str, str]]:
        """Return the excluded samples of these shards as (shard, key)."""
        if not self.exclude:
            return NOTHING  # one for all: each would take 216 bytes
        names = set(shards)
        samples: set[tuple[str, str]] = set()
        for entry in self.exclude:
            slash = entry.find("/")
            while slash >= 0:  # shard names and keys may both hold slashes: try every cut
                if entry[:slash] in names:
                    samples.add((entry[:slash], entry[slash + 1 :]))
                slash = entry.find("/", slash + 1)
        return frozenset(samples)

    def wrong_excludes(self, shards: Collection[str], exists: Callable[[str], bool]) -> str | None:
        """Return the error for entries of `exclude` that exclude nothing of a dataset of these shards, if any do.

        A tar that was never prepared, but is there, may be one.
        """
        names = {*shards, *(shard for part in self.parts.values() for shard in part)}
        wrong = [entry for entry in self.exclude if entry not in names and not self._names_sample(entry, names)]
        wrong = [entry for entry in wrong if not (entry.endswith(".tar") and exists(entry))]
        if not wrong:
            return None
        first = wrong[0]
        more = f" (and {len(wrong) - 1:,} more)" * (len(wrong) > 1)
        shard, tar, key = first.partition(".tar")
        hint = did_you_mean(shard + tar, names)
        if not hint or not tar:
            example = min(names, default="shard.tar")
            hint = f" Write a shard, {example!r}, or one of its samples, {f'{example}/{key[1:] or first}'!r}."
        what = f"the dataset has no shard {shard + tar!r}" if tar else "it names no shard"
        return f"{self.where}, field `exclude`: {first!r}{more} leaves nothing out: {what}.{hint}"

    def doubts(self, shards: Collection[str], exists: Callable[[str], bool] | None = None) -> list[str]:
        """Return warnings: shards both in `train` and in a part for evaluation, and shards of the dataset in no part.

        With `exists` the error of `wrong_excludes` is one: programs of energon ignore such entries.
        """
        wrong = self.wrong_excludes(shards, exists) if exists else None
        doubts = [wrong] if wrong else []
        trained = set(self.shards_of("train")) if "train" in self.parts else set()
        for part in _HELD_OUT if trained else ():
            both = sorted(trained.intersection(self.parts.get(part, ())))
            if both:
                doubts.append(
                    f"{self.where}: {len(both):,} of the shards of `train` are in `{part}`, too, which then tests what "
                    f"was trained on; the first is {both[0]!r}. Remove them from one of the two."
                )
        unread = sorted(set(shards).difference(self.exclude, *self.parts.values()))
        if unread:
            doubts.append(
                f"{self.where}: {len(unread):,} of {len(shards):,} shards are in no split part, so nothing reads them; "
                f"the first is {unread[0]!r}. Add them to a part, or to `exclude`."
            )
        return doubts

    @staticmethod
    def _names_sample(entry: str, shards: Collection[str]) -> bool:
        return any(entry[: slash.start()] in shards for slash in re.finditer("/", entry))


def read_info(store: Store) -> DatasetInfo:
    """Read `.info.json`, or the old `.info.yaml`; raises DatasetNotFoundError, NotPreparedError, MetadataError."""
    for name in (INFO_JSON, INFO_YAML):
        try:
            info = read_document(store, meta_path(name))
        except ShardMissingError:
            continue
        info.check_keys(("energon_version", "shard_counts"), required=("shard_counts",))
        counts = info.get("shard_counts")
        for shard, count in counts.mapping().items():
            if type(count) is not int or not 0 <= count < _MAX_COUNT:
                raise counts.get(shard).wrong("a number of samples")
        return DatasetInfo(shard_counts=counts.plain, energon_version=info.text("energon_version"))
    raise not_prepared(store.root)


def is_prepared(store: Store) -> bool:
    """Whether a dataset has an `.info.json`, or the old `.info.yaml`."""
    return any(store.exists(meta_path(name)) for name in (INFO_JSON, INFO_YAML))


def has_checksums(store: Store) -> bool:
    """Whether a dataset, which may not be prepared yet, has checksums."""
    try:
        return read_info(store).has_checksums
    except EnergonError:
        return False


def not_prepared(root: str) -> NotPreparedError:
    """Return the error for a folder without `.nv-meta`: it may hold tars to prepare, or files to convert first."""
    refuse_meta_path(root, root)
    if inner := sorted(path.parent.parent.name for path in Path(root).glob(f"*/{meta_path(INFO_JSON)}")):
        return NotPreparedError(f"{root}: not prepared itself, but {prepared_within(inner)}")
    if Path(root, PARTS_FOLDER).is_dir():
        return NotPreparedError(
            f"{root}: is not finished, since what wrote it was stopped. Run it again with the same source and options: "
            "`energon convert` continues where it was."
        )
    kinds = (
        "parquet or arrow files; copy others here first" if "://" in root else "pictures, JSON, CSV or parquet files"
    )
    far = ""
    if root.startswith(("http://", "https://")):
        far = " A web server cannot list its files, so parquet files there are given by their own URLs."
    return NotPreparedError(
        f"{root}: not prepared ({meta_path(INFO_JSON)} is missing). Run `energon prepare {root}` if it holds tars, or "
        f"`energon convert {root} OUT` if it holds {kinds}.{far}"
    )


def refuse_meta_path(folder: str, path: str) -> None:
    """Raise MetadataError for a path that is the folder `.nv-meta` of a dataset, or a file of that folder."""
    root, _, name = folder.rpartition("/")
    if name == META_FOLDER:
        raise MetadataError(f"{path}: this belongs to a prepared dataset: give its folder, {root}")


def prepared_within(folders: Sequence[str]) -> str:
    """Return a sentence about folders that are prepared datasets: how they are used together."""
    shown = [*folders[:_MOST_SHOWN], *["…"] * (len(folders) > _MOST_SHOWN)]
    datasets = ", ".join(f"{{path: {folder}}}" if folder != "…" else folder for folder in shown)
    return (
        f"{', '.join(shown)} in it {'is a prepared dataset' if len(folders) == 1 else 'are prepared datasets'}. Give "
        f"one of them, or a mix, a file mix.yaml beside them: `splits: {{train: {{datasets: [{datasets}]}}}}`."
    )


def renumbered(store: Store, counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the files to delete before the shards of a key index are numbered as in `counts`.

    None of them if every shard keeps its number, since readers with the old numbers then find the same samples.
    """
    try:
        kept = list(read_info(store).shard_counts) if store.exists(meta_path(INDEX_SQLITE)) else []
    except EnergonError:
        return ()
    return () if kept == list(counts)[: len(kept)] else (meta_path(INFO_JSON), meta_path(INFO_YAML))


def render_info(shard_counts: Mapping[str, int], *, checksums: bool = False) -> bytes:
    """Write `.info.json`."""
    version = FORMAT_VERSION + CHECKSUMS * checksums
    return json.dumps({"energon_version": version, "shard_counts": dict(shard_counts)}, indent=2).encode()


def read_splits(store: Store, split_config: str = DEFAULT_SPLIT_CONFIG) -> Splits:
    """Read a split file of `.nv-meta`; for the default name `split.json` will do as well. Raises MetadataError."""
    if not split_config.endswith((".yaml", ".json")):
        raise MetadataError(
            f"split_config={split_config!r}: expected the name of a .yaml or .json file in {META_FOLDER}."
        )
    rel = meta_path(split_config)
    try:
        config = read_document(store, rel)
    except ShardMissingError as error:
        if split_config == DEFAULT_SPLIT_CONFIG and store.exists(meta_path(SPLIT_JSON)):
            return read_splits(store, SPLIT_JSON)
        raise MetadataError(f"{store.url(rel)}: no such split file. Run `energon prepare {store.root}`.") from error
    config.check_keys(("split_parts", "exclude"), required=("split_parts",))
    parts = config.get("split_parts")
    return Splits(
        parts={name: _shards(parts.get(name)) for name in parts.mapping()},
        exclude=_shards(config.get("exclude")),
        where=config.where,
    )


def _shards(value: DocumentValue) -> list[str]:
    if value.plain is None:  # `val:` without a value is an empty list
        return []
    try:
        return [name for entry in value.strings() for name in expand_braces(entry)]
    except ValueError as error:
        raise MetadataError(f"{value.at}: {error}.") from error


def render_splits(parts: Mapping[str, Sequence[str]], *, exclude: Sequence[str] = ()) -> bytes:
    """Write `split.yaml`, runs of shards collapsed to brace expressions."""
    collapsed = {name: collapse_braces(shards) for name, shards in parts.items()}
    return dump_yaml({"split_parts": collapsed, "exclude": list(exclude)})

"""The split part of a file, found in its name and folders by the rules of the `datasets` library.

The first of these that any file follows counts for all of them (`load_dataset` does not take the others):

1. `data/NAME-00000-of-00004.parquet`: NAME is the split, whatever it is called.
2. A folder on the way is called `train`, `training`; `validation`, `valid`, `val`, `dev`; `test`, `testing`, `eval`,
   `evaluation`, or that with something before or after it: `cats-train`, `test_2`. Between them is one of `-._ ` or a
   digit.
3. The file itself is called so.

`is_test=true` or `quality=bad` on the way, of a table in partitions, and `rejected.parquet` beside others are errors,
and so is a file that only the card of a dataset (`README.md`) says is held out.

Files in folders whose names begin with `_` (Spark's `_temporary`), and hidden ones, are never taken. What these rules
would learn although a name says in another way that it is held out (`Test`, `testset`, a file `test.parquet` in the
folder `train`) is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

from energon_bridge.core.errors import MetadataError, SourceError
from energon_bridge.core.format.documents import parse_document
from energon_bridge.models.conversations.withheld import (
    is_held_out,
    is_rejecting,
    says_held_out as says_held_out,
    split_columns,
)

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SPLIT_ORDER = ("train", "val", "test")

_WORD = re.compile(rf"(?:^|(?<=[-._ 0-9]))({'|'.join(SPLIT_NAMES)})(?=[-._ 0-9]|$)")
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFiles:
    """Files with their split parts, in order. The part is `""` if no name has one: then any part has all files.

    `left_out` are files whose names have no part, though others' have.
    """

    files: list[tuple[str, PurePath]]
    left_out: list[PurePath]


def split_files(names: Iterable[PurePath], where: str) -> SplitFiles:
    """Return the split parts that the names of files below a folder tell; raises SourceError for doubtful ones."""
    names = sorted(names)
    seen = [name for name in names if not _is_hidden(name)]
    apart = [name for name in seen if any(map(_is_apart, (*name.parts[:-1], name.stem)))]
    if apart and len(apart) < len(seen):
        raise _doubtful(where, apart[0], "it would be taken as the others are", "held out or rejected")
    rules: tuple[Callable[[PurePath], set[str]], ...]
    rules = (_of_shard, lambda name: folder_splits(name.as_posix()), lambda name: splits_in(name.name))
    by_rule = ({name: rule(name) for name in seen} for rule in rules)
    parts = next(({name: splits for name, splits in of.items() if splits} for of in by_rule if any(of.values())), {})
    if not parts:
        held_out = [name for name in seen if says_held_out(name)]
        if held_out and len(held_out) < len(seen):
            raise _doubtful(where, held_out[0], "it and the other files are of no split")
        return SplitFiles(files=[("", name) for name in seen], left_out=[name for name in names if name not in seen])
    left_out = [name for name in names if name not in parts]
    _check_clear(parts, [name for name in left_out if name in seen], where)
    called = named_parts({part for (part,) in parts.values()})
    files = [(called[part], name) for name, (part,) in parts.items()]
    return SplitFiles(files=sorted(files, key=lambda item: (*part_order(item[0]), item[1])), left_out=left_out)


def check_card_in(folder: Path, files: Sequence[tuple[str, PurePath]]) -> list[str]:
    """Return what `check_card` does for the card in a folder, if there is one; raises what it raises."""
    card = folder / "README.md"
    return check_card(card.read_text("utf-8", "replace"), files, str(folder)) if card.is_file() else []


def check_card(card: str, files: Sequence[tuple[str, PurePath]], where: str) -> list[str]:
    """Return the configurations that the card of a dataset on the hub has for these files, if they are several.

    It names their files: `configs: [{config_name: …, data_files: [{split: test, path: b.parquet}]}]`. Raises
    SourceError for a file that it says is held out, and no name says so.
    """
    head = re.match(r"---[ \t]*\n(.*?)\n---", card, re.DOTALL)
    try:
        configs = parse_document(head[1].encode(), where=f"{where}/README.md")["configs"] if head is not None else []
        pairs = [(one["config_name"], pair) for one in configs for pair in _pairs_of(one["data_files"])]
        named = [(config, split, path) for config, (split, paths) in pairs for path in paths]
    except (MetadataError, TypeError, KeyError, IndexError, ValueError):  # of another form
        return []
    found: list[tuple[str, str, PurePath]] = []
    for config, split, path in named:
        found += [(config, split, name) for part, name in files if fnmatch(name.as_posix(), path)]
    held_out = {name for _, split, name in found if says_held_out(split)} - {name for part, name in files if part}
    if held_out and len(held_out) < len(files):
        raise _doubtful(where, min(held_out), "only the README.md says so")
    of = {config: {name for other, _, name in found if other == config} for config, *_ in found}
    return [] if not of or set.intersection(*of.values()) else sorted(map(str, of))


def _pairs_of(files: Any) -> list[tuple[str, list[str]]]:
    """Return the splits of a configuration, each with the patterns of its files."""
    if isinstance(files, str) or not isinstance(files[0], Mapping):
        return [("train", [files] if isinstance(files, str) else files)]
    paths = [(one["split"], one["path"]) for one in files]
    return [(split, [path] if isinstance(path, str) else path) for split, path in paths]


def _is_apart(folder: str) -> bool:
    """Return whether the name of a file or folder says that its rows were rejected, or that of a partition."""
    if _REJECTED.fullmatch(folder.lower()):
        return True
    column, is_one, value = folder.partition("=")
    return bool(is_one) and (
        (bool(split_columns((column,))) and bool(is_held_out(column, value))) or is_rejecting(column, value)
    )


_REJECTED = re.compile(r"(?:.*[-_ .])?(?:rejected|invalidated|discarded)")  # invalidated.tsv of Common Voice


def _is_hidden(name: PurePath) -> bool:
    """Return whether a file is none of the data: hidden, half-written, or about the others."""
    return any(part.startswith(".") for part in name.parts) or any(part.startswith("_") for part in name.parts[:-1])


def _check_clear(parts: Mapping[PurePath, set[str]], others: Sequence[PurePath], where: str) -> None:
    """Raise SourceError for a file of two splits, or one that seems to be held out but would be learned or left out."""
    for name, splits in parts.items():
        if len(splits) > 1:
            raise _doubtful(where, name, f"its path tells the splits {' and '.join(sorted(splits))}")
        if says_held_out(name) and not any(map(says_held_out, splits)):
            raise _doubtful(where, name, f"it would be of the split {', '.join(splits)}")
    if held_out := next((name for name in others if says_held_out(name)), None):
        raise _doubtful(where, held_out, "it is not taken, because other names tell the split in another way")


def part_order(part: str) -> tuple[int, str]:
    """Return the sort key of a split part: train, val, test, then others by name."""
    return (SPLIT_ORDER.index(part) if part in SPLIT_ORDER else len(SPLIT_ORDER)), part


def named_parts(names: Iterable[str]) -> dict[str, str]:
    """Return the split part of each split of a dataset: our name of it, or its own if another split has that."""
    names = list(names)
    ours = [SPLIT_NAMES.get(name, name) for name in names]
    return {name: part if ours.count(part) == 1 else name for name, part in zip(names, ours, strict=True)}


def folder_splits(name: str) -> set[str]:
    """Return the split parts that the folders on the way to a file tell."""
    return {part for folder in name.split("/")[:-1] for part in splits_in(folder)}


def folder_split(name: str) -> tuple[str, int] | None:
    """Return the split part in the name of the first such folder above a file, and that folder's depth (1: the top)."""
    for depth, folder in enumerate(name.split("/")[:-1], start=1):
        if splits := splits_in(folder):
            return min(splits, key=SPLIT_ORDER.index), depth
    return None


def names_class(folder: str, others: Iterable[str]) -> bool:
    """Return whether a folder whose name has the word of a split is one of a class beside others: `test tube`.

    The rest of its name says something, and is not the name of another folder, as of `cats` beside `cats-test`.
    """
    rest = _rest(folder)
    return bool(rest) and not any(_rest(other) == rest for other in others if other != folder)


def _rest(folder: str) -> frozenset[str]:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", folder).lower()
    without = re.sub(r"[a-z]*(?:held[-_ ]?out|holdout)[a-z]*", "", words)
    return frozenset(word for word in re.findall(r"[^\W\d_]+", without) if not _NO_CLASS.fullmatch(word))


_NO_CLASS = re.compile(
    rf"({'|'.join(SPLIT_NAMES)})(s|set|data|split)?|(im(age|g)|picture|photo|video|audio|sound|clip|file|sample|folder)s?"
    r"|data(set)?s?|sets?|parts?|splits?|my|our|the|all|new|old|final|raw|full|small|large|public|private|samples?"
)


def _of_shard(name: PurePath) -> set[str]:
    found = _SHARD.fullmatch(name.name)
    return {found[1]} if found and name.parts[:-1] == ("data",) else set()


def name_split(name: str) -> str | None:
    """Return the split part in the name of a list, or in the value of a column; None if there is none, or several."""
    splits = splits_in(name.strip().lower())
    return splits.pop() if len(splits) == 1 else None


def splits_in(word: str) -> set[str]:
    """Return the split parts whose names are words of a text."""
    return {SPLIT_NAMES[found[1]] for found in _WORD.finditer(word)}


def _doubtful(where: str, name: PurePath, why: str, what: str = "held out") -> SourceError:
    return SourceError(
        f"{where}: {name} seems to be {what}, but {why}. Rename it (`test`, `val`, `train` as a word of its own, in "
        "the names of all files or of all folders), move it away, or give the folder or file of each split by itself."
    )

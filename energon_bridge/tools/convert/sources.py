"""Sources of `energon convert`: what a folder or file holds, by its kind or by a look at it."""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    SourceError,
)
from energon_bridge.core.storage import open_store
from energon_bridge.tools.convert.arrow import ArrowSource, check_format, is_saved, open_parquet, open_saved
from energon_bridge.tools.convert.group_splits import values_of
from energon_bridge.tools.convert.left_out import (
    beside_list,
    beside_tables,
    beside_tars,
    lists_below,
)
from energon_bridge.tools.convert.lists import TableSource, open_table
from energon_bridge.tools.convert.media_folders import FolderSource
from energon_bridge.tools.convert.rows import (
    Layout,
    Row,
    Source,
    SourceSample,
)
from energon_bridge.tools.convert.speech import (
    PROMPT,
    TRANSCRIPTS,
    SpeechSource,
    as_speech,
    open_kaldi,
    open_librispeech,
)
from energon_bridge.tools.convert.splits import SPLIT_ORDER, check_card_in, folder_split, name_split
from energon_bridge.tools.convert.tars import MixedTars, TarSource

KINDS = ("table", "pairs", "classes", "lists", "parquet", "huggingface", "kaldi", "librispeech", "webdataset", "mix")
_logger = logging.getLogger(__name__)
_TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")
_LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_KALDI = "wav.scp"


def open_source(
    path: Path,
    *,
    kind: str | None = None,
    media: Path | None = None,
    numbered: bool = False,
    num_workers: int = 1,
    prompt: str | None = None,
    answer: str | None = None,
) -> Source:
    """Open a source of `energon convert`, of the given or the detected kind; raises the errors of its reader.

    `prompt` is the question about each sound of NeMo's manifests and Kaldi's folders, `answer` another column of lists
    of speech with what is learned of each.
    """
    if not path.exists():
        return _far(path, kind, media)
    if media is not None and not media.is_dir():
        raise ConfigurationError(f"--media {media}: no such folder.")
    folder = path
    by_names = kind != "table"
    if kind == "table" and path.is_dir():
        found = _look_for_list(path)
        if found is None:
            raise SourceError(f"{path}: --kind table is for a list, and this folder has none ({', '.join(_TABLES)}).")
        kind, path = found
    kind, path = (kind, path) if kind is not None else _look(path)
    readers: dict[str, Callable[[], Source]] = {
        "table": lambda: _open_list(path, media, prompt, answer, by_names=by_names),
        "lists": lambda: ListsSource(path, media, prompt, answer),
        "kaldi": lambda: open_kaldi(path, media, prompt or PROMPT),
        "librispeech": lambda: open_librispeech(path, media, prompt or PROMPT),
        "pairs": lambda: FolderSource(path, as_classes=False),
        "classes": lambda: FolderSource(path, as_classes=True),
        "folder": lambda: FolderSource(path, as_classes=None),
        "parquet": lambda: open_parquet(path, media),
        "huggingface": lambda: open_saved(path, media),
        "mix": lambda: MixedTars(path, numbered=numbered),
        "webdataset": lambda: TarSource(path, numbered=numbered, num_workers=num_workers),
    }
    source = readers[kind]()
    if prompt is not None and getattr(source, "prompt", None) is None:
        raise ConfigurationError(f"--prompt is for speech, but {path} is a {source.kind}: leave it out.")
    if answer is not None and getattr(source, "text", answer) != answer:
        raise ConfigurationError(f"--field answers={answer}: a {source.kind} has its texts in files: leave it out.")
    if len(source) == 0:
        raise SourceError(f"{path}: has no samples ({source.kind}).")
    if folder.is_dir() and isinstance(source, TarSource):
        source.left_out = beside_tars(folder, source.empty)
    elif folder.is_dir() and kind == "table" and isinstance(source, TableSource):
        source.left_out = beside_list(folder, path.name, source)
    elif folder.is_dir() and isinstance(source, ArrowSource):
        source.left_out = beside_tables(folder, source)
    return source


def _far(path: Path, kind: str | None, media: Path | None) -> Source:
    """Open the tables behind a URL, of which `Path` has left one slash."""
    scheme, colon, rest = str(path).partition(":/")
    if not colon or "/" in scheme:
        raise DatasetNotFoundError(f"{path}: no such file or folder. Check the path.")
    url = f"{scheme}://{rest}"
    from energon_bridge.tools.convert.table_dataset import has_tables, open_far_source

    if kind not in (None, "parquet", "huggingface") or media is not None or not has_tables(url):
        raise DatasetNotFoundError(
            f"{url}: only parquet and arrow files can be converted from a URL, with the media in them or beside them. "
            "Check the URL, or download the files first."
        )
    return open_far_source(url)


def _look(path: Path) -> tuple[str, Path]:
    """Return the detected kind of a path, and the file that lists the samples if a folder has one."""
    suffix = path.suffix.lower()
    if path.is_file():
        if suffix in _TABLES:
            return "table", path
        kinds = {".parquet": "parquet", ".arrow": "parquet", ".tar": "webdataset", ".yaml": "mix"}
        if suffix not in kinds:
            known = ", ".join((*_TABLES, *kinds))
            raise SourceError(
                f"{path}: cannot convert a {suffix or 'file without a suffix'}. Supported are {known} and folders."
            )
        return kinds[suffix], path
    if is_saved(open_store(path)):
        return "huggingface", path
    if (path / _KALDI).exists():
        return "kaldi", path
    names = []
    for folder, _, files in os.walk(path):
        check_format(folder, files)
        names += [name for name in files if not name.startswith(".")]
    if any(name.endswith(TRANSCRIPTS) for name in names):
        return "librispeech", path
    below = _folders_with_lists(path)
    if below and not any(name.endswith(".parquet") and name not in _LISTS for name in names):
        return "lists", path
    for suffix, kind in ((".tar", "webdataset"), (".parquet", "parquet")):
        if any(name.endswith(suffix) for name in names):
            return kind, path
    return _look_for_list(path) or ("folder", path)


def _look_for_list(path: Path) -> tuple[str, Path] | None:
    """Return the kind and path of the list in a folder, or of those of its splits; None: there is none.

    Raises SourceError for a list that may be one, or not.
    """
    for name in _LISTS:
        if (path / name).exists():
            return "table", path / name
    if _lists_of_splits(path):
        return "lists", path
    if tables := lists_below(path):
        raise SourceError(
            f"{path}: convert the folder, or the list {tables[0]} in it? Pass the file, {path / tables[0]} "
            "(--media: the folder that its paths are relative to), or --kind pairs or --kind classes. Lists of splits "
            "are taken together if all are called so: train.csv, val.csv, test.csv."
        )
    return None


def _lists_of_splits(root: Path) -> list[str]:
    """Return the lists in a folder, if there are several, and the name of each tells its split."""
    names = lists_below(root)
    return (
        sorted(names)
        if len(names) > 1 and all("/" not in name and name_split(Path(name).stem) for name in names)
        else []
    )


def _open_list(
    path: Path, media: Path | None, prompt: str | None, answer: str | None, *, by_names: bool = True
) -> Source:
    """Open a table, or a list of speech: a NeMo manifest or, `by_names`, one that its other columns tell."""
    source = open_table(path, media)
    return as_speech(source, media, prompt or PROMPT, by_names=by_names, answer=answer) or source


# Lists in folders -----------------------------------------------------------------------------------------------------
#
# Imagefolders of Hugging Face with metadata for each split, folders of Kaldi, and lists that are called train, val and
# test: each list is a source of its own, and its paths are relative to its folder.


def _folders_with_lists(root: Path) -> list[Path]:
    """Return the lists in the folders below a folder, one of each, not those in that folder itself."""
    found = []
    for folder, _, files in sorted(os.walk(root)):
        name = next((name for name in (_KALDI, *_LISTS) if name in files), None)
        if name is not None and Path(folder) != root:
            found.append(Path(folder, name))
    return found


class ListsSource:
    """The rows of several lists, split by split. Keys begin with the folder or the name of their list."""

    def __init__(self, root: Path, media: Path | None, prompt: str | None, answer: str | None = None) -> None:
        self.where = str(root)
        by_folder = _folders_with_lists(root)
        paths = by_folder or [root / name for name in _lists_of_splits(root)]
        if not paths:
            raise SourceError(
                f"{root}: no folder below it has {', '.join(_LISTS)} or {_KALDI}, nor has it lists called train, val "
                "and test."
            )
        names = [(path.parent if by_folder else path.with_suffix("")).relative_to(root).as_posix() for path in paths]
        lists = [(self._part(name, path, by_folder), name, path) for name, path in zip(names, paths, strict=True)]
        without = [path.parent for part, _, path in lists if part is None]
        if without and len(without) < len(lists):
            raise SourceError(
                f"{root}: the name of {without[0]} is of no split, and those of other folders are. Call it train, val "
                "or test, or convert each folder by itself."
            )
        lists.sort(key=lambda one: (0 if one[0] is None else SPLIT_ORDER.index(one[0]), one[2].parent, one[1]))
        check_card_in(root, [(part or "", path.relative_to(root)) for part, _, path in lists])
        self._sources = [self._open(path, media, prompt, answer) for _, _, path in lists]
        where = "lists in folders" if by_folder else "lists"
        self.kind = f"{len(lists)} {where}, each {self._sources[0].kind}"
        self.prompt = next((one.prompt for one in self._sources if isinstance(one, SpeechSource)), None)
        texts = {one.text for one in self._sources if isinstance(one, SpeechSource)}
        self.text = min(texts - {answer}, default=answer)  # another, if any
        self._starts = np.cumsum([0, *map(len, self._sources)]).tolist()
        self._names = [name for _, name, _ in lists]
        self.segments = tuple(
            (part or "", name, len(source)) for (part, name, _), source in zip(lists, self._sources, strict=True)
        )
        counts = Counter[str]()
        for part, _, count in self.segments:
            counts[part] += count
        self.split_parts = () if without else tuple(counts.items())
        self.left_out: tuple[str, ...] = ()
        for (_, name, path), source in zip(lists, self._sources, strict=True) if by_folder else ():
            beside = beside_list(path.parent, path.name, source) if path.name in _LISTS else source.left_out
            self.left_out += tuple(f"{name}: {one}" for one in beside)

    @staticmethod
    def _part(name: str, path: Path, by_folder: Sequence[Path]) -> str | None:
        if not by_folder:
            return name_split(path.stem)
        found = folder_split(f"{name}/list".lower())
        return None if found is None else found[0]

    @staticmethod
    def _open(path: Path, media: Path | None, prompt: str | None, answer: str | None) -> Source:
        if path.name == _KALDI:
            return open_kaldi(path.parent, media, prompt or PROMPT)
        if path.suffix == ".parquet":
            return open_parquet(path, media)
        return _open_list(path, media, prompt, answer)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def groups(self) -> list[object] | None:
        """Return what the rows of each list are kept together by, if all lists have something."""
        found = [getattr(source, "groups", None) or () for source in self._sources]
        return [name for names in found for name in names] if all(found) else None

    @property
    def grouped_by(self) -> str | None:
        """Return the column of what the rows are kept together by."""
        return next((by for one in self._sources if (by := getattr(one, "grouped_by", None))), None)

    @cached_property
    def late(self) -> tuple[int, ...]:
        """Return the rows with columns that the first rows of their list leave empty."""
        lists = zip(self._starts, self._sources, strict=False)
        return tuple(start + number for start, source in lists for number in getattr(source, "late", ()))

    def _find(self, number: int) -> tuple[int, int]:
        which = bisect_right(self._starts, number) - 1
        return which, number - self._starts[which]

    def column(self, name: str) -> Iterator[object]:
        """Yield the value of a column in each row of each list."""
        return (value for source in self._sources for value in values_of(source, name))

    def entry(self, number: int) -> Mapping[str, Any]:
        """Return a row as its list has it; raises SourceError."""
        which, at = self._find(number)
        source = self._sources[which]
        return source.entry(at) if isinstance(source, TableSource) else {}

    def row(self, number: int) -> Row:
        """Return a row of one of the lists."""
        which, at = self._find(number)
        return self._sources[which].row(at)

    def sample(self, number: int, layout: Layout) -> SourceSample:
        """Return a sample, not read yet, with a key of its own, which stays when any of the lists grows."""
        which, at = self._find(number)
        sample = self._sources[which].sample(at, layout)
        own = f"{at:09d}" if layout.key is None else sample.key
        return replace(sample, key=f"{self._names[which].replace('.', '_')}/{own}")  # type: ignore[type-var]

    def propose(self) -> Layout:
        """Propose a layout from the first list."""
        return self._sources[0].propose()

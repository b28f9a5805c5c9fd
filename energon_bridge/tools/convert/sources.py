"""Sources of `energon convert`: detect the kind of a source; read folders, WebDatasets and mixes."""

from __future__ import annotations

import json
import logging
import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_bridge.core.errors import (
    ConfigurationError,
    CorruptShardError,
    DatasetNotFoundError,
    DuplicateKeyError,
    SourceError,
)
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.documents import read_document
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.format.nvmeta import DEFAULT_DATASET_CONFIG, is_prepared, meta_path, read_splits
from energon_bridge.core.format.parallel import map_shards
from energon_bridge.core.format.tar import Follow, parse_sample
from energon_bridge.core.format.tar_index import ShardScan, other_parts, scan_tar
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.prepare.split import find_shards
from energon_bridge.core.samples import CrudeSample
from energon_bridge.core.storage import LocalStore, Store, open_store
from energon_bridge.tools.convert.arrow import ArrowSource, is_saved, open_parquet, open_saved
from energon_bridge.tools.convert.left_out import (
    TEXTS,
    beside_list,
    beside_media,
    beside_tables,
    beside_tars,
    extension_of,
    files_below,
    lists_below,
    only,
    stem_of,
)
from energon_bridge.tools.convert.lists import TableSource, caption_of, open_table
from energon_bridge.tools.convert.rows import (
    FileRef,
    Layout,
    Row,
    RowSample,
    Source,
    SourceSample,
    TextRef,
    first_rows,
    lay_out,
)
from energon_bridge.tools.convert.speech import PROMPT, SpeechSource, as_speech, open_kaldi
from energon_bridge.tools.convert.splits import SPLIT_ORDER, folder_split, says_held_out

if TYPE_CHECKING:
    from energon_bridge.core.mix.leaves import OpenLeaf

KINDS = ("table", "pairs", "classes", "lists", "parquet", "huggingface", "kaldi", "webdataset", "mix")
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
) -> Source:
    """Open a source of `energon convert`, of the given or the detected kind; raises the errors of its reader.

    `prompt` is the question about each sound of NeMo's manifests and Kaldi's folders.
    """
    if not path.exists():
        return _far(path, kind, media)
    if media is not None and not media.is_dir():
        raise ConfigurationError(f"--media {media}: no such folder.")
    folder = path
    kind, path = (kind, path) if kind is not None else _look(path)
    readers: dict[str, Callable[[], Source]] = {
        "table": lambda: _open_list(path, media, prompt),
        "lists": lambda: ListsSource(path, media, prompt),
        "kaldi": lambda: open_kaldi(path, media, prompt or PROMPT),
        "pairs": lambda: FolderSource(path, as_classes=False),
        "classes": lambda: FolderSource(path, as_classes=True),
        "folder": lambda: FolderSource(path, as_classes=None),
        "parquet": lambda: open_parquet(path, media),
        "huggingface": lambda: open_saved(path, media),
        "mix": lambda: MixSource(path, numbered=numbered),
        "webdataset": lambda: TarSource(path, numbered=numbered, num_workers=num_workers),
    }
    source = readers[kind]()
    if prompt is not None and getattr(source, "prompt", None) is None:
        raise ConfigurationError(f"--prompt is for speech, but {path} is a {source.kind}: leave it out.")
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
    from energon_bridge.tools.convert.dataset import has_tables, open_far_source

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
        kinds = {".parquet": "parquet", ".tar": "webdataset", ".yaml": "mix"}
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
    names = [name for _, _, files in os.walk(path) for name in files if not name.startswith(".")]
    below = _folders_with_lists(path)
    if below and not any(name.endswith(".parquet") and name not in _LISTS for name in names):
        return "lists", path
    for suffix, kind in ((".tar", "webdataset"), (".parquet", "parquet")):
        if any(name.endswith(suffix) for name in names):
            return kind, path
    for name in _LISTS:
        if (path / name).exists():
            return "table", path / name
    if tables := lists_below(path):
        raise SourceError(
            f"{path}: convert the folder, or the list {tables[0]} in it? Pass the file, {path / tables[0]} "
            "(--media: the folder that its paths are relative to), or --kind pairs or --kind classes."
        )
    return "folder", path


def _open_list(path: Path, media: Path | None, prompt: str | None) -> Source:
    """Open a table, or a NeMo manifest, which is one of sounds."""
    source = open_table(path, media)
    return as_speech(source, media, prompt or PROMPT) or source


# Lists in folders -----------------------------------------------------------------------------------------------------
#
# Imagefolders of Hugging Face with metadata for each split, and folders of Kaldi: each list is a source of its own, and
# its paths are relative to its folder.


def _folders_with_lists(root: Path) -> list[tuple[Path, str]]:
    """Return the folders below a folder that have a list, not that folder itself, and the names of the lists."""
    found = []
    for folder, _, files in sorted(os.walk(root)):
        name = next((name for name in (_KALDI, *_LISTS) if name in files), None)
        if name is not None and Path(folder) != root:
            found.append((Path(folder), name))
    return found


class ListsSource:
    """The rows of the lists in the folders below a folder, split by split."""

    def __init__(self, root: Path, media: Path | None, prompt: str | None) -> None:
        self.where = str(root)
        lists = [(self._part(root, folder), folder, name) for folder, name in _folders_with_lists(root)]
        if not lists:
            raise SourceError(f"{root}: no folder below it has {', '.join(_LISTS)} or {_KALDI}.")
        without = [folder for part, folder, _ in lists if part is None]
        if without and len(without) < len(lists):
            raise SourceError(
                f"{root}: the name of {without[0]} is of no split, and those of other folders are. Call it train, val "
                "or test, or convert each folder by itself."
            )
        lists.sort(key=lambda one: (0 if one[0] is None else SPLIT_ORDER.index(one[0]), one[1]))
        self._sources = [self._open(folder, name, media, prompt) for _, folder, name in lists]
        self.kind = f"{len(lists)} lists in folders, each {self._sources[0].kind}"
        self.prompt = next((one.prompt for one in self._sources if isinstance(one, SpeechSource)), None)
        self._starts = np.cumsum([0, *map(len, self._sources)]).tolist()
        counts = Counter[str]()
        for (part, _, _), source in zip(lists, self._sources, strict=True):
            counts[part or ""] += len(source)
        self.split_parts = () if without else tuple(counts.items())
        self.left_out: tuple[str, ...] = ()
        for (_, folder, name), source in zip(lists, self._sources, strict=True):
            beside = beside_list(folder, name, source) if name in _LISTS else source.left_out
            self.left_out += tuple(f"{folder.relative_to(root)}: {one}" for one in beside)

    @staticmethod
    def _part(root: Path, folder: Path) -> str | None:
        found = folder_split((folder.relative_to(root) / "list").as_posix().lower())
        return None if found is None else found[0]

    @staticmethod
    def _open(folder: Path, name: str, media: Path | None, prompt: str | None) -> Source:
        if name == _KALDI:
            return open_kaldi(folder, media, prompt or PROMPT)
        if name.endswith(".parquet"):
            return open_parquet(folder / name, media)
        return _open_list(folder / name, media, prompt)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, number: int) -> tuple[Source, int]:
        at = bisect_right(self._starts, number) - 1
        return self._sources[at], number - self._starts[at]

    def row(self, number: int) -> Row:
        """Return a row of one of the lists."""
        source, at = self._find(number)
        return source.row(at)

    def sample(self, number: int, layout: Layout) -> SourceSample:
        """Return a sample, not read yet, with a key of its own."""
        source, at = self._find(number)
        return replace(source.sample(at, layout), key=f"{number:09d}")  # type: ignore[type-var]

    def propose(self) -> Layout:
        """Propose a layout from the first list."""
        return self._sources[0].propose()


# Folders --------------------------------------------------------------------------------------------------------------
#
# Pictures with captions beside them, a folder for each class, or pictures alone. Folders such as `train`, `val` and
# `test` are a split, if all files are in one. Keys are paths below the folder, without the extension.


class FolderSource:
    """The media files below a folder, in the order of their paths."""

    def __init__(self, root: Path, *, as_classes: bool | None = None) -> None:
        self.where = str(root)
        self._root = root
        files, beside = files_below(root)
        self._found = {name: extension for name in files if (extension := extension_of(root, name))}
        media = [name for name in files if kind_by_name(f".{self._found.get(name)}") is not None]
        if not media:
            there = f"no file that lists any.{only(files, beside, self._found)}"
            raise SourceError(f"{root}: no images, videos or sound below this folder, and {there}")
        self._texts: dict[str, list[str]] = {}
        for name in files:
            if f".{self._found.get(name)}" in TEXTS:
                self._texts.setdefault(stem_of(name), []).append(name)
        placed = _splits(root, media)
        if placed:
            media.sort(key=lambda name: (SPLIT_ORDER.index(placed[name][0]), name))
        self.split_parts: tuple[tuple[str, int], ...] = tuple(
            Counter(placed[name][0] for name in media if placed).items()
        )
        self._depths = {name: depth for name, (_, depth) in placed.items()}
        self._media = media
        has_texts = any(stem_of(name) in self._texts for name in media)
        stray = [name for name in media if self._class_of(name) is None]
        names = sorted({name for name in map(self._class_of, media) if name is not None})
        if as_classes is None:
            as_classes = not has_texts and len(names) > 1
        if as_classes and stray:
            raise SourceError(
                f"{root}: {len(stray)} of {len(media)} files are not in the folder of a class, such as {stray[0]}; "
                f"others are in {', '.join(names[:5]) or 'none'}. Move what has no class into the folder of one, or "
                "away; --kind pairs takes all files without classes."
            )
        self._classes = {name: number for number, name in enumerate(names)} if as_classes else {}
        self._has_texts = has_texts and not as_classes
        self.kind = "folder of classes" if as_classes else "folder of pairs" if has_texts else "folder of media"
        stems_seen = Counter(os.path.splitext(name)[0].replace(".", "_") for name in media)
        self._twice = {stem for stem, count in stems_seen.items() if count > 1}
        self.left_out = beside_media(files, beside, self._found, self._texts if self._has_texts else {})

    def __len__(self) -> int:
        return len(self._media)

    def _class_of(self, name: str) -> str | None:
        """Return the folder that a file is in, below that of its split; None if there is none."""
        inside = name.split("/")[self._depths.get(name, 0) :]
        return inside[0] if len(inside) > 1 else None

    def row(self, number: int) -> Row:
        """Return a file with its caption or class."""
        name = self._media[number]
        if (shown := name.encode("utf-8", "backslashreplace").decode()) != name:
            raise SourceError(f"{self._root}/{shown}: the name is not UTF-8. Rename the file: convmv can.")
        stem = os.path.splitext(name)[0]
        extension = self._found[name]
        path = f"{self._root}/{name}"
        files: dict[str, FileRef] = {"image": FileRef(path, extension)}
        values: dict[str, object] = {}
        if self._classes:
            label = self._class_of(name)
            assert label is not None
            values = {"label": self._classes[label], "label_name": label}
        elif self._has_texts:
            text = self._caption_name(name)
            kind = "json" if self._found[text] == "json" else "txt"
            files["json" if kind == "json" else "caption"] = TextRef(f"{self._root}/{text}", kind)
        key = stem.replace(".", "_")
        if key in self._twice:
            key += f"-{extension}-{number}"
        return Row(where=path, values=values, files=dict(files), key=key)

    def _caption_name(self, name: str) -> str:
        """Return the caption of a file: its own in the same Unicode form, else that in another; raises SourceError."""
        stem = os.path.splitext(name)[0]
        beside = self._texts.get(stem_of(name), [])
        same = [text for text in beside if os.path.splitext(text)[0] == stem] or beside
        if not same:
            raise SourceError(f"{self._root}/{name}: no caption beside it ({Path(stem).name}.txt).")
        same.sort(key=lambda text: TEXTS.index(f".{self._found[text]}"))
        if len(same) > 1 and self._found[same[0]] == self._found[same[1]]:
            raise SourceError(f"{self._root}/{name}: has two captions, {same[0]} and {same[1]}. Move one of them away.")
        return same[0]

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample, not read yet."""
        return lay_out(self.row(number), layout, number)

    def propose(self) -> Layout:
        """Propose a layout from the first files."""
        bare = frozenset(["image", "caption", "json"])
        if any(kind_by_name(f".{self._found[name]}") != "image" for name in self._media):
            return Layout(sample_type="CrudeSample", bare=bare)
        if self._classes:
            fields = {"image": "image", "label": "label", "label_name": "label_name"}
            return Layout(sample_type="ImageClassificationSample", fields=fields, bare=bare)
        if self._has_texts:
            is_json = all(kind == "json" for kind in self._caption_kinds())
            caption = self._caption_access() if is_json else "caption"
            if caption is None:
                return Layout(sample_type="CrudeSample", bare=bare)
            return Layout(sample_type="CaptioningSample", fields={"image": "image", "caption": caption}, bare=bare)
        return Layout(sample_type="ImageSample", fields={"image": "image"}, bare=bare)

    def _caption_kinds(self) -> Iterator[str]:
        """Yield the extension of the caption of each file that has one."""
        for name in self._media:
            with suppress(SourceError):
                yield self._found[self._caption_name(name)]

    def _caption_access(self) -> str | None:
        """Return where JSON beside media has the caption, judging by the first one; None if nowhere."""
        for row in first_rows(self):
            with suppress(SourceError):
                content = json.loads(row.files["json"].read())  # type: ignore[union-attr]
                name = caption_of(content) if isinstance(content, dict) else None
                return None if name is None else f"json[{name}]"
        return None


def _splits(root: Path, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return split part and depth of the folders of a split for each file, nothing if they have none.

    Raises SourceError if some folders say that their files are held out, but not all files are in those of a split.
    """
    found = {name: folder_split(name.lower()) for name in names}
    if any(split is None for split in found.values()):
        held_out = next((name for name in names if says_held_out(name.rpartition("/")[0])), None)
        other = next((name for name in names if not says_held_out(name.rpartition("/")[0])), None)
        if held_out is not None and other is not None:
            raise SourceError(
                f"{root}: {held_out} seems to be held out, but not all files are in folders of a split, such as "
                f"{other}. Put all into folders called train, val and test, or convert each split by itself."
            )
        return {}
    return {name: split for name, split in found.items() if split is not None}


# WebDatasets ----------------------------------------------------------------------------------------------------------
#
# To be sharded or shuffled again: samples keep their keys, parts and bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSample:
    """The bytes of a sample in a tar."""

    key: str
    where: str
    store: Store
    shard: str
    offset: int
    length: int
    fields: Mapping[str, str]
    follow: Follow | None = None
    num_rejected: int = 0

    def sizes(self) -> list[tuple[str, int]]:
        return [(name, len(data)) for name, data in self.read()[0]]

    def row(self) -> Row:
        """Return its parts as columns, for people to look at."""
        parts = ", ".join(f"{name} ({size:,} bytes)" for name, size in self.sizes())
        return Row(where=self.where, values={"parts": parts}, files={}, key=self.key)

    def mark(self) -> str:
        path = Path(self.store.url(self.shard))
        stat = path.stat() if isinstance(self.store, LocalStore) and path.exists() else None
        changed = f"{stat.st_size} {stat.st_mtime_ns}" if stat is not None else ""
        return f"{self.key}\0{self.shard} {self.offset} {self.length} {changed}"

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts unchanged; raises SourceError for one that is not a file, or there twice."""
        data = self.store.read_range(self.shard, self.offset, self.length)
        try:
            _, parts = parse_sample(data, where=self.where, follow=self.follow)
        except CorruptShardError as error:
            raise SourceError(str(error)) from error
        return [(name, bytes(content)) for name, content in parts.items()], self.fields


class _TarSamples:
    """Samples in tars, by number; a subclass says where one lies."""

    left_out: tuple[str, ...] = ()
    _numbered: bool

    def _find(self, number: int) -> tuple[Store, str, str, int, int, Follow | None]:
        """Return of a sample the store, the shard, the key, offset and length, and what follows its links."""
        raise NotImplementedError

    def row(self, number: int) -> Row:
        """Return a sample's parts as columns, for people to look at."""
        return self.sample(number, _CRUDE).row()

    def sample(self, number: int, layout: Layout) -> TarSample:
        """Return a sample, not read yet."""
        store, shard, key, offset, length, follow = self._find(number)
        return TarSample(
            key=f"{number:09d}" if self._numbered else key,
            where=f"{store.url(shard)}, sample {key!r}",
            store=store,
            shard=shard,
            offset=offset,
            length=length,
            fields=layout.fields,
            follow=follow,
        )

    def _key_twice(self, first: int, second: int) -> DuplicateKeyError:
        places = [self.sample(number, _CRUDE).where for number in (first, second)]
        return DuplicateKeyError(f"{' occurs again in '.join(places)}. Give the samples new keys with --keys number.")


_CRUDE = Layout(sample_type="CrudeSample")


class TarSource(_TarSamples):
    """The samples of all tars below a folder, or of one tar, in the order of the tars."""

    kind = "WebDataset"

    def __init__(self, path: Path, *, numbered: bool, num_workers: int) -> None:
        self.where = str(path)
        self._store = open_store(path.parent if path.is_file() else path)
        self._numbered = numbered
        shards = [path.name] if path.is_file() else find_shards(self._store)
        self._prepared = not path.is_file() and is_prepared(self._store)
        groups = self._groups(shards)
        excluded = frozenset[tuple[str, str]]()
        if self._prepared:
            excluded = read_splits(self._store).excluded_samples(shards)
        self.empty: list[str] = []
        self._shards: list[str] = []
        self._starts = [0]
        self._samples: list[tuple[list[str], array[int], array[int]]] = []
        self._follow: list[Follow | None] = []
        self._parts = array("q")  # the names of a sample's parts, as a number of `_lists`
        self._lists: dict[tuple[str, ...], int] = {}
        counts = []
        for part, listed in groups:
            before = self._starts[-1]
            scan_one = partial(scan_tar, self._store, may_be_empty=True)
            scans = map_shards(scan_one, listed, num_workers=num_workers)
            for shard, scan in zip(listed, scans, strict=True):
                if scan.keys:
                    self._add(shard, scan, excluded)
                else:
                    self.empty.append(shard)
            counts.append((part, self._starts[-1] - before))
        self.split_parts = tuple(counts) if self._prepared else ()
        lists = [*self._lists]
        for first, second in equal_keys(key for keys, _, _ in self._samples for key in keys):
            there, here = ((store.url(shard), key) for store, shard, key, *_ in map(self._find, (first, second)))
            names = lists[self._parts[first]], lists[self._parts[second]]
            if there[0] != here[0] and set(names[0]).isdisjoint(names[1]):
                raise other_parts(*there, names[0], here[0], names[1])
            if not numbered:
                raise self._key_twice(first, second)

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, number: int) -> tuple[Store, str, str, int, int, Follow | None]:
        at = bisect_right(self._starts, number) - 1
        keys, offsets, lengths = self._samples[at]
        index = number - self._starts[at]
        return self._store, self._shards[at], keys[index], offsets[index], lengths[index], self._follow[at]

    def propose(self) -> Layout:
        """Keep the sample type of a prepared dataset; keep the parts of others as they are."""
        rel = meta_path(DEFAULT_DATASET_CONFIG)
        if self._prepared and self._store.exists(rel):
            config = read_document(self._store, rel).mapping()
            kind = config.get("sample_type")
            fields = config.get("field_map")
            if isinstance(kind, dict) and isinstance(fields, dict) and "__class__" in kind:
                return Layout(sample_type=kind["__class__"], fields=fields)
        return _CRUDE

    def _groups(self, shards: list[str]) -> list[tuple[str, list[str]]]:
        if not self._prepared:
            return [("train", shards)]
        splits = read_splits(self._store)
        groups = [(part, splits.shards_of(part)) for part, listed in splits.parts.items() if listed]
        if left := sorted({*shards}.difference(*(listed for _, listed in groups))):
            _logger.warning(
                "%s: %d of %d tars are left out, such as %s: they are in no split part. If they were added after it "
                "was prepared, prepare it again",
                *(self.where, len(left), len(shards), left[0]),
            )
        return groups

    def _add(self, shard: str, scan: ShardScan, excluded: frozenset[tuple[str, str]]) -> None:
        kept = [n for n, key in enumerate(scan.keys) if (shard, key) not in excluded]
        self._samples.append(
            (
                [scan.keys[n] for n in kept],
                array("q", [scan.offsets[n] for n in kept]),
                array("q", [scan.offsets[n + 1] - scan.offsets[n] for n in kept]),
            )
        )
        scan.check(unseen=True)
        self._follow.append(scan.follow(self._store, shard))
        self._parts.extend(self._lists.setdefault((*scan.parts_of(n),), len(self._lists)) for n in kept)
        self._shards.append(shard)
        self._starts.append(self._starts[-1] + len(kept))


def equal_keys(keys: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of two samples with one key, for each key that occurs again."""
    hashes = np.array([key_of(key) for key in keys], np.uint64)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(np.diff(hashes[order]) == 0)
    yield from zip(order[same].tolist(), order[same + 1].tolist(), strict=True)


# Mixes ----------------------------------------------------------------------------------------------------------------
#
# The datasets of a mix as one source: merged, with subsets and filters applied, each sample once. Weights and
# repetitions only matter in training and are ignored here. All datasets must have the same sample type and field map,
# or be crude.


_SCANS = 16


class MixSource(_TarSamples):
    """The samples of the datasets of a mix, split by split, dataset by dataset."""

    kind = "mix"

    def __init__(self, path: Path, *, numbered: bool) -> None:
        from energon_bridge.core.mix import MixIndex, load_mix  # only mixes need to wait for it
        from energon_bridge.core.mix.leaves import open_leaves
        from energon_bridge.core.mix.opener import DatasetOpener

        self.where = str(path)
        self._numbered = numbered
        document = MixIndex().document(str(path))
        named = document.get("splits") if isinstance(document, dict) else None
        self._parts: list[tuple[PreparedDataset, np.ndarray]] = []
        counts: list[tuple[str, int]] = []
        for split in [part for part in SPLIT_ORDER if part in (named or ())]:
            mix = load_mix(path, split_part=split)
            leaves = open_leaves(mix, DatasetOpener(), shuffle_epochs=None)
            samples = [self._leaf_samples(leaf) for leaf in leaves]
            self._parts += samples
            counts.append((split, sum(numbers.size for _, numbers in samples)))
        self.split_parts = tuple(counts)
        self._starts = np.cumsum([0, *(numbers.size for _, numbers in self._parts)]).tolist()
        if not numbered:
            for pair in equal_keys(self.sample(n, _CRUDE).key for n in range(len(self))):
                raise self._key_twice(*pair)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, number: int) -> tuple[Store, str, str, int, int, Follow | None]:
        at = bisect_right(self._starts, number) - 1
        dataset, numbers = self._parts[at]
        shard, local = _place(dataset, int(numbers[number - self._starts[at]]))
        scan = _scan(dataset.path, shard)
        start, end = scan.offsets[local : local + 2]
        return dataset.store, shard, scan.keys[local], start, end - start, _links(dataset.path, shard)

    def propose(self) -> Layout:
        """Keep the common sample type of all datasets."""
        first = self._parts[0][0]
        for dataset, _ in self._parts[1:]:
            if _form(dataset) != _form(first):
                raise SourceError(
                    f"{self.where}: {first.path} and {dataset.path} differ in sample type or field map. Convert them "
                    "as crude samples: --sample-type CrudeSample"
                )
        if issubclass(first.sample_type, CrudeSample) or first.field_map is None:
            return _CRUDE
        return Layout(sample_type=first.sample_type.__name__, fields=first.field_map.fields)

    def _leaf_samples(self, leaf: OpenLeaf) -> tuple[PreparedDataset, np.ndarray]:
        """Return the dataset of a leaf and the numbers of the leaf's samples, without excluded ones."""
        dataset = leaf.dataset
        if type(dataset) is not PreparedDataset:
            raise SourceError(
                f"{self.where}: {dataset.path} is a join, a JSONL file or a table, but only prepared datasets of tars "
                "can be merged. Convert the others separately, and join during training."
            )
        numbers = np.arange(leaf.start, leaf.stop) if leaf.kept is None else leaf.kept
        if not dataset.excluded:
            return dataset, numbers
        kept = [number for number in numbers.tolist() if _named(dataset, number) not in dataset.excluded]
        return dataset, np.array(kept, dtype=np.int64)


def _form(dataset: PreparedDataset) -> tuple[type, Any]:
    return dataset.sample_type, dataset.field_map and dataset.field_map.fields


def _place(dataset: PreparedDataset, number: int) -> tuple[str, int]:
    """Return shard and number in the shard of a sample."""
    ends = np.cumsum(dataset.shard_counts)
    shard = int(np.searchsorted(ends, number, side="right"))
    return dataset.shard_names[shard], number - int(ends[shard] - dataset.shard_counts[shard])


def _named(dataset: PreparedDataset, number: int) -> tuple[str, str]:
    """Return shard and key of a sample."""
    shard, local = _place(dataset, number)
    return shard, _scan(dataset.path, shard).keys[local]


@lru_cache(maxsize=_SCANS)
def _scan(root: str, shard: str) -> ShardScan:
    scan = scan_tar(open_store(root), shard)
    scan.check(unseen=True)
    return scan


@lru_cache(maxsize=_SCANS)
def _links(root: str, shard: str) -> Follow | None:
    return _scan(root, shard).follow(open_store(root), shard)

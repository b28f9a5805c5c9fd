"""Opens the datasets of a mix, each path once; keeps an index of the mix, which makes the next start fast.

Invariant: the datasets of one opener share one pool of open files, so their number does not matter.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from energon_bridge.core.errors import DatasetError, MetadataError, NotPreparedError
from energon_bridge.core.format.dataset import (
    FINGERPRINT_VERSION,
    PreparedDataset,
    SplitFacts,
    check_counts,
    prepared,
    read_prepared,
    with_times,
)
from energon_bridge.core.format.dataset_config import DatasetConfig, DatasetConfigs
from energon_bridge.core.format.documents import DocumentValue, parse_document
from energon_bridge.core.format.foreign import ForeignFormat, format_at, format_named
from energon_bridge.core.format.jsonl import open_jsonl
from energon_bridge.core.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    INFO_JSON,
    INFO_YAML,
    NOTHING,
    SPLIT_JSON,
    meta_path,
    refuse_meta_path,
)
from energon_bridge.core.mix.paths import split_path, user_cache
from energon_bridge.core.mix.tree import LeafRef
from energon_bridge.core.storage import READ_TIMEOUT_SECONDS, OpenFiles, Stalls, Store, as_far, open_store, write_file

# ---------------------------------------------------------------------------------------------------------------------
# The index of a mix: the metadata of its datasets, kept in a file so that the next start need not read it again.
#
# A mix of many datasets has a file `opened_<hash of the request>.json` in `<name of the mix>.cache/` beside it. If that
# folder is not writable, or the mix is not a local file, it is in `$XDG_CACHE_HOME/energon_bridge/<hash of the mix>/`
# (default `~/.cache`). Lines of JSON::
#
#     {"format": "energon_bridge.mix_index", "version": <see VERSION>, "checksum": <blake2b of the lines below>}
#     {<hash>: <content of a dataset.yaml>, ...}
#     [path of a YAML file of the mix, <hash of its bytes>]       <its content>
#     [path, split part, dataset config, split config]
#         [stamps, shards, counts, sizes, excluded, <hash of its config>, fingerprint, has checksums, doubts]
#                                                                                                     (one a dataset)
#
# The *stamps* of a dataset are `[name, bytes, mtime ns, ctime ns, inode]` of its files in `.nv-meta`, of those in a
# bucket `[name, bytes, ETag]`, `[name]` for one that is not there.
#
# Invariant: the index changes how fast a mix opens, never what is read. The content of a YAML file is used if its bytes
# have the hash; a dataset if its stamps and the sizes of all its shards are what they were, and else it is opened
# again. Buckets are asked by listing the folder that all datasets have in common, once. What has code of its own, lies
# on a web server (which has no listing) or where too many other files lie, or was changed within the last two seconds
# (a file system may give a later change the same time) is not kept. A file that is damaged or of another version is as
# good as none. Writing replaces the whole file at once, so it does not matter how many processes start together; a
# failure to write is logged.


logger = logging.getLogger(__name__)

FORMAT = "energon_bridge.mix_index"
VERSION = [3, FINGERPRINT_VERSION]
"""That of the format of the index, and that of fingerprints, which it holds."""
MIN_DATASETS = 32
"""Mixes of fewer datasets get no index: they open within milliseconds."""
_SETTLED_NS = 2_000_000_000
_MAX_LISTED, _MAX_LISTED_PER_DATASET = 20_000, 20
"""Buckets with more files than this, and more for each dataset, are not listed: a request lists a thousand."""
_ENCODER = json.JSONEncoder(separators=(",", ":"))

DatasetKey = tuple[str, str, str, str]
"""Path of a dataset, split part, and names of its dataset config and split config."""

StampOfFile = list[Any]


class IndexEntry(NamedTuple):
    """The index entry of a dataset.

    `config` is the content of its dataset.yaml as JSON, on a line of the file the hash of that. `stamps` are explained
    above; `doubts` are warnings about its split file.
    """

    stamps: list[StampOfFile]
    shards: list[str]
    counts: list[int]
    sizes: list[int]
    excluded: list[list[str]]
    config: str
    fingerprint: str
    has_checksums: bool
    doubts: list[str]


class MixIndex:
    """The index of a mix: entries from an earlier start, and those of this one.

    Lines are parsed only when needed, one at a time.

    Args:
        folders: Folders for the file; the first writable one is used. None: nothing is kept.
        request: What is opened, besides the mix itself; each request has its own file.
    """

    def __init__(self, folders: Sequence[str] = (), *, request: str = "") -> None:
        self._folders = tuple(folders)
        self._name = f"opened_{_hash(request.encode())}.json"
        # Lines of earlier starts by key: of a dataset one from each folder that has a file, valid or not.
        self._saved: dict[bytes, list[bytes]] = {}
        self._documents: dict[str, tuple[bytes, bytes]] = {}
        self._configs: dict[str, str] = {}
        # What the file of this start will have: entries that are still valid, and new ones; each with its config.
        self._entries: dict[bytes, tuple[bytes, str]] = {}
        self._changed = False
        # By URL, bytes and ETag of each file of the buckets that were listed; and the datasets that lie in these.
        self._listed: dict[str, tuple[int, str]] = {}
        self._is_listed: set[str] = set()
        for folder in self._folders:
            self._read(os.path.join(folder, self._name))

    @property
    def is_kept(self) -> bool:
        """Whether there is a folder for the file."""
        return bool(self._folders)

    def document(self, path: str) -> Any:
        """Return the parsed content of the YAML file of a mix at a path or URL.

        Raises DatasetNotFoundError, ShardMissingError or StorageError, and MetadataError if it cannot be parsed.
        """
        if path in self._documents:
            return json.loads(self._documents[path][1])
        folder, name = split_path(path)
        refuse_meta_path(folder, path)
        data = open_store(folder).read(name)
        key = _line([path, _hash(data)])
        if key in self._saved:
            line = self._saved[key][0]
            value = json.loads(line)
        else:
            if not data.strip():
                raise MetadataError(f"{path}: the file is empty. Expected a metadataset with `splits`.")
            value = parse_document(data, where=path)
            line = _line(value)
            self._changed = True
        self._documents[path] = (key, line)
        return value

    def find(self, key: DatasetKey) -> tuple[IndexEntry, list[int]] | None:
        """Return the entry of a dataset, and the modification times of its shards (0 in a bucket), if it is valid."""
        line_key = _line(key)
        for line in self._saved.get(line_key, ()):
            entry = IndexEntry(*json.loads(line))
            config = entry.config
            entry = entry._replace(config=self._configs[config])
            times = self._times_if_current(key[0], entry)
            if times is not None:
                self._entries[line_key] = (line, config)
                return entry, times
        return None

    def record(self, key: DatasetKey, entry: IndexEntry) -> None:
        """Keep the entry of a dataset, unless it changed so recently that a later change might get the same time."""
        newest = max((time for stamp in entry.stamps for time in stamp[2:4] if isinstance(time, int)), default=0)
        if newest < time.time_ns() - _SETTLED_NS:
            config = _hash(entry.config.encode())
            self._configs[config] = entry.config
            self._entries[_line(key)] = (_line(entry._replace(config=config)), config)
            self._changed = True

    def look_up(self, keys: Iterable[DatasetKey]) -> None:
        """List the buckets that hold some datasets, so that `find` and `stamps_of` need no request for each."""
        by_bucket: dict[str, list[str]] = {}
        for path in sorted({key[0] for key in keys if "://" in key[0]}):
            by_bucket.setdefault("/".join(path.split("/")[:3]), []).append(path)
        for paths in by_bucket.values():
            store = as_far(open_store(os.path.commonpath(paths).replace(":/", "://", 1)))
            if not self.is_kept or store is None or len(paths) < MIN_DATASETS:
                continue
            versions = store.versions(_MAX_LISTED + _MAX_LISTED_PER_DATASET * len(paths))
            if versions is not None:
                self._listed.update({store.url(name): version for name, version in versions.items()})
                self._is_listed.update(paths)

    def stamps_of(self, key: DatasetKey) -> list[StampOfFile]:
        """Return the stamps of the files in `.nv-meta` that describe a dataset; empty if they are unavailable.

        Take them before the files are read.
        """
        path, _, dataset_config, split_config = key
        stamps: list[StampOfFile] = []
        if "://" in path and path not in self._is_listed:
            return stamps
        splits = [split_config, SPLIT_JSON] if split_config == DEFAULT_SPLIT_CONFIG else [split_config]
        for names in ([INFO_JSON, INFO_YAML], splits, [dataset_config]):
            for name in names:
                stamps.append(self._stamp(path, name))
                if len(stamps[-1]) > 1:
                    break  # the others are read only if this one is missing
        return stamps

    def _stamp(self, path: str, name: str) -> StampOfFile:
        file = f"{path}/{meta_path(name)}"
        if "://" in path:
            return [name, *self._listed.get(file, ())]
        try:
            status = os.stat(file)
        except OSError:
            return [name]
        return [name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]

    def _times_if_current(self, path: str, entry: IndexEntry) -> list[int] | None:
        """Return the modification times of the shards of an entry; None if a file is not what it was."""
        if "://" in path and path not in self._is_listed:
            return None
        if any(self._stamp(path, stamp[0]) != stamp for stamp in entry.stamps):
            return None
        times = []
        for shard, size in zip(entry.shards, entry.sizes, strict=True):
            size_now, time_ns = self._size_and_time(f"{path}/{shard}")
            if size_now != size:
                return None
            times.append(time_ns)
        return times

    def _size_and_time(self, file: str) -> tuple[int, int]:
        if "://" in file:
            return self._listed.get(file, (-1, ""))[0], 0
        try:
            status = os.stat(file)
        except OSError:
            return -1, 0
        return status.st_size, status.st_mtime_ns

    def save(self) -> None:
        """Write the file if this start has found new entries."""
        if not self._changed or len(self._entries) < MIN_DATASETS:
            return
        head = _line({"format": FORMAT, "version": VERSION, "checksum": _digest(self._payload())}) + b"\n"
        for folder in self._folders:
            try:
                write_file(os.path.join(folder, self._name), itertools.chain((head,), self._payload()))
            except OSError as error:
                logger.info("%s: cannot write the index of the mix here: %s", folder, error)
            else:
                logger.info("%s: wrote the index of %d datasets", folder, len(self._entries))
                return

    def _payload(self) -> Iterator[bytes]:
        """Yield the lines after the first one in pieces; joining them all would take half the time of opening."""
        yield _line({config: json.loads(self._configs[config]) for _, config in self._entries.values()})
        for key, line in self._documents.values():
            yield b"\n%b\t%b" % (key, line)
        for key, (line, _) in self._entries.items():
            yield b"\n%b\t%b" % (key, line)

    def _read(self, path: str) -> None:
        """Read the file line by line: copying it whole would dominate the time of a later start."""
        lines_of: dict[bytes, list[bytes]] = {}
        digest = hashlib.blake2b(digest_size=16)
        try:
            with open(path, "rb") as file:
                head, first = json.loads(file.readline()), file.readline()
                digest.update(first)
                configs = {config: _line(value).decode() for config, value in json.loads(first).items()}
                for line in file:
                    digest.update(line)
                    key, _, content = line.rstrip(b"\n").partition(b"\t")
                    lines_of.setdefault(key, []).append(content)
            if head != {"format": FORMAT, "version": VERSION, "checksum": digest.hexdigest()}:
                raise ValueError("damaged, or of another version")
        except OSError:
            return  # not there, as on the first start
        except (ValueError, AttributeError) as error:
            logger.info("%s: rebuilding the index of the mix: %s", path, error)
            return
        self._configs |= configs
        for key, lines in lines_of.items():
            self._saved.setdefault(key, []).extend(lines)


def index_folders(mix: str) -> tuple[str, ...]:
    """Return the folders for the index of a mix; `mix` is the path or URL of its file, or a text that identifies it."""
    in_cache = os.path.join(user_cache(), "energon_bridge", _hash(mix.encode()))
    folders = (f"{mix}.cache", in_cache) if mix.startswith("/") else (in_cache,)
    return tuple(folder for folder in folders if os.path.isabs(folder))  # not all processes have a home


def _line(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def _hash(data: bytes) -> str:
    return _digest((data,))


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Opening the datasets of a mix.


_OPENING_THREADS = 32
_log_doubt = functools.cache(partial(logger.warning, "%s"))  # once for all split parts


@contextlib.contextmanager
def errors_at(ref: LeafRef) -> Iterator[None]:
    """Let errors about a dataset begin with the file and field of the mix that name it."""
    try:
        yield
    except DatasetError as error:
        if ref.where in ("", ref.path):
            raise
        raise type(error)(f"{ref.where}: {error}") from error


class DatasetOpener:
    """Opens the datasets of one mix.

    Args:
        trust_remote_code: Allow the datasets' own code to run.
        index: The index from an earlier start; new entries are added to it.
        read_timeout_seconds: Time after which a second read is started beside the first; None: no limit.
        warn: Called with each doubt about a split file, as text.
    """

    def __init__(
        self,
        *,
        trust_remote_code: bool = False,
        index: MixIndex | None = None,
        read_timeout_seconds: float | None = READ_TIMEOUT_SECONDS,
        warn: Callable[[str], object] = _log_doubt,
    ) -> None:
        self._warn = warn
        self.trust_remote_code = trust_remote_code
        self._configs = DatasetConfigs(trust_remote_code=trust_remote_code)
        self._indexed_configs: dict[str, DatasetConfig] = {}
        self._index = MixIndex() if index is None else index
        self._files = OpenFiles(stalls=Stalls(read_timeout_seconds))
        self._opened: dict[DatasetKey, PreparedDataset] = {}

    def open(self, ref: LeafRef) -> PreparedDataset:
        """Open the prepared dataset, the JSONL file or the foreign dataset of a reference.

        Errors are those of `open_dataset`, `open_jsonl` and `ForeignFormat.open`, after the file and field of the mix.
        """
        key = _key_of(ref)
        dataset = self._opened.get(key)
        if dataset is None:
            with errors_at(ref):
                dataset = self._opened[key] = self._open(ref, key)
        return dataset

    def _open(self, ref: LeafRef, key: DatasetKey) -> PreparedDataset:
        if ref.is_jsonl:
            return open_jsonl(ref.path, files=self._files)
        if (foreign := format_named(ref.path)) is not None:
            return self._foreign(foreign, key)
        return self._prepared_or_foreign(key)

    def _prepared_or_foreign(self, key: DatasetKey) -> PreparedDataset:
        try:
            dataset = self._prepared(key)
        except NotPreparedError:
            foreign = format_at(key[0])
            if foreign is None:
                raise
            return self._foreign(foreign, key)
        check_counts(dataset)
        return dataset

    def _foreign(self, foreign: ForeignFormat, key: DatasetKey) -> PreparedDataset:
        dataset = foreign.open(key[0], split_part=key[1], dataset_config=key[2], open_files=self._files)
        return with_times(dataset)

    def open_ahead(self, refs: Sequence[LeafRef]) -> None:
        """Open datasets at URLs, many at once, since each needs several requests.

        If one fails, `open` raises its error later. Code of datasets runs in this thread only.
        """
        if self.trust_remote_code:
            return
        far = {_key_of(ref): ref for ref in refs if "://" in ref.path and as_far(open_store(ref.path)) is not None}
        if len(far) < 2:
            return
        self._index.look_up(far)

        def try_to_open(ref: LeafRef) -> None:
            with contextlib.suppress(Exception):
                self.open(ref)

        with ThreadPoolExecutor(min(_OPENING_THREADS, len(far)), "energon-open") as pool:
            list(pool.map(try_to_open, far.values()))

    def _prepared(self, key: DatasetKey) -> PreparedDataset:
        path, split_part, dataset_config, split_config = key
        store = open_store(path, files=self._files)
        indexed = self._index.find(key)
        if indexed is not None:
            for doubt in indexed[0].doubts:
                self._warn(doubt)
            return self._from_index(store, key, *indexed)
        stamps = self._index.stamps_of(key)
        doubts = list[str]()
        dataset, config = read_prepared(
            store,
            self._configs,
            split_part=split_part,
            dataset_config=dataset_config,
            split_config=split_config,
            warn=doubts.append,
        )
        for doubt in doubts:
            self._warn(doubt)
        if stamps and not config.form.has_code and config.split_config is None:  # a file that has no stamp
            self._index.record(
                key,
                IndexEntry(
                    stamps=stamps,
                    shards=list(dataset.shard_names),
                    counts=dataset.shard_counts.tolist(),
                    sizes=dataset.shard_sizes.tolist(),
                    excluded=[list(sample) for sample in sorted(dataset.excluded)],
                    config=config.text,
                    fingerprint=dataset.fingerprint,
                    has_checksums=dataset.has_checksums,
                    doubts=doubts,
                ),
            )
        return dataset

    def _from_index(self, store: Store, key: DatasetKey, entry: IndexEntry, times: list[int]) -> PreparedDataset:
        dataset_config = self._indexed_configs.get(entry.config)
        if dataset_config is None:
            where = store.url(meta_path(key[2]))
            dataset_config = self._configs.build(DocumentValue(json.loads(entry.config), where), store=store)
            self._indexed_configs[entry.config] = dataset_config
        excluded = frozenset((shard, key) for shard, key in entry.excluded) if entry.excluded else NOTHING
        facts = SplitFacts(
            entry.shards, entry.counts, entry.sizes, excluded, entry.fingerprint, entry.has_checksums, times
        )
        return prepared(store, dataset_config, facts, split_part=key[1], config_name=key[2])


def _key_of(ref: LeafRef) -> DatasetKey:
    config = ref.dataset_config or DEFAULT_DATASET_CONFIG
    split = ref.split_config or DEFAULT_SPLIT_CONFIG
    return ref.path, ref.split_part, config, split

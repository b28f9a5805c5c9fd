"""Reads and decodes every sample of a dataset, to find those that would fail in training.

What training decodes when it needs it is decoded here at once: videos and sounds from beginning to end. Bad samples
are collected, not raised, so that one never hides the next. Only errors that keep a whole split part from opening are
raised.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_bridge.core.encoder.hooks import Hook, is_overridden
from energon_bridge.core.errors import (
    CorruptShardError,
    EmptyDatasetError,
    EnergonError,
    FieldAccessError,
    MetadataError,
    SampleError,
    SkipSample,
    StorageError,
    UnknownSplitError,
    did_you_mean,
)
from energon_bridge.core.format.checksums import ShardChecksums, read_checksums
from energon_bridge.core.format.dataset import PreparedDataset, open_dataset, read_index
from energon_bridge.core.format.dataset_config import DatasetConfigs, fields_of
from energon_bridge.core.format.documents import read_document
from energon_bridge.core.format.field_map import describe_fields, parse_access
from energon_bridge.core.format.foreign import ForeignDataset, ForeignRow, field_map_of, format_of_unprepared
from energon_bridge.core.format.jsonl import PART, JsonlDataset, is_jsonl, open_jsonl, parse_line
from energon_bridge.core.format.media import AV_EXTENSIONS, IMAGE_EXTENSIONS, kind_by_name
from energon_bridge.core.format.nvmeta import (
    DEFAULT_DATASET_CONFIG,
    DEFAULT_SPLIT_CONFIG,
    meta_path,
    read_info,
    read_splits,
)
from energon_bridge.core.format.parallel import Task, Workers, map_shards
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.format.tar_index import find_pieces, load_index
from energon_bridge.core.registry import load
from energon_bridge.core.samples import CrudeSample, SourceInfo
from energon_bridge.core.samples.sample_place import warned
from energon_bridge.core.storage import open_store
from energon_bridge.core.stores.file_store import follow_links
from energon_bridge.models.conversations.parts import MEDIA, medium_by_name
from energon_bridge.models.conversations.segments import changes_beside
from energon_bridge.models.conversations.turns import LEARNED, Doubt, doubts_of, doubts_of_turns
from energon_bridge.models.conversations.withheld import fault_of_verdict, held_out_by
from energon_bridge.tools.check.media import LONG_SECONDS, far_larger
from energon_bridge.tools.convert.conversations import is_conversation
from energon_bridge.tools.convert.group_splits import note_groups

if TYPE_CHECKING:
    from energon_bridge.core.mix import AuxRef, LeafRef

_READ_AHEAD = 8 << 20
"""Bytes of samples that are read at once."""
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that keeps a sample (or, without a key, a whole shard) from loading.

    `files` are those that the sample was converted from, as the source names them.
    """

    dataset: str
    split_part: str = ""
    shard: str
    key: str | None = None
    part: str | None = None
    message: str
    remedy: str = ""
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        key = f", key {self.key!r}" if self.key is not None else ""
        part = f", part {self.part!r}" if self.part is not None else ""
        split_part = f", {self.split_part}" if self.split_part else ""
        files = f" (of {', '.join(self.files)})" if self.files else ""
        return f"{self.dataset}{split_part}: shard {self.shard!r}{key}{part}{files}: {self.message}"


_REMEDY_OF_STORE = "Restore what the store lacks from its source: samples that need it fail in training."
LEAVE_OUT = "add it as SHARD/KEY to `exclude` of split.yaml"
_REMEDIES = {
    "CorruptShardError": "Restore the shard from its source, then run `energon prepare --tar-index-only`.",
    "ShardMissingError": "Restore the file, or take its shard out of split.yaml.",
    "FieldAccessError": f"Correct `field_map` of dataset.yaml; to leave a sample out that lacks the part, {LEAVE_OUT}.",
    **dict.fromkeys(("ImportError", "MissingCodecError"), "Install the package that is named."),
    "SampleError": f"Correct the sample in its source; to leave it out, {LEAVE_OUT}. If your own task encoder takes "
    "it, name that with --encoder.",
    "MetadataError": "",  # it says what to do
}


def _remedy(dataset: PreparedDataset, error: str) -> str:
    if isinstance(dataset, (JsonlDataset, ForeignDataset)):
        return "Correct the line or row in its file. Training leaves it out, and counts it."
    return _REMEDIES.get(
        error,
        f"Repair the sample in its source, and convert (--overwrite) or prepare again; to leave it out, {LEAVE_OUT}.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """The result for one shard.

    `named` has the keys of samples by what is odd about them: `blank` for an empty text, `missing` for an answer that
    seems to be a missing value, `escaped` and `marked` for entities of HTML or tokens of models in a text, `raw` for
    bytes in a field of tensors, `turned` for an image that its EXIF says to turn, `unopened` for a video or sound if
    PyAV is not installed; `silent`, `cancelled` and `loud` for an odd sound (`Doubt` of `models/families/sound.py`),
    `long` for one that is longer than many models hear, `large` for a picture far larger than others, with its size.
    Of samples of a field map: `rejected` if their JSON says that annotators rejected them, `held_out` if it says that
    they are for tests, where others of the shard are not, `changed` if their media are turned or faster by it.
    `groups` are the speakers, products and the like that samples name, by column.
    """

    shard: str
    num_checked: int
    problems: tuple[Problem, ...]
    named: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict)


def lint_parts(
    path: str | os.PathLike[str],
    *,
    split_parts: tuple[str, ...] = (),
    split_config: str = DEFAULT_SPLIT_CONFIG,
    dataset_config: str = DEFAULT_DATASET_CONFIG,
    trust_remote_code: bool = False,
) -> tuple[list[PreparedDataset], list[str]]:
    """Open the split parts to check (default: all); return them and the names of the empty ones.

    A JSONL file has no split parts and is opened as a whole; tables may have some. Raises the errors of `open_dataset`,
    and EmptyDatasetError if all parts are empty.
    """
    if is_jsonl(path):
        return [open_jsonl(path)], []
    if foreign := format_of_unprepared(path):
        return [foreign.open(path, split_part=part) for part in split_parts or foreign.split_parts(path)], []
    store = open_store(path)
    store.check_root()
    read_info(store)  # an unprepared dataset is the first error to report
    config = DatasetConfigs(trust_remote_code=trust_remote_code).read(store, dataset_config)
    splits = read_splits(store, config.split_config or split_config)
    datasets: list[PreparedDataset] = []
    empty: list[str] = []
    for part in split_parts or tuple(splits.parts):
        if part not in splits.parts:
            raise UnknownSplitError(
                f"{splits.where}: no split part {part!r}. Known split parts: {', '.join(splits.parts)}."
            )
        try:
            dataset = open_dataset(
                path,
                split_part=part,
                split_config=split_config,
                dataset_config=dataset_config,
                trust_remote_code=trust_remote_code,
            )
        except EmptyDatasetError:
            empty.append(part)
        else:
            datasets.append(dataset)
    if not datasets:
        raise EmptyDatasetError(f"{store.root}: no samples in the split parts {', '.join(empty) or 'none'}.")
    return datasets, empty


def lint_splits(path: str, *, split_config: str, dataset_config: str) -> tuple[list[Problem], list[str]]:
    """Return what is wrong with the split file of a dataset, and what is doubtful; of tables, rows not to learn."""
    if is_jsonl(path):
        return [], []
    if foreign := format_of_unprepared(path):
        tables = [foreign.open(path, split_part=part) for part in foreign.split_parts(path)]
        return [], [fault for table in tables for fault in table.withheld.values()]
    store = open_store(path)
    shards = read_info(store).shard_counts
    named = read_document(store, meta_path(dataset_config)).text("split_config")
    splits = read_splits(store, named or split_config)
    wrong = splits.wrong_excludes(shards, store.exists)
    problems = [Problem(dataset=store.root, shard=split_config, message=wrong)] if wrong else []
    return problems, splits.doubts(shards)


def lint_mix(
    path: str, *, split_parts: tuple[str, ...] = (), trust_remote_code: bool = False
) -> tuple[list[tuple[PreparedDataset, list[str]]], list[Problem], list[str]]:
    """Open all datasets of the splits of a metadataset file (default: all splits), and look up its joins.

    Returns each split part of a dataset once, whole, without the subsets and filters of the mix, with the splits of the
    mix that have it, the joins and auxiliary stores that fail, and what is doubtful in split files. Raises the errors
    of `open_dataset` and of metadatasets.
    """
    from energon_bridge.core.format.join import find_rows
    from energon_bridge.core.mix import DatasetOpener, JoinRef, load_mix, metadataset_splits, resolve_path
    from energon_bridge.core.mix.joins import join_parts
    from energon_bridge.core.mix.leaves import aux_fingerprint

    path = resolve_path(path, base=os.getcwd(), where="PATH")
    doubts: dict[str, None] = {}
    opener = DatasetOpener(trust_remote_code=trust_remote_code, warn=lambda _: None)
    datasets: dict[tuple[str, str], tuple[PreparedDataset, list[str]]] = {}
    problems: list[Problem] = []
    stores: dict[AuxRef, str] = {}

    def take(ref: LeafRef) -> PreparedDataset:
        dataset = opener.open(ref)
        aux_fingerprint(ref.aux, where=ref.where)  # raises, as training would
        stores.update({store: name for name, store in ref.aux.items()})
        files = ref.split_config or DEFAULT_SPLIT_CONFIG, ref.dataset_config or DEFAULT_DATASET_CONFIG
        if not isinstance(dataset, (JsonlDataset, ForeignDataset)):
            wrong, doubtful = lint_splits(dataset.path, split_config=files[0], dataset_config=files[1])
            doubts.update(dict.fromkeys(doubtful))
            problems.extend(one for one in wrong if one not in problems)
        if isinstance(dataset, ForeignDataset) and not ref.filters:
            doubts.update(dict.fromkeys(dataset.withheld.values()))
        dataset, of_splits = datasets.setdefault((dataset.path, dataset.split_part), (dataset, []))
        of_splits += [split] * (split not in of_splits)
        return dataset

    all_splits = metadataset_splits(path)
    for split in split_parts or all_splits:
        for leaf in load_mix(path, split_part=split).leaves:
            if not isinstance(leaf.leaf, JoinRef):
                take(leaf.leaf)
                continue
            try:
                parts = join_parts(leaf.leaf, take)
                for _ in find_rows(parts):
                    pass
            except EnergonError as error:
                message = f"{type(error).__name__}: {error}"
                where = leaf.leaf.where or "join"
                remedy = "Correct the keys, or set `nonmatch: skip` at the dataset of the join that lacks them."
                problems.append(Problem(dataset=path, split_part=split, shard=where, message=message, remedy=remedy))
    problems += [one for ref, name in stores.items() for one in _lint_store(name, ref)]
    if tars := sorted({ref.path for ref in stores if not ref.is_filesystem}):
        doubts[f"Of auxiliary stores only the shards were checked; energon lint decodes one: {', '.join(tars)}"] = None
    return list(datasets.values()), problems, list(doubts)


def _lint_store(name: str, ref: AuxRef) -> Iterator[Problem]:
    """Yield the shards of an auxiliary store that do not fit their indexes.

    Training reads of it what a cooker asks for, so nothing else would notice.
    """
    store = open_store(ref.path)
    prepared = not ref.is_filesystem and not is_jsonl(ref.path)
    remedy = f"Run `energon prepare --tar-index-only {ref.path}`."
    for shard, count in read_info(store).shard_counts.items() if prepared else ():
        try:
            load_index(store, shard, count=count, size=store.size(shard), remedy=remedy)
        except EnergonError as error:
            message = f"auxiliary store {name!r}: {type(error).__name__}: {error}"
            yield Problem(dataset=ref.path, shard=shard, message=message, remedy=_REMEDY_OF_STORE)


def makes_packs(encoder: Any) -> bool:
    """Whether the batches of an encoder are of its own packs, and perhaps of nothing else."""
    from energon_bridge.models.conversations.batching import SequenceTaskEncoder  # imports torch; takes both

    return is_overridden(encoder, Hook.PACK) and not isinstance(encoder, SequenceTaskEncoder)


def lint_encoded(
    path: str,
    split_part: str,
    encoder: Any,
    *,
    num_workers: int = 0,
    dataset_config: str = DEFAULT_DATASET_CONFIG,
    split_config: str = DEFAULT_SPLIT_CONFIG,
    trust_remote_code: bool = False,
) -> tuple[int, list[Problem]]:
    """Run a task encoder over a split part or a split of a mix, a sample per batch; return batches and problems.

    An encoder of own packs (`makes_packs`) makes no batches. Raises the errors of `get_val_dataset`.
    """
    from energon_bridge.core.datasets import get_savable_loader, get_val_dataset  # import torch
    from energon_bridge.core.stream.policy import ErrorPolicy
    from energon_bridge.core.worker_config import WorkerConfig
    from energon_bridge.tools.check.quarantine import read_quarantine

    if makes_packs(encoder):
        encoder = copy(encoder)
        encoder.batch = encoder.encode_batch = lambda samples: {"samples": samples}  # theirs take packs

    with tempfile.TemporaryDirectory(prefix="energon-lint-") as folder:
        file = os.path.join(folder, "failed.jsonl")
        spec = get_val_dataset(
            path,
            split_part=split_part,
            batch_size=1,
            task_encoder=encoder,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
            dataset_config=dataset_config,
            split_config=split_config,
            trust_remote_code=trust_remote_code,
            error_policy=ErrorPolicy(tolerance=0, damaged_shards="skip", quarantine=file, messages=1),
        )
        spec = load("drop_in", "dataset")(spec)
        with closing(get_savable_loader(spec)) as loader:
            count = sum(1 for _ in loader)
        if lost := spec.failure_log.unwritten:
            raise StorageError(
                f"{folder}: the names of {lost} samples that failed cannot be written there, so they cannot be shown. "
                "Make room, or set TMPDIR to a folder with room, and run lint again"
            )
        failed = read_quarantine(file) if os.path.exists(file) else []
    return count, [
        Problem(
            dataset=one.dataset,
            split_part=split_part,
            shard=one.shard,
            key=one.key,
            message=f"{one.hook}: {one.error}: {one.message}",
            remedy=f"Correct the hook or the data; to leave the sample out, raise SkipSample, or {LEAVE_OUT}.",
        )
        for one in failed
    ]


def lint_dataset(
    dataset: PreparedDataset,
    *,
    num_workers: Workers = 1,
    task: Task | None = None,
    deep: bool = False,
    conversations: bool = True,
) -> Iterator[ShardReport]:
    """Check every shard of a split part, or those of a task; yields one report per shard, in their order.

    Excluded samples are left out. With `deep` all parts are compared with their checksums, too. Without `conversations`
    nobody looks at what samples say, as for a task encoder that has cookers and hooks of its own.
    """
    check = partial(_check_shard, dataset, decode_whole, deep, conversations)
    shards = range(len(dataset.shard_names))
    with closing(map_shards(check, shards if task is None else task.of(shards), num_workers=num_workers)) as reports:
        yield from reports


def _check_shard(
    dataset: PreparedDataset,
    decode: Callable[[str, memoryview], tuple[Any, str | None]],
    deep: bool,
    conversations: bool,
    shard: int,
) -> ShardReport:
    check = _ShardCheck(dataset, decode, shard, conversations)
    warned.update(_NAMED)
    try:
        checksums = check.checksums() if deep else None
        if isinstance(dataset, ForeignDataset):
            check.check_rows(dataset)
        elif isinstance(dataset, JsonlDataset):
            check.check_lines()
        else:
            check.check_samples(checksums)
    except EnergonError as error:  # the shard or its index as a whole
        check.report(error)
    return check.done()


_NAMED = ["cancelled, sounds", "loud, sounds", *(f"turned, images, {one}" for one in IMAGE_EXTENSIONS)]
"""Warnings of training that refer to lint, which names all such samples itself."""


class _ShardCheck:
    """What is found in one shard: problems, and the keys of samples that may surprise; see `ShardReport`."""

    def __init__(
        self,
        dataset: PreparedDataset,
        decode: Callable[[str, memoryview], tuple[Any, str | None]],
        shard: int,
        conversations: bool,
    ) -> None:
        self._dataset = dataset
        cook = check_conversation if conversations else _leave
        sources = (SourceInfo(dataset.path, 0, dataset.shard_names[shard], ()),)
        self._cook = lambda sample: cook({**sample, "__sources__": sources})
        self._learn = check_learned if conversations else _leave
        self._decode = decode
        self._shard = shard
        self._name = dataset.shard_names[shard]
        self._num_checked = 0
        self._problems: list[Problem] = []
        self._named = defaultdict[str, list[str]](list)
        self._held_out: dict[bool, list[str]] = {}
        self._groups: dict[str, set[str]] = {}
        self._sizes: list[tuple[str, int, int]] = []

    def report(self, error: Exception, key: str | None = None, part: str | None = None) -> None:
        """Add a problem of a sample or part, or, without a key, of the shard."""
        self._problems.append(
            Problem(
                dataset=self._dataset.path,
                split_part=self._dataset.split_part,
                shard=self._name,
                key=key,
                part=part,
                message=f"{type(error).__name__}: {error}",
                remedy=_remedy(self._dataset, type(error).__name__),
            )
        )

    def checksums(self) -> ShardChecksums:
        """Return the checksums of the shard; raises MetadataError if there are none."""
        count, size = int(self._dataset.shard_counts[self._shard]), int(self._dataset.shard_sizes[self._shard])
        checksums = read_checksums(self._dataset.store, self._name, count=count, size=size)
        if checksums is None:
            raise MetadataError(f"no checksums: energon prepare {self._dataset.path} --checksums --force-overwrite")
        return checksums

    def check_rows(self, dataset: ForeignDataset) -> None:
        """Check the rows of a file, such as those of a table."""
        first = int(dataset.shard_counts[: self._shard].sum())
        for number, row in enumerate(read_rows(dataset, self._shard), start=first):
            self._num_checked += 1
            if isinstance(row, SkipSample):  # as it is meant
                continue
            if isinstance(row, Exception):
                self.report(row, key=f"{number:09d}")  # as rows that can be read are called
                continue
            self._note(row.key, row.parts, self._check_row(row))

    def check_lines(self) -> None:
        """Check the lines of a JSONL file."""
        for index, data in read_samples(self._dataset, self._shard):
            self._num_checked += 1
            try:
                entry = parse_line(data)
                note_groups(entry, self._groups)
                self._note_doubts(str(index), _doubts_in({PART: entry}))
                self._cook({"__key__": str(index), PART: entry})
            except EnergonError as error:
                self.report(error, key=str(index), part=PART)

    def check_samples(self, checksums: ShardChecksums | None) -> None:
        """Check the samples of a tar, without the excluded ones, and that each excluded key exists."""
        dataset = self._dataset
        follow = follow_links(dataset.path)
        excluded: set[str] = set()
        keys: list[str] = []
        names: list[frozenset[str]] = []
        for index, data in read_samples(dataset, self._shard):
            try:
                where = f"{dataset.store.url(self._name)}, sample {index}"
                key, parts = parse_sample(data, where=where, follow=follow)
            except EnergonError as error:
                self._num_checked += 1
                self.report(error)
                continue
            if (self._name, key) in dataset.excluded:
                excluded.add(key)
                continue
            self._num_checked += 1
            keys.append(key)
            names.append(frozenset(parts))
            before = len(self._problems)
            for difference in checksums.differences(index, key, parts, complete=True) if checksums else ():
                self.report(CorruptShardError(difference), key=key)
            self._note(key, parts, self._check_sample(index, key, parts))
            if len(self._problems) > before:
                files = _files_of(parts)
                self._problems[before:] = [replace(one, files=files) for one in self._problems[before:]]
        for number, rest in find_pieces(keys, names.__getitem__, dataset.store.url(self._name)):
            self.report(rest, key=keys[number])
        if len(keys) == self._num_checked:
            self._check_excluded(excluded, keys)

    def _check_row(self, row: ForeignRow) -> set[Doubt]:
        """Treat a row as training does; return what is doubtful about its texts."""
        decoded = self._decoded(row.key, row.parts)
        if decoded.keys() != row.parts.keys():
            return _doubts_in(decoded)
        fields = decoded
        try:
            if self._dataset.is_crude:
                self._cook({"__key__": row.key, **decoded})
            else:
                fields = field_map_of(tuple(row.fields.items()))(decoded)
                self._learn(self._dataset.sample_type(__key__=row.key, **fields))
                self._named["raw"] += [row.key] * _has_raw(self._dataset.sample_type, fields)
        except Exception as error:  # a sample type may raise anything
            self.report(error, key=row.key)
        return _doubts_in(fields)

    def _check_sample(self, index: int, key: str, parts: Mapping[str, memoryview]) -> set[Doubt]:
        """Decode the parts that training needs, and build the fields; return what is doubtful about texts."""
        dataset = self._dataset
        wanted = wanted_parts(dataset, parts)
        decoded = self._decoded(key, wanted)
        if decoded.keys() != wanted.keys():
            return set()
        fields = decoded
        try:
            sample, fields = made_sample(dataset, index, key, decoded)
            if isinstance(sample, CrudeSample):
                self._cook(sample)
            else:
                self._note_beside(key, decoded)
                self._learn(sample)
            self._named["raw"] += [key] * _has_raw(dataset.sample_type, fields)
        except FieldAccessError as error:
            self.report(dataset.missing_field(decoded, parts) or error, key=key)
        except Exception as error:  # a sample loader can raise anything
            self.report(error, key=key)
        return _doubts_in(fields)

    def _decoded(self, key: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return parts as training decodes them; those that cannot be are reported, and left out."""
        decoded: dict[str, Any] = {}
        for part, data in parts.items():
            try:
                decoded[part], odd = self._decode(part, data) if isinstance(data, memoryview) else (data, None)
                if odd is not None:
                    self._named[odd].append(key)
                if kind_by_name(f".{part}") == "image" and (shape := getattr(decoded[part], "shape", ())):
                    self._sizes.append((key, shape[1], shape[0]))
                if isinstance(content := decoded[part], Mapping):
                    note_groups(content, self._groups)
            except (EnergonError, ImportError) as error:
                self.report(error, key=key, part=part)
        return decoded

    def _note_beside(self, key: str, decoded: Mapping[str, Any]) -> None:
        """Note what the JSON beside the fields says: that a sample is rejected, held out, turned, faster."""
        if (mapped := self._dataset.field_map) is None:
            return
        accesses = [parse_access(access, where="", field=field) for field, access in mapped.fields.items()]
        taken = {step for options in accesses for _, steps in options for step in steps}
        there = Counter(kind for part in decoded if (kind := medium_by_name(part)) is not None)
        for content in decoded.values():
            if not isinstance(content, Mapping):
                continue
            beside = {name: value for name, value in content.items() if name not in taken}
            self._named["rejected"] += [key] * (fault_of_verdict(beside, ()) is not None)
            changes = {change for _, change in changes_beside(beside, there)}
            self._named["changed"] += [key] * (not changes.isdisjoint(("turned", "faster")))
            if (said := held_out_by(beside)) is not None:
                self._held_out.setdefault(said[2], []).append(key)

    def _check_excluded(self, seen: set[str], keys: Sequence[str]) -> None:
        """Report what the split file excludes of the shard, but was not found among its samples."""
        listed = {key for shard, key in self._dataset.excluded if shard == self._name}
        for key in sorted(listed - seen):
            hint = did_you_mean(key, keys)
            self.report(
                MetadataError(f"`exclude` of the split file lists the sample {key!r}, which is not there.{hint}")
            )

    def _note_doubts(self, key: str, doubts: set[Doubt]) -> None:
        for doubt in doubts:
            self._named[doubt].append(key)

    def _note(self, key: str, parts: Mapping[str, Any], doubts: set[Doubt]) -> None:
        self._note_doubts(key, doubts)
        self._named["turned"] += [key] * _is_turned(parts)
        self._named["unopened"] += [key] * _is_unopened(parts)

    def done(self) -> ShardReport:
        """Return what was found."""
        held_out = self._held_out.get(True, []) if len(self._held_out) > 1 else []
        return ShardReport(
            shard=self._name,
            num_checked=self._num_checked,
            problems=(*self._problems,),
            named={**self._named, "held_out": held_out, "large": far_larger(self._sizes)},
            groups={name: frozenset(values) for name, values in self._groups.items()},
        )


def decode_whole(part: str, data: memoryview) -> tuple[Any, str | None]:
    """Decode a part with the code of training, a video or sound from its beginning to its end.

    Returns it, and what is odd about a sound. Raises the errors that training would have.
    """
    from energon_bridge.core.encoder.decoder import SampleDecoder  # imports torch, which other commands do not need
    from energon_bridge.models.av import AVDecoder
    from energon_bridge.models.families.sound import check_track, sound_of

    value = SampleDecoder(image_decode="rgba8").decode(part, data)
    if not isinstance(value, AVDecoder) or find_spec("av") is None:
        return value, None
    with value:
        if not value.has_video_stream():
            sound = sound_of(value, rate=value.get_audio_samples_per_second())
            is_long = sound.own_length > LONG_SECONDS * sound.own_rate
            return value, sound.decoded()[1] or ("long" if is_long else None)
        frames = value.get_metadata(get_audio=False).video_num_frames
        value.map_frames(range(frames or 1), lambda pixels: None)
        return value, check_track(value)


class _AnyStore:
    """Stands for the auxiliary store of a mix: it has all files, and their contents are not known."""

    def get(self, name: str, sample: Mapping[str, Any]) -> Any:
        return sample.get(name, self)


def check_conversation(sample: Mapping[str, Any]) -> None:
    """Cook a crude sample that is a conversation as training does, and open segments of its videos and sounds.

    Raises:
        SampleError, DecodeError: Training skips it for that.
    """
    content = sample.get("json")
    if not isinstance(content, Mapping) or not is_conversation(content):
        return
    from energon_bridge.models.conversations.conversation import MediaWithOptions, read_conversation  # import torch
    from energon_bridge.models.conversations.cooker import cook_conversation
    from energon_bridge.models.families.sound import sound_of
    from energon_bridge.models.families.video import video_of

    stores: Any = {f"{kind}s": _AnyStore() for kind in MEDIA}
    try:
        said = read_conversation(cook_conversation(sample, **stores))
    except SkipSample:  # as it is meant
        return
    if find_spec("av") is None:
        return

    def cut(media: Iterable[Any]) -> list[MediaWithOptions]:
        given = [one for one in media if isinstance(one, MediaWithOptions)]
        return [one for one in given if not isinstance(one.value, _AnyStore)]

    for video in cut(said.videos):
        video_of(video, fps=1, least=1, most=1)
    for sound in cut(said.audios):
        sound_of(sound, rate=16_000)


def _files_of(parts: Mapping[str, memoryview]) -> tuple[str, ...]:
    """Return the files that a sample was converted from, as its JSON names them; none if it does not."""
    try:
        content = json.loads(bytes(parts.get("json", b"null")))
    except ValueError:
        return ()
    files = content.get("files") if isinstance(content, dict) else None
    return tuple(str(name) for name in files) if isinstance(files, list) else ()


def check_learned(sample: Any) -> None:
    """Look whether a typed sample says what is to be learned, as training does.

    Raises:
        SampleError: Training skips it for that.
    """
    from energon_bridge.models.conversations.layout import MultiModalSampleConfig  # imports torch
    from energon_bridge.models.conversations.sample_encoders import SAMPLE_ENCODERS

    encode = SAMPLE_ENCODERS.get(type(sample))
    if encode is not None:
        encode(sample, MultiModalSampleConfig())


def _leave(sample: Any) -> None:
    """Leave a sample to a task encoder, which may have cookers of its own."""


def _is_unopened(parts: Iterable[str]) -> bool:
    return find_spec("av") is None and any(name.rpartition(".")[2].lower() in AV_EXTENSIONS for name in parts)


def _is_turned(parts: Mapping[str, Any]) -> bool:
    from energon_bridge.models.images.images import is_turned  # imports torch, which other commands do not need

    return any(is_turned(data) for data in parts.values() if isinstance(data, memoryview))


def _has_raw(sample_type: type, fields: Mapping[str, Any]) -> bool:
    """Return whether a field of a tensor has bytes: a batch of them and of others cannot be made."""
    declared = describe_fields(sample_type) if is_dataclass(sample_type) else ()
    return any(isinstance(fields.get(name), bytes) for name, _, kind in declared if "Tensor" in kind)


def _doubts_in(values: Mapping[str, Any]) -> set[Doubt]:
    """Return what is doubtful about the texts in the fields or parts of a sample."""
    found: set[Doubt] = set()
    for name, value in values.items():
        if isinstance(value, dict):
            found |= doubts_of(value.get("caption"))
            with suppress(SampleError):  # for training to say
                found |= doubts_of_turns(value)
        else:
            found |= doubts_of(value) - (set() if name in (*LEARNED, "txt") else {"missing"})
    return found


def read_rows(dataset: ForeignDataset, shard: int) -> Iterator[ForeignRow | Exception]:
    """Yield all rows of a file, or the error of a bad one; raises the errors of `RowReader.read`."""
    rows = dataset.open_rows()
    first = int(dataset.shard_counts[:shard].sum())
    numbers = np.arange(first, first + int(dataset.shard_counts[shard]))
    for start in range(0, numbers.size, _ROWS_AT_ONCE):
        yield from rows.read(numbers[start : start + _ROWS_AT_ONCE])


def read_samples(dataset: PreparedDataset, shard: int) -> Iterator[tuple[int, memoryview]]:
    """Yield (number, bytes) of all samples of a shard, several per read."""
    offsets = read_index(dataset, shard).tolist()
    count = len(offsets) - 1
    first = 0
    while first < count:
        last = first + 1
        while last < count and offsets[last + 1] - offsets[first] <= _READ_AHEAD:
            last += 1
        start = offsets[first]
        data = memoryview(dataset.store.read_range(dataset.shard_names[shard], start, offsets[last] - start))
        for index in range(first, last):
            yield index, data[offsets[index] - start : offsets[index + 1] - start]
        first = last


# ---------------------------------------------------------------------------------------------------------------------
# Samples as training makes them, outside of a run.


def wanted_parts(dataset: PreparedDataset, parts: Mapping[str, memoryview]) -> dict[str, memoryview]:
    """Return the parts of a sample that its dataset decodes."""
    wanted = dataset.part_filter
    if wanted is None:
        return dict(parts)
    accepts = wanted.__contains__ if isinstance(wanted, frozenset) else wanted
    return {part: data for part, data in parts.items() if accepts(part)}


def made_sample(dataset: PreparedDataset, index: int, key: str, decoded: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a sample made of its decoded parts, and its fields; raises what a sample loader or a type raises."""
    fields = decoded
    if dataset.field_map is not None:
        fields = dataset.field_map(decoded)
    elif dataset.sample_loader is not None:
        raw = {"__key__": key, "__restore_key__": ("Webdataset", index), "__sources__": (), **decoded}
        fields = fields_of(dataset.sample_loader(raw))
    else:
        return CrudeSample({"__key__": key, **decoded}), fields
    return dataset.sample_type(**{"__key__": key, **fields}), fields

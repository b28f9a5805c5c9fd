"""Converting a source into a prepared dataset: a plan of independent shards, and one step at the end.

The samples of a shard are computed from their numbers, so the bytes do not depend on the workers. A finished shard
leaves a record of its inputs. A conversion that is started again, after a kill or with a larger source, keeps the
shards whose inputs have not changed, and refuses to replace others of a finished dataset. So tasks can convert shards
anywhere, and one of them finishes the dataset.

    out/.nv-meta.parts/options.json   options of the conversion under way; others are refused
    out/.nv-meta/convert/             the same, and the records, of the finished one

`options.py` says how, `shard_plan.py` which samples are in which shard, `scaling.py` makes images smaller, and
`finish.py` makes a dataset of the shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SampleError, SkipSample, SourceError
from energon_bridge.core.format.field_map import FieldMap
from energon_bridge.core.format.nvmeta import INFO_JSON, META_FOLDER, has_checksums, meta_path
from energon_bridge.core.format.parallel import Progress, Task, Workers, map_shards, unseen
from energon_bridge.core.format.tar_index import ShardScan
from energon_bridge.core.prepare.indexing import ShardRecord
from energon_bridge.core.storage import open_store
from energon_bridge.models.conversations.turns import (
    ESCAPED,
    LEARNED,
    MISSING,
    SHOWN,
    Doubt,
    doubts_of,
    doubts_of_turns,
)
from energon_bridge.tools.convert.finish import (
    OPTIONS,
    RECORDS,
    Converted,
    by_number,
    finish_dataset,
    is_whole,
    load_record,
    record_before,
    shards_before,
)
from energon_bridge.tools.convert.options import (
    ConvertOptions,
    changed_options,
    check_options,
    describe_conversion,
    key_of_options,
)
from energon_bridge.tools.convert.rows import (
    Source,
    SourceSample,
    contents_of,
    first_rows,
    named_otherwise,
)
from energon_bridge.tools.convert.scaling import reencoded
from energon_bridge.tools.convert.shard_plan import ShardJob, ShardJobs, sample_at, segments_of, shards_of_plan
from energon_bridge.tools.convert.shards import PartsFolder, ShardFile, num_unread, partial_path, record_path, writing
from energon_bridge.tools.convert.tars import equal_keys


def convert(
    source: Source,
    out: str | os.PathLike[str],
    options: ConvertOptions,
    *,
    num_workers: Workers = 1,
    overwrite: bool = False,
    finish: bool = False,
    progress: Progress = unseen,
) -> Converted:
    """Write the samples of a source as a prepared dataset; `progress(done, total)` counts samples.

    You can repeat it at any time: shards whose inputs have not changed are kept, but those from which an earlier run
    skipped failed samples only with `skip_errors`; what a source has got at its end goes into shards of its own. With
    `finish`, all shards must exist, made by `convert_task`. Raises SourceError for a sample that cannot be converted
    (unless `skip_errors`), ConfigurationError if `out` holds something else, if a shard of the finished dataset would
    change (unless `overwrite`) or, with `finish`, if shards are missing.
    """
    check_options(options)
    options = without_repeated(source, options, len(source))
    with PartsFolder(Path(out), lock="alone") as parts:
        plan, description = _begin(parts, source, options, overwrite=overwrite)
        skipped: list[str] = []
        missing: list[int] = []
        reused = 0
        try:
            doing = partial(_make_shard, parts.root, options, finish, overwrite)
            for number, made in enumerate(_make_shards(doing, source, options, plan, num_workers, progress)):
                if made is None:
                    missing.append(number)
                    continue
                was_there, failed = made
                skipped += failed
                reused += was_there
        except BaseException:
            if not any(parts.path.rglob("*.rec")):
                parts.remove()  # no shard is finished that the next run could keep
                if not any(parts.root.iterdir()):
                    parts.root.rmdir()
            raise
        if missing:
            first = ShardJobs(source, options.layout, plan)[missing[0]]
            raise ConfigurationError(
                f"{out}: {len(missing)} of {len(plan)} shards are missing, or were made from another source; the first "
                f"is {first.shard}{_what_changed(parts.root, options, first)}. Run their tasks again, or run this "
                "without --finish."
            )
        skipped.sort(key=by_number)
        if len(skipped) == len(source):
            raise SourceError(f"{source.where}: all {len(source):,} samples fail; the first: {skipped[0]}")
        done = finish_dataset(parts, plan, options, description, tuple(skipped), reused)
        return replace(done, left_out=source.left_out)


def convert_task(
    source: Source,
    out: str | os.PathLike[str],
    options: ConvertOptions,
    task: Task,
    *,
    num_workers: Workers = 1,
    progress: Progress = unseen,
) -> int:
    """Write the shards of one task, and return their number; `convert(..., finish=True)` makes a dataset of all.

    Tasks may run at the same time, anywhere where source and `out` have the same paths, and again at any time. Raises
    what `convert` raises.
    """
    check_options(options)
    options = without_repeated(source, options, len(source))
    with PartsFolder(Path(out), lock="shared") as parts:
        plan, _ = _begin(parts, source, options, overwrite=False)
        doing = partial(_make_shard, parts.root, options, False, False)
        return sum(1 for _ in _make_shards(doing, source, options, task.of(plan), num_workers, progress))


def _begin(
    parts: PartsFolder, source: Source, options: ConvertOptions, *, overwrite: bool
) -> tuple[list[tuple[str, np.ndarray]], bytes]:
    """Check that the folder belongs to this conversion, and mark it; return the plan and its description."""
    _check_folder(parts, describe_conversion(source, options, ()), overwrite=overwrite)
    now = {name: count for _, name, count in segments_of(source)}
    runs = [now] if overwrite else _runs(parts.root, source, now)
    plan = list(shards_of_plan(source, options, runs))
    planned = {shard for shard, _ in plan}
    if not overwrite and (gone := [shard for shard in shards_before(parts.root) if shard not in planned]):
        raise ConfigurationError(f"{parts.root}: {source.where} has no samples for {gone[0]} any more. {_REPLACING}")
    description = describe_conversion(source, options, runs)
    path = parts.path / OPTIONS
    with writing(path):
        partial_path(path).write_bytes(description)
        os.replace(partial_path(path), path)
    return plan, description


_REPLACING = (
    "Only what is added at the end of a source (of each of its lists, and of each split) leaves the shards and keys "
    "that are there as they are, and a run may be reading those. Convert into another folder, or --overwrite all."
)


def _runs(root: Path, source: Source, now: Mapping[str, int]) -> list[Mapping[str, int]]:
    """Return how many samples each segment had in each run so far that found more; raises ConfigurationError for fewer.

    A conversion of an earlier version has not written it down: its records say it, if its segments are split parts.
    """
    path = root / META_FOLDER / RECORDS / OPTIONS
    if not path.exists():
        return [now]
    runs = json.loads(path.read_bytes()).get("runs")
    if not runs:
        counts = Counter[str]()
        for shard in shards_before(root):
            record = record_before(root, shard)
            part = shard.partition("/")[0] if source.split_parts else ""
            counts[part] += 0 if record is None else len(record.scan.keys) + len(record.skipped)
        runs = [counts] if counts.keys() <= now.keys() else [now]
    for name, count in runs[-1].items():
        if now.get(name, 0) < count:
            which = f"{source.where}{f', {name}' * bool(name)}"
            raise ConfigurationError(
                f"{root}: {which} had {count:,} samples, and has {now.get(name, 0):,}. {_REPLACING}"
            )
    return runs if runs[-1] == now else [*runs, now]


def without_repeated(source: Source, options: ConvertOptions, count: int) -> ConvertOptions:
    """Return options by which rows among the first `count` fail that have the key of another, made of columns.

    Raises ConfigurationError if samples that fail are not skipped.
    """
    layout = options.layout
    if layout.key is None:
        return options
    keys = (sample_at(source, layout, number).key or f"\0{number}" for number in range(count))
    repeated: dict[int, str] = {}
    for first, second in sorted(equal_keys(keys)):
        one, other = source.row(first), source.row(second)
        is_same = replace(one, where=other.where) == other
        key = sample_at(source, layout, first).key
        remedy = f"make it of columns that differ, such as --field '__key__={layout.key}-{{COLUMN}}'"
        if not options.skip_errors:
            raise ConfigurationError(
                f"{one.where} and {other.where} have one key, {key!r}: {remedy}, or delete one of the rows"
                f"{' (they are equal)' * is_same}. --on-error skip leaves out rows that have the key of an earlier one."
            )
        differs = f"differs from {one.where}, and has its key, {key!r}: {remedy}"
        repeated[second] = f"{other.where}: {f'repeats {one.where}' if is_same else differs}."
    return replace(options, layout=replace(layout, repeated=repeated))


def _make_shards(
    make: Callable[[ShardJob], tuple[bool, list[str]] | None],
    source: Source,
    options: ConvertOptions,
    plan: Sequence[tuple[str, np.ndarray]],
    num_workers: Workers,
    progress: Progress,
) -> Iterator[tuple[bool, list[str]] | None]:
    """Yield what `make` returned for each shard of a plan."""
    done = 0
    total = sum(len(numbers) for _, numbers in plan)
    with closing(map_shards(make, ShardJobs(source, options.layout, plan), num_workers=num_workers)) as results:
        for (_, numbers), made in zip(plan, results, strict=True):
            done += len(numbers)
            progress(done, total)
            yield made


_BACKSLASH = "\\"
_SLASHES = ", with / between folders and no drive"


def check_first_files(source: Source, ignored: Collection[str] = ()) -> None:
    """Raise SourceError if none of the files that the first rows name exists; it suggests where they may be."""
    rows = (
        replace(row, files={name: of for name, of in row.files.items() if name not in ignored})
        for row in first_rows(source)
    )
    contents = [content for row in rows for content in contents_of(row)]  # bytes too
    paths = [getattr(content, "path", None) for content in contents]
    missing = [path for path in paths if path is not None and not os.path.exists(path)]
    if not missing or len(missing) < len(contents):
        return
    if otherwise := named_otherwise(missing[0]):
        raise SourceError(
            f"{source.where}: none of the files named in the first rows exists: {missing[0]}. {otherwise}"
        )
    first = Path(missing[0])
    for parent in first.parents:
        if not parent.is_dir():
            continue
        rest = first.relative_to(parent)
        folders = sorted(parent.glob("*")) + sorted(parent.parent.glob("*"))  # COCO's lie beside its annotations
        near = [one for one in folders if one.is_dir() and (one / rest).exists()]
        hint = f" It is in {near[0]}: pass --media {near[0]}." if near else ""
        break
    else:
        hint = ""
    raise SourceError(
        f"{source.where}: none of the {len(missing)} files named in the first rows exists, such as {first}.{hint} "
        f"Paths are relative to --media{_SLASHES if _BACKSLASH in str(first) else ''}."
    )


def _make_shard(
    root: Path, options: ConvertOptions, find_only: bool, overwrite: bool, job: ShardJob
) -> tuple[bool, list[str]] | None:
    """Write a shard, unless it exists with the same inputs; return whether it did, and what was skipped.

    With `find_only`, write nothing and return None for a shard that does not exist. Raises ConfigurationError for one
    of the finished dataset that has other inputs now, unless it is to be overwritten.
    """
    parts = root / PartsFolder.NAME
    digest = hashlib.blake2b(key_of_options(options), digest_size=16)
    for sample in job.samples:
        digest.update(sample.mark().encode("utf-8", "surrogateescape") + b"\0\0")
    made_of = digest.hexdigest()
    there = load_record(root, job.shard)
    kept = there is not None and there.made_of == made_of and is_whole(root, job.shard, there)
    before = record_before(root, job.shard)
    if there is not None and options.skip_errors and (before is None or overwrite):
        kept = kept and not num_unread(
            there
        )  # an earlier run, which did not skip, may have stored what cannot be opened
    if there is not None and kept and (find_only or options.skip_errors or not there.num_failed):
        return True, there.skipped
    if find_only:
        return None
    was_other = before is not None and before.made_of != made_of and not overwrite
    if before is not None and was_other and not before.skipped:
        _check_keys_stay(root, job, before, [sample.key for sample in job.samples])
    checksums = options.checksums or has_checksums(open_store(root))  # of a source that grew, the new ones too
    shard = ShardFile(parts / job.shard, media=options.media, checksums=checksums, strict=options.skip_errors)
    bad: list[str] = []
    try:
        for sample in job.samples:
            try:
                content, fields = sample.read()
                if options.reencodes:
                    content = [(part, reencoded(part, data, options)) for part, data in content]
                shard.add(sample.key, content, fields)
            except (SourceError, SampleError, SkipSample) as error:
                message = message_of(sample, error)
                if was_other and not options.skip_errors and not isinstance(error, SkipSample):
                    raise SourceError(f"{root}: {job.shard} cannot stay: {message} {_REPLACING}") from error
                if not options.skip_errors and not isinstance(error, SkipSample):
                    bad.append(message)  # all that follow in this shard are looked at, to be named together
                    if len(bad) == MOST_BAD:
                        break
                    continue
                shard.record.skipped.append(message)
                shard.record.num_failed += not isinstance(error, SkipSample)
                continue
            shard.record.num_rejected += sample.num_rejected
            written = dict(content)
            doubts = _of_conversation(written.get("json", b"")) if options.layout.is_crude else set()
            place = sample.where if doubts else f"{sample.where} (key {sample.key})"
            for doubt in sorted(doubts or _of_texts(written, fields)):
                shard.record.doubts.setdefault(doubt, []).append(place)
        if bad:
            raise stopped(*bad, is_all=job.is_all)
    except BaseException:
        shard.abort()
        raise
    record = shard.close(made_of=made_of)
    if before is not None and was_other and (root / job.shard).exists():
        _keep_if_same(root, job, before, record)
    return was_other, record.skipped


def message_of(sample: SourceSample, error: Exception) -> str:
    """Return what is said of a sample that fails, or is left out: its place and the reason."""
    return str(error) if str(error).startswith(sample.where) else f"{sample.where}: {error}"


def _check_keys_stay(root: Path, job: ShardJob, before: ShardRecord, keys: Sequence[str]) -> None:
    for was, now in zip_longest(before.scan.keys, keys):
        if was != now:
            place = "its end" if was is None else f"the key {was!r}"
            there = "its end" if now is None else repr(now)
            where = next((one.where for one in job.samples if one.key == now), f"after {job.samples[-1].where}")
            raise ConfigurationError(
                f"{root}: {job.shard} begins to differ at {place}, where {there} is now ({where}). {_REPLACING}"
            )


def _what_changed(root: Path, options: ConvertOptions, job: ShardJob) -> str:
    """Return which sample of a shard, and which file of it, is not as it was when the shard was made, if it was."""
    record = load_record(root, job.shard)
    if record is None:
        return ""
    places = {key: number for number, key in enumerate(record.scan.keys)}
    tar = next((path for path in (root / PartsFolder.NAME / job.shard, root / job.shard) if path.exists()), os.devnull)
    with open(tar, "rb") as file:
        for sample in job.samples:
            was = _parts_in(file, record.scan, places[sample.key]) if sample.key in places else {}
            try:
                now = {part: reencoded(part, data, options) for part, data in sample.read()[0]}
            except (SourceError, SampleError, SkipSample) as error:
                if was:
                    return f": {error}".removesuffix(".")
                continue
            if was != now and (was or not record.skipped):
                return f": {_changed_part(sample, was, now)}"
    return ": what it has is as it was, but files were touched, samples are gone, or --on-error skip is new"


def _keep_if_same(root: Path, job: ShardJob, before: ShardRecord, after: ShardRecord) -> None:
    """Remove the tar of a shard that was written again, for files that may only have another time; its record stays.

    Raises ConfigurationError, and removes the record too, if it has other content than the one that is there.
    """
    new = root / PartsFolder.NAME / job.shard
    try:
        _check_keys_stay(root, job, before, after.scan.keys)
        with open(root / job.shard, "rb") as was, open(new, "rb") as now:
            for number, key in enumerate(after.scan.keys):
                parts, others = (_parts_in(file, of.scan, number) for file, of in ((was, before), (now, after)))
                if parts != others:
                    sample = next(one for one in job.samples if one.key == key)
                    raise ConfigurationError(
                        f"{root}: {job.shard} was made of other content: {_changed_part(sample, parts, others)}. "
                        f"{_REPLACING}"
                    )
    except ConfigurationError:
        record_path(new).unlink()
        raise
    finally:
        new.unlink(missing_ok=True)


def _changed_part(sample: SourceSample, was: Mapping[str, bytes], now: Mapping[str, bytes]) -> str:
    part = next(name for name in {**was, **now} if was.get(name) != now.get(name))
    file = dict(getattr(sample, "parts", ())).get(part)
    told = getattr(file, "path", "its row, or how this version writes it")
    return f"the part {part!r} of {sample.key!r} has changed ({told}; {sample.where})"


def _parts_in(file: BinaryIO, scan: ShardScan, number: int) -> dict[str, bytes]:
    """Return the parts of a sample of a tar, as its record says where they lie."""
    found = {}
    for at in range(bisect_left(scan.part_samples, number), bisect_right(scan.part_samples, number)):
        file.seek(scan.part_offsets[at])
        found[scan.part_names[at]] = file.read(scan.part_sizes[at])
    return found


def _of_conversation(data: bytes) -> set[Doubt]:
    """Return what is doubtful about the texts of a conversation, as JSON."""
    if _DOUBTFUL.search(data) is None:
        return set()
    try:
        entry = json.loads(data)
        return doubts_of_turns(entry) if isinstance(entry, dict) else set()
    except (ValueError, SampleError):  # not a fault of the conversion: training reports it when it reads the sample
        return set()


def _of_texts(parts: Mapping[str, bytes], fields: Mapping[str, str]) -> set[Doubt]:
    """Return what is doubtful about a caption, question or answer: a part of its own, or in one as JSON."""
    texts = [(name, access) for name, access in fields.items() if name in (*LEARNED, *SHOWN)]
    found: set[Doubt] = set()
    for name, access in texts if fields else [(LEARNED[0], "txt")]:
        part = access.partition("[")[0]
        data = parts.get(part, b" - ")
        if "[" not in access:
            found |= doubts_of(data.decode("utf-8", "replace"), learned=name in LEARNED)
        elif b"<" in data or _DOUBTFUL.search(data) is not None:
            (value,) = FieldMap({"text": access})({part: json.loads(data)}).values()
            found |= doubts_of(value, learned=name in LEARNED)
    return found


_BLANKS = r"(?:\\[nrt]|\s)*"
_DOUBTFUL = re.compile(
    (
        rf'"{_BLANKS}(?:{"|".join(map(re.escape, sorted(MISSING)))})?{_BLANKS}"|: *null|{ESCAPED.pattern}'
        r"|<(?:[|/sp]|｜|unk|[be]os|(?:start|end)_of)"
    ).encode()
)


MOST_BAD = 10
"""Samples that fail which are named together."""


def stopped(first: object, *more: object, is_all: bool) -> SourceError:
    """Return the error of samples at which a conversion stops, with the flag that leaves such samples out.

    `is_all` is whether all samples of the source were looked at, for as many as are named.
    """
    others = "".join(f"\n  {one}" for one in more[: MOST_BAD - 1])
    may = "" if is_all and len(more) + 1 < MOST_BAD else " (more may)" if more else " Others may fail, too."
    return SourceError(
        f"{str(first).removesuffix('.')}. To leave such samples out: --on-error skip."
        + (f" These fail, too{may}:{others}" if more else may)
    )


def _check_folder(parts: PartsFolder, description: bytes, *, overwrite: bool) -> None:
    """Raise for a folder that holds anything but this conversion, unfinished or finished."""
    root = parts.root
    for path in (parts.path / OPTIONS, root / META_FOLDER / RECORDS / OPTIONS):
        if not path.exists():
            continue
        other = changed_options(path.read_bytes(), description)
        is_finished = (root / meta_path(INFO_JSON)).exists()
        if other and not overwrite and (is_finished or "source" in other):
            differences = ", ".join(f"{name} was {old}, now {new}" for name, (old, new) in other.items())
            raise ConfigurationError(
                f"{root}: contains a conversion with other options: {differences}. Use the same options to continue "
                "it, --overwrite to start over, or another folder."
            )
        return
    if overwrite:
        return
    others = sorted(one.name for one in root.iterdir() if one != parts.path)
    if others:
        raise ConfigurationError(
            f"{root}: contains {others[0]}{' and more' * (len(others) > 1)}, which no conversion wrote. Use another "
            "folder, or --overwrite to write into this one; files of the same names are replaced, and so is .nv-meta."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Scaling images down, which only happens on request.

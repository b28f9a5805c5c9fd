"""Converting a source into a prepared dataset: a plan of independent shards, and one step at the end.

The samples of a shard are computed from their numbers, so the bytes do not depend on the workers. A finished shard
leaves a record of its inputs. A conversion that is started again, after a kill or with a larger source, keeps the
shards whose inputs have not changed. So tasks can convert shards anywhere, and one of them finishes the dataset.

    out/.nv-meta.parts/options.json   options of the conversion under way; others are refused
    out/.nv-meta/convert/             the same, and the records, of the finished one
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SampleError, SkipSample, SourceError
from energon_bridge.core.format.media import HEAD_BYTES, kind_by_name, missing_package
from energon_bridge.core.format.nvmeta import INFO_JSON, META_FOLDER, has_checksums, meta_path, read_info
from energon_bridge.core.format.parallel import Progress, Task, Workers, map_shards, unseen
from energon_bridge.core.format.tar_index import index_name
from energon_bridge.core.order.rng import Permutation, draws, key_of
from energon_bridge.core.prepare.run import ShardRecord
from energon_bridge.core.prepare.split import SplitRule
from energon_bridge.core.storage import open_store
from energon_bridge.models.conversations.turns import has_empty_answer
from energon_bridge.models.images.jpeg import ORIENTATION, can_scale
from energon_bridge.tools.check.media import MediaFilter
from energon_bridge.tools.convert.rows import Layout, Source, SourceSample, check_layout, contents_of, first_rows
from energon_bridge.tools.convert.shards import (
    END_BYTES,
    PartsFolder,
    ShardFile,
    member_size,
    num_unread,
    partial_path,
    publish,
    record_path,
    writing,
)

_FORMAT = 1  # of the shards: after a raise, everything is written again
_OPTIONS = "options.json"
_RECORDS = "convert"
SKIPPED = f"{META_FOLDER}/{_RECORDS}/skipped.txt"
"""Names all samples that were skipped, a line each, in the order of the source."""
_PROPOSED_BYTES = 512 << 20
_MOST_PER_SHARD = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How a source is converted.

    `split` is for sources without splits of their own; sizes of shards as in `ShardWriter`. Images of more than
    `max_pixels` are scaled down; `quality` (1 to 100) encodes all JPEGs and WebPs again. With `checksums`, those of all
    samples and parts are kept.
    """

    layout: Layout
    split: SplitRule | None = None
    shuffle: int | None = None
    samples_per_shard: int | None = None
    bytes_per_shard: int | None = None
    media: bool = True
    checksums: bool = False
    skip_errors: bool = False
    max_pixels: int | None = None
    quality: int | None = None

    @property
    def reencodes(self) -> bool:
        """Whether images may change."""
        return self.max_pixels is not None or self.quality is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Samples by shard and shards by split part, what was skipped, and how many shards were reused.

    `left_out` counts the files of a folder that were not taken, with the reason.
    `num_unread` media files could not be opened, `num_unread_images` of them images; `needed` says which packages
    would open some. `num_rejected` answers were left
    out of samples that also have a preferred one. `empty` has the places of samples with an empty answer.
    """

    shard_counts: dict[str, int]
    split_parts: dict[str, list[str]]
    skipped: tuple[str, ...]
    num_reused: int
    num_unread: int
    num_unread_images: int
    left_out: tuple[str, ...] = ()
    num_rejected: int = 0
    empty: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _FailedSample:
    """A sample that could not even be named; it fails when it is read, or is left out then."""

    where: str
    error: SourceError | SkipSample
    key: str = ""
    num_rejected: int = 0

    def sizes(self) -> list[tuple[str, int]]:
        raise SourceError(str(self.error))

    def mark(self) -> str:
        return str(self.error)

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        raise self.error


@dataclass(frozen=True, slots=True)
class _Job:
    shard: str
    samples: list[SourceSample] = field(repr=False)


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
    skipped failed samples only with `skip_errors`. With `finish`, all shards must exist,
    made by `convert_task`. Raises SourceError for a sample that cannot be converted (unless `skip_errors`),
    ConfigurationError if `out` holds something else or, with `finish`, lacks shards.
    """
    _check_options(options)
    plan = list(_plan(source, options))
    told = _told(source, options)
    with PartsFolder(Path(out), lock="alone") as parts:
        _begin(parts, told, overwrite=overwrite)
        skipped: list[str] = []
        missing: list[str] = []
        reused = 0
        try:
            for shard, made in _make_shards(parts, source, options, plan, num_workers, progress, find_only=finish):
                if made is None:
                    missing.append(shard)
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
            raise ConfigurationError(
                f"{out}: {len(missing)} of {len(plan)} shards are missing, or were made from another source; the first "
                f"is {missing[0]}. Run their tasks again, or run this without --finish."
            )
        skipped.sort(key=_by_number)
        if len(skipped) == len(source):
            raise SourceError(f"{source.where}: all {len(source):,} samples fail; the first: {skipped[0]}")
        done = _finish(parts, plan, options, told, tuple(skipped), reused)
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
    _check_options(options)
    plan = task.of(list(_plan(source, options)))
    with PartsFolder(Path(out), lock="shared") as parts:
        _begin(parts, _told(source, options), overwrite=False)
        return sum(1 for _ in _make_shards(parts, source, options, plan, num_workers, progress))


def _check_options(options: ConvertOptions) -> None:
    check_layout(options.layout)
    if options.reencodes and options.bytes_per_shard is not None:
        raise ConfigurationError(
            "--bytes-per-shard needs all sizes in advance, but --max-pixels and --quality change them while writing: "
            "use --samples-per-shard instead."
        )


def _begin(parts: PartsFolder, told: bytes, *, overwrite: bool) -> None:
    """Check that the folder belongs to this conversion, and mark it."""
    _check_folder(parts, told, overwrite=overwrite)
    path = parts.path / _OPTIONS
    with writing(path):
        partial_path(path).write_bytes(told)
        os.replace(partial_path(path), path)


def _make_shards(
    parts: PartsFolder,
    source: Source,
    options: ConvertOptions,
    plan: Sequence[tuple[str, np.ndarray]],
    num_workers: Workers,
    progress: Progress,
    *,
    find_only: bool = False,
) -> Iterator[tuple[str, tuple[bool, list[str]] | None]]:
    """Yield the name of each shard of a plan and what `_make_shard` returned for it."""
    make = partial(_make_shard, parts.root, options, find_only)
    done = 0
    total = sum(len(numbers) for _, numbers in plan)
    with closing(map_shards(make, _Jobs(source, options.layout, plan), num_workers=num_workers)) as results:
        for (shard, numbers), made in zip(plan, results, strict=True):
            done += len(numbers)
            progress(done, total)
            yield shard, made


def propose_samples_per_shard(source: Source, layout: Layout) -> int:
    """Propose samples per shard for about 512 MiB, judging by the first ones: 1, 2 or 5 times a power of ten."""
    sizes = []
    for number in range(min(20, len(source))):
        try:
            sizes.append(sum(size for _, size in source.sample(number, layout).sizes()))
        except (SourceError, SampleError, SkipSample):
            continue
    wanted = min(_MOST_PER_SHARD, max(1, _PROPOSED_BYTES * len(sizes) // max(1, sum(sizes)))) if sizes else 1000
    power = 10 ** int(math.log10(wanted))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= wanted)


def check_first_files(source: Source) -> None:
    """Raise SourceError if none of the files that the first rows name exists; it suggests where they may be."""
    contents = [content for row in first_rows(source) for content in contents_of(row)]  # bytes too
    paths = [getattr(content, "path", None) for content in contents]
    missing = [path for path in paths if path is not None and not os.path.exists(path)]
    if not missing or len(missing) < len(contents):
        return
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
        "Paths are relative to --media."
    )


def split_numbers(count: int, rule: SplitRule) -> dict[str, np.ndarray]:
    """Assign sample numbers to split parts by ratio; a number stays in its part when the source grows.

    With 9,1,0, of every ten numbers in a row nine go to train and one, chosen by a fixed key, to val.
    """
    shares = [(name, share) for name, share in rule.ratios if share]
    total = sum(share for _, share in shares)
    period = math.lcm(*((share / total).denominator for _, share in shares))
    period = min(period, 1000)
    blocks = -(-count // period)
    ranks = np.argsort(draws(key_of("convert split"), blocks * period).reshape(blocks, period), axis=1)
    places = np.argsort(ranks, axis=1).reshape(-1)[:count]
    parts = {}
    so_far = Fraction(0)
    for name, share in shares:
        start = round(so_far * period)
        so_far += share / total
        parts[name] = np.flatnonzero((places >= start) & (places < round(so_far * period)))
    return parts


def _plan(source: Source, options: ConvertOptions) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each shard and the numbers of its samples."""
    parts: dict[str, np.ndarray] = {}
    if options.split is not None and options.split.ratios:
        parts = split_numbers(len(source), options.split)
    else:
        start = 0
        for name, count in source.split_parts or (("train", len(source)),):
            parts[name] = np.arange(start, start + count)
            start += count
    for name, numbers in parts.items():
        ordered = numbers
        if options.shuffle is not None and len(numbers):
            places = Permutation(len(numbers), key_of("convert", options.shuffle, name))
            ordered = numbers[places.at_many(np.arange(len(numbers)))]
        for shard, chosen in enumerate(_cut(source, ordered, options)):
            yield f"{name}/{shard:05d}.tar", chosen


def _cut(source: Source, numbers: np.ndarray, options: ConvertOptions) -> Iterator[np.ndarray]:
    most = options.samples_per_shard or _MOST_PER_SHARD
    if options.bytes_per_shard is None:
        yield from (numbers[at : at + most] for at in range(0, len(numbers), most))
        return
    start = 0
    size = END_BYTES
    for at, number in enumerate(numbers.tolist()):
        sample = _sample(source, options.layout, number)
        try:
            more = sum(member_size(f"{sample.key}.{part}", length) for part, length in sample.sizes())
        except (SourceError, SampleError, SkipSample):
            more = 0  # it fails, or is skipped, when it is read
        full = options.samples_per_shard is not None and at - start >= options.samples_per_shard
        if at > start and (full or size + more > options.bytes_per_shard):
            yield numbers[start:at]
            start = at
            size = END_BYTES
        size += more
    if start < len(numbers):
        yield numbers[start:]


class _Jobs(Sequence[_Job]):
    """The shards of a plan as jobs, each assembled when it is due."""

    def __init__(self, source: Source, layout: Layout, plan: Sequence[tuple[str, np.ndarray]]) -> None:
        self._source = source
        self._layout = layout
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan)

    @overload
    def __getitem__(self, at: int) -> _Job: ...
    @overload
    def __getitem__(self, at: slice) -> list[_Job]: ...
    def __getitem__(self, at: int | slice) -> _Job | list[_Job]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        shard, numbers = self._plan[at]
        return _Job(shard, [_sample(self._source, self._layout, number) for number in numbers.tolist()])


def _sample(source: Source, layout: Layout, number: int) -> SourceSample:
    try:
        return source.sample(number, layout)
    except (SourceError, SkipSample) as error:
        named = str(error).startswith(source.where)
        return _FailedSample(source.where if named else f"{source.where}, sample {number}", error)


def _make_shard(root: Path, options: ConvertOptions, find_only: bool, job: _Job) -> tuple[bool, list[str]] | None:
    """Write a shard, unless it exists with the same inputs; return whether it did, and what was skipped.

    With `find_only`, write nothing and return None for a shard that does not exist.
    """
    parts = root / PartsFolder.NAME
    digest = hashlib.blake2b(_key(options), digest_size=16)
    for sample in job.samples:
        digest.update(sample.mark().encode("utf-8", "surrogateescape") + b"\0\0")
    made_of = digest.hexdigest()
    there = _load(root, job.shard)
    kept = there is not None and there.made_of == made_of and _is_whole(root, job.shard, there)
    if there is not None and kept and (find_only or options.skip_errors or not there.num_failed):
        return True, there.skipped
    if find_only:
        return None
    checksums = options.checksums or has_checksums(open_store(root))  # of a source that grew, the new ones too
    shard = ShardFile(parts / job.shard, media=options.media, checksums=checksums)
    try:
        for sample in job.samples:
            try:
                content, fields = sample.read()
                if options.reencodes:
                    content = [(part, reencoded(part, data, options)) for part, data in content]
                shard.add(sample.key, content, fields)
            except (SourceError, SampleError, SkipSample) as error:
                message = str(error) if str(error).startswith(sample.where) else f"{sample.where}: {error}"
                if not options.skip_errors and not isinstance(error, SkipSample):
                    raise stopped(message) from error
                shard.record.skipped.append(message)
                shard.record.num_failed += not isinstance(error, SkipSample)
                continue
            shard.record.num_rejected += sample.num_rejected
            if options.layout.is_crude and _says_nothing(dict(content).get("json", b"")):
                shard.record.empty.append(sample.where)
    except BaseException:
        shard.abort()
        raise
    return False, shard.close(made_of=made_of).skipped


def _says_nothing(data: bytes) -> bool:
    """Return whether an answer of a conversation, as JSON, is empty."""
    if _BLANK.search(data) is None:
        return False
    try:
        entry = json.loads(data)
        return isinstance(entry, dict) and has_empty_answer(entry)
    except (ValueError, SampleError):  # for training to say
        return False


_BLANK = re.compile(rb'"(?:\\[nrt]|\s)*"|: *null')


def stopped(message: object) -> SourceError:
    """Return the error of a sample at which a conversion stops, with the flag that leaves such samples out."""
    return SourceError(f"{str(message).removesuffix('.')}. To leave such samples out: --on-error skip.")


def _by_number(message: str) -> list[str | int]:
    """Return what sorts messages by their places, with the numbers in them as such."""
    return [int(piece) if at % 2 else piece for at, piece in enumerate(re.split(r"([0-9]+)", message))]


def _key(options: ConvertOptions) -> bytes:
    """Return the options that a shard depends on, apart from its samples."""
    images = (options.max_pixels, options.quality) if options.reencodes else ()
    kept = ("checksums",) * options.checksums
    return repr((_FORMAT, _plain_layout(options.layout), options.media, *images, *kept)).encode()


def _plain_layout(layout: Layout) -> list[Any]:
    told: dict[str, Any] = {"ignored": sorted(layout.ignored)} if layout.ignored else {}
    told |= {name: value for name in ("question", "answers_as") if (value := getattr(layout, name)) is not None}
    kept = [*["preferred"] * layout.preferred, *[told] * bool(told)]
    return [layout.sample_type, dict(layout.fields), sorted(layout.bare), *kept]


def _load(root: Path, shard: str) -> ShardRecord | None:
    """Return the record of a shard, from this run or the previous one."""
    for folder in (root / PartsFolder.NAME, root / META_FOLDER / _RECORDS):
        try:
            return ShardRecord.decode(record_path(folder / shard).read_bytes())
        except (OSError, ValueError):
            continue
    return None


def _is_whole(root: Path, shard: str, record: ShardRecord) -> bool:
    if not record.scan.keys:
        return True
    for folder in (root / PartsFolder.NAME, root):
        if (folder / shard).exists():
            return (folder / shard).stat().st_size == record.size
    return False


def _finish(
    parts: PartsFolder,
    plan: Sequence[tuple[str, np.ndarray]],
    options: ConvertOptions,
    told: bytes,
    skipped: tuple[str, ...],
    reused: int,
) -> Converted:
    root = parts.root
    records = {shard: _load(root, shard) for shard, _ in plan}
    shards = [shard for shard, record in records.items() if record is not None and record.scan.keys]
    split_parts: dict[str, list[str]] = {}
    for shard, _ in plan:
        split_parts.setdefault(shard.partition("/")[0], [])
    for shard in shards:
        split_parts[shard.partition("/")[0]].append(shard)
    if options.split is not None:
        split_parts |= {name: [] for name, _ in options.split.ratios if name not in split_parts}
    store = open_store(root)
    old = read_info(store).shard_counts if store.exists(meta_path(INFO_JSON)) else {}
    written = {shard for shard in old if record_path(root / META_FOLDER / _RECORDS / shard).exists()}

    def load(shard: str) -> ShardRecord:
        record = records[shard]
        assert record is not None
        return record

    counts = {shard: len(load(shard).scan.keys) for shard in shards}
    unread = sum(map(num_unread, map(load, shards)), Counter[str]()) if options.media else Counter[str]()
    if counts != old or reused < len(plan) or any(parts.path.rglob("*.rec")):
        extra = {meta_path(f"{_RECORDS}/{_OPTIONS}"): told}
        if skipped:
            lines = "".join(" ".join(message.split()) + "\n" for message in skipped)
            extra[SKIPPED] = lines.encode("utf-8", "surrogateescape")
        for shard, record in records.items():
            if record is not None:
                extra[meta_path(f"{_RECORDS}/{record_path(Path(shard)).as_posix()}")] = record.encode()
        publish(
            parts,
            shards,
            load=load,
            sample_type=_type_name(options.layout),
            split_parts=split_parts,
            extra=extra,
        )
        if not skipped and store.exists(SKIPPED):
            store.delete(SKIPPED)
        for gone in written - counts.keys():  # not the tars of others, beside which --overwrite writes
            store.delete(gone)
            store.delete(index_name(gone))
            store.delete(meta_path(f"{_RECORDS}/{record_path(Path(gone)).as_posix()}"))
    parts.remove()
    return Converted(
        shard_counts=counts,
        split_parts=split_parts,
        skipped=skipped,
        num_reused=reused,
        num_unread=unread.total(),
        num_unread_images=sum(count for name, count in unread.items() if kind_by_name(f".{name}") == "image"),
        needed=tuple(sorted({one for name in unread if (one := missing_package(b"", name)) is not None})),
        num_rejected=sum(load(shard).num_rejected for shard in shards),
        empty=tuple(sorted((place for shard in shards for place in load(shard).empty), key=_by_number)),
    )


def _type_name(layout: Layout) -> str:
    return "CrudeWebdataset" if layout.is_crude else layout.sample_type


def _told(source: Source, options: ConvertOptions) -> bytes:
    """Return the source and options of a conversion, for comparison with another run."""
    plain = {
        "source": os.path.abspath(source.where),
        "layout": _plain_layout(options.layout),
        "split": str(asdict(options.split)["ratios"]) if options.split is not None else None,
        **{
            name: getattr(options, name)
            for name in ("shuffle", "samples_per_shard", "bytes_per_shard", "media", "skip_errors")
        },
        **({"max_pixels": options.max_pixels, "quality": options.quality} if options.reencodes else {}),
        **({"checksums": True} if options.checksums else {}),
        **({"prompt": prompt} if (prompt := getattr(source, "prompt", None)) is not None else {}),
    }
    return json.dumps(plain, indent=2).encode()


def _check_folder(parts: PartsFolder, told: bytes, *, overwrite: bool) -> None:
    """Raise for a folder that holds anything but this conversion, unfinished or finished."""
    root = parts.root
    for path in (parts.path / _OPTIONS, root / META_FOLDER / _RECORDS / _OPTIONS):
        if not path.exists():
            continue
        before = json.loads(path.read_bytes())
        now = json.loads(told)
        names = sorted({*before, *now} - {"skip_errors"})
        other = [name for name in names if before.get(name) != now.get(name)]
        is_finished = (root / meta_path(INFO_JSON)).exists()
        if other and not overwrite and (is_finished or "source" in other):
            differences = ", ".join(f"{name} was {before.get(name)}, now {now.get(name)}" for name in other)
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


_QUALITY = 90  # of images that are scaled down
_LOSSY = ("JPEG", "WEBP")
_KEPT = ("exif", "xmp", "icc_profile")
_IMAGES = MediaFilter(strategy="EXTENSION")


def reencoded(part: str, data: bytes, options: ConvertOptions) -> bytes:
    """Return an image scaled down to `max_pixels` and encoded with `quality`; return anything else unchanged.

    The format, the colour profile, the EXIF data and the XMP stay. Images are never scaled up, and
    animations are left alone. Raises SourceError if the part has the name of an image but is not one.
    """
    if _IMAGES.kind_of(f"x.{part}", data[:HEAD_BYTES]) != "image":
        return data
    from PIL import Image  # the command line starts without it

    if (remedy := missing_package(data[:HEAD_BYTES])) is not None:
        raise SourceError(f"cannot scale down the part {part!r}: {remedy}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images are expected here, not decompression bombs
            with Image.open(io.BytesIO(data)) as image:
                form = image.format or ""
                size = _scaled_size(image.size, options.max_pixels)
                fits = size == image.size
                if getattr(image, "n_frames", 1) > 1 or (fits and (options.quality is None or form not in _LOSSY)):
                    return data
                made = image if fits else _scaled(image, size, data)
                settings: dict[str, Any] = {key: image.info[key] for key in _KEPT if key in image.info}
                if "exif" not in settings and ORIENTATION in image.getexif():  # from where it would not be kept
                    settings["exif"] = image.getexif()
                if form in _LOSSY:
                    settings["quality"] = options.quality or _QUALITY
                out = io.BytesIO()
                made.save(out, form, **settings)
    except Exception as error:  # codecs raise anything
        raise SourceError(f"cannot scale down the part {part!r}: {type(error).__name__}: {error}") from error
    encoded = out.getvalue()
    return data if fits and len(encoded) >= len(data) else encoded


def _scaled_size(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """Return the largest size of the same aspect ratio with at most `max_pixels`."""
    width, height = size
    if max_pixels is None or width * height <= max_pixels:
        return size
    factor = math.sqrt(max_pixels / (width * height))
    return max(1, int(width * factor)), max(1, int(height * factor))


def _scaled(image: Any, size: tuple[int, int], data: bytes) -> Any:
    from PIL import Image

    if can_scale(data):
        image.draft(None, (2 * size[0], 2 * size[1]))  # decodes JPEGs of more than twice the size at a smaller scale
    if image.mode in ("P", "1"):
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image.resize(size, Image.Resampling.LANCZOS)

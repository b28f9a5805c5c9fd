"""`ShardWriter`: a prepared dataset from Python, sample by sample.

    with ShardWriter("data/captions", sample_type=CaptioningSample) as out:
        out.write({"image": Path("cat.jpg"), "caption": "a cat"})

How a field is stored: encoded media (bytes or a Path) as a part named by its format (`jpg`), arrays as `FIELD.npy`, the
one text that a type requires as `txt`, all others together as `json`. `dataset.yaml` maps the parts back to the fields.
A `CrudeSample` is written part by part instead.

Invariant: nothing is readable until the writer (or `finish_shards`, for several writers) is done.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SourceError, did_you_mean
from energon_bridge.core.format.field_map import describe_fields
from energon_bridge.core.format.media import HEAD_BYTES, extension_by_head
from energon_bridge.core.format.nvmeta import INFO_JSON, INFO_YAML, meta_path
from energon_bridge.core.prepare.indexing import ShardRecord
from energon_bridge.core.samples import META_FIELDS, CrudeSample, Sample, field_names, sample_type_by_name
from energon_bridge.tools.convert.shards import END_BYTES, PartsFolder, ShardFile, member_size, publish
from energon_bridge.tools.convert.splits import SPLIT_ORDER

_MEDIA_FIELDS = ("image", "video", "audio")
_NOT_WRITABLE = {"InterleavedSample": "images and texts in a row", "SimilarityInterleavedSample": "several images"}


class ShardWriter:
    """Write samples as shards with all their indexes; a context manager.

    Examples:
        >>> with ShardWriter("data/written", sample_type=TextSample, samples_per_shard=50) as out:
        ...     for number in range(100):
        ...         out.write({"text": f"text number {number}"})
        >>> len(next(iter(get_savable_loader(get_train_dataset("data/written", batch_size=8)))).text)
        8

    Args:
        path: A new or empty folder.
        sample_type: A sample type of this package, or CrudeSample.
        samples_per_shard: Exact number of samples in each shard but the last.
        bytes_per_shard: Maximum size of a shard, unless a single sample is larger. With both, whichever is reached
            first.
        split_part: The split part that all samples of this writer belong to.
        writer: A name for one of several writers of the same dataset (of processes, say), which each write shards of
            their own. The dataset is readable after `finish_shards(path)`. Without a name, the end of the block does
            that.
        media: Store the sizes and durations of images, videos and sound.
        checksums: Keep checksums of all samples and parts, which readers compare.

    Raises:
        ConfigurationError: The settings contradict each other, or the folder contains something else.
        SourceError: A sample does not fit the type; it names the sample.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sample_type: type,
        samples_per_shard: int | None = None,
        bytes_per_shard: int | None = None,
        split_part: str = "train",
        writer: str | None = None,
        media: bool = True,
        checksums: bool = False,
    ) -> None:
        self._type = _writable(sample_type)
        if samples_per_shard is None and bytes_per_shard is None:
            samples_per_shard = 10_000
        for name, value in (("samples_per_shard", samples_per_shard), ("bytes_per_shard", bytes_per_shard)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: expected at least 1.")
        for name, text in (("split_part", split_part), ("writer", writer)):
            if text is not None and (not text or not text.replace("_", "").replace("-", "").isalnum()):
                raise ConfigurationError(f"{name}={text!r}: expected letters, digits, - and _.")
        _check_free(Path(path))
        self._samples_per_shard = samples_per_shard
        self._bytes_per_shard = bytes_per_shard
        self._writer = writer
        self._kept = {"media": media, "checksums": checksums}
        self._parts = PartsFolder(Path(path), lock="alone" if writer is None else None)
        self._folder = self._parts.path / split_part
        self._prefix = f"{writer}-" if writer is not None else ""
        if any(self._folder.glob(f"{self._prefix}[0-9]*")) if writer else any(self._parts.path.iterdir()):
            self._parts.close()
            raise ConfigurationError(
                f"{self._parts.path} contains shards of an earlier run that did not finish. Remove it, and write again."
            )
        self._fields = {name: (required, kind) for name, required, kind in _described(self._type)}
        texts = [name for name, (required, kind) in self._fields.items() if required and kind in ("str", str)]
        self._text = texts[0] if len(texts) == 1 else None
        self._main_media = next((name for name in _MEDIA_FIELDS if name in self._fields), None)
        self._shard: ShardFile | None = None
        self._num_shards = 0
        self.num_samples = 0
        self._given: frozenset[str] | None = None

    def write(self, sample: Sample | Mapping[str, Any]) -> None:
        """Write a sample: one of the type, or a mapping of its fields.

        A `__key__` must be unique in the dataset; samples without one are numbered.
        """
        values = dict(sample) if isinstance(sample, Mapping) else self._values(sample)
        key = values.get("__key__")
        if key is None or key == "":
            key = f"{self._prefix}{self.num_samples:09d}"
        where = f"sample {self.num_samples} ({key!r})"
        if not isinstance(key, str):
            raise SourceError(f"{where}: the key is a {type(key).__name__}, expected text.")
        values = {name: value for name, value in values.items() if name not in META_FIELDS}
        accesses: dict[str, str] = {}
        if issubclass(self._type, CrudeSample):
            parts = [(part, _crude_bytes(part, value, where)) for part, value in values.items()]
        else:
            parts, accesses = self._typed_parts(values, where)
        self._add(str(key), parts, accesses)

    def _values(self, sample: Any) -> dict[str, Any]:
        if not isinstance(sample, self._type):
            raise SourceError(
                f"sample {self.num_samples} is a {type(sample).__name__}, expected a {self._type.__name__} or a "
                f"mapping of its fields."
            )
        return {name: getattr(sample, name) for name in field_names(type(sample))}

    def _typed_parts(self, values: dict[str, Any], where: str) -> tuple[list[tuple[str, bytes]], dict[str, str]]:
        for name in values:
            if name not in self._fields:
                hint = did_you_mean(name, self._fields)
                raise SourceError(
                    f"{where}: {self._type.__name__} has no field `{name}`; it has {', '.join(self._fields)}.{hint}"
                )
        parts: list[tuple[str, bytes]] = []
        accesses: dict[str, str] = {}
        plain: dict[str, Any] = {}
        for name, (required, kind) in self._fields.items():
            value = values.get(name)
            if value is None and required:
                raise SourceError(f"{where}: {self._type.__name__} requires the field `{name}`, which is missing.")
            if name in _MEDIA_FIELDS or isinstance(value, bytes | bytearray | memoryview | os.PathLike):
                if value is None:
                    continue
                extension, data = _encoded(value, f"{where}, field `{name}`")
                part = extension if name == self._main_media else f"{name}.{extension}"
            elif hasattr(value, "__array__"):
                part = f"{name}.npy"
                data = _npy(value)
            elif name == self._text:
                if not isinstance(value, str):
                    raise SourceError(f"{where}, field `{name}`: is a {type(value).__name__}, expected text.")
                part = "txt"
                data = value.encode()
            else:
                _check_plain(value, kind, f"{where}, field `{name}`")
                plain[name] = value
                continue
            parts.append((part, data))
            accesses[name] = part
        given = frozenset(accesses)
        if self._given is None:
            self._given = given
        elif given != self._given:
            odd = sorted(given ^ self._given)
            raise SourceError(
                f"{where}: the field{'s' * (len(odd) > 1)} {', '.join(odd)} {'is' if odd[0] in given else 'is not'} "
                f"given here, unlike in the first sample. Media and arrays must be in every sample or in none."
            )
        if plain:
            parts.append(("json", _json(plain, where)))
            accesses |= {name: f"json[{name}]" for name in plain}
        return parts, accesses

    def _add(self, key: str, parts: Sequence[tuple[str, bytes]], accesses: Mapping[str, str]) -> None:
        shard = self._shard
        if shard is not None and self._is_full(shard, sum(member_size(f"{key}.{part}", len(d)) for part, d in parts)):
            self._close_shard()
            shard = None
        if shard is None:
            shard = ShardFile(self._folder / f"{self._prefix}{self._num_shards:05d}.tar", **self._kept)
            self._shard = shard
            self._num_shards += 1
        shard.add(key, parts, accesses)
        self.num_samples += 1

    def _is_full(self, shard: ShardFile, more: int) -> bool:
        if self._samples_per_shard is not None and shard.num_samples >= self._samples_per_shard:
            return True
        return self._bytes_per_shard is not None and shard.num_bytes + more + END_BYTES > self._bytes_per_shard

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close(made_of=self._type.__name__)
            self._shard = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is not None:
                if self._shard is not None:
                    self._shard.abort()
                for path in self._folder.glob(f"{self._prefix}[0-9]*"):
                    path.unlink(missing_ok=True)
                if self._folder.is_dir() and not any(self._folder.iterdir()):
                    self._folder.rmdir()
                return
            self._close_shard()
            if self._writer is None:
                _finish(self._parts)
        finally:
            self._parts.close()


def finish_shards(path: str | os.PathLike[str]) -> dict[str, int]:
    """Combine the shards of several finished writers into one dataset; return the samples by shard.

    Examples:
        >>> for number in range(2):  # in processes of their own
        ...     with ShardWriter("data/parallel", sample_type=TextSample, writer=f"part{number}") as out:
        ...         out.write({"__key__": f"text{number}", "text": "hello"})
        >>> finish_shards("data/parallel")
        {'train/part0-00000.tar': 1, 'train/part1-00000.tar': 1}

    Call it once, in one process. You can repeat it if it was interrupted.

    Raises:
        ConfigurationError: There are no shards, or a writer has not finished.
        DuplicateKeyError: Two samples share a key.
    """
    with PartsFolder(Path(path)) as parts:
        unfinished = sorted(parts.path.rglob("*.partial"))
        if unfinished:
            raise ConfigurationError(
                f"{unfinished[0]}: a writer is still running, or was killed. Wait for it, or remove this file and "
                "write its samples again."
            )
        return _finish(parts)


def _finish(parts: PartsFolder) -> dict[str, int]:
    paths = sorted(parts.path.rglob("*.rec"))
    if not paths:
        raise ConfigurationError(f"{parts.root}: no sample was written, so there is nothing to finish.")
    shards = [path.relative_to(parts.path).with_suffix(".tar").as_posix() for path in paths]
    split_parts: dict[str, list[str]] = {}
    for shard in shards:
        split_parts.setdefault(shard.partition("/")[0], []).append(shard)

    def load(shard: str) -> ShardRecord:
        return ShardRecord.decode((parts.path / shard).with_suffix(".rec").read_bytes())

    kinds = {load(shard).made_of for shard in shards}
    if len(kinds) > 1:
        raise ConfigurationError(f"{parts.root}: the writers wrote different sample types: {', '.join(sorted(kinds))}.")
    listed = {part: split_parts.pop(part) for part in SPLIT_ORDER if part in split_parts} | split_parts
    counts = publish(parts, shards, load=load, sample_type=kinds.pop(), split_parts=listed)
    parts.remove()
    return counts


def _writable(sample_type: type) -> type:
    name = sample_type.__name__
    if name in _NOT_WRITABLE:
        raise ConfigurationError(
            f"{name} holds {_NOT_WRITABLE[name]}, which no field map can name. Write CrudeSample with the parts json, "
            "0.jpg, 1.jpg, … and cook them."
        )
    if sample_type_by_name(name) is not sample_type:
        raise ConfigurationError(f"{sample_type!r} is not the {name} of this package.")
    return sample_type


def _described(sample_type: type) -> list[tuple[str, bool, Any]]:
    return [] if issubclass(sample_type, CrudeSample) else list(describe_fields(sample_type))


def _check_free(path: Path) -> None:
    if path.is_file():
        raise ConfigurationError(f"{path} is a file, expected a folder to write to.")
    for name in (INFO_JSON, INFO_YAML):
        if (path / meta_path(name)).exists():
            raise ConfigurationError(f"{path} is a prepared dataset already. Write to another folder, or remove it.")


def _encoded(value: Any, where: str) -> tuple[str, bytes]:
    """Return extension and bytes of encoded media."""
    if isinstance(value, os.PathLike):
        path = Path(value)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceError(f"{where}: cannot read {path}: {error.strerror}.") from error
        extension = path.suffix[1:].lower() or extension_by_head(data[:HEAD_BYTES])
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        extension = extension_by_head(data[:HEAD_BYTES])
    else:
        raise SourceError(
            f"{where}: is a {type(value).__name__}, expected the encoded file: bytes, or a Path. Media is stored "
            "as it is, never encoded here."
        )
    if not data:
        raise SourceError(f"{where}: is empty.")
    if extension is None:
        raise SourceError(f"{where}: unknown format of the bytes ({data[:8]!r}…); pass a Path with a suffix.")
    return extension, data


def _crude_bytes(part: str, value: Any, where: str) -> bytes:
    if isinstance(value, os.PathLike):
        return _encoded(value, f"{where}, part `{part}`")[1]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if part.rpartition(".")[2] in ("json", "jsn"):
        return _json(value, f"{where}, part `{part}`")
    if isinstance(value, str):
        return value.encode()
    if hasattr(value, "__array__") and part.endswith("npy"):
        return _npy(value)
    raise SourceError(
        f"{where}, part `{part}`: is a {type(value).__name__}; expected bytes, text, a Path, an array for npy, or "
        "plain values for json."
    )


def _npy(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(value), allow_pickle=False)
    return buffer.getvalue()


def _json(value: Any, where: str) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise SourceError(f"{where}: cannot write it as JSON: {error}.") from error


_PLAIN_KINDS: tuple[tuple[str, type], ...] = (("str", str), ("int", int))


def _check_plain(value: Any, kind: Any, where: str) -> None:
    """Raise SourceError for a wrong plain type, such as a number for a string."""
    declared = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    options = [option.strip() for option in declared.split("|")]
    if value is None or not set(options) <= {"str", "int", "None"}:
        return
    wanted = [python for name, python in _PLAIN_KINDS if name in options]
    if not isinstance(value, tuple(wanted)) or (isinstance(value, bool)):
        raise SourceError(f"{where}: is a {type(value).__name__}, expected {declared}.")

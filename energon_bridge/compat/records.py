"""Small parts of megatron-energon: mixins, hook and fork hooks, dataset facts, its decoder and its cache pool."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec
from typing import Any, ClassVar, Self

from energon_bridge.cloud import file_cache
from energon_bridge.compat.epath import EPath
from energon_bridge.compat.table import not_provided
from energon_bridge.core import encoder as task_encoder, errors
from energon_bridge.core.errors import ConfigurationError, MetadataError
from energon_bridge.core.format.documents import parse_document
from energon_bridge.core.format.jsonl import open_jsonl
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, INFO_JSON, INFO_YAML, META_FOLDER
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.samples.base import pin_value
from energon_bridge.core.stores.cache import Lazy
from energon_bridge.models import av

SYSTEM_EXCEPTIONS = (
    SystemError,
    SyntaxError,
    ImportError,
    StopIteration,
    StopAsyncIteration,
    MemoryError,
    RecursionError,
    ReferenceError,
    NameError,
)


class PinMemoryMixin:
    """Adds `pin_memory` to a dataclass, for custom batch types."""

    def pin_memory(self) -> Self:
        """Return a copy whose tensors, at any depth, are in pinned host memory."""
        values = {entry.name: pin_value(getattr(self, entry.name)) for entry in fields(self) if entry.init}  # type: ignore[arg-type]
        return type(self)(**values)


class ExtendableDataclassMixin:
    """Adds `extend` to a dataclass."""

    @classmethod
    def extend(cls, src: Any, **kwargs: Any) -> Self:
        """Make an object of this class from one of a base class: copies its fields, and sets new ones from `kwargs`."""
        if not issubclass(cls, type(src)):
            raise ConfigurationError(f"{cls.__name__}.extend: {type(src).__name__} is not a base class of it")
        return cls(**{entry.name: getattr(src, entry.name) for entry in fields(src) if entry.init} | kwargs)


class MockLazy(Lazy):
    """A lazy that gets its value from a function, for testing encoders."""

    def __init__(self, fname: str, get_fn: Callable[[str], Any]) -> None:
        self.fname = fname
        self._get_fn = get_fn

    def read(self) -> tuple[Any, SourceInfo | None]:
        """Make the value."""
        return self._get_fn(self.fname), None


def get_source_info(sample: Any) -> list[SourceInfo] | None:
    """Return the sources of a sample's parts, None if it has none."""
    sources = sample.get("__sources__") if isinstance(sample, Mapping) else getattr(sample, "__sources__", None)
    return None if sources is None else list(sources)


def get_stateless(fn: Callable[..., Any]) -> bool:
    """Whether a hook is marked `@stateless`."""
    return bool(getattr(fn, "__stateless__", False))


def get_failure_tolerance(fn: Callable[..., Any], default_failure_tolerance: int | None = None) -> int | None:
    """Return the failure tolerance set on a hook."""
    tolerance: int | None = getattr(fn, "__failure_tolerance__", default_failure_tolerance)
    return tolerance


def get_cooker_need_cache(fn: Callable[..., Any]) -> bool:
    """Whether a cooker asks for the cache pool."""
    return bool(getattr(fn, "__need_cache__", False))


def get_cooker_need_primary(fn: Callable[..., Any]) -> bool:
    """Whether a cooker asks for its dataset as a store."""
    return bool(getattr(fn, "__need_primary__", False))


Hook = Callable[[], None]


def _held(hook: Hook, make_persistent: bool) -> Hook:
    """Return a function that calls a hook while something else references it (or always, if persistent)."""
    if make_persistent:
        return hook
    # Each lookup of a bound method makes a new object: the lifetime of its instance counts.
    bound = getattr(hook, "__self__", None) is not None
    reference = weakref.WeakMethod(hook) if bound else weakref.ref(hook)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def before_fork_hook(callable: Hook, make_persistent: bool = False) -> None:  # noqa: A002 - the name users pass it by
    """Call a function before each fork, as long as it is referenced."""
    os.register_at_fork(before=_held(callable, make_persistent))


def after_in_parent_fork_hook(callable: Hook, make_persistent: bool = False) -> None:  # noqa: A002
    """Call a function after each fork, in the process that forked."""
    os.register_at_fork(after_in_parent=_held(callable, make_persistent))


def after_in_child_fork_hook(callable: Hook, make_persistent: bool = False) -> None:  # noqa: A002
    """Call a function after each fork, in the new process."""
    os.register_at_fork(after_in_child=_held(callable, make_persistent))


class ForkMixin:
    """Calls those of `__before_fork__`, `__after_in_parent_fork__` and `__after_in_child_fork__` that an object has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register_fork_hooks(self)


class DataclassForkMixin:
    """The same for dataclasses."""

    def __post_init__(self) -> None:
        """Register the methods."""
        register_fork_hooks(self)


def register_fork_hooks(target: Any) -> None:
    """Register the fork methods that an object has."""
    for name, register in (
        ("__before_fork__", before_fork_hook),
        ("__after_in_parent_fork__", after_in_parent_fork_hook),
        ("__after_in_child_fork__", after_in_child_fork_hook),
    ):
        if hasattr(target, name):
            register(getattr(target, name))


# ---------------------------------------------------------------------------------------------------------------------
# `FileStoreCachePool` with megatron-energon's `method="pickle"`, which keeps decoded files there.


logger = logging.getLogger(__name__)


class SampleException(errors.SampleError, ValueError):  # noqa: N818 - the name that energon users know
    """User code says that a sample is bad."""

    @classmethod
    def from_sample_key(cls, sample_key: str) -> SampleException:
        """Return the exception for the sample with a key."""
        return cls(f"Sample {sample_key} failed")

    @classmethod
    def from_sample(cls, sample: Any, message: str = "") -> SampleException:
        """Return the exception for a sample, with a message."""
        key = sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", None)
        return cls(f"Sample {key} failed{f': {message}' if message else ''}")


class FatalSampleError(errors.FatalSampleError, SampleException):
    """More samples failed in a row than a hook tolerates, or the program has a mistake."""


class FileStoreCachePool(file_cache.FileStoreCachePool):
    """A cache pool that also takes `method="pickle"`: the values are the same, decoded each time they are got.

    The other arguments are those of `energon_bridge.FileStoreCachePool`.
    """

    def __init__(self, *, method: str = "raw", **kwargs: Any) -> None:
        if method == "pickle":
            logger.warning(
                "FileStoreCachePool(method='pickle') works like 'raw', which keeps files as they are, without pickle"
            )
            method = "raw"
        super().__init__(method=method, **kwargs)  # type: ignore[arg-type]  # refuses any other


# ---------------------------------------------------------------------------------------------------------------------
# What a program asks of a dataset's files before it opens them: what kind it is, and how many samples it has.


class EnergonDatasetType(Enum):
    """What a path is."""

    METADATASET = "metadataset"
    WEBDATASET = "webdataset"
    JSONL = "jsonl"
    FILESYSTEM = "filesystem"
    INVALID = "invalid"


def get_dataset_type(path: Any) -> EnergonDatasetType:
    """Return the kind of dataset at a path, judging by its files."""
    path = EPath(path)
    if path.is_file():
        kinds = {"jsonl": EnergonDatasetType.JSONL, "yaml": EnergonDatasetType.METADATASET}
        return kinds.get(path.name.rpartition(".")[2], EnergonDatasetType.INVALID)
    if check_dataset_info_present(path):
        return EnergonDatasetType.WEBDATASET
    is_indexed = (path / META_FOLDER / INDEX_SQLITE).is_file()
    return EnergonDatasetType.FILESYSTEM if is_indexed else EnergonDatasetType.INVALID


def check_dataset_info_present(path: Any) -> bool:
    """Whether a folder is a prepared dataset."""
    return any((EPath(path) / META_FOLDER / name).is_file() for name in (INFO_JSON, INFO_YAML))


def get_dataset_info(path: Any) -> dict[str, Any]:
    """Return the content of the `.info` file of a prepared dataset, such as `shard_counts`; raises MetadataError."""
    for name in (INFO_JSON, INFO_YAML):
        file = EPath(path) / META_FOLDER / name
        if file.is_file():
            data = file.read_bytes()
            info = json.loads(data) if name == INFO_JSON else parse_document(data, where=file.url)
            if isinstance(info, dict):
                return info
            raise MetadataError(f"{file.url}: expected a mapping, found {type(info).__name__}")
    raise MetadataError(f"{EPath(path).url}: not prepared ({META_FOLDER}/{INFO_JSON} is missing)")


class IJsonlIndexReader:
    """The index of a JSONL file, of which only the number of samples can be asked."""

    def __init__(self, jsonl_path: Any) -> None:
        raise not_provided("IJsonlIndexReader(…)", "open the .jsonl file with get_train_dataset")

    @staticmethod
    def count_samples(jsonl_path: Any) -> int:
        """Return the number of samples of a JSONL file."""
        return open_jsonl(EPath(jsonl_path).url).num_samples


# ---------------------------------------------------------------------------------------------------------------------
# `AVDecoder` and `SampleDecoder` as megatron-energon has them.
#
# Sound has the file's own type, a range beyond the end gives no clip, and pickles are read: those of plain values.


AV_DECODE_AVAILABLE = find_spec("av") is not None


class AVDecoder(av.AVDecoder):
    """A video, or sound, to take clips from; the arguments are those of `energon_bridge.models.av.AVDecoder`.

    A range that begins beyond the end gives no clip, so that there are fewer clips than ranges.
    """

    leaves_out_beyond: ClassVar[bool] = True

    def __init__(self, stream: Any, suppress_warnings: bool = False, **kwargs: Any) -> None:
        super().__init__(stream, suppress_warnings, **{"audio_format": "native", **kwargs})


@dataclass(slots=True)
class AVProbeIndexEntry:
    """A packet of a video: its presentation time, in units of its stream, and whether it has a key frame."""

    timestamp: int
    is_keyframe: bool


class AVProbeIndex:
    """The packets of a video in the order of the file, all of them read: for containers without an index.

    Args:
        container: An open container of PyAV.
        stream_idx: Which of its videos.
    """

    def __init__(self, container: Any, stream_idx: int = 0) -> None:
        packets = container.demux(video=stream_idx)
        self._entries = [AVProbeIndexEntry(one.pts, one.is_keyframe) for one in packets if one.pts is not None]
        container.seek(0)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, idx: int) -> AVProbeIndexEntry:
        return self._entries[idx]

    def search_timestamp(self, timestamp: int, *, backward: bool = True, any_frame: bool = False) -> int:
        """Return the number of the last key frame (or frame) up to a time, of the first frame if there is none.

        With `backward=False`, of the first one from that time on; -1: none.
        """
        frames = [(one.timestamp, at) for at, one in enumerate(self._entries) if any_frame or one.is_keyframe]
        if backward and frames:
            return max((one for one in frames if one[0] <= timestamp), default=(0, 0))[1]
        return min((one for one in frames if one[0] >= timestamp), default=(0, -1))[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDecoder(task_encoder.SampleDecoder):
    """Decodes the parts of a sample; the arguments are those of `energon_bridge.SampleDecoder`."""

    read_pickles: bool = True
    av_class: type[av.AVDecoder] = AVDecoder


DEFAULT_DECODER = SampleDecoder()

"""Every error this package raises on purpose, so that callers can catch one family or one case.

What each means stands at its class::

    EnergonError
    ├── ConfigurationError      UnknownArgumentError, DataParallelError, MaskedMicrobatchesError, NoCookerError,
    │                           WrongUseError, MissingPackageError, NotProvidedError
    ├── DatasetError            DatasetNotFoundError, NotPreparedError, NoShardsError, ShardMissingError,
    │                           CorruptShardError, UnsupportedShardError, DuplicateKeyError, KeyIndexError,
    │                           UnmatchedKeyError, UnknownSplitError, EmptyDatasetError, MetadataError (FieldMapError),
    │                           SourceError, MediaMetadataError, UntrustedCodeError
    ├── StorageError            ShortReadError
    ├── SampleError             DecodeError (MissingCodecError), BarredSampleError, FieldAccessError, UnfitSampleError,
    │                           FileNotInStoreError: the sample is left out, unless the policy says otherwise
    ├── FatalSampleError        StoppedByPolicyError, OverLongSampleError, ErrorRateError, HookTimeoutError
    ├── StateError              StateFormatError, StateVersionError, OrderVersionError, DatasetMismatchError,
    │                           SplitMismatchError, SettingMismatchError (SeedMismatchError, BatchSizeMismatchError,
    │                           SliceSizeMismatchError), MissingRankError, StepMismatchError, TooManyRanksError
    ├── LoaderError             BalanceError, BroadcastError, ForkedLoaderError, WorkerDiedError
    └── ResumeMismatchError

`SkipSample` is not an error: user code raises it to leave a sample out on purpose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeGuard


class EnergonError(Exception):
    """Base of all errors that this package raises on purpose.

    Examples:
        >>> try:
        ...     get_train_dataset("data/nowhere", batch_size=4)
        ... except EnergonError as error:
        ...     print(type(error).__name__)
        DatasetNotFoundError
    """


class ConfigurationError(EnergonError, ValueError):
    """An argument or a configuration value is wrong."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """A keyword or key that does not exist."""


class DataParallelError(ConfigurationError):
    """The ranks of a loader are not the data-parallel ranks of megatron's groups."""


class MaskedMicrobatchesError(ConfigurationError):
    """The ranks do not divide the lanes, and the caller did not say that the loss weighs by the mask."""


class NoCookerError(ConfigurationError):
    """No cooker of the encoder takes the samples of a crude dataset."""


class WrongUseError(ConfigurationError, TypeError):
    """An object is used as something it is not, such as a dataset as an iterator; the message says what to use."""


class MissingPackageError(ConfigurationError, ImportError):
    """A package that this part needs is not installed; the message names the extra that has it."""


class NotProvidedError(ConfigurationError, NotImplementedError):
    """A part of megatron-energon has no counterpart here; the message says what to use instead."""


class DatasetError(EnergonError):
    """A dataset on disk cannot be used."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """The folder or file does not exist."""


class NotPreparedError(DatasetError):
    """The folder has no `.nv-meta`."""


class NoShardsError(DatasetError):
    """There are no tar files below the folder."""


class ShardMissingError(DatasetError):
    """A shard or its index is listed but not there."""


class CorruptShardError(DatasetError):
    """A tar is truncated or has a broken header."""


class UnsupportedShardError(DatasetError):
    """A shard is compressed, so that no range of it can be read."""


class DuplicateKeyError(DatasetError):
    """Two samples of one dataset share a key."""


class KeyIndexError(DatasetError):
    """The dataset has no key index, or one that cannot be read."""


class UnmatchedKeyError(DatasetError):
    """A sample has no match in another dataset of a join."""


class UnknownSplitError(DatasetError):
    """The split part is not in the split file."""


class EmptyDatasetError(DatasetError):
    """The split part has no samples."""


class MetadataError(DatasetError):
    """A metadata file cannot be parsed or holds wrong types."""


class FieldMapError(MetadataError):
    """The field map names an unknown field or misses a required one."""


class MediaMetadataError(DatasetError):
    """A store has no media metadata, or some that cannot be read."""


class SourceError(DatasetError, ValueError):
    """A sample cannot be converted or written as it is; the message says where it is."""


class UntrustedCodeError(DatasetError):
    """The dataset wants to run code and the caller did not allow it."""


class StorageError(EnergonError, OSError):
    """Bytes could not be read or written, after retries."""


class ShortReadError(StorageError):
    """A range holds fewer bytes than the index promises."""


class SampleError(EnergonError):
    """One sample is bad."""


class DecodeError(SampleError, ValueError):
    """A part of a sample cannot be decoded."""


class MissingCodecError(DecodeError):
    """A sample is of a format that needs a package that is not installed; the message names it."""


class BarredSampleError(SampleError):
    """A sample killed or hung its worker several times in a row and is not tried again."""


class FieldAccessError(SampleError, KeyError):
    """A field of a sample cannot be found in its parts."""

    __str__ = Exception.__str__


class UnfitSampleError(SampleError, ConfigurationError):
    """Samples do not fit each other or a setting; a single failure cannot show which of the two is wrong."""


class FileNotInStoreError(SampleError, KeyError):
    """A file store has no file, or no metadata of a file, of that key."""

    __str__ = Exception.__str__


class FatalSampleError(EnergonError):
    """A sample error that must stop the run."""


class StoppedByPolicyError(FatalSampleError):
    """The error policy, or the handler of the program, stops the run at a sample that failed."""


class OverLongSampleError(FatalSampleError):
    """A sample alone exceeds a limit of its pack, and the policy does not leave it out."""


class ErrorRateError(FatalSampleError):
    """More samples of a dataset failed than the error policy allows."""


class HookTimeoutError(FatalSampleError):
    """A microbatch took longer than `watchdog_timeout_seconds`, with `fail_on_timeout`."""


class StateError(EnergonError):
    """A saved state does not fit this run."""


class StateFormatError(StateError):
    """Not a state of this package, or damaged."""


class StateVersionError(StateError):
    """Written in another version of the state format."""


class OrderVersionError(StateError):
    """Written under other rules of order."""


class DatasetMismatchError(StateError):
    """The state belongs to another dataset, or the content of the dataset changed."""


class SplitMismatchError(StateError):
    """The state belongs to another split part."""


class SettingMismatchError(StateError):
    """A setting that the order depends on differs."""


class SeedMismatchError(SettingMismatchError):
    """The state was written with another seed."""


class BatchSizeMismatchError(SettingMismatchError):
    """The state was written with another (micro) batch size."""


class SliceSizeMismatchError(SettingMismatchError):
    """The state was written with another `max_samples_per_sequence`."""


class MissingRankError(StateError):
    """The states of some ranks are not there."""


class StepMismatchError(StateError):
    """The ranks were not saved at the same step."""


class TooManyRanksError(StateError):
    """There are more data-parallel ranks than lanes."""


class LoaderError(EnergonError):
    """The loader cannot continue."""


class BalanceError(LoaderError):
    """Another data-parallel rank failed, or is gone, while the microbatches of a global batch are balanced."""


class BroadcastError(LoaderError):
    """The rank that loads for a replica failed, with an error that is not one of ours."""


class ForkedLoaderError(LoaderError):
    """A loader is iterated in a fork of the process in which it delivers."""


class WorkerDiedError(LoaderError):
    """Worker processes died more often than the limit allows."""


class ResumeMismatchError(EnergonError):
    """A resumed loader delivered other batches than an uninterrupted one."""


class SkipSample(Exception):  # noqa: N818 - the name that energon users know
    """Raise it in a hook to leave the current sample out; it is counted, and the batch still fills.

    Examples:
        >>> class Short(DefaultTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         if len(sample.caption) > 15:
        ...             raise SkipSample
        ...         return sample
    """


_CALLED: dict[str, str] = {}


def call_settings(names: Mapping[str, str]) -> None:
    """Let messages name settings as the program that runs reads them, too: `batch_size` as `data.micro_batch_size`."""
    _CALLED.update(names)


def called(setting: str) -> str:
    """Return what the program that runs calls a setting, to append to its name: " (data.micro_batch_size)", or ""."""
    return f" ({_CALLED[setting]})" if setting in _CALLED else ""


def did_you_mean(name: object, known: Collection[str], *, cutoff: float = 0.6) -> str:
    """Return the hint for a mistyped name, to append to a sentence: " Did you mean 'path'?", or "" if none is similar.

    Args:
        cutoff: Similarity that the nearest one needs, from 0 to 1.
    """
    from difflib import get_close_matches  # takes longer to import than this module

    near = get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, of NumPy too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(name: str, value: object, least: int | None, *, optional: bool = False) -> Any:
    """Return a setting as an int, or None if it is `optional`.

    Raises:
        ConfigurationError: It is no whole number, or less than `least`.
    """
    if value is None and optional:
        return None
    if not is_whole(value) or (least is not None and value < least):
        kind = f"an integer{'' if least is None else f' of at least {least}'}{' or None' if optional else ''}"
        raise ConfigurationError(f"{name} must be {kind}, got {value!r}")
    return int(value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigurationError unless a setting is one of some words."""
    if value not in choices:
        words = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise ConfigurationError(f"{name} must be {words}, got {value!r}")


_EXTRAS = {"lightning": "lightning,hf", "transformers": "hf", "tokenizers": "hf", "megatron": "megatron"}


@contextmanager
def optional_packages() -> Iterator[None]:
    """Raise MissingPackageError, which names the extra, where an import of a package of an extra fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if (extra := _EXTRAS.get(name)) is None:
            raise
        raise MissingPackageError(
            f"this needs {name}, which is not installed: pip install 'energon-bridge[{extra}]'"
        ) from error

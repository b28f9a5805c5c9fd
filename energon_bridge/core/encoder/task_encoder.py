"""The task encoder: the user's hooks for samples and batches.

`encode_sample` gets every sample, `batch` the samples of a microbatch, `encode_batch` the microbatch. Around packing,
`preencode_sample` and `postencode_sample` replace `encode_sample`. The base class's own hooks carry a mark
(`__default_hook__`), which tells the engine that no user code runs in them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from types import GenericAlias, MethodType
from typing import Any, ClassVar, Generic, TypeVar, cast, overload

from energon_bridge.core.encoder import hooks
from energon_bridge.core.encoder.collate import (
    Action,
    batch_of,
    batch_samples,
    convert_record,
    generic_batch,
    target_fields,
)
from energon_bridge.core.encoder.cooking import Cooker, cook_sample
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.errors import FatalSampleError
from energon_bridge.core.samples import CrudeSample
from energon_bridge.core.stores import CachePool, FileStore

SampleT = TypeVar("SampleT")
EncodedT = TypeVar("EncodedT")
RawBatchT = TypeVar("RawBatchT")
BatchT = TypeVar("BatchT")
Hook = TypeVar("Hook", bound=Callable[..., Any])


def default_hook(hook: Hook) -> Hook:
    """Mark a hook as the package's own, in which no user code runs."""
    hook.__default_hook__ = True  # type: ignore[attr-defined]
    return hook


@overload
def stateless(fn: Hook) -> Hook: ...
@overload
def stateless(*, restore_seeds: bool = False, failure_tolerance: int | None = None) -> Callable[[Hook], Hook]: ...
def stateless(
    fn: Hook | None = None, *, restore_seeds: bool = False, failure_tolerance: int | None = None
) -> Hook | Callable[[Hook], Hook]:
    """Mark a hook as stateless between samples; `@stateless` and `@stateless(…)` both work.

    Examples:
        >>> class Noisy(DefaultTaskEncoder):
        ...     @stateless(failure_tolerance=10)
        ...     def encode_sample(self, sample):
        ...         sample.image = sample.image + torch.randn_like(sample.image)  # the same on every resume
        ...         return sample

    The mark exists so that encoders written for megatron-energon load unchanged. Here every hook draws from generators
    keyed to its sample, so a hook is repeatable with or without it, and `restore_seeds` changes nothing.
    """

    def mark(function: Hook) -> Hook:
        function.__stateless__ = True  # type: ignore[attr-defined]
        if failure_tolerance is not None:
            function.__failure_tolerance__ = failure_tolerance  # type: ignore[attr-defined]
        return function

    return mark if fn is None else mark(fn)


class TaskEncoder(Generic[SampleT, EncodedT, RawBatchT, BatchT]):
    """The base class of task encoders: override the hooks you need. `encode_sample` may be a generator function.

    Examples:
        >>> class Short(TaskEncoder):
        ...     def encode_sample(self, sample):
        ...         if len(sample.caption) > 15:
        ...             raise SkipSample
        ...         return sample
        >>> dataset = get_train_dataset("data/captions", batch_size=4, task_encoder=Short())
        >>> max(map(len, next(iter(get_savable_loader(dataset))).caption)) <= 15
        True

    `decoder` turns the raw parts of a sample into values; None leaves them bytes. `cookers` turn the samples of crude
    datasets into typed ones; an encoder without cookers gets the crude samples.
    """

    cookers: Sequence[Cooker[Any]] = ()
    decoder: SampleDecoder | None = SampleDecoder()
    __default_failure_tolerance__: int | None = 100

    @property
    def pixel_settings(self) -> Mapping[str, str]:
        """Settings by name that change the encoder's pixels; they are part of the state. None by default."""
        return {}

    @property
    def run_day(self) -> Any:
        """The day that the encoder writes into texts (a `RunDay`); it is part of the state. None by default."""
        return None

    @property
    def image_alpha(self) -> str:
        """What becomes of transparency where images are decoded without alpha: "drop", by default, "white", "keep"."""
        return "drop"

    @property
    def current_sample_index(self) -> int:
        """A number for the draw of the current sample, the same whenever it is encoded."""
        return hooks.current_sample_index()

    @property
    def current_batch_index(self) -> int:
        """The number of the microbatch being made, counted over the whole run."""
        return hooks.current_batch_index()

    @property
    def current_buffer_is_last(self) -> bool:
        """Whether no sample of the epoch will join those that `select_samples_to_pack` leaves over, since it ends."""
        return hooks.current_buffer_is_last()

    @property
    def cache(self) -> CachePool:
        """The cache pool of the loader that runs the hook; one that keeps nothing if the loader has none."""
        return hooks.current_cache()

    @default_hook
    def cook_crude_sample(self, sample: CrudeSample, cooker: Cooker[SampleT], aux: dict[str, FileStore]) -> SampleT:
        """Turn a crude sample into a typed one. By default the cooker does it, with the stores that it asks for.

        `aux` has the auxiliary stores by name, and the dataset itself as `primary` if the cooker needs it.
        """
        return cast(SampleT, cook_sample(sample, cooker, aux, self.cache))

    @default_hook
    def encode_sample(self, sample: SampleT) -> EncodedT | Iterator[EncodedT]:
        """Encode one sample for the model. Returns the sample itself unless overridden."""
        return cast(EncodedT, sample)

    @default_hook
    def preencode_sample(self, sample: SampleT) -> EncodedT | Iterator[EncodedT]:
        """Encode what the packer needs of a sample, without what only the model needs. Default: the sample itself."""
        return cast(EncodedT, sample)

    @default_hook
    def postencode_sample(self, sample: EncodedT) -> EncodedT:
        """Finish a sample that will be packed or batched next. By default the sample itself."""
        return sample

    @default_hook
    def select_samples_to_pack(self, samples: list[EncodedT]) -> list[list[EncodedT]]:
        """Return lists of samples, each to become a pack. Samples in no list wait for the next selection.

        If `current_buffer_is_last`, no samples will join those that wait; samples never selected are skipped. The lists
        must hold the sample objects passed in, each at most once.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override select_samples_to_pack")

    @default_hook
    def pack_selected_samples(self, samples: list[EncodedT]) -> EncodedT | Iterator[EncodedT]:
        """Join the samples of a pack into one row of a batch."""
        raise NotImplementedError(f"{type(self).__name__} does not override pack_selected_samples")

    @default_hook
    def sample_length(self, sample: EncodedT) -> int:
        """Return the tokens of a row to which a batch is padded if this is its longest sample.

        For `max_tokens_per_microbatch`. By default the length of `tokens` or `input_ids`.
        """
        for name in ("tokens", "input_ids"):
            value = sample.get(name) if isinstance(sample, dict) else getattr(sample, name, None)
            if value is not None:
                return len(value)
        raise FatalSampleError(
            f"max_tokens_per_microbatch: a {type(sample).__name__} has neither tokens nor input_ids to count: override "
            f"sample_length of {type(self).__name__}, which returns the length of a sample"
        )

    @default_hook
    def batch_group_criterion(self, sample: EncodedT) -> tuple[Hashable, int | None]:
        """Return the group of a row and the batch size of the group (None: the loader's). A full group is a batch.

        A group is what the samples of a batch share, by value: numbers, strings, tensors or arrays of up to 1,024
        numbers, lists and dicts of them, or whatever is equal to its copy.
        """
        return None, None

    @default_hook
    def batch(self, samples: list[EncodedT]) -> RawBatchT | Iterator[RawBatchT]:
        """Collate samples. By default into a record of their own type, tensors padded and stacked."""
        return batch_of(samples)

    @default_hook
    def encode_batch(self, batch: RawBatchT) -> BatchT | Iterator[BatchT]:
        """Encode a batch for the training step. By default the batch itself."""
        return cast(BatchT, batch)


class _ConvertingHook:
    """A hook that converts records if its setting is given, and otherwise is the base class's own hook.

    The choice is made when the hook is looked up, so that `super()` reaches it like any method, and so that the mark of
    the base class's hook is present exactly if nothing is converted.
    """

    def __init__(self, setting: str, convert: Callable[..., Any]) -> None:
        self._setting = setting
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._plain = getattr(TaskEncoder, name)
        self.__doc__ = self._convert.__doc__

        @wraps(self._convert)
        def of_class(encoder: object, *args: Any, **kwargs: Any) -> Any:
            return self.__get__(encoder)(*args, **kwargs)

        self._of_class = of_class

    def __get__(self, encoder: object | None, owner: type | None = None) -> Any:
        if encoder is None:
            return self._of_class  # for `DefaultTaskEncoder.batch(self, samples)`
        return MethodType(self._plain if getattr(encoder, self._setting) is None else self._convert, encoder)


def _converts_to(setting: str) -> Callable[[Hook], Hook]:
    """Make a method a _ConvertingHook; type checkers still see the method."""

    def wrap(hook: Hook) -> Hook:
        return cast(Hook, _ConvertingHook(setting, hook))

    return wrap


class DefaultTaskEncoder(TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT]):
    """A task encoder that works as it is, and converts between record types on request.

    Examples:
        >>> class Lengths(DefaultTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         return {"__key__": sample.__key__, "length": torch.tensor(len(sample.caption))}
        >>> dataset = get_train_dataset("data/captions", batch_size=4, task_encoder=Lengths())
        >>> next(iter(get_savable_loader(dataset)))["length"].shape
        torch.Size([4])

    Each type is a dataclass, a named tuple or a dict; fields are carried over by name. Raises ConfigurationError for
    any other type.
    """

    _encoded_sample_type: type | None = None
    _raw_batch_type: type | None = None
    _batch_type: type | None = None

    def __init__(
        self,
        *,
        encoded_sample_type: type[EncodedT] | None = None,
        raw_batch_type: type[RawBatchT] | None = None,
        batch_type: type[BatchT] | None = None,
    ) -> None:
        for target in (encoded_sample_type, raw_batch_type, batch_type):
            if target is not None:
                target_fields(target)  # raises for types that cannot be made by field names
        self._encoded_sample_type = encoded_sample_type
        self._raw_batch_type = raw_batch_type
        self._batch_type = batch_type

    @_converts_to("_encoded_sample_type")
    def encode_sample(self, sample: SampleT) -> EncodedT | Iterator[EncodedT]:
        """Return the sample as an `encoded_sample_type`, or unchanged if none was given."""
        return convert_record(sample, cast(type, self._encoded_sample_type))

    @_converts_to("_raw_batch_type")
    def batch(self, samples: list[EncodedT]) -> RawBatchT | Iterator[RawBatchT]:
        """Collate samples into a `raw_batch_type`, or into a record of their own type if none was given."""
        return batch_samples(samples, cast(type, self._raw_batch_type))

    @_converts_to("_batch_type")
    def encode_batch(self, batch: RawBatchT) -> BatchT | Iterator[BatchT]:
        """Return the batch as a `batch_type`, or unchanged if none was given."""
        return convert_record(batch, cast(type, self._batch_type))

    def _batch(
        self,
        samples: Sequence[Any],
        result_type: type,
        actions: dict[str, Action] | None = None,
        default_action: Action = generic_batch,
    ) -> Any:
        """Collate samples field by field: the helper that encoders written for megatron-energon call."""
        return batch_samples(samples, result_type, actions=actions, default_action=default_action)


# ---------------------------------------------------------------------------------------------------------------------
# An encoder around another encoder: hooks are the inner encoder's unless overridden.


class _Inner:
    """An attribute of the inner encoder. A hook that it did not override keeps its mark, and costs nothing here."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, encoder: Any, owner: type | None = None) -> Any:
        return self if encoder is None else getattr(encoder.task_encoder, self._name)

    def __call__(self, encoder: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(encoder)(*args, **kwargs)  # for `AugmentTaskEncoder.batch(self, samples)`


def decoder_of(encoder: Any) -> Any:
    """Return the decoder of an encoder, with the encoder's rules for transparency and EXIF orientation."""
    decoder = encoder.decoder
    if not isinstance(decoder, SampleDecoder):
        return decoder
    if getattr(encoder, "autorotate", False) and not decoder.autorotate:
        decoder = replace(decoder, autorotate=True)
    return decoder.with_alpha(getattr(encoder, "image_alpha", "drop"))


class AugmentTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Wraps a task encoder: override the hooks that should do more, and call `super()` for the inner encoder's.

    Examples:
        >>> class Uppercase(AugmentTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         return super().encode_sample(dataclasses.replace(sample, caption=sample.caption.upper()))
        >>> dataset = get_train_dataset("data/captions", batch_size=4, task_encoder=Uppercase(DefaultTaskEncoder()))
        >>> next(iter(get_savable_loader(dataset))).caption[0].isupper()
        True

    Args:
        task_encoder: The inner encoder.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def __init__(self, task_encoder: Any) -> None:
        self.task_encoder = task_encoder

    cookers: Any = _Inner()
    decoder: Any = _Inner()
    pixel_settings: Any = _Inner()
    run_day: Any = _Inner()
    image_alpha: Any = _Inner()
    autorotate: Any = _Inner()
    __default_failure_tolerance__: Any = _Inner()
    cook_crude_sample: Any = _Inner()
    encode_sample: Any = _Inner()
    preencode_sample: Any = _Inner()
    postencode_sample: Any = _Inner()
    select_samples_to_pack: Any = _Inner()
    pack_selected_samples: Any = _Inner()
    sample_length: Any = _Inner()
    batch_group_criterion: Any = _Inner()
    batch: Any = _Inner()
    encode_batch: Any = _Inner()

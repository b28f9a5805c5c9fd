"""`MapDataset`, `BatchDataset`, `LimitDataset` and others: wrappers that programs put around datasets.

A wrapper only describes: no sample passes through it. `composed` reads what stands around a dataset and
makes one task encoder of its functions, and the engine runs that, so order, states and workers are those of any run.
`build_…` hooks of a task encoder return wrappers too, which `build_hooks` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NoReturn

from energon_bridge.compat.table import WRAPPERS_ADVICE, NoSuchPart, Refusing, not_provided
from energon_bridge.core.errors import ConfigurationError, WrongUseError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.no_dataloader import DATASET_IS_NO_LOADER, NotForDataLoader

_NEVER_CALLED = ("__iter__", "len_worker", "reset_state_own", "restore_sample", "restore_state", "save_state")


_ADVICE = (
    "a wrapper only describes, and is never iterated: give MapDataset, FilterDataset or BatchDataset a function, "
    "or say what becomes of samples by hooks of a task encoder"
)


class _Described(type):
    """The metaclass of wrappers: inner parts of megatron-energon's are refused by name."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise NoSuchPart(str(not_provided(f"{cls.__name__}.{name}", _ADVICE)))


@dataclass(eq=False, repr=False)
class Wrapper(NotForDataLoader, metaclass=_Described):
    """A dataset with a description attached; the arguments of wrappers are megatron-energon's.

    Attributes:
        dataset: The dataset within, the first one if there are several.
        worker_config: Who loads what; that of the dataset if none was given.

    Raises:
        NotProvidedError: A class of the program has a method of its own that would never be called.
    """

    dataset: Any
    worker_config: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for kind in type(self).__mro__[: type(self).__mro__.index(Wrapper)]:
            own = [name for name in _NEVER_CALLED if name in vars(kind)]
            if own and kind.__module__ != __name__:
                raise not_provided(f"{kind.__qualname__}.{own[0]}", _ADVICE)
        if not isinstance(self.dataset, (DatasetSpec, Wrapper)):
            raise ConfigurationError(
                f"{type(self).__name__}: expected a dataset from get_train_dataset or get_val_dataset, got "
                f"{self.dataset!r}"
            )
        self.worker_config = self.worker_config or self.dataset.worker_config

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __len__(self) -> int:
        return len(self.dataset)

    def __class_getitem__(cls, arguments: Any) -> Any:
        return cls


class _AnyDataset(Refusing):
    """The metaclass of `SavableDataset`: all datasets are instances of it, though none is created by it."""

    def __instancecheck__(self, instance: Any) -> bool:
        return self is SavableDataset and isinstance(instance, (DatasetSpec, Wrapper))


class SavableDataset(metaclass=_AnyDataset):
    """The type of datasets, for annotations and `isinstance`: builders return them, loaders accept them."""

    __named__ = "a dataset derived from SavableDataset"
    __advice__ = WRAPPERS_ADVICE


# ---------------------------------------------------------------------------------------------------------------------
# Functions of samples and batches.


@dataclass(eq=False, repr=False)
class MapDataset(Wrapper):
    """Puts each sample (of a batched dataset: each batch) through a function, which may be a generator function.

    Args:
        dataset: The dataset.
        map_fn: The function. It may raise SkipSample.
        failure_tolerance: Failures in a row that stop the run; 0: never.
        stateless_map_fn, map_fn_config: No effect: whatever draws from the global generators is repeatable.
        worker_config: That of the dataset.
    """

    map_fn: Callable[[Any], Any]
    _: KW_ONLY
    stateless_map_fn: bool = False
    map_fn_config: Any = None
    failure_tolerance: int = 100


@dataclass(eq=False, repr=False, kw_only=True)
class FilterDataset(Wrapper):
    """Leaves out the samples (of a batched dataset: batches) for which a function is false; they count as skipped."""

    filter_fn: Callable[[Any], bool]
    filter_fn_config: Any = None


@dataclass(eq=False, repr=False)
class IterMapDataset(Wrapper):
    """Puts the stream through a function of iterators, which is run on an iterator of each sample alone.

    Raises:
        NotProvidedError: Without `stateless_iter_fn`, which says that each output follows from one sample.
    """

    iter_map_fn: Callable[[Iterator[Any]], Iterator[Any]]
    _: KW_ONLY
    len_map_fn: Callable[[int], int] = lambda length: length
    stateless_iter_fn: bool = False
    iter_map_fn_config: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stateless_iter_fn:
            raise not_provided(
                "IterMapDataset(stateless_iter_fn=False)",
                "what a function keeps of earlier samples is in no state. Pass stateless_iter_fn=True if each output "
                "follows from one sample; put samples together by PackingDataset, BatchDataset or GroupBatchDataset",
            )

    def __len__(self) -> int:
        return self.len_map_fn(len(self.dataset))


@dataclass(eq=False, repr=False)
class BatchDataset(Wrapper):
    """Makes batches of `batch_size` samples or packs by a function of a list."""

    batch_size: int
    batcher: Callable[[list[Any]], Any]
    _: KW_ONLY
    batcher_stateless: bool = False
    batcher_config: Any = None
    drop_last: bool = False
    failure_tolerance: int = 100

    def __len__(self) -> int:
        samples = len(self.dataset)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


@dataclass(eq=False, repr=False)
class GroupBatchDataset(Wrapper):
    """Makes batches of samples of one group each, as `batch_group_criterion` of a task encoder does."""

    fixed_batch_size: int | None
    sample_group_key: Callable[[Any], tuple[Hashable, int | None]]
    batcher: Callable[[list[Any]], Any]
    _: KW_ONLY
    batcher_stateless: bool = False
    batcher_config: Any = None
    drop_last: bool = False
    failure_tolerance: int = 100


@dataclass(eq=False, repr=False)
class PackingDataset(Wrapper):
    """Packs samples as `select_samples_to_pack` and `pack_selected_samples` of a task encoder do.

    `sample_encoder` runs on samples that were selected, as `postencode_sample` does.
    """

    buffer_size: int
    pre_packer: Callable[[list[Any]], list[list[Any]]]
    final_packer: Callable[[list[Any]], Any]
    _: KW_ONLY
    final_packer_stateless: bool = False
    sample_encoder: Callable[[Any], Any] | None = None
    sample_encoder_stateless: bool = False
    packer_config: Any = None
    pre_packer_failure_tolerance: int = 100
    final_packer_failure_tolerance: int = 100
    sample_encoder_failure_tolerance: int = 100


class LogSampleDataset(Wrapper):
    """The dataset itself: no debug files are written, and `energon which` names the samples of any step."""

    def __init__(
        self,
        dataset: Any,
        mode: Literal["train", "val"] = "train",
        worker_config: Any = None,
        get_keys_fn: Callable[[Any], list[str] | None] | None = None,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)


@dataclass(eq=False, repr=False, kw_only=True)
class GcDataset(Wrapper):
    """The dataset itself: garbage is collected as Python does it."""

    every_n_iter: int = 10
    freeze: bool = True


class WatchdogDataset(Wrapper):
    """The dataset, watched as by these arguments of `get_savable_loader`."""

    def __init__(
        self,
        dataset: Any,
        worker_config: Any = None,
        timeout_seconds: float | None = 60,
        initial_timeout_seconds: float | None = None,
        fail_on_timeout: bool = False,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.watched = {
            "watchdog_timeout_seconds": timeout_seconds,
            "watchdog_initial_timeout_seconds": initial_timeout_seconds,
            "fail_on_timeout": fail_on_timeout,
        }


# ---------------------------------------------------------------------------------------------------------------------
# Order, length and mixing.


@dataclass(eq=False, repr=False, kw_only=True)
class RepeatDataset(Wrapper):
    """Repeats a dataset; no effect on training, which never ends by itself.

    Args:
        dataset: The dataset.
        repeats: None: forever. A number is for `build_…` hooks, and should be what the mix says.
        restart, worker_config: No effect.
    """

    repeats: float | None = None
    restart: bool = True


@dataclass(eq=False, repr=False)
class LimitDataset(Wrapper):
    """Ends a pass over a dataset after `length` steps; the next pass over validation data starts over."""

    length: int
    _: KW_ONLY
    reset_after_epoch: bool = False

    def __len__(self) -> int:
        return min(self.length, len(self.dataset)) if _ends(self.dataset) else self.length


class EpochizeDataset(Wrapper):
    """Ends an iterator over training data after `length` steps; the next one continues."""

    def __init__(self, dataset: Any, length: int, worker_config: Any = None) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.length = length

    def __len__(self) -> int:
        return self.length


@dataclass(eq=False, repr=False)
class ShuffleBufferDataset(Wrapper):
    """Mixes samples over a longer stretch: adds to `shuffle_buffer_size` of the dataset."""

    size: int


class _Several(Wrapper):
    """Several datasets with their weights, `parts`, as one."""

    def __init__(self, *dataset_weights: tuple[Any, float], worker_config: Any = None) -> None:
        super().__init__(dataset_weights[0][0], worker_config=worker_config)
        self.parts = dataset_weights

    def __len__(self) -> int:
        return sum(len(dataset) for dataset, _ in self.parts)


class BlendDataset(_Several):
    """Draws from training datasets by weights."""


class ConcatDataset(_Several):
    """One dataset after the other."""

    def __init__(self, *datasets: Any, worker_config: Any = None) -> None:
        super().__init__(*((dataset, 1.0) for dataset in datasets), worker_config=worker_config)


def _batch_itself(batch: list[Any]) -> Any:
    return batch


class MixBatchDataset(BatchDataset):
    """Batches of samples that are drawn from datasets by weights, by default as lists."""

    def __init__(
        self,
        *dataset_weights: tuple[Any, float],
        batch_size: int,
        batch_mix_fn: Callable[[list[Any]], Any] = _batch_itself,
        worker_config: Any = None,
    ) -> None:
        blend = BlendDataset(*dataset_weights, worker_config=worker_config)
        super().__init__(blend, batch_size, batch_mix_fn, worker_config=worker_config)


def _ends(dataset: Any) -> bool:
    """Whether a pass over a dataset ends by itself."""
    while isinstance(dataset, Wrapper) and not isinstance(dataset, RepeatDataset | BlendDataset):
        dataset = dataset.dataset
    return isinstance(dataset, DatasetSpec) and dataset.ends

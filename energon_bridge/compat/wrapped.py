"""`RepeatDataset`, `LimitDataset`, `EpochizeDataset` and others: wrappers that programs put around datasets.

Megatron-LM's multimodal example validates on `LimitDataset(RepeatDataset(dataset), length=…)`: a fixed number of steps,
repeating the dataset if it is shorter. A wrapper only describes what it holds; `make_loader` combines the descriptions.
Those that mix and shuffle are for `build_…` hooks of a task encoder, which `hooks` reads.
"""

from __future__ import annotations

from typing import Any, NoReturn

from energon_bridge import datasets
from energon_bridge.compat.conventions import EnergonConventions
from energon_bridge.compat.table import Refusing, not_provided
from energon_bridge.errors import ConfigurationError, WrongUseError
from energon_bridge.loader.run_plan import DATASET_IS_NO_LOADER, DatasetSpec
from energon_bridge.loader.savable import SavableDataLoader


class Wrapper:
    """A dataset with a description attached."""

    def __init__(self, dataset: Any, *, worker_config: Any = None) -> None:
        if not isinstance(dataset, (DatasetSpec, Wrapper)):
            raise ConfigurationError(
                f"{type(self).__name__}: expected a dataset from get_train_dataset or get_val_dataset, got {dataset!r}"
            )
        self.dataset = dataset

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __getitem__(self, index: Any) -> NoReturn:
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
    """What builders return and loaders accept, for annotations and `isinstance`; subclasses cannot be instantiated."""

    __named__ = "a dataset derived from SavableDataset"
    __advice__ = "there are no dataset wrappers to put together; say what becomes of samples by hooks of a task encoder"


class RepeatDataset(Wrapper):
    """Repeats a dataset; no effect on training, which never ends by itself.

    Args:
        dataset: The dataset.
        repeats: None: forever. A number is for `build_…` hooks, and should be what the mix says.
        restart, worker_config: No effect.
    """

    def __init__(
        self, dataset: Any, *, repeats: float | None = None, restart: bool = True, worker_config: Any = None
    ) -> None:
        super().__init__(dataset)
        self.repeats = repeats


class LimitDataset(Wrapper):
    """Ends a pass over a dataset after `length` steps; the next pass over validation data starts over."""

    def __init__(
        self, dataset: Any, length: int, *, reset_after_epoch: bool = False, worker_config: Any = None
    ) -> None:
        super().__init__(dataset)
        self.length = length

    def __len__(self) -> int:
        return min(self.length, len(self.dataset)) if _ends(self.dataset) else self.length


class EpochizeDataset(Wrapper):
    """Ends an iterator over training data after `length` steps; the next one continues."""

    def __init__(self, dataset: Any, length: int, *, worker_config: Any = None) -> None:
        super().__init__(dataset)
        self.length = length

    def __len__(self) -> int:
        return self.length


class ShuffleBufferDataset(Wrapper):
    """Shuffles samples in a buffer; for `build_…` hooks."""

    def __init__(self, dataset: Any, size: int, *, worker_config: Any = None) -> None:
        super().__init__(dataset)
        self.size = size


class BlendDataset(Wrapper):
    """Draws from datasets by weights; for `build_…` hooks."""

    def __init__(self, *dataset_weights: tuple[Any, float], worker_config: Any = None) -> None:
        super().__init__(dataset_weights[0][0])
        self.parts = dataset_weights


class ConcatDataset(Wrapper):
    """One dataset after the other; for `build_…` hooks."""

    def __init__(self, *datasets: Any, worker_config: Any = None) -> None:
        super().__init__(datasets[0])
        self.parts = tuple((dataset, 1.0) for dataset in datasets)


def make_loader(dataset: Any, **kwargs: Any) -> SavableDataLoader:
    """Return a loader for a wrapped dataset; `kwargs` are those of `get_savable_loader`.

    Raises:
        NotProvidedError: The combination of wrappers has no equivalent, such as epochs of validation data.
    """
    limit: int | None = None
    repeated = False
    while isinstance(dataset, Wrapper):
        if isinstance(dataset, RepeatDataset):
            if dataset.repeats is not None:
                raise not_provided(
                    f"RepeatDataset(repeats={dataset.repeats})", "use `blend_epochized` with repetitions"
                )
            repeated = True
        elif isinstance(dataset, BlendDataset | ConcatDataset | ShuffleBufferDataset):
            raise not_provided(
                f"{type(dataset).__name__} around a dataset that is already built",
                "mix by a metadataset, energon_bridge.Blender or a list of (path, weight) pairs, and pass "
                "shuffle_buffer_size= to get_train_dataset",
            )
        elif isinstance(dataset, LimitDataset) and not repeated:
            limit = dataset.length if limit is None else min(limit, dataset.length)
        elif isinstance(dataset, EpochizeDataset) and not repeated and not _is_finite(dataset.dataset):
            limit = dataset.length
        else:
            raise not_provided(
                f"{type(dataset).__name__} in this place",
                "pass limit= to get_val_dataset, virtual_epoch_length= to get_train_dataset",
            )
        dataset = dataset.dataset
    if not isinstance(dataset, DatasetSpec) or (limit is None and not repeated):
        return datasets.get_savable_loader(dataset, **kwargs)
    if not dataset.finite:  # an endless stream repeats by itself; limiting it makes an epoch
        return datasets.get_savable_loader(dataset.with_settings(virtual_epoch_length=limit), **kwargs)
    if repeated and dataset.settings.limit is not None:
        raise not_provided("RepeatDataset of a dataset with limit=", "limit the repeated dataset by LimitDataset")
    if limit is not None and dataset.settings.limit is not None:
        limit = min(limit, dataset.settings.limit)
    repeats = {"conventions": EnergonConventions(repeats=True)} if repeated else {}
    return datasets.get_savable_loader(dataset.with_settings(limit=limit, **repeats), **kwargs)


def _ends(dataset: Any) -> bool:
    """Whether a pass over a dataset ends by itself."""
    while isinstance(dataset, LimitDataset | EpochizeDataset):
        dataset = dataset.dataset
    return isinstance(dataset, DatasetSpec) and dataset.finite


def _is_finite(dataset: Any) -> bool:
    while isinstance(dataset, Wrapper):
        dataset = dataset.dataset
    return bool(dataset.finite)

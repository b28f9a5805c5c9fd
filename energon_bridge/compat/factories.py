"""`get_dataset_from_config`: one dataset, opened, of which `build()` gives what a loader takes."""

from __future__ import annotations

from typing import Any

from energon_bridge.compat import loading
from energon_bridge.compat.dataset_classes import BaseCoreDatasetFactory
from energon_bridge.compat.refused import not_provided
from energon_bridge.loader.spec import DatasetSpec

_DEFAULT: Any = object()


class OpenedDataset(BaseCoreDatasetFactory):
    """A dataset as a configuration describes it, not yet batched or shuffled in a buffer.

    Attributes:
        subflavors: Those of its samples.
        paths: Where it lies.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> OpenedDataset:
        return object.__new__(cls)

    def __init__(self, dataset: DatasetSpec) -> None:
        self._dataset = dataset
        found = dataset.leaves[0].dataset
        self.__sample_type__ = getattr(found, "sample_type", None)
        self.subflavors = dict(getattr(found, "subflavors", {}))
        self.paths = [leaf.dataset.path for leaf in dataset.leaves]

    def __len__(self) -> int:
        return self._dataset.num_samples

    def build(self, worker_rotation_offset: int = 0) -> DatasetSpec:
        """Return what a loader takes; the offset balances workers, and has no effect here."""
        return self._dataset


def get_dataset_from_config(
    path: Any,
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    split_part: str | None = None,
    training: bool = True,
    subflavors: dict[str, Any] | None = None,
    worker_config: Any = None,
    sample_type: type | None = None,
    **kwargs: Any,
) -> OpenedDataset:
    """Open one dataset; without `training`, samples come in order, once.

    Raises:
        NotProvidedError: An argument of megatron-energon's dataset classes that has no counterpart.
    """
    names = {"dataset_config": dataset_config, "split_config": split_config}
    settings: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    settings |= {"split_part": split_part or "train", "worker_config": worker_config, "batch_size": None}
    settings |= {"subflavors": subflavors, "sample_type": sample_type}
    decoder = kwargs.pop("decoder", _DEFAULT)
    if decoder is not _DEFAULT:
        settings["task_encoder"] = loading.with_decoder(None, decoder)
    shuffle = {
        "shuffle_over_epochs_multiplier": kwargs.pop("shuffle_over_epochs", 1),
        "parallel_shard_iters": kwargs.pop("parallel_shard_iters", None),
        "max_samples_per_sequence": kwargs.pop("max_samples_per_sequence", None),
        "shuffle_buffer_size": None,
    }
    for name, value in kwargs.items():
        if value is not None:
            raise not_provided(f"get_dataset_from_config({name}={value!r})", "say it in a metadataset")
    if training:
        return OpenedDataset(loading.get_train_dataset(path, **settings, **shuffle))
    return OpenedDataset(loading.get_val_dataset(path, **settings))

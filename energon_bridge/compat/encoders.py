"""`DefaultTaskEncoder` with megatron-energon's `build_…` hooks, which put wrappers around datasets.

The hooks here record what goes around what. `build_hooks` runs those of an encoder that overrides one, reads the
record, and gives the settings in it to the engine, which needs no wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from energon_bridge.compat.wrapped import (
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    LimitDataset,
    RepeatDataset,
    ShuffleBufferDataset,
    Wrapper,
)
from energon_bridge.core import encoder as task_encoder

SampleT = TypeVar("SampleT")
EncodedT = TypeVar("EncodedT")
RawBatchT = TypeVar("RawBatchT")
BatchT = TypeVar("BatchT")

HOOKS = ("build_batch", "build_cook_crude_sample", "build_encode_sample", "build_train_datasets", "build_val_datasets")


class DatasetBlendMode(Enum):
    """The meaning of the numbers in a mix."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


class EncodedDataset(Wrapper):
    """Samples that went through `encode_sample`."""


@dataclass(eq=False, repr=False, kw_only=True)
class BatchedDataset(Wrapper):
    """Samples that were packed, if asked for, and batched."""

    batch_size: int | None
    drop_last: bool = False
    packing_buffer_size: int | None = None


class DefaultTaskEncoder(task_encoder.DefaultTaskEncoder[SampleT, EncodedT, RawBatchT, BatchT]):
    """`energon_bridge.DefaultTaskEncoder` for encoders that override how datasets are put together, or call it."""

    def build_cook_crude_sample(self, dataset: Any, **_: Any) -> Any:
        """Return the dataset: crude samples are cooked wherever they are."""
        return dataset

    def build_encode_sample(self, dataset: Any, *, worker_config: Any) -> Any:
        """Encode the samples of a dataset."""
        return EncodedDataset(dataset)

    def build_batch(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: Any,
    ) -> Any:
        """Pack and batch the samples of a dataset."""
        return BatchedDataset(
            dataset, batch_size=batch_size, drop_last=batch_drop_last, packing_buffer_size=packing_buffer_size
        )

    def build_train_datasets(
        self,
        *,
        datasets: Sequence[Any],
        worker_config: Any,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: int | None = None,
        blend_mode: DatasetBlendMode = DatasetBlendMode.NONE,
        repeat: bool = True,
    ) -> Any:
        """Repeat, blend, shuffle, encode and batch the datasets of a mix."""
        ends = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS or (blend_mode is DatasetBlendMode.NONE and not repeat)
        parts = list((self._counted if ends else self._weighted)(datasets, worker_config))
        dataset = parts[0][0] if len(parts) == 1 else BlendDataset(*parts, worker_config=worker_config)
        if ends and repeat:
            dataset = RepeatDataset(dataset)
        if shuffle_buffer_size is not None and shuffle_buffer_size > 1:
            dataset = ShuffleBufferDataset(dataset, size=shuffle_buffer_size, worker_config=worker_config)
        dataset = self._batches_of(dataset, worker_config, batch_size, batch_drop_last, packing_buffer_size)
        return EpochizeDataset(dataset, virtual_epoch_length) if virtual_epoch_length > 0 else dataset

    def build_val_datasets(
        self,
        *,
        datasets: Sequence[Any],
        worker_config: Any,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        limit: int | None = None,
    ) -> Any:
        """Concatenate, encode, batch and limit the datasets of a mix."""
        parts = [self._load_dataset(dataset, 0, worker_config) for dataset in datasets]
        dataset = parts[0] if len(parts) == 1 else ConcatDataset(*parts, worker_config=worker_config)
        dataset = self._batches_of(dataset, worker_config, batch_size, batch_drop_last, packing_buffer_size)
        return LimitDataset(dataset, limit, reset_after_epoch=True) if limit else dataset

    def _batches_of(
        self, dataset: Any, worker_config: Any, batch_size: int | None, drop_last: bool, buffer_size: int | None
    ) -> Any:
        """Encode the samples of a dataset, and pack and batch them, by the hooks for each."""
        return self.build_batch(
            self.build_encode_sample(dataset, worker_config=worker_config),
            batch_size=batch_size,
            batch_drop_last=drop_last,
            packing_buffer_size=buffer_size,
            worker_config=worker_config,
        )

    def _load_dataset(self, dataset: Any, worker_rotation_offset: int, worker_config: Any) -> Any:
        # Private in megatron-energon, too; copies of its build_train_datasets call it.
        return dataset.dataset.build(worker_rotation_offset=worker_rotation_offset)

    def _weighted(self, datasets: Sequence[Any], worker_config: Any) -> Iterator[tuple[Any, float]]:
        for loaded in datasets:
            weight = 1.0 if loaded.weight is None else float(loaded.weight)
            yield RepeatDataset(self._load_dataset(loaded, 0, worker_config)), weight

    def _counted(self, datasets: Sequence[Any], worker_config: Any) -> Iterator[tuple[Any, float]]:
        for loaded in datasets:
            dataset = self._load_dataset(loaded, 0, worker_config)
            repetitions = loaded.repetitions
            if repetitions not in (None, 1):
                dataset = RepeatDataset(dataset, repeats=repetitions)
            yield dataset, len(loaded.dataset) * (1 if repetitions is None else repetitions)

"""A dataset as its user holds it: the description, its length, and its text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import GenericAlias
from typing import Any, ClassVar, NoReturn

from energon_bridge.errors import WrongUseError
from energon_bridge.loader.description import Description
from energon_bridge.loader.run_plan import deal_of_pass, draws_of_pass, plan_run
from energon_bridge.mix.leaves import OpenLeaf
from energon_bridge.samples.showing import counted, described

DATASET_IS_NO_LOADER = (
    "a dataset of energon_bridge describes what to load and gives no samples by itself. Make a loader of it and "
    "iterate that: `for batch in get_loader(dataset)`. It takes the place of torch.utils.data.DataLoader and starts "
    "the workers itself. For the Trainer of transformers use energon_bridge.integrations.huggingface.EnergonTrainer, "
    "for Lightning EnergonMultiModalDataModule"
)
_KINDS = {"train": "training", "passes": "training, pass by pass", "finite": "validation"}
_MOST_SHOWN = 6
"""Datasets that the text of a mix names."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(Description):
    """A dataset as `get_train_dataset` and `get_val_dataset` return it, for `get_loader` and `get_savable_loader`.

    It is a description; nothing is read before a loader is iterated but the metadata of the datasets. `len()` is the
    number of batches of a rank in a pass, or in an epoch of an endless stream: that of its loader. (Of a pass that is
    packed or grouped, which only the loader knows, as if each sample were a row.)
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __getitem__(self, index: Any) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __len__(self) -> int:
        return self.num_batches(self.worker_config.dp_size)

    def __repr__(self) -> str:
        return described(
            f"{type(self).__name__} for {_KINDS[self.kind]}",
            [
                f"{counted(self.num_samples, 'sample')} of {counted(len(self.leaves), 'dataset')}, "
                f"{counted(len(self), 'batch', 'batches')} of {self._what_batches_have()}",
                *(leaf_line(leaf) for leaf in self.leaves[:_MOST_SHOWN]),
                *([f"and {len(self.leaves) - _MOST_SHOWN:,} more"] if len(self.leaves) > _MOST_SHOWN else []),
            ],
        )

    def _what_batches_have(self) -> str:
        if self.batch_size is None:
            return "one sample"
        return counted(self.batch_size, "sample" if self.packing_buffer_size is None else "pack")

    def num_batches(self, world_size: int, end: int | None = None) -> int:
        """Return the batches of one rank in a pass or virtual epoch, or in an epoch of an endless stream.

        Args:
            world_size: Data-parallel ranks.
            end: The microbatch at which the pass of a finite stream ends, where that is known.
        """
        if self.virtual_epoch_length is not None:
            return self.virtual_epoch_length
        if not self.finite:
            return self.epoch_length(world_size)
        if end is None:
            config = self.worker_config
            dealt = deal_of_pass(self, plan_run(self, config), config)
            if dealt is not None:
                return dealt.steps(config.dp_rank)
            end = self.end_of(config.dp_rank, self._rows_of_a_pass, world_size)
        return -(-end // world_size)

    @cached_property
    def _rows_of_a_pass(self) -> int:
        return draws_of_pass(self, plan_run(self, self.worker_config), 0).num_draws


def leaf_line(leaf: OpenLeaf) -> str:
    """Name a leaf for people, in one line."""
    dataset = leaf.dataset
    kind = getattr(getattr(dataset, "sample_type", None), "__name__", "joined samples")
    subset = "" if leaf.is_whole else f", samples {leaf.part.replace(':', ' to ', 1)}"
    shards = counted(leaf.num_shards, "shard")
    part = f" [{dataset.split_part}]" if dataset.split_part else ""
    return f"{dataset.path}{part}{subset}: {counted(leaf.num_samples, kind)} in {shards}"

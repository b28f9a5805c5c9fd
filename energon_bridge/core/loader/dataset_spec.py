"""The dataset that users hold: the data of a run, with the ranks that it is for. It has no open files or threads."""

from __future__ import annotations

from dataclasses import dataclass
from types import GenericAlias
from typing import Any, ClassVar, NoReturn

from energon_bridge.core.errors import WrongUseError
from energon_bridge.core.loader.no_dataloader import DATASET_IS_NO_LOADER, NotForDataLoader
from energon_bridge.core.loader.run_data import RunData
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.samples.showing import counted, described
from energon_bridge.core.worker_config import WorkerConfig

_KINDS = {"train": "training", "passes": "training, pass by pass", "finite": "validation"}
_MOST_SHOWN = 6
"""Datasets named in the text of a mix."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(NotForDataLoader, RunData):
    """What `get_train_dataset` and `get_val_dataset` return, for `get_loader` and `get_savable_loader`.

    It is a description: before a loader is iterated, only the metadata of the datasets is read. `len()` is the number
    of batches of a rank in a pass, or in an epoch of an endless stream, as for its loader. (If samples are packed or
    grouped, each counts as a row; only the loader of a pass knows the number.)

    Args:
        worker_config: Who loads what, unless a loader is given another.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    worker_config: WorkerConfig

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

    def __len__(self) -> int:
        return self.num_batches(self.worker_config.dp_size, lambda: plan_run(self, self.worker_config).end_of_pass(0))

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
        if self.settings.max_tokens_per_microbatch is not None:
            return f"up to {counted(self.settings.max_tokens_per_microbatch, 'token')}"
        if self.settings.batch_size is None:
            return "one sample"
        return counted(self.settings.batch_size, "sample" if self.settings.packing_buffer_size is None else "pack")


def leaf_line(leaf: OpenLeaf) -> str:
    """Describe a leaf in one line."""
    dataset = leaf.dataset
    kind = getattr(getattr(dataset, "sample_type", None), "__name__", "joined samples")
    subset = "" if leaf.is_whole else f", samples {leaf.part.replace(':', ' to ', 1)}"
    shards = counted(leaf.num_shards, "shard")
    part = f" [{dataset.split_part}]" if dataset.split_part else ""
    return f"{dataset.path}{part}{subset}: {counted(leaf.num_samples, kind)} in {shards}"

"""The datasets of a mix as one source: merged, with subsets and filters applied, each sample once.

Weights and repetitions only matter in training and are ignored here. All datasets must have the same sample type and
field map, or be crude.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.errors import SourceError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.tar_index import ShardScan, scan_tar
from energon_bridge.mix import MixIndex, load_mix
from energon_bridge.mix.leaves import OpenLeaf, open_leaves
from energon_bridge.mix.opener import DatasetOpener
from energon_bridge.prepare.sources.tars import TarSample, check_keys
from energon_bridge.rows.base import SPLIT_ORDER, Layout, Row
from energon_bridge.samples import CrudeSample
from energon_bridge.storage import open_store

_SCANS = 16


class MixSource:
    """The samples of the datasets of a mix, split by split, dataset by dataset."""

    kind = "mix"

    def __init__(self, path: Path, *, numbered: bool) -> None:
        self.where = str(path)
        self._numbered = numbered
        document = MixIndex().document(str(path))
        named = document.get("splits") if isinstance(document, dict) else None
        self._parts: list[tuple[PreparedDataset, np.ndarray]] = []
        counts: list[tuple[str, int]] = []
        for split in [part for part in SPLIT_ORDER if part in (named or ())]:
            mix = load_mix(path, split_part=split)
            leaves = open_leaves(mix, DatasetOpener(), shuffle_epochs=None)
            found = [self._samples_of(leaf) for leaf in leaves]
            self._parts += found
            counts.append((split, sum(numbers.size for _, numbers in found)))
        self.split_parts = tuple(counts)
        self._starts = np.cumsum([0, *(numbers.size for _, numbers in self._parts)]).tolist()
        if not numbered:
            check_keys([self.sample(n, Layout(sample_type="CrudeSample")).key for n in range(len(self))], self.sample)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, number: int) -> Row:
        """Return a sample's parts as columns, for display."""
        return self.sample(number, Layout(sample_type="CrudeSample")).row()

    def sample(self, number: int, layout: Layout) -> TarSample:
        """Return a sample, not read yet."""
        at = bisect_right(self._starts, number) - 1
        dataset, numbers = self._parts[at]
        shard, local = _place(dataset, int(numbers[number - self._starts[at]]))
        scan = _scan(dataset.path, shard)
        return TarSample(
            key=f"{number:09d}" if self._numbered else scan.keys[local],
            where=f"{dataset.store.url(shard)}, sample {scan.keys[local]!r}",
            store=dataset.store,
            shard=shard,
            offset=scan.offsets[local],
            length=scan.offsets[local + 1] - scan.offsets[local],
            fields=layout.fields,
        )

    def propose(self) -> Layout:
        """Keep the common sample type of all datasets."""
        first = self._parts[0][0]
        for dataset, _ in self._parts[1:]:
            if _form(dataset) != _form(first):
                raise SourceError(
                    f"{self.where}: {first.path} and {dataset.path} differ in sample type or field map. Convert them "
                    "as crude samples: --sample-type CrudeSample"
                )
        if issubclass(first.sample_type, CrudeSample) or first.field_map is None:
            return Layout(sample_type="CrudeSample")
        return Layout(sample_type=first.sample_type.__name__, fields=first.field_map.fields)

    def _samples_of(self, leaf: OpenLeaf) -> tuple[PreparedDataset, np.ndarray]:
        """Return the dataset of a leaf and the numbers of the leaf's samples, without excluded ones."""
        dataset = leaf.dataset
        if type(dataset) is not PreparedDataset:
            raise SourceError(
                f"{self.where}: {dataset.path} is a join, a JSONL file or a table, but only prepared datasets of tars "
                "can be merged. Convert the others separately, and join during training."
            )
        numbers = np.arange(leaf.start, leaf.stop) if leaf.kept is None else leaf.kept
        if not dataset.excluded:
            return dataset, numbers
        kept = [number for number in numbers.tolist() if _named(dataset, number) not in dataset.excluded]
        return dataset, np.array(kept, dtype=np.int64)


def _form(dataset: PreparedDataset) -> tuple[type, Any]:
    return dataset.sample_type, dataset.field_map and dataset.field_map.fields


def _place(dataset: PreparedDataset, number: int) -> tuple[str, int]:
    """Return shard and number in the shard of a sample."""
    ends = np.cumsum(dataset.shard_counts)
    shard = int(np.searchsorted(ends, number, side="right"))
    return dataset.shard_names[shard], number - int(ends[shard] - dataset.shard_counts[shard])


def _named(dataset: PreparedDataset, number: int) -> tuple[str, str]:
    """Return shard and key of a sample."""
    shard, local = _place(dataset, number)
    return shard, _scan(dataset.path, shard).keys[local]


@lru_cache(maxsize=_SCANS)
def _scan(root: str, shard: str) -> ShardScan:
    return scan_tar(open_store(root), shard)

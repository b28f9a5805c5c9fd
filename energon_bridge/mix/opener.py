"""Opening the datasets of a mix: each place once, and from the index where that is current.

Invariant: the datasets of one opener share one pool of open files, so that it does not matter how many there are.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from energon_bridge.errors import NotPreparedError
from energon_bridge.format.dataset import PreparedDataset, check_counts, prepared, read_prepared
from energon_bridge.format.dataset_config import DatasetConfig, DatasetConfigs
from energon_bridge.format.jsonl import open_jsonl
from energon_bridge.format.nvmeta import DEFAULT_DATASET_CONFIG, DEFAULT_SPLIT_CONFIG, NOTHING, meta_path
from energon_bridge.mix.index import Known, MixIndex, Place, stamps_of
from energon_bridge.mix.tree import LeafRef
from energon_bridge.rows.dataset import has_tables, is_table, open_tables
from energon_bridge.storage import READ_TIMEOUT_SECONDS, LocalStore, OpenFiles, Stalls, Store, as_far, open_store

_AT_ONCE = 16


class DatasetOpener:
    """Opens the datasets of one mix.

    Args:
        trust_remote_code: Allow the datasets' own code to run.
        index: What an earlier start found; gets what this one finds.
        read_timeout_seconds: Time after which a read is tried again beside the first; None: no limit.
    """

    def __init__(
        self,
        *,
        trust_remote_code: bool = False,
        index: MixIndex | None = None,
        read_timeout_seconds: float | None = READ_TIMEOUT_SECONDS,
    ) -> None:
        self.trust_remote_code = trust_remote_code
        self._configs = DatasetConfigs(trust_remote_code=trust_remote_code)
        self._indexed_configs: dict[str, DatasetConfig] = {}
        self._index = MixIndex() if index is None else index
        self._files = OpenFiles(stalls=Stalls(read_timeout_seconds))
        self._opened: dict[Place, PreparedDataset] = {}

    def open(self, ref: LeafRef) -> PreparedDataset:
        """Open the prepared dataset, the JSONL file or the tables of a reference.

        Errors are those of `open_dataset`, `open_jsonl` and `open_tables`.
        """
        place = _place_of(ref)
        dataset = self._opened.get(place)
        if dataset is None:
            if ref.is_jsonl:
                dataset = open_jsonl(ref.path, files=self._files)
            elif is_table(ref.path):
                dataset = open_tables(ref.path, split_part=ref.split_part, dataset_config=place[2])
            else:
                dataset = self._prepared_or_tables(place)
            self._opened[place] = dataset
        return dataset

    def _prepared_or_tables(self, place: Place) -> PreparedDataset:
        try:
            dataset = self._open(place)
        except NotPreparedError:
            if not has_tables(place[0]):
                raise
            return open_tables(place[0], split_part=place[1], dataset_config=place[2])
        check_counts(dataset)
        return dataset

    def open_ahead(self, refs: Sequence[LeafRef]) -> None:
        """Open datasets behind URLs, many at once, for each waits for several answers.

        One that fails is left to `open`, which says why. Code of datasets runs in this thread only.
        """
        if self.trust_remote_code:
            return
        far = {_place_of(ref): ref for ref in refs if "://" in ref.path and as_far(open_store(ref.path)) is not None}
        if len(far) < 2:
            return

        def try_to_open(ref: LeafRef) -> None:
            with contextlib.suppress(Exception):
                self.open(ref)

        with ThreadPoolExecutor(min(_AT_ONCE, len(far)), "energon-open") as pool:
            list(pool.map(try_to_open, far.values()))

    def _open(self, place: Place) -> PreparedDataset:
        path, split_part, dataset_config, split_config = place
        store = open_store(path, files=self._files)
        known = self._index.find(place)
        if known is not None:
            return self._from_index(store, place, known)
        stamps = stamps_of(place) if isinstance(store, LocalStore) else []
        dataset, config = read_prepared(
            store, self._configs, split_part=split_part, dataset_config=dataset_config, split_config=split_config
        )
        if stamps and not config.form.has_code and config.split_config is None:  # a file that has no stamp
            self._index.record(
                place,
                Known(
                    stamps=stamps,
                    shards=list(dataset.shard_names),
                    counts=dataset.shard_counts.tolist(),
                    sizes=dataset.shard_sizes.tolist(),
                    excluded=[list(sample) for sample in sorted(dataset.excluded)],
                    config=config.text,
                    fingerprint=dataset.fingerprint,
                ),
            )
        return dataset

    def _from_index(self, store: Store, place: Place, known: Known) -> PreparedDataset:
        config = self._indexed_configs.get(known.config)
        if config is None:
            where = store.url(meta_path(place[2]))
            config = self._configs.build(json.loads(known.config), store=store, where=where)
            self._indexed_configs[known.config] = config
        return prepared(
            store,
            config,
            split_part=place[1],
            shards=known.shards,
            counts=known.counts,
            sizes=known.sizes,
            excluded=frozenset((shard, key) for shard, key in known.excluded) if known.excluded else NOTHING,
            fingerprint=known.fingerprint,
        )


def _place_of(ref: LeafRef) -> Place:
    config, split = ref.dataset_config or DEFAULT_DATASET_CONFIG, ref.split_config or DEFAULT_SPLIT_CONFIG
    return ref.path, ref.split_part, config, split

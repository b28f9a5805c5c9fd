"""Datasets that a program builds itself: `get_dataset_from_config`, `load_dataset`, `traverse_metadataset`.

megatron-energon returns the datasets of a mix one by one, each with its weight; so do these functions, and `build()` of
each returns what a loader or a wrapper takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from energon_bridge.compat import loading
from energon_bridge.compat.dataset_classes import BaseCoreDatasetFactory
from energon_bridge.compat.encoders import DatasetBlendMode
from energon_bridge.compat.epath import EPath
from energon_bridge.compat.preparing import prepare_metadataset
from energon_bridge.compat.table import not_provided
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.mix import JoinRef, Mix, MixIndex, load_mix
from energon_bridge.core.mix.paths import DatasetKind, kind_of_source
from energon_bridge.core.stores import FileStore
from energon_bridge.core.stream.leaf import StorePool

_DEFAULT: Any = object()
_SHUFFLE = "shuffle_over_epochs_multiplier"


class OpenedDataset(BaseCoreDatasetFactory):
    """A dataset as a configuration describes it, not yet batched or shuffled in a buffer.

    Attributes:
        subflavors: Those of its samples.
        paths: Its paths.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> OpenedDataset:
        return object.__new__(cls)

    def __init__(self, dataset: DatasetSpec) -> None:
        self._dataset = dataset
        opened = dataset.leaves[0].dataset
        self.__sample_type__ = getattr(opened, "sample_type", None)
        self.subflavors = dict(getattr(opened, "subflavors", {}))
        self.paths = [EPath(leaf.dataset.path) for leaf in dataset.leaves]

    def __len__(self) -> int:
        return self._dataset.num_samples

    def build(self, worker_rotation_offset: int = 0) -> DatasetSpec:
        """Return a dataset for a loader; the offset, which balances workers there, has no effect here."""
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
    settings = _given(dataset_config=dataset_config, split_config=split_config)
    settings |= {"split_part": split_part or "train", "worker_config": worker_config}
    settings |= {"subflavors": subflavors, "sample_type": sample_type}
    if "shuffle_over_epochs" in kwargs:
        kwargs[_SHUFFLE] = kwargs.pop("shuffle_over_epochs")
    return OpenedDataset(_open("get_dataset_from_config", path, settings, kwargs, training=training))


def get_val_datasets(path: Any, **kwargs: Any) -> list[tuple[DatasetSpec, OpenedDataset]]:
    """Open the datasets of a mix for validation one by one, each with its paths and subflavors."""
    pairs = []
    for dataset, _ in loading.get_val_datasets(path, **kwargs):
        encoder = loading.with_decoder(None, dataset.settings.task_encoder.decoder)
        plain = dataset.with_settings(batch_size=None, packing_buffer_size=None, task_encoder=encoder)
        pairs.append((dataset, OpenedDataset(plain)))
    return pairs


def _open(function: str, path: Any, settings: dict[str, Any], kwargs: dict[str, Any], *, training: bool) -> DatasetSpec:
    settings = {**settings, "batch_size": None}
    decoder = kwargs.pop("decoder", _DEFAULT)
    if decoder is not _DEFAULT:
        settings["task_encoder"] = loading.with_decoder(None, decoder)
    shuffle = {
        _SHUFFLE: kwargs.pop(_SHUFFLE, 1),
        "parallel_shard_iters": kwargs.pop("parallel_shard_iters", None),
        "max_samples_per_sequence": kwargs.pop("max_samples_per_sequence", None),
        "shuffle_buffer_size": None,
    }
    for name, value in kwargs.items():
        if value is not None:
            raise not_provided(f"{function}({name}={value!r})", "set it in a metadataset")
    if training:
        return loading.get_train_dataset(path, **settings, **shuffle)
    return loading.get_val_dataset(path, **settings)


_MODES = {"weights": DatasetBlendMode.DATASET_WEIGHT, "repetitions": DatasetBlendMode.SAMPLE_REPETITIONS}


@dataclass
class LoadedDataset:
    """One dataset of a mix, with its effective weight or its repetitions per epoch, and its auxiliary stores."""

    dataset: OpenedDataset
    weight: float | int | None = None
    repetitions: float | int | None = None
    aux: dict[str, FileStore] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the dataset and its number, as the pairs were that versions before 6 had."""
        yield self.dataset
        yield self.repetitions if self.weight is None else self.weight


@dataclass
class LoadedDatasetList:
    """The datasets of a mix, in its order."""

    datasets: list[LoadedDataset]
    blend_mode: DatasetBlendMode = DatasetBlendMode.NONE


def loaded_datasets(whole: DatasetSpec) -> LoadedDatasetList:
    """Return the datasets of a mix one by one, with their settings in it."""
    mix = whole.mix
    weights: Sequence[float | None] = [None] * len(whole.leaves)
    if mix.mode == "weights":
        weights = mix.weights_at(0, [leaf.num_samples for leaf in whole.leaves])
    stores = StorePool(None)
    parts = zip(whole.leaves, mix.leaves, weights, strict=True)
    return LoadedDatasetList(
        [
            LoadedDataset(
                dataset=OpenedDataset(
                    dataclasses.replace(whole, leaves=(leaf,), mix=dataclasses.replace(mix, leaves=(described,)))
                ),
                weight=weight,
                repetitions=_number(described.repetitions),
                aux={name: stores.open(ref) for name, ref in leaf.aux.items()} or None,
            )
            for leaf, described, weight in parts
        ],
        _MODES.get(mix.mode, DatasetBlendMode.NONE),
    )


@dataclass
class TraversedDatasetReference:
    """The settings of a dataset in the file of a mix. It is not opened, and need not exist."""

    path: EPath
    split_part: str
    aux: dict[str, EPath]
    subflavors: dict[str, Any]


class DatasetLoaderInterface:
    """A dataset or a mix, made by `load_dataset`; `get_datasets` returns its datasets."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._settings: dict[str, Any] = {}

    def post_initialize(self, mds_path: Any = None) -> None:
        """Do nothing; files are read on request."""

    def get_datasets(
        self,
        *,
        training: bool,
        split_part: str,
        worker_config: Any = None,
        subflavors: dict[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        subset: Any = None,
        **kwargs: Any,
    ) -> LoadedDatasetList:
        """Open the datasets.

        Raises:
            NotProvidedError: An argument that has no counterpart, such as `subset`.
        """
        settings = {"split_part": split_part, "worker_config": worker_config, "subflavors": subflavors}
        settings |= self._settings
        kwargs |= {"subset": subset, _SHUFFLE: shuffle_over_epochs_multiplier}
        whole = _open("get_datasets", self._source, settings, kwargs, training=training)
        return loaded_datasets(whole)

    def traverse(self, mds_path: Any = None, *, split_part: str) -> list[TraversedDatasetReference]:
        """Return the settings of the datasets of a mix; raises NotImplementedError if it has a join."""
        return _references(load_mix(self._source, split_part=split_part))

    def prepare(self, split_part: str | None = None) -> Sequence[EPath]:
        """Prepare the joins of the mix."""
        if isinstance(self, Metadataset):
            prepare_metadataset(self._source)
        return ()


class DatasetLoader(DatasetLoaderInterface):
    """One dataset, by the arguments of its constructor."""

    def __init__(
        self,
        path: Any,
        *,
        split_part: str | None = None,
        subflavors: dict[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        dataset_config: str | None = None,
        split_config: str | None = None,
    ) -> None:
        super().__init__(EPath(path).url)
        if shuffle_over_epochs_multiplier != 1:
            raise not_provided("DatasetLoader(shuffle_over_epochs_multiplier=…)", "pass it to get_datasets")
        self.path = EPath(path)
        self._settings = _given(split_part=split_part, dataset_config=dataset_config, split_config=split_config)
        self._subflavors = subflavors or {}

    def get_dataset(self, *, training: bool, split_part: str | None = None, **kwargs: Any) -> OpenedDataset:
        """Open the dataset; the arguments of the constructor go before those given here."""
        kwargs["subflavors"] = {**self._subflavors, **(kwargs.get("subflavors") or {})} or None
        return get_dataset_from_config(
            self.path, training=training, **{"split_part": split_part, **kwargs, **self._settings}
        )

    def get_datasets(self, *, training: bool, split_part: str, **kwargs: Any) -> LoadedDatasetList:
        """Open the dataset, as a mix of one."""
        return LoadedDatasetList([LoadedDataset(self.get_dataset(training=training, split_part=split_part, **kwargs))])


class Metadataset(DatasetLoaderInterface):
    """A mix; made by `load_dataset` of its file or dict."""

    def __init__(self, path: Any, splits: Any = None) -> None:
        if splits is not None:
            raise not_provided(f"{type(self).__name__}(splits=…)", "pass load_dataset the same as a dict")
        super().__init__(path)


class MetadatasetV2(Metadataset):
    """A mix of version 2."""


def load_dataset(path: Any, **kwargs: Any) -> DatasetLoaderInterface:
    """Return a dataset or a mix; its `get_datasets` opens and returns the datasets.

    Args:
        path: A folder, a JSONL file, the YAML file of a mix, or the same as a dict.
        kwargs: For a dataset, the arguments of `DatasetLoader`.

    Raises:
        DatasetNotFoundError, NotPreparedError, MetadataError: There is none.
    """
    if isinstance(path, dict):
        return _metadataset(path.get("__class__"))(path)
    source = EPath(path).url
    if kind_of_source(source) is not DatasetKind.METADATASET:
        return DatasetLoader(source, **kwargs)
    document = MixIndex().document(source)
    return _metadataset(document.get("__class__") if isinstance(document, dict) else None)(source)


def _metadataset(name: Any) -> type[Metadataset]:
    return MetadatasetV2 if name == "MetadatasetV2" else Metadataset


def traverse_metadataset(path: Any, *, split_part: str) -> list[TraversedDatasetReference]:
    """Return the settings of the datasets of a mix, in order, with nested mixes expanded in place.

    Raises:
        ConfigurationError: The path is not a mix.
        NotImplementedError: The mix has a join.
    """
    source = EPath(path).url
    if kind_of_source(source) is not DatasetKind.METADATASET:
        raise ConfigurationError(f"traverse_metadataset: expected the .yaml file of a mix, got {source}")
    return _references(load_mix(source, split_part=split_part))


def _references(mix: Mix) -> list[TraversedDatasetReference]:
    references = []
    for entry in mix.leaves:
        leaf = entry.leaf
        if isinstance(leaf, JoinRef):
            raise NotImplementedError(
                f"{leaf.where}: traverse_metadataset() does not support joins, as in megatron-energon."
            )
        aux = {name: EPath(ref.path) for name, ref in leaf.aux.items()}
        references.append(TraversedDatasetReference(EPath(leaf.path), leaf.split_part, aux, dict(leaf.subflavors)))
    return references


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _number(repetitions: Fraction | None) -> float | int | None:
    if repetitions is None:
        return None
    return int(repetitions) if repetitions.denominator == 1 else float(repetitions)

"""Cooking in a stream: which cooker a leaf has, and the stores it is given, opened once in each process.

Reading and decoding crude samples is the loading threads' work as for any sample; cookers are user code, and run with
the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from energon_bridge.errors import NoCookerError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.jsonl import is_jsonl
from energon_bridge.mix import AuxRef
from energon_bridge.samples import CrudeSample
from energon_bridge.stores import (
    CachePool,
    DecodeFileStore,
    FileStore,
    JsonlFileStore,
    SystemFileStore,
    WebdatasetFileStore,
)
from energon_bridge.task_encoder.cooking import PRIMARY, Cooker, check_call, cook_sample, matching_cooker

Cook = Callable[[CrudeSample], Any]


def cooker_of(encoder: Any, dataset: PreparedDataset | JoinedDataset) -> Cooker[Any] | None:
    """Return what cooks the samples of a dataset; None for typed ones, joins, and encoders without cookers.

    Raises:
        NoCookerError: None of the encoder's cookers takes them.
    """
    cookers = getattr(encoder, "cookers", ())
    if not cookers or isinstance(dataset, JoinedDataset) or not issubclass(dataset.sample_type, CrudeSample):
        return None
    found = matching_cooker(cookers, dataset.subflavors)
    if found is None:
        known = "; ".join(f"{one.name} for {dict(one.has_subflavors or {})}" for one in cookers)
        raise NoCookerError(
            f"{dataset.path}: no cooker of {type(encoder).__name__} takes its samples, whose subflavors are "
            f"{dataset.subflavors}. There are: {known}. Give the dataset the subflavors of one of them, or add a cooker"
        )
    return found


def check_cooker(encoder: Any, dataset: PreparedDataset | JoinedDataset, aux: Mapping[str, AuxRef]) -> None:
    """Raise ConfigurationError if the samples of a dataset cannot be cooked, as far as can be told beforehand."""
    found = cooker_of(encoder, dataset)
    if found is not None:
        check_call(found, aux)


class StorePool:
    """The auxiliary stores of one process: one for each place, however many leaves name it."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._stores: dict[AuxRef, FileStore] = {}

    def open(self, ref: AuxRef) -> FileStore:
        """Return a store; nothing of it is read before a file is."""
        store = self._stores.get(ref)
        if store is None:
            kind: type[WebdatasetFileStore | SystemFileStore | JsonlFileStore] = WebdatasetFileStore
            if ref.is_filesystem:
                kind = SystemFileStore
            elif is_jsonl(ref.path):
                kind = JsonlFileStore
            inner = kind(ref.path)
            store = inner if self._decoder is None else DecodeFileStore(inner, decoder=self._decoder)
            self._stores[ref] = store
        return store


def cook_of(
    encoder: Any,
    dataset: PreparedDataset | JoinedDataset,
    aux: Mapping[str, AuxRef],
    stores: StorePool,
    cache: CachePool,
) -> Cook | None:
    """Return what makes samples of a leaf's crude ones, None where they stay as they are."""
    found = cooker_of(encoder, dataset)
    if found is None:
        return None
    given = {name: stores.open(ref) for name, ref in aux.items()}
    if found.needs_primary:
        given[PRIMARY] = stores.open(AuxRef(path=dataset.path))
    hook = getattr(encoder, "cook_crude_sample", None)
    if hook is None:
        return partial(cook_sample, of=found, stores=given, cache=cache)

    def cook(sample: CrudeSample) -> Any:
        return hook(sample, found, given)

    return cook

"""Cooking in a stream: finds the cooker of a leaf and opens the stores it needs, once per process.

Loading threads read and decode crude samples like any others. Cookers are user code and run with the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from energon_bridge.errors import FatalSampleError, NoCookerError
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
from energon_bridge.task_encoder.hooks import Hook

Cook = Callable[[CrudeSample], Any]


def cooker_of(encoder: Any, dataset: PreparedDataset | JoinedDataset) -> Cooker[Any] | None:
    """Return the cooker for the samples of a dataset; None if they are typed or the encoder has no cookers.

    In a join, it cooks the samples that the joiner leaves crude (dicts, if one of the datasets is crude).

    Raises:
        NoCookerError: None of the encoder's cookers takes them.
    """
    cookers = getattr(encoder, "cookers", ())
    if not cookers or not _is_crude(dataset):
        return None
    found = matching_cooker(cookers, dataset.subflavors)
    if found is None and not isinstance(dataset, JoinedDataset):
        raise NoCookerError(_no_cooker(encoder, dataset))
    return found


def _is_crude(dataset: PreparedDataset | JoinedDataset) -> bool:
    return dataset.is_crude if isinstance(dataset, JoinedDataset) else issubclass(dataset.sample_type, CrudeSample)


def _no_cooker(encoder: Any, dataset: PreparedDataset | JoinedDataset) -> str:
    known = "; ".join(f"{one.name} for {dict(one.has_subflavors or {})}" for one in encoder.cookers)
    return (
        f"{dataset.path}: no cooker of {type(encoder).__name__} takes its samples, whose subflavors are "
        f"{dataset.subflavors}. There are: {known}. Give the dataset the subflavors of one of them, or add a cooker"
    )


def check_cooker(encoder: Any, dataset: PreparedDataset | JoinedDataset, aux: Mapping[str, AuxRef]) -> None:
    """Raise ConfigurationError if it is already clear that the samples of a dataset cannot be cooked."""
    found = cooker_of(encoder, dataset)
    if found is not None:
        check_call(found, aux)


class StorePool:
    """The auxiliary stores of one process: one per location, shared by all leaves that name it."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._stores: dict[AuxRef, FileStore] = {}

    def open(self, ref: AuxRef) -> FileStore:
        """Return a store; it reads nothing until a file is requested."""
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
    """Return the function that cooks a leaf's crude samples; None if they stay crude."""
    found = cooker_of(encoder, dataset)
    joined = isinstance(dataset, JoinedDataset)
    if found is None:
        if joined and _is_crude(dataset) and len(getattr(encoder, "cookers", ())):
            return partial(_refuse_crude, message=_no_cooker(encoder, dataset))
        return None
    given = {name: stores.open(ref) for name, ref in aux.items()}
    if found.need_primary:
        path = dataset.parts[0].dataset.path if isinstance(dataset, JoinedDataset) else dataset.path
        given[PRIMARY] = stores.open(AuxRef(path=path))
    hook = getattr(encoder, Hook.COOK.title, None)
    cook: Cook = partial(cook_sample, of=found, stores=given, cache=cache)
    if hook is not None:
        cook = partial(_by_hook, hook, found, given)
    return partial(_if_crude, cook) if joined else cook


def _by_hook(hook: Callable[..., Any], of: Cooker[Any], stores: dict[str, FileStore], sample: CrudeSample) -> Any:
    return hook(sample, of, stores)


def _if_crude(cook: Cook, sample: Any) -> Any:
    """Cook a sample that a joiner left crude."""
    if not isinstance(sample, dict):
        return sample
    return cook(sample if isinstance(sample, CrudeSample) else CrudeSample(sample))


def _refuse_crude(sample: Any, message: str) -> Any:
    if isinstance(sample, dict):
        raise FatalSampleError(message)
    return sample

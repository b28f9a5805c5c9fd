"""Dataset classes: names in a `dataset.yaml`, and the user's classes that derive from them.

A `dataset.yaml` may name a class with its own `__init__`, which sets field maps, loaders or a decoder, or with a
`load_sample`. Both run only with `trust_remote_code=True` (`format.dataset_config` asks for `__dataset_code__`). Any
other method that such a class overrides would be ignored here, so it raises an error that names it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Self

from energon_bridge.compat.decoders import DEFAULT_DECODER
from energon_bridge.compat.epath import EPath
from energon_bridge.compat.preparing import JsonlPreparator, WebdatasetPreparator
from energon_bridge.compat.table import not_provided
from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.dataset_config import load_function
from energon_bridge.core.format.field_map import FieldMap
from energon_bridge.core.storage import open_store

_MAKING: ContextVar[bool] = ContextVar("energon_bridge_making", default=False)
"""Whether a dataset class is being made for a dataset.yaml that names it."""
IMAGE_DECODE: ContextVar[str] = ContextVar("energon_bridge_image_decode", default="torchrgb")
"""The `image_decode=` of the builder that is opening datasets; classes written for versions before 6 read it."""
_ENCODERS: Any = type("_EncodersDecoder", (), {"__repr__": lambda self: "<the task encoder's decoder>"})()
"""Placeholder for the task encoder's decoder, passed to dataset classes."""
_NOT_RUN = ("build", "__iter__", "__len__", "shard_workers", "slice_workers", "split_samples_to_workers")
_META = ("__key__", "__restore_key__", "__subflavors__", "__sources__")


class BaseCoreDatasetFactory:
    """The root of dataset classes, none of which a program can make by itself."""

    # What megatron-energon's datasets have, as the value of `dataset.yaml` for classes that users derive.
    __sample_type__: type | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if not _MAKING.get():
            raise not_provided(
                f"making {cls.__name__}",
                "describe the dataset in its dataset.yaml, and open it with get_train_dataset or get_val_dataset",
            )
        return super().__new__(cls)

    def __class_getitem__(cls, arguments: Any) -> type[Self]:
        return cls


class BaseWebdatasetFactory(BaseCoreDatasetFactory, WebdatasetPreparator):
    """Dataset classes of tars: a name in `dataset.yaml`, `prepare_dataset`, and what derived classes may call."""

    def __init__(
        self,
        path: EPath,
        *,
        decoder: Any = _ENCODERS,
        auto_decode: bool = True,
        subflavors: dict[str, Any] | None = None,
        field_map: Mapping[str, str] | None = None,
        sample_loader: str | Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        part_filter: str | list[str] | Callable[[str], bool] | None = None,
        sample_type: type | None = None,
    ) -> None:
        if sample_type is not None:
            self.__sample_type__ = sample_type
        self.path = path
        self.image_decode = IMAGE_DECODE.get()
        self.subflavors = dict(subflavors or {})
        decoder = _ENCODERS if decoder is DEFAULT_DECODER else decoder  # the default of derived classes, not a wish
        self._decoder = decoder if auto_decode else None
        store = open_store(os.fspath(path))
        if isinstance(sample_loader, str):
            sample_loader = load_function(store, sample_loader, default_name="sample_loader", trust=True)
        if isinstance(part_filter, str):
            part_filter = load_function(store, part_filter, default_name="part_filter", trust=True)
        if (field_map is None) == (sample_loader is None):
            raise TypeError("either field_map or sample_loader must be given")
        fields = None if field_map is None else FieldMap(dict(field_map), where=f"{store.root}, field_map")
        self._sample_loader: Callable[[dict[str, Any]], dict[str, Any]] = sample_loader or fields  # type: ignore[assignment]
        self._parts = (
            fields.parts if fields else frozenset(part_filter) if isinstance(part_filter, list) else part_filter
        )

    def load_sample(self, raw_data: dict[str, Any]) -> Any:
        """Return the sample of its decoded parts."""
        meta = {name: raw_data[name] for name in _META}
        assert self.__sample_type__ is not None
        return self.__sample_type__(**meta | dict(self._sample_loader(raw_data)))

    @classmethod
    def __dataset_code__(cls, path: str, document: dict[str, Any]) -> DatasetCode | None:
        """Return the code of a derived class that must run for its samples; None if it only names their type."""
        own = [name for name in _NOT_RUN if hasattr(cls, name)]
        if own:
            raise MetadataError(
                f"{path}: the dataset class {cls.__module__}.{cls.__qualname__} has its own {own[0]}, which would be "
                "ignored here: make samples in `load_sample`, by a sample_loader, or by a cooker of the task encoder"
            )
        base = BaseWebdatasetFactory
        if cls.__init__ is base.__init__ and cls.load_sample is base.load_sample:
            return None
        return DatasetCode(cls.__module__, cls.__qualname__, path, document)


class CrudeJsonlDatasetFactory(BaseCoreDatasetFactory, JsonlPreparator):
    """Dataset class of a JSONL file: `prepare_dataset`."""


class DatasetCode:
    """Makes the fields of samples by a dataset class; travels to other processes by the name of the class.

    Attributes:
        decodes: Whether the class has a decoder of its own (or none), so that it gets the bytes of parts.
        sample_type: Type of its samples.
        part_filter: The parts it asks for: names, a function of a name, or None for all.
        subflavors: Those that the class sets.
    """

    def __init__(
        self, module: str, name: str, path: str, document: dict[str, Any], image_decode: str | None = None
    ) -> None:
        image_decode = IMAGE_DECODE.get() if image_decode is None else image_decode
        self._made_of = (module, name, path, document, image_decode)
        cls: Any = importlib.import_module(module)
        for part in name.split("."):
            cls = getattr(cls, part)
        arguments = {key: value for key, value in document.items() if key not in ("__module__", "__class__")}
        token = _MAKING.set(True)
        of_images = IMAGE_DECODE.set(image_decode)
        try:
            self._dataset = made = cls(EPath(path), **arguments)
            self._own_decoder = made._decoder
            self.part_filter = made._parts
            self.subflavors: dict[str, Any] = made.subflavors
        except Exception as error:
            raise MetadataError(
                f"{path}: cannot make the dataset class {module}.{name} with {arguments} from dataset.yaml and a path: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            _MAKING.reset(token)
            IMAGE_DECODE.reset(of_images)
        self.sample_type = made.__sample_type__
        self.decodes = self._own_decoder is not _ENCODERS

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetCode, self._made_of

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a sample."""
        sample = {**sample, "__subflavors__": dict(self.subflavors)}
        if self.decodes and self._own_decoder is not None:
            sample = self._own_decoder(sample)
        loaded = self._dataset.load_sample(sample)
        if loaded is None:
            return None  # type: ignore[return-value]  # refused as any loader's
        names = loaded if isinstance(loaded, dict) else loaded.__dataclass_fields__
        values = {name: loaded[name] if isinstance(loaded, dict) else getattr(loaded, name) for name in names}
        return {name: value for name, value in values.items() if name == "__key__" or not name.startswith("__")}

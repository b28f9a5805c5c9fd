"""The base classes of all samples and batches, and the five meta fields that they carry.

    __key__          the key of the sample in its dataset; in a batch a list, one per row
    __restore_key__  enough to make the same sample or batch again; in a batch it holds the rows' keys
    __subflavors__   free labels from the dataset configuration; in a batch a list, one per row
    __sources__      the files that the content came from, for error messages; in a batch those of all rows in order
    __valid__        batches only: a bool tensor, one per row; False for rows that only give the batch its shape

Fields can be read as attributes or by name: `batch.image` and `batch['image']` are the same. Per sample, nothing here
runs but the generated constructor, because samples are made on the hot path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

from energon_bridge.core.errors import ConfigurationError, UnfitSampleError, did_you_mean
from energon_bridge.core.registry import load

T = TypeVar("T")

META_FIELDS = ("__key__", "__restore_key__", "__subflavors__", "__sources__", "__valid__")


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def edataclass(cls: type[T]) -> type[T]:
    """Make a class a slotted, keyword-only dataclass, as all sample and batch types are.

    Examples:
        >>> @edataclass
        ... class Audio(Sample):
        ...     waveform: torch.Tensor
        >>> Audio(__key__="a", waveform=torch.zeros(4)).waveform.shape
        torch.Size([4])
    """
    return dataclass(kw_only=True, slots=True)(cls)


class SourceInfo(NamedTuple):
    """One access to the files of a dataset: where a part of a sample came from.

    Examples:
        >>> SourceInfo("data/captions", 3, "shard_000.tar", ("a.jpg", "a.txt")).shard_name
        'shard_000.tar'
    """

    dataset_path: str
    # The name that energon users know; it hides tuple.index, which nobody needs here.
    index: int | str  # type: ignore[assignment]
    shard_name: str
    file_names: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles at half the cost of a named tuple; every sample of a batch has one.
        return SourceInfo, tuple(self)


class SentSources(tuple[SourceInfo, ...]):
    """The sources of a batch in a worker: pickled column by column, in half the time; what arrives is a tuple."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        if set(map(type, self)) == {SourceInfo}:
            return _sources_of, tuple(zip(*self, strict=True))
        return tuple, (tuple(self),)  # with records of a user's own


def _sources_of(*columns: tuple[Any, ...]) -> tuple[SourceInfo, ...]:
    return tuple(map(tuple.__new__, repeat(SourceInfo), zip(*columns, strict=True)))


class Segment(NamedTuple):
    """The position of a sample in a row of tokens.

    Attributes:
        dataset: The path of its dataset, as in its sources; "" if unknown.
        key: Its key.
        start: Its first token in the row.
        length: Its number of tokens, without padding.
    """

    dataset: str
    key: str
    start: int
    length: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, tuple(self)


def segments_of(
    samples: Sequence[Sample | CrudeSample], lengths: Sequence[int], padded_lengths: Sequence[int] | None = None
) -> tuple[Segment, ...]:
    """Return the segments of a row of concatenated samples.

    For your own task encoders: set them in `pack_selected_samples` as the field `segments` of the row.

    Args:
        samples: The samples of the row, in order.
        lengths: The number of tokens of each.
        padded_lengths: The number of positions of each, if some are padded; default: `lengths`.
    """
    segments = []
    start = 0
    for sample, length, room in zip(samples, lengths, padded_lengths or lengths, strict=True):
        if isinstance(sample, dict):
            key = sample["__key__"]
            sources = sample.get("__sources__")
        else:
            key = sample.__key__
            sources = sample.__sources__
        segments.append(Segment(sources[0].dataset_path if sources else "", key, start, length))
        start += room
    return tuple(segments)


def once_per_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Cache a function of a class; `functools.cache` with a type that accepts classes."""
    return cache(function)


@once_per_class
def field_names(cls: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in order."""
    return tuple(entry.name for entry in fields(cls))


@once_per_class
def init_field_names(cls: type) -> tuple[str, ...]:
    """Return the names of the fields that a dataclass's constructor takes, in order."""
    return tuple(entry.name for entry in fields(cls) if entry.init)


@once_per_class
def required_field_names(cls: type) -> frozenset[str]:
    """Return the names of the fields without which a dataclass cannot be made."""
    entries = (entry for entry in fields(cls) if entry.init)
    return frozenset(e.name for e in entries if e.default is MISSING and e.default_factory is MISSING)


class _Names(tuple[str, ...]):
    """The names of a record's fields; `in` also accepts aliases, but they are not listed."""

    __slots__ = ()
    aliases: Mapping[str, str]

    def __contains__(self, name: object) -> bool:
        return tuple.__contains__(self, name) or name in self.aliases

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


@once_per_class
def _names_of(cls: type) -> tuple[str, ...]:
    kind = type("FieldNames", (_Names,), {"aliases": cls.__aliases__, "__slots__": ()})  # type: ignore[attr-defined]
    names: tuple[str, ...] = kind(field_names(cls))
    return names


def _shown(record: Any, names: Iterable[str], view: str = "text") -> str:
    """Return the text of a sample or batch, or its table for notebooks."""
    shown: str = load("view", view)(record, names)
    return shown


class _Record:
    """Shared by samples and batches: access by name, derivation, pinning."""

    __slots__ = ()
    # Other names by which `[]` finds a field; a field of that very name takes precedence.
    __aliases__: ClassVar[Mapping[str, str]] = {}
    # Fields that only the host reads: they are neither pinned nor copied to a device.
    __on_host__: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Set here, so that `dataclass` does not generate one that prints all pixels; a class with its own keeps it.
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = _Record.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return _shown(self, field_names(type(self)))

    def _repr_html_(self) -> str:
        return _shown(self, field_names(type(self)), "notebook")

    def __getitem__(self, name: str) -> Any:
        names = field_names(type(self))
        if name in names:
            return getattr(self, name)
        if (target := self.__aliases__.get(name)) in names:
            return getattr(self, target)
        # For attributes Python itself suggests a name; a `__getattr__` would make each access three times slower.
        known = [*names, *self.__aliases__]
        hint = did_you_mean(name, known)
        raise KeyError(f"{type(self).__name__} has no field {name!r}.{hint} It has {', '.join(known)}")

    def __contains__(self, name: object) -> bool:
        return name in field_names(type(self)) or name in self.__aliases__

    def keys(self) -> tuple[str, ...]:
        """Return the names of all fields; with this, `dict(sample)` works.

        Aliases are not listed, since a dict would then have values twice, but they are `in` it.
        """
        return _names_of(type(self))

    @classmethod
    def derive_from(cls, base_sample: Sample | Batch | CrudeSample, **values: Any) -> Self:
        """Make an object of this type with the meta fields of `base_sample` and `values` for the other fields."""
        if isinstance(base_sample, dict):
            meta = {name: base_sample[name] for name in META_FIELDS if name in base_sample}
        else:
            meta = {name: getattr(base_sample, name) for name in META_FIELDS}
        return cls(**{**meta, **values})

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:
        """Return a copy with all tensors on a device (or of a dtype); keys, sources and texts are not copied."""
        return self._changed(lambda value: to_device(value, device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy with all tensors, at any depth, in pinned host memory."""
        return self._changed(pin_value)

    def _changed(self, change: Callable[[Any], Any]) -> Self:
        changed = copy.copy(self)
        # Among the meta fields only the validity mask is a tensor; walking the sources of a large batch costs too much.
        for name in field_names(type(self)):
            if (name not in META_FIELDS or name == "__valid__") and name not in self.__on_host__:
                object.__setattr__(changed, name, change(getattr(self, name)))
        return changed


@edataclass
class Sample(_Record):
    """One sample of a dataset; every sample type derives from it.

    Examples:
        >>> @edataclass
        ... class ScoredText(Sample):
        ...     text: str
        ...     score: float
        >>> ScoredText(__key__="a", text="hello", score=0.5)["score"]
        0.5
    """

    __key__: str
    __restore_key__: tuple[Any, ...] = ()
    __subflavors__: dict[str, Any] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None
    __valid__: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def extend(cls, source: Sample, **values: Any) -> Self:
        """Make a sample of this type from one of a base type: all of its fields, and `values` for the new ones."""
        if not issubclass(cls, type(source)):
            raise TypeError(
                f"{cls.__name__}.extend takes a sample of a base class, got {type(source).__name__}; "
                f"use {cls.__name__}.derive_from to copy only the meta fields"
            )
        return cls(**{**{name: getattr(source, name) for name in init_field_names(type(source))}, **values})

    @classmethod
    def from_joined(cls, primary: Sample, *others: Sample | None, **values: Any) -> Self:
        """Make one sample of several: the fields of the primary, overridden by those of the others in turn.

        Key, restore key and subflavors are the primary's; the sources of all are kept, without duplicates. None stands
        for a dataset without a matching sample and adds nothing. `values` override everything.
        """
        merged = {name: getattr(primary, name) for name in init_field_names(type(primary))}
        present = [sample for sample in others if sample is not None]
        for sample in present:
            names = init_field_names(type(sample))
            merged.update({name: getattr(sample, name) for name in names if name not in META_FIELDS})
        sources = [sample.__sources__ for sample in (primary, *present) if sample.__sources__ is not None]
        merged["__sources__"] = tuple(chain.from_iterable(sources)) if sources else None
        return cls(**{**merged, **values})


class CrudeSample(dict[str, Any]):
    """A sample without a type: its decoded parts by name, and the known meta fields.

    Examples:
        >>> sample = CrudeSample({"__key__": "a", "json": {"text": "hello"}})
        >>> sample["json"]["text"]
        'hello'
    """

    def __repr__(self) -> str:
        return _shown(self, self)

    def _repr_html_(self) -> str:
        return _shown(self, self, "notebook")

    @classmethod
    def from_joined(cls, *samples: CrudeSample | None, **named: Any) -> Self:
        """Make one crude sample of several: the parts of all (later samples override), or named samples as they are.

        Key, restore key and subflavors are those of the primary, which comes first. None stands for a dataset without a
        matching sample. Raises TypeError for typed samples without names.
        """
        if named:
            return cls(named)
        typed = [type(sample).__name__ for sample in samples if not isinstance(sample, dict | None)]
        if typed:
            raise TypeError(f"only crude samples can be combined part by part, got {', '.join(typed)}")
        joined: dict[str, Any] = {}
        for sample in samples:
            joined |= {name: part for name, part in (sample or {}).items() if name not in joined or name[:2] != "__"}
        return cls(joined)


@edataclass
class Batch(_Record):
    """Collated samples; the base class for your own batch types.

    Examples:
        >>> @edataclass
        ... class TextBatch(Batch):
        ...     text: list[str]
        >>> samples = [TextSample(__key__=key, text=key.upper()) for key in "ab"]
        >>> TextBatch.from_samples(samples).text
        ['A', 'B']
    """

    __key__: list[str]
    __restore_key__: tuple[Any, ...] = ()
    __subflavors__: list[dict[str, Any] | None] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None
    __valid__: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample | CrudeSample], **values: Any) -> Self:
        """Collate samples into this type, field by field; `values` override.

        A column of tensors is zero-padded at the end of every dimension to the largest size and stacked; any other
        column stays a list. Raises ConfigurationError if there is no sample, a required field is in no sample, or the
        tensors of a column differ in rank.
        """
        from energon_bridge.core.samples.stacking import batch_meta, batch_pad_stack, is_tensor_column

        if not samples:
            raise ConfigurationError(f"{cls.__name__}.from_samples got no samples; it needs at least one")
        collated = dict(values)
        for name in init_field_names(cls):
            if name in values or (column := _column(samples, name)) is None:
                continue
            if name in META_FIELDS:
                collated[name] = batch_meta(name, column)
            else:
                collated[name] = batch_pad_stack(column) if is_tensor_column(column) else column
        if missing := sorted(required_field_names(cls) - collated.keys()):
            wrong = UnfitSampleError if all(isinstance(sample, dict) for sample in samples) else ConfigurationError
            raise wrong(
                f"{cls.__name__}.from_samples: not every {type(samples[0]).__name__} has {', '.join(missing)}; "
                f"add a default to {cls.__name__}, or pass the value as a keyword"
            )
        return cls(**collated)


class Records(Sequence[Any]):
    """Samples of one kind, held field by field; each is made when it is asked for. Collating them makes none."""

    __slots__ = ("columns", "kind")

    def __init__(self, kind: type, columns: dict[str, list[Any]]) -> None:
        self.kind = kind
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["__key__"])

    def __iter__(self) -> Iterator[Any]:
        kind = self.kind
        names = tuple(self.columns)
        return (kind(**dict(zip(names, values, strict=True))) for values in zip(*self.columns.values(), strict=True))

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.changed(lambda column: column[at])
        return self.kind(**{name: column[at] for name, column in self.columns.items()})

    def __add__(self, other: Sequence[Any]) -> Sequence[Any]:
        if type(other) is Records and other.kind is self.kind and other.columns.keys() == self.columns.keys():
            return Records(self.kind, {name: column + other.columns[name] for name, column in self.columns.items()})
        return [*self, *other]

    def changed(self, change: Callable[[list[Any]], list[Any]]) -> Records:
        """Return the records with every column changed in the same way."""
        return Records(self.kind, {name: change(column) for name, column in self.columns.items()})


def add_source_info(sample: Sample | Batch | CrudeSample, *infos: SourceInfo) -> None:
    """Add a file that was read for a sample; error messages then name it."""
    if isinstance(sample, dict):
        sample["__sources__"] = (*(sample.get("__sources__") or ()), *infos)
    else:
        sample.__sources__ = (*(sample.__sources__ or ()), *infos)


def _column(samples: Sequence[Any], name: str) -> list[Any] | None:
    """Return a field of all samples; None if one has no such field."""
    one_type = type(samples[0])
    if issubclass(one_type, _Record) and all(type(sample) is one_type for sample in samples):
        names = field_names(one_type)
        name = name if name in names else one_type.__aliases__.get(name, name)
        return [getattr(sample, name) for sample in samples] if name in names else None
    column = []
    for sample in samples:
        by_name = isinstance(sample, _Record | dict)
        if not (name in sample if by_name else hasattr(sample, name)):
            return None
        column.append(sample[name] if by_name else getattr(sample, name))
    return column


def meta_field(record: Any, name: str) -> Any:
    """Return a field of a sample or batch of any type; None if it has none of that name."""
    return record.get(name) if isinstance(record, dict) else getattr(record, name, None)


def over_tensors(value: Any, change: Callable[[Any], Any], method: str) -> Any:
    """Return a copy of a value in which `change(entry)` replaces every entry, at any depth, that has a method.

    `method` is its name: tensors are recognised by one of theirs, so that nothing here imports torch. Containers are
    copied and keep their class.
    """
    if hasattr(value, method):
        return change(value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)  # keeps the class, whatever the arguments of its constructor are
        for key, entry in value.items():
            changed[key] = over_tensors(entry, change, method)
        return changed
    if isinstance(value, (Segment, SourceInfo)):
        return value
    if isinstance(value, tuple):
        entries = [over_tensors(entry, change, method) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if isinstance(value, list):
        return [over_tensors(entry, change, method) for entry in value]
    if is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        on_host = getattr(value, "__on_host__", ())
        for name in (name for name in field_names(type(value)) if name not in on_host):
            object.__setattr__(record, name, over_tensors(getattr(value, name), change, method))
        return record
    return value


def pin_value(value: Any) -> Any:
    """Return a value with all tensors, at any depth, in pinned host memory."""
    from energon_bridge.core.samples.stacking import pinned

    return over_tensors(value, pinned, "pin_memory")


def to_device(value: Any, device: Any, *, non_blocking: bool = True) -> Any:
    """Return a value with all tensors, at any depth, on a device; keys, sources and texts are not copied."""

    def moved(entry: Any) -> Any:
        # Other classes with a method `to`, such as transformers' batches, may not take `non_blocking`.
        ours = isinstance(entry, _Record) or hasattr(entry, "data_ptr")
        return entry.to(device, non_blocking=non_blocking) if ours else entry.to(device)

    return over_tensors(value, moved, "to")

"""Opens the joins of a mix: their datasets, the index of their rows, and the joiner."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from energon_bridge.core.errors import ConfigurationError, EnergonError, MetadataError, UntrustedCodeError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.dataset_config import how_to_trust, import_class, is_own, never_called
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.format.join import JoinedDataset, JoinPart, joined_dataset, open_index
from energon_bridge.core.mix.paths import user_cache
from energon_bridge.core.mix.tree import AuxRef, Joiner, JoinRef, LeafRef
from energon_bridge.core.samples import CrudeSample, Sample, sample_type_by_name
from energon_bridge.core.worker_config import available_cores

# ---------------------------------------------------------------------------------------------------------------------
# Joiners: `from_joined` of a sample type, or a function, that makes one sample of the samples of a row.
#
# A file only names its joiner. Names of `megatron.energon` and `energon_bridge` are sample types of this package. Other
# names are looked up among those that user code registered (`register_joiner`) and the sample types of modules that it
# imported; they are imported only with `trust_remote_code=True`.


JoinerT = TypeVar("JoinerT", bound=Callable[..., Any])

# Filled while user modules are imported, and only read afterwards: the one global table that user code adds to.
_REGISTERED: dict[str, Callable[..., Any]] = {}


@overload
def register_joiner(joiner: JoinerT) -> JoinerT: ...
@overload
def register_joiner(joiner: str) -> Callable[[JoinerT], JoinerT]: ...
def register_joiner(joiner: str | Callable[..., Any]) -> Callable[..., Any]:
    """Let metadatasets name a function (or a sample type with `from_joined`) as the `joiner` of a join.

    Examples:
        >>> @register_joiner("my.joiners.with_caption")  # joiner: {__module__: my.joiners, __function__: with_caption}
        ... def with_caption(image, text):
        ...     return CaptioningSample.extend(image, caption=text.text)

    Use it as `@register_joiner`: a file names it by `__module__` and `__function__` (or `__class__`) as for an import.
    Use it as `@register_joiner("some.module.name")` to choose that name, for files written for code that moved.

    Raises:
        ConfigurationError: Something else has that name.
    """
    if isinstance(joiner, str):
        return lambda target: _register(joiner, target)
    return _register(f"{joiner.__module__}.{joiner.__qualname__}", joiner)


def _register(name: str, joiner: JoinerT) -> JoinerT:
    other = _REGISTERED.get(name)
    # A module that is reloaded, as notebooks do, registers the same function again.
    if other is not None and (other.__module__, other.__qualname__) != (joiner.__module__, joiner.__qualname__):
        raise ConfigurationError(f"the joiner {name!r} is already registered, as {other!r}. Choose another name.")
    _REGISTERED[name] = joiner
    return joiner


def resolve_joiner(join: JoinRef, sample_types: list[type], *, trust: bool) -> Callable[..., Any]:
    """Return the function that a join calls with its samples, by position or, in a join with names, by name.

    `sample_types` are those of the datasets. Raises UntrustedCodeError for a name that only an import can find, and
    MetadataError for one that cannot be found or called like that.
    """
    joiner = join.joiner
    where = f"{join.where}, field `joiner`"
    target = joiner.target or _find(joiner, where=where, trust=trust)
    function = target
    if isinstance(target, type):
        function = getattr(target, "from_joined", None)
        if function is None:
            raise MetadataError(
                f"{where}: {joiner.module}.{joiner.name} has no `from_joined`. Name a sample type that has one, or a "
                f"function."
            )
        if getattr(function, "__func__", None) is vars(Sample)["from_joined"].__func__:
            _check_plain(join, sample_types, where=where)
    elif not callable(target):
        raise MetadataError(f"{where}: {joiner.module}.{joiner.name} is {target!r}, expected a function.")
    _check_call(join, function, where=where)
    return function


def _find(joiner: Joiner, *, where: str, trust: bool) -> Any:
    name = f"{joiner.module}.{joiner.name}"
    if name in _REGISTERED:
        return _REGISTERED[name]
    if is_own(joiner.module):
        try:
            return sample_type_by_name(joiner.name)
        except EnergonError as error:
            raise MetadataError(f"{where}: {error}") from error
    try:
        return import_class(joiner.module, joiner.name, root=where, where=where, trust=trust)
    except UntrustedCodeError:
        if (instead := never_called()) is not None:
            return instead
        raise UntrustedCodeError(
            f"{where}: the mix wants to run code: {name}. Import its module in your program and, if it is a function, "
            "register it there with @energon_bridge.register_joiner; or, if you trust the mix, pass "
            f"{how_to_trust()} to import it by name."
        ) from None


def _check_plain(join: JoinRef, sample_types: list[type], *, where: str) -> None:
    """Raise if the base class's own `Sample.from_joined` cannot take the samples."""
    if join.is_named:
        raise MetadataError(
            f"{where}: `from_joined` of {join.joiner.name} takes samples by position, but the join names them. "
            f"Write the join as a list, or give {join.joiner.name} a `from_joined` with these names."
        )
    for entry, sample_type in zip(join.entries, sample_types, strict=True):
        if issubclass(sample_type, CrudeSample):
            raise MetadataError(
                f"{where}: {entry.leaf.path} is crude, so its samples have no fields for `from_joined`. "
                f"Use a function as the joiner."
            )


def _check_call(join: JoinRef, function: Callable[..., Any], *, where: str) -> None:
    """Raise if a function cannot take the samples of a join."""
    names = [entry.name for entry in join.entries if entry.name is not None]
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a compiled function has no signature
        return
    try:
        if names:
            signature.bind(**dict.fromkeys(names))
        else:
            signature.bind(*join.entries)
    except TypeError as error:
        given = f"by the names {', '.join(names)}" if names else f"as {len(join.entries)} positional arguments"
        raise MetadataError(
            f"{where}: {join.joiner.name}{signature} cannot take the samples of the join, which come {given}: {error}."
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Opening joins.


_PARALLEL_SAMPLES = 50_000
_MAX_WORKERS = 16

_log = logging.getLogger(__name__)


def open_join(join: JoinRef, open_part: Callable[[LeafRef], PreparedDataset], *, trust: bool) -> JoinedDataset:
    """Open a join; its index is read, or built if there is none that fits.

    `open_part` opens one of its datasets. Raises the errors of `open_index` and `resolve_joiner`.
    """
    parts = join_parts(join, open_part)
    joiner = resolve_joiner(join, [part.dataset.sample_type for part in parts], trust=trust)
    index = open_index(parts, index_folders(join), num_workers=_num_workers(parts))
    counted = parts[0].dataset.num_samples
    if len(index.rows) < counted:
        _log.info("%s: joined %s of %s samples", join.where, f"{len(index.rows):,}", f"{counted:,}")
    return joined_dataset(
        parts,
        index.rows,
        split_part=join.split_part,
        joiner=joiner,
        joiner_name=f"{join.joiner.module}.{join.joiner.name}",
        shard_counts=index.shard_counts,
        checksum=index.checksum,
    )


def aux_of_join(join: JoinRef, dataset: JoinedDataset) -> dict[str, AuxRef]:
    """Return the stores that the entries of a join name, for the cooker of its samples.

    Raises:
        MetadataError: Two entries mean different stores by one name.
    """
    stores: dict[str, AuxRef] = {}
    for entry in join.entries:
        for name, ref in entry.leaf.aux.items():
            if stores.setdefault(name, ref) != ref:
                raise MetadataError(
                    f"{join.where}: two entries of the join have an auxiliary store {name!r}: {stores[name].path} and "
                    f"{ref.path}. One cooker gets them all, so use different names."
                )
    if stores and not dataset.is_crude:  # Energon accepts this
        _log.warning("%s: `aux` has no effect: no dataset of the join is crude, so nothing is cooked.", join.where)
        return {}
    return stores


def join_parts(join: JoinRef, open_part: Callable[[LeafRef], PreparedDataset]) -> tuple[JoinPart, ...]:
    """Open the datasets of a join."""
    parts = []
    for entry in join.entries:
        dataset = open_part(entry.leaf)
        if isinstance(dataset, ForeignDataset):
            raise MetadataError(
                f"{join.where}: {dataset.path} is a table, whose rows have no keys to join by. Convert it to "
                "shards: energon convert --help"
            )
        if entry.leaf.subflavors:
            dataset = dataclasses.replace(dataset, subflavors=dataset.subflavors | entry.leaf.subflavors)
        parts.append(JoinPart(dataset=dataset, name=entry.name, nonmatch=entry.nonmatch))
    return tuple(parts)


def index_folders(join: JoinRef) -> list[str]:
    """Return the folders for the index of a join: beside the file of the mix, or in the user's cache."""
    own = [f"{join.file}.cache"] if join.file and "://" not in join.file else []
    return [*own, os.path.join(user_cache(), "energon_bridge", "joins")]


def _num_workers(parts: Sequence[JoinPart]) -> int:
    """Return the number of processes to build an index; one if forking is unsafe or the work is small."""
    if threading.active_count() > 1 or parts[0].dataset.num_samples < _PARALLEL_SAMPLES:
        return 1
    return min(_MAX_WORKERS, available_cores())

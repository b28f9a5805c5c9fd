"""Cookers: functions that turn crude samples into typed ones, chosen by the labels of a dataset.

An encoder lists them in `cookers`. The first one whose `has_subflavors` are all among a dataset's subflavors cooks its
samples. It gets the auxiliary stores of the dataset as keyword arguments and, on request, `primary` (the dataset itself
as a store) and `cache` (the loader's pool).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Generic, TypeVar, cast, overload

from energon_bridge.core.errors import ConfigurationError, FatalSampleError
from energon_bridge.core.samples import CrudeSample, SourceInfo
from energon_bridge.core.stores import CachePool, FileStore, PrimaryFileStore

T_co = TypeVar("T_co", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])

PRIMARY = "primary"
CACHE = "cache"


@dataclass(frozen=True)
class Cooker(Generic[T_co]):
    """A function that cooks the samples of datasets with certain subflavors.

    Examples:
        >>> def cook(sample: dict) -> TextSample:
        ...     return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])
        >>> class Encoder(DefaultTaskEncoder):
        ...     cookers = (Cooker(cook, has_subflavors={"kind": "text"}),)

    Args:
        cook: Takes a crude sample (a dict) and stores by name, and returns a sample. It may raise `SkipSample`.
        has_subflavors: Labels that the dataset must have; None: all datasets.
    """

    cook: Callable[..., T_co]
    has_subflavors: Mapping[str, Any] | None = None

    def is_match(self, subflavors: Mapping[str, Any] | None) -> bool:
        """Whether it cooks the samples of a dataset with these subflavors."""
        wanted = self.has_subflavors or {}
        given = subflavors or {}
        return all(name in given and given[name] == value for name, value in wanted.items())

    @property
    def name(self) -> str:
        """The name of its function, for messages."""
        return getattr(self.cook, "__qualname__", type(self.cook).__qualname__)

    @property
    def need_primary(self) -> bool:
        """Whether it asked for the dataset as a store."""
        return bool(getattr(self.cook, "__need_primary__", False))

    @property
    def need_cache(self) -> bool:
        """Whether it asked for the loader's cache pool."""
        return bool(getattr(self.cook, "__need_cache__", False))


@overload
def cooker(fn: Function) -> Function: ...
@overload
def cooker(*, need_cache: bool = False, need_primary: bool = False) -> Callable[[Function], Function]: ...
def cooker(
    fn: Function | None = None, *, need_cache: bool = False, need_primary: bool = False
) -> Function | Callable[[Function], Function]:
    """Mark a function as a cooker that takes `cache` or `primary`; `@cooker` and `@cooker(…)` both work.

    Examples:
        >>> @cooker(need_cache=True)
        ... def cook(sample: dict, cache: CachePool) -> TextSample:
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """

    def mark(function: Function) -> Function:
        @functools.wraps(function)  # the function itself may also be used without the mark
        def marked(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        marked.__need_cache__ = need_cache  # type: ignore[attr-defined]
        marked.__need_primary__ = need_primary  # type: ignore[attr-defined]
        return cast(Function, marked)

    return mark if fn is None else mark(fn)


def basic_sample_keys(
    crude_sample: Mapping[str, Any], additional_source_info: Iterable[SourceInfo] = ()
) -> dict[str, Any]:
    """Return the meta fields of a crude sample, as keyword arguments for the typed sample.

    Examples:
        >>> crude = {"__key__": "a", "__restore_key__": (), "__subflavors__": None, "__sources__": (), "txt": "hello"}
        >>> TextSample(**basic_sample_keys(crude), text=crude["txt"]).__key__
        'a'
    """
    return {
        "__key__": crude_sample["__key__"],
        "__restore_key__": crude_sample.get("__restore_key__", ()),
        "__subflavors__": crude_sample.get("__subflavors__"),
        "__sources__": (*(crude_sample.get("__sources__") or ()), *additional_source_info),
    }


def matching_cooker(cookers: Sequence[Cooker[Any]], subflavors: Mapping[str, Any] | None) -> Cooker[Any] | None:
    """Return the first cooker for these subflavors; None if there is none."""
    return next((one for one in cookers if one.is_match(subflavors)), None)


def check_call(of: Cooker[Any], stores: Iterable[str]) -> None:
    """Raise ConfigurationError unless a cooker can be called with stores of these names."""
    names = [*stores, *[PRIMARY] * of.need_primary, *[CACHE] * of.need_cache]
    try:
        inspect.signature(of.cook).bind({}, **dict.fromkeys(names))
    except TypeError as error:
        raise ConfigurationError(
            f"the cooker {of.name} is called with a sample and {', '.join(names) or 'no stores'}, but {error}: add "
            "a parameter for each store of `aux`; @cooker(need_primary=…, need_cache=…) requests the other two"
        ) from error
    except ValueError:
        return  # a builtin without a signature


def cook_sample(sample: CrudeSample, of: Cooker[Any], stores: Mapping[str, FileStore], cache: CachePool) -> Any:
    """Cook one sample; `stores` has the auxiliary ones, and the dataset itself as `primary` if the cooker needs it."""
    given: dict[str, Any] = dict(stores)
    if of.need_primary:
        given[PRIMARY] = PrimaryFileStore(given[PRIMARY], sample["__key__"])
    if of.need_cache:
        given[CACHE] = cache
    cooked = of.cook(sample, **given)
    if cooked is None or isinstance(cooked, GeneratorType):
        raise FatalSampleError(
            f"the cooker {of.name} returned {type(cooked).__name__}, expected one sample: raise SkipSample to leave "
            "it out, or yield several from encode_sample"
        )
    return cooked

"""Small helpers of megatron-energon without a counterpart here: mixins, hook markers, fork hooks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Self

from energon_bridge.errors import ConfigurationError
from energon_bridge.samples import SourceInfo
from energon_bridge.samples.base import pin_value
from energon_bridge.stores.cache import Lazy

SYSTEM_EXCEPTIONS = (
    SystemError,
    SyntaxError,
    ImportError,
    StopIteration,
    StopAsyncIteration,
    MemoryError,
    RecursionError,
    ReferenceError,
    NameError,
)


class PinMemoryMixin:
    """Adds `pin_memory` to a dataclass, for custom batch types."""

    def pin_memory(self) -> Self:
        """Return a copy whose tensors, at any depth, are in pinned host memory."""
        values = {entry.name: pin_value(getattr(self, entry.name)) for entry in fields(self) if entry.init}  # type: ignore[arg-type]
        return type(self)(**values)


class ExtendableDataclassMixin:
    """Adds `extend` to a dataclass."""

    @classmethod
    def extend(cls, src: Any, **kwargs: Any) -> Self:
        """Make an object of this class from one of a base class: copies its fields, and sets new ones from `kwargs`."""
        if not issubclass(cls, type(src)):
            raise ConfigurationError(f"{cls.__name__}.extend: {type(src).__name__} is no base class of it")
        return cls(**{entry.name: getattr(src, entry.name) for entry in fields(src) if entry.init} | kwargs)


class MockLazy(Lazy):
    """A lazy that gets its value from a function, for testing encoders."""

    def __init__(self, fname: str, get_fn: Callable[[str], Any]) -> None:
        self.fname = fname
        self._get_fn = get_fn

    def read(self) -> tuple[Any, SourceInfo | None]:
        """Make the value."""
        return self._get_fn(self.fname), None


def get_source_info(sample: Any) -> list[SourceInfo] | None:
    """Return the sources of a sample's parts, None if it has none."""
    sources = sample.get("__sources__") if isinstance(sample, Mapping) else getattr(sample, "__sources__", None)
    return None if sources is None else list(sources)


def get_stateless(fn: Callable[..., Any]) -> bool:
    """Whether a hook is marked `@stateless`."""
    return bool(getattr(fn, "__stateless__", False))


def get_failure_tolerance(fn: Callable[..., Any], default_failure_tolerance: int | None = None) -> int | None:
    """Return the failure tolerance set on a hook."""
    tolerance: int | None = getattr(fn, "__failure_tolerance__", default_failure_tolerance)
    return tolerance


def get_cooker_need_cache(fn: Callable[..., Any]) -> bool:
    """Whether a cooker asks for the cache pool."""
    return bool(getattr(fn, "__need_cache__", False))


def get_cooker_need_primary(fn: Callable[..., Any]) -> bool:
    """Whether a cooker asks for its dataset as a store."""
    return bool(getattr(fn, "__need_primary__", False))


Hook = Callable[[], None]


def _held(hook: Hook, make_persistent: bool) -> Hook:
    """Return a function that calls a hook while something else references it (or always, if persistent)."""
    if make_persistent:
        return hook
    # Each lookup of a bound method makes a new object: the lifetime of its instance counts.
    bound = getattr(hook, "__self__", None) is not None
    reference = weakref.WeakMethod(hook) if bound else weakref.ref(hook)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def before_fork_hook(callable: Hook, make_persistent: bool = False) -> None:  # noqa: A002 - the name users pass it by
    """Call a function before each fork, as long as it is referenced."""
    os.register_at_fork(before=_held(callable, make_persistent))


def after_in_parent_fork_hook(callable: Hook, make_persistent: bool = False) -> None:  # noqa: A002
    """Call a function after each fork, in the process that forked."""
    os.register_at_fork(after_in_parent=_held(callable, make_persistent))


def after_in_child_fork_hook(callable: Hook, make_persistent: bool = False) -> None:  # noqa: A002
    """Call a function after each fork, in the new process."""
    os.register_at_fork(after_in_child=_held(callable, make_persistent))


class ForkMixin:
    """Calls those of `__before_fork__`, `__after_in_parent_fork__` and `__after_in_child_fork__` that an object has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register_fork_hooks(self)


class DataclassForkMixin:
    """The same for dataclasses."""

    def __post_init__(self) -> None:
        """Register the methods."""
        register_fork_hooks(self)


def register_fork_hooks(target: Any) -> None:
    """Register the fork methods that an object has."""
    for name, register in (
        ("__before_fork__", before_fork_hook),
        ("__after_in_parent_fork__", after_in_parent_fork_hook),
        ("__after_in_child_fork__", after_in_child_fork_hook),
    ):
        if hasattr(target, name):
            register(getattr(target, name))

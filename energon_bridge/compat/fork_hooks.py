"""Functions and methods that are called around each fork, as long as something else references them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

ForkHook = Callable[[], None]


def _held(hook: ForkHook, make_persistent: bool) -> ForkHook:
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


def before_fork_hook(callable: ForkHook, make_persistent: bool = False) -> None:  # noqa: A002 - the name users pass it by
    """Call a function before each fork, as long as it is referenced."""
    os.register_at_fork(before=_held(callable, make_persistent))


def after_in_parent_fork_hook(callable: ForkHook, make_persistent: bool = False) -> None:  # noqa: A002
    """Call a function after each fork, in the process that forked."""
    os.register_at_fork(after_in_parent=_held(callable, make_persistent))


def after_in_child_fork_hook(callable: ForkHook, make_persistent: bool = False) -> None:  # noqa: A002
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

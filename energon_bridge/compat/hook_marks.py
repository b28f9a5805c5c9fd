"""Marks of hooks and cookers: `@stateless`, and what a program asks of one."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch

from energon_bridge.compat.loading import WorkerConfig
from energon_bridge.core import encoder as task_encoder
from energon_bridge.core.encoder import hooks

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def stateless(
    fn: _Hook | None = None, *, restore_seeds: bool = False, failure_tolerance: int | None = None
) -> _Hook | Callable[[_Hook], _Hook]:
    """Mark a hook as `energon_bridge.stateless` does; with `restore_seeds` it is also seeded outside of loaders.

    There the seed is megatron-energon's, of `WorkerConfig.active_worker_config`, if the program has set one.
    """

    def mark(function: _Hook) -> _Hook:
        marked = task_encoder.stateless(failure_tolerance=failure_tolerance)(function)
        return _seeded_outside(marked) if restore_seeds else marked

    return mark if fn is None else mark(fn)


def _seeded_outside(hook: _Hook) -> _Hook:
    @functools.wraps(hook)
    def seeded(encoder: Any, *args: Any, **kwargs: Any) -> Any:
        active = WorkerConfig.active_worker_config
        if hooks.CONFIG.get() is not None or active is None:
            return hook(encoder, *args, **kwargs)  # loaders seed by themselves
        with _Generators(f"{active.worker_seed()}|{active.active_worker_sample_index}") as own:
            made = hook(encoder, *args, **kwargs)
        return own.through(made) if isinstance(made, Generator) else made

    return cast(_Hook, seeded)


class _Generators:
    """The global generators with a seed of their own: a context manager that may be entered again and goes on."""

    def __init__(self, seed: str) -> None:
        self._seed = int.from_bytes(hashlib.sha1(seed.encode()).digest()[:4])
        self._inner: tuple[Any, ...] | None = None

    def __enter__(self) -> Self:
        self._outer = torch.get_rng_state(), np.random.get_state(), random.getstate()
        if self._inner is None:
            torch.manual_seed(self._seed)
            np.random.seed(self._seed)
            random.seed(self._seed)
        else:
            _restore(self._inner)
        return self

    def __exit__(self, *_: object) -> None:
        self._inner = torch.get_rng_state(), np.random.get_state(), random.getstate()
        _restore(self._outer)

    def through(self, values: Iterator[Any]) -> Iterator[Any]:
        """Yield values that are made with these generators."""
        end = object()
        while True:
            with self:
                value = next(values, end)
            if value is end:
                return
            yield value


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


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

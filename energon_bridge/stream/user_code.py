"""Where user code runs: the hooks of a task encoder, under keyed randomness and an error policy.

Around a hook that is not the package's own, the global generators of `random`, numpy and torch are seeded from a key
of the draw (or of the microbatch), so that encoding a sample again gives the same result in any process. Where no user
hook runs nothing is seeded. In the training process the generators are put back after each microbatch.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from energon_bridge.errors import FatalSampleError, SkipSample
from energon_bridge.rng import fold

logger = logging.getLogger(__name__)

_ALWAYS_FATAL = (
    FatalSampleError,
    SystemError,
    SyntaxError,
    ImportError,
    StopIteration,
    MemoryError,
    RecursionError,
    ReferenceError,
    NameError,
)
_ENCODE, _BATCH = 1, 2


class UserCode:
    """The hooks of an encoder, as one lane calls them.

    Args:
        encoder: The task encoder.
        key: Key of the run; the key of a microbatch derives from it.

    Attributes:
        encodes: Whether `encode_sample` is code of the user's.
    """

    def __init__(self, encoder: Any, key: int) -> None:
        self.encoder = encoder
        self._key = key
        self.encodes = not is_default(encoder.encode_sample)
        self._batches = not (is_default(encoder.batch) and is_default(encoder.encode_batch))
        self.tolerance: int = getattr(encoder, "__default_failure_tolerance__", 100) or 0
        self._failures = {"sample": 0, "microbatch": 0}

    @property
    def present(self) -> bool:
        """Whether any hook is not the package's own."""
        return self.encodes or self._batches

    def encode(self, sample: Any, leaf_key: int, index: int, epoch: int) -> list[Any]:
        """Return the encoded samples of one draw (several, where the hook is a generator)."""
        if not self.encodes:
            return [sample]
        seed_everything(fold(leaf_key, _ENCODE, index, epoch))
        encoded = self.encoder.encode_sample(sample)
        return list(encoded) if isinstance(encoded, GeneratorType) else [encoded]

    def collate(self, samples: list[Any], lane: int, number: int) -> Any:
        """Return the batch of some encoded samples: microbatch `number` of a lane."""
        if self._batches:
            seed_everything(fold(self._key, _BATCH, lane, number))
        return self.encoder.encode_batch(self.encoder.batch(samples))

    def failed(self, error: Exception, where: str, what: str = "sample") -> str:
        """Apply the error policy to a failed `sample` or `microbatch` and return the counter it belongs to.

        Raises:
            FatalSampleError: The error is of a kind that stops the run, or too many failed in a row.
        """
        if isinstance(error, SkipSample):
            return "skipped"
        self._failures[what] += 1
        if isinstance(error, _ALWAYS_FATAL):
            raise FatalSampleError(f"{where}: {type(error).__name__}: {error}") from error
        failures = self._failures[what]
        if self.tolerance and failures >= self.tolerance:
            raise FatalSampleError(
                f"{failures} {what}s failed in a row, the last one {where}: {type(error).__name__}: {error}. Mend the "
                "data or the encoder, or raise the encoder's __default_failure_tolerance__"
            ) from error
        logger.warning("skipped a %s that failed: %s: %s: %s", what, where, type(error).__name__, error)
        return "errors"

    def succeeded(self, what: str = "sample") -> None:
        """Note that a draw gave a sample, or samples a microbatch."""
        self._failures[what] = 0


def is_default(hook: Any) -> bool:
    """Whether a hook is the package's own, also through encoders that forward their hooks to another one."""
    return bool(getattr(hook, "__default_hook__", False))


def seed_everything(key: int) -> None:
    """Seed the global generators of `random`, numpy and torch (CPU) from a key."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Leave the global generators as they were found."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])

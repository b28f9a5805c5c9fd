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
_ONE_OF = {"samples": "a sample", "microbatches": "a microbatch"}


class UserCode:
    """The hooks of an encoder, as one lane calls them.

    Args:
        encoder: The task encoder.

    Attributes:
        encodes: Whether `encode_sample` is code of the user's.
    """

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder
        self.encodes = not is_default(encoder.encode_sample)
        self._batches = not (is_default(encoder.batch) and is_default(encoder.encode_batch))
        self.tolerance: int = getattr(encoder, "__default_failure_tolerance__", 100) or 0
        self._failures = dict.fromkeys(_ONE_OF, 0)

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

    def collate(self, samples: list[Any], leaf_key: int, index: int, epoch: int, output: int) -> Any:
        """Return the batch of some encoded samples; the numbers are those of the first one, which key its randomness.

        (Not the number of the microbatch: a hook that refuses one by chance must not refuse the next by the same.)
        """
        if self._batches:
            seed_everything(fold(leaf_key, _BATCH, index, epoch, output))
        batch = self.encoder.encode_batch(self.encoder.batch(samples))
        if isinstance(batch, GeneratorType):
            raise FatalSampleError(
                f"batch and encode_batch of {type(self.encoder).__name__} must return one batch; a generator function "
                "is understood for encode_sample only"
            )
        return batch

    def failed(self, error: Exception, where: str, what: str = "samples") -> str:
        """Apply the error policy to one of the `samples` or `microbatches` and return the counter it belongs to.

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
                f"{failures} {what} failed in a row, the last one {where}: {type(error).__name__}: {error}. Mend the "
                "data or the encoder, or raise the encoder's __default_failure_tolerance__"
            ) from error
        logger.warning("skipped %s that failed: %s: %s: %s", _ONE_OF[what], where, type(error).__name__, error)
        return "errors"

    def succeeded(self, what: str = "samples") -> None:
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

"""Exceptions that user code raises for a bad sample, and those that are never passed to a handler of failed samples."""

from __future__ import annotations

from typing import Any

from energon_bridge.core import errors
from energon_bridge.core.samples.sample import meta_field

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


class SampleException(errors.SampleError, ValueError):  # noqa: N818 - the name that energon users know
    """Raised by user code for a bad sample."""

    @classmethod
    def from_sample_key(cls, sample_key: str) -> SampleException:
        """Return the exception for the sample with a key."""
        return cls(f"Sample {sample_key} failed")

    @classmethod
    def from_sample(cls, sample: Any, message: str = "") -> SampleException:
        """Return the exception for a sample, with a message."""
        return cls(f"Sample {meta_field(sample, '__key__')} failed{f': {message}' if message else ''}")


class FatalSampleError(errors.FatalSampleError, SampleException):
    """More samples failed in a row than a hook tolerates, or the program has a mistake."""

"""What becomes of a sample that fails: it is left out, or the run stops.

Whether a sample is left out depends on the sample alone: every failure that the policy lets pass costs the stream that
sample and nothing else. Limits (in a row, or as a rate) only decide whether the run goes on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from energon_bridge.errors import (
    ConfigurationError,
    FatalSampleError,
    HookTimeoutError,
    OverLongSampleError,
    SkipSample,
)
from energon_bridge.storage import READ_TIMEOUT_SECONDS
from energon_bridge.stream.report import MAX_MEMBERS, Place, Report, named, text_of, trace_of

Handler = Callable[[Exception], bool]
"""Decides on a failed sample in the convention of webdataset: True leaves it out, False (or raising) stops the run."""

ALWAYS_FATAL = (
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
"""Errors that are no fault of the data: they stop the run under any policy."""

_WHAT = {
    "select_samples_to_pack": ("a selection", "selections"),
    "pack_selected_samples": ("a pack", "packs"),
    "batch": ("a microbatch", "microbatches"),
    "encode_batch": ("a microbatch", "microbatches"),
}
_A_SAMPLE = ("a sample", "samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPolicy:
    """What becomes of samples that cannot be read, decoded or encoded.

    Args:
        on_error: "skip" leaves the sample out, names it once in the log and counts it; "raise" stops at the first one;
            a function is given the exception and returns True to leave the sample out, False to stop (the convention
            of webdataset's handlers, such as `webdataset.warn_and_continue`).
        max_error_rate: Share of failed samples of a dataset above which the run stops; None: no limit. It is judged by
            the counters of this rank, which are part of the state, from `min_draws` samples of the dataset on.
        min_draws: Samples of a dataset before its rate is judged.
        tolerance: Failures of one hook in a row at which the run stops, in one process; 0: no limit; None: what
            `@stateless(failure_tolerance=…)` on the hook says, else the encoder's `__default_failure_tolerance__`.
        damaged_shards: A shard that is cut off, missing or without its index: "raise" stops the run by name, since
            files come back; "skip" treats each sample that cannot be read like any sample that fails.
        quarantine: File to which each failed sample is added once, as a line of JSON; `read_quarantine` reads it. With
            several ranks each writes its own, `NAME.rank3.EXTENSION`.
        read_timeout_seconds: Time after which a read of the data is tried again beside the first, three times in all;
            after the last one the run stops and names the file. None: reads are waited for.
        messages: Failures that are logged one by one, for each dataset, hook and exception type; of further ones
            only the number is, at every power of ten.

    Raises:
        ConfigurationError: A value is wrong.
    """

    on_error: Literal["skip", "raise"] | Handler = "skip"
    max_error_rate: float | None = None
    min_draws: int = 1000
    tolerance: int | None = None
    damaged_shards: Literal["raise", "skip"] = "raise"
    quarantine: str | os.PathLike[str] | None = None
    messages: int = 10
    read_timeout_seconds: float | None = READ_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if not (callable(self.on_error) or self.on_error in ("skip", "raise")):
            raise ConfigurationError(
                f"ErrorPolicy: on_error must be 'skip', 'raise' or a function of an exception, got {self.on_error!r}"
            )
        if self.damaged_shards not in ("raise", "skip"):
            raise ConfigurationError(
                f"ErrorPolicy: damaged_shards must be 'raise' or 'skip', got {self.damaged_shards!r}"
            )
        rate = self.max_error_rate
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigurationError(f"ErrorPolicy: max_error_rate must be between 0 and 1, got {rate!r}")
        seconds = self.read_timeout_seconds
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds <= 0):
            raise ConfigurationError(f"ErrorPolicy: read_timeout_seconds must be above 0, or None, got {seconds!r}")
        for name, least in (("min_draws", 1), ("tolerance", 0), ("messages", 0)):
            value = getattr(self, name)
            if value is None and name == "tolerance":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"ErrorPolicy: {name} must be an integer of at least {least}, got {value!r}")


class Judge:
    """Applies the policy to what fails in one process.

    Attributes:
        in_a_row: Failures in a row of each hook that failed when it last ran.
        pending: Reports that no microbatch has taken along yet.
    """

    def __init__(self, policy: ErrorPolicy, encoder: Any) -> None:
        self._policy = policy
        self._encoder = encoder
        self._kinds: Counter[tuple[str, str, type]] = Counter()
        self.in_a_row: dict[str, int] = {}
        self.pending: list[Report] = []

    def failed(self, error: Exception, hook: str, places: Sequence[Place], members: int = 1) -> str:
        """Decide on samples that failed; return the counter they belong to.

        Raises:
            FatalSampleError: The run stops: by the kind of the error, by the policy, or for too many in a row.
        """
        if isinstance(error, SkipSample):
            return "skipped"
        if isinstance(error, HookTimeoutError):
            raise error
        kind = type(error).__name__
        where = f"{named(places, members)}: {kind}: {text_of(error)}"
        if isinstance(error, ALWAYS_FATAL):
            fatal = OverLongSampleError if isinstance(error, OverLongSampleError) else FatalSampleError
            raise fatal(f"{hook}: {where}") from error
        self._ask(error, hook, where)
        failures = self.in_a_row[hook] = self.in_a_row.get(hook, 0) + 1
        what, several = _WHAT.get(hook, _A_SAMPLE)
        tolerance = self._tolerance(hook)
        if tolerance and failures >= tolerance:
            raise FatalSampleError(
                f"{hook}: {failures} {several} failed in a row, the last one {where}. Mend the data or the hook, or "
                "allow more: __default_failure_tolerance__ of the encoder, @stateless(failure_tolerance=…) on the "
                "hook, or ErrorPolicy(tolerance=…)"
            ) from error
        first = places[0].dataset, hook, type(error)
        self._kinds[first] += 1
        trace = trace_of(error) if self._kinds[first] == 1 else ""
        self.pending.append(
            Report(
                hook=hook,
                what=what,
                places=tuple(places[:MAX_MEMBERS]),
                members=members,
                error=kind,
                message=text_of(error),
                trace=trace,
            )
        )
        return "errors"

    def succeeded(self, hooks: Sequence[str]) -> None:
        """Note that some hooks have worked."""
        for hook in hooks:
            self.in_a_row.pop(hook, None)

    def taken(self) -> tuple[Report, ...]:
        """Return the pending reports, which are then no longer pending."""
        reports, self.pending = tuple(self.pending), []
        return reports

    def _ask(self, error: Exception, hook: str, where: str) -> None:
        """Raise where the policy says that the run stops at this error."""
        on_error = self._policy.on_error
        if on_error == "skip":
            return
        if callable(on_error):
            try:
                if on_error(error):
                    return
            except Exception as raised:
                raise FatalSampleError(f"{hook}: the handler stopped the run: {where}") from raised
        raise FatalSampleError(f"{hook}: {where}") from error

    def _tolerance(self, hook: str) -> int:
        if self._policy.tolerance is not None:
            return self._policy.tolerance
        own = getattr(getattr(self._encoder, hook, None), "__failure_tolerance__", None)
        if own is None:
            own = getattr(self._encoder, "__default_failure_tolerance__", 100)
        return int(own or 0)

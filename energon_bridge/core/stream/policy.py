"""Decides about a sample that fails: leave it out, or stop the run.

Whether a sample is left out depends on that sample alone: each failure that the policy tolerates costs the stream that
sample and nothing else. Limits (failures in a row, or a rate) only decide whether the run continues.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import Any, Literal

from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.errors import (
    ConfigurationError,
    FatalSampleError,
    HookTimeoutError,
    OverLongSampleError,
    SampleError,
    SkipSample,
    StoppedByPolicyError,
    check_choice,
    check_number,
)
from energon_bridge.core.samples import Batch, Sample
from energon_bridge.core.samples.sample_place import SamplePlace
from energon_bridge.core.storage import READ_TIMEOUT_SECONDS
from energon_bridge.core.stream.failures import MAX_MEMBERS, Report, code_place, named, text_of, trace_of

Handler = Callable[[Exception], bool]
"""A handler in the convention of webdataset: True leaves the sample out; False or an exception stops the run."""

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
"""Errors that the data cannot cause: they stop the run under any policy."""

DEFAULT_TOLERANCE = 100
"""Failures of a hook in a row that stop the run by default."""
_ALIKE_AT_FIRST = 5
_ALIKE_IN_DATASET = 20
_MOST_TOGETHER = 8
"""With this many datasets in a microbatch, nobody can tell which two of them do not go together."""
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPolicy:
    """What becomes of samples that cannot be read, decoded or encoded.

    Examples:
        >>> policy = ErrorPolicy(max_error_rate=0.01, quarantine="bad-samples.jsonl")
        >>> dataset = get_train_dataset("data/captions", batch_size=4, error_policy=policy)

    Args:
        on_error: "skip" leaves the sample out, logs it once and counts it; "raise" stops at the first failure; a
            function gets the exception and returns True to leave the sample out or False to stop (the convention of
            webdataset's handlers, such as `webdataset.warn_and_continue`).
        max_error_rate: Share of failed samples of a dataset above which the run stops; None: no limit. It is checked
            against the counters of this rank, which are part of the state, after `min_draws` samples of the dataset.
        min_draws: Samples of a dataset before its rate is checked: a run that draws fewer is not stopped.
        tolerance: Failures of one hook in a row at which the run stops, in one process; 0: no limit; None: what
            `@stateless(failure_tolerance=…)` on the hook says, else the encoder's `__default_failure_tolerance__`, else
            100, but 5 where a hook has only ever failed, always alike, and nothing has been delivered, and 20 where
            nothing of a dataset of a mix has.
        damaged_shards: A shard that is cut off, missing or without its index: "raise" stops the run with an error that
            names it, since files can be restored; "skip" treats each unreadable sample like any sample that fails.
        quarantine: File, from the working directory, to which each failed sample is added once, as a line of JSON;
            `read_quarantine` reads it. With several ranks, each writes its own: `NAME.rank3.EXTENSION`. If it cannot
            be written, a warning says so once, and the run goes on.
        read_timeout_seconds: Time after which a second read of the same bytes is started beside the first, up to three
            in all; after the last one the run stops and names the file. None: wait without limit.
        messages: Failures logged one by one, per dataset, hook and exception type; after that, only their number is
            logged, at every power of ten.

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
        check_choice("ErrorPolicy: damaged_shards", self.damaged_shards, ("raise", "skip"))
        rate = self.max_error_rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1):
            raise ConfigurationError(f"ErrorPolicy: max_error_rate must be a number between 0 and 1, got {rate!r}")
        seconds = self.read_timeout_seconds
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds <= 0):
            raise ConfigurationError(f"ErrorPolicy: read_timeout_seconds must be above 0, or None, got {seconds!r}")
        for name, least in (("min_draws", 1), ("tolerance", 0), ("messages", 0)):
            number = check_number(f"ErrorPolicy: {name}", getattr(self, name), least, optional=name == "tolerance")
            object.__setattr__(self, name, number)


def is_of_the_program(error: Exception, encoder: Any) -> bool:
    """Whether an error can only be a mistake in the program or its configuration."""
    if isinstance(error, ConfigurationError):
        return not isinstance(error, SampleError)
    if isinstance(error, AttributeError):
        owner = error.obj
        if _slotted_record(error):
            return True  # all objects of the type have the same attributes
        inner = getattr(encoder, "__dict__", {}).get("task_encoder")  # of an AugmentTaskEncoder
        return isinstance(owner, ModuleType) or (owner is not None and (owner is encoder or owner is inner))
    return isinstance(error, ALWAYS_FATAL)


def _slotted_record(error: AttributeError) -> type | None:
    """Return the type of samples or batches that does not have an attribute; None if it is something else."""
    if error.obj is not None:
        kinds = [type(error.obj)] if isinstance(error.obj, (Sample, Batch)) else []
    else:  # Python 3.11 does not say whose attribute cannot be set
        kinds = [Sample, Batch]
        for kind in kinds:
            kinds += kind.__subclasses__()
        kinds = [kind for kind in kinds if str(error).startswith(f"{kind.__name__!r} object has no attribute ")]
    return next((kind for kind in kinds if not kind.__dictoffset__), None)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."


class FailureTracker:
    """Applies the policy to what fails in one process.

    The policy is for bad data. A mistake in the program or its configuration stops the run under any policy:

    - at once, if the error can be nothing else: `ALWAYS_FATAL`, a ConfigurationError, an attribute that the
      encoder, a module or the sample type does not have, a hook that returns None;
    - after five failures, if a hook has failed in the same way every time it ran and the run has delivered nothing
      yet;
    - after twenty, if nothing of one dataset of a mix has been delivered and a hook fails in the same way on each
      of its samples while samples of other datasets pass; or if a hook fails in the same way on every microbatch
      that has samples of two particular datasets.

    *In the same way* means the same exception type, raised at the same line through the same calls, with the same
    text except for numbers. A tolerance set by the user replaces the last two rules.

    Args:
        encoder: Says how many failures in a row its hooks may have.
        hooks: Hooks that must be wrong if they fail every time they run.
        delivered: Leaves of which the run had delivered samples before this process began.

    Attributes:
        delivered: Leaves of which samples have been delivered.
        alert: Whether `succeeded` must be told of hooks that have worked.
        pending: Reports that no microbatch has carried yet.
    """

    def __init__(
        self, policy: ErrorPolicy, encoder: Any, hooks: Iterable[Hook] = (), delivered: Collection[int] = ()
    ) -> None:
        self._policy = policy
        self._encoder = encoder
        self._kinds: Counter[tuple[str, Hook, type]] = Counter()
        self.delivered = set(delivered)
        # Hooks that have never worked, with what all their failures have in common.
        self._unproven: dict[Hook, Any] = {} if delivered else dict.fromkeys(hooks)
        self._in_a_row: dict[Hook, int] = {}
        # By hook and leaves, one of which nothing has been delivered, or two that fail together: what the last failures
        # have in common, and how many they are.
        self._suspects: dict[tuple[Hook, frozenset[int]], tuple[Any, int]] = {}
        self.alert = bool(self._unproven)
        self.pending: list[Report] = []

    def failed(
        self,
        error: Exception,
        hook: Hook,
        places: Sequence[SamplePlace],
        members: int = 1,
        leaves: Mapping[int, str] | None = None,
    ) -> str:
        """Decide on samples that failed; return the counter they belong to.

        Args:
            places: Some of the samples.
            members: How many there are.
            leaves: The leaves that they are of, with the paths of their datasets.

        Raises:
            FatalSampleError: The run stops: by the kind of the error, by the policy, or for too many in a row.
        """
        if isinstance(error, SkipSample):
            return "skipped"
        if isinstance(error, HookTimeoutError):
            raise error
        name = hook.title
        kind = type(error).__name__
        names = named(places, members)
        where = f"{names}: {kind}: {text_of(error)}"
        at = code_place(error)
        if is_of_the_program(error, self._encoder):
            fatal = OverLongSampleError if isinstance(error, OverLongSampleError) else FatalSampleError
            because = (
                "" if isinstance(error, FatalSampleError) else ". It is no fault of the data: no policy lets it pass"
            )
            if isinstance(error, AttributeError) and (record := _slotted_record(error)):
                because += f". For one more field, derive a type from {record.__name__} with @edataclass"
            raise fatal(f"{name}: {where}{at}{because}") from error
        self._ask(error, hook, where)
        self.alert = True
        failures = self._in_a_row[hook] = self._in_a_row.get(hook, 0) + 1
        what, several = hook.loses
        tolerance, is_chosen = self._tolerance(hook)
        if tolerance and failures >= tolerance:
            raise FatalSampleError(
                f"{name}: {failures} {several} failed in a row, the last one {_ended(where + at)} Fix the data or the "
                "hook, or allow more with __default_failure_tolerance__ of the encoder, "
                "@stateless(failure_tolerance=…) on the hook, or tolerance=… in error_policy"
            ) from error
        if not is_chosen and (always := self._fails_always(error, hook, leaves or {}, several)):
            raise FatalSampleError(
                f"{name}: {always}. All failed with the same error, so it is probably a mistake in the program or its "
                f"configuration: {_ended(f'{kind}: {text_of(error)}{at}')} The last one: {names}. If the data is to "
                "blame, raise SkipSample for bad samples, or allow failures with tolerance=100 in error_policy"
            ) from error
        first = places[0].dataset, hook, type(error)
        self._kinds[first] += 1
        trace = trace_of(error) if self._kinds[first] == 1 else ""
        self.pending.append(
            Report(
                hook=name,
                what=what,
                places=tuple(places[:MAX_MEMBERS]),
                members=members,
                error=kind,
                message=text_of(error),
                trace=trace,
            )
        )
        return "errors"

    def succeeded(self, hooks: Collection[Hook], leaves: Iterable[int]) -> None:
        """Record that some hooks worked on samples of some leaves."""
        for hook in hooks:
            self._in_a_row.pop(hook, None)
            self._unproven.pop(hook, None)
        if self._suspects:
            worked = frozenset(leaves)
            cleared = [key for key in self._suspects if key[0] in hooks and key[1] <= worked]
            for key in cleared:
                del self._suspects[key]
        self.alert = bool(self._in_a_row or self._unproven or self._suspects)

    def taken(self) -> tuple[Report, ...]:
        """Return the pending reports and clear them."""
        reports = tuple(self.pending)
        self.pending = []
        return reports

    def _fails_always(self, error: Exception, hook: Hook, leaves: Mapping[int, str], several: str) -> str:
        """Return a sentence about a hook that never worked and always failed in the same way; "" if there is none."""
        unproven = hook in self._unproven
        suspects = [frozenset((leaf,)) for leaf in leaves if leaf not in self.delivered]
        if 1 < len(leaves) <= _MOST_TOGETHER:
            suspects += map(frozenset, combinations(leaves, 2))
        if not (unproven or suspects) or hook.about_bytes:
            return ""
        alike = type(error), trace_of(error), _NUMBER.sub("#", text_of(error))
        if unproven and not self.delivered:
            before = self._unproven[hook]
            if before is None or before[0] == alike:
                count = 1 if before is None else before[1] + 1
                self._unproven[hook] = alike, count
                if count >= _ALIKE_AT_FIRST:
                    return f"the first {count} {several} of this process failed, and nothing has been delivered"
            else:
                del self._unproven[hook]
        for group in suspects:
            seen, count = self._suspects.get((hook, group), (alike, 0))
            count = count + 1 if seen == alike else 1
            self._suspects[hook, group] = alike, count
            if count < _ALIKE_IN_DATASET or not self.delivered:
                continue
            path = " and ".join(leaves[leaf] for leaf in group)
            if len(group) == 2:
                return f"the last {count} {several} with samples of both {path} failed"
            of = "" if several == "samples" else " with samples"
            return f"{count} {several}{of} of {path} failed, and nothing of this dataset has been delivered"
        return ""

    def _ask(self, error: Exception, hook: Hook, where: str) -> None:
        """Raise if the policy stops the run at this error."""
        on_error = self._policy.on_error
        if on_error == "skip":
            return
        if callable(on_error):
            try:
                if on_error(error):
                    return
            except Exception as raised:
                raise StoppedByPolicyError(f"{hook.title}: the handler stopped the run: {where}") from raised
        raise StoppedByPolicyError(f"{hook.title}: {where}") from error

    def _tolerance(self, hook: Hook) -> tuple[int, bool]:
        """Return the failures of a hook in a row that stop the run, and whether the user chose that number."""
        if self._policy.tolerance is not None:
            return self._policy.tolerance, True
        own = getattr(getattr(self._encoder, hook.title, None), "__failure_tolerance__", None)
        if own is not None:
            return int(own), True
        of_encoder = getattr(self._encoder, "__default_failure_tolerance__", DEFAULT_TOLERANCE)
        return int(of_encoder or 0), of_encoder != DEFAULT_TOLERANCE

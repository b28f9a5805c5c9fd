"""What datasets have lost: too much for the run to go on (the error budget), or enough for people to hear of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from energon_bridge.errors import ErrorRateError
from energon_bridge.stream.failure_log import FailureLog
from energon_bridge.stream.leaf import Leaf
from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.stream.state import COLUMNS, COUNTERS, Counts

logger = logging.getLogger(__name__)

_SAMPLES, _SKIPPED, _ERRORS, _EXCLUDED, _BANNED, _DROPPED = map(
    COUNTERS.index, ("samples", "skipped", "errors", "excluded", "banned", "dropped")
)
_LOST_SHARE, _LOST_LEAST = 0.05, 5
"""Share of a dataset's samples that is named when it is lost, and the fewest samples that are."""
AT_END, AT_EPOCH, AT_ANY_TIME = 1, 5, 100
"""Samples drawn of a dataset below which nothing is said of it: at the end of a run, of an epoch, and in between."""


def check_rates(
    policy: ErrorPolicy, leaves: Sequence[Leaf], counts: Sequence[Sequence[int]], more: Counts, failure_log: FailureLog
) -> None:
    """Judge the datasets that a microbatch has failures of, by the counters of this rank.

    The rate of a dataset is its failed samples among those that failed, were skipped or were delivered; leaves of one
    path are one dataset.

    Args:
        policy: Says which rate is too much.
        leaves: The leaves of the stream.
        counts: `COLUMNS` of each leaf, up to the microbatch.
        more: What the microbatch adds.
        failure_log: Knows what the failures were.

    Raises:
        ErrorRateError: Too many samples of a dataset failed.
    """
    if policy.max_error_rate is None:
        return
    concerned = {leaves[leaf].dataset.path for leaf, added in more.items() if added[_ERRORS]}
    nothing = [0] * len(COLUMNS)
    totals = [[a + b for a, b in zip(row, more.get(number, nothing), strict=True)] for number, row in enumerate(counts)]
    for path, total in _by_dataset(leaves, totals):
        failed, drawn = total[_ERRORS], total[_ERRORS] + total[_SAMPLES] + total[_SKIPPED]
        if path in concerned and drawn >= policy.min_draws and failed > policy.max_error_rate * drawn:
            known = failure_log.failures(path)
            raise ErrorRateError(
                f"{path}: {failed} of {drawn} samples failed ({100 * failed / drawn:.2f} %), and max_error_rate allows "
                f"{100 * policy.max_error_rate:g} % (different samples: {known or 'none since the run was resumed'}). "
                "Fix or exclude them, or allow more with ErrorPolicy(max_error_rate=…)"
            )


def name_losses(
    leaves: Sequence[Leaf], counts: Sequence[Sequence[int]], failure_log: FailureLog, *, least: int
) -> None:
    """Warn of datasets that delivered nothing, or lost more than a twentieth of what was drawn; once for each cause.

    Args:
        leaves: The leaves of the stream.
        counts: `COLUMNS` of each leaf on this rank.
        failure_log: Knows what the failures were, and what has been said.
        least: Samples drawn of a dataset below which nothing is said of it yet.
    """
    for path, total in _by_dataset(leaves, counts):
        columns = _SAMPLES, _ERRORS, _SKIPPED, _EXCLUDED, _BANNED
        delivered, failed, skipped, excluded, banned = (total[n] for n in columns)
        drawn = delivered + failed + skipped + excluded + banned
        if drawn < least:
            continue
        found = failure_log.failures(path)
        reasons = {
            "errors": f"{failed} failed (different samples: {found or 'none since the run was resumed'})"
            if failed
            else "",
            "skipped": f"{skipped} were skipped by hooks" if skipped else "",
            "excluded": f"{excluded} are listed in `exclude`" if excluded else "",
            "banned": f"{banned} are banned" if banned else "",
        }
        if skipped and total[_DROPPED]:
            reasons["skipped"] += f" ({total[_DROPPED]} of them as too long for a pack)"
        if not delivered:
            causes, what = list(reasons), "nothing of this dataset has been delivered"
        else:
            lost = {"errors": failed, "skipped": skipped}
            causes = [name for name, n in lost.items() if n >= _LOST_LEAST and n > _LOST_SHARE * drawn]
            share = 100 * sum(lost[name] for name in causes) / drawn
            what = f"{share:.0f} % of the samples of this dataset are left out"
        new = [cause for cause in causes if reasons[cause] and failure_log.is_new(path, cause)]
        if new:
            said = "; ".join(reasons[cause] for cause in causes if reasons[cause])
            todo = " ".join(_REMEDIES[cause] for cause in causes if reasons[cause])
            logger.warning("%s: %s: of %d drawn on this rank %s. %s", path, what, drawn, said, todo)


_REMEDIES = {
    "errors": "ErrorPolicy(quarantine=FILE) lists what fails; max_error_rate=… stops a run that loses more.",
    "skipped": "If you want them, look at what raises SkipSample.",
    "excluded": "If you want them, take them out of split.yaml.",
    "banned": "`energon checkpoint show` lists the bans of a state.",
}


def _by_dataset(leaves: Sequence[Leaf], counts: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yield the path of each dataset with the sums of its leaves' counters."""
    totals: dict[str, list[int]] = {}
    for leaf, row in zip(leaves, counts, strict=True):
        total = totals.setdefault(leaf.dataset.path, [0] * len(COLUMNS))
        total[:] = [a + b for a, b in zip(total, row, strict=True)]
    yield from totals.items()

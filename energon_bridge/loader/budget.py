"""The error budget: whether a dataset has failed too often for the run to go on."""

from __future__ import annotations

from collections.abc import Sequence

from energon_bridge.errors import ErrorRateError
from energon_bridge.stream.journal import Journal
from energon_bridge.stream.leaf import Leaf
from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.stream.state import COLUMNS, COUNTERS, Counts

_SAMPLES, _SKIPPED, _ERRORS = map(COUNTERS.index, ("samples", "skipped", "errors"))


def check_rates(
    policy: ErrorPolicy, leaves: Sequence[Leaf], counts: Sequence[Sequence[int]], more: Counts, journal: Journal
) -> None:
    """Judge the datasets that a microbatch has failures of, by the counters of this rank.

    The rate of a dataset is its failed samples among those that failed, were skipped or were delivered; leaves of one
    path are one dataset.

    Args:
        policy: Says which rate is too much.
        leaves: The leaves of the stream.
        counts: `COLUMNS` of each leaf, up to the microbatch.
        more: What the microbatch adds.
        journal: Knows what the failures were.

    Raises:
        ErrorRateError: Too many samples of a dataset failed.
    """
    if policy.max_error_rate is None:
        return
    for path in {leaves[leaf].dataset.path for leaf, added in more.items() if added[_ERRORS]}:
        failed = drawn = 0
        for number, leaf in enumerate(leaves):
            if leaf.dataset.path == path:
                total = [a + b for a, b in zip(counts[number], more.get(number, [0] * len(COLUMNS)), strict=True)]
                failed += total[_ERRORS]
                drawn += total[_ERRORS] + total[_SAMPLES] + total[_SKIPPED]
        if drawn >= policy.min_draws and failed > policy.max_error_rate * drawn:
            known = journal.failures(path)
            raise ErrorRateError(
                f"{path}: {failed} of {drawn} samples failed ({100 * failed / drawn:.2f} %), and max_error_rate allows "
                f"{100 * policy.max_error_rate:g} % (different samples: {known or 'none since the run was resumed'}). "
                "Fix or exclude them, or allow more with ErrorPolicy(max_error_rate=…)"
            )

"""The metrics of a loader as plain numbers by name (`samples`, `epochs/NAME`, …), and the losses of its datasets.

Everything is computed on request from what the loader keeps anyway; nothing is done per batch. The numbers are those of
one rank: what it was restored with plus what it has delivered since. Only epochs are those of the run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from energon_bridge.core.errors import ErrorRateError
from energon_bridge.core.loader.pool import WorkerPool
from energon_bridge.core.loader.position import Position
from energon_bridge.core.loader.run_data import dataset_names
from energon_bridge.core.loader.saved_run import State
from energon_bridge.core.storage.store import REQUESTS
from energon_bridge.core.stream.failures import FailureLog
from energon_bridge.core.stream.lane_state import COLUMNS, COUNTERS, Counts, LaneBatch, LaneState
from energon_bridge.core.stream.policy import ErrorPolicy


def flat_metrics(
    rows: Sequence[State], workers: WorkerPool | None = None, seconds: Sequence[float] = (0.0, 0.0, 0.0)
) -> dict[str, float]:
    """Return numbers by name of the rows that `leaf_rows` makes.

    Args:
        workers: The worker processes, or what would start them; None: the loader has none.
        seconds: Time spent making microbatches in all, waiting for loads, and batching, since the loader was made; then
            the sums of `network.REQUESTS`.

    Returns:
        - the sums of the counters (`COUNTERS`: samples, skipped, errors, …);
        - if the stream has draws: `draws`, the `epochs` that the run has made with them if all ranks have drawn as much
          (an epoch has each sample as often as repetitions say; `len(loader)` microbatches of each rank, if none is
          skipped), and `waiting_in_groups`, the samples drawn that wait in groups that are not full;
        - `ready`: microbatches that workers have finished and the training loop has not taken;
        - `worker_restarts`: how often a dead worker was replaced; if any, `worker_moves`: how often one moved;
        - `make_seconds` of all processes together, and of these `load_seconds` (waiting for samples to be read and
          decoded), `encode_seconds` and `batch_seconds`;
        - if servers were asked: `requests`, of these `request_retries` and `request_hedges` (second requests),
          `request_bytes`, and `request_seconds`, the time that reads waited;
        - `stalled_reads`: attempts to read a file that took longer than `read_timeout_seconds`;
        - for the node cache, in blocks and in bytes: `cache_hits` and `cache_hit_bytes`, `cache_misses` and
          `cache_miss_bytes`;
        - for a mix: `samples/NAME` and `epochs/NAME` of each dataset in it, and `errors/NAME`, `skipped/NAME` and
          `banned/NAME` of those that have lost samples.
    """
    found: dict[str, float] = {name: sum(row[name] for row in rows) for name in COUNTERS}
    made, load, batch, *asked = seconds
    found |= workers.metrics() if workers else {"ready": 0, "worker_restarts": 0}
    found |= {
        "make_seconds": made,
        "load_seconds": load,
        "encode_seconds": max(0.0, made - load - batch),
        "batch_seconds": batch,
    }
    if any(asked):
        found |= dict(zip(REQUESTS, asked, strict=True))
    present = [row for row in rows if not row["parked"]]
    drawn = [row for row in present if row["draws"] is not None]
    if drawn:
        found["draws"] = sum(row["draws"] for row in drawn)
        found["epochs"] = found["draws"] / sum(row["epoch_samples"] * row["of_lanes"] for row in drawn)
        found["waiting_in_groups"] = sum(row["waiting_in_groups"] for row in drawn)
    if len(present) > 1:
        names = dataset_names([row["path"] for row in present], [row["split_part"] for row in present])
        for name, row in zip(names, present, strict=True):
            found[f"samples/{name}"] = row["samples"]
            found |= {f"{counter}/{name}": row[counter] for counter in ("errors", "skipped", "banned") if row[counter]}
            if row["epochs"] is not None:
                found[f"epochs/{name}"] = row["epochs"] / row["of_lanes"]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The losses of datasets: too many for the run to go on (`max_error_rate`), or enough for a warning.


logger = logging.getLogger(__name__)

_ERRORS = COUNTERS.index("errors")
_LOST_SHARE, _LOST_LEAST = 0.05, 5
"""Share of a dataset's samples, and number of them, from which on their loss gives a warning."""
AT_END, AT_EPOCH, AT_ANY_TIME = 1, 5, 100
"""Samples drawn of a dataset before a warning is given: at the end of a run, at the end of an epoch, in between."""


def check_rates(position: Position, item: LaneBatch, policy: ErrorPolicy, failure_log: FailureLog) -> None:
    """Check the error rates of the datasets with failures in a microbatch, by the counters of this rank.

    The rate of a dataset is its failed samples divided by those that failed, were skipped, were delivered or wait for
    a pack, or by the draws of buffers that lanes share. Leaves of the same path count as one dataset.

    Args:
        position: Before the microbatch.

    Raises:
        ErrorRateError: Too many samples of a dataset failed.
    """
    if policy.max_error_rate is None:
        return
    leaves = position.plan.leaves
    concerned = {leaves[leaf].dataset.path for leaf, added in item.counts.items() if added[_ERRORS]}
    if not concerned:
        return
    for path, total in _by_dataset(position, item).items():
        failed = total["errors"]
        drawn = max(total["draws"], sum(total[name] for name in ("errors", "samples", "skipped", "waiting")))
        if path in concerned and drawn >= policy.min_draws and failed > policy.max_error_rate * drawn:
            known = failure_log.failures(path)
            raise ErrorRateError(
                f"{path}: {failed} of {drawn} samples failed ({100 * failed / drawn:.2f} %), and max_error_rate allows "
                f"{100 * policy.max_error_rate:g} % (different samples: {known or 'none since the run was resumed'}). "
                "Fix or exclude them, or allow more with max_error_rate=… in error_policy"
            )


def name_losses(position: Position, failure_log: FailureLog, *, least: int) -> None:
    """Warn about datasets that delivered nothing or lost more than a twentieth of their draws; once per cause.

    Args:
        least: Samples that must have been drawn of a dataset before it is mentioned.
    """
    rank = position.plan.config.dp_rank
    for path, total in _by_dataset(position).items():
        lost = {cause: total[cause] for cause in _LOSSES if total[cause]}
        there = total["samples"] + total["waiting"]
        drawn = max(there + sum(lost.values()), total["draws"])
        if drawn < least:
            continue
        causes = list(lost)
        what = "no sample of this dataset has been delivered"
        if there:
            many = {cause: n for cause, n in lost.items() if n >= _LOST_LEAST and n > _LOST_SHARE * drawn}
            causes = [cause for cause in ("errors", "skipped") if cause in many]
            share = 100 * sum(lost[cause] for cause in causes) / drawn
            what = f"{share:.0f} % of this dataset's samples are left out"
        if [cause for cause in causes if failure_log.is_new(path, cause)]:  # each is asked about
            found = failure_log.failures(path) or "none since the run was resumed"
            long = f" ({total['dropped']} of them as too long)" if total["dropped"] else ""
            said = "; ".join(_LOSSES[cause][0].format(lost[cause], found=found, long=long) for cause in causes)
            todo = " ".join(_LOSSES[cause][1] for cause in causes)
            logger.warning("%s: %s: of %d drawn on rank %d, %s. %s", path, what, drawn, rank, said, todo)


def name_shares(position: Position, first: Mapping[int, LaneState], failure_log: FailureLog) -> None:
    """Warn once of buckets whose packs take other numbers of samples than `bucket_batch_size` says, since `first`."""
    plan = position.plan
    if plan.data.buckets is None or plan.banned or plan.config.dp_rank:
        return
    fresh = LaneState.fresh(len(plan.leaves))
    spans = [(first.get(lane, fresh), state) for lane, state in position.lanes.items()]
    off = plan.data.buckets.off(plan.blend, spans)
    if off and failure_log.is_new("group_by", "shares"):
        logger.warning("%s", off)


_LOSSES = {
    "errors": (
        "{} failed (different samples: {found})",
        "In error_policy, quarantine=FILE lists what fails; max_error_rate=… stops a run that loses more.",
    ),
    "skipped": ("{} were skipped by hooks{long}", "To keep them, check which hook raises SkipSample."),
    "excluded": ("{} are listed in `exclude`", "To keep them, remove them from `exclude` in split.yaml."),
    "banned": ("{} are banned", "`energon checkpoint show` lists the bans of a state."),
}
"""Counters of draws that delivered nothing: the word for it in a warning, and the advice."""


def _by_dataset(position: Position, item: LaneBatch | None = None) -> dict[str, Counter[str]]:
    """Return by the path of each dataset the sums of its leaves' counters, its samples that wait, and its draws.

    Draws are those of shared buffers, 0 without: one lane counts at once what a buffer loses, the others the samples of
    their packs when they come to them. `item` is the microbatch that is delivered next, if it is to count.
    """
    counts = Counts(position.counts)
    lanes = dict(position.lanes)
    if item is not None:
        counts.add(item.counts)
        lanes |= {} if item.state is None else {item.unit: item.state}
    waiting = position.waiting(item)
    draws = Counter[int]()
    for lane, state in lanes.items():
        if state.dealt and lane < position.plan.streams:
            draws.update(dict(enumerate(state.leaf_draws)))
    totals: dict[str, Counter[str]] = {}
    for leaf, counted in sorted(counts.items()):
        total = totals.setdefault(position.plan.leaves[leaf].dataset.path, Counter(waiting=0))
        total.update(dict(zip(COLUMNS, counted, strict=True)), waiting=waiting[leaf], draws=draws[leaf])
    return totals

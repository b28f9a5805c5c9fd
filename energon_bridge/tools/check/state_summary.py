"""Summarises states: counters per leaf, the position of a run, how two states differ.

Everything comes from the state alone; no dataset is opened. Numbers are exact: draws are summed over the lanes in
it, counters over the ranks in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_bridge.core.loader.fits import diff_leaves
from energon_bridge.core.loader.saved_run import COUNTED, SavedRun, State, leaf_rows, read
from energon_bridge.core.stream.lane_state import COUNTERS

_RUN_SETTINGS = ("kind", "num_lanes")


def summarize(state: State) -> State:
    """Return a state as plain values: versions, position, lanes, settings, weights set, bans and leaves."""
    return _summary(state, read(state))


def _summary(state: State, saved: SavedRun) -> State:
    lanes = saved.lanes
    rows = leaf_rows(saved)
    endless = saved.kind == "train"
    missing = sorted(set(range(state["num_lanes"])) - lanes.keys()) if endless else []
    names = ("format", "format_version", "order_version", "kind", "num_lanes", "microbatches")
    return {
        **{name: state[name] for name in names},
        "epoch": state["epoch"],
        "epoch_steps": state["epoch_steps"],
        "draws": sum(lane.draw for lane in lanes.values()) // saved.sharers if endless else None,
        "held": saved.held,
        "out": None if saved.out is None else dict(zip(COUNTED, (len(saved.out.rows), *saved.out.counts), strict=True)),
        "totals": {name: sum(row[name] for row in rows) for name in COUNTERS},
        "missing_lanes": missing,
        "settings": dict(state["settings"]),
        "weights": [
            {"from_draw": draw, "weights": dict(zip((row["identity"] for row in rows), weights, strict=False))}
            for draw, weights in state["weights"]
        ],
        "bans": [
            {"from_draw": ban.start, "keys": list(ban.keys), "dataset": ban.dataset or None} for ban in saved.bans
        ],
        "leaves": rows,
    }


def rank_of(state: State) -> tuple[int, int] | None:
    """Return the rank and number of ranks of the state of one rank if its lanes tell; else None."""
    numbers = sorted(read(state).lanes)
    count = state["num_lanes"]
    if len(numbers) == count or not numbers:
        return None
    # A rank has every R-th lane. A single lane leaves the number of ranks open.
    ranks = numbers[1] - numbers[0] if len(numbers) > 1 else count
    even = count % ranks == 0
    if numbers != list(range(numbers[0], count, ranks)) or (len(numbers) == 1 and not even):
        return None
    return (numbers[0] - (state["microbatches"] if even else 0)) % ranks, ranks


def difference(then: State, now: State) -> State:
    """Return how two states differ: `settings` and `leaves` as lines, and how far `now` is ahead of `then`.

    Draws and counters are compared for the leaves that both have, where both hold the same lanes; else they are None.
    """
    runs = read(then), read(now)
    before = _summary(then, runs[0])
    after = _summary(now, runs[1])
    whole = before["missing_lanes"] == after["missing_lanes"]
    saved, here = ([leaf for leaf in run.leaves if not leaf["parked"]] for run in runs)
    progress = []
    old = {row["identity"]: row for row in before["leaves"]}
    for row in after["leaves"]:
        past = old.get(row["identity"])
        if past is not None:
            progress.append(
                {name: row[name] for name in ("identity", "path", "split_part")}
                | {name: _minus(row[name], past[name]) if whole else None for name in ("draws", "epochs", *COUNTERS)}
            )
    return {
        "settings": _changed_settings(before, after),
        "weights": [] if before["weights"] == after["weights"] else [before["weights"], after["weights"]],
        "bans": [] if before["bans"] == after["bans"] else [before["bans"], after["bans"]],
        "leaves": [*diff_leaves(saved, here), *_moved(saved, here), *_parked(before, after)],
        "microbatches": after["microbatches"] - before["microbatches"],
        "epochs": after["epoch"] - before["epoch"],
        "progress": progress,
        "comparable": whole,
    }


def _changed_settings(before: State, after: State) -> list[str]:
    lines = [
        f"~ {name}: {before[name]!r} is {after[name]!r} now" for name in _RUN_SETTINGS if before[name] != after[name]
    ]
    then = before["settings"]
    now = after["settings"]
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            lines.append(f"~ {name}: {then.get(name)!r} is {now.get(name)!r} now")
    return lines


def _moved(saved: Sequence[State], here: Sequence[State]) -> list[str]:
    paths = {leaf["identity"]: leaf["path"] for leaf in here}
    return [
        f"~ {_name(leaf)} has moved to {paths[leaf['identity']]}, with the same content"
        for leaf in saved
        if paths.get(leaf["identity"], leaf["path"]) != leaf["path"]
    ]


def _name(leaf: State) -> str:
    return leaf["path"] + (f" [{leaf['split_part']}]" if leaf["split_part"] else "")


def _parked(before: State, after: State) -> list[str]:
    then, now = ({row["identity"]: row["parked"] for row in summary["leaves"]} for summary in (before, after))
    rows = {row["identity"]: row for row in after["leaves"]}
    changed = [identity for identity in then if identity in now and then[identity] != now[identity]]
    return [f"~ {_name(rows[i])} is {'parked' if now[i] else 'in the mix again'} now" for i in changed]


def _minus(now: Any, then: Any) -> Any:
    return None if now is None or then is None else now - then

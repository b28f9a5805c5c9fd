"""Whether saved states fit a run (its data, its settings, and lanes for every rank), and each other, to be merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import islice
from typing import Any

import numpy as np

from energon_bridge.core.errors import (
    BatchSizeMismatchError,
    DatasetMismatchError,
    MissingRankError,
    SeedMismatchError,
    SettingMismatchError,
    SliceSizeMismatchError,
    SplitMismatchError,
    StateFormatError,
    StepMismatchError,
    called,
)
from energon_bridge.core.loader.saved_run import (
    OF_THE_RUN,
    WHAT_A_STATE_IS,
    SavedOut,
    SavedRun,
    State,
    read,
    shown,
    write,
)
from energon_bridge.core.order.topology import microbatches_before
from energon_bridge.core.stream.lane_state import COUNTERS, LaneState

_SETTING_ERRORS: dict[str, type[SettingMismatchError]] = {
    "seed": SeedMismatchError,
    "batch_size": BatchSizeMismatchError,
    "max_samples_per_sequence": SliceSizeMismatchError,
}

_AFFECTED = {
    "image_target": "how images are decoded",
    "image_backend": "how images are decoded",
    "autorotate": "how images are decoded",
    "pixels": "the values of pixels",
    "pixels_dtype": "the type of pixels",
    "today": "the date that the chat template writes",
}
"""What a setting changes, for those that change something other than the order."""

_WINDOWS = ("balance_window", "balance_window_of", "balance_window_cost")
"""Settings of runs whose global batches were once cut from several together, by cost (see `_check_windows`)."""
_OF_THE_STATE = ("packing_buffers",)
"""Settings that a run keeps from its beginning, like its lanes."""
_SINCE_THEN = ("today", "first_packs", "pack_limits")
"""Settings that states of earlier versions do not have."""
_OF_THE_MIX = ("mode", "bucket_batch_size", "schedule", "shuffle", "unit", "unit_values")


def check_fits(saved: SavedRun, kind: str, settings: State, leaves: list[State], *, adapt: bool = False) -> list[str]:
    """Raise if a state does not fit a dataset and its settings; return how the mixes differ.

    Raises:
        SplitMismatchError, DatasetMismatchError: The data differ.
        SettingMismatchError: A setting that the order depends on differs (seed, batch size and slice size have their
            own subclasses).
    """
    if saved.kind != kind:
        raise StateFormatError(
            f"the state belongs to a {saved.kind} stream, but this loader delivers a {kind} one: restore it into a "
            "loader of the kind that saved it (train: get_train_dataset, passes: the same with "
            "repeat=False, finite: get_val_dataset)"
        )
    saved_leaves = [leaf for leaf in saved.leaves if not leaf["parked"]]
    if not adapt and [leaf["split_part"] for leaf in saved_leaves] != [leaf["split_part"] for leaf in leaves]:
        _refuse_split(saved_leaves, leaves)
    difference = diff_leaves(saved_leaves, leaves)
    _check_windows(saved)
    of_the_mix = []
    names = (settings.keys() | saved.settings.keys()) - {*_WINDOWS}
    for name in sorted(names, key=lambda n: (n not in _SETTING_ERRORS, n)):
        then, now = (of.get(name) for of in (saved.settings, settings))
        if then == now or name in _OF_THE_STATE or (name in _SINCE_THEN and None in (then, now)):
            continue
        if name == "pack_limits" and (saved.settings.get("packing_buffers") or saved.num_lanes) == saved.num_lanes:
            continue  # each lane packs for itself, and goes on with the other limits from where it is
        if name in _OF_THE_MIX and (adapt or difference):  # for another mix, the leaves say more
            of_the_mix.append(f"~ {name}: {then} is {now} now")
            continue
        raise mismatch(name, then, now)
    if difference and not adapt:
        raise DatasetMismatchError(
            "the state belongs to different data (- in the state, + in this run):\n"
            + "\n".join(f"  {line}" for line in difference)
            + "\nWhat counts is the content: shards, their sample counts and sizes, excludes, dataset.yaml and the "
            "names of auxiliary stores. Restore the data and weights that the run started with (`energon lint` names "
            "damaged shards), resume with "
            f'on_mismatch="adapt"{called("on_mismatch")} to continue with the new mix (a dataset whose content changed '
            "begins its epoch again), or start a new run"
        )
    return difference + of_the_mix


def _check_windows(saved: SavedRun) -> None:
    """Raise for a state within a window of balance, whose lanes stand at the beginning of the window.

    At the end of one they stand where the run does, and it goes on without windows.
    """
    window, group, _ = (saved.settings.get(name) for name in _WINDOWS)
    span = (window or 1) * (group or 1)
    if window is None or not saved.microbatches % span:
        return
    raise SettingMismatchError(
        f"the state was saved with balance_window={window}: its global batches of {group} microbatches were cut from "
        f"{window} together, which this version does not do, and at microbatch {saved.microbatches} it is between "
        f"them. Take a state saved after a multiple of {span} microbatches (every {window} optimizer steps), which "
        "goes on with balance or without, or start a new run"
    )


def _refuse_split(saved: Sequence[State], here: Sequence[State]) -> None:
    """Raise if the datasets are the same but the split parts differ."""
    for then, now in zip(saved, here, strict=False):
        if then["split_part"] != now["split_part"] and (len(saved) == len(here) == 1 or then["path"] == now["path"]):
            raise SplitMismatchError(
                f"the state belongs to split {then['split_part']!r} of {then['path']}, but this run reads split "
                f"{now['split_part']!r} of {now['path']}: set split_part={then['split_part']!r} to resume, or start a "
                "new run"
            )


def diff_leaves(saved: Sequence[State], here: Sequence[State]) -> list[str]:
    """Return how two tables of leaves differ, one line per leaf: added, removed, reweighted, content changed.

    Leaves of one identity have other content if their marks differ; a state of an older version has none.
    """
    then, now = ({leaf["identity"]: leaf for leaf in table} for table in (saved, here))
    lines = []
    paths = {leaf["path"]: leaf for identity, leaf in now.items() if identity not in then}
    for identity, leaf in then.items():
        if identity in now:
            if leaf["mark"] and now[identity]["mark"] and leaf["mark"] != now[identity]["mark"]:
                lines.append(f"~ {_describe(leaf)}: its files were written again with other content, of the same sizes")
            if leaf["share"] != now[identity]["share"]:
                weights = (row["share"] or "1 (the only dataset)" for row in (leaf, now[identity]))
                lines.append(f"~ {_describe(leaf)}: weight {' is '.join(weights)} now")
        elif leaf["path"] in paths:
            other = paths.pop(leaf["path"])
            what = (
                "the content changed"
                if leaf["subset"] == other["subset"]
                else "the content, or which samples of it are taken, changed"
            )
            lines.append(f"- {_describe(leaf)}\n  + {_describe(other)}: {what}")
        else:
            lines.append(f"- {_describe(leaf)}")
    return lines + [f"+ {_describe(leaf)}" for leaf in paths.values()]


def _describe(leaf: State) -> str:
    samples = f"{leaf['num_samples']} samples" + (f" of {leaf['subset']}" if leaf["subset"] else "")
    split = f" [{leaf['split_part']}]" if leaf["split_part"] else ""  # tables have none
    return f"{leaf['path']}{split}, {samples}, identity {leaf['identity']}"


def mismatch(name: str, then: object, now: object) -> SettingMismatchError:
    """Return the error for a setting with which the state was saved."""
    if name == "unit_values" and then is not None and now is not None:
        return SettingMismatchError(
            "the column that the weights of the mix are shares of (`unit`) has other values than when the state was "
            "saved, and the order of samples depends on them: restore the column, or resume with "
            'on_mismatch="adapt" to continue with the new values'
        )
    if name == "first_packs":
        saved_by = "megatron.energon (by energon_bridge.compat)" if then == "full" else "energon_bridge"
        return SettingMismatchError(
            f"the state was saved by a program that imports {saved_by}, and this one packs its first samples "
            "differently. Resume it with that import, or start about where it was: "
            "get_savable_loader(..., start_at=STEP) repeats some samples"
        )
    if name in ("buckets", "bucket_batch_size"):
        return SettingMismatchError(
            f"the state was saved with {_of_buckets(name, then)}, this run has {_of_buckets(name, now)}: the order of "
            "samples depends on it. Resume with the group_by, batch_size and bucket_batch_size of then, and columns "
            "with the same values, or start a new run"
        )
    if name == "pack_limits":
        return SettingMismatchError(
            f"the state was saved by an encoder whose packs hold at most {then}, and here it is {now}: the data is so "
            "small that lanes share their packing buffers, and with other packs some samples would come twice and "
            "others not. Go on with those limits, or start a new run"
        )
    also = f" in the ChatConfig{called(name)}, or leave it out," if name == "today" else called(name)
    return _SETTING_ERRORS.get(name, SettingMismatchError)(
        f"the state was saved with {name}={then!r}, this run has {name}={now!r}: "
        f"{_AFFECTED.get(name, 'the order of samples')} depends on it; set {name}={then!r}{also} to resume, or "
        "start a new run"
    )


def _of_buckets(name: str, recorded: Any) -> str:
    """Return what a state records of buckets, a text for each or for each of its datasets, as users call it."""
    if not isinstance(recorded, list):
        return "no buckets (group_by)" if name == "buckets" else "no bucket_batch_size"
    ones = list(dict.fromkeys(map(str, recorded)))
    more = f" and {len(ones) - _SHOWN_BUCKETS:,} more" * (len(ones) > _SHOWN_BUCKETS)
    what = "buckets (group_by) of so many rows a microbatch" if name == "buckets" else "bucket_batch_size"
    return f"the {what}: {'; '.join(ones[:_SHOWN_BUCKETS])}{more}"


_SHOWN_BUCKETS = 20


def saved_day(saved: SavedRun) -> date | None:
    """Return the day that a run writes into texts, if its state has one. Raises StateFormatError."""
    day = saved.settings.get("today")
    try:
        return None if day is None else date.fromisoformat(day)
    except (TypeError, ValueError) as error:
        raise StateFormatError(f"the state is damaged: today={day!r} is no date such as '2026-01-31'") from error


def check_lanes(lanes: Mapping[int, LaneState], wanted: Iterable[int], microbatches: int, num_lanes: int) -> None:
    """Raise if lanes are missing from a union of states, or are at another position than the run."""
    missing = list(islice((lane for lane in wanted if lane not in lanes), 9))
    if missing:
        raise MissingRankError(
            f"the state holds {len(lanes)} of {num_lanes} lanes; this rank needs lanes {missing[:8]}"
            f"{' …' if len(missing) > 8 else ''}. The states of some ranks are missing: restore from a list of the "
            "states of all ranks, or from save_state_global"
        )
    for lane, state in lanes.items():
        expected = microbatches_before(lane, microbatches, num_lanes)
        if state.microbatches != expected:
            raise StateFormatError(
                f"the state is damaged: lane {lane} has delivered {state.microbatches} microbatches, but at "
                f"microbatch {microbatches} of the run it should have delivered {expected}"
            )


def check_out(saved: SavedRun, *, keeps: bool) -> None:
    """Raise if a state has samples that are not done, and the loader would forget them."""
    if saved.out is None or keeps or not len(saved.out.rows):
        return
    raise SettingMismatchError(
        f"the state has {len(saved.out.rows)} samples that were delivered and are not done: pass keep_until_done=True "
        "to get_savable_loader, so that they come again"
    )


# States of ranks -----------------------------------------------------------------------------------------------------


def read_all(states: Sequence[Any]) -> SavedRun:
    """Return the merged contents of the states of some or all ranks of a run; each is unpacked once.

    Raises:
        StepMismatchError: They are at different microbatches.
        StateFormatError: They belong to different runs, or one is damaged.
    """
    if not states:
        raise StateFormatError(f"no state given. {WHAT_A_STATE_IS}")
    runs = [read(state) for state in states]
    first = runs[0]
    if len(runs) == 1:
        return first
    lanes: dict[int, LaneState] = {}
    counts = [dict.fromkeys(COUNTERS, 0) for _ in first.leaves]
    for number, run in enumerate(runs):
        if run.microbatches != first.microbatches:
            raise StepMismatchError(
                f"the states were saved at different steps: state 0 after {first.microbatches} microbatches of the "
                f"run, state {number} after {run.microbatches}; take the states of one checkpoint"
            )
        if difference := _difference(first, run):
            raise StateFormatError(f"state {number} belongs to another run than state 0: {difference}")
        fresh = not lanes.keys() & run.lanes.keys()
        lanes |= run.lanes
        if fresh:
            for total, leaf in zip(counts, run.leaves, strict=True):
                for name in COUNTERS:
                    total[name] += leaf["counts"][name]
    leaves = [leaf | {"counts": counted} for leaf, counted in zip(first.leaves, counts, strict=True)]
    return replace(first, leaves=leaves, lanes=lanes, ranks=_ranks_of(runs), out=_out_of(runs))


def _ranks_of(runs: Sequence[SavedRun]) -> tuple[int, int] | None:
    known = [run.ranks for run in runs if run.ranks is not None]
    if len(known) < len(runs):
        return None
    size = max(size for _, size in known)
    return min(size, sum(count for count, _ in known)), size


def _out_of(runs: Sequence[SavedRun]) -> SavedOut | None:
    """Return what is out on any of the ranks, in order of delivery; a rank that is there twice counts once."""
    parts = [run.out for run in runs if run.out is not None]
    if not parts:
        return None
    ranks: set[int] = set()
    counts = np.zeros(len(parts[0].counts), dtype=np.int64)
    for part in parts:
        if not ranks & {*part.ranks}:
            counts += part.counts
        ranks |= {*part.ranks}
    rows = np.unique(np.concatenate([part.rows for part in parts]), axis=0)  # by pass and place, its first columns
    return SavedOut(
        ranks=tuple(sorted(ranks)),
        size=parts[0].size,
        rows=rows,
        counts=tuple(map(int, counts)),
        ended=all(part.ended for part in parts),
    )


def merge(states: Sequence[Any]) -> State:
    """Return one state for the states of some or all ranks of a run.

    Raises:
        StepMismatchError: They are at different microbatches.
        StateFormatError: They belong to different runs, or one is damaged.
    """
    saved = read_all(states)
    if len(states) == 1:
        state: State = states[0]
        return state
    return write(saved)


def _difference(a: SavedRun, b: SavedRun) -> str:
    """Return which settings, or what else, differ between two states; empty if they belong to one run."""
    names = [name for name in sorted(a.settings.keys() | b.settings) if a.settings.get(name) != b.settings.get(name)]
    if names:
        return ", ".join(f"{n}: {shown(a.settings.get(n))} and {shown(b.settings.get(n))}" for n in names)
    others = [n for n in (*OF_THE_RUN, "bans") if n != "settings" and getattr(a, n) != getattr(b, n)]
    if a.changes != b.changes:
        others.append("weights")
    if [leaf["identity"] for leaf in a.leaves] != [leaf["identity"] for leaf in b.leaves]:
        others.append("leaves")
    return ", ".join(others)

"""Reads states from files and summarises them: counters per leaf, the position of a run, how two states differ.

Everything comes from the document alone; no dataset is opened. Numbers are exact: draws are summed over the lanes in
the document, counters over the ranks in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from energon_bridge.core.errors import StateError, StateFormatError
from energon_bridge.core.loader.document import FORMAT, SavedRun, State, leaf_rows, read
from energon_bridge.core.loader.fits import diff_leaves
from energon_bridge.core.stream.state import COUNTERS

# ---------------------------------------------------------------------------------------------------------------------
# Reading states from files: JSON, `torch.save`, checkpoints that hold a state somewhere inside.
#
# Accepted: a state itself, a list of states of several ranks, Megatron's `{"dataloader_state_dict": state}`, a
# Lightning checkpoint with the state of our data module, and any other nesting of dicts and lists. Tensors of a
# checkpoint are not read, and no code in a file is run: JSON, or `torch.load` with `weights_only=True`.


_MAX_DEPTH = 8
_USUAL = "dataloader_state_dict"
_OF_MODULE = {"global_step", "train"}


def read_states(paths: Sequence[str | os.PathLike[str]]) -> list[State]:
    """Return the states in some files, in the order of the files and without duplicates.

    Raises:
        StateFormatError: A file cannot be read, is damaged, or holds no state; the message names the file.
        StateVersionError, OrderVersionError: A state was written by another version.
    """
    states: list[State] = []
    for path in paths:
        found = list(_states_in(_load(os.fspath(path)), _MAX_DEPTH))
        if not found:
            raise StateFormatError(
                f"{os.fspath(path)}: contains no state of energon_bridge (nothing with format {FORMAT!r}). Pass a file "
                "written from save_state_rank, save_state_global or state_dict, or a checkpoint that contains it"
            )
        for state in found:
            try:
                read(state)
            except StateError as error:
                raise type(error)(f"{os.fspath(path)}: {error}") from error
            if state not in states:
                states.append(state)
    return states


def _load(path: str) -> Any:
    """Return the content of a file."""
    try:
        with open(path, "rb") as file:
            start = file.read(64).lstrip()
    except OSError as error:
        reason = "it is a folder; pass the files in it" if os.path.isdir(path) else error.strerror
        folder, suffix = os.path.dirname(path) or ".", os.path.splitext(path)[1]
        if isinstance(error, FileNotFoundError) and os.path.isdir(folder):
            there = sorted(name for name in os.listdir(folder) if suffix and name.endswith(suffix))
            reason = f"{reason}. In {folder} are: {', '.join(there[-5:])}" if there else reason
        raise StateFormatError(f"{path}: cannot be read as a state: {reason}") from error
    if start[:1] in (b"{", b"["):
        try:
            with open(path, encoding="utf-8") as text:
                return json.load(text)
        except ValueError as error:
            raise StateFormatError(f"{path}: damaged: it begins like JSON but is not valid ({error})") from error
    import torch  # imported only here, since JSON needs no torch

    try:
        # On the meta device the tensors of a checkpoint have shapes and no content: they are not read.
        return torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # foreign bytes can make torch raise anything
        raise StateFormatError(
            f"{path}: neither JSON nor a torch.save file that loads with weights_only=True. It is damaged, another "
            f"kind of file, or contains objects that would run code ({type(error).__name__}: {_first_line(error)}). "
            "States of energon_bridge are plain values; save them in a file of their own"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _states_in(value: Any, depth: int) -> Iterator[State]:
    """Yield the states inside nested dicts and lists, beginning with the keys of Megatron and our data module."""
    if depth == 0:
        return
    if isinstance(value, dict):
        if value.get("format") == FORMAT:
            yield value
            return
        # Lightning keeps a second copy of an iterator's state among its loops.
        of_module = [item["train"] for item in value.values() if isinstance(item, dict) and item.keys() == _OF_MODULE]
        inside = of_module or ([value[_USUAL]] if _USUAL in value else list(value.values()))
    elif isinstance(value, (list, tuple)):
        inside = list(value)
    else:
        return
    for item in inside:
        if isinstance(item, (dict, list, tuple)):
            yield from _states_in(item, depth - 1)


# ---------------------------------------------------------------------------------------------------------------------
# Summaries of states.


_RUN_SETTINGS = ("kind", "num_lanes")


def summarize(document: State) -> State:
    """Return a state as plain values: versions, position, lanes, settings, weights set, bans and leaves."""
    return _summary(document, read(document))


def _summary(document: State, saved: SavedRun) -> State:
    lanes = saved.lanes
    rows = leaf_rows(saved)
    endless = saved.kind == "train"
    missing = sorted(set(range(document["num_lanes"])) - lanes.keys()) if endless else []
    names = ("format", "format_version", "order_version", "kind", "num_lanes", "microbatches")
    return {
        **{name: document[name] for name in names},
        "epoch": document["epoch"],
        "epoch_steps": document["epoch_steps"],
        "draws": sum(lane.draw for lane in lanes.values()) if endless else None,
        "held": sum(len(lane.held.rows) for lane in lanes.values()),
        "totals": {name: sum(row[name] for row in rows) for name in COUNTERS},
        "missing_lanes": missing,
        "settings": dict(document["settings"]),
        "weights": [
            {"from_draw": draw, "weights": dict(zip((row["identity"] for row in rows), weights, strict=False))}
            for draw, weights in document["weights"]
        ],
        "bans": [
            {"from_draw": ban.start, "keys": list(ban.keys), "dataset": ban.dataset or None} for ban in saved.bans
        ],
        "leaves": rows,
    }


def rank_of(document: State) -> tuple[int, int] | None:
    """Return the rank and number of ranks of the state of one rank if its lanes tell; else None."""
    numbers = sorted(read(document).lanes)
    count = document["num_lanes"]
    if len(numbers) == count or not numbers:
        return None
    # A rank has every R-th lane. A single lane leaves the number of ranks open.
    ranks = numbers[1] - numbers[0] if len(numbers) > 1 else count
    even = count % ranks == 0
    if numbers != list(range(numbers[0], count, ranks)) or (len(numbers) == 1 and not even):
        return None
    return (numbers[0] - (document["microbatches"] if even else 0)) % ranks, ranks


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
        f"~ {leaf['path']} [{leaf['split_part']}] has moved to {paths[leaf['identity']]}, with the same content"
        for leaf in saved
        if paths.get(leaf["identity"], leaf["path"]) != leaf["path"]
    ]


def _parked(before: State, after: State) -> list[str]:
    then, now = ({row["identity"]: row["parked"] for row in summary["leaves"]} for summary in (before, after))
    rows = {row["identity"]: row for row in after["leaves"]}
    changed = [identity for identity in then if identity in now and then[identity] != now[identity]]
    return [
        f"~ {rows[i]['path']} [{rows[i]['split_part']}] is {'parked' if now[i] else 'in the mix again'} now"
        for i in changed
    ]


def _minus(now: Any, then: Any) -> Any:
    return None if now is None or then is None else now - then

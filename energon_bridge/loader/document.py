"""The saved state of a run: one plain document that says nothing about ranks or workers.

Built-in types only, so that it loads with `torch.load` and its defaults, as JSON, and in restricted unpicklers::

    {"format": "energon_bridge.state", "format_version": 4, "order_version": 5,
     "kind": "train" | "passes" | "finite", "num_lanes": L, "microbatches": m0,
     "epoch": passes that are done,          # of a finite stream; m0 counts in the pass
     "epoch_steps": steps delivered of the virtual epoch,
     "settings": {name: value, ...},         # all that the stream depends on but the leaves
     "weights": [[global draw, [weight, ...]], ...],     # what `set_weights` changed
     "leaves": {"identities": [str, ...], "paths": text, "split_parts": text, "shares": text, "num_samples": column,
                "subsets": text, "blocks": text, "counts": {name: column, ...}, "parked": how many of them, at the end},
     "lanes": {"numbers": column, "microbatches": column, "draws": column, "taken": column, "origins": column,
               "leaf_draws": column,         # lane by lane, leaf by leaf
               "batches_taken": column, "held": column, "held_rows": [column, ...], "held_members": [column, ...],
               "buffers": column}}

*held* says how many rows of each lane wait to be packed or batched; the columns of their arrays follow, all lanes one
after the other (`stream/state.py`). *buffers* is there where lanes pack.

A *column* is a string: the integers' differences as little-endian integers of 1, 2, 4 or 8 bytes, zlib, base85, with
the number of bytes in front ("2:…"); long ones are base64 instead ("2,…"), which takes a tenth of the time. A *text* is
the zlib'd, base85 JSON of a list of strings. The state of a rank holds the lanes of that rank; several such states
merge into one as long as they stand at the same microbatch. Counts of a rank's state are that rank's own; they add up
in a merge. *Parked* leaves were in the mix once and were taken out on a resume; where they stood is kept.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from energon_bridge.errors import (
    BatchSizeMismatchError,
    DatasetMismatchError,
    MissingRankError,
    OrderVersionError,
    SeedMismatchError,
    SettingMismatchError,
    SliceSizeMismatchError,
    SplitMismatchError,
    StateFormatError,
    StateVersionError,
    StepMismatchError,
)
from energon_bridge.plan.leaf import ORDER_VERSION
from energon_bridge.rng import IntArray
from energon_bridge.stream.state import COUNTERS, NOTHING_HELD, Held, LaneState
from energon_bridge.topology import microbatches_before

FORMAT = "energon_bridge.state"
FORMAT_VERSION = 4

_TEXTS = ("path", "split_part", "share", "subset", "block")

_SETTING_ERRORS: dict[str, type[SettingMismatchError]] = {
    "seed": SeedMismatchError,
    "batch_size": BatchSizeMismatchError,
    "max_samples_per_sequence": SliceSizeMismatchError,
}

_AFFECTED = {"image_target": "how images are decoded"}
"""What a setting changes, if not the order."""

_HELD = ("held_rows", "held_members")
_LONG_COLUMN = 4096
"""From so many integers on, time counts for more than the last bytes."""
_OF_THE_RUN = ("settings", "num_lanes", "kind", "epoch", "epoch_steps", "weights")
_OF_THE_MIX = ("mode", "schedule", "shuffle")

State = dict[str, Any]


def encode_column(numbers: Iterable[int] | IntArray) -> str:
    """Return integers as one string: differences in as few bytes as they need, zlib, base85."""
    array = numbers if isinstance(numbers, np.ndarray) else np.fromiter(numbers, dtype="<i8")
    steps = np.diff(array, prepend=np.int64(0))
    most = int(np.abs(steps).max()) if steps.size else 0
    width = next((width for width in (1, 2, 4) if most < 1 << (8 * width - 1)), 8)
    raw = steps.astype(f"<i{width}").tobytes()
    if steps.size >= _LONG_COLUMN:
        return f"{width},{base64.b64encode(zlib.compress(raw, 1)).decode()}"
    return f"{width}:{base64.b85encode(zlib.compress(raw, 9)).decode()}"


def decode_column(text: str) -> list[int]:
    """Return the integers of a column."""
    numbers: list[int] = _decode(text).tolist()
    return numbers


def _decode(text: str) -> IntArray:
    width, mark, packed = text[:1], text[1:2], text[2:]
    raw = zlib.decompress(base64.b85decode(packed) if mark == ":" else base64.b64decode(packed))
    return np.cumsum(np.frombuffer(raw, dtype=f"<i{width}"), dtype=np.int64)


def encode_text(strings: Iterable[str]) -> str:
    """Return strings as one: JSON, zlib, base85."""
    return base64.b85encode(zlib.compress(json.dumps(list(strings)).encode(), 9)).decode()


def decode_text(text: str) -> list[str]:
    """Return the strings of a text."""
    strings: list[str] = json.loads(zlib.decompress(base64.b85decode(text)))
    return strings


def write_leaves(table: Sequence[State], counts: Sequence[Sequence[int]], parked: int = 0) -> State:
    """Return the `leaves` entry of a document: rows of a table of leaves (the last ones parked) and their counters."""
    return {
        "identities": [row["identity"] for row in table],
        **{f"{name}s": encode_text(row[name] for row in table) for name in _TEXTS},
        "num_samples": encode_column(row["num_samples"] for row in table),
        "counts": {name: encode_column(row[i] for row in counts) for i, name in enumerate(COUNTERS)},
        "parked": parked,
    }


def read_leaves(document: State) -> list[State]:
    """Return the leaves of a document, parked ones last.

    Rows have identity, path, split_part, share, subset, num_samples, counts (a dict) and parked.
    """
    entry = document["leaves"]
    size = len(entry["identities"])
    columns: dict[str, Sequence[Any]] = {name: decode_text(entry[f"{name}s"]) for name in _TEXTS}
    active = size - entry["parked"]
    columns |= {"parked": [number >= active for number in range(size)]}
    columns |= {"identity": entry["identities"], "num_samples": decode_column(entry["num_samples"])}
    rows = zip(*(decode_column(entry["counts"][name]) for name in COUNTERS), strict=True)
    columns["counts"] = [dict(zip(COUNTERS, row, strict=True)) for row in rows]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def write_lanes(lanes: Mapping[int, LaneState]) -> State:
    """Return the `lanes` entry of a document."""
    numbers = sorted(lanes)
    states = [lanes[number] for number in numbers]
    return {
        "numbers": encode_column(numbers),
        "microbatches": encode_column(s.microbatches for s in states),
        "draws": encode_column(s.draw for s in states),
        "taken": encode_column(s.taken for s in states),
        "origins": encode_column(s.origin for s in states),
        "leaf_draws": encode_column(count for s in states for count in s.leaf_draws),
        **({"buffers": encode_column(s.buffer for s in states)} if any(s.buffer for s in states) else {}),
        **_write_held(states),
    }


def _write_held(states: Sequence[LaneState]) -> State:
    """Return the entries for rows that wait; none where no lane has any."""
    if not any(s.held.rows.size for s in states):
        return {}
    rows = np.concatenate([s.held.rows for s in states])
    members = np.concatenate([s.held.members for s in states])
    return {
        "batches_taken": encode_column(s.batches_taken for s in states),
        "held": encode_column(len(s.held.rows) for s in states),
        "held_rows": [encode_column(column) for column in rows.T],
        "held_members": [encode_column(column) for column in members.T],
    }


def _read_held(entry: State, lanes: int) -> list[tuple[Held, int]]:
    if "held" not in entry:
        return [(NOTHING_HELD, 0)] * lanes
    rows, members = (np.stack([_decode(column) for column in entry[name]], axis=1) for name in _HELD)
    ends = np.cumsum(decode_column(entry["held"]))
    firsts = np.concatenate(([0], np.cumsum(rows[:, 1])))
    out = []
    for end, size, taken in zip(
        ends.tolist(), decode_column(entry["held"]), decode_column(entry["batches_taken"]), strict=True
    ):
        of_lane = slice(int(firsts[end - size]), int(firsts[end]))
        out.append((Held(rows[end - size : end], members[of_lane]), taken))
    return out


def read_lanes(document: State) -> dict[int, LaneState]:
    """Return the lanes of a document by number."""
    entry = document["lanes"]
    names = ("numbers", "microbatches", "draws", "taken", "origins")
    numbers, microbatches, draws, taken, origins = (decode_column(entry[name]) for name in names)
    buffers = decode_column(entry["buffers"]) if "buffers" in entry else [0] * len(numbers)
    leaf_draws = decode_column(entry["leaf_draws"])
    leaves = len(document["leaves"]["identities"])
    held = _read_held(entry, len(numbers))
    columns = zip(numbers, microbatches, draws, taken, origins, held, buffers, strict=True)
    return {
        number: LaneState(m, draw, t, tuple(leaf_draws[i * leaves : (i + 1) * leaves]), origin, rows, batches, buffer)
        for i, (number, m, draw, t, origin, (rows, batches), buffer) in enumerate(columns)
    }


def check_format(state: Any) -> State:
    """Return the document if this version can read it.

    Raises:
        StateFormatError: It is none, or damaged.
        StateVersionError: It was written in a newer format.
        OrderVersionError: It was written under other rules of order.
    """
    if type(state).__module__.startswith("megatron.energon"):
        raise StateFormatError(
            f"a state of megatron-energon ({type(state).__name__}): it cannot be continued here, where samples come in "
            "another order. Begin at the step where it was saved: get_savable_loader(..., start_at=STEP)"
        )
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise StateFormatError(f"not a state of energon_bridge: expected format {FORMAT!r}, found {found!r}")
    version = state.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise StateVersionError(
            f"the state has format version {version!r}, this version of energon_bridge reads up to {FORMAT_VERSION}: "
            "upgrade energon_bridge"
        )
    order = state.get("order_version")
    if order != ORDER_VERSION:
        raise OrderVersionError(
            f"the state was written under order version {order!r}, this version of energon_bridge orders samples by "
            f"version {ORDER_VERSION}: resume with the version that wrote it, or start a new run"
        )
    missing = {*_OF_THE_RUN, "microbatches", "leaves", "lanes"} - state.keys()
    if missing:
        raise StateFormatError(f"the state is damaged: it has no {', '.join(sorted(missing))}")
    return state


def merge(states: Sequence[Any]) -> State:
    """Return one document for the states of some or all ranks of a run.

    Raises:
        StepMismatchError: They stand at different microbatches.
        StateFormatError: They belong to different runs.
    """
    documents = [check_format(state) for state in states]
    if not documents:
        raise StateFormatError("no state given")
    first = documents[0]
    lanes: dict[int, LaneState] = {}
    leaves = read_leaves(first)
    counts = [[0] * len(COUNTERS) for _ in leaves]
    for number, document in enumerate(documents):
        if document["microbatches"] != first["microbatches"]:
            raise StepMismatchError(
                f"the states were saved at different steps: state 0 after {first['microbatches']} microbatches of the "
                f"run, state {number} after {document['microbatches']}; take the states of one checkpoint"
            )
        same = all(document[name] == first[name] for name in _OF_THE_RUN)
        if not same or document["leaves"]["identities"] != first["leaves"]["identities"]:
            raise StateFormatError(
                f"state {number} belongs to another run than state 0: {_difference(first, document)}"
            )
        known = read_lanes(document)
        fresh = not lanes.keys() & known.keys()
        lanes |= known
        if fresh:
            own = (leaf["counts"].values() for leaf in read_leaves(document))
            counts = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(counts, own, strict=True)]
    parked = sum(leaf["parked"] for leaf in leaves)
    return first | {"lanes": write_lanes(lanes), "leaves": write_leaves(leaves, counts, parked)}


def _difference(a: State, b: State) -> str:
    names = [name for name in a["settings"] if a["settings"][name] != b["settings"].get(name)]
    others = [name for name in _OF_THE_RUN[1:] if a[name] != b[name]] or ["leaves"]
    return ", ".join(f"{n}: {a['settings'][n]!r} and {b['settings'].get(n)!r}" for n in names) or ", ".join(others)


def check_fits(document: State, kind: str, settings: State, leaves: list[State], *, adapt: bool = False) -> list[str]:
    """Refuse a document that does not belong to a dataset and its settings; return what differs in the mix.

    Args:
        document: The state.
        kind, settings, leaves: Of this run.
        adapt: Let the mix differ.

    Raises:
        SplitMismatchError, DatasetMismatchError: Other data.
        SettingMismatchError: A setting that the order depends on differs (seed, batch size and slice size have classes
            of their own).
    """
    if document["kind"] != kind:
        raise StateFormatError(f"the state is of a {document['kind']} stream, this loader delivers a {kind} one")
    saved_leaves = [leaf for leaf in read_leaves(document) if not leaf["parked"]]
    if not adapt and [leaf["split_part"] for leaf in saved_leaves] != [leaf["split_part"] for leaf in leaves]:
        _refuse_split(saved_leaves, leaves)
    difference = diff_leaves(saved_leaves, leaves)
    of_the_mix = []
    for name in sorted(settings.keys() | document["settings"].keys(), key=lambda n: (n not in _SETTING_ERRORS, n)):
        then, now = document["settings"].get(name), settings.get(name)
        if then == now:
            continue
        if name in _OF_THE_MIX and (adapt or difference):  # of another mix the leaves say more
            of_the_mix.append(f"~ {name}: {then} is {now} now")
            continue
        raise _SETTING_ERRORS.get(name, SettingMismatchError)(
            f"the state was saved with {name}={then!r}, this run has {name}={now!r}: "
            f"{_AFFECTED.get(name, 'the order of samples')} depends on it; set {name}={then!r} to resume, or start a "
            "new run"
        )
    if difference and not adapt:
        raise DatasetMismatchError(
            "the state belongs to other data (- in the state, + in this run):\n"
            + "\n".join(f"  {line}" for line in difference)
            + "\nWhat counts is the content: shards, their sample counts and sizes, excludes, dataset.yaml and the "
            "names of aux stores. Restore "
            'the data and weights that the run was started with, resume with on_mismatch="adapt" to go on with the new '
            "mix, or start a new run"
        )
    return difference + of_the_mix


def _refuse_split(saved: Sequence[State], here: Sequence[State]) -> None:
    """Raise where the same datasets are read, in other split parts."""
    for then, now in zip(saved, here, strict=False):
        if then["split_part"] != now["split_part"] and (len(saved) == len(here) == 1 or then["path"] == now["path"]):
            raise SplitMismatchError(
                f"the state belongs to split {then['split_part']!r} of {then['path']}, this run reads split "
                f"{now['split_part']!r} of {now['path']}"
            )


def diff_leaves(saved: Sequence[State], here: Sequence[State]) -> list[str]:
    """Return what differs between two tables of leaves, a line each: added, removed, reweighted, content changed."""
    then, now = ({leaf["identity"]: leaf for leaf in table} for table in (saved, here))
    lines = []
    paths = {leaf["path"]: leaf for identity, leaf in now.items() if identity not in then}
    for identity, leaf in then.items():
        if identity in now:
            if leaf["share"] != now[identity]["share"]:
                lines.append(f"~ {_describe(leaf)}: weight {leaf['share']} is {now[identity]['share']} now")
        elif leaf["path"] in paths:
            lines.append(f"- {_describe(leaf)}\n  + {_describe(paths.pop(leaf['path']))}: the content changed")
        else:
            lines.append(f"- {_describe(leaf)}")
    return lines + [f"+ {_describe(leaf)}" for leaf in paths.values()]


def _describe(leaf: State) -> str:
    return f"{leaf['path']} [{leaf['split_part']}], {leaf['num_samples']} samples, identity {leaf['identity']}"


def check_lanes(lanes: Mapping[int, LaneState], wanted: Iterable[int], microbatches: int, num_lanes: int) -> None:
    """Refuse a union of states in which lanes are missing or do not stand where the run stands."""
    missing = [lane for lane in wanted if lane not in lanes]
    if missing:
        raise MissingRankError(
            f"the state holds {len(lanes)} of {num_lanes} lanes; this rank needs lanes {missing[:8]}"
            f"{' …' if len(missing) > 8 else ''}: the states of some ranks are missing, restore from the states of all "
            "ranks of the checkpoint (a list of them, or save_state_global)"
        )
    for lane, state in lanes.items():
        expected = microbatches_before(lane, microbatches, num_lanes)
        if state.microbatches != expected:
            raise StateFormatError(
                f"the state is damaged: lane {lane} has delivered {state.microbatches} microbatches, a run at "
                f"microbatch {microbatches} has {expected} of it"
            )

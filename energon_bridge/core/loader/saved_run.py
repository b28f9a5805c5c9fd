"""The saved state of a run: one plain object that is independent of ranks and workers.

It has built-in types only, so it loads with `torch.load` and its defaults, as JSON, and in restricted unpicklers::

    {"format": "energon_bridge.state", "format_version": 1, "order_version": 1,
     "kind": "train" | "passes" | "finite", "num_lanes": L, "microbatches": m0,
     "epoch": passes that are done,          # of a finite stream; m0 counts in the pass
     "epoch_steps": steps delivered of the virtual epoch,
     "ranks": [R whose counts it has, R of the run],     # of a finite stream
     "settings": {name: value, ...},         # all that the stream depends on but the leaves
     "weights": [[global draw, [weight, ...]], ...],     # what `set_weights` changed
     "bans": [[global draw, [key, ...]], ...],           # what `ban` withdrew; some with the path of a dataset
     "banned": [[identity, column, column], ...],        # of a leaf the samples banned, and from which draws on
     "leaves": {"identities": [str, ...],                # identity, or identity+mark
                "paths": text, "split_parts": text, "shares": text, "num_samples": column,
                "subsets": text, "blocks": column, "counts": {name: column, ...}, "parked": how many, at the end},
     "lanes": {"numbers": column,
                "microbatches": column, "draws": column, ...     # `LANE_COLUMNS` of `stream/lane_state.py`
               "leaf_draws": column,         # lane by lane, leaf by leaf
               "leaf_sums": column,          # likewise, in a blend by amounts
               "held": column, "held_rows": [column, ...], "held_members": [column, ...]},
     "out": {"ranks": [[rank, ...], of how many], "size": n,     # with `keep_until_done`
             "rows": [column, ...], "counts": [done, again, dropped], "ended": bool},
     "checksum": 16 hexadecimal digits}

*held* is the number of rows of each lane that wait to be packed or batched; the columns of their arrays follow, lane
after lane (`stream/lane_state.py`). A rank's state holds that rank's lanes and its own counts; states of several ranks
merge into one (`fits.py`). The lanes tell which ranks a state covers; a finite stream has no lanes, so its states name
the ranks. *Parked* leaves were once in the mix and were removed on a resume; their positions are kept. The
checksum is that of the rest as JSON with sorted keys.

All states enter through `read`, which checks everything: the checksum, the presence, types, lengths and ranges of all
fields, and that waiting references name samples that exist. Nothing is unpacked beyond the length that the rest of the
state implies. Any fault is a StateFormatError that names the field.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any, ClassVar, get_args

import numpy as np

from energon_bridge.core.errors import (
    ConfigurationError,
    MetadataError,
    OrderVersionError,
    StateFormatError,
    StateVersionError,
)
from energon_bridge.core.mix import WeightSchedule, parse_weight
from energon_bridge.core.mix.weights import ChangedWeights, GivenWeights
from energon_bridge.core.order.changes import Ban, LeafBans
from energon_bridge.core.order.leaf_order import ORDER_VERSION
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.stream.lane_state import COUNTERS, LANE_COLUMNS, LARGEST, BufferedRefs, LaneState, Stage
from energon_bridge.core.stream.settings import StreamKind

FORMAT = "energon_bridge.state"
FORMAT_VERSION = 1

State = dict[str, Any]

_TEXTS = ("path", "split_part", "share", "subset")
_NUMBERS = {"num_lanes": (1, 1 << 20), "microbatches": (0, LARGEST), "epoch": (0, LARGEST), "epoch_steps": (0, LARGEST)}
"""Whole numbers of a run, with their ranges."""
_SETTINGS = {
    "seed": (-(1 << 64), 1 << 64),
    "batch_size": (1, 1 << 32),
    "packing_buffer_size": (1, 1 << 32),
    "packing_buffers": (1, 1 << 20),
    "max_tokens_per_microbatch": (1, 1 << 31),
    "max_samples_per_sequence": (1, LARGEST),
    "shuffle_buffer_size": (0, LARGEST),
    "parallel_shard_iters": (0, LARGEST),
    "balance_window": (1, 1 << 20),
    "balance_window_of": (1, 1 << 32),
}
"""Settings that are numbers or None."""
_MOST_SUM = 1 << 61
_ANY = -(1 << 63), (1 << 63) - 1
_MOST_COUNTED = 1 << 56
"""Bytes are counted, too."""
OF_THE_RUN = ("kind", "settings", *_NUMBERS)
_REQUIRED = {*OF_THE_RUN, "weights", "bans", "banned", "leaves", "lanes"}
_SHARE = re.compile(r"(\d{1,2000}(/0*[1-9]\d{0,2000})?)?", re.ASCII)
_SUBSET = re.compile(r"(\d{1,15}):(\d{1,15})( where .{1,9000})?", re.ASCII | re.DOTALL)


COUNTED = ("out", "done", "again", "dropped")
"""What is counted of samples that a loader keeps until they are done; the first follows from their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOut:
    """Samples that were delivered and are not done, of some ranks (`outstanding.py`).

    Attributes:
        ranks: Whose they are, ascending.
        size: The ranks of the run.
        rows: `COLUMNS` of each sample, shape (samples, 7): the pass and the place in the order of delivery, the
            reference to the sample, and the rollouts that are left.
        counts: How many were done, came again and were dropped.
        ended: Whether the program has seen the end of the pass.
    """

    COLUMNS: ClassVar[tuple[tuple[int, int], ...]] = (
        *((0, LARGEST), (0, _MOST_SUM), (0, LARGEST), _ANY, (0, LARGEST), (0, 1 << 32), (1, 1 << 32)),
    )

    ranks: tuple[int, ...]
    size: int
    rows: IntArray
    counts: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The contents of a state, read and checked.

    Attributes:
        changes: The changes of weights during the run.
        banned: The banned samples of each leaf, by identity.
        leaves: Rows with identity, mark (empty in states of older versions), path, split_part, share, subset,
            num_samples, block (`LeafOrder.block`), counts (a dict) and parked; parked ones last.
        lanes: By number.
        ranks: For a finite stream: the number of ranks whose counts these are, and of ranks in the run; None: unknown.
        out: Samples that were delivered and are not done; None: the loader did not keep them.

    The other attributes are those of the state.
    """

    kind: StreamKind
    num_lanes: int
    microbatches: int
    epoch: int
    epoch_steps: int
    settings: State
    changes: ChangedWeights
    leaves: list[State]
    lanes: dict[int, LaneState]
    ranks: tuple[int, int] | None = None
    bans: tuple[Ban, ...] = ()
    banned: Mapping[str, LeafBans] = field(default_factory=dict)
    out: SavedOut | None = None

    @property
    def sharers(self) -> int:
        """The lanes that share each packing buffer, and count the same draws."""
        return self.num_lanes // (self.settings.get("packing_buffers") or self.num_lanes or 1) or 1

    @property
    def held(self) -> int:
        """The samples that were drawn and are not delivered yet; lanes that share a buffer hold the same ones."""
        return len(np.unique(BufferedRefs.joined([lane.held for lane in self.lanes.values()]).members, axis=0))


# Writing -------------------------------------------------------------------------------------------------------------


def sign(state: State) -> State:
    """Return a state with its checksum."""
    return state | {"checksum": _checksum(state)}


def _checksum(state: State) -> str:
    rest = {name: value for name, value in state.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write(saved: SavedRun) -> State:
    """Return the state of a run."""
    state = {name: getattr(saved, name) for name in OF_THE_RUN}
    state["weights"] = [[start, [each.to_plain() for each in given.schedules]] for start, given in saved.changes]
    state["bans"] = [[ban.start, [*ban.keys], *([ban.dataset] if ban.dataset else [])] for ban in saved.bans]
    state["banned"] = [
        [identity, encode_column(found.samples), encode_column(found.starts)]
        for identity, found in sorted(saved.banned.items())
    ]
    state |= {"format": FORMAT, "format_version": FORMAT_VERSION, "order_version": ORDER_VERSION}
    state |= {} if saved.ranks is None else {"ranks": list(saved.ranks)}
    if (out := saved.out) is not None:
        rows = [encode_column(column) for column in out.rows.T]
        ranks = [[*out.ranks], out.size]
        state["out"] = {"ranks": ranks, "size": len(out.rows), "rows": rows, "counts": [*out.counts]}
        state["out"]["ended"] = out.ended
    lanes = write_lanes(saved.lanes)
    if "unit" in saved.settings:
        nothing = (0,) * len(saved.leaves)
        states = [saved.lanes[number] for number in sorted(saved.lanes)]
        lanes["leaf_sums"] = encode_column([one for state in states for one in state.sums or nothing])
    return sign(state | {"leaves": _write_leaves(saved.leaves), "lanes": lanes})


def _write_leaves(leaves: Sequence[State]) -> State:
    counts = [leaf["counts"] for leaf in leaves]
    return {
        "identities": ["+".join(filter(None, (leaf["identity"], leaf["mark"]))) for leaf in leaves],
        **{f"{name}s": encode_text(tuple([leaf[name] for leaf in leaves])) for name in _TEXTS},
        "num_samples": encode_column([leaf["num_samples"] for leaf in leaves]),
        "blocks": encode_column([leaf["block"] for leaf in leaves]),
        "counts": {name: encode_column([row[name] for row in counts]) for name in COUNTERS},
        "parked": sum(leaf["parked"] for leaf in leaves),
    }


def write_lanes(lanes: Mapping[int, LaneState]) -> State:
    """Return the `lanes` entry of a state."""
    numbers = sorted(lanes)
    states = [lanes[number] for number in numbers]
    entry: State = {"numbers": encode_column(numbers)}
    for name, column in LANE_COLUMNS.items():
        values = [getattr(state, name) for state in states]
        entry[column.name] = encode_column(values) if any(values) else _zeros(len(values))
    entry["leaf_draws"] = encode_column([count for state in states for count in state.leaf_draws])
    # Write all entries even if nothing waits: torch.distributed.checkpoint reads the entries that a loader has now.
    entry |= {"held": _zeros(len(states)), "held_rows": [_zeros(0)] * 3, "held_members": [_zeros(0)] * 4}
    if any(len(state.held.rows) for state in states):
        rows = np.concatenate([state.held.rows for state in states])
        members = np.concatenate([state.held.members for state in states])
        entry["held"] = encode_column([len(state.held.rows) for state in states])
        entry["held_rows"] = [encode_column(column) for column in rows.T]
        entry["held_members"] = [encode_column(column) for column in members.T]
    return entry


@cache
def _zeros(size: int) -> str:
    return encode_column([0] * size)


# Columns and texts ---------------------------------------------------------------------------------------------------
#
# A *column* is the differences of integers, as little-endian integers of 1, 2, 4 or 8 bytes, zlib, base64, with the
# number of bytes in front ("2,…"). A *text* is zlib'd, base85 JSON of a list of strings. Its reader knows the length
# that it must have, and no more than that is unpacked: a damaged or hostile state costs no memory.

LONGEST_COLUMN = 1 << 25
"""Integers that a column may have: far more than the samples that wait in any run."""
_LONG_COLUMN = 4096
"""From so many integers on, zlib compresses faster instead of smaller."""
_STRING_BYTES = 1 << 16


def damaged(field: str, reason: str) -> StateFormatError:
    """Return the error for a field of a state."""
    return StateFormatError(
        f"the state is damaged: {field} {reason}. Use the state of another checkpoint, or a copy of this one"
    )


def encode_column(numbers: Iterable[int] | IntArray) -> str:
    """Return integers as one string."""
    array = numbers if isinstance(numbers, np.ndarray) else np.fromiter(numbers, dtype="<i8")
    steps = array.copy()
    steps[1:] -= array[:-1]
    most = max(-int(steps.min()), int(steps.max())) if steps.size else 0
    width = next((width for width in (1, 2, 4) if most < 1 << (8 * width - 1)), 8)
    packed = zlib.compress(steps.astype(f"<i{width}").tobytes(), 1 if steps.size >= _LONG_COLUMN else 9)
    return f"{width},{base64.b64encode(packed).decode()}"


def decode_column(text: object, size: int, field: str = "a column", *, at_most: bool = False) -> IntArray:
    """Return the integers of a column.

    Args:
        size: How many integers it must have.

    Raises:
        StateFormatError: It is no column, or not of this length.
    """
    if not isinstance(text, str) or text[:1] not in ("1", "2", "4", "8") or text[1:2] != ",":
        raise damaged(field, f"should be a column of integers, found {shown(text)}")
    if size > LONGEST_COLUMN:
        raise damaged(field, f"should have {size} integers, more than a state can hold ({LONGEST_COLUMN})")
    width = int(text[0])
    raw = _unpack(partial(base64.b64decode, validate=True), text[2:], width * size, field)
    if len(raw) % width or not (at_most or len(raw) == width * size):
        raise damaged(field, f"has {len(raw) / width:g} integers, expected {size}")
    return np.cumsum(np.frombuffer(raw, dtype=f"<i{width}"), dtype=np.int64)


@lru_cache(maxsize=64)  # names of leaves, which are the same in every state of a run
def encode_text(strings: tuple[str, ...]) -> str:
    """Return strings as one."""
    return base64.b85encode(zlib.compress(json.dumps(strings).encode(), 9)).decode()


def decode_text(text: object, size: int, field: str) -> list[str]:
    """Return the strings of a text, of which there must be `size`.

    Raises:
        StateFormatError: It is no text, or not of this length.
    """
    if not isinstance(text, str):
        raise damaged(field, f"should be a packed list of strings, found {shown(text)}")
    raw = _unpack(base64.b85decode, text, _STRING_BYTES * (size + 1), field)
    try:
        strings = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damaged(field, f"is not a list of strings ({error})") from error
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise damaged(field, "is not a list of strings")
    if len(strings) != size:
        raise damaged(field, f"has {len(strings)} strings, expected {size}")
    return strings


def _unpack(decode: Callable[[str], bytes], text: str, most: int, field: str) -> bytes:
    """Unpack a text, if it is complete and unpacks to at most so many bytes."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(decode(text), most + 1)
    except (ValueError, zlib.error) as error:
        raise damaged(field, f"cannot be unpacked ({error})") from error
    if len(raw) > most:
        raise damaged(field, f"unpacks to more than the {most} bytes allowed")
    if not unpacker.eof or unpacker.unused_data:
        raise damaged(field, "is cut off, or has extra bytes at its end")
    return raw


# Reading -------------------------------------------------------------------------------------------------------------


WHAT_A_STATE_IS = (
    "Pass what save_state_rank, save_state_global or state_dict returned; a run that has no state yet restores none"
)
OF_MEGATRON_ENERGON = (
    "this is a state of megatron-energon ({}), which orders samples differently, so it cannot be resumed here. Start "
    "at the step where it was saved: get_savable_loader(..., start_at=STEP)"
)


def _checked_format(state: Any) -> State:
    """Return the state if this version can read it and it is intact."""
    if type(state).__module__.startswith("megatron.energon"):
        raise StateFormatError(OF_MEGATRON_ENERGON.format(type(state).__name__))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = shown(state.get("format")) if isinstance(state, dict) else repr(type(state).__name__)
        hint = f". {WHAT_A_STATE_IS}"
        if isinstance(state, (str, os.PathLike)):
            hint = ". For a path, give what torch.load(path) returns"
        elif isinstance(state, dict):
            inside = [key for key, one in state.items() if isinstance(one, dict) and one.get("format") == FORMAT]
            hint = f". Its key {shown(inside[0])} holds one: restore that" if inside else hint
        raise StateFormatError(f"not a state of energon_bridge: expected format {FORMAT!r}, found {found}{hint}")
    version = state.get("format_version")
    if type(version) is not int or version < 1:
        raise damaged("format_version", f"should be a whole number of at least 1, found {shown(version)}")
    if version != FORMAT_VERSION:
        raise StateVersionError(
            f"the state has format version {version}, this version of energon_bridge reads version {FORMAT_VERSION}: "
            "upgrade energon_bridge"
        )
    order = state.get("order_version")
    if type(order) is not int:
        raise damaged("order_version", f"should be a whole number, found {shown(order)}")
    if order != ORDER_VERSION:
        raise OrderVersionError(
            f"the state was written under order version {order}, this version of energon_bridge orders samples by "
            f"version {ORDER_VERSION}: resume with the version that wrote it, or start a new run"
        )
    missing = _REQUIRED - state.keys()
    if missing:
        raise StateFormatError(f"the state is damaged: it has no {', '.join(sorted(missing))}")
    try:
        expected = _checksum(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise damaged("a field", f"holds a value that no state can hold ({shown(str(error))})") from error
    if state.get("checksum") != expected:
        raise damaged("checksum", f"is {shown(state.get('checksum'))}, the content gives {expected!r}")
    return state


def read(state: Any) -> SavedRun:
    """Return the contents of a state, checked.

    Raises:
        StateFormatError: It is no state, or damaged; the error names the field.
        StateVersionError: It was written in another format.
        OrderVersionError: It was written under other rules of order.
    """
    plain = _checked_format(state)
    kind = plain["kind"]
    if kind not in get_args(StreamKind):
        raise damaged("kind", f"should be one of {', '.join(get_args(StreamKind))}, found {shown(kind)}")
    numbers = {name: _number(plain[name], name, *ends) for name, ends in _NUMBERS.items()}
    settings = _read_settings(plain["settings"])
    leaves = read_leaves(plain)
    active = sum(not leaf["parked"] for leaf in leaves)
    changes = _read_weights(plain["weights"], active)
    lanes = _read_lanes(_entries(plain["lanes"], "lanes"), leaves, numbers["num_lanes"])
    return SavedRun(
        kind=kind,
        **numbers,
        settings=settings,
        changes=changes,
        leaves=leaves,
        lanes=lanes,
        ranks=_read_ranks(plain.get("ranks")),
        bans=_read_bans(plain["bans"]),
        banned=_read_banned(plain["banned"], leaves),
        out=_read_out(plain["out"], leaves) if "out" in plain else None,
    )


def _read_ranks(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise damaged("ranks", f"should be two numbers, found {shown(value)}")
    size = _number(value[1], "ranks", 1, LARGEST)
    return _number(value[0], "ranks", 1, size), size


def _read_out(value: Any, leaves: Sequence[State]) -> SavedOut:
    entry = _entries(value, "out")
    ranks = _entry(entry, "ranks", "out")
    counts = _entry(entry, "counts", "out")
    if not isinstance(ranks, list) or len(ranks) != 2 or not isinstance(ranks[0], list) or not ranks[0]:
        raise damaged("out.ranks", f"should be a list of ranks and their number, found {shown(ranks)}")
    if not isinstance(counts, list) or len(counts) != 3:
        raise damaged("out.counts", f"should be three numbers, found {shown(counts)}")
    if not isinstance(ended := _entry(entry, "ended", "out"), bool):
        raise damaged("out.ended", f"should be true or false, found {shown(ended)}")
    size = _number(ranks[1], "out.ranks", 1, LARGEST)
    owners = [_number(rank, "out.ranks", 0, size - 1) for rank in ranks[0]]
    if any(later <= rank for rank, later in pairwise(owners)):
        raise damaged("out.ranks", "should be in ascending order")
    held = _number(_entry(entry, "size", "out"), "out.size", 0, LONGEST_COLUMN)
    rows = _read_array(entry, "rows", held, SavedOut.COLUMNS, "out")
    _check_samples(rows[:, 2:], leaves, "out.rows")
    if len({*map(tuple, rows[:, 2:6].tolist())}) < held:
        raise damaged("out.rows", "should name each sample once")
    return SavedOut(
        ranks=tuple(owners),
        size=size,
        rows=rows,
        counts=tuple(_number(count, "out.counts", 0, _MOST_COUNTED) for count in counts),
        ended=ended,
    )


def read_lanes(state: State) -> dict[int, LaneState]:
    """Return the lanes of a state by number."""
    return read(state).lanes


def read_leaves(state: State) -> list[State]:
    """Return the leaves of a state, as `SavedRun` has them."""
    entry = _entries(state["leaves"], "leaves")
    identities = _entry(entry, "identities", "leaves")
    if not isinstance(identities, list) or not all(isinstance(identity, str) for identity in identities):
        raise damaged("leaves.identities", "should be a list of strings")
    marks = [one.partition("+")[2] for one in identities]
    identities = [one.partition("+")[0] for one in identities]
    if len(set(identities)) != len(identities):
        raise damaged("leaves.identities", "should name each leaf once")
    size = len(identities)
    parked = _number(_entry(entry, "parked", "leaves"), "leaves.parked", 0, size)
    columns: dict[str, Sequence[Any]] = {
        name: decode_text(_entry(entry, f"{name}s", "leaves"), size, f"leaves.{name}s") for name in _TEXTS
    }
    columns["num_samples"] = _column(entry, "leaves", "num_samples", size, 1, LARGEST).tolist()
    columns["block"] = _column(entry, "leaves", "blocks", size, 0, 1 << 32).tolist()
    columns["identity"] = identities
    columns["mark"] = marks
    columns["parked"] = [number >= size - parked for number in range(size)]
    counted = _entries(_entry(entry, "counts", "leaves"), "leaves.counts")
    counts = [_column(counted, "leaves.counts", name, size, 0, _MOST_COUNTED) for name in COUNTERS]
    columns["counts"] = [dict(zip(COUNTERS, row, strict=True)) for row in np.stack(counts, axis=1).tolist()]
    leaves = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for leaf in leaves:
        if not _SHARE.fullmatch(leaf["share"]):
            raise damaged("leaves.shares", f"should hold fractions, found {shown(leaf['share'])}")
        first, last = _lines(leaf)
        if last - first != leaf["num_samples"] and not (
            " where " in leaf["subset"] and last - first > leaf["num_samples"]
        ):
            raise damaged("leaves.subsets", f"has {shown(leaf['subset'])} for {leaf['num_samples']} samples")
    return leaves


def _lines(leaf: State) -> tuple[int, int]:
    """Return the first sample of a leaf in its dataset, and the one after its last."""
    if not leaf["subset"]:
        return 0, leaf["num_samples"]
    found = _SUBSET.fullmatch(leaf["subset"])
    if found is None:
        raise damaged("leaves.subsets", f"should hold ranges like '10:20', found {shown(leaf['subset'])}")
    return int(found[1]), int(found[2])


def _read_lanes(entry: State, leaves: Sequence[State], num_lanes: int) -> dict[int, LaneState]:
    numbers = _column(entry, "lanes", "numbers", num_lanes, 0, num_lanes - 1, at_most=True)
    if len(numbers) > 1 and np.diff(numbers).min() <= 0:
        raise damaged("lanes.numbers", "should be in ascending order")
    size = len(numbers)
    columns: dict[str, list[int]] = {
        name: _column(entry, "lanes", column.name, size, 0, column.most).tolist()
        if column.since_0_1_0 or column.name in entry
        else [0] * size
        for name, column in LANE_COLUMNS.items()
    }
    draws = _column(entry, "lanes", "leaf_draws", size * len(leaves), 0, LARGEST).reshape(size, len(leaves))
    if (draws.sum(axis=1) > columns["draw"]).any():
        raise damaged("lanes.leaf_draws", "counts more draws from the leaves than the lane made")
    sums: list[list[int]] = [[]] * size
    if "leaf_sums" in entry:
        found = _column(entry, "lanes", "leaf_sums", size * len(leaves), 0, _MOST_SUM)
        sums = found.reshape(size, len(leaves)).tolist()
    held = _read_held(entry, leaves, size)
    return {
        number: LaneState(
            leaf_draws=tuple(of_leaves), held=rows, sums=tuple(summed), **dict(zip(columns, values, strict=True))
        )
        for number, of_leaves, rows, summed, *values in zip(
            numbers.tolist(), draws.tolist(), held, sums, *columns.values(), strict=True
        )
    }


def _read_held(entry: State, leaves: Sequence[State], lanes: int) -> list[BufferedRefs]:
    sizes = _column(entry, "lanes", "held", lanes, 0, 1 << 32)
    rows = _read_array(entry, "held_rows", int(sizes.sum()), ((0, max(Stage)), (1, 1 << 32), (-1, 1 << 32)), "lanes")
    active = [leaf for leaf in leaves if not leaf["parked"]]
    ranges = (0, len(active) - 1), _ANY, (0, LARGEST), (0, 1 << 32)
    members = _read_array(entry, "held_members", int(rows[:, 1].sum()), ranges, "lanes")
    _check_samples(members, active, "lanes.held_members[1]")
    starts = np.concatenate(([0], np.cumsum(rows[:, 1])))
    last_rows = np.cumsum(sizes).tolist()
    return [
        BufferedRefs(rows[end - size : end], members[starts[end - size] : starts[end]])
        for end, size in zip(last_rows, sizes.tolist(), strict=True)
    ]


def _check_samples(refs: IntArray, leaves: Sequence[State], field: str) -> None:
    """Raise if references, (leaf, sample, ...) each, name a leaf or a sample that is not there."""
    of_leaf = _in_range(refs[:, 0], field, 0, len(leaves) - 1)
    ends = np.array([_lines(leaf) for leaf in leaves], dtype=np.int64).reshape(-1, 2)
    outside = (refs[:, 1] < ends[of_leaf, 0]) | (refs[:, 1] >= ends[of_leaf, 1])
    if outside.any():
        leaf, sample = refs[outside][0, :2].tolist()
        first, last = _lines(leaves[leaf])
        raise damaged(
            field, f"names sample {sample} of {leaves[leaf]['path'][:200]}, which has samples {first} to {last - 1}"
        )


def _read_array(entry: State, name: str, size: int, ranges: Sequence[tuple[int, int]], of: str) -> IntArray:
    columns = _entry(entry, name, of)
    if not isinstance(columns, list) or len(columns) != len(ranges):
        raise damaged(f"{of}.{name}", f"should be a list of {len(ranges)} columns")
    parts = []
    for number, (column, ends) in enumerate(zip(columns, ranges, strict=True)):
        where = f"{of}.{name}[{number}]"
        parts.append(_in_range(decode_column(column, size, where), where, *ends))
    return np.stack(parts, axis=1)


def _read_settings(settings: Any) -> State:
    entries = _entries(settings, "settings")
    for name, value in entries.items():
        if name in _SETTINGS and value is not None:
            _number(value, f"settings.{name}", *_SETTINGS[name])
        elif not isinstance(value, (str, int, float, bool, list, tuple, type(None))):
            raise damaged(f"settings.{name}", f"should be a plain value, found a {type(value).__name__}")
    _entry(entries, "seed", "settings")
    return entries


def _read_weights(weights: Any, leaves: int) -> ChangedWeights:
    if not isinstance(weights, (list, tuple)):
        raise damaged("weights", f"should be a list, found a {type(weights).__name__}")
    for change in weights:
        if not isinstance(change, (list, tuple)) or len(change) != 2 or not isinstance(change[1], (list, tuple)):
            raise damaged("weights", "should hold pairs of global draw and list of weights")
        _number(change[0], "weights", 0, LARGEST)
        if len(change[1]) != leaves:
            raise damaged("weights", f"has {len(change[1])} weights for {leaves} leaves")
    try:
        changes = tuple((int(draw), GivenWeights(schedules=_schedules(given))) for draw, given in weights)
    except (ConfigurationError, MetadataError, TypeError, ValueError, ArithmeticError) as error:
        raise damaged("weights", f"cannot be read ({shown(str(error))})") from error
    starts = [start for start, _ in changes]
    if any(later <= start for start, later in pairwise(starts)):
        raise damaged("weights", "should be in order of their draws")
    return changes


def _schedules(weights: Sequence[Any]) -> tuple[WeightSchedule, ...]:
    return tuple(parse_weight(weight, where="the state", field="weights") for weight in weights)


def _read_bans(bans: Any) -> tuple[Ban, ...]:
    if not isinstance(bans, (list, tuple)):
        raise damaged("bans", f"should be a list, found {shown(bans)}")
    found = []
    for entry in bans:
        if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3) or not isinstance(entry[1], (list, tuple)):
            raise damaged("bans", "should hold a global draw, a list of keys and perhaps a dataset's path each")
        start, keys, *dataset = entry
        _number(start, "bans", 0, LARGEST)
        wrong = [text for text in (*keys, *dataset) if not isinstance(text, str) or not text]
        if wrong or not keys:
            raise damaged("bans", f"should hold non-empty strings, found {shown([*wrong, keys][0])}")
        found.append(Ban(start=start, keys=tuple(keys), dataset=dataset[0] if dataset else ""))
    places = [(ban.start, ban.dataset) for ban in found]
    if any(later <= place for place, later in pairwise(places)):
        raise damaged("bans", "should be in order of their draws")
    return tuple(found)


def _read_banned(entries: Any, leaves: Sequence[State]) -> dict[str, LeafBans]:
    if not isinstance(entries, (list, tuple)):
        raise damaged("banned", f"should be a list, found {shown(entries)}")
    rows = {leaf["identity"]: leaf for leaf in leaves if not leaf["parked"]}
    found = {}
    for entry in entries:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not isinstance(entry[0], str):
            raise damaged("banned", "should hold an identity and two columns for each leaf")
        identity, samples, starts = entry
        if identity not in rows or identity in found:
            raise damaged("banned", f"should name each leaf of the mix at most once, found {shown(identity)}")
        first, last = _lines(rows[identity])
        samples = decode_column(samples, min(last - first, LONGEST_COLUMN), "banned", at_most=True)
        if not samples.size or (np.diff(samples) <= 0).any():
            raise damaged("banned", "should hold samples in ascending order")
        _in_range(samples, "banned", first, last - 1)
        starts = _in_range(decode_column(starts, samples.size, "banned"), "banned", 0, LARGEST)
        found[identity] = LeafBans(samples=samples, starts=starts)
    return found


def _entries(value: Any, field: str) -> State:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise damaged(field, f"should be a dict with names, found {shown(value)}")
    return value


def _entry(entries: State, name: str, where: str) -> Any:
    if name not in entries:
        raise damaged(f"{where}.{name}", "is missing")
    return entries[name]


def _column(
    entries: State, where: str, name: str, size: int, least: int, most: int, *, at_most: bool = False
) -> IntArray:
    """Return the integers of a column, which must be in a range."""
    field = f"{where}.{name}"
    return _in_range(decode_column(_entry(entries, name, where), size, field, at_most=at_most), field, least, most)


def _number(value: Any, field: str, least: int, most: int) -> int:
    if type(value) is not int:
        raise damaged(field, f"should be a whole number, found {shown(value)}")
    if not least <= value <= most:
        raise damaged(field, f"should be a number from {least} to {most}, found {shown(value)}")
    return value


def _in_range(values: IntArray, field: str, least: int, most: int) -> IntArray:
    wrong = (values < least) | (values > most)
    if wrong.any():
        raise damaged(field, f"should have numbers from {least} to {most}, found {int(values[wrong][0])}")
    return values


def shown(value: Any) -> str:
    """Return a value for a message: short, whatever it is."""
    if type(value) is int and abs(value) >= 1 << 128:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:200] if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"


def leaf_rows(saved: SavedRun) -> list[State]:
    """Return a row of plain values for each leaf of a state, parked ones last.

    Returns:
        Rows with identity, path, split_part, subset, share, num_samples and parked; `draws` from the leaf and `epochs`
        (draws / num_samples), None for a finite stream, whose passes are counted as a whole; `epoch_samples`, its
        samples in an epoch of the mix, with repetitions; `of_lanes`, the share of the lanes that the state has;
        `waiting_in_groups`, samples in groups that are not full; and the counters samples (delivered), skipped, errors,
        excluded, bytes, and of samples too long for a sequence or pack: dropped, truncated, split and pieces.
    """
    lanes = saved.lanes.values()
    repeats = saved.settings.get("mode") == "repetitions"
    waiting = sum((lane.held.samples(Stage.GROUP, len(saved.leaves)) for lane in lanes), np.zeros(len(saved.leaves)))
    rows = []
    for number, leaf in enumerate(saved.leaves):
        draws = sum(lane.leaf_draws[number] for lane in lanes) // saved.sharers if saved.kind == "train" else None
        names = ("identity", "path", "split_part", "subset", "share", "num_samples", "parked")
        row = {name: leaf[name] for name in names}
        row["draws"] = draws
        row["epochs"] = None if draws is None else draws / leaf["num_samples"]
        row["epoch_samples"] = float(leaf["num_samples"] * Fraction(leaf["share"] or 1 if repeats else 1))
        row["of_lanes"] = len(lanes) / saved.num_lanes
        row["waiting_in_groups"] = int(waiting[number])
        rows.append(row | leaf["counts"])
    return rows

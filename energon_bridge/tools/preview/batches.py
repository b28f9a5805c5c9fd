"""Batches as a model gets them: each row token by token, and the source of each of its samples.

The loader itself delivers them, from the beginning of the run or from a saved state, one rank after the other in this
process. So they are what training gets: packed, grouped or mixed, on any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import groupby
from typing import Any

from energon_bridge.core.datasets import get_savable_loader
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.position import OnMismatch
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.loader.saved_run import State, read
from energon_bridge.core.order.choose import blend_position
from energon_bridge.core.order.topology import first_microbatch, step_of
from energon_bridge.core.samples import Segment, field_names
from energon_bridge.core.stream.lane_state import BatchKey, RowKey, SampleKey, read_key
from energon_bridge.tools.preview.records import Picture, ShownItem, items_of, picture_of
from energon_bridge.tools.preview.sample_source import DrawnSample

logger = logging.getLogger(__name__)

_WORDS = ("▁", "Ġ")
"""Characters that stand for the space before a word in the vocabularies of tokenizers."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token, or a run of tokens shown as one: those of an image, or padding.

    Attributes:
        kind: What it is.
        text: Its text.
        label: The text of its label (of a run: of the last token), which the model learns here; None without loss.
        count: Tokens of the run.
    """

    kind: str
    text: str
    label: str | None = None
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSegment:
    """A sample in a row: its position, its tokens, and its pictures in the order of their tokens."""

    segment: Segment
    tokens: Sequence[Token] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    """A row of a batch: its samples, whether it is real, and its other fields."""

    valid: bool
    length: int
    padding: int
    segments: Sequence[ShownSegment]
    members: Sequence[SampleKey] = ()
    fields: Sequence[tuple[str, tuple[ShownItem, ...]]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownBatch:
    """The batch of a rank in a step; the number of the microbatch is None if it is masked.

    `inputs` are the pixels, features and masks that the model gets beside tokens: name, shape and type.
    """

    step: int
    rank: int
    microbatch: int | None
    kind: str
    rows: Sequence[ShownRow]
    inputs: Sequence[str] = ()

    def drawn(self) -> Iterator[DrawnSample]:
        """Yield the samples of all real rows."""
        for number, row in enumerate(self.rows):
            for position, member in enumerate(row.members if row.valid else ()):
                facts = {"step": self.step, "rank": self.rank, "row": number}
                facts |= {"microbatch": self.microbatch} if self.microbatch is not None else {}
                facts |= {"in row": position} if len(row.members) > 1 else {}
                yield DrawnSample(key=member, facts=facts)


def plain_batch(batch: ShownBatch) -> dict[str, Any]:
    """Return a batch as JSON has it, without pictures."""
    head = {"step": batch.step, "rank": batch.rank, "microbatch": batch.microbatch, "inputs": list(batch.inputs)}
    return head | {"rows": [_plain_row(row) for row in batch.rows]}


def _plain_row(row: ShownRow) -> dict[str, Any]:
    segments = [one.segment._asdict() | {"tokens": [asdict(token) for token in one.tokens]} for one in row.segments]
    return {"valid": row.valid, "length": row.length, "padding": row.padding, "segments": segments}


def delivered(
    spec: DatasetSpec,
    steps: range,
    *,
    world_size: int,
    state: State | None = None,
    rank: int | None = None,
    per_step: int = 1,
    on_mismatch: OnMismatch = "refuse",
) -> list[ShownBatch]:
    """Run the loader and return some of its steps, by step and rank.

    Args:
        spec: What the run reads, with its task encoder.
        steps: Numbers of the steps, counted from the beginning of the run on `world_size` ranks.
        world_size: Data-parallel ranks.
        state: The position to load from; without it, loading begins with the run.
        rank: Return the steps of this rank only.
        per_step: Microbatches of a rank in a step.
        on_mismatch: Whether the run goes on from a state of other data, as `SavableDataLoader.restore_state_rank` says.

    Raises:
        ConfigurationError: The state is after the first step, or between two steps of this number of ranks.
    """
    batches = []
    for number in range(world_size) if rank is None else (rank,):
        for step, batch, lanes in _deliver(spec, steps, world_size, number, state, per_step, on_mismatch):
            batches.append(shown(batch, spec.settings.task_encoder, step=step, rank=number, num_lanes=lanes))
    return sorted(batches, key=lambda batch: (batch.step, batch.rank))  # stable: those of a step and rank stay in order


def _deliver(
    spec: DatasetSpec,
    steps: range,
    world_size: int,
    rank: int,
    state: State | None,
    per_step: int,
    on_mismatch: OnMismatch,
) -> Iterator[tuple[int, Any, int]]:
    config = replace(
        spec.worker_config, rank=rank, world_size=world_size, num_workers=0, data_parallel_group=None, pin_memory=False
    )
    loader = get_savable_loader(spec, worker_config=config, watchdog_timeout_seconds=None, on_mismatch=on_mismatch)
    try:
        if state is not None:
            loader.restore_state_rank(state)
        first = 0 if state is None else _step_of(state, loader.ownership.num_lanes, world_size)
        asked = range(steps.start * per_step, steps.stop * per_step)
        if asked.start < first:
            raise ConfigurationError(
                f"step {steps.start} is before the state, which is at step {-(-first // per_step)} of "
                f"{world_size} ranks: give an older state, or none to start at step 0"
            )
        if asked.start - first > 100:
            logger.warning(
                "rank %d: loading %d batches to reach step %d; a saved state near that step avoids this",
                rank,
                asked.start - first,
                steps.start,
            )
        for number, batch in zip(range(first, asked.stop), loader, strict=False):
            if number >= asked.start:
                yield number // per_step, batch, loader.ownership.num_lanes
    finally:
        loader.close()


def was_changed(spec: DatasetSpec, state: State) -> bool:
    """Return whether a run from its beginning is not the one of a state: its mix, weights or bans have changed."""
    saved = read(state)
    plan = plan_run(spec, spec.worker_config, saved.num_lanes)
    if saved.bans or saved.changes or [row["identity"] for row in saved.leaves] != [x["identity"] for x in plan.table]:
        return True
    return any(
        lane.origin
        or [*lane.leaf_draws] != blend_position(plan.leaves, plan.blend, number % plan.streams, lane.draw).leaf_draws
        for number, lane in saved.lanes.items()
    )


def reads_same(spec: DatasetSpec, state: State) -> bool:
    """Return whether the datasets of a run are those of a state."""
    present = [row["identity"] for row in read(state).leaves if not row["parked"]]
    return present == [row["identity"] for row in plan_run(spec, spec.worker_config).table]


def next_step(spec: DatasetSpec, world_size: int, state: State | None = None) -> int:
    """Return the next step of a state, 0 without a state."""
    if state is None:
        return 0
    lanes = read(state).num_lanes if spec.kind == "train" else plan_run(spec, spec.worker_config).num_lanes
    return _step_of(state, lanes, world_size)


def _step_of(state: State, lanes: int, world_size: int) -> int:
    """Return the next step of a state."""
    microbatches = int(state["microbatches"])
    step = step_of(microbatches, num_lanes=lanes, world_size=world_size)
    if first_microbatch(step, num_lanes=lanes, world_size=world_size) != microbatches:
        raise ConfigurationError(
            f"the state is at microbatch {microbatches}, where no step of {world_size} ranks starts ({lanes} "
            "lanes): give the number of ranks that it was saved with (--world-size)"
        )
    return step


def shown(batch: Any, encoder: Any, *, step: int, rank: int, num_lanes: int) -> ShownBatch:
    """Return what is shown of a batch.

    Args:
        batch: As the loader delivers it.
        encoder: The task encoder, whose tokenizer decodes the tokens.
        step, rank: The step in which, and the rank to which, it was delivered.
        num_lanes: Lanes of the run.
    """
    get = _getter(batch)
    key = get("__restore_key__")
    named = read_key(key) if key else None
    members = _members(named)
    mask = get("__valid__")
    valid = [True] * len(members) if mask is None else [bool(value) for value in mask.tolist()]
    number = named.lane + named.number * num_lanes if isinstance(named, BatchKey) else None
    tokens = get("tokens")
    if named is None and not (isinstance(batch, dict) or is_dataclass(batch)):  # what a batch is of is not known
        entries = batch if isinstance(batch, (list, tuple)) else [batch]
        rows = [
            ShownRow(valid=True, length=0, padding=0, segments=(), fields=[("value", items_of(entry))])
            for entry in entries
        ]
    elif tokens is None or getattr(tokens, "ndim", 0) != 2 or not get("segments"):
        rows = [
            ShownRow(valid=valid[row], length=0, padding=0, segments=(), members=some, fields=_row(batch, row, valid))
            for row, some in enumerate(members)
        ]
    else:
        rows = list(_token_rows(get, TokenNames(encoder), valid, members))
    return ShownBatch(
        step=step,
        rank=rank,
        microbatch=number if any(valid) else None,
        kind=type(batch).__name__,
        rows=rows,
        inputs=_inputs(get),
    )


def _inputs(get: Callable[[str], Any]) -> list[str]:
    named = {"pixel_values": get("pixel_values"), **(get("visual_inputs") or {})}
    return [
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in named.items()
        if hasattr(value, "shape")
    ]


def _getter(batch: Any) -> Callable[[str], Any]:
    return batch.get if isinstance(batch, dict) else lambda name: getattr(batch, name, None)


def _members(named: RowKey | BatchKey | None) -> list[list[SampleKey]]:
    """Return the restore keys of the samples of each row of a batch."""
    rows = named.rows if isinstance(named, BatchKey) else (named,) if named else ()
    return [list(row.samples) for row in rows]


def _row(batch: Any, row: int, valid: Sequence[bool]) -> list[tuple[str, tuple[ShownItem, ...]]]:
    """Return the fields of one row of a batch of any type: its entry in each field that has one per row."""
    names: Iterable[str] = batch if isinstance(batch, dict) else field_names(type(batch)) if is_dataclass(batch) else ()
    get = _getter(batch)
    keys = get("__key__")
    batched = isinstance(keys, list)
    fields = [("key", items_of(keys[row] if batched and row < len(keys) else keys))] if keys else []
    for name in names:
        value = get(name)
        if name.startswith("__") or value is None:
            continue
        column = isinstance(value, (list, tuple)) or len(getattr(value, "shape", ())) > 0
        if batched and column and len(value) == len(valid):
            value = value[row]
        elif row:
            continue  # fields that belong to no row are shown once
        fields.append((name, items_of(value, name)))
    return fields


_CUT = "\ufffd"
"""What decoders write for bytes that are no whole character."""
_MOST_CUT = 8
"""The most tokens that are looked at for one character; UTF-8 has four bytes."""


class TokenNames:
    """The text of each token by an encoder's tokenizer, and whether it is text, special, or part of an image."""

    def __init__(self, encoder: Any) -> None:
        self._tokenizer = getattr(encoder, "tokenizer", None)
        self.images: frozenset[int] = frozenset(getattr(encoder, "image_token_ids", ()))
        self.special = frozenset(getattr(self._tokenizer, "all_special_ids", ())) - self.images
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the text of a token, with the space before a word."""
        if token not in self._texts:
            self._texts[token] = self._decoded(token)
        return self._texts[token]

    def texts(self, tokens: Sequence[int | None]) -> list[str | None]:
        """Return the texts of tokens in a row; None for None.

        A character of several tokens is the text of the last of them, and those before it have none.
        """
        texts = [None if token is None else self.text(token) for token in tokens]
        waiting: list[int] = []  # the places of tokens that end within a character
        for place, text in enumerate(texts):
            if text is None or _CUT not in text:
                waiting = []
                continue
            waiting = [*waiting, place][-_MOST_CUT:]
            for first in range(len(waiting) - 1):  # a character may begin after one that is damaged
                whole = self._decoded(*(token for at in waiting[first:] if (token := tokens[at]) is not None))
                if _CUT not in whole:
                    texts[waiting[first] : place + 1] = [*[""] * (place - waiting[first]), whole]
                    waiting = []
                    break
        return texts

    def _decoded(self, *tokens: int) -> str:
        token = tokens[0]
        try:
            tokenizer: Any = self._tokenizer
            text = str(tokenizer.decode([*tokens]))
            piece = getattr(tokenizer, "convert_ids_to_tokens", lambda _: "")(token)
        except Exception:  # an unknown id, or a tokenizer that cannot decode
            return f"#{token}"
        begins = isinstance(piece, str) and piece.startswith(_WORDS) and not text.startswith(" ")
        return " " + text if begins else text

    def kind(self, token: int) -> str:
        """Return whether a token is part of an image, a special token or text."""
        return "image" if token in self.images else "special" if token in self.special else "text"


def _token_rows(
    get: Callable[[str], Any], names: TokenNames, valid: Sequence[bool], members: Sequence[list[SampleKey]]
) -> Iterator[ShownRow]:
    """Yield the rows of a batch of tokens; `members` are the samples of each row, `valid` says which rows are real."""
    tokens, labels, losses = (_rows(get(name)) for name in ("tokens", "labels", "loss_mask"))
    counts = iter(get("num_images") or ())
    pictures = iter(_pictures(get("pixel_values"), sum(get("num_images") or ())))
    for row, ids in enumerate(tokens):
        segments = []
        learned = losses[row] if losses else [0.0] * len(ids)
        for segment in get("segments")[row]:
            part = slice(segment.start, segment.start + segment.length)
            said = _tokens(ids[part], labels[row][part] if labels else [], learned[part], names)
            some = [picture for _, picture in zip(range(next(counts, 0)), pictures, strict=False)]
            segments.append(ShownSegment(segment=segment, tokens=said, pictures=some))
        used = sum(one.segment.length for one in segments)
        yield ShownRow(
            valid=valid[row] if row < len(valid) else True,
            length=len(ids),
            padding=len(ids) - used,
            segments=segments,
            members=members[row] if row < len(members) else (),
        )


def _rows(value: Any) -> list[list[Any]]:
    return [] if value is None else value.tolist()


def _tokens(ids: Sequence[int], labels: Sequence[int], learned: Sequence[float], names: TokenNames) -> list[Token]:
    """Return the tokens of a segment; those of an image count as one."""
    said = names.texts([label if loss else None for label, loss in zip(labels, learned, strict=False)])
    said += [None] * (len(ids) - len(said))
    texts = names.texts(ids)
    tokens = []
    for kind, run in groupby(range(len(ids)), lambda position: names.kind(ids[position])):
        positions = list(run)
        # The last token of an image may carry loss: its label is the token that follows.
        if kind == "image" and all(said[position] is None for position in positions[:-1]):
            tokens.append(Token(kind, names.text(ids[positions[0]]), said[positions[-1]], len(positions)))
        else:
            tokens += [Token(kind, texts[position] or "", said[position]) for position in positions]
    return tokens


def _pictures(pixels: Any, count: int) -> list[Picture]:
    """Return the images of a batch as the model gets them; none if its pixels are not laid out by image."""
    if pixels is None or getattr(pixels, "ndim", 0) != 4 or len(pixels) != count:
        return []
    made = (picture_of(image) for image in pixels)
    return [picture for picture in made if picture is not None]

"""Random mixes, and random chains of topologies that deliver them: hypothesis strategies over a few small datasets.

A tree is what a metadataset's split says, with paths relative to the folder of the datasets, so that a failing case can
be read, and pasted into a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chain_cases import fits, range_of
from engine import ENCODERS, NEEDED, text_dataset
from hypothesis import strategies as st
from keyed import BOTH, keyed_dataset, shards, shuffled
from mixing import metadataset, mixed

from energon_bridge.loader.run_plan import DatasetSpec
from energon_bridge.mix import Blender
from energon_bridge.mix.subset import SubsetRange

SHARDS = {"one": [1], "few": [3, 2], "some": [5, 7], "odd": [9, 1, 14], "many": [20, 3, 17, 8]}
KEYS = [f"{number:05d}" for number in range(20)]
MATCHED = 14
JOINS = {"join skip": MATCHED, "join none": len(KEYS)}
SIZES = {name: sum(counts) for name, counts in SHARDS.items()} | JOINS

Tree = dict[str, Any]
Kind = Literal["leaf", "concat", "blend", "blend_epochized"]
CHILDREN: dict[Kind, tuple[Kind, ...]] = {
    "concat": ("leaf", "concat"),
    "blend": ("leaf", "concat", "blend"),
    "blend_epochized": ("leaf", "concat", "blend_epochized"),
}
PERCENT = [["0%", "50%"], ["25%", "75%"], ["40%", "end"], ["87.5%", "100%"], ["0%", "100%"]]
ABSOLUTE: list[list[Any]] = [[0, 1], [3, 5], [2, "end"], [1, 11]]
BATCHING = ("refusing", "batches")
RANKS = [1, 2, 3, 4, 6, 8, 5, 7, 9, 10, 16, 23]


def write_datasets(folder: Path) -> Path:
    """Write the datasets that trees are over: texts, and two to be joined, with keys that are numbers."""
    for name, counts in SHARDS.items():
        text_dataset(folder / name, train=counts)
    keyed_dataset(folder / "left", train=shards(KEYS, 7, 8, 5))
    keyed_dataset(folder / "right", train=shards([*shuffled(KEYS[-MATCHED:]), "more"], 4, 11))
    return folder


# Trees ---------------------------------------------------------------------------------------------------------------


@st.composite
def leaves(draw: st.DrawFn, outer: tuple[SubsetRange, ...]) -> Tree:
    """Draw a dataset or a join within the ranges around it."""
    name = draw(st.sampled_from([name for name in SIZES if fits(SIZES[name], outer)]))
    if name in JOINS:
        entries = [{"path": "./left"}, {"path": "./right", "nonmatch": name.split()[1]}]
        named = draw(st.booleans())
        tree: Tree = {"join": dict(zip(("first", "second"), entries, strict=True)) if named else entries}
        tree["joiner"] = BOTH
    else:
        tree = {"path": f"./{name}"}
    ranges = [bounds for bounds in PERCENT + ABSOLUTE if fits(SIZES[name], (range_of(bounds), *outer))]
    bounds = draw(st.none() | st.sampled_from(ranges)) if ranges else None
    if bounds is not None:
        tree["subset"] = {"range": bounds}
    multiplier = draw(st.sampled_from([1, 1, 1, None, 2]))
    return tree if multiplier == 1 else tree | {"shuffle_over_epochs_multiplier": multiplier}


@st.composite
def weights(draw: st.DrawFn, positive: bool) -> Any:
    """Draw a weight, as a file has it: a number or a schedule."""
    number = st.integers(int(positive), 9) | st.sampled_from([0.1, 0.25, 1.5, 2.75])
    kind = draw(st.sampled_from([None, None, "steps", "linear", "cosine"]))
    if kind is None:
        return draw(number)
    draws = sorted(draw(st.sets(st.sampled_from([0, 1, 24, 50, 75, 100, 300, 2000]), min_size=1, max_size=3)))
    return {"schedule": kind, "points": [[at, draw(number)] for at in draws]}


@st.composite
def repetitions(draw: st.DrawFn, positive: bool) -> float:
    return draw(st.sampled_from([1, 2, 3, 0.5, 0.25, 1.25, 0.3, 1.7, *([] if positive else [0])]))


@st.composite
def trees(draw: st.DrawFn, kinds: tuple[Kind, ...], depth: int = 3, outer: tuple[SubsetRange, ...] = ()) -> Tree:
    """Draw a whole mix, of legal nestings only; nothing in it is empty."""
    kind = draw(st.sampled_from(kinds if depth else ("leaf",)))
    if kind == "leaf":
        return draw(leaves(outer))
    bounds = None
    if len(outer) < 2:
        ranges = [bounds for bounds in PERCENT if fits(SIZES["many"], (*([range_of(bounds)]), *outer))]
        bounds = draw(st.sampled_from([None, None, *ranges]))
    inner = outer if bounds is None else (range_of(bounds), *outer)
    count = draw(st.integers(1, 4 if depth == 3 else 3))
    children = [draw(trees(CHILDREN[kind], depth - 1, inner)) for _ in range(count)]
    sure = draw(st.integers(0, count - 1))
    for number, child in enumerate(children):
        if kind == "blend":
            child["weight"] = draw(weights(number == sure))
        elif kind == "blend_epochized":
            child["repetitions"] = draw(repetitions(number == sure))
    return {kind: children} if bounds is None else {kind: children, "subset": {"range": bounds}}


def num_leaves(tree: Tree) -> int:
    return next((sum(map(num_leaves, tree[kind])) for kind in CHILDREN if kind in tree), 1)


def as_blender(data: Path, tree: Tree) -> Any:
    """Return a tree as Python code has it: blenders as far as they go, then paths and dicts."""
    item = {key: value for key, value in tree.items() if key not in ("weight", "repetitions")}
    if item.keys() == {"path"}:
        return data / item["path"]
    if item.keys() == {"blend"}:
        return Blender([(as_blender(data, child), child["weight"]) for child in item["blend"]])
    return metadataset(data, train=item)


# Chains --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Weights that are set `after` steps of a leg: numbers or schedules in order of the mix, from `later` draws on."""

    after: int
    weights: list[Any]
    later: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Some steps on one topology; the states are then passed on in `order`."""

    ranks: int
    workers: int
    steps: int
    order: tuple[int, ...]
    as_json: bool = False
    prefetch: int = 1
    change: Change | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mix, how it is trained on, and the chain of topologies that deliver it.

    An encoder takes those of the settings that it can: not all pack, and not all do without batches.
    """

    tree: Tree
    blender: bool
    settings: dict[str, Any]
    num_lanes: int
    legs: tuple[Leg, ...]

    def open(self, data: Path, encoder: str) -> DatasetSpec:
        """Open the mix for an encoder."""
        source = as_blender(data, self.tree) if self.blender else metadataset(data, train=self.tree)
        needed = NEEDED.get(encoder, {})
        settings = needed | self.settings
        if encoder == "grouping":
            settings["batch_size"] = None
        elif encoder == "lengths":  # its microbatches have as many samples as fit
            settings["batch_size"] = settings["batch_size"] and 1
        elif encoder in BATCHING:
            settings["batch_size"] = settings["batch_size"] or 2
        if "packing_buffer_size" not in needed:
            del settings["packing_buffer_size"]
        return mixed(data, source, ENCODERS[encoder](), **settings)


@st.composite
def legs(draw: st.DrawFn, num_lanes: int, changeable: int) -> Leg:
    """Draw a leg; `changeable` is the number of weights that may be set in it, 0 if none."""
    ranks = draw(st.sampled_from([ranks for ranks in RANKS if ranks <= num_lanes]))
    steps = draw(st.sampled_from([*range(1, 3 + 30 // ranks), 0]))  # not integers(), which are mostly small
    change = None
    if changeable and draw(st.sampled_from([False, False, True])):
        sure = draw(st.integers(0, changeable - 1))
        given = [draw(weights(number == sure)) for number in range(changeable)]
        later = draw(st.none() | st.integers(0, 60) if ranks == 1 else st.integers(0, 60))
        change = Change(after=draw(st.sampled_from(range(steps + 1))), weights=given, later=later)
    return Leg(
        ranks=ranks,
        workers=draw(st.integers(0, 3)),
        steps=steps,
        order=tuple(draw(st.permutations(range(ranks)))),
        as_json=draw(st.booleans()),
        prefetch=draw(st.integers(1, 3)),
        change=change,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case."""
    tree = draw(trees(("leaf", "concat", "blend", "blend", "blend_epochized")))
    settings: dict[str, Any] = {
        "batch_size": draw(st.sampled_from([2, 1, 3, 4, None])),
        "max_samples_per_sequence": draw(st.sampled_from([4, 1, 2, 10, None])),
        "shuffle_buffer_size": draw(st.sampled_from([0, 2, 5, 30])),
        "parallel_shard_iters": draw(st.sampled_from([1, 3, 16])),
        "shuffle_over_epochs_multiplier": draw(st.sampled_from([1, 1, 1, None, 2])),
        "packing_buffer_size": draw(st.integers(3, 12)),
    }
    num_lanes = draw(st.sampled_from([24, 10]))
    changeable = num_leaves(tree) if "blend" in tree and num_leaves(tree) > 1 else 0
    return Case(
        tree=tree,
        blender=draw(st.booleans()),
        settings=settings,
        num_lanes=num_lanes,
        legs=tuple(draw(legs(num_lanes, changeable)) for _ in range(draw(st.sampled_from([2, 1, 3, 4])))),
    )

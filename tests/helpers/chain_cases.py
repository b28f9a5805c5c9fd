"""What chains are drawn from: small datasets of every kind, encoders of any features, and chains of stops over them.

Everything about a chain follows from a seed and its number. A tree is what a metadataset's split says, with paths
relative to the folder of the datasets, so that a failing case can be read, and pasted into a test. All of it needs the
package, torch and numpy only; those with media also need transformers, PyAV and, of one kind, torchvision.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from crude import crude_mix
from engine import ENCODERS, config_of, text_dataset
from keyed import BOTH, CRUDE, keyed_dataset, shards, shuffled
from mixing import metadataset
from talks import LEAVES as TALKS, MEDIA, talk_encoder, write_talks

from energon_bridge import (
    Cooker,
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    basic_sample_keys,
    cooker,
    get_train_dataset,
    get_val_dataset,
    register_joiner,
)
from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.documents import DocumentValue
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.mix import evaluate_subset
from energon_bridge.core.mix.tree import SubsetRange, parse_subset
from energon_bridge.tools.columns.making import add_column
from energon_bridge.tools.testing import create_captioning_test_dataset

# Data ----------------------------------------------------------------------------------------------------------------

SHARDS = {"one": [1], "three": [2, 1], "few": [5, 7], "odd": [9, 1, 14], "some": [40, 23], "mid": [120, 77, 3]}
SHARDS |= {"large": [500, 1, 299]}
LINES = {"lines": 60, "long": 6500}
"""The second is long enough for slices of several samples on any number of lanes, and in passes."""
KEYS = [f"{number:05d}" for number in range(40)]
MATCHED, TALK, PICTURES = 26, (13, 8, 16), 37
Leaves = dict[str, tuple[int, dict[str, Any]]]
LEAVES: Leaves = {
    **{name: (sum(counts), {"path": f"./{name}"}) for name, counts in SHARDS.items()},
    **{name: (count, {"path": f"./{name}.jsonl", "subflavors": {"of": name}}) for name, count in LINES.items()},
    "filtered": (50, {"path": "./filtered", "filter": "tens in [0, 3, 7, 15, 19]"}),
    "talk": (
        sum(TALK),
        {"path": "./talk", "subflavors": {"of": "talk"}, "aux": {"blobs": "./blobs", "notes": "filesystem://./notes"}},
    ),
    "join": (MATCHED, {"join": [{"path": "./left"}, {"path": "./right", "nonmatch": "skip"}], "joiner": BOTH}),
    "join none": (
        len(KEYS),
        {"join": {"first": {"path": "./left"}, "second": {"path": "./right", "nonmatch": "none"}}, "joiner": BOTH},
    ),
    "join crude": (
        len(KEYS),
        {
            "join": [{"path": "./raw", "subflavors": {"of": "raw"}}, {"path": "./other", "nonmatch": "none"}],
            "joiner": {"__module__": __name__, "__function__": "pick"},
        },
    ),
}
"""What is at the ends of trees: number of samples and how a metadataset names it."""
TALK_LEAVES: dict[str, Leaves] = {
    media: {**leaves, **{f"{name} again": leaf for name, leaf in leaves.items()}, "odd": LEAVES["odd"]}
    for media, leaves in TALKS.items()
}
"""The leaves of mixes of conversations with media; two of three are such."""
PICTURE_LEAF = {"path": "./pictures"}
FILTERS: dict[str, Callable[[int], bool]] = {
    "number % 2 == 0": lambda number: number % 2 == 0,
    "number % 3 != 1": lambda number: number % 3 != 1,
    "number > 1": lambda number: number > 1,
    "number < 9 or number % 7 == 2": lambda number: number < 9 or number % 7 == 2,
    "not number in [0, 4, 20, 300]": lambda number: number not in (0, 4, 20, 300),
}
"""Expressions over the column `number` of the datasets of `SHARDS`, and what they say of a number."""


def write_data(folder: Path) -> Path:
    """Write the datasets that chains are over."""
    for name, counts in SHARDS.items():
        path = str(text_dataset(folder / name, train=counts))
        add_column(path, "number", number_of, made_of="number")
        add_column(path, "tenth", tenth_of, made_of="tenth")
    for name, count in LINES.items():
        lines = "".join(f'{{"text": "line {number}"}}\n' for number in range(count))
        (folder / f"{name}.jsonl").write_text(lines)
    filtered = text_dataset(folder / "filtered", train=SHARDS["mid"])
    add_column(str(filtered), "tens", tens_of, made_of="tens")
    crude_mix(folder, TALK)
    for names, kind in ((("left", "right"), None), (("raw", "other"), CRUDE)):
        settings = {} if kind is None else {"dataset_yaml": kind}
        keyed_dataset(folder / names[0], train=shards(KEYS, 17, 8, 15), **settings)
        keyed_dataset(folder / names[1], train=shards([*shuffled(KEYS[-MATCHED:]), "77777"], 4, 23), **settings)
    create_captioning_test_dataset(folder / "pictures", num_train=PICTURES, num_val=0, image_size=4)
    write_talks(folder)
    return folder


def number_of(sample: TextSample) -> int:
    return int(sample.text.split()[1])


def tenth_of(sample: TextSample) -> float:
    return (3 + number_of(sample) * 7 % 11) / 10


def tens_of(sample: TextSample) -> int:
    return number_of(sample) // 10


@register_joiner
def pick(first: Any, second: Any) -> dict[str, Any]:
    """Leave a joined sample crude."""
    return {"own": first["txt"], "other": "none" if second is None else second["txt"], "chance": random.random()}


@cooker(need_primary=True)
def cook_talk(sample: dict[str, Any], blobs: Any, notes: Any, primary: Any) -> TextSample:
    """Cook with all stores and some chance; skips some."""
    if random.random() < 0.1:
        raise SkipSample
    blob = blobs.get(sample["json"]["blob"], sample)
    note = notes.get(sample["json"]["note"], sample)
    return TextSample(**basic_sample_keys(sample), text=f"{note}; {primary.get('.txt', sample)}; {blob.tolist()}")


def cook_others(sample: dict[str, Any]) -> TextSample:
    content = sample["json"] if "json" in sample else (sample["own"], sample["other"], sample["chance"])
    return TextSample(**basic_sample_keys(sample), text=f"{content} {torch.rand(())}")


COOKERS = (Cooker(cook_talk, has_subflavors={"of": "talk"}), Cooker(cook_others))

# Encoders ------------------------------------------------------------------------------------------------------------


class Groups:
    """Groups by the text, with a size of its own for each group, or that of the batches."""

    sized = True

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        kind = (len(sample.tokens) if hasattr(sample, "tokens") else len(str(sample.text))) % 3
        return kind, 1 + kind if self.sized else None


class EqualGroups(Groups):
    """Groups of `batch_size`, and refuses some rows."""

    sized = False

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        if random.random() < 0.05:
            raise SkipSample
        return super().batch_group_criterion(sample)


class Refuses:
    """Leaves out whole microbatches by chance."""

    def batch(self, samples: list[Any]) -> Any:
        if random.random() < 0.25:
            raise SkipSample
        return super().batch(samples)  # type: ignore[misc]


class ManyBatches:
    """Makes nought to three microbatches of each."""

    def encode_batch(self, batch: Any) -> Iterator[Any]:
        for _ in range(random.randrange(4)):
            if hasattr(batch, "loss_mask"):
                yield replace(batch, loss_mask=batch.loss_mask + torch.rand(()))
            else:
                yield replace(batch, text=[f"{text} {torch.rand(())}" for text in batch.text])


FEATURES: dict[str, type] = {"groups": Groups, "equal": EqualGroups, "refuses": Refuses, "many": ManyBatches}
BASES = ("default", "tensors", "skipping", "several", "packing", "prepost", "lengths")
PACKING = ("packing", "prepost", "lengths")
BATCHED = ("equal", "refuses", "many")
"""Features that need a batch size."""


VALIDATED = ("batch_size", "batch_drop_last", "packing_buffer_size", "max_tokens_per_microbatch", "filter")
"""Settings that validation has too."""


@cache
def encoder_of(
    base: str, features: tuple[str, ...], media: str | None = None, data: Path | None = None
) -> DefaultTaskEncoder:
    """Return an encoder with some features that also cooks; with `media`, of conversations, by a model in `data`."""
    if media is not None:
        assert data is not None
        made: DefaultTaskEncoder = talk_encoder(
            data, media, tuple(FEATURES[name] for name in features), base == "several", COOKERS
        )
        return made
    bases = (*(FEATURES[name] for name in features), ENCODERS[base])
    encoder: DefaultTaskEncoder = type("_".join((*features, base)), bases, {"cookers": COOKERS})()
    return encoder


# A chain -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change of a run.

    Args:
        after: Steps of the leg before it.
        kind: "weights", "ban" or "feedback", which sets weights by losses.
        given: Weights (numbers or schedules in order of the mix), or keys.
        later: Draws from the earliest possible one on until it holds; None: as the loader decides. Bans: -1 is a draw
            of long ago.
    """

    after: int
    kind: str
    given: list[Any]
    later: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Some steps on one topology, and how the state goes on from there.

    Args:
        ranks, workers, threads, prefetch, buffer_bytes: Of the configuration.
        processes: The workers are processes; elsewhere they are generators of this one.
        device: Where microbatches are copied to, ahead: a GPU, if there is one; None: they are not copied.
        steps: Of each rank.
        peeks: After each step its microbatch is made again by its restore key, and by the state before it.
        passing: "list": of the states of all ranks, shuffled; "merged": into one; "parts": into two; "own": each rank
            has its own, where there are as many ranks in the next leg and the stream has no end, else as "list".
        codec: What the state goes through.
        order: Seeds the shuffling.
        events: Changes of the run, in order.
    """

    ranks: int
    workers: int
    threads: int
    prefetch: int
    buffer_bytes: int
    steps: int
    peeks: bool
    passing: str
    codec: str
    order: int
    events: tuple[Event, ...] = ()
    processes: bool = False

    @property
    def device(self) -> str | None:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.order % 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Data, encoder and settings of a run, and the topologies that deliver it.

    Args:
        tree: What the split of a metadataset says.
        base, features: Of the encoder.
        media: The kind of model of conversations with media, if it has any.
        settings: Of `get_train_dataset`.
        run: Of the worker configuration: what holds for the whole run.
        legs: The topologies, one after the other.
        validation: The stream is that of validation: every sample in order, in each pass again.
    """

    tree: dict[str, Any]
    base: str
    features: tuple[str, ...]
    settings: dict[str, Any]
    run: dict[str, Any]
    legs: tuple[Leg, ...]
    validation: bool = False
    media: str | None = None

    @property
    def packs(self) -> bool:
        return self.base in PACKING

    @property
    def finite(self) -> bool:
        return not self.settings.get("repeat", True)

    def open(self, data: Path) -> DatasetSpec:
        """Open the mix."""
        mix = metadataset(data, train=self.tree)
        common: dict[str, Any] = {"worker_config": config_of(1, 0, **self.run)}
        common |= {"task_encoder": encoder_of(self.base, self.features, self.media, data if self.media else None)}
        if self.validation:
            settings = {name: value for name, value in self.settings.items() if name in VALIDATED}
            return get_val_dataset(mix, split_part="train", **common, **settings)
        return get_train_dataset(mix, **common, **self.settings)


# Drawing one ---------------------------------------------------------------------------------------------------------

CHILDREN: dict[str, tuple[str, ...]] = {
    "concat": ("leaf", "concat"),
    "blend": ("leaf", "concat", "blend"),
    "blend_epochized": ("leaf", "concat", "blend_epochized"),
}
NUMBERS = {"blend": "weight", "blend_epochized": "repetitions"}
PERCENT = [["0%", "50%"], ["25%", "75%"], ["40%", "end"], ["87.5%", "100%"], ["0%", "100%"]]
ABSOLUTE: list[list[Any]] = [[0, 1], [3, 5], [2, "end"], [1, 11], [100, 300]]
RANKS = [1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9, 12, 16, 23]
LANES = [None, None, 1, 2, 3, 4, 6, 10, 24]
CODECS = ("plain", "json", "pickle", "torch")
FORKED = range(1, 7)
"""Worker processes of a leg, where it has any."""


def range_of(bounds: list[Any]) -> SubsetRange:
    found = parse_subset(DocumentValue({"range": bounds}, ""), allow_absolute=True)
    assert found is not None
    return found


def fits(size: int, subsets: tuple[SubsetRange, ...]) -> bool:
    """Return whether subsets, innermost first, leave anything of so many samples."""
    try:
        start, stop = evaluate_subset(subsets, size)
    except MetadataError:
        return False
    return start < stop


def drawn_leaf(
    rng: random.Random, outer: tuple[SubsetRange, ...], finite: bool, most: int, leaves: Leaves
) -> dict[str, Any]:
    """Draw a dataset, a file or a join of at most so many samples within the ranges around it."""
    names = [
        name
        for name, (size, described) in leaves.items()
        if size <= most and fits(size, outer) and not (outer and "filter" in described)  # it may keep none of a range
    ]
    size, described = leaves[rng.choice(names)]
    tree = dict(described)
    ranges = (
        [] if "filter" in tree else [bounds for bounds in PERCENT + ABSOLUTE if fits(size, (range_of(bounds), *outer))]
    )
    if ranges and rng.random() < 0.3:
        tree["subset"] = {"range": rng.choice(ranges)}
    multiplier = rng.choice([1, 1, 1, 1, None] if finite else [1, 1, 1, 1, None, 2, 3, -1])
    return tree if multiplier == 1 else tree | {"shuffle_over_epochs_multiplier": multiplier}


def drawn_weight(rng: random.Random, positive: bool) -> Any:
    """Draw a weight, as a file has it: a number or a schedule."""

    def number() -> Any:
        return rng.choice([*range(int(positive), 10), 0.1, 0.25, 1.5, 2.75])

    kind = rng.choice([None, None, None, "steps", "linear", "cosine"])
    if kind is None:
        return number()
    draws = sorted(rng.sample([0, 1, 24, 50, 75, 100, 300, 2000], rng.randint(1, 3)))
    return {"schedule": kind, "points": [[at, number()] for at in draws]}


def drawn_tree(
    rng: random.Random,
    kinds: Sequence[str],
    finite: bool,
    most: int,
    depth: int = 3,
    outer: tuple[SubsetRange, ...] = (),
    leaves: Leaves = LEAVES,
) -> dict[str, Any]:
    """Draw a mix, of legal nestings only; nothing in it is empty."""
    kind = rng.choice(list(kinds)) if depth else "leaf"
    if kind == "leaf":
        return drawn_leaf(rng, outer, finite, most, leaves)
    bounds = None
    if len(outer) < 2 and rng.random() < 0.3:
        bounds = rng.choice([bounds for bounds in PERCENT if fits(60, (range_of(bounds), *outer))] or [None])
    inner = outer if bounds is None else (range_of(bounds), *outer)
    count = rng.randint(1, 4 if depth == 3 else 3)
    children = [drawn_tree(rng, CHILDREN[kind], finite, most, depth - 1, inner, leaves) for _ in range(count)]
    sure = rng.randrange(count)
    for number, child in enumerate(children):
        if kind == "blend":
            child["weight"] = drawn_weight(rng, number == sure)
        elif kind == "blend_epochized":
            child["repetitions"] = rng.choice([1, 2, 3, 0.5, 0.25, 1.25, 0.3, 1.7, *[0] * (number != sure)])
    return {kind: children} if bounds is None else {kind: children, "subset": {"range": bounds}}


def num_leaves(tree: dict[str, Any]) -> int:
    return next((sum(map(num_leaves, tree[kind])) for kind in CHILDREN if kind in tree), 1)


def drawn_legs(rng: random.Random, run: dict[str, Any], budget: int) -> Iterator[Leg]:
    """Draw the legs of a chain, of about `budget` microbatches."""
    most = run["num_lanes"] or 24
    count, ranks = rng.choice([2, 2, 3, 3, 4, 5, 6]), 1
    for _ in range(count):
        if rng.random() < 0.75:
            ranks = rng.choice([ranks for ranks in RANKS if ranks <= most])
        steps = rng.choice([0, *range(1, 3 + 2 * budget // (count * ranks))])
        yield Leg(
            ranks=ranks,
            workers=rng.choice([0, 0, 1, 2, 3]),
            threads=rng.choice([1, 1, 1, 2, 3]),
            prefetch=rng.choice([1, 1, 2, 3, 5]),
            buffer_bytes=rng.choice([1 << 30, 1 << 30, 1 << 30, 3000, 0]),
            steps=steps,
            peeks=rng.random() < 0.1,
            passing=rng.choice(["list", "list", "merged", "parts", "own"]),
            codec=rng.choice(CODECS),
            order=rng.randrange(1000),
        )


def with_events(legs: Sequence[Leg], rng: random.Random, changeable: int, finite: bool) -> Iterator[Leg]:
    """Let things change at random moments; `changeable` weights may be set, 0 if none.

    Bans take not all of any dataset but the smallest; those of passes come at the beginning of a leg.
    """
    for leg in legs:
        events = []
        while rng.random() < 0.3:
            kind = rng.choice(["ban", *(["weights", "weights", "feedback"] if changeable else [])])
            after = 0 if finite else rng.randint(0, leg.steps)
            later = rng.choice([None, None, 0, rng.randint(0, 200)])
            given: list[Any] = []
            if kind == "ban":
                numbers = rng.sample(range(1, 25), rng.choice([1, 2, 8]))
                given = [form(number) for number in numbers for form in (str, "{:05d}".format)]
                later = rng.choice([later, later, -1])
            elif kind == "weights":
                sure = rng.randrange(changeable)
                given = [drawn_weight(rng, number == sure) for number in range(changeable)]
            events.append(Event(after=after, kind=kind, given=given, later=later))
        yield replace(leg, events=tuple(sorted(events, key=lambda event: event.after)))


def ranges_of(tree: dict[str, Any], outer: tuple[SubsetRange, ...]) -> list[range]:
    """Return the numbers of the samples of each leaf, after subsets; an empty range for one without columns."""
    inner = (range_of(tree["subset"]["range"]), *outer) if "subset" in tree else outer
    for kind in CHILDREN:
        if kind in tree:
            return [found for child in tree[kind] for found in ranges_of(child, inner)]
    counts = SHARDS.get(str(tree.get("path")).removeprefix("./"))
    return [range(0) if counts is None else range(*evaluate_subset(inner, sum(counts)))]


def drawn_filter(rng: random.Random, leaves: list[range], around: Sequence[str]) -> str | None:
    """Draw an expression that keeps some of each leaf together with those around it; None if there is none."""

    def keeps(text: str, numbers: range) -> bool:
        return any(all(FILTERS[one](number) for one in (text, *around)) for number in numbers)

    fitting = [text for text in FILTERS if all(keeps(text, numbers) for numbers in leaves)]
    return rng.choice(fitting) if fitting and rng.random() < 0.2 else None


def with_filters(
    tree: dict[str, Any], rng: random.Random, outer: tuple[SubsetRange, ...] = (), around: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Filter some nodes of a mix that have columns."""
    drawn = drawn_filter(rng, ranges_of(tree, outer), around)
    out = tree if drawn is None else tree | {"filter": drawn}
    around = around if drawn is None else (drawn, *around)
    inner = (range_of(tree["subset"]["range"]), *outer) if "subset" in tree else outer
    for kind in CHILDREN:
        if kind in tree:
            out = out | {kind: [with_filters(child, rng, inner, around) for child in tree[kind]]}
    return out


UNITS = ("number + 1", "1 + number % 5 * 30", "tenth", "1 + number // 50 * 7.25")
"""Amounts of the samples of the datasets of `SHARDS`."""


def with_unit(tree: dict[str, Any], rng: random.Random, unit: str | None = None) -> dict[str, Any]:
    """Let the weights of a blend be shares of an amount; datasets without columns become others."""
    kind = next((kind for kind in CHILDREN if kind in tree), None)
    if kind is None:
        if ranges_of(tree, ()) != [range(0)]:
            return tree
        return {"path": f"./{rng.choice(['few', 'some', 'mid', 'large'])}"} | {
            name: tree[name] for name in NUMBERS.values() if name in tree
        }
    inner = tree | {kind: [with_unit(child, rng, unit or "") for child in tree[kind]]}
    return inner if unit is not None else inner | {"unit": rng.choice(UNITS)}


GROUPED_BY: list[list[str]] = [
    ["number % 3"],
    ["number // 50", "tenth"],
    ["tier(number, 0, 5, 40, 200)"],
    ["number % 2 == 0"],
]
"""By which samples of the datasets of `SHARDS` are put into buckets."""
UNBUCKETED = ("several", "lengths")
"""Encoders whose microbatches cannot come from buckets."""


def with_buckets(chain: Chain, rng: random.Random) -> Chain:
    """Let the microbatches of a chain come from buckets."""

    def constant(tree: dict[str, Any]) -> dict[str, Any]:
        kind = next((kind for kind in CHILDREN if kind in tree), None)
        out = with_unit(tree, rng, "") if kind is None else tree | {kind: [constant(child) for child in tree[kind]]}
        return out | {"weight": rng.choice([1, 2, 0.3])} if "weight" in out else out

    lanes = rng.choice([1, 2, 3, 4, 6, 12])
    run = chain.run | {"num_lanes": lanes, "microbatches_per_global_batch": rng.choice([None, lanes])}
    legs = []
    for leg in chain.legs:
        ranks = rng.choice([ranks for ranks in RANKS if lanes % ranks == 0])
        events = tuple(replace(event, later=None) for event in leg.events if event.kind == "ban")
        legs.append(replace(leg, ranks=ranks, events=events, processes=leg.processes and ranks * leg.workers in FORKED))
    settings = chain.settings | {"group_by": rng.choice(GROUPED_BY)}
    if rng.random() < 0.5 or chain.packs:
        settings["bucket_batch_size"] = rng.choice(["1 + number % 5", "3 + number // 100"])
    features = tuple(name for name in chain.features if name == "refuses")
    return replace(chain, tree=constant(chain.tree), run=run, legs=tuple(legs), settings=settings, features=features)


def drawn_media(rng: random.Random) -> str | None:
    """Draw the kind of model of a chain with media; ENERGON_CHAIN_MEDIA makes all of them such."""
    share = 1 if os.environ.get("ENERGON_CHAIN_MEDIA") else 0.1
    return rng.choice(list(MEDIA)) if rng.random() < share else None


def drawn_chain(seed: int, number: int) -> Chain:
    """Draw chain `number` of a seed."""
    rng = random.Random(f"{seed} {number}")
    finite = rng.random() < 0.2
    media = drawn_media(random.Random(f"{seed} {number} media"))
    pictures = rng.random() < 0.03 and media is None
    base = "default" if pictures else rng.choice(BASES)
    chosen = ("refuses",) if finite else ("refuses", "many")  # in a pass a microbatch is one, so that ranks agree
    features: list[str] = [] if pictures else [name for name in chosen if rng.random() < 0.15]
    if base == "lengths":
        features = []
    elif not pictures and rng.random() < 0.2:
        features.insert(0, rng.choice(["groups", "equal"]))
    grouped = "groups" in features
    batched = not grouped and any(name in BATCHED for name in features)
    rows = rng.choice([1, 2, 2, 3, 4, 7, 16, *[None] * (2 * (not batched))])
    rows = None if base == "lengths" else rows
    settings: dict[str, Any] = {
        "batch_size": None if grouped else rows,
        "max_samples_per_sequence": rng.choice([None, None, 1, 2, 4, 10, 100]),
        "shuffle_buffer_size": rng.choice([100, 0, 2, 5, 30, None]),
        "parallel_shard_iters": rng.choice([None, 1, 3, 16]),
        "shuffle_over_epochs_multiplier": rng.choice([1, 1, 1, None] if finite else [1, 1, 1, None, 3, -1]),
    }
    if base in PACKING:
        settings["packing_buffer_size"] = rng.choice([3, 5, 11, 20, 40])
    if base == "lengths":
        settings["max_tokens_per_microbatch"] = rng.choice([3, 6, 10]) * (60 if media else 1)
    if finite:
        settings |= {"repeat": False, "batch_drop_last": rng.random() < 0.3}
    if rng.random() < 0.1:
        settings["virtual_epoch_length"] = rng.randint(1, 20)
    run: dict[str, Any] = {
        "seed": rng.randrange(1 << 30),
        "num_lanes": rng.choice(LANES),
        "microbatches_per_global_batch": rng.choice([None, None, 4, 8, 12, 30]),
    }
    if base in PACKING:  # each lane fills a buffer, and loads it again after each stop
        most = 240 // (run["num_lanes"] or 24)
        settings["packing_buffer_size"] = min(settings["packing_buffer_size"], max(5, most))
    kinds = ("leaf", "concat", "blend_epochized") if finite else ("leaf", "concat", "blend", "blend", "blend_epochized")
    # A pass that is packed or grouped is made once by every rank before it begins.
    listed = finite and (base in PACKING or bool({"groups", "equal"} & {*features}))
    most, leaves = 100 if listed else 1 << 30, LEAVES if media is None else TALK_LEAVES[media]
    tree = dict(PICTURE_LEAF) if pictures else drawn_tree(rng, kinds, finite, most, leaves=leaves)
    units = random.Random(f"{seed} {number} units")
    by_unit = "blend" in tree and media is None and units.random() < 0.5
    tree = with_unit(tree, units) if by_unit else tree
    changeable = num_leaves(tree) if "blend" in tree and num_leaves(tree) > 1 else 0
    legs = tuple(drawn_legs(rng, run, min(90, 240 // (rows or 1)) // (4 if media else 1)))
    legs = tuple(with_events(legs, random.Random(f"{seed} {number} events"), changeable, finite))
    forking = random.Random(f"{seed} {number} processes")
    legs = tuple(replace(leg, processes=leg.ranks * leg.workers in FORKED and forking.random() < 0.3) for leg in legs)
    filtering = random.Random(f"{seed} {number} filters")
    whole = drawn_filter(filtering, ranges_of(tree, ()), ())
    tree = with_filters(tree, filtering, around=(whole,) if whole else ())
    settings |= {"filter": whole} if whole else {}
    chain = Chain(tree=tree, base=base, features=tuple(features), settings=settings, run=run, legs=legs, media=media)
    buckets = random.Random(f"{seed} {number} buckets")
    countable = (
        not (finite or grouped) and media is None and not pictures and rows is not None and base not in UNBUCKETED
    )
    endless = "blend_epochized" not in str(tree) and "concat" not in tree and "unit" not in str(tree)
    if countable and endless and buckets.random() < 0.3:
        return with_buckets(chain, buckets)
    if finite and random.Random(f"{seed} {number} validation").random() < 0.5:
        legs = tuple(replace(leg, events=()) for leg in legs)  # it leaves out what is banned at once
        return replace(chain, validation=True, legs=legs)
    return chain

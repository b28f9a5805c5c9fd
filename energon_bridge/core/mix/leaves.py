"""Opens the leaves of a mix: of each its dataset or join, which of the samples are in the mix, and its identity.

The identity is what states and the order know a leaf by, so it depends on content and never on paths.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.errors import DatasetError, EmptyDatasetError, MetadataError, UnknownSplitError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.jsonl import is_jsonl, open_jsonl
from energon_bridge.core.format.key_index import key_index_version
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.mix.flatten import Mix
from energon_bridge.core.mix.joins import aux_of_join, open_join
from energon_bridge.core.mix.opener import DatasetOpener
from energon_bridge.core.mix.tree import AuxRef, JoinRef, LeafRef, combine_multipliers, evaluate_subset
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.registry import load
from energon_bridge.core.storage import as_far, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLeaf:
    """One dataset or join, or a part of one, in a mix.

    Args:
        dataset: The opened dataset or join.
        start, stop: The samples of the dataset (of a join: its rows) that are in the leaf, as a range.
        share: Its weight (mode "weights"), or its repetitions in a mix epoch.
        occurrence: Its number among the leaves of the mix with the same content.
        shuffle_epochs: Epochs shuffled as one; -1: without end; None keeps the dataset's own order.
        aux: Stores for the cooker of a crude dataset, by name.
        aux_fingerprint: A hash of the contents of `aux`; empty if there is none.
        filter: The expression that its samples fulfil; empty if there is none.
        kept: With a filter: the numbers in the dataset of the samples that fulfil it, ascending, shape (num_samples,).
        amounts: In a blend with a `unit`: how much each sample counts, made by `tools/columns/amounts.py`.

    Attributes:
        identity: A hash of the leaf's content, independent of its location: 16 hex digits.
        part: Which samples of its dataset it has, as written in states: `10:20 where tokens < 9`; empty: all.
    """

    dataset: PreparedDataset | JoinedDataset
    start: int
    stop: int
    weight: Fraction = Fraction(1)
    occurrence: int = 0
    shuffle_epochs: int | None = 1
    aux: Mapping[str, AuxRef] = field(default_factory=dict)
    aux_fingerprint: str = ""
    filter: str = ""
    kept: np.ndarray | None = field(default=None, repr=False, compare=False)
    amounts: Any = field(default=None, repr=False, compare=False)
    identity: str = field(init=False)
    part: str = field(init=False)

    def __post_init__(self) -> None:
        subset = "" if self.is_whole else f"{self.start}:{self.stop}"
        object.__setattr__(self, "part", subset + f" where {self.filter}" * (self.kept is not None))
        parts = [self.dataset.fingerprint, self.dataset.split_part, subset, str(self.occurrence)]
        parts += [self.aux_fingerprint] * bool(self.aux_fingerprint)
        if self.kept is not None:  # the order depends on which samples are kept, not on the expression
            parts.append("kept " + hashlib.blake2b(self.kept.tobytes(), digest_size=16).hexdigest())
        identity = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
        object.__setattr__(self, "identity", identity)

    @property
    def is_whole(self) -> bool:
        """Whether the leaf has all samples of its dataset."""
        return self.start == 0 and self.stop == self.dataset.num_samples and self.kept is None

    @property
    def num_samples(self) -> int:
        return self.stop - self.start if self.kept is None else self.kept.size

    def numbers(self, count: int) -> Sequence[int]:
        """Return which samples of the dataset are the first `count` of the leaf, by their numbers there."""
        return range(self.start, self.start + count) if self.kept is None else self.kept[:count].tolist()

    def has(self, numbers: IntArray) -> NDArray[np.bool_]:
        """Return which samples of the dataset, given by number, belong to the leaf."""
        if self.kept is not None:
            sought = numbers.astype(self.kept.dtype)  # otherwise numpy would copy all of `kept`
            return self.kept[np.minimum(np.searchsorted(self.kept, sought), self.kept.size - 1)] == sought
        return (numbers >= self.start) & (numbers < self.stop)

    @property
    def num_shards(self) -> int:
        """Shards that hold samples of the leaf."""
        ends = np.cumsum(self.dataset.shard_counts)
        starts = ends - self.dataset.shard_counts
        if self.kept is not None:
            return int(np.unique(np.searchsorted(ends, self.kept, side="right")).size)
        return int(np.count_nonzero(np.minimum(ends, self.stop) > np.maximum(starts, self.start)))

    @property
    def is_far(self) -> bool:
        """Whether its storage answers slowly."""
        return any(as_far(dataset.store) is not None for dataset in self.dataset.datasets)


def open_leaves(
    mix: Mix, opener: DatasetOpener, *, shuffle_epochs: int | None, unit: str | None = None
) -> tuple[OpenLeaf, ...]:
    """Open the leaves of a mix, in its order; a dataset that is reached twice is opened once.

    `shuffle_epochs` is combined with what the mix says for each dataset. With a `unit`, an expression of columns, the
    leaves have amounts.

    Raises:
        DatasetError: One of them cannot be used; each reason has its own subclass.
    """
    leaves: list[OpenLeaf] = []
    opener.open_ahead([entry.leaf for entry in mix.leaves if not isinstance(entry.leaf, JoinRef)])
    for entry in mix.leaves:
        ref = entry.leaf
        dataset: PreparedDataset | JoinedDataset
        aux: Mapping[str, AuxRef] = {}
        if isinstance(ref, JoinRef):
            dataset = open_join(ref, opener.open, trust=opener.trust_remote_code)
            aux = aux_of_join(ref, dataset)
        else:
            dataset = opener.open(ref)
            if ref.subflavors:
                dataset = dataclasses.replace(dataset, subflavors=dataset.subflavors | ref.subflavors)
            aux = ref.aux
            if aux and not dataset.is_crude:
                raise MetadataError(
                    f"{ref.where}: `aux` is for cookers, but {dataset.path} has samples of the type "
                    f"{dataset.sample_type.__name__}, and only crude datasets are cooked: leave out {', '.join(aux)}."
                )
        start, stop = evaluate_subset(ref.subsets, dataset.num_samples)
        if start == stop:
            raise EmptyDatasetError(
                f"{ref.where}: the subset of {dataset.path} contains none of its {dataset.num_samples} samples"
            )
        text = ""
        kept = None
        named: Sequence[str] = ()
        if isinstance(ref, LeafRef) and ref.filters:
            expressions = load("columns", "expressions")
            text = expressions.all_of(ref.filters)
            named = expressions.column_names(text)
            kept = expressions.kept_samples(dataset, text, start, stop, where=ref.where)
        withheld = dataset.withheld if isinstance(dataset, ForeignDataset) else {}
        if fault := next((fault for column, fault in withheld.items() if column not in named), None):
            raise UnknownSplitError(fault)
        weight = entry.weight if entry.repetitions is None else entry.repetitions
        leaf = OpenLeaf(
            dataset=dataset,
            start=start,
            stop=stop,
            weight=Fraction(1) if weight is None else weight,
            shuffle_epochs=combine_multipliers(shuffle_epochs, ref.shuffle_over_epochs_multiplier),
            aux=aux,
            aux_fingerprint=aux_fingerprint(aux, where=ref.where),
            filter=text,
            kept=kept,
        )
        leaves.append(leaf if unit is None else load("columns", "amounts").counting(leaf, unit, where=ref.where))
    return number_leaves(leaves)


def number_leaves(leaves: Sequence[OpenLeaf]) -> tuple[OpenLeaf, ...]:
    """Give leaves of equal content occurrence numbers, so that each has an order of its own."""
    seen: Counter[str] = Counter()
    numbered = []
    for leaf in leaves:
        occurrence = seen[leaf.identity]
        numbered.append(dataclasses.replace(leaf, occurrence=occurrence) if occurrence else leaf)
        seen[leaf.identity] += 1
    return tuple(numbered)


def aux_fingerprint(aux: Mapping[str, AuxRef], *, where: str) -> str:
    """Return a hash of what is in the auxiliary stores of a leaf, empty if it has none.

    It covers the name of each store; for a prepared dataset also its shards and their numbers of samples; for a JSONL
    file the file's own fingerprint. A folder of files counts by name only, since listing all its files would slow the
    start of a run. The location of a store does not count.

    Raises DatasetError, of the class that fits and naming the store, if one cannot be used.
    """
    if not aux:
        return ""
    content = {}
    for name, ref in aux.items():
        try:
            content[name] = _content_of_store(ref)
        except DatasetError as error:
            raise type(error)(f"{where}: auxiliary store {name!r}: {error}") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content_of_store(ref: AuxRef) -> list[object]:
    """Return what a store adds to the hash: its kind, and what tells its content (see `aux_fingerprint`)."""
    if is_jsonl(ref.path) and not ref.is_filesystem:
        return ["jsonl", open_jsonl(ref.path).fingerprint]
    store = open_store(ref.path)
    store.check_root()
    if ref.is_filesystem:
        return ["filesystem"]
    info = read_info(store)
    key_index_version(store)  # raises if no key can be looked up
    return ["dataset", list(info.shard_counts.items())]

"""From a described mix to opened leaves: what each dataset has, which samples of it are read, and its identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from energon_bridge.errors import DatasetError, EmptyDatasetError, MetadataError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.jsonl import is_jsonl, open_jsonl
from energon_bridge.format.key_lookup import key_index_version
from energon_bridge.format.nvmeta import read_info
from energon_bridge.mix.flatten import Mix
from energon_bridge.mix.joins import aux_of_join, open_join
from energon_bridge.mix.opener import DatasetOpener
from energon_bridge.mix.subset import evaluate_subset
from energon_bridge.mix.tree import AuxRef, JoinRef, combine_multipliers
from energon_bridge.samples import CrudeSample
from energon_bridge.storage import as_far, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLeaf:
    """One dataset or join, or a part of one, in a mix.

    Args:
        dataset: The opened dataset or join.
        start, stop: The samples (rows of a join) of it that the leaf has.
        share: Its weight (mode "weights"), or how often a mix epoch goes through it.
        occurrence: Number among the leaves of the mix that have the same content.
        shuffle_epochs: Epochs that are shuffled as one, -1 without an end; None keeps the dataset's own order.
        aux: Stores for the cooker of a crude dataset, by name.
        aux_fingerprint: A hash of what `aux` holds, empty where there is none.

    Attributes:
        identity: A hash of what the leaf contains, wherever it lies: 16 hex digits.
    """

    dataset: PreparedDataset | JoinedDataset
    start: int
    stop: int
    share: Fraction = Fraction(1)
    occurrence: int = 0
    shuffle_epochs: int | None = 1
    aux: Mapping[str, AuxRef] = field(default_factory=dict)
    aux_fingerprint: str = ""
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        subset = "" if self.is_whole else f"{self.start}:{self.stop}"
        parts = [self.dataset.fingerprint, self.dataset.split_part, subset, str(self.occurrence)]
        parts += [self.aux_fingerprint] * bool(self.aux_fingerprint)
        identity = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
        object.__setattr__(self, "identity", identity)

    @property
    def is_whole(self) -> bool:
        """Whether the leaf has all samples of its dataset."""
        return self.start == 0 and self.stop == self.dataset.num_samples

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def num_shards(self) -> int:
        """Shards that hold samples of the leaf."""
        ends = np.cumsum(self.dataset.shard_counts)
        starts = ends - self.dataset.shard_counts
        return int(np.count_nonzero(np.minimum(ends, self.stop) > np.maximum(starts, self.start)))

    @property
    def is_far(self) -> bool:
        """Whether answers of the storage take long."""
        dataset = self.dataset
        parts = [part.dataset for part in dataset.parts] if isinstance(dataset, JoinedDataset) else [dataset]
        return any(as_far(part.store) is not None for part in parts)


def open_leaves(mix: Mix, opener: DatasetOpener, *, shuffle_epochs: int | None) -> tuple[OpenLeaf, ...]:
    """Open the leaves of a mix, in its order; a dataset that is reached twice is opened once.

    `shuffle_epochs` is combined with what the mix says for each dataset.

    Raises:
        DatasetError: One of them cannot be used, by a class of its own for each reason.
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
            if aux and not issubclass(dataset.sample_type, CrudeSample):
                raise MetadataError(
                    f"{ref.where}: `aux` is for cookers, but the samples of {dataset.path} are of the type "
                    f"{dataset.sample_type.__name__}. Only a crude dataset is cooked; leave {', '.join(aux)} out."
                )
        start, stop = evaluate_subset(ref.subsets, dataset.num_samples)
        if start == stop:
            raise EmptyDatasetError(
                f"{ref.where}: the subset of {dataset.path} has none of its {dataset.num_samples} samples"
            )
        share = entry.weight if entry.repetitions is None else entry.repetitions
        leaves.append(
            OpenLeaf(
                dataset=dataset,
                start=start,
                stop=stop,
                share=Fraction(1) if share is None else share,
                shuffle_epochs=combine_multipliers(shuffle_epochs, ref.shuffle_over_epochs_multiplier),
                aux=aux,
                aux_fingerprint=_aux_fingerprint(aux, where=ref.where),
            )
        )
    return _numbered(leaves)


def _numbered(leaves: Sequence[OpenLeaf]) -> tuple[OpenLeaf, ...]:
    """Give leaves of equal content occurrence numbers, so that each has an order of its own."""
    seen: Counter[str] = Counter()
    numbered = []
    for leaf in leaves:
        occurrence = seen[leaf.identity]
        numbered.append(dataclasses.replace(leaf, occurrence=occurrence) if occurrence else leaf)
        seen[leaf.identity] += 1
    return tuple(numbered)


def _aux_fingerprint(aux: Mapping[str, AuxRef], *, where: str) -> str:
    """Return a hash of the auxiliary stores of a leaf, empty if it has none.

    It covers the name of each, of a prepared dataset its shards and their numbers of samples, of a JSONL file what the
    file's own fingerprint does. Of a folder of files only the name counts, since looking at all files of a folder is no
    work for the start of a run. Where a store lies does not count.

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
    if is_jsonl(ref.path) and not ref.is_filesystem:
        return ["jsonl", open_jsonl(ref.path).fingerprint]
    store = open_store(ref.path)
    store.check_root()
    if ref.is_filesystem:
        return ["filesystem"]
    info = read_info(store)
    key_index_version(store)  # raises if nothing can be looked up
    return ["dataset", list(info.shard_counts.items())]

"""From a described mix to opened leaves: what each dataset has, which samples of it are read, and its identity."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from energon_bridge.errors import ConfigurationError, EmptyDatasetError, MetadataError
from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.format.join import JoinedDataset
from energon_bridge.format.jsonl import JsonlDataset
from energon_bridge.loader.auxiliary import aux_fingerprint
from energon_bridge.loader.joins import aux_of_join, open_join
from energon_bridge.mix import AuxRef, DatasetOpener, JoinRef, Mix, combine_multipliers, evaluate_subset
from energon_bridge.samples import CrudeSample, field_names
from energon_bridge.storage import as_far
from energon_bridge.stream.cooking import cooker_of
from energon_bridge.stream.user_code import is_default
from energon_bridge.task_encoder.collate import REMEDY_FOR_TYPES
from energon_bridge.task_encoder.images import IMAGE_EXTENSIONS


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

    @property
    def decodes_media(self) -> bool:
        """Whether decoding it is worth threads of its own: image decoders release the interpreter lock."""
        dataset = self.dataset
        if isinstance(dataset, JoinedDataset):
            return any(_decodes_media(part.dataset) for part in dataset.parts)
        return _decodes_media(dataset)


def _decodes_media(dataset: PreparedDataset) -> bool:
    if isinstance(dataset, JsonlDataset):
        return False
    field_map = dataset.field_map
    return field_map is None or any(p.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for p in field_map.parts)


def check_types(leaves: Sequence[OpenLeaf], encoder: Any) -> None:
    """Refuse leaves whose samples would come together in microbatches that the default hooks cannot make.

    Only where no code of the user's sees them on the way: hooks, cookers and joiners may make one type of all.

    Raises:
        ConfigurationError: Their types have different fields.
    """
    hooks = ("encode_sample", "preencode_sample", "postencode_sample", "batch")
    if not all(is_default(getattr(encoder, name, None)) for name in hooks if hasattr(encoder, name)):
        return
    by_fields: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for leaf in leaves:
        if isinstance(leaf.dataset, JoinedDataset) or cooker_of(encoder, leaf.dataset) is not None:
            continue
        kind = leaf.dataset.sample_type
        fields = () if issubclass(kind, CrudeSample) else field_names(kind)
        by_fields.setdefault(fields, (kind.__name__, []))[1].append(leaf.dataset.path)
    if len(by_fields) > 1:
        types = "; ".join(f"{kind}: {', '.join(paths[:3])}" for kind, paths in by_fields.values())
        raise ConfigurationError(
            f"the datasets of the mix have samples of different types ({types}), which {type(encoder).__name__} cannot "
            f"put into one microbatch: {REMEDY_FOR_TYPES}. For validation, get_val_datasets gives each dataset alone"
        )


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
                aux_fingerprint=aux_fingerprint(aux, where=ref.where),
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

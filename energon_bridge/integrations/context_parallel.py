"""The part of a batch that a context-parallel rank keeps: its share of each token-level tensor, and all images.

With causal attention later tokens cost more, so a sequence is cut into `2 * size` equal chunks, and rank r takes chunks
r and `2 * size - 1 - r`: halves that zig-zag, as `megatron.core.utils.get_batch_on_this_cp_rank` does. Of packed
sequences (`cu_seqlens_padded`, or `cu_seqlens` where nothing is padded) each sample is cut like this, and the rows of a
batch are laid end to end, as attention kernels for packed sequences want it: token-level tensors become
(1, tokens / size). `cu_seqlens` stay those of the whole row, as Transformer Engine wants them.

Cut is what the fields of `TOKEN_FIELDS` have along their token dimension. A model that makes room for image features by
itself (one placeholder token for each image, as megatron-core's `LLaVAModel`) must cut after that, not here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from energon_bridge.errors import ConfigurationError

B = TypeVar("B")

TOKEN_FIELDS: Mapping[str, float] = MappingProxyType(
    {
        "tokens": 0,
        "input_ids": 0,
        "labels": -100,
        "loss_mask": 0,
        "position_ids": 0,
        "attention_mask": 0,
        "padding_mask": 0,
        "token_type_ids": 0,
        "mm_token_type_ids": 0,
    }
)
"""Fields with an entry per token, and their padding value; `position_ids` count on instead."""

_POSITIONS = "position_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fields:
    """The parts of a batch that are cut."""

    tokens: dict[str, Tensor]
    cuts: Tensor | None
    shape: tuple[int, int]


def slice_for_context_parallel(batch: B, *, rank: int, size: int, token_fields: Sequence[str] | None = None) -> B:
    """Return a batch with the part of one context-parallel rank; the original is not changed.

    Args:
        batch: A dataclass or dict. Its tokens, (B, S), and other token-level fields are cut along the token dimension:
            the last one of three-dimensional `position_ids` (3, B, S) and of (B, 1, S, S) the rows of the mask, else
            dimension 1. A field that is None stays None.
        rank: Context-parallel rank.
        size: Context-parallel size.
        token_fields: The token-level fields; default: `TOKEN_FIELDS`.

    Raises:
        ConfigurationError: A sequence, or a sample of a pack, is not a multiple of `2 * size` tokens long.
    """
    if not 0 <= rank < size:
        raise ConfigurationError(f"slice_for_context_parallel: rank {rank} is not in range({size})")
    if size == 1:
        return batch
    fields = _fields(batch, token_fields)
    cuts = fields.cuts
    if cuts is None:
        indices = zigzag_indices(fields.shape[1], rank=rank, size=size)
        taken = {name: _take(name, value, indices) for name, value in fields.tokens.items()}
    else:
        _check_covers(cuts, fields.shape)
        indices = packed_indices(cuts, rank=rank, size=size)
        taken = {name: _take(name, _end_to_end(name, value), indices) for name, value in fields.tokens.items()}
    return _with(batch, taken)


def pad_for_context_parallel(
    batch: B, *, size: int, fill: Mapping[str, float] | None = None, token_fields: Sequence[str] | None = None
) -> B:
    """Pad a batch so that every sequence, or every sample of its packs, is a multiple of `2 * size` tokens long.

    Prefer to let the task encoder pad (`pad_to_multiple_of=2 * size`), which then packs by padded lengths; use this for
    batches from elsewhere. Packs become one row of padded samples: `cu_seqlens` still tells where samples end without
    padding, `cu_seqlens_padded` where they end with it, and `max_seqlen` is updated.

    Args:
        batch: A dataclass or dict.
        size: Context-parallel size.
        fill: Padding value by field, for example `{"tokens": tokenizer.pad_token_id}`; default:
            -100 in labels, 0 elsewhere. `position_ids` count on.
        token_fields: The token-level fields; default: `TOKEN_FIELDS`.

    Raises:
        ConfigurationError: A mask over pairs of tokens would have to be padded, or packs do not cover their rows.
    """
    multiple = 2 * size
    fields = _fields(batch, token_fields)
    for name, value in fields.tokens.items():
        if value.dim() == 4:
            raise ConfigurationError(
                f"{name} of shape {tuple(value.shape)} cannot be padded: leave it out of the batch"
            )
    length = fields.shape[1]
    cuts = fields.cuts
    if cuts is None:
        starts, sizes = [0], [length]
    else:
        _check_covers(cuts, fields.shape)
        starts, sizes = cuts[:-1].tolist(), cuts.diff().tolist()
    padded = [n + -n % multiple for n in sizes]
    if padded == sizes:
        return batch
    values = dict(TOKEN_FIELDS) | dict(fill or {})
    changed: dict[str, Any] = {}
    for name, value in fields.tokens.items():
        whole = value if cuts is None else _end_to_end(name, value)
        parts = []
        for start, old, new in zip(starts, sizes, padded, strict=True):
            part = whole[..., start : start + old]
            more = part.new_full((*part.shape[:-1], new - old), values.get(name, 0))
            if name == _POSITIONS and old:
                more = part[..., -1:] + 1 + torch.arange(new - old, device=part.device, dtype=part.dtype)
            parts += [part, more]
        changed[name] = torch.cat(parts, dim=-1)
    if cuts is not None:
        # Where samples end without padding is what it was; a batch with nothing padded had only one of the two.
        if _get(batch, "cu_seqlens") is None:
            changed["cu_seqlens"] = cuts
        changed["cu_seqlens_padded"] = torch.tensor([0, *padded]).cumsum(0).to(cuts)
        if _get(batch, "max_seqlen") is not None:
            old = _get(batch, "max_seqlen")
            changed["max_seqlen"] = torch.full_like(old, max(padded)) if isinstance(old, Tensor) else max(padded)
    return _with(batch, changed)


def zigzag_indices(length: int, *, rank: int, size: int) -> Tensor:
    """Return the positions of a sequence that belong to a context-parallel rank, int64 of shape (length / size,).

    Raises:
        ConfigurationError: The length is not a multiple of `2 * size`.
    """
    if length % (2 * size):
        raise ConfigurationError(
            f"a sequence of {length} tokens cannot be divided between {size} context-parallel ranks: its length must "
            f"be a multiple of {2 * size} (twice the ranks). Set pad_to_multiple_of={2 * size} of the task encoder, or "
            "use pad_for_context_parallel"
        )
    chunk = length // (2 * size)
    halves = [torch.arange(start * chunk, (start + 1) * chunk) for start in (rank, 2 * size - 1 - rank)]
    return torch.cat(halves)


def packed_indices(cu_seqlens_padded: Tensor, *, rank: int, size: int) -> Tensor:
    """Return the positions, in rows laid end to end, of a context-parallel rank: two chunks of each sample.

    Args:
        cu_seqlens_padded: Where samples begin, and where the last one ends: int32 (samples + 1,).
        rank: Context-parallel rank.
        size: Context-parallel size.

    Raises:
        ConfigurationError: A sample is not a multiple of `2 * size` long.
    """
    starts, lengths = cu_seqlens_padded[:-1].tolist(), cu_seqlens_padded.diff().tolist()
    for number, length in enumerate(lengths):
        if length % (2 * size):
            raise ConfigurationError(
                f"sample {number} of the packs has {length} tokens with padding, which cannot be divided between "
                f"{size} context-parallel ranks: its length must be a multiple of {2 * size} (twice the ranks). Set "
                f"pad_to_multiple_of={2 * size} of the task encoder, or use pad_for_context_parallel"
            )
    parts = [start + zigzag_indices(n, rank=rank, size=size) for start, n in zip(starts, lengths, strict=True)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Samples for the schedulers of megatron-core (`--sequence-packing-scheduler dp_balanced`, dynamic context parallelism).
#
# They pack the samples of a global batch themselves: each data-parallel rank gives its samples with their lengths, the
# scheduler decides which rank, or group of ranks, runs which, and sends them there.


_SCHEDULED = ("tokens", "labels", "loss_mask", "position_ids")


def scheduler_samples(batch: Any, *, multiple_of: int = 1) -> list[dict[str, Tensor]]:
    """Return the samples of a batch as megatron-core's schedulers take them: one dict each, packed or not before.

    A dict has `tokens`, `labels`, `loss_mask` and `position_ids` of one sample, 1-dimensional, and its lengths without
    and with padding, `original_seq_len` and `padded_seq_len`, int32 of shape (1,). Masked rows are left out.

    Args:
        batch: A batch of texts, as the multimodal and chat-template encoders make it.
        multiple_of: Pad each sample to a multiple of this length; 2 x cp, with context parallelism.

    Raises:
        ConfigurationError: The batch has images, which the schedulers would drop, or lacks a field.
    """
    if _get(batch, "pixel_values") is not None or _get(batch, "visual_inputs"):
        raise ConfigurationError(
            "scheduler_samples: the batch has images or videos, but megatron-core's schedulers only move tokens: use "
            "balance='global_batch', which moves whole microbatches"
        )
    missing = [name for name in (*_SCHEDULED, "attention_mask") if not isinstance(_get(batch, name), Tensor)]
    if missing:
        raise ConfigurationError(
            f"scheduler_samples: the batch has no {', '.join(missing)}; expected a batch from the multimodal or the "
            "chat-template encoder"
        )
    columns = {name: _get(batch, name) for name in _SCHEDULED}
    length = columns["tokens"].shape[1]
    starts, ends = _get(batch, "cu_seqlens_padded"), _get(batch, "cu_seqlens")
    if ends is not None:
        starts = ends if starts is None else starts
        places = list(zip(starts[:-1].tolist(), ends.diff().tolist(), strict=True))
    else:
        places = [(row * length, size) for row, size in enumerate(_get(batch, "attention_mask").sum(1).tolist())]
    valid = _get(batch, "__valid__")
    samples = []
    for start, size in places:
        if not size or (valid is not None and not bool(valid[start // length])):
            continue
        more = -size % multiple_of
        sample = {}
        for name, values in columns.items():
            own = values.reshape(-1)[start : start + size]
            if name == _POSITIONS:
                sample[name] = torch.arange(size + more, dtype=own.dtype, device=own.device)
            else:
                sample[name] = torch.cat([own, own.new_full((more,), TOKEN_FIELDS[name])])
        lengths = {"original_seq_len": size, "padded_seq_len": size + more}
        samples.append(sample | {name: torch.tensor([value], dtype=torch.int32) for name, value in lengths.items()})
    return samples


def scheduler_pack(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return samples of `scheduler_samples` end to end, with `cu_seqlens`: what versions before lists of them take."""
    lengths = [int(sample["padded_seq_len"]) for sample in samples]
    joined = {name: torch.cat([sample[name] for sample in samples]) for name in _SCHEDULED}
    return joined | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)}


def _fields(batch: Any, token_fields: Sequence[str] | None) -> _Fields:
    names = tuple(TOKEN_FIELDS) if token_fields is None else token_fields
    tokens = {name: value for name in names if isinstance(value := _get(batch, name), Tensor)}
    flat = next((value for value in tokens.values() if value.dim() == 2), None)
    if flat is None:
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} has no token-level tensor of shape (B, S) among "
            f"{', '.join(names)}: name its fields in token_fields"
        )
    rows, length = flat.shape
    for name, value in tokens.items():
        if value.shape[-1] != length:
            raise ConfigurationError(
                f"{name} has shape {tuple(value.shape)}, but the batch has {rows} rows of {length} tokens: its last "
                "dimension must be the tokens"
            )
    unpadded, cuts = _get(batch, "cu_seqlens"), _get(batch, "cu_seqlens_padded")
    cuts = unpadded if cuts is None else cuts
    return _Fields(tokens=tokens, cuts=None if cuts is None else cuts.reshape(-1), shape=(rows, length))


def _check_covers(cuts: Tensor, shape: tuple[int, int]) -> None:
    end, tokens = int(cuts[-1]), shape[0] * shape[1]
    if end != tokens:
        raise ConfigurationError(
            f"the samples of the packs end at token {end}, but the {shape[0]} rows of {shape[1]} have {tokens} tokens: "
            "cu_seqlens_padded must cover the rows laid end to end"
        )


def _end_to_end(name: str, value: Tensor) -> Tensor:
    """Lay the rows of a batch end to end: (B, S) to (1, B * S), (3, B, S) to (3, 1, B * S)."""
    if value.dim() > 3 or (value.dim() == 3 and name != _POSITIONS):
        raise ConfigurationError(
            f"{name} of shape {tuple(value.shape)} is not a field of packed sequences: leave it out of the batch"
        )
    return value.reshape(*value.shape[:-2], 1, -1)


def _take(name: str, value: Tensor, indices: Tensor) -> Tensor:
    # A mask over pairs, (B, 1, S, S), is cut by query; the keys of all ranks are needed.
    dim = 2 if value.dim() == 4 else value.dim() - 1
    return value.index_select(dim, indices.to(value.device))


def _get(batch: Any, name: str) -> Any:
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def _with(batch: B, changed: Mapping[str, Any]) -> B:
    result: Any = copy.copy(batch)
    for name, value in changed.items():
        if isinstance(result, dict):
            result[name] = value
        else:
            object.__setattr__(result, name, value)
    return cast(B, result)

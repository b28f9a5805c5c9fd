"""The part of a batch that a context-parallel rank keeps: its share of each token-level tensor, and all images.

With causal attention later tokens cost more, so a sequence is cut into `2 * size` equal chunks, and rank r takes chunks
r and `2 * size - 1 - r`: halves that zig-zag, as `megatron.core.utils.get_batch_on_this_cp_rank` does. Of packed
sequences (`cu_seqlens_padded`, or `cu_seqlens` where nothing is padded) each sample is cut like this, and the rows of a
batch are laid end to end, as attention kernels for packed sequences want it: token-level tensors become
(1, tokens / size). `cu_seqlens` stay those of the whole row, as Transformer Engine wants them.

Cut is what has a value per token: the fields of `TOKEN_FIELDS`, also those inside `visual_inputs`, and of your own
encoder's fields each tensor of the shape of the tokens, (B, S), alone, before others, (B, S, ...), or after others,
(n, B, S). Pixels, images and videos are not. A tensor that may or may not be meant is an error; `token_fields` says it.

A model that makes room for image features by itself (one placeholder token for each image, as megatron-core's
`LLaVAModel`) must cut after that, not here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.encoder.collate import read_fields
from energon_bridge.core.errors import ConfigurationError

logger = logging.getLogger(__name__)

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
        "moe_mm_token_type_ids": 0,
        "mrope_position_ids": 0,
    }
)
"""Fields with an entry per token, and their padding value; `position_ids` count on instead."""

_POSITIONS = "position_ids"

_ENDS = (("cu_seqlens", "max_seqlen"), ("cu_seqlens_q", "max_seqlen_q"), ("cu_seqlens_kv", "max_seqlen_kv"))
"""Fields with the ends of packed samples, without padding (with it: and `_padded`), and with the longest of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fields:
    """The parts of a batch that are cut, each with its token dimension. Packs are one row, of shape (1, tokens)."""

    tokens: dict[str, tuple[Tensor, int]]
    cuts: Tensor | None
    shape: tuple[int, int]
    changed: dict[str, Any]


def slice_for_context_parallel(batch: B, *, rank: int, size: int, token_fields: Sequence[str] | None = None) -> B:
    """Return a batch with the part of one context-parallel rank; the original is not changed.

    Args:
        batch: A dataclass or dict. Its tokens, (B, S), and all that has a value per token (see the module) are cut
            along the token dimension; of a mask over pairs, (B, 1, S, S), the rows. A field that is None stays None.
            `segments` become those of the part, padding included.
        rank: Context-parallel rank.
        size: Context-parallel size.
        token_fields: The fields with a value per token, and no others; default: see the module.

    Raises:
        ConfigurationError: A sequence, or a sample of a pack, is not a multiple of `2 * size` tokens long; or a field
            may or may not have a value per token.
    """
    if not 0 <= rank < size:
        raise ConfigurationError(f"slice_for_context_parallel: rank {rank} is not in range({size})")
    if size == 1:
        return batch
    fields = _fields(batch, token_fields)
    length = fields.shape[1]
    if fields.cuts is None:
        indices = zigzag_indices(length, rank=rank, size=size)
        starts = [0]
        lengths = [length]
    else:
        indices = packed_indices(fields.cuts, rank=rank, size=size)
        starts = fields.cuts[:-1].tolist()
        lengths = fields.cuts.diff().tolist()
    taken = {name: value.index_select(axis, indices.to(value.device)) for name, (value, axis) in fields.tokens.items()}
    # The two chunks of a sample lie side by side in the part.
    places = [(start // size, count // size) for start, count in zip(starts, lengths, strict=True)]
    return _with(batch, fields.changed | taken | _placed(batch, places, packed=fields.cuts is not None))


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
            -100 in fields that end in `labels`, 0 elsewhere. `position_ids` count on.
        token_fields: The fields with a value per token, and no others; default: see the module.

    Raises:
        ConfigurationError: A mask over pairs of tokens would have to be padded, packs do not cover their rows, or a
            field may or may not have a value per token.
    """
    multiple = 2 * size
    fields = _fields(batch, token_fields)
    for name, (value, _) in fields.tokens.items():
        if value.dim() == 4 and value.shape[2] == value.shape[3] == fields.shape[1]:
            raise ConfigurationError(
                f"{name} of shape {tuple(value.shape)} cannot be padded: leave it out of the batch"
            )
    cuts = fields.cuts
    if cuts is None:
        starts = [0]
        sizes = [fields.shape[1]]
    else:
        starts = cuts[:-1].tolist()
        sizes = cuts.diff().tolist()
    padded = [n + -n % multiple for n in sizes]
    changed: dict[str, Any] = {} if cuts is None else _ends(batch, cuts, padded)
    if padded == sizes:
        return _with(batch, changed) if changed else batch
    for name, (value, axis) in fields.tokens.items():
        parts = []
        for start, old, new in zip(starts, sizes, padded, strict=True):
            part = value.narrow(axis, start, old)
            shape = [*part.shape[:axis], new - old, *part.shape[axis + 1 :]]
            more = part.new_full(shape, _fill_of(name, fill or {}))
            if name == _POSITIONS and old:
                more = part[..., -1:] + 1 + torch.arange(new - old, device=part.device, dtype=part.dtype)
            parts += [part, more]
        changed[name] = torch.cat(parts, dim=axis)
    if cuts is not None:
        places = [(start, None) for start in accumulate(padded[:-1], initial=0)]
        changed |= _placed(batch, places, packed=True)
    return _with(batch, fields.changed | changed)


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
    # Causal attention costs more towards the end of a sequence, so each rank gets an early and a late chunk, as
    # `get_batch_on_this_cp_rank` of megatron-core has it.
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
    starts = cu_seqlens_padded[:-1].tolist()
    lengths = cu_seqlens_padded.diff().tolist()
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
    starts = _get(batch, "cu_seqlens_padded")
    ends = _get(batch, "cu_seqlens")
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


# ---------------------------------------------------------------------------------------------------------------------
# Which fields have a value per token, and along which dimension.


def _fields(batch: Any, token_fields: Sequence[str] | None) -> _Fields:
    names: Sequence[str] = (*TOKEN_FIELDS, *(f"visual_inputs.{name}" for name in TOKEN_FIELDS))
    names = names if token_fields is None else token_fields
    for name in token_fields or ():
        if not isinstance(value := _get(batch, name), Tensor | None):
            raise _not_a_tensor(name, value)
    named = {name: value for name in names if isinstance(value := _get(batch, name), Tensor)}
    flat = next((value for value in named.values() if value.dim() == 2), None)
    if flat is None:
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} has no token-level tensor of shape (B, S) among "
            f"{', '.join(names)}: name its fields in token_fields"
        )
    shape = (flat.shape[0], flat.shape[1])
    tokens: dict[str, tuple[Tensor, int]] = {}
    for name, value in named.items():
        axis = _token_axis(name, value, shape, named=True)
        if axis is None:
            raise ConfigurationError(
                f"{name} has shape {tuple(value.shape)}, but the batch has {shape[0]} rows of {shape[1]} tokens: its "
                "last dimension must be the tokens"
            )
        tokens[name] = value, axis
    for name, value in _others(batch, shape).items() if token_fields is None else ():
        if name not in tokens and (axis := _token_axis(name, value, shape, named=False)) is not None:
            _note(name)
            tokens[name] = value, axis
    cuts = next((ends for name, _ in _ENDS if (ends := _ends_of(batch, name)) is not None), None)
    if cuts is None:
        return _Fields(tokens=tokens, cuts=None, shape=shape, changed={})
    _check_covers(cuts, shape)
    changed = _without_masked_rows(batch, tokens, shape)
    return _Fields(
        tokens={name: _end_to_end(name, *field) for name, field in tokens.items()},
        cuts=cuts,
        shape=(1, shape[0] * shape[1]),
        changed=changed,
    )


def _others(batch: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return the tensors of a batch that may have a value per token."""
    fields: dict[str, Tensor] = {}
    for name, value in read_fields(batch).items():
        if str(name).startswith(_NOT_TOKENS) and not str(name).endswith("_mask"):
            continue
        if isinstance(value, Tensor):
            fields[name] = value
        elif _is_per_token(value, shape):
            raise _not_a_tensor(name, value)
    return fields


def _is_per_token(value: Any, shape: tuple[int, int]) -> bool:
    """Whether a value that is no tensor has the shape of the tokens: an array, or lists of numbers or tensors."""
    if isinstance(value, np.ndarray):
        return shape in (value.shape[:2], value.shape[-2:])
    if not (isinstance(value, list | tuple) and len(value) == shape[0]):
        return False
    if all(isinstance(row, np.ndarray | Tensor) for row in value):
        return all(row.ndim and row.shape[0] == shape[1] for row in value)
    lists = all(isinstance(row, list | tuple) and len(row) == shape[1] for row in value)
    return lists and all(isinstance(one, int | float) for row in value for one in row)


def _not_a_tensor(name: str, value: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{name} is a {type(value).__name__} with a value per token, but only tensors are padded and cut: make it a "
        "tensor in batch() of the task encoder; if it has no value per token, list the fields that have one in "
        "token_fields"
    )


_NOT_TOKENS = ("__", "cu_seqlens", "max_seqlen", "pixel", "image", "video", "second_per_grid")


def _token_axis(name: str, value: Tensor, shape: tuple[int, int], *, named: bool) -> int | None:
    """Return the token dimension of a tensor, None if it has none."""
    (rows, length), dims = shape, tuple(value.shape)
    if value.dim() == 2 or name.endswith(_POSITIONS):
        fits = dims[-1:] == (length,) and (named or dims[-2:] == shape)
        return value.dim() - 1 if fits else None
    if value.dim() == 4 and dims[2:] == (length, length) and name.endswith("mask"):
        return 2  # of a mask over pairs, the queries; the keys of all ranks are needed
    first = dims[:2] == shape and length not in dims[2:]
    last = dims[-2:] == shape and length not in dims[:-2]
    if first != last:
        return 1 if first else value.dim() - 1
    if first or dims == (length,) or (dims[:1] == (rows,) and length in dims[1:]):
        raise ConfigurationError(
            f"{name} has shape {dims}, and the batch {rows} rows of {length} tokens: it cannot be told whether it has "
            "a value per token, or along which dimension. Give it the shape of the tokens, (B, S), followed or "
            "preceded by dimensions of other sizes; if it has no value per token, list the fields that have one in "
            "token_fields"
        )
    return None


@cache
def _note(name: str) -> None:
    logger.warning(
        "context parallelism: the field %s has the shape of the tokens, and is padded and cut as they are. If it has "
        "no value per token, list the fields that have one in token_fields",
        name,
    )


def _fill_of(name: str, fill: Mapping[str, float]) -> float:
    known = TOKEN_FIELDS.get(name.rpartition(".")[2], -100 if name.endswith("labels") else 0)
    return fill.get(name, known)


# ---------------------------------------------------------------------------------------------------------------------
# Packs: where samples end, and rows laid end to end.


def _ends_of(batch: Any, name: str) -> Tensor | None:
    """Return the cumulative lengths of the samples of packs, (samples + 1,), with padding if they are there so."""
    ends = _get(batch, f"{name}_padded")
    ends = _get(batch, name) if ends is None else ends
    return None if ends is None else ends.reshape(-1)


def _ends(batch: Any, cuts: Tensor, padded: Sequence[int]) -> dict[str, Any]:
    """Return the changed fields with ends of samples: `cuts` are the ends so far, `padded` the new lengths."""
    changed: dict[str, Any] = {}
    after = torch.tensor([0, *padded]).cumsum(0).to(cuts)
    for name, longest in _ENDS:
        before = _ends_of(batch, name)
        if before is None:
            continue
        # Where samples end without padding is what it was; a batch with nothing padded may have only one of the two.
        if _get(batch, name) is None:
            changed[name] = before
        if _get(batch, f"{name}_padded") is None or not torch.equal(before, after):
            changed[f"{name}_padded"] = after
        old = _get(batch, longest)
        if old is not None and int(old) != max(padded):
            changed[longest] = torch.full_like(old, max(padded)) if isinstance(old, Tensor) else max(padded)
    if isinstance(total := _get(batch, "total_tokens"), int) and total != sum(padded):
        changed["total_tokens"] = sum(padded)
    return changed


def _check_covers(cuts: Tensor, shape: tuple[int, int]) -> None:
    end = int(cuts[-1])
    tokens = shape[0] * shape[1]
    if end != tokens:
        raise ConfigurationError(
            f"the samples of the packs end at token {end}, but the {shape[0]} rows of {shape[1]} have {tokens} tokens: "
            "cu_seqlens_padded must cover the rows laid end to end"
        )


def _without_masked_rows(batch: Any, tokens: dict[str, tuple[Tensor, int]], shape: tuple[int, int]) -> dict[str, Any]:
    """Set the loss of masked rows to 0 in `tokens`: once rows are laid end to end, `__valid__` cannot name one of them.

    Return the new `__valid__`, of shape (1,).
    """
    valid = _get(batch, "__valid__")
    if not isinstance(valid, Tensor) or shape[0] == 1:
        return {}
    for name, value in (("loss_mask", 0), ("labels", -100)):
        if name in tokens:
            field, axis = tokens[name]
            tokens[name] = field.masked_fill(~valid.to(field.device, torch.bool)[:, None], value), axis
    return {"__valid__": valid.any().reshape(1)}


def _end_to_end(name: str, value: Tensor, axis: int) -> tuple[Tensor, int]:
    """Lay the rows of a batch end to end: (B, S, …) to (1, B * S, …), (3, B, S) to (3, 1, B * S)."""
    if value.dim() == 4 and axis == 2:
        raise ConfigurationError(
            f"{name} of shape {tuple(value.shape)} is not a field of packed sequences: leave it out of the batch"
        )
    return value.reshape(*value.shape[: axis - 1], 1, -1, *value.shape[axis + 1 :]), axis


def _placed(batch: Any, places: Sequence[tuple[int, int | None]], *, packed: bool) -> dict[str, Any]:
    """Return the `segments` of a batch with the (start, length) of each sample replaced; length None: as it was."""
    rows = _get(batch, "segments")
    if not rows:
        return {}
    rows = [[part for row in rows for part in row]] if packed else rows
    if any(len(row) != len(places) for row in rows):
        return {"segments": None}  # of samples that cu_seqlens do not tell apart
    return {
        "segments": [
            tuple(
                part._replace(start=start, length=part.length if length is None else length)
                for part, (start, length) in zip(row, places, strict=True)
            )
            for row in rows
        ]
    }


def _get(batch: Any, name: str) -> Any:
    outer, _, inner = name.partition(".")
    value = batch.get(outer) if isinstance(batch, Mapping) else getattr(batch, outer, None)
    return _get(value, inner) if inner and value is not None else value


def _with(batch: B, changed: Mapping[str, Any]) -> B:
    result: Any = copy.copy(batch)
    for name, value in changed.items():
        outer, _, inner = name.partition(".")
        new = _with(_get(result, outer), {inner: value}) if inner else value
        if isinstance(result, dict):
            result[outer] = new
        else:
            object.__setattr__(result, outer, new)
    return cast(B, result)

"""The media of a context-parallel rank: a share of those of its replica, and the features of all put together again.

    share = share_media(batch, rank=1, size=2, merge_size=2)  # or the encoder's batch of make_roles(context_parallel=)
    own = tower(**share.visual_inputs) if share.visual_inputs else torch.empty(0, hidden_size)
    features = gather_features(own, share.part_tokens[0]["image"], cp_group)  # as if this rank had encoded all

Whole media are divided, in their order, into a run for each rank, and the runs have token sums as level as that allows.
So the features of all ranks, one rank after the other, are in the order of their tokens. Of each kind of media this
holds by itself. A rank has no media where there are fewer than ranks, or where one is larger than a rank's share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from energon_bridge.core.encoder.collate import read_fields
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS
from energon_bridge.trainers.context_parallel import TOKEN_FIELDS
from energon_bridge.trainers.roles.encoding import EncoderBatch, cut

_KINDS: Mapping[str, tuple[str, ...]] = {
    "image": ("image_grid_thw", "pixel_values"),
    "video": ("video_grid_thw", "pixel_values_videos", "second_per_grid_ts"),
}
"""Of each kind of media: its grids, its patches, and what else has an entry for each medium."""


def share_media(batch: Any, *, rank: int, size: int, merge_size: int, blank_media: bool = False) -> EncoderBatch:
    """Return the media of a batch that one context-parallel rank encodes; all ranks must have the same batch.

    A batch that is not loaded yet is better divided by `make_roles(context_parallel=...)`, with which each rank reads
    and decodes its own media only.

    Args:
        batch: A dataclass or dict with media that have grids of patches (`image_grid_thw`, `video_grid_thw`), as those
            of Qwen-VL models, in itself or in `visual_inputs`.
        rank: Context-parallel rank.
        size: Context-parallel size.
        merge_size: Patches along each side of a token, `spatial_merge_size` of the vision tower.
        blank_media: Whether a rank without media of a kind gets the smallest that there is as a blank one, so that its
            encoder runs, as FSDP and DDP need it: `part_tokens` leaves its features out, `gather_features` drops them.

    Raises:
        ConfigurationError: There are media without a grid, or the grids are not those of the patches.
    """
    if not 0 <= rank < size:
        raise ConfigurationError(f"share_media: rank {rank} is not in range({size})")
    fields = {str(name): value for name, value in read_fields(batch).items()}
    inner = read_fields(fields.pop("visual_inputs", None) or {})
    known = {name for names in _KINDS.values() for name in names}
    of_tokens = {*TOKEN_FIELDS, *TOKEN_INPUTS}
    both = [*inner.items(), *((name, fields[name]) for name in known & fields.keys())]
    given = {name: one for name, one in both if isinstance(one, Tensor) and name not in of_tokens}
    counts = {kind: _tokens(kind, given, merge_size) for kind in _KINDS if {*_KINDS[kind][:2]} <= given.keys()}
    if unknown := sorted(given.keys() - {name for kind in counts for name in _KINDS[kind]}):
        raise ConfigurationError(
            f"share_media: the batch has {', '.join(unknown)}, but only patches that have a grid for each medium "
            "(image_grid_thw, video_grid_thw) can be divided: let make_roles(context_parallel=...) divide its media "
            "before they are loaded"
        )
    parts = iter(cut([tokens for of_kind in counts.values() for tokens in of_kind], size))
    visual: dict[str, Tensor] = {}
    part_tokens = {kind: [0] * size for kind in _KINDS}
    own: list[int] = []
    blank: list[str] = []
    for kind, of_kind in counts.items():
        place = [next(parts) for _ in of_kind]
        for part, count in zip(place, of_kind, strict=True):
            part_tokens[kind][part] += count
        mine = [number for number, part in enumerate(place) if part == rank]
        own += [of_kind[number] for number in mine]
        if blank_media and of_kind and not mine:
            mine = [of_kind.index(min(of_kind))]
            blank += _KINDS[kind]
        if mine:
            visual |= _taken(kind, given, slice(mine[0], mine[-1] + 1))
    tokens = fields.get("tokens") if fields.get("input_ids") is None else fields["input_ids"]
    return EncoderBatch(
        __key__=list(fields.get("__key__") or ()),
        __restore_key__=fields.get("__restore_key__") or (),
        visual_inputs=visual,
        input_ids=[] if tokens is None else [tokens],
        num_tokens=[sum(own)],
        num_media=[len(own)],
        part_tokens=[part_tokens],
        blank_media=sorted(name for name in blank if name in visual),
        pixel_norm=fields.get("pixel_norm"),
    )


def gather_features(features: Tensor, tokens: Sequence[int], group: Any = None) -> Tensor:
    """Return the features of all context-parallel ranks, in the order of their tokens, on each of them.

    Gradients go back to the rank that made the features, summed over all ranks. So all must call this, and run the
    backward pass of what it returns, also those that make no features or need none.

    Args:
        features: Those of this rank, (n, …); what is behind the first `tokens[rank]` is left out. A rank without media
            gives an empty tensor of their type, (0, …).
        tokens: How many each rank makes, as in `EncoderBatch.part_tokens`.
        group: The context-parallel group; None: all processes.

    Raises:
        ConfigurationError: The rank has fewer features than it makes, or the group has another size.
    """
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    if size != len(tokens) or len(features) < tokens[rank]:
        raise ConfigurationError(
            f"gather_features: rank {rank} of {size} has {len(features)} features, and tokens says {list(tokens)} for "
            f"{len(tokens)} ranks: give the features of this rank's own media, and the group of make_roles or "
            "share_media"
        )
    features = features[: tokens[rank]]
    if size == 1:
        return features
    if torch.is_grad_enabled() and not features.requires_grad:
        # The backward pass sends, too: a rank without media that left it out would leave the others waiting.
        features = features.detach().requires_grad_()
    made: Tensor = _Gathered.apply(features, list(tokens), rank, group)
    return made


class _Gathered(torch.autograd.Function):
    """Parts of unequal length from all ranks, one after the other; backwards, each rank's own part, summed over all.

    All to all, which takes unequal parts with every backend, and sums in the same order in every run.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, lengths: list[int], rank: int, group: Any) -> Tensor:
        ctx.lengths, ctx.rank, ctx.group = lengths, rank, group
        sent = own.repeat(len(lengths), *[1] * (own.ndim - 1))
        received = own.new_empty(sum(lengths), *own.shape[1:])
        dist.all_to_all_single(received, sent, lengths, [lengths[rank]] * len(lengths), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (of_all,) = gradients
        length, ranks = ctx.lengths[ctx.rank], len(ctx.lengths)
        received = of_all.new_empty(ranks * length, *of_all.shape[1:])
        dist.all_to_all_single(received, of_all.contiguous(), [length] * ranks, ctx.lengths, group=ctx.group)
        return received.unflatten(0, (ranks, length)).sum(0), None, None, None


def _tokens(kind: str, given: Mapping[str, Tensor], merge_size: int) -> list[int]:
    """Return the tokens of each medium of a kind. Raises ConfigurationError if grids are not those of the patches."""
    grid, patches, *_ = _KINDS[kind]
    sizes = given[grid].prod(1)
    rows = given[patches].shape[0]
    if int(sizes.sum()) != rows or bool((sizes % merge_size**2).any()):
        raise ConfigurationError(
            f"share_media: {grid} tells of {sizes.tolist()} patches, of which {merge_size}^2 are a token, but "
            f"{patches} has {rows}: give share_media a batch as it was loaded, and the merge_size of its model"
        )
    return (sizes // merge_size**2).tolist()


def _taken(kind: str, given: Mapping[str, Tensor], media: slice) -> dict[str, Tensor]:
    """Return the inputs of some media of a kind that follow each other."""
    grid, patches, *more = _KINDS[kind]
    sizes = given[grid].prod(1)
    first = int(sizes[: media.start].sum())
    taken = {name: given[name][media] for name in (grid, *more) if name in given}
    return {patches: given[patches][first : first + int(sizes[media].sum())], **taken}

"""Steps of roles as the arguments of megatron-core's `MimoModel.forward`, for Megatron-Bridge and Megatron-LM's MIMO.

    arguments = mimo_inputs(step, {"vision": MimoEncoder(module="images", encoder="clip_encoder")})
    output, loss_mask = model(**arguments)

Language ranks get tokens, labels and positions, encoder ranks their media, with the tokens of the same rows: the model
counts the special ones in them to send its features to the language ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.inputs import loss_weights
from energon_bridge.models.conversations.sequences import pad_to
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.models.packing.packed_sequences import ends_of_packs
from energon_bridge.trainers.roles.encoding import EncoderBatch
from energon_bridge.trainers.roles.roles import LANGUAGE

_PACKING = [f"{name}_{of}" for name in ("cu_seqlens", "max_seqlen") for of in ("q", "kv")]
_PACKING += ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MimoEncoder:
    """Where the media of a grid go.

    Args:
        module: Name of the modality submodule, as `images`.
        encoder: Name of the encoder in it, as `clip_encoder`.
        arguments: Its arguments by the names that media have here, such as `{"pixel_values": "x", "image_grid_thw":
            "grid_thw"}`; media that are not in it are left out. None: all, by their own names.
    """

    module: str
    encoder: str
    arguments: Mapping[str, str] | None = field(default=None)


def mimo_inputs(step: Mapping[str, Any], encoders: Mapping[str, MimoEncoder]) -> dict[str, Any]:
    """Return the arguments of `MimoModel.forward` for a step of this process.

    On a language rank they are its microbatch; on a rank of an encoder, the media of the microbatches that it serves,
    and their tokens, rows after rows. A process with both, which has the modules side by side, gets both.

    Args:
        step: From a loader of `make_roles`.
        encoders: Where the media of each grid go, by its name.

    Raises:
        ConfigurationError: The step has media of a grid that `encoders` does not name, or blank media; or the process
            has both, and the microbatches that it serves, or the ranks that divide one, have unequal media.
    """
    if missing := sorted(step.keys() - encoders.keys() - {LANGUAGE}):
        raise ConfigurationError(f"mimo_inputs: say in encoders where the media of {', '.join(missing)} go")
    names = ("input_ids", "position_ids", "attention_mask", "loss_mask", "labels", "packing_kwargs")
    inputs: dict[str, Any] = dict.fromkeys(names) | {"modality_inputs": {}}
    for name, batch in step.items():
        if name == LANGUAGE:
            inputs |= _language(batch)
            continue
        _check_media(name, batch, beside=LANGUAGE in step)
        where = encoders[name]
        if inputs["input_ids"] is None:
            inputs["input_ids"] = _tokens(batch)
        if batch.visual_inputs:
            inputs["modality_inputs"].setdefault(where.module, {})[where.encoder] = _media(batch, where)
    return inputs


def _check_media(name: str, batch: EncoderBatch, *, beside: bool) -> None:
    """Raise ConfigurationError for media whose features `MimoModel` would give to the wrong tokens, or to none."""
    if batch.blank_media:
        raise ConfigurationError(
            f"mimo_inputs: {name} has blank media, whose features belong to no token, and MimoModel would send them: "
            "leave blank_media out of make_roles, for its encoder ranks without media send no features"
        )
    # Tokens of each microbatch that this rank serves, or of each rank that divides one with it.
    parts = [sum(kinds) for lane in batch.part_tokens for kinds in zip(*lane.values(), strict=True)]
    counts = parts or batch.num_tokens
    if beside and len(set(counts)) > 1:
        raise ConfigurationError(
            f"mimo_inputs: this process has the language model and {name} side by side, and the media of the "
            f"microbatches that it serves, or of the ranks that divide one, have {', '.join(map(str, counts))} tokens. "
            "megatron-core cuts and joins the features of such processes in equal parts: make roles with as many ranks "
            "of language as of the encoder and macro=1, put the encoder on processes of its own, or send its features "
            "by num_tokens and part_tokens yourself"
        )


def _language(batch: Any) -> dict[str, Any]:
    of_bridge = isinstance(batch, Mapping)  # of BridgeTaskEncoder
    given: Callable[[str], Any] = batch.get if of_bridge else lambda name: getattr(batch, name)
    packing = None
    if given("cu_seqlens_q" if of_bridge else "cu_seqlens") is not None:
        packing = {name: batch[name] for name in _PACKING} if of_bridge else ends_of_packs(batch, mtp=False)
    mrope, mask = given("mrope_position_ids"), given("loss_mask")
    return {
        "input_ids": given("input_ids" if of_bridge else "tokens"),
        "position_ids": given("position_ids") if mrope is None else mrope,
        "labels": given("labels"),
        "loss_mask": mask if of_bridge or mask is None else loss_weights(batch),
        "packing_kwargs": packing,
    }


def _tokens(batch: EncoderBatch) -> torch.Tensor:
    """Return the tokens of all rows, (rows, S), padded with -1, which stands for no medium."""
    longest = max(tokens.shape[1] for tokens in batch.input_ids)
    return torch.cat([pad_to(tokens, longest, -1) for tokens in batch.input_ids])


def _media(batch: EncoderBatch, where: MimoEncoder) -> dict[str, Any]:
    media = normalise_on_device(batch).visual_inputs
    if where.arguments is None:
        return dict(media)
    return {ours: media[name] for name, ours in where.arguments.items() if name in media}

"""Inputs of transformers models: rows of one sample each are described by an attention mask, packs by their positions.

Positions that restart tell transformers where a sample ends; its masks and variable-length kernels then keep samples
apart. But this works only without an attention mask and without a cache: with either, the model silently attends across
samples. So both are left out, and `check_packing` tests the model before training. Models with three position axes (the
Qwen-VL families) get the plain positions in front of the three, and use those to tell samples apart.

Padding needs no mask: it follows the tokens of its sample, attention is causal, and padding carries no loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.packed_sequences import batch_packs, pack_sequences
from energon_bridge.task_encoder.sequences import MultiModalBatch, MultiModalSample, PaddingValues

# Of a change in the first sample, 0.13 to 0.81 leaked into the others in small models (LLaVA and Idefics3 with a cache,
# Qwen2-VL as it is), and exactly nothing in LLaVA and Idefics3 as they are called here. This leaves room for noise in
# models that compute the tokens of all samples together, such as mixtures of experts.
_NOISE = 1e-2


def sequence_inputs(batch: MultiModalBatch, *, mrope: bool = False) -> dict[str, Any]:
    """Return the forward arguments that tell which tokens of a batch see each other, and their positions.

    A model with three position axes (`mrope`) gets them after the plain positions, which tell where a sample begins:
    int64 of shape (4, B, S). Without such positions in the batch, the plain ones are used for all axes.
    """
    positions = batch.mrope_position_ids
    if batch.cu_seqlens is None:
        inputs = {"attention_mask": batch.attention_mask}
        return inputs if positions is None else {**inputs, "position_ids": positions}
    plain = batch.position_ids
    if mrope or positions is not None:
        axes = plain.expand(3, *plain.shape) if positions is None else positions
        plain = torch.cat([plain[None], axes])
    return {"position_ids": plain, "use_cache": False}


def takes_mrope(model: Any) -> bool:
    """Whether a model's positions have three axes: time, height and width."""
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return "mrope_section" in rope


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Check that a model keeps the samples of a pack apart, on three samples of three tokens each.

    Raises:
        ConfigurationError: Changing the tokens of one sample changes the model's output for the others.
    """
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    first, second = (_logits(model, tokens) for tokens in ([5, 6, 7], [8, 9, 10]))
    for part, training in modes:
        part.training = training
    change = (first - second).abs().amax(dim=(0, 2))
    if change[:3].max() == 0 or change[3:].max() > _NOISE * change[:3].max():
        raise ConfigurationError(
            f"{type(model).__name__} does not keep the samples of a pack apart: other tokens in the first sample "
            f"change the logits of the next ones by up to {float(change[3:].max()):.2g} (expected: 0). Its attention "
            f"({getattr(model.config, '_attn_implementation', None)}) does not go by restarting position_ids; train "
            "unpacked (data.packing_buffer_size=null), or with a model of another family"
        )


def _logits(model: Any, tokens: list[int]) -> Tensor:
    filling = PaddingValues(pad_id=0, ignore=-100)
    samples = [_sample(tokens), _sample([5, 6, 7]), _sample([7, 6, 5])]
    batch = batch_packs([pack_sequences(samples, filling)], filling)
    batch.tokens, batch.position_ids = (values.to(model.device) for values in (batch.tokens, batch.position_ids))
    logits: Tensor = model(input_ids=batch.tokens, **sequence_inputs(batch, mrope=takes_mrope(model))).logits
    return logits.float()


def _sample(tokens: list[int]) -> MultiModalSample:
    sequence = torch.tensor(tokens)
    return MultiModalSample(
        __key__="check",
        __restore_key__=(),
        tokens=sequence,
        labels=sequence,
        loss_mask=torch.ones(len(tokens)),
        visual={},
        answer="",
        num_images=0,
    )

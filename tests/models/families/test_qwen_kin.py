"""Qwen3-VL with experts and Qwen3.5: the native family, with the positions and losses of their models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import QWEN_KIN, chat, encoder_of, model_config_of, model_of, picture, tokenizer_of

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.inputs import check_packing, model_inputs
from energon_bridge.models.families import QwenFamily, VideoFrames


def samples_of(encoder: Any) -> list[Any]:
    frames = torch.randint(0, 256, (5, 3, 20, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    talks = [
        chat("<image> color? <image>", "red", images=[picture(16, 24), picture(32, 16, seed=1)]),
        chat("<video> color? <image>", "blue", images=[picture()], videos=[VideoFrames(frames=frames, fps=3.0)]),
        chat("color?", "how many?", "<image>", "green", images=[picture(24, 24, seed=2)]),
        chat("color?", "how many?"),
    ]
    return [encoder.encode(sample) for sample in talks]


@pytest.mark.parametrize("model_type", QWEN_KIN)
def test_positions_and_losses_are_those_of_the_model(model_type: str) -> None:
    encoder = encoder_of(model_type)
    assert type(encoder.family) is QwenFamily
    model = model_of(model_config_of(model_type, tokenizer_of(model_type))).eval()
    samples = samples_of(encoder)
    losses, counts = [], []
    for sample in samples:
        tokens = torch.cat([sample.tokens, sample.labels[-1:]])[None]
        labels = torch.full_like(tokens, -100)
        labels[0, 1:] = torch.where(sample.loss_mask > 0, sample.labels, -100)
        types = torch.eq(tokens, model.config.image_token_id) + 2 * torch.eq(tokens, model.config.video_token_id)
        grids = {name: value for name, value in sample.visual.items() if name.endswith("_thw")}
        if grids:
            own, _ = model.model.get_rope_index(input_ids=tokens, mm_token_type_ids=types, **grids)
            assert torch.equal(sample.mrope_position_ids, own[:, 0, :-1])
        visual = {name: value for name, value in sample.visual.items() if name != "second_per_grid_ts"}
        with torch.no_grad():
            loss = model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                mm_token_type_ids=types,
                labels=labels,
                **visual,
            ).loss
        counts.append(int((labels != -100).sum()))
        losses.append(float(loss) * counts[-1])
    inputs = model_inputs(encoder.batch(samples), model)
    with torch.no_grad():
        assert float(model(**inputs).loss) == pytest.approx(sum(losses) / sum(counts), rel=1e-5)
    packs = [encoder.pack_selected_samples(samples[:3]), encoder.pack_selected_samples(samples[3:])]
    if model_type.startswith("qwen3_5"):  # its linear attention runs through all samples of a pack
        with pytest.raises(ConfigurationError, match="does not keep the samples of a pack apart"):
            check_packing(model)
        return
    with torch.no_grad():
        assert float(model(**model_inputs(encoder.batch(packs), model)).loss) == pytest.approx(
            sum(losses) / sum(counts), rel=1e-5
        )

"""Tiny models of each family, from configurations, on what the encoder gives them: they learn, packed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, QWENS, chat, encoder_of, model_config_of, model_of, picture, tokenizer_of

pytest.importorskip("transformers")

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import TextSample, VQASample
from energon_bridge.models.conversations.layout import ImageToken, MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.conversations.sequences import MultiModalSample, PaddingValues
from energon_bridge.models.families import ChatTemplateTaskEncoder, QwenFamily
from energon_bridge.models.packing.packed_sequences import unpack_batch
from energon_bridge.training.config import RunConfig
from energon_bridge.training.module import VisionLanguageModule, check_packing, sequence_inputs, takes_mrope
from energon_bridge.training.presets import ModelBundle

COLORS = ("red", "green", "blue")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def conversations(encoder: ChatTemplateTaskEncoder, count: int = 8) -> list[MultiModalSample]:
    """Interleaved conversations with 1 to 3 images of various sizes, and texts without any."""
    samples: list[Any] = []
    for number in range(count):
        colors = [COLORS[(number + image * (number % 3)) % 3] for image in range(number % 3 + 1)]
        images = [picture(16 + 8 * (number % 2), 16 + 4 * n, color) for n, color in enumerate(colors)]
        turns = [text for color in colors for text in ("<image> color?", color)]
        samples.append(chat(*turns, "how many?", str(len(colors)), images=images, key=f"talk {number}"))
    samples.append(chat("color?", "how many?", key="text"))
    return [encoder.encode(sample) for sample in samples]


def module_of(family: str, encoder: ChatTemplateTaskEncoder) -> VisionLanguageModule:
    config = model_config_of(family, encoder.tokenizer)
    assert encoder.family is not None
    token_id = encoder.tokenizer.convert_tokens_to_ids(encoder.family.image_token)
    bundle = ModelBundle(
        model=model_of(config),
        tokenizer=encoder.tokenizer,
        image_processor=None,
        image_token_id=token_id,
        image_tokens=None,
    )
    return VisionLanguageModule(bundle, RunConfig())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_is_checked_with_the_positions_of_the_family(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(model_config_of(family, tokenizer_of(family)))
    model.set_attn_implementation(attention)
    check_packing(model)
    assert takes_mrope(model) == (family in QWENS)
    if family in QWENS:  # which mixes the samples without the plain positions in front
        forward = model.forward
        monkeypatch.setattr(
            model, "forward", lambda **inputs: forward(**inputs | {"position_ids": inputs["position_ids"][1:]})
        )
        with pytest.raises(ConfigurationError, match="does not keep the samples of a pack apart"):
            check_packing(model)


@pytest.mark.parametrize("qwen", QWENS)
def test_positions_of_packs_begin_again_in_every_sample(qwen: str) -> None:
    encoder = encoder_of(qwen)
    samples = conversations(encoder, 3)
    batch = encoder.batch([encoder.pack_selected_samples(samples)])
    inputs = sequence_inputs(batch)
    assert inputs["position_ids"].shape == (4, 1, batch.tokens.shape[1])
    assert torch.equal(inputs["position_ids"][0], batch.position_ids)
    expected = [sample.mrope_position_ids for sample in samples]
    assert torch.equal(inputs["position_ids"][1:, 0], torch.cat(expected, dim=1))  # type: ignore[arg-type]
    rows = unpack_batch(batch, PaddingValues(pad_id=0, ignore=-100))
    alone = encoder.batch(samples)
    for name in ("tokens", "labels", "mm_token_type_ids", "mrope_position_ids", "attention_mask"):
        assert torch.equal(getattr(rows, name), getattr(alone, name)), name


@pytest.mark.parametrize("qwen", QWENS)
def test_packs_of_the_multimodal_encoder_have_the_losses_of_their_samples(qwen: str) -> None:
    made = encoder_of(qwen)
    assert isinstance(made.family, QwenFamily)
    token = ImageToken(
        token_id=made.tokenizer.convert_tokens_to_ids(made.family.image_token),
        before="<|vision_start|>",
        after="<|vision_end|>",
    )
    config = MultiModalSampleConfig(image_token=token)
    encoder = MultiModalTaskEncoder(made.tokenizer, made.family.image_processor, config)
    samples = [
        encoder.encode_sample(VQASample(__key__="a", image=images, context="<image>?" * count, answers=["red"]))  # type: ignore[arg-type]
        for count in (1, 2)
        for images in [[picture(16 + 16 * number, 24) for number in range(count)]]
    ]
    samples.append(encoder.encode_sample(TextSample(__key__="text", text="red green")))
    module = module_of(qwen, made)
    packs, rows = encoder.batch([encoder.pack_selected_samples(samples)]), encoder.batch(samples)
    with torch.no_grad():
        packed, alone = (module.token_losses(batch)[0][batch.loss_mask.bool()] for batch in (packs, rows))
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
        rows.mrope_position_ids = None  # the model's own
        torch.testing.assert_close(module.token_losses(rows)[0][rows.loss_mask.bool()], alone, rtol=1e-4, atol=1e-4)

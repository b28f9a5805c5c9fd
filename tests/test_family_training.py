"""Tiny models of each family, from configurations, on what the encoder gives them: they learn, packed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, QWENS, chat, encoder_of, model_config_of, model_of, picture
from torch.nn import functional

pytest.importorskip("transformers")

from energon_bridge.errors import ConfigurationError
from energon_bridge.samples import InterleavedSample, TextSample
from energon_bridge.task_encoder.families import ChatTemplateTaskEncoder, VideoFrames
from energon_bridge.task_encoder.sequences import MultiModalBatch, MultiModalSample
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.packed import check_packing, sequence_inputs, takes_mrope
from energon_bridge.training.config import RunConfig
from energon_bridge.training.presets import ModelBundle

COLORS = ("red", "green", "blue")


@pytest.fixture(scope="module", params=FAMILIES)
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


def losses_of(module: VisionLanguageModule, batch: MultiModalBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return module._token_losses(batch)


@pytest.mark.parametrize("packs", [False, True], ids=["rows", "packs"])
def test_the_loss_falls_by_half_in_30_steps(family: str, packs: bool) -> None:
    encoder = encoder_of(family)
    module = module_of(family, encoder)
    samples = conversations(encoder)
    if packs:
        groups = [samples[:3], samples[3:5], samples[5:]]
        batch = encoder.batch([encoder.pack_selected_samples(group) for group in groups])
        assert len(batch.tokens) == 3
    else:
        batch = encoder.batch(samples)
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3)
    losses = []
    for _ in range(31):
        values, mask = losses_of(module, batch)
        loss = (values * mask).sum() / mask.sum()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[30] < losses[0] / 2
    print(family, packs, losses[0], losses[30])

"""LLaVA-NeXT: tokens counted from sizes against its processor in transformers, and against its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

pytest.importorskip("transformers")

import transformers
from families import chat, tokenizer_of
from transformers import LlavaNextConfig, LlavaNextImageProcessorPil

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.families import (
    ChatConfig,
    ChatTemplateTaskEncoder,
    TiledFamily,
    family_of,
    llava_next_family,
)

PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def image_processor(pinpoints: Any = PINPOINTS) -> Any:
    return LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=pinpoints
    )


def config_of(tokenizer: Any, strategy: str = "default", tower: str = "clip") -> LlavaNextConfig:
    vision = {**_TEXT, "image_size": 16, "patch_size": 4}
    towers = {"clip": transformers.CLIPVisionConfig, "siglip": transformers.SiglipVisionConfig}
    return LlavaNextConfig(
        vision_config=towers[tower](**vision, **({"projection_dim": 32} if tower == "clip" else {})),
        text_config=transformers.LlamaConfig(**_TEXT, vocab_size=len(tokenizer), pad_token_id=0),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-1,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of("llava")


@pytest.mark.parametrize(("strategy", "tower"), [("default", "clip"), ("full", "clip"), ("full", "siglip")])
def test_tokens_are_those_that_the_processor_counts(tokenizer: Any, strategy: str, tower: str) -> None:
    processor = transformers.LlavaNextProcessor(
        image_processor(),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int(tower == "clip"),
    )
    family = family_of(config_of(tokenizer, strategy, tower), tokenizer, image_processor())
    assert isinstance(family, TiledFamily)

    @settings(max_examples=150, deadline=None)
    @given(st.integers(1, 900), st.integers(1, 900))
    def check(width: int, height: int) -> None:
        expected = processor._get_number_of_features(height, width, 16, 16) - (strategy == "default")
        assert family.plan_image(width, height).tokens == expected

    check()


@pytest.mark.parametrize("pixels", [None, "torch", "processor"])
def test_the_model_takes_batches_of_images_of_many_sizes(tokenizer: Any, pixels: Any) -> None:
    config = config_of(tokenizer)
    encoder = ChatTemplateTaskEncoder.for_model(config, tokenizer, image_processor(), ChatConfig(pixels=pixels))
    sizes = [(30, 10), (10, 30), (20, 21), (100, 7)]
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)) for width, height in sizes]
    samples = [encoder.encode(chat("<image>a", "b", images=[image])) for image in images]
    batch = encoder.batch(samples)
    assert batch.visual_inputs["image_sizes"].tolist() == [[height, width] for width, height in sizes]
    torch.manual_seed(0)
    model = transformers.LlavaNextForConditionalGeneration(config).eval()
    with torch.no_grad():  # which refuses another number of features than of tokens
        logits = model(
            input_ids=batch.tokens,
            attention_mask=batch.attention_mask,
            pixel_values=batch.pixel_values,
            image_sizes=batch.visual_inputs["image_sizes"],
        ).logits
    assert logits.isfinite().all()
    if pixels is None:
        expected = image_processor()(images=images, return_tensors="pt")
        assert torch.equal(batch.pixel_values, expected["pixel_values"])


def test_other_resolutions_than_the_models_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"image_grid_pinpoints of the model .* differ"):
        family_of(config_of(tokenizer), tokenizer, image_processor([[16, 32]]))
    with pytest.raises(ConfigurationError, match="not an image processor of LLaVA-NeXT"):
        llava_next_family(transformers.CLIPImageProcessorPil(), patch_size=14)


def test_a_processor_that_changes_is_noticed(tokenizer: Any) -> None:
    processor = image_processor()
    family = llava_next_family(processor, patch_size=4)
    image = Image.new("RGB", (30, 10))
    with pytest.raises(SampleError, match="tokens, but their sizes give"):
        family.process([image], [], [family.plan_image(10, 10)])

"""Tiny models of every kind on what their processors' encoders make: the loss is that of each sample alone."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from processors import (
    HAS_ALL_TEXTS,
    ONE_QUESTION,
    called,
    conversation,
    medium,
    planned,
    template_of,
    tiny_model,
    tiny_model_config,
    tiny_processor,
)

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.inputs import check_packing, model_inputs
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder
from energon_bridge.training.config import RunConfig
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import ModelBundle

MODELS = {
    "gemma3": "Gemma3Processor",
    "internvl": "InternVLProcessor",
    "idefics3": "Idefics3Processor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "paddleocr_vl": "PaddleOCRVLProcessor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
    "qwen2_audio": "Qwen2AudioProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "mistral3": "PixtralProcessor",
    "glm4v": "Glm4vProcessor",
    "aya_vision": "AyaVisionProcessor",
    "minicpm_ocr": "MiniCPMOcrProcessor",
    "minicpmv4_6": "MiniCPMV4_6Processor",
    "minicpmv4_7": "MiniCPMV4_7Processor",
    "mllama": "MllamaProcessor",
    "paligemma": "PaliGemmaProcessor",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeProcessor",
}

MIXED = "does not keep the samples of a pack apart"
REFUSED_PACKS = {
    "mllama": "sees images through cross-attention",
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5"), MIXED),  # linear attention
    "paligemma": MIXED,  # a question of a row sees all others
}
if HAS_ALL_TEXTS:  # from transformers 5.23 on, its sliding mask reads types of images at other places
    REFUSED_PACKS["gemma3"] = MIXED

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
SHORT = (
    *("ernie4_5_vl_moe", "gemma3", "minicpmv4_6", "minicpmv4_7", "mllama", "paddleocr_vl", "paligemma"),
    *("qwen2_audio", "qwen3_vl"),
)


@cache
def made(model_type: str) -> tuple[Any, Any, ChatTemplateTaskEncoder]:
    processor = tiny_processor(MODELS[model_type])
    model = tiny_model(tiny_model_config(model_type, processor))
    config = ChatConfig(chat_template=template_of(processor), seq_length=60_000, over_long="raise")
    return processor, model, ChatTemplateTaskEncoder.for_processor(processor, config, model_config=model.config)


@torch.no_grad()
def alone(model: Any, processor: Any, text: str, sample: Any, encoded: Any) -> tuple[float, int]:
    """Return the model's own loss on what its own processor makes of a sample, summed over the learned tokens."""
    inputs = called(processor, [text], [sample])
    inputs.pop("video_metadata", None)
    tokens = inputs["input_ids"]
    labels = torch.full_like(tokens, -100)
    labels[0, 1 : len(encoded.labels) + 1] = torch.where(encoded.loss_mask > 0, encoded.labels, -100)
    labels = inputs.pop("labels", labels)  # the processor's own, if it tells what an answer is
    count = int((labels != -100).sum())
    return float(model(**inputs, labels=labels).loss) * count, count


@torch.no_grad()
def summed(model: Any, inputs: dict[str, Any]) -> tuple[float, int]:
    count = int((inputs["labels"][:, 1:] != -100).sum())
    return float(model(**inputs).loss) * count, count


def text_alone() -> tuple[ChatSample, str]:
    """Return a conversation without media, as they are mixed in."""
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A line."}]
    text = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nA line.<|im_end|>\n"
    return ChatSample(__key__="text", messages=turns), text


def module_of(model: Any, encoder: ChatTemplateTaskEncoder) -> VisionLanguageModule:
    token = getattr(model.config, "image_token_id", None) or 0
    bundle = ModelBundle(
        model=model, tokenizer=encoder.tokenizer, image_processor=None, image_token_id=token, image_tokens=None
    )
    return VisionLanguageModule(bundle, RunConfig())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", MODELS if LONG else SHORT)
def test_losses_are_those_of_each_sample_alone(model_type: str) -> None:
    try:
        with planned():
            processor, model, encoder = made(model_type)
    except ImportError as error:
        pytest.skip(str(error))
    kinds = list(encoder.family.counts)
    numbers = (1, 2, 3, 4) if model_type == "glm4v" else (0, 1, 3, 4)  # it takes no image beside a video
    talks = [conversation(number, kinds, processor) for number in numbers]
    if MODELS[model_type] not in ONE_QUESTION:  # it takes no text without an image
        talks.insert(1, text_alone())
    samples = [encoder.encode(sample) for sample, _ in talks]
    wanted = [alone(model, processor, text, sample, one) for (sample, text), one in zip(talks, samples, strict=True)]
    loss, count = (sum(values) for values in zip(*wanted, strict=True))
    # Before its first image, a text of MLlama attends to all images of its row alike, also to those that fill it up.
    close = 1e-4 if model_type == "mllama" else 2e-6
    assert summed(model, model_inputs(encoder.batch(samples), model)) == (pytest.approx(loss, rel=close), count)
    with torch.no_grad():
        losses, mask = module_of(model, encoder).token_losses(encoder.batch(samples))
    assert (float((losses * mask).sum()), int(mask.sum())) == (pytest.approx(loss, rel=close), count)
    if (reason := REFUSED_PACKS.get(model_type)) is not None:
        with pytest.raises(ConfigurationError, match=reason):
            check_packing(model)
        return
    check_packing(model)
    packs = [encoder.pack_selected_samples(samples[:3]), encoder.pack_selected_samples(samples[3:])]
    assert summed(model, model_inputs(encoder.batch(packs), model)) == (pytest.approx(loss, rel=2e-6), count)


@pytest.mark.filterwarnings("ignore")
def test_packs_with_positions_on_a_canvas_need_the_configuration_of_their_model() -> None:
    """Those of MiniCPM-V 4.7, here with full attention throughout, which keeps the samples of packs apart."""
    with planned():
        processor = tiny_processor("MiniCPMV4_7Processor")
    config = tiny_model_config("minicpmv4_7", processor)
    config.text_config.layer_types = ["full_attention"] * 2
    model = tiny_model(config)
    chat = ChatConfig(chat_template=template_of(processor), seq_length=60_000)
    for known in (config, None):
        encoder = ChatTemplateTaskEncoder.for_processor(processor, chat, model_config=known)
        talks = [conversation(number, list(encoder.family.counts), processor) for number in (0, 1, 3)]
        samples = [encoder.encode(sample) for sample, _ in talks]
        wanted = [
            alone(model, processor, text, sample, one) for (sample, text), one in zip(talks, samples, strict=True)
        ]
        pack = encoder.batch([encoder.pack_selected_samples(samples)])
        if known is None:
            with pytest.raises(ConfigurationError, match=r"target_sizes.*, but no mrope_position_ids"):
                model_inputs(pack, model)
        else:
            loss, count = (sum(values) for values in zip(*wanted, strict=True))
            assert summed(model, model_inputs(pack, model)) == (pytest.approx(loss, rel=2e-6), count)


@pytest.mark.filterwarnings("ignore")
def test_prompts_of_several_lengths_see_their_own_images() -> None:
    """What MLlama gets of images for each token moves with the tokens, to the right."""
    processor, model, encoder = made("mllama")
    module = module_of(model, encoder)
    samples = []
    for number, question in enumerate(("<image>a?", "<image>what is it that one may see in here?")):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "A line."}]
        picture = medium("image", np.random.default_rng(number), processor)
        samples.append(encoder.encode(ChatSample(__key__=question, messages=turns, images=[picture])))
    alone = [module.predict(encoder.batch([sample]))[0].generated for sample in samples]
    assert [one.generated for one in module.predict(encoder.batch(samples))] == alone

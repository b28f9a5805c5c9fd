"""Every processor of the installed transformers: what an encoder makes of conversations is what the processor makes."""

from __future__ import annotations

import os

import pytest
import torch
from processors import called, conversation, expands, processor_classes, template_of, tiny_processor
from torch import Tensor
from transformers.models.auto.processing_auto import processor_class_from_name

from energon_bridge.errors import ConfigurationError, SampleError
from energon_bridge.task_encoder.families import ChatConfig, ChatTemplateTaskEncoder

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
SHORT = {
    "AyaVisionProcessor",
    "ChameleonProcessor",
    "Gemma3Processor",
    "Gemma3nProcessor",
    "Idefics3Processor",
    "LlavaNextProcessor",
    "PaddleOCRVLProcessor",
    "Qwen2AudioProcessor",
    "Qwen3ASRProcessor",
    "Qwen3VLProcessor",
}


def classes() -> list[str]:
    found = []
    for name in processor_classes():
        try:
            kind = processor_class_from_name(name)
            kind.get_attributes()
        except ImportError:
            continue
        if expands(kind) and (LONG or name in SHORT):
            found.append(name)
    return found


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether values are equal, where either may be padded with zeros on any axis but the first."""
    if ours.dtype != theirs.dtype or ours.ndim != theirs.ndim or len(ours) != len(theirs):
        return False
    box = tuple(slice(0, min(sides)) for sides in zip(ours.shape, theirs.shape, strict=True))
    return torch.equal(ours[box], theirs[box]) and all(
        int(values.count_nonzero()) == int(values[box].count_nonzero()) for values in (ours, theirs)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", classes())
def test_an_encoder_makes_what_the_processor_makes(name: str) -> None:
    try:
        processor = tiny_processor(name)
    except ImportError as error:
        pytest.skip(str(error))
    try:
        encoder = ChatTemplateTaskEncoder.for_processor(
            processor, ChatConfig(chat_template=template_of(processor), seq_length=60_000, over_long="raise")
        )
    except ConfigurationError as error:
        pytest.skip(str(error))  # the table of the docs has the reason
    kinds = list(encoder.family.counts)
    compared = 0
    for number in range(24 if LONG else 4):
        sample, text = conversation(number, kinds, processor)
        try:
            theirs = called(processor, [text], [sample])
        except Exception as error:
            # What the processor itself cannot take, for example two videos of different lengths: refused by name.
            if sample.images or sample.videos or sample.audios:
                with pytest.raises(SampleError, match=f"{name} .*{type(error).__name__}"):
                    encoder.encode(sample)
            continue
        compared += 1
        prepared = encoder.preencode_sample(sample)
        encoded = encoder.postencode_sample(prepared)
        tokens = theirs["input_ids"][0]
        assert torch.equal(encoded.tokens, tokens[: len(encoded.tokens)])
        assert [int(t) for t in encoded.labels if t != -100], "nothing learned"
        last = int(encoded.labels[-1])
        assert last == int(tokens[len(encoded.tokens)])
        shown = encoded.visual
        for key, value in shown.items():
            assert same(value, theirs[key]), (key, value.shape, theirs[key].shape)
        media = {"image", "video", "audio"} & {plan.kind for plan in prepared.plans}
        missing = set(theirs) - set(shown) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        assert not media or missing <= {"video_metadata"}, missing
    assert compared > (8 if LONG else 1)

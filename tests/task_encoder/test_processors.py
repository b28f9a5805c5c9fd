"""Every processor of the installed transformers: what an encoder makes of conversations is what the processor makes."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processors import expands, processor_classes, tiny_processor
from torch import Tensor
from transformers.models.auto.processing_auto import processor_class_from_name

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, VideoFrames

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
SHORT = {
    "Cohere2VisionProcessor",
    "Gemma3Processor",
    "Gemma3nProcessor",
    "InternVLProcessor",
    "LlavaOnevisionProcessor",
    "PaddleOCRVLProcessor",
    "PixtralProcessor",
    "Qwen2AudioProcessor",
    "Qwen2_5OmniProcessor",
    "Qwen3VLProcessor",
}
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{ IMAGE }}{%- elif part.type == 'video' -%}{{ VIDEO }}"
    "{%- elif part.type == 'audio' -%}{{ AUDIO }}{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
)
MANY = {"image": "images", "video": "videos", "audio": "audios"}


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


def place(processor: Any, kind: str) -> str:
    """Return the text that a chat template writes for a medium."""
    token = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None) or ""
    return f"<|image_start|>{token}<|image_end|>" if type(processor).__name__ == "HunYuanVLProcessor" else token


def template_of(processor: Any) -> str:
    template = TEMPLATE
    for kind in MANY:
        template = template.replace(kind.upper(), repr(place(processor, kind)))
    return template


def medium(kind: str, rng: np.random.Generator) -> Any:
    if kind == "audio":
        return rng.standard_normal(int(rng.integers(8000, 40000))).astype(np.float32) / 10
    height, width = (int(side) for side in rng.integers(60, 400, 2))
    if kind == "video":
        frames = torch.from_numpy(rng.integers(0, 256, (int(rng.integers(4, 9)), 3, height // 2, width // 2), np.uint8))
        return VideoFrames(frames=frames, fps=2.0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def conversation(number: int, kinds: list[str], processor: Any) -> tuple[ChatSample, str]:
    """Return a random conversation, and its text as the template writes it."""
    draw = random.Random(number)
    rng = np.random.default_rng(number)
    media: dict[str, list[Any]] = {kind: [] for kind in kinds}
    turns, text = [], ""
    if draw.random() < 0.3:
        turns.append({"role": "system", "content": "Be short."})
        text += "<|im_start|>system\nBe short.<|im_end|>\n"
    for turn in range(draw.choice((1, 2))):
        question = written = f"question {turn}"
        for kind in draw.choices(kinds, k=draw.choice((0, 1, 1, 2)) if turn or number % 3 else 1):
            media[kind].append(medium(kind, rng))
            question += f" <{kind}> and"
            written += f" {place(processor, kind)} and"
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": f"answer {turn}"}]
        text += f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\nanswer {turn}<|im_end|>\n"
    sample = ChatSample(
        __key__=str(number), messages=turns, **{MANY[kind]: values or None for kind, values in media.items()}
    )
    return sample, text


def called(processor: Any, texts: list[str], samples: list[ChatSample]) -> dict[str, Any]:
    """Return what the processor makes of some samples by itself."""
    given: dict[str, Any] = {}
    images = [list(sample.images or ()) for sample in samples]
    if any(images):
        flat = type(processor).__name__ == "GotOcr2Processor"
        given["images"] = list(itertools.chain(*images)) if flat else images
    videos = [video for sample in samples for video in sample.videos or ()]
    if videos:
        given["videos"] = [video.frames for video in videos]
        metadata = [
            {"fps": 2.0, "frames_indices": list(range(n)), "total_num_frames": n, "duration": n / 2}
            for n in (len(video.frames) for video in videos)
        ]
        given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True}
    sounds = [sound for sample in samples for sound in sample.audios or ()]
    if sounds:
        given["audio"] = sounds
    return dict(processor(text=texts, add_special_tokens=False, padding=True, return_tensors="pt", **given))


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether values are equal, where either may be padded with zeros on any axis but the first."""
    if ours.dtype != theirs.dtype or ours.ndim != theirs.ndim or len(ours) != len(theirs):
        return False
    box = tuple(slice(0, min(sides)) for sides in zip(ours.shape, theirs.shape, strict=True))
    return torch.equal(ours[box], theirs[box]) and all(
        int(values.count_nonzero()) == int(values[box].count_nonzero()) for values in (ours, theirs)
    )


@pytest.mark.parametrize("name", classes())
def test_an_encoder_makes_what_the_processor_makes(name: str) -> None:
    processor = tiny_processor(name)
    try:
        encoder = ChatTemplateTaskEncoder.for_processor(
            processor, ChatConfig(chat_template=template_of(processor), seq_length=60_000, over_long="raise")
        )
    except ConfigurationError as error:
        pytest.skip(str(error))  # the table of the docs has the reason
    kinds = list(encoder.family.counts)
    for number in range(24 if LONG else 4):
        sample, text = conversation(number, kinds, processor)
        prepared = encoder.preencode_sample(sample)
        encoded = encoder.postencode_sample(prepared)
        theirs = called(processor, [text], [sample])
        tokens = theirs["input_ids"][0]
        assert torch.equal(encoded.tokens, tokens[: len(encoded.tokens)])
        assert [int(t) for t in encoded.labels if t != -100], "nothing learned"
        last = int(encoded.labels[-1])
        assert last == int(tokens[len(encoded.tokens)])
        shown = {key: value for key, value in encoded.visual.items()}
        for key, value in shown.items():
            assert same(value, theirs[key]), (key, value.shape, theirs[key].shape)
        media = {"image", "video", "audio"} & {plan.kind for plan in prepared.plans}
        missing = set(theirs) - set(shown) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        assert not media or missing <= {"video_metadata"}, missing

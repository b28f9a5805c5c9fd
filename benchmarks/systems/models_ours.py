"""This package, for the rows of `benchmarks.models`. Every row ends in the tensors that the model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, CLIPImageProcessorPil, Qwen2VLImageProcessorPil

from benchmarks.systems.measure import Job, main
from benchmarks.systems.models import CAPTION_TOKENS, CLIP, PACKING_BUFFER, SEQ_LENGTH, SIGLIP, touch
from energon_bridge import (
    Cooker,
    DefaultTaskEncoder,
    SampleDecoder,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon_bridge.samples import CaptioningSample
from energon_bridge.task_encoder.families import (
    ChatConfig,
    ChatSample,
    ChatTemplateTaskEncoder,
    llava_family,
    qwen_family,
)
from energon_bridge.transforms import normalise, resize


def cook_chat(sample: dict[str, Any]) -> ChatSample:
    return ChatSample(**basic_sample_keys(sample), messages=sample["json"]["messages"], images=[sample["jpg"]])


def cook_video(sample: dict[str, Any]) -> ChatSample:
    return ChatSample(**basic_sample_keys(sample), messages=sample["json"]["messages"], videos=[sample["mp4"]])


def cook_one_turn(sample: dict[str, Any]) -> ChatSample:
    messages = sample["json"]["messages"][:2]
    return ChatSample(**basic_sample_keys(sample), messages=messages, images=[sample["jpg"]])


def cook_caption(sample: dict[str, Any]) -> CaptioningSample:
    return CaptioningSample(**basic_sample_keys(sample), image=sample["jpg"], caption=sample["json"]["caption"])


class Qwen(ChatTemplateTaskEncoder):
    cookers = (Cooker(stateless(cook_chat)),)


class QwenVideo(ChatTemplateTaskEncoder):
    cookers = (Cooker(stateless(cook_video)),)


class Llava(ChatTemplateTaskEncoder):
    cookers = (Cooker(stateless(cook_one_turn)),)


class Siglip(DefaultTaskEncoder):
    """Captions beside images: pixels by `energon_bridge.transforms`."""

    cookers = (Cooker(stateless(cook_caption)),)
    decoder = SampleDecoder(image_decode="torchrgb8")

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode_sample(self, sample: Any) -> Any:
        sample.image = resize(sample.image, (SIGLIP["size"]["height"], SIGLIP["size"]["width"]), "bicubic")
        return sample

    def batch(self, samples: Any) -> dict[str, Any]:
        captions = self.tokenizer(
            [sample.caption for sample in samples], padding="max_length", truncation=True, max_length=CAPTION_TOKENS
        ).input_ids
        return {
            "tokens": torch.tensor(captions),
            "pixel_values": normalise([sample.image for sample in samples], 0.5, 0.5),
            "__key__": [sample.__key__ for sample in samples],
        }


def open_loader(job: Job) -> Any:
    row, _, dtype = job.mode.partition("/")
    tokenizer = AutoTokenizer.from_pretrained(Path(job.path).parent / f"tokenizer-{row.removesuffix('-video')}")
    config = ChatConfig(seq_length=SEQ_LENGTH, pixels_dtype=dtype or None)  # type: ignore[arg-type]
    made = {
        "qwen2.5-vl": lambda: Qwen(tokenizer, qwen_family("qwen2_5_vl", Qwen2VLImageProcessorPil()), config),
        "qwen2.5-vl-video": lambda: QwenVideo(tokenizer, qwen_family("qwen2_5_vl", Qwen2VLImageProcessorPil()), config),
        "llava-1.5": lambda: Llava(tokenizer, llava_family(CLIPImageProcessorPil(**CLIP), patch_size=14), config),
        "siglip": lambda: Siglip(tokenizer),
    }
    dataset = get_train_dataset(
        job.path,
        batch_size=job.batch_size,
        packing_buffer_size=PACKING_BUFFER if row == "qwen2.5-vl" else None,
        shuffle_buffer_size=job.shuffle_buffer_size,
        max_samples_per_sequence=job.slice_size,
        task_encoder=made[row](),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
    )
    return get_loader(dataset)


if __name__ == "__main__":
    main(open_loader, touch)

"""megatron-energon with the image processors of transformers in its hooks, in the manner of Megatron-Bridge's encoders.

Runs in an environment with both of them (see `benchmarks.models`). Every row ends in the tensors that the model takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)
from transformers import AutoTokenizer, CLIPImageProcessorPil, Qwen2VLImageProcessorPil, SiglipImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from benchmarks.systems.measure import Job, main
from benchmarks.systems.models import (
    CAPTION_TOKENS,
    CLIP,
    LLAVA_IMAGE_TOKENS,
    PACKING_BUFFER,
    SEQ_LENGTH,
    SIGLIP,
    VIDEO_FPS,
    touch,
)


@edataclass
class Crude(Sample):
    image: Any
    record: Any


@edataclass
class Encoded(Sample):
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    visual: dict[str, torch.Tensor]
    segments: list[int]


@stateless
def cook(sample: dict[str, Any]) -> Crude:
    return Crude(**basic_sample_keys(sample), image=sample["jpg"], record=sample["json"])


class Chat(DefaultTaskEncoder):
    """Conversations: the template's text, the processor's pixels, and loss on the answers."""

    cookers = (Cooker(cook),)
    decoder = SampleDecoder(image_decode="pilrgb")
    image_token = ""
    before_answer = ""  # what the template writes in front of an answer, as part of its first token

    def __init__(self, tokenizer: Any, processor: Any) -> None:
        super().__init__()
        self.tokenizer, self.processor = tokenizer, processor

    def visual(self, image: Any) -> dict[str, torch.Tensor]:
        return dict(self.processor(images=[image], return_tensors="pt"))

    def image_tokens(self, visual: dict[str, torch.Tensor]) -> int:
        return LLAVA_IMAGE_TOKENS

    def messages(self, record: Any) -> list[dict[str, Any]]:
        return list(record["messages"][:2])

    @stateless
    def encode_sample(self, sample: Crude) -> Encoded:
        visual = self.visual(sample.image)
        messages = self.messages(sample.record)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        text = text.replace(self.image_token, self.image_token * self.image_tokens(visual))
        tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        mask, start = torch.zeros(len(tokens)), 0
        for turn in messages:
            if turn["role"] == "assistant":
                answer = self.tokenizer(self.before_answer + turn["content"], add_special_tokens=False).input_ids
                start = find(tokens, answer, start)
                mask[start : start + len(answer) + 1] = 1.0
        ids = torch.tensor(tokens)
        return Encoded.derive_from(
            sample,
            tokens=ids[:-1],
            labels=ids[1:].masked_fill(mask[1:] == 0, -100),
            loss_mask=mask[1:],
            visual=visual,
            segments=[len(tokens) - 1],
        )

    @stateless
    def batch(self, samples: list[Encoded]) -> dict[str, Any]:
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "tokens": pad([sample.tokens for sample in samples], batch_first=True),
            "labels": pad([sample.labels for sample in samples], batch_first=True, padding_value=-100),
            "loss_mask": pad([sample.loss_mask for sample in samples], batch_first=True),
            "segments": [sample.segments for sample in samples],
            **{name: torch.cat([sample.visual[name] for sample in samples]) for name in samples[0].visual},
        }


class Llava(Chat):
    image_token = "<image>"
    before_answer = " "


class Qwen(Chat):
    image_token = "<|image_pad|>"

    def messages(self, record: Any) -> list[dict[str, Any]]:
        return list(record["messages"])

    def image_tokens(self, visual: dict[str, torch.Tensor]) -> int:
        return int(visual["image_grid_thw"].prod()) // 4

    def select_samples_to_pack(self, samples: list[Encoded]) -> list[list[Encoded]]:
        packs: list[list[Encoded]] = []
        room = 0
        for sample in samples:
            if len(sample.tokens) > room:
                packs.append([])
                room = SEQ_LENGTH
            packs[-1].append(sample)
            room -= len(sample.tokens)
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[Encoded]) -> Encoded:
        def joined(name: str) -> torch.Tensor:
            return torch.cat([getattr(sample, name) for sample in samples])

        return Encoded.derive_from(
            samples[0],
            __key__=" ".join(sample.__key__ for sample in samples),
            tokens=joined("tokens"),
            labels=joined("labels"),
            loss_mask=joined("loss_mask"),
            visual={name: torch.cat([sample.visual[name] for sample in samples]) for name in samples[0].visual},
            segments=[length for sample in samples for length in sample.segments],
        )


@stateless
def cook_video(sample: dict[str, Any]) -> Crude:
    return Crude(**basic_sample_keys(sample), image=sample["mp4"], record=sample["json"])


class QwenVideo(Qwen):
    """Conversations about videos: frames of megatron-energon's decoder, as tensors, to the video processor."""

    cookers = (Cooker(cook_video),)
    image_token = "<|video_pad|>"

    def visual(self, video: Any) -> dict[str, torch.Tensor]:
        _, total = video.get_video_duration(get_frame_count=True)
        count = min(max(int(total / video.get_video_fps() * VIDEO_FPS), 4), total)
        numbers = torch.linspace(0, total - 1, count).round().int().tolist()
        clips, _ = video.get_video_clips([(number, number) for number in numbers], "frames")
        return process_video(torch.cat(clips), self.processor)

    def image_tokens(self, visual: dict[str, torch.Tensor]) -> int:
        return int(visual["video_grid_thw"].prod()) // 4


def process_video(frames: torch.Tensor, processor: Any) -> dict[str, torch.Tensor]:
    """Do what the video processor of Qwen2-VL does, by torch alone: it needs torchvision, which does the same by torch.

    `processor` is the image processor, whose mean and deviation are the same.
    """
    side, merge, times = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    size = smart_resize(*frames.shape[-2:], side * merge, 128 * 28 * 28, 768 * 28 * 28)
    frames = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True)
    frames = torch.cat((frames, frames[-1:].expand(-len(frames) % times, -1, -1, -1)))
    mean, std = (torch.tensor(one)[:, None, None] * 255 for one in (processor.image_mean, processor.image_std))
    frames = frames.to(torch.float32).sub(mean).div_(std)
    steps, rows, columns = len(frames) // times, size[0] // side, size[1] // side
    frames = frames.reshape(steps, times, 3, rows // merge, merge, side, columns // merge, merge, side)
    patches = frames.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1)
    return {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[steps, rows, columns]])}


class Siglip(DefaultTaskEncoder):
    """Captions beside images."""

    cookers = (Cooker(cook),)
    decoder = SampleDecoder(image_decode="pilrgb")

    def __init__(self, tokenizer: Any, processor: Any) -> None:
        super().__init__()
        self.tokenizer, self.processor = tokenizer, processor

    @stateless
    def encode_sample(self, sample: Crude) -> Encoded:
        caption = self.tokenizer(
            sample.record["caption"], padding="max_length", truncation=True, max_length=CAPTION_TOKENS
        ).input_ids
        empty = torch.empty(0)
        visual = dict(self.processor(images=[sample.image], return_tensors="pt"))
        return Encoded.derive_from(
            sample, tokens=torch.tensor(caption), labels=empty, loss_mask=empty, visual=visual, segments=[]
        )

    @stateless
    def batch(self, samples: list[Encoded]) -> dict[str, Any]:
        return {
            "tokens": torch.stack([sample.tokens for sample in samples]),
            "pixel_values": torch.cat([sample.visual["pixel_values"] for sample in samples]),
        }


def find(tokens: list[int], wanted: list[int], start: int) -> int:
    """Return where some tokens begin behind a place, as Megatron-Bridge's encoders look for answers."""
    for place in range(start, len(tokens) - len(wanted) + 1):
        if tokens[place : place + len(wanted)] == wanted:
            return place
    raise ValueError("the answer is not in the conversation")


def open_loader(job: Job) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(Path(job.path).parent / f"tokenizer-{job.mode.removesuffix('-video')}")
    made = {
        "qwen2.5-vl": lambda: Qwen(tokenizer, Qwen2VLImageProcessorPil()),
        "qwen2.5-vl-video": lambda: QwenVideo(tokenizer, Qwen2VLImageProcessorPil()),
        "llava-1.5": lambda: Llava(tokenizer, CLIPImageProcessorPil(**CLIP)),
        "siglip": lambda: Siglip(tokenizer, SiglipImageProcessorPil(**SIGLIP)),
    }
    dataset = get_train_dataset(
        job.path,
        batch_size=job.batch_size,
        packing_buffer_size=PACKING_BUFFER if job.mode == "qwen2.5-vl" else None,
        shuffle_buffer_size=job.shuffle_buffer_size,
        max_samples_per_sequence=job.slice_size,
        task_encoder=made[job.mode](),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
    )
    return get_loader(dataset)


if __name__ == "__main__":
    main(open_loader, touch)

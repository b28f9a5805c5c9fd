"""The texts of a dataset, without its images: what a tokenizer is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon_bridge.datasets import get_loader, get_val_dataset
from energon_bridge.task_encoder.base import TaskEncoder
from energon_bridge.task_encoder.decoder import SampleDecoder
from energon_bridge.task_encoder.families import ChatSample
from energon_bridge.task_encoder.families.chat import chat_of
from energon_bridge.topology import WorkerConfig
from energon_bridge.training.conversations import COOKERS


class _TextOnly(TaskEncoder[Any, list[str], list[str], list[str]]):
    """Keep what a sample says."""

    decoder = SampleDecoder(defer_images=True)  # images are not looked at
    cookers = COOKERS

    def encode_sample(self, sample: Any) -> list[str]:
        texts: list[Any] = []
        for name in ("caption", "context", "text", "answers", "sequence", "texts"):
            value = getattr(sample, name, None)
            texts += value if isinstance(value, list | tuple) else [value]
        if isinstance(sample, ChatSample):
            texts += [part.text for message in chat_of(sample).messages for part in message.parts]
        return [text for text in texts if isinstance(text, str)]

    def batch(self, samples: list[list[str]]) -> list[str]:
        return [text for texts in samples for text in texts]


def dataset_captions(
    path: str, *, limit: int, split_part: str = "train", trust_remote_code: bool = False
) -> Iterator[str]:
    """Give the texts of up to `limit` samples, in the order of the split: captions, questions, answers, documents."""
    batch_size = 64
    dataset = get_val_dataset(
        path,
        split_part=split_part,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=batch_size,
        limit=-(-limit // batch_size),
        task_encoder=_TextOnly(),
        trust_remote_code=trust_remote_code,
    )
    for texts in get_loader(dataset):
        yield from texts

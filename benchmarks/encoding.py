"""What the ready-made encoders cost beside the tokenizer: `python -m benchmarks.encoding`. Images have no pixels here.

For samples of several kinds, in turns: microseconds that `encode_sample` (with a family of models, `preencode_sample`)
takes, and that the tokenizer of transformers takes when it is called with nothing but the whole text of the sample.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image

from energon_bridge.core.samples import InterleavedSample, TextSample, VQASample
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, FixedTokenFamily
from energon_bridge.training.presets import QWEN_TOKENS, train_tokenizer

SAMPLES, ROUNDS, WORDS, IMAGE_TOKENS, LONGEST = 200, 9, 3_000, 576, 8_192
IMAGE = Image.new("RGB", (4, 4))


class NoPixels:
    """An image processor that does nothing."""

    def __call__(self, images: Sequence[Any], return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros(len(images), 1)}


def seconds_of(function: Callable[[Any], Any], arguments: Sequence[Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for argument in arguments:
        function(argument)
    return (time.perf_counter() - start) / len(arguments)


def main() -> None:
    """Print a line for each kind of sample."""
    chooser = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chooser.choices(letters, k=chooser.randint(2, 9))) for _ in range(WORDS)]

    def text(count: int) -> str:
        return " ".join(chooser.choices(words, k=count))

    tokenizer = train_tokenizer([text(20) for _ in range(2_000)], 4_000, QWEN_TOKENS)
    processor = NoPixels()
    plain, images = (
        MultiModalTaskEncoder(tokenizer, processor, seq_length=LONGEST, image_tokens_per_image=tokens)
        for tokens in (1, IMAGE_TOKENS)
    )
    family = FixedTokenFamily(image_processor=processor, image_tokens=IMAGE_TOKENS, image_token="<|image_pad|>")
    chats = ChatTemplateTaskEncoder(tokenizer, family, ChatConfig(seq_length=LONGEST))
    meta: dict[str, Any] = {"__key__": "one"}
    picture: Any = IMAGE  # fields are declared as tensors, and take images in any form
    kinds: list[tuple[str, Callable[[Any], Any], Callable[[], Any]]] = [
        ("a short text", plain.encode_sample, lambda: TextSample(**meta, text=text(20))),
        ("a long text", plain.encode_sample, lambda: TextSample(**meta, text=text(800))),
        (
            "a question and answer on an image",
            images.encode_sample,
            lambda: VQASample(**meta, image=picture, context=text(20), answers=[text(20)], answer_weights=None),
        ),
        (
            "four images and texts",
            images.encode_sample,
            lambda: InterleavedSample(**meta, sequence=[part for _ in range(4) for part in (picture, text(20))]),
        ),
        (
            "four turns on an image",
            chats.preencode_sample,
            lambda: ChatSample(
                **meta,
                images=[IMAGE],
                messages=[
                    {"role": role, "content": ("<image>" if not turn and role == "user" else "") + text(count)}
                    for turn in range(4)
                    for role, count in (("user", 20), ("assistant", 60))
                ],
            ),
        ),
    ]
    for name, encode, make in kinds:
        samples = [make() for _ in range(SAMPLES)]
        encoded = [encode(sample) for sample in samples]
        texts = [tokenizer.decode(one.tokens[one.tokens >= 0]) for one in encoded]
        bare = [whole.replace("<|image_pad|>", "") for whole in texts]
        found = [(seconds_of(encode, samples), seconds_of(tokenizer, bare)) for _ in range(ROUNDS)]
        ours, alone = (statistics.median(column) * 1e6 for column in zip(*found, strict=True))
        length = statistics.mean(len(one.tokens) for one in encoded)
        print(f"{name}: {length:,.0f} tokens, {ours:,.0f} us, the tokenizer alone {alone:,.0f} us")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()

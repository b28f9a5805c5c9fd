"""Tokenizers of words and of characters, and image processors: what the tests of multimodal encoders run on."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from PIL import Image

from energon_bridge.core.samples import CaptioningSample, VQASample
from energon_bridge.models.conversations.layout import ImageToken, MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.conversations.sequences import MultiModalSample

PAD, BOS, EOS, IMAGE = 0, 1, 2, 3


class WordTokenizer:
    """One token per word, numbered as they come: the least that the interface asks for."""

    pad_token_id, bos_token_id, eos_token_id = PAD, BOS, EOS
    chat_template: str | None = None

    def __init__(self) -> None:
        self.words = ["<pad>", "<s>", "</s>", "<image>"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.words.index(token) if token in self.words else None

    def decode(self, ids: Any) -> str:
        return " ".join(self.words[int(i)] for i in ids)

    def apply_chat_template(
        self, turns: list[dict[str, str]], *, chat_template: str, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        text = "".join(f"[{turn['role']}] {turn['content']} </s> " for turn in turns)
        return text + (f"{chat_template} " if add_generation_prompt else "")


class SlowTokenizer:
    """A fast tokenizer that does not say so: it is called text by text, and not asked where its tokens stand."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class PixelProcessor:
    """Images as they are, in [0, 1]."""

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        assert return_tensors == "pt"
        pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 for image in images])
        return {"pixel_values": pixels, "names": ["not a tensor"]}


class GridProcessor(PixelProcessor):
    """Patches and their grid, in the manner of Qwen."""

    merge_size = 2

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        return {"pixel_values": torch.zeros(24, 8), "image_grid_thw": torch.tensor([[1, 4, 6]])}


def encoder(seq_length: int = 32, *, processor: Any = None, token_id: int | None = IMAGE, **kwargs: Any) -> Any:
    config = kwargs.pop("config", MultiModalSampleConfig(image_token=ImageToken(token_id=token_id)))
    kind = kwargs.pop("kind", MultiModalTaskEncoder)
    return kind(WordTokenizer(), processor or PixelProcessor(), config, seq_length, **kwargs)


def picture(value: int = 100) -> Image.Image:
    return Image.new("RGB", (4, 4), (value, value, value))


class CharacterTokenizer(WordTokenizer):
    """One token per character or special token, so that every text comes back as it was."""

    special = re.compile(r"(<s>|</s>|<pad>|<image>|<\|im_start\|>|<\|im_end\|>)")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        tokens = [
            token for part in self.special.split(text) for token in ([part] if self.special.match(part) else part)
        ]
        for token in tokens:
            if token not in self.words:
                self.words.append(token)
        return [self.words.index(token) for token in tokens]

    def decode(self, ids: Any) -> str:
        return "".join(self.words[int(i)] for i in ids)


def caption(text: str = "the digit seven", key: str = "a", value: int = 100) -> CaptioningSample:
    return CaptioningSample(__key__=key, __restore_key__=("k", key), image=picture(value), caption=text)


def question(text: str, **values: Any) -> VQASample:
    return VQASample(__key__="q", image=picture(), context=text, **values)


def trained_text(task_encoder: Any, sample: MultiModalSample) -> str:
    return task_encoder.tokenizer.decode(sample.labels[sample.loss_mask.bool()])

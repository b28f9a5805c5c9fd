"""Conversations with images, sounds and videos for chains: datasets of tiny media, and encoders of tiny models."""

from __future__ import annotations

import io
import json
import random
import wave
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from clips import write_video
from packaging.version import Version
from PIL import Image

from energon_bridge import Cooker, SkipSample
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

MEDIA = {"image": ("image",), "sound": ("audio",), "video": ("image", "video"), "omni": ("image", "audio", "video")}
"""What conversations have, by the model that they are for: one that cuts images into tiles, one of sounds, one with
native pixels, and one of all."""
PRESETS = {
    "image": "tiny-idefics3",
    "sound": "tiny-qwen2-audio",
    "video": "tiny-qwen2.5-vl",
    "omni": "tiny-qwen2.5-omni",
}
NEEDED = {media: ("transformers", "av", *["torchvision"] * (media == "omni")) for media in MEDIA}
SHARDS = [9, 1, 14]
LEAVES: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    media: {f"talks {media}": (sum(SHARDS), {"path": f"./talks/{media}", "subflavors": {"of": "media"}})}
    for media in MEDIA
}
_CLIPS = 4


def missing(media: str | None) -> str | None:
    """Return a package that chains with some media need and that is not here."""
    package = next((name for name in NEEDED.get(media or "", ()) if find_spec(name) is None), None)
    if media and package is None and Version(version("transformers")) < Version("5.23"):
        return "transformers 5.23"
    return package


def write_talks(folder: Path) -> None:
    """Write a dataset of conversations for each kind of model that can be made here, and its model."""
    from energon_bridge.training.config import ModelConfig
    from energon_bridge.training.presets import write_preset

    clips = []
    for media, kinds in MEDIA.items():
        if missing(media):
            continue
        while "video" in kinds and len(clips) < _CLIPS:
            sound = "aac" * (len(clips) % 2)
            path = folder / f"{len(clips)}.mp4"
            clips.append(write_video(path, frames=3 + 2 * len(clips), rate=4, sound=sound).read_bytes())
        rng, first = random.Random(media), 0
        for shard, count in enumerate(SHARDS):
            samples = {f"{number:05d}": _parts(rng, kinds, clips) for number in range(first, first + count)}
            target = folder / "talks" / media / "train" / f"{shard}.tar"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_shard(target, samples)
            first += count
        prepare_dataset(
            folder / "talks" / media,
            split=parse_patterns(["train:train/.*"]),
            dataset_yaml=render_dataset_yaml("CrudeWebdataset", None),
        )
        sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 400, "image_size": 32}
        config = ModelConfig(preset=PRESETS[media], patch_size=8, **sizes)
        write_preset(config, folder / "models" / media, lambda: ["user assistant what is this? a color or a tone"])


def _parts(rng: random.Random, kinds: tuple[str, ...], clips: list[bytes]) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    turns: list[dict[str, str]] = []
    for turn in range(rng.choice([1, 1, 2])):
        question = f"what is this {turn}?"
        for kind in rng.choices(kinds, k=rng.choice([0, 1, 1, 2])):
            question = f"<{kind}> {question}"
            parts[f"{len(parts)}.{ {'image': 'png', 'audio': 'wav', 'video': 'mp4'}[kind] }"] = _medium(
                rng, kind, clips
            )
        turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "a tone " * rng.randint(1, 9)},
        ]
    return parts | {"json": json.dumps({"messages": turns}).encode()}


def _medium(rng: random.Random, kind: str, clips: list[bytes]) -> bytes:
    buffer, noise = io.BytesIO(), np.random.default_rng(rng.randrange(1 << 30))
    if kind == "video":
        return rng.choice(clips)
    if kind == "image":
        Image.fromarray(noise.integers(0, 256, (rng.randint(8, 40), rng.randint(8, 40), 3), np.uint8)).save(
            buffer, "png"
        )
        return buffer.getvalue()
    with wave.open(buffer, "wb") as out:
        rate = rng.choice([8000, 16000, 22050])
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(noise.integers(-9000, 9000, rng.randint(rate // 20, rate // 2), np.int16).tobytes())
    return buffer.getvalue()


@cache
def _loaded(folder: Path) -> tuple[Any, Any, str]:
    """Return the tokenizer, family and chat template of a model, with small videos and sounds of at most a second."""
    from transformers import WhisperFeatureExtractor

    from energon_bridge.models.families import ProcessorFamily, QwenFamily
    from energon_bridge.models.families.known_families import load_pretrained

    made = load_pretrained(folder)
    family, template = made.family, made.chat_template or made.tokenizer.chat_template
    if isinstance(family, QwenFamily):
        family = replace(family, video_min_pixels=16 * 16, video_max_pixels=4 * 32 * 32)
    elif isinstance(family, ProcessorFamily) and hasattr(family.processor, "feature_extractor"):
        family.processor.feature_extractor = WhisperFeatureExtractor(chunk_length=1)
        small = {"videos_kwargs": {"size": {"shortest_edge": 16 * 16, "longest_edge": 4 * 32 * 32}}}
        options = small if "video" in family.counts else {}
        family = ProcessorFamily(processor=family.processor, model_config=family.model_config, options=options)
    return made.tokenizer, family, template


def talk_encoder(folder: Path, media: str, features: tuple[type, ...], several: bool, cookers: tuple[Any, ...]) -> Any:
    """Return a chat encoder of a tiny model that leaves out some samples by chance, and weighs others."""
    from energon_bridge.models.conversations.cooker import cook_conversation
    from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder

    class Talks(ChatTemplateTaskEncoder):
        def preencode_sample(self, sample: Any) -> Any:
            if random.random() < 0.1:
                raise SkipSample
            return self._several(sample) if several else self._weighed(sample)

        def _weighed(self, sample: Any) -> Any:
            made: Any = super().preencode_sample(sample)
            made.loss_mask = made.loss_mask * (1 + random.random())
            return made

        def _several(self, sample: Any) -> Iterator[Any]:
            for _ in range(random.randrange(4)):
                yield self._weighed(sample)

    tokenizer, family, template = _loaded(folder / "models" / media)
    kind = type("Talks", (*features, Talks), {"cookers": (Cooker(cook_conversation, {"of": "media"}), *cookers)})
    return kind(
        tokenizer, family, ChatConfig(seq_length=400, chat_template=template, min_num_frames=2, max_num_frames=4)
    )

"""Conversations about photographs, and the files of models that read them, for `python -m benchmarks.figures`."""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import SEED, WORDS, Kind, jpeg
from benchmarks.processes import REPOSITORY

SIZE, PER_SHARD = (640, 480), 250
KIND = Kind(
    name="conversations",
    sample_type="CrudeWebdataset",
    field_map=None,
    part="jpg",
    image_size=SIZE,
    samples_per_shard=PER_SHARD,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-VL": ("Qwen2_5_VLProcessor", {}),
    "Qwen3-VL": ("Qwen3VLProcessor", {}),
    "LLaVA-1.5": (
        "LlavaProcessor",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "Gemma 3": ("Gemma3Processor", {"size": {"height": 896, "width": 896}}),
    "InternVL 3": ("InternVLProcessor", {"size": {"height": 448, "width": 448}}),
    "Idefics 3": ("Idefics3Processor", {"size": {"longest_edge": 1456}}),
    "Pixtral": ("PixtralProcessor", {}),
    "LLaVA-OneVision": ("LlavaOnevisionProcessor", {}),
    "Llama 4": ("Llama4Processor", {}),
    "Kimi K2.5": ("Kimi_K25Processor", {}),
    "GLM-4.6V": ("Glm46VProcessor", {}),
    "Ovis 2": ("Ovis2Processor", {}),
}
"""Models, each with the class of its processor and what its own files say of images beside the defaults."""


def texts(chooser: random.Random, words: int) -> str:
    return " ".join(chooser.choices(WORDS, k=words))


def write(folder: Path, count: int, different: int, models: Iterable[str] = MODELS) -> None:
    """Write a dataset of so many samples, of so many different images, and the files of models."""
    generator, chooser = np.random.default_rng(SEED), random.Random(SEED)
    files = [jpeg(generator, SIZE) for _ in range(different)]
    data = folder / "data"
    data.mkdir(parents=True)
    for shard in range(-(-count // PER_SHARD)):
        with tarfile.open(data / f"shard_{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * PER_SHARD, min((shard + 1) * PER_SHARD, count)):
                turns = []
                for turn in range(4):
                    question = [{"type": "text", "text": texts(chooser, 12)}]
                    shown = [{"type": "image"}] if turn == 0 else []
                    turns.append({"role": "user", "content": [*shown, *question]})
                    turns.append({"role": "assistant", "content": texts(chooser, 25)})
                record = json.dumps({"messages": turns}).encode()
                for part, content in (("jpg", chooser.choice(files)), ("json", record)):
                    member = tarfile.TarInfo(f"{number:08d}.{part}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    if not (names := list(models)):
        return
    sys.path.insert(0, str(REPOSITORY / "tests" / "helpers"))
    import processors as tiny  # type: ignore[import-not-found]

    corpus = tuple(texts(chooser, 50) for _ in range(200))
    settings = tiny.SETTINGS | {"InternVLProcessor": {"image_seq_length": 256}}
    with mock.patch.multiple(tiny, TEXTS=corpus, SETTINGS=settings):
        for model in names:
            name, sizes = MODELS[model]
            processor = tiny.tiny_processor(name)
            for attribute, value in sizes.items():
                setattr(processor.image_processor, attribute, value)
            processor.chat_template = tiny.template_of(processor)
            processor.save_pretrained(folder / model)
            tiny.tiny_model_config(tiny.processor_classes()[name][0], processor).save_pretrained(folder / model)

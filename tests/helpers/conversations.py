"""Conversations of several turns with several images in between, as samples and as a dataset: for tests of training."""

from __future__ import annotations

import io
import json
from pathlib import Path

from PIL import Image

from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.testing import write_shard

COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220)}

_DATASET = b"""\
__module__: megatron.energon
__class__: VQASample
sample_loader: loader.py
"""
_LOADER = """\
def sample_loader(parts):
    content = parts["json"]
    images = [parts[f"{number}.jpg"] for number in range(content["images"])]
    return {"image": images, "context": content["questions"], "answers": content["answers"]}
"""


def colors_of(number: int) -> list[str]:
    """Return the colors of the images of a conversation: 1 to 3 of them."""
    return [list(COLORS)[(number * 7 + image * (number // 3 + 1)) % 3] for image in range(number * 5 % 3 + 1)]


def turns_of(number: int) -> list[tuple[str, str]]:
    """Return questions and answers, each image in a question of its own; every second conversation has one without."""
    colors = colors_of(number)
    turns = [("<image> color?", color) for color in colors]
    return [*turns, ("how many?", str(len(colors)))] if number % 2 else turns


def picture_of(color: str) -> Image.Image:
    return Image.new("RGB", (16, 16), COLORS[color])


def conversations_dataset(folder: Path, *, num_train: int, num_val: int) -> Path:
    """Write a dataset of conversations with small JPEGs; its keys are `train-000`, …, `val-000`, …"""
    for part, count in (("train", num_train), ("val", num_val)):
        (folder / part).mkdir(parents=True)
        for shard, first in enumerate(range(0, count, 10)):
            samples = {f"{part}-{n:03d}": _parts(n) for n in range(first, min(first + 10, count))}
            write_shard(folder / part / f"{shard}.tar", samples)
    prepare_dataset(folder, split=parse_patterns(["train:train/.*", "val:val/.*"]), dataset_yaml=_DATASET)
    (folder / ".nv-meta" / "loader.py").write_text(_LOADER)
    return folder


def _parts(number: int) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    for image, color in enumerate(colors_of(number)):
        buffer = io.BytesIO()
        picture_of(color).save(buffer, "jpeg")
        parts[f"{image}.jpg"] = buffer.getvalue()
    questions, answers = zip(*turns_of(number), strict=True)
    content = {"questions": questions, "answers": answers, "images": len(colors_of(number))}
    return {**parts, "json": json.dumps(content).encode()}

"""Small datasets for tests and tutorials, made in milliseconds and the same on every machine."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from energon_bridge.core.errors import check_choice
from energon_bridge.core.order.rng import fold, key_of
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml

_COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 50),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}


def create_captioning_test_dataset(
    path: str | os.PathLike[str],
    *,
    num_train: int = 40,
    num_val: int = 10,
    num_test: int = 0,
    samples_per_shard: int = 10,
    image_size: int = 16,
    image_format: str = "png",
) -> Path:
    """Write a captioning dataset that is ready to be loaded, as `energon prepare` would leave it.

    Each image is one color with a little noise, and its caption names the color (`a red picture 7`).

    Args:
        path: Folder to write to; created if it does not exist.
        num_train: Samples of the split part `train`.
        num_val: Samples of the split part `val`; 0 leaves the part out.
        num_test: The same for `test`.
        samples_per_shard: Samples in one tar.
        image_size: Side of the images, in pixels.
        image_format: `png` or `jpg`.

    Returns:
        The folder.
    """
    check_choice("image_format", image_format, ("png", "jpg"))
    folder = Path(path)
    counts = {"train": num_train, "val": num_val} | ({"test": num_test} if num_test else {})
    for part, count in counts.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        for shard, first in enumerate(range(0, count, samples_per_shard)):
            samples = {
                f"{part}-{number:05d}": _sample(part, number, image_size, image_format)
                for number in range(first, min(first + samples_per_shard, count))
            }
            write_shard(folder / part / f"shard_{shard:03d}.tar", samples)
    prepare_dataset(
        folder,
        split=parse_patterns([f"{part}:{part}/.*" for part, count in counts.items() if count]),
        dataset_yaml=render_dataset_yaml("CaptioningSample", {"image": image_format, "caption": "txt"}),
    )
    return folder


def write_shard(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a tar of samples, given as parts by key, with bytes that depend on nothing else."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, parts in samples.items():
            for part, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{part}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def _sample(part: str, number: int, image_size: int, image_format: str) -> dict[str, bytes]:
    key = key_of("captioning test dataset", part, number)
    color = list(_COLORS)[fold(key, 1) % len(_COLORS)]
    noise = np.random.Generator(np.random.PCG64(key)).integers(-12, 13, (image_size, image_size, 3))
    pixels = np.clip(np.array(_COLORS[color]) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "jpeg" if image_format == "jpg" else "png")
    return {image_format: buffer.getvalue(), "txt": f"a {color} picture {number}".encode()}

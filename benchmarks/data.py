"""The data of the benchmarks: seeded, written once, the same bytes on every machine with the same Pillow.

    caption   256 x 256 JPEG (14-30 kB) + txt + json
    large     640 x 480 JPEG + txt + json
    text      400 B of json
    png, webp  256 x 256 PNG (RGB, palette, RGBA and 16 bits of grey in turn) and WebP + txt + json
    interleaved  crude: one to four 256 x 256 JPEGs (0.jpg, 1.jpg, …) and json with a text for each

The images are smooth noise with some grain, which gives JPEGs the size of photographs. A few hundred different ones are
drawn and repeated: what a decoder does depends on the kind of picture and not on having seen it before.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

SEED = 20261120
DIFFERENT_IMAGES = 400
WORDS = (
    *("a", "photo", "of", "the", "red", "small", "large", "blue", "dog", "cat", "house", "tree"),
    *("river", "street", "over", "under", "near", "beside", "two", "three", "old", "new"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of dataset: what `energon prepare` is told about it, and how many samples a shard holds."""

    name: str
    sample_type: str
    field_map: dict[str, str] | None  # None: crude
    part: str
    image_size: tuple[int, int] | None
    samples_per_shard: int


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="caption",
            sample_type="CaptioningSample",
            field_map={"image": "jpg", "caption": "txt"},
            part="jpg",
            image_size=(256, 256),
            samples_per_shard=1000,
        ),
        Kind(
            name="large",
            sample_type="CaptioningSample",
            field_map={"image": "jpg", "caption": "txt"},
            part="jpg",
            image_size=(640, 480),
            samples_per_shard=250,
        ),
        Kind(
            name="text",
            sample_type="TextSample",
            field_map={"text": "json"},
            part="json",
            image_size=None,
            samples_per_shard=10_000,
        ),
        *(
            Kind(
                name=part,
                sample_type="CaptioningSample",
                field_map={"image": part, "caption": "txt"},
                part=part,
                image_size=(256, 256),
                samples_per_shard=1000,
            )
            for part in ("png", "webp")
        ),
        Kind(
            name="interleaved",
            sample_type="CrudeWebdataset",
            field_map=None,
            part="jpg",
            image_size=(256, 256),
            samples_per_shard=250,
        ),
    )
}


def painted(generator: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return a picture, float32 (height, width, 3) around 0: noise at four scales, brighter at the larger ones."""
    width, height = size
    picture = np.zeros((height, width, 3), dtype=np.float32)
    for cells, strength in ((3, 90.0), (9, 45.0), (30, 22.0), (90, 10.0)):
        coarse = generator.normal(size=(cells * height // width + 1, cells, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(coarse[..., channel]).resize(size, Image.Resampling.BICUBIC)
            picture[..., channel] += strength * np.asarray(layer)
    return picture


def jpeg(generator: np.random.Generator, size: tuple[int, int]) -> bytes:
    """Draw one picture with a little grain."""
    width, height = size
    picture = painted(generator, size)
    grain = generator.normal(scale=generator.uniform(3.0, 8.0), size=(height, width, 1))
    pixels = np.clip(picture + grain + 128.0, 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=int(generator.integers(82, 94)))
    return stream.getvalue()


def converted(image: bytes, form: str, number: int) -> bytes:
    """Return a JPEG as WebP, or as PNG of a mode that depends on its number."""
    out = io.BytesIO()
    with Image.open(io.BytesIO(image)) as picture:
        if form == "webp":
            picture.save(out, "WEBP", quality=85)
            return out.getvalue()
        grey = np.asarray(picture.convert("L")).astype(np.uint16) * 257
        modes = (picture.convert("RGB"), picture.quantize(256), picture.convert("RGBA"), Image.fromarray(grey))
        modes[number % len(modes)].save(out, "PNG")
    return out.getvalue()


def samples(kind: Kind, count: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, parts) of each sample."""
    chooser = random.Random(SEED)
    images: list[bytes] = []
    if kind.image_size is not None:
        generator = np.random.default_rng(SEED)
        images = [jpeg(generator, kind.image_size) for _ in range(min(count, DIFFERENT_IMAGES))]
        if kind.part in ("png", "webp"):
            images = [converted(image, kind.part, number) for number, image in enumerate(images)]
    for index in range(count):
        caption = " ".join(chooser.choices(WORDS, k=12))
        if kind.field_map is None:
            chosen = chooser.choices(images, k=chooser.randint(1, 4))
            texts = [" ".join(chooser.choices(WORDS, k=30)) for _ in chosen]
            parts = {f"{number}.jpg": image for number, image in enumerate(chosen)}
            parts["json"] = json.dumps({"index": index, "texts": texts}).encode()
        elif images:
            record = json.dumps({"index": index, "caption": caption, "license": "none"})
            parts = {kind.part: chooser.choice(images), "txt": caption.encode(), "json": record.encode()}
        else:
            record = json.dumps({"index": index, "text": " ".join(chooser.choices(WORDS, k=120))})
            parts = {"json": (record[:398] + '"}').encode()}
        yield f"{index:08d}", parts


def write(folder: Path, kind: Kind, count: int) -> None:
    """Write the shards of a dataset into a folder that does not exist yet."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    source = samples(kind, count)
    for shard in range(-(-count // kind.samples_per_shard)):
        with tarfile.open(unfinished / f"shard_{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, parts in itertools.islice(source, kind.samples_per_shard):
                for part, data in parts.items():
                    member = tarfile.TarInfo(f"{key}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    unfinished.rename(folder)


def make(cache: Path, kind: Kind, count: int) -> Path:
    """Return the folder with the shards of a dataset, written now if it is not there."""
    folder = cache / f"{kind.name}-{count}"
    if not folder.exists():
        write(folder, kind, count)
    return folder

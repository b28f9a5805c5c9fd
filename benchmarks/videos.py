"""The videos of the benchmarks, made by PyAV: the same frames in three containers.

short.mp4     10 seconds, 25 frames a second, H.264 with B-frames, a key frame every 2 s
long.mp4      10 minutes of it, a key frame every 10 s
long.mkv      the same in Matroska
vfr.mp4       10 seconds, H.264 with B-frames, frames that last 20 to 60 ms

Clips for models (`clip`) are larger: 8 seconds of 640 x 480, 30 frames a second, as x264 encodes them by default.
"""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import painted

WIDTH, HEIGHT, RATE = 160, 120, 25
SECONDS = {"short.mp4": 10, "long.mp4": 600, "long.mkv": 600, "vfr.mp4": 10}


def make(cache: Path, name: str, scale: float) -> Path:
    """Write a video once; `scale` shortens the long ones."""
    import av  # part of the `video` extra, which other parts do not need

    seconds = max(10, int(SECONDS[name] * scale))
    path = cache / f"{seconds}s-{name}"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    choose = np.random.default_rng(20261121)
    sheet = choose.integers(0, 256, (HEIGHT // 8, 2 * WIDTH // 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    grain = choose.integers(0, 24, (8, HEIGHT, WIDTH, 3), dtype=np.uint8)
    base = Fraction(1, 1000)
    partial = path.with_name(f"partial-{path.name}")
    with av.open(str(partial), "w") as out:
        options = {"preset": "veryfast", "bf": "3", "g": str(RATE * (10 if seconds > 10 else 2))}
        stream: Any = out.add_stream("libx264", rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.time_base = base
        at = 0
        for number in range(seconds * RATE):
            left = number * 3 % WIDTH
            frame = av.VideoFrame.from_ndarray(sheet[:, left : left + WIDTH] // 2 + grain[number % 8], format="rgb24")
            frame.pts, frame.time_base = at, base
            at += int(choose.integers(20, 60)) if name.startswith("vfr") else 1000 // RATE
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    partial.rename(path)
    return path


def clip(generator: np.random.Generator, seconds: int = 8, size: tuple[int, int] = (640, 480), rate: int = 30) -> bytes:
    """Draw one MP4 of about a megabyte: a camera moves over a picture, and things move across it."""
    import av

    width, height = size
    scene = painted(generator, (width + 240, height + 160))
    things = [painted(generator, (int(side), int(side))) for side in generator.integers(60, 160, 4)]
    places, speeds = generator.uniform(0, 400, (4, 2)), generator.uniform(-3, 3, (4, 2))
    grain = generator.normal(0, 2.0, (4, height, width, 1)).astype(np.float32)
    sway = generator.uniform(0.2, 0.7, 2)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream: Any = out.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(seconds * rate):
            at = number / rate
            left, top = (int(room * (0.5 + 0.5 * np.sin(s * at))) for room, s in zip((240, 160), sway, strict=True))
            picture = scene[top : top + height, left : left + width].copy()
            for thing, (x, y) in zip(things, places + speeds * number, strict=True):
                x, y = int(x) % (width - len(thing)), int(y) % (height - len(thing))
                picture[y : y + len(thing), x : x + len(thing)] = thing
            pixels = (picture + grain[number % 4] + 128).clip(0, 255).astype(np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()

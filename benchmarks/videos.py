"""The videos of the benchmarks, made by PyAV: the same frames in three containers.

short.mp4     10 seconds, 25 frames a second, H.264 with B-frames, a key frame every 2 s
long.mp4      10 minutes of it, a key frame every 10 s
long.mkv      the same in Matroska
vfr.mp4       10 seconds, H.264 with B-frames, frames that last 20 to 60 ms
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

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

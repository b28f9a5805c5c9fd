"""Small videos and sounds, made by PyAV, and what decoding them from beginning to end gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

X264 = "b-adapt=0:bframes=3:scenecut=0:keyint=20:log-level=0"
WIDTH, HEIGHT = 32, 24


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame as libav's own loop gives it."""

    seconds: Fraction
    pixels: np.ndarray


def write_video(
    path: Path,
    *,
    codec: str = "libx264",
    frames: int = 60,
    rate: int = 25,
    varying: bool = False,
    first: int = 0,
    options: Mapping[str, str] | None = None,
    container: Mapping[str, str] | None = None,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    sound: str = "",
) -> Path:
    """Write a video in which every frame differs from every other.

    `varying`: frames are shown for 10 to 90 ms; `first`: the tick at which the first one is shown; `sound`: a codec.
    """
    choose = np.random.default_rng(5)
    width, height = size
    base = Fraction(1, 1000) if varying else Fraction(1, rate)
    with av.open(str(path), "w", options=dict(container or {})) as out:
        stream: Any = out.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.time_base = base
        tones: Any = out.add_stream(sound, rate=48000, layout="stereo") if sound else None
        at = first
        for number in range(frames):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[..., 0] = 4 * number % 256
            pixels[:, number % width, 2] = 255
            pixels[..., 1] = choose.integers(0, 256, (height, width))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = at, base
            at += int(choose.integers(10, 90)) if varying else 1
            out.mux(stream.encode(frame))
            if tones is not None:
                count = 48000 // rate
                out.mux(tones.encode(_block(tone(count * number, count), 48000, count * number)))
        for one in (stream, tones):
            if one is not None:
                out.mux(one.encode(None))
    return path


def tone(first: int, count: int, rate: int = 48000) -> np.ndarray:
    """Return some samples of a sound in which no second is like another: float (2, count)."""
    at = np.arange(first, first + count) / rate
    return np.stack([np.sin(2 * np.pi * (200 + 90 * at) * at) * 0.4, np.sin(2 * np.pi * (313 + 50 * at) * at) * 0.3])


def _block(samples: np.ndarray, rate: int, pts: int) -> av.AudioFrame:
    whole = np.ascontiguousarray((samples * 32767).astype(np.int16))
    frame = av.AudioFrame.from_ndarray(whole, format="s16p", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = rate, pts, Fraction(1, rate)
    return frame


def write_sound(path: Path, *, codec: str, rate: int = 48000, seconds: float = 5.0, **options: str) -> Path:
    """Write a stereo sound."""
    total = int(rate * seconds)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(codec, rate=rate, layout="stereo", options=options)
        for first in range(0, total, 1000):
            out.mux(stream.encode(_block(tone(first, min(1000, total - first), rate), rate, first)))
        out.mux(stream.encode(None))
    return path


def all_frames(path: Path) -> list[Frame]:
    """Return every frame, by the plain loop of libav."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        base = stream.time_base
        assert base is not None
        return [
            Frame(seconds=frame.pts * base, pixels=frame.to_ndarray(format="rgb24"))
            for frame in container.decode(stream)
            if frame.pts is not None
        ]


def all_samples(path: Path) -> np.ndarray:
    """Return every sample as float32 (channels, samples), by the plain loop of libav."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler(format="fltp")
        blocks = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
        return np.concatenate([block.to_ndarray() for block in blocks], axis=1)

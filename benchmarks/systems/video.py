"""Measures one package's decoder on one video: frames taken at equal distances, and frames taken by their number.

Both packages have the same interface, in their module `av`. Every frame is compared with what the plain loop of libav
gives, so that a fast decoder that returns other frames is seen to do so.
"""

from __future__ import annotations

import io
import json
import random
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any


class Counting(io.BytesIO):
    """A file in memory that counts what is read of it."""

    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.bytes_read += len(data)
        return data


def reference(path: str, numbers: list[int]) -> dict[int, Any]:
    """Return the pixels of some frames by their numbers."""
    import av

    with av.open(path) as container:
        frames = enumerate(container.decode(video=0))
        return {number: frame.to_ndarray(format="rgb24") for number, frame in frames if number in numbers}


def rate(decode: Any, frames: int, seconds: float) -> float:
    """Return the frames a second of a call that gives some frames."""
    decode()
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        decode()
        count += frames
    return count / elapsed


def measure(package: str, path: str, frames: int, seconds: float) -> dict[str, Any]:
    av = import_module({"energon_bridge": "energon_bridge.models.av"}.get(package, f"{package}.av"))
    take = av.get_single_frames_uniform
    content = Path(path).read_bytes()
    file = Counting(content)
    take(av.AVDecoder(file, True), frames)
    share = file.bytes_read / len(content)
    (_, total) = av.AVDecoder(io.BytesIO(content), True).get_video_duration(get_frame_count=True)
    numbers = sorted(random.Random(1).sample(range(total), frames))
    ranges = [(number, number) for number in numbers]
    clips, _ = av.AVDecoder(io.BytesIO(content), True).get_video_clips(ranges, "frames")
    expected = reference(path, numbers)
    exact = sum(
        bool((clip[0].permute(1, 2, 0).numpy() == expected[number]).all())
        for clip, number in zip(clips, numbers, strict=False)
    )
    return {
        "uniform_frames_per_s": rate(lambda: take(av.AVDecoder(io.BytesIO(content), True), frames), frames, seconds),
        "numbered_frames_per_s": rate(
            lambda: av.AVDecoder(io.BytesIO(content), True).get_video_clips(ranges, "frames"), frames, seconds
        ),
        "share_read": share,
        "frames": frames,
        "exact": exact,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(measure(**json.loads(sys.argv[1]))), flush=True)

"""The sizes to which the Qwen-VL families scale images and videos: arithmetic on their dimensions.

Source: `smart_resize` of the image processor of Qwen2-VL and of the video processor of Qwen3-VL in transformers, whose
results these functions have, down to how they round.
"""

from __future__ import annotations

import math

from energon_bridge.errors import SampleError

_MOST_ASPECT = 200


def smart_resize(height: int, width: int, *, factor: int, area: tuple[int, int]) -> tuple[int, int]:
    """Return the size to which an image is scaled: multiples of a factor, between a least and a largest area.

    Raises:
        SampleError: One side is more than 200 times the other.
    """
    _check_aspect(height, width)
    least, largest = area
    rows, columns = (round(side / factor) * factor for side in (height, width))
    if rows * columns > largest:
        return _shrunk(height, width, math.sqrt(height * width / largest), factor)
    if rows * columns < least:
        return _grown(height, width, math.sqrt(least / (height * width)), factor)
    return rows, columns


def smart_resize_video(
    frames: int, height: int, width: int, *, factor: int, area: tuple[int, int], temporal_factor: int
) -> tuple[int, int]:
    """Return the size to which the frames of a video are scaled, the area being that of all frames together.

    Raises:
        SampleError: One side is more than 200 times the other.
    """
    least, largest = area
    frames = max(frames, temporal_factor)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    rows, columns = (round(side / factor) * factor for side in (height, width))
    total = round(frames / temporal_factor) * temporal_factor * rows * columns
    if total > largest:
        return _shrunk(height, width, math.sqrt(frames * height * width / largest), factor)
    if total < least:
        return _grown(height, width, math.sqrt(least / (frames * height * width)), factor)
    return rows, columns


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > _MOST_ASPECT * min(height, width):
        raise SampleError(
            f"an image of {width} x {height} pixels is too narrow: one side may be {_MOST_ASPECT} times the other"
        )


def _shrunk(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    rows, columns = (max(factor, math.floor(side / by / factor) * factor) for side in (height, width))
    return rows, columns


def _grown(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    rows, columns = (math.ceil(side * by / factor) * factor for side in (height, width))
    return rows, columns

"""The sizes to which the Qwen-VL families scale images and videos, and LLaVA-NeXT images: arithmetic on dimensions.

Source: `smart_resize` of the image processor of Qwen2-VL and of the video processor of Qwen3-VL in transformers, and
its `select_best_resolution` and `get_patch_output_size`. The functions here give the same results, rounding included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from energon_bridge.core.errors import SampleError

_MOST_ASPECT = 200


def smart_resize(height: int, width: int, *, factor: int, area: tuple[int, int]) -> tuple[int, int]:
    """Return the size to scale an image to: multiples of a factor, between a smallest and a largest area.

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
    """Return the size to scale the frames of a video to; the area is that of all frames together.

    Raises:
        SampleError: One side is more than 200 times the other.
    """
    least, largest = area
    frames = max(frames, temporal_factor)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height = int(height * scale)
        width = int(width * scale)
    _check_aspect(height, width)
    rows, columns = (round(side / factor) * factor for side in (height, width))
    total = round(frames / temporal_factor) * temporal_factor * rows * columns
    if total > largest:
        return _shrunk(height, width, math.sqrt(frames * height * width / largest), factor)
    if total < least:
        return _grown(height, width, math.sqrt(least / (frames * height * width)), factor)
    return rows, columns


def best_resolution(size: tuple[int, int], resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the resolution that keeps the most pixels of an image, and among those the one with the least padding.

    Sizes and resolutions are heights and widths.
    """
    height, width = size
    best = resolutions[0]
    most_kept = 0
    least_wasted = math.inf
    for rows, columns in resolutions:
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = rows * columns - kept
        if kept > most_kept or (kept == most_kept and wasted < least_wasted):
            best = (rows, columns)
            most_kept = kept
            least_wasted = wasted
    return best


def fitted(size: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    """Return the largest height and width with the aspect ratio of an image that fit into `room`."""
    across = room[1] / size[1]
    down = room[0] / size[0]
    if across < down:
        return min(math.ceil(size[0] * across), room[0]), room[1]
    return room[0], min(math.ceil(size[1] * down), room[1])


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > _MOST_ASPECT * min(height, width):
        raise SampleError(
            f"an image of {width} x {height} pixels is too narrow: one side may be at most {_MOST_ASPECT} times the "
            "other"
        )


def _shrunk(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    rows, columns = (max(factor, math.floor(side / by / factor) * factor) for side in (height, width))
    return rows, columns


def _grown(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    rows, columns = (math.ceil(side * by / factor) * factor for side in (height, width))
    return rows, columns

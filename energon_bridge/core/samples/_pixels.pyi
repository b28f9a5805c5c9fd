from typing import Any

import numpy as np

def resample(
    source: np.ndarray,
    height: int,
    width: int,
    out: np.ndarray,
    scratch: np.ndarray,
    where_x: np.ndarray,
    coefficients_x: np.ndarray,
    where_y: np.ndarray,
    coefficients_y: np.ndarray,
    parts: int,
    bits_x: int,
    bits_y: int,
    /,
) -> None: ...
def look_up(
    pixels: Any,
    out: Any,
    table: np.ndarray,
    frames: int,
    height: int,
    width: int,
    patch_height: int,
    patch_width: int,
    merge: int,
    times: int,
    pixel_by_pixel: bool,
    /,
) -> None: ...
def use(width: int, /) -> int: ...
def divide(pixels: np.ndarray, out: np.ndarray, /) -> None: ...
def copy(source: Any, out: Any, /) -> None: ...

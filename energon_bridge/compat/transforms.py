"""`MergeTransform` and `CustomTransform`: transforms of images in turn.

megatron-energon multiplies the matrices of all transforms and interpolates once; here each is applied by itself, as in
torchvision's `Compose`. The random numbers and sizes are the same, pixels differ by what more interpolation blurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from energon_bridge.compat.table import not_provided

Matrix = np.ndarray[Any, np.dtype[np.float64]]


class MergeTransform:
    """Apply transforms one after the other.

    Args:
        transforms: Of torchvision, `CustomTransform`s, or any other functions of an image.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        """Return the transformed image."""
        for transform in self.transforms:
            image = transform(image)
        return image


class CustomTransform:
    """Moves the pixels of an image by a matrix; derive from it, and override `apply_transform`."""

    def apply_transform(self, matrix: Matrix, dst_size: Any) -> tuple[Matrix, Any, Any]:
        """Return the matrix for column vectors (x, y, 1), the size (height, width), and what was drawn for them."""
        raise NotImplementedError

    def __call__(self, image: Any) -> Image.Image:
        """Return the transformed image, black or `fill()` where nothing was; pixels by `interpolation()`."""
        if not isinstance(image, Image.Image):
            raise not_provided("CustomTransform for tensors", "give it images of Pillow")
        matrix, size, _ = self.apply_transform(np.eye(3), np.array([image.height, image.width]))
        back = np.linalg.inv(matrix)
        fill = self.fill()
        mode = self.interpolation()
        return image.transform(
            (int(size[1]), int(size[0])),
            Image.Transform.PERSPECTIVE,
            (back / back[2, 2]).flatten()[:8].tolist(),
            Image.Resampling[str(getattr(mode, "name", mode or "BILINEAR"))],
            fillcolor=(fill,) * len(image.getbands()) if isinstance(fill, int | float) else fill,
        )

    def fill(self) -> Any:
        """Return the value of pixels without an origin; None: black."""
        return None

    def interpolation(self) -> Any:
        """Return the interpolation as torchvision names it; None: bilinear."""
        return None

    @staticmethod
    def translate(x: float, y: float) -> Matrix:
        """Return the matrix that moves by pixels."""
        return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])

    @staticmethod
    def rotate(angle: float) -> Matrix:
        """Return the matrix that turns counter-clockwise by radians, y pointing down."""
        cos = np.cos(angle)
        sin = np.sin(angle)
        return np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1.0]])

    @staticmethod
    def scale(x: float, y: float) -> Matrix:
        """Return the matrix that scales."""
        return np.diag([x, y, 1.0])

    @staticmethod
    def shear(x: float, y: float) -> Matrix:
        """Return the matrix that shears."""
        return np.array([[1, x, 0], [y, 1, 0], [0, 0, 1.0]])

    @classmethod
    def hflip(cls) -> Matrix:
        """Return the matrix that mirrors x."""
        return cls.scale(-1, 1)

    @classmethod
    def vflip(cls) -> Matrix:
        """Return the matrix that mirrors y."""
        return cls.scale(1, -1)

r"""The data of the quickstart: scanned handwritten digits, with captions, as WebDataset shards.

The images are the 1,797 digits of 8 x 8 pixels that ship inside scikit-learn's wheel (E. Alpaydin and C. Kaynak,
"Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998), enlarged to 32 x 32. A sample
`digit-0042` has the parts `png` and `txt` ("the digit seven"). Shards lie in `train/` and `val/`, every fifth sample of
a fixed shuffle being a validation sample. The bytes are the same on every machine with the same Pillow.

    python -m energon_bridge.training.digits data/digits
    energon prepare data/digits --non-interactive --split-parts 'train:train/.*' --split-parts 'val:val/.*' \
        --sample-type CaptioningSample --field-map '{"image": "png", "caption": "txt"}'
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from energon_bridge.core.errors import ConfigurationError, EnergonError
from energon_bridge.core.order.rng import key_of, shuffled

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIDE = 32
_VAL_EVERY = 5


def write_digits(folder: Path, *, train_shards: int = 8, val_shards: int = 2) -> dict[str, int]:
    """Write the shards and return the number of samples per split part.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError("the digits ship inside scikit-learn: pip install 'energon-bridge[demo]'") from error
    digits = load_digits()
    order = shuffled(key_of("digits"), len(digits.images))
    is_val = np.arange(len(order)) % _VAL_EVERY == 0
    parts = {"train": (order[~is_val], train_shards), "val": (order[is_val], val_shards)}
    for name, (numbers, shards) in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for shard, members in enumerate(np.array_split(numbers, shards)):
            path = folder / name / f"shard_{shard:03d}.tar"
            _write_shard(path, members.tolist(), digits.images, digits.target)
    return {name: len(numbers) for name, (numbers, _) in parts.items()}


def _write_shard(path: Path, numbers: list[int], images: np.ndarray, labels: np.ndarray) -> None:
    from webdataset import TarWriter

    with path.open("wb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
        for number in numbers:
            caption = f"the digit {WORDS[labels[number]]}"
            writer.write({"__key__": f"digit-{number:04d}", "png": _png(images[number]), "txt": caption.encode()})


def _png(image: np.ndarray) -> bytes:
    small = Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8))
    buffer = io.BytesIO()
    small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(buffer, "png")
    return buffer.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m energon_bridge.training.digits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write the shards")
    folder = parser.parse_args(arguments).folder
    try:
        counts = write_digits(folder)
    except EnergonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: " + ", ".join(f"{count:,} {part} samples" for part, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
r"""Write the digits that ship inside scikit-learn as WebDataset shards, ready for `energon prepare`.

    scripts/make_digits.py data/digits
    energon prepare data/digits --non-interactive --split-parts 'train:train/.*' --split-parts 'val:val/.*' \
        --sample-type CaptioningSample --field-map '{"image": "png", "caption": "txt"}'
"""

from __future__ import annotations

import argparse
from pathlib import Path

from energon_bridge.training.digits import write_digits


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the shards")
    folder = parser.parse_args().folder
    counts = write_digits(folder)
    print(f"{folder}: " + ", ".join(f"{count:,} {part} samples" for part, count in counts.items()))


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Write the digits that ship inside scikit-learn as WebDataset shards, and prepare them with `energon prepare`.

scripts/make_digits.py data/digits
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from energon_bridge.cli.main import main as energon
from energon_bridge.training.digits import write_digits

PREPARE = [
    "--non-interactive",
    "--no-progress",
    "--force-overwrite",
    "--sample-type=CaptioningSample",
    f"--field-map={json.dumps({'image': 'png', 'caption': 'txt'})}",
    "--split-parts=train:train/.*",
    "--split-parts=val:val/.*",
]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the dataset")
    options = parser.parse_args()
    write_digits(options.folder)
    energon(["prepare", str(options.folder), *PREPARE], standalone_mode=False)


if __name__ == "__main__":
    main()

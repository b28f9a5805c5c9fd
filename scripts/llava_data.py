#!/usr/bin/env python
"""Bring the data that LLaVA-1.5 was published with into forms that are read here; see docs/how-to/recipes.md.

scripts/llava_data.py captions blip_laion_cc_sbu_558k.json images data/llava_pretrain_558k
scripts/llava_data.py conversations llava_v1_5_mix665k.json data/llava15
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from energon_bridge.errors import EnergonError
from energon_bridge.training.llava_data import write_captions, write_conversations


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    captions = commands.add_parser("captions", help="captioned images, as tars")
    conversations = commands.add_parser("conversations", help="conversations, as JSON lines by folder of their images")
    for command in (captions, conversations):
        command.add_argument("source", type=Path, help="the JSON file")
        if command is captions:
            command.add_argument("images", type=Path, help="the folder that the images' paths are relative to")
        command.add_argument("folder", type=Path, help="where to write to; empty or not there yet")
        command.add_argument("--val-every", type=int, default=500, help="every n-th entry is for validation")
    options = parser.parse_args(arguments)
    try:
        if options.command == "captions":
            counts = write_captions(options.source, options.images, options.folder, val_every=options.val_every)
        else:
            counts = write_conversations(options.source, options.folder, val_every=options.val_every)
    except (EnergonError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for name, count in counts.items():
        print(f"{name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

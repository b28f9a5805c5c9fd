#!/usr/bin/env python
"""Put a LLaVA model together of a language model and a CLIP vision tower, with a new projector between them.

scripts/assemble_llava.py lmsys/vicuna-7b-v1.5 openai/clip-vit-large-patch14-336 models/llava15_start
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from energon_bridge.errors import EnergonError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("language_model", help="a folder in the layout of transformers, or a hub name")
    parser.add_argument("vision_tower", help="the same, of a CLIP model")
    parser.add_argument("folder", type=Path, help="where to write the model; must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="seed of the projector")
    options = parser.parse_args(arguments)
    import torch

    from energon_bridge.training.assemble import assemble_llava

    torch.manual_seed(options.seed)
    try:
        assemble_llava(options.language_model, options.vision_tower, options.folder)
    except EnergonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Train a vision-language model: `python -m energon_bridge.training` under its name in a checkout.

scripts/pretrain_vlm.py --config configs/digits_tiny_llava.yaml train.max_steps=200 optimizer.lr=1e-3
torchrun --nproc-per-node=2 scripts/pretrain_vlm.py --config configs/digits_tiny_llava.yaml --resume
"""

import sys

from energon_bridge.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""`python -m energon_bridge.training.llava_data` under its name in a checkout."""

import sys

from energon_bridge.training.llava_data import main

if __name__ == "__main__":
    sys.exit(main())

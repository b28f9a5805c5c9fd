#!/usr/bin/env python
"""`python -m energon_bridge.training.digits` under its name in a checkout."""

import sys

from energon_bridge.training.digits import main

if __name__ == "__main__":
    sys.exit(main())

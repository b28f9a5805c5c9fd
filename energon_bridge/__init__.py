"""Multimodal training data with one order on any number of ranks and workers, resumable anywhere.

The public names are those of `__init__.pyi`. Each is imported on first use: importing the package imports none of its
modules, so the command line starts at once and a program that only reads metadata never pays for torch.
"""

from __future__ import annotations

import lazy_loader

from energon_bridge.core import __version__ as __version__

__getattr__, _, _names = lazy_loader.attach_stub(__name__, __file__)

# `from energon_bridge import *` asks for each of these; the data module would bring Lightning along, for many seconds.
__all__ = ["__version__", *sorted({*_names} - {"EnergonMultiModalDataModule"})]


def __dir__() -> list[str]:
    """List the public names as well, whether or not they have been used."""
    return sorted({*globals(), *_names})

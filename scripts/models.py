#!/usr/bin/env python
"""Write docs/reference/models.md: what every processor of the installed transformers takes, and why not.

    python scripts/models.py        # in an environment with torchvision, which processors of videos need

Each processor is built with small parts, as the tests do, and asked for a family.
"""

# ruff: noqa: E402 (the helpers of the tests are on no path by themselves)
from __future__ import annotations

import sys
import warnings
from pathlib import Path

import transformers
from transformers.models.auto.processing_auto import processor_class_from_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "models.md"
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

from processors import (  # type: ignore[import-not-found]
    expands,
    processor_classes,
    tiny_processor,
)

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families import ProcessorFamily
from energon_bridge.task_encoder.families.registry import NATIVE

MARK = "<!-- The table below is written by scripts/models.py. -->"
HEADER = "| model types | processor | images | videos | sounds |\n|---|---|---|---|---|"


def row(name: str) -> str | None:
    """Return the row of a processor; None if it writes no tokens for media."""
    types = ", ".join(f"**{one}**" if one in NATIVE else one for one in processor_classes()[name])
    try:
        kind = processor_class_from_name(name)
        kind.get_attributes()
        if not expands(kind):
            return None
        family = ProcessorFamily(processor=tiny_processor(name))
    except ImportError as error:
        return f"| {types} | {name} | not tried: {' '.join(str(error).split())[:90]} | | |"
    except ConfigurationError as error:
        reason = str(error).partition(": ")[2] or str(error)
        return f"| {types} | {name} | no: {' '.join(reason.split())} | | |"
    cells = []
    for medium in ("image", "video", "audio"):
        refused = family.refused.get(medium, "")
        reason = "" if refused.endswith("takes none") else f"no: {' '.join(refused.split())[:160]}"
        cells.append(family.counts.get(medium, reason))
    return f"| {types} | {name} | {' | '.join(cells)} |"


def table() -> str:
    """Return the table of all processors."""
    rows = [one for name in processor_classes() if (one := row(name)) is not None]
    return "\n".join([f"transformers {transformers.__version__}:", "", HEADER, *rows, ""])


def main() -> None:
    warnings.simplefilter("ignore")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index(MARK)] + f"{MARK}\n\n" + table(), "utf-8")


if __name__ == "__main__":
    main()

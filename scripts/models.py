#!/usr/bin/env python
"""Write docs/reference/models.md: what every processor of the installed transformers takes, and why not.

    python scripts/models.py        # in an environment with torchvision, which processors of videos need
    python scripts/models.py --cpu  # instead, print what an encoder costs beside its processor alone

Each processor is built with small parts, as the tests do, and asked for a family.
"""

# ruff: noqa: E402 (the helpers of the tests are on no path by themselves)
from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto.processing_auto import processor_class_from_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "models.md"
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

from processors import (  # type: ignore[import-not-found]
    expands,
    processor_classes,
    template_of,
    tiny_processor,
)

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, ProcessorFamily
from energon_bridge.task_encoder.families.registry import NATIVE

MARK = "<!-- The table below is written by scripts/models.py. -->"
TESTED = ("5.23.0", "5.24.0")
HEADER = "|model types|processor|images|videos|sounds|\n|---|---|---|---|---|"


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
        return f"|{types}|{name}|not tried: {' '.join(str(error).split())[:90]}|||"
    except ConfigurationError as error:
        reason = str(error).partition(": ")[2] or str(error)
        return f"|{types}|{name}|no: {' '.join(reason.split())}|||"
    cells = []
    for medium in ("image", "video", "audio"):
        refused = family.refused.get(medium, "")
        reason = "" if refused.endswith("takes none") else f"no: {' '.join(refused.split())[:160]}"
        cells.append(family.counts.get(medium, reason))
    return f"|{types}|{name}|{'|'.join(cells)}|"


def table() -> str:
    """Return the table of all processors."""
    rows = [one for name in processor_classes() if (one := row(name)) is not None]
    tested = f"Tested with transformers {' and '.join(TESTED)}; the table is that of {transformers.__version__}:"
    return "\n".join([tested, "", HEADER, *rows, ""])


MEASURED = ("Gemma3", "InternVL", "Qwen3VL", "LlavaNext", "Pixtral", "PaddleOCRVL", "Idefics3")
SECONDS = 8.0


def minima(functions: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the least milliseconds of this thread that each function takes, in turns."""
    least, end = [float("inf")] * len(functions), time.monotonic() + SECONDS
    while time.monotonic() < end:
        for number, function in enumerate(functions):
            start = time.thread_time()
            function()
            least[number] = min(least[number], 1e3 * (time.thread_time() - start))
    return least


def costs(name: str) -> list[float]:
    """Return what both steps of an encoder, the processor called with the rendered text, and with turns, take."""
    processor = tiny_processor(f"{name}Processor")
    processor.chat_template = template_of(processor)
    encoder = ChatTemplateTaskEncoder.for_processor(processor, ChatConfig(seq_length=60_000))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8))
    said = [" ".join(["a question about the picture and what can be seen in it"] * 2)] * 4
    turns = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)]
    parts: list[Any] = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    parts[0]["content"].insert(0, {"type": "image", "image": image})
    sample = ChatSample(__key__="one", messages=turns, images=[image])
    prepared: Any = encoder.preencode_sample(sample)
    family: Any = encoder.family
    images = [[image]] if family.nested else [image]
    options: dict[str, Any] = {"return_tensors": "pt", "return_dict": True, "tokenize": True}
    return minima(
        [
            lambda: encoder.preencode_sample(sample),
            lambda: encoder.postencode_sample(prepared),
            lambda: processor(text=[prepared.text], images=images, return_tensors="pt"),
            lambda: processor.apply_chat_template(parts, **options),
        ]
    )


def measure() -> None:
    """Print a table of costs."""
    torch.set_num_threads(1)
    print("| processor | first step | second step | processor, text | processor, turns | of text | of turns |")
    print("|---|---|---|---|---|---|---|")
    for name in MEASURED:
        first, second, text, turns = costs(name)
        both = first + second
        cells = [*(f"{one:.2f}" for one in (first, second, text, turns, both / text, both / turns))]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    if "--cpu" in sys.argv[1:]:
        measure()
        return
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index(MARK)] + f"{MARK}\n\n" + table(), "utf-8")


if __name__ == "__main__":
    main()

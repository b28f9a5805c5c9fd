#!/usr/bin/env python
"""Write docs/reference/models.md: what every processor of the installed transformers takes, and why not.

    python scripts/models.py          # in an environment with torchvision, which processors of videos need
    python scripts/models.py --packs  # instead, write the table of text models: their losses in rows and packs
    python scripts/models.py --cpu    # instead, print what an encoder costs beside its processor alone

Each processor is built with small parts, as the tests do, and asked for a family. A small model of each of its types
runs a text, where one can be built here: a model whose forward fails whatever its sizes are is named.
"""

# ruff: noqa: E402 (the helpers of the tests are on no path by themselves)
from __future__ import annotations

import argparse
import re
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
    tiny_model,
    tiny_model_config,
    tiny_processor,
)
from text_models import KINDS, WAYS, text_model, worst_difference  # type: ignore[import-not-found]

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, ProcessorFamily

MARK = "<!-- The table below is written by scripts/models.py. -->"
NEXT = "\n## Packs and rows"
PACKS_MARK = "<!-- The table below is written by scripts/models.py --packs. -->"
TESTED = ("5.23.0", "5.24.0")
HEADER = "|model types|processor|pixels|images|videos|sounds|\n|---|---|---|---|---|---|"


def row(name: str) -> str | None:
    """Return the row of a processor; None if it writes no tokens for media."""
    types = ", ".join(processor_classes()[name])
    try:
        kind = processor_class_from_name(name)
        kind.get_attributes()
        if not expands(kind):
            return None
        family = ProcessorFamily(processor=tiny_processor(name))
    except ImportError as error:
        return f"|{types}|{name}||not tried: {missing(error)}|||"
    except ConfigurationError as error:
        return f"|{types}|{name}||no: {brief(str(error).partition(': ')[2] or str(error))}|||"
    cells = []
    for medium in ("image", "video", "audio"):
        refused = family.refused.get(medium, "")
        reason = "" if refused.endswith("takes none") else f"no: {brief(refused)}"
        cells.append(family.counts.get(medium, reason))
    if broken := [reason for one in processor_classes()[name] if (reason := broken_forward(one, family.processor))]:
        cells[0] += f", but {'; '.join(broken)}"
    return f"|{types}|{name}|{pixels_of(family)}|{'|'.join(cells)}|"


def missing(error: ImportError) -> str:
    """Return in short which package transformers asks for."""
    match = re.search(r"requires (?:the )?(\w+) library", str(error))
    return f"needs {match[1]}" if match else str(error)


def brief(reason: str) -> str:
    """Return a reason in a line, of an error that a processor raised its type alone."""
    return re.sub(r"(could not take a blank one): (\w+): .*", r"\1 (\2)", " ".join(reason.split()))


def pixels_of(family: ProcessorFamily) -> str:
    """Return whether the pixels of images are native, or those of the processor, which is called."""
    if "image" not in family.counts:
        return ""
    return "native" if family.path is not None else "called"


LARGEST = 20_000_000
"""Parameters of a model that is still small: the sizes of some have names that the tests do not know."""


def broken_forward(model_type: str, processor: Any) -> str:
    """Return how the forward of a small model fails on a text, if that is not due to its sizes."""
    try:
        config = tiny_model_config(model_type, processor)
        with torch.device("meta"):
            size = sum(one.numel() for one in tiny_model(config).parameters())
        model = tiny_model(config) if size <= LARGEST else None
    except Exception:  # none can be built of settings that are known here
        return ""
    tokens = torch.tensor([[5, 6, 7, 8]])
    try:
        if model is not None:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
    except (AttributeError, NameError) as error:
        return f"the forward of {model_type} fails in {transformers.__version__} ({type(error).__name__})"
    except Exception:  # as for want of the right sizes
        return ""
    return ""


def packs_row(kind: str) -> tuple[str, str]:
    """Return what a text model does in rows, and in packs."""
    model = text_model(kind)
    found = {way: worst_difference(model, way) for way in WAYS}
    rows = max(value for way, value in found.items() if "rows" in way)
    refused = [value for value in found.values() if isinstance(value, str)]
    limits = {
        match[0] for one in refused if (match := re.search(r"a (row|sample) is longer than \d+ tokens \(\w+", one))
    }
    if not limits:
        packs = "refused" if refused else f"of any length: {max(found.values()):.0e}"
    else:
        unit, name = re.match(r"a (\w+) .*\((\w+)", min(limits)).groups()  # type: ignore[union-attr]
        packs = f"{unit}s up to `{name}`"
    return f"{rows:.0e}" if rows < SAME else f"others beside a long sample: {rows:.2f}", packs


SAME = 1e-5


def packs_table() -> str:
    """Return the table of text models, those that are right in everything in one row."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind in KINDS:
        rows, packs = packs_row(kind)
        plain = "each sample's own" if not rows.startswith("others") else rows
        found.setdefault((plain, packs.partition(":")[0]), []).append(kind)
    lines = [f"|{', '.join(kinds)}|{rows}|{packs}|" for (rows, packs), kinds in found.items()]
    head = "|model types|losses in rows|packs|\n|---|---|---|"
    return "\n".join([f"Measured with transformers {transformers.__version__}:", "", head, *lines, ""])


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--packs", action="store_true", help="write the table of text models instead")
    what.add_argument("--cpu", action="store_true", help="print costs instead, and write nothing")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.cpu:
        measure()
        return
    text = PAGE.read_text("utf-8")
    if arguments.packs:
        PAGE.write_text(text[: text.index(PACKS_MARK)] + f"{PACKS_MARK}\n\n" + packs_table(), "utf-8")
        return
    made = f"{MARK}\n\n" + table()
    PAGE.write_text(text[: text.index(MARK)] + made + text[text.index(NEXT) :], "utf-8")


if __name__ == "__main__":
    main()

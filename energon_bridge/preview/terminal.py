"""Samples and batches in a terminal: texts, conversations, JSON, and pictures.

Pictures are drawn by the graphics protocol of kitty (https://sw.kovidgoyal.net/kitty/graphics-protocol/), by sixels
(DEC STD 070, chapter 13), or with half blocks in 24-bit colour, which every terminal shows.

Data cannot control the terminal: control characters are shown by name.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from PIL import Image
from rich.text import Text as Styled

from energon_bridge.preview.batches import ShownBatch, ShownRow, Token
from energon_bridge.preview.records import Item, Picture, Record, Turn
from energon_bridge.samples.showing import counted

_HALF = "▀"
_MOST_LINES = 40
_BAR = 60
_STYLES = {"special": "magenta", "image": "yellow", "text": ""}
_CELL = 10  # approximate pixels of a column; sixels have no columns
_CHUNK = 4096  # most bytes of a picture in one of kitty's messages
_KITTY_PROGRAMS = ("ghostty", "kitty", "WezTerm")
_SIXEL_PROGRAMS = ("contour", "foot", "mintty", "mlterm", "yaft")
_COLORS = ("blue", "dark_orange3", "green", "deep_pink4", "gold4", "slate_blue1")


class Escape(str):
    """A line that goes to the terminal unchanged."""


Line = Styled | Escape
Draw = Callable[[Image.Image, int], Iterator[Line]]
"""Yields the lines of an image with a width in columns."""


def lines_of(record: Record, *, columns: int, draw: Draw | None = None) -> Iterator[Line]:
    """Yield the lines of a sample; pictures are `columns` wide; 0: only named."""
    draw = draw or half_blocks
    yield Styled.assemble((clean(record.key), "bold"), ("  " + clean(record.dataset), "dim"))
    facts = [f"{name} {value:,}" for name, value in record.facts.items()]
    shard = [clean(record.shard)] if record.shard else []
    yield Styled(", ".join([*facts, *shard, f"sample {record.index:,}"]), "dim")
    if record.error:
        yield Styled(clean(record.error), "red")
    for name, items in record.fields:
        yield Styled(clean(name), "cyan")
        for item in items:
            yield from _indented(_item(item, columns, draw))
    yield Styled()


def lines_of_batch(batch: ShownBatch, *, columns: int, draw: Draw | None = None) -> Iterator[Line]:
    """Yield the lines of a batch: for each row a bar of segments, and the tokens that fit."""
    draw = draw or half_blocks
    where = "masked" if batch.microbatch is None else f"microbatch {batch.microbatch:,}"
    yield Styled(
        f"step {batch.step:,}, rank {batch.rank}, {where}: {batch.kind} of {counted(len(batch.rows), 'row')}", "bold"
    )
    for number, row in enumerate(batch.rows):
        size = f": {row.length:,} tokens, {row.padding:,} of them padding" if row.length else ""
        yield Styled(f"row {number}{'' if row.valid else ' (masked)'}{size}", "cyan")
        if row.length:
            yield from _indented(iter([_bar(row)]))
        for place, one in enumerate(row.segments):
            segment = one.segment
            end = segment.start + segment.length
            what = f"{clean(segment.key)}  {clean(segment.dataset)}, tokens {segment.start} to {end - 1}"
            yield from _indented(iter([Styled(what, _COLORS[place % len(_COLORS)])]))
            for picture in one.pictures if columns else ():
                yield from _indented(_picture(picture, min(columns, 24), draw))
            yield from _indented(iter([_tokens(one.tokens)]))
        for name, items in row.fields:
            yield from _indented(iter([Styled(clean(name), "dim")]))
            for item in items:
                yield from _indented(_item(item, columns, draw))
    yield Styled()


def clean(text: str) -> str:
    """Return a text with control characters replaced by their names."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def half_blocks(image: Image.Image, columns: int) -> Iterator[Line]:
    """Yield the lines of an image that is so many columns wide, two pixels above each other in a character."""
    width = min(columns, max(8, image.width))
    height = max(2, round(image.height * width / image.width / 2) * 2)
    pixels = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR).load()
    assert pixels is not None
    for row in range(0, height, 2):
        line = Styled()
        pairs = [(pixels[column, row], pixels[column, row + 1]) for column in range(width)]
        for (above, below), run in groupby(pairs):
            line.append(_HALF * len(list(run)), f"rgb({_rgb(above)}) on rgb({_rgb(below)})")
        yield line


def kitty(image: Image.Image, columns: int) -> Iterator[Line]:
    """Yield an image as PNG in messages of kitty's graphics protocol; the terminal answers none of them."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    data = base64.standard_b64encode(file.getvalue()).decode()
    chunks = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    head = f"a=T,f=100,q=2,c={min(columns, max(8, image.width // _CELL))},"
    messages = [
        f"\x1b_G{head if not number else ''}m={int(number < len(chunks) - 1)};{chunk}\x1b\\"
        for number, chunk in enumerate(chunks)
    ]
    yield Escape("".join(messages))


def sixel(image: Image.Image, columns: int) -> Iterator[Line]:
    """Yield an image as sixels of at most 255 colours: bands of six rows, in each a line of bits for every colour."""
    width = min(columns * _CELL, image.width)
    height = max(1, round(image.height * width / image.width))
    reduced = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR).quantize(255)
    palette = reduced.getpalette() or []
    pixels = np.asarray(reduced)
    out = [f'\x1bP0;1q"1;1;{width};{height}']
    for number in np.unique(pixels).tolist():
        red, green, blue = (round(value * 100 / 255) for value in palette[3 * number : 3 * number + 3])
        out.append(f"#{number};2;{red};{green};{blue}")
    weights = (1 << np.arange(6))[:, None]
    for top in range(0, height, 6):
        band = pixels[top : top + 6]
        for number in np.unique(band).tolist():
            bits = ((band == number) * weights[: len(band)]).sum(axis=0)
            runs = [(chr(63 + value), len(list(run))) for value, run in groupby(bits.tolist())]
            out.append(f"#{number}" + "".join(f"!{count}{char}" for char, count in runs) + "$")
        out.append("-")
    yield Escape("".join([*out, "\x1b\\"]))


WAYS: Mapping[str, Draw] = {"kitty": kitty, "sixel": sixel, "blocks": half_blocks}


def way_of_terminal(environment: Mapping[str, str]) -> str:
    """Return how the terminal shows pictures, by its environment variables: a key of `WAYS`."""
    if "TMUX" in environment or environment.get("TERM", "").startswith(("screen", "tmux")):
        return "blocks"  # it passes on neither protocol
    names = (environment.get("TERM_PROGRAM", ""), environment.get("TERM", "").removeprefix("xterm-"))
    if "KITTY_WINDOW_ID" in environment or any(name.startswith(_KITTY_PROGRAMS) for name in names):
        return "kitty"
    return "sixel" if any(name.startswith(_SIXEL_PROGRAMS) for name in names) else "blocks"


def _rgb(pixel: object) -> str:
    assert isinstance(pixel, tuple)
    return ",".join(str(value) for value in pixel)


def _indented(lines: Iterator[Line]) -> Iterator[Line]:
    for line in lines:
        yield Escape(f"  {line}") if isinstance(line, Escape) else Styled("  ").append_text(line)


def _item(item: Item, columns: int, draw: Draw) -> Iterator[Line]:
    if isinstance(item, Picture):
        yield from _picture(item, columns, draw)
    elif isinstance(item, Turn):
        yield Styled(clean(item.role), "bold blue" if item.role == "assistant" else "bold")
        for part in item.items:
            yield from _indented(_item(part, columns, draw))
    else:
        lines = clean(item.text).splitlines()
        style = {"text": "", "json": "", "note": "dim", "error": "red"}[item.kind]
        for line in lines[:_MOST_LINES]:
            yield Styled(line, style)
        if len(lines) > _MOST_LINES:
            yield Styled(f"… and {len(lines) - _MOST_LINES:,} more lines", "dim")


def _picture(picture: Picture, columns: int, draw: Draw) -> Iterator[Line]:
    yield Styled(f"picture {picture.width} x {picture.height}", "dim")
    if columns:
        yield from draw(picture.image, columns)


def _bar(row: ShownRow) -> Styled:
    bar, end = Styled(), 0
    for place, one in enumerate(row.segments):
        segment = one.segment
        bar.append("·" * round(_BAR * (segment.start - end) / row.length), "dim")
        end = segment.start + segment.length
        bar.append("█" * max(1, round(_BAR * segment.length / row.length)), _COLORS[place % len(_COLORS)])
    return bar.append("·" * round(_BAR * (row.length - end) / row.length), "dim")


def _tokens(tokens: Sequence[Token]) -> Styled:
    line = Styled()
    for token in tokens:
        text = clean(token.text).replace("\n", "⏎")
        if token.count > 1:
            text = f"[{text} x {token.count}]"
        line.append(text, "green underline" if token.label is not None else _STYLES[token.kind])
    return line

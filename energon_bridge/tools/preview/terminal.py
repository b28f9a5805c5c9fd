"""Samples and batches in a terminal: texts, conversations, JSON, and pictures.

Pictures are drawn with half blocks in 24-bit colour, which every terminal shows, and so are the waves of sounds.

Data cannot control the terminal: control characters are shown by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from PIL import Image
from rich.text import Text as Styled

from energon_bridge.core.errors import EnergonError
from energon_bridge.core.samples.showing import counted
from energon_bridge.models.av import AVDecoder
from energon_bridge.tools.preview.batches import ShownBatch, ShownRow, Token
from energon_bridge.tools.preview.records import Clip, Picture, SampleRecord, ShownItem, ShownTurn

_HALF = "▀"
_BLOCKS = (" ", "▄", _HALF, "█")
_WAVE_LINES = 4
_MOST_SECONDS = 60
_MOST_LINES = 40
_BAR = 60
_LEARNED = "green underline"
LEGEND = Styled.assemble(("token", _LEARNED), (" carries loss: the model learns to say what follows", "dim"))
_STYLES = {"special": "magenta", "image": "yellow", "text": ""}
_COLORS = ("blue", "dark_orange3", "green", "deep_pink4", "gold4", "slate_blue1")


def lines_of(record: SampleRecord, *, columns: int) -> Iterator[Styled]:
    """Yield the lines of a sample; pictures are `columns` wide; 0: only named."""
    yield Styled.assemble((clean(record.key), "bold"), ("  " + clean(record.dataset), "dim"))
    facts = [f"{name} {value:,}" for name, value in record.facts.items()]
    shard = [clean(record.shard)] if record.shard else []
    yield Styled(", ".join([*facts, *shard, f"sample {record.index:,}"]), "dim")
    if record.error:
        yield Styled(clean(record.error), "red")
    for name, items in record.fields:
        yield Styled(clean(name), "cyan")
        for item in items:
            yield from _indented(_item(item, columns))
    yield Styled()


def lines_of_batch(batch: ShownBatch, *, columns: int) -> Iterator[Styled]:
    """Yield the lines of a batch: for each row a bar of segments, and the tokens that fit."""
    where = "" if any(row.valid for row in batch.rows) else ", masked"  # of lists, the microbatch is not known
    where = where if batch.microbatch is None else f", microbatch {batch.microbatch:,}"
    yield Styled(
        f"step {batch.step:,}, rank {batch.rank}{where}: {batch.kind} of {counted(len(batch.rows), 'row')}", "bold"
    )
    if batch.inputs:
        yield Styled(f"with {', '.join(batch.inputs)}", "dim")
    for number, row in enumerate(batch.rows):
        size = f": {row.length:,} tokens, {row.padding:,} of them padding" if row.length else ""
        yield Styled(f"row {number}{'' if row.valid else ' (masked)'}{size}", "cyan")
        if row.length:
            yield from _indented(iter([_bar(row)]))
        for position, one in enumerate(row.segments):
            segment = one.segment
            end = segment.start + segment.length
            what = f"{clean(segment.key)}  {clean(segment.dataset)}, tokens {segment.start} to {end - 1}"
            yield from _indented(iter([Styled(what, _COLORS[position % len(_COLORS)])]))
            for picture in one.pictures if columns else ():
                yield from _indented(_picture(picture, min(columns, 24)))
            yield from _indented(iter([_tokens(one.tokens)]))
        for name, items in row.fields:
            yield from _indented(iter([Styled(clean(name), "dim")]))
            for item in items:
                yield from _indented(_item(item, columns))
    yield Styled()


def clean(text: str) -> str:
    """Return a text with control characters replaced by their names."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def half_blocks(image: Image.Image, columns: int) -> Iterator[Styled]:
    """Yield the lines of an image `columns` wide: a character is two pixels, one above the other."""
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


def waveform(samples: np.ndarray, columns: int) -> Iterator[Styled]:
    """Yield the lines of a sound `columns` wide: in each, from the lowest to the highest sample."""
    peak = float(np.abs(samples).max(initial=0)) or 1.0
    pieces = np.array_split(samples / peak, min(columns, len(samples)) or 1)
    # In half blocks above and below the middle; silence is a thin line.
    heights = [
        (int(np.ceil(_WAVE_LINES * piece.max(initial=0))), int(np.ceil(_WAVE_LINES * -piece.min(initial=0))))
        for piece in pieces
    ]
    heights = [(top, bottom or int(not top)) for top, bottom in heights]
    for above in range(_WAVE_LINES, -_WAVE_LINES, -2):
        line = ""
        for top, bottom in heights:
            upper = -bottom < above <= top
            lower = -bottom < above - 1 <= top
            line += _BLOCKS[2 * upper + lower]
        yield Styled(line, "cyan")


def _rgb(pixel: object) -> str:
    assert isinstance(pixel, tuple)
    return ",".join(str(value) for value in pixel)


def _indented(lines: Iterator[Styled]) -> Iterator[Styled]:
    for line in lines:
        yield Styled("  ").append_text(line)


def _item(item: ShownItem, columns: int) -> Iterator[Styled]:
    if isinstance(item, Picture):
        yield from _picture(item, columns)
    elif isinstance(item, Clip):
        yield from _clip(item, columns)
    elif isinstance(item, ShownTurn):
        yield Styled(clean(item.role), "bold blue" if item.role == "assistant" else "bold")
        for part in item.items:
            yield from _indented(_item(part, columns))
    else:
        lines = clean(item.text).splitlines()
        style = {"text": "", "json": "", "note": "dim", "undecoded": "red", "error": "red"}[item.kind]
        for line in lines[:_MOST_LINES]:
            yield Styled(line, style)
        if len(lines) > _MOST_LINES:
            yield Styled(f"… and {len(lines) - _MOST_LINES:,} more lines", "dim")


def _picture(picture: Picture, columns: int) -> Iterator[Styled]:
    yield Styled(f"picture {picture.width} x {picture.height}", "dim")
    if columns:
        yield from half_blocks(picture.image, columns)


def _clip(clip: Clip, columns: int) -> Iterator[Styled]:
    yield Styled(clean(clip.text), "dim")
    if clip.kind == "video" or not columns:
        return
    try:
        clips, _ = AVDecoder(clip.stream).get_audio_clips([(0, _MOST_SECONDS)])
    except EnergonError as error:  # damaged, or PyAV is not installed
        yield Styled(clean(str(error)), "red")
    else:
        yield from waveform(clips[0].numpy().mean(axis=0), columns)


def _bar(row: ShownRow) -> Styled:
    bar = Styled()
    end = 0
    for number, one in enumerate(row.segments):
        segment = one.segment
        bar.append("·" * round(_BAR * (segment.start - end) / row.length), "dim")
        end = segment.start + segment.length
        bar.append("█" * max(1, round(_BAR * segment.length / row.length)), _COLORS[number % len(_COLORS)])
    return bar.append("·" * round(_BAR * (row.length - end) / row.length), "dim")


def _tokens(tokens: Sequence[Token]) -> Styled:
    line = Styled()
    for token in tokens:
        text = clean(token.text).replace("\n", "⏎")
        if token.count > 1:
            text = f"[{text} x {token.count}]"
        line.append(text, _LEARNED if token.label is not None else _STYLES[token.kind])
    return line

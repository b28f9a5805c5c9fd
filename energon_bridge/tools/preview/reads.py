"""A picture of which samples a run reads: steps from left to right, samples from top to bottom, a colour for each rank.

For a run of this package the reads are computed. For one of megatron-energon they come from the logs of its workers
(`worker_debug_path`): files of JSON, one event per line; the event `…DataLoader.yield` has the keys of a batch.
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.order.rng import IntArray
from energon_bridge.core.storage import cannot_write
from energon_bridge.tools.forecast.planned_run import Run
from energon_bridge.tools.forecast.samples import name_steps

_COLUMNS = 1000
_ROWS = 500
_FEWEST_COLUMNS = 100
_FEWEST_ROWS = 60
_COLORS = np.array(
    [(68, 119, 170), (204, 119, 51), (34, 136, 102), (170, 68, 119), (136, 119, 34), (85, 102, 204)], dtype=np.float64
)
"""The colours of the ranks, in turn."""
_PAPER = 255.0
_YIELDS = ("SavableDataLoader.yield", "BasicDataLoader.yield")
_LEFT = 210
_TOP = 16
_RIGHT = 16
_BOTTOM = 54


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The samples of one dataset, `count` of them from `first` on among those of all."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """The reads of a run: which samples, in which step, on which rank.

    Attributes:
        bands: The datasets, one after the other.
        first_step, num_steps: The steps.
        steps, ranks, samples: Of each read the step, the rank, and the number of the sample among those of `bands`.
    """

    bands: tuple[Band, ...]
    first_step: int
    num_steps: int
    steps: IntArray
    ranks: IntArray
    samples: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BandFacts:
    """The reads of one dataset: its samples, reads, different samples, and reads of the most read sample."""

    name: str
    num_samples: int
    reads: int
    distinct: int
    most: int


def reads_of_run(run: Run, first_step: int, num_steps: int) -> Reads:
    """Compute the reads of a run in some steps, assuming no sample is skipped; no data is read.

    Raises:
        ConfigurationError: There are no such steps.
    """
    leaves = run.spec.leaves
    bands = []
    first = 0
    offsets = {}
    for leaf in leaves:
        count = leaf.stop - leaf.start
        offsets[leaf.identity] = first - leaf.start
        bands.append(Band(name=leaf.dataset.path, first=first, count=count))
        first += count
    steps = range(first_step, first_step + num_steps)

    def triples() -> Iterator[tuple[int, int, int]]:
        for step, microbatches in zip(steps, name_steps(run, steps), strict=True):
            for microbatch in microbatches:
                for sample in microbatch.samples:
                    yield step, microbatch.rank, offsets[sample.restore_key[0]] + sample.index

    return _collected(tuple(bands), first_step, num_steps, triples())


def log_files(source: Sequence[str]) -> list[Path]:
    """Return the worker logs of megatron-energon among files and folders; none if an argument is anything else."""
    files: list[Path] = []
    for name in map(Path, source):
        if name.is_dir() and not (name / ".nv-meta").exists():
            files += sorted(name.glob("*.jsonl"))
        elif name.suffix == ".jsonl" and name.is_file():
            files.append(name)
    return files if files and all(_is_log(file) for file in files) else []


def _is_log(file: Path) -> bool:
    with file.open("rb") as lines:
        try:
            event = json.loads(lines.readline(1 << 20))
        except ValueError:
            return False
    return isinstance(event, dict) and isinstance(event.get("t"), str)


def reads_of_logs(files: Sequence[Path], first_step: int, num_steps: int, loader: int | None = None) -> Reads:
    """Return the reads of a run of megatron-energon from the logs of its workers; shards identify the datasets.

    Args:
        files: The logs, of all ranks.
        first_step, num_steps: The batches of each rank to look at.
        loader: Number of the loader; default: the one that has delivered most.

    Raises:
        ConfigurationError: The logs name no samples.
    """
    delivered: dict[int, list[tuple[int, int, list[str]]]] = {}
    for event in _events(files):
        keys = event.get("keys")
        if isinstance(keys, list):
            step_and_rank = int(event["global_idx"]), int(event["r"])
            delivered.setdefault(int(event["id"]), []).append((*step_and_rank, [str(key) for key in keys]))
    if not delivered:
        raise ConfigurationError(
            f"{files[0]}: the logs contain no samples. Write them with WorkerConfig(worker_debug_path=…, "
            "worker_log_level=1) and an encoder that keeps __key__"
        )
    chosen = max(delivered, key=lambda one: len(delivered[one])) if loader is None else loader
    if chosen not in delivered:
        loaders = ", ".join(map(str, sorted(delivered)))
        raise ConfigurationError(f"{files[0]}: there is no loader {chosen}; loaders: {loaders}")
    wanted = [one for one in delivered[chosen] if first_step <= one[0] < first_step + num_steps]
    names = sorted({key for _, _, keys in wanted for key in keys})
    numbers = {key: number for number, key in enumerate(names)}
    bands = (Band(name=f"loader {chosen}: samples seen", first=0, count=len(names)),)
    return _collected(
        bands, first_step, num_steps, ((step, rank, numbers[key]) for step, rank, ks in wanted for key in ks)
    )


def _events(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not any(name in line for name in _YIELDS):
                    continue
                try:
                    event = json.loads(line)
                except ValueError:  # the line at which a worker was killed
                    continue
                if event.get("t") in _YIELDS:
                    yield event


def _collected(bands: tuple[Band, ...], first: int, count: int, triples: Iterable[tuple[int, int, int]]) -> Reads:
    reads: IntArray = np.fromiter(chain.from_iterable(triples), dtype=np.int64).reshape(-1, 3)
    steps = reads[:, 0]
    ranks = reads[:, 1]
    samples = reads[:, 2]
    return Reads(bands=bands, first_step=first, num_steps=count, steps=steps, ranks=ranks, samples=samples)


def count_reads(reads: Reads) -> list[BandFacts]:
    """Return the reads of each dataset."""
    facts = []
    for band in reads.bands:
        own = reads.samples[(reads.samples >= band.first) & (reads.samples < band.first + band.count)]
        _, counts = np.unique(own, return_counts=True)
        most = int(counts.max()) if counts.size else 0
        facts.append(BandFacts(name=band.name, num_samples=band.count, reads=own.size, distinct=counts.size, most=most))
    return facts


def picture_of(reads: Reads, *, columns: int = _COLUMNS, rows: int = _ROWS) -> Image.Image:
    """Return the picture: white where nothing is read, and a rank's colour the stronger, the more it reads there."""
    total = max(1, sum(band.count for band in reads.bands))
    columns = max(1, min(columns, reads.num_steps))
    rows = max(1, min(rows, total))
    # If there are few reads, use larger cells: isolated pixels would be hard to see.
    coarser = min(1.0, (reads.samples.size / (columns * rows)) ** 0.5)
    columns = max(min(columns, _FEWEST_COLUMNS), round(columns * coarser))
    rows = max(min(rows, _FEWEST_ROWS), round(rows * coarser))
    x = (reads.steps - reads.first_step) * columns // max(1, reads.num_steps)
    y = reads.samples * rows // total
    cells = y * columns + x
    counts = np.bincount(cells, minlength=rows * columns).astype(np.float64)
    sums = [
        np.bincount(cells, weights=_COLORS[reads.ranks % len(_COLORS), part], minlength=rows * columns)
        for part in range(3)
    ]
    mean = np.stack(sums, axis=1) / np.maximum(counts, 1)[:, None]
    full = np.where(counts > 0, 0.4 + 0.6 * counts / max(1.0, counts.max()), 0.0)[:, None]
    pixels = _PAPER * (1 - full) + mean * full
    return Image.fromarray(pixels.round().astype(np.uint8).reshape(rows, columns, 3))


def write_picture(path: Path, reads: Reads, *, title: str) -> None:
    """Write the picture: as `.svg` with axes and legend, or as `.png` with the pixels alone.

    Raises:
        ConfigurationError: The name ends otherwise, or the file cannot be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigurationError(f"{path}: the name of the picture must end in .svg or .png")
    buffer = BytesIO()
    picture_of(reads).save(buffer, "png", optimize=True)
    content = (
        buffer.getvalue() if path.suffix == ".png" else _svg(reads, buffer.getvalue(), title).encode("utf-8", "replace")
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise cannot_write(path, error, " the picture") from error
    finally:
        partial.unlink(missing_ok=True)


def _svg(reads: Reads, png: bytes, title: str) -> str:
    """Return the pixels with axes and legend, without scripts or external files."""
    width = _LEFT + _COLUMNS + _RIGHT
    height = _TOP + _ROWS + _BOTTOM
    total = max(1, sum(band.count for band in reads.bands))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, DejaVu Sans, sans-serif" font-size="12">',
        f"<title>{_text(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<image x="{_LEFT}" y="{_TOP}" width="{_COLUMNS}" height="{_ROWS}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{base64.b64encode(png).decode()}"/>',
    ]
    for band in reads.bands:
        top = _TOP + _ROWS * band.first / total
        high = _ROWS * band.count / total
        name = band.name if len(band.name) <= 30 else f"…{band.name[-29:]}"
        parts.append(f'<line x1="{_LEFT - 6}" x2="{_LEFT + _COLUMNS}" y1="{top:.1f}" y2="{top:.1f}" stroke="#bbb"/>')
        if high >= 12:
            middle = top + high / 2
            parts.append(f'<text x="{_LEFT - 10}" y="{middle:.1f}" text-anchor="end">{_text(name)}</text>')
            if high >= 28:
                count = f"{band.count:,} samples"
                parts.append(
                    f'<text x="{_LEFT - 10}" y="{middle + 14:.1f}" text-anchor="end" fill="#777">{count}</text>'
                )
    base = _TOP + _ROWS + 18
    last = reads.first_step + max(0, reads.num_steps - 1)
    parts.append(f'<text x="{_LEFT}" y="{base}">step {reads.first_step:,}</text>')
    parts.append(f'<text x="{_LEFT + _COLUMNS}" y="{base}" text-anchor="end">step {last:,}</text>')
    ranks = np.unique(reads.ranks).tolist()
    for number, rank in enumerate(ranks[: len(_COLORS)]):
        x, color = _LEFT + 90 * number, "#" + "".join(f"{int(part):02x}" for part in _COLORS[rank % len(_COLORS)])
        parts.append(f'<rect x="{x}" y="{base + 14}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="{base + 24}">rank {rank}</text>')
    if len(ranks) > len(_COLORS):
        x = _LEFT + 90 * len(_COLORS)
        parts.append(f'<text x="{x}" y="{base + 24}">{len(ranks) - len(_COLORS)} more ranks, colours again</text>')
    return "".join([*parts, "</svg>\n"])


def _text(value: str) -> str:
    return html.escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in value))

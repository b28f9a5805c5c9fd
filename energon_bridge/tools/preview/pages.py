"""Pages for a browser that open from a folder, without a server; and the page of a run's report, all in one file.

    index.html, preview.css, preview.js     the same for every preview
    data/meta.js                            counts, datasets, histograms, the list of batches
    data/samples-K.js                       the samples of page K
    data/search-K.js                        keys and the beginnings of texts, loaded when somebody searches
    data/batch-K.js                         one batch
    media/000/000012.jpg                    pictures, videos and sound, by number

Data files are scripts that call `preview.take(kind, number, value)`, because pages opened from a folder may not fetch
files. Names and texts from the data occur only in values: no file name, address or markup is made of them, and the
pages allow no scripts but those of the folder. The folder appears as a whole or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import socket
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.storage import ByteRange, cannot_write, write_file
from energon_bridge.tools.forecast.epochs import Forecast
from energon_bridge.tools.preview.batches import ShownBatch
from energon_bridge.tools.preview.records import Clip, Picture, SampleRecord, ShownItem, ShownTurn
from energon_bridge.tools.preview.sample_source import DatasetShare, DrawnSample, SampleSource

_PER_FILE = 60
"""Samples in a file of data, which is a page."""
_PER_SEARCH_FILE = 5000
_SEARCHED_CHARACTERS = 1000
"""Characters of a sample's texts that are searched."""
_BINS = 32
_MOST_LINKS = 20
"""Samples with trouble of one kind that the overview leads to."""
_MARK = 'content="energon preview"'
_FILES = {"index.html": "page.html", "preview.css": "page.css", "preview.js": "page.js"}


PageBlock = str | Mapping[str, Any]
"""A text, a table or a chart: see `tableElement` and `chartElement` in page.js."""
_CONTROLS = [*range(9), 11, 12, *range(14, 32), 127, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}")
"""What control characters, and those that turn the direction of text, are replaced by."""
PageFiles = list[tuple[str, bytes | ByteRange]]
"""Files to write: the extension and the bytes of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """A record as the pages have it: its fields as plain values, and its pictures and clips as files to write."""

    record: SampleRecord
    fields: list[Any]
    media: PageFiles


def write_pages(
    out: Path,
    source: SampleSource,
    drawn: Iterable[DrawnSample],
    *,
    title: str,
    notes: Sequence[str] = (),
    batches: Sequence[ShownBatch] = (),
    forecast: Forecast | None = None,
) -> int:
    """Write the pages of some samples and batches and return how many samples there are.

    Args:
        out: The folder; an earlier preview in it is replaced.
        source: Loads the samples.
        title: Title of the pages, with `notes` below it.
        batches: Batches, whose samples are among those drawn.
        forecast: A run over the same mix: shares of the draws, epochs and how well datasets are shuffled are shown.

    Raises:
        ConfigurationError: The folder holds something else, or cannot be written.
    """
    if re.match(r"[a-z][\w+.-]+:/", str(out)):  # `Path` leaves one slash
        raise ConfigurationError(f"{out}: pages can only be written to a local folder; write there, and copy it")
    out = Path(os.path.realpath(out))
    if out.exists() and not _is_preview(out):
        raise ConfigurationError(
            f"{out} exists but is not a preview: choose another folder for the pages, or remove it"
        )
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        writer = _Writer(partial, source.parts())
        for made in source.records(drawn, _made):
            writer.add(made)
        writer.finish(title, list(notes), batches, forecast)
        if out.exists():
            shutil.rmtree(out)
        os.replace(partial, out)
    except OSError as error:
        raise cannot_write(out, error, " the pages") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return writer.count


def _is_preview(folder: Path) -> bool:
    page = folder / "index.html"
    return folder.is_dir() and (not any(folder.iterdir()) or (page.is_file() and _MARK in page.read_text("utf-8")))


def _made(record: SampleRecord) -> _Made:
    """Encode the pictures of a record; they refer to their indices in the list until they are numbered."""
    media: PageFiles = []
    return _Made(record=record, fields=[[name, _plain(items, media)] for name, items in record.fields], media=media)


def _plain(items: Sequence[ShownItem], media: PageFiles) -> list[list[Any]]:
    plain: list[list[Any]] = []
    for item in items:
        if isinstance(item, ShownTurn):
            plain.append(["r", item.role, _plain(item.items, media)])
        elif isinstance(item, Picture):
            plain.append(["p", len(media), item.width, item.height])
            media.append(("jpg", _jpeg(item)))
        elif isinstance(item, Clip):
            plain.append([item.kind[0], len(media), item.suffix, item.text])
            media.append((item.suffix, item.stream))
        else:
            plain.append(
                [{"text": "t", "json": "j", "note": "n", "undecoded": "u", "error": "e"}[item.kind], item.text]
            )
    return plain


def _jpeg(picture: Picture) -> bytes:
    buffer = BytesIO()
    picture.image.save(buffer, "jpeg", quality=82)
    return buffer.getvalue()


def _numbered(items: list[list[Any]], first: int) -> list[list[Any]]:
    """Return items with their files numbered across the whole preview."""
    numbered = []
    for item in items:
        if item[0] in "pva":
            item = [item[0], first + item[1], *item[2:]]
        elif item[0] == "r":
            item = ["r", item[1], _numbered(item[2], first)]
        numbered.append(item)
    return numbered


class _Writer:
    """Writes the files of a preview; holds one page and one search file in memory at a time."""

    def __init__(self, folder: Path, parts: Sequence[DatasetShare]) -> None:
        self._folder = folder
        self._parts = list(parts)
        self._numbers = {part.name: number for number, part in reversed(list(enumerate(parts)))}
        self._shown = [0] * len(parts)
        self.count = self._media = 0
        self._troubled: dict[str, list[int]] = {}
        self._page: list[Any] = []
        self._search: tuple[list[str], list[str], list[int]] = ([], [], [])
        self._sizes: dict[str, array[int]] = {}
        self._numbers_of: dict[tuple[Any, ...], int] = {}
        (folder / "data").mkdir(parents=True)
        for name, own in _FILES.items():
            (folder / name).write_bytes(files(__package__).joinpath(own).read_bytes())

    def add(self, made: _Made) -> None:
        """Write a sample."""
        record = made.record
        fields = [[name, _numbered(items, self._media)] for name, items in made.fields]
        self._write_media(made.media)
        part = self._numbers.get(record.dataset, 0)
        self._shown[part] += 1
        if trouble := record.trouble():
            self._troubled.setdefault(trouble, []).append(self.count)
        self._page.append(
            {
                "number": self.count,
                "key": record.key,
                "part": part,
                "shard": record.shard,
                "index": record.index,
                "size": record.size,
                "facts": [[name, value] for name, value in record.facts.items()],
                "fields": fields,
                "asked": record.asked,
                "said": record.said,
                "error": record.error,
            }
        )
        for values, value in zip(self._search, (record.key, record.text()[:_SEARCHED_CHARACTERS], part), strict=True):
            values.append(value)  # type: ignore[attr-defined]
        for name, sizes in record.sizes().items():
            self._sizes.setdefault(name, array("q")).extend(sizes)
        facts = record.facts
        if "row" in facts:
            self._numbers_of[_position(facts)] = self.count
        self.count += 1
        if len(self._page) == _PER_FILE:
            self._flush_page()
        if len(self._search[0]) == _PER_SEARCH_FILE:
            self._flush_search()

    def finish(
        self, title: str, notes: list[str], batches: Sequence[ShownBatch], forecast: Forecast | None = None
    ) -> None:
        """Write what is left."""
        if self._page:
            self._flush_page()
        if self._search[0]:
            self._flush_search()
        datasets: Counter[str] = Counter()
        for number, batch in enumerate(batches):
            self._write("batch", number, {"rows": [self._row(batch, row) for row in range(len(batch.rows))]})
            datasets.update(one.segment.dataset for row in batch.rows for one in row.segments)
        names = [part.name for part in self._parts]
        meta = {
            "title": title,
            "notes": notes,
            "count": self.count,
            "troubled": [[kind, len(ones), ones[:_MOST_LINKS]] for kind, ones in self._troubled.items()],
            "per_file": _PER_FILE,
            "per_search_file": _PER_SEARCH_FILE,
            "search_files": -(-self.count // _PER_SEARCH_FILE),
            "parts": [
                {"name": part.name, "samples": part.num_samples, "shown": shown, "share": part.share}
                for part, shown in zip(self._parts, self._shown, strict=True)
            ],
            "series": [*names, *(name for name in datasets if name not in names)],
            "histograms": [histogram(name, values) for name, values in self._sizes.items()],
            "batches": [
                {
                    "step": one.step,
                    "rank": one.rank,
                    "microbatch": one.microbatch,
                    "kind": one.kind,
                    "inputs": list(one.inputs),
                }
                for one in batches
            ],
            "plan": None if forecast is None else _forecast_values(forecast),
        }
        self._write("meta", None, meta)

    def _row(self, batch: ShownBatch, row_number: int) -> dict[str, Any]:
        row = batch.rows[row_number]
        plain = []
        for number, one in enumerate(row.segments):
            media: PageFiles = []
            pictures = _numbered(_plain(one.pictures, media), self._media)
            self._write_media(media)
            segment = one.segment
            plain.append(
                {
                    "dataset": segment.dataset,
                    "key": segment.key,
                    "start": segment.start,
                    "length": segment.length,
                    "tokens": [[token.kind, token.text, token.label, token.count] for token in one.tokens],
                    "pictures": pictures,
                    "sample": self._numbers_of.get((batch.step, batch.rank, batch.microbatch, row_number, number)),
                }
            )
        media = []
        fields = [[name, _numbered(_plain(items, media), self._media)] for name, items in row.fields]
        self._write_media(media)
        keys = ((batch.step, batch.rank, batch.microbatch, row_number, number) for number in range(len(row.members)))
        return {
            "valid": row.valid,
            "samples": [] if row.segments else [self._numbers_of[one] for one in keys if one in self._numbers_of],
            "length": row.length,
            "padding": row.padding,
            "segments": plain,
            "fields": fields,
        }

    def _write_media(self, media: PageFiles) -> None:
        for suffix, data in media:
            folder = self._folder / "media" / f"{self._media // 1000:03d}"
            if self._media % 1000 == 0:
                folder.mkdir(parents=True)
            data = data if isinstance(data, bytes) else data.read()
            (folder / f"{self._media:06d}.{suffix}").write_bytes(data)
            self._media += 1

    def _flush_page(self) -> None:
        self._write("samples", (self.count - 1) // _PER_FILE, self._page)
        self._page = []

    def _flush_search(self) -> None:
        self._write("search", (self.count - 1) // _PER_SEARCH_FILE, self._search)
        self._search = ([], [], [])

    def _write(self, kind: str, number: int | None, value: Any) -> None:
        name = kind if number is None else f"{kind}-{number}"
        # Everything is escaped, so JavaScript sees no line ends and no unpaired surrogates.
        (self._folder / "data" / f"{name}.js").write_text(_call(kind, number, json.dumps(value, **_COMPACT)), "ascii")


_COMPACT: Any = {"separators": (",", ":")}


def _call(kind: str, number: int | None, value: str) -> str:
    """Return the code that gives a value, as JSON, to the pages."""
    return f"preview.take({json.dumps(kind)},{json.dumps(number)},{value});\n"


def write_run(path: Path, title: str, facts: Mapping[str, object], sections: Mapping[str, Sequence[PageBlock]]) -> None:
    """Write the report of a run as one HTML file, which appears as a whole or not at all.

    Args:
        path: The file; its folder is made.
        title: Title of the page, with the facts below it.
        facts: Values by name.
        sections: By their titles; one without blocks is left out.
    """
    shown = [(name, blocks) for name, blocks in sections.items() if blocks]
    run = {"facts": [(name, str(value)) for name, value in facts.items()], "sections": shown}
    value = {"title": title, "notes": [], "count": 0, "batches": [], "run": run}
    # No direction mark turns what follows around, and nothing ends the script.
    text = json.dumps(value, ensure_ascii=False, **_COMPACT).translate(_SHOWN).replace("<", "\\u003c")
    own = (files(__package__).joinpath(name).read_text("utf-8") for name in _FILES.values())
    page, style, script = (one.replace("energon preview", "energon_bridge") for one in own)  # no command writes it
    script += _call("meta", None, text.encode("utf-8", "replace").decode())  # keys need not be valid text
    for kind, inline in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        page = page.replace(f"{kind}-src 'self'", f"{kind}-src 'sha256-{digest}'")
    head, _, rest = page.partition('<link rel="stylesheet" href="preview.css">')
    body, _, end = rest.partition('<script src="preview.js"></script>\n<script src="data/meta.js"></script>')
    whole = f"{head}<style>{style}</style>{body}<script>{script}</script>{end}"
    write_file(path, (whole.encode(),))


def _forecast_values(forecast: Forecast) -> dict[str, Any]:
    """Return what the pages show of a run; its datasets are in order of the mix."""
    leaves = [
        {"written": one.written, "share": one.share, "draws": one.draws, "epochs": one.epochs, "mixing": one.mixing}
        for one in forecast.leaves
    ]
    return {
        "steps": forecast.steps,
        "ranks": forecast.world_size,
        "batch_size": forecast.batch_size,
        "draws": forecast.draws,
        "mixing": forecast.mixing,
        "first_end": forecast.first_end,
        "leaves": leaves,
        "schedule": [[point.step, list(point.shares)] for point in forecast.schedule],
    }


def _position(facts: Mapping[str, int]) -> tuple[int | None, ...]:
    """Return the position of a sample in a run: step, rank, microbatch, row, and index in the row."""
    return (*(facts.get(name) for name in ("step", "rank", "microbatch", "row")), facts.get("in row", 0))


def histogram(name: str, values: Iterable[int]) -> dict[str, Any]:
    """Return a histogram of values; the bins are logarithmic if values differ by orders of magnitude."""
    ordered = sorted(values)
    low = ordered[0]
    high = ordered[-1]
    log = low > 0 and high / low > 100
    edges = list(_log_edges(low, high) if log else _even_edges(low, high))
    counts = [0] * (len(edges) - 1)
    bin_number = 0
    for value in ordered:
        while bin_number + 1 < len(counts) and value >= edges[bin_number + 1]:
            bin_number += 1
        counts[bin_number] += 1
    return {
        "name": name,
        "edges": edges,
        "counts": counts,
        "log": log,
        "median": ordered[len(ordered) // 2],
        "mean": round(sum(ordered) / len(ordered), 1),
        "p95": ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)],
    }


def _even_edges(low: int, high: int) -> Iterator[int]:
    step = max(1, -(-(high - low + 1) // _BINS))
    yield from range(low, high + step + 1, step)


def _log_edges(low: int, high: int) -> Iterator[int]:
    ratio = (high / low) ** (1 / _BINS)
    last = low - 1
    for number in range(_BINS + 1):
        edge = high + 1 if number == _BINS else math.floor(low * ratio**number)
        if edge > last:
            yield edge
            last = edge


# ---------------------------------------------------------------------------------------------------------------------
# The pages over HTTP, for those who cannot open the folder itself; on this machine only. Only the folder is served,
# with byte ranges, so that videos seek. Requests for another host name are refused, or any web site could read the
# pages through the browser of someone who visits it.


_HOSTS = ("127.0.0.1", "localhost")


def server_of_pages() -> Callable[[Path, int, Callable[[str], None]], None]:
    """Return a function that serves a folder on a port (0: any) until interrupted; it passes the address to `say`.

    Raises:
        ConfigurationError: starlette or uvicorn is not installed.
    """
    try:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Mount
        from starlette.staticfiles import StaticFiles
    except ImportError as error:
        raise ConfigurationError("--serve needs starlette and uvicorn: pip install 'energon-bridge[view]'") from error

    def serve(folder: Path, port: int, say: Callable[[str], None]) -> None:
        own_host: Any = Middleware(TrustedHostMiddleware, allowed_hosts=list(_HOSTS))
        application = Starlette(routes=[Mount("/", StaticFiles(directory=folder, html=True))], middleware=[own_host])
        try:
            listening = socket.create_server((_HOSTS[0], port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot use --port {port}: {error.strerror}; give another, or 0 for a free one"
            ) from error
        with closing(listening), suppress(KeyboardInterrupt):  # Ctrl-C is the way to end it
            say(f"http://{_HOSTS[0]}:{listening.getsockname()[1]}/")
            uvicorn.Server(uvicorn.Config(application, log_level="warning")).run(sockets=[listening])

    return serve

"""A report of a run: one HTML page that opens from a folder, with no script and nothing from elsewhere.

`RunRecorder` keeps what happened, in memory that does not grow with the run: at most `MOST_POINTS` points of the curves
and `MOST_SLOW` microbatches. `summary` adds what the loader knows: datasets, what was left out and why, times.
`write_report` makes the page of the summaries of all ranks. Names and keys from the data occur as text only.
"""

from __future__ import annotations

import heapq
import html
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from energon_bridge.dataloader import EnergonDataloader
from energon_bridge.errors import EnergonError
from energon_bridge.loader.document import State, read
from energon_bridge.loader.metrics import dataset_names
from energon_bridge.loader.run_plan import DatasetSpec
from energon_bridge.stream.state import COUNTERS

MOST_POINTS = 1000
"""Points of a curve; beyond them, neighbours become one."""
MOST_SLOW = 20
"""Microbatches that are named as the slowest ones."""
_MOST_KEYS = 8
_MOST_KEY = 200
_LOSSES_AT_ONCE = 100
"""Losses that are read from the device together, so that no step waits for it."""


class Curve:
    """A value by step, in at most `MOST_POINTS` points: step, number of values, their sum, smallest and largest."""

    def __init__(self, points: Sequence[Sequence[float]] = (), per_point: int = 1) -> None:
        self.points = [list(point) for point in points]
        self.per_point = per_point

    def add(self, step: int, value: float) -> None:
        """Add the value of a step; values that are not finite are left to `write_report` to count."""
        points = self.points
        if points and points[-1][1] < self.per_point:
            last = points[-1]
            points[-1] = [step, last[1] + 1, last[2] + value, min(last[3], value), max(last[4], value)]
            return
        if len(points) >= MOST_POINTS:
            self.per_point *= 2
            pairs = zip(points[::2], [*points[1::2], None], strict=False)
            self.points = points = [_joined(first, second) for first, second in pairs]
            if points[-1][1] < self.per_point:
                self.add(step, value)
                return
        points.append([step, 1, value, value, value])


def _joined(first: list[float], second: list[float] | None) -> list[float]:
    if second is None:
        return first
    sums = [a + b for a, b in zip(first[1:3], second[1:3], strict=True)]
    return [second[0], *sums, min(first[3], second[3]), max(first[4], second[4])]


class RunRecorder:
    """What one rank sees of its run.

    Attributes:
        loss, waiting: Curves of the losses, and of the share of each step that was spent waiting for data.
        not_finite: Steps whose loss was not a finite number.
        seconds, waited: Time spent training, and that spent waiting for data.
        slowest: The slowest microbatches: seconds, whether these are what it took to make it (else: to wait for it),
            the step, its number since this process began, and its keys; as a heap.
    """

    def __init__(self) -> None:
        self.loss, self.waiting = Curve(), Curve()
        self.not_finite = 0
        self.seconds = self.waited = 0.0
        self.slowest: list[tuple[float, bool, int, int, list[str]]] = []
        self._microbatches = 0
        self._pending: list[tuple[int, Tensor]] = []
        self._marks = (0.0, 0.0)
        self._seen = (0.0, 0.0)

    def start(self, loader: EnergonDataloader | None) -> None:
        """Start the clock, at the beginning and after whatever is no training."""
        waited = 0.0 if loader is None else loader.wait_seconds
        self._marks = (time.perf_counter(), waited)
        self._seen = (waited, _make_seconds(loader) or 0.0)

    def microbatch(self, loader: EnergonDataloader | None, batch: Any, step: int) -> None:
        """Record the microbatch that the loader has just delivered, for the optimizer step with this number."""
        if loader is None:
            return
        made = _make_seconds(loader)
        before, self._seen = self._seen, (loader.wait_seconds, made or 0.0)
        took = self._seen[0] - before[0] if made is None else made - before[1]
        self._microbatches += 1
        slowest = self.slowest
        if len(slowest) < MOST_SLOW or took > slowest[0][0]:
            entry = (took, made is not None, step, self._microbatches, _keys(batch))
            (heapq.heappush if len(slowest) < MOST_SLOW else heapq.heapreplace)(slowest, entry)

    def step(self, loader: EnergonDataloader | None, step: int, loss: Tensor | float | None) -> None:
        """Record the end of an optimizer step; the loss may lie on a device."""
        now, waited = time.perf_counter(), 0.0 if loader is None else loader.wait_seconds
        passed, spent = now - self._marks[0], waited - self._marks[1]
        self._marks = (now, waited)
        self.seconds += passed
        self.waited += spent
        if loader is not None and passed > 0:
            self.waiting.add(step, min(1.0, max(0.0, spent / passed)))
        if isinstance(loss, Tensor):
            self._pending.append((step, loss.detach().reshape(())))
            if len(self._pending) >= _LOSSES_AT_ONCE:
                self.flush()
        elif loss is not None:
            self.add_loss(step, loss)

    def add_loss(self, step: int, loss: float) -> None:
        """Record a loss."""
        if math.isfinite(loss):
            self.loss.add(step, loss)
        else:
            self.not_finite += 1

    def set_losses(self, losses: Mapping[int, float]) -> None:
        """Replace the losses by those given for each step."""
        self._pending.clear()
        self.loss, self.not_finite = Curve(), 0
        for step, loss in losses.items():
            self.add_loss(step, loss)

    def flush(self) -> None:
        """Read the losses that are still on the device."""
        if self._pending:
            values = torch.stack([loss.float() for _, loss in self._pending]).tolist()
            for (step, _), value in zip(self._pending, values, strict=True):
                self.add_loss(step, value)
            self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what was recorded as plain values."""
        self.flush()
        curves = {name: [c.per_point, c.points] for name, c in (("loss", self.loss), ("waiting", self.waiting))}
        figures = {"not_finite": self.not_finite, "seconds": self.seconds, "waited": self.waited}
        return curves | figures | {"slowest": [list(entry) for entry in self.slowest]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.loss, self.waiting = (Curve(state[name][1], state[name][0]) for name in ("loss", "waiting"))
        self.not_finite, self.seconds, self.waited = state["not_finite"], state["seconds"], state["waited"]
        self.slowest = [(took, made, step, number, list(keys)) for took, made, step, number, keys in state["slowest"]]
        self._pending.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRow:
    """What a rank delivered of one dataset; `planned` is its part of the draws in percent, None if nothing says it."""

    path: str
    split_part: str
    planned: float | None
    num_samples: int
    draws: int
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """What one data-parallel rank knows at the end of its run.

    Attributes:
        rank, ranks: The data-parallel rank, and how many there are.
        seconds, waited: Time spent training, and that spent waiting for data.
        datasets: A row for each dataset of the mix.
        failures: Dataset, hook, exception and number of the samples that failed since the process began.
        metrics: Of the loader.
        slowest: As `RunRecorder.slowest`.
    """

    rank: int
    ranks: int
    seconds: float
    waited: float
    datasets: tuple[DatasetRow, ...] = ()
    failures: tuple[tuple[str, str, str, int], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    slowest: tuple[tuple[float, bool, int, int, list[str]], ...] = ()


def summary(recorder: RunRecorder, loader: EnergonDataloader | None) -> RankSummary | None:
    """Return what this rank knows; None on a rank of a replica that another rank loads for."""
    recorder.flush()
    inner = None if loader is None else loader.loader
    replica = getattr(inner, "replica", None)
    if replica is not None:
        if not replica.is_source:
            return None
        inner = inner.source  # type: ignore[union-attr]
    spec, config = getattr(inner, "spec", None), getattr(inner, "config", None)
    return RankSummary(
        rank=0 if config is None else config.dp_rank,
        ranks=1 if config is None else config.dp_size,
        seconds=recorder.seconds,
        waited=recorder.waited,
        datasets=() if spec is None else tuple(_datasets(inner, spec)),
        failures=() if spec is None else tuple(spec.failure_log.kinds()),
        metrics={} if loader is None else loader.metrics(),
        slowest=tuple(sorted(recorder.slowest, reverse=True)),
    )


def gathered(own: RankSummary | None) -> list[RankSummary]:
    """Return the summaries of all data-parallel ranks, in order; every process of the run must call it."""
    found = [own]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        found = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, own)
    by_rank = {one.rank: one for one in reversed(found) if one is not None}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _make_seconds(loader: EnergonDataloader | None) -> float | None:
    return None if loader is None else getattr(loader.loader, "make_seconds", None)


def _keys(batch: Any) -> list[str]:
    keys = batch.get("__key__") if isinstance(batch, dict) else getattr(batch, "__key__", None)
    if keys is None:
        return []
    keys = [keys] if isinstance(keys, str) else list(keys)
    more = [f"and {len(keys) - _MOST_KEYS} more"] if len(keys) > _MOST_KEYS else []
    return [str(key)[:_MOST_KEY] for key in keys[:_MOST_KEYS]] + more


def _datasets(loader: Any, spec: DatasetSpec) -> Iterator[DatasetRow]:
    """Yield a row for each dataset that is part of the mix now."""
    rows = [row for row in loader.counters() if not row["parked"]]
    for row, planned in zip(rows, _planned(loader, spec, rows), strict=True):
        yield DatasetRow(
            **{name: row[name] for name in ("path", "split_part", "num_samples")},
            planned=planned,
            draws=row["draws"] or 0,
            counts={name: row[name] for name in COUNTERS},
        )


def _planned(loader: Any, spec: DatasetSpec, rows: Sequence[State]) -> list[float | None]:
    """Return the part of the draws that the mix gives each dataset, in percent."""
    if _moves(loader, spec):
        # Draws follow weights that move to the last one; what is delivered of them is another matter.
        total = sum(row["draws"] or 0 for row in rows)
        return [100 * (row["draws"] or 0) / total if total else None for row in rows]
    weighs = spec.mode in ("weights", "single")
    shares = {leaf.identity: leaf.share if weighs else leaf.share * leaf.num_samples for leaf in spec.leaves}
    total = sum(shares.values())
    return [float(100 * shares[row["identity"]] / total) if row["identity"] in shares else None for row in rows]


def _moves(loader: Any, spec: DatasetSpec) -> bool:
    """Whether the weights change during the run: by a schedule, or because somebody has changed them."""
    if spec.mix.is_scheduled:
        return True
    try:
        return bool(read(loader.save_state_rank()).changes)
    except EnergonError:  # no state within a balanced global batch
        return False


# The page -------------------------------------------------------------------------------------------------------------


_STYLE = """
:root { --paper: #fbfbfa; --card: #fff; --ink: #1d2127; --quiet: #646c78; --line: #e3e5e8; --accent: #2b5fb8;
  --soft: #c9daf5; --other: #cc7733; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --card: #1b1e24; --ink: #e4e6ea; --quiet: #98a0ac;
  --line: #2c3139; --accent: #8db4f5; --soft: #2d4368; --other: #e0a060; } }
body { margin: 0 auto; max-width: 1080px; padding: 20px 24px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 21px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 32px 0 8px; }
.quiet { color: var(--quiet); font-size: 13px; }
dl { display: flex; flex-wrap: wrap; gap: 6px 28px; } dt { color: var(--quiet); font-size: 13px; } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line); }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; } th { font-size: 13px; color: var(--quiet); font-weight: 600; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
svg { display: block; width: 100%; background: var(--card); border: 1px solid var(--line); }
svg text { fill: var(--quiet); font: 12px system-ui, "DejaVu Sans", sans-serif; }
.curve { fill: none; stroke: var(--accent); stroke-width: 1.6; } .band { fill: var(--soft); }
.grid { stroke: var(--line); } .planned { fill: var(--soft); } .delivered { fill: var(--accent); }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1000, 220, 64, 24


def write_report(
    path: str | os.PathLike[str],
    ranks: Sequence[RankSummary],
    recorder: RunRecorder,
    *,
    title: str = "Training run",
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write the report of a run; the file appears as a whole or not at all.

    Args:
        path: The HTML file.
        ranks: From `gathered`.
        recorder: Of the rank that writes.
        title: Of the page.
        facts: More to say at its head, by name.
    """
    recorder.flush()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(_sections(ranks, recorder, title, facts or {}))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        # No script may run and nothing may be fetched, whatever stands in a key.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width"><meta name="generator" content="energon report">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_bytes(page.encode("utf-8", "replace"))  # keys need not be valid text
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _sections(
    ranks: Sequence[RankSummary], recorder: RunRecorder, title: str, facts: Mapping[str, object]
) -> Iterator[str]:
    yield f"<h1>{_text(title)}</h1>"
    yield _facts(_head(ranks, recorder) | dict(facts))
    yield "<h2>Loss</h2>"
    yield _chart(recorder.loss, "loss", percent=False)
    if recorder.not_finite:
        yield f"<p>NaN or infinite, and not shown above: the loss in {recorder.not_finite:,} steps.</p>"
    yield "<h2>Waiting for data</h2>"
    yield _chart(recorder.waiting, "share of each step spent waiting for data", percent=True)
    yield from _mix_section(ranks)
    yield from _left_out_section(ranks)
    yield from _time_section(ranks)
    yield from _slow_section(ranks)


def _head(ranks: Sequence[RankSummary], recorder: RunRecorder) -> dict[str, object]:
    found: dict[str, object] = {}
    if recorder.loss.points:
        step, count, total, *_ = recorder.loss.points[-1]
        found |= {"steps": f"{int(step):,}", "loss at the end": f"{total / count:.4f}"}
    found |= {"data-parallel ranks": ranks[0].ranks if ranks else 1}
    samples = sum(row.counts["samples"] for rank in ranks for row in rank.datasets)
    draws = sum(row.draws for rank in ranks for row in rank.datasets)
    size = sum(row.num_samples for row in ranks[0].datasets) if ranks else 0
    if samples:
        found["samples delivered"] = f"{samples:,}"
    if draws and size:
        found["epochs"] = f"{draws / size:.2f}"
    if recorder.seconds > 0:
        found |= {
            "time spent training": _duration(recorder.seconds),
            "waiting for data": f"{100 * recorder.waited / recorder.seconds:.1f} %",
        }
    return found | {"written": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _mix_section(ranks: Sequence[RankSummary]) -> Iterator[str]:
    if not ranks or not ranks[0].datasets:
        return
    first = ranks[0].datasets
    names = dataset_names([row.path for row in first], [row.split_part for row in first])
    together = [[rank.datasets[number] for rank in ranks] for number in range(len(first))]
    samples = [sum(row.counts["samples"] for row in rows) for rows in together]
    total = sum(samples) or 1
    yield "<h2>Datasets: planned and delivered</h2>"
    columns = ("dataset", "planned", "delivered", "", "samples", "epochs", "skipped", "failed", "excluded")
    lines = []
    for name, rows, delivered in zip(names, together, samples, strict=True):
        planned, share = rows[0].planned, 100 * delivered / total
        if any(row.planned is None for row in rows):
            planned = None
        draws = sum(row.draws for row in rows)
        counted = {column: sum(row.counts[column] for row in rows) for column in ("skipped", "errors", "excluded")}
        lines.append(
            (
                f'<span title="{_text(rows[0].path)}">{_text(name)}</span>',
                "–" if planned is None else f"{planned:.1f} %",
                f"{share:.1f} %",
                _bars(planned or 0.0, share),
                f"{delivered:,}",
                f"{draws / rows[0].num_samples:.2f}" if draws else "–",
                *(f"{counted[column]:,}" for column in ("skipped", "errors", "excluded")),
            )
        )
    yield _table(columns, lines, numbers=(1, 2, 4, 5, 6, 7, 8))
    yield '<p class="quiet">Planned: what the mix says, or, if its weights moved, what was drawn by them.</p>'


def _left_out_section(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield "<h2>Left out, by reason</h2>"
    reasons: dict[tuple[str, str], int] = {}
    for rank in ranks:
        for dataset, hook, error, number in rank.failures:
            reason = (dataset, f"{hook}: {error} (different samples, since this process began)")
            reasons[reason] = reasons.get(reason, 0) + number
        for row in rank.datasets:
            counts = row.counts
            of_counters = {
                "failed, all passes together": counts["errors"],
                "skipped by a hook (SkipSample)": counts["skipped"] - counts["dropped"],
                "too long for a pack: dropped": counts["dropped"],
                "too long for a pack: truncated": counts["truncated"],
                "too long for a pack: split": counts["split"],
                "listed in exclude": counts["excluded"],
            }
            for text, number in of_counters.items():
                if number:
                    reasons[row.path, text] = reasons.get((row.path, text), 0) + number
    if not reasons:
        yield "<p>Nothing.</p>"
        return
    lines = [(_text(dataset), _text(text), f"{n:,}") for (dataset, text), n in sorted(reasons.items())]
    yield _table(("dataset", "reason", "samples"), lines, numbers=(2,))


def _time_section(ranks: Sequence[RankSummary]) -> Iterator[str]:
    if not any(rank.metrics for rank in ranks):
        return
    yield "<h2>Loading, by rank</h2>"
    stages = ("load_seconds", "encode_seconds", "batch_seconds")
    lines = []
    for rank in ranks:
        found = rank.metrics
        waited = f"{100 * rank.waited / rank.seconds:.1f} %" if rank.seconds > 0 else "–"
        spent = [f"{found[stage]:,.1f} s" if stage in found else "–" for stage in stages]
        lines.append((str(rank.rank), waited, *spent, f"{found.get('worker_restarts', 0):.0f}"))
    columns = ("rank", "waiting", "reading and decoding", "hooks", "batching", "workers lost")
    yield _table(columns, lines, numbers=range(6))
    yield '<p class="quiet">Times of all worker processes of a rank together, since this process began.</p>'


def _slow_section(ranks: Sequence[RankSummary]) -> Iterator[str]:
    slowest = sorted(((*entry, rank.rank) for rank in ranks for entry in rank.slowest), reverse=True)[:MOST_SLOW]
    if not slowest:
        return
    yield "<h2>Slowest microbatches, and their samples</h2>"
    lines = [
        (
            f"{took:.3f} s" + ("" if made else " waiting"),
            f"{step:,}",
            str(rank),
            " ".join(f"<code>{_text(key)}</code>" for key in keys) or "–",
        )
        for took, made, step, _, keys, rank in slowest
    ]
    yield _table(("time to make it", "step", "rank", "samples"), lines, numbers=(0, 1, 2))
    yield '<p class="quiet">The first microbatch of a process also opens the data.</p>'


def _chart(curve: Curve, name: str, *, percent: bool) -> str:
    points = curve.points
    if not points:
        return '<p class="quiet">Not recorded.</p>'
    low, high = (0.0, 1.0) if percent else (min(p[3] for p in points), max(p[4] for p in points))
    span = (high - low) or 1.0
    first, last = points[0][0], points[-1][0]

    def place(step: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 12) * ((step - first) / (last - first) if last > first else 0.5)
        return f"{x:.1f},{12 + (_HEIGHT - _BOTTOM - 12) * (high - value) / span:.1f}"

    line = " ".join(place(p[0], p[2] / p[1]) for p in points)
    band = " ".join([*(place(p[0], p[4]) for p in points), *(place(p[0], p[3]) for p in reversed(points))])
    marks = []
    for part in (0.0, 0.5, 1.0):
        value = low + part * span
        y = 12 + (_HEIGHT - _BOTTOM - 12) * (1 - part)
        text = f"{100 * value:.0f} %" if percent else f"{value:.4g}"
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{text}</text>')
    marks.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {int(first):,}</text>')
    marks.append(f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 6}" text-anchor="end">step {int(last):,}</text>')
    drawn = f'<polygon class="band" points="{band}"/><polyline class="curve" points="{line}"/>'
    if len(points) == 1:
        across, down = line.split(",")
        drawn = f'<circle class="delivered" r="3" cx="{across}" cy="{down}"/>'
    label = f"{name}, steps {int(first)} to {int(last)}"
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(marks)}{drawn}</svg>'


def _bars(planned: float, delivered: float) -> str:
    bars = f'<rect class="planned" height="7" width="{1.4 * planned:.1f}"/>'
    bars += f'<rect class="delivered" y="9" height="7" width="{1.4 * delivered:.1f}"/>'
    return f'<svg viewBox="0 0 140 16" style="width:140px;border:0" aria-hidden="true">{bars}</svg>'


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    kinds = ["n" if number in numbers else "t" for number in range(len(columns))]
    head = "".join(f'<th class="{kind}">{name}</th>' for kind, name in zip(kinds, columns, strict=True))
    rows = (
        "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, line, strict=True)) for line in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _facts(facts: Mapping[str, object]) -> str:
    pairs = (f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{''.join(pairs)}</dl>"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600} h {whole // 60 % 60} min" if whole >= 3600 else f"{whole // 60} min {whole % 60} s"


def _text(value: object) -> str:
    """Return a text as HTML: no markup of its own, and no direction marks that would turn what follows around."""
    return html.escape(str(value)).translate(_SHOWN)


_CONTROLS = [*range(9), 11, 12, *range(14, 32), 127, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}")

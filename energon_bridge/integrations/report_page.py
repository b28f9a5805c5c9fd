"""The report of a run: one HTML page that opens from a folder, with no script and nothing from elsewhere.

Names and keys from the data occur as text only.
"""

from __future__ import annotations

import html
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from energon_bridge.integrations.report import MOST_SLOW, Curve, RankSummary, RunRecorder
from energon_bridge.loader.metrics import dataset_names

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
.share { fill: none; stroke-width: 1.4; } .plan { stroke-dasharray: 4 4; opacity: .6; }
.grid { stroke: var(--line); } .planned { fill: var(--soft); } .delivered { fill: var(--accent); }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1000, 220, 64, 24
_LINES = ("#2b5fb8", "#cc7733", "#2e8b57", "#b03a6f", "#8a7a1f", "#5d6bd6", "#7a7f87", "#1f8a99")
_MOST_LINES = len(_LINES)
_MOST_INTERVALS = 40


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
        # No script may run and nothing may be fetched, whatever a key contains.
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
    yield from _balance_section(ranks, recorder)
    yield from _mix_section(ranks)
    yield from _left_out_section(ranks)
    yield from _time_section(ranks)
    yield from _slow_section(ranks)


def _head(ranks: Sequence[RankSummary], recorder: RunRecorder) -> dict[str, object]:
    facts: dict[str, object] = {}
    if recorder.loss.points:
        step, count, total, *_ = recorder.loss.points[-1]
        facts |= {"steps": f"{int(step):,}", "loss at the end": f"{total / count:.4f}"}
    facts |= {"data-parallel ranks": ranks[0].ranks if ranks else 1}
    samples = sum(row.counts["samples"] for rank in ranks for row in rank.datasets)
    draws = sum(row.draws for rank in ranks for row in rank.datasets)
    size = sum(row.epoch_samples for row in ranks[0].datasets) if ranks else 0
    if samples:
        facts["samples delivered"] = f"{samples:,}"
    if draws and size:
        facts["epochs"] = f"{draws / size:.2f}"
    if recorder.seconds > 0:
        facts |= {
            "time spent training": _duration(recorder.seconds),
            "waiting for data": f"{100 * recorder.waited / recorder.seconds:.1f} %",
        }
    return facts | {"written": time.strftime("%Y-%m-%d %H:%M:%S %z")}


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
    yield _shares_chart(ranks, names)


def _balance_section(ranks: Sequence[RankSummary], recorder: RunRecorder) -> Iterator[str]:
    """Yield how uneven the work of the ranks was as it came, and as it was divided."""
    curves = recorder.balance
    if not curves:
        return
    yield "<h2>Balance of the ranks</h2>"
    for name, what in (
        ("step", "largest cost of a rank in a step over the mean of the ranks"),
        ("round", "sum of the largest costs of the rounds of microbatches over the mean cost of a rank"),
    ):
        before, after = curves[f"{name}_before"], curves[name]
        points = [*before.points, *after.points]
        high = max(1.01, *(point[4] for point in points))
        first, last = min(point[0] for point in points), max(point[0] for point in points)
        lines = [
            f'<polyline class="share{kind}" style="stroke:{_LINES[0]}" points="'
            + " ".join(_place(p[0], (p[2] / p[1] - 1) / (high - 1), first, last) for p in curve.points)
            + '"/>'
            for curve, kind in ((before, " plan"), (after, ""))
        ]
        marks = _grid(1.0, high, first, last, percent=False)
        label = f"{what}, steps {int(first)} to {int(last)}"
        yield f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{marks}{"".join(lines)}</svg>'
        yield (
            f'<p class="quiet">{what[0].upper()}{what[1:]}: {before.mean:.3f} as it came (dashed), {after.mean:.3f} '
            "balanced; means of the steps.</p>"
        )
    costs = [(rank.rank, rank.cost) for rank in ranks if rank.cost is not None]
    mean = sum(cost for _, cost in costs) / len(costs) if costs else 0.0
    if mean:
        rows = [(str(rank), f"{cost:,.4g}", f"{cost / mean:.3f}") for rank, cost in costs]
        yield _table(("rank", "mean cost of a step", "over the mean of the ranks"), rows, numbers=range(3))


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
        metrics = rank.metrics
        waited = f"{100 * rank.waited / rank.seconds:.1f} %" if rank.seconds > 0 else "–"
        spent = [f"{metrics[stage]:,.1f} s" if stage in metrics else "–" for stage in stages]
        lines.append((str(rank.rank), waited, *spent, f"{metrics.get('worker_restarts', 0):.0f}"))
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
        return _place(step, (value - low) / span, first, last)

    line = " ".join(place(p[0], p[2] / p[1]) for p in points)
    band = " ".join([*(place(p[0], p[4]) for p in points), *(place(p[0], p[3]) for p in reversed(points))])
    marks = _grid(low, low + span, first, last, percent=percent)
    drawn = f'<polygon class="band" points="{band}"/><polyline class="curve" points="{line}"/>'
    if len(points) == 1:
        across, down = line.split(",")
        drawn = f'<circle class="delivered" r="3" cx="{across}" cy="{down}"/>'
    label = f"{name}, steps {int(first)} to {int(last)}"
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{marks}{drawn}</svg>'


def _shares_chart(ranks: Sequence[RankSummary], names: Sequence[str]) -> str:
    """Return the share of each of the largest datasets in the draws between two looks, and what the mix planned."""
    together: dict[int, Counter[str]] = {}
    seen = Counter(step for rank in ranks for step, _ in rank.draws)
    for rank in ranks:
        for step, draws in rank.draws:
            if seen[step] == len(ranks):
                together.setdefault(step, Counter()).update(draws)
    looks = sorted(together.items())
    stride = max(1, len(looks) // _MOST_INTERVALS)  # shorter ones show chance, not the mix
    looks = looks[(len(looks) - 1) % stride :: stride]
    if len(looks) < 3 or len(names) < 2:
        return ""
    first, last = looks[0][0], looks[-1][0]
    shown = sorted(range(len(names)), key=lambda place: -looks[-1][1][ranks[0].datasets[place].identity])[:_MOST_LINES]
    lines, legend = [], []
    for color, place in zip(_LINES, sorted(shown), strict=False):
        row = ranks[0].datasets[place]
        points = []
        for (_, before), (step, after) in pairwise(looks):
            total = after.total() - before.total()
            if total > 0:
                points.append((step, (after[row.identity] - before[row.identity]) / total))
        placed = " ".join(_place(step, share, first, last) for step, share in points)
        lines.append(f'<polyline class="share" style="stroke:{color}" points="{placed}"/>')
        if row.planned is not None:
            ends = " ".join(_place(step, row.planned / 100, first, last) for step in (first, last))
            lines.append(f'<polyline class="share plan" style="stroke:{color}" points="{ends}"/>')
        legend.append(f'<span style="color:{color}">&#9632;</span> {_text(names[place])}')
    marks = _grid(0.0, 1.0, first, last, percent=True)
    label = f"share of the draws, steps {first} to {last}"
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{marks}{"".join(lines)}</svg>'
        f'<p class="quiet">Drawn over the run (dashed: planned): {", ".join(legend)}</p>'
    )


def _place(step: float, value: float, first: float, last: float) -> str:
    """Return the position of a step's value in a chart from 0 to 1."""
    x = _LEFT + (_WIDTH - _LEFT - 12) * ((step - first) / (last - first) if last > first else 0.5)
    return f"{x:.1f},{12 + (_HEIGHT - _BOTTOM - 12) * (1 - value):.1f}"


def _grid(low: float, high: float, first: float, last: float, *, percent: bool) -> str:
    marks = []
    for part in (0.0, 0.5, 1.0):
        value = low + part * (high - low)
        y = 12 + (_HEIGHT - _BOTTOM - 12) * (1 - part)
        text = f"{100 * value:.0f} %" if percent else f"{value:.4g}"
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{text}</text>')
    marks.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {int(first):,}</text>')
    marks.append(f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 6}" text-anchor="end">step {int(last):,}</text>')
    return "".join(marks)


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

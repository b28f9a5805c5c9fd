"""The report of a run, for the pages of `preview`: facts, tables and charts of plain values."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from energon_bridge.core.errors import EnergonError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.run_data import dataset_names
from energon_bridge.core.storage import cannot_write
from energon_bridge.tools.preview.pages import PageBlock, write_pages, write_run
from energon_bridge.tools.preview.sample_source import DrawnSample, SampleSource
from energon_bridge.tools.report.recorder import MOST_SLOW, USUAL, Curve, DatasetRow, HighLoss, RankSummary, RunRecorder

logger = logging.getLogger(__name__)

_MOST_LINES = 8
"""Datasets in the chart of draws."""
_MOST_INTERVALS = 40
"""Points of a line of it."""


def write_report(
    path: str | os.PathLike[str],
    ranks: Sequence[RankSummary],
    recorder: RunRecorder,
    *,
    title: str = "Training run",
    facts: Mapping[str, object] | None = None,
    spec: DatasetSpec | None = None,
) -> None:
    """Write the report of a run; the file appears as a whole or not at all, which is logged as an error.

    Pages of the samples with the highest losses come into a folder beside it, named after it (`report-samples`).

    Args:
        path: The HTML file.
        ranks: From `gathered`.
        recorder: Of the rank that writes.
        title: Of the page.
        facts: More to say at its head, by name.
        spec: The data of the run, which is read for the pages; None: there are none.
    """
    recorder.flush()
    path = Path(path)
    losses = [_curve(recorder.loss, "loss")]
    if recorder.not_finite:
        losses.append(f"NaN or infinite, and not shown above: the loss in {recorder.not_finite:,} steps.")
    sections: dict[str, list[PageBlock]] = {
        "Loss": losses,
        "Validation": [_curve(recorder.validation, "loss of validations")] if recorder.validation.points else [],
        "Learning rate": [_curve(recorder.rate, "learning rate")] if recorder.rate.points else [],
        "Waiting for data": [_curve(recorder.waiting, "share of each step spent waiting for data", percent=True)],
        "Balance of the ranks": _balance(ranks, recorder),
        "Datasets: shares in the mix, and delivered": _mix(ranks),
        "Left out, by reason": _left_out(ranks),
        "Loading, by rank": _loading(ranks),
        "Slowest microbatches, and their samples": _slowest(ranks),
        "Highest losses, and their samples": _highest(ranks, path.with_name(f"{path.stem}-samples"), spec),
    }
    try:
        write_run(path, title, _head(ranks, recorder) | dict(facts or {}), sections)
    except OSError as error:
        logger.error("the run has ended, but its report is missing: %s", cannot_write(path, error))


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
        facts["epochs drawn"] = f"{draws / size:.2f}"
    if recorder.seconds > 0:
        facts |= {
            "time spent training": _duration(recorder.seconds),
            "waiting for data": f"{100 * recorder.waited / recorder.seconds:.1f} %",
        }
    return facts | {"written": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _mix(ranks: Sequence[RankSummary]) -> list[PageBlock]:
    if not ranks or not ranks[0].datasets:
        return []
    first = ranks[0].datasets
    names = dataset_names([row.path for row in first], [row.split_part for row in first])
    names = [name + " (left the mix, or changed)" * row.is_gone for name, row in zip(names, first, strict=True)]
    together = [[rank.datasets[number] for rank in ranks] for number in range(len(first))]
    draws = [sum(row.draws for row in rows) for rows in together]
    largest = sorted(range(len(first)), key=lambda number: -draws[number])[:_MOST_LINES]
    hues = {number: hue for hue, number in enumerate(sorted(largest))}
    total = sum(row.counts["samples"] for rows in together for row in rows) or 1
    lines = [
        _mix_line(name, rows, total, hues.get(number))
        for number, (name, rows) in enumerate(zip(names, together, strict=True))
    ]
    columns = ("dataset", "in the mix now", "delivered", "", "samples", "epochs drawn", "skipped", "failed", "excluded")
    said = (
        "In the mix now: by the weights since the last change of the mix, or, if they moved, what was drawn by them. "
        f"Delivered: in all steps.{_joined(ranks[0], names)}"
    )
    return [_table(columns, lines, right=(1, 2, 4, 5, 6, 7, 8)), said, *_shares(ranks, names, hues)]


def _later(rank: RankSummary) -> dict[int, int]:
    """Return the datasets that joined later, by number, each with the first step at which it was seen."""
    begins = [_begin(row, rank.draws) for row in rank.datasets]
    first = min(begins, default=0)
    return {number: begin for number, begin in enumerate(begins) if begin > first}


def _joined(rank: RankSummary, names: Sequence[str]) -> str:
    """Return a sentence on the datasets that joined later, each with the first step at which it was seen; or ""."""
    later = [f"{names[number]} (at step {begin:,})" for number, begin in _later(rank).items()]
    return f" Joined the mix, whose shares are others since: {', '.join(later)}." if later else ""


def _begin(row: DatasetRow, looks: Sequence[tuple[int, Mapping[str, int]]]) -> int:
    """Return the step of the first look at the draws at which a dataset was in the mix; 0 without looks."""
    return next((step for step, draws in looks if row.identity in draws), looks[0][0] if looks else 0)


def _mix_line(name: str, rows: Sequence[Any], total: int, hue: int | None) -> list[Any]:
    """Return the line of a dataset, of its rows on all ranks; `total` are the samples of all datasets."""
    planned = None if any(row.planned is None for row in rows) else rows[0].planned
    counts = {column: sum(row.counts[column] for row in rows) for column in rows[0].counts}
    draws = sum(row.draws for row in rows)
    share = counts["samples"] / total
    square = {} if hue is None else {"hue": hue}
    return [
        {"text": name, "title": rows[0].path} | square,
        "–" if planned is None else f"{planned:.1f} %",
        f"{100 * share:.1f} %",
        {"shares": [[(planned or 0.0) / 100, "plan"], [share, hue or 0]]},
        f"{counts['samples']:,}",
        f"{draws / rows[0].num_samples:.2f}" if draws else "–",
        *(f"{counts[column]:,}" for column in ("skipped", "errors", "excluded")),
    ]


def _shares(ranks: Sequence[RankSummary], names: Sequence[str], hues: Mapping[int, int]) -> list[PageBlock]:
    """Return a chart of the share of some datasets in the draws over the run, and what the mix planned for them.

    `hues` has the colour of each dataset to show, by its number.
    """
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
        return []
    intervals = [
        (step, before, after) for (_, before), (step, after) in pairwise(looks) if after.total() > before.total()
    ]
    lines = []
    for number, hue in hues.items():
        row = ranks[0].datasets[number]
        points = [
            (step, max(0, after[row.identity] - before[row.identity]) / (after.total() - before.total()))
            for step, before, after in intervals
        ]
        lines.append(_line(points, names[number], hue))
        if row.planned is not None:
            ends = [(step, row.planned / 100) for step in (_begin(row, looks), looks[-1][0])]
            lines.append(_line(ends, f"{names[number]}, in the mix now", hue, dashed=True))
    return [
        _chart("share of the draws", lines, 0.0, 1.0, percent=True),
        "Drawn over the run (dashed: in the mix now), in the colours of the table.",
    ]


def _balance(ranks: Sequence[RankSummary], recorder: RunRecorder) -> list[PageBlock]:
    """Return how uneven the work of the ranks was as it came, and as it was divided."""
    blocks: list[PageBlock] = []
    for name, what in (
        ("step", "largest cost of a rank in a step over the mean of the ranks"),
        ("round", "sum of the largest costs of the rounds of microbatches over the mean cost of a rank"),
    ):
        if name not in recorder.balance:
            return []
        before = recorder.balance[f"{name}_before"]
        after = recorder.balance[name]
        high = max(1.01, *(point[4] for curve in (before, after) for point in curve.points))
        lines = [_line(_means(before), "as it came", 0, dashed=True), _line(_means(after), "balanced", 0)]
        blocks += [
            _chart(what, lines, 1.0, high),
            f"{what[0].upper()}{what[1:]}: {before.mean:.3f} as it came (dashed), {after.mean:.3f} balanced; means of "
            "the steps.",
        ]
    costs = [(rank.rank, rank.cost) for rank in ranks if rank.cost is not None]
    mean = sum(cost for _, cost in costs) / len(costs) if costs else 0.0
    if mean:
        rows = [(str(rank), f"{cost:,.4g}", f"{cost / mean:.3f}") for rank, cost in costs]
        blocks.append(_table(("rank", "mean cost of a step", "over the mean of the ranks"), rows, right=range(3)))
    return blocks


def _left_out(ranks: Sequence[RankSummary]) -> list[PageBlock]:
    times: Counter[tuple[str, str]] = Counter()
    different: Counter[tuple[str, str]] = Counter()
    named: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for rank in ranks:
        for dataset, hook, error, number, samples in rank.failures:
            reason = dataset, f"failed in {hook}: {error}"
            known = named.setdefault(reason, set())  # several ranks meet a sample, in other epochs
            different[reason] += number - len(samples & known)
            known |= samples
        for row in rank.datasets:
            counts = row.counts
            of_counters = {
                "failed": counts["errors"],
                "skipped by a hook (SkipSample)": counts["skipped"] - counts["dropped"],
                "too long: dropped": counts["dropped"],
                "too long: truncated": counts["truncated"],
                "too long: split": counts["split"],
                "listed in exclude": counts["excluded"],
                "withdrawn by ban": counts["banned"],
            }
            for text, number in of_counters.items():
                if number:
                    times[row.path, text] += number
    reasons = sorted(times.keys() | different.keys())
    if not reasons:
        return ["Nothing."]
    lines = [(*reason, *(f"{of[reason]:,}" if of[reason] else "–" for of in (times, different))) for reason in reasons]
    said = "Times: in all epochs. Different samples: since this process began." if different else ""
    return [_table(("dataset", "reason", "times", "different samples"), lines, right=(2, 3)), *filter(None, [said])]


def _loading(ranks: Sequence[RankSummary]) -> list[PageBlock]:
    if not any(rank.metrics for rank in ranks):
        return []
    stages = ("load_seconds", "encode_seconds", "batch_seconds")
    lines = []
    for rank in ranks:
        metrics = rank.metrics
        waited = f"{100 * rank.waited / rank.seconds:.1f} %" if rank.seconds > 0 else "–"
        spent = [f"{metrics[stage]:,.1f} s" if stage in metrics else "–" for stage in stages]
        lines.append((str(rank.rank), waited, *spent, f"{metrics.get('worker_restarts', 0):.0f}"))
    columns = ("rank", "waiting", "reading and decoding", "hooks", "batching", "workers lost")
    said = "Times of all worker processes of a rank together, since this process began."
    return [_table(columns, lines, right=range(6)), said]


def _unique(entries: Iterable[Any]) -> list[Any]:
    """Return the largest of the entries of all ranks; what was restored on each of them comes once."""
    largest: list[Any] = []
    for entry in sorted(entries, reverse=True):
        if entry not in largest[-1:]:
            largest.append(entry)
    return largest[:MOST_SLOW]


def _highest(ranks: Sequence[RankSummary], folder: Path, spec: DatasetSpec | None) -> list[PageBlock]:
    highest = sorted(_unique(entry for rank in ranks for entry in rank.highest), key=itemgetter(1), reverse=True)
    if not highest:
        return []
    highest, again = _once(highest)
    pages, said = _pages_of(highest, folder, spec)
    withdrawn = frozenset[tuple[str, int]]().union(*(rank.withdrawn for rank in ranks))
    folder_url = quote(folder.name)
    lines = []
    for entry, steps, numbers in zip(highest, again, pages, strict=True):
        above, loss, _, _, keys, rank, samples = entry
        links = [(f"page {number + 1}", f"{folder_url}/index.html#/sample/{number}") for number in numbers]
        gone = sum(one[:2] in withdrawn for one in samples)
        mark = [f"withdrawn by ban: {gone} of {len(samples)}" if len(samples) > 1 else "withdrawn by ban"]
        cell = {"keys": [*keys, *(mark if gone else [])], "links": links}
        lines.append((f"{loss:.4f}", ", ".join(f"{step:,}" for step in steps), str(rank), f"{above:+.4f}", cell))
    table = _table(("loss", "step", "rank", "above usual", "samples"), lines, right=(0, 1, 2, 3))
    return [
        table,
        "The samples or packs (microbatches, where only the losses of these are known) whose losses lie furthest above "
        f"the usual one, the median of the {USUAL} microbatches before them. {said}"
        "Pages of what a step saw: energon preview RUN_FOLDER --step STEP-1 --html look, for --step counts the steps "
        "before it; of a sample: energon preview DATASET --key KEY --html look.",
    ]


def _once(highest: Sequence[HighLoss]) -> tuple[list[HighLoss], list[list[int]]]:
    """Return the first entry of each microbatch, which comes again with the same samples in later epochs; its steps."""
    first: list[HighLoss] = []
    steps: dict[object, list[int]] = {}
    for entry in highest:
        _, _, step, number, _, rank, samples = entry
        seen = steps.setdefault(tuple(sorted(one[:2] for one in samples)) or (step, number, rank), [])
        if not seen:
            first.append(entry)
        seen.append(step)
    return first, list(steps.values())


def _pages_of(highest: Sequence[HighLoss], folder: Path, spec: DatasetSpec | None) -> tuple[list[list[int]], str]:
    """Write pages of the samples of microbatches, and return their numbers for each of these, and what to say of them.

    The data may be out of reach by now, which must not fail a run that is over.
    """
    none: list[list[int]] = [[] for _ in highest]
    pages: list[list[int]] = [[] for _ in highest]
    identities = {leaf.identity for leaf in spec.leaves} if spec is not None else set()
    drawn: list[DrawnSample] = []
    for (_, _, step, _, _, rank, samples), numbers in zip(highest, pages, strict=True):
        for identity, index, epoch, _ in samples:
            if identity in identities:
                numbers.append(len(drawn))
                drawn.append(DrawnSample(key=(identity, index, epoch, 0), facts={"step": step, "rank": rank}))
    if spec is None or not drawn:
        return none, ""
    try:
        source = SampleSource(spec)
        first = next(source.records(drawn[:1], lambda record: record))
        if first.error:
            return none, f"Their samples cannot be read any more, so there are no pages of them: {first.error}. "
        write_pages(folder, source, drawn, title="Samples of the highest losses")
    except Exception as error:
        logger.warning("no pages of the samples with the highest losses", exc_info=not isinstance(error, EnergonError))
        return none, f"There are no pages of their samples: {type(error).__name__}: {error}. "
    gone = "Samples of a dataset that is gone from the mix, or has changed since, have none. " * (not all(pages))
    return pages, f"The pages lie in {folder.name}, beside this file. {gone}"


def _slowest(ranks: Sequence[RankSummary]) -> list[PageBlock]:
    slowest = _unique((*entry, rank.rank)[:6] for rank in ranks for entry in rank.slowest)
    if not slowest:
        return []
    lines = [
        (f"{took:.3f} s{'' if made else ' waiting'}", f"{step:,}", str(rank), {"keys": keys} if keys else "–")
        for took, made, step, _, keys, rank in slowest
    ]
    table = _table(("time to make it", "step", "rank", "samples"), lines, right=(0, 1, 2))
    return [table, "The first microbatch of a process also opens the data."]


def _curve(curve: Curve, what: str, *, percent: bool = False) -> PageBlock:
    points = curve.points
    if not points:
        return "Not recorded."
    low, high = (0.0, 1.0) if percent else (min(p[3] for p in points), max(p[4] for p in points))
    band = [(p[0], p[3], p[4]) for p in points]
    return _chart(what, [_line(_means(curve), what, 0)], low, high, percent=percent, band=band)


def _means(curve: Curve) -> list[tuple[float, float]]:
    return [(point[0], point[2] / point[1]) for point in curve.points]


def _line(points: Sequence[tuple[float, float]], name: str, hue: int, *, dashed: bool = False) -> dict[str, Any]:
    return {"name": name, "hue": hue, "dashed": dashed, "points": points}


def _chart(what: str, lines: Sequence[dict[str, Any]], low: float, high: float, **more: Any) -> PageBlock:
    steps = [int(step) for line in lines for step, _ in line["points"]]
    return {"chart": f"{what}, steps {min(steps)} to {max(steps)}", "low": low, "high": high, "lines": lines} | more


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Iterable[int]) -> PageBlock:
    return {"columns": columns, "right": [*right], "rows": rows}


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600} h {whole // 60 % 60} min" if whole >= 3600 else f"{whole // 60} min {whole % 60} s"

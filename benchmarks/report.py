"""Turns measurements into markdown tables. A figure is the median of its repetitions, with minimum and maximum."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]
OURS = "ours"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], digits: int = 0) -> str:
    middle, low, high = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def ratio(ours: float | None, theirs: float) -> str:
    return "" if ours is None else f"{ours / theirs:.2f}x"


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[key] for key in keys)].append(record)
    return dict(groups)


def values(records: Iterable[Record], name: str) -> list[float]:
    return [record[name] for record in records]


def of_ours(groups: dict[tuple[Any, ...], list[Record]], name: str, *key: Any) -> float | None:
    records = groups.get((*key, OURS))
    return median(values(records, name)) if records else None


def throughput_table(records: Iterable[Record]) -> str:
    groups = grouped(records, "kind", "mode", "workers", "system")
    rows = []
    for (kind, mode, workers, system), found in groups.items():
        speed, cpu = values(found, "samples_per_s"), values(found, "cpu_us_per_sample")
        our_speed = of_ours(groups, "samples_per_s", kind, mode, workers)
        our_cpu = of_ours(groups, "cpu_us_per_sample", kind, mode, workers)
        rows.append(
            [
                *(kind, mode, str(workers), system, spread(speed), ratio(our_speed, median(speed))),
                *(spread(cpu, 1), "" if our_cpu is None else ratio(median(cpu), our_cpu)),
                spread([1e3 * value for value in values(found, "first_batch_s")]),
            ]
        )
    header = [
        "data",
        "mode",
        "workers",
        "system",
        "samples/s",
        "ours / it",
        "CPU us/sample",
        "it / ours",
        "first batch ms",
    ]
    return table(header, sorted(rows))


def best_table(records: Iterable[Record]) -> str:
    """Compare the systems, each at the number of workers that suits it best."""
    best: dict[tuple[str, str, str], tuple[float, int]] = {}
    for (kind, mode, system, workers), found in grouped(records, "kind", "mode", "system", "workers").items():
        speed = median(values(found, "samples_per_s"))
        best[kind, mode, system] = max(best.get((kind, mode, system), (0.0, 0)), (speed, workers))
    rows = []
    for (kind, mode, system), (speed, workers) in sorted(best.items()):
        ours = best.get((kind, mode, OURS), (None, 0))[0]
        rows.append([kind, mode, system, str(workers), f"{speed:,.0f}", ratio(ours, speed)])
    return table(["data", "mode", "system", "best with workers", "samples/s", "ours / it"], rows)


def checkpoint_table(records: Iterable[Record]) -> str:
    groups = grouped(records, "kind", "mode", "workers", "system")
    rows = [
        [
            *(kind, mode, str(workers), system),
            spread(values(found, "save_ms"), 2),
            spread(values(found, "state_bytes")),
            spread([1e3 * value for value in values(found, "first_batch_s")]),
            spread([1e3 * value for value in values(found, "restore_to_first_batch_s")]),
            "yes" if all(values(found, "exact")) else "NO",
        ]
        for (kind, mode, workers, system), found in groups.items()
    ]
    header = [
        "data",
        "mode",
        "workers",
        "system",
        "save ms",
        "state bytes",
        "first batch ms",
        "restore to first batch ms",
        "exact",
    ]
    return table(header, sorted(rows))


def prepare_table(records: Iterable[Record]) -> str:
    groups = grouped(records, "kind", "samples", "system")
    rows = []
    for (kind, samples, system), found in groups.items():
        row = [kind, f"{samples:,}", system]
        for name in ("seconds", "cpu_s"):
            ours, own = of_ours(groups, name, kind, samples), values(found, name)
            row += [spread(own, 2), "" if ours is None else ratio(median(own), ours)]
        rows.append(row)
    return table(["data", "samples", "system", "seconds", "it / ours", "CPU seconds", "it / ours"], sorted(rows))


def mixes_table(records: Iterable[Record]) -> str:
    """Compare starts; memory is what a mix takes more than that of one dataset at the same number of workers."""
    groups = grouped(records, "datasets", "workers", "start", "system")
    rows = []
    for (datasets, workers, start, system), found in sorted(groups.items()):
        one = groups[1, workers, start, system]
        seconds = values(found, "first_batch_s")
        ours = of_ours(groups, "first_batch_s", datasets, workers, start)
        growth = [
            (median(values(found, name)) - median(values(one, name))) / 1024
            for name in ("memory_at_first_kib", "memory_kib")
        ]
        rows.append(
            [
                *(str(datasets), str(workers), start, system, spread([1e3 * value for value in seconds])),
                "" if ours is None else ratio(median(seconds), ours),
                *(f"{value:+.1f}" for value in growth),
                f"{max(values(found, 'open_files'))}",
                f"{median(values(found, 'state_bytes')):,.0f}",
            ]
        )
    header = [
        *("datasets", "workers", "start", "system", "first batch ms", "it / ours"),
        *("MiB at first batch", "MiB later", "open files", "state bytes"),
    ]
    return table(header, rows)


def video_table(records: Iterable[Record]) -> str:
    groups = grouped(records, "video", "system")
    rows = []
    for (video, system), found in sorted(groups.items()):
        row = [video, system]
        for name in ("uniform_frames_per_s", "numbered_frames_per_s"):
            ours = of_ours(groups, name, video)
            row += [spread(values(found, name)), ratio(ours, median(values(found, name)))]
        one = found[0]
        rows.append([*row, f"{100 * one['share_read']:.1f} %", f"{one['exact']} of {one['frames']}"])
    header = ["video", "system", "uniform frames/s", "ours / it", "frames/s by number", "ours / it"]
    return table([*header, "read for uniform frames", "exact by number"], rows)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({processor()}), {memory:.0f} GiB, {system}"


def document(results: dict[str, Any]) -> str:
    """Return the whole report of one run."""
    settings = results["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        f"# Benchmarks, {results['date']}",
        f"`{results['command']}` on {results['machine']}; {versions}. Warm page cache.",
        f"Batch {settings['batch_size']}, shuffle buffer {settings['buffer']}, slices of {settings['slice']}, keys and "
        f"sources on; at least {settings['seconds']:g} s a point in a fresh process, systems interleaved, "
        f"{settings['repetitions']} repetitions: median (minimum-maximum). CPU time is that of all processes. Time to "
        "the first batch excludes imports.",
    ]
    sections = (
        ("Each system at its best number of workers", "throughput", best_table),
        ("Throughput", "throughput", throughput_table),
        ("Save and restore", "checkpoint", checkpoint_table),
        ("`energon prepare`, key index included", "prepare", prepare_table),
        ("Mixes of many small datasets", "mixes", mixes_table),
        ("Frames of videos", "video", video_table),
    )
    for title, name, render in sections:
        if results[name]:
            parts += [f"## {title}", render(results[name])]
    return "\n\n".join(parts) + "\n"

"""`energon quarantine show FILE…`: which samples failed in a run, and where. No dataset is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from energon_bridge.tools.check.quarantine import QuarantinedSample, quarantine_excludes, read_quarantine
from energon_bridge.tools.cli.main import SuggestingGroup
from energon_bridge.tools.cli.output import number, print_json, print_table


@click.group("quarantine", cls=SuggestingGroup)
def command() -> None:
    """Show the samples that failed, from the quarantine files of runs (`ErrorPolicy(quarantine=FILE)`).

    Example:  energon quarantine show bad.jsonl
    """


@command.command("show")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=0), help="Failures to name.")
@click.option("--excludes", is_flag=True, help="Print entries for `exclude` of each dataset's split.yaml instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, all of it.")
def show(files: tuple[str, ...], limit: int, excludes: bool, as_json: bool) -> None:
    """Count failures by dataset, hook and error, and name the samples.

    Each FILE includes those of its ranks. A failure of a pack or microbatch is named by its first sample.

    Example:  energon quarantine show bad.jsonl
    """
    failures = _read(files)
    if excludes:
        print_excludes(quarantine_excludes(failures), as_json=as_json)
        return
    if not failures and not as_json:
        click.echo("No sample failed.")
        return
    kinds = Counter[tuple[str, str, str]]()
    samples = Counter[tuple[str, str, str]]()
    for one in failures:
        kind = one.dataset, one.hook, one.error
        kinds[kind] += 1
        samples[kind] += one.size
    counted = [(*kind, count, samples[kind]) for kind, count in sorted(kinds.items())]
    if as_json:
        names = ("dataset", "hook", "error", "count", "samples")
        print_json(
            {
                "kinds": [dict(zip(names, row, strict=True)) for row in counted],
                "failures": [_plain(one) for one in failures],
            }
        )
        return
    print_table(
        ("dataset", "hook", "error", "failures", "samples"),
        [(*kind, number(count), number(samples)) for *kind, count, samples in counted],
        left=3,
    )
    print_table(
        ("dataset", "shard", "key", "hook", "error", "sample", "with others"),
        [_row(one) for one in failures[:limit]],
        left=5,
    )
    if len(failures) > limit:
        click.echo(f"{len(failures) - limit:,} more: --limit {len(failures)} names them all.")


def _read(files: Iterable[str]) -> list[QuarantinedSample]:
    """Return the failures of several files, without duplicates."""
    failures = {(one.dataset, one.index, one.hook): one for file in files for one in read_quarantine(file)}
    return sorted(failures.values(), key=lambda one: (one.dataset, one.index, one.hook))


def _row(one: QuarantinedSample) -> Sequence[str]:
    others = number(one.size - 1) if one.size > 1 else "-"
    return one.dataset, one.shard, one.key or "-", one.hook, f"{one.error}: {one.message}", str(one.index), others


def _plain(sample: QuarantinedSample) -> dict[str, Any]:
    members = [dict(zip(("dataset", "shard", "index", "key"), member, strict=False)) for member in sample.members]
    return asdict(sample) | {"members": members}


def print_excludes(entries: Mapping[str, Sequence[str]], *, as_json: bool) -> None:
    """Print entries for `exclude` of each dataset's split.yaml."""
    if as_json:
        print_json(entries)
        return
    for dataset, names in entries.items():
        click.echo(f"{dataset}:\n" + "\n".join(f"  - {name}" for name in names))

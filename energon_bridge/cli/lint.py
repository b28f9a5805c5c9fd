"""`energon lint PATH`: reads and decodes every sample; exit code 1 if one does not load."""

from __future__ import annotations

import sys

import click

from energon_bridge.cli.engines import engine_options, workers_of
from energon_bridge.cli.output import count_of
from energon_bridge.cli.progress import shard_progress
from energon_bridge.prepare.lint import Problem, lint_dataset, lint_parts

_MAX_SHOWN = 100


@click.command("lint")
@click.argument("path", type=click.Path())
@click.option("--split-parts", default=None, help="Parts to check, separated by commas. Default: all.")
@click.option("--dataset-config", default="dataset.yaml", show_default=True, help="Dataset file in .nv-meta.")
@click.option("--split-config", default="split.yaml", show_default=True, help="Split file in .nv-meta.")
@click.option("--parallel", default=1, show_default=True, type=click.IntRange(min=1), help="Number of processes.")
@engine_options
@click.option("--trust-remote-code", is_flag=True, help="Run the sample_loader that comes with the dataset.")
@click.option("--progress/--no-progress", default=True, help="Show a progress bar.")
def command(
    path: str,
    split_parts: str | None,
    dataset_config: str,
    split_config: str,
    parallel: int,
    engine: str,
    address: str | None,
    trust_remote_code: bool,
    progress: bool,
) -> None:
    """Check the dataset at PATH (a folder, a .jsonl file, or a URL of one) sample by sample.

    Every index is compared with .info.json, every sample is read and decoded as in training; excluded samples are left
    out. Whatever does not load is named with dataset, split part, shard, key and part, and the exit code is 1.

    Example:  energon lint /data/captions --split-parts train,val --parallel 8
    """
    datasets, empty = lint_parts(
        path,
        split_parts=tuple(part.strip() for part in split_parts.split(",")) if split_parts else (),
        split_config=split_config,
        dataset_config=dataset_config,
        trust_remote_code=trust_remote_code,
    )
    for part in empty:
        click.echo(f"The split part {part!r} is empty.")
    workers = workers_of(engine, address, parallel)
    checked = 0
    total = sum(dataset.num_samples - len(dataset.excluded) for dataset in datasets)
    bad: set[tuple[str, str | None, str]] = set()
    shown = 0
    for dataset in datasets:
        with shard_progress(f"Checking {dataset.split_part or path}", enabled=progress) as advance:
            for number, report in enumerate(lint_dataset(dataset, num_workers=workers), start=1):
                checked += report.num_checked
                for problem in report.problems:
                    bad.add(_identity(problem))
                    shown += 1
                    if shown <= _MAX_SHOWN:
                        click.echo(str(problem))
                advance(number, len(dataset.shard_names))
    if shown > _MAX_SHOWN:
        click.echo(f"... and {shown - _MAX_SHOWN} more.")
    if bad:
        where = f" in {count_of(checked, 'sample')}"
        if checked < total:  # shards that cannot be read
            where = f"; {checked:,} of {count_of(total, 'sample')} could be checked"
        click.echo(f"Failed: {count_of(len(bad), 'problem')}{where}.")
        sys.exit(1)
    click.echo("The one sample loads." if checked == 1 else f"All {checked:,} samples load.")


def _identity(problem: Problem) -> tuple[str, str | None, str]:
    """Identify a bad sample, so that one with two broken parts counts once."""
    return problem.shard, problem.key, "" if problem.key is not None else problem.message

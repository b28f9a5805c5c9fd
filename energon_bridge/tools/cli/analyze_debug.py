"""`energon analyze-debug STATE_OR_MIX... --steps N`: what is read when, as a table and a picture."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.tools.cli.output import number, print_json, print_table, width_of_output
from energon_bridge.tools.cli.run_options import mix_option, open_run, run_options


@click.command("analyze-debug")
@click.argument("source", nargs=-1, required=True, metavar="STATE_OR_MIX...|LOGS...", type=click.Path())
@click.option("--step", type=click.IntRange(min=0), default=0, help="The first step.  [default: that of the run]")
@click.option("--steps", type=click.IntRange(min=1), default=1000, show_default=True, help="How many steps.")
@click.option(
    "--out",
    "--heatmap-path",
    type=click.Path(path_type=Path),
    help="Write the picture to this .svg file (with axes) or .png file (its pixels).",
)
@click.option("--loader", type=int, help="Of LOGS: the number of the loader.  [default: the one that delivered most]")
@mix_option
@run_options
def command(
    source: tuple[str, ...], step: int, steps: int, out: Path | None, loader: int | None, as_json: bool, **options: Any
) -> None:
    """Show what is read when: steps from left to right, the samples of all datasets from top to bottom.

    \b
    energon analyze-debug mix.yaml --batch-size 8 --world-size 4 --out reads.svg
    energon analyze-debug loader.pt --step 5000 --steps 200
    energon analyze-debug logs/ --out reads.svg         logs of megatron-energon's workers

    A run is described by a mix with options, or by saved states. Nothing is recorded for it and no data is read: the
    order is computed, as if no sample were skipped. A step is one of the optimizer: with gradient accumulation, give
    --global-batch-size. LOGS are what megatron-energon writes with worker_debug_path; a step of them is one microbatch.
    """
    from energon_bridge.tools.preview.reads import (
        count_reads,
        log_files,
        picture_of,
        reads_of_logs,
        reads_of_run,
        write_picture,
    )

    logs = log_files(source)
    notes: list[str] = []
    if logs:
        reads = reads_of_logs(logs, step, steps, loader)
    else:
        if loader is not None:
            raise ConfigurationError(
                "--loader is for logs of megatron-energon, but the source is something else: leave it out"
            )
        run, notes = open_run(source, options)
        reads = reads_of_run(run, step, steps)
    if out is not None:
        write_picture(out, reads, title=f"What is read when: {' '.join(source)}")
    bands = count_reads(reads)
    if as_json:
        print_json({"step": step, "steps": steps, "datasets": [asdict(facts) for facts in bands]})
        return
    print_table(
        ("dataset", "samples", "reads", "different samples", "reads of one, at most"),
        [(facts.name, *map(number, (facts.num_samples, facts.reads, facts.distinct, facts.most))) for facts in bands],
    )
    if out is None and sys.stdout.isatty():
        from rich.console import Console

        from energon_bridge.tools.preview.terminal import half_blocks

        width = max(8, width_of_output() - 2)
        for line in half_blocks(picture_of(reads, columns=width, rows=48), width):
            Console().print(line)
    for note in notes:
        click.echo(note)
    click.echo(f"Wrote the picture to {out}" if out is not None else "--out FILE.svg writes the picture with its axes.")

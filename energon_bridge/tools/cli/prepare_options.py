"""Options of commands that work on all shards: processes or a cluster, one task of several, which files are media.

And the progress bar of these commands.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.parallel import Task, Workers
from energon_bridge.core.worker_config import available_cores
from energon_bridge.tools.check.engines import RayShardEngine

if TYPE_CHECKING:
    from energon_bridge.tools.check.media import IndexedMedia, MediaFilter

Command = TypeVar("Command", bound=Callable[..., Any])

_SHOWN = 5
"""Files named that could not be read."""


def added(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command, which shows them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


workers_option = click.option(
    "--num-workers",
    default=lambda: min(16, available_cores()),
    show_default="one per core, 16 at most",
    type=click.IntRange(min=1),
    help="Processes.",
)
progress_option = click.option("--progress/--no-progress", default=True, help="Show a progress bar.")
engine_options = added(
    click.option(
        "--engine",
        type=click.Choice(["processes", "ray"]),
        default="processes",
        show_default=True,
        help="Processes of this machine, or tasks of a Ray cluster (extra ray), which sees the same paths.",
    ),
    click.option("--address", default=None, help="Of a Ray cluster: auto, ray://host:10001. [default: RAY_ADDRESS]"),
)
task_options = added(
    click.option("--task", default=None, metavar="NUMBER/COUNT", help="Do one share of the shards: 0/16 to 15/16."),
    click.option("--finish", is_flag=True, help="Make the dataset of what all tasks have done."),
)
config_options = added(
    click.option("--dataset-config", default="dataset.yaml", show_default=True, help="Dataset file in .nv-meta."),
    click.option("--split-config", default="split.yaml", show_default=True, help="Split file in .nv-meta."),
)


def choose_engine(engine: str, address: str | None, num_workers: int) -> Workers:
    """Return the engine that the options choose; raises ConfigurationError."""
    if engine == "ray":
        return RayShardEngine(address)
    if address is not None:
        raise ConfigurationError(f"--address {address} is for a Ray cluster: add --engine ray.")
    return num_workers


def chosen_task(task: str | None, *, finish: bool) -> Task | None:
    """Return the task that the options name, 3/16 the fourth of 16; raises ConfigurationError."""
    if task is None:
        return None
    if finish:
        raise ConfigurationError("--task and --finish exclude each other: run --finish once, after all tasks.")
    match = re.fullmatch(r"(\d+)/(\d+)", task.strip())
    if match is None:
        raise ConfigurationError(
            f"--task {task!r}: expected NUMBER/COUNT, from 0/16 to 15/16; in a SLURM array "
            "--task $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT."
        )
    return Task(int(match[1]), int(match[2]))


# ---------------------------------------------------------------------------------------------------------------------
# Which files are media.


media_options = added(
    click.option(
        "--media-metadata-by-glob",
        default=None,
        metavar="PATTERNS",
        help="Look into the media files whose names match one of these: '*.jpg,*.png'.",
    ),
    click.option(
        "--media-metadata-by-header", is_flag=True, help="Look into the media files that their first bytes tell."
    ),
    click.option(
        "--media-metadata-by-extension", is_flag=True, help="Look into the media files that their extensions tell."
    ),
)


def _use_folder(context: click.Context, _: click.Parameter, folder: str | None) -> None:
    if folder is not None:
        before = tempfile.tempdir
        context.call_on_close(lambda: setattr(tempfile, "tempdir", before))
        tempfile.tempdir = folder


tmp_option = click.option(
    "--tmp-path",
    type=click.Path(exists=True, file_okay=False, writable=True),
    callback=_use_folder,
    expose_value=False,
    help="Folder for temporary files: the index of a dataset behind a URL, what is sorted. [default: the system's]",
)


def media_filter(by_glob: str | None, by_header: bool, by_extension: bool) -> MediaFilter | None:
    """Return the filter that the options choose, None without any."""
    if (by_glob is not None) + by_header + by_extension > 1:
        raise ConfigurationError("the --media-metadata-by-… options exclude each other: use one.")
    from energon_bridge.tools.check.media import MediaFilter

    if by_glob is not None:
        return MediaFilter(strategy="GLOB", patterns=by_glob)
    if by_header:
        return MediaFilter(strategy="HEADER")
    return MediaFilter(strategy="EXTENSION") if by_extension else None


def report_media(indexed: IndexedMedia) -> None:
    """Report how many media files were read, and which could not be."""
    click.echo(f"Done: stored metadata for {indexed.num_files:,} files.")
    if indexed.failed:
        shown = ", ".join(indexed.failed[:_SHOWN]) + (", ..." if len(indexed.failed) > _SHOWN else "")
        click.echo(f"{len(indexed.failed):,} files could not be read: {shown}")


# ---------------------------------------------------------------------------------------------------------------------
# The progress bar, drawn from the main thread only: forking workers is unsafe with more threads.


_INTERVAL = 0.1


@contextmanager
def shard_progress(title: str, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs; yields `advance(done, total)`. Draws nothing without a terminal."""
    if not enabled:
        yield lambda done, total: None
        return
    from rich.console import Console  # takes 60 ms, which a script with --no-progress need not wait for
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        last = 0.0

        def advance(done: int, total: int) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total)
            if done == total or time.monotonic() - last > _INTERVAL:
                last = time.monotonic()
                bar.refresh()

        yield advance

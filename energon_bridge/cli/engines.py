"""The options that choose where shards are processed: here, on a Ray cluster, or by tasks of a scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from energon_bridge.errors import ConfigurationError
from energon_bridge.format.parallel import Workers
from energon_bridge.prepare.engines import RayEngine, Task, parse_task

Command = TypeVar("Command", bound=Callable[..., Any])


def workers_option(command: Command) -> Command:
    """Add the number of processes to a command."""
    return click.option(
        "--num-workers",
        default=min(16, os.cpu_count() or 1),
        show_default="one per core, 16 at most",
        type=click.IntRange(min=1),
        help="Processes.",
    )(command)


def engine_options(command: Command) -> Command:
    """Add the options for a cluster to a command."""
    for option in (
        click.option(
            "--address", default=None, help="Of a Ray cluster: auto, ray://host:10001. [default: RAY_ADDRESS]"
        ),
        click.option(
            "--engine",
            type=click.Choice(["processes", "ray"]),
            default="processes",
            show_default=True,
            help="Processes of this machine, or tasks of a Ray cluster (extra ray), which sees the same paths.",
        ),
    ):
        command = option(command)
    return command


def task_options(command: Command) -> Command:
    """Add the options to share the work out to a command."""
    for option in (
        click.option("--finish", is_flag=True, help="Make the dataset of what all tasks have done."),
        click.option("--task", default=None, metavar="NUMBER/COUNT", help="Do one share of the shards: 0/16 to 15/16."),
    ):
        command = option(command)
    return command


def workers_of(engine: str, address: str | None, num_workers: int) -> Workers:
    """Return the engine that the options choose; raises ConfigurationError."""
    if engine == "ray":
        return RayEngine(address)
    if address is not None:
        raise ConfigurationError(f"--address {address} is for a Ray cluster: add --engine ray.")
    return num_workers


def task_of(task: str | None, *, finish: bool) -> Task | None:
    """Return the task that the options name; raises ConfigurationError."""
    if task is not None and finish:
        raise ConfigurationError("--task and --finish exclude each other: run --finish once, after all tasks.")
    return None if task is None else parse_task(task)

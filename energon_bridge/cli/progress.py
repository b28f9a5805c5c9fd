"""A progress bar over shards, drawn from the main thread only: forking workers is unsafe with more threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

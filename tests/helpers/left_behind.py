"""Processes and shared memory that a test could leave behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def descendants(root: int | None = None) -> dict[int, str]:
    """Return the living processes that this one (or `root`) started, directly or not, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found: dict[int, str] = {}
    waiting = [os.getpid() if root is None else root]
    while waiting:
        parent = waiting.pop()
        for child in [pid for pid, its_parent in parents.items() if its_parent == parent]:
            waiting.append(child)
            try:
                found[child] = (
                    (Path("/proc") / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
    return found


def started(*others: str) -> dict[int, str]:
    """Return our children, without those that have one of `others` in their command lines.

    multiprocessing's own servants, which live as long as the interpreter, are left out always.
    """
    servants = ("resource_tracker", "forkserver", *others)
    return {pid: line for pid, line in descendants().items() if not any(name in line for name in servants)}


def left_processes() -> list[str]:
    return [f"process {pid}: {line}" for pid, line in started().items()]


def workers() -> list[int]:
    """Return our children without the server of the fixture `run_rival`, which other tests have left."""
    return [*started("rival_run")]


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def mapped_by_others() -> str:
    """Return the memory maps of all processes that are not ours, to tell their shared memory from a leak."""
    ours = {os.getpid(), *descendants()}
    maps = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in ours:
            try:
                maps.append((entry / "maps").read_text())
            except OSError:
                continue
    return "".join(maps)


def left_shared_memory(before: set[str]) -> list[str]:
    new = shared_memory() - before
    if not new:
        return []
    others = mapped_by_others()
    return [f"{SHARED_MEMORY}/{name}" for name in sorted(new) if name not in others and name != lock_of_tqdm()]


def lock_of_tqdm() -> str:
    """Return the name of tqdm's lock, which is there until the process ends where processes start by a fork server."""
    lock = getattr(getattr(sys.modules.get("tqdm.std"), "TqdmDefaultWriteLock", None), "mp_lock", None)
    return "" if lock is None else "sem." + str(lock._semlock.name).removeprefix("/")

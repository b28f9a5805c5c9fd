"""What is measured, the same for every system; imports nothing but the standard library.

A system module gives `open_loader(job)` and `touch(batch)` and calls `main`. `touch` looks at the payload, the keys and
the sources of a batch and returns the keys, so that no system gets away with not making them.

CPU time is that of this process, of children it waited for and of living descendants (from /proc: the workers of a data
loader have not been waited for while they run), in ticks of 10 ms.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

SAVES = 20
COMPARED_BATCHES = 3
MEMORY_AFTER = (1 / 6, 1 / 2, 1)
"""Shares of the batches that `memory` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement of one system.

    Attributes:
        task: `throughput`, `save`, `restore`, `start`, `forward` (a state that is made, not reached) or `memory`.
        mode: `raw` (bytes as they are), `uint8` or `float` (decoded CHW images), `packed` (uint8, four in a pack),
            `resized` (uint8, 224 x 224, by the encoder), `scaled` (the same, declared to the decoder before), `cooked`
            (crude samples of several images and texts, as lists of uint8 images and strings).
        part: the part of a sample that carries the payload, `jpg` or `json`.
        state_file: where `save` writes the state and `restore` finds it.
        warmup_batches: taken before the measured ones, however long it takes.
        least_batches: measured at least, however long it takes.
    """

    task: str
    path: str
    mode: str
    part: str
    workers: int
    batch_size: int
    shuffle_buffer_size: int
    slice_size: int | None
    seconds: float
    warmup_seconds: float
    warmup_batches: int = 0
    least_batches: int = 0
    consumed_batches: int = 0
    state_file: str = ""


Touch = Callable[[Any], list[str]]
StateAt = Callable[[Any, int], Any]
"""Gives the state of a loader after so many samples, without taking them."""


def descendants(root: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (pid, fields of /proc/PID/stat from `state` on) of all living descendants of a process."""
    children: dict[int, list[tuple[int, list[str]]]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(fields[1]), []).append((int(entry), fields))
    waiting = [root]
    while waiting:
        for pid, fields in children.get(waiting.pop(), []):
            waiting.append(pid)
            yield pid, fields


def cpu_seconds() -> float:
    """Return the CPU time used so far by this process and everything it started."""
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    ticks = sum(int(value) for _, fields in descendants(os.getpid()) for value in fields[11:15])
    return used + ticks / os.sysconf("SC_CLK_TCK")


def consume(batches: Iterator[Any], touch: Touch, seconds: float, least: int = 0) -> tuple[int, float]:
    """Take batches for at least the given time, and at least so many; return the samples seen and the time it took."""
    samples = taken = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or taken < least:
        samples += len(touch(next(batches)))
        taken += 1
    return samples, elapsed


def throughput(job: Job, open_loader: Callable[[Job], Any], touch: Touch) -> dict[str, Any]:
    start = time.perf_counter()
    loader = open_loader(job)
    batches = iter(loader)
    touch(next(batches))
    first = time.perf_counter() - start
    consume(batches, touch, job.warmup_seconds, job.warmup_batches)
    cpu = cpu_seconds()
    samples, elapsed = consume(batches, touch, job.seconds, job.least_batches)
    cpu = cpu_seconds() - cpu
    return {
        "first_batch_s": first,
        "samples": samples,
        "samples_per_s": samples / elapsed,
        "cpu_us_per_sample": cpu / samples * 1e6,
        "memory_kib": memory_kib(),
    }


def save(job: Job, open_loader: Callable[[Job], Any], touch: Touch) -> dict[str, Any]:
    start = time.perf_counter()
    loader = open_loader(job)
    batches = iter(loader)
    touch(next(batches))
    first = time.perf_counter() - start
    for _ in range(job.consumed_batches - 1):
        touch(next(batches))
    times = []
    state: Any = None
    for _ in range(SAVES):
        start = time.perf_counter()
        state = loader.save_state_rank()
        times.append(time.perf_counter() - start)
    expected = [touch(next(batches)) for _ in range(COMPARED_BATCHES)]
    data = pickle.dumps(state)
    Path(job.state_file).write_bytes(pickle.dumps((data, expected)))
    return {"first_batch_s": first, "save_ms": statistics.median(times) * 1e3, "state_bytes": len(data)}


def restore(job: Job, open_loader: Callable[[Job], Any], touch: Touch) -> dict[str, Any]:
    data, expected = pickle.loads(Path(job.state_file).read_bytes()) if job.state_file else (None, None)
    state = data and pickle.loads(data)
    start, cpu = time.perf_counter(), cpu_seconds()
    loader = open_loader(job)
    if state is not None:
        loader.restore_state_rank(state)
    batches = iter(loader)
    seen = [touch(next(batches))]
    first, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    seen += [touch(next(batches)) for _ in range(COMPARED_BATCHES - 1)]
    return {"restore_to_first_batch_s": first, "cpu_s": cpu, "exact": expected is None or seen == expected}


def forward(job: Job, open_loader: Callable[[Job], Any], touch: Touch, state_at: StateAt) -> dict[str, Any]:
    data = pickle.dumps(state_at(open_loader(job), job.consumed_batches * job.batch_size))
    Path(job.state_file).write_bytes(pickle.dumps((data, None)))
    return {"state_bytes": len(data)}


def memory_kib(kinds: tuple[str, ...] = ("Pss_Anon:", "Pss_Shmem:")) -> int:
    """Return the memory that this process and its workers take beside files: heaps and shared memory, counted once."""
    total = 0
    for pid in (os.getpid(), *(pid for pid, _ in descendants(os.getpid()))):
        for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
            if line.startswith(kinds):
                total += int(line.split()[1])
    return total


def memory(job: Job, open_loader: Callable[[Job], Any], touch: Touch) -> dict[str, Any]:
    batches = iter(open_loader(job))
    taken, found = 0, []
    for step in (1, *(round(share * job.consumed_batches) for share in MEMORY_AFTER)):
        while taken < step:
            touch(next(batches))
            taken += 1
        found.append(memory_kib(("Pss:",)))
    return {"pss_kib": found}


def open_files() -> int:
    """Return the open files of that process of ours that has most."""
    pids = (os.getpid(), *(pid for pid, _ in descendants(os.getpid())))
    return max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def start(job: Job, open_loader: Callable[[Job], Any], touch: Touch) -> dict[str, Any]:
    begin = time.perf_counter()
    loader = open_loader(job)
    batches = iter(loader)
    touch(next(batches))
    first = time.perf_counter() - begin
    memory_at_first = memory_kib()
    for _ in range(job.consumed_batches - 1):
        touch(next(batches))
    return {
        "first_batch_s": first,
        "memory_at_first_kib": memory_at_first,
        "memory_kib": memory_kib(),
        "open_files": open_files(),
        "state_bytes": len(pickle.dumps(loader.save_state_rank())),
    }


TASKS = {"throughput": throughput, "save": save, "restore": restore, "start": start, "memory": memory}


def main(open_loader: Callable[[Job], Any], touch: Touch, state_at: StateAt | None = None) -> None:
    """Do the job that the command line holds as JSON; the last line printed is the result as JSON."""
    job = Job(**json.loads(sys.argv[1]))
    tasks = TASKS if state_at is None else TASKS | {"forward": partial(forward, state_at=state_at)}
    result = tasks[job.task](job, open_loader, touch)
    print(json.dumps(result), flush=True)

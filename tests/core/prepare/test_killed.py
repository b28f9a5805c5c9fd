"""kill -9 at random moments of `convert`, `prepare` and `columns`, by processes and tasks (`test_engines`: by Ray).

The command is started again until it ends, and all of it is done again until there were enough kills. Each end has the
bytes of a run that was left alone, and nobody who opens the dataset in between gets half of one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from forked import Program
from keyed import ALL_TRAIN, TEXT
from paths import REPOSITORY
from sources import content, llava
from tar_builder import read_all, write_texts

from energon_bridge.core.errors import DatasetNotFoundError, NotPreparedError
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.prepare import prepare_dataset
from energon_bridge.core.storage import open_store
from energon_bridge.tools.columns.stored import column_of, read_columns

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
KILLS = 50 if LONG else 2
SEED = os.environ.get("ENERGON_TEST_SEED", "0")
TASKS = 3
SCRIPT = (
    "import sys; from energon_bridge.tools.cli.main import main; print('go', flush=True); "
    "sys.stdout = sys.stderr; main()"
)

# Ray's own processes get files that it never closes.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO name='/dev/null'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A command on fresh data: `line` without the engine, `task_line` for tasks; `clear` undoes what it has done."""

    root: Path
    line: list[str]
    task_line: list[str]
    clear: Callable[[], object]
    look: Callable[[], int | None]
    """Read what a reader would read: the samples, or None if nothing is there yet."""

    def result(self) -> dict[str, bytes]:
        return {name: data for name, data in content(self.root).items() if name != ".nv-meta/index.uuid"}


def samples_of(root: Path) -> int | None:
    try:
        dataset = open_dataset(root, split_part="train")
    except (NotPreparedError, DatasetNotFoundError):
        return None
    return len(read_all(dataset))


def values_of(root: Path) -> int | None:
    columns = read_columns(open_store(root))
    return len(column_of(open_dataset(root, split_part="train"), "hash", columns)) if columns else None


def convert_work(folder: Path) -> Work:
    source, media, _ = llava(folder / "in", 400)
    root = folder / "out"
    line = ["convert", str(source), str(root), *map(str, media), "--samples-per-shard", "8", "--shuffle", "1"]
    line += ["--split-ratio", "1,0,0", "--no-ask"]
    return Work(root=root, line=line, task_line=line, clear=lambda: shutil.rmtree(root), look=lambda: samples_of(root))


def texts(root: Path) -> Path:
    return write_texts(root, {f"{'ab'[n % 2]}/s_{n:03d}.tar": [f"{n}-{k}" for k in range(20)] for n in range(100)})


def prepare_work(folder: Path) -> Work:
    root = texts(folder / "data")
    for tar in root.rglob("*.tar"):
        os.utime(tar, (1, 1))  # tars.json has the times

    def clear() -> None:
        shutil.rmtree(root / ".nv-meta")
        for index in root.rglob("*.idx"):
            index.unlink()

    flags = ["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    line = ["prepare", str(root), "--non-interactive", "--force-overwrite"]
    return Work(root=root, line=[*line, *flags], task_line=line, clear=clear, look=lambda: samples_of(root))


def columns_work(folder: Path) -> Work:
    root = texts(folder / "data")
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=TEXT, key_index=False)
    (root / ".nv-meta/tars.json").unlink()  # it has the times of the tars
    line = ["columns", "add", str(root), "--hash"]
    return Work(
        root=root,
        line=line,
        task_line=line,
        clear=lambda: shutil.rmtree(root / ".nv-meta/columns"),
        look=lambda: values_of(root),
    )


WORK = {"convert": convert_work, "prepare": prepare_work, "columns": columns_work}


def stages_of(work: Work, engine: str, address: str) -> list[list[list[str]]]:
    """Return the command lines, stage by stage; those of a stage run at the same time."""
    if engine == "tasks":
        shares = [[*work.task_line, "--task", f"{number}/{TASKS}", "--num-workers", "1"] for number in range(TASKS)]
        return [shares, [[*work.line, "--finish"]]]
    if engine == "ray":
        return [[[*work.line, "--engine", "ray", "--address", address]]]
    return [[[*work.line, "--num-workers", "2"]]]


def start(line: list[str], errors: IO[str]) -> Program:
    arguments = [SCRIPT, *line, "--no-progress"]
    if "ray" in line:  # it wants an interpreter of its own
        arguments = ["import os, sys; os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])", *arguments]
    return Program(["-c", *arguments], REPOSITORY, {"PYTHONPATH": f"{REPOSITORY}"}, errors.fileno())


def descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def ray_workers() -> list[int]:
    """Return the workers of the cluster of this process, without its agents, with which a node ends."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"ray::_call", b"ray::IDLE")):
                found.append(pid)
    return found


def kill(process: Program, rng: random.Random) -> None:
    """Kill the process, or one of those that work for it, or all that it started at once."""
    workers = [*descendants(process.pid), *ray_workers()]
    choice = rng.random()
    with suppress(ProcessLookupError):
        if choice < 0.6 or not workers:
            process.kill()
        elif choice < 0.8:
            os.kill(rng.choice(workers), signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)


def run(
    lines: list[list[str]], after: float | None, rng: random.Random, look: Callable[[], Any], after_a_kill: bool = False
) -> tuple[list[list[str]], bool]:
    """Run lines at the same time, and kill one of them after some seconds.

    Returns those that have to run again, and whether one was killed before it ended.
    """
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in lines]
        running = [start(line, file) for line, file in zip(lines, errors, strict=True)]
        for process in running:
            assert process.output.readline() == "go\n"
        moment, killed = None if after is None else time.monotonic() + after, False
        while alive := [process for process in running if process.alive]:
            if moment is not None and time.monotonic() >= moment:
                kill(rng.choice(alive), rng)
                moment, killed = None, True
            look()
            time.sleep(0.01)
        again = []
        for line, process, file in zip(lines, running, errors, strict=True):
            code = process.wait()
            file.seek(0)
            said = file.read()
            by_us = code == -signal.SIGKILL or "a worker process was killed" in said
            # The workers of a command that was killed before hold its lock until the kernel has ended them, too.
            held = after_a_kill and "is running on this dataset" in said
            assert code == 0 or held or (by_us and killed), said
            if code:
                again.append(line)
    return again, killed


@pytest.mark.parametrize("engine", ["processes", "tasks"])
@pytest.mark.parametrize("command", WORK)
def test_killed_at_random_moments(command: str, engine: str, tmp_path: Path) -> None:
    check_kills(command, engine, tmp_path, KILLS)


def check_kills(command: str, engine: str, tmp_path: Path, kills: int, address: str = "") -> None:
    """Kill a command until there were enough kills, and look at what it leaves and makes."""
    seed = random.randrange(1 << 30) if SEED == "random" else int(SEED)
    print(f"ENERGON_TEST_SEED={seed}")  # noqa: T201
    rng = random.Random(f"{seed} {command} {engine}")
    work = WORK[command](tmp_path)
    stages = stages_of(work, engine, address)
    durations = []
    for lines in stages:
        began = time.monotonic()
        assert run(lines, None, rng, lambda: None) == ([], False)
        durations.append(time.monotonic() - began)
    expected, complete = work.result(), work.look()
    assert complete
    seen: set[int | None] = set()

    def look() -> None:
        seen.add(work.look())

    killed, ends = 0, 0
    while killed < kills:
        work.clear()
        for lines, seconds in zip(stages, durations, strict=True):
            left = lines
            while left:
                after = rng.uniform(0, seconds) if killed < kills else None
                left, was_killed = run(left, after, rng, look, after_a_kill=killed > 0)
                killed += was_killed
        assert work.result() == expected
        ends += 1
    assert seen <= {None, complete}
    print(f"{killed} kills, {ends} ends")  # noqa: T201

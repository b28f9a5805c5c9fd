"""Starts what is measured: each measurement in a fresh process, `energon prepare` on a fresh copy of the tars."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.data import Kind
from benchmarks.systems.measure import Job

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system under test: its interpreter, its runner, and the module of its command line if it can prepare."""

    name: str
    python: str
    runner: str
    cli: str | None = None


def systems(own_python: str, rival_python: str) -> dict[str, System]:
    return {
        system.name: system
        for system in (
            System(
                name="ours", python=own_python, runner="benchmarks.systems.ours", cli="energon_bridge.tools.cli.main"
            ),
            System(
                name="energon",
                python=rival_python,
                runner="benchmarks.systems.energon",
                cli="megatron.energon.cli.main",
            ),
            System(name="webdataset", python=rival_python, runner="benchmarks.systems.webdataset_"),
            System(name="simplejpeg", python=own_python, runner="benchmarks.systems.simplejpeg_"),
        )
    }


class BenchmarkError(RuntimeError):
    """A process that was to be measured failed; holds what it wrote."""


def call(command: Sequence[str]) -> str:
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise BenchmarkError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout


def measure(system: System, job: Job) -> dict[str, Any]:
    """Run one job in a fresh process; return what it measured."""
    output = call([system.python, "-m", system.runner, json.dumps(asdict(job))])
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def prepare_command(system: System, folder: Path, kind: Kind, workers: int) -> list[str]:
    return [
        *(system.python, "-c", f"from {system.cli} import main; main()"),
        *("prepare", str(folder), "--non-interactive", "--no-progress", "--force-overwrite"),
        *("--num-workers", str(workers), "--split-ratio", "1,0,0"),
        *("--sample-type", kind.sample_type),
        *(() if kind.field_map is None else ("--field-map", json.dumps(kind.field_map))),
    ]


def ensure_prepared(system: System, folder: Path, kind: Kind) -> None:
    if not (folder / ".nv-meta" / "dataset.yaml").exists():
        call(prepare_command(system, folder, kind, os.cpu_count() or 1))


def count_keys(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        (count,) = database.execute("SELECT COUNT(*) FROM samples").fetchone()
    return int(count)


def time_prepare(
    system: System, tars: Path, kind: Kind, samples: int, workers: int, *, key_index: bool = True
) -> tuple[float, float, str]:
    """Return the seconds and CPU seconds of the command, with the interpreter's start, and a hash of what it wrote:
    of the `.tar.idx` files and split.yaml.
    """
    folder = tars.with_name(f"{tars.name}-{system.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        for tar in tars.glob("*.tar"):
            os.link(tar, folder / tar.name)
        start, before = time.perf_counter(), os.times()
        call([*prepare_command(system, folder, kind, workers), *(() if key_index else ("--no-key-index",))])
        seconds, after = time.perf_counter() - start, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        keys = count_keys(folder / ".nv-meta" / "index.sqlite") if key_index else samples
        if keys != samples:
            raise BenchmarkError(f"{system.name} wrote a key index with {keys:,} keys for {samples:,} samples")
        digest = hashlib.sha256()
        for path in (*sorted(folder.glob("*.idx")), folder / ".nv-meta" / "split.yaml"):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    finally:
        shutil.rmtree(folder)
    return seconds, cpu, digest.hexdigest()

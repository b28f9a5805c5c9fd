"""Prepare simulated datasets of many samples: time, memory, a run that is killed, and a shard that is added.

    python -m benchmarks.scale /tmp/scale --samples 1000000 --shards 100
    python -m benchmarks.scale /tmp/scale --samples 10000000 --shards 1000 --no-key-index

The tars hold headers only: a sample is one member `KEY.txt` without content, 512 bytes. `energon prepare` reads and
writes what it would for a real dataset of as many members, without the bytes that it steps over. The folder is removed
at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import numpy as np

_COMMAND = "from energon_bridge.cli.main import main; main()"
_PAUSE_SECONDS = 0.05


def write_shard(path: Path, first: int, count: int) -> None:
    """Write a tar of samples without content, numbered from `first` on; the key is the number, in twelve digits."""
    header = bytearray(512)
    header[:16] = b"000000000000.txt"
    header[100:136] = b"0000644\x000000000\x000000000\x0000000000000\x00"
    header[136:148] = b"00000000000\0"
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    blocks = np.tile(np.frombuffer(bytes(header), np.uint8), (count, 1))
    numbers = np.arange(first, first + count, dtype=np.int64)
    for place in range(12):
        blocks[:, place] = 48 + numbers // 10 ** (11 - place) % 10
    sums = blocks.sum(axis=1, dtype=np.int64) + 8 * 32
    for place in range(6):
        blocks[:, 148 + place] = 48 + sums // 8 ** (5 - place) % 8
    blocks[:, 154], blocks[:, 155] = 0, 32
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(blocks.tobytes())
        file.write(bytes(1024))


def prepare(root: Path, *flags: str, workers: int, kill_at: int | None = None) -> dict[str, Any]:
    """Run `energon prepare` and return its seconds and the most memory of all its processes together, in MiB.

    With `kill_at` it is killed once so many tars have been looked into.
    """
    line = [sys.executable, "-c", _COMMAND, "prepare", str(root), "--no-progress", "--non-interactive"]
    line += ["--split-ratio", "98,1,1", "--force-overwrite", "--skip-dataset-yaml", "--num-workers", str(workers)]
    start = time.perf_counter()
    most = 0.0
    with subprocess.Popen([*line, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            if kill_at is not None and sum(1 for _ in (root / ".nv-meta.scans").rglob("*.rec")) >= kill_at:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(_PAUSE_SECONDS)
    if kill_at is None and process.returncode:
        raise click.ClickException(f"energon prepare ended with {process.returncode}")
    return {"seconds": round(time.perf_counter() - start, 2), "mib": round(most), "killed": process.returncode < 0}


def digest(root: Path) -> str:
    """Return a hash of all that was written but what differs from run to run; of the key index, of its rows."""
    value = hashlib.sha256()
    for path in sorted(root.rglob("*.idx")):
        value.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    for name in ("split.yaml", ".info.json"):
        value.update((root / ".nv-meta" / name).read_bytes())
    index = root / ".nv-meta/index.sqlite"
    if index.exists():
        with closing(sqlite3.connect(index)) as connection:
            for table, order in (
                ("samples", "tar_file_id, sample_index"),
                ("sample_parts", "tar_file_id, sample_index"),
            ):
                for row in connection.execute(f"SELECT * FROM {table} ORDER BY {order}"):
                    value.update(repr(row).encode())
    return value.hexdigest()


def _memory(pid: int) -> float:
    """Return the memory of a process and its children in MiB; what they share counts once."""
    total = 0
    for one in (pid, *_children(pid)):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--samples", default=1_000_000, show_default=True, help="In all shards together.")
@click.option("--shards", default=100, show_default=True)
@click.option("--workers", default=2, show_default=True, help="Processes of `energon prepare`.")
@click.option("--no-key-index", is_flag=True, help="Prepare without index.sqlite.")
def main(folder: Path, samples: int, shards: int, workers: int, no_key_index: bool) -> None:
    """Measure `energon prepare` on a simulated dataset in FOLDER, which must not exist; prints JSON."""
    if folder.exists():
        raise click.ClickException(f"{folder} exists already.")
    count, flags = samples // shards, ("--no-key-index",) if no_key_index else ()
    try:
        for number in range(shards):
            write_shard(folder / f"{number // 1000:03d}/{number:05d}.tar", number * count, count)
        os.sync()
        found: dict[str, Any] = {"samples": count * shards, "shards": shards, "workers": workers, "flags": flags}
        found["whole"] = prepare(folder, *flags, workers=workers)
        expected = digest(folder)
        for path in (folder / ".nv-meta", *folder.rglob("*.idx")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        found["killed"] = prepare(folder, *flags, workers=workers, kill_at=shards // 2)
        found["started_again"] = prepare(folder, *flags, workers=workers)
        found["the_same"] = digest(folder) == expected
        write_shard(folder / "999/99999.tar", shards * count, count)
        found["one_shard_more"] = prepare(folder, *flags, workers=workers)
        click.echo(json.dumps(found, indent=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

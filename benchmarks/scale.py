"""Prepare simulated datasets of many samples: time, memory, a run that is killed, and a shard that is added.

    python -m benchmarks.scale /tmp/scale --samples 1000000 --shards 100
    python -m benchmarks.scale /tmp/scale --samples 10000000 --shards 1000 --no-key-index
    python -m benchmarks.scale /tmp/scale --samples 100000000 --shards 10000 --sparse

The tars hold headers only: a sample is one member `KEY.txt` without content, 512 bytes. `energon prepare` reads and
writes what it would for a real dataset of as many members, without the bytes that it steps over. With --sparse the
tars are files without blocks on disk, and the headers are made when they are read: 10^8 of them would take 51 GB. The
folder is removed at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

_COMMAND = "from energon_bridge.tools.cli.main import main; main()"
_SPARSE = "from benchmarks.scale import read_sparse; read_sparse({per_shard}); " + _COMMAND
_PAUSE_SECONDS = 0.05
_END = 1024  # bytes that end a tar


def headers(first: int, count: int) -> bytes:
    """Return the tar headers of samples without content; the key is the number, from `first` on, in twelve digits."""
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
    return blocks.tobytes()


def write_shard(path: Path, first: int, count: int, *, sparse: bool) -> None:
    """Write a tar of `count` samples, or with `sparse` an empty file of its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        if not sparse:
            file.write(headers(first, count))
        file.truncate(512 * count + _END)


def read_sparse(per_shard: int) -> None:
    """Let reads of the tars of this process and its children return what `write_shard` would have written."""
    from energon_bridge.core.storage import LocalStore

    read_file = LocalStore.read_range

    def read_range(self: LocalStore, rel: str, offset: int, length: int) -> bytes:
        if not rel.endswith(".tar"):
            return read_file(self, rel, offset, length)
        number = int(rel[-9:-4])
        first, last = offset // 512, min(-(-(offset + length) // 512), per_shard)
        made = headers(number * per_shard + first, last - first) if last > first else b""
        return (made + bytes(_END))[offset % 512 :][:length] if made else bytes(length)

    LocalStore.read_range = read_range  # type: ignore[method-assign]


def prepare(command: str, root: Path, *flags: str, workers: int, kill_at: int | None = None) -> dict[str, Any]:
    """Run `energon prepare`; return seconds, CPU seconds, and the most memory of all its processes together, in MiB.

    With `kill_at` it and its workers are killed once so many tars have been looked into.
    """
    line = [sys.executable, "-c", command, "prepare", str(root), "--no-progress", "--non-interactive"]
    line += ["--split-ratio", "98,1,1", "--force-overwrite", "--skip-dataset-yaml", "--num-workers", str(workers)]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    most = 0.0
    with subprocess.Popen(
        [*line, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
    ) as process:
        while process.poll() is None:
            looked = time.perf_counter()
            most = max(most, _memory(process.pid))
            if kill_at is not None and sum(1 for _ in (root / ".nv-meta.scans").rglob("*.rec")) >= kill_at:
                os.killpg(process.pid, signal.SIGKILL)
                break
            # Looking costs 1 % at most, or more where it must not come too late.
            pause = max(_PAUSE_SECONDS, (100 if kill_at is None else 5) * (time.perf_counter() - looked))
            time.sleep(pause)
    if kill_at is not None and process.returncode != -signal.SIGKILL:
        raise click.ClickException("energon prepare ended before it could be killed")
    if kill_at is None and process.returncode:
        raise click.ClickException(f"energon prepare ended with {process.returncode}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 2),
        "mib": round(most),
        "killed": process.returncode < 0,
    }


def digest(root: Path) -> str:
    """Return a hash of all that was written but what differs from run to run."""
    value = hashlib.sha256()
    meta = (root / ".nv-meta" / name for name in ("split.yaml", ".info.json", "index.sqlite"))
    for path in (*sorted(root.rglob("*.idx")), *meta):
        if path.exists():
            value.update(f"{path.relative_to(root)}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    value.update(block)
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
@click.option("--sparse", is_flag=True, help="Tars without blocks on disk, whose headers are made when they are read.")
def main(folder: Path, samples: int, shards: int, workers: int, no_key_index: bool, sparse: bool) -> None:
    """Measure `energon prepare` on a simulated dataset in FOLDER, which must not exist; prints lines of JSON."""
    if folder.exists():
        raise click.ClickException(f"{folder} exists already.")
    count, flags = samples // shards, ("--no-key-index",) if no_key_index else ()
    command = _SPARSE.format(per_shard=count) if sparse else _COMMAND

    def run(name: str, kill_at: int | None = None) -> None:
        result = prepare(command, folder, *flags, workers=workers, kill_at=kill_at)
        click.echo(json.dumps({"run": name, **result}))

    try:
        for number in range(shards):
            write_shard(folder / f"{number // 1000:03d}/{number:05d}.tar", number * count, count, sparse=sparse)
        os.sync()
        click.echo(json.dumps({"samples": count * shards, "shards": shards, "workers": workers, "flags": flags}))
        run("whole")
        expected = digest(folder)
        for path in (folder / ".nv-meta", *folder.rglob("*.idx")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        run("killed", kill_at=shards // 2)
        run("started again")
        click.echo(json.dumps({"the same": digest(folder) == expected}))
        write_shard(folder / f"999/{shards:05d}.tar", shards * count, count, sparse=sparse)
        run("one shard more")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

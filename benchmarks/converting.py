"""Converting images and captions, beside `cp` of the same files and beside the writers of other packages.

    python -m benchmarks.converting /tmp/converting --images 10000 --rounds 5
    python -m benchmarks.converting /tmp/converting --rival PYTHON --datasets PYTHON --cold

The source is a folder of pairs: JPEGs of about 100 KB, each with a caption in a text file. Each round runs all systems
in another order, each into a new folder on the same disk, and ends when the disk has what was written (`sync`). The
folders are removed at the end only: for half a minute after files were deleted, ext4 takes up to ten times as long to
create others, which `cp` does most. With --cold, the files of the source are dropped from the page cache before each
run. `webdataset` is its `ShardWriter`, and then `prepare` of megatron-energon; `datasets` writes with `save_to_disk`.
Both need an interpreter of their own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import click
import numpy as np

from benchmarks.data import SEED, jpeg

_SIZE = (730, 548)  # about 100 KB
_DIFFERENT = 200

_WEBDATASET = """
import sys
from pathlib import Path
import webdataset
source, out, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with webdataset.ShardWriter(out + "/%05d.tar", maxcount=count, verbose=0) as writer:
    for path in sorted(source.glob("*.jpg")):
        caption = path.with_suffix(".txt").read_text()
        writer.write({"__key__": path.stem, "jpg": path.read_bytes(), "txt": caption})
"""
_DATASETS = """
import sys
from pathlib import Path
import datasets
datasets.disable_progress_bars()
source, out, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
paths = sorted(source.glob("*.jpg"))
captions = [path.with_suffix(".txt").read_text() for path in paths]
made = datasets.Dataset.from_dict({"image": [str(path) for path in paths], "caption": captions})
made.cast_column("image", datasets.Image()).save_to_disk(out, num_proc=workers)
"""
_PREPARE = "from megatron.energon.cli.main import main; main()"
_CONVERT = "from energon_bridge.tools.cli.main import main; main()"


def write_source(folder: Path, images: int) -> int:
    """Write JPEGs and captions; return their bytes."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(SEED)
    pictures = [jpeg(generator, _SIZE) for _ in range(min(images, _DIFFERENT))]
    total = 0
    for number in range(images):
        picture, caption = pictures[number % len(pictures)], f"picture {number}"
        (folder / f"{number:06d}.jpg").write_bytes(picture)
        (folder / f"{number:06d}.txt").write_text(caption)
        total += len(picture) + len(caption)
    return total


def drop_from_cache(folder: Path) -> None:
    """Drop the files below a folder from the page cache."""
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def commands(
    source: Path, out: Path, *, workers: int, per_shard: int, rival: str, datasets: str
) -> dict[str, list[list[str]]]:
    """Return the commands of each system, run one after the other."""
    shards = ["--num-workers", str(workers)]
    convert = [sys.executable, "-c", _CONVERT, "convert", str(source), str(out / "ours"), "--no-ask", "--no-progress"]
    found = {
        "cp": [["cp", "-r", str(source), str(out / "cp")]],
        "energon convert": [[*convert, *shards, "--samples-per-shard", str(per_shard)]],
    }
    if rival:
        theirs = str(out / "webdataset")
        prepare = [rival, "-c", _PREPARE, "prepare", theirs, "--non-interactive", "--no-progress", *shards]
        prepare += ["--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"]
        prepare += ["--field-map", json.dumps({"image": "jpg", "caption": "txt"})]
        writer = [rival, "-c", _WEBDATASET, str(source), theirs, str(per_shard)]
        found["webdataset, prepare"] = [["mkdir", theirs], writer, prepare]
    if datasets:
        found["datasets"] = [[datasets, "-c", _DATASETS, str(source), str(out / "datasets"), str(workers)]]
    return found


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--images", default=10_000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--per-shard", default=1000, show_default=True, help="Samples of a shard.")
@click.option("--cold", is_flag=True, help="Drop the source from the page cache before each run.")
@click.option("--rival", default="", metavar="PYTHON", help="An interpreter with megatron-energon and webdataset.")
@click.option("--datasets", default="", metavar="PYTHON", help="An interpreter with datasets and Pillow.")
def main(
    folder: Path, images: int, rounds: int, workers: int, per_shard: int, cold: bool, rival: str, datasets: str
) -> None:
    """Measure `energon convert` in FOLDER, which must not exist, and print medians and ratios to `cp`."""
    if folder.exists():
        raise click.ClickException(f"{folder} exists already.")
    source = folder / "source"
    try:
        total = write_source(source, images)
        click.echo(f"{images:,} images, {total / images / 1000:.0f} KB each, {'cold' if cold else 'warm'}")
        seconds: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        chooser = random.Random(SEED)
        for turn in range(rounds):
            out = folder / f"out-{turn}"
            out.mkdir()
            systems = commands(source, out, workers=workers, per_shard=per_shard, rival=rival, datasets=datasets)
            for name in chooser.sample(list(systems), len(systems)):
                if cold:
                    drop_from_cache(source)
                os.sync()
                start, before = time.perf_counter(), os.times()
                for command in systems[name]:
                    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
                written, after = time.perf_counter() - start, os.times()
                cpu = after.children_user + after.children_system - before.children_user - before.children_system
                os.sync()
                seconds[name].append((written, time.perf_counter() - start, cpu))
                click.echo(json.dumps({"system": name, "seconds": seconds[name][-1]}), err=True)
                for one in out.iterdir():
                    drop_from_cache(one)
        for name, found in seconds.items():
            ratios = [[cp[at] / one[at] for cp, one in zip(seconds["cp"], found, strict=True)] for at in (0, 1, 2)]
            spans = [f"{median(one):.2f} ({min(one):.2f}-{max(one):.2f})" for one in ratios]
            rates = [total / 1e6 / median(one[at] for one in found) for at in (0, 1)]
            on_disk = f"until it is on disk {rates[1]:6.0f} MB/s, {spans[1]} of cp"
            cpu_s = median(one[2] for one in found)
            click.echo(f"{name:20} {rates[0]:6.0f} MB/s, {spans[0]} of cp; {on_disk}; {cpu_s:.2f} CPU s, {spans[2]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

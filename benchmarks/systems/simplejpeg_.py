"""The JPEG codec alone, on all cores and with nothing around it: no reading, no order, no batches, no captions.

The mark to measure against: no loader can hand over decoded images faster than this. Every thread decodes its share of
the JPEGs of the first shards, kept in memory, again and again. `decode_jpeg` releases the interpreter lock.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import simplejpeg

from benchmarks.systems.measure import Job, main

IMAGES = 1000
BATCHES_AHEAD = 8


def load(folder: Path, part: str) -> list[bytes]:
    found: list[bytes] = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(f".{part}") and (file := tar.extractfile(member)):
                    found.append(file.read())
        if len(found) >= IMAGES:
            break
    return found


def decode(images: list[bytes]) -> list[str]:
    for image in images:
        simplejpeg.decode_jpeg(image)
    return [""] * len(images)


def open_loader(job: Job) -> Iterator[list[str]]:
    images = cycle(load(Path(job.path), job.part))
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        waiting = [threads.submit(decode, list(islice(images, job.batch_size))) for _ in range(BATCHES_AHEAD)]
        while True:
            waiting.append(threads.submit(decode, list(islice(images, job.batch_size))))
            yield waiting.pop(0).result()


def touch(batch: list[str]) -> list[str]:
    return batch


if __name__ == "__main__":
    main(open_loader, touch)

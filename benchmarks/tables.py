"""Rates of captioned JPEGs read as shards, as parquet and arrow files, and by Hugging Face's streaming loader.

    pip install datasets && python benchmarks/tables.py --samples 4000 --rounds 3
    python benchmarks/tables.py --samples 12000 --size 760 570 --group 1000        groups of 100 MB
    python benchmarks/tables.py --samples 2000 --latency 0.02                      from a bucket server, too (nginx)

All end in batches of 32 decoded uint8 images with captions, with the same number of workers. The systems take turns in
each round; rates compare within one run only. Without `datasets` its row is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import lru_cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # so that it runs by its path

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402

from benchmarks.servers import counts, nginx, proxy  # noqa: E402
from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset  # noqa: E402
from energon_bridge.tools.convert.conversion import convert  # noqa: E402
from energon_bridge.tools.convert.options import ConvertOptions  # noqa: E402
from energon_bridge.tools.convert.sources import open_source  # noqa: E402

_BATCH = 32
_FILES = 8
_DIFFERENT = 1000


@lru_cache(maxsize=_DIFFERENT)
def picture(number: int, size: tuple[int, int]) -> bytes:
    """Return a JPEG that compresses like a photograph: smooth colours with some noise."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = rng.integers(-12, 13, (size[1], size[0], 3), np.int16)
    pixels = np.clip(np.asarray(small, np.int16) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", quality=85)
    return file.getvalue()


def rows(first: int, last: int, size: tuple[int, int]) -> pyarrow.Table:
    images = [{"bytes": picture(number % _DIFFERENT, size), "path": None} for number in range(first, last)]
    return pyarrow.table({"image": images, "caption": [f"a picture with the number {n}" for n in range(first, last)]})


def write(folder: Path, samples: int, group: int, size: tuple[int, int]) -> dict[str, Path]:
    """Write the same rows as parquet, as arrow and as shards."""
    found = {"shards": folder / "shards", "parquet": folder / "parquet", "arrow": folder / "arrow/x.arrow"}
    found["parquet"].mkdir()
    found["arrow"].parent.mkdir()
    each = -(-samples // _FILES)
    schema = rows(0, 1, size).schema
    with pyarrow.OSFile(str(found["arrow"]), "wb") as file, pyarrow.ipc.new_stream(file, schema) as out:
        for number in range(_FILES):  # the streaming loader gives whole files to its workers
            table = rows(number * each, min(samples, (number + 1) * each), size)
            path = found["parquet"] / f"train-{number:05d}-of-{_FILES:05d}.parquet"
            pyarrow.parquet.write_table(table, path, row_group_size=group)
            out.write_table(table, max_chunksize=100)
    source = open_source(found["parquet"])
    convert(source, found["shards"], ConvertOptions(layout=source.propose()))
    return found


def ours(path: Path | list[tuple[str, float]], workers: int) -> Iterator[int]:
    """Yield the samples of each batch."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(path, batch_size=_BATCH, worker_config=config, image_decode="torchrgb8")
    with closing(get_savable_loader(dataset)) as loader:
        for batch in loader:
            yield len(batch.caption)


def hugging_face(path: Path, workers: int) -> Iterator[int]:
    """Yield the samples of each batch of the streaming loader, shuffled as it is by default in its documentation."""
    import datasets  # type: ignore[import-not-found]
    import torch
    from torch.utils.data import DataLoader

    def decoded(rows: list[dict[str, Any]]) -> tuple[Any, list[str]]:
        pixels = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")) for row in rows]
        return torch.from_numpy(np.stack(pixels)), [row["caption"] for row in rows]

    data = datasets.load_dataset(
        "parquet", data_files=[str(file) for file in sorted(path.iterdir())], streaming=True, split="train"
    )
    data = data.shuffle(seed=0, buffer_size=1000)
    while True:
        yield from (len(captions) for _, captions in DataLoader(data, _BATCH, num_workers=workers, collate_fn=decoded))


def rate(batches: Iterator[int], samples: int) -> float:
    """Return samples per second, after some batches."""
    next(islice(batches, 8, None))
    started, seen = time.perf_counter(), 0
    for count in batches:
        seen += count
        if seen >= samples:
            break
    taken = time.perf_counter() - started
    batches.close()  # type: ignore[attr-defined]
    return seen / taken


def main() -> None:
    """Write the data, let the systems take turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--group", type=int, default=100, help="rows of a row group")
    parser.add_argument("--size", type=int, nargs=2, default=(320, 240), help="width and height of the images")
    parser.add_argument("--measured", type=int, help="samples to time; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--latency", type=float, help="seconds of a request to a bucket server, which is read then, too"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        bucket = Path(name) / "bucket"
        bucket.mkdir()
        paths = write(bucket, options.samples, options.group, tuple(options.size))
        systems: dict[str, Callable[[], Iterator[int]]] = {
            f"energon_bridge, {kind}": lambda path=path: ours(path, options.workers)  # type: ignore[misc]
            for kind, path in paths.items()
        }
        url = ""
        if options.latency is not None:
            url = stack.enter_context(proxy(stack.enter_context(nginx(Path(name))), latency=options.latency))
            os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
            os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/nonexistent"}
            for kind, path in paths.items():
                files = sorted(path.iterdir()) if kind == "parquet" else [path]  # nginx has no answer for folders
                far = [(f"s3://{one.relative_to(name)}", 1.0) for one in files]
                systems[f"energon_bridge, {kind}, far"] = lambda far=far: ours(far, options.workers)  # type: ignore[misc]
        if importlib.util.find_spec("datasets"):
            systems["datasets, parquet, streaming"] = lambda: hugging_face(paths["parquet"], options.workers)
        rates: dict[str, list[float]] = {system: [] for system in systems}
        for _ in range(options.rounds):
            for system, start in systems.items():
                asked = counts(url).get("requests", 0) if url else 0
                rates[system].append(rate(start(), options.measured or options.samples))
                if url and system.endswith("far"):
                    print(f"{system}: {counts(url)['requests'] - asked} requests", file=sys.stderr)
        first = median(rates["energon_bridge, shards"])
        for system, found in rates.items():
            print(f"{system:32} {median(found):8.0f} samples/s  {median(found) / first:5.2f} of shards", flush=True)


if __name__ == "__main__":
    main()

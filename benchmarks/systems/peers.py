"""Loaders with formats of their own, each as its documentation shows: `job.mode` is LIBRARY/FORM.

    litdata     its chunks            streaming  MDS shards (mosaicml-streaming)
    grain       ArrayRecord           datasets   Parquet, streamed (Hugging Face)
    lancedb     a Lance table

`ready` writes the samples of tars in the format of a library. FORM is `raw`, `uint8` or `float`, as everywhere; images
are decoded by Pillow, to CHW tensors.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.systems.measure import Job, main
from benchmarks.systems.mosaic_ import _streaming

LIBRARIES = ("litdata", "streaming", "grain", "datasets", "lancedb")
FILES = 16
"""Of Parquet and ArrayRecord: streamed files are shared out among workers."""

Row = dict[str, Any]


def rows(tars: Path) -> Iterator[Row]:
    """Yield the samples of tars: the key, and the bytes of each part but the records beside images."""
    for path in sorted(tars.glob("*.tar")):
        with tarfile.open(path) as tar:
            files: Any = ((member.name, tar.extractfile(member)) for member in tar)
            members = ((*name.split("."), file.read()) for name, file in files)
            for key, parts in itertools.groupby(members, key=lambda one: one[0]):
                found: Row = {part: content for _, part, content in parts}
                if "jpg" in found:
                    del found["json"]
                yield {"key": key, **found}


def ready(library: str, tars: Path) -> Path:
    """Return the folder with the samples of some tars as a library reads them, written now if it is not there."""
    folder = tars.with_name(f"{tars.name}-as-{library}")
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        WRITERS[library](unfinished, rows(tars))
        unfinished.rename(folder)
    return folder


def _write_litdata(folder: Path, found: Iterable[Row]) -> None:
    cache = import_module("litdata.streaming").Cache(str(folder), chunk_bytes="64MB")
    for number, row in enumerate(found):
        cache[number] = row
    cache.done()
    cache.merge()


def _write_streaming(folder: Path, found: Iterable[Row]) -> None:
    found = iter(found)
    first = next(found)
    columns = {name: "str" if name == "key" else "bytes" for name in first}
    with _streaming().MDSWriter(out=str(folder), columns=columns, size_limit=32 << 20) as writer:
        for row in itertools.chain([first], found):
            writer.write(row)


def _write_grain(folder: Path, found: Iterable[Row]) -> None:
    module = import_module("array_record.python.array_record_module")
    writers = [module.ArrayRecordWriter(str(folder / f"{n:02}.array_record"), "group_size:1") for n in range(FILES)]
    for number, row in enumerate(found):
        writers[number % FILES].write(pickle.dumps(row))
    for writer in writers:
        writer.close()


def _write_datasets(folder: Path, found: Iterable[Row]) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    whole = list(found)
    for number in range(FILES):
        table = arrow.Table.from_pylist(whole[number::FILES])
        parquet.write_table(table, folder / f"{number:02}.parquet", row_group_size=1000)


def _write_lancedb(folder: Path, found: Iterable[Row]) -> None:
    table = import_module("pyarrow").Table.from_pylist(list(found))
    import_module("lancedb").connect(str(folder)).create_table("samples", table)


WRITERS: dict[str, Callable[[Path, Iterable[Row]], None]] = {name: globals()[f"_write_{name}"] for name in LIBRARIES}


def collate(form: str, found: list[Row]) -> dict[str, Any]:
    """Return the batch of some samples."""
    batch: dict[str, Any] = {name: [row[name] for row in found] for name in found[0]}
    if "jpg" not in batch:
        batch["json"] = list(map(bytes, batch["json"]))  # litdata gives views of its files
    elif form == "raw":
        batch["jpg"] = list(map(bytes, batch["jpg"]))
    else:
        batch["jpg"] = torch.stack([decoded(data, form) for data in batch["jpg"]])
    return batch


def decoded(data: bytes, form: str) -> torch.Tensor:
    """Return an image (3, height, width): uint8, or floats from 0 to 1."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return pixels.contiguous() if form == "uint8" else pixels.float().div_(255)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def open_loader(job: Job) -> Iterator[Any]:
    """Return the batches of a job, epoch after epoch."""
    library, form = job.mode.split("/")
    joined = partial(collate, form)
    dataset: Any
    options: dict[str, Any] = {"batch_size": job.batch_size, "num_workers": job.workers, "collate_fn": joined}
    if library == "litdata":
        litdata = import_module(library)
        dataset = litdata.StreamingDataset(job.path, shuffle=True, seed=0)
        return endless(litdata.StreamingDataLoader(dataset, **options))
    if library == "grain":
        grain = import_module(library)
        source = grain.sources.ArrayRecordDataSource(sorted(map(str, Path(job.path).glob("*.array_record"))))
        found = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(pickle.loads)
        made = found.batch(job.batch_size, batch_fn=joined).to_iter_dataset()
        if job.workers:
            made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers))
        return iter(made)
    if library == "streaming":
        dataset = _streaming().StreamingDataset(local=job.path, shuffle=True, batch_size=job.batch_size)
    elif library == "datasets":
        files = sorted(map(str, Path(job.path).glob("*.parquet")))
        dataset = import_module(library).load_dataset("parquet", data_files=files, split="train", streaming=True)
        dataset = dataset.shuffle(seed=0, buffer_size=job.shuffle_buffer_size)
    else:
        table = import_module(library).connect(job.path).open_table("samples")
        dataset = import_module("lancedb.permutation").Permutation.identity(table)
        options |= {"shuffle": True, "multiprocessing_context": "spawn" if job.workers else None}  # it has threads
    return endless(torch.utils.data.DataLoader(dataset, persistent_workers=job.workers > 0, **options))


def touch(batch: dict[str, Any]) -> list[str]:
    payload = batch["jpg"] if "jpg" in batch else batch["json"]
    assert len(payload) == len(batch["key"])
    return list(batch["key"])


if __name__ == "__main__":
    if sys.argv[1] == "write":
        print(ready(sys.argv[2], Path(sys.argv[3])))
    else:
        name = json.loads(sys.argv[1])["mode"].split("/")[0]
        _streaming() if name == "streaming" else import_module(name)  # imports are not what is measured
        main(open_loader, touch)

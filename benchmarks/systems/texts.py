"""Texts in the loaders that others resume with, each as its documentation shows: `job.mode` names the library.

Streaming and litdata read shards of their own format, which `ready` writes; torchdata and grain, which have none, a
file of texts of equal length. webdataset saves no state: whoever resumes it counts batches, and skips as many.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.systems.measure import Job, main
from benchmarks.systems.mosaic_ import _streaming

IMPORTED = {"torchdata": "torchdata.stateful_dataloader"}
LENGTH = 400
"""Bytes of a text."""


def texts(tars: Path) -> Iterator[bytes]:
    for path in sorted(tars.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                yield file.read()


def ready(library: str, tars: Path) -> Path:
    """Return the folder in which the texts of some tars lie as a library reads them, written now if it is not there."""
    folder = tars.with_name(f"{tars.name}-for-{library}")
    if library == "webdataset":
        return tars
    if folder.exists():
        return folder
    if library == "litdata":
        cache = import_module("litdata.streaming").Cache(str(folder), chunk_bytes="4MB")
        for number, text in enumerate(texts(tars)):
            cache[number] = text
        cache.done()
        cache.merge()
    elif library == "streaming":
        with _streaming().MDSWriter(out=str(folder), columns={"text": "bytes"}, size_limit=4 << 20) as writer:
            for text in texts(tars):
                writer.write({"text": text})
    else:
        folder.mkdir()
        with (folder / "texts").open("wb") as file:
            file.writelines(texts(tars))
    return folder


class Texts:
    """The texts of a file, by number."""

    def __init__(self, folder: Path) -> None:
        self.path, self.count = folder / "texts", (folder / "texts").stat().st_size // LENGTH

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(int(number) * LENGTH)
            return file.read(LENGTH)


class Loader:
    """Epochs of a loader of torch, one after the other."""

    def __init__(self, loader: Any, samples: int) -> None:
        self.loader, self.samples = loader, samples

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def save_state_rank(self) -> Any:
        return self.loader.state_dict()

    def restore_state_rank(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    def state_at(self, samples: int) -> Any:
        """Return a state after so many samples: that after a batch, with other counters."""
        next(iter(self.loader))
        state = self.save_state_rank()
        epoch, sample = divmod(samples, self.samples)
        if "sample_in_epoch" in state:  # of streaming
            return state | {"epoch": epoch, "sample_in_epoch": sample}
        workers, batch = state["dataset"]["num_workers"], state["dataset"]["batch_size"]  # of litdata
        inner = {"current_epoch": epoch + 1, "num_samples_yielded": sample}
        state["dataset"] |= inner | {"sample_in_epoch": sample}
        return state | inner | {"latest_worker_idx": (sample // batch - 1) % workers}


class Grain:
    """An iterator of grain over endless epochs."""

    def __init__(self, job: Job) -> None:
        grain = import_module("grain")
        found = grain.MapDataset.source(Texts(Path(job.path))).seed(0).shuffle().repeat()
        made = found.batch(job.batch_size, batch_fn=list).to_iter_dataset()
        if job.workers:
            made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers))
        self.batch_size, self.iterator = job.batch_size, iter(made)

    def __iter__(self) -> Iterator[Any]:
        return self.iterator

    def save_state_rank(self) -> Any:
        return self.iterator.get_state()

    def restore_state_rank(self, state: Any) -> None:
        self.iterator.set_state(state)

    def state_at(self, samples: int) -> Any:
        batches, state = samples // self.batch_size, self.save_state_rank()
        if "workers_state" not in state:
            return state | {"next_index": batches}
        workers = len(state["workers_state"])
        for number, name in enumerate(state["workers_state"]):
            state["workers_state"][name]["next_index"] = number + batches // workers * workers
        return state


class Counted:
    """webdataset, and a count of the batches taken."""

    def __init__(self, job: Job) -> None:
        import webdataset

        shards = sorted(str(path) for path in Path(job.path).glob("*.tar"))
        found = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, seed=0)
        found = (
            found.repeat()
            .shuffle(job.shuffle_buffer_size, rng=random.Random(0))
            .to_tuple("json")
            .map(lambda sample: sample[0])
        )
        found = found.batched(job.batch_size, collation_fn=list)
        self.loader, self.taken = webdataset.WebLoader(found, batch_size=None, num_workers=job.workers), 0

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(self.loader, self.taken, None):
            self.taken += 1
            yield batch

    def save_state_rank(self) -> Any:
        return self.taken

    def restore_state_rank(self, state: Any) -> None:
        self.taken = state


def open_loader(job: Job) -> Any:
    """Return the loader of a job."""
    if job.mode == "grain":
        return Grain(job)
    if job.mode == "webdataset":
        return Counted(job)
    options: dict[str, Any] = {"batch_size": job.batch_size, "num_workers": job.workers}
    dataset: Any
    if job.mode == "torchdata":
        dataset, torchdata = Texts(Path(job.path)), import_module(IMPORTED["torchdata"])
        return Loader(torchdata.StatefulDataLoader(dataset, shuffle=True, collate_fn=list, **options), len(dataset))
    if job.mode == "litdata":
        litdata = import_module("litdata")
        dataset = litdata.StreamingDataset(job.path, shuffle=True, seed=0)
        return Loader(litdata.StreamingDataLoader(dataset, collate_fn=list, **options), len(dataset))
    base = _streaming()
    dataset = base.StreamingDataset(local=job.path, shuffle=True, batch_size=job.batch_size)
    return Loader(base.StreamingDataLoader(dataset, collate_fn=list, **options), dataset.num_samples)


def touch(batch: Any) -> list[str]:
    """Return the numbers in the texts of a batch."""
    found = [sample["text"] if isinstance(sample, dict) else sample for sample in batch]
    return [bytes(text[:32]).partition(b",")[0].decode() for text in found]


if __name__ == "__main__":
    name = json.loads(sys.argv[1])["mode"]
    _streaming() if name == "streaming" else import_module(IMPORTED.get(name, name))  # which is not what is measured
    main(open_loader, touch, lambda loader, samples: loader.state_at(samples))

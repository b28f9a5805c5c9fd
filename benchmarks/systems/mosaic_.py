"""mosaicml-streaming: shards of its own format, downloaded as a whole to a local folder and read from there.

`python -m benchmarks.systems.mosaic_ write TARS OUT` writes them from the tars of a dataset. The package is imported
without its `streaming.vision`, which needs torchvision.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.systems.measure import Job, main

_COLUMNS = {"jpg": "bytes", "txt": "str", "key": "str"}
_SHARD_BYTES = 32 << 20


def _streaming() -> Any:
    if "streaming.base" in sys.modules:
        return sys.modules["streaming.base"]
    found = importlib.util.find_spec("streaming")
    assert found is not None
    assert found.submodule_search_locations
    package = ModuleType("streaming")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["streaming"] = package
    return importlib.import_module("streaming.base")


def write(tars: Path, out: Path) -> None:
    """Write the samples of tars as shards of MDS."""
    with _streaming().MDSWriter(out=str(out), columns=_COLUMNS, size_limit=_SHARD_BYTES) as writer:
        for tar in sorted(tars.glob("*.tar")):
            with tarfile.open(tar) as opened:
                parts: dict[str, Any] = {}
                for member in opened:
                    key, _, part = member.name.partition(".")
                    file = opened.extractfile(member)
                    assert file is not None
                    parts |= {part: file.read(), "key": key}
                    if part == "json":  # the last one of a sample
                        writer.write({"jpg": parts["jpg"], "txt": parts["txt"].decode(), "key": key})


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "jpg": torch.stack([sample["jpg"] for sample in samples])
        if isinstance(samples[0]["jpg"], torch.Tensor)
        else [sample["jpg"] for sample in samples],
        "txt": [sample["txt"] for sample in samples],
        "key": [sample["key"] for sample in samples],
    }


def open_loader(job: Job) -> Any:
    """Return the loader of a job, with an empty local folder."""

    class Images(_streaming().StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> dict[str, Any]:
            sample: dict[str, Any] = super().__getitem__(index)
            if job.mode == "uint8":
                with Image.open(io.BytesIO(sample["jpg"])) as image:
                    sample["jpg"] = torch.from_numpy(np.asarray(image.convert("RGB")).transpose(2, 0, 1))
            return sample

    remote = {"remote": job.path} if "://" in job.path else {}
    local = job.path
    if remote:
        local = tempfile.mkdtemp(prefix="energon-mosaic-")
        atexit.register(shutil.rmtree, local, ignore_errors=True)
    dataset = Images(**remote, local=local, shuffle=True, batch_size=job.batch_size)

    def batches() -> Any:
        while True:
            yield from torch.utils.data.DataLoader(
                dataset, batch_size=job.batch_size, num_workers=job.workers, collate_fn=_collate
            )

    return batches()


def touch(batch: dict[str, Any]) -> list[str]:
    assert len(batch["jpg"]) == len(batch["key"])
    return list(batch["key"])


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), Path(sys.argv[3]))
        print(json.dumps({"done": True}))
    else:
        main(open_loader, touch)

"""Run by an interpreter with megatron-energon: reads prepared datasets as that package does and prints JSON.

    python rival_read.py '[{"path": ..., "parts": ["train", ...], "lookup": ["key.part", ...]}, ...]'

For each job: `samples`, per split part a list of {"key", "type", "fields"}, and `lookup`, the bytes that its key index
finds. Nothing is decoded; bytes appear as latin-1 text. A job with `prepare` (flags) is prepared first; what that or
the reading raises is its `error`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from click.testing import CliRunner
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_val_dataset,
    stateless,
)
from megatron.energon.cache.file_store import WebdatasetFileStore
from megatron.energon.cli.main import main
from megatron.energon.epathlib import EPath


def plain(value):
    """Turn the value of a field into something that JSON holds."""
    return bytes(value).decode("latin-1") if isinstance(value, (bytes, memoryview)) else value


@stateless
def cook(sample):
    """Put all parts of a crude sample into the text of a TextSample."""
    parts = {name: plain(value) for name, value in sample.items() if not name.startswith("__")}
    return TextSample(**basic_sample_keys(sample), text=parts)


class RawTaskEncoder(DefaultTaskEncoder):
    """Leaves everything as it is stored."""

    decoder = None
    cookers = [Cooker(cook)]  # noqa: RUF012 - the way that package wants it

    @stateless
    def batch(self, samples):
        return samples


def read(job):
    """Do one job of the list."""
    samples = {}
    for part in job["parts"]:
        dataset = get_val_dataset(
            job["path"],
            split_part=part,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=1,
            task_encoder=RawTaskEncoder(),
        )
        samples[part] = [
            {
                "key": sample.__key__,
                "type": type(sample).__name__,
                "fields": {
                    name: plain(getattr(sample, name))
                    for name in sample.__dataclass_fields__
                    if not name.startswith("__") and getattr(sample, name) is not None
                },
            }
            for batch in get_loader(dataset)
            for sample in batch
        ]
    found = {}
    if job["lookup"]:
        store = WebdatasetFileStore(EPath(job["path"]))
        found = {name: plain(store[name][0]) for name in job["lookup"]}
    return {"samples": samples, "lookup": found}


def prepare_and_read(job):
    """Prepare a dataset and read it."""
    result = CliRunner().invoke(main, ["prepare", job["path"], *job["prepare"]])
    if result.exit_code:
        return {"path": job["path"], "error": repr(result.exception)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return {"path": job["path"], "error": "", **read(job)}
    except Exception as error:
        return {"path": job["path"], "error": repr(error)}


if __name__ == "__main__":
    done = [prepare_and_read(job) if "prepare" in job else read(job) for job in json.loads(sys.argv[1])]
    sys.stdout.write("RESULT " + json.dumps(done) + "\n")

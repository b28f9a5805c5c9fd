"""Programs that end with iterators, batches and files of stores open, in interpreters of their own, say nothing of it.

What finalizers need is gone then in part, in an order that depends on what was imported first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from made import made_once
from paths import REPOSITORY

from energon_bridge.tools.testing import create_captioning_test_dataset

data = made_once(create_captioning_test_dataset, num_train=40, num_val=4)
OPEN = """
import sys, torch, os
from energon_bridge import *
from energon_bridge.tools.preview.sample_source import DrawnSample, SampleSource
path = sys.argv[1]
def config(workers=0, **settings):
    return WorkerConfig(rank=0, world_size=1, num_workers=workers, num_lanes=2, **settings)
def train(workers=0, **settings):
    encoder = DefaultTaskEncoder()
    encoder.decoder = SampleDecoder(image_decode="torchrgb8")
    return get_train_dataset(path, batch_size=2, task_encoder=encoder, worker_config=config(workers), **settings)
loaders = [get_savable_loader(train()), get_savable_loader(train(2)), get_loader(train(virtual_epoch_length=3))]
loaders += [get_loader(get_val_dataset(path, batch_size=2, worker_config=config(decode_threads=3)))]
loaders += [EnergonDataloader(get_savable_loader(train()))]
opened = [iter(loader) for loader in loaders] + [iter(loaders[2])]
batches = [next(one) for one in opened]
"""
STORES = """
store = WebdatasetFileStore(path)
pool = FileStoreCachePool(num_workers=1)
key = batches[3].__key__[0]
held = pool.get_lazy(store, key + ".txt"), pool.to_cache(b"abc", "name"), store[key + ".txt"]
drawn = [DrawnSample(key=one) for one in batches[0].__restore_key__[3]]
shown = SampleSource(train()).records(drawn, lambda record: record)
first = next(shown)
"""
ENDS = {
    "at its last line": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("raise RuntimeError('of the program')", 1, "RuntimeError: of the program"),
    "an interrupt": ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    "a fork that ends too": ("child = os.fork()\nif child: os.waitpid(child, 0)", 0, ""),
    "held by another module": ("import queue\nqueue.held = opened", 0, ""),
}


def ended(code: str, data: Path, *options: str, text: str = "") -> tuple[int, str]:
    """Return exit code and errors of a program."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code, str(data)],
        cwd=REPOSITORY,
        input=text,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return (130 if done.returncode == -2 else done.returncode), done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_without_a_word_of_open_iterators(end: str, data: Path) -> None:
    line, code, error = ENDS[end]
    returned, errors = ended(OPEN + STORES + line, data)
    *traceback, last = errors.splitlines() or [""]
    assert (returned, last) == (code, error), errors
    assert all(one.startswith(("Traceback", "  ")) for one in traceback), errors


def test_a_prompt_ends_without_a_word_of_open_iterators(data: Path) -> None:
    code, errors = ended(OPEN, data, "-i", text="batch = next(opened[0])\n")
    assert (code, errors.replace(">>> ", "").strip()) == (0, "")

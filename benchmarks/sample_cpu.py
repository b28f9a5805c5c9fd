"""What a conversation with an image costs up to Qwen2.5-VL's tensors: `python -m benchmarks.sample_cpu`.

In batches of 8, by a loader in this process: all CPU of a sample of `benchmarks.models` (640 x 480, four turns), in
each type of pixels, and of decoding its JPEG. All take turns; the least of each, in milliseconds and times of it.
`--use 1`: with AVX2 only.
"""

from __future__ import annotations

import argparse
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import Qwen2VLImageProcessorPil

from benchmarks.data import SEED
from benchmarks.models import texts, write
from energon_bridge import (
    Cooker,
    SampleDecoder,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.samples import _pixels
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, qwen_family
from energon_bridge.models.images.pixels import PixelDtype
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.training.presets import QWEN_TOKENS, train_tokenizer

ROUNDS, DIFFERENT = 60, 64


@stateless
def cook(sample: dict[str, Any]) -> ChatSample:
    return ChatSample(**basic_sample_keys(sample), messages=sample["json"]["messages"], images=[sample["jpg"]])


class Encoder(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook),)


def main(*arguments: str) -> None:
    """Print a line for decoding and for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use", type=int, choices=(0, 1, 2), default=2)
    _pixels.use(parser.parse_args(arguments).use)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, 4 * DIFFERENT, DIFFERENT, [])
        yaml = render_dataset_yaml("CrudeWebdataset", None)
        prepare_dataset(folder / "data", split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
        types = {str(dtype): loading(folder, dtype) for dtype in get_args(PixelDtype)}
        least = measured({"decoding": decoding(folder), **types})
    for name, cpu in least.items():
        print(f"{name:9} {cpu:.2f} ms, {cpu / least['decoding']:.2f} times decoding")


def decoding(folder: Path) -> Callable[[], int]:
    with tarfile.open(min((folder / "data").glob("*.tar"))) as tar:
        members = [member for member in tar if member.name.endswith(".jpg")][:DIFFERENT]
        images = [tar.extractfile(member).read() for member in members]  # type: ignore[union-attr]
    decoder = SampleDecoder(image_decode="fastrgb")
    return lambda: len([decoder.decode("jpg", image) for image in images])


def loading(folder: Path, dtype: PixelDtype) -> Callable[[], int]:
    chooser = random.Random(SEED)
    tokenizer = train_tokenizer([texts(chooser, 50) for _ in range(200)], 1000, QWEN_TOKENS)
    config = ChatConfig(seq_length=8192, pixels_dtype=dtype)
    encoder = Encoder(tokenizer, qwen_family("qwen2_5_vl", Qwen2VLImageProcessorPil()), config)
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    batches = iter(
        get_loader(get_train_dataset(folder / "data", batch_size=8, task_encoder=encoder, worker_config=workers))
    )
    return lambda: sum(next(batches).num_images)


def measured(functions: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Return the least milliseconds of all threads for each of what a function makes."""
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.process_time()
            count = function()
            least[name] = min(least[name], 1e3 * (time.process_time() - start) / count)
    return least


if __name__ == "__main__":
    main(*sys.argv[1:])

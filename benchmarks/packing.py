"""How full packs get, what packing costs, and what grouping saves: `python -m benchmarks.packing`, without workers.

A stream of short texts whose sizes are drawn, seeded, from a distribution, with a buffer of 1,000 in each of 24 lanes.
For each distribution, packed by the ready-made `Packer`: the share of the binding limit that packs fill; whether every
sample that was drawn is delivered once or waits; the time in the packer, of a stream that reads and does nothing else,
and of one that tokenises its texts and decodes its images (of 256 x 256; measured apart, by the tokenizer and the codec
alone); the samples encoded between two microbatches of a lane, at the 99th percentile and at most, in means; the
state's bytes for each sample that waits, and the time to save it; the samples that a resumed run encodes for its first
microbatch, and over many stops, in those that a fresh start encodes. Then the padding that `LengthGrouper` leaves, and
that of plain batches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from benchmarks.data import jpeg
from energon_bridge import (
    DefaultTaskEncoder,
    LengthGrouper,
    Packer,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.loader.saved_run import read_lanes
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard
from energon_bridge.training.presets import QWEN_TOKENS, train_tokenizer

SHARDS, SAMPLES_PER_SHARD, LANES, BUFFER, SAVES, ENCODED = 20, 5_000, 24, 1_000, 20, 500
TOKENS, IMAGE_TOKENS, BATCH_SIZE = 4_096, 256, 8
SECONDS = 20.0

Sizes = np.ndarray[Any, np.dtype[np.int64]]
Draw = Callable[[np.random.Generator, int], dict[str, Sizes]]


def uniform(rng: np.random.Generator, count: int) -> dict[str, Sizes]:
    return {"tokens": rng.integers(1, TOKENS + 1, count)}


def log_normal(rng: np.random.Generator, count: int) -> dict[str, Sizes]:
    return {"tokens": rng.lognormal(6.2, 0.9, count).astype(np.int64).clip(1, TOKENS)}


def image_heavy(rng: np.random.Generator, count: int) -> dict[str, Sizes]:
    """One to ten images of 256 tokens each, and some text."""
    images = rng.geometric(0.35, count).clip(1, 10)
    text = rng.lognormal(4.5, 0.8, count).astype(np.int64).clip(1, 1_000)
    return {"tokens": images * IMAGE_TOKENS + text, "images": images}


DISTRIBUTIONS: dict[str, tuple[Draw, dict[str, int]]] = {
    "uniform": (uniform, {"tokens": TOKENS, "samples": 64}),
    "log-normal": (log_normal, {"tokens": TOKENS, "samples": 64}),
    "image-heavy": (image_heavy, {"tokens": TOKENS, "images": 16, "samples": 32}),
}


class Sized(DefaultTaskEncoder):
    """Gives every sample the sizes of its number, and counts what it encodes."""

    def __init__(self, sizes: dict[str, Sizes]) -> None:
        super().__init__()
        self.sizes = sizes
        self._lists = {name: column.tolist() for name, column in sizes.items()}
        self.encoded = 0

    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        self.encoded += 1
        number = int(sample.__key__)
        return {name: column[number] for name, column in self._lists.items()} | {"__key__": sample.__key__}


class Packing(Sized):
    """Packs by the ready-made packer, and measures it."""

    def __init__(self, sizes: dict[str, Sizes], limits: dict[str, int]) -> None:
        super().__init__(sizes)
        self._packer: Packer[Any] = Packer(limits=limits, size_of=lambda sample: sample)
        self.seconds = 0.0

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        start = time.perf_counter()
        packs = self._packer.select(samples)
        self.seconds += time.perf_counter() - start
        return packs

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        used = {name: sum(sample[name] for sample in samples) for name in self.sizes}
        return used | {"members": len(samples)}


class Grouped(Sized):
    """Batches samples of similar length."""

    def __init__(self, sizes: dict[str, Sizes]) -> None:
        super().__init__(sizes)
        self._grouper: LengthGrouper[Any] = LengthGrouper.geometric(longest=TOKENS, length_of=lambda s: s["tokens"])

    def batch_group_criterion(self, sample: Any) -> tuple[int, int | None]:
        return self._grouper.group(sample)


def write(folder: Path) -> None:
    """Write texts of 200 bytes whose keys are their numbers, and prepare them."""
    for shard in range(SHARDS):
        numbers = range(shard * SAMPLES_PER_SHARD, (shard + 1) * SAMPLES_PER_SHARD)
        write_shard(folder / f"{shard:03d}.tar", {f"{number:07d}": {"txt": b"word " * 40} for number in numbers})
    dataset_yaml = render_dataset_yaml("TextSample", {"text": "txt"})
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=dataset_yaml)


def loader_of(path: Path, encoder: Sized, **settings: Any) -> Any:
    """Return the loader of one process with 24 lanes."""
    dataset = get_train_dataset(
        path,
        task_encoder=encoder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=LANES),
        max_samples_per_sequence=100,
        shuffle_buffer_size=100,
        **settings,
    )
    return get_savable_loader(dataset)


def encoding(sizes: dict[str, Sizes]) -> float:
    """Return the seconds that a fast tokenizer and the JPEG codec take for what is in a sample, on average."""
    chooser = random.Random(1)
    words = ["".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=chooser.randint(2, 9))) for _ in range(3_000)]
    tokenizer = train_tokenizer([" ".join(chooser.choices(words, k=20)) for _ in range(2_000)], 4_000, QWEN_TOKENS)
    ids = tokenizer(" ".join(chooser.choices(words, k=2 * TOKENS)))["input_ids"]
    images = sizes.get("images", np.zeros_like(sizes["tokens"]))[:ENCODED]
    texts = [tokenizer.decode(ids[:length]) for length in (sizes["tokens"][:ENCODED] - IMAGE_TOKENS * images).tolist()]
    picture = jpeg(np.random.default_rng(1), (256, 256))
    start = time.perf_counter()
    for text in texts:
        tokenizer(text)
    for _ in range(int(images.sum())):
        simplejpeg.decode_jpeg(picture)
    return (time.perf_counter() - start) / len(texts)


def held(state: Any) -> int:
    """Return the samples that wait in the lanes of a state."""
    return sum(len(lane.held.members) for lane in read_lanes(state).values())


def packing(path: Path, name: str, seconds: float) -> str:
    """Return a line about one distribution."""
    draw, limits = DISTRIBUTIONS[name]
    encoder = Packing(draw(np.random.default_rng(1), SHARDS * SAMPLES_PER_SHARD), limits)
    loader = loader_of(path, encoder, packing_buffer_size=BUFFER, batch_size=1)
    batches = iter(loader)
    members = packs = 0
    used = dict.fromkeys(limits, 0)
    delivered: set[Any] = set()

    def take() -> int:
        nonlocal members, packs
        before, batch = encoder.encoded, next(batches)
        members += sum(batch["members"])
        packs += len(batch["members"])
        for limit in used:
            used[limit] += sum(batch["members" if limit == "samples" else limit])
        delivered.update(chain.from_iterable(pack[2] for pack in batch["__restore_key__"][3]))
        return encoder.encoded - before

    for _ in range(LANES):
        take()
    encoded: list[int] = []
    encoder.seconds, start = 0.0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or len(encoded) < 50 * LANES:
        encoded.append(take())
    each, of = encoder.seconds / sum(encoded), passed / sum(encoded)

    state = loader.save_state_rank()
    waiting = held(state)
    saves = []
    for _ in range(SAVES):
        start = time.perf_counter()
        loader.save_state_rank()
        saves.append((time.perf_counter() - start) * 1e3)
    drawn = sum(lane.draw for lane in read_lanes(state).values())
    lost = drawn - waiting - len(delivered) if members == len(delivered) else "?"
    resumed = loader_of(path, encoder, packing_buffer_size=BUFFER, batch_size=1)
    resumed.restore_state_rank(state)
    before, batch = encoder.encoded, next(iter(resumed))
    again, needed = encoder.encoded - before, sum(batch["members"])
    binding = max(used, key=lambda limit: used[limit] / limits[limit])
    fill = used[binding] / packs / limits[binding]
    usual, most = np.quantile(encoded, 0.99) / np.mean(encoded), max(encoded) / np.mean(encoded)
    return (
        f"{name}: {packs:,} packs of {members:,} samples fill {fill:.2%} of their {binding}, {lost} samples lost; "
        f"packer {each * 1e6:.1f} us a sample, {each / of:.1%} of {of * 1e6:.0f}, "
        f"{each / (of + encoding(encoder.sizes)):.2%} with texts and images encoded; "
        f"99 of 100 microbatches encode at most {usual:.2f} means, all at most {most:.2f}; "
        f"{bytes_each(path, encoder, state, waiting):.1f} B a sample that waits ({waiting:,}), saved in "
        f"{statistics.median(saves):.1f} ms (longest {max(saves):.1f}); resumed, {again} samples encoded for a first "
        f"microbatch of {needed}, after other stops {resuming(path, encoder)}"
    )


def resuming(path: Path, encoder: Packing) -> str:
    """Return the samples encoded for the first microbatch of resumed runs, in those of a fresh start."""

    def first(state: Any) -> int:
        loader = loader_of(path, encoder, packing_buffer_size=BUFFER, batch_size=1)
        if state is not None:
            loader.restore_state_rank(state)
        before = encoder.encoded
        next(iter(loader))
        return encoder.encoded - before

    loader = loader_of(path, encoder, packing_buffer_size=BUFFER, batch_size=1)
    batches, states = iter(loader), []
    for _ in range(4 * LANES):
        next(batches)
        states.append(loader.save_state_rank())
    fresh = first(None)
    ratios = [first(state) / fresh for state in states]
    return f"{statistics.mean(ratios):.2f} of a fresh start on average and at most {max(ratios):.2f}"


def bytes_each(path: Path, encoder: Sized, state: Any, waiting: int) -> float:
    """Return the bytes of a state, as JSON, beyond those of a stream that packs nothing, for each sample that waits."""
    plain = loader_of(path, Sized(encoder.sizes), batch_size=1)
    batches: Iterator[Any] = iter(plain)
    for _ in range(LANES):
        next(batches)
    return (len(json.dumps(state)) - len(json.dumps(plain.save_state_rank()))) / waiting


def padding(path: Path, encoder: Sized, batches: int) -> float:
    """Return the tokens of padding for each token of content."""
    loader = iter(loader_of(path, encoder, batch_size=BATCH_SIZE))
    padded = content = 0
    for _ in range(batches):
        lengths = next(loader)["tokens"]
        padded += len(lengths) * max(lengths)
        content += sum(lengths)
    return padded / content - 1


def main() -> None:
    """Print a line for each distribution, and one about groups."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write(path)
        for name in DISTRIBUTIONS:
            print(packing(path, name, SECONDS), flush=True)
        lengths = log_normal(np.random.default_rng(3), SHARDS * SAMPLES_PER_SHARD)
        plain, grouped = (padding(path, kind(lengths), 400 * LANES) for kind in (Sized, Grouped))
        print(
            f"log-normal lengths, batches of {BATCH_SIZE}: {grouped:.3f} of padding in groups, {plain:.3f} without "
            f"({grouped / plain:.2f})"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()

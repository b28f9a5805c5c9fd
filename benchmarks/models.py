"""Rows that end in what a model takes: `python -m benchmarks.models --rival-python ENVIRONMENT/bin/python`.

    qwen2.5-vl   640 x 480 photographs, conversations of four turns, smart resize, packed to 8,192 tokens
    llava-1.5    336 pixels, one question and answer, batches of 32
    siglip       384 pixels and a caption of 64 tokens, batches of 32
    qwen2.5-vl-video   clips of 8 s (H.264, 640 x 480, 30 frames a second) at 2 frames a second, four turns, not packed

Ours: `ChatTemplateTaskEncoder`, for siglip an encoder with `energon_bridge.transforms`. megatron-energon: an encoder in
the manner of Megatron-Bridge's, with the Pillow-backed image processor of transformers in its hook. The environment of
the rival needs megatron-energon and the same transformers: that of `scripts/rival-env FOLDER`, and `pip install
transformers` in it; never torchvision. Each measurement is a fresh process; systems, rows and numbers of workers take
turns, and a system's figure is that of its best number of workers. `/uint8`: pixels as bytes, for us alone.

The video processors of transformers need torchvision, which would break that environment: for videos the rival has
their operations, in their order, by torch alone.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import SEED, WORDS, Kind, jpeg
from benchmarks.processes import REPOSITORY, System, call, ensure_prepared, measure
from benchmarks.systems.measure import Job
from benchmarks.videos import clip

COUNT, DIFFERENT, PER_SHARD = 2_000, 200, 250
CLIPS, DIFFERENT_CLIPS = 200, 12
ROWS = {
    "qwen2.5-vl": 1,
    "qwen2.5-vl/uint8": 1,
    "llava-1.5": 32,
    "siglip": 32,
    "qwen2.5-vl-video": 1,
    "qwen2.5-vl-video/uint8": 1,
}
"""Batch size of each row."""
KIND = Kind(
    name="conversations",
    sample_type="CrudeWebdataset",
    field_map=None,
    part="jpg",
    image_size=(640, 480),
    samples_per_shard=PER_SHARD,
)


def texts(chooser: random.Random, words: int) -> str:
    return " ".join(chooser.choices(WORDS, k=words))


def write(folder: Path, count: int = COUNT, different: int = DIFFERENT, media: str = "image") -> None:
    """Write a dataset of so many samples, of so many different images or videos, and the tokenizers of the rows."""
    from energon_bridge.task_encoder.families import LLAVA_TEMPLATE
    from energon_bridge.training.presets import LLAVA_TOKENS, QWEN_TOKENS, train_tokenizer

    generator, chooser = np.random.default_rng(SEED), random.Random(SEED)
    extension = "jpg" if media == "image" else "mp4"
    files = [jpeg(generator, (640, 480)) if media == "image" else clip(generator) for _ in range(different)]
    data = folder / "data"
    data.mkdir(parents=True)
    for shard in range(-(-count // PER_SHARD)):
        with tarfile.open(data / f"shard_{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * PER_SHARD, min((shard + 1) * PER_SHARD, count)):
                turns = []
                for turn in range(4):
                    question = [{"type": "text", "text": texts(chooser, 12)}]
                    shown = [{"type": media}] if turn == 0 else []
                    turns.append({"role": "user", "content": [*shown, *question]})
                    turns.append({"role": "assistant", "content": texts(chooser, 25)})
                record = {"messages": turns, "caption": texts(chooser, 12)}
                for part, content in ((extension, chooser.choice(files)), ("json", json.dumps(record).encode())):
                    member = tarfile.TarInfo(f"{number:08d}.{part}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    corpus = [texts(chooser, 50) for _ in range(200)] + ["user assistant system USER: ASSISTANT: You are helpful."]
    for row, tokens in (("qwen2.5-vl", QWEN_TOKENS), ("llava-1.5", LLAVA_TOKENS), ("siglip", LLAVA_TOKENS)):
        tokenizer = train_tokenizer(corpus, 1000, tokens)
        if row == "llava-1.5":
            tokenizer.chat_template = LLAVA_TEMPLATE
        tokenizer.save_pretrained(folder / f"tokenizer-{row}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival-python", required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "bench")
    return parser.parse_args()


def main() -> None:
    """Measure all rows and print a table."""
    options = arguments()
    folders = {"jpg": options.cache / f"models-{COUNT}", "mp4": options.cache / f"model-clips-{CLIPS}"}
    ours = System(
        name="ours", python=sys.executable, runner="benchmarks.systems.models_ours", cli="energon_bridge.cli.main"
    )
    rival = System(name="energon", python=options.rival_python, runner="benchmarks.systems.models_energon")
    if any("video" not in row for row in options.rows) and not folders["jpg"].exists():
        write(folders["jpg"])
    if any("video" in row for row in options.rows) and not folders["mp4"].exists():
        write(folders["mp4"], CLIPS, DIFFERENT_CLIPS, "video")
    for folder in folders.values():
        if folder.exists():
            ensure_prepared(ours, folder / "data", KIND)
    for system in (ours, rival):
        code = "import torch, transformers; print(torch.__version__, transformers.__version__)"
        print(system.name, "torch and transformers", call([system.python, "-c", code]).strip())
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    points = [
        (row, system, workers)
        for row in options.rows
        for system in (ours, rival)
        for workers in options.workers
        if system is ours or "/" not in row
    ]
    for _ in range(options.repetitions):
        random.Random(SEED).shuffle(points)
        for row, system, workers in points:
            packed = row.partition("/")[0] == "qwen2.5-vl"
            part = "mp4" if "video" in row else "jpg"
            job = Job(
                task="throughput",
                path=str(folders[part] / "data"),
                mode=row,
                part=part,
                workers=workers,
                batch_size=ROWS[row],
                shuffle_buffer_size=100,
                slice_size=100,
                seconds=options.seconds,
                warmup_seconds=2.0,
                # the packing buffers of all lanes are filled before
                warmup_batches=(72 if system is ours else 8) if packed else 4,
            )
            found.setdefault((row, system.name, workers), []).append(measure(system, job))
    print(f"{os.cpu_count()} cores; samples/s and CPU per sample (ms), medians of {options.repetitions}")
    print("| row | system | workers | samples/s | CPU ms | ours / energon |\n|---|---|---|---|---|---|")
    best: dict[tuple[str, str], float] = {}
    lines = []
    for (row, name, workers), results in sorted(found.items()):
        rate, cpu = (statistics.median(one[key] for one in results) for key in ("samples_per_s", "cpu_us_per_sample"))
        best[row, name] = max(best.get((row, name), 0.0), rate)
        lines.append((row, name, workers, rate, cpu / 1e3))
    for row, name, workers, rate, cpu in lines:
        rival_rate = best.get((row.partition("/")[0], "energon"))
        ratio = f"{rate / rival_rate:.1f}x" if name == "ours" and rival_rate and rate == best[row, name] else ""
        print(f"| {row} | {name} | {workers} | {rate:.0f} | {cpu:.1f} | {ratio} |")


if __name__ == "__main__":
    main()

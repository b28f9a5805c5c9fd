"""Small data in the shapes that the recipes in configs/ read: captions, conversations in tars, and a mix of files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from conversations import COLORS, colors_of, picture_of, turns_of
from paths import CONFIGS

from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard
from energon_bridge.training.llava_data import write_conversations

MIX = CONFIGS / "data" / "llava15_instruct_mix.yaml"
Parts = Callable[[int], dict[str, bytes]]
FOLDERS = ("coco", "vg", "ocr_vqa", "gqa", "textvqa")
CAPTIONS = {"red": "a tomato in the sun", "green": "the leaf of a tree", "blue": "water under a bridge"}


def jpeg(color: str, size: tuple[int, int] = (16, 16)) -> bytes:
    buffer = io.BytesIO()
    picture_of(color).resize(size).save(buffer, "jpeg")
    return buffer.getvalue()


def captions_dataset(folder: Path, *, num_train: int = 24, num_val: int = 6) -> Path:
    """Write a prepared captioning dataset in which the color of an image says which caption it has."""
    return _prepared(
        folder,
        num_train,
        num_val,
        lambda n: {"jpg": jpeg(color := list(COLORS)[n * 7 % 3]), "txt": CAPTIONS[color].encode()},
        render_dataset_yaml("CaptioningSample", {"image": "jpg", "caption": "txt"}),
    )


def crude_conversations(folder: Path, *, num_train: int = 40, num_val: int = 6) -> Path:
    """Write a prepared crude dataset of conversations of several turns, their images of several sizes in between."""

    def parts(number: int) -> dict[str, bytes]:
        images = {
            f"{n}.jpg": jpeg(color, (16 + 16 * (n % 2), 16 + 16 * (number % 2)))
            for n, color in enumerate(colors_of(number))
        }
        return {**images, "json": json.dumps({"messages": _messages(number)}).encode()}

    return _prepared(folder, num_train, num_val, parts, render_dataset_yaml("CrudeWebdataset", None))


def instruct_mix(folder: Path) -> Path:
    """Write the mix of configs/data, on little data in the form of llava_v1_5_mix665k.json."""
    for color in COLORS:
        for place in FOLDERS:
            (folder / "images" / place / color).mkdir(parents=True)
            (folder / "images" / place / color / "0.jpg").write_bytes(jpeg(color))
    entries = [_entry(number, (*FOLDERS, None)[number % 6]) for number in range(78)]
    (folder / "mix665k.json").write_text(json.dumps(entries))
    counts = write_conversations(folder / "mix665k.json", folder / "llava15", val_every=13)
    assert counts == {**dict.fromkeys((*FOLDERS, "text"), 12), "val": 6}
    (folder / "images").rename(folder / "llava15" / "images")
    mix = folder / "mix.yaml"
    mix.write_text(MIX.read_text().replace("/path/to/llava15", str(folder / "llava15")))
    return mix


def _messages(number: int) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "Be brief."}] if number % 5 == 0 else []
    for question, answer in turns_of(number):
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _entry(number: int, place: str | None) -> dict[str, object]:
    """Return an entry in the form of llava_v1_5_mix665k.json."""
    color = list(COLORS)[number // 6 % 3]
    question = f"Say {color}." if place is None else "<image>\nWhat color is it?"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": color}]
    entry: dict[str, object] = {"id": str(number), "conversations": turns}
    return entry if place is None else entry | {"image": f"{place}/{color}/0.jpg"}


def _prepared(folder: Path, num_train: int, num_val: int, parts: Parts, dataset_yaml: bytes) -> Path:
    for part, count in (("train", num_train), ("val", num_val)):
        (folder / part).mkdir(parents=True)
        for shard, first in enumerate(range(0, count, 10)):
            samples = {f"{part}-{n:03d}": parts(n) for n in range(first, min(first + 10, count))}
            write_shard(folder / part / f"{shard}.tar", samples)
    prepare_dataset(folder, split=parse_patterns(["train:train/.*", "val:val/.*"]), dataset_yaml=dataset_yaml)
    return folder

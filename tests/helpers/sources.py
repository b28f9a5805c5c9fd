"""Sources of `energon convert` with real pictures, each with all its media; and what was made of them."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import output_of, refusal_of
from PIL import Image

from energon_bridge import WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.storage import open_store


def picture(number: int, form: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16 + number % 5), (number * 37 % 256, number % 256, 90)).save(buffer, form)
    return buffer.getvalue()


def write_pictures(folder: Path, names: list[str]) -> dict[str, bytes]:
    found = {}
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        found[name] = picture(number, "PNG" if name.endswith(".png") else "JPEG")
        path.write_bytes(found[name])
    return found


QUIETLY = ("--no-progress", "--num-workers", 1)


def convert(source: Path, out: Path, *flags: object, answers: str = "") -> str:
    """Convert, and return what is printed."""
    return output_of("convert", source, out, *QUIETLY, *flags, answers=answers)


def converted(source: Path, out: Path, *flags: object, answers: str = "") -> Path:
    convert(source, out, *flags, answers=answers)
    return out


def refused(source: Path, out: Path, *flags: object) -> str:
    return refusal_of("convert", source, out, *QUIETLY, *flags).partition("Error: ")[2]


def content(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def members(root: Path) -> dict[str, bytes]:
    found = {}
    for shard in read_info(open_store(root)).shard_counts:
        with tarfile.open(root / shard) as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive}
    return found


def meta(root: Path, name: str = "dataset.yaml") -> Any:
    return yaml.safe_load((root / ".nv-meta" / name).read_text())


def read(path: Path, part: str = "train") -> list[Any]:
    workers = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(path, split_part=part, batch_size=1, worker_config=workers, image_decode="pilrgb")
    return list(get_loader(dataset))


# --- sources: each writes `count` samples with pictures, and returns the path to convert, flags, and all media ------


def llava(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder / "images", [f"{n % 2}/{n}.{'png' if n % 3 else 'jpg'}" for n in range(count)])
    entries = [
        {
            "id": f"{n // 2}",
            "image": name,
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"answer {n}"}],
        }
        for n, name in enumerate(pictures)
    ]
    (folder / "llava.json").write_text(json.dumps(entries))
    return folder / "llava.json", ["--media", folder / "images"], pictures


def openai(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder, [f"{n}.jpg" for n in range(2 * count)])
    with (folder / "chats.jsonl").open("w") as file:
        for n in range(count):
            inside = "data:image/jpeg;base64," + base64.b64encode(pictures[f"{2 * n + 1}.jpg"]).decode()
            pieces = [
                {"type": "image_url", "image_url": {"url": f"{2 * n}.jpg"}},
                {"type": "text", "text": "and"},
                {"type": "image_url", "image_url": {"url": inside}},
            ]
            turns = [{"role": "user", "content": pieces}, {"role": "assistant", "content": f"answer {n}"}]
            file.write(json.dumps({"messages": turns}) + "\n\n")
    return folder / "chats.jsonl", [], pictures


def pairs(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder, [f"{n % 2}/a.{n}.{'png' if n % 3 else 'JPG'}" for n in range(count)])
    for n, name in enumerate(pictures):
        (folder / name).with_suffix(".txt").write_text(f"caption {n}")
    return folder, [], pictures


def classes(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    return folder, [], write_pictures(folder, [f"{'cat' if n % 2 else 'dog'}/{n:03d}.jpg" for n in range(count)])


def coco(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder / "val2017", [f"{n:012d}.jpg" for n in range(count)])
    images = [{"id": n, "file_name": name, "height": 16} for n, name in enumerate(pictures)]
    notes = [{"id": 2 * n + k, "image_id": n, "caption": f"caption {n} {k}"} for k in (0, 1) for n in range(count)]
    (folder / "captions.json").write_text(json.dumps({"info": {}, "images": images, "annotations": notes}))
    return folder / "captions.json", ["--media", folder / "val2017"], pictures


def table(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pictures = write_pictures(folder, [f"{n}.png" for n in range(count)])
    with (folder / "list.tsv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["file", "Caption", "year"])
        writer.writerows([name, f'a "quoted"\nlong caption {n}', 1990 + n] for n, name in enumerate(pictures))
    return folder / "list.tsv", [], pictures


def parquet(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pictures = {f"{n}.jpg": picture(n) for n in range(count)}
    images = [{"bytes": data, "path": name} for name, data in pictures.items()]
    rows = {"image": images, "question": ["what?"] * count, "answer": [f"answer {n}" for n in range(count)]}
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "x.parquet", row_group_size=4)
    return folder / "x.parquet", [], pictures


def tars(folder: Path, count: int) -> tuple[Path, list[object], dict[str, bytes]]:
    webdataset = pytest.importorskip("webdataset")
    pictures = {f"{n}.jpg": picture(n) for n in range(count)}
    folder.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(folder / "s-%03d.tar"), maxcount=5, verbose=0) as out:
        for n, data in enumerate(pictures.values()):
            out.write({"__key__": f"key{n}", "jpg": data, "json": {"n": n}, "seg.png": picture(n, "PNG")})
    return folder, [], {**pictures, **{f"{n}.png": picture(n, "PNG") for n in range(count)}}


Make = Callable[[Path, int], tuple[Path, list[object], dict[str, bytes]]]
SOURCES: Mapping[str, Make] = {
    function.__name__: function for function in (llava, openai, pairs, classes, coco, table, parquet, tars)
}


class StopAtMove:
    """Raises KeyboardInterrupt in place of the `at`-th file that is moved; never, if `at` is 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 0
        self.moved = 0
        self._move = os.replace
        monkeypatch.setattr(os, "replace", self)

    def __call__(self, old: str, new: str) -> None:
        self.moved += 1
        if self.moved == self.at:
            raise KeyboardInterrupt
        self._move(old, new)

    def after(self, moves: int) -> None:
        """Stop at a move, counted from now on."""
        self.at = moves
        self.moved = 0

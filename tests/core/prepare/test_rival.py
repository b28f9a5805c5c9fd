"""Datasets that `energon prepare` of this package wrote, read by megatron-energon 7.4.1 in its own interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import output_of
from tar_builder import GNU, PAX, USTAR, write_tar

from energon_bridge.core.format.dataset import open_dataset, read_index
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.stores.file_store import follow_links

pytestmark = [pytest.mark.rival, pytest.mark.slow]

READER = Path(__file__).with_name("rival_read.py")
FOLDER = "a folder.with.dots/" * 6


def members(prefix: str, count: int) -> list[tuple[str, bytes]]:
    """Return members with parts of several dots, and some that belong to no sample."""
    result: list[tuple[str, bytes]] = [("__meta__/info.json", b"{}"), ("folder/", b""), ("no-dot", b"x")]
    for number in range(count):
        key = f"{prefix}{number:03d}"
        result += [
            (f"{key}.txt", f"text {key}".encode()),
            (f"{key}.seg.mask.png", bytes([number]) * 700),
            (f"{key}.empty", b""),
        ]
        result += [(f"folder{number}/", b"")] * (number % 2)
    return result


TEXT = ["--sample-type", "TextSample", "--field-map", '{"text": "nope,txt"}']
CRUDE = ["--sample-type", "CrudeWebdataset"]
DATASETS: dict[str, tuple[dict[str, list[tuple[str, bytes]]], int, list[str]]] = {
    "plain": ({f"s_{n}.tar": members(f"{n}-", 4) for n in range(11)}, USTAR, ["--split-ratio", "6,3,2", *TEXT]),
    "nested": (
        {f"{part}/deep.er/{n:02d}.tar": members(f"{part}/{n}/", 3) for part in ("train", "val") for n in range(3)},
        USTAR,
        ["--split-parts", "train:train/.*", "--split-parts", "val:val/.*", "--exclude", "val/deep.er/02", *CRUDE],
    ),
    "ustar prefix": ({"x.tar": members(FOLDER, 3)}, USTAR, ["--split-ratio", "1,0,0", *CRUDE]),
    "gnu long names": (
        {"x.tar": members(FOLDER + "k" * 120, 3) + members("short", 3)},
        GNU,
        ["--split-ratio", "1,0,0", *CRUDE],
    ),
    "pax long names": (
        {"x.tar": members(FOLDER + "ké" * 70, 3) + members("kürz", 3)},
        PAX,
        ["--split-ratio", "1,0,0", *CRUDE],
    ),
    "excludes": ({f"s_{n}.tar": members(f"{n}-", 4) for n in range(4)}, USTAR, ["--split-ratio", "1,0,0", *TEXT]),
    "no key index": ({"x.tar": members("k", 3)}, USTAR, ["--split-ratio", "1,0,0", "--no-key-index", *TEXT]),
}


def prepare(root: Path, name: str) -> Path:
    shards, tar_format, options = DATASETS[name]
    for shard, content in shards.items():
        write_tar(root / shard, content, tar_format=tar_format)
    arguments = ["prepare", str(root), "--non-interactive", "--no-progress", "--num-workers", "2", *options]
    output_of(*arguments)
    if name == "excludes":
        split = root / ".nv-meta/split.yaml"
        split.write_text(
            split.read_text().replace("exclude: []", "exclude:\n- s_1.tar\n- s_{2..3}.tar/{2-001,3-003}\n")
        )
    return root


def parts_of(name: str) -> list[str]:
    return ["train", "val", "test"] if name == "plain" else ["train", "val"] if name == "nested" else ["train"]


def lookups_of(name: str) -> list[str]:
    if name == "no key index":
        return []
    wanted = [
        member for content in DATASETS[name][0].values() for member in content if member[0].endswith((".txt", ".png"))
    ]
    return [member for member, _ in wanted if not member.startswith("val/2/")]


def read_with_ours(root: Path, part: str) -> list[dict[str, Any]]:
    dataset = open_dataset(root, split_part=part)
    samples: list[dict[str, Any]] = []
    for number, shard in enumerate(dataset.shard_names):
        for start, end in pairwise(read_index(dataset, number).tolist()):
            wanted = dataset.part_filter if isinstance(dataset.part_filter, frozenset) else None
            data = dataset.store.read_range(shard, start, end - start)
            key, views = parse_sample(data, parts=wanted, follow=follow_links(root))
            if (shard, key) in dataset.excluded:
                continue
            parts = {name: bytes(view).decode("latin-1") for name, view in views.items()}
            fields = {"text": parts} if dataset.field_map is None else dataset.field_map(parts)
            samples.append({"key": key, "type": "TextSample", "fields": fields})
    return samples


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return all datasets of this file, prepared by our command."""
    root = tmp_path_factory.mktemp("ours")
    return {name: prepare(root / name, name) for name in DATASETS}


def ask_rival(run_rival: Callable[..., str], jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let megatron-energon do jobs as `rival_read` describes them."""
    line = next(line for line in run_rival(READER, json.dumps(jobs)).splitlines() if line.startswith("RESULT "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module")
def rival(run_rival: Callable[..., str], datasets: dict[str, Path]) -> dict[str, Any]:
    """Return what megatron-energon reads of them: one run for all."""
    jobs = [{"path": str(path), "parts": parts_of(name), "lookup": lookups_of(name)} for name, path in datasets.items()]
    return dict(zip(datasets, ask_rival(run_rival, jobs), strict=True))


@pytest.mark.parametrize("name", DATASETS)
def test_megatron_energon_reads_what_we_prepare(datasets: dict[str, Path], rival: dict[str, Any], name: str):
    total = 0
    for part in parts_of(name):
        ours = read_with_ours(datasets[name], part)
        assert ours
        assert rival[name]["samples"][part] == ours
        total += len(ours)
    assert total == {"plain": 44, "nested": 15, "excludes": 10, "gnu long names": 6, "pax long names": 6}.get(name, 3)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "no key index"])
def test_its_key_lookup_works_on_our_index(rival: dict[str, Any], name: str):
    contents = {member: content for shard in DATASETS[name][0].values() for member, content in shard}
    found = rival[name]["lookup"]
    assert found
    assert found == {member: contents[member].decode("latin-1") for member in found}

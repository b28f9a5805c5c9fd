"""`energon analyze-debug`: what the picture shows as read is what a run delivers."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from commands import answer, energon, output_of
from engine import config_of
from forecasts import MIXES, OPTIONS, opened, ranks_of, run, write_mixes
from made import made_once
from PIL import Image

from energon_bridge.tools.forecast.planned_run import run_of_mix
from energon_bridge.tools.preview.reads import Band, Reads, picture_of, reads_of_run, write_picture
from energon_bridge.tools.testing import create_captioning_test_dataset

SVG = "{http://www.w3.org/2000/svg}"


data = made_once(write_mixes)


def pixels_of(path: Path) -> np.ndarray[Any, Any]:
    """Return the pixels of a picture with axes."""
    (image,) = ElementTree.fromstring(path.read_text()).iter(f"{SVG}image")
    found = re.fullmatch("data:image/png;base64,(.*)", image.attrib["href"])
    assert found is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))).convert("RGB"))


def reads_of(samples: list[tuple[int, int, int]], *bands: Band, steps: int) -> Reads:
    columns = np.array(samples, dtype=np.int64).reshape(-1, 3).T
    return Reads(bands=bands, first_step=0, num_steps=steps, steps=columns[0], ranks=columns[1], samples=columns[2])


@pytest.mark.parametrize("mix", MIXES)
def test_what_is_shown_is_what_is_delivered(data: Path, mix: str) -> None:
    delivered = run(ranks_of(opened(data, mix), 3), 24)
    of_run = run_of_mix(dataclasses.replace(opened(data, mix), worker_config=config_of(3, 0)))
    reads = reads_of_run(of_run, 4, 20)
    leaves = {leaf.identity: (leaf, band) for leaf, band in zip(of_run.spec.leaves, reads.bands, strict=True)}
    real: Counter[tuple[int, int, int]] = Counter()
    for step in range(4, 24):
        for rank, rows in enumerate(delivered[step]):
            for (identity, index, _, _), _ in rows or ():
                leaf, band = leaves[identity]
                real[step, rank, band.first + index - leaf.start] += 1
    assert Counter(zip(reads.steps.tolist(), reads.ranks.tolist(), reads.samples.tolist(), strict=True)) == real
    ends = [band.first + band.count for band in reads.bands]
    assert [band.first for band in reads.bands] == [0, *ends[:-1]]


def test_the_command_counts_and_draws(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "reads.svg"
    arguments = (data / "weights.yaml", *OPTIONS, "--num-lanes", 24, "--world-size", 2, "--steps", 50)
    found = answer("analyze-debug", *arguments, "--out", out)
    assert [one["num_samples"] for one in found["datasets"]] == [12, 30, 12]
    assert sum(one["reads"] for one in found["datasets"]) == 50 * 2 * 2
    assert all(one["distinct"] <= one["num_samples"] and one["most"] >= 1 for one in found["datasets"])
    pixels = pixels_of(out)
    assert pixels.shape == (54, 50, 3)
    assert (pixels < 255).any(axis=2).sum() <= 200
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(out.read_text()).iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "step 0", "step 49", "30 samples"} <= set(texts)
    assert [path.name for path in tmp_path.iterdir()] == ["reads.svg"]
    assert "different samples" in output_of("analyze-debug", *arguments, "--heatmap-path", tmp_path / "reads.png")
    assert (np.asarray(Image.open(tmp_path / "reads.png")) == pixels).all()


def test_a_state_goes_on_in_the_picture(data: Path, tmp_path: Path) -> None:
    (loader,) = ranks_of(opened(data, "single"), 1)
    run([loader], 10)
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    here = (*OPTIONS, "--num-lanes", 24, "--step", 10, "--steps", 12, "--out")
    of_state = answer("analyze-debug", tmp_path / "state.json", *here, tmp_path / "a.png")
    assert of_state == answer("analyze-debug", data / "single.yaml", *here, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_pixel_is_where_the_sample_is_and_when() -> None:
    bands = Band(name="a", first=0, count=6), Band(name="b", first=6, count=4)
    pixels = np.asarray(picture_of(reads_of([(0, 0, 0), (2, 1, 9), (2, 1, 9), (1, 0, 5)], *bands, steps=3)))
    read = (pixels < 255).any(axis=2)
    assert np.argwhere(read).tolist() == [[0, 0], [5, 1], [9, 2]]
    assert pixels[9, 2].tolist() == [204, 119, 51]  # read most: the full colour of rank 1
    assert pixels[0, 0].tolist() == pixels[5, 1].tolist() != [68, 119, 170]
    large = np.asarray(picture_of(reads_of([(9999, 0, 999_999)], Band(name="a", first=0, count=10**6), steps=10_000)))
    assert np.argwhere((large < 255).any(axis=2)).tolist() == [[59, 99]]
    assert (np.asarray(picture_of(reads_of([], steps=4))) == 255).all()


def test_names_of_datasets_are_only_text(tmp_path: Path) -> None:
    name = '</text><script>alert(1)</script>" \x07'
    path = tmp_path / "reads.svg"
    write_picture(path, reads_of([(0, 0, 0)], Band(name=name, first=0, count=1), steps=1), title=name)
    root = ElementTree.fromstring(path.read_text())
    assert not list(root.iter(f"{SVG}script"))
    assert any("<script>" in "".join(text.itertext()) for text in root.iter(f"{SVG}text"))


RIVAL = """
import json, os, sys
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
path, logs, rank = sys.argv[1:]
config = WorkerConfig(
    rank=int(rank), world_size=2, num_workers=0, worker_debug_path=logs + "/{worker_id}-{pid}.jsonl", worker_log_level=1
)
dataset = get_train_dataset(
    path, batch_size=2, shuffle_buffer_size=None, max_samples_per_sequence=None, worker_config=config
)
batches = iter(get_savable_loader(dataset))
print(json.dumps([[step, key] for step in range(9) for key in next(batches).__key__]), flush=True)
os._exit(0)  # at the interpreter's end, the unfinished iterator may wait for ever for a lock of the watchdog
"""
"""What each rank of a run of megatron-energon does: it writes its logs, and prints the keys that it has got."""


@pytest.mark.rival
def test_logs_of_megatron_energon_are_read(run_rival: Callable[..., str], tmp_path: Path) -> None:
    data, logs = create_captioning_test_dataset(tmp_path / "data", num_train=24, num_val=0), tmp_path / "logs"
    logs.mkdir()
    printed = [run_rival("-c", RIVAL, data, logs, rank).splitlines()[-1] for rank in range(2)]
    part = [key for text in printed for step, key in json.loads(text) if 2 <= step < 7]
    found = answer("analyze-debug", logs, "--step", 2, "--steps", 5, "--out", tmp_path / "reads.png")
    (facts,) = found["datasets"]
    assert facts["reads"] == len(part) == 20
    assert facts["distinct"] == facts["num_samples"] == len(set(part))
    assert facts["most"] == max(Counter(part).values())


def test_logs_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    event = {"t": "SavableDataLoader.yield", "r": 0, "w": None, "id": 1, "global_idx": 0, "keys": ["a", "b"]}
    (tmp_path / "0.jsonl").write_text(json.dumps(event) + "\n" + json.dumps(event)[:-30])
    (facts,) = answer("analyze-debug", tmp_path)["datasets"]
    assert (facts["reads"], facts["distinct"]) == (2, 2)
    refused = energon("analyze-debug", tmp_path / "0.jsonl", "--loader", 7)
    assert "there is no loader 7; loaders: 1" in refused.output
    (tmp_path / "0.jsonl").write_text('{"t": "SavableLoader.__init__"}\n')
    assert "worker_log_level=1" in energon("analyze-debug", tmp_path).output


def test_mistakes_are_named(data: Path, tmp_path: Path) -> None:
    arguments = (data / "weights.yaml", *OPTIONS, "--steps", 2)
    assert "must end in .svg or .png" in energon("analyze-debug", *arguments, "--out", tmp_path / "x.pdf").output
    assert "cannot write" in energon("analyze-debug", *arguments, "--out", tmp_path / "none" / "x.svg").output
    assert "--loader is for logs" in energon("analyze-debug", *arguments, "--loader", 1).output


def test_info_is_there_for_programs(data: Path) -> None:
    found = answer("info", data / "c")
    assert (found["num_samples"], found["num_shards"]) == (24, 8)
    assert [(part["name"], part["num_samples"]) for part in found["parts"]] == [("train", 12), ("val", 12)]

"""The benchmarks run: every part once, over little data, with this package alone."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_program
from paths import REPOSITORY
from PIL import Image

import energon_bridge
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml

sys.path.insert(0, str(REPOSITORY))

from benchmarks import data, figures, models, packing, processes, run
from benchmarks.run import warmup_batches
from benchmarks.systems.measure import Job, consume
from benchmarks.systems.same_api import PACK, PACKING_BUFFER, SIDE, open_loader, touch


@pytest.fixture
def fewer_interpreters(monkeypatch):
    """Measure in a new interpreter once, and afterwards in forks of this process."""
    in_interpreter, calls = processes.call, []

    def call(command):
        calls.append(command[1])
        if command[1] == "-m" and calls.count("-m") == 1:
            return in_interpreter(command)
        result = run_program(command[1:], REPOSITORY)
        assert result.returncode == 0, result.stderr
        return result.stdout

    monkeypatch.setattr(processes, "call", call)
    monkeypatch.setattr(run, "call", call)
    return calls


def test_every_part_runs(tmp_path, monkeypatch, capsys, fewer_interpreters):
    results = tmp_path / "results.json"
    options = "--systems ours --points text/raw --workers 0 --seconds 0.1 --warmup 0 --repetitions 1 --consumed 3"
    options += f" --scale 0 --batch-size 4 --datasets 1 3 --cache {tmp_path / 'cache'} --json {results}"
    monkeypatch.setattr(sys, "argv", ["run.py", *options.split()])
    run.main()
    printed = capsys.readouterr().out
    assert len(fewer_interpreters) > 10

    measured = json.loads(results.read_text())
    assert [(m["kind"], m["mode"]) for m in measured["throughput"]] == [("text", "raw")]
    assert all(m["samples_per_s"] > 0 and m["cpu_us_per_sample"] > 0 for m in measured["throughput"])
    assert all(m["exact"] and m["state_bytes"] > 0 for m in measured["checkpoint"])
    assert [m["samples"] for m in measured["prepare"]] == [64] * 4  # two kinds, with and without the key index
    assert [m["start"] for m in measured["mixes"]] == ["first", "later"] * 2
    assert {m["datasets"] for m in measured["mixes"]} == {1, 3}
    assert all(m["first_batch_s"] > 0 and m["open_files"] > 0 and m["state_bytes"] > 0 for m in measured["mixes"])
    assert all(m["exact"] == m["frames"] and m["uniform_frames_per_s"] > 0 for m in measured["video"])
    for title in (
        "best number of workers",
        "Throughput",
        "Save and restore",
        "`energon prepare`",
        "Mixes",
        "Frames of videos",
    ):
        assert title in printed
    assert str(tmp_path) not in printed  # the tables go into docs/: no paths of the machine


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One small dataset of each kind that the modes below read."""
    cache = tmp_path_factory.mktemp("bench")
    found = {}
    for name in ("caption", "large", "interleaved"):
        kind = data.KINDS[name]
        found[name] = data.make(cache, kind, 16 if name == "large" else 64)
        yaml = render_dataset_yaml(kind.sample_type, kind.field_map)
        prepare_dataset(found[name], split=parse_patterns(["train:.*"]), dataset_yaml=yaml, key_index=False)
    return found


def loader_of(folder: Path, mode: str, **more):
    settings = {"batch_size": 8, "shuffle_buffer_size": 10, "slice_size": 10, "seconds": 0, "warmup_seconds": 0}
    job = Job(task="throughput", path=str(folder), mode=mode, part="jpg", workers=0, **settings | more)
    return iter(open_loader(energon_bridge, job))


@pytest.mark.parametrize("mode", ["resized", "scaled"])
def test_declared_and_undeclared_sizes_give_the_same_shapes(folders, mode):
    batch = next(loader_of(folders["large"], mode))
    assert len(touch(batch)) == 8
    assert batch.image.shape == (8, 3, SIDE, SIDE)


def test_an_interleaved_batch_has_all_images_and_texts(folders):
    for batch in islice(loader_of(folders["interleaved"], "cooked"), 3):
        assert len(touch(batch)) == 8
        for sequence in batch.sequence:
            assert 2 <= len(sequence) <= 8
            assert [tuple(image.shape) for image in sequence[::2]] == [(3, 256, 256)] * (len(sequence) // 2)
            assert all(isinstance(text, str) for text in sequence[1::2])


def test_a_packed_batch_has_as_many_images_as_others(folders):
    batch = next(loader_of(folders["caption"], "packed"))
    assert batch.image.shape == (8 // PACK, PACK, 3, 256, 256)
    assert len(touch(batch)) == 8


def test_packing_warms_up_for_four_buffers_of_every_lane():
    assert warmup_batches("packed", 32) * 32 >= 4 * 24 * PACKING_BUFFER
    assert warmup_batches("uint8", 32) == 0


def test_a_warm_up_lasts_for_its_batches():
    batches = iter(range(10))
    assert consume(batches, lambda batch: [""] * 3, 0, least=4)[0] == 12
    assert next(batches) == 4


def test_the_benchmark_of_packing_runs(tmp_path, monkeypatch):
    for name, value in {"SHARDS": 2, "SAMPLES_PER_SHARD": 200, "LANES": 4, "BUFFER": 50}.items():
        monkeypatch.setattr(packing, name, value)
    packing.write(tmp_path)
    for name in packing.DISTRIBUTIONS:
        line = packing.packing(tmp_path, name, 0)
        assert " 0 samples lost" in line
        encoded, needed = re.search(r"resumed, (\d+) samples encoded for a first microbatch of (\d+)", line).groups()
        assert int(needed) <= int(encoded) <= 2 * packing.BUFFER  # and some of the buffer that comes next
    lengths = packing.log_normal(np.random.default_rng(3), 400)
    assert packing.padding(tmp_path, packing.Grouped(lengths), 60) < packing.padding(
        tmp_path, packing.Sized(lengths), 60
    )


def test_requests_of_a_server_are_counted(tmp_path):
    from object_server import serving

    from benchmarks import buckets

    buckets.write(tmp_path / "data", 64, 100, 2)
    with serving(tmp_path) as server:
        asked, fetched, rate = buckets.measure(f"{server.url}/data", 0, 64)
        made = len(server.asked)
    assert 0 < asked <= made / 64
    assert fetched > 100
    assert rate > 0


def test_what_pixels_cost(monkeypatch, capsys):
    pytest.importorskip("transformers")
    from benchmarks import pixels

    monkeypatch.setattr(pixels, "ROUNDS", 1)
    monkeypatch.setattr(pixels, "keep_freed_memory", lambda: None)  # which would stay so for the other tests
    monkeypatch.setattr(pixels.torch, "set_num_threads", lambda count: None)
    pixels.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(pixels.PROCESSORS)
    assert all("decode" in line and "processor / pillow" in line for line in lines[1:])


@pytest.mark.parametrize("model", ["LLaVA-1.5", "Gemma 3"])
def test_rows_end_in_what_the_model_takes(tmp_path: Path, model: str) -> None:
    pytest.importorskip("transformers")
    from benchmarks.systems import models as runner

    models.write(tmp_path, 40, 2, [model])
    yaml = render_dataset_yaml("CrudeWebdataset", None)
    prepare_dataset(tmp_path / "data", split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
    job = Job(
        **{"task": "throughput", "path": str(tmp_path / "data"), "mode": f"{model}/ours", "part": "jpg"},
        **{"workers": 0, "batch_size": 4, "shuffle_buffer_size": 1, "slice_size": 4},
        **{"seconds": 0.1, "warmup_seconds": 0.0},
    )
    ours = next(iter(runner.open_loader(job)))
    assert len(runner.touch(ours)) == 4
    with tarfile.open(next((tmp_path / "data").glob("*.tar"))) as tar:
        image, record = (tar.extractfile(member).read() for member in list(tar)[:2])
    theirs = runner.Collate(tmp_path / model)([(Image.open(io.BytesIO(image)), json.loads(record))] * 4)
    assert len(runner.touch(theirs)) == 4
    side, tokens = {"LLaVA-1.5": (336, 576), "Gemma 3": (896, 256)}[model]
    assert ours.pixel_values.shape == theirs["pixel_values"].shape == (4, 3, side, side)
    assert ours.tokens.shape[1] > tokens
    assert theirs["labels"].shape[1] > tokens


def test_texts_continue_from_a_state(tmp_path: Path, monkeypatch: Any, capsys: Any, fewer_interpreters: Any) -> None:
    monkeypatch.setattr(figures, "TEXTS", 1_500)
    monkeypatch.setattr(figures, "CONSUMED", (1_000, 10**6))
    monkeypatch.setattr(figures, "REACHED", 1_000)
    monkeypatch.setattr(figures, "version", lambda name: "0")
    options = "--libraries ours webdataset --workers 0 --memory-workers 0 --repetitions 1 --steps 12"
    monkeypatch.setattr(
        sys, "argv", ["figures.py", *options.split(), "--parts", "resume", "memory", "--cache", str(tmp_path)]
    )
    figures.main()
    printed = capsys.readouterr().out
    assert printed.count("| energon_bridge | 0 |") == printed.count("| webdataset | 0 |") == 2
    assert "other samples" not in printed
    states = [figures.json.loads(path.read_text()) for path in tmp_path.glob("state-ours-*.json")]
    assert len(states) == 2
    assert all(500 < state["state_bytes"] < 2_000 for state in states)


def test_how_even_balance_makes_the_ranks(capsys):
    from benchmarks import balance

    found = balance.run(800, (4, 8), (1, 2, 4))
    assert len(found) == len(balance.MIXES) * 2 * 6
    for _, _, rounds, ranks in found:
        assert ranks.worse <= 1.01
        assert ranks.least_step <= ranks.step * (1 + 1e-9)
        assert ranks.step <= ranks.step_before
        assert ranks.least_round <= ranks.round * (1 + 1e-9)
        assert ranks.round <= ranks.round_before
        assert rounds > 1 or ranks.step == ranks.step_before
    assert capsys.readouterr().out.count("image mix, packs") == 6

"""`energon bench`: rates of every number of workers, what a sample costs, and what limits."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import answer, output_of, refusal_of
from engine import text_dataset
from forked import run_program
from keyed import join, write_mix
from made import made_once
from object_server import serving
from paths import REPOSITORY
from PIL import Image
from previews import mix_of
from recipes import crude_conversations
from sources import coco, converted

from energon_bridge import TextSample, register_joiner
from energon_bridge.core.prepare import parse_patterns, prepare_dataset, rebuild_index
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.cli import bench
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

RATE = bench.Rate(
    workers=0,
    samples=1000,
    samples_per_second=1000.0,
    bytes_per_second=1e8,
    cpu_per_sample=1e-3,
    training_cpu=1.0,
    making=1.0,
    load=1e-4,
    encode=1e-4,
    batch=8e-4,
    requests=0,
    bytes_per_request=0.0,
    seconds_per_request=0.0,
    waiting=0.0,
)
READING = replace(RATE, encode=0.0, batch=0.0)
DROP_IN = ["-m", "energon_bridge.compat", "-m", "energon_bridge.tools.cli.main"]


dataset = made_once(create_captioning_test_dataset, num_train=24, num_val=4)


def test_every_number_of_workers_is_measured(dataset: Path) -> None:
    found = answer("bench", dataset, "--batch-size", 4, "--num-workers", 1, "--seconds", 0.2)
    assert [rate["workers"] for rate in found["rates"]] == [0, 1]
    for rate in (found["reading"], *found["rates"]):
        assert rate["samples"] >= 4
        assert rate["samples_per_second"] > 0
        assert rate["bytes_per_second"] > 0
        assert rate["requests"] == 0
    assert found["rates"][0]["cpu_per_sample"] > 0
    assert found["workers"] in (0, 1)


def test_it_prints_stages_rates_and_a_limit(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench_encoders.py").write_text(
        "from energon_bridge import DefaultTaskEncoder\n"
        "class Mine(DefaultTaskEncoder):\n"
        "    def encode_sample(self, sample):\n"
        "        return sample\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--batch-size", 4, "--num-workers", 0, "--seconds", 0.2, "--encoder", "bench_encoders:Mine"]
    output = output_of("bench", dataset, *flags)
    del sys.modules["bench_encoders"]
    for words in ("Time for a sample, without workers: reading ", "samples/s", "0 (fastest)", "\nLimit: ", "\nTry: "):
        assert words in output


def test_a_bad_sample_is_named_once(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bench_bad.py").write_text(
        "from energon_bridge import DefaultTaskEncoder\n"
        "class Bad(DefaultTaskEncoder):\n"
        "    def encode_sample(self, sample):\n"
        "        if sample.__sources__[0].index == 3:\n"
        "            raise ValueError('bad')\n"
        "        return sample\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--batch-size", 4, "--num-workers", 1, "--seconds", 0.2, "--encoder", "bench_bad:Bad"]
    found = answer("bench", dataset, *flags)
    del sys.modules["bench_bad"]
    assert len(found["rates"]) == 2
    assert sum("ValueError: bad" in record.getMessage() for record in caplog.records) == 1


def test_fields_may_lie_in_json(tmp_path: Path) -> None:
    source, flags, _ = coco(tmp_path / "in", 4)
    data = converted(source, tmp_path / "out", *flags, "--split-ratio", "1,0,0")
    output_of("bench", data, "--batch-size", 2, "--num-workers", 0, "--seconds", 0.2)


def test_joiners_get_texts_where_only_reading_is_measured(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rebuild_index(text_dataset(tmp_path / name, train=[40]))  # with a key index
    mix = write_mix(tmp_path / "mix.yaml", train=join(joiner={"__module__": __name__, "__function__": "glued"}))
    found = answer("bench", mix, "--batch-size", 2, "--num-workers", 0, "--seconds", 0.2)
    assert found["reading"]["samples"] >= 2


@register_joiner
def glued(first: TextSample, second: TextSample) -> TextSample:
    return TextSample(__key__=first.__key__, text=first.text + " and " + second.text)


def test_it_runs_on_a_server_and_says_what_the_cache_had(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--batch-size", 4, "--num-workers", 0, "--seconds"]
    with serving(dataset) as server:
        found = answer("bench", server.url, *options, 0.2)["reading"]
        assert found["requests"] > 0
        assert found["bytes_per_request"] > 0
        assert found["cache_hits"] == found["cache_misses"] == 0
        assert 0 < found["waiting"] <= 1
        monkeypatch.setenv("ENERGON_CACHE_DIR", str(tmp_path / "cache"))
        results = (output_of("bench", server.url, *options, seconds) for seconds in (0.2, 2, 20))  # a busy machine
        assert any(re.search(r"^Node cache: [1-9]\d*% of ", result, re.MULTILINE) for result in results)


def test_a_mix_of_types_that_the_encoder_makes_one_of(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench_of_types.py").write_text(
        "from energon_bridge import DefaultTaskEncoder\n"
        "class Keys(DefaultTaskEncoder):\n"
        "    def encode_sample(self, sample):\n"
        "        return {'__key__': sample['__key__']}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mix = mix_of(tmp_path / "mix.yaml", typed=dataset, crude=crude_conversations(tmp_path / "crude"))
    flags = ["--batch-size", 4, "--num-workers", 0, "--seconds", 0.2, "--encoder", "bench_of_types:Keys"]
    found = answer("bench", mix, *flags)
    del sys.modules["bench_of_types"]
    assert found["reading"]["samples"] >= 4
    assert found["rates"][0]["samples"] >= 4


def test_an_encoder_for_megatron_energon_is_told_how_it_runs(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "written_for_it.py").write_text("from megatron.energon import DefaultTaskEncoder as Mine\n")
    monkeypatch.chdir(tmp_path)
    flags = ["--batch-size", 4, "--num-workers", 0, "--seconds", 0.2, "--encoder", "written_for_it:Mine"]
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.energon") is None:
        assert "python -m energon_bridge.compat -m energon_bridge.tools.cli.main" in refusal_of(
            "bench", dataset, *flags
        )
    words = ["-m", "energon_bridge.compat", "-m", "energon_bridge.tools.cli.main", "bench", dataset, *flags]
    done = run_program([str(word) for word in words], tmp_path)
    assert "Limit: " in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("encoder", "message"), [("nowhere:x", "No module named"), ("json", "expected MODULE:NAME"), ("json:no", "has no")]
)
def test_an_encoder_that_is_not_there_is_refused(dataset: Path, encoder: str, message: str) -> None:
    assert message in refusal_of("bench", dataset, "--batch-size", 4, "--encoder", encoder)


@pytest.mark.parametrize(
    ("most", "steps"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])]
)
def test_workers_are_tried_in_powers_of_two(most: int, steps: list[int]) -> None:
    assert bench.numbers_of_workers(most) == steps


@pytest.mark.parametrize(("rate", "shown"), [(0.0423, "0.042"), (9.4, "9.4"), (10.4, "10"), (1234.5, "1,23")])
def test_slow_rates_are_not_shown_as_none(rate: float, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(RATE, samples_per_second=rate)
    measured = bench.Measured(cores=2, load_average=0.0, reading=READING, rates=(slow,), workers=0, limit="", advice="")
    bench._print_rates(measured)
    assert re.search(rf"\(fastest\)\W+{re.escape(shown)}", capsys.readouterr().out)


def test_what_limits_is_named() -> None:
    two = replace(RATE, workers=2, samples_per_second=1900.0, training_cpu=0.1)

    def judged(reading: bench.Rate, *rates: bench.Rate, cores: int = 2) -> str:
        return " | ".join(bench.judge(reading, list(rates), rates[-1], cores))

    assert judged(READING, RATE, two).startswith("the cores: 95% of 2 are busy, most of it with decoding and batching")
    assert "image_target" in judged(READING, RATE, two)
    assert "the hooks of the task encoder | a profile" in judged(READING, replace(RATE, encode=5e-3), two)
    assert judged(replace(READING, load=1e-2), RATE, two).endswith("larger shards; or more cores")
    assert judged(READING, RATE, replace(two, waiting=0.7)).startswith("the store: 70% of the time")
    assert "| more --num-workers, no limit on the samples" in judged(READING, RATE, replace(two, waiting=0.7))
    assert "None" not in judged(READING, RATE, replace(two, waiting=0.7)) + judged(replace(READING, load=1), RATE, two)
    enough = replace(RATE, workers=1, waiting=0.7)
    assert bench.judge(READING, [RATE, enough, two], enough, 2)[1].startswith("no limit on the samples of a slice")
    assert judged(READING, RATE, replace(two, training_cpu=0.9), cores=8).startswith("the training process")
    assert judged(READING, RATE, two, cores=8).startswith("the number of workers: the largest number tried, 2")


def test_where_reading_limits_no_workers_are_not_the_advice() -> None:
    slow = replace(RATE, samples_per_second=30.0, training_cpu=0.1, load=3e-2)
    limit, advice = bench.judge(replace(READING, load=3e-2), [slow, replace(slow, workers=2)], slow, 8)
    assert limit.startswith("reading: ")
    assert "num_workers" not in advice


def test_a_difference_that_two_runs_do_not_show_is_left_out() -> None:
    """1,000 us of reading beside 1,020 us of everything: a machine that was a little slower, or less."""
    for load in (2e-4, 2.2e-4):
        measured = bench.Measured(
            cores=2,
            load_average=0.0,
            reading=replace(READING, load=1e-3),
            rates=(replace(RATE, load=load),),
            workers=0,
            limit="",
            advice="",
        )
        (said,) = bench.report(measured)
        assert said == "Time for a sample, without workers: reading 1,000 us, the hooks of the task encoder 100 us"


@pytest.mark.parametrize(
    ("making", "training_cpu", "limit"),
    [
        (0.9, 0.9, "making batches (90% of their time)"),
        (0.5, 0.9, "the training process: batches of fewer bytes"),
        (0.5, 0.2, "the way here: they make batches in 50% of their time"),
    ],
)
def test_it_says_what_limits_a_cluster(making: float, training_cpu: float, limit: str) -> None:
    cluster = replace(RATE, workers=4, making=making, training_cpu=training_cpu, samples_per_second=800.0)
    said = bench.judge_cluster(cluster, replace(RATE, workers=4))
    assert said.startswith(f"4 workers there make 0.80 of the samples of 4 processes here; the limit is {limit}")


# Memory --------------------------------------------------------------------------------------------------------------

ENCODERS = """
import torch
from energon_bridge import DefaultTaskEncoder

class Packs(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        return {"__key__": sample.__key__, "tokens": torch.tensor(list(bytes(sample.text)))}

    def select_samples_to_pack(self, samples):
        return [samples[low : low + 8] for low in range(0, len(samples), 8)]

    def pack_selected_samples(self, samples):
        return {"__key__": samples[0]["__key__"], "tokens": torch.cat([one["tokens"] for one in samples])[:4096]}

texts = pictures = DefaultTaskEncoder()
packs = Packs()
"""
RUN = """
import json, multiprocessing, sys
from itertools import islice
import memory_encoders
from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset

kind, data, workers, settings = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])

def pages(process):
    rows = [line.split() for line in list(open(f"/proc/{process}/smaps_rollup"))[1:]]
    return {row[0][:-1]: 1024 * int(row[1]) for row in rows}

config = WorkerConfig(num_workers=workers)
dataset = get_train_dataset(data, task_encoder=getattr(memory_encoders, kind), worker_config=config, **settings)
loader = get_savable_loader(dataset)
most = 0
for step, _ in enumerate(islice(loader, 2000)):
    if step % 200 == 199:
        own = pages("self")
        all = [own, *(pages(child.pid) for child in multiprocessing.active_children())]
        libraries = own["Rss"] - own["Anonymous"] - own["Pss_Shmem"]
        most = max(most, libraries + sum(one["Pss_Anon"] + one["Pss_Shmem"] for one in all))
print(most)
loader.close()
"""
SETTINGS = {
    "texts": {"batch_size": 16},
    "pictures": {"batch_size": 8},
    "packs": {"batch_size": 1, "packing_buffer_size": 50},
}


def kinds_of_data(root: Path) -> dict[str, Path]:
    """Write texts of 0.2 to 3 KB, and photographs of 320 x 240."""
    throw = random.Random(3)

    def photograph(number: int) -> bytes:
        values = np.random.default_rng(number).integers(0, 255, (24, 32, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(values).resize((320, 240)).save(file, "JPEG")
        return file.getvalue()

    found = {}
    for name, fields, count, sample in (
        ("TextSample", {"text": "txt"}, 1000, lambda _: {"txt": b"word " * throw.randrange(40, 600)}),
        ("CaptioningSample", {"image": "jpg", "caption": "txt"}, 150, lambda n: {"jpg": photograph(n), "txt": b"a"}),
    ):
        (root / name / "train").mkdir(parents=True)
        for shard in range(4):
            samples = {f"{shard}-{number:05d}": sample(number) for number in range(count)}
            write_shard(root / name / "train" / f"{shard}.tar", samples)
        yaml = render_dataset_yaml(name, fields)
        prepare_dataset(root / name, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml, key_index=False)
        found[name] = root / name
    return {"texts": found["TextSample"], "packs": found["TextSample"], "pictures": found["CaptioningSample"]}


LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))


@pytest.mark.parametrize("workers", [0, 2, 8] if LONG else [2])
@pytest.mark.parametrize("kind", SETTINGS if LONG else ["packs"])
def test_memory_is_that_of_a_run(tmp_path: Path, kind: str, workers: int) -> None:
    """By `bench` and `plan`, beside what all processes of a run of 2,000 steps have: within 20 %."""
    (tmp_path / "memory_encoders.py").write_text(ENCODERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    data = kinds_of_data(tmp_path)[kind]

    def ask(*command: object) -> str:
        words = [sys.executable, *map(str, command)]
        return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout

    energon = ("-c", "from energon_bridge.tools.cli.main import main; main()")
    flags = [word for name, value in SETTINGS[kind].items() for word in (f"--{name.replace('_', '-')}", value)]
    more = ("--num-workers", workers, "--seconds", 2 if LONG else 1, "--encoder", f"memory_encoders:{kind}", "--json")
    (tmp_path / "bench.json").write_text(ask(*energon, "bench", data, *flags, *more))
    plan = ("plan", data, "--steps", 2000, *flags[:2], "--num-workers", workers, "--json")
    needs = json.loads(ask(*energon, *plan, "--bench", tmp_path / "bench.json", "--step-seconds", 1))["needs"]
    run = int(ask("-c", RUN, kind, data, workers, json.dumps(SETTINGS[kind])))
    assert needs["memory"] == pytest.approx(run, rel=0.2)
    assert (needs["worker_memory"] > 0) == (workers > 0)

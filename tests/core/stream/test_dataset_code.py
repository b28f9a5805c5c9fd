"""Code that comes with datasets (sample loaders, part filters, joiners) draws keyed random numbers, like any hook."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import check_resumes, config_of, counts_of, deliver, digest, loaders_of
from keyed import join, keyed_dataset, shards, shuffled, write_mix

from energon_bridge import DefaultTaskEncoder, TextSample, get_savable_loader, get_train_dataset, register_joiner
from energon_bridge.core.errors import FatalSampleError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.lint import lint_dataset, lint_parts
from energon_bridge.tools.testing import write_shard

KEYS = [f"{number:03d}" for number in range(40)]

CODE = """
import random
import numpy as np
import torch
from energon_bridge import SkipSample
from energon_bridge.core.errors import FatalSampleError

def noise():
    return f"{random.random()} {np.random.random()} {torch.rand(())}"

def sample_loader(parts):
    assert random.random() >= 0  # any draw of another sample's would show below
    if parts["__key__"] == "007":
        raise ValueError("no seven")
    if parts["__key__"] == "008":
        raise SkipSample
    return {"text": f"{sorted(parts)} {noise()}"}

def part_filter(name):
    return random.random() < 0.5
"""
LOADER = b"__module__: megatron.energon\n__class__: TextSample\nsample_loader: code.py\n"
NAMES = [f"p{number}.txt" for number in range(8)]


@register_joiner
def noisy(first: Any, second: Any) -> TextSample:
    noise = f"{random.random()} {np.random.random()} {torch.rand(())}"
    return TextSample(__key__=first.__key__, text=f"{first.text} + {second.text} {noise}")


def with_code(folder: Path, yaml: bytes, keys: list[str], **kwargs: Any) -> Path:
    keyed_dataset(folder, train=shards(keys, 11, 14, 15), **kwargs)
    (folder / ".nv-meta" / "code.py").write_text(CODE)
    (folder / ".nv-meta" / "dataset.yaml").write_bytes(yaml)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    with_code(folder / "a", LOADER, KEYS)
    with_code(folder / "b", LOADER, shuffled(KEYS))
    samples = {f"f{number}": dict.fromkeys(NAMES[number % 3 :], b"text") for number in range(12)}
    filtered = folder / "filtered"
    filtered.mkdir()
    write_shard(filtered / "shard.tar", samples)
    prepare_dataset(filtered, split=parse_patterns(["train:.*"]), dataset_yaml=LOADER + b"part_filter: code.py\n")
    (filtered / ".nv-meta" / "code.py").write_text(CODE)
    noisily = {"__module__": __name__, "__function__": "noisy"}
    write_mix(folder / "joined.yaml", train=join(joiner=noisily))
    write_mix(folder / "plain.yaml", train={"path": "./a"})
    write_mix(folder / "filter.yaml", train={"path": "./filtered"})
    write_mix(folder / "blend.yaml", train={"blend": [join(joiner=noisily), {"path": "./a"}]})
    return folder


def trained(folder: Path, name: str, **kwargs: Any) -> Any:
    settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 7, "max_samples_per_sequence": 3}
    settings |= {"worker_config": config_of(1, 0), "trust_remote_code": True}
    return get_train_dataset(folder / f"{name}.yaml", task_encoder=DefaultTaskEncoder(), **settings | kwargs)


def test_excluded_samples_are_left_out(tmp_path: Path) -> None:
    folder = with_code(tmp_path / "a", LOADER, KEYS, exclude=["train/0.tar/003"])
    settings: dict[str, Any] = {"worker_config": config_of(1, 0), "trust_remote_code": True}
    loader = get_savable_loader(get_train_dataset(folder, batch_size=1, repeat=False, **settings))
    assert {key for batch in loader for key in batch.__key__} == {*KEYS} - {"003", "007", "008"}
    assert counts_of(loader.save_state_rank())["excluded"] == 1


def test_a_loader_may_hand_on_what_the_reader_sets(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "a")
    code = (
        "def sample_loader(parts):\n"
        "    return {**{name: parts[name] for name in ('__restore_key__', '__sources__')}, '__subflavors__': 'other',\n"
        "            '__key__': 'my ' + parts['__key__'], 'text': 'a'}\n"
    )
    (tmp_path / "a" / ".nv-meta" / "code.py").write_text(code)
    config = config_of(1, 0)
    dataset = get_train_dataset(tmp_path / "a", batch_size=1, worker_config=config, trust_remote_code=True)
    batch = next(iter(get_savable_loader(dataset)))
    assert batch.__key__[0].startswith("my ")
    assert batch.__subflavors__[0] == {}
    assert batch.__restore_key__ != [()]
    assert batch.__sources__[0].shard_name in dataset.leaves[0].dataset.shard_names
    (train,), _ = lint_parts(tmp_path / "a", trust_remote_code=True)
    assert [report.problems for report in lint_dataset(train)] == [()] * 3


@pytest.mark.parametrize("name", ["filter", "blend"])
def test_the_stream_is_the_same_on_every_topology_and_resumes(folder: Path, name: str) -> None:
    dataset = trained(folder, name)
    check_resumes(dataset)
    (loader,) = loaders_of(dataset, 1, 0, decode_threads=4)
    assert deliver([loader], 20).digests == deliver(loaders_of(dataset, 1, 0), 20).digests


def test_batches_are_restored_by_their_keys(folder: Path) -> None:
    with closing(get_savable_loader(trained(folder, "joined"))) as loader:
        batches = [batch for _, batch in zip(range(6), loader, strict=False)]
        random.random()
        assert [digest(loader.restore_sample(batch.__restore_key__)) for batch in batches] == [*map(digest, batches)]


def test_the_training_loops_own_generators_are_left_alone(folder: Path) -> None:
    def own(name: str | None) -> list[float]:
        random.seed(3)
        torch.manual_seed(3)
        if name:
            with closing(get_savable_loader(trained(folder, name))) as loader:
                next(iter(loader))
        return [random.random(), float(torch.rand(()))]

    assert own("joined") == own("plain") == own(None)


def test_code_runs_where_hooks_run(folder: Path) -> None:
    threads = set()

    def joiner(first: Any, second: Any) -> Any:
        threads.add(threading.current_thread())
        return first

    mix = {"__class__": "MetadatasetV2", "splits": {"train": join(joiner=joiner)}}
    for entry in mix["splits"]["train"]["join"]:
        entry["path"] = str(folder / entry["path"])
    dataset = get_train_dataset(mix, batch_size=2, trust_remote_code=True, worker_config=config_of(1, 0))
    with closing(get_savable_loader(dataset, worker_config=config_of(1, 0, decode_threads=2))) as loader:
        next(iter(loader))
    assert threads == {threading.current_thread()}


def test_a_filter_is_asked_once_for_each_name(folder: Path) -> None:
    dataset = trained(folder, "filter")
    asked: Counter[str] = Counter()
    (leaf,) = dataset.leaves

    def part_filter(name: str) -> bool:
        asked[name] += 1
        return True

    object.__setattr__(leaf.dataset, "part_filter", part_filter)
    deliver(loaders_of(dataset, 1, 0), 30)
    assert asked == dict.fromkeys(NAMES, 1)


def test_failures_are_counted_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = loaders_of(trained(folder, "plain"), 1, 0)
    epoch = {key for _, batch in zip(range(60), loader, strict=False) for key in batch.__key__}
    assert epoch == set(KEYS) - {"007", "008"}
    counts = counts_of(loader.save_state_rank())
    assert counts["skipped"] >= 3
    assert counts["errors"] >= 3
    assert "sample_loader" in caplog.text
    assert "no seven" in caplog.text
    assert "007" in caplog.text


@pytest.mark.parametrize(
    ("name", "function", "complaint"),
    [
        ("plain", "sample_loader", "sample_loader returned None: return a dict of fields, or raise SkipSample"),
        ("filter", "part_filter", "part_filter returned None: return True or False"),
        ("joined", "joiner", r"the joiner .*<lambda> returned None: return the sample, or raise SkipSample"),
    ],
)
def test_functions_that_return_nothing_stop_the_run(folder: Path, name: str, function: str, complaint: str) -> None:
    dataset = trained(folder, name)
    (leaf,) = dataset.leaves
    object.__setattr__(leaf.dataset, function, lambda *arguments: None)
    (loader,) = loaders_of(dataset, 1, 0)
    with pytest.raises(FatalSampleError, match=f"^{function}: .*{complaint}"):
        next(iter(loader))

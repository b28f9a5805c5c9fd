"""Training code written for megatron-energon runs as it is under the drop-in, and sees the same samples as there.

The programs in `dropin/` import `megatron.energon` and nothing of ours. What comes in an order of its own in both
packages (training) is compared as what an epoch holds; validation is compared as it comes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - imported once, for all processes that are forked
from forked import run_forked, run_program
from keyed import CRUDE
from paths import REPOSITORY

from energon_bridge.compat.__main__ import main
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

PROGRAMS = Path(__file__).with_name("dropin")

SKIPPED = (4, 9, 14)  # of the references for training: validation counts draws, and so has shorter batches here
MIX = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend_epochized:
      - {repetitions: 2, path: notes, subflavors: {kind: notes}}
      - {repetitions: 1, path: references, subflavors: {kind: references}, aux: {library: library}}
  val:
    blend:
      - {path: notes, subflavors: {kind: notes}}
      - {path: references, subflavors: {kind: references}, aux: {library: library}}
"""
QUESTIONS = """
sample_type: {__module__: megatron.energon, __class__: VQASample}
part_filter: sample_loader.py:part_filter
sample_loader: sample_loader.py:sample_loader
"""


def write_crude(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    """Write a crude dataset of two shards for training, with one more for validation."""
    keys = list(samples)
    third = len(keys) // 3
    shards = {"train/0.tar": keys[:third], "train/1.tar": keys[third : 2 * third], "val/0.tar": keys[2 * third :]}
    for name, own in shards.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_shard(path / name, {key: samples[key] for key in own})
    prepare_dataset(path, split=parse_patterns(["train:train/.*", "val:val/.*"]), dataset_yaml=CRUDE)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dropin")
    notes = {
        f"note{n:03d}": {"txt": f"note {'x' * (n % 17)}".encode(), "json": json.dumps({"weight": n / 8}).encode()}
        for n in range(30)
    }
    references = {
        f"ref{n:03d}": {
            "txt": f"r{n}".encode(),
            "json": json.dumps({"reference": None if n in SKIPPED else f"page{n % 7}.txt"}).encode(),
        }
        for n in range(24)
    }
    library = {f"page{n}": {"txt": f"page {n}{'!' * n}".encode()} for n in range(9)}
    for name, samples in (("notes", notes), ("references", references), ("library", library)):
        write_crude(root / name, samples)
    (root / "mix.yaml").write_text(MIX)
    create_captioning_test_dataset(root / "captions", num_train=40, num_val=10)
    questions = create_captioning_test_dataset(root / "questions", num_train=40, num_val=10)
    (questions / ".nv-meta/dataset.yaml").write_text(QUESTIONS)
    shutil.copy(PROGRAMS / "sample_loader.py", questions / ".nv-meta/sample_loader.py")
    return root


Program = Callable[..., Any]


def run_with_ours(program: str, *arguments: Any) -> Any:
    """Run a program once as `python -m energon_bridge.compat` does, in a process forked from this one."""
    return _run_once(program, *map(str, arguments))


@cache
def _run_once(program: str, *arguments: str) -> Any:
    def child() -> str:
        output = io.StringIO()
        sys.path.insert(0, "")
        with contextlib.redirect_stdout(output):
            main(["--trust-remote-code", str(PROGRAMS / program), *arguments])
        return output.getvalue()

    return json.loads(run_forked(1, lambda _: child())[0].splitlines()[-1])


@pytest.fixture
def run_with_rival(run_rival: Callable[..., str]) -> Program:
    """Return a function that runs a program with megatron-energon itself."""
    return lambda program, *arguments: json.loads(run_rival(PROGRAMS / program, *arguments).splitlines()[-1])


def check_provider(run: Program, data: Path, states: Path) -> dict[str, Any]:
    """Run the provider's loop, stop, and go on; return what it saw, training by sample, sorted."""
    parts = [run("provider.py", data / "captions", states, start) for start in (0, 5)]
    seen = [microbatch for part in parts for microbatch in part["train"]]
    # Two stretches of 40 samples: each an epoch of the dataset, the second one continued from the state.
    epochs = [Counter(key for keys, _, _ in half for key in keys) for half in (seen[:10], seen[10:])]
    assert [set(epoch.values()) for epoch in epochs] == [{1}, {1}]
    assert parts[0]["valid"] == parts[1]["valid"]
    rows = sorted([key, caption] for keys, captions, _ in seen for key, caption in zip(keys, captions, strict=True))
    return {"train": rows, "valid": parts[0]["valid"]}


@pytest.mark.parametrize("mode", ["val", "packed"])
def test_an_encoder_runs_as_it_is(mode: str, data: Path) -> None:
    seen = run_with_ours("encoder.py", data / "mix.yaml", mode)
    if mode == "val":
        keys = [key for batch in seen for row in batch["keys"] for key in row]
        assert keys == [f"note{n:03d}" for n in range(20, 30)] + [f"ref{n:03d}" for n in range(16, 24)]
    else:
        assert Counter(Counter(seen).values()) == {2: 20, 1: 16 - len(SKIPPED)}


def test_commands_run_an_encoder_as_a_program_does(data: Path, tmp_path: Path) -> None:
    mix, state = str(data / "mix.yaml"), str(tmp_path / "state.pt")
    real = run_with_ours("encoder.py", mix, "saved", state)
    packing = "--encoder encoder:PackingEncoder --batch-size 2 --packing-buffer-size 8 --num-workers 0"
    order = "--shuffle-buffer-size 8 --max-samples-per-sequence 5"

    def answer(*words: str) -> Any:
        def child(rank: int) -> str:
            output = io.StringIO()
            sys.path.insert(0, str(PROGRAMS))
            with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
                main(["-m", "energon_bridge.tools.cli.main", *words, "--json"])
            return output.getvalue()

        return json.loads(run_forked(1, child)[0])

    def shown(steps: str, *source: str) -> list[list[list[str]]]:
        found: dict[int, list[list[str]]] = {}
        for sample in answer("preview", *source, "--steps", steps, *f"{packing} {order}".split())["samples"]:
            rows = found.setdefault(sample["step"], [[], []])
            rows[sample["row"]].append(sample["key"])
        return list(found.values())

    assert shown("0:10", mix) == real
    assert shown("5:10", state, "--mix", mix) == real[5:]
    assert answer("lint", mix, "--encoder", "encoder:Encoder")["problems"] == []


def test_a_provider_runs_as_it_is(data: Path) -> None:
    valid = check_provider(run_with_ours, data, data / "states")["valid"]
    assert [len(keys) for keys in valid[0]] == [4, 4, 2, 4, 4, 2]
    assert valid[0][:3] == valid[0][3:]


def test_a_sample_loader_runs_as_it_is(data: Path) -> None:
    seen = run_with_ours("visual_questions.py", data / "questions")
    assert [len(batch) for batch in seen["val"]] == [3, 3, 3, 1]
    assert seen["val"][0][0][2] == "What is shown in val-00000?"


def test_encoders_in_the_ways_of_public_code_run_as_they_are(data: Path) -> None:
    seen = run_with_ours("encoders.py", data, data)
    assert seen["packed"]["packs"]
    assert "__valid__" not in seen["packed"]["fields"]
    assert [[len(keys) for keys, _ in one] for one in seen["limited"]] == [[3, 3, 2, 2, 3]] * 2
    assert len(seen["cooked"]["keys"]) == 15


@pytest.mark.parametrize("workers", [0, 2])
def test_wrappers_run_as_they_are(data: Path, workers: int) -> None:
    seen = run_with_ours("wrappers.py", data / "captions", workers)
    kept = {key for key, _ in seen["filtered"][0]}
    assert kept == {f"train-{n:05d}" for n in range(40) if n % 10 != 3}
    assert {key for key, _ in seen["pieces"]} == {f"train-{n:05d}" for n in range(40) if n % 10 != 7}
    assert (seen["once False"], seen["once True"]) == ([40, 40], [36, 36])
    assert seen["blended"] == [True, 80]
    assert seen["val"] == [[[f"val-{n:05d}" for n in (k, k + 1, k + 2)] for k in (0, 3, 6)]] * 2 or workers


def test_wrappers_may_stand_for_the_encoding(data: Path) -> None:
    seen = run_with_ours("own_encoding.py", data / "notes")
    texts = [f"NOTE {'X' * (n % 17)}" for n in range(20, 30)]
    assert list(chain(*seen["Instead"])) == [f"{text}!" for text in texts]
    assert seen["Several"] == [f"{text}! (encoded)" for text in texts[::2]]
    assert list(chain(*seen["Around"])) == [f"{text}! (ENCODED)!" for text in texts]
    assert seen["in turn"] == [2, 2, 2, 2, 2, 2, 0, 2, *[0] * 8, 2, 2, 2, 2, 2, 0, 0]
    assert seen["keys"] == [["list", ["int", "list", "str"]]] * 2
    # Of megatron-energon 7.4.1, with the seed 42 and sample 7.
    assert seen["seeds"][0] == [0.42939415602345277, 0.3583916644665619, 0.7482649683952332]


def test_details_are_as_programs_expect(data: Path) -> None:
    seen = run_with_ours("details.py", data / "captions", data / "copy")
    assert seen["version"] == "7.4.1"
    assert seen["arrays"]["lengths"] == "torch.int32"
    assert seen["cookers"] == [True, True, False, False]
    assert seen["handled"] == [["KeyError", "val-00003", [["val-00003.png", "val-00003.txt"]]]]
    assert seen["stopped 0"] == seen["stopped 1"] == [True, True]
    assert seen["prepared"] == ["png", "txt"]


COMPARED = [
    "details.py {data}/captions {own}/copy",
    "wrappers.py {data}/captions 0",
    "wrappers.py {data}/captions 2",
    "encoders.py {data} {own}",
    "visual_questions.py {data}/questions",
    "own_encoding.py {data}/notes",
    *(f"encoder.py {{data}}/mix.yaml {mode}" for mode in ("val", "train", "grouped", "packed")),
]


@pytest.mark.rival
@pytest.mark.slow
@pytest.mark.parametrize("line", COMPARED)
def test_a_program_sees_the_same(line: str, data: Path, tmp_path: Path, run_with_rival: Program) -> None:
    ours, theirs = (line.format(data=data, own=own).split() for own in (data, tmp_path))
    assert run_with_ours(*ours) == run_with_rival(*theirs)


@pytest.mark.rival
@pytest.mark.slow
def test_a_provider_sees_the_same_samples(data: Path, tmp_path: Path, run_with_rival: Program) -> None:
    ours = check_provider(run_with_ours, data, data / "states")
    assert ours == check_provider(run_with_rival, data, tmp_path)


VALIDATION = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train: {path: captions}
  val:
    blend:
      - {path: captions}
      - {path: more, subset: {range: [25%, 100%]}}
      - {path: questions}
"""


@pytest.mark.rival
@pytest.mark.slow
def test_validation_has_the_order_of_ranks_and_workers(data: Path, run_with_rival: Program) -> None:
    create_captioning_test_dataset(data / "more", num_train=9, num_val=23)
    create_captioning_test_dataset(data / "others", num_train=9, num_val=8)
    (data / "validation.yaml").write_text(VALIDATION.replace("questions", "others"))
    ours, rivals = (run("validation.py", data / "validation.yaml") for run in (run_with_ours, run_with_rival))
    assert ours.keys() == rivals.keys()
    for case, expected in rivals.items():
        assert ours[case] == expected, case


# Of the calls in the documents one of each kind; ENERGON_LONG_TESTS=1 runs all.
DOCUMENTED = "basic_usage or usage_of_the_library or blending or tutorial_2"


def test_the_published_introductions_run_under_their_own_module_name() -> None:
    documents = Path(__file__).with_name("test_source_documents.py")
    chosen = [] if os.environ.get("ENERGON_LONG_TESTS") else ["-k", DOCUMENTED]
    command = ["-m", "energon_bridge.compat", "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(documents)]
    command += ["-o", "faulthandler_timeout=0"]  # its lock is held in a fork
    result = run_program(command, REPOSITORY, {"ENERGON_MODULE": "megatron.energon"})
    assert result.returncode == 0, result.stdout[-4000:]
    assert "passed" in result.stdout

"""Datasets that megatron-energon 7.4.1 prepared give the samples that it gives, wherever their bytes live."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
from paths import FIXTURES
from rival_fixtures import EXPECTED, Encoder, plain, rendered, validation

from energon_bridge import Cooker, FileStore, TextSample, WorkerConfig, basic_sample_keys, get_loader, get_train_dataset
from energon_bridge.core.samples import CrudeSample

PLAIN = ["captioning", "vqa", "captioning_extra", "crude", "aux_images"]
LEAVES = [leaf for leaf in EXPECTED if leaf.partition(":")[0] in PLAIN]


def cook(sample: CrudeSample, pictures: FileStore, files: FileStore) -> TextSample:
    """Cook as the cooker did that expected.json was made with."""
    name = sample["json"]["image"]
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    parts |= {"pictures": pictures.get(name, sample), "files": files.get(name, sample)}
    return TextSample(**basic_sample_keys(sample), text=json.dumps(plain(parts), sort_keys=True))


class CookingEncoder(Encoder):
    cookers = (Cooker(cook, has_subflavors={"kind": "chat"}),)


@pytest.mark.parametrize(("leaf", "num_workers"), [*((leaf, 0) for leaf in LEAVES), (LEAVES[0], 2)])
def test_samples_are_those_of_megatron_energon(leaf: str, num_workers: int) -> None:
    name, _, split_part = leaf.partition(":")
    assert validation(FIXTURES / name, split_part, num_workers) == EXPECTED[leaf]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_joined_samples_are_those_of_megatron_energon(fixtures: Path, num_workers: int) -> None:
    assert validation(fixtures / "joined.yaml", "train", num_workers) == EXPECTED["joined.yaml:train"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cooked_samples_are_those_of_megatron_energon(num_workers: int) -> None:
    """With pictures from a prepared dataset and from a folder of files."""
    assert validation(FIXTURES / "aux.yaml", "train", num_workers, CookingEncoder()) == EXPECTED["aux.yaml:train"]


def test_every_plain_dataset_was_compared() -> None:
    present = {path.name for path in FIXTURES.iterdir() if (path / ".nv-meta").is_dir()}
    assert present == {leaf.partition(":")[0] for leaf in LEAVES} == set(PLAIN)


# Wherever the bytes live ---------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    """Copy the datasets into fsspec's memory file system and return their URL."""
    files = fsspec.filesystem("memory")
    for path in FIXTURES.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/energon-fixtures/{path.relative_to(FIXTURES).as_posix()}", path.read_bytes())
    yield "memory://energon-fixtures"
    files.rm("/energon-fixtures", recursive=True)


def stream(path: str | Path, num_workers: int, steps: int = 20, state: Any = None) -> tuple[list[Any], Any]:
    """Return some training batches, rendered, and the state after them."""
    dataset = get_train_dataset(
        path,
        batch_size=2,
        shuffle_buffer_size=5,
        max_samples_per_sequence=3,
        task_encoder=Encoder(),
        worker_config=WorkerConfig(num_workers=num_workers, rank=0, world_size=1, seed=3, num_lanes=4),
    )
    loader = get_loader(dataset)
    if state is not None:
        loader.restore_state_rank(state)
    batches = [rendered(batch) for batch in islice(loader, steps)]
    state = loader.save_state_rank()
    loader.close()
    return batches, state


@pytest.mark.parametrize("leaf", LEAVES)
def test_samples_from_memory_are_the_same(leaf: str, memory: str) -> None:
    name, _, split_part = leaf.partition(":")
    assert validation(f"{memory}/{name}", split_part, 0) == EXPECTED[leaf]


@pytest.mark.parametrize(("name", "num_workers"), [("captioning", 0), ("vqa", 2)])
def test_the_training_stream_does_not_depend_on_the_storage(name: str, num_workers: int, memory: str) -> None:
    local, _ = stream(FIXTURES / name, 0)
    assert stream(f"{memory}/{name}", num_workers)[0] == local
    assert len({key for batch in local for key in batch["__key__"]}) == len(EXPECTED[f"{name}:train"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_where_the_folder_was_moved(fixtures: Path, tmp_path: Path, num_workers: int) -> None:
    whole, _ = stream(fixtures / "captioning", 0)
    before, state = stream(fixtures / "captioning", num_workers, steps=7)
    moved = shutil.move(fixtures / "captioning", tmp_path / "elsewhere")
    after, _ = stream(moved, num_workers, steps=13, state=state)
    assert before + after == whole


def test_a_run_goes_on_in_another_storage(memory: str) -> None:
    whole, _ = stream(FIXTURES / "captioning", 0)
    before, state = stream(FIXTURES / "captioning", 0, steps=7)
    after, _ = stream(f"{memory}/captioning", 2, steps=13, state=state)
    assert before + after == whole

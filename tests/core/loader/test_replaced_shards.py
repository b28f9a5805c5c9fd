"""A shard of a prepared dataset that is damaged or replaced: which states resume, and what comes then."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from commands import output_of
from engine import text_dataset, train_dataset

from energon_bridge import ErrorPolicy, get_savable_loader
from energon_bridge.core.errors import DatasetMismatchError
from energon_bridge.tools.testing import write_shard

SHARD = "train/shard_001.tar"
COUNTS = [12, 9, 14]
TEXT = "a longer text" * 400
LOST = [f"{number:05d}" for number in range(12, 21)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return text_dataset(tmp_path / "data", train=COUNTS)


def keys(loader: Any, count: int) -> list[list[str]]:
    return [batch.__key__ for batch in islice(loader, count)]


def begun(data: Path, batches: int = 7) -> tuple[Any, list[list[str]]]:
    """Return the state of a run after some microbatches, and those that follow."""
    loader = get_savable_loader(train_dataset(data))
    keys(loader, batches)
    state = loader.save_state_rank()
    return state, keys(loader, 40)


def test_the_same_bytes_resume(data: Path) -> None:
    state, following = begun(data)
    good = (data / SHARD).read_bytes()
    (data / SHARD).write_bytes(good[:5000])
    with pytest.raises(DatasetMismatchError, match=r"the content changed(.|\n)*`energon lint` names damaged"):
        get_savable_loader(train_dataset(data)).restore_state_rank(state)
    (data / SHARD).write_bytes(good)
    loader = get_savable_loader(train_dataset(data))
    loader.restore_state_rank(state)
    assert keys(loader, 40) == following


def test_a_file_of_zeros_resumes_without_its_samples_and_all_others_in_place(data: Path) -> None:
    """As a run on the whole data does that withdraws them."""
    state, _ = begun(data)
    banning = get_savable_loader(train_dataset(data))
    banning.restore_state_rank(state)
    banning.ban(LOST)
    expected = keys(banning, 40)
    size = (data / SHARD).stat().st_size
    (data / SHARD).write_bytes(b"")
    os.truncate(data / SHARD, size)
    loader = get_savable_loader(train_dataset(data, error_policy=ErrorPolicy(tolerance=0)))
    loader.restore_state_rank(state)
    assert keys(loader, 40) == expected
    assert loader.metrics()["errors"] > 0


def test_other_bytes_are_prepared_and_resume_by_adapting(data: Path) -> None:
    """Old states are refused, before and after."""
    state, following = begun(data)
    write_shard(data / SHARD, {key: {"txt": TEXT.encode()} for key in LOST[:-1]})
    with pytest.raises(DatasetMismatchError, match=r"the content changed(.|\n)*`energon lint` names damaged"):
        get_savable_loader(train_dataset(data)).restore_state_rank(state)
    split = data / ".nv-meta/split.yaml"
    before = split.read_bytes()
    output_of("prepare", data, "--tar-index-only", "--no-progress")
    assert split.read_bytes() == before
    loader = get_savable_loader(train_dataset(data))
    with pytest.raises(DatasetMismatchError, match=r"the content changed(.|\n)*`energon lint` names damaged"):
        loader.restore_state_rank(state)
    loader.restore_state_rank(state, on_mismatch="adapt")
    texts = {key: text for batch in islice(loader, 60) for key, text in zip(batch.__key__, batch.text, strict=True)}
    assert {key for key, text in texts.items() if text == TEXT} == {*LOST[:-1]}
    assert texts.keys() >= {key for keys in following for key in keys} - {*LOST}


def test_another_subset_is_said(tmp_path: Path) -> None:
    text_dataset(tmp_path / "d", train=[20])

    def loader(part: str) -> Any:
        mix = tmp_path / "mix.yaml"
        head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        mix.write_text(f"{head}    path: d\n    subset: {{range: {part}}}\n")
        return get_savable_loader(train_dataset(mix))

    state = loader("[0%, 50%]").save_state_rank()
    with pytest.raises(DatasetMismatchError, match=r"10:20.*: the content, or which samples of it are taken, changed"):
        loader("[50%, 100%]").restore_state_rank(state)

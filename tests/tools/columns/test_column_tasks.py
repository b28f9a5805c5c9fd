"""Columns computed by tasks, by a cluster, and by runs that are killed: the bytes of one run that is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import energon, output_of, refusal_of
from keyed import ALL_TRAIN, TEXT
from sources import content
from tar_builder import tars_of, write_texts

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.format.parallel import Task
from energon_bridge.core.prepare import prepare_dataset
from energon_bridge.tools.columns import making as columns
from energon_bridge.tools.columns.making import add_column


def dataset(root: Path) -> Path:
    prepare_dataset(tars_of(root), split=ALL_TRAIN, dataset_yaml=TEXT, key_index=False)
    return root


def made(root: Path) -> dict[str, bytes]:
    """Return the files of the columns, and what a run left beside them."""
    return {name: data for name, data in content(root).items() if name.startswith((".nv-meta/columns", ".nv-meta."))}


def length(sample: Any) -> int:
    return len(sample.text)


def both(sample: Any) -> dict[str, Any]:
    return {"first": sample.text[0], "size": len(sample.text)}


def fails_on_nine(sample: Any) -> int:
    if sample.text == "text of 9-0":
        raise ValueError("nine")
    return 1


def test_tasks_share_the_shards_out(tmp_path: Path) -> None:
    root, expected = dataset(tmp_path / "data"), dataset(tmp_path / "other")
    output_of("columns", "add", expected, "--hash", "--num-workers", 1)
    for number in (2, 0):
        output = output_of("columns", "add", root, "--hash", "--task", f"{number}/3", "--num-workers", 1)
        assert f"Task {number}/3:" in output
    assert not (root / ".nv-meta/columns").exists()
    output = refusal_of("columns", "add", root, "--hash", "--finish", "--num-workers", 1)
    assert "3 of 10 shards were not computed by any task" in output
    assert "the first is a/s_2.tar" in output
    energon("columns", "add", root, "--hash", "--task", "1/3", "--num-workers", 2)
    output_of("columns", "add", root, "--hash", "--finish", "--num-workers", 1)
    assert made(root) == made(expected)


def test_what_tasks_did_is_of_the_shard_and_of_the_function(tmp_path: Path) -> None:
    root = dataset(tmp_path / "data")
    assert add_column(root, None, both, task=Task(0, 1)).num_samples == 30
    with pytest.raises(ConfigurationError, match="10 of 10 shards were not computed by any task"):
        add_column(root, "length", length, finish=True)
    write_texts(root, {"b/s_3.tar": ["only-1", "only-2"]})
    prepare_dataset(root, split=ALL_TRAIN, key_index=False)
    with pytest.raises(
        ConfigurationError,
        match=r"1 of 10 shards were not computed by any task, or changed since; the first is b/s_3\.tar",
    ):
        add_column(root, None, both, finish=True)
    piece = next(root.glob(".nv-meta.columns/*/a/s_0.tar.npz"))
    piece.write_bytes(b"damaged")
    add_column(root, None, both, task=Task(0, 1))
    assert add_column(root, None, both, finish=True).names == ("first", "size")
    assert not (root / ".nv-meta.columns").exists()
    assert np.load(root / ".nv-meta/columns/size.npy").size == 29


def test_a_run_that_was_stopped_goes_on_and_one_that_failed_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_MANY_SHARDS", 5)
    root = dataset(tmp_path / "data")
    computed: list[int] = []

    def counted(sample: Any) -> int:
        computed.append(1)
        return length(sample)

    def stop(done: int, _total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_column(root, "length", counted, made_of="it", progress=stop)
    add_column(root, "length", counted, made_of="it")
    assert len(computed) == 30
    with pytest.raises(SampleError, match="nine"):
        add_column(root, "other", fails_on_nine)
    assert not (root / ".nv-meta.columns").exists()

"""Data that is written again with the same names, counts and sizes: a state does not resume on it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crude import prepared
from engine import config_of

from energon_bridge import get_savable_loader, get_train_dataset
from energon_bridge.core.errors import DatasetMismatchError
from energon_bridge.core.loader import saved_run
from energon_bridge.core.loader.run_plan import plan_run

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COUNT = 200


def rows(word: str) -> Any:
    return arrow.table({"text": [f"{word} {n:06d}" for n in range(COUNT)], "n": [*range(COUNT)]})


def write_parquet(folder: Path, word: str) -> Path:
    """Without statistics and compression, so that no size tells anything."""
    parquet.write_table(
        rows(word), folder / "x.parquet", write_statistics=False, compression="none", use_dictionary=False
    )
    return folder / "x.parquet"


def write_arrow(folder: Path, word: str) -> Path:
    with arrow.OSFile(str(folder / "x.arrow"), "wb") as file, arrow.ipc.new_stream(file, rows(word).schema) as out:
        out.write_table(rows(word))
    return folder / "x.arrow"


def write_jsonl(folder: Path, word: str) -> Path:
    lines = [json.dumps({"text": f"{word} {n:06d}"}) + "\n" for n in range(COUNT)]
    (folder / "x.jsonl").write_text("".join(lines))
    return folder / "x.jsonl"


def write_tokens(folder: Path, word: str) -> Path:
    lengths = np.full(COUNT, 4, np.int32)
    np.full(4 * COUNT, ord(word[0]), np.int32).tofile(folder / "x.bin")
    with (folder / "x.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, COUNT, COUNT + 1))
        starts = 16 * np.arange(COUNT, dtype=np.int64)
        file.write(lengths.tobytes() + starts.tobytes() + np.arange(COUNT + 1, dtype=np.int64).tobytes())
    return folder / "x.idx"


KINDS: dict[str, Callable[[Path, str], Path]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "jsonl": write_jsonl,
    "tokens": write_tokens,
}


def loader_of(path: Path, **settings: Any) -> Any:
    return get_savable_loader(get_train_dataset(path, batch_size=2, worker_config=config_of(1, 0), **settings))


def state_of(path: Path) -> Any:
    loader = loader_of(path)
    next(iter(loader))
    return loader.save_state_rank()


@pytest.mark.parametrize("kind", [*KINDS])
def test_rewritten_files_of_the_same_size_are_not_continued(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path, "horse")
    size, state = path.stat().st_size, state_of(path)
    KINDS[kind](tmp_path, "horse")
    loader_of(path).restore_state_rank(state)
    KINDS[kind](tmp_path, "mouse")
    assert path.stat().st_size == size
    with pytest.raises(DatasetMismatchError, match="written again with other content, of the same sizes"):
        loader_of(path).restore_state_rank(state)
    adapted = loader_of(path)
    adapted.restore_state_rank(state, on_mismatch="adapt")
    next(iter(adapted))


@pytest.mark.parametrize("kind", [*KINDS])
def test_data_that_is_rewritten_before_the_first_state_is_saved_is_not_continued(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path, "horse")
    loader = loader_of(path)
    next(iter(loader))
    KINDS[kind](tmp_path, "mouse")
    state = loader.save_state_rank()
    with pytest.raises(DatasetMismatchError, match="written again with other content, of the same sizes"):
        loader_of(path).restore_state_rank(state)


def test_tars_whose_samples_have_other_sizes_are_not_continued(tmp_path: Path) -> None:
    """Two samples that change their places in a tar: the count and the size of the shard stay."""
    short, long = b"x", b"x" * 2000
    path = prepared(tmp_path / "data", {"a": {"txt": short}, "b": {"txt": long}, "c": {"txt": short}})
    state = state_of(path)
    size = (path / "shard_000.tar").stat().st_size
    other = prepared(tmp_path / "other", {"a": {"txt": long}, "b": {"txt": short}, "c": {"txt": short}})
    for file in [file for file in other.rglob("*") if file.is_file()]:
        file.replace(path / file.relative_to(other))
    assert (path / "shard_000.tar").stat().st_size == size
    with pytest.raises(DatasetMismatchError, match="written again with other content"):
        loader_of(path).restore_state_rank(state)


def test_a_copy_elsewhere_is_continued_and_the_order_is_that_of_the_fingerprint(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = write_parquet(tmp_path / "here", "horse"), write_parquet(tmp_path / "there", "mouse")
    config = config_of(1, 0)
    datasets = [get_train_dataset(path, batch_size=2, worker_config=config) for path in (here, there)]
    (one,), (other,) = (plan_run(dataset, config).table for dataset in datasets)
    assert (one["identity"], one["mark"] != other["mark"]) == (other["identity"], True)
    state = state_of(here)
    (there).write_bytes(here.read_bytes())
    loader_of(there).restore_state_rank(state)


def test_a_state_without_marks_of_an_older_version_is_continued(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, "horse")
    state = state_of(path)
    old = json.loads(json.dumps(state))
    (identity,) = old["leaves"]["identities"]
    assert "+" in identity
    old["leaves"]["identities"] = [identity.partition("+")[0]]
    del old["checksum"]
    write_jsonl(tmp_path, "mouse")
    loader_of(path).restore_state_rank(saved_run.sign(old))

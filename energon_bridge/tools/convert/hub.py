"""Datasets of the Hugging Face hub by name: `hf://OWNER/NAME`, `hf://OWNER/NAME/FOLDER`, with `@REVISION` at the end.

The files are downloaded to the hub's cache (HF_HOME), which resumes after a stop, and read there like any other source.
Parquet files can also be streamed: the processes that write the shards read them by ranges, row group by row group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_bridge.core.errors import ConfigurationError, EnergonError, SourceError
from energon_bridge.tools.convert.arrow import open_remote
from energon_bridge.tools.convert.rows import Source

_PREFIX = "hf:/"  # what `Path` leaves of hf://


def is_hub(source: str | Path) -> bool:
    """Return whether a source names a dataset of the hub."""
    return str(source).startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class _Name:
    """What a source names: a repository (`OWNER/NAME`), a folder in it or "", a revision or None."""

    repository: str
    folder: str
    revision: str | None
    where: str


def _parse(source: str | Path) -> _Name:
    name, _, revision = str(source)[len(_PREFIX) :].strip("/").partition("@")
    owner, _, rest = name.partition("/")
    repository, _, folder = rest.partition("/")
    where = f"hf://{name}"
    if not owner or not repository:
        raise ConfigurationError(f"{where}: expected hf://OWNER/NAME, or hf://OWNER/NAME/FOLDER for a part of it.")
    return _Name(f"{owner}/{repository}", folder, revision or None, where)


def download(source: str | Path) -> Path:
    """Download the missing files of a dataset of the hub and return its folder; raises SourceError."""
    name = _parse(source)
    with _hub(name) as hub:
        root = hub.snapshot_download(
            name.repository,
            repo_type="dataset",
            revision=name.revision,
            allow_patterns=f"{name.folder}/*" if name.folder else None,
        )
    folder = Path(root) / name.folder
    if not folder.is_dir():
        raise SourceError(f"{name.where}: the dataset {name.repository} has no folder {name.folder!r}.")
    return folder


def stream(source: str | Path) -> Source:
    """Open the parquet files of a dataset of the hub; only the rows requested are read. Raises SourceError.

    All files are of one commit, the latest of the revision; their stamps are sizes and Git hashes.
    """
    name = _parse(source)
    with _hub(name) as hub:
        api = hub.HfApi()
        commit = api.dataset_info(name.repository, revision=name.revision).sha
        tree = api.list_repo_tree(
            name.repository, name.folder or None, recursive=True, revision=commit, repo_type="dataset"
        )
        files = {file.path: (file.size, int(file.blob_id[:15], 16)) for file in tree if file.path.endswith(".parquet")}
        if not files:
            raise SourceError(
                f"{name.where}: no parquet files, and others cannot be streamed: leave out --stream, or name "
                "another revision (many datasets have a branch `refs/convert/parquet`)."
            )
        return open_remote(name.where, f"hf://datasets/{name.repository}@{commit}", files, name.folder)


@contextmanager
def _hub(name: _Name) -> Iterator[Any]:
    """Yield the hub's library; turn its errors into SourceError."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigurationError(
            f"{name.where}: needs the hub's library: pip install huggingface_hub ({error})"
        ) from error
    try:
        yield huggingface_hub
    except EnergonError:
        raise
    except Exception as error:  # of the hub, of the network, of the disk: classes of several libraries
        reason = str(error).strip().split("\n")[0]
        raise SourceError(
            f"{name.where}: cannot download: {type(error).__name__}: {reason} Check the name, the network "
            f"(HF_HUB_OFFLINE, HF_ENDPOINT) and, for a gated dataset, `hf auth login`; or convert a copy: hf download "
            f"{name.repository} --repo-type dataset --local-dir DIR"
        ) from error

"""Datasets of the Hugging Face hub by name: `hf://OWNER/NAME`, `hf://OWNER/NAME/FOLDER`, with `@REVISION` at the end.

The files are downloaded to the hub's cache (HF_HOME), which goes on after a stop, and read there as any other source:
samples are numbered, so that shards, splits and shuffling are exact, which a stream cannot give.
"""

from __future__ import annotations

from pathlib import Path

from energon_bridge.errors import ConfigurationError, SourceError

_PREFIX = "hf:/"  # what `Path` leaves of hf://


def is_hub(source: str | Path) -> bool:
    """Return whether a source names a dataset of the hub."""
    return str(source).startswith(_PREFIX)


def download(source: str | Path) -> Path:
    """Download a dataset of the hub, or what is not there yet, and return its folder; raises SourceError."""
    name, _, revision = str(source)[len(_PREFIX) :].strip("/").partition("@")
    owner, _, rest = name.partition("/")
    repository, _, folder = rest.partition("/")
    where = f"hf://{name}"
    if not owner or not repository:
        raise ConfigurationError(f"{where}: expected hf://OWNER/NAME, or hf://OWNER/NAME/FOLDER for a part of it.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigurationError(f"{where}: needs the hub's library: pip install huggingface_hub ({error})") from error
    try:
        root = snapshot_download(
            f"{owner}/{repository}",
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=f"{folder}/*" if folder else None,
        )
    except Exception as error:  # of the hub, of the network, of the disk: classes of several libraries
        reason = str(error).strip().split("\n")[0]
        raise SourceError(
            f"{where}: cannot be downloaded: {type(error).__name__}: {reason} Check the name, the network "
            f"(HF_HUB_OFFLINE, HF_ENDPOINT) and, of a gated dataset, `hf auth login`; or convert a copy: hf download "
            f"{owner}/{repository} --repo-type dataset --local-dir DIR"
        ) from error
    found = Path(root) / folder
    if not found.is_dir():
        raise SourceError(f"{where}: the dataset {owner}/{repository} has no folder {folder!r}.")
    return found

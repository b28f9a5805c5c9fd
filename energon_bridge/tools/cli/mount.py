"""`energon mount DATASET FOLDER`: a prepared dataset as a read-only folder tree."""

from __future__ import annotations

from pathlib import Path

import click

from energon_bridge.core.errors import ConfigurationError


@click.command("mount")
@click.argument("dataset", type=click.Path())
@click.argument("mountpoint", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("-s", "--sample-folders", is_flag=True, help="A folder for each sample, with files named by their parts.")
@click.option("-d", "--detach", is_flag=True, help="Go on in the background; `fusermount3 -u FOLDER` ends it.")
@click.option("-w", "--allow-slow", is_flag=True, hidden=True, help="Of megatron-energon; nothing is slow without it.")
def command(dataset: str, mountpoint: Path, sample_folders: bool, detach: bool, allow_slow: bool) -> None:
    """Show the samples of DATASET, a prepared folder or URL, as files in FOLDER, until Ctrl-C.

    \b
    energon mount data/captions look                    look/train/shard_000.tar/train-00000.png
    energon mount -s s3://bucket/captions look          look/train/shard_000.tar/train-00000/png

    Nothing is unpacked: files are read from the tars when somebody opens them. Needs the extra `mount` and FUSE.
    """
    from energon_bridge.core.storage import open_store
    from energon_bridge.tools.preview.mount import DatasetTree, mount

    if dataset.endswith((".jsonl", ".yaml", ".yml")):
        raise ConfigurationError(f"{dataset}: mount takes the folder of one prepared WebDataset, not a mix")
    tree = DatasetTree(open_store(dataset), sample_folders=sample_folders)
    if not detach:
        click.echo(f"Mounting {dataset} at {mountpoint}; Ctrl-C unmounts it")
    mount(tree, mountpoint, detach=detach)

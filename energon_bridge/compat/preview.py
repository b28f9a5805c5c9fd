"""`megatron.energon.tools.preview`: the samples of a dataset on the terminal, one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from energon_bridge.compat.factories import get_dataset_from_config
from energon_bridge.compat.printing import format_sample_detailed
from energon_bridge.datasets import get_loader
from energon_bridge.errors import EmptyDatasetError, EnergonError
from energon_bridge.topology import WorkerConfig

_META = ("__restore_key__", "__subflavors__", "__sources__", "__valid__")


def pprint(idx: int, sample: Any) -> None:
    """Print the fields of a sample, with their types and values."""
    click.echo(f"Sample {idx}")
    entries = (
        {entry.name: entry.type for entry in dataclasses.fields(sample)} if dataclasses.is_dataclass(sample) else sample
    )
    for name in entries:
        if name in _META:
            continue
        value = getattr(sample, name) if dataclasses.is_dataclass(sample) else sample[name]
        text = repr(value) if isinstance(value, str) else format_sample_detailed(value).replace("\n", "\n   ")
        click.echo(f" - {name} ({type(value)}): {text}")


@click.command(name="preview")
@click.argument("path")
@click.option("--split-parts", default="train,val,test", show_default=True, help="Parts of the split to show.")
@click.option("--dataset-config", default="dataset.yaml", show_default=True, help="Dataset file in .nv-meta.")
def command(path: str, split_parts: str, dataset_config: str) -> None:
    """Show the samples of the dataset at PATH, and ask after each whether to go on."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    try:
        for part in split_parts.split(","):
            try:
                dataset = get_dataset_from_config(
                    path, dataset_config=dataset_config, split_part=part, training=False, worker_config=config
                )
            except EmptyDatasetError as error:
                click.echo(f"{error} Skipping.")
                continue
            for number, sample in enumerate(get_loader(dataset.build())):
                pprint(number, sample)
                if not click.confirm("Continue?"):
                    return
    except EnergonError as error:
        raise click.ClickException(str(error)) from error

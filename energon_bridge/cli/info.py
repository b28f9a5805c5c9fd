"""`energon info PATH`: the numbers of a prepared dataset."""

from __future__ import annotations

from dataclasses import asdict, replace

import click
from rich.console import Console
from rich.table import Table

from energon_bridge.cli.output import count_of, format_bytes, print_json
from energon_bridge.format.nvmeta import prepared_by
from energon_bridge.prepare.summary import DatasetSummary, summarize_dataset


@click.command("info")
@click.argument("path", type=click.Path())
@click.option("--split-config", default="split.yaml", show_default=True, help="Split file in .nv-meta.")
@click.option("--dataset-config", default="dataset.yaml", show_default=True, help="Dataset file in .nv-meta.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, split_config: str, dataset_config: str, as_json: bool) -> None:
    """Show samples, shards, size, sample type and splits of the dataset at PATH (a folder, a .jsonl file, or a URL).

    Example:  energon info /data/captions
    """
    summary = summarize_dataset(path, split_config=split_config, dataset_config=dataset_config)
    if as_json:
        columns = {name: column.made_of for name, column in summary.columns.items()}
        print_json(asdict(replace(summary, columns={})) | {"columns": columns})
        return
    for name, value in _rows(summary):
        click.echo(f"{name + ':':<14}{value}")
    if not summary.parts:
        return
    table = Table("split part", "samples", "share", "shards", "excluded samples")
    for column in table.columns[1:]:
        column.justify = "right"
    for part in summary.parts:
        share = part.num_samples / summary.num_samples if summary.num_samples else 0.0
        excluded = str(part.num_excluded_samples)
        table.add_row(part.name, f"{part.num_samples:,}", f"{share:.1%}", f"{part.num_shards:,}", excluded)
    Console().print(table)


def _rows(summary: DatasetSummary) -> list[tuple[str, str]]:
    held = f"{count_of(summary.num_samples, 'sample')} in {count_of(summary.num_shards, 'shard')}"
    rows = [
        ("dataset", summary.path),
        ("holds", f"{held}, {format_bytes(summary.num_bytes)}"),
        ("sample type", summary.sample_type),
    ]
    rows += [("field", f"{field} = {access}") for field, access in summary.field_map.items()]
    rows += [("subflavor", f"{name} = {value}") for name, value in summary.subflavors.items()]
    if summary.parts:
        rows += [
            ("prepared by", prepared_by(summary.energon_version)),
            ("key index", "yes" if summary.has_key_index else "no"),
        ]
    rows += [("column", f"{name}, {column.made_of}") for name, column in summary.columns.items()]
    rows += [("MISSING", shard) for shard in summary.missing_shards]
    return rows

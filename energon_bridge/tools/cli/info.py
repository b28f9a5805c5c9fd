"""`energon info PATH`: the numbers of a prepared dataset, or of all datasets of a mix."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import click

from energon_bridge.core.format.foreign import format_of_unprepared
from energon_bridge.core.format.nvmeta import CHECKSUMS
from energon_bridge.tools.check.dataset_summary import JOINED, DatasetSummary, summarize_dataset
from energon_bridge.tools.cli.output import count_of, format_bytes, print_json, print_table
from energon_bridge.tools.cli.prepare_options import config_options

_SHOWN = 10
_OWN_VERSION = re.compile(r"(?P<format>.+)\+energon-bridge\.(?P<version>.+)")


@click.command("info")
@click.argument("path", type=click.Path())
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, split_config: str, dataset_config: str, as_json: bool) -> None:
    """Show what the dataset at PATH (a folder, a .jsonl file, or a URL) holds, or a mix (a .yaml).

    Samples, shards, size, sample type, splits; part types and media metadata, if there is a key index; columns; tars
    that came after it was prepared.

    \b
    energon info /data/captions
    energon info mix.yaml --json
    """
    if path.endswith(".yaml"):
        _show_mix(path, as_json=as_json)
        return
    summary = summarize_dataset(path, split_config=split_config, dataset_config=dataset_config)
    if as_json:
        print_json(_plain(summary))
        return
    for name, value in _rows(summary):
        click.echo(f"{name + ':':<14}{value}")
    if not summary.parts:
        return
    rows = []
    for part in summary.parts:
        share = part.num_samples / summary.num_samples if summary.num_samples else 0.0
        excluded = str(part.num_excluded_samples)
        rows.append((part.name, f"{part.num_samples:,}", f"{share:.1%}", f"{part.num_shards:,}", excluded))
    print_table(("split part", "samples", "share", "shards", "excluded samples"), rows)


def _rows(summary: DatasetSummary) -> list[tuple[str, str]]:
    held = f"{count_of(summary.num_samples, 'sample')} in {count_of(summary.num_shards, 'shard')}"
    rows = [
        ("dataset", summary.path),
        ("holds", f"{held}, {format_bytes(summary.num_bytes)}"),
        ("sample type", summary.sample_type),
    ]
    rows += [("field", f"{field} = {access}") for field, access in summary.field_map.items()]
    rows += [("subflavor", f"{name} = {value}") for name, value in summary.subflavors.items()]
    if format_of_unprepared(summary.path):
        rows.append(("prepared by", "nobody: its tables are read as they are"))
    elif summary.parts:
        rows += [
            ("prepared by", prepared_by(summary.energon_version)),
            ("key index", "yes" if summary.has_key_index else "no"),
        ]
    for name, part in summary.part_types.items():
        counted = "" if part.count is None else f", {part.count:,} of {format_bytes(part.num_bytes or 0)}"
        rows.append(("part", name + counted))
    for name, media in summary.media.items():
        ranges = "".join(f", {field} {least:,g} to {most:,g}" for field, (least, most) in media.ranges.items())
        rows.append(("media", f"{name}, {count_of(media.count, 'file')}{ranges}"))
    for name, hours in summary.hours.items():
        adding = f" (`energon prepare-media {summary.path} --media-metadata-by-extension` writes lengths down)"
        rows.append(("hours", f"unknown, of {name}{adding}" if hours is None else f"{hours:,.4g} of {name}"))
    for name, column in summary.columns.items():
        numbers = summary.column_numbers.get(name)
        values = (
            f", {numbers.least:,g} to {numbers.most:,g}, mean {numbers.mean:,g}" if numbers and name != "hash" else ""
        )
        rows.append(("column", f"{name}, {column.made_of}{values}"))
    rows += [("MISSING", shard) for shard in summary.missing_shards]
    rows += [("WRONG", text) for text in summary.wrong] + [("WARNING", text) for text in summary.warnings]
    rows += [("NOT PREPARED", shard) for shard in summary.new_shards[:_SHOWN]]
    if len(summary.new_shards) > _SHOWN:
        rows.append(("NOT PREPARED", f"... and {len(summary.new_shards) - _SHOWN:,} more"))
    return rows


def _plain(summary: DatasetSummary) -> dict[str, Any]:
    """Return a summary as plain values; of columns what made them, not their shards."""
    value = asdict(summary) | {"hours": summary.hours}
    value["columns"] = {
        name: {"made_of": column.made_of, "samples": column.num_samples, **value["column_numbers"].get(name, {})}
        for name, column in summary.columns.items()
    }
    del value["column_numbers"]
    return value


def _show_mix(path: str, *, as_json: bool) -> None:
    from energon_bridge.tools.check.dataset_summary import summarize_mix  # imports torch

    datasets, splits = summarize_mix(path)
    if as_json:
        plain = {name: [asdict(leaf) for leaf in leaves] for name, leaves in splits.items()}
        print_json({"path": path, "splits": plain, "datasets": [_plain(dataset) for dataset in datasets]})
        return
    for split, leaves in splits.items():
        counts = [leaf.in_mix for leaf in leaves if leaf.mixed != JOINED]
        total = "cannot be opened" if None in counts else count_of(sum(filter(None, counts)), "sample")
        click.echo(f"{split}: {total}")
        print_table(
            ("dataset", "as mixed", "samples", "in the mix"),
            [
                (
                    f"{leaf.path} {leaf.split_part}".rstrip(),
                    leaf.mixed,
                    f"{leaf.num_samples:,}",
                    "-" if leaf.in_mix is None else f"{leaf.in_mix:,}",
                )
                for leaf in leaves
            ],
            left=2,
        )
    rows = [
        (
            one.path,
            one.sample_type.rpartition(".")[2],
            ", ".join(one.part_types),
            f"{one.num_samples:,}",
            format_bytes(one.num_bytes),
            f"{len(one.missing_shards):,}",
            f"{len(one.new_shards):,}",
        )
        for one in datasets
    ]
    print_table(("dataset", "sample type", "parts", "samples", "bytes", "missing", "not prepared"), rows, left=3)


def prepared_by(energon_version: str | None) -> str:
    """Return a text that names the program that wrote an `.info.json` with this `energon_version`."""
    if energon_version is None:
        return "unknown"
    own = _OWN_VERSION.fullmatch(energon_version.removesuffix(CHECKSUMS))
    if own is None:
        return f"energon {energon_version}"
    kept = ", with checksums" * energon_version.endswith(CHECKSUMS)
    return f"energon_bridge {own['version']} (format of energon {own['format']}){kept}"

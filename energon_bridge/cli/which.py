"""`energon which STATE_OR_MIX --step S`: the names of a step's samples, by arithmetic. Reads no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from energon_bridge.cli.output import print_json, print_table
from energon_bridge.cli.run_options import open_mix, run_options
from energon_bridge.errors import ConfigurationError
from energon_bridge.loader.document import merge
from energon_bridge.loader.state_files import read_states
from energon_bridge.loader.summary import rank_of

_MIX_SUFFIXES = (".yaml", ".yml", ".jsonl")


@click.command("which")
@click.argument("source", nargs=-1, required=True, metavar="STATE_OR_MIX...")
@click.option("--step", type=click.IntRange(min=0), help="Steps before it, from the beginning of the run.")
@click.option("--microbatch", type=click.IntRange(min=0), help="Number of a microbatch of the run, instead of a step.")
@click.option("--rank", type=click.IntRange(min=0), help="Only what this rank delivers.")
@click.option("--row", type=click.IntRange(min=0), help="Only this row of each microbatch.")
@click.option("--mix", help="With a state: what the run was started with, where the state alone does not say it.")
@run_options
def command(
    source: tuple[str, ...],
    step: int | None,
    microbatch: int | None,
    rank: int | None,
    row: int | None,
    mix: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Name the samples of a step of a run that is described by STATE_OR_MIX.

    States (one file, or those of several ranks) say everything but the number of ranks; with a mix (a dataset's folder
    or URL, or a metadataset's YAML file) give the options that the run was started with. A step is counted from the
    beginning of the run, on one number of ranks.
    """
    if (step is None) == (microbatch is None):
        raise ConfigurationError("give either --step or --microbatch")
    # They bring torch, which no help text needs.
    from energon_bridge.forecast.run import run_of_mix, run_of_state
    from energon_bridge.forecast.samples import assumption, name_microbatch, name_step

    notes = []
    if _is_mix(source):
        run = run_of_mix(open_mix(source[0], options))
    else:
        states = read_states(source)
        ranks = {place for state in states if (place := rank_of(state)) is not None}
        world_size = options["world_size"] or (max(size for _, size in ranks) if ranks else 1)
        if options["world_size"] is None and microbatch is None:
            notes.append(
                f"World size {world_size}: a state does not know how many ranks there were, --world-size says it."
            )
        run = run_of_state(
            merge(states),
            world_size=world_size if microbatch is None else 1,
            mix=mix,
            **{name: options[name] for name in ("split_part", "dataset_config", "split_config", "trust_remote_code")},
        )
    if step is not None and rank is not None and rank >= run.config.dp_size:
        raise ConfigurationError(f"--rank {rank} is not below the number of ranks, {run.config.dp_size}")
    if microbatch is not None:
        found = [name_microbatch(run, microbatch)]
    else:
        assert step is not None
        found = [one for one in name_step(run, step) if rank is None or one.rank == rank]
    first = min((one.microbatch for one in found if one.microbatch is not None), default=0)
    notes.insert(0, assumption(run, first))
    rows = [_plain(one, row) for one in found]
    if as_json:
        print_json({"step": step, "assumption": notes[0], "microbatches": rows})
        return
    _print(rows, masked=[one.rank for one in found if one.microbatch is None])
    for note in notes:
        click.echo(note)


def _is_mix(source: Sequence[str]) -> bool:
    """Whether the argument names a mix; states are files of any other name."""
    path = source[0]
    return len(source) == 1 and (path.endswith(_MIX_SUFFIXES) or "://" in path or Path(path).is_dir())


def _plain(microbatch: Any, row: int | None) -> dict[str, Any]:
    values = asdict(microbatch)
    if values["rank"] < 0:
        del values["rank"]
    values["samples"] = [sample for sample in values["samples"] if row is None or sample["row"] == row]
    return values


def _print(microbatches: Sequence[dict[str, Any]], masked: Sequence[int]) -> None:
    print_table(
        ("dataset", "shard", "key", "in shard", "epoch", "rank", "microbatch", "lane", "row", "restore key"),
        [
            (
                f"{sample['path']} [{sample['split_part']}]",
                sample["shard"],
                ("-" if sample["key"] is None else sample["key"]) + (" (excluded)" if sample["excluded"] else ""),
                str(sample["shard_index"]),
                str(sample["epoch"]),
                str(one.get("rank", "-")),
                str(one["microbatch"]),
                "-" if one["lane"] is None else str(one["lane"]),
                str(sample["row"]),
                ":".join(map(str, sample["restore_key"])),
            )
            for one in microbatches
            for sample in one["samples"]
        ],
        left=3,
    )
    if masked:
        click.echo(f"Masked, with rows of an earlier microbatch: rank {', '.join(map(str, masked))}.")

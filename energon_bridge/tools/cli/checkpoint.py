"""`energon checkpoint show FILE…` and `energon checkpoint diff A B`: inspect saved states. No dataset is opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.saved_run import State
from energon_bridge.core.loader.state_files import read_states
from energon_bridge.core.mix import parse_weight
from energon_bridge.core.stream.lane_state import OVER_LONG
from energon_bridge.tools.check.state_summary import difference, rank_of, summarize
from energon_bridge.tools.cli.main import SuggestingGroup
from energon_bridge.tools.cli.output import (
    epochs,
    first,
    format_bytes,
    leaf_name,
    number,
    print_json,
    print_pairs,
    print_table,
)

_KINDS = {"train": "training, endless", "passes": "training, pass by pass", "finite": "validation"}
_COUNTS = ("samples", "skipped", "errors", "excluded")
_HEADINGS = ("skipped", "errors", "draws of excluded")
_MAX_SHOWN = 16


class _SavedGroup(SuggestingGroup):
    """The verbs of `energon checkpoint`; accepts `info` for `show`, as megatron-energon does."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, "show" if cmd_name == "info" else cmd_name)


@click.group("checkpoint", cls=_SavedGroup)
def command() -> None:
    """Show what saved states say, and how two of them differ.

    A file may be JSON, one of torch.save, or a checkpoint of Megatron or Lightning with the state inside.

    Example:  energon checkpoint show step-0000150.ckpt
    """


_OUT = {"out": "delivered and not done", "done": "done", "again": "came again", "dropped": "given up"}


@command.command("show")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(files: tuple[str, ...], as_json: bool) -> None:
    """Show the position of a run and its counters per dataset; several FILEs are those of its ranks.

    Example:  energon checkpoint show rank0.pt rank1.pt
    """
    states = read_states(files)
    summary = summarize(merge(states))
    ranks = [rank for rank in map(rank_of, states) if rank is not None]
    if as_json:
        print_json(summary | {"states": len(states), "ranks": ranks})
        return
    print_pairs(_facts(summary, len(states), ranks))
    more = _rare(summary["leaves"])
    print_table(
        ("dataset", "identity", "samples", "share", "draws", "epochs", "delivered", *_HEADINGS, "bytes", *more),
        [
            (
                leaf_name(row) + (" (parked)" if row["parked"] else ""),
                row["identity"],
                number(row["num_samples"]),
                row["share"] or "-",
                number(row["draws"]),
                epochs(row["epochs"]),
                *(number(row[name]) for name in _COUNTS),
                format_bytes(row["bytes"]),
                *(number(row[name]) for name in more),
            )
            for row in summary["leaves"]
        ],
        left=2,
    )
    for ban in summary["bans"]:
        keys = ban["keys"]
        where = ban["dataset"] or "all datasets"
        said = f"{len(keys):,} keys: {first(keys, _MAX_SHOWN)}"
        click.echo(f"Banned from global draw {ban['from_draw']:,} on, in {where}: {said}")
    for change in summary["weights"]:
        click.echo(f"Weights from global draw {change['from_draw']:,} on, set during the run:")
        paths = {row["identity"]: leaf_name(row) for row in summary["leaves"]}
        for identity, weight in change["weights"].items():
            click.echo(f"  {parse_weight(weight, where='the state', field='weights')}  {paths[identity]}")


def _facts(summary: State, states: int, ranks: list[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    yield "format", f"{summary['format']} {summary['format_version']}, order version {summary['order_version']}"
    yield "kind", str(_KINDS.get(summary["kind"], summary["kind"]))
    if summary["kind"] == "train":
        lanes = summary["num_lanes"]
        yield "position", f"microbatch {summary['microbatches']:,} of the run, {summary['draws']:,} draws"
        if summary["held"]:
            buffers = summary["settings"].get("packing_buffers") or lanes
            yield "held", f"{summary['held']:,} samples, drawn but not delivered yet: in packs, groups and batches"
            if buffers < lanes:
                yield (
                    "buffers",
                    f"{lanes} lanes share {buffers}: what a buffer loses counts at once, each draw when its lane has "
                    "come to it, so errors are ahead of draws by up to a turn of all lanes",
                )
        missing = summary["missing_lanes"]
        if not missing:
            yield "lanes", f"{lanes}, all here"
        else:
            yield "lanes", f"{lanes - len(missing)} of {lanes}; missing: {first(missing, _MAX_SHOWN)}"
            world = {size for _, size in ranks}
            if len(world) == 1:
                gone = sorted(set(range(*world)) - {rank for rank, _ in ranks})
                here = ", ".join(str(rank) for rank, _ in sorted(ranks))
                yield "ranks", f"{here} of {min(world)}; missing: {', '.join(map(str, gone))}"
            yield "note", "draws and counters cover only these lanes and ranks"
    else:
        yield (
            "stands at",
            f"microbatch {summary['microbatches']:,} of a pass, after {summary['epoch']:,} whole passes",
        )
    if (out := summary["out"]) is not None:
        counted = (f"{out[name]:,} {said}" for name, said in _OUT.items())
        yield "until done", ", ".join(counted)
    if summary["epoch_steps"]:
        yield "virtual epoch", f"{summary['epoch_steps']:,} steps"
    if states > 1:
        yield "states", str(states)
    yield "settings", ", ".join(f"{name}={value}" for name, value in summary["settings"].items())


@command.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(a: str, b: str, as_json: bool) -> None:
    """Show how state B differs from state A: settings, the mix, and the distance between their positions.

    Example:  energon checkpoint diff step-0000150.ckpt step-0000200.ckpt
    """
    then, now = (merge(read_states([path])) for path in (a, b))
    changes = difference(then, now)
    if as_json:
        print_json(changes)
        return
    lines = [*changes["settings"], *_weights(changes["weights"]), *_bans(changes["bans"]), *changes["leaves"]]
    for line in lines:
        click.echo(line)
    if any(line.endswith(" changed") for line in changes["leaves"]):
        click.echo("  Content: shards, sample counts and sizes, `exclude` and dataset.yaml.")
    if not lines:
        click.echo("The settings and the mix are the same.")
    moved = [row for row in changes["progress"] if any(row[name] for name in ("draws", *_COUNTS, "bytes"))]
    if not (changes["microbatches"] or changes["epochs"] or moved):
        click.echo("Both are at the same position.")
        return
    passes = f", {changes['epochs']:+,} passes" if changes["epochs"] else ""
    click.echo(f"B is {changes['microbatches']:+,} microbatches from A{passes}.")
    if not changes["comparable"]:
        click.echo("Cannot compare draws and counters: the states have different lanes.")
        return
    more = _rare(changes["progress"])
    print_table(
        ("dataset", "draws", "epochs", "delivered", *_HEADINGS, "bytes", *more),
        [
            (
                leaf_name(row),
                number(row["draws"]),
                epochs(row["epochs"]),
                *(number(row[name]) for name in _COUNTS),
                format_bytes(row["bytes"]),
                *(number(row[name]) for name in more),
            )
            for row in changes["progress"]
        ],
    )


@command.command("redist", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def redist(arguments: tuple[str, ...]) -> None:
    """Not needed: a state fits any number of ranks and workers as it is.

    megatron-energon must rewrite the files of a run that continues on another number of ranks. Here you start the run
    with that number and let it resume; each rank finds its part in the states of all. `energon checkpoint show` tells
    whether the states of all ranks are there.

    Example:  energon checkpoint redist rank0.pt rank1.pt out
    """
    raise ConfigurationError(
        "nothing to redistribute: a state fits any number of ranks and workers as it is. Resume on any number of ranks "
        "with the same files (restore_state_rank takes the list of them; trainers resume by themselves). "
        "`energon checkpoint show FILE...` shows whether the states of all ranks are there. States of "
        "megatron-energon only fit megatron-energon"
    )


def _rare(rows: list[State]) -> list[str]:
    """Return the counters of banned and of over-long samples that are not zero."""
    return [name for name in ("banned", *OVER_LONG) if any(row[name] for row in rows)]


def _bans(changed: list[Any]) -> Iterator[str]:
    for sign, bans in zip("-+", changed, strict=False):
        said = ", ".join(f"{len(ban['keys']):,} keys from global draw {ban['from_draw']:,} on" for ban in bans)
        yield f"{sign} banned: {said or 'none'}"


def _weights(changed: list[Any]) -> Iterator[str]:
    for sign, changes in zip("-+", changed, strict=False):
        starts = ", ".join(f"{change['from_draw']:,}" for change in changes)
        yield f"{sign} weights set during the run: {f'from global draws {starts}' if changes else 'none'}"

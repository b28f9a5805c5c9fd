"""`energon plan MIX --steps N`: how often a run goes through each dataset, and what each weight means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from energon_bridge.core.format.dataset_config import names_only
from energon_bridge.core.mix import (
    BlendNode,
    Concat,
    EpochizedNode,
    JoinRef,
    LeafRef,
    Mix,
    MixLeaf,
    SubsetRange,
    TreeNode,
    merge_subsets,
)
from energon_bridge.core.mix.schedule import plain_number
from energon_bridge.tools.cli.output import (
    epochs,
    format_bytes,
    leaf_name,
    number,
    print_json,
    print_pairs,
    print_table,
)
from energon_bridge.tools.cli.run_options import open_mix, run_options

if TYPE_CHECKING:
    from energon_bridge.tools.forecast.epochs import Forecast

_POOR = 0.8


@click.command("plan")
@click.argument("mix", type=click.Path())
@click.option("--steps", type=click.IntRange(min=0), required=True, help="Steps of the optimizer in the run.")
@click.option("--engine", type=click.Choice(["process", "ray"]), default="process", help="What workers are.")
@click.option(
    "--cpu-per-sample", type=click.FloatRange(min=0), metavar="US", help="CPU of a sample, by `energon bench`."
)
@click.option(
    "--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Time of a step: says what cores it takes."
)
@click.option(
    "--batch-bytes", type=click.IntRange(min=1), help="Bytes of a microbatch, for what goes over the network."
)
@run_options
def command(
    mix: str,
    steps: int,
    engine: str,
    cpu_per_sample: float | None,
    step_seconds: float | None,
    batch_bytes: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Forecast a training run over MIX: a dataset's folder or URL, or a metadataset's YAML file.

    A step is one microbatch on each rank, with --global-batch-size as many as it takes.

    Numbers are exact where each sample that is drawn gives one row: none is skipped, packed or made several of; but if
    weights are shares of an amount (`unit: tokens`), they are those of samples of mean length. Nothing is read but the
    metadata of the datasets.

    With --cpu-per-sample and --step-seconds it says how many cores the workers need, and with --engine ray and
    --batch-bytes what goes over the network from a Ray cluster.

    Example:  energon plan mix.yaml --steps 10000 --batch-size 8 --world-size 64
    """
    asked = {"--cpu-per-sample": cpu_per_sample, "--step-seconds": step_seconds}
    asked |= {"--batch-bytes": batch_bytes} if engine == "ray" or batch_bytes is not None else {}
    missing = [name for name, value in asked.items() if value is None]
    if missing and (engine == "ray" or len(missing) < len(asked)):
        raise click.UsageError(f"what workers need follows from {', '.join(asked)}: {', '.join(missing)} is not given")
    # They import torch, which no help text needs.
    from energon_bridge.tools.forecast.epochs import forecast
    from energon_bridge.tools.forecast.planned_run import run_of_mix

    with names_only():
        run = run_of_mix(open_mix(mix, options))
    plan = forecast(run, steps)
    needs = _workers_need(plan, steps, cpu_per_sample, step_seconds, batch_bytes)
    if as_json:
        print_json(asdict(plan) | ({"workers_need": needs} if needs else {}))
        return
    for line in describe(run.spec.mix):
        click.echo(line)
    click.echo()
    print_pairs((*_facts(plan), *_needs(needs, plan.world_size, engine)))
    _print_leaves(plan)
    if plan.schedule:
        _print_schedule(plan)
    for line in (*_mixing(plan), *_ends(plan)):
        click.echo(line)


def _workers_need(
    plan: Forecast, steps: int, cpu_per_sample: float | None, step_seconds: float | None, batch_bytes: int | None
) -> dict[str, float]:
    """Return the cores that all workers need, and the bytes a second over the network; nothing if that is unknown."""
    if cpu_per_sample is None or step_seconds is None or not steps:
        return {}
    needs = {"cores": 1e-6 * cpu_per_sample * plan.draws / (steps * step_seconds)}
    if batch_bytes is not None:
        needs["bytes_per_second"] = batch_bytes * plan.microbatches / (steps * step_seconds)
    return needs


def _print_leaves(plan: Forecast) -> None:
    amounts = (f"share of {plan.unit}", f"{plan.unit}, about") if plan.unit else ()
    print_table(
        ("dataset", "as written", "samples", "share", "draws", "epochs", "bytes, about", *amounts),
        [
            (
                leaf_name(asdict(leaf)),
                leaf.written or "-",
                number(leaf.num_samples),
                f"{leaf.share:.2%}",
                number(leaf.draws),
                epochs(leaf.epochs),
                format_bytes(leaf.bytes),
                *((f"{leaf.amount_share or 0:.2%}", number(round(leaf.amount or 0))) if plan.unit else ()),
            )
            for leaf in plan.leaves
        ],
        left=2,
    )


def _print_schedule(plan: Forecast) -> None:
    click.echo("Shares of the datasets, numbered as in the table above; between the points they follow the schedule:")
    print_table(
        ("shares at global draw", "in step", *(str(place) for place in range(1, len(plan.leaves) + 1))),
        [
            (number(point.global_draw), number(point.step), *(f"{share:.2%}" for share in point.shares))
            for point in plan.schedule
        ],
        left=0,
    )


def _facts(plan: Forecast) -> Iterator[tuple[str, str]]:
    each = "" if plan.per_step == 1 else f" of {plan.per_step} microbatches on each rank"
    yield "steps", f"{plan.steps:,}{each}, world size {plan.world_size:,}, batch size {plan.batch_size}"
    yield "draws", f"{plan.draws:,} samples in {plan.microbatches:,} microbatches; the mix has {plan.num_samples:,}"
    yield "lanes", f"{plan.num_lanes:,}: {plan.lanes_because}"
    if plan.masked_share:
        yield (
            "masked",
            f"{plan.masked_share:.1%} of the microbatches, as {plan.world_size} ranks do not divide "
            f"{plan.num_lanes} lanes; {plan.even_world_size} ranks would mask none",
        )
    if plan.mix_epoch is not None:
        done = plan.draws / plan.mix_epoch
        yield "mix epoch", f"{plan.mix_epoch:,.10g} samples; {epochs(done)} mix epochs in all"


def _needs(needs: dict[str, float], ranks: int, engine: str) -> Iterator[tuple[str, str]]:
    """Yield what the workers need, of all ranks together and for each: cores, and bytes per second."""
    if "cores" in needs:
        where = "on the Ray cluster" if engine == "ray" else "beside the trainers"
        yield "cores", f"{needs['cores']:,.1f} for workers {where}, {needs['cores'] / ranks:,.2f} for each rank"
    if "bytes_per_second" in needs:
        over = needs["bytes_per_second"]
        each = format_bytes(int(over / ranks))
        every = format_bytes(int(over))
        yield "network" if engine == "ray" else "batches", f"{each}/s into each rank, {every}/s in all"


def _mixing(plan: Forecast) -> Iterator[str]:
    """Report how well the datasets are mixed, and which are not."""
    if plan.mixing is None:
        return
    yield (
        f"Mixing: {plan.mixing:.2f} (1 is a perfect shuffle). Of a dataset sorted into ten classes, 32 samples that a "
        f"lane draws in a row would have {plan.mixing:.0%} of the classes that 32 random samples have."
    )
    poor = [leaf for leaf in plan.leaves if leaf.mixing is not None and leaf.mixing < _POOR]
    if poor:
        names = ", ".join(f"{leaf_name(asdict(leaf))} ({leaf.mixing:.2f})" for leaf in poor[:3])
        more = f" and {len(poor) - 3} more" if len(poor) > 3 else ""
        yield (
            f"Poorly mixed: {names}{more}. If they are sorted in any way, raise --shuffle-buffer-size or "
            "--parallel-shard-iters."
        )


def _ends(plan: Forecast) -> Iterator[str]:
    most = max(plan.leaves, key=lambda leaf: leaf.epochs)
    if len(plan.leaves) > 1 and plan.draws:
        yield f"Repeated most: {leaf_name(asdict(most))}, {epochs(most.epochs)} epochs."
    if plan.first_end is not None:
        names = ", ".join(leaf_name(asdict(plan.leaves[place])) for place in plan.ends_first)
        yield f"Ends first: {names}, in step {plan.first_end - 1:,}."


# ---------------------------------------------------------------------------------------------------------------------
# The tree of a mix, one line per node, with the effective weight of every leaf.


def describe(mix: Mix) -> list[str]:
    """Draw the tree of a mix, one line per node.

    Leaves show their share of all draws, or their repetitions; scheduled weights are those at global draw 0.
    """
    return list(_lines(mix.root, leaves=iter(mix.leaves), head="", tail="", note=""))


def _lines(node: TreeNode, *, leaves: Iterator[MixLeaf], head: str, tail: str, note: str) -> Iterator[str]:
    """Yield the lines of a subtree; `head` comes before its first line, `tail` before the others."""
    if isinstance(node, (LeafRef, JoinRef)):
        yield f"{head}{_leaf(next(leaves))}{note}"
        return
    name = {BlendNode: "blend", EpochizedNode: "blend_epochized", Concat: "concat"}[type(node)]
    unit = f" of {node.unit}" if isinstance(node, BlendNode) and node.unit else ""
    yield f"{head}{name}{unit}{note}  ({node.where})"
    for position, child in enumerate(node.children):
        is_last = position == len(node.children) - 1
        inner = _note(node, position)
        yield from _lines(
            child,
            leaves=leaves,
            head=tail + ("└── " if is_last else "├── "),
            tail=tail + ("    " if is_last else "│   "),
            note=inner,
        )


def _note(node: BlendNode | EpochizedNode | Concat, position: int) -> str:
    if isinstance(node, BlendNode):
        return f"  [weight {node.weights[position]}]"
    if isinstance(node, EpochizedNode):
        return f"  [repetitions {plain_number(node.repetitions[position])}]"
    return ""


def _leaf(leaf: MixLeaf) -> str:
    words = [*_share_of(leaf), *_source(leaf.leaf)]
    if leaf.occurrence:
        words.append(f"again, stream {leaf.occurrence}")
    return "  ".join(words)


def _share_of(leaf: MixLeaf) -> list[str]:
    if leaf.repetitions is not None:
        return [f"× {float(leaf.repetitions):g}"]
    if leaf.weight is None:
        return []
    share = f"{float(leaf.weight) * 100:6.2f} %"
    return [share] if leaf.size_group is None else [f"{share} shared by size in group {leaf.size_group}"]


def _source(leaf: LeafRef | JoinRef) -> list[str]:
    subset = _subset(merge_subsets(leaf.subsets))
    if isinstance(leaf, JoinRef):
        names = " + ".join(
            f"{entry.name}={entry.leaf.path}" if entry.name else entry.leaf.path for entry in leaf.entries
        )
        return [f"join {names}", f"by {leaf.joiner.module}.{leaf.joiner.name}", *subset]
    where = [f"where {text}" for text in leaf.filters]
    return [leaf.path, *([] if leaf.is_jsonl else [leaf.split_part]), *subset, *where]


def _subset(subset: SubsetRange) -> list[str]:
    words = []
    if subset.is_absolute:
        words.append(f"samples {subset.start} to {'the end' if subset.stop is None else subset.stop}")
    if subset.ratio != (0.0, 1.0):
        words.append(f"{subset.ratio[0] * 100:g}% to {subset.ratio[1] * 100:g}%")
    return [" of ".join(reversed(words))] if words else []

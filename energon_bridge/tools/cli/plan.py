"""`energon plan MIX --steps N`: how often a run goes through each dataset, and what each weight means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
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
from energon_bridge.tools.cli.run_options import load_encoder, open_mix, run_options

if TYPE_CHECKING:
    from energon_bridge.tools.forecast.epochs import Forecast
    from energon_bridge.tools.forecast.grids import GridForecast

_FEW = 20
"""Batches of packs whose mean number of samples is rough."""
_POOR = 0.8
"""How well a dataset is shuffled (`forecast/epochs.py`) below which it is named."""


@click.command("plan")
@click.argument("mix", type=click.Path())
@click.option("--steps", type=click.IntRange(min=0), required=True, help="Steps of the optimizer in the run.")
@click.option("--engine", type=click.Choice(["process", "ray"]), default="process", help="What workers are.")
@click.option(
    "--bench",
    "measured",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="What `energon bench --json` printed: for workers, cores, memory and the network.",
)
@click.option(
    "--cpu-per-sample", type=click.FloatRange(min=0), metavar="US", help="CPU of a sample, instead of --bench."
)
@click.option(
    "--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Time of a step: says what the run needs."
)
@click.option("--batch-bytes", type=click.IntRange(min=1), help="Bytes of a microbatch, instead of --bench.")
@click.option(
    "--samples-per-batch",
    type=click.FloatRange(min=0, min_open=True),
    help="Samples in a microbatch of packs, instead of --bench.",
)
@click.option("--grids", metavar="NAME=RANKS,...", help="Encoders on ranks of their own, as language=4,vision=2.")
@click.option("--encoder", metavar="MODULE:ENCODER", help="With --grids: what ranks hold with this task encoder.")
@click.option("--processor", metavar="MODEL", help="With --grids: the same for chats of a model of transformers.")
@click.option(
    "--feature-bytes", type=click.IntRange(min=1), help="Bytes of a token's features: hidden size x 2, in bf16."
)
@run_options
def command(
    mix: str,
    steps: int,
    engine: str,
    measured: str | None,
    cpu_per_sample: float | None,
    step_seconds: float | None,
    batch_bytes: int | None,
    samples_per_batch: float | None,
    grids: str | None,
    encoder: str | None,
    processor: str | None,
    feature_bytes: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Forecast a training run over MIX: a dataset's folder or URL, or a metadataset's YAML file.

    A step is one microbatch on each rank, with --global-batch-size as many as it takes.

    Numbers are exact where each sample that is drawn gives one row: none is skipped or made several of. With packs
    (--samples-per-batch, or --bench of a run that packs) they are those of packs of mean length, and if weights are
    shares of an amount (`unit: tokens`) those of samples of mean length. Nothing is read but the metadata of the
    datasets.

    With --step-seconds it says what the run needs of each rank and in all: of a store, requests and bytes; with the
    file of `energon bench --json`, workers, cores, memory and, with --engine ray, what goes over the network.

    With --grids it says what a rank of each grid reads and decodes in a step, by the headers of some samples; its ranks
    of `language` are the world size. With --encoder or --processor, also the most bytes of its batch in the first
    steps, and the tokens of media whose features go from encoders to the language model; no medium is decoded.

    Example:  energon plan mix.yaml --steps 10000 --batch-size 8 --world-size 64
    """
    rates = None
    if measured is not None:
        rates, packs = _rates_of(measured, mix, options["batch_size"])
        samples_per_batch = samples_per_batch or (rates[0]["samples_per_batch"] if packs else None)
        cpu_per_sample = cpu_per_sample or 1e6 * rates[0]["cpu_per_sample"]
        batch_bytes = batch_bytes or int(rates[0]["batch_bytes"])
    asked = {"--cpu-per-sample": cpu_per_sample, "--step-seconds": step_seconds}
    asked |= {"--batch-bytes": batch_bytes} if engine == "ray" or batch_bytes is not None else {}
    missing = [name for name, value in asked.items() if value is None]
    if missing and (engine == "ray" or len(missing) < len(asked)) and missing != ["--cpu-per-sample"]:
        raise click.UsageError(
            f"what workers need follows from {', '.join(asked)} (or --bench): {', '.join(missing)} is not given"
        )
    if (grids is None and (encoder or processor)) or (encoder and processor):
        raise click.UsageError("--encoder or --processor, one of them, says what ranks hold with --grids")
    if feature_bytes and not (encoder or processor):
        raise click.UsageError("--feature-bytes needs --grids and --encoder or --processor, which count the tokens")
    # They import torch, which no help text needs.
    from energon_bridge.tools.forecast.epochs import forecast
    from energon_bridge.tools.forecast.needs import cores_and_network, of_store, workers_and_memory
    from energon_bridge.tools.forecast.planned_run import run_of_mix
    from energon_bridge.tools.forecast.requests import not_counted

    sizes: dict[str, int] = {}
    if grids is not None:
        from energon_bridge.tools.forecast.grids import grid_forecast, sizes_of

        sizes = sizes_of(grids)
        options["world_size"] = sizes.get("language", options["world_size"])
    with names_only():
        run = run_of_mix(open_mix(mix, options), samples_per_batch)
    result = forecast(run, steps)
    of_grids = []
    if sizes:
        made = load_encoder(encoder, processor)
        encoding = None if made is None else open_mix(mix, options, task_encoder=made)
        of_grids = grid_forecast(run, result, sizes, encoding, feature_bytes)
    given = click.get_current_context().get_parameter_source("num_workers") is not click.core.ParameterSource.DEFAULT
    needs: dict[str, float] = {}
    if step_seconds is not None and steps:
        needs = cores_and_network(result, cpu_per_sample, step_seconds, batch_bytes)
        if rates is not None:
            needs |= workers_and_memory(result, rates, step_seconds, options["num_workers"] if given else None)
        needs |= of_store(run, result, step_seconds)
    if as_json:
        more = {"grids": [asdict(grid) for grid in of_grids]} if of_grids else {}
        print_json(asdict(result) | ({"needs": needs} if needs else {}) | more)
        return
    for line in describe(run.spec.mix):
        click.echo(line)
    click.echo()
    print_pairs(_facts(result))
    if needs:
        ranks = result.world_size
        print_table(("what it needs", "each rank", "in all"), list(_needs(needs, ranks, engine)), left=1)
        if left_out := not_counted(run):
            click.echo(f"Requests and bytes of {', '.join(left_out)} are not counted: only those of shards are.")
        if samples_per_batch and "requests_of_run" in needs:
            click.echo("Lanes that share packing buffers, as with small data, read fewer bytes in more requests.")
    if of_grids:
        _print_grids(of_grids)
    _print_leaves(result)
    if result.schedule:
        _print_schedule(result)
    for line in (*_mixing(result), *_ends(result)):
        click.echo(line)


def _rates_of(path: str, mix: str, batch_size: int) -> tuple[list[dict[str, float]], bool]:
    """Return the rates that `energon bench --json` wrote, by number of workers, and whether they are of packs.

    Those of another mix are named.
    """
    try:
        measured: dict[str, Any] = json.loads(Path(path).read_text())
        rates: list[dict[str, float]] = measured["rates"]
        missing = {"samples_per_batch", "trainer_memory"} - rates[0].keys()
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise click.UsageError(f"{path} is not what `energon bench --json` prints ({error!r})") from error
    if missing:
        raise click.UsageError(f"{path} was written by an older version of `energon bench`: run it again")
    if (size := measured.get("batch_size", batch_size)) != batch_size:
        raise click.UsageError(
            f"{path} was measured with --batch-size {size}, and the run has {batch_size}: bytes and memory are of "
            f"a batch. Measure it: energon bench {mix} --batch-size {batch_size} --json"
        )
    if (of := measured.get("mix", mix)) != mix:
        click.echo(f"{path} was measured with {of}: costs, bytes and memory are those of its samples", err=True)
    rates = sorted(rates, key=lambda rate: rate["workers"])
    packs = bool(measured.get("packing_buffer_size"))
    if packs and (batches := rates[0].get("samples", 1e9) / rates[0]["samples_per_batch"]) < _FEW:
        click.echo(f"{path} measured too few packs to go by ({batches:.0f} batches): give bench --seconds", err=True)
    return rates, packs


def _print_grids(grids: list[GridForecast]) -> None:
    def size(value: float | None) -> str | None:
        return None if value is None else format_bytes(round(value))

    rows = [
        {
            "a rank of": grid.name,
            "ranks": number(grid.ranks),
            "language ranks it serves": "-" if grid.name == "language" else f"{grid.serves:g}",
            "samples a step": f"{grid.samples:,.1f}",
            "media it decodes": f"{grid.media:,.1f}",
            "reads, about": size(grid.reads),
            "holds, at most": size(grid.holds),
            "tokens of media": None if grid.tokens is None else f"{grid.tokens:,.1f}",
            "their features": size(grid.features),
        }
        for grid in grids
    ]
    print_table([name for name in rows[0] if rows[0][name]], [list(filter(None, row.values())) for row in rows])


def _print_leaves(forecast: Forecast) -> None:
    amounts = (f"share of {forecast.unit}", f"{forecast.unit}, about") if forecast.unit else ()
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
                *((f"{leaf.amount_share or 0:.2%}", number(round(leaf.amount or 0))) if forecast.unit else ()),
            )
            for leaf in forecast.leaves
        ],
        left=2,
    )


def _print_schedule(forecast: Forecast) -> None:
    click.echo("Shares of the datasets, numbered as in the table above; between the points they follow the schedule:")
    print_table(
        ("shares at global draw", "in step", *(str(leaf_number) for leaf_number in range(1, len(forecast.leaves) + 1))),
        [
            (number(point.global_draw), number(point.step), *(f"{share:.2%}" for share in point.shares))
            for point in forecast.schedule
        ],
        left=0,
    )


def _facts(forecast: Forecast) -> Iterator[tuple[str, str]]:
    each = "" if forecast.per_step == 1 else f" of {forecast.per_step} microbatches on each rank"
    yield "steps", f"{forecast.steps:,}{each}, world size {forecast.world_size:,}, batch size {forecast.batch_size}"
    drawn = f"{forecast.draws:,} samples in {forecast.microbatches:,} microbatches"
    yield "draws", f"{drawn}; the mix has {forecast.num_samples:,}"
    yield "lanes", f"{forecast.num_lanes:,}: {forecast.lanes_because}"
    if forecast.masked_share:
        yield (
            "masked",
            f"{forecast.masked_share:.1%} of the microbatches, as {forecast.world_size} ranks do not divide "
            f"{forecast.num_lanes} lanes; {forecast.even_world_size} ranks would mask none",
        )
    if forecast.mix_epoch is not None:
        done = forecast.draws / forecast.mix_epoch
        yield "mix epoch", f"{forecast.mix_epoch:,.10g} samples; {epochs(done)} mix epochs in all"


def _needs(needs: dict[str, float], ranks: int, engine: str) -> Iterator[tuple[str, str, str]]:
    """Yield what a run needs: of each rank, and of all."""

    def size(of: float) -> str:
        return format_bytes(int(of))

    if "workers" in needs:
        workers = int(needs["workers"])
        enough = int(needs["enough_workers"])
        yield (f"workers ({enough} are enough)", number(workers), number(workers * ranks))
    if "cores" in needs:
        where = "on the Ray cluster" if engine == "ray" else "beside the trainers"
        yield f"cores for workers, {where}", f"{needs['cores'] / ranks:,.2f}", f"{needs['cores']:,.1f}"
    if "memory" in needs:
        yield "memory of the training process, without its model", size(needs["trainer_memory"]), ""
        yield "memory that a worker adds", size(needs["worker_memory"]), ""
        yield "batches of a worker that wait", size(needs["waiting_memory"]), ""
        yield "memory", size(needs["memory"]), size(needs["memory"] * ranks)
    if "bytes_per_second" in needs:
        over = needs["bytes_per_second"]
        name = "network, a second" if engine == "ray" else "batches, a second"
        yield name, size(over / ranks), size(over)
    if "disk_cache" in needs:
        yield "disk cache that holds all", "", size(needs["disk_cache"])
    start = f"in the first {number(int(needs.get('start_steps', 0)))} steps"
    times = {"start": start, "step": "a step", "day": "a day", "run": "of the run"}
    for time, said in times.items():
        if (asked := needs.get(f"requests_of_{time}")) is not None:
            read = needs[f"store_bytes_of_{time}"]
            yield f"requests to the store {said}", f"{asked / ranks:,.0f}", f"{asked:,.0f}"
            yield f"bytes from the store {said}", size(read / ranks), size(read)


def _mixing(forecast: Forecast) -> Iterator[str]:
    """Report how well the datasets are mixed, and which are not."""
    if forecast.mixing is None:
        return
    yield (
        f"Mixing: {forecast.mixing:.2f} (1 is a perfect shuffle). Of a dataset sorted into ten classes, 32 samples "
        f"that a lane draws in a row would have {forecast.mixing:.0%} of the classes that 32 random samples have."
    )
    poor = [leaf for leaf in forecast.leaves if leaf.mixing is not None and leaf.mixing < _POOR]
    if poor:
        names = ", ".join(f"{leaf_name(asdict(leaf))} ({leaf.mixing:.2f})" for leaf in poor[:3])
        more = f" and {len(poor) - 3} more" if len(poor) > 3 else ""
        yield (
            f"Poorly mixed: {names}{more}. If they are sorted in any way, raise --shuffle-buffer-size or "
            "--parallel-shard-iters."
        )


def _ends(forecast: Forecast) -> Iterator[str]:
    most = max(forecast.leaves, key=lambda leaf: leaf.epochs)
    if len(forecast.leaves) > 1 and forecast.draws:
        yield f"Repeated most: {leaf_name(asdict(most))}, {epochs(most.epochs)} epochs."
    if forecast.first_end is not None:
        names = ", ".join(leaf_name(asdict(forecast.leaves[leaf_number])) for leaf_number in forecast.ends_first)
        yield f"Ends first: {names}, in step {forecast.first_end - 1:,}."


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

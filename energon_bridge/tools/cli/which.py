"""`energon which STATE_OR_MIX --step S`: names the samples of steps, by arithmetic; reads no data.

With `--find TEXT` it reads a dataset, and names the samples that have a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.dataset_config import names_only
from energon_bridge.core.worker_config import available_cores
from energon_bridge.tools.cli.output import count_of, leaf_name, print_json, print_table
from energon_bridge.tools.cli.run_options import is_mix, mix_option, open_run, run_options

if TYPE_CHECKING:
    from energon_bridge.core.format.dataset import PreparedDataset
    from energon_bridge.tools.forecast.planned_run import Run
    from energon_bridge.tools.forecast.samples import KeyNames, NamedMicrobatch

_AT_A_TIME = 10_000
"""Rows written to a file at once."""


@click.command("which")
@click.argument("source", nargs=-1, metavar="STATE_OR_MIX...", type=click.Path())
@click.option(
    "--checkpoint", type=click.Path(), multiple=True, help="A checkpoint or state of a run: the same as STATE_OR_MIX."
)
@click.option(
    "--step", type=click.IntRange(min=0), help="Steps before it (of the optimizer), from the run's beginning."
)
@click.option("--until", type=click.IntRange(min=1), help="All steps from --step (default: the first) to before this.")
@click.option("--microbatch", type=click.IntRange(min=0), help="Number of a microbatch of the run, instead of a step.")
@click.option("--rank", type=click.IntRange(min=0), help="Only what this rank delivers.")
@click.option("--row", type=click.IntRange(min=0), help="Only this row of each microbatch.")
@mix_option
@click.option(
    "--find",
    multiple=True,
    metavar="TEXT",
    help="Instead of a step: the samples of a dataset or mix with this word, file name or id. Reads all shards.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write a row per sample to this .parquet or .json file.")
@run_options
def command(
    source: tuple[str, ...],
    checkpoint: tuple[str, ...],
    step: int | None,
    until: int | None,
    microbatch: int | None,
    rank: int | None,
    row: int | None,
    find: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Name the samples of steps of a run that is described by STATE_OR_MIX.

    \b
    energon which mix.yaml --step 100 --batch-size 8
    energon which loader.pt --step 5000 --world-size 8
    energon which --checkpoint step-0000150.ckpt --until 150 --out seen.parquet
    energon which data/captions --find 4711.jpg

    States (one file, or those of several ranks) say everything but the number of ranks; with a mix (a dataset's folder
    or URL, or a metadataset's YAML file) give the options that the run was started with. A step is one of the
    optimizer, counted from the beginning of the run, on one number of ranks: with gradient accumulation, give
    --global-batch-size. A microbatch is counted over all ranks.
    """
    from energon_bridge.tools.forecast.samples import KeyNames

    source += checkpoint
    if find:
        _check_find(source, find, [step, until, microbatch, rank, row, out])
        _find(source[0], find, options, as_json=as_json)
        return
    _check_options(source, step, until, microbatch, out)
    with names_only():
        run, notes = open_run(source, options, by_step=microbatch is None)
    if microbatch is None and rank is not None and rank >= run.world_size:
        raise ConfigurationError(f"--rank {rank} is not below the number of ranks, {run.world_size}")
    steps: Sequence[int] = range(step or 0, until) if until is not None else [step or 0]
    with KeyNames() as keys:
        named = _named(run, steps, microbatch, rank, keys)
        rows = 0
        if out is not None:
            flat = ({"step": number} | values for number, one in named for values in _flat(_plain(one, row)))
            rows = _write(out, flat)
        chosen = list(named)  # nothing is left of what was written
        notes += [f"Without keys: {why}" for why in keys.unknown.values()]
    if out is not None:
        click.echo(f"{count_of(rows, 'sample')} in {out}")
        notes = [*_assumptions(run, _ends(run, steps) if microbatch is None else [microbatch]), *notes]
    else:
        numbers = [one.microbatch for _, one in chosen if one.microbatch is not None]
        notes = [*_assumptions(run, numbers or [microbatch or 0]), *notes]
        microbatches = [({"step": number} if until is not None else {}) | _plain(one, row) for number, one in chosen]
        if as_json:
            print_json({"step": step, "assumption": notes[0], "microbatches": microbatches})
            return
        _print(microbatches, masked=sorted({one.rank for _, one in chosen if one.microbatch is None}))
    for note in notes:
        click.echo(note)


def _check_options(
    source: Sequence[str], step: int | None, until: int | None, microbatch: int | None, out: Path | None
) -> None:
    """Raise ConfigurationError for options that are missing or contradict each other."""
    if not source:
        raise ConfigurationError("give a mix, states, or --checkpoint FILE")
    if ((step is None) and (until is None)) == (microbatch is None):
        raise ConfigurationError("give either --step or --microbatch (or all steps up to one, by --until)")
    if out is not None and out.suffix not in (".parquet", ".json"):
        raise ConfigurationError(f"--out {out}: the name must end in .parquet or .json")
    if until is not None and (step or 0) >= until:
        raise ConfigurationError(f"--until {until} must be above --step {step}")


def _check_find(source: Sequence[str], texts: Sequence[str], others: Sequence[object]) -> None:
    """Raise ConfigurationError for what cannot be searched, and for options that `--find` does not take."""
    if len(source) != 1 or not is_mix(source):
        raise ConfigurationError("--find searches a dataset or a mix: give its folder, URL or YAML file, and no state")
    if any(value is not None for value in others):
        raise ConfigurationError(
            "--find goes through all samples: leave out --step, --until, --microbatch, --rank, --row and --out"
        )
    if not all(text.strip() for text in texts):
        raise ConfigurationError("--find needs a text, such as a file name")


def _find(path: str, texts: Sequence[str], options: dict[str, Any], *, as_json: bool) -> None:
    """Print the samples that hold one of some texts."""
    from energon_bridge.tools.check.find import find_samples

    datasets = _datasets(path, options)
    searched = list(find_samples(datasets, texts, num_workers=min(16, available_cores())))
    found = [one for of_shard in searched for one in of_shard.found]
    unreadable = sum(of_shard.num_unreadable for of_shard in searched)
    if as_json:
        print_json({"found": [asdict(one) for one in found], "unreadable": unreadable})
        return
    rows = [
        (
            leaf_name(asdict(one)),
            one.shard,
            one.key + " (excluded)" * one.excluded,
            str(one.shard_index),
            one.part,
            one.excerpt,
        )
        for one in found
    ]
    if rows:
        print_table(("dataset", "shard", "key", "in shard", "part", "text"), rows, left=3)
    count = sum(dataset.num_samples for dataset in datasets)
    click.echo(f"{len(found):,} of {count_of(count, 'sample')} {'has' if len(found) == 1 else 'have'} it.")
    if unreadable:
        why = next(of_shard.why for of_shard in searched if of_shard.why)
        click.echo(f"Not searched, for they cannot be read: {count_of(unreadable, 'sample')}. The first: {why}")


def _datasets(path: str, options: dict[str, Any]) -> list[PreparedDataset]:
    """Return the datasets of a mix, or one with its split parts: the part that is asked for, or all."""
    from energon_bridge.tools.check.lint import lint_mix, lint_parts

    parts = (options["split_part"],) if options["split_part"] else ()
    trust = options["trust_remote_code"]
    if path.endswith((".yaml", ".yml")):
        return [dataset for dataset, _ in lint_mix(path, split_parts=parts, trust_remote_code=trust)[0]]
    files = {name: options[name] for name in ("split_config", "dataset_config")}
    return lint_parts(path, split_parts=parts, trust_remote_code=trust, **files)[0]


def _named(
    run: Run, steps: Sequence[int], microbatch: int | None, rank: int | None, keys: KeyNames
) -> Iterator[tuple[int | None, NamedMicrobatch]]:
    """Yield the microbatches of some steps, or of one rank in them, each with its step; or one by its number."""
    from energon_bridge.tools.forecast.samples import name_microbatch, name_steps

    if microbatch is not None:
        yield None, name_microbatch(run, microbatch, keys)
        return
    for number, some in zip(steps, name_steps(run, steps, keys), strict=True):
        yield from ((number, one) for one in some if rank is None or one.rank == rank)


def _ends(run: Run, steps: Sequence[int]) -> list[int]:
    """Return the numbers of the first and one of the last microbatches of some steps, all ranks together."""
    from energon_bridge.core.order.topology import first_microbatch

    turns = (steps[0] * run.per_step, (steps[-1] + 1) * run.per_step - 1)
    return [first_microbatch(turn, num_lanes=run.num_lanes, world_size=run.world_size) for turn in turns]


def _assumptions(run: Run, microbatches: Sequence[int]) -> list[str]:
    """Return what the answers rest on; those before and after a state rest on different assumptions."""
    from energon_bridge.tools.forecast.samples import assumption

    return [*dict.fromkeys(assumption(run, number) for number in (min(microbatches), max(microbatches)))]


def _flat(microbatch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample of a microbatch."""
    of_all = {name: microbatch.get(name) for name in ("rank", "microbatch", "lane")}
    for sample in microbatch["samples"]:
        key = ":".join(map(str, sample["restore_key"]))
        rest = {name: value for name, value in sample.items() if name not in ("row", "path", "restore_key")}
        yield of_all | {"row": sample["row"], "dataset": sample["path"]} | rest | {"restore_key": key}


def _write(out: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Write rows to a file, atomically; return how many there are."""
    partial = out.with_name(f".{out.name}.partial")
    count = 0
    try:
        with _writer(partial, out.suffix) as write:
            while some := list(islice(rows, _AT_A_TIME)):
                write(some)
                count += len(some)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return count


@contextmanager
def _writer(path: Path, kind: str) -> Iterator[Any]:
    """Yield a function that appends rows: to a JSON list, one per line, or to a parquet file."""
    if kind == ".json":
        with path.open("w", encoding="utf-8") as file:
            begin = "[\n"

            def write_lines(rows: Iterable[dict[str, Any]]) -> None:
                nonlocal begin
                for values in rows:
                    file.write(begin + json.dumps(values, ensure_ascii=False))
                    begin = ",\n"

            yield write_lines
            file.write("\n]\n" if begin == ",\n" else "[]\n")
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigurationError("--out FILE.parquet needs pyarrow: pip install energon-bridge[parquet]") from error
    numbers = ("step", "rank", "microbatch", "lane", "row", "shard_index", "index", "epoch")
    kinds = dict.fromkeys(numbers, pyarrow.int64()) | {"excluded": pyarrow.bool_()}
    order = ("step", "rank", "microbatch", "lane", "row", "dataset", "split_part", "shard", "shard_index", "index")
    names = (*order, "epoch", "key", "excluded", "restore_key")
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in names])
    with parquet.ParquetWriter(path, schema) as writer:
        yield lambda rows: writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


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
                leaf_name(sample),
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

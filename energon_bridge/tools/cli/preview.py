"""`energon preview SOURCE`: samples, batches and steps of runs, in the terminal or as pages for a browser."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.registry import load
from energon_bridge.core.samples.showing import counted
from energon_bridge.tools.cli.output import count_of, print_json, width_of_output
from energon_bridge.tools.cli.run_options import (
    CountOr,
    encoder_of_model,
    is_mix,
    load_encoder,
    mix_option,
    open_mix,
    open_run,
    read_state,
    run_options,
)

if TYPE_CHECKING:
    from energon_bridge.core.loader.run_plan import DatasetSpec
    from energon_bridge.tools.forecast.epochs import Forecast
    from energon_bridge.tools.preview.batches import ShownBatch
    from energon_bridge.tools.preview.sources import Drawn, SampleSource

_IN_TERMINAL = 4
_ON_PAGES = 1000
_SAMPLES = CountOr("all", sys.maxsize, least=1)
_MODELS = ("config", "encoder", "processor")
"""Options that say what the batches are for."""
_OUTPUT = ("html", "serve", "port", "columns", "as_json")
_WITH_CONFIG = ("source", "config", "batches", "step", "steps", "rank", "world_size", *_OUTPUT)


class _Steps(click.ParamType):
    """Steps A to B, B not among them."""

    name = "a:b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        first, colon, last = str(value).partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            self.fail(f"{value!r} is not of the form A:B with A below B, such as 100:104", param, ctx)
        return range(int(first), int(last))


@dataclass(kw_only=True, slots=True)
class _Shown:
    """What to show: samples of a source, batches, and notes on them."""

    title: str
    source: SampleSource
    drawn: Iterable[Drawn]
    batches: list[ShownBatch]
    notes: list[str]
    forecast: Forecast | None = None


@click.command("preview")
@click.argument("source", nargs=-1, metavar="[SOURCE]...", type=click.Path())
@click.option("--html", type=click.Path(path_type=Path), help="Write pages to this folder: open its index.html.")
@click.option("--samples", type=_SAMPLES, help="Samples to show.  [default: 4; on pages 1,000]")
@click.option("--key", "keys", multiple=True, help="Samples of this key; repeatable.")
@click.option("--step", type=click.IntRange(min=0), help="Show what a run delivers in this step.")
@click.option("--steps", type=_Steps(), help="Show what it delivers in steps A to B, B not among them.")
@click.option(
    "--over",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="On pages, of a mix: also shares, epochs and mixing over a run of STEPS steps (with --batch-size).",
)
@click.option("--rank", type=click.IntRange(min=0), help="Only what this rank delivers.")
@click.option(
    "--config",
    type=click.Path(),
    help="A configuration of energon_bridge.training: show batches as its model gets them.",
)
@click.option("--batches", type=click.IntRange(min=1), help="Steps to show of it.  [default: 2]")
@click.option("--encoder", help="Show batches of your task encoder: MODULE:NAME of an object, or of what makes it.")
@click.option("--processor", metavar="MODEL", help="Show batches as this model gets them, a folder or name.")
@click.option("--packing-buffer-size", type=click.IntRange(min=1), help="With --encoder: pack, as training does.")
@mix_option
@click.option("--columns", type=click.IntRange(min=0), help="Width of pictures in a terminal; 0: none.  [default: 40]")
@click.option("--serve", is_flag=True, help="Serve the pages on this machine, until Ctrl-C (extra view).")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Of --serve; 0: any.")
@run_options
def command(
    source: tuple[str, ...],
    html: Path | None,
    samples: int | None,
    columns: int | None,
    serve: bool,
    port: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Show samples of SOURCE, batches as a model gets them, or what a run saw at a step.

    \b
    energon preview /data/captions                          the first samples, in the terminal
    energon preview mix.yaml --key 000123                   a sample by its key
    energon preview mix.yaml --html look --samples all      all samples, as pages: open look/index.html
    energon preview loader.pt --step 5000 --world-size 8    the samples of a step of a run
    energon preview mix.yaml --html look --over 10000 --batch-size 8 --world-size 64
                                                            also the mix over a run
    energon preview --config configs/packed.yaml --html look
                                                            batches, token by token
    energon preview data/chats --processor google/gemma-3-4b-it --batch-size 2
                                                            as that model gets them
    energon preview runs/shapes --step 160                  the same of a run, by its folder

    SOURCE is a dataset (a folder, a .jsonl file, or a URL of one), a metadataset's YAML file, or saved states and
    checkpoints of a run. With --config also section.key=value, as for the script. A step is one of the
    optimizer: as --config says, else by --global-batch-size, else one microbatch on every rank.
    """
    with _opened(source, serve or html is not None, samples, options) as shown:
        if as_json:
            _print_json(shown)
        elif serve:
            from energon_bridge.tools.preview.pages import server_of_pages

            serve_pages = server_of_pages()
            with TemporaryDirectory() as folder:
                out = html or Path(folder) / "pages"
                what = _write(shown, out)
                serve_pages(out, port, lambda address: click.echo(f"{what}: open {address}  (Ctrl-C ends it)"))
        elif html is not None:
            click.echo(f"{_write(shown, html)}: open {html / 'index.html'}")
        else:
            _print(shown, columns)


def _write(shown: _Shown, out: Path) -> str:
    """Write the pages; return a summary of their content."""
    from energon_bridge.tools.preview.pages import write_pages

    count = write_pages(
        out,
        shown.source,
        shown.drawn,
        title=shown.title,
        notes=shown.notes,
        batches=shown.batches,
        forecast=shown.forecast,
    )
    batches = f" in {counted(len(shown.batches), 'batch', 'batches')}" if shown.batches else ""
    return count_of(count, "sample") + batches


@contextmanager
def _opened(source: tuple[str, ...], pages: bool, samples: int | None, options: dict[str, Any]) -> Iterator[_Shown]:
    """Yield what the options request."""
    source = _run_folder(source, options)
    alone = all(options[name] is None for name in _MODELS)
    for name in ("batches", "packing_buffer_size"):
        if alone and options[name] is not None:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is for batches: add --config, --encoder or --processor"
            )
    steps = options["steps"]
    if options["over"] is not None and not (pages and alone and steps is None and options["step"] is None):
        raise ConfigurationError(
            "--over is for pages of a mix (--html or --serve, without --step, --config and --encoder). "
            "`energon plan MIX --steps N` prints the same"
        )
    if options["keys"] and not (alone and samples is None and steps is None and options["step"] is None):
        raise ConfigurationError("--key is for samples of a dataset or mix, without --samples, --step or a model")
    if options["batches"] is not None and not (steps is None and options["step"] is None):
        raise ConfigurationError("--batches counts steps from where a run is: leave it out, or give it without --step")
    if options["step"] is not None:
        steps = range(options["step"], options["step"] + 1)
    if options["config"] is not None:
        context = click.get_current_context()
        for name in context.params:
            if (
                name not in _WITH_CONFIG
                and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
            ):
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} has no effect on the training batches of a configuration or run: "
                    "leave it out. Settings of the run are given as section.key=value, as for the script"
                )
        try:
            opened_data = load("run", "data")
        except ImportError as error:
            raise ConfigurationError(f"--config needs pip install 'energon-bridge[lightning,hf]': {error}") from error
        files = [name for name in source if "=" not in name or Path(name).exists()]
        config = load("run", "configuration")(options["config"], [name for name in source if name not in files])
        if steps is not None and steps.stop > (end := config.train.max_steps):
            raise ConfigurationError(
                f"the run has the steps 0 to {end - 1:,} (train.max_steps={end}); there is no step {steps.stop - 1:,}. "
                "For a longer run, add train.max_steps=N"
            )
        with opened_data(config) as spec:
            yield _batches(files, spec, steps, options, options["config"], per_step=config.accumulate)
    elif not alone:
        mixes = [name for name in source if is_mix((name,))]
        mix = options["mix"] or (mixes[0] if len(mixes) == 1 else None)
        if mix is None:
            raise ConfigurationError("--encoder and --processor need data: give a dataset or mix, or states and --mix")
        model = options["processor"]
        encoder = load_encoder(options["encoder"]) if model is None else encoder_of_model(model)
        spec = open_mix(mix, options, task_encoder=encoder, packing_buffer_size=options["packing_buffer_size"])
        group = spec.worker_config.microbatches_per_global_batch
        files = [name for name in source if name not in mixes]
        yield _batches(files, spec, steps, options, mix, per_step=lambda ranks: 1 if group is None else group // ranks)
    elif not source:
        raise ConfigurationError("nothing to show: give a dataset, a mix, a saved state, or --config FILE")
    elif steps is not None:
        yield _show_steps(source, steps, options)
    else:
        yield _samples(source, samples or (_ON_PAGES if pages else _IN_TERMINAL), options)


def _run_folder(source: tuple[str, ...], options: dict[str, Any]) -> tuple[str, ...]:
    """Return the configuration of a run folder, which goes into the options, and a checkpoint; for --key, its data.

    The checkpoint is the latest one, or the latest before the requested step.
    """
    folders = [Path(name) for name in source if (Path(name) / "config.yaml").is_file()]
    if any(options[name] is not None for name in _MODELS) or len(folders) != 1:
        return source
    described = str(folders[0] / "config.yaml")
    if options["keys"]:
        changes = [name for name in source if Path(name) not in folders]
        return (load("run", "configuration")(described, changes).data.path,)
    options["config"] = described
    first = options["step"] if options["steps"] is None else options["steps"].start
    saved = sorted(folders[0].glob("checkpoints/step-*.ckpt"))
    if first is not None:
        saved = [path for path in saved if int(path.stem.partition("-")[2]) <= first]
    return (*(name for name in source if Path(name) not in folders), *map(str, saved[-1:]))


def _samples(source: tuple[str, ...], limit: int, options: dict[str, Any]) -> _Shown:
    """Return the first samples of a dataset or mix."""
    from energon_bridge.core.datasets import get_train_dataset
    from energon_bridge.core.worker_config import WorkerConfig
    from energon_bridge.tools.forecast.epochs import forecast, share_curve
    from energon_bridge.tools.forecast.run import run_of_mix
    from energon_bridge.tools.preview.sources import SampleSource

    if not is_mix(source):
        missing = next((name for name in source if "://" not in name and not Path(name).exists()), None)
        if missing is not None:
            raise ConfigurationError(f"{missing}: no such file or folder. Check the path.")
        raise ConfigurationError(
            f"{' '.join(source)}: not a dataset or mix. For a tar, give the folder that `energon prepare` was run on; "
            "convert other files (energon convert); for a saved state, add --step S to see what its run delivers then"
        )
    names = ("dataset_config", "split_config", "trust_remote_code")
    spec = get_train_dataset(
        source[0],
        split_part=options["split_part"] or "train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        **{name: options[name] for name in names},
    )
    samples = SampleSource(spec)
    over = options["over"]
    planned = None
    if over is not None:
        run = run_of_mix(open_mix(source[0], options))
        planned = replace(forecast(run, over), schedule=share_curve(run, over))
    there = spec.num_samples
    note = count_of(there, "sample") if limit >= there else f"the first {limit:,} of {count_of(there, 'sample')}"
    drawn: Iterable[Drawn] = samples.in_order(limit)
    if options["keys"]:
        drawn = list(samples.by_key(options["keys"]))
        note = f"{count_of(len(drawn), 'sample')} by key, of {count_of(there, 'sample')}"
    return _Shown(title=source[0], source=samples, drawn=drawn, batches=[], notes=[note], forecast=planned)


def _show_steps(source: tuple[str, ...], steps: range, options: dict[str, Any]) -> _Shown:
    """Return the samples that a run draws in some steps."""
    from energon_bridge.tools.forecast.samples import assumption
    from energon_bridge.tools.preview.sources import SampleSource, drawn_in

    run, notes = open_run(source, options)
    _check_rank(options["rank"], run.world_size)
    drawn = list(drawn_in(run, steps, options["rank"]))
    first = min((one.facts["microbatch"] for one in drawn if "microbatch" in one.facts), default=0)
    said = [_steps_title(steps), assumption(run, first), *notes]
    return _Shown(title=" ".join(source), source=SampleSource(run.spec, run.plan), drawn=drawn, batches=[], notes=said)


def _batches(
    files: list[str],
    spec: DatasetSpec,
    steps: range | None,
    options: dict[str, Any],
    title: str,
    *,
    per_step: Callable[[int], int] = lambda ranks: 1,
) -> _Shown:
    """Return what a run delivers in some steps."""
    from energon_bridge.tools.preview.batches import delivered, next_step
    from energon_bridge.tools.preview.sources import SampleSource

    state, ranks = read_state(files, options["world_size"]) if files else (None, options["world_size"] or 1)
    _check_rank(options["rank"], ranks)
    saved = re.search(r"step-(\d+)\.ckpt$", files[0]) if steps and options["config"] and len(files) == 1 else None
    if saved or steps is None:
        first = -(-next_step(spec, ranks, state) // per_step(ranks))
        if saved and first != int(saved[1]):  # only the run knows when that changed
            raise ConfigurationError(
                f"{files[0]}: is at step {int(saved[1]):,} of its run, but by {options['config']} its place in the "
                f"data is that of step {first:,}: the run was resumed with another global batch size, so steps have no "
                "fixed place. Leave --step out to see what follows the checkpoint"
            )
        steps = steps or range(first, first + (options["batches"] or 2))
    batches = delivered(spec, steps, world_size=ranks, state=state, rank=options["rank"], per_step=per_step(ranks))
    return _Shown(
        title=title,
        source=SampleSource(spec),
        drawn=[drawn for batch in batches for drawn in batch.drawn()],
        batches=batches,
        notes=[f"{_steps_title(steps)} of {count_of(ranks, 'rank')}"],
    )


def _steps_title(steps: range) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"


def _check_rank(rank: int | None, ranks: int) -> None:
    if rank is not None and rank >= ranks:
        raise ConfigurationError(f"--rank {rank} is not below the number of ranks, {ranks}")


def _print(shown: _Shown, columns: int | None) -> None:
    from energon_bridge.tools.preview.terminal import LEGEND, lines_of, lines_of_batch

    terminal = sys.stdout.isatty()
    width = width_of_output()
    # Without a terminal, pictures are named and not drawn.
    columns = min(40 if columns is None else columns, width - 4) if terminal else 0
    console = Console(width=width, highlight=False, soft_wrap=True)

    for note in shown.notes:
        console.print(note, style="dim", markup=False)
    if terminal and any(row.length for batch in shown.batches for row in batch.rows):
        console.print(LEGEND)
    for batch in shown.batches:
        for line in lines_of_batch(batch, columns=columns):
            console.print(line)
    if not shown.batches:
        draws = shown.source.records(shown.drawn, lambda record: list(lines_of(record, columns=columns)))
        for lines in draws:
            for line in lines:
                console.print(line)


def _print_json(shown: _Shown) -> None:
    from energon_bridge.tools.preview.records import Item, Picture, Record, Turn

    def plain(item: Item) -> Any:
        if isinstance(item, Picture):
            return {"picture": [item.width, item.height]}
        if isinstance(item, Turn):
            return {"role": item.role, "content": [plain(part) for part in item.items]}
        return {item.kind: item.text}

    def of(record: Record) -> dict[str, Any]:
        fields = [{"name": name, "items": [plain(item) for item in items]} for name, items in record.fields]
        head = {"dataset": record.dataset, "shard": record.shard, "index": record.index, "key": record.key}
        return head | dict(record.facts) | {"error": record.error or None, "fields": fields}

    batches = [
        {
            "step": batch.step,
            "rank": batch.rank,
            "microbatch": batch.microbatch,
            "inputs": list(batch.inputs),
            "rows": [
                {
                    "valid": row.valid,
                    "length": row.length,
                    "padding": row.padding,
                    "segments": [
                        one.segment._asdict() | {"tokens": [asdict(token) for token in one.tokens]}
                        for one in row.segments
                    ],
                }
                for row in batch.rows
            ],
        }
        for batch in shown.batches
    ]
    samples = list(shown.source.records(shown.drawn, of))
    print_json({"notes": shown.notes, "samples": samples} | ({"batches": batches} if batches else {}))

"""`energon preview SOURCE`: samples, batches and steps of runs, in the terminal or as pages for a browser."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
    is_mix,
    load_encoder,
    mix_option,
    open_mix,
    open_run,
    read_state,
    run_options,
)

if TYPE_CHECKING:
    from energon_bridge.core.loader.dataset_spec import DatasetSpec
    from energon_bridge.core.loader.position import OnMismatch
    from energon_bridge.tools.forecast.epochs import Forecast
    from energon_bridge.tools.preview.batches import ShownBatch
    from energon_bridge.tools.preview.sample_source import DrawnSample, SampleSource

_IN_TERMINAL = 4
_ON_PAGES = 1000
_SAMPLES = CountOr("all", sys.maxsize, least=1)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The options that say what to show.

    Attributes:
        source: A dataset, a mix, states, or the folder of a run; with a configuration also changes of it.
        pages: It is shown as pages, not in a terminal.
        config, encoder, processor: What the batches are for; without any of them samples are shown.
        run: The options of a run (`run_options` and `--mix`), for `open_mix` and `open_run`.
        after: The first checkpoint of a run after the steps, by which data they were of.
    """

    source: tuple[str, ...]
    pages: bool
    samples: int | None
    keys: tuple[str, ...]
    steps: range | None
    over: int | None
    rank: int | None
    batches: int | None
    config: str | None
    encoder: str | None
    processor: str | None
    packing_buffer_size: int | None
    run: dict[str, Any]
    after: str | None = None

    @property
    def for_model(self) -> bool:
        """Whether batches are asked for, as a model gets them."""
        return any(name is not None for name in (self.config, self.encoder, self.processor))


@dataclass(kw_only=True, slots=True)
class _Shown:
    """What to show: samples of a source, batches, and notes on them."""

    title: str
    source: SampleSource
    drawn: Iterable[DrawnSample]
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
    keys: tuple[str, ...],
    step: int | None,
    steps: range | None,
    over: int | None,
    rank: int | None,
    config: str | None,
    batches: int | None,
    encoder: str | None,
    processor: str | None,
    packing_buffer_size: int | None,
    columns: int | None,
    serve: bool,
    port: int,
    as_json: bool,
    **run: Any,
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
    asked = _Asked(
        source=source,
        pages=serve or html is not None,
        samples=samples,
        keys=keys,
        steps=steps if step is None else range(step, step + 1),
        over=over,
        rank=rank,
        batches=batches,
        config=config,
        encoder=encoder,
        processor=processor,
        packing_buffer_size=packing_buffer_size,
        run=run,
    )
    with _opened(asked) as shown:
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
def _opened(asked: _Asked) -> Iterator[_Shown]:
    """Yield what is asked for."""
    asked = _of_run_folder(asked)
    _check(asked)
    if asked.config is not None:
        with _opened_config(asked.config, asked) as shown:
            yield shown
    elif asked.for_model:
        yield _encoded(asked)
    elif not asked.source:
        raise ConfigurationError("nothing to show: give a dataset, a mix, a saved state, or --config FILE")
    elif asked.steps is not None:
        yield _show_steps(asked.steps, asked)
    else:
        yield _samples(asked)


def _of_run_folder(asked: _Asked) -> _Asked:
    """Replace the folder of a run by its configuration and a checkpoint; for --key, by its data.

    The checkpoint is the latest one, or the latest before the requested step.
    """
    folders = [Path(name) for name in asked.source if (Path(name) / "config.yaml").is_file()]
    if asked.for_model or len(folders) != 1:
        return asked
    described = str(folders[0] / "config.yaml")
    rest = tuple(name for name in asked.source if Path(name) not in folders)
    if asked.keys:
        return replace(asked, source=(load("run", "configuration")(described, [*rest]).data.path,))
    saved = sorted(folders[0].glob("checkpoints/step-*.ckpt"))
    after = None
    if asked.steps is not None:
        number = sum(int(path.stem.partition("-")[2]) <= asked.steps.start for path in saved)
        after = next(map(str, saved[number:]), None)
        saved = saved[:number]
    return replace(asked, source=(*rest, *map(str, saved[-1:])), config=described, after=after)


def _check(asked: _Asked) -> None:
    """Raise ConfigurationError for options that have no effect beside others."""
    of_batches = {"batches": asked.batches, "packing-buffer-size": asked.packing_buffer_size}
    for name, value in of_batches.items():
        if value is not None and not asked.for_model:
            raise ConfigurationError(f"--{name} is for batches: add --config, --encoder or --processor")
    samples_of_mix = not asked.for_model and asked.steps is None
    if asked.over is not None and not (asked.pages and samples_of_mix):
        raise ConfigurationError(
            "--over is for pages of a mix (--html or --serve, without --step, --config and --encoder). "
            "`energon plan MIX --steps N` prints the same"
        )
    if asked.keys and not (samples_of_mix and asked.samples is None):
        raise ConfigurationError("--key is for samples of a dataset or mix, without --samples, --step or a model")
    if asked.batches is not None and asked.steps is not None:
        raise ConfigurationError("--batches counts steps from where a run is: leave it out, or give it without --step")


@contextmanager
def _opened_config(config: str, asked: _Asked) -> Iterator[_Shown]:
    """Yield the batches of a configuration of `energon_bridge.training`."""
    context = click.get_current_context()
    for name in context.params:
        if name not in _WITH_CONFIG and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} has no effect on the training batches of a configuration or run: "
                "leave it out. Settings of the run are given as section.key=value, as for the script"
            )
    try:
        opened_data = load("run", "data")
    except ImportError as error:
        raise ConfigurationError(f"--config needs pip install 'energon-bridge[lightning,hf]': {error}") from error
    files = [name for name in asked.source if "=" not in name or Path(name).exists()]
    described = load("run", "configuration")(config, [name for name in asked.source if name not in files])
    if asked.steps is not None and asked.steps.stop > (end := described.train.max_steps):
        raise ConfigurationError(
            f"the run has the steps 0 to {end - 1:,} (train.max_steps={end}); there is no step "
            f"{max(end, asked.steps.start):,}. For a longer run, add train.max_steps=N"
        )
    with opened_data(described) as spec:
        # A run that adapts goes on from a checkpoint with the data of now.
        adapts = described.data.settings.get("on_mismatch", "refuse")
        yield _batches(files, spec, asked, config, per_step=described.accumulate, on_mismatch=adapts)


def _encoded(asked: _Asked) -> _Shown:
    """Return the batches of a mix, or of the run of a state, as the encoder of the options makes them."""
    from energon_bridge.core.loader.saved_run import read
    from energon_bridge.tools.forecast.planned_run import microbatches_of_step, spec_of_state

    mixes = [name for name in asked.source if is_mix((name,))]
    files = [name for name in asked.source if name not in mixes]
    mix = asked.run["mix"] or (mixes[0] if len(mixes) == 1 else None)
    encoder = load_encoder(asked.encoder, asked.processor)
    if files:
        state, ranks = read_state(files, asked.run["world_size"])
        names = ("split_part", "dataset_config", "split_config", "trust_remote_code")
        given = {name: asked.run[name] for name in names}
        spec = spec_of_state(read(state), world_size=ranks, mix=mix, task_encoder=encoder, **given)
        spec = load("drop_in", "dataset")(spec)
        size = asked.run["global_batch_size"]
        per_step = partial(microbatches_of_step, spec, global_batch_size=size)
        return _batches(files, spec, asked, " ".join(files), per_step=per_step)
    if mix is None:
        raise ConfigurationError("--encoder and --processor need data: give a dataset, a mix, or the states of a run")
    spec = open_mix(mix, asked.run, task_encoder=encoder, packing_buffer_size=asked.packing_buffer_size)
    group = spec.worker_config.microbatches_per_global_batch
    return _batches([], spec, asked, mix, per_step=lambda ranks: 1 if group is None else group // ranks)


def _samples(asked: _Asked) -> _Shown:
    """Return the first samples of a dataset or mix, or those of some keys."""
    from energon_bridge.core.datasets import get_train_dataset
    from energon_bridge.core.worker_config import WorkerConfig
    from energon_bridge.tools.forecast.epochs import forecast, share_curve
    from energon_bridge.tools.forecast.planned_run import run_of_mix
    from energon_bridge.tools.preview.sample_source import SampleSource

    _check_is_mix(asked.source)
    path = asked.source[0]
    names = ("dataset_config", "split_config", "trust_remote_code")
    spec = get_train_dataset(
        path,
        split_part=asked.run["split_part"] or "train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        **{name: asked.run[name] for name in names},
    )
    samples = SampleSource(spec)
    planned = None
    if asked.over is not None:
        run = run_of_mix(open_mix(path, asked.run))
        planned = replace(forecast(run, asked.over), schedule=share_curve(run, asked.over))
    there = spec.num_samples
    limit = asked.samples or (_ON_PAGES if asked.pages else _IN_TERMINAL)
    note = count_of(there, "sample") if limit >= there else f"the first {limit:,} of {count_of(there, 'sample')}"
    drawn: Iterable[DrawnSample] = samples.in_order(limit)
    if asked.keys:
        drawn = list(samples.by_key(asked.keys))
        note = f"{count_of(len(drawn), 'sample')} by key, of {count_of(there, 'sample')}"
    return _Shown(title=path, source=samples, drawn=drawn, batches=[], notes=[note], forecast=planned)


def _check_is_mix(source: tuple[str, ...]) -> None:
    if is_mix(source):
        return
    missing = next((name for name in source if "://" not in name and not Path(name).exists()), None)
    if missing is not None:
        raise ConfigurationError(f"{missing}: no such file or folder. Check the path.")
    raise ConfigurationError(
        f"{' '.join(source)}: not a dataset or mix. For a tar, give the folder that `energon prepare` was run on; "
        "convert other files (energon convert); for a saved state, add --step S to see what its run delivers then"
    )


def _show_steps(steps: range, asked: _Asked) -> _Shown:
    """Return the samples that a run draws in some steps."""
    from energon_bridge.tools.forecast.samples import assumption
    from energon_bridge.tools.preview.sample_source import SampleSource, drawn_in

    run, notes = open_run(asked.source, asked.run)
    _check_rank(asked.rank, run.world_size)
    drawn = list(drawn_in(run, steps, asked.rank))
    first = min((one.facts["microbatch"] for one in drawn if "microbatch" in one.facts), default=0)
    said = [_steps_title(steps), assumption(run, first), *notes]
    title = " ".join(asked.source)
    return _Shown(title=title, source=SampleSource(run.spec, run.plan), drawn=drawn, batches=[], notes=said)


def _batches(
    files: list[str],
    spec: DatasetSpec,
    asked: _Asked,
    title: str,
    *,
    per_step: Callable[[int], int],
    on_mismatch: OnMismatch = "refuse",
) -> _Shown:
    """Return what a run delivers in some steps; `per_step` gives the microbatches of a rank for a number of ranks."""
    from energon_bridge.tools.preview.batches import delivered, next_step, reads_same, was_changed
    from energon_bridge.tools.preview.sample_source import SampleSource

    world_size = asked.run["world_size"]
    steps = asked.steps
    state, ranks = read_state(files, world_size) if files else (None, world_size or 1)
    _check_rank(asked.rank, ranks)
    if asked.after and spec.kind == "train":
        later = read_state([asked.after], None)[0]
        if state is None and was_changed(spec, later):
            raise ConfigurationError(
                f"the mix, its weights or bans changed before {asked.after}, and no older checkpoint is left to say "
                "what the run saw until then: give a later step"
            )
        if not reads_same(spec, later):  # it changed after them
            on_mismatch = "refuse"
    saved = re.search(r"step-(\d+)\.ckpt$", files[0]) if steps and asked.config and len(files) == 1 else None
    if saved or steps is None:
        first = -(-next_step(spec, ranks, state) // per_step(ranks))
        if saved and first != int(saved[1]):  # only the run knows when that changed
            raise ConfigurationError(
                f"{files[0]}: is at step {int(saved[1]):,} of its run, but by {asked.config} its place in the "
                f"data is that of step {first:,}: the run was resumed with another global batch size, so steps have no "
                "fixed place. Leave --step out to see what follows the checkpoint"
            )
        steps = steps or range(first, first + (asked.batches or 2))
    of_run: Any = {"state": state, "rank": asked.rank, "per_step": per_step(ranks), "on_mismatch": on_mismatch}
    batches = delivered(spec, steps, world_size=ranks, **of_run)
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
    from energon_bridge.tools.preview.batches import plain_batch
    from energon_bridge.tools.preview.records import plain_record

    batches = [plain_batch(batch) for batch in shown.batches]
    samples = list(shown.source.records(shown.drawn, plain_record))
    print_json({"notes": shown.notes, "samples": samples} | ({"batches": batches} if batches else {}))

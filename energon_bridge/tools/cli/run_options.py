"""Options shared by the commands on runs: what a run reads, on how many ranks, and how to open it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon_bridge.core.errors import ConfigurationError, call_settings
from energon_bridge.core.format.foreign import format_named
from energon_bridge.core.registry import load
from energon_bridge.tools.cli.prepare_options import added, config_options

if TYPE_CHECKING:
    from energon_bridge.core.loader.dataset_spec import DatasetSpec
    from energon_bridge.core.loader.saved_run import State
    from energon_bridge.tools.forecast.planned_run import Run


class CountOr(click.ParamType):
    """A count, or a word for a value of its own: `none`, `all`."""

    def __init__(self, word: str, value: int | None, *, least: int = 0) -> None:
        self.name = f"n|{word}"
        self._word = word
        self._value = value
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Return the number, or the value of the word."""
        if isinstance(value, int):
            return value
        if str(value).lower() == self._word:
            return self._value
        if not str(value).isdecimal() or int(value) < self._least:
            least = f" of at least {self._least}" if self._least else ""
            self.fail(f"{value!r} is neither a number{least} nor {self._word!r}", param, ctx)
        return int(value)


_COUNT = CountOr("none", None)
_MIX_SUFFIXES = (".yaml", ".yml", ".jsonl")
_POSITIVE = click.IntRange(min=1)
_LONGEST = 1 << 24

run_options = added(
    click.option("--split-part", default=None, help="Part of the split to read.  [default: train]"),
    click.option("--batch-size", "--micro-batch-size", type=_COUNT, default=None, help="Samples in a microbatch."),
    click.option(
        "--global-batch-size",
        type=_POSITIVE,
        help="Samples in a step of the optimizer; decides the number of lanes.  [default: a microbatch on each rank]",
    ),
    click.option("--world-size", type=_POSITIVE, help="Data-parallel ranks.  [default: 1]"),
    click.option("--num-workers", type=click.IntRange(min=0), default=4, show_default=True, help="Workers of a rank."),
    click.option("--num-lanes", type=_POSITIVE, help="Lanes of the run.  [default: as a loader chooses]"),
    click.option("--seed", default=0, show_default=True, help="Seed of the run."),
    click.option("--shuffle-buffer-size", type=_COUNT, default=100, show_default=True),
    click.option(
        "--max-samples-per-sequence", type=_COUNT, default=None, help="Most samples in a slice.  [default: none]"
    ),
    click.option("--parallel-shard-iters", type=_POSITIVE, default=16, show_default=True),
    click.option("--shuffle-over-epochs", type=int, default=1, show_default=True, help="Epochs shuffled as one."),
    click.option("--no-shuffle", is_flag=True, help="The datasets' own order."),
    config_options,
    click.option("--trust-remote-code", is_flag=True, help="Run the sample_loader that comes with a dataset."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)
"""The options that `open_mix` takes, and `--json`."""
mix_option = click.option(
    "--mix",
    type=click.Path(),
    help="With a state: what the run was started with, where the state alone does not say it.",
)


def open_mix(
    path: str, options: dict[str, Any], *, task_encoder: Any = None, packing_buffer_size: int | None = None
) -> DatasetSpec:
    """Return the training dataset of a mix and the options; without a task encoder, with the default one.

    Raises:
        ConfigurationError: An option is missing, or two contradict each other.
    """
    from energon_bridge.core.datasets import get_train_dataset  # imports torch, which no help text needs
    from energon_bridge.core.worker_config import WorkerConfig

    batch_size = options["batch_size"]
    global_batch = options["global_batch_size"]
    ranks = options["world_size"] or 1
    given = click.get_current_context().get_parameter_source("batch_size")
    if given is click.core.ParameterSource.DEFAULT:
        raise ConfigurationError("give the samples per microbatch with --batch-size (none: samples without batches)")
    group = None
    if global_batch is not None:
        group, rest = divmod(global_batch, batch_size or 1)
        if rest or group % ranks:
            raise ConfigurationError(
                f"--global-batch-size {global_batch} is not a multiple of {(batch_size or 1) * ranks}, the "
                f"samples that {ranks} ranks of --batch-size {batch_size} deliver in a step"
            )
    config = WorkerConfig(
        rank=0,
        world_size=ranks,
        num_workers=options["num_workers"],
        seed=options["seed"],
        num_lanes=options["num_lanes"],
        microbatches_per_global_batch=group,
    )
    dataset = get_train_dataset(
        path,
        split_part=options["split_part"] or "train",
        worker_config=config,
        batch_size=batch_size,
        task_encoder=task_encoder,
        packing_buffer_size=packing_buffer_size,
        shuffle_buffer_size=options["shuffle_buffer_size"],
        max_samples_per_sequence=options["max_samples_per_sequence"],
        parallel_shard_iters=options["parallel_shard_iters"],
        shuffle_over_epochs_multiplier=None if options["no_shuffle"] else options["shuffle_over_epochs"],
        dataset_config=options["dataset_config"],
        split_config=options["split_config"],
        trust_remote_code=options["trust_remote_code"],
    )
    return load("drop_in", "dataset")(dataset)


def is_mix(source: Sequence[str]) -> bool:
    """Whether an argument names a mix; files with other names are states."""
    path = source[0]
    return len(source) == 1 and (
        path.endswith(_MIX_SUFFIXES) or "://" in path or Path(path).is_dir() or bool(format_named(path))
    )


def read_state(files: Sequence[str], world_size: int | None) -> tuple[State, int]:
    """Return the state stored in the files of a run's ranks, and the number of ranks: the given one, or theirs."""
    from energon_bridge.core.loader.fits import merge
    from energon_bridge.core.loader.state_files import read_states
    from energon_bridge.tools.check.state_summary import rank_of

    states = read_states(files)
    ranks = {of_one for state in states if (of_one := rank_of(state)) is not None}
    return merge(states), world_size or (max(size for _, size in ranks) if ranks else 1)


def open_run(source: Sequence[str], options: dict[str, Any], *, by_step: bool = True) -> tuple[Run, list[str]]:
    """Return the run that a mix with options, or saved states, describe, and notes on it.

    Args:
        source: The mix, or files of states.
        options: Those of `run_options`.
        by_step: Whether the caller asks about steps, for which the number of ranks matters.
    """
    from energon_bridge.tools.forecast.planned_run import run_of_mix, run_of_state  # torch, which no help text needs

    if (Path(source[0]) / "checkpoints").is_dir() and (Path(source[0]) / "config.yaml").is_file():
        saved = [str(path) for path in sorted(Path(source[0]).glob("checkpoints/step-*.ckpt"))]
        raise ConfigurationError(
            f"{source[0]} is the folder of a run: give one of its checkpoints ({', '.join(saved) or 'there is none'}), "
            f"or see what its encoder makes of a step with energon preview {source[0]} --step S"
        )
    if is_mix(source):
        run = run_of_mix(open_mix(source[0], options))
        return run, _steps_noted(run, by_step)
    state, world_size = read_state(source, options["world_size"])
    notes = []
    if options["world_size"] is None and by_step:
        notes.append(f"World size {world_size}: a state does not know how many ranks there were, --world-size says it.")
    run = run_of_state(
        state,
        world_size=world_size if by_step else 1,
        mix=options["mix"],
        global_batch_size=options["global_batch_size"] if by_step else None,
        **{name: options[name] for name in ("split_part", "dataset_config", "split_config", "trust_remote_code")},
    )
    if run.per_step == 1 and options["global_batch_size"] is None and by_step and not run.spec.ends:
        notes.append(
            "A step is taken for one microbatch on each rank: with gradient accumulation, give --global-batch-size."
        )
    return run, [*notes, *_steps_noted(run, by_step)]


def _steps_noted(run: Run, by_step: bool) -> list[str]:
    return [f"A step is {run.per_step} microbatches on each rank."] if by_step and run.per_step > 1 else []


def load_encoder(spec: str | None, model: str | None = None) -> Any:
    """Return the task encoder that `MODULE:NAME` names, a class or function is called; or that of a model, if given.

    Raises:
        ConfigurationError: There is none, or both are given.
    """
    if model is not None:
        if spec is not None:
            raise ConfigurationError("--encoder and --processor: give one of them.")
        return encoder_of_model(model)
    if spec is None:
        return None
    encoder = named(spec, "--encoder", "my_project.encoders:make_encoder")
    return encoder() if isinstance(encoder, type) or not hasattr(encoder, "encode_sample") else encoder


def encoder_of_model(model: str) -> Any:
    """Return the encoder of conversations for a model of transformers, which cuts nothing off."""
    from energon_bridge.models.conversations.cooker import COOKERS
    from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder

    call_settings({"max_sound_seconds": "in training, data.max_sound_seconds"})
    try:
        encoder = ChatTemplateTaskEncoder.from_pretrained(model, ChatConfig(seq_length=_LONGEST, over_long="raise"))
    except ConfigurationError as error:
        if os.path.isdir(model) or ("/" in model and not model.endswith(_MIX_SUFFIXES)):
            raise
        raise ConfigurationError(
            f"--processor {model!r}: expected the folder of a model, or its name on the hub, such as "
            "Qwen/Qwen2.5-VL-7B-Instruct. Of a preset, that is RUN/model of a run; MODULE:NAME is for --encoder, and a "
            f"configuration for energon preview --config. It was looked for: {error}"
        ) from error
    encoder.cookers = COOKERS
    return encoder


_DROP_IN = "write `python -m energon_bridge.compat -m energon_bridge.tools.cli.main` in place of `energon`"


def named(spec: str, option: str, example: str) -> Any:
    """Return what `MODULE:NAME`, the value of an option, names; modules may lie in the current folder.

    Raises:
        ConfigurationError: There is none of that name.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConfigurationError(f"{option} {spec!r}: expected MODULE:NAME, such as {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing = str(getattr(error, "name", None))
        hint = (
            f". It is written for megatron.energon: {_DROP_IN}" if missing in ("megatron", "megatron.energon") else ""
        )
        raise ConfigurationError(f"{option} {spec!r}: cannot import it: {error}{hint}") from error

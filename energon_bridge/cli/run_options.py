"""The options that `energon plan` and `energon which` share: what a run reads, and on how many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from energon_bridge.errors import ConfigurationError

if TYPE_CHECKING:
    from energon_bridge.loader.spec import DatasetSpec


class _CountOrNone(click.ParamType):
    """A count, or `none`."""

    name = "n|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if isinstance(value, int):
            return value
        if str(value).lower() == "none":
            return None
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither a number nor 'none'", param, ctx)
        return int(value)


_POSITIVE = click.IntRange(min=1)

_OPTIONS = (
    click.option("--split-part", default=None, help="Part of the split to read.  [default: train]"),
    click.option(
        "--batch-size", "--micro-batch-size", type=_CountOrNone(), default=None, help="Samples in a microbatch."
    ),
    click.option("--global-batch-size", type=_POSITIVE, help="Samples in a global batch: decides the number of lanes."),
    click.option("--world-size", type=_POSITIVE, help="Data-parallel ranks.  [default: 1]"),
    click.option("--num-workers", type=click.IntRange(min=0), default=4, show_default=True, help="Workers of a rank."),
    click.option("--num-lanes", type=_POSITIVE, help="Lanes of the run.  [default: as a loader chooses]"),
    click.option("--seed", default=0, show_default=True, help="Seed of the run."),
    click.option("--shuffle-buffer-size", type=_CountOrNone(), default=100, show_default=True),
    click.option(
        "--max-samples-per-sequence",
        type=_CountOrNone(),
        default=None,
        help="Most samples in a slice.  [default: none]",
    ),
    click.option("--parallel-shard-iters", type=_POSITIVE, default=16, show_default=True),
    click.option("--shuffle-over-epochs", type=int, default=1, show_default=True, help="Epochs shuffled as one."),
    click.option("--no-shuffle", is_flag=True, help="The datasets' own order."),
    click.option("--dataset-config", default="dataset.yaml", show_default=True, help="Dataset file in .nv-meta."),
    click.option("--split-config", default="split.yaml", show_default=True, help="Split file in .nv-meta."),
    click.option("--trust-remote-code", is_flag=True, help="Load the sample_loader that comes with a dataset."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; what `open_mix` takes comes as keywords of their names."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def open_mix(path: str, options: dict[str, Any], *, task_encoder: Any = None) -> DatasetSpec:
    """Return the dataset for training on a mix, as the options say; without a task encoder, with the default one.

    Raises:
        ConfigurationError: An option is missing, or two do not fit together.
    """
    from energon_bridge.datasets import get_train_dataset  # brings torch, which no help text needs
    from energon_bridge.topology import WorkerConfig

    batch_size, global_batch, ranks = options["batch_size"], options["global_batch_size"], options["world_size"] or 1
    given = click.get_current_context().get_parameter_source("batch_size")
    if given is click.core.ParameterSource.DEFAULT:
        raise ConfigurationError("give the samples in a microbatch with --batch-size (none: samples without batches)")
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
    return get_train_dataset(
        path,
        split_part=options["split_part"] or "train",
        worker_config=config,
        batch_size=batch_size,
        task_encoder=task_encoder,
        shuffle_buffer_size=options["shuffle_buffer_size"],
        max_samples_per_sequence=options["max_samples_per_sequence"],
        parallel_shard_iters=options["parallel_shard_iters"],
        shuffle_over_epochs_multiplier=None if options["no_shuffle"] else options["shuffle_over_epochs"],
        dataset_config=options["dataset_config"],
        split_config=options["split_config"],
        trust_remote_code=options["trust_remote_code"],
    )

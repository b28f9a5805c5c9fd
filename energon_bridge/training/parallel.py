"""How the processes of a run share a model and its data, and the refusals where they cannot.

`tp * pp * cp` processes are one replica of the model and train on the same batches; the replicas are data-parallel. The
checks here need no torch, so that a mistake costs seconds and not the start of a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from energon_bridge.errors import ConfigurationError

if TYPE_CHECKING:
    from energon_bridge.training.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many processes share one replica of the model; more than one needs `trainer: megatron`.

    Args:
        tp: Tensor-parallel ranks: each has a share of the heads and of the columns of every layer.
        pp: Pipeline stages: each has a share of the language model's layers.
        cp: Context-parallel ranks: each has a share of the tokens of every sequence.
        feeding: `all` ranks of a replica load its batches, or one of them does and will `broadcast` them.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    feeding: str = "all"

    @property
    def replica_size(self) -> int:
        """Return the processes that one replica of the model takes."""
        return self.tp * self.pp * self.cp

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas that `world_size` processes make.

        Raises:
            ConfigurationError: Some processes would be left over.
        """
        replica = self.replica_size
        if world_size % replica:
            lower = world_size // replica * replica
            usable = f"{lower} or {lower + replica}" if lower else str(replica)
            raise ConfigurationError(
                f"{world_size} processes cannot be shared out: one replica of the model takes parallel.tp={self.tp} * "
                f"parallel.pp={self.pp} * parallel.cp={self.cp} = {replica} processes, so their number must be a "
                f"multiple of {replica}. Start {usable}, or change parallel"
            )
        return world_size // replica


def check_parallel(config: RunConfig) -> None:
    """Check what can be checked without knowing the number of processes.

    Raises:
        ConfigurationError: The model or its sequences cannot be shared out like that.
    """
    parallel, model, data = config.parallel, config.model, config.data
    for name in ("tp", "pp", "cp"):
        if (value := getattr(parallel, name)) < 1:
            raise ConfigurationError(f"parallel.{name} must be at least 1, got {value}")
    if parallel.feeding not in ("all", "broadcast"):
        raise ConfigurationError(f"parallel.feeding must be 'all' or 'broadcast', got {parallel.feeding!r}")
    if config.trainer != "megatron":
        if parallel != ParallelConfig():
            raise ConfigurationError(
                f"parallel.tp={parallel.tp} parallel.pp={parallel.pp} parallel.cp={parallel.cp} "
                f"parallel.feeding={parallel.feeding} are about models that processes share, and with "
                f"trainer={config.trainer} none do: set trainer=megatron, or leave parallel out"
            )
        return
    if model.name_or_path is not None:
        raise ConfigurationError(
            f"trainer=megatron builds the presets in megatron-core and does not load model.name_or_path="
            f"{model.name_or_path}: set it to null and choose model.preset, or set trainer=lightning"
        )
    for name, value in (
        ("model.freeze", model.freeze),
        ("model.attn_implementation", model.attn_implementation),
        ("train.gradient_checkpointing", config.train.gradient_checkpointing),
        ("checkpoint.export", config.checkpoint.export),
    ):
        if value:
            raise ConfigurationError(
                f"{name}={value} is not done by trainer=megatron: leave it out, or trainer=lightning"
            )
    if config.train.precision not in PRECISIONS:
        raise ConfigurationError(
            f"train.precision={config.train.precision} is not known to trainer=megatron, which has "
            f"{', '.join(PRECISIONS)}"
        )
    for total, count, words in (
        ("num_heads", parallel.tp, "tensor-parallel ranks (parallel.tp)"),
        ("hidden_size", parallel.tp, "tensor-parallel ranks (parallel.tp)"),
        ("num_layers", parallel.pp, "pipeline stages (parallel.pp)"),
    ):
        if getattr(model, total) % count:
            raise ConfigurationError(
                f"model.{total}={getattr(model, total)} cannot be shared by {count} {words}: it must be a multiple of "
                f"{count}"
            )
    if parallel.cp > 1 and data.seq_length % (2 * parallel.cp):
        raise ConfigurationError(
            f"data.seq_length={data.seq_length} cannot be shared by parallel.cp={parallel.cp} context-parallel ranks: "
            f"each takes two pieces of every sequence, so it must be a multiple of {2 * parallel.cp}"
        )


PRECISIONS = ("32-true", "bf16-mixed")
"""What `train.precision` may be with `trainer: megatron`."""

"""One training run, from its configuration to `predictions.jsonl`.

Its folder is that of `run_folder.py`, its data that of `run_data.py`, its model that of `run_model.py`.

The same code runs in one process, under torchrun and under SLURM: how many processes there are is read from the
environment, and all of them are data-parallel ranks.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from energon_bridge.core.errors import ConfigurationError, EnergonError, optional_packages
from energon_bridge.tools.report.callback import RunReport
from energon_bridge.trainers.feedback import MixFeedback
from energon_bridge.trainers.lightning import MixFeedbackCallback
from energon_bridge.trainers.replica.warmup import CostWarmup
from energon_bridge.training.callbacks import (
    TIMES,
    AtomicCheckpointIO,
    Checkpointer,
    CostWarmupCallback,
    DueValidation,
    MicrobatchTimer,
    ProgressReporter,
    list_checkpoints,
    read_losses,
    read_metric,
    say_complete,
    say_fresh_start,
)
from energon_bridge.training.config import RunConfig
from energon_bridge.training.generation import exact_match, write_predictions
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import export_model
from energon_bridge.training.run_data import build_data_module, build_feedback, load_inputs, withdraw
from energon_bridge.training.run_folder import discard_replaced, kept_description, prepare_run_dir
from energon_bridge.training.run_model import load_bundle

with optional_packages():
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended.

    `read` is the fraction of validation answers that are exactly right, None if none were generated. `stopped` means
    that the run was asked to stop before its last step.
    """

    step: int
    validation_loss: float | None
    read: float | None
    stopped: bool
    main_rank: bool


def run(config: RunConfig, *, resume: bool = False, overwrite: bool = False) -> RunResult:
    """Train and validate.

    Args:
        config: The configuration of the run.
        resume: Continue from the latest checkpoint of the run folder, if there is one.
        overwrite: Remove an earlier run from the run folder, when the new one begins its first step.

    Raises:
        ConfigurationError: The run folder holds another run, or the configuration does not fit together.
    """
    run_dir = Path(config.run_dir)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    # Tokenizer threads do not survive the fork of the loader's workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    checkpointer = Checkpointer(run_dir / "checkpoints", config.checkpoint)
    feedback = build_feedback(config)
    try:
        trainer = _build_trainer(config, run_dir, checkpointer, feedback)
    except (MisconfigurationException, ValueError) as error:
        raise ConfigurationError(f"train.accelerator={config.train.accelerator}: {error}") from error
    # The process group is needed before training, so that the other ranks can wait for the first one.
    trainer.strategy.setup_environment()
    with ExitStack() as stack:
        if trainer.is_global_zero:
            stack.enter_context(kept_description(run_dir, resume=resume))
        main_rank_first(
            lambda: prepare_run_dir(config, run_dir, resume=resume, overwrite=overwrite), trainer.is_global_zero
        )
        bundle = load_bundle(config, run_dir / "model")
        module = VisionLanguageModule(bundle, config)
        module.feedback = feedback
        data = stack.enter_context(closing(build_data_module(config, bundle)))
        if isinstance(data.balance_cost, CostWarmup):
            trainer.callbacks.insert(0, CostWarmupCallback(data.balance_cost))
        validates = config.validation.limit_batches != 0
        if validates:
            data.val_dataloader()  # fails now, not after training, if there is no validation split
        checkpoints = list_checkpoints(run_dir / "checkpoints") if resume else []
        if checkpoints:
            logger.info("resuming from %s", checkpoints[-1])
            say_complete(int(checkpoints[-1].stem.rpartition("-")[2]), config.train.max_steps)
        elif resume and trainer.is_global_zero:
            say_fresh_start(run_dir)
        if trainer.is_global_zero:
            trainer.callbacks.append(LambdaCallback(on_train_start=lambda *_: discard_replaced(run_dir)))
        trainer.callbacks.append(LambdaCallback(on_train_start=lambda *_: withdraw(config, data)))
        trainer.fit(module, datamodule=data, ckpt_path=checkpoints[-1] if checkpoints else None)
        if validates and not checkpointer.stopped and module.validated_step != trainer.global_step:
            trainer.validate(module, datamodule=data, verbose=False)
    result = _result(module, trainer, stopped=checkpointer.stopped)
    if trainer.is_global_zero and not result.stopped and result.read is not None:
        write_predictions(module.predictions, run_dir / "predictions.jsonl")
    if trainer.is_global_zero and not result.stopped and config.checkpoint.export:
        export_model(bundle, run_dir / "export")
    return result


def dry_run(config: RunConfig, *, inputs: bool = False) -> str:
    """Load model and data, encode one microbatch, and describe them as YAML; without training or leaving files behind.

    Args:
        inputs: Only load them.

    Raises:
        ConfigurationError: Data, model or both cannot be loaded; says what is wrong with each.
    """
    with tempfile.TemporaryDirectory() as folder:
        validates = config.validation.limit_batches != 0
        bundle = load_inputs(config, Path(folder) / "model", validates=validates)
        if inputs:
            return ""
        data = build_data_module(config, bundle)
        try:
            withdraw(config, data)
            batch = next(iter(data.train_dataloader()))
        finally:
            data.close()
    shapes = {f: list(getattr(batch, f).shape) for f in ("tokens", "pixel_values") if getattr(batch, f) is not None}
    if config.trainer == "megatron":
        facts: dict[str, Any] = {"replica": f"{config.parallel.replica_size} processes"}
    else:
        parameters = sum(p.numel() for p in bundle.model.parameters())
        facts = {"model": type(bundle.model).__name__, "parameters": parameters}
    return yaml.safe_dump(facts | {"microbatch": shapes}, sort_keys=False)


def _build_trainer(
    config: RunConfig, run_dir: Path, checkpointer: Checkpointer, feedback: MixFeedback | None
) -> Trainer:
    num_nodes, devices = _launched_processes()
    accumulate = config.accumulate(num_nodes * devices)
    validation = config.validation
    metrics = run_dir / "metrics.jsonl"
    reporter = ProgressReporter(
        metrics, log_interval=config.train.log_interval, save_interval=config.checkpoint.interval
    )
    report = RunReport(
        run_dir / "report.html",
        title=report_title(config),
        losses=lambda: read_losses(metrics),
        validations=lambda: read_metric(metrics, "validation_loss"),
        stopped=lambda: checkpointer.stopped,
    )
    due = DueValidation(metrics, interval=0 if validation.limit_batches == 0 else validation.interval)
    return Trainer(
        accelerator=config.train.accelerator,
        num_nodes=num_nodes,
        devices=devices,
        # Vision towers have parameters after the features that are used; these never get a gradient.
        strategy=DDPStrategy(find_unused_parameters=True) if num_nodes * devices > 1 else "auto",
        precision=config.train.precision,
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            MicrobatchTimer(run_dir / TIMES, count=config.train.time_microbatches),
            reporter,
            report,
            *([] if feedback is None else [MixFeedbackCallback(feedback)]),
            checkpointer,
            due,
        ],  # the checkpoint of a step has the others' states
        max_steps=config.train.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=config.optimizer.clip_norm or None,
        check_val_every_n_epoch=None,
        val_check_interval=(validation.interval or config.train.max_steps + 1) * accumulate,
        limit_val_batches=validation.limit_batches,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        deterministic=config.train.deterministic,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run_dir,
    )


def report_title(config: RunConfig) -> str:
    """Return the title of the report of a run."""
    return f"{config.data.path}: {config.run_dir}"


def _launched_processes() -> tuple[int, int]:
    """Return nodes and processes per node, as torchrun or SLURM started them; one process otherwise."""
    environ = os.environ
    if "LOCAL_WORLD_SIZE" in environ:
        local = int(environ["LOCAL_WORLD_SIZE"])
        return int(environ["WORLD_SIZE"]) // local, local
    # SLURM sets its variables in an interactive allocation too, where no task was started by srun.
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        nodes = int(environ["SLURM_NNODES"])
        return nodes, int(environ["SLURM_NTASKS"]) // nodes
    return 1, 1


def main_rank_first(function: Callable[[], None], main: bool) -> None:
    """Call a function on the main rank while the others wait; an error that refuses the run is raised on all ranks."""
    refused: EnergonError | None = None
    if main:
        try:
            function()
        except EnergonError as error:
            refused = error
    if dist.is_initialized():
        message = [None if refused is None else str(refused)]
        dist.broadcast_object_list(message)
        if not main and message[0] is not None:
            refused = ConfigurationError(message[0])
    if refused is not None:
        raise refused


def _result(module: VisionLanguageModule, trainer: Trainer, *, stopped: bool) -> RunResult:
    validation = module.config.validation
    generates = validation.generate and validation.limit_batches != 0 and not stopped
    generated: Any = module.predictions if generates else None
    return RunResult(
        step=trainer.global_step,
        validation_loss=module.validation_loss,
        read=exact_match(generated) if generated is not None else None,
        stopped=stopped,
        main_rank=trainer.is_global_zero,
    )

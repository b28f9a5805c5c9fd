"""One training run, from its configuration to `predictions.jsonl`.

The run folder holds everything that belongs to the run::

    config.yaml          the resolved configuration
    model/               a preset's model configuration, image processor and tokenizer
    checkpoints/         see `callbacks`
    metrics.jsonl        see `callbacks`
    microbatches.jsonl   times of some microbatches, if asked for
    report.html          losses, waiting, datasets, what was left out, slowest microbatches; see `tools/report/`
    predictions.jsonl    see `generation`
    export/              the trained model in the layout of transformers, if asked for

The same code runs in one process, under torchrun and under SLURM: how many processes there are is read from the
environment, and all of them are data-parallel ranks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import yaml

from energon_bridge.core.datasets import get_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.encoder.base import TaskEncoder
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.errors import (
    ConfigurationError,
    EnergonError,
    UnknownArgumentError,
    did_you_mean,
    optional_packages,
)
from energon_bridge.core.loader.run_plan import DatasetSpec
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.stream.policy import ErrorPolicy
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.models.conversations.conversation import ChatSample, read_conversation
from energon_bridge.models.conversations.cooker import COOKERS
from energon_bridge.tools.report.callback import RunReport
from energon_bridge.trainers.datamodule import EnergonMultiModalDataModule, ReplicaLoading
from energon_bridge.trainers.feedback import DoReMi, MixFeedback
from energon_bridge.trainers.lightning import MixFeedbackCallback
from energon_bridge.trainers.replica.costs import BatchCost
from energon_bridge.trainers.replica.warmup import CostWarmup
from energon_bridge.training.callbacks import (
    TIMES,
    AtomicCheckpointIO,
    Checkpointer,
    CostWarmupCallback,
    MicrobatchTimer,
    ProgressReporter,
    list_checkpoints,
    read_losses,
    say_complete,
    say_fresh_start,
)
from energon_bridge.training.config import SIZES, DataConfig, RunConfig, learning_rate_factor
from energon_bridge.training.config_file import load_config, write_config
from energon_bridge.training.encoder import ENCODER_SETTINGS, training_task_encoder, without_effect
from energon_bridge.training.generation import exact_match, write_predictions
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import ModelBundle, export_model, load_model, write_preset

with optional_packages():
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

logger = logging.getLogger(__name__)

_OF_A_RUN = (
    "checkpoints",
    "metrics.jsonl",
    TIMES,
    "predictions.jsonl",
    "report.html",
    "model",
    "config.yaml",
    "export",
)
"""What a run writes into its folder."""


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
        bundle = _load_inputs(config, Path(folder) / "model", validates=validates)
        if inputs:
            return ""
        data = build_data_module(config, bundle)
        try:
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


@contextmanager
def opened_data(config: RunConfig) -> Iterator[DatasetSpec]:
    """Yield the dataset of a run, with the task encoder of its model; leaves nothing behind.

    The model is that of the run folder if the run has begun, else built as the run would build it.

    Raises:
        ConfigurationError: Data, model or both cannot be loaded; says what is wrong with each.
    """
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(config.run_dir) / "model"
        bundle = _load_inputs(config, begun if begun.exists() else Path(folder) / "model")
        data = build_data_module(config, bundle)
        try:
            yield data.train_dataloader().loader.spec
        finally:
            data.close()


def _load_inputs(config: RunConfig, model_dir: Path, *, validates: bool = False) -> ModelBundle:
    """Check the data and load the model, so that one error reports the problems of both."""
    wrong: list[str] = []
    opened = _opening(config.data)
    try:
        _error_policy(config.data)
        get_train_dataset(config.data.path, **opened)
    except EnergonError as error:
        wrong.append(f"data: {error}")
    has_data = not wrong
    try:
        if has_data and validates:
            get_val_dataset(config.data.path, **opened)
    except EnergonError as error:
        wrong.append(f"validation: {error} Without validation: validation.limit_batches=0")
    try:
        if config.model.name_or_path is not None or has_data:  # a preset's tokenizer is trained on the data
            write_model_of_run(config, model_dir)
            bundle = load_bundle(config, model_dir)
    except EnergonError as error:
        wrong.append(f"model: {error}")
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return bundle


def build_data_module(
    config: RunConfig, bundle: ModelBundle, pg_collection: Any | None = None
) -> EnergonMultiModalDataModule:
    """Return the data module of a run; without a collection of process groups, all ranks are data-parallel."""
    settings = asdict(config.data)
    for name in ENCODER_SETTINGS:
        del settings[name]
    for name in ("attention", "patches", "warmup"):
        del settings[f"balance_{name}"]
    settings |= settings.pop("settings")
    encoder = training_task_encoder(config.data, bundle)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for warning in without_effect(config.data, encoder, lambda: _sample_types(config.data)):
            logger.warning(warning)
    return EnergonMultiModalDataModule(
        tokenizer=bundle.tokenizer,
        image_processor=bundle.image_processor,
        task_encoder=encoder,
        seed=config.seed,
        pg_collection=pg_collection,
        replica_loading=cast(ReplicaLoading, config.parallel.replica_loading),
        balance_cost=None if config.data.balance == "none" else _balance_cost(config.data, bundle),
        validate_each_dataset=config.validation.each_dataset,
        masked_microbatches="allow",  # both trainers weigh by the mask
        **settings | {"error_policy": _error_policy(config.data)},
    )


def _opening(data: DataConfig) -> dict[str, Any]:
    """Return the arguments with which the data is opened, only to look at it."""
    names = {name: one for name, one in data.settings.items() if name in ("dataset_config", "split_config")}
    return {"batch_size": 1, "trust_remote_code": data.trust_remote_code, **names}


def _sample_types(data: DataConfig) -> set[type]:
    return {
        getattr(leaf.dataset, "sample_type", object) for leaf in get_train_dataset(data.path, **_opening(data)).leaves
    }


def _error_policy(data: DataConfig) -> ErrorPolicy:
    """Return the policy of a configuration. Raises ConfigurationError."""
    given = data.error_policy or {}
    known = [f.name for f in fields(ErrorPolicy)]
    if unknown := next((name for name in given if name not in known), None):
        hint = did_you_mean(unknown, known) or f" Known keys: {', '.join(known)}"
        raise UnknownArgumentError(f"data.error_policy: there is no key {unknown!r}.{hint}")
    return ErrorPolicy(**given)


def _balance_cost(data: DataConfig, bundle: ModelBundle) -> BatchCost | CostWarmup:
    given = data.balance_attention, data.balance_patches
    weights = BatchCost.of_model(bundle.model.config) if None in given else BatchCost()
    attention, patches = (
        own if own is not None else computed
        for own, computed in zip(given, (weights.attention, weights.patches), strict=True)
    )
    weights = replace(weights, attention=attention, patches=patches)
    return CostWarmup(weights, steps=data.balance_warmup) if data.balance_warmup else weights


def build_feedback(config: RunConfig, group: Any = None) -> MixFeedback | None:
    """Return what moves the weights of the mix by its losses; None without a reference.

    Args:
        config: The configuration of the run.
        group: The data-parallel process group; None: all processes.

    Raises:
        ConfigurationError: The file has no losses by dataset, or the data is no mix with weights.
    """
    settings = config.feedback
    if settings.reference is None:
        return None
    try:
        losses = json.loads(Path(settings.reference).read_text("utf-8"))
        reference = {str(path): float(loss) for path, loss in losses.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"feedback.reference={settings.reference}: expected a JSON object of losses by path of the dataset: {error}"
        ) from error
    mix = get_train_dataset(config.data.path, batch_size=1, trust_remote_code=config.data.trust_remote_code)
    if mix.mode != "weights":
        raise ConfigurationError(
            f"feedback.reference={settings.reference}: {config.data.path} is not a mix with weights (blend)"
        )
    weights = {leaf.dataset.path: float(leaf.share) for leaf in mix.leaves}
    if missing := sorted(set(weights) - set(reference)):
        raise ConfigurationError(
            f"feedback.reference={settings.reference} has no loss for {', '.join(missing)}; it has "
            f"{', '.join(sorted(reference))}"
        )
    policy = DoReMi(reference=reference, step_size=settings.step_size, smoothing=settings.smoothing)
    return MixFeedback(policy, weights, every=settings.every, group=group)


def _build_trainer(
    config: RunConfig, run_dir: Path, checkpointer: Checkpointer, feedback: MixFeedback | None
) -> Trainer:
    num_nodes, devices = _launched_processes()
    accumulate = config.accumulate(num_nodes * devices)
    validation = config.validation
    reporter = ProgressReporter(
        run_dir / "metrics.jsonl",
        log_interval=config.train.log_interval,
        save_interval=config.checkpoint.interval,
    )
    report = RunReport(
        run_dir / "report.html", title=report_title(config), losses=lambda: read_losses(run_dir / "metrics.jsonl")
    )
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


@contextmanager
def kept_description(run_dir: Path, *, resume: bool) -> Iterator[None]:
    """Leave the run folder as it was if a run fails before it has left a step in it.

    `config.yaml` still says how the run was made that a resume was to continue, a run that was to be replaced is there
    again, and one that never began can be started again without `--overwrite`.
    """
    described = run_dir / "config.yaml"
    metrics = run_dir / "metrics.jsonl"
    known = {name for name in _OF_A_RUN if (run_dir / name).exists()}
    before = described.read_bytes() if resume and described.exists() else None
    written = metrics.stat().st_mtime_ns if metrics.exists() else 0
    try:
        yield
    except BaseException:
        restore_replaced(run_dir)
        if (metrics.stat().st_mtime_ns if metrics.exists() else 0) != written:
            raise
        if before is not None:
            described.write_bytes(before)
        made = {name for name in _OF_A_RUN if (run_dir / name).exists()} - known
        if made and made <= {"config.yaml", "model"}:
            for name in made:
                _remove(run_dir / name)
            with suppress(OSError):  # something else is in it
                run_dir.rmdir()
        raise


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


_MOVING, _REPLACED = ".moving", ".replaced"
"""Where the parts of a run lie that is to be replaced: while they are moved there, and until the new one begins."""


def restore_replaced(run_dir: Path) -> None:
    """Put a run back that was to be replaced, if there is one: the new one has not begun."""
    for aside in (run_dir / _MOVING, run_dir / _REPLACED):
        if not aside.exists():
            continue
        for name in _OF_A_RUN if aside.name == _REPLACED else ():
            if (run_dir / name).exists():
                _remove(run_dir / name)
        for part in aside.iterdir():
            part.rename(run_dir / part.name)
        aside.rmdir()


def discard_replaced(run_dir: Path) -> None:
    """Remove a run that is replaced by one that begins now."""
    if (run_dir / _REPLACED).exists():
        _remove(run_dir / _REPLACED)


def prepare_run_dir(config: RunConfig, run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Check the run folder, and write configuration and preset to it.

    Raises:
        ConfigurationError: It holds a run, and neither `resume` nor `overwrite` is set.
    """
    restore_replaced(run_dir)  # that was to be replaced by a run which was killed as it began
    present = [name for name in _OF_A_RUN if (run_dir / name).exists()]
    if overwrite and present and not resume:
        aside = run_dir / _MOVING
        aside.mkdir()
        for name in present:
            (run_dir / name).rename(aside / name)
        aside.rename(run_dir / _REPLACED)
    elif present and not resume:
        raise ConfigurationError(
            f"the run folder {run_dir} already contains a run ({', '.join(present)}): continue it (--resume), replace "
            "it (--overwrite), or choose another folder (run_dir=…)"
        )
    described = run_dir / "config.yaml"
    before = load_config(described) if resume and described.exists() else config
    _check_same_model(before, config, run_dir)
    if before.data.global_batch_size != config.data.global_batch_size:
        logger.warning(
            "data.global_batch_size was %d, and is %d from here on: samples keep their order, but `energon preview` "
            "and `which` cannot tell from the number of a step which samples it has",
            *(before.data.global_batch_size, config.data.global_batch_size),
        )
    _say_other_schedule(before, config, run_dir)
    write_config(config, described)
    write_model_of_run(config, run_dir / "model")


def _say_other_schedule(before: RunConfig, now: RunConfig, run_dir: Path) -> None:
    """Warn if the learning rate goes on by another schedule than the one a run was begun with, which may be a jump."""
    steps = [int(path.name.split("-")[1].split(".")[0]) for path in (run_dir / "checkpoints").glob("step-*")]
    if not steps:
        return
    step = max(steps)

    def told(config: RunConfig) -> str:
        settings = config.optimizer
        last = config.train.max_steps
        rate = settings.lr * learning_rate_factor(settings, step, last)
        return (
            f"{rate:.3g} (lr={settings.lr:g}, warmup_steps={settings.warmup_steps}, then a cosine to "
            f"min_lr={settings.min_lr:g} at step {last})"
        )

    if told(before) != told(now):
        logger.warning(
            "the learning rate of step %d was to be %s, and is %s from here on: to go on without a jump, keep the "
            "settings of the optimizer and train.max_steps of %s",
            *(step, told(before), told(now), run_dir / "config.yaml"),
        )


def _check_same_model(before: RunConfig, now: RunConfig, run_dir: Path) -> None:
    """Raise ConfigurationError for settings with which the model or the checkpoints of a run cannot go on."""
    names = ["trainer", "model.freeze"] if any((run_dir / "checkpoints").glob("step-*")) else []
    if before.model.name_or_path is now.model.name_or_path is None:
        names += [f"model.{name}" for name in SIZES]
    values = {name: (attrgetter(name)(now), attrgetter(name)(before)) for name in names}
    if changed := [f"{name}={new} (there: {old})" for name, (new, old) in values.items() if new != old]:
        raise ConfigurationError(
            f"the run in {run_dir} cannot go on with {', '.join(changed)}: set what its config.yaml has, or begin "
            "another run (run_dir=…)"
        )


def write_model_of_run(config: RunConfig, folder: Path) -> None:
    """Write the model of a run into a folder if the configuration names a preset."""
    if config.model.name_or_path is None:
        captions: Callable[[], Iterable[str]] = lambda: dataset_captions(  # noqa: E731
            config.data.path, limit=config.model.tokenizer_samples, trust_remote_code=config.data.trust_remote_code
        )
        write_preset(config.model, folder, captions)


def load_bundle(config: RunConfig, preset_folder: Path) -> ModelBundle:
    """Load the model of a run with its processors; random weights are drawn from the seed."""
    settings = config.model
    torch.manual_seed(key_of("weights", config.seed) >> 1)
    if settings.name_or_path is None:
        name = str(preset_folder)
        init = "random"
    else:
        name = settings.name_or_path
        init = settings.init
    bundle = load_model(
        name,
        init=init,
        image_tokens_per_image=settings.image_tokens_per_image,
        attn_implementation=settings.attn_implementation,
    )
    freeze(bundle.model, settings.freeze)
    if config.train.gradient_checkpointing:
        enable = getattr(bundle.model, "activation_checkpointing_enable", None)  # the newer name
        (enable or bundle.model.gradient_checkpointing_enable)({"use_reentrant": False})
    return bundle


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


# The texts of a dataset -----------------------------------------------------------------------------------------------
#
# Without its images; a preset's tokenizer is trained on them.


class _TextOnly(TaskEncoder[Any, list[str], list[str], list[str]]):
    """Keep the texts of a sample."""

    decoder = SampleDecoder(defer_images=True)  # images are not looked at
    cookers = COOKERS

    def encode_sample(self, sample: Any) -> list[str]:
        texts: list[Any] = []
        for name in ("caption", "context", "text", "answers", "sequence", "texts"):
            value = getattr(sample, name, None)
            texts += value if isinstance(value, list | tuple) else [value]
        if isinstance(sample, ChatSample):
            texts += [part.text for turn in read_conversation(sample).turns for part in turn.parts]
        return [text for text in texts if isinstance(text, str)]

    def batch(self, samples: list[list[str]]) -> list[str]:
        return [text for texts in samples for text in texts]


def dataset_captions(path: str, *, limit: int, split_part: str = "train", trust_remote_code: bool = False) -> list[str]:
    """Return the texts of up to `limit` samples, in split order: captions, questions, answers, documents."""
    batch_size = 64
    dataset = get_val_dataset(
        path,
        split_part=split_part,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=batch_size,
        limit=-(-limit // batch_size),
        task_encoder=_TextOnly(),
        trust_remote_code=trust_remote_code,
    )
    return [text for texts in get_loader(dataset) for text in texts]


# Freezing -------------------------------------------------------------------------------------------------------------
#
# A pattern is the path of a module (`model.vision_tower`); `*` matches anything, and everything below is frozen too.


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Freeze the parts of a model that match the patterns.

    Raises:
        ConfigurationError: A pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not matching:
            raise ConfigurationError(_unknown(model, pattern))
        for name in matching:
            parameters[name].requires_grad_(False)
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigurationError(
            f"model.freeze={list(patterns)} leaves no parameter of {type(model).__name__} to train: freeze less"
        )


def _unknown(model: Any, pattern: str) -> str:
    names = [name for name, _ in model.named_modules() if name]
    shallow = [name for name in names if name.count(".") < 2]
    hint = did_you_mean(pattern, names)
    return f"model.freeze: {type(model).__name__} has no part {pattern!r}.{hint} Top-level parts: {', '.join(shallow)}"

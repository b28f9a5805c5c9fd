"""The data of a run: its data module, its costs for balance, what moves the weights of its mix, and its first check."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from energon_bridge.core.datasets import get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError, EnergonError, UnknownArgumentError, did_you_mean
from energon_bridge.core.loader.bans import load_keys
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.stream.policy import ErrorPolicy
from energon_bridge.trainers.datamodule import BalanceMode, EnergonMultiModalDataModule, ReplicaLoading
from energon_bridge.trainers.feedback import DoReMi, MixFeedback
from energon_bridge.trainers.replica.costs import BatchCost
from energon_bridge.trainers.replica.warmup import CostWarmup
from energon_bridge.training.config import DataConfig, RunConfig
from energon_bridge.training.encoder import training_task_encoder, without_effect
from energon_bridge.training.presets import ModelBundle
from energon_bridge.training.run_model import load_bundle, write_model_of_run

logger = logging.getLogger(__name__)


@contextmanager
def opened_data(config: RunConfig) -> Iterator[DatasetSpec]:
    """Yield the dataset of a run, with the task encoder of its model; leaves nothing behind.

    The model is that of the run folder if the run has begun, else built as the run would build it.

    Raises:
        ConfigurationError: Data, model or both cannot be loaded; says what is wrong with each.
    """
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(config.run_dir) / "model"
        bundle = load_inputs(config, begun if begun.exists() else Path(folder) / "model")
        data = build_data_module(config, bundle)
        try:
            yield data.train_dataloader().loader.spec
        finally:
            data.close()


def load_inputs(config: RunConfig, model_dir: Path, *, validates: bool = False) -> ModelBundle:
    """Check the data and load the model, so that one error reports the problems of both."""
    wrong: list[str] = []
    opened = {"batch_size": 1, **config.data.opening}
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
    data = config.data
    encoder = training_task_encoder(data, bundle)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for warning in without_effect(data, encoder, lambda: _sample_types(data)):
            logger.warning(warning)
    return EnergonMultiModalDataModule(
        path=data.path,
        tokenizer=bundle.tokenizer,
        image_processor=bundle.image_processor,
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        global_batch_size=data.global_batch_size,
        num_workers=data.num_workers,
        task_encoder=encoder,
        packing_buffer_size=data.packing_buffer_size,
        pg_collection=pg_collection,
        masked_microbatches="allow",  # both trainers weigh by the mask
        replica_loading=cast(ReplicaLoading, config.parallel.replica_loading),
        balance=cast(BalanceMode, data.balance),
        balance_cost=None if data.balance == "none" else _balance_cost(data, bundle),
        validate_each_dataset=config.validation.each_dataset,
        max_tokens_per_microbatch=data.max_tokens_per_microbatch,
        trust_remote_code=data.trust_remote_code,
        error_policy=_error_policy(data),
        seed=config.seed,
        **data.settings,
    )


def withdraw(config: RunConfig, data: EnergonMultiModalDataModule) -> None:
    """Withdraw the training samples that a configuration bans, after the state of the run has been restored.

    Raises:
        ConfigurationError: The file has a key that no dataset has, or the mix has no such dataset.
        StorageError: It cannot be read.
    """
    if config.data.ban is not None:
        data.ban(load_keys(config.data.ban), dataset=config.data.ban_dataset)


def _sample_types(data: DataConfig) -> set[type]:
    opened = get_train_dataset(data.path, batch_size=1, **data.opening)
    return {getattr(leaf.dataset, "sample_type", object) for leaf in opened.leaves}


def _error_policy(data: DataConfig) -> ErrorPolicy:
    """Return the policy of a configuration. Raises ConfigurationError."""
    given = data.error_policy or {}
    names = [f.name for f in fields(ErrorPolicy)]
    if unknown := next((name for name in given if name not in names), None):
        hint = did_you_mean(unknown, names) or f" Known keys: {', '.join(names)}"
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
    mix = get_train_dataset(config.data.path, batch_size=1, **config.data.opening)
    if mix.mode != "weights":
        raise ConfigurationError(
            f"feedback.reference={settings.reference}: {config.data.path} is not a mix with weights (blend)"
        )
    weights = {leaf.dataset.path: float(leaf.weight) for leaf in mix.leaves}
    if missing := sorted(set(weights) - set(reference)):
        raise ConfigurationError(
            f"feedback.reference={settings.reference} has no loss for {', '.join(missing)}; it has "
            f"{', '.join(sorted(reference))}"
        )
    policy = DoReMi(reference=reference, step_size=settings.step_size, smoothing=settings.smoothing)
    return MixFeedback(policy, weights, every=settings.every, group=group)

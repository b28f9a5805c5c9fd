"""The Trainer of transformers over datasets of energon_bridge: exact resume, on any number of processes.

`EnergonTrainer` is `transformers.Trainer` with these differences:

- `train_dataset` and `eval_dataset` are what `get_train_dataset` and `get_val_dataset` return. Their batch size counts,
  not `per_device_train_batch_size`. Which share a process loads is decided here, by accelerate's state.
- Each checkpoint folder gets `energon_bridge_data.json`, the state of the data: a list of the states of all ranks.
  `train(resume_from_checkpoint=…)` continues from it at once, on any number of processes that divides the lanes. The
  Trainer's own skipping of batches, which reads them all again, is switched off (`ignore_data_skip`).
- An epoch is the dataset's, a whole number of optimizer steps (or its `virtual_epoch_length`), and stays in place when
  a run is resumed in the middle of one.
- Weights of models that are saved under other names than they are kept under are resumed too.
- The loss of a step is the mean over its learned tokens, however it is cut into microbatches and processes.
- The evaluation loss is the mean over all tokens with a label of all processes, every sample once.

Invariant: when the Trainer saves, the microbatches that the loader has delivered are those of the finished steps; the
Trainer asks for those of one optimizer step at a time, and nothing is fetched ahead between it and the loader.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.datasets import get_savable_loader
from energon_bridge.core.errors import ConfigurationError, MaskedMicrobatchesError, StateFormatError, optional_packages
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.storage import write_file
from energon_bridge.models.conversations.inputs import IGNORED_LABEL, Inputs, model_inputs, unwrapped
from energon_bridge.trainers.replica import Balance
from energon_bridge.trainers.replica.groups import all_told

with optional_packages():
    from transformers import Trainer, TrainerCallback
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)

__all__ = ["STATE_FILE", "Described", "EnergonTrainer", "model_inputs"]

STATE_FILE = "energon_bridge_data.json"
_MEANS = [
    LOSS_MAPPING[f"For{task}"] for task in ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification")
]
"""Losses of transformers that are means over labels."""
_MEDIA = [f"{kind}_{what}" for kind in ("image", "video", "audio") for what in ("hidden_states", "outputs")]
_NO_PREDICTIONS = ("past_key_values", "cache", *_MEDIA)
"""Outputs of transformers without a row a sample: keys and values, and media (`cache`, `..._outputs` from 5.24 on)."""


class EnergonTrainer(Trainer):
    """The Trainer of transformers, with the datasets of energon_bridge.

    Args:
        train_dataset: From `get_train_dataset`, or None.
        eval_dataset: From `get_val_dataset`, several of them by name, or None.
        model_inputs: Makes the model's arguments of a batch; default: the function of that name here, which is given
            the model.
        loader_arguments: Arguments of `get_savable_loader` for training, such as `prefetch_factor` or `cache_pool`.
        balance: From `make_balance`, called on all processes after the training arguments were made: the processes
            share the microbatches of each optimizer step out by their costs.

    The others are those of `transformers.Trainer`. `args.ignore_data_skip` is set.

    Raises:
        ConfigurationError: A dataset does not fit: it was made for another number of processes, it ends (`repeat=
            False`) although there are several, or its virtual epoch is no whole number of optimizer steps.
        MaskedMicrobatchesError: The number of processes does not divide the lanes; also on resuming.
    """

    compute_loss_func: Any  # set by transformers' own initializer

    def __init__(
        self,
        *args: Any,
        train_dataset: DatasetSpec | None = None,
        eval_dataset: DatasetSpec | Mapping[str, DatasetSpec] | None = None,
        model_inputs: Callable[[Any], Inputs] | None = None,
        loader_arguments: Mapping[str, Any] | None = None,
        balance: Balance | None = None,
        **kwargs: Any,
    ) -> None:
        self._balance = balance
        self._model_inputs = model_inputs or self._inputs_of
        self._loader_arguments = dict(loader_arguments or {})
        self._resume_from: str | None = None
        self._train_batches: TrainBatches | None = None
        self._eval_loaders: dict[int, EnergonDataloader] = {}
        self._eval_sums = torch.zeros(2, dtype=torch.float64)
        if isinstance(eval_dataset, Mapping):
            described: Any = {name: self.described(spec) for name, spec in eval_dataset.items()}
        else:
            described = None if eval_dataset is None else self.described(eval_dataset)
        train = None if train_dataset is None else self.described(train_dataset)
        super().__init__(*args, train_dataset=train, eval_dataset=described, **kwargs)
        self.args.ignore_data_skip = True
        if train is not None:  # for its figures of samples
            self.args.per_device_train_batch_size = self._train_batch_size = train.spec.settings.rows
        self._set_loss()
        self.add_callback(_SaveData(self))

    def described(self, spec: DatasetSpec) -> Any:
        """Return the Trainer's object for a dataset, with the dataset as `spec`; subclasses may extend it."""
        return Described(spec)

    # The model -------------------------------------------------------------------------------------------------------

    def _inputs_of(self, batch: Any) -> Inputs:
        inputs = model_inputs(batch, self.model)
        positions = inputs.get("position_ids")
        if positions is not None and positions.ndim > 2 and self._shared_by("cp", "sp") > 1:
            raise ConfigurationError(
                "EnergonTrainer: accelerate cuts all inputs along dimension 1 for context and sequence parallelism, "
                f"but this model's positions have shape {tuple(positions.shape)}: set cp_size and sp_size to 1"
            )
        return inputs

    def _set_loss(self) -> None:
        """Count the tokens of a step, whatever the model says about its arguments; smoothed losses are made here."""
        parallel = getattr(self.accelerator, "parallelism_config", None)
        by_sequence = parallel is not None and parallel.sp_enabled  # where transformers counts for itself
        self._averages = self.compute_loss_func is None and not by_sequence
        if not self._averages:
            return
        self.model_accepts_loss_kwargs = True  # so that transformers counts
        model = unwrapped(self.model)
        config = getattr(model, "config", None)
        text = config.get_text_config() if config is not None else None
        kind = LOSS_MAPPING.get(getattr(model, "loss_type", None))
        self._loss_shifts_labels = kind in (None, ForCausalLMLoss) and not getattr(config, "is_encoder_decoder", False)
        routers = bool(getattr(text, "output_router_logits", False))
        if (smoothing := self.args.label_smoothing_factor) and kind is ForCausalLMLoss and self._loss_shifts_labels:
            weight = getattr(text, "router_aux_loss_coef", 0.0) if routers else 0.0
            self.compute_loss_func = partial(_token_mean, smoothing=smoothing, router_weight=weight)
        if routers:
            logger.warning(
                "%s has router losses (output_router_logits), which are no means over tokens: a step has the mean of "
                "those of its microbatches, weighted by their learned tokens, and that depends on how it is cut into "
                "microbatches. The rest of the loss does not",
                type(model).__name__,
            )
        elif kind not in _MEANS:
            logger.warning(
                "%s has a loss of its own: a step has the mean of those of its microbatches, weighted by their labels. "
                "If the loss is no mean over labels, that depends on how the step is cut into microbatches, and label "
                "smoothing may lack the shift to the next token: pass compute_loss_func",
                type(model).__name__,
            )

    def compute_loss(
        self, model: Any, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """Return the share of a microbatch in the mean over the learned tokens of the step.

        The model is not told `num_items_in_batch`: some accept it and ignore it, and those that do not ignore it add
        losses of routers to each microbatch in full. Its own mean over a microbatch is weighted instead.
        """
        labels = inputs.get("shift_labels", inputs.get("labels"))
        shift = getattr(self.accelerator.unwrap_model(model), "prepare_decoder_input_ids_from_labels", None)
        if self.label_smoother is not None and shift is not None and "labels" in inputs:
            # The smoother takes the labels out of the inputs, of which an encoder-decoder makes those of its decoder.
            inputs.setdefault("decoder_input_ids", shift(labels=inputs["labels"]))
        if not self._averages or self.compute_loss_func is not None or labels is None or num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        count = self._counted(labels, shifted="shift_labels" in inputs).sum()
        loss, outputs = super().compute_loss(model, inputs, True, None)
        whole = torch.as_tensor(num_items_in_batch, device=loss.device).flatten()[0]
        share = count.to(loss.device) / whole.clamp(min=1)
        if self.args.average_tokens_across_devices:  # gradients of processes are averaged, so their sums are shares
            share = share * (self.accelerator.num_processes // self.get_tp_size())
        # The mean of no token is NaN.
        loss = torch.where(share > 0, loss.mean(), 0.0) * share
        return (loss, outputs) if return_outputs else loss

    def _counted(self, labels: Tensor, *, shifted: bool = False) -> Tensor:
        """Return which labels count: of sequences, those that follow a token."""
        follows = labels.dim() > 1 and self._loss_shifts_labels and not shifted
        return (labels[..., 1:] if follows else labels) != IGNORED_LABEL

    # Training --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; a path, or True for the last checkpoint of `output_dir`, continues from there, data included.

        Raises:
            StateFormatError: The checkpoint has no state of the data.
            StateError: Its state does not fit the dataset; says what differs.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ConfigurationError(
                    f"resume_from_checkpoint=True, but {self.args.output_dir} has no checkpoint: leave it out to start "
                    "a new run"
                )
        self._resume_from = str(resume_from_checkpoint) if resume_from_checkpoint else None
        try:
            return super().train(resume_from_checkpoint=self._resume_from, **kwargs)
        finally:
            self.close_data()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load weights that the Trainer missed.

        Some models (Llava, of transformers 5) are saved under other names than they are kept under. The Trainer, which
        loads by the names of the model, then continues with the initial weights, and only logs a warning.
        """
        if load_result.missing_keys and load_result.unexpected_keys and self._resume_from is not None:
            saved = type(self.model).from_pretrained(self._resume_from)  # knows both names
            load_result = self.model.load_state_dict(saved.state_dict(), strict=False)
        super()._issue_warnings_after_load(load_result)

    def get_train_dataloader(self) -> Any:
        """Return the training data of this process, at its beginning or where the checkpoint left off."""
        if self.train_dataset is None:
            raise ConfigurationError("EnergonTrainer: training needs a train_dataset")
        spec = self._of_this_process(self.train_dataset.spec)
        if spec.ends and spec.worker_config.dp_size > 1:
            raise ConfigurationError(
                "EnergonTrainer: with repeat=False, some processes get no data in some steps, and their loss would be "
                "NaN: leave out repeat, and limit the run with max_steps or num_train_epochs"
            )
        accumulate = self.args.gradient_accumulation_steps
        if self._balance is not None:
            config = spec.worker_config
            config = dataclasses.replace(config, microbatches_per_global_batch=accumulate * config.dp_size)
            spec = dataclasses.replace(spec, worker_config=config)
        loader = get_savable_loader(spec, **self._loader_arguments)
        steps = len(loader)
        if spec.settings.virtual_epoch_length is not None and steps % accumulate:
            raise ConfigurationError(
                f"EnergonTrainer: virtual_epoch_length={steps} must be a multiple of "
                f"gradient_accumulation_steps={accumulate}: an epoch is a whole number of optimizer steps"
            )
        if not spec.ends:
            steps = max(accumulate, steps - steps % accumulate)
        dataloader = EnergonDataloader(loader, balance=self._balance)
        batches = TrainBatches(dataloader, steps, self.train_dataset, self._model_inputs)
        if self._resume_from is not None:
            states = _read_states(self._resume_from)
            batches.restore(states)
            if self.accelerator.process_index == 0:
                self._name_other_steps(states[0]["microbatches"], spec)
        self._train_batches = batches
        return batches

    def _name_other_steps(self, delivered: int, spec: DatasetSpec) -> None:
        """Warn if the optimizer steps of the checkpoint were of another number of microbatches than those to come."""
        steps = _steps_done(str(self._resume_from))
        ranks, accumulate = spec.worker_config.dp_size, self.args.gradient_accumulation_steps
        now = ranks * accumulate
        if not steps or delivered == now * steps or delivered % steps:  # then they had changed before
            return
        before = delivered // steps
        rows = spec.settings.rows
        logger.warning(
            "EnergonTrainer: the optimizer steps until this checkpoint had %d samples, and those from here on have %d "
            "(batch size %d x gradient_accumulation_steps=%d x %d processes). To keep them, resume with %s",
            *(before * rows, now * rows, rows, accumulate, ranks),
            f"gradient_accumulation_steps={before // ranks}"
            if before % ranks == 0
            else f"a number of processes that divides {before}",
        )

    def data_states(self) -> list[Any]:
        """Return the states of the training data of all data-parallel ranks; every process must call this."""
        if self._train_batches is None:
            raise ConfigurationError("EnergonTrainer: the data has no state before train()")
        own = (self._data_parallel()[0], self._train_batches.dataloader.save_state())
        return [state for _, state in sorted(dict(all_told(own)).items())]

    # Evaluation ------------------------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the batches of one pass over a dataset for validation, given as such or by its name."""
        named = isinstance(eval_dataset, str)
        dataset = self.eval_dataset[eval_dataset] if named else (eval_dataset or self.eval_dataset)
        if isinstance(dataset, DatasetSpec):
            dataset = Described(dataset)
        if not isinstance(getattr(dataset, "spec", None), DatasetSpec) or not dataset.spec.ends:
            raise ConfigurationError("EnergonTrainer: evaluation needs an eval_dataset from get_val_dataset")
        loader = self._eval_loaders.get(id(dataset.spec))
        if loader is None:
            loader = EnergonDataloader(get_savable_loader(self._of_this_process(dataset.spec)))
            self._eval_loaders[id(dataset.spec)] = loader
        return EvalBatches(loader, dataset, self._model_inputs)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the batches of one pass over a dataset from `get_val_dataset`, for `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as transformers does, and put the mean over tokens in place of the mean over batches."""
        self._eval_sums.zero_()
        averages = self.args.average_tokens_across_devices
        # Otherwise the loss of a batch is a share of a mean over the batches of all processes, not its own mean.
        self.args.average_tokens_across_devices = False
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = averages
        sums = self.accelerator.reduce(self._eval_sums.to(self.args.device), reduction="sum").tolist()
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics:
            output.metrics[name] = sums[0] / sums[1] if sums[1] else math.nan
        return output

    def prediction_step(
        self, model: Any, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict as transformers does; the loss of a batch without any label is 0.

        By default, keys and values are no predictions, nor are the features of media: they have no rows, and
        batches of texts alone lack them.
        """
        if ignore_keys is None:
            config = getattr(unwrapped(self.model), "config", None)
            ignore_keys = [*getattr(config, "keys_to_ignore_at_inference", ()), *_NO_PREDICTIONS]
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is not None and "labels" in inputs:
            count = int(self._counted(inputs["labels"]).sum())
            loss = loss if count else torch.zeros_like(loss)
            self._eval_sums += torch.tensor([float(loss.mean()) * count, count], dtype=torch.float64)
        return loss, logits, labels

    def close_data(self) -> None:
        """Stop the worker processes of all loaders; they start again when they are needed."""
        loaders = [*self._eval_loaders.values()]
        if self._train_batches is not None:
            loaders.append(self._train_batches.dataloader)
        for loader in loaders:
            loader.close()

    # Who loads what --------------------------------------------------------------------------------------------------

    def _of_this_process(self, spec: DatasetSpec) -> DatasetSpec:
        rank, size = self._data_parallel()
        given = spec.worker_config
        if given.dp_size not in (1, size):
            raise ConfigurationError(
                f"EnergonTrainer: the dataset was made for {given.dp_size} data-parallel ranks, but there are {size}: "
                "leave rank and world_size out of its WorkerConfig; the trainer sets them"
            )
        config = dataclasses.replace(given, rank=rank, world_size=size, data_parallel_group=None)
        return dataclasses.replace(spec, worker_config=config)

    def _data_parallel(self) -> tuple[int, int]:
        """Return the data-parallel rank and size: processes that share one model's work load the same data."""
        accelerator = self.accelerator
        if self._shared_by("tp", "cp", "sp") == 1:
            return accelerator.process_index, accelerator.num_processes
        mesh = accelerator.torch_device_mesh
        rank = 0
        size = 1
        for name in ("dp_replicate", "dp_shard"):
            if name in (mesh.mesh_dim_names or ()):
                rank = rank * mesh[name].size() + mesh.get_local_rank(name)
                size *= mesh[name].size()
        return rank, size

    def _shared_by(self, *names: str) -> int:
        """Return how many processes share a model along some dimensions of accelerate's mesh."""
        config = getattr(self.accelerator, "parallelism_config", None)
        return math.prod(getattr(config, f"{name}_size", None) or 1 for name in names)


def _token_mean(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None, *, smoothing: float, router_weight: float = 0.0
) -> Tensor:
    """Return the share of a microbatch in the mean smoothed loss over the tokens of the step."""
    logits = outputs["logits"].float()
    shifted = pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL).to(logits.device)
    total = cross_entropy(
        logits.flatten(0, -2), shifted.flatten(), ignore_index=IGNORED_LABEL, label_smoothing=smoothing, reduction="sum"
    )
    count = (shifted != IGNORED_LABEL).sum()
    if router_weight and (of_routers := outputs.get("aux_loss")) is not None:
        total = total + router_weight * of_routers.to(total.device) * count
    return total / (count if num_items_in_batch is None else num_items_in_batch)


class Described:
    """A dataset as the Trainer sees it: an object whose length is the samples of an epoch; the dataset is `spec`."""

    def __init__(self, spec: DatasetSpec) -> None:
        if not isinstance(spec, DatasetSpec):
            raise ConfigurationError(
                f"EnergonTrainer: expected a dataset from get_train_dataset or get_val_dataset, got {spec!r}"
            )
        self.spec = spec

    def __len__(self) -> int:
        return max(1, int(sum(self.spec.epoch_samples)))


class EvalBatches:
    """The batches of a pass, as arguments of the model."""

    def __init__(self, dataloader: EnergonDataloader, dataset: Described, inputs: Callable[[Any], Inputs]) -> None:
        self.dataloader = dataloader
        self.dataset = dataset
        self._inputs = inputs

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Inputs]:
        return map(self._inputs, iter(self.dataloader))


class TrainBatches:
    """The batches of an epoch of `steps` microbatches of this rank; one that was begun is gone on with."""

    def __init__(
        self, dataloader: EnergonDataloader, steps: int, dataset: Described, inputs: Callable[[Any], Inputs]
    ) -> None:
        self.dataloader = dataloader
        self.dataset = dataset
        self.steps = steps
        self._inputs = inputs
        self._done = 0

    def restore(self, states: list[Any]) -> None:
        """Go on from the states of all ranks."""
        self.dataloader.restore_state(states)
        config = self.dataloader.loader.config
        self._done = states[0]["microbatches"] // config.dp_size % self.steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Inputs]:
        if self._done >= self.steps:  # the Trainer takes the steps of an epoch and does not reach the end
            self._done = 0
        while self._done < self.steps:
            self._done += 1
            yield self._checked(next(self.dataloader))

    def _checked(self, batch: Any) -> Inputs:
        valid = batch.get("__valid__") if isinstance(batch, Mapping) else getattr(batch, "__valid__", None)
        if valid is not None and not bool(valid.any()):
            raise MaskedMicrobatchesError(
                "all rows of a training microbatch are masked, so the Trainer's loss would be NaN: use a number of "
                "processes that divides num_lanes"
            )
        return self._inputs(batch)


class _SaveData(TrainerCallback):
    """Writes the state of the data into each checkpoint, and keeps the epoch right after a resume."""

    def __init__(self, trainer: EnergonTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set `state.epoch` to epochs from the beginning of the run; the Trainer counts from where it was resumed."""
        batches = self._trainer._train_batches
        if batches is not None:
            state.epoch = state.global_step * args.gradient_accumulation_steps / batches.steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the data; the file is there as a whole or not at all."""
        states = self._trainer.data_states()
        if not args.should_save:
            return
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", STATE_FILE)
        write_file(path, (json.dumps(states).encode(),))


def _steps_done(checkpoint: str) -> int:
    """Return the optimizer steps of a checkpoint of the Trainer; 0 if it does not say."""
    try:
        with open(os.path.join(checkpoint, TRAINER_STATE_NAME)) as file:
            return int(json.load(file)["global_step"])
    except (OSError, ValueError, KeyError):  # the Trainer itself says so
        return 0


def _read_states(checkpoint: str) -> list[Any]:
    path = os.path.join(checkpoint, STATE_FILE)
    try:
        with open(path) as file:
            states = json.load(file)
    except (OSError, ValueError) as error:
        raise StateFormatError(
            f"{checkpoint}: no state of the data in {STATE_FILE} ({error}). It was not written by EnergonTrainer, or "
            "not completely. Resume from another checkpoint; or load its weights only, and start the data at a step "
            "with loader_arguments={'start_at': STEP}"
        ) from error
    if not isinstance(states, list) or not states:
        raise StateFormatError(f"{path}: expected a list of the states of all ranks, found {type(states).__name__}")
    return states

"""One optimizer step by megatron-core's schedules: the inputs of a rank's part of the model, and the loss.

As with the Lightning trainer, the loss of a step is the mean over all its tokens with loss, whatever microbatch or rank
they are in: gradients are summed, and divided once by the tokens of the whole global batch
(`calculate_per_token_loss`). Masked microbatches have no such tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn.functional import pad

from energon_bridge.models.conversations.inputs import loss_weights
from energon_bridge.models.conversations.multimodal import MultiModalBatch
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.trainers.context_parallel import zigzag_indices
from energon_bridge.training.config import RunConfig, learning_rate_factor
from energon_bridge.training.megatron.model import Llava, seen_tokens
from energon_bridge.training.megatron.ranks import Ranks

# ---------------------------------------------------------------------------------------------------------------------
# The inputs of a rank's part of the model: the batch on its device, and the labels of its own tokens.
#
# Every rank of a replica has the whole batch. Images and tokens stay whole, since the first stage inserts the image
# embeddings before the sequence is split (context-parallel ranks each encode a share of the images); labels and their
# mask are those of this context-parallel rank.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One microbatch; see `Llava.forward`. `loss_mask` has the shape of `labels`, float32 of zeros and ones."""

    tokens: Tensor
    pixel_values: Tensor | None
    attention_mask: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor


def training_inputs(batch: MultiModalBatch, ranks: Ranks) -> StepInputs:
    """Return the inputs for the loss of a batch; invalid rows carry no loss."""
    tokens, positions, labels, mask = (
        _even(value.to(ranks.device, non_blocking=True), ranks.groups.cp.size())
        for value in (batch.tokens, batch.position_ids, batch.labels.clamp(min=0), loss_weights(batch))
    )
    own = own_tokens(tokens, ranks)
    return StepInputs(
        tokens=tokens,
        pixel_values=_pixels(normalise_on_device(batch, ranks.device).pixel_values, ranks),
        attention_mask=_mask(positions, ranks, packed=batch.cu_seqlens is not None),
        labels=labels[:, own],
        loss_mask=mask[:, own],
    )


def writing_inputs(tokens: Tensor, pixel_values: Tensor | None, ranks: Ranks) -> StepInputs:
    """Return the inputs for the logits of rows with one sample each, padded on the right."""
    tokens = _even(tokens, ranks.groups.cp.size())
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return StepInputs(
        tokens=tokens,
        pixel_values=_pixels(pixel_values, ranks),
        attention_mask=_mask(positions, ranks, packed=False),
        labels=None,
        loss_mask=torch.zeros_like(tokens),
    )


def own_tokens(tokens: Tensor, ranks: Ranks) -> Tensor:
    """Return the positions of this context-parallel rank's tokens."""
    group = ranks.groups.cp
    return zigzag_indices(tokens.shape[1], rank=group.rank(), size=group.size()).to(tokens.device)


def _even(values: Tensor, context_parallel: int) -> Tensor:
    """Pad rows on the right to a multiple of 2 * cp: each context-parallel rank gets two chunks (`zigzag_indices`)."""
    return pad(values, (0, -values.shape[1] % (2 * context_parallel)))


def _pixels(pixel_values: Tensor | None, ranks: Ranks) -> Tensor | None:
    if pixel_values is None or ranks.groups.pp.rank() > 0:
        return None
    return pixel_values.to(ranks.device, non_blocking=True)


def _mask(positions: Tensor, ranks: Ranks, *, packed: bool) -> Tensor | None:
    return seen_tokens(positions, packed=packed, rank=ranks.groups.cp.rank(), size=ranks.groups.cp.size())


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step, and the loss of a microbatch, by megatron-core's schedules.


RecordLosses = Callable[[MultiModalBatch, Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model in training: this rank's part of it, wrapped for data parallelism, and its optimizer."""

    config: RunConfig
    ranks: Ranks
    model: DistributedDataParallel
    optimizer: MegatronOptimizer

    @property
    def part(self) -> Llava:
        """This rank's part of the model, unwrapped."""
        module = self.model.module
        return module.module if isinstance(module, Float16Module) else module


def prepare_training(llava: Llava, config: RunConfig, ranks: Ranks) -> Training:
    """Wrap a model and make its optimizer, whose state is sharded over the data-parallel ranks."""
    llava = llava.to(ranks.device)
    wrapped = Float16Module(llava.config, llava) if llava.config.bf16 else llava
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    model = DistributedDataParallel(llava.config, ddp_config, wrapped, pg_collection=ranks.groups)
    model.broadcast_params()
    settings = config.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            clip_grad=settings.clip_norm,
            bf16=llava.config.bf16,
            params_dtype=llava.config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    complete_torch_state(optimizer)
    llava.config.no_sync_func = model.no_sync
    llava.config.finalize_model_grads_func = finalize_model_grads
    llava.config.grad_scale_func = optimizer.scale_loss
    return Training(config=config, ranks=ranks, model=model, optimizer=optimizer)


def train_step(
    training: Training, batches: Sequence[MultiModalBatch], step: int, record: RecordLosses | None = None
) -> tuple[Tensor, float]:
    """Train on the microbatches of one optimizer step.

    Args:
        training: What is trained.
        batches: This replica's microbatches of the step.
        step: Optimizer steps before this one.
        record: Called with each microbatch and the losses of its tokens, without pipeline and context parallelism.

    Returns:
        This rank's sum of losses and number of tokens with loss of each microbatch, float64 (N, 2), zeros on all but
        the last stage; and the norm of the gradients before they were clipped.
    """
    lr = learning_rate(training.config, step)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    training.model.zero_grad_buffer()
    training.optimizer.zero_grad()
    sums = run_schedule(training, batches, forward_only=False, record=record)
    _, norm, _ = training.optimizer.step()
    return sums, float(norm)


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of an optimizer step, counted from 0."""
    return config.optimizer.lr * learning_rate_factor(config.optimizer, step, config.train.max_steps)


def run_schedule(
    training: Training, batches: Sequence[MultiModalBatch], *, forward_only: bool, record: RecordLosses | None = None
) -> Tensor:
    """Return this rank's sum of losses and number of tokens with loss of each microbatch, float64 (N, 2)."""
    inputs = (training_inputs(batch, training.ranks) for batch in batches)
    step = _forward_step
    if record is not None:
        in_turn = iter(batches)
        step = partial(_forward_step, record=lambda losses: record(next(in_turn), losses))
    reported = _run(training, inputs, len(batches), forward_step_func=step, forward_only=forward_only)
    if not reported:
        return torch.zeros((len(batches), 2), dtype=torch.float64, device=training.ranks.device)
    return torch.stack([report["loss"] for report in reported])


def microbatch_losses(sums: Tensor, ranks: Ranks) -> list[Tensor]:
    """Return the mean losses of this replica's microbatches (NaN without tokens); all its ranks must call it."""
    whole = sums.clone()
    if ranks.groups.cp.size() > 1:
        dist.all_reduce(whole, group=ranks.groups.cp)
    whole = ranks.from_last_stage(whole)
    return list((whole[:, 0] / whole[:, 1]).unbind())


def run_stages(training: Training, inputs: StepInputs) -> Tensor | None:
    """Return the logits of one microbatch, on the last stage; None on the others."""
    outputs = _run(training, [inputs], 1, forward_only=True, collect_non_loss_data=True)
    return outputs[0] if outputs else None


def over_replicas(sums: Tensor, ranks: Ranks) -> Tensor:
    """Sum the values of the last stages of all replicas, and return the sum on all ranks."""
    dist.all_reduce(sums, group=ranks.groups.dp_cp)
    return ranks.from_last_stage(sums)


def _run(
    training: Training,
    inputs: Iterable[StepInputs],
    count: int,
    forward_step_func: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    longest = training.config.data.seq_length
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step_func or _forward_step,
        data_iterator=iter(inputs),
        model=[training.model],
        num_microbatches=count,
        # Only an upper bound: with `variable_seq_lengths`, stages send each other the real shapes first.
        seq_length=longest,
        micro_batch_size=training.config.data.micro_batch_size,
        **kwargs,
    )
    return results


def _forward_step(
    data: Iterator[StepInputs], model: Any, record: Callable[[Tensor], None] | None = None
) -> tuple[Tensor, Callable[..., Any]]:
    inputs = next(data)
    output = model(inputs.tokens, inputs.pixel_values, inputs.attention_mask, inputs.labels)
    if record is not None:
        record(output.detach())
    return output, partial(_loss, inputs.loss_mask)


def _loss(mask: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return output
    losses = output.float() * mask
    tokens = mask.sum()
    report = torch.stack([losses.detach().double().sum(), tokens.double()])
    return losses.sum(), tokens.to(torch.int), {"loss": report}


# ---------------------------------------------------------------------------------------------------------------------
# The state of torch's AdamW.
#
# Without Apex and TransformerEngine, megatron-core's distributed optimizer falls back to torch's AdamW, whose state
# counts the steps of each parameter. megatron-core saves and restores these counts separately. But it can do neither
# before the first step, it looks for the counts among the tensors of a checkpoint, and it gives all parameters the same
# count object.


def complete_torch_state(optimizer: MegatronOptimizer) -> None:
    """Initialise an optimizer's state, so that it can be saved and restored before the first step; skip fused ones."""
    for distributed in optimizer.chained_optimizers:
        inner = distributed.optimizer
        if not isinstance(inner, torch.optim.Adam):  # AdamW is one
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        _restore_with_steps(distributed)


def _restore_with_steps(distributed: Any) -> None:
    restore = distributed._set_main_param_and_optimizer_states

    def restore_with_steps(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = distributed.model_param_group_index_map[model_param]
        state = distributed.optimizer.state[distributed.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step")
        restore(model_param, tensors)
        state["step"] = step.clone()

    distributed._set_main_param_and_optimizer_states = restore_with_steps

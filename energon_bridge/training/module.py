"""The Lightning module: loss, optimizer, validation.

The loss of a microbatch is the mean over its tokens that carry loss; the loss of an optimizer step is the mean over its
microbatches. Neither depends on how many ranks there are, so a run keeps its meaning when their number changes. A
microbatch that does not exist (its rank had none to deliver) has no such token; it adds nothing and is not counted.
How many there are is known only when the step is complete, so the gradients are scaled then, once.

Everything random in the model is seeded by (seed, optimizer step, microbatch, rank): there is no generator state to
save, and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional

from energon_bridge.rng import key_of
from energon_bridge.task_encoder.multimodal import MultiModalBatch
from energon_bridge.training.config import RunConfig
from energon_bridge.training.generation import Prediction, generate_answers, prompts_of
from energon_bridge.training.presets import ModelBundle

_SEED_BITS = (1 << 63) - 1


class VisionLanguageModule(LightningModule):
    """Train a vision-language model of transformers on batches of the `MultiModalTaskEncoder`."""

    def __init__(self, bundle: ModelBundle, config: RunConfig) -> None:
        super().__init__()
        self.model = bundle.model
        self.tokenizer = bundle.tokenizer
        self.image_token_id = bundle.image_token_id
        self.config = config
        self.last_loss: Tensor | None = None
        self.step_scale: Tensor | float = 1.0
        self._real_microbatches: Tensor | None = None
        self.predictions: list[Prediction] = []
        self.validation_loss: float | None = None
        self.validated_step = -1
        self._validation_sums = torch.zeros(2, dtype=torch.float64)
        self._wants_token_types = "mm_token_type_ids" in inspect.signature(bundle.model.forward).parameters

    def forward(self, batch: MultiModalBatch) -> Tensor:
        """Return the logits, shape (B, S, vocabulary)."""
        inputs = self.model_inputs(batch)
        logits: Tensor = self.model(input_ids=batch.tokens, attention_mask=batch.attention_mask, **inputs).logits
        return logits

    def model_inputs(self, batch: MultiModalBatch) -> dict[str, Tensor]:
        """Return what the model takes besides tokens and attention mask."""
        inputs = dict(batch.visual_inputs)
        if batch.pixel_values is not None:
            inputs["pixel_values"] = batch.pixel_values.to(next(self.model.parameters()).dtype)
        if self._wants_token_types:
            inputs["mm_token_type_ids"] = torch.eq(batch.tokens, self.image_token_id).long()
        return inputs

    def training_step(self, batch: MultiModalBatch, batch_idx: int) -> Tensor:
        """Return the loss of one microbatch; that of one that does not exist is 0, with gradients of 0."""
        key = key_of("step", self.config.seed, self.trainer.global_step, batch_idx, self.global_rank)
        torch.manual_seed(key & _SEED_BITS)
        losses, mask = self._token_losses(batch)
        tokens = mask.sum()
        loss = (losses * mask).sum() / tokens.clamp(min=1.0)
        real = (tokens > 0).float()
        self._real_microbatches = real if self._real_microbatches is None else self._real_microbatches + real
        self.last_loss = loss.detach()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the mean over all microbatches of the step, whose gradients these are, into that over the real ones."""
        assert self._real_microbatches is not None
        real, self._real_microbatches = self._real_microbatches, None
        world_size = self.trainer.world_size
        if world_size > 1:
            dist.all_reduce(real)
        # Exactly 1 where every microbatch is real; multiplied by all the same, since asking would wait for the device.
        self.step_scale = world_size * self.trainer.accumulate_grad_batches / real.clamp(min=1.0)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.step_scale)

    def on_validation_epoch_start(self) -> None:
        """Forget the previous validation."""
        self._validation_sums = torch.zeros(2, dtype=torch.float64)
        self.predictions = []

    def validation_step(self, batch: MultiModalBatch, batch_idx: int) -> None:
        """Add the loss of a microbatch, and let the model write its answers."""
        losses, mask = self._token_losses(batch)
        self._validation_sums += torch.stack([(losses * mask).sum(), mask.sum()]).double().cpu()
        if self.config.validation.generate:
            self.predictions += self._predict(batch)

    def on_validation_epoch_end(self) -> None:
        """Bring the ranks' sums and predictions together; the latter in the order of the split."""
        sums, predictions = [self._validation_sums], [self.predictions]
        if self.trainer.world_size > 1:
            gathered: list[Any] = [None] * self.trainer.world_size
            dist.all_gather_object(gathered, (self._validation_sums, self.predictions))
            sums, predictions = [g[0] for g in gathered], [g[1] for g in gathered]
        loss, tokens = (float(value) for value in torch.stack(sums).sum(0))
        self.validation_loss = loss / max(1.0, tokens)
        self.validated_step = self.trainer.global_step
        self.predictions = _interleave(predictions, self.config.data.micro_batch_size)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restate Lightning's count of microbatches for the accumulation of this run.

        Lightning counts the microbatches of one rank and takes an optimizer step where that count is a multiple of
        `accumulate_grad_batches`. On another number of ranks the saved count would cut the global batches elsewhere.
        Checkpoints are written in `on_train_batch_end`, when the microbatch is processed and not yet completed.
        """
        accumulate = self.trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for name, steps in (("total", checkpoint["global_step"]), ("current", 1)):
            done = steps * accumulate
            progress[name].update(ready=done, started=done, processed=done, completed=done - 1)
        progress["is_last_batch"] = False

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a linear warm-up and a cosine decay, stepped once per optimizer step."""
        settings = self.config.optimizer
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=settings.lr, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _learning_rate_factor(self, step: int) -> float:
        settings = self.config.optimizer
        if step < settings.warmup_steps:
            return (step + 1) / (settings.warmup_steps + 1)
        decay_steps = max(1, self.config.train.max_steps - settings.warmup_steps)
        progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
        floor = settings.min_lr / settings.lr
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def _token_losses(self, batch: MultiModalBatch) -> tuple[Tensor, Tensor]:
        """Return cross entropies and their weights, both float32 of shape (B, S)."""
        mask = batch.loss_mask
        if batch.__valid__ is not None:
            mask = mask * batch.__valid__.to(mask)[:, None]
        logits = self(batch).float()
        labels = batch.labels.clamp(min=0)  # whatever marks a place without loss, its weight is zero
        return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), mask

    def _predict(self, batch: MultiModalBatch) -> list[Prediction]:
        valid = [True] * len(batch.__key__) if batch.__valid__ is None else batch.__valid__.tolist()
        if not any(valid):
            return []
        prompts, prompt_mask = prompts_of(batch, self._pad_id())
        inputs = self.model_inputs(batch)
        if self._wants_token_types:
            inputs["mm_token_type_ids"] = torch.eq(prompts, self.image_token_id).long()
        texts = generate_answers(
            self.model, self.tokenizer, prompts, prompt_mask, inputs, self.config.validation.max_new_tokens
        )
        rows = zip(batch.__key__, batch.answers, texts, valid, strict=True)
        return [Prediction(key=k, expected=e, generated=g) for k, e, g, real in rows if real]

    def _pad_id(self) -> int:
        pad: int | None = self.tokenizer.pad_token_id
        return pad if pad is not None else int(self.tokenizer.eos_token_id or 0)


def _interleave(per_rank: list[list[Prediction]], micro_batch_size: int) -> list[Prediction]:
    """Put predictions into the order of the split: rank r has microbatches r, r + R, r + 2R, …"""
    out: list[Prediction] = []
    longest = max(len(predictions) for predictions in per_rank)
    for start in range(0, longest, micro_batch_size):
        for predictions in per_rank:
            out += predictions[start : start + micro_batch_size]
    return out

"""The Lightning module: inputs of the model, loss, optimizer, validation.

The loss of an optimizer step is the mean over all its tokens with loss, whatever microbatch, rank or pack they are in.
So it does not depend on how the samples are grouped: neither on the number of ranks nor on packing. A masked microbatch
(its rank had none to deliver) has no such tokens. The number of tokens is known only when the step is complete, so the
loss of a microbatch is a sum, and the gradients are scaled once, at the end.

All randomness in the model is seeded by (seed, optimizer step, microbatch, rank): there is no generator state to save,
and a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from energon_bridge.core.errors import ConfigurationError, optional_packages
from energon_bridge.core.order.rng import key_of
from energon_bridge.models.conversations.blank_media import without_blanks
from energon_bridge.models.conversations.inputs import (
    check_packing,
    loss_weights,
    model_inputs,
    sequence_inputs,
    takes_mrope,
    token_types,
    visual_inputs,
)
from energon_bridge.models.conversations.sequences import MultiModalBatch, PaddingValues
from energon_bridge.models.packing.packed_sequences import unpack_batch
from energon_bridge.trainers.feedback import MixFeedback
from energon_bridge.trainers.replica.groups import all_told
from energon_bridge.training.config import RunConfig, learning_rate_factor
from energon_bridge.training.generation import (
    Prediction,
    generate_answers,
    in_turn,
    predictions_of,
    prompts_of,
    visible_images,
)
from energon_bridge.training.presets import ModelBundle

with optional_packages():
    from lightning.pytorch import LightningModule

__all__ = ["VisionLanguageModule", "check_packing", "record_losses", "sequence_inputs", "takes_mrope"]


def record_losses(feedback: MixFeedback, batch: MultiModalBatch, losses: Tensor) -> None:
    """Record the losses of a microbatch's tokens, (B, S) or padded to more; a masked microbatch has none."""
    if batch.__valid__ is None or bool(batch.__valid__.any()):
        feedback.record(batch, losses.detach()[:, : batch.loss_mask.shape[1]])


_SEED_BITS = (1 << 63) - 1


class VisionLanguageModule(LightningModule):
    """Train a vision-language model of transformers on batches of the `MultiModalTaskEncoder`."""

    def __init__(self, bundle: ModelBundle, config: RunConfig) -> None:
        super().__init__()
        self.model = bundle.model
        self.tokenizer = bundle.tokenizer
        self.image_token_id = bundle.image_token_id
        self.image_tokens = bundle.image_tokens
        self.config = config
        self.feedback: MixFeedback | None = None
        self.last_loss: Tensor | None = None  # summed over the tokens of the microbatch
        self.last_row_losses: Tensor | None = None  # means over the tokens of each row; NaN where there are none
        self.step_scale: Tensor | float = 1.0
        self._step_tokens: Tensor | None = None
        self.predictions: list[Prediction] = []
        self._written: list[list[list[Prediction]]] = []
        self.validation_loss: float | None = None
        self.validation_losses: list[float] = []
        self.validated_step = -1
        self._validation_sums = torch.zeros(2, dtype=torch.float64)

    def forward(self, batch: MultiModalBatch) -> Tensor:
        """Return the logits, shape (B, S, vocabulary)."""
        logits: Tensor = self.model(**model_inputs(batch, self.model, labels=False)).logits
        return logits

    def on_train_start(self) -> None:
        """Raise for a model that would mix the samples of packs."""
        if self.config.data.packs:
            with self.trainer.precision_plugin.forward_context():
                longest = self.config.data.seq_length
                check_packing(self.model, row_length=longest, sample_length=longest)

    def training_step(self, batch: MultiModalBatch, batch_idx: int) -> Tensor:
        """Return the summed loss of one microbatch; a masked one has loss 0 and zero gradients."""
        key = key_of("step", self.config.seed, self.trainer.global_step, batch_idx, self.global_rank)
        torch.manual_seed(key & _SEED_BITS)
        losses, mask = self.token_losses(batch)
        loss = (losses * mask).sum()
        tokens = mask.sum()
        if not loss.requires_grad:  # only vision parts are trained, and the batch has no images
            loss = loss + sum(0.0 * parameter.sum() for parameter in self.model.parameters() if parameter.requires_grad)
        self._step_tokens = tokens if self._step_tokens is None else self._step_tokens + tokens
        self.last_loss = loss.detach()
        self.last_row_losses = (losses * mask).sum(1).detach() / mask.sum(1)
        if self.feedback is not None:
            record_losses(self.feedback, batch, losses)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Rescale the gradients from the mean over the step's microbatches to the mean over their tokens."""
        assert self._step_tokens is not None
        tokens = self._step_tokens
        self._step_tokens = None
        world_size = self.trainer.world_size
        if world_size > 1:
            dist.all_reduce(tokens)
        self.step_scale = world_size * self.trainer.accumulate_grad_batches / tokens.clamp(min=1.0)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.step_scale)

    def on_validation_epoch_start(self) -> None:
        """Reset the figures of the previous validation."""
        loaders = self.trainer.val_dataloaders
        count = len(loaders) if isinstance(loaders, list) else 1
        self._validation_sums = torch.zeros(count, 2, dtype=torch.float64)
        self._written = [[] for _ in range(count)]

    def validation_step(self, batch: MultiModalBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the loss of a microbatch, and generate its answers."""
        losses, mask = self.token_losses(batch)
        self._validation_sums[dataloader_idx] += torch.stack([(losses * mask).sum(), mask.sum()]).double().cpu()
        if self.config.validation.generate:
            self._written[dataloader_idx].append(self.predict(batch))

    def on_validation_epoch_end(self) -> None:
        """Gather the ranks' sums and predictions, the latter in the order of the split, or of its packs.

        With several datasets, `validation_losses` has the loss of each, `validation_loss` the mean over all tokens.
        """
        ranks = all_told((self._validation_sums, self._written))
        sums = torch.stack([of_rank for of_rank, _ in ranks]).sum(0)
        self.validation_losses = [loss / max(1.0, tokens) for loss, tokens in sums.tolist()]
        loss, tokens = sums.sum(0).tolist()
        self.validation_loss = loss / max(1.0, tokens)
        self.validated_step = self.trainer.global_step
        self.predictions = []
        for written in zip(*(of_rank for _, of_rank in ranks), strict=True):
            self.predictions += in_turn(written)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ConfigurationError if it is the checkpoint of another model."""
        there, here = (
            {name: tuple(tensor.shape) for name, tensor in state.items()}
            for state in (checkpoint["state_dict"], self.state_dict())
        )
        if different := [name for name in here | there if here.get(name) != there.get(name)]:
            told = "; ".join(
                f"{name} {there.get(name, 'none')}, here {here.get(name, 'none')}" for name in different[:3]
            )
            raise ConfigurationError(
                f"the checkpoint {self.trainer.ckpt_path} belongs to another model than {type(self.model).__name__} of "
                f"this run: {len(different)} of {len(here | there)} tensors differ, the first (shapes): {told}. Set "
                "model.* as when the run started, or begin another run (run_dir=…)"
            )

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
        return learning_rate_factor(self.config.optimizer, step, self.config.train.max_steps)

    def token_losses(self, batch: MultiModalBatch) -> tuple[Tensor, Tensor]:
        """Return cross entropies and their weights, both float32 of shape (B, S)."""
        logits = self(batch).float()
        labels = batch.labels.clamp(min=0)  # positions without loss have weight zero, whatever marks them
        return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), loss_weights(batch)

    def predict(self, batch: MultiModalBatch) -> list[Prediction]:
        """Generate after the prompt of each real row, or of each sample of a pack."""
        if batch.__valid__ is not None and not batch.__valid__.any():
            return []
        if batch.cu_seqlens is not None:
            batch = unpack_batch(batch, PaddingValues(pad_id=self._pad_id(), ignore=-100))
        batch = without_blanks(batch, self._pad_id())
        prompts, prompt_mask = prompts_of(batch, self._pad_id())
        inputs = visible_images(
            visual_inputs(batch, self.model),
            batch,
            prompts,
            image_token_id=self.image_token_id,
            per_image=self.image_tokens,
            video_token_id=getattr(self.model.config, "video_token_id", None),
        )
        if (types := token_types(prompts, self.model)) is not None:
            inputs["mm_token_type_ids"] = types
        texts = generate_answers(
            self.model, self.tokenizer, prompts, prompt_mask, inputs, self.config.validation.max_new_tokens
        )
        return predictions_of(batch, texts)

    def _pad_id(self) -> int:
        pad: int | None = self.tokenizer.pad_token_id
        return pad if pad is not None else int(self.tokenizer.eos_token_id or 0)

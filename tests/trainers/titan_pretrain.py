"""torchtitan's real trainer on the CPU with our loader: the program that `test_titan_pretrain.py` starts, once a rank.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=… MASTER_PORT=… python titan_pretrain.py DATA OUT STEPS [--kind text]

What a user would write are `open_loader` and the configuration. The model is torchtitan's tiny Llama, which here also
sees: the mean of each patch is added to the tokens of its image. Rank 0 appends the loss of each step to `OUT/losses`,
every rank a digest of each of its microbatches to `OUT/batches-RANK`. `--die-after` kills the process after that step.

torchtitan does not support the CPU. `on_cpu` answers for the device: its name, its memory, time-outs of groups, and
attention as plain PyTorch. The trainer, its checkpoints and the parallelism (FSDP, gloo) are the real ones.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks

import torchtitan.components.metrics as metrics
import torchtitan.distributed.utils as dist_utils
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from energon_bridge import ChatConfig, ChatTemplateTaskEncoder, get_savable_loader, get_train_dataset
from energon_bridge.trainers.torchtitan import TitanDataLoader, TitanRun

CONTEXT, TOKENS, STEP_TOKENS = 400, 800, 3200


def open_loader(run: TitanRun, data: Path, kind: str) -> Any:
    """Open images and captions, in packs, or windows of a Megatron index."""
    config = run.worker_config(num_workers=1, microbatches_per_global_batch=STEP_TOKENS // TOKENS)
    if kind == "text":
        path = f"{data / 'corpus.idx'}?window={CONTEXT}+1"
        return get_savable_loader(get_train_dataset(path, batch_size=run.rows, worker_config=config))
    encoder = ChatTemplateTaskEncoder.from_pretrained(data / "model", ChatConfig(seq_length=run.max_context_length))
    path = data / "captions"
    settings = {"batch_size": run.rows, "packing_buffer_size": 16, "task_encoder": encoder}
    return get_savable_loader(get_train_dataset(path, worker_config=config, **settings))


class SeeingLlama(Llama3Model):
    """torchtitan's Llama, to whose tokens of images the means of their patches are added."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        image_id: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.image_id = config.image_id

    def forward(self, tokens: Any, positions: Any = None, attention_masks: Any = None, **media: Any) -> Any:
        hidden = self.tok_embeddings(tokens)
        if "pixel_values" in media:
            seen = media["pixel_values"].mean(-1).view(-1, 4).mean(-1)  # 2 x 2 patches are a token
            places = tokens == self.image_id
            assert int(places.sum()) == len(seen), f"{int(places.sum())} tokens for {len(seen)} features"
            hidden = hidden + torch.zeros_like(hidden[:, 0]).masked_scatter(places, seen)[:, None]
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        return self.lm_head(self.norm(hidden))


class NoTokenizer(BaseTokenizer):
    """The encoder has its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **facts: Any) -> None:
        self.pad_id = 0

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def attend(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **others: Any) -> Any:
    """Attend by the same mask; flex attention has no gradients on the CPU."""
    mask = create_mask(block_mask.mask_mod, 1, 1, q.shape[-2], k.shape[-2], device="cpu")
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=None)


def on_cpu() -> None:
    """Answer for the device where torchtitan asks for more than the CPU has."""
    os.environ["LOCAL_RANK"] = "0"
    stats = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    dist_utils.set_pg_timeouts = lambda **_: None
    FlexAttention.compiled_flex_attn = staticmethod(attend)


def configuration(given: argparse.Namespace, ranks: int) -> Trainer.Config:
    """Return what a function of a config_registry returns."""
    spec = model_registry("debugmodel")
    known = {field.name: getattr(spec.model, field.name) for field in fields(spec.model)}
    image_id = json.loads((given.data / "model" / "config.json").read_text())["image_token_id"]
    model = SeeingLlama.Config(**known | {"layers": spec.model.layers[:2]}, image_id=image_id)
    return Trainer.Config(
        model_spec=replace(spec, model=model),
        tokenizer=NoTokenizer.Config(),
        dump_folder=str(given.out),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=TOKENS,
            num_tokens_per_train_step=STEP_TOKENS,
            max_context_length=CONTEXT,
            steps=given.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(data_parallel_shard_degree=ranks),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        activation_checkpoint=None,
        dataloader=TitanDataLoader.Config(open_loader=lambda run: open_loader(run, given.data, given.kind)),
    )


def note(path: Path, line: Any) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--kind", choices=["images", "text"], default="images")
    parser.add_argument("--die-after", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    init_logger()
    on_cpu()
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    trainer = configuration(given, ranks).build()
    for part in trainer.model_parts[0].modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    log, convert = trainer.metrics_processor.log, trainer.dataloader._data.on_delivery

    def logged(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        if rank == 0:
            note(given.out / "losses", [step, loss])
        log(step, loss, *args, **kwargs)
        if step == given.die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def delivered(batch: Any) -> Any:
        inputs, labels = convert(batch)
        tensors = [labels, *(value for _, value in sorted(inputs.items()) if isinstance(value, torch.Tensor))]
        digest = hashlib.blake2b(b"".join(one.numpy().tobytes() for one in tensors), digest_size=8).hexdigest()
        note(given.out / f"batches-{rank}", [trainer.step, digest, "pixel_values" in inputs])
        return inputs, labels

    trainer.metrics_processor.log = logged
    trainer.dataloader._data.on_delivery = delivered
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

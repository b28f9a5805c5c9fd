"""Megatron-Bridge over a dataset of energon_bridge: the dataset of its `ConfigContainer`, in ten lines.

    python examples/megatron_bridge.py --data /data/captions --output run --max-steps 4
    python examples/megatron_bridge.py --data /data/captions --output run --max-steps 8 --resume

A recipe sets `config.dataset = make_dataset(path, ...)`, and Megatron-Bridge's `pretrain` builds, saves and restores
it. It needs GPUs: what runs here, on the CPU, is a loop in its manner (a builder, a `forward_step` that takes
microbatches from an iterator, a state for each data-parallel rank) with a tiny model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from energon_bridge import DefaultTaskEncoder
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.bridge import DatasetBuildContext, EnergonDatasetBuilder, EnergonDatasetConfig

MICRO_BATCH, GLOBAL_BATCH = 2, 4


# The recipe: what a project with Megatron-Bridge has -----------------------------------------------------------------


class Captions(DefaultTaskEncoder):
    """Makes the tokens of captions; `HFEnergonTaskEncoderConfig` makes those of conversations and images."""

    def encode_sample(self, sample: Any) -> Any:
        tokens = torch.tensor(list(sample.caption.encode()))
        return {
            "__key__": sample.__key__,
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones_like(tokens[1:]),
        }


def make_dataset(path: Path) -> EnergonDatasetConfig:
    """Return the `dataset` of a `ConfigContainer`."""
    return EnergonDatasetConfig(
        path=str(path),
        seq_length=64,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=GLOBAL_BATCH,
        num_workers=0,  # 0 for this tiny model
        task_encoder=Captions(),
    )


# A loop in its manner ------------------------------------------------------------------------------------------------


def forward_step(data_iterator: Iterator[Any], model: LlamaForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of a microbatch's tokens, and their number."""
    batch = next(data_iterator)
    losses = cross_entropy(model(batch["tokens"]).logits.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of images and captions")
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder for checkpoints")
    parser.add_argument("--max-steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    config = make_dataset(options.data or create_captioning_test_dataset(options.output / "captions"))
    train, _, _ = EnergonDatasetBuilder(config).build(DatasetBuildContext(1000, 0, 0, pg_collection=None))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = options.output / "model.pt"
    data_file = options.output / "train_dataloader_dprank000.pt"  # what Megatron-Bridge writes for a rank
    step = 0
    if options.resume:
        saved = torch.load(weights)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        train.restore_state(torch.load(data_file)["dataloader_state_dict"])
    losses = []
    for _ in range(step, options.max_steps):
        sums = [forward_step(train, model) for _ in range(GLOBAL_BATCH // MICRO_BATCH)]
        loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": options.max_steps}, weights)
    torch.save({"dataloader_state_dict": train.save_state()}, data_file)
    return losses


if __name__ == "__main__":
    print(main())

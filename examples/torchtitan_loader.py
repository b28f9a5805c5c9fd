"""torchtitan over a dataset of energon_bridge: the `dataloader` of its configuration, in ten lines.

    python examples/torchtitan_loader.py --data /data/captions --output run --max-steps 4
    python examples/torchtitan_loader.py --data /data/captions --output run --max-steps 8 --resume

A function of torchtitan's `config_registry` sets `dataloader=make_dataloader(path)` in its `Trainer.Config`; the
trainer builds it, and keeps its state in its checkpoints. torchtitan trains on GPUs: what runs here, on the CPU, is a
loop in its manner with a tiny model, and the state in a checkpoint of `torch.distributed.checkpoint`. It needs
torchtitan of August 2026 or later.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from energon_bridge import DefaultTaskEncoder, SavableDataLoader, get_savable_loader, get_train_dataset
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.torchtitan import TitanDataLoader, TitanRun

CONTEXT, TOKENS = 32, 128


# The recipe: what a project with torchtitan has ----------------------------------------------------------------------


class Captions(DefaultTaskEncoder):
    """Makes rows of `max_context_length` tokens; `ChatTemplateTaskEncoder` makes those of conversations and images."""

    def encode_sample(self, sample: Any) -> Any:
        tokens = torch.zeros(CONTEXT + 1, dtype=torch.int64)
        text = torch.tensor(list(sample.caption.encode()[: CONTEXT + 1]))
        tokens[: len(text)] = text
        return {"__key__": sample.__key__, "tokens": tokens}

    def encode_batch(self, batch: Any) -> Any:
        tokens = batch["tokens"]
        positions = torch.arange(CONTEXT).repeat(len(tokens))
        return {"input": tokens[:, :-1].reshape(-1), "positions": positions}, tokens[:, 1:].reshape(-1)


def open_loader(run: TitanRun, path: Path) -> SavableDataLoader:
    """Return the loader of a rank."""
    config = run.worker_config(num_workers=0)  # 0 for this tiny model
    return get_savable_loader(
        get_train_dataset(path, batch_size=run.rows, task_encoder=Captions(), worker_config=config)
    )


def make_dataloader(path: Path) -> TitanDataLoader.Config:
    """Return the `dataloader` of a `Trainer.Config`."""
    return TitanDataLoader.Config(open_loader=partial(open_loader, path=path))


# A loop in its manner ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of images and captions")
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder for checkpoints")
    parser.add_argument("--max-steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    config = make_dataloader(options.data or create_captioning_test_dataset(options.output / "captions"))
    sizes = {"max_context_length": CONTEXT, "num_tokens_per_batch": TOKENS}
    dataloader = config.build(dp_world_size=1, dp_rank=0, tokenizer=None, **sizes)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    checkpoint = options.output / "checkpoint"
    states = {"model": model, "dataloader": dataloader, "step": torch.zeros((), dtype=torch.int64)}
    if options.resume:
        dcp.load(states, checkpoint_id=checkpoint)
    batches = iter(dataloader)
    losses = []
    for _ in range(int(states["step"]), options.max_steps):
        inputs, labels = next(batches)
        rows = {name: inputs[name].view(-1, CONTEXT) for name in ("input", "positions")}
        logits = model(rows["input"], position_ids=rows["positions"]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    states["step"] = torch.tensor(options.max_steps)
    dcp.save(states, checkpoint_id=checkpoint)
    dataloader.close()
    return losses


if __name__ == "__main__":
    print(main())

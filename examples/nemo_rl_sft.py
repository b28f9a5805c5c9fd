"""NeMo-RL's SFT over a dataset of energon_bridge: ten lines in the place of its `StatefulDataLoader`.

    python examples/nemo_rl_sft.py --data /data/captions --output run --max-steps 4
    python examples/nemo_rl_sft.py --data /data/captions --output run --max-steps 8 --resume

In `setup` of `nemo_rl/algorithms/sft.py`, `train_dataloader = open_dataloader(path, tokenizer, batch_size)`. Its loop
asks it for batches of `message_log`, `length` and `loss_multiplier`, and saves its `state_dict()`; both stay as they
are. NeMo-RL needs GPUs and Ray: what runs here, on the CPU, is a loop in its manner with a tiny model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from energon_bridge import DefaultTaskEncoder, SavableDataLoader, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.tools.testing import create_captioning_test_dataset

# The recipe: what a project with NeMo-RL has -------------------------------------------------------------------------


class Messages(DefaultTaskEncoder):
    """Makes conversations with tokens, as NeMo-RL's `rl_collate_fn` does."""

    def __init__(self, tokenize: Callable[[str], list[int]]) -> None:
        self.tokenize = tokenize

    def encode_sample(self, sample: Any) -> Any:
        turns = [("user", "What is this?"), ("assistant", sample.caption)]
        log = [{"role": r, "content": text, "token_ids": torch.tensor(self.tokenize(text))} for r, text in turns]
        length = sum(len(turn["token_ids"]) for turn in log)
        return {"__key__": sample.__key__, "message_log": log, "length": length, "loss_multiplier": 1.0}

    def batch(self, samples: list[Any]) -> Any:
        batch = {name: [sample[name] for sample in samples] for name in samples[0]}
        return batch | {name: torch.tensor(batch[name]) for name in ("length", "loss_multiplier")}


def open_dataloader(path: Path, tokenize: Callable[[str], list[int]], batch_size: int) -> SavableDataLoader:
    """Return the training data of an epoch after the other; the driver alone loads."""
    config = WorkerConfig(num_workers=0)  # 0 for this tiny model
    dataset = get_train_dataset(
        path,
        batch_size=batch_size,
        repeat=False,
        batch_drop_last=True,
        task_encoder=Messages(tokenize),
        worker_config=config,
    )
    return get_savable_loader(dataset)


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
    data = options.data or create_captioning_test_dataset(options.output / "captions")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataloader = open_dataloader(data, lambda text: list(text.encode()), 4)
    checkpoint = options.output / "checkpoint.pt"
    step = 0
    if options.resume:
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataloader.load_state_dict(saved["train_dataloader"])
        step = saved["step"]
    losses = []
    while step < options.max_steps:
        for batch in dataloader:
            logs = batch["message_log"]
            tokens = pad_sequence([torch.cat([turn["token_ids"] for turn in log]) for log in logs], batch_first=True)
            roles = [[torch.full_like(turn["token_ids"], turn["role"] == "assistant") for turn in log] for log in logs]
            mask = pad_sequence([torch.cat(row) for row in roles], batch_first=True) * batch["loss_multiplier"][:, None]
            loss = model(input_ids=tokens, labels=tokens.masked_fill(mask == 0, -100)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            if step == options.max_steps:
                break
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states | {"train_dataloader": dataloader.state_dict(), "step": step}, checkpoint)
    return losses


if __name__ == "__main__":
    print(main())

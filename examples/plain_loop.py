"""A training loop in plain PyTorch that can be stopped at any step and goes on exactly where it was.

    python examples/plain_loop.py --data /data/captions --output run --max-steps 8
    python examples/plain_loop.py --data /data/captions --output run --max-steps 16 --resume

Without --data it makes a small dataset. `torchrun --nproc-per-node 2 examples/plain_loop.py …` runs it on two
processes, and a run may be resumed on another number of them: a step is always four microbatches.
The model is the small Llava of `huggingface_trainer.py`; the loop is the same for any other family, with packs too. The
loss of a step is the mean over its learned tokens, however they are cut into microbatches.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from energon_bridge import EnergonDataloader, WorkerConfig, get_savable_loader, get_train_dataset, model_inputs
from energon_bridge.tools.testing import create_captioning_test_dataset

sys.path.insert(0, str(Path(__file__).parent))  # for programs that load this file by its path
from huggingface_trainer import make_encoder, make_model

MICROBATCHES = 4  # in a step, all processes together


def make_data(path: Path) -> EnergonDataloader:
    """Return this process's share of the data: its rank comes from torch.distributed."""
    # A number of lanes that every number of processes divides; for large datasets the default is right.
    config = WorkerConfig(num_workers=0, num_lanes=MICROBATCHES, microbatches_per_global_batch=MICROBATCHES)
    dataset = get_train_dataset(path, batch_size=4, task_encoder=make_encoder(), worker_config=config)
    return EnergonDataloader(get_savable_loader(dataset))


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of images and captions")
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder of the checkpoint")
    parser.add_argument("--max-steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    size = dist.get_world_size() if dist.is_initialized() else 1
    first = not dist.is_initialized() or dist.get_rank() == 0
    data = make_data(options.data or create_captioning_test_dataset(options.output / "captions"))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpoint = options.output / "checkpoint.pt"
    start = 0
    if options.resume:
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])
        start = saved["step"]
    losses = []
    for step in range(start, options.max_steps):
        microbatches = [model_inputs(next(data), model) for _ in range(MICROBATCHES // size)]
        counts = [(inputs["labels"][:, 1:] != -100).sum() for inputs in microbatches]  # the model shifts them
        tokens = torch.stack(counts).sum()
        if size > 1:
            dist.all_reduce(tokens)
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, count in zip(microbatches, counts, strict=True):
            loss = model(**inputs).loss * count / tokens
            loss.backward()
            total += loss.detach()
        shared = [total, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        if size > 1:
            for value in shared:
                dist.all_reduce(value)
        optimizer.step()
        losses.append(float(shared[0]))
        if first:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": options.max_steps}
    state["data"] = data.state_dict()  # gathered over all processes, so each of them calls it
    if first:
        options.output.mkdir(parents=True, exist_ok=True)
        torch.save(state, checkpoint)
    data.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()

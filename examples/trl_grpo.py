"""TRL's GRPOTrainer over prompts of energon_bridge: killed at any moment, each prompt is learned from once.

    python examples/trl_grpo.py --data prompts.jsonl --output run
    python examples/trl_grpo.py --data prompts.jsonl --output run      # after a kill: goes on from the last checkpoint

Each line of the data is {"prompt": "3 + 4 =", "answer": "7"}. A prompt is done with the optimizer step that learned
from its rollouts; what a killed run had delivered beyond its last checkpoint comes first. One process; it needs
`pip install trl`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from energon_bridge import SavableDataLoader, WorkerConfig, get_savable_loader, get_train_dataset

STATE = "prompts.json"
PROMPTS, ROLLOUTS = 2, 4
"""Prompts in a step, and rollouts of each."""


class Prompts(TrainerCallback):
    """The batches that GRPOTrainer asks for, and the callback that says which prompts are done."""

    def __init__(self, loader: SavableDataLoader) -> None:
        self.loader = loader
        self.done: list[Any] = []
        self.over = False

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        stream = iter(self.loader)
        while samples := list(islice(stream, PROMPTS)):
            self.keys = [sample["__restore_key__"] for sample in samples]
            yield [dict(sample["json"]) for sample in samples for _ in range(ROLLOUTS)]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the prompts of the step as done."""
        self.loader.done(self.keys)
        self.done += self.keys

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop with the pass."""
        self.over = True
        control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the data last of all: a checkpoint that has it is complete."""
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", STATE)
        path.with_suffix(".new").write_text(
            json.dumps({"data": self.loader.state_dict(), "done": self.done, "over": self.over})
        )
        os.replace(path.with_suffix(".new"), path)


class PromptTrainer(GRPOTrainer):
    """GRPOTrainer with prompts from a loader."""

    def get_train_dataloader(self) -> Prompts:
        """Return the prompts; TRL's own dataset and sampler are not asked."""
        return self.prompts


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward completions that say the answer, and short ones."""
    return [float(right in said.split()) - 0.01 * len(said) for said, right in zip(completions, answer, strict=True)]


def make_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a tiny model and its tokenizer."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "+", "=", *map(str, range(20))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes))
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def main(argv: Sequence[str] | None = None) -> list[Any]:
    """Train for an epoch of the prompts, and return the keys of those that are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines of prompts and answers")
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder for checkpoints")
    options = parser.parse_args(argv)
    dataset = get_train_dataset(
        options.data, batch_size=None, repeat=False, worker_config=WorkerConfig(num_workers=0, num_lanes=4)
    )
    prompts = Prompts(get_savable_loader(dataset, keep_until_done=True))
    found = sorted(options.output.glob(f"checkpoint-*/{STATE}"), key=lambda path: int(path.parent.name[11:]))
    if found:
        saved = json.loads(found[-1].read_text())
        prompts.loader.load_state_dict(saved["data"])
        prompts.done = saved["done"]
        if saved["over"]:
            return prompts.done
    arguments = GRPOConfig(
        output_dir=str(options.output),
        max_steps=1_000_000,  # the pass ends before
        per_device_train_batch_size=PROMPTS * ROLLOUTS,
        num_generations=ROLLOUTS,
        gradient_accumulation_steps=1,
        max_completion_length=6,
        save_steps=2,
        logging_steps=1,
        ignore_data_skip=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to=[],
    )
    model, tokenizer = make_model()
    trainer = PromptTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["1 + 1 ="], "answer": ["2"]}),  # TRL wants one
        callbacks=[prompts],
    )
    trainer.prompts = prompts
    trainer.train(resume_from_checkpoint=str(found[-1].parent) if found else None)
    return prompts.done


if __name__ == "__main__":
    print(len(main()), "prompts are done")

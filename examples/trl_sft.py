"""TRL's SFTTrainer over a dataset of energon_bridge, with a small vision-language model; it resumes exactly.

    python examples/trl_sft.py --data /data/captions --output run --max-steps 8
    python examples/trl_sft.py --data /data/captions --output run --max-steps 16 --resume

Without --data it makes a small dataset. The batches come ready from the task encoder, so TRL prepares nothing: no
template, no packing, no masking of its own. What it adds stays: its loss, its metrics, PEFT. It
needs `pip install trl`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_trainer import make_encoder, make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from energon_bridge import WorkerConfig, get_train_dataset
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.huggingface import EnergonTrainer


class EnergonSFTTrainer(EnergonTrainer, SFTTrainer):
    """SFTTrainer with the datasets, the checkpoints and the exact resume of EnergonTrainer."""

    def described(self, spec: Any) -> Any:
        """Return a dataset of TRL's own kind, which only stands for the real one."""
        stands_for = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
        stands_for.spec = spec
        return stands_for


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and return the losses that were logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of images and captions")
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder for checkpoints")
    parser.add_argument("--max-steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args(argv)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(3)}, unk_token="w0"))
    arguments = SFTConfig(
        output_dir=str(options.output),
        max_steps=options.max_steps,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        remove_unused_columns=False,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = EnergonSFTTrainer(
        model=make_model(),
        args=arguments,
        # TRL wants one; the task encoder has its own.
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2"
        ),
        train_dataset=get_train_dataset(
            options.data or create_captioning_test_dataset(options.output / "captions"),
            batch_size=2,
            task_encoder=make_encoder(),
            worker_config=WorkerConfig(num_workers=0, num_lanes=4),
        ),
        data_collator=list,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()

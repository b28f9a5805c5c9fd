"""Train a small vision-language model with the Trainer of transformers, stop it, and go on exactly where it was.

    python examples/huggingface_trainer.py --data /data/captions --output run --max-steps 8
    python examples/huggingface_trainer.py --data /data/captions --output run --max-steps 16 --resume

Without --data it makes a small dataset. `torchrun --nproc-per-node 2 examples/huggingface_trainer.py …` runs it on two
processes; a run may be resumed on another number of them. The model has random weights and needs no connection.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    TrainingArguments,
)

from energon_bridge import (
    ImageToken,
    MultiModalSampleConfig,
    MultiModalTaskEncoder,
    WorkerConfig,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.huggingface import EnergonTrainer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE_TOKEN, IMAGE_SIZE, PATCH_SIZE = 259, 16, 8


class Bytes:
    """A tokenizer without a vocabulary file: a text is its bytes."""

    bos_token_id, eos_token_id, pad_token_id = 256, 257, 258

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())


def make_model() -> LlavaForConditionalGeneration:
    """Return a Llava of 50,000 parameters, the same ones every time."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(**SIZES, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE, projection_dim=32)
    text = LlamaConfig(**SIZES, vocab_size=260, num_key_value_heads=2, bos_token_id=256, eos_token_id=257)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def make_encoder() -> MultiModalTaskEncoder:
    """Return what makes the model's inputs of images and captions."""
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    return MultiModalTaskEncoder(
        Bytes(),
        processor,
        MultiModalSampleConfig(image_token=ImageToken(token_str="<image>", token_id=IMAGE_TOKEN)),
        seq_length=64,
        image_tokens_per_image=(IMAGE_SIZE // PATCH_SIZE) ** 2,
    )


def make_trainer(data: Path, arguments: TrainingArguments) -> EnergonTrainer:
    """Return a trainer over a dataset of captions; it sets the ranks itself."""
    # As many lanes on any number of processes, although the dataset may be tiny; for large ones the default is right.
    common = {"task_encoder": make_encoder(), "worker_config": WorkerConfig(num_workers=2, num_lanes=4)}
    return EnergonTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=get_train_dataset(data, batch_size=2, shuffle_buffer_size=16, **common),
        eval_dataset=get_val_dataset(data, batch_size=4, **common),
    )


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Train and return what the Trainer logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of images and captions")
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder for checkpoints")
    parser.add_argument("--max-steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches of a process in an optimizer step")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args(argv)
    data = options.data
    if data is None:
        data = create_captioning_test_dataset(options.output / "captions")
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.max_steps,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
    )
    trainer = make_trainer(data, arguments)
    trainer.train(resume_from_checkpoint=options.resume)
    history: list[dict[str, float]] = trainer.state.log_history
    return history


if __name__ == "__main__":
    main()

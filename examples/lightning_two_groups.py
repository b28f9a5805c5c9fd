"""Lightning with the language model and the vision encoder on processes of their own; it resumes on other numbers.

    torchrun --nproc-per-node 3 examples/lightning_two_groups.py --language 2 --output run --max-steps 4
    torchrun --nproc-per-node 2 examples/lightning_two_groups.py --language 1 --output run --max-steps 8 --resume

The first processes have the language model, the others the encoder. `make_roles` lets language ranks load tokens and
encoder ranks the pictures of the language ranks that they serve; features go one way and their gradients the other.
Each process has a trainer of Lightning of its own, on one device, for DDP takes all processes for ranks of one model:
here gradients are summed over the ranks of each. The model is tiny, for a CPU, and needs no connection.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import CLIPImageProcessorPil, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from energon_bridge import EncoderBatch, EnergonMultiModalDataModule, make_roles
from energon_bridge.models.families import LLAVA_TEMPLATE, ChatConfig, ChatSample, ChatTemplateTaskEncoder
from energon_bridge.models.families.llava import FixedTokenFamily
from energon_bridge.tools.testing import create_captioning_test_dataset

WIDTH, IMAGE_SIZE, PATCH_SIZE = 32, 16, 8
MICRO_BATCH, GLOBAL_BATCH = 2, 8


# Data ----------------------------------------------------------------------------------------------------------------


class Captions(ChatTemplateTaskEncoder):
    """Asks for the caption of each picture; it runs on all ranks alike, and sees no pixels."""

    def preencode_sample(self, sample: Any) -> Any:
        turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": sample.caption}]
        return super().preencode_sample(ChatSample.derive_from(sample, messages=turns, images=[sample.image]))


def make_encoder() -> Captions:
    """Return what makes the tokens of captions, and the pixels of pictures of four patches."""
    letters = ["<pad>", "<s>", "</s>", "<image>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_ = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    special: dict[str, Any] = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    special["additional_special_tokens"] = ["<image>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, chat_template=LLAVA_TEMPLATE, **special)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=size)
    family = FixedTokenFamily(image_processor=processor, image_tokens=(IMAGE_SIZE // PATCH_SIZE) ** 2)
    return Captions(tokenizer, family, ChatConfig(seq_length=96))


def make_data(path: Path, groups: dict[str, Any]) -> EnergonMultiModalDataModule:
    """Return the data of this process: a dict in each step, with a batch for each of its roles."""
    return EnergonMultiModalDataModule(
        str(path),
        None,
        task_encoder=make_encoder(),
        micro_batch_size=MICRO_BATCH,
        global_batch_size=GLOBAL_BATCH,
        num_workers=0,  # for this tiny model
        num_lanes=4,  # on any number of processes, although the dataset is tiny; for large ones the default is right
        shuffle_buffer_size=16,
        roles=make_roles(grids=groups),
    )


# Models --------------------------------------------------------------------------------------------------------------


class Vision(torch.nn.Module):
    """Makes a feature of each patch of pictures of shape (images, 3, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, WIDTH, PATCH_SIZE, PATCH_SIZE)
        self.projection = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patches(pixel_values).flatten(2).transpose(1, 2).reshape(-1, WIDTH)
        return self.projection(torch.nn.functional.gelu(patches))


class OneOfTwo(LightningModule):
    """The model of this process: the language model, or the encoder.

    Args:
        name: `language` or `vision`.
        groups: The ranks of both; languages ranks come first.
    """

    def __init__(self, name: str, groups: dict[str, list[int]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.name = name
        self.ranks = groups
        self.group = {each: dist.new_group(ranks) for each, ranks in groups.items()}[name]
        sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.image_token = 3
        torch.manual_seed(0)
        self.model = Vision() if name == "vision" else LlamaForCausalLM(LlamaConfig(vocab_size=260, **sizes))
        self.turns = GLOBAL_BATCH // MICRO_BATCH // len(groups["language"])
        self.turn = 0
        self.sums = torch.zeros(2)
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.sums += self.language(batch["language"]) if self.name == "language" else self.vision(batch["vision"])
        self.turn += 1
        if self.turn == self.turns:
            self.update()

    def language(self, batch: Any) -> Tensor:
        """Return the sum of the losses of a microbatch's tokens, and their number."""
        rank = dist.get_rank()
        language, vision = (len(self.ranks[name]) for name in ("language", "vision"))
        sender = language + rank * vision // language  # as make_roles shares them out
        is_image = batch.tokens == self.image_token
        features = torch.zeros(int(is_image.sum()), WIDTH)
        dist.recv(features, sender)
        features.requires_grad_()
        inputs = self.model.get_input_embeddings()(batch.tokens).masked_scatter(is_image[..., None], features)
        losses = cross_entropy(self.model(inputs_embeds=inputs).logits.transpose(1, 2), batch.labels, reduction="none")
        loss = (losses * batch.loss_mask).sum()
        loss.backward()
        dist.send(features.grad, sender)
        return torch.stack([loss.detach(), batch.loss_mask.sum()])

    def vision(self, batch: EncoderBatch) -> Tensor:
        """Send the features of each language rank to it, and take back their gradients."""
        served = self.trainer.datamodule.roles.served("vision")
        features = self.model(batch.visual_inputs["pixel_values"])  # each sample has a picture, so each batch
        parts = features.split(batch.num_tokens)
        gradients = [torch.zeros_like(part) for part in parts]
        for rank, part in zip(served, parts, strict=True):
            dist.send(part.detach(), rank)
        for rank, gradient in zip(served, gradients, strict=True):
            dist.recv(gradient, rank)
        features.backward(torch.cat(gradients))
        return torch.zeros(2)

    def update(self) -> None:
        """Make a step of the optimizer with the mean over the tokens of the global batch."""
        dist.all_reduce(self.sums)
        loss, tokens = self.sums.tolist()
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= tokens
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.losses.append(loss / tokens)
        self.turn = 0
        self.sums = torch.zeros(2)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of images and captions")
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder for checkpoints")
    parser.add_argument("--language", type=int, default=1, help="processes of the language model, the others encode")
    parser.add_argument("--max-steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args(argv)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if not rank and options.data is None:
        create_captioning_test_dataset(options.output / "captions")
    dist.barrier()
    ranks = {"language": list(range(options.language)), "vision": list(range(options.language, size))}
    name = "language" if rank < options.language else "vision"
    model = OneOfTwo(name, ranks)
    own = ranks[name].index(rank)
    data = make_data(
        options.data or options.output / "captions",
        {each: (own if each == name else None, len(ranks[each])) for each in ranks},
    )
    trainer = Trainer(
        strategy=SingleDeviceStrategy(torch.device("cpu")),
        max_steps=options.max_steps,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.output / f"{name}-0.ckpt" if options.resume else None
    trainer.fit(model, datamodule=data, ckpt_path=last)
    # All processes save at once, since the state of the data comes from all language ranks; afterwards the file of the
    # first rank of each model is enough for any number of them.
    trainer.save_checkpoint(options.output / f"{name}-{own}.ckpt")
    data.close()
    dist.destroy_process_group()
    return model.losses


if __name__ == "__main__":
    print(main())

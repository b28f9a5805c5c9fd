"""What trainers give a model: the loss of each sample is the model's own on it alone, in rows, packs and microbatches.

The right value is made here: one sample, without padding, without our positions (models with three axes compute them),
its labels where transformers wants them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, QWENS, chat, encoder_of, model_config_of, model_of, picture, tokenizer_of
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainingArguments

from energon_bridge import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon_bridge.errors import ConfigurationError
from energon_bridge.integrations.bridge_encoders import BridgeTaskEncoder
from energon_bridge.integrations.huggingface import EnergonTrainer
from energon_bridge.samples import CaptioningSample, TextSample, VQASample
from energon_bridge.task_encoder import MultiModalTaskEncoder, check_packing, model_inputs
from energon_bridge.task_encoder.conversation import ImageToken, MultiModalSampleConfig
from energon_bridge.task_encoder.families import ChatSample, ChatTemplateTaskEncoder, VideoFrames
from energon_bridge.task_encoder.packing import SAMPLES, Packer
from energon_bridge.task_encoder.sequences import MultiModalSample
from energon_bridge.testing import create_captioning_test_dataset
from energon_bridge.training.config import RunConfig
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import ModelBundle

ALL = (*FAMILIES, "llava_next")
COLORS = ("red", "green", "blue")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=ALL)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def model(family: str) -> Any:
    """A model in which positions and neighbours matter."""
    made = model_of(model_config_of(family, tokenizer_of(family))).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return made


def samples_of(encoder: Any, family: str, count: int = 8) -> list[MultiModalSample]:
    samples: list[Any] = []
    for number in range(count - 1):
        colors = [COLORS[(number + image) % 3] for image in range(number % 3 + 1)]
        images = [picture(16 + 8 * (number % 2), 16 + 4 * n, color) for n, color in enumerate(colors)]
        turns = [text for color in colors for text in ("<image> color?", color)]
        samples.append(chat(*turns, images=images, key=f"talk {number}"))
    if family in QWENS:
        frames = torch.randint(0, 256, (5, 3, 20, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        samples[1] = chat(
            "<video> color? <image>", "red", images=[picture()], videos=[VideoFrames(frames=frames, fps=3.0)]
        )
    samples.append(chat("color?", "how many?", key="text"))
    return [encoder.encode(sample) for sample in samples]


@torch.no_grad()
def alone(family: str, sample: MultiModalSample) -> tuple[float, int]:
    """Return the model's own loss of one sample, summed over its learned tokens, and their number."""
    own = model(family)
    last = sample.labels[-1:]
    assert last >= 0  # the end of the answer is learned
    tokens = torch.cat([sample.tokens, last])[None]
    labels = torch.full_like(tokens, -100)
    labels[0, 1:] = torch.where(sample.loss_mask > 0, sample.labels, -100)
    inputs = dict(sample.visual)
    if family in QWENS:
        config = own.config
        inputs["mm_token_type_ids"] = torch.eq(tokens, config.image_token_id) + 2 * torch.eq(
            tokens, config.video_token_id
        )
        if family != "qwen2_5_vl":
            inputs.pop("second_per_grid_ts", None)
    count = int((labels != -100).sum())
    loss = own(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels, **inputs).loss
    return float(loss) * count, count


def all_alone(family: str, samples: list[MultiModalSample]) -> tuple[float, int]:
    losses, counts = zip(*(alone(family, sample) for sample in samples), strict=True)
    return sum(losses), sum(counts)


def groups(samples: list[Any]) -> list[list[Any]]:
    return [samples[:3], samples[3:4], samples[4:]]


def batch_of(encoder: Any, samples: list[MultiModalSample], packed: bool) -> Any:
    rows = [encoder.pack_selected_samples(group) for group in groups(samples)] if packed else samples
    return encoder.batch(rows)


@torch.no_grad()
def summed(own: Any, inputs: dict[str, Any]) -> tuple[float, int]:
    """Return what transformers' own loss gives, summed."""
    count = int((inputs["labels"][:, 1:] != -100).sum())
    return float(own(**inputs).loss) * count, count


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_the_inputs_of_a_batch_give_the_losses_of_its_samples(family: str, packed: bool, known: bool) -> None:
    encoder = encoder_of(family)
    samples = samples_of(encoder, family)
    batch = batch_of(encoder, samples, packed)
    loss, count = summed(model(family), model_inputs(batch, model(family) if known else None))
    expected, tokens = all_alone(family, samples)
    assert count == tokens
    assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_the_lightning_module_has_the_losses_of_the_samples(family: str, packed: bool) -> None:
    encoder = encoder_of(family)
    samples = samples_of(encoder, family)
    bundle = ModelBundle(
        model=model(family),
        tokenizer=encoder.tokenizer,
        image_processor=None,
        image_token_id=model(family).config.image_token_id,
        image_tokens=None,
    )
    module = VisionLanguageModule(bundle, RunConfig())
    with torch.no_grad():
        losses, mask = module.token_losses(batch_of(encoder, samples, packed))
    expected, tokens = all_alone(family, samples)
    assert int(mask.sum()) == tokens
    assert float((losses * mask).sum()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_of_megatron_bridge_has_the_losses_of_its_samples(family: str, packed: bool) -> None:
    made = encoder_of(family)
    encoder = BridgeTaskEncoder(made.tokenizer, made.family, pack_batches_to_multiple_of=8 if packed else None)
    samples = samples_of(encoder, family)
    batch = encoder.encode_batch(encoder.batch(samples))
    loss, count = summed(model(family), model_inputs(batch, model(family)))
    assert (loss, count) == pytest.approx(all_alone(family, samples), rel=1e-4)


# The Trainer ---------------------------------------------------------------------------------------------------------


def as_talk(sample: CaptioningSample, config: Any) -> ChatSample:
    number = int(sample.__key__[-1])
    colors = [COLORS[(number + image) % 3] for image in range(number % 3 + 1)]
    turns = [text for color in colors for text in ("<image> color?", color)]
    return chat(*turns, images=[sample.image] * len(colors), key=sample.__key__)


def trained_encoder(family: str) -> ChatTemplateTaskEncoder:
    encoder = encoder_of(family)
    encoder.packer = Packer(
        limits={"tokens": 2048, SAMPLES: 2}, size_of=lambda sample: {"tokens": encoder.padded_length(sample)}
    )
    encoder.register_encoder(CaptioningSample, as_talk)
    return encoder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_captioning_test_dataset(tmp_path_factory.mktemp("talks") / "data", num_train=8, num_val=8)


def trainer_of(family: str, data: Path, folder: Path, microbatches: int, packed: bool, **kwargs: Any) -> EnergonTrainer:
    rows = (4 if packed else 8) // microbatches
    common: dict[str, Any] = {
        "batch_size": rows,
        "task_encoder": trained_encoder(family),
        "worker_config": WorkerConfig(num_workers=0, num_lanes=1),
        "packing_buffer_size": 8 if packed else None,
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        gradient_accumulation_steps=microbatches,
        learning_rate=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **kwargs.pop("arguments", {}),
    )
    return EnergonTrainer(
        model=model(family),
        args=arguments,
        train_dataset=get_train_dataset(data, shuffle_buffer_size=None, **common),
        eval_dataset=get_val_dataset(data, **common),
        **kwargs,
    )


def expected_loss(family: str, data: Path, split: str) -> float:
    """Return the mean over the learned tokens of the split, each sample alone."""
    dataset = get_val_dataset(data, batch_size=1, split_part=split, worker_config=WorkerConfig(num_workers=0))
    encoder = trained_encoder(family)
    samples = [
        encoder.encode(CaptioningSample(__key__=batch.__key__[0], image=batch.image[0], caption=batch.caption[0]))
        for batch in get_loader(dataset)
    ]
    assert len(samples) == 8
    loss, tokens = all_alone(family, samples)
    return loss / tokens


@pytest.mark.parametrize("packed", [False, True])
def test_the_trainer_has_the_loss_of_the_samples_however_they_are_cut(
    family: str, packed: bool, data: Path, tmp_path: Path
) -> None:
    expected = expected_loss(family, data, "train")
    for microbatches in (1, 2, 4) if packed else (1, 2, 4, 8):
        trainer = trainer_of(family, data, tmp_path, microbatches, packed)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=2e-4), microbatches


@pytest.mark.parametrize("packed", [False, True])
def test_the_trainer_evaluates_with_the_losses_of_the_samples(
    family: str, packed: bool, data: Path, tmp_path: Path
) -> None:
    for microbatches in (1, 4):
        found = trainer_of(family, data, tmp_path, microbatches, packed).evaluate()["eval_loss"]
        assert found == pytest.approx(expected_loss(family, data, "val"), rel=2e-4)

"""What trainers give a model: the loss of each sample is the model's own on it alone, in rows, packs and microbatches.

The right value is made here: one sample, without padding, without our positions (models with three axes compute them),
its labels where transformers wants them.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import (
    FAMILIES,
    QWENS,
    chat,
    encoder_of,
    image_processor_of,
    model_config_of,
    model_of,
    picture,
    tokenizer_of,
)
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from forked import become_rank, free_port, run_forked
from made import made_once
from packaging.version import Version
from transformers import DynamicCache, TrainingArguments
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput

from energon_bridge import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import CaptioningSample, TextSample
from energon_bridge.models.conversations.inputs import check_packing, model_inputs
from energon_bridge.models.conversations.layout import ImageToken, MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.conversations.sequences import MultiModalSample
from energon_bridge.models.families import ChatSample, ChatTemplateTaskEncoder, VideoFrames
from energon_bridge.models.packing.packing import SAMPLES, Packer
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.bridge_encoders import BridgeTaskEncoder
from energon_bridge.trainers.huggingface import EnergonTrainer
from energon_bridge.training.config import RunConfig
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import ModelBundle

ALL = (*FAMILIES, "llava_next")
COLORS = ("red", "green", "blue")
data = made_once(create_captioning_test_dataset, num_train=8, num_val=8, image_size=24)


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
        # Releases before 5.20 count the seconds of a patch of Qwen2.5-VL in whole ones.
        fps = 3.0 if Version(transformers.__version__) >= Version("5.20") else 2.0
        samples[1] = chat(
            "<video> color? <image>", "red", images=[picture()], videos=[VideoFrames(frames=frames, fps=fps)]
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
    assert loss == pytest.approx(expected, rel=1e-5)


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
    assert float((losses * mask).sum()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_of_megatron_bridge_has_the_losses_of_its_samples(family: str, packed: bool) -> None:
    made = encoder_of(family)
    encoder = BridgeTaskEncoder(made.tokenizer, made.family, pack_batches_to_multiple_of=8 if packed else None)
    samples = samples_of(encoder, family)
    batch = encoder.encode_batch(encoder.batch(samples))
    loss, count = summed(model(family), model_inputs(batch, model(family)))
    assert (loss, count) == pytest.approx(all_alone(family, samples), rel=1e-5)


@pytest.mark.parametrize(("own", "left_out"), [("llava_next", "image_sizes"), ("qwen2_5_vl", "second_per_grid_ts")])
def test_megatron_bridge_gets_all_media_or_an_error(own: str, left_out: str) -> None:
    made = encoder_of(own)
    keys = ["pixel_values", "image_sizes", "image_grid_thw", "pixel_values_videos", "video_grid_thw"]
    keys += ["second_per_grid_ts"]
    for wanted in (keys, [key for key in keys if key != left_out]):
        encoder = BridgeTaskEncoder(made.tokenizer, made.family, visual_keys=wanted)
        batch = encoder.batch(samples_of(encoder, own))
        if left_out in wanted:
            assert left_out in encoder.encode_batch(batch)["visual_inputs"].as_model_kwargs()
            continue
        with pytest.raises(ConfigurationError, match=f"the batch has {left_out}, which visual_keys="):
            encoder.encode_batch(batch)


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


def trainer_of(
    family: str, data: Path, folder: Path, microbatches: int, packed: bool, *, lanes: int = 1, **kwargs: Any
) -> EnergonTrainer:
    rows = (4 if packed else 8) // microbatches // lanes
    common: dict[str, Any] = {
        "batch_size": rows,
        "task_encoder": trained_encoder(family),
        "worker_config": WorkerConfig(num_workers=0, num_lanes=lanes),
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


def whole_split(family: str, split: str) -> dict[str, Any]:
    config = WorkerConfig(num_workers=0)
    return {"batch_size": 8, "split_part": split, "task_encoder": trained_encoder(family), "worker_config": config}


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


TRAINED = ("llava", "qwen2_5_vl")
"""What a batch gives a model is tested of all families above; how a trainer cuts it is the same for all."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", TRAINED)
def test_the_trainer_has_the_loss_of_the_samples_however_they_are_cut(
    family: str, packed: bool, data: Path, tmp_path: Path
) -> None:
    expected = expected_loss(family, data, "train")
    for microbatches in (1, 4) if packed else (2, 8):
        trainer = trainer_of(family, data, tmp_path, microbatches, packed)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5), microbatches


def test_two_processes_have_the_loss_of_one(data: Path, tmp_path: Path) -> None:
    port = free_port()

    def process(rank: int) -> float:
        torch.set_num_threads(1)
        become_rank(rank, 2, port)
        trainer = trainer_of("qwen2_5_vl", data, tmp_path, 4, False, lanes=2)
        trainer.train()
        return float(trainer.state.log_history[0]["loss"])

    # Two samples for each microbatch of one process, one for each of two: the first step has the same eight.
    assert run_forked(2, process)[0] == pytest.approx(expected_loss("qwen2_5_vl", data, "train"), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", TRAINED)
def test_the_trainer_evaluates_with_the_losses_of_the_samples(
    family: str, packed: bool, data: Path, tmp_path: Path
) -> None:
    for microbatches in (1, 4):
        found = trainer_of(family, data, tmp_path, microbatches, packed).evaluate()["eval_loss"]
        assert found == pytest.approx(expected_loss(family, data, "val"), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_predictions_of_texts_and_images_fit_together(
    family: str, packed: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without images lacks outputs that one with images has."""

    def some_texts(sample: CaptioningSample, config: Any) -> ChatSample:
        if int(sample.__key__[-1]) < 4:
            return chat("color?", "red", key=sample.__key__)
        return chat("<image> color?", "red", images=[sample.image], key=sample.__key__)

    monkeypatch.setitem(globals(), "as_talk", some_texts)
    trainer = trainer_of(family, data, tmp_path, 4, packed)
    assert trainer.eval_dataset is not None
    for dataset in (trainer.eval_dataset, trainer.eval_dataset.spec):
        found = trainer.predict(dataset)
        assert found.metrics["test_loss"] == pytest.approx(expected_loss(family, data, "val"), rel=1e-5)
        logits = next(one for one in (found.predictions, *found.predictions) if getattr(one, "ndim", 0) == 3)
        labels = torch.from_numpy(found.label_ids)[:, 1:]
        loss = cross_entropy(torch.from_numpy(logits)[:, :-1].transpose(1, 2), labels)
        assert float(loss) == pytest.approx(expected_loss(family, data, "val"), rel=1e-4)


def test_outputs_of_newer_models_are_no_predictions(data: Path, tmp_path: Path) -> None:
    trainer = trainer_of("llava", data, tmp_path, 4, False)
    expected = trainer.predict(trainer.eval_dataset)
    media = BaseModelOutputWithPooling(pooler_output=torch.ones(3, 2))
    newer = {"cache": DynamicCache(), **{f"{kind}_outputs": media for kind in ("image", "video", "audio")}}
    rename = lambda _, __, outputs: ModelOutput(loss=outputs.loss, logits=outputs.logits, **newer)  # noqa: E731
    with trainer.model.register_forward_hook(rename):
        found = trainer.predict(trainer.eval_dataset)
    assert np.array_equal(found.predictions, expected.predictions)


@pytest.mark.parametrize("own", ["llava", "qwen2_5_vl"])
def test_smoothed_labels_are_those_of_the_next_tokens(own: str, data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(own, data, tmp_path, 4, False, arguments={"label_smoothing_factor": 0.1})
    trainer.train()
    batches = [model_inputs(batch) for batch in get_loader(get_val_dataset(data, **whole_split(own, "train")))]
    logits = [model(own)(**{k: v for k, v in inputs.items() if k != "labels"}).logits.detach() for inputs in batches]
    smoothed = [
        cross_entropy(scores[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], label_smoothing=0.1, reduction="none")
        for scores, inputs in zip(logits, batches, strict=True)
    ]
    tokens = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs in batches)
    expected = sum(float(losses.sum()) for losses in smoothed) / tokens
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_the_user_stays(data: Path, tmp_path: Path) -> None:
    own = lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum() * 0 + 7.0  # noqa: E731
    trainer = trainer_of("qwen3_vl", data, tmp_path, 1, False, compute_loss_func=own)
    assert trainer.compute_loss_func is own
    assert trainer_of("llava", data, tmp_path, 1, False).compute_loss_func is None


@pytest.mark.parametrize("own", ["llava", "qwen2_5_vl"])
def test_the_trainer_refuses_a_model_that_mixes_the_samples_of_packs(own: str, data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(own, data, tmp_path, 1, True)
    trainer.model = mixing = deepcopy(model(own))
    forward = mixing.forward
    mixing.forward = lambda **inputs: forward(**inputs | {"position_ids": None})
    with pytest.raises(ConfigurationError, match="does not keep the samples of a pack apart"):
        next(iter(trainer.get_train_dataloader()))
    with pytest.raises(ConfigurationError, match="does not keep the samples of a pack apart"):
        trainer.evaluate()
    rows = trainer_of(own, data, tmp_path, 1, False)
    rows.model = mixing
    assert next(iter(rows.get_train_dataloader()))


# What the function must not get wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_a_sample_does_not_move_the_next_ones(family: str, known: bool) -> None:
    encoder = encoder_of(family)
    samples = samples_of(encoder, family)
    logits = []
    for first in (samples[0], samples[3]):
        batch = encoder.batch([encoder.pack_selected_samples([first, *samples[1:3]])])
        with torch.no_grad():
            logits.append(model(family)(**model_inputs(batch, model(family) if known else None)).logits[0])
    rest = sum(len(sample.tokens) for sample in samples[1:3])
    lengths = [len(samples[number].tokens) for number in (0, 3)]
    ours, others = (found[start : start + rest] for found, start in zip(logits, lengths, strict=True))
    torch.testing.assert_close(ours, others, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("qwen", QWENS)
def test_packs_of_texts_only_are_kept_apart(qwen: str, known: bool) -> None:
    made = encoder_of(qwen)
    token = ImageToken(token_id=model(qwen).config.image_token_id)
    encoder = MultiModalTaskEncoder(made.tokenizer, image_processor_of(qwen), MultiModalSampleConfig(image_token=token))
    texts = ["red green", "green blue blue", "blue"]
    samples = [encoder.encode_sample(TextSample(__key__=text, text=text)) for text in texts]
    batch = encoder.batch([encoder.pack_selected_samples(samples)])
    loss, count = summed(model(qwen), model_inputs(batch, model(qwen) if known else None))
    assert (loss, count) == pytest.approx(all_alone(qwen, samples), rel=1e-5)


@pytest.mark.parametrize("qwen", QWENS)
def test_positions_that_nobody_made_are_the_models_or_an_error(qwen: str) -> None:
    """A user's encoder may leave them out: of rows the model makes them, of packs it would make wrong ones."""
    encoder = encoder_of(qwen)
    samples = samples_of(encoder, qwen)
    rows, packs = (batch_of(encoder, samples, packed) for packed in (False, True))
    for batch in (rows, packs):
        batch.mrope_position_ids = batch.mm_token_type_ids = None
    assert summed(model(qwen), model_inputs(rows, model(qwen))) == pytest.approx(all_alone(qwen, samples), rel=1e-5)
    with pytest.raises(ConfigurationError, match=r"pass the model, model_inputs\(batch, model\)"):
        model_inputs(rows)
    for given in (None, model(qwen)):
        with pytest.raises(ConfigurationError, match=r"no mrope_position_ids|neither mrope_position_ids"):
            model_inputs(packs, given)


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel and FSDP wrap a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Adapter(torch.nn.Module):
    """As PEFT wraps a model."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def get_base_model(self) -> Any:
        return self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


@pytest.mark.parametrize("wrap", [Wrapper, Adapter, torch.compile, lambda one: Wrapper(Adapter(one))])
def test_wrapped_models_get_the_same(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_bridge.models.conversations.inputs.check_packing", lambda model, **lengths: None)
    encoder = encoder_of("qwen2_5_vl")
    batch = batch_of(encoder, samples_of(encoder, "qwen2_5_vl"), True)
    batch.mm_token_type_ids = None
    expected, found = (model_inputs(batch, one) for one in (model("qwen2_5_vl"), wrap(model("qwen2_5_vl"))))
    assert expected.keys() == found.keys() >= {"mm_token_type_ids", "position_ids"}
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value


def test_packs_in_several_rows_are_checked_in_several_rows() -> None:
    """Kernels of variable length go by positions in a single row only."""
    mixing = deepcopy(model("llava"))
    forward = mixing.forward

    def in_one_row(**inputs: Any) -> Any:
        return forward(**inputs | ({"position_ids": None} if len(inputs["input_ids"]) > 1 else {}))

    mixing.forward = in_one_row
    encoder = encoder_of("llava")
    samples = samples_of(encoder, "llava")
    check_packing(mixing)
    model_inputs(encoder.batch([encoder.pack_selected_samples(samples)]), mixing)
    with pytest.raises(ConfigurationError, match=r"in 2 rows.*with one pack in a microbatch"):
        model_inputs(batch_of(encoder, samples, True), mixing)


def test_the_check_takes_no_gradients_away() -> None:
    """Under autocast, weights that were cast without gradients would be used again."""
    encoder = encoder_of("llava")
    batch = batch_of(encoder, samples_of(encoder, "llava"), True)
    own = deepcopy(model("llava")).train()
    with torch.autocast("cpu", torch.bfloat16):
        own(**model_inputs(batch, own)).loss.backward()
    assert own.training
    missing = [name for name, one in own.model.language_model.named_parameters() if one.grad is None]
    assert missing == []


def test_masked_rows_have_no_labels() -> None:
    encoder = encoder_of("qwen3_vl")
    samples = samples_of(encoder, "qwen3_vl")
    batch = encoder.batch(samples)
    batch.__valid__ = torch.arange(len(samples)) != 2
    kept = [*samples[:2], *samples[3:]]
    found = summed(model("qwen3_vl"), model_inputs(batch, model("qwen3_vl")))
    assert found == pytest.approx(all_alone("qwen3_vl", kept), rel=1e-5)


def test_a_dict_with_pixels_as_bytes_gets_floats() -> None:
    batch = {
        "input_ids": torch.ones(1, 2, dtype=torch.int64),
        "pixel_values": torch.full((1, 3, 2, 2), 255, dtype=torch.uint8),
        "pixel_norm": torch.tensor([[127.5] * 3, [127.5] * 3]),
    }
    inputs = model_inputs(batch)
    assert inputs.keys() == {"input_ids", "pixel_values"}
    assert inputs["pixel_values"].unique().tolist() == [1.0]


def test_pixels_have_the_type_of_the_model() -> None:
    encoder = encoder_of("llava")
    half = deepcopy(model("llava")).to(torch.bfloat16)
    inputs = model_inputs(encoder.batch(samples_of(encoder, "llava")), half)
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert torch.isfinite(half(**inputs).loss)

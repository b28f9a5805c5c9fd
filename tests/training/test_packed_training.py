"""Training on packs: what a sample gives in a pack is what it gives alone; runs on packs learn, stop and go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations import colors_of, conversations_dataset, picture_of, turns_of
from forked import become_rank, free_port, run_forked
from made import made_once
from paths import CONFIGS

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from lightning.pytorch import Trainer
from run_outputs import hexes, read_losses, read_predictions, run_with_a_stop
from torch.utils.data import DataLoader

from energon_bridge.core.errors import ConfigurationError, OverLongSampleError
from energon_bridge.core.samples import InterleavedSample, TextSample, VQASample
from energon_bridge.models.conversations.sequences import MultiModalBatch, MultiModalSample
from energon_bridge.training import run as training
from energon_bridge.training.config import DataConfig, ModelConfig, RunConfig, ValidationConfig
from energon_bridge.training.config_file import load_config
from energon_bridge.training.encoder import training_task_encoder
from energon_bridge.training.module import VisionLanguageModule, check_packing
from energon_bridge.training.presets import ModelBundle, load_model, write_preset
from energon_bridge.training.run_data import build_data_module
from energon_bridge.training.run_model import load_bundle, write_model_of_run

NUM_TRAIN, NUM_VAL = 40, 7
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")


# The model on packs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, image_size=16, patch_size=8, vocab_size=300)
    write_preset(config, folder, lambda: ["color? red green blue how many?"] * 3)
    return folder


@pytest.fixture
def bundle(model_folder: Path) -> ModelBundle:
    torch.manual_seed(1)
    bundle = load_model(str(model_folder), init="random")
    for parameter in bundle.model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)  # what crosses a border would otherwise be small
    return bundle


def samples_of(bundle: ModelBundle) -> list[MultiModalSample]:
    """Conversations and documents with several images, and a text without any."""
    samples: list[Any] = []
    for number in range(5):
        images = [picture_of(color) for color in colors_of(number)]
        questions, answers = (list(texts) for texts in zip(*turns_of(number), strict=True))
        samples.append(VQASample(__key__=f"talk, {number}", image=images, context=questions, answers=answers))
        pairs = zip(images, answers, strict=False)
        samples.append(InterleavedSample(__key__=f"doc {number}", sequence=[part for pair in pairs for part in pair]))
    samples.append(TextSample(__key__="text", text="red green"))
    encoder = task_encoder(bundle)
    return [encoder.encode_sample(sample) for sample in samples]


def task_encoder(bundle: ModelBundle) -> Any:
    return training_task_encoder(DataConfig(seq_length=192, packing_buffer_size=100), bundle)


def packed(bundle: ModelBundle, groups: list[list[MultiModalSample]], multiple: int = 1) -> MultiModalBatch:
    """Return one microbatch with a pack of each group."""
    encoder = task_encoder(bundle)
    encoder.pad_to_multiple_of = multiple
    batch: MultiModalBatch = encoder.batch([encoder.pack_selected_samples(group) for group in groups])
    return batch


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_every_token_has_the_loss_that_it_has_alone(bundle: ModelBundle, multiple: int, attention: str) -> None:
    bundle.model.set_attn_implementation(attention)
    module = VisionLanguageModule(bundle, RunConfig())
    samples = samples_of(bundle)
    assert max(sample.num_images for sample in samples) == 3
    batch = packed(bundle, [samples[:4], samples[4:6], samples[6:]], multiple)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens_padded is not None
    with torch.no_grad():
        losses, mask = module.token_losses(batch)
        for number, sample in enumerate(samples):
            alone, alone_mask = module.token_losses(task_encoder(bundle).batch([sample]))
            place = slice(
                int(batch.cu_seqlens_padded[number]), int(batch.cu_seqlens_padded[number]) + len(sample.tokens)
            )
            torch.testing.assert_close(losses.reshape(-1)[place], alone[0], rtol=1e-5, atol=1e-5)
            assert torch.equal(mask.reshape(-1)[place], alone_mask[0])
    assert float(mask.sum()) == sum(float(sample.loss_mask.sum()) for sample in samples)


class Recorder(VisionLanguageModule):
    """Keeps the gradients and the loss of its only step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def training_step(self, batch: MultiModalBatch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), loss.detach()]
        return loss


def one_step(bundle: ModelBundle, batches: list[MultiModalBatch], folder: Path) -> tuple[dict[str, Any], float]:
    config = RunConfig(data=DataConfig(packing_buffer_size=100))
    module = Recorder(bundle, config)
    settings: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    settings |= {"enable_model_summary": False, "accelerator": "cpu", "default_root_dir": folder}
    trainer = Trainer(max_steps=1, accumulate_grad_batches=len(batches), limit_val_batches=0, **settings)
    weights = {name: value.clone() for name, value in bundle.model.state_dict().items()}
    trainer.fit(module, DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch))
    bundle.model.load_state_dict(weights)
    return module.gradients, float(torch.stack(module.losses).mean() * module.step_scale)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*number of training batches.*", "ignore:.*no `val_dataloader`.*"
)
def test_a_step_has_the_same_gradients_however_its_samples_are_grouped(bundle: ModelBundle, tmp_path: Path) -> None:
    samples = samples_of(bundle)
    whole = task_encoder(bundle).batch
    packs = [samples[:1], samples[1:5], samples[5:]]
    expected, expected_loss = one_step(bundle, [whole(samples)], tmp_path)
    groupings = {
        "each alone": [whole([sample]) for sample in samples],
        "packs in one microbatch": [packed(bundle, packs)],
        "packs of unequal numbers in microbatches": [packed(bundle, [pack]) for pack in packs],
        "all in one pack": [packed(bundle, [samples])],
    }
    for name, batches in groupings.items():
        gradients, loss = one_step(bundle, batches, tmp_path)
        assert loss == pytest.approx(expected_loss, rel=1e-5), name
        assert gradients.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(gradients[parameter], gradient, **TOLERANCE, msg=f"{name}: {parameter}")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_would_mix_samples_is_refused(
    bundle: ModelBundle, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bundle.model
    model.set_attn_implementation(attention)
    model.train()
    model.model.vision_tower.eval()
    check_packing(model)
    assert (model.training, model.model.vision_tower.training) == (True, False)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: forward(**inputs | {"position_ids": None}))
    with pytest.raises(ConfigurationError, match=r"^Llava\w+ does not keep .*packing_buffer_size=null"):
        check_packing(model)


# Answers of packed samples -------------------------------------------------------------------------------------------


def test_the_answers_of_packed_samples_are_those_of_each_alone(bundle: ModelBundle) -> None:
    config = RunConfig(validation=ValidationConfig(max_new_tokens=6))
    module = VisionLanguageModule(bundle, config)
    samples = samples_of(bundle)
    alone = [module.predict(task_encoder(bundle).batch([sample])) for sample in samples]
    batch = packed(bundle, [samples[:4], samples[4:6], samples[6:]], 8)
    predictions = module.predict(batch)
    assert predictions == [prediction for (prediction,) in alone]
    assert [p.key for p in predictions] == [sample.__key__ for sample in samples]
    assert len({p.generated for p in predictions}) > 3
    batch.__valid__ = torch.tensor([True, False, True])
    assert [p.key for p in module.predict(batch)] == [s.__key__ for s in [*samples[:4], *samples[6:]]]
    batch.__valid__ = torch.tensor([False, False, False])
    assert module.predict(batch) == []


def test_images_are_told_apart_by_the_text_between_them(bundle: ModelBundle) -> None:
    known = VisionLanguageModule(bundle, RunConfig())
    unknown = VisionLanguageModule(replace(bundle, image_tokens=None), RunConfig())
    batch = packed(bundle, [samples_of(bundle)])
    assert unknown.predict(batch) == known.predict(batch)
    images = [picture_of(color) for color in ("red", "green", "blue")]
    side_by_side = InterleavedSample(__key__="doc", sequence=[*images[:2], "red", images[2], "blue"])
    batch = packed(bundle, [[task_encoder(bundle).encode_sample(side_by_side)]])
    assert len(known.predict(batch)) == 1
    with pytest.raises(ConfigurationError, match=r"images behind the first answer.*side by side.*generate=false"):
        unknown.predict(batch)


# Runs ----------------------------------------------------------------------------------------------------------------


dataset = made_once(conversations_dataset, num_train=NUM_TRAIN, num_val=NUM_VAL)


def configuration(dataset: Path, run_dir: Path, *overrides: str) -> RunConfig:
    own = [f"data.path={dataset}", f"run_dir={run_dir}", "data.trust_remote_code=true"]
    return load_config(CONFIGS / "packed.yaml", [*own, *overrides])


@pytest.fixture(scope="module")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Any]:
    """Return the configuration and the result of one whole run."""
    config = configuration(dataset, tmp_path_factory.mktemp("finished") / "run")
    return config, training.run(config)


def test_the_tiny_model_learns_on_packs_and_predicts_every_sample_once(finished: tuple[RunConfig, Any]) -> None:
    config, result = finished
    losses = read_losses(config.run_dir)
    assert list(losses) == list(range(1, 25))
    assert losses[24] < 0.4 * losses[1]
    assert result.step == 24
    predictions = read_predictions(config.run_dir)
    expected = {f"val-{number:03d}": turns_of(number)[0][1] for number in range(NUM_VAL)}
    assert len(predictions) == NUM_VAL
    assert {p.key: p.expected for p in predictions} == expected
    assert result.read is not None


def test_a_run_on_packs_that_was_stopped_goes_on_bit_for_bit(
    finished: tuple[RunConfig, Any], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(dataset, tmp_path / "run", "data.num_workers=2")
    result = run_with_a_stop(config, monkeypatch, at=3)
    assert hexes(config.run_dir) == hexes(finished[0].run_dir)
    assert (result.validation_loss, result.read) == (finished[1].validation_loss, finished[1].read)


def test_two_ranks_train_on_the_same_packs(finished: tuple[RunConfig, Any], dataset: Path, tmp_path: Path) -> None:
    config = configuration(dataset, tmp_path / "run")
    port = free_port()

    def train(rank: int) -> float:
        become_rank(rank, 2, port)
        return float(training.run(config).validation_loss or 0)

    losses = run_forked(2, train)
    assert losses == pytest.approx([finished[1].validation_loss] * 2, rel=1e-3)
    alone, both = (read_losses(run.run_dir) for run in (finished[0], config))
    assert both == pytest.approx(alone, rel=1e-3)
    alone_read, both_read = (read_predictions(run.run_dir) for run in (finished[0], config))
    assert [(p.key, p.expected) for p in both_read] == [(p.key, p.expected) for p in alone_read]


def test_packed_and_unpacked_validation_have_the_same_loss(finished: tuple[RunConfig, Any], dataset: Path) -> None:
    config, result = finished
    bundle = load_bundle(config, Path(config.run_dir) / "model")
    state = torch.load(sorted((Path(config.run_dir) / "checkpoints").iterdir())[-1], weights_only=True)
    unpacked = configuration(
        dataset, Path(config.run_dir), "data.packing_buffer_size=null", "data.packing_max_images=null"
    )
    module = VisionLanguageModule(bundle, unpacked)
    module.load_state_dict(state["state_dict"])
    data = build_data_module(unpacked, bundle)
    losses, tokens = 0.0, 0.0
    with torch.no_grad():
        for batch in data.val_dataloader().one_pass():
            token_losses, mask = module.token_losses(batch)
            losses, tokens = losses + float((token_losses * mask).sum()), tokens + float(mask.sum())
    data.close()
    assert result.validation_loss == pytest.approx(losses / tokens, rel=1e-5)


def test_packs_keep_to_their_limits(dataset: Path, tmp_path: Path) -> None:
    config = configuration(dataset, tmp_path, "data.packing_max_samples=2", "data.packing_max_images=3")
    write_model_of_run(config, tmp_path / "model")
    bundle = load_bundle(config, tmp_path / "model")
    data = build_data_module(config, bundle)
    batches = [next(data.train_dataloader()) for _ in range(10)]
    data.close()
    for batch in batches:
        (rows, width), starts = batch.tokens.shape, batch.cu_seqlens_padded[:-1]
        samples = (starts // width).bincount(minlength=rows)
        images = (starts // width).bincount(torch.tensor(batch.num_images), minlength=rows)
        assert int(samples.max()) <= 2
        assert int(images.max()) <= 3
    assert any(len(batch.sample_keys) > len(batch.__key__) for batch in batches)


def test_a_sample_with_more_images_than_a_pack_may_have_is_named(dataset: Path, tmp_path: Path) -> None:
    config = configuration(dataset, tmp_path, "data.packing_max_images=2")
    with pytest.raises(OverLongSampleError, match=r"train-\d+.* has 3 images, but a pack holds at most 2"):
        training.dry_run(config)

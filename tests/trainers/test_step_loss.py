"""The loss of a step of EnergonTrainer: the mean over its learned tokens, whatever models make of their arguments.

The right loss and gradients are made here, of the logits: the sum over the learned tokens of the step by their number.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from forked import become_rank, free_port, run_forked
from made import made_once
from transformers import TrainingArguments

from energon_bridge import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.huggingface import EnergonTrainer, model_inputs

ROWS, LENGTH, SMOOTHING, OF_ROUTERS = 8, 12, 0.1, 0.5
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEARING = {"d_model": 32, "encoder_layers": 1, "encoder_ffn_dim": 32, "encoder_attention_heads": 2, "num_mel_bins": 8}
GRANITE = {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dim_head": 16, "input_dim": 8, "output_dim": 8}
QUERIES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
STARTS = {"decoder_start_token_id": 2, "dropout": 0.0, "dropout_rate": 0.0}
data = made_once(create_captioning_test_dataset, num_train=40, num_val=4)


def config_of(name: str) -> Any:
    if name == "Llama":
        return transformers.LlamaConfig(**TEXT)
    if name == "T5":
        return transformers.T5Config(vocab_size=64, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, **STARTS)
    if name == "Bart":
        sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads"), 2)
        wide = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_attention_heads": 2}
        return transformers.BartConfig(
            vocab_size=64, d_model=32, pad_token_id=0, eos_token_id=2, **sizes, **wide, **STARTS
        )
    if name == "Mixtral":
        return transformers.MixtralConfig(
            **TEXT, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=OF_ROUTERS
        )
    if name == "GraniteSpeech":
        return transformers.GraniteSpeechConfig(
            text_config={"model_type": "granite", **TEXT},
            encoder_config=GRANITE,
            projector_config={"model_type": "blip_2_qformer", "encoder_hidden_size": 32, **QUERIES},
            audio_token_index=60,
            has_lora_adapter=False,
        )
    text = transformers.Qwen2Config(**TEXT).to_dict()
    return transformers.Qwen2AudioConfig(audio_config=HEARING, text_config=text, audio_token_index=60)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    made = {
        "Llama": "LlamaForCausalLM",
        "Mixtral": "MixtralForCausalLM",
        "T5": "T5ForConditionalGeneration",
        "Bart": "BartForConditionalGeneration",
        "GraniteSpeech": "GraniteSpeechForConditionalGeneration",
        "Qwen2Audio": "Qwen2AudioForConditionalGeneration",
    }
    return getattr(transformers, made[name])(config_of(name))


class Letters(DefaultTaskEncoder):
    """Rows of which different parts are learned; of the first two, nothing is."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        number = int(sample.__key__[-2:])
        tokens = torch.tensor([3 + (5 * number + place) % 50 for place in range(LENGTH)])
        learned = torch.arange(LENGTH) >= (LENGTH if number < 2 else number)
        return {"__key__": sample.__key__, "input_ids": tokens, "labels": torch.where(learned, tokens, -100)}


def dataset_of(data: Path, rows: int, lanes: int = 1) -> Any:
    config = WorkerConfig(num_workers=0, num_lanes=lanes)
    return get_train_dataset(
        data, batch_size=rows, task_encoder=Letters(), worker_config=config, shuffle_buffer_size=None,
        shuffle_over_epochs_multiplier=None,
    )  # fmt: skip


def arguments_of(folder: Path, **settings: Any) -> TrainingArguments:
    """Return the arguments of a Trainer that logs each step and clips nothing."""
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(folder), logging_steps=1, max_grad_norm=1e9, **quiet, **settings)


def first_step(name: str, data: Path, folder: Path, microbatches: int, *, lanes: int = 1, **kwargs: Any) -> list[float]:
    """Return loss and gradient norm of the first step, which has the same rows however it is cut."""
    steps = {"max_steps": 1, "gradient_accumulation_steps": microbatches // lanes, "learning_rate": 0.0}
    arguments = arguments_of(folder, **steps, **kwargs.pop("arguments", {}))
    dataset = dataset_of(data, ROWS // microbatches, lanes)
    trainer = EnergonTrainer(model=model_of(name), args=arguments, train_dataset=dataset, **kwargs)
    trainer.train()
    return [trainer.state.log_history[0][key] for key in ("loss", "grad_norm")]


def expected_step(name: str, data: Path, microbatches: int, smoothing: float = 0.0) -> list[float]:
    """Return what the step must have; router losses are weighted by the learned tokens of their microbatches."""
    model = model_of(name).train()
    batches = list(zip(range(microbatches), get_loader(dataset_of(data, ROWS // microbatches)), strict=False))
    inputs = [model_inputs(batch) for _, batch in batches]
    labels = [one.pop("labels")[:, 1:] for one in inputs]
    tokens = sum(int((one != -100).sum()) for one in labels)
    loss = torch.zeros(())
    for given, wanted in zip(inputs, labels, strict=True):
        outputs = model(**given)
        scores = outputs.logits[:, :-1].transpose(1, 2)
        loss = loss + cross_entropy(scores, wanted, label_smoothing=smoothing, reduction="sum") / tokens
        if name == "Mixtral":
            loss = loss + OF_ROUTERS * outputs.aux_loss * int((wanted != -100).sum()) / tokens
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return [loss.item(), norm.item()]


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
@pytest.mark.parametrize("name", ["Llama", "Qwen2Audio", "GraniteSpeech", "Mixtral"])
def test_a_step_has_the_mean_over_its_learned_tokens(name: str, smoothing: float, data: Path, tmp_path: Path) -> None:
    for microbatches in (1, 4):
        found = first_step(name, data, tmp_path, microbatches, arguments={"label_smoothing_factor": smoothing})
        assert found == pytest.approx(expected_step(name, data, microbatches, smoothing), rel=1e-5), microbatches


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_decoder_beside_an_encoder_gets_the_labels_before(
    name: str, smoothing: float, data: Path, tmp_path: Path
) -> None:
    model, batch = model_of(name).train(), next(iter(get_loader(dataset_of(data, ROWS))))
    inputs = model_inputs(batch)
    labels = inputs.pop("labels")
    start = torch.full((ROWS, 1), STARTS["decoder_start_token_id"])
    before = torch.cat((start, labels[:, :-1]), 1)
    scores = model(**inputs, decoder_input_ids=before.where(before >= 0, 0)).logits.transpose(1, 2)
    expected = cross_entropy(scores, labels, label_smoothing=smoothing)
    found = first_step(name, data, tmp_path, 1, arguments={"label_smoothing_factor": smoothing})
    assert found[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Qwen2Audio", "Mixtral"])
def test_several_processes_have_the_step_of_one(name: str, data: Path, tmp_path: Path) -> None:
    port = free_port()

    def process(rank: int) -> list[float]:
        torch.set_num_threads(1)
        become_rank(rank, 2, port)
        return first_step(name, data, tmp_path, 4, lanes=2)

    expected = expected_step(name, data, 4)
    for found in run_forked(2, process):
        assert found == pytest.approx(expected, rel=1e-5)


def own_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    scores = outputs["logits"][:, :-1].transpose(1, 2)
    return cross_entropy(scores, labels[:, 1:], reduction="sum") / num_items_in_batch


def test_a_loss_of_the_user_has_the_number_of_learned_tokens(data: Path, tmp_path: Path) -> None:
    for name in ("Llama", "Qwen2Audio"):
        for microbatches in (1, 4):
            found = first_step(name, data, tmp_path, microbatches, compute_loss_func=own_mean)
            assert found == pytest.approx(expected_step(name, data, microbatches), rel=1e-5)


def test_router_losses_and_losses_of_other_kinds_are_named(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = partial(
        EnergonTrainer,
        args=TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True),
        train_dataset=dataset_of(data, 2),
    )
    with caplog.at_level(logging.WARNING, "energon_bridge"):
        trainer(model=model_of("Llama"))
        assert not caplog.records
        trainer(model=model_of("Mixtral"))
    assert "MixtralForCausalLM has router losses (output_router_logits)" in caplog.text
    caplog.clear()
    sounds = transformers.Wav2Vec2Config(
        **{key: TEXT[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
        num_hidden_layers=1,
    )
    with caplog.at_level(logging.WARNING, "energon_bridge"):
        trainer(model=transformers.Wav2Vec2ForCTC(sounds))
    assert "Wav2Vec2ForCTC has a loss of its own" in caplog.text

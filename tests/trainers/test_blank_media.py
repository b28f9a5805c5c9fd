"""Microbatches without pictures, videos or sounds get blank ones: every part of the model runs, and no loss changes.

The right values are the model's own on the same samples without blank media, in double precision.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, chat, encoder_of, model_config_of, model_of, picture, tokenizer_of
from forked import become_rank, free_port, on_gloo, run_forked
from made import made_once
from processors import called, conversation, planned
from test_any_model import MODELS, ONE_QUESTION, REFUSED_PACKS, made, text_alone
from test_model_inputs import model as floats_model
from test_step_loss import arguments_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from energon_bridge import WorkerConfig, get_loader, get_train_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.inputs import model_inputs
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.bridge_encoders import BridgeTaskEncoder
from energon_bridge.trainers.huggingface import EnergonTrainer
from energon_bridge.training.config import RunConfig
from energon_bridge.training.megatron.ranks import cpu_backend
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import ModelBundle

ALL = (*FAMILIES, "llava_next")
LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
WITHOUT_TORCHVISION = ("gemma3", "idefics3", "qwen2_audio", "aya_vision", "paddleocr_vl", "minicpmv4_7")
data = made_once(create_captioning_test_dataset, num_train=40, num_val=4)
Gradients = dict[str, torch.Tensor | None]


@cache
def family_model(family: str) -> Any:
    return deepcopy(floats_model(family)).double()


def texts_of(encoder: Any) -> list[Any]:
    return [encoder.encode(chat("color?", answer, key=answer)) for answer in ("red", "how many?", "blue")]


def pictures_of(encoder: Any) -> list[Any]:
    talks = [(24, "red"), (16, "green")]
    samples = [chat("<image> color?", c, images=[picture(side, 16, c)], key=c) for side, c in talks]
    return [encoder.encode(sample) for sample in samples]


def batch_of(encoder: Any, samples: list[Any], packed: bool) -> Any:
    packs = [samples[:2], samples[2:]] if len(samples) > 2 else [samples]
    return encoder.batch([encoder.pack_selected_samples(pack) for pack in packs] if packed else samples)


def learned(model: Any, inputs: dict[str, Any]) -> tuple[float, Gradients]:
    """Return the summed loss of a batch, and its gradients."""
    model.zero_grad()
    loss = model(**inputs).loss * (inputs["labels"][:, 1:] != -100).sum()
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in model.named_parameters()}


def same(found: tuple[float, Gradients], wanted: tuple[float, Gradients], used: Gradients) -> None:
    """Compare losses and gradients; where nothing was learned before, there are zeros wherever media give any."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for name, gradient in found[1].items():
        assert (gradient is None) == (used[name] is None), name
        if gradient is not None:
            before = wanted[1][name]
            before = torch.zeros_like(gradient) if before is None else before
            close(gradient, before)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare gradients; transformers computes losses, and some norms, in single precision."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * max(1e-2, float(wanted.abs().max())))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ALL)
def test_families_run_their_vision_tower_without_pictures(family: str, packed: bool) -> None:
    plain, blank = encoder_of(family), encoder_of(family, ChatConfig(blank_media=True))
    model = family_model(family)
    texts, pictures = texts_of(plain), pictures_of(plain)
    batch = batch_of(blank, texts, packed)
    assert int(batch.attention_mask.sum()) == sum(len(sample.tokens) for sample in texts)
    wanted = learned(model, model_inputs(batch_of(plain, texts, packed), model))
    assert any(gradient is None for gradient in wanted[1].values())
    _, used = learned(model, model_inputs(batch_of(plain, pictures, packed), model))
    same(learned(model, model_inputs(batch, model)), wanted, used)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [*MODELS] if LONG else WITHOUT_TORCHVISION)
def test_any_model_runs_whole_without_media(model_type: str) -> None:
    if MODELS[model_type] in ONE_QUESTION:
        pytest.skip("it takes no text without an image")
    try:
        with planned():
            processor, model, plain = made(model_type)
    except ImportError as error:
        pytest.skip(str(error))
    config = replace(plain.config, blank_media=True)
    if model_type == "mllama":
        with pytest.raises(ConfigurationError, match="through cross-attention"):
            ChatTemplateTaskEncoder.for_processor(processor, config, model_config=model.config)
        return
    model = model if "moe" in model_type else model.double()  # torch multiplies experts in single precision
    blank = ChatTemplateTaskEncoder.for_processor(processor, config, model_config=model.config)
    texts = [plain.encode(text_alone()[0])] * 2
    numbers = (1, 2, 3, 4) if model_type == "glm4v" else (0, 1, 3, 4)  # it takes no image beside a video
    media = [plain.encode(conversation(number, list(plain.family.counts), processor)[0]) for number in numbers]
    _, used = learned(model, model_inputs(plain.batch(media), model))
    for packed in (False, True) if model_type not in REFUSED_PACKS else (False,):
        wanted = learned(model, model_inputs(batch_of(plain, texts, packed), model))
        same(learned(model, model_inputs(batch_of(blank, texts, packed), model)), wanted, used)
    model.float()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_microbatches_with_all_media_stay_as_they_are(family: str) -> None:
    for packed in (False, True):
        wanted, found = (
            batch_of(encoder, pictures_of(encoder), packed)
            for encoder in (encoder_of(family, ChatConfig()), encoder_of(family, ChatConfig(blank_media="image")))
        )
        assert found.blank_media == []
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.pixel_values, wanted.pixel_values)


@pytest.mark.parametrize("packed", [False, True])
def test_each_kind_is_blank_where_it_is_missing(packed: bool) -> None:
    encoder = encoder_of("qwen2_5_vl", ChatConfig(blank_media=True))
    batch = batch_of(encoder, pictures_of(encoder), packed)
    assert batch.blank_media == ["pixel_values_videos", "second_per_grid_ts", "video_grid_thw"]
    assert batch_of(encoder, texts_of(encoder), packed).blank_media == sorted(
        ["pixel_values", "image_grid_thw", *batch.blank_media]
    )
    named = encoder_of("qwen2_5_vl", ChatConfig(blank_media=("image",)))
    assert batch_of(named, texts_of(named), packed).blank_media == ["image_grid_thw", "pixel_values"]


def test_rows_of_a_fixed_length_have_room_for_blank_media() -> None:
    config = ChatConfig(blank_media=True, seq_length=160, pad_to_max_length=True, pad_to_multiple_of=8)
    encoder = encoder_of("qwen2_5_vl", config)
    long = encoder.encode(chat("color?", "red " * 200))
    assert 100 < len(long.tokens) < 160  # cut, for the blank media
    for packed in (False, True):
        for samples in ([long], texts_of(encoder), pictures_of(encoder)):
            assert batch_of(encoder, samples, packed).tokens.shape[1] == 160
    pack = batch_of(encoder, texts_of(encoder), True)
    assert pack.cu_seqlens_padded[-1] == pack.tokens.numel()
    assert pack.max_seqlen == int(pack.cu_seqlens_padded.diff().max())
    with pytest.raises(ConfigurationError, match="blank_media"):
        encoder_of("qwen2_5_vl", ChatConfig(blank_media=True, seq_length=32, pad_to_max_length=True))


def test_kinds_that_a_model_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="takes no audio, but image, video"):
        encoder_of("qwen2_5_vl", ChatConfig(blank_media="audio"))


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_of_megatron_bridge_has_blank_pictures(packed: bool) -> None:
    own = encoder_of("qwen3_vl")
    multiple = 8 if packed else None
    plain, blank = (
        BridgeTaskEncoder(own.tokenizer, own.family, config, pack_batches_to_multiple_of=multiple)
        for config in (ChatConfig(), ChatConfig(blank_media="image"))
    )
    model = family_model("qwen3_vl")
    wanted, found = (encoder.encode_batch(encoder.batch(texts_of(own))) for encoder in (plain, blank))
    assert "image_grid_thw" in found["visual_inputs"].as_model_kwargs()
    if packed:
        assert found["total_tokens"] == found["cu_seqlens_q_padded"][-1] == found["input_ids"].numel()
        assert torch.equal(found["cu_seqlens_q"], wanted["cu_seqlens_q"])
    _, used = learned(model, model_inputs(own.batch(pictures_of(own)), model))
    same(learned(model, model_inputs(found, model)), learned(model, model_inputs(wanted, model)), used)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gemma3", "idefics3"])
def test_batches_of_ones_own_get_what_the_processor_makes(model_type: str) -> None:
    with planned():
        processor, model, encoder = made(model_type)
    talk, _ = conversation(1, ["image"], processor)
    blank = called(processor, [processor.image_token], [replace(talk, images=[picture(32, 32, "red")], messages=[])])
    batch = dict(processor.tokenizer(["What is it?", "A line of text."], padding=True, return_tensors="pt"))
    batch["labels"] = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
    if model_type == "gemma3":
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        blank["token_type_ids"] = blank.get("token_type_ids", blank["input_ids"] == model.config.image_token_id).long()
    own = model.double()
    _, used = learned(own, model_inputs(encoder.batch([encoder.encode(talk)]), own))
    found = learned(own, model_inputs(batch, own, blank_media=[blank]))
    same(found, learned(own, model_inputs(batch, own)), used)
    again = model_inputs(model_inputs(batch, own, blank_media=[blank]), own, blank_media=[blank])
    assert again["input_ids"].shape[1] == batch["input_ids"].shape[1] + blank["input_ids"].shape[1] + 1
    with pytest.raises(ConfigurationError, match="a text with one blank medium"):
        model_inputs(batch, own, blank_media=[{"pixel_values": blank["pixel_values"]}])
    with pytest.raises(ConfigurationError, match="cu_seq_lens"):
        model_inputs({**batch, "cu_seq_lens_q": torch.tensor([0, 3])}, own, blank_media=[blank])
    model.float()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_answers_are_written_without_blank_media(family: str, packed: bool) -> None:
    model = family_model(family).eval()
    plain, blank = encoder_of(family), encoder_of(family, ChatConfig(blank_media=True))
    token = model.config.image_token_id
    bundle = ModelBundle(
        model=model, tokenizer=plain.tokenizer, image_processor=None, image_token_id=token, image_tokens=None
    )
    module = VisionLanguageModule(bundle, RunConfig())
    wanted, found = (module.predict(batch_of(encoder, texts_of(encoder), packed)) for encoder in (plain, blank))
    assert found == wanted


# Several ranks --------------------------------------------------------------------------------------------------------


def data_of(encoder: Any, rank: int, packed: bool) -> Any:
    """Return the microbatch of a rank; every other rank has no pictures."""
    return batch_of(encoder, (texts_of if rank % 2 else pictures_of)(encoder), packed)


def trained(
    model: Any, batches: list[Any], tokens: int, parallel: Any, finish: Callable[[], None] = lambda: None
) -> list[Any]:
    """Take two steps, and return what each rank had: its loss and the gradients, of the mean over all tokens."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        sums = 0.0
        for inputs in batches:
            count = int((inputs["labels"][:, 1:] != -100).sum())
            loss = parallel(**inputs).loss * count / tokens
            (loss * (dist.get_world_size() if dist.is_initialized() else 1)).backward()
            sums += float(loss.detach())
        finish()
        optimizer.step()
        gradients = {name: one.grad for name, one in model.named_parameters()}
        whole = {
            name: one.full_tensor() if hasattr(one, "full_tensor") else one
            for name, one in gradients.items()
            if one is not None
        }
        found.append((sums, {name: one.clone() for name, one in whole.items()}))
    return found


def sharded(model: Any, ranks: int) -> Any:
    """Shard a model over ranks as recipes do: each layer of its parts, and the rest."""
    mesh = init_device_mesh("cpu", (ranks,))
    for part in model.modules():
        if type(part).__name__.endswith(("DecoderLayer", "VisionBlock", "EncoderLayer")):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_megatron(model: Any, overlap: bool) -> tuple[Any, Any]:
    """Wrap a model in megatron-core's DistributedDataParallel; also return what ends the backward pass of a step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel as Parallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    buckets = {"overlap_grad_reduce": overlap, "bucket_size": 20_000 if overlap else None}  # several buckets
    parallel = Parallel(config, DistributedDataParallelConfig(**buckets), model)

    def finish() -> None:
        parallel.finish_grad_sync()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.main_grad.clone()
        parallel.zero_grad_buffer()

    return parallel, finish


@pytest.mark.parametrize("ranks", [2, 4] if LONG else [2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("way", "family"),
    [("fsdp", "qwen3_vl"), ("ddp", "qwen2_5_vl"), ("fsdp", "llava"), ("megatron", "llava"), ("overlap", "qwen2_5_vl")],
)
def test_ranks_without_pictures_learn_with_the_others(way: str, family: str, packed: bool, ranks: int) -> None:
    plain, blank = encoder_of(family), encoder_of(family, ChatConfig(blank_media="image"))

    def fresh() -> Any:
        own = model_of(model_config_of(family, tokenizer_of(family))).double()
        for name, parameter in own.named_parameters():
            parameter.requires_grad_("post_layernorm" not in name)  # which LLaVA never uses
        return own

    model = fresh()
    given = [model_inputs(data_of(plain, rank, packed), model) for rank in range(ranks)]
    tokens = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs in given)
    wanted = trained(model, given, tokens, model)

    def one(rank: int) -> Any:
        torch.set_num_threads(1)
        own = fresh()
        inputs = model_inputs(data_of(blank, rank, packed), own)
        if way in ("megatron", "overlap"):
            with cpu_backend():
                found = trained(own, [inputs], tokens, *on_megatron(own, way == "overlap"))
        else:
            found = trained(
                own, [inputs], tokens, sharded(own, ranks) if way == "fsdp" else DistributedDataParallel(own)
            )
        return [(loss, {name: value.numpy() for name, value in gradients.items()}) for loss, gradients in found]

    results = on_gloo(ranks, one)
    for step, (loss, gradients) in enumerate(wanted):
        assert sum(of_rank[step][0] for of_rank in results) == pytest.approx(loss, rel=1e-6)
        assert results[0][step][1].keys() == gradients.keys()
        for of_rank in results:
            for name, value in of_rank[step][1].items():
                close(torch.from_numpy(value), gradients[name])


class Turns(ChatTemplateTaskEncoder):
    """Makes conversations of captions, of which every third has a picture."""

    def preencode_sample(self, sample: Any) -> Any:
        number = int(sample.__key__[-2:])
        shown, answer = [(24, "red"), (16, "green"), (16, "blue")][number % 3]
        images = [picture(shown, 16, answer)] if number % 3 == 0 else []
        return super().preencode_sample(
            chat(f"{'<image> ' * len(images)}color?", answer, images=images, key=sample.__key__)
        )


def trainer_steps(data: Path, folder: Path, ranks: int, blank: Any) -> list[Any]:
    """Return losses and gradient norms of some steps of EnergonTrainer, of the same rows on any number of ranks."""
    plain = encoder_of("qwen2_5_vl")
    made = Turns(plain.tokenizer, plain.family, ChatConfig(blank_media=blank))
    arguments = arguments_of(
        folder,
        max_steps=5,
        gradient_accumulation_steps=2 // ranks,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=False,  # as with gradient checkpointing; else the Trainer looks for them
    )
    config = WorkerConfig(num_workers=0, num_lanes=2)
    dataset = get_train_dataset(data, batch_size=1, task_encoder=made, worker_config=config)
    shown = [batch.pixel_values is not None for _, batch in zip(range(10), get_loader(dataset), strict=False)]
    assert blank or {True, False} in [set(pair) for pair in zip(shown[::2], shown[1::2], strict=True)]
    model = model_of(model_config_of("qwen2_5_vl", made.tokenizer)).double()
    trainer = EnergonTrainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
    return [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]


def test_energon_trainer_on_ranks_without_pictures(data: Path, tmp_path: Path) -> None:
    """Two processes with DDP have the steps of one process, which needs no blank pictures."""
    port = free_port()

    def process(rank: int) -> list[Any]:
        torch.set_num_threads(1)
        become_rank(rank, 2, port)
        return trainer_steps(data, tmp_path, 2, "image")

    wanted = trainer_steps(data, tmp_path, 1, False)
    for found in run_forked(2, process):
        for of_step, right in zip(found, wanted, strict=True):
            assert of_step == pytest.approx(right, rel=1e-6)

"""Megatron-Bridge's declared task encoders: what they load, what batches its steps get, packing inside a batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from made import made_once

from energon_bridge import DefaultTaskEncoder
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.bridge import (
    DatasetBuildContext,
    EnergonDatasetBuilder,
    EnergonDatasetConfig,
    HFEnergonTaskEncoderConfig,
    NemotronOmniEnergonTaskEncoderConfig,
    QwenVLEnergonTaskEncoderConfig,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers on machines without torchvision
dataset = made_once(create_captioning_test_dataset, num_train=12, num_val=3, image_size=28)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from energon_bridge.training.config import ModelConfig
    from energon_bridge.training.presets import write_preset

    found = {}
    for kind, preset in (("qwen", "tiny-qwen2-vl"), ("llava", "tiny-llava")):
        folder = tmp_path_factory.mktemp(kind) / "model"
        model = ModelConfig(preset=preset, hidden_size=32, num_layers=1, num_heads=2, image_size=28, patch_size=14)
        write_preset(model, folder, lambda: ["a red picture"] * 3)
        found[kind] = str(folder)
    from transformers import AutoTokenizer

    from energon_bridge.models.families import LLAVA_TEMPLATE

    tokenizer = AutoTokenizer.from_pretrained(found["llava"])
    tokenizer.chat_template = LLAVA_TEMPLATE
    tokenizer.save_pretrained(found["llava"])
    return found


def declared(dataset: Path, task_encoder: Any, **values: Any) -> EnergonDatasetConfig:
    settings: dict[str, Any] = {"path": dataset, "seq_length": 64, "micro_batch_size": 2, "num_workers": 0}
    return EnergonDatasetConfig(**(settings | {"task_encoder": task_encoder, "pad_to_multiple_of": 16} | values))


def qwen(folder: str, **values: Any) -> QwenVLEnergonTaskEncoderConfig:
    return QwenVLEnergonTaskEncoderConfig(hf_processor_path=folder, **({"min_pixels": 784, "max_pixels": 784} | values))


def iterators(config: EnergonDatasetConfig) -> tuple[Any, Any]:
    return EnergonDatasetBuilder(config).build(DatasetBuildContext(10, 10, 0))[:2]


def read_by_step(batch: dict[str, Any]) -> dict[str, Any]:
    """Pick what the step of vision-language models there picks, with `cpu` where it says `cuda`."""
    device = {"visual_inputs", "tokens", "input_ids", "position_ids", "labels", "loss_mask"}
    if "cu_seqlens_q" in batch:
        device |= {"cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
    picked: dict[str, Any] = {}
    for key, value in batch.items():
        if key == "visual_inputs" and value is not None:
            for name, tensor in value.__dict__.items():
                value.__dict__[name] = None if tensor is None else tensor.cpu()
            picked[key] = value
        elif key in device:
            picked[key] = None if value is None else value.cpu()
        elif key in ("max_seqlen_q", "max_seqlen_kv"):
            picked[key] = value.cpu()
    return picked


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_qwen_batch_is_what_a_step_reads(dataset: Path, models: dict[str, str], num_workers: int) -> None:
    train, _ = iterators(declared(dataset, qwen(models["qwen"]), num_workers=num_workers, num_val_workers=0))
    made = next(train)
    batch = read_by_step(made)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape
    assert batch["input_ids"].shape[1] % 16 == 0
    learned = batch["loss_mask"].bool()[:, :-1] & made["attention_mask"].bool()[:, 1:]
    assert learned.any()
    assert torch.equal(batch["labels"][:, :-1][learned], batch["input_ids"][:, 1:][learned])
    media = batch["visual_inputs"].normalized_for_model()
    assert media["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
    assert media["pixel_values"].shape[0] == 8
    train.close()


def test_samples_of_a_batch_are_packed_into_one_row(dataset: Path, models: dict[str, str]) -> None:
    rows, _ = iterators(declared(dataset, qwen(models["qwen"])))
    packed, valid = iterators(
        declared(dataset, qwen(models["qwen"]), enable_in_batch_packing=True, in_batch_packing_pad_to_multiple_of=8)
    )
    for _ in range(3):
        apart, together = next(rows), next(packed)
        assert together["__key__"] == apart["__key__"]
        assert together["input_ids"].shape == (1, together["total_tokens"])
        assert together["attention_mask"] is None
        starts, ends = together["cu_seqlens_q_padded"].tolist(), together["cu_seqlens_q"].diff().tolist()
        assert all(start % 8 == 0 for start in starts)
        for number, length in enumerate(ends):
            place = slice(starts[number], starts[number] + length)
            for field in ("input_ids", "labels", "loss_mask", "position_ids"):
                assert torch.equal(together[field][0, place], apart[field][number, :length])
        assert together["loss_mask"].sum() == apart["loss_mask"].sum()
        assert torch.equal(together["visual_inputs"].pixel_values, apart["visual_inputs"].pixel_values)
        assert int(together["max_seqlen_q"]) == max(after - before for before, after in pairwise(starts))
    assert [len(next(valid)["__key__"]) for _ in range(3)] == [2, 1, 2]


def test_packing_that_the_step_does_leaves_batches_alone(dataset: Path, models: dict[str, str]) -> None:
    settings = {"enable_in_batch_packing": True, "defer_in_batch_packing_to_step": True}
    train, _ = iterators(declared(dataset, qwen(models["qwen"]), **settings))
    assert next(train)["input_ids"].shape[0] == 2


def test_limits_leave_samples_out(dataset: Path, models: dict[str, str]) -> None:
    _, valid = iterators(declared(dataset, qwen(models["qwen"], max_visual_tokens=1)))
    assert next(valid)["visual_inputs"].image_grid_thw.shape == (2, 3)
    encoder = declared(dataset, qwen(models["qwen"], max_num_images=3))
    assert (
        EnergonDatasetBuilder(encoder).data_module(DatasetBuildContext(1, 0, 0)).task_encoder.config.max_num_images == 3
    )


def test_the_generic_encoder_keeps_the_media_that_are_named(dataset: Path, models: dict[str, str]) -> None:
    train, _ = iterators(declared(dataset, HFEnergonTaskEncoderConfig(hf_processor_path=models["llava"])))
    assert list(next(train)["visual_inputs"].as_model_kwargs()) == ["pixel_values"]
    keys = ("pixel_values", "image_grid_thw")
    train, _ = iterators(
        declared(dataset, HFEnergonTaskEncoderConfig(hf_processor_path=models["qwen"], visual_keys=keys))
    )
    assert sorted(next(train)["visual_inputs"].as_model_kwargs()) == ["image_grid_thw", "pixel_values"]


def test_configurations_of_megatron_bridge_itself_are_taken(dataset: Path, models: dict[str, str]) -> None:
    theirs: Any = type("QwenVLEnergonTaskEncoderConfig", (SimpleNamespace,), {})
    copied = theirs(hf_processor_path=models["qwen"], min_pixels=784, max_pixels=784, max_num_images=4)
    config = declared(dataset, copied, persistent_workers=False, drop_last=False)
    config.finalize()
    assert config.task_encoder == qwen(models["qwen"], max_num_images=4)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"packing_buffer_size": 4, "micro_batch_size": 1, "enable_in_batch_packing": True}, "would pack twice"),
        ({"task_encoder": DefaultTaskEncoder(), "enable_in_batch_packing": True}, "type DefaultTaskEncoder: only"),
        ({"data_sharding": False}, "data_sharding=False"),
    ],
)
def test_packing_that_does_not_fit_is_refused(dataset: Path, values: dict[str, Any], text: str) -> None:
    settings = {"task_encoder": qwen("nowhere")} | values
    with pytest.raises(ConfigurationError, match=text):
        declared(dataset, settings.pop("task_encoder"), **settings).finalize()


def omni(path: str = "x") -> NemotronOmniEnergonTaskEncoderConfig:
    return NemotronOmniEnergonTaskEncoderConfig(
        hf_processor_path=path,
        max_audio_duration=10.0,
        num_mel_bins=128,
        visual_keys=("pixel_values",),
        temporal_patch_size=2,
        video_fps=1.0,
        video_nframes=8,
        use_temporal_video_embedder=True,
        patch_dim=16,
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda m: omni(),
            "cannot import Megatron-Bridge's.*Install Megatron-Bridge, and call energon_bridge.compat.install",
        ),
        (lambda m: qwen(m["llava"]), "is not a Qwen-VL model"),
        (lambda m: qwen(m["qwen"], hf_processor_revision="abc"), "hf_processor_revision='abc' is not available"),
        (lambda m: HFEnergonTaskEncoderConfig(hf_processor_path=m["qwen"]), "leaves out image_grid_thw"),
    ],
)
def test_encoders_that_cannot_be_made_say_why(dataset: Path, models: dict[str, str], make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        iterators(declared(dataset, make(models)))


class Omni(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Stands in for Megatron-Bridge's encoder: it keeps what it was made with."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        if settings["visual_keys"] != ("pixel_values",):
            raise ValueError("visual_keys must be exactly ('pixel_values',)")
        self.settings = settings


def provide_omni(monkeypatch: pytest.MonkeyPatch, encoder: type) -> None:
    """Make `encoder` what Megatron-Bridge has under its name."""
    module: Any = ModuleType("megatron.bridge.data.energon.nemotron_omni_task_encoder")
    module.NemotronOmniTaskEncoder = encoder
    for end in ("bridge", "bridge.data", "bridge.data.energon"):
        monkeypatch.setitem(sys.modules, f"megatron.{end}", ModuleType(f"megatron.{end}"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_nemotron_omni_is_encoded_by_megatron_bridge(
    dataset: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_omni(monkeypatch, Omni)
    packing = {"enable_in_batch_packing": True, "in_batch_packing_pad_to_multiple_of": 8}
    config = declared(dataset, omni(models["llava"]), pad_to_max_length=True, **packing)
    encoder: Any = EnergonDatasetBuilder(config).data_module(DatasetBuildContext(1, 0, 0)).task_encoder
    assert isinstance(encoder, Omni)
    settings = dict(encoder.settings)
    assert settings.pop("processor").chat_template is not None  # the tokenizer of tiny-llava, which has no other part
    assert settings == {
        "seq_length": 64,
        "max_audio_duration": 10.0,
        "num_mel_bins": 128,
        "visual_keys": ("pixel_values",),
        "temporal_patch_size": 2,
        "video_fps": 1.0,
        "video_nframes": 8,
        "use_temporal_video_embedder": True,
        "patch_dim": 16,
        "collapse_image_tokens": False,
        "pad_to_max_length": True,
        "pad_to_multiple_of": 16,
        **packing,
    }


def test_what_nemotron_omni_cannot_be_made_of_is_named(
    dataset: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_omni(monkeypatch, Omni)
    wrong = replace(omni(models["llava"]), visual_keys=("pixels",))
    with pytest.raises(ConfigurationError, match="NemotronOmniEnergonTaskEncoderConfig: visual_keys must be exactly"):
        iterators(declared(dataset, wrong))
    provide_omni(monkeypatch, type("NemotronOmniTaskEncoder", (), {}))
    with pytest.raises(ConfigurationError, match="over the real megatron-energon: call"):
        iterators(declared(dataset, omni(models["llava"])))

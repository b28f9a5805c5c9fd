"""Pixels that are delivered as bytes and normalised where the model is: the same values, a quarter of the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, chat, encoder_of
from pictures import noise

pytest.importorskip("transformers")

from transformers import CLIPImageProcessorPil, Siglip2ImageProcessorPil

from energon_bridge import (
    CaptioningSample,
    EnergonMultiModalDataModule,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    normalise_on_device,
)
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.families import ChatConfig, ChatSample, FixedTokenFamily, VideoFrames
from energon_bridge.models.images.pixels import pixel_path
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.bridge_encoders import BridgeTaskEncoder
from energon_bridge.trainers.huggingface import model_inputs
from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider
from energon_bridge.trainers.replica.structure import decode, encode, select


def batch_of(encoder: Any, *, videos: bool = False) -> Any:
    rng = np.random.default_rng(1)
    clip = VideoFrames(frames=torch.from_numpy(rng.integers(0, 256, (3, 3, 16, 24), np.uint8)), fps=2.0)
    images = [noise(40 + 20 * number, 30, seed=number) for number in range(3)]
    samples = [chat("<image><image>a", "b", images=images[:2]), chat("<image>c", "d", images=images[2:])]
    if videos:
        samples.append(chat("<video>e", "f", videos=[clip]))
    return encoder.batch([encoder.encode(sample) for sample in samples])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_become_the_values_of_floats(family: str) -> None:
    videos = family != "llava"
    bytes_, floats = (
        batch_of(encoder_of(family, ChatConfig(pixels_dtype=dtype)), videos=videos)  # type: ignore[arg-type]
        for dtype in ("uint8", "float32")
    )
    assert bytes_.pixel_values.dtype == torch.uint8
    assert bytes_.pixel_values.nbytes * 4 == floats.pixel_values.nbytes
    assert normalise_on_device(floats) is floats
    made = normalise_on_device(bytes_)
    assert made.pixel_norm is None
    assert_close(made.pixel_values, floats.pixel_values)
    if videos:
        assert bytes_.visual_inputs["pixel_values_videos"].dtype == torch.uint8
        assert_close(made.visual_inputs["pixel_values_videos"], floats.visual_inputs["pixel_values_videos"])
    assert bytes_.pixel_values.dtype == torch.uint8  # what was given is as it was
    half = normalise_on_device(bytes_, dtype=torch.bfloat16).pixel_values
    assert torch.equal(half, made.pixel_values.to(torch.bfloat16))
    assert normalise_on_device(bytes_, "meta").pixel_values.device.type == "meta"
    if torch.cuda.is_available():
        there = normalise_on_device(bytes_, "cuda").pixel_values
        assert there.is_cuda
        assert_close(there.cpu(), floats.pixel_values)


def test_padded_patches_stay_zero() -> None:
    processor, image = Siglip2ImageProcessorPil(max_num_patches=30, patch_size=8), noise(90, 41, seed=1)
    paths = [pixel_path(processor, dtype=dtype) for dtype in ("uint8", "float32")]  # type: ignore[arg-type]
    small, large = (path.image(image) for path in paths if path is not None)
    assert paths[0] is not None
    batch = {"pixel_values": small.pop("pixel_values"), "visual_inputs": small, "pixel_norm": paths[0].byte_norm}
    made = normalise_on_device(batch)
    assert set(made) == {"pixel_values", "visual_inputs"}
    assert not large["pixel_attention_mask"].all()
    assert_close(made["pixel_values"], large["pixel_values"])


def test_images_that_would_be_padded_are_not_delivered_as_bytes() -> None:
    processor = CLIPImageProcessorPil(do_center_crop=False, size={"shortest_edge": 16})
    with pytest.raises(ConfigurationError, match="its images have different sizes"):
        FixedTokenFamily(image_processor=processor, image_tokens=4, pixels_dtype="uint8")


@pytest.mark.parametrize("multiple", [None, 4])
def test_batches_of_megatron_bridge_are_normalised_too(multiple: int | None) -> None:
    made = {}
    for dtype in ("uint8", "float32"):
        plain = encoder_of("qwen2_vl")
        config = ChatConfig(pixels_dtype=dtype)  # type: ignore[arg-type]
        encoder = BridgeTaskEncoder(plain.tokenizer, plain.family, config, pack_batches_to_multiple_of=multiple)
        made[dtype] = encoder.encode_batch(batch_of(encoder))
    assert made["uint8"]["visual_inputs"].pixel_values.dtype == torch.uint8
    assert "pixel_norm" not in made["float32"]
    found = normalise_on_device(made["uint8"])
    assert found.keys() == made["float32"].keys()
    assert_close(found["visual_inputs"].pixel_values, made["float32"]["visual_inputs"].pixel_values)


def test_bytes_cross_a_replica_with_what_normalises_them() -> None:
    batch = batch_of(encoder_of("qwen2_vl", ChatConfig(pixels_dtype="uint8")))
    node, tensors = encode(select(batch, {"tokens", "pixel_values", "visual_inputs"}))
    arrived = decode(node, tensors)
    assert arrived.labels is None
    assert arrived.pixel_values.dtype == torch.uint8
    assert_close(normalise_on_device(arrived).pixel_values, normalise_on_device(batch).pixel_values)


def test_inputs_of_transformers_are_floats() -> None:
    bytes_, floats = (
        model_inputs(batch_of(encoder_of("llava", ChatConfig(pixels_dtype=dtype))))  # type: ignore[arg-type]
        for dtype in ("uint8", "float32")
    )
    assert bytes_.keys() == floats.keys()
    assert_close(bytes_["pixel_values"], floats["pixel_values"])


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes") / "captions"
    create_captioning_test_dataset(folder, num_train=12, num_val=4, image_size=12)
    return folder


def captioning_encoder(dtype: Any) -> Any:
    encoder = encoder_of("qwen2_vl", ChatConfig(pixels_dtype=dtype))

    def as_chat(sample: CaptioningSample, config: Any) -> ChatSample:
        turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": sample.caption}]
        return ChatSample(__key__=sample.__key__, messages=turns, images=[sample.image])

    encoder.register_encoder(CaptioningSample, as_chat)
    return encoder


def module_of(captions: Path, dtype: str) -> EnergonMultiModalDataModule:
    encoder = captioning_encoder(dtype)
    return EnergonMultiModalDataModule(
        str(captions), encoder.tokenizer, task_encoder=encoder, micro_batch_size=2, global_batch_size=2, num_workers=0
    )


def test_lightning_and_megatron_get_floats(captions: Path) -> None:
    expected = next(module_of(captions, "float32").train_dataloader())
    data = module_of(captions, "uint8")
    batch = next(data.train_dataloader())
    assert batch.pixel_values.dtype == torch.uint8
    moved = data.transfer_batch_to_device(batch, torch.device("cpu"), 0)
    assert_close(moved.pixel_values, expected.pixel_values)

    arguments = SimpleNamespace(iteration=0, micro_batch_size=2, global_batch_size=2, data_parallel_size=1)
    provider = train_valid_test_dataloaders_provider(lambda: module_of(captions, "uint8"), arguments=lambda: arguments)
    train, valid, _ = provider((8, 8, 0))
    given = next(train).pixel_values.cpu()  # type: ignore[union-attr]  # on the GPU where one is in use
    assert_close(given, expected.pixel_values)
    assert next(valid).pixel_values.dtype == torch.float32  # type: ignore[arg-type]


def test_bytes_cross_from_worker_processes(captions: Path) -> None:
    batches = {}
    for dtype in ("uint8", "float32"):
        dataset = get_train_dataset(
            captions,
            batch_size=2,
            task_encoder=captioning_encoder(dtype),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=1),
        )
        loader = get_savable_loader(dataset)
        batches[dtype] = next(iter(loader))
        loader.close()
    assert batches["uint8"].pixel_values.dtype == torch.uint8
    assert replace(batches["uint8"], pixel_norm=None).__key__ == batches["float32"].__key__
    assert_close(normalise_on_device(batches["uint8"]).pixel_values, batches["float32"].pixel_values)

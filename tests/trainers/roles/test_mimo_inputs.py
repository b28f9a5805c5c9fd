"""The arguments of `MimoModel.forward`, made of a step of roles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from energon_bridge import EncoderBatch
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.trainers.roles.mimo import MimoEncoder, mimo_inputs


def media(name: str) -> EncoderBatch:
    tokens = torch.tensor([[5, 9, 9, 6]])
    return EncoderBatch(
        __key__=["a"], visual_inputs={name: torch.ones(1, 3)}, input_ids=[tokens], num_tokens=[2], num_media=[1]
    )


def test_two_encoders_of_one_module_get_their_media() -> None:
    encoders = {
        "vision": MimoEncoder(module="media", encoder="clip", arguments={"pixel_values": "x"}),
        "audio": MimoEncoder(module="media", encoder="whisper", arguments={"input_features": "x"}),
    }
    made = mimo_inputs({"vision": media("pixel_values"), "audio": media("input_features")}, encoders=encoders)
    assert made["modality_inputs"].keys() == {"media"}
    assert made["modality_inputs"]["media"].keys() == {"clip", "whisper"}


def served(*num_tokens: int) -> EncoderBatch:
    """Media of some microbatches, with so many tokens in each."""
    tokens = [torch.full((1, 4), 9)] * len(num_tokens)
    pixels = {"pixel_values": torch.ones(sum(num_tokens), 3)}
    media = [1] * len(num_tokens)
    return EncoderBatch(
        __key__=["a"] * len(tokens),
        visual_inputs=pixels,
        input_ids=tokens,
        num_tokens=list(num_tokens),
        num_media=media,
    )


def test_modules_side_by_side_need_equal_media_in_all_that_they_serve() -> None:
    """megatron-core's colocated communicator cuts features into equal parts, whatever tokens they belong to."""
    where = {"vision": MimoEncoder(module="images", encoder="clip")}
    language: Any = SimpleNamespace(
        tokens=torch.full((1, 4), 9),
        labels=None,
        loss_mask=None,
        cu_seqlens=None,
        position_ids=None,
        mrope_position_ids=None,
    )
    for level in (served(4), served(4, 4), served(0, 0)):
        made = mimo_inputs({"language": language, "vision": level}, where)
        assert torch.equal(made["input_ids"], language.tokens)
    with pytest.raises(ConfigurationError, match=r"have 4, 0 tokens.* as many ranks of language"):
        mimo_inputs({"language": language, "vision": served(4, 0)}, where)
    parts = replace(served(4), part_tokens=[{"image": [4, 0, 4], "video": [0, 3, 0]}])
    with pytest.raises(ConfigurationError, match="have 4, 3, 4 tokens"):
        mimo_inputs({"language": language, "vision": parts}, where)
    with pytest.raises(ConfigurationError, match="leave blank_media out"):
        mimo_inputs({"vision": replace(served(0), blank_media=["pixel_values"])}, where)
    assert mimo_inputs({"vision": served(4, 0)}, where)["input_ids"].shape == (2, 4)

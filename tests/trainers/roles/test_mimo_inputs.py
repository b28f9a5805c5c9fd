"""The arguments of `MimoModel.forward`, made of a step of roles."""

from __future__ import annotations

import torch

from energon_bridge import EncoderBatch
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

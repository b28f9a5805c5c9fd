"""Text models of many kinds, in rows and in packs, short and beyond every window, block and scale that configurations
name: the loss of each token is that of its sample alone; or the batch is refused; or the model is named here.
"""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from text_models import KINDS, WAYS, text_model, worst_difference

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.inputs import check_packing, model_inputs
from energon_bridge.models.packing.pack_limits import PackLimits, pack_limits

PACKS = {way for way in WAYS if way.startswith("packs")}
NO_PACKS = ("bloom", "falcon_h1", "gpt_oss", "lfm2", "mamba2", "opt", "qwen3_next")
"""Their attention or their state runs through all samples of a row, on the CPU at least."""
SHORT_ROWS = {
    "deepseek_v32 (few index heads)": "index_topk=48",  # many tokens score 0, and which of them are taken is open
    "llama4_text": "floor_scale=64",
    "minimax_m3_vl_text": "index_block_size=40",
}
"""Packs are right in rows up to a length of the configuration."""
SHORT_SAMPLES = {
    "doge": "keep_window_size=48",
    "llama (dynamic rope)": "max_position_embeddings=64",
    "phi3": "original_max_position_embeddings=64",
}
"""Packs are right where no sample is longer than a length of the configuration."""
OTHER_ROWS = ("deepseek_v32 (few index heads)", *SHORT_SAMPLES)
"""Models that do not have the loss of each sample alone in rows beside a long one: transformers' own."""

LONG_TESTS = bool(os.environ.get("ENERGON_LONG_TESTS"))
GATE = ("gemma3_text", "llama (yarn)", "lfm2", *SHORT_ROWS, *SHORT_SAMPLES)


@cache
def made(kind: str) -> Any:
    try:
        return text_model(kind)
    except ValueError as error:
        pytest.skip(str(error)[:80])


def refused(kind: str, way: str) -> str:
    if way not in PACKS:
        return ""
    if kind in NO_PACKS:
        return "does not keep the samples of a pack apart"
    if kind in SHORT_ROWS and way != "packs":
        return rf"if a row is longer than \d+ tokens \({SHORT_ROWS[kind]} in its configuration\)"
    return rf"if a sample is longer .*{SHORT_SAMPLES[kind]}" if kind in SHORT_SAMPLES and "long" in way else ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS if LONG_TESTS else GATE)
def test_the_loss_of_a_token_is_that_of_its_sample_alone_or_the_batch_is_refused(kind: str, way: str) -> None:
    found = worst_difference(made(kind), way)
    if reason := refused(kind, way):
        assert isinstance(found, str)
        with pytest.raises(ConfigurationError, match=reason):
            raise ConfigurationError(found)
    elif kind in OTHER_ROWS and way == "rows, long":
        assert isinstance(found, float)
        assert found > 1e-3  # as the page of models says
    else:
        assert isinstance(found, float), found
        assert found < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*SHORT_ROWS, *SHORT_SAMPLES])
def test_who_does_not_say_how_long_packs_are_is_told_the_limit(kind: str) -> None:
    name = {**SHORT_ROWS, **SHORT_SAMPLES}[kind]
    limit = int(name.partition("=")[2])
    with pytest.raises(ConfigurationError, match=rf"{name} in its configuration\).*_length= of check_packing"):
        check_packing(made(kind))
    check_packing(made(kind), row_length=limit, sample_length=limit)
    if kind in SHORT_SAMPLES:
        check_packing(made(kind), row_length=10 * limit, sample_length=limit)
    with pytest.raises(ConfigurationError, match=name):
        check_packing(made(kind), row_length=limit + 1, sample_length=limit + 1)


FULL_SIZE = {
    "llama4_text": ({}, PackLimits(row=8192, row_by="floor_scale=8192")),
    "llama": ({}, PackLimits()),
    "gemma3_text": ({}, PackLimits()),
    "phi3": (
        {
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 48,
                "long_factor": [4.0] * 48,
                "original_max_position_embeddings": 4096,
            },
        },
        PackLimits(sample=4096, sample_by="original_max_position_embeddings=4096"),
    ),
    "minimax_m3_vl_text": (
        {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
        PackLimits(row=128, row_by="index_block_size=128"),
    ),
    "deepseek_v32": ({}, PackLimits()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FULL_SIZE)
def test_models_of_full_size_are_tried_by_a_small_copy(kind: str) -> None:
    """Here they are without memory, so nothing of them can run: hundreds of billions of parameters."""
    settings, limits = FULL_SIZE[kind]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = torch.get_rng_state()
    assert pack_limits(model, lambda plain: plain) == limits
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_copied_is_refused_by_the_lengths_it_names(caplog: pytest.LogCaptureFixture) -> None:
    class Custom(torch.nn.Module):
        """As code of one's own may be: it cannot be made of a configuration."""

        def __init__(self, names: dict[str, Any]) -> None:
            super().__init__()
            self.config = SimpleNamespace(to_dict=lambda: names, _attn_implementation="sdpa")

        def get_decoder(self) -> Any:
            return self

    plain = Custom({"sliding_window": 4096, "rope_parameters": {"original_max_position_embeddings": 512}})
    assert pack_limits(plain, lambda one: one) == PackLimits()
    heard = Custom({"audio_config": {"bias_max_distance": 1000}, "vision_config": {"window_size": 112}})
    assert pack_limits(heard, lambda one: one) == PackLimits()
    sparse = Custom({"sliding_window": 64, "sparse": {"block_size": 128}, "floor_scale": 8192})
    assert pack_limits(sparse, lambda one: one) == PackLimits(row=128, row_by="block_size=128")
    assert "no small copy of Custom can be made" in caplog.text


def test_padding_has_positions_of_its_own_that_no_sample_passes() -> None:
    from text_models import _pack, _sample

    batch = _pack([_sample(torch.arange(5, 5 + length)) for length in (5, 4)], 16)
    positions = model_inputs(batch)["position_ids"]
    assert positions.tolist() == [[*range(4), *range(3), *range(4), *range(4), 0]]
    assert batch.position_ids.tolist() == [[*range(4), *range(12)]]  # as Megatron takes them

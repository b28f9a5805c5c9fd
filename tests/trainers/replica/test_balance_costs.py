"""What a batch costs, counted by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import answer, energon, output_of
from torch.utils.flop_counter import FlopCounterMode

from energon_bridge import BatchCost
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import Segment
from energon_bridge.models.conversations.sequences import MultiModalSample, PaddingValues, batch_sequences
from energon_bridge.models.packing.packed_sequences import batch_packs, pack_sequences
from energon_bridge.trainers.replica.costs import (
    attention_pairs,
    fit_cost,
    fit_counts,
    fit_times,
    num_tokens,
    record_time,
    vision_patches,
)

FILLING = PaddingValues(pad_id=0, ignore=-100)


def sample(length: int, **visual: torch.Tensor) -> MultiModalSample:
    tokens = torch.ones(length, dtype=torch.int64)
    return MultiModalSample(
        __key__=str(length),
        __restore_key__=(),
        tokens=tokens,
        labels=tokens,
        loss_mask=tokens.float(),
        visual=visual,
        answer="",
    )


def test_padded_rows_cost_their_padding() -> None:
    batch = batch_sequences([sample(3), sample(5)], 8, FILLING)
    assert num_tokens(batch) == 16
    assert attention_pairs(batch) == 2 * 8**2
    assert vision_patches(batch) == 0
    assert BatchCost()(batch) == 16
    assert BatchCost(tokens=2, attention=0.5)(batch) == 32 + 64


def test_packs_attend_within_their_samples() -> None:
    packs = [pack_sequences([sample(3), sample(5)], FILLING), pack_sequences([sample(4)], FILLING)]
    batch = batch_packs(packs, FILLING)
    assert num_tokens(batch) == 16
    assert attention_pairs(batch) == 3**2 + 5**2 + 8**2  # the second row is padded to eight
    batch.cu_seqlens_padded = None
    assert attention_pairs(batch) == 3**2 + 5**2 + 4**2


def test_segments_say_what_a_row_of_ones_own_holds() -> None:
    rows = [(Segment("", "a", 0, 2), Segment("", "b", 2, 3)), (Segment("", "c", 0, 6),)]
    assert attention_pairs({"input_ids": torch.zeros(2, 6), "segments": rows}) == 4 + 9 + 36


@pytest.mark.parametrize(
    ("visual", "patches"),
    [
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]]), "pixel_values": torch.zeros(28, 1176)}, 28),
        ({"image_grid_thw": torch.tensor([[1, 4, 6]]), "video_grid_thw": torch.tensor([[3, 2, 2]])}, 24 + 12),
        ({"pixel_values": torch.zeros(2, 3, 28, 56)}, 2 * 2 * 4),
        ({"pixel_values": torch.zeros(30, 1176)}, 30),
        ({"pixel_values": torch.zeros(2, 64, 768)}, 128),
    ],
)
def test_patches_of_any_layout(visual: dict[str, torch.Tensor], patches: int) -> None:
    tokens = torch.zeros(1, 4)
    assert vision_patches({"tokens": tokens, **visual}) == patches
    inner = {name: value for name, value in visual.items() if name != "pixel_values"}
    batch = {"tokens": tokens, "pixel_values": visual.get("pixel_values"), "visual_inputs": inner}
    assert vision_patches(batch) == patches
    assert BatchCost(tokens=1, patches=2)(batch) == 4 + 2 * patches


def test_the_side_of_a_patch() -> None:
    assert vision_patches({"pixel_values": torch.zeros(1, 3, 32, 32)}, patch_size=16) == 4
    assert BatchCost(tokens=0, patches=1, patch_size=16)({"pixel_values": torch.zeros(1, 3, 32, 32)}) == 4


@dataclass
class Captions:
    caption: list[str]


@pytest.mark.parametrize(("batch", "has"), [(Captions(["a"]), "got caption"), ({}, "got no fields"), ("text", "str")])
def test_a_batch_without_tokens_needs_a_cost_of_its_own(batch: Any, has: str) -> None:
    with pytest.raises(ConfigurationError, match=has) as caught:
        BatchCost()(batch)
    assert "Pass a function that returns the cost" in str(caught.value)


@pytest.mark.parametrize(
    "weights", [{"tokens": -1}, {"attention": float("nan")}, {"tokens": 0}, {"patches": 1, "patch_size": 0}]
)
def test_weights_that_are_none(weights: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="BatchCost: "):
        BatchCost(**weights)


def measured(
    seed: int, seconds: Callable[[float, float, float], float]
) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
    """Yield batches of several lengths and pictures with the seconds that a model of its cost would take."""
    rng = random.Random(seed)
    for _ in range(40):
        rows, length, patches = rng.randrange(1, 5), rng.randrange(10, 400), rng.choice((0, 64, 256))
        batch = {"tokens": torch.zeros(rows, length), "pixel_values": torch.zeros(1, patches, 3)}
        yield batch, seconds(rows * length, rows * length**2, patches)


def test_weights_are_fitted_to_measured_times() -> None:
    rng = random.Random(1)
    found = fit_cost(measured(0, lambda t, a, p: (0.01 + 2e-5 * t + 3e-8 * a + 4e-5 * p) * rng.uniform(0.98, 1.02)))
    assert found.constant == pytest.approx(0.01, rel=0.2)
    assert found.cost.tokens == pytest.approx(2e-5, rel=0.1)
    assert found.cost.attention == pytest.approx(3e-8, rel=0.1)
    assert found.cost.patches == pytest.approx(4e-5, rel=0.1)
    assert 0.99 < found.r_squared <= 1


def test_fitted_weights_are_the_same_in_any_order() -> None:
    """A resume gathers times in another order; here patches explain a constant too, since all have as many."""
    rows = [((tokens, tokens**2, 4.0), 0.1 + 0.001 * tokens**2) for tokens in range(3, 23)]
    fits = [fit_counts(random.Random(seed).sample(rows, len(rows)), 8) for seed in range(40)]
    assert all(fit == fits[0] for fit in fits)
    assert fits[0].constant == pytest.approx(0.1)
    assert fits[0].cost.attention == pytest.approx(0.001)
    assert (fits[0].cost.tokens, fits[0].cost.patches) == (0, 0)


def test_what_costs_nothing_gets_no_negative_weight() -> None:
    found = fit_cost(measured(0, lambda t, a, p: 0.01 + 2e-5 * t - 1e-9 * a + 0 * p))
    assert found.cost.attention == 0
    assert 0 <= found.cost.patches < 1e-6
    assert found.cost.tokens == pytest.approx(2e-5, rel=0.1)
    exact = fit_cost(measured(0, lambda t, a, p: 3e-8 * a))
    assert (exact.constant, exact.cost.tokens) == pytest.approx((0, 0), abs=1e-15)
    assert exact.cost.attention == pytest.approx(3e-8)
    assert exact.r_squared == pytest.approx(1)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (lambda t, a, p: 0.5, "do not grow with"),
        (lambda t, a, p: 1 - 1e-6 * t, "do not grow with"),
        (lambda t, a, p: 0.0, "expected seconds above 0 for microbatch 0, got 0.0"),
    ],
)
def test_times_that_say_nothing_are_refused(times: Callable[..., float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit_cost(measured(0, times))


def test_few_measurements_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected at least 8 measured microbatches of several sizes, got 3"):
        fit_cost(islice(measured(0, lambda t, a, p: t), 3))


# Times of a run, written and fitted later -----------------------------------------------------------------------------


def write_times(path: Path, count: int = 60) -> None:
    rng = random.Random(3)
    for _ in range(count):
        rows, length, images = rng.randrange(1, 9), rng.randrange(50, 500), rng.randrange(6)
        batch = {"tokens": torch.zeros(rows, length), "image_grid_thw": torch.ones(images, 3) * 4}
        seconds = 0.002 + 1e-5 * rows * length + 2e-8 * rows * length**2 + 3e-6 * 64 * images
        record_time(path, [batch, batch], 2 * seconds)


def test_times_of_a_run_are_fitted_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "microbatches.jsonl"
    write_times(path)
    found = fit_times(path)
    assert found.cost.tokens == pytest.approx(1e-5, rel=1e-4)
    assert found.cost.attention == pytest.approx(2e-8, rel=1e-4)
    assert found.cost.patches == pytest.approx(3e-6, rel=1e-4)
    assert found.constant == pytest.approx(0.002, rel=1e-4)
    output = output_of("bench", "--fit-cost", path)
    assert eval(output.splitlines()[0].removeprefix("balance_cost=")) == found.cost
    assert "data.balance_attention=0.002 data.balance_patches=0.3" in output
    assert answer("bench", "--fit-cost", path)["cost"]["tokens"] == found.cost.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'MIX': a dataset or mix to measure"),
        (("some/data", "--fit-cost", "FILE"), "reads a file of measured times, not a dataset: leave out some/data"),
        (("--fit-cost", "nowhere.jsonl"), "nowhere.jsonl: cannot read measured times"),
        (("--fit-cost", "SHORT"), "expected at least 8 measured microbatches"),
        (("--fit-cost", "WRONG"), "line 1: expected numbers tokens, attention, patches, seconds and patch_size"),
    ],
)
def test_what_cannot_be_fitted_is_said(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write_times(tmp_path / "SHORT", 3)
    (tmp_path / "WRONG").write_text('{"step": 1}\n')
    result = energon("bench", *(tmp_path / one if one.isupper() else one for one in arguments))
    assert result.exit_code
    assert message in " ".join(result.output.split())


# Weights from the configuration of a model ----------------------------------------------------------------------------


SIZES = {"hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 6}
TEXT = SIZES | {"num_key_value_heads": 2, "vocab_size": 211}


def llava() -> tuple[Any, Any]:
    """Return a model, and what it is given of an image."""
    transformers = pytest.importorskip("transformers")
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=48, patch_size=4, projection_dim=32)
    text = transformers.LlamaConfig(**TEXT, bos_token_id=1, eos_token_id=2)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    config._attn_implementation = "eager"
    model = transformers.LlavaForConditionalGeneration(config)
    return model, lambda: model.get_image_features(pixel_values=torch.rand(1, 3, 48, 48))


def qwen() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    text = TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 32, "out_hidden_size": 48, "depth": 4, "num_heads": 4, "intermediate_size": 96}
    windows = {"window_size": 112, "fullatt_block_indexes": [1, 3], "patch_size": 14, "spatial_merge_size": 2}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=sizes | windows | {"temporal_patch_size": 2})
    config._attn_implementation = "eager"
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    pixels, grid = torch.rand(144, 3 * 2 * 14 * 14), torch.tensor([[1, 12, 12]])
    return model, lambda: model.model.visual(pixels, grid)


def operations(run: Callable[[], Any]) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return float(counter.get_total_flops())


@pytest.mark.parametrize(("make", "patches", "tolerance"), [(llava, 144, 0.02), (qwen, 144, 0.15)])
@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_model_are_its_operations(make: Any, patches: int, tolerance: float) -> None:
    model, image = make()
    short, middle, long = (
        operations(lambda n=n: model(input_ids=torch.full((1, n), 7), use_cache=False)) for n in (64, 128, 192)
    )
    pair = (long - 2 * middle + short) / 2 / 64**2
    token = (middle - short - pair * (128**2 - 64**2)) / 64
    found = BatchCost.of_model(model.config, patches_per_image=patches)
    assert found.tokens == 1
    assert found.attention == pytest.approx(pair / 2 / token, rel=1e-6)  # causal attention computes half
    assert found.patches == pytest.approx(operations(image) / patches / token, rel=tolerance)
    assert found.patch_size == model.config.vision_config.patch_size
    frozen = BatchCost.of_model(model.config, patches_per_image=patches, frozen_vision=True)
    assert frozen.patches == pytest.approx(found.patches / 3)
    alone = BatchCost.of_model(model.config.get_text_config())
    assert (alone.attention, alone.patches) == (found.attention, 0)


def test_a_configuration_without_sizes_is_named() -> None:
    class Odd:
        hidden_size = 8

    with pytest.raises(ConfigurationError, match="a Odd has no num_hidden_layers or depth: set the weights yourself"):
        BatchCost.of_model(Odd())

"""What a batch costs, counted by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch

from energon_bridge import BatchCost
from energon_bridge.errors import ConfigurationError
from energon_bridge.samples import Segment
from energon_bridge.task_encoder import attention_pairs, num_tokens, vision_patches
from energon_bridge.task_encoder.costs import fit_cost
from energon_bridge.task_encoder.packed_sequences import batch_packs, pack_sequences
from energon_bridge.task_encoder.sequences import MultiModalSample, PaddingValues, batch_sequences

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
    assert "Give a function of the batch" in str(caught.value)


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
    with pytest.raises(ConfigurationError, match="expected 8 measured microbatches or more, of several sizes, got 3"):
        fit_cost(islice(measured(0, lambda t, a, p: t), 3))

"""Tiers of aspect ratios and numbers: the nearest, by trying all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from energon_bridge import AspectTiers
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.tools.columns.expression import column_names, evaluate_value


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([(512 * 512, 64, 2.0), (1024 * 1024, 64, 2.0), (1024 * 1024, 32, 4.0), (100_000, 100, 1.0)]),
)
def test_an_image_goes_to_the_nearest_ratio(width: int, height: int, kind: tuple[int, int, float]) -> None:
    area, step, most = kind
    tiers = AspectTiers(area=area, step=step, most=most)
    size = tiers.size_of(width, height)
    lying = [
        (w, area // w // step * step)
        for w in range(step, area + 1, step)
        if area // w >= step and max(w / (area // w // step * step), (area // w // step * step) / w) <= most
    ]
    possible = sorted({*lying, *((h, w) for w, h in lying)}, key=lambda one: (one[0] / one[1], one))
    assert list(tiers.sizes) == possible

    def distance(one: tuple[int, int]) -> float:
        return abs(float(np.log(one[0] / one[1]) - np.log(width / height)))

    assert distance(size) <= min(map(distance, possible)) + 1e-9
    columns = {"width": np.array([width]), "height": np.array([height])}
    found = [int(evaluate_value(text, columns, num_samples=1)[0]) for text in tiers.group_by]
    assert tuple(found) == size


def test_the_sizes_of_a_recipe() -> None:
    sizes = AspectTiers(area=1024 * 1024).sizes
    assert {(1024, 1024), (1152, 896), (896, 1152), (832, 1216), (1216, 832), (704, 1408), (1408, 704)} <= set(sizes)
    assert all(w * h <= 1024 * 1024 and not w % 64 and not h % 64 for w, h in sizes)


def test_tiers_of_numbers() -> None:
    frames = np.array([0, 1, 16, 17, 40, 65, 900])
    found = evaluate_value("tier(frames, 33, 1, 17, 65)", {"frames": frames}, num_samples=7)
    assert found.tolist() == [1, 1, 1, 17, 33, 65, 65]
    assert column_names("tier(frames, 1, 2) + tier") == ("frames", "tier")


@pytest.mark.parametrize("wrong", [{"step": 0}, {"area": 100}, {"most": 0.5}])
def test_impossible_tiers(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="AspectTiers"):
        AspectTiers(**({"area": 512 * 512} | wrong))  # type: ignore[arg-type]

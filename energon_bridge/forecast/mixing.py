"""How well an order mixes: one number from 0 to 1, worked out from the order alone; no sample is read.

Cut the dataset into ten equal parts, as if it were sorted by ten classes. Of 32 draws that a lane makes in a row, count
the parts that they come from, and divide by what 32 independent draws would have on average (9.66 of 10 where there are
samples enough). 1 is a perfect shuffle; 0.1 means that every microbatch of sorted data comes from one class.
"""

from __future__ import annotations

import numpy as np

from energon_bridge.plan.leaf import LeafOrder

_PARTS, _DRAWS, _WINDOWS = 10, 32, 8


def mixing(order: LeafOrder, lanes: int) -> float:
    """Return how well the order of a leaf mixes, looked at in some lanes of the first epoch."""
    n = order.num_samples
    shares = np.bincount(np.arange(min(n, _PARTS)) * _PARTS // min(n, _PARTS), minlength=_PARTS) / min(n, _PARTS)
    ideal = float((1 - (1 - shares) ** _DRAWS).sum())
    distinct = []
    for lane in range(0, order.num_lanes, -(-order.num_lanes // lanes)):
        drawn = np.empty(0, dtype=np.int64)
        while drawn.size < _DRAWS * _WINDOWS:
            drawn = np.concatenate((drawn, order.round_at(lane, drawn.size).indices))
        parts = (drawn[: _DRAWS * _WINDOWS] - order.first_sample) * _PARTS // n
        distinct += [np.unique(window).size for window in parts.reshape(_WINDOWS, _DRAWS)]
    return min(1.0, float(np.mean(distinct)) / ideal)

"""Weights of a blend, set while the run goes on: checked, and made part of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.ranks import agreed
from energon_bridge.core.loader.run_data import RunData, dataset_names
from energon_bridge.core.loader.run_plan import RunPlan
from energon_bridge.core.mix import parse_weight
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.mix.weights import GivenWeights


def no_weights(data: RunData) -> ConfigurationError:
    """Return the error for a stream that has no weights."""
    return ConfigurationError(
        f"set_weights needs an endless blend by weights, but this loader delivers a {data.kind} stream of mode "
        f"{data.mode!r}{' in buckets (group_by)' if data.buckets is not None else ''}"
    )


def with_new_weights(
    plan: RunPlan, weights: Mapping[str, Any] | Sequence[Any], first: int, from_draw: int | None
) -> tuple[int, RunPlan]:
    """Return the global draw from which weights hold, and the plan with them.

    Args:
        plan: That of an endless run.
        weights: By path, or in mix order.
        first: The first global draw that no lane of this rank has made.
        from_draw: The draw, if it is given; default: the first one that no rank has made.
    """
    data = plan.data
    if data.mode != "weights" or data.buckets is not None:
        raise no_weights(data)
    given = _by_identity(data, weights)
    if from_draw is None or torch.distributed.is_initialized():
        # So that all ranks refuse the same draws.
        first = agreed("set_weights", first, max, plan.config.dp_size, plan.config.data_parallel_group)
    start = first if from_draw is None else from_draw
    if start < first:
        raise ConfigurationError(
            f"set_weights: global draw {start} is already made; from_draw must be at least {first}"
        )
    schedules = tuple(parse_weight(w, where="set_weights", field=f"weights[{i}]") for i, w in enumerate(given))
    changed = GivenWeights(schedules=schedules)
    if not any(weight for weight in changed.at(start)):
        raise ConfigurationError("set_weights: all weights are 0; at least one must be positive")
    kept = [(draw, weights) for draw, weights in plan.changes if draw != start]
    changes = tuple(sorted([*kept, (start, changed)], key=lambda change: change[0]))
    return start, plan.recut(plan.num_lanes, changes)


def _by_identity(data: RunData, weights: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Return weights given by name, by path or in mix order, in the order of the leaves' identities."""
    leaves = data.leaves
    if isinstance(weights, Mapping):
        weights = _in_mix_order(leaves, weights)
    if len(weights) != len(leaves):
        raise ConfigurationError(f"set_weights got {len(weights)} weights for a mix of {len(leaves)} datasets")
    by_identity = {leaf.identity: weight for leaf, weight in zip(leaves, weights, strict=True)}
    return [by_identity[leaf.identity] for leaf in data.ordered]


def _in_mix_order(leaves: Sequence[OpenLeaf], weights: Mapping[str, Any]) -> list[Any]:
    """Return weights in the order of the mix, given by the names of its datasets in metrics, or by their paths."""
    paths = [leaf.dataset.path for leaf in leaves]
    names = dataset_names(paths, [leaf.dataset.split_part for leaf in leaves])
    keys = [{name, path} & set(weights) for name, path in zip(names, paths, strict=True)]
    wrong = sorted(set(weights) - {*names, *paths}) + [path for path in weights if paths.count(path) > 1]
    wrong += [path for path, found in zip(paths, keys, strict=True) if len(found) != 1]
    if wrong:
        raise ConfigurationError(
            f"set_weights needs one weight for each of the {len(leaves)} datasets of the mix, by its name "
            f"({', '.join(names)}) or its path, or a list in mix order; missing, unknown or repeated: "
            f"{', '.join(wrong[:3])}"
        )
    return [weights[key] for (key,) in keys]

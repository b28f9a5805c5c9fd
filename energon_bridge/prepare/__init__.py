"""Building prepared datasets: the functions behind `energon prepare`."""

from __future__ import annotations

from energon_bridge.format.media import MediaFilter
from energon_bridge.prepare.dataset_yaml import render_dataset_yaml
from energon_bridge.prepare.run import Prepared, prepare_dataset, rebuild_index
from energon_bridge.prepare.split import SplitRule, parse_patterns, parse_ratio
from energon_bridge.prepare.summary import DatasetSummary, summarize_dataset

__all__ = [
    "DatasetSummary",
    "MediaFilter",
    "Prepared",
    "SplitRule",
    "parse_patterns",
    "parse_ratio",
    "prepare_dataset",
    "rebuild_index",
    "render_dataset_yaml",
    "summarize_dataset",
]

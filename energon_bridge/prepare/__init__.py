"""Building and checking prepared datasets: the functions behind the `energon` command."""

from __future__ import annotations

from energon_bridge.format.media import MediaFilter
from energon_bridge.prepare.dataset_yaml import render_dataset_yaml
from energon_bridge.prepare.lint import lint_dataset, lint_parts
from energon_bridge.prepare.media import IndexedMedia, prepare_media
from energon_bridge.prepare.run import Prepared, prepare_dataset, rebuild_index
from energon_bridge.prepare.split import SplitRule, parse_patterns, parse_ratio
from energon_bridge.prepare.summary import DatasetSummary, summarize_dataset

__all__ = [
    "DatasetSummary",
    "IndexedMedia",
    "MediaFilter",
    "Prepared",
    "SplitRule",
    "lint_dataset",
    "lint_parts",
    "parse_patterns",
    "parse_ratio",
    "prepare_dataset",
    "prepare_media",
    "rebuild_index",
    "render_dataset_yaml",
    "summarize_dataset",
]

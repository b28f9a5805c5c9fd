"""Samples as text, for programs that print or log them, and `megatron.energon.tools.preview`, which does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
import numpy as np
import torch
import yaml

from energon_bridge.compat.factories import get_dataset_from_config
from energon_bridge.core.datasets import get_loader
from energon_bridge.core.errors import EmptyDatasetError, EnergonError
from energon_bridge.core.worker_config import WorkerConfig

# ---------------------------------------------------------------------------------------------------------------------
# Samples as text, for programs that print or log them: one line, or YAML with a summary of each tensor.


_MOST_ENTRIES = 25
_MOST_ITEMS = 10
_MOST_CHARACTERS = 1000
_MOST_OF_A_REPR = 200
_ENDS = 3


def default_get_batch_keys(batch: Any) -> list[str] | None:
    """Return the keys of the samples of a batch, None if it does not say them; of a list, those of its first entry."""
    if isinstance(batch, list):
        batch = batch[0]
    candidates = (getattr(batch, "__key__", None), getattr(batch, "__keys__", None))
    keys: Any = next((value for value in candidates if _are_keys(value, list)), None)
    if keys is None and isinstance(batch, dict):
        named = (batch.get(name) for name in ("__key__", "__keys__", "keys"))
        keys = next((value for value in named if _are_keys(value, Iterable)), None)
    return keys


def _are_keys(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and all(isinstance(key, str) for key in value)


def format_sample_compact(sample: Any, depth: int = 3, max_items: int = 10, max_str_len: int = 50) -> str:
    """Return a sample as one short line: tensors and arrays by shape, `depth` levels of containers."""

    def inner(value: Any) -> str:
        return format_sample_compact(value, depth - 1, max_items, max_str_len)

    if isinstance(sample, Mapping):
        entries = list(sample.items())[:max_items]
        texts = [
            f"{key}: {value!r}" if str(key).startswith("__") else f"{key}: {inner(value)}" for key, value in entries
        ]
        return f"{{{', '.join(texts)}}}" if depth > 0 else "{...}"
    if isinstance(sample, list | tuple):
        first, last = "[]" if isinstance(sample, list) else "()"
        return f"{first}{', '.join(map(inner, sample[:max_items])) if depth > 0 else '...'}{last}"
    if isinstance(sample, torch.Tensor):
        return f"Tensor(shape={sample.shape}, dtype={sample.dtype}, device={sample.device})"
    if isinstance(sample, np.ndarray):
        return f"np.ndarray(shape={sample.shape}, dtype={sample.dtype})"
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        names = [entry.name for entry in dataclasses.fields(sample)]
        fields = (
            f"{name}={format_sample_compact(getattr(sample, name), depth, max_items, max_str_len)}" for name in names
        )
        return f"{type(sample).__name__}({', '.join(fields)})"
    text = sample if isinstance(sample, str) else repr(sample)
    return repr(text if len(text) <= max_str_len else text[:max_str_len] + "...")


def format_sample_detailed(sample: Any, indent: str = "") -> str:
    """Return a sample as YAML, one line or more for each field; tensors and arrays by shape, range and first values."""
    text = yaml.safe_dump(_plain(sample), sort_keys=False, default_flow_style=False, width=120).rstrip()
    lines = text.removesuffix("\n...").splitlines()
    return "\n".join(indent + line if line else line for line in lines)


def _plain(value: Any) -> Any:
    """Return the form of a value in the YAML."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        more = f"... (and {len(value) - _MOST_CHARACTERS} more characters)" if len(value) > _MOST_CHARACTERS else ""
        return value[:_MOST_CHARACTERS] + more
    if isinstance(value, torch.Tensor):
        start = f"Tensor(shape={value.shape}, dtype={value.dtype}, device={value.device}"
        return _numbers(start, value.flatten(), lambda entry: entry.item())
    if isinstance(value, np.ndarray):
        return _numbers(f"np.ndarray(shape={value.shape}, dtype={value.dtype}", value.ravel(), lambda entry: entry)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            type(value).__name__: {
                entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)
            }
        }
    if isinstance(value, dict):
        shown = {
            key if key is None or isinstance(key, str | int | float) else repr(key): _plain(entry)
            for key, entry in list(value.items())[:_MOST_ENTRIES]
        }
        left = len(value) - _MOST_ENTRIES
        return shown | {"...": f"and {left} more items"} if left > 0 else shown
    if isinstance(value, list | tuple):
        left = len(value) - _MOST_ITEMS
        return [_plain(entry) for entry in value[:_MOST_ITEMS]] + [f"... and {left} more items"] * (left > 0)
    text = repr(value)
    return text if len(text) <= _MOST_OF_A_REPR else text[:_MOST_OF_A_REPR] + "..."


def _numbers(start: str, flat: Any, item: Callable[[Any], Any]) -> str:
    """Describe a tensor or an array: its range, and its first and last values."""
    try:
        low, high = item(flat.min()), item(flat.max())
    except (RuntimeError, ValueError, TypeError):  # it is empty, or has no order
        return f"{start})"
    shown = (
        [repr(item(entry)) for entry in flat]
        if len(flat) <= 2 * _ENDS
        else [*(repr(item(entry)) for entry in flat[:_ENDS]), "...", *(repr(item(entry)) for entry in flat[-_ENDS:])]
    )
    return f"{start}, min={low}, max={high}, values=[{', '.join(shown)}])"


# ---------------------------------------------------------------------------------------------------------------------
# `megatron.energon.tools.preview`: the samples of a dataset on the terminal, one after the other.


_META = ("__restore_key__", "__subflavors__", "__sources__", "__valid__")


def pprint(idx: int, sample: Any) -> None:
    """Print the fields of a sample, with their types and values."""
    click.echo(f"Sample {idx}")
    entries = (
        {entry.name: entry.type for entry in dataclasses.fields(sample)} if dataclasses.is_dataclass(sample) else sample
    )
    for name in entries:
        if name in _META:
            continue
        value = getattr(sample, name) if dataclasses.is_dataclass(sample) else sample[name]
        text = repr(value) if isinstance(value, str) else format_sample_detailed(value).replace("\n", "\n   ")
        click.echo(f" - {name} ({type(value)}): {text}")


@click.command(name="preview")
@click.argument("path")
@click.option("--split-parts", default="train,val,test", show_default=True, help="Parts of the split to show.")
@click.option("--dataset-config", default="dataset.yaml", show_default=True, help="Dataset file in .nv-meta.")
def command(path: str, split_parts: str, dataset_config: str) -> None:
    """Show the samples of the dataset at PATH, and ask after each whether to continue."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    try:
        for part in split_parts.split(","):
            try:
                dataset = get_dataset_from_config(
                    path, dataset_config=dataset_config, split_part=part, training=False, worker_config=config
                )
            except EmptyDatasetError as error:
                click.echo(f"{error} Skipping.")
                continue
            for number, sample in enumerate(get_loader(dataset.build())):
                pprint(number, sample)
                if not click.confirm("Continue?"):
                    return
    except EnergonError as error:
        raise click.ClickException(str(error)) from error

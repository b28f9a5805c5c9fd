"""Randomness inside hooks: keyed to seed, leaf, sample and epoch (or microbatch), and to nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import TensorEncoder, config_of, deliver, loaders_of, text_dataset, train_dataset
from made import made_once

from energon_bridge import DefaultTaskEncoder

SHARDS = [5, 9, 1, 14, 8]
data = made_once(text_dataset, train=SHARDS)


def noise_of(data: Path, encoder: Any = None, seed: int = 0, batches: int = 60, **kwargs: Any) -> dict[Any, Any]:
    """Return the noise of each sample in each epoch, by (index, epoch)."""
    dataset = train_dataset(data, task_encoder=encoder or TensorEncoder(), **kwargs)
    (loader,) = loaders_of(dataset, 1, 0, seed=seed)
    found = {}
    for _, batch in zip(range(batches), loader, strict=False):
        for key, noise, length in zip(batch["__restore_key__"][3], batch["noise"], batch["number"], strict=True):
            found[key[1], key[2]] = tuple(noise[: 1 + int(length) % 3].tolist())
    return found


def test_every_sample_has_its_own_in_every_epoch(data: Path) -> None:
    noise = noise_of(data)
    assert max(epoch for _, epoch in noise) >= 2
    assert len({values[0] for values in noise.values()}) == len(noise)


def test_it_does_not_depend_on_the_order(data: Path) -> None:
    noise = noise_of(data)
    others: list[dict[str, Any]] = [
        {"batch_size": 5, "batches": 30},
        {"shuffle_buffer_size": 50, "max_samples_per_sequence": 9},
        {"shuffle_over_epochs_multiplier": None},
    ]
    for kwargs in others:
        other = noise_of(data, **kwargs)
        common = noise.keys() & other.keys()
        assert len(common) > 60
        assert {key: noise[key] for key in common} == {key: other[key] for key in common}


def test_it_depends_on_the_seed_and_the_leaf(data: Path, tmp_path: Path) -> None:
    noise = noise_of(data)
    for other in (noise_of(data, seed=1), noise_of(text_dataset(tmp_path / "other", train=[*SHARDS, 1]))):
        common = noise.keys() & other.keys()
        assert len(common) > 60
        assert all(noise[key] != other[key] for key in common)


def test_every_global_generator_is_keyed(data: Path) -> None:
    class Throwing(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            throws = (random.random(), np.random.random(), float(torch.rand(())), float(torch.randn(3)[1]))
            return {"__key__": sample.__key__, "throws": throws}

    dataset = train_dataset(data, task_encoder=Throwing())
    runs = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        runs.append(deliver(loaders_of(dataset, 1, 0), 30).digests)
    assert runs[0] == runs[1]


class Suspended(TensorEncoder):
    """Draws before and after each output; all outputs of a draw are made before another draw begins."""

    def encode_sample(self, sample: Any) -> Iterator[Any]:
        for _ in range(3):
            random.random()
            yield super().encode_sample(sample)
            torch.rand(2)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_generator_goes_on_with_its_own_throws(data: Path, stop: int) -> None:
    """Defect 6 of the reference: there a generator that a checkpoint interrupts goes on with other seeds."""
    dataset = train_dataset(data, task_encoder=Suspended(), batch_size=2, worker_config=config_of(1, 0))
    expected = deliver(loaders_of(dataset, 1, 0, num_lanes=1), 20).digests
    state = deliver(loaders_of(dataset, 1, 0, num_lanes=1), stop, [stop]).states[stop]
    assert deliver(loaders_of(dataset, 1, 2, num_lanes=1, state=state), 20 - stop).digests == expected[stop:]

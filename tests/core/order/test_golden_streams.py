"""Whole streams of 0.1.0, sample by sample: no version of anything may change them.

Packs of small data are the exception: new runs have a number of buffers in their states (`packing_buffers`), which
states of 0.1.0 do not have, and those go on by its rules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import PackingEncoder, SkippingEncoder, config_of, loaders_of, text_dataset
from paths import TESTS

from energon_bridge import DefaultTaskEncoder, get_train_dataset
from energon_bridge.core.errors import SettingMismatchError
from energon_bridge.core.order.leaf_order import ORDER_VERSION

MICROBATCHES = 60
SAVED_AFTER = 23
STATES = TESTS / "fixtures" / "states-0.1.0.json"
BALANCED = TESTS / "fixtures" / "states-0.1.0-balanced.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("golden")
    for name, counts in {"small": [5, 7], "middle": [150, 150], "large": [2000, 1500, 1500]}.items():
        text_dataset(folder / name, train=counts)
    return folder


def blend(kind: str, field: str) -> Any:
    def mix(data: Path) -> dict[str, Any]:
        leaves = (
            {"small": 0.5, "middle": 2, "large": 1} if field == "repetitions" else {"small": 1, "middle": 5, "large": 4}
        )
        parts = [{"path": str(data / name), field: value} for name, value in leaves.items()]
        return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {kind: parts}}}

    return mix


STREAMS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "small": (lambda data: data / "small", {}, "786e2adec03570ab"),
    "dealt": (lambda data: data / "large", {}, "cf0241b6f9ac4e15"),
    "stretches": (lambda data: data / "large", {"num_lanes": 3}, "2b71b12dca14b729"),
    "capped": (
        lambda data: data / "large",
        {"num_lanes": 1, "max_samples_per_sequence": 5, "shuffle_buffer_size": 20},
        "24bbc2147db68b0c",
    ),
    "one after the other": (lambda data: data / "middle", {"shuffle_over_epochs_multiplier": None}, "43bf5c1f63adb3bd"),
    "several epochs at once": (lambda data: data / "middle", {"shuffle_over_epochs_multiplier": 3}, "368f6008c696dfc1"),
    "weights": (blend("blend", "weight"), {}, "6d8e63d52b0699a8"),
    "repetitions": (blend("blend_epochized", "repetitions"), {"num_lanes": 6}, "4c7166b9c9b1a63b"),
    "skipping": (lambda data: data / "middle", {"task_encoder": SkippingEncoder()}, "1ada1f07b6c42ef8"),
    "packing": (
        lambda data: data / "middle",
        {"task_encoder": PackingEncoder(), "packing_buffer_size": 9},
        "c71750c0bf779f7f",  # of new runs; 0.1.0 had f59c71a00830363f, and its states go on by its rules
    ),
}


def opened(data: Path, name: str, state: Any = None) -> Any:
    source, options, _ = STREAMS[name]
    options = {"batch_size": 4, "task_encoder": DefaultTaskEncoder()} | options
    num_lanes = options.pop("num_lanes", None)
    dataset = get_train_dataset(source(data), worker_config=config_of(1, 0), **options)
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=num_lanes, state=state)
    return loader


def digest(loader: Any, microbatches: int) -> str:
    keys = [key for batch in islice(loader, microbatches) for key in batch.__key__]
    return hashlib.blake2b(" ".join(keys).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("name", STREAMS)
def test_the_stream_of_0_1_0(data: Path, name: str) -> None:
    """A change here breaks every saved state: raise ORDER_VERSION, and keep these values for the old one."""
    assert ORDER_VERSION == 1
    loader = opened(data, name)
    assert digest(loader, MICROBATCHES) == STREAMS[name][2]
    loader.close()


@pytest.mark.parametrize("name", STREAMS)
def test_a_state_of_0_1_0_goes_on(data: Path, name: str) -> None:
    """The file was written by 0.1.0 and stays: states, and what came after each in the run that was not stopped."""
    saved = json.loads(STATES.read_text())[name]
    loader = opened(data, name, state=saved["state"])
    assert digest(loader, MICROBATCHES - SAVED_AFTER) == saved["rest"]
    loader.close()


def opened_balanced(data: Path, name: str) -> tuple[Any, str]:
    saved = json.loads(BALANCED.read_text())[name]
    dataset = get_train_dataset(data / "middle", worker_config=config_of(1, 0), batch_size=4)
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=8, state=saved["state"])
    return loader, saved["rest"]


@pytest.mark.parametrize("name", ["own shares", "after a window"])
def test_a_state_of_ranks_that_were_balanced_by_0_1_0_goes_on(data: Path, name: str) -> None:
    """Ways of balance that are gone; what comes after is that of a run that was never balanced nor stopped."""
    loader, rest = opened_balanced(data, name)
    assert digest(loader, 48) == rest
    loader.close()


def test_a_state_within_a_window_of_0_1_0_says_which_ones_go_on(data: Path) -> None:
    message = r"balance_window=3.* at microbatch 16 .*Take a state saved after a multiple of 12 .*every 3 optimizer"
    with pytest.raises(SettingMismatchError, match=message):
        opened_balanced(data, "within a window")

"""Microbatches of samples of similar length within a budget of tokens: `max_tokens_per_microbatch`."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import config_of, counts_of, loaders_of, text_dataset
from hypothesis import given, strategies as st
from made import made_once
from multimodal import PixelProcessor, WordTokenizer

from energon_bridge import (
    DefaultTaskEncoder,
    LengthGrouper,
    MultiModalTaskEncoder,
    Packer,
    SkipSample,
    TextSample,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.errors import (
    ConfigurationError,
    EmptyDatasetError,
    FatalSampleError,
    OverLongSampleError,
    SettingMismatchError,
)
from energon_bridge.models.conversations.conversation import Document, Piece
from energon_bridge.models.packing.packing import padded_rows
from energon_bridge.trainers.replica.costs import cost_limit

SAMPLES = 400
BUDGET = 128
LENGTHS = np.random.default_rng(5).lognormal(2.2, 0.8, SAMPLES).astype(int).clip(1, 60).tolist()
path = made_once(text_dataset, train=[150, 150, 100], val=[150, 250])


class Lengths(DefaultTaskEncoder):
    """Gives each sample as many tokens as its number says; drops every 50th, and every 40th when it is due."""

    def preencode_sample(self, sample: TextSample) -> Any:
        number = int(sample.__key__)
        if number % 50 == 7:
            raise SkipSample
        return {"__key__": sample.__key__, "tokens": torch.full((LENGTHS[number],), number)}

    def postencode_sample(self, sample: Any) -> Any:
        if int(sample["__key__"]) % 40 == 9:
            raise SkipSample
        return sample | {"noise": torch.rand(())}


def dropped(number: int) -> bool:
    return number % 50 == 7 or number % 40 == 9


def opened(path: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"task_encoder": Lengths(), "batch_size": None, "max_tokens_per_microbatch": BUDGET}
    return get_train_dataset(path, worker_config=config_of(1, 0, num_lanes=1), **(defaults | settings))


def padded(batch: Any) -> int:
    return int(batch["tokens"].numel())


def members(batch: Any) -> list[int]:
    return [int(key) for key in batch["__key__"]]


def fewest(lengths: list[int], most: int) -> int:
    """The fewest microbatches that hold all samples, by trying all ways to cut the sorted line."""
    ordered = sorted(lengths, reverse=True)
    best = [0] + [len(lengths)] * len(lengths)
    for end in range(1, len(ordered) + 1):
        fitting = [start for start in range(end) if (end - start) * ordered[start] <= most]
        best[end] = 1 + min(best[start] for start in fitting)
    return best[-1]


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(40, 200), st.randoms())
def test_microbatches_hold_their_tokens_and_are_as_few_as_can_be(lengths: list[int], most: int, random: Any) -> None:
    sizes = np.array(lengths, dtype=np.int64).reshape(-1, 1)
    found = padded_rows(sizes, [most])
    assert sorted(place for one in found for place in one) == list(range(len(lengths)))
    assert all(len(one) * max(lengths[place] for place in one) <= most for one in found)
    assert len(found) == fewest(lengths, most)
    shuffled = random.sample(lengths, len(lengths))
    again = padded_rows(np.array(shuffled, dtype=np.int64).reshape(-1, 1), [most])
    assert [[shuffled[place] for place in one] for one in again] == [[lengths[place] for place in one] for one in found]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=60), st.booleans())
def test_sizes_under_other_limits_add_up(sizes: list[tuple[int, int]], flush: bool) -> None:
    packer: Packer[Any] = Packer(
        limits={"tokens": 100, "images": 7, "samples": 6},
        size_of=lambda one: {"tokens": one[0], "images": one[1]},
        method="padded_rows",
    )
    found = packer.select(sizes, flush=flush)
    selected = Counter(one for microbatch in found for one in microbatch)
    assert not selected - Counter(sizes)
    assert found
    for microbatch in found:
        assert len(microbatch) * max(one[0] for one in microbatch) <= 100
        assert sum(one[1] for one in microbatch) <= 7
        assert len(microbatch) <= 6
    if flush:
        assert selected == Counter(sizes)


def test_a_limit_for_cost_makes_packs_even() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.lognormal(5.5, 1.0, 600).astype(int).clip(8, 2000)
    costs = lengths + 300 * (rng.random(600) < 0.4)  # some have images
    largest = []
    for limits in ({"tokens": 4096}, {"tokens": 4096, "cost": cost_limit(lengths, costs, 4096)}):
        packer: Packer[Any] = Packer(limits=limits, size_of=int)
        packs = packer.pack(np.stack([lengths, costs], 1)[:, : len(limits)].astype(np.int64), flush=True)
        found = np.array([costs[pack].sum() for pack in packs])
        largest.append(float(found.max() / np.median(found)))
    assert largest[1] < 1.05 < 2 < largest[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([], [], 10), "needs the lengths and costs of some samples"),
        (([1, 2], [1], 10), r"arrays of shape \(2,\) and \(1,\)"),
        (([1, 2], [1, -1], 10), "costs from -1.0 to 1.0"),
        (([1, 2], [1, 1], 0), "max_tokens=0"),
    ],
)
def test_what_gives_no_limit_for_cost(arguments: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        cost_limit(*arguments)
    assert cost_limit([10, 10], [10, 50], 20) == 62  # 2 % above 60
    assert cost_limit([10, 90], [100, 90], 20) == 100  # the largest sample


def test_every_sample_comes_once_with_little_padding_and_even_costs(path: Path) -> None:
    (loader,) = loaders_of(opened(path), 1, 0, num_lanes=1)
    batches = list(islice(loader, 200))
    assert all(padded(batch) <= BUDGET for batch in batches)
    assert all(
        batch["tokens"].shape == (len(members(batch)), max(LENGTHS[n] for n in members(batch))) for batch in batches
    )
    seen = Counter(number for batch in batches for number in members(batch))
    kept = [number for number in range(SAMPLES) if not dropped(number)]
    # A sample waits at most 32 selections, so the epochs mix a little.
    assert max(seen.values()) - min(seen[number] for number in kept) <= 2
    assert not any(dropped(number) for number in seen)
    held = np.array([padded(batch) for batch in batches])
    padding = 1 - sum(LENGTHS[number] for batch in batches for number in members(batch)) / held.sum()
    plain = [LENGTHS[first : first + 9] for first in range(0, SAMPLES - 8, 9)]  # as many rows, as they come
    before = np.array([len(rows) * max(rows) for rows in plain])
    assert padding < 0.08 < 0.5 < 1 - sum(map(sum, plain)) / before.sum()
    assert held.max() / held.mean() < 1.15 < 1.8 < before.max() / before.mean()
    counts = counts_of(loader.save_state_rank())
    assert counts["samples"] == sum(map(len, map(members, batches)))
    order = [min(LENGTHS[n] for n in members(batch)) for batch in batches]
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.5, "microbatches do not come sorted by length"


def test_a_pass_has_every_sample_once_and_counts_what_is_left_out(path: Path) -> None:
    dataset = get_val_dataset(
        path, worker_config=config_of(1, 0), task_encoder=Lengths(), batch_size=None, max_tokens_per_microbatch=BUDGET
    )
    for ranks in (1, 3):
        loaders = loaders_of(dataset, ranks, 0)
        batches = [batch for loader in loaders for batch in loader if bool(batch["__valid__"].any())]
        numbers = sorted(number for batch in batches for number in members(batch))
        assert numbers == [number for number in range(SAMPLES) if not dropped(number)]
        assert all(padded(batch) <= BUDGET for batch in batches)
        counts = [counts_of(loader.save_state_rank()) for loader in loaders]
        assert sum(count["samples"] + count["skipped"] for count in counts) == SAMPLES


def words(**values: Any) -> MultiModalTaskEncoder:
    encoder = MultiModalTaskEncoder(WordTokenizer(), PixelProcessor(), None, 64, **values)
    encoder.register_encoder(
        TextSample, lambda one, _: Document(pieces=[Piece("word " * LENGTHS[int(one.__key__)], learned=True)])
    )
    return encoder


@pytest.mark.parametrize(
    ("values", "multiple"), [({}, 1), ({"pad_to_multiple_of": 8}, 8), ({"pad_to_max_length": True}, 64)]
)
def test_padding_of_the_encoder_counts(path: Path, values: dict[str, Any], multiple: int) -> None:
    (loader,) = loaders_of(opened(path, task_encoder=words(**values)), 1, 0, num_lanes=1)
    batches = list(islice(loader, 60))
    assert all(batch.tokens.numel() <= BUDGET and batch.tokens.shape[1] % multiple == 0 for batch in batches)
    assert sum(batch.tokens.numel() for batch in batches) / 60 > 0.8 * BUDGET


class Grouped(Lengths):
    def batch_group_criterion(self, sample: Any) -> Any:
        return LengthGrouper(length_of=len, boundaries=(9,)).group(sample)


class Halves(Lengths):
    def sample_length(self, sample: Any) -> Any:
        return len(sample["tokens"]) / 2


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"batch_size": 4}, "max_tokens_per_microbatch=128 with batch_size=4: .* pass batch_size=1 or None"),
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch must be an integer of at least 1 or None, got 0"),
        ({"max_tokens_per_microbatch": 1 << 31}, "must be at most 2147483647"),
        ({"task_encoder": Grouped()}, "max_tokens_per_microbatch is set, but Grouped overrides batch_group_criterion"),
    ],
)
def test_settings_that_do_not_fit(path: Path, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        opened(path, **settings)


@pytest.mark.parametrize(
    ("settings", "error", "complaint"),
    [
        (
            {"max_tokens_per_microbatch": 40},
            OverLongSampleError,
            r"has \d+ tokens, but max_tokens_per_microbatch=40: raise the limit",
        ),
        (
            {"task_encoder": DefaultTaskEncoder()},
            FatalSampleError,
            "TextSample has neither tokens nor input_ids to count: override",
        ),
        ({"task_encoder": Halves()}, FatalSampleError, r"sample_length of Halves returned float .*: return the length"),
    ],
)
def test_samples_that_do_not_fit(path: Path, settings: dict[str, Any], error: Any, complaint: str) -> None:
    (loader,) = loaders_of(opened(path, **settings), 1, 0, num_lanes=1)
    with pytest.raises(error, match=complaint):
        next(iter(loader))


def test_a_state_of_another_budget_is_not_resumed(path: Path) -> None:
    (loader,) = loaders_of(opened(path), 1, 0, num_lanes=1)
    next(iter(loader))
    state = loader.save_state_rank()
    with pytest.raises(SettingMismatchError, match="max_tokens_per_microbatch"):
        loaders_of(opened(path, max_tokens_per_microbatch=100), 1, 0, num_lanes=1, state=[state])


class Nothing(Lengths):
    """Has a length for no sample."""

    def sample_length(self, sample: Any) -> int:
        raise SkipSample


def test_a_run_without_a_single_length_ends(path: Path) -> None:
    (loader,) = loaders_of(opened(path, task_encoder=Nothing()), 1, 0, num_lanes=1)
    with pytest.raises(EmptyDatasetError, match="in a row"):
        next(iter(loader))

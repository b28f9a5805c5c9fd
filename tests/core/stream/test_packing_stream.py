"""Packing in the engine: nothing lost, even work, cheap resumes, small states, and passes that end."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import (
    NUM_LANES,
    Numbers,
    PackingEncoder,
    PrePostEncoder,
    TensorEncoder,
    config_of,
    counts_of,
    deliver,
    digest,
    is_masked,
    loaders_of,
    text_dataset,
    train_dataset,
)
from forked import on_gloo
from made import made_once

from energon_bridge import DefaultTaskEncoder, Packer, SkipSample, get_savable_loader, get_val_dataset
from energon_bridge.core.errors import ConfigurationError, FatalSampleError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.saved_run import read_lanes
from energon_bridge.core.stream.lane_state import Stage

data = made_once(text_dataset, train=[50, 31, 19], val=[13, 24])
roomy = made_once(text_dataset, train=[4000, 3680])
"""Eight buffers of 40 samples in each of 24 lanes."""
ENDLESS: dict[str, Any] = {"shuffle_over_epochs_multiplier": -1}
"""No epoch ends a buffer."""


def members(batch: Any) -> list[tuple[Any, ...]]:
    """Return the restore keys of the samples in a batch of packs."""
    return [key for pack in batch.__restore_key__[3] for key in pack[2]]


class Pairs(DefaultTaskEncoder):
    """Packs two samples each, in the order in which they come, and counts what it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded = 0
        self.selections: list[int] = []

    def preencode_sample(self, sample: Any) -> Any:
        self.encoded += 1
        return Numbers.derive_from(sample, text=sample.text, number=torch_of(sample), noise=torch_of(sample))

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        self.selections.append(len(samples))
        return [samples[i : i + 2] for i in range(0, len(samples) - 1, 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def torch_of(sample: Any) -> torch.Tensor:
    return torch.tensor([int(sample.__key__)])


def test_what_is_left_over_comes_later(data: Path) -> None:
    (loader,) = loaders_of(train_dataset(data, "packing"), 1, 0)
    drawn = Counter(key[:3] for batch in islice(loader, 15 * NUM_LANES) for key in members(batch))
    assert set(drawn.values()) == {1}, "every draw once, skipped ones aside"
    expected: set[Any] = set()
    (plain,) = loaders_of(train_dataset(data, "skipping"), 1, 0)
    for batch in islice(plain, 15 * NUM_LANES):
        expected |= {key[:3] for key in batch.__restore_key__[3]}
    # What is drawn and not packed yet waits in the lanes.
    held = {
        (leaf.identity, ref.sample, ref.epoch)
        for leaf in loader.spec.ordered
        for state in read_lanes(loader.save_state_rank()).values()
        for _, refs, _ in state.held.entries()
        for ref in refs
    }
    assert not held & set(drawn)
    early = {key for key in expected if key[2] < 3}
    assert early <= set(drawn) | held


class Halves(Pairs):
    """Leaves every fifth sample out once it is selected, fails for some, and makes two rows of a pack."""

    def postencode_sample(self, sample: Any) -> Any:
        if int(sample.number) % 5 == 0:
            raise SkipSample
        if int(sample.number) % 7 == 0:
            raise ValueError("no")
        return sample

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        yield samples[0]
        yield samples[-1]


def test_what_a_pack_leaves_out_is_counted_once(data: Path) -> None:
    """Saved after each row, and so between the two rows of a pack, which is then made again."""
    dataset = train_dataset(data, "default", task_encoder=Halves(), packing_buffer_size=10, batch_size=1)
    expected = deliver(loaders_of(dataset, 1, 0, num_lanes=2), 40, range(41)).states
    state = None
    for step in range(1, 41):
        state = deliver(loaders_of(dataset, 1, 0, state=state, num_lanes=2), 1, [1]).states[1]
        found, whole = counts_of(state[0]), counts_of(expected[step][0])
        assert all(found[name] == whole[name] for name in ("skipped", "samples", "errors"))
    assert min(whole["skipped"], whole["errors"]) > 5


def test_work_is_spread_evenly_over_the_microbatches(roomy: Path) -> None:
    encoder = Pairs()
    dataset = train_dataset(roomy, "default", task_encoder=encoder, packing_buffer_size=40, batch_size=2, **ENDLESS)
    (loader,) = loaders_of(dataset, 1, 0)
    batches = iter(loader)
    costs = []
    for _ in range(26 * NUM_LANES):
        before = encoder.encoded
        next(batches)
        costs.append(encoder.encoded - before)
    first, later = costs[:NUM_LANES], costs[NUM_LANES:]
    assert max(first) <= 40 + 2 * 4
    assert len(set(first)) > NUM_LANES / 3, "lanes begin with buffers of different sizes"
    assert np.mean(later[10 * NUM_LANES :]) == pytest.approx(4, rel=0.02), "two packs of two samples"
    assert max(later) <= 2 * 4, "the microbatches in which buffers grow, too"
    assert encoder.selections[-NUM_LANES:] == [40] * NUM_LANES, "buffers grow to their size"


def test_a_restored_buffer_is_encoded_in_shares(data: Path) -> None:
    encoder = Pairs()
    dataset = train_dataset(data, "default", task_encoder=encoder, packing_buffer_size=40, batch_size=1, **ENDLESS)
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=1)
    seen = set()
    for _ in range(60):
        next(iter(loader))
        state = loader.save_state_rank()
        stages = [stage for stage, _, _ in read_lanes(state)[0].held.entries()]
        packs, waiting = stages.count(Stage.PACK), stages.count(Stage.BUFFER)
        (resumed,) = loaders_of(dataset, 1, 0, state=state, num_lanes=1)
        batches = iter(resumed)
        for _ in range(packs):
            before = encoder.encoded
            next(batches)
            # The first one has no share of what waits. The others also encode their pack, and what is drawn newly.
            assert encoder.encoded - before <= -(-waiting // max(1, packs - 1)) + 2 + 2 * 3
        seen.add(packs)
    assert seen >= set(range(1, 20)), "wherever the lane stands between two selections"


def test_states_hold_references_in_few_bytes(roomy: Path) -> None:
    dataset = train_dataset(roomy, "default", task_encoder=Pairs(), packing_buffer_size=200, batch_size=2)
    (loader,) = loaders_of(dataset, 1, 0)
    sum(1 for _ in islice(loader, 3 * NUM_LANES))
    state = loader.save_state_rank()
    held = sum(len(lane.held.members) for lane in read_lanes(state).values())
    assert held > 150 * NUM_LANES
    plain = get_savable_loader(train_dataset(roomy, "default"))
    sum(1 for _ in islice(plain, 3 * NUM_LANES))
    assert len(json.dumps(state)) - len(json.dumps(plain.save_state_rank())) <= 12 * held


class Picky(Pairs):
    """Never packs samples whose number is a multiple of 10."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return super().select_samples_to_pack([sample for sample in samples if int(sample.__key__) % 10])


def test_samples_that_never_fit_are_given_up_and_counted(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = train_dataset(data, "default", task_encoder=Picky(), packing_buffer_size=8, batch_size=2)
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=2)
    with caplog.at_level(logging.WARNING):
        sum(1 for _ in islice(loader, 300))
    counts = counts_of(loader.save_state_rank())
    assert counts["skipped"] > 20
    assert "dropped after 33 selections left it over" in caplog.text


# Passes that end -----------------------------------------------------------------------------------------------------


def validation(data: Path, encoder: Any = None, **kwargs: Any) -> DatasetSpec:
    settings: dict[str, Any] = {"batch_size": 2, "packing_buffer_size": 10, "worker_config": config_of(1, 0)}
    return get_val_dataset(data, task_encoder=encoder or PrePostEncoder(), **(settings | kwargs))


def delivered(spec: DatasetSpec, ranks: int, workers: int = 0) -> list[str]:
    columns = [list(loader) for loader in loaders_of(spec, ranks, workers)]
    assert len({len(column) for column in columns}) == 1
    return [digest(batch) for step in zip(*columns, strict=True) for batch in step if not is_masked(batch)]


def test_a_packed_pass_has_every_sample_once(data: Path) -> None:
    spec = validation(data, Pairs())
    (loader,) = loaders_of(spec, 1, 0)
    batches = list(loader)
    drawn = Counter(key[1] for batch in batches for key in members(batch))
    # Blocks of 10, 10, 10 and 7 samples: the odd one of the last finds no partner, and is counted.
    assert set(drawn.values()) == {1}
    assert len(drawn) == 36
    counts = counts_of(loader.save_state_rank())
    assert (counts["samples"], counts["skipped"]) == (36, 1)
    assert len(loader) == len(batches) == 9
    limited = get_savable_loader(validation(data, Pairs(), limit=2))
    assert [digest(batch) for batch in limited] == [digest(batch) for batch in batches[:2]]


class Patient(Pairs):
    """Leaves every fifth sample over as long as something can join it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[bool] = []

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        self.last.append(self.current_buffer_is_last)
        if self.last[-1]:
            return [samples]
        return super().select_samples_to_pack([one for one in samples if int(one.number) % 5])


def test_a_selection_knows_that_nothing_will_join_what_it_leaves(data: Path) -> None:
    encoder = Patient()
    sizes = [len(members(batch)) for batch in get_savable_loader(validation(data, encoder, batch_size=1))]
    assert sizes == [10, 10, 10, 7], "each buffer of the pass as one pack"
    assert encoder.last == [True] * 4
    encoder = Patient()
    settings: dict[str, Any] = {"packing_buffer_size": 9, "batch_size": 1}
    endless = get_savable_loader(train_dataset(data, "default", task_encoder=encoder, **settings, **ENDLESS))
    assert sum(1 for _ in islice(endless, 50)) == 50
    assert set(encoder.last) == {False}
    encoder, settings["packing_buffer_size"] = Patient(), 40
    (loader,) = loaders_of(train_dataset(data, "default", task_encoder=encoder, **settings), 1, 0, num_lanes=1)
    keys = [key[1] for batch in islice(loader, 120) for key in members(batch)]
    assert {*encoder.last} == {True, False}, "an epoch ends a buffer, too"
    assert sorted(keys[:100]) == list(range(100)) == sorted(keys[100:200])
    assert not encoder.current_buffer_is_last


def test_the_ready_made_packer_flushes_in_one_selection_where_a_pass_ends(data: Path) -> None:
    packer: Packer[Any] = Packer(limits={"samples": 4}, size_of=lambda one: {}, min_fill=1)
    chosen: list[int] = []

    class Ready(Pairs):
        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            packs = packer.select(samples)
            chosen.append(len(samples))
            return packs

    batches = list(get_savable_loader(validation(data, Ready(), batch_size=1)))
    assert chosen == [10, 10, 10, 7]
    assert Counter(len(members(batch)) for batch in batches) == {4: 7, 2: 3, 3: 1}
    assert sorted(key[1] for batch in batches for key in members(batch)) == list(range(37))


def test_ranks_share_the_work_of_packing(data: Path) -> None:
    def rank_main(rank: int) -> tuple[list[str], int]:
        encoder = Pairs()
        loader = get_savable_loader(validation(data, encoder), worker_config=config_of(2, 0, rank))
        iter(loader)
        planned = encoder.encoded
        batches = [digest(batch) for batch in loader if not is_masked(batch)]
        torch.distributed.destroy_process_group()
        return batches, planned

    (one, first), (other, second) = on_gloo(2, rank_main)
    whole = delivered(validation(data, Pairs()), 1)
    assert [entry for pair in zip(one, [*other, ""], strict=False) for entry in pair if entry] == whole
    assert first + second == 37


def test_encoders_that_cannot_pack_are_refused(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not override select_samples_to_pack"):
        train_dataset(data, "tensors", packing_buffer_size=8)

    class Both(PackingEncoder):
        def postencode_sample(self, sample: Any) -> Any:
            return sample

    with pytest.raises(ConfigurationError, match="override either encode_sample or"):
        train_dataset(data, "tensors", task_encoder=Both(), packing_buffer_size=8)
    encoder = Pairs()
    encoder.select_samples_to_pack = lambda samples: []  # type: ignore[method-assign]
    with pytest.raises(FatalSampleError, match="made no pack from"):
        next(iter(get_savable_loader(train_dataset(data, "default", task_encoder=encoder, packing_buffer_size=8))))
    assert TensorEncoder().select_samples_to_pack.__func__.__default_hook__  # type: ignore[attr-defined]


class Ends(Pairs):
    """Packs the oldest sample of the buffer with the newest, and so on; the two or three in the middle stay."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        self.selections.append(len(samples))
        return [[samples[i], samples[-1 - i]] for i in range(len(samples) // 2 - 1)]


def test_the_order_of_packs_since_version_5(data: Path) -> None:
    """A change here breaks states of streams that pack: raise ORDER_VERSION, and keep these values for the old one."""
    encoder = Ends()
    dataset = train_dataset(data, "default", task_encoder=encoder, packing_buffer_size=12, batch_size=1)
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=3)
    packs = [tuple(key[1] for key in members(batch)) for batch in islice(loader, 48)]
    assert encoder.selections[:6] == [12, 12, 12, 12, 12, 10], "equal parts of an epoch, with the two left over"
    first = [(95, 28), (38, 73), (43, 51), (62, 45), (15, 9), (92, 13), (27, 49), (90, 93)]
    assert packs[1::3] == [*first, (33, 68), (46, 88), (65, 47), (11, 22), (40, 19), (76, 54), (41, 50), (0, 23)]


@pytest.mark.parametrize(("buffer", "named"), [(8, False), (9, True)])
def test_buffers_of_more_than_an_eighth_of_an_epoch_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, buffer: int, named: bool
) -> None:
    data = text_dataset(tmp_path / "text", train=[1000, 536], val=[1])  # 8 * 24 lanes * 8 samples
    for _ in range(2):
        get_savable_loader(train_dataset(data, task_encoder=Pairs(), packing_buffer_size=buffer))
    said = f"{data} is small for packing: buffers of 24 lanes (packing_buffer_size={buffer}) would hold {24 * buffer} "
    said += "samples at a time, more than an eighth of the 1,536 samples in an epoch of it. "
    found = [message for message in caplog.messages if "packing_buffer_size" in message]
    assert [message.startswith(said) and "num_lanes" in message for message in found] == [True] * named


@pytest.mark.parametrize(("samples", "early"), [(40, True), (1000, False)])
def test_a_small_dataset_of_a_mix_whose_later_epochs_come_early_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, samples: int, early: bool
) -> None:
    small = text_dataset(tmp_path / "small", train=[samples], val=[1])
    large = text_dataset(tmp_path / "large", train=[1100], val=[1])
    mix = tmp_path / "mix.yaml"
    parts = "".join(f"      - {{weight: 1, path: {path}}}\n" for path in (small, large))
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    mix.write_text(head + parts)
    get_savable_loader(train_dataset(mix, task_encoder=Pairs(), packing_buffer_size=12))
    (said,) = [message for message in caplog.messages if "is small for packing" in message]
    assert f"{small} is small" in said
    assert f"the {2 * samples:,} samples that the mix draws in an epoch of it ({samples:,} of them its own). " in said
    assert ("share 1 buffer," in said) == early
    assert ("samples of later epochs still come early" in said) == early

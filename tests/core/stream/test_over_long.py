"""What became of samples too long for a pack is in the state: exact for each dataset, topology and resume."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import Numbers, TensorEncoder, config_of, counts_of, deliver, loaders_of, train_dataset
from made import made_once
from mixing import mix_data, mixed

from energon_bridge import Packer, SkipSample, TaskEncoder, get_val_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.loader.saved_run import read_lanes, read_leaves
from energon_bridge.core.stream.lane_state import OVER_LONG

LIMIT = 5
POLICIES = ("drop", "truncate", "split")
data = made_once(mix_data)


def size_of(key: int) -> int:
    """1 to 12: some samples are cut into three pieces."""
    return 1 + 5 * key % 12


def pieces_of(sample: Any, limits: Any) -> list[Any]:
    parts = sample.noise.split(limits["numbers"])
    return [Numbers.derive_from(sample, text=sample.text, number=sample.number, noise=part) for part in parts]


def packer(policy: str) -> Packer[Any]:
    def cut(sample: Any, limits: Any) -> Any:
        return pieces_of(sample, limits) if policy == "split" else pieces_of(sample, limits)[0]

    return Packer(
        limits={"numbers": LIMIT}, size_of=lambda one: len(one.noise), over_long=policy, cut=cut, min_fill=0.5
    )


class Long(TensorEncoder):
    """Makes samples of 1 to 12 numbers, of which a pack holds 5."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.packer = packer(policy)

    def encode_sample(self, sample: Any) -> Any:
        noise = torch.rand(size_of(int(sample.__key__)))
        encoded = Numbers.derive_from(sample, text=sample.text, number=torch.tensor([1]), noise=noise)
        yield from self.packer.admit(encoded)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return self.packer.select(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        noise = torch.cat([sample.noise for sample in samples])
        return Numbers.derive_from(samples[0], text="", number=samples[0].number, noise=noise)


def opened(data: Path, policy: str, **kwargs: Any) -> DatasetSpec:
    settings: dict[str, Any] = {"packing_buffer_size": 9, "batch_size": 2} | kwargs
    return mixed(data, [(data / "a", 3), (data / "b", 2)], Long(policy), **settings)


def expected_counts(spec: DatasetSpec, state: Any, policy: str) -> list[dict[str, int]]:
    """Count by arithmetic, for each leaf, the draws that the lanes of a state have made."""
    plan = plan_run(spec, config_of(1, 0), state["num_lanes"])
    counts: list[Counter[str]] = [Counter() for _ in plan.leaves]
    buffers = plan.leaves[0].order.num_lanes
    for lane, at in read_lanes(state).items():
        assert plan.blend is not None
        if lane >= buffers:
            continue  # it shares the buffer of an earlier lane, which counts
        made = list(at.leaf_draws)
        if at.taken:  # counted with its first piece
            made[int(plan.blend.leaves(lane, at.draw, 1)[0])] += 1
        for number, (leaf, draws) in enumerate(zip(plan.leaves, made, strict=True)):
            keys: list[int] = []
            while len(keys) < draws:
                keys += leaf.order.rounds_at(lane, len(keys), 1).indices.tolist()
            for size in map(size_of, keys[:draws]):
                if size > LIMIT:
                    name = {"drop": "dropped", "truncate": "truncated", "split": "split"}[policy]
                    counts[number] += Counter({name: 1, "pieces": -(-size // LIMIT) if policy == "split" else 0})
    return [{name: count[name] for name in OVER_LONG} for count in counts]


def found_counts(state: Any) -> list[dict[str, int]]:
    return [{name: leaf["counts"][name] for name in OVER_LONG} for leaf in read_leaves(state)]


@pytest.mark.parametrize("policy", POLICIES)
def test_counters_are_exact_through_resumes_on_other_topologies(data: Path, policy: str) -> None:
    spec, state = opened(data, policy), None
    for ranks, workers, steps in ((3, 1, 9), (1, 0, 1), (1, 2, 20), (4, 0, 5)):
        loaders = loaders_of(spec, ranks, workers, state=state)
        state = merge(deliver(loaders, steps, [steps]).states[steps])
        state = json.loads(json.dumps(state))
        assert found_counts(state) == expected_counts(spec, state, policy)
    assert all(sum(leaf.values()) > 10 for leaf in found_counts(state))


class InTwoSteps(Long):
    """Makes the pieces before images are decoded, and so ahead of those that are delivered."""

    encode_sample = TaskEncoder.encode_sample
    preencode_sample = Long.encode_sample

    def postencode_sample(self, sample: Any) -> Any:
        return sample


@pytest.mark.parametrize("encoder", [Long, InTwoSteps])
def test_pieces_of_a_sample_that_is_delivered_in_part_are_counted_once(data: Path, encoder: type[Long]) -> None:
    """Without packing, saved after each sample, and so between the pieces of one."""
    spec, one = (train_dataset(data / "b", task_encoder=kind("split"), batch_size=1) for kind in (encoder, Long))
    expected, state = deliver(loaders_of(one, 1, 0, num_lanes=2), 30, range(31)).states, None
    for step in range(1, 31):
        state = deliver(loaders_of(spec, 1, 0, state=state, num_lanes=2), 1, [1]).states[1]
        assert counts_of(state[0]) == counts_of(expected[step][0])
    assert sum(found_counts(state[0])[0].values()) > 9


def test_rows_of_counters_say_what_was_dropped(data: Path) -> None:
    (loader,) = loaders_of(opened(data, "drop"), 1, 0)
    sum(1 for _ in islice(loader, 60))
    rows = loader.counters()
    assert [row["dropped"] for row in rows] == [row["skipped"] for row in rows]
    assert all(row["dropped"] > 0 for row in rows)


class Trimming(Long):
    """Counts in hooks that see a sample after it was selected, of which some are left out by chance."""

    def encode_sample(self, sample: Any) -> Any:
        raise NotImplementedError

    encode_sample.__default_hook__ = True  # type: ignore[attr-defined]

    def preencode_sample(self, sample: Any) -> Any:
        noise = torch.ones(1 + int(sample.__key__) % 3)
        return Numbers.derive_from(sample, text=sample.text, number=torch.tensor([int(sample.__key__)]), noise=noise)

    def postencode_sample(self, sample: Any) -> Any:
        sample.noise = torch.rand(size_of(int(sample.number)))
        (admitted,) = self.packer.admit(sample)
        if int(sample.number) % 7 == 3:
            raise SkipSample
        return admitted


class TrimmingByLength(Trimming):
    select_samples_to_pack = TaskEncoder.select_samples_to_pack  # type: ignore[assignment]
    pack_selected_samples = TaskEncoder.pack_selected_samples  # type: ignore[assignment]

    def sample_length(self, sample: Any) -> int:
        return len(sample.noise)


@pytest.mark.parametrize(
    ("encoder", "settings"),
    [(Trimming, {"batch_size": 1}), (TrimmingByLength, {"batch_size": None, "max_tokens_per_microbatch": 3})],
)
def test_what_is_counted_after_the_selection_is_counted_once(
    data: Path, encoder: type[Trimming], settings: dict[str, Any]
) -> None:
    spec = train_dataset(data / "b", task_encoder=encoder("truncate"), packing_buffer_size=10, **settings)
    expected = deliver(loaders_of(spec, 1, 0, num_lanes=2), 26, range(27)).states
    state = None
    for step in range(1, 27):
        state = deliver(loaders_of(spec, 1, 0, state=state, num_lanes=2), 1, [1]).states[1]
        assert found_counts(state[0]) == found_counts(expected[step][0])
    assert sum(found_counts(state[0])[0].values()) > 5


@pytest.mark.parametrize(("policy", "ranks"), [("drop", 3), ("truncate", 3), ("split", 3)])
def test_a_packed_pass_counts_each_sample_once(data: Path, policy: str, ranks: int) -> None:
    spec = get_val_dataset(
        data / "b", worker_config=config_of(1, 0), task_encoder=Long(policy), batch_size=2, packing_buffer_size=9
    )
    loaders = loaders_of(spec, ranks, 0)
    total: Counter[str] = Counter()
    for loader in loaders:
        assert len(list(loader)) >= 2
        total.update(found_counts(loader.save_state_rank())[0])
    long = [size_of(key) for key in range(30) if size_of(key) > LIMIT]
    name = {"drop": "dropped", "truncate": "truncated", "split": "split"}[policy]
    pieces = sum(-(-size // LIMIT) for size in long) if policy == "split" else 0
    assert {key: value for key, value in total.items() if value} == {name: len(long)} | (
        {"pieces": pieces} if pieces else {}
    )

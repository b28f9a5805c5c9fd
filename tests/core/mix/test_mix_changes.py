"""A mix that changes: weights set during the run, another mix on resume, and starting at any step."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import (
    ENCODERS,
    NEEDED,
    PackingEncoder,
    SeveralEncoder,
    TensorEncoder,
    deliver,
    digest,
    loaders_of,
    text_dataset,
)
from keyed import BOTH, KEYS, keyed_dataset
from made import made_once
from mixing import metadataset, mix_data, mixed

from energon_bridge import DefaultTaskEncoder, EnergonMultiModalDataModule, WeightSchedule, get_savable_loader
from energon_bridge.core.errors import ConfigurationError, DatasetMismatchError
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import read_lanes, read_leaves
from energon_bridge.core.mix import Blender

data = made_once(mix_data)


def by_leaf(loaders: list[SavableDataLoader], steps: int) -> dict[str, list[tuple[int, int, int]]]:
    """Deliver some steps; return (lane, index, epoch) of every sample by the name of its dataset, in order."""
    names = {leaf.identity: Path(leaf.dataset.path).name for leaf in loaders[0].spec.leaves}
    rows: dict[str, list[tuple[int, int, int]]] = {name: [] for name in names.values()}
    columns = [list(islice(loader, steps)) for loader in loaders]
    for step in zip(*columns, strict=True):
        for batch in step:
            _, lane, _, keys = batch.__restore_key__
            for identity, index, epoch, _ in keys:
                rows[names[identity]].append((lane, index, epoch))
    return rows


def per_lane(rows: list[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
    lanes: dict[int, list[tuple[int, int]]] = {}
    for lane, index, epoch in rows:
        lanes.setdefault(lane, []).append((index, epoch))
    return lanes


def follows(before: Any, after: Any, whole: Any) -> None:
    """Check that each lane's draws of a leaf, before and after, are the beginning of those of one long run."""
    for lane in whole:
        joint = before.get(lane, []) + after.get(lane, [])
        assert joint == whole[lane][: len(joint)], lane


# Weights during the run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, WeightSchedule.linear([(0, 3), (2000, 1)])], ids=["constant", "schedule"])
def test_set_weights_acts_from_a_draw_on_and_is_part_of_the_state(data: Path, first: Any) -> None:
    dataset = mixed(data, [(data / "a", first), (data / "b", 1)])
    plain = deliver(loaders_of(dataset, 1, 0), 200).digests
    loaders = loaders_of(dataset, 1, 1)
    head = [digest(batch) for batch in islice(loaders[0], 40)]
    start = loaders[0].set_weights({str(data / "a"): 0, str(data / "b"): 5}, from_draw=120 * 2)
    assert start == 240
    saved = loaders[0].save_state_rank()
    changed = deliver(loaders, 160).digests
    assert head + changed[:80] == plain[:120], "nothing changes before the draw"
    states = deliver(loaders_of(dataset, 2, 0, state=saved), 30, [30]).states[30]
    found = deliver(loaders_of(dataset, 3, 2, state=json.loads(json.dumps(states))), 20).digests
    assert found == changed[60:120]
    last = loaders_of(dataset, 1, 0, state=states)
    by_leaf(last, 20)  # up to draw 240
    after = by_leaf(last, 60)
    assert not after["a"]
    assert len(after["b"]) == 120


def test_set_weights_goes_on_from_what_was_delivered(data: Path) -> None:
    dataset = mixed(data, [(data / "a", 1), (data / "b", 1)])
    (loader,) = loaders_of(dataset, 1, 2)
    before = by_leaf([loader], 31)
    assert loader.set_weights([WeightSchedule.steps([(0, 1), (400, 0)]), 1]) == 3 * 24 + 6 + 1
    after = by_leaf([loader], 200)
    assert len(after["a"]) == pytest.approx((400 - 62) / 2, abs=24)
    whole = by_leaf(loaders_of(dataset, 1, 0), 350)
    for name in ("a", "b"):
        follows(per_lane(before[name]), per_lane(after[name]), per_lane(whole[name]))


def test_set_weights_takes_names_where_they_are_unique(tmp_path: Path) -> None:
    for name in "abc":
        keyed_dataset(tmp_path / name, train=[KEYS])
    join = {"join": [{"path": "./c"}, {"path": "./a"}], "joiner": BOTH, "weight": 1}
    blend = [{"path": "./a", "weight": 1}, {"path": "./b", "weight": 1}, join]
    dataset = mixed(tmp_path, metadataset(tmp_path, train={"blend": blend}), DefaultTaskEncoder())
    a, b, c = (str(tmp_path / name) for name in "abc")
    found = []
    for keys in ((), ("a", "b", "c"), (a, "b", "c"), ("a", b, f"join of {c} and {a}")):
        (loader,) = loaders_of(dataset, 1, 0)
        loader.set_weights(dict(zip(keys, (0, 1, 3), strict=True)) if keys else [0, 1, 3])
        found.append([batch.__restore_key__ for batch in islice(loader, 20)])
    assert all(one == found[0] for one in found)


def test_names_that_set_weights_takes_are_said(data: Path) -> None:
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1), (data / "a", 1)]), 1, 0)
    names = [name.removeprefix("samples/") for name in loader.metrics() if name.startswith("samples/")]
    first, second = (name for name in names if name != "b")
    loader.set_weights({first: 1, "b": 2, second: 3})
    a = str(data / "a")
    for wrong in ({"a": 1, "b": 2}, {a: 1, "b": 2}, {first: 1, "b": 2}, {first: 1, a: 1, "b": 2, second: 3}):
        with pytest.raises(ConfigurationError, match="the 3 datasets of the mix, by its name") as error:
            loader.set_weights(wrong)
        assert all(name in str(error.value) for name in names)


def test_set_weights_says_what_waits_in_pack_buffers(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = mixed(data, [(data / "a", 1), (data / "b", 1)], PackingEncoder(), packing_buffer_size=11)
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=1)
    for _ in islice(loader, 12):
        pass
    numbers = loader.metrics()
    waiting = int(numbers["draws"] - numbers["samples"] - numbers["skipped"] - numbers["errors"])
    assert waiting > 1
    with caplog.at_level("INFO"):
        for _ in range(2):
            loader.set_weights([0, 1])
    found = [record for record in caplog.records if "set_weights" in record.message]
    assert [record.levelname for record in found] == ["WARNING", "INFO"]
    assert f"; {waiting} samples that were drawn before wait in buffers of rank 0 and come first" in found[0].message
    caplog.clear()
    loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)]), 1, 0)[0].set_weights([0, 1])
    assert "wait in buffers" not in caplog.text


def test_set_weights_refuses_what_cannot_be(data: Path) -> None:
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)]), 1, 0)
    sum(1 for _ in islice(loader, 30))
    with pytest.raises(ConfigurationError, match="draw 20 is already made; from_draw must be at least 78"):
        loader.set_weights([1, 2], from_draw=20)
    with pytest.raises(ConfigurationError, match="3 weights for a mix of 2"):
        loader.set_weights([1, 2, 3])
    with pytest.raises(ConfigurationError, match=str(data / "b")):
        loader.set_weights({str(data / "a"): 1})
    with pytest.raises(ConfigurationError, match="all weights are 0"):
        loader.set_weights([0, 0])
    with pytest.raises(ConfigurationError, match="blend by weights"):
        get_savable_loader(mixed(data, data / "a")).set_weights([1])
    (ranked, _) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)]), 2, 0)
    with pytest.raises(ConfigurationError, match="pass the same from_draw"):
        ranked.set_weights([1, 2])


# Starting at a step --------------------------------------------------------------------------------------------------

MIXES: dict[str, Any] = {
    "one": lambda data: data / "b",
    "weights": lambda data: [(data / "a", 5), (data / "b", 2), (data / "c", 1)],
    "schedule": lambda data: [(data / "a", WeightSchedule.cosine([(0, 1), (300, 0), (500, 2)])), (data / "b", 1)],
    "repetitions": lambda data: metadataset(
        data, train={"blend_epochized": [{"path": "./a", "repetitions": 2}, {"path": "./b", "repetitions": 0.5}]}
    ),
    "concat": lambda data: metadataset(data, train={"concat": [{"path": "./b"}, {"path": "./a"}]}),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("repeat", [True, False])
def test_a_loader_starts_at_any_step(data: Path, mix: str, repeat: bool) -> None:
    if not repeat and mix in ("weights", "schedule"):
        pytest.skip("a blend by weights has no end")
    dataset = mixed(data, MIXES[mix], repeat=repeat)
    for ranks, step in ((1, 13), (1, 61), (4, 17), (5, 8)):
        (whole,) = loaders_of(dataset, ranks, 0)[:1]
        (loader,) = loaders_of(dataset, ranks, 0)[:1]
        batches = iter_passes(whole)
        for _ in range(step):
            next(batches)
        loader.seek(step)
        found = iter_passes(loader)
        for _ in range(10):
            assert digest(next(found)) == digest(next(batches))
    with pytest.raises(ConfigurationError, match="start_at"):
        get_savable_loader(dataset, start_at=-1)


def iter_passes(loader: SavableDataLoader) -> Any:
    while True:
        yield from loader


# Another mix on resume -----------------------------------------------------------------------------------------------


def test_adapting_continues_what_stays_starts_what_is_new_and_parks_what_is_gone(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = mixed(data, [(data / "a", 1), (data / "b", 1)])
    new = mixed(data, [(data / "c", 1), (data / "b", 3)])
    loaders = loaders_of(old, 2, 1)
    first = by_leaf(loaders, 40)
    states = [loader.save_state_rank() for loader in loaders]
    refused = loaders_of(new, 3, 0)
    with pytest.raises(DatasetMismatchError, match="on_mismatch"):
        refused[0].restore_state_rank(states)
    with caplog.at_level(logging.WARNING):
        for loader in refused:
            loader.restore_state_rank(states, on_mismatch="adapt")
            loader.restore_state_rank(states, on_mismatch="adapt")  # as Lightning and the data module both do
    assert caplog.text.count("the mix has changed") == 1
    second = by_leaf(refused, 40)
    assert len(second["b"]) == pytest.approx(0.75 * 240, abs=24)
    whole = {name: per_lane(rows) for name, rows in by_leaf(loaders_of(old, 1, 0), 350).items()}
    follows(per_lane(first["b"]), per_lane(second["b"]), whole["b"])
    fresh = {name: per_lane(rows) for name, rows in by_leaf(loaders_of(new, 1, 0), 350).items()}
    follows({}, per_lane(second["c"]), fresh["c"])
    # And back: what was parked goes on, and its counts are still there.
    states = [loader.save_state_rank() for loader in refused]
    rows = {Path(row["path"]).name: row for row in read_leaves(states[0])}
    assert (rows["a"]["parked"], rows["b"]["parked"]) == (True, False)
    back = loaders_of(old, 4, 0)
    for loader in back:
        loader.restore_state_rank(states, on_mismatch="adapt")
    third = by_leaf(back, 40)
    follows(per_lane(first["a"]), per_lane(third["a"]), whole["a"])
    counted = Counter[str]()
    for loader in back:
        for row in read_leaves(loader.save_state_rank()):
            counted[Path(row["path"]).name] += row["counts"]["samples"]
    assert counted == {
        name: len(first.get(name, [])) + len(second.get(name, [])) + len(third.get(name, [])) for name in "abc"
    }


def test_samples_that_wait_and_whose_dataset_leaves_are_counted_in_one_line(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"encoder": PackingEncoder(), "packing_buffer_size": 3}
    (loader,) = loaders_of(mixed(data, [(data / "a", 1), (data / "b", 1)], **settings), 1, 0, num_lanes=4)
    for _ in islice(loader, 12):
        pass
    state = loader.save_state_rank()
    (gone,) = (number for number, row in enumerate(read_leaves(state)) if row["path"].endswith("/b"))
    waiting = [lane.held.members[:, 0].tolist().count(gone) for lane in read_lanes(state).values()]
    lanes = len(waiting) - waiting.count(0)
    assert lanes > 1
    (resumed,) = loaders_of(mixed(data, [(data / "a", 1), (data / "c", 1)], **settings), 1, 0, num_lanes=4)
    resumed.restore_state_rank(state, on_mismatch="adapt")
    assert [message for message in caplog.messages if "dropping" in message] == [
        f"rank 0: dropping {sum(waiting)} samples that waited for a pack or batch in {lanes} of its lanes: their "
        "datasets left the mix or changed"
    ]


def test_adapting_to_the_same_mix_changes_nothing(data: Path) -> None:
    dataset = mixed(data, MIXES["weights"])
    expected = deliver(loaders_of(dataset, 1, 0), 60).digests
    (state,) = deliver(loaders_of(dataset, 1, 0), 30, [30]).states[30]
    loader = get_savable_loader(mixed(data, [(data / "c", 1), (data / "a", 5), (data / "b", 2)]), on_mismatch="adapt")
    loader.load_state_dict(state)
    assert [digest(batch) for batch in islice(loader, 30)] == expected[30:]


@pytest.mark.parametrize("change", ["reweight", "reorder", "move", "content", "one", "encoder that yields several"])
def test_adapting_to(data: Path, tmp_path: Path, change: str) -> None:
    for name in "abc":
        shutil.copytree(data / name, tmp_path / name)
    encoder = SeveralEncoder() if change.startswith("encoder") else None
    before = mixed(tmp_path, [(tmp_path / "a", 2), (tmp_path / "b", 1)], encoder)
    (loader,) = loaders_of(before, 1, 0)
    first = by_leaf([loader], 50)
    state = loader.save_state_rank()
    unchanged = [batch.__restore_key__ for batch in islice(loader, 30)]
    source: Any = [(tmp_path / "a", 2), (tmp_path / "b", 1)]
    if change == "reweight":
        source = [(tmp_path / "a", 1), (tmp_path / "b", 9)]
    elif change == "reorder":
        source.reverse()
    elif change == "move":
        source[0] = ((tmp_path / "a").rename(tmp_path / "elsewhere"), 2)
    elif change == "content":
        shutil.rmtree(tmp_path / "a")
        text_dataset(tmp_path / "a", train=[6, 6])
    elif change == "one":
        source = tmp_path / "b"
    elif encoder:
        source.append((tmp_path / "c", 1))
    after = mixed(tmp_path, source, encoder)
    (resumed,) = loaders_of(after, 1, 2)
    resumed.restore_state_rank(state, on_mismatch="adapt")
    if change in ("reorder", "move"):  # the same content: no change at all, adapting or not
        assert [batch.__restore_key__ for batch in islice(resumed, 30)] == unchanged
        return
    second = by_leaf([resumed], 50)
    if encoder:
        drawn = {lane: state.draw for lane, state in read_lanes(state).items()}
        assert all(s.taken == 0 or s.draw > drawn[lane] for lane, s in read_lanes(resumed.save_state_rank()).items())
        return
    begun = before if change == "one" else after  # a dataset that is left alone stays dealt as in the mix
    whole = {name: per_lane(rows) for name, rows in by_leaf(loaders_of(begun, 1, 0), 350).items()}
    follows(per_lane(first["b"]), per_lane(second["b"]), whole["b"])
    if change == "content":
        follows({}, per_lane(second["a"]), whole["a"])
    if change == "reweight":
        assert len(second["b"]) == pytest.approx(90, abs=24)


def test_a_blend_by_repetitions_begins_an_epoch_where_it_is_adapted(data: Path) -> None:
    def epochized(**repetitions: float) -> Any:
        entries = [{"path": f"./{name}", "repetitions": times} for name, times in repetitions.items()]
        return mixed(data, metadataset(data, train={"blend_epochized": entries}), batch_size=1)

    (loader,) = loaders_of(epochized(a=1, b=1), 1, 0)
    sum(1 for _ in islice(loader, 50))
    (resumed,) = loaders_of(epochized(b=1, c=2), 1, 0)
    resumed.restore_state_rank(loader.save_state_rank(), on_mismatch="adapt")
    rows = by_leaf([resumed], 10 * 24)
    counts = {name: Counter(lane for lane, _, _ in found) for name, found in rows.items()}
    # 30 + 24 draws an epoch: each lane has had a whole epoch of the new mix, and each leaf its share of it.
    blend = plan_run(resumed.spec, resumed.config, 24).blend
    order = [Path(leaf.dataset.path).name for leaf in resumed.spec.ordered]
    for lane in range(24):
        expected = dict(zip(order, blend.counts(lane, 10).tolist(), strict=True))  # type: ignore[union-attr]
        assert {name: counts[name][lane] for name in order} == expected


def test_the_data_module_adapts_if_told_to(data: Path) -> None:
    def module(source: Any, **kwargs: Any) -> EnergonMultiModalDataModule:
        settings = {"micro_batch_size": 2, "num_workers": 0, "num_lanes": 24, "shuffle_buffer_size": 4}
        return EnergonMultiModalDataModule(
            source, None, None, task_encoder=TensorEncoder(), max_samples_per_sequence=3, **settings, **kwargs
        )

    first = module(Blender([(data / "a", 1), (data / "b", 1)]))
    next(first.train_dataloader())
    state = first.state_dict()
    other = Blender([(data / "c", 1), (data / "b", 1)])
    refusing = module(other)
    refusing.load_state_dict(state)
    with pytest.raises(DatasetMismatchError):
        refusing.train_dataloader()
    adapting = module(other, on_mismatch="adapt")
    adapting.load_state_dict(state)
    next(adapting.train_dataloader())


def test_a_dataset_alone_goes_on_as_it_was_dealt_when_it_becomes_part_of_a_mix(data: Path) -> None:
    """Alone it is dealt in microbatches, in a mix one by one: what has begun stays as it is, and so do its epochs."""
    alone, mix = mixed(data, data / "b"), mixed(data, [(data / "a", 1), (data / "b", 3)])
    whole = per_lane(by_leaf(loaders_of(alone, 1, 0), 300)["b"])
    (loader,) = loaders_of(alone, 1, 0)
    before = per_lane(by_leaf([loader], 31)["b"])
    (mixing,) = loaders_of(mix, 1, 0)
    mixing.restore_state_rank(json.loads(json.dumps(loader.save_state_rank())), on_mismatch="adapt")
    between = per_lane(by_leaf([mixing], 57)["b"])
    follows(before, between, whole)
    # A state of the mix brings it along, and so does one without the other dataset.
    (resumed,) = loaders_of(mix, 1, 0, state=mixing.save_state_rank())
    (single,) = loaders_of(alone, 1, 0)
    single.restore_state_rank(mixing.save_state_rank(), on_mismatch="adapt")
    joint = {lane: before.get(lane, []) + between.get(lane, []) for lane in whole}
    for loader in (resumed, single):
        follows(joint, per_lane(by_leaf([loader], 60)["b"]), whole)
    # Begun in the mix, it is dealt otherwise.
    assert per_lane(by_leaf(loaders_of(mix, 1, 0), 60)["b"])[1][:3] != whole[1][:3]


def test_how_a_loader_dealt_before_does_not_matter_to_a_state(data: Path) -> None:
    """A loader that is given one state after the other goes on as one that never had the first."""
    states = []
    for name in "ab":
        (loader,) = loaders_of(mixed(data, data / name), 1, 0)
        by_leaf([loader], 31)
        states.append(loader.save_state_rank())
    mix = mixed(data, [(data / "a", 1), (data / "b", 1)])
    (fresh,), (used,) = loaders_of(mix, 1, 0), loaders_of(mix, 1, 0)
    used.restore_state_rank(states[0], on_mismatch="adapt")
    for loader in (fresh, used):
        loader.restore_state_rank(states[1], on_mismatch="adapt")
    assert by_leaf([used], 200) == by_leaf([fresh], 200)


# Changes of a packed run, wherever it was stopped before -------------------------------------------------------------


def changed_run(data: Path, encoder: str, change: str, stop: int | None) -> tuple[Any, list[str]]:
    """Run 80 steps, stopped once if at all, with a change after the 24th; return where it holds, and the digests."""
    mix = [(data / "a", 1), (data / "b", 1)]

    def opened(mix: Any) -> Any:
        return loaders_of(mixed(data, mix, ENCODERS[encoder](), **NEEDED.get(encoder, {})), 1, 0, num_lanes=8)[0]

    loader = opened(mix)
    start: Any = None
    found: list[str] = []
    for step in range(80):
        if step == stop:
            (loader,) = loaders_of(loader.spec, 1, 0, num_lanes=8, state=loader.save_state_rank())
        if step == 24 and change.startswith("ban"):
            keys = [f"{number:05d}" for number in range(0, 400, 2)]
            start = loader.ban(keys, from_draw=30 if change == "ban long ago" else None, ignore_unknown=True)
        elif step == 24 and change == "mix":
            state = loader.save_state_rank()
            loader = opened([*mix, (data / "c", 3)])
            loader.restore_state_rank(state, on_mismatch="adapt")
            start = state["lanes"]
        found.append(digest(loader.deliver()))
    return start, found


@pytest.mark.parametrize("encoder", ["packing", "prepost", "lengths", "grouping"])
def test_another_mix_holds_from_the_same_draw_wherever_the_run_was_stopped(data: Path, encoder: str) -> None:
    """A resumed lane used to fill its pack buffer later, so that it had made fewer draws."""
    whole = changed_run(data, encoder, "mix", None)
    for stop in (16, 23):
        assert changed_run(data, encoder, "mix", stop) == whole


def test_a_ban_from_a_draw_that_was_made_names_the_first_one_left(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    start, _ = changed_run(data, "packing", "ban", None)
    caplog.clear()
    changed_run(data, "packing", "ban long ago", None)
    assert f"all draws before global draw {start}, so from_draw=30 bans from there on" in caplog.text

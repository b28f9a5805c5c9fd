"""Ranks that load only what they run: the global batches, states and resumes are those without balance."""

from __future__ import annotations

import json
import logging
import os
import signal
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from engine import config_of, loaders_of
from forked import on_gloo
from made import made_once
from sharing import (
    COST,
    LANES,
    G,
    Sized,
    as_it_comes,
    numbers_of,
    open_shared,
    run_shared,
    seen,
    sets_of,
    size_of_number,
    sized_dataset,
    write_sized,
)
from workers import worker_pids

from energon_bridge import (
    BatchCost,
    ColumnCost,
    EnergonDataloader,
    Packer,
    TextSample,
    get_savable_loader,
    make_balance,
)
from energon_bridge.compat.conventions import EnergonConventions
from energon_bridge.core.errors import (
    BalanceError,
    ConfigurationError,
    EnergonError,
    FatalSampleError,
    MissingRankError,
    SettingMismatchError,
    StepMismatchError,
    WrongUseError,
)
from energon_bridge.core.loader.document import read_lanes, read_leaves
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.run_plan import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.stream.reader import LeafReader
from energon_bridge.tools.cli.main import main
from energon_bridge.trainers.replica.balance import Balance, balanced
from energon_bridge.trainers.replica.balanced import OwnShareLoader

STEPS = 6

data = made_once(write_sized)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "energon_bridge")


def close(loaders: list[Any]) -> None:
    for loader in loaders:
        loader.close()


def states_of(loaders: list[Any]) -> Any:
    return merge([loader.save_state_rank() for loader in loaders])


def test_global_batches_counters_and_draws_are_those_without_balance(data: Path) -> None:
    """That a run goes on with it and without it, on any ranks, is what the chains of balance show."""
    dataset = sized_dataset(data, "plain")
    (plain,) = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    for _ in range(STEPS * G):
        plain.deliver()
    loaders = open_shared(dataset, 4, 2)
    found = run_shared(loaders, STEPS)
    assert sets_of(found) == as_it_comes(dataset, STEPS)
    states = plain.save_state_rank(), states_of(loaders)
    assert read_lanes(states[0]) == read_lanes(states[1])
    assert read_leaves(states[0]) == read_leaves(states[1])
    numbers = loaders[0].metrics()
    assert numbers["balance_own_share"] == 1
    assert numbers["balance_step"] - 1 < 0.8 * (numbers["balance_step_before"] - 1)
    close([plain, *loaders])


def test_bytes_are_those_of_the_samples_delivered_with_and_without_a_plan(data: Path) -> None:
    """A tar has a block for the header of a text and one for the text, in plans and without, and after resumes."""
    dataset = sized_dataset(data, "packed mix")

    def run(planned: bool, steps: int, state: Any = None) -> Any:
        (loader,) = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
        if state is not None:
            loader.restore_state_rank(state)
        shared = balanced(loader, Balance(cost=COST, group=None)) if planned else loader
        if planned:
            run_shared([shared], steps)
        else:
            for _ in range(steps * G):
                shared.deliver()
        state = shared.save_state_rank()
        close([shared])
        for leaf in read_leaves(state):
            counted = leaf["counts"]
            assert counted["bytes"] == 1024 * counted["samples"]
        return state

    for first, second in product((False, True), repeat=2):
        run(second, STEPS, run(first, STEPS))


def test_a_loader_that_was_read_or_restored_before_is_balanced_from_there(data: Path) -> None:
    """As if the state came after; one rank's state is not all lanes, and a run keeps its window."""
    dataset = sized_dataset(data, "packed mix")
    expected = as_it_comes(dataset, 5)
    (alone,) = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    for _ in range(3 * G):
        alone.deliver()
    state = alone.save_state_rank()
    two = loaders_of(dataset, 2, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    for loader in two:
        loader.restore_state_rank(state)
    with pytest.raises(MissingRankError, match="this rank needs lanes"):
        balanced(two[0], Balance(cost=COST, group=None))
    with pytest.raises(SettingMismatchError, match="window"):
        balanced(alone, Balance(cost=COST, group=None, window=2))
    (alone,) = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    alone.restore_state_rank(state)
    after = balanced(alone, Balance(cost=COST, group=None))
    assert sets_of(run_shared([after], 2)) == expected[3:]
    assert after.save_state_rank()["microbatches"] == 5 * G
    close([after, *two])


def test_a_rank_reads_its_share_and_no_more(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the readers: the samples of its microbatches, and the indexes of the shards."""
    asked: list[int] = []
    read = LeafReader.read
    monkeypatch.setattr(
        LeafReader, "read", lambda self, indices, *more: (asked.extend(indices.tolist()), read(self, indices, *more))[1]
    )
    for kind in ("plain", "packed"):
        loaders = open_shared(sized_dataset(data, kind), 4)
        for loader in loaders:
            asked.clear()
            delivered = [number for _ in range(STEPS * G // 4) for number in numbers_of(loader.deliver())]
            assert sorted(asked) == sorted(delivered)
        close(loaders)


def test_a_sample_that_fails_is_left_out_on_all_topologies(data: Path) -> None:
    """The plan stays: nothing else moves, and the counters say so."""
    bad = (3, 40, 77)
    good = sized_dataset(data, "plain")
    reference = run_shared(open_shared(good, 1), 8)
    dataset = sized_dataset(data, "plain", bad=bad)
    expected = None
    for ranks, workers in ((1, 0), (4, 3)):
        loaders = open_shared(dataset, ranks, workers)
        found = run_shared(loaders, 8)
        expected = expected or sets_of(found)
        assert sets_of(found) == expected
        errors = sum(row["counts"]["errors"] for row in read_leaves(states_of(loaders)))
        lost = [n for step in reference for rank in step for batch in rank for n in batch.numbers if n in bad]
        assert errors == len(lost) > 0
        kept = sorted(n for step in found for rank in step for batch in rank for n in batch.numbers)
        everything = sorted(n for step in reference for rank in step for batch in rank for n in batch.numbers)
        assert kept == [n for n in everything if n not in bad]
        close(loaders)


def test_a_microbatch_of_which_nothing_is_left_is_an_error(data: Path) -> None:
    loaders = open_shared(sized_dataset(data, "plain", bad=range(20), batch_size=1), 2)
    with pytest.raises(FatalSampleError, match=r"is empty.*cannot replace them\. Ban these"):
        run_shared(loaders, 12)
    close(loaders)


def test_an_encoder_that_disagrees_with_the_columns_is_named(data: Path) -> None:
    loaders = open_shared(sized_dataset(data, "packed", wrong=33), 2)
    with pytest.raises(FatalSampleError, match=r"by its columns it has \d+ tokens, but the encoded sample has \d+"):
        run_shared(loaders, 12)
    close(loaders)


# Changes while the run goes on ---------------------------------------------------------------------------------------


def changed_weights(loader: Any) -> int:
    return int(loader.set_weights([1, 9], from_draw=4 * G * 2))


def test_bans_are_counted_as_without_balance(data: Path) -> None:
    dataset = sized_dataset(data, "packed mix")
    (plain,) = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    loaders = open_shared(dataset, 4, 2)
    for loader in (plain, *loaders):
        loader.ban([f"{number:05d}" for number in range(0, 50, 3)], from_draw=3 * G * 2)
    for _ in range(18 * G):
        plain.deliver()
    run_shared(loaders, 18)
    one, other = (read_leaves(state)[0]["counts"] for state in (plain.save_state_rank(), states_of(loaders)))
    assert (one["samples"], one["banned"]) == (other["samples"], other["banned"])
    assert one["banned"] > 0
    close([plain, *loaders])


def test_seeking_is_that_without_balance(data: Path) -> None:
    dataset = sized_dataset(data, "mix")
    loaders = open_shared(dataset, 2)
    for loader in loaders:
        loader.seek(3 * G // 2)
    assert sets_of(run_shared(loaders, 2)) == as_it_comes(dataset, 5)[3:]
    with pytest.raises(StepMismatchError, match="is at microbatch 10, in the middle of a global batch of 8"):
        loaders[0].seek(5)
    close(loaders)


@pytest.mark.parametrize(("kind", "window"), [("mix", 1), ("plain", 3)])
def test_which_names_the_rank(kind: str, window: int, data: Path, tmp_path: Path) -> None:
    """From the mix and from a state, before it and after it."""
    dataset = sized_dataset(data, kind)
    loaders = open_shared(dataset, 4, 1, window=window)
    steps = [[loader.deliver().__restore_key__[3] for loader in loaders] for _ in range(2 * 5)]
    states = [loader.save_state_rank() for loader in loaders]
    steps += [[loader.deliver().__restore_key__[3] for loader in loaders] for _ in range(2 * 6)]
    close(loaders)
    files = []
    for rank, state in enumerate(states):
        files.append(tmp_path / f"{rank}.json")
        files[-1].write_text(json.dumps(state))
    mix = tmp_path / "mix.yaml"
    text = {"path": str(data / "a")}
    if kind == "mix":
        leaves = [{"path": str(data / "a"), "weight": 2}, {"path": str(data / "b"), "weight": 1, "filter": "size > 2"}]
        text = {"blend": leaves}
    mix.write_text(
        json.dumps({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": text}})
    )
    shared = ["--balance", "sharing:COST", "--world-size", "4", "--json", "--global-batch-size", str(2 * G)]
    options = ["--batch-size", "2", "--num-lanes", str(LANES), "--shuffle-buffer-size", "5"]
    options += ["--max-samples-per-sequence", "4", "--parallel-shard-iters", "3", "--balance-window", str(window)]
    for arguments in ([str(mix), *options], [*map(str, files), "--mix", str(mix)]):
        for step in (0, 1, 5, 10):
            found = CliRunner().invoke(main, ["which", *arguments, *shared, "--step", str(step)])
            assert found.exit_code == 0, found.output
            named = json.loads(found.output)["microbatches"]
            keys = [tuple(tuple(sample["restore_key"]) for sample in one["samples"]) for one in named]
            turns = steps[step * G // 4 : (step + 1) * G // 4]
            assert keys == [tuple(map(tuple, rank)) for ranks in turns for rank in ranks]
    of_state = [*map(str, files), "--mix", str(mix), "--world-size", "4", "--global-batch-size", str(2 * G)]
    for arguments, message in (
        (["--step", "1", "--balance", "sharing:G"], "must name a ColumnCost, got int"),
        (["--step", "1", "--balance", "sharing"], "expected MODULE:NAME"),
        (["--microbatch", "1", "--balance", "sharing:COST"], "give --step, not --microbatch"),
        (
            ["--step", "1", "--balance", "sharing:COST", "--balance-window", "2"],
            f"balance_window={window}, this run has",
        ),
        (["--step", "1"], "give the ColumnCost of the run" if window > 1 else ""),
    ):
        found = CliRunner().invoke(main, ["which", *of_state, *arguments])
        assert message in " ".join(found.output.split())


# Windows -------------------------------------------------------------------------------------------------------------


def test_a_window_has_the_same_microbatches_on_any_ranks(data: Path) -> None:
    """Cut anew, so that even ranks with one microbatch each are even; a run goes on within a window on other ranks."""
    dataset = sized_dataset(data, "packed")
    came = as_it_comes(dataset, 12)
    reference = sets_of(run_shared(open_shared(dataset, 1, window=4), 12))
    assert reference != came
    for first in range(0, 12, 4):
        cut, whole = (sorted(chain.from_iterable(sets[first : first + 4])) for sets in (reference, came))
        assert cut == whole
    for ranks, workers in ((G, 0),):
        loaders = open_shared(dataset, ranks, workers, window=4)
        found = run_shared(loaders, 6)
        state = states_of(loaders)
        later = open_shared(dataset, 4, state=state, window=4)
        assert sets_of(found + run_shared(later, 6)) == reference
        numbers = loaders[0].metrics()
        assert numbers["balance_step"] - 1 < 0.6 * (numbers["balance_step_before"] - 1)
        close([*loaders, *later])


def test_another_window_is_refused(data: Path) -> None:
    dataset = sized_dataset(data, "mix")
    loaders = open_shared(dataset, 2, window=4)
    run_shared(loaders, 4)
    state = states_of(loaders)
    named = (
        r"saved with balance_window=4, this run has balance_window={}: which samples a global batch has depends on it"
    )
    with pytest.raises(SettingMismatchError, match=named.format(2)):
        open_shared(dataset, 2, window=2, state=state)
    with pytest.raises(SettingMismatchError, match=named.format(1)):
        open_shared(dataset, 2, state=state)
    with pytest.raises(SettingMismatchError, match=named.format(1)):
        as_it_comes(dataset, 1, state=state)
    with pytest.raises(SettingMismatchError, match="saved with balance_window=1, this run has balance_window=4"):
        open_shared(dataset, 2, window=4, state=states_of(open_shared(dataset, 2)))
    other = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    cost = ColumnCost(tokens="size * size")
    with pytest.raises(
        SettingMismatchError, match=r"balance_window_cost=.*\(size\).*has balance_window_cost=.*size \* size"
    ):
        balanced(other[0], Balance(cost=cost, group=None, window=4)).restore_state_rank(state)
    close(loaders)


def test_weights_and_bans_change_after_whole_windows(data: Path) -> None:
    loaders = open_shared(sized_dataset(data, "mix"), 2, window=3)
    run_shared(loaders, 2)
    with pytest.raises(WrongUseError, match="2 of 3 global batches of this window were delivered: with balance_wi"):
        loaders[0].set_weights([1, 9])
    run_shared(loaders, 1)
    for loader in loaders:
        changed_weights(loader)
    close(loaders)


# What cannot be ------------------------------------------------------------------------------------------------------


def test_a_state_needs_all_lanes_and_whole_global_batches(data: Path) -> None:
    dataset = sized_dataset(data, "plain")
    loaders = open_shared(dataset, 2)
    run_shared(loaders, 1)
    with pytest.raises(MissingRankError, match="The states of some ranks are missing"):
        open_shared(dataset, 2, state=loaders[0].save_state_rank())
    (plain,) = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    plain.deliver()
    with pytest.raises(StepMismatchError, match="at microbatch 1, in the middle of a global batch of 8"):
        open_shared(dataset, 2, state=plain.save_state_rank())
    close([*loaders, plain])


class Several(Sized):
    def encode_sample(self, sample: TextSample) -> Any:
        for _ in range(2):
            yield super().encode_sample(sample)


class SeveralByChance(Sized):
    def encode_sample(self, sample: TextSample) -> Any:
        return (one for one in [Sized.encode_sample(self, sample)] * 2)


class Alike(Sized):
    def batch_group_criterion(self, sample: Any) -> tuple[Any, None]:
        return 0, None


class Unpacked(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.packer = None  # type: ignore[assignment]


def opened(dataset: Any, cost: Any = COST, **kwargs: Any) -> Any:
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=LANES, microbatches_per_global_batch=G)
    return balanced(loader, Balance(cost=cost, group=None, **kwargs))


def test_what_cannot_be_planned_is_exchanged_or_refused_by_name(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    several = sized_dataset(data, "plain", task_encoder=Several())
    with pytest.raises(ConfigurationError, match=r"cannot load their own share, since encode_sample of Several is a"):
        opened(several, own_share=True)
    with pytest.raises(ConfigurationError, match="since Alike batches by groups"):
        opened(sized_dataset(data, "plain", task_encoder=Alike()), own_share=True)
    with pytest.raises(ConfigurationError, match="since the loader stands in for megatron-energon"):
        opened(sized_dataset(data, "plain").with_settings(conventions=EnergonConventions()), own_share=True)
    with caplog.at_level(logging.INFO, "energon_bridge"):
        assert isinstance(opened(several), SavableDataLoader)  # one rank has nothing to exchange
        assert isinstance(opened(sized_dataset(data, "plain")), OwnShareLoader)
    assert "own shares are not planned: encode_sample of Several is a generator" in caplog.text
    assert "every rank loads only the microbatches that it runs, planned from columns" in caplog.text
    later = opened(sized_dataset(data, "plain", task_encoder=SeveralByChance()))
    with pytest.raises(FatalSampleError, match="encode_sample of SeveralByChance made 2 samples from one"):
        later.deliver()
    later.close()


@pytest.mark.parametrize(
    ("kind", "cost", "message"),
    [
        ("plain", ColumnCost(tokens="length"), r"no column 'length'.*Columns: size"),
        (
            "plain",
            ColumnCost(tokens="size - 5"),
            r"'size - 5': gives -\d+\.0 for sample \d+, expected a number of at least 0",
        ),
        ("plain", ColumnCost(tokens="size > 5"), None),
        ("plain", ColumnCost(tokens="'a'"), "gives a string, expected numbers"),
        ("packed", ColumnCost(tokens="size * 3"), r"has \d+ tokens by 'size \* 3'; expected a whole number of at most"),
        ("packed", ColumnCost(tokens="size / 2"), r"has [\d.]+ tokens by 'size / 2'; expected a whole number"),
        ("packed", ColumnCost(tokens="size", sizes={"pixels": "1"}), "limits tokens, samples, but sizes are given for"),
    ],
)
def test_costs_that_columns_do_not_give(kind: str, cost: ColumnCost, message: str | None, data: Path) -> None:
    dataset = sized_dataset(data, kind)
    if message is None:
        opened(dataset, cost).close()
        return
    with pytest.raises(EnergonError, match=message):
        opened(dataset, cost)


@pytest.mark.parametrize(
    ("kind", "cost", "kept"),
    [
        ("plain", ColumnCost(tokens="size - 5"), "size >= 5"),
        ("packed", ColumnCost(tokens="size * 3"), "size * 3 <= 20"),
    ],
)
def test_samples_that_a_filter_leaves_out_need_no_cost(kind: str, cost: ColumnCost, kept: str, data: Path) -> None:
    with pytest.raises(EnergonError):
        opened(sized_dataset(data, kind), cost)
    opened(sized_dataset(data, kind, filter=kept), cost).close()


def test_an_encoder_that_packs_needs_its_packer(data: Path) -> None:
    dataset = sized_dataset(data, "packed", task_encoder=Unpacked())
    with pytest.raises(ConfigurationError, match="Unpacked packs, but has no `packer`"):
        opened(dataset)
    packer: Packer[Any] = Packer(limits={"tokens": 20}, size_of=len)
    assert isinstance(opened(dataset, ColumnCost(tokens="size", packer=packer)), OwnShareLoader)
    with pytest.raises(ConfigurationError, match=r"ColumnCost: patches must be a column or an expression"):
        ColumnCost(tokens="size", patches=" ")


@pytest.mark.parametrize("padded", [True, False])
def test_a_microbatch_costs_what_its_rows_do(padded: bool, data: Path) -> None:
    """Of rows that are padded, as much as the longest; in the unit of the weights."""
    weights = BatchCost(tokens=2.0, attention=0.5, patches=3.0)
    cost = ColumnCost(tokens="size", patches="size // 3", weights=weights, padded=padded)
    loader, expected = opened(sized_dataset(data, "plain"), cost), 0.0
    for _ in range(G):
        sizes = np.array([size_of_number(number) for number in numbers_of(loader.deliver())], dtype=float)
        tokens = np.full(len(sizes), sizes.max()) if padded else sizes
        expected += float((2 * tokens + 0.5 * tokens**2 + 3 * (sizes // 3)).sum())
    assert loader.metrics()["balance_cost"] == pytest.approx(expected, rel=1e-6)
    loader.close()


# On real ranks -------------------------------------------------------------------------------------------------------


def open_real(dataset: DatasetSpec, rank: int, ranks: int, *, cost: ColumnCost = COST) -> EnergonDataloader:
    config = config_of(ranks, 2, rank, num_lanes=LANES, microbatches_per_global_batch=G)
    loader = get_savable_loader(dataset, worker_config=config)
    return EnergonDataloader(loader, balance=make_balance(cost, timeout_seconds=60, own_share=True))


def test_processes_whose_workers_die_and_states_of_single_ranks(data: Path) -> None:
    """Two ranks with two workers each, which are killed; then each rank goes on from its own state."""
    dataset = sized_dataset(data, "packed mix")

    def run(rank: int) -> Any:
        loader = open_real(dataset, rank, 2)
        found = [seen(next(loader)) for _ in range(G)]
        own, whole = loader.save_state(), loader.state_dict()
        found.append(seen(next(loader)))  # the workers are replaced within a global batch
        for worker in worker_pids():
            os.kill(worker, signal.SIGKILL)
        found += [seen(next(loader)) for _ in range(G - 1)]
        assert loader.metrics()["worker_restarts"] > 0
        for state in (own, whole):
            loader.restore_state(state)
            assert [seen(next(loader)) for _ in range(G)] == found[G:]
        loader.close()
        return found

    results = on_gloo(2, run)
    steps = [[rank[4 * step : 4 * step + 4] for rank in results] for step in range(4)]
    assert sets_of(steps) == as_it_comes(dataset, 4)


def test_ranks_that_would_plan_differently_are_told(data: Path) -> None:
    dataset = sized_dataset(data, "plain")

    def run(rank: int) -> None:
        loader = open_real(dataset, rank, 2, cost=ColumnCost(tokens="size + 1" if rank else "size"))
        with pytest.raises(BalanceError, match="ranks 0 and 1 read different columns or have different costs"):
            next(loader)
        loader.close()
        loader = open_real(dataset, rank, 2)
        loader.loader.seek(G // 2 * rank)
        with pytest.raises(StepMismatchError, match=r"at different microbatches of the run \(0, 8\)"):
            next(loader)
        loader.close()

    on_gloo(2, run)

"""Ranks exchange the microbatches of a global batch: the sets of all global batches stay, the loads become even."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import config_of, digest, text_dataset
from forked import on_gloo
from mixing import metadataset
from multimodal import PixelProcessor, WordTokenizer
from workers import worker_pids

from energon_bridge import BatchCost, EnergonDataloader, TextSample, get_savable_loader, get_train_dataset, make_balance
from energon_bridge.core.errors import (
    BalanceError,
    ConfigurationError,
    FatalSampleError,
    StepMismatchError,
    WrongUseError,
)
from energon_bridge.models.conversations.conversation import Document, Piece
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder

G, STEPS, SEQ_LENGTH = 8, 4, 64
COST = BatchCost(tokens=1.0, attention=0.2)


class Encoder(MultiModalTaskEncoder):
    """Texts of 1 to 50 words; refuses one sample, if told to."""

    def __init__(self, bad: str | None = None) -> None:
        super().__init__(WordTokenizer(), PixelProcessor(), None, SEQ_LENGTH)
        self.bad = bad
        self.register_encoder(TextSample, self.write)

    def write(self, sample: TextSample, config: Any) -> Document:
        if sample.__key__ == self.bad:
            raise FatalSampleError("this one is bad")
        return Document(pieces=[Piece("word " * (int(sample.__key__) * 37 % 50 + 1), learned=True)])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    text_dataset(folder / "a", train=[40, 40])
    text_dataset(folder / "b", train=[30, 30])
    return folder


def open_data(
    data: Path, ranks: int, rank: int, *, workers: int = 0, kind: str = "plain", balance: bool = True, **settings: Any
) -> EnergonDataloader:
    config = config_of(ranks, workers, rank=rank, num_lanes=16, microbatches_per_global_batch=G)
    source: Any = data / "a"
    if kind == "mix":
        source = metadataset(data, train={"blend": [{"path": "./a", "weight": 2}, {"path": "./b", "weight": 1}]})
    options: dict[str, Any] = {"task_encoder": Encoder(settings.get("bad")), "batch_size": 2}
    if kind == "packed":
        options |= {"packing_buffer_size": 20, "batch_size": 1}
    dataset = get_train_dataset(source, worker_config=config, max_samples_per_sequence=20, **options)
    shared = make_balance(settings.get("cost", COST), timeout_seconds=60) if balance else None
    return EnergonDataloader(get_savable_loader(dataset), balance=shared)


def seen(batch: Any) -> tuple[str, float]:
    return digest(batch), COST(batch)


def global_batches(results: list[list[Any]], ranks: int) -> list[list[Any]]:
    """Return what all ranks delivered, a sorted list for each global batch."""
    rounds = G // ranks
    steps = len(results[0]) // rounds
    return [sorted(entry for r in results for entry in r[rounds * n : rounds * (n + 1)]) for n in range(steps)]


def take(loader: EnergonDataloader, global_batches: int, ranks: int) -> list[Any]:
    return [seen(next(loader)) for _ in range(global_batches * G // ranks)]


@pytest.fixture(scope="module")
def unbalanced(data: Path) -> dict[str, list[list[Any]]]:
    """The global batches of each kind on one rank, without balance."""
    found = {}
    for kind in ("plain", "mix", "packed"):
        loader = open_data(data, 1, 0, kind=kind, balance=False)
        found[kind] = global_batches([take(loader, 2 * STEPS, 1)], 1)
        loader.close()
    return found


@pytest.mark.parametrize(("kind", "ranks", "workers"), [("plain", 1, 0), ("mix", 2, 2), ("packed", 4, 0)])
def test_the_sets_are_those_without_balance_and_the_loads_even(
    kind: str, ranks: int, workers: int, data: Path, unbalanced: dict[str, Any]
) -> None:
    def run(rank: int) -> Any:
        loader = open_data(data, ranks, rank, workers=workers, kind=kind)
        found = take(loader, STEPS, ranks)
        numbers = loader.metrics()
        loader.close()
        return found, numbers

    results = on_gloo(ranks, run)
    found = [batches for batches, _ in results]
    assert global_batches(found, ranks) == unbalanced[kind][:STEPS]
    if ranks == 1:
        return
    costs = np.array([[cost for _, cost in batches] for batches in found]).reshape(ranks, STEPS, -1).sum(2)
    numbers = results[0][1]
    step = float((costs.max(0) / costs.mean(0)).mean())
    assert step < (1.03 if ranks == 2 else 1.2)
    assert step < 1 + 0.5 * (numbers["balance_step_before"] - 1)
    assert 1 <= numbers["balance_round"] < numbers["balance_round_before"]
    # One global batch more than was delivered has been exchanged, or is about to be.
    assert numbers["balance_step"] == pytest.approx(step, abs=0.03)
    assert 0 < numbers["balance_moved"] < 1
    # Counters are those of what was delivered.
    assert sum(numbers["samples"] for _, numbers in results) >= STEPS * G
    assert len({numbers["balance_step"] for _, numbers in results}) <= 2


def test_a_run_goes_on_over_any_numbers_of_ranks_and_lost_workers(data: Path, unbalanced: dict[str, Any]) -> None:
    """A mix on 4, 1, 2 and 2 ranks, with and without balance; the workers of the last ones are killed."""

    def stop(rank: int, ranks: int, workers: int, balance: bool, steps: int, state: Any) -> Any:
        loader = open_data(data, ranks, rank, kind="mix", workers=workers, balance=balance)
        if state is not None:
            loader.load_state_dict(state)
        batches = take(loader, 1, ranks)
        for worker in worker_pids():
            os.kill(worker, signal.SIGKILL)
        batches += take(loader, steps - 1, ranks)
        return batches, loader.state_dict(), loader.metrics()["worker_restarts"], loader.close()

    state: Any = None
    found: list[Any] = []
    for ranks, workers, balance, steps in [(4, 0, True, 2), (1, 0, True, 1), (2, 0, False, 1), (2, 1, True, 3)]:
        arguments = {"ranks": ranks, "workers": workers, "balance": balance, "steps": steps, "state": state}
        results = on_gloo(ranks, partial(stop, **arguments))
        found += global_batches([batches for batches, *_ in results], ranks)
        state = results[0][1]
        assert all(restarts > 0 for _, _, restarts, _ in results) == (workers > 0)
    assert found == unbalanced["mix"][:7]


def changed_weights(loader: Any) -> int:
    return int(loader.set_weights([1, 9]))


def banned(loader: Any) -> int:
    with pytest.raises(ConfigurationError, match="1 of 1 keys are not in"):
        loader.ban(["nowhere"])
    return int(loader.ban([f"{number:05d}" for number in range(0, 40, 3)]))


@pytest.mark.parametrize("change", [changed_weights, banned])
def test_weights_and_bans_change_as_without_balance(data: Path, change: Any) -> None:
    """What was loaded ahead is loaded again, the ranks agree on the draw, and a resume knows the change."""

    def run(rank: int, ranks: int, balance: bool) -> Any:
        loader = open_data(data, ranks, rank, kind="mix", balance=balance)
        found = take(loader, 2, ranks)
        draw = change(loader.loader)
        state = loader.state_dict()
        found += take(loader, 2, ranks)
        loader.load_state_dict(state)
        return found, take(loader, 2, ranks), draw, loader.metrics()["banned"], loader.close()

    ((reference, again, draw, left_out, _),) = [run(0, 1, False)]
    results = on_gloo(2, partial(run, ranks=2, balance=True))
    assert {result[2] for result in results} == {draw}
    assert sum(result[3] for result in results) == left_out
    assert (left_out > 0) == (change is banned)
    assert global_batches([found for found, *_ in results], 2) == global_batches([reference], 1)
    assert global_batches([found for _, found, *_ in results], 2) == global_batches([again], 1)


def test_a_state_without_balance_goes_on_with_it(data: Path, unbalanced: dict[str, Any]) -> None:
    plain = open_data(data, 1, 0, balance=False)
    take(plain, 1, 1)
    aligned = plain.save_state()
    next(plain)
    within = plain.save_state()
    plain.close()

    def run(rank: int) -> Any:
        loader = open_data(data, 2, rank)
        with pytest.raises(StepMismatchError, match="at microbatch 9, in the middle of a global batch of 8"):
            loader.restore_state(within)
        loader.restore_state(aligned)
        return take(loader, 2, 2), loader.close()

    results = on_gloo(2, run)
    assert global_batches([found for found, _ in results], 2) == unbalanced["plain"][1:3]


def test_there_is_no_state_within_a_global_batch(data: Path) -> None:
    def run(rank: int) -> Any:
        loader = open_data(data, 2, rank)
        next(loader)
        for call in (loader.save_state, loader.state_dict):
            with pytest.raises(WrongUseError, match=r"1 of the 4 microbatches .* save it after an optimizer step"):
                call()
        for _ in range(3):
            next(loader)
        state = loader.save_state()
        loader.rewind()
        assert loader.save_state()["microbatches"] == 0
        loader.close()
        return state["microbatches"]

    assert on_gloo(2, run) == [G, G]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_cannot_load_is_named_on_all_of_them(workers: int, data: Path) -> None:
    """What was exchanged before is still delivered, and the state says so on every rank."""

    def run(rank: int) -> Any:
        loader = open_data(data, 2, rank, workers=workers, bad="00033")
        with pytest.raises((BalanceError, FatalSampleError)) as caught:
            take(loader, 100, 2)
        delivered = loader.batches
        with pytest.raises((BalanceError, FatalSampleError)):
            next(loader)  # the same global batch again
        found = type(caught.value).__name__, str(caught.value), delivered, loader.save_state()["microbatches"]
        loader.close()
        return found

    results = on_gloo(2, run)
    assert sorted(name for name, *_ in results) == ["BalanceError", "FatalSampleError"]
    failed = [name for name, *_ in results].index("FatalSampleError")
    text = results[1 - failed][1]
    assert f"data-parallel rank {failed} could not load its part of global batch" in text
    assert "FatalSampleError: " in text
    assert "this one is bad" in text
    delivered = {count for _, _, count, _ in results}
    assert delivered == {results[0][3] // 2}
    assert delivered.pop() % (G // 2) == 0


def test_a_rank_that_dies_ends_the_others(data: Path) -> None:
    def run(rank: int) -> Any:
        loader = open_data(data, 2, rank)
        take(loader, 1, 2)
        if rank == 1:
            return "died"  # the process ends, and its connections with it
        with pytest.raises(BalanceError, match=r"rank 0 of 2 cannot reach another one .* that rank has ended, or took"):
            take(loader, 20, 2)
        return "ended"

    assert on_gloo(2, run) == ["ended", "died"]


def not_sent(batch: Any) -> float:
    batch.answers = object()  # no rank can send it
    return COST(batch)


def test_a_batch_that_cannot_be_sent_is_an_error_everywhere(data: Path) -> None:
    def run(rank: int) -> Any:
        loader = open_data(data, 2, rank, cost=not_sent if rank else COST)
        with pytest.raises((BalanceError, ConfigurationError), match=r"answers is of type builtins\.object") as caught:
            take(loader, 1, 2)
        loader.close()
        return type(caught.value).__name__

    assert on_gloo(2, run) == ["BalanceError", "ConfigurationError"]


def test_ranks_at_different_global_batches_are_refused(data: Path) -> None:
    def run(rank: int) -> None:
        loader = open_data(data, 2, rank)
        loader.loader.seek(4 * rank)
        with pytest.raises(StepMismatchError, match=r"at different global batches \(0, 1\)"):
            next(loader)
        loader.close()

    on_gloo(2, run)


def test_what_cannot_be_balanced_is_refused_by_name(data: Path) -> None:
    def run(rank: int) -> None:
        balance = make_balance(COST)

        def refused(message: str, **kwargs: Any) -> None:
            settings = {"num_lanes": 16, "microbatches_per_global_batch": G} | kwargs.pop("config", {})
            dataset = get_train_dataset(
                data / "a", worker_config=config_of(2, 0, rank=rank, **settings), batch_size=2, **kwargs
            )
            with pytest.raises(ConfigurationError, match=message):
                EnergonDataloader(get_savable_loader(dataset), balance=balance)

        refused("got a finite stream", repeat=False)
        refused("got a virtual epoch", virtual_epoch_length=6)
        refused("an unknown number of microbatches", config={"microbatches_per_global_batch": None})
        refused("cannot divide a global batch of 3 microbatches", config={"microbatches_per_global_batch": 3})
        refused("2 data-parallel ranks do not divide the 17 lanes", config={"num_lanes": 17})
        with pytest.raises(ConfigurationError, match=r"needs a loader from get_savable_loader, .* got list"):
            EnergonDataloader([1, 2], balance=balance)
        with pytest.raises(ConfigurationError, match="cost must be a function of a batch"):
            make_balance(1.0)  # type: ignore[arg-type]
        loader = get_savable_loader(get_train_dataset(data / "a", worker_config=config_of(3, 0), batch_size=2))
        with pytest.raises(ConfigurationError, match="that of data-parallel rank 0 of 3"):
            EnergonDataloader(loader, balance=balance)

    on_gloo(2, run)


def test_a_cost_that_is_none_is_refused(data: Path) -> None:
    def run(rank: int) -> None:
        loader = open_data(data, 2, rank, cost=lambda batch: float("nan"))
        with pytest.raises(ConfigurationError, match="must be a finite number of at least 0, got nan"):
            next(loader)
        loader.close()

    on_gloo(2, run)

"""`keep_until_done`: what was delivered and is not done comes again after a restore, first, in order, each once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from commands import answer, output_of
from engine import (
    ENCODERS,
    InProcessLoader,
    TensorEncoder,
    config_of,
    digest,
    is_masked,
    numbers_of,
    text_dataset,
    train_dataset,
)
from forked import on_gloo
from mixing import metadataset

from energon_bridge import DefaultTaskEncoder, EnergonDataloader, SkipSample, get_savable_loader, get_val_dataset
from energon_bridge.core.errors import (
    ConfigurationError,
    MaskedMicrobatchesError,
    MissingRankError,
    SettingMismatchError,
    StateFormatError,
    WrongUseError,
)
from energon_bridge.core.loader import outstanding
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import decode_column, encode_column, sign
from energon_bridge.trainers.replica import Balance, Replica, open_loader

SHARDS = [5, 9, 1, 14, 8]
SAMPLES = sum(SHARDS)
Key = tuple[Any, ...]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("until_done")
    for name in ("text", "more"):
        text_dataset(root / name, train=SHARDS if name == "text" else SHARDS[::-1], val=SHARDS)
    return root


def loaders(dataset: DatasetSpec, ranks: int, workers: int = 0, state: Any = None, **kwargs: Any) -> list[Any]:
    made = [
        InProcessLoader(dataset, worker_config=config_of(ranks, workers, rank), keep_until_done=True, **kwargs)
        for rank in range(ranks)
    ]
    for loader in made if state is not None else ():
        loader.restore_state_rank(state)
    return made


def one(dataset: DatasetSpec, state: Any = None, **kwargs: Any) -> Any:
    return loaders(dataset, 1, state=state, **kwargs)[0]


def keys_of(batch: Any) -> list[Key]:
    """Return the keys of the samples of a batch, or of a sample that came alone."""
    key = batch["__restore_key__"] if isinstance(batch, dict) else batch.__restore_key__
    return list(key[3]) if key[0] == "Batch" else [key]


def steps_of(ranks: Sequence[Any], steps: int | None = None) -> list[list[Any]]:
    """Let all ranks deliver some steps, or the rest of a pass, in which all make as many."""
    columns = [list(islice(loader, steps)) for loader in ranks]
    assert len({*map(len, columns)}) == 1
    return [list(row) for row in zip(*columns, strict=True)]


def real(steps: list[list[Any]]) -> list[Any]:
    return [batch for step in steps for batch in step if not is_masked(batch)]


# What comes again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize(("before", "after"), [((1, 0), (1, 2)), ((4, 2), (2, 0)), ((2, 0), (3, 2)), ((3, 0), (4, 0))])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_after_a_restore_what_is_not_done_comes_first_and_in_order(
    data: Path, batch_size: int, before: tuple[int, int], after: tuple[int, int], repeat: bool
) -> None:
    """Then the run goes on as if nothing had happened, on any ranks."""
    dataset = train_dataset(data / "text", batch_size=batch_size, repeat=repeat)
    first = loaders(dataset, *before)
    steps = steps_of(first, 12 // before[0] // batch_size)
    delivered = [key for batch in real(steps) for key in keys_of(batch)]
    throw = random.Random(batch_size)
    left = [key for key in delivered if throw.random() < 0.6]
    for rank, loader in enumerate(first):
        own = [key for step in steps for key in keys_of(step[rank])]
        loader.done([key for key in own if key not in left])
    states = [json.loads(json.dumps(loader.save_state_rank())) for loader in first]
    second = loaders(dataset, *after, state=states)
    again = -(-len(left) // (after[0] * batch_size))
    came = steps_of(second, again)
    assert [key for batch in real(came) for key in keys_of(batch)] == left
    rest = real(steps_of(second, 8 if repeat else None))
    # The same run without a stop: what follows the microbatches that were delivered.
    whole = loaders(dataset, 1)[0]
    unbroken = list(islice(whole, 12 // before[0] // batch_size * before[0] + (8 * after[0] if repeat else 100)))
    assert [digest(batch) for batch in rest] == [digest(batch) for batch in unbroken[len(real(steps)) :]]
    rows = {key: noise for batch in unbroken for key, noise in zip(keys_of(batch), noises(batch), strict=True)}
    for batch in real(came):
        for key, noise in zip(keys_of(batch), noises(batch), strict=True):
            assert noise == rows[key]


def noises(batch: Any) -> list[tuple[float, ...]]:
    """Return the random numbers of each row without padding: rows have 1 + number % 3."""
    return [tuple(row[: 1 + number % 3].tolist()) for number, row in zip(numbers_of(batch), batch.noise, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_sample_of_an_epoch_is_done_once_over_many_stops(data: Path, ranks: int) -> None:
    """Stops with other ranks each time, in the middle of what comes again, too."""
    throw = random.Random(ranks)
    dataset = train_dataset(data / "text", batch_size=2, repeat=False)
    done: Counter[Key] = Counter()
    states: Any = None
    for leg in range(60):
        here = loaders(dataset, [ranks, 1, 3][leg % 3], leg % 2 * 2, states)
        size = throw.randrange(1, 4)
        steps_of(here, size)
        for loader in here:
            finished = [key for key in loader.outstanding if throw.random() < 0.3]
            loader.done(finished)
            done.update(finished)
        states = [loader.save_state_rank() for loader in here]
        if len(done) + sum(len(loader.outstanding) for loader in here) == SAMPLES:
            break
    last = one(dataset, states)
    rest = [key for batch in last for key in keys_of(batch)]
    done.update(rest)
    last.done(rest)
    assert len(done) == SAMPLES
    assert {*done.values()} == {1}
    assert last.metrics()["until_done/done"] == SAMPLES
    assert not last.outstanding


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_whose_end_was_not_seen_ends_after_a_restore(data: Path, workers: int) -> None:
    """All is done, but the loop that took the last batch was killed before it ended: it gets no second epoch."""
    dataset = train_dataset(data / "text", batch_size=10, repeat=False)
    loader = one(dataset)
    batches = iter(loader)
    for _ in range(4):  # 37 samples
        loader.done(next(batches).__restore_key__)
    unseen = json.loads(json.dumps(loader.save_state_rank()))
    assert list(batches) == []
    seen = json.loads(json.dumps(loader.save_state_rank()))
    (resumed,) = loaders(dataset, 1, workers, unseen)
    assert list(resumed) == []
    second = [key for batch in resumed for key in keys_of(batch)]
    (resumed,) = loaders(dataset, 1, workers, seen)
    assert [key for batch in resumed for key in keys_of(batch)] == second
    assert len(second) == SAMPLES
    assert {key[2] for key in second} == {1}


def test_a_prompt_at_a_time(data: Path) -> None:
    """Without batches, samples come again one by one, equal to the byte, and so does `restore_sample`."""
    dataset = train_dataset(data / "text", batch_size=None)
    loader = one(dataset)
    came = list(islice(loader, 9))
    loader.done([came[2].__restore_key__, came[5].__restore_key__])
    resumed = one(dataset, loader.save_state_rank())
    again = list(islice(resumed, 7))
    assert [*map(digest, again)] == [digest(sample) for number, sample in enumerate(came) if number not in (2, 5)]
    assert digest(next(iter(resumed))) == digest(next(iter(loader)))
    assert digest(resumed.restore_sample(again[3].__restore_key__)) == digest(again[3])


def test_a_batch_that_came_again_is_restored_by_its_key(data: Path) -> None:
    dataset = train_dataset(data / "text", batch_size=3)
    loader = one(dataset)
    first = next(iter(loader))
    loader.again(keys_of(first)[1:])
    again = next(iter(loader))
    assert keys_of(again) == keys_of(first)[1:]
    assert digest(loader.restore_sample(again.__restore_key__)) == digest(again)


def test_samples_of_several_outputs_come_again_apart(data: Path) -> None:
    dataset = train_dataset(data / "text", "several", batch_size=1)
    loader = one(dataset)
    batches = list(islice(loader, 60))
    keys = [keys_of(batch)[0] for batch in batches]
    assert any(key[3] for key in keys)
    loader.done(keys[::2])
    again = list(islice(one(dataset, loader.save_state_rank()), 30))
    assert [keys_of(batch)[0] for batch in again] == keys[1::2]
    assert [batch.noise.tolist() for batch in again] == [batch.noise.tolist() for batch in batches[1::2]]


def test_masked_microbatches_are_nobodys(data: Path) -> None:
    """One sample that comes again on four ranks gives three masked microbatches, and only its rank has it out."""
    dataset = train_dataset(data / "text", batch_size=2)
    loader = one(dataset)
    first = keys_of(next(iter(loader)))
    loader.done(first[:1])
    four = loaders(dataset, 4, state=loader.save_state_rank())
    (step,) = steps_of(four, 1)
    assert [is_masked(batch) for batch in step] == [False, True, True, True]
    assert [len(each.outstanding) for each in four] == [1, 0, 0, 0]
    with pytest.raises(WrongUseError, match="only gave a masked microbatch its shape"):
        four[1].done(step[1].__restore_key__)
    four[1].done(step[1].__restore_key__, ignore_unknown=True)
    four[0].done(step[0].__restore_key__)
    assert not is_masked(steps_of(four, 1)[0][3])


@dataclass(slots=True)
class Bare:
    """A sample without a mask."""

    __restore_key__: Any = None


class Bares(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return Bare()


def test_samples_that_cannot_be_masked_are_refused_where_they_would_be(data: Path) -> None:
    """37 samples on two ranks, one at a time."""
    dataset = train_dataset(data / "text", batch_size=None, repeat=False)
    ranks = loaders(dataset, 2)
    (*_, last) = list(ranks[1])
    assert is_masked(last)
    assert [len(list(ranks[0])), len(ranks[1].outstanding)] == [19, 18]
    bare = loaders(train_dataset(data / "text", batch_size=None, repeat=False, task_encoder=Bares()), 2)
    assert len(list(bare[0])) == 19
    with pytest.raises(ConfigurationError, match=r"fewer samples than the run has ranks.*Bare cannot carry __valid__"):
        list(bare[1])


# What the trainer says -----------------------------------------------------------------------------------------------


def test_a_sample_of_several_rollouts_is_done_with_the_last(data: Path) -> None:
    dataset = train_dataset(data / "text", batch_size=2)
    loader = one(dataset, repeats=3)
    a, b = keys_of(next(iter(loader)))
    loader.done([a, b, a])
    assert loader.outstanding == {a: 1, b: 2}
    resumed = one(dataset, json.loads(json.dumps(loader.save_state_rank())), repeats=3)
    assert resumed.outstanding == {a: 1, b: 2}
    assert keys_of(next(iter(resumed))) == [a, b]
    with pytest.raises(WrongUseError, match="is given 2 times, but 1 of its 3 rollouts are left"):
        resumed.done([b, a, a])
    assert resumed.outstanding == {a: 1, b: 2}
    resumed.done([a])
    resumed.drop([b])
    assert not resumed.outstanding
    assert resumed.metrics()["until_done/dropped"] == 1


def test_again_comes_next_and_in_the_order_of_delivery(data: Path) -> None:
    dataset = train_dataset(data / "text", batch_size=2)
    loader = one(dataset)
    keys = [key for batch in islice(loader, 4) for key in keys_of(batch)]
    loader.again([keys[6], keys[1]])
    loader.again(keys[4])  # a key alone
    loader.again(keys[1])  # is due already
    came = [keys_of(batch) for batch in islice(loader, 3)]
    assert came[:2] == [[keys[1], keys[4]], [keys[6]]]
    assert not {*came[2]} & {*keys}
    assert loader.metrics()["until_done/again"] == 3
    assert loader.metrics()["samples"] == 10  # each counts once


def test_what_is_done_before_it_comes_again_does_not_come(data: Path) -> None:
    """Rollouts that survived on a disk are done after the restore."""
    dataset = train_dataset(data / "text", batch_size=2)
    loader = one(dataset)
    keys = [key for batch in islice(loader, 3) for key in keys_of(batch)]
    resumed = one(dataset, loader.save_state_rank())
    resumed.done([list(key) for key in keys[:3]])  # as JSON has them
    resumed.drop({keys[4]})
    assert [keys_of(batch) for batch in islice(resumed, 2)] == [[keys[3]], [keys[5]]]
    assert digest(next(iter(resumed))) == digest(next(iter(loader)))


@pytest.mark.parametrize("name", ["done", "again", "drop"])
def test_a_key_that_is_not_out_is_refused_and_changes_nothing(data: Path, name: str) -> None:
    loader = one(train_dataset(data / "text", batch_size=2))
    keys = keys_of(next(iter(loader)))
    for wrong, why in (
        ([keys[0], (keys[0][0], 36, 5, 0)], f"{name}: .*36, 5, 0. is not out on rank 0"),
        (["00003"], f"{name}: .* is not a restore key"),
        ([keys[0], 7], f"{name}: 7 is not a restore key"),
    ):
        with pytest.raises(WrongUseError, match=why):
            getattr(loader, name)(wrong)
    assert list(loader.outstanding) == keys
    getattr(loader, name)([(keys[0][0], 36, 5, 0)], ignore_unknown=True)
    assert list(loader.outstanding) == keys
    getattr(loader, name)(iter(keys))
    assert list(loader.outstanding) == (keys if name == "again" else [])


def test_a_state_saved_while_samples_come_again_has_them_all(data: Path) -> None:
    dataset = train_dataset(data / "text", batch_size=2)
    loader = one(dataset)
    keys = [key for batch in islice(loader, 4) for key in keys_of(batch)]
    resumed = one(dataset, loader.save_state_rank())
    next(iter(resumed))
    later = resumed.snapshot()
    resumed.done(keys[:5])
    third = one(dataset, later())
    assert [key for batch in islice(third, 4) for key in keys_of(batch)] == keys


def test_seeking_forgets_what_is_out(data: Path) -> None:
    loader = one(train_dataset(data / "text", batch_size=2))
    first = digest(next(iter(loader)))
    loader.again(loader.outstanding)
    loader.seek(0)
    assert not loader.outstanding
    assert digest(next(iter(loader))) == first


# Samples that do not come any more -----------------------------------------------------------------------------------


def test_banned_samples_do_not_come_again(data: Path) -> None:
    dataset = train_dataset(data / "text", batch_size=2)
    loader = one(dataset)
    keys = [key for batch in islice(loader, 2) for key in keys_of(batch)]
    loader.ban([f"{keys[1][1]:05d}"])
    loader.again(keys)
    assert [keys_of(batch) for batch in islice(loader, 2)] == [[keys[0]], keys[2:]]
    assert list(loader.outstanding) == [keys[0], *keys[2:]]
    assert loader.metrics()["banned"] == 1


class Failing(TensorEncoder):
    """Fails on some samples from some time on."""

    bad: frozenset[int] = frozenset()

    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) in self.bad:
            raise SkipSample if int(sample.__key__) % 2 else ValueError("no longer")
        return super().encode_sample(sample)


def test_samples_that_fail_when_they_come_again_are_counted(data: Path) -> None:
    encoder = Failing()
    loader = one(train_dataset(data / "text", batch_size=2, task_encoder=encoder))
    keys = [key for batch in islice(loader, 3) for key in keys_of(batch)]
    before = loader.metrics()
    encoder.bad = frozenset(key[1] for key in keys[:3])
    loader.again(keys)
    assert keys_of(next(iter(loader))) == keys[3:4]
    assert list(loader.outstanding) == keys[3:]
    lost = {name: loader.metrics()[name] - before[name] for name in ("errors", "skipped", "samples")}
    odd = sum(key[1] % 2 for key in keys[:3])
    assert lost == {"errors": 3 - odd, "skipped": odd, "samples": 0}


def test_samples_of_a_dataset_that_leaves_the_mix_come_when_it_returns(data: Path) -> None:
    whole = metadataset(data, train={"blend": [{"path": "./text", "weight": 1}, {"path": "./more", "weight": 1}]})
    both = train_dataset(whole, batch_size=2)
    loader = one(both)
    keys = [key for batch in islice(loader, 6) for key in keys_of(batch)]
    alone = train_dataset(metadataset(data, train={"path": "./text"}), batch_size=2)
    identity = alone.leaves[0].identity
    own = [key for key in keys if key[0] == identity]
    assert 0 < len(own) < len(keys)
    second = one(alone, loader.save_state_rank(), on_mismatch="adapt")
    came = [key for batch in islice(second, -(-len(own) // 2)) for key in keys_of(batch)]
    assert came == own
    second.done(own)
    third = one(both, second.save_state_rank(), on_mismatch="adapt")
    rest = [key for key in keys if key[0] != identity]
    assert [key for batch in islice(third, -(-len(rest) // 2)) for key in keys_of(batch)] == rest


# Ranks ---------------------------------------------------------------------------------------------------------------


def test_ranks_share_out_what_comes_again(data: Path) -> None:
    """With `again`, and after each has restored its own state; a run of three ranks over gloo."""
    dataset = train_dataset(data / "text", batch_size=2)

    def run(rank: int) -> Any:
        config = config_of(3, 0, rank)
        loader = get_savable_loader(dataset, worker_config=config, keep_until_done=True)
        keys = [key for batch in islice(loader, 2) for key in keys_of(batch)]
        loader.again(keys[:3] if rank == 1 else [])
        came = list(islice(loader, 1))
        own = loader.save_state_rank()
        out = list(loader.outstanding)
        other = get_savable_loader(dataset, worker_config=config, keep_until_done=True)
        other.restore_state_rank(own)
        again = list(islice(other, 2))
        whole = get_savable_loader(dataset, worker_config=config, keep_until_done=True)
        whole.load_state_dict(loader.state_dict())
        assert [*map(digest, islice(whole, 2))] == [*map(digest, again)]
        return keys, came, out, again, next(iter(other)), next(iter(loader))

    found = on_gloo(3, run)
    keys = [rank[0] for rank in found]
    assert [keys_of(rank[1][0]) for rank in found] == [[keys[1][0]], [keys[1][1]], [keys[1][2]]]
    out = [key for rank in found for key in rank[2]]
    assert sorted(out) == sorted(chain.from_iterable(keys))
    in_order = [keys[rank][step * 2 + row] for step in range(2) for rank in range(3) for row in range(2)]
    again = [key for step in zip(*(rank[3] for rank in found), strict=True) for b in step for key in masked_out(b)]
    assert again == in_order
    assert [digest(rank[4]) for rank in found] == [digest(rank[5]) for rank in found]


def masked_out(batch: Any) -> list[Key]:
    return [] if is_masked(batch) else keys_of(batch)


def test_ranks_that_cannot_reach_each_other_say_what_to_do(data: Path) -> None:
    dataset = train_dataset(data / "text", batch_size=2)
    ranks = loaders(dataset, 2)
    steps_of(ranks, 1)
    states = [loader.save_state_rank() for loader in ranks]
    with pytest.raises(ConfigurationError, match=r"again: the ranks share out .*initialize torch\.distributed"):
        ranks[0].again(ranks[0].outstanding)
    with pytest.raises(ConfigurationError, match="pass the list of the states of all ranks, or initialize"):
        ranks[0].restore_state_rank(states[0])
    assert len(ranks[0].outstanding) == 2
    ranks[0].restore_state_rank(states)


@pytest.mark.parametrize("repeat", [True, False])
def test_a_state_without_some_ranks_is_refused(data: Path, repeat: bool) -> None:
    dataset = train_dataset(data / "text", batch_size=2, repeat=repeat)
    ranks = loaders(dataset, 4)
    steps_of(ranks, 1)
    states = [loader.save_state_rank() for loader in ranks]
    with pytest.raises(MissingRankError, match=r"states of all ranks|some ranks are missing"):
        one(dataset, states[:3])
    two = one(dataset, [states[2], states[0], merge(states[1:3]), states[3]])
    assert len(two.outstanding) == 8


# Opting in -----------------------------------------------------------------------------------------------------------


def test_without_it_states_are_as_they_were(data: Path) -> None:
    dataset = train_dataset(data / "text", batch_size=2)
    plain = get_savable_loader(dataset)
    next(iter(plain))
    state = plain.save_state_rank()
    assert "out" not in state
    with pytest.raises(WrongUseError, match="pass keep_until_done=True"):
        plain.done([])
    kept = one(dataset, state)
    assert not kept.outstanding
    next(iter(kept))
    with pytest.raises(SettingMismatchError, match="has 2 samples that were delivered and are not done"):
        plain.restore_state_rank(kept.save_state_rank())
    kept.done(kept.outstanding)
    plain.restore_state_rank(kept.save_state_rank())


@pytest.mark.parametrize(
    ("encoder", "changes", "why"),
    [
        ("packing", {}, "packing_buffer_size, whose rows are packs"),
        ("lengths", {}, "max_tokens_per_microbatch"),
        ("grouping", {}, "batch_group_criterion"),
    ],
)
def test_what_does_not_fit_is_refused(data: Path, encoder: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"keep_until_done .* does not go with {why}"):
        get_savable_loader(train_dataset(data / "text", encoder, **changes), keep_until_done=True)


def test_validation_and_stray_settings_are_refused(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not go with get_val_dataset"):
        get_savable_loader(get_val_dataset(data / "text", batch_size=2), keep_until_done=True)
    dataset = train_dataset(data / "text", batch_size=2)
    with pytest.raises(ConfigurationError, match="repeats=2 counts rollouts, with keep_until_done=True"):
        get_savable_loader(dataset, repeats=2)
    with pytest.raises(ConfigurationError, match="repeats must be an integer of at least 1, got 0"):
        get_savable_loader(dataset, keep_until_done=True, repeats=0)


class Tuples(ENCODERS["tensors"]):  # type: ignore[misc]
    """Gives batches that cannot say which samples they have."""

    def encode_batch(self, batch: Any) -> Any:
        return tuple(batch.number)


def test_batches_must_say_which_samples_they_have(data: Path) -> None:
    loader = one(train_dataset(data / "text", batch_size=2, task_encoder=Tuples()))
    with pytest.raises(ConfigurationError, match="a batch of type tuple cannot carry __restore_key__"):
        next(iter(loader))
    several = one(train_dataset(data / "text", "batches", batch_size=2))
    with pytest.raises(ConfigurationError, match="several batches of the same samples: return one"):
        list(islice(several, 20))


def test_ranks_that_load_for_others_are_refused(data: Path) -> None:
    loader = one(train_dataset(data / "text", batch_size=2))
    balance = object.__new__(Balance)
    with pytest.raises(ConfigurationError, match="each rank must load its own"):
        open_loader(loader, None, balance)
    assert Replica  # the same check, on the rank that loads


# Trainers ------------------------------------------------------------------------------------------------------------


def test_the_dataloader_of_trainers_passes_it_on(data: Path) -> None:
    loader = EnergonDataloader(one(train_dataset(data / "text", batch_size=2)))
    a, b, c = (keys_of(next(loader)) for _ in range(3))
    loader.done(a)
    loader.drop(b)
    loader.again(c)
    assert keys_of(next(loader)) == c
    assert loader.metrics()["until_done/out"] == 2


def test_masked_microbatches_must_be_allowed_on_several_ranks(data: Path) -> None:
    _, second = loaders(train_dataset(data / "text", batch_size=2), 2)
    with pytest.raises(MaskedMicrobatchesError, match=r"fewer samples come again than the run has ranks .2."):
        EnergonDataloader(second)
    assert len(keys_of(next(EnergonDataloader(second, masked_microbatches="allow")))) == 2


def test_an_older_iterator_does_not_bring_back_what_was_delivered_since(data: Path) -> None:
    loader = EnergonDataloader(one(train_dataset(data / "text", batch_size=2, repeat=False)), cycle=True)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(WrongUseError, match="use one iterator at a time"):
        next(older)


def test_workers_and_threads_give_the_same(data: Path) -> None:
    """Real worker processes; and the pass goes on with them after what came again."""
    dataset = train_dataset(data / "text", batch_size=2, repeat=False)
    found = []
    for workers in (0, 2):
        config = config_of(1, workers)
        loader = SavableDataLoader(dataset, worker_config=config, keep_until_done=True)
        came = [digest(batch) for batch in islice(loader, 3)]
        loader.again(list(loader.outstanding)[1:4])
        came += [digest(batch) for batch in loader]
        loader.again(list(loader.outstanding)[7:9])  # after the pass: it is gone on with, and no other begins
        came += [digest(batch) for batch in loader]
        found.append(came)
        loader.close()
    assert found[0] == found[1]
    assert len(found[0]) == 19 + 2 + 1


# Damaged states ------------------------------------------------------------------------------------------------------


def column(change: Any) -> Any:
    return lambda entry: [encode_column(change(n, decode_column(c, 4).tolist())) for n, c in enumerate(entry)]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ranks", 7, r"out\.ranks should be a list"),
        ("ranks", [[0, 0], 2], r"out\.ranks should be in ascending order"),
        ("ranks", [[1], 1], r"out\.ranks should be a number from 0 to 0"),
        ("ended", 1, r"out\.ended should be true or false, found 1"),
        ("counts", [1, 2], r"out\.counts should be three numbers"),
        ("counts", [1, 2, -1], r"out\.counts should be a number from 0"),
        ("size", 5, r"out\.rows\[0\] has 4 integers, expected 5"),
        ("size", 1 << 40, r"out\.size should be a number from 0"),
        ("rows", lambda rows: rows[:6], r"out\.rows should be a list of 7 columns"),
        ("rows", column(lambda n, c: [9, *c[1:]] if n == 2 else c), r"out\.rows should have numbers from 0 to 0"),
        ("rows", column(lambda n, c: [37, *c[1:]] if n == 3 else c), r"out\.rows names sample 37 of .*samples 0 to 36"),
        ("rows", column(lambda n, c: [0, *c[1:]] if n == 6 else c), r"out\.rows\[6\] should have numbers from 1"),
        (
            "rows",
            column(lambda n, c: [c[1], *c[1:]] if n in (2, 3, 4, 5) else c),
            r"out\.rows should name each sample once",
        ),
    ],
)
def test_a_damaged_state_is_refused(data: Path, name: str, value: Any, why: str) -> None:
    dataset = train_dataset(data / "text", batch_size=2)
    loader = one(dataset)
    list(islice(loader, 2))
    state = loader.save_state_rank()
    out = dict(state["out"])
    out[name] = value(out[name]) if callable(value) else value
    for damaged in (sign(state | {"out": out}), sign(state | {"out": {k: v for k, v in out.items() if k != name}})):
        with pytest.raises(StateFormatError, match=why if damaged["out"].get(name) else rf"out\.{name} is missing"):
            loader.restore_state_rank(damaged)
    assert len(loader.outstanding) == 4


def test_a_state_keeps_a_few_bytes_of_each(data: Path) -> None:
    loader = one(train_dataset(data / "text", batch_size=2))
    empty = len(json.dumps(loader.save_state_rank()))
    list(islice(loader, 500))
    assert len(loader.outstanding) == 1000
    assert (len(json.dumps(loader.save_state_rank())) - empty) / 1000 < 8


def test_show_counts_what_is_out(data: Path, tmp_path: Path) -> None:
    loader = one(train_dataset(data / "text", batch_size=2))
    keys = [key for batch in islice(loader, 3) for key in keys_of(batch)]
    loader.done(keys[:2])
    loader.drop(keys[2])
    loader.again(keys[3])
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    assert answer("checkpoint", "show", tmp_path / "state.json")["out"] == {
        "out": 3,
        "done": 2,
        "again": 1,
        "dropped": 1,
    }
    said = output_of("checkpoint", "show", tmp_path / "state.json")
    assert "until done: 3 delivered and not done, 2 done, 1 came again, 1 given up" in said


def test_a_program_that_never_says_what_is_done_is_told_once(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outstanding, "_MANY", 10)
    loader = one(train_dataset(data / "text", batch_size=2))
    list(islice(loader, 9))
    assert [record.getMessage()[:50] for record in caplog.records if "none is done" in record.getMessage()] == [
        "rank 0: 12 samples were delivered, and none is don"
    ]


def test_a_wrong_key_on_one_rank_is_an_error_on_all(data: Path) -> None:
    """None of them waits for the others."""
    dataset = train_dataset(data / "text", batch_size=2)

    def run(rank: int) -> Any:
        loader = get_savable_loader(dataset, worker_config=config_of(2, 0, rank), keep_until_done=True)
        key = keys_of(next(iter(loader)))[0]
        with pytest.raises(WrongUseError, match=r"again: .*9, 9. is not out on rank 1"):
            loader.again([key, (key[0], 1, 9, 9)] if rank else [key])
        loader.again([key])
        return keys_of(next(iter(loader))) == [key]

    assert on_gloo(2, run) == [True, True]

"""Validation: every sample once and in order, the same batches on any topology, equal step counts on all ranks."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import (
    InProcessLoader,
    PackingEncoder,
    SeveralEncoder,
    SkippingEncoder,
    TensorEncoder,
    config_of,
    counts_of,
    digest,
    is_masked,
    loaders_of,
    numbers_of,
    text_dataset,
    with_prepared,
)

from energon_bridge import (
    DefaultTaskEncoder,
    SavableDataLoader,
    SkipSample,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.errors import ConfigurationError, EmptyDatasetError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.order.topology import step_units

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
MOST = 200
ROWS = range(1, 6)
RANKS = range(1, 9)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 samples in shards of five."""
    return text_dataset(tmp_path_factory.mktemp("validation"), val=[5] * (MOST // 5))


def dataset_of(data: Path, num_samples: int | None = None, **kwargs: Any) -> DatasetSpec:
    """Open the first samples of the dataset, cut off in the middle of a shard where need be."""
    settings: dict[str, Any] = {"batch_size": 2, "task_encoder": TensorEncoder(), "worker_config": config_of(1, 0)}
    dataset = get_val_dataset(data, **(settings | kwargs))
    if num_samples is None:
        return dataset
    prepared = dataset.leaves[0].dataset
    shards = -(-num_samples // 5)
    counts = prepared.shard_counts[:shards].copy()
    counts[-1] -= 5 * shards - num_samples
    return with_prepared(
        dataset,
        num_samples=num_samples,
        shard_names=prepared.shard_names[:shards],
        shard_counts=counts,
        shard_sizes=prepared.shard_sizes[:shards],
        store=ShortenedStore(prepared.store, prepared.shard_names[shards - 1], int(counts[-1])),
    )


class ShortenedStore:
    """A store in which one shard ends after some samples."""

    def __init__(self, store: Any, shard: str, count: int) -> None:
        self._store, self._index, self._length = store, f"{shard}.idx", 8 * (count + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, rel: str) -> bytes:
        data: bytes = self._store.read(rel)
        return data[: self._length] if rel == self._index else data


def one_pass(
    dataset: DatasetSpec,
    world_size: int,
    num_workers: int,
    kind: type[SavableDataLoader] = InProcessLoader,
    **kwargs: Any,
) -> list[list[Any]]:
    """Return the batches of a pass, by step and rank; fail where the ranks make unequal numbers of steps."""
    loaders = loaders_of(dataset, world_size, num_workers, kind=kind, num_lanes=None, **kwargs)
    columns = []
    for loader in loaders:
        columns.append(list(loader))
        assert len(columns[-1]) == len(loader)
        loader.close()
    return [list(row) for row in zip(*columns, strict=True)]


def check_pass(steps: list[list[Any]], num_samples: int, rows: int, world_size: int) -> None:
    """Check that a pass has every sample once and in order, and what does not exist is masked."""
    microbatches = math.ceil(num_samples / rows)
    assert len(steps) == math.ceil(microbatches / world_size)
    flat = [batch for step in steps for batch in step]
    for m, batch in enumerate(flat):
        if m < microbatches:
            assert numbers_of(batch) == list(range(m * rows, min((m + 1) * rows, num_samples)))
            assert batch["__valid__"].tolist() == [True] * len(batch["__key__"])
        else:
            assert batch["__valid__"].tolist() == [False] * len(batch["__key__"])
            assert len(batch["__key__"]) > 0


@pytest.mark.parametrize("rows", ROWS)
def test_every_microbatch_is_one_unit_of_one_rank_and_worker(data: Path, rows: int) -> None:
    """For all N up to 200, R up to 8, W up to 4: in order, and shared out evenly."""
    dataset = dataset_of(data, batch_size=rows)
    for microbatches in sorted({math.ceil(n / rows) for n in range(1, MOST + 1)}):
        for world_size in RANKS:
            n = min(microbatches * rows, MOST)
            steps = steps_of(dataset, n, world_size)
            assert steps == math.ceil(microbatches / world_size)
            firsts = range(0, steps * world_size, world_size)
            for num_workers in range(1, 5):
                met = []
                for rank in range(world_size):
                    units = list(step_units(firsts, rank, num_workers))
                    shares = [sum(worker == number for _, worker in units) for number in range(num_workers)]
                    assert max(shares) - min(shares) <= 1
                    met.append([unit for unit, _ in units])
                assert [len(units) for units in met] == [steps] * world_size
                assert [unit for step in zip(*met, strict=True) for unit in step] == list(range(steps * world_size))


def test_steps_with_limit_and_without_the_last_batch(data: Path) -> None:
    for rows, drop_last, limit in itertools.product(ROWS, (False, True), (None, 1, 3, 1000)):
        dataset = dataset_of(data, batch_size=rows, batch_drop_last=drop_last, limit=limit)
        for n, ranks in itertools.product(range(1, MOST + 1), RANKS):
            steps = math.ceil((n // rows if drop_last else math.ceil(n / rows)) / ranks)
            assert steps_of(dataset, n, ranks) == (steps if limit is None else min(limit, steps))


def steps_of(dataset: DatasetSpec, num_samples: int, world_size: int) -> int:
    return math.ceil(dataset.end(num_samples, world_size) / world_size)


@pytest.mark.parametrize("rows", ROWS)
def test_every_sample_once_and_in_order_for_all_sizes(data: Path, rows: int) -> None:
    """Each size on a topology of its own."""
    choose = random.Random(rows)
    for num_samples in range(1, MOST + 1) if LONG else [*range(1, 13), 20, 21, 41, 120, 121]:
        dataset = dataset_of(data, num_samples, batch_size=rows, task_encoder=DefaultTaskEncoder())
        world_size, num_workers = choose.randint(1, 8), choose.randrange(5)
        check_pass(one_pass(dataset, world_size, num_workers), num_samples, rows, world_size)


@pytest.mark.parametrize(("num_workers", "persistent"), [(2, True), (2, False), (0, False)])
def test_two_passes_are_the_same(data: Path, num_workers: int, persistent: bool) -> None:
    dataset = dataset_of(data, 37, task_encoder=SeveralEncoder())
    config = config_of(2, num_workers, 1, num_lanes=None, persistent_workers=persistent)
    loader = get_savable_loader(dataset, worker_config=config)
    first = [digest(batch) for batch in loader]
    assert [digest(batch) for batch in loader] == first
    broken_off = iter(loader)
    assert [digest(next(broken_off)) for _ in range(4)] == first[:4]
    later = iter(loader)
    assert [digest(next(later)) for _ in range(2)] == first[:2]
    assert list(broken_off) == []  # it does not go on in the middle of a later pass
    assert [digest(batch) for batch in later] == first[2:]
    loader.close()
    assert [digest(batch) for batch in loader] == first
    loader.close()


@pytest.mark.parametrize("limit", [1, 10, 11])
def test_limit_is_a_number_of_steps(data: Path, limit: int) -> None:
    whole = one_pass(dataset_of(data, 40), 2, 0)
    assert len(whole) == 10
    for num_workers in (0, 3):
        steps = one_pass(dataset_of(data, 40, limit=limit), 2, num_workers)
        assert [[digest(b) for b in step] for step in steps] == [[digest(b) for b in step] for step in whole[:limit]]


@pytest.mark.parametrize(("num_samples", "rows", "world_size"), [(7, 2, 2), (8, 2, 3), (3, 5, 4)])
def test_drop_last_leaves_out_what_is_not_full(data: Path, num_samples: int, rows: int, world_size: int) -> None:
    for num_workers in (0, 2):
        dataset = dataset_of(data, num_samples, batch_size=rows, batch_drop_last=True)
        steps = one_pass(dataset, world_size, num_workers)
        check_pass(steps, num_samples // rows * rows, rows, world_size)


class MadeGroups(TensorEncoder):
    """Batches four samples of a group."""

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        return len(sample.noise), 4


@pytest.mark.parametrize("encoder", [SkippingEncoder, SeveralEncoder])
def test_skipped_samples_shorten_their_batch_only(data: Path, encoder: Any) -> None:
    whole = one_pass(dataset_of(data, 60, batch_size=3, task_encoder=encoder()), 1, 0)
    assert len(whole) == 20
    seen = []
    for m, (batch,) in enumerate(whole):
        if not is_masked(batch):
            assert set(numbers_of(batch)) <= set(range(3 * m, 3 * m + 3))
            seen += numbers_of(batch)
    assert seen == sorted(seen)
    assert len(set(seen)) < 60


class Threefold(TensorEncoder):
    """Yields three samples for each."""

    def encode_sample(self, sample: Any) -> Any:
        for _ in range(3):
            yield super().encode_sample(sample)


class ThreefoldPacks(PackingEncoder):
    """Packs single samples, and makes three rows of each pack."""

    encode_sample = TensorEncoder.encode_sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [[sample] for sample in samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        for _ in range(3):
            yield super().pack_selected_samples(samples)


@pytest.mark.parametrize(
    ("encoder", "size", "said"),
    [
        (
            Threefold,
            4,
            r"^encode_sample of Threefold makes .* one sample: .*batch_size=4 \(the first such one 12\)"
            r"\. For about 3, set batch_size=1$",
        ),
        (Threefold, 1, r"batch_size=1 \(the first such one 3\)$"),
        (
            ThreefoldPacks,
            6,
            r"^pack_selected_samples of ThreefoldPacks .* one pack: .*batch_size=6 \(the first such one "
            r"18\)\. For about 6, set batch_size=2$",
        ),
        (SeveralEncoder, 1, r"batch_size=1 \(the first such one \d\)$"),
        (TensorEncoder, 4, None),
        (MadeGroups, 1, None),
    ],
)
def test_microbatches_larger_than_asked_for_are_said_once(
    data: Path, caplog: pytest.LogCaptureFixture, encoder: Any, size: int, said: str | None
) -> None:
    packs = {"packing_buffer_size": 12} if encoder is ThreefoldPacks else {}
    batch_size = None if encoder is MadeGroups else size
    steps = one_pass(dataset_of(data, 24, batch_size=batch_size, task_encoder=encoder(), **packs), 2, 0)
    rows = [len(batch["__valid__"]) for step in steps for batch in step]
    assert max(rows) == (size if encoder is TensorEncoder else 4 if encoder is MadeGroups else 3 * size)
    found = [record.message for record in caplog.records if "several rows" in record.message]
    assert [bool(re.search(said, message)) for message in found] == [True] if said else not found


class MostlySkipping(TensorEncoder):
    """Leaves out all but some samples."""

    def __init__(self, *kept: int) -> None:
        super().__init__()
        self.kept = kept

    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) not in self.kept:
            raise SkipSample
        return super().encode_sample(sample)


def test_a_microbatch_without_samples_is_masked(data: Path) -> None:
    steps = one_pass(dataset_of(data, 12, task_encoder=MostlySkipping(5, 6)), 2, 0)
    flat = [batch for step in steps for batch in step]
    assert [is_masked(batch) for batch in flat] == [True, True, False, False, True, True]
    assert [numbers_of(batch) for batch in flat if not is_masked(batch)] == [[5], [6]]
    loaders = loaders_of(dataset_of(data, 5, task_encoder=MostlySkipping(1, 2)), 4, 0, num_lanes=None)
    assert [len(list(loader)) for loader in loaders] == [1] * 4
    counts = [counts_of(loader.save_state_rank()) for loader in loaders]
    assert [sum(count[name] for count in counts) for name in ("samples", "skipped")] == [2, 3]
    assert all(numbers_of(batch) in ([5], [6]) for batch in flat)


class MostlyDicts(MostlySkipping):
    """Makes plain batches."""

    def batch(self, samples: list[Any]) -> Any:
        return {"number": torch.cat([sample.number for sample in samples])}


class MostlyWeighed(MostlyDicts):
    """Makes batches with a loss mask."""

    def encode_batch(self, batch: Any) -> Any:
        return {"loss_mask": torch.ones(len(batch["number"]))}


class MostlyTensors(MostlyDicts):
    """Makes batches that carry no mask."""

    def encode_batch(self, batch: Any) -> Any:
        return batch["number"]


LOST = r"rank 0: .* has lost all its samples .*"
BEYOND = r"rank 1: .* does not exist on this rank\. .*"
NO_LOSS = "its `__valid__` is false, and it must have no loss"


@pytest.mark.parametrize(
    ("encoder", "training", "said"),
    [
        (MostlyDicts(*range(9)), True, LOST + NO_LOSS),
        (MostlyDicts(*range(9)), False, LOST + NO_LOSS),
        (MostlyWeighed(*range(9)), True, None),
        (MostlyTensors(*range(9)), True, f"{LOST} Tensor cannot carry it: return a Batch, dataclass or dict"),
        (MostlyDicts(*range(MOST)), True, BEYOND + NO_LOSS),
        (MostlyDicts(*range(MOST)), False, None),  # the end of validation, as everybody knows it
        (MostlyTensors(*range(MOST)), False, f"{BEYOND} Tensor cannot carry it"),
    ],
)
def test_masked_microbatches_are_said_once_where_a_loss_may_count_them(
    data: Path, caplog: pytest.LogCaptureFixture, encoder: Any, training: bool, said: str | None
) -> None:
    whole = len(encoder.kept) == MOST
    settings: dict[str, Any] = {"batch_size": 50 if whole else 5, "task_encoder": encoder}
    settings["worker_config"] = config_of(1, 0)
    kind = {"split_part": "val", "repeat": False} if training else {}
    dataset = (get_train_dataset if training else get_val_dataset)(data, **settings, **kind)
    steps = one_pass(dataset, 3 if whole else 1, 0)
    # Four microbatches for three ranks; 40 microbatches, of which nine samples are in nine at most.
    assert len(steps) == (2 if whole else 40)
    found = [record.message for record in caplog.records if "takes its place" in record.message]
    assert [bool(re.search(said, message)) for message in found] == [True] if said else not found


@pytest.mark.parametrize("num_workers", [2])
def test_a_split_that_is_skipped_whole_is_an_error(data: Path, num_workers: int) -> None:
    with pytest.raises(EmptyDatasetError, match="every one of the 12 samples of the split was skipped"):
        one_pass(dataset_of(data, 12, task_encoder=MostlySkipping()), 1, num_workers, kind=SavableDataLoader)


def test_masked_batches_weigh_nothing(data: Path) -> None:
    class Weighing(TensorEncoder):
        def encode_batch(self, batch: Any) -> Any:
            mask = torch.tensor([[1, 1, 1, 1, 0]] * len(batch.__key__))
            labels = {"labels": torch.where(mask > 0, 7, -100)}  # those of torch's cross entropy
            return {"__key__": batch.__key__, "loss_mask": mask.float()} | labels

    steps = one_pass(dataset_of(data, 3, batch_size=1, task_encoder=Weighing()), 8, 0)
    (step,) = steps
    assert [float(batch["loss_mask"].sum()) for batch in step] == [4, 4, 4, 0, 0, 0, 0, 0]
    assert [int((batch["labels"] >= 0).sum()) for batch in step] == [4, 4, 4, 0, 0, 0, 0, 0]
    assert sum(int(batch["__valid__"].sum()) for batch in step) == 3
    training = get_train_dataset(
        data, split_part="val", batch_size=1, task_encoder=Weighing(), worker_config=config_of(1, 0)
    )
    loaders = [iter(loader) for loader in loaders_of(training, 2, 0, num_lanes=3)]
    assert [[float(next(loader)["loss_mask"].sum()) for loader in loaders] for _ in range(2)] == [[4, 4], [4, 0]]


def test_persistent_workers_begin_the_pass_after_a_resumed_one_at_the_start(data: Path) -> None:
    dataset = dataset_of(data, 41)
    expected = [digest(batch) for (batch,) in one_pass(dataset, 1, 0)]
    config = config_of(1, 2, num_lanes=None, persistent_workers=True)
    loader = get_savable_loader(dataset, worker_config=config)
    for _ in zip(range(5), loader, strict=False):
        pass
    loader.restore_state_rank(loader.save_state_rank())
    for first in (5, 0, 0):
        assert [digest(batch) for batch in loader] == expected[first:]
    loader.close()


def test_the_seed_matters_to_encoders_only(data: Path) -> None:
    a, b = (one_pass(dataset_of(data, 20, worker_config=config_of(1, 0)), 1, 0, seed=seed) for seed in (0, 1))
    assert [numbers_of(batch) for (batch,) in a] == [numbers_of(batch) for (batch,) in b]
    assert [digest(batch) for (batch,) in a] != [digest(batch) for (batch,) in b]


@pytest.mark.parametrize("limit", [0, True])
def test_a_limit_below_one_is_refused(data: Path, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit must be an integer of at least 1 or None"):
        get_val_dataset(data, batch_size=2, limit=limit)

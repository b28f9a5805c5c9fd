"""The budget of bytes for samples that wait to be packed: kept, shared by lanes, and without effect on the stream."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import Numbers, PrePostEncoder, deliver, digest, loaders_of, text_dataset, train_dataset
from hypothesis import given, strategies as st
from made import made_once
from PIL import Image

from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import read_lanes
from energon_bridge.core.stream.budget import Budget
from energon_bridge.core.stream.lane_state import Stage
from energon_bridge.core.stream.pack_buffer import Packing
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.rows import BatchRow, size_of
from energon_bridge.models.images.images import IMAGE_FORMS, DeferredImage

LANES = 6
BULK = 1000
data = made_once(text_dataset, train=[50, 31, 19])
roomy = made_once(text_dataset, train=[1000, 920])
"""Eight buffers of 40 samples in each lane: no lane shares its own."""


class Bulky(PrePostEncoder):
    """Samples of 1,000 bytes and more, in a dict, that are encoded by chance."""

    def preencode_sample(self, sample: Any) -> Any:
        encoded = super().preencode_sample(sample)
        encoded.text = {"bulk": torch.randint(256, (BULK,), dtype=torch.uint8), "text": sample.text}
        return encoded

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        noise = torch.cat([sample.noise for sample in samples])
        bulk = torch.stack([sample.text["bulk"] for sample in samples]).sum(0)
        return Numbers.derive_from(samples[0], text=str(int(bulk.sum())), number=bulk, noise=noise)


def opened(data: Path, budget: int, ranks: int = 1, workers: int = 0, state: Any = None) -> list[SavableDataLoader]:
    spec = train_dataset(data, task_encoder=Bulky(), packing_buffer_size=40, batch_size=2)
    return loaders_of(spec, ranks, workers, state=state, num_lanes=LANES, buffer_bytes=budget)


@pytest.mark.parametrize("budget", [0, 90 * BULK])
def test_contents_keep_to_the_budget(roomy: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pipelines: list[Pipeline] = []
    buffers: list[Packing] = []
    for kind, made in ((Pipeline, pipelines), (Packing, buffers)):

        def init(self: Any, *args: Any, _init: Any = kind.__init__, _made: Any = made, **kwargs: Any) -> None:
            _init(self, *args, **kwargs)
            _made.append(self)

        monkeypatch.setattr(kind, "__init__", init)
    (loader,) = opened(roomy, budget)
    most = 0
    for _ in islice(loader, 10 * LANES):
        (pipeline,) = pipelines
        rows = [row for buffer in buffers for row in buffer.needed_last()]
        assert len(buffers) <= LANES
        kept = [row for row in rows if row.content is not None]
        assert pipeline.budget.held == sum(size_of(row.content, row.size) for row in kept) <= budget
        assert pipeline.budget.held >= BULK * len(kept)
        most = max(most, len(kept))
    assert most >= budget // BULK // 2, "the budget is used"
    assert len(rows) > 20 * LANES
    (row,) = loader.counters()
    assert row["encoded_again"] > row["samples"] / 4


class Grouped(Bulky):
    """Rows wait for others with as many numbers, packs or samples."""

    def batch_group_criterion(self, row: Any) -> tuple[Any, int | None]:
        return len(row.noise), 5


@pytest.mark.parametrize(("packing", "budget"), [(None, 12 * BULK), (20, 40 * BULK)])
def test_groups_keep_to_the_budget_too(
    data: Path, packing: int | None, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(buffer_bytes: int, ranks: int = 1, state: Any = None) -> list[SavableDataLoader]:
        spec = train_dataset(data, task_encoder=Grouped(), packing_buffer_size=packing, batch_size=None)
        return loaders_of(spec, ranks, 0, state=state, num_lanes=LANES, buffer_bytes=buffer_bytes)

    expected = deliver(of(1 << 30), 27, [17])
    most: list[int] = []
    keep = Budget.keep

    def kept(self: Budget, served: Any) -> None:
        keep(self, served)
        most.append(self.held)

    monkeypatch.setattr(Budget, "keep", kept)
    found = deliver(of(budget), 27, [17])
    assert found.digests == expected.digests
    assert found.states == expected.states
    assert budget // 2 <= max(most) <= budget
    monkeypatch.undo()
    resumed = deliver(of(budget, 2, found.states[17]), 5)
    assert resumed.digests == expected.digests[17:27]


class Once(Grouped):
    """Fails for every fourth sample when it is encoded again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def preencode_sample(self, sample: Any) -> Any:
        if sample.__key__ in self.seen and int(sample.__key__) % 4 == 0:
            raise ValueError("gone")
        self.seen.add(sample.__key__)
        return super().preencode_sample(sample)


def test_a_group_that_has_lost_rows_waits_for_others(data: Path) -> None:
    (loader,) = loaders_of(
        train_dataset(data, task_encoder=Once(), batch_size=None), 1, 0, num_lanes=LANES, buffer_bytes=0
    )
    assert {len(batch.__key__) for batch in islice(loader, 12)} == {5}
    found = loader.metrics()
    assert found["errors"] > 0
    assert found["draws"] == sum(found[name] for name in ("samples", "errors", "skipped", "waiting_in_groups"))


def test_contents_of_groups_are_encoded_again(data: Path) -> None:
    spec = train_dataset(data, task_encoder=Grouped(), batch_size=None)
    again = []
    for buffer_bytes in (0, 1 << 30):
        (loader,) = loaders_of(spec, 1, 0, num_lanes=LANES, buffer_bytes=buffer_bytes)
        delivered = sum(len(batch.__key__) for batch in islice(loader, 30))
        (row,) = loader.counters()
        again.append(row["encoded_again"])
    assert again == [delivered * 4 // 5, 0], "all rows of a batch but the last one had to wait"


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what the stream logged; that its loader names what is skipped, and the end of an epoch, is left out."""
    return [record for record in caplog.records if record.name.startswith("energon_bridge.core.stream")]


def test_nothing_is_encoded_again_where_there_is_room(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = opened(data, 1 << 30)
    sum(1 for _ in islice(loader, 60))
    assert [row["encoded_again"] for row in loader.counters()] == [0]
    assert not logged(caplog)
    (small,) = opened(data, 10 * BULK)
    with caplog.at_level(logging.WARNING):
        sum(1 for _ in islice(small, 60))
    (said,) = (record.getMessage() for record in logged(caplog))
    assert f"more than buffer_bytes={10 * BULK} in this process" in said


def test_a_resume_counts_what_it_encodes_again(data: Path) -> None:
    (loader,) = opened(data, 1 << 30)
    sum(1 for _ in islice(loader, 3 * LANES))
    state = loader.save_state_rank()
    (resumed,) = opened(data, 1 << 30, state=state)
    assert digest(next(iter(resumed))) == digest(next(iter(loader)))
    (row,) = resumed.counters()
    # Of what waits in the lane that is due: two packs, and the buffer if the next ones are selected.
    assert 2 <= row["encoded_again"] <= len(read_lanes(state)[0].held.members)


class Shelf:
    """A lane that holds things of given sizes."""

    def __init__(self, budget: Budget, sizes: list[int]) -> None:
        self.held = 0
        self.rows = [BatchRow((), content=size, size=size) for size in sizes]
        budget.join(self)
        budget.hold(self, sum(sizes))

    @property
    def sizes(self) -> list[int]:
        return [row.size for row in self.rows if row.content is not None]

    def needed_last(self) -> Iterable[BatchRow]:
        return reversed(self.rows)


@given(st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=8), st.integers(0, 400), st.data())
def test_lanes_within_their_shares_keep_everything(lanes: list[list[int]], most: int, data: st.DataObject) -> None:
    budget = Budget(most, len(lanes))
    shelves = [Shelf(budget, list(sizes)) for sizes in lanes]
    budget.keep(data.draw(st.sampled_from(shelves)))
    assert budget.held == sum(sum(shelf.sizes) for shelf in shelves) <= most
    for shelf, sizes in zip(shelves, lanes, strict=True):
        if sum(sizes) <= most // len(lanes):
            assert shelf.sizes == sizes
    if sum(map(sum, lanes)) <= most:
        assert [shelf.sizes for shelf in shelves] == lanes
    else:  # never more than one thing of each lane beyond what was needed
        assert budget.held > most - 50 * len(lanes)


@dataclasses.dataclass
class Record:
    __key__: str
    value: Any


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (torch.zeros(10, dtype=torch.int64), 80),
        (np.zeros(5, dtype=np.float32), 20),
        ("text", 4),
        ([torch.zeros(3), torch.zeros(4)], 28),
        ({"pixels": torch.zeros(2, 2), "more": {"b": b"12345"}}, 21),
        ([1, 2, 3], 96),
        (Image.new("RGB", (10, 20)), 600),
        (DeferredImage(b"x" * 30, IMAGE_FORMS["pilrgb"], "jpg"), 30),
        (Record("", b"123"), 3),
        (None, 0),
    ],
)
def test_the_size_of_contents_counts_what_is_inside(value: Any, size: int) -> None:
    assert size_of(Record("key" * 100, value), 0) == size
    assert size_of({"__key__": "key" * 100, "value": value}, 0) == size
    assert size_of(Record("", value), 10_000) == 10_000


class Fickle(PrePostEncoder):
    """Refuses some samples from a certain time on."""

    refused: frozenset[int] = frozenset()

    def preencode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) in self.refused:
            raise ValueError("not any more")
        return super().preencode_sample(sample)


def test_what_no_longer_encodes_after_a_restore_is_counted_once(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = Fickle()
    spec = train_dataset(data, task_encoder=encoder, packing_buffer_size=40, batch_size=1)
    (loader,) = loaders_of(spec, 1, 0, num_lanes=1)
    sum(1 for _ in islice(loader, 3))
    state = loader.save_state_rank()
    held = read_lanes(state)[0].held.entries()
    packs = sum(stage is Stage.PACK for stage, _, _ in held)
    refused = [refs[0].sample for stage, refs, _ in held if stage is Stage.BUFFER][:3]
    encoder.refused = frozenset(refused)
    (resumed,) = loaders_of(spec, 1, 0, state=state, num_lanes=1)
    delivered = [key[1] for batch in islice(resumed, packs + 2) for pack in batch.__restore_key__[3] for key in pack[2]]
    assert packs > 3
    assert len(refused) == 3
    assert not set(refused) & set(delivered)
    assert resumed.counters()[0]["errors"] - loader.counters()[0]["errors"] == 3
    assert caplog.text.count("not any more") == 3

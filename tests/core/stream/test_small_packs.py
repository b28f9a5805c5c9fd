"""Packs of small data, for whose lanes full buffers would hold many epochs: how often each sample comes, by keys."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from commands import output_of
from engine import config_of, text_dataset

from energon_bridge import DefaultTaskEncoder, Packer, TextSample, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import SettingMismatchError
from energon_bridge.core.stream.pack_buffer import LaneEpochs, PackBuffer

SIZES = (48, 100, 500, 2000)
ROOM = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    for samples in SIZES:
        text_dataset(folder / str(samples), train=[samples // 2, samples - samples // 2])
    return folder


def length(sample: Any) -> int:
    return 10 + int(sample.__key__.rpartition("/")[2]) * 37 % 90


class Packs(DefaultTaskEncoder):
    """Packs all that waits, best fit, into rows of 128; a pack's key names its samples."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        waiting, packs = sorted(samples, key=length), []
        while waiting:
            room, pack = ROOM, []
            while fitting := [one for one in waiting if length(one) <= room]:
                room -= length(fitting[-1])
                pack.append(fitting[-1])
                waiting.remove(fitting[-1])
            packs.append(pack)
        return packs

    def pack_selected_samples(self, pack: list[Any]) -> TextSample:
        return TextSample(__key__=" ".join(one.__key__ for one in pack), text=" ".join(one.text for one in pack))


def packs_of(
    source: Any, buffer: int, lanes: int | None, encoder: type[Packs] = Packs
) -> Iterator[list[tuple[Any, ...]]]:
    spec = get_train_dataset(
        source, task_encoder=encoder(), packing_buffer_size=buffer, batch_size=1, worker_config=config_of(1, 0)
    )
    loader = get_savable_loader(spec, worker_config=config_of(1, 0, num_lanes=lanes))
    for batch in loader:
        ((_, _, members),) = batch.__restore_key__[3]
        yield [key[:2] for key in members]


@pytest.mark.parametrize(
    ("samples", "buffer", "lanes"),
    [(48, 100, None), (48, 16, 8), (100, 16, None), (100, 100, 24), (500, 16, None), (500, 100, 8), (2000, 100, None)],
)
def test_every_sample_comes_once_an_epoch(folder: Path, samples: int, buffer: int, lanes: int | None) -> None:
    times: Counter[Any] = Counter()
    number, first, packs = 0, 0, packs_of(folder / str(samples), buffer, lanes)
    while times.total() < 3 * samples:
        pack = next(packs)
        assert len(set(pack)) == len(pack), "no pack has a sample twice"
        times.update(pack)
        number += 1
        first = first or (len(times) if times.total() >= samples else 0)
    assert first >= 0.95 * samples
    assert len(times) == samples
    assert set(times.values()) <= {2, 3, 4}
    alone = 0
    taken, packs = 0, packs_of(folder / str(samples), buffer, 1)
    while taken < 3 * samples:
        taken += len(next(packs))
        alone += 1
    assert number <= 1.05 * alone, "packs are as full as those of one lane"


@pytest.mark.parametrize("samples", [100, 500])
def test_a_small_dataset_of_a_mix_comes_once_an_epoch(folder: Path, tmp_path: Path, samples: int) -> None:
    parts = "".join(
        f"      - {{weight: {weight}, path: {folder / str(n)}}}\n" for n, weight in ((samples, 1), (2000, 4))
    )
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{parts}")
    drawn: list[Any] = []
    packs = packs_of(mix, 16, None)
    while len(drawn) < 5 * 3.2 * samples:
        pack = next(packs)
        assert len(set(pack)) == len(pack), "no pack has a sample twice"
        drawn += pack
    by_leaf = Counter(leaf for leaf, _ in drawn)
    small = [key for key in drawn if key[0] == min(by_leaf, key=by_leaf.__getitem__)]
    assert len(set(small[:samples])) >= 0.95 * samples
    times = Counter(small[: 3 * samples])
    assert len(times) == samples
    assert set(times.values()) <= {2, 3, 4}


class Packed(Packs):
    """Packs by a `Packer`."""

    def __init__(self, room: int = ROOM) -> None:
        super().__init__()
        self.packer = Packer(limits={"tokens": room}, size_of=length)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return self.packer.select(samples)


class Pairs(Packs):
    """Packs neighbours, however long."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[place : place + 2] for place in range(0, len(samples), 2)]


def saved_after(steps: int, encoder: Packs, loader_of: Any) -> Any:
    loader = loader_of(encoder)
    for _ in islice(loader, steps):
        pass
    return loader.save_state_rank()


@pytest.mark.parametrize("shared", [True, False])
def test_other_packs_at_a_resume_are_told(shared: bool, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lanes that share a buffer must agree on its packs; those with one of their own go on from where they are."""

    def loader_of(encoder: Packs) -> Any:
        run = config_of(1, 0, num_lanes=4)
        data = folder / ("100" if shared else "2000")
        spec = get_train_dataset(data, task_encoder=encoder, packing_buffer_size=16, batch_size=1, worker_config=run)
        return get_savable_loader(spec)

    state = saved_after(7, Packed(), loader_of)
    assert (state["settings"]["packing_buffers"] < 4) is shared
    loader_of(Packed()).restore_state_rank(state)
    other = loader_of(Packed(200))
    if shared:
        with pytest.raises(SettingMismatchError, match="at most 128 tokens, and here it is 200 tokens"):
            other.restore_state_rank(state)
    else:
        other.restore_state_rank(state)
    state = saved_after(14, Packs(), loader_of)  # lanes are at different selections
    for encoder, is_told in ((Packs(), False), (Pairs(), shared)):
        caplog.clear()
        resumed = loader_of(encoder)
        resumed.restore_state_rank(state)
        with caplog.at_level(logging.WARNING):
            assert len([*islice(resumed, 60)]) == 60
        assert ("lanes that share a packing buffer disagree about its packs" in caplog.text) is is_told


@pytest.mark.parametrize("shared", [True, False])
def test_another_mix_at_a_resume_is_told(shared: bool, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It makes other packs of a buffer that lanes share, wherever they stand; buffers of their own go on exactly."""

    def loader_of(*others: tuple[Path, float]) -> Any:
        run = config_of(1, 0, num_lanes=4)
        mix = [(folder / ("100" if shared else "2000"), 1.0), *others]
        spec = get_train_dataset(mix, task_encoder=Packs(), packing_buffer_size=16, batch_size=1, worker_config=run)
        return get_savable_loader(spec, on_mismatch="adapt")

    before = loader_of()
    deque(islice(before, 14), maxlen=0)
    for resumed, is_told in ((loader_of(), False), (loader_of((folder / "500", 1.0)), shared)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            resumed.restore_state_rank(before.save_state_rank())
        assert ("its lanes share packing buffers" in caplog.text) is is_told
        with caplog.at_level(logging.WARNING):
            assert len([*islice(resumed, 60)]) == 60
        assert ("the mix has changed (on_mismatch='adapt'), or select_samples" in caplog.text) is is_told


def test_a_step_of_packs_is_no_number_of_samples(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What came before a step of packs is not known: `start_at` says so; of single samples it is exact."""
    for settings, is_told in (({"packing_buffer_size": 16}, True), ({}, False)):
        spec = get_train_dataset(
            folder / "500", task_encoder=Packs(), batch_size=1, worker_config=config_of(1, 0), **settings
        )
        for step in (0, 30):
            caplog.clear()
            started = get_savable_loader(spec, start_at=step)
            assert ("start_at=30: the run packs samples" in caplog.text) is (is_told and step > 0)
            found = next(iter(started)).__key__
        run = get_savable_loader(spec)
        assert is_told or found == next(islice(run, 30, None)).__key__


class Leaving(Packs):
    """Leaves one pack in four waiting, so that samples of several epochs meet in a buffer."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs = super().select_samples_to_pack(samples)
        return packs[: max(1, 3 * len(packs) // 4)]


@pytest.mark.parametrize(("samples", "buffer", "lanes"), [(48, 16, 2), (500, 16, 4), (500, 100, 8)])
@pytest.mark.parametrize("encoder", [Packs, Leaving])
def test_what_a_buffer_keeps_about_epochs_is_what_its_samples_say(
    folder: Path, samples: int, buffer: int, lanes: int, encoder: type[Packs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the order is asked for an epoch once, not after each microbatch."""
    asked: Counter[tuple[int, int]] = Counter()
    checked = [0]
    epoch_of, is_closed = LaneEpochs.epoch, PackBuffer.is_closed

    def counting(self: LaneEpochs, draw: int) -> int:
        asked[id(self), epoch_of(self, draw)] += 1
        return epoch_of(self, draw)

    def checking(self: PackBuffer, draw: int) -> bool:
        closed = is_closed(self, draw)
        if self._rules.epochs is not None:
            fresh = self.members[self._waits == 0, 2].tolist()
            epoch = self._rules.epochs.order.epoch_of(self._rules.epochs.lane, draw)
            assert closed == any(one < epoch for one in fresh)
            checked[0] += 1
        return closed

    monkeypatch.setattr(LaneEpochs, "epoch", counting)
    monkeypatch.setattr(PackBuffer, "is_closed", checking)
    packs = packs_of(folder / str(samples), buffer, lanes, encoder)
    taken = 0
    while taken < 4 * samples:
        taken += len(next(packs))
    assert checked[0] > 20
    assert max(asked.values()) == 1


@pytest.mark.parametrize("lanes", [4, 24])
def test_the_draws_and_samples_of_a_shared_buffer_are_counted_once(folder: Path, tmp_path: Path, lanes: int) -> None:
    """As `energon checkpoint show` names them: what was drawn was delivered, or is held."""
    config = replace(config_of(1, 0), num_lanes=lanes)
    spec = get_train_dataset(
        folder / "500", task_encoder=Packs(), packing_buffer_size=100, batch_size=1, worker_config=config
    )
    loader = get_savable_loader(spec)
    delivered = [key for batch in islice(loader, 40) for key in batch.__key__[0].split()]
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    said = output_of("checkpoint", "show", tmp_path / "state.json")
    found = re.search(r"microbatch 40 of the run, ([\d,]+) draws\nheld: +([\d,]+) samples, drawn but not ", said)
    assert found is not None
    drawn, held = (int(number.replace(",", "")) for number in found.groups())
    assert drawn == len(delivered) + held
    assert ("24 lanes share 4: what a buffer loses counts at once" in said) == (lanes == 24)

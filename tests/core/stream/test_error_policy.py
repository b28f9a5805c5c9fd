"""The error policy: what stops a run, what is said of what fails, and that nothing of it changes what is delivered."""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import PackingEncoder, counts_of, loaders_of, text_dataset, train_dataset
from made import made_once

from energon_bridge import DefaultTaskEncoder, ErrorPolicy, SkipSample, TextSample, quarantine_excludes, read_quarantine
from energon_bridge.core.errors import ConfigurationError, ErrorRateError, FatalSampleError, StorageError
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.samples.sample_place import SamplePlace
from energon_bridge.core.stream.failures import named

SAMPLES = 40
data = made_once(text_dataset, train=[20, 20])


class Failing(DefaultTaskEncoder):
    """Fails in `encode_sample` for every so manieth sample."""

    def __init__(self, every: int = 4, error: type[Exception] = ValueError) -> None:
        super().__init__()
        self.every = every
        self.error = error

    def encode_sample(self, sample: TextSample) -> Any:
        if int(sample.__key__) % self.every == 0:
            raise self.error(f"no {sample.text}")
        return sample


def loader_of(
    data: Path, encoder: Any, workers: int = 0, state: Any = None, num_lanes: int = 4, **kwargs: Any
) -> SavableDataLoader:
    packs = {"packing_buffer_size": 11} if isinstance(encoder, PackingEncoder) else {}
    dataset = train_dataset(data, task_encoder=encoder, **packs, **kwargs)
    (loader,) = loaders_of(dataset, 1, workers, state=state, num_lanes=num_lanes)
    return loader


def keys_of(loader: SavableDataLoader, steps: int) -> list[list[str]]:
    return [list(batch["__key__"]) for batch in islice(loader, steps)]


@pytest.mark.parametrize("workers", [2])
def test_a_rate_above_the_budget_stops_the_run_where_it_is_passed(workers: int, data: Path) -> None:
    policy = ErrorPolicy(max_error_rate=0.1, min_draws=30)
    free = keys_of(loader_of(data, Failing(), workers), 20)
    loader = loader_of(data, Failing(), workers, error_policy=policy)
    seen: list[list[str]] = []
    for _ in range(2):  # it does not go away by asking again
        with pytest.raises(
            ErrorRateError, match=rf"{data}: \d+ of [34]\d samples failed .*10 %.*: \d+ in encode_sample wit"
        ):
            seen += (list(batch["__key__"]) for batch in loader)
    assert 20 <= 2 * len(seen) <= 30
    assert seen == free[: len(seen)]
    state = loader.save_state_rank()
    assert counts_of(state)["samples"] == 2 * len(seen)
    resumed = loader_of(data, Failing(), 2 - workers, state, error_policy=policy)  # the counters are in the state
    with pytest.raises(ErrorRateError):
        next(iter(resumed))
    without = loader_of(data, Failing(), 0, state)
    assert keys_of(without, 20 - len(seen)) == free[len(seen) :]


def test_a_handler_decides_by_the_exception(data: Path) -> None:
    seen: list[Exception] = []

    def handler(error: Exception) -> bool:
        seen.append(error)
        return "text 4" not in str(error)

    loader = loader_of(data, Failing(), handler=handler)
    with pytest.raises(
        FatalSampleError, match=r"encode_sample: .*key '000(04|4\d)' \(parts txt\): ValueError: no text 4"
    ):
        keys_of(loader, 40)
    assert {type(error) for error in seen} == {ValueError}


def reraise(error: Exception) -> bool:
    raise error


@pytest.mark.parametrize("on_error", ["raise", reraise, lambda error: False])
def test_the_first_failure_can_stop_the_run(on_error: Any, data: Path) -> None:
    loader = loader_of(data, Failing(), error_policy=ErrorPolicy(on_error=on_error))
    with pytest.raises(FatalSampleError, match=r"key '000\d\d' \(parts txt\): ValueError: no text"):
        keys_of(loader, 40)


def test_what_is_left_out_costs_nothing_else_whatever_the_policy(data: Path, tmp_path: Path) -> None:
    """What is skipped on purpose asks no handler."""
    expected = keys_of(loader_of(data, Failing()), 40)
    budget = ErrorPolicy(max_error_rate=0.6, min_draws=20, tolerance=0, quarantine=tmp_path / "bad.jsonl")
    for _ in range(2):  # the file alone changes nothing
        assert keys_of(loader_of(data, Failing(), error_policy=budget), 40) == expected
    assert keys_of(loader_of(data, Failing(error=SkipSample), handler=reraise), 40) == expected
    with pytest.raises(ConfigurationError, match="mean the same"):
        loader_of(data, Failing(), handler=reraise, error_policy=ErrorPolicy(on_error="raise"))


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"on_error": "ignore"}, "on_error must be 'skip', 'raise' or a function"),
        ({"max_error_rate": 2}, "max_error_rate must be a number between 0 and 1"),
        ({"min_draws": 0}, "min_draws must be an integer of at least 1"),
        ({"tolerance": -1}, "tolerance must be an integer of at least 0"),
        ({"damaged_shards": True}, "damaged_shards must be"),
    ],
)
def test_a_wrong_policy_is_refused(kwargs: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ErrorPolicy(**kwargs)


class BadHook(PackingEncoder):
    """Fails in one hook of a packing encoder, always or for packs that hold certain samples."""

    def __init__(self, hook: str, error: type[Exception], bad: Callable[[int], bool]) -> None:
        super().__init__()
        self.hook, self.error, self.bad = hook, error, bad

    def _may_fail(self, hook: str, samples: list[Any]) -> None:
        if hook == self.hook and any(self.bad(int(sample.__key__)) for sample in samples):
            raise self.error("as the test wants it")

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        self._may_fail("select_samples_to_pack", samples)
        return super().select_samples_to_pack(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        self._may_fail("pack_selected_samples", samples)
        return super().pack_selected_samples(samples)


@pytest.mark.parametrize(
    ("hook", "error"), [("select_samples_to_pack", ValueError), ("pack_selected_samples", SkipSample)]
)
def test_hooks_of_packing_that_always_fail_stop_the_run(hook: str, error: type[Exception], data: Path) -> None:
    loader = loader_of(data, BadHook(hook, error, lambda number: True), error_policy=ErrorPolicy(tolerance=20))
    complaint = rf"^{hook}: 20 \w+ failed in a row" if error is ValueError else "samples in a row, of a split of 40"
    with pytest.raises(Exception, match=complaint) as caught:
        next(iter(loader))
    assert str(data) in str(caught.value)


class Ungrouped(DefaultTaskEncoder):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def batch_group_criterion(self, sample: Any) -> Any:
        raise self.error("as the test wants it")


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (ValueError, "^batch_group_criterion: the first 5 samples of this process failed, and nothing has been"),
        (SkipSample, "skipped 1001 rows in a row"),
    ],
)
def test_a_group_criterion_that_always_fails_stops_the_run(error: type[Exception], complaint: str, data: Path) -> None:
    with pytest.raises(Exception, match=complaint) as caught:
        next(iter(loader_of(data, Ungrouped(error))))
    assert str(data) in str(caught.value)


@pytest.mark.parametrize("hook", ["select_samples_to_pack", "pack_selected_samples"])
def test_a_pack_that_fails_is_named_and_counted(hook: str, data: Path, tmp_path: Path) -> None:
    policy = ErrorPolicy(quarantine=tmp_path / "bad.jsonl")
    encoder = BadHook(hook, ValueError, lambda number: number == 7)
    loader = loader_of(data, encoder, error_policy=policy, num_lanes=1)  # what several lanes share counts for one
    for batch in islice(loader, 12):
        assert "text 7" not in " ".join(batch["text"]).split("text 7 ")
    failed = read_quarantine(tmp_path / "bad.jsonl")
    assert {sample.hook for sample in failed} == {hook}
    for sample in failed:
        assert sample.size >= 1
        assert (sample.key, sample.parts) == (f"{sample.index:05d}", ("txt",))
    assert counts_of(loader.save_state_rank())["errors"] >= sum(sample.size for sample in failed) > 0


@pytest.mark.parametrize("workers", [2])
def test_a_bad_dataset_cannot_flood_the_log(workers: int, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="energon_bridge.core.stream.failures"):
        keys_of(loader_of(data, Failing(every=3), workers, error_policy=ErrorPolicy(messages=3)), 60)
    said = [record for record in caplog.records if record.name == "energon_bridge.core.stream.failures"]
    warnings = [record.message for record in said if record.levelno == logging.WARNING]
    assert len([message for message in warnings if message.startswith("skipped a sample")]) == 3
    assert warnings[2].endswith("further ones of the kind are only counted")
    assert len(warnings) == 4
    assert re.search(rf"{data}: 10 samples failed in encode_sample with ValueError, the last one", warnings[3])
    (trace,) = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert re.search(r"test_error_policy\.py:\d+:encode_sample", trace)


def test_what_samples_share_is_named_once() -> None:
    a, b = (partial(SamplePlace, dataset, parts=("jpg", "txt")) for dataset in ("/a", "/b"))
    places = [a("0.tar", 3, "k3"), a("0.tar", 4, "k4"), a("1.tar", 4, ""), b("1.tar", 4, "k4"), b("1.tar", 5, "k5")]
    other = places[-1]._replace(parts=("png",)), places[-1]._replace(note="joined")
    assert named([*places, *other], 9) == (
        "/a: shard 0.tar, sample 3, key 'k3' (parts jpg, txt); sample 4, key 'k4'; shard 1.tar, sample 4"
        "; /b: shard 1.tar, sample 4, key 'k4' (parts jpg, txt); sample 5, key 'k5'; sample 5, key 'k5' (parts "
        "png); joined: /b: shard 1.tar, sample 5, key 'k5' (parts jpg, txt); and 2 more"
    )


def test_a_long_message_is_cut_off(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Talkative(DefaultTaskEncoder):
        def encode_sample(self, sample: TextSample) -> Any:
            if sample.__key__ == "00003":
                raise ValueError("content " * 10_000)
            return sample

    with caplog.at_level(logging.WARNING, logger="energon_bridge"):
        keys_of(loader_of(data, Talkative()), 40)
    (message,) = [record.message for record in caplog.records if record.name == "energon_bridge.core.stream.failures"]
    assert len(message) < 2000
    assert "(80000 characters)" in message


def test_a_quarantine_file_that_cannot_be_written_does_not_end_the_run(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "bad.jsonl"
    expected = keys_of(loader_of(data, Failing()), 60)
    keys_of(loader_of(data, Failing(), error_policy=ErrorPolicy(quarantine=tmp_path / "whole.jsonl")), 60)
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    caplog.clear()
    loader = loader_of(data, Failing(), error_policy=ErrorPolicy(quarantine=file))
    try:  # the kernel writes a part of the second line and refuses the others, as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines[0]) + 30, before[1]))
        delivered = keys_of(loader, 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert delivered + keys_of(loader, 30) == expected
    (warning,) = [one.getMessage() for one in caplog.records if "quarantine file" in one.getMessage()]
    assert str(file) in warning
    assert "Make room" in warning
    assert loader.metrics()["errors"] > 2
    assert file.read_bytes() == lines[0]


def test_a_quarantine_file_is_added_to_once_for_each_sample(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "bad.jsonl"
    for workers in (0, 2, 0):
        keys_of(loader_of(data, Failing(), workers, error_policy=ErrorPolicy(quarantine=file)), 60)
    samples = read_quarantine(file)
    assert len(file.read_text().splitlines()) == len(samples) == SAMPLES // 4
    assert [sample.index for sample in samples] == list(range(0, SAMPLES, 4))
    assert {(s.dataset, s.hook, s.error, s.parts) for s in samples} == {
        (str(data), "encode_sample", "ValueError", ("txt",))
    }
    with file.open("ab") as handle:
        handle.write(b'{"dataset": "cut o')
    assert read_quarantine(file) == samples
    assert quarantine_excludes(samples)[str(data)][:2] == ["train/shard_000.tar/00000", "train/shard_000.tar/00004"]
    with pytest.raises(StorageError, match="no such quarantine file"):
        read_quarantine(tmp_path / "other.jsonl")
    with pytest.raises(StorageError, match="cannot read the quarantine file"):
        read_quarantine(file.parent)


def test_each_rank_has_a_file_of_its_own(data: Path, tmp_path: Path) -> None:
    policy = ErrorPolicy(quarantine=tmp_path / "bad.jsonl")
    for rank in range(2):
        dataset = train_dataset(data, task_encoder=Failing(), error_policy=policy)  # of its own, as in a process
        loader = loaders_of(dataset, 2, 0, num_lanes=4)[rank]
        keys_of(loader, 40)
        loader.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.rank0.jsonl", "bad.rank1.jsonl"]
    assert [sample.index for sample in read_quarantine(tmp_path / "bad.jsonl")] == list(range(0, SAMPLES, 4))


class Generating(Failing):
    def encode_sample(self, sample: TextSample) -> Iterator[Any]:
        yield sample
        yield super().encode_sample(sample)


def test_restore_sample_says_why_a_sample_is_gone(data: Path) -> None:
    batch = next(iter(loader_of(data, DefaultTaskEncoder(), batch_size=None)))
    failing = loader_of(data, Generating(every=1), batch_size=None)
    with pytest.raises(LookupError, match=r"gives 0 encoded samples now: .*ValueError: no text"):
        failing.restore_sample(batch.__restore_key__)

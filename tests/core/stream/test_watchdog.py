"""The watchdog: names the hook and the sample that hang, shows none of their contents, ends the run if told to."""

from __future__ import annotations

import logging
import re
import textwrap
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import PackingEncoder, config_of, text_dataset, train_dataset
from forked import run_program
from made import made_once

from energon_bridge import DefaultTaskEncoder, TextSample, get_loader, get_savable_loader
from energon_bridge.core.errors import ConfigurationError, HookTimeoutError
from energon_bridge.core.loader.savable import SavableDataLoader

SECRET = "hunter2"
data = made_once(text_dataset, train=[10, 10])


def spin(seconds: float) -> None:
    """Hang in Python code, which can be interrupted."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


class Hanging(PackingEncoder):
    """Hangs once in a hook, for a sample."""

    def __init__(self, hook: str, seconds: float, call: Any = spin) -> None:
        super().__init__()
        self.hook, self.seconds, self.call = hook, seconds, call

    def _hang(self, hook: str, samples: list[Any]) -> None:
        password = SECRET
        if hook == self.hook and any(sample.__key__ == "00007" for sample in samples):
            self.hook = ""
            self.call(self.seconds)
        assert password

    def encode_sample(self, sample: TextSample) -> Any:
        self._hang("encode_sample", [sample])
        return super().encode_sample(sample)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        self._hang("select_samples_to_pack", samples)
        return super().select_samples_to_pack(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        self._hang("pack_selected_samples", samples)
        return super().pack_selected_samples(samples)

    def batch(self, samples: list[Any]) -> Any:
        self._hang("batch", samples)
        return super().batch(samples)


def loader_of(data: Path, encoder: Any, workers: int = 0, packs: bool = True, **kwargs: Any) -> SavableDataLoader:
    packing = {"packing_buffer_size": 11} if packs else {}
    config = config_of(1, workers, num_lanes=2, max_worker_restarts=2)
    dataset = train_dataset(data, task_encoder=encoder, worker_config=config, **packing)
    return get_savable_loader(dataset, **kwargs)


def drain(loader: SavableDataLoader, steps: int = 20) -> None:
    try:
        for _ in islice(loader, steps):
            pass
    finally:
        loader.close()


@pytest.mark.parametrize("hook", ["encode_sample", "select_samples_to_pack", "batch"])
def test_what_hangs_is_named_without_its_contents(hook: str, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(data, Hanging(hook, 0.7), watchdog_timeout_seconds=0.2)
    with caplog.at_level(logging.ERROR, logger="energon_bridge"):
        drain(loader)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert 2 <= len(messages) <= 6  # after 0.2 and 0.4 seconds; where the machine is busy, after 0.8 and more
    for message in messages:
        assert re.match(r"rank 0, unit [01]: a microbatch has been in the making for 0\.\d s", message)
        assert re.search(rf"  {hook} of ", message)
        assert re.search(r"test_watchdog\.py:\d+:spin$", message, re.MULTILINE)
        assert SECRET not in message
        assert "text 7" not in message
    if hook == "encode_sample":
        assert f"encode_sample of {data}: shard train/shard_000.tar, sample 7, key '00007' (parts txt)" in caplog.text


def test_a_loader_that_hangs_while_it_decodes_is_named(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    class SlowDecoder:
        hangs = True

        def decode(self, name: str, content: Any) -> Any:
            if self.hangs and bytes(content) == b"text 7":
                self.hangs = False
                spin(0.6)
            return bytes(content).decode()

    encoder = DefaultTaskEncoder()
    encoder.decoder = SlowDecoder()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, logger="energon_bridge"):
        drain(loader_of(data, encoder, packs=False, watchdog_timeout_seconds=0.2))
    assert f"decode of {data}: shard train/shard_000.tar, sample 7, key '00007'" in caplog.messages[0]


def test_a_hook_that_hangs_ends_the_run_with_its_name(data: Path) -> None:
    for workers in (0, 1):
        loader = loader_of(
            data, Hanging("encode_sample", 30), workers, watchdog_timeout_seconds=0.3, fail_on_timeout=True
        )
        started = time.monotonic()
        with pytest.raises(HookTimeoutError, match=r"encode_sample of .*sample 7, key '00007'"):
            drain(loader)
        assert time.monotonic() - started < 15


def test_a_worker_that_cannot_be_interrupted_is_ended(data: Path) -> None:
    loader = loader_of(
        data,
        Hanging("encode_sample", 30, threading.Event().wait),
        workers=1,
        watchdog_timeout_seconds=0.3,
        fail_on_timeout=True,
    )
    with pytest.raises(HookTimeoutError, match=r"worker 0 \(exit code 86\) was ended by its watchdog"):
        drain(loader)


def test_a_training_process_that_cannot_be_interrupted_is_ended(data: Path) -> None:
    program = f"""
        import sys, threading
        from energon_bridge import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset

        class Hanging(DefaultTaskEncoder):
            def encode_sample(self, sample):
                threading.Event().wait(60)

        config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        dataset = get_train_dataset({str(data)!r}, batch_size=2, worker_config=config, task_encoder=Hanging())
        next(iter(get_loader(dataset, watchdog_timeout_seconds=0.2, fail_on_timeout=True)))
    """
    found = run_program(["-c", textwrap.dedent(program)], data)
    assert found.returncode == 86, found.stderr
    assert "encode_sample of" in found.stderr
    assert "cannot interrupt the hook; ending the process with" in found.stderr


def test_the_first_microbatch_can_have_a_time_of_its_own(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    class SlowOnce(DefaultTaskEncoder):
        seconds = 0.5

        def encode_sample(self, sample: TextSample) -> Any:
            spin(self.seconds)
            self.seconds = 0
            return sample

    encoder, times = SlowOnce(), {"watchdog_timeout_seconds": 0.1, "watchdog_initial_timeout_seconds": 30}
    loader = loader_of(data, encoder, packs=False, **times)
    with caplog.at_level(logging.ERROR, logger="energon_bridge"):
        next(iter(loader))
        assert not caplog.messages
        encoder.seconds = 0.5
        drain(loader, steps=1)
    assert "(watchdog_timeout_seconds allows 0.1)" in caplog.messages[0]


def test_no_thread_is_left_and_none_is_there_without_a_timeout(data: Path) -> None:
    others = set(threading.enumerate())  # of loaders that earlier tests have dropped and nobody has collected

    def watching() -> int:
        return sum(thread.name == "energon-watchdog" for thread in threading.enumerate() if thread not in others)

    loader = loader_of(data, PackingEncoder(), watchdog_timeout_seconds=None)
    next(iter(loader))
    assert watching() == 0
    loader.close()
    loader = loader_of(data, PackingEncoder())
    next(iter(loader))
    assert watching() == 1
    loader.close()
    assert watching() == 0


@pytest.mark.parametrize("name", ["watchdog_timeout_seconds", "watchdog_initial_timeout_seconds"])
def test_a_time_that_is_none_is_refused(name: str, data: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be a number of seconds above 0, got 0"):
        get_loader(train_dataset(data), **{name: 0})

"""Workers that are killed, stopped, hung or ended, forks, and trainers that are killed: nothing is lost or left."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from engine import Numbers, TensorEncoder, config_of, deliver, digest, loaders_of, text_dataset, train_dataset
from forked import Program
from keyed import KEYS, join, keyed_dataset, shards, shuffled, write_mix
from left_behind import left_shared_memory, shared_memory
from made import made_once
from paths import HELPERS
from test_workers_end import is_running
from workers import expected_of, loader_of, wait_until, worker_pids

from energon_bridge import DefaultTaskEncoder, ErrorPolicy, SavableDataLoader, get_savable_loader, get_val_dataset
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, ForkedLoaderError, HookTimeoutError

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
ENDS = 100 if LONG else 4
SHARDS = [5, 9, 1, 14, 8]

data = made_once(text_dataset, train=SHARDS, val=SHARDS)


class OnCommand(TensorEncoder):
    """Does something in a hook, in the process that finds a file that says so, and takes the file away."""

    def __init__(self, folder: Path, act: Callable[[], Any], key: str = "") -> None:
        super().__init__()
        self.folder, self.act, self.key = folder, act, key

    def encode_sample(self, sample: Any) -> Any:
        command = self.folder / "act"
        if self.key:
            if sample.__key__ == self.key and command.exists():
                self.act()
        elif command.exists():
            with contextlib.suppress(FileNotFoundError):
                command.unlink()  # by one of the workers only
                self.act()
        return super().encode_sample(sample)


def hold_the_lock() -> None:
    """Hang in C code that keeps the interpreter lock."""
    re.match(r"(a+)+$", "a" * 40 + "b")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def check_disturbed(loader: SavableDataLoader, folder: Path, expected: list[str], seconds: float) -> None:
    """Give a command in ten microbatches; they must be those of an undisturbed run, each in time."""
    for number, one in enumerate(expected):
        if number % 10 == 5:
            (folder / "act").touch()
        started = time.monotonic()
        assert digest(next(iter(loader))) == one
        assert time.monotonic() - started < seconds


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "how"),
    [
        (lambda: sys.exit(0), "exit code 0"),
        (lambda: os._exit(7), "exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by signal 11"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "killed by signal 15"),
    ],
    ids=["sys.exit(0)", "os._exit(7)", "SIGSEGV", "SIGTERM"],
)
def test_a_worker_that_ends_however_it_does_is_replaced(
    data: Path, tmp_path: Path, act: Callable[[], Any], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected_of(data, 10 * ENDS)
    with closing(loader_of(data, 2, OnCommand(tmp_path, act), max_worker_restarts=1000)) as loader:
        check_disturbed(loader, tmp_path, expected, seconds=30)
    said = [message for message in caplog.messages if how in message and "no sample is lost" in message]
    assert len(said) == ENDS
    # Of a hook that ends its process cleanly, hook and sample are known; a signal may come a little later.
    assert any(f"encode_sample of {data}" in message for message in said)


def test_a_trainers_handler_of_sigterm_is_not_the_workers(data: Path) -> None:
    """Such as one that saves a checkpoint, or exits with code 0."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with closing(loader_of(data, 1)) as loader:
            next(iter(loader))
            (pid,) = worker_pids()
            os.kill(pid, signal.SIGTERM)
            assert wait_until(lambda: not is_running(pid), 5)
            assert [digest(next(iter(loader)))] == expected_of(data, 2)[1:]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_the_worker_that_is_gone_starts_again(data: Path) -> None:
    with closing(loader_of(data, 3)) as loader:
        found = [digest(next(iter(loader))) for _ in range(5)]
        before = set(worker_pids())
        os.kill(min(before), signal.SIGKILL)
        found += [digest(next(iter(loader))) for _ in range(25)]
        assert len(before & set(worker_pids())) == 2
        assert loader.metrics()["worker_restarts"] == 1
    assert found == expected_of(data, 30)


def test_a_worker_replaced_in_a_pass_begins_the_next_one_like_the_others(data: Path) -> None:
    dataset = get_val_dataset(data, batch_size=2, task_encoder=TensorEncoder())
    expected = [digest(batch) for batch in get_savable_loader(dataset, worker_config=config_of(1, 0))]
    config = config_of(1, 3, persistent_workers=True)
    with closing(get_savable_loader(dataset, worker_config=config)) as loader:
        for number in range(6):
            found = []
            for batch in loader:
                found.append(digest(batch))
                if len(found) == 3 + number:
                    os.kill(worker_pids()[number % 3], signal.SIGKILL)
                if number == 2 and len(found) == 7:
                    break  # messages of this pass are under way when the next one begins
            assert found == expected[: len(found)]
            assert len(found) == (7 if number == 2 else len(expected))


# Hangs ---------------------------------------------------------------------------------------------------------------


def hanging_loader(data: Path, encoder: Any, *, workers: int = 2, **kwargs: Any) -> SavableDataLoader:
    dataset = train_dataset(data, task_encoder=encoder, error_policy=kwargs.pop("error_policy", ErrorPolicy()))
    config = config_of(1, workers, max_worker_restarts=1000)
    return get_savable_loader(dataset, worker_config=config, **({"watchdog_timeout_seconds": 0.8} | kwargs))


@pytest.mark.parametrize("act", [hold_the_lock, stop], ids=["lock held", "stopped"])
def test_a_worker_that_cannot_speak_is_named_and_replaced(
    data: Path, tmp_path: Path, act: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    hangs = 100 if LONG else 2
    expected = expected_of(data, 10 * hangs)
    with closing(hanging_loader(data, OnCommand(tmp_path, act), on_hang="replace")) as loader:
        check_disturbed(loader, tmp_path, expected, seconds=30)
    where = "hold_the_lock" if act is hold_the_lock else "the process is stopped"
    said = [record.message for record in caplog.records if "the worker cannot say so itself" in record.message]
    said = [message for message in said if where in message]  # a machine that is busy may be slow to run another worker
    assert len(said) == hangs
    for message in said:
        assert re.match(r"rank 0, worker [01], unit \d+: a microbatch has been in the making for", message)
        assert f"  encode_sample of {data}: shard train/shard_0" in message


def test_a_worker_that_cannot_speak_ends_the_run_if_that_is_asked_for(data: Path, tmp_path: Path) -> None:
    (tmp_path / "act").touch()
    # One worker: of two either may be the one that finds the command, and the first batch may be the other's.
    loader = hanging_loader(data, OnCommand(tmp_path, hold_the_lock), workers=1, fail_on_timeout=True)
    started = time.monotonic()
    with closing(loader), pytest.raises(HookTimeoutError, match=r"worker 0, unit 0: (?s:.)*encode_sample of .*sample"):
        next(iter(loader))
    assert time.monotonic() - started < 60
    assert not worker_pids()


def test_a_worker_that_cannot_speak_is_waited_for_by_default(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(hanging_loader(data, OnCommand(tmp_path, stop))) as loader:
        found = [digest(next(iter(loader)))]
        (tmp_path / "act").touch()

        def resume() -> Iterator[str]:
            pids = worker_pids()
            waking = subprocess.Popen(["bash", "-c", f"sleep 3; kill -CONT {' '.join(map(str, pids))}"])
            for _ in range(29):
                yield digest(next(iter(loader)))
            waking.wait()

        found += list(resume())
        assert loader.metrics()["worker_restarts"] == 0
    assert found == expected_of(data, 30)
    assert 1 <= caplog.text.count("the process is stopped") <= 3  # at doubling intervals


def test_what_a_hang_leads_to_is_one_thing(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="set only one"):
        hanging_loader(data, TensorEncoder(), on_hang="replace", fail_on_timeout=True)
    with pytest.raises(ConfigurationError, match="on_hang must be 'wait' or 'replace', got 'kill'"):
        hanging_loader(data, TensorEncoder(), on_hang="kill")


# Samples that end their workers --------------------------------------------------------------------------------------


class WithoutOne(TensorEncoder):
    """What a stream is in which a sample fails by an error."""

    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "00003":
            raise ValueError("poisonous")
        return super().encode_sample(sample)


@pytest.mark.parametrize("act", [lambda: os._exit(0), hold_the_lock], ids=["0", "lock"])
def test_a_sample_that_ends_its_worker_three_times_is_left_out(
    data: Path, tmp_path: Path, act: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = deliver(loaders_of(train_dataset(data, task_encoder=WithoutOne()), 1, 0), 80)
    (tmp_path / "act").touch()
    seconds = 0.8 if act is hold_the_lock else 60
    encoder = OnCommand(tmp_path, act, "00003")
    with closing(hanging_loader(data, encoder, on_hang="replace", watchdog_timeout_seconds=seconds)) as loader:
        found = [digest(batch) for batch in islice(loader, 80)]
        errors = loader.metrics()["errors"]
        restarts = loader.metrics()["worker_restarts"]
    assert found == expected.digests
    assert errors >= 2  # epochs are short: of each it is left out
    assert restarts <= 3 + 1 + 4 * (act is hold_the_lock)  # another worker had been started before; busy machines
    assert re.search(rf"encode_sample of {data}: .*sample 3 killed its worker 3 times in a row", caplog.text)
    assert "BarredSampleError" in caplog.text


def test_a_sample_that_ends_its_worker_stops_the_run_by_name_if_the_policy_says_so(data: Path, tmp_path: Path) -> None:
    (tmp_path / "act").touch()
    policy = ErrorPolicy(on_error="raise")
    encoder = OnCommand(tmp_path, lambda: os._exit(3), "00003")
    with (
        closing(hanging_loader(data, encoder, error_policy=policy, watchdog_timeout_seconds=60)) as loader,
        pytest.raises(FatalSampleError, match=r"sample 3: .*killed or hung its worker several times in a row"),
    ):
        for _ in islice(loader, 80):
            pass


class PoisonousDecoder:
    """Ends the process at one sample, while other threads decode other ones."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends

    def decode(self, name: str, content: Any) -> Any:
        time.sleep(0.002)
        if bytes(content) == b"b k07":
            if self.ends:
                os._exit(1)
            raise ValueError("broken")
        return bytes(content).decode()


def test_a_sample_that_ends_a_loading_thread_is_told_from_its_neighbours(tmp_path: Path) -> None:
    """It is not in the first dataset of the join, and has another number there."""
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 12, 8))
    keyed_dataset(tmp_path / "b", train=shards(shuffled(KEYS), 20))
    path = write_mix(tmp_path / "mix.yaml", train=join(None, {"nonmatch": "skip"}))

    def batches(ends: bool, workers: int) -> list[str]:
        encoder = DefaultTaskEncoder()
        encoder.decoder = PoisonousDecoder(ends)  # type: ignore[assignment]
        dataset = train_dataset(path, task_encoder=encoder)
        config = config_of(1, workers, decode_threads=3)
        with closing(get_savable_loader(dataset, worker_config=config)) as loader:
            return [digest(batch) for batch in islice(loader, 60)]

    assert batches(ends=True, workers=1) == batches(ends=False, workers=0)


# Forks ---------------------------------------------------------------------------------------------------------------


def forked(child: Callable[[], None]) -> int:
    """Run a function in a fork; return its exit code, 99 after an exception."""
    process = os.fork()
    if not process:
        try:
            child()
            os._exit(0)
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_fork_that_iterates_a_loader_is_told_so(data: Path, num_workers: int) -> None:
    with closing(loader_of(data, num_workers)) as loader:
        batches = iter(loader)
        found = [digest(next(batches)) for _ in range(5)]

        def child() -> None:
            for iterate in (lambda: next(batches), lambda: next(iter(loader))):
                with pytest.raises(ForkedLoaderError, match=rf"delivers in process {os.getppid()}; this is process"):
                    iterate()
            loader.close()  # lets go of what is not its own; what follows is
            assert digest(next(iter(loader))) == expected[5]
            loader.close()

        expected = expected_of(data, 30)
        pids = worker_pids()
        assert forked(child) == 0
        assert worker_pids() == pids
        found += [digest(next(batches)) for _ in range(25)]
        assert worker_pids() == pids
    assert found == expected


def test_a_fork_that_drops_a_loader_or_ends_leaves_its_workers_alone(data: Path) -> None:
    program = f"""
        import gc, logging, os, sys
        sys.path.insert(0, {str(HELPERS)!r})
        from pathlib import Path
        from engine import config_of, train_dataset
        from workers import worker_pids
        from energon_bridge import get_savable_loader

        logging.getLogger("energon_bridge").setLevel(logging.ERROR)  # it says that the stream goes on
        loader = get_savable_loader(train_dataset(Path({str(data)!r})), worker_config=config_of(1, 2))
        batches = iter(loader)
        next(batches)
        pids = worker_pids()
        for drops in (True, False):
            process = os.fork()
            if not process:
                if drops:
                    del batches, loader
                    gc.collect()
                sys.exit(0)  # with all that runs at the end of an interpreter
            assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
            for _ in range(20):
                next(batches)
            assert worker_pids() == pids
            assert loader.metrics()["worker_restarts"] == 0
        print("well")
    """
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.stdout, found.stderr) == ("well\n", "")


# Orphans -------------------------------------------------------------------------------------------------------------

TRAINER = """
    import os, re, sys, threading, time
    from pathlib import Path
    sys.path.insert(0, {helpers!r})
    from engine import TensorEncoder, config_of, train_dataset
    from workers import worker_pids
    from energon_bridge import get_savable_loader

    class Busy(TensorEncoder):
        def encode_sample(self, sample):
            if Path({folder!r}, "hang").exists():
                re.match(r"(a+)+$", "a" * 40 + "b")
            return super().encode_sample(sample)

    def train():
        dataset = train_dataset(Path({data!r}), task_encoder=Busy())
        loader = get_savable_loader(dataset, worker_config=config_of(1, 2, num_lanes=24))
        for _ in range(3):
            next(iter(loader))
        time.sleep(0.3)  # each has one ready
        Path({folder!r}, "hang").touch()
        for _ in range(2):
            next(iter(loader))
        print(*worker_pids(), flush=True)
        time.sleep(60)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
"""


def test_workers_are_gone_within_a_second_of_a_killed_trainer(data: Path, tmp_path: Path) -> None:
    """Also if a hook keeps the interpreter lock, and whichever thread made the loader."""
    before = shared_memory()
    for number in range(100 if LONG else 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        program = textwrap.dedent(TRAINER).format(helpers=str(HELPERS), data=str(data), folder=str(folder))
        trainer = Program(["-c", program], tmp_path)
        pids = [int(pid) for pid in trainer.output.readline().split()]
        assert len(pids) == 2
        time.sleep(random.Random(number).random() * 0.2)
        trainer.kill()
        killed = time.monotonic()
        while any(map(is_running, pids)) and time.monotonic() - killed < 10:
            time.sleep(0.01)
        assert time.monotonic() - killed < 5  # a second, on a machine that is not busy
        assert trainer.wait() == -signal.SIGKILL
    assert wait_until(lambda: not left_shared_memory(before))  # other tests of this machine come and go


# What a worker is ----------------------------------------------------------------------------------------------------


class Informed(TensorEncoder):
    def encode_sample(self, sample: Any) -> Any:
        info = torch.utils.data.get_worker_info()
        facts = [-1] if info is None else [info.id, info.num_workers, int(info.dataset.settings.batch_size == 2)]
        return Numbers.derive_from(sample, text="", number=torch.tensor(facts), noise=torch.zeros(1))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_may_be_started_in_any_way(data: Path, method: str) -> None:
    with closing(loader_of(data, 2, start_method=method)) as loader:
        assert [digest(batch) for batch in islice(loader, 20)] == expected_of(data, 20)
        os.kill(worker_pids()[0], signal.SIGKILL)
        loader.close()
    assert not worker_pids()


def test_code_in_a_worker_can_ask_torch_which_one_it_is(data: Path) -> None:
    with closing(loader_of(data, 2, Informed())) as loader:
        facts = {tuple(batch.number[0].tolist()) for batch in islice(loader, 6)}
    assert facts == {(0, 2, 1), (1, 2, 1)}
    assert torch.utils.data.get_worker_info() is None
    with closing(loader_of(data, 0, Informed())) as loader:
        assert next(iter(loader)).number.unique().tolist() == [-1]


def test_a_loader_is_a_dataloader_for_those_who_ask(data: Path) -> None:
    loader = loader_of(data, 2, prefetch_factor=3)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader.dataset, torch.utils.data.IterableDataset)  # no sampler is put in its place
    assert (loader.num_workers, loader.prefetch_factor, loader.batch_size) == (2, 3, None)
    with pytest.raises(ConfigurationError, match=r"for batch in get_loader\(dataset\)"):
        iter(loader.dataset)

"""Reads that stall are tried again beside the first, counted, and named in the end; the stream stays the same."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import digest, loaders_of, text_dataset, train_dataset
from forked import start_forked
from workers import wait_until

from energon_bridge import ErrorPolicy
from energon_bridge.core.errors import ConfigurationError, StorageError
from energon_bridge.core.storage import LocalStore, OpenFiles, Stalls, local, open_store
from energon_bridge.core.storage.stalls import TRIES, is_in_memory, way_to

SECONDS = 0.1


class Hanging:
    """Takes the place of a system call that hangs for some of its calls, until `release` is called."""

    def __init__(self, call: Any, hang: set[int]) -> None:
        self._call, self._hang = call, hang
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            number = self.calls
            self.calls += 1
        if number in self._hang:
            self._released.wait(5)
        return self._call(*args)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make some reads of files hang, below a store that believes that its file system is one of the network."""
    made: list[Hanging] = []

    def start(*numbers: int) -> Hanging:
        made.append(Hanging(os.pread, set(numbers)))
        monkeypatch.setattr(os, "pread", made[-1])
        monkeypatch.setattr(local, "way_to", lambda path: "helper")
        return made[-1]

    yield start
    for one in made:
        one.release()


def test_a_stalled_read_is_tried_again_beside_the_first(
    tmp_path: Path, hang: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    stalls = Stalls(SECONDS)
    store = LocalStore(tmp_path, files=OpenFiles(stalls=stalls))
    calls = hang(1)
    assert [store.read_range("x", n, 2) for n in range(3)] == [b"01", b"12", b"23"]
    assert (calls.calls, stalls.count) == (4, 1)
    (message,) = caplog.messages
    assert message == (
        f"{tmp_path}/x: 2 bytes at offset 1: reading has taken longer than 0.1 s; starting try 2 of {TRIES} "
        "(stalled reads of this process so far: 1)"
    )
    calls.release()
    assert store.read_range("x", 5, 5) == b"56789"


def test_the_last_try_names_the_file(tmp_path: Path, hang: Any) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    stalls = Stalls(SECONDS)
    store = LocalStore(tmp_path, files=OpenFiles(stalls=stalls))
    hang(*range(TRIES))
    started = time.monotonic()
    with pytest.raises(StorageError, match=rf"{tmp_path}/x: 4 bytes at offset 2: not read after {TRIES} tries, 0\.1 s"):
        store.read_range("x", 2, 4)
    assert time.monotonic() - started < 10 * TRIES * SECONDS
    assert stalls.count == TRIES
    assert store.read_range("x", 2, 4) == b"2345"


def test_what_a_read_raises_is_raised(tmp_path: Path, hang: Any) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    store = LocalStore(tmp_path, files=OpenFiles(stalls=Stalls(SECONDS)))
    hang()
    for call in (lambda: store.read_range("x", 8, 5), lambda: store.read_range("y", 0, 1), lambda: store.read("y")):
        with pytest.raises(Exception, match=r"[xy]: (expected 5 bytes at offset 8, got 2|no such file)"):
            call()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_over_stalled_reads_is_the_same_stream(
    tmp_path: Path, hang: Any, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    text_dataset(tmp_path, train=[9, 12])

    def stream(seconds: float | None) -> tuple[list[str], float]:
        dataset = train_dataset(tmp_path, error_policy=ErrorPolicy(read_timeout_seconds=seconds))
        (loader,) = loaders_of(dataset, 1, workers)
        found = [digest(batch) for batch, _ in zip(loader, range(30), strict=False)]
        metrics = loader.metrics()
        loader.close()
        return found, metrics.get("stalled_reads", 0)

    expected = stream(None)
    calls = hang(3, 7, 8, 20)
    found, stalled = stream(SECONDS)
    assert found == expected[0]
    assert (expected[1], stalled > 0) == (0, True)
    if not workers:
        assert calls.calls > 20
        assert sum("reading has taken longer" in message for message in caplog.messages) == 4


def test_a_hanging_disk_stops_the_run_by_name(tmp_path: Path, hang: Any) -> None:
    path = text_dataset(tmp_path, train=[9])
    hang(*range(3, 100))
    dataset = train_dataset(path, error_policy=ErrorPolicy(read_timeout_seconds=SECONDS))
    (loader,) = loaders_of(dataset, 1, 0)
    with pytest.raises(StorageError, match=r"shard_000\.tar: .* not read after 3 tries"):
        list(islice(loader, 30))


class StallingServer(SimpleHTTPRequestHandler):
    """Serves ranges of files, and says nothing to every third request until it is asked a second time."""

    protocol_version = "HTTP/1.1"
    asked = 0
    stopped = threading.Event()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data, status = path.read_bytes(), 200
        wanted = self.headers.get("Range")
        if wanted:
            type(self).asked += 1
            if self.asked % 3 == 1:
                self.stopped.wait(20)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            data, status = data[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def test_a_server_that_stalls(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "x").write_bytes(bytes(range(200)))

    def job() -> tuple[list[bytes], int]:
        os.chdir(tmp_path)
        server = ThreadingHTTPServer(("127.0.0.1", 0), StallingServer)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stalls = Stalls(1.0)
        store = open_store(f"http://127.0.0.1:{server.server_port}", files=OpenFiles(stalls=stalls))
        found = [store.read_range("x", n, 3) for n in range(3)]
        StallingServer.stopped.set()
        return found, stalls.count

    ok, value = start_forked(job).result()  # fsspec keeps a thread of its own
    assert ok, value
    found, count = value
    assert found == [bytes([n, n + 1, n + 2]) for n in range(3)]
    assert count >= 1


def test_no_deadline_needs_no_thread(tmp_path: Path, hang: Any) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    hang()
    before = {*threading.enumerate()}
    store = LocalStore(tmp_path, files=OpenFiles(stalls=Stalls(None)))
    assert store.read_range("x", 2, 4) == b"2345"
    assert {*threading.enumerate()} <= before


def test_helpers_are_used_again_and_end(tmp_path: Path, hang: Any) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    hang()
    before = {*threading.enumerate()}
    store = LocalStore(tmp_path, files=OpenFiles(stalls=Stalls(5.0)))
    for _ in range(50):
        store.read_range("x", 2, 4)
    assert len({*threading.enumerate()} - before) == 1
    assert start_forked(partial(store.read_range, "x", 2, 4)).result() == (True, b"2345")
    assert pickle.loads(pickle.dumps(store)).read_range("x", 0, 1) == b"0"
    helpers = {*threading.enumerate()} - before
    del store
    for helper in helpers:
        helper.join(5)
    assert not any(helper.is_alive() for helper in helpers)


def test_what_is_in_memory_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(1 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert is_in_memory(descriptor, (1 << 20) - 1)
        if way_to(str(tmp_path)) == "probe":

            def is_gone() -> bool:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # advice: a busy kernel may take it later
                return not is_in_memory(descriptor, (1 << 20) - 1)

            assert wait_until(is_gone)
            assert LocalStore(tmp_path).read_range("x", 0, 1 << 20) == path.read_bytes()
    finally:
        os.close(descriptor)
    assert way_to("/nowhere/at/all") == "direct"


@pytest.mark.parametrize("seconds", [0, -1, "60", True])
def test_the_deadline_is_a_time(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="read_timeout_seconds must be above 0, or None, got"):
        ErrorPolicy(read_timeout_seconds=seconds)

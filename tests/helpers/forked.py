"""Processes for tests, forked from this one: what it has imported need not be imported again."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT = 120.0


def run_forked(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call `function(rank)` in `count` processes at once and return what they returned, by rank.

    Raises:
        AssertionError: A process raised, with its traceback, or died, or took too long.
    """
    children = [start_forked(lambda rank=rank: function(rank)) for rank in range(count)]  # type: ignore[misc]
    results: list[Any] = [None] * count

    def collect(rank: int) -> None:
        results[rank] = children[rank].result()

    readers = [threading.Thread(target=collect, args=(rank,)) for rank in range(count)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + TIMEOUT
    for reader in readers:
        reader.join(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill()
    for reader in readers:
        reader.join()
    failures = [f"rank {rank}: {why}" for rank, (ok, why) in enumerate(results) if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


class Forked:
    """One forked process."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._gone = False

    def result(self) -> tuple[bool, Any]:
        """Wait for the end: (True, value) or (False, traceback or exit status)."""
        with os.fdopen(self._pipe, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        self._gone = True
        return pickle.loads(data) if data else (False, f"no result, exit status {os.waitstatus_to_exitcode(status)}")

    def kill(self) -> None:
        """Kill the process, where it still runs."""
        if not self._gone:
            os.kill(self.pid, signal.SIGKILL)


def start_forked(function: Callable[[], Any]) -> Forked:
    """Call a function in a forked process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Forked(pid, reading)
    os.close(reading)
    try:
        answer = (True, function())
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    # The interpreter's own exit would run what belongs to the test session.
    os._exit(0)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become_rank(rank: int, size: int, port: int) -> None:
    """Set the environment that torchrun sets."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )

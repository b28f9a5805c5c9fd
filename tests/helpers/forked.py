"""Processes for tests, forked from this one: what it has imported need not be imported again."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paths import TESTS

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


def on_gloo(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Call `function(rank)` in processes that are the ranks of a gloo group, and return what they returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:

        def start(rank: int) -> Any:
            import torch.distributed as dist

            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
            return function(rank)

        return run_forked(ranks, start)


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
    _renew_thread_pool()
    try:
        answer = (True, function())
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    # The interpreter's own exit would run what belongs to the test session.
    os._exit(0)


def _renew_thread_pool() -> None:
    """Give this fork its own pool of threads of torch: findings/torch_fork_threads_race_for_a_pool.sh."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }


def become_rank(rank: int, size: int, port: int) -> None:
    """Set the environment that torchrun sets."""
    os.environ.update(rank_environment(rank, size, port))


# Programs ------------------------------------------------------------------------------------------------------------


def import_for_training() -> None:
    """Import here, once, what every training run would import in its own fork: ten seconds of work each time."""
    import torch._dynamo  # noqa: F401  (optimizers do)
    from transformers import LlavaForConditionalGeneration  # noqa: F401

    import energon_bridge.trainers.datamodule
    import energon_bridge.training.generation
    import energon_bridge.training.run  # noqa: F401


class Program:
    """`python ARGUMENTS...` in a fork: what a new interpreter would do, without its imports.

    Its standard error comes with its output, as a terminal shows them, or goes to a descriptor. It has the environment
    of this process with `environment` over it. Use `subprocess` where the start of an interpreter is what is tested,
    and for programs that leave a pool of processes to the end of the interpreter, which a fork has none of.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        errors: int | None = None,
    ) -> None:
        reading, writing = os.pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_become, args=(list(arguments), cwd, dict(environment or {}), writing, errors, reading)
        )
        self._process.start()
        os.close(writing)
        self.output: IO[str] = os.fdopen(reading)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill it, as `kill -9` does."""
        self._process.kill()

    def wait(self) -> int:
        """Wait for its end and return the exit code; a signal that ended it is negative."""
        self.output.close()
        self._process.join(TIMEOUT)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode


def run_program(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with tempfile.TemporaryFile("w+") as errors:
        program = Program(arguments, cwd, environment, errors.fileno())
        # With its children, which have the other end of the pipe, too.
        limit = threading.Timer(5 * TIMEOUT, os.killpg, (program.pid, signal.SIGKILL))
        limit.start()
        output = program.output.read()
        limit.cancel()
        code = program.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, output, errors.read())


def run_afresh(code: str, cwd: Path, *packages: str, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS` where nothing has imported this package and these, in a fork that forgets them."""
    forget = (
        "import sys\nfor name in [*sys.modules]:\n"
        f"    if name.split('.')[0] in {('energon_bridge', *packages)}: del sys.modules[name]\n"
    )
    return run_program(["-c", forget + code, *arguments], cwd)


def _become(
    arguments: list[str], cwd: Path, environment: dict[str, str], writing: int, errors: int | None, reading: int
) -> None:
    """Be the program: in a fork, without what pytest has set up in this process."""
    os.setpgid(0, 0)
    _renew_thread_pool()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing if errors is None else errors, 2)
    os.close(writing)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.root.handlers.clear()
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    os.chdir(cwd)
    os.environ.update(environment)
    ours = [path for path in sys.path if not path.startswith(str(TESTS))]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *ours]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(cwd))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, str(cwd))
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        program = Path(cwd, arguments[0])
        sys.argv = list(arguments)
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")

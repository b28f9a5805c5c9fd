"""What every test shares: no network, few threads, repeatable examples, the fixtures, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from left_behind import left_processes, left_shared_memory, shared_memory
from paths import FIXTURES, HELPERS

from energon_bridge.core.format import parallel
from energon_bridge.core.samples.sample_place import warned

# Before anything imports torch, tokenizers or the hub client.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(_variable, "1")

SECONDS_TO_GO_AWAY = 10.0
LEFT_THREADS: set[threading.Thread] = set()
MEGATRON = "megatron.training"
IDLE_THREADS = ("tqdm_monitor", "energon-")
LONG_FILES = (  # the longest first
    "test_ray_workers",
    "test_chains",
    "test_balance_training",
    "test_megatron_training",
    "test_processors",
    "test_dropin",
    "test_torchrun",
    "test_shell_blocks",
    "test_faults",
    "test_torchtitan",
    "test_model_inputs",
    "test_benchmarks",
    "test_resume_training",
    "test_wheel",
    "test_engines",
    "test_mix_changes",
    "test_mix_units",
    "test_workers",
    "test_any_training",
    "test_digits",
    "test_soak",
    "test_cli",
    "test_cache_streams",
)
LONG_FOLDERS = ("training", "suites", "project")
MADV_COLLAPSE, HUGE_PAGE, MANY_TESTS = 25, 2 << 20, 1000

# The same examples on every machine; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker has one of them left when the others have ended."""
    places = {name: place for place, name in enumerate(LONG_FILES)}

    def place(item: pytest.Item) -> tuple[int, bool]:
        folder = item.path.parent.name
        return places.get(item.path.stem, len(places)), folder not in LONG_FOLDERS

    items.sort(key=place)


def pytest_runtest_setup() -> None:
    """Note the threads that earlier tests and libraries left; warnings that are given once are given again."""
    warned.clear()
    LEFT_THREADS.clear()
    LEFT_THREADS.update(threading.enumerate())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage among all that is imported meanwhile: a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what the tests have imported out of garbage collection: a million objects, which never become garbage."""
    gc.collect()
    gc.freeze()
    if len(session.items) > MANY_TESTS:
        use_huge_pages()


def use_huge_pages() -> None:
    """Move this process into huge pages, where Linux can: a fork of half a gigabyte takes 12 ms then, and not 30."""
    maps, madvise = Path("/proc/self/maps"), getattr(ctypes.CDLL(None), "madvise", None)
    for line in maps.read_text().splitlines() if madvise and maps.exists() else ():
        span, access, _, _, file, *_ = line.split()
        first, last = (int(address, 16) // HUGE_PAGE for address in span.split("-"))
        if access == "rw-p" and file == "0" and last > first + 1:
            start, size = (first + 1) * HUGE_PAGE, (last - first - 1) * HUGE_PAGE
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_COLLAPSE)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: their contents may hold a time, and then two processes name a test differently."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def fixtures(tmp_path: Path) -> Path:
    """Return a private copy of the datasets that megatron-energon 7.4.1 prepared."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "energon-7.4.1"))


@pytest.fixture(scope="session")
def rival_python() -> str:
    """Return an interpreter that has megatron-energon 7.4.1 (scripts/rival-env makes one, scripts/test sets it)."""
    path = os.environ.get("ENERGON_RIVAL_PYTHON")
    if not path:
        pytest.skip("ENERGON_RIVAL_PYTHON is not set; scripts/test sets it")
    return path


@pytest.fixture(scope="session")
def run_rival(rival_python: str) -> Iterator[Callable[..., str]]:
    """Yield a function that runs a program with megatron-energon, in a fork that has it, and returns what it prints."""
    command = [rival_python, "-W", "ignore", str(HELPERS / "rival_run.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(*arguments: object) -> str:
            print(json.dumps([*map(str, arguments)]), file=server.stdin, flush=True)
            code, output, errors = json.loads(server.stdout.readline())
            assert code == 0, errors[-4000:]
            return str(output)

        yield run
        server.stdin.close()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what mixes and joins remember out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def pools_fork() -> Iterator[None]:
    """Let processes that work on shards be forks although earlier tests left idle threads: else each imports torch."""

    def active_count() -> int:
        begun = [thread for thread in threading.enumerate() if thread not in LEFT_THREADS]
        return 1 + sum(not thread.name.startswith(IDLE_THREADS) for thread in begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "threading", SimpleNamespace(**vars(threading) | {"active_count": active_count}))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the session if it leaves processes or shared memory behind."""
    before = shared_memory()
    yield
    deadline = time.monotonic() + SECONDS_TO_GO_AWAY
    while True:
        gc.collect()
        left = [*left_processes(), *left_shared_memory(before)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert not left, "the tests left behind: " + "; ".join(left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the Megatron-LM that tests/trainers/test_pretrain.py ran with, where it ran."""
    passed = terminalreporter.stats.get("passed", [])
    for version in sorted({value for report in passed for name, value in report.user_properties if name == MEGATRON}):
        terminalreporter.write_line(f"pretrain() of {MEGATRON} ran: megatron-core {version}")

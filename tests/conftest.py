"""What every test shares: no network, few threads, repeatable examples, the fixtures, and nothing left behind."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch, tokenizers or the hub client.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

FIXTURES = Path(__file__).parent / "fixtures" / "energon-7.4.1"
SHARED_MEMORY = Path("/dev/shm")
SECONDS_TO_GO_AWAY = 10.0
MEGATRON = "megatron.training"

# The same examples on every machine; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


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


def descendants(root: int | None = None) -> dict[int, str]:
    """Return the living processes that this one (or `root`) started, directly or not, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found: dict[int, str] = {}
    waiting = [os.getpid() if root is None else root]
    while waiting:
        parent = waiting.pop()
        for child in [pid for pid, its_parent in parents.items() if its_parent == parent]:
            waiting.append(child)
            try:
                found[child] = (
                    (Path("/proc") / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
    return found


def left_processes() -> list[str]:
    """Return our children, except multiprocessing's own servants, which live as long as the interpreter."""
    servants = ("resource_tracker", "forkserver")
    return [
        f"process {pid}: {line}" for pid, line in descendants().items() if not any(name in line for name in servants)
    ]


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def mapped_by_others() -> str:
    """Return the memory maps of all processes that are not ours, to tell their shared memory from a leak."""
    ours = {os.getpid(), *descendants()}
    maps = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in ours:
            try:
                maps.append((entry / "maps").read_text())
            except OSError:
                continue
    return "".join(maps)


def left_shared_memory(before: set[str]) -> list[str]:
    new = shared_memory() - before
    if not new:
        return []
    others = mapped_by_others()
    return [f"{SHARED_MEMORY}/{name}" for name in sorted(new) if name not in others]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what mixes and joins remember out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
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
    """Name the Megatron-LM that tests/test_pretrain.py ran with, where it ran."""
    passed = terminalreporter.stats.get("passed", [])
    for version in sorted({value for report in passed for name, value in report.user_properties if name == MEGATRON}):
        terminalreporter.write_line(f"pretrain() of {MEGATRON} ran: megatron-core {version}")

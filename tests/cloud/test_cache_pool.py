"""Cache pools: what is kept, for how long, within which limits, and that no stream depends on any of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caching import Slow, files_in, wait_for
from engine import digest
from forked import Program
from paths import HELPERS

from energon_bridge import (
    CachePool,
    CrudeSample,
    DecodeFileStore,
    FileStoreCachePool,
    NoCachePool,
    SampleDecoder,
    SourceInfo,
)
from energon_bridge.cloud.file_cache import to_bytes
from energon_bridge.cloud.node_cache import NodeCache
from energon_bridge.core.errors import ConfigurationError, LoaderError


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FileStoreCachePool]:
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=2)
    yield pool
    pool.close()


@pytest.fixture(params=["files", "none"])
def any_pool(request: pytest.FixtureRequest, pool: FileStoreCachePool) -> CachePool:
    return pool if request.param == "files" else NoCachePool()


# Lazies --------------------------------------------------------------------------------------------------------------


def test_a_lazy_gives_the_same_data_every_time(any_pool: CachePool) -> None:
    """In megatron-energon the second time gives a tuple."""
    store = Slow()
    lazy = any_pool.get_lazy(store, "a")
    for _ in range(3):
        sample = CrudeSample()
        assert lazy.get(sample) == store.content("a")
        assert sample["__sources__"] == (SourceInfo("slow", "a", "", ("a",)),)
    assert lazy.get() == store.content("a")
    assert any_pool.get(store, "b") == store.content("b")


def test_a_kept_file_is_decoded_when_it_is_got(any_pool: CachePool, tmp_path: Path) -> None:
    class Texts(Slow):
        def content(self, key: str) -> bytes:
            return b'{"a": [1]}'

    lazy = any_pool.get_lazy(DecodeFileStore(Texts(), decoder=SampleDecoder()), "x.json")
    first = lazy.get()
    first["a"].append(2)
    assert lazy.get() == {"a": [1]}


def test_a_kept_file_is_read_once_and_deleted_with_the_last_lazy(pool: FileStoreCachePool, tmp_path: Path) -> None:
    store = Slow()
    first, second = pool.get_lazy(store, "a"), pool.get_lazy(store, "a")
    wait_for(lambda: len(files_in(tmp_path)) == 1)
    assert (first.get(), second.get(), first.get()) == (store.content("a"),) * 3
    assert store.reads == ["a"]
    del first
    assert len(files_in(tmp_path)) == 1
    del second
    assert files_in(tmp_path) == []


def test_what_is_got_before_its_turn_is_read_at_once(tmp_path: Path) -> None:
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=1), Slow()
    store.gate.clear()
    running, waiting = pool.get_lazy(store, "a"), pool.get_lazy(store, "b")
    wait_for(lambda: store.reads == ["a"])
    got: list[bytes] = []
    thread = threading.Thread(target=lambda lazy: got.append(lazy.get()), args=(waiting,))
    thread.start()
    wait_for(lambda: store.reads == ["a", "b"])
    store.gate.set()
    thread.join()
    assert (got, running.get()) == ([store.content("b")], store.content("a"))
    pool.close()


def test_a_look_for_room_holds_up_nobody_who_needs_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, go_on = threading.Event(), threading.Event()
    room = NodeCache.make_room

    def slow(self: NodeCache, size: int) -> int:
        looking.set()
        go_on.wait(30)
        return room(self, size)

    monkeypatch.setattr(NodeCache, "make_room", slow)
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=1), Slow()
    lazy, other = pool.get_lazy(store, "a"), pool.get_lazy(store, "b")
    assert looking.wait(30)
    assert lazy.get() == store.content("a")
    assert not go_on.is_set()
    go_on.set()
    wait_for(lambda: len(files_in(tmp_path)) == 1)  # b: a was got meanwhile
    assert other.get() == store.content("b")
    assert store.reads == ["a", "b"]
    pool.close()


def test_a_lazy_cannot_leave_its_process_but_can_be_copied(any_pool: CachePool) -> None:
    lazy = any_pool.get_lazy(Slow(), "a")
    with pytest.raises(ConfigurationError, match=r"still contains a lazy file: call its get\(\) in"):
        pickle.dumps({"lazy": lazy})
    assert copy.deepcopy({"lazy": lazy})["lazy"] is copy.copy(lazy) is lazy


@pytest.mark.parametrize("damage", ["gone", "short", "folder"])
def test_a_kept_file_that_was_tampered_with_is_read_again(
    damage: str, pool: FileStoreCachePool, tmp_path: Path
) -> None:
    store = Slow()
    lazy = pool.get_lazy(store, "a")
    wait_for(lambda: len(files_in(tmp_path)) == 1)
    (file,) = files_in(tmp_path)
    wait_for(lambda: file.stat().st_size == 100)
    lazy.get()
    if damage == "short":
        file.write_bytes(b"a")
    else:
        file.unlink()
    if damage == "folder":
        file.parent.rmdir()
    assert lazy.get() == store.content("a")


# Data ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"\0\xff bytes",
        {"a": [1, 2.5, "é", True, (None, {})], 3: b"x", "l": ["l", "a"]},
        torch.arange(12).reshape(3, 4).to(torch.bfloat16),
        [torch.ones(2), np.arange(3, dtype=">i2"), np.array(["a", "bc"])],
        torch.zeros(100_000)[5:7],
    ],
)
def test_data_comes_back_as_it_was(data: Any, any_pool: CachePool) -> None:
    assert not isinstance(data, torch.Tensor) or len(to_bytes(data)) < 5000  # of a slice, not what it was cut from
    lazy = any_pool.to_cache(data, "data")
    for _ in range(2):
        assert digest(lazy.get()) == digest(data)
        assert type(lazy.get()) is type(data)
    bad = any_pool.get_lazy(Slow(), "bad")
    for _ in range(2):
        with pytest.raises(OSError, match="cannot read bad"):
            bad.get()


class Own:
    """A type that nothing but pickle could write."""


@pytest.mark.parametrize("data", [{"a": [Own()]}, np.array([None]), torch.zeros(1, requires_grad=True)])
def test_other_data_stays_in_memory_and_is_warned_of_once(
    data: Any, pool: FileStoreCachePool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lazies = [pool.to_cache(data, "mine") for _ in range(3)]
    assert all(lazy.get() is data for lazy in lazies)
    assert files_in(tmp_path) == []
    assert caplog.text.count("cannot be written without pickle") == 1


def test_data_is_gone_when_the_pool_is_closed(pool: FileStoreCachePool) -> None:
    data, store = pool.to_cache([1], "mine"), Slow()
    file = pool.get_lazy(store, "a")
    pool.close()
    with pytest.raises(LoaderError, match="mine: the data passed to to_cache is gone"):
        data.get()
    assert file.get() == store.content("a")
    assert pool.get_lazy(store, "b").get() == store.content("b")


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "kept"), [({"max_cache_count": 3}, 3), ({"max_cache_size_gbytes": 450e-9}, 4)])
def test_limits_are_kept(limits: dict[str, Any], kept: int, tmp_path: Path) -> None:
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=2, **limits), Slow()
    names = [f"f{n}" for n in range(10)]
    lazies = {name: pool.get_lazy(store, name) for name in names}
    wait_for(lambda: len(files_in(tmp_path)) >= kept)
    held = pool.to_cache(b"x" * 500, "held")
    time.sleep(0.05)
    assert len(files_in(tmp_path)) == kept
    assert [lazies[name].get() for name in names] == [store.content(name) for name in names]
    assert held.get() == b"x" * 500
    lazies.clear()
    wait_for(lambda: files_in(tmp_path) == [])
    pool.close()


def test_what_waits_is_kept_when_room_comes(tmp_path: Path) -> None:
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=4, max_cache_count=1), Slow()
    first = pool.get_lazy(store, "a")
    wait_for(lambda: len(files_in(tmp_path)) == 1)  # before another thread may take the room
    second = pool.get_lazy(store, "b")
    assert store.reads == ["a"]
    del first
    wait_for(lambda: store.reads == ["a", "b"])
    wait_for(lambda: len(files_in(tmp_path)) == 1)
    assert second.get() == store.content("b")
    del second
    pool.close()


def test_what_is_let_go_while_it_is_copied_takes_no_room(tmp_path: Path) -> None:
    """In megatron-energon its size stays reserved."""
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=1, max_cache_count=1), Slow()
    for n in range(5):
        store.gate.clear()
        lazy = pool.get_lazy(store, f"f{n}")
        wait_for(lambda n=n: len(store.reads) == n + 1)
        del lazy
        store.gate.set()
    lazy = pool.get_lazy(store, "last")
    wait_for(lambda: len(files_in(tmp_path)) == 1)
    assert store.reads[-1] == "last"
    del lazy
    pool.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "pickle"}, "method must be 'raw', got 'pickle'.*never reads a pickle"),
        ({"num_workers": 0}, "num_workers must be an integer of at least 1"),
        ({"max_cache_count": True}, "max_cache_count must be an integer"),
        ({"max_cache_size_gbytes": 0}, "max_cache_size_gbytes must be above 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FileStoreCachePool(**arguments)


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path / "file"), Slow()
    assert pool.get_lazy(store, "a").get() == store.content("a")
    assert pool.to_cache([1], "x").get() == [1]
    assert caplog.text.count("caching is off") == 1


# Processes -----------------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from caching import Slow, files_in, wait_for
from energon_bridge import FileStoreCachePool
parent = Path({parent!r})
pool = FileStoreCachePool(parent_cache_dir=parent)
lazies = [pool.get_lazy(Slow(), str(n)) for n in range(5)]
wait_for(lambda: len([path for path in files_in(parent) if f"_{{os.getpid()}}_" in str(path)]) == 5)
print("ready", flush=True)
"""
HELD = f"{CHILD}time.sleep(60)\n"


def start_held(parent: Path) -> Program:
    """Start a process that holds files."""
    program = Program(["-c", HELD.format(paths=[str(HELPERS)], parent=str(parent))], parent.parent)
    assert program.output.readline() == "ready\n"
    return program


def test_a_killed_process_leaves_what_the_next_one_clears_away(tmp_path: Path) -> None:
    killed, living = start_held(tmp_path), start_held(tmp_path)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert len(files_in(tmp_path)) == 10
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path), Slow()
    lazy = pool.get_lazy(store, "0")
    wait_for(lambda: len(files_in(tmp_path)) == 6)
    assert lazy.get() == store.content("0")
    assert store.reads == ["0"], "what another process wrote was read"
    assert not list(tmp_path.rglob(f"*_{killed.pid}_*"))
    assert len(list(tmp_path.rglob(f"*_{living.pid}_*"))) == 1
    del lazy
    living.kill()
    living.wait()
    pool.close()
    FileStoreCachePool(parent_cache_dir=tmp_path).get_lazy(store, "1")
    gc.collect()
    wait_for(lambda: list(tmp_path.iterdir()) == [])


def test_a_pool_that_is_collected_during_a_fetch_waits_for_nothing(tmp_path: Path) -> None:
    reading, go_on = threading.Event(), threading.Event()
    told: list[bool] = []

    class Stalled(Slow):
        def read(self, key: str) -> tuple[bytes, SourceInfo]:
            reading.set()
            told.append(go_on.wait(30))
            return super().read(key)

    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    lazy = pool.get_lazy(Stalled(), "1")
    assert reading.wait(60)
    del pool, lazy
    gc.collect()  # may happen on a thread that others wait for
    go_on.set()
    wait_for(lambda: list(tmp_path.iterdir()) == [])
    assert told == [True]


def test_a_fork_leaves_the_files_of_its_parent_alone(pool: FileStoreCachePool, tmp_path: Path) -> None:
    store = Slow()
    lazy, held = pool.get_lazy(store, "a"), pool.to_cache([1], "held")
    wait_for(lambda: len(files_in(tmp_path)) == 2)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ok = lazy.get() == store.content("a")  # reads its store
            other = pool.get_lazy(store, "b")
            wait_for(lambda: len(files_in(tmp_path)) == 3)
            ok = ok and other.get() == store.content("b")
            del lazy, held, other
            gc.collect()
            pool.close()
            status = 0 if ok and len(files_in(tmp_path)) == 2 else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(files_in(tmp_path)) == 2
    assert (lazy.get(), held.get()) == (store.content("a"), [1])

"""The room of cached files: one limit for all processes of a host, also when some of them are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from caching import Slow, wait_for

from energon_bridge import FileStoreCachePool
from energon_bridge.stores import disk_cache as room_module
from energon_bridge.stores.disk_cache import SharedQuota

CONTEXT = multiprocessing.get_context("fork")
SECONDS = 20.0


def kept_below(folder: Path) -> list[int]:
    """Return the sizes of all files that are kept; one may go while they are counted."""
    sizes = []
    for path in folder.glob("energon_cache_*/*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return sizes


class Child:
    """A process that makes a room and does what it is told with it."""

    def __init__(self, parent: Path, act: Callable[..., Any], **limits: int) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_child, args=(theirs, parent, act, limits))
        self.process.start()
        theirs.close()

    def do(self, *arguments: Any) -> Any:
        self.pipe.send(arguments)
        assert self.pipe.poll(SECONDS), "the child does not answer"
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(SECONDS)

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(())
        self.process.join(SECONDS)
        self.pipe.close()


def _child(pipe: Any, parent: Path, act: Callable[..., Any], limits: dict[str, int]) -> None:
    room = SharedQuota(str(parent), **limits)
    try:
        while arguments := pipe.recv():
            pipe.send(act(room, *arguments))
    finally:
        room.close()


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def start(act: Callable[..., Any], **limits: int) -> Child:
        made.append(Child(tmp_path, act, **({"max_bytes": 1000, "max_count": 10} | limits)))
        return made[-1]

    yield start
    for child in made:
        child.end()
    assert list(tmp_path.iterdir()) == []  # the last one out leaves nothing behind


def take(room: SharedQuota, size: int) -> bool:
    return room.take(size)


def test_a_limit_is_that_of_all_processes(children: Callable[..., Child]) -> None:
    first, second = children(take), children(take)
    assert first.do(600)
    assert not second.do(500)
    assert second.do(400)
    assert not first.do(1)
    second.end()
    assert first.do(400)


def test_a_number_of_files_is_that_of_all_processes(children: Callable[..., Child]) -> None:
    some = [children(take, max_count=5) for _ in range(3)]
    assert sum(child.do(1) for _ in range(3) for child in some) == 5


def churn(room: SharedQuota, seed: int) -> int:
    """Write and delete files as room allows; return the most bytes that were there at a time, of all processes."""
    generator, files, most = random.Random(seed), [], 0
    for number in range(150):
        size = generator.randrange(1, 400)
        if generator.random() < 0.6 and room.take(size):
            files.append(Path(room.folder.path, str(number)))
            files[-1].write_bytes(bytes(size))
        elif files:
            gone = files.pop(generator.randrange(len(files)))
            size = gone.stat().st_size
            gone.unlink()
            room.give_back(size)
        with room._exclusively():  # else a file that goes and one that comes could both be seen
            most = max(most, sum(kept_below(Path(room.folder.path).parent)))
    for path in files:
        size = path.stat().st_size
        path.unlink()
        room.give_back(size)
    return most


def test_processes_that_come_and_go_side_by_side_never_exceed_it(children: Callable[..., Child]) -> None:
    some = [children(churn) for _ in range(4)]
    for child, seed in zip(some, range(4), strict=True):
        child.pipe.send((seed,))
    most = [child.pipe.recv() for child in some]
    assert 500 < max(most) <= 1000
    last = children(take)
    assert last.do(1000)  # everything was given back


def test_the_room_of_a_killed_process_comes_back(children: Callable[..., Child]) -> None:
    living, dying = children(take), children(take)
    assert dying.do(900)
    assert not living.do(200)
    dying.kill()
    wait_for(lambda: living.do(200))
    assert living.do(800)
    assert not living.do(1)


def take_and_die(room: SharedQuota, size: int) -> None:
    """Be killed between the two writes of a change."""
    write = os.pwrite

    def last_write(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    room_module.os.pwrite = last_write
    room.take(size)


def test_a_kill_in_the_middle_of_a_change_is_made_good(children: Callable[..., Child]) -> None:
    living, dying = children(take), children(take_and_die)
    assert living.do(100)
    dying.pipe.send((300,))
    dying.process.join(SECONDS)
    assert dying.process.exitcode == -signal.SIGKILL
    another = children(take)
    assert not another.do(901)
    assert another.do(900)
    another.end()
    assert living.do(900)


def test_pools_of_several_processes_share_their_limit(tmp_path: Path) -> None:
    def keep(pipe: Any) -> None:
        store = Slow()
        lazies = [pool.get_lazy(store, f"{os.getpid()} {number}") for number in range(8)]
        values = [lazy.get() for lazy in lazies]
        pipe.send(len(values))
        pipe.recv()
        pool.close()

    pool = FileStoreCachePool(parent_cache_dir=tmp_path, max_cache_count=5)
    pipes, processes = [], []
    for _ in range(3):
        ours, theirs = CONTEXT.Pipe()
        processes.append(CONTEXT.Process(target=keep, args=(theirs,)))
        processes[-1].start()
        pipes.append(ours)
    assert [pipe.recv() for pipe in pipes] == [8, 8, 8]
    assert 1 <= len(kept_below(tmp_path)) <= 5
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(SECONDS)
        assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_closed_gives_no_room_and_touches_no_file(tmp_path: Path) -> None:
    room = SharedQuota(str(tmp_path), max_bytes=1000, max_count=10)
    assert room.take(10)
    room.close()
    assert not room.take(10)
    room.give_back(10)
    room.close()
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_is_collected_in_the_middle_of_a_change_goes_after_it(tmp_path: Path) -> None:
    room = SharedQuota(str(tmp_path), max_bytes=1000, max_count=10)
    change = room._change

    def closing(*arguments: int) -> None:
        room.close()  # as the garbage collector may do anywhere
        change(*arguments)

    room._change = closing  # type: ignore[method-assign]
    assert room.take(10)
    assert list(tmp_path.iterdir()) == []
    assert not room.take(10)


def test_without_locks_each_process_counts_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "can_lock", lambda descriptor: False)
    rooms = [SharedQuota(str(tmp_path), max_bytes=1000, max_count=10) for _ in range(2)]
    assert [room.take(900) for room in rooms] == [True, True]
    assert not rooms[0].take(200)
    rooms[0].give_back(900)
    assert rooms[0].take(1000)
    for room in rooms:
        room.close()
    assert list(tmp_path.iterdir()) == []

"""The room of cached files: one limit for all processes of a host, also when some of them are killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from caching import Slow, wait_for

from energon_bridge import FileStoreCachePool, use_node_cache
from energon_bridge.cloud import kept_values, process_folders
from energon_bridge.cloud.kept_values import KeptValues
from energon_bridge.cloud.node_cache import BLOCK, NodeCache, Version

CONTEXT = multiprocessing.get_context("fork")
SECONDS = 20.0


def kept_below(folder: Path) -> list[int]:
    """Return the sizes of all files that are kept; one, or its folder, may go while they are counted."""
    sizes = []
    for within, _, names in os.walk(folder):  # which passes over folders that have gone
        for name in names:
            if name.endswith(".kept"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(os.stat(os.path.join(within, name)).st_size)
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
    room = KeptValues(NodeCache(str(parent / "room"), None), **limits, whole=True)
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


def take(room: KeptValues, size: int) -> bool:
    return room.put(bytes(size)) is not None


def drop(room: KeptValues) -> None:
    """Drop all values of this process."""
    for path in Path(room.folder).iterdir():
        room.drop(str(path), path.stat().st_size)


def test_a_limit_is_that_of_all_processes(children: Callable[..., Child]) -> None:
    first, second = children(take), children(take)
    assert first.do(600)
    assert not second.do(500)
    assert second.do(400)
    assert not first.do(1)
    second.end()
    wait_for(lambda: first.do(400))  # processes take turns at looks


def churn(room: KeptValues, seed: int) -> int:
    """Keep and drop values as room allows; return the most bytes that were there at a time, of all processes."""
    generator, values, most = random.Random(seed), [], 0
    for _ in range(150):
        size = generator.randrange(1, 400)
        if generator.random() < 0.6 and (path := room.put(bytes(size))):
            values.append((path, size))
        elif values:
            room.drop(*values.pop(generator.randrange(len(values))))
        with process_folders.alone(room._cache.folder):  # else a value that goes and one that comes could both be seen
            most = max(most, sum(kept_below(Path(room.folder).parent)))
    for value in values:
        room.drop(*value)
    return most


def test_processes_that_come_and_go_side_by_side_never_exceed_it(children: Callable[..., Child]) -> None:
    some = [children(churn) for _ in range(4)]
    for child, seed in zip(some, range(4), strict=True):
        child.pipe.send((seed,))
    most = [child.pipe.recv() for child in some]
    assert 500 < max(most) <= 1000
    last = children(take)
    assert last.do(1000)  # everything was given back


def fill(room: KeptValues, size: int) -> tuple[int, int]:
    """Keep values until there is no room; return how many, and how often it was looked."""
    looks, look = [], room._looking
    room._looking = lambda size: looks.append(size) or look(size)  # type: ignore[method-assign,func-returns-value]
    count = 0
    while room.put(bytes(size)):
        count += 1
    return count, len(looks)


def test_where_much_may_be_kept_few_look(children: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the limit is that of all processes all the same."""
    monkeypatch.setattr(kept_values, "_LEASED_COUNT", 1)
    some = [children(fill, max_count=2000, max_bytes=10**9) for _ in range(4)]
    for child in some:
        child.pipe.send((1,))
    counts, looks = zip(*(child.pipe.recv() for child in some), strict=True)
    assert 1900 <= sum(counts) <= 2000
    assert sum(looks) < 500


def test_the_room_of_a_killed_process_comes_back(children: Callable[..., Child]) -> None:
    living, dying = children(take), children(take)
    assert dying.do(900)
    assert not living.do(200)
    dying.kill()
    wait_for(lambda: living.do(200))
    assert living.do(800)
    assert not living.do(1)


def put_and_die(room: KeptValues, size: int) -> None:
    """Be killed before the value is written, when its room is taken."""
    opened = open

    def last_open(path: str, mode: str) -> Any:
        if mode == "r+b":
            os.kill(os.getpid(), signal.SIGKILL)
        return opened(path, mode)

    kept_values.open = last_open  # type: ignore[attr-defined]
    room.put(bytes(size))


def test_a_kill_in_the_middle_of_a_change_is_made_good(children: Callable[..., Child]) -> None:
    living, dying = children(take), children(put_and_die)
    assert living.do(100)
    dying.pipe.send((300,))
    dying.process.join(SECONDS)
    assert dying.process.exitcode == -signal.SIGKILL
    another = children(take)
    assert not another.do(901)
    wait_for(lambda: another.do(900))
    another.end()
    wait_for(lambda: living.do(900))


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


def room_in(folder: Path) -> KeptValues:
    return KeptValues(NodeCache(str(folder / "room"), None), max_bytes=1000, max_count=10, whole=True)


def test_what_is_closed_gives_no_room_and_touches_no_file(tmp_path: Path) -> None:
    room = room_in(tmp_path)
    path = room.put(bytes(10))
    assert path
    room.close()
    assert room.put(bytes(10)) is None
    room.drop(path, 10)
    room.close()
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_is_collected_in_the_middle_of_a_change_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = room_in(tmp_path)
    look = room._looking

    @contextlib.contextmanager
    def closing(size: int) -> Iterator[None]:
        with look(size):
            room.close()  # as the garbage collector may do anywhere
            yield

    monkeypatch.setattr(room, "_looking", closing)
    assert room.put(bytes(10)) is None
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""


def test_without_locks_there_are_the_limits_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the folders of dead processes stay."""

    def refused(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(process_folders.fcntl, "flock", refused)
    rooms = [room_in(tmp_path) for _ in range(2)]
    path = rooms[0].put(bytes(900))
    assert path
    assert not rooms[1].put(bytes(200))
    rooms[0].drop(path, 900)
    wait_for(lambda: rooms[1].put(bytes(1000)) is not None)
    for room in rooms:
        room.close()
    assert list(tmp_path.iterdir()) == []


# One quota for all ------------------------------------------------------------------------------------------------


def publish(cache: NodeCache, number: int) -> None:
    cache.put((Version("https://example.org/a", "tag", 100 * BLOCK), number), bytes(100_000))


def blocks_in(folder: Path) -> int:
    return len(list(folder.rglob("*.block")))


def test_blocks_make_room_for_what_is_kept(tmp_path: Path) -> None:
    cache = NodeCache(str(tmp_path), 1_000_000)
    for number in range(8):
        publish(cache, number)
    room = KeptValues(cache, max_bytes=10**9, max_count=10**6)
    paths = [room.put(bytes(200_000)) for _ in range(4)]
    assert all(paths)
    assert blocks_in(tmp_path) == 0
    assert room.put(bytes(200_000)) is None, "the quota of the cache is that of what is kept, too"
    for number in range(8):
        publish(cache, number)
    assert sum(kept_below(tmp_path)) == 800_000, "what a living process keeps was evicted"
    assert blocks_in(tmp_path) == 0
    room.close()
    again = NodeCache(str(tmp_path), 1_000_000)
    for number in range(8):
        publish(again, number)
    assert blocks_in(tmp_path) == 8


def test_a_pool_without_a_folder_keeps_files_in_the_cache_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENERGON_CACHE_DIR", "ENERGON_CACHE_BYTES"):
        monkeypatch.setenv(name, "")
    use_node_cache(tmp_path / "node", 1000)
    pool, store = FileStoreCachePool(), Slow()
    lazies = [pool.get_lazy(store, str(number)) for number in range(12)]
    wait_for(lambda: len(kept_below(tmp_path / "node")) == 9)  # a tenth of the quota is left free
    assert [lazy.get() for lazy in lazies] == [store.content(str(number)) for number in range(12)]
    assert len(kept_below(tmp_path / "node")) == 9
    pool.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / f"energon_cache_{os.getuid()}"
    folder.mkdir()
    (folder / "theirs").touch()
    os.chown(folder, 65534, 65534)
    pool, store = FileStoreCachePool(parent_cache_dir=tmp_path), Slow()
    assert pool.get_lazy(store, "a").get() == store.content("a")
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert "belongs to somebody else" in caplog.text

"""Queues that are pipes: every item of every writer arrives once and whole, in the order of its writer. And flags."""

from __future__ import annotations

import os
import queue
import time
from contextlib import closing

import pytest

from energon_bridge.loader.pipes import PIPES, PipeQueue, SharedFlag

WRITERS, ITEMS = 3, 50


def send(items: PipeQueue, writer: int) -> None:
    for number in range(ITEMS):
        # Some are more than a pipe takes at once.
        items.put((writer, number, bytes([writer]) * (number % 5 * 30_000)))


def test_items_of_several_processes_arrive_whole_and_in_order() -> None:
    with closing(PIPES.Queue()) as items:
        writers = [PIPES.Process(target=send, args=(items, writer)) for writer in range(WRITERS)]
        for process in writers:
            process.start()
        found: list[list[int]] = [[] for _ in writers]
        for _ in range(WRITERS * ITEMS):
            writer, number, content = items.get(timeout=20)
            assert content == bytes([writer]) * (number % 5 * 30_000)
            found[writer].append(number)
        for process in writers:
            process.join()
        assert found == [list(range(ITEMS))] * WRITERS
        assert items.qsize() == 0


def test_an_empty_queue_says_so() -> None:
    with closing(PIPES.Queue()) as items, pytest.raises(queue.Empty):
        items.get(timeout=0.01)


def test_the_reader_knows_how_many_items_wait() -> None:
    with closing(PIPES.Queue()) as items:
        process = PIPES.Process(target=items.put, args=("of another process",))
        process.start()
        process.join()
        items.put("of this one")
        assert items.qsize() == 2
        assert items.get(timeout=5) == "of another process"
        assert items.qsize() == 1


def test_a_closed_queue_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    PIPES.Queue().close()
    assert set(os.listdir("/proc/self/fd")) == before


def look(flag: SharedFlag) -> None:
    while not flag.is_set():
        pass


def test_a_flag_is_seen_by_all_processes() -> None:
    flag = PIPES.Event()
    assert not flag.is_set()
    looking = [PIPES.Process(target=look, args=(flag,)) for _ in range(2)]
    for process in looking:
        process.start()
    raising = PIPES.Process(target=flag.set)
    raising.start()
    for process in (raising, *looking):
        process.join(20)
        assert process.exitcode == 0
    assert flag.is_set()


def test_a_process_that_is_killed_while_it_looks_holds_up_nobody() -> None:
    """An Event of multiprocessing would be locked for ever by the first or second of these."""
    flag = PIPES.Event()
    for _ in range(20):
        process = PIPES.Process(target=look, args=(flag,))
        process.start()
        time.sleep(0.01)
        process.kill()
        process.join()
    raising = PIPES.Process(target=flag.set)
    raising.start()
    raising.join(20)
    try:
        assert raising.exitcode == 0
    finally:
        raising.kill()
        raising.join()
    assert flag.is_set()

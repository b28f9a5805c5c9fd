"""The cache of a node: each byte is fetched once, whoever asks, and no kill, full disk or damage makes a wrong one."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import pytest
from commands import refusal_of
from engine import config_of, text_dataset, train_dataset
from forked import run_forked, start_forked
from object_server import ObjectServer, serving
from test_object_storage import content

from energon_bridge import get_savable_loader
from energon_bridge.cloud import node_cache
from energon_bridge.cloud.node_cache import BLOCK, use_node_cache
from energon_bridge.core.errors import ConfigurationError, ShardMissingError, ShortReadError
from energon_bridge.core.storage import open_store
from energon_bridge.core.storage.store import MADE

SIZES = {"a.tar": 9 * BLOCK + 77, "b.tar": 6 * BLOCK, "small": 1000}
LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
KILLS = 100 if LONG else 3
FILES = {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}
TOTAL = sum(SIZES.values())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENERGON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ENERGON_CACHE_BYTES", raising=False)
    monkeypatch.setattr(node_cache, "_caches", {})
    return tmp_path / "cache"


@pytest.fixture
def server(tmp_path: Path, cache: Path) -> Iterator[ObjectServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    with serving(folder) as found:
        yield found


def read_much(url: str, seed: int, times: int = 60) -> int:
    """Compare random ranges of all files with what they must be; return the bytes that this process fetched."""
    before, rng, store = MADE.request_bytes, random.Random(seed), open_store(url)
    for _ in range(times):
        wanted = []
        for name, data in rng.sample(sorted(FILES.items()), 2):
            offsets = [rng.randrange(len(data)) for _ in range(4)]
            lengths = [rng.choice((0, 1, 900, 70_000, 2 * BLOCK)) % (len(data) - offset + 1) for offset in offsets]
            wanted.append((name, offsets, lengths))
        for (name, offsets, lengths), found in zip(wanted, store.read_all(wanted), strict=True):  # type: ignore[attr-defined]
            for offset, length, block in zip(offsets, lengths, found, strict=True):
                assert bytes(block) == FILES[name][offset : offset + length], (name, offset, length)
    for name, data in FILES.items():
        assert store.read(name) == data
        assert store.size(name) == len(data)
    return MADE.request_bytes - before


def blocks_in(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.block"))


def used(cache: Path) -> int:
    total = 0
    for path in cache.rglob("*"):
        with suppress(FileNotFoundError):  # other processes evict blocks meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def test_each_byte_is_fetched_once_by_any_number_of_processes(
    server: ObjectServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energon_bridge.cloud.http._HEDGE_SECONDS", 60.0)  # a second request on a busy machine
    server.latency = 0.002
    fetched = run_forked(4, lambda rank: read_much(server.url, rank, 25))
    assert TOTAL <= sum(fetched) <= 1.02 * TOTAL
    logging.getLogger(__name__).info("%d bytes fetched by 4 processes, of %d", sum(fetched), TOTAL)
    asked = len(server.asked)
    assert asked <= TOTAL // BLOCK + 2 * len(FILES) + 3
    assert read_much(server.url, 9) == 0
    assert len(server.asked) == asked
    assert not list(cache.rglob("*.claim")) + list(cache.rglob("*.writing"))


@pytest.mark.parametrize("ranks", [1, 2, 4] if LONG else [1, 3])
def test_requests_of_a_run_do_not_grow_with_its_ranks(server: ObjectServer, ranks: int) -> None:
    text_dataset(server.folder / "texts", train=[9, 11, 7, 30])
    expected = content(server.folder / "texts", 30)
    for found in run_forked(ranks, lambda rank: content(f"{server.url}/texts", 30, stop=7)):
        assert found == expected
    files = {path for path, _ in server.asked}
    assert len(server.asked) <= 2 * len(files), server.asked
    shards = [request for request in server.asked if request[0].endswith(".tar")]
    logging.getLogger(__name__).info("%d ranks: %d requests, %d of shards", ranks, len(server.asked), len(shards))


def test_a_cap_below_the_data(server: ObjectServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cap = TOTAL // 4
    monkeypatch.setenv("ENERGON_CACHE_BYTES", str(cap))
    sizes = run_forked(3, lambda rank: (read_much(server.url, rank, 15), used(cache))[1])
    assert max(sizes) <= cap + 3 * BLOCK
    assert blocks_in(cache)


@pytest.mark.parametrize("cap", ["1", "1500000", "1.6MB"])  # the last is a tenth of the data
def test_a_cap_of_a_block_or_less(server: ObjectServer, cache: Path, monkeypatch: pytest.MonkeyPatch, cap: str) -> None:
    monkeypatch.setenv("ENERGON_CACHE_BYTES", cap)
    read_much(server.url, 1, 5)
    assert used(cache) <= 1_700_000


def test_a_cap_below_one_object_is_said_once(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENERGON_CACHE_BYTES", str(len(FILES["b.tar"]) - 1))
    for _ in range(2):
        assert open_store(server.url).read_range("b.tar", 5, 9) == FILES["b.tar"][5:14]
    size = len(FILES["b.tar"])
    assert caplog.text.count(f"is limited to {size - 1} bytes, and {server.url}/b.tar alone has {size}: ") == 1


def test_killed_processes_leave_no_wrong_byte(server: ObjectServer, cache: Path) -> None:
    rng = random.Random(5)
    for number in range(KILLS):
        children = [start_forked(lambda seed=seed: read_much(server.url, seed)) for seed in range(3)]  # type: ignore[misc]
        for child in children:
            os.setpgid(child.pid, children[0].pid)
        time.sleep(rng.uniform(0.005, 0.12))
        os.killpg(children[0].pid, signal.SIGKILL)
        for child in children:
            child.result()
        if number % 3 == 2:
            began = time.monotonic()
            read_much(server.url, number, 3)
            assert time.monotonic() - began < 10  # claims of the dead hold nobody up
            for path in blocks_in(cache)[::2]:
                path.unlink()


def forget() -> None:
    """Forget what this process knows of the cache, as a new one would."""
    node_cache._caches.clear()


def test_damaged_blocks_are_fetched_again(server: ObjectServer, cache: Path) -> None:
    read_much(server.url, 1, 1)
    for number, path in enumerate(blocks_in(cache)):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 1
        path.write_bytes((data, data[:-9], b"")[number % 3])
    for path in cache.rglob("*.id"):
        path.write_bytes(b"{[")
    forget()
    assert read_much(server.url, 2, 5) >= TOTAL
    forget()
    assert read_much(server.url, 3, 5) == 0


def test_a_disk_that_takes_nothing(
    server: ObjectServer, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_bytes(b"a file in the way")
    read_much(server.url, 1, 3)
    assert caplog.text.count(f"the node cache {cache}/v2 cannot be written: [Errno 20] Not a directory") == 1
    cache.unlink()
    forget()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("energon_bridge.cloud.node_cache.os.replace", full)
        read_much(server.url, 1, 3)
    assert caplog.text.count(f"the node cache {cache}/v2 cannot be written: [Errno 28] No space left on device") == 1
    assert not list(cache.rglob("*.writing")) + list(cache.rglob("*.claim")) + blocks_in(cache)


def test_an_object_that_was_replaced(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(server.url)
    assert store.read_range("b.tar", 5, 9) == FILES["b.tar"][5:14]
    (server.folder / "b.tar").write_bytes(FILES["b.tar"][::-1])
    assert store.read_range("b.tar", 3 * BLOCK, 9) == FILES["b.tar"][::-1][3 * BLOCK : 3 * BLOCK + 9]
    assert store.read_range("b.tar", 5, 9) == FILES["b.tar"][::-1][5:14]
    (server.folder / "small").write_bytes(b"1")
    monkeypatch.setattr(node_cache, "_BELIEVED_SECONDS", 0.0)
    forget()
    assert open_store(server.url).read("small") == b"1"


def test_lint_sees_an_object_that_was_replaced_just_now(server: ObjectServer) -> None:
    """A loader may believe for a minute what the cache has seen; commands, and their worker processes, ask."""
    text_dataset(server.folder / "texts", train=[9, 11])
    url = f"{server.url}/texts"
    content(url, 30)
    shard = server.folder / "texts/train/shard_001.tar"
    shard.write_bytes(bytes(shard.stat().st_size))
    for workers in (1, 2):
        forget()
        content(url, 3)
        forget()
        assert "shard_001.tar" in refusal_of("lint", url, "--parallel", workers)
        assert node_cache.BELIEVED_SINCE not in os.environ


def test_refusals_are_the_same(server: ObjectServer) -> None:
    store = open_store(server.url)
    for _ in range(2):
        with pytest.raises(ShortReadError, match="expected 20 bytes at offset 990, got 10"):
            store.read_range("small", 990, 20)
        with pytest.raises(ShardMissingError, match="/none: no such file"):
            store.read("none")
        assert not store.exists("none")
    (server.folder / "empty").write_bytes(b"")
    assert (store.read("empty"), store.size("empty"), store.read_range("small", 3, 0)) == (b"", 0, b"")


def test_the_claim_of_a_process_elsewhere_holds_for_some_time(
    server: ObjectServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = node_cache.node_cache()
    assert found is not None
    monkeypatch.setattr(node_cache, "_CLAIM_SECONDS", 0.3)
    name = found._id_name(f"{server.url}/small")
    monkeypatch.setattr(node_cache, "_host", lambda: "elsewhere")
    assert found._claim(name)
    monkeypatch.setattr(node_cache, "_host", lambda: "here")
    began = time.monotonic()
    assert open_store(server.url).read("small") == FILES["small"]
    assert 0.2 < time.monotonic() - began < 5


def counted(store: object, call: str, *arguments: object) -> tuple[int, int, int, int]:
    before = MADE.cache_hits, MADE.cache_hit_bytes, MADE.cache_misses, MADE.cache_miss_bytes
    getattr(store, call)(*arguments)
    now = MADE.cache_hits, MADE.cache_hit_bytes, MADE.cache_misses, MADE.cache_miss_bytes
    return tuple(after - earlier for earlier, after in zip(before, now, strict=True))  # type: ignore[return-value]


def test_hits_and_misses_are_counted(server: ObjectServer) -> None:
    store = open_store(server.url)
    assert counted(store, "read", "small") == (0, 0, 1, 1000)  # it came with the answer that named its version
    assert counted(store, "read", "small") == (1, 1000, 0, 0)
    assert counted(store, "read_range", "a.tar", BLOCK - 1, BLOCK + 2) == (0, 0, 3, 3 * BLOCK)
    assert counted(store, "read_range", "a.tar", 2 * BLOCK, 2 * BLOCK) == (1, BLOCK, 1, BLOCK)
    assert counted(store, "size", "a.tar") == (0, 0, 0, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_metrics_count_hits_also_where_nothing_is_asked_any_more(server: ObjectServer, workers: int) -> None:
    text_dataset(server.folder / "texts", train=[9, 11, 7, 30])

    def metrics() -> dict[str, float]:
        dataset = train_dataset(f"{server.url}/texts")
        with closing(get_savable_loader(dataset, worker_config=config_of(1, workers))) as loader:
            for _ in islice(loader, 12):
                pass
            return loader.metrics()

    first, asked = metrics(), len(server.asked)
    second = metrics()
    assert first["cache_misses"] > 0
    assert first["cache_miss_bytes"] > 0
    assert not [path for path, _ in server.asked[asked:] if path.endswith(".tar")]
    assert second["cache_hits"] > 0
    assert second["cache_hit_bytes"] > 0
    assert second["cache_misses"] == 0


def test_how_it_is_turned_on(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_node_cache(tmp_path / "other", 5_000_000)
    assert (os.environ["ENERGON_CACHE_DIR"], os.environ["ENERGON_CACHE_BYTES"]) == (str(tmp_path / "other"), "5000000")
    use_node_cache(tmp_path / "other")
    assert "ENERGON_CACHE_BYTES" not in os.environ
    use_node_cache(None)
    assert node_cache.node_cache() is None
    with pytest.raises(ConfigurationError, match="cache_bytes must be above 0, or None, got 0"):
        use_node_cache(tmp_path, 0)
    monkeypatch.setenv("ENERGON_CACHE_DIR", str(cache))
    for wrong in ("much", "0", "-5"):
        monkeypatch.setenv("ENERGON_CACHE_BYTES", wrong)
        with pytest.raises(ConfigurationError, match="ENERGON_CACHE_BYTES must be"):
            open_store("https://example.org/x")

"""Remote stores against a real server on loopback: exact bytes whatever fails, few requests, forks, named refusals."""

from __future__ import annotations

import ast
import gc
import json
import os
import pickle
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from chain_cases import COOKERS, LEAVES, TALK
from click.testing import CliRunner
from crude import crude_mix
from engine import loaders_of, text_dataset, train_dataset
from forked import start_forked
from keyed import join, keyed_dataset, shards, shuffled, write_mix
from mixes import many_datasets
from mixing import mix_data
from object_server import ObjectServer, every, no_fault, serving
from paths import REPOSITORY

from energon_bridge import DefaultTaskEncoder
from energon_bridge.cloud.http import _Shared
from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    ShardMissingError,
    ShortReadError,
    StorageError,
)
from energon_bridge.core.format.jsonl import index_jsonl
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.storage import OpenFiles, Stalls, open_store
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.core.storage.store import MADE, values_of
from energon_bridge.core.stream.reader import RoundBuffer
from energon_bridge.tools.cli.main import main

BIG = 9_500_000
FORKS = 200 if os.environ.get("ENERGON_LONG_TESTS") else 8


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(7).randbytes(BIG)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with serving(tmp_path) as found:
        yield found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is tried again be tried again soon."""
    monkeypatch.setattr("energon_bridge.cloud.http._PAUSE", 0.002)
    monkeypatch.setattr("energon_bridge.cloud.http._HEDGE_SECONDS", 0.15)


def ranges_of(data: bytes, seed: int, count: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    offsets = [rng.randrange(len(data)) for _ in range(count)]
    return offsets, [rng.choice((0, 1, 500, 70_000, 5_000_000)) % (len(data) - offset + 1) for offset in offsets]


# Reading -------------------------------------------------------------------------------------------------------------


def test_reads_give_exactly_the_bytes(server: ObjectServer, data: bytes) -> None:
    (server.folder / "a").mkdir()
    (server.folder / "a/x y+z.tar").write_bytes(data)
    (server.folder / "a/empty").write_bytes(b"")
    store = open_store(f"{server.url}/a/")
    name = "x y+z.tar"
    assert store.root == f"{server.url}/a"
    assert store.size(name) == BIG
    assert store.read(name) == data
    assert (store.read("empty"), store.size("empty")) == (b"", 0)
    assert store.read_range(name, 5, 0) == b""
    assert store.read_range(name, 1000, 9_000_000) == data[1000:9_001_000]
    for seed in range(5):
        offsets, lengths = ranges_of(data, seed, 12)
        expected = [data[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        assert [bytes(block) for block in store.read_ranges(name, offsets, lengths)] == expected
    assert store.exists(name)
    assert not store.exists("other")
    assert pickle.loads(pickle.dumps(store)).read_range(name, 7, 9) == data[7:16]


def test_near_ranges_are_one_request_and_far_ones_go_out_together(server: ObjectServer, data: bytes) -> None:
    (server.folder / "x").write_bytes(data)
    store = open_store(server.url)
    store.read_ranges("x", [0, 5000, 37_000], [4000, 2000, 63_000])
    assert [span for _, span in server.asked] == ["bytes=0-99999"]
    server.latency = 0.05
    began = time.monotonic()
    offsets = list(range(0, BIG - 1000, 400_000))
    store.read_ranges("x", offsets, [1000] * len(offsets))
    assert len(server.asked) == 1 + len(offsets)
    assert time.monotonic() - began < 0.05 * len(offsets) / 2
    assert server.most_at_once > 4


def test_requests_under_way_ask_for_so_many_bytes_at_most(
    server: ObjectServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energon_bridge.cloud.http._BYTES_IN_FLIGHT", 3000)
    (server.folder / "x").write_bytes(data)
    store, offsets = open_store(server.url), list(range(0, 3_000_000, 400_000))
    server.latency = 0.05
    assert [len(one) for one in store.read_ranges("x", offsets, [1000] * len(offsets))] == [1000] * len(offsets)
    assert server.most_at_once == 3


def test_a_read_takes_the_places_that_another_one_leaves(
    server: ObjectServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energon_bridge.cloud.http._MOST_IN_FLIGHT", 8)
    (server.folder / "x").write_bytes(data)
    store, offsets = open_store(server.url), list(range(0, BIG - 1000, 40_000))
    server.latency = 0.05
    first = threading.Thread(target=store.read_ranges, args=("x", offsets[:8], [1000] * 8))
    first.start()
    while len(server.asked) < 8:
        time.sleep(0.001)
    found: list[Any] = []
    second = threading.Thread(target=lambda: found.extend(store.read_ranges("x", offsets, [1000] * len(offsets))))
    second.start()  # there is a place for one request only
    first.join()
    server.most_at_once = 0
    second.join()
    assert server.most_at_once > 4
    assert [bytes(one) for one in found] == [data[offset : offset + 1000] for offset in offsets]


@pytest.mark.parametrize("fault", ["reset", "503", "429", "500", "short", "mixed"])
def test_no_fault_changes_the_bytes(server: ObjectServer, data: bytes, quick: None, fault: str) -> None:
    (server.folder / "x").write_bytes(data)
    store = open_store(server.url)
    server.fault = every(3, *(("reset", "503", "short", "500") if fault == "mixed" else (fault,)))
    before = values_of(MADE)
    for seed in range(6):
        offsets, lengths = ranges_of(data, seed, 14)
        expected = [data[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        assert [bytes(block) for block in store.read_ranges("x", offsets, lengths)] == expected
    assert store.read("x") == data
    assert MADE.request_retries - before[1] >= 5
    assert len(server.asked) < 200


def test_a_broken_body_is_resumed_and_not_begun_again(server: ObjectServer, data: bytes, quick: None) -> None:
    (server.folder / "x").write_bytes(data)
    server.fault = lambda number: "short" if number < 3 else ""
    assert open_store(server.url).read_range("x", 0, 4_000_000) == data[:4_000_000]
    starts = [int(span[6:].partition("-")[0]) for _, span in server.asked]
    assert starts == sorted(starts)
    assert starts[1] >= 1_500_000
    assert starts[3] >= 3_000_000


def test_an_object_that_changes_meanwhile_is_not_patched_together(
    server: ObjectServer, data: bytes, quick: None
) -> None:
    file = server.folder / "x"
    file.write_bytes(data[:2_000_000])
    after = bytes(reversed(data[:2_000_000]))

    def fault(number: int) -> str:
        if number == 1:
            file.write_bytes(after)
        return "" if number else "short"

    server.fault = fault
    assert open_store(server.url).read_range("x", 0, 2_000_000) == after


def test_a_stalled_answer_gets_a_rival(server: ObjectServer, data: bytes, quick: None) -> None:
    (server.folder / "x").write_bytes(data)
    server.fault = lambda number: "stall" if number in (0, 4) else ""
    store = open_store(server.url)
    before = values_of(MADE)
    began = time.monotonic()
    offsets = list(range(0, BIG - 1000, 1_000_000))
    assert store.read_ranges("x", offsets, [1000] * len(offsets)) == [data[low : low + 1000] for low in offsets]
    assert time.monotonic() - began < 5
    assert MADE.request_hedges - before[2] >= 2


def test_a_server_that_never_answers_is_given_up(server: ObjectServer, quick: None) -> None:
    (server.folder / "x").write_bytes(b"content")
    server.fault = lambda number: "stall"
    stalls = Stalls(0.2)
    store = open_store(server.url, files=OpenFiles(stalls=stalls))
    with pytest.raises(StorageError, match=r"/x: cannot read 3 bytes at offset 1: .*(no answer|tried)"):
        store.read_range("x", 1, 3)
    assert stalls.count


@pytest.mark.parametrize(
    ("fault", "why"), [("503", "HTTP 503 "), ("reset", "no answer: "), ("stall", "no complete answer yet ")]
)
def test_a_store_that_makes_a_run_wait_is_named_once_a_minute(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, why: str
) -> None:
    """Not at once, and not for each of the pieces that wait."""
    monkeypatch.setattr("energon_bridge.cloud.http._TOLD_SECONDS", 0.6)
    monkeypatch.setattr("energon_bridge.cloud.http._shared", PerProcess(_Shared))
    server.stall = 1.5
    (server.folder / "x").write_bytes(bytes(9 << 20))
    store = open_store(server.url)
    server.fault = lambda number: "503" if not number else ""
    store.read_range("x", 0, 7)
    assert not caplog.records
    ends = [time.monotonic() + 2]
    server.fault = lambda _: fault if time.monotonic() < ends[0] else ""
    for _ in range(2):
        assert len(store.read_ranges("x", [0, 4 << 20, 8 << 20], [7, 7, 7])) == 3
        ends[0] = time.monotonic() + 1
    (told,) = [one.message for one in caplog.records]
    assert told.startswith(f"waiting for 127.0.0.1:{server.server_port}: {why}")


def test_redirects_are_followed(server: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x").write_bytes(b"content")
    with serving(tmp_path / "other") as other:
        server.fault = lambda number: f"to:{other.url}"
        assert open_store(server.url).read_range("x", 1, 3) == b"ont"
        other.fault = lambda number: f"to:{server.url}"
        with pytest.raises(StorageError, match="redirected 6 times in a row"):
            open_store(server.url).read_range("x", 1, 3)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_bridge.cloud.http._UNREACHED_TRIES", 1)
    monkeypatch.setattr("energon_bridge.cloud.http._shared", PerProcess(_Shared))
    with socket.socket() as held:  # a port at which nobody listens
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(StorageError, match=rf"cannot connect to 127\.0\.0\.1:{port}: ConnectionRefusedError"):
            open_store(f"http://127.0.0.1:{port}/data").read_range("x", 0, 3)


@pytest.mark.parametrize(
    ("endpoint", "remedy"),
    [
        ("", "This is Amazon's server: for another one that speaks S3, set AWS_ENDPOINT_URL to http://HOST:PORT."),
        ("localhost:9000", "AWS_ENDPOINT_URL must begin with http:// or https://, such as http://HOST:PORT."),
    ],
)
def test_an_s3_server_that_is_not_there_names_the_variable(
    endpoint: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    pytest.importorskip("boto3")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("energon_bridge.cloud.http._UNREACHED_TRIES", 1)
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StorageError) as raised:
        open_store("s3://bucket-of-nobody/data").read_range("x", 0, 3)
    assert str(raised.value).endswith(remedy)


def test_a_message_that_ends_with_a_full_stop_gets_no_second_one(tmp_path: Path) -> None:
    class Stopping(ObjectServer):
        def answer(self, handler: Any) -> None:
            body = b"<Error><Code>InvalidAccessKeyId</Code><Message>The thing happened.</Message></Error>"
            handler.send_response(403)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

    with serving(tmp_path, Stopping) as stopping, pytest.raises(StorageError) as raised:
        open_store(stopping.url).read_range("x", 0, 3)
    assert "HTTP 403 InvalidAccessKeyId The thing happened. The credentials are wrong" in str(raised.value)


def test_what_is_refused_for_good_is_named_at_once(server: ObjectServer) -> None:
    (server.folder / "x").write_bytes(b"0123456789")
    store = open_store(server.url)
    with pytest.raises(ShortReadError, match=r"/x: expected 20 bytes at offset 5, got 5"):
        store.read_ranges("x", [0, 5], [3, 20])
    with pytest.raises(ShortReadError, match=r"/x: expected 2 bytes at offset 50, got 0"):
        store.read_range("x", 50, 2)
    with pytest.raises(ShardMissingError, match=r"/none: no such file"):
        store.read("none")
    with pytest.raises(DatasetNotFoundError, match=r"/nowhere: no such folder"):
        open_store(f"{server.url}/nowhere").read("x")
    with pytest.raises(StorageError, match="a web server cannot list"):
        store.list()
    with pytest.raises(StorageError, match="cannot write to a web server"):
        store.write("y", b"")
    server.fault = lambda number: "whole"
    with pytest.raises(StorageError, match="expected 3 bytes at offset 2, got 10: the server ignores Range requests"):
        store.read_range("x", 2, 3)
    assert store.read("x") == b"0123456789"
    for status, words in (
        ("403", "lack the permission for this in the server"),
        ("401", "credentials are wrong or have expired"),
    ):
        server.fault = lambda number, status=status: status  # type: ignore[misc]
        with pytest.raises(StorageError, match=f"cannot read 3 bytes at offset 2: HTTP {status} Trouble.*{words}"):
            store.read_range("x", 2, 3)
    assert len(server.asked) < 25


@pytest.mark.parametrize("status", [403, 404, 405])
def test_a_web_server_need_not_answer_for_folders(server: ObjectServer, status: int) -> None:
    """nginx says 403 unless it lists folders, object stores behind HTTP say 404."""
    name = plain(server.folder)
    server.folders = status
    assert content(f"{server.url}/{name}", 4) == content(server.folder / name, 4)
    for command in ("info", "lint"):
        there = CliRunner().invoke(main, [command, f"{server.url}/{name}", "--json"])
        assert there.exit_code == 0, there.output
        assert "/nowhere: no such folder" in CliRunner().invoke(main, [command, f"{server.url}/nowhere"]).output
    with pytest.raises(DatasetNotFoundError, match=r"/nowhere: no such folder"):
        content(f"{server.url}/nowhere", 1)


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [("s3", "boto3", "s3"), ("gs", "google.cloud.storage", "gcs"), ("az", "azure.storage.blob", "azure")],
)
def test_a_library_that_is_missing_is_named(
    url: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    store = open_store(f"{url}://bucket/data")
    for call in (store.check_root, store.list, lambda: store.read("x"), lambda: store.write("x", b"")):
        with pytest.raises(ConfigurationError, match=rf"need {library}.*pip install 'energon-bridge\[{extra}\]'"):
            call()


def test_a_proxy_of_the_environment_is_asked(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"content")
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "localhost")
    assert open_store("http://storage.invalid/").read("x") == b"content"
    assert server.asked


def test_the_guide_names_messages_that_there_are() -> None:
    said = ""
    files = (*REPOSITORY.glob("energon_bridge/cloud/*.py"), *REPOSITORY.glob("energon_bridge/core/storage/*.py"))
    for path in [*files, REPOSITORY / "energon_bridge/core/errors.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                said += "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said += f"{node.value}\n"
    guide = (REPOSITORY / "docs/how-to/object-storage.md").read_text()
    table = guide.partition("| message | what to do |")[2].partition("\n\n")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 8
    for message in messages:
        for part in message.split("…"):
            assert part in said, message


# Processes -----------------------------------------------------------------------------------------------------------


def test_forks_of_a_parent_that_has_read(server: ObjectServer, data: bytes) -> None:
    (server.folder / "x").write_bytes(data)
    store = open_store(server.url)
    offsets = list(range(0, BIG - 1000, 500_000))
    expected = [data[low : low + 1000] for low in offsets]
    stop = threading.Event()

    def read_on() -> None:
        while not stop.wait(0.002):
            store.read_ranges("x", offsets, [1000] * len(offsets))

    assert store.read_ranges("x", offsets, [1000] * len(offsets)) == expected
    reader = threading.Thread(target=read_on)  # its locks and connections are held at the moment of some of the forks
    reader.start()
    try:
        for _ in range(FORKS):
            child = start_forked(lambda: store.read_ranges("x", offsets, [1000] * len(offsets)) == expected)
            assert child.result() == (True, True)
    finally:
        stop.set()
        reader.join()
    assert store.read_ranges("x", offsets, [1000] * len(offsets)) == expected


def test_nothing_is_left_of_a_store(server: ObjectServer) -> None:
    (server.folder / "x").write_bytes(bytes(1000))
    gc.collect()
    before = {thread for thread in threading.enumerate() if thread.name == "energon-http"}
    sockets = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        store = open_store(server.url)
        store.read_range("x", 0, 10)
    del store
    gc.collect()
    deadline = time.monotonic() + 30

    def left() -> bool:
        threads = {thread for thread in threading.enumerate() if thread.name == "energon-http"}
        return bool(threads - before) or len(os.listdir("/proc/self/fd")) > sockets

    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left()


# Streams -------------------------------------------------------------------------------------------------------------


def content(path: Any, steps: int = 40, workers: int = 0, stop: int = 0, encoder: Any = None) -> list[Any]:
    """Return keys and texts of the first microbatches, with a stop and a resume after some of them."""
    dataset = train_dataset(path, task_encoder=encoder or DefaultTaskEncoder())
    state, found = None, []
    for count in (stop, steps - stop) if stop else (steps,):
        (loader,) = loaders_of(dataset, 1, workers, state=state, kind=SavableDataLoader)
        try:
            for batch in islice(loader, count):
                get = batch.get if isinstance(batch, dict) else lambda name, of=batch: getattr(of, name, None)
                found.append([str(get(name)) for name in ("__key__", "__restore_key__", "text", "json")])
            state = loader.save_state_rank()
        finally:
            loader.close()
    return found


def lines(folder: Path) -> str:
    (folder / "lines.jsonl").write_text("".join(json.dumps({"n": n, "pad": "x" * (n % 50)}) + "\n" for n in range(70)))
    index_jsonl(folder / "lines.jsonl")
    return "lines.jsonl"


def plain(folder: Path) -> str:
    text_dataset(folder / "texts", train=[9, 11, 7, 30])
    return "texts"


def mix(folder: Path) -> str:
    mix_data(folder)
    entries = [{"path": f"./{name}", "weight": weight} for name, weight in (("a", 1), ("b", 3), ("c", 2))]
    write_mix(folder / "mix.yaml", train={"blend": entries})
    return "mix.yaml"


def joined(folder: Path) -> str:
    keys = [f"{number:04d}" for number in range(30)]
    for name in "ab":
        keyed_dataset(folder / name, train=shards(keys if name == "a" else shuffled(keys), 12, 18))
    write_mix(folder / "joined.yaml", train=join())
    return "joined.yaml"


DATA = pytest.mark.parametrize("write", [plain, mix, joined, lines])


@DATA
def test_the_stream_is_the_local_one_and_faults_do_not_change_it(
    server: ObjectServer, quick: None, write: Callable[[Path], str]
) -> None:
    name = write(server.folder)
    expected = content(server.folder / name)
    server.fault = every(7, "reset", "503", "short")
    assert content(f"{server.url}/{name}") == expected
    assert content(f"{server.url}/{name}", stop=11) == expected


class Cooking(DefaultTaskEncoder):
    cookers = COOKERS


def test_cookers_read_auxiliary_stores_from_the_server(server: ObjectServer) -> None:
    crude_mix(server.folder, TALK)
    write_mix(server.folder / "talk.yaml", train=LEAVES["talk"][1])
    expected = content(server.folder / "talk.yaml", 20, encoder=Cooking())
    assert len(expected) == 20
    assert content(f"{server.url}/talk.yaml", 20, stop=7, encoder=Cooking()) == expected
    read = {path.split("/")[1] for path, _ in server.asked}
    assert read == {"talk.yaml", "talk", "blobs", "notes"}


def test_worker_processes_read_on_after_their_parent_has_read(server: ObjectServer) -> None:
    name = plain(server.folder)
    assert content(f"{server.url}/{name}", workers=2, stop=9) == content(server.folder / name)


@pytest.mark.parametrize("workers", [0, 2])
def test_metrics_count_requests(server: ObjectServer, quick: None, workers: int) -> None:
    dataset = train_dataset(f"{server.url}/{plain(server.folder)}")
    opening = len(server.asked)
    server.fault = every(4, "503")
    (loader,) = loaders_of(dataset, 1, workers, kind=SavableDataLoader)
    try:
        for _ in islice(loader, 20):
            pass
        found = loader.metrics()
    finally:
        loader.close()
    assert 10 < found["requests"] <= len(server.asked) - opening
    assert 2 < found["request_retries"] < found["requests"]
    assert found["request_bytes"] > 10_000
    assert found["request_seconds"] > 0


def test_a_round_of_many_shards_waits_about_once(server: ObjectServer) -> None:
    text_dataset(server.folder / "texts", train=[6] * 20)
    server.latency = 0.03
    began = time.monotonic()
    dataset = train_dataset(f"{server.url}/texts", shuffle_buffer_size=100)
    opened = time.monotonic() - began
    (loader,) = loaders_of(dataset, 1, 0, kind=SavableDataLoader, num_lanes=1)
    try:
        next(iter(loader))
        began = time.monotonic()
        for _ in islice(loader, 50):
            pass
        took = time.monotonic() - began
    finally:
        loader.close()
    requests = len(server.asked)
    assert requests > 60
    assert opened + took < 0.03 * requests / 2  # as one after the other they would take all of it


def test_the_next_round_is_read_from_the_beginning_of_a_round(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(RoundBuffer, "read_ahead", lambda buffer, *_: begun.append(buffer.first))
    text_dataset(server.folder / "texts", train=[64, 64])
    dataset = train_dataset(f"{server.url}/texts", shuffle_buffer_size=64, max_samples_per_sequence=None)
    (loader,) = loaders_of(dataset, 1, 0, kind=SavableDataLoader, num_lanes=1)
    try:
        for _ in islice(loader, 3):
            assert begun in ([], [64])
        assert begun == [64]
    finally:
        loader.close()


def test_draws_are_read_ahead_where_rounds_are_too_large(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = plain(server.folder)
    expected = content(server.folder / name, 20)
    monkeypatch.setattr("energon_bridge.core.loader.opening._READ_BYTES", 0)
    monkeypatch.setattr("energon_bridge.core.loader.opening._TOGETHER", 6)
    server.fault = every(5, "short", "503")
    assert content(f"{server.url}/{name}", 20) == expected
    assert content(f"{server.url}/{name}", 20, stop=7) == expected
    server.fault, server.latency = no_fault, 0.02
    (loader,) = loaders_of(train_dataset(f"{server.url}/{name}"), 1, 0, kind=SavableDataLoader)
    try:
        batches = iter(loader)
        for _ in range(48):  # the first batches of each lane are read when they are asked for
            next(batches)
        asked, before = len(server.asked), loader.metrics()["load_seconds"]
        for _ in range(72):
            next(batches)
        asked, waited = len(server.asked) - asked, loader.metrics()["load_seconds"] - before
    finally:
        loader.close()
    assert asked > 20
    assert waited < server.latency * 72 / 3  # as each batch would wait for its own read otherwise


def test_datasets_of_a_mix_are_opened_together(server: ObjectServer) -> None:
    mix = many_datasets(server.folder, 24)
    url = f"{server.url}/{mix.relative_to(server.folder).as_posix()}"
    server.latency = 0.03
    began = time.monotonic()
    train_dataset(url)
    took = time.monotonic() - began
    assert len(server.asked) >= 24 * 4
    assert took < 0.03 * len(server.asked) / 2  # as one after the other they would take all of it
    server.latency, server.fault = 0.0, lambda number: "403" if server.asked[number][0].count("split.yaml") else ""
    with pytest.raises(StorageError, match=r"split\.yaml: cannot read: HTTP 403"):
        train_dataset(url)


def test_the_first_batch_of_a_mix_reads_its_datasets_together(server: ObjectServer) -> None:
    mix = many_datasets(server.folder, 24)
    dataset = train_dataset(f"{server.url}/{mix.relative_to(server.folder).as_posix()}", batch_size=24)
    server.latency, asked, began = 0.05, len(server.asked), time.monotonic()
    (loader,) = loaders_of(dataset, 1, 0, kind=SavableDataLoader)
    try:
        next(iter(loader))
        took = time.monotonic() - began
        assert len(server.asked) - asked > 24  # indexes and draws
        assert took < 0.05 * 24
    finally:
        loader.close()


def test_commands_read_from_a_web_server(server: ObjectServer) -> None:
    url = f"{server.url}/{plain(server.folder)}"
    for command in (["info", url], ["plan", url, "--steps", "2", "--batch-size", "2"], ["lint", url]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, (command, result.output)
    local = CliRunner().invoke(main, ["which", str(server.folder / "texts"), "--step", "3", "--batch-size", "2"])
    remote = CliRunner().invoke(main, ["which", url, "--step", "3", "--batch-size", "2"])
    assert (local.exit_code, remote.exit_code) == (0, 0), remote.output
    places = [re.findall(r"shard_\d+\.tar", result.output) for result in (local, remote)]
    assert places[0] == places[1] != []


def test_which_names_keys_in_a_store_or_says_why_not(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed_dataset(server.folder / "texts", train=shards([f"{number:04d}" for number in range(30)], 12, 18))
    url = f"{server.url}/texts"
    asked = ["--step", "3", "--batch-size", "2", "--json"]

    def rows(source: str) -> list[tuple[str, str | None]]:
        result = CliRunner().invoke(main, ["which", source, *asked])
        assert result.exit_code == 0, result.output
        batches = json.loads(result.output)["microbatches"]
        return [(sample["shard"], sample["key"]) for batch in batches for sample in batch["samples"]]

    local = rows(str(server.folder / "texts"))
    assert rows(url) == local
    assert all(key for _, key in local)
    monkeypatch.setattr("energon_bridge.tools.forecast.samples._MOST_COPIED", 1000)
    assert rows(url) == [(shard, None) for shard, _ in local]
    output = CliRunner().invoke(main, ["which", url, *asked[:-1]]).output
    assert f"Without keys: the key index of {url} is not copied here for its " in output
    monkeypatch.undo()
    (server.folder / "texts/.nv-meta/index.sqlite").unlink()
    output = CliRunner().invoke(main, ["which", url, *asked[:-1]]).output
    assert f"Without keys: {url} has no key index: `energon prepare --tar-index-only {url}` writes one" in output


def test_local_metrics_name_no_requests(tmp_path: Path) -> None:
    (loader,) = loaders_of(train_dataset(tmp_path / plain(tmp_path)), 1, 0, kind=SavableDataLoader)
    next(iter(loader))
    assert "requests" not in loader.metrics()
    loader.close()

"""Whole runs from object stores: trainers, killed workers, credentials that expire, videos, mixes, many loaders."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from clips import write_video
from engine import config_of, text_dataset, train_dataset
from mixes import many_datasets
from object_server import ObjectServer, every, serving
from workers import loader_of, wait_until, worker_pids

from energon_bridge import DefaultTaskEncoder, EnergonMultiModalDataModule, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import StorageError
from energon_bridge.core.mix import opener as mix_index
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.storage import open_store
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

LOADERS = 1000 if os.environ.get("ENERGON_LONG_TESTS") else 30


def said(batch: Any) -> tuple[str, ...]:
    return str(batch.__key__), str(batch.__restore_key__), str(batch.text)


def stream(data: Any, steps: int, workers: int = 0) -> list[tuple[str, ...]]:
    with closing(loader_of(data, workers, DefaultTaskEncoder())) as loader:
        return [said(batch) for batch in islice(loader, steps)]


def served(server: ObjectServer) -> str:
    text_dataset(server.folder / "texts", train=[9, 11, 7, 30])
    return f"{server.url}/texts"


@pytest.fixture
def server(tmp_path: Path) -> Any:
    folder = tmp_path / "served"
    folder.mkdir()
    with serving(folder) as found:
        yield found


# Trainers and workers ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:Checkpoint directory .* exists")
def test_lightning_trains_with_two_workers_and_resumes(server: ObjectServer, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning_runs import fit

    create_captioning_test_dataset(server.folder / "captions", num_train=12, num_val=2)
    server.fault = every(9, "503", "reset")

    def module(path: str, workers: int) -> EnergonMultiModalDataModule:
        options: dict[str, Any] = {"micro_batch_size": 2, "num_workers": workers, "num_val_workers": 0, "num_lanes": 4}
        return EnergonMultiModalDataModule(path, None, None, task_encoder=DefaultTaskEncoder(), **options)

    url = f"{server.url}/captions"
    local = module(str(server.folder / "captions"), 0)
    expected = [",".join(batch.__key__) for batch in islice(local.train_dataloader(), 12)]
    local.close()
    first = fit(module(url, 2), tmp_path, max_steps=5)
    second = fit(module(url, 2), tmp_path, tmp_path / "last.ckpt", max_steps=12)
    assert first.trained + second.trained == expected
    assert second.validated


def test_workers_that_are_killed_while_they_read_lose_nothing(server: ObjectServer) -> None:
    url = served(server)
    expected = stream(server.folder / "texts", 40)
    server.latency = 0.01  # so that they read when they are killed
    with closing(loader_of(url, 2, DefaultTaskEncoder(), max_worker_restarts=100)) as loader:  # type: ignore[arg-type]
        found = []
        for number in range(40):
            if number % 13 == 5:
                os.kill(worker_pids()[number % 2], signal.SIGKILL)
            found.append(said(next(iter(loader))))
        assert loader.metrics()["worker_restarts"] >= 2
    assert found == expected


# Credentials ---------------------------------------------------------------------------------------------------------


class Rotating(ObjectServer):
    """Takes only signatures with the last two keys; a new one comes with so many answers."""

    file: Path
    life = 40

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.refused = self.answers = self.keys = 0
        self.rotating = threading.Lock()

    def rotate(self) -> None:
        self.keys += 1
        fresh = self.file.with_suffix(".new")
        fresh.write_text(f"[default]\naws_access_key_id = key{self.keys}\naws_secret_access_key = secret\n")
        fresh.replace(self.file)

    def answer(self, handler: Any) -> None:
        query = parse_qs(urlsplit(handler.path).query)
        if "list-type" in query:
            return _answer(handler, 200, f"<Contents><Key>{query['prefix'][0]}x</Key><Size>1</Size></Contents>")
        (by,) = query["X-Amz-Credential"]
        with self.rotating:
            valid = by.partition("/")[0] in (f"key{self.keys}", f"key{self.keys - 1}")
            self.answers += valid
            self.refused += not valid
            if valid and self.answers % self.life == 0:
                self.rotate()
        if valid:
            return super().answer(handler)
        _answer(handler, 400, "<Code>ExpiredToken</Code><Message>The provided token has expired.</Message>")


def _answer(handler: Any, status: int, text: str) -> None:
    body = f"<Result>{text}</Result>".encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize("workers", [0, 2])
def test_credentials_that_expire_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
    (tmp_path / "served").mkdir()
    bucket = f"bucket{workers}"  # a process knows a bucket by its name
    server = Rotating(tmp_path / "served")
    server.file = tmp_path / "credentials"
    server.rotate()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(server.file))
        monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setattr("energon_bridge.cloud.buckets._RENEW_SECONDS", 0.01)
        text_dataset(server.folder / bucket / "texts", train=[9, 11, 7, 30])
        expected = stream(server.folder / bucket / "texts", 60)
        assert stream(f"s3://{bucket}/texts", 60, workers) == expected
        assert server.keys > 2
        assert server.refused > 1
        assert server.refused < server.answers
        store = open_store(f"s3://{bucket}/texts")
        old = "[default]\naws_access_key_id = old\naws_secret_access_key = s\n"
        assert store.read(".nv-meta/dataset.yaml")  # who has never read does not wait
        server.rotate()
        server.rotate()
        server.file.write_text(old)
        late = threading.Timer(0.3, server.rotate)
        late.start()
        assert store.read(".nv-meta/dataset.yaml")  # waits for credentials that come late
        late.join()
        server.rotate()
        server.rotate()
        server.file.write_text(old)
        monkeypatch.setattr("energon_bridge.cloud.http._EXPIRED_SECONDS", 0.0)
        with pytest.raises(StorageError, match=r"ExpiredToken.*The credentials are wrong or have expired"):
            store.read(".nv-meta/dataset.yaml")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Data ----------------------------------------------------------------------------------------------------------------


def test_large_videos_are_read_by_ranges(server: ObjectServer, tmp_path: Path) -> None:
    large = write_video(tmp_path / "large.mp4", frames=40, size=(256, 256), options={"crf": "1"}).read_bytes()
    assert len(large) > 1 << 20
    data = server.folder / "videos"
    data.mkdir()
    write_shard(data / "0.tar", {"0": {"mp4": large, "txt": b"what?", "json": b'["this"]'}})
    yaml = render_dataset_yaml("VidQASample", {"video": "mp4", "context": "txt", "answers": "json"})
    prepare_dataset(data, split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
    frames = []
    for path in (data, f"{server.url}/videos"):
        config = config_of(1, 0, num_lanes=1)
        spec = get_train_dataset(path, worker_config=config, batch_size=1, task_encoder=DefaultTaskEncoder())
        with closing(get_savable_loader(spec)) as loader:
            video = next(iter(loader)).video[0]
            assert not isinstance(video.stream, bytes)
            frames.append(video.get_video_clips([(0.2, 0.4)])[0][0])
    assert frames[0].equal(frames[1])
    spans = [span.removeprefix("bytes=").split("-") for path, span in server.asked if path.endswith("0.tar")]
    assert len(spans) > 1


def test_a_mix_that_has_an_index_starts_again_from_a_server(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mix_index, "_SETTLED_NS", 0)
    mix = many_datasets(server.folder, mix_index.MIN_DATASETS + 1)
    url = f"{server.url}/{mix.relative_to(server.folder).as_posix()}"

    def keys(path: Any) -> list[Any]:
        dataset = train_dataset(path, task_encoder=DefaultTaskEncoder())
        with closing(get_savable_loader(dataset, worker_config=config_of(1, 0))) as loader:
            return [batch.__key__ for batch in islice(loader, 20)]

    expected = keys(mix)
    assert keys(url) == expected
    assert keys(url) == expected


# Nothing is left -----------------------------------------------------------------------------------------------------


def test_loaders_that_were_opened_and_closed_leave_nothing(server: ObjectServer) -> None:
    """1,000 of them with `ENERGON_LONG_TESTS=1`, one in ten with a worker; logs what there was before and after."""
    url = served(server)

    def use(number: int) -> None:
        dataset = train_dataset(url)
        with closing(get_savable_loader(dataset, worker_config=config_of(1, int(number % 10 == 9)))) as loader:
            next(iter(loader))

    def there() -> tuple[int, int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mine = [thread for thread in threading.enumerate() if thread.name == "energon-watchdog"]  # a starter stays
        files = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        return len(files), len(mine), pages * os.sysconf("SC_PAGESIZE") >> 20

    for number in range(10):
        use(number)
    assert wait_until(lambda: gc.collect() >= 0 and not worker_pids())
    wait_until(lambda: there()[1] == 0)
    before = there()
    for number in range(LOADERS):
        use(number)
    assert wait_until(lambda: not worker_pids() and there()[1] <= before[1] and there()[0] <= before[0] + 1)
    after = there()
    logging.getLogger(__name__).info("%d loaders: descriptors, threads, MiB: %s, then %s", LOADERS, before, after)
    assert after[2] - before[2] < 24, (before, after)

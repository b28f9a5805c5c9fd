"""What runs out or goes away below a run (descriptors, disk space, servers): our errors, or the run goes on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
from engine import config_of, counts_of, digest, loaders_of, numbers_of, text_dataset, train_dataset, with_prepared
from forked import free_port, run_afresh
from hostile import Note, limited
from made import made_once
from paths import REPOSITORY
from workers import wait_until, worker_pids

from energon_bridge import (
    DefaultTaskEncoder,
    ErrorPolicy,
    SystemFileStore,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    read_quarantine,
)
from energon_bridge.core.errors import (
    CorruptShardError,
    EnergonError,
    FatalSampleError,
    ShardMissingError,
    ShortReadError,
    StorageError,
)
from energon_bridge.core.prepare import parse_patterns, prepare_dataset, rebuild_index
from energon_bridge.core.storage import LocalStore, OpenFiles
from energon_bridge.tools.cli.main import main
from energon_bridge.tools.testing import write_shard

many_shards = made_once(text_dataset, train=[2] * 200)

# Descriptors ---------------------------------------------------------------------------------------------------------


def highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("left", [2])
def test_a_run_goes_on_with_few_descriptors(many_shards: Path, left: int) -> None:
    def read() -> list[str]:
        dataset = train_dataset(many_shards, batch_size=8, parallel_shard_iters=50)
        (loader,) = loaders_of(dataset, 1, 0)
        return [digest(batch) for batch, _ in zip(loader, range(40), strict=False)]

    def limited_read(note: Note) -> list[str]:
        import energon_bridge.core.encoder  # noqa: F401 - what is imported needs no descriptors any more

        next(iter(get_loader(train_dataset(many_shards))))
        limit = highest_descriptor() + 1 + left
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        return read()

    assert limited(limited_read, seconds=60) == read()


def test_where_no_descriptor_is_left_at_all_the_error_is_ours(many_shards: Path) -> None:
    def job(note: Note) -> str:
        store = LocalStore(many_shards)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 1,) * 2)
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)
        with pytest.raises(StorageError) as raised:
            store.read_range("train/shard_000.tar", 0, 10)
        return str(raised.value)

    assert "shard_000.tar: cannot open: [Errno 24]" in limited(job, seconds=20)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_that_lack_descriptors_are_named_and_none_is_left(
    tmp_path: Path, method: Literal["fork", "forkserver"]
) -> None:
    dataset = train_dataset(text_dataset(tmp_path, train=[20]))
    config = config_of(1, 3, start_method=method)

    def begin(left: int) -> str:
        """Start a loader where so many descriptors are left; return the error's text, or nothing."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        full: list[int] = []
        try:
            with closing(get_savable_loader(dataset, worker_config=config)) as loader:
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 1 + left, before[1]))
                with contextlib.suppress(OSError):
                    while True:
                        full.append(os.dup(0))
                for _ in range(left):
                    os.close(full.pop())
                batches = iter(loader)
                for _ in range(5):
                    next(batches)
        except EnergonError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in full:
                os.close(number)
        return ""

    def job(note: Note) -> list[str]:
        assert not begin(100)  # whatever is started once, is
        said = []
        for left in (0, 1, 3, 8, 60):
            note(f"{left} descriptors left")
            said.append(begin(left))
            assert wait_until(lambda: not worker_pids())
        return said

    said = limited(job, seconds=100)
    assert re.match(r"worker \d of 3 cannot start: .*Too many open files.*`ulimit -n`.*lower num_workers", said[0])
    assert said[-1] == ""


# Disk space ----------------------------------------------------------------------------------------------------------


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("again", [False, True])
def test_preparing_on_a_full_disk_leaves_the_dataset_as_it_was(tmp_path: Path, again: bool) -> None:
    root = tmp_path / "data"
    root.mkdir()
    write_shard(root / "0.tar", {f"{n:05d}": {"txt": b"text"} for n in range(400)})
    if again:
        prepare_dataset(root, split=parse_patterns(["train:.*"]))
    before = content_of(root)
    actions = [lambda: prepare_dataset(root, split=parse_patterns(["train:.*"])), lambda: rebuild_index(root)]

    def job(note: Note) -> list[str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as if the disk were full
        found = []
        for size in (0, 100, 4096, 8192, 20_000, 40_000, 60_000, 80_000):
            note(f"{size} bytes")
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            for action in actions:
                try:
                    action()
                except EnergonError as error:
                    found.append(str(error))
        return found

    found = limited(job, seconds=60)
    assert any("cannot write the key index" in message for message in found)
    assert content_of(root) == before


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Give a folder with a prepared dataset and a mix that nobody may write to without special rights."""
    text_dataset(tmp_path / "data", train=[5, 9])
    blend = [{"path": "data", "split_part": "train"}]
    mix = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": blend}}}
    (tmp_path / "mix.yaml").write_text(json.dumps(mix))
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield tmp_path
    for path in paths:
        path.chmod(0o755)


def drop_capabilities() -> None:
    """Give up the rights that let root write anywhere, in this process."""
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None).capset(version_3, (ctypes.c_uint32 * 6)()) == 0


def test_a_read_only_dataset_is_read_and_what_would_write_into_it_is_refused(read_only: Path) -> None:
    data, mix = read_only / "data", read_only / "mix.yaml"

    def job(note: Note) -> tuple[list[list[str]], list[str]]:
        drop_capabilities()
        streams = []
        for source in (data, mix):
            note(f"reading {source}")
            (loader,) = loaders_of(train_dataset(source), 1, 0)
            streams.append([digest(batch) for batch, _ in zip(loader, range(20), strict=False)])
        said = []
        for command in (
            ["info", str(data)],
            ["lint", str(data)],
            ["plan", str(mix), "--steps", "2", "--batch-size", "2"],
        ):
            note(" ".join(command))
            result = CliRunner().invoke(main, command)
            assert result.exit_code == 0, result.output
        split = parse_patterns(["train:.*"])
        for write in (lambda: prepare_dataset(data, split=split), lambda: rebuild_index(data)):
            with pytest.raises(EnergonError) as refused:
                write()
            said.append(str(refused.value))
        return streams, said

    streams, said = limited(job, seconds=60)
    assert streams[0] == streams[1]
    for message in said:
        assert re.search(rf"{data}.*[Pp]ermission denied", message), message


# Servers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action",
    [
        lambda url: get_train_dataset(url, batch_size=1),
        lambda url: SystemFileStore(url).get("a.txt"),
        lambda url: prepare_dataset(url, split=parse_patterns(["train:.*"])),
    ],
    ids=["dataset", "store", "prepare"],
)
def test_a_refused_connection_is_named(action: Callable[[str], Any]) -> None:
    pytest.importorskip("aiohttp")
    url = f"http://127.0.0.1:{free_port()}/data"

    def job(note: Note) -> str:
        with pytest.raises(StorageError) as raised:
            action(url)
        return str(raised.value)

    message = limited(job, seconds=60)
    assert message.startswith(url)
    assert "onnect" in message


# Shards that change while they are read ------------------------------------------------------------------------------


class FailingStore:
    """A store whose disk has a bad spot: reads beyond some bytes of every shard fail as the kernel would let them."""

    def __init__(self, inner: Any, good: int) -> None:
        self._inner, self._good = inner, good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_range(self, rel: str, offset: int, length: int) -> bytes:
        if offset + length > self._good:
            raise StorageError(f"{self.url(rel)}: cannot read {length} bytes at offset {offset}: [Errno 5] I/O error")
        data: bytes = self._inner.read_range(rel, offset, length)
        return data

    def read_ranges(self, rel: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        return [self.read_range(rel, offset, length) for offset, length in zip(offsets, lengths, strict=True)]


def test_a_bad_spot_on_the_disk_stops_the_run_by_name(tmp_path: Path) -> None:
    dataset = train_dataset(text_dataset(tmp_path, train=[20]))
    bad = with_prepared(dataset, store=FailingStore(dataset.leaves[0].dataset.store, 4096))
    with pytest.raises(StorageError, match=r"shard_000\.tar: cannot read .* \[Errno 5\]"):
        for _, _ in zip(range(10), get_loader(bad), strict=False):
            pass


def replace(shard: Path) -> None:
    """Put another file in the place of a shard: as many samples, of the same sizes."""
    write_shard(shard.with_suffix(".new"), {f"{n:05d}": {"txt": b"TEXT %d" % n} for n in range(100, 200)})
    shard.with_suffix(".new").replace(shard)


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda shard: os.truncate(shard, 10_240),
    "deleted": Path.unlink,
    "replaced": replace,
}


@pytest.mark.parametrize("damaged_shards", ["raise", "skip"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_shard_that_changes_while_it_is_read(
    tmp_path: Path, change: str, damaged_shards: Literal["raise", "skip"]
) -> None:
    text_dataset(tmp_path, train=[100, 100])
    policy = ErrorPolicy(damaged_shards=damaged_shards, tolerance=0)
    dataset = train_dataset(tmp_path, shuffle_buffer_size=1, error_policy=policy)
    store = LocalStore(tmp_path, files=OpenFiles(limit=1))  # so that shards are opened again and again
    with closing(get_savable_loader(with_prepared(dataset, store=store))) as loader:
        batches = iter(loader)
        texts = [text for batch in islice(batches, 5) for text in batch.text]
        CHANGES[change](tmp_path / "train" / "shard_001.tar")
        if damaged_shards == "raise":
            with pytest.raises((CorruptShardError, ShardMissingError, ShortReadError), match=r"shard_001\.tar"):
                texts += [text for batch in islice(batches, 100) for text in batch.text]
        else:
            texts += [text for batch in islice(batches, 100) for text in batch.text]
            assert loader.metrics()["errors"] > 20
    assert texts
    assert set(texts) <= {f"text {n}" for n in range(200)}


# Exceptions that cannot be shown -------------------------------------------------------------------------------------


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Silent(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__.endswith("3"):
            raise SilentError
        return sample


@pytest.mark.parametrize("workers", [1])
def test_an_exception_whose_text_raises_is_a_counted_skip_or_stops_the_run_by_name(
    tmp_path: Path, workers: int
) -> None:
    data = text_dataset(tmp_path / "data", train=[20])
    policy = ErrorPolicy(quarantine=tmp_path / "bad.jsonl")
    dataset = train_dataset(data, task_encoder=Silent(), error_policy=policy)
    (loader,) = loaders_of(dataset, 1, workers)
    keys = Counter(number for batch, _ in zip(loader, range(40), strict=False) for number in numbers_of(batch))
    errors = counts_of(loader.save_state_rank())["errors"]
    loader.close()
    assert errors > 0
    assert {3, 13}.isdisjoint(keys)
    failed = read_quarantine(tmp_path / "bad.jsonl")
    assert {(one.error, one.message) for one in failed} == {
        ("SilentError", "(no text: its __str__ raises RuntimeError)")
    }
    strict = train_dataset(data, task_encoder=Silent(), error_policy=ErrorPolicy(on_error="raise"))
    with pytest.raises(FatalSampleError, match=r"encode_sample: .*SilentError: .no text"):
        list(islice(get_loader(strict), 40))


# Imports and ranks ---------------------------------------------------------------------------------------------------


def test_a_star_import_brings_no_trainer_along() -> None:
    code = (
        "from energon_bridge import *\nimport sys\nprint(sorted({'lightning', 'pytorch_lightning', 'transformers'} & "
    )
    code += "sys.modules.keys()), get_loader.__name__)"
    result = run_afresh(code, REPOSITORY, "lightning", "pytorch_lightning", "transformers")
    assert result.stdout == "[] get_loader\n", result.stderr


def test_prepared_shards_are_read_without_what_reads_tables_and_buckets(tmp_path: Path) -> None:
    code = (
        "import sys; from energon_bridge import WorkerConfig, get_loader, get_train_dataset\n"
        f"dataset = get_train_dataset({str(text_dataset(tmp_path, train=[4]))!r}, batch_size=2, "
        "worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0))\n"
        "print(next(iter(get_loader(dataset))).text)\n"
        "others = 'energon_bridge.tools.convert', 'energon_bridge.cloud.http'\n"
        "print([name for name in sys.modules if name.startswith(others)])"
    )
    result = run_afresh(code, REPOSITORY)
    texts, modules = result.stdout.splitlines()
    assert len(texts) > 2
    assert modules == "[]"


@pytest.mark.parametrize("kind", ["validation", "one pass"])
def test_a_pass_is_shared_by_more_ranks_than_lanes(tmp_path: Path, kind: str) -> None:
    data = text_dataset(tmp_path, train=[7, 9])

    def loaders(ranks: int, num_lanes: int | None) -> list[Any]:
        configs = [
            WorkerConfig(rank=rank, world_size=ranks, num_workers=0, num_lanes=num_lanes) for rank in range(ranks)
        ]
        if kind == "validation":
            specs = [
                get_val_dataset(data, split_part="train", batch_size=2, worker_config=config) for config in configs
            ]
        else:
            specs = [get_train_dataset(data, batch_size=2, repeat=False, worker_config=config) for config in configs]
        return [get_savable_loader(spec) for spec in specs]

    def keys(found: list[Any]) -> list[str]:
        batches = [list(loader) for loader in found]
        rows = [batch for step in zip(*batches, strict=True) for batch in step if bool(batch["__valid__"].any())]
        return [key for batch in rows for key in batch["__key__"]]

    expected = keys(loaders(1, None))
    assert sorted(expected) == [f"{n:05d}" for n in range(16)]
    assert keys(loaders(5, 2)) == keys(loaders(5, None)) == expected
    (old,) = loaders(1, 2)
    next(iter(old))
    for loader in loaders(3, 2):
        loader.restore_state_rank(old.save_state_rank())

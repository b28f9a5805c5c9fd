"""Checksums: made as tars are indexed, compared as samples are read; a changed bit of what is delivered is found."""

from __future__ import annotations

import io
import json
import random
import tarfile
import zlib
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import energon, output_of
from crude import Raw
from keyed import CRUDE

from energon_bridge import (
    CrudeSample,
    ShardWriter,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.errors import ConfigurationError, CorruptShardError, MetadataError
from energon_bridge.core.format.checksums import SAMPLED, checksums_path, crc32s, read_checksums
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.prepare import parse_patterns, prepare_dataset, rebuild_index
from energon_bridge.core.storage import LocalStore, open_store
from energon_bridge.core.stream import reader
from energon_bridge.core.stream.policy import ErrorPolicy
from energon_bridge.tools.check.lint import lint_dataset

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def content(shard: int, sample: int, part: int) -> bytes:
    chooser = random.Random(shard * 10_000 + sample * 10 + part)
    return chooser.randbytes(chooser.choice((0, 1, 511, 512, 513, 1500, 5000)))


def key_of(shard: int, sample: int) -> str:
    """Return a key; every eleventh is so long that its headers have records of their own."""
    return f"{shard}/{'long' * 40 if sample % 11 == 5 else 'k'}{sample:03d}"


def write_tar(path: Path, shard: int, samples: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for sample in range(samples):
            for part, name in enumerate(("bin", "a.raw")[: 1 + sample % 2]):
                info = tarfile.TarInfo(f"{key_of(shard, sample)}.{name}")
                data = content(shard, sample, part)
                info.size, info.mtime = len(data), 1_700_000_000
                tar.addfile(info, io.BytesIO(data))


def prepare(root: Path, **settings: Any) -> None:
    rule = parse_patterns(["train:train/.*", "val:train/.*"])
    prepare_dataset(root, split=rule, dataset_yaml=CRUDE, **{"checksums": True} | settings)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for shard in range(2):
        write_tar(tmp_path / f"train/{shard}.tar", shard)
    prepare(tmp_path)
    return tmp_path


def delivered(root: Path, which: str = "always", **settings: Any) -> dict[str, dict[str, bytes]]:
    """Return all samples of a pass, and check that what is missing was counted."""
    policy = ErrorPolicy(tolerance=10_000)
    dataset = get_val_dataset(
        root,
        batch_size=None,
        worker_config=CONFIG,
        task_encoder=Raw(),
        checksums=which,
        error_policy=policy,
        **settings,
    )
    loader = get_savable_loader(dataset)
    seen = {
        one["__key__"]: {name: bytes(data) for name, data in one.items() if not name.startswith("__")}
        for one in loader
        if bool(one["__valid__"].all())
    }
    assert sum(row["errors"] for row in loader.counters()) + len(seen) == dataset.num_samples
    return seen


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def damage(path: Path, sample: int) -> int:
    """Flip a bit in the content of the first sample, from a number on, that has any; return its number."""
    with tarfile.open(path) as tar:
        for member in tar:
            number = int(member.name.partition(".")[0][-3:])
            if number >= sample and member.size:
                flip(path, 8 * member.offset_data + 3)
                return number
    raise AssertionError("nothing to damage")


def test_the_compiled_checksum_is_that_of_zlib() -> None:
    chooser = random.Random(5)
    pieces = [chooser.randbytes(length) for length in (*range(300), *(chooser.randrange(70_000) for _ in range(60)))]
    assert crc32s(pieces).tolist() == [zlib.crc32(piece) for piece in pieces]
    assert crc32s([memoryview(bytearray(pieces[-1]))[3:]]).tolist() == [zlib.crc32(pieces[-1][3:])]


def test_they_are_those_of_the_tar_as_tarfile_reads_it(root: Path) -> None:
    for shard in range(2):
        name, store = f"train/{shard}.tar", open_store(root)
        size = (root / name).stat().st_size
        found = read_checksums(store, name, count=40, size=size)
        assert found is not None
        with tarfile.open(root / name) as tar:
            members = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
        assert found.parts.tolist() == [zlib.crc32(data) for _, data in members]
        names = [found.names[code] for code in found.codes]
        assert names == [member.name.rpartition("/")[2].partition(".")[2] for member, _ in members]
        assert found.keys.tolist() == [zlib.crc32(key_of(shard, sample).encode()) for sample in range(40)]
        index = np.frombuffer((root / f"{name}.idx").read_bytes(), "<u8")
        data = (root / name).read_bytes()
        assert found.samples.tolist() == [zlib.crc32(data[low:high]) for low, high in pairwise(index)]


def test_tars_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "train/0.tar", 0, samples=400)
    ranges: list[tuple[int, int]] = []
    plain = LocalStore.read_range

    def counted(self: Any, rel: str, offset: int, length: int) -> bytes:
        if rel.endswith(".tar"):
            ranges.append((offset, length))
        return plain(self, rel, offset, length)

    monkeypatch.setattr(LocalStore, "read_range", counted)
    prepare(tmp_path)
    size = (tmp_path / "train/0.tar").stat().st_size
    assert sum(length for _, length in ranges) <= size + len(ranges) * 16_384  # a member that a window cut off


def all_checksums(root: Path) -> dict[str, bytes]:
    folder = root / ".nv-meta/checksums"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.crc"))}


def test_what_writes_tars_makes_the_same_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(self: Any, rel: str, *place: Any) -> bytes:
        assert not (rel.endswith(".tar") and Path(self.root).name == "out"), f"{rel} is read"
        return plain(self, rel, *place)

    samples = [
        {"__key__": key_of(0, sample), "bin": content(0, sample, 0), "a.raw": content(0, sample, 1)}
        for sample in range(40)
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": f"k{number}", "text": "t" * number}) + "\n" for number in range(30)))

    def written(out: Path, *, checksums: bool) -> None:
        with ShardWriter(out, sample_type=CrudeSample, samples_per_shard=15, checksums=checksums) as writer:
            for sample in samples:
                writer.write(sample)

    def converted(out: Path, *, checksums: bool) -> None:
        flags = ["--sample-type", "CrudeSample", "--samples-per-shard", "12", "--split-ratio", "1,0,0", "--no-ask"]
        flags += ["--checksums"] * checksums
        output_of("convert", rows, out, *flags, "--num-workers", "1")

    plain = LocalStore.read_range
    for make in (written, converted):
        made, later = tmp_path / make.__name__ / "out", tmp_path / make.__name__ / "later"
        with monkeypatch.context() as patch:
            if make is written:  # at its end, convert looks at some samples
                patch.setattr(LocalStore, "read_range", unread)
            make(made, checksums=True)
        make(later, checksums=False)
        assert all_checksums(later) == {}
        prepare_dataset(later, split=parse_patterns(["train:train/.*"]), dataset_yaml=CRUDE, checksums=True)
        assert all_checksums(made) == all_checksums(later)
        assert len(all_checksums(made)) == 3
        assert read_info(open_store(made)).has_checksums
        assert [len(one.problems) for one in lint_dataset(open_dataset(made, split_part="train"), deep=True)] == [
            0,
            0,
            0,
        ]
    run = energon("convert", rows, tmp_path / "converted/later", "--checksums", "--no-ask")
    assert "checksums was None, now True" in run.output


def test_a_conversion_that_goes_on_makes_those_of_new_shards(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    lines = [json.dumps({"id": f"k{number}", "text": "t" * number}) + "\n" for number in range(30)]
    flags = ["--sample-type", "CrudeSample", "--samples-per-shard", "10", "--split-ratio", "1,0,0", "--no-ask"]
    for count in (20, 30):
        rows.write_text("".join(lines[:count]))
        output_of("convert", rows, out, *flags)
        if count == 20:
            prepare_dataset(out, split=parse_patterns(["train:train/.*"]), dataset_yaml=CRUDE, checksums=True)
    assert len(all_checksums(out)) == 3
    assert [len(one.problems) for one in lint_dataset(open_dataset(out, split_part="train"), deep=True)] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_every_bit_that_changes_what_is_delivered_is_found(root: Path, seed: int) -> None:
    """2,500 bits a seed, anywhere in a tar: no sample is delivered with other bytes, and only damaged ones are lost."""
    shard = root / "train/0.tar"
    right = delivered(root)
    index = np.frombuffer((root / "train/0.tar.idx").read_bytes(), "<u8")
    data = shard.read_bytes()
    chooser = random.Random(seed)
    source = reader.LeafReader(open_dataset(root, split_part="val"), tolerant=True, checksums="always")
    found = 0
    for _ in range(2500):
        bit = chooser.randrange(8 * int(index[-1]))
        sample = int(np.searchsorted(index, bit // 8, side="right")) - 1
        damaged = bytearray(data[index[sample] : index[sample + 1]])
        at = bit // 8 - int(index[sample])
        damaged[at] ^= 1 << bit % 8
        raws: list[Any] = [memoryview(damaged)]
        errors = list(source._verifier.verify(raws, [0], np.array([sample])))  # type: ignore[union-attr]
        key = key_of(0, sample)
        try:
            got = parse_sample(raws[0])
        except CorruptShardError:
            assert errors
            continue
        same = got[0] == key and {name: bytes(part) for name, part in got[1].items()} == right[key]
        assert bool(errors) is not same, (sample, at, errors)
        found += bool(errors)
    assert found > 500


def test_a_damaged_sample_is_named_skipped_and_counted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    right = delivered(root)
    assert len(right) == 80
    sample = damage(root / "train/1.tar", 7)
    lost = right.keys() - delivered(root).keys()
    assert lost == {key_of(1, sample)}
    assert "CorruptShardError" in caplog.text
    for words in ("1.tar", f"sample {sample}", repr(key_of(1, sample)), "checksum", "expected", "copy the shard again"):
        assert words in caplog.text
    # Unverified it comes as it is; verified in samples, in one of sixteen epochs.
    assert delivered(root, "never").keys() == right.keys()
    dataset = open_dataset(root, split_part="val")
    sampled = reader.LeafReader(dataset, checksums="sampled")
    lost_in = [
        epoch
        for epoch in range(2 * SAMPLED)
        if type(sampled.read(np.array([40 + sample]), np.array([epoch]))[0]) is reader.Unreadable
    ]
    assert lost_in == [epoch for epoch in range(2 * SAMPLED) if (40 + sample + epoch) % SAMPLED == 0]


def test_resumed_runs_leave_out_the_same(root: Path) -> None:
    for sample in range(1, 40, 5):
        damage(root / "train/0.tar", sample)

    def loader() -> Any:
        dataset = get_train_dataset(
            root,
            batch_size=None,
            worker_config=CONFIG,
            task_encoder=Raw(),
            shuffle_buffer_size=None,
            error_policy=ErrorPolicy(tolerance=1000),
        )
        return get_savable_loader(dataset)

    whole = [one["__key__"] for one in islice(iter(loader()), 600)]
    for stop in (7, 100, 333):
        first, second = loader(), loader()
        keys = [one["__key__"] for one in islice(iter(first), stop)]
        second.restore_state_rank(first.save_state_rank())
        assert keys + [one["__key__"] for one in islice(iter(second), 100)] == whole[: stop + 100]


def test_large_samples_are_compared_part_by_part(root: Path) -> None:
    sample = damage(root / "train/0.tar", 1)
    dataset = open_dataset(root, split_part="val")
    large = reader.LeafReader(dataset, unread_from=1, checksums="always")
    raws = large.read(np.arange(sample - 1, sample + 2))
    for number, place in ((sample - 1, 0), (sample + 1, 2)):
        assert raws[place].parts(None, lambda name: False, None)[0] == key_of(0, number)
    with pytest.raises(CorruptShardError, match=r"checksum|missing|not there"):
        raws[1].parts(None, lambda name: False, None)


def test_lint_names_all(root: Path) -> None:
    for sample in (3, 9):
        index = np.frombuffer((root / "train/0.tar.idx").read_bytes(), "<u8")
        flip(root / "train/0.tar", 8 * (int(index[sample]) + 3))  # in the key
    run = energon("lint", root, "--deep", "--split-parts", "val", "--json", "--no-progress")
    report = json.loads(run.output)
    assert run.exit_code == 1
    assert len(report["problems"]) >= 2
    assert all("expected" in problem["message"] or "index" in problem["message"] for problem in report["problems"])
    plain = energon("info", root)
    assert "checksums" in plain.output
    assert [len(one.problems) for one in lint_dataset(open_dataset(root, split_part="val"), deep=True)][1] == 0


def test_lint_wants_checksums(root: Path) -> None:
    prepare_dataset(root / "train", split=parse_patterns(["val:.*"]), dataset_yaml=CRUDE)
    run = energon("lint", root / "train", "--deep")
    assert "has no checksums for --deep: energon prepare" in run.output


def test_added_shards_extend_them(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.crc")}
    write_tar(root / "train/2.tar", 2)
    prepare(root, checksums=False)
    assert read_info(open_store(root)).has_checksums
    assert {path.name for path in root.rglob("*.crc")} == {"0.tar.crc", "1.tar.crc", "2.tar.crc"}
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert len(delivered(root)) == 120
    write_tar(root / "train/2.tar", 3)  # other content, of the same kind
    prepare(root, checksums=False)
    assert len(delivered(root)) == 120
    (root / checksums_path("train/0.tar")).unlink()
    rebuild_index(root)
    assert len(list(root.rglob("*.crc"))) == 3


def test_tasks_make_them_and_a_run_of_them_goes_on(tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", 0)
    write_tar(tmp_path / "train/1.tar", 1)
    for number in range(2):
        output_of("prepare", tmp_path, "--task", f"{number}/2", "--checksums")
    arguments = ["prepare", str(tmp_path), "--finish", "--checksums", "--non-interactive", "--split-ratio", "1,0,0"]
    output_of(*arguments, "--sample-type", "CrudeWebdataset", "--num-workers", "2")
    assert len(delivered(tmp_path, split_part="train")) == 80


def test_damaged_checksums_are_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(root / checksums_path("train/0.tar"), 800)
    with pytest.raises(MetadataError, match=r"0\.tar\.crc: damaged\. Make it again: energon prepare"):
        read_checksums(open_store(root), "train/0.tar", count=40, size=(root / "train/0.tar").stat().st_size)
    assert len(delivered(root)) == 80
    assert "shards are read unverified" in caplog.text
    assert "damaged" in caplog.text


def test_settings(root: Path) -> None:
    with pytest.raises(ConfigurationError, match="checksums must be one of always, sampled, never, got 'often'"):
        get_train_dataset(root, batch_size=1, checksums="often")  # type: ignore[arg-type]


@pytest.mark.rival
def test_megatron_energon_reads_it_as_ever(root: Path, run_rival: Callable[..., str]) -> None:
    code = (
        "import sys; from megatron.energon import *\n"
        "config = WorkerConfig(rank=0, world_size=1, num_workers=0)\n"
        "class Raw(DefaultTaskEncoder):\n"
        "    decoder = None\n"
        "    cookers = [Cooker(lambda s: TextSample(**basic_sample_keys(s), text=s['__key__']))]\n"
        "    cookers[0].cook.__stateless__ = True\n"
        "ds = get_val_dataset(sys.argv[1], worker_config=config, batch_size=None, task_encoder=Raw())\n"
        "print(len({s.text for s in get_loader(ds)}))\n"
    )
    assert run_rival("-c", code, root).strip().endswith("80")

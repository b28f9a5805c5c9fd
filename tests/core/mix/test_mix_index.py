"""The index of a mix: a later start gives what a first one gives, whatever has changed in between."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from mixes import many_datasets

from energon_bridge import Blender, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import DatasetError, DatasetNotFoundError, ShardMissingError
from energon_bridge.core.format import dataset as format_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.mix import opener as mix_index
from energon_bridge.tools.testing import write_shard

COUNT = mix_index.MIN_DATASETS + 1
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=2)


@pytest.fixture
def mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a mix of one dataset more than an index is kept for; its files count as settled at once."""
    monkeypatch.setattr(mix_index, "_SETTLED_NS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return many_datasets(tmp_path / "data", COUNT)


@pytest.fixture
def read_anew(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the path of every dataset whose metadata is read."""
    paths: list[str] = []
    read_info = format_dataset.read_info

    def spy(store: Any) -> Any:
        paths.append(Path(store.root).name)
        return read_info(store)

    monkeypatch.setattr(format_dataset, "read_info", spy)
    return paths


def opened(source: Any, **options: Any) -> DatasetSpec:
    return get_train_dataset(source, batch_size=2, worker_config=ONE, **options)


def facts(spec: DatasetSpec) -> list[Any]:
    """Return all that the order and the samples of a run depend on."""
    return [
        (
            *(leaf.identity, leaf.num_samples, leaf.weight, leaf.dataset.path, leaf.dataset.shard_names),
            *(leaf.dataset.shard_counts.tolist(), leaf.dataset.shard_sizes.tolist(), leaf.dataset.excluded),
            *(leaf.dataset.sample_type, leaf.dataset.field_map, leaf.dataset.subflavors, leaf.dataset.fingerprint),
        )
        for leaf in spec.leaves
    ]


def facts_without_index(mix: Path) -> list[Any]:
    """Return what a start finds that has no index to read."""
    folder = Path(f"{mix}.cache")
    aside = folder.with_name("aside")
    folder.rename(aside)
    found = facts(opened(mix))
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return found


def index_file(mix: Path) -> Path:
    (file,) = Path(f"{mix}.cache").iterdir()
    return file


def test_a_later_start_finds_the_same_and_reads_no_metadata(mix: Path, read_anew: list[str]):
    first = opened(mix)
    assert len(read_anew) == COUNT
    read_anew.clear()
    later = opened(mix)
    assert read_anew == []
    assert facts(later) == facts(first)
    batches = [[next(iter(get_savable_loader(spec))) for _ in range(3)] for spec in (first, later)]
    assert [batch.__key__ for batch in batches[0]] == [batch.__key__ for batch in batches[1]]


def test_a_later_start_warns_as_the_first(mix: Path, read_anew: list[str], caplog: pytest.LogCaptureFixture):
    meta("split.yaml", "split_parts: {train: [s3.tar], val: [s3.tar]}\nexclude: []\n")(mix.parent / "d003")
    for count in (COUNT, COUNT):
        mix_index._log_doubt.cache_clear()
        caplog.clear()
        opened(mix)
        assert ["shards of `train` are in `val`, too" in message for message in caplog.messages] == [True]
        assert len(read_anew) == count


def meta(name: str, text: str) -> Callable[[Path], None]:
    return lambda dataset: (dataset / ".nv-meta" / name).write_text(text) and None


def longer_shard(dataset: Path) -> None:
    write_shard(dataset / "s3.tar", {f"3_{n}": {"txt": b"other " * 300} for n in range(4)})


def swapped_in_place(dataset: Path) -> None:
    """Change a file to one of the same size, and put its time back."""
    file = dataset / ".nv-meta" / "split.yaml"
    before = file.stat()
    file.write_text(file.read_text().replace("exclude: []\n", "exclude: [] "))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


CHANGES: dict[str, Callable[[Path], None]] = {
    "shard": longer_shard,
    "dataset.yaml": meta("dataset.yaml", "sample_type: {__module__: megatron.energon, __class__: CrudeWebdataset}\n"),
    "split": meta("split.yaml", "split_parts: {train: [s3.tar]}\nexclude: [s3.tar/3_1]\n"),
    "counts": meta(".info.json", '{"shard_counts": {"s3.tar": 5}}'),
    "same size and time": swapped_in_place,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_missed(mix: Path, read_anew: list[str], name: str):
    opened(mix)
    CHANGES[name](mix.parent / "d003")
    read_anew.clear()
    changed = facts(opened(mix))
    assert read_anew == ["d003"]
    read_anew.clear()
    assert changed == facts(opened(mix)) == facts_without_index(mix)
    assert read_anew.count("d003") == 1  # the start without an index; the other one knew the change


def test_a_dataset_that_is_gone_is_refused_as_ever(mix: Path):
    opened(mix)
    (mix.parent / "d003" / "s3.tar").unlink()
    with pytest.raises(ShardMissingError, match=r"s3\.tar"):
        opened(mix)
    shutil.rmtree(mix.parent / "d003")
    with pytest.raises(DatasetNotFoundError, match="d003"):
        opened(mix)


def test_another_mix_in_the_same_file_is_seen(mix: Path):
    opened(mix)
    mix.write_text(mix.read_text().replace("{path: d003, weight: 1}", "{path: d003, weight: 9}"))
    assert facts(opened(mix)) == facts_without_index(mix)
    assert max(leaf.weight for leaf in opened(mix).leaves) == opened(mix).leaves[3].weight


@pytest.mark.parametrize("damage", ["nothing", "half", "flipped", "other version", "no JSON", "no object"])
def test_a_damaged_index_is_made_anew(mix: Path, read_anew: list[str], damage: str):
    expected = facts(opened(mix))
    file = index_file(mix)
    good = file.read_bytes()
    head, _, rest = good.partition(b"\n")
    other = json.dumps(json.loads(head) | {"version": [0, 0]}).encode() + b"\n" + rest
    wrong = {
        "nothing": b"",
        "half": good[: len(good) // 2],
        "flipped": good[:-20] + bytes([good[-20] ^ 1]) + good[-19:],
        "other version": other,
        "no JSON": b"\x00" * 1000,
        "no object": b"[]\n[]",
    }
    file.write_bytes(wrong[damage])
    read_anew.clear()
    assert facts(opened(mix)) == expected
    assert len(read_anew) == COUNT
    assert file.read_bytes() == good


def test_what_runs_code_is_not_kept(mix: Path, read_anew: list[str]):
    folder = mix.parent / "d003" / ".nv-meta"
    (folder / "sample_loader.py").write_text("def sample_loader(s): return {'text': s['txt']}\n")
    named = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
    (folder / "dataset.yaml").write_text(named + "sample_loader: sample_loader.py:sample_loader\n")
    opened(mix, trust_remote_code=True)
    read_anew.clear()
    assert opened(mix, trust_remote_code=True).leaves[3].dataset.sample_loader is not None
    assert read_anew == ["d003"]
    with pytest.raises(DatasetError, match="trust_remote_code"):
        opened(mix)


def test_what_changed_just_now_is_not_kept(mix: Path, read_anew: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(mix_index, "_SETTLED_NS", 3600 * 10**9)
    opened(mix)
    assert not Path(f"{mix}.cache").exists()


def test_few_datasets_leave_nothing(mix: Path):
    text = mix.read_text().splitlines(keepends=True)
    mix.write_text("".join(text[:-2]))
    opened(mix)
    assert not Path(f"{mix}.cache").exists()


def test_where_nothing_can_be_written_the_home_is_used(mix: Path, tmp_path: Path, read_anew: list[str]):
    Path(f"{mix}.cache").write_text("a file in the way")
    expected = facts(opened(mix))
    read_anew.clear()
    assert facts(opened(mix)) == expected
    assert read_anew == []
    assert len(list((tmp_path / "home" / "energon_bridge").rglob("opened_*.json"))) == 1


def test_without_any_place_it_opens_all_the_same(mix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    Path(f"{mix}.cache").write_text("a file in the way")
    (tmp_path / "home").write_text("another")
    with caplog.at_level("INFO"):
        assert len(opened(mix).leaves) == COUNT
    assert caplog.text.count("cannot write the index of the mix here") == 2


def test_a_mix_written_in_python_has_one_too(mix: Path, tmp_path: Path, read_anew: list[str]):
    pairs = [(mix.parent / f"d{number:03d}", 1 + number) for number in range(COUNT)]
    expected = facts(opened(Blender(pairs)))
    read_anew.clear()
    assert facts(opened(Blender(pairs))) == expected
    assert read_anew == []
    assert list((tmp_path / "home").iterdir())


def test_other_files_in_the_folder_stay(mix: Path):
    folder = Path(f"{mix}.cache")
    folder.mkdir()
    (folder / "join_index_x.bin").write_text("not ours")
    opened(mix)
    assert {path.name.partition("_")[0] for path in folder.iterdir()} == {"join", "opened"}


def start(mix: str, lost: bool) -> list[Any]:
    if lost:
        for file in Path(f"{mix}.cache").glob("opened_*.json"):  # of others, what they write must stay
            file.unlink(missing_ok=True)
    return facts(opened(mix))


def test_concurrent_starts_find_the_same_and_leave_one_good_file(mix: Path, read_anew: list[str]):
    expected = facts(opened(mix))
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        started = [pool.submit(start, str(mix), number % 3 == 0) for number in range(24)]
        assert all(one.result() == expected for one in started)
    opened(mix)
    read_anew.clear()
    assert facts(opened(mix)) == expected
    assert read_anew == []
    index_file(mix)  # the only one: nothing temporary is left

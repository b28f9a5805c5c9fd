"""Parquet files and Hugging Face datasets on disk, read as they are: the samples that `energon convert` would write."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import output_of, refusal_of
from engine import check_resumes, config_of, counts_of, loaders_of
from forked import run_forked
from keyed import mix_document
from sources import converted, picture

from energon_bridge import (
    Cooker,
    DefaultTaskEncoder,
    ErrorPolicy,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetError,
    DatasetMismatchError,
    EnergonError,
    FatalSampleError,
    FieldMapError,
    MetadataError,
    SourceError,
)
from energon_bridge.core.format.foreign import ForeignRow
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.tools.convert import row_groups as files, table_dataset as tables
from energon_bridge.tools.convert.arrow import open_parquet, open_saved
from energon_bridge.tools.convert.table_dataset import TableDataset, open_tables

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COUNT = 40


def rows_of(first: int, count: int) -> Any:
    """Return rows of pictures, JPEG and PNG by turns, with captions."""
    numbers = range(first, first + count)
    images = [{"bytes": picture(n, "png" if n % 5 == 0 else "jpeg"), "path": f"{n}"} for n in numbers]
    return arrow.table({"image": images, "caption": [f"caption {n}" for n in numbers], "year": [*numbers]})


def write_parquet(folder: Path) -> Path:
    """Write three files with row groups of different sizes, of which one is the validation split."""
    folder.mkdir()
    for name, first, count, group in (
        ("train-00000-of-00002", 0, 22, 4),
        ("train-00001-of-00002", 22, COUNT - 22, 7),
        ("validation-00000-of-00001", 100, 9, 4),
    ):
        parquet.write_table(rows_of(first, count), folder / f"{name}.parquet", row_group_size=group)
    return folder


def write_saved(folder: Path) -> Path:
    """Write what `DatasetDict.save_to_disk` does."""
    folder.mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    for split, first, counts in (("train", 0, (22, COUNT - 22)), ("validation", 100, (9,))):
        (folder / split).mkdir()
        names = []
        for number, count in enumerate(counts):
            names.append(f"data-{number:05d}.arrow")
            table = rows_of(first, count)
            path = str(folder / split / names[-1])
            with arrow.OSFile(path, "wb") as file, arrow.ipc.new_stream(file, table.schema) as out:
                out.write_table(table, max_chunksize=6)
            first += count
        files = [{"filename": name} for name in names]
        (folder / split / "state.json").write_text(json.dumps({"_data_files": files, "_indices_data_files": None}))
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {"parquet": write_parquet, "arrow": write_saved}


@pytest.fixture(scope="module", params=[*KINDS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("tables") / "data")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("plain") / "data")


def test_a_table_is_converted_by_a_path_from_the_folder_at_hand(
    folder: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of arrow files are read by their store, which has another idea of where a path begins."""
    monkeypatch.chdir(folder.parent)
    opened = open_saved if (folder / "dataset_dict.json").exists() else open_parquet
    near, right = opened(Path(folder.name), None), open_parquet(plain, None)
    assert len(near) == len(right) == COUNT + 9
    assert all(near.row(number).values == right.row(number).values for number in range(len(right)))


def validated(path: Path, part: str = "val", workers: int = 0, **settings: Any) -> list[Any]:
    config = WorkerConfig(num_workers=workers)
    settings = {"batch_size": 1, "split_part": part, "worker_config": config} | settings
    return list(get_loader(get_val_dataset(path, **settings)))


def same(here: Any, there: Any) -> bool:
    return all(
        torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        for value, other in ((getattr(here, name), getattr(there, name)) for name in ("__key__", "image", "caption"))
    )


# Samples --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2])
def test_samples_are_those_of_the_converted_dataset(folder: Path, workers: int, tmp_path: Path) -> None:
    written = converted(folder, tmp_path / "out")
    for part, count in (("train", COUNT), ("val", 9)):
        here, there = (validated(path, part, workers) for path in (folder, written))
        assert len(here) == len(there) == count
        # The rows of a split count from 0 where it is opened; `convert` numbers those of all splits.
        assert [batch.__key__ for batch in here] == [[f"{n:09d}"] for n in range(count)]
        for one, other in zip(here, there, strict=True):
            assert same(replace(one, __key__=other.__key__), other)


@pytest.mark.parametrize("form", ["new_file", "new_stream"])
def test_both_forms_of_arrow_files_are_read(form: str, tmp_path: Path) -> None:
    rows = rows_of(0, 5)
    path = tmp_path / "x.arrow"
    with arrow.OSFile(str(path), "wb") as file, getattr(arrow.ipc, form)(file, rows.schema) as out:
        out.write_table(rows, max_chunksize=2)
    assert "x.arrow: arrow, 5 samples." in output_of("convert", path, tmp_path / "out", "--split-ratio", "0,1,0")
    for here in (path, tmp_path / "out"):
        batches = validated(here)
        assert [batch.caption for batch in batches] == [[one] for one in rows["caption"].to_pylist()]
    parquet.write_table(rows, tmp_path / "x.parquet")
    assert all(same(one, other) for one, other in zip(batches, validated(tmp_path / "x.parquet"), strict=True))


def test_filters_read_columns_of_the_table(folder: Path) -> None:
    for text, expected in (("year >= 102 and year < 105", [102, 103, 104]), ("caption == 'caption 107'", [107])):
        assert [batch.caption for batch in validated(folder, filter=text)] == [[f"caption {n}"] for n in expected]
    kept = {
        batch.caption[0] for batch in get_loader(trained(folder, repeat=False, batch_size=1, filter="year % 2 == 0"))
    }
    assert kept == {f"caption {n}" for n in range(0, COUNT, 2)}


def test_only_the_columns_of_the_fields_are_read(folder: Path) -> None:
    dataset = open_tables(folder, split_part="train")
    assert (dataset.columns, dataset.wanted) == (("image", "caption", "year"), ("image", "caption"))
    (row,) = tables.TableRows(dataset).read(np.array([3]))
    assert isinstance(row, ForeignRow)
    assert json.loads(row.parts["json"].tobytes()) == {"caption": "caption 3"}


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")
    parquet.write_table(arrow.table({"text": ["a"]}), path / "train-00002-of-00002.parquet")
    with pytest.raises(
        SourceError,
        match=r"train-00002-of-00002\.parquet: has the columns text, and .* image, caption, year\. Write them with the",
    ):
        trained(path)


def test_children_read_what_their_parent_has_read(folder: Path) -> None:
    dataset = open_tables(folder, split_part="train")
    rows = tables.TableRows(dataset)

    def captions(_: int) -> list[bytes]:
        found = [row for row in rows.read(np.arange(COUNT)) if isinstance(row, ForeignRow)]
        return [row.parts["json"].tobytes() for row in found]

    expected = captions(0)
    assert len(expected) == COUNT
    for _ in range(4):
        assert run_forked(4, captions) == [expected] * 4


def test_one_file_is_a_dataset_too(plain: Path) -> None:
    file = plain / "train-00000-of-00002.parquet"
    assert [batch.caption[0] for batch in validated(file)] == [f"caption {n}" for n in range(22)]


def test_a_folder_may_be_called_like_a_file(plain: Path, tmp_path: Path) -> None:
    """As Spark writes them."""
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    (folder / "part-00000.parquet").write_bytes((plain / "train-00000-of-00002.parquet").read_bytes())
    assert len(validated(folder)) == 22
    assert "22 samples in 1 shards" in run("info", folder).replace("1 shard,", "1 shards,")


def test_a_source_tells_file_and_row(plain: Path) -> None:
    (source,) = validated(plain, "train")[24].__sources__
    assert (source.shard_name, source.index) == ("train-00001-of-00002.parquet", 24)
    assert source.dataset_path == str(plain)


def test_crude_rows_are_cooked(tmp_path: Path) -> None:
    rows = {"left": [{"bytes": picture(n, "png"), "path": None} for n in range(6)]}
    rows |= {"right": rows["left"][::-1], "words": [["a", str(n)] for n in range(6)]}
    parquet.write_table(arrow.table(rows), tmp_path / "x.parquet")

    class Pairs(DefaultTaskEncoder[Any, Any, Any, Any]):
        cookers = (Cooker(lambda sample: {"__key__": sample["__key__"], "words": sample["json"]["words"]}),)

    found = validated(tmp_path / "x.parquet", task_encoder=Pairs(), batch_size=None)
    assert [sample["words"] for sample in found] == [["a", str(n)] for n in range(6)]
    (first, *_) = validated(tmp_path / "x.parquet", batch_size=None)
    assert first["left.png"].shape == first["right.png"].shape


# Order and state ------------------------------------------------------------------------------------------------------


def trained(path: Any, **settings: Any) -> Any:
    settings = {"batch_size": 2, "shuffle_buffer_size": 5, "worker_config": config_of(1, 0)} | settings
    return get_train_dataset(path, **settings)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_stream_is_the_same_on_every_topology_and_resumes(folder: Path, mixed: bool, tmp_path: Path) -> None:
    source: Any = folder
    if mixed:
        source = [(str(folder), 2.0), (str(converted(folder, tmp_path / "out")), 1.0)]
    dataset = trained(source)
    check_resumes(dataset)


def test_another_file_is_not_continued(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")
    loader = get_savable_loader(trained(path))
    next(iter(loader))
    state = loader.save_state_rank()
    parquet.write_table(rows_of(0, 22), path / "train-00000-of-00002.parquet", row_group_size=22)
    with pytest.raises(DatasetMismatchError):
        get_savable_loader(trained(path)).restore_state_rank(state)


def test_slices_of_large_files_are_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is read about once in an epoch, though a process keeps few."""
    count, group = 24 * 4 * 25, 25
    rows = arrow.table({"text": [f"text {n}" for n in range(count)]})
    parquet.write_table(rows, tmp_path / "x.parquet", row_group_size=group)
    dataset = trained(tmp_path / "x.parquet", batch_size=None)
    (loader,) = loaders_of(dataset, 1, 0)
    (leaf,) = plan_run(loader.spec, loader.config).leaves
    assert (leaf.order.slice_length, leaf.order.parallel_shard_iters) == (group, 1)
    read: list[int] = []
    opened = files.parquet_file
    monkeypatch.setattr(tables, "_KEPT", PerProcess(tables._Kept))

    class Counted:
        def __init__(self, *of: Any) -> None:
            self.file = opened(*of)

            self.metadata = self.file.metadata

        def read_row_groups(self, numbers: list[int], **settings: Any) -> Any:
            read.extend(numbers)
            return self.file.read_row_groups(numbers, **settings)

    monkeypatch.setattr(files, "parquet_file", Counted)
    monkeypatch.setattr(tables, "_KEPT_BYTES", 24 * 4 * 2 * group * 20)  # two windows of each lane
    batches = iter(loader)
    found = [next(batches).text for _ in range(count)]
    loader.close()
    assert len(set(found)) == count
    assert len(read) <= 2.5 * count / group


def test_groups_that_are_decoded_again_and_again_are_worth_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = arrow.table({"text": [f"text {n}" for n in range(2000)]})
    parquet.write_table(rows, tmp_path / "x.parquet", row_group_size=100)
    monkeypatch.setattr(tables, "_KEPT", PerProcess(tables._Kept))
    reader = tables.TableRows(tables.open_tables(tmp_path / "x.parquet", split_part="train"))
    numbers = np.random.default_rng(0).permutation(2000)

    def read(chosen: np.ndarray) -> None:
        for number in chosen:
            reader.read(np.array([number]))

    read(numbers[:200])
    assert not caplog.records  # all of them are kept
    monkeypatch.setattr(tables, "_KEPT", PerProcess(tables._Kept))
    monkeypatch.setattr(tables, "_KEPT_BYTES", 3000)  # two of the twenty
    read(numbers[200:])
    (record,) = [record for record in caplog.records if "decoded again" in record.message]
    assert f"energon convert {tmp_path} OUT" in record.message


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_rows_that_are_no_samples_are_skipped_and_counted(tmp_path: Path) -> None:
    images = [{"bytes": b"no picture" if n == 4 else picture(n), "path": None} for n in range(30)]
    rows = {"image": images, "caption": [f"caption {n}" for n in range(30)]}
    parquet.write_table(arrow.table(rows), tmp_path / "x.parquet", row_group_size=8)
    policy = ErrorPolicy(on_error="skip")
    loader = get_savable_loader(trained(tmp_path / "x.parquet", batch_size=None, error_policy=policy))
    batches = iter(loader)
    keys = [next(batches).__key__ for _ in range(60)]
    assert "000000004" not in keys
    assert counts_of(loader.save_state_rank())["errors"] >= 1
    with pytest.raises(FatalSampleError, match=r"x\.parquet, row group 0, row 4: `image`: bytes of an unknown format"):
        validated(tmp_path / "x.parquet", error_policy=ErrorPolicy(on_error="raise"))


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_number_that_is_missing_is_no_text(missing: float | None, tmp_path: Path) -> None:
    images = [{"bytes": picture(n), "path": None} for n in range(3)]
    labels = arrow.array([1.5, missing, 3.0], from_pandas=False)
    assert labels.null_count == (missing is None)
    parquet.write_table(arrow.table({"image": images, "label": labels}), tmp_path / "x.parquet")
    dataset = get_val_dataset(tmp_path, split_part="train", batch_size=3, worker_config=WorkerConfig(num_workers=0))
    (batch,) = get_loader(dataset)
    assert batch.label_name == ["1.5", None, "3.0"]


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")
    file = path / "train-00000-of-00002.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"train-00000-of-00002\.parquet: cannot be read.*cut off"):
        trained(path)


def test_a_file_that_goes_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")
    dataset = trained(path, error_policy=ErrorPolicy(on_error="raise"))
    for file in path.glob("train*"):
        file.unlink()
    files.parquet_file.cache_clear()
    with pytest.raises(EnergonError, match=r"parquet: the file is gone"):
        next(iter(get_savable_loader(dataset)))


def test_a_dataset_yaml_says_type_and_fields(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")
    (path / ".nv-meta").mkdir()
    config = path / ".nv-meta/dataset.yaml"
    config.write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "field_map: {text: caption}\nsubflavors: {a: b}\n"
    )
    batch = validated(path)[0]
    assert (batch.text, batch.__subflavors__) == (["caption 100"], [{"a": "b"}])
    config.write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\nfield_map: {text: captions}\n"
    )
    with pytest.raises(FieldMapError, match=r"has no column 'captions', .*caption.* It has image, caption, year"):
        validated(path)
    config.write_text("sample_type: {__module__: megatron.energon, __class__: VQASample}\nfield_map: {image: image}\n")
    with pytest.raises(FieldMapError, match="requires"):
        validated(path)


def test_two_fields_of_one_column_get_what_each_of_them_needs(tmp_path: Path) -> None:
    """One of them is a text, the other a list of texts, and rows have the one or the other."""
    path = write_parquet(tmp_path / "data")
    (path / ".nv-meta").mkdir()
    (path / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: MultiChoiceVQASample}\n"
        "field_map: {image: image, context: caption, choices: caption, correct_choice_idx: year}\n"
    )
    batch = validated(path)[0]
    assert (batch.context, batch.choices) == (["caption 100"], [["caption 100"]])


def test_folders_that_the_datasets_library_wrote(tmp_path: Path) -> None:
    """Saved, and as parquet with its `Image` feature; PYTHONPATH may add the library where it is not installed."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "caption": datasets.Value("string"), "year": datasets.Value("int64")}
    )
    splits = {
        split: datasets.Dataset.from_dict(rows_of(first, count).to_pydict(), features=features)
        for split, first, count in (("train", 0, 22), ("validation", 100, 9))
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet").mkdir()
    for split, rows in splits.items():
        rows.to_parquet(tmp_path / f"parquet/{split}-00000-of-00001.parquet")
    saved, files = (validated(tmp_path / name) for name in ("saved", "parquet"))
    ours = validated(write_parquet(tmp_path / "ours"))
    assert [batch.caption for batch in saved] == [batch.caption for batch in files] == [batch.caption for batch in ours]
    assert all(torch.equal(one.image, other.image) for one, other in zip(saved, ours, strict=True))
    assert all(torch.equal(one.image, other.image) for one, other in zip(files, ours, strict=True))


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("{folder}/gone.parquet", DatasetError, r"gone\.parquet"),
        ({"join": True}, MetadataError, "is a table, whose rows have no keys to join by"),
        ({"filter": "yaer > 3"}, ConfigurationError, "yaer.*year"),
        ({"filter": "image > 3"}, ConfigurationError, "filters take numbers, texts and dates"),
    ],
)
def test_what_cannot_be_is_refused(source: Any, error: type[Exception], text: str, plain: Path) -> None:
    if isinstance(source, str):
        source = source.format(folder=plain)
    else:
        part: Any = {"path": str(plain)}
        if "join" in source:
            joiner = {"__module__": "megatron.energon", "__class__": "VQASample"}
            part = {"join": [part, part], "joiner": joiner}
        else:
            part["filter"] = source["filter"]
        source = mix_document(train=part)
    with pytest.raises(error, match=text):
        trained(source)


# Commands -------------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    output = output_of(*[str(argument) for argument in arguments])
    return output


def test_commands_know_tables(folder: Path, tmp_path: Path) -> None:
    told = run("info", folder)
    assert "49 samples in 3 shards" in told
    assert "CaptioningSample" in told
    assert "nobody: its tables are read as they are" in told
    assert "All 49 samples load." in run("lint", folder)
    assert "caption 0" in run("preview", folder)
    loader = get_savable_loader(trained(folder))
    first = next(iter(loader))
    state = tmp_path / "state.pt"
    torch.save(loader.save_state_rank(), state)
    told = run("which", state, "--step", "0")
    assert all(key in told for key in first.__key__)


def test_lint_names_rows(tmp_path: Path) -> None:
    images = [{"bytes": picture(n)[: 60 if n == 2 else None], "path": None} for n in range(5)]
    rows = {"image": images, "question": ["0", "1", "2", None, "4"], "answer": ["a", "b", "c", "d", "e"]}
    parquet.write_table(arrow.table(rows), tmp_path / "x.parquet")
    output = refusal_of("lint", tmp_path / "x.parquet")
    assert "000000002" in output
    assert "row 3: `question` is null, but the field `context` is str." in output
    assert "name another column in the field map of .nv-meta/dataset.yaml." in output
    assert "--on-error" not in output


def test_rows_are_banned_by_their_numbers(plain: Path) -> None:
    loader = get_savable_loader(trained(plain, batch_size=None))
    loader.ban(["000000003", "000000017"])
    batches = iter(loader)
    keys = {next(batches).__key__ for _ in range(2 * COUNT)}
    assert keys == {f"{n:09d}" for n in range(COUNT)} - {"000000003", "000000017"}


def test_threads_share_what_a_process_keeps(plain: Path) -> None:
    dataset = open_tables(plain, split_part="train")
    assert isinstance(dataset, TableDataset)
    rows = tables.TableRows(dataset)
    expected = [row.parts["json"].tobytes() for row in rows.read(np.arange(COUNT)) if isinstance(row, ForeignRow)]
    assert len(expected) == COUNT
    found: list[list[bytes]] = []

    def read(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(COUNT)
        made: dict[int, bytes] = {}
        for number in order.tolist():
            (row,) = rows.read(np.array([number]))
            assert isinstance(row, ForeignRow)
            made[number] = row.parts["json"].tobytes()
        found.append([made[number] for number in range(COUNT)])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4

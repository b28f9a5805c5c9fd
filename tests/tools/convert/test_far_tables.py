"""Parquet files and Hugging Face datasets behind URLs: the stream of the local ones, by ranged reads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from clouds import Cloud, s3
from commands import energon, output_of, refusal_of
from engine import deliver, loaders_of
from keyed import write_mix
from object_server import ObjectServer, every, serving
from sources import content, converted, picture
from test_tables import KINDS, same, trained, validated

from energon_bridge import ErrorPolicy, get_loader
from energon_bridge.core.errors import (
    CorruptShardError,
    DatasetError,
    EnergonError,
    FatalSampleError,
    NotPreparedError,
    SourceError,
    UnknownSplitError,
)
from energon_bridge.tools.convert import table_dataset as tables

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("far")
    for name, write in KINDS.items():
        write(found / name)
    (found / "one.parquet").write_bytes((found / "parquet/train-00000-of-00002.parquet").read_bytes())
    (found / "one.arrow").write_bytes((found / "arrow/train/data-00001.arrow").read_bytes())
    filtered = {"path": "./one.parquet", "weight": 2, "filter": "year > 3"}
    write_mix(found / "mix.yaml", train={"blend": [filtered, {"path": "./arrow", "weight": 1}]})
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ObjectServer]:
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def bucket(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with s3(tmp_path_factory.mktemp("s3")) as found:
        found.upload(folder, "far")
        yield found


@pytest.fixture(params=["http", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "s3":
        yield request.getfixturevalue("bucket").url("far")
        return
    server: ObjectServer = request.getfixturevalue("server")
    server.fault = every(9, "reset", "503", "short")
    yield server.url
    server.fault = every(1 << 60)


def deliver_batches(loaders: Sequence[Any], steps: int) -> list[Any]:
    """Let all ranks deliver some steps; batches in the order of the steps."""
    columns = []
    for loader in loaders:
        batches = iter(loader)
        columns.append([next(batches) for _ in range(steps)])
        loader.close()
    return [batch for row in zip(*columns, strict=True) for batch in row]


def texts(batches: list[Any]) -> list[Any]:
    return [(batch.__key__, batch.caption, batch.image.sum().item()) for batch in batches]


SETTINGS: dict[str, Any] = {"filter": "year >= 5 and year < 30"}
# A web server cannot list the files of a folder; `save_to_disk` has a list of its own.
HTTP, S3 = ["one.parquet", "arrow", "mix.yaml"], ["parquet", "one.arrow"]
PLACES = [*(("http", name) for name in HTTP), *(("s3", name) for name in S3)]


@pytest.mark.parametrize(("url", "name"), PLACES, indirect=["url"])
def test_the_stream_is_the_local_one_and_resumes_on_any_topology(url: str, folder: Path, name: str) -> None:
    """Interrupted here, continued there: a state of the local files goes on at the URL."""
    settings = {} if name.endswith("yaml") else SETTINGS
    local, far = (trained(f"{place}/{name}", **settings) for place in (folder, url))
    whole = texts(deliver_batches(loaders_of(far, 1, 0), 24))
    assert whole == texts(deliver_batches(loaders_of(local, 1, 0), 24))
    here = deliver(loaders_of(local, 2, 1), 3, save_at=[3])
    there = loaders_of(far, 3, 0, state=here.states[3])
    assert texts(deliver_batches(there, 4)) == whole[6:18]


def test_validation_and_splits(bucket: Cloud, folder: Path) -> None:
    for name in KINDS:
        found, local = (validated(place, workers=1) for place in (bucket.url(f"far/{name}"), folder / name))
        assert len(found) == 9
        assert all(same(*pair) for pair in zip(found, local, strict=True))
    with pytest.raises(UnknownSplitError, match=r"'test'\. Known split parts: train, val"):
        validated(bucket.url("far/parquet"), "test")


def test_a_row_group_is_one_round_of_requests(server: ObjectServer) -> None:
    server.asked.clear()
    dataset = trained(f"{server.url}/one.parquet", repeat=False, batch_size=None)
    opened = len(server.asked)
    assert opened <= 10
    assert len(list(get_loader(dataset))) == 22
    spans = [span for path, span in server.asked[opened:] if path.endswith("parquet")]
    groups = 6
    assert len(spans) <= 2 * groups + 4


def test_columns_that_no_field_needs_are_not_read(tmp_path: Path) -> None:
    count = 64
    noise = [random.Random(n).randbytes(20_000) for n in range(count)]
    rows = {"text": [f"text {n}" for n in range(count)], "noise": [list(data) for data in noise]}
    parquet.write_table(arrow.table(rows), tmp_path / "x.parquet", row_group_size=16)
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\nfield_map: {text: text}\n"
    )
    with serving(tmp_path) as server:
        dataset = trained(f"{server.url}/x.parquet", repeat=False, batch_size=None)
        server.asked.clear()
        assert len({sample.text for sample in get_loader(dataset)}) == count
        bounds = [span.removeprefix("bytes=").split("-") for _, span in server.asked if span]
    assert sum(int(last) - int(first) + 1 for first, last in bounds if last) < (tmp_path / "x.parquet").stat().st_size


def test_pictures_that_rows_name_are_beside_the_table(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(picture(number, "png"))
    images = [{"bytes": None, "path": f"{number}.png"} for number in range(6)]
    images += [{"bytes": None, "path": "gone.png"}, {"bytes": None, "path": "../x.png"}]
    rows = {"image": images, "caption": [f"caption {n}" for n in range(8)]}
    parquet.write_table(arrow.table(rows), tmp_path / "x.parquet")
    with serving(tmp_path) as server:
        url = f"{server.url}/x.parquet"
        found = validated(url, error_policy=ErrorPolicy(on_error="skip"))
        local = validated(tmp_path / "x.parquet", error_policy=ErrorPolicy(on_error="skip"))
        assert len(found) == len(local)
        assert all(same(*pair) for pair in zip(found, local, strict=True))
        with pytest.raises(FatalSampleError, match=r"gone\.png is not there"):
            validated(url, error_policy=ErrorPolicy(on_error="raise"))


@pytest.mark.parametrize("form", ["new_file", "new_stream"])
@pytest.mark.parametrize("columns", [2, 400])
def test_arrow_files_of_both_forms(form: str, columns: int, tmp_path: Path) -> None:
    """With heads of all lengths (those of many columns are longer than what is read at first), nulls and lists."""
    values = {f"column {n}": [n, n, n] for n in range(columns)}
    rows = arrow.table({"text": ["a", None, "c"], "list": [[1], [], [2, 3]], **values})
    with arrow.OSFile(str(tmp_path / "x.arrow"), "wb") as file, getattr(arrow.ipc, form)(file, rows.schema) as out:
        for size in (1, 2):
            out.write_table(rows, max_chunksize=size)
    with serving(tmp_path) as server:
        dataset = tables.open_tables(f"{server.url}/x.arrow", split_part="train")
        local = tables.open_tables(tmp_path / "x.arrow", split_part="train")
        assert dataset.fingerprint == local.fingerprint
        assert dataset.num_samples == 6
        found = [one.read_values("column 1").tolist() for one in (dataset, local)]
        assert found[0] == found[1] == [1] * 6


@pytest.mark.parametrize(("url", "name"), [("http", "arrow"), ("s3", "parquet")], indirect=["url"])
def test_converted_from_a_url_they_are_what_local_ones_become(
    url: str, folder: Path, name: str, tmp_path: Path
) -> None:
    flags = ("--samples-per-shard", "7", "--no-ask")
    converted(folder / name, tmp_path / "local", *flags)
    line = ["convert", f"{url}/{name}", str(tmp_path / "far"), *flags, "--no-progress", "--num-workers", "2"]
    assert f"{url}/{name}: table" in output_of(*line)
    far, local = (
        {file: data for file, data in content(tmp_path / place).items() if "/convert/" not in file}
        for place in ("far", "local")
    )
    assert far == local
    assert "Unchanged" in energon(*line).output


def test_other_sources_behind_urls_are_refused(server: ObjectServer, tmp_path: Path) -> None:
    for name in ("gone.parquet", "mix.yaml", "nothing"):
        assert server.url in refusal_of("convert", f"{server.url}/{name}", tmp_path / "out")


@pytest.mark.parametrize("url", ["http"], indirect=True)
def test_commands(url: str) -> None:
    for command in (["info"], ["lint"], ["plan", "--steps", "2", "--batch-size", "2"]):
        result = energon(command[0], f"{url}/arrow", *command[1:])
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert "nobody: its tables are read as they are" in energon("info", f"{url}/one.parquet").output


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_named(url: str) -> None:
    with pytest.raises(DatasetError, match=r"gone\.parquet"):
        trained(f"{url}/gone.parquet")


def test_a_folder_of_a_web_server_cannot_be_listed(server: ObjectServer) -> None:
    said = r"/parquet.* if it holds parquet or arrow files; copy others here first\. A web server cannot list its files"
    with pytest.raises(NotPreparedError, match=said):
        trained(f"{server.url}/parquet")


@pytest.mark.parametrize("name", ["one.parquet", "one.arrow"])
@pytest.mark.parametrize("cut", [100, 5000])
def test_files_that_were_cut_off_are_named(folder: Path, tmp_path: Path, name: str, cut: int) -> None:
    (tmp_path / name).write_bytes((folder / name).read_bytes()[:-cut])
    with serving(tmp_path) as server, pytest.raises(EnergonError, match=rf"{name}: .*(cut off|cannot be read)"):
        validated(f"{server.url}/{name}", error_policy=ErrorPolicy(on_error="raise"))


def test_a_file_that_changes_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes((folder / "one.parquet").read_bytes())
    with serving(tmp_path) as server:
        dataset = tables.open_tables(f"{server.url}/x.parquet", split_part="train")
        (tmp_path / "x.parquet").write_bytes((folder / "parquet/train-00001-of-00002.parquet").read_bytes())
        with pytest.raises(CorruptShardError, match=r"x\.parquet: has other bytes"):
            tables.TableRows(dataset).read(tables.np.array([0]))


def test_dictionaries_of_arrow_files_are_refused(tmp_path: Path) -> None:
    rows = arrow.table({"text": arrow.array(["a", "b", "a"]).dictionary_encode()})
    with arrow.OSFile(str(tmp_path / "x.arrow"), "wb") as file, arrow.ipc.new_stream(file, rows.schema) as out:
        out.write_table(rows)
    with serving(tmp_path) as server, pytest.raises(SourceError, match=r"dictionaries.*copy it"):
        tables.open_tables(f"{server.url}/x.arrow", split_part="train")

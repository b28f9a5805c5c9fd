"""Values of tables: rows as `load_dataset` and pyarrow give them, and columns of any type in filters."""

from __future__ import annotations

import base64
import datetime
import io
import json
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sources import picture

from energon_bridge import WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.errors import ConfigurationError, EmptyDatasetError, SourceError
from energon_bridge.tools.columns.expression import numbers_of_samples
from energon_bridge.tools.convert.arrow import open_parquet, open_saved
from energon_bridge.tools.convert.table_dataset import open_tables

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def samples(path: Path, **settings: Any) -> list[Any]:
    config = WorkerConfig(num_workers=0)
    return list(
        get_loader(get_val_dataset(path, split_part="train", batch_size=None, worker_config=config, **settings))
    )


def turns(path: Path) -> list[list[Any]]:
    return [[turn["content"] for turn in sample["json"]["messages"]] for sample in samples(path)]


def texts(path: Path, **settings: Any) -> list[str]:
    return [sample.text for sample in samples(path, **settings)]


def written(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(arrow.table({"text": ["a", "b", "c", "d"]} | columns), path)
    return path


# Rows of the datasets library -----------------------------------------------------------------------------------------


def url(number: int) -> dict[str, Any]:
    data = base64.b64encode(picture(number, "png")).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def both_ways(folder: Path, rows: list[dict[str, Any]], features: Any) -> tuple[Any, list[Path]]:
    """Return what `load_dataset` reads of rows that the library wrote, and the file and folder with them."""
    datasets = pytest.importorskip("datasets", minversion="5")
    written = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    written.to_parquet(folder / "rows.parquet")
    written.save_to_disk(folder / "saved")
    file, cache = str(folder / "rows.parquet"), str(folder / "cache")
    right = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=cache)
    return right, [folder / "rows.parquet", folder / "saved"]


CHATS: dict[str, list[list[Any]]] = {
    "content": [["hi", "hello"], [[{"type": "text", "text": "what is it?"}], "a cat"]],
    "messages": [["hi", "hello"], [[{"type": "text", "text": "what is it?"}], "a cat"]],
    "large": [["hi", [{"type": "text", "text": "hello"}]]],
    "lists": [["hi", "hello"], ["what?", "a cat"]],
}


@pytest.mark.parametrize("kind", [*CHATS])
def test_conversations_that_the_datasets_library_stores_as_json_or_lists(kind: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="5")
    text, more = datasets.Value("string"), datasets.Json()
    turn = {"role": text, "content": text if kind == "lists" else more}
    features = {
        "content": datasets.List(turn),
        "messages": more,
        "large": datasets.LargeList(turn),
        "lists": datasets.Sequence(turn),
    }
    said = [
        [{"role": role, "content": one} for role, one in zip(("user", "assistant"), row, strict=True)]
        for row in CHATS[kind]
    ]
    if kind == "lists":
        rows = [{"messages": {name: [turn[name] for turn in row] for name in turn}} for row in said]
    else:
        rows = [{"messages": row} for row in said]
    right, paths = both_ways(tmp_path, rows, {"messages": features[kind]})
    assert [row["messages"] for row in right] == [row["messages"] for row in rows]
    assert [turns(path) for path in paths] == [CHATS[kind]] * 2


def test_pictures_in_content_that_is_json_are_media(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="5")
    said = [{"role": "user", "content": [url(7), {"type": "text", "text": "?"}]}, {"role": "assistant", "content": "7"}]
    features = {"messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Json()})}
    right, paths = both_ways(tmp_path, [{"messages": said}], features)
    assert right[0]["messages"][0]["content"][0] == url(7)
    for path in paths:
        (sample,) = samples(path)
        parts = sample["json"]["messages"][0]["content"]
        assert parts == [{"type": "image"}, {"type": "text", "text": "?"}]
        pixels = np.asarray(Image.open(io.BytesIO(picture(7, "png"))).convert("RGB"))
        assert np.array_equal(np.round(sample["0.png"].permute(1, 2, 0).numpy() * 255), pixels)


def test_a_number_as_content_is_the_text_that_it_was(tmp_path: Path) -> None:
    """The library stores the text `42` as JSON as it is, so that it reads a number."""
    datasets = pytest.importorskip("datasets", minversion="5")
    said = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}]
    features = {"messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Json()})}
    right, paths = both_ways(tmp_path, [{"messages": said}], features)
    assert right[0]["messages"][1]["content"] == 42
    assert [turns(path) for path in paths] == [[["6 * 7?", "42"]]] * 2


def test_rows_of_all_features_are_those_of_load_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="5")
    value, more = datasets.Value, datasets.Json()
    kinds = {
        "any": (more, {"a": [1, None, "x"]}),
        "deep": ({"a": datasets.List(more), "b": {"c": more}}, {"a": [1, "s", {"q": None}], "b": {"c": [1.5, True]}}),
        "pairs": (datasets.Sequence({"k": value("int64"), "v": more}), {"k": [1, 2], "v": [{"x": 1}, "s"]}),
        "large": (datasets.LargeList({"k": more}), [{"k": "x"}, {"k": 1}]),
        "fixed": (datasets.List(value("int64"), length=2), [1, 2]),
        "two": (datasets.Array2D((2, 2), "int32"), [[1, 2], [3, 4]]),
        "three": (datasets.Array3D((None, 2, 2), "float32"), [[[1, 2], [3, 4]]]),
        "four": (datasets.Array4D((1, 1, 1, 2), "int8"), [[[[1, 2]]]]),
        "five": (datasets.Array5D((1, 1, 1, 1, 2), "bool"), [[[[[True, False]]]]]),
        "tags": (datasets.List(datasets.ClassLabel(names=["x", "y"])), [0, 1]),
        "day": (value("date32"), datetime.date(2024, 1, 2)),
        "at": (value("timestamp[us]"), datetime.datetime(2024, 1, 2, 3, 4, 5, 6)),
        "price": (value("decimal128(5,2)"), "1.50"),
        "half": (value("float16"), 1.5),
        "small": (value("uint8"), 200),
        "long": (value("large_string"), "z"),
    }
    row = {name: one for name, (_, one) in kinds.items()}
    rows = [row, dict.fromkeys(kinds) | {"three": row["three"]}, row]  # the library reads a null there as NaN
    right, paths = both_ways(tmp_path, rows, {name: feature for name, (feature, _) in kinds.items()})
    for source in (open_parquet(paths[0], None), open_saved(paths[1], None)):
        assert [source.row(number).values for number in range(3)] == list(right)


def test_what_the_features_alone_call_json_is_parsed(tmp_path: Path) -> None:
    """Tools that copy a file may keep the metadata of the schema, but not the extension of the column."""
    features = {"info": {"features": {"extra": {"_type": "List", "feature": {"_type": "Json"}}}}}
    rows = arrow.table({"extra": [['{"a": [1]}', None]], "n": [1]})
    rows = rows.replace_schema_metadata({"huggingface": json.dumps(features)})
    parquet.write_table(rows, tmp_path / "rows.parquet")
    assert [one["json"] for one in samples(tmp_path / "rows.parquet")] == [{"extra": [{"a": [1]}, None], "n": 1}]


def test_content_that_is_no_json_fails_its_row_alone(tmp_path: Path) -> None:
    stored = arrow.ExtensionArray.from_storage(arrow.json_(), arrow.array(['{"a": 1}', "{", "[]", "3"]))
    source = open_parquet(written(tmp_path / "rows.parquet", extra=stored), None)
    assert [source.row(number).values["extra"] for number in (0, 2, 3)] == [{"a": 1}, [], 3]
    with pytest.raises(SourceError, match=r"rows\.parquet, row group 0, row 1: `extra`.*cannot be read"):
        source.row(1)
    assert texts(tmp_path / "rows.parquet") == ["a", "b", "c", "d"]


# Columns of any type --------------------------------------------------------------------------------------------------

NANO = 1704164645123456789
ODD: dict[str, tuple[Any, Any]] = {
    "nanoseconds": (arrow.array([NANO], arrow.timestamp("ns")), "2024-01-02T03:04:05.123456789"),
    "nanoseconds of a zone": (
        arrow.array([NANO], arrow.timestamp("ns", "+02:00")),
        "2024-01-02T05:04:05.123456789+02:00",
    ),
    "whole microseconds": (arrow.array([NANO - 789], arrow.timestamp("ns")), "2024-01-02T03:04:05.123456"),
    "in a list": (arrow.array([[NANO]], arrow.list_(arrow.timestamp("ns"))), ["2024-01-02T03:04:05.123456789"]),
    "a long time": (arrow.array([123456789], arrow.duration("ns")), "0:00:00.123456789"),
    "of the day": (arrow.array([123456789], arrow.time64("ns")), "00:00:00.123456789"),
    "a far year": (arrow.array([10**15], arrow.timestamp("s")), str(10**15)),
    "a far day": (arrow.array([10**8], arrow.date32()), str(10**8)),
    "no such zone": (arrow.array([5], arrow.timestamp("us", "Mars/Phobos")), "5"),
    "months": (arrow.array([(1, 2, 3)], arrow.month_day_nano_interval()), [1, 2, 3]),
    "decimal": (arrow.array(["1.50"]).cast(arrow.decimal256(60, 2)), "1.50"),
    "text view": (arrow.array(["x"], arrow.string_view()), "x"),
    "list view": (arrow.array([[1, 2]], arrow.list_view(arrow.int64())), [1, 2]),
    "runs": (arrow.RunEndEncodedArray.from_arrays(arrow.array([1], arrow.int32()), arrow.array(["a"])), "a"),
    "map": (arrow.array([[("a", 1)]], arrow.map_(arrow.string(), arrow.int64())), [["a", 1]]),
    "union": (arrow.UnionArray.from_sparse(arrow.array([0], arrow.int8()), [arrow.array([1]), arrow.array(["x"])]), 1),
    "unsigned": (arrow.array([2**63 + 5], arrow.uint64()), 2**63 + 5),
    "half": (arrow.array([1.5], arrow.float16()), 1.5),
    "category": (arrow.array(["x"]).dictionary_encode(), "x"),
    "uuid": (arrow.array([b"0" * 16], arrow.uuid()), "30303030-3030-3030-3030-303030303030"),
    "nothing": (arrow.nulls(1), None),
}


READ_WITHOUT_PANDAS = """
import json, pathlib, sys
class NoPandas:  # pyarrow uses it for some types where it is installed
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoPandas())
from energon_bridge import WorkerConfig, get_loader, get_val_dataset
found = {}
for path in pathlib.Path(sys.argv[1]).iterdir():
    config = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(path, split_part="train", batch_size=None, worker_config=config)
    found[path.stem] = next(iter(get_loader(dataset)))["json"]["odd"]
print(json.dumps(found))
"""


def test_columns_of_all_types_are_read_without_pandas(tmp_path: Path) -> None:
    for name, (column, _) in ODD.items():
        rows = arrow.table({"number": [1], "odd": column})
        with arrow.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, arrow.ipc.new_file(file, rows.schema) as out:
            out.write_table(rows)
    command = [sys.executable, "-c", READ_WITHOUT_PANDAS, tmp_path]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == {name: right for name, (_, right) in ODD.items()}


def test_bytes_of_no_known_format_are_a_part_and_no_reason_for_crude_samples(tmp_path: Path) -> None:
    written(tmp_path / "rows.parquet", hash=arrow.array([b"1", b"2", b"3", b"4"], arrow.binary_view()))
    assert texts(tmp_path / "rows.parquet") == ["a", "b", "c", "d"]
    parquet.write_table(arrow.table({"number": [1], "hash": [b"\x00\x01"]}), tmp_path / "crude.parquet")
    (sample,) = samples(tmp_path / "crude.parquet")
    assert (bytes(sample["hash.bin"]), sample["json"]) == (b"\x00\x01", {"number": 1})


def test_a_text_that_is_not_utf8_fails_its_row_alone(tmp_path: Path) -> None:
    stored = arrow.array([b"x", b"\xff", b"y", b"z"]).view(arrow.string())
    source = open_parquet(written(tmp_path / "rows.parquet", note=stored), None)
    assert [source.row(number).values["note"] for number in (0, 2, 3)] == ["x", "y", "z"]
    with pytest.raises(SourceError, match=r"row 1: `note`.*utf-8"):
        source.row(1)


def test_the_same_columns_in_another_order_are_the_same(tmp_path: Path) -> None:
    written(tmp_path / "data" / "0.parquet", n=[1, 2, 3, 4])
    parquet.write_table(arrow.table({"n": [5], "text": ["e"]}), tmp_path / "data" / "1.parquet")
    assert texts(tmp_path / "data") == ["a", "b", "c", "d", "e"]
    assert texts(tmp_path / "data", filter="n > 3") == ["d", "e"]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [arrow.array(["a"]), arrow.array(["b"])]
    parquet.write_table(arrow.table(columns, ["text", "text"]), tmp_path / "rows.parquet")
    with pytest.raises(SourceError, match=r"rows\.parquet.*'text' twice"):
        samples(tmp_path / "rows.parquet")


# Filters --------------------------------------------------------------------------------------------------------------

TEXTS = {
    "view": lambda texts: arrow.array(texts, arrow.string_view()),
    "large": lambda texts: arrow.array(texts, arrow.large_string()),
    "category": lambda texts: arrow.array(texts).dictionary_encode(),
    "large category": lambda texts: arrow.array(texts, arrow.large_string()).dictionary_encode(),
}
NUMBERS = {
    "unsigned": arrow.uint8(),
    "half": arrow.float16(),
    "decimal": arrow.decimal128(25, 2),
    "large unsigned": arrow.uint64(),
    "small": arrow.int8(),
}


@pytest.mark.parametrize("kind", [*TEXTS])
def test_filters_take_texts_of_all_types(kind: str, tmp_path: Path) -> None:
    column = TEXTS[kind](["de", "en", None, "de"])
    rows = arrow.table({"text": ["a", "b", "c", "d"]})
    right = rows.filter(arrow.compute.equal(column.cast(arrow.string()), "de"))["text"].to_pylist()
    assert texts(written(tmp_path / "rows.parquet", lang=column), filter="lang == 'de'") == right == ["a", "d"]


@pytest.mark.parametrize("kind", [*NUMBERS])
def test_filters_take_numbers_of_all_types(kind: str, tmp_path: Path) -> None:
    numbers = arrow.array([1, 2, None, 4], arrow.int64())
    column = numbers.cast(arrow.float32()).cast(NUMBERS[kind]) if kind == "half" else numbers.cast(NUMBERS[kind])
    right = arrow.table({"text": ["a", "b", "c", "d"]}).filter(arrow.compute.greater(numbers, 1))["text"].to_pylist()
    assert texts(written(tmp_path / "rows.parquet", n=column), filter="n > 1") == right == ["b", "d"]


DATES = {
    "date": arrow.date32(),
    "date in milliseconds": arrow.date64(),
    "seconds": arrow.timestamp("s"),
    "nanoseconds": arrow.timestamp("ns"),
    "with a zone": arrow.timestamp("us", "Asia/Tokyo"),
}


@pytest.mark.parametrize("kind", [*DATES])
@pytest.mark.parametrize("text", ["2024-01-03", "2023-12-31 18:00:00", "2024-01-03T00:00"])
@pytest.mark.parametrize("sign", [">", "<=", "=="])
def test_filters_take_dates(kind: str, text: str, sign: str, tmp_path: Path) -> None:
    days = [datetime.datetime(2024, 1, 2), datetime.datetime(2024, 1, 3), None, datetime.datetime(1969, 12, 31)]
    column = arrow.array(days, arrow.timestamp("us")).cast(DATES[kind])
    compared = {">": operator.gt, "<=": operator.le, "==": operator.eq}[sign]
    other = datetime.datetime.fromisoformat(text)
    right = [name for name, day in zip("abcd", days, strict=True) if day is not None and compared(day, other)]
    path = written(tmp_path / "rows.parquet", **{"day made": column})
    if right:
        assert texts(path, filter=f"`day made` {sign} '{text}'") == right
    left = [name for name in "abd" if name not in right]  # a row without a value is left out
    if left:
        assert texts(path, filter=f"not `day made` {sign} '{text}'") == left


@pytest.mark.parametrize(
    ("one", "other", "text", "right"),
    [
        ([1, 2, 3, 4], [1.5, 2.5, 3.5, 4.5], "n > 2.2", "cdbcd"),
        (arrow.array([1, 2, 3, 4], arrow.uint64()), [-1, 2, 3, 4], "n < 2", "aa"),
        (arrow.nulls(4), [1, 2, 3, 4], "n > 1", "bcd"),
        ([1, None, 3, None], [1.0, 2.0, None, 4.0], "not n > 2", "aab"),
        (["x", "y", "x", "y"], arrow.array(["x", "y", "y", "y"], arrow.large_string()), "n == 'x'", "aca"),
        (["x", "y", "x", "y"], arrow.nulls(4), "n != 'x'", "bd"),
        (arrow.array(["x", "y", "x", "y"]).dictionary_encode(), ["x", "y", "y", "y"], "n in ['x']", "aca"),
    ],
)
def test_files_of_a_folder_may_store_a_column_differently(
    one: Any, other: Any, text: str, right: str, tmp_path: Path
) -> None:
    written(tmp_path / "data" / "0.parquet", n=one)
    written(tmp_path / "data" / "1.parquet", n=other)
    assert texts(tmp_path / "data") == [*"abcdabcd"]
    assert texts(tmp_path / "data", filter=text) == [*right]


def test_what_filters_cannot_take_is_named(tmp_path: Path) -> None:
    clock = [datetime.time(1)] * 4
    written(tmp_path / "data" / "0.parquet", n=[1, 2, 3, 4], day=clock, gone=arrow.nulls(4))
    with pytest.raises(
        ConfigurationError, match=r"'day' is time64.*filters take numbers, texts and dates\. Write what"
    ):
        samples(tmp_path / "data", filter="day > 1")
    with pytest.raises(EmptyDatasetError, match="none of its 4 samples"):
        samples(tmp_path / "data", filter="gone > 1")
    written(tmp_path / "data" / "1.parquet", n=["x"] * 4, day=[1] * 4, gone=[1] * 4)
    with pytest.raises(ConfigurationError, match="'n' is int64 and string"):
        samples(tmp_path / "data", filter="n > 1")


def test_amounts_need_a_value_of_each_row(tmp_path: Path) -> None:
    dataset = open_tables(written(tmp_path / "rows.parquet", n=[1, None, 3, None]), split_part="train")
    with pytest.raises(ConfigurationError, match="'n' has no value in 2 of 4 rows"):
        numbers_of_samples(dataset, "n", where="a mix", use="counted by them")

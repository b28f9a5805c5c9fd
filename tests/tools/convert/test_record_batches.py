"""Rows of arrow files that are read alone: the values of pyarrow, of any type; and files that are cut off."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import subprocess
import sys
import uuid
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import config_of

from energon_bridge import get_savable_loader, get_train_dataset
from energon_bridge.core.errors import CorruptShardError
from energon_bridge.core.storage import open_store
from energon_bridge.tools.convert.record_batches import open_arrow

arrow = pytest.importorskip("pyarrow")

ROWS = 37
ZONE = datetime.timezone(datetime.timedelta(hours=2))


def text(n: int) -> str:
    return "wörd " * (n % 7) + str(n)


def columns() -> dict[str, Any]:
    """Return a column of each type; every fifth value is null."""
    day = datetime.datetime(2026, 11, 29, tzinfo=ZONE)
    of_type: dict[str, tuple[Any, Any]] = {
        "flag": (arrow.bool_(), lambda n: n % 3 == 0),
        "tiny": (arrow.int8(), lambda n: n - 20),
        "large": (arrow.uint64(), lambda n: n << 40),
        "half": (arrow.float16(), lambda n: float(n)),
        "number": (arrow.float64(), lambda n: n / 3),
        "text": (arrow.string(), text),
        "large_text": (arrow.large_string(), text),
        "bytes": (arrow.binary(), lambda n: bytes(range(n))),
        "large_bytes": (arrow.large_binary(), lambda n: bytes(n)),
        "fixed": (arrow.binary(5), lambda n: b"%05d" % n),
        "price": (arrow.decimal128(12, 3), lambda n: decimal.Decimal(n) / 8),
        "wide_price": (arrow.decimal256(40, 3), lambda n: decimal.Decimal(n) / 8),
        "moment": (arrow.timestamp("us", tz="Europe/Berlin"), lambda n: day + datetime.timedelta(hours=n)),
        "day": (arrow.date32(), lambda n: (day + datetime.timedelta(days=n)).date()),
        "span": (arrow.duration("ms"), lambda n: datetime.timedelta(seconds=n)),
        "list": (arrow.list_(arrow.string()), lambda n: [text(k) for k in range(n % 4)]),
        "large_list": (arrow.large_list(arrow.int32()), lambda n: list(range(n % 5))),
        "three": (arrow.list_(arrow.float32(), 3), lambda n: [n, n + 0.5, n + 1.0]),
        "map": (arrow.map_(arrow.string(), arrow.int32()), lambda n: [(text(k), k) for k in range(n % 3)]),
        "turns": (
            arrow.list_(arrow.struct([("role", arrow.string()), ("parts", arrow.list_(arrow.list_(arrow.bool_())))])),
            lambda n: [{"role": text(k), "parts": [[k % 2 == 0] * k, None, []]} for k in range(n % 4)],
        ),
        "nothing": (arrow.null(), lambda n: None),
    }
    if hasattr(arrow, "string_view"):
        of_type["view"] = arrow.string_view(), text
        of_type["byte_view"] = arrow.binary_view(), lambda n: bytes(n)
    made = {
        name: arrow.array([None if n % 5 == 4 else value(n) for n in range(ROWS)], kind)
        for name, (kind, value) in of_type.items()
    }
    made["label"] = arrow.array([("cat", "dog", None)[n % 3] for n in range(ROWS)]).dictionary_encode()
    if hasattr(arrow, "json_"):
        rows = [json.dumps({"n": n}) for n in range(ROWS)]
        made["json"] = arrow.ExtensionArray.from_storage(arrow.json_(), arrow.array(rows))
    if hasattr(arrow, "uuid"):
        ids = [uuid.UUID(int=n).bytes for n in range(ROWS)]
        made["id"] = arrow.ExtensionArray.from_storage(arrow.uuid(), arrow.array(ids, arrow.binary(16)))
    return made


def write(path: Path, table: Any, *, form: str, rows: int, compression: str | None = None) -> Path:
    new = arrow.ipc.new_stream if form == "stream" else arrow.ipc.new_file
    options = arrow.ipc.IpcWriteOptions(compression=compression)
    with arrow.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as out:
        out.write_batch(empty(table))
        for batch in table.to_batches(rows):
            out.write_batch(batch)
    return path


def empty(table: Any) -> Any:
    return arrow.RecordBatch.from_arrays(
        [one.combine_chunks().slice(0, 0) for one in table.columns], table.schema.names
    )


def check(path: Path) -> None:
    """Compare any rows with those that pyarrow reads."""
    store = open_store(path.parent)
    file = open_arrow(store, path.name, path.stat().st_size)
    with arrow.OSFile(str(path)) as source:
        form = arrow.ipc.open_file if source.read(6) == b"ARROW1" else arrow.ipc.open_stream
    with arrow.OSFile(str(path)) as source:
        expected = form(source).read_all()
    assert file.rows.schema == expected.schema
    chooser = random.Random(1)
    first = 0
    for batch in file.rows.to_batches():
        spans = [(0, batch.num_rows), (batch.num_rows, 0)]
        for _ in range(12 if batch.num_rows else 0):
            at = chooser.randrange(batch.num_rows)
            spans.append((at, chooser.randint(1, batch.num_rows - at)))
        for at, count in spans:
            pieces = [(array, at, count) for array in batch.columns]
            for name, got in zip(expected.schema.names, file.take(store, path.name, pieces), strict=True):
                got.validate(full=True)
                assert got.to_pylist() == expected.column(name).slice(first + at, count).to_pylist(), (name, at, count)
        first += batch.num_rows
    assert first == expected.num_rows


@pytest.mark.parametrize("rows", [ROWS, 10, 1])
@pytest.mark.parametrize("form", ["stream", "file"])
def test_rows_of_all_types_are_those_of_pyarrow(form: str, rows: int, tmp_path: Path) -> None:
    check(write(tmp_path / "x.arrow", arrow.table(columns()), form=form, rows=rows))


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_rows_are_those_of_pyarrow(compression: str, tmp_path: Path) -> None:
    table = arrow.table(columns())
    check(write(tmp_path / "x.arrow", table, form="file", rows=10, compression=compression))


def test_rows_that_were_cut_out_of_others_are_those_of_pyarrow(tmp_path: Path) -> None:
    check(write(tmp_path / "x.arrow", arrow.table(columns()).slice(3, 29), form="stream", rows=13))


CUT = """
import os, sys
from energon_bridge import WorkerConfig, get_loader, get_train_dataset
from energon_bridge.core.errors import CorruptShardError
path = sys.argv[1]
config = WorkerConfig(rank=0, world_size=1, num_workers=0)
batches = iter(get_loader(get_train_dataset(path, batch_size=2, worker_config=config)))
next(batches)
os.truncate(path, os.path.getsize(path) // 2)
try:
    for _ in range(400):
        next(batches)
except CorruptShardError as error:
    print("named", error)
"""


def test_a_file_that_is_cut_off_under_a_run_is_named_and_ends_no_process(tmp_path: Path) -> None:
    table = arrow.table({"text": [f"{n:06d} " * 600 for n in range(300)]})
    path = write(tmp_path / "x.arrow", table, form="stream", rows=100)
    ran = subprocess.run([sys.executable, "-c", CUT, str(path)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert f"named {path}" in ran.stdout


def test_a_file_that_is_written_again_under_a_run_is_named(tmp_path: Path) -> None:
    table = arrow.table({"text": [f"{n:06d} " * 600 for n in range(300)]})
    path = write(tmp_path / "x.arrow", table, form="stream", rows=100)
    batches = iter(get_savable_loader(get_train_dataset(path, batch_size=2, worker_config=config_of(1, 0))))
    next(batches)
    write(path, arrow.table({"text": [f"{n:06d}." * 600 for n in range(300)]}), form="stream", rows=100)
    with pytest.raises(CorruptShardError, match=r"x\.arrow"):
        deque(islice(batches, 400), maxlen=0)

"""`energon lint` of mixes, joins, JSONL and crude datasets, through task encoders, for equal samples; its JSON."""

from __future__ import annotations

import errno
import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from clips import write_video
from commands import answer, energon, output_of, refusal_of
from crude import crude_mix
from engine import text_dataset
from keyed import ALL_TRAIN, CRUDE, TEXT, write_mix
from multimodal import encoder as multimodal
from PIL import Image
from tar_builder import write_tar, write_texts

from energon_bridge import (
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    ErrorPolicy,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.errors import DecodeError, StorageError
from energon_bridge.core.format.dataset import read_prepared
from energon_bridge.core.format.dataset_config import DatasetConfigs
from energon_bridge.core.prepare import parse_patterns, prepare_dataset, rebuild_index
from energon_bridge.core.storage import open_store
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.families.sound import sound_of
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.check.lint import lint_encoded, makes_packs
from energon_bridge.tools.check.media import MediaFilter
from energon_bridge.tools.check.quarantine import read_quarantine
from energon_bridge.tools.columns.making import add_column, content_hash
from energon_bridge.tools.testing import write_shard


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


PICTURE = png()


def lint(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = energon("lint", *arguments, "--json", "--no-progress")
    return result.exit_code, json.loads(result.stdout)


class RefusesFive(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Fails for `text 5`."""

    def encode_sample(self, sample: Any) -> Any:
        if sample.text == "text 5":
            raise ValueError("five")
        return sample


class PacksAll(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Makes packs, and batches of nothing else."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return TextSample(__key__=samples[0].__key__, text=f"{len(samples)} packed")

    def batch(self, samples: list[Any]) -> Any:
        assert all(sample.text.endswith("packed") for sample in samples)
        return {"packed": [sample.text for sample in samples]}


class Packs(PacksAll, RefusesFive):
    pass


def cook(sample: CrudeSample) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Cooks(RefusesFive):
    cookers: ClassVar = [Cooker(cook)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return text_dataset(tmp_path / "data", train=[4, 5], val=[3])


def break_text(tar: Path, key: str) -> None:
    whole = tar.read_bytes()
    place = whole.index(b"text", whole.index(key.encode()))
    tar.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])


def crude(root: Path) -> Path:
    write_tar(root / "s.tar", [(f"{n}.json", json.dumps({"text": f"text {n}"}).encode()) for n in range(8)])
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=CRUDE)
    return root


def jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": f"text {n % 7}"}) + "\n" for n in range(8)))
    return path


def test_every_split_and_its_json(data: Path) -> None:
    assert lint(data) == (0, {"ok": True, "checked": 12, "samples": 12, "empty": [], "warnings": [], "problems": []})
    break_text(data / "val/shard_000.tar", "00001")
    code, report = lint(data, "--parallel", 2)
    (problem,) = report["problems"]
    assert (code, report["ok"], report["checked"]) == (1, False, 12)
    assert (problem["split_part"], problem["shard"], problem["key"], problem["part"]) == (
        "val",
        "val/shard_000.tar",
        "00001",
        "txt",
    )
    assert lint(data, "--split-parts", "train")[0] == 0
    remedy = (
        "Repair the sample in its source, and convert (--overwrite) or prepare again; to leave it out, add it as "
        "SHARD/KEY to `exclude` of split.yaml."
    )
    assert remedy in problem["remedy"]
    assert f"1 problem: {remedy}\nFailed: 1 problem in 12 samples.\n" in energon("lint", data).output


ASKED: dict[str, tuple[str, dict[str, str], list[dict[str, Any]]]] = {
    "choices": (
        "MultiChoiceVQASample",
        {"image": "png", "context": "json[q]", "choices": "json[c]", "correct_choice_idx": "json[a]"},
        [
            {"q": "Which?", "c": ["one", "two"], "a": 1},
            {"q": "Which?", "c": ["one", "two"], "a": 99},
            {"q": "Which?", "c": ["one", "two"], "a": -1},
            {"q": "Which?", "c": ["one", "two"], "a": "1"},
            {"q": "Which?", "c": ["one", "two"], "a": None},
            {"q": "Which?", "c": None, "a": 0},
            {"q": "Which?", "c": [], "a": 0},
            {"q": "Which?", "c": "one, two", "a": 0},
            {"q": "Which?", "c": ["two", "three"], "a": 0},
        ],
    ),
    "answers": (
        "VQASample",
        {"image": "png", "context": "json[q]", "answers": "json[a]"},
        [{"q": "Which?", "a": ["one"]}, {"q": "Which?", "a": None}, {"q": "Which?", "a": []}, {"q": ["1?"], "a": []}],
    ),
    "classes": (
        "ImageClassificationSample",
        {"image": "png", "label": "json[n]", "label_name": "json[name]"},
        [{"n": 1, "name": None}, {"n": None, "name": "a"}, {"n": None, "name": None}],
    ),
}


@pytest.mark.parametrize("kind", ASKED)
def test_what_training_skips_of_typed_samples_is_named(tmp_path: Path, kind: str) -> None:
    name, fields, contents = ASKED[kind]
    root, mine = tmp_path / "data", f"{__name__}:DefaultTaskEncoder"
    made = [(f"{n}.{part}", data) for n, one in enumerate(contents) for part, data in (("json", one), ("png", PICTURE))]
    files = [(file, data if isinstance(data, bytes) else json.dumps(data).encode()) for file, data in made]
    write_tar(root / "s.tar", files)
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=render_dataset_yaml(name, fields))
    log = tmp_path / "skipped.jsonl"
    spec = get_val_dataset(
        root,
        split_part="train",
        batch_size=1,
        task_encoder=multimodal(64),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        error_policy=ErrorPolicy(tolerance=0, quarantine=log),
    )
    with closing(get_savable_loader(spec)) as loader:
        for _ in loader:
            pass
    names = {one.key: f"sample {one.key!r}: " for one in read_quarantine(log)}
    skipped = {one.key: f"{one.error}: {one.message.removeprefix(names[one.key])}" for one in read_quarantine(log)}
    code, report = lint(root)
    assert (code, {one["key"]: one["message"] for one in report["problems"]}) == (1, skipped)
    assert 0 < len(skipped) < len(contents)
    assert all(one["message"].startswith("SampleError: ") for one in report["problems"])
    assert lint(root, "--encoder", mine)[1]["problems"] == []  # which takes anything


def test_tasks_share_the_shards_out(tmp_path: Path) -> None:
    data = text_dataset(tmp_path / "data", train=[4, 5, 6, 7], val=[3])
    break_text(data / "train/shard_001.tar", "00007")
    checked = [lint(data, "--task", f"{number}/3") for number in range(3)]
    assert [code for code, _ in checked] == [0, 1, 0]
    assert [report["checked"] for _, report in checked] == [4 + 7 + 3, 5, 6]
    assert [report["samples"] for _, report in checked] == [14, 5, 6]
    refusal_of("lint", data, "--task", "0/3", "--duplicates")


def test_a_mix_is_linted_with_all_its_datasets(data: Path, tmp_path: Path) -> None:
    """Those that several splits read are checked once."""
    other, mix = text_dataset(tmp_path / "other", train=[6], val=[2]), tmp_path / "mix.yaml"
    lines = jsonl(tmp_path / "lines.jsonl")
    twice = [{"path": "data", "weight": 2}, {"path": "other"}, {"path": "lines.jsonl"}, {"path": "data", "weight": 1}]
    write_mix(mix, train={"blend": twice}, val={"path": "data", "split_part": "val"})
    assert lint(mix) == (0, {"ok": True, "checked": 26, "samples": 26, "empty": [], "warnings": [], "problems": []})
    break_text(other / "train/shard_000.tar", "00003")
    lines.write_text(lines.read_text().replace('{"text": "text 2"}', '{"text": "text 2"!'))
    code, report = lint(mix)
    assert code == 1
    assert [(one["dataset"], one["key"]) for one in report["problems"]] == [(str(other), "00003"), (str(lines), "2")]
    assert lint(mix, "--split-parts", "val")[0] == 0
    refusal_of("lint", mix, "--split-config", "x.yaml")


def test_auxiliary_stores_are_looked_at(tmp_path: Path) -> None:
    """Each once, of any kind, also those of joins; info counts the shards that are missing."""
    mix = crude_mix(tmp_path)
    jsonl(tmp_path / "lines.jsonl")
    plain = {"path": "talk", "split_part": "train"}
    talk = plain | {"aux": {"blobs": "blobs", "notes": {"fs_path": "notes"}, "lines": "lines.jsonl"}}
    joiner = {"__module__": "megatron.energon", "__class__": "TextSample"}
    write_mix(mix, train=talk, val={"join": {"one": talk, "two": plain}, "joiner": joiner})
    code, report = lint(mix)
    said = f"energon lint decodes one: {tmp_path / 'blobs'}, {tmp_path / 'lines.jsonl'}"
    assert (code, sum(said in one for one in report["warnings"])) == (0, 1)
    whole = (tmp_path / "blobs/shard_000.tar").read_bytes()
    (tmp_path / "blobs/shard_000.tar").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "blobs/shard_001.tar").unlink()
    for parts in (["--split-parts", "val"], []):
        code, report = lint(mix, *parts)
        assert (code, [(one["shard"], *one["message"].split(": ")[:2]) for one in report["problems"]]) == (
            1,
            [
                ("shard_000.tar", "auxiliary store 'blobs'", "CorruptShardError"),
                ("shard_001.tar", "auxiliary store 'blobs'", "ShardMissingError"),
            ],
        )
        assert all(one["remedy"].startswith("Restore what the store lacks") for one in report["problems"])
    (tmp_path / "notes").rename(tmp_path / "elsewhere")
    assert "auxiliary store 'notes'" in refusal_of("lint", mix)
    write_mix(mix, train={"path": "talk", "aux": {"blobs": "blobs"}})
    assert [one["missing_shards"] for one in answer("info", mix)["datasets"]] == [[], ["shard_001.tar"]]


def test_joins_that_do_not_match_are_named(tmp_path: Path) -> None:
    for name, counts in (("data", [4, 5]), ("fewer", [7])):
        rebuild_index(text_dataset(tmp_path / name, train=counts))  # with a key index
    mix = tmp_path / "mix.yaml"
    joiner = {"__module__": "megatron.energon", "__class__": "TextSample"}
    both = {"one": {"path": "data"}, "two": {"path": "fewer", "nonmatch": "error"}}
    write_mix(mix, train={"join": both, "joiner": joiner})
    code, report = lint(mix)
    (problem,) = report["problems"]
    assert (code, report["checked"], problem["split_part"]) == (1, 16, "train")
    assert "UnmatchedKeyError" in problem["message"]
    assert "00007" in problem["message"]
    assert not (tmp_path / "mix.yaml.cache").exists()
    mix.write_text(mix.read_text().replace("nonmatch: error", "nonmatch: skip"))
    assert lint(mix)[0] == 0


@pytest.mark.parametrize("kind", ["texts", "crude", "jsonl", "mix"])
def test_through_a_task_encoder(data: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {"texts": data, "crude": tmp_path / "crude", "jsonl": tmp_path / "x.jsonl", "mix": tmp_path / "m.yaml"}[kind]
    if kind == "crude":
        crude(path)
    elif kind == "jsonl":
        jsonl(path)
    elif kind == "mix":
        write_mix(path, train={"path": "data"}, val={"path": "data", "split_part": "val"})
    encoder = "RefusesFive" if kind in ("texts", "mix") else "Cooks"
    assert lint(path)[0] == 0
    code, report = lint(path, "--encoder", f"test_lint_kinds:{encoder}")
    (problem,) = report["problems"]
    assert (code, problem["key"]) == (1, {"texts": "00005", "mix": "00005", "crude": "5", "jsonl": "5"}[kind])
    assert problem["message"].startswith("encode_sample: ValueError: five")
    shown = energon("lint", path, "--encoder", f"test_lint_kinds:{encoder}", "--no-progress")
    assert f"test_lint_kinds:{encoder} encodes" in shown.output
    assert shown.exit_code == 1
    monkeypatch.chdir(tmp_path)
    assert energon("lint", path.name, "--encoder", f"test_lint_kinds:{encoder}", "--no-progress").output == shown.output


@pytest.mark.parametrize("processes", [1, 2])
def test_an_encoder_of_own_packs_is_tried_up_to_them(data: Path, processes: int) -> None:
    """Its `batch` takes packs alone, so no sample fails in it that is good; that it was not tried, is said."""
    code, report = lint(data, "--encoder", "test_lint_kinds:Packs", "--parallel", processes)
    assert (code, [one["key"] for one in report["problems"]]) == (1, ["00005"])
    (warning,) = report["warnings"]
    asked, command = warning.split(" To make some: energon ")
    assert asked == "Packs and batches of test_lint_kinds:Packs were not tried, only its samples."
    assert "9 packed" in output_of(*command.replace("Packs ", "PacksAll ").split())
    assert not makes_packs(multimodal())


def test_failures_that_find_no_room_are_not_passed_over(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("energon_bridge.core.stream.failures.write_reports", full)
    with pytest.raises(StorageError, match=r"the names of 1 samples .* set TMPDIR"):
        lint_encoded(str(data), "train", RefusesFive())


def test_equal_samples_are_named_both(tmp_path: Path) -> None:
    """By computed hashes, and by the column; shards that came after the column was made count, too."""
    shards = {"s_0": ["x", "y", "x"], "s_1": ["z", "y"]}
    root = tmp_path / "data"
    for shard, texts in shards.items():
        write_tar(root / f"{shard}.tar", [(f"{shard}-{n}.txt", text.encode()) for n, text in enumerate(texts)])
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=TEXT)
    expected = [
        ("s_0.tar", "s_0-2", f"has the content of key 's_0-0' in {root}/s_0.tar"),
        ("s_1.tar", "s_1-1", f"has the content of key 's_0-1' in {root}/s_0.tar"),
    ]
    assert lint(root)[0] == 0
    for prepare in (lambda: None, lambda: energon("columns", "add", root, "--hash", "--num-workers", 1)):
        prepare()
        code, report = lint(root, "--duplicates")
        assert code == 1
        assert [(one["shard"], one["key"], one["message"]) for one in report["problems"]] == expected
    assert "4 samples in 2 groups" in energon("columns", "duplicates", root).output
    write_tar(root / "s_2.tar", [("new.txt", b"z")])
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=TEXT)
    report = lint(root, "--duplicates", "--parallel", 2)[1]
    assert [one["key"] for one in report["problems"]] == ["s_0-2", "s_1-1", "new"]
    split = root / ".nv-meta/split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude: ['s_0.tar/s_0-0', 's_0.tar/s_0-1']"))
    assert [one["key"] for one in lint(root, "--duplicates")[1]["problems"]] == ["new"]


def test_equal_samples_of_jsonl_and_across_datasets(tmp_path: Path) -> None:
    lines, mix = jsonl(tmp_path / "x.jsonl"), tmp_path / "mix.yaml"
    assert [one["key"] for one in lint(lines, "--duplicates")[1]["problems"]] == ["7"]
    for name in ("a", "b"):
        text_dataset(tmp_path / name, train=[2])
    write_mix(mix, train={"blend": [{"path": name, "weight": 1} for name in "ab"]})
    code, report = lint(mix, "--duplicates")
    assert code == 1
    assert [(one["dataset"], one["key"]) for one in report["problems"]] == [
        (str(tmp_path / "b"), "00000"),
        (str(tmp_path / "b"), "00001"),
    ]
    assert f"in {tmp_path}/a/train/shard_000.tar" in report["problems"][0]["message"]


def rows_with_ids(folder: Path) -> list[dict[str, Any]]:
    """Write pictures; return rows with an id each, of which the last two repeat content of the first two."""
    colours = ["red", "green", "blue", "red", "green"]
    texts = ["a", "b", "c", "a", "other"]
    (folder / "media").mkdir()
    for number, colour in enumerate(colours):
        Image.new("RGB", (9, 9), colour).save(folder / f"media/{number}.png")
    return [
        {"id": f"row-{n}", "image": f"media/{n}.png", "url": f"http://there/{n}", "caption": text, "score": 3}
        for n, text in enumerate(texts)
    ]


def as_talk(row: dict[str, Any]) -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": row["caption"]}]
    return {"id": row["id"], "image": row["image"], "conversations": turns, "time": row["id"]}


@pytest.mark.parametrize("kind", ["captions", "talks", "table"])
def test_duplicates_of_converted_tables_are_found(tmp_path: Path, kind: str) -> None:
    """Ids, URLs and names of files differ in each row; of the two images that come again, one has another caption."""
    rows = [as_talk(row) if kind == "talks" else row for row in rows_with_ids(tmp_path)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "table":
        source = tmp_path / "rows.parquet"
        media = [{"bytes": (tmp_path / row["image"]).read_bytes(), "path": None} for row in rows]
        columns = {name: [row[name] for row in rows] for name in ("id", "caption", "url")}
        pq.write_table(pa.table({**columns, "image": media}), source)
    root = tmp_path / "out"
    output_of("convert", source, root, "--split-ratio", "1,0,0")
    for checked in (root, source) if kind == "table" else (root,):
        code, report = lint(checked, "--duplicates")
        assert [one["key"] for one in report["problems"]] == ["000000003"]
        assert "has the content of key '000000000'" in report["problems"][0]["message"]
        assert code == 1
    assert "1 duplicate. Compared: media" in refusal_of("lint", root, "--duplicates", "--no-progress")
    assert "Compared: media" in output_of("columns", "add", root, "--hash")
    assert "2 samples in 1 group of equal ones" in output_of("columns", "duplicates", root)


def pictured(folder: Path, parts: dict[str, list[tuple[str, str, str]]]) -> Path:
    """Write a dataset of split parts, whose samples are given as key, colour of the picture and caption."""
    for part, samples in parts.items():
        (folder / part).mkdir(parents=True)
        written = {}
        for key, colour, caption in samples:
            file = io.BytesIO()
            Image.new("RGB", (9, 9), colour).save(file, "png")
            written[key] = {"png": file.getvalue(), "txt": caption.encode()}
        write_shard(folder / part / "s.tar", written)
    rule = parse_patterns([f"{part}:{part}/.*" for part in parts])
    yaml = render_dataset_yaml("CaptioningSample", {"image": "png", "caption": "txt"})
    prepare_dataset(folder, split=rule, dataset_yaml=yaml)
    return folder


@pytest.mark.parametrize("columns", [False, True])
def test_media_of_two_split_parts_are_named_first_whatever_is_beside_them(tmp_path: Path, columns: bool) -> None:
    train = [("a", "red", "one"), ("b", "red", "two"), ("c", "blue", "x"), ("d", "blue", "x"), ("e", "tan", "y")]
    val = [("k", "red", "three"), ("l", "tan", "y"), ("m", "green", "one")]
    root = pictured(tmp_path / "data", {"train": train, "val": val})
    if columns:
        assert "media_hash" in output_of("columns", "add", root, "--hash", "--num-workers", 1)
    code, report = lint(root, "--duplicates")
    found = [(one["split_part"], one["key"], one["message"]) for one in report["problems"]]
    there = f"in {root}/train/s.tar"
    assert found == [
        ("val", "l", f"has the content of key 'e' {there}, of the split part 'train'"),
        ("val", "k", f"has the media of key 'a' {there}, of the split part 'train'"),
        ("train", "d", f"has the content of key 'c' {there}"),
    ]
    assert code == 1
    assert report["warnings"] == [
        "1 sample with the media of an earlier one of the same split part, and another text or JSON."
    ]
    assert "3 duplicates, 2 of them of another split part." in refusal_of("lint", root, "--duplicates", "--no-progress")
    split = root / ".nv-meta/split.yaml"
    gone = "exclude: ['val/s.tar/l', 'val/s.tar/k', 'train/s.tar/d', 'train/s.tar/b']"
    split.write_text(split.read_text().replace("exclude: []", gone))
    code, report = lint(root, "--duplicates")
    assert (code, report["samples"], report["problems"], report["warnings"]) == (0, 4, [], [])


def test_that_there_are_no_duplicates_is_said(tmp_path: Path) -> None:
    root = text_dataset(tmp_path / "data", train=[4, 5])
    assert "No duplicates. Compared: media" in output_of("lint", root, "--duplicates", "--no-progress")


def test_samples_of_ids_alone_are_compared_by_them(tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(json.dumps({"id": n % 3}) + "\n" for n in range(4)))
    assert [one["key"] for one in lint(lines, "--duplicates")[1]["problems"]] == ["3"]


def test_a_column_that_compared_ids_is_made_again(tmp_path: Path) -> None:
    root = text_dataset(tmp_path / "data", train=[3])
    add_column(root, "hash", content_hash, made_of="hash of the content", raw=True)
    assert "columns add" in refusal_of("columns", "duplicates", root)
    output_of("columns", "add", root, "--hash")
    assert "No duplicates." in output_of("columns", "duplicates", root)


# --- the split file -----------------------------------------------------------------------------------------------

WRONG_EXCLUDES = {
    "00002": "names no shard. Write a shard, 'train/shard_000.tar', or one of its samples, 'train/shard_000.tar/00002'",
    "00002.jpg": "names no shard",
    "train/shard_0000.tar": "has no shard 'train/shard_0000.tar'. Did you mean 'train/shard_000.tar'?",
    "train/shard_0000.tar/00002": "has no shard 'train/shard_0000.tar'. Did you mean 'train/shard_000.tar'?",
    "train/shard_000.tar/99999": "",
}


@pytest.mark.parametrize("entry", WRONG_EXCLUDES)
def test_an_exclude_that_leaves_nothing_out_is_an_error_of_info_and_lint_and_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, entry: str
) -> None:
    data = write_texts(tmp_path / "data", {"train/shard_000.tar": ["1", "2"], "val/shard_000.tar": ["3"]})
    rule = parse_patterns(["train:train", "val:val"])
    prepare_dataset(data, split=rule, dataset_yaml=TEXT)
    split, expected = data / ".nv-meta/split.yaml", WRONG_EXCLUDES[entry]
    split.write_text(split.read_text().replace("exclude: []", f"exclude: ['{entry}', 'val/shard_000.tar/3']"))
    summary = answer("info", data)
    assert f"split.yaml, field `exclude`: '{entry}'" in summary["wrong"][0]
    assert expected in summary["wrong"][0]
    assert [part["num_excluded_samples"] for part in summary["parts"]] == [0, 1]
    assert "WRONG: " in energon("info", data).output
    write_mix(tmp_path / "mix.yaml", train={"path": "data"})
    for path in (data, tmp_path / "mix.yaml"):
        code, report = lint(path)
        assert (code, len(report["problems"])) == (1, 1)
        assert (expected or "lists the sample '99999', which is not there") in report["problems"][0]["message"]
    caplog.clear()
    data = data.rename(tmp_path / "again")  # each file is named once
    for part in ("train", "val"):
        get_train_dataset(data, split_part=part, batch_size=1, worker_config=WorkerConfig(num_workers=0))
    assert [expected in message for message in caplog.messages] == [True] * bool(expected)


def test_shards_in_two_parts_or_none_are_warned_of(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert lint(data)[1]["warnings"] == []
    split = "split_parts: {train: [train/shard_000.tar, val/shard_000.tar], val: [val/shard_000.tar], old: []}"
    (data / ".nv-meta/split.yaml").write_text(split)
    code, report = lint(data)
    assert code == 0
    for warnings in (report["warnings"], answer("info", data)["warnings"]):
        assert len(warnings) == 2
        assert "split.yaml: 1 of the shards of `train` are in `val`, too" in warnings[0]
        assert "1 of 3 shards are in no split part, so nothing reads them; the first is 'train/shard_001" in warnings[1]
    assert "WARNING: " in energon("info", data).output
    caplog.clear()
    write_mix(tmp_path / "mix.yaml", train={"path": str(data)})
    assert lint(tmp_path / "mix.yaml")[1]["warnings"] == report["warnings"]
    assert caplog.messages == []  # they are findings
    get_train_dataset(data, batch_size=1, worker_config=WorkerConfig(num_workers=0))
    assert caplog.messages == report["warnings"]


def test_empty_texts_are_counted(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "data/s.tar", [("a.txt", b"text"), ("b.txt", b" \n"), ("c.txt", b"")])
    for kind, fields in (("TextSample", {"text": "txt"}), ("CrudeWebdataset", None)):
        prepare_dataset(tmp_path / "data", split=ALL_TRAIN, dataset_yaml=render_dataset_yaml(kind, fields))
        code, report = lint(tar.parent)
        assert code == 0
        (warning,) = report["warnings"]
        assert warning.startswith(f"{tar.parent}, train: 2 samples with an empty text: s.tar/b, s.tar/c. Training ")


def test_turned_images_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def turned(form: str, orientation: int, **settings: Any) -> bytes:
        image, file = Image.new("RGB", (8, 8)), io.BytesIO()
        exif = image.getexif()
        exif[0x112] = orientation
        image.save(file, form, **settings or {"exif": exif})
        return file.getvalue()

    files = {"0.jpg": turned("JPEG", 1), "1.jpg": turned("JPEG", 6), "2.jpg": turned("JPEG", 3)}
    files["3.jpg"] = turned("JPEG", 1, xmp=b'<x tiff:Orientation="6"/>')
    files |= {"4.webp": turned("WEBP", 6), "5.png": turned("PNG", 8), "6.png": turned("PNG", 1), "7.png": b"eXIf"}
    files["8.tiff"] = turned("TIFF", 6)  # which Pillow turns
    fields = render_dataset_yaml("ImageSample", {"image": "jpg,webp,png,tiff"})
    tar = write_tar(tmp_path / "data/s.tar", list(files.items()))
    prepare_dataset(tmp_path / "data", split=ALL_TRAIN, dataset_yaml=fields)
    _, report = lint(tar.parent)
    (warning,) = report["warnings"]
    named = ", ".join(f"s.tar/{number}" for number in range(1, 6))
    assert warning.startswith(f"{tar.parent}, train: 5 samples with an image that its EXIF or XMP turns: {named}. T")
    assert caplog.messages == []  # which would refer to lint


def test_a_picture_far_larger_than_others_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By lint and convert, if training warns of it in a batch of two; and of many samples the first ten."""
    for side, is_large in ((3300, False), (3400, True)):
        folder = tmp_path / str(side)
        folder.mkdir()
        for number in range(12):
            size = (side, side) if number == 7 else (64, 48)
            Image.new("RGB", size, "red").save(folder / f"{number:02d}.jpg")
            (folder / f"{number:02d}.txt").write_text(" ")
        out = folder / "out"
        told = output_of("convert", folder, out, "--split-ratio", "1,0,0", "--no-progress")
        assert ("1 sample with a picture far larger than others of its shard. A batch that" in told) == is_large
        assert ("\n  07.jpg (3400 x 3400)\n" in told) == is_large
        code, report = lint(out)
        assert code == 0
        blank, *large = report["warnings"]
        ten = ", ".join(f"train/00000.tar/{number:02d}" for number in range(10))
        assert f"12 samples with an empty text: {ten} and 2 more. " in blank
        said = "train: 1 sample with a picture far larger than others of its shard: train/00000.tar/07 (3400 x 3400). A"
        assert [one.startswith(f"{out}, {said}") for one in large] == [True] * is_large
        caplog.clear()
        config = WorkerConfig(num_workers=0)
        with closing(
            get_savable_loader(get_val_dataset(out, split_part="train", batch_size=2, worker_config=config))
        ) as loader:
            assert sum(len(batch.image) for batch in loader) == 12
        assert ["padded to it" in message for message in caplog.messages] == [True] * is_large


def test_a_picture_that_training_refuses_to_decode_is_named_by_convert(tmp_path: Path) -> None:
    """The one that lint finds, and not again as one that is only larger than others."""
    for name, size in (("above", (14000, 10000)), ("a", (64, 48)), ("b", (9, 9))):
        Image.new("1", size).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a wall")
    flags = ("--split-ratio", "1,0,0", "--no-progress")
    told = output_of("convert", tmp_path, tmp_path / "out", *flags)
    assert "1 sample with a picture of more than 89,478,485 pixels, which training refuses to decode. " in told
    assert "energon convert --max-pixels 89478485 --overwrite" in told
    assert told.count("above.png (14000 x 10000)") == 1
    assert "far larger" not in told
    code, report = lint(tmp_path / "out")
    assert (code, [problem["key"] for problem in report["problems"]]) == (1, ["above"])
    told = output_of("convert", tmp_path, tmp_path / "out", *flags, "--overwrite", "--max-pixels", "1000000")
    assert "refuses to decode" not in told
    assert lint(tmp_path / "out")[0] == 0


@pytest.mark.parametrize("model", ["tiny-llava", "mine:encoder", "run.yaml"])
def test_what_is_no_model_is_told_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("run.yaml").write_text("model:\n  preset: tiny-llava\n")
    write_tar(tmp_path / "data/s.tar", [("a.txt", b"text")])
    prepare_dataset(tmp_path / "data", split=ALL_TRAIN, dataset_yaml=TEXT)
    for command in (("lint",), ("preview",), ("columns", "add")):
        said = refusal_of(*command, tmp_path / "data", "--processor", model)
        assert f"--processor {model!r}: expected the folder of a model, or its name on the hub, such as Qwen/" in said
        assert "Of a preset, that is RUN/model of a run; MODULE:NAME is for --encoder, and a configuration" in said


def test_sounds_that_cannot_be_opened_are_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = write_tar(tmp_path / "data/s.tar", [(f"{number}.wav", b"RIFF") for number in range(3)])
    prepare_dataset(tmp_path / "data", split=ALL_TRAIN, dataset_yaml=CRUDE)
    monkeypatch.setattr("energon_bridge.tools.check.lint.find_spec", lambda name: None)  # PyAV is not there
    code, report = lint(tar.parent)
    assert code == 0
    (warning,) = report["warnings"]
    said = "train: 3 samples with a video or sound, not opened: s.tar/0, s.tar/1, s.tar/2. To check them: pip install"
    assert warning.startswith(f"{tar.parent}, {said}")


def sounds_of(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def says_odd_sounds(folder: Path) -> bool:
    """Whether lint names the sounds of samples 1, 2 and 4: silent, cancelled and far too loud."""
    code, report = lint(folder)
    found = [warning.partition("train: ")[2].partition(". ")[0] for warning in report["warnings"]]
    return (code, report["problems"], found) == (
        0,
        [],
        [
            "1 sample with a sound in which nothing is heard: s.tar/1",
            "1 sample with a sound whose channels cancel each other: s.tar/2",
            "1 sample with a sound whose samples lie beyond [-1, 1]: s.tar/4",
        ],
    )


def test_sounds_that_a_model_hears_nothing_of_are_counted(tmp_path: Path) -> None:
    wave = np.sin(np.arange(8000) / 5)[:, None] * 0.5
    files = {
        "0.wav": sounds_of(wave),
        "1.wav": sounds_of(0 * wave),
        "2.wav": sounds_of(wave * [1, -1]),
        "3.wav": sounds_of(wave * [1, 0]),
        "4.wav": sounds_of(wave * 30000),
    }
    write_tar(tmp_path / "data/s.tar", list(files.items()))
    prepare_dataset(tmp_path / "data", split=ALL_TRAIN, dataset_yaml=CRUDE)
    assert says_odd_sounds(tmp_path / "data")


def video_with_sound(samples: np.ndarray) -> bytes:
    """Return a video of a second whose sound has these samples (count, channels), floats at 16 kHz."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        shown = file.add_stream("mpeg4", rate=8)
        shown.width, shown.height, shown.pix_fmt = (16, 16, "yuv420p")
        layout = "mono" if samples.shape[1] == 1 else "stereo"
        heard = file.add_stream("pcm_f32le", rate=16000, layout=layout)
        for _ in range(8):
            file.mux(shown.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        sound = np.ascontiguousarray(samples.astype("f4")).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(sound, format="flt", layout=layout)
        frame.sample_rate = 16000
        for stream, last in ((heard, frame), (heard, None), (shown, None)):
            file.mux(stream.encode(last))
    return out.getvalue()


def test_the_sounds_of_videos_are_looked_at_too(tmp_path: Path) -> None:
    wave = np.sin(np.arange(16000) / 5)[:, None] * 0.5
    sounds = (wave, 0 * wave, wave * [1, -1], wave * [1, 0], wave * 30000)
    files = [(f"{number}.mkv", video_with_sound(samples)) for number, samples in enumerate(sounds)]
    write_tar(tmp_path / "data/s.tar", files)
    prepare_dataset(tmp_path / "data", split=ALL_TRAIN, dataset_yaml=CRUDE)
    assert says_odd_sounds(tmp_path / "data")


def test_videos_are_opened_as_in_training_and_their_sounds_to_the_end(tmp_path: Path) -> None:
    """FLV has no index: its length is that of its last packets. An MPEG-2 stream was joined to itself."""
    good = write_video(tmp_path / "good.flv", frames=40).read_bytes()
    joined = 2 * write_video(tmp_path / "a.m2ts", codec="mpeg2video", sound="mp2", frames=50).read_bytes()
    files = {"0.flv": good, "1.flv": good[: len(good) * 2 // 3], "2.m2ts": joined}
    write_tar(tmp_path / "data/s.tar", list(files.items()))
    prepare_dataset(tmp_path / "data", split=ALL_TRAIN, dataset_yaml=CRUDE)
    code, report = lint(tmp_path / "data")
    assert code == 1
    said = {problem["key"]: problem["message"] for problem in report["problems"]}
    assert said.keys() == {"1", "2"}
    assert "is cut off" in said["1"]
    assert "of sound, but its headers tell" in said["2"]
    with pytest.raises(DecodeError):
        AVDecoder(files["1.flv"]).get_video()
    with pytest.raises(DecodeError):
        sound_of(files["2.m2ts"], rate=16000).get()


# --- info ---------------------------------------------------------------------------------------------------------


def test_info_knows_parts_media_columns_and_tars_that_came_later(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name, size in (("a", (40, 30)), ("b", (64, 20))):
        file = io.BytesIO()
        Image.new("RGB", size).save(file, "PNG")
        write_tar(root / f"{name}.tar", [(f"{name}.png", file.getvalue()), (f"{name}.txt", b"text!")])
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=CRUDE, media=MediaFilter(strategy="EXTENSION"))
    output_of("columns", "add", root, "--image-size", "--num-workers", 1)
    write_tar(root / "later.tar", [("c.txt", b"")])
    found = answer("info", root)
    assert (found["num_samples"], found["new_shards"], found["missing_shards"]) == (2, ["later.tar"], [])
    assert found["part_types"]["txt"] == {"count": 2, "num_bytes": 10}
    assert found["part_types"]["png"]["count"] == 2
    assert found["media"] == {"image": {"count": 2, "ranges": {"width": [40, 64], "height": [20, 30]}, "hours": {}}}
    assert found["columns"]["width"] == {
        "made_of": "width and height of the content", "samples": 2, "least": 40, "mean": 52, "most": 64
    }  # fmt: skip
    shown = energon("info", root).output
    for line in (
        "part:         txt, 2 of 10 B",
        "media:        image, 2 files, width 40 to 64, height 20 to 30",
        "column:       width, width and height of the content, 40 to 64, mean 52",
        "NOT PREPARED: later.tar",
    ):
        assert line in shown
    (root / ".nv-meta/index.sqlite").write_bytes(b"no index")
    assert answer("info", root)["part_types"]["png"] == {"count": None, "num_bytes": None}


def test_what_the_split_file_excludes_is_left_out_by_all(tmp_path: Path) -> None:
    """A tar that nobody prepared, one that was, and a sample: training says nothing of them, and has what lint has."""
    root = tmp_path / "data"
    for name in ("a", "b", "c", "later"):
        write_tar(root / f"{name}.tar", [(f"{name}{number}.txt", b"text") for number in range(3)])
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=TEXT, exclude="later")
    split = root / ".nv-meta/split.yaml"
    excluded = ["later.tar", "b.tar", "a.tar/a1"]
    split.write_text(json.dumps({"split_parts": {"train": ["a.tar", "b.tar", "c.tar"]}, "exclude": excluded}))
    found = answer("info", root)
    assert (found["new_shards"], found["wrong"], found["warnings"]) == ([], [], [])
    nothing = {"warnings": [], "problems": [], "empty": []}
    assert lint(root)[1] == {**nothing, "ok": True, "checked": 5, "samples": 5}
    warnings: list[str] = []
    dataset, _ = open_split(root, warnings.append)
    assert (dataset.num_samples - len(dataset.excluded), warnings) == (5, [])
    split.write_text(split.read_text().replace("later.tar", "latter.tar"))
    assert "'latter.tar' leaves nothing out" in lint(root)[1]["problems"][0]["message"]
    assert answer("info", root)["new_shards"] == ["later.tar"]


def open_split(root: Path, warn: Any) -> Any:
    configs = DatasetConfigs(trust_remote_code=False)
    names = {"split_part": "train", "dataset_config": "dataset.yaml", "split_config": "split.yaml"}
    return read_prepared(open_store(root), configs, **names, warn=warn)


def test_bad_samples_are_entries_for_split_yaml(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_tar(root / "s.tar", [("0.json", b"{}"), ("1.json", b"{"), ("2.json", b"["), ("2.png", b"no picture")])
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=CRUDE)
    result = energon("lint", root, "--excludes", "--no-progress")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [f"{root}:", "  - s.tar/1", "  - s.tar/2"]
    result = energon("lint", root, "--excludes", "--json", "--no-progress")
    entries = json.loads(result.stdout)
    assert entries == {str(root): ["s.tar/1", "s.tar/2"]}
    split = root / ".nv-meta/split.yaml"
    split.write_text(json.dumps({"split_parts": {"train": ["s.tar"]}, "exclude": entries[str(root)]}))
    assert lint(root)[0] == 0


def test_info_of_jsonl_and_mixes(data: Path, tmp_path: Path) -> None:
    lines, mix = jsonl(tmp_path / "x.jsonl"), tmp_path / "mix.yaml"
    assert answer("info", lines)["num_samples"] == 8
    blend = [{"path": "data", "weight": 3}, {"path": "x.jsonl", "weight": 1}]
    write_mix(mix, train={"blend": blend}, val={"path": "data", "split_part": "val"})
    found = answer("info", mix)
    train = {"path": str(data), "split_part": "train", "mixed": "weight 0.75", "num_samples": 9, "in_mix": 9}
    assert found["splits"]["train"][0] == train
    assert [leaf["num_samples"] for leaf in found["splits"]["train"] + found["splits"]["val"]] == [9, 8, 3]
    assert [one["path"] for one in found["datasets"]] == [str(data), str(lines)]
    output = output_of("info", mix)
    assert "train: 17 samples" in output
    assert "weight 0.75" in output

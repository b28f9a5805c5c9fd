"""Sources that are converted again: keys, shards and what hands wrote stay, or it is refused by name."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import energon, refusal_of
from sources import QUIETLY, StopAtMove, content, convert, converted, llava, members, meta, picture, read, refused

from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.storage import open_store

RATIO = ("--split-ratio", "9,1,0")


def listed(path: Path, start: int, end: int, **beside: str) -> Path:
    """Write a list of the pictures of these numbers, with a caption and a title, and its pictures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "caption", "title", *beside])
        for number in range(start, end):
            if not (image := path.parent / f"{number}.jpg").exists():
                image.write_bytes(picture(number))
            rows.writerow([image.name, f"caption {number}", f"title {number}", *beside.values()])
    return path


def tars(out: Path) -> dict[str, tuple[int, bytes]]:
    """Return the content of each shard, and the number by which the file system knows it."""
    return {path.relative_to(out).as_posix(): (path.stat().st_ino, path.read_bytes()) for path in out.rglob("*.tar")}


def samples(out: Path) -> dict[str, bytes]:
    """Return the picture of each sample by split part and key."""
    found = {}
    for shard in read_info(open_store(out)).shard_counts:
        with tarfile.open(out / shard) as archive:
            for member in archive:
                if member.name.endswith((".jpg", ".png")):
                    key = f"{shard.partition('/')[0]}:{member.name.rpartition('.')[0]}"
                    found[key] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return found


def edit(out: Path, name: str, **changes: Any) -> Any:
    document = meta(out, name) | changes
    (out / ".nv-meta" / name).write_text(f"# by hand\n{yaml.safe_dump(document, sort_keys=False)}")
    return document


# --- what is there stays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [(), ("--shuffle", 3)])
def test_a_list_that_grew_leaves_shards_and_keys(tmp_path: Path, shuffle: tuple[object, ...]) -> None:
    flags = ["--samples-per-shard", 4, *RATIO, *shuffle]
    source, media, _ = llava(tmp_path / "in", 25)
    out = converted(source, tmp_path / "out", *media, *flags)
    before, keys = tars(out), samples(out)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "in/images").rglob("*.*")}
    _, _, pictures = llava(tmp_path / "in", 35)
    for path, stamp in stamps.items():
        os.utime(path, ns=(stamp, stamp))
    for end in (35, 47):
        if end == 47:
            before, keys = tars(out), samples(out)
            stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "in/images").rglob("*.*")}
            _, _, pictures = llava(tmp_path / "in", 47)
            for path, stamp in stamps.items():
                os.utime(path, ns=(stamp, stamp))
        assert f"Unchanged: {len(before)} shards." in convert(source, out, *media, *flags)
        assert before.items() <= tars(out).items()
        assert keys.items() <= samples(out).items()
        assert sorted(samples(out).values()) == sorted(pictures.values())
    whole = content(out)
    assert f"Unchanged: {len(tars(out))} shards." in convert(source, out, *media, *flags)
    assert content(out) == whole
    fresh = converted(source, tmp_path / "fresh", *media, *flags)
    assert samples(out) == samples(fresh)
    convert(source, out, *media, *flags, "--overwrite")
    assert content(out) == content(fresh)


@pytest.mark.parametrize("form", ["list", "tars"])
def test_files_with_another_time_alone_leave_shards(tmp_path: Path, form: str) -> None:
    """As `touch`, a checkout or a copy without times does; content that changed is named with its file."""
    source = listed(tmp_path / "in/list.csv", 0, 13)
    flags: tuple[object, ...] = ("--samples-per-shard", 5, *RATIO)
    if form == "tars":
        source = converted(source, tmp_path / "tars", "--split-ratio", "1,0,0", "--samples-per-shard", 100)
        shutil.rmtree(source / ".nv-meta")
    out = converted(source, tmp_path / "out", *flags)
    before = tars(out)
    for path in source.parent.rglob("*.*"):
        os.utime(path, ns=(1, 1))
    if form == "list":
        listed(source, 0, 20)
    convert(source, out, *flags)
    assert before.items() <= tars(out).items()
    assert len(samples(out)) == (20 if form == "list" else 13)
    whole = content(out)
    assert f"Unchanged: {len(tars(out))} shards." in convert(source, out, *flags)
    assert content(out) == whole
    if form == "list":
        (tmp_path / "in/7.jpg").write_bytes(picture(99))
        message = refused(source, out, *flags)
        assert f"the part 'jpg' of '000000007' has changed ({tmp_path}/in/7.jpg; {source}, row " in message
        (tmp_path / "in/7.jpg").unlink()
        assert f"{tmp_path}/in/7.jpg: cannot read: No such file" in refused(source, out, *flags)
        assert content(out) == whole


def folders(root: Path, counts: dict[str, int]) -> Path:
    for number, (name, count) in enumerate(counts.items()):
        listed(root / name / "metadata.csv", 100 * number, 100 * number + count)
    return root


def lists(root: Path, counts: dict[str, int]) -> Path:
    for number, (name, count) in enumerate(counts.items()):
        listed(root / f"{name}.csv", 100 * number, 100 * number + count)
    return root


@pytest.mark.parametrize("flags", [(), ("--samples-per-shard", 4)])
@pytest.mark.parametrize("write", [folders, lists])
def test_lists_of_splits_may_each_grow(tmp_path: Path, write: Any, flags: tuple[object, ...]) -> None:
    source = write(tmp_path / "in", {"train": 9, "val": 5, "test": 3})
    out = converted(source, tmp_path / "out", *flags)
    assert [name for name in samples(out) if name.startswith("val:")] == [f"val:val/{n:09d}" for n in range(5)]
    before, keys = tars(out), samples(out)
    write(tmp_path / "in", {"train": 14, "val": 6, "test": 3})
    convert(source, out, *flags)
    assert before.items() <= tars(out).items()
    assert keys.items() <= samples(out).items()
    assert samples(out) == samples(converted(source, tmp_path / "fresh"))
    assert samples(out)["val:val/000000005"] == picture(105)


def test_folders_of_no_split_may_each_grow(tmp_path: Path) -> None:
    source = folders(tmp_path / "in", {"a": 12, "b": 11, "c": 3})
    out = converted(source, tmp_path / "out", "--split-ratio", "1,1,0")
    before, keys = tars(out), samples(out)
    folders(tmp_path / "in", {"a": 15, "b": 11, "c": 9, "d": 4})
    convert(source, out, "--split-ratio", "1,1,0")
    assert before.items() <= tars(out).items()
    assert keys.items() <= samples(out).items()
    assert samples(out) == samples(converted(source, tmp_path / "fresh", "--split-ratio", "1,1,0"))
    assert len(samples(out)) == 39


def test_a_folder_of_pictures_grows_at_its_end(tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / f"in/{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture(number))
    out = converted(tmp_path / "in", tmp_path / "out", *RATIO)
    before = tars(out)
    (tmp_path / "in/9.jpg").write_bytes(picture(9))
    converted(tmp_path / "in", out, *RATIO)
    assert before.items() <= tars(out).items()
    whole = content(out)
    (tmp_path / "in/00.jpg").write_bytes(picture(10))
    message = refused(tmp_path / "in", out, *RATIO)
    said = f"begins to differ at the key '1', where '00' is now ({tmp_path}/in/00.jpg)"
    assert f"{out}: train/00000.tar {said}" in message
    assert "Convert into another folder, or --overwrite" in message
    assert content(out) == whole


def test_datasets_of_before_grow_too(tmp_path: Path) -> None:
    """A conversion that did not write down how much it found: its records say it."""
    source = listed(tmp_path / "in/list.csv", 0, 13)
    out = converted(source, tmp_path / "out", *RATIO)
    options = out / ".nv-meta/convert/options.json"
    plain = json.loads(options.read_text())
    assert plain.pop("runs") == [{"": 13}]
    options.write_text(json.dumps(plain))
    before = tars(out)
    listed(source, 0, 20)
    convert(source, out, *RATIO)
    assert before.items() <= tars(out).items()
    assert len(samples(out)) == 20


def test_tasks_make_the_shards_of_what_is_new(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 13)
    flags = ("--samples-per-shard", 3, *RATIO)
    out = converted(source, tmp_path / "out", *flags)
    other = converted(source, tmp_path / "other", *flags)
    listed(source, 0, 30)
    for task in ("0/2", "1/2"):
        convert(source, out, *flags, "--task", task)
    convert(source, out, *flags, "--finish")
    assert content(out) == content(converted(source, other, *flags))


# --- what cannot stay is refused ----------------------------------------------------------------------------------


def shorter(source: Path) -> str:
    listed(source, 0, 12)
    return "list.csv had 13 samples, and has 12."


def in_the_middle(source: Path) -> str:
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join([*lines[:3], lines[2].replace("caption", "another"), *lines[3:]]))
    return f"made of other content: the part 'jpg' of '000000002' has changed ({source.parent}/1.jpg; {source}, row "


def other_words(source: Path) -> str:
    source.write_text(source.read_text().replace("caption 7", "caption seven"))
    return "made of other content: the part 'json' of '000000007' has changed (its row, or how this version writes it"


@pytest.mark.parametrize("change", [shorter, in_the_middle, other_words])
def test_shards_are_not_replaced_in_silence(tmp_path: Path, change: Any) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 13)
    out = converted(source, tmp_path / "out", *RATIO)
    before = content(out)
    said = change(source)
    for flags in ((), ("--task", "0/1"), ("--finish",)):
        message = refused(source, out, *RATIO, *flags)
        if "--finish" in flags and "content" in said:
            first = "; the first is train/00000.tar: " + said.partition("content: ")[2]
            assert f" shards are missing, or were made from another source{first}" in message
            continue
        assert said in message
        assert "Convert into another folder, or --overwrite all." in message
        assert {name: data for name, data in content(out).items() if ".nv-meta.parts" not in name} == before
    convert(source, out, *RATIO, "--overwrite")
    assert content(out) == content(converted(source, tmp_path / "fresh", *RATIO))


def test_a_damaged_shard_is_made_again(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 13)
    out = converted(source, tmp_path / "out", *RATIO)
    before = content(out)
    (out / "train/00000.tar").write_bytes(b"")
    convert(source, out, *RATIO)
    assert content(out) == before


# --- what hands wrote ---------------------------------------------------------------------------------------------


def test_edits_stay_when_a_source_grew(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 13)
    out = converted(source, tmp_path / "out", *RATIO, "--samples-per-shard", 5)
    excluded = ["train/00000.tar/000000001", "train/00001.tar"]
    parts = {"train": ["train/00000.tar", "train/00001.tar"], "mine": ["train/00002.tar", "val/00000.tar"]}
    edit(out, "split.yaml", exclude=excluded, split_parts=parts)
    fields = {"image": "jpg", "caption": "json[title]"}
    edit(out, "dataset.yaml", field_map=fields, subflavors={"of": "me"})
    dataset = (out / ".nv-meta/dataset.yaml").read_bytes()
    listed(source, 0, 23)
    convert(source, out, *RATIO, "--samples-per-shard", 5)
    assert (out / ".nv-meta/dataset.yaml").read_bytes() == dataset
    split = meta(out, "split.yaml")
    assert split["exclude"] == excluded
    assert split["split_parts"]["mine"] == parts["mine"]
    assert split["split_parts"]["train"] == ["train/{00000..00001}.tar", "train/{00003..00004}.tar"]
    assert split["split_parts"]["val"] == ["val/00001.tar"]


def test_fields_that_hands_left_alone_follow_the_source(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 5)
    out = converted(source, tmp_path / "out", "--split-ratio", "1,0,0")
    edit(out, "dataset.yaml", field_map={"image": "jpg", "caption": "json[title]"})
    (tmp_path / "in/5.png").write_bytes(picture(5, "PNG"))
    with source.open("a") as file:
        file.write("5.png,caption 5,title 5\n")
    convert(source, out, "--split-ratio", "1,0,0")
    assert meta(out)["field_map"] == {"image": "jpg,png", "caption": "json[title]"}


def test_excludes_that_name_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 13)
    out = converted(source, tmp_path / "out", *RATIO)
    excluded = ["train/00000.tar/000000001", "train/00000.tar/nobody"]
    edit(out, "split.yaml", exclude=excluded)
    listed(source, 0, 15)
    convert(source, out, *RATIO)
    assert "`exclude` names what the dataset does not have: train/00000.tar/nobody. Take it out." in caplog.text
    assert meta(out, "split.yaml")["exclude"] == excluded
    other_words(source)
    convert(source, out, *RATIO, "--overwrite")
    assert "`exclude` names train/00000.tar/000000001, of shards that were written again" in caplog.text
    assert meta(out, "split.yaml")["exclude"] == excluded
    convert(source, out, *RATIO, "--overwrite", "--shuffle", 1)
    assert "was replaced, and so was its `exclude`: train/00000.tar/000000001, " in caplog.text
    assert meta(out, "split.yaml")["exclude"] == []


# --- the names of files -------------------------------------------------------------------------------------------


def test_samples_keep_the_names_of_their_files(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 7, 10)
    found = members(converted(source, tmp_path / "out", "--split-ratio", "1,0,0"))
    assert [json.loads(found[f"{n:09d}.json"])["files"] for n in range(3)] == [["7.jpg"], ["8.jpg"], ["9.jpg"]]


def test_lint_names_the_file_of_the_source(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 7, 10)
    (tmp_path / "in/8.jpg").write_bytes(picture(8)[:200])
    out = converted(source, tmp_path / "out", "--split-ratio", "1,0,0")
    (line,) = [line for line in refusal_of("lint", out).splitlines() if "000000001" in line]
    assert "key '000000001', part 'jpg' (of 8.jpg): " in line


# --- lists that tell their splits ---------------------------------------------------------------------------------


def shares(out: Path) -> dict[str, list[int]]:
    """Return the numbers of the pictures in each split part."""
    numbers = {picture(number): number for number in range(40)}
    found: dict[str, list[int]] = {}
    for name, data in samples(out).items():
        found.setdefault(name.partition(":")[0], []).append(numbers[data])
    return found


@pytest.mark.parametrize(
    ("name", "column", "part"),
    [
        ("val.csv", {}, "val"),
        ("train.csv", {}, "train"),
        ("list.csv", {"split": "training"}, "train"),
        ("my_test_part.csv", {}, "test"),
        ("Validation-2.csv", {}, "val"),
        ("list.csv", {"split": "dev"}, "val"),
        ("list.csv", {"is_test": "true"}, "test"),
        ("val.csv", {"phase": "Testing"}, "test"),
    ],
)
def test_a_list_of_one_split_is_of_that_split(tmp_path: Path, name: str, column: dict[str, str], part: str) -> None:
    source = listed(tmp_path / "in" / name, 0, 12, **column)
    told = f"the column {next(iter(column))}" if column else f"the name {name}"
    shown = f"Split: {part} 12, as {told} says (--split-ratio gives another)"
    assert shown in convert(source, tmp_path / "out", "--dry-run")
    assert shown in convert(source, tmp_path / "out")
    assert shares(tmp_path / "out") == {part: [*range(12)]}
    convert(source, tmp_path / "cut", "--split-ratio", "1,1,0")
    assert sorted(map(len, shares(tmp_path / "cut").values())) == [6, 6]


@pytest.mark.parametrize(
    ("name", "column"), [("train_val.csv", {}), ("list.csv", {"is_test": "0"}), ("latest.csv", {})]
)
def test_other_lists_are_cut_by_ratios(tmp_path: Path, name: str, column: dict[str, str]) -> None:
    assert "Split: train 9, val 1\n" in convert(listed(tmp_path / "in" / name, 0, 12, **column), tmp_path / "out")


@pytest.mark.parametrize(("name", "column"), [("devset.csv", {}), ("list.csv", {"partition": "2"})])
def test_a_list_that_is_held_out_in_other_words_asks(tmp_path: Path, name: str, column: dict[str, str]) -> None:
    source = listed(tmp_path / "in" / name, 0, 12, **column)
    assert "says that it is held out, but not whether for validation or for tests" in refused(source, tmp_path / "out")
    convert(source, tmp_path / "out", "--split-ratio", "0,0,1")
    assert shares(tmp_path / "out") == {"test": [*range(12)]}


def of_several(path: Path, count: int) -> tuple[Path, dict[str, list[int]]]:
    """Write a list whose column says the split of each row, in all spellings, one after another."""
    names = ("train", "Validation", "test", "training", "dev")
    listed(path, 0, count)
    header, *rows = path.read_text().splitlines()
    rows = [f"{header},split", *(f"{row},{names[n % 5]}" for n, row in enumerate(rows))]
    path.write_text("".join(f"{row}\n" for row in rows))
    wanted = {"train": (0, 3), "val": (1, 4), "test": (2,)}
    return path, {part: [n for n in range(count) if n % 5 in of] for part, of in wanted.items()}


def test_a_column_of_splits_is_the_split(tmp_path: Path) -> None:
    source, wanted = of_several(tmp_path / "in/list.csv", 17)
    assert "Split: train 7, val 7, test 3, as the column split says" in convert(source, tmp_path / "out", "--dry-run")
    out = converted(source, tmp_path / "out")
    assert shares(out) == wanted
    assert samples(out)["test:000000007"] == picture(7)
    before, keys = tars(out), samples(out)
    source, wanted = of_several(source, 29)
    convert(source, out)
    assert shares(out) == wanted
    assert before.items() <= tars(out).items()
    assert keys.items() <= samples(out).items()
    by_hand = ("--split-ratio", "9,1,0")
    assert "`split` is " in refused(source, tmp_path / "hand", *by_hand)
    assert sum(map(len, shares(converted(source, tmp_path / "all", *by_hand, "--ignore", "split")).values())) == 29
    assert "Split: train 9, val 1\n" in convert(source, tmp_path / "ignored", "--ignore", "split")


def test_a_folder_of_lists_has_their_splits(tmp_path: Path) -> None:
    source = lists(tmp_path / "in", {"train": 4, "val": 2, "test": 1})
    for number, kind in enumerate(((), ("--kind", "table"), ("--kind", "lists"))):
        output = convert(source, tmp_path / str(number), *kind)
        assert "3 lists, each CSV, 7 samples" in output
        assert "Split: train 4, val 2, test 1\n" in output
    listed(source / "more.csv", 300, 301)
    assert "train.csv, val.csv, test.csv" in refused(source, tmp_path / "out")
    (tmp_path / "none").mkdir()
    assert "--kind table is for a list, and this folder has none" in refused(
        tmp_path / "none", tmp_path / "out", "--kind", "table"
    )


# --- fields made of several columns -------------------------------------------------------------------------------


def test_fields_made_of_several_columns(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 3, price="7,50")
    out = converted(source, tmp_path / "out", "--field", "caption={title}: {caption}", "--split-ratio", "1,0,0")
    assert [one.caption for one in read(out)] == [[f"title {n}: caption {n}"] for n in range(3)]
    question = ("--question", 'Was kostet "{title}"?', "--field", "answers=price", "--split-ratio", "1,0,0")
    for number, kind in enumerate(((), ("--sample-type", "VQASample"))):
        asked = read(converted(source, tmp_path / f"asked{number}", *question, *kind))
        assert [one.context for one in asked] == [[f'Was kostet "title {n}"?'] for n in range(3)]
        assert [one.answers for one in asked] == [[["7,50"]]] * 3
    message = refused(source, tmp_path / "wrong", "--field", "caption={titel}: {caption}")
    assert "--field caption={titel}: {caption}: the first rows have no such column as 'titel'" in message


def test_a_template_needs_its_columns(tmp_path: Path) -> None:
    source = tmp_path / "list.jsonl"
    rows = [{"image": "0.jpg", "caption": "a", "title": "t"}, {"image": "0.jpg", "caption": "b", "title": None}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "0.jpg").write_bytes(picture(0))
    message = refused(source, tmp_path / "out", "--field", "caption={title}: {caption}", "--split-ratio", "1,0,0")
    assert f"{source}, line 2: `title` is null, but '{{title}}: {{caption}}' needs its text or number." in message


# --- what is not finished -----------------------------------------------------------------------------------------


def test_a_stopped_conversion_says_so(tmp_path: Path) -> None:
    source = listed(tmp_path / "in/list.csv", 0, 4)
    (tmp_path / "in/3.jpg").unlink()
    flags = ("--samples-per-shard", 2, "--split-ratio", "1,0,0")
    refused(source, tmp_path / "out", *flags)
    assert "is not finished, since what wrote it was stopped. Run it again" in refusal_of("info", tmp_path / "out")
    (tmp_path / "in/3.jpg").write_bytes(picture(3))
    assert "Unchanged: 1 shard." in convert(source, tmp_path / "out", *flags)


def test_names_in_other_capitals_are_named(tmp_path: Path) -> None:
    (tmp_path / "Blue Cup 7 (Big).JPG").write_bytes(picture(0))
    (tmp_path / "list.csv").write_text("image,caption\nblue cup 7 (big).jpg,cup\n")
    assert f"There is {tmp_path}/Blue Cup 7 (Big).JPG" in refused(tmp_path / "list.csv", tmp_path / "out")


def test_stopped_at_each_file_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is the dataset before or the one after, or it is refused by name; edits stay, wherever it stops."""
    source = listed(tmp_path / "in/list.csv", 0, 8)
    flags = ("--samples-per-shard", 3, "--split-ratio", "1,0,0")
    before = converted(source, tmp_path / "before", *flags)
    edit(before, "split.yaml", exclude=["train/00000.tar/000000001"])
    edit(before, "dataset.yaml", field_map={"image": "jpg", "caption": "json[title]"})
    listed(source, 0, 14)
    shutil.copytree(before, tmp_path / "after")
    whole = content(converted(source, tmp_path / "after", *flags))
    stop = StopAtMove(monkeypatch)
    for stop_at in range(1, 100, 2):
        out = tmp_path / str(stop_at)
        stop.after(stop_at)
        shutil.copytree(before, out)
        if energon("convert", source, out, *QUIETLY, *flags).exit_code == 0:
            break
        if (out / ".nv-meta/.info.json").exists():
            with suppress(MetadataError):  # the split file is newer than the counts of shards
                assert len({one.caption[0] for one in read(out)}) in (7, 13)
        stop.after(0)
        converted(source, out, *flags)
        assert content(out) == whole
    assert stop_at > 10

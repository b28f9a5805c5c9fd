"""`energon which --find` finds samples by what `convert` keeps of them, as reading the shards with tarfile does."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from commands import answer, energon, output_of, refusal_of
from made import made_once
from PIL import Image

from energon_bridge.tools.cli import which

MIX = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    path: ./data
    split_part: val
"""


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has threads, so others would be spawned, which takes seconds."""
    monkeypatch.setattr(which, "available_cores", lambda: 1)


def write_chats(folder: Path) -> Path:
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for number in range(40):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"pictures/{4700 + number}.jpg")
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": f"Größe {number}, A_{number}"}]
        lines.append({"sku": f"A-{number}", "image": f"{4700 + number}.jpg", "conversations": turns})
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    energon(
        "convert", folder / "chats.jsonl", folder / "data", "--media", folder / "pictures", "--split-ratio", "9,1,0"
    )
    captions = "".join(json.dumps({"caption": one["sku"]}) + "\n" for one in lines)
    (folder / "captions.jsonl").write_text(captions)
    energon("prepare", folder / "captions.jsonl")
    (folder / "mix.yaml").write_text(MIX)
    return folder


data = made_once(write_chats)


def keys_with(dataset: Path, text: str, shards: str = "*/*.tar") -> list[str]:
    """Return the keys of all samples of which a JSON holds a text, by tarfile alone."""
    keys = []
    for shard in sorted(dataset.glob(shards)):
        with tarfile.open(shard) as tar:
            files = ((member.name, tar.extractfile(member)) for member in tar.getmembers())
            texts = {name: file.read().decode() for name, file in files if file is not None and name.endswith(".json")}
            keys += [name.partition(".")[0] for name, said in texts.items() if text in said]
    return keys


@pytest.mark.parametrize("text", ["A-3", "4703.jpg", "A-39", "Größe 12", "A_4"])
def test_a_file_name_and_a_value_give_the_key(data: Path, text: str) -> None:
    found = answer("which", data / "data", "--find", text)
    ends = '"' if text != "Größe 12" else ","
    assert [one["key"] for one in found["found"]] == keys_with(data / "data", text + ends) != []
    assert found["unreadable"] == 0


def test_the_table_says_what_stands_around_it(data: Path) -> None:
    said = output_of("which", data / "data", "--find", "A-39", "--find", "4711.jpg")
    assert "2 of 40 samples have it." in said
    assert '"sku":"A-39"' in said


def test_a_part_of_a_word_is_not_found(data: Path) -> None:
    assert "0 of 40 samples have it." in output_of("which", data / "data", "--find", "711.jpg")


def test_a_mix_is_searched_where_it_reads(data: Path) -> None:
    """It reads the part `val`, all of whose samples have the turns of a chat."""
    expected = keys_with(data / "data", "human", "val/*.tar")
    assert 0 < len(expected) < 40
    for place in (("mix.yaml",), ("data", "--split-part", "val")):
        found = answer("which", data / place[0], *place[1:], "--find", "human")
        assert [one["key"] for one in found["found"]] == expected


def test_lines_of_a_jsonl_file_have_their_numbers(data: Path) -> None:
    assert [one["key"] for one in answer("which", data / "captions.jsonl", "--find", "A-17")["found"]] == ["17"]


def test_what_cannot_be_read_is_counted(data: Path, tmp_path: Path) -> None:
    shard = tmp_path / "data/00000.tar"
    shard.parent.mkdir()
    with tarfile.open(shard, "w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 4
            tar.addfile(member, io.BytesIO(b"A-17"))
    energon("prepare", shard.parent, "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeSample")
    with shard.open("r+b") as file:
        file.seek(1024)
        file.write(b"?" * 512)  # the header of the second sample
    said = output_of("which", shard.parent, "--find", "A-17")
    assert "2 of 3 samples have it." in said
    assert "Not searched, for they cannot be read: 1 sample. The first:" in said


@pytest.mark.parametrize("options", [("--step", 3), ("--out", "found.json"), ("--find", " ")])
def test_other_questions_are_refused(data: Path, options: tuple[object, ...]) -> None:
    assert "--find" in refusal_of("which", data / "data", "--find", "A-17", *options)


def test_a_state_is_refused(data: Path) -> None:
    assert "give its folder, URL or YAML file, and no state" in refusal_of("which", "state.pt", "--find", "A-17")

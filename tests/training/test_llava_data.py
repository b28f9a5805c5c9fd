"""LLaVA's published data, and models put together for it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from forked import run_program
from paths import REPOSITORY
from recipes import CAPTIONS, jpeg

from energon_bridge import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.training.llava_data import write_captions, write_conversations


def run(*arguments: str) -> None:
    """Call `energon`."""
    command = ["-c", "from energon_bridge.tools.cli.main import main; main()", *arguments]
    done = run_program(command, REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_the_documented_line_converts_captions(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(entries(25, tmp_path / "images")))
    documented = (REPOSITORY / "docs" / "how-to" / "recipes.md").read_text().splitlines()
    line = next(line for line in documented if line.startswith("energon convert blip_laion_cc_sbu_558k.json"))
    names = {"blip_laion_cc_sbu_558k.json": "list.json", "data/llava_pretrain_558k": "data", "images": "images"}
    words = [str(tmp_path / names[word]) if word in names else word for word in shlex.split(line)[1:]]
    run(*words)
    dataset = get_train_dataset(tmp_path / "data", batch_size=4, worker_config=WorkerConfig(num_workers=0))
    assert {caption.rstrip() for caption in next(iter(get_loader(dataset))).caption} <= set(CAPTIONS.values())


def entries(count: int, images: Path) -> list[dict[str, object]]:
    """Write images and return entries in the form of blip_laion_cc_sbu_558k.json."""
    found: list[dict[str, object]] = []
    for number in range(count):
        color = list(CAPTIONS)[number % 3]
        path = images / f"{number % 2:05d}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(color))
        turns = [{"from": "human", "value": "Describe it.\n<image>"}, {"from": "gpt", "value": f"{CAPTIONS[color]}\n"}]
        found.append({"id": f"{number}.0", "image": path.relative_to(images).as_posix(), "conversations": turns})
    return found


def test_captions_become_a_dataset(tmp_path: Path) -> None:
    source, images, folder = tmp_path / "list.json", tmp_path / "images", tmp_path / "data"
    source.write_text(json.dumps(entries(25, images)))
    assert write_captions(source, images, folder, val_every=10, samples_per_shard=9) == {"train": 22, "val": 3}
    assert [path.name for path in sorted((folder / "train").iterdir())] == ["00000.tar", "00001.tar", "00002.tar"]
    fields = ("--sample-type", "CaptioningSample", "--field-map", '{"image": "jpg", "caption": "txt"}')
    parts = ("--split-parts", "train:train/.*", "--split-parts", "val:val/.*")
    run("prepare", str(folder), "--non-interactive", *parts, *fields)
    for part, numbers in (("val", [0, 10, 20]), ("train", [n for n in range(25) if n % 10])):
        dataset = get_val_dataset(
            folder, split_part=part, batch_size=30, worker_config=WorkerConfig(num_workers=0), image_decode="pilrgb"
        )
        batch = next(iter(get_loader(dataset)))
        assert batch.__key__ == [f"{number}_0" for number in numbers]
        assert batch.caption == [list(CAPTIONS.values())[number % 3] for number in numbers]
        assert batch.image[0].size == (16, 16)


def test_conversations_are_cut_by_the_folder_of_their_images(tmp_path: Path) -> None:
    listed = entries(12, tmp_path / "images")
    del listed[5]["image"]
    source, folder = tmp_path / "list.json", tmp_path / "data"
    source.write_text(json.dumps(listed))
    assert write_conversations(source, folder, val_every=6) == {"00001": 5, "00000": 4, "text": 1, "val": 2}
    lines = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}
    assert sorted((entry for found in lines.values() for entry in found), key=listed.index) == listed
    assert lines["val"] == [listed[0], listed[6]]
    assert lines["text"] == [listed[5]]


def test_videos_and_lists_of_images_have_folders_too(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    named = [{}, {"video": "films/a.mp4"}, {"images": ["coco/a.jpg", "vg/b.jpg"]}, {"image": ["coco/a.jpg"]}]
    listed = [{"id": number, **media, "conversations": turns} for number, media in enumerate(named)]
    (tmp_path / "list.json").write_text(json.dumps(listed))
    assert write_conversations(tmp_path / "list.json", tmp_path / "data") == {"films": 1, "coco": 2, "val": 1}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, r"cannot read .*list\.json"),
        ("{", "cannot read"),
        ("[1]", "must be a list of objects with 'conversations'"),
        ('[{"id": 1, "image": "a.jpg", "conversations": []}]', "entry 1 has no caption"),
    ],
)
def test_lists_of_another_form_are_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    source = tmp_path / "list.json"
    (tmp_path / "a.jpg").write_bytes(jpeg("red"))
    if content is not None:
        source.write_text(content)
    with pytest.raises(ConfigurationError, match=complaint):
        write_captions(source, tmp_path, tmp_path / "data", val_every=500)


def test_a_folder_in_use_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="is not empty"):
        write_conversations(tmp_path / "list.json", tmp_path)


def test_the_script_says_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(entries(4, tmp_path / "images")))
    command = [str(REPOSITORY / "scripts" / "llava_data.py"), "conversations", "list.json", "data"]
    result = run_program(command, tmp_path)
    assert (result.returncode, result.stdout) == (0, "00001: 2\n00000: 1\nval: 1\n"), result.stderr
    again = run_program(command, tmp_path)
    assert again.returncode == 2
    assert "is not empty" in again.stderr

"""Columns are made once for each shard; filters leave out what they say, read nothing of it, and stay elastic."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import answer, energon, output_of, refusal_of
from engine import NUM_LANES, deliver, loaders_of, numbers_of, text_dataset, train_dataset
from keyed import CRUDE, mix_document, write_mix
from PIL import Image

from energon_bridge import CaptioningSample, DefaultTaskEncoder, ShardWriter, get_savable_loader, get_val_dataset
from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetMismatchError,
    EmptyDatasetError,
    EnergonError,
    MetadataError,
    SampleError,
)
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.format.parallel import Task
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.storage import open_store
from energon_bridge.tools.columns.making import add_column, content_hash, duplicates, image_size, remove_column
from energon_bridge.tools.columns.stored import column_of, read_columns
from energon_bridge.tools.testing import write_shard

SHARDS = [17, 31, 5, 40, 27]
TOTAL = sum(SHARDS)


def number(sample: Any) -> int:
    """Return the number in the text of a sample."""
    return int(sample.text.split()[1])


def language(sample: Any) -> str:
    return ("en", "de", "français")[number(sample) % 3]


def several(sample: Any) -> dict[str, Any]:
    return {"half": number(sample) / 2, "even": number(sample) % 2 == 0}


def refuses_seven(sample: Any) -> float:
    if number(sample) == 7:
        raise ValueError("seven")
    return number(sample)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = text_dataset(tmp_path_factory.mktemp("columns"), train=SHARDS, val=[9, 4])
    add_column(root, "number", number)
    add_column(root, "language", language)
    add_column(root, None, several)
    return root


def column(root: Path, name: str, split_part: str = "train") -> np.ndarray:
    dataset = open_dataset(root, split_part=split_part)
    return column_of(dataset, name, read_columns(dataset.store))


# Columns -------------------------------------------------------------------------------------------------------------


def test_columns_have_an_entry_for_each_sample(data: Path) -> None:
    assert column(data, "number").tolist() == list(range(TOTAL))
    assert column(data, "number", "val").tolist() == list(range(13))
    assert column(data, "language")[:4].tolist() == ["en", "de", "français", "en"]
    assert column(data, "half").dtype == np.float64
    assert column(data, "even").tolist()[:3] == [True, False, True]


def threads(sample: Any) -> int:
    return torch.get_num_threads()


def test_forks_do_not_wait_for_threads_of_the_parent(tmp_path: Path) -> None:
    """Of one that used torch before, as an encoder of a model does when it is made: OpenMP's are not in a fork."""
    root = text_dataset(tmp_path / "data", train=[3, 3])
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        add_column(root, "threads", threads, num_workers=2)
        assert column(root, "threads").tolist() == [1] * 6
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_only_new_and_changed_shards_are_computed(tmp_path: Path, num_workers: int) -> None:
    root = text_dataset(tmp_path, train=[6, 4, 5])
    assert add_column(root, "number", number, num_workers=num_workers).num_computed == 15
    before = (root / ".nv-meta/columns/number.npy").read_bytes()
    again = add_column(root, "number", number, num_workers=num_workers)
    assert (again.num_samples, again.num_computed) == (15, 0)
    assert (root / ".nv-meta/columns/number.npy").read_bytes() == before
    write_shard(root / "train/shard_001.tar", {f"x{n}": {"txt": b"text %d" % (100 + n)} for n in range(3)})
    prepare_dataset(root, split=parse_patterns(["train:train/.*"]))
    with pytest.raises(MetadataError, match=r"covers 4 samples in \d+ bytes of the shard 'train/shard_001.tar', which"):
        column(root, "number")
    again = add_column(root, "number", number, num_workers=num_workers)
    assert (again.num_samples, again.num_computed) == (14, 3)
    assert column(root, "number").tolist() == [*range(6), 100, 101, 102, *range(10, 15)]
    assert add_column(root, "number", several_as_number).num_computed == 14  # by another function


def several_as_number(sample: Any) -> float:
    return number(sample) / 3


def test_samples_that_fail_are_named_or_get_a_value(tmp_path: Path) -> None:
    root = text_dataset(tmp_path, train=[6, 4])
    with pytest.raises(SampleError, match=r"has no attribute 'price'.*with all fields of a JSON \(--raw\)"):
        add_column(root, "price", lambda sample: sample.price, made_of="price")
    with pytest.raises(SampleError, match=r"shard_001\.tar, key '00007': no value for the column: ValueError: seven"):
        add_column(root, "n", refuses_seven)
    assert not read_columns(open_store(root))
    assert not (root / ".nv-meta/columns").exists()
    added = add_column(root, "n", refuses_seven, missing=-1)
    assert added.num_missing == 1
    assert "shard_001.tar, key '00007': no value for the column: ValueError: seven" in added.first_missing
    assert column(root, "n").tolist() == [0, 1, 2, 3, 4, 5, 6, -1, 8, 9]


@pytest.mark.parametrize("name", ["n", None])
@pytest.mark.parametrize("tasks", [False, True])
def test_a_function_that_always_fails_is_no_missing_value(name: str | None, tasks: bool, tmp_path: Path) -> None:
    """Nor is a name that does not exist, even in one sample."""
    root = text_dataset(tmp_path, train=[6, 4])
    if tasks:
        for number_of_task in range(2):
            task = Task(number_of_task, 2)
            done = add_column(root, name, lambda sample: sample.price, made_of="price", missing=0, task=task)
            assert done.num_missing == done.num_samples
            assert "has no attribute 'price'" in done.first_missing
    with pytest.raises(SampleError, match=r"no sample of .*; the first: .*shard_000\.tar, key '00000'.*'price'"):
        add_column(root, name, lambda sample: sample.price, made_of="price", missing=0, finish=tasks)
    with pytest.raises(SampleError, match=r"key '00007'.*NameError: name 'jsn' is not defined\. Fix it"):
        add_column(root, "n", lambda sample: jsn.loads("0") if number(sample) == 7 else 1, missing=0)  # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(ConfigurationError, match="returned no column for any sample"):
        add_column(root, None, lambda sample: {}, made_of="nothing", missing=0)
    assert not read_columns(open_store(root))


def test_one_missing_value_does_not_fit_texts_and_numbers(tmp_path: Path) -> None:
    root = text_dataset(tmp_path, train=[6, 4])
    for missing in (0, "unknown"):
        with pytest.raises(
            ConfigurationError, match=rf"got {missing!r} \(--missing\): add columns of other types each"
        ):
            add_column(root, None, word_and_width, made_of="both", missing=missing)


def word_and_width(sample: Any) -> dict[str, Any]:
    return {"word": language(sample), "width": refuses_seven(sample)}


def width_of_long_texts(sample: Any) -> dict[str, int]:
    if number(sample) < 6:
        raise ValueError("short")
    return {"width": number(sample)}


def test_a_shard_in_which_all_samples_fail(tmp_path: Path) -> None:
    """Only the other shards say which columns there are."""
    root = text_dataset(tmp_path, train=[6, 4])
    assert add_column(root, None, width_of_long_texts, missing=0).num_missing == 6
    assert column(root, "width").tolist() == [0, 0, 0, 0, 0, 0, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("two words", 1, "a name has only letters, digits and _"),
        ("../up", 1, "a name has only letters, digits and _"),
        ("n", None, "expected numbers or texts, got values of the types NoneType"),
        ("n", [1], "types list"),
        (None, 1, "give the column a name"),
    ],
)
def test_what_cannot_be_a_column(tmp_path: Path, name: str | None, value: Any, message: str) -> None:
    root = text_dataset(tmp_path, train=[3])
    with pytest.raises(EnergonError, match=message):
        add_column(root, name, lambda _sample: value)
    assert not (tmp_path / ".nv-meta/columns").exists()


def test_sizes_hashes_and_duplicates(tmp_path: Path) -> None:
    def jpg(size: tuple[int, int], colour: str) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", size, colour).save(file, "jpeg")
        return file.getvalue()

    colours = ["red", "blue", "red", "green", "blue", "red"]
    with ShardWriter(tmp_path / "out", sample_type=CaptioningSample, samples_per_shard=4) as out:
        for place, colour in enumerate(colours):
            image = jpg((8 + len(colour), 5), colour)
            out.write({"__key__": f"{place}", "image": image, "caption": colour})
    root = tmp_path / "out"
    for flag in ("--image-size", "--hash", "--bytes"):
        output_of("columns", "add", root, flag, "--num-workers", 1)
    assert column(root, "width").tolist() == [8 + len(colour) for colour in colours]
    assert column(root, "height").tolist() == [5] * 6
    assert duplicates(root) == [3, 2]
    assert "5 samples in 2 groups of equal ones, the largest has 3" in energon("columns", "duplicates", root).output
    listed = answer("columns", "list", root)
    assert [one["name"] for one in listed] == ["bytes", "hash", "height", "media_hash", "width"]
    assert "column:       hash, hash of the content" in energon("info", root).output
    output_of("columns", "remove", root, "hash")
    assert "no column 'hash'" in energon("columns", "duplicates", root).output.replace("\n", " ")
    assert not (root / ".nv-meta/columns/hash.npy").exists()
    assert image_size({"__key__": "a", "0.PNG": jpg((3, 4), "red")}) == {"width": 3, "height": 4}
    assert content_hash({"a": b"12", "b": b""}) != content_hash({"a": b"1", "b": b"2"})


def test_the_length_of_sounds_is_that_of_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    from clips import write_sound, write_video

    wav = write_sound(tmp_path / "a.wav", codec="pcm_s16le", rate=16000, seconds=1.5).read_bytes()
    mp3 = write_sound(tmp_path / "a.mp3", codec="libmp3lame", rate=44100, seconds=2.25).read_bytes()
    film = write_video(tmp_path / "a.mp4", options={"x264-params": "log-level=0"}, frames=50, sound="aac").read_bytes()
    samples = {
        "one": {"wav": wav},
        "two": {"0.wav": wav, "1.mp3": mp3, "json": b"{}"},
        "film": {"mp4": film},
        "track": {"audios.0.mp4": film, "0.wav": wav},
        "text": {"txt": b"a"},
    }
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "0.tar", samples)
    prepare_dataset(tmp_path / "data", split=parse_patterns(["train:.*"]), dataset_yaml=CRUDE)
    monkeypatch.setattr("energon_bridge.models.av.metadata.AudioReader", None)  # nothing is decoded
    output_of("columns", "add", tmp_path / "data", "--sound-seconds", "--num-workers", 1)
    assert column(tmp_path / "data", "sound_seconds") == pytest.approx([1.5, 3.75, 0, 3.5, 0], abs=0.001)


def test_commands_by_a_module_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = text_dataset(tmp_path / "data", train=[5])
    (tmp_path / "counts_of_mine.py").write_text(
        "from energon_bridge import DefaultTaskEncoder\n"
        "def letters(sample):\n    return len(sample.text)\n"
        "class Encoder(DefaultTaskEncoder):\n"
        "    def encode_sample(self, sample):\n        return {'tokens': [1] * int(sample.__key__)}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for arguments in (["letters", "--of", "counts_of_mine:letters"], ["--encoder", "counts_of_mine:Encoder"]):
        output_of("columns", "add", "data", *arguments, "--num-workers", 2)
    assert column(root, "letters").tolist() == [6] * 5
    assert column(root, "tokens").tolist() == [0, 1, 2, 3, 4]
    for arguments, message in (
        ([], "give exactly one of --of, --encoder"),
        (["--hash", "--bytes"], "give exactly one of --of, --encoder"),
        (["x", "--of", "counts_of_mine"], "expected MODULE:NAME"),
        (["x", "--of", "counts_of_mine:nothing"], "cannot import it"),
    ):
        assert message in refusal_of("columns", "add", "data", *arguments).replace("\n", " ")


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"format": 2, "columns": {}}', b'{"format": 1, "columns": {"a": 3}}', b'{"format": 1}'],
)
def test_a_damaged_list_is_named(tmp_path: Path, damage: bytes) -> None:
    root = text_dataset(tmp_path, train=[3])
    add_column(root, "number", number)
    (root / ".nv-meta/columns/index.json").write_bytes(damage)
    with pytest.raises(MetadataError, match=r"index\.json"):
        train_dataset(root, filter="number > 1")


@pytest.mark.parametrize("damage", [b"", b"x" * 200, None])
def test_damaged_numbers_are_named(tmp_path: Path, damage: bytes | None) -> None:
    root = text_dataset(tmp_path, train=[3])
    add_column(root, "number", number)
    path = root / ".nv-meta/columns/number.npy"
    if damage is None:
        np.save(path, np.zeros(2, dtype=np.int64))
    else:
        path.write_bytes(damage)
    with pytest.raises(MetadataError, match=r"number\.npy.*Add the column again"):
        train_dataset(root, filter="number > 1")


# Filters -------------------------------------------------------------------------------------------------------------


def expected_of(text: str) -> list[int]:
    names = {"number": 0, "language": "", "even": False, "half": 0.0}
    kept = []
    for n in range(TOTAL):
        names = {"number": n, "language": ("en", "de", "français")[n % 3], "even": n % 2 == 0, "half": n / 2}
        if eval(text, {"__builtins__": {}}, names):
            kept.append(n)
    return kept


FILTERS = [
    "number >= 30",
    "number % 7 == 3",
    "language == 'de' and not even",
    "10 < half <= 40 and language in ['en', 'français']",
    "number == 64",
]


@pytest.mark.parametrize("text", FILTERS)
@pytest.mark.parametrize("batch_size", [2, 8])
def test_an_epoch_has_what_the_filter_keeps(data: Path, text: str, batch_size: int) -> None:
    dataset = train_dataset(data, "default", filter=text, repeat=False, batch_size=batch_size)
    with closing(get_savable_loader(dataset)) as loader:
        for _ in range(2):
            assert sorted(n for batch in loader for n in numbers_of(batch)) == expected_of(text)
    dataset = get_val_dataset(data, split_part="train", batch_size=3, filter=text, worker_config=dataset.worker_config)
    with closing(get_savable_loader(dataset)) as loader:
        assert [n for batch in loader for n in numbers_of(batch)] == expected_of(text)


def test_mixes_are_filtered_by_dataset_and_as_a_whole(data: Path, tmp_path: Path) -> None:
    other = text_dataset(tmp_path / "other", train=[20, 20])
    add_column(other, "number", number)
    parts = [
        {"path": str(data), "filter": "number < 20", "subset": {"range": [10, 60]}, "repetitions": 2},
        {"concat": [{"path": str(other), "filter": "number != 38"}], "filter": "number > 35"},
    ]
    mix = write_mix(tmp_path / "mix.yaml", train={"blend_epochized": parts, "filter": "number != 12"})
    dataset = train_dataset(mix, "default", repeat=False)
    with closing(get_savable_loader(dataset)) as loader:
        found = sorted(n for batch in loader for n in numbers_of(batch))
    assert found == sorted([n for n in range(10, 20) if n != 12] * 2 + [36, 37, 39])
    assert [leaf.filter for leaf in dataset.leaves] == [
        "(number < 20) and (number != 12)",
        "(number != 38) and (number > 35) and (number != 12)",
    ]
    dataset = train_dataset(mix, "skipping")
    expected = deliver(loaders_of(dataset, 1, 0), 3 * NUM_LANES).digests
    assert deliver(loaders_of(dataset, 3, 1), NUM_LANES).digests == expected


def test_the_data_module_filters_training_and_validation(data: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from energon_bridge import EnergonMultiModalDataModule

    settings: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 2, "num_workers": 0}
    settings |= {"task_encoder": DefaultTaskEncoder()}
    module = EnergonMultiModalDataModule(str(data), None, None, filter="number % 2 == 1", **settings)
    train = iter(module.train_dataloader())
    assert all(n % 2 for _ in range(70) for n in numbers_of(next(train)))
    assert [n for batch in module.val_dataloader().one_pass() for n in numbers_of(batch)] == [1, 3, 5, 7, 9, 11]


def test_a_join_is_not_filtered(data: Path) -> None:
    join = {"join": [{"path": str(data)}, {"path": str(data)}], "joiner": {"__module__": "a", "__class__": "B"}}
    for split in ({"blend": [join], "filter": "number > 1"}, {**join, "filter": "number > 1"}):
        with pytest.raises(MetadataError, match="filter"):
            train_dataset(mix_document(train=split))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("numbr > 3", ConfigurationError, r"no column 'numbr'. Did you mean 'number'\?"),
        ("width > 3", ConfigurationError, r"no column 'width'. Columns: .* energon columns add .* --image-size$"),
        ("number >", ConfigurationError, "cannot be parsed"),
        ("number", ConfigurationError, "gives a number, expected true or false"),
        ("__import__('os')", ConfigurationError, "is not allowed"),
        ("number < 0", EmptyDatasetError, "none of its 120 samples passes the filter 'number < 0'"),
    ],
)
def test_filters_that_cannot_be(data: Path, text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        train_dataset(data, filter=text)


def test_states_fit_what_is_kept_and_not_how_it_is_said(data: Path) -> None:
    dataset = train_dataset(data, "skipping", filter="number >= 30")
    delivered = deliver(loaders_of(dataset, 1, 0), 30, [9])
    (state,) = delivered.states.values()
    same = train_dataset(data, "skipping", filter="not number < 30")
    at = state[0]["microbatches"]
    assert deliver(loaders_of(same, 2, 1, state=state), 10).digests == delivered.digests[at : at + 20]
    for other in (train_dataset(data, "skipping", filter="number > 30"), train_dataset(data, "skipping")):
        with pytest.raises(DatasetMismatchError, match="number >= 30"):
            loaders_of(other, 1, 0, state=state)
    state = deliver(loaders_of(train_dataset(data, "skipping"), 1, 0), 10, [9]).states[9]
    with pytest.raises(DatasetMismatchError):
        loaders_of(dataset, 1, 0, state=state)


def test_a_filter_that_keeps_all_is_another_identity_but_the_same_order(data: Path) -> None:
    whole, kept = train_dataset(data, "skipping"), train_dataset(data, "skipping", filter="number >= 0")
    assert whole.leaves[0].identity != kept.leaves[0].identity
    plans = [plan_run(one, one.worker_config).leaves[0].order for one in (whole, kept)]
    assert plans[0].num_samples == plans[1].num_samples


def test_what_is_left_out_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,000 samples of 20 kB a filter keeps 1 %: the bytes that are read are those of what it keeps."""
    root = tmp_path / "data"
    (root / "train").mkdir(parents=True)
    for shard in range(8):
        samples = {f"{n:05d}": {"txt": b"text %d " % n + b"x" * 20_000} for n in range(500 * shard, 500 * shard + 500)}
        write_shard(root / f"train/{shard}.tar", samples)
    text_dataset(tmp_path / "form", train=[1])
    yaml = (tmp_path / "form/.nv-meta/dataset.yaml").read_bytes()
    prepare_dataset(root, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml, key_index=False)
    add_column(root, "number", number)
    read = 0
    pread, preadv = os.pread, os.preadv

    def counting(*arguments: Any) -> Any:
        nonlocal read
        found = pread(*arguments)
        read += len(found)
        return found

    def counting_vector(*arguments: Any) -> Any:
        nonlocal read
        count = preadv(*arguments)
        read += count
        return count

    dataset = train_dataset(root, "default", filter="number % 100 == 7", repeat=False)
    monkeypatch.setattr(os, "pread", counting)
    monkeypatch.setattr(os, "preadv", counting_vector)
    with closing(get_savable_loader(dataset)) as loader:
        found = sorted(int(text.split()[1]) for batch in loader for text in batch.text)
    assert found == list(range(7, 4000, 100))
    kept, index = 40 * 20_992, 8 * 8 * 501
    assert kept * 0.95 < read <= 1.2 * kept + index


def test_forecasts_know_filters(data: Path, tmp_path: Path) -> None:
    mix = write_mix(tmp_path / "mix.yaml", train={"path": str(data), "filter": "number % 5 == 2"})
    assert "where number % 5 == 2" in output_of("plan", mix, "--batch-size", 2, "--steps", 50).replace("\n", " ")
    dataset = train_dataset(mix, "default")
    (loader,) = loaders_of(dataset, 1, 0)
    batches = iter(loader)
    keys = [next(batches)["__key__"] for _ in range(3)]
    path = tmp_path / "state.json"
    path.write_text(json.dumps(loader.save_state_rank()))
    for step, expected in ((2, keys[2]), (3, next(batches)["__key__"])):
        output = output_of("which", path, "--step", step, "--json")
        (microbatch,) = json.loads(output)["microbatches"]
        assert [sample["index"] for sample in microbatch["samples"]] == [int(key) for key in expected]
    output = output_of("preview", mix, "--samples", "all")
    assert "00002" in output
    assert "00003" not in output


def test_columns_go_and_filters_with_them(tmp_path: Path) -> None:
    root = text_dataset(tmp_path, train=[8])
    add_column(root, "number", number)
    remove_column(root, "number")
    with pytest.raises(ConfigurationError, match=r"no column 'number'.*energon columns add"):
        train_dataset(root, filter="number > 3")
    with pytest.raises(MetadataError, match=r"no column 'number'\. Columns: none"):
        remove_column(root, "number")

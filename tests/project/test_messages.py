"""What the program says when something is wrong: where it is, what was found, and what to do about it."""

from __future__ import annotations

import http.server
import inspect
import json
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from commands import energon, output_of, refusal_of
from engine import text_dataset, train_dataset
from fsspec.spec import AbstractFileSystem
from made import made_once
from PIL import Image

from energon_bridge import (
    DefaultTaskEncoder,
    EnergonMultiModalDataModule,
    SampleDecoder,
    __version__,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    read_quarantine,
    verify_resume,
)
from energon_bridge.core.datasets import DATALOADER_WORDS
from energon_bridge.core.errors import (
    ConfigurationError,
    CorruptShardError,
    DatasetNotFoundError,
    FatalSampleError,
    FieldAccessError,
    FieldMapError,
    MetadataError,
    ResumeMismatchError,
    StorageError,
    UnknownArgumentError,
    did_you_mean,
)
from energon_bridge.core.format.field_map import FieldMap, check_fields
from energon_bridge.core.loader.delivery import _say_endless
from energon_bridge.core.samples import (
    CaptioningSample,
    ImageClassificationSample,
    MultiChoiceVQASample,
    SimilarityInterleavedSample,
    TextSample,
    VQASample,
)
from energon_bridge.core.storage import open_store
from energon_bridge.core.stream.policy import ErrorPolicy
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.check.lint import lint_dataset, lint_parts
from energon_bridge.tools.cli.info import prepared_by
from energon_bridge.tools.cli.output import count_of, epochs
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

whole = made_once(text_dataset, train=[10, 10, 10])


@pytest.fixture
def texts(whole: Path, tmp_path: Path) -> Path:
    """Return a copy to damage, of three shards of ten texts."""
    return Path(shutil.copytree(whole, tmp_path / "texts"))


def deliver(path: Path, **settings: Any) -> None:
    """Deliver two epochs."""
    loader = get_loader(train_dataset(path, batch_size=2, **settings))
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    loader.close()


# Damaged shards ------------------------------------------------------------------------------------------------------


def test_a_broken_header_is_named_with_its_file(texts: Path):
    shard = texts / "train/shard_001.tar"
    data = bytearray(shard.read_bytes())
    data[1024:1536] = b"?" * 512  # the header of the second sample
    shard.write_bytes(data)
    with pytest.raises(FatalSampleError) as caught:
        deliver(texts, error_policy=ErrorPolicy(on_error="raise"))
    assert isinstance(caught.value.__cause__, CorruptShardError)
    assert str(caught.value.__cause__).startswith(f"{shard}, in the bytes of sample 11: no tar header at byte 0 ")


def set_count(folder: Path, shard: str, count: int) -> None:
    path = folder / ".nv-meta/.info.json"
    info = json.loads(path.read_text())
    info["shard_counts"][shard] = count
    path.write_text(json.dumps(info))


@pytest.mark.parametrize(("count", "lost"), [(9, 1), (0, 10)])
def test_counts_below_the_index_are_refused_when_it_is_opened(texts: Path, count: int, lost: int):
    set_count(texts, "train/shard_001.tar", count)
    with pytest.raises(MetadataError) as caught:
        train_dataset(texts)
    assert f"counts {count} samples in 'train/shard_001.tar', but its index has 10" in str(caught.value)
    assert f"so {lost} would never be read. Count again: `energon prepare --tar-index-only {texts}`" in str(
        caught.value
    )
    refusal_of("lint", texts, "--no-progress")
    output_of("prepare", "--tar-index-only", texts, "--no-progress")
    deliver(texts)
    assert energon("lint", texts, "--no-progress").output == "All 30 samples load.\n"


def test_counts_above_the_index_are_found_when_it_is_read(texts: Path):
    set_count(texts, "train/shard_001.tar", 11)
    with pytest.raises(CorruptShardError, match="88 bytes, expected 96 for the 11 samples"):
        deliver(texts)


def test_an_empty_count_is_seen_among_many_shards(texts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("energon_bridge.core.format.dataset._MOST_CHECKED", 2)
    set_count(texts, "train/shard_001.tar", 9)
    train_dataset(texts)  # not looked at
    set_count(texts, "train/shard_001.tar", 0)
    with pytest.raises(MetadataError, match="counts 0 samples"):
        train_dataset(texts)


# Field maps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample_type", "field_map", "message"),
    [
        (
            CaptioningSample,
            {"image": "txt", "caption": "png"},
            "field `image`: CaptioningSample declares it as torch.Tensor, but the part `txt` is a text. "
            "Are `image` and `caption` exchanged?",
        ),
        (CaptioningSample, {"image": "a.cls", "caption": "txt"}, "field `image`: .* `a.cls` is an integer. Name the"),
        (CaptioningSample, {"image": "jpg,txt.gz", "caption": "txt"}, "the part `txt.gz` is a text"),
        (CaptioningSample, {"image": "jpg", "caption": "JPG"}, "field `caption`: .* str, but .* `JPG` is an image"),
        (TextSample, {"text": "mp4"}, "the part `mp4` is video or sound"),
        (TextSample, {"text": "npy"}, "the part `npy` is an array"),
        (ImageClassificationSample, {"image": "jpg", "label": "png"}, "field `label`: .* declares it as int | None"),
        (MultiChoiceVQASample, {"image": "jpg", "context": "txt", "choices": "cls"}, "field `choices`"),
    ],
)
def test_a_part_that_cannot_be_what_its_field_is_declared_as_is_refused(
    sample_type: type, field_map: dict[str, str], message: str, texts: Path
):
    with pytest.raises(FieldMapError, match=message.replace("|", r"\|")):
        check_fields(FieldMap(field_map), sample_type, where="dataset.yaml")
    with pytest.raises(FieldMapError):
        render_dataset_yaml(sample_type.__name__, field_map)
    document = {"sample_type": {"__module__": "megatron.energon", "__class__": sample_type.__name__}}
    (texts / ".nv-meta/dataset.yaml").write_text(json.dumps(document | {"field_map": field_map}))
    with pytest.raises(FieldMapError, match=str(texts)):
        train_dataset(texts)
    refusal_of("lint", texts)


@pytest.mark.parametrize(
    ("sample_type", "field_map"),
    [
        (CaptioningSample, {"image": "jpg,png,npy,pth", "caption": "txt"}),
        (CaptioningSample, {"image": "json[image]", "caption": "json[caption]"}),
        (CaptioningSample, {"image": "picture", "caption": "description", "__key__": "cls"}),
        (ImageClassificationSample, {"image": "jpg", "label": "cls", "label_name": "txt"}),
        (ImageClassificationSample, {"image": "jpg", "label": "txt"}),
        (VQASample, {"image": "jpg", "context": "json", "answers": "txt", "answer_weights": "pth"}),
        (SimilarityInterleavedSample, {"images": "ten", "texts": "json", "audio": "wav", "video": "mp4"}),
    ],
)
def test_parts_that_may_fit_are_let_pass(sample_type: type, field_map: dict[str, str]):
    check_fields(FieldMap(field_map), sample_type, where="dataset.yaml")


def test_a_missing_field_is_reported_with_the_parts_that_the_map_leaves_out(tmp_path: Path):
    data = create_captioning_test_dataset(tmp_path / "data", num_train=4, num_val=0)
    yaml = data / ".nv-meta/dataset.yaml"
    yaml.write_text(yaml.read_text().replace("image: png", "image: jpg"))
    with pytest.raises(FatalSampleError, match=r"nothing at 'jpg'; the sample has the parts png, txt\.") as caught:
        deliver(data, error_policy=ErrorPolicy(on_error="raise"))
    assert isinstance(caught.value.__cause__, FieldAccessError)
    (dataset,), _ = lint_parts(data)
    (report,) = lint_dataset(dataset)
    assert "the sample has the parts png, txt." in report.problems[0].message


@pytest.mark.parametrize(
    ("field_map", "complaint"),
    [
        ({"image": "jpg", "caption": "txt"}, "field `image`: nothing at 'jpg' in the first 3 samples of a.tar. They"),
        ({"image": "png", "caption": "json[text]"}, "field `caption`: nothing at 'json[text]'"),
        ({"image": "png", "caption": "text,json[caption][0]"}, "field `caption`: nothing at 'text,json[caption][0]'"),
    ],
)
def test_prepare_refuses_a_map_that_no_sample_has(tmp_path: Path, field_map: dict[str, str], complaint: str):
    parts = {"png": b"-", "txt": b"-", "json": json.dumps({"caption": {"en": "a"}, "by": 1}).encode()}
    write_shard(tmp_path / "a.tar", {f"k{number}": parts for number in range(3)})
    arguments = ["prepare", tmp_path, "--non-interactive", "--split-ratio", "1,0,0", "--no-progress"]
    arguments += ["--sample-type", "CaptioningSample", "--field-map"]
    output = refusal_of(*arguments, json.dumps(field_map))
    assert complaint in output
    assert "They have the parts png, txt, json, json[caption], json[by]." in output
    assert not (tmp_path / ".nv-meta").exists()
    output = output_of(*arguments, json.dumps({"image": "jpg,png", "caption": "json[caption][en]"}))
    assert "Found 1 tar file: a.tar.\n" in output
    assert output.endswith("Done: 3 samples in 1 shard.\n")


# Decoders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [False, True])
def test_a_decoder_leaves_images_as_bytes_on_request(tmp_path: Path, guess: bool):
    data = create_captioning_test_dataset(tmp_path / "data", num_train=4, num_val=0, image_format="jpg")
    decoder = SampleDecoder(image_decode=None, guess_content=guess)
    assert decoder({"jpg": b"\xff\xd8\xff", "txt": b"a", "raw": b"\xff\xd8\xff"}) == {
        "jpg": b"\xff\xd8\xff",
        "txt": "a",
        "raw": b"\xff\xd8\xff",
    }
    assert decoder.config()["image_decode"] is None

    class Raw(DefaultTaskEncoder):
        pass

    Raw.decoder = decoder
    loader = get_loader(train_dataset(data, batch_size=2, task_encoder=Raw()))
    batch = next(iter(loader))
    assert [image[:2] for image in batch.image] == [b"\xff\xd8"] * 2
    loader.close()


@pytest.mark.parametrize("settings", [{"defer_images": True}, {"image_target": 8}])
def test_bytes_take_no_settings_of_images(settings: dict[str, Any]):
    with pytest.raises(ConfigurationError, match="leaves images as bytes"):
        SampleDecoder(image_decode=None, **settings)


# Quarantine files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["hello\nworld\n", "no line end", '{"a": 1}\n', "[1]\n", "3\n"])
def test_a_file_that_is_no_quarantine_file_is_refused(tmp_path: Path, content: str):
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(MetadataError, match=r"notes\.txt: not a quarantine file"):
        read_quarantine(file)
    assert "not a quarantine file" in refusal_of("quarantine", "show", file)


@pytest.mark.parametrize("content", ["", '{"dataset": "a", "shar'])
def test_a_quarantine_file_may_be_empty_or_cut_off(tmp_path: Path, content: str):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    assert read_quarantine(file) == []
    assert energon("quarantine", "show", file).output == "No sample failed.\n"


# Storage -------------------------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server that ignores Range requests, as Python's own does, and writes no log."""

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def served(texts: Path) -> Iterator[str]:
    """Return the URL of the dataset."""

    def handler(*arguments: Any) -> Quiet:
        return Quiet(*arguments, directory=str(texts.parent))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/texts"
        server.shutdown()
        thread.join()


def test_a_server_without_ranges_is_named_as_such(served: str):
    store = open_store(served)
    with pytest.raises(StorageError) as caught:
        store.read_range("train/shard_000.tar", 512, 512)
    assert "expected 512 bytes at offset 512, got 20480: the server ignores Range requests" in str(caught.value)
    for command in (["info"], ["plan", "--steps", 2, "--batch-size", 2]):
        assert served in output_of(command[0], served, *command[1:])
    result = energon("plan", f"{served}/train/shard_000.tar", "--steps", 2, "--batch-size", 2)
    assert "found another file. For a tar, give the folder" in result.output
    with pytest.raises(DatasetNotFoundError, match="no such folder"):
        open_store(f"{served}/nothing").check_root()


class Odd(AbstractFileSystem):
    """A file system with errors of its own, as those of aiohttp and of the Hugging Face hub are."""

    protocol = "odd"
    cachable = False

    def info(self, path: str, **_: Any) -> Any:
        raise LookupError("no such thing as a folder")

    cat_file = find = isfile = isdir = makedirs = pipe_file = put_file = size = info


def test_errors_of_a_file_system_are_named(tmp_path: Path):
    fsspec.register_implementation("odd", Odd, clobber=True)
    store = open_store("odd://bucket/data")
    calls = [
        (store.check_root, (), ""),
        (store.size, ("a",), "/a"),
        (store.exists, ("a",), "/a"),
        (store.read, ("a",), "/a"),
        (store.read_range, ("a", 0, 1), "/a"),
        (store.list, (), ""),
        (store.write, ("a", b""), "/a"),
        (store.put_file, (str(tmp_path), "a"), "/a"),
        (store.delete, ("a",), "/a"),
    ]
    for call, arguments, name in calls:
        with pytest.raises(StorageError, match=f"^odd://bucket/data{name}: cannot .*: LookupError: no such thing"):
            call(*arguments)
    assert refusal_of("info", "odd://bucket/data").startswith("Error: odd://bucket/data")


# The command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["inof"], "No such command 'inof'. Did you mean 'info'?"),
        (["quarantine", "shwo"], "No such command 'shwo'. Did you mean 'show'?"),
        (["checkpoint", "dif"], "No such command 'dif'. Did you mean 'diff'?"),
        (["xyzzy"], "No such command 'xyzzy'. Known commands: analyze-debug, bench, checkpoint, columns"),
    ],
)
def test_an_unknown_command_names_the_nearest(arguments: list[str], hint: str):
    assert hint in refusal_of(*arguments, code=2)


def test_words_of_hints_and_numbers() -> None:
    hints = {"batch_sise": " Did you mean 'batch_size'?", 7: "", "xyzzy": "", "": "", "path": " Did you mean 'path'?"}
    assert {name: did_you_mean(name, ("batch_size", "path")) for name in hints} == hints
    assert [count_of(n, "shard") for n in (0, 1, 2, 1000)] == ["0 shards", "1 shard", "2 shards", "1,000 shards"]
    shown = {None: "-", 0.0: "0.00", 598 / 600: "0.997", 1.0: "1.00", 602 / 600: "1.003", 0.5: "0.50", 1e-3: "0.001"}
    shown |= {2 - 1e-5: "1.999990", 1234.25: "1,234.25"}  # an unfinished epoch is told from a whole one
    assert {value: epochs(value) for value in shown} == shown


def test_what_prepared_a_dataset_is_named(whole: Path, fixtures: Path):
    ours = energon("info", whole).output
    assert f"prepared by:  energon_bridge {__version__} (format of energon 7.4.1)\n" in ours
    assert "prepared by:  energon 7.4.1\n" in energon("info", fixtures / "captioning").output
    assert prepared_by(None) == "unknown"


# Microbatches --------------------------------------------------------------------------------------------------------


class Forgetful(DefaultTaskEncoder):
    """Delivers batches without keys, and none alike."""

    batches = 0

    def encode_batch(self, batch: Any) -> dict[str, Any]:
        type(self).batches += 1
        return {"text": batch.text, "number": self.batches}


def test_a_microbatch_without_keys_is_named_by_its_samples(whole: Path):
    def make() -> Any:
        return get_loader(train_dataset(whole, batch_size=2, task_encoder=Forgetful()))

    loader = make()
    keys = [next(iter(loader))["text"] for _ in range(2)][1]
    numbers = [int(text.removeprefix("text ")) for text in keys]
    with pytest.raises(ResumeMismatchError, match="microbatch 1") as caught:
        verify_resume(make, 4)
    shards = [f"shard train/shard_00{number // 10}.tar, sample {number}, key '{number:05d}'" for number in numbers]
    assert f"microbatch 1 ({whole}: {shards[0]} (parts txt); " in str(caught.value)
    assert f"key '{numbers[1]:05d}') differs in 'number'" in str(caught.value)
    loader.close()


def test_restore_keys_are_described(whole: Path):
    loader = get_loader(train_dataset(whole, batch_size=2))
    key = next(iter(loader)).__restore_key__
    (identity, index, *_), _ = key[3]
    assert loader.describe_restore_key(key[3][0]).startswith(f"{whole}: shard train/shard_00{index // 10}.tar, sample")
    assert loader.describe_restore_key(key).count("key '") == 2
    packed = ("Batch", 0, 0, [("Pack", 0, [key[3][0]] * 12)])
    assert loader.describe_restore_key(packed).endswith("; and 4 more")
    assert "another dataset (identity 'other')" in loader.describe_restore_key(("other", 1, 0, 0))
    with pytest.raises(LookupError, match=f"sample 1 belongs to a dataset .* does not read, .* It reads {whole}"):
        loader.restore_sample(("other", 1, 0, 0))
    for wrong in ((), (1, 2), ("Batch",), (identity, "a", 0, 0)):
        with pytest.raises(LookupError, match="not a restore key of this package: expected"):
            loader.restore_sample(wrong)
    loader.close()


# What newcomers do ---------------------------------------------------------------------------------------------------


def test_a_folder_of_pictures_is_pointed_to_convert(tmp_path: Path):
    (tmp_path / "photo.png").write_bytes(b"")
    for command in ("info", "lint", "preview"):
        assert f"Run `energon prepare {tmp_path}` if it holds tars, or `energon convert {tmp_path} OUT`" in refusal_of(
            command, tmp_path
        )


def test_arguments_of_the_worker_config_are_pointed_there(texts: Path):
    with pytest.raises(UnknownArgumentError, match=r"worker_config=WorkerConfig\(num_workers=…\)"):
        get_train_dataset(texts, batch_size=2, num_workers=2)


@pytest.mark.parametrize("name", ["shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"])
def test_arguments_of_a_dataloader_are_told_our_word(texts: Path, name: str):
    assert name in inspect.signature(torch.utils.data.DataLoader).parameters
    words = re.escape(DATALOADER_WORDS[name])
    dataset = get_train_dataset(texts, batch_size=2)
    for call in (partial(get_train_dataset, texts, batch_size=2), partial(get_val_dataset, texts, batch_size=2)):
        with pytest.raises(UnknownArgumentError, match=f"takes no argument '{name}'. {words}"):
            call(**{name: True})
    for make in (get_loader, get_savable_loader):
        with pytest.raises(UnknownArgumentError, match=f"^{make.__name__} takes no argument '{name}'. {words}"):
            make(dataset, **{name: True})
    with pytest.raises(UnknownArgumentError, match=f"has no argument '{name}'. {words}"):
        EnergonMultiModalDataModule(texts, None, None, micro_batch_size=2, **{name: True})


def test_the_words_for_a_dataloader_name_what_there_is():
    known = {name for get in (get_train_dataset, get_val_dataset) for name in inspect.signature(get).parameters}
    named = {name for words in DATALOADER_WORDS.values() for name in re.findall(r"(\w+)=", words)}
    assert len(named) >= 5
    assert named <= known


def test_a_batch_size_of_a_loader_is_one_of_the_dataset(texts: Path):
    with pytest.raises(UnknownArgumentError, match=r"get_train_dataset\(…, batch_size=…\)"):
        get_loader(get_train_dataset(texts, batch_size=2), batch_size=4)


def test_an_endless_loop_says_once_that_it_goes_on(texts: Path, caplog: pytest.LogCaptureFixture):
    _say_endless.cache_clear()
    said = []
    for settings in ({"repeat": False}, {"virtual_epoch_length": 3}, {}, {}):
        loader = get_loader(train_dataset(texts, batch_size=2, **settings))
        for _ in islice(loader, 2 * len(loader) + 1):
            pass
        loader.close()
        said.append(sum("the stream goes on" in record.message for record in caplog.records))
    assert said == [0, 0, 1, 1]


def test_a_part_of_the_split_that_gets_no_sample_is_named(tmp_path: Path):
    source = tmp_path / "photos"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text("a caption")
        Image.new("RGB", (8, 8)).save(source / f"{number}.png")
    output = energon("convert", source, tmp_path / "few", "--split-ratio", "9,1,0").output
    assert "val: no samples, because its share is too small." in output
    assert "test: no" not in output
    assert "no samples" not in energon("convert", source, tmp_path / "all", "--split-ratio", "1,0,0").output


def test_a_part_of_the_split_that_gets_no_shard_is_named(tmp_path: Path):
    for number in range(4):
        write_shard(tmp_path / f"{number}.tar", {str(number): {"txt": b"a text"}})
    command = ["prepare", tmp_path, "--non-interactive", "--sample-type", "TextSample"]
    command += ["--field-map", '{"text": "txt"}']
    few = energon(*command, "--split-ratio", "8,1,1").output
    assert "val: empty, because its share of 4 shards is less than one." in few
    assert "empty" not in energon(*command, "--split-ratio", "3,1,0", "--force-overwrite").output

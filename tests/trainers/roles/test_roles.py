"""Roles: what language ranks and encoder ranks get is what a run on one grid gets, cut; on any sizes, over any stop."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import signal
import tarfile
from bisect import bisect
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import talks
import torch
from grids import (
    NUM_LANES,
    assert_same_run,
    delivered,
    media_of,
    note_decoded,
    pictures_dataset,
    plain,
    reads_counted,
    role_loader,
)
from made import made_once
from pictures import noise
from PIL import Image
from workers import worker_pids

pytest.importorskip("transformers")

from families import encoder_of
from processors import template_of, tiny_processor

from energon_bridge import (
    Cooker,
    ErrorPolicy,
    SampleDecoder,
    SkipSample,
    WorkerConfig,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.errors import ConfigurationError, DecodeError
from energon_bridge.core.format.tar import open_sample
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.storage import ByteRange, LocalStore
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.conversations.sequences import join_visual
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard
from energon_bridge.trainers.roles import make_roles
from energon_bridge.trainers.roles.encoding import cut

data = made_once(pictures_dataset)
SIZES = [{"language": 4, "vision": 2}, {"language": 2, "vision": 4}, {"language": 3, "vision": 3}]
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=NUM_LANES)


class Skipping(ChatTemplateTaskEncoder):
    """Leaves out some samples by chance."""

    cookers = (Cooker(cook_conversation),)

    def preencode_sample(self, sample: Any) -> Any:
        if torch.rand(()) < 0.1:
            raise SkipSample
        return super().preencode_sample(sample)


class Plain(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook_conversation),)


def task_encoder(kind: type = Skipping, seq_length: int = 600) -> ChatTemplateTaskEncoder:
    known = encoder_of("qwen2_5_vl", max_pixels=120 * 120)
    return kind(known.tokenizer, known.family, ChatConfig(seq_length=seq_length))


def dataset_of(data: Path, **options: Any) -> DatasetSpec:
    encoder = options.pop("task_encoder", None) or task_encoder()
    batch_size = options.pop("batch_size", 1 if "packing_buffer_size" in options else 2)
    return get_train_dataset(data, batch_size=batch_size, task_encoder=encoder, worker_config=CONFIG, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packs": {"packing_buffer_size": 12},
    "by length": {"max_tokens_per_microbatch": 1300, "packing_buffer_size": 12},
}


@cache
def whole(data: Path, kind: str, ranks: int) -> list[list[Any]]:
    return plain(dataset_of(data, **OPTIONS[kind]), ranks, 8)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
@pytest.mark.parametrize("kind", OPTIONS)
def test_all_grids_get_what_one_grid_gets(data: Path, kind: str, sizes: dict[str, int]) -> None:
    """Samples are left out by chance, and where pictures do not fit; some rows and microbatches have no picture."""
    expected = whole(data, kind, sizes["language"])
    found, _ = delivered(dataset_of(data, **OPTIONS[kind]), sizes, 8)
    assert_same_run(sizes, 8, expected, found)
    media = {count for rank in found["vision"] for step in rank for count in step.num_media}
    assert 0 in media or kind != "rows"
    assert max(media) > 1


@pytest.fixture(scope="session")
def talks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talks")
    talks.write_talks(folder)
    return folder


@pytest.mark.parametrize("media", ["video", "sound", "image"])
def test_videos_sounds_and_any_processor(talks_folder: Path, media: str) -> None:
    if (missing := talks.missing(media)) is not None:
        pytest.skip(f"needs {missing}")
    encoder = talks.talk_encoder(talks_folder, media, (), False, (Cooker(cook_conversation),))
    dataset = dataset_of(talks_folder / "talks" / media, task_encoder=encoder)
    name = "audio" if media == "sound" else "vision"
    for sizes in ({"language": 4, name: 2}, {"language": 2, name: 4}):
        found, _ = delivered(dataset, sizes, 3)
        assert_same_run(sizes, 3, plain(dataset, sizes["language"], 3), found)


@pytest.fixture(scope="session")
def seen_and_heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with a picture, a sound, both or none."""
    folder = tmp_path_factory.mktemp("both")
    rng = random.Random(3)
    samples = {}
    for number in range(12):
        kinds = [["image"], ["audio"], ["image", "audio"], []][number % 4]
        media = {f"{kind}.{ {'image': 'png', 'audio': 'wav'}[kind] }": talks._medium(rng, kind, []) for kind in kinds}
        asked = {"role": "user", "content": "".join(f"<{kind}>" for kind in kinds) + "what?"}
        turns = [asked, {"role": "assistant", "content": "a tone " * (1 + number)}]
        samples[f"{number:03d}"] = media | {"json": json.dumps({"messages": turns}).encode()}
    (folder / "train").mkdir()
    write_shard(folder / "train" / "0.tar", samples)
    yaml = render_dataset_yaml("CrudeWebdataset", None)
    prepare_dataset(folder, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_two_encoders_get_their_kinds_of_media(seen_and_heard: Path) -> None:
    try:
        processor = tiny_processor("Gemma3nProcessor")
    except ImportError as error:
        pytest.skip(str(error))
    config = ChatConfig(chat_template=template_of(processor), seq_length=4000)
    family = ChatTemplateTaskEncoder.for_processor(processor, config).family
    assert family is not None
    dataset = dataset_of(seen_and_heard, task_encoder=Plain(processor.tokenizer, family, config))
    sizes = {"language": 2, "vision": 1, "audio": 2}
    found, _ = delivered(dataset, sizes, 3)
    whole = plain(dataset, 2, 3)
    lanes = [[media_of([batch]) for batch in rank] for rank in whole]
    for name, own in (("vision", {"pixel_values"}), ("audio", {"input_features", "input_features_mask"})):
        wanted = [{key: one for key, one in batch.items() if key in own} for rank in lanes for batch in rank]
        served = 2 // sizes[name]
        for rank, steps in enumerate(found[name]):
            for step, got in enumerate(steps):
                of_lanes = [wanted[(rank * served + lane) * 3 + step] for lane in range(served)]
                joined = join_visual(of_lanes, [0] * served, count=1) if any(of_lanes) else {}
                assert got.visual_inputs.keys() == joined.keys()
                assert all(torch.equal(got.visual_inputs[key], joined[key]) for key in joined)
    assert {key for rank in lanes for batch in rank for key in batch} == {
        *("pixel_values", "input_features", "input_features_mask")
    }
    one_grid = {"language": 2, "media": 1}
    assert_same_run(one_grid, 3, whole, delivered(dataset, one_grid, 3)[0])


@pytest.mark.parametrize("kind", ["rows", "packs"])
def test_a_run_goes_on_with_other_grids(data: Path, kind: str) -> None:
    """The state of the language ranks moves encoders of any number to where the run stands, also in workers."""
    dataset = dataset_of(data, **OPTIONS[kind])
    expected = whole(data, kind, 4)
    sizes = {"language": 4, "vision": 2}
    _, states = delivered(dataset, sizes, 3)
    for new, workers in (({"language": 2, "vision": 4}, 0), ({"language": 4, "vision": 1}, 2)):
        again, _ = delivered(dataset, new, 4, state=states, workers=workers)
        ranks = new["language"]
        flat = [batch for row in zip(*expected, strict=True) for batch in row][12 : 12 + 4 * ranks]
        after = [flat[rank::ranks] for rank in range(ranks)]
        assert_same_run(new, 4, after, again)


def test_an_encoder_gets_several_microbatches_at_once(data: Path) -> None:
    dataset = dataset_of(data)
    sizes = {"language": 4, "vision": 2}
    one, _ = delivered(dataset, sizes, 6)
    three, _ = delivered(dataset, sizes, 6, macro=3)
    for rank in range(2):
        assert len(three["vision"][rank]) == 2
        for number, joined in enumerate(three["vision"][rank]):
            steps = one["vision"][rank][3 * number : 3 * number + 3]
            pixels = [step.visual_inputs["pixel_values"] for step in steps if step.visual_inputs]
            assert torch.equal(joined.visual_inputs["pixel_values"], torch.cat(pixels))
            assert joined.num_tokens == [count for step in steps for count in step.num_tokens]


def test_validation_ends_on_all_grids_alike(data: Path) -> None:
    dataset = get_val_dataset(data, batch_size=2, task_encoder=task_encoder(), worker_config=CONFIG)
    sizes = {"language": 4, "vision": 2}
    expected = plain(dataset, 4, 99)
    found, _ = delivered(dataset, sizes, 99)
    assert [len(rank) for ranks in found.values() for rank in ranks] == [3] * 6
    assert_same_run(sizes, 3, expected, found)


@pytest.mark.parametrize("name", ["language", "vision"])
def test_a_worker_that_dies_changes_nothing(data: Path, name: str) -> None:
    dataset = dataset_of(data)
    sizes = {"language": 4, "vision": 2}
    expected, _ = delivered(dataset, sizes, 8)
    loader = role_loader(dataset, name, 1, sizes, workers=2)
    found = []
    for step in islice(loader, 8):
        found.append(step[name])
        if len(found) == 3:
            os.kill(worker_pids()[0], signal.SIGKILL)
    loader.close()
    assert [batch.__restore_key__ for batch in found] == [batch.__restore_key__ for batch in expected[name][1]]


# Counters ------------------------------------------------------------------------------------------------------------


def test_each_picture_is_read_and_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And language ranks read less than a tenth of what one grid does, encoder ranks what their samples are."""
    data = pictures_dataset(tmp_path, (12,), side=640)
    with tarfile.open(data / "train" / "0.tar") as tar:
        members = tar.getmembers()
    starts = [member.offset for member in members]
    bytes_of: Counter[str] = Counter()
    for member in members:
        bytes_of[member.name.split(".")[0]] += 512 + -(-member.size // 512) * 512
    dataset = dataset_of(data, task_encoder=task_encoder(seq_length=4000))
    decoded = note_decoded(monkeypatch)
    with reads_counted() as today:
        media = sum(sum(batch.num_images) for rank in plain(dataset, 4, 3) for batch in rank)
    of_all = sum(length for _, length in today)
    of_one_grid = sorted(decoded)
    assert len(of_one_grid) >= media > 10
    for sizes in ({"language": 4, "vision": 2}, {"language": 4, "vision": 4}):
        decoded.clear()
        pictures = by_encoders = 0
        for name, size in sizes.items():
            for rank in range(size):
                loader = role_loader(dataset, name, rank, sizes)
                before = len(decoded)
                with reads_counted() as read:
                    steps = [step[name] for step in islice(loader, 3)]
                loader.close()
                if name == "language":
                    assert len(decoded) == before
                    assert 0 < sum(length for _, length in read) * 4 < 0.05 * of_all
                else:
                    served = [key.split("/")[-1] for step in steps for key in step.__key__]
                    named = [(members[bisect(starts, place) - 1].name, length) for place, length in read]
                    read_here = sum(
                        length for member, length in named if member.split(".")[0] in served
                    )  # not texts ahead
                    assert read_here < 1.01 * sum(bytes_of[key] for key in served)
                    by_encoders += read_here
                    pictures += sum(sum(step.num_media) for step in steps)
        assert pictures == media
        assert by_encoders < 1.01 * of_all
        assert len(decoded) == media


def test_encoder_ranks_read_equal_parts_of_samples_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly one in D_e of what one grid reads; language ranks, all texts and 256 bytes of each picture."""
    (tmp_path / "train").mkdir()
    turns = [{"role": "user", "content": "<image>what is it?"}, {"role": "assistant", "content": "a color"}]
    text = json.dumps({"messages": turns}).encode().ljust(512)
    samples = {f"{number:02d}": {"jpg": small_jpeg().ljust(15_360, b"\0"), "json": text} for number in range(48)}
    write_shard(tmp_path / "train" / "0.tar", samples)
    yaml = render_dataset_yaml("CrudeWebdataset", None)
    prepare_dataset(tmp_path, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    known = encoder_of("qwen2_vl", max_pixels=64 * 64)
    encoder = Plain(known.tokenizer, known.family, ChatConfig(seq_length=400))
    dataset = get_train_dataset(tmp_path, batch_size=2, task_encoder=encoder, worker_config=CONFIG)
    of_sample = 2 * 512 + 512 + 15_360
    read: Counter[int] = Counter()
    read_range = LocalStore.read_range

    def counting(store: Any, rel: str, offset: int, length: int) -> bytes:
        read[offset // of_sample] += length
        return read_range(store, rel, offset, length)

    monkeypatch.setattr(LocalStore, "read_range", counting)
    sizes = {"language": 8, "vision": 4}
    for name, size in sizes.items():
        for rank in range(size):
            read.clear()
            loader = role_loader(dataset, name, rank, sizes)
            (step,) = islice(loader, 1)
            loader.close()
            own = [int(key.split("/")[-1]) for key in step[name].__key__]  # others may be read ahead
            assert len(set(own)) == (4 if name == "vision" else 2)
            assert {read[sample] for sample in own} == {of_sample if name == "vision" else 2 * 512 + 512 + 256}


def small_jpeg() -> bytes:
    """Return what cameras put into EXIF."""
    stream = io.BytesIO()
    noise(16, 12, 1).save(stream, format="JPEG")
    return stream.getvalue()


FORMS: dict[str, dict[str, Any]] = {
    "jpg": {"format": "JPEG"},
    "png": {"format": "PNG"},
    "gif": {"format": "GIF"},
    "bmp": {"format": "BMP"},
    "webp": {"format": "WEBP"},
    "lossless.webp": {"format": "WEBP", "lossless": True},
    "canvas.webp": {"format": "WEBP", "exif": b"Exif" + bytes(2000)},
    "exif.jpg": {"format": "JPEG", "exif": b"Exif\x00\x00" + small_jpeg() + bytes(30_000)},
    "profiles.jpg": {"format": "JPEG", "icc_profile": bytes(70_000), "comment": b"x" * 300},
    "far.jpg": {"format": "JPEG", "exif": b"Exif\x00\x00" + bytes(9000), "icc_profile": bytes(3144)},
}
READS = {"exif.jpg": 2, "profiles.jpg": 4, "far.jpg": 2}  # the beginning, and what is behind each long segment


def test_what_language_ranks_read_takes_a_request_for_each_member(tmp_path: Path) -> None:
    """Of a picture, its header in the tar and 256 bytes; of a short text, header and all."""
    write_shard(tmp_path / "0.tar", {"a": {"json": b"{}", "jpg": b"\xff" * 15_000, "txt": b"x" * 1000}})
    read: list[int] = []

    class Counting(LocalStore):
        def read_range(self, rel: str, offset: int, length: int) -> bytes:
            read.append(length)
            return super().read_range(rel, offset, length)

    size = 3 * 512 + 512 + 15_360 + 1024
    sample = ByteRange(store=Counting(tmp_path), rel="0.tar", offset=0, size=size)
    key, parts = open_sample(sample, keep=lambda name: name == "jpg")
    assert (key, parts["json"], parts["txt"]) == ("a", b"{}", b"x" * 1000)
    assert read == [768, 768, 768, 1000 - 256]
    jpg = parts["jpg"]
    assert isinstance(jpg, ByteRange)
    assert jpg.read(256) == b"\xff" * 256
    assert len(read) == 4
    assert jpg.read() == b"\xff" * 15_000


@pytest.mark.parametrize("name", FORMS)
def test_the_size_of_an_image_is_read_from_its_beginning(tmp_path: Path, name: str) -> None:
    image = noise(817, 603, 1)
    image.save(tmp_path / name, **FORMS[name])
    size = (tmp_path / name).stat().st_size
    read: list[int] = []

    class Counting(LocalStore):
        def read_range(self, rel: str, offset: int, length: int) -> bytes:
            read.append(length)
            return super().read_range(rel, offset, length)

    if name == "far.jpg":  # a request costs more than 4 KiB
        Counting.read_all = None  # type: ignore[attr-defined]
    place = ByteRange(store=Counting(tmp_path), rel=name, offset=0, size=size)
    decoder = SampleDecoder(image_decode="pilrgb", defer_images=True, unread_media=True)
    deferred = decoder.decode(name, place)
    assert deferred.size == image.size
    reads = READS.get(name, 2 if name == "gif" else 1)  # a palette is longer
    assert len(read) == reads
    assert sum(read) <= {"gif": 1 << 10, "far.jpg": 256 + 4096}.get(name, reads << 8)
    del read[1:]
    with Image.open(tmp_path / name) as opened:
        assert np.array_equal(np.array(deferred.get()), np.array(opened.convert("RGB")))
    assert sum(read) == (size if name != "gif" else size - 768)  # nothing of the beginning twice
    most = SampleDecoder(image_decode="pilrgb", defer_images=True, unread_media=True, max_pixels=1000)
    with pytest.raises(DecodeError, match=str(image.width)):
        _ = most.decode(name, place).size


# What goes wrong -----------------------------------------------------------------------------------------------------


def damage(data: Path) -> None:
    """Overwrite the inside of each picture of the first shard, and leave its header."""
    shard = data / "train" / "0.tar"
    content = bytearray(shard.read_bytes())
    place = 0
    while (place := content.find(b"IDAT", place + 1)) > 0:
        content[place + 40 : place + 400] = bytes(360)
    shard.write_bytes(content)


def test_a_picture_that_does_not_decode_is_blank_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = pictures_dataset(tmp_path, (12,))
    damage(data)
    sizes = {"language": 2, "vision": 1}
    dataset = dataset_of(data, checksums="never", task_encoder=task_encoder(seq_length=2000))
    language, _ = delivered(dataset, {"language": 2, "vision": 1}, 4)
    loader = role_loader(dataset, "vision", 0, sizes)
    with caplog.at_level(logging.WARNING):
        steps = [step["vision"] for step in islice(loader, 4)]
    assert loader.metrics()["blank_media"] == loader.blanks > 0
    assert "delivered blank" in caplog.text
    assert "cannot be decoded" in caplog.text
    for number, step in enumerate(steps):
        lanes = [language["language"][rank][number] for rank in range(2)]
        assert [lane.__key__ for lane in lanes] == [step.__key__[:2], step.__key__[2:]]
        grids = [lane.visual_inputs["image_grid_thw"] for lane in lanes if lane.visual_inputs]
        if grids:
            assert torch.equal(step.visual_inputs["image_grid_thw"], torch.cat(grids))
    loader.close()
    strict = role_loader(replace_policy(dataset, ErrorPolicy(on_error="raise")), "vision", 0, sizes)
    with pytest.raises(DecodeError, match="the language ranks have its tokens"):
        list(islice(strict, 4))
    strict.close()


def replace_policy(dataset: DatasetSpec, policy: ErrorPolicy) -> DatasetSpec:
    return dataset.with_settings(error_policy=policy)


class Posting(Skipping):
    def postencode_sample(self, sample: Any) -> Any:
        return super().postencode_sample(sample)


def test_what_cannot_be_told_by_headers_is_refused(data: Path) -> None:
    sizes: dict[str, Any] = {"language": (0, 2), "vision": (None, 2)}
    roles = make_roles(grids=sizes)
    with pytest.raises(ConfigurationError, match="postencode_sample of its own"):
        roles.loader(dataset_of(data, task_encoder=task_encoder(Posting)))
    known = encoder_of("qwen2_vl")
    other = MultiModalTaskEncoder(known.tokenizer, known.family.image_processor, image_tokens_per_image=4)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="counts the tokens of media by their headers"):
        roles.loader(dataset_of(data, task_encoder=other))
    known = encoder_of("qwen2_vl", ChatConfig(seq_length=600, blank_media="image"))
    with pytest.raises(ConfigurationError, match="blank_media"):
        roles.loader(dataset_of(data, task_encoder=Skipping(known.tokenizer, known.family, known.config)))
    with pytest.raises(ConfigurationError, match="damaged_shards"):
        roles.loader(replace_policy(dataset_of(data), ErrorPolicy(damaged_shards="skip")))
    with pytest.raises(ConfigurationError, match="do not divide"):
        role_loader(dataset_of(data), "vision", 0, {"language": 5, "vision": 1})


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        ({"vision": (0, 2)}, "must have 'language'"),
        ({"language": (0, 2)}, "at least one of audio, media, vision"),
        ({"language": (0, 2), "eyes": (0, 2)}, "'eyes'"),
        ({"language": (0, 4), "vision": (0, 3)}, "one number must divide"),
        ({"language": (2, 2), "vision": (0, 2)}, "language has rank 2 of 2"),
        ({"language": (0, 2), "vision": None}, r"\(None, size\)"),
        ({"language": (0, 2), "vision": (0, 2), "media": (0, 2)}, "two encoders"),
    ],
)
def test_grids_that_do_not_fit_are_refused(grids: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_roles(grids=grids)


def test_media_are_cut_into_runs_of_level_sums() -> None:
    assert cut([4, 4, 4, 4], 2) == [0, 0, 1, 1]
    assert cut([9, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert cut([5], 3) == [1]
    assert cut([], 2) == []

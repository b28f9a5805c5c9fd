"""Videos and sound through the whole pipeline: decoders, packing, resuming on other topologies, stores, metadata."""

from __future__ import annotations

import os
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import write_sound, write_video
from crude import prepared
from engine import config_of, counts_of, deliver, loaders_of, train_dataset
from keyed import write_mix

import energon_bridge.core.stream.reader as reader_module
from energon_bridge import (
    Cooker,
    DecodeFileStore,
    DefaultTaskEncoder,
    PrimaryFileStore,
    SampleDecoder,
    SystemFileStore,
    TextSample,
    VidQASample,
    basic_sample_keys,
    cooker,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_bridge.core.errors import DecodeError
from energon_bridge.core.format.media import AVMetadata
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.stores import WebdatasetFileStore
from energon_bridge.models.av import AVData, AVDecoder, get_single_frames_uniform
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.check.media import MediaFilter, prepare_media
from energon_bridge.tools.testing import write_shard

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
NUM_VIDEOS = 14
SHARDS = (5, 2, 7)
TOPOLOGIES = [(1, 2), (2, 0), (3, 1), (6, 2)]
LANES: dict[str, Any] = {"num_lanes": 6}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("files")
    kinds = [("mp4", {"options": {"x264-params": "bframes=2:log-level=0"}}), ("mkv", {"varying": True})]
    made = []
    for number in range(NUM_VIDEOS):
        extension, settings = kinds[number % 2]
        path = folder / f"{number}.{extension}"
        made.append(write_video(path, frames=5 + number, size=(16, 16), **settings).read_bytes())
    return made


@pytest.fixture(scope="module")
def data(videos: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("videos"), videos)


def write_dataset(folder: Path, videos: list[bytes]) -> Path:
    (folder / "train").mkdir(parents=True)
    numbers = iter(range(len(videos)))
    for shard, count in enumerate(SHARDS):
        samples = {
            f"{number:03d}": {"mp4": videos[number], "txt": b"what is it?", "json": b'["number %d"]' % number}
            for number in islice(numbers, count)
        }
        write_shard(folder / "train" / f"{shard}.tar", samples)
    fields = {"video": "mp4", "context": "txt", "answers": "json"}
    yaml = render_dataset_yaml("VidQASample", fields)
    prepare_dataset(folder, split=parse_patterns(["train:train/.*"]), dataset_yaml=yaml)
    return folder


class VideoPacking(DefaultTaskEncoder):
    """Packs videos by how many frames they will give, and decodes those of packs that are delivered."""

    def preencode_sample(self, sample: VidQASample) -> Any:
        _, frames = sample.video.get_video_duration(get_frame_count=True)
        assert frames == 5 + int(sample.__key__)
        sample.context = str(min(frames // 3, 1 + random.randrange(3)))
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = []
        for sample in samples[: 2 * len(samples) // 3]:
            fitting = (pack for pack in packs if sum(int(one.context) for one in (*pack, sample)) <= 6)
            pack = next(fitting, None)
            if pack is None:
                packs.append([sample])
            else:
                pack.append(sample)
        random.shuffle(packs)
        return packs

    def postencode_sample(self, sample: Any) -> Any:
        sample.video = get_single_frames_uniform(sample.video, int(sample.context), video_out_frame_size=(8, 8))
        return sample

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        context = " ".join(sample.context for sample in samples)
        return VidQASample.derive_from(samples[0], video=torch.cat([one.video for one in samples]), context=context)


def packed(data: Path, **kwargs: Any) -> Any:
    return train_dataset(data, task_encoder=VideoPacking(), packing_buffer_size=9, **kwargs)


@pytest.fixture(scope="module")
def reference(data: Path) -> list[str]:
    return deliver(loaders_of(packed(data), 1, 0, **LANES), 36).digests


# Packing and resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "num_workers"), TOPOLOGIES)
def test_packed_videos_resume_on_every_topology(
    data: Path, reference: list[str], world_size: int, num_workers: int
) -> None:
    steps = 12 // world_size
    delivered = deliver(loaders_of(packed(data), world_size, num_workers, **LANES), steps, [steps - 1])
    assert delivered.digests == reference[: len(delivered.digests)]
    state = delivered.states[steps - 1]
    done = state[0]["microbatches"]
    for other, workers in TOPOLOGIES if LONG else random.Random(world_size).sample(TOPOLOGIES, 2):
        resumed = deliver(loaders_of(packed(data), other, workers, state=state, **LANES), 12 // other)
        assert resumed.digests == reference[done : done + len(resumed.digests)]


def test_decoders_cross_from_workers(data: Path) -> None:
    spec = get_train_dataset(data, worker_config=config_of(1, 2), batch_size=2, task_encoder=DefaultTaskEncoder())
    loader = get_savable_loader(spec)
    for batch in islice(loader, 4):
        for key, video in zip(batch.__key__, batch.video, strict=True):
            assert isinstance(video, AVDecoder)
            assert len(video.get_video().video_clips[0]) == 5 + int(key)
    loader.close()


def test_a_damaged_video_costs_its_sample_and_is_named(
    videos: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_dataset(tmp_path, [b"no video" if number == 3 else one for number, one in enumerate(videos)])
    (loader,) = loaders_of(packed(folder), 1, 0, **LANES)
    keys = [key for batch in islice(loader, 8) for pack in batch.__restore_key__[3] for key in pack[2]]
    assert {key[1] for key in keys} == set(range(NUM_VIDEOS)) - {3}
    assert counts_of(loader.save_state_rank())["errors"] > 0
    text = caplog.text
    assert all(one in text for one in ("003", "part 'mp4' cannot be opened as video or sound", "preencode_sample"))


# Samples that are not read before they are needed --------------------------------------------------------------------


def test_large_samples_are_not_read(data: Path, reference: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is the same; what is read are the headers of the tar and the packets of the frames."""
    monkeypatch.setattr(SampleDecoder, "unread_from", 1)
    made = []
    original = reader_module.Unread.__init__
    monkeypatch.setattr(reader_module.Unread, "__init__", lambda *of: made.append(of) or original(*of))
    state = deliver(loaders_of(packed(data), 2, 1, **LANES), 5, [5]).states[5]
    assert deliver(loaders_of(packed(data), 1, 0, state=state, **LANES), 6).digests == reference[10:16]
    assert made
    (loader,) = loaders_of(train_dataset(data, task_encoder=DefaultTaskEncoder()), 1, 0)
    batch = next(iter(loader))
    assert batch.answers == [[f"number {int(key)}"] for key in batch.__key__]
    assert not any(isinstance(video.stream, bytes) for video in batch.video)


def test_a_mix_of_small_and_large_samples(videos: list[bytes], tmp_path: Path) -> None:
    large = write_video(tmp_path / "large.mp4", frames=40, size=(256, 256), options={"crf": "1"}).read_bytes()
    assert len(large) > 1 << 20
    folder = write_dataset(tmp_path / "d", [large if number == 6 else one for number, one in enumerate(videos)])
    spec = get_train_dataset(folder, worker_config=config_of(1, 0), batch_size=1, task_encoder=DefaultTaskEncoder())
    seen = {batch.__key__[0]: batch.video[0] for batch in islice(get_savable_loader(spec), 3 * NUM_VIDEOS)}
    assert {key for key, video in seen.items() if not isinstance(video.stream, bytes)} == {"006"}
    assert len(seen["006"].get_video().video_clips[0]) == 40


# Crude data and stores -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sounds")
    for number in range(6):
        write_sound(made / f"{number}.wav", codec="pcm_s16le", rate=8000, seconds=1 + number / 4)
        write_sound(made / f"{number}.mp3", codec="libmp3lame", rate=16000, seconds=1 + number / 4)
    return made


@stateless
@cooker(need_primary=True)
def cook(sample: dict[str, Any], primary: Any, films: Any) -> TextSample:
    first = sample["wav"].get_audio_clips([(0.25, 0.5)])[0][0]
    again = primary.get(".wav", sample).get_audio_clips([(0.25, 0.5)])[0][0]
    assert torch.equal(first, again)
    film = films.get(f"{sample['__key__']}.mp3", sample)
    assert film.stream.size > 0  # not read yet
    return TextSample(
        **basic_sample_keys(sample), text=f"{float(first.abs().sum()):.6f} {film.get_audio_duration():.3f}"
    )


class Cooking(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


def test_sound_in_crude_data_and_in_auxiliary_files(sounds: Path, tmp_path: Path) -> None:
    parts = {str(n): {"wav": (sounds / f"{n}.wav").read_bytes()} for n in range(6)}
    folder = prepared(tmp_path / "crude", parts)
    mix = write_mix(tmp_path / "mix.yaml", train={"path": str(folder), "aux": {"films": f"filesystem://{sounds}"}})
    expected = None
    for world_size, workers in [(1, 0), (2, 2)]:
        spec = train_dataset(mix, task_encoder=Cooking())
        found = deliver(loaders_of(spec, world_size, workers), 12 // world_size).digests
        expected = expected or found
        assert found == expected


def test_stores_give_decoders_that_read_what_is_needed(data: Path, sounds: Path) -> None:
    decoder = SampleDecoder()
    shards = DecodeFileStore(WebdatasetFileStore(data), decoder=decoder)
    video, source = shards["003.mp4"]
    assert video.stream.offset > 0
    assert (source.shard_name, source.index) == ("train/0.tar", "003.mp4")
    assert len(video.get_video().video_clips[0]) == 8
    assert len(PrimaryFileStore(shards, "003").get(".mp4").get_video().video_clips[0]) == 8
    assert shards.get("003.txt") == "what is it?"
    files = DecodeFileStore(SystemFileStore(sounds), decoder=decoder)
    assert files.get("1.wav").get_audio_duration() == 1.25
    whole = DecodeFileStore(SystemFileStore(sounds), decoder=SampleDecoder(av_decode="torch")).get("1.wav")
    assert whole.audio_clips[0].shape == (2, 10000)


# Forms and metadata --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mp4", "a.MP4", "clip.m4v", "mov", "mkv", "webm", "avi"])
def test_forms_of_videos(name: str, videos: list[bytes]) -> None:
    decoder = SampleDecoder().decode(name, videos[0])
    assert isinstance(decoder, AVDecoder)
    assert repr(decoder) == f"AVDecoder(part {name!r}, {len(videos[0])} bytes)"
    whole = SampleDecoder(av_decode="torch", video_decode_audio=True).decode(name, memoryview(videos[0]))
    assert isinstance(whole, AVData)
    assert (whole.video_clips[0].shape, whole.audio_clips) == ((5, 3, 16, 16), [])
    with SampleDecoder(av_decode="pyav").decode(name, videos[0]) as container:
        assert sum(1 for _ in container.decode(video=0)) == 5
    with pytest.raises(DecodeError, match=f"part '{name}' cannot be opened"):
        SampleDecoder(av_decode="torch").decode(name, b"film")


def test_content_is_guessed(videos: list[bytes]) -> None:
    assert SampleDecoder().decode("bin", videos[0]) == videos[0]
    assert isinstance(SampleDecoder(guess_content=True).decode("bin", videos[0]), AVDecoder)


def test_metadata_comes_from_the_index(data: Path, sounds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_media(data, MediaFilter(strategy="EXTENSION"), num_workers=2)
    prepare_media(sounds, MediaFilter(strategy="EXTENSION"))
    monkeypatch.setattr(AVDecoder, "_opened", None)  # nobody opens a file
    found = WebdatasetFileStore(data).get_media_metadata("002.mp4")
    assert found == AVMetadata(video_duration=0.28, video_num_frames=7, video_fps=25.0, video_width=16, video_height=16)
    varying = WebdatasetFileStore(data).get_media_metadata("003.mp4")
    assert isinstance(varying, AVMetadata)
    assert varying.video_num_frames == 8
    expected = AVMetadata(audio_duration=1.5, audio_channels=2, audio_sample_rate=8000, audio_num_samples=12000)
    assert SystemFileStore(sounds).get_media_metadata("2.wav") == expected
    compressed = SystemFileStore(sounds).get_media_metadata("2.mp3")
    assert isinstance(compressed, AVMetadata)
    assert compressed.audio_num_samples == 24000
    assert np.isclose(compressed.audio_duration, 1.5, atol=0.1)

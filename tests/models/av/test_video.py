"""Videos: every frame is the one that decoding the whole file gives, and little of the file is read for it."""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import random
import subprocess
import sys
from bisect import bisect_right
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import HEIGHT, WIDTH, X264, Frame, all_frames, write_video

from energon_bridge.core.errors import ConfigurationError, DecodeError
from energon_bridge.models.av import AVDecoder, get_clips_uniform, get_single_frames_uniform

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
H264 = {"x264-params": X264}
KINDS: dict[str, dict[str, Any]] = {
    "b.mp4": {"options": H264},
    "pyramid.mp4": {"options": {"x264-params": f"{X264}:b-pyramid=normal"}},
    "vfr.mp4": {"options": H264, "varying": True},
    "open-gop.mp4": {"options": {"x264-params": f"{X264}:open-gop=1"}},
    "edit-list.mp4": {"options": H264, "first": -5},
    "late.mp4": {"options": H264, "first": 30},
    "fragments.mp4": {"options": H264, "container": {"movflags": "frag_keyframe+empty_moov"}},
    "front.mov": {"options": H264, "container": {"movflags": "faststart"}},
    "sound.mp4": {"options": H264, "sound": "aac"},
    "b.mkv": {"options": H264},
    "vfr.mkv": {"options": H264, "varying": True},
    "open-gop.mkv": {"options": {"x264-params": f"{X264}:open-gop=1"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime", "g": "20"}},
    "vp8.webm": {
        "codec": "libvpx",
        "varying": True,
        "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "20"},
    },
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "keyint=20:bframes=3:log-level=none"}},
    "mpeg4.avi": {"codec": "mpeg4"},
    "b.avi": {"options": H264},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("videos")
    for name, settings in KINDS.items():
        write_video(made / name, **settings)
    return made


def frames_of(path: Path) -> list[Frame]:
    """Return the frames; those of an AVI with B-frames by their number, for its times are not those of its frames."""
    found = all_frames(path)
    if path.name == "b.avi":
        return [Frame(seconds=Fraction(n, 25), pixels=frame.pixels) for n, frame in enumerate(found)]
    return found


def check(clip: torch.Tensor, expected: list[Frame]) -> None:
    assert clip.dtype == torch.uint8
    assert clip.shape == (len(expected), 3, HEIGHT, WIDTH)
    for got, frame in zip(clip, expected, strict=True):
        np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), frame.pixels)


@pytest.mark.parametrize("name", KINDS)
def test_frames_are_those_of_the_whole_file(name: str, folder: Path) -> None:
    frames = frames_of(folder / name)
    times = [frame.seconds for frame in frames]
    last, choose = len(frames) - 1, random.Random(name)
    with AVDecoder((folder / name).read_bytes()) as decoder:
        whole = decoder.get_video()
        check(whole.video_clips[0], frames)  # none is lost at the end
        assert decoder.get_video_duration(get_frame_count=True)[1] == len(frames)
        for _ in range(12):
            first = choose.randrange(len(frames))
            until = choose.randrange(first, min(first + 5, last + 1))
            ((clip,), ((begin, end),)) = decoder.get_video_clips([(first, until)], "frames")
            check(clip, frames[first : until + 1])
            assert begin == pytest.approx(float(times[first]))
            if until < last:
                assert end == pytest.approx(float(times[until + 1]))
            start = choose.uniform(0, float(times[-1]))
            stop = start + choose.choice([0, 0.05, 0.3])
            ((clip,), ((begin, _),)) = decoder.get_video_clips([(start, stop)])
            shown = max(bisect_right(times, start) - 1, 0)
            check(clip, [frame for n, frame in enumerate(frames) if n == shown or (n > shown and times[n] <= stop)])
            assert begin == pytest.approx(float(times[shown]))
    numbers = [*sorted(choose.sample(range(len(frames)), 12)), *choose.sample(range(len(frames)), 4), last, 0]
    clips, _ = decoder.get_video_clips([(n, n) for n in numbers], "frames")
    check(torch.cat(clips), [frames[n] for n in numbers])
    clips, _ = decoder.get_video_clips([(float(times[n]), float(times[n])) for n in numbers])
    check(torch.cat(clips), [frames[n] for n in numbers])


@pytest.mark.parametrize("name", ["b.mp4", "vfr.mkv", "late.mp4", "vp8.webm"])
def test_uniform_frames_and_clips(name: str, folder: Path) -> None:
    frames = frames_of(folder / name)
    decoder = AVDecoder.open(folder / name)
    found, seconds = get_single_frames_uniform(decoder, 5, return_timestamps=True)
    assert seconds[0] == float(frames[0].seconds)
    assert seconds[-1] == float(frames[-1].seconds)
    assert seconds == sorted(seconds)
    check(found, [next(frame for frame in frames if float(frame.seconds) == one) for one in seconds])
    small = get_single_frames_uniform(decoder, 2, video_out_frame_size=(8, 6))
    assert small.shape == (2, 3, 6, 8)
    clips = get_clips_uniform(decoder, 0.4, 3, request_video=True)
    assert clips.audio_clips == []
    assert [begin for begin, _ in clips.video_timestamps] == sorted(begin for begin, _ in clips.video_timestamps)
    check(clips.video_clips[0], [one for one in frames if one.seconds <= frames[0].seconds + Fraction(4, 10)])


def test_video_with_sound_and_metadata(folder: Path) -> None:
    decoder = AVDecoder.open(folder / "sound.mp4")
    found = decoder.get_metadata()
    size = (found.video_width, found.video_height, found.video_num_frames, found.video_fps, found.video_duration)
    assert size == (WIDTH, HEIGHT, 60, 25.0, 2.4)
    assert (found.audio_channels, found.audio_sample_rate) == (2, 48000)
    assert decoder.get_audio_duration() == pytest.approx(2.4, abs=0.03)
    assert decoder.has_video_stream()
    assert decoder.has_audio_stream()
    assert decoder.get_video_fps() == 25.0
    assert decoder.get_audio_samples_per_second() == 48000
    data = decoder.get_frames(video_decode_audio=True)
    assert (len(data.video_clips[0]), data.audio_clips[0].dtype) == (60, torch.float32)
    assert decoder.get_frames().audio_clips == []
    both = get_clips_uniform(decoder, 0.5, 3, request_video=True, request_audio=True)
    assert [clip.shape for clip in both.audio_clips] == [(2, 24000)] * 3
    assert both.audio_timestamps[1] == pytest.approx((0.95, 1.45), abs=0.02)


def test_a_decoder_can_be_sent_to_another_process(folder: Path) -> None:
    for decoder in (AVDecoder((folder / "b.mp4").read_bytes(), name="mp4"), AVDecoder.open(folder / "b.mp4")):
        other = pickle.loads(pickle.dumps(decoder))
        assert repr(other) == repr(decoder)
        assert torch.equal(other.get_video_clips([(7, 9)], "frames")[0][0], decoder.get_video().video_clips[0][7:10])


# How much is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["long.mp4", "long.mkv", "long.webm"])
def test_eight_frames_of_ten_minutes_read_less_than_a_tenth(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"options": {"preset": "ultrafast", "bf": "2", "g": "25", "crf": "18"}, "rate": 3}
    if name.endswith("webm"):
        options = {"deadline": "realtime", "cpu-used": "16", "g": "17", "b:v": "1M"}
        settings = {"codec": "libvpx", "options": options, "rate": 2}
    path = write_video(tmp_path / name, frames=600 * settings["rate"], size=(64, 48), **settings)
    decoder = AVDecoder.open(path)
    found, seconds = get_single_frames_uniform(decoder, 8, return_timestamps=True)
    assert found.shape[0] == 8
    assert seconds[-1] == pytest.approx(600, abs=1)
    assert decoder.bytes_read < 0.1 * path.stat().st_size
    if name == "long.mp4":
        before = decoder.bytes_read
        decoder.get_video_clips([(n, n) for n in range(100, 1700, 212)], "frames")
        assert decoder.bytes_read - before < 0.1 * path.stat().st_size


def test_clips_of_one_neighbourhood_are_decoded_in_one_go(folder: Path) -> None:
    decoder = AVDecoder((folder / "b.mp4").read_bytes())
    decoder.get_video_clips([(20, 20)], "frames")
    one, decoder.bytes_read = decoder.bytes_read, 0
    decoder.get_video_clips([(n, n) for n in range(20, 39)], "frames")
    assert decoder.bytes_read < 2 * one


# What is wrong -------------------------------------------------------------------------------------------------------


def test_damaged_files_are_refused_by_name(folder: Path) -> None:
    whole = (folder / "b.mp4").read_bytes()
    front = (folder / "front.mov").read_bytes()
    for data, message in [
        (b"", r"part 'a.mp4' is empty \(0 bytes\).*leave the sample out"),
        (whole[: len(whole) // 2], "part 'a.mp4' cannot be opened as video or sound.*damaged, cut off"),
        (b"no video" * 100, "part 'a.mp4' cannot be opened as video or sound"),
        (whole.replace(b"avc1", b"zzz1"), "part 'a.mp4' has video of a codec that PyAV does not support"),
        (front[: len(front) // 2], r"part 'a.mp4' is cut off: it has .* bytes"),
    ]:
        with pytest.raises(DecodeError, match=message):
            AVDecoder(data, name="a.mp4").get_video_clips([(55, 55)], "frames")


def test_memory_that_a_header_claims_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(*_: Any, **__: Any) -> None:
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(av, "open", claim)
    with pytest.raises(DecodeError, match="cannot be opened as video or sound: MemoryError"):
        AVDecoder.open(folder / "b.mp4").get_video_fps()


def test_what_cannot_be_had_is_refused_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    decoder = AVDecoder.open(folder / "b.mp4")
    with pytest.raises(DecodeError, match=r"b\.mp4: .*begins at frame 60, but the video ends after 60 frames"):
        decoder.get_video_clips([(60, 61)], "frames")
    with pytest.raises(DecodeError, match=r"b\.mp4: .*begins at second 2\.5, but the video ends after 2\.4 s"):
        decoder.get_video_clips([(0, 1), (2.5, math.inf)])
    with pytest.raises(DecodeError, match=r"b\.mp4 has no audio stream, only video: check has_audio_stream"):
        decoder.get_audio()
    for wrong in [(1.0, 0.5), (-1, 2), (math.nan, 1), (math.inf, math.inf)]:
        with pytest.raises(ConfigurationError, match="must have 0 <= begin <= end"):
            decoder.get_video_clips([wrong])
    with pytest.raises(ConfigurationError, match="no video_unit 'minutes'; known: frames, seconds"):
        decoder.get_video_clips([(0, 1)], "minutes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected at least 1"):
        get_clips_uniform(decoder, 1, 0, request_video=True)
    with pytest.raises(ConfigurationError, match="request_video=True or request_audio=True"):
        get_clips_uniform(decoder, 1, 1)
    with pytest.raises(ConfigurationError, match="a text stream"):
        AVDecoder(io.StringIO("x"))  # type: ignore[arg-type]
    assert len(decoder.get_video_clips([(2, 99)])[0][0]) == 10  # ends with the video


def test_without_pyav_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'energon-bridge\[video\]'"):
        AVDecoder.open(folder / "b.mp4").get_video()


# Memory --------------------------------------------------------------------------------------------------------------

MEMORY = """
import gc, sys
from pathlib import Path
from energon_bridge.models.av import AVDecoder, get_single_frames_uniform

gc.disable()  # what is closed must be gone without it
files = [path.read_bytes() for path in sorted(Path(sys.argv[1]).iterdir()) if path.name in sys.argv[3:]]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def pass_over(count):
    for number in range(count):
        decoder = AVDecoder(files[number % len(files)])
        get_single_frames_uniform(decoder, 4)
        if decoder.has_audio_stream():
            decoder.get_audio_clips([(0.5, 1.0)])
count = int(sys.argv[2])
pass_over(count // 10)
before = resident()
pass_over(count)
print(resident() / before)
"""


def test_memory_stays_flat(folder: Path) -> None:
    names = ["b.mp4", "sound.mp4", "vfr.mkv", "vp8.webm"]
    call = [sys.executable, "-c", MEMORY, str(folder), "2000" if LONG else "200", *names]
    result = subprocess.run(call, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 1.05

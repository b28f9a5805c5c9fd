"""Times of frames from the blocks of a Matroska: those of the packets that libav makes of the whole file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import X264, all_frames, write_video

from energon_bridge.core.errors import DecodeError
from energon_bridge.models.av import AVDecoder, matroska
from energon_bridge.models.av.headers import shows_frame
from energon_bridge.models.av.matroska import UnlikeError, block_times

ALTREF = {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "cpu-used": "4"}
VIDEOS: Mapping[str, Mapping[str, Any]] = {
    "h264.mkv": {"options": {"x264-params": X264}},
    "varying.mkv": {"options": {"x264-params": X264}, "varying": True},
    "late.mkv": {"options": {"x264-params": X264}, "first": 70},
    "small-clusters.mkv": {"options": {"x264-params": X264}, "container": {"cluster_size_limit": "3000"}},
    "short-clusters.mkv": {"options": {"x264-params": X264}, "container": {"cluster_time_limit": "200"}},
    "live.mkv": {"options": {"x264-params": X264}, "container": {"live": "1"}},
    "front.mkv": {"options": {"x264-params": X264}, "container": {"reserve_index_space": "500"}},
    "sound.mkv": {"options": {"x264-params": X264}, "sound": "aac"},
    "large.mkv": {"codec": "ffv1", "size": (160, 120)},
    "vp8.webm": {"codec": "libvpx", "options": ALTREF, "frames": 90},
    "vp9.webm": {"codec": "libvpx-vp9", "options": ALTREF, "frames": 90, "sound": "libopus"},
    "av1.webm": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "keyint=20"}, "size": (64, 64)},
}


def times_of(content: bytes) -> list[int]:
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        shows = shows_frame(stream.codec_context.codec.canonical_name)
        assert stream.time_base is not None
        return sorted(time for some in block_times(io.BytesIO(content), stream.time_base, shows) for time in some)


@pytest.mark.parametrize("chunk", [64, 1000, 128 << 10])
@pytest.mark.parametrize("name", VIDEOS)
def test_times_are_those_of_the_packets(name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matroska, "_CHUNK", chunk)
    path = write_video(tmp_path / name, **VIDEOS[name])
    if name == "large.mkv":  # of another codec: libav reads the packets
        monkeypatch.setattr(matroska, "_CODECS", (b"V_FFV1",))
    with av.open(str(path)) as container:
        base = container.streams.video[0].time_base
    assert base is not None
    frames = all_frames(path)
    assert [time * base for time in times_of(path.read_bytes())] == [frame.seconds for frame in frames]
    decoder = AVDecoder(path.read_bytes())
    for numbers in ([0], [len(frames) - 1, 3, 40, 41]):
        clips, begins = decoder.get_video_clips([(number, number) for number in numbers], "frames")
        for clip, (begin, _), number in zip(clips, begins, numbers, strict=True):
            assert np.array_equal(clip[0].permute(1, 2, 0).numpy(), frames[number].pixels), number
            assert begin == pytest.approx(float(frames[number].seconds), abs=1e-9)
    assert decoder.get_video_duration(get_frame_count=True)[1] == len(frames)
    with pytest.raises(DecodeError, match=f"begins at frame {len(frames)}, but the video ends after {len(frames)} "):
        decoder.get_video_clips([(len(frames), len(frames))], "frames")


def test_the_first_frames_of_a_long_video_need_its_beginning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matroska, "_CHUNK", 4096)
    path = write_video(tmp_path / "a.mkv", frames=1500, options={"x264-params": X264})
    frames = all_frames(path)
    for number, share in ((5, 0.15), (700, 0.65)):
        decoder = AVDecoder(path.read_bytes())
        (clip,), _ = decoder.get_video_clips([(number, number)], "frames")
        assert np.array_equal(clip[0].permute(1, 2, 0).numpy(), frames[number].pixels)
        assert decoder.bytes_read < share * path.stat().st_size


def test_what_is_not_plain_is_left_to_libav(tmp_path: Path) -> None:
    plain = write_video(tmp_path / "a.mkv", options={"x264-params": X264}).read_bytes()
    track = plain.index(b"\x83\x81\x01")  # the type of the track: 1, a video
    cluster = plain.index(b"\x1f\x43\xb6\x75") + 4
    block = cluster + 9 - plain[cluster].bit_length()
    while plain[block] != 0xA3:  # behind its checksum, whose bytes may be any, and its time
        block += 2 + (plain[block + 1] & 0x7F)
    width = 9 - plain[block + 1].bit_length()
    others = {
        "cut off": plain[:-100],
        "more behind": plain + plain,
        "no video": plain[:track] + b"\x83\x81\x02" + plain[track + 3 :],
        "laced": plain[: block + 4 + width] + b"\x82" + plain[block + 5 + width :],
        "another codec": plain.replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISO/ASP"),
        "empty": b"",
    }
    assert times_of(plain)
    left = []
    for name, content in others.items():
        try:
            list(block_times(io.BytesIO(content), Fraction(1, 1000), None))
        except UnlikeError:
            left.append(name)
    assert left == list(others)


def test_damaged_files_end_in_times_or_are_left_to_libav(tmp_path: Path) -> None:
    content = write_video(tmp_path / "a.mkv", frames=20, options={"x264-params": X264}, sound="aac").read_bytes()
    with av.open(io.BytesIO(content)) as container:
        base = container.streams.video[0].time_base
    assert base is not None
    choose = np.random.default_rng(7)
    left = 0
    for _ in range(2000):
        damaged = bytearray(content)
        for at in choose.integers(0, len(content), choose.integers(1, 8)):
            damaged[at] = choose.integers(0, 256)
        try:
            assert sum(map(len, block_times(io.BytesIO(bytes(damaged)), base, None))) <= len(content)
        except UnlikeError:
            left += 1
    assert 100 < left < 1900

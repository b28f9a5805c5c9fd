"""Frame n of any access is frame n of the whole decode, and the count its number: every codec, every container."""

from __future__ import annotations

import io
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import X264, rewrite, with_edits, write_video
from paths import TESTS

from energon_bridge.models.av import AVDecoder, get_single_frames_uniform
from energon_bridge.models.av.headers import tells_frames
from energon_bridge.models.av.media_file import MediaFile

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
CONTAINERS = ("mp4", "mov", "mkv", "webm", "avi", "flv", "ts", "mpg", "ogg", "ivf", "nut", "asf", "mxf", "3gp")
H264 = {"x264-params": X264}
H265 = "keyint=12:bframes=3:log-level=none:pools=none:frame-threads=1"
SLOW = {"deadline": "good", "cpu-used": "5", "lag-in-frames": "16", "auto-alt-ref": "1", "g": "12"}
KINDS: dict[str, dict[str, Any]] = {
    "libx264": {"options": H264},
    "libx264/open": {"codec": "libx264", "options": {"x264-params": f"{X264}:open-gop=1"}},
    "libx264/interlaced": {"codec": "libx264", "options": {"x264-params": f"{X264}:interlaced=1"}},
    "libx264/refresh": {"codec": "libx264", "options": {"x264-params": "intra-refresh=1:keyint=20:log-level=0"}},
    "libx265": {"options": {"x265-params": f"{H265}:open-gop=0"}},
    "libx265/open": {"codec": "libx265", "options": {"x265-params": f"{H265}:open-gop=1"}},
    "libx265/fields": {"codec": "libx265", "options": {"x265-params": f"{H265}:interlace=tff"}},
    "libvpx": {"options": SLOW},
    "libvpx-vp9": {"options": SLOW},
    "libsvtav1": {"options": {"preset": "12", "g": "12"}, "size": (64, 64)},
    "mpeg4": {"options": {"g": "12"}},
    "mpeg4/b": {"codec": "mpeg4", "options": {"g": "12", "bf": "2"}},
    "mpeg2video": {"options": {"g": "12", "bf": "2"}},
    "mpeg2video/interlaced": {"codec": "mpeg2video", "options": {"g": "12", "bf": "2", "flags": "+ilme+ildct"}},
    "mpeg1video": {"options": {"g": "12", "bf": "2"}},
    "h263": {"size": (176, 144)},
    "h261": {"size": (176, 144)},
    **{name: {"options": {"g": "12"}} for name in ("flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "snow", "h263p")},
    **{name: {} for name in ("ffv1", "ffvhuff", "utvideo", "rawvideo", "jpeg2000", "asv1", "magicyuv")},
    **{name: {"pixels_as": "rgb24"} for name in ("png", "qtrle", "cinepak")},
    "mjpeg": {"pixels_as": "yuvj420p"},
    "huffyuv": {"pixels_as": "yuv422p"},
    "speedhq": {"pixels_as": "yuv422p"},
    "prores": {"pixels_as": "yuv422p10le"},
    "cfhd": {"pixels_as": "yuv422p10le", "size": (64, 64)},
    "dnxhd": {"pixels_as": "yuv422p", "size": (256, 128), "options": {"profile": "dnxhr_lb"}},
    "zmbv": {"pixels_as": "bgr0"},
    "flashsv": {"pixels_as": "bgr24"},
    "gif": {"pixels_as": "rgb8"},
    "svq1": {"pixels_as": "yuv410p"},
    "rpza": {"pixels_as": "rgb555"},
}
TIMES: dict[str, dict[str, Any]] = {
    "plain": {"frames": 26},
    "early": {"frames": 26, "first": -5},
    "varying": {"frames": 26, "varying": True},
    "late": {"frames": 26, "first": 30},
    "one": {"frames": 1},
    "two": {"frames": 2},
}


def whole(data: bytes) -> list[tuple[float | None, np.ndarray]]:
    """Return times and pixels of all frames, by the plain loop of libav."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        base: Any = stream.time_base
        return [
            (None if frame.pts is None else float(frame.pts * base), frame.to_ndarray(format="rgb24"))
            for frame in container.decode(stream)
        ]


def check(data: bytes, name: str) -> None:
    expected = whole(data)
    if not expected:
        return  # all frames are cut off
    count, choose = len(expected), random.Random(name)
    numbers = [*range(min(3, count)), *(choose.randrange(count) for _ in range(20 if LONG else 3)), count - 1]
    assert AVDecoder(data).get_video_duration(get_frame_count=True)[1] == count
    (clip,) = AVDecoder(data).get_video().video_clips
    np.testing.assert_array_equal(clip.permute(0, 2, 3, 1).numpy(), np.stack([pixels for _, pixels in expected]))
    held, _ = AVDecoder(data).get_video_clips([(number, number) for number in numbers], "frames")
    times = [time for time, _ in expected]
    told = AVDecoder(data).get_frame_times(range(count))
    rising = all(a is not None and b is not None and a < b for a, b in pairwise(times))
    if rising and None not in times:
        assert told == pytest.approx(times)
    assert told == sorted(set(told))
    for number, one in zip(numbers, held, strict=True):
        (fresh,), ((begin, _),) = AVDecoder(data).get_video_clips([(number, number)], "frames")
        assert begin == pytest.approx(told[number])
        clips = [one, fresh]
        if told[number] >= 0:
            clips += AVDecoder(data).get_video_clips([(told[number], told[number])])[0]
        for clip in clips:
            np.testing.assert_array_equal(clip[0].permute(1, 2, 0).numpy(), expected[number][1])
    if told[-1] > 0:
        assert len(get_single_frames_uniform(AVDecoder(data), 5)) == 5


def written(path: Path, kind: str, times: str) -> bytes | None:
    """Return a video, None if the container does not take it."""
    settings = {"codec": kind} | KINDS[kind] | TIMES[times]
    try:
        data = write_video(path, **settings).read_bytes()
        return data if whole(data) else None  # some muxers write what no demuxer reads
    except (av.FFmpegError, ValueError, IndexError, AttributeError):
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_the_whole_decode(kind: str, tmp_path: Path) -> None:
    """In the gate, of each kind the containers that take it first, with a few times; ENERGON_LONG_TESTS tries all."""
    common = [
        form for form in ("mp4", "mkv", "avi", "flv") if kind.startswith(("libx264", "libx265", "libvpx", "mpeg4"))
    ]
    seen = 0
    for form in common if common and not LONG else CONTAINERS:
        chosen = TIMES if LONG else [random.Random(kind + form).choice(list(TIMES)), "plain"]
        for times in chosen:
            data = written(tmp_path / f"a.{form}", kind, times)
            if data is not None:
                check(data, f"{kind} {form} {times}")
                seen += 1
        if seen >= 2 and not (LONG or common):
            break
    assert seen


# What FFmpeg's own muxers do not write --------------------------------------------------------------------------------


def hidden_vp9(folder: Path, form: str) -> bytes:
    """Return 72 frames of VP9: 8 key frames are hidden, in packets of their own, and shown by packets of a byte."""
    options = {"cpu-used": "8", "deadline": "realtime", "g": "9"}
    source = write_video(folder / "a.webm", codec="libvpx-vp9", frames=72, options=options)

    def split(_: int, packet: Any, data: bytes) -> list[tuple[bytes, int, int]]:
        at = 16 * packet.pts + 100
        if not packet.is_keyframe:
            return [(data, at, at)]
        return [(bytes([data[0] & ~2]) + data[1:], at - 100, at - 100), (b"\x88", at, at)]

    return rewrite(source, folder / f"b.{form}", split, fflags="-autobsf").read_bytes()


def split_av1(folder: Path, form: str) -> bytes:
    """Return AV1 with each frame, shown or hidden, in a packet of its own."""
    source = write_video(folder / "a.mp4", codec="libsvtav1", frames=40, size=(64, 64), options={"preset": "8"})
    with av.open(str(source)) as container:
        split = av.BitStreamFilterContext("av1_frame_split", container.streams.video[0], None)
        packets = [[bytes(one) for one in split.filter(packet)] for packet in container.demux(video=0) if packet.size]
    assert max(map(len, packets)) > 1

    def spread(number: int, packet: Any, _: bytes) -> list[tuple[bytes, int, int]]:
        at = 16 * packet.pts + 16 - len(packets[number])
        return [(data, at + place, at + place) for place, data in enumerate(packets[number])]

    return rewrite(source, folder / f"b.{form}", spread, codec="av1").read_bytes()


def vvc(folder: Path, form: str) -> bytes:
    """Return 33 frames of VVC, groups of 8 that refer to each other, which uvg266 has encoded."""
    order = [0]

    def between(first: int, last: int) -> None:
        if last - first > 1:
            middle = (first + last) // 2
            order.append(middle)
            between(first, middle)
            between(middle, last)

    for first in range(0, 32, 8):
        order.append(first + 8)
        between(first, first + 8)
    source = TESTS / "fixtures" / "vvc.266"
    shown = [(16 * (number + 4), 16 * place) for place, number in enumerate(order)]
    return rewrite(
        source, folder / f"b.{form}", lambda n, _, data: [(data, *shown[n])], codec="vvc", form="vvc"
    ).read_bytes()


@pytest.mark.parametrize(
    ("make", "form"),
    [
        *((hidden_vp9, form) for form in ("mkv", "mp4", "webm", "ivf")),
        (split_av1, "mkv"),
        (split_av1, "mp4"),
        (vvc, "mkv"),
    ],
)
def test_hidden_frames_and_unknown_orders(make: Any, form: str, tmp_path: Path) -> None:
    data = make(tmp_path, form)
    count = {hidden_vp9: 72, split_av1: 40, vvc: 33}[make]
    assert len(whole(data)) == count
    check(data, form)


def test_full_chroma_of_an_old_x264() -> None:
    """Only the first packet names the version (148), whose faults the decoder must follow."""
    check((TESTS / "fixtures" / "x264-148-444.mkv").read_bytes(), "old")


@pytest.mark.parametrize("kind", ["libx265", "libx265/open", "libx264", "libx264/open"])
@pytest.mark.parametrize("seed", range(40 if LONG else 6))
def test_edit_lists(kind: str, seed: int, tmp_path: Path) -> None:
    """One or several edits of a short MOV, each from any frame on, for any number of frames."""
    choose = random.Random(f"{kind} {seed}")
    frames = choose.choice((3, 5, 8, 20))
    data = write_video(tmp_path / "a.mov", codec=kind.partition("/")[0], frames=frames, options=KINDS[kind]["options"])
    edits = [(choose.choice((40, 100, 13)), -1)] if choose.random() < 0.3 else []
    for _ in range(choose.choice((1, 1, 2, 3))):
        begin, length = choose.randrange(frames), choose.randrange(1, frames + 1)
        edits.append((40 * length + choose.choice((0, 0, -10, 15)), 512 * begin + choose.choice((0, 0, 256))))
    check(with_edits(data.read_bytes(), edits), str(edits))


@pytest.mark.parametrize("form", ["mp4", "mkv", "flv"])
@pytest.mark.parametrize("kind", ["libx264", "libx265", "libx264/open"])
def test_frames_that_are_timed_as_they_are_coded(kind: str, form: str, tmp_path: Path) -> None:
    """As programs write them that copy frames without their delays, so that times say nothing of the order."""
    source = write_video(tmp_path / "a.mp4", codec=kind.partition("/")[0], frames=45, options=KINDS[kind]["options"])

    def in_order(number: int, packet: Any, data: bytes) -> list[tuple[bytes, int, int]]:
        return [(data, 16 * number * packet.duration, 16 * number * packet.duration)]

    data = rewrite(source, tmp_path / f"b.{form}", in_order).read_bytes()
    assert len(whole(data)) == 45
    check(data, f"{kind} {form}")


def test_common_videos_are_read_by_their_packets(tmp_path: Path) -> None:
    """They stay as fast as seeks are: nothing is decoded but what is requested."""
    for kind, form in [("libx264", "mp4"), ("libx265", "mov"), ("libvpx-vp9", "webm"), ("libsvtav1", "mp4")]:
        settings = {"codec": kind} | KINDS[kind] | TIMES["early"]
        path = write_video(tmp_path / f"a.{form}", **settings)
        with path.open("rb") as file:
            media = MediaFile(file, form)
            assert tells_frames(media)
            media.close()


def test_packets_that_disagree_with_the_decoder_are_not_believed(tmp_path: Path) -> None:
    """A packet in the middle without pictures (a delimiter of HEVC): the index lists it, and nothing comes out."""
    options = {"x265-params": f"{H265}:bframes=0"}
    source = write_video(tmp_path / "a.mkv", codec="libx265", frames=30, options=options)

    def emptied(number: int, packet: Any, data: bytes) -> list[tuple[bytes, int, int]]:
        return [(b"\0\0\0\3\x46\1\x50" if number == 14 else data, 16 * packet.pts, 16 * packet.pts)]

    data = rewrite(source, tmp_path / "b.mp4", emptied).read_bytes()
    expected = whole(data)
    assert len(expected) < 30
    with AVDecoder(data) as decoder:
        (clip,) = decoder.get_video().video_clips
        assert len(clip) == len(expected) == decoder.get_video_duration(get_frame_count=True)[1]
        clips, _ = decoder.get_video_clips([(number, number) for number in (13, 14, 19)], "frames")
        for number, clip in zip((13, 14, 19), clips, strict=True):
            np.testing.assert_array_equal(clip[0].permute(1, 2, 0).numpy(), expected[number][1])

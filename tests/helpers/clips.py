"""Small videos and sounds, made by PyAV, and what decoding them from beginning to end gives."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

X264 = "b-adapt=0:bframes=3:scenecut=0:keyint=20:log-level=0"
WIDTH, HEIGHT = 32, 24


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame as libav's own loop gives it."""

    seconds: Fraction
    pixels: np.ndarray


def _share_the_cores() -> None:
    """Take real-time priority from the threads of this process: SVT-AV1 gives it to its own where root runs it."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def write_video(
    path: Path,
    *,
    codec: str = "libx264",
    frames: int = 60,
    rate: int = 25,
    varying: bool = False,
    first: int = 0,
    options: Mapping[str, str] | None = None,
    container: Mapping[str, str] | None = None,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    sound: str = "",
    pixels_as: str = "yuv420p",
    turned: int = 0,
) -> Path:
    """Write a video in which every frame differs from every other.

    `varying`: frames are shown for 10 to 90 ms; `first`: the tick at which the first one is shown; `sound`: a codec;
    `turned`: degrees by which a player turns it, against the clock.
    """
    choose = np.random.default_rng(5)
    width, height = size
    base = Fraction(1, 1000) if varying else Fraction(1, rate)
    with av.open(str(path), "w", options=dict(container or {})) as out:
        stream: Any = out.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.width, stream.height, stream.pix_fmt = width, height, pixels_as
        stream.codec_context.time_base = base
        if turned:
            stream.set_display_rotation(turned)
        if codec == "libsvtav1":
            stream.codec_context.open()
            _share_the_cores()
        tones: Any = out.add_stream(sound, rate=48000, layout="stereo") if sound else None
        at = first
        for number in range(frames):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[..., 0] = 4 * number % 256
            pixels[:, number % width, 2] = 255
            pixels[..., 1] = choose.integers(0, 256, (height, width))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if pixels_as != "yuv420p":
                frame = frame.reformat(format=pixels_as)
            frame.pts, frame.time_base = at, base
            at += int(choose.integers(10, 90)) if varying else 1
            out.mux(stream.encode(frame))
            if tones is not None:
                count = 48000 // rate
                out.mux(tones.encode(_block(tone(count * number, count), 48000, count * number)))
        for one in (stream, tones):
            if one is not None:
                out.mux(one.encode(None))
    return path


def tone(first: int, count: int, rate: int = 48000) -> np.ndarray:
    """Return some samples of a sound in which no second is like another: float (2, count)."""
    at = np.arange(first, first + count) / rate
    return np.stack([np.sin(2 * np.pi * (200 + 90 * at) * at) * 0.4, np.sin(2 * np.pi * (313 + 50 * at) * at) * 0.3])


def _block(samples: np.ndarray, rate: int, pts: int) -> av.AudioFrame:
    whole = np.ascontiguousarray((samples * 32767).astype(np.int16))
    frame = av.AudioFrame.from_ndarray(whole, format="s16p", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = rate, pts, Fraction(1, rate)
    return frame


def write_sound(
    path: Path,
    *,
    codec: str,
    rate: int = 48000,
    seconds: float = 5.0,
    container: Mapping[str, str] | None = None,
    **options: str,
) -> Path:
    """Write a stereo sound."""
    total = int(rate * seconds)
    with av.open(str(path), "w", options=dict(container or {})) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout="stereo", options=options)
        for first in range(0, total, 1000):
            out.mux(stream.encode(_block(tone(first, min(1000, total - first), rate), rate, first)))
        out.mux(stream.encode(None))
    return path


def all_frames(path: Path) -> list[Frame]:
    """Return every frame, by the plain loop of libav."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        base = stream.time_base
        assert base is not None
        return [
            Frame(seconds=frame.pts * base, pixels=frame.to_ndarray(format="rgb24"))
            for frame in container.decode(stream)
            if frame.pts is not None
        ]


def all_samples(path: Path) -> np.ndarray:
    """Return every sample as float32 (channels, samples), by the plain loop of libav.

    Interleaved, since PyAV cannot read eight planes. Without the padding behind the last sample of an MP4, as FFmpeg 9
    gives them.
    """
    with av.open(str(path)) as container:
        stream: Any = container.streams.audio[0]
        channels = stream.channels
        is_padded = "mp4" in container.format.name and stream.frames
        count = round(stream.duration * stream.time_base * stream.rate) if is_padded else None
        resampler = av.AudioResampler(format="flt")
        blocks = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
        return np.concatenate([block.to_ndarray().reshape(-1, channels).T for block in blocks], axis=1)[:, :count]


# Files as other programs write them -----------------------------------------------------------------------------------


Retimed = Callable[[int, Any, bytes], Sequence[tuple[bytes, int, int]]]


def rewrite(
    source: Path, target: Path, packets: Retimed, *, codec: str = "", form: str | None = None, **options: str
) -> Path:
    """Write the packets of a file's only stream as others: `packets(number, packet, data)` gives (data, pts, dts).

    A time base is a sixteenth of the source's; `codec`: its name, for streams that FFmpeg cannot encode.
    """
    with av.open(str(source), format=form) as old, av.open(str(target), "w", options=options) as new:
        stream: Any = old.streams[0]
        out: Any = (
            new.add_mux_stream(codec, rate=25, width=64, height=64) if codec else new.add_stream_from_template(stream)
        )
        base = (stream.time_base if not form else Fraction(1, 25)) / 16  # the muxer chooses its own
        out.time_base = base
        read = [packet for packet in old.demux(stream) if packet.size]
        for number, packet in enumerate(read):
            for place, (data, pts, dts) in enumerate(packets(number, packet, bytes(packet))):
                made: Any = av.Packet(data)
                made.pts, made.dts, made.time_base, made.stream = pts, dts, base, out
                made.duration = 16 * packet.duration  # without it, FFmpeg 9 ends the edit list before the last frame
                made.is_keyframe = packet.is_keyframe and place == 0
                new.mux(made)
    return target


def with_edits(data: bytes, edits: Sequence[tuple[int, int]]) -> bytes:
    """Return an MP4 of one track, its index at its end, with edits of (milliseconds, tick of the first frame)."""

    def boxes(first: int, end: int) -> dict[bytes, bytes]:
        found = {}
        while first < end:
            size = int.from_bytes(data[first : first + 4], "big")
            found[data[first + 4 : first + 8]] = data[first : first + size]
            first += size
        return found

    def box(kind: bytes, content: bytes) -> bytes:
        return (8 + len(content)).to_bytes(4, "big") + kind + content

    at = len(data) - len(boxes(0, len(data))[b"moov"])
    moov = boxes(at + 8, len(data))
    start = data.index(moov[b"trak"], at)
    track = boxes(start + 8, start + len(moov[b"trak"])) | {b"edts": b""}
    rows = b"".join(struct.pack(">iiI", *edit, 0x10000) for edit in edits)
    elst = box(b"elst", struct.pack(">II", 0, len(edits)) + rows)
    moov[b"trak"] = box(b"trak", track.pop(b"tkhd") + box(b"edts", elst) + b"".join(track.values()))
    return data[:at] + box(b"moov", b"".join(moov.values()))

"""What the headers of one media file say of it; no picture is decoded, and no frame.

Images are read with Pillow, from as few bytes as it needs; videos and sound with PyAV, which is not always installed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

from energon_bridge.errors import ConfigurationError, DecodeError
from energon_bridge.format.media import AVMetadata, ImageMetadata, MediaMetadata
from energon_bridge.prepare.media_kinds import MediaKind

_FIRST_BYTES = 64 << 10  # enough for the header of nearly every image


def read_media(kind: MediaKind, read: Callable[[int], bytes], size: int) -> MediaMetadata:
    """Return what the headers of a file say; `read(n)` gives its first n bytes, `size` is all of them.

    Raises DecodeError if it is no such file, ConfigurationError if PyAV is needed and not installed.
    """
    if kind == "av":
        return _read_av(read(size))
    if size > _FIRST_BYTES:
        try:
            return _read_image(read(_FIRST_BYTES))
        except DecodeError:
            pass  # some formats have their header at the end, or a large preview before it
    return _read_image(read(size))


def _read_image(data: bytes) -> ImageMetadata:
    from PIL import Image  # the command line starts without it

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of images so large that decoding them would be an attack
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
                return ImageMetadata(
                    width=width, height=height, format=image.format or "UNKNOWN", mode=image.mode or "UNKNOWN"
                )
    except Exception as error:  # codecs raise whatever they like
        raise DecodeError(f"no image that Pillow knows: {type(error).__name__}: {error}") from error


def _read_av(data: bytes) -> AVMetadata:
    try:
        import av
    except ImportError as error:
        raise ConfigurationError(
            "PyAV is needed to look into videos and sound: pip install 'energon-bridge[video]', or choose images only, "
            "by --media-metadata-by-glob"
        ) from error
    try:
        with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
            video: Any = next(iter(container.streams.video), None)
            audio: Any = next(iter(container.streams.audio), None)
            if video is None and audio is None:
                raise DecodeError("no stream of video or sound in it")
            whole = None if container.duration is None else container.duration / av.time_base
            # Packets are counted, not decoded.
            packets, ticks = _count(container, [stream for stream in (video, audio) if stream is not None])
            found: dict[str, Any] = {}
            if video is not None:
                rate = video.average_rate
                found |= {
                    "video_duration": _seconds(video, whole),
                    "video_num_frames": video.frames or packets[video.index],
                    "video_fps": None if rate is None else float(rate),
                    "video_width": video.codec_context.width,
                    "video_height": video.codec_context.height,
                }
            if audio is not None:
                rate = audio.codec_context.sample_rate
                length = ticks[audio.index] * audio.time_base * rate if audio.time_base else None
                found |= {
                    "audio_duration": _seconds(audio, whole),
                    "audio_channels": audio.codec_context.channels,
                    "audio_sample_rate": rate,
                    "audio_num_samples": None if length is None else round(length),
                }
            return AVMetadata(**found)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # codecs raise whatever they like
        raise DecodeError(f"no video or sound that PyAV knows: {type(error).__name__}: {error}") from error


def _count(container: Any, streams: list[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each stream its packets, and how long they are in all, in the stream's time base."""
    packets = {stream.index: 0 for stream in streams}
    ticks = dict(packets)
    for packet in container.demux(streams):
        if packet.size:  # the last one of each stream is empty
            packets[packet.stream.index] += 1
            ticks[packet.stream.index] += packet.duration or 0
    return packets, ticks


def _seconds(stream: Any, whole: float | None) -> float | None:
    if stream.duration is None or stream.time_base is None:
        return whole
    return float(stream.duration * stream.time_base)

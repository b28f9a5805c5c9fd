"""What a media file is: sizes, lengths, frame and sample counts, from its headers as far as they tell.

Lengths are those of the streams themselves, wherever on the time axis they begin. What no header says is found by going
through the packets; only the samples of compressed sound are counted by decoding, since packets do not tell them.
"""

from __future__ import annotations

from fractions import Fraction

from energon_bridge.av.audio import AudioReader
from energon_bridge.av.media import Media, length_of
from energon_bridge.av.packets import Packets
from energon_bridge.errors import DecodeError
from energon_bridge.format.media import AVMetadata

_COUNTED = ("pcm_", "flac", "alac", "wavpack")
"""Codecs whose packets last exactly as long as the samples in them."""


def video_fps(media: Media) -> float | None:
    """Return the frames per second of the video, in the mean."""
    rate = media.stream("video").average_rate or media.stream("video").guessed_rate
    return float(rate) if rate else None


def video_metadata(
    media: Media, packets: Packets | None, *, duration: bool = True, frame_count: bool = True, frame_size: bool = True
) -> AVMetadata:
    """Return what is asked for of the video of an open file; goes through its packets only for what no header says."""
    stream = media.stream("video")
    seconds = length_of(media, stream) if duration else None
    width, height = (stream.codec_context.width, stream.codec_context.height) if frame_size else (None, None)
    if frame_size and not (width and height):
        raise DecodeError(f"{media.name} has video whose size no header says: is it cut off?")
    rate, frames = video_fps(media), None
    if frame_count or (duration and seconds is None):
        packets = packets or Packets(media)
        frames = packets.count
        if duration and seconds is None:
            seconds = packets.length()
    return AVMetadata(
        video_duration=None if seconds is None else float(seconds),
        video_num_frames=frames if frame_count else None,
        video_fps=rate or (frames / float(seconds) if frames and seconds else None),
        video_width=width,
        video_height=height,
    )


def audio_metadata(media: Media, *, duration: bool = True, num_samples: bool = False) -> AVMetadata:
    """Return what is asked for of the sound of an open file."""
    stream = media.stream("audio")
    context = stream.codec_context
    rate, channels = context.sample_rate, context.channels
    seconds = length_of(media, stream) if duration or num_samples else None
    count = None
    if num_samples or (duration and seconds is None):
        if seconds is not None and stream.time_base * rate <= 1 and context.name.startswith(_COUNTED):
            count = round(seconds * rate)
        else:
            count = AudioReader(media).count()
            seconds = Fraction(count, rate) if seconds is None or num_samples else seconds
    return AVMetadata(
        audio_duration=float(seconds) if duration and seconds is not None else None,
        audio_channels=channels,
        audio_sample_rate=rate,
        audio_num_samples=count if num_samples else None,
    )

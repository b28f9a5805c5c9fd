"""Choosing clips of equal length at equal distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from energon_bridge.av.decoder import AVDecoder
from energon_bridge.av.media import AVData
from energon_bridge.errors import ConfigurationError, DecodeError, UnfitSampleError

if TYPE_CHECKING:
    import torch


def get_clips_uniform(
    av_decoder: AVDecoder,
    clip_duration_seconds: float,
    num_clips: int,
    request_video: bool = False,
    request_audio: bool = False,
    video_out_frame_size: tuple[int, int] | None = None,
) -> AVData:
    """Return clips of equal length at equal distances, the first at the beginning, the last at the end.

    With length 0 the clips are single frames: those shown half a frame after the beginning, half a frame before the
    end, and between them. If you request both, clips lie where the file has both video and sound.

    Raises ConfigurationError if neither is requested or a number makes no sense; DecodeError.
    """
    if not (request_video or request_audio):
        raise ConfigurationError(
            "neither clips of video nor of sound are asked for: give request_video=True or request_audio=True"
        )
    if num_clips < 1 or clip_duration_seconds < 0:
        raise UnfitSampleError(
            f"{num_clips} clips of {clip_duration_seconds} s are asked for; expected at least 1, and 0 s"
        )
    with av_decoder as decoder:
        begin, end = decoder.get_time_range(video=request_video, audio=request_audio)
        if clip_duration_seconds == 0:
            half = 0.5 / decoder.get_video_fps() if request_video else 0.0
            first, last = begin + half, max(begin, end - half)
        else:
            first, last = begin, max(begin, end - clip_duration_seconds)
        ranges = [(float(at), float(at + clip_duration_seconds)) for at in np.linspace(first, last, num_clips)]
        return decoder.get_clips(
            video_clip_ranges=ranges if request_video else None,
            audio_clip_ranges=ranges if request_audio else None,
            video_out_frame_size=video_out_frame_size,
        )


@overload
def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: Literal[True],
) -> tuple[torch.Tensor, list[float]]: ...


def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, list[float]]:
    """Return frames at equal distances, uint8 (frames, 3, height, width), and their times in seconds.

    If the video has fewer frames, some are repeated. Raises ConfigurationError and DecodeError.
    """
    found = get_clips_uniform(av_decoder, 0, num_frames, request_video=True, video_out_frame_size=video_out_frame_size)
    if not found.video_clips or found.video_timestamps is None:
        raise DecodeError(f"{av_decoder.name} has no frames")
    import torch  # whoever asks for frames has it

    frames = torch.cat(found.video_clips)
    return (frames, [begin for begin, _ in found.video_timestamps]) if return_timestamps else frames

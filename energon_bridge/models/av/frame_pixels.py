"""What is shown of a decoded frame: its pixels, rotated and mirrored as players do, and what players do besides."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_bridge.core.samples.sample_place import warn_once
from energon_bridge.models.av.media_file import MediaFile, import_av, is_bare, tensor_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Pixels:
    """Turns frames into uint8 RGB pixels of the requested size, or else of the size of the first frame.

    With `autorotate` they lie as players show them; else a log line says once that a video is not. So it says of what
    players do besides: stretch pixels, weave fields, map HDR, show what is behind.
    """

    def __init__(self, media: MediaFile, size: tuple[int, int] | None, *, autorotate: bool = False) -> None:
        self._size = size
        self._autorotate = autorotate
        self._name = media.name
        self._looked = False
        # Asked now: once a reader opens the file again, its streams are others, and these are gone.
        self._of_header = [] if media.video is None else [*_of_header(media.video)]
        self._own = media.size
        self._reformatter = import_av().video.reformatter.VideoReformatter()

    def of(self, frame: Any) -> np.ndarray:
        """Return the pixels of a frame, (height, width, 3)."""
        turn = turn_of(frame)
        if turn is not _UPRIGHT and (turn.is_odd or not self._autorotate):
            _say("odd" if self._autorotate else "turned", self._name)
        if not self._looked:  # the first frame tells of all
            self._looked = True
            for what in (*self._of_header, *_of_frame(frame)):
                _say(what, self._name)
        if not self._autorotate:
            turn = _UPRIGHT
        if self._own not in ((0, 0), (frame.width, frame.height)):
            _say("resized", self._name)
        size = (frame.height, frame.width) if turn.quarters % 2 else (frame.width, frame.height)
        self._size = size = self._size or size
        width, height = size[::-1] if turn.quarters % 2 else size
        # One thread: more would slow down the decode threads, and must not exist at a fork.
        out = self._reformatter.reformat(frame, width, height, "rgb24", interpolation="BILINEAR", threads=1)
        pixels: np.ndarray = out.to_ndarray()
        if turn.quarters or turn.is_mirrored:
            return np.ascontiguousarray(np.rot90(pixels[::-1] if turn.is_mirrored else pixels, turn.quarters))
        return pixels.copy() if out is frame else pixels  # the frame may be requested twice


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameTurn:
    """How players turn a frame: mirrored from top to bottom, then by some quarters against the clock.

    `is_odd`: the file says an angle that is no number of quarters, of which this is the nearest.
    """

    quarters: int = 0
    is_mirrored: bool = False
    is_odd: bool = False


_UPRIGHT = FrameTurn()


def turn_of(frame: Any) -> FrameTurn:
    """Return how players turn a frame, by its display matrix. Source: `libavutil/display.h` and ffmpeg's autorotation.

    (x, y) is shown at (a x + c y, b x + d y); rows are counted downwards.
    """
    try:
        beside = frame.side_data
        data = beside.get("DISPLAYMATRIX") if len(beside) else None  # asked for each frame: most have nothing
    except ValueError:  # PyAV 18.1 has no name for newer data beside a frame, such as its EXIF
        return _UPRIGHT if not frame.rotation else FrameTurn(quarters=round(frame.rotation / 90) % 4)
    if data is None:
        return _UPRIGHT
    a, b, _, c, d = struct.unpack_from("=5i", memoryview(data))
    across = math.hypot(a, c)
    down = math.hypot(b, d)
    if not (across and down):  # it turns nothing that could be seen
        return _UPRIGHT
    degrees = -math.degrees(math.atan2(b / down, a / across))
    quarters = round(degrees / 90)
    turn = FrameTurn(quarters=quarters % 4, is_mirrored=a * d < b * c, is_odd=abs(degrees - 90 * quarters) > 1)
    return _UPRIGHT if turn == _UPRIGHT else turn


_HDR = (16, 18)
"""Transfers of PQ and HLG (ITU-T H.273, table 3)."""


def _of_header(stream: Any) -> Iterator[str]:
    """Yield what players do with a video and is not done here, by its header; `_NEWS` says what."""
    if (stream.sample_aspect_ratio or 1) != 1:  # 0: unknown
        yield "stretched"
    if is_bare(stream):
        yield "untimed"
    if stream.metadata.get("alpha_mode") == "1":  # of WebM, which libav decodes without
        yield "transparent"


def _of_frame(frame: Any) -> Iterator[str]:
    """Yield the same by a frame."""
    if frame.interlaced_frame:
        yield "interlaced"
    if getattr(frame, "color_trc", 2) in _HDR:
        yield "HDR"
    has_alpha = any(one.is_alpha for one in frame.format.components)
    if has_alpha and frame.to_ndarray(format="rgba")[..., 3].min() < 255:  # if all of it is opaque, nothing is lost
        yield "transparent"


_NEWS = {
    "odd": "is turned by no whole quarters: the nearest are used",
    "turned": "is turned or mirrored by its header, which is not applied; players apply it. If the model shall see it "
    "so, set autorotate=True in AVDecoder, SampleDecoder, ChatConfig or MultiModalTaskEncoder (data.autorotate=true in "
    "the training script)",
    "stretched": "has pixels that are not square: players stretch its frames, and the model sees them as stored. If "
    "that matters, scale it beforehand (ffmpeg -vf scale=iw*sar:ih,setsar=1)",
    "untimed": "is a bare stream without a container, so that its frames have no times: they are taken for evenly "
    "spaced, at the rate in its header, or else 25 a second. If that is not so, put it into a container with its times "
    "(ffmpeg -r RATE -i FILE -c copy FILE.mp4)",
    "resized": "changes its size, or its header tells another: all frames of a clip are scaled to the size of its "
    "first one. If that distorts them, cut the video where its size changes",
    "interlaced": "is interlaced: what moves is combed in its frames, and players smooth it. If that matters, convert "
    "it beforehand (ffmpeg -vf bwdif)",
    "HDR": "is HDR (PQ or HLG), and its frames are pale: the model sees their numbers as if they were sRGB. If that "
    "matters, map its tones beforehand",
    "transparent": "is transparent, which is dropped: the model sees the colour that lies in the file, often black. If "
    "that matters, lay it over a background beforehand",
}
"""Warnings that are logged once in a run for all videos."""


def _say(what: str, name: str) -> None:
    warn_once(logger, f"the video of {name or 'a file'} {_NEWS[what]}", f"{what}, videos")


def clip_of(frames: list[np.ndarray]) -> torch.Tensor:
    """Return frames as a tensor (frames, 3, height, width), a view over memory with the channels last."""
    stacked = frames[0][None] if len(frames) == 1 else np.stack(frames)
    return tensor_of(stacked).permute(0, 3, 1, 2)

"""`AVDecoder` and `SampleDecoder` as megatron-energon has them.

Sound has the file's own type, a range beyond the end gives no clip, and pickles are read: those of plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from energon_bridge.core import encoder as task_encoder
from energon_bridge.models import av

AV_DECODE_AVAILABLE = find_spec("av") is not None


class AVDecoder(av.AVDecoder):
    """A video, or sound, to take clips from; the arguments are those of `energon_bridge.models.av.AVDecoder`.

    A range that begins beyond the end gives no clip, so that there are fewer clips than ranges.
    """

    leaves_out_beyond: ClassVar[bool] = True

    def __init__(self, stream: Any, suppress_warnings: bool = False, **kwargs: Any) -> None:
        super().__init__(stream, suppress_warnings, **{"audio_format": "native", **kwargs})


@dataclass(slots=True)
class AVProbeIndexEntry:
    """A packet of a video: its presentation time, in units of its stream, and whether it has a key frame."""

    timestamp: int
    is_keyframe: bool


class AVProbeIndex:
    """The packets of a video in the order of the file, all of them read: for containers without an index.

    Args:
        container: An open container of PyAV.
        stream_idx: Which of its videos.
    """

    def __init__(self, container: Any, stream_idx: int = 0) -> None:
        packets = container.demux(video=stream_idx)
        self._entries = [AVProbeIndexEntry(one.pts, one.is_keyframe) for one in packets if one.pts is not None]
        container.seek(0)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, idx: int) -> AVProbeIndexEntry:
        return self._entries[idx]

    def search_timestamp(self, timestamp: int, *, backward: bool = True, any_frame: bool = False) -> int:
        """Return the number of the last key frame (or frame) up to a time, of the first frame if there is none.

        With `backward=False`, of the first one from that time on; -1: none.
        """
        frames = [(one.timestamp, at) for at, one in enumerate(self._entries) if any_frame or one.is_keyframe]
        if backward and frames:
            return max((one for one in frames if one[0] <= timestamp), default=(0, 0))[1]
        return min((one for one in frames if one[0] >= timestamp), default=(0, -1))[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDecoder(task_encoder.SampleDecoder):
    """Decodes the parts of a sample; the arguments are those of `energon_bridge.SampleDecoder`."""

    read_pickles: bool = True
    av_class: type[av.AVDecoder] = AVDecoder


DEFAULT_DECODER = SampleDecoder()

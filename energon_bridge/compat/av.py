"""`AVDecoder` and `SampleDecoder` as megatron-energon has them.

Sound has the file's own type, a range beyond the end gives no clip, and pickles are read: those of plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from energon_bridge import av, task_encoder

AV_DECODE_AVAILABLE = find_spec("av") is not None


class AVDecoder(av.AVDecoder):
    """A video, or sound, to take clips from; the arguments are those of `energon_bridge.AVDecoder`.

    A range that begins beyond the end gives no clip, so that there are fewer clips than ranges.
    """

    leaves_out_beyond: ClassVar[bool] = True

    def __init__(self, stream: Any, suppress_warnings: bool = False, **kwargs: Any) -> None:
        super().__init__(stream, suppress_warnings, **{"audio_format": "native", **kwargs})


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDecoder(task_encoder.SampleDecoder):
    """Decodes the parts of a sample; the arguments are those of `energon_bridge.SampleDecoder`."""

    read_pickles: bool = True
    av_class: type[av.AVDecoder] = AVDecoder


DEFAULT_DECODER = SampleDecoder()

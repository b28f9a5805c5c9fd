"""Sound of one open file, exact to the sample: sample n is the n-th that decoding the whole file yields.

Audio decoders need preceding packets, so reading starts a little early. If a container's timestamps are precise enough
(MP4, WAV, FLAC, Ogg, MP3), they tell which sample a decoded block begins with. Matroska's are too coarse; there, blocks
are counted if the codec makes them all the same length. Otherwise, reading starts at the beginning of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from energon_bridge.av.media import Media, import_av
from energon_bridge.errors import DecodeError

_PREROLL_SECONDS = Fraction(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Layout of a stream's decoded blocks: the pts of the second one, the length of the first and of the others."""

    pts: int
    first: int
    length: int


class AudioReader:
    """Reads samples of the audio stream of an open file."""

    def __init__(self, media: Media) -> None:
        self._media = media
        self._stream = media.stream("audio")
        self.rate: int = self._stream.codec_context.sample_rate
        if not self.rate:
            raise DecodeError(f"{media.name} has sound without a sample rate: encode it again")
        self._base: Fraction = self._stream.time_base
        # The start of the file gives the time of the first sample, and the length of blocks.
        heads = [(frame.pts, frame.samples) for frame, _ in zip(self._from_start(), range(4), strict=False)]
        if not heads:
            raise DecodeError(f"{media.name} has an audio stream without a single sample: leave the sample out")
        self._first_pts = heads[0][0]
        self.start = Fraction(0) if self._first_pts is None else self._first_pts * self._base
        lengths = {length for _, length in heads[1:]}
        alike = len(heads) > 2 and len(lengths) == 1 and heads[1][0] is not None
        self._blocks = _Blocks(pts=heads[1][0], first=heads[0][1], length=heads[1][1]) if alike else None

    def samples(self, first: int, last: int | None) -> np.ndarray:
        """Return samples [first, last), or all from `first` on, as far as they exist: (channels, samples)."""
        found = self._read_near(first, last)
        if found is None:
            found = self._collect(self._placed_from_start(), first, last)
        return found if found is not None else np.empty((self._stream.codec_context.channels, 0), dtype=np.float32)

    def count(self) -> int:
        """Return the number of samples, by decoding all of them."""
        return sum(frame.samples for frame in self._from_start())

    # Reading ---------------------------------------------------------------------------------------------------------

    def _from_start(self) -> Iterator[Any]:
        self._media.rewind()
        self._stream = self._media.stream("audio")
        self._media.only(self._stream)
        return self._decoded()

    def _decoded(self, *, forgiving: bool = False) -> Iterator[Any]:
        """Yield decoded blocks; `forgiving`: skip packets that cannot be decoded without earlier ones."""
        packets = self._media.container.demux(self._stream)
        while True:
            with self._media.refusing("cannot be read"):
                packet = next(packets, None)
            if packet is None:
                return
            try:
                blocks = packet.decode()
            except import_av().FFmpegError as error:
                if forgiving:
                    continue
                with self._media.refusing("cannot be decoded"):
                    raise error
            if blocks:
                forgiving = False
            yield from blocks

    def _placed_from_start(self) -> Iterator[tuple[int, Any]]:
        at = 0
        for block in self._from_start():
            yield at, block
            at += block.samples

    def _read_near(self, first: int, last: int | None) -> np.ndarray | None:
        """Read from shortly before the first sample; None if that cannot be exact."""
        preroll = int(_PREROLL_SECONDS * self.rate)
        if first <= 2 * preroll or self._first_pts is None or not (self._exact or self._blocks):
            return None
        aim = int((self.start + Fraction(first - preroll, self.rate)) / self._base)
        try:
            self._media.container.seek(aim, stream=self._stream, backward=True)
        except OSError:
            return None
        return self._collect(self._placed_near(first), first, last)

    def _placed_near(self, first: int) -> Iterator[tuple[int, Any]]:
        """Yield blocks with the number of their first sample; nothing if that is unknown."""
        at: int | None = None
        before = False
        for block in self._decoded(forgiving=True):
            if at is None or at < first:
                at = self._place(block)
                before = before or (at is not None and at + block.samples <= first)
                if at is None or not before:
                    return  # no room for the decoder to settle, or timestamps too coarse
            yield at, block
            at += block.samples

    @property
    def _exact(self) -> bool:
        return self._base * self.rate <= 1

    def _place(self, block: Any) -> int | None:
        """Return the number of a block's first sample, from its timestamp."""
        if block.pts is None:
            return None
        if self._exact:
            return round((block.pts - self._first_pts) * self._base * self.rate)
        blocks = self._blocks
        if blocks is None or block.samples != blocks.length:
            return None
        since = (block.pts - blocks.pts) * self._base * self.rate
        number = round(since / blocks.length)
        if abs(since - number * blocks.length) > self._base * self.rate + 1:
            return None  # a gap, or blocks of several lengths
        return blocks.first + number * blocks.length

    def _collect(self, placed: Iterator[tuple[int, Any]], first: int, last: int | None) -> np.ndarray | None:
        pieces: list[np.ndarray] = []
        for at, block in placed:
            if last is not None and at >= last:
                break
            if at + block.samples > first:
                stop = block.samples if last is None else min(block.samples, last - at)
                pieces.append(_array(block)[:, max(0, first - at) : stop])
        if len({len(piece) for piece in pieces}) > 1:
            raise DecodeError(
                f"{self._media.name} has sound whose number of channels changes: it may be damaged; encode it again"
            )
        return np.concatenate(pieces, axis=1) if pieces else None


def _array(block: Any) -> np.ndarray:
    """Return a block as (channels, samples)."""
    array: np.ndarray = block.to_ndarray()
    if block.format.is_planar:
        return array
    return array.reshape(block.samples, block.layout.nb_channels).T


def as_floats(samples: np.ndarray) -> np.ndarray:
    """Return samples as float32 in [-1, 1]: integers divided by the largest power of two that they reach."""
    if samples.dtype.kind == "f":
        return samples.astype(np.float32, copy=False)
    scale = np.float32(1 / (1 << (8 * samples.dtype.itemsize - 1)))
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) * scale
    return samples.astype(np.float32) * scale


def resample(samples: np.ndarray, rate: int, to: int) -> np.ndarray:
    """Return float32 samples at another rate, by libswresample."""
    if rate == to or not samples.shape[1]:
        return samples
    av = import_av()
    layout = {1: "mono", 2: "stereo"}.get(len(samples), f"{len(samples)} channels")
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=to)
    return np.concatenate([out.to_ndarray() for out in (*resampler.resample(frame), *resampler.resample(None))], axis=1)

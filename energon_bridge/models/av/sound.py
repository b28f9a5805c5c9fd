"""The sound of an open file: samples by number, and samples by time.

Sample n is the n-th that decoding the whole file yields, and is heard n samples after the first one, unless timestamps
jump (a recording that paused, packets that were lost). So clips by time follow the timestamps: the time of a jump is
silent, and of blocks that overlap the first is heard. Clips by number know nothing of times.

A chain of Oggs is the sound of one after the other. A file that has less than its headers say is an error as soon as
its end is reached, and so is a sample rate that changes.

Audio decoders need preceding packets, so reading starts a little early. If a container's timestamps are precise enough
(MP4, WAV, FLAC, Ogg, MP3), they tell which sample a decoded block begins with. Matroska's are too coarse; there, blocks
are counted if the codec makes them all the same length. Otherwise, reading starts at the beginning of the file; by
number, it also does if timestamps may have jumped before.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from energon_bridge.core.errors import DecodeError
from energon_bridge.models.av.media_file import (
    MediaFile,
    import_av,
    is_estimate,
    links_of,
    opened,
    own_length,
    start_of,
)

_PREROLL_SECONDS = Fraction(1, 2)
_JITTER_SECONDS = Fraction(1, 50)
"""Coarse timestamps that differ from the count of samples by less are rounding; by more, the sound has jumped."""
_RESTART_SECONDS = Fraction(1, 4)
"""Times that go further back are those of another recording; by less, packets overlap."""
_COUNTING_FORMATS = ("wav", "flac", "mp3")
"""Containers whose timestamps are counts of samples."""
BARE_FORMATS = ("ac3", "eac3", "dts", "dtshd", "mlp", "truehd", "loas", "adx")
"""Formats without a container, and so without timestamps: FFmpeg's are estimates, which cannot show a jump."""
BROADCASTS = ("mpegts", "mpeg")
"""MPEG-TS and -PS: their packets (PES) have times, but the several blocks of sound in a packet have none."""
_FOUND_IN_WAVES = ("pcm_", "mp2", "mp3", "ac3", "dca")
"""Codecs of which FFmpeg finds the place of a time in a WAV exactly: by the size of samples, or an index it makes."""
_REMEMBERING = ("adpcm", "amr", "qcelp", "evrc")
"""Codecs whose decoders remember all blocks before."""
_MISSING_SECONDS: Mapping[str, Fraction] = {
    **dict.fromkeys(("flac", "wv", "tta", "ape"), Fraction(0)),
    "mp3": Fraction(1, 5),
}
"""Formats whose headers count samples, and by how many seconds fewer a whole file may decode to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Layout of a stream's decoded blocks: pts of the second one, samples of the first and of each other one."""

    pts: int
    first: int
    length: int


class AudioReader:
    """Reads samples of the audio stream of an open file."""

    def __init__(self, media: MediaFile) -> None:
        self._media = media
        self._stream = media.stream("audio")
        self.rate: int = self._stream.codec_context.sample_rate
        if not self.rate:
            raise DecodeError(f"{media.name} has sound without a sample rate: encode it again")
        self._base: Fraction = self._stream.time_base
        self._links = links_of(media)
        self._is_timed = len(self._links) == 1 and media.container.format.name not in BARE_FORMATS
        # The start of the file gives the time of the first sample, and the length of blocks.
        heads = [(frame.pts, frame.samples) for frame, _ in zip(self._from_start(), range(4), strict=False)]
        if not heads:
            raise DecodeError(f"{media.name} has an audio stream without a single sample: leave the sample out")
        self._first_pts = heads[0][0]
        self.start = Fraction(0) if self._first_pts is None else self._first_pts * self._base
        # The second block tells where samples are: the first one may lack some that the decoder needs to settle.
        self._anchor = (heads[1][0], heads[0][1]) if len(heads) > 1 else (self._first_pts, 0)
        lengths = {length for _, length in heads[1:]}
        alike = len(heads) > 2 and len(lengths) == 1 and heads[1][0] is not None
        self._blocks = _Blocks(pts=heads[1][0], first=heads[0][1], length=heads[1][1]) if alike else None
        self._end = self._end_of_index()

    def _end_of_index(self) -> int | None:
        """Return the number of samples by the index of an MP4: its last block is full, and ends in padding (AAC).

        None if there is no such index, or if it ends before the last block begins, and so is wrong.
        """
        stream = self._stream
        length = own_length(stream)
        entries = stream.index_entries
        if "mp4" not in self._media.container.format.name or length is None or self._first_pts is None or not entries:
            return None
        begin = (entries[len(entries) - 1].timestamp - self._first_pts) * self._base
        is_whole = len(entries) >= stream.frames > 0 and begin < length
        return round(length * self.rate) if is_whole else None

    def samples(self, first: int, last: int | None, *, by_time: bool) -> np.ndarray:
        """Return samples [first, last), or all from `first` on, as far as they exist: (channels, samples).

        They are numbered in order, or by the time since the first sample.
        """
        by_time = by_time and self._is_timed
        last = self._end if last is None else last if self._end is None else min(last, self._end)
        sound = self._read_near(first, last, by_time)
        if sound is None:
            sound = self._collect(self._placed(self._from_start(), 0, by_time), first, last)
        return sound if sound is not None else np.empty((self._stream.codec_context.channels, 0), dtype=np.float32)

    def _is_steady(self) -> bool:
        """Whether timestamps cannot have jumped: the container counts samples, or its index shows steps of one size."""
        form = self._media.container.format.name
        if "mp4" not in form:
            # WAV gives times by its mean rate of bytes, which only PCM has exactly.
            return form in _COUNTING_FORMATS and (form != "wav" or self._stream.codec_context.name.startswith("pcm_"))
        entries = self._stream.index_entries
        steps = np.diff([entry.timestamp for entry in entries])[:-1]  # the last packet may be shorter
        return len(entries) >= self._stream.frames > 0 and len(np.unique(steps)) <= 1

    def count(self, *, by_time: bool = False) -> int:
        """Return the number of samples, by decoding all; `by_time`: with silent ones for what is left out."""
        blocks = self._placed(self._from_start(), 0, by_time and self._is_timed)
        count = max((at + block.samples for at, block in blocks), default=0)
        return count if self._end is None else min(count, self._end)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all decoded blocks, (channels, samples), with the number of their first sample by the time."""
        for at, block in self._placed(self._from_start(), 0, self._is_timed):
            yield at, _array(block)[:, : None if self._end is None else max(0, self._end - at)]

    # Reading ---------------------------------------------------------------------------------------------------------

    def _from_start(self) -> Iterator[Any]:
        if len(self._links) > 1:
            return self._of_links()
        self._media.rewind()
        self._stream = self._media.stream("audio")
        self._media.only(self._stream)
        return self._decoded()

    def _of_links(self) -> Iterator[Any]:
        """Yield the blocks of a chain of Oggs, each opened as a file of its own."""
        for begin, end in self._links:
            self._media.file.seek(begin)
            with opened(io.BytesIO(self._media.file.read(end - begin)), self._media.name) as link:
                for block in AudioReader(link)._from_start():
                    self._check(block)
                    yield block

    def _decoded(self, *, forgiving: bool = False) -> Iterator[Any]:
        """Yield decoded blocks; `forgiving`: skip packets that cannot be decoded without earlier ones.

        Raises DecodeError where the file is cut off.
        """
        packets = self._media.container.demux(self._stream)
        last = None
        while True:
            with self._media.refusing("cannot be read"):
                packet = next(packets, None)
            if packet is None:
                self._check_end(last)
                return
            try:
                blocks = packet.decode()
            except import_av().FFmpegError as error:
                if forgiving:
                    continue
                with self._media.refusing("cannot be decoded"):
                    raise error
            for block in blocks:
                forgiving = False
                last = block
                self._check(block)
                yield block

    def _check(self, block: Any) -> None:
        if block.sample_rate != self.rate:
            raise DecodeError(
                f"{self._media.name} has sound whose sample rate changes, from {self.rate} to {block.sample_rate}: "
                "encode it again with one rate, or leave the sample out"
            )

    def _check_end(self, last: Any) -> None:
        """Raise DecodeError if the last block of the file comes earlier than its headers say."""
        self._media.check_end()
        length = own_length(self._stream)
        missing = _MISSING_SECONDS.get(self._media.container.format.name)
        if length is None or missing is None or last is None or last.pts is None or is_estimate(self._media):
            return
        there = last.pts * self._base + Fraction(last.samples, self.rate) - start_of(self._stream)
        if there < length - missing:
            raise self._media.cut_off(f"{float(there):.2f} of {float(length):.2f} s")

    def _placed(self, blocks: Iterator[Any], at: int, by_time: bool) -> Iterator[tuple[int, Any]]:
        """Yield blocks with the number of their first sample; that of the first block is `at`.

        By count, each block follows the last one. `by_time`, a block whose time is off by more than rounding (`jitter`
        samples) is placed by its time: the recording paused, or packets were lost. Times that go far back begin another
        recording, as of files that were joined as they are: it follows the one before.
        """
        jitter = 1 if self._exact else max(int(_JITTER_SECONDS * self.rate), int(2 * self._base * self.rate))
        shift = 0
        for block in blocks:
            due = self._due(block) if by_time and at else None
            if due is not None and due + shift < at - _RESTART_SECONDS * self.rate:
                shift = at - due
            elif due is not None and abs(due + shift - at) > jitter:
                at = max(due + shift, 0)
            yield at, block
            at += block.samples

    def _due(self, block: Any) -> int | None:
        """Return the number of a block's first sample by its pts, from a block whose pts and number are known."""
        pts, begin = self._anchor
        return None if None in (pts, block.pts) else begin + round((block.pts - pts) * self._base * self.rate)

    def _read_near(self, first: int, last: int | None, by_time: bool) -> np.ndarray | None:
        """Return samples by seeking to half a second before the first one; None if the result could be inexact.

        A decoder needs some packets before its output is that of decoding from the beginning.
        """
        preroll = int(_PREROLL_SECONDS * self.rate)
        if first <= 2 * preroll or self._first_pts is None or not (self._exact or self._blocks):
            return None
        if not (by_time or self._is_steady()):
            return None
        form, codec = (self._media.container.format.name, self._stream.codec_context.name)
        if (form, codec) == ("ogg", "flac"):
            return None  # FFmpeg counts the times of its last page back from the end, as if all its blocks were full
        if codec.startswith(_REMEMBERING) or (form in ("wav", "w64") and not self._is_found_in_wave()):
            return None
        aim = int((self.start + Fraction(first - preroll, self.rate)) / self._base)
        try:
            self._media.container.seek(aim, stream=self._stream, backward=True)
        except OSError:
            return None
        return self._collect(self._placed_near(first, by_time), first, last)

    def _is_found_in_wave(self) -> bool:
        """Whether FFmpeg finds times in a WAV exactly; else it goes by the rate of bytes, a rounded or wrong one."""
        context = self._stream.codec_context
        bits = int("".join(filter(str.isdigit, context.name)) or 8)  # of a sample: pcm_s24le, pcm_alaw
        is_true = context.bit_rate == bits * self.rate * context.channels
        return bool(context.name.startswith(_FOUND_IN_WAVES) and (is_true or not context.name.startswith("pcm_")))

    def _placed_near(self, first: int, by_time: bool) -> Iterator[tuple[int, Any]]:
        """Yield blocks with the number of their first sample; nothing if that is unknown."""
        blocks = self._decoded(forgiving=True)
        before = False
        for block in blocks:
            at = self._place(block)
            before = before or (at is not None and at + block.samples <= first)
            if at is None or not before:
                return  # no room for the decoder to settle, or timestamps too coarse
            yield at, block
            if at + block.samples >= first:
                yield from self._placed(blocks, at + block.samples, by_time)

    @property
    def _exact(self) -> bool:
        is_broadcast = self._media.container.format.name in BROADCASTS  # within a packet of theirs, times are estimates
        return self._base * self.rate <= 1 and not is_broadcast

    def _place(self, block: Any) -> int | None:
        """Return the number of a block's first sample, from its timestamp."""
        if block.pts is None:
            return None
        if self._exact:
            return self._due(block)
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
        end = first  # number of the sample behind those collected so far
        for at, block in placed:
            if last is not None and at >= last:
                if end < last:  # a jump: the time in between is silent
                    pieces.append(_silence(_array(block), last - end))
                break
            stop = at + block.samples if last is None else min(at + block.samples, last)
            if stop <= end:
                continue
            samples = _array(block)
            if at > end:
                pieces.append(_silence(samples, at - end))
            pieces.append(samples[:, max(0, end - at) : stop - at])
            end = stop
        if len({len(piece) for piece in pieces}) > 1:
            raise DecodeError(
                f"{self._media.name} has sound whose number of channels changes: it may be damaged; encode it again"
            )
        return np.concatenate(pieces, axis=1) if pieces else None


def _silence(like: np.ndarray, count: int) -> np.ndarray:
    """Return silent samples; those of unsigned bytes lie in the middle of their range."""
    return np.full((len(like), count), 128 if like.dtype == np.uint8 else 0, like.dtype)


def _array(block: Any) -> np.ndarray:
    """Return a block as (channels, samples).

    Planes are taken one by one: `planes` of PyAV 18 goes on after the eighth into memory that holds no plane, and
    reading that ends the process.
    """
    channels = block.layout.nb_channels
    if not block.format.is_planar:
        array: np.ndarray = block.to_ndarray()
        return array.reshape(block.samples, channels).T
    plane = import_av().audio.plane.AudioPlane
    kind = _DTYPES[block.format.name]
    return np.stack([np.frombuffer(plane(block, n), kind, block.samples) for n in range(channels)])


_DTYPES = {"u8p": "u1", "s16p": "i2", "s32p": "i4", "s64p": "i8", "fltp": "f4", "dblp": "f8"}
"""Sample formats of FFmpeg with a plane for each channel."""


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
    channels = len(samples)
    layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels} channels")
    # Interleaved, since PyAV cannot read or write eight planes.
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T).reshape(1, -1), format="flt", layout=layout)
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="flt", layout=layout, rate=to)
    try:
        made = [out.to_ndarray() for out in (*resampler.resample(frame), *resampler.resample(None))]
    except av.FFmpegError as error:  # of an absurd rate in a damaged header
        raise DecodeError(
            f"cannot resample from {rate} to {to} samples a second: {error}. Is the file damaged?"
        ) from error
    if not made:
        raise DecodeError(
            f"a clip of {samples.shape[1]} samples is too short to resample it from {rate} to {to} a second: take a "
            "longer one, or leave out audio_sample_rate"
        )
    return np.ascontiguousarray(np.concatenate(made, axis=1).reshape(-1, channels).T)

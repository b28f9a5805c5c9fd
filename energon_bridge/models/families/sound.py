"""Sounds in a conversation: given samples, or samples that a decoder gives later; one channel, at the model's rate.

Headers tell how long a sound is, so a sample's plan knows its number of samples, and they are decoded when the sample
is delivered. A sound begins at time 0 of its file, the track of a video with its first frame, and follows presentation
times from there: what a recording left out is silent.

Channels are averaged, as librosa does; that channels cancel each other, or samples are no shares of full scale, is a
warning, once of each. Then PyAV (libswresample) resamples, as torchcodec does, which transformers
prefers; it makes as many samples as librosa: `ceil(samples * rate / own_rate)`. Librosa's values (soxr, `soxr_hq`) at
16 kHz, of noise at 8 to 48 kHz, differ by 0.0003 of their root mean square up to 6.5 kHz, and 0.0015 up to 6.8 kHz; up
to 8 kHz follows the softer edge of libswresample's filter, where it takes away more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from energon_bridge.core.encoder.deferred import Deferred
from energon_bridge.core.errors import DecodeError, SampleError
from energon_bridge.core.samples.sample_place import warn_once
from energon_bridge.core.storage import ByteRange
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.av.av_decoder import is_lossless
from energon_bridge.models.av.sound import as_floats, resample
from energon_bridge.models.conversations.conversation import MediaWithOptions
from energon_bridge.models.conversations.segments import MediaOptions

_INEXACT_SECONDS = 0.2
"""By how many seconds a sound may be longer or shorter than in its headers: codecs pad, and cut off, samples."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sound:
    """A sound whose length is known, decoded or not.

    Attributes:
        rate: Samples a second, as the model takes them.
        length: The number of samples at this rate.
        own_rate: Samples a second of what is given or in the file.
        own_length: The number of samples at that rate.
        samples: float32 of shape (own_length,); None: they are decoded.
        decoder: The file.
        begin: The time in the file at which the sound begins, in seconds.
        lead: Silent samples before it, at its own rate: a video begins earlier than its sound.
        cut: Whether the file has more.
    """

    rate: int
    own_rate: int
    own_length: int
    samples: np.ndarray | None = field(default=None, repr=False)
    decoder: AVDecoder | None = None
    begin: float = 0.0
    lead: int = 0
    cut: bool = False

    @property
    def length(self) -> int:
        """Number of samples at `rate`."""
        return -(-self.own_length * self.rate // self.own_rate)

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.own_length / self.own_rate

    @property
    def alone(self) -> bool:
        """Whether decoding runs no user code and can run on any thread, with a decoder of its own."""
        return self.decoder is None or isinstance(self.decoder.stream, bytes | ByteRange)

    def until(self, seconds: float | None) -> Sound:
        """Return the first `seconds` of the sound; None: all of it."""
        length = self.own_length if seconds is None else max(1, int(seconds * self.own_rate))
        if length >= self.own_length:
            return self
        samples = None if self.samples is None else self.samples[:length]
        return replace(self, own_length=length, samples=samples, lead=min(self.lead, length), cut=True)

    def get(self) -> np.ndarray:
        """Return the samples, float32 of shape (length,).

        Raises:
            DecodeError: The file is damaged, or much longer or shorter than its headers tell.
        """
        samples = self.samples
        if samples is None:
            samples, doubt = self.decoded()
            _warn(doubt, self.decoder.name if self.decoder is not None else "")
        return _fitted(resample(samples[None], self.own_rate, self.rate)[0], self.length)

    def decoded(self) -> tuple[np.ndarray, Doubt | None]:
        """Return the samples of a file at its own rate, float32 of shape (own_length,), and what is odd about them.

        Raises DecodeError as `get` does.
        """
        assert self.decoder is not None
        decoder = copy(self.decoder) if self.alone else self.decoder  # several samples, on other threads, may share one
        planned = self.own_length - self.lead
        if not planned:
            return np.zeros(self.lead, np.float32), None
        end = self.begin + planned / self.own_rate + 2 * _INEXACT_SECONDS * (not self.cut)
        clips, _ = decoder.get_audio_clips([(self.begin, end)])
        samples, doubt = _mono(clips[0].numpy(), decoder) if clips else (np.empty(0, np.float32), None)
        _check_length(decoder.name, len(samples), planned, self.own_rate)
        samples = _fitted(samples, planned)
        return (np.pad(samples, (self.lead, 0)) if self.lead else samples), doubt


def _check_length(name: str, there: int, planned: int, rate: int) -> None:
    """Raise DecodeError if a file has many more or fewer samples than its headers tell."""
    inexact = _INEXACT_SECONDS * rate
    if abs(there - planned) > inexact:
        more = "more than " * (there > planned)
        raise DecodeError(
            f"{name} has {more}{min(there, planned + inexact) / rate:.2f} s of sound, but its headers tell "
            f"{planned / rate:.2f} s: encode it again, or leave the sample out"
        )


def check_track(video: AVDecoder) -> Doubt | None:
    """Decode the sound of a video, without holding it, and return what is odd about it.

    Raises DecodeError as `track_of` and `Sound.get` do.
    """
    with video:
        if not video.has_audio_stream() or (track := track_of(video, rate=1)) is None:
            return None
        before = round((track.begin - video.get_time_range(video=False, audio=True)[0]) * track.own_rate)
        blocks = video.map_sound(lambda at, samples: (at + samples.shape[1], _Loudness.of(as_floats(samples))))
        there = max(end for end, _ in blocks)
        _check_length(video.name, there - before, track.own_length - track.lead, track.own_rate)
        return _Loudness(*map(sum, zip(*(loudness for _, loudness in blocks), strict=True))).doubt(video)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferredSound(Deferred):
    """A sound in a list of a sample's field, decoded on the threads of the engine; its `sound.alone` must be true."""

    sound: Sound

    def decoded(self, memory: np.ndarray | None = None) -> np.ndarray:
        """Return the samples. Raises DecodeError."""
        return self.sound.get()


def sound_of(value: Any, *, rate: int) -> Sound:
    """Return a sound as the model takes it, undecoded if it is a file.

    Args:
        value: A decoder or the bytes of a file, a pair of samples and their rate, or `{"array", "sampling_rate"}` or
            `{"bytes"}` as in datasets of Hugging Face. Samples are an array or tensor of one dimension, or of two:
            channels are the shorter one; floats in [-1, 1], or integers of their full range.
        rate: Samples a second that the model takes.

    Raises:
        SampleError: It is none of these, its rate is unknown, or there is not a single sample.
        DecodeError: The file is damaged, or has no sound.
    """
    if isinstance(value, MediaWithOptions):
        return _segment_of(value, rate)
    if isinstance(value, Mapping):
        given = value.get("array")
        value = (given, value.get("sampling_rate")) if given is not None else value.get("bytes") or value
    if isinstance(value, bytes | bytearray | memoryview):
        value = AVDecoder(bytes(value))
    if isinstance(value, AVDecoder):
        with value:  # one opening for all that is asked
            begin, end = value.get_time_range(video=False, audio=True)
            return _in_file(value, begin, end, rate)
    samples, own_rate = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    made = _samples(samples)
    if isinstance(own_rate, float) and own_rate.is_integer():
        own_rate = int(own_rate)
    if not isinstance(own_rate, int | np.integer) or own_rate < 1:
        raise SampleError(
            f"a sound must tell the rate of its samples, a positive integer, got {own_rate!r}: give (samples, rate) or "
            '{"array": samples, "sampling_rate": rate}'
        )
    if not len(made):
        raise SampleError("a sound has not a single sample: leave the sample out")
    return Sound(rate=rate, own_rate=int(own_rate), own_length=len(made), samples=made)


def _segment_of(medium: MediaWithOptions, rate: int) -> Sound:
    """Return a segment of a sound. Raises what `sound_of` raises, and SampleError for one that lies beyond it."""
    sound = sound_of(medium.value, rate=rate)
    options = medium.options
    if not options.is_segment:
        return sound
    over = sound.begin + sound.duration
    end = over if options.end is None else min(over, options.end)
    if options.begin >= over or (options.end or 0) > over + _BEYOND_SECONDS:
        raise SampleError(
            f"a segment from {options.begin:g} s to {options.end} s lies beyond its sound, which has {over:g} s"
        )
    if sound.decoder is not None:
        made = _in_file(sound.decoder, sound.begin, end, rate, options.begin)
        return replace(made, cut=end < over)
    assert sound.samples is not None
    first, behind = (round(time * sound.own_rate) for time in (options.begin, end))
    samples = sound.samples[first : max(behind, first + 1)]
    return replace(sound, samples=samples, own_length=len(samples), cut=True)


_BEYOND_SECONDS = 0.5
"""How far a segment may end beyond its file, whose length lists often round."""


def track_of(video: Any, *, rate: int) -> Sound | None:
    """Return the sound track of a video from its first frame on, undecoded; None if it has none.

    Args:
        video: A decoder; frames alone have no track.
        rate: Samples a second that the model takes.

    Raises:
        DecodeError: The file is damaged.
    """
    options = MediaOptions()
    if isinstance(video, MediaWithOptions):
        options = video.options
        video = video.value
    if not isinstance(video, AVDecoder):
        return None
    with video:
        if not video.has_audio_stream():
            return None
        shown, last = video.get_time_range(video=True, audio=False)
        begin, end = video.get_time_range(video=False, audio=True)
        if begin > last:
            raise DecodeError(
                f"{video.name} has sound from {begin:g} s on, but its video ends at {last:g} s: is it damaged?"
            )
        shown = max(shown, options.begin)
        over = end if options.end is None else min(end, options.end)
        if over <= max(shown, begin):
            return None
        return replace(_in_file(video, begin, over, rate, shown), cut=over < end)


def _in_file(decoder: AVDecoder, begin: float, end: float, rate: int, shown: float | None = None) -> Sound:
    """Return the sound of a file from one time to another; of a video, from when its first frame is shown."""
    own_rate = decoder.get_audio_samples_per_second()
    first = begin if shown is None else max(begin, shown)
    lead = 0 if shown is None else round((first - shown) * own_rate)
    length = lead + round((end - first) * own_rate) if own_rate else 0
    if length < 1:
        raise DecodeError(f"{decoder.name} has sound without a single sample, or a rate: leave the sample out")
    return Sound(rate=rate, own_rate=own_rate, own_length=length, decoder=decoder, begin=first, lead=lead)


def _samples(value: Any) -> np.ndarray:
    """Return given samples as one channel. Raises SampleError."""
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    if isinstance(value, list):
        value = np.asarray(value, np.float32)
    is_array = isinstance(value, np.ndarray) and value.dtype.str[1:] in ("f2", "f4", "f8", "i2", "i4", "u1")
    if not is_array or value.ndim not in (1, 2):
        shape = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)[:100]
        raise SampleError(
            "a sound must be a decoder, the bytes of a file, or samples in one or two dimensions, floats or integers "
            f"of 8, 16 or 32 bits, got {shape}"
        )
    made, doubt = _mono(value if value.ndim == 1 or value.shape[0] <= value.shape[1] else value.T)
    _warn(doubt, "an array of samples")
    return made


def _mono(samples: np.ndarray, decoder: AVDecoder | None = None) -> tuple[np.ndarray, Doubt | None]:
    """Return the mean of channels (channels, samples), float32, and what is odd; `decoder` is that of their file."""
    floats = np.atleast_2d(as_floats(samples))
    mono = _mean(floats)
    return mono, _Loudness.of(floats, mono).doubt(decoder)


def _mean(floats: np.ndarray) -> np.ndarray:
    mean: np.ndarray = floats[0] if len(floats) == 1 else floats.mean(axis=0, dtype=np.float32)
    return mean


class _Loudness(NamedTuple):
    """Sums over a sound, or over a block of it.

    Attributes:
        heard: The energy of the mean of its channels.
        energy: That of its channels, in the mean.
        length: The number of samples of a channel.
        beyond: How many of the blocks have a sample well beyond full scale.
    """

    heard: float = 0.0
    energy: float = 0.0
    length: int = 0
    beyond: int = 0

    @classmethod
    def of(cls, floats: np.ndarray, mono: np.ndarray | None = None) -> _Loudness:
        """Return that of samples (channels, samples), whose mean may be known."""
        heard = _energy(_mean(floats) if mono is None else mono)
        beyond = max(floats.max(initial=0.0), -floats.min(initial=0.0)) > _BEYOND
        return cls(heard, heard if len(floats) == 1 else _energy(floats) / len(floats), floats.shape[1], int(beyond))

    def doubt(self, decoder: AVDecoder | None) -> Doubt | None:
        """Return what is odd about samples; `decoder` is that of their file, None if they were given."""
        if self.length and self.heard <= _SILENT * self.length:
            return "silent" if self.energy <= _SILENT * self.length else "cancelled"
        if self.heard < _CANCELLED * self.energy:
            return "cancelled"
        is_stored = self.beyond and (decoder is None or is_lossless(decoder))
        return "loud" if is_stored or self.heard > self.length else None


def _energy(samples: np.ndarray) -> float:
    return float(np.vdot(samples, samples))


Doubt = Literal["silent", "cancelled", "loud"]
"""What may be odd about a sound: nothing is heard; its channels are the reverse of each other, so that little is left
of their mean; its samples exceed full scale: in the mean, or, if stored without loss, one of them."""
_BEYOND = 1.1
"""A sample well beyond full scale: resampling gets near it, and what codecs with losses decode goes up to 3.5."""
_SILENT = 1e-10
"""Mean square of samples up to which nothing is heard, not even the last bit of 16."""
_CANCELLED = 0.01
"""What is left of the energy of a channel where channels cancel each other; of N that are unlike, 1/N is."""
_WARNINGS: dict[Doubt | None, str] = {
    "cancelled": "has channels that cancel each other: their mean, which the model hears, is nearly silent. Write it "
    "with one channel (ffmpeg -af pan=mono|c0=c0)",
    "loud": "has samples beyond [-1, 1], as integers written as floats, which are taken as they are: scale them",
}
_logger = logging.getLogger(__name__)


def _warn(doubt: Doubt | None, name: str) -> None:
    """Log what is odd about a sound, once of each kind; `energon lint` names all, and those that are silent."""
    if doubt in _WARNINGS:
        warn_once(_logger, f"{name} {_WARNINGS[doubt]}. energon lint names all such sounds", f"{doubt}, sounds")


def _fitted(samples: np.ndarray, length: int) -> np.ndarray:
    """Return samples cut, or padded with silence, to a length."""
    return samples[:length] if len(samples) >= length else np.pad(samples, (0, length - len(samples)))

"""The samples of sounds: their number before they are decoded, their values, and the tracks of videos."""

from __future__ import annotations

import io
import re
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from energon_bridge.core.encoder.deferred import decode_deferred
from energon_bridge.core.errors import DecodeError, SampleError
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.families.sound import DeferredSound, Sound, sound_of, track_of

av = pytest.importorskip("av")

from clips import tone, write_sound, write_video  # noqa: E402

SECONDS, ZEROS = 3.37, np.zeros(8, np.float32)
FILES = {
    "a.wav": ("pcm_s16le", 44100, {}),
    "a.flac": ("flac", 48000, {}),
    "flac.ogg": ("flac", 44100, {}),
    "vorbis.ogg": ("vorbis", 44100, {"strict": "-2"}),
    "a.opus": ("libopus", 48000, {}),
    "a.mp3": ("libmp3lame", 44100, {}),
    "low.mp3": ("libmp3lame", 16000, {}),
    "a.m4a": ("aac", 44100, {}),
    "a.aac": ("aac", 44100, {}),
    "a.mka": ("libopus", 48000, {}),
    "a.aiff": ("pcm_s16be", 22050, {}),
}
READ_BY_SOUNDFILE = [name for name in FILES if name not in ("a.m4a", "a.aac", "a.mka", "flac.ogg")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("sounds")
    return {
        name: write_sound(folder / name, codec=codec, rate=rate, seconds=SECONDS, **options).read_bytes()
        for name, (codec, rate, options) in FILES.items()
    }


def undecoded(value: Any, rate: int, monkeypatch: pytest.MonkeyPatch) -> Sound:
    """Return a sound, and fail if anything is decoded for it."""
    with monkeypatch.context() as patch:
        patch.setattr("energon_bridge.models.av.av_decoder.AudioReader", None)
        patch.setattr("energon_bridge.models.av.metadata.AudioReader", None)
        return sound_of(value, rate=rate)


def pcm(samples: np.ndarray, rate: int) -> bytes:
    """Return a WAV of 16-bit samples (samples, channels), written by the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(samples.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def error(made: np.ndarray, expected: np.ndarray) -> float:
    """Return the root mean square of the difference, as a part of that of the expected values."""
    return float(np.sqrt(np.mean((made - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("name", FILES)
def test_the_length_of_a_file_is_known_before_it_is_decoded(
    name: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = FILES[name][1]
    for rate in (own, 16000, 24000):
        sound = undecoded(AVDecoder(files[name]), rate, monkeypatch)
        samples = sound.get()
        assert samples.shape == (sound.length,)
        assert samples.dtype == np.float32
        assert sound.length / rate == pytest.approx(SECONDS, abs=0.05 if name == "a.aac" else 0.01)
        assert sound.duration == pytest.approx(sound.length / rate, abs=1 / rate)
    assert np.array_equal(undecoded(files[name], 24000, monkeypatch).get(), samples)


@pytest.mark.parametrize("name", READ_BY_SOUNDFILE)
def test_a_file_has_the_samples_that_soundfile_reads(name: str, files: dict[str, bytes]) -> None:
    soundfile = pytest.importorskip("soundfile")
    expected, rate = soundfile.read(io.BytesIO(files[name]), dtype="float32")
    made = sound_of(files[name], rate=rate).get()
    if name in ("a.wav", "a.flac", "a.aiff"):
        assert np.array_equal(made, expected.mean(axis=1, dtype=np.float32))
        return
    length = min(len(made), len(expected))
    assert max(len(made), len(expected)) - length < 0.005 * rate  # how much of the last block is heard
    assert error(made[:length], expected.mean(axis=1)[:length]) < (0.02 if name == "a.opus" else 0.001)


@pytest.mark.parametrize("name", ["a.m4a", "a.mka", "a.mp3", "low.mp3", "a.opus", "flac.ogg"])
def test_what_an_encoder_puts_before_a_sound_is_not_heard(name: str, files: dict[str, bytes]) -> None:
    rate = FILES[name][1]
    written = tone(0, int(SECONDS * rate), rate).mean(axis=0)
    made = sound_of(files[name], rate=rate).get()[: len(written)]
    inner = slice(rate // 4, 2 * rate)
    shifts = {shift: error(made[inner], np.roll(written, shift)[inner]) for shift in range(-3, 4)}
    assert min(shifts, key=lambda shift: shifts[shift]) == 0
    assert shifts[0] < 0.1


@pytest.mark.parametrize("own", [48000, 44100, 22050, 11025, 8000])
def test_resampled_samples_are_those_of_the_tone_at_the_new_rate(own: int) -> None:
    count = 2 * own + 7
    at = np.arange(count) / own
    given = np.stack([np.sin(2 * np.pi * 1000 * at), 0.5 * np.sin(2 * np.pi * 3000 * at)]).astype(np.float32)
    sound = sound_of((given, own), rate=16000)
    assert sound.length == int(np.ceil(count * 16000 / own))
    new = np.arange(sound.length) / 16000
    expected = (np.sin(2 * np.pi * 1000 * new) + 0.5 * np.sin(2 * np.pi * 3000 * new)) / 2
    assert error(sound.get()[200:-200], expected[200:-200]) < 0.0005


def test_eight_channels_are_averaged(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).integers(-20000, 20000, (5000, 8))
    made = sound_of(pcm(samples, 8000), rate=8000).get()
    assert np.allclose(made, samples.mean(axis=1) / 32768, atol=1e-6)


LOW, HIGH = (np.sin(np.arange(16000) * pitch / 16000, dtype=np.float32) / 2 for pitch in (1000, 9000))
ODD = {
    "unlike": (np.stack([LOW, HIGH]), None),
    "the same": (np.stack([LOW, LOW]), None),
    "one side": (np.stack([LOW, 0 * LOW]), None),
    "in the middle of six": (np.stack([0 * LOW, 0 * LOW, LOW, *[0 * LOW] * 3]), None),
    "reversed": (np.stack([LOW, -LOW]), "channels that cancel each other"),
    "nearly reversed": (np.stack([LOW, -0.9 * LOW]), "channels that cancel each other"),
    "integers as floats": (20000 * np.stack([LOW, HIGH]), "beyond [-1, 1]"),
    "a third above": (np.stack([2.7 * LOW, 0 * LOW]), "beyond [-1, 1]"),
    "loud": (np.stack([1.9 * LOW, 1.9 * LOW]), None),
    "as resampling leaves it": (np.stack([2.1 * LOW, LOW]), None),
    "silent": (np.stack([0 * LOW, 0 * LOW]), None),  # lint names it
}


@pytest.mark.parametrize("kind", ["array", "file"])
@pytest.mark.parametrize("name", ODD)
def test_sounds_that_a_model_would_not_hear_as_people_do_are_named_once(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples, said = ODD[name]
    soundfile.write(tmp_path / "a.wav", samples.T, 16000, subtype="FLOAT")
    value = (samples, 16000) if kind == "array" else AVDecoder((tmp_path / "a.wav").read_bytes(), name="a.wav")
    for _ in range(2):
        np.testing.assert_allclose(sound_of(value, rate=16000).get(), samples.mean(axis=0), rtol=1e-6, atol=1e-7)
    assert len(caplog.messages) == (said is not None)
    assert said is None or said in caplog.messages[0]
    assert said is None or ("an array" if kind == "array" else "part 'a.wav'") in caplog.messages[0]


@pytest.mark.parametrize(("codec", "form", "named"), [("libmp3lame", "mp3", False), ("pcm_f32le", "wav", True)])
def test_what_codecs_with_losses_overshoot_is_not_named(
    codec: str, form: str, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Noise that is cut off at full scale, of which MP3 of a low rate makes samples of more than 2."""
    file = io.BytesIO()
    noise = np.clip(3 * np.random.default_rng(3).normal(size=32000), -1, 1).astype(np.float32)
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=16000, layout="mono")
        stream.bit_rate = 32000
        samples = noise if form == "mp3" else 1.6 * noise
        kind = "fltp" if form == "mp3" else "flt"
        for start in range(0, len(samples), 576):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + 576], format=kind, layout="mono")
            frame.sample_rate, frame.pts = 16000, start
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    made = sound_of(AVDecoder(file.getvalue(), name=f"a.{form}"), rate=16000).get()
    assert np.abs(made).max() > 1.5
    assert [message for message in caplog.messages if "beyond [-1, 1]" in message] == caplog.messages
    assert len(caplog.messages) == named


def test_given_samples_have_any_usual_form() -> None:
    samples = np.random.default_rng(2).uniform(-1, 1, 4000).astype(np.float32)
    both = np.stack([samples, -0.5 * samples])
    pairs = [
        ((samples, 16000), samples),
        ((samples.astype(np.float64), 16000.0), samples),
        (({"array": samples, "sampling_rate": 16000, "path": "a.wav"}), samples),
        ({"array": samples.tolist(), "sampling_rate": 16000}, samples),
        ((torch.from_numpy(samples), 16000), samples),
        ((torch.from_numpy(samples).bfloat16(), 16000), torch.from_numpy(samples).bfloat16().float().numpy()),
        ((both, 16000), both.mean(axis=0)),
        ((both.T, 16000), both.mean(axis=0)),
        ((torch.from_numpy(both.T), np.int64(16000)), both.mean(axis=0)),
        (((samples * 32767).astype(np.int16), 16000), (samples * 32767).astype(np.int16) / 32768),
        ({"bytes": pcm((samples[:, None] * 32767), 16000), "path": None}, (samples * 32767).astype(np.int16) / 32768),
    ]
    for value, expected in pairs:
        sound = sound_of(value, rate=16000)
        made = sound.get()
        assert made.shape == (sound.length,) == (4000,)
        assert made.dtype == np.float32
        assert np.allclose(made, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (ZEROS, r"must tell the rate of its samples, a positive integer, got None: give \(samples, rate\)"),
        ((ZEROS, 0), "a positive integer, got 0"),
        ((ZEROS, 16000.5), "a positive integer, got 16000.5"),
        ({"array": ZEROS}, "a positive integer, got None"),
        ((ZEROS[:0], 16000), "a sound has not a single sample"),
        ((np.zeros((2, 2, 2), np.float32), 16000), r"got float32 of shape \(2, 2, 2\)"),
        ((np.zeros(3, np.int64), 16000), r"integers of 8, 16 or 32 bits, got int64 of shape \(3,\)"),
        ("a.wav", "must be a decoder, the bytes of a file, or samples .* got 'a.wav'"),
        ({"path": "a.wav"}, "got {'path': 'a.wav'}"),
        (b"no sound", "cannot be opened as video or sound"),
    ],
)
def test_what_is_no_sound_is_refused(value: Any, complaint: str) -> None:
    with pytest.raises(SampleError, match=complaint):
        sound_of(value, rate=16000)


def test_a_file_that_is_cut_off_is_refused_with_both_lengths(files: dict[str, bytes]) -> None:
    data = files["a.mp3"]
    with pytest.raises(
        DecodeError, match=rf"is cut off: it has {len(data) // 2} of \d+ bytes. Copy it again"
    ) as caught:
        sound_of(data[: len(data) // 2], rate=16000)
    told = int(re.findall(r"of (\d+) bytes", str(caught.value))[0])
    assert len(data) - 50 < told <= len(data)  # with or without the tag, which some programs count
    sound = sound_of(files["a.flac"][: len(files["a.flac"]) // 2], rate=16000)
    with pytest.raises(DecodeError, match="cannot be decoded"):
        sound.get()


def test_an_absurd_rate_is_refused(files: dict[str, bytes]) -> None:
    wav = files["a.wav"]
    for rate in (0, 4_000_000_000):
        damaged = wav[:24] + rate.to_bytes(4, "little") + wav[28:]
        with pytest.raises(DecodeError):
            sound_of(damaged, rate=16000).get()


def test_headers_that_tell_too_little_are_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    data = files["a.mp3"]
    at = next(data.index(name) for name in (b"Xing", b"Info") if name in data)
    assert data[at + 7] & 1  # it has a number of frames
    few = data[: at + 8] + (40).to_bytes(4, "big") + data[at + 12 :]
    sound = sound_of(few, rate=16000)
    assert sound.duration < 1.1
    with pytest.raises(DecodeError, match=r"has more than 1\.\d\d s of sound, but its headers tell \d\.\d\d s"):
        sound.get()


@pytest.mark.parametrize("form", ["mp3", "aac"])
def test_files_without_a_length_in_their_header_are_counted_by_packets(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, quiet = {"mp3": "libmp3lame", "aac": "aac"}[form], tmp_path / f"a.{form}"
    with av.open(str(quiet), "w", options={"write_xing": "0"} if form == "mp3" else {}) as out:
        stream = out.add_stream(codec, rate=44100, layout="mono")
        for number in range(400):  # quiet at first, so that the first packets are small
            block = np.random.default_rng(number).normal(0, 0.2 if number > 200 else 0, (1, 1152)).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 44100, number * 1152
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    sound = undecoded(quiet.read_bytes(), 44100, monkeypatch)
    assert sound.length == pytest.approx(400 * 1152, abs=3000)
    assert len(sound.get()) == sound.length


def test_sounds_of_one_decoder_are_decoded_on_many_threads(files: dict[str, bytes]) -> None:
    decoder = AVDecoder(files["a.flac"])
    sounds = [sound_of(decoder, rate=16000) for _ in range(8)]
    assert all(sound.alone for sound in sounds)
    alone = sounds[0].get()
    sample = {"sounds": [DeferredSound(sound=sound) for sound in sounds]}
    with ThreadPoolExecutor(8) as threads:
        for made in threads.map(Sound.get, sounds):
            assert np.array_equal(made, alone)
        decode_deferred([sample], threads.map)
    assert all(np.array_equal(made, alone) for made in sample["sounds"])
    with io.BytesIO(files["a.flac"]) as stream:  # has one position
        assert not sound_of(AVDecoder(stream), rate=16000).alone


def delayed(source: Path, target: Path, seconds: float) -> Path:
    """Write a video again, its sound later."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        streams = {one.index: new.add_stream_from_template(one) for one in old.streams}
        for packet in old.demux():
            if packet.size:
                if packet.stream.type == "audio":
                    packet.pts += int(seconds / packet.time_base)
                    packet.dts += int(seconds / packet.time_base)
                packet.stream = streams[packet.stream.index]
                new.mux(packet)
    return target


@pytest.mark.parametrize("form", ["mp4", "mkv"])
def test_the_track_of_a_video_begins_with_its_first_frame(tmp_path: Path, form: str) -> None:
    quiet = {"options": {"x264-params": "log-level=0"}}
    film = write_video(tmp_path / f"film.{form}", sound="flac", frames=50, container={"strict": "-2"}, **quiet)
    track = track_of(AVDecoder(film.read_bytes()), rate=48000)
    assert track is not None
    whole = track.get()
    written = tone(0, 96000)
    assert error(whole, ((written * 32767).astype(np.int16) / 32768).mean(axis=0)) < 1e-4
    late = track_of(AVDecoder(delayed(film, tmp_path / f"late.{form}", 0.5).read_bytes()), rate=48000)
    assert late is not None
    assert late.length == pytest.approx(96000 + 24000, abs=100)
    samples = late.get()
    assert not samples[:23900].any()
    assert error(samples[24100:48000], whole[100:24000]) < 0.05  # times in Matroska are whole milliseconds
    early = write_video(
        tmp_path / f"early.{form}", sound="flac", frames=50, first=25, container={"strict": "-2"}, **quiet
    )
    cut = track_of(AVDecoder(early.read_bytes()), rate=48000)
    assert cut is not None
    assert cut.length == pytest.approx(48000, abs=100)
    assert error(cut.get()[100:24000], whole[48100:72000]) < 0.05


def test_a_video_without_a_track_has_none(tmp_path: Path, files: dict[str, bytes]) -> None:
    film = write_video(tmp_path / "film.mp4", options={"x264-params": "log-level=0"}, frames=5).read_bytes()
    assert track_of(AVDecoder(film), rate=16000) is None
    assert track_of(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), rate=16000) is None
    with pytest.raises(DecodeError, match="has no audio stream, only video"):
        sound_of(AVDecoder(film), rate=16000)


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_f32le", "pcm_s24le"])
def test_of_a_wav_only_the_header_is_read_for_its_length(tmp_path: Path, codec: str) -> None:
    path = write_sound(tmp_path / "a.wav", codec=codec, seconds=20.0)
    decoder = AVDecoder.open(path)
    assert sound_of(decoder, rate=16000).length == 20 * 16000
    assert decoder.bytes_read < 100_000 < path.stat().st_size / 30


@pytest.mark.parametrize("name", ["a.wav", "a.m4a", "a.opus", "low.mp3"])
def test_a_sound_that_is_cut_off_is_the_beginning_of_the_whole(
    name: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = undecoded(files[name], 16000, monkeypatch)
    cut = whole.until(1.25)
    assert cut.length == 20000
    assert whole.until(4.0) is whole.until(None) is whole
    samples = cut.get()
    assert samples.shape == (20000,)
    assert error(samples[:19900], whole.get()[:19900]) < 1e-4  # but for the edge of the resampling filter
    given = sound_of((whole.get(), 16000), rate=16000).until(1.25)
    np.testing.assert_array_equal(given.get(), whole.get()[:20000])


def test_a_late_track_may_be_cut_off_before_it_begins(tmp_path: Path) -> None:
    quiet = {"options": {"x264-params": "log-level=0"}}
    film = write_video(tmp_path / "film.mp4", sound="flac", frames=50, container={"strict": "-2"}, **quiet)
    late = track_of(AVDecoder(delayed(film, tmp_path / "late.mp4", 0.5).read_bytes()), rate=48000)
    assert late is not None
    assert not late.until(0.3).get().any()
    assert late.until(0.3).get().shape == (14400,)
    assert late.until(0.7).get()[25000:].any()

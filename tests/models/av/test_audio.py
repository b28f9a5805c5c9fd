"""Sound: every sample is the one that decoding the whole file gives; WAV files are read as libsndfile reads them."""

from __future__ import annotations

import random
import struct
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import all_samples, rewrite, tone, write_sound, write_video

from energon_bridge.core.errors import ConfigurationError, DecodeError
from energon_bridge.models.av import (
    AVDecoder,
    get_clips_uniform,
    get_single_frames_uniform,
    media_file as media_module,
    sound as sound_module,
)
from energon_bridge.models.families.sound import sound_of

KINDS: dict[str, dict[str, Any]] = {
    "16.wav": {"codec": "pcm_s16le"},
    "24.wav": {"codec": "pcm_s24le", "rate": 44100},
    "float.wav": {"codec": "pcm_f32le", "rate": 8000},
    "flac.flac": {"codec": "flac"},
    "mp3.mp3": {"codec": "libmp3lame", "rate": 44100},
    "opus.ogg": {"codec": "libopus"},
    "aac.m4a": {"codec": "aac", "aac_pns": "0"},
    "aac.mka": {"codec": "aac", "aac_pns": "0"},
    "mp3.mka": {"codec": "libmp3lame"},
    "pcm.mka": {"codec": "pcm_s16le"},
    "flac.mka": {"codec": "flac"},
    "opus.webm": {"codec": "libopus"},
}
TOLERANCE = {"aac": 1e-3, "opu": 1e-3}  # decoders that come from elsewhere settle, but not to the last bit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sounds")
    for name, settings in KINDS.items():
        write_sound(made / name, **settings)
    return made


def write_wav(path: Path, content: bytes, *, channels: int = 1, width: int = 2, rate: int = 8000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


@pytest.mark.parametrize("name", KINDS)
def test_samples_are_those_of_the_whole_file(name: str, folder: Path) -> None:
    expected = all_samples(folder / name)
    total, choose = expected.shape[1], random.Random(name)
    decoder = AVDecoder((folder / name).read_bytes())
    tolerance = TOLERANCE.get(name[:3], 0)
    starts = [0, total - 500, *(choose.randrange(total - 1) for _ in range(12))]
    ranges = [(first, min(total, first + choose.randrange(1, 9000))) for first in starts]
    clips, times = decoder.get_audio_clips(ranges, "samples")
    for (first, last), clip, (begin, end) in zip(ranges, clips, times, strict=True):
        assert clip.dtype == torch.float32
        assert clip.shape == (2, last - first)
        np.testing.assert_allclose(clip.numpy(), expected[:, first:last], atol=tolerance)
        rate = decoder.get_audio_samples_per_second()
        assert end - begin == pytest.approx((last - first) / rate)
        (again,), _ = decoder.get_audio_clips([(begin, end)])  # the same by its seconds
        np.testing.assert_allclose(again.numpy(), clip.numpy(), atol=tolerance)
    assert decoder.get_audio().audio_clips[0].shape == expected.shape
    assert decoder.get_metadata(get_audio_num_samples=True).audio_num_samples == total
    assert not decoder.has_video_stream()
    found = decoder.get_frames(video_decode_audio=True)
    assert (found.video_clips, len(found.audio_clips)) == ([], 1)


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (2, 1), (3, 2), (4, 2)])
def test_wav_files_are_read_as_libsndfile_reads_them(width: int, channels: int, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    path, count, rate = tmp_path / "a.wav", 30000, 16000
    content = np.random.default_rng(width).integers(0, 256, count * channels * width, dtype=np.uint8).tobytes()
    write_wav(path, content, channels=channels, width=width, rate=rate)
    decoder = AVDecoder.open(path)
    for begin, end in [(0, 0.25), (0.3333, 1.2), (1.5, 1.8751)]:
        (clip,), ((start, stop),) = decoder.get_audio_clips([(begin, end)])
        expected, _ = soundfile.read(
            path, start=round(begin * rate), stop=min(count, round(end * rate)), dtype="float32", always_2d=True
        )
        np.testing.assert_array_equal(clip.numpy(), expected.T)
        assert (start, stop) == pytest.approx((begin, min(end, count / rate)), abs=1 / rate)


def test_of_a_long_file_little_is_read(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "long.wav", bytes(120 * 2 * 48000), rate=48000)
    decoder = AVDecoder.open(path)
    decoder.get_audio_clips([(100.0, 101.0)])
    assert decoder.bytes_read < 0.1 * path.stat().st_size


def test_native_samples_and_other_rates(folder: Path) -> None:
    decoder = AVDecoder.open(folder / "16.wav", audio_format="native")
    assert decoder.get_audio().audio_clips[0].dtype == torch.int16
    (clip,), ((begin, end),) = AVDecoder.open(folder / "16.wav").get_audio_clips([(1.0, 2.0)], audio_sample_rate=16000)
    assert (begin, end) == (1.0, 2.0)
    assert clip.shape == (2, 16000)
    np.testing.assert_allclose(clip.numpy()[:, 50:-50], tone(16000, 16000, 16000)[:, 50:-50], atol=2e-3)
    with pytest.raises(ConfigurationError, match="leave out audio_format='native'"):
        decoder.get_audio_clips([(1.0, 2.0)], audio_sample_rate=16000)
    with pytest.raises(ConfigurationError, match="audio_format must be float32 or native, got 'int16'"):
        AVDecoder(b"", audio_format="int16")  # type: ignore[arg-type]


def test_uniform_clips_of_sound(folder: Path) -> None:
    clips = get_clips_uniform(AVDecoder.open(folder / "mp3.mp3"), 0.5, 4, request_audio=True)
    assert [clip.shape for clip in clips.audio_clips] == [(2, 22050)] * 4
    assert clips.audio_timestamps[-1][1] == pytest.approx(5.0, abs=0.05)


def test_what_cannot_be_had_is_refused_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    decoder = AVDecoder.open(folder / "16.wav")
    with pytest.raises(DecodeError, match=r"16\.wav: .*begins at second 5\.5, after the end of the sound"):
        decoder.get_audio_clips([(5.5, 6.0)])
    with pytest.raises(DecodeError, match=r"16\.wav has no video stream, only audio"):
        decoder.get_video()
    assert decoder.get_video_duration() == (None, None)
    with pytest.raises(DecodeError, match="without a single sample"):
        AVDecoder.open(write_wav(tmp_path / "empty.wav", b"")).get_audio()


def mp3(path: Path, channels: int) -> bytes:
    """Return an MP3 of nothing but its packets."""
    layout = {1: "mono", 2: "stereo"}[channels]
    with av.open(str(path), "w", options={"write_xing": "0", "id3v2_version": "0"}) as out:
        stream: Any = out.add_stream("libmp3lame", rate=48000, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.zeros((channels, 24_000), np.int16), format="s16p", layout=layout)
        frame.sample_rate = 48000
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path.read_bytes()


def test_sound_whose_channels_change_is_refused(tmp_path: Path) -> None:
    data = mp3(tmp_path / "two.mp3", 2) + mp3(tmp_path / "one.mp3", 1)
    with pytest.raises(DecodeError, match=r"a\.mp3.? has sound whose number of channels changes"):
        AVDecoder(data, name="a.mp3").get_audio()


@pytest.mark.parametrize(
    ("codec", "form", "layout", "channels"),
    [
        ("aac", "m4a", "5.1", 6),
        ("libopus", "ogg", "5.1", 6),
        ("flac", "flac", "5.1", 6),
        ("pcm_s16le", "wav", "5.1", 6),
        ("pcm_s16le", "wav", "7.1", 8),  # in one plane: more than eight are for the next test
    ],
)
def test_many_channels(codec: str, form: str, layout: str, channels: int, tmp_path: Path) -> None:
    path, rate = tmp_path / f"a.{form}", 48000
    at = np.arange(rate) / rate
    sound = np.stack([np.sin(2 * np.pi * 200 * (n + 1) * at) * 0.3 for n in range(channels)])
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(codec, rate=rate, layout=layout)
        packed = np.ascontiguousarray((sound * 32767).astype(np.int16).T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    expected = all_samples(path)
    assert expected.shape[0] == channels
    decoder = AVDecoder(path.read_bytes())
    (whole,) = decoder.get_audio().audio_clips
    np.testing.assert_array_equal(whole.numpy(), expected)
    (part,), _ = decoder.get_audio_clips([(100, 5000)], "samples")
    np.testing.assert_array_equal(part.numpy(), expected[:, 100:5000])
    (slow,), _ = decoder.get_audio_clips([(0.2, 0.7)], audio_sample_rate=16000)
    assert slow.shape == (channels, 8000)
    power = [abs(np.fft.rfft(one)).argmax() * 2 for one in slow.numpy()]  # each channel is where it was
    heard = [abs(np.fft.rfft(one)).argmax() * 2 for one in expected[:, 9600:33600]]
    assert power == heard


def test_only_planes_that_there_are_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyAV's own `planes` and `to_ndarray` ask for one more where there are eight or more."""
    asked: list[int] = []

    def plane(block: Any, number: int) -> bytes:
        asked.append(number)
        return np.full(3, number, np.float32).tobytes()

    monkeypatch.setattr("av.audio.plane.AudioPlane", plane)
    layout, form = SimpleNamespace(nb_channels=9), SimpleNamespace(is_planar=True, name="fltp")
    array = sound_module._array(SimpleNamespace(layout=layout, format=form, samples=3))
    assert asked == list(range(9))
    np.testing.assert_array_equal(array, np.arange(9, dtype=np.float32)[:, None].repeat(3, 1))


def test_a_list_of_where_channels_are_heard_is_taken_once() -> None:
    """PyAV frees it with each object that has it: the codec gets a number of channels instead, and one object stays."""
    names = {"8 channels (FL+FR+FC+LFE+SL+SR+BL+BR)": "8 channels", "5.1": None, "2 channels": None}
    for name, expected in names.items():
        layout = SimpleNamespace(name=name, nb_channels=8)
        context = SimpleNamespace(layout=layout)
        media_module._number_channels(context)
        assert context.layout == (expected or layout)
        assert (layout in media_module._listed_layouts) == (expected is not None)
    del media_module._listed_layouts[-1]


def test_a_clip_too_short_to_resample_is_refused(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", codec="pcm_s16le", seconds=0.001)
    with pytest.raises(DecodeError, match="a clip of 48 samples is too short to resample it from 48000 to 16000"):
        AVDecoder(path.read_bytes()).get_audio_clips([(0, 1)], audio_sample_rate=16000)


@pytest.mark.parametrize("codec", ["adpcm_ima_wav", "adpcm_ms", "pcm_mulaw"])
@pytest.mark.parametrize("rate", [11025, 44100])
def test_samples_of_a_wav_that_is_compressed(codec: str, rate: int, tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", codec=codec, rate=rate)
    expected = all_samples(path)
    for first in (rate * 2, rate * 3 + 17, rate * 4):
        (part,), _ = AVDecoder(path.read_bytes()).get_audio_clips([(first, first + 500)], "samples")
        np.testing.assert_array_equal(part.numpy(), expected[:, first : first + 500])


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_s24le", "pcm_alaw"])
def test_a_rate_of_bytes_that_is_wrong_moves_nothing(codec: str, tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", codec=codec, rate=8000)
    expected = all_samples(path)
    data = bytearray(path.read_bytes())
    data[28:32] = (1234).to_bytes(4, "little")
    for unit, scale in (("samples", 1), ("seconds", 1 / 8000)):
        (part,), _ = AVDecoder(bytes(data)).get_audio_clips([(24_016 * scale, 24_816 * scale)], unit)
        np.testing.assert_array_equal(part.numpy(), expected[:, 24_016:24_816])


def test_a_decoder_that_remembers_all_blocks_begins_at_the_first(tmp_path: Path) -> None:
    try:
        av.codec.Codec("libopencore_amrnb", "w")
    except av.codec.codec.UnknownCodecError:
        pytest.skip("PyAV without an encoder of AMR")
    with av.open(str(tmp_path / "a.3gp"), "w") as out:
        stream: Any = out.add_stream("libopencore_amrnb", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray((tone(0, 32_000, 8000)[:1] * 30_000).astype(np.int16), "s16", "mono")
        frame.sample_rate, frame.pts = 8000, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    expected = all_samples(tmp_path / "a.3gp")
    (part,), _ = AVDecoder((tmp_path / "a.3gp").read_bytes()).get_audio_clips([(16_000, 20_000)], "samples")
    np.testing.assert_array_equal(part.numpy(), expected[:, 16_000:20_000])


def test_an_ogg_that_was_cut_begins_before_zero(tmp_path: Path) -> None:
    """As `ffmpeg -ss 1.5 -c copy` writes it: pages are copied whole, and time 0 is in the first of them."""
    path = write_sound(tmp_path / "a.ogg", codec="libopus")
    with av.open(str(path)) as old, av.open(str(tmp_path / "b.ogg"), "w") as new:
        out = new.add_stream_from_template(old.streams.audio[0])
        for packet in old.demux(audio=0):
            if packet.pts is not None and packet.size and packet.pts >= 48_000:
                packet.pts, packet.stream = packet.pts - 72_000, out
                packet.dts = packet.pts
                new.mux(packet)
    with av.open(str(tmp_path / "b.ogg")) as cut:
        begin = next(cut.decode(audio=0)).pts
    expected = all_samples(tmp_path / "b.ogg")[:, -begin:]
    assert begin < -10_000
    assert 160_000 < expected.shape[1] < 170_000
    heard = sound_of(AVDecoder((tmp_path / "b.ogg").read_bytes()), rate=48_000)
    assert heard.length == pytest.approx(expected.shape[1], abs=400)
    np.testing.assert_allclose(heard.get()[: expected.shape[1]], expected.mean(axis=0)[: heard.length], atol=1e-6)


@pytest.mark.parametrize(
    ("form", "channels"), [("aiff", 4), ("aiff", 6), ("caf", 4), ("caf", 6), ("mov", 4), ("mov", 6), ("mov", 8)]
)
def test_channels_in_an_order_of_the_file(form: str, channels: int, tmp_path: Path) -> None:
    path, layout = tmp_path / f"a.{form}", {4: "4.0", 6: "5.1", 8: "7.1"}[channels]
    sound = np.random.default_rng(channels).integers(-(1 << 15), 1 << 15, (60000, channels)).astype(np.int16)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("pcm_s16be", rate=48000, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound).reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate, frame.pts = 48000, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    data = path.read_bytes()
    assert sound.astype(">i2").tobytes() in data  # in this order
    for _ in range(10):
        decoder = AVDecoder(data)
        assert decoder.get_metadata().audio_channels == channels
        np.testing.assert_array_equal(decoder.get_audio().audio_clips[0].numpy().T * 32768, sound)
        (part,), _ = decoder.get_audio_clips([(50000, 50100)], "samples")
        np.testing.assert_array_equal(part.numpy().T * 32768, sound[50000:50100])


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("a.wav", codec) for codec in ("adpcm_ms", "adpcm_ima_wav", "libmp3lame", "pcm_mulaw", "pcm_s24le")),
        *(("a.w64", "adpcm_ms"), ("a.aiff", "adpcm_ima_qt"), ("a.mov", "adpcm_ima_qt"), ("a.avi", "adpcm_ima_wav")),
    ],
)
def test_clips_by_time_of_compressed_waves(name: str, codec: str, tmp_path: Path) -> None:
    """FFmpeg goes to times by the mean rate of bytes, which the header rounds: by half a percent, for adpcm_ms."""
    data = write_sound(tmp_path / name, codec=codec, rate=22050, seconds=6).read_bytes()
    whole = all_samples(tmp_path / name)
    for begin in (1.2, 3.3, 5.5):
        ((clip,), _) = AVDecoder(data).get_audio_clips([(begin, begin + 0.2)])
        first = round(begin * 22050)
        np.testing.assert_array_equal(clip.numpy(), whole[:, first : first + 4410])


@pytest.mark.parametrize("name", ["aac.m4a", "aac.mka", "opus.webm", "pcm.mka"])
def test_clips_by_time_follow_timestamps_that_jump(name: str, folder: Path, tmp_path: Path) -> None:
    """Expected: libav's decoded blocks, each at its timestamp, with silence between them."""
    jump = {"aac.m4a": 16 * 7440}.get(name, 16 * 155)  # 155 ms, in sixteenths of ticks

    def late(number: int, packet: Any, data: bytes) -> list[tuple[bytes, int, int]]:
        at = 16 * packet.pts + (jump if number >= 60 else 0)
        return [(data, at, at)]

    path = rewrite(folder / name, tmp_path / name, late)
    blocks: list[tuple[float, np.ndarray]] = []
    with av.open(str(path)) as container:
        for frame in container.decode(audio=0):
            array = frame.to_ndarray()
            planes = array if frame.format.is_planar else array.reshape(-1, 2).T
            scale = 1 if planes.dtype.kind == "f" else 32768
            blocks.append((frame.time or 0.0, planes.astype(np.float32) / scale))
    begin = blocks[0][0]
    line = np.zeros((2, 48000 * 6), np.float32)
    at = 0
    for time, planes in blocks:
        due = round((time - begin) * 48000)
        at = due if abs(due - at) > 960 else at  # timestamps of whole milliseconds waver
        line[:, at : at + planes.shape[1]] = planes
        at += planes.shape[1]
    decoder = AVDecoder(path.read_bytes())
    for first in (0.5, 1.0, 1.2, 2.5, 3.5):
        (clip,), ((start, end),) = decoder.get_audio_clips([(begin + first, begin + first + 0.5)])
        assert clip.shape == (2, 24000)
        assert (start, end) == pytest.approx((begin + first, begin + first + 0.5), abs=1e-3)
        at, slack = round(first * 48000), 0 if name == "aac.m4a" else 100
        likeness = [
            like(clip.numpy()[0], line[0, place : place + 24000]) for place in range(at - slack, at + slack + 1)
        ]
        assert max(likeness) > 0.75  # of a clip across the jump, one side may be off by a tick
    assert decoder.get_audio().audio_clips[0].shape == all_samples(path).shape


def like(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two sounds."""
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def test_sound_that_is_longer_than_the_pictures(tmp_path: Path) -> None:
    """FLV gives one duration, of the longer stream."""
    write_video(tmp_path / "v.mp4", frames=50)
    write_sound(tmp_path / "a.m4a", codec="aac", seconds=4)
    path = tmp_path / "both.flv"
    with av.open(str(path), "w") as out, av.open(str(tmp_path / "v.mp4")) as v, av.open(str(tmp_path / "a.m4a")) as a:
        made = []
        for source in (v, a):
            stream = out.add_stream_from_template(source.streams[0])
            made += [(packet.dts * packet.time_base, packet, stream) for packet in source.demux() if packet.size]
        for _, packet, stream in sorted(made, key=lambda one: one[0]):
            packet.stream = stream
            out.mux(packet)
    decoder = AVDecoder(path.read_bytes())
    with av.open(str(path)) as container:
        times = [float(frame.time or 0) for frame in container.decode(video=0)]
    assert decoder.get_video_duration(get_frame_count=True) == (pytest.approx(2.0), 50)
    assert decoder.get_audio_duration() == pytest.approx(4.0, abs=0.1)
    frames, found = get_single_frames_uniform(decoder, 6, return_timestamps=True)
    assert (len(frames), found[0], found[-1]) == (6, pytest.approx(times[0]), pytest.approx(times[-1]))
    clips = get_clips_uniform(decoder, 0.5, 3, request_video=True, request_audio=True)
    assert clips.video_timestamps is not None
    assert clips.video_timestamps[-1][1] == pytest.approx(times[-1] + 0.04, abs=0.01)


# Padding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "form"),
    [("aac", "m4a"), ("aac", "mov"), ("aac", "mp4"), ("libmp3lame", "mov"), ("libmp3lame", "mp4"), ("libopus", "mp4")],
)
@pytest.mark.parametrize("seconds", [0.1, 2.003])
def test_the_padding_of_the_last_block_is_no_sound(codec: str, form: str, seconds: float, tmp_path: Path) -> None:
    path = write_sound(tmp_path / f"a.{form}", codec=codec, seconds=seconds)
    count = int(48000 * seconds)
    assert_has_samples(AVDecoder(path.read_bytes()), count)


def assert_has_samples(decoder: AVDecoder, count: int) -> None:
    """Check the length of a sound that was made by `tone`, by each way to it."""
    sound = decoder.get_audio().audio_clips[0].numpy()
    assert sound.shape == (2, count)
    assert like(sound[0], tone(0, count)[0]) > 0.98
    found = decoder.get_metadata(get_audio_num_samples=True)
    assert (found.audio_num_samples, decoder.count_samples()) == (count, count)
    assert [found.audio_duration, decoder.get_audio_duration()] == pytest.approx([count / 48000] * 2)
    assert sum(block.shape[1] for block in decoder.map_sound(lambda at, samples: samples)) == count
    (whole,), ((begin, end),) = decoder.get_audio_clips([(0, 9)])
    (last,), ((_, end_of_last),) = decoder.get_audio_clips([(end - 0.01, 9)])
    assert (whole.shape[1], last.shape[1]) == (count, 480)
    assert [end - begin, end_of_last - begin] == pytest.approx([count / 48000] * 2)


def test_padding_that_itunes_tells(tmp_path: Path) -> None:
    """Without an edit list; the tag has the samples of the beginning, the end and in between."""
    count = 50_000
    path = write_sound(tmp_path / "a.m4a", codec="aac", seconds=count / 48000, container={"use_editlist": "0"})
    numbers = [0, 1024, -(count + 1024) % 1024]
    tag = "".join(f" {number:08X}" for number in numbers) + f" {count:016X}" + " 00000000" * 8
    decoder = AVDecoder(with_itunes_tag(path.read_bytes(), "iTunSMPB", tag))
    assert_has_samples(decoder, count)


def test_a_tag_that_leaves_out_more_than_padding_is_wrong(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.m4a", codec="aac", seconds=1)
    decoder = AVDecoder(with_itunes_tag(path.read_bytes(), "iTunSMPB", f" 00000000 00000400 00000080 {500:016X}"))
    assert_has_samples(decoder, 48000)


def with_itunes_tag(data: bytes, name: str, value: str) -> bytes:
    """Return an MP4, its index at its end, with a tag of iTunes."""

    def box(kind: bytes, content: bytes) -> bytes:
        return (8 + len(content)).to_bytes(4, "big") + kind + content

    parts = box(b"mean", bytes(4) + b"com.apple.iTunes") + box(b"name", bytes(4) + name.encode())
    parts += box(b"data", struct.pack(">II", 1, 0) + value.encode())
    hdlr = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    tags = box(b"udta", box(b"meta", bytes(4) + hdlr + box(b"ilst", box(b"----", parts))))
    at = data.rindex(b"moov") - 4
    return data[:at] + box(b"moov", data[at + 8 :] + tags)

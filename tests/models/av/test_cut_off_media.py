"""Where sounds end: files that are cut off, sizes that say "unknown", chains of Oggs, lengths that no header tells."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import X264, all_frames, all_samples, with_edits, write_sound, write_video

from energon_bridge.core.errors import DecodeError
from energon_bridge.models.av import AVDecoder, ends, get_single_frames_uniform
from energon_bridge.models.families.sound import sound_of

SECONDS = 3
KINDS: dict[str, dict[str, Any]] = {
    "a.wav": {"codec": "pcm_s16le"},
    "rf64.wav": {"codec": "pcm_s16le", "container": {"rf64": "always"}},
    "adpcm.wav": {"codec": "adpcm_ms"},
    "a.w64": {"codec": "pcm_s16le"},
    "a.aiff": {"codec": "pcm_s16be"},
    "a.caf": {"codec": "pcm_s16be"},
    "a.au": {"codec": "pcm_s16be"},
    "a.avi": {"codec": "pcm_s16le"},
    "a.flac": {"codec": "flac"},
    "a.mp3": {"codec": "libmp3lame", "rate": 44100},
    "opus.ogg": {"codec": "libopus"},
    "flac.ogg": {"codec": "flac"},
    "vorbis.ogg": {"codec": "vorbis", "strict": "-2"},
    "a.m4a": {"codec": "aac"},
    "fast.m4a": {"codec": "aac", "container": {"movflags": "faststart"}},
    "fragments.m4a": {"codec": "aac", "container": {"movflags": "frag_every_frame+empty_moov"}},
    "a.webm": {"codec": "libopus"},
    "a.mka": {"codec": "pcm_s16le"},
    "a.wma": {"codec": "wmav2", "rate": 44100, "b": "128000"},
}


def written(path: Path, *, codec: str, rate: int = 48000, seconds: float = SECONDS, **options: Any) -> bytes:
    return write_sound(path, codec=codec, rate=rate, seconds=seconds, **options).read_bytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("ends")
    return {name: written(folder / name, **settings) for name, settings in KINDS.items()}


WAYS: dict[str, Callable[[AVDecoder], float]] = {
    "whole": lambda decoder: decoder.get_audio().audio_clips[0].shape[1] / decoder.get_audio_samples_per_second(),
    "clip": lambda decoder: (
        decoder.get_audio_clips([(0, float("inf"))], audio_sample_rate=16000)[0][0].shape[1] / 16000
    ),
    "conversation": lambda decoder: len(sound_of(decoder, rate=16000).get()) / 16000,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_a_sound_that_is_cut_off_is_an_error_that_names_the_part(name: str, way: str, files: dict[str, bytes]) -> None:
    data = files[name]
    assert WAYS[way](AVDecoder(data, name=name)) == pytest.approx(SECONDS, abs=0.07)
    for size in (len(data) // 2, len(data) * 9 // 10, len(data) - 3000, len(data) - 700):
        with pytest.raises(DecodeError, match=f"part '{name}' .*(cut off|cannot be)"):
            WAYS[way](AVDecoder(data[:size], name=name))


@pytest.mark.parametrize(
    ("name", "codec", "container"),
    [
        ("a.mkv", "libx264", {}),
        ("a.webm", "libvpx", {}),
        ("fragments.mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
        ("fast.mp4", "libx264", {"movflags": "faststart"}),
        ("a.avi", "mpeg4", {}),
        ("a.wmv", "wmv2", {}),
        ("a.flv", "libx264", {}),
        ("old.flv", "flv", {}),
    ],
)
def test_a_video_that_is_cut_off_is_an_error_that_names_the_part(
    name: str, codec: str, container: dict[str, str], tmp_path: Path
) -> None:
    data = write_video(tmp_path / name, codec=codec, frames=40, container=container).read_bytes()
    assert len(AVDecoder(data).get_video().video_clips[0]) == 40
    for size in (len(data) // 2, len(data) * 9 // 10):
        decoder = AVDecoder(data[:size], name=name)
        with pytest.raises(DecodeError, match=f"part '{name}' .*(cut off|cannot be)"):
            decoder.get_video()


def test_sizes_of_a_flac_that_is_cut_off_are_not_written_down(files: dict[str, bytes]) -> None:
    """Its header tells the number of samples, by which it seems whole; nothing is decoded here."""
    data = files["a.flac"]
    assert AVDecoder(data).get_metadata(get_audio_num_samples=True).audio_num_samples == SECONDS * 48000
    with pytest.raises(DecodeError, match=r"part 'a.flac' is cut off: it has 1\.\d+ of 3.00 s"):
        AVDecoder(data[: len(data) // 2], name="a.flac").get_metadata(get_audio_num_samples=True)


def test_what_lies_before_the_cut_is_there(files: dict[str, bytes]) -> None:
    data = files["a.wav"]
    (clip,), _ = AVDecoder(data[: len(data) // 2]).get_audio_clips([(0.5, 1)])
    (whole,), _ = AVDecoder(data).get_audio_clips([(0.5, 1)])
    np.testing.assert_array_equal(clip, whole)


def test_bytes_behind_a_sound_are_no_cut(files: dict[str, bytes]) -> None:
    for name in ("a.wav", "a.w64", "a.aiff", "a.caf", "a.mka"):
        for way in WAYS.values():
            assert way(AVDecoder(files[name] + bytes(100))) == pytest.approx(SECONDS, abs=0.04)


@pytest.mark.parametrize("length", [0, 0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFF - 36])
def test_a_wav_of_unknown_length_goes_to_the_end_of_its_file(length: int, files: dict[str, bytes]) -> None:
    """As ffmpeg, sox and arecord write it into a pipe; the samples are counted by their bytes."""
    data = bytearray(files["a.wav"])
    at = data.index(b"data") + 4
    struct.pack_into("<I", data, at, length)
    struct.pack_into("<I", data, 4, min(length + 36, 0xFFFFFFFF))
    samples = np.frombuffer(bytes(data[at + 4 :]), "<i2").reshape(-1, 2).T / np.float32(32768)
    decoder = AVDecoder(bytes(data))
    np.testing.assert_array_equal(decoder.get_audio().audio_clips[0].numpy(), samples)
    assert decoder.get_metadata(get_audio_num_samples=True).audio_num_samples == SECONDS * 48000
    assert decoder.get_time_range(video=False, audio=True) == (0, SECONDS)
    assert sound_of(bytes(data), rate=48000).length == SECONDS * 48000


@pytest.mark.parametrize(
    "tail", [b"\n", b"12345", b"a trailer of a camera, in no box", bytes(7), bytes.fromhex("7fffffff") * 9]
)
def test_bytes_behind_an_mp4_are_no_cut(tail: bytes, files: dict[str, bytes]) -> None:
    """As cameras and editors append them; ffmpeg passes over them, too."""
    for name in ("a.m4a", "fast.m4a", "fragments.m4a"):
        for way in WAYS.values():
            assert way(AVDecoder(files[name] + tail)) == pytest.approx(SECONDS, abs=0.07)


def test_sizes_as_other_programs_write_them_are_no_cut(files: dict[str, bytes]) -> None:
    """The size of the whole file in a WAV, AVI or MP3 with a tag; of a pipe, down to whole samples of 24 bits (sox)."""
    wave, movie, song = bytearray(files["a.wav"]), bytearray(files["a.avi"]), bytearray(files["a.mp3"])
    at = wave.index(b"data") + 4
    made = []
    for size in (len(wave), len(wave) - 8, 0x7FFFEFFE):
        struct.pack_into("<I", wave, at, size)
        made.append(bytes(wave))
    struct.pack_into("<I", movie, 4, len(movie))
    assert song[:3] == b"ID3"
    struct.pack_into(">I", song, max(song.find(b"Xing"), song.find(b"Info")) + 12, len(song))
    for data in (*made, bytes(movie), bytes(song)):
        for way in WAYS.values():
            assert way(AVDecoder(data)) == pytest.approx(SECONDS, abs=0.07)


def test_other_unknown_lengths_go_to_the_end_too(files: dict[str, bytes]) -> None:
    au, caf = bytearray(files["a.au"]), bytearray(files["a.caf"])
    struct.pack_into(">I", au, 8, 0xFFFFFFFF)
    struct.pack_into(">q", caf, caf.index(b"data") + 4, -1)
    webm = files["a.webm"]
    at = webm.index(b"\x18\x53\x80\x67") + 4
    live = webm[:at] + b"\x01" + b"\xff" * 7 + webm[at + 8 :]
    for data in (bytes(au), bytes(caf), live):
        for way in WAYS.values():
            assert way(AVDecoder(data)) == pytest.approx(SECONDS, abs=0.02)


class Pipe:
    """Where a writer cannot go back to the header."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> int:
        self.written += data
        return len(data)


PIPED: dict[str, tuple[str, str, dict[str, str]]] = {
    "wav": ("wav", "pcm_s16le", {}),
    "rf64": ("wav", "pcm_s16le", {"rf64": "always"}),
    "adpcm": ("wav", "adpcm_ima_wav", {}),
    "w64": ("w64", "pcm_s16le", {}),
    "aiff": ("aiff", "pcm_s16be", {}),
    "aifc": ("aiff", "pcm_mulaw", {}),
    "caf": ("caf", "pcm_s16be", {}),
    "au": ("au", "pcm_s16be", {}),
    "flac": ("flac", "flac", {}),
    "wavpack": ("wv", "wavpack", {}),
    "tta": ("tta", "tta", {}),
}


@pytest.mark.parametrize("kind", PIPED)
def test_a_sound_that_was_written_into_a_pipe_is_whole(kind: str, tmp_path: Path) -> None:
    """The samples are FFmpeg's of the same sound, written to a file that it can go back in."""
    form, codec, options = PIPED[kind]
    sound = (np.sin(np.arange(SECONDS * 48000) / 20) * 9000).astype(np.int16)

    def write(target: Any) -> None:
        with av.open(target, "w", format=form, container_options=options) as container:
            stream: Any = container.add_stream(codec, rate=48000, layout="mono")
            frame = av.AudioFrame.from_ndarray(sound[None], format="s16", layout="mono")
            frame.sample_rate = 48000
            resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=48000)
            for part in (*resampler.resample(frame), *resampler.resample(None)):
                container.mux(stream.encode(part))
            container.mux(stream.encode(None))

    pipe = Pipe()
    write(pipe)
    write(str(tmp_path / "a"))
    data = bytes(pipe.written)
    expected = all_samples(tmp_path / "a")
    for stream in (data, io.BytesIO(data)):
        decoder = AVDecoder(stream)  # type: ignore[arg-type]
        np.testing.assert_array_equal(decoder.get_audio().audio_clips[0].numpy(), expected)
        seconds = expected.shape[1] / 48000
        assert decoder.get_metadata().audio_duration == pytest.approx(seconds, abs=1e-4)
        assert decoder.get_time_range(video=False, audio=True)[1] == pytest.approx(seconds, abs=1e-4)
    assert sound_of(data, rate=48000).length == expected.shape[1]


@pytest.mark.parametrize("frames", [0, 0x7F000000 // 4, 0x7FFFFFFF])
@pytest.mark.parametrize("length", [0, 8, 0x7F000000 + 8, 0x7FFFFFFF])
def test_an_aiff_of_unknown_length_goes_to_the_end_of_its_file(
    length: int, frames: int, files: dict[str, bytes], tmp_path: Path
) -> None:
    """As ffmpeg (0) and sox (0x7F000000 bytes of samples) write it into a pipe; sox counts its frames by them."""
    data = bytearray(files["a.aiff"])
    struct.pack_into(">I", data, data.index(b"SSND") + 4, length)
    struct.pack_into(">I", data, data.index(b"COMM") + 10, frames)
    struct.pack_into(">I", data, 4, min(length + 46, 0xFFFFFFFF) if length else 0)
    (tmp_path / "whole.aiff").write_bytes(files["a.aiff"])
    (tmp_path / "piped.aiff").write_bytes(data)
    expected = all_samples(tmp_path / "whole.aiff")
    for decoder in (AVDecoder(bytes(data)), AVDecoder.open(tmp_path / "piped.aiff")):
        np.testing.assert_array_equal(decoder.get_audio().audio_clips[0].numpy(), expected)
        assert decoder.get_metadata(get_audio_num_samples=True).audio_num_samples == SECONDS * 48000
        assert decoder.get_time_range(video=False, audio=True) == (0, SECONDS)
    assert sound_of(bytes(data), rate=48000).length == SECONDS * 48000


@pytest.mark.parametrize("sound", ["mp3", ""])
def test_an_avi_that_was_written_into_a_pipe_has_the_length_of_its_frames(sound: str, tmp_path: Path) -> None:
    """FFmpeg makes lengths up for it, of an hour and more."""
    path = write_video(tmp_path / "a.avi", codec="mpeg4", frames=40, sound=sound)
    pipe = Pipe()
    with av.open(str(path)) as source, av.open(pipe, "w", format="avi") as target:
        streams = {one.index: target.add_stream_from_template(one) for one in source.streams}
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream.index]
                target.mux(packet)
    whole = AVDecoder(path.read_bytes())
    (tmp_path / "piped.avi").write_bytes(pipe.written)
    for piped in (AVDecoder(bytes(pipe.written)), AVDecoder.open(tmp_path / "piped.avi")):
        found = piped.get_metadata()
        assert found.video_num_frames == 40
        assert found.video_duration == pytest.approx(float(40 * frame_seconds(path)), abs=0.05)
        assert found.audio_duration == whole.get_metadata().audio_duration
        assert piped.get_time_range(video=True, audio=bool(sound))[1] < 40 * frame_seconds(path) + 0.1


def frame_seconds(path: Path) -> Fraction:
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        assert rate
        return 1 / rate


# Chains ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [1 << 30, 0])
@pytest.mark.parametrize("codec", ["vorbis", "libopus", "flac"])
def test_a_chain_of_oggs_is_the_sound_of_one_after_the_other(
    codec: str, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "_SMALL", small)  # larger files are chains if their last stream is none of the first
    paths = [tmp_path / "2.ogg", tmp_path / "3.ogg"]
    for path, seconds in zip(paths, (2, 3), strict=True):
        written(path, codec=codec, seconds=seconds, strict="-2")
    data = b"".join(path.read_bytes() for path in paths)
    expected = np.concatenate([all_samples(path) for path in paths], axis=1)
    assert expected.shape == (2, 5 * 48000)
    decoder = AVDecoder(data, name="a.ogg")
    np.testing.assert_array_equal(decoder.get_audio().audio_clips[0].numpy(), expected)
    ranges = [(0, float("inf")), (1.5, 2.5), (2.0, 2.1), (3.25, 4.75)]
    for (begin, end), clip in zip(ranges, decoder.get_audio_clips(ranges)[0], strict=True):
        place = slice(int(begin * 48000), None if end > 5 else int(end * 48000))
        np.testing.assert_array_equal(clip.numpy(), expected[:, place])
    (part,), _ = decoder.get_audio_clips([(95_000, 97_000)], "samples")
    np.testing.assert_array_equal(part.numpy(), expected[:, 95_000:97_000])
    assert decoder.get_time_range(video=False, audio=True) == (0, 5)
    found = decoder.get_metadata(get_audio_num_samples=True)
    assert (found.audio_duration, found.audio_num_samples) == (5, 5 * 48000)
    heard = sound_of(data, rate=48000)
    assert heard.length == 5 * 48000
    np.testing.assert_allclose(heard.get(), expected.mean(axis=0), atol=1e-6)


def test_links_of_a_chain_may_have_one_serial_number(files: dict[str, bytes]) -> None:
    data = files["opus.ogg"] * 3
    assert AVDecoder(data).get_audio().audio_clips[0].shape == (2, 9 * 48000)
    assert AVDecoder(data).get_time_range(video=False, audio=True) == (0, 9)


def test_a_chain_is_cut_off_where_its_last_link_is(files: dict[str, bytes]) -> None:
    data = files["opus.ogg"] + files["vorbis.ogg"]
    with pytest.raises(DecodeError, match=r"part 'a.ogg' is cut off: it has \d+ bytes, but not its last page"):
        AVDecoder(data[:-1000], name="a.ogg").get_audio()


@pytest.mark.parametrize("form", ["flac", "m2ts"])
def test_recordings_that_were_joined_as_they_are_are_refused_where_their_length_is_not_told(
    form: str, tmp_path: Path
) -> None:
    one = written(tmp_path / f"a.{form}", codec="flac" if form == "flac" else "mp2", rate=44100)
    joined = AVDecoder(one + one, name=f"a.{form}")
    expected = all_samples(tmp_path / f"a.{form}")
    assert joined.get_audio().audio_clips[0].shape[1] == 2 * expected.shape[1]
    (clip,), _ = joined.get_audio_clips([(0, 60)])
    assert clip.shape[1] == pytest.approx(2 * expected.shape[1], abs=2000)
    np.testing.assert_array_equal(clip.numpy()[:, : expected.shape[1]], expected)
    with pytest.raises(DecodeError, match=f"part 'a.{form}' has more than 3.2. s of sound, but its headers tell 3.0"):
        sound_of(joined, rate=16000).get()


def test_broadcasts_that_were_joined_as_they_are_have_the_length_of_both(tmp_path: Path) -> None:
    one = write_video(tmp_path / "a.ts", codec="mpeg2video", frames=50, rate=25).read_bytes()
    joined = AVDecoder(one + one)
    assert joined.get_video_duration(get_frame_count=True) == (pytest.approx(4, abs=0.1), 100)
    shown = get_single_frames_uniform(joined, 3)
    for number, frame in zip((0, 50, 99), shown, strict=True):
        ((first,), _) = joined.get_video_clips([(number, number)], video_unit="frames")
        assert abs(int(frame[0].float().mean()) - int(first[0, 0].float().mean())) <= 8  # of red, which rises by 4


# Rates ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(22050, 44100), (44100, 22050), (48000, 44100)])
@pytest.mark.parametrize(("form", "codec"), [("mp3", "libmp3lame"), ("aac", "aac"), ("ogg", "vorbis")])
def test_a_rate_that_changes_is_refused(form: str, codec: str, rates: tuple[int, int], tmp_path: Path) -> None:
    container = {"write_xing": "0", "id3v2_version": "0"} if form == "mp3" else {}
    pieces = [
        written(tmp_path / f"{rate}.{form}", codec=codec, rate=rate, seconds=2, container=container, strict="-2")
        for rate in rates
    ]
    for way in WAYS.values():
        with pytest.raises(
            DecodeError, match=f"part 'a.{form}' has sound whose sample rate changes, from .*{rates[1]}"
        ):
            way(AVDecoder(b"".join(pieces), name=f"a.{form}"))
    if form != "ogg":  # whose length has to be counted
        (clip,), _ = AVDecoder(b"".join(pieces)).get_audio_clips([(0, 1)])
        assert clip.shape[1] == rates[0]


# Lengths --------------------------------------------------------------------------------------------------------------


def amr(samples: int) -> bytes:
    """Return a sound of AMR: frames of 160 samples, and no word of how many."""
    file = io.BytesIO()
    with av.open(file, "w", format="amr") as out:
        stream: Any = out.add_stream("libopencore_amrnb", rate=8000, layout="mono")
        stream.bit_rate = 12200
        for first in range(0, samples, 160):
            block = (8000 * np.sin(np.arange(first, first + 160) / 3)).astype(np.int16)[None]
            frame = av.AudioFrame.from_ndarray(block, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, first, Fraction(1, 8000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("seconds", [1, 6, 20])
def test_frames_of_amr_are_counted(seconds: int) -> None:
    data = amr(8000 * seconds)
    count = (len(data) - len("#!AMR\n")) // 32 * 160  # TS 26.101: a frame of 12.2 kb/s has 32 bytes
    assert count >= 8000 * seconds
    decoder = AVDecoder(data, name="a.amr")
    assert decoder.get_audio().audio_clips[0].shape == (1, count)
    assert decoder.get_audio_duration() == count / 8000
    assert decoder.get_time_range(video=False, audio=True) == (0, count / 8000)
    heard = sound_of(data, rate=8000)
    assert heard.length == count
    assert np.count_nonzero(heard.get()[-320:]) > 160


@pytest.mark.parametrize(
    ("form", "codec", "rate"),
    [
        *(("ts", codec, rate) for codec in ("aac", "mp2") for rate in (22050, 44100, 48000)),
        *(("mpg", "mp2", rate) for rate in (22050, 44100, 48000)),
        *((codec, codec, rate) for codec in ("ac3", "eac3") for rate in (44100, 48000)),
        *(("avi", "pcm_s16le", rate) for rate in (22050, 44100, 48000)),
        *(("caf", "alac", rate) for rate in (22050, 44100, 48000)),
    ],
)
def test_sounds_whose_containers_do_not_count_are_whole(form: str, codec: str, rate: int, tmp_path: Path) -> None:
    path = tmp_path / f"a.{form}"
    written(path, codec=codec, rate=rate, seconds=3.337)
    expected = all_samples(path)
    decoder = AVDecoder(path.read_bytes())
    (whole,), _ = decoder.get_audio_clips([(0, float("inf"))])
    np.testing.assert_array_equal(whole.numpy(), expected)
    begin, end = decoder.get_time_range(video=False, audio=True)
    assert (end - begin) * rate == pytest.approx(expected.shape[1], abs=1)
    heard = sound_of(decoder, rate=rate)
    assert heard.own_length == pytest.approx(expected.shape[1], abs=1)
    np.testing.assert_allclose(heard.get()[: expected.shape[1] - 1], expected.mean(axis=0)[:-1], atol=1e-6)


# Tracks ---------------------------------------------------------------------------------------------------------------


def tracks(kind: str, marked: int | None) -> bytes:
    """Return a Matroska of two sounds, or two videos, with one of them marked as default; None: neither."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska", options={"default_mode": "passthrough"}) as out:
        streams: list[Any] = []
        for _ in range(2):
            streams.append(
                out.add_stream("pcm_s16le", rate=8000, layout="mono")
                if kind == "audio"
                else out.add_stream("ffv1", rate=5)
            )
        for number, stream in enumerate(streams):
            stream.disposition = av.stream.Disposition.default if number == marked else av.stream.Disposition(0)
            if kind == "video":
                stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for number, stream in enumerate(streams):
            if kind == "audio":
                frame: Any = av.AudioFrame.from_ndarray(
                    np.full((1, 8000), 1000 * (number + 1), np.int16), format="s16", layout="mono"
                )
                frame.sample_rate = 8000
            else:
                frame = av.VideoFrame.from_ndarray(np.full((24, 32), 60 * (number + 1), np.uint8), format="yuv420p")
            frame.pts = 0
            out.mux(stream.encode(frame))
            out.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(("marked", "chosen"), [(None, 0), (0, 0), (1, 1)])
def test_the_track_that_is_marked_as_default_is_taken(marked: int | None, chosen: int) -> None:
    sound = AVDecoder(tracks("audio", marked)).get_audio().audio_clips[0]
    assert round(float(sound.mean()) * 32768) == 1000 * (chosen + 1)
    video = AVDecoder(tracks("video", marked)).get_video().video_clips[0]
    dark, light = (AVDecoder(tracks("video", number)).get_video().video_clips[0].float().mean() for number in (0, 1))
    assert dark < light
    assert video.float().mean() == (light if chosen else dark)


# Rates of videos ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mkv", "webm", "flv", "mp4", "ts"])
def test_the_rate_of_a_video_is_the_mean_over_its_frames(form: str, tmp_path: Path) -> None:
    codec = "libvpx" if form == "webm" else "libx264"
    options = {} if form == "webm" else {"bf": "0"}
    path = write_video(tmp_path / f"a.{form}", codec=codec, frames=40, varying=True, options=options)
    with av.open(str(path)) as container:
        times = [frame.time for frame in container.decode(video=0)]
    between = (len(times) - 1) / (times[-1] - times[0])
    decoder = AVDecoder(path.read_bytes())
    assert decoder.get_video_fps() == pytest.approx(between, rel=0.1)  # that has no duration of the last frame
    assert decoder.get_metadata().video_fps == decoder.get_video_fps()


def shown(path: Path) -> tuple[float, float]:
    """Return the seconds that the frames of a video are shown, and how many come in a second, by its packets."""
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size and not packet.is_discard]
    last = max(packets, key=lambda packet: packet.pts)
    seconds = float((last.pts + last.duration - min(packet.pts for packet in packets)) * last.time_base)
    return seconds, len(packets) / seconds


@pytest.mark.parametrize("options", [{}, {"movflags": "frag_keyframe+empty_moov"}, {"use_editlist": "0"}])
@pytest.mark.parametrize("form", ["mp4", "mov"])
@pytest.mark.parametrize("frames", [10, 60])
def test_frames_that_are_coded_in_another_order(
    form: str, options: dict[str, str], frames: int, tmp_path: Path
) -> None:
    """The header of an MP4 adds up the distances of frames as they are coded."""
    made = {"frames": frames, "varying": True, "options": {"x264-params": X264}, "container": options}
    path = write_video(tmp_path / f"a.{form}", **made)
    found = AVDecoder(path.read_bytes()).get_metadata()
    assert (found.video_duration, found.video_fps) == pytest.approx(shown(path), rel=1e-9)


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("edits", [[(1000, 0)], [(2000, 8000)], [(500, -1), (1500, 0)]])
def test_frames_beside_an_edit_do_not_count(reordered: bool, edits: list[tuple[int, int]], tmp_path: Path) -> None:
    params = X264 if reordered else X264.replace("bframes=3", "bframes=0")
    whole = write_video(tmp_path / "a.mp4", varying=True, options={"x264-params": params})
    path = tmp_path / "b.mp4"
    path.write_bytes(with_edits(whole.read_bytes(), edits))
    found = AVDecoder(path.read_bytes()).get_metadata()
    frames = all_frames(path)
    least = float(frames[-1].seconds - frames[0].seconds)
    assert found.video_num_frames == len(frames)
    assert least < found.video_duration <= least + 0.09  # frames last so long at most
    assert found.video_fps == pytest.approx(len(frames) / found.video_duration)


@pytest.mark.parametrize("form", ["mkv", "avi", "ivf"])
def test_the_size_of_a_video_is_that_of_its_frames(form: str, tmp_path: Path) -> None:
    """FFmpeg takes that of VP8 from the container."""
    data = bytearray(write_video(tmp_path / f"a.{form}", codec="libvpx", frames=4, size=(176, 144)).read_bytes())
    if form == "mkv":
        at = data.index(b"\xb0\x81\xb0\xba\x81\x90")
        data[at + 2], data[at + 5] = 100, 80
    else:
        at, kind = (12, "<HH") if form == "ivf" else (data.index(b"strf") + 12, "<ii")
        data[at : at + struct.calcsize(kind)] = struct.pack(kind, 352, 288)
    decoder = AVDecoder(bytes(data))
    found = decoder.get_metadata()
    frames = decoder.get_video().video_clips[0]
    assert (found.video_num_frames, found.video_height, found.video_width) == (4, *frames.shape[2:]) == (4, 144, 176)


@pytest.mark.parametrize("form", ["mkv", "mp4", "ts"])
def test_the_rate_of_even_frames_is_that_of_the_header(form: str, tmp_path: Path) -> None:
    assert AVDecoder(write_video(tmp_path / f"a.{form}", frames=50, rate=24).read_bytes()).get_video_fps() == 24

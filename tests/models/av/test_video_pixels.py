"""Videos become patches on the decoding threads, in the memory of the batch: values, failures, shared decoders."""

from __future__ import annotations

import io
import json
import pickle
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

pytest.importorskip("transformers")
pytest.importorskip("av")

import av
from clips import all_frames, write_video
from crude import prepared
from families import encoder_of

from energon_bridge import Cooker, WorkerConfig, basic_sample_keys, get_savable_loader, get_train_dataset
from energon_bridge.core.encoder.deferred import Deferred, decode_deferred
from energon_bridge.core.errors import DecodeError, SampleError
from energon_bridge.core.samples import stacking
from energon_bridge.core.samples.sample_place import warned
from energon_bridge.models.av import AVDecoder, frame_pixels
from energon_bridge.models.av.streams import VideoReader
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, VideoFrames
from energon_bridge.models.families.qwen import DeferredVideo
from energon_bridge.models.families.video import video_of
from energon_bridge.models.images.programs import Program

NUMBER, BROKEN = 8, 3
FRAMES = 27


def cook(sample: Any) -> ChatSample:
    number = int(sample["json"])
    turns = [{"role": "user", "content": "<video>" * (1 + number % 2)}, {"role": "assistant", "content": str(number)}]
    return ChatSample(**basic_sample_keys(sample), messages=turns, videos=[sample["mp4"]] * (1 + number % 2))


class Videos(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook),)


class Looking(Videos):
    """Sees videos in its last hook, as frames that are still to be decoded."""

    def postencode_sample(self, sample: Any) -> Any:
        assert all(isinstance(video, VideoFrames) for video in sample.videos)
        return super().postencode_sample(sample)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("clips")
    sizes = ((64, 48), (48, 90), (64, 48))
    return [
        write_video(folder / f"{number}.mp4", frames=FRAMES, rate=10, size=size).read_bytes()
        for number, size in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def data(clips: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("videos") / "data", clips, BROKEN)


@pytest.fixture(scope="module")
def sound(clips: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("sound") / "data", clips, None)


def written(folder: Path, clips: list[bytes], broken: int | None) -> Path:
    samples = {}
    for number in range(NUMBER):
        clip = clips[number % len(clips)]
        if number == broken:  # its index is there, its frames are not
            at = clip.index(b"mdat") + 100
            clip = clip[:at] + bytes(len(clip) - at) if clip.index(b"moov") < at else b"\0" * 40
        samples[f"{number:03d}"] = {"mp4": clip, "json": json.dumps(number).encode()}
    return prepared(folder, samples)


def encoder(kind: type[ChatTemplateTaskEncoder], pixels: Any, dtype: Any = None) -> ChatTemplateTaskEncoder:
    made: Any = encoder_of("qwen2_5_vl")
    family = replace(made.family, video_min_pixels=160 * 160, video_max_pixels=200 * 200)
    return kind(made.tokenizer, family, ChatConfig(pixels=pixels, pixels_dtype=dtype, seq_length=8192))


def batches(data: Path, task_encoder: Any, workers: int = 0, number: int = 4) -> list[Any]:
    dataset = get_train_dataset(
        data,
        batch_size=2,
        task_encoder=task_encoder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers, num_lanes=1, decode_threads=2),
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    with closing(get_savable_loader(dataset)) as loader:
        return list(islice(loader, number))


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_the_processor(data: Path, workers: int) -> None:
    expected = batches(data, encoder(Videos, "processor"))
    made = batches(data, encoder(Videos, None), workers)
    for batch, wanted in zip(made, expected, strict=True):
        assert batch.__key__ == wanted.__key__
        assert "003" not in batch.__key__
        assert torch.equal(batch.tokens, wanted.tokens)
        for name in ("pixel_values_videos", "video_grid_thw"):
            assert torch.equal(batch.visual_inputs[name], wanted.visual_inputs[name])


def test_hooks_of_the_user_see_frames_that_are_not_decoded(data: Path) -> None:
    for batch, wanted in zip(batches(data, encoder(Looking, None)), batches(data, encoder(Videos, None)), strict=True):
        assert torch.equal(batch.visual_inputs["pixel_values_videos"], wanted.visual_inputs["pixel_values_videos"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_pixels_are_not_copied_into_the_batch(sound: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    join = stacking._cat
    monkeypatch.setattr(stacking, "_cat", lambda rows: joined.append(rows[0].nbytes) or join(rows))
    for batch in batches(sound, encoder(Videos, None, dtype)):
        assert batch.visual_inputs["pixel_values_videos"].nbytes > 1 << 16
    assert joined
    assert max(joined) < 1024  # grids


@pytest.mark.parametrize("pixels", ["pillow", "torch"])
@pytest.mark.parametrize(("fps", "count"), [(2.0, 5), (1.5, 4)])
def test_patches_lie_in_memory_that_is_given(clips: list[bytes], pixels: Any, fps: float, count: int) -> None:
    family: Any = encoder(Videos, pixels).family
    video = video_of(AVDecoder(clips[0]), fps=fps, least=4, most=None)
    assert len(video.frames.numbers) == count
    deferred = family.deferred_video(video)
    assert isinstance(deferred, DeferredVideo)
    memory = np.empty(deferred.num_bytes, np.uint8)
    made = deferred.decoded(memory).visual["pixel_values_videos"]
    assert made.data_ptr() == memory.ctypes.data
    assert made.nbytes == memory.nbytes
    frames = VideoFrames(frames=torch.stack(video.frames.get()), fps=video.fps)
    expected = family.process([], [frames], [family.plan_video(frames)])
    assert torch.equal(made, expected["pixel_values_videos"])


def test_samples_may_share_a_decoder(clips: list[bytes]) -> None:
    family: Any = encoder(Videos, None).family
    decoder = AVDecoder(clips[1])
    waiting = [family.deferred_video(video_of(decoder, fps=fps, least=4, most=None)) for fps in (2.0, 3.0, 4.0, 5.0)]
    expected = [one.decoded().visual["pixel_values_videos"] for one in waiting]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            made = list(threads.map(lambda one: one.decoded(), waiting))
            assert all(torch.equal(a.visual["pixel_values_videos"], b) for a, b in zip(made, expected, strict=True))


def test_a_video_that_does_not_decode_leaves_the_others(clips: list[bytes]) -> None:
    family: Any = encoder(Videos, None).family
    good = family.deferred_video(video_of(AVDecoder(clips[0]), fps=2.0, least=4, most=None))
    bad = family.deferred_video(video_of(AVDecoder(clips[1]), fps=2.0, least=4, most=None))
    object.__setattr__(bad.video.frames, "decoder", AVDecoder(b"no video at all"))
    sample = {"videos": [good, bad]}
    with pytest.raises(DecodeError):
        decode_deferred([sample])
    assert not isinstance(sample["videos"][0], Deferred)
    assert sample["videos"][1] is bad


def test_frames_that_need_no_conversion_do_not_share_memory(tmp_path: Path) -> None:
    path = tmp_path / "raw.mkv"
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("ffv1", rate=5)
        stream.width, stream.height, stream.pix_fmt = 16, 8, "bgr0"
        for number in range(4):
            pixels = np.full((8, 16, 3), 50 * number, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")))
        out.mux(stream.encode(None))
    clips, _ = AVDecoder(path.read_bytes()).get_video_clips([(1, 1), (1, 1), (2, 2)], video_unit="frames")
    clips[0] += 7
    assert [int(clip[0, 0, 0, 0]) for clip in clips] == [57, 50, 100]


@pytest.mark.parametrize("name", ["a.mp4", "b.mp4", "a.mkv"])
def test_times_are_those_at_which_frames_are_shown(name: str, tmp_path: Path) -> None:
    """Of a variable rate, too: what models are told comes from the times of libav's frames."""
    options = {"x264-params": f"bframes={3 if name[0] == 'b' else 0}:log-level=0"}
    path = write_video(tmp_path / name, frames=120, varying=True, options=options)
    with av.open(str(path)) as container:
        shown = [float(frame.time or 0) for frame in container.decode(video=0)]
    video = video_of(AVDecoder.open(path), fps=2.0, least=4, most=None)
    assert video.timestamps == pytest.approx([shown[n] - shown[0] for n in video.frames.numbers])
    seconds = shown[-1] - shown[0]
    assert len(video.frames.numbers) == int(120 / 119 * seconds * 2.0)
    assert video.fps == pytest.approx(len(video.frames.numbers) / 120 * 119 / seconds)
    family: Any = encoder(Videos, None).family
    assert family.plan_video(video).second_per_grid == pytest.approx(2 / video.fps)
    told = replace(video, fps=None)
    rate = (len(told.timestamps) - 1) / (told.timestamps[-1] - told.timestamps[0])
    assert family.plan_video(told).second_per_grid == pytest.approx(2 / rate)


def test_times_of_a_constant_rate_cost_no_reading(clips: list[bytes]) -> None:
    decoder = AVDecoder(clips[0])
    video = video_of(decoder, fps=2.0, least=4, most=None)
    assert video.timestamps == tuple(number / 10 for number in video.frames.numbers)
    assert decoder.bytes_read < len(clips[0]) / 2


TOKENS = [10_000, 700, 333, 60, 7]


def frames_of(videos: list[Any]) -> list[list[int]]:
    return [list(video.frames.numbers) for video in videos]


@pytest.mark.parametrize("budget", TOKENS)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_get_the_frames_that_a_budget_of_tokens_allows(name: str, budget: int, clips: list[bytes]) -> None:
    made: Any = encoder_of(name)
    config = ChatConfig(seq_length=20_000, video_fps=10.0, min_num_frames=1, max_video_tokens=budget)
    task_encoder = ChatTemplateTaskEncoder(made.tokenizer, made.family, config)
    turns = [{"role": "user", "content": "<video><video>"}, {"role": "assistant", "content": "ok"}]
    sample = ChatSample(__key__="s", messages=turns, videos=[AVDecoder(clips[0]), AVDecoder(clips[1])])
    every = [video_of(AVDecoder(clip), fps=10.0, least=1, most=None) for clip in clips[:2]]
    if budget == TOKENS[-1]:
        with pytest.raises(SampleError, match=f"with a single frame each; their budget is {budget}"):
            task_encoder.preencode_sample(sample)
        return
    prepared = task_encoder.preencode_sample(sample)
    assert sum(plan.tokens for plan in prepared.plans) <= budget
    videos = [one.video if isinstance(one, DeferredVideo) else one for one in prepared.videos]
    if budget == TOKENS[0]:
        assert frames_of(videos) == frames_of(every)
    for video, whole in zip(videos, every, strict=True):
        numbers = video.frames.numbers
        steps = np.diff(numbers)
        assert set(numbers) <= set(whole.frames.numbers)
        assert not len(steps) or (numbers[0], numbers[-1]) == (0, FRAMES - 1)
        assert not len(steps) or steps.max() - steps.min() <= 1  # evenly spaced
        assert video.timestamps == pytest.approx([number / 10 for number in numbers])
        assert video.fps == pytest.approx(whole.fps * len(numbers) / len(whole.frames.numbers))
    assert len(task_encoder.postencode_sample(prepared).visual["video_grid_thw"]) == 2


def test_given_frames_are_thinned_as_undecoded_ones(clips: list[bytes]) -> None:
    made: Any = encoder_of("qwen2_5_vl")
    config = ChatConfig(seq_length=20_000, video_fps=10.0, max_video_pixels=10 * 64 * 48 + 5)
    task_encoder = ChatTemplateTaskEncoder(made.tokenizer, made.family, config)
    turns = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "ok"}]
    frames = torch.stack(video_of(AVDecoder(clips[0]), fps=10.0, least=4, most=None).frames.get())
    videos = [AVDecoder(clips[0]), *(VideoFrames(frames=given, fps=10.0) for given in (frames, list(frames)))]
    made_of = [task_encoder.encode(ChatSample(__key__="s", messages=turns, videos=[video])).visual for video in videos]
    assert made_of[0]["video_grid_thw"][0, 0] == 5  # ten frames
    for other in made_of[1:]:
        assert other.keys() == made_of[0].keys()
        assert all(torch.equal(value, made_of[0][name]) for name, value in other.items())


def test_of_a_long_clip_only_what_is_shown_is_decoded_and_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes, 6,000 frames: eight are shown. Key frames are 2 s apart."""
    options = {"x264-params": "keyint=20:min-keyint=20:scenecut=0:log-level=0", "preset": "ultrafast"}
    path = write_video(tmp_path / "long.mp4", frames=6000, rate=10, size=(96, 64), options=options)
    config = ChatConfig(seq_length=20_000, min_num_frames=8, max_num_frames=8)
    made: Any = encoder_of("qwen2_5_vl")
    task_encoder = ChatTemplateTaskEncoder(made.tokenizer, made.family, config)
    turns = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "ok"}]
    decoder = AVDecoder(path.read_bytes())
    decoded: list[int] = []
    original = VideoReader._next

    def counted(self: Any, first: int) -> Any:
        decoded.append(first)
        return original(self, first)

    monkeypatch.setattr(VideoReader, "_next", counted)
    prepared = task_encoder.preencode_sample(ChatSample(__key__="s", messages=turns, videos=[decoder]))
    assert not decoded
    held: list[Any] = []
    most: list[int] = []
    scaled = Program.scaled

    def watched(self: Program, frame: np.ndarray, size: Any) -> np.ndarray:
        held.append(weakref.ref(frame))
        most.append(sum(one() is not None for one in held))
        return scaled(self, frame, size)

    monkeypatch.setattr(Program, "scaled", watched)
    (video,) = prepared.videos
    pixels = video.decoded()
    assert video.video.timestamps[-1] == pytest.approx(599.9)
    assert pixels.visual["video_grid_thw"].tolist()[0] == 4
    assert len(held) == 8
    assert max(most) <= 2  # of the frames as they are stored
    assert 8 <= len(decoded) <= 8 * 20  # no more than from the key frame before each
    numbers = video.video.frames.numbers
    with av.open(str(path)) as container:
        every = enumerate(container.decode(video=0))
        wanted = [frame.to_ndarray(format="rgb24") for number, frame in every if number in numbers]
    frames = [torch.from_numpy(one).permute(2, 0, 1) for one in wanted]
    given = VideoFrames(frames=torch.stack(frames), fps=video.video.fps)
    expected = task_encoder.family.process([], [given], [task_encoder.family.plan_video(given)])
    assert torch.equal(pixels.visual["pixel_values_videos"], expected["pixel_values_videos"])


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])  # mpeg4 is decoded from its beginning
@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_a_turned_video_is_as_players_show_it(
    tmp_path: Path, codec: str, degrees: int, caplog: pytest.LogCaptureFixture
) -> None:
    warned.clear()
    file = write_video(tmp_path / "a.mp4", codec=codec, frames=FRAMES, rate=10, size=(64, 48), turned=degrees)
    stored = np.stack([frame.pixels for frame in all_frames(file)])
    expected = np.rot90(stored, degrees // 90, axes=(1, 2))
    decoder = pickle.loads(pickle.dumps(AVDecoder(file.read_bytes(), autorotate=True)))
    metadata = decoder.get_metadata()
    assert (metadata.video_height, metadata.video_width) == expected.shape[1:3]
    (clip,), _ = decoder.get_video_clips([(3, 5)], video_unit="frames")
    np.testing.assert_array_equal(clip.permute(0, 2, 3, 1).numpy(), expected[3:6])
    (small,), _ = decoder.get_video_clips([(3, 3)], video_unit="frames", video_out_frame_size=(24, 20))
    assert small.shape == (1, 3, 20, 24)
    assert not caplog.messages
    for _ in range(2):
        (clip,), _ = AVDecoder(file.read_bytes()).get_video_clips([(3, 5)], video_unit="frames")
    np.testing.assert_array_equal(clip.permute(0, 2, 3, 1).numpy(), stored[3:6])
    assert ["autorotate=True" in message for message in caplog.messages] == [True] * bool(degrees)
    warned.clear()


def video_like(path: Path, codec: str, form: str, container: str = "mov", **settings: Any) -> bytes:
    """Return a video of a few frames, half of which is transparent where its format can tell."""
    with av.open(str(path), "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=10, options=settings.pop("options", {}))
        stream.width, stream.height, stream.pix_fmt = 64, 48, form
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        pixels = np.full((48, 64, 4), 200, np.uint8)
        pixels[:, 32:, 3] = 255 if path.stem == "opaque" else 0
        pixels[:, :32, 3] = 255
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=form)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "codec", "form", "settings", "said"),
    [
        ("square", "libx264", "yuv420p", {}, []),
        ("stretched", "libx264", "yuv420p", {"sample_aspect_ratio": Fraction(2)}, ["not square"]),
        ("interlaced", "mpeg2video", "yuv420p", {"options": {"flags": "+ildct+ilme"}}, ["is interlaced"]),
        ("HDR", "libx264", "yuv420p", {"color_trc": 16}, ["is HDR"]),
        ("HLG", "libx264", "yuv420p", {"color_trc": 18}, ["is HDR"]),
        ("television", "libx264", "yuv420p", {"color_trc": 1}, []),
        ("transparent", "qtrle", "argb", {}, ["is transparent"]),
        ("opaque", "qtrle", "argb", {}, []),
    ],
)
def test_what_players_do_besides_is_said_once(
    tmp_path: Path,
    name: str,
    codec: str,
    form: str,
    settings: dict[str, Any],
    said: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    warned.clear()
    data = video_like(tmp_path / f"{name}.mov", codec, form, **settings)
    for _ in range(2):
        AVDecoder(data, name="a.mov").get_video()
    assert len(caplog.messages) == len(said)
    for message, words in zip(caplog.messages, said, strict=True):
        assert words in message
        assert "the video of part 'a.mov'" in message


def bare(codec: str, rate: int, size: tuple[int, int] = (96, 64), count: int = 12) -> bytes:
    """Return a video without a container; black, with as many white columns as its number."""
    form = {"libx264": "h264", "libx265": "hevc"}.get(codec, codec)
    out = io.BytesIO()
    with av.open(out, "w", format=form) as file:
        stream = file.add_stream(codec, rate=rate, options={"x265-params": "log-level=none"} if form == "hevc" else {})
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(count):
            rows = np.zeros((size[1], size[0], 3), np.uint8)
            rows[:, :number] = 255
            file.mux(stream.encode(av.VideoFrame.from_ndarray(rows, format="rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize(
    ("codec", "rate", "told"),
    [("libx264", 30, 30), ("libx265", 50, 50), ("mpeg1video", 30, 30), ("mpeg2video", 24, 24), ("mjpeg", 30, 25)],
)
def test_frames_without_times_are_numbered_and_that_is_said(
    codec: str, rate: int, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    warned.clear()
    data = bare(codec, rate)
    with av.open(io.BytesIO(data)) as file:
        expected = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    decoder = AVDecoder(data, name="a.mp4")
    metadata = decoder.get_metadata()
    assert (metadata.video_num_frames, metadata.video_fps) == (12, told)
    assert metadata.video_duration == pytest.approx(12 / told)
    assert decoder.get_frame_times(range(12)) == pytest.approx([number / told for number in range(12)], abs=1e-5)
    for _ in range(2):
        shown = decoder.get_video().video_clips[0].permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(shown, expected)
    (message,) = caplog.messages
    assert "the video of part 'a.mp4' is a bare stream without a container" in message


@pytest.mark.parametrize("first", [0, 15])
def test_a_video_that_changes_its_size_is_told(first: int, caplog: pytest.LogCaptureFixture) -> None:
    warned.add("untimed, videos")
    data = bare("libx264", 25) + bare("libx264", 25, (64, 128))
    with av.open(io.BytesIO(data)) as file:
        expected = [frame.to_ndarray(format="rgb24").shape[:2] for frame in file.decode(video=0)]
    assert expected == [(64, 96)] * 12 + [(128, 64)] * 12
    decoder = AVDecoder(data, name="a.mp4")
    ((clip,), _) = decoder.get_video_clips([(first, 20)], "frames")
    assert clip.shape == (21 - first, 3, *expected[first])
    (message,) = caplog.messages
    assert "the video of part 'a.mp4' changes its size" in message


# Matrices a, b, c, d of a header, by which (x, y) is shown at (a x + c y, b x + d y), and what ffmpeg makes of them.
SHOWN = {
    "left to right": ((-1, 0, 0, 1), lambda rows: rows[:, :, ::-1]),
    "top to bottom": ((1, 0, 0, -1), lambda rows: rows[:, ::-1]),
    "by two quarters": ((-1, 0, 0, -1), lambda rows: rows[:, ::-1, ::-1]),
    "with the clock": ((0, 1, -1, 0), lambda rows: np.rot90(rows, -1, axes=(1, 2))),
    "against the clock": ((0, -1, 1, 0), lambda rows: np.rot90(rows, 1, axes=(1, 2))),
    "along the diagonal": ((0, 1, 1, 0), lambda rows: rows.transpose(0, 2, 1, 3)),
    "along the other": ((0, -1, -1, 0), lambda rows: rows[:, ::-1, ::-1].transpose(0, 2, 1, 3)),
    "larger": ((2, 0, 0, 2), lambda rows: rows),
    "larger, mirrored": ((2, 0, 0, -0.5), lambda rows: rows[:, ::-1]),
    "onto a point": ((0, 0, 0, 0), lambda rows: rows),
    "a little": ((0.998, 0.06, -0.06, 0.998), lambda rows: rows),
    "nearly a quarter": ((0.06, 0.998, -0.998, 0.06), lambda rows: np.rot90(rows, -1, axes=(1, 2))),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_mirrored_video_is_as_players_show_it(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    warned.clear()
    matrix, shown = SHOWN[name]
    file = write_video(tmp_path / "a.mp4", frames=9, rate=10, size=(64, 48))
    stored = np.stack([frame.pixels for frame in all_frames(file)])
    data, (a, b, c, d) = bytearray(file.read_bytes()), (int(value * (1 << 16)) for value in matrix)
    struct.pack_into(">9i", data, data.find(b"tkhd") + 44, a, b, 0, c, d, 0, 0, 0, 1 << 30)  # version 0 of the box
    with AVDecoder(bytes(data), autorotate=True) as decoder:
        (clip,), _ = decoder.get_video_clips([(3, 5)], video_unit="frames")
        metadata = decoder.get_metadata()
    np.testing.assert_array_equal(clip.permute(0, 2, 3, 1).numpy(), shown(stored)[3:6])
    assert (metadata.video_height, metadata.video_width) == clip.shape[2:]
    said = [message for message in caplog.messages if "not square" not in message]  # of one matrix
    assert ["no whole quarters" in message for message in said] == [True] * (name in ODD)
    caplog.clear()
    for _ in range(2):
        (clip,), _ = AVDecoder(bytes(data)).get_video_clips([(3, 5)], video_unit="frames")
    np.testing.assert_array_equal(clip.permute(0, 2, 3, 1).numpy(), stored[3:6])
    assert ["autorotate=True" in message for message in caplog.messages if "not square" not in message] == [True] * (
        name not in UPRIGHT
    )


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_frame_with_exif_is_turned(orientation: int) -> None:
    """As the frames of MJPEG have it; PyAV 18.1 cannot list what is beside such a frame."""
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    image, exif, file = Image.fromarray(pixels), Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    image.save(file, "PNG", exif=exif)
    frame = next(av.open(io.BytesIO(file.getvalue())).decode(video=0))
    turned = np.rot90(frame.to_ndarray(format="rgb24"), frame_pixels.turn_of(frame).quarters)
    np.testing.assert_array_equal(turned, ImageOps.exif_transpose(Image.open(file)))


ODD, UPRIGHT = ("a little", "nearly a quarter"), ("larger", "onto a point")


def test_a_model_gets_turned_videos_as_players_show_them(tmp_path: Path) -> None:
    file = write_video(tmp_path / "a.mp4", frames=FRAMES, rate=10, size=(112, 56), turned=90)
    data = prepared(tmp_path / "data", {key: {"mp4": file.read_bytes(), "json": b"0"} for key in "ab"})
    made: Any = encoder(Videos, None)
    (batch,) = batches(data, Videos(made.tokenizer, made.family, replace(made.config, autorotate=True)), number=1)
    chosen = video_of(AVDecoder(file.read_bytes()), fps=2.0, least=4, most=768)
    frames = [np.rot90(frame.permute(1, 2, 0).numpy()).copy() for frame in chosen.frames.get()]
    turns = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "0"}]
    shown = replace(chosen, frames=[torch.from_numpy(frame).permute(2, 0, 1) for frame in frames])
    expected = made.encode(ChatSample(__key__="a", messages=turns, videos=[shown]))
    assert torch.equal(batch.tokens[0], expected.tokens)
    pixels = expected.visual["pixel_values_videos"]
    assert torch.equal(batch.visual_inputs["pixel_values_videos"], torch.cat([pixels, pixels]))

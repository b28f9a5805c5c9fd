"""Segments of videos and sounds in lists, tables and tars, options of parts, and what `energon lint` says of them."""

from __future__ import annotations

import json
import re
import sys
import wave
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from clips import all_frames
from commands import energon
from keyed import ALL_TRAIN as TRAIN_ONLY, CRUDE
from lists import (
    ALL_TRAIN,
    CONFIG,
    RED,
    TEXT,
    Heard,
    Spoken,
    asked,
    learned,
    listed,
    llava,
    small_bundle,
    talk,
    write_media,
)
from paths import CONFIGS
from PIL import Image
from sources import converted, refused
from tar_builder import write_tar

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from energon_bridge import ErrorPolicy, WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.errors import EmptyDatasetError, SampleError
from energon_bridge.core.prepare import prepare_dataset
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.conversations.conversation import MediaWithOptions, read_conversation
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.conversations.segments import MediaOptions
from energon_bridge.models.families.sound import sound_of
from energon_bridge.tools.check.quarantine import read_quarantine
from energon_bridge.training.config_file import load_config
from energon_bridge.training.encoder import training_task_encoder
from energon_bridge.training.presets import ModelBundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    return small_bundle(tmp_path_factory.mktemp("preset") / "model")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media(tmp_path_factory.mktemp("media"))


CUT: dict[str, Any] = {
    "clip": llava("<video>\ncolor?", video="film.mp4", clip=[0.8, 1.6]),
    "start and end": llava("<video>\ncolor?", video="film.mp4", start=0.8, end="1.6"),
    "clock times": llava("<video>\ncolor?", video="film.mp4", start_time="00:00:00.8", end_time="0:01.6"),
    "timestamps apart": llava(
        "<video>\ncolor?", video="film.mp4", start_timestamp="00:00:00.80", stop_timestamp="00:00:01.60"
    ),
    "start and stop": llava("<video>\ncolor?", video="film.mp4", start=0.8, stop=1.6),
    "begin and finish": llava("<video>\ncolor?", video="film.mp4", begin=0.8, finish=1.6),
    "from and to": llava("<video>\ncolor?", video="film.mp4", from_sec=0.8, to_sec=1.6),
    "a window": llava("<video>\ncolor?", video="film.mp4", window=[0.8, 1.6], trim=True, stop="Main Street"),
    "words apart": llava("<video>\ncolor?", video="film.mp4", **{"Start Time": 0.8, "end-time": 1.6}, duration=2.4),
    "words together": llava("<video>\ncolor?", video="film.mp4", segStart=0.8, segEnd=1.6, time="2024-01-01"),
    "an arrow": llava("<video>\ncolor?", video="film.mp4", timestamps="00:00:00.800 --> 00:00:01.600"),
    "milliseconds": llava("<video>\ncolor?", video="film.mp4", video_clip_start_ms=800, video_clip_end_ms=1600),
    "offset and duration": llava("<video>\ncolor?", video="film.mp4", offset=0.8, duration=0.8),
    "one for each": talk("<video>color?", videos=["film.mp4"], segments=[[0.8, 1.6]]),
    "a part": asked({"type": "video", "video": "film.mp4", "video_start": 0.8, "video_end": 1.6}, TEXT),
    "NeMo": {
        "conversations": [
            {"from": "User", "value": "film.mp4", "type": "video", "offset": 0.8, "duration": 0.8},
            {"from": "User", "value": "color?", "type": "text"},
            {"from": "Assistant", "value": "red", "type": "text"},
        ]
    },
}


def patches_of(frames: list[Any], bundle: ModelBundle, size: tuple[int, int]) -> torch.Tensor:
    """Return what the image processor makes of pairs of frames, whose values are the same in time."""
    images = [Image.fromarray(frame).resize(size[::-1], Image.Resampling.BICUBIC) for frame in frames]
    made = bundle.image_processor(images=images, return_tensors="pt", do_resize=False)["pixel_values"]
    return made.reshape(len(frames), -1, 3, 2, made.shape[1] // 6)[:, :, :, 0]


def frames_in(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    patches = inputs["pixel_values_videos"]
    steps = int(inputs["video_grid_thw"][0, 0])
    return patches.reshape(steps, -1, 3, 2, patches.shape[1] // 6).movedim(3, 1).flatten(0, 1)


@pytest.mark.parametrize("name", CUT)
def test_only_a_segment_of_a_video_is_learned(tmp_path: Path, media: Path, bundle: ModelBundle, name: str) -> None:
    out = converted(listed(tmp_path, CUT[name]), tmp_path / "out", "--media", media, *ALL_TRAIN)
    ((shown, _, inputs),) = learned(out, bundle)
    within = [
        frame.pixels for frame in all_frames(media / "film.mp4") if Fraction(4, 5) <= frame.seconds < Fraction(8, 5)
    ]
    assert len(within) == 20
    chosen = [within[round(at)] for at in np.linspace(0, 19, 4)]  # at least four frames
    steps, rows, columns = inputs["video_grid_thw"][0].tolist()
    side = bundle.image_processor.patch_size
    made = patches_of(chosen, bundle, (rows * side, columns * side))
    assert steps == 2
    assert torch.equal(frames_in(inputs), made)
    assert shown.endswith("color? |assistant red")


def test_options_of_parts_are_honoured(tmp_path: Path, media: Path, bundle: ModelBundle) -> None:
    smart_resize = sys.modules[type(bundle.image_processor).__module__].smart_resize
    side = bundle.image_processor.patch_size * bundle.image_processor.merge_size
    Image.linear_gradient("L").resize((200, 100)).convert("RGB").save(media / "big.png")
    big = {"type": "image", "image": "big.png", "max_pixels": side**2 * 6}
    told = {"type": "image", "image": "big.png", "resized_height": 60, "resized_width": 80}
    source = listed(tmp_path, [asked(big, TEXT), asked(told, TEXT)])
    of_big, of_told = learned(converted(source, tmp_path / "out", "--media", media, *ALL_TRAIN), bundle)
    sizes = smart_resize(100, 200, side, 4 * side**2, side**2 * 6), smart_resize(60, 80, side)  # as fetch_image does
    for (_, _, inputs), (height, width) in zip((of_big, of_told), sizes, strict=True):
        image = Image.open(media / "big.png").resize((width, height))
        size = {"shortest_edge": CONFIG.data.min_pixels, "longest_edge": CONFIG.data.max_pixels}
        made = bundle.image_processor(images=[image], return_tensors="pt", size=size)
        assert torch.equal(inputs["image_grid_thw"], made["image_grid_thw"])
        assert torch.equal(inputs["pixel_values"], made["pixel_values"])


def test_options_of_videos_are_honoured(tmp_path: Path, media: Path, bundle: ModelBundle) -> None:
    smart_resize = sys.modules[type(bundle.image_processor).__module__].smart_resize
    side = bundle.image_processor.patch_size * bundle.image_processor.merge_size
    least, most = side**2, 2 * side**2
    parts = [{"nframes": 6}, {"fps": 3.0}, {"min_pixels": least, "max_pixels": most}]
    entries = [asked({"type": "video", "video": "film.mp4", **options}, TEXT) for options in parts]
    found = learned(converted(listed(tmp_path, entries), tmp_path / "out", "--media", media, *ALL_TRAIN), bundle)
    grids = [inputs["video_grid_thw"][0].tolist() for _, _, inputs in found]
    assert [grid[0] for grid in grids] == [3, 4, 2]  # 6 frames, 3 for each of 2.4 seconds (7), and as without options
    height, width = smart_resize(24, 32, side, least, most)  # as fetch_video does
    assert grids[2][1:] == [height // (side // 2), width // (side // 2)] != grids[0][1:]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (llava("<video>color?", video="film.mp4", clip=[2, 1]), r"`clip` is '\[2, 1\]': expected the seconds"),
        (llava("<video>color?", video="film.mp4", timestamps=[0.1, 0.2, 0.3]), "`timestamps` is"),
        (llava("<video>color?", video="film.mp4", timestamps="00:01 / 00:02"), "`timestamps` is '00:01 / 00:02'"),
        (llava("<video>color?", video="film.mp4", frame_time=1.5), "`frame_time` is '1.5', one time in the video"),
        (llava("<video>color?", video="film.mp4", realtime="0:02"), "`realtime` is '0:02', one time in the video"),
        (llava("<video>color?", video="film.mp4", start_frame=3), "`start_frame` counts frames"),
        (
            llava("<video>color?", video="film.mp4", clip=[0, 1], start=1, end=2),
            "given twice, by clip and by start and end",
        ),
        (talk("<video><video>color?", videos=["film.mp4"] * 2, start=1, end=2), "that of any of 2 videos"),
        (talk("<video><video>color?", videos=["film.mp4"] * 2, clips=[[1, 2]]), "1 segments for 2 videos"),
        (asked({"type": "video", "video": "film.mp4", "fps": 1, "nframes": 4}, TEXT), "both fps and nframes"),
        (asked({"type": "video", "video": "film.mp4", "max_pixels": 0}, TEXT), "max_pixels=0: expected a positive"),
        (asked({"type": "image", "image": "red.png", "fps": 1}, TEXT), "not understood, for its fps"),
        (asked({"type": "image", "image": "red.png", "resized_width": 28}, TEXT), "give both"),
    ],
)
def test_segments_and_options_that_cannot_be_honoured_are_named(
    tmp_path: Path, media: Path, entry: Any, complaint: str
) -> None:
    assert re.search(complaint, refused(listed(tmp_path, entry), tmp_path / "out", "--media", media))


SPANS: list[dict[str, Any]] = [
    {"time": [1, 2]},
    {"relevant_windows": [[0, 1], [1, 2]]},  # QVHighlights
    {"times": "[0:1]"},  # How2QA
    {"metadata": {"fps": 24, "start": 1, "end": 2}},
    {"meta": {"video": {"clip": [1, 2]}}},
    {"segments": [{"start": 1, "end": 2}]},
    {"location": {"0": [[0.5, 1.5]]}},  # NExT-GQA
    {"ts": "1.0-2.0"},  # TVQA
    {"times": [[0, 0], [0, 1]]},  # DiDeMo
    {"gt_windows": "[[1, 2]]"},
    {"metadata": '{"id": 3, "start": 1, "end": 2}'},
    {"since": 1, "until": 2},
    {"in_point": "00:01", "out_point": "00:02"},
    {"time": "00:01 - 00:02"},
    {"from": 1, "to": 2},
    {"first_frame": 0, "last_frame": 10},
    {"frames": [0, 10]},
    {"t0": 1, "t1": 2},
    {"start": 1},  # AudioCaps, whose files are cut
    {"video_end": 2},
    {"clip_start_frame": 3, "clip_end_frame": 9},
    {"window": [0.5, 1.5], "event": [0, 1]},
    {"meta": {"split": [0.2, 1.1], "duration": 2.4}},  # VTimeLLM
]
NO_SPANS: list[dict[str, Any]] = [
    {"time": "2024-01-01", "timestamp": 1700000000, "duration": 2.4, "fps": 25, "num_frames": 60},
    {"start_time": "2024-01-01T10:00:00", "end_time": "2024-01-01 11:00"},
    {"bbox": [1, 2, 3, 4], "box": [[1, 2], [3, 4]], "size": [24, 32], "metadata": {"resolution": [24, 32]}},
    {"split": "train", "meta": {"split": "val-1"}, "splits": ["train", "val"]},
    {"answer_span": [1, 2], "scores": [0.1, 0.7], "ratings": [3, 5], "char_start": 3, "char_end": 9},
    {"start": None, "end": None, "clip": "", "offset": 0, "span": "first half", "years": "1990-1995"},
    {"image_sizes": [[24, 32]], "versions": [1, 2], "start_page": 3, "end_page": 9},
    {"speakers": [1, 3], "categories": [2, 7], "gps": [12.5, 45.5], "topic": [1, 4], "wh": [320, 480]},
    {"points": [[1, 2], [3, 4]], "video_metadata": {"frames_indices": [0, 30], "fps": 25}, "info": '{"id": [1]}'},
]
SAYS_TIMES = talk("<video>When does it turn red?", {"role": "assistant", "content": "From 0.8 to 1.6 seconds."})


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_what_looks_like_a_segment_is_honoured_or_refused_by_name(tmp_path: Path, media: Path, span: Any) -> None:
    entry = llava("<video>\ncolor?", video="film.mp4", **span)
    name = next(iter(span if "window" not in span else ["event"]))
    message = refused(listed(tmp_path, entry), tmp_path / "out", "--media", media)
    assert re.search(rf"`{name}\b.*--ignore {name}|`{name}` counts frames", message)
    sample = {"__key__": "a", "json": llava("<video>\ncolor?", **span), "film.mp4": "file"}
    with pytest.raises(SampleError, match=rf"`{name}\b"):
        cook_conversation(sample)
    heard = {"__key__": "a", "json": llava("<audio>\ncolor?", **span), "film.wav": "file"}
    with pytest.raises(SampleError, match=rf"`{name}\b"):
        cook_conversation(heard)
    seen = {"__key__": "a", "json": llava("<image>\ncolor?", **span), "red.png": "file"}
    assert read_conversation(cook_conversation(seen)).images == ("file",)
    ignored = [word for column in span for word in ("--ignore", column)]
    converted(listed(tmp_path, entry), tmp_path / "ignored", "--media", media, *ALL_TRAIN, *ignored)


@pytest.mark.parametrize("beside", NO_SPANS, ids=str)
def test_what_is_no_segment_leaves_a_video_whole(tmp_path: Path, media: Path, beside: Any) -> None:
    sample = {"__key__": "a", "json": llava("<video>\ncolor?", **beside), "film.mp4": "file"}
    assert read_conversation(cook_conversation(sample)).videos == ("file",)
    converted(
        listed(tmp_path, llava("<video>\ncolor?", video="film.mp4", **beside)),
        tmp_path / "out",
        *("--media", media, *ALL_TRAIN),
    )


@pytest.mark.parametrize("span", [{"start": 0.8, "end": 1.6}, {"segment": [0.8, 1.6]}, {"segments": [[0.8, 1.6]]}])
def test_whose_segment_it_is_beside_a_video_and_a_sound_is_said(span: dict[str, Any]) -> None:
    media = {"__key__": "a", "film.mp4": "file", "a.wav": "file"}
    with pytest.raises(SampleError, match=rf"`{next(iter(span))}` may be of the video, of the sound or of both"):
        cook_conversation({**media, "json": llava("<video><audio>color?", **span)})
    named = llava("<video><audio>color?", video_start=0.8, video_end=1.6, duration=3.0)
    said = read_conversation(cook_conversation({**media, "json": named}))
    (video,) = said.videos
    assert isinstance(video, MediaWithOptions)
    assert video.options == MediaOptions(begin=0.8, end=1.6)
    assert said.audios == ("file",)
    whole = read_conversation(cook_conversation({**media, "json": llava("<video><audio>color?", duration=3.0)}))
    assert (*whole.videos, *whole.audios) == ("file", "file")


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"rotation": 90}, "red.png"),
    ({"rotation": "180"}, "film.mp4"),
    ({"is_flipped": True}, "red.png"),
    ({"flip": "horizontal"}, "film.mp4"),
    ({"speed": 1.1}, "a.wav"),
    ({"playback_rate": 2}, "film.mp4"),
    ({"weight": 0.5}, "red.png"),
    ({"sample_weight": 2.5}, "a.wav"),
    ({"label": 0}, "red.png"),
    ({"fps": 2}, "film.mp4"),
    ({"nframes": 8}, "film.mp4"),
]
NO_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"rotation": 0, "flip": False, "hflip": "none", "weight": 1, "label": 1}, "red.png"),
    ({"rotation": [0.1, 0.2, 0.3], "weight": 72.5, "speed": 34, "loss": 0.7}, "film.mp4"),
    ({"rotation": 90, "label": "cat"}, "a.wav"),  # of what is said, perhaps
    ({"speed": 1.1}, "red.png"),
    ({"fps": 2, "max_frames": 8, "total_pixels": 99}, "red.png"),
]


@pytest.mark.parametrize(("beside", "file"), [*CHANGES, *NO_CHANGES], ids=str)
def test_what_would_change_a_medium_or_its_weight_is_named_once(
    tmp_path: Path,
    media: Path,
    beside: dict[str, Any],
    file: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = {"png": "image", "mp4": "video", "wav": "audio"}[file[-3:]]
    entry = llava(f"<{kind}>\ncolor?", **beside)
    for _ in range(2):
        said = read_conversation(cook_conversation({"__key__": "a", "json": entry, file: "file"}))
        assert [*said.images, *said.videos, *said.audios] == ["file"]
    names = [name for name in beside if (beside, file) in CHANGES]
    assert [message.partition(" of a sample")[0] for message in caplog.messages] == [f"`{name}`" for name in names]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_frames": 4}, "film.mp4"),
    ({"min_frames": 2, "max_frames": "4", "max_pixels": 3136}, "film.mp4"),
    ({"min_pixels": 784, "max_pixels": 3136}, "red.png"),
    ({"resized_height": 56, "resized_width": 28}, "red.png"),
]


@pytest.mark.parametrize(("beside", "file"), OPTIONS, ids=str)
def test_options_beside_turns_are_those_of_a_part(beside: dict[str, Any], file: str) -> None:
    """As the same keys in the part of the medium are read; a part's own go before those beside."""
    kind = "video" if file == "film.mp4" else "image"
    (there,) = _media_with({"__key__": "a", "json": llava(f"<{kind}>\ncolor?", **beside), file: "file"})
    (wanted,) = _media_with({"__key__": "a", "json": asked({"type": kind, **beside}, TEXT), file: "file"})
    assert there.options == wanted.options
    part = {"type": kind, "max_pixels": 1568}
    (both,) = _media_with({"__key__": "a", "json": asked(part, TEXT, **beside), file: "file"})
    assert both.options == replace(wanted.options, max_pixels=1568)


def _media_with(sample: dict[str, Any]) -> list[Any]:
    said = read_conversation(cook_conversation(sample))
    return [*said.images, *said.videos]


def test_options_beside_turns_and_a_segment_go_together() -> None:
    entry = llava("<video>\ncolor?", start=0.5, end=1.5, max_frames=4)
    (made,) = _media_with({"__key__": "a", "json": entry, "film.mp4": "file"})
    assert (made.options.begin, made.options.end, made.options.max_frames) == (0.5, 1.5, 4)


def test_options_that_cannot_be_honoured_are_refused(tmp_path: Path, media: Path) -> None:
    for beside in ({"max_pixels": 0}, {"resized_height": 28}, {"min_pixels": "many"}):
        with pytest.raises(SampleError, match=next(iter(beside))):
            cook_conversation({"__key__": "a", "json": llava("<image>\ncolor?", **beside), "red.png": "file"})
    both = llava("<image><video>\ncolor?", max_pixels=3136)
    with pytest.raises(SampleError, match="may be that of images or of videos"):
        cook_conversation({"__key__": "a", "json": both, "red.png": "file", "film.mp4": "file"})
    typed = {"image": "red.png", "question": "color?", "answer": "red", "max_pixels": 3136}
    flags = ("--media", media, "--sample-type", "VQASample", "--field", "context=question", "--field", "answers=answer")
    assert "image options, which a VQASample has not" in refused(listed(tmp_path, typed), tmp_path / "out", *flags)
    out = converted(listed(tmp_path, typed), tmp_path / "out", "--media", media, *ALL_TRAIN)
    assert [made.options.max_pixels for made in _of_folder(out)] == [3136]


def _of_folder(path: Path) -> list[Any]:
    workers = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(path, split_part="train", batch_size=1, worker_config=workers, task_encoder=Spoken())
    return [image for batch in get_loader(dataset) for said in batch for image in said.images]


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        ({"tile_index": 2}, "tile_index"),
        ({"image_index": 1}, "image_index"),
        ({"target_image_idx": [0]}, "target_image_idx"),
    ],
)
def test_one_of_several_files_or_tiles_is_never_guessed(
    beside: dict[str, Any], name: str, tmp_path: Path, media: Path
) -> None:
    entry = talk("color?", images=["red.png", "blue.png"], **beside)
    assert f"`{name}` is" in refused(listed(tmp_path, entry), tmp_path / "out", "--media", media)
    parts = {"0.red.png": "red", "1.blue.png": "blue"}
    with pytest.raises(SampleError, match=f"`{name}` is .* --ignore {name}"):
        cook_conversation({"__key__": "a", "json": talk("color?", **beside), **parts})
    for known in ({"image_index": 1234}, {"image_index": [0, 1]}, {"image_index": 1, "images": ["red.png"]}):
        converted(
            listed(tmp_path, {**entry, name: None, **known}),
            tmp_path / str(len(str(known))),
            "--media",
            media,
            *ALL_TRAIN,
        )


def test_a_turn_that_the_texts_say_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    said = {"role": "assistant", "content": "By 90 degrees."}
    entry = {**talk("<image>How far is it turned?", said), "rotation": 90}
    cook_conversation({"__key__": "a", "json": entry, "red.png": "file"})
    assert not caplog.messages


def test_spans_that_the_texts_say_are_answers(tmp_path: Path, media: Path) -> None:
    for span in ({"relevant_windows": [[0.8, 1.6]]}, {"metadata": {"start": 0.8, "end": 1.6}}):
        sample = {"__key__": "a", "json": {**SAYS_TIMES, **span}, "film.mp4": "file"}
        assert read_conversation(cook_conversation(sample)).videos == ("file",)
    for span in ({"timestamp": [0.8, 1.6]}, {"start": 0.8, "end": 1.6}):
        with pytest.raises(SampleError, match="the texts say its times: for the whole video to be learned"):
            cook_conversation({"__key__": "a", "json": {**SAYS_TIMES, **span}, "film.mp4": "file"})
    said = {**SAYS_TIMES, "video": "film.mp4", "start": 0.8, "end": 1.6, "source": "film_0.8_1.6.mp4"}
    assert "--ignore start --ignore end" in refused(listed(tmp_path, said), tmp_path / "out", "--media", media)


@pytest.mark.parametrize(
    "messages",
    [
        asked({"type": "video", "every_nth": 3}, TEXT),
        asked({"type": "video", "time": [1, 2]}, TEXT),
        asked({"type": "video", "video": {"path": "film.mp4", "start": 1, "end": 2}}, TEXT),
        asked({"type": "video", "fps": 0}, TEXT),
        {"messages": [{"role": "user", "content": "<video>color?", "start": 1, "end": 2}, RED]},
        llava("color?", video={"path": "film.mp4", "start": 1, "end": 2}),
        {"messages": [{"from": "User", "value": "film.mp4", "type": "video", "window": [1, 2], "ts": [1, 2]}, RED]},
    ],
    ids=str,
)
def test_segments_in_places_where_none_is_read_are_named(messages: Any) -> None:
    with pytest.raises(SampleError, match=r"not understood|would not be seen|expected"):
        cook_conversation({"__key__": "a", "json": messages, "film.mp4": "file"})


def test_segments_in_tables_are_honoured_or_refused(
    tmp_path: Path, media: Path, bundle: ModelBundle, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"question": ["color?"], "answer": ["red"], "video": [(media / "film.mp4").read_bytes()]}
    cut = {**said, "Start Time": [0.8], "End Time": [1.6]}
    pq.write_table(pa.table(cut), tmp_path / "cut.parquet")
    ((_, _, inputs),) = learned(tmp_path / "cut.parquet", bundle)
    ((_, _, same),) = learned(
        converted(listed(tmp_path, CUT["clip"]), tmp_path / "out", "--media", media, *ALL_TRAIN), bundle
    )
    assert torch.equal(inputs["pixel_values_videos"], same["pixel_values_videos"])
    pq.write_table(pa.table({**said, "relevant_windows": [[[0.8, 1.6]]]}), tmp_path / "label.parquet")
    with pytest.raises(EmptyDatasetError):
        learned(tmp_path / "label.parquet", bundle)
    assert "`relevant_windows` looks like a segment of the video" in caplog.text


def test_turns_with_a_type_are_media_at_their_place(tmp_path: Path, media: Path) -> None:
    turns = [
        {"from": "User", "value": "Write down what is said.", "type": "text"},
        {"from": "User", "value": "a.wav", "type": "audio", "duration": 0.1, "offset": 0.05},
        {"from": "Assistant", "value": "hello", "type": "text"},
        {"from": "User", "value": "red.png", "type": "image"},
        {"from": "User", "value": "And this?", "type": "text"},
        {"from": "Assistant", "value": "red", "type": "text"},
    ]
    out = converted(
        listed(tmp_path, {"id": "1", "conversations": turns}), tmp_path / "out", "--media", media, *ALL_TRAIN
    )
    workers = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(out, split_part="train", batch_size=1, worker_config=workers, task_encoder=Spoken())
    ((content,),) = get_loader(dataset)
    said = [[part.text or f"<{part.kind}>" for part in turn.parts] for turn in content.turns]
    assert said == [["Write down what is said. ", "<audio>"], ["hello"], ["<image>", " And this?"], ["red"]]
    with wave.open(str(media / "a.wav")) as file:  # as soundfile's start and frames
        assert (file.getframerate(), file.getnchannels()) == (16000, 2)
        samples = np.frombuffer(file.readframes(8000), "<i2").reshape(-1, 2)[800:2400]
    heard = sound_of(content.audios[0], rate=16000)
    assert heard.length == 1600
    assert np.abs(heard.get() - samples.mean(axis=1) / 32768).max() < 1e-6


def test_a_manifest_of_speech_may_cut_by_begin_and_end(tmp_path: Path, media: Path) -> None:
    row = {"audio_filepath": "a.wav", "duration": 0.3, "startTime": 0.1, "endTime": 0.4, "text": "hello"}
    source = tmp_path / "manifest.json"
    source.write_text(json.dumps(row) + "\n" + json.dumps({**row, "text": "again"}))
    out = converted(source, tmp_path / "out", "--media", media, *ALL_TRAIN)
    workers = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(out, split_part="train", batch_size=1, worker_config=workers, task_encoder=Spoken())
    with wave.open(str(media / "a.wav")) as file:
        samples = np.frombuffer(file.readframes(8000), "<i2").reshape(-1, 2)[1600:6400]
    for (content,) in get_loader(dataset):
        heard = sound_of(content.audios[0], rate=16000)
        assert np.abs(heard.get() - samples.mean(axis=1) / 32768).max() < 1e-6


def test_turns_with_a_type_name_files_of_a_store() -> None:
    class Store:
        def get(self, name: str, sample: Any) -> str:
            return f"{name} of the store"

    said = {"from": "User", "value": "a.wav", "type": "audio", "duration": 0.1, "offset": 0.05}
    turns = [said, {"from": "Assistant", "value": "hello", "type": "text"}]
    cooked = cook_conversation({"__key__": "a", "json": {"conversations": turns}}, audios=Store())  # type: ignore[arg-type]
    (heard,) = read_conversation(cooked).audios
    assert heard == MediaWithOptions("a.wav of the store", MediaOptions(begin=0.05, end=0.05 + 0.1))


@pytest.mark.parametrize("kept", ["tars", "table"])
@pytest.mark.parametrize("kind", ["video", "audio"])
def test_what_training_skips_of_segments_lint_names(
    tmp_path: Path, media: Path, bundle: ModelBundle, kind: str, kept: str
) -> None:
    length, name = (2.4, "film.mp4") if kind == "video" else (0.5, "a.wav")
    ends = [0.2, length, length + 0.4, length + 0.6, 9.0]
    cuts: list[dict[str, Any]] = [{"start": begin, "end": end} for begin in (0.0, 0.1, length + 0.1) for end in ends]
    cuts = [cut for cut in cuts if cut["start"] < cut["end"]]
    in_entries = [llava(f"<{kind}>color?", **cut) for cut in (*cuts, {"ts": [1, 2]}, {})]
    in_parts = [asked({"type": kind, **cut}, TEXT) for cut in (*cuts, {"clip": [2, 9]}, {"fps": 0}, {})]
    entries = [*in_entries, *in_parts, llava(f"<{kind}><{kind}>color?"), llava("<image>color?")]
    if kept == "tars":
        root = tmp_path / "tars"
        root.mkdir()
        files = [
            (f"{number}.{part}", data)
            for number, entry in enumerate(entries)
            for part, data in ((name, (media / name).read_bytes()), ("json", json.dumps(entry).encode()))
        ]
        write_tar(root / "s.tar", files)
        prepare_dataset(root, split=TRAIN_ONLY, dataset_yaml=CRUDE)
        path = root
    else:
        rows = {key: [entry.get(key) for entry in entries] for key in ("start", "end", "ts")}
        turns = [json.dumps(entry.get("conversations", entry.get("messages"))) for entry in entries]
        contents = [(media / name).read_bytes()] * len(entries)
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"messages": turns, kind: contents, **rows}), path)
    file = tmp_path / "failed.jsonl"
    data = load_config(CONFIGS / "tiny" / "qwen2.5_vl_instruct.yaml", ["data.packing_buffer_size=null"]).data
    loader = get_loader(
        get_val_dataset(
            path,
            split_part="train",
            batch_size=1,
            worker_config=WorkerConfig(num_workers=0),
            task_encoder=training_task_encoder(data, bundle) if kind == "video" else Heard(),
            error_policy=ErrorPolicy(tolerance=0, quarantine=str(file), messages=1),
        )
    )
    for _ in loader:
        pass
    skipped = {one.index for one in read_quarantine(file)}
    output = energon("lint", path, "--json", "--no-progress").stdout
    assert {int(one["key"]) for one in json.loads(output)["problems"]} == skipped
    assert len(entries) - 4 > len(skipped) > 10
    beyond = [one for one in json.loads(output)["problems"] if "lies beyond" in one["message"]]
    assert beyond


def test_lint_leaves_conversations_to_the_cookers_of_an_encoder(
    tmp_path: Path, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = llava("<video>color?", ts=[1, 2])
    files = [("0.film.mp4", (media / "film.mp4").read_bytes()), ("0.json", json.dumps(entry).encode())]
    root = tmp_path / "tars"
    root.mkdir()
    write_tar(root / "s.tar", files)
    prepare_dataset(root, split=TRAIN_ONLY, dataset_yaml=CRUDE)
    (tmp_path / "own_cooker.py").write_text(
        "from energon_bridge import Cooker, DefaultTaskEncoder, TextSample, basic_sample_keys\n"
        "class Encoder(DefaultTaskEncoder):\n"
        "    cookers = [Cooker(lambda sample: TextSample(**basic_sample_keys(sample), text='a'))]\n"
        "encoder = Encoder()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert energon("lint", root, "--no-progress").exit_code == 1
    assert energon("lint", root, "--no-progress", "--encoder", "own_cooker:encoder").exit_code == 0


@pytest.mark.parametrize(("begin", "end"), [(0.6, None), (0.3, 1.5)])
def test_a_segment_beyond_its_file_is_refused(media: Path, begin: float, end: float | None) -> None:
    sound = MediaWithOptions(AVDecoder((media / "a.wav").read_bytes()), MediaOptions(begin=begin, end=end))
    with pytest.raises(SampleError, match=r"lies beyond its sound, which has 0\.5 s"):
        sound_of(sound, rate=16000)

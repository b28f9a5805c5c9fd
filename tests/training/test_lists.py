"""Lists of conversations: what `energon convert` writes is learned by the command that it shows, or it is refused."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import answer
from conversations import picture_of
from forked import import_for_training, run_program
from lists import (
    ALL_TRAIN,
    ASKED,
    CONFIG,
    RED,
    TEXT,
    ZOOM,
    ZOOMS,
    Spoken,
    asked,
    inline,
    learned,
    listed,
    llava,
    small_bundle,
    talk,
    write_media,
)
from paths import REPOSITORY
from sources import QUIETLY, convert, converted, members, refused

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from energon_bridge import WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.errors import EmptyDatasetError, SampleError
from energon_bridge.models.conversations import conversation
from energon_bridge.models.conversations.conversation import read_conversation
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.conversations.turns import doubts_of_turns
from energon_bridge.training.presets import ModelBundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    return small_bundle(tmp_path_factory.mktemp("preset") / "model")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media(tmp_path_factory.mktemp("media"))


# Images and videos ----------------------------------------------------------------------------------------------------

Entry = Callable[[Path], Any]
IMAGES: dict[str, Entry] = {
    "image_url with a value": lambda _: asked({"type": "image_url", "value": "red.png"}, TEXT),
    "image with src": lambda _: asked({"type": "image", "src": "red.png"}, TEXT),
    "image with value": lambda _: asked({"type": "image", "value": "red.png"}, {"type": "text", "value": "color?"}),
    "image with url": lambda _: asked({"type": "image", "url": "red.png", "text": None}, TEXT),
    "image with path": lambda _: asked({"type": "image", "path": "red.png"}, TEXT),
    "a file's address": lambda media: asked({"type": "image", "image": f"file://{media}/red.png"}, TEXT),
    "Chat Completions": lambda m: asked({"type": "image_url", "image_url": {"url": inline(m), "detail": "low"}}, TEXT),
    "Responses": lambda m: asked(
        {"type": "input_image", "image_url": inline(m), "detail": "auto"}, {"type": "input_text", "text": "color?"}
    ),
    "a base64 source": lambda m: asked(
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": inline(m).partition(",")[2]},
        },
        TEXT,
    ),
    "Gemini's own data": lambda m: gemini(
        {"inlineData": {"mimeType": "image/png", "data": inline(m).partition(",")[2]}}
    ),
    "Gemini's files": lambda _: gemini({"file_data": {"mime_type": "image/png", "file_uri": "red.png"}}),
    "parts without a type": lambda _: asked({"image": "red.png"}, {"text": "color?"}),
    "a part and a column": lambda _: asked({"type": "image"}, TEXT, images=["red.png"]),
    "a file without an extension": lambda _: talk("color?", image="plain"),
    "imgs": lambda _: talk("<image>color?", imgs=["red.png"]),
    "Alpaca": lambda _: {"instruction": "color?", "input": "", "output": "red", "images": ["red.png"]},
    "Alpaca, one image": lambda _: {"instruction": "color?", "input": "", "output": "red", "image": "red.png"},
    "a prompt and its response": lambda _: {"image": "red.png", "prompt": "color?", "response": "red"},
    "ms-swift": lambda _: {"query": "<image>color?", "response": "red", "images": ["red.png"]},
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_learned_from_wherever_it_is_named(
    tmp_path: Path, media: Path, bundle: ModelBundle, name: str
) -> None:
    out = converted(listed(tmp_path, IMAGES[name](media)), tmp_path / "out", "--media", media, *ALL_TRAIN)
    ((shown, said, inputs),) = learned(out, bundle)
    assert (shown, said) == ("|user iiiicolor? |assistant red", "red<|im_end|>")
    size = {"shortest_edge": CONFIG.data.min_pixels, "longest_edge": CONFIG.data.max_pixels}
    expected = bundle.image_processor(images=[picture_of("red").resize((32, 32))], return_tensors="pt", size=size)
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])


def gemini(*parts: Any, **beside: Any) -> dict[str, Any]:
    """Return a conversation as Gemini has them."""
    turns = [{"role": "user", "parts": [*parts, {"text": "color?"}]}, {"role": "model", "parts": [{"text": "red"}]}]
    return {"contents": turns, **beside}


VIDEOS: dict[str, Any] = {
    "LLaVA": llava("<video>\ncolor?", video="film.mp4"),
    "no place": llava("color?", video="film.mp4"),
    "LLaVA-Video": llava("<image>\ncolor?", video="film.mp4"),
    "a part": asked({"type": "video", "video": "film.mp4"}, TEXT),
    "LLaMA-Factory": {"instruction": "<video>color?", "input": "", "output": "red", "videos": ["film.mp4"]},
    "in the column of images": talk("<image>color?", image="film.mp4"),
}


SOUNDS: dict[str, tuple[Any, list[str]]] = {
    "a part": (asked({"type": "audio", "audio": "a.wav"}, TEXT), ["0.wav"]),
    "a part with a path": (asked({"type": "audio", "path": "a.wav"}, TEXT), ["0.wav"]),
    "audio_url": (asked({"type": "audio_url", "audio_url": {"url": "a.wav"}}, TEXT), ["0.wav"]),
    "input_audio": (asked({"type": "input_audio", "input_audio": {"data": "WAV", "format": "wav"}}, TEXT), ["0.wav"]),
    "ms-swift": (
        {"query": "<audio><audio>color?", "response": "red", "audios": ["a.wav", "b.mp3"]},
        ["0.wav", "1.mp3"],
    ),
    "LLaMA-Factory": ({"instruction": "<audio>color?", "input": "", "output": "red", "audios": ["a.wav"]}, ["0.wav"]),
    "LLaVA": (llava("<audio>\ncolor?", audio="a.wav"), ["0.wav"]),
    "no place": (talk("color?", sounds=["a.wav"]), ["0.wav"]),
    "a container of videos": (asked({"type": "audio"}, TEXT, audios=["film.mp4"]), ["audios.0.mp4"]),
    "all kinds": (
        talk("<audio>and<image><video>color?", audio="a.wav", image="red.png", video="film.mp4"),
        ["audios.0.wav", "0.png", "videos.0.mp4"],
    ),
}


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds_of_lists_are_converted_with_their_files(
    tmp_path: Path, media: Path, bundle: ModelBundle, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry, parts = SOUNDS[name]
    wav = (media / "a.wav").read_bytes()
    source = listed(tmp_path, json.loads(json.dumps(entry).replace("WAV", base64.b64encode(wav).decode())))
    output = convert(source, tmp_path / "out", "--media", media, *ALL_TRAIN)
    assert "configs/tiny/qwen2" in output
    shard = members(tmp_path / "out")
    assert {name.partition(".")[2] for name in shard} == {"json", *parts}
    for part in parts:
        file = {"wav": "a.wav", "mp3": "b.mp3", "mp4": "film.mp4", "png": "red.png"}[part.rpartition(".")[2]]
        assert next(data for name, data in shard.items() if name.endswith(part)) == (media / file).read_bytes()
    dataset = get_val_dataset(
        tmp_path / "out",
        split_part="train",
        batch_size=1,
        worker_config=WorkerConfig(num_workers=0),
        task_encoder=Spoken(),
    )
    ((content,),) = get_loader(dataset)
    sounds = [part for part in parts if not part.endswith("png") and not part.startswith("videos")]
    assert [one.name for one in content.audios] == [f"part {part!r}" for part in sounds]
    assert [part.kind for part in content.turns[0].parts].count("audio") == len(sounds)
    assert len(content.videos) == parts.count("videos.0.mp4")
    with pytest.raises(EmptyDatasetError):
        learned(tmp_path / "out", bundle)
    assert "the sample has sound, but the model of this task encoder takes none" in caplog.text


def test_sounds_that_are_named_are_parts_or_files_of_a_store() -> None:
    class Store:
        def get(self, name: str, sample: Any) -> str:
            return f"{name} of the store"

    asks = [{"role": "user", "content": "<audio><audio>?"}, RED]
    sample = {"__key__": "a", "json": {"messages": asks, "audios": ["b.wav", "a.mp3"]}, "a.mp3": "A", "b.wav": "B"}
    assert cook_conversation(sample).audios == ["B", "A"]
    stored = cook_conversation(sample, audios=Store())  # type: ignore[arg-type]
    assert stored.audios == ["b.wav of the store", "a.mp3 of the store"]
    assert read_conversation(stored).audios == tuple(stored.audios)
    del sample["b.wav"]
    with pytest.raises(SampleError, match=r"the audio 'b.wav' is not a part .* no auxiliary store 'audios'"):
        cook_conversation(sample)


@pytest.mark.parametrize("name", VIDEOS)
def test_a_video_is_learned(tmp_path: Path, media: Path, bundle: ModelBundle, name: str) -> None:
    out = converted(listed(tmp_path, VIDEOS[name]), tmp_path / "out", "--media", media, *ALL_TRAIN)
    ((shown, said, inputs),) = learned(out, bundle)
    steps, rows, columns = inputs["video_grid_thw"][0].tolist()
    assert (shown, said) == (f"|user {'v' * (steps * rows * columns // 4)}color? |assistant red", "red<|im_end|>")
    assert steps == 2  # four frames of 2.4 seconds
    assert len(inputs["pixel_values_videos"]) == steps * rows * columns


# Places in other spellings --------------------------------------------------------------------------------------------

SPELLED: dict[str, tuple[str, str, str]] = {  # the question, what is shown, and the order of red (r) and blue (b)
    "numbers": ("<image 1>a<image 2>color?", "IaIcolor?", "rb"),
    "numbers in another order": ("<image 2>a<image 1>color?", "IaIcolor?", "br"),
    "numbers from 0": ("<image_00>a<image_01>color?", "IaIcolor?", "rb"),
    "numbers of Phi": ("<|image_2|>\n<|image_1|>\ncolor?", "IIcolor?", "br"),
    "other numbers": ("<image-1>a<image-2>color?", "IaIcolor?", "rb"),
    "a number that comes again": ("<image 1>a<image 2>is <image 1>color?", "IaIis <image 1>color?", "rb"),
    "ImageHere": ("<ImageHere>a<ImageHere>color?", "IaIcolor?", "rb"),
    "capitals": ("<Image>a<IMAGE>color?", "IaIcolor?", "rb"),
    "brackets": ("[IMG]a[IMG]color?", "IaIcolor?", "rb"),
    "placeholders": ("<image_placeholder>a<image_placeholder>color?", "IaIcolor?", "rb"),
    "bars": ("<|image|>a<|image|>color?", "IaIcolor?", "rb"),
    "img": ("<img>a<img>color?", "IaIcolor?", "rb"),
    "img and its end": ("<img></img>a<img></img>color?", "IaIcolor?", "rb"),
    "MiniGPT-4": ("<Img><ImageHere></Img>a<Img><ImageHere></Img>color?", "IaIcolor?", "rb"),
    "img side by side": ("<img><img>color?", "IIcolor?", "rb"),
    "Gemma": ("<start_of_image>a<start_of_image>color?", "IaIcolor?", "rb"),
    "tokens of Qwen": (
        "<|vision_start|><|image_pad|><|vision_end|>a<|vision_start|><|image_pad|><|vision_end|>color?",
        "IaIcolor?",
        "rb",
    ),
    "underscores": ("__IMAGE__a__IMAGE__color?", "IaIcolor?", "rb"),
    "numbers between underscores": ("__IMG_2__a__IMG_1__color?", "IaIcolor?", "br"),
    "round brackets": ("(image 2) a(image1)color?", "I aIcolor?", "br"),
    "an at sign": ("@image1 a @image2 color?", "I a I color?", "rb"),
    "figures": ("<figure 2>a<fig1>color?", "IaIcolor?", "br"),
    "braces": ("{image}a{image}color?", "IaIcolor?", "rb"),
    "braces and spaces": ("{{ image }}a{ image }color?", "IaIcolor?", "rb"),
    "double braces": ("{{image}}a{{image}}color?", "IaIcolor?", "rb"),
    "percent signs": ("%IMAGE%a%IMAGE%color?", "IaIcolor?", "rb"),
    "dollar signs": ("$IMAGE$a$IMAGE$color?", "IaIcolor?", "rb"),
    "hashes": ("##IMAGE##a##IMAGE##color?", "IaIcolor?", "rb"),
    "two square brackets": ("[[image]]a[[image]]color?", "IaIcolor?", "rb"),
    "two angle brackets": ("<<image>>a<<image>>color?", "IaIcolor?", "rb"),
    "LLaVA's start and end": ("<im_start><image><im_end>\na<im_start><image><im_end>color?", "IaIcolor?", "rb"),
    "img around a place": ("<img><image></img>a<img><image></img>color?", "IaIcolor?", "rb"),
    "places of its own, and numbers that refer to them": (
        "<image>a<image>is <image 2>color?",
        "IaIis <image 2>color?",
        "rb",
    ),
}


@pytest.mark.parametrize("name", SPELLED)
def test_places_in_other_spellings_are_places(tmp_path: Path, media: Path, bundle: ModelBundle, name: str) -> None:
    question, expected, order = SPELLED[name]
    source = listed(tmp_path, llava(question, image=["red.png", "blue.png"]))
    ((shown, said, inputs),) = learned(converted(source, tmp_path / "out", "--media", media, *ALL_TRAIN), bundle)
    assert (shown, said) == (f"|user {expected.replace('I', 'iiii')} |assistant red", "red<|im_end|>")
    pictures = [picture_of({"r": "red", "b": "blue"}[one]).resize((32, 32)) for one in order]
    size = {"shortest_edge": CONFIG.data.min_pixels, "longest_edge": CONFIG.data.max_pixels}
    made = bundle.image_processor(images=pictures, return_tensors="pt", size=size)["pixel_values"]
    assert torch.equal(inputs["pixel_values"], made)


def test_images_named_by_their_places_are_taken_in_the_order_of_these(
    tmp_path: Path, media: Path, bundle: ModelBundle
) -> None:
    named = {"<image_01>": "blue.png", "<image_00>": "red.png"}  # as MiniCPM's lists do
    source = listed(tmp_path, llava("<image_01>a<image_00>color?", image=named))
    ((shown, _, inputs),) = learned(converted(source, tmp_path / "out", "--media", media, *ALL_TRAIN), bundle)
    assert shown == "|user iiiiaiiiicolor? |assistant red"
    pictures = [picture_of(one).resize((32, 32)) for one in ("blue", "red")]
    size = {"shortest_edge": CONFIG.data.min_pixels, "longest_edge": CONFIG.data.max_pixels}
    made = bundle.image_processor(images=pictures, return_tensors="pt", size=size)["pixel_values"]
    assert torch.equal(inputs["pixel_values"], made)
    unnumbered = listed(tmp_path, llava("<image>color?", image={"first": "red.png"}))
    assert "expected the path of a file, found \"{'first': 'red.png'}\"" in refused(unnumbered, tmp_path / "no")


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        ("<image 1> color?", r"the text has 1 image places \(<image 1>\) but the sample has 2 images"),
        ("<image 2><image 3> color?", "the text has 2 image places"),
        ("<ImageHere> color?", "the text has 1 image places"),
        ("![image](image) ![image](b.png) color?", r"a text has '!\[image\]\(image\)', which looks like a place"),
        ("<image 1><img> color?", "give each a place, numbered"),
        ("<my_image><my_image> color?", r"'<my_image>', which looks like a place"),
        ("![](red.png) ![](blue.png) color?", r"'!\[\]\(red.png\)', which looks like a place"),
        ('<img src="red.png"> color?', "which looks like a place"),
        ("Picture 1: <img>red.png</img> color?", "would be seen as text"),
        ("<image>red.png</image><image>blue.png</image> color?", "would be seen as text"),
        ("<red.png> <blue.png> color?", "'<red.png>', which looks like a place"),
        ("[Image: red.png] [Image: blue.png] color?", r"'\[Image: red.png\]', which looks like a place"),
        ("red.png\nblue.png\ncolor?", "'red.png', which looks like a place"),
        ("{{image_url}} {{image_url}} color?", r"'\{\{image_url\}', which looks like a place"),
        ("IMAGE_PLACEHOLDER color?", "'IMAGE_PLACEHOLDER', which looks like a place"),
        ("<image id=1><image id=2> color?", "'<image id=1>', which looks like a place"),
        ("(image 1) color?", r"the text has 1 image places \(\(image 1\)\) but the sample has 2 images"),
        ("<image><image 2> color?", "the text has 1 image placeholders '<image>' but the sample has 2"),
    ],
)
def test_places_that_do_not_fit_are_refused(tmp_path: Path, media: Path, question: str, complaint: str) -> None:
    entry = llava(question, image=["red.png", "blue.png"])
    assert re.search(complaint, refused(listed(tmp_path, entry), tmp_path / "out", "--media", media))
    with pytest.raises(SampleError, match=complaint):
        read_conversation(cook_conversation({"__key__": "a", "json": llava(question), "0.png": "r", "1.png": "b"}))


@pytest.mark.parametrize(
    "question",
    [
        *("What is (a) red?", "Is $x$ 50% of #2?", "See chart.png (a.png).", "tree:\na.png\nb.html"),
        *("Write to me@image.org", "an (image)", "What does image_token do?"),
    ],
)
def test_ordinary_texts_beside_media_are_no_places(question: str) -> None:
    sample = {"__key__": "a", "json": llava(question), "0.png": "r"}
    parts = read_conversation(cook_conversation(sample)).turns[0].parts
    assert [(part.kind, part.text) for part in parts] == [("image", ""), ("text", question)]


@pytest.mark.parametrize("name", ["image_path", "img", "audio_filepath", "video_file", "wav"])
def test_files_under_other_names_are_not_left_out_silently(name: str) -> None:
    content = {name: "a.wav", "question": "What is said?", "answer": "Yes"}
    with pytest.raises(SampleError, match=f"`{name}` names a file .* convert the list"):
        cook_conversation({"__key__": "a", "json": content})
    assert cook_conversation({"__key__": "a", "json": content, "0.wav": b"sound"}).audios == [b"sound"]
    for other in ({name: ""}, {name: None}, {"source": "a.wav"}):
        cook_conversation({"__key__": "a", "json": {**content, name: "", **other}})


@pytest.mark.parametrize(
    "question",
    [
        *(
            "What does <img> do?",
            "[IMG] is text",
            "a <sound> of {image}",
            "see (image 1) in the book",
            "{{image}} is it",
        ),
        *(
            "export $IMAGE$ and %IMAGE%",
            "__IMAGE__ is a macro",
            "@image1 in CSS",
            "## Image ##",
            "see <figure 1> there",
        ),
        *(
            "open red.png\nred.png",
            "[red.png](red.png)",
            "![a](red.png)",
            '<img src="red.png"> in HTML',
            "a << image >> 2",
        ),
    ],
)
def test_words_in_brackets_are_text_where_there_are_no_media(question: str) -> None:
    (asks, _) = read_conversation(cook_conversation({"__key__": "a", "json": llava(question)})).turns
    assert asks.text == question


@pytest.mark.parametrize(
    "place",
    [
        *("<|audio_1|>", "<speech>", "<sound>", "<Audio 1>", "<|audio_bos|><|AUDIO|><|audio_eos|>", "__AUDIO__"),
        *("<audio_bos><AUDIO><audio_eos>", "[audio]", "(audio 1)"),
    ],
)
def test_places_of_sounds_and_videos_in_other_spellings(place: str) -> None:
    for kind, name, written in (
        ("audio", "0.wav", place),
        ("video", "0.mp4", "<Video 1>"),
        ("video", "0.mp4", "<|video|>"),
        ("video", "0.mp4", "<video_00>"),
        ("video", "0.mp4", "<|vision_start|><video><|vision_end|>"),
    ):
        sample = {"__key__": "a", "json": llava(f"a {written} b"), name: "file"}
        parts = read_conversation(cook_conversation(sample)).turns[0].parts
        assert [(part.kind, part.text) for part in parts] == [("text", "a "), (kind, ""), ("text", " b")]


def test_the_command_that_is_shown_trains_on_images_and_videos(tmp_path: Path, media: Path) -> None:
    kinds = [VIDEOS["LLaVA"], VIDEOS["no place"], VIDEOS["LLaVA-Video"]]
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}]
    source = listed(tmp_path, [*kinds, {"image": "red.png", "conversations": turns}] * 5)
    output = convert(source, tmp_path / "out", "--media", media)
    line = output.partition("Try it with a tiny model: ")[2]
    words = [*shlex.split(line)[1:], f"run_dir={tmp_path / 'run'}", "train.max_steps=2", "validation.interval=2"]
    import_for_training()
    done = run_program(words, REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "skipped" not in done.stdout + done.stderr
    assert "failed" not in done.stdout + done.stderr


REFUSED: list[tuple[Any, str]] = [
    (asked({"type": "picture", "picture": "red.png"}), "`messages`: a part of a message is not understood: {'type'"),
    (asked({"type": "input_file", "file_data": "x"}), "a part of a message is not understood: {'type': 'input_file'"),
    (asked({"type": "input_image", "file_id": "x"}), "is not understood, for its file_id"),
    (asked({"type": "text"}), "a part of a message is not understood: {'type': 'text'}"),
    (asked({"type": "video", "video": "film.mp4", "every_nth": 2}), "is not understood, for its every_nth"),
    (asked({**TEXT, "image": "red.png"}), "a text part has a file in `image` ('red.png'), which would not be seen"),
    (asked({"text": "color?", "image_url": {"url": "red.png"}}), "a text part has a file in `image_url`"),
    (asked({"type": "thinking", "thinking": "?"}), "thoughts `reasoning_content`"),
    (asked({"type": "tool_result", "tool_use_id": "a"}), "their results turns of the role `tool`"),
    (asked({"type": "image", "source": {"type": "file", "file_id": "a"}}), "understood: {'type': 'file', 'file_id'"),
    (gemini({"text": "red?", "thought": True}), "thoughts `reasoning_content`"),
    (gemini({"functionCall": {"name": "zoom", "args": {}}}), "Calls are `tool_calls` of an answer"),
    (
        gemini({"fileData": {"mimeType": "application/pdf", "fileUri": "a.pdf"}}),
        "a part of a message is not understood",
    ),
    (
        gemini({"fileData": {"mimeType": "video/mp4", "fileUri": "film.mp4"}, "videoMetadata": {"fps": 1}}),
        "is not understood, for its videometadata",
    ),
    (gemini({"fileData": {"mimeType": "image/png", "fileUri": "gs://b/red.png"}}), "'gs://b/red.png' is a URL."),
    ({"messages": [{"type": "function_call", "name": "zoom"}, RED]}, "Calls are `tool_calls` of an answer"),
    (asked({"type": "video", "video": ["red.png", "blue.png"]}), "`videos`: "),
    (asked({"type": "image", "image": "red.png", "path": "blue.png"}), "is not understood, for its image, path"),
    (
        asked({"type": "image", "image": "red.png"}, {"type": "image"}, images=["blue.png"]),
        "has images in `images` and",
    ),
    (asked(TEXT, images=[["red.png"]]), "found a list in it, \"[['red.png']]\". Write one list of all files, in"),
    (
        talk("<video>color?", videos=[["red.png"] * 2]),
        '". Make one file of the frames',
    ),
    (asked(TEXT, image_path="red.png"), "`image_path` seems to name media (red.png)"),
    (asked(TEXT, picture="https://host/red.png?size=3"), "`picture` seems to name media (https://host/red.png"),
    (asked({"type": "image"}, TEXT), "the text has 1 image placeholders '<image>' but the sample has 0 images"),
    (asked({"type": "text", "text": "<audio>?"}, audio="film.mp4"), "a text part contains the placeholder '<audio>'"),
    (asked({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}), "cannot read the data URI"),
    (asked({"type": "input_audio", "input_audio": {"data": "eHg=", "format": "wav"}}), "bytes of an unknown format"),
    (talk("<audio>What is it?"), "the text has 1 audio placeholders '<audio>' but the sample has 0 audios"),
    (asked(TEXT, audios=["red.png"]), "`audios`: "),
    (
        [asked(TEXT, audios=["a.wav"]), asked(TEXT, audios=["gone.wav"])],
        "Paths are relative to the folder of the source",
    ),
    (asked(TEXT, audios="https://host/a.wav"), "is a URL"),
    (talk("a", {"role": "critic", "content": "b"}, RED), "the role 'critic' of"),
    ({"messages": [{"role": "user", "content": "a"}]}, "the conversation has no answer to learn"),
    (talk("a", {**RED, "content": "<image>"}, image="red.png"), "an answer contains the placeholder '<image>'"),
    (asked({"type": "text", "text": "<image>?"}, images=["red.png"]), "a text part contains the placeholder '<image>'"),
    ({"conversations": [*ASKED, {"from": "function_call", "value": "no JSON"}]}, "a call: expected JSON, found 'no"),
    ([asked(TEXT), {"text": "a"}], "is no conversation, as the first rows are: it has text"),
    ([asked(TEXT), {"conversations": None, "image": "red.png"}], "`conversations` is null. Change the list."),
]


@pytest.mark.parametrize(("entry", "complaint"), REFUSED)
def test_what_would_not_be_learned_is_refused_with_its_place(
    tmp_path: Path, media: Path, entry: Any, complaint: str
) -> None:
    entries = entry if isinstance(entry, list) else [asked(TEXT), entry]
    source = listed(tmp_path, entries)
    message = refused(source, tmp_path / "out", "--media", media, *ALL_TRAIN)
    assert message.startswith(f"{source}, entry 1: ")
    assert complaint in message
    output = convert(source, tmp_path / "out", "--media", media, *ALL_TRAIN, "--on-error", "skip")
    assert "Skipped 1 sample:" in output
    assert "Done: 1 sample " in output


def test_images_that_only_late_entries_have_are_files_too(tmp_path: Path, media: Path) -> None:
    plain = {"instruction": "a", "input": "", "output": "b", "images": []}
    source = listed(tmp_path, [*[plain] * 120, {**plain, "images": ["red.png", "blue.png"]}])
    stored = members(converted(source, tmp_path / "out", "--media", media, *ALL_TRAIN))
    names = ["red.png", "blue.png"]
    assert [stored[f"000000120.{n}.png"] for n in (0, 1)] == [(media / name).read_bytes() for name in names]
    said = {"instruction": "a", "input": "", "output": "b", "files": names}
    assert json.loads(stored["000000120.json"]) == said


def test_frames_as_videos_are_refused_by_name(tmp_path: Path, media: Path) -> None:
    source = listed(tmp_path, {**VIDEOS["LLaVA"], "video": "red.png"})
    assert f"`videos`: {media}/red.png is an image" in refused(source, tmp_path / "out", "--media", media)


# Other forms of turns -------------------------------------------------------------------------------------------------

END = "<|im_end|>"
FORMS: dict[str, tuple[Any, str, str]] = {
    "Alpaca": (
        {"instruction": "Say", "input": "it", "output": "red", "system": "Be brief", "history": [["a", "b"]]},
        "|system Be brief |user a |assistant b |user Say it |assistant red",
        f"b{END}red{END}",
    ),
    "ms-swift": ({"query": "a", "response": "red", "history": None}, "|user a |assistant red", f"red{END}"),
    "a question and its answer": ({"question": "a", "answer": "red"}, "|user a |assistant red", f"red{END}"),
    "human and assistant": ({"human": "a", "assistant": "red"}, "|user a |assistant red", f"red{END}"),
    "turns of human and assistant": (
        {"conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "red"}]},
        "|user a |assistant b |user c |assistant red",
        f"b{END}red{END}",
    ),
    "prompt and completion": (
        {"prompt": [{"role": "user", "content": "a"}], "completion": [RED]},
        "|user a |assistant red",
        f"red{END}",
    ),
    "roles by other names": (
        {"conversations": [{"from": "Human", "value": "a"}, {"from": "chatgpt", "value": "red"}]},
        "|user a |assistant red",
        f"red{END}",
    ),
    "OpenOrca": (
        {"system_prompt": "Be brief", "question": "a", "response": "red"},
        "|system Be brief |user a |assistant red",
        f"red{END}",
    ),
    "a prompt beside turns": (
        talk("a", system_prompt="Be brief"),
        "|system Be brief |user a |assistant red",
        f"red{END}",
    ),
    "a system message": (talk("a", system_message="Be brief"), "|system Be brief |user a |assistant red", f"red{END}"),
    "a system instruction": (
        {"system_instruction": "Be very brief now", "question": "a", "answer": "red"},
        "|system Be very brief now |user a |assistant red",
        f"red{END}",
    ),
    "Gemini": (
        gemini(systemInstruction={"parts": [{"text": "Be brief"}]}),
        "|system Be brief |user color? |assistant red",
        f"red{END}",
    ),
    "UltraChat": (
        {"id": "0", "data": ["a", "b", "c", "red"]},
        "|user a |assistant b |user c |assistant red",
        f"b{END}red{END}",
    ),
    "Cohere": (
        {"messages": [{"role": "User", "content": "a"}, {"role": "Chatbot", "content": "red"}]},
        "|user a |assistant red",
        f"red{END}",
    ),
    "functions": (talk("a", functions=[ZOOM]), f"|system <tools> {ZOOMS} </tools> |user a |assistant red", f"red{END}"),
    "functions as text": (
        {"functions": json.dumps([ZOOM]), "query": "a", "response": "red"},
        f"|system <tools> {ZOOMS} </tools> |user a |assistant red",
        f"red{END}",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_conversations_are_learned(tmp_path: Path, bundle: ModelBundle, name: str) -> None:
    entry, shown, said = FORMS[name]
    output = convert(listed(tmp_path, entry), tmp_path / "out", *ALL_TRAIN)
    assert "Try it with a tiny model: " in output
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps(entry) + "\n")
    for path in (tmp_path / "out", lines):  # JSON lines are learned as they are, too
        assert [(one[0], one[1]) for one in learned(path, bundle)] == [(shown, said)]


def test_calls_and_their_results_are_turns_of_the_assistant_and_of_tools() -> None:
    call, other = ({"name": name, "arguments": {"city": "Rome"}} for name in ("weather", "time"))
    turns = [
        {"from": "human", "value": "How is it?"},
        {"from": "function_call", "value": json.dumps(call), "weight": 1},
        {"from": "tool_call", "value": json.dumps([other])},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    cooked = cook_conversation({"__key__": "a", "json": {"conversations": turns}})
    calls = [{"type": "function", "function": one} for one in (call, other)]
    assert cooked.messages[1:4] == [
        {"weight": 1, "role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "sunny"},
        turns[4],
    ]
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "time", "arguments": '{"city": "Rome"}'}}
    cooked = cook_conversation({"__key__": "a", "json": {"messages": [{"role": "user", "content": "a"}, legacy]}})
    assert cooked.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls[1:]}


# Preferences ----------------------------------------------------------------------------------------------------------

SAID = {"from": "gpt", "value": "good"}
PREFERENCES: dict[str, Any] = {
    "LLaMA-Factory": {"conversations": ASKED, "chosen": SAID, "rejected": {"from": "gpt", "value": "bad"}},
    "Alpaca": {"instruction": "a", "input": "", "chosen": "good", "rejected": "bad"},
    "texts": {"prompt": "a", "chosen": "good", "rejected": "bad"},
    "turns": {"prompt": [{"role": "user", "content": "a"}], "chosen": [SAID], "rejected": [{**SAID, "value": "bad"}]},
    "whole conversations": {"prompt": "a", "chosen": [*ASKED, SAID], "rejected": [*ASKED, {**SAID, "value": "bad"}]},
    "ms-swift": {"messages": [*ASKED, SAID], "rejected_response": "bad"},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_only_chosen_answers_are_learned_and_only_if_asked(tmp_path: Path, bundle: ModelBundle, name: str) -> None:
    source = listed(tmp_path, PREFERENCES[name])
    assert "convert the list with --preferred" in refused(source, tmp_path / "out", *ALL_TRAIN)
    with pytest.raises(SampleError, match="has preferences"):
        cook_conversation({"__key__": "a", "json": PREFERENCES[name]})
    output = convert(source, tmp_path / "out", *ALL_TRAIN, "--preferred")
    assert "Left out 1 rejected answer of samples" in output
    assert b"bad" not in b"".join(members(tmp_path / "out").values())
    assert [one[:2] for one in learned(tmp_path / "out", bundle)] == [("|user a |assistant good", "good<|im_end|>")]


@pytest.mark.parametrize(("tag", "values"), [("label", (True, False)), ("kto_tag", ("true", "false"))])
@pytest.mark.parametrize("form", ["messages", "pairs", "images"])
def test_answers_that_are_not_desired_are_left_out_and_counted(
    tmp_path: Path, media: Path, bundle: ModelBundle, tag: str, values: tuple[Any, Any], form: str
) -> None:
    def entry(said: str, value: Any) -> dict[str, Any]:
        if form == "messages":
            return {"messages": [*ASKED, {"from": "gpt", "value": said}], tag: value}
        return {"question": "a", "answer": said, tag: value, **({"image": "red.png"} if form == "images" else {})}

    source = listed(tmp_path, [entry("good", values[0]), entry("bad", values[1]), entry("fine", values[0])])
    flags = ("--media", media, *ALL_TRAIN)
    assert f"has preferences ({tag})" in refused(source, tmp_path / "out", *flags)
    output = convert(source, tmp_path / "out", *flags, "--preferred")
    assert f"Skipped 1 sample:\n  {source}, sample 1: left out by --preferred: `{tag}` is {values[1]!r}" in output
    assert [one[1] for one in learned(tmp_path / "out", bundle)] == ["good<|im_end|>", "fine<|im_end|>"]


def test_preferences_of_typed_samples_are_refused_too(tmp_path: Path, media: Path) -> None:
    entry = {"image": "red.png", "question": "a", "answer": "bad", "label": False}
    flags = ("--media", media, *ALL_TRAIN, "--sample-type", "VQASample", "--field", "context=question")
    assert "has preferences (label)" in refused(listed(tmp_path, entry), tmp_path / "out", *flags)
    (tmp_path / "out2").mkdir()
    source = converted(listed(tmp_path, {**entry, "label": 3}), tmp_path / "typed", *flags)
    assert "--preferred is for lists and tables" in refused(source, tmp_path / "again", "--preferred")


# Keys beside the texts ------------------------------------------------------------------------------------------------

CALL = {"name": "zoom", "arguments": {"x": 1}}

CALLED = '<tool_call> {"name": "zoom", "arguments": {"x": 1}} </tool_call>'


def calls(*flags: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"from": "function_call", "value": json.dumps(CALL), **flag} for flag in flags]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (({}, {}), f"{CALLED} {CALLED}<|im_end|>red<|im_end|>"),
        (({"weight": 1}, {}), f"{CALLED} {CALLED}<|im_end|>red<|im_end|>"),
        (({"weight": 0}, {}), f"{CALLED}<|im_end|>red<|im_end|>"),
        (({}, {"loss": False}), f"{CALLED}<|im_end|>red<|im_end|>"),
        (({"loss": False}, {"loss": False}), "red<|im_end|>"),
    ],
)
def test_calls_in_a_row_are_learned_as_their_flags_say(
    tmp_path: Path, bundle: ModelBundle, flags: Any, said: str
) -> None:
    entry = {"conversations": [*ASKED, *calls(*flags), {"from": "gpt", "value": "red"}]}
    out = converted(listed(tmp_path, entry), tmp_path / "out", *ALL_TRAIN)
    assert [one[1].replace("\n", " ") for one in learned(out, bundle)] == [said]


def numbered(*numbers: int) -> dict[str, Any]:
    """Return a question about pictures as lists of the hub have it: with their numbers, and nulls."""
    parts = [{"index": number, "text": None, "type": "image"} for number in numbers]
    return asked(*parts, {"index": None, **TEXT}, images=["red.png", "blue.png"])


def test_numbers_of_pictures_in_parts_are_their_order(tmp_path: Path, media: Path, bundle: ModelBundle) -> None:
    out = converted(listed(tmp_path, numbered(0, 1)), tmp_path / "out", "--media", media, *ALL_TRAIN)
    assert [one[0] for one in learned(out, bundle)] == ["|user iiiiiiiicolor? |assistant red"]
    source = listed(tmp_path, numbered(1, 0))
    message = refused(source, tmp_path / "other", "--media", media, *ALL_TRAIN)
    assert "a part has the index 1 and is image 0 of the conversation" in message


@pytest.mark.parametrize("form", ["text", "one call", "no tools", "other keys"])
def test_answers_that_are_calls_of_tools_beside_them(form: str) -> None:
    """As the turns of LLaMA-Factory with the same calls are read: xLAM has them as `answers` of a `query`."""
    calls = [{"name": "zoom", "arguments": {"by": 2}}, {"name": "zoom", "arguments": {"by": 3}}]
    said = json.dumps(calls[0] if form == "one call" else calls)
    said = said.replace("arguments", "args") if form == "other keys" else said
    entry = {"query": "a", "answers": said, "tools": [] if form == "no tools" else ZOOMS}
    turns = [*ASKED, {"from": "gpt" if form in ("no tools", "other keys") else "function_call", "value": said}]
    wanted = read_conversation({"json": {"conversations": turns, "tools": entry["tools"]}})
    assert [(turn.text, turn.keys) for turn in read_conversation({"json": entry}).turns] == [
        (turn.text, turn.keys) for turn in wanted.turns
    ]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"messages": [*ASKED, {**RED, "weight": 0.5}]}, "weight=0.5, which cannot be honoured"),
        ({"messages": [*ASKED, {**RED, "loss": "0"}]}, "loss='0', which cannot be honoured"),
        ({"messages": [{**ASKED[0], "train": True}, RED]}, "only answers are learned"),
        ({"messages": [*ASKED, {**RED, "weight": 0}]}, "no answer to learn: keys of its turns"),
        (
            talk("Draw.", {**RED, "content": [{"type": "image", "image": "red.png"}]}),
            "no answer to learn: keys of its turns (weight, loss, train, …) leave out what would be learned, or its",
        ),
        ({"messages": [*ASKED, {**RED, "content": "", "refusal": "No."}]}, "no content but refusal='No.'"),
        ({"messages": [*ASKED, {**RED, "content": "", "audio": {"id": "a"}}]}, "no content but audio="),
        (
            {"messages": [{"role": "user", "content": "Picture 1: <img>red.png</img>\na"}, RED]},
            "names an image as '<img>red.png</img>'",
        ),
        (
            {"messages": [*ASKED, {**RED, "content": "<bbox>"}], "objects": {"ref": [], "bbox": [[1, 2, 3, 4]]}},
            "has `objects` for the places '<bbox>'",
        ),
        (  # of VTimeLLM
            {"messages": [{"role": "user", "content": "From <s0>?"}, RED], "meta": {"token": {"<s0>": 2.6}}},
            "has `meta` for the places '<s0>'",
        ),
        ({"prompt": "a", "completion": "bad", "label": "False"}, "has preferences (label)"),
        ({"functions": "zoom", "messages": [*ASKED, RED]}, "the functions are not valid JSON: "),
        ({"tools": ["zoom"], "messages": [*ASKED, RED]}, "the tools are not valid JSON: "),
        ({"tools": 3, "messages": [*ASKED, RED]}, "tools must be a list of JSON schemas"),
    ],
)
def test_what_training_would_skip_or_take_for_text_is_refused(
    tmp_path: Path, media: Path, entry: Any, complaint: str
) -> None:
    source = listed(tmp_path, [asked(TEXT), entry])
    assert complaint in refused(source, tmp_path / "out", "--media", media, *ALL_TRAIN)
    with pytest.raises(SampleError, match=re.escape(complaint)):
        cook_conversation({"__key__": "a", "json": entry})


def test_tags_in_tables_of_text_are_tags(tmp_path: Path, bundle: ModelBundle) -> None:
    source = tmp_path / "list.csv"
    source.write_text("prompt,completion,label\na,good,True\na,bad,False\n")
    assert "has preferences (label)" in refused(source, tmp_path / "out", *ALL_TRAIN)
    out = converted(source, tmp_path / "out", *ALL_TRAIN, "--preferred")
    assert [one[1] for one in learned(out, bundle)] == ["good<|im_end|>"]


def test_calls_in_tables_have_their_own_arguments(tmp_path: Path, bundle: ModelBundle) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    called = [{"function": CALL}, {"function": {"name": "turn", "arguments": {"by": [2]}}}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": called}]
    path = tmp_path / "table.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"messages": turns}]), path)
    assert (
        parquet.read_table(path).to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["by"] is None
    )
    other = CALLED.replace("zoom", "turn").replace('{"x": 1}', '{"by": [2]}')
    out = converted(path, tmp_path / "out", *ALL_TRAIN)
    assert [one[1].replace("\n", " ") for one in learned(out, bundle)] == [f"{CALLED} {other}<|im_end|>"]


# Empty answers --------------------------------------------------------------------------------------------------------

ASKS = {"role": "user", "content": "a"}
SAYS_NOTHING: dict[str, Any] = {
    "an empty text": {"conversations": [*ASKED, {"from": "gpt", "value": ""}]},
    "white space": talk("a", {"role": "assistant", "content": " \n"}),
    "an empty part": talk("a", {**RED, "content": [{**TEXT, "text": ""}]}),
    "one of two": talk("a", RED, {**ASKS, "content": "b"}, {**RED, "content": ""}),
    "a pair": {"question": "a", "answer": ""},
}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
SAYS: dict[str, Any] = {
    "an answer": llava("a"),
    "an empty question": talk(""),
    "left out": talk("a", {**RED, "content": "", "weight": 0}, ASKS, RED),
    "a call": talk("a", {"role": "assistant", "content": "", "tool_calls": CALLS}),
    "elsewhere": llava("a", note=""),
}


@pytest.mark.parametrize("form", [*SAYS_NOTHING, *SAYS])
def test_training_warns_of_what_convert_names_as_empty(form: str, tmp_path: Path, caplog: Any) -> None:
    """What says nothing is what the warning of a run is about."""
    entry = (SAYS_NOTHING | SAYS)[form]
    conversation.name_empty_answers(
        read_conversation(
            cook_conversation({"__key__": "k", "json": entry, "__restore_key__": (), "__subflavors__": None})
        )
    )
    assert ("empty answer" in caplog.text) == (form in SAYS_NOTHING) == ("blank" in doubts_of_turns(entry))


def test_convert_counts_and_names_empty_answers(tmp_path: Path) -> None:
    said = {"conversations": [*ASKED, {"from": "gpt", "value": "red"}]}
    source = listed(tmp_path, [{"id": n, **(said if n % 2 else SAYS_NOTHING["an empty text"])} for n in range(14)])
    converted(source, tmp_path / "out", *ALL_TRAIN)
    again = convert(source, tmp_path / "out", *ALL_TRAIN)
    assert "7 samples with an empty answer" in again
    assert [f"entry {n} (id {n})" in again for n in range(14)] == [n % 2 == 0 and n < 10 for n in range(14)]
    assert "… and 2 more" in again
    found = answer("convert", source, tmp_path / "out", *QUIETLY, *ALL_TRAIN)
    assert found["empty"][6].endswith("entry 12 (id 12)")
    assert "empty" not in convert(listed(tmp_path, [said] * 3), tmp_path / "other", *ALL_TRAIN)

"""The encoder of the families in the engine: samples of all shapes, packing without pixels, resume, loading."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conversations import conversations_dataset
from engine import config_of, counts_of, loaders_of
from families import FAMILIES, chat, encoder_of, image_processor_of, model_config_of, picture, text_of, tokenizer_of

pytest.importorskip("transformers")

from energon_bridge import CaptioningSample, SampleDecoder, VidQASample, VQASample, get_train_dataset
from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.samples import CrudeSample, InterleavedSample, TextSample
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import (
    ChatConfig,
    ChatSample,
    ChatTemplateTaskEncoder,
    VideoFrames,
    known_families as registry,
)
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.models.packing.packing import Packer


def short(encoder: ChatTemplateTaskEncoder, sample: Any) -> str:
    """Return the text, with one letter for the four tokens of an image."""
    return text_of(encoder, sample).replace("<|image_pad|>" * 4, "#").replace("<|video_pad|>" * 4, "@")


PIC, CLIP = "<|vision_start|>#<|vision_end|>", "<|vision_start|>@<|vision_end|>"
TALK = f"<|im_start|>user\n{PIC}a{PIC}<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
SAID = [{"from": "human", "value": "<image>\na<image>"}, {"from": "gpt", "value": "b"}]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
]
TWO = [picture(seed=1), picture(seed=2)]
SHAPES: dict[str, Any] = {
    "messages": ChatSample(__key__="q", messages=PARTS, images=TWO),
    "from and value": ChatSample(__key__="q", messages=SAID, images=TWO),
    "json text": ChatSample(__key__="q", messages=json.dumps(SAID), images=TWO),
    "json with a name": ChatSample(__key__="q", messages=json.dumps({"conversations": SAID}), images=TWO),
    "a dict": {"__key__": "q", "conversations": SAID, "images": TWO},
    "a crude sample with a json part": CrudeSample(__key__="q", json={"messages": SAID}, imgs=TWO),
    "a crude sample with a list": CrudeSample(__key__="q", json=SAID, image=TWO),
    "images in the parts": {
        "__key__": "q",
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": TWO[0]}, "a", {"type": "image", "image": TWO[1]}]},
            {"role": "assistant", "content": "b"},
        ],
    },
    "addresses in the parts, images in the sample": {
        "__key__": "q",
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, "a", {"type": "image"}]},
            {"role": "assistant", "content": "b"},
        ],
        "images": TWO,
    },
    "questions and answers": VQASample(__key__="q", image=TWO, context="<image>a<image>", answers=["b"]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("shape", SHAPES)
def test_conversations_of_all_shapes_are_the_same(shape: str) -> None:
    encoder = encoder_of("qwen2_vl")
    sample = encoder.encode(SHAPES[shape])
    assert short(encoder, sample) == TALK
    assert sample.__key__ == "q"
    expected = image_processor_of("qwen2_vl")(images=TWO, return_tensors="pt")["pixel_values"]
    assert torch.equal(sample.visual["pixel_values"], expected)


@pytest.mark.parametrize(
    ("sample", "whole"),
    [
        (VQASample(__key__="q", image=TWO[0], context="a", answers=["b"]), TALK.replace(f"a{PIC}", "a")),  # type: ignore[arg-type]
        (chat("a", "b", images=TWO[:1]), TALK.replace(f"a{PIC}", "a")),
        (
            VidQASample(__key__="q", video=torch.zeros(2, 3, 16, 16, dtype=torch.uint8), context="a", answers=["b"]),
            TALK.replace(f"{PIC}a{PIC}", f"{CLIP}a"),
        ),
        (CaptioningSample(__key__="q", image=TWO[0], caption="a"), f"{PIC}a<|im_end|>"),  # type: ignore[arg-type]
        (InterleavedSample(__key__="q", sequence=["a", TWO[0], "b"]), f"a{PIC}b<|im_end|>"),  # type: ignore[list-item]
    ],
)
def test_samples_of_other_types_are_encoded(sample: Any, whole: str) -> None:
    encoder = encoder_of("qwen2_vl")
    assert short(encoder, encoder.encode(sample)) == whole


@pytest.mark.parametrize("text", ["red\n", "  red how \n\n", "two\r\nlines\r\n"])
@pytest.mark.parametrize("kind", ["caption", "text", "between images"])
@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_white_space_of_plain_texts_is_learned_up_to_their_end(family: str, kind: str, text: str) -> None:
    encoder = encoder_of(family)
    samples: dict[str, Any] = {
        "caption": CaptioningSample(__key__="q", image=TWO[0], caption=text),  # type: ignore[arg-type]
        "text": TextSample(__key__="q", text=text),
        "between images": InterleavedSample(__key__="q", sequence=[TWO[0], text, TWO[1], text]),  # type: ignore[list-item]
    }
    sample = encoder.encode(samples[kind])
    tokenizer = encoder.tokenizer
    said = tokenizer.encode(text, add_special_tokens=False)
    wanted = [*said * (2 if kind == "between images" else 1), tokenizer.eos_token_id]
    if kind == "text":  # nothing stands in front of the first token
        wanted.pop(0)
    assert sample.labels[sample.loss_mask > 0].tolist() == wanted


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_what_says_nothing_is_refused_or_named_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    chat_encoder = encoder_of("qwen2_vl")
    plain = MultiModalTaskEncoder(chat_encoder.tokenizer, image_processor_of("qwen2_vl"))
    encode: Any = chat_encoder.encode if kind == "chat" else plain.encode_sample
    for text in ("", " \n"):
        for sample in (CaptioningSample(__key__="q", image=TWO[0], caption=text), TextSample(__key__="q", text=text)):  # type: ignore[arg-type]
            with pytest.raises(SampleError, match="no text to learn"):
                encode(sample)
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    for answer in ({"content": "b"}, {"content": "", "tool_calls": calls}, {"content": "", "weight": 0}):
        if kind == "chat" or "tool_calls" not in answer:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
            encode(ChatSample(__key__="q", messages=[*turns, *SAID[1:]]))
    assert "empty answer" not in caplog.text
    for _ in range(2):
        encode(VQASample(__key__="q", image=TWO[0], context="a", answers=[" "]))  # type: ignore[arg-type]
    assert caplog.text.count("empty answer") == 1


def test_a_placeholder_is_text_where_all_images_have_places() -> None:
    encoder = encoder_of("qwen2_vl")
    assert short(encoder, encoder.encode(chat("<image>a<image>", "<image>b", images=TWO))) == TALK.replace(
        "b<|im_end|>", "<image>b<|im_end|>"
    )
    parts = [{"type": "image"}, {"type": "text", "text": "a<image>"}, {"type": "image"}]
    sample = chat(parts, "b", images=TWO)  # type: ignore[arg-type]
    assert short(encoder, encoder.encode(sample)) == TALK.replace("a<", "a<image><", 1)
    with pytest.raises(SampleError, match="must write each image and video once"):  # its token is reserved there
        encoder_of("llava").encode(chat("<image>a", "<image>b", images=TWO[:1]))


def test_images_of_a_crude_sample_are_its_own_parts() -> None:
    encoder = encoder_of("qwen2_vl")
    crude = CrudeSample(__key__="q", json={"conversations": SAID}, **{"10.jpg": TWO[1], "2.png": TWO[0], "txt": "x"})
    sample = encoder.encode(crude)
    assert short(encoder, sample) == TALK
    expected = image_processor_of("qwen2_vl")(images=TWO, return_tensors="pt")["pixel_values"]
    assert torch.equal(sample.visual["pixel_values"], expected)


def test_images_without_a_place_can_follow_the_question() -> None:
    encoder = encoder_of("qwen2_vl", ChatConfig(place_images="after"))
    assert short(encoder, encoder.encode(chat("a", "b", images=TWO[:1]))) == TALK.replace(f"{PIC}a", "a")


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (chat("a"), "no answer to learn"),
        (chat("<image>a", "b", images=TWO), "1 image placeholders '<image>' but the sample has 2 images"),
        (chat("<image>a<image>", "b", images=TWO[:1]), "2 image placeholders '<image>' but the sample has 1 images"),
        (chat("<video>", "b"), "1 video placeholders '<video>' but the sample has 0 videos"),
        (chat("a", "<image>b", images=TWO[:1]), "an answer contains the placeholder '<image>'"),
        (chat("<image>a", "<image>b", images=TWO), "an answer contains the placeholder '<image>'"),
        (chat("a", "<video>"), "an answer contains the placeholder '<video>'"),
        (chat("a", [{"type": "text", "text": "<image>"}], images=TWO[:1]), "a text part contains the placeholder"),  # type: ignore[arg-type]
        (VQASample(__key__="q", image=TWO, context="<image>", answers=["<image>"]), "an answer contains the pl"),  # type: ignore[arg-type]
        (chat("<audio>a", "b"), "1 audio placeholders '<audio>' but the sample has 0 audios"),
        (
            CrudeSample(__key__="q", json={"messages": [*chat("a", "b").messages]}, **{"0.wav": b""}),
            "has sound, but the",
        ),
        (CrudeSample(__key__="q", json={"messages": SAID, "label": False}), "has preferences"),
        (chat("<|image_pad|>", "b"), r"the text has 1 image places \(<\|image_pad\|>\) but the sample has 0"),
        (ChatSample(__key__="q", messages="[{"), "the turns are not valid JSON"),
        (ChatSample(__key__="q", messages=[]), "must be a non-empty list of turns"),
        (ChatSample(__key__="q", messages=[{"text": "a"}]), "a turn must have role and content"),
        (ChatSample(__key__="q", messages=[{"role": "user", "content": [{"type": "sound"}]}]), "a part of a turn"),
        (VidQASample(__key__="q", video=TWO, context="a"), "needs answers for training"),
    ],
)
def test_conversations_that_cannot_be_learned_are_refused_by_name(sample: Any, complaint: str) -> None:
    with pytest.raises(SampleError, match=f"sample 'q': .*{complaint}"):
        encoder_of("qwen2_vl").encode(sample)


def test_a_type_without_an_encoder_is_refused_and_can_be_registered() -> None:
    encoder = ChatTemplateTaskEncoder(tokenizer_of("qwen2_vl"), None)
    with pytest.raises(ConfigurationError, match=r"messages or conversations, .*CaptioningSample.*, not dict"):
        encoder.encode({"__key__": "q", "caption": "a"})
    with pytest.raises(SampleError, match="no family for them"):
        encoder.encode(chat("a", "b", images=TWO))
    encoder.register_encoder(dict, lambda sample, config: chat("a", sample["caption"]))
    assert encoder.encode({"__key__": "q", "caption": "b"}).answer == "b"


# In the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversations_dataset(tmp_path_factory.mktemp("data") / "talks", num_train=30, num_val=1)


def packed(talks: Path, encoder: ChatTemplateTaskEncoder) -> Any:
    return get_train_dataset(
        talks,
        worker_config=config_of(1, 0),
        batch_size=1,
        task_encoder=encoder,
        packing_buffer_size=8,
        trust_remote_code=True,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_is_delivered_is_decoded(talks: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    original = DeferredImage.get
    monkeypatch.setattr(DeferredImage, "get", lambda self: decoded.append(self.part) or original(self))
    encoder = encoder_of(family, ChatConfig(seq_length=100))
    waiting: list[list[Any]] = []
    select = encoder.packer.select

    def selected(samples: Any) -> Any:
        waiting.extend(list(sample.images) for sample in samples)
        return select(samples)

    monkeypatch.setattr(encoder, "select_samples_to_pack", selected)
    (loader,) = loaders_of(packed(talks, encoder), 1, 0)
    batches = list(islice(loader, 12))
    assert len(decoded) == sum(sum(batch.num_images) for batch in batches)
    assert all(isinstance(image, DeferredImage) for images in waiting for image in images)
    assert {len(images) for images in waiting} == {1, 2, 3}
    assert any(len(batch.sample_keys) > 1 for batch in batches)
    assert all(batch.tokens.shape[1] <= 100 for batch in batches)


def test_packs_can_be_limited_by_images_and_their_tokens(talks: Path) -> None:
    limits = {"tokens": 200, "images": 3, "visual_tokens": 12}
    sizes = lambda sample: {  # noqa: E731
        "tokens": len(sample.tokens),
        "images": len(sample.images),
        "visual_tokens": sample.visual_tokens,
    }
    made = encoder_of("qwen2_vl")
    packer: Packer[Any] = Packer(limits=limits, size_of=sizes)
    encoder = ChatTemplateTaskEncoder(made.tokenizer, made.family, packer=packer)
    (loader,) = loaders_of(packed(talks, encoder), 1, 0)
    images = [sum(batch.num_images) for batch in islice(loader, 10)]
    assert max(images) == 3


def test_samples_over_a_limit_are_counted_and_left_out(talks: Path) -> None:
    encoder = encoder_of("qwen2_vl", ChatConfig(max_num_images=2))
    (loader,) = loaders_of(packed(talks, encoder), 1, 0, num_lanes=1)
    assert all(max(batch.num_images) <= 2 for batch in islice(loader, 12))
    assert counts_of(loader.save_state_rank())["skipped"] == encoder.counts["drop max_num_images"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_are_cut_off_are_counted(talks: Path, workers: int) -> None:
    """Of those delivered, as many as are longer when they may be."""
    whole, cut = (
        get_train_dataset(
            talks,
            worker_config=config_of(1, workers, num_lanes=2),
            batch_size=1,
            task_encoder=encoder_of("qwen2_vl", ChatConfig(seq_length=length)),
            trust_remote_code=True,
        )
        for length in (2048, 25)
    )
    lengths = []
    for dataset in (whole, cut):
        (loader,) = loaders_of(dataset, 1, workers, num_lanes=2)
        lengths.append([batch.tokens.shape[1] for batch in islice(loader, 30)])
        counted = counts_of(loader.save_state_rank())
        loader.close()
    assert counted["truncated"] == sum(one > other for one, other in zip(*lengths, strict=True)) > 0
    assert counted["truncated"] < counted["samples"] == 30


# Loading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_is_loaded_from_a_folder(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family)
    for part in (tokenizer, image_processor_of(family), model_config_of(family, tokenizer)):
        part.save_pretrained(tmp_path)
    config = ChatConfig(system="be kind")
    loaded = ChatTemplateTaskEncoder.from_pretrained(tmp_path, config)
    made = ChatTemplateTaskEncoder.for_model(
        model_config_of(family, tokenizer), tokenizer, image_processor_of(family), config
    )
    content = chat("<image>a<image>", "b", images=[picture(), picture(30, 20)])
    ours, theirs = made.encode(content), loaded.encode(content)
    for name in ("tokens", "labels", "mm_token_type_ids", "mrope_position_ids"):
        assert str(getattr(ours, name)) == str(getattr(theirs, name))
    assert torch.equal(ours.visual["pixel_values"], theirs.visual["pixel_values"])


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "in the tokenizer"])
def test_the_template_of_the_processor_goes_first(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llava")
    tokenizer.chat_template = {"default": "{{ 'of the tokenizer' }}"} if name == "in the tokenizer" else None
    for part in (tokenizer, image_processor_of("llava"), model_config_of("llava", tokenizer)):
        part.save_pretrained(tmp_path)
    if name != "in the tokenizer":
        template = "of the processor"
        (tmp_path / name).write_text(json.dumps({"chat_template": template}) if name.endswith("json") else template)
    expected = "{{ 'of the tokenizer' }}" if name == "in the tokenizer" else "of the processor"
    for config, template in ((ChatConfig(), expected), (ChatConfig(chat_template="my own"), "my own")):
        assert ChatTemplateTaskEncoder.from_pretrained(tmp_path, config)._renderer.template == template


@pytest.mark.parametrize("name", ["video_preprocessor_config.json", "processor_config.json"])
def test_the_bounds_of_videos_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3_vl")
    for part in (tokenizer, image_processor_of("qwen3_vl"), model_config_of("qwen3_vl", tokenizer)):
        part.save_pretrained(tmp_path)
    video = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    (tmp_path / name).write_text(json.dumps(video if name.startswith("video") else {"video_processor": video}))
    family: Any = ChatTemplateTaskEncoder.from_pretrained(tmp_path).family
    assert (family.video_min_pixels, family.video_max_pixels) == (4096, 25165824)


def test_what_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"(?s)cannot load the tokenizer and image processor of '.*local folder"
    ):
        ChatTemplateTaskEncoder.from_pretrained(tmp_path / "none")


_ASKING = """
from transformers import AutoTokenizer
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.families import ChatTemplateTaskEncoder
try:
    ChatTemplateTaskEncoder.from_pretrained("nobody/nothing")
except ConfigurationError as error:
    print(" ".join(str(error).split()))
print(ChatTemplateTaskEncoder.from_pretrained("nobody/tiny").tokenizer.encode("color? red"))
"""


def test_a_hub_that_does_not_answer_is_asked_once_for_each_model(tmp_path: Path) -> None:
    """A model in the cache is loaded from there, as from its folder; any other is named."""
    folder = tmp_path / "hub/models--nobody--tiny/snapshots/abc"
    tokenizer = tokenizer_of("qwen3_vl")
    for part in (tokenizer, image_processor_of("qwen3_vl"), model_config_of("qwen3_vl", tokenizer)):
        part.save_pretrained(folder)
    (tmp_path / "hub/models--nobody--tiny/refs").mkdir()
    (tmp_path / "hub/models--nobody--tiny/refs/main").write_text("abc")
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked: list[str] = []

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    asked.append(connection.recv(4096).decode().partition(" HTTP")[0])
                    connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        hub = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub}
        ran = subprocess.run(
            [sys.executable, "-c", _ASKING], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        server.shutdown(socket.SHUT_RDWR)
    missing, tokens = ran.stdout.splitlines()
    assert "of 'nobody/nothing': there is no such folder, it is not in the cache" in missing
    assert "the hub does not answer" in missing
    assert tokens == str(tokenizer.encode("color? red"))
    assert [one for one in asked if "nobody" in one] == [
        "GET /api/models/nobody/nothing",
        "GET /api/models/nobody/tiny",
    ]


@pytest.mark.parametrize("missing", [("torchvision", "num2words"), ("num2words",)])
@pytest.mark.parametrize("of_words", [False, True], ids=["what comes first", "num2words"])
def test_packages_that_a_processor_needs_are_named_at_once(
    missing: Sequence[str], of_words: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoProcessor

    AutoConfig.for_model("smolvlm").save_pretrained(tmp_path)
    tokenizer_of("llava").save_pretrained(tmp_path)
    parts = {
        f"{one}_processor": {f"{one}_processor_type": f"SmolVLM{one.title()}Processor"} for one in ("image", "video")
    }
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "SmolVLMProcessor", **parts}))
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name in missing else name)
    if of_words or find_spec("torchvision") is not None or len(missing) == 1:  # where the others are installed
        complaint = "Package `num2words` is required to run SmolVLM processor."
        monkeypatch.setattr(AutoProcessor, "from_pretrained", Mock(side_effect=ImportError(complaint)))
    with pytest.raises(ConfigurationError) as caught:
        ChatTemplateTaskEncoder.from_pretrained(tmp_path)
    install = (
        "num2words" if len(missing) == 1 else f"torch=={torch.__version__.partition('+')[0]} torchvision num2words"
    )
    needs = f"needs {' and '.join(missing)}: `pip install {install}`"
    assert str(caught.value) == f"the processor of {str(tmp_path)!r} {needs}"


def test_deferred_images_have_the_sizes_of_their_headers() -> None:
    buffer = io.BytesIO()
    picture(40, 24).save(buffer, "png")
    image = SampleDecoder(image_decode="pilrgb", defer_images=True).decode("a.png", buffer.getvalue())
    encoder = encoder_of("qwen2_vl")
    prepared = encoder.preencode_sample(chat("<image>a", "b", images=[image]))
    assert prepared.plans[0].grid == (1, 4, 6)
    assert [one.data for one in prepared.images] == [image.data]
    assert encoder.postencode_sample(prepared).visual["image_grid_thw"].tolist() == [[1, 4, 6]]


def test_videos_in_a_list_are_several_and_frames_in_a_list_are_one() -> None:
    encoder = encoder_of("qwen2_vl")
    one = encoder.encode(chat("<video>", "a", videos=[picture(), picture()]))
    clips = [VideoFrames(frames=[picture()] * count) for count in (2, 4)]
    two = encoder.encode(chat("<video><video>", "a", videos=clips))
    assert one.visual["video_grid_thw"][:, 0].tolist() == [1]
    assert two.visual["video_grid_thw"][:, 0].tolist() == [1, 2]


BEHIND = [{"from": "gpt", "value": "b"}, {"from": "human", "value": "<image>\nq"}]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_media_after_the_last_answer_are_refused(kind: str) -> None:
    """They would be cut off with their turn, and the answer learned without them."""
    media = {f"{kind}s": [torch.zeros(2, 3, 56, 56, dtype=torch.uint8) if kind == "video" else picture()]}
    encoder = encoder_of("qwen2_vl", ChatConfig(system="s"))
    for messages in (
        [{**turn, "value": turn["value"].replace("image", kind)} for turn in BEHIND],
        [BEHIND[0], {"from": "human", "value": "q"}],  # without a placeholder: at the first question
    ):
        with pytest.raises(SampleError, match=rf"^sample 'q': no answer follows the {kind} of message 2 \(user\): "):
            encoder.encode(ChatSample(__key__="q", messages=messages, **media))


def test_texts_after_the_last_answer_are_cut_off() -> None:
    encoder = encoder_of("qwen2_vl")
    for more in ([], [{"from": "human", "value": "q"}]):
        assert short(encoder, encoder.encode(ChatSample(__key__="q", messages=[*SAID, *more], images=TWO))) == TALK
    masked = [*SAID, BEHIND[1], {"from": "gpt", "value": "c", "weight": 0}]  # an answer follows, though not learned
    sample = encoder.encode(ChatSample(__key__="q", messages=masked, images=[*TWO, picture()]))
    assert short(encoder, sample) == TALK


@pytest.mark.parametrize("role", ["user", "tool"])
def test_media_after_the_last_answer_are_named_once_where_others_are_seen(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = encoder_of("qwen2_vl")
    more = [*SAID, {"role": role, "content": [{"type": "image"}]}]
    for _ in range(2):
        sample = encoder.encode(ChatSample(__key__="q", messages=more, images=[*TWO, picture()]))
        assert short(encoder, sample) == TALK
    assert caplog.text.count(f"no answer follows the image of message {len(more)} ({role}) of a sample") == 1

"""What a run makes of a model and its data settings: the task encoder, and conversations out of crude samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversations import picture_of
from PIL import Image

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.samples import CaptioningSample, TextSample, VQASample
from energon_bridge.core.stores import FileStore
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import LLAVA_TEMPLATE, ChatSample, ChatTemplateTaskEncoder
from energon_bridge.training.config import DataConfig, ModelConfig, RunConfig
from energon_bridge.training.encoder import training_task_encoder, without_effect
from energon_bridge.training.generation import prompts_of, visible_images
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import ModelBundle, load_model, write_preset

QWENS = ["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl"]
SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 300, "patch_size": 8}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelBundle]:
    """Return a bundle of each preset."""
    root = tmp_path_factory.mktemp("presets")
    names = ("tiny-llava", *QWENS)  # others are models of a processor, which may need torchvision
    for name in names:
        config = ModelConfig(preset=name, image_size=16 if name == "tiny-llava" else 64, **SIZES)
        write_preset(config, root / name, lambda: ["color? red"] * 3)
    return {name: load_model(str(root / name), init="random") for name in names}


def chat(*sizes: tuple[int, int], key: str = "chat") -> ChatSample:
    """Return a conversation with a question about an image in each turn."""
    turns = [{"role": role, "content": text} for role, text in (("user", "<image> color?"), ("assistant", "red"))]
    images = [picture_of("red").resize(size) for size in sizes]
    return ChatSample(__key__=key, messages=turns * len(sizes), images=images)


def encode(encoder: Any, sample: Any) -> Any:
    return encoder.postencode_sample(encoder.preencode_sample(sample))


# Which encoder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "template", "kind"),
    [
        ("tiny-llava", None, MultiModalTaskEncoder),
        ("tiny-llava", "llava", ChatTemplateTaskEncoder),
        *((name, None, ChatTemplateTaskEncoder) for name in QWENS),
        ("tiny-qwen3-vl", "chatml", ChatTemplateTaskEncoder),
    ],
)
def test_the_encoder_follows_from_the_family_and_the_template(
    bundles: dict[str, ModelBundle], preset: str, template: str | None, kind: type
) -> None:
    encoder = training_task_encoder(DataConfig(seq_length=128, chat_template=template), bundles[preset])
    assert type(encoder) is kind


def test_a_family_that_is_not_known_is_laid_out_plainly(bundles: dict[str, ModelBundle]) -> None:
    class Config:
        model_type = "another"

    class Model:
        config = Config()

    bundle = replace(bundles["tiny-llava"], model=Model(), family=None)
    assert type(training_task_encoder(DataConfig(), bundle)) is MultiModalTaskEncoder
    with pytest.raises(ConfigurationError, match=r"data\.chat_template='llava' .* models of type 'another' are"):
        training_task_encoder(DataConfig(chat_template="llava"), bundle)


def test_a_template_can_be_a_file(bundles: dict[str, ModelBundle], tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(LLAVA_TEMPLATE.replace("USER: ", "Q: "))
    samples = {}
    for template in ("llava", str(path)):
        encoder = training_task_encoder(DataConfig(chat_template=template, system="Be brief."), bundles["tiny-llava"])
        text = bundles["tiny-llava"].tokenizer.decode(encode(encoder, chat((16, 16))).tokens)
        samples[template] = text
    assert samples["llava"].startswith("Be brief. USER: <image>")
    assert samples[str(path)].startswith("Be brief. Q: <image>")


@pytest.mark.parametrize(
    ("preset", "settings", "complaint"),
    [
        ("tiny-llava", {"system": "Be brief."}, r"data\.system='Be brief\.' .* set data\.chat_template too"),
        ("tiny-llava", {"max_num_images": 3}, r"data\.max_num_images=3 has no effect here"),
        ("tiny-llava", {"max_pixels": 100, "chat_template": "llava"}, r"all images .* the size.*data\.max_pixels=null"),
        ("tiny-llava", {"chat_template": "lava"}, "'lava' is neither a readable file .*: llava, chatml, qwen"),
        ("tiny-llava", {"max_sound_seconds": 30}, r"data\.max_sound_seconds=30 has no effect here"),
        ("tiny-qwen2-vl", {"video_sound": True}, "needs a model that hears videos"),
        ("tiny-qwen2-vl", {"shuffle_images": True}, "take different numbers of tokens"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    bundles: dict[str, ModelBundle], preset: str, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        training_task_encoder(DataConfig(**settings), bundles[preset])


@pytest.mark.parametrize(
    ("settings", "types", "said"),
    [
        (
            {"chat_template": "llava", "system": "Be brief."},
            {CaptioningSample, TextSample},
            [
                "data.chat_template='llava' and data.system='Be brief.' have no effect: data/digits has samples of "
                "type CaptioningSample, TextSample, whose texts are learned as they are, without turns. For turns, "
                "make them VQASample, or conversations"
            ],
        ),
        ({"chat_template": "llava"}, {CaptioningSample, VQASample}, []),
        ({"chat_template": "llava"}, {ChatSample}, []),
        (
            {"chat_template": "llava", "max_num_frames": 8, "max_sound_seconds": 3.0},
            {VQASample},
            [
                "data.max_num_frames=8 has no effect: the model takes no video",
                "data.max_sound_seconds=3.0 has no effect: the model takes no audio",
            ],
        ),
    ],
)
def test_settings_without_effect_are_named(
    bundles: dict[str, ModelBundle], settings: dict[str, Any], types: set[type], said: list[str]
) -> None:
    config = DataConfig(**settings)
    encoder = training_task_encoder(config, bundles["tiny-llava"])
    assert list(without_effect(config, encoder, lambda: types)) == said


@pytest.mark.parametrize("preset", QWENS)
def test_bounds_of_images_decide_their_tokens(bundles: dict[str, ModelBundle], preset: str) -> None:
    bundle = bundles[preset]
    counts = []
    for settings in ({}, {"max_pixels": 1024}, {"min_pixels": 16384, "max_pixels": 16384}):
        encoder = training_task_encoder(DataConfig(seq_length=256, **settings), bundle)
        sample = encode(encoder, chat((64, 64)))
        grid = sample.visual["image_grid_thw"]
        counts.append(int(sample.tokens.eq(bundle.image_token_id).sum()))
        assert counts[-1] == int(grid.prod()) // 4
    assert counts == [16, 4, 64]


def test_packs_keep_to_their_images_before_anything_is_decoded(bundles: dict[str, ModelBundle]) -> None:
    config = DataConfig(seq_length=256, packing_buffer_size=10, packing_max_images=3)
    encoder = training_task_encoder(config, bundles["tiny-qwen2-vl"])
    waiting = [encoder.preencode_sample(chat(*[(16, 16)] * count, key=str(count))) for count in (2, 1, 2, 3)]
    packs = encoder.select_samples_to_pack(waiting)
    assert max(sum(len(sample.plans) for sample in pack) for pack in packs) == 3
    assert any(len(pack) > 1 for pack in packs)


def test_the_control_exchanges_the_images_of_conversations(bundles: dict[str, ModelBundle]) -> None:
    bundle = bundles["tiny-llava"]
    plain, shuffled = (
        training_task_encoder(DataConfig(chat_template="llava", shuffle_images=shuffle), bundle)
        for shuffle in (False, True)
    )
    samples = [
        ChatSample(__key__=color, messages=chat((16, 16)).messages, images=[picture_of(color)])
        for color in ("red", "green", "blue")
    ]
    ours, theirs = (encoder.batch([encode(encoder, sample) for sample in samples]) for encoder in (plain, shuffled))
    assert torch.equal(theirs.pixel_values, ours.pixel_values.roll(1, 0))
    assert torch.equal(theirs.tokens, ours.tokens)


# Images of prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", QWENS)
def test_a_prompt_is_shown_its_own_images_of_any_size(bundles: dict[str, ModelBundle], preset: str) -> None:
    bundle = bundles[preset]
    encoder = training_task_encoder(DataConfig(seq_length=256), bundle)
    several, one = chat((16, 16), (48, 32), (32, 32), key="several"), chat((64, 16), (16, 16), key="two")
    batch = encoder.batch([encode(encoder, sample) for sample in (several, one)])
    prompts, _ = prompts_of(batch, pad_id=0)
    inputs = {"pixel_values": batch.pixel_values, **batch.visual_inputs}
    shown = visible_images(inputs, batch, prompts, image_token_id=bundle.image_token_id, per_image=None)
    firsts = [encode(encoder, chat(size)).visual for size in ((16, 16), (64, 16))]
    for name, values in shown.items():
        assert torch.equal(values, torch.cat([visual[name] for visual in firsts])), name
    module = VisionLanguageModule(bundle, RunConfig())
    bundle.model.eval()
    alone = [module.predict(encoder.batch([encode(encoder, chat(size, key="x"))])) for size in ((16, 16), (64, 16))]
    assert [p.generated for p in module.predict(batch)] == [p.generated for (p,) in alone]


def test_videos_of_a_prompt_stay_when_images_behind_it_are_left_out() -> None:
    image, video = 7, 9
    tokens = torch.tensor([[1, video, video, 2, image, 3], [1, image, video, 2, 4, 5]])
    batch: Any = SimpleNamespace(tokens=tokens, num_images=[1, 1], __key__=["a", "b"])
    inputs = {
        "pixel_values": torch.arange(2),
        "image_grid_thw": torch.ones(2, 3, dtype=torch.int64),
        "pixel_values_videos": torch.arange(5),
        "video_grid_thw": torch.ones(2, 3, dtype=torch.int64),
    }
    ids = {"image_token_id": image, "per_image": None, "video_token_id": video}
    shown = visible_images(inputs, batch, tokens[:, :4], **ids)
    assert shown["pixel_values"].tolist() == [1]
    assert len(shown["image_grid_thw"]) == 1
    assert torch.equal(shown["pixel_values_videos"], inputs["pixel_values_videos"])
    assert torch.equal(shown["video_grid_thw"], inputs["video_grid_thw"])
    first: Any = SimpleNamespace(tokens=tokens[:1], num_images=[1], __key__=["a"])
    only = visible_images(inputs, first, tokens[:1, :4], **ids)
    assert sorted(only) == ["pixel_values_videos", "video_grid_thw"]
    with pytest.raises(ConfigurationError, match=r"\['a', 'b'\] have videos behind the first answer"):
        visible_images(inputs, batch, tokens[:, :2], **ids)


# Crude samples -------------------------------------------------------------------------------------------------------

TURNS = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "red"}]


class Store(FileStore):
    """Gives names for images."""

    def get(self, key: str, sample: Any = None) -> Any:
        return f"stored {key}"


def crude(content: Any, **parts: Any) -> dict[str, Any]:
    return {"__key__": "one", "json": content, **parts}


@pytest.mark.parametrize(
    ("sample", "stores", "images"),
    [
        (crude({"messages": TURNS}, **{"10.jpg": "c", "2.PNG": "b", "0.jpg": "a", "txt": "x"}), {}, ["a", "b", "c"]),
        (crude({"conversations": TURNS, "image": "jpg"}, jpg="a", png="b"), {}, ["a"]),
        (crude({"conversations": TURNS, "image": "x/a.jpg"}), {"images": Store()}, ["stored x/a.jpg"]),
        (crude({"conversation": TURNS, "images": ["b", "a"]}), {"images": Store()}, ["stored b", "stored a"]),
        (crude({"messages": TURNS, "images": []}), {"images": Store(), "notes": Store()}, []),
    ],
)
def test_images_of_a_crude_conversation_are_found(sample: dict[str, Any], stores: Any, images: list[str]) -> None:
    cooked = cook_conversation(sample, **stores)
    assert (cooked.__key__, cooked.messages, cooked.images) == ("one", TURNS, images)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (crude({"text": "a"}, jpg="x"), r"part 'json' with turns as messages or .*; this one has the parts json, jpg"),
        (crude({"text": "a", "x": 1}), r"has the parts json, and its json has text, x$"),
        ({"__key__": "one", "txt": "a"}, "has the parts txt"),
        (crude({"messages": TURNS, "image": "a.jpg"}), r"'a\.jpg' is not a part .* auxiliary store 'images'"),
    ],
)
def test_a_crude_sample_that_is_no_conversation_is_refused(sample: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SampleError, match=complaint):
        cook_conversation(sample)


def test_conversations_need_no_template(bundles: dict[str, ModelBundle]) -> None:
    bundle = bundles["tiny-llava"]
    encoder = training_task_encoder(DataConfig(seq_length=128), bundle)
    system = {"role": "system", "content": "Be brief."}
    encoded: Any = encoder.encode_sample(replace(chat((16, 16)), messages=[system, *chat((16, 16)).messages]))
    text = bundle.tokenizer.decode(encoded.tokens)
    shown = "<image>" * 4
    assert text == f"<s>Be brief.\nUSER: {shown} color? ASSISTANT: red"
    assert bundle.tokenizer.decode(encoded.labels[encoded.loss_mask.bool()]) == " red</s>"
    tool = {"role": "tool", "content": "42"}
    with pytest.raises(SampleError, match="a turn of 'tool' needs a chat template"):
        encoder.encode_sample(replace(chat((16, 16)), messages=[tool, *chat((16, 16)).messages]))


def test_captions_need_no_template(bundles: dict[str, ModelBundle]) -> None:
    sample = CaptioningSample(__key__="one", image=Image.new("RGB", (16, 16)), caption="red")
    for bundle in bundles.values():
        encoder = training_task_encoder(DataConfig(seq_length=128), bundle)
        is_chat = isinstance(encoder, ChatTemplateTaskEncoder)
        encoded: Any = encode(encoder, sample) if is_chat else encoder.encode_sample(sample)
        assert encoded.answer == "red"
        assert bundle.tokenizer.decode(encoded.labels[encoded.loss_mask.bool()]) == f"red{bundle.tokenizer.eos_token}"


def test_settings_of_videos_and_sounds_reach_the_encoder(bundles: dict[str, ModelBundle]) -> None:
    config = DataConfig(max_video_tokens=64, max_sound_seconds=30.0, max_num_frames=16)
    made = training_task_encoder(config, bundles["tiny-qwen2-vl"]).config
    assert (made.max_video_tokens, made.max_sound_seconds, made.max_num_frames) == (64, 30.0, 16)
    assert not made.video_sound

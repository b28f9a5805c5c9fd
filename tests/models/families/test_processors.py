"""Every processor of the installed transformers: what an encoder makes of conversations is what the processor makes."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from clips import all_frames, write_video
from paths import REPOSITORY
from PIL import Image
from processors import (
    REPLACING,
    called,
    conversation,
    expands,
    place,
    planned,
    processor_classes,
    template_of,
    tiny_model_config,
    tiny_processor,
)
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.processing_utils import ProcessorMixin

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.conversations.inputs import model_inputs
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, ProcessorFamily
from energon_bridge.models.families.processor_calls import ProcessorCalls
from energon_bridge.models.families.processor_plans import ProcessorPlans
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.training.config_file import load_config

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
SHORT = {
    "AyaVisionProcessor",
    "ChameleonProcessor",
    "Ernie4_5_VLMoeProcessor",
    "Gemma3Processor",
    "Gemma3nProcessor",
    "Idefics3Processor",
    "LlavaNextProcessor",
    "MiniCPMV4_6Processor",
    "MiniCPMV4_7Processor",
    "MllamaProcessor",
    "PaddleOCRVLProcessor",
    "PaliGemmaProcessor",
    "Qwen2AudioProcessor",
    "Qwen3ASRProcessor",
    "Qwen3VLProcessor",
}

OF_TOKENS = {
    *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "video_metadata", "labels"),
    *("cross_attention_mask", "moe_mm_token_type_ids"),
}
"""What has a value for each token, of which a sample ends one before the processor's."""
OF_IMAGES = {"pixel_values", "pixel_attention_mask", "aspect_ratio_ids", "aspect_ratio_mask"}
BY_LONGEST = {
    *("Dots3NoteProcessor", "Gemma3nProcessor", "InklingProcessor", "NemotronH_Omni_Reasoning_V3Processor"),
    *("OmniASRProcessor", "Phi4MultimodalProcessor", "Qwen3ASRProcessor", "Qwen3OmniMoeProcessor"),
}
"""Processors that pad sounds to the longest of a call before they make features, so the last ones of a shorter sound
depend on the others of its batch. An encoder makes them of each sound alone."""
_OWN_WAY = "has a way of its own that no program draws"
CALLED = {
    **dict.fromkeys(
        ("MiniCPMV4_6Processor", "MiniCPMV4_7Processor", "MiniCPMOcrProcessor", "InklingProcessor"), _OWN_WAY
    ),
    "NemotronH_Omni_Reasoning_V3Processor": _OWN_WAY,
    "Inkling2Processor": "it scales by resample=None",
}
"""Processors whose image processor is called, with the reason that is logged."""
ONE_KIND = {"SmolVLMProcessor"}
"""Processors that leave out the images of a call with videos."""


def classes(*, all_of_them: bool = LONG) -> list[str]:
    found = []
    for name in processor_classes():
        try:
            kind = processor_class_from_name(name)
            kind.get_attributes()
        except ImportError:
            continue
        if expands(kind) and (all_of_them or name in SHORT):
            found.append(name)
    return found


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether values are equal, where either may be padded with zeros on any axis but the first."""
    if ours.dtype != theirs.dtype or ours.ndim != theirs.ndim or len(ours) != len(theirs):
        return False
    box = tuple(slice(0, min(sides)) for sides in zip(ours.shape, theirs.shape, strict=True))
    return torch.equal(ours[box], theirs[box]) and all(
        int(values.count_nonzero()) == int(values[box].count_nonzero()) for values in (ours, theirs)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", classes())
def test_native_pixels_are_those_of_the_processor_in_each_type(name: str) -> None:
    try:
        processor = tiny_processor(name)
        config = ChatConfig(chat_template=template_of(processor), seq_length=60_000, pixels="processor")
        called_itself = ChatTemplateTaskEncoder.for_processor(processor, config)
    except (ImportError, ConfigurationError) as error:
        pytest.skip(str(error))
    if "image" not in called_itself.family.counts:
        pytest.skip(f"{name} takes no images")
    assert called_itself.family.path is None
    native = ChatTemplateTaskEncoder.for_processor(processor, replace(config, pixels=None))
    if (reason := CALLED.get(name)) is not None:
        assert reason in native.family.native.reason
        return
    assert native.family.path is not None, native.family.native.reason
    assert processor.image_processor is native.family.image_processor  # the user's is as it was
    kinds = ["image"]
    for dtype in ("float32", "bfloat16", "uint8"):
        try:
            typed = ChatTemplateTaskEncoder.for_processor(
                processor, replace(config, pixels=None, pixels_dtype=cast(Any, dtype))
            )
        except ConfigurationError as error:
            if dtype == "uint8" and re.search("padded with zeros|bytes cannot be", str(error)):
                continue
            raise
        compared = 0
        for number in range(12 if LONG else 3):
            sample, _ = conversation(number, kinds, processor)
            try:
                wanted = called_itself.encode(sample).visual
            except SampleError:  # PerceptionLM's does not stack images of unlike numbers of tiles
                with pytest.raises(SampleError):
                    typed.encode(sample)
                continue
            compared += 1
            made = typed.encode(sample).visual
            if dtype == "uint8":
                norm = {"pixel_norm": typed.family.path.byte_norm}
                made = normalise_on_device({"visual_inputs": made, **norm})["visual_inputs"] if made else made
            assert made.keys() == wanted.keys()
            for key, value in made.items():
                if dtype == "uint8" and value.is_floating_point():
                    theirs = wanted[key]
                    least = (
                        1e-5 if theirs.dtype == torch.float32 else torch.finfo(theirs.dtype).eps
                    )  # Llama 4: bfloat16
                    assert torch.allclose(value, theirs.float(), atol=least, rtol=least), key
                else:
                    assert torch.equal(value, wanted[key].to(value.dtype)), key
                    assert dtype != "bfloat16" or value.dtype != torch.float32 or value.ndim < 2
        assert compared


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REPLACING:
        monkeypatch.delattr(ProcessorMixin, name)
    with pytest.raises(ConfigurationError, match=r"LlavaProcessor: .* need transformers 5\.22 or newer"):
        ChatTemplateTaskEncoder.for_processor(tiny_processor("LlavaProcessor"))


def test_every_processor_stands_in_the_table() -> None:
    page = (REPOSITORY / "docs" / "reference" / "models.md").read_text("utf-8")
    missing = [name for name in classes(all_of_them=True) if f"|{name}|" not in page]
    assert not missing, "run scripts/models.py in an environment with torchvision"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", classes())
def test_an_encoder_makes_what_the_processor_makes(name: str) -> None:
    try:
        processor = tiny_processor(name)
    except ImportError as error:
        pytest.skip(str(error))
    try:
        encoder = ChatTemplateTaskEncoder.for_processor(
            processor, ChatConfig(chat_template=template_of(processor), seq_length=60_000, over_long="raise")
        )
    except ConfigurationError as error:
        pytest.skip(str(error))  # the table of the docs has the reason
    kinds = list(encoder.family.counts)
    compared = 0
    for number in range(24 if LONG else 4):
        sample, text = conversation(number, kinds, processor)
        try:
            theirs = called(processor, [text], [sample])
        except Exception as error:
            # What the processor itself cannot take, for example two videos of different lengths: refused by name.
            if sample.images or sample.videos or sample.audios:
                with pytest.raises(SampleError, match=f"{name} .*{type(error).__name__}"):
                    encoder.encode(sample)
            continue
        compared += 1
        prepared = encoder.preencode_sample(sample)
        encoded = encoder.postencode_sample(prepared)
        tokens = theirs["input_ids"][0]
        assert torch.equal(encoded.tokens, tokens[: len(encoded.tokens)])
        assert [int(t) for t in encoded.labels if t != -100], "nothing learned"
        last = int(encoded.labels[-1])
        assert last == int(tokens[len(encoded.tokens)])
        if "labels" in theirs:  # of a processor that is told what the answer is
            assert torch.equal(torch.where(encoded.loss_mask > 0, encoded.labels, -100), theirs["labels"][0, 1:])
        shown = encoded.visual
        for key, value in shown.items():
            if key == "audio_attention_mask" and key not in theirs:  # Phi 4's, which a call with one sound leaves out
                assert value.all()
                continue
            wanted = theirs[key][:, : len(encoded.tokens)] if key in TOKEN_INPUTS else theirs[key]
            assert same(value, wanted), (key, value.shape, wanted.shape)
        media = {"image", "video", "audio"} & {plan.kind for plan in prepared.plans}
        missing = set(theirs) - set(shown) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        assert not media or missing <= {"video_metadata", "labels"}, missing
    assert compared > (8 if LONG else 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", classes())
def test_a_batch_is_what_the_processor_makes_of_all_its_samples(name: str) -> None:
    try:
        processor = tiny_processor(name)
        config = ChatConfig(chat_template=template_of(processor), seq_length=60_000, over_long="raise")
        encoder = ChatTemplateTaskEncoder.for_processor(processor, config)
    except (ImportError, ConfigurationError) as error:
        pytest.skip(str(error))
    known = list(filter(partial(takes, processor), conversations(encoder, processor, 24 if LONG else 9)))
    compared = 0
    for first in range(0, len(known) - 2, 3):
        talks = with_equal_sounds(known[first : first + 3]) if name in BY_LONGEST else known[first : first + 3]
        try:
            theirs = called(processor, [text for _, text in talks], [sample for sample, _ in talks])
        except Exception:  # videos of different lengths, say, which it takes alone only
            continue
        compared += 1
        samples = [encoder.encode(sample) for sample, _ in talks]
        ours = model_inputs(encoder.batch(samples), labels=False)
        shown = {key: value for key, value in theirs.items() if key not in OF_TOKENS}
        assert shown.keys() <= ours.keys(), shown.keys() - ours.keys()
        for key in theirs.keys() & (OF_TOKENS & ours.keys()):
            for row, sample in enumerate(samples):
                count = len(sample.tokens)
                assert same(ours[key][row : row + 1, :count], theirs[key][row : row + 1, :count]), (key, row)
        for key, value in shown.items():
            # Of a sample without images, some have a row of zeros, which their models leave out.
            rows = value.flatten(1).any(dim=1) if key in OF_IMAGES and len(value) > len(ours[key]) else slice(None)
            assert same(ours[key], value[rows]), (key, ours[key].shape, value.shape)
    assert compared


def conversations(encoder: ChatTemplateTaskEncoder, processor: Any, count: int) -> list[tuple[ChatSample, str]]:
    """Return random conversations, those with the same kinds and numbers of media side by side."""
    kinds = list(encoder.family.counts)
    talks = [conversation(number, kinds, processor) for number in range(count)]
    if type(processor).__name__ in ONE_KIND:
        talks = [talk for talk in talks if not talk[0].videos]
    return sorted(
        talks, key=lambda talk: [len(media or ()) for media in (talk[0].videos, talk[0].audios, talk[0].images)]
    )


def takes(processor: Any, talk: tuple[ChatSample, str]) -> bool:
    try:
        called(processor, [talk[1]], [talk[0]])
    except Exception:
        return False
    return True


def with_equal_sounds(talks: list[tuple[ChatSample, str]]) -> list[tuple[ChatSample, str]]:
    """Return conversations with their sounds cut to the shortest of them."""
    least = min((len(sound) for sample, _ in talks for sound, _ in sample.audios or ()), default=0)
    return [
        (replace(sample, audios=[(sound[:least], rate) for sound, rate in sample.audios or ()] or None), text)
        for sample, text in talks
    ]


@pytest.mark.parametrize("model_type", ["gemma3", "paddleocr_vl", "qwen2_audio"])
def test_an_encoder_travels_to_its_workers(model_type: str) -> None:
    processor = tiny_processor(
        {"gemma3": "Gemma3Processor", "paddleocr_vl": "PaddleOCRVLProcessor"}.get(model_type, "Qwen2AudioProcessor")
    )
    config = ChatConfig(chat_template=template_of(processor), seq_length=60_000)
    model_config = tiny_model_config(model_type, processor)
    encoder = ChatTemplateTaskEncoder.for_processor(processor, config, model_config=model_config)
    sample, _ = conversation(1, list(encoder.family.counts), processor)
    there, here = pickle.loads(pickle.dumps(encoder)).encode(sample), encoder.encode(sample)
    assert torch.equal(there.tokens, here.tokens)
    assert {name: value.tolist() for name, value in there.visual.items()} == {
        name: value.tolist() for name, value in here.visual.items()
    }
    if model_type == "paddleocr_vl":
        assert torch.equal(there.mrope_position_ids, here.mrope_position_ids)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "most"), [("Qwen2AudioProcessor", 30.0), ("Gemma3nProcessor", 30.0), ("Qwen3ASRProcessor", None)]
)
def test_a_sound_that_its_processor_cuts_off_is_refused(
    name: str, most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = tiny_processor(name)
    chat = ChatConfig(chat_template=template_of(processor), seq_length=60_000, over_long="raise")
    with planned():
        encoder = ChatTemplateTaskEncoder.for_processor(processor, chat)
    rate = encoder.family.sampling_rate
    noise = np.random.default_rng(3).standard_normal(45 * rate).astype(np.float32) / 10
    turns = [{"role": "user", "content": "<audio> what?"}, {"role": "assistant", "content": "A thing."}]

    def heard(seconds: float, encoder: ChatTemplateTaskEncoder = encoder) -> dict[str, Tensor]:
        sample = ChatSample(__key__="a", messages=turns, audios=[(noise[: int(seconds * rate)], rate)])
        return encoder.encode(sample).visual

    if most is None:
        assert not torch.equal(*(next(iter(heard(seconds).values()))[..., -1] for seconds in (45, 44)))
        return
    heard(most)
    for seconds in (most + 0.2, most + 1, 45):
        with pytest.raises(SampleError, match=f"{name} leaves out the end of a sound of {seconds:.1f} s"):
            heard(seconds)
    with monkeypatch.context() as patched:
        patched.setattr("energon_bridge.core.errors._CALLED", {})
        with pytest.raises(SampleError, match=r"max_sound_seconds of the ChatConfig, or leave"):
            heard(45)
        load_config(None)  # what the training script calls it
        with pytest.raises(SampleError, match=r"of the ChatConfig \(data\.max_sound_seconds\), or leave"):
            heard(45)
    cutting = ChatTemplateTaskEncoder.for_processor(processor, replace(chat, max_sound_seconds=most))
    for key, value in heard(45, cutting).items():
        assert torch.equal(value, heard(most)[key]), key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["Gemma3nProcessor", "GlmAsrProcessor", "MusicFlamingoProcessor", "Qwen2AudioProcessor"]
)
def test_a_sound_too_short_for_a_token_is_left_out_by_name(name: str) -> None:
    """The processor itself writes nothing for it, or only what goes around a sound. Longer ones are heard after it."""
    processor = tiny_processor(name)
    with planned():
        encoder = ChatTemplateTaskEncoder.for_processor(processor, ChatConfig(chat_template=template_of(processor)))
    rate, token = encoder.family.sampling_rate, processor.tokenizer.convert_tokens_to_ids(processor.audio_token)
    turns = [{"role": "user", "content": "<audio> what?"}, {"role": "assistant", "content": "A thing."}]
    for milliseconds in (1, 20, 25, 40, 60, 100, 500):
        sound = np.random.default_rng(3).standard_normal(rate * milliseconds // 1000).astype(np.float32) / 10
        sample = ChatSample(__key__="a", messages=turns, audios=[(sound, rate)])
        try:
            written = called(processor, [place(processor, "audio")], [sample])["input_ids"]
            count = int((written == token).sum())
        except Exception:  # it takes none so short
            count = 0
        if (
            name == "Gemma3nProcessor" and milliseconds < 32
        ):  # it writes as many tokens for any length, but hears nothing
            count = 0
        if count:
            assert int((encoder.encode(sample).tokens == token).sum()) == count, milliseconds
        else:
            with pytest.raises(
                SampleError, match=f"sound of {milliseconds} ms is too short for {name}|{name} cannot take"
            ):
                encoder.encode(sample)
        assert count or milliseconds < 100
        assert milliseconds > 20 or not count


@pytest.mark.parametrize("name", ["Gemma3Processor", "LlavaNextProcessor"])
def test_what_is_planned_is_not_tokenised_again_and_anything_else_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = tiny_processor(name)
    config = ChatConfig(chat_template=template_of(processor), seq_length=60_000)
    encoder = ChatTemplateTaskEncoder.for_processor(processor, config)
    sample, text = conversation(1, ["image"], processor)
    prepared = encoder.preencode_sample(sample)
    wanted = called(processor, [text], [sample])
    asked: list[str] = []
    original = PreTrainedTokenizerFast.__call__

    def count(self: PreTrainedTokenizerFast, texts: list[str], **options: object) -> object:
        asked.extend(texts)
        return original(self, texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", count)
    for checks in (True, False):  # arguments that were checked once are not checked again
        with monkeypatch.context() as context:
            if not checks:
                context.setattr(type(processor), "_merge_kwargs", None)
            made = encoder.postencode_sample(prepared).visual["pixel_values"]
        assert torch.equal(made, wanted["pixel_values"])
    assert not asked
    # A processor that writes something else than it did when the encoder was made:
    written = type(processor).replace_image_token
    monkeypatch.setattr(type(processor), "replace_image_token", lambda *a, **k: "a " + written(*a, **k))
    with pytest.raises(SampleError, match=rf"{name} makes other tokens of the sample than were planned"):
        encoder.postencode_sample(prepared)
    assert asked


def test_a_size_that_is_known_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = tiny_processor("Idefics3Processor")
    with planned():
        encoder = ChatTemplateTaskEncoder.for_processor(processor, ChatConfig(chat_template=template_of(processor)))
    plan = encoder.family.plan_image(501, 333)
    made = processor(text=["<image>"], images=[[Image.new("RGB", (501, 333))]])["input_ids"][0]
    assert plan.tokens == made.count(processor.image_token_id)
    monkeypatch.setattr(type(processor.image_processor), "get_number_of_image_patches", None)
    assert encoder.family.plan_image(501, 333) == plan


def test_arguments_of_the_processor_are_in_the_plans() -> None:
    """Its own counts do not know them."""
    processor = tiny_processor("PaddleOCRVLProcessor")
    small = {"images_kwargs": {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}}
    families = [ProcessorFamily(processor=processor, options=options) for options in ({}, small)]
    whole, less = (family.plan_image(640, 480).tokens for family in families)
    made = processor(text=[processor.image_token], images=[Image.new("RGB", (640, 480))], **small)["input_ids"][0]
    assert less == made.count(processor.image_token_id) < whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Qwen3VLProcessor", "Qwen2_5_VLProcessor"])
def test_frames_of_a_variable_rate_have_the_times_at_which_they_are_shown(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    path = write_video(tmp_path / "a.mp4", frames=120, varying=True, size=(64, 48))
    shown = [float(frame.seconds) for frame in all_frames(path)]
    processor = tiny_processor(name)
    config = ChatConfig(chat_template=template_of(processor), seq_length=60_000, min_num_frames=8, max_num_frames=8)
    encoder = ChatTemplateTaskEncoder.for_processor(processor, config)
    turns = [{"role": "user", "content": "<video> what?"}, {"role": "assistant", "content": "Colours."}]
    encoded = encoder.encode(ChatSample(__key__="a", messages=turns, videos=[AVDecoder.open(path)]))
    times = [shown[number] - shown[0] for number in np.linspace(0, 119, 8).round().astype(int)]
    if name == "Qwen2_5_VLProcessor":  # it is told one rate
        wanted = 2 * (shown[-1] - shown[0]) * 120 / 119 / 8
        assert encoded.visual["second_per_grid_ts"].tolist() == [pytest.approx(wanted, rel=1e-3)]
        return
    middles = [f"{(first + last) / 2:.1f}" for first, last in list(pairwise(times))[::2]]
    even = [f"{(first + 17 / 2) / 119 * times[-1]:.1f}" for first in range(0, 119, 34)]
    assert re.findall(r"<([\d.]+) seconds>", processor.tokenizer.decode(encoded.tokens)) == middles != even


def test_images_whose_tokens_depend_on_what_they_show_are_refused_by_name() -> None:
    with planned():
        processor = tiny_processor("MiniCPMV4_6Processor")
    processor.image_processor.small_image_upsize = "adaptive"
    plans = ProcessorPlans(calls=ProcessorCalls.of(processor, {}))
    plans.learn("image")
    assert "depends on what it shows: set small_image_upsize" in plans.refused["image"]

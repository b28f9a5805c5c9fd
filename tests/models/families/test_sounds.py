"""Sounds of a conversation: their places, the forms in which samples have them, and who refuses them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from multimodal import CharacterTokenizer

from energon_bridge.core.errors import SampleError
from energon_bridge.core.samples import CrudeSample
from energon_bridge.models.conversations.conversation import (
    ChatSample,
    Conversation,
    Part,
    Turn,
    in_parts,
    read_conversation,
)
from energon_bridge.models.conversations.layout import MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.conversations.sample_encoders import SAMPLE_ENCODERS, read_sample

ONE, TWO = np.zeros(8, np.float32), np.ones(8, np.float32)
SAID = {"role": "assistant", "content": "ok"}


def chat(*parts: Any, answer: str = "ok", **media: Any) -> ChatSample:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return ChatSample(__key__="s", messages=turns, **media)


def kinds(content: Conversation) -> list[str]:
    return [part.kind for part in content.turns[0].parts]


TEXT, PLACE = {"type": "text", "text": "What?"}, {"type": "audio"}


@pytest.mark.parametrize(
    ("sample", "places", "sounds"),
    [
        (chat("<audio>What?", audios=[ONE]), ["audio", "text"], [ONE]),
        (chat("<audio>\nand\n<audio>", audios=(ONE, TWO)), ["audio", "text", "audio"], [ONE, TWO]),
        (chat("What?", audios=ONE), ["audio", "text"], [ONE]),
        (chat("What?", audios=(ONE, 16000)), ["audio", "text"], [(ONE, 16000)]),
        (chat("What?", audios=[(ONE, 16000), (TWO, 8000)]), ["audio", "audio", "text"], [(ONE, 16000), (TWO, 8000)]),
        (chat(PLACE, TEXT, audios=[ONE]), ["audio", "text"], [ONE]),
        (chat({"type": "input_audio"}, {"type": "audio_url"}, audios=[ONE, TWO]), ["audio", "audio"], [ONE, TWO]),
        (chat({"type": "audio", "audio": ONE}, PLACE, audios=[TWO]), ["audio", "audio"], [ONE, TWO]),
    ],
)
def test_sounds_come_in_the_order_of_their_places(sample: ChatSample, places: list[str], sounds: list[Any]) -> None:
    content = read_conversation(sample)
    assert kinds(content) == places
    assert len(content.audios) == len(sounds)
    for one, expected in zip(content.audios, sounds, strict=True):
        assert type(one) is type(expected)
        assert one is expected or (one[0] is expected[0] and one[1] == expected[1])
    assert not content.images
    assert not content.videos


def test_sounds_inside_parts_are_taken_from_base64() -> None:
    wav = b"RIFF and so on"
    data = base64.b64encode(wav).decode()
    pair = {"array": ONE, "sampling_rate": 16000}
    parts: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio", "audio": pair},
        {"type": "audio", "audio": {"bytes": wav, "path": None}},
    ]
    assert list(read_conversation(chat(*parts)).audios) == [wav, pair, wav]
    damaged = {"type": "input_audio", "input_audio": {"data": data[1:], "format": "wav"}}
    with pytest.raises(SampleError, match="a sound whose base64 is damaged"):
        read_conversation(chat(damaged))


def test_a_crude_sample_hears_its_own_sound_files_but_not_its_videos() -> None:
    names = ["10.flac", "2.wav", "3.mp3", "4.m4a", "5.ogg", "6.opus", "audios.0.mp4"]
    parts = {name: name.encode() for name in [*names, "film.mp4"]}
    sample = CrudeSample(__key__="s", json={"messages": [{"role": "user", "content": "What?"}, SAID]}, **parts)
    content = read_conversation(sample)
    assert list(content.audios) == [name.encode() for name in [*names[1:6], names[0], names[6]]]
    assert list(content.videos) == [b"film.mp4"]
    assert kinds(content) == ["audio"] * 7 + ["video", "text"]
    for name in ("audios", "audio", "sounds"):
        beside = CrudeSample(**{"__key__": "s", "json": sample["json"], "9.wav": b"", name: [ONE]})
        assert read_conversation(beside).audios == (ONE,)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (chat("<audio>What?"), "the text has 1 audio placeholders '<audio>' but the sample has 0 audios"),
        (chat("<audio>What?", audios=[ONE, TWO]), "the text has 1 audio placeholders '<audio>' but .* 2 audios"),
        (chat({"type": "audio", "audio": "a.wav"}, TEXT), "1 audio placeholders '<audio>' but the sample has 0 audios"),
        (chat("What?", audios=[ONE], answer="<audio>"), "an answer contains the placeholder '<audio>'"),
        (chat({"type": "text", "text": "<audio>"}, audios=[ONE]), "a text part contains the placeholder '<audio>'"),
        (chat({"type": "sound"}), "must have the type text, image, video or audio, got"),
    ],
)
def test_other_numbers_of_places_than_sounds_are_refused(sample: ChatSample, complaint: str) -> None:
    with pytest.raises(SampleError, match=complaint):
        read_conversation(sample)


def test_the_place_of_a_sound_in_an_answer_is_text() -> None:
    content = read_conversation(chat("<audio>What?", audios=[ONE], answer="I write <audio> for a sound."))
    assert content.turns[1].parts == (Part("text", "I write <audio> for a sound."),)
    assert len(content.audios) == 1


def test_conversations_written_as_texts_are_split_at_their_sounds() -> None:
    turns = (Turn("user", "<audio>What?"), Turn("assistant", "ok"))
    assert kinds(in_parts(Conversation(turns=turns, audios=[ONE]))) == ["audio", "text"]
    with pytest.raises(SampleError, match="1 audio placeholders '<audio>' but the sample has 2 audios"):
        in_parts(Conversation(turns=turns, audios=[ONE, TWO]))


def test_encoders_without_sound_refuse_it() -> None:
    spoken = chat("<audio>What?", audios=[ONE])
    with pytest.raises(SampleError, match="the sample has sound, but the model of this task encoder takes none"):
        read_sample(spoken, SAMPLE_ENCODERS, MultiModalSampleConfig())
    content = read_sample(spoken, SAMPLE_ENCODERS, MultiModalSampleConfig(), takes_sound=True)
    assert isinstance(content, Conversation)
    assert len(content.audios) == 1
    encoder = MultiModalTaskEncoder(CharacterTokenizer(), lambda image: image)
    with pytest.raises(SampleError, match="has sound, but the model of this task encoder takes none"):
        encoder.encode_sample(spoken)

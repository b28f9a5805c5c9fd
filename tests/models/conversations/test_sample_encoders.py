"""Each type of sample: what of it is shown, what is learned, where its images stand, and one's own encoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from multimodal import IMAGE, CharacterTokenizer, caption, encoder, picture

from energon_bridge.core.errors import SampleError
from energon_bridge.core.samples import (
    CaptioningSample,
    CrudeSample,
    ImageClassificationSample,
    InterleavedSample,
    MultiChoiceVQASample,
    OCRSample,
    Sample,
    SimilarityInterleavedSample,
    TextSample,
    VQAOCRSample,
    VQASample,
    edataclass,
)
from energon_bridge.models.conversations.conversation import Conversation, Document, Piece, Turn
from energon_bridge.models.conversations.layout import ConversationTemplateConfig, ImageToken, MultiModalSampleConfig


def build(**config: Any) -> Any:
    settings = MultiModalSampleConfig(image_token=ImageToken(token_id=IMAGE), **config)
    task_encoder = encoder(1000, config=settings)
    task_encoder.tokenizer = CharacterTokenizer()
    return task_encoder


def text_of(task_encoder: Any, sample: Any) -> str:
    """The whole sequence, with what is learned in brackets."""
    decode = task_encoder.tokenizer.decode
    encoded = task_encoder.encode_sample(sample)
    out = decode(encoded.tokens[:1])
    inside = False
    follows = [*encoded.tokens[1:].tolist(), int(encoded.labels[-1])]
    for token, learned in zip(follows, encoded.loss_mask.bool().tolist(), strict=True):
        if learned != inside:
            out += "[" if learned else "]"
            inside = learned
        out += decode([token]) if token != -100 else ""
    return out + ("]" if inside else "")


def colours(task_encoder: Any, sample: Any) -> list[int]:
    """The images of an encoded sample, in order."""
    pixels = task_encoder.encode_sample(sample).visual["pixel_values"]
    return [round(value) for value in pixels[:, 0, 0, 0].mul(255).tolist()]


VALUES: dict[str, Any] = {"__key__": "k"}


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (CaptioningSample(**VALUES, image=picture(), caption="a cat"), "<s><image>[a cat</s>]"),
        (CaptioningSample(**VALUES, image=[picture(), picture()], caption="x"), "<s><image><image>[x</s>]"),
        (ImageClassificationSample(**VALUES, image=picture(), label=3, label_name="cat"), "<s><image>[cat</s>]"),
        (ImageClassificationSample(**VALUES, image=picture(), label=3), "<s><image>[3</s>]"),
        (OCRSample(**VALUES, image=picture(), text="EXIT"), "<s><image>[EXIT</s>]"),
        (TextSample(**VALUES, text="once upon"), "<s>[once upon</s>]"),
        (
            VQASample(**VALUES, image=picture(), context="what", answers=["a", "b"]),
            "<s>USER: what\n<image> ASSISTANT:[ a</s>]",
        ),
        (VQASample(**VALUES, image=None, context="2+2", answers=["4"]), "<s>USER: 2+2 ASSISTANT:[ 4</s>]"),
        (VQASample(**VALUES, image=None, context="2+2", answers=["", "", "4"]), "<s>USER: 2+2 ASSISTANT:[ 4</s>]"),
        (
            VQASample(**VALUES, image=picture(), context=["what", "sure?"], answers=["a", "b"]),  # type: ignore[arg-type]
            "<s>USER: what\n<image> ASSISTANT:[ a</s>]USER: sure? ASSISTANT:[ b</s>]",
        ),
        (
            VQASample(**VALUES, image=[picture()], context=["hi", "<image>?"], answers=["a", "b"]),  # type: ignore[arg-type]
            "<s>USER: hi ASSISTANT:[ a</s>]USER: <image>? ASSISTANT:[ b</s>]",
        ),
        (
            VQAOCRSample(**VALUES, image=picture(), context="read", text="EXIT", answers=["exit"]),
            "<s>USER: read\n<image> ASSISTANT:[ exit</s>]",
        ),
        (
            MultiChoiceVQASample(**VALUES, image=picture(), context="q", choices=["x", "y"], correct_choice_idx=1),
            "<s>USER: q\nA. x\nB. y\n<image> ASSISTANT:[ B. y</s>]",
        ),
        (
            InterleavedSample(**VALUES, sequence=["one", picture(), picture(), "two", "three", picture()]),
            "<s>[one]<image><image>[twothree]<image>[</s>]",
        ),
        (InterleavedSample(**VALUES, sequence=[picture(), "one"]), "<s><image>[one</s>]"),
    ],
)
def test_what_is_shown_and_what_is_learned(sample: Any, expected: str) -> None:
    assert text_of(build(), sample) == expected


def test_the_stop_string_ends_what_is_learned() -> None:
    task_encoder = build(conversation_template_config=ConversationTemplateConfig(stop_string="#"))
    assert text_of(task_encoder, TextSample(__key__="k", text="x")) == "<s>[x#]"
    assert text_of(task_encoder, InterleavedSample(__key__="k", sequence=["x", picture()])) == "<s>[x]<image>[#]"


@pytest.mark.parametrize(("follows", "expected"), [(True, "q\n<image>\n<image>"), (False, "<image>\n<image>\nq")])
def test_images_stand_behind_or_before_a_question_without_placeholder(follows: bool, expected: str) -> None:
    sample = VQASample(__key__="k", image=[picture(), picture()], context="q", answers=["a"])
    assert text_of(build(image_following_text=follows), sample) == f"<s>USER: {expected} ASSISTANT:[ a</s>]"


def similarity(**values: Any) -> SimilarityInterleavedSample:
    return SimilarityInterleavedSample(
        __key__="k", images=[picture(10), picture(20), picture(30)], texts=["a", "b"], **values
    )


MATCHES = [
    {"matched_text_indices": [1, 0, 1]},
    {"similarity_matrix": torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.0, 0.2]])},
]


@pytest.mark.parametrize("values", MATCHES)
@pytest.mark.parametrize(
    ("follows", "expected"),
    [(True, "<s>[a]<image>[b]<image><image>[</s>]"), (False, "<s><image>[a]<image><image>[b</s>]")],
)
def test_images_stand_at_the_texts_they_match(values: dict[str, Any], follows: bool, expected: str) -> None:
    task_encoder = build(image_following_text=follows)
    assert text_of(task_encoder, similarity(**values)) == expected
    assert colours(task_encoder, similarity(**values)) == [20, 10, 30]


def test_images_keep_their_order() -> None:
    sample = InterleavedSample(__key__="k", sequence=[picture(30), "x", picture(10), "y", picture(20), "z"])
    assert colours(build(), sample) == [30, 10, 20]


@pytest.mark.parametrize("stack", [torch.stack, np.stack, list, tuple])
def test_several_images_come_as_a_list_or_as_one_array(stack: Any) -> None:
    images = [np.full((4, 4, 3), value, dtype=np.uint8) for value in (10, 20)]
    given = stack([torch.from_numpy(i).permute(2, 0, 1) for i in images] if stack is torch.stack else images)
    assert colours(build(), VQASample(__key__="k", image=given, context="q", answers=["a"])) == [10, 20]


@pytest.mark.parametrize("kind", [VQASample, MultiChoiceVQASample])
def test_images_stand_at_the_numbers_of_a_question(kind: Any) -> None:
    images = [np.full((4, 4, 3), value, dtype=np.uint8) for value in (10, 20)]
    said = {"choices": ["a", "b"], "correct_choice_idx": 0} if kind is MultiChoiceVQASample else {"answers": ["a"]}
    for question, expected in (("<image 2> or <image 1>?", [20, 10]), ("<ImageHere> or <ImageHere>?", [10, 20])):
        assert colours(build(), kind(__key__="k", image=images, context=question, **said)) == expected
    with pytest.raises(SampleError, match="'<my_image>', which looks like a place"):
        colours(build(), kind(__key__="k", image=images, context="<my_image> or <my_image>?", **said))
    with pytest.raises(SampleError, match=r"1 image places \(<image 1>\) but the sample has 2 images"):
        colours(build(), kind(__key__="k", image=images, context="<image 1>?", **said))


def multiple_choice(choices: Any, right: Any) -> MultiChoiceVQASample:
    return MultiChoiceVQASample(**VALUES, image=picture(), context="q", choices=choices, correct_choice_idx=right)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (
            MultiChoiceVQASample(**VALUES, image=picture(), context="q", correct_choice_idx=0),
            "correct_choice_idx=0 of 0 choices",
        ),
        (
            MultiChoiceVQASample(**VALUES, image=picture(), context="q", choices=["x", "y"]),
            "does not say which choice is right",
        ),
        (
            MultiChoiceVQASample(**VALUES, image=picture(), context="q", choices=["x"], correct_choice_idx=1),
            "correct_choice_idx=1 of 1 choices",
        ),
        (
            multiple_choice(["x", "y"], "1"),
            "correct_choice_idx='1': give the number of the right choice, counted from 0",
        ),
        (multiple_choice("x, y", 0), "choices='x, y': a question needs a list of its choices"),
        (multiple_choice({"A": "x", "B": "y"}, 0), "a question needs a list of its choices"),
        (similarity(), "needs matched_text_indices or a similarity_matrix"),
        (similarity(matched_text_indices=[0, 1]), "3 images match texts"),
        (similarity(matched_text_indices=[0, 1, 2]), "there are 2 texts"),
        (similarity(similarity_matrix=torch.zeros(3, 0)), "3 images match texts"),
        (InterleavedSample(**VALUES, sequence=[picture()]), "no text to learn"),
        (ImageClassificationSample(**VALUES, image=picture()), "needs a label_name or a label"),
        (InterleavedSample(**VALUES, sequence=["an <image>"]), "contains the image placeholder"),
        (TextSample(**VALUES, text="an <image>"), "contains the image placeholder"),
        (VQASample(**VALUES, image=picture(), context="q"), "a VQASample needs answers"),
        (VQAOCRSample(**VALUES, image=picture(), context="q", text="t"), "a VQAOCRSample needs answers"),
    ],
)
def test_samples_that_cannot_be_learned_are_refused_by_name(sample: Any, complaint: str) -> None:
    with pytest.raises(SampleError, match=f"sample 'k': .*{complaint}"):
        build().encode_sample(sample)


@edataclass
class Song(Sample):
    title: str
    lines: list[str]


@edataclass
class Hymn(Song):
    pass


def sing(song: Song, config: MultiModalSampleConfig) -> Conversation:
    turns = [Turn("user", song.title)]
    for line in song.lines:
        turns += [Turn("assistant", line), Turn("user", "go on")]
    return Conversation(turns=turns)


@pytest.mark.parametrize("kind", [Song, Hymn])
def test_types_of_ones_own_are_registered(kind: type[Song]) -> None:
    task_encoder = build()
    task_encoder.register_encoder(Song, sing)
    expected = "<s>USER: t ASSISTANT:[ la</s>]USER: go on ASSISTANT:[ lo</s>]"
    assert text_of(task_encoder, kind(__key__="k", title="t", lines=["la", "lo"])) == expected
    assert task_encoder.encode_sample(kind(__key__="k", title="t", lines=["la", "lo"])).answer == "la"


def test_crude_samples_can_be_registered_too() -> None:
    def read(sample: CrudeSample, config: MultiModalSampleConfig) -> Document:
        return Document(pieces=[Piece(sample["txt"], learned=True)])

    task_encoder = build()
    task_encoder.register_encoder(CrudeSample, read)
    crude = CrudeSample({"__key__": "k", "txt": "abc"})
    assert text_of(task_encoder, crude) == "<s>[abc</s>]"
    assert task_encoder.encode_sample(crude).__key__ == "k"
    with pytest.raises(SampleError, match=r"sample 'k': .*contains the image placeholder"):
        task_encoder.encode_sample(CrudeSample({"__key__": "k", "txt": "<image>"}))


def test_a_registered_encoder_takes_the_place_of_the_ready_made_one_in_its_encoder_only() -> None:
    def backwards(sample: CaptioningSample, config: MultiModalSampleConfig) -> Document:
        shown = Piece(config.image_token.token_str)
        return Document(pieces=[shown, Piece(sample.caption[::-1], learned=True)], images=[sample.image])

    changed, plain = build(), build()
    changed.register_encoder(CaptioningSample, backwards)
    assert text_of(changed, caption("abc")) == "<s><image>[cba</s>]"
    assert text_of(plain, caption("abc")) == "<s><image>[abc</s>]"


def test_rows_with_and_without_images_share_a_batch() -> None:
    task_encoder = build()
    samples = [TextSample(__key__="t", text="abc"), caption("x", "c", 40), TextSample(__key__="u", text="d")]
    batch = task_encoder.batch([task_encoder.encode_sample(sample) for sample in samples])
    assert batch.num_images == [0, 1, 0]
    assert batch.pixel_values.shape == (1, 3, 4, 4)
    assert batch.answers == ["abc", "x", "d"]
    text_only = task_encoder.batch([task_encoder.encode_sample(samples[0])])
    assert (text_only.pixel_values, text_only.visual_inputs) == (None, {})

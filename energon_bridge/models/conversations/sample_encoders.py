"""What each type of sample has to say: conversations and documents with their images, before any tokenizer.

A sample encoder is a function of a sample and the configuration. `MultiModalTaskEncoder.register_encoder` puts one's
own in place of these, or adds types:

    CaptioningSample             the image is shown, the caption learned
    ImageClassificationSample    the image is shown, the name of its class learned (or its number, if it has no name)
    VQASample, VQAOCRSample      the question is shown with its images, the answer of most weight learned, or of most
                                 annotators; where the question is a list, so are the answers: a conversation of several
                                 turns
    MultiChoiceVQASample         the question and its lettered choices are shown, the right one is learned
    OCRSample                    the image is shown, its text learned
    InterleavedSample            every text is learned, the images stand where they are
    SimilarityInterleavedSample  every text is learned, each image stands at the text that it matches
    TextSample                   the text is learned
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, Literal

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.samples import (
    CaptioningSample,
    ImageClassificationSample,
    InterleavedSample,
    MultiChoiceVQASample,
    OCRSample,
    SimilarityInterleavedSample,
    TextSample,
    VidQASample,
    VQAOCRSample,
    VQASample,
)
from energon_bridge.models.conversations.conversation import (
    AUDIO,
    ChatSample,
    Conversation,
    Document,
    Piece,
    Turn,
    list_images,
    name_control_tokens,
    name_empty_answers,
    read_conversation,
    turn_holder,
)
from energon_bridge.models.conversations.layout import MultiModalSampleConfig, place_images
from energon_bridge.models.conversations.places import looks_placed, unwrapped
from energon_bridge.models.conversations.questions import first_answer

SampleEncoder = Callable[[Any, MultiModalSampleConfig], Conversation | Document | ChatSample]


def read_sample(
    sample: Any,
    encoders: Mapping[type, SampleEncoder],
    config: MultiModalSampleConfig,
    *,
    place_images: Literal["before", "after"] = "before",
    takes_sound: bool = False,
    control_tokens: re.Pattern[str] | None = None,
) -> Conversation | Document:
    """Return the conversation or document of a sample: by the encoder of its type, else by its turns.

    Args:
        sample: Of a type that has an encoder, or with turns.
        encoders: Encoders by type; they hold for subtypes, too.
        config: For the encoders.
        place_images: Where images without a placeholder go in turns, seen from the text of the first question.
        takes_sound: Whether the model hears; otherwise a sample with sound is refused, since it would be left out.
        control_tokens: Finds those of the tokenizer; a text with one is warned of.

    Raises:
        SampleError: The sample cannot be learned.
        ConfigurationError: It has neither an encoder nor turns.
    """
    kind = next(filter(encoders.__contains__, type(sample).__mro__), None)
    content = sample if kind is None else encoders[kind](sample, config)
    if not isinstance(content, Conversation | Document):
        content = _with_turns(content, encoders, place_images)
    if not takes_sound and _has_sound(content):
        raise SampleError("the sample has sound, but the model of this task encoder takes none")
    if isinstance(content, Document) and not any(piece.learned and piece.text.strip() for piece in content.pieces):
        raise SampleError("the sample has no text to learn")
    if isinstance(content, Conversation):
        name_empty_answers(content)
    if control_tokens is not None:
        name_control_tokens(content, control_tokens, sample_key(sample))
    return content


def _has_sound(content: Conversation | Document) -> bool:
    if isinstance(content, Document):
        return any(AUDIO in piece.text for piece in content.pieces if not piece.learned)
    return bool(content.audios)


def _with_turns(
    content: Any, encoders: Mapping[type, SampleEncoder], place_images: Literal["before", "after"]
) -> Conversation:
    holder = turn_holder(content)
    if holder is None:
        known = ", ".join(sorted(kind.__name__ for kind in encoders))
        raise ConfigurationError(
            f"the task encoder takes samples with messages or conversations, and encodes {known}, not "
            f"{type(content).__name__} (sample {sample_key(content)!r}): set sample_type in dataset.yaml, cook the "
            "sample to a ChatSample, call register_encoder, or pass your own task_encoder"
        )
    return read_conversation(content, holder, place_images=place_images)


def sample_key(sample: Any) -> Any:
    """Return the key of a sample, typed or crude, if it has one."""
    return sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", None)


def encode_captioning(sample: CaptioningSample, config: MultiModalSampleConfig) -> Document:
    """Show the image, learn the caption."""
    return _image_then_text(sample.image, sample.caption, config)


def encode_classification(sample: ImageClassificationSample, config: MultiModalSampleConfig) -> Document:
    """Show the image, learn the name of its class.

    Raises:
        SampleError: It has neither a name nor a number.
    """
    if sample.label_name is None and sample.label is None:
        raise SampleError("an ImageClassificationSample needs a label_name or a label to learn")
    name = str(sample.label) if sample.label_name is None else sample.label_name
    return _image_then_text(sample.image, name, config)


def encode_ocr(sample: OCRSample, config: MultiModalSampleConfig) -> Document:
    """Show the image, learn the text on it."""
    return _image_then_text(sample.image, sample.text, config)


def encode_vqa(sample: VQASample | VQAOCRSample, config: MultiModalSampleConfig) -> Conversation | ChatSample:
    """Show each question, learn its answer.

    Raises:
        SampleError: There is no answer, or not one for each question.
    """
    images = list_images(sample.image)
    context: Any = sample.context
    if images and isinstance(context, str):
        context = unwrapped(context)
    answers: Any = sample.answers
    if isinstance(context, str) and _is_respelled(context, images, config):
        return _as_chat(sample, context, _best_answer(sample), images)
    if isinstance(context, str):
        return Conversation(turns=_placed([(context, _best_answer(sample))], images, config), images=images)
    if isinstance(answers, str) or len(context) != len(answers or ()):
        raise SampleError(f"{len(context)} questions need a list of as many answers, got {answers!r}")
    return Conversation(turns=_placed(list(zip(context, answers, strict=True)), images, config), images=images)


def encode_multiple_choice(sample: MultiChoiceVQASample, config: MultiModalSampleConfig) -> Conversation | ChatSample:
    """Show the question with its choices on lines of their own, learn the right one.

    Raises:
        SampleError: There is no list of choices, or one of more than letters, or no right one among them.
    """
    choices: Any = sample.choices or []  # a field map may give anything
    right: Any = sample.correct_choice_idx
    if isinstance(choices, str | Mapping):
        raise SampleError(f"choices={choices!r:.80}: a question needs a list of its choices")
    if right is None:
        raise SampleError(
            "a MultiChoiceVQASample does not say which choice is right: its dataset must give correct_choice_idx (the "
            "field_map of .nv-meta/dataset.yaml)"
        )
    if not hasattr(right, "__index__"):
        raise SampleError(f"correct_choice_idx={right!r:.80}: give the number of the right choice, counted from 0")
    if not 0 <= right < len(choices) <= len(ascii_uppercase):
        raise SampleError(
            f"correct_choice_idx={right} of {len(choices)} choices: a question needs 1 to {len(ascii_uppercase)} "
            "choices, including the correct one"
        )
    lines = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    question = "\n".join([sample.context, *lines])
    images = list_images(sample.image)
    answer = lines[right]
    if _is_respelled(question, images, config):
        return _as_chat(sample, question, answer, images)
    return Conversation(turns=_placed([(question, answer)], images, config), images=images)


def encode_interleaved(sample: InterleavedSample, config: MultiModalSampleConfig) -> Document:
    """Keep images and texts in their order, learn the texts."""
    return _interleaved(sample.sequence, config)


def encode_similarity_interleaved(sample: SimilarityInterleavedSample, config: MultiModalSampleConfig) -> Document:
    """Put each image at the text that it matches, in the order of the images, and learn the texts.

    An image's text is the one that `matched_text_indices` names, else the one of the highest value in its row of
    `similarity_matrix`, of shape (images, texts).

    Raises:
        SampleError: There is no text for an image.
    """
    images = list(sample.images)
    texts = list(sample.texts)
    if sample.matched_text_indices is not None:
        matches = [int(index) for index in sample.matched_text_indices]
    elif sample.similarity_matrix is not None:
        matches = [max(range(len(row)), key=row.__getitem__) for row in sample.similarity_matrix.tolist() if row]
    else:
        raise SampleError("a SimilarityInterleavedSample needs matched_text_indices or a similarity_matrix")
    if len(matches) != len(images) or any(not 0 <= match < len(texts) for match in matches):
        raise SampleError(f"{len(images)} images match texts {matches}, but there are {len(texts)} texts")
    sequence: list[Any] = []
    for number, text in enumerate(texts):
        here = [image for image, match in zip(images, matches, strict=True) if match == number]
        sequence += [text, *here] if config.image_following_text else [*here, text]
    return _interleaved(sequence, config)


def encode_video_question(sample: VidQASample, config: MultiModalSampleConfig) -> ChatSample:
    """Show the video and the question, learn the answer with the largest weight: for chat templates.

    Raises:
        SampleError: There are no answers.
    """
    turns = [{"role": "user", "content": sample.context}, {"role": "assistant", "content": _best_answer(sample)}]
    return ChatSample(__key__=sample.__key__, messages=turns, videos=[sample.video])


def encode_text(sample: TextSample, config: MultiModalSampleConfig) -> Document:
    """Learn the text."""
    return Document(pieces=[Piece(sample.text, learned=True)])


SAMPLE_ENCODERS: Mapping[type, SampleEncoder] = MappingProxyType(
    {
        CaptioningSample: encode_captioning,
        ImageClassificationSample: encode_classification,
        InterleavedSample: encode_interleaved,
        MultiChoiceVQASample: encode_multiple_choice,
        OCRSample: encode_ocr,
        SimilarityInterleavedSample: encode_similarity_interleaved,
        TextSample: encode_text,
        VQAOCRSample: encode_vqa,
        VQASample: encode_vqa,
    }
)


def _image_then_text(image: Any, text: str, config: MultiModalSampleConfig) -> Document:
    images = list_images(image)
    shown = config.image_token.token_str * len(images)
    return Document(pieces=[Piece(shown), Piece(text, learned=True)], images=images)


def _placed(pairs: Sequence[tuple[str, str]], images: Sequence[Any], config: MultiModalSampleConfig) -> list[Turn]:
    """Return the turns of questions and answers, with placeholders in the first question where no question has any."""
    turns: list[Turn] = []
    has_places = any(config.image_token.token_str in question for question, _ in pairs)
    for question, answer in pairs:
        placed = question if has_places or turns else place_images(question, len(images), config)
        turns += [Turn("user", placed), Turn("assistant", answer)]
    return turns


def _is_respelled(question: str, images: Sequence[Any], config: MultiModalSampleConfig) -> bool:
    """Return whether the places of images are written otherwise, as `<image 1>`, or seem to be."""
    is_own = config.image_token.token_str in question
    return bool(images) and not is_own and looks_placed(question, "image")


def _as_chat(sample: Any, question: str, answer: str, images: list[Any]) -> ChatSample:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return ChatSample(__key__=sample.__key__, messages=turns, images=images)


def _interleaved(sequence: Sequence[Any], config: MultiModalSampleConfig) -> Document:
    pieces: list[Piece] = []
    images: list[Any] = []
    for entry in sequence:
        if isinstance(entry, str):
            pieces.append(Piece(entry, learned=True))
        else:
            pieces.append(Piece(config.image_token.token_str))
            images.append(entry)
    return Document(pieces=pieces, images=images)


def _best_answer(sample: VQASample | VQAOCRSample | VidQASample) -> str:
    answers: Any = sample.answers  # a field map may give one text where the type has a list
    if isinstance(answers, str):
        return answers
    best = first_answer(list(answers or ()))
    if best is None:
        raise SampleError(f"a {type(sample).__name__} needs answers for training")
    weights = sample.answer_weights
    if weights is None:
        return best
    if len(weights) != len(answers):
        raise SampleError(f"{len(answers)} answers but {len(weights)} answer weights")
    return answers[max(range(len(weights)), key=lambda i: float(weights[i]))]

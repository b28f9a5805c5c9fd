"""Conversations in crude datasets that `python -m energon_bridge.training` reads without a custom cooker.

A sample has a part `json` (a line of a `.jsonl` file is one) with the turns as `messages` (`role`, `content`) or
`conversations` (`from`, `value`), and its images in one of these places, in the order of their placeholders:

    {"image": NAME} or {"images": [NAME, …]}   in the auxiliary store `images` of the dataset, if it has one, else among
                                               the sample's own parts
    nothing of the kind                        all image parts of the sample, `0.jpg`, `1.jpg`, …, `10.jpg`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from energon_bridge.errors import SampleError
from energon_bridge.stores import FileStore
from energon_bridge.task_encoder.conversation import Conversation, MultiModalSampleConfig, Turn
from energon_bridge.task_encoder.cooking import Cooker, basic_sample_keys
from energon_bridge.task_encoder.families import ChatSample
from energon_bridge.task_encoder.families.chat import chat_of
from energon_bridge.task_encoder.images import IMAGE_EXTENSIONS

_TURNS = ("messages", "conversations", "conversation")
IMAGE_STORE = "images"


def cook_conversation(sample: Mapping[str, Any], **stores: FileStore) -> ChatSample:
    """Make a `ChatSample` from a crude sample.

    Raises:
        SampleError: There are no turns, or a named image cannot be found.
    """
    content = sample.get("json")
    turns = None
    if isinstance(content, Mapping):
        turns = next((content[name] for name in _TURNS if content.get(name)), None)
    if turns is None:
        parts = ", ".join(name for name in sample if not name.startswith("__"))
        raise SampleError(
            f"a crude sample must have a part 'json' with turns as {' or '.join(_TURNS)}; this one has the parts "
            f"{parts or 'none'}"
        )
    assert isinstance(content, Mapping)
    named = content.get("images", content.get("image"))
    if named is None or named == []:
        images = _own_images(sample)
    else:
        images = [_image(name, sample, stores) for name in ([named] if isinstance(named, str) else named)]
    return ChatSample(**basic_sample_keys(sample), messages=turns, images=images)


COOKERS = (Cooker(cook_conversation),)


def encode_chat(sample: ChatSample, config: MultiModalSampleConfig) -> Conversation:
    """Show the questions, learn the answers: for `MultiModalTaskEncoder`, which renders turns without a template.

    Raises:
        SampleError: The sample has a video, or a turn of another role.
    """
    chat = chat_of(sample)
    if chat.videos:
        raise SampleError("a conversation with videos needs a chat template: set data.chat_template")
    turns: list[Turn] = []
    for message in chat.messages:
        text = "".join(part.text if part.kind == "text" else config.image_token.token_str for part in message.parts)
        if message.role not in ("system", "user", "assistant"):
            raise SampleError(f"a turn of {message.role!r} needs a chat template with such turns")
        turns.append(Turn(cast(Literal["system", "user", "assistant"], message.role), text))
    return Conversation(turns=turns, images=chat.images)


def _image(name: str, sample: Mapping[str, Any], stores: Mapping[str, FileStore]) -> Any:
    store = stores.get(IMAGE_STORE)
    if store is not None:
        return store.get(name, sample)
    if name not in sample:
        raise SampleError(
            f"the image {name!r} is not a part of the sample, and the dataset has no auxiliary store {IMAGE_STORE!r} "
            f"to look it up in: add aux: {{{IMAGE_STORE}: …}} to the mix"
        )
    return sample[name]


def _own_images(sample: Mapping[str, Any]) -> list[Any]:
    names = [name for name in sample if name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS]
    return [sample[name] for name in sorted(names, key=_by_number)]


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort 10.jpg after 2.jpg."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]

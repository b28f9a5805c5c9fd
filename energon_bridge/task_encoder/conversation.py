"""Turning a question and an answer into text: what the model is shown, and what it must say.

A conversation is rendered to two pieces, the prompt and the completion, that are tokenised separately. The border
between them is therefore the border of the loss, exactly, and a prompt at generation time is tokenised as it was in
training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from energon_bridge.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageToken:
    """The placeholder of an image in a text, and the token that stands for it.

    Args:
        token_str: The placeholder in the texts of the dataset.
        token_id: Written to `tokens` once per image token. -200 is what LLaVA and megatron-core's `LLaVAModel` look
            for; models of transformers need an id of their vocabulary. None: the tokenizer's id of `token_str`.
    """

    token_str: str = "<image>"
    token_id: int | None = -200


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationTemplateConfig:
    """How questions and answers become text.

    Args:
        system: Put in front of every conversation.
        roles: Names of who asks and who answers.
        stop_string: Ends an answer, as text; None ends it with the tokenizer's end-of-sequence token.
        chat_template: A Jinja template in the manner of transformers. None takes the tokenizer's own, and where it has
            none `USER: question ASSISTANT: answer`.
    """

    system: str | None = None
    roles: tuple[str, str] = ("user", "assistant")
    stop_string: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiModalSampleConfig:
    """How samples with images become token sequences.

    Args:
        image_token: The image placeholder.
        ignore_place_holder: Label of every position that carries no loss.
        conversation_template_config: Rendering of question and answer.
        image_following_text: Where a question has no placeholder, put the image after its text, else before it. An
            image always precedes its caption.
    """

    image_token: ImageToken = field(default_factory=ImageToken)
    ignore_place_holder: int = -100
    conversation_template_config: ConversationTemplateConfig = field(default_factory=ConversationTemplateConfig)
    image_following_text: bool = True


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text: what is shown, what must be said, and whether the special tokens are already in it."""

    prompt: str
    completion: str
    has_special_tokens: bool


def render_question(question: str, answer: str, config: ConversationTemplateConfig, tokenizer: Any) -> Rendered:
    """Render one question with its answer.

    Raises:
        ConfigurationError: The chat template does not put the answer behind its own generation prompt.
    """
    template = config.chat_template or getattr(tokenizer, "chat_template", None)
    if template is None:
        system = f"{config.system}\n" if config.system else ""
        asks, answers = (role.upper() for role in config.roles)
        return Rendered(f"{system}{asks}: {question} {answers}:", f" {answer}{config.stop_string or ''}", False)
    turns = [{"role": "system", "content": config.system}] if config.system else []
    turns.append({"role": config.roles[0], "content": question})
    render = tokenizer.apply_chat_template
    prompt = render(turns, chat_template=template, tokenize=False, add_generation_prompt=True)
    turns.append({"role": config.roles[1], "content": answer})
    whole = render(turns, chat_template=template, tokenize=False)
    if not whole.startswith(prompt) or answer not in whole[len(prompt) :]:
        raise ConfigurationError(
            "the chat template cannot be used for training: a conversation must begin with the rendering of its "
            f"question with add_generation_prompt=True; that gives {prompt!r}, and the whole conversation {whole!r}"
        )
    return Rendered(prompt, whole[len(prompt) :], True)


def render_caption(caption: str, config: MultiModalSampleConfig) -> Rendered:
    """Render a caption: the image is shown, the caption must be said."""
    template = config.conversation_template_config
    return Rendered(config.image_token.token_str, f"{caption}{template.stop_string or ''}", False)


def place_image(question: str, config: MultiModalSampleConfig) -> str:
    """Put the image placeholder into a question that has none."""
    placeholder = config.image_token.token_str
    if placeholder in question:
        return question
    return f"{question}\n{placeholder}" if config.image_following_text else f"{placeholder}\n{question}"

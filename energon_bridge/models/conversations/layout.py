"""Renders conversations as text with texts around their turns: what the model sees, and what it must learn to say.

A conversation is rendered to pieces of text, each shown or learned, which are tokenised separately. So the loss begins
and ends exactly where they do, and a prompt at generation time is tokenised as in training. Only answers are learned,
each with its end (the stop string or the end-of-sequence token). A chat template may stand in place of the texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from energon_bridge.core.errors import ConfigurationError, SampleError, UnfitSampleError
from energon_bridge.models.conversations.conversation import (
    Conversation,
    Document,
    MediaWithOptions,
    Part,
    Piece,
    Turn,
    check_keys,
    template_keys,
)
from energon_bridge.models.conversations.rendering import ChatRenderer
from energon_bridge.models.conversations.templates import ChatTemplate, RunDay, template_source


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageToken:
    """The placeholder of an image in a text, and its tokens.

    Examples:
        >>> config = MultiModalSampleConfig(image_token=ImageToken(token_str="<image>", token_id=-200))

    Args:
        token_str: The placeholder in the texts of the dataset.
        token_id: Written to `tokens` once per image token. LLaVA and megatron-core's `LLaVAModel` expect -200; models
            of transformers need an id of their vocabulary. None: the tokenizer's id of `token_str`.
        before: Text in front of the image tokens, for example `<|vision_start|>` for models of the Qwen family.
        after: Text after them, for example `<|vision_end|>`.
    """

    token_str: str = "<image>"
    token_id: int | None = -200
    before: str = ""
    after: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnLayout:
    """The text around the turns of a conversation; `{text}`, `{role}` and `{ROLE}` (in capitals) are filled in.

    Args:
        system: The system prompt.
        question: A turn of the user.
        prompt: The text in front of an answer.
        answer: A non-empty answer. It is learned, with the stop string after it.
        between: Between an answer and the next question; not learned.
        has_special_tokens: The layout contains the tokens that begin and end a turn as text, so none are added.
    """

    system: str = "{text}\n"
    question: str = "{ROLE}: {text} "
    prompt: str = "{ROLE}:"
    answer: str = " {text}"
    between: str = ""
    has_special_tokens: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationTemplateConfig:
    """How questions and answers become text.

    Examples:
        >>> template = ConversationTemplateConfig(system="You are helpful.", stop_string="</s>")
        >>> config = MultiModalSampleConfig(conversation_template_config=template)

    Args:
        system: System prompt of every conversation without its own.
        roles: The roles of the user and the assistant.
        stop_string: Ends an answer, as text; None ends it with the tokenizer's end-of-sequence token. A chat template
            writes its own.
        chat_template: A Jinja template, as in transformers.
        layout: Texts around the turns instead of a template. Without both, the tokenizer's own chat template is used,
            and if it has none, `USER: question ASSISTANT: answer`.

    Raises:
        ConfigurationError: Both a chat template and a layout are given.
    """

    system: str | None = None
    roles: tuple[str, str] = ("user", "assistant")
    stop_string: str | None = None
    chat_template: str | None = None
    layout: TurnLayout | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None and self.layout is not None:
            raise ConfigurationError("a ConversationTemplateConfig takes chat_template or layout, not both")


LLAVA_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions."
)


def llava_template(system: str | None = LLAVA_SYSTEM) -> ConversationTemplateConfig:
    """Return the template of LLaVA 1.5: `SYSTEM USER: question ASSISTANT: answer</s>`, the end as the token's id."""
    return ConversationTemplateConfig(system=system, layout=TurnLayout(system="{text} "))


def chatml_template(system: str | None = None) -> ConversationTemplateConfig:
    """Return the ChatML template: `<|im_start|>role`, a line break, the text, `<|im_end|>`, a line break."""
    turn = "<|im_start|>{role}\n{text}<|im_end|>\n"
    layout = TurnLayout(
        system=turn.format(role="system", text="{text}"),
        question=turn,
        prompt="<|im_start|>{role}\n",
        answer="{text}",
        between="\n",
        has_special_tokens=True,
    )
    return ConversationTemplateConfig(system=system, stop_string="<|im_end|>", layout=layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiModalSampleConfig:
    """How samples with images become token sequences.

    Examples:
        >>> config = MultiModalSampleConfig(image_token=ImageToken(token_str="<img>"), ignore_place_holder=-100)

    Args:
        image_token: The image placeholder.
        ignore_place_holder: Label of every position without loss.
        conversation_template_config: Rendering of question and answer.
        image_following_text: If a question has no placeholder, put its images after the text (False: before it); the
            same for the images and texts of a similarity-interleaved sample. An image always precedes its caption.
    """

    image_token: ImageToken = field(default_factory=ImageToken)
    ignore_place_holder: int = -100
    conversation_template_config: ConversationTemplateConfig = field(default_factory=ConversationTemplateConfig)
    image_following_text: bool = True


def layout_markers(template: ConversationTemplateConfig) -> str:
    """Return the text in which a template writes tokens: its stop string, and a layout that has special tokens."""
    layout = template.layout if template.layout and template.layout.has_special_tokens else ""
    return f"{template.stop_string or ''}{layout}"


class Rendered(NamedTuple):
    """A sample as text, and whether that text already has its begin and end tokens."""

    pieces: list[Piece]
    has_special_tokens: bool


def render(
    content: Conversation | Document,
    config: MultiModalSampleConfig,
    tokenizer: Any,
    day: RunDay | None = None,
    renderers: dict[Any, ChatRenderer] | None = None,
) -> Rendered:
    """Render a conversation by the template, or a document as it is.

    Args:
        content: What the sample has to say.
        config: Has the template.
        tokenizer: Renders a chat template, its own if the configuration has none.
        day: The date that the template writes. None: today's.
        renderers: Those of earlier samples with this configuration, which know the shapes of conversations.

    Raises:
        SampleError: There is nothing to learn, or what only the chat template of a model's family can write.
        ConfigurationError: The chat template cannot be used for training.
    """
    template = config.conversation_template_config
    if isinstance(content, Document):
        pieces = list(content.pieces)
        last = pieces.pop().text if pieces[-1].learned else ""
        return Rendered([*pieces, _ended(last, template, has_special_tokens=False)], False)
    turns = _text_turns(content, config.image_token.token_str)
    if not any(turn.role == "assistant" and turn.learned for turn in turns):
        raise SampleError("the conversation has no answer to learn")
    if template.system and turns[0].role != "system":
        turns.insert(0, Turn("system", template.system))
    chat_template = template_source(tokenizer, template.chat_template)
    if chat_template is None or template.layout is not None:
        layout = template.layout or TurnLayout()
        return Rendered(list(_lay_out(turns, layout, template)), layout.has_special_tokens)
    renderers = {} if renderers is None else renderers
    place = id(tokenizer), chat_template
    if place not in renderers:
        rendering = ChatTemplate(
            tokenizer=tokenizer, source=chat_template, roles=template.roles, day=day or RunDay.of(None)
        )
        renderers[place] = ChatRenderer(plain=rendering, with_tools=rendering, as_text=True)
    return Rendered(list(_render_chat(turns, renderers[place])), True)


def place_images(question: str, count: int, config: MultiModalSampleConfig) -> str:
    """Insert the placeholders of images into a question that has none."""
    placeholder = config.image_token.token_str
    if placeholder in question or not count:
        return question
    lines = [placeholder] * count
    return "\n".join([question, *lines] if config.image_following_text else [*lines, question])


_ROLES = ("system", "user", "assistant")


def _text_turns(content: Conversation, placeholder: str) -> list[Turn]:
    """Return the turns with texts for contents. Raises SampleError for what no layout writes."""
    if content.videos:
        raise SampleError("a conversation with videos needs a chat template: set data.chat_template")
    if any(isinstance(image, MediaWithOptions) for image in content.images):
        raise SampleError("a part of a message gives an image its size, which needs a chat template")
    if unused := template_keys(content):
        check_keys(content, unused, "only a chat template can use it; set data.chat_template")
    if other := next((turn.role for turn in content.turns if turn.role not in _ROLES), None):
        raise SampleError(f"a turn of {other!r} needs a chat template with such turns")
    return [
        turn
        if isinstance(turn.content, str)
        else replace(turn, content="".join(part.text if part.kind == "text" else placeholder for part in turn.parts))
        for turn in content.turns
    ]


def _ended(text: str, template: ConversationTemplateConfig, *, has_special_tokens: bool) -> Piece:
    if template.stop_string is not None:
        return Piece(text + template.stop_string, learned=True)
    return Piece(text, learned=True, ends=not has_special_tokens)


def _lay_out(turns: Sequence[Turn], layout: TurnLayout, template: ConversationTemplateConfig) -> Iterator[Piece]:
    shown = ""
    for turn in turns:
        if turn.role == "system":
            shown += layout.system.format(text=turn.text)
            continue
        role = template.roles[turn.role == "assistant"]
        names = {"role": role, "ROLE": role.upper()}
        if turn.role == "user":
            shown += layout.question.format(text=turn.text, **names)
            continue
        yield Piece(shown + layout.prompt.format(**names))
        text = layout.answer.format(text=turn.text, **names) if turn.text else ""
        yield _ended(text, template, has_special_tokens=layout.has_special_tokens)._replace(learned=turn.learned)
        shown = layout.between


def _render_chat(turns: Sequence[Turn], renderer: ChatRenderer) -> Iterator[Piece]:
    """Yield the text up to the last answer in pieces, shown or learned, by the chat template (see `templates`)."""
    last = max(number for number, turn in enumerate(turns) if turn.role == "assistant")
    said = [Turn(turn.role, (Part("text", turn.text),), learned=turn.learned) for turn in turns[: last + 1]]
    text, spans = renderer.rendered(Conversation(turns=said))
    answers = [turn.text for turn in said if turn.role == "assistant" and turn.learned]
    for answer, span in zip(answers if not renderer.plain.marks else (), spans, strict=False):
        if answer.strip() not in text[slice(*span)]:
            raise UnfitSampleError(
                f"the chat template cannot be used for training: it writes {text[slice(*span)]!r} for the answer "
                f"{answer!r}"
            )
    done = 0
    for span in spans:
        yield Piece(text[done : span.start])
        yield Piece(text[slice(*span)], learned=True)
        done = span.end
    if not said[-1].learned:
        yield Piece(text[done:])  # answers that are not learned, and the images of their questions

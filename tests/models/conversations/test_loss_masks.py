"""Loss masks against strings: for each template, what is learned is the answers and their ends, and nothing else."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from multimodal import IMAGE, CharacterTokenizer, PixelProcessor, WordTokenizer, encoder, picture

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.samples import VQASample
from energon_bridge.models.conversations.conversation import Conversation, Turn
from energon_bridge.models.conversations.layout import (
    LLAVA_SYSTEM,
    ConversationTemplateConfig,
    ImageToken,
    MultiModalSampleConfig,
    TurnLayout,
    chatml_template,
    llava_template,
)

Template = ConversationTemplateConfig

CHATML_JINJA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class JinjaTokenizer(CharacterTokenizer):
    """Renders chat templates with the engine that transformers uses."""

    bos_token_id = None  # type: ignore[assignment]

    def apply_chat_template(
        self, turns: list[dict[str, str]], *, chat_template: str, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        assert not tokenize
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        values = {"messages": turns, "add_generation_prompt": add_generation_prompt}
        return environment.from_string(chat_template).render(**values)


def build(template: Template, *, tokenizer: WordTokenizer | None = None, seq_length: int = 1000, **config: Any) -> Any:
    settings = MultiModalSampleConfig(
        image_token=ImageToken(token_id=IMAGE), conversation_template_config=template, **config
    )
    task_encoder = encoder(seq_length, config=settings)
    task_encoder.tokenizer = tokenizer or CharacterTokenizer()
    return task_encoder


def conversation(*turns: str, images: int = 1, system: str | None = None) -> Conversation:
    """Questions and answers in turn."""
    roles: list[Any] = ["user", "assistant"]
    spoken = [Turn(roles[number % 2], text) for number, text in enumerate(turns)]
    return Conversation(
        turns=[Turn("system", system), *spoken] if system else spoken, images=[picture(10 * i) for i in range(images)]
    )


def encode(task_encoder: Any, content: Conversation) -> Any:
    task_encoder.register_encoder(VQASample, lambda sample, config: content)
    return task_encoder.encode_sample(VQASample(__key__="q", image=None, context=""))


def whole_and_learned(task_encoder: Any, sample: Any) -> tuple[str, list[str]]:
    """The sequence as text, and the runs of it that carry loss (as labels, so each is the next token)."""
    decode = task_encoder.tokenizer.decode
    shown = decode(sample.tokens)
    last = sample.labels[-1:]
    runs = groupby(zip(sample.loss_mask.tolist(), sample.labels.tolist(), strict=True), key=lambda pair: pair[0])
    learned = [decode([label for _, label in run]) for carries, run in runs if carries]
    assert sample.labels[sample.loss_mask == 0].eq(-100).all()
    return shown + (decode(last) if sample.loss_mask[-1] else ""), learned


PLAIN = Template()
LLAVA = llava_template()
CHATML = chatml_template("be kind")
JINJA = Template(system="be kind", chat_template=CHATML_JINJA)
CUSTOM = Template(
    system="S",
    stop_string="##",
    layout=TurnLayout(system="[{text}]", question="Q({role})={text};", prompt="A=", answer="{text}", between="|"),
)

CASES: dict[str, tuple[Template, Conversation, str, list[str]]] = {
    "plain": (PLAIN, conversation("<image>what", "a cat"), "<s>USER: <image>what ASSISTANT: a cat</s>", [" a cat</s>"]),
    "plain, several turns": (
        PLAIN,
        conversation("<image>a", "b", "c", "d"),
        "<s>USER: <image>a ASSISTANT: b</s>USER: c ASSISTANT: d</s>",
        [" b</s>", " d</s>"],
    ),
    "plain, no answer": (PLAIN, conversation("<image>a", ""), "<s>USER: <image>a ASSISTANT:</s>", ["</s>"]),
    "plain, braces": (
        PLAIN,
        conversation("<image>{role}", "{text}"),
        "<s>USER: <image>{role} ASSISTANT: {text}</s>",
        [" {text}</s>"],
    ),
    "plain, several images": (
        PLAIN,
        conversation("<image>and<image>", "a", "then<image>", "b", images=3),
        "<s>USER: <image>and<image> ASSISTANT: a</s>USER: then<image> ASSISTANT: b</s>",
        [" a</s>", " b</s>"],
    ),
    "llava": (
        LLAVA,
        conversation("<image>\nwhat", "a cat", "sure?", "yes"),
        f"<s>{LLAVA_SYSTEM} USER: <image>\nwhat ASSISTANT: a cat</s>USER: sure? ASSISTANT: yes</s>",
        [" a cat</s>", " yes</s>"],
    ),
    "llava, own system prompt": (
        LLAVA,
        conversation("<image>a", "b", system="be brief"),
        "<s>be brief USER: <image>a ASSISTANT: b</s>",
        [" b</s>"],
    ),
    "llava, the answer repeats the question": (
        llava_template(system=None),
        conversation("<image>USER: x ASSISTANT: y", "ASSISTANT: y"),
        "<s>USER: <image>USER: x ASSISTANT: y ASSISTANT: ASSISTANT: y</s>",
        [" ASSISTANT: y</s>"],
    ),
    "chatml": (
        CHATML,
        conversation("<image>a", "b", "c", "d"),
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n<image>a<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>",
        ["b<|im_end|>", "d<|im_end|>"],
    ),
    "chatml, empty answers": (
        chatml_template(),
        conversation("<image>a", "", "c", ""),
        "<|im_start|>user\n<image>a<|im_end|>\n<|im_start|>assistant\n<|im_end|>"
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<|im_end|>",
        ["<|im_end|>", "<|im_end|>"],
    ),
    "chatml, the last question has no answer": (
        chatml_template(),
        conversation("<image>a", "b", "and now?"),
        "<|im_start|>user\n<image>a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>",
        ["b<|im_end|>"],
    ),
    "one's own layout": (
        CUSTOM,
        conversation("<image>a", "b", "c", "d"),
        "<s>[S]Q(user)=<image>a;A=b##|Q(user)=c;A=d##",
        ["b##", "d##"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_only_answers_are_learned(case: str) -> None:
    template, content, whole, learned = CASES[case]
    task_encoder = build(template)
    assert whole_and_learned(task_encoder, encode(task_encoder, content)) == (whole, learned)


@pytest.mark.parametrize("case", ["chatml", "chatml, empty answers", "chatml, the last question has no answer"])
def test_a_chat_template_gives_what_the_layout_gives(case: str) -> None:
    template, content, whole, learned = CASES[case]
    task_encoder = build(Template(system=template.system, chat_template=CHATML_JINJA), tokenizer=JinjaTokenizer())
    assert whole_and_learned(task_encoder, encode(task_encoder, content)) == (whole, learned)


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    forgetful = (
        "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}[{{ message['content'] }}]"
        "{% endif %}{% endfor %}"
    )
    task_encoder = build(Template(chat_template=forgetful), tokenizer=JinjaTokenizer())
    encode(task_encoder, conversation("<image>a", "b"))
    with pytest.raises(ConfigurationError, match="the chat template cannot be used for training"):
        encode(task_encoder, conversation("<image>a", "b", "c", "d"))


def test_a_layout_goes_before_the_template_of_the_tokenizer() -> None:
    tokenizer = JinjaTokenizer()
    tokenizer.chat_template = CHATML_JINJA
    task_encoder = build(llava_template(system=None), tokenizer=tokenizer)
    shown, _ = whole_and_learned(task_encoder, encode(task_encoder, conversation("<image>a", "b")))
    assert shown == "USER: <image>a ASSISTANT: b</s>"
    with pytest.raises(ConfigurationError, match="chat_template or layout, not both"):
        Template(chat_template="x", layout=TurnLayout())


@pytest.mark.parametrize("template", [PLAIN, LLAVA, CHATML, JINJA], ids=["plain", "llava", "chatml", "jinja"])
def test_a_cut_leaves_a_prefix_of_the_tokens_and_of_what_is_learned(template: Template) -> None:
    """At every length at which anything can be learned."""
    content = conversation("<image>a", "bc", "d<image>", "ef", images=2)
    task_encoder = build(template, tokenizer=JinjaTokenizer())
    whole = encode(task_encoder, content)
    learnable = int(whole.loss_mask.argmax())
    image_ends = [place + 1 for place, token in enumerate(whole.tokens.tolist()) if token == IMAGE]
    for length in range(1, len(whole.tokens) + 1):
        task_encoder.seq_length = length
        if length <= learnable:
            with pytest.raises(SampleError, match=r"sample 'q': .*seq_length"):
                encode(task_encoder, content)
            continue
        cut = encode(task_encoder, content)
        assert len(cut.tokens) <= length
        assert len(cut.tokens) >= length - 1
        for name in ("tokens", "labels", "loss_mask"):
            assert getattr(cut, name).tolist() == getattr(whole, name).tolist()[: len(cut.tokens)], name
        assert cut.num_images == sum(end <= length for end in image_ends) == len(cut.visual["pixel_values"])


def test_an_image_that_does_not_fit_goes_with_all_that_follows() -> None:
    task_encoder = build(PLAIN, seq_length=40)
    task_encoder.image_tokens_per_image = 8
    sample = encode(task_encoder, conversation("<image>a", "b", "<image>c", "d", images=2))
    whole, learned = whole_and_learned(task_encoder, sample)
    assert whole == "<s>USER: " + 8 * "<image>" + "a ASSISTANT: b</s>USER:"
    assert learned == [" b</s>"]
    assert sample.num_images == 1


@pytest.mark.parametrize("count", [1, 4])
def test_the_tokens_of_an_image_stand_between_those_of_its_family(count: int) -> None:
    token = ImageToken(token_id=IMAGE, before="<|im_start|>", after="<|im_end|>")
    task_encoder = encoder(100, config=MultiModalSampleConfig(image_token=token), image_tokens_per_image=count)
    task_encoder.tokenizer = CharacterTokenizer()
    sample = encode(task_encoder, conversation("x<image>y<image>", "z", images=2))
    image = "<|im_start|>" + count * "<image>" + "<|im_end|>"
    whole, learned = whole_and_learned(task_encoder, sample)
    assert whole == f"<s>USER: x{image}y{image} ASSISTANT: z</s>"
    assert learned == [" z</s>"]


def test_images_of_unequal_size_have_their_own_numbers_of_tokens() -> None:
    task_encoder = build(PLAIN)
    task_encoder.image_processor = PixelProcessor()
    task_encoder.image_tokens_per_image = lambda visual: visual["pixel_values"].shape[-1]
    content = Conversation(
        turns=[Turn("user", "<image>,<image>"), Turn("assistant", "x")],
        images=[picture().resize((2, 4)), picture().resize((3, 4))],
    )
    sample = encode(task_encoder, content)
    shown = whole_and_learned(task_encoder, sample)[0]
    assert shown == "<s>USER: <image><image>,<image><image><image> ASSISTANT: x</s>"
    assert sample.visual["pixel_values"].shape == (2, 3, 4, 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (conversation("<image>a"), "no answer to learn"),
        (conversation("a", "b"), "0 placeholders '<image>' but the sample has 1 image"),
        (conversation("<image><image>", "b", images=3), "2 placeholders '<image>' but the sample has 3 images"),
        (conversation("<image>a", "b", "c", "<image>"), "contains the image placeholder"),
    ],
)
def test_conversations_that_cannot_be_learned_are_refused_by_name(content: Conversation, complaint: str) -> None:
    with pytest.raises(SampleError, match=f"sample 'q': .*{complaint}"):
        encode(build(PLAIN), content)

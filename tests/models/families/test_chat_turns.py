"""What stands beside the content of a turn, and conversations that begin with an answer, against transformers."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from families import chat, encoder_of, picture, text_of
from multimodal import IMAGE, CharacterTokenizer

pytest.importorskip("transformers")

from test_family_masks import BARE, FORGETFUL, QWEN, STRINGS, learned_of

from energon_bridge import WorkerConfig, get_loader, get_train_dataset
from energon_bridge.core.errors import SampleError
from energon_bridge.core.samples import TextSample, VQASample
from energon_bridge.models.conversations import conversation
from energon_bridge.models.conversations.conversation import Conversation, Turn
from energon_bridge.models.conversations.layout import (
    ConversationTemplateConfig,
    ImageToken,
    MultiModalSampleConfig,
    chatml_template,
    llava_template,
)
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import (
    LLAVA_TEMPLATE,
    QWEN_VL_TEMPLATE,
    ChatConfig,
    ChatSample,
    ChatTemplateTaskEncoder,
)
from energon_bridge.tools.cli.main import main

# As models write tools and thoughts, with marks.
_SAID = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}<tool_call>{{ call.name }} ARGUMENTS"
    "</tool_call>{% endfor %}"
)
AGENT = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    + _SAID + _CALLS + "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{% if m.name %}{{ m.name + ': ' }}{% endif %}{% if m.tool_call_id %}{{ '#' + m.tool_call_id + ' ' }}{% endif %}"
    + _SAID + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
AS_TEXT = AGENT.replace("ARGUMENTS", "{{ call.arguments }}")
AS_JSON = AGENT.replace("ARGUMENTS", "{{ call.arguments | tojson }}")
AS_ITEMS = AGENT.replace("ARGUMENTS", "{% for k, v in call.arguments | items %}{{ k }}={{ v }};{% endfor %}")
EITHER = AGENT.replace("ARGUMENTS", "{{ call.arguments if call.arguments is string else call.arguments | tojson }}")
TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}]


def unmarked(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def agent(arguments: Any, content: Any = None, **beside: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "zoom", "arguments": arguments}}
    return [
        {"role": "user", "content": "color?", "name": "ann"},
        {"role": "assistant", "content": content, "tool_calls": [call], **beside},
        {"role": "tool", "content": "done", "tool_call_id": "call_1", "name": "zoom"},
        {"role": "assistant", "content": "red", "tool_calls": None},
    ]


@cache
def base(family: str = "qwen2_vl") -> ChatTemplateTaskEncoder:
    return encoder_of(family)


def encoder_with(template: str | None = None, **settings: Any) -> ChatTemplateTaskEncoder:
    return ChatTemplateTaskEncoder(base().tokenizer, base().family, ChatConfig(chat_template=template, **settings))


def whole_and_learned(encoder: ChatTemplateTaskEncoder, sample: Any) -> tuple[str, list[str]]:
    encoded = encoder.encode(sample)
    return text_of(encoder, encoded), learned_of(encoder, encoded)


# Keys of turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", "look", [{"type": "text", "text": "look"}]])
@pytest.mark.parametrize(
    ("template", "given", "right"),
    [
        (AS_TEXT, '{"x": 1}', '{"x": 1}'),
        (AS_TEXT, {"x": 1}, '{"x": 1}'),
        (AS_JSON, '{"x": 1}', {"x": 1}),
        (AS_JSON, {"x": 1}, {"x": 1}),
        (AS_ITEMS, '{"x": 1}', {"x": 1}),
        (AS_ITEMS, "", {}),
        (EITHER, '{"x":1}', '{"x":1}'),
        (EITHER, {"x": 1}, {"x": 1}),
    ],
)
def test_all_keys_of_turns_reach_the_template(template: str, given: Any, right: Any, content: Any) -> None:
    """As transformers has it, of arguments in the form that the template is for."""
    encoder = encoder_with(template)
    out = encoder.tokenizer.apply_chat_template(
        agent(right, content, reasoning_content="hm"),
        tools=TOOLS,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    for thoughts in ("reasoning_content", "thinking", "reasoning"):
        sample = encoder.encode(
            ChatSample(__key__="q", messages=agent(given, content, **{thoughts: "hm"}), tools=TOOLS)
        )
        assert [*sample.tokens.tolist(), int(sample.labels[-1])] == list(out["input_ids"])
        assert [0, *sample.loss_mask.tolist()] == list(out["assistant_masks"])
    plain = encoder_with(unmarked(template))
    whole, learned = whole_and_learned(plain, ChatSample(__key__="q", messages=agent(given, content), tools=TOOLS))
    said = plain.tokenizer.apply_chat_template(
        agent(right, content), tools=TOOLS, chat_template=plain.config.chat_template, tokenize=False
    )
    assert whole == said.rstrip()
    assert learned == [said.split("assistant\n")[1].split("\n")[0], "red<|im_end|>"]


def test_calls_and_tools_are_written_by_the_templates_of_the_families() -> None:
    encoder = encoder_with()
    for arguments in ('{"x": 1}', {"x": 1}):
        whole, learned = whole_and_learned(
            encoder, ChatSample(__key__="q", messages=agent(arguments), tools=TOOLS, system="Be kind.")
        )
        call = '<tool_call>\n{"name": "zoom", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
        assert learned == [call, "red<|im_end|>"]
        assert whole.startswith(
            f"<|im_start|>system\nBe kind.\n\n<tools>\n{json.dumps(TOOLS[0])}\n</tools><|im_end|>\n"
        )
    assert (
        whole_and_learned(encoder, ChatSample(__key__="q", messages=agent(arguments, "look")))[1][0] == f"look\n{call}"
    )


def test_the_template_for_tools_is_taken_for_samples_with_tools() -> None:
    encoder = encoder_of("qwen2_vl")
    encoder.tokenizer.chat_template = {"default": QWEN, "tool_use": AS_JSON}
    encoder = ChatTemplateTaskEncoder(encoder.tokenizer, encoder.family)
    for tools, template in ((TOOLS, AS_JSON), (None, QWEN)):
        sample = chat("a", "b")
        sample.tools = tools
        said = encoder.tokenizer.apply_chat_template(
            sample.messages, tools=tools, chat_template=template, tokenize=False
        )
        assert text_of(encoder, encoder.encode(sample)).strip() == said.strip()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (agent("{x"), "the arguments of a tool call are not valid JSON"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": "zoom"}],
            "the tool_calls are not valid",
        ),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [1]}], "must be a list of calls"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
            "a turn must have role and content",
        ),
        ([{"role": "user", "content": None, "name": "ann"}, *agent("{}")], "a turn must have role and content"),
    ],
)
def test_calls_that_cannot_be_written_are_refused_by_name(messages: Any, complaint: str) -> None:
    with pytest.raises(SampleError, match=f"sample 'q': .*{complaint}"):
        encoder_with(AS_JSON).encode(ChatSample(__key__="q", messages=messages))


def test_what_the_template_does_not_use_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    encoder = encoder_with(QWEN)
    turns = [
        {"from": "human", "value": "a", "mood": "glad", "weight": 0},
        {"from": "gpt", "value": "b", "thinking": "hm", "weight": 1, "markdown": None},
    ]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sample = ChatSample(__key__="q", messages=turns, tools=TOOLS)
            assert whole_and_learned(encoder, sample)[1] == ["b<|im_end|>"]
    said = [record.getMessage().split("`")[1] for record in caplog.records]
    assert sorted(said) == ["mood", "thinking", "tools"]
    caplog.clear()
    encoder_with(AS_JSON).encode(ChatSample(__key__="q", messages=agent("{}", thinking="hm"), tools=TOOLS))
    assert not caplog.records


def test_an_answer_that_only_calls_a_tool_is_never_learned_as_an_empty_one() -> None:
    encoder = encoder_with(QWEN)
    for content in (None, ""):
        with pytest.raises(SampleError, match="an answer has no text but tool_calls, not seen by the model: the chat"):
            encoder.encode(ChatSample(__key__="q", messages=agent("{}", content)))
    assert whole_and_learned(encoder, ChatSample(__key__="q", messages=agent("{}", "", weight=0)))[1] == [
        "red<|im_end|>"
    ]


# Flags ----------------------------------------------------------------------------------------------------------------

OFF: list[dict[str, Any]] = [
    {"weight": 0},
    {"weight": 0.0},
    {"weight": False},
    {"train": False},
    {"train_on_turn": False},
    {"loss": False},
    {"loss": 0},
    {"loss_scale": 0.0},
    {"mask": True},
    {"weight": 0, "train": True},
    {"loss_mask": 0},
    {"trainable": False},
    {"train_on": False},
    {"include_in_loss": False},
    {"calculate_loss": 0},
    {"is_learned": False},
    {"no_loss": True},
    {"ignore": True},
    {"skip_loss": True},
]
ON: list[dict[str, Any]] = [
    {"weight": 1},
    {"weight": 1.0},
    {"train": True},
    {"loss": True},
    {"mask": False},
    {"loss": None},
    {"loss_mask": 1},
    {"trainable": True},
    {"ignore": False},
    {"name": "bob"},
    {"score": 0},
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("assistant", {"weight": 0.5}, r"weight=0\.5, which cannot be honoured: give 0 or 1"),
    ("assistant", {"weight": -1}, "weight=-1"),
    ("assistant", {"weight": "0"}, "weight='0'"),
    ("assistant", {"loss_scale": [1.0, 2.0]}, r"loss_scale=\[1\.0, 2\.0\]"),
    ("assistant", {"mask": 1}, "mask=1, which cannot be honoured: give true"),
    ("assistant", {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "train_detail="),
    ("user", {"train": True}, "turn of 'user' has train=True, but only answers are learned"),
    ("tool", {"training": True}, "turn of 'tool' has training=True"),
]


def two_answers(**flags: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "color?", "weight": 0},
        {"role": "assistant", "content": "red", **flags},
        {"role": "user", "content": "how many?"},
        {"role": "assistant", "content": "blue"},
    ]


def test_weights_of_questions_ask_for_nothing() -> None:
    """Lists write `weight: 1` with every turn."""
    encoder = encoder_with(QWEN)
    messages = [{**turn, "weight": 1} for turn in two_answers()]
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in two_answers()]
    found, expected = (encoder.encode(ChatSample(__key__="q", messages=turns)) for turns in (messages, plain))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()


@pytest.mark.parametrize("template", [QWEN_VL_TEMPLATE, AS_JSON, BARE, LLAVA_TEMPLATE], ids=lambda one: one[-40:])
@pytest.mark.parametrize("flags", [*OFF, *ON], ids=str)
def test_answers_are_learned_by_their_flags(template: str, flags: dict[str, Any]) -> None:
    encoder = encoder_with(template)
    both = encoder.encode(ChatSample(__key__="q", messages=two_answers()))
    flagged = encoder.encode(ChatSample(__key__="q", messages=two_answers(**flags)))
    assert flagged.tokens.tolist() == both.tokens.tolist()
    learned = learned_of(encoder, both)
    assert learned_of(encoder, flagged) == (learned if flags in ON else learned[1:])
    assert flagged.answer == ("red" if flags in ON else "blue")


@pytest.mark.parametrize(("role", "flags", "complaint"), REFUSED)
def test_flags_that_cannot_be_honoured_are_refused(role: str, flags: dict[str, Any], complaint: str) -> None:
    messages = [{"role": one, "content": "a"} | (flags if one == role else {}) for one in ("user", "tool", "assistant")]
    with pytest.raises(SampleError, match=f"sample 'q': .*{complaint}"):
        encoder_with().encode(ChatSample(__key__="q", messages=messages))


def test_a_conversation_without_a_learned_answer_says_so() -> None:
    messages = two_answers(weight=0)[1:2]
    with pytest.raises(SampleError, match="no answer to learn: keys of its turns"):
        encoder_with().encode(ChatSample(__key__="q", messages=messages))
    messages = [*two_answers()[:3], {"role": "assistant", "content": "blue", "weight": 0}]
    with pytest.raises(SampleError, match="no answer to learn: keys of its turns"):
        encoder_with(learn="last").encode(ChatSample(__key__="q", messages=messages))


def test_an_answer_that_is_left_out_may_be_written_differently_later() -> None:
    """Only answers that are learned must be the same in what follows."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "so /think b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "hm /think d"},
    ]
    assert whole_and_learned(encoder_with(FORGETFUL), ChatSample(__key__="q", messages=messages))[1] == [
        "hm /think d<|im_end|>"
    ]


# System and tools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])], TOOLS[0], json.dumps(TOOLS).encode()]
)
def test_a_system_prompt_and_tools_beside_the_turns(tools: Any) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    encoder = encoder_with(AS_JSON)
    messages = [{"role": "system", "content": "Be brief."}, *chat("q", "a").messages]
    expected = encoder.tokenizer.apply_chat_template(messages, tools=TOOLS, chat_template=AS_JSON, tokenize=False)
    beside = {"conversations": turns, "system": "Be brief.", "tools": tools}
    for sample in (
        ChatSample(__key__="q", messages=turns, system="Be brief.", tools=tools),
        {"__key__": "q", "json": beside},
        {"__key__": "q", **beside},
        ChatSample(__key__="q", messages=json.dumps({**beside, "tools": TOOLS})),
    ):
        whole, learned = whole_and_learned(encoder, sample)
        assert (whole, learned) == (expected, ["a<|im_end|>\n"])


@pytest.mark.parametrize("nothing", [None, "", " ", "[]", [], "null"])
def test_no_tools_are_no_tools(nothing: Any) -> None:
    sample = ChatSample(__key__="q", messages=chat("q", "a").messages, tools=nothing)
    assert whole_and_learned(encoder_with(AS_JSON), sample)[0].startswith("<|im_start|>user")


@pytest.mark.parametrize("tools", ["zoom", "3", [3], ["zoom"], 3])
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(SampleError, match=r"sample 'q': (the tools are not valid|tools must be a list)"):
        encoder_with(AS_JSON).encode(ChatSample(__key__="q", messages=chat("q", "a").messages, tools=tools))


def test_of_two_system_prompts_the_turn_is_used_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    sample = chat("q", "a", system="Be kind.")
    encoder = encoder_with(system="Be quick.")
    for system, times in (("Be kind.", 0), ("Be brief.", 1)):
        sample.system = system
        with caplog.at_level(logging.WARNING):
            whole = [whole_and_learned(encoder, sample)[0] for _ in range(2)]
        assert whole[0].count("<|im_start|>system") == 1
        assert whole[0].startswith("<|im_start|>system\nBe kind.<|im_end|>")
        assert caplog.text.count("another `system` beside its turns") <= times
    sample = chat("q", "a")
    sample.system = "Be brief."
    assert "Be brief" in whole_and_learned(encoder, sample)[0]


@pytest.mark.parametrize("content", ["{{ m.content | trim }}", "{{ m['content'] + '' }}"])
def test_a_role_whose_content_must_be_a_text_gets_one(content: str) -> None:
    """Templates that take lists of parts from users may still want texts of others."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role in ('system', 'tool') %}"
        + content
        + "{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [
        *chat("q", "a", system="Be kind.").messages,
        {"role": "tool", "content": "done"},
        *chat("q", "b").messages,
    ]
    whole, learned = whole_and_learned(encoder_with(template), ChatSample(__key__="q", messages=messages))
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    assert whole == "".join(turns).rstrip()
    assert learned == ["a<|im_end|>", "b<|im_end|>"]


# The answer first -----------------------------------------------------------------------------------------------------

ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_ALTERNATING = ALTERNATING.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}",
)
FIRST = [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize("system", [None, "Be kind."])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("template", "learned", "is_asked"),
    [
        (None, ["hello<|im_end|>", "a<|im_end|>"], False),
        (QWEN, ["hello<|im_end|>", "a<|im_end|>"], False),
        (STRINGS, [" hello</s>", " a</s>"], False),
        (BARE, ["hello", "a"], False),
        (AS_JSON, ["hello<|im_end|>\n", "a<|im_end|>\n"], False),
        (LLAVA_TEMPLATE, [" hello<|im_end|>", " a<|im_end|>"], False),
        (ALTERNATING, ["hello<|im_end|>", "a<|im_end|>"], True),
    ],
)
def test_conversations_that_begin_with_an_answer_are_learned(
    template: str | None, learned: list[str], is_asked: bool, count: int, system: str | None
) -> None:
    system = None if is_asked else system  # which this template refuses
    encoder = encoder_with(template)
    turns = [{**turn, "value": turn["value"].removeprefix("<image>")} for turn in FIRST[:count]]
    whole, found = whole_and_learned(encoder, ChatSample(__key__="q", messages=turns, system=system))
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": ""}] if is_asked else []
    messages += [{"role": {"gpt": "assistant", "human": "user"}[one["from"]], "content": one["value"]} for one in turns]
    said = encoder.tokenizer.apply_chat_template(
        messages, chat_template=template or base().tokenizer.chat_template, tokenize=False
    )
    assert whole.rstrip() == said.rstrip()
    assert found == learned[: (count + 1) // 2]


def test_images_stand_where_they_are_when_the_answer_comes_first() -> None:
    for template in (None, MARKED_ALTERNATING):
        sample = encoder_with(template).encode(ChatSample(__key__="q", messages=FIRST, images=[picture()]))
        assert sample.num_images == 1
        assert sample.answer == "hello"


def test_a_template_that_takes_no_form_says_why() -> None:
    template = "{% if messages[0].content != 'ask' %}{{ raise_exception('ask first') }}{% endif %}" + BARE
    with pytest.raises(SampleError, match="sample 'q': the chat template rejects the conversation: ask first"):
        encoder_with(template).encode(ChatSample(__key__="q", messages=FIRST, images=[picture()]))


# Plain sequences ------------------------------------------------------------------------------------------------------


class Letters(CharacterTokenizer):
    bos_token_id = None  # type: ignore[assignment]

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        return base().tokenizer.apply_chat_template(*args, **options)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (llava_template(), "</s>"),
        (chatml_template(), "<|im_end|>"),
        (ConversationTemplateConfig(chat_template=unmarked(AS_JSON)), "<|im_end|>"),
        (ConversationTemplateConfig(chat_template=ALTERNATING), "<|im_end|>"),
        (ConversationTemplateConfig(chat_template=AS_JSON), "<|im_end|>\n"),
    ],
)
@pytest.mark.parametrize("flags", [(True, True, True), (False, True, True), (True, False, True), (True, True, False)])
def test_plain_sequences_keep_to_flags_and_begin_with_answers(template: Any, end: str, flags: Any) -> None:
    config = MultiModalSampleConfig(image_token=ImageToken(token_id=IMAGE), conversation_template_config=template)
    encoder = MultiModalTaskEncoder(Letters(), None, config, 2000)
    said = iter(zip(("one", "two", "three"), flags, strict=True))
    turns = [Turn("assistant", *next(said)), Turn("user", "a"), Turn("assistant", *next(said)), Turn("user", "b")]
    turns.append(Turn("assistant", *next(said)))
    encoder.register_encoder(VQASample, lambda sample, config: Conversation(turns=turns))
    sample: Any = encoder.encode_sample(VQASample(__key__="q", image=None, context=""))  # type: ignore[arg-type]
    learned = encoder.tokenizer.decode(sample.labels[sample.loss_mask.bool()])
    expected = [f"{turn.text}{end}" for turn in turns if turn.role == "assistant" and turn.learned]
    assert learned.replace(" ", "") == "".join(expected)
    assert sample.answer == next(turn.text for turn in turns if turn.role == "assistant" and turn.learned)


@pytest.mark.parametrize(("family", "token"), [("llava", "</s>"), ("qwen2_vl", "<|im_end|>"), ("qwen2_vl", "<pad>")])
def test_control_tokens_in_texts_are_named_with_their_sample(
    family: str, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model gets them as from transformers, which writes the conversation and takes it apart in one step."""
    chats = encoder_of(family)
    tokenizer = chats.tokenizer
    plain = MultiModalTaskEncoder(tokenizer, None)
    for encode in (chats.encode, plain.encode_sample):
        conversation._counts.clear()
        caplog.clear()
        sample: Any = encode(chat("a", "b", "c", f"red {token} blue", key="odd"))
        theirs = tokenizer.apply_chat_template(
            chat("a", "b", "c", f"red {token} blue").messages, tokenize=True, return_dict=False
        )
        number = tokenizer.convert_tokens_to_ids(token)
        tokens = [*sample.tokens.tolist(), int(sample.labels[-1])]
        assert tokens.count(number) == theirs.count(number)
        assert f"message 4 (assistant) of sample 'odd' has {token!r} in its text" in caplog.text
        for _ in range(9):
            encode(chat("a", f"red {token}"))
        encode(chat("a", f"{token[:-1]} > and <|vision|>"))
        assert [line.rsplit(": ", 1)[1] for line in caplog.text.splitlines() if token in line] == ["1)", "10)"]
    conversation._counts.clear()
    caplog.clear()
    plain.encode_sample(TextSample(__key__="text", text=f"one{token}two"))
    assert f"text 1 of sample 'text' has {token!r} in its text" in caplog.text


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_a_tokenizer_without_an_end_is_named_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = encoder_of("llava").tokenizer

    def learned(text: str) -> list[int]:
        chats = ChatTemplateTaskEncoder(tokenizer, None)
        encode = chats.encode if kind == "chat" else MultiModalTaskEncoder(tokenizer, None).encode_sample
        sample: Any = encode(TextSample(__key__="t", text=text))
        return [int(one) for one in sample.labels[sample.loss_mask.bool()]][-2:]

    tokens = tokenizer.encode("red color", add_special_tokens=False)
    assert learned("red color") == [tokens[-1], tokenizer.eos_token_id]
    assert not caplog.text
    tokenizer.eos_token = None
    for _ in range(2):
        assert learned("red color") == tokens[-2:]
    assert caplog.text.count("the tokenizer has no eos_token, so the model does not learn to end") == 1


# From the list to the tokens ------------------------------------------------------------------------------------------


def test_a_list_is_converted_and_trained_with_all_that_it_says(tmp_path: Path) -> None:
    entries = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "c.png"}, {"type": "text", "text": "zoom in"}]},
                *agent('{"x": 1}')[1:],
            ],
            "tools": TOOLS,
        },
        {
            "conversations": [
                {"from": "gpt", "value": "hello", "weight": 0},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
            ],
            "system": "Be brief.",
            "tools": json.dumps(TOOLS),
            "images": [],
        },
    ]
    picture().save(tmp_path / "c.png")
    (tmp_path / "list.json").write_text(json.dumps(entries))
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", str(tmp_path / "list.json"), str(out), "--split-ratio", "1,0,0"])
    assert done.exit_code == 0, done.output
    assert "python -m energon_bridge.training" in done.output

    pytest.importorskip("lightning.pytorch")
    from energon_bridge.models.conversations.cooker import COOKERS, cook_conversation

    def batches(encoder: Any) -> list[Any]:
        encoder.cookers = COOKERS
        workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
        dataset = get_train_dataset(
            out, worker_config=workers, batch_size=1, task_encoder=encoder, repeat=False, shuffle_buffer_size=None
        )
        return sorted(get_loader(dataset), key=lambda batch: batch.__key__)

    call = '<tool_call>zoom {"x": 1}</tool_call><|im_end|>\n'
    encoder = encoder_with(AS_JSON)
    listed = f"<|im_start|>system\n{json.dumps(TOOLS[0])}<|im_end|>\n"
    brief = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\nhello"
    expected = [
        (1, f"{call}red<|im_end|>\n", f"{listed}<|im_start|>user\n<|vision_start|>"),
        (0, "a<|im_end|>\n", listed + brief),
    ]
    for batch, (images, learned, begin) in zip(batches(encoder), expected, strict=True):
        assert batch.num_images == [images]
        assert encoder.tokenizer.decode(batch.labels[batch.loss_mask.bool()]) == learned
        assert encoder.tokenizer.decode(batch.tokens[0]).startswith(begin)

    config = MultiModalSampleConfig(conversation_template_config=llava_template())
    plain = MultiModalTaskEncoder(Letters(), None, config)
    sample: Any = plain.encode_sample(cook_conversation({"__key__": "q", "json": entries[1]}))
    assert plain.tokenizer.decode(sample.labels[sample.loss_mask.bool()]) == " a</s>"
    assert plain.tokenizer.decode(sample.tokens).startswith("Be brief. ASSISTANT: hello</s>USER: q ASSISTANT:")
    with pytest.raises(SampleError, match=r"no text but tool_calls, .*set data\.chat_template"):
        plain.encode_sample(cook_conversation({"__key__": "q", "json": entries[0], "0.png": picture()}))

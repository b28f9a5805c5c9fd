"""What templates mark (`{% generation %}`), against the masks of transformers: of its tokenizers and processors."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
from families import encoder_of, image_processor_of, picture, tokenizer_of

pytest.importorskip("transformers")

from multimodal import SlowTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from energon_bridge.core.errors import UnfitSampleError
from energon_bridge.core.samples import VQASample
from energon_bridge.models.conversations.conversation import Conversation, Turn
from energon_bridge.models.conversations.layout import ConversationTemplateConfig, ImageToken, MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import QWEN_VL_TEMPLATE, ChatConfig, ChatSample, ChatTemplateTaskEncoder

_TEXT = "{{ (m.content if m.content is string else m.content | map(attribute='text') | join) | trim }}"


def marked(answer: str) -> str:
    """Return a template whose assistant turns are `answer`, for other turns ChatML."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' }}" + _TEXT + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


_HEAD = "{{ '<|im_start|>assistant\n' }}"
TEMPLATES = {
    "the end is marked, a special token follows": marked(
        _HEAD + "{% generation %}" + _TEXT + "{{ '<|im_end|>' }}{% endgeneration %}"
    ),
    "the end and its line break": marked(
        _HEAD + "{% generation %}" + _TEXT + "{{ '<|im_end|>\n' }}{% endgeneration %}"
    ),
    "the end is not marked": marked(_HEAD + "{% generation %}" + _TEXT + "{% endgeneration %}{{ '<|im_end|>\n' }}"),
    "white space is controlled": marked(
        _HEAD + "\n  {%- generation -%}\n  " + _TEXT + "{{ '<|im_end|>' }}\n  {%- endgeneration -%}\n  {{ '\n' }}"
    ),
    "the header is marked": marked("{% generation %}" + _HEAD + _TEXT + "{{ '<|im_end|>' }}{% endgeneration %}"),
    "blanks inside and outside": marked(
        _HEAD + "{{ 'a ' }}{% generation %}" + _TEXT + "{{ ' ' }}{% endgeneration %}{{ 'z<|im_end|>' }}"
    ),
    "several marks": marked(
        _HEAD + "{% generation %}{{ m.reasoning_content | default('hm') }}{% endgeneration %}{{ '/' }}"
        "{% generation %}" + _TEXT + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    ),
    "the answer is cut inside a word": marked(
        "{{ '<|im_start|>assistant\ncol' }}{% generation %}" + _TEXT + "{% endgeneration %}{{ 'many<|im_end|>' }}"
    ),
}
# As LLaVA in transformers has it.
TEMPLATES["a blank behind the answer"] = (
    marked("{{ 'ASSISTANT: ' }}{% generation %}" + _TEXT + "{{ ' ' }}{% endgeneration %}")
    .replace("<|im_start|>' + m.role + '\n", "USER: ")
    .replace("<|im_end|>\n", " ")
)
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two questions": [
        {"role": "user", "content": "color?"},
        {"role": "assistant", "content": "or? how"},
        {"role": "user", "content": "how many?"},
        {"role": "assistant", "content": "red"},
    ],
    "system, thoughts and a tool": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "color?"},
        {"role": "assistant", "content": "look", "reasoning_content": "so"},
        {"role": "tool", "content": "green"},
        {"role": "assistant", "content": "blue"},
        {"role": "user", "content": "bye"},
    ],
    "the answer first": [
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "color?"},
        {"role": "assistant", "content": ""},
    ],
}


@cache
def made(family: str) -> ChatTemplateTaskEncoder:
    return encoder_of(family)


def encoder_with(template: str, **settings: Any) -> ChatTemplateTaskEncoder:
    base = made("qwen2_vl")
    return ChatTemplateTaskEncoder(base.tokenizer, base.family, ChatConfig(chat_template=template, **settings))


def ours(sample: Any) -> tuple[list[int], list[int]]:
    """Return all tokens of a sample, and which are learned."""
    return ([*sample.tokens.tolist(), int(sample.labels[-1])], [0, *sample.loss_mask.long().tolist()])


def theirs(out: Any) -> tuple[list[int], list[int]]:
    """Return what transformers says, up to the last token that is learned: a first token is never one to predict."""
    tokens, mask = list(out["input_ids"]), [int(one) for one in out["assistant_masks"]]
    end = len(mask) - mask[::-1].index(1)
    return tokens[:end], [0, *mask[1:end]]


@pytest.mark.parametrize("talk", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_marked_is_learned_token_by_token(template: str, talk: str) -> None:
    source, messages = TEMPLATES[template], CONVERSATIONS[talk]
    encoder = encoder_with(source)
    out = encoder.tokenizer.apply_chat_template(
        messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    sample = encoder.encode(ChatSample(__key__="q", messages=messages))
    assert ours(sample) == theirs(out)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_tokenizer_without_offsets_learns_the_marked_text(template: str) -> None:
    base, source = encoder_with(TEMPLATES[template]), TEMPLATES[template]
    encoder = ChatTemplateTaskEncoder(SlowTokenizer(base.tokenizer), base.family, base.config)
    sample = encoder.encode(ChatSample(__key__="q", messages=CONVERSATIONS["two questions"]))
    (text,), (marks,) = render_jinja_template(
        conversations=[CONVERSATIONS["two questions"]], chat_template=source, return_assistant_tokens_mask=True
    )
    learned = encoder.tokenizer.decode(sample.labels[sample.loss_mask.bool()])
    assert learned == "".join(text[start:end] for start, end in marks)


@pytest.mark.parametrize("template", TEMPLATES)
def test_images_in_the_turns_move_what_is_learned(template: str) -> None:
    """Against a processor, which writes the tokens of images out."""
    from transformers import LlavaProcessor

    image = "{{ '<image>' * (m.content | selectattr('type', 'equalto', 'image') | list | length) }}"
    source = TEMPLATES[template].replace("m.content | map", "m.content | selectattr('text') | map")
    source = source.replace("{% else %}", "{% else %}" + image, 1)
    tokenizer = tokenizer_of("llava")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<|im_start|>", "<|im_end|>"]})
    processor = LlavaProcessor(
        image_processor=image_processor_of("llava"),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=source,
    )

    def turns(**image: Any) -> list[dict[str, Any]]:
        said = [("user", "color?"), ("assistant", "or? how"), ("user", "and?"), ("assistant", "red")]
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
        for message in messages[::2]:
            message["content"].insert(0, {"type": "image", **image})  # type: ignore[attr-defined]
        return messages

    out = processor.apply_chat_template(
        turns(image=picture()), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    family = made("llava").family
    encoder = ChatTemplateTaskEncoder(tokenizer, family, ChatConfig(chat_template=source, add_bos=False))
    sample = encoder.encode(ChatSample(__key__="q", messages=turns(), images=[picture(), picture()]))
    assert sample.num_images == 2
    assert ours(sample) == theirs({name: list(out[name][0]) for name in ("input_ids", "assistant_masks")})


def unended(template: str) -> str:
    return "".join(template.split("<|im_end|>"))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (TEMPLATES["the end is not marked"], "before '<|im_end|>'"),
        (TEMPLATES["the end and its line break"], None),
        (TEMPLATES["the end is marked, a special token follows"], None),
        (TEMPLATES["a blank behind the answer"], "without a special token"),
        (unended(TEMPLATES["the end and its line break"]), "without a special token"),
        (QWEN_VL_TEMPLATE, None),
        (unended(QWEN_VL_TEMPLATE), "without a special token"),
    ],
)
def test_a_template_that_leaves_the_end_of_answers_out_is_named_once(
    template: str, complaint: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    chat = encoder_with(template)
    talk = ConversationTemplateConfig(chat_template=template)
    plain = MultiModalTaskEncoder(chat.tokenizer, None, MultiModalSampleConfig(conversation_template_config=talk))
    for encode in (chat.encode, plain.encode_sample):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                encode(ChatSample(__key__="q", messages=CONVERSATIONS["two questions"]))
        assert caplog.text.count("does not learn to end its answers") == (complaint is not None)
        assert (complaint or "") in caplog.text


def flagged(talk: str, *flags: int, **more: Any) -> list[dict[str, Any]]:
    weights = iter(flags)
    return [
        {**message, **more, "weight": next(weights)} if message["role"] == "assistant" else message
        for message in CONVERSATIONS[talk]
    ]


@pytest.mark.parametrize("flags", [(0, 1), (1, 0)])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_marks_of_an_answer_that_is_left_out_are_not_learned(template: str, flags: tuple[int, int]) -> None:
    """The others are as they were: their tokens are those of the masks of a conversation with one answer fewer."""
    source = TEMPLATES[template]
    encoder = encoder_with(source)

    def learned(messages: list[dict[str, Any]]) -> list[int]:
        sample = encoder.encode(ChatSample(__key__="q", messages=messages))
        return list(sample.labels[sample.loss_mask.bool()].tolist())

    both = learned(flagged("two questions", 1, 1))
    first = learned(CONVERSATIONS["two questions"][:2] + CONVERSATIONS["two questions"][2:3])
    assert learned(flagged("two questions", *flags)) == (first if flags[0] else both[len(first) :])
    last = encoder_with(source, learn="last")
    sample = last.encode(ChatSample(__key__="q", messages=CONVERSATIONS["two questions"]))
    assert sample.labels[sample.loss_mask.bool()].tolist() == both[len(first) :]


def test_marks_that_cannot_be_told_apart_are_refused() -> None:
    forgetful = marked(
        _HEAD + "{% if loop.last %}{% generation %}hm {% endgeneration %}{% endif %}"
        "{% generation %}" + _TEXT + "{{ '<|im_end|>' }}{% endgeneration %}"
    )
    messages = [*CONVERSATIONS["two questions"], {"role": "assistant", "content": "blue"}]
    messages[3] = {**messages[3], "train": False}
    encoder = encoder_with(forgetful)
    encoder.encode(ChatSample(__key__="q", messages=CONVERSATIONS["two questions"]))
    with pytest.raises(UnfitSampleError, match="which marks belong to which turn cannot be told"):
        encoder.encode(ChatSample(__key__="q", messages=messages))


@pytest.mark.parametrize("template", TEMPLATES)
def test_plain_sequences_learn_what_is_marked(template: str) -> None:
    """Of `MultiModalTaskEncoder`, which tokenises in pieces: by a tokenizer of letters, where that is the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(
        models.BPE(vocab={one: n for n, one in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, additional_special_tokens=special, pad_token="!")
    config = MultiModalSampleConfig(
        image_token=ImageToken(token_id=9999),
        conversation_template_config=ConversationTemplateConfig(chat_template=TEMPLATES[template]),
    )
    encoder = MultiModalTaskEncoder(tokenizer, None, config, 1000)
    messages = [*CONVERSATIONS["two questions"], *CONVERSATIONS["two questions"]]
    turns = [Turn(message["role"], message["content"]) for message in messages]
    encoder.register_encoder(VQASample, lambda sample, config: Conversation(turns=turns))
    sample = encoder.encode_sample(VQASample(__key__="q", image=None, context=""))  # type: ignore[arg-type]
    out = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES[template], return_dict=True, return_assistant_tokens_mask=True
    )
    assert ours(sample) == theirs(out)

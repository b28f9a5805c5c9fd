"""What is learned of conversations, against strings: for each family's template, marked answers, and odd templates."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from families import chat, encoder_of, picture, text_of, tokenizer_of
from hypothesis import given, settings, strategies as st
from multimodal import SlowTokenizer

pytest.importorskip("transformers")

from energon_bridge.core.encoder.hooks import TALLY, Setting
from energon_bridge.core.errors import (
    ConfigurationError,
    OverLongSampleError,
    SampleError,
    SkipSample,
    UnfitSampleError,
)
from energon_bridge.models.conversations.conversation import read_conversation
from energon_bridge.models.conversations.rendering import TextPiece
from energon_bridge.models.conversations.templates import ChatTemplate
from energon_bridge.models.families import (
    CHATML_TEMPLATE,
    LLAVA_TEMPLATE,
    ChatConfig,
    ChatTemplateTaskEncoder,
    FixedTokenFamily,
)
from energon_bridge.models.families.rendering import make_renderer, tokenize_segments
from energon_bridge.training.presets import QWEN_TOKENS, train_tokenizer

# As the models of Qwen2-VL have it: a default system prompt, and numbers of pictures on demand.
QWEN = (
    "{% set shown = namespace(images=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{% set shown.images = shown.images + 1 %}"
    "{% if add_vision_id %}Picture {{ shown.images }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As LLaVA in transformers has it: the images of a turn first, answers marked, no end of an answer.
VICUNA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% else %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
STRINGS = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Thoughts stay in the last answer only.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% set text = message['content'] if message['content'] is string else message['content'][0]['text'] %}"
    "{{ text if loop.last or message['role'] == 'user' else text.split('/think ')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message['content'] }}{% endfor %}"
)
_PIC = "<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>"
_SHOT = "<image><image><image><image>"

CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str, list[str]]] = {
    "qwen": (
        "qwen2_vl",
        {},
        ("<image>a", "b", "c<image>", "d"),
        f"<|im_start|>user\n{_PIC}a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc{_PIC}<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>",
        ["b<|im_end|>", "d<|im_end|>"],
    ),
    "qwen, of the model": (
        "qwen2_5_vl",
        {"chat_template": QWEN, "template_kwargs": {"add_vision_id": True}},
        ("<image>\n<image>\na", "b", "c", "d"),
        f"<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nPicture 1: {_PIC}Picture 2: {_PIC}a<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>",
        ["b<|im_end|>", "d<|im_end|>"],
    ),
    "qwen, system": (
        "qwen3_vl",
        {"system": "be kind", "chat_template": QWEN},
        ("a", "b"),
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>",
        ["b<|im_end|>"],
    ),
    "qwen, empty answers": (
        "qwen2_vl",
        {},
        ("a", "", "c", ""),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>",
        ["<|im_end|>", "<|im_end|>"],
    ),
    "qwen, the answer repeats the question": (
        "qwen2_vl",
        {},
        ("assistant\na", "assistant\na"),
        "<|im_start|>user\nassistant\na<|im_end|>\n<|im_start|>assistant\nassistant\na<|im_end|>",
        ["assistant\na<|im_end|>"],
    ),
    "qwen, the last answer only": (
        "qwen2_vl",
        {"learn": "last"},
        ("a", "b", "c", "d"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>",
        ["d<|im_end|>"],
    ),
    "thoughts, the last answer only": (
        "qwen2_vl",
        {"learn": "last", "chat_template": FORGETFUL},
        ("a", "so /think b", "c", "hm /think d"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\nhm /think d<|im_end|>",
        ["hm /think d<|im_end|>"],
    ),
    "marks, the end behind them": (
        "qwen2_vl",
        {"chat_template": MARKED},
        ("<image>a", "b", "c", "d"),
        f"<|im_start|>user\n{_PIC}a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\nd",
        ["b", "d"],
    ),
    "llava": (
        "llava",
        {},
        ("<image>\na", "b", "c<image>", "d"),
        f"USER: {_SHOT}\na ASSISTANT: b</s>USER: c{_SHOT}\n ASSISTANT: d</s>",
        [" b</s>", " d</s>"],
    ),
    "llava, system and begin": (
        "llava",
        {"system": "be kind", "add_bos": True},
        ("<image>a", ""),
        f"<s>be kind USER: {_SHOT}\na ASSISTANT: </s>",
        [" </s>"],
    ),
    "texts only": (
        "llava",
        {"chat_template": STRINGS},
        ("<image>\na", "b", "c", "d"),
        f"[user] {_SHOT}\na</s>[assistant] b</s>[user] c</s>[assistant] d</s>",
        [" b</s>", " d</s>"],
    ),
}


def learned_of(encoder: ChatTemplateTaskEncoder, sample: Any) -> list[str]:
    """Return the learned stretches."""
    texts: list[list[int]] = [[]]
    for token, learned in zip(sample.labels.tolist(), sample.loss_mask.tolist(), strict=True):
        if learned:
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return [encoder.tokenizer.decode(text) for text in texts if text]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("case", CASES)
def test_answers_and_their_ends_are_learned_and_nothing_else(case: str, fast: bool) -> None:
    family, config, texts, whole, learned = CASES[case]
    made = encoder_of(family, ChatConfig(**config))
    tokenizer = made.tokenizer if fast else SlowTokenizer(made.tokenizer)
    encoder = ChatTemplateTaskEncoder(tokenizer, made.family, made.config)
    images = [picture() for _ in range(sum(text.count("<image>") for text in texts))]
    sample = encoder.encode(chat(*texts, images=images))
    assert text_of(encoder, sample) == whole
    assert learned_of(encoder, sample) == learned
    assert sample.num_images == len(images)
    assert sample.answer == texts[1]
    assert (sample.labels[~sample.loss_mask.bool()] == -100).all()


@pytest.fixture(scope="module")
def encoder() -> ChatTemplateTaskEncoder:
    return encoder_of("qwen2_vl")


_TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>|"), max_size=12)


@given(st.lists(st.tuples(_TEXTS, _TEXTS), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_whatever_the_texts_are_answers_are_learned(
    encoder: ChatTemplateTaskEncoder, turns: list[tuple[str, str]]
) -> None:
    sample = encoder.encode(chat(*[text for turn in turns for text in turn]))
    assert learned_of(encoder, sample) == [f"{answer}<|im_end|>" for _, answer in turns]


# Thoughts are written anew in the last answer, and left out of the others; blanks around texts go.
THINKING = (
    "{% for message in messages %}{% set text = message['content'] if message['content'] is string else "
    "message['content'] | map(attribute='text') | join %}{% if message['role'] == 'assistant' and '/t' in text %}"
    "{% set text = ('[' + text.split('/t')[0].strip() + '] ' if loop.last else '') + text.split('/t')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + text | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Nothing stands behind an answer.
BARE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
SHOUTING = "{% for message in messages %}{{ (message['role'] + message['content']) | upper }}{% endfor %}"
_SAID = st.text(st.sampled_from("ab \n\t/"), max_size=6) | st.sampled_from(["", "so /t b", "word0ofatext", "user:"])


@pytest.mark.parametrize("learn", ["all", "last"])
@pytest.mark.parametrize("template", [QWEN, STRINGS, FORGETFUL, THINKING, BARE, SHOUTING], ids=lambda text: text[-60:])
@given(turns=st.lists(st.tuples(_SAID, _SAID), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_one_rendering_finds_what_all_renderings_find(
    encoder: ChatTemplateTaskEncoder, template: str, learn: Any, turns: Any
) -> None:
    renderer = make_renderer(encoder.tokenizer, encoder.family, template=template, learn=learn, options={})
    content = read_conversation(chat(*[text for turn in turns for text in turn]))
    # With tools, which these templates do not write, nothing is predicted.
    with_tools = replace(content, tools=[{"type": "function", "function": {"name": "search"}}])
    try:
        expected = renderer.segments(with_tools)
    except SampleError as error:
        with pytest.raises(type(error)):
            renderer.segments(content)
        return
    assert renderer.segments(content) == expected


def test_a_conversation_of_a_known_shape_is_rendered_once(encoder: ChatTemplateTaskEncoder) -> None:
    rendered = []

    class Counting:
        def apply_chat_template(self, *args: Any, **options: Any) -> Any:
            rendered.append(1)
            return encoder.tokenizer.apply_chat_template(*args, **options)

    renderer = make_renderer(Counting(), encoder.family, template=QWEN, learn="all", options={})
    counts = []
    for text in ("a", "b", "c"):
        rendered.clear()
        renderer.segments(read_conversation(chat(f"<image>{text}", text, text, text, text, text, images=[picture()])))
        counts.append(len(rendered))
    assert counts[0] > counts[1] == counts[2] == 1


# A text is written, in some way; then all ways to do more with it, of those that this list knows.
WRITTEN = (
    "{{ text }}",
    "{{ '<' + text + '>' }}",
    "{{ text if text is string and text else 'none' }}",
    "{% macro say(it) %}{{ it + '!' }}{% endmacro %}{{ say(text) }}",
    "{% set whole %}<{{ text }}>{% endset %}{{ whole }}",
    "{% set held = namespace(it=text) %}{{ held.it }}{{ message | length }}",
    "{{ message.get('content') }}{{ (message['role'] | upper)[:2] }}",
    "{{ text }}{{ strftime_now('%d %B') }}",
)
READ = (
    "{{ text | trim }}",
    "{{ text.strip() }}",
    "{{ text | lower }}",
    "{{ 'x' if text.startswith('/t') else text }}",
    "{{ text.split('/t')[-1] }}",
    "{{ 'x' if '/t' in text else text }}",
    "{{ 'x' if text == '/t' else text }}",
    "{{ 'x' if '/t' != text else text }}",
    "{{ 'x' if text in ['/t'] else text }}",
    "{{ 'x' if [text] == ['/t'] else text }}",
    "{{ 'x' if text < 'b' else text }}",
    "{{ 'x' if text is eq '/t' else text }}",
    "{{ 'x' if text is lower else text }}",
    "{{ 'x' if text | length > 1 else text }}",
    "{{ 'x' if text | int else text }}",
    "{{ 'x' if (text ~ '') == '/t' else text }}",
    "{{ 'x' if '%s' % [text] == '/t' else text }}",
    "{{ 'x' if '{}'.format(text) == '/t' else text }}",
    "{{ 'x' if [text] | join == '/t' else text }}",
    "{{ 'x' if text | tojson == '1' else text }}",
    "{{ 'x' if text | string == '1' else text }}",
    "{{ 'x' if {'/t': 1}.get(text) else text }}",
    "{{ 'x' if {'/t': 1}[text] else text }}",
    "{{ 'x' if dict(it=text) | tojson == '/t' else text }}",
    "{{ 'x' if messages | selectattr('content', 'equalto', '/t') | list else text }}",
    "{{ text[:2] }}",
    "{{ text[0] }}",
    "{{ text * 2 }}",
    "{{ text | replace('a', 'b') }}",
    "{{ message }}",
    "{{ [text] }}",
    "{% for letter in text %}{{ letter + ' ' }}{% endfor %}",
    "{% macro say(it) %}{{ it }}{% endmacro %}{{ 'x' if say(text) == '/t' else text }}",
    "{% macro say(it) %}{{ it }}{% endmacro %}{{ say(text).upper() }}",
    "{% set whole %}{{ text }}{% endset %}{{ whole | trim }}",
    "{% filter upper %}{{ text }}{% endfilter %}",
    "{% set held = namespace(it=text) %}{{ held.it[1:] }}",
    "{% if loop.changed(text) %}{{ text }}{% endif %}",
    "{{ text }}{{ ['a', 'b'] | random }}",
)


@pytest.mark.parametrize("way", [*WRITTEN, *READ])
def test_only_texts_that_a_template_writes_as_they_are_are_not_rendered(
    encoder: ChatTemplateTaskEncoder, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "{% for message in messages %}{% set text = message['content'] %}{{ message['role'] + ':' }}"
    end = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    renderer = make_renderer(encoder.tokenizer, encoder.family, template=start + way + end, learn="all", options={})
    rendered: list[Any] = []
    text = ChatTemplate.text
    monkeypatch.setattr(
        ChatTemplate, "text", lambda *given, **options: (rendered.append(1), text(*given, **options))[1]
    )
    for said in ("so", "/t", " /t  A", "1", "{{ text }}\n", "word0ofatext"):
        turns = [("user", said), ("assistant", said)]
        messages = [{"role": role, "content": content} for role, content in turns]
        rendered.clear()
        with contextlib.suppress(UnfitSampleError):  # the answer is another in the prompt, or empty
            found = renderer.segments(read_conversation({"messages": messages}))
            if "random" not in way:
                assert "".join(segment.text for segment in found) == text(renderer.plain, messages)
        assert said == "so" or bool(rendered) == (way in READ)


def test_no_text_is_put_in_where_it_is_empty_or_turns_have_keys(encoder: ChatTemplateTaskEncoder) -> None:
    template = STRINGS.replace(
        "'</s>'", "(message.values() | list | length) * '.' + ('</s>' if message.content else '')"
    )
    renderer = make_renderer(encoder.tokenizer, encoder.family, template=template, learn="all", options={})
    for said, keys in (("a", {}), ("", {}), ("b", {"name": "c"}), ("d", {})):
        turns = [{"role": "user", "content": said, **keys}, {"role": "assistant", "content": "e"}]
        found = renderer.segments(read_conversation({"messages": turns}))
        assert "".join(segment.text for segment in found) == renderer.plain.text(turns)


def test_tokens_are_those_of_the_whole_text() -> None:
    """With a tokenizer whose words begin with their space, as that of Llama."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<pad>", "<s>", "</s>", "<image>"], show_progress=False
    )
    text = "USER: what is it? ASSISTANT: a cat USER: sure? ASSISTANT: yes"
    inner.train_from_iterator([text] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )
    turns = [("user", "what is it?"), ("assistant", "a cat"), ("user", "sure?"), ("assistant", "yes")]
    messages = [{"role": role, "content": [{"type": "text", "text": said}]} for role, said in turns]
    for template in (VICUNA, tokenizer_of("llava").chat_template):
        encoder = ChatTemplateTaskEncoder(tokenizer, None, ChatConfig(chat_template=template))
        sample = encoder.encode(chat("what is it?", "a cat", "sure?", "yes"))
        if template == VICUNA:  # its marks end with the blank in front of the next turn
            out = tokenizer.apply_chat_template(
                messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            expected = [token for token, yes in zip(out["input_ids"], out["assistant_masks"], strict=True) if yes]
            assert sample.labels[sample.loss_mask.bool()].tolist() == expected
        else:
            assert [text.strip() for text in learned_of(encoder, sample)] == ["a cat</s>", "yes</s>"]
        whole = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
        shown = [*sample.tokens.tolist(), int(sample.labels[-1])]
        assert shown == expected[: len(shown)]


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([("say",), (" ",), ("yes", True)], [" yes"]),
        ([("say",), (" ",), ("",), ("yes", True)], [" yes"]),
        ([("say",), (" ",), ("", True), ("yes",)], []),  # an empty answer
        ([("say",), (" ", True), ("yes",)], []),
        ([("say",), (" yes  ", True), ("yes",)], [" yes"]),
    ],
)
def test_white_space_in_front_of_a_token_stays_with_what_it_says(segments: Any, expected: list[str]) -> None:
    tokenizer = train_tokenizer(["say yes", "yes say", "yes yes"] * 3, 300, QWEN_TOKENS)
    assert tokenizer.tokenize(" yes") == ["\u0120yes"]  # one token, the white space at its front
    tokens, are_learned, _ = tokenize_segments([TextPiece(*segment) for segment in segments], [], tokenizer, {}).rows
    learned = [token for token, yes in zip(tokens.tolist(), are_learned.tolist(), strict=True) if yes]
    assert [tokenizer.decode([token]) for token in learned] == expected
    text = "".join(segment[0] for segment in segments)
    assert text.startswith(tokenizer.decode(tokens.tolist()))


def test_templates_that_refuse_or_change_earlier_turns_are_named() -> None:
    encoder = encoder_of("qwen2_vl", ChatConfig(chat_template=FORGETFUL))
    encoder.encode(chat("a", "so /think b"))
    with pytest.raises(ConfigurationError, match=r"cannot be used for training on answer 1 of 2.*learn='last'"):
        encoder.encode(chat("a", "so /think b", "c", "d"))
    encoder = encoder_of("qwen2_vl", ChatConfig(chat_template=ALTERNATING))
    with pytest.raises(SampleError, match=r"sample 'q': the chat template rejects .*: roles must alternate"):
        encoder.encode(chat("a", "b", system="s"))


@pytest.mark.parametrize("template", ["{{ tools[0]['name'] }}: " + STRINGS, "{{ tools[0]['name'] }}: " + MARKED])
def test_tools_reach_the_template(template: str) -> None:
    encoder = encoder_of("qwen2_vl", ChatConfig(chat_template=template))
    sample = chat("a", "b")
    sample.tools = [{"name": "lens"}]
    assert text_of(encoder, encoder.encode(sample)).startswith("lens: ")


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tokenizer_of("llava")
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match=r"has no chat template.*, or data.chat_template of the"):
        ChatTemplateTaskEncoder(tokenizer, None)
    family = FixedTokenFamily(image_processor=None, image_tokens=2)
    assert ChatTemplateTaskEncoder(tokenizer, family, ChatConfig(chat_template=LLAVA_TEMPLATE)).family is family
    with pytest.raises(ConfigurationError, match="letter by letter"):
        ChatTemplateTaskEncoder(tokenizer, family, ChatConfig(chat_template=CHATML_TEMPLATE))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    assert ChatTemplateTaskEncoder(tokenizer, family, ChatConfig(chat_template=CHATML_TEMPLATE)).family is family


@pytest.fixture
def core_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings have the names of the core alone, whatever program an earlier test ran."""
    monkeypatch.setattr("energon_bridge.core.errors._CALLED", {})


NOTHING = (
    r"sample 'q': nothing to learn: seq_length=\d+ ends before the text to learn begins(, for it has no room for "
    r"image [12] of 2 \(4 tokens\))?; set seq_length to at least {needed} \({whole} for all of the sample\)$"
)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
@pytest.mark.usefixtures("core_names")
def test_a_cut_leaves_a_prefix_of_the_tokens_and_never_part_of_an_image(family: str) -> None:
    """At every length at which anything can be learned."""
    content = chat("<image>a", "bc", "d<image>", "ef", images=[picture(), picture()])
    whole = encoder_of(family).encode(content)
    first = int(whole.loss_mask.argmax())
    for length in range(1, len(whole.tokens) + 1):
        encoder = encoder_of(family, ChatConfig(seq_length=length))
        if length <= first:
            said = NOTHING.format(needed=first + 1, whole=len(whole.tokens))
            with pytest.raises(SampleError, match=said):
                encoder.encode(content)
            continue
        with Setting(TALLY, tally := Counter()):
            cut = encoder.encode(content)
        assert tally == ({"truncated": 1} if length < len(whole.tokens) else {})
        count = len(cut.tokens)
        assert length >= count >= length - 7  # an image and what stands around it goes as a whole
        for name in ("tokens", "labels", "loss_mask"):
            assert getattr(cut, name).tolist() == getattr(whole, name).tolist()[:count], name
        token = encoder.tokenizer.convert_tokens_to_ids(encoder.family.image_token)  # type: ignore[union-attr]
        assert cut.tokens.tolist().count(token) == 4 * cut.num_images
        assert encoder.counts["truncate seq_length"] == (length < len(whole.tokens))


@pytest.mark.parametrize(("policy", "error"), [("drop", SkipSample), ("raise", OverLongSampleError)])
@pytest.mark.parametrize("limit", ["seq_length", "max_num_images", "max_visual_tokens"])
def test_samples_over_a_limit_are_dropped_or_stop_the_run(limit: str, policy: Any, error: type[Exception]) -> None:
    limits = {"seq_length": 20, "max_num_images": 1, "max_visual_tokens": 7}
    config = ChatConfig(**{"over_long": policy, "over_limit": policy, limit: limits[limit]})
    encoder = encoder_of("qwen2_vl", config)
    content = chat("<image>a", "b", "<image>", "c", images=[picture(), picture()])
    with Setting(TALLY, tally := Counter()), pytest.raises(error, match=rf"sample 'q': .*{limit}={limits[limit]}"):
        encoder.encode(content)
    assert tally == ({"dropped": 1} if policy == "drop" else {})
    assert encoder.counts == {f"{policy} {limit}": 1}


@pytest.mark.parametrize("cut", [{"seq_length": 20}, {"max_num_images": 1, "over_limit": "truncate"}])
@pytest.mark.usefixtures("core_names")
def test_the_first_sample_that_is_cut_is_named(cut: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    content = chat("<image>a", "b", "<image>c", "d", images=[picture(), picture()])
    whole = len(encoder_of("qwen2_vl").encode(content).tokens)
    assert not caplog.records
    encoder = encoder_of("qwen2_vl", ChatConfig(**cut))
    kept = {len(encoder.encode(content).tokens) for _ in range(2)}
    by = "seq_length=20" if "seq_length" in cut else "a limit on images"
    (record,) = caplog.records
    assert record.getMessage().startswith(f"sample 'q' has {whole} tokens and is cut to {kept.pop()} by {by}: the rest")


def test_a_limit_of_images_that_leaves_nothing_is_named() -> None:
    encoder = encoder_of("qwen2_vl", ChatConfig(max_num_images=1, over_limit="truncate"))
    limit = (
        r"max_num_images or max_visual_tokens leaves out image 2 of 2 \(4 tokens\), and all text to learn comes after"
    )
    with pytest.raises(SampleError, match=limit):
        encoder.encode(chat("<image>a<image>", "b", images=[picture(), picture()]))


def test_a_limit_of_images_can_cut() -> None:
    encoder = encoder_of("qwen2_vl", ChatConfig(max_num_images=1, over_limit="truncate"))
    with Setting(TALLY, tally := Counter()):
        sample = encoder.encode(chat("<image>a", "b", "<image>c", "d", images=[picture(), picture()]))
    assert tally == {"truncated": 1}
    assert learned_of(encoder, sample) == ["b<|im_end|>"]
    assert sample.num_images == len(sample.visual["image_grid_thw"]) == 1
    assert encoder.counts == {"truncate max_num_images": 1}

"""The multimodal task encoder: which token carries loss, how images take their place, what is refused."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from families import image_processor_of, tokenizer_of
from multimodal import (
    BOS,
    EOS,
    IMAGE,
    PAD,
    GridProcessor,
    PixelProcessor,
    SlowTokenizer,
    WordTokenizer,
    caption,
    encoder,
    picture,
    question,
    trained_text,
)
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from energon_bridge.core.encoder.hooks import TALLY, Setting
from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.samples import CaptioningSample, InterleavedSample, VidQASample, VQASample
from energon_bridge.models.conversations.conversation import Conversation, Turn
from energon_bridge.models.conversations.layout import (
    ConversationTemplateConfig,
    ImageToken,
    MultiModalSampleConfig,
    chatml_template,
    llava_template,
    place_images,
    render,
)
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.conversations.texts import _token_lengths, tokenize, tokens_with_places
from energon_bridge.models.families import CHATML_TEMPLATE, ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.models.images.visual import as_pil, concat_visual
from energon_bridge.training.config import DataConfig
from energon_bridge.training.encoder import training_task_encoder
from energon_bridge.training.generation import prompts_of
from energon_bridge.training.presets import LLAVA_TOKENS, ModelBundle, train_tokenizer
from energon_bridge.training.shuffled_images import ShuffledImagesTaskEncoder


def test_only_the_caption_carries_loss_and_labels_are_shifted() -> None:
    sample = encoder(image_tokens_per_image=3).encode_sample(caption())
    assert sample.tokens.tolist() == [BOS, IMAGE, IMAGE, IMAGE, 4, 5, 6]
    assert sample.labels.tolist() == [-100, -100, -100, 4, 5, 6, EOS]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert (sample.tokens.dtype, sample.labels.dtype, sample.loss_mask.dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
    )
    assert (sample.__key__, sample.__restore_key__, sample.answer) == ("a", ("k", "a"), "the digit seven")


@pytest.mark.parametrize(
    ("answers", "weights", "expected"),
    [
        (["one", "two"], None, "one"),
        (["one", "two"], [0.2, 0.8], "two"),
        (["one", "two"], [0.5, 0.5], "one"),
        ("plain", None, "plain"),
    ],
)
def test_the_answer_of_most_weight_is_learned(answers: Any, weights: Any, expected: str) -> None:
    assert encoder().encode_sample(question("q", answers=answers, answer_weights=weights)).answer == expected


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (question(["q", "r"], answers=["a"]), "2 questions need a list of as many answers"),
        (question("q", answers=["a", "b"], answer_weights=[1.0]), "2 answers but 1 answer weights"),
        (question("<image> and <image>", answers=["a"]), "2 placeholders"),
        (caption("an <image>"), "contains the image placeholder"),
        (CaptioningSample(__key__="a", image=torch.zeros(2, 2), caption="x"), r"shape torch.Size\(\[2, 2\]\)"),
    ],
)
def test_samples_that_cannot_be_learned_are_refused_by_name(sample: Any, complaint: str) -> None:
    with pytest.raises(SampleError, match=complaint):
        encoder().encode_sample(sample)


def test_a_sample_type_without_a_meaning_here_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"encodes CaptioningSample, .* not VidQASample"):
        encoder().encode_sample(VidQASample(__key__="a", video=None, context="x"))


def test_system_prompt_and_stop_string() -> None:
    template = ConversationTemplateConfig(system="be brief", stop_string=" END", roles=("human", "gpt"))
    config = MultiModalSampleConfig(image_token=ImageToken(token_id=IMAGE), conversation_template_config=template)
    task_encoder = encoder(config=config)
    sample = task_encoder.encode_sample(question("q", answers=["yes"]))
    assert task_encoder.tokenizer.decode(sample.tokens[:5]) == "<s> be brief HUMAN: q"
    assert trained_text(task_encoder, sample) == "yes END"


def test_a_chat_template_brings_its_own_special_tokens() -> None:
    task_encoder = encoder()
    task_encoder.tokenizer.chat_template = "[assistant]"
    sample = task_encoder.encode_sample(question("q", answers=["yes"]))
    assert task_encoder.tokenizer.decode(sample.tokens) == "[user] q <image> </s> [assistant] yes"
    assert trained_text(task_encoder, sample) == "yes </s>"


def test_a_chat_template_that_does_not_continue_its_prompt_is_refused() -> None:
    config = MultiModalSampleConfig(conversation_template_config=ConversationTemplateConfig(chat_template="elsewhere"))
    with pytest.raises(ConfigurationError, match="add_generation_prompt"):
        render(Conversation(turns=[Turn("user", "q"), Turn("assistant", "a")]), config, WordTokenizer())


@pytest.mark.parametrize(("seq_length", "learned"), [(5, 2), (4, 1)])
def test_the_shortest_sequences_still_learn_something(seq_length: int, learned: int) -> None:
    with Setting(TALLY, tally := Counter()):
        sample = encoder(seq_length, image_tokens_per_image=3).encode_sample(caption())
    whole = encoder(image_tokens_per_image=3).encode_sample(caption())
    assert tally["truncated"] == (len(sample.tokens) < len(whole.tokens))
    assert sample.loss_mask.sum() == learned
    assert (sample.tokens == IMAGE).sum() == 3


def test_lengths_without_room_and_unknown_image_tokens_are_refused() -> None:
    for make, sample in (
        (partial(encoder, image_tokens_per_image=lambda visual: 3), caption()),
        (encoder, question("<image> a question of many words", answers=["x"])),
    ):
        whole = make().encode_sample(sample)
        needed = int(whole.loss_mask.argmax()) + 1  # labels are shifted by one: this many inputs give the first one
        assert make(needed).encode_sample(sample).loss_mask.sum() == 1
        said = rf"to at least {needed} \({len(whole.tokens)} for all of the sample\)"
        for length in range(1, needed):
            with pytest.raises(SampleError, match=rf"nothing to learn: seq_length={length} ends .*{said}"):
                make(length).encode_sample(sample)
    with pytest.raises(ConfigurationError, match="set seq_length to more than 16"):
        encoder(16, image_tokens_per_image=16)
    with pytest.raises(ConfigurationError, match="'<picture>'"):
        encoder(config=MultiModalSampleConfig(image_token=ImageToken(token_str="<picture>", token_id=None)))


@pytest.mark.parametrize(
    ("settings", "token", "count"),
    [
        ({"processor": GridProcessor()}, IMAGE, 24 // 4),
        ({"image_tokens_per_image": lambda visual: visual["pixel_values"].shape[-1]}, IMAGE, 4),
        ({"token_id": -200}, -200, 1),
        ({"token_id": 9}, 9, 1),
        ({"token_id": None}, IMAGE, 1),
    ],
)
def test_image_tokens_are_the_configured_ones(settings: Any, token: int, count: int) -> None:
    assert encoder(**settings).encode_sample(caption()).tokens.tolist().count(token) == count


def test_a_tokenizer_is_needed_and_an_image_processor_for_images() -> None:
    with pytest.raises(ConfigurationError, match="needs a tokenizer and, for images, an image processor"):
        MultiModalTaskEncoder(None, PixelProcessor())
    task_encoder = MultiModalTaskEncoder(WordTokenizer(), None)
    text = InterleavedSample(__key__="a", __restore_key__=("k", "a"), sequence=["one two"])
    assert trained_text(task_encoder, task_encoder.encode_sample(text)) == "one two </s>"
    with pytest.raises(ConfigurationError, match="the sample has an image"):
        task_encoder.encode_sample(caption())


def test_every_form_of_an_image_gives_the_same_pixels() -> None:
    rgb = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5
    chw = torch.from_numpy(rgb).permute(2, 0, 1)
    forms = [Image.fromarray(rgb), rgb, rgb.astype(np.float32) / 255, chw, chw / 255]
    for image in forms:
        assert np.array_equal(np.asarray(as_pil(image)), rgb), type(image)
    assert np.asarray(as_pil(torch.full((1, 2, 2), 7, dtype=torch.uint8))).tolist() == [[[7, 7, 7]] * 2] * 2


def test_a_batch_is_padded_on_the_right() -> None:
    task_encoder = encoder(image_tokens_per_image=2)
    samples = [
        task_encoder.encode_sample(caption("one", "a", 10)),
        task_encoder.encode_sample(caption("one two", "b", 20)),
    ]
    batch = task_encoder.batch(samples)
    assert batch.__key__ == ["a", "b"]
    assert batch.__restore_key__ == (("k", "a"), ("k", "b"))
    assert batch["tokens"].tolist() == [[BOS, IMAGE, IMAGE, 4, PAD], [BOS, IMAGE, IMAGE, 4, 5]]
    assert batch["labels"].tolist() == [[-100, -100, 4, EOS, -100], [-100, -100, 4, 5, EOS]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch["pixel_values"].shape == (2, 3, 4, 4)
    assert batch["pixel_values"][:, 0, 0, 0].mul(255).round().tolist() == [10, 20]
    assert batch.answers == ["one", "one two"]
    assert batch.__valid__ is None


@pytest.mark.parametrize(("kwargs", "length"), [({"pad_to_multiple_of": 4}, 8), ({"pad_to_max_length": True}, 32)])
def test_the_padded_length_can_be_fixed(kwargs: dict[str, Any], length: int) -> None:
    task_encoder = encoder(image_tokens_per_image=2, **kwargs)
    batch = task_encoder.batch([task_encoder.encode_sample(caption())])
    assert {batch[name].shape for name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")} == {
        (1, length)
    }


def test_visual_outputs_of_unequal_size_are_padded() -> None:
    joined = concat_visual([{"x": torch.ones(1, 2, 3)}, {"x": torch.ones(2, 4, 1)}])["x"]
    assert joined.shape == (3, 4, 3)
    assert joined.sum(dim=(1, 2)).tolist() == [6, 4, 4]


def test_everything_the_processor_returns_reaches_the_model() -> None:
    task_encoder = encoder(processor=GridProcessor())
    batch = task_encoder.batch([task_encoder.encode_sample(caption(key=key)) for key in "ab"])
    assert batch.pixel_values.shape == (48, 8)
    assert batch.visual_inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 4, 6]]


def test_shuffled_images_belong_to_other_samples() -> None:
    task_encoder = encoder(kind=ShuffledImagesTaskEncoder)
    samples = [task_encoder.encode_sample(caption(str(value), str(value), value)) for value in (10, 20, 30)]
    batch = task_encoder.batch(samples)
    assert batch.answers == ["10", "20", "30"]
    assert batch.pixel_values[:, 0, 0, 0].mul(255).round().tolist() == [30, 10, 20]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_control_is_a_setting(shuffle: bool) -> None:
    bundle = ModelBundle(
        model=None, tokenizer=WordTokenizer(), image_processor=PixelProcessor(), image_token_id=IMAGE, image_tokens=16
    )
    task_encoder = training_task_encoder(DataConfig(shuffle_images=shuffle), bundle)
    assert isinstance(task_encoder, ShuffledImagesTaskEncoder) is shuffle
    assert (task_encoder.encode_sample(caption()).tokens == IMAGE).sum() == 16


def test_prompts_end_where_the_answer_begins() -> None:
    task_encoder = encoder(image_tokens_per_image=2)
    samples = [
        task_encoder.encode_sample(caption("one two three")),
        task_encoder.encode_sample(question("what <image>", answers=["yes"])),
    ]
    tokens, mask = prompts_of(task_encoder.batch(samples), PAD)
    decode = task_encoder.tokenizer.decode
    assert decode(tokens[0]) == "<pad> <pad> <pad> <s> <image> <image>"
    assert decode(tokens[1]) == "<s> USER: what <image> <image> ASSISTANT:"
    assert mask.tolist() == [[0, 0, 0, 1, 1, 1], [1] * 6]


def test_a_row_without_loss_is_all_prompt() -> None:
    task_encoder = encoder(image_tokens_per_image=2)
    batch = task_encoder.batch([task_encoder.encode_sample(caption("one")), task_encoder.encode_sample(caption())])
    batch.loss_mask[0] = 0
    tokens, mask = prompts_of(batch, PAD)
    length = int(batch.attention_mask[0].sum())
    assert tokens[0].tolist() == batch.tokens[0, :length].tolist()
    assert mask.sum(dim=1).tolist() == [length, 3]


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
@pytest.mark.parametrize("wanted", ["<|image_pad|>", None])
def test_texts_with_the_tokens_of_media_are_refused(token: str, wanted: str | None) -> None:
    tokenizer = tokenizer_of("qwen2_vl")
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = MultiModalSampleConfig(image_token=ImageToken(token_str=wanted or "<image>", token_id=image))
    encoder = MultiModalTaskEncoder(tokenizer, image_processor_of("qwen2_vl"), config, 64)
    for said in ((f"a {token} b", "c"), ("a", f"b {token}")):
        for shown in ((), (Image.new("RGB", (16, 16)),)):
            sample = VQASample(__key__="q", image=list(shown), context=said[0], answers=[said[1]])  # type: ignore[arg-type]
            if (token, said[1], len(shown)) == ("<|image_pad|>", "c", 1):
                assert encoder.encode_sample(sample).tokens.tolist().count(image) == 4  # it is the placeholder
                continue
            with pytest.raises(SampleError, match=r"contains|placeholders|looks like a place"):
                encoder.encode_sample(sample)


def test_a_question_keeps_its_own_placeholder() -> None:
    config = MultiModalSampleConfig()
    assert place_images("see <image>?", 1, config) == "see <image>?"
    assert place_images("see?", 2, config) == "see?\n<image>\n<image>"


@pytest.mark.parametrize("seq_length", [24, 256])
def test_fast_tokenizers_are_called_once_for_all_texts_of_a_sample(seq_length: int) -> None:
    texts = ["a cat, and a dog", "", "two birds  in a tree", "nothing more"]
    tokenizer = train_tokenizer(texts, 300, LLAVA_TOKENS)
    sequence = [part for text in texts for part in (Image.new("RGB", (4, 4)), text)]
    sample = InterleavedSample(__key__="one", sequence=sequence)
    config = MultiModalSampleConfig(image_token=ImageToken(token_str="<image>", before="a ", after=" dog"))
    calls: list[Any] = []

    class Counted(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return super().__call__(*args, **kwargs)

    counted = copy.copy(tokenizer)
    counted.__class__ = Counted
    fast, asked, slow = (
        MultiModalTaskEncoder(one, PixelProcessor(), config, seq_length, image_tokens_per_image=3)
        for one in (tokenizer, counted, SlowTokenizer(tokenizer))
    )
    ours = [fast.encode_sample(sample), *(asked.encode_sample(sample) for _ in range(5))]
    assert len(calls) == 5 + 1  # and what stands around each image, once
    theirs = slow.encode_sample(sample)
    for one in ours:
        assert torch.equal(one.tokens, theirs.tokens)
        assert torch.equal(one.loss_mask, theirs.loss_mask)
        assert one.num_images == theirs.num_images


SPLITS = pre_tokenizers.Split(Regex(r"\\s+|\\d|[^\\s\\d]+"), "isolated")
"""As in tokenizers of Qwen and Llama 3, whose regular expression stands before their bytes."""


@pytest.mark.parametrize(
    ("normalizer", "splits", "processor", "by_lengths"),
    [
        (None, pre_tokenizers.ByteLevel(add_prefix_space=False), None, True),
        (
            normalizers.NFC(),
            pre_tokenizers.Sequence([SPLITS, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
            processors.Sequence([processors.ByteLevel(trim_offsets=False)]),
            True,
        ),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=True), None, False),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=False), processors.ByteLevel(trim_offsets=True), False),
        (normalizers.Lowercase(), pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
        (normalizers.Strip(), pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
        (None, pre_tokenizers.Metaspace(), None, False),
    ],
)
def test_places_of_tokens_are_the_offsets_of_the_engine(
    normalizer: Any, splits: Any, processor: Any, by_lengths: bool
) -> None:
    tokenizer = train_tokenizer(["a cat  and a dog", "two birds\n in 12 trees"] * 3, 400, LLAVA_TOKENS)
    engine = tokenizer.backend_tokenizer
    engine.normalizer, engine.pre_tokenizer, engine.post_processor = normalizer, splits, processor
    engine.add_tokens([AddedToken("<left>", lstrip=True)])
    assert (_token_lengths(tokenizer, engine) is not None) == by_lengths
    pieces = [
        "a cat",
        " and",
        "  ",
        "\n",
        "\t ",
        "</s>",
        " <left>",
        "<left>",
        "12",
        "DOG",
        "\u00e9",
        "e\u0301",
        "\U0001f600",
        "\0",
    ]
    chooser = random.Random(7)
    texts = ["", *pieces, *("".join(chooser.choices(pieces, k=8)) for _ in range(200))]
    engine.add_tokens(["later"])
    for text in [*texts, "a later dog"]:
        encoding = engine.encode(text, add_special_tokens=False)
        tokens, begins, ends = tokens_with_places(tokenizer, text)
        assert (tokens.tolist(), list(zip(begins, ends, strict=True))) == (encoding.ids, encoding.offsets), text


def test_tokens_are_those_of_transformers_whatever_the_tokenizer_did_before() -> None:
    texts = ["a cat, and a dog", "", "two birds </s> in a tree"]
    tokenizer = train_tokenizer(texts, 300, LLAVA_TOKENS)

    def expected() -> list[list[int]]:
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    whole = expected()
    tokenizer(texts, padding=True, truncation=True, max_length=3)
    assert tokenize(tokenizer, texts) == whole
    tokenizer(texts, padding="max_length", truncation=True, max_length=30)
    ids, *places = tokens_with_places(tokenizer, texts[2])
    assert ids.tolist() == whole[2]
    assert next(texts[2][start:end] for start, end in zip(*places, strict=True)) in ("t", "tw", "two")
    tokenizer.split_special_tokens = True
    split = tokenize(tokenizer, texts)
    assert split == expected()
    assert split[:2] == whole[:2]
    assert split[2] != whole[2]


def llama_tokenizer(puts_blanks: str, image: str = "<image>") -> Any:
    """Return a tokenizer that puts a blank before a text as those of Llama do, each version in its way."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", image]
    engine = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=["\n", "<", ">"], show_progress=False
    )
    engine.train_from_iterator(["USER: color? ASSISTANT: red user assistant system be kind"] * 3, trainer)
    if puts_blanks == "each text":
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        engine.pre_tokenizer = None
    else:
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=puts_blanks, split=False)  # type: ignore[arg-type]
    return PreTrainedTokenizerFast(
        tokenizer_object=engine,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=special[3:],
    )


WHOLE = {
    "llava": "be kind USER: <image>color? ASSISTANT: red</s>USER: user? ASSISTANT: red red</s>",
    "chatml": "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n<image>color?<|im_end|>\n"
    "<|im_start|>assistant\nred<|im_end|>\n<|im_start|>user\nuser?<|im_end|>\n<|im_start|>assistant\nred red<|im_end|>",
}


@pytest.mark.parametrize("knows_image", [True, False])
@pytest.mark.parametrize("template", WHOLE)
@pytest.mark.parametrize("puts_blanks", ["each text", "always", "first", "never"])
def test_pieces_have_the_tokens_of_the_whole_text(puts_blanks: str, template: str, knows_image: bool) -> None:
    """A tokenizer without `<image>`, for a model that takes -200, gives what it gives once it has that token."""
    tokenizer = llama_tokenizer(puts_blanks, "<image>" if knows_image else "<other>")
    layout = {"llava": llava_template, "chatml": chatml_template}[template]("be kind")
    config = MultiModalSampleConfig(
        image_token=ImageToken(token_id=None if knows_image else -200), conversation_template_config=layout
    )
    task_encoder = MultiModalTaskEncoder(tokenizer, PixelProcessor(), config, image_tokens_per_image=1)
    said = ["<image>color?", "red", "user?", "red red"]
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    sample = task_encoder.encode_sample({"__key__": "q", "messages": turns, "images": [picture()]})
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    image = tokenizer.convert_tokens_to_ids("<image>")
    whole = [
        -200 if one == image and not knows_image else one
        for one in tokenizer.encode(WHOLE[template], add_special_tokens=False)
    ]
    begin = [tokenizer.bos_token_id] if template == "llava" else []
    assert [*sample.tokens.tolist(), int(sample.labels[-1])] == begin + whole


def test_markers_that_the_tokenizer_does_not_know_are_refused() -> None:
    tokenizer = tokenizer_of("llava")
    for template in (chatml_template(), ConversationTemplateConfig(stop_string="<|im_end|>")):
        config = MultiModalSampleConfig(conversation_template_config=template)
        with pytest.raises(ConfigurationError, match=r"im_end.*letter by letter.*tokenizer.add_tokens\("):
            MultiModalTaskEncoder(tokenizer, None, config)
    for template in (llava_template(), ConversationTemplateConfig(stop_string="##")):
        MultiModalTaskEncoder(tokenizer, None, MultiModalSampleConfig(conversation_template_config=template))
    with pytest.raises(ConfigurationError, match=r"<\|im_start\|> and <\|im_end\|>, which the tokenizer does not know"):
        ChatTemplateTaskEncoder(tokenizer, None, ChatConfig(chat_template=CHATML_TEMPLATE))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    ChatTemplateTaskEncoder(tokenizer, None, ChatConfig(chat_template=CHATML_TEMPLATE))
    config = MultiModalSampleConfig(conversation_template_config=chatml_template())
    sample = MultiModalTaskEncoder(tokenizer, None, config).encode_sample(
        {"__key__": "q", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    assert sample.labels[sample.loss_mask.bool()].tolist()[1:] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]

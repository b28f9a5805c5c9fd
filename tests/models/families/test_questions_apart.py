"""PaliGemma: a question with its images, read in both directions, and its answer apart.

The right values are those of the processor, called with `suffix`, and of the model on each sample alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from made import made_once
from PIL import Image
from processors import tiny_model, tiny_model_config, tiny_processor
from torch import Tensor
from transformers import TrainingArguments

from energon_bridge import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.core.samples import CaptioningSample, InterleavedSample, TextSample
from energon_bridge.models.conversations.inputs import check_packing, model_inputs
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.huggingface import EnergonTrainer
from energon_bridge.training.config import RunConfig
from energon_bridge.training.encoder import training_task_encoder
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import load_model

BEFORE = {
    "<image>What is it?": "<image>What is it?",
    "<image>\nWhat is it?": "<image>What is it?",  # a line break next to a place belongs to it
    "What is it?": "<image>What is it?",
    "What is it?\n<image>": "<image>What is it?",  # images stand before all text
    "<image><image>detect a line ; a square": "<image><image>detect a line ; a square",
    "<image>or\n<image>": "<image><image>or",
    "Is <image> like <image> here?": "Is <image> like <image> here?",  # unless words go on behind them
    "<image>": "<image>",
}
"""Questions, and how the processor is called by hand for them."""


data = made_once(create_captioning_test_dataset, num_train=8, num_val=8, image_size=24)


@cache
def parts(kind: str = "gemma") -> tuple[Any, Any, ChatTemplateTaskEncoder]:
    processor = tiny_processor("PaliGemmaProcessor")
    config = tiny_model_config("paligemma", processor)
    if kind == "gemma2":  # as PaliGemma 2 has it
        sizes = {name: getattr(config.text_config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
        config.text_config = transformers.Gemma2Config(
            **sizes,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=16,
        )
    encoder = ChatTemplateTaskEncoder.for_processor(processor, ChatConfig(seq_length=6000), model_config=config)
    model = tiny_model(config)
    for name, parameter in model.named_parameters():
        if "self_attn" in name:  # what is seen matters
            parameter.data.mul_(6)
    return processor, model, encoder


def pictures(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(count)
    return [Image.fromarray(rng.integers(0, 256, (60, 80 + number, 3), np.uint8)) for number in range(count)]


def asked(question: str, answer: str = "A red line.", count: int | None = None) -> ChatSample:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return ChatSample(__key__=question, messages=turns, images=pictures(count or question.count("<image>") or 1))


def by_hand(text: str, answer: str, images: list[Any]) -> dict[str, Tensor]:
    return dict(parts()[0](text=[text], images=[images], suffix=[answer], return_tensors="pt"))


def check(encoded: Any, wanted: dict[str, Tensor]) -> None:
    assert torch.equal(encoded.tokens, wanted["input_ids"][0, :-1])
    assert torch.equal(torch.where(encoded.loss_mask > 0, encoded.labels, -100), wanted["labels"][0, 1:])
    assert torch.equal(encoded.visual["token_type_ids"], wanted["token_type_ids"][:, :-1])
    assert torch.equal(encoded.visual["pixel_values"], wanted["pixel_values"])


@pytest.mark.parametrize("question", BEFORE)
@pytest.mark.parametrize("answer", ["A red line.", "<loc0012><loc0345> square", "two \n lines "])
def test_a_question_and_its_answer_are_what_the_processor_makes_of_them(question: str, answer: str) -> None:
    sample = asked(question, answer)
    check(parts()[2].encode(sample), by_hand(BEFORE[question], answer, sample.images))


def test_a_caption_is_the_answer_to_its_image() -> None:
    (image,) = pictures(1)
    made = parts()[2].encode(CaptioningSample(__key__="a", image=image, caption="a red line"))
    check(made, by_hand("<image>", "a red line", [image]))


def test_a_text_stands_alone_behind_an_empty_question() -> None:
    processor, _, encoder = parts()
    made = encoder.encode(TextSample(__key__="a", text="a red line"))
    assert processor.tokenizer.decode([*made.tokens, made.labels[-1]]) == "<s>\na red line</s>"
    begin = int(made.visual["token_type_ids"].argmax())
    assert processor.tokenizer.decode(made.tokens[begin:]) == "a red line"


@pytest.mark.parametrize("before", [[{"role": "system", "content": "Be short."}], asked("a?").messages])
def test_more_than_a_question_and_its_answer_is_left_out_by_name(before: list[Any]) -> None:
    sample = ChatSample(__key__="talk", messages=[*before, *asked("<image>b?").messages], images=pictures(1))
    with pytest.raises(SampleError, match=r"sample 'talk': .* reads one question and learns one answer: make a sample"):
        parts()[2].encode(sample)


def test_images_behind_an_answer_are_left_out_by_name() -> None:
    with pytest.raises(SampleError, match="behind text that is learned, but the model learns one answer"):
        parts()[2].encode(InterleavedSample(__key__="a", sequence=["one", *pictures(1), "two"]))


def test_an_answer_that_is_cut_off_keeps_its_question() -> None:
    sample = asked("<image>What is it?", "a line " * 40)
    whole = parts()[2].encode(sample)
    short = ChatTemplateTaskEncoder.for_processor(parts()[0], ChatConfig(seq_length=40)).encode(sample)
    assert torch.equal(short.tokens, whole.tokens[:40])
    assert torch.equal(short.visual["token_type_ids"], whole.visual["token_type_ids"][:, :40])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
@torch.no_grad()
def test_losses_of_rows_are_those_of_each_sample_alone(kind: str) -> None:
    """The model may be told or not; the longest row has no padding for the last token, the others have."""
    _, model, encoder = parts(kind)
    samples = [asked("<image>What is it?"), asked("a?", "b"), asked("Is <image> like <image> here?", "yes " * 9)]
    loss = count = 0.0
    for sample in samples:
        wanted = by_hand(BEFORE.get(sample.__key__, "<image>a?"), sample.messages[1]["content"], sample.images)
        learned = int((wanted["labels"] != -100).sum())
        loss += float(model(**wanted).loss) * learned
        count += learned
    text = encoder.encode(TextSample(__key__="text", text="a blue circle"))
    tokens = torch.cat([text.tokens, text.labels[-1:]])[None]
    types = (torch.arange(tokens.shape[1]) > int(text.loss_mask.argmax()))[None].long()
    labels = torch.where(types == 1, tokens, -100)
    learned = int(types.sum())
    loss += float(model(input_ids=tokens, token_type_ids=types, labels=labels).loss) * learned
    count += learned
    batch = encoder.batch([*map(encoder.encode, samples), text])
    for inputs in (model_inputs(batch, model), model_inputs(batch)):
        assert int((inputs["labels"] != -100).sum()) == count
        assert float(model(**inputs).loss) * count == pytest.approx(loss, rel=1e-5)
    inputs = model_inputs(batch, model)
    inputs["token_type_ids"] = torch.ones_like(inputs["token_type_ids"])  # without a question read in both directions
    assert float(model(**inputs).loss) * count != pytest.approx(loss, rel=2e-4)


def test_packs_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"PaliGemmaFor.* does not keep the samples of a pack apart"):
        check_packing(parts()[1])


@pytest.mark.filterwarnings("ignore")
def test_a_saved_model_is_known_by_its_folder(tmp_path: Path) -> None:
    processor, model, encoder = parts()
    processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    sample = asked("<image>What is it?")
    there = ChatTemplateTaskEncoder.from_pretrained(tmp_path).encode(sample)
    assert torch.equal(there.tokens, encoder.encode(sample).tokens)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_has_the_loss_of_each_caption_alone(data: Path, tmp_path: Path) -> None:
    _, model, encoder = parts()
    config = WorkerConfig(num_workers=0)
    dataset = get_train_dataset(data, task_encoder=encoder, worker_config=config, batch_size=4)
    settings: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.0}
    settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = EnergonTrainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=dataset)
    trainer.train()
    loss = count = 0.0
    for batch in get_loader(get_val_dataset(data, split_part="train", batch_size=1, worker_config=config)):
        pixels = (batch.image[0].permute(1, 2, 0) * 255).round().byte().numpy()
        alone = by_hand("<image>", batch.caption[0], [Image.fromarray(pixels)])
        learned = int((alone["labels"] != -100).sum())
        with torch.no_grad():
            loss += float(model.eval()(**alone).loss) * learned
        count += learned
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss / count, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_answers_are_generated_as_after_the_processor_alone(tmp_path: Path) -> None:
    processor, model, _ = parts()
    processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    bundle = load_model(str(tmp_path), init="pretrained")
    encoder = training_task_encoder(replace(RunConfig().data, seq_length=512), bundle)
    questions = ["<image>What is it?", "<image>a?", "Is <image> like <image> here?"]
    batch = encoder.batch([encoder.encode(asked(question)) for question in questions])
    module = VisionLanguageModule(bundle, RunConfig()).eval()
    ends = {name: getattr(processor.tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    for made, question in zip(module.predict(batch), questions, strict=True):
        prompt = processor(text=[question], images=[asked(question).images], return_tensors="pt")
        prompt.pop("labels")
        (tokens,) = bundle.model.generate(**prompt, **ends, max_new_tokens=16, do_sample=False)
        assert processor.tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], True) == made.generated


def test_a_batch_that_does_not_say_where_questions_end_is_refused() -> None:
    _, model, encoder = parts()
    batch = encoder.batch([encoder.encode(asked("<image>a?"))])
    del batch.visual_inputs["token_type_ids"]
    with pytest.raises(ConfigurationError, match="does not say where questions end"):
        model_inputs(batch, model)

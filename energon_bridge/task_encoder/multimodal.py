"""From captioning and VQA samples to what a vision-language model trains on.

A sample becomes one token sequence: prompt (with its image placeholder expanded to as many image tokens as the model
needs), completion, end. Of a sequence s of n tokens, `tokens` is s[:-1] and `labels` is s[1:]: labels are shifted here,
once, and no model needs to shift them again. `loss_mask` is 1.0 exactly where the label is a token of the completion;
everywhere else the label is `ignore_place_holder`.

Sequences longer than `seq_length` are cut on the right, but never inside the image tokens and never down to nothing
that could be learned: such a sample is refused, and the failure policy of the run counts it and names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from energon_bridge.errors import ConfigurationError, SampleError
from energon_bridge.samples import Batch, CaptioningSample, Sample, VQASample, edataclass
from energon_bridge.task_encoder.base import TaskEncoder
from energon_bridge.task_encoder.conversation import (
    MultiModalSampleConfig,
    Rendered,
    place_image,
    render_caption,
    render_question,
)
from energon_bridge.task_encoder.decoder import SampleDecoder
from energon_bridge.task_encoder.visual import concat_visual, process_image

ImageTokenCount = int | Callable[[Mapping[str, Tensor]], int]
"""Image tokens per image: a number, or a function of what the image processor returned for the image."""


@edataclass
class MultiModalSample(Sample):
    """One encoded sample, before batching.

    `tokens`, `labels` (int64) and `loss_mask` (float32) have shape (n,); `visual` is what the image processor returned.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    visual: dict[str, Tensor]
    answer: str


@edataclass
class MultiModalBatch(Batch):
    """A microbatch of B sequences, padded on the right to a common length S.

    `tokens`, `labels`, `position_ids`, `attention_mask` (1 on real tokens): int64 (B, S); `loss_mask`: float32 (B, S).
    `pixel_values`: the images of all rows, joined along dimension 0. `visual_inputs`: what else the image processor
    returned, joined likewise. `answers`: the text that each row should produce.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    pixel_values: Tensor | None
    visual_inputs: dict[str, Tensor]
    answers: list[str]


class MultiModalTaskEncoder(TaskEncoder[Any, MultiModalSample, MultiModalBatch, MultiModalBatch]):
    """Encode captioning and VQA samples with any tokenizer and image processor of the transformers interface.

    Args:
        tokenizer: Has `encode(text, add_special_tokens=False)` and the ids of its special tokens.
        image_processor: Called as `image_processor(images=[image], return_tensors="pt")`.
        multimodal_sample_config: Placeholders and conversation template.
        seq_length: Longest sequence, image tokens included.
        image_tokens_per_image: Tokens that stand for one image. None: computed from `image_grid_thw` where the image
            processor returns it, else 1 (the model itself makes room for the features, as megatron-core's does).
        pad_to_multiple_of: Batches are padded to a multiple of this length.
        pad_to_max_length: Pad every batch to `seq_length`: one shape for all batches.
        add_bos: Begin with the tokenizer's begin-of-sequence token where it has one.

    Raises:
        ConfigurationError: The image tokens alone fill `seq_length`, or the image token has no id.
    """

    decoder: SampleDecoder | None = SampleDecoder(image_decode="pilrgb")

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        multimodal_sample_config: MultiModalSampleConfig | None = None,
        seq_length: int = 2048,
        *,
        image_tokens_per_image: ImageTokenCount | None = None,
        pad_to_multiple_of: int = 1,
        pad_to_max_length: bool = False,
        add_bos: bool = True,
    ) -> None:
        if tokenizer is None or image_processor is None:
            raise ConfigurationError(
                "MultiModalTaskEncoder needs a tokenizer and an image processor of the transformers interface; got "
                f"tokenizer={tokenizer!r}, image_processor={image_processor!r} (pass both, or your own task_encoder)"
            )
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.config = multimodal_sample_config or MultiModalSampleConfig()
        self.seq_length = seq_length
        self.image_tokens_per_image = image_tokens_per_image
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_to_max_length = pad_to_max_length
        self.add_bos = add_bos
        self._image_token_id = _image_token_id(tokenizer, self.config)
        if isinstance(image_tokens_per_image, int) and image_tokens_per_image >= seq_length:
            raise ConfigurationError(
                f"seq_length={seq_length} leaves no room for text: one image takes {image_tokens_per_image} tokens; "
                f"set seq_length to more than {image_tokens_per_image}"
            )

    def encode_sample(self, sample: Any) -> MultiModalSample:
        """Encode one sample.

        Raises:
            SampleError: The sample cannot be trained on: no answer, a wrong number of placeholders, or an image that
                does not fit into `seq_length`.
        """
        answer, rendered = self._render(sample)
        visual = process_image(self.image_processor, sample.image)
        prompt = self._encode_prompt(rendered, self._count_image_tokens(visual), where=sample.__key__)
        completion = self._encode_completion(rendered)
        tokens, labels, loss_mask = self._assemble(prompt, completion, where=sample.__key__)
        return MultiModalSample.derive_from(
            sample, tokens=tokens, labels=labels, loss_mask=loss_mask, visual=visual, answer=answer
        )

    def batch(self, samples: list[MultiModalSample]) -> MultiModalBatch:
        """Pad the sequences to a common length and join the images."""
        length = self.seq_length if self.pad_to_max_length else max(len(s.tokens) for s in samples)
        length += -length % self.pad_to_multiple_of
        visual = concat_visual([s.visual for s in samples])
        pad_id = _first_id(self.tokenizer, "pad_token_id", "eos_token_id") or 0
        return MultiModalBatch.from_samples(
            samples,
            tokens=_pad([s.tokens for s in samples], length, pad_id),
            labels=_pad([s.labels for s in samples], length, self.config.ignore_place_holder),
            loss_mask=_pad([s.loss_mask for s in samples], length, 0.0),
            position_ids=torch.arange(length).repeat(len(samples), 1),
            attention_mask=_pad([torch.ones_like(s.tokens) for s in samples], length, 0),
            pixel_values=visual.pop("pixel_values", None),
            visual_inputs=visual,
            answers=[s.answer for s in samples],
        )

    def _render(self, sample: Any) -> tuple[str, Rendered]:
        if isinstance(sample, CaptioningSample):
            answer, rendered = sample.caption, render_caption(sample.caption, self.config)
        elif isinstance(sample, VQASample):
            answer = _best_answer(sample)
            question = place_image(sample.context, self.config)
            rendered = render_question(question, answer, self.config.conversation_template_config, self.tokenizer)
        else:
            raise ConfigurationError(
                f"MultiModalTaskEncoder encodes CaptioningSample and VQASample, not {type(sample).__name__} (sample "
                f"{getattr(sample, '__key__', '?')!r}): set sample_type in dataset.yaml, or pass your own task_encoder"
            )
        if self.config.image_token.token_str in rendered.completion:
            raise SampleError(
                f"sample {sample.__key__!r}: the answer {answer!r} contains the image placeholder "
                f"{self.config.image_token.token_str!r}; only a question may"
            )
        return answer, rendered

    def _count_image_tokens(self, visual: Mapping[str, Tensor]) -> int:
        count = self.image_tokens_per_image
        if callable(count):
            return count(visual)
        if count is not None:
            return count
        grid = visual.get("image_grid_thw")
        if grid is None:
            return 1
        return int(grid.prod(-1).sum()) // int(getattr(self.image_processor, "merge_size", 1)) ** 2

    def _encode_prompt(self, rendered: Rendered, image_tokens: int, *, where: str) -> list[int]:
        pieces = rendered.prompt.split(self.config.image_token.token_str)
        if len(pieces) != 2:
            raise SampleError(
                f"sample {where!r}: the text has {len(pieces) - 1} placeholders {self.config.image_token.token_str!r} "
                "but the sample has 1 image"
            )
        bos = self.tokenizer.bos_token_id if self.add_bos and not rendered.has_special_tokens else None
        head = ([] if bos is None else [bos]) + self._encode_text(pieces[0])
        if len(head) + image_tokens > self.seq_length:
            raise SampleError(
                f"sample {where!r}: seq_length={self.seq_length} would cut into the image, which takes {image_tokens} "
                f"tokens behind {len(head)} tokens of text; set seq_length to at least {len(head) + image_tokens + 1}"
            )
        return head + [self._image_token_id] * image_tokens + self._encode_text(pieces[1])

    def _encode_completion(self, rendered: Rendered) -> list[int]:
        completion = self._encode_text(rendered.completion)
        if rendered.has_special_tokens or self.config.conversation_template_config.stop_string is not None:
            return completion
        eos = self.tokenizer.eos_token_id
        return completion if eos is None else [*completion, eos]

    def _encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _assemble(self, prompt: list[int], completion: list[int], *, where: str) -> tuple[Tensor, Tensor, Tensor]:
        # One more token than seq_length is of use: it is the label of the last position.
        if len(prompt) > self.seq_length or not completion:
            raise SampleError(
                f"sample {where!r}: nothing to learn: the prompt has {len(prompt)} tokens, the completion "
                f"{len(completion)}, and seq_length={self.seq_length} cuts before the completion begins"
            )
        sequence = torch.tensor((prompt + completion)[: self.seq_length + 1], dtype=torch.int64)
        labels = sequence[1:].clone()
        labels[: max(0, len(prompt) - 1)] = self.config.ignore_place_holder
        loss_mask = torch.ones(len(labels))
        loss_mask[: max(0, len(prompt) - 1)] = 0.0
        return sequence[:-1].clone(), labels, loss_mask


def _best_answer(sample: VQASample) -> str:
    answers: Any = sample.answers  # a field map may give one text where the type has a list
    if isinstance(answers, str):
        return answers
    if not sample.answers:
        raise SampleError(f"sample {sample.__key__!r}: a VQASample without answers cannot be trained on")
    weights = sample.answer_weights
    if weights is None:
        return sample.answers[0]
    if len(weights) != len(sample.answers):
        raise SampleError(f"sample {sample.__key__!r}: {len(sample.answers)} answers but {len(weights)} answer weights")
    return sample.answers[max(range(len(weights)), key=lambda i: float(weights[i]))]


def _image_token_id(tokenizer: Any, config: MultiModalSampleConfig) -> int:
    token = config.image_token
    if token.token_id is not None:
        return token.token_id
    found = tokenizer.convert_tokens_to_ids(token.token_str)
    if found is None or found == getattr(tokenizer, "unk_token_id", None):
        raise ConfigurationError(
            f"the tokenizer does not know the image token {token.token_str!r}: add it as a special token, or set "
            "ImageToken(token_id=...) to the id that the model expects"
        )
    return int(found)


def _first_id(tokenizer: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(tokenizer, name, None)) is not None), None)


def _pad(rows: Sequence[Tensor], length: int, value: float) -> Tensor:
    out = rows[0].new_full((len(rows), length), value)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out

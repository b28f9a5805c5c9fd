"""Generates a model's answers, and compares them with the expected ones.

`predictions.jsonl` has one line per validation sample: an object with the strings `key`, `expected` and `generated`, in
the order of the split, or, if samples are packed, in the order of the packs. A run ends with the `exact_match` of its
lines.

Packs are taken apart to generate: each sample is prompted separately, with the images of its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.storage import write_file
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS, MultiModalBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The answer that the model generated for one sample, and the expected one."""

    key: str
    expected: str
    generated: str


def exact_match(predictions: Sequence[Prediction]) -> float:
    """Return the fraction of answers that match exactly, up to white space at the ends; 0 without any."""
    right = sum(p.generated.strip() == p.expected.strip() for p in predictions)
    return right / len(predictions) if predictions else 0.0


def write_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Write the predictions as JSON lines, atomically."""
    lines = (json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in predictions)
    write_file(path, (line.encode() for line in lines))


def predictions_of(batch: MultiModalBatch, texts: Sequence[str]) -> list[Prediction]:
    """Return the predictions of the rows of a batch, but for invalid ones."""
    valid = [True] * len(texts) if batch.__valid__ is None else batch.__valid__.tolist()
    rows = zip(batch.__key__, batch.answers, texts, valid, strict=True)
    return [Prediction(key=k, expected=e, generated=g) for k, e, g, real in rows if real]


def in_turn(ranks: Iterable[Sequence[Sequence[Prediction]]]) -> list[Prediction]:
    """Return the predictions of all ranks in their order: rank r of R has microbatches r, r + R, r + 2R, …"""
    return [*chain.from_iterable(chain.from_iterable(zip_longest(*ranks, fillvalue=())))]


def prompts_of(batch: MultiModalBatch, pad_id: int) -> tuple[Tensor, Tensor]:
    """Cut off the answers and align the prompts to the right, where generation begins.

    Returns:
        Tokens and attention mask, int64 of shape (B, P), P being the longest prompt.
    """
    lengths = prompt_lengths(batch).tolist()
    width = max(lengths)
    tokens = batch.tokens.new_full((len(lengths), width), pad_id)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        tokens[row, width - length :] = batch.tokens[row, :length]
        mask[row, width - length :] = 1
    return tokens, mask


def prompt_lengths(batch: MultiModalBatch) -> Tensor:
    """Return the number of tokens before the answer of each row, int64 (B,)."""
    # Label i is token i + 1. So the first label with loss, at position p, is the first token of the answer, and the
    # prompt is tokens 0 to p. A row without loss has no answer.
    whole = batch.attention_mask.sum(dim=1)
    return torch.where(batch.loss_mask.any(dim=1), batch.loss_mask.argmax(dim=1) + 1, whole)


def visible_images(
    inputs: Mapping[str, Tensor],
    batch: MultiModalBatch,
    prompts: Tensor,
    *,
    image_token_id: int,
    per_image: int | None,
    video_token_id: int | None = None,
) -> dict[str, Tensor]:
    """Leave out images that come after the prompts, and align inputs per token with these.

    Videos are kept, and must be inside the prompts.

    Args:
        inputs: The image processor's results for all images of the batch: a row for each image, or, with an
            `image_grid_thw`, for each patch.
        batch: Has one sample in each row.
        prompts: What `prompts_of` made of it.
        image_token_id: Stands for an image in tokens and prompts.
        per_image: Tokens of each image; None if they depend on the image: then each run of such tokens is an image.
        video_token_id: Stands for a video, if the model takes any.

    Raises:
        ConfigurationError: Images must be left out, and which they are cannot be told; or a video must.
    """
    if video_token_id is not None:
        if not torch.equal(_count(prompts, video_token_id), _count(batch.tokens, video_token_id)):
            raise ConfigurationError(_NOT_TOLD.format(what="videos", keys=batch.__key__, why="videos are not cut off"))
        videos = {name: values for name, values in inputs.items() if name in _OF_VIDEOS}
        inputs = {name: values for name, values in inputs.items() if name not in _OF_VIDEOS}
    else:
        videos = {}
    if torch.equal(_count(prompts, image_token_id), _count(batch.tokens, image_token_id)):
        of_tokens = {
            name: _aligned(inputs[name], batch, prompts, TOKEN_INPUTS[name]) for name in TOKEN_INPUTS.keys() & inputs
        }
        return {**inputs, **of_tokens, **videos}
    shown = _images_in(prompts, image_token_id, per_image)
    if _images_in(batch.tokens, image_token_id, per_image) != list(batch.num_images):
        raise ConfigurationError(_NOT_TOLD.format(what="images", keys=batch.__key__, why="images stand side by side"))
    counts = zip(batch.num_images, shown, strict=True)
    keep = torch.tensor([number < first for images, first in counts for number in range(images)])
    if not keep.any():
        return videos
    grid = inputs.get("image_grid_thw")
    patches = None if grid is None else keep.repeat_interleave(grid.cpu().prod(dim=-1))
    kept = dict(videos)
    for name, values in inputs.items():
        rows = next((rows for rows in (keep, patches) if rows is not None and len(rows) == len(values)), None)
        if rows is None:
            why = f"{name} has {len(values)} rows for {len(keep)} images"
            raise ConfigurationError(_NOT_TOLD.format(what="images", keys=batch.__key__, why=why))
        kept[name] = values[rows.to(values.device)]
    return kept


_OF_VIDEOS = frozenset({"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"})
_NOT_TOLD = (
    "samples {keys} have {what} behind the first answer, and the {what} of a prompt cannot be told from the others: "
    "{why}. Set validation.generate=false"
)


def _aligned(values: Tensor, batch: MultiModalBatch, prompts: Tensor, padding: int) -> Tensor:
    """Return values of the tokens of a batch, (B, S, …), where `prompts_of` has put these, (B, P, …)."""
    aligned = values.new_full((*prompts.shape, *values.shape[2:]), padding)
    for row, length in enumerate(prompt_lengths(batch).tolist()):
        aligned[row, prompts.shape[1] - length :] = values[row, :length]
    return aligned


def _count(tokens: Tensor, image_token_id: int) -> Tensor:
    return torch.eq(tokens, image_token_id).sum(dim=1)


def _images_in(tokens: Tensor, image_token_id: int, per_image: int | None) -> list[int]:
    """Return the number of images in each row."""
    if per_image is not None:
        images: list[int] = (_count(tokens, image_token_id) // per_image).tolist()
        return images
    here = torch.eq(tokens, image_token_id).long()
    runs: list[int] = (functional.pad(here, (1, 0)).diff(dim=1) > 0).sum(dim=1).tolist()
    return runs


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Tensor,
    attention_mask: Tensor,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
) -> list[str]:
    """Continue each prompt with the most likely tokens until the model ends its answer."""
    output = model.generate(
        input_ids=prompts,
        attention_mask=attention_mask,
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    texts: list[str] = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    return texts

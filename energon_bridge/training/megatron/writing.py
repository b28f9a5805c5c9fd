"""Letting a model whose parts are on several ranks write answers: greedily, the whole sequence again for each token."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from energon_bridge.samples.devices import normalise_on_device
from energon_bridge.task_encoder.multimodal import MultiModalBatch
from energon_bridge.task_encoder.packed_sequences import unpack_batch
from energon_bridge.task_encoder.sequences import PaddingValues
from energon_bridge.training.generation import Prediction, prompt_lengths, visible_images
from energon_bridge.training.megatron.inputs import Inputs, own_tokens, writing_inputs
from energon_bridge.training.megatron.step import Training, run_stages
from energon_bridge.training.presets import ModelBundle


@torch.no_grad()
def write_answers(training: Training, bundle: ModelBundle, batch: MultiModalBatch) -> list[Prediction]:
    """Continue the prompts of a batch with the most likely tokens; all ranks of a replica return the same.

    Rows that are not valid are left out.
    """
    tokenizer, longest = bundle.tokenizer, training.config.validation.max_new_tokens
    if batch.cu_seqlens is not None:
        batch = unpack_batch(batch, PaddingValues(pad_id=tokenizer.pad_token_id, ignore=-100))
    batch = normalise_on_device(batch, training.ranks.device)
    lengths = prompt_lengths(batch)
    width = int(lengths.max())
    prompts = batch.tokens[:, :width].clone()
    prompts[torch.arange(width) >= lengths[:, None]] = tokenizer.pad_token_id
    pixels = {} if batch.pixel_values is None else {"pixel_values": batch.pixel_values}
    pixels = visible_images(pixels, batch, prompts, image_token_id=bundle.image_token_id, per_image=bundle.image_tokens)
    device = training.ranks.device
    tokens = torch.nn.functional.pad(prompts, (0, longest), value=tokenizer.pad_token_id).to(device)
    lengths = lengths.to(device)
    ends, rows = lengths.clone(), torch.arange(len(tokens), device=device)
    ended = torch.zeros_like(ends, dtype=torch.bool)
    while not ended.all() and int((ends - lengths).max()) < longest:
        inputs = writing_inputs(tokens[:, : int(ends.max())], pixels.get("pixel_values"), training.ranks)
        chosen = _most_likely(training, inputs, ends - 1, len(tokenizer))
        ended |= torch.eq(chosen, tokenizer.eos_token_id)
        tokens[rows[~ended], ends[~ended]] = chosen[~ended]
        ends += (~ended).long()
    written = [row[start:end] for row, start, end in zip(tokens.tolist(), lengths.tolist(), ends.tolist(), strict=True)]
    texts: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
    valid = [True] * len(texts) if batch.__valid__ is None else batch.__valid__.tolist()
    rows_of_batch = zip(batch.__key__, batch.answers, texts, valid, strict=True)
    return [Prediction(key=k, expected=e, generated=g) for k, e, g, real in rows_of_batch if real]


def _most_likely(training: Training, inputs: Inputs, places: Tensor, vocab_size: int) -> Tensor:
    """Return the most likely token behind one place of each row, int64 (B,), on all ranks of a replica."""
    ranks = training.ranks
    logits = run_stages(training, inputs)
    chosen = torch.zeros_like(places)
    if logits is not None:
        # The place is on one of the context-parallel ranks.
        here = torch.eq(own_tokens(inputs.tokens, ranks), places[:, None])
        of_place = (logits.float() * here.unsqueeze(-1)).sum(dim=1)
        if ranks.groups.cp.size() > 1:
            dist.all_reduce(of_place, group=ranks.groups.cp)
        whole = gather_from_tensor_model_parallel_region(of_place, group=ranks.groups.tp)
        chosen = whole[:, :vocab_size].argmax(dim=1)
    return ranks.from_last_stage(chosen)

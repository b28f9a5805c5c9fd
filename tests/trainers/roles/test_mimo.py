"""megatron-core's own MIMO model (mock sizes): two grids train as one grid does, over stops, on grids of any sizes.

The model of one grid runs whole, `MimoModel.forward`, on each microbatch of a global batch. Of two grids, encoder ranks
run its vision part and send the features of each language rank to it; language ranks send the gradients back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_gloo
from grids import pictures_dataset
from made import made_once
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from families import encoder_of
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo import MimoModel, MimoModelConfig
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_bridge import EnergonMultiModalDataModule
from energon_bridge.core.encoder.cooking import Cooker
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.trainers.roles import make_roles
from energon_bridge.trainers.roles.mimo import MimoEncoder, mimo_inputs
from energon_bridge.training.megatron.model import SharedAttention

data = made_once(partial(pictures_dataset, side=40))
GLOBAL = 4  # microbatches of a global batch
WHERE = {"vision": MimoEncoder(module="images", encoder="clip", arguments={"pixel_values": "x"})}
RATE = 1e-4  # of gradients of sums: a larger one makes differences of rounding grow


class Chats(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook_conversation),)


def task_encoder() -> Chats:
    known = encoder_of("llava")
    return Chats(known.tokenizer, known.family, ChatConfig(seq_length=96))


def image_token() -> int:
    token: int = task_encoder().tokenizer.convert_tokens_to_ids("<image>")
    return token


def sizes(hidden: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        add_bias_linear=True,
        activation_func=torch.nn.functional.gelu,
    )


def model() -> MimoModel:
    """Return the model with the same weights in each process."""
    warnings.filterwarnings("ignore")
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment,method-assign]  # in a process of its own
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    parallel_state.initialize_model_parallel()
    torch.manual_seed(5)
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    vision = get_vit_layer_with_local_spec()
    vision.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    clip = {"transformer_config": sizes(16), "transformer_layer_spec": vision, "add_class_token": False}
    clip |= {"ln_pre_impl": WrappedTorchNorm, "ln_post_impl": WrappedTorchNorm}
    projection = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    projector = {"config": sizes(32), "submodules": projection, "projector_type": "mlp", "input_size": 16}
    causal = get_gpt_layer_local_spec()
    causal.submodules.self_attention.submodules.core_attention = SharedAttention
    language = {"config": sizes(32), "transformer_layer_spec": causal, "vocab_size": 384}
    parts = {
        "encoders": {"clip": ModuleSpec(CLIPViTModel, params=clip | {"patch_dim": 8, "img_h": 16, "img_w": 16})},
        "input_projections": [ModuleSpec(MultimodalProjector, params=projector)],
    }
    return MimoModel(
        MimoModelConfig(
            language_model_spec=ModuleSpec(GPTModel, params=language | {"max_sequence_length": 128}),
            modality_submodules_spec={"images": ModuleSpec(VisionModalitySubmodules, submodules=parts)},
            special_token_ids={"images": image_token()},
        )
    )


def module(data: Path, grids: dict[str, Any], state: Any) -> EnergonMultiModalDataModule:
    train = EnergonMultiModalDataModule(
        str(data),
        None,
        task_encoder=task_encoder(),
        micro_batch_size=2,
        global_batch_size=2 * GLOBAL,
        num_workers=0,
        num_lanes=24,
        pin_memory=False,
        roles=make_roles(grids=grids),
    )
    if state is not None:
        train.load_state_dict(state)
    train.train_dataloader().on_delivery = partial(mimo_inputs, encoders=WHERE)
    return train


def summed(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum()


def update(mimo: MimoModel) -> None:
    with torch.no_grad():
        for parameter in mimo.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
                parameter.grad = None


def one_grid(data: Path, steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses, the gradients of the first step, and the weights at the end."""
    mimo = model()
    train = module(data, {"language": (0, 1), "vision": (0, 1)}, None)
    batches = iter(train.train_dataloader())
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for _ in range(steps):
        total = 0.0
        for _ in range(GLOBAL):
            inputs = next(batches)
            del inputs["packing_kwargs"]
            out, mask = mimo(**inputs)
            loss = summed(out, mask)
            loss.backward()
            total += float(loss)
        losses.append(total)
        first = first or {name: one.grad.clone() for name, one in mimo.named_parameters() if one.grad is not None}
        update(mimo)
    train.close()
    return losses, first, {name: one.detach() for name, one in mimo.named_parameters()}


def two_grids(rank: int, data: Path, language: int, vision: int, steps: int, given: Any) -> Any:
    """Return losses, gradients of the first step, weights, and the state of the data, as one rank has them."""
    weights, state = given
    mimo = model()
    if weights:
        mimo.load_state_dict(weights, strict=False)
    groups = {"language": dist.new_group(range(language)), "vision": dist.new_group(range(language, language + vision))}
    own = "language" if rank < language else "vision"
    train = module(data, {name: group if name == own else None for name, group in groups.items()}, state)
    batches = iter(train.train_dataloader())
    losses = []
    first: dict[str, Tensor] = {}
    turn = language_turn if own == "language" else vision_turn
    for _ in range(steps):
        total = torch.zeros(1)
        for _ in range(GLOBAL // language):
            total += turn(mimo, batches, train, rank, language, vision)
        part = mimo.language_model if own == "language" else mimo.modality_submodules
        for parameter in part.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, group=groups[own])
        dist.all_reduce(total, group=groups[own])
        losses.append(float(total))
        first = first or {name: one.grad.clone() for name, one in mimo.named_parameters() if one.grad is not None}
        update(mimo)
    saved = train.state_dict()
    train.close()
    named = {
        name: one.detach() for name, one in mimo.named_parameters() if ("language_model" in name) == (own == "language")
    }
    return losses, first, named, saved


def language_turn(mimo: Any, batches: Iterator[Any], train: Any, rank: int, language: int, vision: int) -> Tensor:
    inputs = next(batches)
    assert inputs["modality_inputs"] == {}
    parts = max(1, vision // language)
    senders = [language + (rank * parts + part if parts > 1 else rank * vision // language) for part in range(parts)]
    received = []
    for sender in senders:
        count = torch.zeros(1, dtype=torch.int64)
        dist.recv(count, sender)
        features = torch.zeros(int(count), 32)
        if len(features):
            dist.recv(features, sender)
        received.append(features.requires_grad_())
    tokens, positions = inputs["input_ids"], inputs["position_ids"]
    text = mimo.get_text_embeddings(tokens, positions, mimo.special_token_ids)
    embeddings = {"images": torch.cat(received), "text": text}
    combined = mimo.align_embeddings_by_token_positions(embeddings, tokens, mimo.special_token_ids)
    out = mimo.language_model(
        input_ids=None, position_ids=None, attention_mask=None, decoder_input=combined, labels=inputs["labels"]
    )
    loss = summed(out, inputs["loss_mask"])
    loss.backward()
    for sender, features in zip(senders, received, strict=True):
        if len(features):
            dist.send(features.grad, sender)
    return loss.detach().reshape(1)


def vision_turn(mimo: Any, batches: Iterator[Any], train: Any, rank: int, language: int, vision: int) -> Tensor:
    place = rank - language
    parts = max(1, vision // language)
    served = [place // parts] if parts > 1 else list(train.roles.served("vision"))
    inputs = next(batches)
    features = torch.zeros(0, 32)
    if inputs["modality_inputs"]:
        features = mimo.modality_submodules["images"].forward(encoder_inputs=inputs["modality_inputs"]["images"])
    if parts > 1:
        counts = [len(features)]
    else:  # as megatron-core does it: by the special tokens of the rows
        rows = torch.eq(inputs["input_ids"], image_token()).sum(1)
        counts = rows.reshape(len(served), -1).sum(1).tolist()
    assert sum(counts) == len(features)
    pieces = features.split(counts)
    gradients = [torch.zeros_like(piece) for piece in pieces]
    for lane, piece in zip(served, pieces, strict=True):
        dist.send(torch.tensor([len(piece)]), lane)
        if len(piece):
            dist.send(piece.detach().contiguous(), lane)
    for lane, gradient in zip(served, gradients, strict=True):
        if len(gradient):
            dist.recv(gradient, lane)
    if len(features):
        features.backward(torch.cat(gradients))
    return torch.zeros(1)


RUNS = [(4, 2, 20), (2, 4, 15), (4, 4, 10), (2, 2, 5)]
"""Ranks of both grids and steps; each run begins where the one before was ended."""


def test_two_grids_train_as_one_over_stops_and_other_sizes(data: Path) -> None:
    steps = sum(count for *_, count in RUNS)
    ((losses, gradients, weights),) = on_gloo(1, lambda rank: one_grid(data, steps))
    assert len(losses) == 50
    given: Any = ({}, None)
    found: list[float] = []
    for language, vision, count in RUNS:
        ranks = on_gloo(
            language + vision,
            lambda rank, run=(language, vision, count), given=given: two_grids(rank, data, *run, given),
        )
        if not found:
            of_grids = ranks[0][1] | ranks[language][1]
            assert of_grids.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert torch.allclose(of_grids[name], gradient, atol=1e-6, rtol=1e-5), name
        found += ranks[0][0]
        given = (ranks[0][2] | ranks[language][2], ranks[-1][3])
    assert found == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(given[0][name], one, atol=1e-6) for name, one in weights.items())
    assert losses[-1] < 0.9 * losses[0]

"""One process of `scripts/mimo-tests`: a rank of Megatron-LM's `examples/mimo/pretrain_mimo.py`, or its one-grid twin.

The program, its topology, its model builder, communicators, step and checkpoints are those of the checkout. In their
place, since there is no GPU: `pretend_cuda` answers for CUDA and gloo for NCCL; layers are those of megatron-core that
need no Transformer Engine; the language model is a GPT of one layer instead of Mamba; and RADIO has one layer of width
16, and does not crop its position embeddings at random. Adam forgets, with betas of 0, since the distributed optimizer
resumes only with Apex or Transformer Engine.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import functools
import json
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests/trainers")]
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Python 3.11

from families import encoder_of  # noqa: E402
from megatron_pretrain import digest, pretend_cuda  # noqa: E402

from energon_bridge import EnergonMultiModalDataModule, make_roles  # noqa: E402
from energon_bridge.core.encoder.cooking import Cooker  # noqa: E402
from energon_bridge.models.conversations.cooker import cook_conversation  # noqa: E402
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder  # noqa: E402
from energon_bridge.models.images.devices import normalise_on_device  # noqa: E402
from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider  # noqa: E402
from energon_bridge.trainers.roles.mimo import MimoEncoder, mimo_inputs  # noqa: E402
from energon_bridge.training.megatron.model import SharedAttention  # noqa: E402

RADIO = "radio_encoder"
WHERE = {"vision": MimoEncoder(module=RADIO, encoder=RADIO, arguments={"pixel_values": "x"})}


class Chats(ChatTemplateTaskEncoder):
    """Conversations with pictures of 16 x 16 pixels, four tokens each."""

    cookers = (Cooker(cook_conversation),)


class Attention(SharedAttention):
    """Finds its tensor-parallel group without the global ones, which this program does not make."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tp_group = options["pg_collection"].tp


def make_data(args: Any, roles: Any) -> EnergonMultiModalDataModule:
    known = encoder_of("llava")
    return EnergonMultiModalDataModule(
        args.energon_path,
        None,
        task_encoder=Chats(known.tokenizer, known.family, ChatConfig(seq_length=args.seq_length)),
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        num_workers=args.num_workers,
        num_lanes=8,
        shuffle_buffer_size=16,
        pin_memory=False,
        roles=roles,
    )


# In place of what needs a GPU ----------------------------------------------------------------------------------------


def gloo_for_nccl() -> None:
    """Make all process groups with gloo."""

    def on_gloo(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name not in ("device_id", "pg_options")}
        return function(*args, **kept | ({"backend": "gloo"} if "backend" in kept else {}))

    for name in ("init_process_group", "new_group", "new_subgroups_by_enumeration"):
        setattr(dist, name, functools.partial(on_gloo, getattr(dist, name)))


def small_models() -> None:
    """Replace layers of Transformer Engine and Mamba, and the sizes of RADIO."""
    from examples.mimo.model_providers import nemotron_moe_vlm, radio_encoder
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    real_vision, real_language = radio_encoder.radio_vision_config, nemotron_moe_vlm.language_model_spec

    def vision_config(*args: Any) -> Any:
        config = real_vision(*args)
        config.num_layers, config.hidden_size, config.ffn_hidden_size, config.kv_channels = 1, 16, 32, 8
        config.num_attention_heads = config.num_query_groups = 2
        return config

    def vision_layer() -> ModuleSpec:
        layer = get_vit_layer_with_local_spec()
        layer.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
        return layer

    def language_spec(*args: Any) -> ModuleSpec:
        params = real_language(*args).params
        for name in ("mamba_stack_spec", "hybrid_layer_pattern", "position_embedding_type"):
            del params[name]
        layer = get_gpt_layer_local_spec()
        layer.submodules.self_attention.submodules.core_attention = Attention
        return ModuleSpec(GPTModel, params=params | {"transformer_layer_spec": layer})

    nemotron_moe_vlm.radio_vision_config = vision_config
    nemotron_moe_vlm.language_model_spec = language_spec
    nemotron_moe_vlm.TERowParallelLinear = RowParallelLinear
    radio_encoder.get_vit_layer_with_transformer_engine_spec = vision_layer
    radio_encoder.RADIOViTModel = functools.partial(radio_encoder.RADIOViTModel, force_cpe_eval_mode=True)


# A rank of the program -----------------------------------------------------------------------------------------------


def add_arguments(parser: Any) -> Any:
    for name in ("--energon-path", "--record", "--dataloader-save", "--dataloader-load"):
        if name not in parser._option_string_actions:  # a version may have it by itself
            parser.add_argument(name)
    return parser


def record(kind: str, *values: Any) -> None:
    from megatron.training import get_args

    with (Path(get_args().record) / f"{kind}{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps([get_args().curr_iteration, *values]) + "\n")


def our_loaders(args: Any, topology: Any) -> tuple[Any, Any, None]:
    """Return our iterators, where the program makes those of its mock data."""
    roles = make_roles({"language": topology.grids["language"], "vision": topology.grids[RADIO]})
    train, valid, test = train_valid_test_dataloaders_provider(lambda: make_data(args, roles))((None, None))
    for loader, kind in ((train, "train"), (valid, "valid")):
        loader.on_delivery = functools.partial(recorded_inputs, kind)  # type: ignore[union-attr]
    return train, valid, test


def recorded_inputs(kind: str, step: Any) -> Any:
    inputs = mimo_inputs(step, WHERE)
    if "language" in step:
        record(kind, [*step["language"].__key__], digest(inputs["input_ids"], inputs["labels"], inputs["loss_mask"]))
    return inputs


def prepared(models: list[Any]) -> list[Any]:
    """Give the encoder the configuration that `Float16Module` gives it otherwise, and leave the weights in a file."""
    from examples.mimo.training.runtime import _module_config
    from megatron.training import get_args

    for module in filter(None, models[0].modality_submodules.values()):
        module.config = _module_config(module)
    torch.save(dict(models[0].named_parameters()), Path(get_args().record) / f"weights{dist.get_rank()}.pt")
    return models


def rank() -> None:
    """Run the program."""
    from examples.mimo import pretrain_mimo
    from examples.mimo.training import step

    real_arguments, real_loss = pretrain_mimo.extra_args_provider, step.loss_func

    def loss(output: Any, *, loss_mask: Any) -> Any:
        total, count, logged = real_loss(output, loss_mask=loss_mask)
        record("loss" if torch.is_grad_enabled() else "valid-loss", float(total), int(count))
        return total, count, logged

    step.loss_func = loss
    pretrain_mimo.extra_args_provider = lambda parser: add_arguments(real_arguments(parser))
    pretrain_mimo.MimoBuildConfig = functools.partial(pretrain_mimo.MimoBuildConfig, pre_wrap_hooks=[prepared])
    pretrain_mimo.build_train_valid_test_data_loaders = our_loaders
    pretrain_mimo.main()


# Its twin on one grid ------------------------------------------------------------------------------------------------


def microbatches(args: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what the loader without roles gives, and the arguments of the model, put together here."""
    for batch in make_data(args, None).train_dataloader():
        pixels = normalise_on_device(batch).pixel_values
        media = {} if pixels is None else {RADIO: {RADIO: {"x": pixels}}}
        fields = {"input_ids": batch.tokens, "position_ids": batch.position_ids, "labels": batch.labels}
        yield batch, fields | {"loss_mask": batch.loss_mask, "modality_inputs": media}


def one_grid() -> None:
    """Train a model that has all parts in one process, from the weights in `--load`."""
    from examples.mimo import pretrain_mimo
    from examples.mimo.model_providers import nemotron_moe_vlm
    from examples.mimo.model_providers.nemotron_moe_vlm import vision_submodules_spec
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.global_vars import set_global_variables

    real_arguments = pretrain_mimo.extra_args_provider
    pretrain_mimo.extra_args_provider = lambda parser: add_arguments(real_arguments(parser))
    args = pretrain_mimo._parse_and_validate()
    set_global_variables(args, build_tokenizer=False)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    grid = HyperCommGrid([1, 1, 1], ["tp", "pp", "dp"])
    model = MimoModel(
        MimoModelConfig(
            language_model_spec=nemotron_moe_vlm.language_model_spec(args, groups, grid),
            modality_submodules_spec={RADIO: vision_submodules_spec(args, groups, grid)},
            special_token_ids={RADIO: args.image_token_id},
        ),
        cp_group=groups.cp,
        tp_group=groups.tp,
    )
    weights: dict[str, Any] = {}
    for path in Path(args.load).glob("weights*.pt"):
        weights |= torch.load(path)
    model.load_state_dict(weights, strict=False)
    assert weights.keys() == dict(model.named_parameters()).keys()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps, weight_decay=0
    )
    given = microbatches(args)
    for iteration in range(args.train_iters):
        args.curr_iteration, tokens = iteration, 0
        for _ in range(args.global_batch_size // args.micro_batch_size):
            batch, inputs = next(given)
            losses, mask = model(**inputs)
            loss = (losses.float() * mask).sum()
            loss.backward()
            tokens += int(mask.sum())
            record("train", [*batch.__key__], digest(batch.tokens, batch.labels, batch.loss_mask))
            record("loss", float(loss), int(mask.sum()))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= tokens
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pretend_cuda():
        gloo_for_nccl()
        small_models()
        one_grid() if "--llm-only" in sys.argv else rank()

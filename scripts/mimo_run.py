"""One process of `scripts/mimo-tests`: a rank of Megatron-LM's `examples/mimo/pretrain_mimo.py` or of Megatron-Bridge's
`pretrain_megatron_mimo`, or their one-grid twin.

The program, its topology, its model builder, communicators, step and checkpoints are those of the checkout; Bridge's
gets the models of the example, and the step of our docs. In their place, since there is no GPU: `pretend_cuda` answers
for CUDA and gloo for NCCL; layers are those of megatron-core that need no Transformer Engine; the language model is a
GPT of one layer instead of Mamba; and RADIO has one layer of width 16, and does not crop its position embeddings at
random. Adam forgets, with betas of 0, since the distributed optimizer resumes only with Apex or Transformer Engine.
`STAND_INS` are modules that Bridge imports, and MIMO does not use.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import types
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

from energon_bridge import make_roles  # noqa: E402
from energon_bridge.core.encoder.cooking import Cooker  # noqa: E402
from energon_bridge.models.conversations.cooker import cook_conversation  # noqa: E402
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder  # noqa: E402
from energon_bridge.models.images.devices import normalise_on_device  # noqa: E402
from energon_bridge.trainers.bridge import DatasetBuildContext, EnergonDatasetBuilder, EnergonDatasetConfig  # noqa: E402
from energon_bridge.trainers.megatron_lm import read_rank_files, train_valid_test_dataloaders_provider  # noqa: E402
from energon_bridge.trainers.roles.mimo import MimoEncoder, mimo_inputs  # noqa: E402
from energon_bridge.training.megatron.model import SharedAttention  # noqa: E402

RADIO = "radio_encoder"
STAND_INS = (
    *(f"megatron.bridge{name}" for name in ("", ".models", ".models.conversion", ".peft", ".peft.base", ".peft.lora")),
    *("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"),
    *("modelopt", "modelopt.torch", "modelopt.torch.opt", "modelopt.torch.opt.plugins", "modelopt.torch.distill"),
    *("modelopt.torch.distill.plugins", "modelopt.torch.distill.plugins.megatron"),
)
WHERE = {"vision": MimoEncoder(module=RADIO, encoder=RADIO, arguments={"pixel_values": "x"})}


class Chats(ChatTemplateTaskEncoder):
    """Conversations with pictures of 16 x 16 pixels, four tokens each."""

    cookers = (Cooker(cook_conversation),)


class Attention(SharedAttention):
    """Finds its tensor-parallel group without the global ones, which this program does not make."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tp_group = options["pg_collection"].tp


def data_config(args: Any) -> EnergonDatasetConfig:
    known = encoder_of("llava")
    return EnergonDatasetConfig(
        path=args.energon_path,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        task_encoder=Chats(known.tokenizer, known.family, ChatConfig(seq_length=args.seq_length, pad_to_multiple_of=2)),
        num_workers=args.num_workers,
        num_lanes=8,
        shuffle_buffer_size=16,
        pin_memory=False,
    )


def make_data(args: Any, roles: Any) -> Any:
    return EnergonDatasetBuilder(data_config(args)).data_module(DatasetBuildContext(1, 1, 0, roles=roles))


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
        params["config"].sequence_parallel = False  # its layers do not have it
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
    for name in ("--energon-path", "--record", "--dataloader-save", "--dataloader-load", "--killed-at"):
        if name not in parser._option_string_actions:  # a version may have it by itself
            parser.add_argument(name)
    return parser


def arguments() -> Any:
    """Return the arguments of the example, in a process that is started without its program."""
    from examples.mimo import pretrain_mimo
    from megatron.training.global_vars import set_global_variables

    real_arguments = pretrain_mimo.extra_args_provider
    pretrain_mimo.extra_args_provider = lambda parser: add_arguments(real_arguments(parser))
    args = pretrain_mimo._parse_and_validate()
    set_global_variables(args, build_tokenizer=False)
    dist.init_process_group("gloo")
    return args


def specs(args: Any, groups: Any) -> tuple[Any, Any]:
    """Return what the language model and the encoder are made from."""
    from examples.mimo.model_providers import nemotron_moe_vlm
    from megatron.core.hyper_comm_grid import HyperCommGrid

    language, vision = (HyperCommGrid([tp, 1, 1], ["tp", "pp", "dp"]) for tp in (args.llm_tp, args.encoder_tp))
    return (
        nemotron_moe_vlm.language_model_spec(args, groups, language),
        nemotron_moe_vlm.vision_submodules_spec(args, groups, vision),
    )


def record(kind: str, *values: Any) -> None:
    from megatron.training import get_args

    args = get_args()
    if kind == "train" and args.killed_at == str(args.curr_iteration):
        os.kill(os.getpid(), signal.SIGKILL)
    with (Path(args.record) / f"{kind}{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps([args.curr_iteration, *values]) + "\n")


def recorded_loss(real: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any, **options: Any) -> Any:
        total, count, logged = real(*args, **options)
        record("loss" if torch.is_grad_enabled() else "valid-loss", float(total), int(count))
        return total, count, logged

    return loss


def recorded_loaders(*loaders: Any) -> None:
    for loader, kind in zip(loaders, ("train", "valid"), strict=True):
        loader.on_delivery = functools.partial(recorded_inputs, kind)


def recorded_inputs(kind: str, step: Any) -> Any:
    inputs = mimo_inputs(step, WHERE)
    if "language" in step:
        record(kind, [*step["language"].__key__], digest(inputs["input_ids"], inputs["labels"], inputs["loss_mask"]))
    return inputs


def roles_of(grids: Any) -> Any:
    return make_roles({"language": grids["language"], "vision": grids[RADIO]})


def our_loaders(args: Any, topology: Any) -> tuple[Any, Any, None]:
    """Return our iterators, where the program makes those of its mock data."""
    roles = roles_of(topology.grids)
    train, valid, test = train_valid_test_dataloaders_provider(lambda: make_data(args, roles))((None, None))
    recorded_loaders(train, valid)
    return train, valid, test


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

    real_arguments = pretrain_mimo.extra_args_provider
    step.loss_func = recorded_loss(step.loss_func)
    pretrain_mimo.extra_args_provider = lambda parser: add_arguments(real_arguments(parser))
    pretrain_mimo.MimoBuildConfig = functools.partial(pretrain_mimo.MimoBuildConfig, pre_wrap_hooks=[prepared])
    pretrain_mimo.build_train_valid_test_data_loaders = our_loaders
    pretrain_mimo.main()


# A rank of Megatron-Bridge's loop -------------------------------------------------------------------------------------


def stand_ins() -> None:
    def answer(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})

    for name in STAND_INS:
        made: Any = types.ModuleType(name)
        made.__path__ = [str(Path(folder, *name.split("."))) for folder in sys.path]
        made.__getattr__ = answer
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent or name], last or name, made)


def bridge_model(args: Any) -> Any:
    """Return Bridge's provider of the example's model."""
    from megatron.bridge.models.megatron_mimo import megatron_mimo_config as config
    from megatron.bridge.models.megatron_mimo.megatron_mimo_provider import MegatronMIMOProvider

    language, vision = specs(args, None)
    for projection in vision.submodules["input_projections"]:
        del projection.params["tp_group"]  # Bridge sets its own
    grids = {
        RADIO: config.ModuleParallelismConfig(data_parallel_size=args.encoder_dp),
        "language": config.ModuleParallelismConfig(
            data_parallel_size=args.llm_dp, rank_offset=args.llm_offset, tensor_model_parallel_size=args.llm_tp
        ),
    }
    model = MegatronMIMOProvider(
        language_model_spec=language,
        modality_submodules_spec={RADIO: vision},
        special_token_ids={RADIO: args.image_token_id},
        megatron_mimo_parallelism_config=config.MegatronMIMOParallelismConfig(module_parallelisms=grids),
        bf16=False,
    )
    model.register_pre_wrap_hook(prepared)
    return model


def bridge_config(args: Any) -> Any:
    from megatron.bridge.training import config
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    def same(*names: str, **others: Any) -> dict[str, Any]:
        return {name: getattr(args, name) for name in names} | others

    all_rows = args.micro_batch_size * args.llm_dp  # Bridge counts those of all language ranks
    return config.ConfigContainer(
        train=config.TrainingConfig(**same("global_batch_size", "train_iters", micro_batch_size=all_rows)),
        validation=config.ValidationConfig(**same("eval_interval", "eval_iters")),
        model=bridge_model(args),
        optimizer=config.OptimizerConfig(
            **same("lr", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "weight_decay", min_lr=args.lr),
            use_distributed_optimizer=True,
        ),
        scheduler=config.SchedulerConfig(**same("lr_decay_style"), start_weight_decay=0.0, end_weight_decay=0.0),
        dataset=data_config(args),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(),
        checkpoint=config.CheckpointConfig(
            **same("save", "save_interval", "load", "ckpt_step", "ckpt_format", save_optim=False, load_optim=False),
            load_rng=False,  # it is that of other tensor ranks
        ),
    )


def bridge_iterators(cfg: Any, infra: Any, train_state: Any = None) -> tuple[Any, Any]:
    """Return our iterators, from the state of the data if the run goes on."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    roles = roles_of(infra.module_to_grid_map)
    train, valid, _ = EnergonDatasetBuilder(cfg.dataset).build(DatasetBuildContext(1, 1, 0, roles=roles))
    recorded_loaders(train, valid)
    if train is not None and train_state is not None:
        train.restore_state(lambda: read_rank_files(f"{cfg.checkpoint.load}/energon", train_state.step))
    return RerunDataIterator(train) if infra.pg_collections["language"] else train, valid


def bridge_rank() -> None:
    """Run Bridge's loop."""
    stand_ins()
    from megatron.bridge.training import megatron_mimo_step
    from megatron.bridge.training.pretrain_megatron_mimo import pretrain_megatron_mimo
    from megatron.bridge.training.utils import train_utils

    args, loss = arguments(), recorded_loss(megatron_mimo_step.loss_func)
    train_utils.report_theoretical_memory = lambda *_, **__: None  # as in Bridge's own tests of MIMO

    def forward_step(state: Any, batches: Any, model: Any) -> Any:
        args.curr_iteration = state.train_state.step
        output, mask = model(**(megatron_mimo_step.get_batch(batches) or {"input_ids": None}))
        return output, functools.partial(loss, mask)

    pretrain_megatron_mimo(bridge_config(args), forward_step, bridge_iterators)


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
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    args = arguments()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    language, vision = specs(args, groups)
    model = MimoModel(
        MimoModelConfig(
            language_model_spec=language,
            modality_submodules_spec={RADIO: vision},
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
        {"pretrain_mimo": rank, "bridge": bridge_rank, "one_grid": one_grid}[sys.argv.pop(1)]()

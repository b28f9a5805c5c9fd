"""Megatron-LM's real `pretrain` on one rank, with our provider: the program that `test_pretrain.py` starts.

It is what a user would write: a task encoder, a provider, a model, a forward step, and the call of `pretrain`. Image
and caption become one sequence (levels of image patches, then bytes) for a tiny GPT. Each rank appends a line for every
microbatch that its model has seen to `RECORD/dpN-tpN-ppN-vpN.jsonl`: step, training or not, keys, a digest of the
tensors of the batch, and on the last pipeline stage the loss.

Without CUDA it runs on the CPU, which Megatron-LM does not support: `pretend_cuda` answers for CUDA, more of it than
`energon_bridge.training.megatron.ranks` because `pretrain` asks for more. The loop, its checkpoints and the
iterators are the real ones; kernels, streams and timings are not. With CUDA nothing is replaced.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import unwrap_model
from megatron.training import get_args, initialize, training
from megatron.training.arguments import core_transformer_config_from_args

from energon_bridge import CaptioningSample, DefaultTaskEncoder, EnergonMultiModalDataModule
from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider
from energon_bridge.training.megatron.ranks import cpu_backend

SEQUENCE, PATCHES, LEVELS = 32, 4, 16
VOCABULARY = 128 + LEVELS  # ASCII, then the levels of patches


class Encoder(DefaultTaskEncoder):
    """Makes one sequence of an image and its caption."""

    def encode_sample(self, sample: CaptioningSample) -> Any:
        patches = torch.nn.functional.adaptive_avg_pool2d(sample.image.mean(0, keepdim=True), PATCHES).flatten()
        levels = 128 + (patches * (LEVELS - 1)).round().long()
        text = torch.tensor(list(sample.caption.encode("ascii")))
        tokens = torch.zeros(SEQUENCE + 1, dtype=torch.int64)
        sequence = torch.cat([levels, text])[: SEQUENCE + 1]
        tokens[: len(sequence)] = sequence
        keys = {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__}
        return {**keys, "image": sample.image, "tokens": tokens, "mask": (tokens[1:] != 0).float()}


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    for name in ("--dataloader-save", "--dataloader-load", "--energon-path", "--energon-replica-loading", "--record"):
        if name not in parser._option_string_actions:  # a version may have it by itself
            parser.add_argument(name)
    parser.add_argument("--energon-validation", default="one")
    parser.add_argument("--energon-resume", default="files")
    return parser


def make_data() -> EnergonMultiModalDataModule:
    args = get_args()
    return EnergonMultiModalDataModule(
        args.energon_path,
        None,
        None,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        num_workers=args.num_workers,
        num_lanes=8,
        pin_memory=False,
        task_encoder=Encoder(),
        replica_loading=args.energon_replica_loading,
    )


def provider(counts: Any, vp_stage: int | None = None) -> Any:
    # The options are known only now.
    return made_provider()(counts, vp_stage)


provider.is_distributed = True  # type: ignore[attr-defined]


@functools.cache
def made_provider() -> Any:
    args = get_args()
    return train_valid_test_dataloaders_provider(
        make_data, validation_sets=args.energon_validation, resume=args.energon_resume
    )


def make_model(pre_process: bool = True, post_process: bool = True, **kwargs: Any) -> GPTModel:
    config = kwargs.get("config") or core_transformer_config_from_args(get_args())
    if get_args().distributed_backend == "gloo":
        # Sends of the interleaved schedule that are under way would read memory that is used again.
        config.deallocate_pipeline_outputs = False
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        vp_stage=kwargs.get("vp_stage"),
    )


def forward_step(batches: Iterator[Any], model: torch.nn.Module, *_: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    seen = {"step": get_args().curr_iteration, "training": model.training, "keys": batch["__key__"]}
    seen["digest"] = digest(batch["image"], batch["tokens"], batch["mask"])
    tokens, mask = batch["tokens"].cuda(), batch["mask"].cuda()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(len(tokens), -1)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, device=tokens.device).triu(1).bool()
    output = model(tokens[:, :-1].contiguous(), positions, hidden, labels=tokens[:, 1:].contiguous())
    gpt = unwrap_model(model)
    record = functools.partial(write, gpt.vp_stage or 0, seen)
    if not gpt.post_process:
        record()
    return output, functools.partial(loss_of, record, mask)


def loss_of(record: Any, mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    total = (output.float() * mask).sum()
    count = mask.sum().to(torch.int)
    record(loss=float(total / count))
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def write(vp: int, seen: dict[str, Any], **more: Any) -> None:
    dp = parallel_state.get_data_parallel_rank()
    tp = parallel_state.get_tensor_model_parallel_rank()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    with (Path(get_args().record) / f"dp{dp}-tp{tp}-pp{pp}-vp{vp}.jsonl").open("a") as file:
        file.write(json.dumps({**seen, **more}) + "\n")


class Nothing:
    """A stream or an event of a device that has none: every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def elapsed_time(self, end: Nothing) -> float:
        return 1.0


@contextmanager
def pretend_cuda() -> Iterator[None]:
    """Answer for CUDA what `pretrain` asks beyond `cpu_backend`; for a process that does nothing else."""
    memory = 1 << 30
    device = SimpleNamespace(major=9, minor=0, total_memory=memory, multi_processor_count=1, name="cpu")
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "cpu",
        "get_device_capability": (9, 0),
        "get_device_properties": device,
        "memory_stats": defaultdict(int),
        "mem_get_info": (memory, memory),
        "current_stream": Nothing(),
        "default_stream": Nothing(),
        "stream": nullcontext(),
    }
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    answers |= dict.fromkeys(("set_device", "set_stream", "empty_cache", "reset_peak_memory_stats"))
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[assignment,misc]
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.accelerator.current_stream = lambda *_: Nothing()  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[assignment]
    # Compilers of kernels.
    for module in (initialize, training):
        for name in ("_compile_dependencies", "set_jit_fusion_options"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: None)
    with cpu_backend():
        yield


def main() -> None:
    names = inspect.signature(training.pretrain).parameters
    offered: dict[str, Any] = {
        "train_valid_test_dataset_provider": provider,
        "model_provider": make_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "extra_args_provider": add_arguments,
    }
    if "cfg_container" in names:  # from 0.18 on the program parses the arguments
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        offered["cfg_container"] = pretrain_cfg_container_from_args(
            parse_and_validate_args(extra_args_provider=add_arguments)
        )
    training.pretrain(**{name: value for name, value in offered.items() if name in names})


if __name__ == "__main__":
    torch.set_num_threads(1)
    with nullcontext() if torch.cuda.is_available() else pretend_cuda():
        main()
        # The interpreter's end would find the threads of gloo at work, and abort now and then.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

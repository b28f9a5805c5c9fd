"""The processes of a run: discovered, connected, and grouped into replicas by megatron-core, also without a GPU.

torchrun's variables take precedence over SLURM's; a process started by neither is alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.order.rng import key_of
from energon_bridge.training.config import RunConfig

# ---------------------------------------------------------------------------------------------------------------------
# megatron-core without a GPU: its CUDA calls, redirected to the CPU.
#
# megatron-core writes `device="cuda"`, `.cuda()` and `torch.cuda.current_device()` in many places and checks types by
# name (`torch.cuda.FloatTensor`). Inside `cpu_backend()` all of that means the CPU. Only runs without a GPU enter it.


_CPU = torch.device("cpu")


class _Stream:
    """A CUDA stream that is always up to date: waiting does nothing."""

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


@contextmanager
def cpu_backend() -> Iterator[None]:
    """Redirect this thread's CUDA calls to the CPU within the block."""
    with ExitStack() as stack:
        for name, value in (
            ("current_device", lambda: _CPU),
            ("current_stream", lambda *_: _Stream()),
            ("synchronize", lambda *_: None),
            ("manual_seed", torch.manual_seed),
            ("get_rng_state", lambda *_: torch.get_rng_state()),
        ):
            stack.enter_context(_replaced(torch.cuda, name, value))
        for name, answer in (
            ("_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            ("_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        ):
            stack.enter_context(_replaced(megatron_random, name, answer))
        stack.enter_context(warnings.catch_warnings())
        # These warnings are about calls of megatron-core and torch, but the mode makes them look like ours.
        for message in ("The .grad attribute of a Tensor that is not a leaf", "Please use DTensor instead"):
            warnings.filterwarnings("ignore", message=message)
        stack.enter_context(_CudaToCpu())
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    earlier = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, earlier)


class _CudaToCpu(TorchFunctionMode):
    """Rewrite devices in torch calls, and name tensor types as if they were on CUDA."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


# ---------------------------------------------------------------------------------------------------------------------
# The processes of a run: discovered from the environment, connected, and grouped into replicas by megatron-core.


_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The process groups of this process in the run, and its device."""

    groups: ProcessGroupCollection
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and logs."""
        return dist.get_rank() == 0

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Return the last stage's values on all stages; the others pass a tensor of the same shape and type."""
        if self.groups.pp.size() > 1:
            source = dist.get_global_rank(self.groups.pp, self.groups.pp.size() - 1)
            dist.broadcast(values, source, group=self.groups.pp)
        return values


@contextmanager
def connected_ranks(config: RunConfig) -> Iterator[Ranks]:
    """Connect the processes of a run and form its groups; disconnect them at the end.

    Raises:
        ConfigurationError: The number of processes does not fit, or CUDA is requested but not available.
    """
    device = _device(config.train.accelerator)
    rank, world_size = launched_rank(os.environ)
    config.accumulate(config.parallel.data_parallel_size(world_size))
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            stack.enter_context(cpu_backend())
        backend = "nccl" if device.type == "cuda" else "gloo"
        if world_size == 1 and "MASTER_ADDR" not in os.environ:
            dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        else:
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        stack.callback(dist.destroy_process_group)
        parallel = config.parallel
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            context_parallel_size=parallel.cp,
        )
        stack.callback(parallel_state.destroy_model_parallel)
        # megatron-core forks its random states, so they must exist even if nothing draws from them.
        tensor_parallel.model_parallel_cuda_manual_seed(key_of("step", config.seed) >> 40)
        yield Ranks(groups=ProcessGroupCollection.use_mpu_process_groups(), device=device)


def launched_rank(environment: os._Environ[str] | dict[str, str]) -> tuple[int, int]:
    """Return rank and number of processes; under SLURM, set the variables that torch.distributed reads.

    Raises:
        ConfigurationError: SLURM started tasks on several nodes, and nothing names the first one.
    """
    if "RANK" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    # SLURM sets its variables in an interactive allocation too, where no task was started by srun.
    tasks = int(environment.get("SLURM_NTASKS", "1"))
    if "SLURM_PROCID" not in environment or tasks == 1:
        return 0, 1
    if "MASTER_ADDR" not in environment:
        if int(environment.get("SLURM_NNODES", "1")) > 1:
            raise ConfigurationError(
                f"SLURM started {tasks} tasks on {environment['SLURM_NNODES']} nodes, but MASTER_ADDR is not set: set "
                "it to the name of the first node, as scripts/launch/slurm.sbatch does: "
                'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
            )
        environment["MASTER_ADDR"] = "127.0.0.1"
    # Jobs that share a node must not share a port.
    environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000))
    return int(environment["SLURM_PROCID"]), tasks


def _device(accelerator: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if accelerator == "cpu" or (accelerator == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigurationError(
            f"train.accelerator={accelerator}, but torch {torch.__version__} finds no CUDA device: set "
            "train.accelerator=cpu, or check nvidia-smi and the build of torch"
        )
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return torch.device("cuda", int(local) % torch.cuda.device_count())

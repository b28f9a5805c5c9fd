"""megatron-core without a GPU: its CUDA calls, redirected to the CPU.

megatron-core writes `device="cuda"`, `.cuda()` and `torch.cuda.current_device()` in many places and checks types by
name (`torch.cuda.FloatTensor`). Inside `cpu_backend()` all of that means the CPU. Only machines without a GPU import
this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

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

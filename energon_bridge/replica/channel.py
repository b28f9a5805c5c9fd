"""Moving one message from the rank that loads to the other ranks of a group.

A message is a first frame of `FRAME` bytes (eight with the length of the text, the text as far as it fits), the rest
of the text if there is any, and one flat tensor for each dtype, sent as bytes. The text is JSON: dtype and shape of
each tensor, and the node of `structure`. Texts and tensors travel on the device of the group's backend: NCCL moves GPU
memory, every other backend that of the host.

The sender never waits for a receiver: in a pipeline, a later stage asks for a microbatch only after it has got the
activations of the stage before, which needs that microbatch itself. What is under way is kept until it has arrived.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from energon_bridge.replica.structure import decode, encode

FRAME = 8192


class Channel:
    """The way from one rank to a group.

    Args:
        group: A process group.
        source: The global rank that sends.
    """

    def __init__(self, group: Any, source: int) -> None:
        self.group = group
        self.source = source
        nccl = str(dist.get_backend(group)) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def pack(self, value: Any) -> list[Tensor]:
        """Write a value down as the tensors to send.

        Raises:
            ConfigurationError: Something in it cannot be sent.
        """
        text, flats = written(value, self.device)
        framed = bytearray(len(text).to_bytes(8, "little") + text)
        framed += bytes(max(0, FRAME - len(framed)))
        whole = torch.frombuffer(framed, dtype=torch.uint8).to(self.device)
        rest = [whole[FRAME:]] if len(whole) > FRAME else []
        return [whole[:FRAME], *rest, *flats]

    def send(self, parcel: Sequence[Tensor]) -> None:
        """Send what `pack` returned to all other ranks of the group, without waiting for them."""
        while self._under_way and self._under_way[0][0].is_completed():
            work, _ = self._under_way.popleft()
            work.wait()  # raises what went wrong
        for data in parcel:
            work = dist.broadcast(data, self.source, group=self.group, async_op=True)
            self._under_way.append((work, data))

    def receive(self) -> Any:
        """Wait for the next value."""
        frame = bytes(self._take(FRAME).cpu().numpy())
        length = int.from_bytes(frame[:8], "little")
        text = frame[8 : 8 + length]
        if len(text) < length:
            text += bytes(self._take(length - len(text)).cpu().numpy())
        return read(text, self._take, self.device)

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._under_way:
            work, _ = self._under_way.popleft()
            work.wait()

    def _take(self, size: int) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=self.device)
        dist.broadcast(data, self.source, group=self.group)
        return data


def written(value: Any, device: torch.device) -> tuple[bytes, list[Tensor]]:
    """Write a value down as a text, and the bytes of its tensors: a flat uint8 tensor for each dtype.

    Raises:
        ConfigurationError: Something in it cannot be sent.
    """
    node, tensors = encode(value)
    table = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    text = json.dumps([table, node], separators=(",", ":")).encode()
    return text, [flat.view(torch.uint8) for flat in _flattened(tensors, device)]


def read(text: bytes, take: Callable[[int], Tensor], device: torch.device) -> Any:
    """Build the value that `written` has written down.

    Args:
        text: The text.
        take: Returns the next flat tensor, of so many bytes.
        device: Where the tensors are.
    """
    table, node = json.loads(text)
    kinds = [(getattr(torch, name), shape) for name, shape in table]
    flats = {
        dtype: take(sum(_numel(s) for d, s in kinds if d is dtype) * dtype.itemsize).view(dtype)
        for dtype in _non_empty(kinds)
    }
    return decode(node, _views(kinds, flats, device))


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _non_empty(kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.dtype]:
    """Return the dtypes with any values, in the order in which they appear: no flat tensor is sent for the others."""
    return list(dict.fromkeys(dtype for dtype, shape in kinds if _numel(shape)))


def _flattened(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the values of all tensors of each dtype, one behind the other."""
    dtypes = _non_empty([(t.dtype, t.shape) for t in tensors])
    return [torch.cat([t.reshape(-1).to(device) for t in tensors if t.dtype is dtype]) for dtype in dtypes]


def _views(
    kinds: Sequence[tuple[torch.dtype, Sequence[int]]], flats: dict[torch.dtype, Tensor], device: torch.device
) -> list[Tensor]:
    """Return the tensors that lie one behind the other in the flat ones."""
    start = dict.fromkeys(flats, 0)
    tensors = []
    for dtype, shape in kinds:
        size = _numel(shape)
        if not size:
            tensors.append(torch.empty(shape, dtype=dtype, device=device))
            continue
        tensors.append(flats[dtype][start[dtype] : start[dtype] + size].view(shape))
        start[dtype] += size
    return tensors

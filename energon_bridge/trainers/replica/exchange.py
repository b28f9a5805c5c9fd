"""Messages between ranks: from the one that loads to the others of its replica, and between data-parallel ranks.

Within a replica a message is a dict. One with the key `error` makes its receivers raise: an error of this package under
its own class, any other as a BroadcastError that names it.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from energon_bridge.core import errors
from energon_bridge.core.errors import BalanceError, BroadcastError, EnergonError
from energon_bridge.trainers.replica.groups import Replica
from energon_bridge.trainers.replica.structure import decode, encode

# Parcels --------------------------------------------------------------------------------------------------------------
#
# What is sent is one uint8 tensor: 8 bytes each with its own length and that of the text, the text, and the tensors,
# each from a multiple of 64 bytes on. The text is JSON: dtype and shape of each tensor, and the node of `structure`.


_HEAD = struct.Struct("<QQ")
_ALIGNED = 64
_CPU = torch.device("cpu")


def pack(value: Any, device: torch.device = _CPU) -> Tensor:
    """Write a value down as one uint8 tensor.

    Raises:
        ConfigurationError: Something in it cannot be sent.
    """
    node, tensors = encode(value)
    table = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([table, node], separators=(",", ":")).encode()
    places, size = _places(len(text), table)
    parcel = torch.empty(size, dtype=torch.uint8, device=device)
    head = bytearray(_HEAD.pack(size, len(text)) + text)
    parcel[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
    for tensor, (start, end) in zip(tensors, places, strict=True):
        parcel[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return parcel


def unpack(parcel: Tensor) -> Any:
    """Build the value again; its tensors are views of the parcel."""
    _, length = _HEAD.unpack(bytes(parcel[: _HEAD.size].cpu().numpy()))
    table, node = json.loads(bytes(parcel[_HEAD.size : _HEAD.size + length].cpu().numpy()))
    places, _ = _places(length, table)
    tensors = [
        parcel[start:end].view(getattr(torch, name)).view(shape)
        for (name, shape), (start, end) in zip(table, places, strict=True)
    ]
    return decode(node, tensors)


def _places(length: int, table: Sequence[Sequence[Any]]) -> tuple[list[tuple[int, int]], int]:
    """Return where the tensors of a table lie behind a text of this length, and the size of the parcel."""
    places = []
    end = _HEAD.size + length
    for name, shape in table:
        start = end + -end % _ALIGNED
        end = start + math.prod(shape) * getattr(torch, name).itemsize
        places.append((start, end))
    return places, end


# Channel --------------------------------------------------------------------------------------------------------------
#
# Moves one message from the rank that loads to the other ranks of a group: first `FRAME` bytes of its parcel, then the
# others, if any. Everything travels on the device of the group's backend: NCCL moves GPU memory, any other backend host
# memory.
#
# The sender never waits for a receiver. In a pipeline, a later stage asks for a microbatch only once it has the
# activations of the stage before it, which needs that same microbatch: waiting would be a deadlock. Sends under way are
# kept until they have completed.


FRAME = 8192


class Channel:
    """A one-way channel from one rank to a group.

    Args:
        source: The global rank that sends.
    """

    def __init__(self, group: Any, source: int) -> None:
        self.group = group
        self.source = source
        nccl = str(dist.get_backend(group)) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else _CPU
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, parcel: Tensor) -> None:
        """Send what `pack` returned to all other ranks of the group, without waiting for them."""
        while self._under_way and self._under_way[0][0].is_completed():
            work, _ = self._under_way.popleft()
            work.wait()  # raises if the send failed
        frame = parcel.new_zeros(FRAME)
        first = parcel[:FRAME]
        frame[: len(first)] = first
        for data in (frame, parcel[FRAME:]):
            if len(data):
                work = dist.broadcast(data, self.source, group=self.group, async_op=True)
                self._under_way.append((work, data))

    def receive(self) -> Any:
        """Wait for the next value."""
        frame = torch.empty(FRAME, dtype=torch.uint8, device=self.device)
        dist.broadcast(frame, self.source, group=self.group)
        size, _ = _HEAD.unpack(bytes(frame[: _HEAD.size].cpu().numpy()))
        if size <= FRAME:
            return unpack(frame)
        parcel = frame.new_empty(size)
        parcel[:FRAME] = frame
        dist.broadcast(parcel[FRAME:], self.source, group=self.group)
        return unpack(parcel)

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._under_way:
            work, _ = self._under_way.popleft()
            work.wait()


# Exchange -------------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

T = TypeVar("T")


class Exchange:
    """The messages of one replica. All its ranks must make the same calls in the same order.

    Args:
        replica: Who sends and who receives.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._channels = [(Channel(link.group, replica.source), link.keys) for link in replica.links]

    def answer(self, work: Callable[[], T]) -> T:
        """Call `work` on the source, and return its result, or raise its error, on every rank."""
        if not self.replica.is_source:
            result: T = self.receive()["answer"]
            return result
        try:
            result = work()
        except Exception as error:  # whatever it is: the other ranks wait for an answer
            self.send_error(error)
            raise
        self.send(self.pack(lambda keys: {"answer": result}))
        return result

    def pack(self, message: Callable[[frozenset[str] | None], Mapping[str, Any]]) -> list[Tensor]:
        """Serialise a message for all stages before sending any: one that cannot be sent reaches none.

        Args:
            message: Builds the message for a stage, given the batch fields that it needs (None: all).
        """
        return [pack(message(keys), channel.device) for channel, keys in self._channels]

    def send(self, parcels: Sequence[Tensor]) -> None:
        """Send what `pack` returned."""
        for (channel, _), parcel in zip(self._channels, parcels, strict=True):
            channel.send(parcel)

    def send_error(self, error: Exception) -> None:
        """Report an error to the other ranks; a failure to do so is logged, not raised."""
        try:
            self.send(self.pack(lambda keys: {"error": [type(error).__name__, str(error)]}))
        except Exception:  # a backend raises what it likes, and the error itself is what the caller must see
            logger.exception("could not send an error to the other ranks of the replica")

    def receive(self) -> Any:
        """Return the next message of the source, or raise its error."""
        message = self._channels[0][0].receive()
        if "error" in message:
            self._raise(*message["error"])
        return message

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        for channel, _ in self._channels:
            channel.flush()

    def _raise(self, name: str, text: str) -> NoReturn:
        """Raise the error of the source: ours under its own class, any other as a BroadcastError that names it."""
        where = f"rank {self.replica.source}, which loads for this replica"
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, EnergonError):
            raise kind(f"{where}: {text}")
        raise BroadcastError(f"{where}, failed with {name}: {text}")


# Peers ----------------------------------------------------------------------------------------------------------------
#
# The data-parallel ranks that share a global batch: what they tell each other, and the microbatches that they send. All
# of it runs on a gloo group of its own, from one thread: a collective of the training loop can never come in between,
# and GPUs and their streams have no part in it.


_TEXT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A microbatch on its way.

    Args:
        number: Its place in the global batch.
        source: The data-parallel rank that has loaded it.
        target: The one that runs it.
    """

    number: int
    source: int
    target: int


class Peers:
    """The data-parallel ranks, as one of them sees them. All must make the same calls in the same order.

    Args:
        group: A gloo group of the data-parallel ranks that nobody else uses; None: there is one.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def gather(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the numbers of all ranks, shape (ranks, numbers)."""
        own = torch.tensor(values, dtype=torch.float64)
        return torch.stack(self._gathered(own)).numpy()

    def tell(self, text: str) -> list[str]:
        """Return the texts of all ranks, cut to 4,096 bytes."""
        raw = text.encode()[:_TEXT]
        own = torch.frombuffer(bytearray(raw.ljust(_TEXT, b"\0")), dtype=torch.uint8)
        return [bytes(entry.numpy()).rstrip(b"\0").decode(errors="replace") for entry in self._gathered(own)]

    def exchange(
        self, moves: Sequence[Move], parcels: Mapping[int, Tensor], sizes: npt.NDArray[np.float64]
    ) -> dict[int, Any]:
        """Send and receive microbatches.

        Args:
            moves: All moves of the global batch, the same on every rank.
            parcels: What `pack` made of those that this rank sends, by number.
            sizes: Bytes of each microbatch that moves, by number.

        Returns:
            The microbatches that this rank receives, by number.
        """
        received = {
            move.number: torch.empty(int(sizes[move.number]), dtype=torch.uint8)
            for move in moves
            if move.target == self.rank
        }
        with self._reaching():
            works = [
                dist.irecv(received[move.number], self._global(move.source), self.group, move.number)
                for move in moves
                if move.target == self.rank
            ]
            works += [
                dist.isend(parcels[move.number], self._global(move.target), self.group, move.number)
                for move in moves
                if move.source == self.rank
            ]
            for work in works:
                assert work is not None  # every rank is in the group
                work.wait()
        return {number: unpack(parcel) for number, parcel in received.items()}

    def _gathered(self, own: Tensor) -> list[Tensor]:
        if self.group is None:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self._reaching():
            dist.all_gather(found, own, group=self.group)
        return found

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn gloo's failures to reach another rank into an error with the cause."""
        try:
            yield
        except RuntimeError as error:
            raise BalanceError(
                f"data-parallel rank {self.rank} of {self.size} cannot reach another one to balance microbatches: that "
                "rank has ended, or took fewer batches than this one within the timeout of the group. Look at the "
                f"first error of the other ranks ({error})"
            ) from error

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

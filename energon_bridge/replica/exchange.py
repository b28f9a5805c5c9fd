"""Messages between ranks: from the one that loads to the others of its replica, and between data-parallel ranks.

Within a replica a message is a dict. One with the key `error` makes its receivers raise: an error of this package under
its own class, any other as a BroadcastError that names it.
"""

from __future__ import annotations

import json
import logging
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

from energon_bridge import errors
from energon_bridge.errors import BalanceError, BroadcastError, EnergonError
from energon_bridge.replica.groups import Replica
from energon_bridge.replica.structure import decode, encode

# Channel --------------------------------------------------------------------------------------------------------------
#
# Moves one message from the rank that loads to the other ranks of a group. On the wire, a message is
#
#     frame     `FRAME` bytes: the length of the text (8 bytes), then the text as far as it fits
#     rest      the remainder of the text, if any
#     tensors   one flat tensor per dtype, as bytes
#
# The text is JSON: dtype and shape of each tensor, and the node of `structure`. Everything travels on the device of the
# group's backend: NCCL moves GPU memory, any other backend host memory.
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
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def pack(self, value: Any) -> list[Tensor]:
        """Serialise a value to the tensors to send.

        Raises:
            ConfigurationError: The value holds something that cannot be sent.
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
            work.wait()  # raises if the send failed
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
        take: Returns the next flat tensor, given its bytes.
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
    """Return the dtypes that have values, in order of appearance; the others get no flat tensor."""
    return list(dict.fromkeys(dtype for dtype, shape in kinds if _numel(shape)))


def _flattened(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Concatenate the values of all tensors of each dtype."""
    dtypes = _non_empty([(t.dtype, t.shape) for t in tensors])
    return [torch.cat([t.reshape(-1).to(device) for t in tensors if t.dtype is dtype]) for dtype in dtypes]


def _views(
    kinds: Sequence[tuple[torch.dtype, Sequence[int]]], flats: dict[torch.dtype, Tensor], device: torch.device
) -> list[Tensor]:
    """Cut the flat tensors into views of the given shapes; the inverse of `_flattened`."""
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

    def pack(self, message: Callable[[frozenset[str] | None], Mapping[str, Any]]) -> list[list[Tensor]]:
        """Serialise a message for all stages before sending any: one that cannot be sent reaches none.

        Args:
            message: Builds the message for a stage, given the batch fields that it needs (None: all).
        """
        return [channel.pack(message(keys)) for channel, keys in self._channels]

    def send(self, parcels: Sequence[Sequence[Tensor]]) -> None:
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
#
# A microbatch travels as one uint8 tensor: eight bytes with the length of the text of `structure`, the text, and the
# flat tensor of each dtype, each from a multiple of 64 bytes on.


_ALIGNED = 64
_CPU = torch.device("cpu")
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


def pack(value: Any) -> Tensor:
    """Write a microbatch down as one uint8 tensor.

    Raises:
        ConfigurationError: Something in it cannot be sent.
    """
    text, flats = written(value, _CPU)
    head = len(text).to_bytes(8, "little") + text
    starts = [_aligned(len(head))]
    for flat in flats:
        starts.append(_aligned(starts[-1] + len(flat)))
    parcel = torch.empty(starts[-1], dtype=torch.uint8)
    parcel[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for start, flat in zip(starts, flats, strict=False):
        parcel[start : start + len(flat)] = flat
    return parcel


def unpack(parcel: Tensor) -> Any:
    """Build the microbatch again; its tensors are views of the parcel."""
    length = int.from_bytes(bytes(parcel[:8].numpy()), "little")
    place = _aligned(8 + length)

    def take(size: int) -> Tensor:
        nonlocal place
        flat = parcel[place : place + size]
        place = _aligned(place + size)
        return flat

    return read(bytes(parcel[8 : 8 + length].numpy()), take, _CPU)


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED

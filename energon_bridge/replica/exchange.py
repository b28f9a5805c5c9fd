"""Messages between the rank that loads and the others of its replica, errors included.

A message is a dict. One with the key `error` makes the ranks that get it raise: an error of this package by its own
class, any other one as a BroadcastError that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from energon_bridge import errors
from energon_bridge.errors import BroadcastError, EnergonError
from energon_bridge.replica.channel import Channel
from energon_bridge.replica.groups import Replica

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Exchange:
    """The messages of one replica. All ranks of it must make the same calls in the same order.

    Args:
        replica: Who sends and who receives.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._channels = [(Channel(link.group, replica.source), link.keys) for link in replica.links]

    def answer(self, work: Callable[[], T]) -> T:
        """Do something on the source; its result, or its error, comes to every rank."""
        if not self.replica.is_source:
            result: T = self.receive()["answer"]
            return result
        try:
            result = work()
        except Exception as error:
            self.send_error(error)
            raise
        self.send(self.pack(lambda keys: {"answer": result}))
        return result

    def pack(self, message: Callable[[frozenset[str] | None], Mapping[str, Any]]) -> list[list[Tensor]]:
        """Write a message down for every stage, before any of them gets it: what cannot be sent reaches none.

        Args:
            message: Makes the message for a stage that needs some fields of a batch (None: all).
        """
        return [channel.pack(message(keys)) for channel, keys in self._channels]

    def send(self, parcels: Sequence[Sequence[Tensor]]) -> None:
        """Send what `pack` returned."""
        for (channel, _), parcel in zip(self._channels, parcels, strict=True):
            channel.send(parcel)

    def send_error(self, error: Exception) -> None:
        """Tell the other ranks of an error; what happens on the way there must not hide the error itself."""
        try:
            self.send(self.pack(lambda keys: {"error": [type(error).__name__, str(error)]}))
        except Exception:
            logger.exception("the other ranks of the replica could not be told of an error")

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
        """Raise the error of the source: ours by its own class, any other one as a BroadcastError that names it."""
        where = f"rank {self.replica.source}, which loads for this replica"
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, EnergonError):
            raise kind(f"{where}: {text}")
        raise BroadcastError(f"{where}, failed with {name}: {text}")

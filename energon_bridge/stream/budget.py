"""The bytes that the contents of waiting samples may take in one process, shared by its lanes.

Where they are exceeded, lanes that hold more than their share let go of what they need last, the lane that was served
last before the others. What was let go is encoded again when it is needed; the budget decides nothing else.
"""

from __future__ import annotations

import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class Holder(Protocol):
    """A stage of a lane that holds contents.

    Attributes:
        held: Their bytes.
    """

    held: int

    def let_go(self, size: int) -> None:
        """Let go of contents of at least so many bytes, if there are as many, and say so by `Budget.hold`."""
        ...


class Budget:
    """The budget of one process.

    Args:
        most: Its bytes.
        lanes: The lanes that share it.

    Attributes:
        held: Bytes held by all lanes.
    """

    def __init__(self, most: int, lanes: int) -> None:
        self._most = most
        self._lanes = lanes
        self._holders: list[Holder] = []
        self._said = False
        self.held = 0

    def join(self, holder: Holder) -> None:
        """Share the budget with a further lane."""
        self._holders.append(holder)

    def hold(self, holder: Holder, size: int) -> None:
        """Count bytes that a lane holds from now on, or, negative, no longer."""
        holder.held += size
        self.held += size

    def keep(self, served: Holder) -> None:
        """Let lanes beyond their shares let go of what is beyond the budget; `served` is the lane served last."""
        if self.held <= self._most:
            return
        share = self._most // max(self._lanes, len(self._holders))
        for holder in (served, *sorted(self._holders, key=lambda one: -one.held)):
            beyond = min(holder.held - share, self.held - self._most)
            if beyond > 0:
                holder.let_go(beyond)
        if not self._said:
            self._said = True
            logger.warning(
                "samples that wait to be packed or grouped take more than held_bytes=%d in this process (%d lanes): "
                "what is beyond is encoded again when it is needed (`encoded_again` in loader.counters()). Raise "
                "WorkerConfig(held_bytes=…), lower packing_buffer_size, or add what is large in postencode_sample",
                self._most,
                max(self._lanes, len(self._holders)),
            )

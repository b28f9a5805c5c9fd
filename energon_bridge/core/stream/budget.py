"""The byte budget for the contents of waiting samples, shared by the lanes of one process.

If it is exceeded, lanes that hold more than their share drop the contents they need last, beginning with the lane
served last. Dropped contents are encoded again when needed. The budget decides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from energon_bridge.core.samples.sample_place import pass_on

logger = logging.getLogger(__name__)


class Held(Protocol):
    """A row that waits, with its bytes; its content can be made again where it is None."""

    content: Any
    size: int


class Holder(Protocol):
    """A stage of a lane that holds contents.

    Attributes:
        held: Bytes of these contents.
    """

    held: int

    def needed_last(self) -> Iterable[Held]:
        """Return the rows whose contents may be dropped, those first that are needed last."""


class Budget:
    """The byte budget of one process.

    Args:
        most: Bytes allowed.
        lanes: Number of lanes that share it.

    Attributes:
        held: Bytes held by all lanes.
    """

    def __init__(self, most: int, lanes: int) -> None:
        self._most = most
        self._lanes = lanes
        self._holders: list[Holder] = []
        self.held = 0

    def join(self, holder: Holder) -> None:
        """Share the budget with a further lane."""
        self._holders.append(holder)

    def hold(self, holder: Holder, size: int) -> None:
        """Count bytes that a lane now holds (negative: that it dropped)."""
        holder.held += size
        self.held += size

    def _drop(self, holder: Holder, least: int) -> None:
        """Drop contents of a lane until it holds no more than `least`, or nothing."""
        for row in holder.needed_last():
            if holder.held <= least:
                return
            if row.content is not None:
                row.content = None
                self.hold(holder, -row.size)

    def keep(self, served: Holder) -> None:
        """Make lanes over their shares drop what exceeds the budget; `served` is the lane served last."""
        if self.held <= self._most:
            return
        share = self._most // max(self._lanes, len(self._holders))
        for holder in (served, *sorted(self._holders, key=lambda one: -one.held)):
            beyond = min(holder.held - share, self.held - self._most)
            if beyond > 0:
                self._drop(holder, holder.held - beyond)
        text = (
            f"samples that wait to be packed or grouped take more than buffer_bytes={self._most} in this process "
            f"({max(self._lanes, len(self._holders))} lanes), so some are encoded again when needed (`encoded_again` "
            "in loader.counters()). Raise WorkerConfig(buffer_bytes=…), lower packing_buffer_size, or add large "
            "fields in postencode_sample"
        )
        pass_on((logger.name, "buffer_bytes", text))

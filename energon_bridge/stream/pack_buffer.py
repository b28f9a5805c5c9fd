"""Which samples of a lane wait to be packed, and in which packs, as integers.

`Packing` keeps what the samples contain beside it, `PlannedLane` needs no more than this. Both draw and select by the
same rules, so they reach the same states.

Lanes begin with buffers of different sizes, from S/2 to S, so that they do not all select in the same step. A smaller
buffer grows with each selection by half of what that selection delivered, up to S. So between two selections a lane
draws at most one and a half times what it delivers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from energon_bridge.rng import IntArray
from energon_bridge.stream.state import BufferedRefs, Stage
from energon_bridge.task_encoder.packing import LONGEST_WAIT

EMPTY_SELECTIONS = 4
"""Selections without a pack, one after the other, after which a lane gives up."""
_GOLDEN = 0.6180339887498949


def first_target(lane: int, size: int) -> int:
    """Return the samples to which a lane fills its buffer, of S in the end, before its first selection."""
    return size - int(size / 2 * (lane * _GOLDEN % 1.0))


def share_of(missing: int, left: int) -> int:
    """Return what to do now of what is missing, if packs for so many more microbatches are left."""
    return -(-max(0, missing) // (left + 1))


class PackBuffer:
    """The packs of a lane in turn, then the samples from which the next ones are selected.

    Arrays are never changed in place, so that states share them.

    Args:
        size: Samples from which packs are selected, in the end (S).
        held: What waits by the state of the lane.
        target: Samples in the buffer at which the next selection is made.

    Attributes:
        sizes: Samples of each pack, shape (packs,).
        taken: Outputs of the first pack already delivered.
        members: References of the samples in the buffer, shape (samples, 4).
        target: As above.
    """

    def __init__(self, size: int, held: BufferedRefs, target: int) -> None:
        self._size, self.target = size, target
        stages, lengths, numbers = held.rows.T
        packs, waiting = stages == Stage.PACK, stages == Stage.BUFFER
        self.sizes: IntArray = lengths[packs]
        self.taken = int(numbers[packs][0]) if packs.any() else 0
        self._packed: IntArray = held.members[np.repeat(packs, lengths)]
        self.members: IntArray = held.members[np.repeat(waiting, lengths)]
        self._waits: IntArray = numbers[waiting]

    def share(self, rows: int) -> int:
        """Return the samples to draw after a microbatch of so many packs; 0 if the next one needs a selection first."""
        left = len(self.sizes) // rows
        return share_of(self.target - len(self.members), left) if left else 0

    def missing(self, attempt: int) -> int:
        """Return the samples to draw before a selection, after so many that made no pack."""
        return max(0, self.target + attempt * max(1, self._size // 4) - len(self.members))

    def add(self, members: IntArray) -> None:
        """Append samples to the buffer."""
        self.members = np.concatenate((self.members, members))
        self._waits = np.concatenate((self._waits, np.zeros(len(members), dtype=np.int64)))

    def select(self, packs: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        """Move samples into packs, by their places; return which of the others have now been left over too often."""
        self._waits = self._waits + 1
        if packs:
            places = np.array([place for pack in packs for place in pack], dtype=np.int64)
            self.sizes = np.concatenate((self.sizes, [len(pack) for pack in packs]))
            self._packed = np.concatenate((self._packed, self.members[places]))
            left = np.ones(len(self.members), dtype=bool)
            left[places] = False
            self.keep(left)
            self.target = min(self._size, self.target + -(-len(places) // 2))
        return self._waits > LONGEST_WAIT

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the other samples of the buffer."""
        self.members, self._waits = self.members[kept], self._waits[kept]

    def take(self, packs: int) -> tuple[IntArray, IntArray]:
        """Remove the first packs; return their sizes, and the references of their samples."""
        sizes, self.sizes = self.sizes[:packs], self.sizes[packs:]
        end = int(sizes.sum())
        members, self._packed = self._packed[:end], self._packed[end:]
        self.taken = 0
        return sizes, members

    def waiting(self) -> BufferedRefs:
        """Return what waits, as a state has it."""
        packs = len(self.sizes)
        rows = np.zeros((packs + len(self.members), 3), dtype=np.int64)
        rows[:packs, 0], rows[packs:, 0] = Stage.PACK, Stage.BUFFER
        rows[:packs, 1], rows[packs:, 1] = self.sizes, 1
        rows[packs:, 2] = self._waits
        if packs:
            rows[0, 2] = self.taken  # no outputs of the others have been taken
        return BufferedRefs(rows, np.concatenate((self._packed, self.members)))

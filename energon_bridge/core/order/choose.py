"""Choosing: which samples come next, in any stretch of any stream.

A stream is a lane of a run or, as lane 0 of 1, a pass over validation data. Its blend says from which leaf each draw
comes and the order of the leaf which sample that is; both are asked here and nowhere else. What comes out is either
*picks*, integers of shape (draws, 4) with the columns leaf, sample, epoch and output (always 0: a draw's first), or
*spans*, the same draws by leaf and round, for a lane that reads whole rounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from energon_bridge.core.order.blend import Blend
from energon_bridge.core.order.changes import LeafBans
from energon_bridge.core.order.leaf_order import LeafOrder, Round
from energon_bridge.core.order.rng import GOLDEN, MASK64, IntArray

_OPEN_ROUNDS = 4096
_TOGETHER = 256
"""Draws of a pass looked up at a time."""


class OrderedLeaf(Protocol):
    """What choosing needs of a leaf: its order, its banned samples, and their amounts if the weights count them."""

    @property
    def order(self) -> LeafOrder: ...
    @property
    def bans(self) -> LeafBans | None: ...
    @property
    def amounts(self) -> Any: ...


class BlendPosition(NamedTuple):
    """The position of a lane in its blend.

    Attributes:
        draw: The next draw.
        leaf_draws: Draws made before in each leaf.
        sums: The sums of the leaves, in a blend by amounts; none where it begins.
        origin: Draw at which the lane began with this blend.
    """

    draw: int
    leaf_draws: Sequence[int]
    sums: Sequence[int] = ()
    origin: int = 0


class LeafDraws(Protocol):
    """The leaves of the draws of one lane, from a position on."""

    def take(self, count: int) -> IntArray:
        """Return the leaves of the next draws, shape (count,)."""

    def sums(self, draw: int) -> tuple[int, ...]:
        """Return how much of each leaf was drawn before a draw, which is not before the last one asked about."""


class SummingBlend(Protocol):
    """A blend in which the next leaf of a lane depends on what it drew before: on a sum of each leaf."""

    def draws(self, leaves: Sequence[OrderedLeaf], lane: int, at: BlendPosition) -> LeafDraws:
        """Return the draws of a lane, from a position on."""


class BlendOfBuckets(Protocol):
    """Says which bucket a microbatch comes from, and for each bucket the blend of its leaves, by its number."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def rows(self) -> Sequence[int]: ...
    @property
    def of_leaf(self) -> Sequence[int]: ...
    @property
    def blends(self) -> Sequence[Blend]: ...
    def without(self, gone: frozenset[int]) -> BlendOfBuckets: ...
    def bucket(self, microbatch: int) -> int: ...
    def draws_in(self, bucket: int, leaf_draws: Sequence[int]) -> int: ...
    def leaf_draws(self, lane: int, microbatch: int) -> list[int]: ...


def has_sums(blend: object) -> TypeGuard[SummingBlend]:
    """Whether a blend is a `SummingBlend`: asked of each lane, and `isinstance` of a protocol costs 10 us."""
    return hasattr(blend, "draws")


def has_buckets(blend: object) -> TypeGuard[BlendOfBuckets]:
    """Whether a blend is a `BlendOfBuckets`, whose buckets have blends of their own."""
    return hasattr(blend, "blends")


def goes_by_number(blend: object) -> TypeGuard[Blend]:
    """Whether a blend is a `Blend`: the number of a draw says its leaf."""
    return hasattr(blend, "leaves")


AnyBlend: TypeAlias = Blend | SummingBlend | BlendOfBuckets
"""Says which leaf each draw of a lane comes from: by its number alone, by what was drawn before, or by its bucket."""


class Drawn(Protocol):
    """A run of consecutive draws of one lane in one leaf: a `Round`, or an object that holds its bytes too."""

    @property
    def first(self) -> int: ...
    @property
    def indices(self) -> IntArray: ...
    @property
    def epochs(self) -> IntArray: ...


R = TypeVar("R", bound=Drawn)


class Picks(NamedTuple):
    """The samples of consecutive draws.

    Attributes:
        members: Leaf, sample, epoch and output of each, shape (draws, 4).
        banned: Which draws give nothing since their samples are banned, shape (draws,); None: no draw.
    """

    members: IntArray
    banned: NDArray[np.bool_] | None = None


class Span(NamedTuple, Generic[R]):
    """Draws [low, high) of a round of a leaf, of which all are banned or none.

    `places` has the place of each among the draws that were chosen together: the n-th of them is draw `low + n`.
    """

    leaf: int
    round: R
    low: int
    high: int
    places: Sequence[int]
    banned: bool = False

    def split(self, banned: NDArray[np.bool_]) -> list[Span[R]]:
        """Return the banned draws and the others apart, in order."""
        if not banned.any():
            return [self]
        # An edge is wherever banned turns to not banned or back, and at both ends.
        edges = [0, *(np.flatnonzero(np.diff(banned)) + 1).tolist(), banned.size]
        low = self.low
        places = self.places
        return [
            self._replace(low=low + begin, high=low + end, places=places[begin:end], banned=bool(banned[begin]))
            for begin, end in pairwise(edges)
        ]


def by_leaf(leaves: IntArray) -> list[tuple[int, Sequence[int]]]:
    """Return the leaves that occur in an array, each with its places."""
    if leaves.size and (leaves == leaves[0]).all():
        return [(int(leaves[0]), range(leaves.size))]
    # np.unique would import numpy.ma, into every worker.
    return [(leaf, np.flatnonzero(leaves == leaf).tolist()) for leaf in np.flatnonzero(np.bincount(leaves)).tolist()]


class OpenRounds(Generic[R]):
    """The rounds of a leaf that a lane has open: the current ones, and the next ones while they are read ahead.

    Args:
        hold: Returns what to keep of a round: the round itself, or an object that holds its bytes too.
        together: Draws to look up at once, over several rounds if needed. The first round is looked up alone, the
            next time a share of them that differs between lanes: so lanes do not all read in the same steps.
    """

    __slots__ = ("_fewest", "_hold", "_lane", "_order", "_together", "current", "upcoming")

    def __init__(self, order: LeafOrder, lane: int, hold: Callable[[Round], R], together: int) -> None:
        self._order = order
        self._lane = lane
        self._hold = hold
        self._together = together
        self._fewest = together * (lane * GOLDEN & MASK64) >> 64
        self.current: R | None = None
        self.upcoming: R | None = None

    def at(self, draw: int, wanted: int) -> tuple[R, int]:
        """Return the rounds that hold a draw of the leaf, and the draw's place in them.

        If they are not kept, at least `wanted` draws are looked up, which costs little more than looking up one.
        """
        rounds = self.current
        if rounds is None or not 0 <= draw - rounds.first < rounds.indices.size:
            upcoming = self.upcoming
            self.upcoming = None
            if upcoming is None or upcoming.first != draw:
                # Whoever asks a second time goes on through the leaf, so from then on more is looked up.
                upcoming = self._rounds(draw, wanted) if rounds is None else self._several(draw, wanted)
            rounds = self.current = upcoming
        return rounds, draw - rounds.first

    def following(self) -> R:
        """Return the rounds after the current ones, for reading ahead."""
        assert self.current is not None
        self.upcoming = self._several(self.current.first + self.current.indices.size, 1)
        return self.upcoming

    def drop(self) -> None:
        """Drop the rounds; they are looked up again when needed."""
        self.current = self.upcoming = None

    def _several(self, draw: int, wanted: int) -> R:
        fewest, self._fewest = self._fewest, self._together
        return self._rounds(draw, max(wanted, fewest))

    def _rounds(self, draw: int, fewest: int) -> R:
        return self._hold(self._order.rounds_at(self._lane, draw, fewest))


class RoundCache(Generic[R]):
    """The open rounds of some lanes in all leaves; beyond `most`, those that were not used for longest are dropped.

    Args:
        hold: As for `OpenRounds`; it gets the number of the leaf too.
        together: As for `OpenRounds`, by the order of the leaf.
        most: How many lanes and leaves, counted in pairs, may have open rounds.
    """

    def __init__(
        self,
        leaves: Sequence[OrderedLeaf],
        hold: Callable[[int, Round], R],
        *,
        together: Callable[[LeafOrder], int],
        most: int = _OPEN_ROUNDS,
    ) -> None:
        self.leaves = leaves
        self._hold = hold
        self._together = together
        self._most = most
        self._open: OrderedDict[tuple[int, int], OpenRounds[R]] = OrderedDict()

    def of(self, lane: int, leaf: int) -> OpenRounds[R]:
        """Return the open rounds of a lane in a leaf."""
        open_rounds = self._open.get((lane, leaf))
        if open_rounds is None:
            hold = self._hold
            order = self.leaves[leaf].order
            open_rounds = OpenRounds(order, lane, lambda rounds: hold(leaf, rounds), self._together(order))
            self._open[lane, leaf] = open_rounds
            if len(self._open) > self._most:
                self._open.popitem(last=False)[1].drop()
        elif len(self.leaves) > 1:
            self._open.move_to_end((lane, leaf))
        return open_rounds

    def drop(self, lane: int) -> None:
        """Drop the rounds of a lane, which is about to choose the same draws again.

        Rounds that hold bytes hand each sample out once, so they cannot be used a second time.
        """
        for (of, _), open_rounds in self._open.items():
            if of == lane:
                open_rounds.drop()


def plain_rounds(leaves: Sequence[OrderedLeaf], *, together: int = 1) -> RoundCache[Round]:
    """Return a cache that keeps the rounds and nothing else."""
    return RoundCache(leaves, lambda _, rounds: rounds, together=lambda _: together)


class Chooser(Generic[R]):
    """Chooses the draws of one lane, from a position on.

    Args:
        round_cache: The rounds that the lane has open in the leaves.
        blend: Says which leaf a draw comes from; None if there is one leaf.

    Attributes:
        draw: The next draw to choose.
        leaf_draws: Draws of each leaf that were chosen before it.
    """

    def __init__(self, round_cache: RoundCache[R], blend: AnyBlend | None, lane: int, at: BlendPosition) -> None:
        self._round_cache = round_cache
        self._lane = lane
        self._origin = at.origin
        self._summed: LeafDraws | None = None
        self._blend: Blend | None = None
        if has_sums(blend):
            self._summed = blend.draws(round_cache.leaves, lane, at)
        elif goes_by_number(blend):
            self._blend = blend
        self.draw = at.draw
        self.leaf_draws = list(at.leaf_draws)

    def sums(self, draw: int) -> tuple[int, ...]:
        """Return how much of each leaf was drawn before a draw; empty in a blend that counts no amounts.

        Asked about one draw after another: not about one before the last that was asked about.
        """
        return () if self._summed is None else self._summed.sums(draw)

    def spans(self, count: int) -> list[Span[R]]:
        """Choose the next `count` draws."""
        first = self.draw
        lane = self._lane
        of_leaves: list[tuple[int, Sequence[int]]] = [(0, range(count))]
        if self._summed is not None:
            of_leaves = by_leaf(self._summed.take(count))
        elif self._blend is not None:
            of_leaves = by_leaf(self._leaves(count))
        spans: list[Span[R]] = []
        for leaf, places in of_leaves:
            open_rounds = self._round_cache.of(lane, leaf)
            bans = self._round_cache.leaves[leaf].bans
            while places:
                rounds, low = open_rounds.at(self.leaf_draws[leaf], len(places))
                high = min(rounds.indices.size, low + len(places))
                span = Span(leaf, rounds, low, high, places[: high - low])
                if bans is None:
                    spans.append(span)
                else:
                    # Bans count global draws: draw k of lane l is k L + l.
                    draws = first + np.asarray(span.places, dtype=np.int64)
                    draws = draws * self._round_cache.leaves[leaf].order.num_lanes + lane
                    spans += span.split(bans.at(rounds.indices[low:high], draws))
                self.leaf_draws[leaf] += high - low
                places = places[high - low :]
        self.draw += count
        return spans

    def _leaves(self, count: int) -> IntArray:
        """Return the leaves of the next draws, shape (count,)."""
        assert self._blend is not None
        first = self.draw - self._origin
        leaves = self._blend.leaves(self._lane, first, count)
        while leaves.size < count:  # where weights change or a mix epoch ends
            more = self._blend.leaves(self._lane, first + leaves.size, count - leaves.size)
            leaves = np.concatenate((leaves, more))
        return leaves

    def picks(self, count: int) -> Picks:
        """Choose the next `count` draws."""
        members = np.zeros((count, 4), dtype=np.int64)
        banned: NDArray[np.bool_] | None = None
        for span in self.spans(count):
            places = span.places
            # With one leaf the places are a range: a slice writes them without an index array.
            at = slice(places.start, places.stop) if isinstance(places, range) else places
            members[at, 0] = span.leaf
            members[at, 1] = span.round.indices[span.low : span.high]
            members[at, 2] = span.round.epochs[span.low : span.high]
            if span.banned:
                banned = np.zeros(count, dtype=bool) if banned is None else banned
                banned[at] = True
        return Picks(members, banned)


@dataclass(frozen=True, kw_only=True)
class PassDraws:
    """The draws of one pass: a stretch of a stream of one lane, the same on any number of ranks.

    Attributes:
        leaves: The leaves, cut for one lane.
        blend: How they are merged; None if there is one.
        first: The global draw with which the pass begins; each pass over validation data begins with 0.
        num_draws: Draws in the pass.
    """

    leaves: Sequence[OrderedLeaf]
    blend: AnyBlend | None
    first: int = 0
    num_draws: int

    @cached_property
    def _round_cache(self) -> RoundCache[Round]:
        return plain_rounds(self.leaves, together=_TOGETHER)

    def picks(self, start: int, stop: int) -> Picks:
        """Return draws [start, stop) of the pass."""
        at = blend_position(self.leaves, self.blend, 0, self.first + start)
        return Chooser(self._round_cache, self.blend, 0, at).picks(stop - start)


_STRETCH = 1 << 14
"""Draws of a blend by amounts that `blend_position` computes at a time; bounds its memory."""


def blend_position(leaves: Sequence[OrderedLeaf], blend: AnyBlend | None, lane: int, draw: int) -> BlendPosition:
    """Return the position of a lane before a draw of its blend.

    Cost: microseconds, however many draws; a blend by amounts goes through all of them, some microseconds for each.
    """
    if blend is None:
        return BlendPosition(draw, [draw])
    if goes_by_number(blend):
        return BlendPosition(draw, blend.counts(lane, draw).tolist())
    assert has_sums(blend), "each bucket has a position of its own"
    counts = np.zeros(len(leaves), dtype=np.int64)
    draws = blend.draws(leaves, lane, BlendPosition(0, counts.tolist()))
    for first in range(0, draw, _STRETCH):
        size = min(_STRETCH, draw - first)
        counts += np.bincount(draws.take(size), minlength=counts.size)
        draws.sums(first + size)  # lets it forget what came before
    return BlendPosition(draw, counts.tolist(), draws.sums(draw))

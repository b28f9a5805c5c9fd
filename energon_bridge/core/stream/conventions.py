"""What a program may expect of a loader besides its samples: numbers that hooks see, masks, and where passes end.

`Conventions` are ours. A room that stands in for another loader brings a subclass in `RunSettings.conventions`; the
engine asks that object, and never which loader it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol

from energon_bridge.core.order.choose import OrderedLeaf, PassDraws
from energon_bridge.core.order.topology import Ownership

_GOLDEN = 0.6180339887498949


class PassLeaf(OrderedLeaf, Protocol):
    """What the order of a pass depends on of a leaf."""

    @property
    def dataset(self) -> Any: ...


class PassOrder(Protocol):
    """Which samples each microbatch of a pass has, and how many microbatches a rank makes.

    Attributes:
        draws: The samples of all ranks.
    """

    draws: PassDraws

    def steps(self, rank: int) -> int:
        """Return the microbatches of a rank."""

    def span(self, number: int) -> tuple[int, int]:
        """Return the draws [start, stop) of a microbatch; rank r has the numbers r, r + ranks, and so on."""

    def sample_number(self, draw: int) -> int:
        """Return the number of a draw that hooks see."""


@dataclass(frozen=True)
class Conventions:
    """Our conventions, which another loader's override; they travel to workers with the settings of the run.

    Attributes:
        stands_for: Name of the other loader.
        masks: Whether a microbatch that does not exist, or has no sample left, repeats rows with the mask all false;
            else it is left out.
        listing_has_length: Whether the length of a pass that is packed or grouped is that of its listing; else each
            sample counts as a row.
        no_number: `hooks.NUMBER` for a draw that is not numbered.
        first_packs: Whether the first packs of a lane are selected from a "full" buffer, or "staggered": from one with
            fewer samples, other ones in each lane. States record it.
        delivered: Makes of a batch, or of a sample that is delivered alone, what programs expect; None: nothing else.
        attach: Sets a meta field of a batch, by its name; None: `attach` of `pipeline.py` does.
    """

    stands_for: ClassVar[str | None] = None
    masks: ClassVar[bool] = True
    listing_has_length: ClassVar[bool] = True
    no_number: ClassVar[int] = -1
    first_packs: ClassVar[str] = "staggered"
    delivered: ClassVar[Callable[..., Any] | None] = None
    attach: ClassVar[Callable[..., None] | None] = None

    # Passes and epochs -----------------------------------------------------------------------------------------------

    def order_of_pass(
        self,
        leaves: Sequence[PassLeaf],
        *,
        ranks: int,
        workers: int,
        rows: int,
        drop_last: bool,
        limit: int | None,
    ) -> PassOrder | None:
        """Return the order of a validation pass that is neither packed nor grouped; None: the samples in turn.

        Args:
            workers: Of each rank.
        """
        return None

    def recorded(self, *, ranks: int, workers: int, limit: int | None) -> dict[str, Any]:
        """Return what that order depends on, as states record it."""
        return {}

    def end(self, end: int, *, rank: int, ranks: int, limit: int | None) -> int:
        """Return the microbatch at which a pass that ends at microbatch `end` is over for a rank."""
        return end

    def epoch_samples(self, samples: Iterable[Fraction]) -> Fraction:
        """Return the samples in an epoch of the data, from those of each leaf."""
        return sum(samples, Fraction(0))

    def check_ranks(self, ownership: Ownership) -> None:
        """Raise ConfigurationError if programs do not expect what the lanes of a run give its ranks."""

    def first_target(self, lane: int, size: int) -> int:
        """Return the samples in the buffer of a lane at which its first packs are selected, of `size` in the end."""
        return size if self.first_packs == "full" else size - int(size / 2 * (lane * _GOLDEN % 1.0))

    # What hooks and programs see -------------------------------------------------------------------------------------

    def batch_numbers(self, ranks: int) -> Callable[[int], int] | None:
        """Return what numbers the microbatches of the run for hooks; None: they see the run's own numbers."""
        return None

    def sample_numbers(
        self, lane: int, *, num_lanes: int, rows: int, ranks: int, workers: int
    ) -> Callable[[int], int] | None:
        """Return what numbers the draws of a lane for hooks; None: they are not numbered."""
        return None

    def raised(self, error: Exception, on_error: Any) -> BaseException:
        """Return what a program gets for an error of the stream, by the policy for samples that fail."""
        return error

"""Data for replicas that come and go, as under torchft: the global batches do not depend on who is there.

    data = QuorumData(open_loader, gather)  # torchft itself is not imported
    for batch in data.global_batch(manager.participating_rank(), manager.num_participants()):
        ...                                 # forward and backward, weighed by batch.__valid__
    data.share()                            # an error goes to manager.report_error
    if manager.should_commit():
        optimizer.step()
        data.commit()

A global batch is one round of the run's lanes: `num_lanes` microbatches, on any number of replicas up to that. Each of
R replicas delivers `ceil(num_lanes / R)` of them, the last ones masked where R does not divide `num_lanes`.

Invariant: batch n of the committed ones has the samples of batch n of a run on one replica. A lane's state would leave
with its replica, so after each batch all replicas give each other the states of their lanes (`share`), a few kilobytes.
A batch that was not committed is delivered again, by whoever is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from energon_bridge.errors import ConfigurationError, WrongUseError
from energon_bridge.loader import document
from energon_bridge.loader.savable import SavableDataLoader

__all__ = ["QuorumData", "gather_by"]


class QuorumData:
    """The global batches of a run whose number of replicas changes.

    Args:
        open_loader: Opens the training loader of a replica, given its rank and the number of replicas, which go into
            its `WorkerConfig`; `num_lanes` there is the microbatches of a global batch. Called for each new place.
        gather: Given the state of this replica, returns those of all; see `gather_by`. Not called on one replica.
    """

    def __init__(
        self, open_loader: Callable[[int, int], SavableDataLoader], gather: Callable[[Any], Sequence[Any]]
    ) -> None:
        self._open_loader, self._gather = open_loader, gather
        self._loader: SavableDataLoader | None = None
        self._place = (0, 0)
        self._batches = 0
        self._committed: document.State | None = None
        self._shared: document.State | None = None
        self._stands_at: document.State | None = None
        self._delivered = False

    def global_batch(self, rank: int | None, replicas: int) -> Iterator[Any]:
        """Go through this replica's microbatches of the next global batch, from the last one that was committed.

        Args:
            rank: Of this replica in the quorum; None, one that does not take part, gets nothing.
            replicas: In the quorum.

        Raises:
            ConfigurationError: The loader is not an endless one of that place, or more replicas than lanes.
        """
        self._delivered, self._shared = False, None
        if rank is None:
            return
        loader = self._seated(rank, replicas)
        self._stands_at = None  # whatever ends this batch early, the next one begins with the state
        batches = iter(loader)
        for _ in range(-(-loader.ownership.num_lanes // replicas)):
            yield next(batches)
        self._delivered = True

    def share(self) -> None:
        """Exchange states with the other replicas; all call it, once the batch is delivered.

        Raises:
            WrongUseError: Not all microbatches of the global batch have been taken.
            StepMismatchError: The others stand at another batch.
        """
        if not self._delivered or self._loader is None:
            raise WrongUseError("share: take all microbatches of global_batch first; a state in between is of no batch")
        own = self._loader.save_state_rank()
        self._shared = document.merge([own] if self._place[1] == 1 else list(self._gather(own)))

    def commit(self) -> None:
        """Make the delivered batch part of the run; without this it is delivered again.

        Raises:
            WrongUseError: The states of its end have not been shared.
        """
        if self._shared is None:
            raise WrongUseError("commit: call share first, or the next quorum could not go on without this replica")
        self._committed = self._stands_at = self._shared
        self._shared = None
        self._batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last committed batch: of the whole run, the same on every replica."""
        return {"batches": self._batches, "loader": self._committed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the last committed batch of another replica, or of a checkpoint."""
        self._batches, self._committed = state["batches"], state["loader"]
        self._stands_at = self._shared = None
        self._delivered = False

    def close(self) -> None:
        """Stop the workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _seated(self, rank: int, replicas: int) -> SavableDataLoader:
        """Return the loader of a place, which stands behind the last committed batch."""
        if self._loader is None or self._place != (rank, replicas):
            self.close()
            loader = self._open_loader(rank, replicas)
            found = loader.config.dp_rank, loader.config.dp_size
            if found != (rank, replicas) or loader.spec.finite:
                loader.close()
                raise ConfigurationError(
                    f"QuorumData: open_loader({rank}, {replicas}) returned "
                    + ("a loader of validation data" if found == (rank, replicas) else f"rank {found[0]} of {found[1]}")
                    + "; open training data with WorkerConfig(rank=rank, world_size=replicas, num_lanes=...)"
                )
            self._loader, self._place, self._stands_at = loader, (rank, replicas), None
        elif self._stands_at is not None:
            return self._loader
        if self._committed is not None:
            self._loader.restore_state_rank(self._committed)
        else:
            self._loader.seek(0)
        return self._loader


def gather_by(process_group: Any) -> Callable[[Any], list[Any]]:
    """Return a `gather` over a process group of torch or torchft, for tensors on the CPU (Gloo).

    Args:
        process_group: Of the replicas; torchft configures it anew in each quorum.
    """

    def gather(state: Any) -> list[Any]:
        import torch
        from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

        def exchanged(mine: torch.Tensor) -> list[torch.Tensor]:
            rows = [torch.empty_like(mine) for _ in range(process_group.size())]
            process_group.allgather([rows], [mine], AllgatherOptions()).wait()
            return rows

        content = json.dumps(state).encode()
        sizes = [int(size) for size in exchanged(torch.tensor([len(content)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        rows = exchanged(padded)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    return gather

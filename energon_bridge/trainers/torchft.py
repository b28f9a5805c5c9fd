"""Data for torchft, whose replicas come and go between optimizer steps.

    data = ReplicaDataloader(lambda rank, ranks: get_savable_loader(dataset, worker_config=WorkerConfig(
        rank=rank, world_size=ranks, num_lanes=64, num_workers=2)))
    batches = data.step(manager.participating_rank(), manager.num_participants())
    …                                                # forward, backward, reduce; then:
    states = gather_states(group, data.rank_state())
    if manager.should_commit():
        data.commit(states)

A step is one round over all lanes of the run, so a global batch is always the same `num_lanes` microbatches, on any
number of replicas. If the number does not divide the lanes, some replicas get masked microbatches (`__valid__` all
false), and the loss must be the mean over the real ones. Nothing counts as delivered before `commit`: a failed step is
delivered again, to the replicas that are left. Every replica commits the states of all, so a lost replica loses
nothing, and a new one can start from any replica's `state_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import ConfigurationError, WrongUseError

SavedState = dict[str, Any]


class ReplicaDataloader:
    """The microbatches of one replica in each optimizer step, while the number of replicas changes.

    Args:
        open_loader: Opens the savable loader of an endless dataset for a data-parallel rank and their number, always
            with the same `num_lanes`: the microbatches of a global batch. It is called when either changes.
    """

    def __init__(self, open_loader: Callable[[int, int], Any]) -> None:
        self._open = open_loader
        self._data: EnergonDataloader | None = None
        self._place: tuple[int | None, int] | None = None  # the batch of the step
        self._states: list[
            SavedState
        ] = []  # of all replicas after the last step that was committed; none: the beginning
        self._stands_there = False  # whether the loader does

    def step(self, rank: int | None, ranks: int) -> list[Any]:
        """Return this replica's microbatches of the next step: the same step until `commit`.

        Args:
            rank: Rank of this replica among the participating ones; None: it does not take part, and gets no
                microbatches.
            ranks: Number of participating replicas.
        """
        if (rank, ranks) != self._place:
            self.close()
        self._place = (rank, ranks)
        if rank is None:
            return []
        if self._data is None:
            self._data = self._opened(rank, ranks)
            if self._states:
                self._data.restore_state(self._states)
        elif not self._stands_there:
            if self._states:
                self._data.restore_state(self._states)
            else:
                self._data.rewind()
        self._stands_there = False
        lanes = self._data.loader.ownership.num_lanes
        return [next(self._data) for _ in range(-(-lanes // ranks))]

    def rank_state(self) -> SavedState | None:
        """Return this replica's state after the step, for the `commit` of all replicas; None if it took no part."""
        return None if self._data is None else self._data.save_state()

    def commit(self, states: Sequence[SavedState | None]) -> None:
        """Count the step as delivered.

        Args:
            states: `rank_state()` of every replica after this step, in any order.

        Raises:
            WrongUseError: There was no step, or the states are not those of all replicas after it.
        """
        if self._place is None:
            raise WrongUseError(
                "ReplicaDataloader.commit: no step was taken since the start or the last load_state_dict"
            )
        given = [state for state in states if state is not None]
        stand = sorted({state["microbatches"] for state in given})
        own = self.rank_state()
        if len(given) != self._place[1] or len(stand) != 1 or (own is not None and own["microbatches"] != stand[0]):
            raise WrongUseError(
                f"ReplicaDataloader.commit: got {len(given)} states, after {' and '.join(map(str, stand))} "
                f"microbatches; expected those of all {self._place[1]} replicas after this step. Gather rank_state() "
                "of all replicas in every step"
            )
        self._states = given
        self._stands_there = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole run after the last committed step; the same on every replica."""
        return {"states": list(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of any replica."""
        self._states = list(state["states"])
        self._stands_there = False
        self._place = None
        self.close()

    def close(self) -> None:
        """Stop the worker processes."""
        if self._data is not None:
            self._data.close()
        self._data = None

    def _opened(self, rank: int, ranks: int) -> EnergonDataloader:
        data = EnergonDataloader(self._open(rank, ranks), masked_microbatches="allow")
        config = data.loader.config
        if (config.dp_rank, config.dp_size) != (rank, ranks) or not data.endless:
            raise ConfigurationError(
                f"ReplicaDataloader: called open_loader for rank {rank} of {ranks}, but it returned a loader of rank "
                f"{config.dp_rank} of {config.dp_size}{'' if data.endless else ', which ends'}; pass both numbers to "
                "WorkerConfig, and use a training dataset"
            )
        return data


def gather_states(group: Any, state: SavedState | None, device: Any = "cpu") -> list[SavedState | None]:
    """Return the states of all members of a process group, of torch or of torchft; all of them must call it.

    Args:
        group: The group; torchft's need not be registered with torch.
        state: The state of this one.
        device: Device of tensors for the group: `cuda` for NCCL.
    """
    import torch
    from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

    def gathered(own: Any) -> list[Any]:
        found = [torch.zeros_like(own) for _ in range(group.size())]
        group.allgather([found], [own], AllgatherOptions()).wait()
        return found

    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in gathered(torch.tensor([len(text)], device=device))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = text
    texts = zip(gathered(padded.to(device)), sizes, strict=True)
    return [json.loads(bytes(found[:size].cpu().numpy())) for found, size in texts]

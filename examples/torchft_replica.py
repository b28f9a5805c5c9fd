"""One replica of a training with torchft; replicas may be killed and started at any time.

    torchft_lighthouse --min_replicas 1 --bind "[::]:29510" --join_timeout_ms 1000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python examples/torchft_replica.py --data DATASET --number 0        # as many as you like, each with its number

A global batch is 6 microbatches of 2 captions, on any number of replicas up to 6. What is trained is how long captions
are, on average: the loss is the mean over the real microbatches of all replicas.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]

from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.trainers.torchft import ReplicaDataloader, gather_states

LANES = 6


def main() -> None:
    """Train until the manager has counted the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--number", type=int, required=True, help="of this replica")
    parser.add_argument("--max-steps", type=int, default=24)
    options = parser.parse_args()

    def open_loader(rank: int, ranks: int) -> Any:
        config = WorkerConfig(rank=rank, world_size=ranks, num_lanes=LANES, num_workers=0)
        return get_savable_loader(get_train_dataset(options.data, batch_size=2, worker_config=config))

    length = torch.zeros(1)
    data = ReplicaDataloader(open_loader)

    def load_state_dict(state: dict[str, Any]) -> None:
        length.copy_(state["length"])
        data.load_state_dict(state["data"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=10))
    manager = Manager(
        pg=group,
        state_dict=lambda: {"length": length.clone(), "data": data.state_dict()},
        load_state_dict=load_state_dict,
        min_replica_size=1,
        use_async_quorum=False,  # who takes part must be known before the batches are asked for
        replica_id=f"replica_{options.number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    while (step := manager.current_step()) < options.max_steps:
        manager.start_quorum()
        ranks = manager.num_participants()
        batches = data.step(manager.participating_rank(), ranks)
        real = [batch for batch in batches if batch["__valid__"].any()]
        gradient = torch.zeros(1)
        for batch in real:
            gradient += (length - sum(map(len, batch.caption)) / len(batch.caption)) / LANES
        manager.allreduce(gradient).wait()
        gradient *= ranks  # the manager has averaged over the replicas; this is a sum over microbatches
        states = []
        try:
            states = gather_states(group, data.rank_state())
        except Exception as error:  # a replica was lost: the manager must not commit the step
            manager.report_error(error)
        if manager.should_commit():
            data.commit(states)
            length -= 0.5 * gradient
        keys = " ".join(key for batch in real for key in batch.__key__)
        print(f"step {step}, {ranks} replicas, length {length.item():.4f}: {keys}", flush=True)
    data.close()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()

"""Writing megatron-core's distributed checkpoints in the processes that train.

megatron-core's own strategy writes in the background: every rank spawns a process that imports the training program
again, and forks others, for each checkpoint. This one has the same format and writes before it returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


class SynchronousSave(TorchDistSaveShardedStrategy):
    """Save the parts of all ranks, one file each."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write; all ranks must call this."""
        parts, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save(
            mcore_to_pyt_state_dict(parts, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

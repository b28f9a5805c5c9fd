"""Builds the pipeline of one process as large as its plan needs: threads, rounds read at once, reads ahead."""

from __future__ import annotations

from collections.abc import Collection

from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.jsonl import JsonlDataset
from energon_bridge.core.format.media import IMAGE_EXTENSIONS
from energon_bridge.core.loader.run_data import RunData, epochs_by_leaf
from energon_bridge.core.loader.run_plan import RunPlan
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.settings import StreamSettings, WorkerFacts
from energon_bridge.core.stream.watchdog import WatchdogSettings

_READ_BYTES = 256 << 20
"""Bytes allowed for the rounds of all lanes of a process; beyond that, draws are read one microbatch at a time."""
_FAR_READERS = 16
"""Rounds read ahead at the same time if storage answers slowly."""
_LEAST_AHEAD = 4
"""Draws of a lane read ahead, at least, if rounds are too large."""
_TOGETHER_BYTES, _TOGETHER = 64 << 20, 2048
"""A lane reads several rounds of a leaf together, up to so many bytes of all lanes, and up to so many samples."""


def open_pipeline(
    plan: RunPlan,
    threads: int | None = None,
    delivered: Collection[int] = (),
    watchdog: WatchdogSettings | None = None,
    worker: WorkerFacts | None = None,
) -> Pipeline:
    """Build what loads, encodes and batches in one process.

    Args:
        threads: Overrides the number of threads in the configuration.
    """
    data = plan.data
    config = plan.config
    run = data.settings
    datasets = (dataset for leaf in data.leaves for dataset in leaf.dataset.datasets)
    decodes = run.task_encoder.decoder is not None and any(map(_decodes_media, datasets))
    if worker is not None and worker.careful:
        threads = 0
    elif threads is None:
        threads = config.threads if decodes else 0
        # A single loading thread would only pass the interpreter lock back and forth with the worker's own thread.
        threads = 0 if config.num_workers and threads == 1 else threads
    lanes = -(-plan.num_lanes // (config.dp_size * config.processes))
    # Approximate bytes if every lane holds one sample of every leaf.
    unit = lanes * sum(max(1, int(leaf.dataset.shard_sizes.sum()) // leaf.dataset.num_samples) for leaf in data.leaves)
    is_far = any(leaf.is_far for leaf in data.leaves)
    together = _TOGETHER_BYTES // unit
    settings = StreamSettings(
        run=run,
        config=config,
        lanes=lanes,
        num_lanes=plan.num_lanes,
        threads=threads,
        reads_rounds=unit * max(run.shuffle_buffer_size, 4 * run.parallel_shard_iters) <= _READ_BYTES,
        read_together=min(_TOGETHER, together),
        background_reads=_FAR_READERS if is_far else int(not config.num_workers),
        draws_ahead=min(_TOGETHER, max(_LEAST_AHEAD, together)) if is_far else 0,
        failure_log=data.failure_log,
        delivered=delivered,
        shortest_epoch=_shortest_epoch(data),
        packs_by_epoch=plan.packs_by_epoch,
        watchdog=watchdog,
        worker=worker,
    )
    return Pipeline(plan.leaves, settings)


def _shortest_epoch(data: RunData) -> tuple[int, str]:
    """Return the draws (of all lanes and datasets) until the first dataset has been gone through, and its path."""
    epochs = []
    if not data.ends and data.buckets is None:  # buckets have no groups, which ask for it, and weights of their own
        epochs = [(int(draws), leaf.dataset.path) for draws, leaf in epochs_by_leaf(data)]
    return min(epochs, default=(data.num_samples, data.ordered[0].dataset.path))


def _decodes_media(dataset: PreparedDataset) -> bool:
    """Return whether decoding pays for threads: image decoders release the interpreter lock."""
    if isinstance(dataset, JsonlDataset):
        return False
    field_map = dataset.field_map
    return field_map is None or any(p.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for p in field_map.parts)

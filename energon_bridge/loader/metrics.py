"""What a loader did so far as plain numbers by name, for loggers: `samples`, `bytes`, `epochs/NAME`, …

Everything is worked out when it is asked for, from what the loader keeps anyway; nothing is done per batch for it. The
numbers are those of one rank: of what it was restored with, and has delivered since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from energon_bridge.loader.document import State
from energon_bridge.loader.pool import WorkerPool
from energon_bridge.storage.network import REQUESTS
from energon_bridge.stream.state import COUNTERS


def dataset_names(paths: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Return a short name for each dataset of a mix: as many last folders of its path as tell it from the others.

    Where paths are equal the split part follows, and then a number.
    """
    split = [[piece for piece in path.split("/") if piece] or [path] for path in paths]
    names = list(paths)
    for depth in range(1, max(map(len, split), default=0) + 1):
        tails = ["/".join(pieces[-depth:]) for pieces in split]
        shared = Counter(tails)
        names = [
            tail if name == path and (shared[tail] == 1 or depth >= len(pieces)) else name
            for name, path, tail, pieces in zip(names, paths, tails, split, strict=True)
        ]
    both = Counter(zip(names, parts, strict=True))
    shared = Counter(name for name, _ in both)
    names = [f"{name}:{part}" if shared[name] > 1 else name for name, part in zip(names, parts, strict=True)]
    shared, seen = Counter(names), Counter[str]()
    for number, name in enumerate(names):
        seen[name] += 1
        if shared[name] > 1:
            names[number] = f"{name}#{seen[name]}"
    return names


def flat_metrics(
    rows: Sequence[State], workers: WorkerPool | None = None, seconds: Sequence[float] = (0.0, 0.0, 0.0)
) -> dict[str, float]:
    """Return numbers by name of the rows that `leaf_rows` makes.

    Args:
        rows: A row per dataset.
        workers: The worker processes, or what would start them; None: there never are any.
        seconds: Time spent on making microbatches in all, waiting for loads, and batching, since the loader was made;
            and then the sums of `network.REQUESTS`.

    Returns:
        - the sums of the counters (`COUNTERS`: samples, skipped, errors, …);
        - `draws`, and `epochs` (draws by samples), where there are draws;
        - `ready`: microbatches that workers have made and the training loop has not taken;
        - `worker_restarts`: how often workers that died were started again;
        - `make_seconds`, all processes together, and of these `load_seconds` (waiting for samples to be read and
          decoded), `encode_seconds` and `batch_seconds`;
        - what the processes have asked of servers, if anything: `requests`, and of these `request_retries` and
          `request_hedges` (second requests), `request_bytes`, and `request_seconds` that reads waited;
          and `stalled_reads`: tries of reading a file that took longer than `read_timeout_seconds`;
          and of the node's cache, in blocks of 1 MiB and in bytes: `cache_hits` and `cache_hit_bytes` that lay there,
          `cache_misses` and `cache_miss_bytes` that had to be fetched;
        - of a mix `samples/NAME` and `epochs/NAME` of each dataset that is part of it now, and `errors/NAME`,
          `skipped/NAME` and `banned/NAME` of those that have lost samples.
    """
    found: dict[str, float] = {name: sum(row[name] for row in rows) for name in COUNTERS}
    made, load, batch, *asked = seconds
    found |= (
        {"ready": workers.ready, "worker_restarts": workers.restarts} if workers else {"ready": 0, "worker_restarts": 0}
    )
    found |= {
        "make_seconds": made,
        "load_seconds": load,
        "encode_seconds": max(0.0, made - load - batch),
        "batch_seconds": batch,
    }
    if any(asked):
        found |= dict(zip(REQUESTS, asked, strict=True))
    present = [row for row in rows if not row["parked"]]
    drawn = [row for row in present if row["draws"] is not None]
    if drawn:
        found["draws"] = sum(row["draws"] for row in drawn)
        found["epochs"] = found["draws"] / sum(row["num_samples"] for row in drawn)
    if len(present) > 1:
        names = dataset_names([row["path"] for row in present], [row["split_part"] for row in present])
        for name, row in zip(names, present, strict=True):
            found[f"samples/{name}"] = row["samples"]
            found |= {f"{counter}/{name}": row[counter] for counter in ("errors", "skipped", "banned") if row[counter]}
            if row["epochs"] is not None:
                found[f"epochs/{name}"] = row["epochs"]
    return found

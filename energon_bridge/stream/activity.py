"""What a thread of the loader is doing: a few attributes that it sets and others may read at any time.

They say which hook runs and which sample it has, to name both where the hook fails or hangs. Setting them is all the
cost there is for a sample that does neither.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.stream.report import place_in


class Activity:
    """What one thread is doing.

    Attributes:
        hook: The hook or step of loading that runs, "" for none.
        sample: The sample, or the list of samples, that the hook was given.
        dataset, index, key: While loading: the dataset, the number of the sample and its key.
    """

    __slots__ = ("dataset", "hook", "index", "key", "sample")

    def __init__(self) -> None:
        self.hook = ""
        self.sample: Any = None
        self.dataset: Any = None
        self.index = -1
        self.key = ""

    def rest(self) -> None:
        """Do nothing, and hold nothing."""
        self.hook = self.key = ""
        self.sample = self.dataset = None
        self.index = -1

    def __str__(self) -> str:
        """Name hook and sample; reads no file and shows no content."""
        hook, sample, dataset = self.hook, self.sample, self.dataset
        if not hook:
            return "no hook"
        if isinstance(sample, list):
            first = place_in(sample[0]) if sample else None
            return f"{hook} of {len(sample)} samples" + (f", the first one {first}" if first else "")
        place = None if sample is None else place_in(sample)
        if place is not None:
            return f"{hook} of {place}"
        if dataset is None:
            return hook
        shard = ""
        if isinstance(dataset, PreparedDataset):
            number = int(np.searchsorted(np.cumsum(dataset.shard_counts), self.index, side="right"))
            shard = f"shard {dataset.shard_names[number]}, "
        key = f", key {self.key!r}" if self.key else ""
        return f"{hook} of {dataset.path}: {shard}sample {self.index}{key}"


class Activities:
    """The activities of the threads of one process, by thread."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Activity] = {}

    def mine(self) -> Activity:
        """Return the activity of the calling thread."""
        thread = threading.get_ident()
        found = self._by_thread.get(thread)
        if found is None:
            found = self._by_thread[thread] = Activity()
        return found

    def all(self) -> list[tuple[int, Activity]]:
        """Return threads with their activities."""
        return list(self._by_thread.items())

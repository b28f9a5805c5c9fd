"""What a thread of the loader is doing: a few attributes that it sets and others may read at any time.

They say which hook runs and which sample it has, to name both where the hook fails or hangs. Setting them is all the
cost there is for a sample that does neither.

Hook and sample are also written as three integers, `words`. In a worker process these lie in memory that it shares with
the training process, which so knows what a worker was doing that was killed, or that holds the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np

from energon_bridge.format.dataset import PreparedDataset
from energon_bridge.stream.report import place_in

SAMPLE_HOOKS = (
    *("decode", "part_filter", "sample_loader", "joiner", "cook_crude_sample", "encode_sample", "preencode_sample"),
    "postencode_sample",
)
"""What runs on one sample, which the words name."""
HOOKS = (
    *("", *SAMPLE_HOOKS, "read", "field_map", "decode_deferred", "select_samples_to_pack", "pack_selected_samples"),
    *("batch_group_criterion", "batch", "encode_batch"),
)
_CODES = {hook: code for code, hook in enumerate(HOOKS)}
HOOK, LEAF, INDEX = range(3)
"""What the words of an activity are: the place of the hook in `HOOKS`, `LeafSource.user_key`, and the sample."""
WORDS = 3

Words = MutableSequence[int] | memoryview


class Activity:
    """What one thread is doing.

    Args:
        words: Where hook and sample are written as integers (`HOOK`, `LEAF`, `INDEX`).

    Attributes:
        hook: The hook or step of loading that runs, "" for none.
        sample: The sample, or the list of samples, that the hook was given.
        dataset, index, key: While loading: the dataset, the number of the sample and its key.
    """

    __slots__ = ("_hook", "dataset", "index", "key", "sample", "words")

    def __init__(self, words: Words | None = None) -> None:
        self.words: Words = [0] * WORDS if words is None else words
        self.hook = ""
        self.sample: Any = None
        self.dataset: Any = None
        self.index = -1
        self.key = ""

    @property
    def hook(self) -> str:
        return self._hook

    @hook.setter
    def hook(self, hook: str) -> None:
        self._hook = hook
        self.words[HOOK] = _CODES.get(hook, 0)

    def at(self, leaf: int, index: int) -> None:
        """Note, for the training process only, which sample of which leaf the next hooks are for."""
        words = self.words
        words[LEAF], words[INDEX] = leaf, index

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
    """The activities of the threads of one process, by thread.

    Args:
        words: Where the threads write, one after the other; further threads write for themselves.
    """

    def __init__(self, words: Sequence[Words] = ()) -> None:
        self._by_thread: dict[int, Activity] = {}
        self._words = iter(words)

    def mine(self) -> Activity:
        """Return the activity of the calling thread."""
        thread = threading.get_ident()
        found = self._by_thread.get(thread)
        if found is None:
            found = self._by_thread[thread] = Activity(next(self._words, None))
        return found

    def all(self) -> list[tuple[int, Activity]]:
        """Return threads with their activities."""
        return list(self._by_thread.items())

"""Where a sample comes from, as messages name it; and warnings about data, each logged once in a run with such a place.

Decoders and hooks of any process call `warn_once`. What a worker process has to say goes with its next microbatch to
the training process, which logs it unless it, or another worker, has said it before.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any, NamedTuple


class SamplePlace(NamedTuple):
    """One sample of a dataset; `note` says which part of a join it is."""

    dataset: str
    shard: str
    # This hides tuple.index, which nobody needs on a record.
    index: int  # type: ignore[assignment]
    key: str = ""
    parts: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        note = f"{self.note}: " if self.note else ""
        return f"{note}{self.dataset}: {self.in_dataset()}"

    def in_dataset(self, after: SamplePlace | None = None) -> str:
        """Name it within its dataset, without the parts it shares with a place named before."""
        shard = "" if after and after.shard == self.shard else f"shard {self.shard}, "
        key = f", key {self.key!r}" if self.key else ""  # what was not read has none; its error names one, if known
        parts = "" if not self.parts or (after and after.parts == self.parts) else f" (parts {', '.join(self.parts)})"
        return f"{shard}sample {self.index}{key}{parts}"


def place_in(sample: Any) -> SamplePlace | None:
    """Return where a sample comes from, by its own `__key__` and `__sources__`; None if it has none."""
    said = sample.get if isinstance(sample, dict) else partial(getattr, sample)
    sources = said("__sources__", None)
    if not sources:
        return None
    source = sources[0]
    key = str(said("__key__", ""))
    parts = tuple(name.removeprefix(f"{key}.") for name in source.file_names)
    more = ", ".join(f"shard {other.shard_name} of {other.dataset_path}" for other in sources[1:3])
    note = f"joined with {more}" if more else ""
    return SamplePlace(str(source.dataset_path), source.shard_name, source.index, key, parts, note)


# ---------------------------------------------------------------------------------------------------------------------
# Warnings about data.


Warned = tuple[str, str, str]
"""Logger, name and text of a warning; a run has one of a name."""

here = threading.local()
"""`here.at`: what this thread is doing to which sample, as an object whose text says so; None: nothing."""
warned: set[str] = set()
"""Names of the warnings that this process has given, or keeps."""
kept: list[Warned] = []
"""Those of a worker process, until a microbatch takes them along."""
_keeps = False


def keep_warnings() -> None:
    """Keep the warnings of this process, a worker, for its next microbatch."""
    global _keeps
    _keeps = True


def warn_once(logger: logging.Logger, message: str, name: str = "") -> None:
    """Warn of something in the data, once in a run for a name (default: the message), with the sample at hand."""
    if (name or message) not in warned:
        at = getattr(here, "at", None)
        pass_on((logger.name, name or message, message if at is None else f"{message}. The first: {at}"))


def pass_on(warning: Warned) -> None:
    """Log a warning, or keep it, if there was none of its name."""
    logger, name, text = warning
    if name not in warned:
        warned.add(name)
        if _keeps:
            kept.append(warning)
        else:
            logging.getLogger(logger).warning("%s", text)

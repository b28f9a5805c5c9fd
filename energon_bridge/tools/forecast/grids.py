"""What each rank reads and decodes in a step, where encoders and the language model have ranks of their own.

Bytes follow from samples spread over each dataset, of whose tars the headers are read: those of parts that are media go
to encoder ranks, the others to all. Counts of language ranks are exact, bytes and media are means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.format.tar import BLOCK
from energon_bridge.core.storage import ByteRange
from energon_bridge.core.stores.file_store import follow_links
from energon_bridge.core.stream.reader import LeafReader
from energon_bridge.tools.forecast.epochs import Forecast
from energon_bridge.tools.forecast.planned_run import Run

_LOOKED_AT = 32
_HEAD = 1 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class GridForecast:
    """The ranks of a grid, each as the mean of them.

    Attributes:
        name, ranks: The grid.
        serves: Language ranks whose microbatches one of its ranks gets; below 1: it gets a part of one.
        samples: Samples of a step whose tokens it makes.
        media: Media that it decodes in a step.
        reads: Bytes that it reads in a step.
    """

    name: str
    ranks: int
    serves: float
    samples: float
    media: float
    reads: float


def sizes_of(text: str) -> dict[str, int]:
    """Return the sizes of grids given as `language=4,vision=2`. Raises ConfigurationError for anything else."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.isdigit() or not int(size):
            raise ConfigurationError(f"--grids: expected NAME=RANKS, as in language=4,vision=2, got {part.strip()!r}")
        found[name] = int(size)
    if len(found) > 2:
        raise ConfigurationError(
            "--grids: headers of files do not tell videos from sounds, so all media count for one encoder: give "
            "language and one other"
        )
    return found


def grid_forecast(run: Run, forecast: Forecast, sizes: dict[str, int]) -> list[GridForecast]:
    """Return what the ranks of each grid read and decode in a step of the run, `language` first."""
    from energon_bridge.trainers.roles import make_roles

    roles = make_roles(grids={name: (0, size) for name, size in sizes.items()})
    steps = max(1, forecast.steps)
    draws = forecast.draws / steps  # of all language ranks
    means = np.zeros(4)
    for leaf, of_run in zip(forecast.leaves, run.spec.leaves, strict=True):
        means += _parts_of(of_run.dataset) * leaf.draws / max(1, forecast.draws)
    texts, headers, media, number = means.tolist()
    language = sizes["language"]
    made = []
    for name in roles.names:
        serves = language / sizes[name]
        samples = draws / language * max(1.0, serves)
        own = draws / sizes[name] if name != "language" else 0.0
        reads = samples * (texts + headers) + own * media
        made.append(
            GridForecast(
                name=name,
                ranks=sizes[name],
                serves=serves,
                samples=samples,
                media=own * number,
                reads=reads,
            )
        )
    return made


def _parts_of(dataset: Any) -> np.ndarray:
    """Return means of a dataset's samples: bytes of texts, of headers, and of media, and the number of media."""
    if not isinstance(dataset, PreparedDataset) or not hasattr(dataset, "shard_counts"):
        raise ConfigurationError(f"--grids looks into tars, and {dataset.path} has none")
    total = int(sum(dataset.shard_counts))
    indices = np.unique(np.linspace(0, total - 1, _LOOKED_AT).astype(np.int64))
    follow = follow_links(dataset.path)
    rows = [
        _row_of(raw.parts(None, lambda _: True, follow)[1]) for raw in LeafReader(dataset, unread_from=0).read(indices)
    ]
    return np.mean(rows, 0)


def _row_of(parts: dict[str, ByteRange]) -> Sequence[float]:
    media = [part.size for name, part in parts.items() if kind_by_name(name) is not None]
    texts = sum(part.size for part in parts.values()) - sum(media)
    return texts, len(parts) * BLOCK + sum(min(_HEAD, size) for size in media), sum(media), len(media)

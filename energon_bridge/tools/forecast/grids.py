"""What each rank reads, decodes, holds and receives in a step, where encoders have ranks of their own.

Bytes follow from samples spread over each dataset, of whose tars the headers are read: those of parts that are media go
to encoder ranks, the others to all. Counts of language ranks are exact, bytes and media are means.

What a rank holds is what its task encoder makes: batches of the first steps are made as in training, with blank media
of the sizes that headers tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from energon_bridge.core.datasets import get_savable_loader
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.format.tar import BLOCK, HEAD
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.storage import ByteRange
from energon_bridge.core.stores.file_store import follow_links
from energon_bridge.core.stream.reader import LeafReader
from energon_bridge.core.stream.rows import size_of
from energon_bridge.tools.forecast.epochs import Forecast
from energon_bridge.tools.forecast.planned_run import Run
from energon_bridge.trainers.roles import make_roles
from energon_bridge.trainers.roles.encoding import KINDS, LanguageTaskEncoder, MediaTaskEncoder, blank
from energon_bridge.trainers.roles.roles import LANGUAGE, Roles, joined

_LOOKED_AT = 32
_MICROBATCHES = 64
"""Of the first steps, how many are made to tell what ranks hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridForecast:
    """The ranks of a grid, each as the mean of them.

    Attributes:
        name, ranks: The grid.
        serves: Language ranks whose microbatches one of its ranks gets; below 1: it gets a part of one.
        samples: Samples of a step whose tokens it makes.
        media: Media that it decodes in a step.
        reads: Bytes that it reads in a step.
        holds: The most bytes of its batch in one of the first steps.
        tokens: Tokens of media in a step: of `language`, those whose features it receives, of an encoder, those that it
            makes. Without a task encoder, `holds` and `tokens` are None.
        features: Bytes of these features.
    """

    name: str
    ranks: int
    serves: float
    samples: float
    media: float
    reads: float
    holds: int | None = None
    tokens: float | None = None
    features: float | None = None


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


def grid_forecast(
    run: Run,
    forecast: Forecast,
    sizes: dict[str, int],
    encoding: DatasetSpec | None = None,
    feature_bytes: int | None = None,
) -> list[GridForecast]:
    """Return what the ranks of each grid do in a step of the run, `language` first.

    Args:
        encoding: The dataset of the run with its task encoder, to tell what ranks hold.
        feature_bytes: Bytes of the features of a token.
    """
    roles = make_roles(grids={name: (0, size) for name, size in sizes.items()})
    language = sizes[LANGUAGE]
    draws = forecast.draws / max(1, forecast.steps)  # of all language ranks
    of_step = {} if encoding is None else _of_first_steps(roles, encoding, run, forecast.steps, feature_bytes)
    shares = [leaf.draws / max(1, forecast.draws) for leaf in forecast.leaves]
    texts, media, number = np.dot(shares, [_parts_of(leaf.dataset) for leaf in run.spec.leaves]).tolist()
    made = []
    for name in roles.names:
        ranks = sizes[name]
        samples = draws / min(language, ranks)
        own = draws / ranks if name != LANGUAGE else 0.0
        read = {"samples": samples, "media": own * number, "reads": samples * texts + own * media}
        made.append(GridForecast(name=name, ranks=ranks, serves=language / ranks, **read, **of_step.get(name, {})))
    return made


class _BlankMedia(MediaTaskEncoder):
    """Makes what an encoder rank gets, of blank media: nothing is decoded."""

    def _given(self, *args: Any) -> list[list[Any]]:
        return [list(map(blank, of_kind)) for of_kind in super()._given(*args)]


def _of_first_steps(
    roles: Roles, encoding: DatasetSpec, run: Run, steps: int, feature_bytes: int | None
) -> dict[str, dict[str, Any]]:
    """Return what the ranks of each grid hold, and the tokens of media in a step, as the fields of a forecast."""
    encoder = encoding.settings.task_encoder
    language = roles.grids[LANGUAGE].size
    looked_at = max(1, min(steps * run.per_step, _MICROBATCHES // language))
    most = dict.fromkeys(roles.names, 0)
    tokens = 0
    for name in roles.names:
        _, parts = roles.part(name)
        for part in range(parts):
            language_rank = name == LANGUAGE
            made = LanguageTaskEncoder(encoder) if language_rank else _BlankMedia(encoder, KINDS[name], (part, parts))
            stream = _microbatches(encoding, made, run, looked_at * language)
            for lanes in zip(*[stream] * len(roles.served(name)), strict=True):
                batch = lanes[0] if language_rank else joined(lanes)
                most[name] = max(most[name], size_of(batch, 0))
                tokens += 0 if language_rank else sum(batch.num_tokens)
    found = {}
    for name, grid in roles.grids.items():
        of_rank = tokens * run.per_step / looked_at / grid.size
        features = None if feature_bytes is None else of_rank * feature_bytes
        found[name] = {"holds": most[name], "tokens": of_rank, "features": features}
    return found


def _microbatches(encoding: DatasetSpec, encoder: Any, run: Run, count: int) -> Iterator[Any]:
    """Yield the first microbatches of all ranks of the run in turn."""
    config = replace(run.plan.config, rank=0, world_size=1, num_workers=0, num_lanes=run.num_lanes)
    spec = replace(encoding.with_settings(task_encoder=encoder), worker_config=config)
    with closing(get_savable_loader(spec, worker_config=config)) as loader:
        yield from islice(loader, count)


def _parts_of(dataset: Any) -> np.ndarray:
    """Return means of a dataset's samples: bytes of texts and headers, of the rest of media, and how many media."""
    if not isinstance(dataset, PreparedDataset) or not hasattr(dataset, "shard_counts"):
        raise ConfigurationError(f"--grids looks into tars, and {dataset.path} has none")
    total = int(sum(dataset.shard_counts))
    indices = np.unique(np.linspace(0, total - 1, _LOOKED_AT).astype(np.int64))
    follow = follow_links(dataset.path)
    rows = LeafReader(dataset, unread_from=0).read(indices)
    return np.mean([_row_of(raw.parts(None, lambda _: True, follow)[1]) for raw in rows], 0)


def _row_of(parts: dict[str, ByteRange]) -> Sequence[float]:
    media = [part.size for name, part in parts.items() if kind_by_name(name) is not None]
    bodies = sum(max(0, size - HEAD) for size in media)
    return sum(BLOCK + part.size for part in parts.values()) - bodies, bodies, len(media)

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
from energon_bridge.trainers.roles.encoding import MediaTaskEncoder, blank
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
    steps = max(1, forecast.steps)
    draws = forecast.draws / steps  # of all language ranks
    of_step = {} if encoding is None else _of_first_steps(roles, encoding, run, forecast.steps)
    means = np.zeros(4)
    for leaf, of_run in zip(forecast.leaves, run.spec.leaves, strict=True):
        means += _parts_of(of_run.dataset) * leaf.draws / max(1, forecast.draws)
    texts, headers, media, number = means.tolist()
    language = sizes[LANGUAGE]
    made = []
    for name in roles.names:
        serves = language / sizes[name]
        samples = draws / language * max(1.0, serves)
        own = draws / sizes[name] if name != LANGUAGE else 0.0
        holds, tokens = of_step.get(name, (None, None))
        reads = samples * (texts + headers) + own * media
        made.append(
            GridForecast(
                name=name,
                ranks=sizes[name],
                serves=serves,
                samples=samples,
                media=own * number,
                reads=reads,
                holds=holds,
                tokens=tokens,
                features=None if tokens is None or feature_bytes is None else tokens * feature_bytes,
            )
        )
    return made


class _BlankMedia(MediaTaskEncoder):
    """Makes what an encoder rank gets, of blank media: nothing is decoded."""

    def _given(self, *args: Any) -> tuple[list[Any], list[Any], list[Any]]:
        images, videos, sounds = super()._given(*args)
        return list(map(blank, images)), list(map(blank, videos)), list(map(blank, sounds))


def _of_first_steps(roles: Roles, encoding: DatasetSpec, run: Run, steps: int) -> dict[str, tuple[int, float]]:
    """Return the most bytes of a batch, and the mean tokens of media in a step, of the ranks of each grid."""
    encoder = encoding.settings.task_encoder
    language = roles.grids[LANGUAGE].size
    looked_at = max(1, min(steps * run.per_step, _MICROBATCHES // language))
    most = dict.fromkeys(roles.names, 0)
    tokens = 0
    for name in roles.names:
        for part in range(roles.part(name)[1]):
            made = roles.task_encoder(name, encoder)
            if isinstance(made, MediaTaskEncoder):
                made = _BlankMedia(encoder, made.kinds, (part, roles.part(name)[1]))
            stream = _microbatches(encoding, made, run, looked_at * language)
            for lanes in zip(*[stream] * len(roles.served(name)), strict=True):
                batch = lanes[0] if name == LANGUAGE else joined(lanes)
                most[name] = max(most[name], size_of(batch, 0))
                tokens += 0 if name == LANGUAGE else sum(batch.num_tokens)
    of_step = tokens * run.per_step / looked_at
    return {name: (most[name], of_step / roles.grids[name].size) for name in roles.names}


def _microbatches(encoding: DatasetSpec, encoder: Any, run: Run, count: int) -> Iterator[Any]:
    """Yield the first microbatches of all ranks of the run in turn."""
    config = replace(run.plan.config, rank=0, world_size=1, num_workers=0, num_lanes=run.num_lanes)
    spec = replace(encoding.with_settings(task_encoder=encoder), worker_config=config)
    with closing(get_savable_loader(spec, worker_config=config)) as loader:
        yield from islice(loader, count)


def _parts_of(dataset: Any) -> np.ndarray:
    """Return means of a dataset's samples: bytes of texts, headers and the rest of media, and the number of media."""
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
    heads = sum(min(HEAD, size) for size in media)
    return texts, len(parts) * BLOCK + heads, sum(media) - heads, len(media)

"""Runs with roles in one process, each rank's loader by itself, and what a run on one grid gives to be compared."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import signal
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import config_of, digest
from forked import start_forked
from pictures import noise

from energon_bridge import get_savable_loader
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.storage.local import LocalStore
from energon_bridge.models.conversations.sequences import join_visual
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard
from energon_bridge.trainers.roles import EncoderBatch, make_roles
from energon_bridge.trainers.roles.roles import RoleLoader

NUM_LANES = 24


def pictures_dataset(folder: Path, shards: Sequence[int] = (9, 1, 14), side: int = 160) -> Path:
    """Write conversations with no picture, one, two or three, JPEGs and PNGs of some ten kilobytes."""
    rng = random.Random(5)
    first = 0
    for shard, count in enumerate(shards):
        samples = {f"{number:05d}": _parts(rng, side) for number in range(first, first + count)}
        (folder / "train").mkdir(parents=True, exist_ok=True)
        write_shard(folder / "train" / f"{shard}.tar", samples)
        first += count
    prepare_dataset(
        folder,
        split=parse_patterns(["train:train/.*", "val:train/.*"]),
        dataset_yaml=render_dataset_yaml("CrudeWebdataset", None),
    )
    return folder


def _parts(rng: random.Random, side: int) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    count = rng.choice([0, 0, 1, 1, 2, 3])
    for number in range(count):
        form = rng.choice(["JPEG", "PNG"])
        out = io.BytesIO()
        noise(rng.randint(side // 2, side), rng.randint(side // 2, side), rng.randrange(1 << 20)).save(out, form)
        parts[f"{number}.{ {'JPEG': 'jpg', 'PNG': 'png'}[form] }"] = out.getvalue()
    turns = [
        {"role": "user", "content": "<image>" * count + f"what is it {rng.randrange(99)}?"},
        {"role": "assistant", "content": "a color " * rng.randint(1, 9)},
    ]
    return parts | {"json": json.dumps({"messages": turns}).encode()}


def role_loader(
    dataset: DatasetSpec,
    name: str,
    rank: int,
    sizes: Mapping[str, int],
    *,
    workers: int = 0,
    macro: int = 1,
    balance: Any = None,
) -> RoleLoader:
    """Return the loader of one rank of a grid, which is of no other grid."""
    grids = {grid: (rank if grid == name else None, size) for grid, size in sizes.items()}
    config = replace(dataset.worker_config, num_workers=workers)
    return make_roles(grids=grids, macro=macro).loader(replace(dataset, worker_config=config), balance=balance)


def delivered(
    dataset: DatasetSpec,
    sizes: Mapping[str, int],
    steps: int,
    *,
    state: Any = None,
    workers: int = 0,
    macro: int = 1,
    balance: Any = None,
    lost: int = 0,
) -> tuple[dict[str, list[list[Any]]], list[Any]]:
    """Return what the ranks of each grid get in some steps, by name, rank and step; and the states at the end.

    After that, they go on for up to `lost` steps, each for a number of its own, and are ended.
    """
    found: dict[str, list[list[Any]]] = {name: [] for name in sizes}
    states = []
    for name, size in sizes.items():
        for rank in range(size):
            loader = role_loader(dataset, name, rank, sizes, workers=workers, macro=macro, balance=balance)
            if state is not None:
                loader.restore_state_rank(state)
            found[name].append([step[name] for step in islice(loader, steps) if name in step])
            states += [loader.save_state_rank()] if name == "language" else []
            for _ in islice(loader, (rank * 7 + len(name)) % (lost + 1)):
                pass
            loader.close()
    return found, states


def killed(
    dataset: DatasetSpec,
    sizes: Mapping[str, int],
    steps: int,
    kills: Mapping[tuple[str, int], int],
    folder: Path,
    *,
    state: Any = None,
    workers: int = 0,
    macro: int = 1,
    balance: Any = None,
) -> tuple[dict[str, list[list[Any]]], list[Any], int]:
    """Run each rank in a process that kills itself, and return what reached the disk.

    Args:
        steps: After how many steps language ranks write their states.
        kills: After how many steps a rank's process kills itself, by name and rank.
        folder: Does not exist yet.

    Returns:
        As `delivered`, cut to the steps that all ranks have made; the states, none if a language rank was killed before
        it wrote its own; and these steps.
    """
    folder.mkdir()

    def live(name: str, rank: int) -> None:
        last = kills[name, rank]
        loader = role_loader(dataset, name, rank, sizes, workers=workers, macro=macro, balance=balance)
        if state is not None:
            loader.restore_state_rank(state)
        stream = iter(loader)
        with (folder / f"{name}-{rank}").open("wb") as out:
            for step in range(last):
                pickle.dump(next(stream).get(name), out)
                if step + 1 == steps and name == "language":
                    (folder / f"state-{rank}").write_bytes(pickle.dumps(loader.save_state_rank()))
            out.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    children = [start_forked(partial(live, *rank)) for rank in kills]
    ends = [child.result() for child in children]
    assert ends == [(False, "no result, exit status -9")] * len(ends), ends
    common = min(kills.values()) // macro * macro
    found: dict[str, list[list[Any]]] = {name: [[] for _ in range(size)] for name, size in sizes.items()}
    for name, rank in kills:
        with (folder / f"{name}-{rank}").open("rb") as file:
            batches = [pickle.load(file) for _ in range(common)]
        found[name][rank] = [batch for batch in batches if batch is not None]
    files = [folder / f"state-{rank}" for rank in range(sizes["language"])]
    return found, [pickle.loads(file.read_bytes()) for file in files] if all(map(Path.exists, files)) else [], common


def plain(dataset: DatasetSpec, ranks: int, steps: int, state: Any = None) -> list[list[Any]]:
    """Return the microbatches of a run on one grid, by rank and step."""
    found = []
    for rank in range(ranks):
        config = config_of(ranks, 0, rank, num_lanes=NUM_LANES)
        loader = get_savable_loader(dataset, worker_config=config)
        if state is not None:
            loader.restore_state_rank(state)
        found.append(list(islice(loader, steps)))
        loader.close()
    return found


def as_dealt(flat: Sequence[Any], found: dict[str, list[list[Any]]]) -> list[list[Any]]:
    """Return microbatches of a run on one grid, with their media, as language ranks got them: by rank and step."""
    by_rows = {batch.__restore_key__: batch for batch in flat}
    return [[by_rows[batch.__restore_key__] for batch in rank] for rank in found["language"]]


def without_media(batch: Any) -> Any:
    """Return a batch of one grid as a language rank gets it."""
    kept = {name: one for name, one in batch.visual_inputs.items() if name.endswith("_grid_thw")}
    return replace(batch, pixel_values=None, visual_inputs=kept, pixel_norm=None)


def media_of(batches: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the media of batches of one grid, joined."""
    rows = [
        dict(batch.visual_inputs) | ({} if batch.pixel_values is None else {"pixel_values": batch.pixel_values})
        for batch in batches
    ]
    return join_visual(rows, [0] * len(rows), count=1) if any(rows) else {}


def assert_same_run(
    sizes: Mapping[str, int],
    steps: int,
    whole: list[list[Any]],
    found: dict[str, list[list[Any]]],
    *,
    macro: int = 1,
) -> None:
    """Assert that a run with roles has the tokens and media of one on a single grid, each medium once.

    With `macro`, there are no more ranks of encoders than of the language model.
    """
    language = sizes["language"]
    for rank in range(language):
        for step in range(steps):
            expected = without_media(whole[rank][step])
            got = found["language"][rank][step]
            assert digest(got) == digest(expected), (rank, step)
    for name in sizes.keys() - {"language"}:
        parts = max(1, sizes[name] // language)
        served = max(1, language // sizes[name])
        for group in range(sizes[name] // parts):
            for number, step in enumerate(range(0, steps, macro)):
                pieces: list[EncoderBatch] = [found[name][group * parts + part][number] for part in range(parts)]
                at_once = range(step, step + macro)
                lanes = [whole[group * served + lane][one] for one in at_once for lane in range(served)]
                expected = media_of(lanes)
                made = [piece.visual_inputs for piece in pieces if piece.visual_inputs]
                got = join_visual(made, [0] * len(made), count=1) if made else {}
                assert got.keys() == expected.keys(), (name, group, step)
                assert all(torch.equal(got[key], expected[key]) for key in got), (name, group, step)
                for lane, said in enumerate(pieces[0].part_tokens):
                    tokens = [sum(of_part) for of_part in zip(*said.values(), strict=True)]
                    assert tokens == [piece.num_tokens[lane] for piece in pieces], (name, group, step)
                for piece in pieces:
                    assert piece.part_tokens == pieces[0].part_tokens
                    assert all(map(torch.equal, piece.input_ids, [lane.tokens for lane in lanes]))


@contextmanager
def reads_counted() -> Any:
    """Return a list that gets offset and length of each read of a shard."""
    read: list[tuple[int, int]] = []
    inner = LocalStore.read_range, LocalStore.read_ranges

    def read_range(self: Any, rel: str, offset: int, length: int) -> bytes:
        read.extend([(offset, length)] if rel.endswith(".tar") else [])
        return inner[0](self, rel, offset, length)

    def read_ranges(self: Any, rel: str, offsets: Any, lengths: Any) -> list[bytes]:
        read.extend(zip(offsets, lengths, strict=True) if rel.endswith(".tar") else [])
        return inner[1](self, rel, offsets, lengths)

    LocalStore.read_range, LocalStore.read_ranges = read_range, read_ranges  # type: ignore[method-assign]
    try:
        yield read
    finally:
        LocalStore.read_range, LocalStore.read_ranges = inner  # type: ignore[method-assign]


def note_decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets each image that is decoded from now on."""
    decoded: list[str] = []
    inner = DeferredImage.get

    def get(image: DeferredImage) -> Any:
        decoded.append(repr(image))
        return inner(image)

    monkeypatch.setattr(DeferredImage, "get", get)
    return decoded

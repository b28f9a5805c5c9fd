"""Crude datasets with auxiliary stores for tests: conversations that name files elsewhere, and encoders that cook them.

A mix has the crude dataset `talk` (parts json and txt), the store `blobs` (a prepared dataset, npy and txt) and the
store `notes` (a folder of texts).
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import Numbers, PackingEncoder

from energon_bridge import (
    Cooker,
    DefaultTaskEncoder,
    FileStore,
    Lazy,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_val_dataset,
)
from energon_bridge.core.prepare import parse_ratio, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard


def prepared(folder: Path, *shards: dict[str, dict[str, bytes]]) -> Path:
    """Write and prepare a crude dataset, all of it in the split part train."""
    folder.mkdir(parents=True)
    for number, samples in enumerate(shards):
        write_shard(folder / f"shard_{number:03d}.tar", samples)
    dataset_yaml = render_dataset_yaml("CrudeWebdataset", None)
    prepare_dataset(folder, split=parse_ratio("1,0,0"), dataset_yaml=dataset_yaml)
    return folder


def npy(array: np.ndarray) -> bytes:
    """Return an array as the bytes of an npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def crude_mix(folder: Path, counts: tuple[int, ...] = (13, 8, 16), subflavors: str = "{kind: chat}") -> Path:
    """Write a mix of one crude dataset with two auxiliary stores; return its file."""
    total = sum(counts)
    shards, first = [], 0
    for count in counts:
        numbers = range(first, first + count)
        content = {n: {"blob": f"b{(7 * n) % total:03d}.npy", "note": f"deep/n{n % 5}.txt"} for n in numbers}
        shards.append({f"{n:05d}": {"json": json.dumps(content[n]).encode(), "txt": b"talk %d" % n} for n in numbers})
        first += count
    prepared(folder / "talk", *shards)
    blobs = {f"b{n:03d}": {"npy": npy(np.arange(n, n + 1 + n % 3)), "txt": b"blob %d" % n} for n in range(total)}
    names = sorted(blobs)
    prepared(folder / "blobs", *({name: blobs[name] for name in names[half::2]} for half in range(2)))
    (folder / "notes" / "deep").mkdir(parents=True)
    for n in range(5):
        (folder / "notes" / "deep" / f"n{n}.txt").write_text(f"note {n}")
    path = folder / "mix.yaml"
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    path: ./talk\n"
        f"    subflavors: {subflavors}\n    aux: {{blobs: ./blobs, notes: 'filesystem://./notes'}}\n"
    )
    return path


def cook_talk(sample: dict[str, Any], blobs: FileStore, notes: FileStore, primary: FileStore) -> Numbers:
    """Cook with all stores and some chance; skips a fifth."""
    if random.random() < 0.2:
        raise SkipSample
    blob = blobs.get(sample["json"]["blob"], sample)
    text = f"{notes.get(sample['json']['note'], sample)}; {primary.get('.txt', sample)}"
    noise = torch.rand(len(blob), dtype=torch.float64) + np.random.random()
    return Numbers(**basic_sample_keys(sample), text=text, number=torch.from_numpy(blob), noise=noise)


class Raw(DefaultTaskEncoder):
    """Leaves samples as they are, with the bytes of all parts."""

    decoder = None


def parts_of(root: Path, encoder: Any = None, *, workers: int = 0) -> dict[str, dict[str, Any]]:
    """Return the parts of all samples of the split part val, by key, as training gets them: as bytes, or decoded."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_val_dataset(root, batch_size=None, task_encoder=encoder or Raw(), worker_config=config)
    return {
        sample["__key__"]: {name: value for name, value in sample.items() if not name.startswith("__")}
        for sample in get_loader(dataset)
    }


class CookingEncoder(DefaultTaskEncoder):
    """Cooks, and leaves the rest to the package."""

    cookers = (Cooker(cooker(need_primary=True)(cook_talk), has_subflavors={"kind": "chat"}),)


@cooker(need_cache=True, need_primary=True)
def cook_lazily(sample: dict[str, Any], blobs: FileStore, notes: FileStore, primary: FileStore, cache: Any) -> Any:
    """Cook without the contents: a dict with lazies."""
    note = cache.get(notes, sample["json"]["note"], sample)
    held = cache.to_cache({"note": note, "size": torch.rand(2)}, "held")
    talk = cache.get_lazy(primary, ".txt")
    return basic_sample_keys(sample) | {
        "blob": cache.get_lazy(blobs, sample["json"]["blob"]),
        "talk": talk,
        "held": held,
    }


def fetched(sample: dict[str, Any]) -> Numbers:
    """Get what a lazily cooked sample stands for."""
    lazies: list[Lazy] = [sample[name] for name in ("blob", "talk", "held")]
    blob, talk, held = (lazy.get(sample) for lazy in lazies)
    noise = torch.rand(len(blob), dtype=torch.float64) + held["size"].sum()
    text = f"{talk}; {held['note']}"
    return Numbers(**basic_sample_keys(sample), text=text, number=torch.from_numpy(blob), noise=noise)


class LazyEncoder(DefaultTaskEncoder):
    """Cooks lazily and gets the contents in `encode_sample`."""

    cookers = (Cooker(cook_lazily),)

    def encode_sample(self, sample: Any) -> Any:
        return fetched(sample)


class LazyPackingEncoder(DefaultTaskEncoder):
    """Packs lazily cooked samples, whose contents are got when a pack is about to leave."""

    cookers = (Cooker(cook_lazily),)

    def preencode_sample(self, sample: Any) -> Any:
        if random.random() < 0.2:
            raise SkipSample
        return sample | {"length": random.randrange(1, 4)}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = [[]]
        for sample in samples[: 2 * len(samples) // 3]:
            if sum(one["length"] for one in packs[-1]) + sample["length"] > 5:
                packs.append([])
            packs[-1].append(sample)
        return [pack for pack in packs if pack]

    def postencode_sample(self, sample: Any) -> Any:
        # The pool by another way, too: the name of the file is no longer known here, but the blob is got once more.
        first, again = fetched(sample), sample["blob"].get()
        assert np.array_equal(first.number.numpy(), again)
        return first

    def pack_selected_samples(self, samples: list[Any]) -> Iterator[Any]:
        yield PackingEncoder().pack_selected_samples(samples)

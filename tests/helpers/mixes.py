"""Mixes of many small datasets, written quickly: none of them is prepared, their metadata is put down as it must be."""

from __future__ import annotations

import json
from pathlib import Path

from energon_bridge.core.format.tar_index import encode_index
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

SAMPLES = 4


def many_datasets(folder: Path, count: int) -> Path:
    """Write datasets `d000`, `d001`, ... of a shard each, and `mix.yaml`, which blends them; return its path."""
    for number in range(count):
        write_dataset(folder / f"d{number:03d}", number)
    items = "".join(f"      - {{path: d{number:03d}, weight: {1 + number % 3}}}\n" for number in range(count))
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    (folder / "mix.yaml").write_text(head + items)
    return folder / "mix.yaml"


def write_dataset(folder: Path, number: int) -> None:
    """Write one dataset; its samples are keyed `<number>_0`, `<number>_1`, ..."""
    (folder / ".nv-meta").mkdir(parents=True)
    shard = f"s{number}.tar"
    write_shard(folder / shard, {f"{number}_{n}": {"txt": b"text"} for n in range(SAMPLES)})
    # A header and a padded payload of 512 bytes each.
    (folder / f"{shard}.idx").write_bytes(encode_index(range(0, 1024 * SAMPLES + 1, 1024)))
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {shard: SAMPLES}}))
    (folder / ".nv-meta" / "split.yaml").write_text(f"split_parts: {{train: [{shard}]}}\nexclude: []\n")
    (folder / ".nv-meta" / "dataset.yaml").write_bytes(render_dataset_yaml("TextSample", {"text": "txt"}))

"""The data of the part `mixes`: many small text datasets and a metadataset for each number of them.

Every dataset has one shard of 20 samples. Names, counts and sizes of the shards differ from dataset to dataset, the
`dataset.yaml` does not. The metadata is written by this package; both systems read the same files.
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data import KINDS, samples

SAMPLES = 20


def make(cache: Path, count: int) -> Path:
    """Return the folder with `count` prepared datasets; those that are not there are written now."""
    from energon_bridge.core.prepare import parse_patterns, prepare_dataset
    from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml

    kind = KINDS["text"]
    folder = cache / "mixes"
    source = samples(kind, count * SAMPLES)
    for number in range(count):
        own = list(itertools.islice(source, SAMPLES))
        dataset = folder / f"dataset_{number:04d}"
        if (dataset / ".nv-meta" / "dataset.yaml").exists():
            continue
        dataset.mkdir(parents=True, exist_ok=True)
        with tarfile.open(dataset / f"text_{number:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, parts in own:
                for part, data in parts.items():
                    member = tarfile.TarInfo(f"{key}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        prepare_dataset(
            dataset,
            split=parse_patterns(["train:.*"]),
            dataset_yaml=render_dataset_yaml(kind.sample_type, kind.field_map),
            key_index=False,
        )
    return folder


def write_mix(folder: Path, count: int) -> Path:
    """Write a metadataset of the first datasets, weighted 1 to 7."""
    items = [f"      - {{path: dataset_{number:04d}, weight: {1 + number % 7}}}\n" for number in range(count)]
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    path = folder / f"mix_{count}.yaml"
    if not path.exists():
        path.write_text(head + "".join(items))
    return path


def make_all(cache: Path, counts: Sequence[int]) -> dict[int, Path]:
    """Return a metadataset for each number of datasets."""
    folder = make(cache, max(counts))
    return {count: write_mix(folder, count) for count in counts}

"""A program that needs the core alone: it prepares texts, loads, packs, groups, saves, and restores on other ranks.

    python core_alone.py FOLDER        (the copy of the core on sys.path)

It prints the modules of the package that it has loaded, in one line of JSON.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from energon_bridge.core.datasets import get_savable_loader, get_train_dataset
from energon_bridge.core.encoder import DefaultTaskEncoder, TaskEncoder
from energon_bridge.core.prepare import SplitRule, prepare_dataset
from energon_bridge.core.samples import TextSample
from energon_bridge.core.worker_config import WorkerConfig

KEYS = [f"s{shard}i{number:02d}" for shard in range(4) for number in range(30)]
STEPS = 6


class Packs(DefaultTaskEncoder):
    """Packs of up to 40 letters."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = []
        room = 0
        for sample in samples:
            if len(sample.text) > room:
                packs.append([])
                room = 40
            packs[-1].append(sample)
            room -= len(sample.text)
        return packs

    def pack_selected_samples(self, samples: list[Any]) -> TextSample:
        return TextSample(__key__="+".join(s.__key__ for s in samples), text=" ".join(s.text for s in samples))


class Groups(DefaultTaskEncoder):
    """Batches of texts of the same length."""

    def batch_group_criterion(self, sample: Any) -> tuple[int, int]:
        return len(sample.text), 3


def prepare(folder: Path) -> Path:
    """Write shards of texts, and prepare them."""
    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for number, key in enumerate(KEYS[30 * shard :][:30]):
                data = f"{key} {'x' * (number % 7)}".encode()
                entry = tarfile.TarInfo(f"{key}.txt")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    yaml = b"__module__: megatron.energon\n__class__: TextWebdataset\nfield_map:\n  text: txt\n"
    prepared = prepare_dataset(folder, split=SplitRule(ratios=(("train", 1.0),)), dataset_yaml=yaml)
    assert prepared.num_samples == len(KEYS), prepared
    return folder


def open_rank(data: Path, encoder: TaskEncoder, rank: int, world_size: int, **settings: Any) -> Any:
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, num_lanes=4)
    dataset = get_train_dataset(data, task_encoder=encoder, worker_config=config, **settings)
    return get_savable_loader(dataset)


def keys_of(loader: Any, steps: int) -> list[tuple[str, ...]]:
    batches = iter(loader)
    return [tuple(next(batches)["__key__"]) for _ in range(steps)]


def check(data: Path, encoder: TaskEncoder, **settings: Any) -> None:
    """Compare a run that is stopped and restored on two ranks with one that never stopped."""
    whole = open_rank(data, encoder, 0, 1, **settings)
    expected = keys_of(whole, 2 * STEPS)
    assert {key for keys in expected for one in keys for key in one.split("+")} <= set(KEYS)
    stopped = open_rank(data, encoder, 0, 1, **settings)
    assert keys_of(stopped, STEPS) == expected[:STEPS]
    state = json.loads(json.dumps(stopped.save_state_rank()))
    ranks = [open_rank(data, encoder, rank, 2, **settings) for rank in range(2)]
    for loader in ranks:
        loader.restore_state_rank(state)
    later = [keys_of(loader, STEPS // 2) for loader in ranks]
    assert [keys for step in zip(*later, strict=True) for keys in step] == expected[STEPS:]
    for loader in (whole, stopped, *ranks):
        loader.close()


if __name__ == "__main__":
    data = prepare(Path(sys.argv[1]) / "data")
    check(data, DefaultTaskEncoder(), batch_size=3)
    check(data, Packs(), batch_size=2, packing_buffer_size=10)
    check(data, Groups(), batch_size=None)
    sys.stdout.write(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "energon_bridge")) + "\n")

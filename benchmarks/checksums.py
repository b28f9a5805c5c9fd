"""What verifying checksums costs: `python -m benchmarks.checksums`. One process without workers, warm page cache.

Loaders of one dataset that verify never, samples of it and always deliver the same epochs in turn. A turn is many
epochs, since one may be read in the turn before, and costs are medians of the ratios of turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import islice
from operator import truediv
from pathlib import Path

from benchmarks.data import KINDS, make
from energon_bridge import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.format.checksums import Checksums
from energon_bridge.prepare import parse_patterns, prepare_dataset
from energon_bridge.prepare.dataset_yaml import render_dataset_yaml

POINTS = {"text": ("text", None), "caption/raw": ("caption", None), "caption/images": ("caption", "torchrgb8")}
MODES: tuple[Checksums, ...] = ("never", "sampled", "always")


class Encoder(DefaultTaskEncoder):
    """Gives bytes, or decoded images."""

    def __init__(self, form: str | None) -> None:
        super().__init__()
        self.decoder = None if form is None else SampleDecoder(image_decode=form)


def main() -> None:
    """Print a line for each point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=20, help="epochs in a turn")
    options = parser.parse_args()
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, form) in POINTS.items():
            path = make(Path(folder), KINDS[kind], options.samples)
            yaml = render_dataset_yaml(KINDS[kind].sample_type, KINDS[kind].field_map)
            prepare_dataset(path, split=parse_patterns(["train:.*"]), dataset_yaml=yaml, checksums=True)
            encoder = Encoder(form)
            streams = {}
            for mode in MODES:
                spec = get_train_dataset(
                    path, batch_size=32, worker_config=config, task_encoder=encoder, checksums=mode
                )
                streams[mode] = iter(get_savable_loader(spec))
            epochs = options.epochs if form is None else 1
            times: dict[Checksums, list[float]] = {mode: [] for mode in MODES}
            for turn in range(options.turns + 1):
                for mode in (*MODES, *MODES)[turn % 3 : turn % 3 + 3]:  # whoever comes first may be slower
                    start = time.process_time()
                    for _ in islice(streams[mode], epochs * options.samples // 32):
                        pass
                    times[mode].append(time.process_time() - start)
            never = times["never"]
            costs = ", ".join(
                f"{mode} {100 * (statistics.median(map(truediv, times[mode][1:], never[1:])) - 1):+.1f} %"
                for mode in MODES[1:]
            )
            print(f"{name}: {epochs * options.samples / statistics.median(never):,.0f} samples/s; {costs}", flush=True)


if __name__ == "__main__":
    main()

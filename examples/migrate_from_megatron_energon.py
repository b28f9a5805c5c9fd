"""From a run of megatron-energon to one of energon_bridge: its code as it is, from the step where the run stood.

    python examples/migrate_from_megatron_energon.py --data /data/captions --steps-done 1000

Without --data it makes a small dataset. `train` is code as it was written for megatron-energon; nothing in it changes.
The two packages draw samples in different orders, so that a saved position of the other one cannot be continued; the
run begins at the same step of the new order (`start_at`), and from then on resumes exactly.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from energon_bridge import compat, get_savable_loader
from energon_bridge.tools.testing import create_captioning_test_dataset

compat.install()  # before anything imports megatron.energon; or: python -m energon_bridge.compat train.py

from megatron.energon import CaptioningSample, DefaultTaskEncoder, WorkerConfig, get_train_dataset  # noqa: E402
from megatron.energon.task_encoder.base import stateless  # noqa: E402


class Encoder(DefaultTaskEncoder):
    """An encoder of a program that was written for megatron-energon."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        """Shorten captions."""
        sample.caption = sample.caption[:12]
        return sample


def main(argv: Sequence[str] | None = None) -> list[list[str]]:
    """Load a few batches from a step on and return their keys."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset of images and captions")
    parser.add_argument("--steps-done", type=int, default=1000, help="steps that the other run has made")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        dataset = get_train_dataset(
            options.data or create_captioning_test_dataset(folder),
            batch_size=4,
            shuffle_buffer_size=100,
            max_samples_per_sequence=100,
            task_encoder=Encoder(),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        )
        loader = get_savable_loader(dataset, start_at=options.steps_done)
        keys = [batch.__key__ for _, batch in zip(range(3), loader, strict=False)]
    for place, row in enumerate(keys):
        print(f"step {options.steps_done + place}: {', '.join(row)}")
    return keys


if __name__ == "__main__":
    main()

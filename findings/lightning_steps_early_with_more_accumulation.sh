#!/usr/bin/env bash
# Lightning 2.6.6: a run that goes on with more gradient accumulation takes a first optimizer step that is too small.
#
# A checkpoint has the microbatches of one rank that have been trained on, and the trainer steps where that count is a
# multiple of `accumulate_grad_batches`. Who goes on with half the ranks, and doubles the accumulation so that global
# batches keep their size, gets a step of fewer microbatches first, unless the count happens to be a multiple; from then
# on all global batches are cut elsewhere than in the run that was not stopped. Nothing warns. Resume after a number of
# steps for which old and new counts agree, or convert `epoch_loop.batch_progress` in `on_load_checkpoint`.
#
# Seen with lightning 2.6.6, torch 2.13.0 (CPU), Python 3.11, three steps of two microbatches, then steps of four:
#   microbatches of each step [2, 2, 2] [2, 4, 4]
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
"$folder/env/bin/pip" install --quiet "lightning==2.6.6" "numpy<3"
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import logging
from importlib.metadata import version

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps, self.microbatches = [], 0

    def training_step(self, batch, batch_idx):
        self.microbatches += 1
        return self.layer(batch).sum()

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.steps.append(self.microbatches)
        self.microbatches = 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(accumulate, max_steps, checkpoint=None):
    model = Model()
    saves = ModelCheckpoint(".", filename="last", every_n_train_steps=1, enable_version_counter=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", accumulate_grad_batches=accumulate, max_steps=max_steps, callbacks=[saves], **quiet
    )
    trainer.fit(model, DataLoader(torch.ones(100, 1)), ckpt_path=checkpoint)
    return model.steps


first = trained(2, 3)
second = trained(4, 6, "last.ckpt")
print(version("lightning"))
print("microbatches of each step", first, second)
assert (first, second) == ([2, 2, 2], [2, 4, 4])
PYTHON

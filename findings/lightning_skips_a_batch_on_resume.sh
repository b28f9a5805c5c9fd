#!/usr/bin/env bash
# Lightning 2.6.6: a resume in an epoch skips one batch of a StatefulDataLoader over an iterable dataset without length.
#
# Lightning saves the state of a loader that has `state_dict`, torchdata's StatefulDataLoader among them. Where the
# loader has no length, it takes one batch more than it trains on, to know whether the epoch is over, and the checkpoint
# has the state behind that one: the batch is never trained on. With a length nothing is taken ahead, and the resume is
# exact; a wrong, large `__len__` of the dataset does. Nothing warns.
#
# Seen with lightning 2.6.6, torchdata 0.11.0, torch 2.13.0 (CPU), Python 3.11, four steps, then four more:
#   without length [0, 1, 2, 3] [5, 6, 7, 8], with length [0, 1, 2, 3] [4, 5, 6, 7]
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
"$folder/env/bin/pip" install --quiet "lightning==2.6.6" "torchdata==0.11.0" "numpy<3"
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import logging
from importlib.metadata import version

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Numbers(IterableDataset):
    """The numbers below 100, from where its state says."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 100:
            self.next += 1
            yield torch.tensor([float(self.next - 1)])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class NumbersWithLength(Numbers):
    def __len__(self):
        return 100


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(int(batch))
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(dataset, max_steps, checkpoint=None):
    model = Model()
    saves = ModelCheckpoint(".", filename="last", every_n_train_steps=4, enable_version_counter=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=max_steps, callbacks=[saves], **quiet)
    trainer.fit(model, StatefulDataLoader(dataset(), batch_size=1), ckpt_path=checkpoint)
    return model.seen


found = [[trained(kind, 4), trained(kind, 8, "last.ckpt")] for kind in (Numbers, NumbersWithLength)]
print(version("lightning"), version("torchdata"))
print("without length", *found[0], "with length", *found[1])
assert found == [[[0, 1, 2, 3], [5, 6, 7, 8]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
PYTHON

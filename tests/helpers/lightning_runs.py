"""A model that notes the keys that it is given, and Lightning's trainer over our data."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from energon_bridge import EnergonMultiModalDataModule


class Model(LightningModule):
    """Notes the keys that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[str] = []
        self.validated: list[list[str]] = []
        self.validated_sets: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append(",".join(batch.__key__))
        loss: torch.Tensor = self.layer(batch.image.mean().reshape(1, 1)).sum()
        return loss

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        real = (key for key, valid in zip(batch.__key__, batch.__valid__, strict=True) if valid)
        self.validated[-1].append(",".join(real))
        self.validated_sets.append(dataloader_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(data: Any, folder: Path, ckpt_path: Path | None = None, ranks: int = 1, **settings: Any) -> Model:
    """Train with the defaults of Lightning wherever they do not cost time; save the last step to `last.ckpt`."""
    torch.manual_seed(0)
    model = settings.pop("model", Model)()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="last", every_n_train_steps=1, enable_version_counter=False)],
        default_root_dir=folder,
        **({"max_epochs": -1, "strategy": "ddp" if ranks > 1 else "auto"} | settings),
    )
    if isinstance(data, EnergonMultiModalDataModule):
        safe = {"weights_only": True} if ckpt_path and "weights_only" in signature(trainer.fit).parameters else {}
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, **safe)
    else:
        trainer.fit(model, data, ckpt_path=ckpt_path)
    data.close()
    return model

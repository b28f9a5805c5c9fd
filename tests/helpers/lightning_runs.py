"""A model that notes the keys that it is given, and Lightning's trainer over our data."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from energon_bridge import EnergonMultiModalDataModule


class Plain(LightningModule):
    """What all models of tests have: one layer, and nothing that is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def quiet_trainer(folder: Path, **settings: Any) -> Trainer:
    """Return a trainer without bars, logs, checkpoints and validation, but for what is asked for."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "limit_val_batches": 0, "max_epochs": -1}
    return Trainer(accelerator="cpu", default_root_dir=folder, **(quiet | settings))


class Model(Plain):
    """Notes the keys that it is given."""

    def __init__(self) -> None:
        super().__init__()
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


def fit(data: Any, folder: Path, ckpt_path: Path | None = None, ranks: int = 1, **settings: Any) -> Model:
    """Train with the defaults of Lightning wherever they do not cost time; save the last step to `last.ckpt`."""
    torch.manual_seed(0)
    model = settings.pop("model", Model)()
    last = ModelCheckpoint(folder, filename="last", every_n_train_steps=1, enable_version_counter=False)
    defaults = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "callbacks": [last]}
    defaults |= {"enable_checkpointing": True, "limit_val_batches": None}
    trainer = quiet_trainer(folder, **(defaults | settings))
    if isinstance(data, EnergonMultiModalDataModule):
        safe = {"weights_only": True} if ckpt_path and "weights_only" in signature(trainer.fit).parameters else {}
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, **safe)
    else:
        trainer.fit(model, data, ckpt_path=ckpt_path)
    data.close()
    return model

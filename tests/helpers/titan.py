"""Stands in for torchtitan of August 2026 (b5bcd76): the base class of its loaders, and how its trainer uses one.

Only where torchtitan itself is not installed; `tests/trainers/titan_pretrain.py` runs its real trainer.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

MODULES = ("torchtitan", "torchtitan.components", "torchtitan.components.data", "torchtitan.components.data.loader")
IGNORED = -100


class BaseDataLoader(Stateful, ABC):
    """The base class of loaders; the configuration inside a class builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **facts: Any) -> Any:
            assert self._owner is not None
            return self._owner(config=replace(self), **facts)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.__dict__["Config"].__dict__, "it must be a dataclass with slots"
            cls.Config._owner = cls

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]: ...

    def close(self) -> None:
        pass


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Make `torchtitan.components.data.loader` importable, with its base class, as long as the patch lasts."""
    if find_spec("torchtitan") is None:
        for name in MODULES:
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[MODULES[-1]].BaseDataLoader = BaseDataLoader  # type: ignore[attr-defined]


class Trainer:
    """torchtitan's trainer as far as data goes.

    Args:
        config: The configuration of the loader.
        ranks: Data-parallel ranks.
        step_tokens: `num_tokens_per_train_step`.
    """

    def __init__(
        self, config: Any, *, rank: int, ranks: int, context: int, tokens: int, step_tokens: int, tokenizer: Any
    ) -> None:
        self.dataloader = config.build(
            dp_world_size=ranks,
            dp_rank=rank,
            tokenizer=tokenizer,
            max_context_length=context,
            num_tokens_per_batch=tokens,
        )
        assert step_tokens % (tokens * ranks) == 0
        self.tokens, self.accumulate = tokens, step_tokens // (tokens * ranks)

    def train(self, steps: int) -> list[list[tuple[dict[str, Any], Any]]]:
        """Return the microbatches of each step, checked as the trainer's models would."""
        batches = iter(self.dataloader)
        taken = [[next(batches) for _ in range(self.accumulate)] for _ in range(steps)]
        for inputs, labels in (microbatch for step in taken for microbatch in step):
            assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (self.tokens,)
            assert inputs["positions"][0] == 0
        return taken

    def save(self, folder: Any) -> None:
        dcp.save({"dataloader": self.dataloader}, checkpoint_id=str(folder))

    def load(self, folder: Any) -> None:
        dcp.load({"dataloader": self.dataloader}, checkpoint_id=str(folder))

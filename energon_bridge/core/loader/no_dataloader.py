"""Refuses torch's DataLoader around our datasets and loaders, with an error that says what to do instead."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NoReturn, Self

from energon_bridge.core.errors import WrongUseError

DATASET_IS_NO_LOADER = (
    "a dataset of energon_bridge describes what to load and gives no samples by itself. Make a loader of it and "
    "iterate that: `for batch in get_loader(dataset)`. It takes the place of torch.utils.data.DataLoader and starts "
    "the workers itself. For the Trainer of transformers use energon_bridge.trainers.huggingface.EnergonTrainer, "
    "for Lightning EnergonMultiModalDataModule"
)


class NotForDataLoader:
    """What `torch.utils.data.DataLoader` is refused, with what to do instead, when it is made around it.

    All that a DataLoader asks of a dataset when it is made is its class, by `isinstance`.
    """

    _refusal: ClassVar[str] = DATASET_IS_NO_LOADER

    @property  # type: ignore[misc]
    def __class__(self) -> type[Self]:
        frame = sys._getframe(1)
        for _ in range(3):  # `isinstance` may be that of a metaclass in Python
            code = frame.f_code
            if code.co_qualname == "DataLoader.__init__" and frame.f_locals.get("dataset") is self:
                raise WrongUseError(self._refusal)
            frame = frame.f_back or frame
        return type(self)

    def __getitem__(self, index: Any) -> NoReturn:
        raise WrongUseError(self._refusal)

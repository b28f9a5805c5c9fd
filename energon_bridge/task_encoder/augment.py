"""An encoder around another encoder: every hook is the inner one's unless it is overridden."""

from __future__ import annotations

from types import GenericAlias
from typing import Any, ClassVar

from energon_bridge.task_encoder.base import TaskEncoder


class _Inner:
    """An attribute of the encoder inside. A hook that it did not override keeps its mark, and costs nothing here."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, encoder: Any, owner: type | None = None) -> Any:
        return self if encoder is None else getattr(encoder.task_encoder, self._name)


class AugmentTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Wraps a task encoder; override the hooks that should do more, and call `super()` for what it does.

    Args:
        task_encoder: The encoder inside.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def __init__(self, task_encoder: Any) -> None:
        self.task_encoder = task_encoder

    cookers: Any = _Inner()
    decoder: Any = _Inner()
    pixel_settings: Any = _Inner()
    __default_failure_tolerance__: Any = _Inner()
    cook_crude_sample: Any = _Inner()
    encode_sample: Any = _Inner()
    preencode_sample: Any = _Inner()
    postencode_sample: Any = _Inner()
    select_samples_to_pack: Any = _Inner()
    pack_selected_samples: Any = _Inner()
    batch_group_criterion: Any = _Inner()
    batch: Any = _Inner()
    encode_batch: Any = _Inner()

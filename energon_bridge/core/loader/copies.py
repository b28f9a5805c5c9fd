"""Copies batches to pinned memory and to the device of the model, while the trainer has the batch before."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from energon_bridge.core.samples.sample import over_tensors, pin_value


class Copied(NamedTuple):
    """A batch on its way to the device.

    Attributes:
        batch: The copy.
        tensors: Its tensors on a CUDA device.
        event: Recorded after the last of them; None: it is there.
    """

    batch: Any
    tensors: list[Tensor]
    event: torch.cuda.Event | None


class Copies:
    """Copies batches to pinned memory, and from there to a device, by a thread and a CUDA stream of its own.

    What runs on the device meanwhile, such as a training step, does not wait for them.

    Args:
        pin: Whether to copy to pinned memory.
        device: Device to copy to; None: pinned memory is all.
    """

    def __init__(self, pin: bool, device: Any = None) -> None:
        self._pin = pin
        self._device = None if device is None else torch.device(device)
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(self, batch: Any) -> Future[Copied]:
        """Begin to copy a batch."""
        if self._thread is None:
            # Pinned memory belongs to a device's context, and every thread begins with device 0.
            current = torch.cuda.current_device() if torch.cuda.is_available() else None
            setting = {} if current is None else {"initializer": torch.cuda.set_device, "initargs": (current,)}
            self._thread = ThreadPoolExecutor(1, "energon-copies", **cast(Any, setting))
        return self._thread.submit(self._copied, batch)

    def end(self, copy: Future[Copied]) -> Any:
        """Return a copied batch; the current stream of this thread waits for it, this thread only for pinning."""
        batch, tensors, event = copy.result()
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """End the thread; the next batch starts another."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.shutdown()

    def _copied(self, batch: Any) -> Copied:
        batch = pin_value(batch) if self._pin else batch
        tensors: list[Tensor] = []

        def moved(tensor: Tensor) -> Tensor:
            tensors.append(tensor.to(self._device, non_blocking=True))
            return tensors[-1]

        if self._device is None:
            return Copied(batch, [], None)
        if self._device.type != "cuda":
            return Copied(over_tensors(batch, moved, "data_ptr"), [], None)
        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            return Copied(over_tensors(batch, moved, "data_ptr"), tensors, self._stream.record_event())

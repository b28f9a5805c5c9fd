"""The datasets that megatron-energon 7.4.1 prepared, and the samples that it reads from them (expected.json)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from paths import FIXTURES

from energon_bridge import DefaultTaskEncoder, TextSample, WorkerConfig, get_loader, get_val_dataset, register_joiner
from energon_bridge.core.encoder import SampleDecoder
from energon_bridge.core.samples import META_FIELDS, CrudeSample

EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FIXTURES / "expected.json").read_text())


class Encoder(DefaultTaskEncoder):
    decoder = SampleDecoder(image_decode="torchrgb8")


def plain(value: Any) -> Any:
    """Return a value as expected.json has it: tensors by type, shape and hash of the bytes."""
    if isinstance(value, torch.Tensor):
        digest = hashlib.sha1(value.contiguous().numpy().tobytes()).hexdigest()
        return {"tensor": [str(value.dtype), list(value.shape), digest]}
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def rendered(sample: Any) -> dict[str, Any]:
    """Return a sample as expected.json has it; a crude one is the JSON text of its parts."""
    meta = {name: sample[name] for name in ("__key__", "__subflavors__")}
    if isinstance(sample, CrudeSample):
        parts = {name: plain(value) for name, value in sample.items() if not name.startswith("__")}
        return meta | {"text": json.dumps(parts, sort_keys=True), "type": "TextSample"}
    fields = {name: plain(sample[name]) for name in sample.keys() if name not in META_FIELDS}  # noqa: SIM118
    return meta | fields | {"type": type(sample).__name__}


def validation(path: str | Path, split_part: str, num_workers: int, encoder: Any = None) -> list[dict[str, Any]]:
    dataset = get_val_dataset(
        path,
        split_part=split_part,
        batch_size=None,
        task_encoder=encoder or Encoder(),
        worker_config=WorkerConfig(num_workers=num_workers, rank=0, world_size=1),
    )
    loader = get_loader(dataset)
    samples = [rendered(sample) for sample in loader]
    loader.close()
    return samples


@register_joiner("joiners.join_caption_and_text")
def join_caption_and_text(image: Any, extra: Any) -> TextSample:
    """Join as the joiner did that expected.json was made with."""
    return TextSample.derive_from(image, text=f"{image.caption} + {extra.text}")

"""What the tests of mixes share: three small text datasets and ways of blending them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import TensorEncoder, config_of, text_dataset
from keyed import mix_document, write_mix

from energon_bridge import get_train_dataset
from energon_bridge.core.loader.dataset_spec import DatasetSpec

SIZES = {"a": [5, 7], "b": [30], "c": [3, 3, 3, 3]}


def mix_data(folder: Path) -> Path:
    """Write the datasets a, b and c, with equal train and val parts, and a mix for validation."""
    for name, counts in SIZES.items():
        text_dataset(folder / name, train=counts, val=counts)
    write_mix(folder / "val.yaml", val={"blend": [{"path": "./a", "weight": 3}, {"path": "./c", "weight": 1}]})
    return folder


def mixed(data: Path, source: Any, encoder: Any = None, **kwargs: Any) -> DatasetSpec:
    """Open a mix for training with small slices and buffers."""
    settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 4, "max_samples_per_sequence": 3}
    config = config_of(1, 0)
    source = source(data) if callable(source) else source
    return get_train_dataset(
        source, worker_config=config, task_encoder=encoder or TensorEncoder(), **(settings | kwargs)
    )


def metadataset(data: Path, **splits: Any) -> dict[str, Any]:
    """Return a metadataset as a dict, its paths made absolute."""
    text = json.dumps(mix_document(**splits))
    return json.loads(text.replace("./", f"{data}/"))  # type: ignore[no-any-return]

"""Small text datasets whose keys a test chooses, and mixes that join them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from energon_bridge import TextSample, register_joiner
from energon_bridge.core.prepare import parse_patterns, parse_ratio, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

TEXT = render_dataset_yaml("TextSample", {"text": "txt"})
CRUDE = b"__module__: megatron.energon\n__class__: CrudeWebdataset\n"
ALL_TRAIN = parse_ratio("1,0,0")

Shards = Sequence[Sequence[str]]


def keyed_dataset(
    folder: Path,
    *,
    key_index: bool = True,
    exclude: Sequence[str] = (),
    dataset_yaml: bytes = TEXT,
    parts: Mapping[str, Shards] | None = None,
    **splits: Shards,
) -> Path:
    """Write a prepared dataset with these keys in each shard of each split part; the text is `<folder's name> <key>`.

    Shards are `<part>/<number>.tar`; `exclude` is that of split.yaml.
    """
    for part, shards in {**splits, **(parts or {})}.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number, keys in enumerate(shards):
            samples = {key: {"txt": f"{folder.name} {key}".encode()} for key in keys}
            write_shard(folder / part / f"{number}.tar", samples)
    names = [*splits, *(parts or {})]
    prepare_dataset(
        folder,
        split=parse_patterns([f"{part}:{part}/.*" for part in names]),
        dataset_yaml=dataset_yaml,
        key_index=key_index,
    )
    if exclude:
        path = folder / ".nv-meta" / "split.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"exclude": list(exclude)}))
    return folder


KEYS = [f"k{number:02d}" for number in range(20)]


def shards(keys: Sequence[str], *counts: int) -> list[list[str]]:
    """Cut keys into shards of these sizes."""
    rest = iter(keys)
    return [list(islice(rest, count)) for count in counts]


def shuffled(keys: Sequence[str], seed: int = 1) -> list[str]:
    return random.Random(seed).sample(keys, len(keys))


@register_joiner
def both(first: Any, second: Any) -> TextSample:
    """Join two texts with a plus."""
    other = "none" if second is None else second["txt"] if isinstance(second, dict) else second.text
    return TextSample(__key__=first.__key__, text=f"{first.text} + {other}")


BOTH = {"__module__": __name__, "__function__": "both"}


def mix_document(**splits: Any) -> dict[str, Any]:
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}


def write_mix(path: Path, **splits: Any) -> Path:
    path.write_text(yaml.safe_dump(mix_document(**splits)))
    return path


def join(first: Any = None, second: Any = None, *, named: bool = False, joiner: Any = None, **more: Any) -> Any:
    """Describe a join of `a` and `b`; arguments add to what the two references say."""
    entries = [{"path": "./a", **(first or {})}, {"path": "./b", **(second or {})}]
    joined: Any = dict(zip(("first", "second"), entries, strict=True)) if named else entries
    return {"join": joined, "joiner": joiner or BOTH, **more}

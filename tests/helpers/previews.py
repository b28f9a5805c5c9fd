"""What the tests of `energon preview` share: data of all kinds, hostile data, and a task encoder to be named."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from keyed import write_mix
from multimodal import PixelProcessor, WordTokenizer
from PIL import Image

from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.models.conversations.layout import ImageToken, MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'
"""A text that must stay one."""
KEYS = (
    "</script><script>window.hacked = 1</script>",
    "..%2f..%2fetc%2fpasswd",
    "'; window.hacked = 1; '",
    "\u2028\u2029 ${window.hacked = 1}",
    "__proto__",
)


CRUDE = b"__module__: megatron.energon\n__class__: CrudeWebdataset\n"
"""The `dataset.yaml` of a dataset without sample types."""


class Tokenizer(WordTokenizer):
    """One that knows which of its tokens are special."""

    all_special_ids = (0, 1, 2, 3)


def encoder() -> MultiModalTaskEncoder:
    """Return a task encoder of images and texts, whose rows hold up to 40 tokens."""
    config = MultiModalSampleConfig(image_token=ImageToken(token_id=3))
    return MultiModalTaskEncoder(Tokenizer(), PixelProcessor(), config, 40, image_tokens_per_image=4)


def bomb(side: int = 60_000) -> bytes:
    """Return a PNG of a few bytes that says it is very large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def png(side: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (200, 40, 40)).save(buffer, "png")
    return buffer.getvalue()


def hostile_dataset(folder: Path) -> Path:
    """Write a dataset of captions: a good sample, hostile captions, a bomb, and a picture that is none."""
    folder.mkdir(parents=True)
    captions = {
        "0good": (png(), b"a good one"),
        "1text": (png(), HOSTILE.encode()),
        "2terminal": (png(), b"\x1b[31mred \x1b]0;title\x07 \xe2\x80\xae back \xc2\x9b31m"),
        "3bomb": (bomb(), b"a bomb"),
        "4none": (b"no picture at all", b"none"),
    }
    write_shard(folder / "0.tar", {key: {"png": image, "txt": text} for key, (image, text) in captions.items()})
    yaml = render_dataset_yaml("CaptioningSample", {"image": "png", "caption": "txt"})
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
    return folder


def hostile_jsonl(path: Path) -> Path:
    """Write conversations with hostile texts, roles and names of fields."""
    documents: list[Any] = [
        {"messages": [{"role": HOSTILE, "content": key}, {"role": "assistant", "content": HOSTILE}], key: HOSTILE}
        for key in KEYS
    ]
    documents.append({"deep": json.loads("[" * 200 + "]" * 200), "long": "x" * 100_000})
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def chats(path: Path, count: int = 4) -> Path:
    """Write conversations of two to four turns."""
    lines = [
        {
            "messages": [
                {"from": ("human", "gpt")[turn % 2], "value": f"turn {turn} of {n}"} for turn in range(2 + n % 3)
            ]
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mix_of(path: Path, **weights: Path) -> Path:
    """Write a mix of datasets, each with a weight of its own."""
    entries = [{"path": str(dataset), "weight": 1 + number} for number, dataset in enumerate(weights.values())]
    return write_mix(path, train={"blend": entries})

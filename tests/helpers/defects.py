"""A corpus of defective samples: each way in which one sample of a dataset can be bad, and what must be said of it.

The dataset has question-answering samples in two shards; one sample, in the middle of the second, is defective. A twin
without the defect stands for what should be delivered: it claims the same identity, so its order is the same.
"""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from energon_bridge import DefaultTaskEncoder, SkipSample
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

SHARDS, PER_SHARD = 2, 8
BAD, KEY, SHARD = 11, "s11", "train/1.tar"
PARTS = ("jpg", "txt", "json", "npy")
MAX_TEXT, MAX_ANSWERS = 100, 3

Parts = dict[str, bytes]


def good_parts(number: int) -> Parts:
    """Return the parts of a sample that nothing is wrong with."""
    image, weights = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (12, 12), (number, 100, 200)).save(image, "jpeg")
    np.save(weights, np.full(2, number, dtype=np.float32))
    answers = json.dumps({"answers": [f"answer {number}", "none"]}).encode()
    return {"jpg": image.getvalue(), "txt": b"question %d" % number, "json": answers, "npy": weights.getvalue()}


def write_dataset(folder: Path, bad: Parts | None = None) -> Path:
    """Write the dataset; `bad` are the parts of the defective sample."""
    (folder / "train").mkdir(parents=True)
    for shard in range(SHARDS):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        samples = {f"s{n:02d}": bad if bad is not None and n == BAD else good_parts(n) for n in numbers}
        write_shard(folder / "train" / f"{shard}.tar", samples)
    fields = {"image": "jpg", "context": "txt", "answers": "json[answers]", "answer_weights": "npy"}
    prepare_dataset(
        folder,
        split=parse_patterns(["train:train/.*"]),
        dataset_yaml=render_dataset_yaml("VQASample", fields),
        key_index=False,
    )
    return folder


class Careful(DefaultTaskEncoder):
    """Refuses samples that it cannot train on."""

    def encode_sample(self, sample: Any) -> Any:
        if not sample.context.strip("\0 \n"):
            raise ValueError("the question is empty")
        if len(sample.context) > MAX_TEXT:
            raise ValueError(f"the question has {len(sample.context)} characters, at most {MAX_TEXT} are allowed")
        if not 0 < len(sample.answers) <= MAX_ANSWERS:
            raise ValueError(f"{len(sample.answers)} answers, 1 to {MAX_ANSWERS} are allowed")
        if min(sample.image.shape[1:]) < 4:
            raise ValueError(f"the image is only {tuple(sample.image.shape[1:])}")
        if not np.isfinite(sample.answer_weights).all():
            raise ValueError("a weight is not finite")
        if len(sample.answer_weights) != 2:
            raise IndexError("the weights are not those of the answers")
        return dataclasses.replace(sample, answer_weights=sample.answer_weights.astype("float32", casting="safe"))


class Skipping(Careful):
    """Leaves samples out on purpose."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.keys = keys

    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ in self.keys:
            raise SkipSample
        return super().encode_sample(sample)


# Defects of a part ---------------------------------------------------------------------------------------------------


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG of a size that its data need not have."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "jpeg")
    return buffer.getvalue()


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values), allow_pickle=True)
    return buffer.getvalue()


def npy_header(shape: tuple[int, ...]) -> bytes:
    """Return the header of an array of float64, with nothing behind it."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


GOOD = good_parts(BAD)

CONTENT: dict[str, tuple[str, bytes | None, str, str]] = {
    # name: (part, its content or None to leave it out, hook, what the message says)
    "JPEG cut off": ("jpg", GOOD["jpg"][: len(GOOD["jpg"]) // 2], "decode", "part 'jpg'"),
    "JPEG of zero bytes": ("jpg", b"", "decode", r"part 'jpg' \(0 bytes\)"),
    "JPEG of zeros": ("jpg", bytes(600), "decode", "part 'jpg'"),
    "JPEG header only": ("jpg", GOOD["jpg"][:20], "decode", "part 'jpg'"),
    "web page for an image": ("jpg", b"<html>404 Not Found</html>", "decode", "part 'jpg'"),
    "video for an image": ("jpg", b"\0\0\0\x20ftypisom" + bytes(64), "decode", "part 'jpg'"),
    "PNG without pixels": ("jpg", png(12, 12), "decode", "part 'jpg'"),
    "PNG with damaged pixels": ("jpg", png(12, 12, b"\x78\x9c\xff\xff\xff"), "decode", "part 'jpg'"),
    "image of a billion pixels": ("jpg", png(60_000, 60_000), "decode", "part 'jpg'"),
    "image of 13,000 x 13,000": ("jpg", png(13_000, 13_000), "decode", "169000000 pixels"),
    "image missing": ("jpg", None, "field_map", "field `image`.*txt, json, npy"),
    "UTF-8 with a wrong byte": ("txt", b"caf\xe9 au lait", "decode", "part 'txt'.*UnicodeDecodeError"),
    "UTF-16": ("txt", "question".encode("utf-16"), "decode", "part 'txt'.*UnicodeDecodeError"),
    "UTF-8 cut off": ("txt", "caf\xe9".encode()[:-1], "decode", "part 'txt'.*unexpected end of data"),
    "UTF-8 of a surrogate": ("txt", b"\xed\xa0\x80", "decode", "part 'txt'.*UnicodeDecodeError"),
    "text missing": ("txt", None, "field_map", "field `context`.*jpg, json, npy"),
    "text of zero bytes": ("txt", b"", "encode_sample", "the question is empty"),
    "text of zeros": ("txt", bytes(5), "encode_sample", "the question is empty"),
    "over-long text": ("txt", b"why? " * 1000, "encode_sample", "5000 characters, at most 100"),
    "JSON cut off": ("json", b'{"answers": ["yes"', "decode", "part 'json'"),
    "JSON of zero bytes": ("json", b"", "decode", r"part 'json' \(0 bytes\)"),
    "JSON with single quotes": ("json", b"{'answers': []}", "decode", "part 'json'"),
    "JSON too deep": ("json", b"[" * 100_000, "decode", "part 'json'.*RecursionError"),
    "JSON without the key": ("json", b'{"answer": []}', "field_map", "field `answers`"),
    "JSON of another shape": ("json", b"[1, 2]", "field_map", "field `answers`"),
    "JSON missing": ("json", None, "field_map", "field `answers`"),
    "too many answers": ("json", json.dumps({"answers": ["yes"] * 9}).encode(), "encode_sample", "9 answers, 1 to 3"),
    "no answers": ("json", b'{"answers": []}', "encode_sample", "0 answers"),
    "answers of a wrong type": ("json", b'{"answers": 7}', "encode_sample", "has no len"),
    "image too small": ("jpg", jpeg(1, 1), "encode_sample", r"only \(1, 1\)"),
    "array of a trillion values": ("npy", npy_header((10**12,)) + bytes(64), "decode", "claims an array of"),
    "array of 2^70 values": ("npy", npy_header((2**35, 2**35)) + bytes(64), "decode", "part 'npy'"),
    "array cut off": ("npy", GOOD["npy"][:-3], "decode", "part 'npy'"),
    "array of zero bytes": ("npy", b"", "decode", "part 'npy'"),
    "array with a wrong header": ("npy", b"NUMPY" + GOOD["npy"][5:], "decode", "part 'npy'"),
    "array of pickled objects": ("npy", npy(np.array([{}, {}], dtype=object)), "decode", "part 'npy'.*allow_pickle"),
    "array that is not finite": ("npy", npy([1.0, np.nan]), "encode_sample", "not finite"),
    "array too long": ("npy", npy([1.0, 2.0, 3.0]), "encode_sample", "IndexError: the weights are not those"),
    "array of a wrong type": ("npy", npy([1 + 2j, 3j]), "encode_sample", "Cannot cast"),
}


def content_of(name: str) -> Parts:
    """Return the parts of a sample with a defect."""
    part, content, _, _ = CONTENT[name]
    return {
        n: c
        for n, c in (good_parts(BAD) | ({} if content is None else {part: content})).items()
        if n != part or content is not None
    }


# Defects of the tar below its index ----------------------------------------------------------------------------------


def member(data: bytes, name: str) -> int:
    """Return where the header of a member begins."""
    return data.index(name.encode())


def overwritten(offset: int, content: bytes, name: str = f"{KEY}.jpg") -> Callable[[bytes], bytes]:
    """Write over some bytes of the header of a member."""

    def damage(data: bytes) -> bytes:
        start = member(data, name) + offset
        return data[:start] + content + data[start + len(content) :]

    return damage


def whole_sample_zeroed(data: bytes) -> bytes:
    start, end = member(data, f"{KEY}.jpg"), member(data, f"s{BAD + 1}.jpg")
    return data[:start] + bytes(end - start) + data[end:]


TAR: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "header overwritten": (overwritten(0, b"\xaa" * 512), "read", "no tar header at byte 0"),
    "header zeroed": (overwritten(0, bytes(512)), "read", "CorruptShardError"),
    "sample zeroed": (whole_sample_zeroed, "read", "CorruptShardError"),
    "size that is no number": (overwritten(124, b"zzzzzzzzzzz"), "read", "CorruptShardError"),
    "size beyond the sample": (overwritten(124, b"00000077777"), "read", "CorruptShardError"),
    "second header overwritten": (overwritten(0, b"\xaa" * 512, f"{KEY}.txt"), "read", "no tar header"),
    "member of another sample": (overwritten(0, b"x99", f"{KEY}.txt"), "read", "the index does not fit the tar"),
    "part under another name": (overwritten(4, b"tzt", f"{KEY}.txt"), "field_map", "field `context`"),
}


def damage_shard(folder: Path, name: str) -> None:
    """Damage the shard of the defective sample, and leave everything else about the dataset as it was prepared."""
    shard = folder / SHARD
    shard.write_bytes(TAR[name][0](shard.read_bytes()))

"""Parts that are arrays, tensors or records of other libraries: npy, npz, pth, safetensors, tenbin, msgpack, CBOR.

The decoder of samples (`core/encoder/decoder.py`, which lists them) asks for `codec_of` by the registry.
"""

from __future__ import annotations

import io
import json
import logging
import math
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from energon_bridge.core.encoder.decoder import too_large

logger = logging.getLogger(__name__)

_ARCHIVES = ("npz", "pth")
"""Extensions of ZIP archives: a few bytes of these can unpack to any size, so `_bounded` looks first."""


def codec_of(extension: str, most: int | None) -> Callable[[bytes], Any]:
    """Return what decodes parts with an extension; one that unpacks to more than `most` bytes raises ValueError."""
    codec = _CODECS[extension]
    return partial(_bounded, codec=codec, most=most) if most is not None and extension in _ARCHIVES else codec


def _bounded(data: bytes, codec: Callable[[bytes], Any], most: int) -> Any:
    """Decode a part that may be a ZIP archive, if its content is small enough."""
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > most:
                raise ValueError(too_large(most))
    return codec(data)


def _npy(data: bytes) -> np.ndarray:
    return _array(io.BytesIO(data), len(data))


def _npz(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        arrays: dict[str, Any] = {}
        for entry in archive.infolist():
            with archive.open(entry) as file:
                is_array = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
                file.seek(0)
                arrays[entry.filename.removesuffix(".npy")] = _array(file, entry.file_size) if is_array else file.read()
    return arrays


def _array(file: Any, size: int) -> np.ndarray:
    """Read an array from a file of `size` bytes."""
    try:
        return np.lib.format.read_array(file, allow_pickle=False)
    except MemoryError as error:
        # numpy allocates the memory before it checks that the values are there.
        file.seek(0)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"its header claims an array of {shape} {dtype}, in {size} bytes") from error
        raise


def read_pth(data: bytes) -> Any:
    """Return what `torch.save` has written, on the CPU, without running code in it."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _safetensors(data: bytes) -> dict[str, torch.Tensor]:
    """Read the tensors of a file: the length of a header, the header in JSON, and the values."""
    buffer = bytearray(data)  # so that the tensors can be written to
    (length,) = struct.unpack_from("<Q", buffer)
    begin = 8 + length
    if begin > len(buffer):
        raise ValueError(f"its header has {length} bytes, in {len(buffer)} bytes")
    tensors = {}
    for name, entry in json.loads(buffer[8:begin]).items():
        if name == "__metadata__":
            continue
        dtype, shape, (first, end) = getattr(torch, _TYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        if not 0 <= first <= end <= len(buffer) - begin or math.prod(shape) * dtype.itemsize != end - first:
            raise ValueError(f"tensor {name!r} of {shape} {dtype} does not fit bytes {first} to {end}")
        values = (
            torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=begin + first) if end > first else None
        )
        tensors[name] = torch.empty(shape, dtype=dtype) if values is None else values.reshape(shape)
    return tensors


_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"}
_TYPES |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F8_E4M3": "float8_e4m3fn"}
_TYPES |= {"F8_E5M2": "float8_e5m2", "U16": "uint16", "U32": "uint32", "U64": "uint64"}
"""Types of torch by their names in safetensors."""


def _tenbin(data: bytes) -> list[np.ndarray]:
    # webdataset's own splitting trusts the lengths, and never ends on a negative one
    from webdataset import tenbin

    chunks: list[bytearray] = []
    offset = 0
    while offset < len(data):
        magic, length = struct.unpack_from("@8sq", data, offset)
        offset += 16
        if magic != tenbin.magic_bytes or not 0 <= length <= len(data) - offset:
            raise ValueError(f"no tenbin chunk at byte {offset - 16}")
        chunks.append(bytearray(data[offset : offset + length]))  # a bytearray, so that the arrays can be written to
        offset += tenbin.roundup(length)
    return tenbin.decode_list(chunks)


def _by_library(data: bytes, reader: str, packages: Sequence[str]) -> Any:
    library = _first_installed(*packages)
    return getattr(library, reader)(data) if library else data


@cache
def _first_installed(*packages: str) -> ModuleType | None:
    for package in packages:
        try:
            return import_module(package)
        except ImportError:
            continue
    logger.warning("%s is not installed, so parts that need it stay bytes. Install it with pip.", " or ".join(packages))
    return None


_CODECS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("ten", "tb"), _tenbin),
    **dict.fromkeys(("mp", "msg"), partial(_by_library, reader="unpackb", packages=("msgpack",))),
    "cbor": partial(_by_library, reader="loads", packages=("cbor2", "cbor")),
    "npy": _npy,
    "npz": _npz,
    "pth": read_pth,
    "safetensors": _safetensors,
}
"""By extension; `core/encoder/decoder.py` has their names."""

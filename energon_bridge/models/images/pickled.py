"""Parts that are pickles, read without running what they name: lists of files, and plain values.

A pickle names functions to call. Here nothing is called but what rebuilds containers, numpy arrays and torch tensors;
any other name is a DecodeError that says it.

`ChatMLDecoder` decodes the datasets of Megatron-Bridge's tutorials and recipes as their own class does: images are
float tensors of shape (3, height, width), `jpgs` is a pickled list of images, `mp4s` and `videos` are pickled lists of
videos, each a list of images. Parts with video or sound stay bytes.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from energon_bridge.core.errors import DecodeError
from energon_bridge.core.format.media import AV_EXTENSIONS
from energon_bridge.models.images.arrays import read_pth
from energon_bridge.models.images.images import decode_image, image_form


def _numpy_functions() -> dict[tuple[str, str], Any]:
    scalar = np.int64(0).__reduce__()[0]
    rebuild = np.zeros(1).__reduce__()[0]
    functions: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        functions |= {(module, "_reconstruct"): rebuild, (module, "scalar"): scalar}
    buffer = np.zeros(1).__reduce_ex__(5)[0]
    functions |= {(module, "_frombuffer"): buffer for module in ("numpy.core.numeric", "numpy._core.numeric")}
    return functions


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode(encoding)  # bytes, as the old protocols have them


_LONG_PUT = re.compile(rb"r(?=(.{4}))", re.DOTALL)
"""What may be the instruction that numbers an object; four bytes follow."""
_TENSOR: Any = torch.zeros(0).__reduce_ex__(2)[0]
_PLAIN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): _encoded,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    (_TENSOR.__module__, _TENSOR.__name__): _TENSOR,
    ("torch.storage", "_load_from_bytes"): read_pth,
    ("megatron.core.safe_globals", "safe_load_from_bytes"): read_pth,  # as a process with megatron-core pickles
    **_numpy_functions(),
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        module = "builtins" if module == "__builtin__" else module  # as Python 2 wrote it
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it contains {module}.{name}, which is not run: only containers, numbers, strings, bytes, numpy "
                "arrays and torch tensors are read from pickles"
            ) from None


def _load(data: bytes, allowed: Mapping[tuple[str, str], Any]) -> Any:
    """Return the content of a pickle, allocating no more memory than that needs.

    Raises:
        pickle.UnpicklingError: It contains something that is not allowed, or claims more than it has.
    """
    # The unpickler makes its table of objects as long as the largest number in it, which a few bytes can say.
    if any(int.from_bytes(match[1], "little") > len(data) for match in _LONG_PUT.finditer(data)):
        numbers = [int(arg) for code, arg, _ in pickletools.genops(data) if code.name == "LONG_BINPUT" and arg]
        most = max(numbers, default=0)
        if most > len(data):
            raise pickle.UnpicklingError(f"it has an object number {most} in {len(data)} bytes")
    try:
        return _Reader(data, allowed).load()
    except MemoryError as error:
        raise pickle.UnpicklingError("it claims a size for which there is not enough memory") from error


def plain_pickle(data: bytes) -> Any:
    """Return the containers, numbers, strings, bytes, arrays and tensors of a pickle.

    Raises:
        pickle.UnpicklingError: It names anything else, or claims more than it has.
    """
    return _load(data, _PLAIN)


def _listed(data: bytes, depth: int) -> list[Any]:
    """Return a pickled list of bytes, or of lists of them."""
    loaded = _load(data, {})
    level = [loaded]
    for _ in range(depth):
        for one in level:
            if not isinstance(one, (list, tuple)):
                raise ValueError(f"expected {depth} nested lists of the bytes of images, found {type(one).__name__}")
        level = [entry for one in level for entry in one]
    for one in level:
        if not isinstance(one, bytes):
            raise ValueError(f"expected the bytes of an image, found {type(one).__name__}")
    return list(loaded)


class ChatMLDecoder:
    """Decodes the parts of Megatron-Bridge's ChatML datasets; `decode` is the decoder of all other parts."""

    def __init__(self, decode: Callable[[str, Any], Any]) -> None:
        self._form = image_form("torchrgb", None)
        self._decode = decode

    def keeps_unread(self, part_name: str) -> bool:
        """Return False: decoding reads everything first."""
        return False

    def decode(self, part_name: str, data: Any) -> Any:
        """Decode one part, given its bytes."""
        extension = part_name.rpartition(".")[2].lower()
        if extension not in ("jpgs", "mp4s", "videos"):
            return bytes(data) if extension in AV_EXTENSIONS else self._decode(part_name, data)
        image = partial(decode_image, form=self._form, part=part_name)
        raw = bytes(data)
        try:
            if extension == "jpgs":
                return [image(one) for one in _listed(raw, 1)]
            return [[image(one) for one in video] for video in _listed(raw, 2)]
        except DecodeError:
            raise
        except Exception as error:  # pickles raise whatever they like
            raise DecodeError(
                f"part {part_name!r} ({len(raw)} bytes) cannot be decoded as a pickled list of images: "
                f"{type(error).__name__}: {error}"
            ) from error

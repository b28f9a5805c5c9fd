"""Columns of integers and lists of strings as text, for states: small, quick to write, and safe to read.

A *column* is the integers' differences as little-endian integers of 1, 2, 4 or 8 bytes, zlib, base64, with the number
of bytes in front ("2,…"; before format version 4 short ones are base85, "2:…"). A *text* is the zlib'd, base85 JSON of
a list of strings.

Whoever reads one says how long it must be, and no more than that is unpacked: a damaged or hostile state costs no
memory. Everything that is wrong with one is a StateFormatError that names its field.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from energon_bridge.errors import StateFormatError
from energon_bridge.rng import IntArray

LONGEST_COLUMN = 1 << 25
"""Integers that a column may have: far more than the samples that wait in any run."""
_LONG_COLUMN = 4096
"""From so many integers on, time counts for more than the last bytes."""
_STRING_BYTES = 1 << 16
_DECODERS: dict[str, Callable[[str], bytes]] = {
    ",": lambda text: base64.b64decode(text, validate=True),
    ":": base64.b85decode,
}


def damaged(field: str, reason: str) -> StateFormatError:
    """Return the error for a field of a state."""
    return StateFormatError(
        f"the state is damaged: {field} {reason}. Use the state of another checkpoint, or a copy of this one"
    )


def encode_column(numbers: Iterable[int] | IntArray) -> str:
    """Return integers as one string."""
    array = numbers if isinstance(numbers, np.ndarray) else np.fromiter(numbers, dtype="<i8")
    steps = array.copy()
    steps[1:] -= array[:-1]
    most = max(-int(steps.min()), int(steps.max())) if steps.size else 0
    width = next((width for width in (1, 2, 4) if most < 1 << (8 * width - 1)), 8)
    packed = zlib.compress(steps.astype(f"<i{width}").tobytes(), 1 if steps.size >= _LONG_COLUMN else 9)
    return f"{width},{base64.b64encode(packed).decode()}"


def decode_column(text: object, size: int, field: str = "a column", *, at_most: bool = False) -> IntArray:
    """Return the integers of a column.

    Args:
        text: The column.
        size: How many integers it must have.
        field: Its name, for errors.
        at_most: Fewer integers will do.

    Raises:
        StateFormatError: It is no column, or not of this length.
    """
    if not isinstance(text, str) or text[:1] not in ("1", "2", "4", "8") or text[1:2] not in _DECODERS:
        raise damaged(field, f"should be a column of integers, found {_shown(text)}")
    if size > LONGEST_COLUMN:
        raise damaged(field, f"should have {size} integers, more than a state can hold ({LONGEST_COLUMN})")
    width = int(text[0])
    raw = _unpack(_DECODERS[text[1]], text[2:], width * size, field)
    if len(raw) % width or not (at_most or len(raw) == width * size):
        raise damaged(field, f"has {len(raw) / width:g} integers, expected {size}")
    return np.cumsum(np.frombuffer(raw, dtype=f"<i{width}"), dtype=np.int64)


@lru_cache(maxsize=64)  # names of leaves, which are the same in every state of a run
def encode_text(strings: tuple[str, ...]) -> str:
    """Return strings as one."""
    return base64.b85encode(zlib.compress(json.dumps(strings).encode(), 9)).decode()


def decode_text(text: object, size: int, field: str) -> list[str]:
    """Return the strings of a text, of which there must be `size`.

    Raises:
        StateFormatError: It is no text, or not of this length.
    """
    if not isinstance(text, str):
        raise damaged(field, f"should be a packed list of strings, found {_shown(text)}")
    raw = _unpack(base64.b85decode, text, _STRING_BYTES * (size + 1), field)
    try:
        strings = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damaged(field, f"is not a list of strings ({error})") from error
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise damaged(field, "is not a list of strings")
    if len(strings) != size:
        raise damaged(field, f"has {len(strings)} strings, expected {size}")
    return strings


def _unpack(decode: Callable[[str], bytes], text: str, most: int, field: str) -> bytes:
    """Unpack a text, if it is complete and unpacks to at most so many bytes."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(decode(text), most + 1)
    except (ValueError, zlib.error) as error:
        raise damaged(field, f"cannot be unpacked ({error})") from error
    if len(raw) > most:
        raise damaged(field, f"unpacks to more than the {most} bytes allowed")
    if not unpacker.eof or unpacker.unused_data:
        raise damaged(field, "is cut off, or has extra bytes at its end")
    return raw


def _shown(value: object) -> str:
    """Return a value for a message: short, whatever it is."""
    return f"{value[:40]!r}" if isinstance(value, str) else type(value).__name__

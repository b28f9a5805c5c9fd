"""Keyed randomness: hashes, draws and permutations that depend on their key alone.

Everything the order of a stream depends on is computed here with 64-bit integer arithmetic, so that it never
depends on a numpy, torch, Python or processor version; golden values are in the tests. There is no generator
object and nothing to save: the key *is* the state.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_ROUNDS = 3  # of two halves each

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
UIntArray = npt.NDArray[np.uint64]


def mix64(x: int) -> int:
    """Mix a 64-bit integer so that every input bit touches every output bit; a bijection."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * _M1) & MASK64
    x = ((x ^ (x >> 27)) * _M2) & MASK64
    return x ^ (x >> 31)


def key_of(*parts: int | str | bytes) -> int:
    """Hash any sequence of integers and names to a 64-bit key (BLAKE2b over a length-prefixed encoding)."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bytes):
            tag = b"b"
            raw = part
        elif isinstance(part, str):
            tag = b"s"
            raw = part.encode()
        else:
            tag = b"i"
            raw = str(int(part)).encode()
        digest.update(tag + str(len(raw)).encode() + b":" + raw)
    return int.from_bytes(digest.digest(), "little")


def fold(key: int, *numbers: int) -> int:
    """Derive a key from a key and integers; cheap enough to be called once per sample."""
    for number in numbers:
        key = mix64((key ^ mix64(number + GOLDEN)) + GOLDEN)
    return key


def _mix64_array(x: UIntArray) -> UIntArray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


def draws(key: int, n: int) -> UIntArray:
    """Return n keyed 64-bit integers, shape (n,)."""
    steps = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return _mix64_array(steps + np.uint64(key & MASK64))


def draws_at(keys: Sequence[int], which: IntArray, places: IntArray) -> UIntArray:
    """Return single draws, each of one of the keys: `draws(keys[which], ...)[places]`; all of shape (n,)."""
    steps = (places + 1).astype(np.uint64) * np.uint64(GOLDEN)
    return _mix64_array(steps + np.array(keys, dtype=np.uint64)[which])


def below(key: int, n: int, bound: int) -> IntArray:
    """Return n keyed integers in `range(bound)`, shape (n,); bound must be below 2**32."""
    return _below(draws(key, n), bound)


def below_at(keys: Sequence[int], which: IntArray, places: IntArray, bound: int) -> IntArray:
    """Return single draws below a bound, each of one of the keys: `below(keys[which], ..., bound)[places]`."""
    return _below(draws_at(keys, which, places), bound)


def _below(drawn: UIntArray, bound: int) -> IntArray:
    return (((drawn >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def shuffled(key: int, n: int) -> IntArray:
    """Return a keyed permutation of `range(n)` as an array of shape (n,)."""
    return np.argsort(draws(key, n))  # no two draws are equal, so any way of sorting gives the same


class Permutation:
    """A keyed permutation of `range(n)` that holds no table.

    `at` maps a place to the number there, `place_of` is its inverse: a Feistel network with cycle walking (J. Black and
    P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). A number x is the pair (x div a, x mod a) with
    a = ceil(sqrt(n)). In turn, a keyed hash of each half is added to the other. At most sqrt(n) numbers of this domain
    are not below n; `at` repeats the mapping until the number is below n.
    """

    __slots__ = ("_high", "_keys", "_low", "n")

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._low = max(1, math.isqrt(max(0, n - 1)) + 1)
        self._high = max(1, -(-n // self._low))
        self._keys = tuple((fold(key, 2 * r), fold(key, 2 * r + 1)) for r in range(_ROUNDS))

    def _forward(self, x: int) -> int:
        high, low = divmod(x, self._low)
        for even, odd in self._keys:
            high = (high + (mix64(low ^ even) >> 32)) % self._high
            low = (low + (mix64(high ^ odd) >> 32)) % self._low
        return high * self._low + low

    def _backward(self, x: int) -> int:
        high, low = divmod(x, self._low)
        for even, odd in reversed(self._keys):
            low = (low - (mix64(high ^ odd) >> 32)) % self._low
            high = (high - (mix64(low ^ even) >> 32)) % self._high
        return high * self._low + low

    def at(self, place: int) -> int:
        """Return the number at a place."""
        x = self._forward(place)
        while x >= self.n:
            x = self._forward(x)
        return x

    def place_of(self, number: int) -> int:
        """Return the place of a number."""
        x = self._backward(number)
        while x >= self.n:
            x = self._backward(x)
        return x

    def at_many(self, places: npt.NDArray[Any]) -> IntArray:
        """Return the numbers at many places, shape as given."""
        # As `_forward`; few numbers are not below n, so those alone go on one by one.
        shift = np.uint64(32)
        over = np.uint64(self._high)
        under = np.uint64(self._low)
        high, low = np.divmod(places.astype(np.uint64), under)
        for even, odd in self._keys:
            high = (high + (_mix64_array(low ^ np.uint64(even)) >> shift)) % over
            low = (low + (_mix64_array(high ^ np.uint64(odd)) >> shift)) % under
        out = (high * under + low).astype(np.int64)
        for outside in np.flatnonzero(out >= self.n).tolist():
            out[outside] = self.at(int(out[outside]))
        return out

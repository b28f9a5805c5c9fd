"""What the tests of hostile inputs share: seeded damage to bytes and plain values, and children with limits."""

from __future__ import annotations

import copy
import mmap
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forked import start_forked

LONG = os.environ.get("ENERGON_LONG_TESTS") == "1"
"""Whether the long modes of the suites were asked for."""
MORE_MEMORY = 2 << 30
Note = Callable[[str], None]


def seed_of(suite: str) -> int:
    """Return the seed of a suite and print it; ENERGON_TEST_SEED gives another one, `random` a new one."""
    given = os.environ.get("ENERGON_TEST_SEED", "1")
    seed = random.SystemRandom().randrange(1 << 32) if given == "random" else int(given)
    print(f"{suite}: ENERGON_TEST_SEED={seed}")  # noqa: T201 - pytest shows it where the test fails
    return seed


def limited(job: Callable[[Note], Any], *, seconds: int, memory: int = MORE_MEMORY) -> Any:
    """Return what a job returns in a child that may take so many seconds, and so much memory more than this process.

    The job says what it is about to do; where the child dies or hangs, the last of it is in the message.
    """
    notes = mmap.mmap(-1, 4096)

    def note(text: str) -> None:
        notes[:] = text.encode(errors="replace")[:4096].ljust(4096, b"\0")

    def child() -> Any:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nothing that hangs in C can hold it up
        signal.alarm(seconds)
        return job(note)

    started = time.monotonic()
    ok, value = start_forked(child).result()
    last = notes[:].rstrip(b"\0").decode(errors="replace")
    notes.close()
    took = time.monotonic() - started
    assert ok, f"after {took:.1f} s of {seconds} s, with {memory >> 20} MiB more than before, at {last}: {value}"
    return value


# Damage --------------------------------------------------------------------------------------------------------------

_INTERESTING = (0, 1, -1, 127, 255, 2**31 - 1, 2**31, -(2**31), 2**60, -(2**60), 2**63, 2**64, 10**12, 10**400)


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return data after one to four accidents or attacks."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        kind = chance.randrange(8)
        at = chance.randrange(len(out) + 1)
        if kind == 0 and out:  # a bit
            out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
        elif kind == 1:  # cut off
            del out[at:]
        elif kind == 2:  # a hole
            del out[at : at + chance.choice((1, 2, 8, 512))]
        elif kind == 3:  # zeros or ones over it
            size = min(len(out) - at, chance.choice((1, 4, 8, 64, 512)))
            out[at : at + size] = chance.choice((b"\0", b"\xff", b"9", b"-", b"/")) * size
        elif kind == 4:  # a piece twice
            out[at:at] = out[at : at + chance.choice((1, 16, 512))]
        elif kind == 5:  # noise
            out[at : at + 8] = chance.randbytes(8)
        elif kind == 6:  # a number
            width = chance.choice((2, 4, 8))
            number = chance.choice(_INTERESTING) % (1 << (8 * width))
            out[at : at + width] = number.to_bytes(width, chance.choice(("little", "big")))
        else:  # a number in text
            digits = [i for i, byte in enumerate(out) if 48 <= byte < 58]
            if digits:
                place = chance.choice(digits)
                out[place : place + 1] = str(chance.choice(_INTERESTING)).encode()
    return bytes(out)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, (*path, key))


def damaged_value(value: Any, chance: random.Random, *more: Callable[[Any, random.Random], Any]) -> tuple[Any, str]:
    """Return plain nested values with one entry changed, taken away or put in twice, and what was done.

    Args:
        value: A dict or list; stays as it is.
        more: Further ways to change an entry.
    """
    out = copy.deepcopy(value)
    *before, last = chance.choice(list(_paths(out)))
    parent = out
    for key in before:
        parent = parent[key]
    where = ".".join(map(str, (*before, last)))
    kind = chance.randrange(6)
    if kind == 0:
        del parent[last]
        return out, f"{where} taken away"
    if kind == 1 and more:
        parent[last] = chance.choice(more)(parent[last], chance)
    elif kind == 2 and isinstance(parent[last], str) and parent[last]:
        text = parent[last]
        at = chance.randrange(len(text))
        parent[last] = text[:at] + chance.choice(("", "0", "~", "é", text)) + text[at + 1 :]
    elif kind == 3 and isinstance(parent[last], list):
        parent[last] = parent[last] * 2 or [0]
    elif kind == 4 and type(parent[last]) is int:
        parent[last] = chance.choice((parent[last] + 1, parent[last] - 1, *_INTERESTING))
    else:
        parent[last] = chance.choice(
            (None, True, -1, 2**60, 10**400, 1.5, float("nan"), "", "x", b"x", [], {}, [[]], {"a": 1}, {1: 2}, (1,))
        )
    return out, f"{where} = {parent[last]!r}"[:300]

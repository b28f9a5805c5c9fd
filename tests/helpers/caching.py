"""What the tests of cache pools share: a store that counts its reads and can be stopped, and looks into the folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from energon_bridge import FileStore, SourceInfo

SECONDS = 20.0


class Slow(FileStore):
    """A store that counts its reads, and waits in them while `gate` is closed."""

    def __init__(self, size: int = 100) -> None:
        self.reads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self._size = size

    def get_path(self) -> str:
        return "slow"

    def read(self, key: str) -> tuple[bytes, SourceInfo]:
        self.reads.append(key)
        self.gate.wait(SECONDS)
        if key.startswith("bad"):
            raise OSError(f"cannot read {key}")
        return self.content(key), SourceInfo("slow", key, "", (key,))

    def content(self, key: str) -> bytes:
        return key.encode().ljust(self._size, b".")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kept"))

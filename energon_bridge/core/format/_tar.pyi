from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

def split(data: memoryview, parts: Collection[str] | None, /) -> tuple[str, dict[str, memoryview]] | None: ...
def split_all(
    blocks: list[Any], ranges: NDArray[np.int64], parts: Collection[str] | None, /
) -> tuple[list[str], dict[str, list[bytes]]] | None: ...
def crc32s(pieces: list[bytes | bytearray | memoryview], /) -> bytes | None: ...

"""Time to seek and read documents of a Megatron index of any size; its files are sparse, but for these documents.

python -m benchmarks.indexes /tmp/indexes --documents 1000000000
"""

from __future__ import annotations

import argparse
import struct
import time
from pathlib import Path

import numpy as np

from energon_bridge.core.format.foreign import ForeignRow
from energon_bridge.tools.convert.megatron_index import open_index


def write_sparse(folder: Path, documents: int, tokens: int, chosen: list[int]) -> Path:
    """Write an index of many documents of a number of tokens (uint16), with the entries of a few of them only."""
    lengths, pointers, borders = 34, 34 + 4 * documents, 34 + 12 * documents
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "big.bin").open("wb") as data, (folder / "big.idx").open("wb") as index:
        data.truncate(2 * tokens * documents)
        index.truncate(borders + 8 * (documents + 1))
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        for number in {0, documents - 1, *chosen}:
            for at, entry in (
                (lengths + 4 * number, struct.pack("<i", tokens)),
                (pointers + 8 * number, struct.pack("<q", 2 * tokens * number)),
                (borders + 8 * number, struct.pack("<qq", number, number + 1)),
            ):
                index.seek(at)
                index.write(entry)
            data.seek(2 * tokens * number)
            data.write(struct.pack("<H", number % 65_521) * tokens)
    return folder / "big.idx"


def main() -> None:
    """Print the time to open the index, and to read some documents, each several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=1_000_000_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--read", type=int, default=2_000)
    args = parser.parse_args()
    chosen = np.unique(np.random.default_rng(0).integers(1, args.documents - 1, args.read))
    path = write_sparse(args.folder, args.documents, args.tokens, chosen.tolist())
    open_index(path, split_part="train").open_rows().read(chosen[:1])  # imports torch
    began = time.perf_counter()
    rows = open_index(path, split_part="train").open_rows()
    print(f"open: {1e3 * (time.perf_counter() - began):.2f} ms")
    times = np.zeros((5, chosen.size))
    for repetition in times:
        for place, number in enumerate(chosen):
            began = time.perf_counter()
            (row,) = rows.read(np.array([number]))
            repetition[place] = time.perf_counter() - began
            assert isinstance(row, ForeignRow)
            assert row.parts["tokens"].tolist() == [number % 65_521] * args.tokens
    first, best = 1e3 * np.median(times[0]), 1e3 * times.min(axis=0).max()
    print(f"a document of {args.documents:,}: median {first:.3f} ms; best of 5, of all at most {best:.3f} ms")


if __name__ == "__main__":
    main()

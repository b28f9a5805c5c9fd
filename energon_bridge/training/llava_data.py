"""Converts the data that LLaVA-1.5 was published with.

Both come as one JSON list of `{"id": …, "image": PATH, "conversations": [{"from": "human" | "gpt", "value": …}, …]}`
with a folder of images:

    blip_laion_cc_sbu_558k.json   -> train/*.tar and val/*.tar of an image (`jpg`) and its caption (`txt`) each
    llava_v1_5_mix665k.json       -> one `.jsonl` file for each top folder of the images (or videos), text.jsonl for
                                     conversations without one, and val.jsonl

Every n-th entry goes to validation, so the choice is the same each time.

python -m energon_bridge.training.llava_data captions blip_laion_cc_sbu_558k.json images data/llava_pretrain_558k
python -m energon_bridge.training.llava_data conversations llava_v1_5_mix665k.json data/llava15
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from energon_bridge.core.errors import ConfigurationError, EnergonError


def write_captions(
    source: Path, images: Path, folder: Path, *, val_every: int = 500, samples_per_shard: int = 10_000
) -> dict[str, int]:
    """Write the captioned images of the first stage as tars; return the samples per split part.

    Raises:
        ConfigurationError: The list cannot be read, has an entry of another form, or the folder is not empty.
    """
    entries = _entries(source, folder)
    counts: dict[str, int] = {}
    for part, chosen in _parted(entries, val_every):
        (folder / part).mkdir(parents=True)
        counts[part] = len(chosen)
        for shard, first in enumerate(range(0, len(chosen), samples_per_shard)):
            with tarfile.open(folder / part / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
                for entry in chosen[first : first + samples_per_shard]:
                    key = str(entry["id"]).replace(".", "_").replace("/", "_")
                    _add(archive, f"{key}.jpg", (images / entry["image"]).read_bytes())
                    _add(archive, f"{key}.txt", _caption(entry).strip().encode())
    return counts


def write_conversations(source: Path, folder: Path, *, val_every: int = 500) -> dict[str, int]:
    """Write the conversations of the second stage as JSON lines; return the lines per file.

    Raises:
        ConfigurationError: The list cannot be read, or the folder is not empty.
    """
    entries = _entries(source, folder)
    counts: Counter[str] = Counter()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files: dict[str, TextIO] = {}
        for part, chosen in _parted(entries, val_every):
            for entry in chosen:
                name = "val" if part == "val" else _folder_of(entry)
                if name not in files:
                    files[name] = stack.enter_context((folder / f"{name}.jsonl").open("w", encoding="utf-8"))
                files[name].write(json.dumps(entry, ensure_ascii=False) + "\n")
                counts[name] += 1
    return dict(counts)


def _entries(source: Path, folder: Path) -> Sequence[Mapping[str, Any]]:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty: choose another folder, or empty it")
    try:
        entries = json.loads(source.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {source}: {error}") from error
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "conversations" in entry for entry in entries
    ):
        raise ConfigurationError(f"{source} must be a list of objects with 'conversations'")
    return entries


def _parted(entries: Sequence[Mapping[str, Any]], val_every: int) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    yield "train", [entry for number, entry in enumerate(entries) if number % val_every]
    yield "val", entries[::val_every]


def _folder_of(entry: Mapping[str, Any]) -> str:
    """Return the top folder of an entry's first image or video; `text` without one."""
    named = entry.get("images") or entry.get("image") or entry.get("videos") or entry.get("video") or "text"
    return str(named[0] if isinstance(named, list) else named).partition("/")[0]


def _caption(entry: Mapping[str, Any]) -> str:
    caption = next((turn["value"] for turn in entry["conversations"] if turn.get("from") == "gpt"), None)
    if not isinstance(caption, str):
        raise ConfigurationError(f"the entry {entry.get('id')!r} has no caption: no turn is from 'gpt'")
    return caption


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m energon_bridge.training.llava_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    captions = commands.add_parser("captions", help="captioned images, as tars")
    conversations = commands.add_parser("conversations", help="conversations, as JSON lines by folder of their images")
    for command in (captions, conversations):
        command.add_argument("source", type=Path, help="the JSON file")
        if command is captions:
            command.add_argument("images", type=Path, help="the folder that the images' paths are relative to")
        command.add_argument("folder", type=Path, help="where to write to; empty or not there yet")
        command.add_argument("--val-every", type=int, default=500, help="every n-th entry is for validation")
    options = parser.parse_args(arguments)
    try:
        if options.command == "captions":
            counts = write_captions(options.source, options.images, options.folder, val_every=options.val_every)
        else:
            counts = write_conversations(options.source, options.folder, val_every=options.val_every)
    except (EnergonError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for name, count in counts.items():
        print(f"{name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

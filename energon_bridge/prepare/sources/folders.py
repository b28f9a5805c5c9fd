"""Folders: pictures with captions beside them, a folder for each class, or pictures alone.

A first level of `train`, `val` and `test` folders is a split. Keys are paths below the folder, without the extension.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from energon_bridge.errors import SourceError
from energon_bridge.format.media import kind_by_name
from energon_bridge.rows.base import (
    SPLIT_NAMES,
    SPLIT_ORDER,
    FileRef,
    Layout,
    Row,
    RowSample,
    lay_out,
)

_TEXTS = (".txt", ".caption", ".json")


class FolderSource:
    """The media files below a folder, in the order of their paths."""

    def __init__(self, root: Path, *, as_classes: bool | None = None) -> None:
        self.where = str(root)
        self._root = root
        files = sorted(_walk(root))
        media = [name for name in files if kind_by_name(name) is not None]
        if not media:
            raise SourceError(f"{root}: no images, videos or sound below this folder, and no file that lists any.")
        stems = {os.path.splitext(name) for name in files}
        self._texts = {stem: suffix for suffix in reversed(_TEXTS) for stem, found in stems if found == suffix}
        split = {name.partition("/")[0] if "/" in name else "" for name in media} <= SPLIT_NAMES.keys()
        if split:
            media.sort(key=lambda name: (SPLIT_ORDER.index(SPLIT_NAMES[name.partition("/")[0]]), name))
            counts = Counter(SPLIT_NAMES[name.partition("/")[0]] for name in media)
            self.split_parts: tuple[tuple[str, int], ...] = tuple(counts.items())
        else:
            self.split_parts = ()
        self._media = media
        self._depth = int(split)
        has_texts = any(os.path.splitext(name)[0] in self._texts for name in media)
        nested = all(name.count("/") > self._depth for name in media)
        names = sorted({name.split("/")[self._depth] for name in media}) if nested else []
        if as_classes is None:
            as_classes = nested and not has_texts and len(names) > 1
        elif as_classes and not nested:
            raise SourceError(f"{root}: {media[0]} is not in the folder of a class. Move it into one.")
        self._classes = {name: number for number, name in enumerate(names)} if as_classes else {}
        self._has_texts = has_texts and not as_classes
        self.kind = "folder of classes" if as_classes else "folder of pairs" if has_texts else "folder of media"
        stems_seen = Counter(os.path.splitext(name)[0].replace(".", "_") for name in media)
        self._twice = {stem for stem, count in stems_seen.items() if count > 1}

    def __len__(self) -> int:
        return len(self._media)

    def row(self, number: int) -> Row:
        """Return a file with its caption or class."""
        name = self._media[number]
        stem, suffix = os.path.splitext(name)
        path = f"{self._root}/{name}"
        files: dict[str, FileRef] = {"image": FileRef(path, suffix[1:].lower())}
        values: dict[str, object] = {}
        if self._classes:
            label = name.split("/")[self._depth]
            values = {"label": self._classes[label], "label_name": label}
        elif self._has_texts:
            text = self._texts.get(stem)
            if text is None:
                raise SourceError(
                    f"{path}: no caption beside it ({Path(stem).name}.txt). Leave such files out with --on-error skip."
                )
            column = "json" if text == ".json" else "caption"
            files[column] = FileRef(f"{self._root}/{stem}{text}", "json" if text == ".json" else "txt")
        key = stem.replace(".", "_")
        if key in self._twice:
            key += f"-{suffix[1:].lower()}-{number}"
        return Row(where=path, values=values, files=dict(files), key=key)

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample, not read yet."""
        return lay_out(self.row(number), layout, number)

    def propose(self) -> Layout:
        """Propose a layout from the first files."""
        bare = frozenset(["image", "caption", "json"])
        if any(kind_by_name(name) != "image" for name in self._media):
            return Layout(sample_type="CrudeSample", bare=bare)
        if self._classes:
            fields = {"image": "image", "label": "label", "label_name": "label_name"}
            return Layout(sample_type="ImageClassificationSample", fields=fields, bare=bare)
        if self._has_texts:
            caption = "json[caption]" if ".json" in set(self._texts.values()) else "caption"
            return Layout(sample_type="CaptioningSample", fields={"image": "image", "caption": caption}, bare=bare)
        return Layout(sample_type="ImageSample", fields={"image": "image"}, bare=bare)


def _walk(root: Path) -> list[str]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        before = "" if inside == "." else f"{inside}/"
        found += [before + name for name in names if not name.startswith(".")]
    return found

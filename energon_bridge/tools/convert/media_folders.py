"""Folders of media files as a source of `energon convert`.

Pictures with captions beside them, a folder for each class, or pictures alone. Folders such as `train`, `val` and
`test` are a split, if all files are in one. Keys are paths below the folder, without the extension.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from energon_bridge.core.errors import SourceError
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.models.conversations.withheld import first_held_out
from energon_bridge.tools.convert.conversations import as_source, check_cut, check_withheld
from energon_bridge.tools.convert.left_out import TEXTS, beside_media, extension_of, files_below, only, stem_of
from energon_bridge.tools.convert.lists import caption_of
from energon_bridge.tools.convert.rows import (
    AskedSample,
    FileRef,
    Layout,
    Row,
    SourceSample,
    TextRef,
    first_rows,
    lay_out,
    located,
)
from energon_bridge.tools.convert.splits import SPLIT_ORDER, check_card_in, folder_split, names_class, says_held_out

_KINDS = (
    *("image", "img", "jpegimage", "jpgimage", "pngimage", "annotation", "label", "trimap", "groundtruth"),
    *("segmentation", "segmentationclass", "segmentationobject", "segmentationmask", "depthmap", "masks", "thumbnail"),
)
_TWINS = (
    *("mask", "depth", "rgb", "ir", "nir", "edge", "gt", "input", "output", "target"),
    *("hr", "lr", "noisy", "hazy", "blur"),
)
"""Names of folders of kinds of files, and of what may be classes, too."""


class FolderSource:
    """The media files below a folder, in the order of their paths."""

    def __init__(self, root: Path, *, as_classes: bool | None = None) -> None:
        self.where = str(root)
        self._root = root
        files, beside = files_below(root)
        self._found = {name: extension for name in files if (extension := extension_of(root, name))}
        media = [name for name in files if kind_by_name(f".{self._found.get(name)}") is not None]
        if not media:
            there = f"no file that lists any.{only(files, beside, self._found)}"
            raise SourceError(f"{root}: no images, videos or sound below this folder, and {there}")
        self._texts: dict[str, list[str]] = {}
        for name in files:
            if f".{self._found.get(name)}" in TEXTS:
                self._texts.setdefault(stem_of(name), []).append(name)
        placed = _splits(root, media)
        if placed:
            media.sort(key=lambda name: (SPLIT_ORDER.index(placed[name][0]), name))
        check_card_in(root, [(placed[name][0] if placed else "", PurePath(name)) for name in media])
        parts = Counter(placed[name][0] for name in media if placed)
        self.split_parts: tuple[tuple[str, int], ...] = tuple(parts.items())
        self._depths = {name: depth for name, (_, depth) in placed.items()}
        self._media = media
        self._stems: dict[str, list[str]] = {}
        for name in media:
            self._stems.setdefault(stem_of(name), []).append(name)
        has_texts = any(stem_of(name) in self._texts for name in media)
        self._classes = self._found_classes(as_classes, has_texts)
        self._has_texts = has_texts and not self._classes
        self.kind = "folder of classes" if self._classes else "folder of pairs" if has_texts else "folder of media"
        stems_seen = Counter(os.path.splitext(name)[0].replace(".", "_") for name in media)
        self._twice = {stem for stem, count in stems_seen.items() if count > 1}
        self.left_out = beside_media(files, beside, self._found, self._texts if self._has_texts else {})

    def _found_classes(self, as_classes: bool | None, has_texts: bool) -> dict[str, int]:
        """Return the number of each class, nothing if the folders are none; raises SourceError for a file of none."""
        of_files = {name: self._class_of(name) for name in self._media}
        names = sorted({folder for folder in of_files.values() if folder is not None})
        if as_classes is None:
            as_classes = not has_texts and len(names) > 1
            if as_classes and (kinds := self._kinds_of_files(names, of_files)):
                raise SourceError(
                    f"{self._root}: {' and '.join(kinds)} seem to be no classes, but kinds of files, as are images "
                    "and masks. Convert the folder of the images by itself; --kind classes takes the names for "
                    "classes, --kind pairs all files without classes."
                )
        stray = [name for name, folder in of_files.items() if folder is None]
        if as_classes and stray:
            raise SourceError(
                f"{self._root}: {len(stray)} of {len(self._media)} files are not in the folder of a class, such as "
                f"{stray[0]}; others are in {', '.join(names[:5]) or 'none'}. Move what has no class into the folder "
                "of one, or away; --kind pairs takes all files without classes."
            )
        return {name: number for number, name in enumerate(names)} if as_classes else {}

    def _kinds_of_files(self, names: Sequence[str], of_files: Mapping[str, str | None]) -> list[str]:
        """Return the folders whose names say that they have images or what was drawn from them.

        A name that may be a class as well (`mask`) says so only where its files are called as those of another folder.
        """
        stems: dict[str, set[str]] = {name: set() for name in names}
        for name, folder in of_files.items():
            if folder is not None:
                stems[folder].add(PurePath(stem_of(name)).name)
        kinds: list[str] = []
        for name in names:
            word = re.sub(r"[\W_]+", "", name.lower())
            others = (stems[other] for other in names if other != name)
            is_twin = any(2 * len(stems[name] & other) > len(stems[name]) for other in others)
            if {word, word.removesuffix("s")} & {*_KINDS, *(_TWINS if is_twin else ())}:
                kinds.append(name)
        return kinds

    def __len__(self) -> int:
        return len(self._media)

    def _class_of(self, name: str) -> str | None:
        """Return the folder that a file is in, below that of its split; None if there is none."""
        inside = name.split("/")[self._depths.get(name, 0) :]
        return inside[0] if len(inside) > 1 else None

    def row(self, number: int) -> Row:
        """Return a file with its caption or class."""
        name = self._media[number]
        if (shown := name.encode("utf-8", "backslashreplace").decode()) != name:
            raise SourceError(f"{self._root}/{shown}: the name is not UTF-8. Rename the file: convmv can.")
        stem = os.path.splitext(name)[0]
        extension = self._found[name]
        path = f"{self._root}/{name}"
        files: dict[str, FileRef] = {"image": FileRef(path, extension)}
        values: dict[str, object] = {}
        if self._classes:
            label = self._class_of(name)
            assert label is not None
            values = {"label": self._classes[label], "label_name": label}
        elif self._has_texts:
            text = self._caption_name(name)
            kind = "json" if self._found[text] == "json" else "txt"
            files["json" if kind == "json" else "caption"] = TextRef(f"{self._root}/{text}", kind)
        key = stem.replace(".", "_")
        if key in self._twice:
            key += f"-{extension}-{number}"
        return Row(where=path, values=values, files=dict(files), key=key)

    def _caption_name(self, name: str) -> str:
        """Return the caption of a file: its own in the same Unicode form, else that in another; raises SourceError."""
        stem = os.path.splitext(name)[0]
        beside = self._texts.get(stem_of(name), [])
        same = [text for text in beside if os.path.splitext(text)[0] == stem] or beside
        if not same:
            raise SourceError(f"{self._root}/{name}: no caption beside it ({Path(stem).name}.txt).")
        others = (other for other in self._stems[stem_of(name)] if other != name)
        shared = next((other for other in others if os.path.splitext(other)[0] == stem or same is beside), None)
        if shared is not None:
            raise SourceError(
                f"{self._root}/{name}: {Path(shared).name} has the same caption beside it, so whose it is, or of which "
                "part (as of a mask), is unknown. Move one of them away, or give each a name and a caption."
            )
        same.sort(key=lambda text: TEXTS.index(f".{self._found[text]}"))
        if len(same) > 1 and self._found[same[0]] == self._found[same[1]]:
            raise SourceError(f"{self._root}/{name}: has two captions, {same[0]} and {same[1]}. Move one of them away.")
        return same[0]

    def sample(self, number: int, layout: Layout) -> SourceSample:
        """Return a sample, not read yet; raises SourceError for one that the JSON beside it withholds, or cuts."""
        row = self.row(number)
        if not layout.is_crude and (said := _said_beside(row)):
            with located(row.where), as_source():
                beside = replace(row, values=said)
                check_withheld(beside, replace(layout, held_out=self._held_out))
                check_cut(beside, layout)
        return AskedSample.by(layout, lay_out(row, layout, number))

    @cached_property
    def _held_out(self) -> bool | None:
        return None if self.split_parts else first_held_out(map(_said_beside, first_rows(self)))

    def propose(self) -> Layout:
        """Propose a layout from the first files."""
        bare = frozenset(["image", "caption", "json"])
        if any(kind_by_name(f".{self._found[name]}") != "image" for name in self._media):
            return Layout(sample_type="CrudeSample", bare=bare)
        if self._classes:
            fields = {"image": "image", "label": "label", "label_name": "label_name"}
            return Layout(sample_type="ImageClassificationSample", fields=fields, bare=bare)
        if self._has_texts:
            is_json = all(kind == "json" for kind in self._caption_kinds())
            caption = self._caption_access() if is_json else "caption"
            if caption is None:
                return Layout(sample_type="CrudeSample", bare=bare)
            return Layout(sample_type="CaptioningSample", fields={"image": "image", "caption": caption}, bare=bare)
        return Layout(sample_type="ImageSample", fields={"image": "image"}, bare=bare)

    def _caption_kinds(self) -> Iterator[str]:
        """Yield the extension of the caption of each file that has one."""
        for name in self._media:
            with suppress(SourceError):
                yield self._found[self._caption_name(name)]

    def _caption_access(self) -> str | None:
        """Return where JSON beside media has the caption, judging by the first one; None if nowhere."""
        for row in first_rows(self):
            with suppress(SourceError):
                row.files["json"].read()  # type: ignore[union-attr]
                name = caption_of(_said_beside(row))
                return None if name is None else f"json[{name}]"
        return None


def _said_beside(row: Row) -> dict[str, Any]:
    """Return what the JSON beside a file says; nothing if there is none, or it cannot be read."""
    with suppress(SourceError):
        content = json.loads(row.files["json"].read()) if "json" in row.files else None  # type: ignore[union-attr]
        return content if isinstance(content, dict) else {}
    return {}


def _splits(root: Path, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return split part and depth of the folders of a split for each file, nothing if they have none.

    Raises SourceError if some folders say that their files are held out, but not all files are in those of a split.
    """
    found = {name: folder_split(name.lower()) for name in names}
    if any(split is None for split in found.values()):
        folders = {folder for name in names for folder in name.split("/")[:-1]}
        held_out_folders = {folder for folder in folders if says_held_out(folder) and not names_class(folder, folders)}
        is_held_out = {name: not held_out_folders.isdisjoint(name.split("/")[:-1]) for name in names}
        held_out = next((name for name in names if is_held_out[name]), None)
        other = next((name for name in names if not is_held_out[name]), None)
        if held_out is not None and other is not None:
            raise SourceError(
                f"{root}: {held_out} seems to be held out, but not all files are in folders of a split, such as "
                f"{other}. Put all into folders called train, val and test, or convert each split by itself."
            )
        return {}
    return {name: split for name, split in found.items() if split is not None}

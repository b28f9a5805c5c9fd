"""Which files are media: by the extensions of their names, by patterns, or by their first bytes.

The extensions are those of Megatron Energon (reference section 1.9).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from energon_bridge.errors import ConfigurationError

MediaKind = Literal["image", "av"]
Strategy = Literal["EXTENSION", "HEADER", "GLOB"]

HEAD_BYTES = 64
"""As many first bytes tell the kind of a file."""

_IMAGES = frozenset(["bmp", "gif", "ico", "j2k", "jp2", "jpx", "jpeg", "jpg", "png", "tif", "tiff", "webp"])
_AV = frozenset(["aac", "avi", "flac", "m4a", "m4v", "mkv", "mov", "mp3", "mp4", "ogg", "wav", "webm"])

_MAGIC: tuple[tuple[int, bytes, MediaKind], ...] = (
    (0, b"\xff\xd8\xff", "image"),
    (0, b"\x89PNG\r\n\x1a\n", "image"),
    (0, b"GIF8", "image"),
    (0, b"II*\0", "image"),
    (0, b"MM\0*", "image"),
    (0, b"\0\0\1\0", "image"),
    (0, b"\0\0\0\x0cjP  ", "image"),
    (0, b"\xff\x4f\xff\x51", "image"),
    (8, b"WEBP", "image"),
    (4, b"ftypavif", "image"),
    (4, b"ftyphei", "image"),
    (4, b"ftypmif1", "image"),
    (4, b"ftyp", "av"),
    (0, b"\x1aE\xdf\xa3", "av"),
    (8, b"AVI ", "av"),
    (8, b"WAVE", "av"),
    (0, b"ID3", "av"),
    (0, b"fLaC", "av"),
    (0, b"OggS", "av"),
    (0, b"\0\0\1\xba", "av"),
)
_AUDIO_FRAMES = (0xF1, 0xF2, 0xF3, 0xF9, 0xFA, 0xFB)  # the second byte, after 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFilter:
    """Says which files are media: `EXTENSION`, `HEADER`, or `GLOB` with patterns separated by commas.

    Raises ConfigurationError for another strategy, and patterns that are missing or not of use.
    """

    strategy: Strategy
    patterns: str | None = None

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            known = ", ".join(get_args(Strategy))
            raise ConfigurationError(f"there is no media filter {self.strategy!r}; known: {known}")
        if (self.strategy == "GLOB") != bool(self._patterns()):
            raise ConfigurationError(f"the media filter {self.strategy} got the patterns {self.patterns!r}")

    @property
    def reads_files(self) -> bool:
        """Whether names alone do not tell."""
        return self.strategy == "HEADER"

    def may_pass(self, name: str) -> bool:
        """Whether a file of this name can be media."""
        if self.strategy == "GLOB":
            lower = name.lower()
            names = (lower, lower.rpartition("/")[2])
            return any(fnmatchcase(one, pattern) for pattern in self._patterns() for one in names)
        return self.reads_files or kind_by_name(name) is not None

    def kind_of(self, name: str, head: bytes) -> MediaKind | None:
        """Return the kind of a file that may pass, None if it is no media; `head` are its first HEAD_BYTES."""
        by_name, by_head = kind_by_name(name), kind_by_head(head)
        return by_head or by_name if self.reads_files else by_name or by_head

    def _patterns(self) -> list[str]:
        return [pattern.strip().lower() for pattern in (self.patterns or "").split(",") if pattern.strip()]


def kind_by_name(name: str) -> MediaKind | None:
    """Return the kind that the extension of a name tells."""
    extension = name.rpartition(".")[2].lower()
    return "image" if extension in _IMAGES else "av" if extension in _AV else None


def kind_by_head(head: bytes) -> MediaKind | None:
    """Return the kind that the first bytes of a file tell."""
    for offset, magic, kind in _MAGIC:
        if head.startswith(magic, offset) and (offset != 8 or head.startswith(b"RIFF")):
            return kind
    if head.startswith(b"BM") and head[6:10] == bytes(4):
        return "image"
    return "av" if len(head) > 1 and head[0] == 0xFF and head[1] in _AUDIO_FRAMES else None


_EXTENSIONS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"GIF8", "gif"),
    (0, b"II*\0", "tif"),
    (0, b"MM\0*", "tif"),
    (0, b"BM", "bmp"),
    (8, b"WEBP", "webp"),
    (8, b"WAVE", "wav"),
    (8, b"AVI ", "avi"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\x1aE\xdf\xa3", "mkv"),
    (4, b"ftypavif", "avif"),
    (4, b"ftyp", "mp4"),
)


def extension_by_head(head: bytes) -> str | None:
    """Return the usual extension of a file that begins like this, None if it is not known."""
    for offset, magic, extension in _EXTENSIONS:
        if head.startswith(magic, offset):
            return extension
    return "mp3" if kind_by_head(head) == "av" and head[:1] == b"\xff" else None

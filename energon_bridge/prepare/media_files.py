"""What one media file says of itself; no picture is decoded, and no frame.

Images are read with Pillow, from as few bytes as it needs; videos and sound with PyAV, which is not always installed.
The samples of compressed sound are counted by decoding it, once and for all: nothing else tells them exactly.
"""

from __future__ import annotations

import io
import warnings

from energon_bridge.av import AVDecoder
from energon_bridge.errors import DecodeError
from energon_bridge.format.media import ImageMetadata, MediaMetadata
from energon_bridge.format.media_kinds import MediaKind
from energon_bridge.storage.ranges import ByteRange

_FIRST_BYTES = 64 << 10  # enough for the header of nearly every image


def read_media(kind: MediaKind, content: ByteRange | bytes) -> MediaMetadata:
    """Return what a file says of itself; of videos and sound nothing is read that is not needed.

    Raises DecodeError if it is no such file, ConfigurationError if PyAV is needed and not installed.
    """
    if kind == "av":
        return AVDecoder(content).get_metadata(get_audio_num_samples=True)
    if isinstance(content, bytes):
        return _read_image(content)
    if content.size > _FIRST_BYTES:
        try:
            return _read_image(content.read(_FIRST_BYTES))
        except DecodeError:
            pass  # some formats have their header at the end, or a large preview before it
    return _read_image(content.read())


def _read_image(data: bytes) -> ImageMetadata:
    from PIL import Image  # the command line starts without it

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of images so large that decoding them would be an attack
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
                return ImageMetadata(
                    width=width, height=height, format=image.format or "UNKNOWN", mode=image.mode or "UNKNOWN"
                )
    except Exception as error:  # codecs raise whatever they like
        raise DecodeError(f"no image that Pillow knows: {type(error).__name__}: {error}") from error

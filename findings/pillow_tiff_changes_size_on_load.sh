#!/usr/bin/env bash
# Pillow 13.0.0: width and height of an opened TIFF change when it is loaded, if only its XMP says that it is turned.
#
# Pillow turns TIFFs as they are loaded. `Image.open` swaps the size for that, but looks only at the tag Orientation;
# `load` takes the orientation of the XMP (tag 700), too, where that tag is missing. So a size that is read from headers,
# to plan a batch or to choose a crop, is not that of the pixels. `image.getexif()` tells it before.
#
# Seen with pillow 13.0.0, Python 3.11:
#   tag: (20, 40) opened, (20, 40) loaded; XMP: (40, 20) opened, (20, 40) loaded
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "pillow==13.0.0"
"$folder/env/bin/python" - <<'PYTHON'
import io

from PIL import Image

XMP = b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'
sizes = {}
for name, tags in (("tag", {0x0112: 6}), ("XMP", {700: XMP})):
    file = io.BytesIO()
    Image.new("RGB", (40, 20)).save(file, "TIFF", tiffinfo=tags)
    image = Image.open(file)
    opened = image.size
    image.load()
    sizes[name] = opened, image.size
    print(f"{name}: {opened} opened, {image.size} loaded")
assert sizes["tag"] == ((20, 40), (20, 40)), "the behaviour has changed"
assert sizes["XMP"] == ((40, 20), (20, 40)), "the behaviour has changed"
PYTHON

#!/usr/bin/env bash
# PyAV 18.1.0: a frame decoded from a picture with EXIF has no readable side data: `frame.side_data` is a ValueError.
#
# FFmpeg 8 puts the EXIF of JPEG, TIFF, PNG and WebP beside the frame (so also that of MJPEG videos), as a type that
# PyAV's enumeration of side data does not have. PyAV names all side data before it returns any, so the display matrix,
# captions and the rest cannot be read either. `frame.rotation` reads the matrix by itself and still works.
#
# Seen with av 18.1.0, pillow 13.0.0, Python 3.11:
#   JPEG rotation -90, side data: ValueError('31 is not a valid Type'); the same for TIFF, PNG and WEBP
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "av==18.1.0" "pillow==13.0.0"
"$folder/env/bin/python" - <<'PYTHON'
import io

import av
from PIL import Image

exif = Image.Exif()
exif[0x0112] = 6  # orientation: a quarter clockwise
for form in ("JPEG", "TIFF", "PNG", "WEBP"):
    file = io.BytesIO()
    Image.new("RGB", (40, 20), (200, 10, 10)).save(file, form, exif=exif)
    frame = next(av.open(io.BytesIO(file.getvalue())).decode(video=0))
    try:
        found = repr([one.type for one in frame.side_data])
    except ValueError as error:
        found = repr(error)
    print(form, "rotation", frame.rotation, "side data:", found)
    assert frame.rotation == -90, "the behaviour has changed"
    assert found == "ValueError('31 is not a valid Type')", "the behaviour has changed"
PYTHON

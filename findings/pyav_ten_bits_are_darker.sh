#!/usr/bin/env bash
# PyAV 18.1.0: frames of 10 bits become RGB up to three levels darker than the same colour in frames of 8 bits.
#
# The scaler of FFmpeg reaches rgb24 from 10 bits by another way than from 8, which rounds down at each step. Phones
# record 10 bits (HEVC, HDR), so one scene differs by up to 1.2 % with the setting of the camera. By way of rgb48 the
# values are right to one level.
#
# Seen with av 18.1.0, Python 3.11, Y 120, Cb 90, Cr 200 of BT.709 (exact: 250.2, 90.8, 40.8):
#   8 bits [250, 90, 40], 10 bits [247, 89, 39], 10 bits by way of rgb48 [250, 90, 40]
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "av==18.1.0" "numpy==2.4.6"
"$folder/env/bin/python" - <<'PYTHON'
import av
import numpy

BT709 = 1


def frame(form):
    made = av.VideoFrame(64, 48, form)
    made.colorspace = BT709
    for plane, value in zip(made.planes, (120, 90, 200), strict=True):
        if form == "yuv420p":
            plane.update(bytes([value]) * plane.buffer_size)
        else:
            plane.update(numpy.full(plane.buffer_size // 2, value * 4, numpy.uint16).tobytes())
    return made


eight = frame("yuv420p").to_ndarray(format="rgb24")[20, 20].tolist()
ten = frame("yuv420p10le").to_ndarray(format="rgb24")[20, 20].tolist()
wide = (frame("yuv420p10le").to_ndarray(format="rgb48le")[20, 20] >> 8).tolist()
print(f"8 bits {eight}, 10 bits {ten}, 10 bits by way of rgb48 {wide}")
assert eight == [250, 90, 40] and ten == [247, 89, 39], "the behaviour has changed"
assert max(abs(a - b) for a, b in zip(wide, (250.2, 90.8, 40.8), strict=True)) < 1.5, "the behaviour has changed"
PYTHON

#!/usr/bin/env bash
# soundfile 0.14.0 (libsndfile 1.2.2): segments read in order from one open Ogg Vorbis file begin with wrong samples.
#
# After a read, `seek` to a later sample and `read` give up to some hundred samples that are not those of the whole
# file, off by as much as the signal is loud; the rest is right. No error, no warning, and `tell` is right. The same
# seek in a file that was just opened, or back to an earlier sample, is exact; FLAC is always. Segments of a manifest
# are usually cut in order from one open file: open it anew for each (`soundfile.read(start=...)` does), or decode once.
#
# Seen with soundfile 0.14.0, Python 3.11:
#   in order: 36 of 40 segments differ from the whole file, by up to 1.13; opened anew: 0; backwards: 0
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "soundfile==0.14.0" "numpy==2.2.6"
cd "$folder"
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np
import soundfile

RATE, LENGTH, STARTS = 16_000, 800, range(0, 159_200, 4_000)
time = np.arange(160_000) / RATE
sound = 0.3 * np.sin(2 * np.pi * 440 * time) + 0.1 * np.random.default_rng(0).standard_normal(len(time))
soundfile.write("sound.ogg", sound, RATE, format="OGG", subtype="VORBIS")
whole, _ = soundfile.read("sound.ogg")


def wrong(starts, anew=False):
    """Return by how much each segment that differs does."""
    file, found = soundfile.SoundFile("sound.ogg"), []
    for start in starts:
        file = soundfile.SoundFile("sound.ogg") if anew else file
        file.seek(start)
        off = np.abs(file.read(LENGTH) - whole[start : start + LENGTH]).max()
        if off > 1e-3:
            found.append(off)
    return found


in_order, anew, back = wrong(STARTS), wrong(STARTS, anew=True), wrong(reversed(STARTS))
print(
    f"in order: {len(in_order)} of {len(STARTS)} segments differ from the whole file, by up to {max(in_order):.2f}; "
    f"opened anew: {len(anew)}; backwards: {len(back)}"
)
assert len(in_order) > len(STARTS) // 2 and max(in_order) > 0.1, "the behaviour has changed"
assert not anew and not back, "the behaviour has changed"
PYTHON

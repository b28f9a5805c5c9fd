#!/usr/bin/env bash
# webdataset 1.0.2: samples whose keys have dots are written one by one and read back as one.
#
# `TarWriter` takes any key and puts the field's name behind it; readers cut a member's name at the first dot behind
# the last slash. So `img.001` and `img.002` come back as one sample `img` with the fields `001.txt` and `002.txt`. File
# names of cameras and exports often have such dots ("clip.0001"). Neither end warns.
#
# Seen with webdataset 1.0.2, Python 3.11:
#   written 2, read [{'__key__': 'img', '001.txt': b'a', '002.txt': b'b'}]
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "webdataset==1.0.2"
cd "$folder"
"$folder/env/bin/python" - <<'PYTHON'
import webdataset

with webdataset.TarWriter("shard.tar") as shard:
    shard.write({"__key__": "img.001", "txt": "a"})
    shard.write({"__key__": "img.002", "txt": "b"})
read = webdataset.WebDataset("shard.tar", shardshuffle=False)
found = [{name: value for name, value in one.items() if name not in ("__url__", "__local_path__")} for one in read]
print("written 2, read", found)
assert found == [{"__key__": "img", "001.txt": b"a", "002.txt": b"b"}], "the behaviour has changed"
PYTHON

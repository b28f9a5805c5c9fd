#!/usr/bin/env bash
# datasets 5.2.0: load_dataset reads a file twice if its name has two words of one split.
#
# The patterns of a split are one for each word (train, training; validation, valid, val, dev; test, testing, eval,
# evaluation), and the files that each of them finds are put one after the other, without looking for files that were
# found before. So the rows of `validation-dev.parquet`, or of a folder `dev/` inside of `val/`, come twice, and means
# over the split count them twice. Nothing warns.
#
# Seen with datasets 5.2.0, pyarrow 26.0.1, Python 3.11:
#   {'train': ['a'], 'validation': ['b', 'b']}
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "datasets==5.2.0" "pyarrow==26.0.1"
cd "$folder"
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PYTHON'
import os

import datasets
import pyarrow
import pyarrow.parquet

os.mkdir("data")
for name, text in (("train", "a"), ("validation-dev", "b")):
    pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), f"data/{name}.parquet")
read = datasets.load_dataset("parquet", data_dir="data", cache_dir="cache")
found = {part: list(rows["text"]) for part, rows in read.items()}
print(datasets.__version__, found)
assert found == {"train": ["a"], "validation": ["b", "b"]}, "the behaviour has changed"
PYTHON

#!/usr/bin/env bash
# pylance 14.0.2: `update` moves the changed rows to the end, so the numbers that samplers and `take` use change.
#
# An update writes the new rows into a new fragment and marks the old ones as deleted; reads go fragment by fragment. A
# correction of one caption so moves all rows behind it by one place, and a training run that saved "row 5" goes on with
# another row. Compaction keeps the new order. Rows keep a stable number only with `enable_stable_row_ids=True` at the
# first write, and samplers do not use that one.
#
# Seen with pylance 14.0.2, pyarrow 26.0.1, Python 3.11:
#   before [0, 1, 2, 3], after an update of row 1 [0, 2, 3, 1], take([1]) is row 2
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "pylance==14.0.2" "pyarrow==26.0.1"
cd "$folder"
"$folder/env/bin/python" - <<'PYTHON'
import lance
import pyarrow

table = pyarrow.table({"row": [0, 1, 2, 3], "text": ["a", "b", "c", "d"]})
for stable in (False, True):
    dataset = lance.write_dataset(table, f"data{stable}.lance", enable_stable_row_ids=stable)
    before = dataset.to_table().column("row").to_pylist()
    dataset.update({"text": "'corrected'"}, where="row = 1")
    after = dataset.to_table().column("row").to_pylist()
    taken = dataset.take([1]).column("row").to_pylist()[0]
    print(f"stable row ids {stable}: before {before}, after an update of row 1 {after}, take([1]) is row {taken}")
    assert (before, after, taken) == ([0, 1, 2, 3], [0, 2, 3, 1], 2), "the behaviour has changed"
PYTHON

#!/usr/bin/env bash
# datasets 5.2.0: the text of a chat turn that is itself valid JSON changes its type on the way through the feature `Json`.
#
# Where messages mix texts and lists of parts, datasets 5 stores `content` as `Json` (its default for such JSONL with
# `on_mixed_types="use_json"`). A text that parses as JSON is stored as it is, any other is quoted first. So the answers
# "42", "true" and "[1]" come back as a number, a truth value and a list; "hi" comes back as a text. Nothing warns.
# Whoever trains on such rows must turn what is no text and no list of parts back into text.
#
# Seen with datasets 5.2.0, pyarrow 26.0.1, Python 3.11:
#   {'content': 'hi'} {'content': 42} {'content': True} {'content': [1]}
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "datasets==5.2.0" "pyarrow==26.0.1"
cd "$folder"
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PYTHON'
import datasets

texts = ["hi", "42", "true", "[1]"]
rows = [{"content": text} for text in texts] + [{"content": [{"type": "text", "text": "a part"}]}]
stored = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
print(datasets.__version__, stored.features)
stored.to_parquet("rows.parquet")
read = datasets.load_dataset("parquet", data_files="rows.parquet", split="train", cache_dir="cache")
print(*list(read)[: len(texts)])
assert [row["content"] for row in read][: len(texts)] == ["hi", 42, True, [1]], "the behaviour has changed"
PYTHON

#!/usr/bin/env bash
# megatron-core 0.16.1: multi-token prediction takes tokens of the next sample where samples of a pack are padded.
#
# `roll_tensor` gets PackedSeqParams and rolls each sample to the left within `cu_seqlens_q`. Where samples are padded,
# their tokens stand at `cu_seqlens_q_padded`: the first sample keeps its place, every later one is rolled across a
# border that is not its own, and its first tokens go to the sample before. No context parallelism is needed for it, and
# nothing warns. Whoever trains heads for several tokens on padded packs gives the padded ends as `cu_seqlens_q`, too.
#
# Seen with megatron-core 0.16.1 (and 0.19.2 with Python 3.12), torch 2.13.0 (CPU), Python 3.11, samples of 3 and 7 tokens padded to 4 and 8:
#   rolled   [2, 3, 0, 11, 12, 13, 14, 15, 16, 0, 17, 0]
#   expected [2, 3, 0, 0, 12, 13, 14, 15, 16, 17, 0, 0]
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
"$folder/env/bin/pip" install --quiet "megatron-core==0.16.1" "numpy<3"
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

tokens = torch.tensor([[1, 2, 3, 0, 11, 12, 13, 14, 15, 16, 17, 0]])
ends = torch.tensor([0, 3, 10], dtype=torch.int32)
padded = torch.tensor([0, 4, 12], dtype=torch.int32)


def rolled(ends):
    sides = {f"cu_seqlens_{side}{which}": value for side in ("q", "kv") for which, value in (("", ends), ("_padded", padded))}
    params = PackedSeqParams(qkv_format="thd", max_seqlen_q=8, max_seqlen_kv=8, **sides)
    return roll_tensor(tokens.clone(), packed_seq_params=params)[0][0].tolist()


expected = [2, 3, 0, 0, 12, 13, 14, 15, 16, 17, 0, 0]
print(version("megatron-core"))
print("rolled  ", rolled(ends))
print("expected", expected)
assert rolled(ends) == [2, 3, 0, 11, 12, 13, 14, 15, 16, 0, 17, 0], "the behaviour has changed"
assert rolled(padded) == expected, "the behaviour has changed"
PYTHON

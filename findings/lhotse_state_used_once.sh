#!/usr/bin/env bash
# lhotse 1.33.0: `load_state_dict` of a sampler empties the dictionary that it gets: loading it again is a KeyError.
#
# The method takes each entry out of the caller's dictionary. Whoever loads one checkpoint into the sampler of training
# and keeps it (to try again after an error, for a second sampler, to save it once more before the first step) has a
# state without its constraints. torch's own `load_state_dict` methods leave theirs as they were.
#
# Seen with lhotse 1.33.0, torch 2.13.0, Python 3.11:
#   lost from the state: 12 entries, max_duration among them; second load: KeyError('max_duration')
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
"$folder/env/bin/pip" install --quiet "lhotse==1.33.0" "urllib3==2.5.0"
"$folder/env/bin/python" - <<'PYTHON'
from lhotse import CutSet
from lhotse.dataset import DynamicCutSampler
from lhotse.testing.dummies import dummy_cut

cuts = CutSet.from_cuts([dummy_cut(number) for number in range(8)])
sampler = DynamicCutSampler(cuts, max_cuts=2)
next(iter(sampler))
state = sampler.state_dict()
names = set(state)
DynamicCutSampler(cuts, max_cuts=2).load_state_dict(state)
lost = sorted(names - set(state))
try:
    DynamicCutSampler(cuts, max_cuts=2).load_state_dict(state)
    second = "loaded"
except KeyError as error:
    second = repr(error)
print(f"lost from the state: {len(lost)} entries, max_duration among them; second load: {second}")
assert len(lost) == 12 and "max_duration" in lost and second == "KeyError('max_duration')", "the behaviour has changed"
PYTHON

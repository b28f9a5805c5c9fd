#!/usr/bin/env bash
# torchdata 0.11.0 loses samples, litdata 0.2.76 repeats some, grain 0.2.18 skips some, each in silence, when the state
# of a loader is given to one of another batch size.
#
# A StatefulDataLoader over an iterable dataset without a state of its own counts the batches that it gave, and skips as
# many of its own size. litdata's StreamingDataLoader counts batches for each worker and goes back to a whole one of the
# new size. In grain a MapDataset that is batched before `to_iter_dataset` keeps the number of the next batch. (litdata
# takes the number of workers from the state instead of the argument, so a change of that loses nothing; torchdata and
# grain's DataLoader refuse it.) Changing the batch size at a resume is common: more memory, or fewer ranks.
#
# Seen with torchdata 0.11.0, litdata 0.2.76, grain 0.2.18, torch 2.13.0, Python 3.11, 24 samples, three batches of 2,
# then batches of 4:
#   torchdata: lost [6, 7, 8, 9, 10, 11], twice []
#   litdata: lost [], twice [4, 5]
#   grain: lost [6, 7, 8, 9, 10, 11], twice []
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
"$folder/env/bin/pip" install --quiet "torchdata==0.11.0" "litdata==0.2.76" "grain==0.2.18"
cd "$folder"
cat > run.py <<'PYTHON'
import grain
import litdata
import torch
from torchdata.stateful_dataloader import StatefulDataLoader


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(24))


def number(value):
    return value


def compared(first, resumed):
    twice = sorted(set(first) & set(resumed))
    lost = sorted(set(range(24)) - set(first) - set(resumed))
    return f"lost {lost}, twice {twice}"


def of_loader(made):
    loader = made(2)
    batches = iter(loader)
    first = [value for _ in range(3) for value in next(batches).tolist()]
    state = loader.state_dict()
    loader = made(4)
    loader.load_state_dict(state)
    return compared(first, [value for batch in loader for value in batch.tolist()])


def of_grain():
    def made(size):
        return iter(grain.MapDataset.range(24).batch(size).to_iter_dataset())

    batches = made(2)
    first = [value for _ in range(3) for value in next(batches).tolist()]
    state = batches.get_state()
    batches = made(4)
    batches.set_state(state)
    return compared(first, [value for batch in batches for value in batch.tolist()])


if __name__ == "__main__":
    litdata.optimize(fn=number, inputs=list(range(24)), output_dir="numbers", chunk_size=4, num_workers=1)
    found = {
        "torchdata": of_loader(lambda size: StatefulDataLoader(Numbers(), batch_size=size)),
        "litdata": of_loader(lambda size: litdata.StreamingDataLoader(litdata.StreamingDataset("numbers"), batch_size=size)),
        "grain": of_grain(),
    }
    for name, outcome in found.items():
        print(f"{name}: {outcome}")
    assert found == {
        "torchdata": "lost [6, 7, 8, 9, 10, 11], twice []",
        "litdata": "lost [], twice [4, 5]",
        "grain": "lost [6, 7, 8, 9, 10, 11], twice []",
    }, "the behaviour has changed"
PYTHON
"$folder/env/bin/python" run.py 2> errors || { cat errors; exit 1; }

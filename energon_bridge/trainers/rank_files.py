"""The files in which Megatron-LM and Megatron-Bridge keep the state of the data, one for each data-parallel rank.

A file is what `torch.save({"dataloader_state_dict": state}, path)` writes, with `save_state()` of a rank as the state:

    Megatron-LM      ROOT/iter_0000100/mp_rank_00/train_dataloader_dprank000.pt    (mp_rank_00_000 with pipelines)
    Megatron-Bridge  ROOT/iter_0000100/train_dataloader_dprank000.pt

A state holds the lanes of its rank. Together, the files of an iteration hold every lane exactly once, whatever the
number of ranks was; so they are read together, and a run can resume on any number of ranks. Files left over from an
earlier run in the same folder show up as duplicate lanes or as different steps, and raise an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from energon_bridge.core.errors import MissingRankError, StateError, StateFormatError, StepMismatchError
from energon_bridge.core.loader.saved_run import State, read_lanes
from energon_bridge.core.loader.state_files import read_states
from energon_bridge.trainers.replica.groups import all_told

T = TypeVar("T")

_NAME = re.compile(r"train_dataloader_dprank(\d+)\.pt")


def read_rank_files(root: str | os.PathLike[str], iteration: int, *, group: Any = None) -> list[State]:
    """Return the states of all ranks at an iteration, after checking that they are complete and of one run.

    Args:
        root: `--dataloader-save`, or the folder of Megatron-Bridge.
        iteration: Iteration of the checkpoint.
        group: Process group whose ranks all call this and share the reading, so that each file is read once and not by
            every rank; None reads all files here.

    Raises:
        StateFormatError: There are no files, one cannot be read, or a lane occurs twice.
        StepMismatchError: The files are from different steps.
        MissingRankError: Files are missing.
    """
    folder = Path(root) / f"iter_{iteration:07d}"
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    # Listed by one rank, because others may see new files later.
    files = _of_all(lambda: [] if rank else _files(folder), group)[0]
    states: list[Any] = [None] * len(files)
    for first, read in enumerate(_of_all(lambda: [_read(path) for path in files[rank::ranks]], group)):
        states[first::ranks] = read
    _check_one_run(folder, files, states)
    return states


def _of_all(make: Callable[[], T], group: Any) -> list[T]:
    """Return the results of all ranks of a group, in order; an error on one of them is raised on all."""
    if group is None or group.size() == 1:
        return [make()]
    own: T | StateError
    try:
        own = make()
    except StateError as error:
        own = error
    except Exception as error:  # the others wait for an answer
        own = StateFormatError(f"rank {group.rank()} of {group.size()} failed to read its files: {error!r}")
    answers: list[Any] = all_told(own, group)
    for one in answers:
        if isinstance(one, StateError):
            raise one
    return answers


def _files(folder: Path) -> list[Path]:
    """Return the files of an iteration; raises if there is a gap in their numbers."""
    files = sorted(path for path in folder.rglob("train_dataloader_dprank*.pt") if _NAME.fullmatch(path.name))
    if not files:
        raise StateFormatError(
            f"{folder}: contains no state of the data (train_dataloader_dprank000.pt and so on). Give the folder of "
            "--dataloader-save; to start the data from the beginning, give none"
        )
    numbers = {int(path.name.removeprefix("train_dataloader_dprank").removesuffix(".pt")) for path in files}
    missing = sorted(set(range(max(numbers) + 1)) - numbers)
    if missing:
        raise MissingRankError(
            f"{folder}: train_dataloader_dprank{missing[0]:03d}.pt is missing, but the one of rank {max(numbers)} "
            f"exists: the checkpoint was not completely written or copied. Use an earlier one"
        )
    return files


def _read(path: Path) -> State:
    states = read_states([path])
    if len(states) > 1:
        raise StateFormatError(f"{path}: contains {len(states)} states; expected one in the file of a rank")
    return states[0]


def _check_one_run(folder: Path, files: Sequence[Path], states: Sequence[State]) -> None:
    owner: dict[int, Path] = {}
    for path, state in zip(files, states, strict=True):
        if state["microbatches"] != states[0]["microbatches"]:
            raise StepMismatchError(
                f"{folder}: {files[0].relative_to(folder)} was saved after {states[0]['microbatches']} microbatches of "
                f"the run, {path.relative_to(folder)} after {state['microbatches']}: one of them is left over from an "
                "earlier run in this folder. Delete it, or use another checkpoint"
            )
        for lane in read_lanes(state):
            if lane in owner:
                raise StateFormatError(
                    f"{folder}: lane {lane} is in {owner[lane].relative_to(folder)} and in "
                    f"{path.relative_to(folder)}: the files were written by different numbers of ranks, so some are "
                    "left over from an earlier run in this folder. Delete the older ones"
                )
            owner[lane] = path
    lanes = states[0]["num_lanes"]
    if len(owner) < lanes:
        raise MissingRankError(
            f"{folder}: the {len(files)} files hold {len(owner)} of the {lanes} lanes of the run, so files of more "
            "ranks are missing. The checkpoint was not completely written or copied. Use an earlier one"
        )

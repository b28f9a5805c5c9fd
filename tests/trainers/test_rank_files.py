"""The files in which trainers keep the state of each rank: read as a whole, by all ranks together, refused by name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from made import made_once
from megatron.core import parallel_state
from rank_states import rank_file, write_rank_file
from replicas import on_ranks, save_files

from energon_bridge.core.errors import MissingRankError, StateError, StateFormatError, StepMismatchError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers import rank_files
from energon_bridge.trainers.rank_files import read_rank_files

dataset = made_once(create_captioning_test_dataset, num_train=48, num_val=7)


@pytest.fixture
def files(dataset: Path, tmp_path: Path) -> Path:
    """Files of two data-parallel ranks after four microbatches, in the folder of iteration 1."""
    save_files(dataset, tmp_path / "data", 2, 2)
    return tmp_path / "data"


def test_states_are_plain(files: Path) -> None:
    path = rank_file(files, 1, 1)
    assert isinstance(torch.load(path)["dataloader_state_dict"], dict)
    assert [path.name for path in path.parent.iterdir() if path.suffix != ".pt"] == []
    assert len(read_rank_files(files, 1)) == 2


def truncate(files: Path) -> None:
    path = rank_file(files, 1, 1)
    path.write_bytes(path.read_bytes()[:-400])


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (lambda files, dataset: truncate(files), StateFormatError, "dprank001.pt: neither JSON nor a torch.save file"),
        (lambda files, dataset: rank_file(files, 1, 1).unlink(), MissingRankError, "hold 4 of the 8 lanes"),
        (lambda files, dataset: rank_file(files, 1, 0).unlink(), MissingRankError, "dprank000.pt is missing"),
        (lambda files, dataset: shutil.rmtree(files), StateFormatError, "contains no state of the data"),
        (
            lambda files, dataset: save_files(dataset, files, 4, 2) or save_files(dataset, files, 2, 1),
            StepMismatchError,
            "left over from an earlier run",
        ),
        (
            lambda files, dataset: save_files(dataset, files, 4, 1) or save_files(dataset, files, 2, 2),
            StateFormatError,
            "written by different numbers of ranks",
        ),
        (
            lambda files, dataset: save_files(dataset, files, 2, 2, pipelines=True),
            StateFormatError,
            "lane 0 is in mp_rank_00/train_dataloader_dprank000.pt and in mp_rank_00_000/train",
        ),
        (
            lambda files, dataset: write_rank_file(rank_file(files, 1, 1), {"sample": 3}),
            StateFormatError,
            "dprank001.pt: contains no state of energon_bridge",
        ),
    ],
    ids=["half written", "last missing", "first missing", "nothing", "steps", "old ranks", "both layouts", "foreign"],
)
def test_files_that_do_not_fit_are_refused(
    damage: Any, error: type[StateError], text: str, files: Path, dataset: Path
) -> None:
    damage(files, dataset)
    with pytest.raises(error, match=text):
        read_rank_files(files, 1)


def read_together(files: Path) -> tuple[Any, list[str]]:
    """Return what a rank gets that reads with the others, or the error, and the files that it opened."""
    opened: list[str] = []
    read = rank_files._read
    rank_files._read = lambda path: opened.append(path.name) or read(path)  # type: ignore[func-returns-value]
    try:
        return read_rank_files(files, 1, group=parallel_state.get_data_parallel_group()), opened
    except StateError as error:
        return f"{type(error).__name__}: {error}", opened


def test_ranks_share_the_reading(dataset: Path, tmp_path: Path) -> None:
    files = tmp_path / "data"
    save_files(dataset, files, 4, 1)
    found = on_ranks(3, lambda rank: read_together(files))
    alone = read_rank_files(files, 1)
    assert [states for states, _ in found] == [alone] * 3
    assert [opened for _, opened in found] == [
        ["train_dataloader_dprank000.pt", "train_dataloader_dprank003.pt"],
        ["train_dataloader_dprank001.pt"],
        ["train_dataloader_dprank002.pt"],
    ]


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")], ids=["damaged file", "anything"])
def test_what_fails_on_one_rank_is_raised_on_all(
    error: Exception | None, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if error is None:
        truncate(files)
        expected = "StateFormatError: .*dprank001.pt: neither JSON nor a torch.save file"
    else:
        read = rank_files._read

        def fail(path: Path) -> Any:
            if "dprank001" in path.name:
                raise error
            return read(path)

        monkeypatch.setattr(rank_files, "_read", fail)
        expected = "StateFormatError: rank 1 of 3 failed to read its files: RuntimeError.*out of memory"
    for found, _ in on_ranks(3, lambda rank: read_together(files)):
        assert re.match(expected, found)


def test_files_that_only_the_first_rank_sees_yet_are_read(dataset: Path, files: Path) -> None:
    def read(rank: int) -> Any:
        if rank:
            rank_files._files = lambda folder: pytest.fail("only the first rank lists the folder")
        return read_together(files)[0]

    assert on_ranks(2, read) == [read_rank_files(files, 1)] * 2

"""`energon quarantine show`: the failures of a run, by kind and by name, from the files of all its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import answer, output_of, refusal_of
from engine import PackingEncoder, deliver, loaders_of, text_dataset, train_dataset
from made import made_once

from energon_bridge import DefaultTaskEncoder, ErrorPolicy


class Failing(DefaultTaskEncoder):
    """Fails on every fifth sample, in two ways."""

    def encode_sample(self, sample: Any) -> Any:
        index = sample.__restore_key__[1]
        if index % 10 == 0:
            raise ValueError(f"no [bold]{index}[/bold]")
        if index % 5 == 0:
            raise LookupError("gone")
        return sample


class FailingPacks(PackingEncoder):
    """Fails on a whole pack now and then."""

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        if any(sample.__restore_key__[1] == 7 for sample in samples):
            raise ValueError("not this pack")
        return super().pack_selected_samples(samples)


data = made_once(text_dataset, train=[9, 14, 7])


@pytest.fixture(scope="module")
def file(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the quarantine file of a run of two ranks."""
    file = tmp_path_factory.mktemp("files") / "bad.jsonl"
    policy = ErrorPolicy(quarantine=file, tolerance=0)
    for rank in range(2):
        dataset = train_dataset(data, task_encoder=Failing(), error_policy=policy)  # of its own, as in a process
        deliver(loaders_of(dataset, 2, 0)[rank : rank + 1], 60)
    assert sorted(path.name for path in file.parent.iterdir()) == ["bad.rank0.jsonl", "bad.rank1.jsonl"]
    return file


def test_failures_are_counted_by_kind_and_named(data: Path, file: Path) -> None:
    found = answer("quarantine", "show", file)
    assert found["kinds"] == [
        {"dataset": str(data), "hook": "encode_sample", "error": error, "count": 3, "samples": 3}
        for error in ("LookupError", "ValueError")
    ]
    assert [one["index"] for one in found["failures"]] == [0, 5, 10, 15, 20, 25]
    first = found["failures"][0]
    assert first["shard"] == "train/shard_000.tar"
    assert first["message"] == "no [bold]0[/bold]"
    assert first["members"] == []


def test_people_get_the_same(data: Path, file: Path) -> None:
    output = output_of("quarantine", "show", file)
    for text in (str(data), "encode_sample", "ValueError", "no [bold]20[/bold]", "train/shard_001.tar"):
        assert text in output
    assert "more" not in output
    short = output_of("quarantine", "show", file, "--limit", 2)
    assert "no [bold]20[/bold]" not in short
    assert "4 more: --limit 6 names them all." in short


def test_files_of_ranks_may_be_given_one_by_one(file: Path) -> None:
    ranks = sorted(file.parent.iterdir())
    whole = answer("quarantine", "show", file)
    assert answer("quarantine", "show", *ranks) == whole == answer("quarantine", "show", file, *ranks)
    parts = [answer("quarantine", "show", rank)["failures"] for rank in ranks]
    assert all(parts)


def test_excludes_are_entries_for_split_yaml(data: Path, file: Path) -> None:
    entries = answer("quarantine", "show", file, "--excludes")
    assert list(entries) == [str(data)]
    assert len(entries[str(data)]) == 6
    output = output_of("quarantine", "show", file, "--excludes")
    assert output.splitlines()[:2] == [f"{data}:", f"  - {entries[str(data)][0]}"]


def test_a_pack_that_failed_is_named_by_its_first_sample(data: Path, tmp_path: Path) -> None:
    policy = ErrorPolicy(quarantine=tmp_path / "bad.jsonl", tolerance=0)
    dataset = train_dataset(data, task_encoder=FailingPacks(), error_policy=policy, packing_buffer_size=7)
    deliver(loaders_of(dataset, 1, 0), 60)
    found = answer("quarantine", "show", tmp_path / "bad.jsonl")
    (kind,) = found["kinds"]
    assert (kind["hook"], kind["error"]) == ("pack_selected_samples", "ValueError")
    assert kind["samples"] > kind["count"] >= 1
    one = found["failures"][0]
    assert one["size"] == len(one["members"]) > 1
    assert one["members"][0]["index"] == one["index"]
    assert "not this pack" in output_of("quarantine", "show", tmp_path / "bad.jsonl")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no such quarantine file" in refusal_of("quarantine", "show", tmp_path / "gone.jsonl")

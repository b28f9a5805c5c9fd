"""`energon checkpoint`: what it shows of a state is what was delivered; whatever a state may lie in is read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import answer, energon, refusal_of
from engine import SkippingEncoder, text_dataset
from forecasts import opened, ranks_of, run, write_mixes
from made import made_once
from paths import TESTS

from energon_bridge import EnergonMultiModalDataModule, get_savable_loader, get_val_dataset
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.worker_config import WorkerConfig

data = made_once(write_mixes)


@pytest.fixture(scope="module")
def states(data: Path) -> list[Any]:
    """Return the states of four ranks after eleven steps, with an encoder that skips."""
    loaders = ranks_of(opened(data, "weights", SkippingEncoder()), 4)
    run(loaders, 11)
    return [loader.save_state_rank() for loader in loaders]


def show(path: Path, *others: Path) -> Any:
    return answer("checkpoint", "show", path, *others)


def test_counters_are_what_was_delivered(data: Path, tmp_path: Path) -> None:
    loader = ranks_of(opened(data, "weights", SkippingEncoder()), 1)[0]
    delivered = Counter(key[0] for step in run([loader], 50) for rows in step for key, _ in rows or ())
    rows = loader.counters()
    assert {row["identity"]: row["samples"] for row in rows} == delivered
    assert sum(row["samples"] for row in rows) == 100
    for row in rows:
        assert row["draws"] == row["samples"] + row["skipped"]
        assert row["epochs"] == row["draws"] / row["num_samples"]
        assert row["bytes"] > 0
        assert row["errors"] == row["excluded"] == 0
        assert row["split_part"] == "train"
    (tmp_path / "s.json").write_text(json.dumps(loader.save_state_rank()))
    found = show(tmp_path / "s.json")
    assert [row | {"encoded_again": 0} for row in found["leaves"]] == rows
    assert found["totals"]["samples"] == 100
    assert found["draws"] == sum(row["draws"] for row in rows)
    assert (found["kind"], found["microbatches"], found["num_lanes"], found["missing_lanes"]) == ("train", 50, 24, [])
    assert found["settings"]["batch_size"] == 2


FORMS = {
    "torch": lambda state: state,
    "megatron": lambda state: {"dataloader_state_dict": state, "iteration": 11},
    "list": lambda state: [state],
    "nested": lambda state: {"extra": {"data": (state, {"other": 1})}, "model": {"w": torch.ones(300)}},
    "lightning": lambda state: {
        "state_dict": {"w": torch.ones(3)},
        "EnergonMultiModalDataModule": {"global_step": 3, "train": state},
        "loops": {"fit_loop": {"combined_loader": [state | {"microbatches": state["microbatches"] - 1}]}},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_file_is_read(states: list[Any], tmp_path: Path, form: str) -> None:
    whole = merge(states)
    torch.save(FORMS[form](whole), tmp_path / "file")
    found = show(tmp_path / "file")
    (tmp_path / "plain.json").write_text(json.dumps(whole))
    assert found == show(tmp_path / "plain.json")
    torch.save(FORMS[form](whole), tmp_path / "old", _use_new_zipfile_serialization=False)
    assert show(tmp_path / "old") == found


def test_the_state_of_the_data_module(tmp_path: Path) -> None:
    root = text_dataset(tmp_path / "data", train=[20], val=[4])
    module = EnergonMultiModalDataModule(
        str(root), None, None, micro_batch_size=2, num_workers=0, task_encoder=SkippingEncoder()
    )
    batches = iter(module.train_dataloader())
    for _ in range(3):
        next(batches)
    torch.save({"EnergonMultiModalDataModule": module.state_dict(), "epoch": 0}, tmp_path / "last.ckpt")
    module.close()
    assert show(tmp_path / "last.ckpt")["microbatches"] == 3


def test_files_of_ranks(states: list[Any], tmp_path: Path) -> None:
    files = [tmp_path / f"rank_{rank}.pt" for rank in range(4)]
    for path, state in zip(files, states, strict=True):
        torch.save({"dataloader_state_dict": state}, path)
    whole = show(*files)
    assert whole["missing_lanes"] == []
    (tmp_path / "whole.json").write_text(json.dumps(merge(states)))
    assert whole | {"states": 1, "ranks": []} == show(tmp_path / "whole.json")
    torch.save(states, tmp_path / "list.pt")
    assert show(tmp_path / "list.pt") == whole
    part = show(files[2], files[1])
    assert part["ranks"] == [[2, 4], [1, 4]]
    assert len(part["missing_lanes"]) == 12
    output = energon("checkpoint", "show", files[2], files[1]).output
    assert "lanes:    12 of 24; missing: " in output
    assert "ranks:    1, 2 of 4; missing: 0, 3" in output
    assert sum(row["samples"] for row in part["leaves"]) == 2 * 2 * 11


def test_the_table_and_states_of_different_lanes(states: list[Any], data: Path, tmp_path: Path) -> None:
    torch.save(states, tmp_path / "state.pt")
    for name in ("show", "info"):
        output = energon("checkpoint", name, tmp_path / "state.pt").output
        assert "position: microbatch 44 of the run" in output
        assert "lanes:    24, all here" in output
        assert "batch_size=2" in output
        assert output.count(f"{data / 'a'} [train]") == 2
    for rank in (0, 1):
        torch.save(states[rank], tmp_path / f"{rank}.pt")
    found = answer("checkpoint", "diff", tmp_path / "0.pt", tmp_path / "1.pt")
    assert not found["comparable"]
    assert {row["draws"] for row in found["progress"]} == {None}


def test_validation_passes_and_weights_of_a_run(data: Path, tmp_path: Path) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    loader = get_savable_loader(get_val_dataset(data / "concat.yaml", batch_size=4, worker_config=config))
    for _ in zip(range(2), loader, strict=False):
        pass
    (tmp_path / "val.json").write_text(json.dumps(loader.save_state_rank()))
    found = show(tmp_path / "val.json")
    assert (found["kind"], found["microbatches"], found["draws"]) == ("finite", 2, None)
    assert [row["epochs"] for row in found["leaves"]] == [None, None]
    assert "validation" in energon("checkpoint", "show", tmp_path / "val.json").output
    loader = ranks_of(opened(data, "weights"), 1)[0]
    start = loader.set_weights([5, {"schedule": "steps", "points": [[0, 2], [9, 4]]}, 1])
    (tmp_path / "set.json").write_text(json.dumps(loader.save_state_rank()))
    output = energon("checkpoint", "show", tmp_path / "set.json").output
    assert f"Weights from global draw {start} on" in output
    assert f"steps 0: 2 → 9: 4  {data / 'b'} [train]" in output


def test_parked_leaves_are_marked(data: Path, tmp_path: Path) -> None:
    loader = ranks_of(opened(data, "weights"), 1)[0]
    run([loader], 9)
    first = tmp_path / "first.json"
    first.write_text(json.dumps(loader.save_state_rank()))
    other = ranks_of(opened(data, "subset"), 1)[0]
    other.restore_state_rank(loader.save_state_rank(), on_mismatch="adapt")
    run([other], 2)
    second = tmp_path / "second.json"
    second.write_text(json.dumps(other.save_state_rank()))
    assert [row["parked"] for row in show(second)["leaves"]] == [False, False, True, True, True]
    assert energon("checkpoint", "show", second).output.count("(parked)") == 3
    found = answer("checkpoint", "diff", first, second)
    assert sum(line.endswith("is parked now") for line in found["leaves"]) == 3
    assert found["microbatches"] == 2


# --- diff ---------------------------------------------------------------------------------------------------------


def test_diff_of_positions(data: Path, tmp_path: Path) -> None:
    loader = ranks_of(opened(data, "weights", SkippingEncoder()), 1)[0]
    run([loader], 20)
    before = loader.counters()
    torch.save(loader.save_state_rank(), tmp_path / "a.pt")
    run([loader], 7)
    torch.save(loader.save_state_rank(), tmp_path / "b.pt")
    found = answer("checkpoint", "diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (found["settings"], found["leaves"], found["weights"], found["microbatches"]) == ([], [], [], 7)
    for row, past, now in zip(found["progress"], before, loader.counters(), strict=True):
        for name in ("draws", "samples", "skipped", "bytes"):
            assert row[name] == now[name] - past[name]
    assert sum(row["samples"] for row in found["progress"]) == 14
    output = energon("checkpoint", "diff", tmp_path / "a.pt", tmp_path / "b.pt").output
    assert "B is +7 microbatches from A." in output
    assert "The settings and the mix are the same." in output
    assert "Both are at the same position" in energon("checkpoint", "diff", tmp_path / "a.pt", tmp_path / "a.pt").output


def test_diff_of_settings_and_mixes(data: Path, tmp_path: Path) -> None:
    def saved(name: str, folder: Path, mix: str, **kwargs: Any) -> Path:
        loader = ranks_of(opened(folder, mix, **kwargs), 1)[0]
        run([loader], 2)
        (tmp_path / name).write_text(json.dumps(loader.save_state_rank()))
        return tmp_path / name

    first = saved("first", data, "weights")
    moved = write_mixes(tmp_path / "moved")
    output = energon("checkpoint", "diff", first, saved("second", moved, "weights", batch_size=3)).output
    assert "~ batch_size: 2 is 3 now" in output
    assert f"~ {data / 'a'} [train] has moved to {moved / 'a'}, with the same content" in output
    split = moved / "a/.nv-meta/split.yaml"
    split.write_text(yaml.safe_dump(yaml.safe_load(split.read_text()) | {"exclude": ["train/shard_000.tar/00001"]}))
    output = energon("checkpoint", "diff", tmp_path / "second", saved("third", moved, "weights")).output
    assert ": the content changed\n" in output
    assert "\n  Content: shards, sample counts and sizes, `exclude` and dataset.yaml.\n" in output
    output = energon("checkpoint", "diff", first, saved("fourth", data, "linear")).output
    assert f"- {data / 'a'} [train]" in output
    assert f"~ {data / 'b'} [train], 30 samples" in output
    assert "weight 2/9 is 1/3 now" in output
    assert "schedule: None is '" in output


# --- files that are no states -------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("evil", "w"))


def write_bad(path: Path, kind: str, state: Any) -> None:
    if kind == "pickle":
        torch.save({"state": Evil()}, path)
    elif kind == "truncated":
        torch.save(state, path)
        path.write_bytes(path.read_bytes()[:200])
    elif kind in ("empty", "text", "half json"):
        path.write_bytes({"empty": b"", "text": b"step 3\n", "half json": b'{"format": "energ'}[kind])
    elif kind == "of megatron-energon":
        path.write_bytes((TESTS / "fixtures/energon-7.4.1-state-0-workers.pt").read_bytes())
    elif kind == "foreign":
        path.write_text(json.dumps({"rng": [1, 2], "dataset": {"offset": 3}}))
    else:
        changed = {
            "newer": {"format_version": 99},
            "order": {"order_version": 99},
            "column": {"lanes": state["lanes"] | {"draws": "no column"}},
            "incomplete": {"leaves": {}},
        }[kind]
        path.write_text(json.dumps(state | changed))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "No such file"),
        ("folder", "pass the files in it"),
        ("empty", "neither JSON nor a torch.save file"),
        ("text", "neither JSON nor a torch.save file"),
        ("truncated", "neither JSON nor a torch.save file"),
        ("pickle", "would run code"),
        ("half json", "begins like JSON"),
        ("foreign", "contains no state of energon_bridge"),
        ("of megatron-energon", "a state of megatron-energon (SavableDataLoaderState)"),
        ("of megatron-energon", "start_at=STEP"),
        ("newer", "upgrade energon_bridge"),
        ("order", "order version"),
        ("column", "damaged"),
        ("incomplete", "damaged"),
    ],
)
@pytest.mark.parametrize("command", [("checkpoint", "show"), ("checkpoint", "diff"), ("which", "--step", "3")])
def test_what_is_no_state_is_said_to_be_none(
    states: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    kind: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        write_bad(path, kind, states[0])
    if kind == "folder" and command[0] == "which":
        return  # a folder is a dataset there
    files = (path, path) if command[-1] == "diff" else (path,)
    output = refusal_of(*command, *files)
    assert output.startswith(f"Error: {path}: ")
    assert message in output
    assert not (tmp_path / "evil").exists()


def test_states_of_different_steps_do_not_make_one(states: list[Any], data: Path, tmp_path: Path) -> None:
    loader = ranks_of(opened(data, "weights", SkippingEncoder()), 4)[1]
    run([loader], 12)
    torch.save([states[0], loader.save_state_rank()], tmp_path / "s.pt")
    assert "saved at different steps" in refusal_of("checkpoint", "show", tmp_path / "s.pt")


def test_json_is_shown_without_torch(states: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(states[0]))
    lines = [["checkpoint", "show", str(path)], ["plan", "-h"], ["which", "-h"], ["checkpoint", "diff", "-h"]]
    script = (
        "import json, sys\nfrom energon_bridge.tools.cli.main import main\nfor line in json.loads(sys.argv[1]):\n"
        "    main(line, standalone_mode=False)\n    print('with torch:', 'torch' in sys.modules)\n"
    )
    call = [sys.executable, "-c", script, json.dumps(lines)]
    output = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert re.findall("with torch: .*", output) == ["with torch: False"] * 4


def test_bans_are_listed(data: Path, tmp_path: Path) -> None:
    loader = get_savable_loader(opened(data, "weights"))
    (tmp_path / "before.json").write_text(json.dumps(loader.save_state_rank()))
    loader.ban(["00003", "00001"])
    loader.ban(["00005"], from_draw=1000, dataset=str(data / "b"))
    run([loader], 48)
    (tmp_path / "after.json").write_text(json.dumps(loader.save_state_rank()))
    shown = energon("checkpoint", "show", tmp_path / "after.json").output
    assert "Banned from global draw 0 on, in all datasets: 2 keys: 00001, 00003\n" in shown
    assert f"Banned from global draw 1,000 on, in {data / 'b'}: 1 keys: 00005\n" in shown
    difference = energon("checkpoint", "diff", tmp_path / "before.json", tmp_path / "after.json").output
    assert "- banned: none\n+ banned: 2 keys from global draw 0 on, 1 keys from global draw 1,000 on\n" in difference
    summary = answer("checkpoint", "show", tmp_path / "after.json")
    assert summary["totals"]["banned"] == sum(row["banned"] for row in loader.counters()) > 0
    assert summary["bans"][1] == {"from_draw": 1000, "keys": ["00005"], "dataset": str(data / "b")}


def test_redist_says_why_it_is_not_needed() -> None:
    output = refusal_of("checkpoint", "redist", "a.pt", "b.pt", "out", "--new-world-size", 4)
    assert "a state fits any number of ranks and workers as it is" in output

"""`energon which` names what real loaders deliver, from a mix and from states, and says what its answer assumes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import answer, energon, output_of, refusal_of
from engine import ENCODERS, SeveralEncoder, SkippingEncoder, TensorEncoder, config_of, with_prepared
from forecasts import MIXES, NEEDS_MIX, OPTIONS, Delivered, opened, ranks_of, run, write_mixes
from full_disk import no_room
from keyed import KEYS, join, keyed_dataset, shards, shuffled, write_mix
from made import made_once

from energon_bridge import SampleDecoder, get_savable_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.saved_run import read, read_lanes
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.tools.forecast.planned_run import run_of_mix, spec_of_state
from energon_bridge.tools.forecast.samples import assumption
from energon_bridge.tools.testing import create_captioning_test_dataset

LANES = ("--num-lanes", 24)
ON_RANKS = [*zip(MIXES, cycle([5, 1, 3, 4]))]


data = made_once(write_mixes)


def restore_keys(found: dict[str, Any]) -> list[list[tuple[Any, ...]] | None]:
    """Return the restore keys of an answer by rank, None for a masked microbatch."""
    return [
        None if one["microbatch"] is None else [tuple(sample["restore_key"]) for sample in one["samples"]]
        for one in found["microbatches"]
    ]


def delivered_keys(step: list[list[tuple[tuple[Any, ...], str]] | None]) -> list[list[tuple[Any, ...]] | None]:
    return [None if rows is None else [key for key, _ in rows] for rows in step]


def check(delivered: Delivered, steps: list[int], *arguments: object) -> None:
    for step in steps:
        assert restore_keys(answer("which", *arguments, "--step", step)) == delivered_keys(delivered[step])


@pytest.mark.parametrize(("mix", "ranks"), ON_RANKS)
def test_a_mix_and_a_state_name_what_is_delivered(data: Path, tmp_path: Path, mix: str, ranks: int) -> None:
    dataset = opened(data, mix)
    loaders = ranks_of(dataset, ranks)
    delivered = run(loaders, 11)
    torch.save([loader.save_state_rank() for loader in loaders], tmp_path / "state.pt")
    delivered += run(loaders, 15)
    check(delivered, [0, 4, 13, 25], data / f"{mix}.yaml", *OPTIONS, *LANES, "--world-size", ranks)
    arguments = (tmp_path / "state.pt", "--world-size", ranks)
    if mix in NEEDS_MIX:
        assert "--mix" in refusal_of("which", *arguments, "--step", 3)
        arguments += ("--mix", data / f"{mix}.yaml")
    check(delivered, [0, 5, 10, 11, 12, 20, 25], *arguments)
    assert answer("which", *arguments, "--step", 3)["assumption"].startswith("Exact")


def test_a_step_is_one_of_the_optimizer(data: Path, tmp_path: Path) -> None:
    dataset = opened(data, "weights")
    delivered = run(ranks_of(dataset, 2), 18)
    loaders = ranks_of(dataset, 2)
    run(loaders, 6)
    torch.save([loader.save_state_rank() for loader in loaders], tmp_path / "state.pt")
    accumulated = ("--world-size", 2, "--global-batch-size", 3 * 2 * 2)
    for source in ((data / "weights.yaml", *OPTIONS, *LANES), (tmp_path / "state.pt",)):
        for step in (0, 2, 5):
            found = restore_keys(answer("which", *source, *accumulated, "--step", step))
            assert found == [rank for turn in range(3 * step, 3 * step + 3) for rank in delivered_keys(delivered[turn])]
        assert "A step is 3 microbatches on each rank." in energon("which", *source, *accumulated, "--step", 2).output
    state = ("which", tmp_path / "state.pt", "--world-size", 2, "--step", 6)
    assert restore_keys(answer(*state)) == delivered_keys(delivered[6])
    assert "with gradient accumulation, give --global-batch-size" in energon(*state).output
    assert "--global-batch-size 6 is not a multiple of 4" in energon(*state, "--global-batch-size", 6).output
    planned = answer("plan", data / "weights.yaml", *OPTIONS, *LANES, *accumulated, "--steps", 5)
    assert (planned["per_step"], planned["microbatches"]) == (3, 30)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_all_steps_up_to_one_are_written_to_a_file(data: Path, tmp_path: Path, kind: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet") if kind == "parquet" else None
    loaders = ranks_of(opened(data, "weights"), 2)
    delivered = run(loaders, 9)
    torch.save({"state": [loader.save_state_rank() for loader in loaders]}, tmp_path / "run.ckpt")
    out = tmp_path / f"seen.{kind}"
    arguments: tuple[Any, ...] = ("which", "--checkpoint", tmp_path / "run.ckpt", "--world-size", 2)
    output = output_of(*arguments, "--step", 2, "--until", 12, "--out", out)
    assert output.startswith(f"40 samples in {out}\nExact")
    with no_room():
        said = refusal_of(*arguments, "--step", 2, "--until", 12, "--out", out)
    assert re.search(rf"File too large.*{tmp_path} has [\d,]+ bytes free: make room", said)
    assert "as if no sample from there on is skipped" in output
    rows = parquet.read_table(out).to_pylist() if parquet else json.loads(out.read_text())
    assert {row["step"] for row in rows} == set(range(2, 12))
    found = [(row["step"], row["rank"], row["row"], row["restore_key"]) for row in rows if row["step"] < 9]
    assert found == [
        (step, rank, row, ":".join(map(str, key)))
        for step in range(2, 9)
        for rank, some in enumerate(delivered[step])
        for row, (key, _) in enumerate(some or ())
    ]
    assert {row["dataset"] for row in rows} == {str(data / "a"), str(data / "b")}
    printed = answer(*arguments, "--until", 3)["microbatches"]
    assert [one["step"] for one in printed] == [0, 0, 1, 1, 2, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tables_have_no_split_to_name(tmp_path: Path) -> None:
    """Neither does `checkpoint diff` name one, also of a table that has moved."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"text": [f"text {number}" for number in range(20)]})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        parquet.write_table(table, tmp_path / name / "a.parquet")
        dataset = get_train_dataset(tmp_path / name, batch_size=2, worker_config=config_of(1, 0))
        loader = ranks_of(dataset, 1)[0]
        run([loader], 1 + (name == "two"))
        (tmp_path / f"{name}.json").write_text(json.dumps(loader.save_state_rank()))
    found = output_of("which", tmp_path / "one", "--batch-size", 2, "--step", 0)
    found += output_of("which", tmp_path / "one", "--find", "text 7")
    found += output_of("checkpoint", "diff", tmp_path / "one.json", tmp_path / "two.json")
    assert f"~ {tmp_path / 'one'} has moved to {tmp_path / 'two'}, with the same content" in found
    assert found.count("a.parquet") == 3
    assert "[]" not in found


def test_keys_are_the_same_however_many_are_asked_for(tmp_path: Path) -> None:
    """Keys of a shard are looked up one by one at first, and then all at once."""
    path = create_captioning_test_dataset(tmp_path / "captions", num_train=60, samples_per_shard=30)
    arguments = ("which", path, "--batch-size", 5, *LANES)
    together = answer(*arguments, "--until", 30)["microbatches"]
    alone = [answer(*arguments, "--step", step)["microbatches"][0] for step in range(30)]
    assert [one["samples"] for one in together] == [one["samples"] for one in alone]
    loader = ranks_of(get_train_dataset(path, batch_size=5, worker_config=config_of(1, 0)), 1)[0]
    keys = [key for batch in islice(loader, 30) for key in batch.__key__]
    assert [sample["key"] for one in together for sample in one["samples"]] == keys


def test_files_of_no_sense_are_refused(data: Path) -> None:
    for arguments, message in (
        (("--until", 3, "--step", 3), "--until 3 must be above --step 3"),
        (("--until", 3, "--microbatch", 3), "either --step or --microbatch"),
        (("--step", 3, "--out", "x.csv"), "must end in .parquet or .json"),
    ):
        assert message in refusal_of("which", data / "single.yaml", *OPTIONS, *arguments)


@pytest.mark.parametrize("mix", ["weights", "linear"])
def test_weights_that_were_set_during_the_run(data: Path, tmp_path: Path, mix: str) -> None:
    dataset = opened(data, mix)
    loader = ranks_of(dataset, 1)[0]
    delivered = run([loader], 40)
    loader.set_weights([1, 9, 4][: len(dataset.leaves)])
    delivered += run([loader], 3)
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    delivered += run([loader], 20)
    arguments: tuple[Any, ...] = (tmp_path / "state.json",)
    if mix in NEEDS_MIX:
        arguments += ("--mix", data / f"{mix}.yaml")
    check(delivered, [0, 39, 40, 41, 43, 60], *arguments)


class Looking(TensorEncoder):
    """Has settings that change pixels, which states record, and not the order."""

    decoder = SampleDecoder(autorotate=True, image_target=64)
    pixel_settings = {"pixels": "torch", "brightness": "high"}  # noqa: RUF012


def test_settings_of_pixels_are_those_of_the_state(data: Path, tmp_path: Path) -> None:
    loaders = ranks_of(opened(data, "weights", Looking()), 2)
    delivered = run(loaders, 6)
    states = [loader.save_state_rank() for loader in loaders]
    assert {"autorotate", "image_target", "pixels", "brightness"} <= states[0]["settings"].keys()
    torch.save(states, tmp_path / "state.pt")
    check(delivered, [0, 3, 5], tmp_path / "state.pt", "--world-size", 2)
    check(delivered, [4], tmp_path / "state.pt", "--world-size", 2, "--mix", data / "weights.yaml")


def test_a_skipping_encoder_is_accounted_for_up_to_the_state(data: Path, tmp_path: Path) -> None:
    loader = ranks_of(opened(data, "weights", SkippingEncoder()), 1)[0]
    run([loader], 49)
    state = loader.save_state_rank()
    torch.save({"dataloader_state_dict": state}, tmp_path / "state.pt")
    # An encoder that skips nothing from there on delivers what the answer assumes.
    delivered = run(ranks_of(opened(data, "weights"), 1, state=state), 30)
    for step in (0, 1, 23, 24, 29):
        found = answer("which", tmp_path / "state.pt", "--step", 49 + step)
        assert restore_keys(found) == delivered_keys(delivered[step])
        assert "as if no sample from there on is skipped" in found["assumption"]
        assert "`energon preview --step N --encoder …` gives the exact answer" in found["assumption"]
    before = answer("which", tmp_path / "state.pt", "--step", 5)
    assert "as if no sample had been skipped" in before["assumption"]
    assert "`energon preview --step N --encoder …` gives the exact answer" in before["assumption"]
    assert restore_keys(before) == delivered_keys(run(ranks_of(opened(data, "weights"), 1), 6)[5])


def test_what_is_left_of_a_draw_comes_first(data: Path, tmp_path: Path) -> None:
    loader = ranks_of(opened(data, "weights", SeveralEncoder()), 1)[0]
    run([loader], 49)
    state = loader.save_state_rank()
    (tmp_path / "state.json").write_text(json.dumps(state))
    lanes = read_lanes(state)
    delivered = run([loader], 24)
    begun = [step for step in range(24) if lanes[(49 + step) % 24].taken]
    assert len(begun) > 3
    for step in begun:
        found = restore_keys(answer("which", tmp_path / "state.json", "--step", 49 + step))
        assert (found[0] or [])[0] == (delivered_keys(delivered[step])[0] or [])[0]


def test_the_counts_of_skips_stand_in_the_answer(data: Path, tmp_path: Path) -> None:
    loader = ranks_of(opened(data, "single", SkippingEncoder()), 1)[0]
    run([loader], 30)
    skipped = sum(row["skipped"] for row in loader.counters())
    assert skipped > 5
    (tmp_path / "s.json").write_text(json.dumps(loader.save_state_rank()))
    for step in (3, 33):
        assert (
            f"until the state {skipped:,} were skipped" in energon("which", tmp_path / "s.json", "--step", step).output
        )


def test_passes_and_validation(data: Path, tmp_path: Path) -> None:
    train = opened(data, "repetitions", repeat=False)
    loader = ranks_of(train, 1)[0]
    batches = [batch.__restore_key__[3] for _ in range(2) for batch in loader]
    (tmp_path / "passes.json").write_text(json.dumps(loader.save_state_rank()))
    for step in (0, 7, len(batches) - 1):
        found = restore_keys(answer("which", tmp_path / "passes.json", "--step", step))
        assert found == [list(batches[step])]
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    validation = get_val_dataset(data / "concat.yaml", batch_size=4, worker_config=config)
    loader = get_savable_loader(validation)
    batches = [batch.__restore_key__[3] for batch in loader]
    (tmp_path / "val.json").write_text(json.dumps(loader.save_state_rank()))
    for step in (0, 7, len(batches) - 1):
        assert restore_keys(answer("which", tmp_path / "val.json", "--step", step)) == [list(batches[step])]
    assert "Exact: nothing moves in a pass" in energon("which", tmp_path / "val.json", "--step", 0).output
    assert f"a pass has {len(batches)} steps" in refusal_of("which", tmp_path / "val.json", "--step", len(batches))
    ranks = restore_keys(answer("which", tmp_path / "val.json", "--step", 3, "--world-size", 3))
    assert ranks == [list(batches[9]), list(batches[10]), None]


def test_masked_microbatches_one_rank_and_one_row(data: Path) -> None:
    arguments = (data / "weights.yaml", *OPTIONS, *LANES, "--world-size", 5)
    assert restore_keys(answer("which", *arguments, "--step", 4))[4] is None
    assert "Masked, with rows of an earlier microbatch: rank 4" in energon("which", *arguments, "--step", 4).output
    (one,) = answer("which", *arguments, "--step", 6, "--rank", 2, "--row", 1)["microbatches"]
    assert (one["rank"], one["microbatch"], one["lane"]) == (2, 24 + 5 + 2, 7)
    assert [sample["row"] for sample in one["samples"]] == [1]
    (same,) = answer("which", *arguments, "--microbatch", 31, "--row", 1)["microbatches"]
    assert same["samples"] == one["samples"]


def test_names_of_shards_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = create_captioning_test_dataset(tmp_path / "data", num_train=20, num_val=0, image_size=4)
    prepare_dataset(root, split=parse_patterns(["train:.*"]), key_index=True)
    before = sorted(path.name for path in (root / ".nv-meta").iterdir())
    dataset = get_train_dataset(root, batch_size=4, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0))
    batches = iter(get_savable_loader(dataset))
    expected = [list(next(batches).__key__) for _ in range(3)]
    # No byte of a shard or of its index is read.
    for name in ("read_range", "read_ranges"):
        monkeypatch.setattr(f"energon_bridge.core.storage.local.LocalStore.{name}", _refuse)
    for step, keys in enumerate(expected):
        (one,) = answer("which", root, "--batch-size", 4, "--step", step)["microbatches"]
        assert [sample["key"] for sample in one["samples"]] == keys
        assert {sample["excluded"] for sample in one["samples"]} == {False}
        assert all((root / sample["shard"]).is_file() for sample in one["samples"])
    assert sorted(path.name for path in (root / ".nv-meta").iterdir()) == before


def test_a_join_names_its_rows(tmp_path: Path) -> None:
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 8, 12), exclude=["train/0.tar/k03"])
    keyed_dataset(tmp_path / "b", train=shards(shuffled(KEYS)[:15], 5, 10))
    mix = write_mix(tmp_path / "mix.yaml", train={"blend": [join({}, {"nonmatch": "skip"}, weight=2)]})
    dataset = get_train_dataset(mix, batch_size=2, worker_config=config_of(1, 0))
    loader = ranks_of(dataset, 1)[0]
    delivered = run([loader], 9)
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    for arguments in ((mix, "--batch-size", 2, *LANES), (tmp_path / "state.json", "--mix", mix)):
        for step in (0, 8):
            found = answer("which", *arguments, "--step", step)
            assert restore_keys(found) == delivered_keys(delivered[step])
            samples = found["microbatches"][0]["samples"]
            assert [sample["key"] for sample in samples] == [key for _, key in delivered[step][0] or ()]
            for sample in samples:
                assert sample["key"] == shards(KEYS, 8, 12)[int(sample["shard"][6])][sample["shard_index"]]
    assert "how datasets are joined" in refusal_of("which", tmp_path / "state.json", "--step", 8)


def test_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(40)))
    loader = ranks_of(get_train_dataset(path, batch_size=2, worker_config=config_of(1, 0)), 1)[0]
    batches = iter(loader)
    delivered = [[list(batch["__restore_key__"][3])] for batch in islice(batches, 9)]
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    for arguments in ((path, "--batch-size", 2, *LANES), (tmp_path / "state.json",)):
        found = answer("which", *arguments, "--step", 8)
        assert restore_keys(found) == delivered[8]
        assert all(sample["index"] == sample["shard_index"] for sample in found["microbatches"][0]["samples"])


@pytest.mark.parametrize("encoder", ["packing", "grouping", "batches"])
def test_what_the_content_of_samples_decides_is_refused(data: Path, tmp_path: Path, encoder: str) -> None:
    size = {"packing": {"packing_buffer_size": 9}, "grouping": {"batch_size": None}}.get(encoder, {})
    loader = ranks_of(opened(data, "weights", ENCODERS[encoder](), **size), 1)[0]
    for _ in islice(loader, 30):
        pass
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    held = answer("checkpoint", "show", tmp_path / "state.json")["held"]
    assert held > 0
    assert f"not delivered yet: {held} samples" in refusal_of("which", tmp_path / "state.json", "--step", 40)


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("data was read")


# --- refusals -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_named_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    loaders = ranks_of(opened(data, "single"), 4)
    run(loaders, 3)
    states = [loader.save_state_rank() for loader in loaders]
    for rank, state in enumerate(states):
        torch.save(state, tmp_path / f"rank{rank}.pt")
    every = [tmp_path / f"rank{rank}.pt" for rank in range(4)]
    assert restore_keys(answer("which", *every, "--step", 4)) == restore_keys(
        answer("which", data / "a", *OPTIONS, *LANES, "--world-size", 4, "--step", 4)
    )
    assert "the state holds 6 of 24 lanes" in refusal_of("which", every[0], "--step", 4)
    assert "where no step of 5 ranks starts" in refusal_of("which", *every, "--world-size", 5, "--step", 4)
    assert "cannot share 24 lanes" in refusal_of("which", *every, "--world-size", 25, "--step", 4)
    assert "--rank 4 is not below" in refusal_of("which", *every, "--step", 4, "--rank", 4)
    assert "either --step or --microbatch" in refusal_of("which", *every)
    assert "--batch-size" in refusal_of("which", data / "a", "--step", 4)
    assert "identity" in refusal_of("which", *every, "--step", 4, "--mix", data / "b")


def test_a_pass_of_a_program_for_megatron_energon_is_refused_as_such(data: Path) -> None:
    (loader,) = ranks_of(get_val_dataset(data / "a", batch_size=2, worker_config=config_of(1, 0)), 1)
    next(iter(loader))
    saved = read(loader.save_state_rank())
    of_drop_in = replace(saved, settings={**saved.settings, "dp_size": 1, "num_workers": 2, "limit": None})
    with pytest.raises(ConfigurationError, match="validation pass of a program written for megatron-energon"):
        spec_of_state(of_drop_in, world_size=1)


def test_a_dataset_that_changed_and_a_mix_that_changed(data: Path, tmp_path: Path) -> None:
    root = write_mixes(tmp_path / "own")
    loader = ranks_of(opened(root, "weights"), 1)[0]
    run([loader], 30)
    (tmp_path / "old.json").write_text(json.dumps(loader.save_state_rank()))
    other = ranks_of(opened(root, "subset"), 1)[0]
    other.restore_state_rank(loader.save_state_rank(), on_mismatch="adapt")
    (tmp_path / "adapted.json").write_text(json.dumps(other.save_state_rank()))
    delivered = run([other], 3)
    assert restore_keys(answer("which", tmp_path / "adapted.json", "--step", 31)) == delivered_keys(delivered[1])
    assert "the mix changed in between" in refusal_of("which", tmp_path / "adapted.json", "--step", 29)
    (root / "a" / ".nv-meta" / "dataset.yaml").write_text(
        (root / "a" / ".nv-meta" / "dataset.yaml").read_text() + "subflavors: {x: 1}\n"
    )
    output = refusal_of("which", tmp_path / "old.json", "--step", 31)
    assert "the content changed" in output
    assert str(root / "a") in output


def test_excluded_samples_are_mentioned(data: Path) -> None:
    dataset = opened(data, "single")
    assert "exclude" not in assumption(run_of_mix(dataset), 0)
    assert "`energon preview --step N --encoder …` gives the exact answer" in assumption(run_of_mix(dataset), 0)
    dataset = with_prepared(dataset, excluded=frozenset({("train/shard_000.tar", "00001")}))
    assert "1 samples are listed in `exclude`" in assumption(run_of_mix(dataset), 0)


# Bans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", ["weights", "repetitions"])
def test_a_state_with_bans_names_what_comes_before_and_after_it(data: Path, tmp_path: Path, mix: str) -> None:
    loaders = ranks_of(opened(data, mix), 2)
    delivered = run(loaders, 24)  # all lanes stand alike
    assert {loader.ban(["00003", "00007"], from_draw=4 * 24) for loader in loaders} == {4 * 24}
    delivered += run(loaders, 21)
    for loader in loaders:
        loader.ban(["00004"], from_draw=240)
    torch.save([loader.save_state_rank() for loader in loaders], tmp_path / "state.pt")
    delivered += run(loaders, 100)
    arguments = (tmp_path / "state.pt", "--world-size", 2)
    steps = [0, 23, 24, 25, 40, 44, 45, 46, 70, 144]
    check(delivered, steps, *arguments)
    every = answer("which", *arguments, "--until", 145)["microbatches"]
    expected = [rows for step in delivered for rows in delivered_keys(step)]
    assert [[tuple(sample["restore_key"]) for sample in one["samples"]] for one in every] == expected
    said = answer("which", *arguments, "--step", 3)["assumption"]
    assert said.startswith("Exact, but for banned samples that had come already where lanes were ahead of a ban: until")
    assert sum(row["banned"] for loader in loaders for row in loader.counters()) > 0


@pytest.mark.parametrize("repeat", [False, None], ids=["passes", "validation"])
def test_passes_are_named_without_banned_samples(data: Path, tmp_path: Path, repeat: bool | None) -> None:
    config = config_of(1, 0)
    if repeat is None:
        dataset = get_val_dataset(data / "b", batch_size=4, worker_config=config)
    else:
        dataset = get_train_dataset(data / "b", batch_size=4, repeat=repeat, worker_config=config)
    loader = get_savable_loader(dataset)
    loader.ban(["00001", "00002", "00029"])
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    for step, batch in enumerate(loader):
        (named,) = answer("which", tmp_path / "state.json", "--step", step)["microbatches"]
        assert [tuple(sample["restore_key"]) for sample in named["samples"]] == list(batch.__restore_key__[3])
        assert [sample["row"] for sample in named["samples"]] == list(range(len(named["samples"])))
    assert loader.metrics()["banned"] == 3


def test_the_folder_of_a_run_and_a_checkpoint_that_is_gone_are_answered_with_those_that_are_there(tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("")
    there = tmp_path / "run/checkpoints/step-0000020.ckpt"
    there.write_bytes(b"")
    message = energon("which", tmp_path / "run", "--step", 30).output
    assert f"is the folder of a run: give one of its checkpoints ({there}), or see" in message
    message = energon("which", there.with_name("step-0000010.ckpt"), "--step", 30).output
    assert f"No such file or directory. In {there.parent} are: step-0000020.ckpt" in message


def test_code_of_a_dataset_neither_runs_nor_needs_trust_to_name_its_samples(tmp_path: Path) -> None:
    folder = create_captioning_test_dataset(tmp_path / "data", num_train=20, num_val=0)
    ran = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).write_text('x')\n"
    code += "def sample_loader(sample):\n    return {'text': sample['txt']}\ndef part_filter(part):\n    return True\n"
    (folder / ".nv-meta/sample_loader.py").write_text(code)
    (folder / ".nv-meta/dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\n"
        "sample_loader: sample_loader.py:sample_loader\npart_filter: sample_loader.py:part_filter\n"
    )
    config = config_of(2, 0, num_lanes=24)
    trusted = get_train_dataset(folder, worker_config=config, batch_size=2, trust_remote_code=True)
    loaders = ranks_of(trusted, 2)
    delivered = run(loaders, 3)
    torch.save([loader.save_state_rank() for loader in loaders], tmp_path / "state.pt")
    assert ran.exists()
    ran.unlink()
    options = ("--batch-size", 2, "--world-size", 2, *LANES)
    for flag in ((), ("--trust-remote-code",)):
        check(delivered, [0, 1, 2], folder, *options, *flag)
        check(delivered, [1], tmp_path / "state.pt", "--world-size", 2, *flag)
        check(delivered, [1], tmp_path / "state.pt", "--world-size", 2, "--mix", folder, *flag)
        assert answer("plan", folder, "--steps", 3, *options, *flag)["draws"] == 12
    assert not ran.exists()
    assert "trust" in refusal_of("preview", folder)

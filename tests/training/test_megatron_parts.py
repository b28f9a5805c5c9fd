"""The parts of `trainer: megatron` by themselves: shared-out sequences, checkpoints that are not whole, launches."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.training.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from energon_bridge.training.config_file import load_config

pytest.importorskip("megatron.core")

from conversations import conversations_dataset
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron_runs import configuration, train
from run_outputs import read_losses, read_predictions

from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.context_parallel import zigzag_indices
from energon_bridge.training.megatron.checkpoints import complete_checkpoints
from energon_bridge.training.megatron.model import seen_tokens
from energon_bridge.training.megatron.ranks import cpu_backend, launched_rank

# Sharing out ---------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), size=st.integers(1, 3), packed=st.booleans())
def test_a_token_sees_its_sample_up_to_itself(lengths: list[int], size: int, packed: bool) -> None:
    spare = -sum(lengths) % (2 * size)
    samples = [number for number, length in enumerate(lengths) for _ in range(length)] + [len(lengths) - 1] * spare
    if not packed:
        samples = [0] * len(samples)
    positions = torch.tensor([[samples[:place].count(sample) for place, sample in enumerate(samples)]])
    for rank in range(size):
        own = zigzag_indices(len(samples), rank=rank, size=size).tolist()
        keys = torch.cat([zigzag_indices(len(samples), rank=peer, size=size) for peer in range(size)]).tolist()
        seen = seen_tokens(positions, packed=packed, rank=rank, size=size)
        if seen is None:
            assert (size, packed) == (1, False)
            continue
        expected = [[samples[q] == samples[k] and k <= q for k in keys] for q in own]
        assert seen[0, 0].tolist() == expected


def test_processes_that_would_be_left_over_are_refused() -> None:
    for world, parallel in ((6, ParallelConfig(tp=2, pp=2)), (3, ParallelConfig(cp=4))):
        with pytest.raises(ConfigurationError, match=rf"{world} processes: .* multiple of 4. Start 4"):
            parallel.data_parallel_size(world)
    config = load_config(None, ["trainer=megatron", "parallel.tp=2", "data.global_batch_size=64"])
    assert config.accumulate(config.parallel.data_parallel_size(4)) == 1
    with pytest.raises(ConfigurationError, match=r"=64 cannot be divided between 4 data-parallel"):
        config.accumulate(config.parallel.data_parallel_size(8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": "deepspeed"}, r"trainer must be 'lightning' or 'megatron', got 'deepspeed'"),
        ({"trainer": "lightning", "parallel": ParallelConfig(tp=2)}, r"which trainer=lightning cannot do"),
        ({"parallel": ParallelConfig(replica_loading="some")}, r"parallel\.replica_loading must be .*, got 'some'"),
        ({"parallel": ParallelConfig(tp=0)}, r"parallel\.tp must be at least 1, got 0"),
        ({"parallel": ParallelConfig(tp=3)}, r"model\.num_heads=4 cannot be divided between 3 tensor-parallel ranks"),
        ({"parallel": ParallelConfig(pp=4)}, r"model\.num_layers=2 cannot be divided between 4 pipeline stages"),
        ({"parallel": ParallelConfig(cp=2), "data": DataConfig(seq_length=30)}, r"=30 .* multiple of 4"),
        ({"model": ModelConfig(name_or_path="org/model")}, r"does not load model\.name_or_path=org/model"),
        ({"train": TrainConfig(precision="16-true")}, r"train\.precision=16-true; use 32-true, bf16-mixed"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_shared_out_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RunConfig(**({"trainer": "megatron"} | changes))  # type: ignore[arg-type]


# Context parallelism -------------------------------------------------------------------------------------------------


def count_encoded(folder: Path, rank: int) -> None:
    """Let a process write how many pictures each call of its vision tower gets."""
    forward = CLIPViTModel.forward

    def counted(self: CLIPViTModel, pixels: torch.Tensor, *rest: object) -> torch.Tensor:
        with (folder.parent / f"{folder.name}-rank{rank}").open("a") as out:
            out.write(f"{len(pixels)}\n")
        return forward(self, pixels, *rest)

    CLIPViTModel.forward = counted


def encoded_on(folder: Path, rank: int) -> list[int]:
    path = folder.parent / f"{folder.name}-rank{rank}"
    return [*map(int, path.read_text().split())] if path.exists() else []


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packs"])
def test_context_parallel_ranks_train_as_one(tmp_path: Path, packed: bool) -> None:
    if packed:
        dataset, base = conversations_dataset(tmp_path / "talks", num_train=24, num_val=4), "packed.yaml"
    else:
        dataset, base = create_captioning_test_dataset(tmp_path / "data", num_train=24, num_val=4), "smoke.yaml"
    runs = {}
    for cp in (1, 2):
        settings = [f"parallel.cp={cp}", "train.max_steps=3", "data.trust_remote_code=true", "optimizer.warmup_steps=0"]
        runs[cp] = configuration(dataset, tmp_path / f"cp{cp}", *settings, base=base)
    (alone, batches), (shared, same) = (
        train(config, cp, disturb=partial(count_encoded, Path(config.run_dir))) for cp, config in runs.items()
    )
    whole, *shares = [encoded_on(Path(config.run_dir), rank) for cp, config in runs.items() for rank in range(cp)]
    assert [sum(of_call) for of_call in zip(*shares, strict=True)] == whole  # each picture on one rank
    assert all(max(of_call) - min(of_call) <= 1 for of_call in zip(*shares, strict=True))
    assert same == batches
    losses = [read_losses(config.run_dir) for config in runs.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][3] < losses[0][1]
    assert shared[0].validation_loss == pytest.approx(alone[0].validation_loss, rel=1e-4)
    answers = [read_predictions(config.run_dir) for config in runs.values()]
    assert answers[0] == answers[1]


# Checkpoints ---------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:07d}"
    path.mkdir(parents=True)
    for name in ("__0_0.distcp", "run.pt"):
        (path / name).write_bytes(b"x" * 10)
    (path / "complete.json").write_text(json.dumps({"__0_0.distcp": 10, "run.pt": 10}))
    return path


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: (path / "run.pt").unlink(), "run.pt is missing"),
        (lambda path: (path / "__0_0.distcp").write_bytes(b"x"), "__0_0.distcp has 1 bytes, expected 10"),
        (lambda path: (path / "complete.json").unlink(), "no readable complete.json"),
        (lambda path: (path / "complete.json").write_text("{"), "no readable complete.json"),
        (lambda path: path.rename(path.with_name(f".{path.name}.part")), None),
    ],
    ids=["file", "size", "manifest", "half a manifest", "unfinished"],
)
def test_half_a_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: object, words: str | None
) -> None:
    whole, newer = write_checkpoint(tmp_path, 2), write_checkpoint(tmp_path, 4)
    assert complete_checkpoints(tmp_path) == [whole, newer]
    harm(newer)  # type: ignore[operator]
    assert complete_checkpoints(tmp_path) == [whole]
    if words is not None:
        assert f"skipping the incomplete checkpoint {newer}" in caplog.text
        assert words in caplog.text


# Launches ------------------------------------------------------------------------------------------------------------


def test_ranks_come_from_torchrun_or_slurm() -> None:
    assert launched_rank({}) == (0, 1)
    assert launched_rank({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == (3, 8)
    assert launched_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == (0, 1)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1234567"}
    assert launched_rank(slurm) == (5, 8)
    assert (slurm["MASTER_ADDR"], slurm["MASTER_PORT"]) == ("127.0.0.1", "24567")
    nodes = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    with pytest.raises(ConfigurationError, match=r"8 tasks on 2 nodes, but MASTER_ADDR is not set"):
        launched_rank(nodes)
    assert launched_rank(nodes | {"MASTER_ADDR": "first"}) == (5, 8)


def test_nothing_of_the_cpu_backend_is_left_behind() -> None:
    before = torch.cuda.current_device
    with cpu_backend():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).cuda().type() == "torch.cuda.FloatTensor"
    assert torch.cuda.current_device is before
    assert torch.zeros(2).type() == "torch.FloatTensor"

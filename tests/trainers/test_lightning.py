"""Lightning's own trainer over the data module: what its checkpoints hold, and that nothing is lost or repeated."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import become_rank, free_port, run_forked

pytest.importorskip("lightning.pytorch")

from engine import worker_config_of
from lightning.pytorch import Trainer
from lightning_runs import Model, fit, quiet_trainer
from made import made_once

from energon_bridge import Blender, DefaultTaskEncoder, EnergonMultiModalDataModule, get_savable_loader
from energon_bridge.core.errors import ConfigurationError, DatasetMismatchError, EnergonError
from energon_bridge.core.loader.saved_run import read_lanes, read_leaves
from energon_bridge.tools.testing import create_captioning_test_dataset

NUM_TRAIN, NUM_VAL = 24, 5
MICRO_BATCH, NUM_LANES = 2, 4
EPOCH = NUM_TRAIN // MICRO_BATCH  # microbatches
VALIDATION = ["val-00000,val-00001", "val-00002,val-00003", "val-00004"]

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:Checkpoint directory .* exists")
dataset = made_once(create_captioning_test_dataset, num_train=NUM_TRAIN, num_val=NUM_VAL)


def module(dataset: Path, num_workers: int = 0, **settings: Any) -> EnergonMultiModalDataModule:
    return EnergonMultiModalDataModule(
        str(dataset),
        None,
        None,
        micro_batch_size=MICRO_BATCH,
        num_workers=num_workers,
        num_val_workers=0,
        num_lanes=NUM_LANES,
        task_encoder=DefaultTaskEncoder(),
        **settings,
    )


def fit_on(ranks: int, dataset: Path, folder: Path, ckpt_path: Path | None = None, **settings: Any) -> list[list[str]]:
    """Train on some ranks and return the keys of each step, all ranks in turn."""
    port = free_port()

    def start(rank: int) -> list[str]:
        become_rank(rank, ranks, port)
        return fit(module(dataset), folder, ckpt_path, ranks, limit_val_batches=0, **settings).trained

    return [list(step) for step in zip(*run_forked(ranks, start), strict=True)]


@pytest.fixture(scope="module")
def uninterrupted(dataset: Path) -> list[str]:
    train = module(dataset).train_dataloader()
    return [",".join(batch.__key__) for batch in islice(train, 6 * EPOCH)]


# Stopping and going on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, EPOCH])
def test_one_process_goes_on_exactly(stop: int, dataset: Path, tmp_path: Path, uninterrupted: list[str]) -> None:
    first, second = module(dataset, 2), module(dataset, 2)
    assert fit(first, tmp_path, max_steps=stop).trained == uninterrupted[:stop]
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert first.consumed_samples == stop * MICRO_BATCH
    assert checkpoint["EnergonMultiModalDataModule"]["consumed_samples"] == stop * MICRO_BATCH
    assert fit(second, tmp_path, tmp_path / "last.ckpt", max_steps=30).trained == uninterrupted[stop:30]
    assert second.consumed_samples == 30 * MICRO_BATCH


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:Your `IterableDataset` has `__len__`")
def test_the_loader_alone_goes_on_exactly(dataset: Path, tmp_path: Path, uninterrupted: list[str]) -> None:
    """Lightning finds `state_dict` and `load_state_dict` on the loader itself, without a data module."""

    def loader() -> Any:
        data = module(dataset)
        return get_savable_loader(data.datasets_provider(worker_config_of(data), "train"))

    first = fit(loader(), tmp_path, max_steps=5)
    second = fit(loader(), tmp_path, tmp_path / "last.ckpt", max_steps=30)
    assert first.trained + second.trained == uninterrupted[:30]


@pytest.mark.parametrize("after", [1, 4])
def test_two_ddp_processes_go_on_exactly(after: int, dataset: Path, tmp_path: Path, uninterrupted: list[str]) -> None:
    first = fit_on(2, dataset, tmp_path, max_steps=4)  # an epoch has six steps
    second = fit_on(after, dataset, tmp_path, tmp_path / "last.ckpt", max_steps=20)
    trained = [key for step in first + second for key in step]
    assert [len(step) for step in first + second] == [2] * 4 + [after] * 16
    assert trained == uninterrupted[: len(trained)]


class Stepping(Model):
    """Also notes how many microbatches had come at each optimizer step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.trained.append("step")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_optimizer_steps_stay_on_global_batches_on_other_ranks(
    before: int, after: int, dataset: Path, tmp_path: Path, uninterrupted: list[str]
) -> None:
    """A global batch has four microbatches; Lightning counts those of one rank."""
    of_rank: list[list[str]] = []
    port = free_port()

    def start(ranks: int, steps: int, ckpt_path: Path | None, rank: int) -> list[str]:
        become_rank(rank, ranks, port)
        data = module(dataset, global_batch_size=4 * MICRO_BATCH)
        accumulate = {"accumulate_grad_batches": 4 // ranks}
        return fit(
            data, tmp_path, ckpt_path, ranks, model=Stepping, limit_val_batches=0, max_steps=steps, **accumulate
        ).trained

    steps: list[list[str]] = []
    for ranks, most, ckpt_path in ((before, 3, None), (after, 8, tmp_path / "last.ckpt")):
        of_rank = run_forked(ranks, partial(start, ranks, most, ckpt_path))
        port = free_port()
        in_turn = list(zip(*of_rank, strict=True))
        ends = [place for place, row in enumerate(in_turn) if row[0] == "step"]
        for first, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            steps.append([key for row in in_turn[first:end] for key in row])
    assert steps == [uninterrupted[4 * step : 4 * step + 4] for step in range(8)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_of_other_microbatches_than_a_global_batch_are_refused(
    accumulate: int, dataset: Path, tmp_path: Path
) -> None:
    data = module(dataset, global_batch_size=2 * MICRO_BATCH)
    with pytest.raises(ConfigurationError, match=r"2 microbatches an optimizer step.*accumulate_grad_batches=2"):
        fit(data, tmp_path, max_steps=2, accumulate_grad_batches=accumulate)
    fit(module(dataset), tmp_path, max_steps=2, accumulate_grad_batches=accumulate)


class Withdrawing(Model):
    """Bans some samples when training starts or goes on."""

    def on_train_start(self) -> None:
        self.trainer.datamodule.ban(GONE)


GONE = ["train-00002", "train-00013"]


def test_samples_are_withdrawn_when_a_run_goes_on(dataset: Path, tmp_path: Path, uninterrupted: list[str]) -> None:
    """Whatever the checkpoint says, since Lightning has restored it by then; the next one remembers."""
    first = fit(module(dataset), tmp_path, max_steps=5)
    assert first.trained == uninterrupted[:5]
    second = fit(module(dataset), tmp_path, tmp_path / "last.ckpt", max_steps=25, model=Withdrawing)
    third = fit(module(dataset), tmp_path, tmp_path / "last.ckpt", max_steps=50)
    trained = ",".join(second.trained + third.trained).split(",")
    assert {*trained} == {f"train-{number:05d}" for number in range(NUM_TRAIN)} - {*GONE}
    assert {*GONE} & {*",".join(uninterrupted[5:50]).split(",")}


# Traps that loaders fall into there ----------------------------------------------------------------------------------


def loader_states(path: Path) -> list[Any]:
    """Return the state of the data as the checkpoint holds it twice, loaded safely."""
    checkpoint = torch.load(path, weights_only=True)
    (of_loader,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return [of_loader, checkpoint["EnergonMultiModalDataModule"]["train"]]


def test_trap_a_the_checkpoint_holds_the_state_of_every_rank_as_plain_data(dataset: Path, tmp_path: Path) -> None:
    fit_on(2, dataset, tmp_path, max_steps=3)
    for state in loader_states(tmp_path / "last.ckpt"):
        lanes = read_lanes(state)
        assert sorted(lanes) == list(range(NUM_LANES))
        assert [lanes[lane].microbatches for lane in range(NUM_LANES)] == [2, 2, 1, 1]
        assert read_leaves(state)[0]["counts"]["samples"] == 6 * MICRO_BATCH
        assert {type(value) for value in leaves_of(state)} <= {str, int, bool, type(None)}


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3}], ids=["plain", "accumulating"])
def test_trap_b_the_state_is_that_of_the_batches_trained_on(
    settings: dict[str, Any], dataset: Path, tmp_path: Path, uninterrupted: list[str]
) -> None:
    model = fit(module(dataset), tmp_path, max_steps=2, **settings)
    assert len(model.trained) == 2 * settings.get("accumulate_grad_batches", 1)
    for state in loader_states(tmp_path / "last.ckpt"):
        assert state["microbatches"] == len(model.trained)
    assert model.trained == uninterrupted[: len(model.trained)]


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in leaves_of(entry)]
    return [leaf for entry in value for leaf in leaves_of(entry)] if type(value) is list else [value]


def test_a_checkpoint_of_other_data_is_refused_and_not_started_over(dataset: Path, tmp_path: Path) -> None:
    fit(module(dataset), tmp_path, max_steps=2)
    other = create_captioning_test_dataset(tmp_path / "other", num_train=NUM_TRAIN - 1, num_val=0)
    with pytest.raises(DatasetMismatchError):
        fit(module(other), tmp_path, tmp_path / "last.ckpt", max_steps=4, limit_val_batches=0)


# Epochs and validation -----------------------------------------------------------------------------------------------


def test_validation_ends_and_is_whole_every_time(dataset: Path, tmp_path: Path, uninterrupted: list[str]) -> None:
    """Without any limit, in the middle of an epoch and at its end, and after Lightning's sanity check."""
    model = fit(module(dataset), tmp_path, max_epochs=2, val_check_interval=EPOCH // 2)
    sanity, *validations = model.validated
    assert sanity == VALIDATION[:2]
    assert validations == [VALIDATION] * 4
    assert model.trained == uninterrupted[: 2 * EPOCH]


def test_validation_on_two_ranks_has_every_sample_once(dataset: Path, tmp_path: Path) -> None:
    port = free_port()

    def start(rank: int) -> list[list[str]]:
        become_rank(rank, 2, port)
        return fit(module(dataset), tmp_path, None, 2, max_steps=6, num_sanity_val_steps=0).validated

    first, second = run_forked(2, start)
    assert [len(steps) for steps in (*first, *second)] == [2, 2]
    assert [key for step in zip(first[0], second[0], strict=True) for key in step] == [*VALIDATION, ""]


class Sharded(Model):
    """Trained by `ModelParallelStrategy`: its layer is sharded over the data-parallel ranks."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, foreach=False)  # Lightning needs a state


@pytest.mark.filterwarnings("ignore")  # FSDP2 on a CPU
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 of this torch (2.6) does not run on a CPU")
def test_model_parallel_ranks_load_by_their_data_parallel_rank_and_go_on(
    dataset: Path, tmp_path: Path, uninterrupted: list[str]
) -> None:
    """FSDP2 and tensor parallelism under Lightning: its mesh says who loads what."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    port = free_port()

    def start(rank: int) -> tuple[list[str], int]:
        become_rank(rank, 4, port)
        trained: list[str] = []
        for steps, ckpt_path in ((3, None), (5, tmp_path / "last.ckpt")):
            strategy = ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=2, save_distributed_checkpoint=False
            )
            data = module(dataset)
            settings: dict[str, Any] = {"strategy": strategy, "limit_val_batches": 0, "max_steps": steps}
            trained += fit(data, tmp_path, ckpt_path, 4, model=Sharded, **settings).trained
        return trained, data.consumed_samples

    for rank, (trained, consumed) in enumerate(run_forked(4, start)):
        assert trained == uninterrupted[rank // 2 : 10 : 2]
        assert consumed == 10 * MICRO_BATCH


def test_each_dataset_of_a_mix_is_validated_by_itself(dataset: Path, tmp_path: Path) -> None:
    other = create_captioning_test_dataset(tmp_path / "others", num_train=4, num_val=3)
    data = EnergonMultiModalDataModule(
        Blender([(str(dataset), 1), (str(other), 1)]),
        None,
        None,
        micro_batch_size=MICRO_BATCH,
        num_workers=0,
        num_lanes=NUM_LANES,
        task_encoder=DefaultTaskEncoder(),
        validate_each_dataset=True,
    )
    assert data.val_dataloader() is data.val_dataloader()
    assert data.validation_names == [dataset.name, "others"]
    model = fit(data, tmp_path, max_steps=2, val_check_interval=2, check_val_every_n_epoch=None, num_sanity_val_steps=0)
    (validated,) = model.validated
    assert validated == [*VALIDATION, "val-00000,val-00001", "val-00002"]
    assert model.validated_sets == [0, 0, 0, 1, 1]


# Tools of Lightning that run a little of the training first ---------------------------------------------------------


def tuned(folder: Path, **settings: Any) -> tuple[Trainer, Any]:
    from lightning.pytorch.tuner import Tuner

    trainer = quiet_trainer(folder, **({"max_epochs": None} | settings))
    return trainer, Tuner(trainer)


class Sized(Model):
    """Notes how many samples each batch has, and has a learning rate; a batch of more than four is too much for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch.__key__))
        if self.sizes[-1] > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_scale_batch_size_measures_each_size_and_starts_over(
    dataset: Path, tmp_path: Path, uninterrupted: list[str]
) -> None:
    data, model = module(dataset), Sized()
    trainer, tuner = tuned(tmp_path, max_steps=3)
    found = tuner.scale_batch_size(model, datamodule=data, batch_arg_name="micro_batch_size", max_trials=6)
    assert (found, data.micro_batch_size) == (4, 4)
    assert model.sizes == [2, 2, 2, 4, 4, 4, 8]
    data.micro_batch_size = MICRO_BATCH
    model.trained.clear()
    trainer.fit(model, datamodule=data)
    assert model.trained == uninterrupted[:3]
    data.micro_batch_size = 4
    with pytest.raises(ConfigurationError, match="micro_batch_size was changed from 2 to 4 after 3 steps"):
        data.train_dataloader()
    data.close()


@pytest.mark.filterwarnings("ignore")
def test_lr_find_gives_back_what_it_trained_on(dataset: Path, tmp_path: Path, uninterrupted: list[str]) -> None:
    data, model = module(dataset), Sized()
    trainer, tuner = tuned(tmp_path, max_steps=4)
    tuner.lr_find(model, datamodule=data, num_training=10, early_stop_threshold=None)
    assert len(model.trained) == 10
    model.trained.clear()
    trainer.fit(model, datamodule=data)
    assert model.trained == uninterrupted[:4]
    data.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_overfit_batches_trains_on_the_same_batches(
    dataset: Path, tmp_path: Path, uninterrupted: list[str], num_workers: int
) -> None:
    model = fit(module(dataset, num_workers), tmp_path, max_epochs=3, overfit_batches=2)
    assert model.trained == uninterrupted[:2] * 3
    assert {tuple(steps) for steps in model.validated} == {tuple(VALIDATION[:2])}


class Evaluated(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tested: list[str] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested.append(",".join(batch.__key__))

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:
        keys: list[str] = batch.__key__
        return keys


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_test_and_predict_have_the_split_of_their_own(dataset: Path, tmp_path: Path) -> None:
    tested = create_captioning_test_dataset(tmp_path / "data", num_train=4, num_val=2, num_test=3)
    data, model = module(tested), Evaluated()
    assert data.test_dataloader() is None
    trainer, _ = tuned(tmp_path)
    for _ in range(2):
        trainer.test(model, datamodule=data, verbose=False)
    assert model.tested == ["test-00000,test-00001", "test-00002"] * 2
    assert trainer.predict(model, datamodule=data) == [["test-00000", "test-00001"], ["test-00002"]]
    data.close()
    with pytest.raises(EnergonError, match="test"):
        trainer.test(Evaluated(), datamodule=module(dataset), verbose=False)

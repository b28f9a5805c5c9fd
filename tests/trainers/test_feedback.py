"""Weights that follow losses: the arithmetic of DoReMi, and runs that stop, resume and change their ranks."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import become_rank, free_port, run_forked
from previews import encoder, mix_of
from recipes import captions_dataset

from energon_bridge import (
    BatchCost,
    EnergonDataloader,
    EnergonMultiModalDataModule,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    make_balance,
)
from energon_bridge.core.errors import ConfigurationError, StateError
from energon_bridge.trainers.feedback import DoReMi, MixFeedback, losses_by_dataset
from energon_bridge.trainers.replica import Balance

STEPS, EVERY = 16, 4

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")


@dataclass
class Part:
    dataset: str
    start: int
    length: int


@dataclass
class Packed:
    segments: list[tuple[Part, ...]]
    loss_mask: torch.Tensor


# The arithmetic ------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_learned_tokens_of_each_segment() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
    losses = torch.arange(12.0).reshape(2, 6)
    losses[0, 2] = math.inf  # no token that is learned
    batch = Packed([(Part("a", 0, 3), Part("b", 3, 2)), (Part("a", 0, 5),)], mask)
    assert losses_by_dataset(batch, losses) == {"a": (0 + 1 + 7 + 8 + 9 + 10, 6), "b": (3 + 4, 2)}


def test_losses_need_segments_and_a_loss_for_each_token() -> None:
    batch = Packed([(Part("a", 0, 2),)], torch.ones(1, 2))
    with pytest.raises(ConfigurationError, match=r"losses \(2, 1\)"):
        losses_by_dataset(batch, torch.ones(2, 1))
    with pytest.raises(ConfigurationError, match="got a object with loss_mask None"):
        losses_by_dataset(object(), torch.ones(2, 1))


def test_doremi_multiplies_by_the_exponential_of_the_excess() -> None:
    policy = DoReMi(reference={"a": 1.0, "b": 1.0, "c": 1.0}, step_size=2.0, smoothing=0.1)
    found = policy({"a": 1.5, "b": 0.2}, {"a": 0.5, "b": 0.25, "c": 0.25})
    raised = {"a": 0.5 * math.exp(1.0), "b": 0.25, "c": 0.25}  # b is better than the reference, c was not seen
    total = sum(raised.values())
    assert found == pytest.approx({name: 0.9 * value / total + 0.1 / 3 for name, value in raised.items()})
    rare = DoReMi(reference={"a": 1.0, "b": 1.0}, smoothing=0.0)
    assert rare({"a": 1e6, "b": 1.0}, {"a": 0.0, "b": 1.0}) == {"a": 0.0, "b": 1.0}
    assert policy({"a": 1e6, "b": 1.0, "c": 1.0}, dict.fromkeys("abc", 1.0))["a"] == pytest.approx(0.9 + 0.1 / 3)


def test_mistakes_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="step_size above 0"):
        DoReMi(reference={}, step_size=0.0)
    with pytest.raises(ConfigurationError, match="no loss for b"):
        DoReMi(reference={"a": 1.0})({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ConfigurationError, match="`every` of at least 1"):
        MixFeedback(halve_the_worst, {"a": 1.0}, every=0)
    feedback = MixFeedback(halve_the_worst, {"a": 1.0}, every=1)
    batch = Packed([(Part("b", 0, 1),)], torch.ones(1, 1))
    with pytest.raises(ConfigurationError, match="loss on b is nan"):
        feedback.record(batch, torch.full((1, 1), math.nan))
    feedback.record(batch, torch.ones(1, 1))
    with pytest.raises(ConfigurationError, match="samples of b, which have no weight"):
        feedback.step(EnergonDataloader([0]))
    with pytest.raises(StateError, match="has weights for a, but this run has b"):
        MixFeedback(halve_the_worst, {"b": 1.0}).load_state_dict(feedback.state_dict())


# Runs ----------------------------------------------------------------------------------------------------------------


def halve_the_worst(losses: Any, weights: Any) -> dict[str, float]:
    worst = max(losses, key=losses.get)
    return {name: weight / 2 if name == worst else weight for name, weight in weights.items()}


class Counting:
    """A policy that has a state: it favours the datasets in turn, the more the larger the losses are."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, losses: Any, weights: Any) -> dict[str, float]:
        self.turn += 1
        chosen = sorted(weights)[self.turn % len(weights)]
        return {name: 1 + sum(losses.values()) * (name == chosen) for name in weights}

    def state_dict(self) -> dict[str, int]:
        return {"turn": self.turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turn = state["turn"]


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("feedback")
    parts = {name: captions_dataset(folder / name, num_train=60, num_val=2) for name in ("one", "two", "three")}
    return mix_of(folder / "mix.yaml", **parts)


def losses_of(batch: Any) -> torch.Tensor:
    """Return a loss between 0 and 1 for each token, which depends on key and place alone."""
    losses = torch.zeros(batch.loss_mask.shape)
    for row, parts in enumerate(batch.segments):
        for part in parts:
            numbers = [zlib.crc32(f"{part.dataset[-3:]} {part.key} {n}".encode()) / 2**32 for n in range(part.length)]
            losses[row, part.start : part.start + part.length] = torch.tensor(numbers)
    return losses


class Run:
    """A training loop over a mix whose weights follow made-up losses; it can be saved and gone on with."""

    def __init__(
        self,
        mix: Path,
        policy: Any,
        *,
        packed: bool,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
        balance: Balance | None = None,
    ) -> None:
        config = WorkerConfig(num_workers=workers, rank=rank, world_size=ranks, microbatches_per_global_batch=4)
        settings = {"packing_buffer_size": 8} if packed else {}
        dataset = get_train_dataset(
            mix, batch_size=2, task_encoder=encoder(), worker_config=config, shuffle_buffer_size=10, **settings
        )
        self.train = EnergonDataloader(get_savable_loader(dataset), balance=balance)
        names = [str(mix.parent / name) for name in ("one", "two", "three")]
        self.feedback = MixFeedback(policy, dict(zip(names, (1.0, 2.0, 3.0), strict=True)), every=EVERY)
        self.microbatches = 4 // ranks

    def step(self) -> list[str]:
        keys = []
        for _ in range(self.microbatches):
            batch = next(self.train)
            keys += list(batch.sample_keys)
            self.feedback.record(batch, losses_of(batch))
        self.feedback.step(self.train)
        return keys

    def state(self) -> str:
        return json.dumps([self.train.state_dict(), self.feedback.state_dict()])

    def restored(self, state: str) -> Run:
        of_data, of_feedback = json.loads(state)
        self.train.load_state_dict(of_data)
        self.feedback.load_state_dict(of_feedback)
        return self


def policies(mix: Path, name: str) -> Any:
    reference = dict.fromkeys((str(mix.parent / part) for part in ("one", "two", "three")), 0.3)
    return {"doremi": DoReMi(reference=reference, step_size=20.0), "own": Counting()}[name]


def test_the_weights_are_those_that_the_stream_follows(mix: Path) -> None:
    run = Run(mix, lambda losses, weights: {name: float(name.endswith("two")) for name in weights}, packed=False)
    for _ in range(EVERY):
        run.step()
    batch = next(run.train)
    assert {part.dataset for row in batch.segments for part in row} == {str(mix.parent / "two")}


def test_any_number_of_ranks_and_workers_gives_the_same_weights(mix: Path) -> None:
    whole = Run(mix, policies(mix, "own"), packed=True)
    expected = [sorted(whole.step()) for _ in range(STEPS)]
    half = Run(mix, policies(mix, "own"), packed=True)
    for _ in range(STEPS // 2 - 1):  # in the middle of an interval
        half.step()
    state, port = half.state(), free_port()

    def on_two(rank: int) -> tuple[list[list[str]], Any]:
        become_rank(rank, 2, port)
        torch.distributed.init_process_group("gloo")
        balance = make_balance(BatchCost(attention=1.0))
        settings: dict[str, Any] = {"packed": True, "rank": rank, "ranks": 2, "balance": balance}
        run = Run(mix, policies(mix, "own"), workers=rank, **settings).restored(state)
        steps = [run.step() for _ in range(STEPS // 2)]
        again = run.state()
        run.train.close()
        run = Run(mix, policies(mix, "own"), **settings).restored(again)
        steps.append(run.step())
        run.train.close()
        torch.distributed.destroy_process_group()
        return steps, run.feedback.changes

    (first, changes), (second, same) = run_forked(2, on_two)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == expected[STEPS // 2 - 1 :]
    assert changes == same == whole.feedback.changes


# Lightning -----------------------------------------------------------------------------------------------------------


def test_a_lightning_run_that_is_resumed_has_the_same_weights_and_batches(mix: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning_runs import Plain, quiet_trainer

    from energon_bridge.trainers.lightning import MixFeedbackCallback

    class Model(Plain):
        def __init__(self, feedback: MixFeedback) -> None:
            super().__init__()
            self.feedback = feedback
            self.keys: list[str] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.keys += batch.sample_keys
            self.feedback.record(batch, losses_of(batch))
            return super().training_step(batch, batch_idx)

    def run(steps: int, resumed_from: Path | None = None) -> tuple[list[str], Any, Any]:
        source = Run(mix, policies(mix, "doremi"), packed=True)
        model = Model(source.feedback)
        data = EnergonMultiModalDataModule(
            mix,
            None,
            None,
            micro_batch_size=2,
            global_batch_size=4,
            num_workers=0,
            task_encoder=encoder(),
            packing_buffer_size=8,
        )
        callbacks = [MixFeedbackCallback(source.feedback)]
        trainer = quiet_trainer(tmp_path, max_steps=steps, accumulate_grad_batches=2, callbacks=callbacks)
        trainer.fit(model, datamodule=data, ckpt_path=resumed_from)
        if resumed_from is None:
            trainer.save_checkpoint(tmp_path / "half.ckpt")
        data.close()
        return model.keys, source.feedback.changes, source.feedback.weights

    half, _, _ = run(EVERY + 2)
    rest, changes, weights = run(3 * EVERY, tmp_path / "half.ckpt")
    whole = run(3 * EVERY)
    assert len(changes) == 3
    assert (half + rest, changes, weights) == whole

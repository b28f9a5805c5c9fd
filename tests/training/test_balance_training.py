"""Training with balance: the global batches and, within the rounding of sums, the losses are those without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from forked import become_rank, free_port, run_forked
from megatron_runs import configuration, train
from run_outputs import read_losses

from energon_bridge.dataloader import EnergonDataloader
from energon_bridge.testing import create_captioning_test_dataset
from energon_bridge.training import run as training

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")

BALANCED = ("data.balance=global_batch", "data.balance_attention=0.01", "data.balance_patches=0.1")
GLOBAL = ("data.micro_batch_size=1", "data.global_batch_size=8", "train.max_steps=3", "validation.limit_batches=1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_captioning_test_dataset(tmp_path_factory.mktemp("captioning"), num_train=24, num_val=5)


def losses(config: Any) -> list[float]:
    return [loss for _, loss in sorted(read_losses(Path(config.run_dir) / "metrics.jsonl").items())]


def test_megatron_core_learns_the_same(dataset: Path, tmp_path: Path) -> None:
    plain = configuration(dataset, tmp_path / "plain", *GLOBAL)
    balanced = configuration(dataset, tmp_path / "balanced", *GLOBAL, *BALANCED)
    (_, before), (_, after) = train(plain, 2), train(balanced, 2)
    assert before == after
    assert losses(balanced) == pytest.approx(losses(plain), rel=1e-5)
    assert len(losses(plain)) == 3


def test_lightning_learns_the_same(dataset: Path, tmp_path: Path) -> None:
    def configured(name: str, *overrides: str) -> Any:
        return configuration(dataset, tmp_path / name, *GLOBAL, *overrides, "trainer=lightning")

    configs = configured("plain"), configured("balanced", *BALANCED)
    before, after = (run_on_two_ranks(config) for config in configs)
    assert before != after  # the ranks have exchanged something
    assert whole(before) == whole(after)
    assert losses(configs[1]) == pytest.approx(losses(configs[0]), rel=1e-5)
    assert len(losses(configs[0])) == 3


def whole(ranks: list[list[str]]) -> list[list[str]]:
    """Return the sorted keys of each global batch."""
    return [sorted(key for keys in ranks for key in keys[start : start + 4]) for start in range(0, 12, 4)]


def run_on_two_ranks(config: Any) -> list[list[str]]:
    """Train; return the keys that each rank got."""
    port = free_port()

    def start(rank: int) -> list[str]:
        become_rank(rank, 2, port)
        keys: list[str] = []
        original = EnergonDataloader._next_of

        def recorded(self: EnergonDataloader, stream: Any) -> Any:
            batch = original(self, stream)
            keys.extend(batch.__key__ if self.endless else ())
            return batch

        EnergonDataloader._next_of = recorded  # type: ignore[method-assign]
        training.run(config)
        return keys

    return run_forked(2, start)

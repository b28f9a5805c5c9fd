"""Numbers of ranks that do not divide the lanes: what is delivered, who refuses it, and what the loss makes of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import config_of, deliver, loaders_of, text_dataset, train_dataset
from forked import become_rank, free_port, run_forked
from made import made_once
from paths import CONFIGS

from energon_bridge import (
    DefaultTaskEncoder,
    EnergonDataloader,
    EnergonMultiModalDataModule,
    get_savable_loader,
    get_val_dataset,
)
from energon_bridge.core.errors import ConfigurationError, MaskedMicrobatchesError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.order.topology import Ownership
from energon_bridge.tools.testing import create_captioning_test_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
data = made_once(text_dataset, train=[5, 9, 1, 14, 8], val=[7])
captions = made_once(create_captioning_test_dataset, num_train=20, num_val=1)


@cache
def dataset_of(data: Path) -> DatasetSpec:
    return train_dataset(data, "skipping")


REFUSAL = (
    r"10 data-parallel ranks do not divide the 24 lanes of this run .*20\.0 % of the microbatches would be masked.*"
    r"Continue with 8 ranks \(the nearest number that divides 24\).*masked_microbatches='allow'"
)


def loader_on(data: Path, world_size: int, num_lanes: int | None) -> SavableDataLoader:
    return get_savable_loader(dataset_of(data), worker_config=config_of(world_size, 0, num_lanes=num_lanes))


def test_a_training_iterator_refuses_unless_told_that_the_loss_weighs(data: Path) -> None:
    with pytest.raises(MaskedMicrobatchesError, match=REFUSAL):
        EnergonDataloader(loader_on(data, 10, 24))
    next(EnergonDataloader(loader_on(data, 10, 24), masked_microbatches="allow"))
    next(EnergonDataloader(loader_on(data, 8, 24)))
    next(EnergonDataloader(loader_on(data, 10, None)))  # the default number of lanes fits
    with pytest.raises(ConfigurationError, match="must be 'refuse' or 'allow', got True"):
        EnergonDataloader([1], masked_microbatches=True)  # type: ignore[arg-type]
    validation = get_val_dataset(data, batch_size=2, worker_config=config_of(3, 0, num_lanes=None))
    assert len(list(EnergonDataloader(get_savable_loader(validation)))) == 2


@pytest.mark.parametrize("restore", ["restore_state", "load_state_dict", "the loader itself"])
def test_it_refuses_the_lanes_that_a_state_brings(data: Path, restore: str) -> None:
    state = deliver(loaders_of(dataset_of(data), 1, 0), 5, [5]).states[5][0]
    for allowed in (True, False):
        loader = loader_on(data, 10, None)
        dataloader = EnergonDataloader(loader, masked_microbatches="allow" if allowed else "refuse")
        next(dataloader)

        def resume(loader: Any = loader, dataloader: Any = dataloader) -> Any:
            if restore == "the loader itself":
                dataloader.close()
                loader.restore_state_rank(state)
            else:
                getattr(dataloader, restore)(state)

        if allowed:
            resume()
            next(dataloader)
            continue
        if restore != "the loader itself":
            with pytest.raises(MaskedMicrobatchesError, match=REFUSAL):
                resume()
        else:
            resume()
        with pytest.raises(MaskedMicrobatchesError, match=REFUSAL):
            next(dataloader)


class Group:
    """Stands in for a process group of ten ranks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 10


def data_module(data: Path, **kwargs: Any) -> EnergonMultiModalDataModule:
    class Groups:
        dp = Group()

    settings: dict[str, Any] = {"task_encoder": DefaultTaskEncoder(), "num_workers": 0, "pg_collection": Groups()}
    settings |= {"max_samples_per_sequence": 4, "shuffle_buffer_size": 5, "parallel_shard_iters": 3}
    return EnergonMultiModalDataModule(str(data), None, None, micro_batch_size=2, **(settings | kwargs))


def test_the_data_module_refuses_and_allows(data: Path) -> None:
    with pytest.raises(MaskedMicrobatchesError, match=REFUSAL):
        data_module(data, num_lanes=24).train_dataloader()
    next(data_module(data, num_lanes=24, masked_microbatches="allow").train_dataloader())


@pytest.mark.parametrize("built", [False, True])
def test_the_data_module_looks_at_the_lanes_of_the_state(data: Path, built: bool) -> None:
    states = {}
    for num_lanes in (24, 20):
        loader = get_savable_loader(data_module(data).datasets_provider(config_of(1, 0, num_lanes=num_lanes), "train"))
        states[num_lanes] = {"global_step": 0, "train": loader.save_state_rank()}
    module = data_module(data)
    if built:
        module.train_dataloader()
        with pytest.raises(MaskedMicrobatchesError, match=REFUSAL):
            module.load_state_dict(states[24])
    else:
        module.load_state_dict(states[24])
        with pytest.raises(MaskedMicrobatchesError, match=REFUSAL):
            module.train_dataloader()
    module = data_module(data, num_lanes=None if built else 24)
    if built:
        module.train_dataloader()
    module.load_state_dict(states[20])  # fits, whatever the configuration says
    next(module.train_dataloader())


STEPS, LANES, WORLD = 3, 4, 3


@pytest.mark.parametrize("accumulate", [2])
def test_gradients_are_those_of_the_tokens_of_real_microbatches(
    captions: Path, tmp_path: Path, accumulate: int
) -> None:
    """Three ranks on four lanes: of six microbatches two are masked. With this learning rate the weights stay."""
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("transformers")
    from run_outputs import read_losses

    from energon_bridge.training import run as training
    from energon_bridge.training.config_file import load_config
    from energon_bridge.training.module import VisionLanguageModule

    overrides = [f"data.path={captions}", f"run_dir={tmp_path / 'run'}", f"data.num_lanes={LANES}"]
    overrides += [f"data.global_batch_size={2 * WORLD * accumulate}", f"train.max_steps={STEPS}", "optimizer.lr=1e-30"]
    overrides += ["train.log_interval=1", "validation.generate=false", "checkpoint.interval=0"]
    config = load_config(CONFIGS / "smoke.yaml", overrides)
    port = free_port()

    def train(rank: int) -> list[dict[str, Any]]:
        become_rank(rank, WORLD, port)
        steps = []
        original = VisionLanguageModule.on_before_optimizer_step

        def record(self: VisionLanguageModule, optimizer: Any) -> None:
            original(self, optimizer)
            steps.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})

        VisionLanguageModule.on_before_optimizer_step = record  # type: ignore[method-assign]
        training.run(config)
        return steps

    found = run_forked(WORLD, train)
    expected, losses = expected_steps(config, accumulate)
    for rank in range(WORLD):
        for step in range(STEPS):
            gradients = found[rank][step]
            assert gradients.keys() == expected[step].keys()
            for name, gradient in expected[step].items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{step} {name}")
    logged = read_losses(tmp_path / "run")
    assert logged == pytest.approx(dict(enumerate(losses, 1)), rel=1e-5)


def expected_steps(config: Any, accumulate: int) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Return gradients and losses of the optimizer steps, as means over the tokens of the microbatches that exist."""
    from energon_bridge.training.module import VisionLanguageModule
    from energon_bridge.training.run_data import build_data_module
    from energon_bridge.training.run_model import load_bundle

    bundle = load_bundle(config, Path(config.run_dir) / "model")
    module = VisionLanguageModule(bundle, config)
    loader = get_savable_loader(
        build_data_module(config, bundle).datasets_provider(config_of(1, 0, num_lanes=LANES), "train")
    )
    ownership, m = Ownership(LANES, WORLD, 0), 0
    gradients, means = [], []
    batches = iter(loader)
    for _ in range(STEPS):
        losses: Any = 0.0
        tokens: Any = 0.0
        for _ in range(accumulate):
            for _ in range(ownership.step_size(m)):
                token_losses, mask = module.token_losses(next(batches))
                losses, tokens = losses + (token_losses * mask).sum(), tokens + mask.sum()
            m += ownership.step_size(m)
        module.zero_grad()
        mean = losses / tokens
        mean.backward()
        gradients.append({n: p.grad.clone() for n, p in module.model.named_parameters() if p.grad is not None})
        means.append(float(mean.detach()))
    loader.close()
    return gradients, means

"""Settings: builders, the data module and configurations take the same, with the same defaults, and pass them on."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import text_dataset

from energon_bridge import (
    DefaultTaskEncoder,
    EnergonMultiModalDataModule,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core import datasets
from energon_bridge.core.errors import ConfigurationError, StateError
from energon_bridge.core.loader.run_plan import ORDER_SETTINGS
from energon_bridge.core.stream.policy import ErrorPolicy
from energon_bridge.core.stream.settings import RunSettings
from energon_bridge.tools.columns.making import add_column
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers import datamodule
from energon_bridge.training.config_file import data_settings, dump_config, load_config

DERIVED = {"kind", "cache_pool", "conventions"}
"""Fields that the builders derive, or that others set."""
FOLDED = {"path", "kwargs", "worker_config", "repeat", "image_decode", "handler"}
"""Arguments of builders that are folded into other fields, or are no settings."""


def keywords(function: Any) -> dict[str, inspect.Parameter]:
    return {n: p for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def test_builders_take_the_fields_of_the_record() -> None:
    train, val = (inspect.signature(builder).parameters for builder in (get_train_dataset, get_val_dataset))
    assert (train.keys() | val.keys()) - FOLDED == {field.name for field in fields(RunSettings)} - DERIVED
    shared = train.keys() & val.keys() - {"split_part"}
    assert {name: train[name] for name in shared} == {name: val[name] for name in shared}


def test_the_data_module_takes_what_the_builders_take() -> None:
    own = keywords(EnergonMultiModalDataModule)
    by_position = {"num_workers", "pin_memory", "shuffle_buffer_size", "max_samples_per_sequence"}
    by_position |= {"packing_buffer_size", "task_encoder"}
    not_offered = {"split_part", "batch_size", "worker_config", "rank", "world_size", "start_at"}
    not_offered |= {"data_parallel_group", "microbatches_per_global_batch", "serves"}
    not_offered |= {"keep_until_done", "repeats"}  # whoever says what is done holds the loader itself
    for takes in (get_train_dataset, get_savable_loader, WorkerConfig):
        theirs = keywords(takes)
        if takes is get_savable_loader:
            del theirs["prefetch_factor"]  # it overrides that of a WorkerConfig
        assert theirs.keys() - own.keys() <= not_offered | by_position
        assert {name: theirs[name] for name in theirs.keys() & own.keys()}.items() <= own.items()


OTHER: dict[str, dict[str, Any]] = {
    "split_part": {"split_part": "other"},
    "dataset_config": {"dataset_config": "other.yaml"},
    "split_config": {"split_config": "other.yaml"},
    "trust_remote_code": {"trust_remote_code": True},
    "filter": {"filter": "number < 4"},
    "checksums": {"checksums": "never"},
    "shuffle_over_epochs_multiplier": {"shuffle_over_epochs_multiplier": 7},
    "shuffle_buffer_size": {"shuffle_buffer_size": 7},
    "max_samples_per_sequence": {"max_samples_per_sequence": 7},
    "parallel_shard_iters": {"parallel_shard_iters": 7},
    "virtual_epoch_length": {"virtual_epoch_length": 7},
    "limit": {"limit": 7},
    "group_by": {"group_by": ("number % 7",)},
    "bucket_batch_size": {"bucket_batch_size": "7", "group_by": ("number",)},
    "task_encoder": {"task_encoder": DefaultTaskEncoder()},
    "batch_size": {"batch_size": 7},
    "batch_drop_last": {"batch_drop_last": True},
    "packing_buffer_size": {"packing_buffer_size": 7},
    "max_tokens_per_microbatch": {"max_tokens_per_microbatch": 7},
    "error_policy": {"error_policy": ErrorPolicy(tolerance=7)},
}
"""A value of each setting that is not its default, with what it needs."""


@pytest.mark.parametrize("builder", [get_train_dataset, get_val_dataset])
def test_every_argument_of_a_builder_is_in_its_record(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_open", lambda path, settings, worker_config: settings)
    assert OTHER.keys() == {field.name for field in fields(RunSettings)} - DERIVED
    default = builder("data", batch_size=1)
    for name in OTHER.keys() & keywords(builder).keys():
        given = OTHER[name]
        changed = builder("data", **{"batch_size": 1, **given})
        assert getattr(changed, name) == given[name] != getattr(default, name)


def test_every_argument_of_the_data_module_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, dict[str, Any]] = {}
    for name in ("get_train_dataset", "get_val_dataset", "WorkerConfig", "get_savable_loader"):

        def keep(*_: Any, name: str = name, **given: Any) -> Any:
            got[name] = given
            return SimpleNamespace(dp_rank=0, dp_size=1)

        monkeypatch.setattr(datamodule, name, keep)
    names = list(keywords(EnergonMultiModalDataModule))
    given: dict[str, Any] = {name: 1000 + number for number, name in enumerate(names[names.index("batch_drop_last") :])}
    given |= {"shuffle_buffer_size": 7, "max_samples_per_sequence": 8, "packing_buffer_size": 9}
    data = EnergonMultiModalDataModule("data", None, task_encoder=DefaultTaskEncoder(), **given)
    data._load("train", 0)
    received = got["get_train_dataset"] | got["WorkerConfig"] | got["get_savable_loader"]
    assert {name: received[name] for name in given} == given
    data._load("val", 0)
    received = got["get_val_dataset"] | got["get_savable_loader"]
    shared = keywords(get_val_dataset).keys() & given.keys() - {"batch_drop_last"}
    assert {name: received[name] for name in shared} == {name: given[name] for name in shared}
    assert received["on_mismatch"] == "refuse"


def test_settings_arrive_where_they_belong(tmp_path: Path) -> None:
    create_captioning_test_dataset(tmp_path, num_train=8, num_val=4)
    passed: dict[str, Any] = {
        "shuffle_over_epochs_multiplier": 2,
        "buffer_bytes": 5,
        "fail_on_timeout": True,
        "seed": 3,
    }
    data = EnergonMultiModalDataModule(str(tmp_path), None, task_encoder=DefaultTaskEncoder(), num_workers=0, **passed)
    loader: Any = data.train_dataloader().loader
    assert loader.spec.settings.shuffle_over_epochs_multiplier == 2
    assert (loader.config.buffer_bytes, loader.config.seed, loader.watchdog.fail) == (5, 3, True)
    data.close()


def test_a_file_of_the_training_script_has_any_plain_setting(tmp_path: Path) -> None:
    config = load_config(None, ["data.start_method=spawn", "data.filter=tokens < 4", "data.fail_on_timeout=true"])
    assert config.data.settings == {"start_method": "spawn", "filter": "tokens < 4", "fail_on_timeout": True}
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert "error_policy" not in data_settings()
    config = load_config(None, ["data.worker_engine=ray", "data.ray_options={strategy: spread}"])
    assert config.data.settings == {"worker_engine": "ray", "ray_options": {"strategy": "spread"}}
    config = load_config(None, ["data.ray_options.num_cpus=2", "data.ray_options.runtime_env={pip: [av]}"])
    assert config.data.settings == {"ray_options": {"num_cpus": 2, "runtime_env": {"pip": ["av"]}}}


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("data.start_method=threads", "data.start_method must be one of fork, forkserver, spawn, got 'threads'"),
        ("data.buffer_bytes=some", "data.buffer_bytes must be int, got 'some'"),
        ("data.ray_options=4", "data.ray_options must be a mapping, got 4"),
        ("data.error_policy=skip", "data.error_policy must be a mapping, got 'skip'"),
        ("data.fail_on_timeuot=true", "Did you mean 'data.fail_on_timeout'"),
        ("data.settings={}", "there is no configuration key 'data.settings'"),
    ],
)
def test_a_file_with_another_value_is_refused(override: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load_config(None, [override])


def test_settings_are_checked_whoever_changes_them(tmp_path: Path) -> None:
    create_captioning_test_dataset(tmp_path, num_train=8, num_val=0)
    dataset = get_train_dataset(str(tmp_path), batch_size=2)
    with pytest.raises(ConfigurationError, match="batch_size must be an integer of at least 1 or None, got 0"):
        dataset.with_settings(batch_size=0)
    assert dataset.with_settings(batch_size=4) == replace(dataset, settings=replace(dataset.settings, batch_size=4))


GROUPED = {"group_by": ("number % 3",), "microbatches": 2}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kind": ({}, {"repeat": False}),
    "split_part": ({}, {"split_part": "val"}),
    "filter": ({}, {"filter": "number < 50"}),
    "shuffle_over_epochs_multiplier": ({}, {"shuffle_over_epochs_multiplier": 2}),
    "shuffle_buffer_size": ({}, {"shuffle_buffer_size": 7}),
    "max_samples_per_sequence": ({}, {"max_samples_per_sequence": 7}),
    "parallel_shard_iters": ({}, {"parallel_shard_iters": 3}),
    "group_by": (GROUPED, {"group_by": ("number % 4",)}),
    "bucket_batch_size": (GROUPED, {"bucket_batch_size": {"0": 3, "1": 2, "2": 2}}),
    "batch_size": ({}, {"batch_size": 3}),
    "batch_drop_last": ({"builder": get_val_dataset}, {"batch_drop_last": True}),
    "packing_buffer_size": ({"packing_buffer_size": 4}, {"packing_buffer_size": 5}),
    "max_tokens_per_microbatch": (
        {"max_tokens_per_microbatch": 40, "packing_buffer_size": 4, "batch_size": 1},
        {"max_tokens_per_microbatch": 50},
    ),
}
"""Settings that change which samples come: a run that has them, and the change that its state is refused for."""
FREE = {
    "dataset_config": "names a file that says what a sample is",
    "split_config": "names a file, whose shards are compared",
    "trust_remote_code": "allows code",
    "checksums": "tells damage",
    "virtual_epoch_length": "ends iterators, not the stream",
    "limit": "ends a pass earlier",
    "task_encoder": "is the program's",
    "error_policy": "counts what it leaves out",
    "cache_pool": "keeps files",
    "conventions": "are recorded by themselves (compat)",
}
"""The others, and why a state goes on with other values of them."""


class Lengths(DefaultTaskEncoder):
    """Packs, or groups by length."""

    def sample_length(self, sample: Any) -> int:
        return len(sample.text)

    def select_samples_to_pack(self, samples: Any) -> Any:
        return [samples]

    def pack_selected_samples(self, samples: Any) -> Any:
        return samples[0]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(text_dataset(tmp_path_factory.mktemp("settings") / "data", train=[70], val=[30]))
    add_column(path, "number", lambda sample: int(sample.text.split()[1]), made_of="number")
    return path


def test_every_setting_is_compared_with_the_state_or_changes_no_order() -> None:
    assert REFUSED.keys() | FREE.keys() == {field.name for field in fields(RunSettings)}
    assert not REFUSED.keys() & FREE.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_is_refused_for_another_value(numbered: str, name: str) -> None:
    run, change = REFUSED[name]

    def loader(settings: dict[str, Any]) -> Any:
        given = {"batch_size": 2, "task_encoder": Lengths(), **settings}
        group = given.pop("microbatches", None)
        config = WorkerConfig(num_workers=0, seed=1, microbatches_per_global_batch=group)
        builder = given.pop("builder", get_train_dataset)
        return get_savable_loader(builder(numbered, worker_config=config, **given))

    before = loader(run)
    batches = iter(before)
    for _ in range(3):
        next(batches)
    state = before.save_state_rank()
    assert state["settings"].keys() <= ORDER_SETTINGS  # which forecasts compare
    loader(run).restore_state_rank(state)
    with pytest.raises(StateError):
        loader({**run, **change}).restore_state_rank(state)

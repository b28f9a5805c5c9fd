"""The configuration, the builder and the provider in Megatron-Bridge's manner."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import worker_config_of
from made import made_once
from rank_states import rank_file, write_rank_file

from energon_bridge import BatchCost, DefaultTaskEncoder
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.sequences import MultiModalBatch
from energon_bridge.models.families import ChatConfig
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.bridge import (
    DatasetBuildContext,
    EnergonDatasetBuilder,
    EnergonDatasetConfig,
    energon_train_valid_test_datasets_provider,
)
from energon_bridge.trainers.megatron_lm import read_rank_files
from energon_bridge.trainers.task_encoders import (
    ChatTemplateTaskEncoderConfig,
    MultiModalTaskEncoderConfig,
    TaskEncoderConfig,
    TaskEncoderContext,
)

dataset = made_once(create_captioning_test_dataset, num_train=48, num_val=7)


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and an image processor."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("processors")
    words = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "picture", "a", "USER:", "ASSISTANT:"]
    words += [str(number) for number in range(60)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(
        folder
    )
    return folder


def config(dataset: Path, **values: Any) -> EnergonDatasetConfig:
    settings: dict[str, Any] = {"path": dataset, "seq_length": 64, "micro_batch_size": 2, "num_workers": 0}
    return EnergonDatasetConfig(**(settings | {"task_encoder": DefaultTaskEncoder()} | values))


def keys(batches: Any, count: int) -> list[list[str]]:
    return [next(batches).__key__ for _ in range(count)]


def test_a_declared_run_trains_validates_and_resumes(dataset: Path, processors: Path, tmp_path: Path) -> None:
    declared = config(
        dataset,
        task_encoder=MultiModalTaskEncoderConfig(hf_processor_path=str(processors)),
        pad_to_multiple_of=16,
        global_batch_size=8,
    )
    train, valid, test = energon_train_valid_test_datasets_provider((100, 10, 10), declared)
    assert train is not None
    assert valid is not None
    assert test is None
    batch = next(train)
    assert isinstance(batch, MultiModalBatch)
    assert batch.tokens.shape == (2, 16)
    assert batch.pixel_values is not None
    assert batch.pixel_values.shape == (2, 3, 8, 8)
    assert len(list(valid.one_pass())) == 4
    assert keys(iter(valid), 5)[0] == keys(iter(valid), 1)[0]
    assert keys(valid, 5)[0] == keys(valid, 4)[3]  # it begins anew at its end
    # As the trainer saves and restores, on every rank.
    write_rank_file(rank_file(tmp_path, 3, 0, layout="bridge"), train.save_state())
    assert (tmp_path / "iter_0000003" / "train_dataloader_dprank000.pt").exists()
    following = keys(train, 5)
    again = EnergonDatasetBuilder(declared).build(DatasetBuildContext(100, 0, 0))[0]
    assert again is not None
    again.restore_state(torch.load(rank_file(tmp_path, 3, 0, layout="bridge"))["dataloader_state_dict"])
    assert keys(again, 5) == following
    again.restore_state(read_rank_files(tmp_path, 3))
    assert keys(again, 5) == following


@pytest.mark.parametrize(
    ("samples", "values", "expected"),
    [
        ((1, 1, 1), {}, (True, True)),
        ((1, 1, 0), {"do_validation": False}, (True, False)),
        ((0, 1, 0), {}, (False, True)),
        ((1, 0, 0), {}, (True, False)),
    ],
)
def test_only_what_is_wanted_is_built(samples: Any, values: Any, expected: Any, dataset: Path) -> None:
    train, valid, test = EnergonDatasetBuilder(config(dataset, **values)).build(DatasetBuildContext(*samples))
    assert (train is not None, valid is not None) == expected
    assert test is None


def test_a_collection_with_fields_that_were_never_set(dataset: Path) -> None:
    class Group:
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    for groups, expected in ((SimpleNamespace(dp=Group()), (1, 2)), (SimpleNamespace(), (0, 1))):
        data = EnergonDatasetBuilder(config(dataset)).data_module(DatasetBuildContext(1, 1, 0, None, groups))
        found = worker_config_of(data)
        assert (found.rank, found.world_size) == expected


def test_finalizing_fills_in_and_may_be_repeated(dataset: Path) -> None:
    declared = config(dataset, num_workers=3)
    declared.finalize()
    once = dataclasses.replace(declared)
    declared.finalize()
    assert declared == once
    assert declared.num_val_workers == 3
    assert declared.path == str(dataset)


@pytest.mark.filterwarnings("ignore")  # transformers on machines without torchvision
def test_an_encoder_for_a_family_is_declared_by_its_folder(dataset: Path, tmp_path: Path) -> None:
    from energon_bridge.training.config import ModelConfig
    from energon_bridge.training.presets import write_preset

    model = ModelConfig(preset="tiny-qwen2-vl", hidden_size=32, num_layers=1, num_heads=2, image_size=28, patch_size=14)
    write_preset(model, tmp_path / "model", lambda: ["a red picture"] * 3)
    encoder = ChatTemplateTaskEncoderConfig(
        hf_processor_path=str(tmp_path / "model"), chat=ChatConfig(max_num_images=1, pad_to_multiple_of=3)
    )
    train, _, _ = energon_train_valid_test_datasets_provider(
        (10, 0, 0), config(dataset, task_encoder=encoder, pad_to_multiple_of=16)
    )
    batch = next(train)
    assert isinstance(batch, MultiModalBatch)
    assert batch.tokens.shape[1] % 16 == 0
    assert batch.visual_inputs["image_grid_thw"].shape == (2, 3)
    assert batch.loss_mask.sum() > 0


class Declared:
    """A task encoder of another package, declared."""

    def build(self, context: TaskEncoderContext) -> Any:
        assert context == TaskEncoderContext(tokenizer="the run's", seq_length=64, pad_to_multiple_of=128)
        return DefaultTaskEncoder()


def test_every_declaration_with_a_build_method_fits(dataset: Path) -> None:
    assert isinstance(Declared(), TaskEncoderConfig)
    train, _, _ = energon_train_valid_test_datasets_provider(
        (1, 0, 0), config(dataset, task_encoder=Declared()), "the run's"
    )
    assert train is not None
    assert len(next(train).__key__) == 2


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"path": ""}, "path is empty"),
        ({"seq_length": 0}, "seq_length must be an integer of at least 1, got 0"),
        ({"micro_batch_size": True}, "micro_batch_size must be an integer"),
        ({"num_val_workers": -1}, "num_val_workers must be an integer of at least 0 or None"),
        ({"shuffle_buffer_size": 0}, "shuffle_buffer_size must be an integer of at least 1 or None"),
        ({"dataloader_type": "cyclic"}, "dataloader_type must be 'external', got 'cyclic'"),
        ({"do_test": True}, "there is no test data"),
        ({"packing_buffer_size": 8}, "packing_buffer_size with micro_batch_size=2"),
        ({"global_batch_size": 3}, "global_batch_size=3 is not a multiple of micro_batch_size=2"),
        ({"pad_to_max_length": True}, "seq_length=64, which is not a multiple of pad_to_multiple_of=128"),
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch must be an integer of at least 1 or None"),
        ({"balance": "global_batch"}, "balance='global_batch' divides .*: set global_batch_size"),
        ({"balance_cost": {"token": 1.0}}, "balance_cost has token; BatchCost takes tokens, attention, patches"),
        ({"balance_cost": {"tokens": -1.0}}, "BatchCost: tokens must be a finite number of at least 0"),
        ({"balance_cost": 3}, "balance_cost must be weights or a function of a batch, got 3"),
        ({"task_encoder": 3}, "task_encoder is a int"),
        ({"dataset_kwargs": {"batch_size": 3}}, "dataset_kwargs contains batch_size"),
        ({"dataset_kwargs": {"seed": 3}}, "dataset_kwargs contains seed"),
        ({"dataset_kwargs": {"start_methode": "spawn"}}, "Did you mean 'start_method'"),
        ({"dataset_kwargs": {"error_policy": [object()]}}, r"dataset_kwargs\['error_policy'\]\[0\] is a object"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, Any], text: str, dataset: Path) -> None:
    with pytest.raises(ConfigurationError, match=text):
        config(dataset, **values).finalize()


def test_balance_and_budgets_of_tokens_are_declared(dataset: Path) -> None:
    weights = {"tokens": 1.0, "attention": 1e-5}
    declared = config(
        dataset,
        micro_batch_size=1,
        global_batch_size=4,
        max_tokens_per_microbatch=512,
        balance="global_batch",
        balance_cost=weights,
    )
    data = EnergonDatasetBuilder(declared).data_module(DatasetBuildContext(1, 0, 0))
    assert (data.balance, data.balance_cost) == ("global_batch", BatchCost(**weights))
    assert data.max_tokens_per_microbatch == 512


def test_a_folder_without_processors_is_named(dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    declared = config(dataset, task_encoder=MultiModalTaskEncoderConfig(hf_processor_path=str(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"hf_processor_path=.*cannot load a tokenizer and an image processor"):
        EnergonDatasetBuilder(declared).build(DatasetBuildContext(1, 0, 0))

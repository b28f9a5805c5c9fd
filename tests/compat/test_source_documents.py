"""The calls of megatron-energon's published introductions, as users copy them, work here as they are written there.

`test_dropin.py` runs them a second time with ENERGON_MODULE=megatron.energon, the name that they are written for.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import textwrap
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import output_of
from engine import worker_config_of
from forked import run_program

import energon_bridge
from energon_bridge.core.samples import sample_type_names
from energon_bridge.tools.testing import create_captioning_test_dataset

api: Any = importlib.import_module(os.environ.get("ENERGON_MODULE", "energon_bridge"))
Blender, CaptioningSample, WorkerConfig = api.Blender, api.CaptioningSample, api.WorkerConfig
EnergonDataloader, EnergonMultiModalDataModule = api.EnergonDataloader, api.EnergonMultiModalDataModule
get_loader, get_savable_loader, cyclic_iter = api.get_loader, api.get_savable_loader, api.cyclic_iter
get_train_dataset, get_val_dataset = api.get_train_dataset, api.get_val_dataset

NUM_TRAIN = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("captioning")
    return str(create_captioning_test_dataset(folder, num_train=NUM_TRAIN, num_val=7, image_format="jpg"))


COYO_COCO = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  # Train dataset, the datasets will be blended according to their weights
  train:
    blend:
      - weight: 5
        path: ./coco
      - weight: 2
        path: ./coyo
  # For val and test, datasets will be concatenated
  val:
    path: ./coco
  test:
    path: ./coyo
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the datasets that the documents blend, and their file."""
    folder = tmp_path_factory.mktemp("blends")
    for name, num_val in (("coco", 6), ("coyo", 5), ("dataset3", 0)):
        create_captioning_test_dataset(folder / name, num_train=NUM_TRAIN, num_val=num_val)
    split = folder / "coyo" / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace("val:", "test:"))
    (folder / "coyo-coco-dataset.yaml").write_text(COYO_COCO)
    return folder


@pytest.fixture(params=["a dataset", "coyo-coco-dataset.yaml"])
def source(request: pytest.FixtureRequest, path: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the tutorials train on: the path of a dataset, or the blend, in the current folder."""
    monkeypatch.chdir(folder)
    return path if request.param == "a dataset" else request.param


def check_shares(ds: Any, batches: Iterable[Any], **expected: float) -> None:
    """Check the part of the samples that comes from each dataset, by the name of its folder."""
    names = {leaf.identity: Path(leaf.dataset.path).name for leaf in ds.leaves}
    found = Counter(names[key[0]] for batch in batches for key in batch.__restore_key__[3])
    assert {name: count / found.total() for name, count in found.items()} == pytest.approx(expected, abs=0.01)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Note the loaders that are made; the calls of the documents never close them."""
    loaders: list[Any] = []
    original = energon_bridge.core.datasets.SavableDataLoader

    def make(*args: Any, **kwargs: Any) -> Any:
        loaders.append(original(*args, **kwargs))
        return loaders[-1]

    monkeypatch.setattr(energon_bridge.core.datasets, "SavableDataLoader", make)
    yield loaders
    for loader in loaders:
        loader.close()


# Overview ------------------------------------------------------------------------------------------------------------


def test_basic_usage(path: str, opened: list[Any]) -> None:
    ds = get_train_dataset(
        path, batch_size=32, shuffle_buffer_size=1000, worker_config=WorkerConfig.default_worker_config()
    )
    seen = []
    for batch in get_loader(ds):
        seen += batch.__key__
        if len(seen) >= 2 * NUM_TRAIN:
            break
    assert sorted(seen) == sorted(2 * [f"train-{number:05d}" for number in range(NUM_TRAIN)])
    assert opened[0].num_workers == 4


def test_multimodal_example(path: str, opened: list[Any]) -> None:
    ds = get_train_dataset(path, batch_size=32, worker_config=WorkerConfig(num_workers=8, prefetch_factor=2))
    for batch in get_loader(ds):
        images = batch["image"]
        texts = batch["text"]
        break
    assert (images.shape, images.dtype) == ((32, 3, 16, 16), torch.float32)
    assert 0 <= images.min() < images.max() <= 1
    assert [text.split()[0] for text in texts] == 32 * ["a"]
    assert texts == batch.caption
    assert images is batch.image


def test_worker_configuration(path: str) -> None:
    config = WorkerConfig(num_workers=8, prefetch_factor=2, persistent_workers=True)
    assert (config.num_workers, config.prefetch_factor, config.persistent_workers) == (8, 2, True)
    assert (config.rank, config.world_size) == (0, 1)
    loader = get_loader(get_train_dataset(path, batch_size=32, worker_config=config))
    assert (loader.num_workers, loader.prefetch_factor) == (8, 2)


def test_integration_with_a_training_loop(path: str, opened: list[Any]) -> None:
    args = Namespace(data_path=path, micro_batch_size=4)
    train_ds = get_train_dataset(args.data_path, batch_size=args.micro_batch_size)
    for iteration, batch in enumerate(get_loader(train_ds)):
        assert batch.image.shape[0] == args.micro_batch_size
        if iteration == 3:
            break
    assert opened[0].num_workers == 4


@pytest.mark.parametrize(
    ("given", "buffer", "length"),
    [
        ({}, 100, None),
        ({"shuffle_buffer_size": 1000}, 1000, None),
        ({"max_samples_per_sequence": 50}, 100, 50),
        ({"shuffle_buffer_size": 100, "max_samples_per_sequence": 100}, None, None),
    ],
)
def test_leaving_sizes_out_logs_the_values_used(
    given: dict[str, Any], buffer: int | None, length: int | None, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="energon_bridge"):
        spec = get_train_dataset(path, batch_size=4, **given)
    said = f"{path}: shuffle_buffer_size={buffer}, max_samples_per_sequence={length}"
    assert caplog.messages == ([said] if buffer else [])
    assert not buffer or (spec.settings.shuffle_buffer_size, spec.settings.max_samples_per_sequence) == (buffer, length)


def test_dataset_blending(folder: Path, opened: list[Any]) -> None:
    blended_ds = Blender(
        [
            (f"{folder}/coco", 0.6),  # 60%
            (f"{folder}/coyo", 0.3),  # 30%
            (f"{folder}/dataset3", 0.1),  # 10%
        ]
    )
    ds = get_train_dataset(blended_ds, batch_size=32)
    check_shares(ds, islice(get_loader(ds), 40), coco=0.6, coyo=0.3, dataset3=0.1)
    assert next(iter(get_loader(blended_ds))).image.shape == (1, 3, 16, 16)  # as it stands


# README --------------------------------------------------------------------------------------------------------------


def test_usage_of_the_library(path: str, opened: list[Any]) -> None:
    train_loader = get_loader(
        get_train_dataset(path, batch_size=32, shuffle_buffer_size=None, max_samples_per_sequence=None)
    )
    seen = []
    for batch in train_loader:
        seen += batch.__key__
        if len(seen) == NUM_TRAIN:
            break
    assert sorted(seen) == [f"train-{number:05d}" for number in range(NUM_TRAIN)]


def test_preparing_with_the_answers_of_tutorial_1(tmp_path: Path) -> None:
    root = create_captioning_test_dataset(tmp_path / "data", num_train=80, num_val=0, image_format="jpg")
    shutil.rmtree(root / ".nv-meta")
    kind = str(sample_type_names().index("CaptioningSample"))
    answers = "\n".join(["8,1,1", "y", kind, "jpg", "txt", ""])
    output_of("prepare", root, answers=answers)
    output_of("lint", root)
    batches = get_loader(get_val_dataset(root, batch_size=4, worker_config=WorkerConfig(num_workers=0)))
    assert [caption[:2] for batch in batches for caption in batch.caption] == 10 * ["a "]


# Quickstart ----------------------------------------------------------------------------------------------------------


def quickstart(path: str, batch_size: int | None, worker_config: WorkerConfig | None = None) -> Any:
    """Return the dataset of the tutorials, which all give the same sizes."""
    return get_train_dataset(
        path,
        batch_size=batch_size,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=worker_config or WorkerConfig.default_worker_config(),
    )


def test_tutorial_2_prints_a_captioning_sample(
    path: str, opened: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    loader = get_loader(quickstart(path, None))
    for batch in loader:
        print(batch)  # noqa: T201 - what the tutorial does
        break
    printed = capsys.readouterr().out
    assert type(batch) is CaptioningSample
    # The tutorial's own text has all numbers of the image; here it is a line.
    assert printed == f"CaptioningSample({batch.__key__!r}: image float32[3, 16, 16], caption {batch.caption!r})\n"
    assert batch.image.shape == (3, 16, 16)


@pytest.mark.usefixtures("opened")
def test_tutorial_3_blends_by_a_metadataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ds = quickstart("coyo-coco-dataset.yaml", 4)
    batches = list(islice(get_loader(ds), 350))
    assert batches[0].image.shape == (4, 3, 16, 16)
    check_shares(ds, batches, coco=5 / 7, coyo=2 / 7)
    for split_part, name, size in (("val", "coco", 6), ("test", "coyo", 5)):
        ds = get_val_dataset("coyo-coco-dataset.yaml", split_part=split_part, batch_size=1)
        batches = [batch for batch in get_loader(ds) if batch.__valid__.all()]
        assert len(batches) == size
        check_shares(ds, batches, **{name: 1})


def test_tutorial_4_distributed_loading(source: str, path: str, opened: list[Any]) -> None:
    batches = []
    for rank in range(2):
        worker_config = WorkerConfig(rank=rank, world_size=2, num_workers=2)
        loader = get_loader(quickstart(source, 4, worker_config))
        batches.append([batch.__key__ for batch in islice(loader, NUM_TRAIN // 8)])
    num_lanes = opened[0].save_state_rank()["num_lanes"]
    alone = get_loader(quickstart(source, 4, WorkerConfig(num_workers=0, num_lanes=num_lanes)))
    in_turn = [keys for step in zip(*batches, strict=True) for keys in step]
    assert in_turn == [batch.__key__ for batch in islice(alone, NUM_TRAIN // 4)]
    assert len({key for keys in in_turn for key in keys}) == NUM_TRAIN or source != path


def test_tutorial_5_saving_and_restoring(source: str, path: str, opened: list[Any], tmp_path: Path) -> None:
    ds = quickstart(source, 4)
    loader = get_savable_loader(ds)
    for _i, batch in zip(range(10), loader):  # noqa: B007, B905 - as the tutorial has it
        break
    state = loader.save_state_rank()
    torch.save(state, tmp_path / "state.pt")
    following = [batch.__key__ for batch in islice(loader, 20)]
    program = f"""
    from energon_bridge.compat import install; install()
    import torch
    from itertools import islice
    from {api.__name__} import WorkerConfig, get_savable_loader, get_train_dataset

    ds = get_train_dataset(
        {source!r},
        batch_size=4,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig.default_worker_config(),
    )
    loader = get_savable_loader(ds)
    loader.restore_state_rank(torch.load({str(tmp_path / "state.pt")!r}))
    print([batch.__key__ for batch in islice(loader, 20)])
    """
    result = run_program(["-c", textwrap.dedent(program)], Path.cwd())
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(following)
    assert batch.__key__ not in following[: NUM_TRAIN // 4 - 1] or source != path


# Walkthrough: what the article says a loader for multimodal data must do ---------------------------------------------


def test_a_run_can_be_replayed(path: str, opened: list[Any]) -> None:
    config = WorkerConfig(num_workers=2)
    runs = [[batch.__key__ for batch in islice(get_loader(quickstart(path, 4, config)), 40)] for _ in range(2)]
    assert runs[0] == runs[1]


# Data module ---------------------------------------------------------------------------------------------------------


def test_the_documented_signature_of_the_data_module(path: str) -> None:
    encoder = energon_bridge.DefaultTaskEncoder()
    data = EnergonMultiModalDataModule(
        path=path,
        tokenizer=None,
        image_processor=None,
        seq_length=2048,
        micro_batch_size=1,
        global_batch_size=1,
        num_workers=1,
        num_val_workers=None,
        pin_memory=True,
        shuffle_buffer_size=100,
        max_samples_per_sequence=None,
        multimodal_sample_config=None,
        task_encoder=encoder,
        decoder_seq_length=None,
        packing_buffer_size=None,
        validation_task_encoder=None,
        pg_collection=None,
        parallel_shard_iters=4,
    )
    assert data.task_encoder is data.validation_task_encoder is encoder
    worker_config = worker_config_of(data)
    assert data.datasets_provider(worker_config, "train").settings.parallel_shard_iters == 4
    assert not data.datasets_provider(worker_config, "train").ends
    assert data.datasets_provider(worker_config).ends
    assert data.init_global_step == 0
    train, val = data.build()
    assert (train, val) == (data.train_dataloader_object, data.val_dataloader_object)
    assert next(train).image.shape == next(val).image.shape == (1, 3, 16, 16)
    assert data.test_dataloader() is None
    data.close()


def test_the_documented_dataloader_and_cyclic_iter(path: str) -> None:
    loader = get_savable_loader(get_val_dataset(path, batch_size=4, worker_config=WorkerConfig(num_workers=0)))
    dataloader = EnergonDataloader(loader)
    keys = [next(dataloader).__key__ for _ in range(5)]
    assert keys[:2] == keys[2:4] == [batch.__key__ for batch in islice(cyclic_iter(loader), 2)]
    assert keys[4] == keys[0]
    assert [batch.__key__ for batch in iter(dataloader)] == keys[:2]
    assert dataloader.save_state()["kind"] == "finite"

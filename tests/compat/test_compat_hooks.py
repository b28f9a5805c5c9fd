"""Task encoders that override `build_…` hooks: what they put together is what is loaded, or it is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from keyed import mix_document, write_mix
from made import made_once

from energon_bridge import WorkerConfig
from energon_bridge.compat import build_hooks as hooks, factories, install, wrapped
from energon_bridge.compat.encoders import DatasetBlendMode, DefaultTaskEncoder
from energon_bridge.compat.loading import get_savable_loader
from energon_bridge.core.errors import NotProvidedError
from energon_bridge.tools.testing import create_captioning_test_dataset

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


path = made_once(create_captioning_test_dataset, num_train=12, num_val=6)


@pytest.fixture(scope="module")
def mix(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    other = create_captioning_test_dataset(tmp_path_factory.mktemp("other"), num_train=6, num_val=3)
    parts = [{"path": str(path), "weight": 3}, {"path": str(other), "weight": 1}]
    file = tmp_path_factory.mktemp("mix") / "mix.yaml"
    return write_mix(file, train={"blend": parts}, val={"path": str(path)})


class Plain(DefaultTaskEncoder[Any, Any, Any, Any]):
    pass


class Older(DefaultTaskEncoder[Any, Any, Any, Any]):
    """A copy of the hook of version 5, as public code has it: datasets in pairs, cooked behind the buffer."""

    def build_train_datasets(
        self,
        *,
        datasets: Any,
        worker_config: Any,
        batch_size: Any,
        batch_drop_last: bool = False,
        packing_buffer_size: Any = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: Any = None,
        blend_mode: Any = DatasetBlendMode.NONE,
        repeat: bool = True,
    ) -> Any:
        for dataset, _ in datasets:
            assert len(dataset) in (12, 6)
        inner = [
            (
                wrapped.RepeatDataset(dataset.build(worker_rotation_offset=0), worker_config=worker_config),
                1.0 if weight is None else float(weight),
            )
            for dataset, weight in datasets
        ]
        made = wrapped.BlendDataset(*inner, worker_config=worker_config) if len(inner) > 1 else inner[0][0]
        if shuffle_buffer_size is not None and shuffle_buffer_size > 1:
            made = wrapped.ShuffleBufferDataset(made, size=shuffle_buffer_size, worker_config=worker_config)
        made = self.build_cook_crude_sample(made, worker_config=worker_config)
        made = self.build_encode_sample(made, worker_config=worker_config)
        made = self.build_batch(
            made,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            worker_config=worker_config,
        )
        if virtual_epoch_length > 0:
            made = wrapped.EpochizeDataset(made, length=virtual_epoch_length, worker_config=worker_config)
        return made


def train(path: Path, encoder: Any, **settings: Any) -> Any:
    settings = {"batch_size": 2, "worker_config": CONFIG, "task_encoder": encoder} | settings
    return hooks.get_train_dataset(path, **settings)


def keys(dataset: Any, steps: int = 9) -> list[list[str]]:
    batches = iter(get_savable_loader(dataset))
    return [list(next(batches).__key__) for _ in range(steps)]


@pytest.mark.parametrize("source", ["path", "mix"])
@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer_size": 5}, {"virtual_epoch_length": 20}, {"batch_size": 3}])
def test_a_copy_of_the_hook_loads_what_the_hook_loads(
    source: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(source)
    assert keys(train(path, Older(), **settings)) == keys(train(path, Plain(), **settings))


def test_other_settings_of_a_hook_count(path: Path) -> None:
    class Other(DefaultTaskEncoder[Any, Any, Any, Any]):
        def build_batch(self, dataset: Any, *, batch_size: Any, **settings: Any) -> Any:
            assert batch_size == 2
            return super().build_batch(dataset, batch_size=4, **settings)

        def build_train_datasets(self, *, virtual_epoch_length: int = 0, **settings: Any) -> Any:
            return super().build_train_datasets(virtual_epoch_length=3, **settings)

    loader = get_savable_loader(train(path, Other()))
    assert [len(batch.__key__) for batch in loader] == [4, 4, 4]


@pytest.mark.parametrize("encoder", [Plain(), DefaultTaskEncoder(), None])
def test_hooks_that_a_program_replaces_in_the_class_count(
    encoder: Any, path: Path, mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DefaultTaskEncoder.build_train_datasets
    longer = lambda self, *, batch_size, **settings: own(self, batch_size=4, **settings)  # noqa: E731
    monkeypatch.setattr(DefaultTaskEncoder, "build_train_datasets", longer)
    assert [len(batch) for batch in keys(train(path, encoder), 2)] == [4, 4]
    turned = lambda self, *, datasets, **settings: own(self, datasets=datasets[::-1], **settings)  # noqa: E731
    monkeypatch.setattr(DefaultTaskEncoder, "build_train_datasets", turned)
    with pytest.raises(NotProvidedError, match=r"overrides build_train_datasets in a way .*number 1 forever"):
        train(mix, encoder)


def test_a_hook_of_validation_counts(path: Path) -> None:
    class Limited(DefaultTaskEncoder[Any, Any, Any, Any]):
        def build_val_datasets(self, *, limit: Any = None, **settings: Any) -> Any:
            return wrapped.LimitDataset(super().build_val_datasets(**settings), 2, reset_after_epoch=True)

    settings: dict[str, Any] = {"batch_size": 2, "worker_config": CONFIG, "task_encoder": Limited()}
    assert len(list(get_savable_loader(hooks.get_val_dataset(path, **settings)))) == 2
    ((dataset, opened),) = hooks.get_val_datasets(path, **settings)
    assert len(list(get_savable_loader(dataset))) == 2
    assert len(opened) == 6


def test_repetitions_are_taken_as_the_mix_has_them(path: Path) -> None:
    class Same(DefaultTaskEncoder[Any, Any, Any, Any]):
        def build_train_datasets(self, **settings: Any) -> Any:
            assert settings["blend_mode"] is DatasetBlendMode.SAMPLE_REPETITIONS
            return super().build_train_datasets(**settings)

    epochs = mix_document(train={"blend_epochized": [{"path": str(path), "repetitions": 2}]})
    assert keys(train(epochs, Same())) == keys(train(epochs, Plain()))  # type: ignore[arg-type]


class Reversed(Older):
    def build_train_datasets(self, *, datasets: Any, **settings: Any) -> Any:
        return super().build_train_datasets(datasets=datasets[::-1], **settings)


class Weighted(Older):
    def build_train_datasets(self, *, datasets: Any, **settings: Any) -> Any:
        return super().build_train_datasets(datasets=[(dataset, 1.0) for dataset, _ in datasets], **settings)


class Raw(Older):
    def build_encode_sample(self, dataset: Any, *, worker_config: Any) -> Any:
        return dataset


class Unbatched(Older):
    def build_batch(self, dataset: Any, **settings: Any) -> Any:
        return dataset


class Sorted(Older):
    def build_encode_sample(self, dataset: Any, *, worker_config: Any) -> Any:
        return Sorter(super().build_encode_sample(dataset, worker_config=worker_config))


class Sorter(wrapped.SavableDataset):
    pass


class Odd(Older):
    def build_train_datasets(self, **settings: Any) -> Any:
        made = super().build_train_datasets(**settings)
        return self.build_batch(
            self.build_encode_sample(made, worker_config=CONFIG), batch_size=2, worker_config=CONFIG
        )


@pytest.mark.parametrize(
    ("encoder", "text"),
    [
        (Reversed, "Reversed overrides build_train_datasets in a way .*number 1 forever with weight 0.25, number 0"),
        (Weighted, "number 0 forever with weight 0.5, .* but the mix has number 0 forever with weight 0.75"),
        (Raw, "it put ShuffleBufferDataset where samples encoded by build_encode_sample are expected"),
        (Unbatched, "it put EncodedDataset where samples batched by build_batch are expected"),
        (Sorted, "a dataset derived from SavableDataset"),
        (Odd, "it put BatchedDataset where a dataset of the mix is expected"),
    ],
)
def test_what_the_engine_does_not_do_is_refused(mix: Path, encoder: type, text: str) -> None:
    with pytest.raises(NotProvidedError, match=text):
        train(mix, encoder())


def test_a_dataset_of_a_mix_is_a_pair_too(mix: Path) -> None:
    loaded = factories.load_dataset(mix).get_datasets(training=True, split_part="train", worker_config=CONFIG)
    assert [(len(dataset), weight) for dataset, weight in loaded.datasets] == [(12, 0.75), (6, 0.25)]


def test_names_of_older_versions_can_be_imported() -> None:
    def seen() -> str:
        install()
        from megatron.energon.flavors.webdataset import VideoData

        with pytest.raises(NotProvidedError) as caught:
            VideoData()
        assert list[VideoData]
        return str(caught.value)

    assert "annotate with energon_bridge.models.av.AVDecoder" in run_forked(1, lambda _: seen())[0]

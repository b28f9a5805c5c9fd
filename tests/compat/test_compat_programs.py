"""What programs for megatron-energon call beside the builders: mixes one by one, metadata, printing, commands."""

from __future__ import annotations

import dataclasses
import io
import pickle
import shutil
import wave
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from keyed import CRUDE, join, mix_document, write_mix

from energon_bridge import Cooker, SystemFileStore, WorkerConfig, get_val_dataset
from energon_bridge.compat import (
    cache_pool,
    dataset_classes,
    dataset_info,
    decoders,
    encoders,
    epath,
    factories,
    loading,
    preview,
    table,
    wrapped,
)
from energon_bridge.core.errors import ConfigurationError, DatasetNotFoundError, MetadataError, NotProvidedError
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.mix.opener import MIN_DATASETS
from energon_bridge.core.prepare import prepare_dataset
from energon_bridge.core.prepare.split import parse_patterns
from energon_bridge.models.av import AVDecoder
from energon_bridge.tools.check.dataset_summary import summarize_dataset
from energon_bridge.tools.check.lint import lint_parts
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
MIX = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: data, weight: 3, subflavors: {of: first, level: inner}}
      - {path: inner.yaml, split_part: val, weight: 1, subflavors: {level: outer}}
"""
INNER = """
splits:
  val:
    datasets:
      - {path: data, split_part: val, weight: 1, subflavors: {level: inner}}
      - {path: data, split_part: train, weight: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("programs")
    create_captioning_test_dataset(root / "data", num_train=20, num_val=5)
    (root / "mix.yaml").write_text(MIX)
    (root / "inner.yaml").write_text(INNER)
    (root / "lines.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    return root


# What programs change of the package ---------------------------------------------------------------------------------


def test_the_default_encoder_has_the_hooks_that_a_program_sets_in_its_class(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = encoders.DefaultTaskEncoder.batch

    def batch(self: Any, samples: Any) -> Any:
        made = old(self, samples)
        made.caption = "patched"
        return made

    monkeypatch.setattr(encoders.DefaultTaskEncoder, "batch", batch)
    for given in ({}, {"auto_decode": False}, {"image_decode": "rgb"}):
        dataset = loading.get_train_dataset(
            folder / "data", batch_size=2, worker_config=CONFIG, shuffle_buffer_size=None, **given
        )
        assert next(iter(loading.get_loader(dataset))).caption == "patched"


# Mixes one by one ----------------------------------------------------------------------------------------------------


def test_a_mix_is_given_as_its_datasets(folder: Path) -> None:
    mix = factories.load_dataset(folder / "mix.yaml")
    assert isinstance(mix, factories.MetadatasetV2)
    found = mix.get_datasets(training=False, split_part="train", worker_config=CONFIG, subflavors={"all": 1})
    assert found.blend_mode is factories.DatasetBlendMode.DATASET_WEIGHT
    assert [one.weight for one in found.datasets] == [0.75, 0.125, 0.125]
    assert [(len(one.dataset), one.dataset.paths[0].name) for one in found.datasets] == [
        (20, "data"),
        (5, "data"),
        (20, "data"),
    ]
    assert [one.dataset.subflavors for one in found.datasets] == [
        {"of": "first", "level": "inner", "all": 1},
        {"level": "outer", "all": 1},
        {"level": "outer", "all": 1},
    ]
    keys = [sample.__key__ for sample in loading.get_loader(found.datasets[1].dataset.build())]
    assert keys == [f"val-{number:05d}" for number in range(5)]
    trained = mix.get_datasets(training=True, split_part="train", worker_config=CONFIG)
    batches = iter(loading.get_loader(trained.datasets[1].dataset.build()))
    assert sorted(next(batches).__key__ for _ in range(5)) == keys


def test_repetitions_stores_and_datasets_alone(folder: Path) -> None:
    reference = {"path": str(folder / "data"), "repetitions": 2}
    mix = factories.load_dataset(mix_document(train={"blend_epochized": [reference]}))
    found = mix.get_datasets(training=True, split_part="train", worker_config=CONFIG)
    assert found.blend_mode is factories.DatasetBlendMode.SAMPLE_REPETITIONS
    assert [(one.weight, one.repetitions, one.aux) for one in found.datasets] == [(None, 2, None)]
    alone = factories.load_dataset(folder / "data", split_part="val", subflavors={"x": 1})
    assert isinstance(alone, factories.DatasetLoader)
    found = alone.get_datasets(training=False, split_part="train", worker_config=CONFIG)
    assert found.blend_mode is factories.DatasetBlendMode.NONE
    assert [(len(one.dataset), one.dataset.subflavors) for one in found.datasets] == [(5, {"x": 1})]
    lines = {"path": str(folder / "lines.jsonl"), "aux": {"files": f"filesystem://{folder}"}}
    mix = factories.load_dataset(mix_document(train=lines))
    (one,) = mix.get_datasets(training=True, split_part="train", worker_config=CONFIG).datasets
    assert isinstance(one.aux["files"], SystemFileStore)
    assert one.aux["files"].get("inner.yaml") == INNER.encode()


def test_validation_datasets_come_with_what_they_are_made_of(folder: Path) -> None:
    encoder = Fails()
    found = factories.get_val_datasets(
        folder / "inner.yaml", split_part="val", batch_size=2, worker_config=CONFIG, task_encoder=encoder
    )
    assert [(len(dataset), source.subflavors, len(source)) for dataset, source in found] == [
        (3, {"level": "inner"}, 5),
        (10, {}, 20),
    ]
    source = found[0][1]
    assert isinstance(source, dataset_classes.BaseCoreDatasetFactory)
    assert source.paths == [epath.EPath(folder / "data")]
    keys = [sample.__key__ for sample in loading.get_loader(source.build())]
    assert keys == [f"val-{number:05d}" for number in range(5)]


def test_what_a_mix_cannot_be_asked(folder: Path) -> None:
    mix = factories.load_dataset(folder / "mix.yaml")
    with pytest.raises(NotProvidedError, match=r"get_datasets\(subset=3\)"):
        mix.get_datasets(training=True, split_part="train", worker_config=CONFIG, subset=3)
    with pytest.raises(NotProvidedError, match="Metadataset"):
        factories.Metadataset(path=folder / "mix.yaml", splits={})
    with pytest.raises(NotProvidedError, match="pass it to get_datasets"):
        factories.DatasetLoader(folder / "data", shuffle_over_epochs_multiplier=2)
    with pytest.raises(DatasetNotFoundError, match="nowhere"):
        factories.load_dataset(folder / "nowhere")
    with pytest.raises(ConfigurationError, match=r"expected the \.yaml file of a mix"):
        factories.traverse_metadataset(folder / "data", split_part="train")


def test_a_mix_is_traversed_without_its_datasets(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "mix.yaml", tmp_path)
    shutil.copy(folder / "inner.yaml", tmp_path)
    found = factories.traverse_metadataset(tmp_path / "mix.yaml", split_part="train")
    data = epath.EPath(tmp_path / "data")
    assert [(one.path, one.split_part, one.subflavors) for one in found] == [
        (data, "train", {"of": "first", "level": "inner"}),
        (data, "val", {"level": "outer"}),
        (data, "train", {"level": "outer"}),
    ]
    stores = {"path": "none", "aux": {"pictures": "filesystem://media", "labels": "other"}}
    (one,) = factories.load_dataset(write_mix(tmp_path / "aux.yaml", train=stores)).traverse(split_part="train")
    assert one.aux == {"pictures": epath.EPath(tmp_path / "media"), "labels": epath.EPath(tmp_path / "other")}
    with pytest.raises(NotImplementedError, match="joins"):
        factories.traverse_metadataset(write_mix(tmp_path / "join.yaml", train=join()), split_part="train")


# Metadata ------------------------------------------------------------------------------------------------------------


def test_what_is_there(folder: Path) -> None:
    kinds = {"data": "webdataset", "mix.yaml": "metadataset", "lines.jsonl": "jsonl", "none": "invalid"}
    assert {name: dataset_info.get_dataset_type(folder / name).value for name in kinds} == kinds
    info = dataset_info.get_dataset_info(epath.EPath(folder) / "data")
    assert sum(info["shard_counts"].values()) == 25
    assert dataset_info.IJsonlIndexReader.count_samples(folder / "lines.jsonl") == 2
    with pytest.raises(MetadataError, match="not prepared"):
        dataset_info.get_dataset_info(folder)
    with pytest.raises(NotProvidedError):
        dataset_info.IJsonlIndexReader(folder / "lines.jsonl")


def test_a_dataset_yaml_may_name_its_split(tmp_path: Path) -> None:
    create_captioning_test_dataset(tmp_path, num_train=20, num_val=5)
    meta = tmp_path / ".nv-meta"
    document = yaml.safe_load((meta / "dataset.yaml").read_text())
    (meta / "other.yaml").write_text(yaml.safe_dump(document | {"split_config": "mine.yaml"}))
    split = yaml.safe_load((meta / "split.yaml").read_text())
    shard = split["split_parts"]["val"][0]
    (meta / "mine.yaml").write_text(yaml.safe_dump(split | {"exclude": [f"{shard}/val-00001"]}))

    def keys() -> list[str]:
        references = [{"path": str(tmp_path), "dataset_config": "other.yaml"}] * MIN_DATASETS
        leaf = get_val_dataset(mix_document(val={"concat": references}), batch_size=1, worker_config=CONFIG).leaves[0]
        return sorted(key for _, key in leaf.dataset.excluded)

    assert keys() == ["val-00001"]
    (meta / "mine.yaml").write_text(yaml.safe_dump(split | {"exclude": [f"{shard}/val-00002"]}))
    assert keys() == ["val-00002"]  # not as an earlier start has seen it
    opened = open_dataset(tmp_path, split_part="val", dataset_config="other.yaml", split_config="split.yaml")
    assert sorted(opened.excluded) == [(shard, "val-00002")]
    summary = summarize_dataset(tmp_path, dataset_config="other.yaml")
    assert [part.num_excluded_samples for part in summary.parts] == [0, 1]
    assert lint_parts(tmp_path, split_parts=("val",), dataset_config="other.yaml")[0][0].excluded == opened.excluded
    (meta / "other.yaml").write_text(yaml.safe_dump(document | {"split_config": 3}))
    with pytest.raises(MetadataError, match="split_config"):
        open_dataset(tmp_path, split_part="val", dataset_config="other.yaml")


# Printing ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Inner:
    number: int


def test_samples_as_yaml() -> None:
    sample = {
        "text": "a",
        "many": list(range(12)),
        "tensor": torch.arange(8),
        "array": np.zeros((2, 1), np.float32),
        "empty": torch.zeros(0),
        "inner": Inner(3),
        (1, 2): b"xy",
    }
    lines = preview.format_sample_detailed(sample, indent="  ").splitlines()
    assert lines[:3] == ["  text: a", "  many:", "  - 0"]
    assert lines[12] == "  - '... and 2 more items'"
    assert "min=0, max=7, values=[0, 1, 2, ..., 5, 6, 7])" in lines[13]
    assert lines[15] == "  empty: Tensor(shape=torch.Size([0]), dtype=torch.float32, device=cpu)"
    assert lines[16:] == ["  inner:", "    Inner:", "      number: 3", "  (1, 2): b'xy'"]
    assert preview.format_sample_detailed("x") == "x"


def test_samples_in_a_line() -> None:
    sample = {"__key__": "a", "deep": [[{"b": (1, 2)}]], "tensor": torch.zeros(2), "inner": Inner(1), "text": "x" * 60}
    assert preview.format_sample_compact(sample, depth=3) == (
        "{__key__: 'a', deep: [[{...}]], tensor: Tensor(shape=torch.Size([2]), dtype=torch.float32, device=cpu), "
        f"inner: Inner(number='1'), text: '{'x' * 50}...'}}"
    )
    for batch in (Keyed(["a"]), [Keyed(["a"])], {"__keys__": ["a"]}, {"keys": ["a"]}):
        assert preview.default_get_batch_keys(batch) == ["a"]
    assert preview.default_get_batch_keys({"x": 1}) is None


class Keyed:
    def __init__(self, keys: list[str]) -> None:
        self.__key__ = keys


def test_the_preview_shows_a_sample_and_asks(folder: Path) -> None:
    result = CliRunner().invoke(preview.command, [str(folder / "data"), "--split-parts=val"], input="y\nn\n")
    assert result.exit_code == 0, result.output
    assert " - __key__ (<class 'str'>): 'val-00001'" in result.output
    assert "val-00002" not in result.output
    assert " - caption (<class 'str'>): " in result.output
    failed = CliRunner().invoke(preview.command, [str(folder / "nowhere")])
    assert (failed.exit_code, "nowhere" in failed.output) == (1, True)


# Sound and sources ---------------------------------------------------------------------------------------------------


def tone(seconds: float) -> bytes:
    """Return a WAV file of 16 bits that counts its samples."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.arange(int(seconds * 16000), dtype=np.int16).tobytes())
    return buffer.getvalue()


def test_sound_is_that_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_shard(tmp_path / "a.tar", {"k": {"wav": tone(1.0), "pkl": pickle.dumps([1])}})
    prepare_dataset(tmp_path, split=parse_patterns(["val:.*"]), dataset_yaml=CRUDE)
    dataset = loading.get_val_dataset(tmp_path, batch_size=None, worker_config=CONFIG, task_encoder=Plain())
    (sample,) = loading.get_loader(dataset)
    ours = get_val_dataset(tmp_path, batch_size=None, worker_config=CONFIG, task_encoder=Plain())
    (other,) = loading.get_loader(ours)
    assert type(other["wav"]) is AVDecoder
    made = decoders.SampleDecoder().decode("x.wav", tone(1.0))
    assert decoders.SampleDecoder().decode("x.pkl", pickle.dumps([1])) == sample["pkl"] == [1]
    for decoder in (
        sample["wav"],
        made,
        decoders.AVDecoder(io.BytesIO(tone(1.0))),
        pickle.loads(pickle.dumps(made)),
    ):
        assert isinstance(decoder, decoders.AVDecoder)
        clips, times = decoder.get_audio_clips([(0.5, 0.50025), (2.0, 3.0), (0.99996, 1.5)])
        assert [clip.tolist() for clip in clips] == [[[8000, 8001, 8002, 8003]], [[15999]]]
        assert clips[0].dtype == torch.int16
        assert times[0] == (0.5, 0.50025)


def test_clips_that_last_as_long_have_as_many_samples() -> None:
    pytest.importorskip("av")
    starts = [number / 7 for number in range(6)]
    clips, _ = AVDecoder(tone(1.0)).get_audio_clips([(start, start + 0.1) for start in starts])
    assert [clip.shape[1] for clip in clips] == [1600] * 6
    ranges = [(start, start + 0.1001) for start in starts]
    assert {clip.shape[1] for clip in AVDecoder(tone(1.0)).get_audio_clips(ranges)[0]} == {1602}


def test_a_video_that_ends_before_a_range_gives_no_clip(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from clips import write_video  # PyAV

    decoder = decoders.AVDecoder.open(write_video(tmp_path / "film.mp4"))
    clips, times = decoder.get_video_clips([(0.0, 0.1), (100.0, 101.0)])
    assert (len(clips), len(times)) == (1, 1)
    assert len(decoder.get_video_clips([(0, 1), (10_000, 10_001)], video_unit="frames")[0]) == 1


def test_the_index_of_a_video_has_its_key_frames(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    from clips import write_video  # PyAV

    film = write_video(tmp_path / "film.mkv", frames=30, rate=25, options={"g": "10", "bf": "0", "sc_threshold": "0"})
    with av.open(str(film)) as container:
        index = decoders.AVProbeIndex(container)
        assert next(container.decode(video=0)).pts == 0
    assert [index[at].timestamp for at in range(len(index))] == [40 * at for at in range(30)]
    assert [at for at in range(30) if index[at].is_keyframe] == [0, 10, 20]
    assert [index.search_timestamp(time) for time in (-1, 0, 399, 400, 5000)] == [0, 0, 0, 10, 20]
    assert [index.search_timestamp(time, backward=False) for time in (-1, 1, 400, 801)] == [0, 10, 10, -1]
    assert index.search_timestamp(85, any_frame=True) == 2
    assert index.search_timestamp(85, any_frame=True, backward=False) == 3


class Plain(encoders.DefaultTaskEncoder):
    cookers = (Cooker(dict),)


def test_sources_name_their_dataset_by_an_epath(folder: Path) -> None:
    dataset = loading.get_val_dataset(folder / "data", batch_size=2, worker_config=CONFIG)
    batch = next(iter(loading.get_loader(dataset)))
    assert [source.dataset_path for source in batch.__sources__] == [epath.EPath(folder / "data")] * 2
    assert pickle.loads(pickle.dumps(batch.__sources__)) == batch.__sources__
    seen: list[Any] = []
    handler = loading.WorkerConfig(
        rank=0, world_size=1, num_workers=0, global_error_handler=lambda *call: seen.append(call[2])
    )
    dataset = loading.get_val_dataset(folder / "data", batch_size=2, worker_config=handler, task_encoder=Fails())
    list(loading.get_loader(dataset))
    assert [source.dataset_path for sources in seen for source in sources] == [epath.EPath(folder / "data")]


class Fails(encoders.DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "val-00001":
            raise ValueError(sample.__key__)
        return sample


# Small things --------------------------------------------------------------------------------------------------------


def test_the_length_of_a_packed_validation_counts_samples(folder: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "packing_buffer_size": 5, "worker_config": CONFIG}
    loader = loading.get_loader(loading.get_val_dataset(folder / "data", task_encoder=Pairs(), **settings))
    assert len(loader) == 3
    assert len(list(loader)) == 2
    assert len(loader) == 3


def test_datasets_of_a_programs_own_are_declared_and_not_made(folder: Path) -> None:
    class Sorted(wrapped.SavableDataset[int]):
        def __init__(self, dataset: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    dataset = loading.get_val_dataset(folder / "data", batch_size=2, worker_config=CONFIG)
    limited = wrapped.LimitDataset(dataset, 1)
    assert all(isinstance(one, wrapped.SavableDataset) for one in (dataset, limited))
    assert not isinstance(dataset, Sorted)
    assert not isinstance(loading.get_loader(dataset), wrapped.SavableDataset)
    with pytest.raises(NotProvidedError, match="a dataset derived from SavableDataset"):
        Sorted(dataset, worker_config=CONFIG)


def test_what_wrappers_call_of_a_worker_configuration_is_refused() -> None:
    config = loading.WorkerConfig(rank=0, world_size=1, num_workers=0)
    with pytest.raises(NotProvidedError, match=r"WorkerConfig\.worker_activate .* loaders run hooks"):
        config.worker_activate(0)
    assert not hasattr(config, "worker_log")
    assert not hasattr(config, "nothing")
    assert pickle.loads(pickle.dumps(config)) == config


def test_commands_that_are_not_there_say_so() -> None:
    command = table.resolve("command", "tools.analyze_debug")
    with pytest.raises(NotProvidedError, match=r"tools\.analyze_debug\.command .* `energon which`"):
        command(["a", "--heatmap-path", "x"])
    group = click.Group("own", {"redist": table.resolve("command_redist", "tools.checkpoint")})
    result = CliRunner().invoke(group, ["redist", "--ranks", "2", "folder"])
    assert (result.exit_code, "states fit any number of ranks" in result.output) == (1, True)


def test_inner_parts_of_wrappers_are_refused_by_name() -> None:
    packing = table.resolve("PackingDataset", "wrappers")
    with pytest.raises(NotProvidedError, match=r"PackingDataset\._savable_fields .* hooks of a task encoder"):

        class Packs(packing):  # type: ignore[misc,valid-type]
            _savable_fields = (*packing._savable_fields, "more")

    assert not hasattr(packing, "_savable_fields")


class Pairs(encoders.DefaultTaskEncoder):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def test_a_cache_that_asks_for_pickles_keeps_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes(b"a")
    pool = cache_pool.FileStoreCachePool(parent_cache_dir=tmp_path / "cache", method="pickle")
    try:
        assert pool.get_lazy(SystemFileStore(tmp_path), "a.txt").get() == b"a"
        assert "without pickle" in caplog.text
    finally:
        pool.close()
    with pytest.raises(ConfigurationError, match="method must be 'raw', got 'zip'"):
        cache_pool.FileStoreCachePool(method="zip")

"""The adapters of the drop-in: megatron-energon's arguments do here what they do there, or are refused."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made import made_once
from PIL import Image

from energon_bridge import (
    CaptioningSample,
    DecodeFileStore,
    DefaultTaskEncoder,
    FileStore,
    SampleDecoder,
    SourceInfo,
    VQASample,
)
from energon_bridge.compat import (
    cache_pool,
    dataset_classes,
    epath,
    exceptions,
    factories,
    fork_hooks,
    loading,
    mixins,
    preparing,
    transforms,
    wrapped,
)
from energon_bridge.core import errors
from energon_bridge.core.errors import ConfigurationError, MetadataError, NotProvidedError
from energon_bridge.tools.testing import create_captioning_test_dataset

path = made_once(create_captioning_test_dataset, num_train=20, num_val=5)


def config(**kwargs: Any) -> loading.WorkerConfig:
    return loading.WorkerConfig(rank=0, world_size=1, num_workers=0, **kwargs)


# Transforms ----------------------------------------------------------------------------------------------------------


class Moved(transforms.CustomTransform):
    """Moves an image, and mirrors it within its width."""

    def __init__(self, *, mirrored: bool = False, fill: Any = None) -> None:
        self.mirrored, self.filled = mirrored, fill

    def apply_transform(self, matrix: Any, dst_size: Any) -> tuple[Any, Any, Any]:
        if self.mirrored:
            return self.translate(dst_size[1], 0) @ self.hflip() @ matrix, dst_size, None
        return self.translate(5, 3) @ matrix, dst_size, None

    def fill(self) -> Any:
        return self.filled


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 30, 3), np.uint8))


def test_transforms_come_one_after_the_other() -> None:
    image = noise()
    moved = Image.new("RGB", image.size, (7, 7, 7))
    moved.paste(image, (5, 3))
    merged = transforms.MergeTransform([Moved(fill=7), Moved(mirrored=True), lambda one: one.crop((0, 0, 8, 8))])
    expected = moved.transpose(Image.Transpose.FLIP_LEFT_RIGHT).crop((0, 0, 8, 8))
    assert np.array_equal(np.array(merged(image)), np.array(expected))
    assert np.array(Moved()(image))[:3].max() == 0


def test_matrices_are_those_of_their_names() -> None:
    kind = transforms.CustomTransform
    point = np.array([2.0, 3.0, 1.0])
    assert (kind.scale(2, 3) @ point).tolist() == [4, 9, 1]
    assert (kind.shear(1, 0) @ point).tolist() == [5, 3, 1]
    assert (kind.vflip() @ point).tolist() == [2, -3, 1]
    assert np.allclose(kind.rotate(np.pi / 2) @ point, [3, -2, 1])


def test_custom_transforms_are_for_images() -> None:
    with pytest.raises(NotProvidedError, match="give it images of Pillow"):
        Moved()(torch.zeros(3, 4, 4))


# Loading -------------------------------------------------------------------------------------------------------------


def first(path: Any, **kwargs: Any) -> Any:
    spec = loading.get_val_dataset(path, batch_size=2, worker_config=config(), **kwargs)
    return next(iter(loading.get_loader(spec)))


def test_arguments_of_the_builders(path: Path) -> None:
    encoder = DefaultTaskEncoder()
    assert first(epath.EPath(path), parallel_shard_iters=4, task_encoder=encoder).image.dtype == torch.float32
    assert first(path, image_decode="torchrgb8", task_encoder=encoder).image.dtype == torch.uint8
    assert isinstance(first(path, auto_decode=False, task_encoder=encoder).image[0], bytes)
    assert encoder.decoder == DefaultTaskEncoder.decoder
    assert len(loading.get_val_datasets(path, batch_size=2, worker_config=config())) == 1


def test_a_handler_says_that_it_has_no_effect(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first(path, handler=print)
    assert "has no effect, as in megatron-energon" in caplog.text


def test_an_encoder_that_builds_its_own_pipeline_is_refused(path: Path) -> None:
    class Encoder(DefaultTaskEncoder):
        def build_train_datasets(self, **kwargs: Any) -> None: ...

    with pytest.raises(NotProvidedError, match="overriding build_train_datasets"):
        first(path, task_encoder=Encoder())


class Failing(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__.endswith("3"):
            raise ValueError("three")
        return sample


def keys(path: Path, **kwargs: Any) -> list[str]:
    spec = loading.get_val_dataset(path, batch_size=1, worker_config=config(**kwargs), task_encoder=Failing())
    return [batch.__key__[0] for batch in loading.get_savable_loader(spec) if batch.__valid__.all()]


def test_error_handlers_of_the_worker_configuration(path: Path) -> None:
    seen: list[Any] = []
    good = [f"val-{n:05d}" for n in (0, 1, 2, 4)]
    assert keys(path) == good
    noted = config(global_error_handler=lambda *call: seen.append(call))
    assert keys(path, global_error_handler=noted.global_error_handler) == good
    ((error, sample, sources),) = seen
    assert (type(error), str(error), sample.__key__) == (ValueError, "three", "val-00003")
    assert [source.index for source in sources] == [3]
    with pytest.raises(ValueError, match="three"):
        keys(path, global_error_handler=loading.reraise_exception)


def test_worker_configurations() -> None:
    seeds = [config().worker_seed(), config(seed_offset=42).worker_seed()]
    assert seeds == [273211461, 1740599905]  # reference values of megatron-energon
    many = loading.WorkerConfig(rank=1, world_size=2, num_workers=2)
    assert [many.global_worker_id(number) for number in (0, 1)] == [2, 3]
    assert many.worker_seed(0) == 2273462765
    assert many.rank_worker_id() == 0
    assert config(global_error_handler=stop) == config() != many
    assert exceptions.SampleException.from_sample({"__key__": "k"}, "why").args == ("Sample k failed: why",)


# Wrappers ------------------------------------------------------------------------------------------------------------


def val(path: Path) -> Any:
    return loading.get_val_dataset(path, batch_size=2, worker_config=config())  # 3 steps


@pytest.mark.parametrize(("length", "sizes"), [(2, [2, 2]), (3, [2, 2, 1]), (5, [2, 2, 1, 2, 2])])
def test_a_repeated_validation_has_as_many_steps_as_asked_for(length: int, sizes: list[int], path: Path) -> None:
    loader = loading.get_loader(wrapped.LimitDataset(wrapped.RepeatDataset(val(path)), length, reset_after_epoch=True))
    passes = [[len(batch.__key__) for batch in loader] for _ in range(2)]
    assert passes == [sizes, sizes]
    assert len(loader) == length


def test_wrappers_of_training(path: Path) -> None:
    train = loading.get_train_dataset(path, batch_size=2, worker_config=config())
    loader = loading.get_savable_loader(wrapped.EpochizeDataset(wrapped.RepeatDataset(train), 3))
    epochs = [[tuple(batch.__key__) for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [3, 3]
    assert epochs[0] != epochs[1]


def test_wrappers_that_mean_nothing_are_refused(path: Path) -> None:
    for wrong in (wrapped.EpochizeDataset(val(path), 2), wrapped.RepeatDataset(wrapped.LimitDataset(val(path), 2))):
        with pytest.raises(NotProvidedError, match="in this place"):
            loading.get_loader(wrong)
    with pytest.raises(NotProvidedError, match="blend_epochized"):
        loading.get_loader(wrapped.RepeatDataset(val(path), repeats=2))


# Preparing -----------------------------------------------------------------------------------------------------------


def test_datasets_are_prepared(path: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(path, tmp_path / "copy"))
    kept = (root / ".nv-meta/dataset.yaml").read_bytes()
    shutil.rmtree(root / ".nv-meta")
    paths = ["train/shard_{000..001}.tar"]
    prepare = dataset_classes.BaseWebdatasetFactory.prepare_dataset
    parts = prepare(epath.EPath(root), paths, split_parts_ratio=[("a", 0.5), ("b", 0.5)], shuffle_seed=None, workers=1)
    assert parts == {"png", "txt"}
    (root / ".nv-meta/dataset.yaml").write_bytes(kept)
    for part, shard in (("a", 0), ("b", 1)):
        spec = loading.get_val_dataset(root, split_part=part, batch_size=None, worker_config=config())
        found = [sample.__key__ for sample in loading.get_loader(spec)]
        assert found == [
            f"train-{n:05d}" for n in range(10 * shard, 10 * shard + 10)
        ]  # the validation shard is left out
    assert prepare(root, [], tar_index_only=True) == {"png", "txt"}
    with pytest.raises(errors.ShardMissingError, match=r"nowhere\.tar"):
        prepare(root, ["nowhere.tar"], split_parts_ratio=[("a", 1)])
    for refused, advice in (
        ({"split_config": "x.yaml"}, "the split is written to split.yaml"),
        ({"shuffle_seed": 7}, "with the seed 42"),
        ({"fix_duplicates": True}, r"fix_duplicates=True.*energon convert SOURCE OUT --keys number"),
    ):
        with pytest.raises(NotProvidedError, match=advice):
            prepare(root, paths, split_parts_ratio=[("a", 1)], **refused)


def test_media_filters_and_lines(path: Path, tmp_path: Path) -> None:
    media = preparing.MediaFilterConfig.parse(None, False, True)
    root = Path(shutil.copytree(path, tmp_path / "copy"))
    assert preparing.WebdatasetPreparator.add_media_metadata(root, media_filter=media, workers=1) == 25
    with pytest.raises(ConfigurationError, match="exactly one media filter"):
        preparing.MediaFilterConfig.parse("*.png", True, False)
    (tmp_path / "lines.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert dataset_classes.CrudeJsonlDatasetFactory.prepare_dataset(epath.EPath(tmp_path / "lines.jsonl")) == 2


# Small things --------------------------------------------------------------------------------------------------------


def test_paths(tmp_path: Path) -> None:
    folder = epath.EPath(tmp_path) / "a" / ".." / "b"
    assert str(folder) == str(tmp_path / "b")
    (folder / "deep").mkdir(parents=True)
    file = folder / "deep" / "x.txt"
    file.write_text("text")
    assert (file.read_text(), file.size(), file.name, file.is_file(), folder.is_dir()) == (
        "text",
        4,
        "x.txt",
        True,
        True,
    )
    assert file.relative_to(folder) == "deep/x.txt"
    assert list(folder.glob("*/x.*")) == list(folder.walk()) == [file]
    assert file.with_suffix(".y").name == "x.y"
    file.move(folder / "y.txt")
    with (folder / "y.txt").open() as opened:
        assert opened.read() == "text"
    assert not file.is_file()
    remote = epath.EPath("s3://bucket/folder") / "x"
    assert (remote.url, remote.parent.url, remote.is_local()) == ("s3://bucket/folder/x", "s3://bucket/folder", False)
    for wrong in (remote.local_path, lambda: remote.relative_to(folder)):
        with pytest.raises(ConfigurationError):
            wrong()


def test_mixins_and_marks() -> None:
    @dataclass
    class Base(mixins.ExtendableDataclassMixin, mixins.PinMemoryMixin):
        a: int

    @dataclass
    class Extended(Base):
        b: int

    assert Extended.extend(Base(1), b=2) == Extended(1, 2)
    assert Base(1).pin_memory() == Base(1)
    with pytest.raises(ConfigurationError, match="not a base class"):
        Base.extend(Extended(1, 2))
    assert cache_pool.MockLazy("x", str.upper).get() == "X"
    assert mixins.get_source_info({}) is None


def test_fork_hooks_live_as_long_as_their_object() -> None:
    read, write = os.pipe()

    class Hooked(fork_hooks.ForkMixin):
        def __after_in_child_fork__(self) -> None:
            os.write(write, b"x")

    hooked = Hooked()
    for alive in (True, False):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        os.write(write, b".")
        assert os.read(read, 10) == (b"x." if alive else b".")
        hooked = None  # noqa: F841
    os.close(read)
    os.close(write)


# What programs do with them ------------------------------------------------------------------------------------------


def test_one_dataset_is_opened_by_its_configuration(path: Path) -> None:
    settings = {"worker_config": config(), "split_part": "val"}
    opened = factories.get_dataset_from_config(path, training=False, sample_type=CaptioningSample, **settings)
    keys = [sample.__key__ for sample in loading.get_loader(opened.build())]
    assert keys == [f"val-{n:05d}" for n in range(5)]
    assert len(opened) == len(opened.build()) == 5
    trained = factories.get_dataset_from_config(path, subflavors={"a": 1}, **settings)
    seen = [next(batches) for batches in [iter(loading.get_loader(trained.build()))] for _ in range(5)]
    assert sorted(sample.__key__ for sample in seen) == keys
    assert {sample.__subflavors__["a"] for sample in seen} == {1}
    with pytest.raises(NotProvidedError, match="subset"):
        factories.get_dataset_from_config(path, subset=1, **settings)


def test_a_type_of_samples_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="are CaptioningSample, but sample_type= requests VQASample"):
        loading.get_train_dataset(path, batch_size=1, worker_config=config(), sample_type=VQASample)


class Fails(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "val-00001":
            raise Broken(sample.__key__)
        return sample


class Broken(Exception):  # noqa: N818 - a program's own
    """An error of a program's own."""


def stop(error: Exception, *_: Any) -> None:
    raise Broken("of the handler") from error


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("handler", "message"), [(loading.reraise_exception, "val-00001"), (stop, "of the handler")])
def test_the_users_own_error_is_raised(path: Path, handler: Any, message: str, workers: int) -> None:
    of_run = loading.WorkerConfig(rank=0, world_size=1, num_workers=workers, global_error_handler=handler)
    dataset = loading.get_val_dataset(path, batch_size=2, worker_config=of_run, task_encoder=Fails())
    with pytest.raises(Broken, match=message):
        list(loading.get_loader(dataset))


class Dicts(DefaultTaskEncoder):
    def encode_batch(self, batch: Any) -> Any:
        return {"image": batch.image}


def test_dicts_keep_their_own_keys(path: Path) -> None:
    assert list(first(path, task_encoder=Dicts())) == ["image"]


class Asks(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        active = loading.WorkerConfig.active_worker_config
        sample.caption = (active.config(), active.global_rank(), active.active_worker_batch_index)
        return sample


def test_hooks_are_told_whose_they_are(path: Path) -> None:
    numbers = {"rank": 0, "world_size": 1, "num_workers": 0, "data_parallel_group": None}
    assert first(path, task_encoder=Asks()).caption == [(numbers, 0, 0)] * 2
    assert loading.WorkerConfig.active_worker_config is None


def test_debug_files_are_refused() -> None:
    with pytest.raises(NotProvidedError, match="worker_debug_path"):
        config(worker_debug_path="/tmp/x.jsonl")
    with pytest.raises(NotProvidedError, match="worker_log_level=3"):
        config(worker_log_level=3)


class Full(DefaultTaskEncoder):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        assert len(samples) == 5
        return [samples[:1], samples[1:]]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def test_buffers_to_select_from_are_full(path: Path) -> None:
    settings = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, "packing_buffer_size": 5}
    dataset = loading.get_train_dataset(
        path, batch_size=2, worker_config=config(num_lanes=8), task_encoder=Full(), **settings
    )
    assert [len(batch.__key__) for batch, _ in zip(loading.get_loader(dataset), range(16), strict=False)] == [2] * 16


class OnlyItems(FileStore):
    """A store as code for megatron-energon writes it."""

    def __getitem__(self, key: str) -> tuple[bytes, Any]:
        return key.encode(), SourceInfo("items", key, "", (key,))

    def get_path(self) -> str:
        return "items"


def test_a_store_that_only_has_items_is_decoded() -> None:
    sample: dict[str, Any] = {"__sources__": ()}
    assert DecodeFileStore(OnlyItems(), decoder=SampleDecoder()).get("12.txt", sample) == "12.txt"
    assert [source.index for source in sample["__sources__"]] == ["12.txt"]


class NoWayToRead(FileStore):
    def get_path(self) -> str:
        return "nothing"


def test_a_store_that_reads_nothing_says_so() -> None:
    with pytest.raises(NotImplementedError, match="NoWayToRead derives from FileStore and must override `read`"):
        NoWayToRead().get("x")


def test_paths_of_multi_storage_client() -> None:
    assert epath.EPath("msc://near/a/.././b").url == "msc://near/b"
    assert (epath.EPath("msc://near/a") / "../b").url == "msc://near/b"
    for profile in (epath.DEFAULT_PROFILE_NAME, "default"):
        assert epath.EPath(f"msc://{profile}/etc/hosts").url == "/etc/hosts"
    with pytest.warns(DeprecationWarning, match="use its new name, msc://"):
        assert epath.EPath("rclone://near/b").url == "msc://near/b"
    with pytest.raises(MetadataError, match="above the root"):
        epath.EPath("msc://near/a") / "../../b"
    if importlib.util.find_spec("multistorageclient") is None:
        with pytest.raises(ConfigurationError, match=r"msc://near/b: needs multi-storage-client: pip"):
            epath.EPath("msc://near/b").is_file()


def test_paths_of_a_cached_dataset_keep_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVDATASET_CACHE_DIR", str(tmp_path))
    root = epath.EPath("dss://charts@v0")
    (root / "images" / "1.txt").write_text("one")
    (tmp_path / "charts" / "v0" / "link").symlink_to(tmp_path / "charts" / "v0" / "images")
    urls = ["dss://charts@v0/images/1.txt", "dss://charts@v0/link/1.txt"]
    assert [path.url for path in root.walk()] == [path.url for path in root.glob("**/*.txt")] == urls
    assert (root.is_local(), root.local_path()) == (True, tmp_path / "charts" / "v0")
    assert (epath.EPath(urls[1]).read_text(), epath.EPath(urls[0]).relative_to(root)) == ("one", "images/1.txt")
    copied = pickle.loads(pickle.dumps(root / "images"))
    assert (copied, copied.is_dir()) == (root / "images", True)
    with pytest.raises(epath.NoVersionError, match="expected dss://NAME@VERSION/path"):
        epath.EPath("dss://charts")
    monkeypatch.delenv("NVDATASET_CACHE_DIR")
    with pytest.raises(MetadataError, match=r"\$NVDATASET_CACHE_DIR, which is not set"):
        epath.EPath("dss://charts@v0")


def test_stat_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    found = epath.EPath(tmp_path / "x").stat()
    assert found.content_length == 3
    assert abs(found.last_modified.timestamp() - (tmp_path / "x").stat().st_mtime) < 1e-3


def test_excludes_may_follow_an_empty_list(path: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(path, tmp_path / "copy"))
    split = root / ".nv-meta/split.yaml"
    shard = next(line.split()[-1] for line in split.read_text().splitlines() if "val" in line and ".tar" in line)
    text = split.read_text()
    assert "exclude: []" in text
    split.write_text(f"{text}\nexclude:\n  - {shard}/val-00001\n")
    found = [batch.__key__ for batch in loading.get_loader(val(root))]
    assert found == [["val-00000"], ["val-00002", "val-00003"], ["val-00004"]]
    split.write_text(f"{text}\nexclude: [{shard}/val-00001]\nexclude: [{shard}/val-00002]\n")
    with pytest.raises(errors.MetadataError, match="the key 'exclude' occurs twice"):
        val(root)

"""Cookers: which one is chosen, what it is given, and that cooked streams are as elastic and resumable as any."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crude import CookingEncoder, LazyEncoder, crude_mix, prepared
from engine import config_of, counts_of, digest, loaders_of, text_dataset, train_dataset

from energon_bridge import (
    AugmentTaskEncoder,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    FileStore,
    SkipSample,
    SourceInfo,
    TextSample,
    basic_sample_keys,
    cooker,
    get_loader,
    get_savable_loader,
    get_val_dataset,
    stateless,
)
from energon_bridge.core.encoder.cooking import matching_cooker
from energon_bridge.core.errors import (
    ConfigurationError,
    DatasetError,
    DatasetMismatchError,
    DatasetNotFoundError,
    FatalSampleError,
    KeyIndexError,
    MetadataError,
    NoCookerError,
)
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import read
from energon_bridge.tools.forecast.planned_run import spec_of_state


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crude_mix(tmp_path_factory.mktemp("mix"))


def cook(sample: dict[str, Any]) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=json.dumps(sample["json"]))


def encoder_of(*cookers: Any) -> DefaultTaskEncoder:
    encoder = DefaultTaskEncoder()
    encoder.cookers = tuple(one if isinstance(one, Cooker) else Cooker(one) for one in cookers)
    return encoder


def lines(folder: Path) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(6)))
    return path


def samples_of(path: Any, encoder: Any, **kwargs: Any) -> list[Any]:
    dataset = get_val_dataset(
        path, split_part="train", batch_size=None, task_encoder=encoder, worker_config=config_of(1, 0), **kwargs
    )
    return [sample for sample in get_loader(dataset) if not hasattr(sample, "__valid__") or bool(sample.__valid__)]


# Which cooker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subflavors", "expected"),
    [
        ({"kind": "chat", "lang": "en"}, "both"),
        ({"kind": "chat", "lang": "de"}, "kind"),
        ({"kind": "chat"}, "kind"),
        ({"lang": "en"}, "any"),
        ({}, "any"),
        (None, "any"),
    ],
)
def test_the_first_cooker_whose_subflavors_are_there(subflavors: dict[str, Any] | None, expected: str) -> None:
    cookers = [
        Cooker(lambda: "both", has_subflavors={"kind": "chat", "lang": "en"}),
        Cooker(lambda: "kind", has_subflavors={"kind": "chat"}),
        Cooker(lambda: "any"),
        Cooker(lambda: "never"),
    ]
    found = matching_cooker(cookers, subflavors)
    assert found is not None
    assert found.cook() == expected


@pytest.mark.parametrize("kind", ["dataset", "jsonl"])
def test_a_dataset_that_no_cooker_takes_is_refused_when_it_is_opened(kind: str, tmp_path: Path) -> None:
    path = lines(tmp_path) if kind == "jsonl" else prepared(tmp_path / "d", {"a": {"json": b"{}"}})
    encoder = encoder_of(Cooker(cook, has_subflavors={"kind": "chat"}))
    with pytest.raises(NoCookerError, match=r"no cooker .* subflavors are \{\}.*cook for \{'kind': 'chat'\}"):
        train_dataset(path, task_encoder=encoder)


def test_an_empty_list_of_cookers_takes_no_samples(tmp_path: Path) -> None:
    crude, typed = lines(tmp_path), text_dataset(tmp_path / "typed", train=[2])

    class Emptied(DefaultTaskEncoder):
        cookers = []  # noqa: RUF012

    with pytest.raises(NoCookerError, match=r"no cooker of Emptied .*`cookers` is empty: add a cooker, or leave"):
        train_dataset(crude, task_encoder=Emptied())
    with pytest.raises(NoCookerError, match="is empty"):
        train_dataset(crude, task_encoder=AugmentTaskEncoder(Emptied()))
    assert train_dataset(typed, task_encoder=Emptied()).num_samples == 2


def test_a_state_names_the_mix_for_subflavors_that_it_lacks(tmp_path: Path) -> None:
    path = prepared(tmp_path / "data", {"a": {"json": b"{}"}})
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    path: data\n"
        "    subflavors: {kind: chat}\n"
    )
    encoder = encoder_of(Cooker(cook, has_subflavors={"kind": "chat"}))
    state = read(get_savable_loader(train_dataset(mix, task_encoder=encoder)).save_state_rank())
    names = {"dataset_config": "dataset.yaml", "split_config": "split.yaml", "trust_remote_code": False}
    with pytest.raises(NoCookerError, match=rf"{path}: no cooker .* give the mix .* started with \(--mix\)"):
        spec_of_state(state, world_size=1, task_encoder=encoder, **names)
    assert spec_of_state(state, world_size=1, task_encoder=encoder, mix=mix, **names).num_samples == 1


def test_without_cookers_the_crude_samples_come_themselves(tmp_path: Path) -> None:
    samples = samples_of(lines(tmp_path), DefaultTaskEncoder())
    assert all(type(sample) is CrudeSample for sample in samples)
    assert [sample["json"]["n"] for sample in samples] == list(range(6))


def test_typed_samples_are_not_cooked(fixtures: Path) -> None:
    def never(sample: dict[str, Any]) -> Any:
        raise FatalSampleError("cooked")

    assert len(samples_of(fixtures / "captioning", encoder_of(never))) == 12


@pytest.mark.parametrize(
    "mark", [lambda f: f, stateless, stateless(restore_seeds=True), cooker, cooker(need_cache=False)]
)
def test_marks_change_nothing(mark: Any, tmp_path: Path) -> None:
    """A cooker without @stateless works like any other."""

    def one(sample: dict[str, Any]) -> TextSample:
        return cook(sample)

    samples = samples_of(lines(tmp_path), encoder_of(mark(one)))
    assert [json.loads(sample.text)["n"] for sample in samples] == list(range(6))


def test_the_hook_can_be_overridden(tmp_path: Path) -> None:
    class Encoder(DefaultTaskEncoder):
        cookers = (Cooker(cook),)

        def cook_crude_sample(self, sample: Any, cooker: Any, aux: Any) -> Any:
            cooked = super().cook_crude_sample(sample, cooker, aux)
            cooked.text += f" by {cooker.name}"
            return cooked

    assert samples_of(lines(tmp_path), Encoder())[2].text == '{"n": 2} by cook'


def test_an_encoder_of_any_class_cooks(tmp_path: Path) -> None:
    class Plain:
        cookers = (Cooker(cook),)
        decoder = None

        def encode_sample(self, sample: Any) -> Any:
            return sample.text

        def batch(self, samples: list[Any]) -> Any:
            return samples

        def encode_batch(self, batch: Any) -> Any:
            return batch

    assert samples_of(lines(tmp_path), Plain())[4] == '{"n": 4}'


def test_an_encoder_around_another_cooks_as_that_one_does(mix: Path) -> None:
    plain, around = (samples_of(mix, encoder) for encoder in (LazyEncoder(), AugmentTaskEncoder(LazyEncoder())))
    assert [digest(sample) for sample in around] == [digest(sample) for sample in plain]


# What it is given and gives ------------------------------------------------------------------------------------------


def test_basic_sample_keys_carry_the_fields_of_every_sample() -> None:
    source, more = SourceInfo("d", 3, "s", ("a.json",)), SourceInfo("x", "k", "t", ("k",))
    crude = CrudeSample({"__key__": "a", "__restore_key__": ("l", 3), "__subflavors__": {"k": 1}, "json": {}})
    assert basic_sample_keys(crude)["__sources__"] == ()
    crude["__sources__"] = (source,)
    sample = TextSample(**basic_sample_keys(crude, (more,)), text="")
    assert (sample.__key__, sample.__restore_key__, sample.__subflavors__) == ("a", ("l", 3), {"k": 1})
    assert sample.__sources__ == (source, more)


def test_stores_note_where_the_content_came_from(mix: Path) -> None:
    samples = samples_of(mix, CookingEncoder())
    assert 0 < len(samples) < 37
    for sample in samples:
        talk, blob, note, own = sample.__sources__
        number = int(sample.__key__)
        assert talk.file_names == (f"{number:05d}.json", f"{number:05d}.txt")
        assert blob == SourceInfo(str(mix.parent / "blobs"), f"b{7 * number % 37:03d}.npy", *blob[2:])
        assert note.file_names == (f"deep/n{number % 5}.txt",)
        assert own.file_names == (f"{number:05d}.txt",)
        assert sample.text == f"note {number % 5}; talk {number}"
        assert sample.number[0] == 7 * number % 37


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda sample, blobs: sample, "unexpected keyword argument 'notes'"),
        (lambda sample, blobs, notes, pictures: sample, "missing a required argument: 'pictures'"),
        (cooker(need_primary=True)(lambda sample, blobs, notes: sample), "unexpected keyword argument 'primary'"),
    ],
)
def test_a_cooker_that_cannot_be_called_is_refused_when_the_mix_is_opened(
    function: Any, message: str, mix: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train_dataset(mix, task_encoder=encoder_of(function))


def test_what_a_cooker_leaves_out_is_counted(tmp_path: Path) -> None:
    def picky(sample: dict[str, Any]) -> TextSample:
        if sample["json"]["n"] == 1:
            raise SkipSample
        if sample["json"]["n"] == 2:
            raise ValueError("no")
        return cook(sample)

    dataset = train_dataset(lines(tmp_path), task_encoder=encoder_of(picky), worker_config=config_of(1, 0, num_lanes=1))
    (loader,) = loaders_of(dataset, 1, 0, num_lanes=1, kind=SavableDataLoader)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    counts = counts_of(loader.save_state_rank())
    assert (counts["samples"], counts["skipped"], counts["errors"]) == (12, 2, 3)


def test_a_cooker_and_its_hook_return_one_sample(tmp_path: Path) -> None:
    def several(sample: dict[str, Any]) -> Iterator[Any]:
        yield sample

    class Mistaken(DefaultTaskEncoder):
        cookers = (Cooker(cook),)

        def cook_crude_sample(self, *args: Any) -> Any:
            return None

    for encoder, complaint in (
        (encoder_of(lambda sample: None), "the cooker .* returned NoneType"),
        (encoder_of(several), "the cooker .* returned generator"),
        (Mistaken(), "cook_crude_sample of Mistaken returned None: return the sample"),
    ):
        with pytest.raises(FatalSampleError, match=complaint):
            samples_of(lines(tmp_path), encoder)


# Auxiliary stores of a mix -------------------------------------------------------------------------------------------


def test_stores_are_for_crude_datasets(fixtures: Path) -> None:
    mix = {"splits": {"train": {"path": str(fixtures / "captioning"), "aux": {"files": f"filesystem://{fixtures}"}}}}
    mix |= {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    with pytest.raises(MetadataError, match=r"CaptioningSample, and only crude datasets are cooked: leave out files"):
        train_dataset(mix)


def test_a_jsonl_file_is_a_store_too(mix: Path, tmp_path: Path) -> None:
    def look_up(sample: dict[str, Any], lines: FileStore) -> TextSample:
        number = int(sample["__key__"]) % 6
        return TextSample(**basic_sample_keys(sample), text=str(lines.get(f"{number}.json", sample)["n"]))

    leaf = {"path": str(mix.parent / "talk"), "aux": {"lines": str(lines(tmp_path))}}
    described = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": leaf}}
    assert [sample.text for sample in samples_of(described, encoder_of(look_up))[:8]] == list("01234501")


@pytest.mark.parametrize(
    ("gone", "error", "message"),
    [
        ("blobs", DatasetNotFoundError, "auxiliary store 'blobs'"),
        ("blobs/.nv-meta/index.sqlite", KeyIndexError, "auxiliary store 'blobs': .*key index, which is missing"),
        ("notes", DatasetNotFoundError, "auxiliary store 'notes'"),
    ],
)
def test_a_store_that_is_not_there_is_refused(
    gone: str, error: type[DatasetError], message: str, tmp_path: Path
) -> None:
    mix = crude_mix(tmp_path)
    path = tmp_path / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(error, match=message):
        train_dataset(mix, task_encoder=CookingEncoder())


def test_a_file_that_is_gone_is_a_bad_sample_that_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mix = crude_mix(tmp_path)
    (tmp_path / "notes" / "deep" / "n3.txt").unlink()
    samples = samples_of(mix, LazyEncoder())
    assert {int(sample.__key__) % 5 for sample in samples} == {0, 1, 2, 4}
    assert "notes: no file 'deep/n3.txt'" in caplog.text


def keys_from(path: Path, steps: int, state: Any = None) -> tuple[list[list[str]], Any]:
    """Return the keys of some microbatches and the state after them."""
    dataset = train_dataset(path, task_encoder=CookingEncoder())
    (loader,) = loaders_of(dataset, 1, 0, state=state, kind=SavableDataLoader)
    batches = iter(loader)
    return [next(batches)["__key__"] for _ in range(steps)], loader.save_state_rank()


def test_a_run_goes_on_where_the_stores_were_moved(tmp_path: Path) -> None:
    whole, _ = keys_from(crude_mix(tmp_path / "a"), 12)
    before, state = keys_from(tmp_path / "a" / "mix.yaml", 5)
    shutil.move(tmp_path / "a", tmp_path / "b")
    after, _ = keys_from(tmp_path / "b" / "mix.yaml", 7, state)
    assert before + after == whole


@pytest.mark.parametrize("change", ["shards", "name", "none"])
def test_other_stores_are_other_data(change: str, tmp_path: Path) -> None:
    _, state = keys_from(crude_mix(tmp_path / "a"), 3)
    other = crude_mix(tmp_path / "b")
    encoder: Any = CookingEncoder()
    if change == "shards":
        shutil.rmtree(tmp_path / "b" / "blobs")
        prepared(tmp_path / "b" / "blobs", {"b000": {"npy": b""}})
    if change == "name":
        other.write_text(other.read_text().replace("blobs: ./", "others: ./"))
        encoder = encoder_of(lambda sample, others, notes: sample)
    (loader,) = loaders_of(train_dataset(other, task_encoder=encoder), 1, 0)
    if change == "none":
        loader.restore_state_rank(state)
        return
    with pytest.raises(DatasetMismatchError, match=r"the content changed|different data"):
        loader.restore_state_rank(state)


# Streams -------------------------------------------------------------------------------------------------------------


def test_the_noise_of_a_cooker_is_that_of_its_sample(mix: Path) -> None:
    def noise(path: Path) -> dict[str, list[float]]:
        dataset = train_dataset(path, task_encoder=CookingEncoder(), batch_size=None)
        (loader,) = loaders_of(dataset, 1, 0, kind=SavableDataLoader)
        batches = iter(loader)
        return {sample.__key__: sample.noise.tolist() for sample in (next(batches) for _ in range(25))}

    first = noise(mix)
    assert first == noise(mix)
    assert len({tuple(values) for values in first.values()}) == len(first)

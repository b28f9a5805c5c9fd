"""Joins of crude datasets: cookers see the joined sample, with stores and through resumes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import config_of, counts_of, loaders_of
from keyed import CRUDE, join, keyed_dataset, shards, shuffled, write_mix

from energon_bridge import (
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    basic_sample_keys,
    cooker,
    get_train_dataset,
    register_joiner,
)
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, MetadataError

COUNT = 36
KEYS = [f"{number:03d}" for number in range(COUNT)]
CRUDE_JOINER = {"__module__": "megatron.energon", "__class__": "CrudeSample"}


@register_joiner
def pick(first: CrudeSample, second: CrudeSample | None) -> dict[str, Any]:
    """Leave the sample crude, as a plain dict."""
    return {"own": first["txt"], "other": "none" if second is None else second["txt"], "chance": random.random()}


@register_joiner
def typed(first: CrudeSample, second: CrudeSample | None) -> TextSample:
    return TextSample(__key__=first["__key__"], text=f"typed {first['txt']}")


def by(function: Any) -> dict[str, str]:
    return {"__module__": __name__, "__function__": function.__name__}


def joined(joiner: Any, *, second: Any = None, named: bool = False, subflavors: Any = None, **more: Any) -> Any:
    second = {"nonmatch": "none"} | (second or {})
    return join({"subflavors": subflavors or {"of": "join"}}, second, named=named, joiner=joiner, **more)


MIXES = {
    "dict": lambda: joined(by(pick)),
    "named": lambda: joined(CRUDE_JOINER, named=True),
    "parts": lambda: joined(CRUDE_JOINER, second={"nonmatch": "skip"}),
    "typed": lambda: joined(by(typed)),
    "blend": lambda: {"blend": [joined(by(pick)), {"path": "./a", "subflavors": {"of": "a"}}]},
    "stores": lambda: joined(
        CRUDE_JOINER, second={"aux": {"notes": "filesystem://./notes"}}, named=True, subflavors={"of": "stores"}
    ),
    "nobody": lambda: joined(by(pick), subflavors={"of": "nobody"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    keyed_dataset(folder / "a", train=shards(KEYS, 11, 9, 16), dataset_yaml=CRUDE)
    keyed_dataset(folder / "b", train=shards(shuffled(KEYS[:30]), 25, 5), dataset_yaml=CRUDE)
    (folder / "notes").mkdir()
    for key in KEYS:
        (folder / "notes" / f"{key}.txt").write_text(f"note {key}")
    for name, make in MIXES.items():
        write_mix(folder / f"{name}.yaml", train=make())
    return folder


def text_of(sample: dict[str, Any]) -> str:
    """Return what a joined crude sample holds, in whichever shape."""
    if "first" in sample:
        second = sample["second"]
        return f"{sample['first']['txt']} | {'none' if second is None else second['txt']}"
    return f"{sample['own']} | {sample['other']} {sample['chance']}" if "own" in sample else f"{sample['txt']} alone"


def cook_join(sample: dict[str, Any]) -> TextSample:
    if random.random() < 0.1:
        raise SkipSample
    return TextSample(**basic_sample_keys(sample), text=f"{text_of(sample)} {torch.rand(())}")


@cooker(need_primary=True)
def cook_with_stores(sample: dict[str, Any], notes: Any, primary: Any) -> TextSample:
    text = f"{notes.get(sample['__key__'] + '.txt', sample)}, {primary.get('.txt', sample)}"
    return TextSample(**basic_sample_keys(sample), text=text)


def cook_alone(sample: dict[str, Any]) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=f"alone {sample['txt']}")


COOKERS = [
    Cooker(cook_join, has_subflavors={"of": "join"}),
    Cooker(cook_with_stores, has_subflavors={"of": "stores"}),
    Cooker(cook_alone, has_subflavors={"of": "a"}),
]


class Cooks(DefaultTaskEncoder):
    cookers = COOKERS


def trained(folder: Path, name: str, encoder: Any = Cooks, **kwargs: Any) -> Any:
    settings = {"batch_size": 2, "shuffle_buffer_size": 7, "max_samples_per_sequence": 3}
    config = config_of(1, 0)
    return get_train_dataset(folder / f"{name}.yaml", task_encoder=encoder(), worker_config=config, **settings | kwargs)


def first_texts(folder: Path, name: str, batches: int = 24) -> list[str]:
    (loader,) = loaders_of(trained(folder, name), 1, 0)
    return [text for _, batch in zip(range(batches), loader, strict=False) for text in batch.text]


def test_a_cooker_sees_the_named_samples_whole(folder: Path) -> None:
    texts = first_texts(folder, "named")
    assert {text.rpartition(" ")[0] for text in texts} <= {
        f"a {key} | {f'b {key}' if key in KEYS[:30] else 'none'}" for key in KEYS
    }
    assert any("none" in text for text in texts)


def test_without_names_the_parts_of_all_are_one_sample(folder: Path) -> None:
    for text in first_texts(folder, "parts"):
        assert text.startswith("b ")  # both datasets have a part txt; the later one's stands
        assert " alone " in text


def test_what_the_joiner_gives_a_type_is_not_cooked(folder: Path) -> None:
    assert all(text.startswith("typed a ") for text in first_texts(folder, "typed"))


def test_each_leaf_has_its_own_cooker(folder: Path) -> None:
    texts = first_texts(folder, "blend")
    assert {text.startswith("alone") for text in texts} == {True, False}


def test_a_cooker_of_a_join_has_stores_and_the_primary(folder: Path) -> None:
    for text in first_texts(folder, "stores"):
        note, own = text.split(", ")
        assert note.removeprefix("note ") == own.removeprefix("a ")


def test_samples_that_no_cooker_takes_stop_the_run(folder: Path) -> None:
    (loader,) = loaders_of(trained(folder, "nobody"), 1, 0)
    with pytest.raises(FatalSampleError, match=r"no cooker of Cooks takes its samples.*'of': 'nobody'"):
        next(iter(loader))


def test_without_cookers_the_joined_samples_come_as_they_are(folder: Path) -> None:
    (loader,) = loaders_of(trained(folder, "named", DefaultTaskEncoder, batch_size=None), 1, 0)
    sample = next(iter(loader))
    assert type(sample) is CrudeSample
    assert sample["first"]["__key__"] == sample["__key__"]
    assert counts_of(loader.save_state_rank())["samples"] == 1


def test_a_cooker_must_take_the_stores(folder: Path) -> None:
    class Wrong(DefaultTaskEncoder):
        cookers = (Cooker(cook_join),)

    with pytest.raises(ConfigurationError, match="cook_join is called with a sample and notes"):
        trained(folder, "stores", Wrong)


def test_two_stores_of_one_name_are_refused(folder: Path) -> None:
    aux = {"aux": {"notes": "filesystem://./a"}}
    mix = joined(CRUDE_JOINER, second={"aux": {"notes": "filesystem://./notes"}}, named=True)
    mix["join"]["first"] |= aux
    write_mix(folder / "twice.yaml", train=mix)
    with pytest.raises(MetadataError, match="two entries of the join have an auxiliary store 'notes'"):
        trained(folder, "twice")

"""Joins through the loader: rows, joiners, refusals (order and resume: test_join_order)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from engine import config_of
from keyed import CRUDE, KEYS, both, join, keyed_dataset, shards, shuffled, write_mix

from energon_bridge import TextSample, edataclass, get_loader, get_val_dataset, register_joiner
from energon_bridge.core.errors import (
    ConfigurationError,
    EmptyDatasetError,
    KeyIndexError,
    MetadataError,
    UnmatchedKeyError,
    UntrustedCodeError,
)


@edataclass
class Pair(TextSample):
    """Two texts, joined by position or by name."""

    other: str = ""

    @classmethod
    def from_joined(cls, first: TextSample, second: TextSample | None) -> Pair:
        return cls.derive_from(first, text=first.text, other="" if second is None else second.text)


register_joiner("some.module.that.moved.Pair")(Pair)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Return a folder with the datasets `a` and `b`, of the same keys in another order and other shards."""
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 7, 8, 5))
    keyed_dataset(tmp_path / "b", train=shards(shuffled(KEYS), 3, 12, 5))
    return tmp_path


def read(source: Any, split_part: str = "train", **kwargs: Any) -> list[Any]:
    settings = {"batch_size": None, "worker_config": config_of(1, 0, num_lanes=None), **kwargs}
    dataset = get_val_dataset(source, split_part=split_part, **settings)
    with closing(get_loader(dataset)) as loader:
        return list(loader)


def texts(source: Any, split_part: str = "train", **kwargs: Any) -> list[str]:
    return [sample.text for sample in read(source, split_part, **kwargs)]


def pairs(keys: Sequence[str], missing: Sequence[str] = ()) -> list[str]:
    return [f"a {key} + {'none' if key in missing else f'b {key}'}" for key in keys]


# Rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_keys_may_come_in_any_order(pair: Path, named: bool) -> None:
    found = read(write_mix(pair / "mix.yaml", train=join(named=named)))
    assert [sample.text for sample in found] == pairs(KEYS)
    sources = found[9].__sources__
    assert [(source.dataset_path, source.file_names) for source in sources] == [
        (str(pair / name), ("k09.txt",)) for name in "ab"
    ]
    assert [source.shard_name for source in sources] == ["train/1.tar", f"train/{shard_of(shuffled(KEYS), 9)}.tar"]


def shard_of(keys: Sequence[str], number: int) -> int:
    place = keys.index(KEYS[number])
    return 0 if place < 3 else 1 if place < 15 else 2


@pytest.mark.parametrize(("nonmatch", "expected"), [("skip", pairs(KEYS[3:])), ("none", pairs(KEYS, missing=KEYS[:3]))])
@pytest.mark.parametrize("named", [False, True])
def test_samples_without_a_match(tmp_path: Path, nonmatch: str, expected: list[str], named: bool) -> None:
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 10, 10))
    keyed_dataset(tmp_path / "b", train=shards([*shuffled(KEYS[3:]), "more"], 9, 9))
    assert texts(write_mix(tmp_path / "mix.yaml", train=join(None, {"nonmatch": nonmatch}, named=named))) == expected


def test_a_missing_match_is_an_error_that_names_keys(tmp_path: Path) -> None:
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 10, 10))
    keyed_dataset(tmp_path / "b", train=[KEYS[8:]])
    with pytest.raises(UnmatchedKeyError, match=r"/b, 'train': 8 samples of .*/a .*'k00', 'k01', .*'k04', …"):
        texts(write_mix(tmp_path / "mix.yaml", train=join()))


def test_three_datasets_with_a_mode_each(tmp_path: Path, cache: Path) -> None:
    keyed_dataset(tmp_path / "a", train=[KEYS])
    keyed_dataset(tmp_path / "b", train=[shuffled(KEYS[2:])])
    keyed_dataset(tmp_path / "c", train=shards(shuffled(KEYS[:10]), 5, 5))
    document = join(None, {"nonmatch": "skip"}, joiner=collected)
    document["join"].append({"path": "./c", "nonmatch": "none"})
    source = {"__class__": "MetadatasetV2", "splits": {"train": in_folder(document, tmp_path)}}
    assert texts(source) == [f"a {key}|b {key}|{f'c {key}' if key in KEYS[:10] else None}" for key in KEYS[2:]]
    assert len(list((cache / "energon_bridge" / "joins").iterdir())) == 1  # a dict has no folder of its own


def collected(*samples: TextSample | None) -> TextSample:
    assert samples[0] is not None
    return TextSample.derive_from(samples[0], text="|".join(str(sample and sample.text) for sample in samples))


def in_folder(document: Any, folder: Path) -> Any:
    return document | {"join": [{**entry, "path": str(folder / entry["path"])} for entry in document["join"]]}


def test_excluded_samples_are_no_rows_and_no_matches(tmp_path: Path) -> None:
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 7, 8, 5), exclude=["train/0.tar/k01", "train/2.tar"])
    keyed_dataset(tmp_path / "b", train=shards(KEYS, 10, 10), exclude=["train/0.tar/k03", "train/0.tar/k00"])
    mix = write_mix(tmp_path / "mix.yaml", train=join(None, {"nonmatch": "none"}))
    assert texts(mix) == pairs([key for key in KEYS[:15] if key != "k01"], missing=["k00", "k03"])


def test_samples_of_another_part_are_no_matches(tmp_path: Path) -> None:
    keyed_dataset(tmp_path / "a", train=[KEYS])
    keyed_dataset(tmp_path / "b", train=[KEYS[:15]], val=[KEYS[15:]])
    mix = write_mix(tmp_path / "mix.yaml", train=join(None, {"nonmatch": "skip"}))
    assert texts(mix) == pairs(KEYS[:15])


def test_a_join_in_two_splits_has_the_rows_of_each(tmp_path: Path) -> None:
    for name in "ab":
        keyed_dataset(tmp_path / name, train=[shuffled(KEYS[:14], ord(name))], val=[shuffled(KEYS[14:], ord(name))])
    mix = write_mix(tmp_path / "mix.yaml", train=join(), val=join())
    assert texts(mix, "train") == pairs(shuffled(KEYS[:14], ord("a")))
    assert texts(mix, "val") == pairs(shuffled(KEYS[14:], ord("a")))
    assert len(list((tmp_path / "mix.yaml.cache").iterdir())) == 2


def test_configurations_of_the_join_go_for_its_datasets(pair: Path) -> None:
    for name in "ab":
        meta = pair / name / ".nv-meta"
        (meta / "part.yaml").write_text("split_parts: {train: ['train/0.tar']}\n")
        (meta / "other.yaml").write_bytes((meta / "dataset.yaml").read_bytes() + b"subflavors: {from: other}\n")
    document = join(None, {"nonmatch": "skip"}, split_config="part.yaml", dataset_config="other.yaml")
    found = read(write_mix(pair / "mix.yaml", train=document))
    assert [sample.text for sample in found] == pairs([key for key in KEYS[:7] if key in shuffled(KEYS)[:3]])
    assert [sample.__subflavors__ for sample in found] == [{"from": "other"}] * len(found)


def test_a_subset_counts_rows(tmp_path: Path) -> None:
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 7, 13))
    keyed_dataset(tmp_path / "b", train=[KEYS[4:]])
    document = join(None, {"nonmatch": "skip"}, subset={"range": [2, 10]})
    assert texts(write_mix(tmp_path / "mix.yaml", train=document)) == pairs(KEYS[6:14])
    document["subset"] = {"range": ["50%", "100%"]}
    assert texts(write_mix(tmp_path / "mix.yaml", train=document)) == pairs(KEYS[12:])


def test_subflavors_of_the_join_and_the_primary(pair: Path) -> None:
    document = join({"subflavors": {"of": "a", "own": 1}}, {"subflavors": {"of": "b"}}, subflavors={"of": "join"})
    (sample, *_) = read(write_mix(pair / "mix.yaml", train=document))
    assert sample.__subflavors__ == {"of": "join", "own": 1}


def test_datasets_behind_a_url_are_joined_too(pair: Path) -> None:
    files = fsspec.filesystem("memory")
    mix = write_mix(pair / "mix.yaml", train=join())
    try:
        for path in (mix, *(pair / "a").rglob("*"), *(pair / "b").rglob("*")):
            if path.is_file():
                files.pipe_file(f"/joins/{path.relative_to(pair).as_posix()}", path.read_bytes())
        assert texts("memory://joins/mix.yaml") == pairs(KEYS)
    finally:
        files.rm("/joins", recursive=True)


# Joiners -------------------------------------------------------------------------------------------------------------


def test_from_joined_of_a_sample_type_of_ours(pair: Path) -> None:
    joiner = {"__module__": "megatron.energon", "__class__": "TextSample"}
    found = read(write_mix(pair / "mix.yaml", train=join(joiner=joiner)))
    assert [sample.text for sample in found] == [f"b {key}" for key in KEYS]


@pytest.mark.parametrize("named", [False, True])
def test_from_joined_of_a_registered_type(pair: Path, named: bool) -> None:
    joiner = {"__module__": "some.module.that.moved", "__class__": "Pair"}
    found = read(write_mix(pair / "mix.yaml", train=join(named=named, joiner=joiner)))
    assert [(type(sample), sample.text, sample.other) for sample in found[:1]] == [(Pair, "a k00", "b k00")]


def test_a_sample_type_that_the_program_has_imported_needs_no_trust(pair: Path) -> None:
    mix = write_mix(pair / "mix.yaml", train=join(joiner={"__module__": __name__, "__class__": "Pair"}))
    assert type(read(mix)[0]) is Pair
    for module, name in (("subprocess", "call"), (__name__, "texts")):
        other = write_mix(pair / "mix.yaml", train=join(joiner={"__module__": module, "__function__": name}))
        with pytest.raises(UntrustedCodeError, match=r"register_joiner.*energon_bridge\.compat: --trust-remote-code"):
            read(other)


def test_crude_datasets_are_joined_by_a_function(pair: Path) -> None:
    shutil.rmtree(pair / "b")
    keyed_dataset(pair / "b", train=[KEYS], dataset_yaml=CRUDE)
    assert texts(write_mix(pair / "mix.yaml", train=join()))[:2] == pairs(KEYS[:2])


def test_a_function_is_imported_only_with_trust(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from keyed import both\ndef later(first, second): return both(first, second)\n"
    (tmp_path / "joiners_of_a_stranger.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    joiner = {"__module__": "joiners_of_a_stranger", "__function__": "later"}
    mix = write_mix(pair / "mix.yaml", train=join(joiner=joiner))
    with pytest.raises(
        UntrustedCodeError, match=r"joiners_of_a_stranger\.later\. .*register_joiner.*trust_remote_code"
    ):
        texts(mix)
    assert texts(mix, trust_remote_code=True) == pairs(KEYS)


def test_a_name_is_registered_once() -> None:
    register_joiner(both)  # again, as a module that is loaded again does
    with pytest.raises(ConfigurationError, match=r"'keyed\.both' is already registered"):
        register_joiner("keyed.both")(collected)


# Refusals ------------------------------------------------------------------------------------------------------------


def lonely(first: Any) -> Any:
    return first


MISTAKES: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "names for from_joined": (
        lambda: join(named=True, joiner={"__module__": "megatron.energon", "__class__": "TextSample"}),
        {},
        MetadataError,
        r"`joiner`: `from_joined` of TextSample takes samples by position.*as a list",
    ),
    "an unknown type": (
        lambda: join(joiner={"__module__": "megatron.energon", "__class__": "TextSimple"}),
        {},
        MetadataError,
        "Did you mean 'TextSample'",
    ),
    "a function of one": (lambda: join(joiner=lonely), {}, MetadataError, r"lonely\(first.*2 positional arguments"),
    "other names": (
        lambda: {"join": {"x": {"path": "./a"}, "y": {"path": "./b"}}, "joiner": both},
        {},
        MetadataError,
        "by the names x, y",
    ),
    "crude without a function": (
        lambda: join(joiner=TextSample),
        {"dataset_yaml": CRUDE},
        MetadataError,
        "/b is crude.*Use a function",
    ),
    "no key index": (
        join,
        {"key_index": False},
        KeyIndexError,
        r"/b: .*key index.*missing.*Run `energon prepare .*/b` without --no-key-index",
    ),
    "no row left": (lambda: join(None, {"nonmatch": "skip"}), {"train": [["x"]]}, EmptyDatasetError, "has no rows"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_by_name(tmp_path: Path, mistake: str) -> None:
    document, of_b, error, message = MISTAKES[mistake]
    keyed_dataset(tmp_path / "a", train=[KEYS])
    keyed_dataset(tmp_path / "b", **{"train": [KEYS], **of_b})
    split: Any = document()
    entries = split["join"].values() if isinstance(split["join"], dict) else split["join"]
    for entry in entries:
        entry["path"] = str(tmp_path / entry["path"])
    with pytest.raises(error, match=message):
        texts({"__class__": "MetadatasetV2", "splits": {"train": split}})


def picky(first: Any, second: Any) -> Any:
    if first.__key__ == "k05":
        raise ValueError("not this one")
    return 6 if first.__key__ == "k06" else both(first, second)


def test_a_row_that_fails_is_skipped_and_named(pair: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = {"__class__": "MetadatasetV2", "splits": {"train": in_folder(join(joiner=picky), pair)}}
    path = pair / "b" / "train" / f"{shard_of(shuffled(KEYS), 9)}.tar"
    path.write_bytes(path.read_bytes().replace(b"k09.txt", b"k09.tx_"))
    with caplog.at_level(logging.WARNING):
        (batch,) = read(source, batch_size=20)
    assert batch.text == pairs([key for key in KEYS if key not in ("k05", "k06", "k09")])
    messages = [record.getMessage() for record in caplog.records]
    assert "row 5, joining key 'k05' of" in messages[0]
    assert messages[0].endswith("ValueError: not this one")
    assert "the joiner returned int, expected a sample" in messages[1]
    assert "row 9 of a join, dataset 1: " in messages[2]
    assert "key 'k09'" in messages[2]

"""Batches made of columns: equal batches, states and counters as of single samples, which an identity hook asks for."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine import comparable, config_of, digest, text_dataset
from PIL import Image

from energon_bridge import DefaultTaskEncoder, ErrorPolicy, get_savable_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.encoder import collate
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

STEPS = 60


class Columns(DefaultTaskEncoder):
    """Has no hook."""


class Singles(DefaultTaskEncoder):
    """Is given every sample."""

    def encode_sample(self, sample: Any) -> Any:
        return sample


class Raw(Columns):
    decoder = None


class RawSingles(Singles):
    decoder = None


ENCODERS = {"decoded": (Columns, Singles), "raw": (Raw, RawSingles)}


def prepared(folder: Path, shards: dict[str, Any], kind: str, field_map: dict[str, str] | None) -> Path:
    folder.mkdir()
    for name, samples in shards.items():
        write_shard(folder / name, samples)
    yaml_text = render_dataset_yaml(kind, field_map)
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=yaml_text, key_index=False)
    return folder


def texts(folder: Path) -> Path:
    return text_dataset(folder, train=[40, 30, 7])


def crude(folder: Path) -> Path:
    """Samples of several parts; those of the second shard have another one."""
    parts = [("txt", "json"), ("txt", "json", "cls")]
    content = {"txt": b"text", "json": b'{"a": [1, 2]}', "cls": b"3"}
    shards = {
        f"{shard}.tar": {f"{shard}{n:03}": {part: content[part] for part in parts[shard]} for n in range(40)}
        for shard in range(2)
    }
    return prepared(folder, shards, "CrudeWebdataset", None)


def mapped(folder: Path) -> Path:
    """A field from inside a part, one from either of two, a key from the data, and a field that has a default."""
    samples = {
        f"{n:03}": {"json": json.dumps({"q": f"question {n}", "id": f"id{n}"}).encode(), ("a", "b")[n % 2]: b"yes"}
        for n in range(60)
    }
    samples |= {f"x{n:03}": {"json": b'{"q": "again", "id": "0"}', "a": b"no"} for n in range(60)}
    access = {"context": "json[q]", "answers": "a,b", "image": "json[q]", "__key__": "json[id]"}
    return prepared(folder, {"0.tar": samples}, "VQASample", access)


def lines(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps({"number": n, "text": f"line {n}"}) + "\n" for n in range(80)))
    return path


def damaged(folder: Path) -> Path:
    """Parts that are no JSON, a field that is missing, and samples that are excluded."""
    samples: dict[str, Any] = {f"{n:03}": {"json": b'{"q": "good"}'} for n in range(80)}
    samples["007"] = {"json": b"{"}
    samples["033"] = {"json": b'{"other": 1}'}
    samples["050"] = {"txt": b"no json"}
    prepared(folder, {"0.tar": samples}, "TextSample", {"text": "json[q]"})
    split = folder / ".nv-meta" / "split.yaml"
    document = yaml.safe_load(split.read_text())
    document["exclude"] = ["0.tar/011", "0.tar/012"]
    split.write_text(yaml.safe_dump(document))
    return folder


def pictures(folder: Path) -> Path:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    return prepared(
        folder,
        {"0.tar": {f"{n:03}": {"jpg": out.getvalue(), "txt": b"caption %d" % n} for n in range(60)}},
        "CaptioningSample",
        {"image": "jpg", "caption": "txt"},
    )


def mix(folder: Path) -> Path:
    folder.mkdir()
    for name, kind in {"one": texts, "two": texts, "three": damaged}.items():
        kind(folder / name)
    blend = [{"path": name, "weight": weight, "subflavors": {"name": name}} for name, weight in WEIGHTS.items()]
    path = folder / "mix.yaml"
    splits = {"train": {"blend": blend}}
    path.write_text(yaml.safe_dump({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}))
    return path


WEIGHTS = {"one": 3, "two": 1, "three": 2}
DATA = {one.__name__: one for one in (texts, crude, mapped, lines, damaged, pictures, mix)}


def loader_of(path: Path, encoder: type, workers: int = 0, state: Any = None, **kwargs: Any) -> SavableDataLoader:
    settings: dict[str, Any] = {"batch_size": 3, "shuffle_buffer_size": 5, "max_samples_per_sequence": 4}
    settings |= {"error_policy": ErrorPolicy(max_error_rate=0.5), "worker_config": config_of(1, workers)}
    loader = get_savable_loader(get_train_dataset(path, task_encoder=encoder(), **(settings | kwargs)))
    if state is not None:
        loader.restore_state_rank(state)
    return loader


def run(loader: SavableDataLoader, steps: int = STEPS, bans: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return all that a run shows: its batches and, at its end, the state and the counters."""
    batches = iter(loader)
    found = [next(batches) for _ in range(steps // 2)]
    if bans:
        loader.ban(bans)
    found += [next(batches) for _ in range(steps - len(found))]
    state = loader.save_state_rank()
    shown = {"batches": list(map(digest, found)), "state": comparable(state), "counters": loader.counters()}
    loader.close()
    return shown | {"whole state": state}


@pytest.fixture(params=DATA)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return DATA[request.param](tmp_path / "data")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("batches", "state", "counters"))


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "decoded") for name in DATA), *((name, "raw") for name in ("texts", "crude", "pictures"))],
)
def test_a_run_is_the_same_with_an_identity_hook(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DATA[name](tmp_path / "data")
    made = []
    init = collate.Records.__init__
    monkeypatch.setattr(collate.Records, "__init__", lambda self, *given: made.append(self) or init(self, *given))
    columns, singles = ENCODERS[form]
    one = run(loader_of(data, columns))
    assert bool(made) == ((name, form) != ("pictures", "decoded"))  # images are decoded side by side
    made.clear()
    assert same(one, run(loader_of(data, singles)))
    assert not made


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_with_and_without_an_identity_hook(data: Path, workers: int) -> None:
    columns, singles = ENCODERS["decoded"]
    whole = run(loader_of(data, singles))
    begun = run(loader_of(data, columns, workers), STEPS // 2)
    for encoder in (columns, singles):
        rest = run(loader_of(data, encoder, 2 - workers, begun["whole state"]), STEPS // 2)
        assert begun["batches"] + rest["batches"] == whole["batches"]
        assert rest["counters"] == whole["counters"]


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": None},
        {"batch_size": 1},
        {"batch_size": 50},
        {"shuffle_buffer_size": 0, "max_samples_per_sequence": None},
        {"error_policy": ErrorPolicy(on_error=lambda error: True)},
    ],
    ids=["alone", "ones", "many", "unshuffled", "a rule for errors"],
)
def test_settings_do_not_matter(data: Path, settings: dict[str, Any]) -> None:
    if (data / "1.tar").exists() and settings.get("batch_size", 3) == 50:
        pytest.skip("samples of different parts are no batch")
    columns, singles = ENCODERS["decoded"]
    assert same(run(loader_of(data, columns, **settings)), run(loader_of(data, singles, **settings)))


def test_bans_do_not_matter(tmp_path: Path) -> None:
    data = mix(tmp_path / "data")
    bans = ("00003", "00021", "00033", "005", "044")
    one, other = (run(loader_of(data, encoder), bans=bans) for encoder in ENCODERS["decoded"])
    assert same(one, other)
    assert sum(row["banned"] for row in one["counters"])


def test_errors_of_a_batch_are_the_same(tmp_path: Path) -> None:
    """Samples of different parts are no batch: of several rows, none of one."""
    data = crude(tmp_path / "data")
    messages = []
    for encoder in ENCODERS["decoded"]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            run(loader_of(data, encoder, batch_size=40, error_policy=ErrorPolicy(on_error="raise")))
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


def test_a_pass_is_the_same(data: Path) -> None:
    passes = []
    for encoder in ENCODERS["decoded"]:
        settings: dict[str, Any] = {"batch_size": 4, "worker_config": config_of(1, 0), "split_part": "train"}
        settings["error_policy"] = ErrorPolicy(max_error_rate=0.5)
        loader = get_savable_loader(get_val_dataset(data, task_encoder=encoder(), **settings))
        passes.append(list(map(digest, loader)))
        loader.close()
    assert passes[0] == passes[1]

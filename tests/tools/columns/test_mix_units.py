"""`unit`: weights as shares of a column, in files and blenders, in streams of any topology, plans and states."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import answer, energon
from engine import TensorEncoder, config_of, digest, loaders_of, numbers_of, text_dataset

from energon_bridge import Blender, WeightSchedule, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError, EnergonError, MetadataError, SettingMismatchError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.mix import load_mix
from energon_bridge.tools.cli.plan import describe
from energon_bridge.tools.columns.making import add_column

COUNTS = {"short": [60, 40], "middle": [50], "long": [30, 7]}
TOKENS = {"short": lambda n: 1 + n % 3, "middle": lambda n: 20 + n % 11, "long": lambda n: 100 + 7 * (n % 20)}
OPTIONS = ("--batch-size", 2, "--num-lanes", 24)


def number_of(sample: Any) -> int:
    return int(sample.text.split()[1])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("units")
    for name, counts in COUNTS.items():
        path = str(text_dataset(folder / name, train=counts, val=[3]))
        add_column(path, "tokens", lambda sample, name=name: TOKENS[name](number_of(sample)), made_of=name)
        add_column(path, "number", number_of, made_of="number")
    text_dataset(folder / "bare", train=[4])
    (folder / "lines.jsonl").write_text('{"text": "a"}\n')
    for name, tree in {"mix": blend(3, 2, 1), "draws": blend(3, 2, 1, unit=None)}.items():
        document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document | {"splits": {"train": tree, "val": tree}}))
    return folder


def blend(*weights: Any, unit: str | None = "tokens", **more: Any) -> dict[str, Any]:
    parts = [{"path": f"./{name}", "weight": weight} for name, weight in zip(COUNTS, weights, strict=True)]
    return {"blend": parts, **({"unit": unit} if unit else {}), **more}


def document(tree: dict[str, Any], data: Path) -> dict[str, Any]:
    text = json.dumps({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": tree}})
    return json.loads(text.replace("./", f"{data}/"))  # type: ignore[no-any-return]


def opened(data: Path, tree: Any, encoder: Any = None, **kwargs: Any) -> DatasetSpec:
    source = document(tree, data) if isinstance(tree, dict) else tree
    settings: dict[str, Any] = {"batch_size": 20, "worker_config": config_of(1, 0)}
    return get_train_dataset(source, task_encoder=encoder or TensorEncoder(), **(settings | kwargs))


def tokens_of(dataset: DatasetSpec, batches: Iterator[Any]) -> Counter[str]:
    """Return the tokens of each dataset in some batches, counted from the texts."""
    names = {leaf.identity: Path(leaf.dataset.path).name for leaf in dataset.leaves}
    found: Counter[str] = Counter()
    for batch in batches:
        for key, number in zip(batch.__restore_key__[3], numbers_of(batch), strict=True):
            found[names[key[0]]] += TOKENS[names[key[0]]](number)
    return found


def near(found: Counter[str], **shares: float) -> None:
    """Check shares up to two of the largest samples; those of samples would be many times off."""
    total = sum(shares.values())
    assert found.total() > 10_000
    for name, share in shares.items():
        assert found[name] == pytest.approx(found.total() * share / total, abs=2 * 233)


def test_tokens_meet_the_weights_in_every_form(data: Path) -> None:
    blender = Blender([(data / "short", 3), (data / "middle", 2), (data / "long", 1)], unit="tokens")
    nested = blend(0, 2, 1)
    nested["blend"][0] = {"blend": [{"path": "./short", "weight": 5}], "weight": 3}
    dataset = opened(data, blender)
    batches = list(islice(loaders_of(dataset, 1, 0)[0], 150))
    near(tokens_of(dataset, iter(batches)), short=3, middle=2, long=1)
    expected = [digest(batch) for batch in batches[:50]]
    for source in (data / "mix.yaml", blend(3, 2, 1), nested):  # the same stream
        (loader,) = loaders_of(opened(data, source), 1, 0)
        assert [digest(batch) for batch in islice(loader, 50)] == expected
    filtered = blend(3, 2, 1, filter="tokens != 2 and number < 30")
    dataset = opened(data, filtered)
    near(tokens_of(dataset, islice(loaders_of(dataset, 1, 0)[0], 150)), short=3, middle=2, long=1)
    for leaf in dataset.leaves:  # the amounts are those of the samples that it has
        tokens = [TOKENS[Path(leaf.dataset.path).name](n) for n in range(min(30, leaf.dataset.num_samples))]
        assert leaf.amounts.total == 1024 * sum(count for count in tokens if count != 2)


def test_a_group_shares_by_tokens(data: Path) -> None:
    """A concatenation in a blend is one dataset to it: each of its samples comes as often."""
    tree = {
        "blend": [
            {"path": "./middle", "weight": 1},
            {"concat": [{"path": "./short"}, {"path": "./long"}], "weight": 2},
        ],
        "unit": "tokens",
    }
    dataset = opened(data, tree)
    totals = {name: sum(TOKENS[name](n) for n in range(sum(COUNTS[name]))) for name in COUNTS}
    group = totals["short"] + totals["long"]
    expected = {name: 2 * totals[name] / group for name in ("short", "long")}
    near(tokens_of(dataset, islice(loaders_of(dataset, 1, 0)[0], 200)), middle=1, **expected)


def test_bans_and_changed_weights(data: Path) -> None:
    dataset = opened(data, blend(3, 2, 1))
    (loader,) = loaders_of(dataset, 1, 0)
    batches = iter(loader)
    list(islice(batches, 6))
    loader.ban([f"{number:05d}" for number in range(20)], dataset=str(data / "long"))
    later = list(islice(iter(loader), 150))
    near(tokens_of(dataset, iter(later)), short=3, middle=2, long=1)
    loader.set_weights([1, 0, WeightSchedule.constant(4)])
    list(islice(iter(loader), 24))  # up to the draw from which they hold
    near(tokens_of(dataset, islice(iter(loader), 150)), short=1, middle=0, long=4)


def test_a_schedule_is_followed(data: Path) -> None:
    rising = {"schedule": "linear", "points": [[0, 0], [6000, 2]]}
    dataset = opened(data, blend(1, 1, rising))
    (loader,) = loaders_of(dataset, 1, 0)
    batches = iter(loader)
    first = tokens_of(dataset, islice(batches, 150))
    assert 0.1 < first["long"] / first.total() < 0.3
    list(islice(batches, 150))
    near(tokens_of(dataset, islice(batches, 150)), short=1, middle=1, long=2)


def test_a_seek_goes_through_what_was_drawn(data: Path) -> None:
    """Stops on any ranks are those of `suites/test_chains.py`."""
    dataset = opened(data, blend(3, {"schedule": "linear", "points": [[0, 1], [90, 3]]}, 1))
    (alone,), (started,) = loaders_of(dataset, 1, 0), loaders_of(dataset, 1, 0)
    started.seek(40)
    expected = [digest(batch) for batch in islice(alone, 96)][40:]
    assert [digest(batch) for batch in islice(started, 56)] == expected


def test_a_new_dataset_in_the_mix_begins_at_its_share(data: Path) -> None:
    """It must not make up for what the others had before it came."""
    old = {"blend": [{"path": "./short", "weight": 1}, {"path": "./middle", "weight": 1}], "unit": "tokens"}
    (loader,) = loaders_of(opened(data, old), 1, 0)
    list(islice(loader, 200))
    dataset = opened(data, blend(1, 1, 1))
    (after,) = loaders_of(dataset, 1, 0)
    after.restore_state_rank(loader.save_state_rank(), on_mismatch="adapt")
    near(tokens_of(dataset, islice(after, 150)), short=1, middle=1, long=1)
    (without,) = loaders_of(opened(data, old), 1, 0)  # the new one rests meanwhile
    without.restore_state_rank(after.save_state_rank(), on_mismatch="adapt")
    list(islice(without, 50))
    after.restore_state_rank(without.save_state_rank(), on_mismatch="adapt")
    near(tokens_of(dataset, islice(after, 150)), short=1, middle=1, long=1)


def test_states_know_the_unit_and_its_values(data: Path, tmp_path: Path) -> None:
    (loader,) = loaders_of(opened(data, blend(3, 2, 1)), 1, 0)
    list(islice(loader, 9))
    state = loader.save_state_rank()
    for other in (blend(3, 2, 1, unit=None), blend(3, 2, 1, unit="tokens * 2")):
        (wrong,) = loaders_of(opened(data, other), 1, 0)
        with pytest.raises(SettingMismatchError, match="unit"):
            wrong.restore_state_rank(state)
        wrong.restore_state_rank(state, on_mismatch="adapt")
        assert len(list(islice(wrong, 5))) == 5
    path = str(text_dataset(tmp_path / "changed", train=[12]))
    both = {"blend": [{"path": path}, {"path": str(data / "long")}], "unit": "tokens"}
    add_column(path, "tokens", lambda sample: 5, made_of="five")
    (loader,) = loaders_of(opened(data, both), 1, 0)
    list(islice(loader, 3))
    add_column(path, "tokens", lambda sample: 5 + number_of(sample) // 11, made_of="other")
    with pytest.raises(SettingMismatchError, match="other values than when the state was saved"):
        loaders_of(opened(data, both), 1, 0)[0].restore_state_rank(loader.save_state_rank())


def test_validation_needs_no_column(data: Path) -> None:
    tree = {"blend": [{"path": str(data / "short")}, {"path": str(data / "bare")}], "unit": "tokens"}
    dataset = get_val_dataset(document(tree, data), split_part="train", batch_size=4, task_encoder=TensorEncoder())
    assert sum(int(batch.__valid__.sum()) for batch in loaders_of(dataset, 1, 0)[0]) == 104


def test_the_command_line_agrees_with_the_run(data: Path, tmp_path: Path) -> None:
    steps, ranks = 200, 3
    found = answer("plan", data / "mix.yaml", "--steps", steps, *OPTIONS, "--world-size", ranks)
    assert found["unit"] == "tokens"
    shares = {Path(leaf["path"]).name: leaf for leaf in found["leaves"]}
    assert [round(shares[name]["amount_share"], 6) for name in COUNTS] == [0.5, 0.333333, 0.166667]
    dataset = opened(data, data / "mix.yaml", batch_size=2)
    loaders = loaders_of(dataset, ranks, 0)
    streams = [iter(loader) for loader in loaders]
    rows = [[next(stream) for stream in streams] for _ in range(steps)]
    tokens = tokens_of(dataset, (batch for row in rows for batch in row))
    drawn = Counter(key[0] for row in rows for batch in row for key in batch.__restore_key__[3])
    for name, leaf in shares.items():
        assert leaf["draws"] == pytest.approx(drawn[leaf["identity"]], rel=0.03, abs=4)
        assert leaf["amount"] == pytest.approx(tokens[name], rel=0.03, abs=4 * 233)
        assert leaf["share"] == pytest.approx(drawn[leaf["identity"]] / (2 * steps * ranks), abs=0.02)
    text = energon("plan", data / "mix.yaml", "--steps", steps, *OPTIONS).output
    assert "share of tokens" in text
    assert "blend of tokens" in text
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loaders[0].save_state_global() if ranks == 1 else merged(loaders)))
    for step in (3, 199):  # from the beginning, as a run that has delivered it knows
        named = answer("which", data / "mix.yaml", "--step", step, "--world-size", ranks, *OPTIONS)
        assert keys_of(named) == [list(batch.__restore_key__[3]) for batch in rows[step]]
    after = answer("which", state, "--step", steps, "--world-size", ranks)
    assert keys_of(after) == [list(next(stream).__restore_key__[3]) for stream in streams]


def merged(loaders: list[Any]) -> Any:
    from energon_bridge.core.loader.fits import merge

    return merge([loader.save_state_rank() for loader in loaders])


def keys_of(named: Any) -> list[Any]:
    return [[tuple(sample["restore_key"]) for sample in one["samples"]] for one in named["microbatches"]]


@pytest.mark.parametrize(
    ("tree", "error", "words"),
    [
        (
            {"blend": [{"path": "./bare"}, {"path": "./long"}], "unit": "tokens"},
            ConfigurationError,
            ["bare", "--processor"],
        ),
        (
            {"blend": [{"path": "./bare"}, {"path": "./long"}], "unit": "score"},
            ConfigurationError,
            ["energon columns add", "bare score --of MODULE:FUNCTION"],
        ),
        ({"blend": [{"path": "./lines.jsonl"}, {"path": "./long"}], "unit": "tokens"}, MetadataError, ["no columns"]),
        (blend(1, 1, 1, unit="tokens - tokens"), ConfigurationError, ["more than 0"]),
        (blend(1, 1, 1, unit="tokens >"), MetadataError, ["unit", "cannot be parsed"]),
        (blend(1, 1, 1, unit=3), MetadataError, ["unit"]),
        ({"concat": [{"path": "./long"}], "unit": "tokens"}, MetadataError, ["unit"]),
        (
            {"blend": [{"blend": [{"path": "./long"}], "unit": "tokens"}, {"path": "./short"}]},
            MetadataError,
            ["shares of draws", "outermost"],
        ),
        (
            {"blend": [{"blend": [{"path": "./long"}], "unit": "bytes"}, {"path": "./short"}], "unit": "tokens"},
            MetadataError,
            ["`bytes`", "`tokens`"],
        ),
    ],
)
def test_mistakes_are_named(data: Path, tree: dict[str, Any], error: type[EnergonError], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        opened(data, tree)
    for word in words:
        assert word in str(raised.value)


def test_mistakes_of_blenders_are_named(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs weights"):
        Blender([("a", None)], unit="tokens")
    with pytest.raises(ConfigurationError, match="cannot be parsed"):
        Blender([("a", 1)], unit="tokens >")
    inner = Blender([(data / "short", 1), (data / "long", 1)], unit="tokens")
    assert load_mix(Blender([(inner, 1)], unit=" tokens "), split_part="train").unit == "tokens"
    lines = describe(load_mix(inner, split_part="train"))
    assert lines[0].startswith("blend of tokens")

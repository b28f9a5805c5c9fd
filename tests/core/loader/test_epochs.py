"""An epoch of the data: `len()`, `metrics()["epochs"]`, `energon plan`, passes and reports mean the same by it."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine import (
    InProcessLoader,
    SkippingEncoder,
    TensorEncoder,
    config_of,
    is_masked,
    loaders_of,
    text_dataset,
)
from mixing import metadataset

from energon_bridge import EnergonDataloader, get_savable_loader, get_train_dataset, get_val_dataset
from energon_bridge.compat.conventions import EnergonConventions
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.stream.conventions import Conventions
from energon_bridge.tools.forecast.epochs import forecast
from energon_bridge.tools.forecast.planned_run import run_of_mix
from energon_bridge.tools.report.page import write_report
from energon_bridge.tools.report.recorder import RunRecorder, summary
from energon_bridge.trainers.huggingface import Described

SIZES = {"a": 12, "b": 30, "c": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    for name, number in SIZES.items():
        text_dataset(folder / name, train=[number], val=[number])
    return folder


def repeated(data: Path, **repetitions: float) -> dict[str, Any]:
    entries = [{"path": f"./{name}", "repetitions": number} for name, number in repetitions.items()]
    return metadataset(data, train={"blend_epochized": entries}, val={"blend_epochized": entries})


MIXES: dict[str, tuple[dict[str, float], float]] = {
    "whole": ({"a": 3, "b": 1}, 3 * 12 + 30),
    "fractions": ({"a": 2, "b": 0.5, "c": 0.7}, 2 * 12 + 15 + 7),
    "a fraction of a sample": ({"a": 1, "c": 0.25}, 12 + 2.5),
    "alone": ({"a": 3}, 3 * 12),
    "a part of one": ({"b": 0.5}, 15),
}
"""Repetitions, and the samples of an epoch as anybody would count them."""


def opened(data: Path, mix: Any, batch_size: int = 2, **kwargs: Any) -> DatasetSpec:
    settings: dict[str, Any] = {"task_encoder": TensorEncoder(), "worker_config": config_of(1, 0)} | kwargs
    return get_train_dataset(mix, batch_size=batch_size, shuffle_buffer_size=4, max_samples_per_sequence=3, **settings)


@pytest.mark.parametrize(("mix", "ranks"), [("whole", 1), ("fractions", 2), ("a fraction of a sample", 4)])
def test_an_epoch_has_each_sample_as_often_as_repetitions_say(mix: str, ranks: int, data: Path) -> None:
    repetitions, samples = MIXES[mix]
    spec = opened(data, repeated(data, **repetitions))
    steps = int(Fraction(samples) // (2 * ranks))
    loaders = loaders_of(spec, ranks, 0)
    assert {len(loader) for loader in loaders} == {steps}
    if ranks == 1:
        assert len(spec) == steps
    rounds = 24  # so that the ends of lanes, and what does not divide, weigh little
    drawn: Counter[str] = Counter()
    for loader in loaders:
        batches = [batch for batch in islice(loader, rounds * steps) if not is_masked(batch)]
        drawn.update(source.dataset_path.rsplit("/", 1)[-1] for batch in batches for source in batch.__sources__)
    made = drawn.total() / samples
    for name, number in repetitions.items():
        assert drawn[name] == pytest.approx(number * SIZES[name] * made, abs=SIZES[name])
    for loader in loaders:
        found = loader.metrics()
        assert found["epochs"] == pytest.approx(made, rel=0.03)
        for name, number in repetitions.items() if len(repetitions) > 1 else ():
            assert found[f"epochs/{name}"] == pytest.approx(number * made, rel=0.1, abs=1)
    config = config_of(ranks, 0)
    planned = forecast(run_of_mix(opened(data, repeated(data, **repetitions), worker_config=config)), rounds * steps)
    assert planned.mix_epoch == samples
    assert planned.draws / planned.mix_epoch == pytest.approx(made)


@pytest.mark.parametrize("mix", MIXES)
def test_a_pass_is_such_an_epoch(mix: str, data: Path) -> None:
    repetitions, _ = MIXES[mix]
    spec = opened(data, repeated(data, **repetitions), batch_size=1, repeat=False)
    (loader,) = loaders_of(spec, 1, 0)
    drawn: Counter[str] = Counter()
    for number in range(1, 4):
        assert len(loader) > 0
        batches = list(loader)
        assert len(loader) == len(batches)
        drawn.update(f"{batch.__sources__[0].dataset_path.rsplit('/', 1)[-1]} {batch.__key__[0]}" for batch in batches)
        for name, repeats in repetitions.items():
            of_it = [count for key, count in drawn.items() if key.startswith(name)]
            assert sum(of_it) == int(number * Fraction(str(repeats)) * SIZES[name])
            assert max(of_it) - min(of_it) <= 1
    (other,) = loaders_of(spec, 1, 0, state=loader.save_state_rank())
    assert [batch.__key__ for batch in other] == [batch.__key__ for batch in loader]


def test_validation_has_each_sample_once(data: Path) -> None:
    val = get_val_dataset(repeated(data, a=3, b=0.5), batch_size=1, worker_config=config_of(1, 0))
    (loader,) = loaders_of(val, 1, 0)
    assert len(val) == len(loader) == len(list(loader)) == 42
    assert len(Described(val)) == 42


def test_other_mixes_have_each_sample_once(data: Path) -> None:
    paths = [{"path": "./a"}, {"path": "./b"}]
    weighted = [entry | {"weight": 1 + 2 * number} for number, entry in enumerate(paths)]
    for mix in ({"concat": paths}, {"blend": weighted}):
        spec = opened(data, metadataset(data, train=mix))
        (loader,) = loaders_of(spec, 1, 0)
        assert len(spec) == len(loader) == 21
        for _ in islice(loader, 21):
            pass
        assert loader.metrics()["epochs"] == 1


def test_a_filter_and_bans_and_skipped_samples_count_as_before(data: Path) -> None:
    """What is drawn and left out is part of the epoch; what a filter leaves out is none of the data."""
    mix = metadataset(
        data,
        train={
            "blend_epochized": [
                {"path": "./a", "repetitions": 2, "subset": {"range": ["0%", "50%"]}},
                {"path": "./b", "repetitions": 0.5},
            ]
        },
    )
    spec = opened(data, mix, task_encoder=SkippingEncoder())
    (loader,) = loaders_of(spec, 1, 0)
    assert len(loader) == (2 * 6 + 15) // 2
    loader.ban(["00001"], dataset=f"{data}/b")
    for _ in islice(loader, 40):
        pass
    found = loader.metrics()
    assert found["skipped"] > 10
    assert found["banned"] > 0
    assert found["draws"] == found["samples"] + found["skipped"] + found["banned"]
    assert found["epochs"] == found["draws"] / 27


def test_a_run_that_goes_on_elsewhere_counts_the_epochs_of_the_run(data: Path) -> None:
    spec = opened(data, repeated(data, a=3, b=1))
    loaders = loaders_of(spec, 2, 0)
    for loader in loaders:
        for _ in islice(loader, 33):
            pass
    states = [loader.save_state_rank() for loader in loaders]
    for ranks in (1, 2, 4):
        for loader in loaders_of(spec, ranks, 0, state=states):
            assert loader.metrics()["epochs"] == pytest.approx(2, rel=0.05)
    (alone,) = loaders_of(spec, 1, 0, state=states)
    assert alone.metrics()["epochs"] == 33 * 2 * 2 / 66


def test_a_report_and_the_trainer_of_transformers_count_the_same_epochs(data: Path, tmp_path: Path) -> None:
    spec = opened(data, repeated(data, a=3, b=1))
    loader = EnergonDataloader(InProcessLoader(spec))
    for _ in range(99):
        next(loader)
    found = summary(RunRecorder(), loader)
    assert found is not None
    write_report(tmp_path / "report.html", [found], RunRecorder())
    assert '["epochs drawn","3.00"]' in (tmp_path / "report.html").read_text()
    assert len(Described(spec)) == 66
    loader.close()


def test_the_drop_in_rounds_each_dataset(data: Path) -> None:
    spec = opened(data, repeated(data, a=1.2, c=0.75), batch_size=1).with_settings(conventions=EnergonConventions())
    assert len(spec) == len(get_savable_loader(spec)) == 14 + 7
    assert len(spec.with_settings(conventions=Conventions())) == int(14.4 + 7.5)

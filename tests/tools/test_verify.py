"""`verify_resume` passes good pipelines and names what is wrong with bad ones."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import ENCODERS, NEEDED, TensorEncoder, config_of, text_dataset
from made import made_once

from energon_bridge import (
    DefaultTaskEncoder,
    EnergonDataloader,
    SavableDataLoader,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    verify_resume,
)
from energon_bridge.core.errors import ConfigurationError, ResumeMismatchError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.tools.verify import differing, fields_of

data = made_once(text_dataset, train=[5, 9, 1, 14, 8], val=[9, 8])


def maker(data: Path, encoder: Callable[[], Any], num_workers: int = 0, **kwargs: Any) -> Callable[..., Any]:
    """Return what builds a loader; it takes a worker configuration or none."""

    def make(config: WorkerConfig | None = None) -> SavableDataLoader:
        settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 5, "max_samples_per_sequence": 4}
        return get_savable_loader(
            get_train_dataset(
                data,
                worker_config=config or config_of(1, num_workers),
                task_encoder=encoder(),
                parallel_shard_iters=3,
                **(settings | kwargs),
            )
        )

    return make


@pytest.mark.parametrize("encoder", ["packing", "grouping", "several"])
def test_a_good_encoder_passes(data: Path, encoder: str, caplog: pytest.LogCaptureFixture) -> None:
    report = verify_resume(maker(data, ENCODERS[encoder], **NEEDED.get(encoder, {})), 12)
    assert (report.steps, report.save_points, report.restored_samples) == (12, (1, 6, 11), 3)
    # From each point p to the end, from p to the middle of the rest, and from there to the end.
    assert report.compared == 2 * ((12 - 1) + (12 - 6) + (12 - 11))
    assert report.resumes == 3 + 3 + 2
    assert {"__key__", "__restore_key__", "__valid__", "text"} <= set(report.fields)
    assert report.not_compared == {}
    assert 0 < report.state_bytes < 5000
    assert not [record for record in caplog.records if record.name.startswith("energon_bridge.tools.verify")]


def test_images_pass(tmp_path: Path) -> None:
    path = create_captioning_test_dataset(tmp_path / "images", num_train=11, num_val=0, image_size=4)
    for decode in ("pil",):
        report = verify_resume(maker(path, DefaultTaskEncoder, image_decode=decode), 6, save_points=[0, 3])
        assert (report.save_points, report.not_compared) == ((0, 3), {})


@pytest.mark.parametrize("wrap", [lambda loader: loader, EnergonDataloader])
def test_validation_passes_to_its_end(data: Path, wrap: Callable[..., Any]) -> None:
    def make() -> Any:
        dataset = get_val_dataset(data, batch_size=2, worker_config=config_of(1, 0), task_encoder=TensorEncoder())
        return wrap(get_savable_loader(dataset))

    report = verify_resume(make)
    assert (report.steps, report.save_points) == (9, (1, 4, 8))  # 17 samples


@pytest.mark.parametrize(
    ("settings", "wrap", "steps"),
    [({"repeat": False}, EnergonDataloader, 19), ({"virtual_epoch_length": 7}, lambda loader: loader, 7)],
)
def test_training_that_ends_passes(data: Path, settings: dict[str, Any], wrap: Callable[..., Any], steps: int) -> None:
    make = maker(data, TensorEncoder, **settings)
    assert verify_resume(lambda: wrap(make()), 30).steps == steps


def test_one_of_several_ranks_passes_with_masked_microbatches(data: Path) -> None:
    make = maker(data, TensorEncoder)
    for rank in (1, 3):
        assert verify_resume(lambda rank=rank: make(config_of(5, 0, rank)), 12).compared > 12


def test_states_resume_on_other_ranks_and_workers(data: Path) -> None:
    config = config_of(1, 0, seed=3)
    report = verify_resume(maker(data, TensorEncoder), 14, worker_config=config, topologies=[(5, 0), (3, 1)])
    assert report.resumes == (3 + 3 + 2) + 3 * (5 + 3)
    alone = verify_resume(maker(data, TensorEncoder), 14, worker_config=config)
    assert report.compared == alone.compared + 2 * (13 + 7 + 1)


class Extra(TensorEncoder):
    """Adds a field to each sample: a function of its key and of how many samples the encoder has seen."""

    def __init__(self, value: Callable[[str, int], Any]) -> None:
        super().__init__()
        self.value, self.count = value, 0

    def encode_sample(self, sample: Any) -> Any:
        self.count += 1
        encoded = super().encode_sample(sample)
        fields = {name: encoded[name] for name in ("__key__", "__restore_key__", "text", "number", "noise")}
        return fields | {"extra": self.value(sample.__key__, self.count)}


BEFORE, OUTSIDE = "depends on what was encoded before", "randomness outside the global generators"
CHANGING: dict[str, tuple[Callable[[str, int], Any], str]] = {
    "a hidden counter": (lambda key, count: count, BEFORE),
    "randomness of the system": (lambda key, count: os.urandom(4), OUTSIDE),
    "a generator of its own": (lambda key, count: np.random.default_rng().random(2), OUTSIDE),
    "the clock": (lambda key, count: time.perf_counter_ns(), "or the time"),
    "the sign of a zero": (lambda key, count: torch.tensor([-0.0 if count > 3 else 0.0]), BEFORE),
    "something deep inside": (lambda key, count: [key, {"a": (1, frozenset({"x", str(count // 5)}))}], BEFORE),
}


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 0) for name in CHANGING), ("a hidden counter", 2)])
def test_a_field_that_changes_is_named(data: Path, name: str, num_workers: int) -> None:
    value, cause = CHANGING[name]
    with pytest.raises(ResumeMismatchError, match=cause) as raised:
        verify_resume(maker(data, lambda: Extra(value), num_workers=num_workers), 8)
    text = str(raised.value)
    assert "differs in 'extra':\n" in text, "this field and no other"
    assert text.startswith("verify_resume: after a resume at microbatch 1, microbatch ")
    assert "(samples ['000" in text
    assert multiprocessing.active_children() == []


class SkipsByCount(TensorEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def encode_sample(self, sample: Any) -> Any:
        self.count += 1
        if self.count % 3 == 0:
            raise SkipSample
        return super().encode_sample(sample)


def test_other_samples_are_named(data: Path) -> None:
    with pytest.raises(ResumeMismatchError, match="other samples came: a hook skips") as raised:
        verify_resume(maker(data, SkipsByCount), 8)
    assert "'__key__'" in str(raised.value)


def test_a_field_that_changes_only_after_a_second_resume_is_caught(data: Path) -> None:
    made = []
    make = maker(data, lambda: Extra(lambda key, count: int(len(made) >= 3)))

    def counting() -> Any:
        made.append(1)
        return make()

    with pytest.raises(
        ResumeMismatchError, match=r"after two resumes at microbatch 1, with nothing delivered.*'extra'"
    ):
        verify_resume(counting, 8)


def test_a_microbatch_that_cannot_be_made_again_is_caught(data: Path) -> None:
    """Right in every stream, wrong in `restore_sample` alone."""
    loader = maker(data, TensorEncoder)

    class Wrong(SavableDataLoader):
        def restore_sample(self, restore_key: Any) -> Any:
            batch = super().restore_sample(restore_key)
            batch.number = batch.number + 1
            return batch

    def make() -> Any:
        made = loader()
        return Wrong(made.spec, worker_config=made.config)

    with pytest.raises(ResumeMismatchError, match=r"after restore_sample, microbatch 0 .* differs in 'number'"):
        verify_resume(make, 6)


def test_a_state_with_objects_in_it_is_caught(data: Path) -> None:
    class Foreign(SavableDataLoader):
        def save_state_rank(self) -> Any:
            return {**super().save_state_rank(), "more": random.Random(0)}

    made = maker(data, DefaultTaskEncoder)

    def make() -> Any:
        loader = made()
        return Foreign(loader.spec, worker_config=loader.config)

    with pytest.raises(ResumeMismatchError, match=r"state after microbatch 1 does not survive JSON.*Random"):
        verify_resume(make, 6)


class Opaque:
    """Has no bytes to compare."""


def test_what_cannot_be_compared_is_named(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = verify_resume(maker(data, lambda: Extra(lambda key, count: [key, Opaque()])), 6)
    assert report.not_compared == {"extra": ("test_verify.Opaque",)}
    assert [r.getMessage() for r in caplog.records if r.name == "energon_bridge.tools.verify"] == [
        "verify_resume: cannot compare extra (test_verify.Opaque), which have no bytes of their own"
    ]


@dataclass
class Point:
    x: Any
    y: Any = None


VALUES: list[Any] = [
    None, True, 1, 1.0, -0.0, 0.0, float("inf"), 1j, "a", b"a", "", [], (), {}, set(), {"a"}, {"a": 1}, {"a": [1]},
    {"b": 1, "a": 1}, {"a": 1, "b": 1}, [1], (1,), [[1]], [1, 2], ["a", "b"], ["ab"], [None], Point(1), Point(1, 2),
    Point([1]), [Point(1)], {"p": Point(1)}, np.float32(1), np.float64(1), np.arange(3), np.arange(3.0),
    np.arange(4).reshape(2, 2), np.arange(4), np.array(["a"], dtype=object), np.array(["b"], dtype=object),
    torch.tensor(1.0), torch.tensor([1.0]), torch.tensor([-0.0]), torch.tensor([0.0]), torch.tensor([1]),
    torch.arange(4), torch.arange(4).reshape(2, 2), torch.arange(4).reshape(2, 2).T, torch.ones(2).bfloat16(),
    torch.ones(2).half(), torch.tensor([float("nan")]), torch.ones(2, dtype=torch.complex64), torch.tensor([]),
    torch.ones(2, dtype=torch.complex64).conj() * 1j, torch.float32, Path("a"),
]  # fmt: skip


def test_every_difference_is_seen() -> None:
    digests = [fields_of({"v": value}) for value in VALUES]
    for i, first in enumerate(digests):
        again = fields_of({"v": VALUES[i]})
        assert differing(first, again) == [], VALUES[i]
        assert not any(field.opaque for field in first.values()), VALUES[i]
        for j, second in enumerate(digests):
            assert i == j or differing(first, second), (VALUES[i], VALUES[j])


def test_paths_name_the_innermost_entry() -> None:
    first = {"a": {"b": Point(1, {"c": torch.ones(1)})}, "d": [1, {"e": 1}]}
    second = {"a": {"b": Point(1, {"c": torch.zeros(1)})}, "d": [1, {"e": 2}], "f": 1}
    assert differing(fields_of(first), fields_of(second)) == ["the batch", "a.b.y.c", "d", "f"]
    assert differing(fields_of(Point(1)), fields_of({"x": 1, "y": None})) == ["the batch"]
    assert differing(fields_of(torch.ones(1)), fields_of(torch.zeros(1))) == ["the batch"]
    point = replace(Point(1))
    point.__valid__ = True  # what the engine attaches to a foreign type
    assert differing(fields_of(Point(1)), fields_of(point)) == ["the batch", "__valid__"]


@pytest.mark.parametrize("value", [Opaque(), len, torch.ones(2).to_sparse(), iter([])])
def test_opaque_values_are_seen_as_such(value: Any) -> None:
    inside = np.empty(1, dtype=object)
    inside[0] = value
    for holder in (value, [value], {"in": (value,)}, inside):
        assert any(field.opaque for field in fields_of({"v": holder}).values())


def test_arguments_that_do_not_fit_are_refused(data: Path) -> None:
    make = maker(data, TensorEncoder)
    loader = make()
    for call, complaint in {
        lambda: verify_resume(make, 1): "steps must be at least 2",
        lambda: verify_resume(make, 5, save_points=[5]): r"save_points must lie in range\(5\)",
        lambda: verify_resume(make, 5, save_points=[]): "save_points must lie",
        lambda: verify_resume(make, 5, topologies=[(2, 0)]): "topologies need the worker_config of one rank",
        lambda: verify_resume(lambda: loader, 5): "returned the same loader again",
        lambda: verify_resume(lambda: EnergonDataloader([1, 2]), 5): "must return a loader from get_savable_loader",
    }.items():
        with pytest.raises(ConfigurationError, match=complaint):
            call()

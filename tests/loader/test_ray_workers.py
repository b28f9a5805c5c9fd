"""Workers that are actors on a Ray cluster: the stream, the states and the errors of worker processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import Numbers, TensorEncoder, config_of, deliver, digest, loaders_of, text_dataset, train_dataset
from ray_cluster import ray_cluster
from workers import loader_of

from energon_bridge import ErrorPolicy, WorkerConfig, get_savable_loader, get_val_dataset
from energon_bridge.errors import ConfigurationError, LoaderError

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

SHARDS = [5, 9, 1, 14, 8]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_dataset(tmp_path_factory.mktemp("ray"), train=SHARDS, val=SHARDS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(1, 2) as nodes:
        yield nodes


@pytest.fixture
def actors(cluster: Any) -> dict[str, Any]:
    """Return the settings of workers that are actors."""
    options = {"address": cluster.address, "num_cpus": 0.5, "placement_timeout_seconds": 200}
    return {"worker_engine": "ray", "ray_options": options}


def expected_of(data: Path, number: int, **kwargs: Any) -> list[str]:
    return deliver(loaders_of(train_dataset(data, **kwargs), 1, 0), number).digests


# The stream ----------------------------------------------------------------------------------------------------------


def test_actors_make_the_stream_of_processes_and_states_go_from_one_to_the_other(
    data: Path, actors: dict[str, Any]
) -> None:
    expected, found, state = expected_of(data, 60), [], None
    for settings in ({"num_workers": 2} | actors, {"num_workers": 0}, {"num_workers": 3} | actors, {"num_workers": 2}):
        with closing(loader_of(data, **settings)) as loader:
            if state is not None:
                loader.restore_state_rank(state)
            found += [digest(batch) for batch in islice(loader, 15)]
            state = loader.save_state_rank()
            if "worker_engine" in settings:
                assert loader.metrics()["worker_actors"] == settings["num_workers"]
    assert found == expected


def test_passes_begin_again_on_the_same_actors(data: Path, actors: dict[str, Any]) -> None:
    dataset = get_val_dataset(data, batch_size=2, task_encoder=TensorEncoder())
    expected = [digest(batch) for batch in get_savable_loader(dataset, worker_config=config_of(1, 0))]
    with closing(get_savable_loader(dataset, worker_config=config_of(1, 2, **actors))) as loader:
        for stop in (7, 100, 3, 100):
            assert [digest(batch) for batch in islice(loader, stop)] == expected[:stop]
        assert loader.metrics()["worker_restarts"] == 0


class LargeEncoder(TensorEncoder):
    """Samples of a megabyte, whose batches cross in blocks of their own."""

    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.__key__)
        noise = torch.full((4, 1 << 16), float(number))
        return Numbers.derive_from(sample, text=sample.text, number=torch.tensor([number]), noise=noise)


def test_large_batches_may_be_written_into_and_leave_the_object_store(
    data: Path, actors: dict[str, Any], cluster: Any
) -> None:
    with (
        closing(loader_of(data, 2, LargeEncoder(), **actors)) as loader,
        closing(loader_of(data, 0, LargeEncoder())) as other,
    ):
        kept = []
        for batch, same in zip(islice(loader, 250), other, strict=False):  # 2 MB each: more than the object store has
            assert digest(batch) == digest(same)
            batch.noise += 1
            kept = [*kept[-3:], (batch, same)]
        for batch, same in kept:  # nobody else writes where they are
            assert torch.equal(batch.noise, same.noise + 1)


def test_a_closure_goes_along(data: Path, actors: dict[str, Any]) -> None:
    factor = 3.0

    class Here(TensorEncoder):
        def encode_sample(self, sample: Any) -> Any:
            encoded = super().encode_sample(sample)
            encoded.noise *= factor
            return encoded

    with closing(loader_of(data, 2, Here(), **actors)) as loader:
        assert [digest(batch) for batch in islice(loader, 10)] == expected_of(data, 10, task_encoder=Here())


def test_an_error_is_raised_here_with_its_traceback_there(data: Path, actors: dict[str, Any]) -> None:
    class Failing(TensorEncoder):
        def encode_sample(self, sample: Any) -> Any:
            raise KeyError("of this sample")

    dataset = train_dataset(data, task_encoder=Failing(), error_policy=ErrorPolicy(on_error="raise"))
    with (
        closing(get_savable_loader(dataset, worker_config=config_of(1, 2, **actors))) as loader,
        pytest.raises(Exception, match="of this sample"),
    ):
        next(iter(loader))


# Settings ------------------------------------------------------------------------------------------------------------


def test_the_environment_chooses_what_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerConfig().worker_engine == "process"
    monkeypatch.setenv("ENERGON_WORKER_ENGINE", "ray")
    assert WorkerConfig().worker_engine == "ray"
    assert WorkerConfig(worker_engine="process").worker_engine == "process"
    monkeypatch.setenv("ENERGON_WORKER_ENGINE", "dask")
    with pytest.raises(ConfigurationError, match=r"ENERGON_WORKER_ENGINE must be 'process' or 'ray', got 'dask'"):
        WorkerConfig()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adress": "auto"}, "there is no option 'adress' Did you mean 'address'"),
        ({"strategy": "wide"}, "strategy must be one of pack, spread, got 'wide'"),
        ({"silence_seconds": 0}, "silence_seconds must be a number of seconds above 0, got 0"),
        ({"address": "127.0.0.1:1"}, "no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_options_are_checked(data: Path, options: dict[str, Any], said: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigurationError, match=said):
        next(iter(loader_of(data, 1, worker_engine="ray", ray_options=options)))


def test_without_ray_the_extra_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'energon-bridge\[ray\]'"):
        loader_of(data, 1, worker_engine="ray")


def test_what_cannot_be_sent_is_named(data: Path, actors: dict[str, Any]) -> None:
    encoder = TensorEncoder()
    encoder.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(LoaderError, match=r"cannot start by ray, because pickle refuses task_encoder\.lock"):
        next(iter(loader_of(data, 1, encoder, **actors)))


def test_code_that_the_nodes_lack_is_named_with_the_remedy(
    data: Path, actors: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("from engine import TensorEncoder\nclass Mine(TensorEncoder): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    (tmp_path / "only_here.py").unlink()
    with pytest.raises(LoaderError, match=r"No module named 'only_here'(?s:.)*runtime_env=\{'working_dir'"):
        next(iter(loader_of(data, 1, only_here.Mine(), **actors)))

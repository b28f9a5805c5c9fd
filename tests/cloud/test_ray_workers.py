"""Workers that are actors on a Ray cluster: the stream, the states and the errors of worker processes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from engine import Numbers, TensorEncoder, config_of, digest, text_dataset, train_dataset
from left_behind import descendants
from made import made_once
from object_server import serving
from ray_cluster import STORE_BYTES, actor_processes, ray_cluster
from workers import expected_of, loader_of, wait_until

from energon_bridge import ErrorPolicy, WorkerConfig, get_savable_loader, get_val_dataset
from energon_bridge.cloud.ray import ray_engine
from energon_bridge.cloud.ray.ray_actor import versions
from energon_bridge.cloud.ray.ray_engine import ActorProcess, RayEngine
from energon_bridge.cloud.ray.ray_relay import Relay
from energon_bridge.core.errors import ConfigurationError, LoaderError
from energon_bridge.tools.check.engines import RayShardEngine
from energon_bridge.tools.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
SHARDS = [5, 9, 1, 14, 8]
data = made_once(text_dataset, train=SHARDS, val=SHARDS)


@pytest.fixture(autouse=True)
def nothing_for_other_tests() -> Iterator[None]:
    """Sockets of Ray's that a test has left are collected here, and not in a test of another file."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(name, numbered=False) for name in "xy"]


@pytest.fixture(scope="module")
def cluster(caches: list[Path]) -> Iterator[Any]:
    """Run a cluster of two nodes, which have caches apart."""
    variables = [{"ENERGON_CACHE_DIR": str(folder), "ENERGON_CACHE_BYTES": "1000000000"} for folder in caches]
    own = [
        {"node_name": folder.name, "env_vars": os.environ | one} for folder, one in zip(caches, variables, strict=True)
    ]
    with ray_cluster(1, 2, own=own) as nodes:
        yield nodes
        ray_engine._end_relays()


@pytest.fixture
def actors(cluster: Any) -> dict[str, Any]:
    """Return the settings of workers that are actors, and reached by a connection as if they were elsewhere."""
    options = {"address": cluster.address, "num_cpus": 0.5, "placement_timeout_seconds": 200, "shared_memory": False}
    return {"worker_engine": "ray", "ray_options": options}


# The stream ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [True, False])  # the second one's relay serves the tests after it, too
def test_actors_make_the_stream_of_processes_and_states_go_from_one_to_the_other(
    data: Path, actors: dict[str, Any], shared_memory: bool
) -> None:
    actors["ray_options"] |= {"shared_memory": shared_memory}
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


def test_tasks_of_slurm_have_actors_of_their_own(data: Path, actors: dict[str, Any]) -> None:
    ranks = pytest.importorskip("energon_bridge.training.megatron.ranks", reason="megatron-core is not installed")
    with contextlib.ExitStack() as stack:
        loaders = []
        for task in range(2):
            rank, world_size = ranks.launched_rank({"SLURM_PROCID": f"{task}", "SLURM_NTASKS": "2"})
            config = config_of(world_size, 1, rank, **actors)
            loader = get_savable_loader(train_dataset(data), worker_config=config)
            loaders.append(stack.enter_context(closing(loader)))
        found = [digest(next(iter(loader))) for _ in range(15) for loader in loaders]
        assert [loader.metrics()["worker_actors"] for loader in loaders] == [1, 1]
    assert found == expected_of(data, 30)


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


# Faults --------------------------------------------------------------------------------------------------------------


def test_errors_are_raised_here_and_a_deadly_sample_is_left_out(data: Path, actors: dict[str, Any]) -> None:
    class Poisonous(TensorEncoder):
        def __init__(self, ends: bool) -> None:
            super().__init__()
            self.ends = ends

        def encode_sample(self, sample: Any) -> Any:
            if sample.__key__ == "00003":
                if self.ends:
                    os._exit(7)
                raise ValueError("poisonous")
            return super().encode_sample(sample)

    strict = train_dataset(data, task_encoder=Poisonous(ends=False), error_policy=ErrorPolicy(on_error="raise"))
    with (
        closing(get_savable_loader(strict, worker_config=config_of(1, 2, **actors))) as loader,
        pytest.raises(Exception, match="poisonous"),
    ):
        list(islice(loader, 40))
    with closing(loader_of(data, 2, Poisonous(ends=True), **actors)) as loader:
        found = [digest(batch) for batch in islice(loader, 40)]
        assert loader.metrics()["errors"] >= 1
    assert found == expected_of(data, 40, task_encoder=Poisonous(ends=False))


class SlowOnce(TensorEncoder):
    """Takes its time in the first process that comes to a sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "00003":
            with contextlib.suppress(FileExistsError):
                (self.folder / "was here").mkdir()
                time.sleep(1000)
        return super().encode_sample(sample)


class StoppedOnce(SlowOnce):
    """Stops the first worker before it has begun, too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return stopped_once, (self.folder,)


def stopped_once(folder: Path) -> StoppedOnce:
    os.register_at_fork(after_in_child=lambda: _stop_once(folder))
    return StoppedOnce(folder)


def _stop_once(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / "was stopped").mkdir()
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    "shared_memory", [False, pytest.param(True, marks=pytest.mark.skipif(not LONG, reason="starts a relay"))]
)
def test_a_hang_is_named_and_replaced_by_the_watchdog(
    data: Path, actors: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, shared_memory: bool
) -> None:
    actors["ray_options"] |= {"shared_memory": shared_memory}
    dataset = train_dataset(data, task_encoder=StoppedOnce(tmp_path))
    config = config_of(1, 2, **actors)
    watched = {"watchdog_timeout_seconds": 1.5, "on_hang": "replace"}
    with closing(get_savable_loader(dataset, worker_config=config, **watched)) as loader:  # type: ignore[arg-type]
        found = [digest(batch) for batch in islice(loader, 60)]
        assert loader.metrics()["worker_restarts"] >= 2
    assert re.search(r"rank 0, worker \d, unit \d+: a microbatch has been in the making for", caplog.text)
    assert f"encode_sample of {data}" in caplog.text
    assert "test_ray_workers.py" in caplog.text  # where its thread is
    assert found == expected_of(data, 60)


def test_what_cannot_be_sent_or_is_missing_there_is_named(
    data: Path, actors: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("from engine import TensorEncoder\nclass Mine(TensorEncoder): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    (tmp_path / "only_here.py").unlink()
    encoder = TensorEncoder()
    encoder.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(LoaderError, match=r"cannot start by ray, because pickle refuses task_encoder\.lock"):
        next(iter(loader_of(data, 1, encoder, **actors)))
    with pytest.raises(LoaderError, match=r"No module named 'only_here'(?s:.)*runtime_env=\{'working_dir'"):
        next(iter(loader_of(data, 1, only_here.Mine(), **actors)))


def running() -> dict[int, list[int]]:
    """Return the actors that run, and their workers: one that was stopped before may not have been ended yet."""
    actors = actor_processes()
    return {pid: actors[pid] for pid in actors if ") T " not in Path(f"/proc/{pid}/stat").read_text()}


def kill_a_worker() -> None:
    os.kill(random.choice([pid for pids in running().values() for pid in pids]), signal.SIGKILL)


def kill_an_actor() -> None:
    os.kill(random.choice([*running()]), signal.SIGKILL)


def stop_an_actor() -> None:
    os.kill(random.choice([*running()]), signal.SIGSTOP)


FAULTS = {
    kill_a_worker: r"worker \d \(killed by signal 9 on .*\) died",
    kill_an_actor: r"worker \d \(its actor was lost on [^:]*: (?!it did not answer).*\) died",
    stop_an_actor: r"worker \d \(its actor was lost on .*: it did not answer for \d+ s\) died",
}


def test_what_dies_or_stalls_is_replaced_from_what_was_delivered(
    data: Path, actors: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rounds = 30 if LONG else 1
    actors["ray_options"] |= {"silence_seconds": 2.0}
    with closing(loader_of(data, 2, **actors)) as loader:
        found = [digest(next(iter(loader))) for _ in range(4)]
        for number, fault in enumerate([*FAULTS] * rounds, 1):
            fault()
            while loader.metrics()["worker_restarts"] < number:
                found.append(digest(next(iter(loader))))
            while loader.metrics()["local_workers"] or loader._delivery.pool._rivals:  # until there is an actor again
                found.append(digest(next(iter(loader))))
                time.sleep(0.05)
        assert loader.metrics()["worker_restarts"] == len(FAULTS) * rounds
        assert {fault: len(re.findall(said, caplog.text)) for fault, said in FAULTS.items()} == dict.fromkeys(
            FAULTS, rounds
        )
    assert found == expected_of(data, len(found))


@pytest.mark.parametrize(
    ("cores", "workers"), [(1.5, 1), pytest.param(1, 3, marks=pytest.mark.skipif(not LONG, reason="waits 20 s"))]
)
def test_the_only_node_with_room_is_used_again(data: Path, actors: dict[str, Any], cores: float, workers: int) -> None:
    """The node of an actor that was lost is avoided, but not for long if the other is too small, or full."""
    actors["ray_options"] |= {"num_cpus": cores}
    with closing(loader_of(data, workers, **actors)) as loader:
        found = [digest(next(iter(loader))) for _ in range(4)]
        kill_an_actor()
        since = time.monotonic()
        while not loader.metrics()["worker_restarts"] or loader.metrics()["local_workers"]:
            found.append(digest(next(iter(loader))))
            assert time.monotonic() - since < 50  # it is avoided for 60 s
            time.sleep(0.05)
    assert found == expected_of(data, len(found))


def test_a_slow_worker_gets_a_rival_and_the_first_answer_wins(
    data: Path, actors: dict[str, Any], tmp_path: Path
) -> None:
    actors["ray_options"] |= {"hedge_after_seconds": 1.0}
    with contextlib.ExitStack() as stack:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
        for _ in range(1100):  # a trainer of many files: more descriptors than `select` takes
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        loader = stack.enter_context(closing(loader_of(data, 2, SlowOnce(tmp_path), **actors)))
        found = [digest(batch) for batch in islice(loader, 60)]
        assert (tmp_path / "was here").exists()
        assert loader.metrics()["worker_hedges"] >= 1
        assert loader.metrics()["worker_restarts"] == 0
    assert found == expected_of(data, 60)


def test_what_the_cluster_cannot_place_runs_beside_the_trainer(
    data: Path, actors: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    actors["ray_options"] |= {"resources": {"nowhere": 1}, "placement_timeout_seconds": 1}
    with closing(loader_of(data, 2, **actors)) as loader:
        assert [digest(batch) for batch in islice(loader, 20)] == expected_of(data, 20)
        counted = loader.metrics()
        assert (counted["worker_actors"], counted["local_workers"]) == (0, 2)
    assert re.search(r"no place for 2 of 2 workers \(0, 1\) within 1 s: .*processes beside the trainer", caplog.text)
    assert "No node is as large as they ask for" in caplog.text


@pytest.mark.parametrize(
    ("total", "free", "why"),
    [
        ([2.0, 1.0], {"CPU": 0.5}, "none"),
        ([4.0], {"CPU": 1.5}, "full"),
        ([4.0], {}, "full"),
        ([4.0, 2.0], {"CPU": 3.0}, "slow"),
    ],
)
def test_a_full_cluster_is_told_from_a_slow_one(total: list[float], free: dict[str, float], why: str) -> None:
    relay = object.__new__(Relay)
    relay._options = {"num_cpus": 3 if why != "slow" else 2, "memory": None, "resources": None}
    relay._bad = {}
    nodes = [{"Alive": True, "NodeID": str(n), "Resources": {"CPU": cpus}} for n, cpus in enumerate(total)]
    relay._ray = SimpleNamespace(nodes=lambda: nodes, available_resources=lambda: free)
    assert relay._why_unplaced() == why


@pytest.mark.skipif(not LONG, reason="waits for clusters: set ENERGON_LONG_TESTS=1")
def test_nodes_and_the_head_may_go_and_nodes_may_come(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ray_cluster(0, 2, 2) as cluster:
        options = {"address": cluster.address, "placement_timeout_seconds": 200, "strategy": "spread"}
        loaders = [
            loader_of(data, 2, worker_engine="ray", ray_options=options | {"on_cluster_loss": loss})
            for loss in ("local", "raise")
        ]
        found = [[digest(next(iter(loader))) for _ in range(10)] for loader in loaders]
        longest = 0.0

        def until(met: Callable[[float], bool]) -> None:
            """Deliver until so many workers are beside the trainer, by both loaders together."""
            nonlocal longest
            deadline = time.monotonic() + 120
            while not met(sum(loader.metrics()["local_workers"] for loader in loaders)):
                for digests, loader in zip(found, loaders, strict=True):
                    since = time.monotonic()
                    digests.append(digest(next(iter(loader))))
                    longest = max(longest, time.monotonic() - since)
                assert time.monotonic() < deadline
                time.sleep(0.05)

        cluster.remove_node(min(cluster.worker_nodes, key=str), allow_graceful=False)
        until(lambda local: local == 2)
        assert re.search(r"no place for . of 2 workers \(.*\) within 2 s, .* until they run there", caplog.text)
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        until(lambda local: local == 0)
        assert longest < 15  # 2 s for a place, and the time in which Ray sees that a node has gone
        assert sum(loader.metrics().get("worker_moves", 0) for loader in loaders) >= 2
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        while loaders[0].metrics()["local_workers"] < 2:  # what was made before the loss comes first
            assert len(found[0]) < 5000
            found[0].append(digest(next(iter(loaders[0]))))
            time.sleep(0.05)
        found[0] += [digest(next(iter(loaders[0]))) for _ in range(30)]
        assert found[0] == expected_of(data, len(found[0]))
        with pytest.raises(LoaderError, match=r"the Ray cluster is lost.*Nothing delivered is lost.*save_state_rank"):
            found[1].extend(digest(batch) for batch in islice(loaders[1], 2000) if not time.sleep(0.05))  # type: ignore[func-returns-value]
        state = loaders[1].save_state_rank()
        for loader in loaders:
            loader.close()
        with closing(loader_of(data, 1)) as loader:
            loader.restore_state_rank(state)
            found[1] += [digest(next(iter(loader))) for _ in range(10)]
        assert found[1] == expected_of(data, len(found[1]))


@pytest.mark.skipif(not LONG, reason="waits for clusters: set ENERGON_LONG_TESTS=1")
def test_actors_are_shared_and_their_number_follows_the_queues(data: Path, actors: dict[str, Any]) -> None:
    actors["ray_options"] |= {"min_actors": 1, "max_actors": 3, "scale_seconds": 0.5}
    found: list[str] = []
    with closing(loader_of(data, 4, **actors)) as loader:
        stream = iter(loader)

        def until(number: int, *, slow: bool) -> None:
            """Deliver until there are so many actors; slow training takes no batch before the queues are full."""
            deadline = time.monotonic() + 200
            while len(actor_processes()) != number:
                for _ in range(10 if slow else 500):
                    assert not slow or wait_until(
                        lambda: loader.metrics()["ready"] == 4 or loader._delivery.pool._rivals, 60
                    )
                    found.append(digest(next(stream)))
                assert time.monotonic() < deadline

        found += [digest(next(stream)) for _ in range(10)]
        assert [len(workers) for workers in actor_processes().values()] == [4]
        until(3, slow=False)
        until(1, slow=True)
        assert loader.metrics()["worker_moves"] >= 4
        assert loader.metrics()["worker_restarts"] == 0
        assert loader.metrics()["local_workers"] == 0
    assert found == expected_of(data, len(found))


def test_nothing_is_left_behind_and_who_comes_as_a_relay_ends_gets_a_new_one(
    data: Path, actors: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first relay leaves Ray, once it has killed its actors, only when the second loader has its batch."""
    actors["ray_options"] |= {"idle_seconds": 0.5}
    late = f"any(os.path.exists({str(tmp_path / 'go')!r}) or time.sleep(0.1) for _ in range(300))"
    slow = f"import os, ray, time; end = ray.shutdown; ray.shutdown = lambda: ({late}, end()); "
    monkeypatch.setattr(ray_engine, "_SERVE", ray_engine._SERVE.replace("main(int", f"{slow}main(int"))
    before = set(descendants())

    def running(name: str) -> bool:
        return any(name in line for pid, line in descendants().items() if pid not in before)

    for workers in (2, 1):
        with closing(loader_of(data, workers, **actors)) as loader:
            next(iter(loader))
            assert running("WorkerActor")
            counted = loader.metrics()
        assert (counted["worker_restarts"], counted["worker_actors"]) == (0, workers)
        del loader
        assert wait_until(lambda: not running("WorkerActor"), 20)
    (tmp_path / "go").touch()
    assert wait_until(lambda: not running("ray_relay"), 20)


def test_lanes_find_what_they_read_in_the_caches_of_their_nodes(
    tmp_path: Path, actors: dict[str, Any], cluster: Any, caches: list[Path]
) -> None:
    """Shards of one sample are blocks of the cache, which each node has apart."""

    def free() -> bool:  # else Ray puts actors where it knows of room
        return cluster.global_state.available_resources()["CPU"] == 3

    text_dataset(tmp_path / "served" / "data", train=[1] * 60)
    actors["ray_options"] |= {"strategy": "cache", "idle_seconds": 0.5, "num_cpus": 0.2}
    with serving(tmp_path / "served") as server:
        dataset = train_dataset(f"{server.url}/data")  # type: ignore[arg-type]
        counted = []
        for _ in range(2):
            assert wait_until(lambda: free() and not actor_processes(), 30)
            with closing(get_savable_loader(dataset, worker_config=config_of(1, 2, **actors))) as loader:
                assert len([*islice(loader, 8)]) == 8
                counted.append(loader.metrics())
    assert counted[0]["cache_misses"] >= 16
    assert counted[1].get("cache_misses", 0) == 0
    assert counted[1]["cache_hits"] >= 16
    blocks = [{file.name for file in folder.rglob("*.block")} for folder in caches]
    assert min(map(len, blocks)) > 0
    assert len(blocks[0] & blocks[1]) < len(blocks[0] | blocks[1]) / 2  # or any place would do


def test_bench_compares_with_the_cluster(data: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    arguments = ["bench", str(data), "--batch-size", "2", "--num-workers", "2", "--seconds", "1", "--engine", "ray"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"2 on Ray\W+[\d,]+", result.output)
    assert re.search(r"Cluster: 2 workers there make \d+\.\d\d of the samples of 2 processes here", result.output)


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
        ({"strategy": "wide"}, "strategy must be one of pack, spread, cache, got 'wide'"),
        ({"max_actors": 0}, "max_actors must be an integer above 0, got 0"),
        ({"min_actors": 3, "max_actors": 2}, r"min_actors \(3\) is more than max_actors \(2\)"),
        ({"silence_seconds": 0}, "silence_seconds must be a number of seconds above 0, got 0"),
        ({"address": "127.0.0.1:1"}, r"no Ray cluster at 127.0.0.1:1: .* set RAY_AUTH_MODE=token"),
    ],
)
def test_options_are_checked(data: Path, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    for name in ("reconnect", "connect"):  # of ten seconds and more, for a cluster that is not there
        monkeypatch.setenv(f"RAY_gcs_rpc_server_{name}_timeout_s", "1")
    with pytest.raises(ConfigurationError, match=said):
        next(iter(loader_of(data, 1, worker_engine="ray", ray_options=options)))


def test_commands_name_the_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def refused(**_: Any) -> None:
        raise ConnectionError("InvalidAuthToken")

    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigurationError, match=r"no Ray cluster at 10.0.0.1:6379: Inv.* set RAY_AUTH_MODE=token"):
        RayShardEngine()


def test_without_ray_the_extra_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'energon-bridge\[ray\]'"):
        loader_of(data, 1, worker_engine="ray")


def test_nodes_of_one_host_are_counted_each() -> None:
    engine = object.__new__(RayEngine)
    engine._processes, engine._starting = {}, []
    engine._said = engine._gone = False
    engine._config = SimpleNamespace(num_workers=3)  # type: ignore[assignment]
    engine._options = {"placement_timeout_seconds": 1.0}
    for number, node in enumerate(["a", "b", "b"]):
        facts = "vm", versions(), node
        relay = SimpleNamespace(answer=lambda *_, facts=facts: ("there", facts), is_alive=True)
        here, there = socket.socketpair()
        process = ActorProcess(relay, number, number, there, None, None)  # type: ignore[arg-type]
        engine._processes[number] = process
        engine._starting.append((process, here, lambda: None))
    engine.settle()
    for process in engine._processes.values():
        process._release()
    assert engine.metrics() == {"worker_actors": 3, "worker_nodes": 2, "local_workers": 0}

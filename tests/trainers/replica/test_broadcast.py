"""One rank of a replica loads and broadcasts: the same batches, states and errors everywhere, read once."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from made import made_once
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from replicas import digest, digests, module, on_ranks, place

from energon_bridge import (
    DefaultTaskEncoder,
    EnergonDataloader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    make_replica,
)
from energon_bridge.core.errors import (
    BroadcastError,
    ConfigurationError,
    DataParallelError,
    DatasetNotFoundError,
    EnergonError,
    UnknownArgumentError,
)
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.replica import StageKeys

STEPS = 6
dataset = made_once(create_captioning_test_dataset, num_train=48, num_val=7)


def bytes_read(loader: Any) -> int:
    return sum(row["bytes"] for row in loader.counters())


def as_file(state: Any) -> bytes:
    """Return what Megatron-LM writes; context-parallel ranks write one file at once, so only equal bytes do no harm."""
    stream = io.BytesIO()
    torch.save({"dataloader_state_dict": state}, stream)
    return stream.getvalue()


TOPOLOGIES = [(1, 2, 1, 2), (2, 2, 2, 1)]


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), TOPOLOGIES)
def test_a_replica_has_one_stream_and_replicas_share_the_data_out(
    tp: int, cp: int, pp: int, dp: int, dataset: Path
) -> None:
    def load(rank: int) -> Any:
        results = {}
        for replica_loading in ("every_rank", "one_rank"):
            data = module(dataset, replica_loading=replica_loading)
            train = data.train_dataloader()
            seen = digests(train, STEPS)
            val = data.val_dataloader()
            # Read on this rank, by a loader of its own, if it has one.
            own = getattr(train.loader, "_loader", train.loader)
            read = 0 if own is None else bytes_read(own)
            results[replica_loading] = seen, digests(iter(val), len(val)), as_file(train.save_state()), read
        return place()["dp"], results

    results = on_ranks(tp * cp * pp * dp, load, tp=tp, cp=cp, pp=pp)
    seen = {}
    for replica in range(dp):
        ranks = [result for of, result in results if of == replica]
        assert len(ranks) == tp * cp * pp
        # Both ways, on all ranks: training, validation and state are equal byte for byte.
        assert all(way[:3] == ranks[0]["every_rank"][:3] for result in ranks for way in result.values())
        one_loader = ranks[0]["every_rank"][3]
        assert one_loader > 0
        assert sum(result["one_rank"][3] for result in ranks) == one_loader
        seen[replica] = {key for keys, _ in ranks[0]["every_rank"][0] for key in keys.split(",")}
        assert len(seen[replica]) == 2 * STEPS
    assert dp == 1 or not seen[0] & seen[1]


def test_stages_get_what_they_need(dataset: Path) -> None:
    keys = StageKeys(first=["image"], last=["caption"])

    def load(rank: int) -> Any:
        train = module(dataset, replica_loading="one_rank", stage_keys=keys).train_dataloader()
        batches = [next(train) for _ in range(3)]
        got = {name for batch in batches for name in dict(batch) if batch[name] is not None}
        return place()["pp"], {name for name in got if not name.startswith("__")}, batches[0].__key__

    results = on_ranks(6, load, pp=3, tp=2)
    for stage, got, key in results:
        assert got == [{"image"}, set(), {"caption"}][stage]
        assert key == results[0][2]


@pytest.mark.parametrize("num_workers", [1])
def test_stages_of_a_pipeline_ask_one_after_the_other(num_workers: int, dataset: Path) -> None:
    """A stage asks for a microbatch when the stage before is through with it: the first one must not wait for it."""
    large = 2_000_000  # more than what sockets hold

    def train(rank: int) -> Any:
        encoder = Large(large)
        data = module(dataset, replica_loading="one_rank", num_workers=num_workers, task_encoder=encoder)
        train = data.train_dataloader()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        assert (place()["tp"], stage) == (rank % 2, rank // 2)
        activations = torch.zeros(1)
        seen = []
        for _ in range(5):
            if stage > 0:
                dist.recv(activations, rank - 2)
            seen += [(batch["__key__"], digest(batch)) for batch in [next(train)]]
            if stage < 2:
                dist.send(activations, rank + 2)
        data.close()
        return seen

    results = on_ranks(6, train, pp=3, tp=2)
    assert all(seen == results[0] for seen in results)


class Large(DefaultTaskEncoder):
    """Makes batches of a given number of bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def encode_batch(self, batch: Any) -> Any:
        number = int(batch.__key__[0].removeprefix("train-"))
        return {"__key__": batch.__key__, "x": torch.full((self.size,), number, dtype=torch.uint8)}


def test_saving_asks_nobody_and_restoring_tells_all(dataset: Path) -> None:
    def run(rank: int) -> Any:
        data = module(dataset, replica_loading="one_rank")
        train = data.train_dataloader()
        digests(train, 4)
        # As Megatron-LM does, on some ranks of the replica only.
        state = train.save_state() if parallel_state.get_tensor_model_parallel_rank() == 1 else None
        after = digests(train, 4)
        assert train.metrics()["samples"] == 16
        whole = train.state_dict()
        box = [state]
        dist.broadcast_object_list(box, group_src=1, group=parallel_state.get_tensor_model_parallel_group())
        train.restore_state(box[0])
        again = digests(train, 4)
        fresh = module(dataset, replica_loading="one_rank")
        fresh.load_state_dict({"global_step": 0, "train": whole})
        return after == again, whole, digests(fresh.train_dataloader(), 2) == digests(train, 2)

    results = on_ranks(4, run, tp=2)
    assert [result[0] for result in results] == [result[2] for result in results] == [True] * 4
    assert all(result[1] == results[0][1] for result in results)


def test_bans_reach_all_ranks_of_a_replica(dataset: Path) -> None:
    """Two replicas agree on the draw, all ranks know it at once, and what the source refuses is refused on all."""
    keys = [f"train-{number:05d}" for number in range(0, 48, 2)]

    def run(rank: int) -> Any:
        train = module(dataset, replica_loading="one_rank").train_dataloader()
        digests(train, 4)
        with pytest.raises(EnergonError, match="1 of 1 keys are not in"):
            train.ban(["nowhere"])
        first = train.ban(keys)
        return first, train.save_state()["bans"], [key for _ in range(8) for key in next(train)["__key__"]]

    results = on_ranks(4, run, tp=2)
    first = results[0][0]
    assert all(result[:2] == (first, [[first, sorted(keys)]]) for result in results)
    assert not any({*result[2]} & {*keys} for result in results)
    assert results[0][2] == results[1][2] != results[2][2] == results[3][2]


class Failing(DefaultTaskEncoder):
    """Fails the way it is told to."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def encode_batch(self, batch: Any) -> Any:
        return self.how(batch)


class KeyboardError(RuntimeError):
    """An error that is not one of the package's."""


@pytest.mark.parametrize("failure", ["opening", "type", "keys", "restoring"])
def test_errors_of_the_loading_rank_reach_all(failure: str, dataset: Path) -> None:
    def load(rank: int) -> Any:
        try:
            if failure == "opening":
                module(dataset / "nowhere", replica_loading="one_rank").train_dataloader()
            elif failure == "type":
                encoder = Failing(lambda batch: {"x": object()})
                next(module(dataset, replica_loading="one_rank", task_encoder=encoder).train_dataloader())
            elif failure == "keys":
                keys = StageKeys(first=["imgae"], last=["caption"])
                next(module(dataset, replica_loading="one_rank", stage_keys=keys).train_dataloader())
            else:
                module(dataset, replica_loading="one_rank").train_dataloader().restore_state({"format": "of another"})
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    results = on_ranks(2, load, tp=2)
    expected = {
        "opening": DatasetNotFoundError,
        "type": ConfigurationError,
        "keys": UnknownArgumentError,
        "restoring": None,
    }[failure]
    assert all(result is not None for result in results), results
    assert results[0][0] == results[1][0]
    assert results[1][1] == f"rank 0, which loads for this replica: {results[0][1]}"
    assert expected is None or results[0][0] == expected.__name__


def test_an_error_of_user_code_is_named_on_all_ranks() -> None:
    def batches() -> Any:
        yield {"x": 1}
        raise KeyboardError("the disk is gone")

    def load(rank: int) -> Any:
        loader = EnergonDataloader(batches, replica=make_replica())
        first = next(loader)
        with pytest.raises((BroadcastError, KeyboardError)) as caught:
            next(loader)
        return first, type(caught.value).__name__, str(caught.value)

    first, second = on_ranks(2, load, cp=2)
    assert first == ({"x": 1}, "KeyboardError", "the disk is gone")
    text = "rank 0, which loads for this replica, failed with KeyboardError: the disk is gone"
    assert second == ({"x": 1}, "BroadcastError", text)


# Ranks that are not data-parallel ones -------------------------------------------------------------------------------


OTHER_RANKS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": lambda: {},
    "world": lambda: {"data_parallel_group": dist.group.WORLD},
    "global rank": lambda: {"rank": dist.get_rank(), "world_size": 8},
    "wrong order": lambda: {"rank": dist.get_rank() % 2, "world_size": 2},
    "with context": lambda: {"data_parallel_group": parallel_state.get_data_parallel_group(with_context_parallel=True)},
}
DATA_PARALLEL_RANKS: dict[str, Callable[[], dict[str, Any]]] = {
    "group": lambda: {"data_parallel_group": parallel_state.get_data_parallel_group()},
    "numbers": lambda: {"rank": parallel_state.get_data_parallel_rank(), "world_size": 2},
    "alone": lambda: {"rank": 0, "world_size": 1},
}


def test_a_loader_over_other_ranks_is_refused(dataset: Path) -> None:
    def refusal(config: dict[str, Any]) -> str | None:
        try:
            get_savable_loader(
                get_train_dataset(dataset, batch_size=2, worker_config=WorkerConfig(num_workers=0, **config))
            )
        except DataParallelError as error:
            return str(error)
        return None

    def load(rank: int) -> dict[str, str | None]:
        return {name: refusal(config()) for name, config in (OTHER_RANKS | DATA_PARALLEL_RANKS).items()}

    results = on_ranks(8, load, tp=2, cp=2)
    for name in OTHER_RANKS:
        refused = [result[name] for result in results if result[name]]
        assert refused, name
        assert all("tensor parallelism 2, context parallelism 2" in text for text in refused)
    assert {result[name] for result in results for name in DATA_PARALLEL_RANKS} == {None}


def test_a_collection_of_other_ranks_is_refused(dataset: Path) -> None:
    def load(rank: int) -> Any:
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["dp_cp", "cp"])
        wrong = ProcessGroupCollection(dp=groups.dp_cp, cp=groups.cp)
        with pytest.raises(DataParallelError, match=r"rank \d of 2, but with context parallelism 2"):
            module(dataset, pg_collection=wrong).train_dataloader()

    on_ranks(2, load, cp=2)


def test_a_collection_says_who_loads(dataset: Path) -> None:
    def load(rank: int) -> Any:
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["dp", "pp"])
        return digests(module(dataset, replica_loading="one_rank", pg_collection=groups).train_dataloader(), 3)

    results = on_ranks(4, load, tp=2, pp=2)
    assert all(seen == results[0] for seen in results)

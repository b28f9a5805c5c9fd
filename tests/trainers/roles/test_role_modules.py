"""Roles in the data module, over process groups, and as the arguments of megatron-core's MIMO model."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from grids import pictures_dataset, plain
from made import made_once

pytest.importorskip("transformers")

from engine import digest
from families import encoder_of
from forked import on_gloo
from grids import without_media

from energon_bridge import (
    EnergonMultiModalDataModule,
    StageKeys,
    WorkerConfig,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.encoder.cooking import Cooker
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.trainers.roles import Roles, make_roles
from energon_bridge.trainers.roles.mimo import MimoEncoder, mimo_inputs

data = made_once(pictures_dataset)
WHERE = {"vision": MimoEncoder(module="images", encoder="vit", arguments={"pixel_values": "hidden_states"})}


class Chats(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook_conversation),)


def task_encoder() -> Chats:
    known = encoder_of("qwen2_vl", max_pixels=120 * 120)
    return Chats(known.tokenizer, known.family, ChatConfig(seq_length=2000))


def module(data: Path, roles: Roles | None, **options: Any) -> EnergonMultiModalDataModule:
    given = {"num_workers": 0, "num_lanes": 24, "pin_memory": False} | options
    return EnergonMultiModalDataModule(
        str(data), None, task_encoder=task_encoder(), micro_batch_size=2, global_batch_size=8, roles=roles, **given
    )


def expected(data: Path, steps: int) -> list[list[Any]]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=24)
    dataset = get_train_dataset(data, batch_size=2, task_encoder=task_encoder(), worker_config=config)
    return plain(dataset, 2, steps)


def run(data: Path, rank: int, state: Any, language: int, vision: int) -> tuple[Any, Any, int]:
    """Return what a rank of two grids side by side gets in two steps, and the state of the run."""
    import torch.distributed as dist

    groups = {"language": dist.new_group(range(language)), "vision": dist.new_group(range(language, language + vision))}
    own = "language" if rank < language else "vision"
    roles = make_roles(grids={name: group if name == own else None for name, group in groups.items()})
    train = module(data, roles)
    if state is not None:
        train.load_state_dict(state)
    got = [next(train.train_dataloader())[own] for _ in range(2)]
    found = [digest(batch) if own == "language" else batch.__key__ for batch in got]
    saved = train.state_dict()
    consumed = train.consumed_samples
    train.close()
    return found, saved, consumed


def test_groups_say_who_loads_what_and_every_process_has_the_state(data: Path) -> None:
    """Two language ranks and one encoder; then one and two, from the state that an encoder rank has saved."""
    whole = expected(data, 4)
    first = on_gloo(3, lambda rank: run(data, rank, None, 2, 1))
    assert [found for found, _, _ in first[:2]] == [[digest(without_media(b)) for b in lane[:2]] for lane in whole]
    assert first[2][0] == [whole[0][step].__key__ + whole[1][step].__key__ for step in range(2)]
    assert [saved for _, saved, _ in first] == [first[0][1]] * 3
    assert [consumed for *_, consumed in first] == [8] * 3
    again = on_gloo(3, lambda rank: run(data, rank, first[2][1], 1, 2))
    later = [whole[0][2], whole[1][2]]
    assert again[0][0] == [digest(without_media(batch)) for batch in later]
    assert [found for found, _, _ in again[1:]] == [[batch.__key__ for batch in later]] * 2


def test_global_groups_are_not_asked(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Bridge's MIMO loop makes those of one module global, and not all of them."""

    def ask(**_: Any) -> Any:
        raise AssertionError("data parallel group (with GTP_remat) is not initialized")

    whole = expected(data, 1)
    known = SimpleNamespace(model_parallel_is_initialized=lambda: True, get_data_parallel_group=ask)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", known)
    train = module(data, make_roles({"language": (1, 2), "vision": (None, 1)}))
    assert digest(next(train.train_dataloader())["language"]) == digest(without_media(whole[1][0]))
    train.close()


def test_a_process_with_both_roles_gets_both_at_once(data: Path) -> None:
    whole = expected(data, 3)
    train = module(data, make_roles(grids={"language": (1, 2), "vision": (1, 2)}))
    loader = train.train_dataloader()
    for step in range(3):
        batch = next(loader)
        lane = whole[1][step]
        assert digest(batch["language"]) == digest(without_media(lane))
        inputs = mimo_inputs(batch, WHERE)
        assert torch.equal(inputs["input_ids"], lane.tokens)
        assert torch.equal(inputs["labels"], lane.labels)
        if lane.pixel_values is not None:
            assert torch.equal(inputs["modality_inputs"]["images"]["vit"]["hidden_states"], lane.pixel_values)
    state = train.state_dict()
    other = module(data, make_roles(grids={"language": (1, 2), "vision": (1, 2)}))
    other.load_state_dict(state)
    one, two = next(loader), next(other.train_dataloader())
    assert digest(one["language"]) == digest(two["language"])
    assert one["vision"].__key__ == two["vision"].__key__
    with pytest.raises(ConfigurationError, match="neither ban nor set_weights"):
        loader.ban(["00000"])
    for each in (train, other):
        each.close()


def test_several_steps_of_media_outlive_an_error(data: Path) -> None:
    """What was loaded of a step when an error came, and iterators that begin again, change nothing."""
    train = module(data, make_roles(grids={"language": (0, 2), "vision": (0, 1)}, macro=3))
    loader = train.train_dataloader().loader
    whole = list(islice(loader, 7))
    train.close()
    again = module(data, make_roles(grids={"language": (0, 2), "vision": (0, 1)}, macro=3))
    loader = again.train_dataloader().loader
    inner = loader.loaders["vision"]
    taken = inner._delivery.next
    calls = iter(range(100))

    def fails_once() -> Any:
        if next(calls) == 8:  # in the middle of the second three steps
            raise KeyboardInterrupt
        return taken()

    inner._delivery.next = fails_once
    found: list[Any] = []
    while len(found) < 7:
        try:
            for step in loader:
                found.append(step)
                if len(found) in (2, 7):
                    break
        except KeyboardInterrupt:
            assert len(found) == 3
    again.close()
    for before, after in zip(whole, found, strict=True):
        assert before.keys() == after.keys()
        assert digest(before["language"]) == digest(after["language"])
        assert "vision" not in before or before["vision"].__key__ == after["vision"].__key__
    assert ["vision" in step for step in found] == [True, False, False, True, False, False, True]


def test_pipeline_stages_get_their_fields(data: Path) -> None:
    keys = StageKeys(first=["tokens"], last=["labels"])
    roles = make_roles(grids={"language": (0, 2), "vision": (None, 1)}, stage_keys=keys)
    train = module(data, roles)
    batch = next(train.train_dataloader())["language"]
    train.close()
    assert (batch.tokens is None, batch.labels is None, batch.position_ids is None) == (False, False, True)
    with pytest.raises(ConfigurationError, match="every rank loads what its role needs"):
        module(data, roles, validate_each_dataset=True)


def test_tokens_that_are_only_counted_stay_on_the_host(data: Path) -> None:
    """Both where a trainer copies a batch to its device, and where the loader does."""
    roles = make_roles(grids={"language": (0, 1), "vision": (0, 1)})
    train = module(data, roles)
    step = next(step for step in train.train_dataloader() if step["vision"].visual_inputs)
    moved = train.transfer_batch_to_device(step, "meta", 0)
    train.close()
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=24, device="meta")
    loader = roles.loader(get_train_dataset(data, batch_size=2, task_encoder=task_encoder(), worker_config=config))
    copied = next(step for step in loader if step["vision"].visual_inputs)
    loader.close()
    for there in (moved, copied):
        assert there["vision"].visual_inputs["pixel_values"].device.type == "meta"
        assert there["language"].tokens.device.type == "meta"
        assert all(map(torch.equal, there["vision"].input_ids, step["vision"].input_ids))


DIMENSIONS = ["tp", "gtp_remat", "cp", "dp", "pp"]
GROUPS = [["dp"], ["gtp_remat"], ["dp", "cp"], ["gtp_remat", "dp", "cp"]]
"""Those of data that Megatron-LM's example of MIMO makes on each grid; none is of `dp` and `gtp_remat` alone."""


def test_a_grid_of_megatron_core_tells_ranks_with_peers_of_gtp(data: Path) -> None:
    core = pytest.importorskip("megatron.core")
    if core.__version__ < "0.17":
        pytest.importorskip("einops")
    from megatron.core.hyper_comm_grid import HyperCommGrid

    def of_rank(rank: int) -> Any:
        grids = {
            "language": HyperCommGrid([1, 2, 1, 2, 1], DIMENSIONS, backend="gloo"),
            "vision": HyperCommGrid([2, 1, 1, 2, 1], DIMENSIONS, rank_offset=4, backend="gloo"),
        }
        for grid in grids.values():
            for dimensions in GROUPS:
                grid.create_pg(dimensions)
        found = make_roles(grids=grids).grids
        told = {name: grid.create_pg(["gtp_remat", "dp"]) for name, grid in grids.items()}
        own = "language" if rank < 4 else "vision"
        sizes = {name: grid.size for name, grid in found.items()}
        return sizes, {name: grid.rank for name, grid in found.items()}, {own: told[own].rank()}

    for rank, (sizes, ranks, told) in enumerate(on_gloo(8, of_rank)):
        other = "vision" if rank < 4 else "language"
        assert sizes == {"language": 4, "vision": 2}
        assert ranks == told | {other: None}


@pytest.mark.parametrize("shape", [(1, 2, 1, 2, 1), (2, 3, 1, 2, 2), (1, 1, 2, 4, 1), (2, 1, 1, 1, 2)])
def test_ranks_of_a_grid_are_those_of_its_enumeration(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As megatron-core enumerates them: the names reversed, those of the group last, over ranks in order."""

    def get_pg(name: str) -> Any:
        assert [name] in GROUPS
        return name

    first = 3
    grid = SimpleNamespace(dim_names=DIMENSIONS, shape=shape, rank_offset=first, get_pg=get_pg)
    size = shape[1] * shape[3]
    pp, dp, cp, gtp, tp = range(5)
    ranks = np.arange(first, first + np.prod(shape)).reshape(shape[::-1])
    replicas = ranks.transpose(pp, cp, tp, dp, gtp).reshape(-1, size).tolist()
    for replica in replicas:
        for place, rank in enumerate(replica):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            found = make_roles(grids={"language": grid, "vision": (None, size)}).grids["language"]
            assert (found.rank, found.size) == (place, size)
            assert found.group == (
                None if shape[1] > 1 < shape[3] or size == 1 else "gtp_remat" if shape[1] > 1 else "dp"
            )
    for rank in (first - 1, first + ranks.size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert make_roles(grids={"language": grid, "vision": (0, size)}).names == ("vision",)


def test_ranks_given_as_numbers_validate_packs_alone(data: Path) -> None:
    """No process group reaches the language ranks only, so none is asked while packs are planned."""

    def of_rank(rank: int) -> list[list[str]]:
        grids = {"language": (rank, 2), "vision": (None, 1)} if rank < 2 else {"language": (None, 2), "vision": (0, 1)}
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=24)
        loader = make_roles(grids=grids).loader(packed_validation(data, config))
        found = [step["language" if rank < 2 else "vision"].__key__ for step in loader]
        loader.close()
        return found

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=24)
    expected = [[batch.__key__ for batch in rank] for rank in plain(packed_validation(data, config), 2, 99)]
    *language, vision = on_gloo(3, of_rank)
    assert language == expected
    assert vision == [[*one, *two] for one, two in zip(*expected, strict=True)]


def packed_validation(data: Path, config: WorkerConfig) -> Any:
    return get_val_dataset(data, batch_size=1, packing_buffer_size=8, task_encoder=task_encoder(), worker_config=config)


def test_bytes_of_pixels_become_floats_on_the_device(data: Path) -> None:
    train = module(data, make_roles(grids={"language": (0, 1), "vision": (0, 1)}))
    known = encoder_of("qwen2_vl", ChatConfig(seq_length=2000, pixels_dtype="uint8"), max_pixels=120 * 120)
    train.task_encoder = Chats(known.tokenizer, known.family, ChatConfig(seq_length=2000, pixels_dtype="uint8"))
    step = next(step for step in train.train_dataloader() if step["vision"].visual_inputs)
    pixels = step["vision"].visual_inputs["pixel_values"]
    floats = train.transfer_batch_to_device(step, "cpu", 0)["vision"].visual_inputs["pixel_values"]
    train.close()
    assert (pixels.dtype, floats.dtype) == (torch.uint8, torch.float32)
    steps = (batch for batches in zip(*expected(data, 6), strict=True) for batch in batches)
    real = next(batch for batch in steps if batch.__key__ == step["language"].__key__)
    assert torch.allclose(floats, real.pixel_values, atol=1e-5)

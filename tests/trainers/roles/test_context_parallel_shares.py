"""The media of context-parallel ranks: each gets whole media of its replica, and the features of all are those of one.

The right features are those that the vision tower of transformers makes of the whole batch, as one rank loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import talks
import torch
import torch.distributed as dist
from forked import on_gloo
from grids import NUM_LANES, media_of, note_decoded, pictures_dataset, plain, reads_counted, without_media
from hypothesis import given, strategies as st
from made import made_once
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from engine import digest
from families import encoder_of, model_config_of, model_of, tokenizer_of

from energon_bridge import Cooker, EncoderBatch, EnergonMultiModalDataModule, WorkerConfig, get_train_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.conversations.sequences import join_visual
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.trainers.context_parallel import slice_for_context_parallel, zigzag_indices
from energon_bridge.trainers.context_parallel_media import gather_features, share_media
from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider
from energon_bridge.trainers.roles import make_roles
from energon_bridge.trainers.roles.encoding import cut

data = made_once(partial(pictures_dataset, side=100))
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=NUM_LANES)
OPTIONS: dict[str, dict[str, Any]] = {"rows": {}, "packs": {"packing_buffer_size": 12, "batch_size": 1}}
IMAGES = ("pixel_values", "image_grid_thw")
VIDEOS = ("pixel_values_videos", "video_grid_thw")
STEPS = 5


class Chats(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook_conversation),)


def task_encoder(**pixels: Any) -> Chats:
    known = encoder_of("qwen2_vl", max_pixels=60 * 60)
    family = replace(known.family, **pixels)  # type: ignore[type-var]
    return Chats(known.tokenizer, family, ChatConfig(seq_length=600, pad_to_multiple_of=8))


def dataset_of(data: Path, encoder: Any = None, **options: Any) -> DatasetSpec:
    options = {"batch_size": 2, "task_encoder": encoder or task_encoder()} | options
    return get_train_dataset(data, worker_config=CONFIG, **options)


def shares(
    dataset: DatasetSpec,
    replicas: int,
    ranks: int,
    steps: int,
    *,
    state: Any = None,
    name: str = "vision",
    **roles: Any,
) -> tuple[list[list[list[dict[str, Any]]]], list[Any]]:
    """Return the steps of each context-parallel rank of each replica, and the states of the replicas."""
    found: list[list[list[dict[str, Any]]]] = []
    states = []
    for replica in range(replicas):
        found.append([])
        for rank in range(ranks):
            grids = {"language": (replica, replicas), name: (replica, replicas)}
            loader = make_roles(grids=grids, context_parallel=(rank, ranks), **roles).loader(dataset)
            if state is not None:
                loader.restore_state_rank(state)
            found[-1].append(list(islice(loader, steps)))
            saved = loader.save_state_rank()
            loader.close()
        states.append(saved)
    return found, states


@cache
def tower() -> Any:
    config = model_config_of("qwen2_vl", tokenizer_of("qwen2_vl"))
    return model_of(config).model.visual.eval()


def features_of(media: dict[str, Tensor], model: Any = None) -> Tensor:
    """Return what the vision tower makes of pictures, (tokens, 32)."""
    if "pixel_values" not in media:
        return torch.zeros(0, 32)
    made: Tensor = (model or tower())(media["pixel_values"], grid_thw=media["image_grid_thw"]).pooler_output
    return made


def assert_level(batches: Sequence[EncoderBatch]) -> None:
    """Assert that no rank is farther from an equal share than the largest medium, all know it, and each has its own."""
    said = {str(batch.part_tokens) for batch in batches}
    assert len(said) == 1
    (parts,) = batches[0].part_tokens
    totals = [sum(of_rank) for of_rank in zip(*parts.values(), strict=True)]
    assert totals == [sum(batch.num_tokens) for batch in batches]
    grids = [
        batch.visual_inputs[name] for batch in batches for _, name in (IMAGES, VIDEOS) if name in batch.visual_inputs
    ]
    largest = max((int(grid.prod(1).max()) // 4 for grid in grids), default=0)
    mean = sum(totals) / len(totals)
    assert all(abs(total - mean) <= largest for total in totals), totals


@pytest.mark.parametrize(("kind", "ranks"), [*(("rows", ranks) for ranks in (1, 2, 4)), ("packs", 3)])
def test_features_of_all_shares_are_those_of_the_whole_batch(data: Path, kind: str, ranks: int) -> None:
    dataset = dataset_of(data, **OPTIONS[kind])
    whole = plain(dataset, 2, STEPS)
    found, _ = shares(dataset, 2, ranks, STEPS)
    counts = set()
    with torch.no_grad():
        for replica, of_ranks in enumerate(found):
            for batch, steps in zip(whole[replica], zip(*of_ranks, strict=True), strict=True):
                expected = without_media(batch)
                assert all(digest(step["language"]) == digest(expected) for step in steps)
                own = [step["vision"] for step in steps]
                assert_level(own)
                made = [features_of(share.visual_inputs) for share in own]
                assert [len(one) for one in made] == own[0].part_tokens[0]["image"]
                assert torch.allclose(torch.cat(made), features_of(media_of([batch])), atol=1e-6)
                by_hand = [share_media(batch, rank=rank, size=ranks, merge_size=2) for rank in range(ranks)]
                assert [one.part_tokens for one in by_hand] == [one.part_tokens for one in own]
                assert [digest(one.visual_inputs) for one in by_hand] == [digest(one.visual_inputs) for one in own]
                assert [one.num_media for one in by_hand] == [one.num_media for one in own]
                counts |= {one.num_media[0] for one in own}
    assert max(counts) > 1
    assert 0 in counts or ranks == 1  # a rank may have no picture


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_pixels_of_any_type_are_divided(data: Path, dtype: str) -> None:
    dataset = dataset_of(data, task_encoder(pixels_dtype=dtype))
    whole = plain(dataset, 1, STEPS)[0]
    ((first, second),), _ = shares(dataset, 1, 2, STEPS)
    for batch, *steps in zip(whole, first, second, strict=True):
        own = [step["vision"] for step in steps]
        rows = [one.visual_inputs["pixel_values"] for one in own if one.visual_inputs]
        if batch.pixel_values is None:
            assert not rows
            continue
        assert torch.equal(torch.cat(rows), batch.pixel_values)
        assert rows[0].dtype == getattr(torch, dtype)
        floats = [normalise_on_device(one).visual_inputs["pixel_values"] for one in own if one.visual_inputs]
        assert torch.equal(torch.cat(floats), normalise_on_device(batch).pixel_values)
        by_hand = [share_media(batch, rank=rank, size=2, merge_size=2) for rank in range(2)]
        assert all(torch.equal(one.pixel_norm, batch.pixel_norm) for one in by_hand if dtype == "uint8")
        assert [digest(one.visual_inputs) for one in by_hand] == [digest(one.visual_inputs) for one in own]


@pytest.mark.parametrize("media", ["video", "sound", "image", "omni"])
def test_videos_sounds_and_what_a_processor_makes(tmp_path: Path, media: str) -> None:
    """Parts of each kind follow each other, whole samples where a processor makes the media of a sample together."""
    if (missing := talks.missing(media)) is not None:
        pytest.skip(f"needs {missing}")
    talks.write_talks(tmp_path)
    encoder = talks.talk_encoder(tmp_path, media, (), False, (Cooker(cook_conversation),))
    if media == "omni":  # videos are heard: the tokens of their sounds are between those of their frames
        encoder = type(encoder)(
            encoder.tokenizer, encoder.family, replace(encoder.config, video_sound=True, max_sound_seconds=1.0)
        )
    dataset = dataset_of(tmp_path / "talks" / media, encoder)
    whole = plain(dataset, 1, STEPS)[0]
    name = {"sound": "audio", "omni": "media"}.get(media, "vision")
    (of_ranks,), _ = shares(dataset, 1, 3, STEPS, name=name)
    numbers = {"image": 1, "video": 2, "audio": 3}
    own_kinds = {"video": ("image", "video"), "image": ("image",), "sound": ("audio",), "omni": tuple(numbers)}[media]
    kinds = {kind: numbers[kind] for kind in own_kinds}
    seen = set()
    for batch, *steps in zip(whole, *of_ranks, strict=True):
        own = [one for step in steps for name, one in step.items() if name != "language"]
        expected = media_of([batch])
        for name, value in expected.items():
            rows = [{name: one.visual_inputs[name]} for one in own if name in one.visual_inputs]
            assert torch.equal(join_visual(rows, [0] * len(rows), count=1)[name], value)
        (parts,) = own[0].part_tokens
        types = batch.mm_token_type_ids
        for kind, number in kinds.items() if types is not None else ():
            assert sum(parts[kind]) == int((types == number).sum())
        seen |= {kind for kind, tokens in parts.items() if sum(tokens)}
        if media == "video":
            assert_level(own)
            for kind, names in (("image", IMAGES), ("video", VIDEOS)):
                grids = [one.visual_inputs.get(names[1], torch.zeros(0, 3)).prod(1).sum() for one in own]
                assert [int(patches) // 4 for patches in grids] == parts[kind]
            by_hand = [share_media(batch, rank=rank, size=3, merge_size=2) for rank in range(3)]
            for name, value in expected.items():
                rows = [one.visual_inputs[name] for one in by_hand if name in one.visual_inputs]
                assert torch.equal(torch.cat(rows), value)
    assert seen == kinds.keys()


def test_each_picture_is_read_and_decoded_once_over_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_of(pictures_dataset(tmp_path, (12,), side=640))
    decoded = note_decoded(monkeypatch)
    with reads_counted() as today:  # by each context-parallel rank
        pictures = sum(sum(batch.num_images) for batch in plain(dataset, 1, STEPS)[0])
    assert pictures > 5
    for ranks in (2, 4):
        decoded.clear()
        with reads_counted() as read:
            ((*of_ranks,),), _ = shares(dataset, 1, ranks, STEPS)
        assert sum(sum(step["vision"].num_media) for steps in of_ranks for step in steps) == pictures == len(decoded)
        assert sum(size for _, size in read) < (1 + 0.1 * ranks) * sum(
            size for _, size in today
        )  # of texts and headers, each rank reads all


def test_several_microbatches_at_once_are_divided_one_by_one(data: Path) -> None:
    dataset = dataset_of(data)
    ((one, two),), _ = shares(dataset, 1, 2, 4)
    ((first, second),), _ = shares(dataset, 1, 2, 4, macro=2)
    for single, several in ((one, first), (two, second)):
        assert ["vision" in step for step in several] == [True, False, True, False]
        for number in (0, 2):
            parts = [step["vision"] for step in single[number : number + 2]]
            assert several[number]["vision"].part_tokens == [lane for part in parts for lane in part.part_tokens]
            rows = [part.visual_inputs for part in parts if part.visual_inputs]
            expected = join_visual(rows, [0] * len(rows), count=1) if rows else {}
            assert digest(several[number]["vision"].visual_inputs) == digest(expected)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_run_goes_on_with_other_context_parallel_ranks(data: Path, kind: str) -> None:
    """The run that was never stopped is one of two replicas, whatever becomes of their ranks."""
    dataset = dataset_of(data, **OPTIONS[kind])
    whole = plain(dataset, 2, STEPS + 3)
    _, states = shares(dataset, 2, 2, 3)
    again, _ = shares(dataset, 2, 3, STEPS, state=states)
    for replica, of_ranks in enumerate(again):
        for batch, *steps in zip(whole[replica][3:], *of_ranks, strict=True):
            assert all(digest(step["language"]) == digest(without_media(batch)) for step in steps)
            rows = [step["vision"].visual_inputs for step in steps if step["vision"].visual_inputs]
            for name, value in media_of([batch]).items():
                assert torch.equal(torch.cat([row[name] for row in rows]), value)


# What goes wrong -----------------------------------------------------------------------------------------------------


def test_a_rank_without_pictures_may_get_one_whose_features_are_dropped(data: Path) -> None:
    batches = plain(dataset_of(data), 1, 20)[0]
    batch = next(one for one in batches if sum(one.num_images) == 1)
    alone = [share_media(batch, rank=rank, size=3, merge_size=2) for rank in range(3)]
    assert sorted(bool(one.visual_inputs) for one in alone) == [False, False, True]
    every = [share_media(batch, rank=rank, size=3, merge_size=2, blank_media=True) for rank in range(3)]
    assert all(digest(sorted(one.visual_inputs.items())) == digest(sorted(media_of([batch]).items())) for one in every)
    assert [one.part_tokens for one in every] == [one.part_tokens for one in alone]
    assert [one.num_media for one in every] == [one.num_media for one in alone]
    texts = next(one for one in plain(dataset_of(data, batch_size=1), 1, 20)[0] if not sum(one.num_images))
    none = share_media(texts, rank=1, size=3, merge_size=2, blank_media=True)
    assert (none.visual_inputs, none.part_tokens) == ({}, [{"image": [0, 0, 0], "video": [0, 0, 0]}])


def test_a_batch_as_a_dict_of_model_inputs_is_divided_alike(data: Path) -> None:
    batch = next(one for one in plain(dataset_of(data), 1, STEPS)[0] if sum(one.num_images) > 1)
    inputs = {"input_ids": batch.tokens, "pixel_values": batch.pixel_values, **batch.visual_inputs}
    for rank in range(2):
        made, expected = (share_media(one, rank=rank, size=2, merge_size=2) for one in (inputs, batch))
        assert digest(made.visual_inputs) == digest(expected.visual_inputs)
        assert torch.equal(made.input_ids[0], batch.tokens)


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({"image_sizes": torch.ones(2, 2)}, {}, "image_sizes"),
        ({"image_grid_thw": None}, {}, "pixel_values, but only patches that have a grid"),
        ({"image_grid_thw": torch.ones(2, 3, dtype=torch.int64)}, {}, r"\[1, 1\] patches"),
        ({}, {"merge_size": 4}, "4\\^2 are a token"),
        ({}, {"rank": 2}, r"rank 2 is not in range\(2\)"),
    ],
)
def test_media_that_cannot_be_divided_are_refused(changed: dict[str, Any], options: dict[str, Any], said: str) -> None:
    grid = torch.tensor([[1, 2, 2], [1, 2, 4]])
    visual = {"pixel_values": torch.zeros(12, 96), "image_grid_thw": grid} | changed
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "visual_inputs": visual}
    with pytest.raises(ConfigurationError, match=said):
        share_media(batch, **({"rank": 0, "size": 2, "merge_size": 2} | options))


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 9))
def test_runs_of_media_differ_from_equal_shares_by_less_than_the_largest(sizes: list[int], parts: int) -> None:
    place = cut(sizes, parts)
    assert place == sorted(place)
    totals = [sum(size for size, of in zip(sizes, place, strict=True) if of == part) for part in range(parts)]
    assert sum(totals) == sum(sizes)
    assert all(abs(total - sum(sizes) / parts) <= max(sizes, default=0) for total in totals)


def test_features_that_are_not_those_of_the_tokens_are_refused() -> None:
    for features, tokens, said in ((3, [2, 2], "for 2 ranks"), (3, [4], "has 3 features")):
        with pytest.raises(ConfigurationError, match=said):
            gather_features(torch.zeros(features, 2), tokens)
    assert len(gather_features(torch.zeros(3, 2), [2])) == 2  # the last one is of a blank medium


def test_roles_name_the_grids_that_context_parallel_ranks_cannot_divide() -> None:
    for vision, context in ((1, (0, 2)), (2, (None, 0))):
        with pytest.raises(ConfigurationError, match="the context-parallel ranks of a replica encode its own media"):
            make_roles(grids={"language": (0, 2), "vision": (0, vision)}, context_parallel=context)
    roles = make_roles(grids={"language": (1, 2), "vision": (1, 2)}, context_parallel=(2, 3))
    assert (list(roles.served("vision")), roles.part("vision")) == ([1], (2, 3))


# Processes -----------------------------------------------------------------------------------------------------------


def weights_of(tokens: Tensor) -> Tensor:
    """Return what the loss weighs the features of each token by, (B, S, 32), as different as their places."""
    made = torch.arange(tokens.numel() * 32, dtype=torch.float32).reshape(*tokens.shape, 32)
    return (made % 97 - 48) / 97


def own_loss(features: Tensor, tokens: Tensor, own: Tensor) -> Tensor:
    """Return the loss of some tokens of each row: their features, weighed, or nothing for texts."""
    image = tokenizer_of("qwen2_vl").convert_tokens_to_ids("<|image_pad|>")
    is_image = tokens == image
    numbers = (is_image.flatten().cumsum(0) - 1).reshape(tokens.shape)
    mine = torch.zeros_like(is_image)
    mine[:, own] = True
    picked = is_image & mine
    return (features[numbers[picked]].square() * weights_of(tokens)[picked]).sum()


def gradients() -> dict[str, Tensor]:
    """Return the gradients of the tower, whole and by the names that its parameters have in no wrapper."""
    found = {}
    for name, one in tower().named_parameters():
        gradient = torch.zeros_like(one) if one.grad is None else one.grad.clone()
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def module_of(data: Path, roles: Any, state: Any, rows: int) -> EnergonMultiModalDataModule:
    train = EnergonMultiModalDataModule(
        str(data),
        None,
        task_encoder=task_encoder(pixels_dtype="uint8"),
        micro_batch_size=rows,
        global_batch_size=4 * rows,
        num_workers=0,
        num_lanes=NUM_LANES,
        pin_memory=False,
        roles=roles,
    )
    if state is not None:
        train.load_state_dict(state)
    return train


def context_parallel_run(
    rank: int, data: Path, ranks: int, microbatches: int, state: Any = None, *, parallel: str | None = None
) -> Any:
    """Return loss and gradients of some microbatches, of all processes, the pictures of this one, and the state.

    With `ddp` or `fsdp`, the tower is wrapped in it, which waits for a rank that does not run it, and media are blank.
    """
    blank_media = parallel is not None
    size = dist.get_world_size() // ranks
    context = [dist.new_group(range(first * ranks, (first + 1) * ranks)) for first in range(size)][rank // ranks]
    replicas = [dist.new_group(range(first, size * ranks, ranks)) for first in range(ranks)][rank % ranks]
    grids = {"language": replicas, "vision": replicas}
    train = module_of(data, make_roles(grids=grids, context_parallel=context, blank_media=blank_media), state, 1)
    model = torch.nn.parallel.DistributedDataParallel(tower()) if parallel == "ddp" else tower()
    if parallel == "fsdp":
        for part in (*model.blocks, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loss = torch.zeros(())
    counts = []
    for step in islice(train.train_dataloader(), microbatches):
        share = step["vision"]
        media = normalise_on_device(share).visual_inputs
        assert (set(IMAGES) <= media.keys()) == (blank_media or share.num_media[0] > 0)
        assert set(IMAGES).issubset(share.blank_media) == (blank_media and not share.num_media[0])
        features = gather_features(features_of(media, model), share.part_tokens[0]["image"], context)
        tokens = step["language"].tokens
        here = dist.get_rank(context)
        own = zigzag_indices(tokens.shape[1], rank=here, size=ranks)
        part = slice_for_context_parallel(step["language"], rank=here, size=ranks)
        assert torch.equal(part.tokens, tokens[:, own])
        of_step = own_loss(features, tokens, own)
        of_step.backward()
        loss += of_step.detach()
        counts += share.num_media
    made = gradients()
    dist.all_reduce(loss)
    for gradient in made.values():
        dist.all_reduce(gradient) if not parallel else gradient.mul_(dist.get_world_size())  # which has their mean
    saved = train.state_dict()
    train.close()
    return float(loss), made, counts, saved


def one_process(data: Path, steps: slice) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of two replicas, each of which has all pictures."""
    dataset = dataset_of(data, task_encoder(pixels_dtype="uint8"), batch_size=1)
    tower().zero_grad()
    loss = 0.0
    for replica in plain(dataset, 2, steps.stop):
        for batch in replica[steps]:
            whole = normalise_on_device(batch)
            of_step = own_loss(features_of(media_of([whole])), whole.tokens, torch.arange(whole.tokens.shape[1]))
            of_step.backward() if of_step.requires_grad else None
            loss += float(of_step.detach())
    made = gradients()
    tower().zero_grad()
    return loss, made


def assert_same_gradients(found: Any, expected: tuple[float, dict[str, Tensor]]) -> None:
    loss, made, *_ = found
    assert loss == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in expected[1].items():
        assert torch.allclose(made[name], gradient, rtol=1e-4, atol=1e-5), name
    assert any(gradient.abs().max() > 0.1 for gradient in expected[1].values())


def test_gradients_are_those_of_ranks_with_all_pictures_also_after_a_resume(data: Path) -> None:
    """Two replicas of two ranks, then one of four, which takes the microbatches of both: no picture, one, several."""
    first = on_gloo(4, lambda rank: context_parallel_run(rank, data, 2, 6))
    assert_same_gradients(first[0], one_process(data, slice(0, 6)))
    counts = [of_step for pair in (first[:2], first[2:]) for of_step in zip(*(one[2] for one in pair), strict=True)]
    assert {0, 1} < {sum(of_step) for of_step in counts}
    state = first[0][3]
    second = on_gloo(4, lambda rank: context_parallel_run(rank, data, 4, 8, state))
    assert_same_gradients(second[0], one_process(data, slice(6, 10)))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_blank_media_keep_all_ranks_going_and_change_no_gradient(data: Path, parallel: str) -> None:
    found = on_gloo(4, lambda rank: context_parallel_run(rank, data, 2, 4, parallel=parallel))
    assert_same_gradients(found[0], one_process(data, slice(0, 4)))
    assert any(0 in counts for *_, counts, _ in found)


def megatron_run(data: Path, folder: Path, start: int, steps: int) -> tuple[int, list[Any]]:
    """Return the data-parallel rank and what Megatron-LM's loop gets in some iterations of 8 samples, and save."""
    from megatron.core import parallel_state
    from rank_states import rank_file, write_rank_file

    replicas = parallel_state.get_data_parallel_group()
    grids = {"language": replicas, "vision": replicas}
    roles = make_roles(grids=grids, context_parallel=parallel_state.get_context_parallel_group())
    loop = {"micro_batch_size": 2, "global_batch_size": 8, "dataloader_save": str(folder)}
    arguments = SimpleNamespace(iteration=start, consumed_train_samples=8 * start, **loop)
    provider = train_valid_test_dataloaders_provider(
        lambda: module_of(data, roles, None, 2), arguments=lambda: arguments
    )
    train: Any = provider((80, 0, 0))[0]
    found = [next(train) for _ in range(steps * 4 // replicas.size())]
    dist.barrier()
    if not parallel_state.get_context_parallel_rank():
        write_rank_file(rank_file(folder, start + steps, replicas.rank()), train.save_state())
    return replicas.rank(), found


def test_megatrons_loop_resumes_with_other_context_parallel_ranks(data: Path, tmp_path: Path) -> None:
    """And gets floats where pixels cross as bytes."""
    pytest.importorskip("megatron.core")
    from replicas import on_ranks

    whole = plain(dataset_of(data, task_encoder(pixels_dtype="uint8")), 1, 16)[0]
    for context, start in ((2, 0), (4, 2)):
        found = on_ranks(4, lambda _, start=start: megatron_run(data, tmp_path, start, 2), cp=context)
        replicas = 4 // context
        for replica in range(replicas):
            of_ranks = [steps for rank, steps in found if rank == replica]
            assert len(of_ranks) == context
            for batch, *steps in zip(whole[4 * start + replica :: replicas], *of_ranks, strict=False):
                assert all(step["language"].__key__ == batch.__key__ for step in steps)
                rows = [step["vision"].visual_inputs for step in steps if step["vision"].visual_inputs]
                expected = media_of([normalise_on_device(batch)])
                for name, value in expected.items():
                    assert torch.equal(torch.cat([row[name] for row in rows]), value)
                assert len(rows) > 1 or sum(batch.num_images) < 2

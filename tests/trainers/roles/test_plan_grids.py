"""`energon plan --grids`: what it says of a rank is what the ranks of a run read and decode."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import answer, output_of, refusal_of
from grids import NUM_LANES, pictures_dataset, reads_counted, role_loader
from made import made_once

pytest.importorskip("transformers")

from families import encoder_of

from energon_bridge import Cooker, WorkerConfig, get_train_dataset
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder

data = made_once(pictures_dataset)
OPTIONS = ("--batch-size", 2, "--num-lanes", NUM_LANES)
STEPS = 24  # of 8 samples: eight epochs


class Chats(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook_conversation),)


@pytest.mark.parametrize("vision", [2, 4, 8])
def test_it_is_what_a_run_reads_and_decodes(data: Path, vision: int) -> None:
    sizes = {"language": 4, "vision": vision}
    planned = answer("plan", data, "--steps", STEPS, *OPTIONS, "--grids", f"language=4,vision={vision}")["grids"]
    assert [(grid["name"], grid["ranks"]) for grid in planned] == list(sizes.items())
    known = encoder_of("qwen2_vl", max_pixels=64 * 64)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=NUM_LANES)
    encoder = Chats(known.tokenizer, known.family, ChatConfig(seq_length=4000))
    dataset = get_train_dataset(data, batch_size=2, task_encoder=encoder, worker_config=config)
    for grid in planned:
        media = read = 0
        for rank in range(grid["ranks"]):
            loader = role_loader(dataset, grid["name"], rank, sizes)
            with reads_counted() as count:
                steps = list(islice(loader, STEPS))
            loader.close()
            read += sum(length for _, length in count)
            media += sum(sum(step["vision"].num_media) for step in steps if "vision" in step)
        assert media / STEPS / grid["ranks"] == pytest.approx(grid["media"])
        assert read / STEPS / grid["ranks"] == pytest.approx(grid["reads"], rel=0.2)


def chats() -> Chats:
    known = encoder_of("qwen2_vl", max_pixels=64 * 64)
    return Chats(known.tokenizer, known.family, ChatConfig(seq_length=4000, pixels_dtype="uint8"))


@pytest.mark.parametrize("vision", [2, 4, 8])
def test_it_is_what_the_ranks_of_a_run_hold_and_receive(data: Path, vision: int) -> None:
    """Pixels are those of real images here, made of them, and of blank ones of the same size in the plan."""
    sizes = {"language": 4, "vision": vision}
    grids = f"language=4,vision={vision}"
    steps = 16  # all that the plan looks at
    more = ("--encoder", f"{__name__}:chats", "--feature-bytes", 32)
    planned = answer("plan", data, "--steps", steps, *OPTIONS, "--grids", grids, *more)["grids"]
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=NUM_LANES)
    dataset = get_train_dataset(data, batch_size=2, task_encoder=chats(), worker_config=config)
    for grid in planned:
        name = grid["name"]
        most = tokens = 0
        for rank in range(grid["ranks"]):
            loader = role_loader(dataset, name, rank, sizes)
            for step in islice(loader, steps):
                batch = step[name]
                tensors = leaves_of({key: one for key, one in dict(batch).items() if not key.startswith("__")})
                most = max(most, sum(tensor.nbytes for tensor in tensors))
                pad = dataset.settings.task_encoder.tokenizer.convert_tokens_to_ids("<|image_pad|>")
                tokens += int((batch.tokens == pad).sum()) if name == "language" else sum(batch.num_tokens)
            loader.close()
        assert grid["holds"] == pytest.approx(most, rel=0.01)  # numbers of a list are counted, too
        assert grid["tokens"] == pytest.approx(tokens / steps / grid["ranks"])
        assert grid["features"] == pytest.approx(32 * grid["tokens"])


def leaves_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for one in inside for tensor in leaves_of(one)]


def test_it_is_shown_as_a_table(data: Path) -> None:
    asked = ("plan", data, "--steps", 3, *OPTIONS, "--grids", "language=4,vision=2")
    said = output_of(*asked)
    assert "media it decodes" in said
    assert "holds" not in said
    said = output_of(*asked, "--encoder", f"{__name__}:chats")
    assert "tokens of media" in said
    assert "features" not in said


@pytest.mark.parametrize(
    "given", [("--encoder", "a:b"), ("--feature-bytes", 4), ("--grids", "language=1,vision=1", "--feature-bytes", 4)]
)
def test_what_counts_tokens_needs_grids_and_an_encoder(data: Path, given: tuple[Any, ...]) -> None:
    assert "--grids" in refusal_of("plan", data, "--steps", 3, *OPTIONS, *given, code=2)


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        ("language=4,vision", "expected NAME=RANKS"),
        ("language=4,vision=3", "one number must divide"),
        ("language=4,vision=2,audio=2", "all media count for one encoder"),
        ("vision=2", "must have 'language'"),
    ],
)
def test_grids_that_cannot_be_are_refused(data: Path, grids: str, said: str) -> None:
    assert said in refusal_of("plan", data, "--steps", 3, *OPTIONS, "--grids", grids)

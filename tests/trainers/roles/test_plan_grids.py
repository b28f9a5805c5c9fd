"""`energon plan --grids`: what it says of a rank is what the ranks of a run read and decode."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
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
            read += count[0]
            media += sum(sum(step["vision"].num_media) for step in steps if "vision" in step)
        assert media / STEPS / grid["ranks"] == pytest.approx(grid["media"])
        assert read / STEPS / grid["ranks"] == pytest.approx(grid["reads"], rel=0.2)


def test_it_is_shown_as_a_table(data: Path) -> None:
    said = output_of("plan", data, "--steps", 3, *OPTIONS, "--grids", "language=4,vision=2")
    assert "media it decodes" in said


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

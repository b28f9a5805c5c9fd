"""Our loader in torchtitan's place for one: its batches, its checkpoints, on any number of data-parallel ranks.

The trainer is a stand-in (`tests/helpers/titan.py`); `test_titan_pretrain.py` runs the real one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine import digest
from forked import on_gloo
from multimodal import encoder
from talks import missing, talk_encoder, write_talks
from titan import IGNORED, Trainer, stand_in

from energon_bridge import Cooker, EnergonError, get_savable_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError, MaskedMicrobatchesError
from energon_bridge.models.conversations.cooker import cook_conversation

CONTEXT, TOKENS, STEP, STEPS = 400, 800, 3200, 3


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if package := missing("video"):
        pytest.skip(f"conversations of these tests need {package}")
    folder = tmp_path_factory.mktemp("titan")
    write_talks(folder)
    return folder


@pytest.fixture
def titan() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        from energon_bridge.trainers import torchtitan

        yield torchtitan


def chats(folder: Path) -> Any:
    return talk_encoder(folder, "video", (), False, (Cooker(cook_conversation),))


def opened(folder: Path, *, workers: int = 0, lanes: int = 4) -> Callable[[Any], Any]:
    """Open conversations with images, packed into the rows of a microbatch."""

    def open_loader(run: Any) -> Any:
        dataset = get_train_dataset(
            folder / "talks" / "video",
            batch_size=run.rows,
            packing_buffer_size=8,
            task_encoder=chats(folder),
            worker_config=run.worker_config(num_workers=workers, num_lanes=lanes),
        )
        return get_savable_loader(dataset)

    return open_loader


TOKENIZER = SimpleNamespace(pad_id=0, image_id=7, video_id=8, TOKEN_FIELDS=("image", "video"))


def run_of(titan: Any, **sizes: int) -> Any:
    return titan.TitanRun(dp_rank=0, dp_world_size=1, tokenizer=TOKENIZER, **sizes)


def trainer(config: Any, rank: int = 0, ranks: int = 1, **changes: Any) -> Trainer:
    sizes = {"context": CONTEXT, "tokens": TOKENS, "step_tokens": STEP, "tokenizer": TOKENIZER} | changes
    return Trainer(config, rank=rank, ranks=ranks, **sizes)


def steps_of(ranks: int, config: Any, load: Path | None, save: Path | None, peers: int = 1) -> list[list[str]]:
    """Train some steps on some ranks, each with some that train on the same; return the microbatches of each step."""

    def rank_of(rank: int) -> list[list[str]]:
        run = trainer(config, rank // peers, ranks)
        if load is not None:
            run.load(load)
        seen = [[digest(microbatch) for microbatch in step] for step in run.train(STEPS)]
        if save is not None:
            run.save(save)
        run.dataloader.close()
        return seen

    found = on_gloo(ranks * peers, rank_of)[::peers]
    return [sorted(digest for rank in found for digest in rank[step]) for step in range(STEPS)]


@pytest.mark.filterwarnings("ignore")  # of torch's checkpoints
def test_images_in_packs_go_on_on_any_number_of_ranks(titan: Any, talks: Path, tmp_path: Path) -> None:
    config = titan.TitanDataLoader.Config(open_loader=opened(talks))
    whole = trainer(config).train(2 * STEPS)
    expected = [sorted(digest(microbatch) for microbatch in step) for step in whole]
    assert len({one for step in expected for one in step}) == len(expected) * STEP // TOKENS
    assert any("pixel_values" in inputs for step in whole for inputs, _ in step)
    assert steps_of(2, config, None, tmp_path / "first") == expected[:STEPS]
    assert steps_of(1, config, tmp_path / "first", None, peers=2) == expected[STEPS:]


def test_what_a_step_has_when_it_is_killed_is_trained_on_again(titan: Any, talks: Path, tmp_path: Path) -> None:
    config = titan.TitanDataLoader.Config(open_loader=opened(talks, workers=1))
    run = trainer(config)
    run.train(1)
    state = run.dataloader.state_dict()
    lost = run.train(1)
    run.dataloader.close()
    again = trainer(config)
    again.dataloader.load_state_dict({})  # of a checkpoint without data
    again.dataloader.load_state_dict(state)
    assert digest(again.train(1)) == digest(lost)
    again.dataloader.close()


def test_a_pack_of_images_as_torchtitans_models_take_it(titan: Any, talks: Path) -> None:
    run = run_of(titan, max_context_length=CONTEXT, num_tokens_per_batch=1000)
    batches = iter(opened(talks)(run))
    batch = next(one for one in batches if "image_grid_thw" in one.visual_inputs)
    inputs, labels = titan.trainer_batch(batch, run)
    rows, length = batch.tokens.shape
    tokens = rows * length
    assert inputs["input"][:tokens].tolist() == batch.tokens.flatten().tolist()
    learned = batch.loss_mask.flatten() > 0
    assert labels[:tokens][learned].tolist() == batch.labels.flatten()[learned].tolist()
    assert set(labels[:tokens][~learned].tolist()) | set(labels[tokens:].tolist()) == {IGNORED}
    real = batch.attention_mask.flatten() > 0
    starts = (inputs["positions"][:tokens] == 0) & real
    assert starts.nonzero().flatten().tolist() == batch.cu_seqlens_padded[:-1].tolist()
    assert int(inputs["positions"].max()) < CONTEXT
    assert torch.equal(inputs["mrope_positions"][:tokens], batch.mrope_position_ids.permute(1, 2, 0).reshape(-1, 3))
    assert torch.equal(inputs["grid_thw"], batch.visual_inputs["image_grid_thw"])
    assert len(inputs["pixel_values"]) == int(inputs["grid_thw"].prod(-1).sum())
    assert inputs["special_tokens"] == {"image_id": 7, "video_id": 8}


def test_padding_longer_than_any_sample_stays_within_the_context(titan: Any) -> None:
    from multimodal import caption

    made = encoder(48, pad_to_max_length=True)
    samples = [made.encode_sample(caption(text, key=text)) for text in ("one two", "three four five")]
    batch = made.encode_batch(made.batch([made.pack_selected_samples(samples)]))
    run = titan.TitanRun(
        dp_rank=0,
        dp_world_size=1,
        tokenizer=None,
        max_context_length=16,
        num_tokens_per_batch=batch.tokens.numel() + 40,
    )
    inputs, labels = titan.trainer_batch(batch, run)
    assert inputs["positions"].max() == 15
    assert (labels != IGNORED).sum() == batch.loss_mask.sum() > 0


def test_windows_of_an_index_are_tokens_and_the_ones_that_follow(titan: Any, tmp_path: Path) -> None:
    np.arange(100, dtype=np.int32).tofile(tmp_path / "corpus.bin")
    sizes = np.array([100], np.int32).tobytes() + np.array([0, 0, 1], np.int64).tobytes()  # of the one document
    (tmp_path / "corpus.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 1, 2) + sizes)

    def open_loader(run: Any) -> Any:
        path = f"{tmp_path}/corpus.idx?window={run.max_context_length}+1"
        config = run.worker_config(num_workers=0, num_lanes=1)
        return get_savable_loader(get_train_dataset(path, batch_size=run.rows, worker_config=config))

    config = titan.TitanDataLoader.Config(open_loader=open_loader)
    ((inputs, labels),) = trainer(config, context=8, tokens=20, step_tokens=20).train(1)[0:1][0]
    assert inputs["positions"].tolist() == [*range(8), *range(8), *range(4)]
    assert (labels[:16] - inputs["input"][:16]).tolist() == [1] * 16
    assert labels[16:].tolist() == [IGNORED] * 4


def test_own_batches_pass_as_they_are(titan: Any) -> None:
    batch = {"input": torch.arange(4)}, torch.arange(4)
    assert titan.trainer_batch(batch, None) is batch


def test_validation_takes_one_pass_or_goes_round(titan: Any, talks: Path) -> None:
    def open_loader(run: Any) -> Any:
        dataset = get_val_dataset(
            talks / "talks" / "video",
            batch_size=1,
            split_part="train",
            task_encoder=chats(talks),
            worker_config=run.worker_config(num_workers=0),
        )
        return get_savable_loader(dataset)

    config = titan.TitanDataLoader.Config(open_loader=open_loader)
    endless = iter(trainer(config).dataloader)
    config.repeat = False
    once = [digest(one) for one in trainer(config).dataloader]
    assert len(once) > 10
    assert [digest(next(endless)) for _ in range(len(once) + 2)] == once + once[:2]
    # On two ranks both make as many steps, so no collective waits for a rank that has run out.
    shares = [[digest(one) for one in trainer(config, rank, 2).dataloader] for rank in range(2)]
    assert len(shares[0]) == len(shares[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 300, "step_tokens": 300}, "there is room for 300"),
        ({"context": 20, "tokens": 4000, "step_tokens": 4000}, "room for 4000 .* and samples of 20"),
    ],
)
def test_what_does_not_fit_is_named(titan: Any, talks: Path, change: dict[str, Any], message: str) -> None:
    def one_row(run: Any) -> Any:
        return opened(talks)(SimpleNamespace(rows=1, worker_config=run.worker_config))

    config = titan.TitanDataLoader.Config(open_loader=one_row)
    with pytest.raises(ConfigurationError, match=message):
        trainer(config, **change).train(20)


def test_a_loader_of_another_rank_or_without_an_end_is_refused(titan: Any, talks: Path) -> None:
    def other(run: Any) -> Any:
        return opened(talks)(SimpleNamespace(rows=1, worker_config=lambda **kw: None))

    with pytest.raises(ConfigurationError, match="for rank 1 of 2, but it returned a loader of rank 0 of 1"):
        trainer(titan.TitanDataLoader.Config(open_loader=other), 1, 2)
    with pytest.raises(ConfigurationError, match=r"never ends.*get_val_dataset"):
        trainer(titan.TitanDataLoader.Config(open_loader=opened(talks), repeat=False))
    with pytest.raises(MaskedMicrobatchesError, match="do not divide the 4 lanes"):
        trainer(titan.TitanDataLoader.Config(open_loader=opened(talks)), 0, 3, step_tokens=2400)


@pytest.mark.parametrize("batch", [["text"], {"text": ["a"]}, {"tokens": [torch.arange(3)]}])
def test_other_batches_are_refused(titan: Any, batch: Any) -> None:
    with pytest.raises(EnergonError, match=r"return \(inputs, labels\) from encode_batch"):
        titan.trainer_batch(batch, None)

"""Loops of reinforcement learning, killed at random: each prompt of an epoch is done once, or given up once.

A life is some ranks of a loop that draws prompts, has several of them in flight, finishes their rollouts in any order,
gives some up, lets some come again, and writes a checkpoint now and then: the data's state, with what the trainer has
done up to there. One of its processes kills itself at a random place, in the middle of a step or of a save, and its
parent kills the others; the next life goes on from the last checkpoint with other ranks and workers. `ENERGON_KILLS`
sets how many kills there are, `ENERGON_KILL_SEED` which.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engine import config_of, is_masked, text_dataset, train_dataset
from forked import start_forked

from energon_bridge import SavableDataLoader, get_savable_loader

KILLS = int(os.environ.get("ENERGON_KILLS") or (200 if os.environ.get("ENERGON_LONG_TESTS") else 6))
SEED = int(os.environ.get("ENERGON_KILL_SEED", "0"))
SHARDS = [40, 23, 1, 57]
REPEATS = 2
CHECKPOINT = "checkpoint.json"
Key = tuple[Any, ...]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_dataset(tmp_path_factory.mktemp("prompts") / "text", train=SHARDS)


@dataclass(kw_only=True)
class Trainer:
    """One rank of a life.

    Attributes:
        rollouts: Rollouts done of each prompt, by this rank in this life.
        dropped: Prompts given up.
        shared: The generator that all ranks of the life draw from alike.
        own: That of the rank alone.
        fuse: Places that the rank still passes before it kills itself.
    """

    loader: SavableDataLoader
    folder: Path
    ranks: int
    rank: int
    before: dict[str, Any]
    shared: random.Random
    own: random.Random
    fuse: float
    rollouts: list[Key] = field(default_factory=list)
    dropped: list[Key] = field(default_factory=list)

    def place(self) -> None:
        """Pass a place where the process may be killed."""
        self.fuse -= 1
        if self.fuse < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def train(self) -> None:
        """Train until the pass is over and all is done."""
        for batch in self.loader:
            self.place()
            if not is_masked(batch):
                self.finish(chance=0.35)
            if self.shared.random() < 0.15:
                out = list(self.loader.outstanding)
                self.loader.again(self.own.sample(out, min(len(out), self.own.randrange(3))))
            if self.shared.random() < 0.3:
                self.save()
        self.finish(chance=1.0)
        self.save(over=True)

    def finish(self, *, chance: float) -> None:
        """Finish rollouts of prompts that are in flight, and give a few prompts up."""
        for key, left in list(self.loader.outstanding.items()):
            if self.own.random() < 0.02:
                self.loader.drop([key])
                self.dropped.append(key)
                continue
            done = [key] * sum(self.own.random() < chance for _ in range(left))
            self.loader.done(done)
            self.rollouts += done
            self.place()

    def save(self, *, over: bool = False) -> None:
        """Write a checkpoint: the states of all ranks, and what the trainer has learned from since the epoch began."""
        own = self.loader.save_state_rank(), self.rollouts, self.dropped
        found: list[Any] = [own] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(found, own)
        self.place()
        if not self.rank:
            states, rollouts, dropped = zip(*found, strict=True)
            checkpoint = {"states": states, "over": over}
            checkpoint["rollouts"] = self.before["rollouts"] + [key for keys in rollouts for key in keys]
            checkpoint["dropped"] = self.before["dropped"] + [key for keys in dropped for key in keys]
            new = self.folder / "new"
            new.write_text(json.dumps(checkpoint))
            self.place()
            os.replace(new, self.folder / CHECKPOINT)
        self.place()


def life(data: Path, folder: Path, rank: int, ranks: int, seed: int, fuse: float) -> None:
    """Be one rank from the last checkpoint on."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group-{seed}", rank=rank, world_size=ranks)
    shared = random.Random(seed)
    # How samples are batched belongs to the run: the folder's name decides it.
    batch_size = [None, 1, 3][int(folder.name) % 3]
    dataset = train_dataset(data, batch_size=batch_size, repeat=False)
    config = config_of(ranks, shared.choice([0, 0, 1, 2]), rank)
    loader = get_savable_loader(dataset, worker_config=config, keep_until_done=True, repeats=REPEATS)
    before: dict[str, Any] = {"states": [], "rollouts": [], "dropped": []}
    if (folder / CHECKPOINT).exists():
        before = json.loads((folder / CHECKPOINT).read_text())
        if before["over"]:
            return
        states = before["states"]
        alone = len(states) == ranks and shared.random() < 0.5
        loader.restore_state_rank(states[rank] if alone else states)
    trainer = Trainer(
        loader=loader,
        folder=folder,
        ranks=ranks,
        rank=rank,
        before=before,
        shared=shared,
        own=random.Random(f"{seed} {rank}"),
        fuse=fuse,
    )
    trainer.train()
    loader.close()


def live(data: Path, folder: Path, throw: random.Random, *, killed: bool) -> bool:
    """Run the ranks of one life; return whether it was killed."""
    ranks = throw.choice([1, 1, 2, 4])
    seed = throw.randrange(1 << 30)
    victim = throw.randrange(ranks)
    fuse = throw.choice([3, 20, 100, 300])
    fuses = [throw.randrange(fuse) if killed and rank == victim else float("inf") for rank in range(ranks)]
    children = [
        start_forked(lambda rank=rank: life(data, folder, rank, ranks, seed, fuses[rank]))  # type: ignore[misc]
        for rank in range(ranks)
    ]
    ok, why = children[victim].result()
    if ok:
        for child in (child for child in children if child is not children[victim]):
            other = child.result()
            assert other[0], other[1]
        return False
    assert "exit status -9" in str(why), why
    for child in children:
        child.kill()
    for child in children:
        if child is not children[victim]:
            child.result()
    return True


def epochs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:
        number = SEED
        while True:
            folder = Path(root, str(number))
            folder.mkdir()
            yield folder
            number += 1


def test_each_prompt_of_an_epoch_is_done_once_however_often_the_loop_is_killed(data: Path) -> None:
    throw = random.Random(SEED)
    kills = 0
    for folder in epochs():
        at_most = throw.randrange(2, 12)
        for number in itertools.count():
            if not live(data, folder, throw, killed=number < at_most and kills < KILLS):
                break
            kills += 1
        checkpoint = json.loads((folder / CHECKPOINT).read_text())
        rollouts = Counter(map(tuple, checkpoint["rollouts"]))
        dropped = Counter(map(tuple, checkpoint["dropped"]))
        where = f"ENERGON_KILL_SEED={folder.name}"
        identity = next(iter(rollouts))[0]
        assert rollouts.keys() | dropped.keys() == {(identity, sample, 0, 0) for sample in range(sum(SHARDS))}, where
        assert {count for key, count in rollouts.items() if key not in dropped} == {REPEATS}, where
        assert all(rollouts[key] < REPEATS for key in dropped), where
        assert {*dropped.values()} <= {1}, where
        if kills >= KILLS:
            return

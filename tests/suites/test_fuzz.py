"""Random damage to every kind of file: an error of ours, or counted skips, in a child with limits. Never anything else.

A round damages one or two files of a dataset that was prepared, opens it, reads some batches, and looks some files up.
`ENERGON_LONG_TESTS=1` runs hours of rounds, `ENERGON_TEST_SEED` other ones. What it finds is fixed and becomes a test
of its own, or an entry of `CORPUS`.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import write_sound, write_video
from defects import good_parts
from engine import config_of
from hostile import LONG, Note, damaged_bytes, limited, seed_of
from PIL import Image

from energon_bridge import ErrorPolicy, SampleDecoder, get_loader, get_train_dataset
from energon_bridge.core.errors import DecodeError, EnergonError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.stores import WebdatasetFileStore
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.families.sound import sound_of, track_of
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

SAMPLES = 12


def fuzzed(
    one_round: Callable[[random.Random, Note], None], refusal: type[Exception], seed: int, rounds: int, **limits: int
) -> list[str]:
    """Return what was raised in rounds with damage, other than the refusal, in a child with limits of time and memory.

    Each is printed at once, too: a long run that is stopped has said what it found (`pytest -s`).
    """

    def job(note: Note) -> list[str]:
        warnings.simplefilter("ignore")
        found: list[str] = []
        outcomes: Counter[str] = Counter()
        what = [""]

        def say(text: str, number: int) -> None:
            what[0] = f"round {number}: {text}"
            note(what[0])

        for number in range(rounds):
            try:
                one_round(random.Random(f"{seed} {number}"), partial(say, number=number))
                outcomes["read"] += 1
            except refusal:
                outcomes["refused"] += 1
            except BaseException as error:
                found.append(f"{what[0]}: {type(error).__name__}: {error}"[:500])
                print(f"FOUND {found[-1]}", flush=True)  # noqa: T201
            if number % 1000 == 999:
                print(f"{number + 1} of {rounds} rounds: {len(found)} found", flush=True)  # noqa: T201
        assert min(outcomes["read"], outcomes["refused"]) > rounds // 20
        return found

    found: list[str] = limited(job, **limits)
    return found


def write_dataset(folder: Path) -> Path:
    """Write a prepared dataset with a key index and a mix beside it."""
    root = folder / "data"
    (root / "train").mkdir(parents=True)
    for shard in range(2):
        numbers = range(shard * SAMPLES // 2, (shard + 1) * SAMPLES // 2)
        write_shard(root / "train" / f"{shard}.tar", {f"s{n:02d}": good_parts(n) for n in numbers})
    fields = {"image": "jpg", "context": "txt", "answers": "json[answers]", "answer_weights": "npy"}
    prepare_dataset(
        root, split=parse_patterns(["train:train/.*"]), dataset_yaml=render_dataset_yaml("VQASample", fields)
    )
    mix = {"path": "data", "split_part": "train", "weight": 1, "subflavors": {"a": "b"}}
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": [mix, mix | {"weight": 2, "subset": {"range": ["0%", "50%"]}}]}},
    }
    (folder / "mix.yaml").write_text(json.dumps(document, indent=1))
    lines = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(SAMPLES))
    (folder / "lines.jsonl").write_text(lines)
    return folder


def read_all(folder: Path, chance: random.Random) -> None:
    """Read what is in a folder, in one of the ways in which a run would."""
    # Not 0: a count of 2^31 samples in a shard that has six would then be skipped one by one.
    policy = ErrorPolicy(tolerance=100, damaged_shards=chance.choice(["skip", "raise"]))
    source: Any = chance.choice([folder / "data", folder / "mix.yaml", folder / "data", folder / "lines.jsonl"])
    dataset = get_train_dataset(
        source,
        batch_size=2,
        shuffle_buffer_size=4,
        max_samples_per_sequence=3,
        worker_config=config_of(1, 0),
        error_policy=policy,
    )
    for _, _ in zip(range(SAMPLES), get_loader(dataset), strict=False):
        pass


def look_up(folder: Path, chance: random.Random) -> None:
    WebdatasetFileStore(folder / "data").get(f"s{chance.randrange(SAMPLES):02d}.{chance.choice(['txt', 'npy', 'jpg'])}")


def prepare_again(folder: Path, chance: random.Random) -> None:
    prepare_dataset(folder / "data", split=parse_patterns(["train:train/.*"]))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_dataset(tmp_path_factory.mktemp("fuzz"))
    read_all(folder, random.Random(0))
    return folder


def test_damaged_files_are_errors_of_ours_or_skips(intact: Path, tmp_path: Path) -> None:
    seed, rounds = seed_of("fuzz of files"), 40_000 if LONG else 120
    files = sorted(str(path.relative_to(intact)) for path in intact.rglob("*") if path.is_file())
    assert {Path(name).suffix for name in files} >= {".tar", ".idx", ".sqlite", ".yaml", ".json", ".jsonl"}

    def one_round(chance: random.Random, say: Callable[[str], None]) -> None:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        names = chance.sample(files, chance.choice((1, 1, 2)))
        for name in names:
            (folder / name).write_bytes(damaged_bytes((folder / name).read_bytes(), chance))
        action: Callable[[Path, random.Random], None] = chance.choice((read_all, read_all, look_up, prepare_again))
        say(f"{action.__name__} after damage to {', '.join(names)}")
        action(folder, chance)

    assert fuzzed(one_round, EnergonError, seed, rounds, seconds=6 * 3600 if LONG else 120) == []


def _saved(save: Callable[[Any], None]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


PICTURE = Image.effect_noise((32, 24), 60).convert("RGB")
CORPUS: dict[str, bytes] = {
    "npy": _saved(lambda file: np.save(file, np.arange(12.0).reshape(3, 4))),
    "npz": _saved(lambda file: np.savez_compressed(file, a=np.arange(5), b=np.zeros((2, 2)))),
    "pth": _saved(lambda file: torch.save({"a": torch.arange(5), "b": [1, "x"]}, file)),
    "json": json.dumps({"a": [1, 2.5, None, {"b": "c"}]}).encode(),
    "txt": "some text, écrit à la main".encode(),
    "txt.gz": gzip.compress(b"some text " * 50),
    "cls": b"17",
    **{
        name: _saved(lambda file, kind=kind: PICTURE.save(file, kind))  # type: ignore[misc]
        for name, kind in (("jpg", "jpeg"), ("png", "png"), ("gif", "gif"), ("bmp", "bmp"), ("webp", "webp"))
    },
    "tif": _saved(lambda file: PICTURE.save(file, "tiff", compression="tiff_lzw")),
    "pkl": pickle.dumps({"a": [1, "x", b"yz"], "b": (None, 2.5)}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return `CORPUS` with videos and sounds, which PyAV writes."""
    folder = tmp_path_factory.mktemp("media")
    media = [
        write_video(folder / "a.mp4", frames=6, sound="aac"),
        write_video(folder / "a.mkv", frames=4, varying=True),
    ]
    for name, codec in (("a.wav", "pcm_s16le"), ("a.flac", "flac"), ("a.mp3", "libmp3lame")):
        media.append(write_sound(folder / name, codec=codec, seconds=0.2))
    return CORPUS | {path.suffix[1:]: path.read_bytes() for path in media}


def test_damaged_parts_are_decoding_errors(corpus: dict[str, bytes]) -> None:
    seed, rounds = seed_of("fuzz of parts"), 1_000_000 if LONG else 3000

    decoders = [
        SampleDecoder(av_decode="torch", video_decode_audio=True, read_pickles=True),
        SampleDecoder(image_decode="pil", guess_content=True),
    ]

    def one_round(chance: random.Random, say: Callable[[str], None]) -> None:
        name = chance.choice(list(corpus))
        data = damaged_bytes(corpus[name], chance)
        say(f"{name}: {data[:200]!r}")
        chance.choice(decoders).decode(name, data)

    assert fuzzed(one_round, DecodeError, seed, rounds, seconds=3600 if LONG else 60, memory=4 << 30) == []


def test_damaged_sounds_have_the_planned_length_or_are_decoding_errors(corpus: dict[str, bytes]) -> None:
    seed, rounds = seed_of("fuzz of sounds"), 1_000_000 if LONG else 500

    def one_round(chance: random.Random, say: Callable[[str], None]) -> None:
        name = chance.choice(["wav", "flac", "mp3", "mp4"])
        data = damaged_bytes(corpus[name], chance)
        say(f"{name}: {data[:200]!r}")
        sound = track_of(AVDecoder(data), rate=16000) if name == "mp4" else sound_of(data, rate=16000)
        assert sound is None or sound.get().shape == (sound.length,)

    assert fuzzed(one_round, DecodeError, seed, rounds, seconds=3600 if LONG else 60, memory=4 << 30) == []

"""What training skips, `energon lint` names: files of all kinds, one in five damaged, in tars and in tables.

    ENERGON_LONG_TESTS=1 ENERGON_TEST_SEED=7 python -m pytest tests/suites/test_lint_agrees.py      2,000 files

The damage is harmless: files that are cut off, empty, of a header alone, with zeros in the middle, or with the
extension of another kind.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clips import write_video
from commands import energon
from keyed import ALL_TRAIN, CRUDE
from PIL import Image
from tar_builder import write_tar

from energon_bridge import (
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    ErrorPolicy,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_val_dataset,
)
from energon_bridge.core.prepare import prepare_dataset
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.families.sound import sound_of, track_of
from energon_bridge.models.families.video import decoded, video_of
from energon_bridge.tools.check.quarantine import read_quarantine

FILES = 2000 if os.environ.get("ENERGON_LONG_TESTS") else 150
SEED = int(os.environ.get("ENERGON_TEST_SEED", "5").replace("random", str(random.randrange(1 << 16))))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about files that are cut off


# Files ---------------------------------------------------------------------------------------------------------------


def picture(form: str, rng: np.random.Generator) -> bytes:
    height, width = rng.integers(20, 90, 2)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file, form)
    return file.getvalue()


def sound(path: Path, codec: str, rng: np.random.Generator) -> bytes:
    samples = (3000 * rng.standard_normal((1, int(rng.integers(24000, 60000))))).astype(np.int16)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(codec, rate=48000 if codec == "libopus" else 24000, layout="mono")
        for start in range(0, samples.shape[1], 4800):
            frame = av.AudioFrame.from_ndarray(samples[:, start : start + 4800], format="s16", layout="mono")
            frame.sample_rate, frame.pts = stream.rate, start
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path.read_bytes()


def video(path: Path, rng: np.random.Generator) -> bytes:
    return write_video(path, frames=int(rng.integers(20, 50)), sound="aac").read_bytes()


def array(rng: np.random.Generator) -> bytes:
    file = io.BytesIO()
    np.save(file, rng.standard_normal((7, 9)))
    return file.getvalue()


def words(rng: np.random.Generator) -> str:
    return " ".join(str(one) for one in rng.integers(0, 1000, 40))


def kinds(folder: Path) -> dict[str, Callable[[np.random.Generator], bytes]]:
    """Return what makes a file of each kind."""

    def named(make: Callable[..., bytes], extension: str, *more: Any) -> Callable[[np.random.Generator], bytes]:
        return lambda rng: make(folder / f"made.{extension}", *more, rng)

    forms = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "tiff": "TIFF", "bmp": "BMP"}
    sounds = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "ogg": "libopus"}
    return {
        **{extension: lambda rng, form=form: picture(form, rng) for extension, form in forms.items()},
        **{extension: named(sound, extension, codec) for extension, codec in sounds.items()},
        **{extension: named(video, extension) for extension in ("mp4", "mkv", "flv")},
        "npy": array,
        "json": lambda rng: json.dumps({"words": words(rng)}).encode(),
        "txt": lambda rng: words(rng).encode(),
    }


def cut(data: bytes, choose: random.Random) -> bytes:
    return data[: choose.randrange(1, len(data))]


def without_middle(data: bytes, choose: random.Random) -> bytes:
    start, end = sorted(choose.randrange(len(data)) for _ in range(2))
    return data[:start] + bytes(end - start) + data[end:]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": cut,
    "zeros": without_middle,
    "empty": lambda data, choose: b"",
    "header": lambda data, choose: data[: choose.choice((8, 16, 44, 64))],
}
MEDIA = ("jpg", "png", "webp", "gif", "tiff", "bmp", "wav", "flac", "mp3", "ogg", "mp4", "mkv", "flv")
ALL = (*MEDIA, "npy", "json", "txt")


@dataclass(frozen=True, kw_only=True)
class File:
    """A file with the extension of its name, and how it was damaged."""

    extension: str
    damage: str
    data: bytes = field(repr=False)


def files(folder: Path, extensions: Sequence[str]) -> list[File]:
    choose, rng = random.Random(SEED), np.random.default_rng(SEED)
    makers = kinds(folder)
    good = {one: [makers[one](rng) for _ in range(max(2, FILES // 100))] for one in extensions}
    made = []
    for number in range(FILES):
        extension = extensions[number % len(extensions)]
        data, damage = choose.choice(good[extension]), ""
        if choose.random() < 0.2:
            damage = choose.choice([*DAMAGES, "other extension"])
            if damage in DAMAGES:
                data = DAMAGES[damage](data, choose)
            else:
                extension = choose.choice([one for one in extensions if one != extension])
        made.append(File(extension=extension, damage=damage, data=data))
    return made


# Training and lint ---------------------------------------------------------------------------------------------------


def opened(value: Any) -> None:
    """Take all of a part, as encoders of models do: a sound, or some frames of a video, and then all."""
    if not isinstance(value, AVDecoder):
        return
    if not value.has_video_stream():
        sound_of(value, rate=16000).get()
        return
    decoded(video_of(value, fps=2, least=2, most=None))
    value.get_video_with_audio() if value.has_audio_stream() else value.get_video()
    if (track := track_of(value, rate=16000)) is not None:
        track.get()


def cook(sample: CrudeSample) -> TextSample:
    for name, value in sample.items():
        if not name.startswith("__"):
            opened(value)
    return TextSample(**basic_sample_keys(sample), text="")


class Opens(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Takes all parts of a sample."""

    cookers: ClassVar = [Cooker(cook)]


def skipped_by_training(path: Path, folder: Path) -> set[int]:
    """Return the numbers of the samples that do not come."""
    file = folder / f"{path.name}.failed.jsonl"
    dataset = get_val_dataset(
        path,
        split_part="train",
        batch_size=1,
        task_encoder=Opens(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        error_policy=ErrorPolicy(tolerance=0, damaged_shards="skip", quarantine=str(file), messages=1),
    )
    loader = get_savable_loader(dataset)
    delivered = {int(batch.__key__[0]) for batch in loader}
    loader.close()
    skipped = {one.index for one in read_quarantine(file)}
    assert delivered == {*range(FILES)} - skipped
    return skipped


def named_by_lint(path: Path) -> dict[int, str]:
    """Return what is said of the samples that do not load, by their numbers."""
    report = json.loads(energon("lint", path, "--json", "--no-progress").stdout)
    assert report["checked"] == FILES
    return {int(one["key"]): one["message"] for one in report["problems"]}


def in_tars(folder: Path, made: Sequence[File]) -> Path:
    root = folder / "tars"
    root.mkdir()
    write_tar(root / "s.tar", [(f"{number:09d}.{file.extension}", file.data) for number, file in enumerate(made)])
    prepare_dataset(root, split=ALL_TRAIN, dataset_yaml=CRUDE)
    return root


def in_a_table(folder: Path, made: Sequence[File]) -> Path:
    """Write rows of files, as `datasets` does: bytes and path."""
    path = folder / "rows.parquet"
    media = [{"bytes": file.data, "path": f"{number}.{file.extension}"} for number, file in enumerate(made)]
    pq.write_table(pa.table({"id": range(len(made)), "image": media}), path, row_group_size=64)
    return path


@pytest.mark.parametrize("kept", ["tars", "table"])
def test_what_training_skips_lint_names(tmp_path: Path, kept: str) -> None:
    made = files(tmp_path, MEDIA if kept == "table" else ALL)
    path = in_tars(tmp_path, made) if kept == "tars" else in_a_table(tmp_path, made)
    skipped, named = skipped_by_training(path, tmp_path), named_by_lint(path)
    different = {number: (made[number], named.get(number)) for number in skipped ^ named.keys()}
    assert not different, f"seed {SEED}"
    wrong = {number for number, file in enumerate(made) if not file.damage}
    assert not skipped & wrong
    empty = {number for number, file in enumerate(made) if file.damage == "empty" and file.extension != "txt"}
    assert empty
    assert empty <= skipped

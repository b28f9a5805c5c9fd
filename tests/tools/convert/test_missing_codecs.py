"""Images of formats whose package is not installed: named, counted alone, and found by lint and convert."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import energon, output_of
from PIL import Image

from energon_bridge import ErrorPolicy, WorkerConfig, get_savable_loader, get_val_dataset
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.errors import DecodeError, FatalSampleError, MissingCodecError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.check.quarantine import read_quarantine
from energon_bridge.tools.testing import write_shard

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(400)
AVIF = b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + bytes(400)
JXL = b"\xff\x0a" + bytes(400)
JXL_BOX = b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(400)
HEIC_EXTRA = "pip install 'energon-bridge[heic]'"


@pytest.fixture(autouse=True)
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pillow_heif", "PIL._avif", "pillow_jxl"):
        monkeypatch.setitem(sys.modules, name, None)


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize("part", ["jpg", "heic", "heif", "images.0.avif", "x.jxl"])
@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        (HEIC, HEIC_EXTRA),
        (AVIF, "pip install -U 'pillow>=11.3'"),
        (JXL, "pip install pillow-jxl-plugin"),
        (JXL_BOX, "pip install pillow-jxl-plugin"),
    ],
)
def test_the_error_names_the_package(part: str, data: bytes, remedy: str) -> None:
    with pytest.raises(MissingCodecError, match="cannot be decoded as an image") as refused:
        SampleDecoder().decode(part, data)
    assert str(refused.value).endswith(remedy)
    with pytest.raises(MissingCodecError, match="has no readable image size"):
        SampleDecoder(defer_images=True).decode(part, data).size  # noqa: B018
    assert SampleDecoder(image_decode=None).decode(part, data) == data
    assert SampleDecoder().decode("x", data) == data


def test_damaged_files_of_these_names_need_no_package() -> None:
    with pytest.raises(DecodeError) as refused:
        SampleDecoder().decode("heic", b"")
    assert type(refused.value) is DecodeError


@pytest.mark.parametrize("parallel", [1, 2])
def test_convert_names_the_package_of_images_with_another_extension(tmp_path: Path, parallel: int) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, data in enumerate((jpeg(), HEIC, JXL_BOX, jpeg()[:40])):
        (folder / f"{number}.jpg").write_bytes(data)
    options = ("--split-ratio", "1,0,0", "--samples-per-shard", 2, "--num-workers", parallel)
    told = output_of("convert", folder, tmp_path / "out", *options)
    assert "3 images cannot be opened" in told
    assert [line.split(". ")[1].split(",")[0] for line in told.splitlines() if "Some may need a package" in line] == [
        f"HEIC needs pillow-heif: {HEIC_EXTRA}",
        "JPEG XL needs pillow-jxl-plugin: pip install pillow-jxl-plugin",
    ]
    again = output_of("convert", folder, tmp_path / "out", *options, "--overwrite")  # takes the shards over
    assert HEIC_EXTRA in again
    kept = output_of("convert", folder, tmp_path / "out", *options, "--overwrite", "--on-error", "skip")
    assert "2 images cannot be opened" in kept  # a package would open them; the broken one is left out
    assert "Skipped 1 sample" in kept
    assert "leaves them out" not in kept


def test_only_the_samples_themselves_are_left_out(tmp_path: Path) -> None:
    """A folder with 8 % HEIC, half of them called JPEG: microbatches keep their other rows."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number:03d}.jpg").write_bytes(jpeg())
    for number in range(3, 100, 25):
        (folder / f"{number:03d}.jpg").write_bytes(HEIC)
        (folder / f"{number + 1:03d}.jpg").rename(folder / f"{number + 1:03d}.heic")
        (folder / f"{number + 1:03d}.heic").write_bytes(HEIC)
    bad = {f"{number:03d}" for n in range(3, 100, 25) for number in (n, n + 1)}
    told = output_of("convert", folder, tmp_path / "out", "--split-ratio", "1,0,0")
    assert f"8 images cannot be opened: energon lint {tmp_path}/out names them." in told
    assert HEIC_EXTRA in told

    linted = energon("lint", tmp_path / "out", "--json", "--no-progress")
    problems = json.loads(linted.stdout)["problems"]
    assert linted.exit_code == 1
    assert {one["key"] for one in problems} == bad
    assert all(HEIC_EXTRA in one["message"] for one in problems)
    assert {one["remedy"] for one in problems} == {"Install the package that is named."}

    file = tmp_path / "failed.jsonl"
    dataset = get_val_dataset(
        tmp_path / "out",
        split_part="train",
        batch_size=10,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        error_policy=ErrorPolicy(tolerance=0, quarantine=str(file), messages=1),
    )
    loader = get_savable_loader(dataset)
    keys = [key for batch in loader for key in batch.__key__]
    loader.close()
    assert len(keys) == 92
    assert bad.isdisjoint(keys)
    failed = read_quarantine(file)
    assert {one.key for one in failed} == bad
    assert {one.size for one in failed} == {1}
    assert {one.error for one in failed} == {"MissingCodecError"}


def test_images_that_stay_bytes_are_named(tmp_path: Path) -> None:
    """Raw files of cameras beside JPEGs: lint warns of them, and the error of a batch says which row has bytes."""
    samples = {f"{n:02d}": {"dng": b"RAW" * 20} if n % 5 == 2 else {"jpg": jpeg()} for n in range(10)}
    write_shard(tmp_path / "0.tar", samples)
    yaml = render_dataset_yaml("ImageSample", {"image": "jpg,dng"})
    prepare_dataset(tmp_path, split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
    warned = json.loads(output_of("lint", tmp_path, "--json", "--no-progress"))["warnings"]
    assert len(warned) == 1
    assert "2 samples with an image that no decoder takes: 0.tar/02" in warned[0]
    dataset = get_val_dataset(
        tmp_path,
        split_part="train",
        batch_size=5,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        error_policy=ErrorPolicy(tolerance=1),
    )
    with pytest.raises(FatalSampleError, match=r"some a bytes \(a part that no decoder takes.*such as row 2"):
        next(iter(get_savable_loader(dataset)))


def test_scaling_down_says_it_too(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.heic").write_bytes(HEIC)
    told = energon("convert", tmp_path / "photos", tmp_path / "out", "--max-pixels", "100", "--split-ratio", "1,0,0")
    assert told.exit_code == 1
    assert HEIC_EXTRA in told.output

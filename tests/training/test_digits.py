"""The data of the quickstart, and the main job on it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import import_for_training, run_program
from paths import CONFIGS, REPOSITORY

pytest.importorskip("sklearn")

from run_outputs import read_predictions

from energon_bridge import WorkerConfig, get_loader, get_val_dataset
from energon_bridge.training.digits import SIDE, WORDS, write_digits
from energon_bridge.training.generation import exact_match

LONG = os.environ.get("ENERGON_LONG_TESTS") == "1"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    prepare = ["-c", "from energon_bridge.tools.cli.main import main; main()", "prepare", str(folder)]
    prepare += ["--non-interactive", "--split-parts=train:train/.*", "--split-parts=val:val/.*"]
    prepare += ["--sample-type=CaptioningSample", '--field-map={"image": "png", "caption": "txt"}']
    for command in ([str(REPOSITORY / "scripts" / "make_digits.py"), str(folder)], prepare):
        done = run_program(command, folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_the_digits_are_those_of_scikit_learn(digits: Path) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    seen: dict[str, set[str]] = {}
    for part, count in (("train", 1437), ("val", 360)):
        dataset = get_val_dataset(
            digits, split_part=part, batch_size=100, image_decode="torchrgb8", worker_config=WorkerConfig(num_workers=0)
        )
        seen[part] = set()
        for batch in get_loader(dataset):
            for key, image, caption in zip(batch.__key__, batch.image, batch.caption, strict=True):
                number = int(key.removeprefix("digit-"))
                assert caption == f"the digit {WORDS[source.target[number]]}"
                # Enlarged fourfold and smoothed, but still that image: the mean brightness of a quarter stays.
                small = image[0].numpy().reshape(2, SIDE // 2, 2, SIDE // 2).mean(axis=(1, 3)) / 255
                assert np.abs(small - source.images[number].reshape(2, 4, 2, 4).mean(axis=(1, 3)) / 16).max() < 0.06
                seen[part].add(key)
        assert len(seen[part]) == count
    assert not seen["train"] & seen["val"]


def test_every_digit_is_in_both_parts_about_equally(digits: Path) -> None:
    dataset = get_val_dataset(digits, batch_size=360, worker_config=WorkerConfig(num_workers=0))
    captions = next(iter(get_loader(dataset))).caption
    counts = [captions.count(f"the digit {word}") for word in WORDS]
    assert min(counts) >= 20
    assert max(counts) <= 50


def test_the_bytes_do_not_depend_on_when_they_are_written(digits: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> dict[str, str]:
        return {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*.tar"))
        }

    assert write_digits(tmp_path) == {"train": 1437, "val": 360}
    assert digest(tmp_path) == digest(digits)
    assert len(digest(tmp_path)) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shuffle", "least", "most"),
    [
        pytest.param(False, 0.90, 1.0, marks=pytest.mark.skipif(not LONG, reason="the gate runs the main job itself")),
        (True, 0.0, 0.25),
    ],
)
def test_the_main_job_reads_digits_and_its_control_does_not(
    digits: Path, tmp_path: Path, shuffle: bool, least: float, most: float
) -> None:
    import_for_training()
    command = [str(REPOSITORY / "scripts" / "pretrain_vlm.py")]
    command += [f"--config={CONFIGS / 'digits_tiny_llava.yaml'}", f"data.path={digits}"]
    command += [f"run_dir={tmp_path / 'run'}", f"data.shuffle_images={str(shuffle).lower()}"]
    # The main job reads 71 % of them after 150 steps; a control has no need for more.
    command += ["train.max_steps=150"] if shuffle else []
    result = run_program(command, tmp_path)
    assert result.returncode == 0, result.stderr
    read = exact_match(read_predictions(tmp_path / "run"))
    assert least <= read <= most
    assert result.stdout.splitlines()[-1] == f"validation digits read: {100 * read:.1f} %"


@pytest.mark.slow
@pytest.mark.skipif(
    not LONG, reason="ENERGON_LONG_TESTS=1 trains with megatron-core until it reads, two minutes of two cores"
)
def test_the_main_job_reads_digits_with_megatron_core_on_two_processes(digits: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    config = CONFIGS / "digits_tiny_llava_megatron.yaml"
    command = ["bash", str(REPOSITORY / "scripts" / "launch" / "torchrun.sh"), str(config), f"data.path={digits}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*command, f"run_dir={tmp_path / 'run'}", "train.max_steps=300"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": path, "NPROC": "2"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    read = exact_match(read_predictions(tmp_path / "run"))
    assert read >= 0.90
    assert result.stdout.splitlines()[-1] == f"validation digits read: {100 * read:.1f} %"

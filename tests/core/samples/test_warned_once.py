"""What is odd about data is said once in a run, whichever of its processes meets it first, with the sample."""

from __future__ import annotations

import io
import logging
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from energon_bridge import (
    CaptioningSample,
    DefaultTaskEncoder,
    SampleDecoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

TURNED = 5


def picture(kind: str, turn: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    file = io.BytesIO()
    Image.new("RGB", (20, 10)).save(file, kind, exif=exif.tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of 16 pictures: of `jpg` and `png`, the sample `k05` alone is turned."""
    folder = tmp_path_factory.mktemp("turned")
    for part, kind in (("jpg", "JPEG"), ("png", "PNG")):
        (folder / part).mkdir()
        samples = {
            f"k{number:02d}": {part: picture(kind, 6 if number == TURNED else 1), "txt": b"a"} for number in range(16)
        }
        write_shard(folder / part / "s.tar", samples)
        yaml = render_dataset_yaml("CaptioningSample", {"image": part, "caption": "txt"})
        prepare_dataset(folder / part, split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
    return folder


class Late(DefaultTaskEncoder):
    """Decodes images right before `postencode_sample`, on the loading threads."""

    decoder = SampleDecoder(defer_images=True)

    def postencode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        return sample


@pytest.mark.parametrize("part", ["jpg", "png"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("workers", "method"), [(0, "fork"), (2, "fork"), (2, "forkserver")])
def test_a_turned_picture_is_named_once_a_run_with_its_sample(
    data: Path,
    workers: int,
    method: Any,
    late: bool,
    part: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two epochs, so that each worker has the sample."""
    config = WorkerConfig(rank=0, world_size=2, num_workers=workers, start_method=method)
    encoder = Late() if late else None
    with caplog.at_level(logging.WARNING):
        dataset = get_train_dataset(data / part, batch_size=2, worker_config=config, task_encoder=encoder)
        with closing(get_savable_loader(dataset)) as loader:
            assert len(list(islice(loader, 32))) == 32
    turned = [text for text in caplog.messages if "are turned by their EXIF" in text]
    assert len(turned) == 1
    assert turned[0].startswith("rank 0: images in part" if workers else "images in part")
    assert f"{data / part}: shard s.tar, sample {TURNED}, key 'k05'" in turned[0]
    assert "EXIF" not in capfd.readouterr().err, "no worker says so itself"

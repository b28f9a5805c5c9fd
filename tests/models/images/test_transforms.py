"""Transforms of decoded images: torch's values, torchvision's semantics, and randomness that is the sample's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from pictures import noise
from torch.nn.functional import interpolate

from energon_bridge import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.images import transforms
from energon_bridge.models.images.transforms import (
    center_crop,
    horizontal_flip,
    normalise,
    random_horizontal_flip,
    random_resized_crop,
    resize,
)
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.tools.verify import verify_resume

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def hwc(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return pixels with hard edges, where resizing rounds and clips most."""
    rng = np.random.default_rng(seed)
    pixels = np.array(noise(width, height, seed))
    pixels[::3] = rng.integers(0, 2, pixels[::3].shape, np.uint8) * np.uint8(255)
    return pixels


def chw(width: int, height: int, seed: int = 0) -> torch.Tensor:
    """Return pixels as a decoder gives them: a view over (height, width, channels)."""
    return torch.from_numpy(hwc(width, height, seed)).permute(2, 0, 1)


SIDES = st.integers(1, 200)


@settings(max_examples=80)
@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from(["bilinear", "bicubic"]))
def test_resized_bytes_are_those_of_torch(width: int, height: int, rows: int, columns: int, by: Any) -> None:
    image = chw(width, height, seed=width)
    # channel by channel: torch fails on three of them where a side is 1
    expected = interpolate(image[:, None].contiguous(), (rows, columns), mode=by, antialias=True)[:, 0]
    assert torch.equal(resize(image, (rows, columns), by), expected)
    assert torch.equal(resize(image.contiguous(), (rows, columns), by), expected)
    array = resize(image.permute(1, 2, 0).numpy(), (rows, columns), by)
    assert np.array_equal(array, expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("by", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.uint8), (3, torch.float32), (4, torch.uint8)])
def test_batches_and_other_channels_are_resized_as_torch_does(channels: int, dtype: torch.dtype, by: Any) -> None:
    images = torch.randint(0, 256, (2, 5, channels, 20, 31), generator=torch.Generator().manual_seed(3)).to(dtype)
    for antialias in (True, False):
        smooth = antialias and by in ("bilinear", "bicubic")
        expected = interpolate(images.flatten(0, 1), (9, 40), mode=by, antialias=smooth).unflatten(0, (2, 5))
        assert torch.equal(resize(images, (9, 40), by, antialias=antialias), expected)


@pytest.mark.parametrize(
    ("width", "height", "size", "most", "expected"),
    [
        (640, 480, 224, None, (224, 298)),  # int(224 * 640 / 480), not rounded
        (480, 640, 224, None, (298, 224)),
        (50, 50, 20, None, (20, 20)),
        (640, 480, 224, 256, (192, 256)),
        (480, 640, [224], 256, (256, 192)),
        (640, 480, (30, 7), None, (30, 7)),
    ],
)
def test_sizes_are_those_of_torchvision(width: int, height: int, size: Any, most: Any, expected: Any) -> None:
    assert tuple(resize(chw(width, height), size, max_size=most).shape) == (3, *expected)


def test_the_middle_is_cropped_or_padded() -> None:
    image = chw(10, 9)
    assert torch.equal(center_crop(image, 4), image[:, 2:6, 3:7])  # 2.5 is rounded to the even number
    assert torch.equal(center_crop(image, (9, 10)), image)
    padded = center_crop(image, (12, 5))
    assert torch.equal(padded[:, 1:10], image[:, :, 2:7])
    assert padded[:, 0].count_nonzero() == padded[:, 10:].count_nonzero() == 0
    assert np.array_equal(center_crop(hwc(10, 9), 4), image[:, 2:6, 3:7].permute(1, 2, 0).numpy())


def test_flips() -> None:
    image = chw(5, 4)
    assert torch.equal(horizontal_flip(image), image.flip(-1))
    assert np.array_equal(horizontal_flip(hwc(5, 4)), hwc(5, 4)[:, ::-1])
    generator = torch.Generator().manual_seed(1)
    flips = [not torch.equal(random_horizontal_flip(image, 0.3, generator), image) for _ in range(2000)]
    assert 0.27 < np.mean(flips) < 0.33  # 3 deviations
    assert torch.equal(random_horizontal_flip(image, 0.0), image)
    assert torch.equal(random_horizontal_flip(image, 1.0), image.flip(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 3])
def test_normalised_values_are_those_of_torch(channels: int, dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (4, channels, 9, 7), dtype=torch.uint8)
    mean, std = MEAN[:channels], STD[:channels]
    expected = (images / 255.0 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    made = normalise(images, mean, std, dtype)
    assert made.is_contiguous()
    assert torch.equal(made, expected.to(dtype))
    assert torch.equal(normalise(list(images), mean, std, dtype), expected.to(dtype))
    arrays = images.permute(0, 2, 3, 1).numpy()
    assert torch.equal(normalise(arrays, mean, std, dtype), expected.to(dtype))
    floats = normalise(images / 255.0, mean, std, dtype)
    assert torch.equal(floats, expected.to(dtype))
    assert torch.equal(normalise(images[0], 0.5, 0.25), (images[0] / 255.0 - 0.5) / 0.25)


def test_arrays_that_are_views_or_read_only() -> None:
    array = hwc(9, 7)
    expected = resize(array[::-1, ::-1].copy(), (5, 4))
    assert np.array_equal(resize(array[::-1, ::-1], (5, 4)), expected)
    array.flags.writeable = False
    assert np.array_equal(resize(array, (5, 4)), resize(hwc(9, 7), (5, 4)))
    image = noise(30, 20, seed=1).convert("L")
    made = resize(image, (7, 9), "bicubic")
    assert made.shape == (7, 9, 3)
    assert np.array_equal(made, resize(np.array(image.convert("RGB")), (7, 9), "bicubic"))
    assert torch.equal(normalise(image, 0.5, 0.5), normalise(np.array(image.convert("RGB")), 0.5, 0.5))


def test_crops_are_spread_over_the_image_and_of_the_shapes_asked_for() -> None:
    generator = torch.Generator().manual_seed(5)
    found = np.array(
        [transforms._random_part(480, 640, (0.2, 0.8), (0.5, 2.0), generator) for _ in range(4000)], dtype=float
    )
    top, left, rows, columns = found.T
    share, aspect = rows * columns / (480 * 640), columns / rows
    assert 0.198 < share.min() < 0.21
    assert 0.75 < share.max() < 0.802
    assert 0.49 < aspect.min() < 0.52
    assert 1.9 < aspect.max() < 2.03
    assert abs(np.log(aspect[share < 0.3])).mean() == pytest.approx(math.log(2) / 2, rel=0.1)  # uniform in the log
    middle = (top + rows / 2).mean() / 480, (left + columns / 2).mean() / 640
    assert middle == pytest.approx((0.5, 0.5), abs=0.01)
    assert (top + rows <= 480).all()
    assert (left + columns <= 640).all()


def test_a_crop_is_the_part_resized() -> None:
    image, wide = chw(80, 60), chw(900, 3)
    for seed in range(20):
        made = random_resized_crop(
            image, (24, 32), interpolation="bicubic", generator=torch.Generator().manual_seed(seed)
        )
        # torchvision's own algorithm and its order of draws, written once more
        generator = torch.Generator().manual_seed(seed)
        while True:
            area = 4800 * torch.empty(1).uniform_(0.08, 1.0, generator=generator).item()
            log_ratio = torch.log(torch.tensor((3.0 / 4.0, 4.0 / 3.0)))
            ratio = torch.exp(torch.empty(1).uniform_(*log_ratio.tolist(), generator=generator)).item()
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= 80 and 0 < h <= 60:
                break
        i = torch.randint(0, 60 - h + 1, (1,), generator=generator).item()
        j = torch.randint(0, 80 - w + 1, (1,), generator=generator).item()
        part = image[:, i : i + h, j : j + w].contiguous()
        expected = interpolate(part[None], (24, 32), mode="bicubic", antialias=True)[0] if (h, w) != (24, 32) else part
        assert torch.equal(made, expected)
    # no part of 3 rows has a tenth of the area and a sensible ratio: the largest of the middle is taken
    narrow = random_resized_crop(wide, 4, scale=(0.5, 1.0))
    assert torch.equal(narrow, resize(wide[:, :, 448:452], (4, 4)))


def test_images_of_a_list_get_their_own_crops_and_those_of_a_tensor_the_same() -> None:
    torch.manual_seed(1)
    image = chw(60, 40)
    one, other = random_resized_crop([image, image], 16)
    assert not torch.equal(one, other)
    one, other = random_resized_crop(torch.stack([image, image]), 16)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: resize(x, 0), r"size must be a number of pixels, or \(height, width\).*, got 0"),
        (lambda x: resize(x, (1, 2, 3)), r"size must be .*, got \(1, 2, 3\)"),
        (lambda x: resize(x, (4, 4), max_size=9), "max_size=9 needs a single smaller size"),
        (lambda x: resize(x, 4, max_size=4), "max_size=4 needs a single smaller size"),
        (lambda x: resize(x, 4, "lanczos"), "interpolation must be one of bilinear.*, got 'lanczos'"),
        (lambda x: center_crop(x, -1), "output_size must be .*, got -1"),
        (lambda x: random_resized_crop(x, 4, scale=(0.5, 0.1)), r"scale must be a positive range.*, got \(0.5, 0.1\)"),
        (lambda x: random_horizontal_flip(x, 1.5), "p must be a probability.*, got 1.5"),
        (lambda x: normalise(x, 0.5, 0.0), "std must not be 0.*; got 0.0"),
        (lambda x: normalise(x, (0.5, 0.5), 1.0), "mean has 2 numbers and std 1; an image of 3 channels"),
        (lambda x: normalise(x, "half", 1.0), "mean must be a number.*, got 'half'"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(chw(8, 8))


def test_what_is_no_image_is_refused() -> None:
    for value in (b"bytes", np.zeros((4, 4), np.uint8), torch.zeros(4), None):
        with pytest.raises(SampleError, match="an image must be a tensor"):
            resize(value, 4)
    with pytest.raises(SampleError, match="must have one shape"):
        normalise([chw(4, 4), chw(5, 4)], 0.5, 0.5)


class Augmented(DefaultTaskEncoder):
    """Random crops and flips of each sample, and floats of whole batches."""

    decoder = SampleDecoder(image_decode="torchrgb8")

    def encode_sample(self, sample: Any) -> Any:
        sample.image = random_horizontal_flip(random_resized_crop(sample.image, 8))
        return sample

    def encode_batch(self, batch: Any) -> Any:
        batch.image = normalise(batch.image, MEAN, STD)
        return batch


def test_a_sample_has_the_same_crop_on_any_topology_and_after_a_resume(tmp_path: Path) -> None:
    data = create_captioning_test_dataset(tmp_path, num_val=0)

    def loader(config: WorkerConfig) -> Any:
        return get_savable_loader(
            get_train_dataset(data, batch_size=3, task_encoder=Augmented(), worker_config=config),
            checkpoint_every_sec=0,
        )

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_lanes=6)
    report = verify_resume(loader, 8, worker_config=config, topologies=[(3, 2)])
    assert "image" in report.fields
    seen: dict[str, list[torch.Tensor]] = {}
    for _, batch in zip(range(30), loader(config), strict=False):
        for key, image in zip(batch.__key__, batch.image, strict=True):
            seen.setdefault(key, []).append(image)
    twice = [images for images in seen.values() if len(images) > 1]
    assert twice
    assert not all(torch.equal(images[0], images[1]) for images in twice)  # each epoch has its own

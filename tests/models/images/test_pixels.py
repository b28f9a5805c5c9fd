"""The native path from images to pixels: its values are those of the image processors of transformers."""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import chat, encoder_of, image_processor_of
from hypothesis import HealthCheck, given, settings, strategies as st
from pictures import KINDS, encoded, noise, sizes
from PIL import Image
from torch.nn.functional import interpolate

pytest.importorskip("transformers")

from transformers import (
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    Qwen2VLImageProcessorPil,
    Siglip2ImageProcessorPil,
    SiglipImageProcessorPil,
    ViTImageProcessorPil,
)
from transformers.image_transforms import convert_to_rgb

from energon_bridge import SampleDecoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import ConfigurationError, SampleError, SettingMismatchError
from energon_bridge.core.format.tar import _tar
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import ChatConfig, VideoFrames
from energon_bridge.models.images import pixels as paths, resampling as native
from energon_bridge.models.images.pixels import pixel_path, process_image
from energon_bridge.models.images.visual import concat_visual
from energon_bridge.tools.testing import create_captioning_test_dataset

LONG = os.environ.get("ENERGON_LONG_TESTS") == "1"

CLIP = {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}}
SMALL = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
PROCESSORS: dict[str, Any] = {
    "clip": lambda: CLIPImageProcessorPil(**CLIP),
    "siglip": lambda: SiglipImageProcessorPil(size={"height": 56, "width": 64}),
    "siglip2": lambda: Siglip2ImageProcessorPil(max_num_patches=30, patch_size=8),
    "qwen2-vl": lambda: Qwen2VLImageProcessorPil(**SMALL),
    "qwen3-vl": lambda: Qwen2VLImageProcessorPil(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, **SMALL),
    "llava": lambda: LlavaImageProcessorPil(do_pad=True, **CLIP),
    "llava-next": lambda: LlavaNextImageProcessorPil(
        size={"shortest_edge": 24},
        crop_size={"height": 24, "width": 24},
        image_grid_pinpoints=[[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
    ),
    "llava-next, cut tiles": lambda: LlavaNextImageProcessorPil(
        size={"height": 20, "width": 28},
        crop_size={"height": 17, "width": 16},
        image_grid_pinpoints=[[40, 30], [30, 50]],
    ),
    "vit": lambda: ViTImageProcessorPil(size={"height": 40, "width": 30}),
    "no resize": lambda: CLIPImageProcessorPil(do_resize=False, crop_size={"height": 33, "width": 20}),
    "no crop": lambda: CLIPImageProcessorPil(do_center_crop=False, size={"shortest_edge": 20}, resample=1),
    "no mean": lambda: SiglipImageProcessorPil(do_normalize=False, size={"height": 9, "width": 9}, resample=5),
    "no scale": lambda: SiglipImageProcessorPil(do_rescale=False, size={"height": 9, "width": 9}, resample=2),
}
if LONG:
    PROCESSORS |= {
        "llava-next 336": lambda: LlavaNextImageProcessorPil(
            size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
        ),
        "clip 336": lambda: CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
        "siglip 384": lambda: SiglipImageProcessorPil(size={"height": 384, "width": 384}),
        "qwen2.5-vl": Qwen2VLImageProcessorPil,
    }

SIDES = st.integers(1, 300)
USED = {"plain C": 0, "AVX2": 1, "AVX-512": 2}


@pytest.fixture(params=["numpy", *USED])
def used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What pixels are computed with: each kind of instructions that this processor has."""
    native.order_of_pillow.cache_clear()
    native.as_torch.cache_clear()
    if request.param == "numpy":
        monkeypatch.setattr(native, "_compiled", None)
        monkeypatch.setattr(native, "COMPILED", False)
    elif not native.COMPILED or native._compiled.use(USED[request.param]) < USED[request.param]:
        pytest.skip(f"no {request.param} here")
    yield request.param
    monkeypatch.undo()
    native.order_of_pillow.cache_clear()
    native.as_torch.cache_clear()
    if native.COMPILED:
        native._compiled.use(2)


@pytest.mark.skipif(not native.COMPILED or platform.machine() != "x86_64", reason="no compiled parts for x86-64")
def test_compiled_parts_use_what_the_processor_has() -> None:
    """Where they ask for it in vain, values are right, and slow: no other test sees it."""
    flags = {*Path("/proc/cpuinfo").read_text().split()}
    widest = 2 if flags >= {"avx512bw", "avx512vbmi", "avx512_vnni"} else int("avx2" in flags)
    assert native._compiled.use(2) == widest
    assert (_tar.crc32s([b"some"]) is not None) == ("pclmulqdq" in flags)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from(sorted(native.FILTERS)))
def test_bytes_are_those_of_pillow(used: str, height: int, width: int, rows: int, columns: int, by: Any) -> None:
    rng = np.random.default_rng(height)
    pixels = rng.integers(0, 2, (height, width, 3), np.uint8) * np.uint8(255)
    expected = Image.fromarray(pixels).resize((columns, rows), Image.Resampling[by.upper()])
    np.testing.assert_array_equal(native.resample(pixels, (rows, columns), by), np.asarray(expected))


@pytest.mark.skipif(not native.COMPILED, reason="needs the compiled part")
def test_the_order_of_the_installed_pillow_is_found_out() -> None:
    assert native.order_of_pillow() is not None


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    """500 images of all kinds with ENERGON_LONG_TESTS=1, else one of each kind."""
    made = enumerate(sizes(500 if LONG else len(KINDS), 8000 if LONG else 900))
    return [encoded(KINDS[number % len(KINDS)], *size, seed=number) for number, size in made]


@pytest.mark.parametrize("name", PROCESSORS)
def test_values_are_those_of_the_processor(name: str, used: str, images: list[bytes]) -> None:
    processor = PROCESSORS[name]()
    path = pixel_path(processor)
    assert path is not None
    assert path.profile == "pillow"
    decoder = SampleDecoder(image_decode="fastrgb", guess_content=True).with_alpha(path.alpha)
    compared = 0
    for data in images:
        with Image.open(io.BytesIO(data)) as image:
            # Without do_convert_rgb processors take RGB only.
            given = image if processor.do_convert_rgb or image.mode == "RGB" else convert_to_rgb(image)
            try:
                expected = processor(images=[given], return_tensors="pt")
            except ValueError:  # too narrow
                with pytest.raises(SampleError, match="too narrow"):
                    path.image(decoder.decode("x", data))
                continue
        found = path.image(decoder.decode("x", data))
        assert found.keys() == set(expected.keys())
        for key, value in found.items():
            assert value.dtype == expected[key].dtype
            assert torch.equal(value, expected[key]), (key, image.mode, image.size)
        compared += 1
    assert compared > len(images) // 2


def by_torch_alone(image: Image.Image, size: tuple[int, int], mean: Any, std: Any, *, mode: str) -> torch.Tensor:
    """Resize bytes as torchvision does, then rescale and normalise in one step: (3, height, width)."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].contiguous()
    if pixels.shape[-2:] != size:
        pixels = interpolate(pixels, size, mode=mode, antialias=True)
    mean, std = (torch.tensor(values)[:, None, None] * 255.0 for values in (mean, std))
    return ((pixels[0].float() - mean) / std).contiguous()


@pytest.mark.parametrize("size", [(640, 480), (31, 200), (7, 5), (56, 64)])
def test_the_torch_profile_has_the_values_of_torch_alone(size: tuple[int, int]) -> None:
    image = noise(*size, seed=1)
    siglip = SiglipImageProcessorPil(size={"height": 56, "width": 64})
    path = pixel_path(siglip, "torch")
    assert path is not None
    expected = by_torch_alone(image, (56, 64), siglip.image_mean, siglip.image_std, mode="bicubic")
    torch.testing.assert_close(path.image(image)["pixel_values"][0], expected, rtol=2e-7, atol=0)

    qwen = Qwen2VLImageProcessorPil(**SMALL)
    path = pixel_path(qwen, "torch")
    assert path is not None
    found = path.image(image)
    _, rows, columns = found["image_grid_thw"][0].tolist()
    whole = by_torch_alone(image, (rows * 14, columns * 14), qwen.image_mean, qwen.image_std, mode="bicubic")
    patches = whole.reshape(3, rows // 2, 2, 14, columns // 2, 2, 14).permute(1, 4, 2, 5, 0, 3, 6)
    expected = patches[:, :, :, :, :, None].expand(*patches.shape[:5], 2, 14, 14).reshape(rows * columns, -1)
    torch.testing.assert_close(found["pixel_values"], expected, rtol=2e-7, atol=0)


def test_tiles_have_the_values_of_torch_alone(images: list[bytes]) -> None:
    side, grids = 24, [(24, 48), (48, 24), (48, 48), (72, 24), (24, 72)]
    processor = PROCESSORS["llava-next"]()
    path = pixel_path(processor, "torch")
    assert path is not None
    decoder = SampleDecoder(image_decode="pilrgb", guess_content=True).with_alpha("white")

    def scaled(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:  # channel by channel, for sides of 1
        same = tuple(pixels.shape[-2:]) == size
        return pixels if same else interpolate(pixels[:, None], size, mode="bicubic", antialias=True)[:, 0]

    counts = set()
    for data in images:
        image = decoder.decode("", data)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        _, height, width = pixels.shape

        def room_left(grid: tuple[int, int], height: int = height, width: int = width) -> tuple[int, int]:
            scale = min(grid[1] / width, grid[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - grid[0] * grid[1]

        rows, columns = max(grids, key=room_left)
        scale = min(columns / width, rows / height)
        if columns / width < rows / height:
            size = min(math.ceil(height * scale), rows), columns
        else:
            size = rows, min(math.ceil(width * scale), columns)
        whole = torch.zeros(3, rows, columns, dtype=torch.uint8)
        top, left = (rows - size[0]) // 2, (columns - size[1]) // 2
        whole[:, top : top + size[0], left : left + size[1]] = scaled(pixels, size)
        tiles = whole.unflatten(1, (-1, side)).unflatten(3, (-1, side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        bytes_ = torch.cat([scaled(pixels, (side, side))[None], tiles]).float()
        mean, std = (torch.tensor(v)[:, None, None] * 255.0 for v in (processor.image_mean, processor.image_std))
        found = path.image(image)
        torch.testing.assert_close(found["pixel_values"], ((bytes_ - mean) / std)[None], rtol=2e-7, atol=0)
        assert found["image_sizes"].tolist() == [[height, width]]
        counts.add(len(bytes_))
    assert counts == {3, 4, 5}


def test_images_of_different_tiles_are_padded_as_the_processor_pads() -> None:
    processor, tokenizer = PROCESSORS["llava-next"](), encoder_of("llava").tokenizer
    images = [noise(90, 20, seed=1), noise(50, 50, seed=2)]
    path = pixel_path(processor)
    assert path is not None
    expected = processor(images=images, return_tensors="pt")
    made = concat_visual([path.image(image) for image in images])
    assert made.keys() == set(expected.keys())
    assert all(torch.equal(made[name], expected[name]) for name in made)
    with pytest.raises(ConfigurationError, match=r"'uint8' is not available for LlavaNext.*padded with zeros"):
        MultiModalTaskEncoder(tokenizer, processor, pixels_dtype="uint8")


def test_torch_resizes_images_of_one_pixel_and_of_many(used: str) -> None:
    assert native.as_torch() is native.COMPILED  # the installed torch is one whose bytes are known
    for size, new in (((1, 1), (5, 1)), ((1, 9), (1, 1)), ((200, 1), (30, 40)), ((31, 47), (60, 20)), ((9, 9), (9, 9))):
        pixels = np.array(noise(*size[::-1], seed=7))
        image = torch.from_numpy(pixels).permute(2, 0, 1)[:, None].contiguous()
        expected = interpolate(image, new, mode="bicubic", antialias=True)[:, 0].permute(1, 2, 0)
        np.testing.assert_array_equal(native.resample_as_torch(pixels, new, "bicubic"), expected.numpy())


def test_crops_of_small_images_are_padded_as_each_profile_pads() -> None:
    image = Image.new("RGB", (5, 7), "white")
    for profile, top in (("pillow", 5), ("torch", 4)):  # 9 rows are missing
        processor = CLIPImageProcessorPil(do_resize=False, crop_size={"height": 16, "width": 4})
        path = pixel_path(processor, profile)  # type: ignore[arg-type]
        assert path is not None
        made = path.image(image)["pixel_values"]
        assert made.shape == (1, 3, 16, 4)
        assert (made[0, 0, :, 0] > 0).nonzero().flatten().tolist() == list(range(top, top + 7))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["clip", "siglip2", "qwen2-vl"])
def test_short_floats_are_rounded_once(name: str, dtype: Any) -> None:
    processor, image = PROCESSORS[name](), noise(90, 60, seed=2)
    path = pixel_path(processor, dtype=dtype)
    assert path is not None
    expected = processor(images=[image], return_tensors="pt")["pixel_values"].to(getattr(torch, dtype))
    assert torch.equal(path.image(image)["pixel_values"], expected)
    path = pixel_path(processor, "processor", dtype)
    assert path is None
    assert torch.equal(process_image(processor, image, path, getattr(torch, dtype))["pixel_values"], expected)


class Darker(CLIPImageProcessorPil):
    """Overrides what the native path would do in its place."""

    def rescale(self, image: Any, *args: Any, **kwargs: Any) -> Any:
        return super().rescale(image // 2, *args, **kwargs)


class Named(CLIPImageProcessorPil):
    """Sets an attribute only, and has a method of its own."""

    image_mean = (0.1, 0.2, 0.3)

    def post_process(self) -> None: ...


def test_other_processors_are_called_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    paths.say_called.cache_clear()
    image = noise(60, 50, seed=3)
    with caplog.at_level(logging.INFO, logger=paths.__name__):
        for _ in range(3):
            darker = Darker(**CLIP)
            assert pixel_path(darker) is None
        assert pixel_path(lambda images: {}) is None
        assert pixel_path(CLIPImageProcessorPil(do_pad=True, pad_size={"height": 400, "width": 400})) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "calling Darker for images" in said[0]
    assert "its pixel_values differs from its program's in" in said[0]
    made = process_image(darker, image)["pixel_values"]
    assert torch.equal(made, darker(images=[image], return_tensors="pt")["pixel_values"])
    path = pixel_path(Named(**CLIP))
    assert path is not None
    expected = Named(**CLIP)(images=[image], return_tensors="pt")["pixel_values"]
    assert torch.equal(path.image(image)["pixel_values"], expected)
    patched = CLIPImageProcessorPil(**CLIP)
    patched.normalize = lambda image, mean, std: image  # type: ignore[method-assign]
    assert pixel_path(patched) is None


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="pixels must be one of torch, pillow, processor, or None, got 'pil'"):
        pixel_path(CLIPImageProcessorPil(), "pil")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="pixels_dtype must be one of float32, bfloat16"):
        pixel_path(CLIPImageProcessorPil(), dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"'uint8' is not available for Darker.*differs from its program's"):
        pixel_path(Darker(), dtype="uint8")
    encoder = encoder_of("llava")

    class Own:
        image_token, video_token, merge_size = "<image>", None, 0

    with pytest.raises(ConfigurationError, match="pixels of the ChatConfig have no effect on a Own"):
        type(encoder)(encoder.tokenizer, Own(), ChatConfig(pixels="torch"))  # type: ignore[arg-type]


@pytest.mark.parametrize("frames", [1, 4, 5])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_videos_are_the_same_as_with_the_processor(family: str, frames: int) -> None:
    rng = np.random.default_rng(frames)
    clip = torch.from_numpy(rng.integers(0, 256, (frames, 3, 20, 33), np.uint8))
    sample = chat("<video>a", "b", videos=[VideoFrames(frames=clip, fps=2.0)])
    native_one, called = (
        encoder_of(family, ChatConfig(pixels=pixels)).encode(sample) for pixels in (None, "processor")
    )
    assert native_one.visual.keys() == called.visual.keys()
    for name, value in native_one.visual.items():
        assert torch.equal(value, called.visual[name]), name


def test_an_encoder_with_its_path_can_be_sent_to_a_process() -> None:
    for name in PROCESSORS:
        path = pixel_path(PROCESSORS[name]())
        assert path is not None
        image = noise(40, 50, seed=5)
        again = pickle.loads(pickle.dumps(path))
        assert torch.equal(again.image(image)["pixel_values"], path.image(image)["pixel_values"])


def bfloat16_table(means: Sequence[float], stds: Sequence[float]) -> np.ndarray:
    values = torch.arange(256, dtype=torch.float32) / 255
    table = (values - torch.tensor(means)[:, None]) / torch.tensor(stds)[:, None]
    return native.bits_of(table.to(torch.bfloat16)).view(np.uint16)


@pytest.mark.parametrize(
    ("mean", "std"), [(0.5, 0.5), (0.485, 0.229), (0.48145466, 0.26862954), (0.0, 1.0), (0.0, 0.5), (0.456, 0.25)]
)
def test_bfloat16_values_lie_on_lines(mean: float, std: float) -> None:
    """Where one did not, all would be looked up, which takes longer."""
    table = bfloat16_table([mean] * 3, [std] * 3)
    for (slope, start), expected in zip(
        np.frombuffer(native._lines(table.tobytes()), np.float32).reshape(3, 2), table, strict=True
    ):
        made = torch.from_numpy(np.arange(256, dtype=np.float32) * slope + start).to(torch.bfloat16)
        np.testing.assert_array_equal(native.bits_of(made).view(np.uint16), expected)


@pytest.mark.skipif(not native.COMPILED, reason="needs the compiled part")
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize(
    ("size", "frames", "layout"),
    [
        ((56, 84), 1, native.PixelLayout(patch=(14, 14), merge=2, times=2)),
        ((56, 84), 2, native.PixelLayout(patch=(14, 14), merge=2, times=2)),  # frames of a video
        ((392, 392), 1, native.PixelLayout(patch=(14, 14), merge=2, times=2)),  # large enough to go past the caches
        ((768, 512), 1, native.PixelLayout(patch=(16, 16))),
        ((64, 48), 1, native.PixelLayout(patch=(16, 16))),
        ((6, 10), 1, native.PixelLayout(patch=(3, 5), times=3)),
        ((300, 700), 1, native.PixelLayout()),  # row by row
        ((1, 1), 1, native.PixelLayout()),
        ((2, 5000), 1, native.PixelLayout()),  # rows that are too long for it
    ],
)
def test_values_lie_where_numpy_puts_them(
    used: str,
    size: tuple[int, int],
    frames: int,
    layout: native.PixelLayout,
    dtype: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (*((frames,) if frames > 1 else ()), *size, 3), np.uint8)
    tables = [rng.integers(0, 256, (3, 256)).astype(dtype)]
    if dtype == np.uint8:
        tables.append(np.tile(np.arange(256, dtype=np.uint8), (3, 1)))  # bytes as they are
    if dtype == np.uint16:
        tables.append(bfloat16_table((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)))
        tables.append(tables[-1].copy())
        tables[-1][1, 200] += 1  # no line has it
    for table in tables:
        behind = 16  # bytes that must stay as they are
        made, expected = (np.full(3 * math.prod(size) * layout.times + behind, 77, dtype) for _ in range(2))
        native.look_up(pixels, table, layout, made[:-behind])
        with monkeypatch.context() as patch:
            patch.setattr(native, "COMPILED", False)
            native.look_up(pixels, table, layout, expected[:-behind])
        np.testing.assert_array_equal(made, expected)


def test_arrays_that_do_not_fit_are_refused() -> None:
    if not native.COMPILED:
        pytest.skip("needs the compiled part")
    pixels, table = np.zeros((8, 8, 3), np.uint8), np.zeros((3, 256), np.float32)
    native.look_up(pixels, table, native.PixelLayout(patch=(4, 4)), np.empty(192, np.float32))
    for patch, out in (((3, 4), 192), ((4, 4), 191), ((4, 4), 384)):
        with pytest.raises(ValueError, match="do not fit"):
            native.look_up(pixels, table, native.PixelLayout(patch=patch), np.empty(out, np.float32))
    with pytest.raises(ValueError, match="do not fit"):
        native.look_up(pixels, table, native.PixelLayout(patch=(4, 4), merge=3), np.empty(192, np.float32))
    made = native.coefficients(8, 4, "bicubic")
    where, coefficients = made.where, made.memory
    good = [
        pixels,
        8,
        8,
        np.empty((4, 4, 3), np.uint8),
        np.empty(500, np.uint8),
        where,
        coefficients,
        where,
        coefficients,
        2,
        made.bits,
        made.bits,
    ]
    resample = native._compiled.resample
    resample(*good)
    wrongs = [(1, 9), (3, np.empty(47, np.uint8)), (4, np.empty(9, np.uint8)), (5, where + 5), (6, where)]
    for place, wrong in (*wrongs, (9, 3), (10, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            resample(*good[:place], wrong, *good[place + 1 :])


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pixels") / "captions"
    create_captioning_test_dataset(folder, num_train=12, num_val=0, image_size=12)
    return folder


def loader_of(captions: Path, **choices: Any) -> Any:
    encoder = encoder_of("llava", ChatConfig(**choices))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_savable_loader(get_train_dataset(captions, batch_size=2, task_encoder=encoder, worker_config=config))


def test_the_profile_belongs_to_the_state(captions: Path) -> None:
    loader = loader_of(captions)
    next(iter(loader))
    state = loader.save_state_rank()
    loader_of(captions, pixels="pillow").restore_state_rank(state)
    loader_of(captions, pixels="processor").restore_state_rank(state)
    with pytest.raises(SettingMismatchError, match="pixels='torch': the values of pixels depends on it"):
        loader_of(captions, pixels="torch").restore_state_rank(state)
    with pytest.raises(SettingMismatchError, match="pixels_dtype='bfloat16'"):
        loader_of(captions, pixels_dtype="bfloat16").restore_state_rank(state)


@pytest.mark.parametrize("profile", ["pillow", "torch"])
def test_the_encoder_of_any_processor_has_the_choice_too(profile: Any) -> None:
    encoder = encoder_of("llava")
    processor = image_processor_of("llava")
    made = MultiModalTaskEncoder(encoder.tokenizer, processor, pixels=profile)
    assert made.pixel_settings == ({} if profile == "pillow" else {"pixels": "torch"})
    assert math.isclose(made._path.norm[0, 0].item(), processor.image_mean[0] * 255, rel_tol=1e-6)  # type: ignore[union-attr]


class OwnDecoder(MultiModalTaskEncoder):
    decoder = SampleDecoder(image_decode="rgb8")


def test_the_encoder_of_any_processor_decodes_for_the_path_it_takes(tmp_path: Path) -> None:
    """Bytes for the native path, Pillow's images for a processor; one order, the same tokens, values and state."""
    data = create_captioning_test_dataset(tmp_path, num_val=0, image_size=40, image_format="jpg")
    tokenizer, processor = encoder_of("llava").tokenizer, image_processor_of("llava")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    found: dict[Any, tuple[list[Any], Any]] = {}
    for kind, pixels, form in (
        (MultiModalTaskEncoder, None, "fastrgb"),
        (MultiModalTaskEncoder, "processor", "pilrgb"),
        (OwnDecoder, None, "rgb8"),
    ):
        task_encoder = kind(tokenizer, processor, pixels=pixels)
        assert task_encoder.decoder.image_decode == form
        loader = get_savable_loader(
            get_train_dataset(data, batch_size=3, task_encoder=task_encoder, worker_config=config)
        )
        found[form] = list(islice(loader, 4)), loader.save_state_rank()
    batches, state = found["fastrgb"]
    for form in ("pilrgb", "rgb8"):
        assert found[form][1] == state
        for one, other in zip(batches, found[form][0], strict=True):
            assert one.__key__ == other.__key__
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.pixel_values, other.pixel_values)


def test_threads_do_not_share_memory() -> None:
    """Also where all of them run in one context, as executors may."""
    images = [noise(150 + number, 120, seed=number) for number in range(8)]
    alone = [native.resample(np.array(image), (200, 60), "bicubic") for image in images]
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            contexts = [copy_context() for _ in images]
            found = [
                pool.submit(context.run, native.resample, np.array(image), (200, 60), "bicubic")
                for context, image in zip(contexts, images, strict=True)
            ]
            for one, expected in zip(found, alone, strict=True):
                np.testing.assert_array_equal(one.result(), expected)

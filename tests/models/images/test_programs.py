"""The program of every image processor gives the bytes of the processor itself, or the processor is called."""

from __future__ import annotations

import importlib
import io
import logging
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from pictures import KINDS, encoded, sizes
from PIL import Image

pytest.importorskip("transformers")

import transformers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from energon_bridge.models.images import pixels as proofs
from energon_bridge.models.images.known_programs import PROGRAMS, draw_of
from energon_bridge.models.images.native import Handed, NativeImages
from energon_bridge.models.images.pixels import difference, pixel_path, program_of
from energon_bridge.models.images.programs import Program

LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))
COUNT = 500 if LONG else 20
BASES = {"PilBackend", "TorchvisionBackend"}
PLAIN = ("CLIPImageProcessor", "SiglipImageProcessor", "ChameleonImageProcessor")
"""Some of the processors that have no lines of their own."""
SMALL: dict[str, dict[str, Any]] = {
    "Idefics3ImageProcessor": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 48}},
    "SmolVLMImageProcessor": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 48}},
    "UltraVBertImageProcessor": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 48}},
    "GotOcr2ImageProcessor": {"size": {"height": 32, "width": 48}, "crop_to_patches": True},
    "Cohere2VisionImageProcessor": {"size": {"height": 48, "width": 48}, "max_patches": 6},
    "Ovis2ImageProcessor": {"size": {"height": 48, "width": 48}, "crop_to_patches": True},
    "DeepseekOcr2ImageProcessor": {"size": {"height": 96, "width": 96}, "tile_size": 64},
    "GraniteDoclingImageProcessor": {"size": {"height": 48, "width": 48}},
    "PerceptionLMImageProcessor": {"tile_size": 48, "max_num_tiles": 6},
    "AriaImageProcessor": {"split_image": True, "max_image_size": 490, "min_image_size": 60},
    "DeepseekVLHybridImageProcessor": {"high_res_size": {"height": 200, "width": 200}},
    "Gemma3ImageProcessor": {
        **{"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4},
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    "Gemma4ImageProcessor": {"max_soft_tokens": 70},
    "Gemma4UnifiedImageProcessor": {"max_soft_tokens": 70},
    "LlavaOnevisionImageProcessor": {
        "size": {"height": 32, "width": 32},
        "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96]],
    },
    "Llama4ImageProcessor": {"size": {"height": 48, "width": 48}, "max_patches": 6},
    "MllamaImageProcessor": {"size": {"height": 48, "width": 48}},
    "Step3p7ImageProcessor": {"size": {"height": 56, "width": 56}, "patch_size": 42},
    "Phi4MultimodalImageProcessor": {"size": {"height": 112, "width": 112}, "dynamic_hd": 6},
    "MuseGlimmerImageProcessor": {"max_image_tokens": 100},
    "Glm5NextImageProcessor": {"max_image_tokens": 100},
    "CohereCompassImageProcessor": {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 60}},
    "Molmo2ImageProcessor": {"max_crops": 4},
    "Lfm2VlImageProcessor": {"tile_size": 64, "max_image_tokens": 16, "min_image_tokens": 4},
}
"""Settings with which images of a few hundred pixels take all ways, and little time."""


def names() -> list[str]:
    """Return the image processors of transformers that draw something, for Pillow and for torchvision."""
    found = set(PLAIN) | {f"{name}Pil" for name in PLAIN}
    for classes in IMAGE_PROCESSOR_MAPPING_NAMES.values():
        found |= {name for name in (classes.values() if isinstance(classes, dict) else classes) if name}
    drawn = {f"{name}ImageProcessor" for name in PROGRAMS} | set(PLAIN)
    return sorted(name for name in found if name.removesuffix("Pil") in drawn)


def made(name: str) -> Any:
    """Return a processor, if it can be made here."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    try:
        processor = kind(**SMALL.get(name.removesuffix("Pil"), {}))
    except ImportError as error:
        pytest.skip(str(error).strip().partition("\n")[0])
    if not name.endswith("Pil") and type(processor).__name__.endswith("Pil"):
        pytest.skip(f"{name} needs torchvision")
    return processor


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    """Images of all modes and many sizes, as the files that hold them."""
    drawn = zip(sizes(COUNT, 400), (KINDS * COUNT)[:COUNT], strict=True)
    files = [encoded(kind, *size, seed=number) for number, (size, kind) in enumerate(drawn)]
    return [Image.open(io.BytesIO(file)) for file in files]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", names())
def test_a_program_gives_the_bytes_of_its_processor(name: str, images: list[Image.Image]) -> None:
    processor = made(name)
    for nested in (False, True):
        program = program_of(processor, nested=nested)
        assert isinstance(program, Program), program
    calls = [[image] for image in images] + [images[place : place + 2] for place in range(0, len(images) - 1, 7)]
    different = (difference(program, processor, call, {}, nested=True) for call in calls)
    assert not list(filter(None, different))


class Halved(transformers.LlavaNextImageProcessorPil):
    """A subclass with a rule of its own."""

    def rescale(self, image: Any, *args: Any, **kwargs: Any) -> Any:
        return super().rescale(image // 2, *args, **kwargs)


class Renamed(transformers.LlavaNextImageProcessorPil):
    """A subclass that changes nothing that matters."""

    def rescale(self, image: Any, *args: Any, **kwargs: Any) -> Any:
        return super().rescale(image, *args, **kwargs)


def test_a_subclass_is_proven_and_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    proofs.say_called.cache_clear()
    with caplog.at_level(logging.INFO, logger=proofs.__name__):
        assert pixel_path(Renamed()) is not None
        assert not caplog.records
        for _ in range(2):
            assert pixel_path(Halved()) is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert "calling Halved for images" in said
    assert "of an image of 1 x 40 (RGB), its pixel_values differs from its program's in" in said


def test_another_release_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.PixtralImageProcessorPil
    assert isinstance(program_of(kind()), Program)
    with monkeypatch.context() as changed:
        resize = kind.resize
        changed.setattr(
            kind, "resize", lambda self, image, *args, **kwargs: resize(self, image[:, ::-1], *args, **kwargs)
        )
        assert "its pixel_values differs" in str(program_of(kind()))
    assert isinstance(program_of(kind()), Program)
    with monkeypatch.context() as changed:
        preprocess = kind._preprocess

        def more(self: Any, *args: Any, **kwargs: Any) -> Any:
            return preprocess(self, *args, **kwargs) | {"more": torch.zeros(1)}

        changed.setattr(kind, "_preprocess", more)
        assert "it returns image_sizes, more, pixel_values" in str(program_of(kind()))
    with monkeypatch.context() as changed:  # a function that the program asks for has gone
        other = transformers.GotOcr2ImageProcessorPil
        changed.delattr(importlib.import_module(other.__module__), "get_optimal_tiled_canvas")
        assert "there is no get_optimal_tiled_canvas" in str(program_of(other(crop_to_patches=True)))


def test_an_image_that_is_not_drawn_goes_to_the_processor() -> None:
    """Emu 3 guesses where the channels of an image are, wrong for narrow ones."""
    processor = transformers.Emu3ImageProcessor()
    native = NativeImages(processor)
    wide, narrow = (Image.fromarray(np.full((size, 40, 3), 90, np.uint8)) for size in (30, 2))
    for images in ([wide], [narrow], [wide, narrow]):
        try:
            theirs = processor(images=images, return_tensors="pt")
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)[:20]):
                native(images=images, return_tensors="pt")
            continue
        ours = native(images=images, return_tensors="pt")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert native.only is not None


def test_arguments_of_a_call_are_the_numbers_of_its_program() -> None:
    processor = transformers.GotOcr2ImageProcessorPil(size={"height": 32, "width": 32})
    native = pickle.loads(pickle.dumps(NativeImages(processor)))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 130, 3), np.uint8))
    for options in ({}, {"crop_to_patches": True}, {"crop_to_patches": True, "max_patches": 4, "do_normalize": False}):
        ours, theirs = (one(images=[[image]], return_tensors="pt", **options) for one in (native, processor))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert len(native.programs) == 3
    assert all(isinstance(program, Program) for program in native.programs.values())
    assert native.size["height"] == 32
    assert native.only is None  # there are three
    listed = native(images=[image])["pixel_values"]  # the processor itself says what that is
    assert type(listed) is type(processor(images=[image])["pixel_values"])


def test_what_is_handed_on_has_a_size_and_no_pixels() -> None:
    handed = Handed.of(np.zeros((3, 5, 3), np.uint8))
    assert (handed.size, handed.mode, isinstance(handed, Image.Image)) == ((5, 3), "RGB", True)
    with pytest.raises(ValueError, match="made already"):
        np.asarray(handed)
    grey = np.zeros((3, 5), np.uint8)
    assert Handed.of(grey) is grey


def test_the_nearest_known_class_draws() -> None:
    assert draw_of(Halved()) is draw_of(transformers.LlavaNextImageProcessorPil())
    assert draw_of(object()) is None

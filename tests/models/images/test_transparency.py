"""What a model gets of a file is what its image processor makes of it, whatever its mode and the decoder's form."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import config_of
from families import FAMILIES, encoder_of, image_processor_of, tokenizer_of
from pictures import KINDS, TRANSPARENT, encoded
from PIL import Image, ImageOps

pytest.importorskip("transformers")

from transformers import CLIPImageProcessorPil

from energon_bridge import AugmentTaskEncoder, SampleDecoder, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import SampleError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.samples.sample_place import warned
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import ChatConfig
from energon_bridge.models.images.visual import as_pil, as_rgb
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import write_shard

FILES = {kind.replace(" ", "_"): encoded(kind, 40, 30, seed=number) for number, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with an image of every kind, all under the same name of a part."""
    folder = tmp_path_factory.mktemp("modes")
    (folder / "train").mkdir()
    write_shard(folder / "train" / "s.tar", {key: {"png": file, "txt": b"red"} for key, file in FILES.items()})
    prepare_dataset(
        folder,
        split=parse_patterns(["train:train/.*"]),
        dataset_yaml=render_dataset_yaml("CaptioningSample", {"image": "png", "caption": "txt"}),
        key_index=False,
    )
    return folder


def of_processor(processor: Any, file: bytes, *, autorotate: bool = False) -> dict[str, torch.Tensor]:
    with Image.open(io.BytesIO(file)) as image:
        return dict(processor(images=[ImageOps.exif_transpose(image) if autorotate else image], return_tensors="pt"))


def delivered(data: Path, encoder: Any, **options: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    settings = config_of(1, 0)
    loader = get_savable_loader(
        get_train_dataset(data, batch_size=1, worker_config=settings, task_encoder=encoder, **options)
    )
    for batch in islice(loader, len(FILES)):
        yield batch.sample_keys[0], {"pixel_values": batch.pixel_values, **batch.visual_inputs}


@pytest.fixture(autouse=True)
def said_anew() -> Iterator[None]:
    warned.clear()
    yield
    warned.clear()


FORMS: list[tuple[str | None, bool]] = [(None, False), ("pilrgba", True)]
MORE_FORMS: list[tuple[str | None, bool]] = [(None, True), ("pilrgb", False), ("torchrgb", True), ("rgba", False)]


@pytest.mark.parametrize("pixels", [None, "processor"])
@pytest.mark.parametrize(
    ("family", "form", "autorotate"),
    [*((family, *form) for family in FAMILIES for form in FORMS), *(("qwen2_vl", *form) for form in MORE_FORMS)],
)
def test_a_model_gets_what_its_processor_makes_of_the_file(
    data: Path, family: str, pixels: Any, form: str | None, autorotate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = encoder_of(family, ChatConfig(pixels=pixels, seq_length=4096, autorotate=autorotate))
    options = {} if form is None else {"image_decode": form}
    seen = set()
    for key, visual in delivered(data, encoder, **options):
        expected = of_processor(encoder.family.image_processor, FILES[key], autorotate=autorotate)  # type: ignore[union-attr]
        assert {name for name in visual if name in expected} == expected.keys()
        for name, value in expected.items():
            assert torch.equal(visual[name], value), (key, name)
        seen.add(key)
    assert seen == FILES.keys()
    assert not [message for message in caplog.messages if "transparent" in message]
    assert sum("turned by their EXIF or XMP" in message for message in caplog.messages) == (not autorotate)


class Outer(AugmentTaskEncoder):
    """Adds nothing."""


@pytest.mark.parametrize(
    ("wrapped", "pixels", "autorotate"),
    [(False, None, False), (False, "processor", True), (True, None, True), (True, "processor", False)],
)
def test_a_plain_encoder_gets_it_too(data: Path, wrapped: bool, pixels: Any, autorotate: bool) -> None:
    processor = image_processor_of("llava")
    encoder: Any = MultiModalTaskEncoder(tokenizer_of("llava"), processor, pixels=pixels, autorotate=autorotate)
    for key, visual in delivered(data, Outer(encoder) if wrapped else encoder):
        expected = of_processor(processor, FILES[key], autorotate=autorotate)
        assert torch.equal(visual["pixel_values"], expected["pixel_values"]), key


class Grey(CLIPImageProcessorPil):
    """Puts grey behind what is transparent."""

    def convert_to_rgb(self, image: Any, *args: Any, **kwargs: Any) -> Any:
        front = image.convert("RGBA")
        return np.array(Image.alpha_composite(Image.new("RGBA", front.size, (90, 90, 90, 255)), front).convert("RGB"))


def test_a_processor_that_is_called_sees_the_transparency(data: Path) -> None:
    processor = Grey(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    encoder = MultiModalTaskEncoder(tokenizer_of("llava"), processor)
    for key, visual in delivered(data, encoder):
        assert torch.equal(visual["pixel_values"], of_processor(processor, FILES[key])["pixel_values"]), key


@pytest.mark.parametrize("pixels", [None, "processor"])
def test_a_processor_that_fails_on_alpha_gets_white_behind_it(data: Path, pixels: Any) -> None:
    sizes: Any = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    lax, strict = CLIPImageProcessorPil(**sizes), CLIPImageProcessorPil(do_convert_rgb=False, **sizes)
    with pytest.raises(ValueError, match="4"):
        of_processor(strict, FILES["rgba"])
    encoder = MultiModalTaskEncoder(tokenizer_of("llava"), strict, pixels=pixels)
    for key, visual in delivered(data, encoder):
        # It takes RGB as it is: the colour that counts as transparent stays.
        with Image.open(io.BytesIO(FILES[key])) as image:
            expected = of_processor(strict if image.mode == "RGB" else lax, FILES[key])
        assert torch.equal(visual["pixel_values"], expected["pixel_values"]), key


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pixels", [None, "processor"])
def test_images_of_ones_own_have_white_behind_them(family: str, pixels: Any) -> None:
    from families import chat

    encoder = encoder_of(family, ChatConfig(pixels=pixels))
    for kind in TRANSPARENT:
        file = FILES[kind.replace(" ", "_")]
        with Image.open(io.BytesIO(file)) as image:
            image.load()
        expected = of_processor(encoder.family.image_processor, file)["pixel_values"]  # type: ignore[union-attr]
        rgba = np.array(image.convert("RGBA"))
        channels_first = torch.from_numpy(rgba).permute(2, 0, 1)
        for given in (image, rgba, channels_first, channels_first / 255.0):
            made = encoder.encode(chat("<image>a", "red", images=[given])).visual["pixel_values"]
            assert torch.equal(made, expected), kind
            frames = encoder.family.path and encoder.family.path.rgb(given)  # type: ignore[union-attr]
            assert frames is None or (frames == as_rgb(image)).all()


def test_black_writing_on_a_clear_ground_can_be_read() -> None:
    page = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    page.paste((0, 0, 0, 255), (10, 10, 20, 20))
    assert len(np.unique(as_rgb(page))) == 2
    assert as_pil(page).getpixel((0, 0)) == (255, 255, 255)
    assert as_pil(np.array(page.convert("LA"))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["torchrgb", "pilrgb", "l8"])
def test_decoders_drop_transparency_and_say_so(form: str, caplog: pytest.LogCaptureFixture) -> None:
    decoder = SampleDecoder(image_decode=form)
    opaque = io.BytesIO()
    Image.new("RGBA", (5, 5), (1, 2, 3, 255)).save(opaque, "PNG")
    with caplog.at_level(logging.WARNING, logger="energon_bridge"):
        decoder.decode("png", opaque.getvalue())
        assert not caplog.messages
        found, _ = (decoder.decode("png", FILES["rgba"]) for _ in range(2))
    assert ["images in part 'png' are transparent" in message for message in caplog.messages] == [True]
    with Image.open(io.BytesIO(FILES["rgba"])) as image:
        expected = np.array(image.convert("L" if form == "l8" else "RGB"))
    values = found.permute(1, 2, 0).mul(255).round().byte().numpy() if form == "torchrgb" else np.array(found)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("shape", [(3, 8, 5), (8, 8, 5), (8, 8, 0)])
def test_arrays_of_other_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match="of 1 to 4 channels, got ndarray of shape"):
        as_pil(np.zeros(shape, np.uint8))


def test_the_pixels_of_a_decoder_survive_pickling() -> None:
    import pickle

    decoder = SampleDecoder(image_decode="pilrgb").with_alpha("white")
    made = pickle.loads(pickle.dumps(decoder)).decode("png", FILES["rgba"])
    assert made.tobytes() == as_pil(decoder.decode("png", FILES["rgba"])).tobytes()
    assert made.tobytes() != SampleDecoder(image_decode="pilrgb").decode("png", FILES["rgba"]).tobytes()


@pytest.mark.parametrize(
    ("image", "complaint"),
    [
        (
            np.full((4, 4, 3), 70_000 // 2, np.uint16),
            "an image of uint16 has values from 35000 to 35000, expected 0 to 255",
        ),
        (torch.full((3, 4, 4), 255.0), "an image of float32 has values from 255 to 255, expected 0 to 1"),
        (torch.full((3, 4, 4), -2.1), "expected 0 to 1"),
        (torch.full((3, 4, 4), float("nan")), "expected 0 to 1"),
        (np.full((4, 4, 3), -1, np.int32), "expected 0 to 255"),
    ],
)
def test_values_that_would_wrap_or_be_cut_are_refused(image: Any, complaint: str) -> None:
    with pytest.raises(SampleError, match=complaint):
        as_pil(image)


def test_values_a_little_beyond_the_range_are_those_of_resizing() -> None:
    assert as_pil(torch.full((3, 2, 2), 1.1)).getpixel((0, 0)) == (255, 255, 255)
    assert as_pil(np.full((2, 2, 3), 255, np.int64)).getpixel((0, 0)) == (255, 255, 255)

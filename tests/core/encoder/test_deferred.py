"""Deferred images: sizes without pixels, pixels for what is delivered and for nothing else."""

from __future__ import annotations

import io
import shutil
import zlib
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import config_of, counts_of, deliver, digest, loaders_of
from PIL import Image

from energon_bridge import (
    CaptioningSample,
    Cooker,
    DefaultTaskEncoder,
    FileStoreCachePool,
    SampleDecoder,
    TextSample,
    basic_sample_keys,
    cooker,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.errors import DecodeError
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deferred")
    create_captioning_test_dataset(folder / "images", num_train=60, num_val=0, image_size=8)
    return folder / "images"


class ByWidth(DefaultTaskEncoder):
    """Packs images in threes, by what their headers say."""

    decoder = SampleDecoder(image_decode="torchrgb8", defer_images=True)

    def preencode_sample(self, sample: CaptioningSample) -> Any:
        assert isinstance(sample.image, DeferredImage)
        assert sample.image.size == (8, 8)
        return sample

    def postencode_sample(self, sample: Any) -> Any:
        assert sample.image.shape == (3, 8, 8)
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        assert all(isinstance(sample.image, DeferredImage) for sample in samples)
        return [samples[i : i + 3] for i in range(0, len(samples) // 3 * 3, 3)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        images = torch.cat([sample.image for sample in samples])
        return CaptioningSample.derive_from(samples[0], image=images, caption="")


class Plain(ByWidth):
    """The same, decoding everything that is drawn."""

    decoder = SampleDecoder(image_decode="torchrgb8")

    def preencode_sample(self, sample: CaptioningSample) -> Any:
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[i : i + 3] for i in range(0, len(samples) // 3 * 3, 3)]


def packed(data: Path, encoder: Any, **kwargs: Any) -> DatasetSpec:
    return get_train_dataset(
        data, worker_config=config_of(1, 0, **kwargs), batch_size=2, task_encoder=encoder, packing_buffer_size=12
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_pixels_come_for_what_is_delivered_only(data: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    original = DeferredImage.get
    monkeypatch.setattr(DeferredImage, "get", lambda self: decoded.append(self.part) or original(self))
    loader = get_savable_loader(packed(data, ByWidth(), decode_threads=threads))
    delivered = 0
    for batch in islice(loader, 60):
        delivered += sum(len(pack[2]) for pack in batch.__restore_key__[3])
    assert len(decoded) == delivered == 60 * 2 * 3


def test_the_stream_is_that_of_pixels_decoded_at_once(data: Path) -> None:
    expected = deliver(loaders_of(packed(data, Plain()), 1, 0), 60).digests
    assert deliver(loaders_of(packed(data, ByWidth()), 1, 2), 60).digests == expected
    state = deliver(loaders_of(packed(data, ByWidth()), 2, 1), 15, [15]).states[15]
    assert deliver(loaders_of(packed(data, ByWidth()), 3, 0, state=state), 10).digests == expected[30:60]
    (loader,) = loaders_of(packed(data, ByWidth()), 1, 0)
    batch = next(iter(loader))
    assert digest(loader.restore_sample(batch.__restore_key__)) == digest(batch)


def test_a_broken_image_costs_its_sample_and_not_the_pack(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "png")
    whole = buffer.getvalue()
    # The header of every fifth is there, so that its size is known; the pixels are not. Every seventh text is none.
    png, txt = (whole, whole[: len(whole) - 60]), (b"x", b"\xff")
    samples = {f"{n:03d}": {"png": png[n % 5 == 0], "txt": txt[n % 7 == 0]} for n in range(30)}
    (tmp_path / "train").mkdir()
    write_shard(tmp_path / "train" / "s.tar", samples)
    prepare_dataset(
        tmp_path,
        split=parse_patterns(["train:train/.*"]),
        dataset_yaml=render_dataset_yaml("CaptioningSample", {"image": "png", "caption": "txt"}),
        key_index=False,
    )
    for threads in (1, 3):
        (loader,) = loaders_of(packed(tmp_path, ByWidth(), decode_threads=threads), 1, 0)
        packs = [pack for batch in islice(loader, 30) for pack in batch.__restore_key__[3]]
        counts = counts_of(loader.save_state_rank())
        assert all(key[1] % 5 and key[1] % 7 for pack in packs for key in pack[2])
        assert {len(pack[2]) for pack in packs} >= {2, 3}
        assert counts["samples"] == sum(len(pack[2]) for pack in packs)
        assert counts["errors"] > 0

    class Unpacked(DefaultTaskEncoder):
        decoder, postencode_sample = ByWidth.decoder, ByWidth.postencode_sample

    (loader,) = loaders_of(
        get_train_dataset(tmp_path, worker_config=config_of(1, 0), batch_size=4, task_encoder=Unpacked()), 1, 0
    )
    rows = [row for batch in islice(loader, 30) for row in batch.__restore_key__[3]]
    assert {row[1] for row in rows} == {n for n in range(30) if n % 5 and n % 7}


def test_sizes_that_cannot_be_read_or_are_over_the_limit_are_named(data: Path) -> None:
    class Small(ByWidth):
        decoder = SampleDecoder(image_decode="torchrgb8", defer_images=True, max_pixels=63)

    image = SampleDecoder(defer_images=True).decode("left.jpg", b"no image")
    assert repr(image) == "DeferredImage('left.jpg', 8 bytes)"
    with pytest.raises(DecodeError, match=r"part 'left.jpg' \(8 bytes\) has no readable image size"):
        _ = image.size
    with pytest.raises(Exception, match=r"it has 8 x 8 pixels, more than the limit of 63"):
        next(iter(get_savable_loader(packed(data, Small()))))


@cooker(need_cache=True, need_primary=True)
def cook_four_ways(sample: dict[str, Any], primary: Any, cache: Any) -> dict[str, Any]:
    """Leave an image in a field, in a lazy file, in a lazy value, and in its store."""
    kept = cache.to_cache(sample["png"], "kept")
    assert isinstance(kept.get(), type(sample["png"]))  # before delivery it is what was given
    return basic_sample_keys(sample) | {
        "field": sample["png"],
        "file": cache.get_lazy(primary, ".png"),
        "kept": kept,
        "store": primary,
    }


class FourWays(DefaultTaskEncoder):
    """Gets each image as late as can be."""

    cookers = (Cooker(cook_four_ways),)

    def __init__(self, defer: bool) -> None:
        super().__init__()
        self.decoder = SampleDecoder(image_decode="torchrgb8", defer_images=defer)

    def postencode_sample(self, sample: Any) -> Any:
        images = [sample["field"], sample["file"].get(), sample["kept"].get(), sample["store"].get(".png")]
        assert [type(image) for image in images] == [torch.Tensor] * 4
        return TextSample(**basic_sample_keys(sample), text=str([image.sum().item() for image in images]))

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [[sample] for sample in samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


@pytest.mark.parametrize("packing_buffer_size", [None, 5])
def test_images_are_the_same_from_fields_caches_and_stores(
    data: Path, tmp_path: Path, packing_buffer_size: int | None
) -> None:
    crude = tmp_path / "crude"
    shutil.copytree(data, crude)
    (crude / ".nv-meta" / "dataset.yaml").write_bytes(render_dataset_yaml("CrudeWebdataset", None))
    found = []
    for defer in (False, True):
        for pool in (None, FileStoreCachePool(parent_cache_dir=tmp_path / "cache")):
            spec = get_train_dataset(
                crude,
                worker_config=config_of(1, 0),
                batch_size=2,
                task_encoder=FourWays(defer),
                packing_buffer_size=packing_buffer_size,
            )
            with closing(get_savable_loader(spec, cache_pool=pool)) as loader:
                found.append([text for batch in islice(loader, 12) for text in batch.text])
            if pool is not None:
                pool.close()
    assert len(set(found[0])) > 12
    assert found == [found[0]] * 4


def pictured(form: str, size: tuple[int, int] = (9, 7)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, form)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return the start of a JPEG that claims a size."""
    data = bytearray(pictured("JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


PNG_BOMB = bytearray(pictured("PNG"))
PNG_BOMB[16:24] = (20_000).to_bytes(4, "big") * 2
PNG_BOMB[29:33] = zlib.crc32(PNG_BOMB[12:29]).to_bytes(4, "big")


@pytest.mark.parametrize(
    "data",
    [
        *(pictured(form) for form in ("TGA", "PCX", "EPS", "SGI", "PDF")),
        bytes(PNG_BOMB),
        bomb(15_000, 15_000),
        bomb(9_000, 10_000),  # under Pillow's limit, over ours
        pictured("PNG")[:20],
        pictured("TIFF")[:40],
        pictured("GIF")[:8],
        b"\x89PNG\r\n\x1a\n\0\0\0\4IHDR\0\0\0\1\0\0\0\0",
        b"",
    ],
    ids=[*("TGA", "ICO", "PCX", "EPS", "SGI", "PNG bomb", "JPEG bomb", "large", "PNG", "TIFF", "GIF", "IHDR", "empty")],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_size_is_refused_where_decoding_is(data: bytes) -> None:
    deferred = SampleDecoder(image_decode="pilrgb", defer_images=True, max_pixels=80_000_000).decode("png", data)
    with pytest.raises(DecodeError, match="part 'png'"):
        deferred.get()
    with pytest.raises(DecodeError, match=r"part 'png' \(\d+ bytes\) has no readable image size"):
        _ = deferred.size


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF"])
def test_a_size_is_that_of_the_decoded_image(form: str) -> None:
    deferred = SampleDecoder(image_decode="pilrgb", defer_images=True).decode("png", pictured(form, (33, 21)))
    assert deferred.size == deferred.get().size == (33, 21)

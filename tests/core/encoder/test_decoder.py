"""The sample decoder: which part becomes what, and what happens to parts that are broken or dangerous."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import pickle
import sys
import tarfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paths import FIXTURES
from PIL import Image
from webdataset import tenbin

from energon_bridge.core.encoder import SampleDecoder
from energon_bridge.core.errors import ConfigurationError, DecodeError
from energon_bridge.models.images import arrays as array_codecs

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def saved(save: Any, *values: Any, **named: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *values, **named)
    return stream.getvalue()


JPEG = saved(Image.new("RGB", (4, 2), (10, 200, 30)).save, "JPEG")
NPY = saved(np.save, ARRAY)
PTH = io.BytesIO()
torch.save({"a": torch.ones(2)}, PTH)


@pytest.mark.parametrize(
    ("part", "data", "value"),
    [
        ("txt", "größe".encode(), "größe"),
        ("text", b"a", "a"),
        ("a.b.transcript", b"", ""),
        *((name, b"12\n", 12) for name in ("cls", "cls2", "index", "inx", "id")),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("meta.jsn", b"[]", []),
        ("txt.gz", gzip.compress(b"zipped", mtime=0), "zipped"),
        ("json.gz", gzip.compress(b"3", mtime=0), 3),
        ("unknown.gz", gzip.compress(b"raw", mtime=0), b"raw"),
        ("gz", b"not unpacked", b"not unpacked"),
        *((name, b"\x80\x04.", b"\x80\x04.") for name in ("pkl", "pickle", "pyd")),
        ("bin", b"\0", b"\0"),
        *((name, b"\xef\xbb\xbfa", "a") for name in ("txt", "TXT", "Text")),
        ("X.JSON", b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        ("CLS", b"12", 12),
        ("TXT.GZ", gzip.compress(b"zipped", mtime=0), "zipped"),
        ("", b"no extension", b"no extension"),
        ("h5", b"\x89HDF\r\n", b"\x89HDF\r\n"),
    ],
)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_parts_by_extension(part, data, value, kind):
    decoded = SampleDecoder().decode(part, kind(data))
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize("part", ["jpg", "JPG", "image.Jpeg", "x.png", "webp", "jpg.gz"])
def test_images_by_extension(part):
    data = gzip.compress(JPEG) if part.endswith("gz") else JPEG
    value = SampleDecoder().decode(part, memoryview(data))
    assert (value.dtype, tuple(value.shape)) == (torch.float32, (3, 2, 4))
    assert 0 <= value.min() < value.max() <= 1
    assert SampleDecoder(image_decode="pil").decode(part, data).size == (4, 2)


def test_arrays():
    decode = SampleDecoder().decode
    npy = decode("npy", NPY)
    npz = decode("npz", saved(np.savez_compressed, a=ARRAY, b=ARRAY[0]))
    tenbins = [decode(name, bytes(tenbin.encode_buffer([ARRAY, ARRAY[1]]))) for name in ("ten", "tb")]
    assert type(npz) is dict
    assert npz.keys() == {"a", "b"}
    assert [len(arrays) for arrays in tenbins] == [2, 2]
    for array in (npy, npz["a"], *(arrays[0] for arrays in tenbins)):
        np.testing.assert_array_equal(array, ARRAY, strict=True)
        assert array.flags.writeable
    np.testing.assert_array_equal(tenbins[0][1], ARRAY[1])
    assert decode("pth", PTH.getvalue())["a"].tolist() == [1, 1]


def safetensors_of(dtype: str, shape: list[int], places: list[int]) -> bytes:
    text = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": places}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(9)


def test_safetensors_are_those_of_the_library():
    from safetensors.torch import save

    tensors = {
        "latent": torch.randn(4, 3, 5, dtype=torch.bfloat16),
        "odd": torch.tensor([True]),
        "ids": torch.arange(7),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }
    found = SampleDecoder().decode("x.safetensors", save(tensors, metadata={"model": "vae"}))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        found[name].zero_()


class Payload:
    """What a hostile file would do on being unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of the data was run",))


def tenbin_chunk(length: int) -> bytes:
    return tenbin.magic_bytes + length.to_bytes(8, sys.byteorder, signed=True) + bytes(64)


@pytest.mark.parametrize(
    ("part", "data", "message"),
    [
        ("txt", b"\xff\xfe", "utf-8"),
        ("cls", b"one", "invalid literal"),
        ("json", b"{", "JSONDecodeError"),
        ("json", b"", "JSONDecodeError"),
        ("json", b"[" * 100_000, "RecursionError"),
        ("txt.gz", b"plain", "BadGzipFile"),
        ("txt.gz", gzip.compress(b"zipped", mtime=0)[:-9], "EOFError"),
        ("npy", NPY[:-1], "npy"),
        ("npy", saved(np.save, np.array([Payload()], dtype=object), allow_pickle=True), "allow_pickle"),
        ("npz", b"PK", "npz"),
        ("npz", NPY, "npz"),
        ("pth", pickle.dumps(Payload(), protocol=2), "UnpicklingError"),
        ("pth", saved(lambda stream: torch.save(Payload(), stream)), "UnpicklingError"),
        ("safetensors", b"short", "error"),
        ("safetensors", (1 << 40).to_bytes(8, "little"), "header has 1099511627776 bytes"),
        ("safetensors", safetensors_of("F32", [2], [0, 9]), "fit"),
        ("safetensors", safetensors_of("F32", [2], [4, 13]), "fit"),
        ("safetensors", safetensors_of("F32", [-2, -1], [0, 8]), ""),
        ("safetensors", safetensors_of("Q4", [2], [0, 8]), "Q4"),
        ("ten", b"not tenbin at all", "no tenbin chunk at byte 0"),
        ("ten", tenbin_chunk(-80), "no tenbin chunk at byte 0"),
        ("tb", tenbin_chunk(65), "no tenbin chunk at byte 0"),
        ("tb", b"~TenBin~", "struct.error|error"),
        ("jpg", JPEG[:-20], "Truncated"),
        ("x.png", b"no image", "none of JPEG"),
    ],
)
def test_broken_parts_are_named(part, data, message):
    with pytest.raises(DecodeError, match=rf"part '{part}' \(\d+ bytes\).*({message})"):
        SampleDecoder().decode(part, data)


def test_call_decodes_what_is_bytes():
    parts = {"__key__": "k", "__sources__": (), "txt": b"a", "cls": memoryview(b"4"), "ready.txt": "text", "n.json": 7}
    assert SampleDecoder()(parts) == {
        "__key__": "k",
        "__sources__": (),
        "txt": "a",
        "cls": 4,
        "ready.txt": "text",
        "n.json": 7,
    }
    assert parts["txt"] == b"a"


def test_guess_content_finds_images_under_any_name():
    guessing = SampleDecoder(guess_content=True, image_decode="rgb8")
    assert guessing.decode("photo", JPEG).shape == (2, 4, 3)
    assert guessing.decode("txt", b"text stays text") == "text stays text"
    assert guessing.decode("bin", b"\0") == b"\0"
    assert SampleDecoder().decode("photo", JPEG) == JPEG
    with pytest.raises(DecodeError, match="none of JPEG"):
        guessing.decode("jpg", b"no image")


@pytest.mark.parametrize(
    ("part", "package", "function"),
    [("mp", "msgpack", "unpackb"), ("msg", "msgpack", "unpackb"), ("cbor", "cbor2", "loads")],
)
def test_optional_codecs(monkeypatch, caplog, part, package, function):
    forget = array_codecs._first_installed.cache_clear
    for name in ("msgpack", "cbor2", "cbor"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    forget()
    with caplog.at_level(logging.WARNING):
        assert SampleDecoder().decode(part, b"abc") == b"abc"
        assert SampleDecoder().decode(part, b"abc") == b"abc"
    assert [package in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(**{function: lambda data: ["decoded", data]}))
    forget()
    assert SampleDecoder().decode(part, b"abc") == ["decoded", b"abc"]
    forget()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_decode": "torchrgb16"}, "image form 'torchrgb16'.*Did you mean"),
        ({"av_decode": "av"}, "AVDecoder, pyav"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        SampleDecoder(**settings)


def test_config_is_plain():
    config = SampleDecoder(image_decode="pil", video_decode_audio=True).config()
    assert json.loads(json.dumps(config)) == {
        "type": "SampleDecoder",
        "image_decode": "pil",
        "av_decode": "AVDecoder",
        "video_decode_audio": True,
        "guess_content": False,
        "defer_images": False,
        "image_target": None,
        "image_backend": "auto",
        "autorotate": False,
        "max_pixels": 89_478_485,
        "max_part_bytes": 2 << 30,
    }


def test_decoders_are_values():
    assert pickle.loads(pickle.dumps(SampleDecoder(image_decode="l"))) == SampleDecoder(image_decode="l")
    with pytest.raises(AttributeError):
        SampleDecoder().image_decode = "pil"  # type: ignore[misc]


def fixture_images() -> list[tuple[str, str, list[Any]]]:
    """Return (tar folder, member name, [dtype, shape, sha1]) of the images that megatron-energon 7.4.1 decoded."""
    expected = json.loads((FIXTURES / "expected.json").read_text())
    images = []
    for split in ("captioning:train", "captioning:val", "captioning:test", "vqa:train", "vqa:val"):
        folder = split.partition(":")[0]
        part = "jpg" if folder == "captioning" else "image.png"
        images += [(folder, f"{row['__key__']}.{part}", row["image"]["tensor"]) for row in expected[split]]
    return images


def test_fixture_images_have_the_bytes_of_the_rival():
    members: dict[tuple[str, str], bytes] = {}
    for folder in ("captioning", "vqa"):
        for path in (FIXTURES / folder).rglob("*.tar"):
            with tarfile.open(path) as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    if content is not None:
                        members[folder, member.name] = content.read()
    images = fixture_images()
    assert len(images) > 30
    for folder, name, (dtype, shape, sha1) in images:
        value = SampleDecoder(image_decode="torchrgb8").decode(name, members[folder, name])
        assert (str(value.dtype), list(value.shape)) == (dtype, shape)
        assert hashlib.sha1(value.contiguous().numpy().tobytes()).hexdigest() == sha1


@pytest.mark.parametrize(("failures", "fails"), [(3, False), (1000, True)])
def test_an_error_of_the_interpreter_is_tried_again(
    failures: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11's parser of literals, which numpy's headers need, is disturbed by other threads now and then."""
    left = iter(range(failures))

    def disturbed(data: bytes) -> str:
        if next(left, None) is not None:
            raise SystemError("AST constructor recursion depth mismatch")
        return "decoded"

    monkeypatch.setitem(array_codecs._CODECS, "npy", disturbed)
    if fails:
        with pytest.raises(DecodeError, match=r"part 'npy'.*SystemError"):
            SampleDecoder().decode("npy", b"")
    else:
        assert SampleDecoder().decode("npy", b"") == "decoded"

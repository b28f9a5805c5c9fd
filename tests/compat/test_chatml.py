"""Datasets of pickled lists of images, other pickles, and dataset classes with code of their own under the drop-in."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_forked
from PIL import Image

from energon_bridge import Cooker, DefaultTaskEncoder, ErrorPolicy, get_loader, get_val_dataset
from energon_bridge.compat import install, loading
from energon_bridge.core.encoder import SampleDecoder
from energon_bridge.core.errors import DecodeError, FatalSampleError, MetadataError, UntrustedCodeError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.tools.testing import write_shard

BRIDGE = "__module__: megatron.bridge.data.energon.task_encoder_utils\n__class__: ChatMLWebdataset\n"
OWN = "__module__: chatml_classes\n__class__: {}\n"
FIELDS = "field_map: {imgs: jpgs, conversation: json}\n"


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 3), (value, 0, 255 - value)).save(data, "PNG")
    return data.getvalue()


def write(path: Path, dataset_yaml: str, **more: Callable[[int], bytes]) -> Path:
    """Write four conversations of 0 to 3 images."""
    parts = {
        "json": lambda n: json.dumps([{"from": "human", "value": f"q{n}"}]).encode(),
        "jpgs": lambda n: pickle.dumps([png(10 * n + k) for k in range(n)]),
        **more,
    }
    path.mkdir()
    write_shard(path / "0.tar", {f"{n:03d}": {name: make(n) for name, make in parts.items()} for n in range(4)})
    prepare_dataset(path, split=parse_patterns(["val:.*"]), dataset_yaml=dataset_yaml.encode())
    return path


def samples(path: Path, workers: int = 0, **kwargs: Any) -> list[Any]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    return list(get_loader(get_val_dataset(path, batch_size=None, worker_config=config, **kwargs)))


def check(found: list[Any]) -> None:
    assert [len(sample.imgs) for sample in found] == [0, 1, 2, 3]
    for n, sample in enumerate(found):
        for k, image in enumerate(sample.imgs):
            assert image.shape == (3, 3, 4)
            assert image.dtype == torch.float32
            assert image[:, 0, 0].tolist() == pytest.approx([(10 * n + k) / 255, 0, (255 - 10 * n - k) / 255])
    assert [sample.conversation[0]["value"] for sample in found] == ["q0", "q1", "q2", "q3"]


@pytest.mark.parametrize("workers", [0, 1])
def test_lists_of_images_need_no_trust(workers: int, tmp_path: Path) -> None:
    check(samples(write(tmp_path / "data", BRIDGE + FIELDS), workers))


def test_videos_are_lists_of_lists(tmp_path: Path) -> None:
    fields = "field_map: {videos: videos, conversation: json}\n"
    found = samples(
        write(tmp_path / "data", BRIDGE + fields, videos=lambda n: pickle.dumps([[png(k) for k in range(n)], [png(9)]]))
    )
    assert [[len(video) for video in sample.videos] for sample in found] == [[n, 1] for n in range(4)]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nowhere/of/any/kind",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([Evil()], "contains posix.mkdir, which is not run"),
        (["text"], "expected the bytes of an image, found str"),
        (b"bytes", "expected 1 nested lists of the bytes of images, found bytes"),
    ],
)
def test_other_pickles_are_refused(value: Any, message: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data", BRIDGE + FIELDS, jpgs=lambda n: pickle.dumps(value))
    with pytest.raises(FatalSampleError, match=message):
        samples(data, error_policy=ErrorPolicy(on_error="raise"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04]r\xff\xff\xff\x0f.", "has an object number 268435455 in 9 bytes"),
        (b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"x.", "claims a size for which|exceeds|truncated|EOF"),
    ],
    ids=["table", "bytes"],
)
def test_pickles_cannot_claim_memory(data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        SampleDecoder(read_pickles=True).decode("pkl", data)


def test_numbers_that_look_like_claims_are_read() -> None:
    values = [float.fromhex("0x1.72ff0fff0fp+5")] * 50 + [b"r\xff\xff\xff\xff" * 20]
    assert SampleDecoder(read_pickles=True).decode("pkl", pickle.dumps(values)) == values


def test_tensors_that_a_process_with_megatron_core_pickled_are_read() -> None:
    data = pickle.dumps(torch.arange(3), 2)
    name = b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n"
    data = data.replace(b"ctorch.storage\n_load_from_bytes\n", name)
    assert name in data
    assert SampleDecoder(read_pickles=True).decode("pkl", data).tolist() == [0, 1, 2]


def test_sound_of_such_a_dataset_is_refused(tmp_path: Path) -> None:
    fields = "field_map: {audio: wav, conversation: json}\n"
    with pytest.raises(MetadataError, match=r"field `field_map`: .*turns the part 'wav' of a ChatML dataset"):
        samples(write(tmp_path / "data", BRIDGE + fields, wav=lambda n: b""))


PLAIN = {
    "a": [1, 2.5, None, True, "text", b"bytes", {3}, (4, 5)],
    "array": np.arange(6).reshape(2, 3),
    "number": np.float32(1.5),
    "tensor": torch.arange(6.0).to(torch.bfloat16),
    "ordered": OrderedDict(b=1),
}


@pytest.mark.parametrize(
    ("extension", "protocol"),
    [*(("pkl", number) for number in range(pickle.HIGHEST_PROTOCOL + 1)), ("pickle", 4), ("pyd", 4)],
)
def test_plain_pickles_are_read(extension: str, protocol: int) -> None:
    found = SampleDecoder(read_pickles=True).decode(extension, pickle.dumps(PLAIN, protocol))
    assert found["a"] == PLAIN["a"]
    assert np.array_equal(found["array"], PLAIN["array"])
    assert found["number"] == 1.5
    assert torch.equal(found["tensor"], PLAIN["tensor"])
    assert found["ordered"] == {"b": 1}


@pytest.mark.parametrize("value", [Evil(), pickle.loads, SampleDecoder])
def test_no_pickle_runs_what_it_names(value: Any) -> None:
    with pytest.raises(DecodeError, match="which is not run"):
        SampleDecoder(read_pickles=True).decode("pickle", pickle.dumps([value]))


def test_pickles_are_read_as_drop_in(tmp_path: Path) -> None:
    """The latents of video and image models: `pth` and `pickle`, cooked from a crude dataset."""
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    latents = pickle.dumps(torch.arange(3.0))
    data = write(tmp_path / "data", crude, pickle=lambda _: latents, pth=saved)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"batch_size": None, "worker_config": config, "task_encoder": Cooks()}
    found = list(loading.get_loader(loading.get_val_dataset(data, **settings)))
    assert [sample["text"].tolist() for sample in found] == [[0, 1, 2]] * 4
    assert [sample["latent"].tolist() for sample in found] == [[float(n)] for n in range(4)]
    assert Cooks.decoder == SampleDecoder()  # the program's own stays as it is
    assert samples(data, task_encoder=Cooks())[0]["text"] == latents


def saved(number: int) -> bytes:
    data = io.BytesIO()
    torch.save(torch.tensor([float(number)]), data)
    return data.getvalue()


def cook(sample: Any) -> Any:
    return {"__key__": sample["__key__"], "text": sample["pickle"], "latent": sample["pth"]}


class Cooks(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


# Classes of the user's ------------------------------------------------------------------------------------------------


def under_dropin(job: Callable[[], Any]) -> Any:
    def child(_: int) -> Any:
        install(trust_remote_code=True)
        import sys

        sys.path.insert(0, str(Path(__file__).with_name("dropin")))
        return job()

    return run_forked(1, child)[0]


def test_a_class_with_its_own_decoder_runs(tmp_path: Path) -> None:
    data = write(tmp_path / "data", OWN.format("Conversations") + FIELDS + "spec: torchrgb\nsubflavors: {a: b}\n")
    found = under_dropin(lambda: [(s.imgs, s.conversation, s.__subflavors__) for s in samples(data, 1, **TRUST)])
    assert [subflavors for _, _, subflavors in found] == [{"a": "b"}] * 4
    check([_Found(*one) for one in found])
    with pytest.raises(UntrustedCodeError, match=r"chatml_classes\.Conversations"):
        samples(data)


TRUST = {"trust_remote_code": True}


class _Found:
    def __init__(self, imgs: Any, conversation: Any, _: Any) -> None:
        self.imgs = imgs
        self.conversation = conversation


def test_a_class_of_older_versions_knows_how_images_are_decoded(tmp_path: Path) -> None:
    """Also in workers that make it anew, and each time it is opened."""
    fields = "field_map: {imgs: 0.png, conversation: json}\n"
    data = write(tmp_path / "data", OWN.format("Older") + fields, **{"0.png": png})

    def found() -> list[str]:
        kinds = []
        for given, workers in ({"image_decode": "pil"}, 0), ({}, 0), ({"image_decode": "rgb8"}, 1):
            config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
            settings = {"batch_size": None, "worker_config": config, "trust_remote_code": True, **given}
            sample = next(iter(loading.get_loader(loading.get_val_dataset(data, **settings))))
            kinds.append(f"{type(sample.imgs).__name__} {getattr(sample.imgs, 'dtype', '')}")
        return kinds

    assert under_dropin(found) == ["Image ", "Tensor torch.float32", "ndarray uint8"]


def test_a_class_with_its_own_load_sample_runs(tmp_path: Path) -> None:
    data = write(tmp_path / "data", OWN.format("Shouted") + "field_map: {conversation: json}\n")
    found = under_dropin(lambda: [sample.conversation for sample in samples(data, **TRUST)])
    assert found[2] == "[{'FROM': 'HUMAN', 'VALUE': 'Q2'}]"
    # The decoder that its `__init__` has by default is that of the run, which may decode nothing.
    plain = loading.with_decoder(None, None)
    found = under_dropin(lambda: [sample.conversation for sample in samples(data, task_encoder=plain, **TRUST)])
    assert found[2].startswith("B'[{")


@pytest.mark.parametrize(
    ("dataset_yaml", "message"),
    [
        (OWN.format("Builds") + FIELDS, "chatml_classes.Builds has its own build"),
        (OWN.format("Conversations") + FIELDS + "colour: red\n", "cannot make .*colour"),
    ],
)
def test_what_would_be_ignored_is_refused(dataset_yaml: str, message: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data", dataset_yaml)

    def refused() -> None:
        with pytest.raises(MetadataError, match=message):
            samples(data, **TRUST)

    under_dropin(refused)

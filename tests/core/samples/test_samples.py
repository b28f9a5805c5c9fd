"""Sample and batch types: fields by name, derivation, joining, pinning, and the names that dataset.yaml uses."""

from __future__ import annotations

import pickle
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch

from energon_bridge.core import samples
from energon_bridge.core.errors import ConfigurationError, UnknownArgumentError
from energon_bridge.core.samples import (
    Batch,
    CaptioningSample,
    CrudeSample,
    ImageSample,
    Sample,
    SourceInfo,
    TextSample,
    VQASample,
    add_source_info,
    edataclass,
    sample_type_by_name,
    sample_type_names,
)
from energon_bridge.core.samples.sample import SentSources, pin_value

SOURCE = SourceInfo("/data", 3, "a.tar", ("x.jpg",))
OTHER = SourceInfo("/more", "k", "b.tar", ("x.txt", "x.json"))

# Names, order and defaults are the interface; REQUIRED stands for "no default".
REQUIRED = object()
FIELDS = {
    "CaptioningSample": {"image": REQUIRED, "caption": REQUIRED},
    "ChatMLSample": {"conversation": REQUIRED, **dict.fromkeys(("imgs", "videos", "audio", "tools"))},
    "ImageSample": {"image": REQUIRED},
    "ImageClassificationSample": {"image": REQUIRED, "label": None, "label_name": None},
    "InterleavedSample": {"sequence": REQUIRED},
    "MultiChoiceVQASample": {"image": REQUIRED, "context": REQUIRED, "choices": None, "correct_choice_idx": None},
    "OCRSample": {
        "image": REQUIRED,
        "text": REQUIRED,
        **dict.fromkeys(("block_boxes", "block_classes", "block_text", "lines_boxes", "lines_text")),
        **dict.fromkeys(("words_boxes", "words_text", "chars_boxes", "chars_text")),
    },
    "SimilarityInterleavedSample": {
        **dict.fromkeys(("images", "texts"), REQUIRED),
        **dict.fromkeys(("audio", "video", "similarity_matrix", "matched_text_indices")),
    },
    "TextSample": {"text": REQUIRED},
    "VidQASample": {"video": REQUIRED, "context": REQUIRED, "answers": None, "answer_weights": None},
    "VQASample": {"image": REQUIRED, "context": REQUIRED, "answers": None, "answer_weights": None},
    "VQAOCRSample": {
        **dict.fromkeys(("image", "context", "text"), REQUIRED),
        **dict.fromkeys(("answers", "answer_weights", "words_boxes", "words_text")),
    },
}
META = {"__key__": REQUIRED, "__restore_key__": (), "__subflavors__": None, "__sources__": None, "__valid__": None}


@edataclass
class CaptionedText(TextSample):
    caption: str = ""


@edataclass
class LabelledCaption(CaptioningSample):
    label: int


@edataclass
class ImagesAndTexts(Batch):
    image: torch.Tensor
    text: list[str]
    weight: float = 1.0


def caption(key: str = "k", size: tuple[int, int] = (2, 3), **values: Any) -> CaptioningSample:
    return CaptioningSample(**{"__key__": key, "image": torch.ones(3, *size), "caption": f"caption {key}", **values})


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_each_type(name):
    cls = getattr(samples, name)
    found = {entry.name: REQUIRED if entry.default is MISSING else entry.default for entry in fields(cls)}
    assert found == META | FIELDS[name]
    assert list(found) == [*META, *FIELDS[name]]
    assert issubclass(cls, Sample)


@pytest.mark.parametrize("name", sample_type_names())
def test_every_type_has_its_old_name(name):
    old = name.removesuffix("Sample") + "Webdataset"
    assert name in {*FIELDS, "CrudeSample"}
    assert sample_type_by_name(name) is sample_type_by_name(old) is getattr(samples, name)


@pytest.mark.parametrize(("name", "near"), [("CaptionSample", "CaptioningSample"), ("os.system", "Known types")])
def test_unknown_type_names_the_nearest(name, near):
    with pytest.raises(UnknownArgumentError, match=f"{name}.*{near}"):
        sample_type_by_name(name)


def test_samples_are_slotted_and_keyword_only():
    sample = caption()
    with pytest.raises(AttributeError):
        sample.captoin = "typo"  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        TextSample("k", "text")  # type: ignore[misc]


def test_fields_by_name():
    sample = caption()
    assert sample["image"] is sample.image
    assert sample["caption"] == sample["text"] == "caption k"
    assert sample["__key__"] == "k"
    assert "image" in sample
    assert "text" in sample
    assert "label" not in sample
    assert dict(sample).keys() == {*META, "image", "caption"}
    assert TextSample(__key__="k", text="own")["text"] == "own"
    with pytest.raises(KeyError, match="VQASample has no field 'text'"):
        VQASample(__key__="k", image=None, context="?")["text"]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["label", "extend", 0])
def test_unknown_field_lists_the_fields(name):
    with pytest.raises(KeyError, match="__valid__, image, caption, text"):
        caption()[name]


def test_meta_has_no_part_in_equality_or_repr_beyond_its_own():
    sample = TextSample(__key__="k", text="t")
    assert sample == TextSample(__key__="k", text="t", __valid__=torch.tensor([True]))
    assert sample != TextSample(__key__="other", text="t")
    assert "__valid__" not in repr(sample)


class OwnRecord(NamedTuple):
    path: str
    line: int


@pytest.mark.parametrize("sources", [(), (SOURCE,), (OTHER, SOURCE), (SOURCE, OwnRecord("/own", 3)), ("x",)])
def test_sources_that_are_sent_arrive_as_a_plain_tuple_whatever_they_are(sources: tuple[Any, ...]):
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        arrived = pickle.loads(pickle.dumps(SentSources(sources), protocol))
        assert type(arrived) is tuple
        assert arrived == sources
        assert list(map(type, arrived)) == list(map(type, sources))


def test_derive_from_copies_the_meta_fields_only():
    mask = torch.tensor([True, False])
    base = caption(__restore_key__=("d", 1), __subflavors__={"a": 1}, __sources__=(SOURCE,), __valid__=mask)
    derived = TextSample.derive_from(base, text="new")
    assert derived == TextSample(
        __key__="k", __restore_key__=("d", 1), __subflavors__={"a": 1}, __sources__=(SOURCE,), text="new"
    )
    assert derived.__valid__ is mask
    assert TextSample.derive_from(base, text="new", __key__="other").__key__ == "other"


def test_derive_from_crude_sample_and_batch():
    crude = CrudeSample({"__key__": "k", "__restore_key__": ("d", 0), "json": {}})
    assert TextSample.derive_from(crude, text="t") == TextSample(__key__="k", __restore_key__=("d", 0), text="t")
    batch = Batch(__key__=["a", "b"], __valid__=torch.tensor([True, True]))
    derived = ImagesAndTexts.derive_from(batch, image=torch.ones(2), text=["x", "y"])
    assert derived.__key__ == ["a", "b"]
    assert derived.__valid__ is batch.__valid__


def test_extend_copies_all_fields_of_a_base_type():
    base = caption(__sources__=(SOURCE,))
    extended = LabelledCaption.extend(base, label=4)
    assert (extended.label, extended.caption, extended.__sources__) == (4, base.caption, (SOURCE,))
    assert extended.image is base.image
    with pytest.raises(TypeError, match=r"LabelledCaption.*got TextSample.*derive_from"):
        LabelledCaption.extend(TextSample(__key__="k", text="t"), label=1)


def test_from_joined_keeps_every_source_once():
    primary = TextSample(__key__="p", __restore_key__=(1,), __subflavors__={"a": 1}, __sources__=(SOURCE,), text="p")
    other = CaptionedText(__key__="o", __subflavors__={"b": 2}, __sources__=(OTHER,), text="o", caption="c")
    joined = CaptionedText.from_joined(primary, None, other)
    assert joined == CaptionedText(
        __key__="p", __restore_key__=(1,), __subflavors__={"a": 1}, __sources__=(SOURCE, OTHER), text="o", caption="c"
    )
    assert CaptionedText.from_joined(primary, None).text == "p"
    assert TextSample.from_joined(TextSample(__key__="p", text="p")).__sources__ is None
    assert CaptionedText.from_joined(primary, other, text="mine").text == "mine"


@pytest.mark.parametrize("sample", [TextSample(__key__="k", text="t"), CrudeSample({"__key__": "k"})])
def test_add_source_info(sample):
    add_source_info(sample, SOURCE)
    add_source_info(sample, OTHER, SOURCE)
    assert sample["__sources__"] == (SOURCE, OTHER, SOURCE)


def test_batch_from_samples_pads_and_stacks():
    rows = [caption("a", (2, 3), __sources__=(SOURCE,)), caption("b", (4, 1), __restore_key__=(7,))]
    batch = ImagesAndTexts.from_samples(rows)
    assert batch.image.shape == (2, 3, 4, 3)
    assert batch.image[0, :, :2, :3].eq(1).all()
    assert batch.image.sum() == rows[0].image.sum() + rows[1].image.sum()
    assert batch["text"] == ["caption a", "caption b"]
    assert batch.weight == 1.0
    assert (batch.__key__, batch.__restore_key__) == (["a", "b"], ((), (7,)))
    assert (batch.__subflavors__, batch.__sources__, batch.__valid__) == ([None, None], (SOURCE,), None)


def test_batch_from_samples_takes_values_and_any_kind_of_row():
    @dataclass
    class Plain:
        image: torch.Tensor

    plain = [Plain(torch.ones(2)), Plain(torch.zeros(2))]
    batch = ImagesAndTexts.from_samples(plain, __key__=["a", "b"], text=["x", "y"], weight=2.0)  # type: ignore[arg-type]
    assert batch.image.tolist() == [[1, 1], [0, 0]]
    assert (batch.text, batch.weight) == (["x", "y"], 2.0)
    crude = [CrudeSample({"__key__": "a", "image": torch.ones(1), "text": "x"})]
    assert ImagesAndTexts.from_samples(crude).text == ["x"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no samples"),
        ([ImageSample(__key__="a", image=torch.ones(1))], "not every ImageSample has text"),
        ([caption("a"), caption("b", image=torch.ones(2))], "one rank"),
    ],
)
def test_batch_from_samples_refuses(rows, message):
    with pytest.raises(ConfigurationError, match=message):
        ImagesAndTexts.from_samples(rows)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    inner: Any


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_what_torch_would_pin_on_many_threads_is_pinned_on_one(monkeypatch, dtype):
    empty_like = torch.empty_like
    asked = []

    def here(tensor: torch.Tensor, pin_memory: bool) -> torch.Tensor:  # there may be no accelerator
        asked.append(pin_memory)
        return empty_like(tensor)

    monkeypatch.setattr(torch, "empty_like", here)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    images = torch.randint(0, 100, (2, 200, 200, 3)).to(dtype).permute(0, 3, 1, 2)
    pinned = pin_value({"images": images})["images"]
    assert asked == [True]
    assert torch.equal(pinned, images)
    assert pinned.stride() == images.stride()
    assert pinned.data_ptr() != images.data_ptr()


def test_pin_memory_reaches_every_tensor(monkeypatch):
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor + 100

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    number = iter(range(10))

    def tensor() -> torch.Tensor:
        return torch.tensor([next(number)])

    nested = {"list": [tensor()], "pair": Pair(tensor(), "text"), "tuple": (tensor(), 1), "frozen": Frozen(tensor())}
    inner = TextSample(__key__="i", text="t", __valid__=tensor())
    batch = ImagesAndTexts(__key__=["a"], image=tensor(), text=[inner, nested], __sources__=(SOURCE,))  # type: ignore[list-item]
    copied: Any = batch.pin_memory()
    assert sorted(int(entry) for entry in pinned) == [0, 1, 2, 3, 4, 5]
    assert copied.image.tolist() == [105]
    assert batch.image.tolist() == [5]
    assert copied.text[0].__valid__.tolist() == [104]
    assert copied.text[1]["list"][0].tolist() == [100]
    assert copied.text[1]["pair"] == Pair(torch.tensor([101]), "text")
    assert copied.text[1]["frozen"].inner.tolist() == [103]
    assert nested["list"][0].tolist() == [0]
    assert copied.__sources__ is batch.__sources__

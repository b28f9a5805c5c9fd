"""The hooks of the task encoders, what they convert, and the mark that tells the engine whose code runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from energon_bridge.core.encoder import AugmentTaskEncoder, DefaultTaskEncoder, SampleDecoder, TaskEncoder, stateless
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples import Batch, CaptioningSample, TextSample, edataclass

HOOKS = ("encode_sample", "batch", "encode_batch")


@edataclass
class Encoded(TextSample):
    text: str
    length: int = 7


@edataclass
class Texts(Batch):
    text: list[str]
    length: list[int]


class Row(NamedTuple):
    caption: str
    weight: float = 1.0


def captions() -> list[CaptioningSample]:
    return [CaptioningSample(__key__=str(n), image=torch.full((3, 2, n), n), caption=f"c{n}") for n in (1, 2)]


def marks(encoder: Any) -> list[bool]:
    return [getattr(getattr(encoder, hook), "__default_hook__", False) for hook in HOOKS]


@pytest.mark.parametrize("cls", [TaskEncoder, DefaultTaskEncoder])
def test_defaults(cls):
    encoder = cls()
    samples = captions()
    assert encoder.encode_sample(samples[0]) is samples[0]
    batch = encoder.batch(samples)
    assert type(batch) is CaptioningSample
    assert batch.image.shape == (2, 3, 2, 2)
    assert encoder.encode_batch(batch) is batch
    assert marks(encoder) == [True, True, True]
    assert encoder.decoder == SampleDecoder()
    assert tuple(encoder.cookers) == ()
    assert encoder.__default_failure_tolerance__ == 100


def test_what_is_no_record_is_collated_by_what_it_is():
    encoder = DefaultTaskEncoder()
    assert encoder.batch([torch.ones(1), torch.ones(2)]).tolist() == [[1, 0], [1, 1]]
    assert encoder.batch(["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"encoded_sample_type": dict}, [False, True, True]),
        ({"raw_batch_type": dict}, [True, False, True]),
        ({"batch_type": dict}, [True, True, False]),
        ({"encoded_sample_type": Row, "raw_batch_type": Row, "batch_type": Row}, [False, False, False]),
    ],
)
def test_a_hook_that_converts_has_no_mark(settings, expected):
    assert marks(DefaultTaskEncoder(**settings)) == expected
    assert marks(DefaultTaskEncoder()) == [True, True, True]


@pytest.mark.parametrize("base", [TaskEncoder, DefaultTaskEncoder])
def test_a_hook_of_the_users_has_no_mark(base):
    class Own(base):
        def __init__(self) -> None:
            """Encoders often forget to call super().__init__()."""

        def batch(self, samples: list[Any]) -> Any:
            return super().batch(samples[:1])

    encoder = Own()
    assert marks(encoder) == [True, False, True]
    assert encoder.batch(captions()).caption == ["c1"]
    assert encoder.encode_sample(3) == 3


def test_an_override_goes_before_a_conversion_and_reaches_it_through_super():
    class Own(DefaultTaskEncoder[CaptioningSample, dict, dict, dict]):
        def encode_sample(self, sample: CaptioningSample) -> Any:
            return {**super().encode_sample(sample), "own": True}

    encoded = Own(encoded_sample_type=dict).encode_sample(captions()[0])
    assert (encoded["own"], encoded["caption"], encoded["__key__"]) == (True, "c1", "1")
    assert "__valid__" not in encoded


@pytest.mark.parametrize("kind", [DefaultTaskEncoder, AugmentTaskEncoder])
def test_a_hook_may_be_called_by_its_class(kind: Any) -> None:
    class Own(kind):
        def encode_sample(self, sample: Any) -> Any:
            return kind.encode_sample(self, sample)

        def batch(self, samples: Any) -> Any:
            return kind.batch(self, samples=samples)

        def encode_batch(self, batch: Any) -> Any:
            return kind.encode_batch(self, batch)

    settings: Any
    for settings, sample_type, batch_type in (({}, CaptioningSample, CaptioningSample), (TYPES, dict, dict)):
        encoder = Own(**settings) if kind is DefaultTaskEncoder else Own(DefaultTaskEncoder(**settings))
        encoded = [encoder.encode_sample(sample) for sample in captions()]
        assert type(encoded[0]) is sample_type
        batch = encoder.encode_batch(encoder.batch([{"text": "a", "length": 1}] if settings else encoded))
        assert type(batch) is batch_type


TYPES: dict[str, Any] = {"encoded_sample_type": dict, "raw_batch_type": dict, "batch_type": dict}


def test_conversion_to_each_kind_of_record():
    sample = captions()[0]
    encoded = DefaultTaskEncoder(encoded_sample_type=Row).encode_sample(sample)
    assert encoded == Row("c1")
    back = DefaultTaskEncoder(encoded_sample_type=TextSample).encode_sample(Encoded(__key__="k", text="t"))
    assert type(back) is Encoded  # it is a TextSample already
    text = DefaultTaskEncoder(encoded_sample_type=Encoded).encode_sample(TextSample(__key__="k", text="t"))
    assert text == Encoded(__key__="k", text="t", length=7)
    as_dict = DefaultTaskEncoder(batch_type=dict).encode_batch(encoded)
    assert as_dict == {"caption": "c1", "weight": 1.0}
    again = DefaultTaskEncoder(encoded_sample_type=TextSample).encode_sample({"__key__": "k", "text": "t", "more": 1})
    assert again == TextSample(__key__="k", text="t")


def test_conversion_along_the_whole_path():
    encoder: Any = DefaultTaskEncoder(encoded_sample_type=Encoded, raw_batch_type=Texts, batch_type=dict)
    rows = [encoder.encode_sample(TextSample(__key__=key, text=key * 2)) for key in "ab"]
    raw = encoder.batch(rows)
    assert raw == Texts(
        __key__=["a", "b"], __restore_key__=((), ()), __subflavors__=[None, None], text=["aa", "bb"], length=[7, 7]
    )
    assert encoder.encode_batch(raw) == {
        "__key__": ["a", "b"],
        "__restore_key__": ((), ()),
        "__subflavors__": [None, None],
        "__sources__": None,
        "text": ["aa", "bb"],
        "length": [7, 7],
    }


def test_a_missing_field_is_named():
    with pytest.raises(ConfigurationError, match=r"TextSample from the fields __key__, .*caption: text is missing"):
        DefaultTaskEncoder(encoded_sample_type=TextSample).encode_sample(captions()[0])


@pytest.mark.parametrize("setting", ["encoded_sample_type", "raw_batch_type", "batch_type"])
def test_types_without_fields_are_refused_at_once(setting):
    with pytest.raises(ConfigurationError, match="cannot fill a int"):
        DefaultTaskEncoder(**{setting: int})


def test_a_constructor_that_fails_in_the_users_code_is_not_taken_for_a_missing_field():
    @edataclass
    class Broken(TextSample):
        def __post_init__(self) -> None:
            raise TypeError("my own bug")

    with pytest.raises(TypeError, match=r"^my own bug$"):
        DefaultTaskEncoder(encoded_sample_type=Broken).encode_sample(TextSample(__key__="k", text="t"))


def test_hooks_have_their_documentation():
    for cls in (TaskEncoder, DefaultTaskEncoder):
        for hook in HOOKS:
            assert getattr(cls, hook).__doc__


def test_batch_helper_of_older_encoders():
    encoder = DefaultTaskEncoder()
    batch = encoder._batch(captions(), CaptioningSample, actions={"caption": "+".join})
    assert batch.caption == "c1+c2"


def test_stateless_marks_and_nothing_else():
    class Own(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return sample * 2

        @stateless(restore_seeds=True, failure_tolerance=3)
        def batch(self, samples: list[Any]) -> Any:
            return sum(samples)

    encoder = Own()
    assert encoder.encode_sample(4) == 8
    assert encoder.batch([1, 2]) == 3
    assert encoder.encode_sample.__stateless__
    assert not hasattr(encoder.encode_sample, "__failure_tolerance__")
    assert (encoder.batch.__stateless__, encoder.batch.__failure_tolerance__) == (True, 3)
    assert marks(encoder) == [False, False, True]

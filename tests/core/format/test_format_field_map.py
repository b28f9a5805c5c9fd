"""The field map: the whole grammar, what is needed, and errors at load and at access."""

from __future__ import annotations

import pickle

import pytest

from energon_bridge.core.errors import FieldAccessError, FieldMapError
from energon_bridge.core.format.field_map import FieldMap, check_fields
from energon_bridge.core.samples import CaptioningSample, VQASample

PARTS = {
    "jpg": "an image",
    "seg.png": "a mask",
    "json": {"caption": "hello", "a": [1, {"b": "deep"}], "empty": None, "7": "seven", "n": [[5, 6]]},
    "txt": "text",
}


@pytest.mark.parametrize(
    ("access", "value"),
    [
        ("jpg", "an image"),
        ("seg.png", "a mask"),
        ("json[caption]", "hello"),
        ("json[a][0]", 1),
        ("json[a][1][b]", "deep"),
        ("json[a][-1][b]", "deep"),
        ("json[n][0][1]", 6),
        ("json[7]", "seven"),
        ("json[empty]", None),
        ("png,jpg", "an image"),
        ("png, jpg", "an image"),
        ("jpg,png", "an image"),
        ("json[title],json[caption]", "hello"),
        ("json[a][9],txt", "text"),
        ("json[a][x],txt", "text"),
        ("json[caption][x],txt", "text"),
        ("txt[0],jpg", "an image"),
    ],
)
def test_access(access: str, value: object):
    assert FieldMap({"field": access})(PARTS) == {"field": value}


def test_fields_keep_their_order_and_the_needed_parts_are_known():
    field_map = FieldMap({"b": "json[caption],txt", "a": "jpg,png", "c": "seg.png"})
    assert field_map.parts == {"json", "txt", "jpg", "png", "seg.png"}
    assert list(field_map(PARTS).items()) == [("b", "hello"), ("a", "an image"), ("c", "a mask")]


@pytest.mark.parametrize(
    ("access", "hint"),
    [
        ("jpeg", " Did you mean 'jpg'?"),
        ("json[captoin]", " Did you mean 'json[caption]'?"),
        ("mp4", ""),
        ("json[a][2]", " Did you mean 'json[a]'?"),
        ("bmp,webp", ""),
        ("json[caption][0]", " Did you mean 'json[caption]'?"),
        ("json[empty][x]", " Did you mean 'json[empty]'?"),
    ],
)
def test_nothing_there_is_an_error_of_the_sample(access: str, hint: str):
    with pytest.raises(FieldAccessError) as caught:
        FieldMap({"image": access})(PARTS)
    assert (
        str(caught.value)
        == f"field `image`: nothing at {access!r}; the sample has the parts jpg, seg.png, json, txt." + hint
    )


@pytest.mark.parametrize("access", ["", ",", "json[", "json[]", "json[a]b", "[a]", "json]a[", "a,,b", "json[[a]]"])
def test_malformed_accesses_are_refused_at_load(access: str):
    with pytest.raises(FieldMapError, match=r"here, field `image`: cannot read the access"):
        FieldMap({"image": access}, where="here")


def test_the_map_must_fit_the_type():
    check_fields(FieldMap({"image": "jpg", "context": "txt", "__key__": "txt"}), VQASample, where="f")
    with pytest.raises(
        FieldMapError, match=r"f, field `context`: CaptioningSample has no such field; it has caption, image"
    ):
        check_fields(FieldMap({"image": "jpg", "caption": "txt", "context": "txt"}), CaptioningSample, where="f")
    with pytest.raises(FieldMapError, match="VQASample requires the field `context`"):
        check_fields(FieldMap({"image": "jpg", "answers": "json"}), VQASample, where="f")
    with pytest.raises(FieldMapError, match="field `__restore_key__`: CaptioningSample has no such field"):
        check_fields(FieldMap({"image": "a", "caption": "b", "__restore_key__": "c"}), CaptioningSample, where="f")


def test_a_map_travels_between_processes():
    field_map = FieldMap({"caption": "json[caption]"})
    copy = pickle.loads(pickle.dumps(field_map))
    assert copy == field_map
    assert hash(copy) == hash(field_map)
    assert copy(PARTS) == {"caption": "hello"}
    assert copy != FieldMap({"caption": "txt"})

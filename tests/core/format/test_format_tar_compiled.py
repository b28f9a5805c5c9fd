"""The compiled part that splits plain samples of a tar, against the Python code that reads them all."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from tar_builder import GNU, PAX, USTAR, tar_bytes

from energon_bridge.core.format import tar

split = pytest.importorskip("energon_bridge.core.format._tar", reason="it was not compiled").split

formats = pytest.mark.parametrize("tar_format", [USTAR, GNU, PAX], ids=["ustar", "gnu", "pax"])
places = st.sampled_from([*range(12), 99, 100, *range(123, 137), 156, 157, 257, 262, 263, 345])


def sample(*names: str, tar_format: int = USTAR) -> bytearray:
    members = [(name, name.encode() * 100 * number) for number, name in enumerate(names)]
    return bytearray(tar_bytes(members, tar_format=tar_format, end_marker=False))


@formats
@pytest.mark.parametrize("folder", ["", "./", "a/b.c/"])
def test_plain_samples_are_split(tar_format: int, folder: str):
    names = [f"{folder}0001.{part}" for part in ("jpg", "seg.png", "")]
    data = sample(*names, tar_format=tar_format)
    key, parts = split(memoryview(data), None)
    assert key == f"{folder}0001"
    assert [(part, bytes(view)) for part, view in parts.items()] == [
        ("jpg", b""),
        ("seg.png", names[1].encode() * 100),
        ("", names[2].encode() * 200),
    ]
    assert all(view.obj is data for view in parts.values())
    assert list(split(memoryview(data), frozenset(("jpg", "x")))[1]) == ["jpg"]


@formats
@pytest.mark.parametrize(
    "names",
    [("k",), (".k.a",), ("__k.a",), ("k.a", "l.a"), ("k.a", "k.a/"), ("k.a", "k.a/b"), ("é.a",), ("k\n.a",), ("k.\n",)],
)
def test_what_is_not_plain_is_left_to_python(names: tuple[str, ...], tar_format: int):
    assert split(memoryview(sample(*names, tar_format=tar_format)), None) is None


def test_a_part_twice_is_left_to_python_where_it_is_asked_for():
    data = memoryview(sample("k.a", "k.b", "k.a"))
    assert split(data, None) is split(data, frozenset("a")) is None
    assert [*split(data, frozenset("b"))[1]] == ["b"]


@given(
    damage=st.lists(st.tuples(st.integers(0, 4), places, st.sampled_from(b"\0 /.07\nak\xffx9")), max_size=3),
    tar_format=st.sampled_from([USTAR, GNU, PAX]),
    cut=st.sampled_from([0, 0, 1, 512, 513, 1024]),
    wanted=st.sampled_from([None, frozenset(("a", "é"))]),
)
def test_what_is_split_is_what_python_finds(damage, tar_format, cut, wanted):
    data = sample("d/k.a", "d/k.b", "d/k.é", tar_format=tar_format)
    for block, place, byte in damage:
        data[512 * block + place] = byte
    view = memoryview(data)[: len(data) - cut]
    found = split(view, wanted)
    if found is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tar, "_tar", None)
            assert found == tar.parse_sample(view, parts=wanted)


@pytest.mark.parametrize("arguments", [(), (b"",), (b"", None, None), ("text", None), (memoryview(b"abc")[::2], None)])
def test_arguments_that_are_no_sample_are_refused(arguments: tuple):
    assert split(memoryview(b""), None) is None
    with pytest.raises((TypeError, BufferError)):
        split(*arguments)


def test_errors_on_the_way_come_through():
    class Refusing:
        def __contains__(self, name: str) -> bool:
            raise KeyError(name)

    data = memoryview(sample("k.a"))
    with pytest.raises(KeyError, match="a"):
        split(data, Refusing())
    with pytest.raises(TypeError):
        split(data, 3)

"""Tar parsing against Python's tarfile, which megatron-energon reads with, and what it does with damaged tars."""

from __future__ import annotations

import io
import logging
import re
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tar_builder import GNU, PAX, USTAR, tar_bytes, write_tar

from energon_bridge.core.errors import CorruptShardError
from energon_bridge.core.format import tar as parsing
from energon_bridge.core.format.tar import parse_sample, sources_of, split_member_name
from energon_bridge.core.format.tar_index import ShardScan, scan_tar
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.storage import open_store

# The naming rule of the format, as the reference gives it.
NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
SKIPPED = re.compile(
    r"__[^/]*__($|/)|(.*/)?(\._|\.DS_Store)[^/]*$", re.DOTALL
)  # the second: what macOS adds to a folder

names = st.text(st.sampled_from("ab._/é\n "), min_size=1, max_size=12)
long_names = st.builds(lambda folder, name: folder * 60 + name, st.sampled_from(["ab/", "a.b/", "é/"]), names)


@pytest.fixture(params=["as it is", "by Python"], scope="module", autouse=True)
def splitting(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the compiled part split plain samples, if it is there, or Python."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "by Python":
            patch.setattr(parsing, "_tar", None)
        yield


def expected_samples(data: bytes) -> list[tuple[str, dict[str, bytes], int]]:
    """Read a tar the way megatron-energon does: (key, parts, offset of the first header) of every sample."""
    samples: list[tuple[str, dict[str, bytes], int]] = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            match = NAME.match(member.name)
            if not member.isreg() or SKIPPED.match(member.name) or match is None:
                continue
            content = tar.extractfile(member)
            assert content is not None
            if not samples or samples[-1][0] != match.group(1):
                samples.append((match.group(1), {}, member.offset))
            samples[-1][1][match.group(2)] = content.read()
    return samples


def read_back(path: Path) -> tuple[ShardScan, list[tuple[str, dict[str, bytes]]]]:
    """Scan a tar and read every sample by its range."""
    store = open_store(path.parent)
    scan = scan_tar(store, path.name)
    samples = []
    for start, end in pairwise(scan.offsets):
        key, parts = parse_sample(memoryview(store.read_range(path.name, start, end - start)), where="x")
        samples.append((key, {name: bytes(data) for name, data in parts.items()}))
    return scan, samples


@given(name=names | long_names)
def test_names_split_as_the_format_says(name: str):
    match = NAME.match(name)
    expected = None if match is None or SKIPPED.match(name) else match.groups()
    assert split_member_name(name) == expected


@given(
    members=st.lists(st.tuples(names | long_names, st.integers(0, 1100)), min_size=1, max_size=8),
    tar_format=st.sampled_from([USTAR, GNU, PAX]),
    end_marker=st.booleans(),
)
def test_any_tar_reads_like_tarfile(tmp_path_factory, members, tar_format, end_marker):
    contents = [
        (name, bytes([number + 1]) * (0 if name.endswith("/") else size))
        for number, (name, size) in enumerate(dict(members).items())
    ]
    try:
        data = tar_bytes(contents, tar_format=tar_format, end_marker=end_marker)
    except (ValueError, tarfile.HeaderError):
        return  # a name that ustar has no room for
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    path.write_bytes(data)
    expected = expected_samples(data)
    if not expected:
        with pytest.raises(CorruptShardError, match="no samples"):
            read_back(path)
        return
    scan, samples = read_back(path)
    assert samples == [(key, parts) for key, parts, _ in expected]
    assert scan.keys == [key for key, _, _ in expected]
    assert list(scan.offsets[:-1]) == [offset for _, _, offset in expected]
    for sample, name, offset, size in zip(
        scan.part_samples, scan.part_names, scan.part_offsets, scan.part_sizes, strict=True
    ):
        assert data[offset : offset + size] == expected[sample][1][name]


@pytest.mark.parametrize("tar_format", [USTAR, GNU, PAX])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 70_000])
def test_parts_are_views_in_the_order_of_the_tar(tar_format: int, size: int):
    members = [("f.o/k.seg.png", b"p" * size), ("f.o/k.json", b"{}"), ("f.o/k.", b"empty name")]
    data = tar_bytes(members, tar_format=tar_format, end_marker=False)
    key, parts = parse_sample(data)
    assert key == "f.o/k"
    assert {name: bytes(view) for name, view in parts.items()} == {
        "seg.png": b"p" * size,
        "json": b"{}",
        "": b"empty name",
    }
    assert list(parts) == ["seg.png", "json", ""]
    assert all(isinstance(view, memoryview) and view.obj is data for view in parts.values())


def test_sources_are_those_that_the_type_makes():
    found = sources_of("data/x", [3, 70_000], ["a.tar", "b.tar"], ["k", "f/\u00e9"], ["jpg", "seg.png"])
    assert found == [
        (SourceInfo("data/x", 3, "a.tar", ("k.jpg", "k.seg.png")),),
        (SourceInfo("data/x", 70_000, "b.tar", ("f/\u00e9.jpg", "f/\u00e9.seg.png")),),
    ]
    assert {type(one) for (one,) in found} == {SourceInfo}


def test_pax_records_in_front_of_nothing_are_refused():
    data = tar_bytes([("k.a", b"x"), ("k.b", b"y")], tar_format=PAX, end_marker=False)
    assert parse_sample(data)[1].keys() == {"a", "b"}
    with pytest.raises(CorruptShardError, match="cut off"):
        parse_sample(data[: len(data) - 1024])


def test_only_the_parts_asked_for_come_back():
    data = tar_bytes([("k.jpg", b"1"), ("k.json", b"2"), ("k.txt", b"3")], end_marker=False)
    key, parts = parse_sample(data, parts=frozenset({"json", "nope"}))
    assert (key, {name: bytes(view) for name, view in parts.items()}) == ("k", {"json": b"2"})
    assert parse_sample(data, parts=frozenset()) == ("k", {})


def test_folders_and_ignored_members_inside_a_range_are_skipped():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=USTAR) as tar:
        for name, kind in [
            ("k.a", b"0"),
            ("d/", b"5"),
            ("__meta__/k.x", b"0"),
            ("d/._k.b", b"0"),
            ("nodot", b"0"),
            ("k.b", b"0"),
        ]:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = 2 if kind == b"0" else 0
            tar.addfile(info, io.BytesIO(b"xy") if kind == b"0" else None)
        end = tar.offset
    key, parts = parse_sample(buffer.getvalue()[:end])
    assert (key, sorted(parts)) == ("k", ["a", "b"])


def header_with(**fields: tuple[int, bytes]) -> bytes:
    """Return a one-member tar whose header has these bytes at these places, checksum fitted."""
    data = bytearray(tar_bytes([("k.bin", b"x" * 700)], end_marker=False))
    for offset, value in fields.values():
        data[offset : offset + len(value)] = value
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


@pytest.mark.parametrize(
    "header",
    [
        header_with(size=(124, b"       1274 ")),  # spaces in front, a space behind
        header_with(size=(124, b"1274\0\0\0\0\0\0\0\0")),  # ended early
        header_with(size=(124, b"\x80" + bytes(9) + (700).to_bytes(2, "big"))),  # base 256
        header_with(kind=(156, b"\0")),  # the regular file of old tars
        header_with(kind=(156, b"7")),
        header_with(magic=(257, bytes(8))),  # before ustar
    ],
    ids=["spaces", "short", "base256", "old-type", "contiguous", "v7"],
)
def test_old_and_unusual_headers(header: bytes, tmp_path: Path):
    key, parts = parse_sample(header)
    assert (key, bytes(parts["bin"])) == ("k", b"x" * 700)
    (tmp_path / "x.tar").write_bytes(header + bytes(1024))
    assert read_back(tmp_path / "x.tar")[1] == [("k", {"bin": b"x" * 700})]
    assert expected_samples(header + bytes(1024))[0][:2] == ("k", {"bin": b"x" * 700})


def test_two_samples_in_a_range_mean_a_wrong_index():
    data = tar_bytes([("k.a", b"1"), ("l.a", b"2")], end_marker=False)
    with pytest.raises(
        CorruptShardError, match=r"here: the range of sample 'k' also contains 'l\.a'.*--tar-index-only"
    ):
        parse_sample(data, where="here")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff" * 1024, "no tar header at byte 0"),
        (b"", "no member of a sample"),
        (bytes(1024), "no member of a sample"),
        (tar_bytes([("k.a", b"1" * 600)], end_marker=False)[:-512], "ends at byte 1112, the range has 1024"),
        (tar_bytes([("k.a", b"1"), ("k.b", b"2" * 600)], end_marker=False)[:-512], "ends at byte 2136"),
        (
            tar_bytes([("k" * 200 + ".a", b"1")], tar_format=GNU, end_marker=False)[:700],
            "header at byte 0 is cut|cut off",
        ),
        (tar_bytes([("k.a", b"1")], end_marker=False)[:512].replace(b"00000000001", b"0000000000x"), "size|checksum"),
    ],
)
def test_garbage_is_a_corrupt_shard(data: bytes, message: str):
    with pytest.raises(CorruptShardError, match=message) as caught:
        parse_sample(data, where="DATASET, shard x.tar, sample 7")
    assert "DATASET, shard x.tar, sample 7" in str(caught.value)


def test_sparse_members_are_refused(tmp_path: Path):
    header = header_with(kind=(156, b"S"))
    with pytest.raises(CorruptShardError, match="sparse"):
        parse_sample(header, where="x")
    (tmp_path / "x.tar").write_bytes(header + bytes(1024))
    with pytest.raises(CorruptShardError, match="sparse"):
        read_back(tmp_path / "x.tar")


FIVE = [(f"{number}.bin", bytes([number]) * 3000) for number in range(5)]


@pytest.mark.parametrize("cut", [0, 100, 512 + 5, 3584 + 100, 3584 + 512, 3 * 3584 + 3000, 5 * 3584 - 1])
def test_a_truncated_tar_is_named_with_the_offset(tmp_path: Path, cut: int):
    path = write_tar(tmp_path / "x.tar", FIVE)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptShardError, match=rf"x\.tar.*byte {cut // 3584 * 3584}\b"):
        read_back(path)


def test_a_tar_cut_between_members_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(FIVE, end_marker=False))
    with caplog.at_level(logging.WARNING):
        assert len(read_back(path)[1]) == 5
    assert "no end-of-archive marker at byte 17920" in caplog.text


@pytest.mark.parametrize("offset", [0, 3584, 4 * 3584])
def test_a_damaged_header_is_named_with_the_offset(tmp_path: Path, offset: int):
    path = write_tar(tmp_path / "x.tar", FIVE)
    data = bytearray(path.read_bytes())
    data[offset + 3] ^= 1  # one bit of a name: only the checksum tells
    path.write_bytes(data)
    with pytest.raises(CorruptShardError, match=rf"x\.tar: no tar header at byte {offset}\b"):
        read_back(path)


@pytest.mark.parametrize("content", [b"", bytes(1024), tar_bytes([("folder/", b""), ("nodot", b"x")])])
def test_a_tar_without_samples_is_an_error(tmp_path: Path, content: bytes):
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(CorruptShardError, match=r"x\.tar: (no samples|cut off at byte 0)"):
        read_back(tmp_path / "x.tar")


def test_members_of_all_sizes_are_found_by_large_and_small_windows(tmp_path: Path):
    sizes = [*range(0, 4000, 97), 5_000_000, 3, 300_000, *[10] * 3000, 2_000_000, 2_000_000, 2_000_000, 5]
    members = [(f"{number:05d}.bin", b"x" * size) for number, size in enumerate(sizes)]
    scan, samples = read_back(write_tar(tmp_path / "x.tar", members))
    assert [len(parts["bin"]) for _, parts in samples] == sizes
    assert list(scan.part_sizes) == sizes


def test_names_that_are_not_utf8_are_refused_where_they_stand(tmp_path: Path):
    path = tmp_path / "x.tar"
    path.write_bytes(header_with(name=(0, b"\xff.bin")) + bytes(1024))
    with pytest.raises(CorruptShardError, match="at byte 0 is not UTF-8"):
        read_back(path)

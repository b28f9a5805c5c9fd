"""No part of a tar is lost in silence: links, parts twice or apart, names of macOS; by each command, and in loading.

What each sample must have is what Python's tarfile (or GNU tar) unpacks.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from clips import write_video
from commands import energon, output_of, refusal_of
from crude import Raw, parts_of
from keyed import CRUDE
from tar_builder import GNU, PAX, USTAR

from energon_bridge.core.encoder import SampleDecoder
from energon_bridge.core.format.nvmeta import read_info
from energon_bridge.core.format.tar_index import ShardScan
from energon_bridge.core.prepare import parse_ratio, prepare_dataset
from energon_bridge.core.storage import open_store
from energon_bridge.core.stores import WebdatasetFileStore
from energon_bridge.tools.check.lint import lint_encoded

LINK, HARD, PIPE, DEVICE = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE
FLAGS = ["--split-ratio", "0,1,0", "--sample-type", "CrudeWebdataset", "--no-progress", "--num-workers", "1"]
LONG = "a folder/" * 13
Entry = tuple[str, bytes | str] | tuple[str, bytes, str]  # a file, or a name with type and target


def refused(*arguments: object) -> str:
    """Return what a command that fails says, in one line."""
    return " ".join(refusal_of(*arguments).split())


def tar(path: Path, *entries: Entry, form: int = USTAR) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as out:
        for name, content, *target in entries:
            info = tarfile.TarInfo(name)
            if target:
                info.type, info.linkname = content, target[0]  # type: ignore[assignment]
                out.addfile(info)
            else:
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))  # type: ignore[arg-type]
    return path


def unpacked(path: Path) -> dict[str, bytes]:
    """Return what tarfile finds in the files of a tar, links followed."""
    with tarfile.open(path) as found:
        return {info.name: found.extractfile(info).read() for info in found if info.isfile() or info.islnk()}  # type: ignore[union-attr]


def loaded(root: Path, *, workers: int = 0) -> dict[str, bytes]:
    """Return the parts of all samples of a prepared dataset, as training gets them."""
    samples = parts_of(root, workers=workers)
    return {f"{key}.{name}": bytes(data) for key, parts in samples.items() for name, data in parts.items()}


LINKS: dict[str, list[Entry]] = {
    "of the sample in front": [("1.jpg", b"one"), ("1.txt", b"a"), ("2.jpg", HARD, "1.jpg"), ("2.txt", b"b")],
    "last in a sample": [("1.jpg", b"one"), ("1.txt", b"a"), ("2.txt", b"b"), ("2.jpg", HARD, "1.jpg")],
    "inside a sample": [("1.jpg", b"one"), ("1.seg.jpg", HARD, "1.jpg"), ("1.txt", b"a")],
    "a sample of links": [("1.jpg", b"one"), ("1.txt", b"a"), ("2.jpg", HARD, "1.jpg"), ("2.txt", HARD, "1.txt")],
    "a chain": [("1.jpg", b"one"), ("2.jpg", HARD, "1.jpg"), ("3.jpg", HARD, "2.jpg"), ("3.txt", b"")],
    "of a folder": [("./d/1.jpg", b"one"), ("./d/2.jpg", HARD, "./d/1.jpg"), ("./d/2.txt", b"b")],
    "with ./ in one name": [("./1.jpg", b"one"), ("./2.jpg", HARD, "1.jpg"), ("./2.txt", b"b")],
    "of a file of no sample": [("blob", b"one"), ("1.txt", b"a"), ("blob2", b"two"), ("1.jpg", HARD, "blob2")],
    "of a file that stands twice": [("x", b"one"), ("x", b"two"), ("1.jpg", HARD, "x"), ("x", b"three")],
    "long names": [(f"{LONG}1.jpg", b"one"), (f"{LONG}2.jpg", HARD, f"{LONG}1.jpg"), (f"{LONG}2.txt", b"b")],
    "an empty file": [("1.jpg", b""), ("2.jpg", HARD, "1.jpg")],
    "large": [("1.mp4", b"12345678" * 200_000), ("2.mp4", HARD, "1.mp4"), ("2.bin", b"x" * 1_100_000)],
}


@pytest.mark.parametrize(
    ("case", "form"),
    [*((case, USTAR) for case in LINKS if case != "long names"), ("long names", GNU), ("long names", PAX)],
)
def test_hard_links_are_followed_inside_the_tar(tmp_path: Path, case: str, form: int) -> None:
    path = tar(tmp_path / "in/s.tar", *LINKS[case], form=form)
    expected = {name: data for name, data in unpacked(path).items() if "." in name.rpartition("/")[2]}
    if case == "of a file that stands twice":
        expected = {"1.jpg": b"two"}  # tarfile takes the last of the name, unpacking the one that was there
    output_of("prepare", tmp_path / "in", *FLAGS)
    assert loaded(tmp_path / "in") == expected
    store = WebdatasetFileStore(tmp_path / "in")
    assert {name: store.read(name)[0] for name in expected} == expected
    for flags in ([], ["--keys", "number", "--bytes-per-shard", "3M"]):
        out = tmp_path / f"out{len(flags)}"
        output_of("convert", path, out, "--no-progress", "--num-workers", 2, "--split-ratio", "0,1,0", *flags)
        assert sorted(loaded(out).values()) == sorted(expected.values())
    assert loaded(tmp_path / "out0") == expected


def test_what_gnu_tar_makes_of_linked_files(tmp_path: Path) -> None:
    """It writes a hard link where a file has a second name; all pictures arrive, in workers as well."""
    if shutil.which("tar") is None:
        pytest.skip("needs tar")
    files = tmp_path / "files"
    files.mkdir()
    for number in range(4):
        (files / f"{number}.txt").write_text(f"text {number}")
    (files / "0.bin").write_bytes(b"picture")
    for number in (1, 2, 3):
        os.link(files / "0.bin", files / f"{number}.bin")
    (tmp_path / "in").mkdir()
    subprocess.run(["tar", "-cf", tmp_path / "in/s.tar", "--sort=name", "."], cwd=files, check=True)
    output_of("prepare", tmp_path / "in", *FLAGS)
    expected = {f"./{path.name}": path.read_bytes() for path in files.iterdir()}
    assert loaded(tmp_path / "in", workers=2) == expected
    assert "All 4 samples load." in energon("lint", tmp_path / "in", "--no-progress").output


def test_a_target_is_in_front_of_its_link(tmp_path: Path) -> None:
    """As tarfile and GNU tar have it; the message says so."""
    tar(tmp_path / "in/s.tar", *REFUSED["a target that comes later"][0])
    message = refused("prepare", tmp_path / "in", *FLAGS)
    assert "s.tar: '1.bin' is a hard link to '2.bin', which is not in front of it in this tar. Write the tar" in message
    assert "again with the files themselves: tar --hard-dereference." in message


def test_hard_links_need_the_key_index(tmp_path: Path) -> None:
    tar(tmp_path / "in/s.tar", *LINKS["last in a sample"])
    message = refused("prepare", tmp_path / "in", *FLAGS, "--no-key-index")
    assert "s.tar: has 1 hard links, which are looked up in the key index. Leave out --no-key-index" in message


def test_links_that_an_earlier_preparation_passed_over_are_refused_by_name(tmp_path: Path) -> None:
    """Such as megatron-energon's; the remedy finds them."""
    path = tar(tmp_path / "in/s.tar", *LINKS["last in a sample"], ("3.txt", b"c"))
    linked = path.read_bytes()
    path.write_bytes(linked.replace(b"2.jpg", b"2-jpg"))  # no part: an index that does not know it
    path.write_bytes(signed(path.read_bytes(), b"2-jpg"))
    prepare_dataset(tmp_path / "in", split=parse_ratio("0,1,0"), dataset_yaml=CRUDE)
    path.write_bytes(linked)
    output = refused("lint", tmp_path / "in", "--no-progress")
    message = "'2.jpg' is a hard link to '1.jpg', and the key index does not have it. Write the index again: energon"
    assert message in output
    output_of("prepare", tmp_path / "in", "--tar-index-only", "--no-progress")
    assert loaded(tmp_path / "in") == unpacked(path)


def signed(data: bytes, name: bytes) -> bytes:
    """Return a tar with the checksum of one header made right."""
    at = data.index(name)
    header = bytearray(data[at : at + 512])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + header + data[at + 512 :]


A, B = ("1.txt", b"a"), ("2.txt", b"b")
REFUSED: dict[str, tuple[list[Entry], str]] = {
    "a symbolic link": (
        [("1.bin", b"1"), A, ("2.bin", LINK, "1.bin"), B],
        "'2.bin' is a symbolic link to '1.bin'. Write the tar again with the files themselves: tar --dereference.",
    ),
    "a symbolic link out": ([A, B, ("2.bin", LINK, "../blobs/4f2a")], "'2.bin' is a symbolic link to '../blobs/4f2a'."),
    "a target that comes later": (
        [A, ("1.bin", HARD, "2.bin"), ("2.bin", b"2"), B],
        "'1.bin' is a hard link to '2.bin'",
    ),
    "a target that is missing": ([A, ("1.bin", HARD, "x.bin"), B], "'1.bin' is a hard link to 'x.bin'"),
    "a pipe": ([A, ("1.bin", PIPE, ""), B], "'1.bin' is a pipe, not a file."),
    "a device": ([A, ("2.bin", DEVICE, ""), B], "'2.bin' is a device, not a file."),
    "a part twice": (
        [("1.bin", b"1"), A, ("1.bin", b"other"), B],
        "'1.bin' is there twice in a row, with different content. Which one belongs to the sample? Unpacking keeps the "
        "last: keep the right one, and write the tar again.",
    ),
    "a link and a file of one name": (
        [("1.bin", b"1"), A, ("2.bin", b"2"), ("2.bin", HARD, "1.bin"), B],
        "'2.bin' is there twice in a row, with different content.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_part_is_refused_by_name_everywhere(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, message = REFUSED[case]
    path = tar(tmp_path / "in/s.tar", *entries)
    assert f"s.tar: {message}" in refused("prepare", tmp_path / "in", *FLAGS)
    assert not (tmp_path / "in/.nv-meta").exists()
    assert message in refused("convert", path, tmp_path / "out", "--no-progress", "--split-ratio", "0,1,0")
    output = output_of("convert", path, tmp_path / "out", "--split-ratio", "0,1,0", "--on-error", "skip")
    assert "Skipped 1 sample:" in output
    (kept,) = read_info(open_store(tmp_path / "out")).shard_counts.values()
    assert kept == 1
    with monkeypatch.context() as patch:  # as other releases and megatron-energon prepare it
        patch.setattr(ShardScan, "check", lambda self: None)
        prepare_dataset(tmp_path / "in", split=parse_ratio("0,1,0"), dataset_yaml=CRUDE)
    assert message in refused("lint", tmp_path / "in", "--no-progress")
    _, (problem,) = lint_encoded(str(tmp_path / "in"), "val", Raw())
    assert message in problem.message


APART = [("1.jpg", b"1"), ("2.jpg", b"2"), ("1.txt", b"a"), ("2.txt", b"b")]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            APART,
            "s.tar: the parts of the sample '1' are not adjacent: jpg, and after other samples txt. They are one "
            "sample. Write the tar again with its members sorted by name: tar --sort=name. The tar has 1 more",
        ),
        (
            [("k\u00e9.jpg", b"1"), ("ke\u0301.txt", b"a")],
            "s.tar: the keys 'k\\xe9' and 'ke\\u0301' are one name in two Unicode forms: jpg, and after other samples "
            "txt. They are one sample. Write the tar again with names of one form (convmv --nfc renames files).",
        ),
    ],
)
def test_samples_in_pieces_are_refused_by_each_command(
    tmp_path: Path, entries: list[Entry], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tar(tmp_path / "in/s.tar", *entries)
    for flags in ([], ["--no-key-index"]):
        assert message in refused("prepare", tmp_path / "in", *FLAGS, *flags)
    for source in (path, tmp_path / "in"):
        for flags in ([], ["--keys", "number"], ["--on-error", "skip"]):
            assert message in refused("convert", source, tmp_path / "out", "--no-progress", *flags)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(ShardScan, "check", lambda self: None)
        prepare_dataset(tmp_path / "in", split=parse_ratio("0,1,0"), dataset_yaml=CRUDE, key_index=False)
    assert message.partition("They are")[0] in refused("lint", tmp_path / "in", "--no-progress")


def test_a_member_without_extension_beside_a_sample_is_refused(tmp_path: Path) -> None:
    path = tar(tmp_path / "in/s.tar", ("README", b"of all"), ("1", b"picture"), A, B)
    message = "s.tar: '1' has no extension, so it is not a part of the sample '1'. Write the tar again with one: 1.jpg"
    for arguments in (["prepare", tmp_path / "in", *FLAGS], ["convert", path, tmp_path / "out", "--on-error", "skip"]):
        assert message in refused(*arguments)


def test_the_remedy_for_parts_apart_makes_whole_samples(tmp_path: Path) -> None:
    path = tar(tmp_path / "s.tar", *APART)
    (tmp_path / "files").mkdir()
    subprocess.run(["tar", "-xf", path, "-C", tmp_path / "files"], check=True)
    subprocess.run(["tar", "--sort=name", "-cf", path, "."], cwd=tmp_path / "files", check=True)
    energon("convert", path, tmp_path / "out", "--no-progress", "--split-ratio", "0,1,0", "--keys", "number")
    assert loaded(tmp_path / "out") == {
        "000000000.jpg": b"1",
        "000000000.txt": b"a",
        "000000001.jpg": b"2",
        "000000001.txt": b"b",
    }


def test_keys_with_other_parts_in_each_tar_get_no_new_keys(tmp_path: Path) -> None:
    """Pictures in one tar and texts in another: with new keys each would be half a sample."""
    tar(tmp_path / "in/i.tar", ("1.jpg", b"1"), ("2.jpg", b"2"))
    tar(tmp_path / "in/t.tar", ("2.txt", b"b"), ("3.txt", b"c"))
    for arguments in (
        ["prepare", tmp_path / "in", *FLAGS],
        ["convert", tmp_path / "in", tmp_path / "out", "--no-progress"],
        ["convert", tmp_path / "in", tmp_path / "out", "--no-progress", "--keys", "number"],
    ):
        output = refused(*arguments)
        assert "the key '2' has the parts jpg in " in output
        assert "prepare each folder, and join the datasets in a mix." in output
        assert not any(flag in output for flag in ("--keys number", "--no-key-index"))
    tar(tmp_path / "in/t.tar", ("2.jpg", b"b"), ("3.jpg", b"c"))
    assert "--keys number" in energon("convert", tmp_path / "in", tmp_path / "out", "--no-progress").output
    output_of(
        *("convert", tmp_path / "in", tmp_path / "out", "--no-progress", "--keys", "number", "--split-ratio", "0,1,0")
    )
    assert sorted(loaded(tmp_path / "out").values()) == [b"1", b"2", b"b", b"c"]


def test_the_remedy_for_equal_keys_keeps_all_samples(tmp_path: Path) -> None:
    first = tar(tmp_path / "in/1.tar", ("a.jpg", b"1"), ("a.txt", b"i"), ("b.txt", b"2"), ("c.txt", b"3"))
    second = tar(tmp_path / "in/2.tar", ("b.txt", b"4"), ("d.txt", b"5"), ("c.txt", b"6"), ("a.jpg", b"7"))
    wanted = sorted([*unpacked(first).values(), *unpacked(second).values()])
    message = refused("prepare", tmp_path / "in", *FLAGS)
    assert "the sample key 'b' is in '1.tar' and again in '2.tar', and so with 2 more of its keys" in message
    command = next(part for part in re.split("[:;] ", message) if part.startswith("energon convert")).split()
    places = {"SOURCE": tmp_path / "in", "OUT": tmp_path / "out"}
    named = [places.get(word, word) for word in command[1:]]
    assert named == ["convert", tmp_path / "in", tmp_path / "out", "--keys", "number"]
    output_of(*named, "--no-progress", "--split-ratio", "0,1,0")
    assert sorted(loaded(tmp_path / "out").values()) == wanted
    assert "energon convert SOURCE OUT --keys number" in refused("prepare", tmp_path / "in", "--fix-duplicates")
    output_of("prepare", tmp_path / "in", *FLAGS, "--no-key-index")


def test_equal_parts_are_one(tmp_path: Path) -> None:
    path = tar(tmp_path / "in/s.tar", ("1.jpg", b"1"), A, ("1.jpg", b"1"), ("2.jpg", HARD, "1.jpg"), B)
    output_of("prepare", tmp_path / "in", *FLAGS)
    assert loaded(tmp_path / "in") == unpacked(path)
    output_of("convert", path, tmp_path / "out", "--no-progress", "--split-ratio", "0,1,0")
    assert loaded(tmp_path / "out") == unpacked(path)


@pytest.mark.parametrize("form", [USTAR, GNU, PAX])
def test_what_macos_adds_is_no_part(tmp_path: Path, form: int) -> None:
    """bsdtar unpacks `._x` into the attributes of x; the Finder leaves .DS_Store."""
    mac = b"\0\5\x16\7\0\2\0\0Mac OS X"
    path = tar(
        tmp_path / "in/s.tar",
        *[("._d", mac), ("d/._.DS_Store", mac), ("d/.DS_Store", b"Bud1"), ("d/._1.jpg", mac), ("d/1.jpg", b"1")],
        *[("d/._1.txt", mac), ("d/1.txt", b"a"), ("__MACOSX/d/._1.txt", mac), ("d/._2.jpg", mac), ("d/2.jpg", b"2")],
        *[("d/2.txt", HARD, "d/1.txt"), ("._2.txt", mac)],
        form=form,
    )
    expected = {name: data for name, data in unpacked(path).items() if data[:2] != b"\0\5" and "DS_Store" not in name}
    output_of("prepare", tmp_path / "in", *FLAGS)
    assert loaded(tmp_path / "in") == expected
    output_of("convert", path, tmp_path / "out", "--no-progress", "--split-ratio", "0,1,0")
    assert loaded(tmp_path / "out") == expected


def test_sparse_members_are_named(tmp_path: Path) -> None:
    """Both of GNU's forms: a type of its own, and PAX records."""
    with (tmp_path / "1.bin").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x" * 10)
    for form in ("gnu", "posix"):
        (tmp_path / form).mkdir()
        command = ["tar", "--sparse", f"--format={form}", "-cf", tmp_path / form / "s.tar", "1.bin"]
        subprocess.run(command, cwd=tmp_path, check=True)
        for arguments in (["prepare", tmp_path / form, *FLAGS], ["convert", tmp_path / form, tmp_path / "out"]):
            output = refused(*arguments)
            assert "s.tar: the member '1.bin' at byte" in output
            assert "is sparse, which cannot be read by range. Write the tar again without --sparse." in output


def test_overwriting_keeps_the_tars_of_others(tmp_path: Path) -> None:
    """`--overwrite` is named as a remedy, so it must not cost a dataset that no conversion wrote."""
    tar(tmp_path / "in/s.tar", ("1.txt", b"new"))
    old = tar(tmp_path / "out/mine.tar", A, B)
    output_of("prepare", tmp_path / "out", *FLAGS)
    whole = old.read_bytes()
    arguments = ["convert", tmp_path / "in", tmp_path / "out", "--no-progress", "--split-ratio", "0,1,0"]
    assert "files of the same names are replaced, and so is .nv-meta" in refused(*arguments)
    output_of(*arguments, "--overwrite")
    assert (old.read_bytes(), loaded(tmp_path / "out")) == (whole, {"1.txt": b"new"})
    tar(tmp_path / "in/s.tar", ("2.txt", b"newer"))
    output_of(*arguments[:-1], "1,0,0", "--overwrite")  # its own tars go
    assert sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.tar")) == [
        "mine.tar",
        "train/00000.tar",
    ]


def test_tars_of_a_source_in_no_split_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, entry in (("a/s.tar", A), ("b/s.tar", B)):
        tar(tmp_path / "in" / name, entry)
    flags = [*FLAGS[2:], "--split-parts", "val:a/.*"]
    output_of("prepare", tmp_path / "in", *flags)
    output_of("convert", tmp_path / "in", tmp_path / "out", "--no-progress")
    assert "in: 1 of 2 tars are left out, such as b/s.tar: they are in no split part." in caplog.text
    tar(tmp_path / "in/c.tar", ("3.txt", b"c"))
    output_of("convert", tmp_path / "in", tmp_path / "out2", "--no-progress")
    assert "in: 2 of 3 tars are left out, such as b/s.tar" in caplog.text


def test_a_linked_video_of_a_large_sample_is_decoded_where_it_is(tmp_path: Path) -> None:
    """Samples of more than a mebibyte are read part by part; the target of a link is outside of its sample."""
    video = write_video(tmp_path / "1.mp4", frames=5).read_bytes() + bytes(3 << 20)  # larger than the sample
    big = b"x" * (1 << 20)
    tar(tmp_path / "in/s.tar", ("1.bin", big), ("1.mp4", video), ("2.bin", big), ("2.mp4", HARD, "1.mp4"))
    output_of("prepare", tmp_path / "in", *FLAGS)

    class Frames(Raw):
        decoder = SampleDecoder()

    samples = parts_of(tmp_path / "in", Frames()).values()
    one, two = (parts["mp4"].get_frames().video_clips[0] for parts in samples)
    assert one.shape[0] == 5
    assert one.equal(two)

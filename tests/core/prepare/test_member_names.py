"""Tars with unusual members and names, prepared and read by this package and by megatron-energon 7.4.1: item by item.

Both get the same tars. `REFUSED` lists what both refuse, `DIFFERENT` and `LESS` what only one of them does, and
docs/reference/file-formats.md says so.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import energon, output_of
from tar_builder import GNU, PAX, USTAR
from test_rival import ask_rival, read_with_ours

pytestmark = [pytest.mark.rival, pytest.mark.slow]

Item = str | tuple[str, bytes]  # the name of a regular member, or a name and the type of another one
LINK, HARD, FOLDER, FIFO, DEVICE = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE


def tar(*items: Item, form: int = USTAR, encoding: str = "utf-8", **pax: str) -> bytes:
    """Return a tar; the content of each member says which one it is. `pax` are global records."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding=encoding, pax_headers=pax or None) as out:
        for number, item in enumerate(items):
            name, kind = item if isinstance(item, tuple) else (item, tarfile.REGTYPE)
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "first.txt" if kind in (LINK, HARD) else ""
            content = f"{number}: {name}".encode() if kind == tarfile.REGTYPE else b""
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


LONG = "a folder.with.dots/" * 9
Shards = dict[str, bytes]
CASES: dict[str, Shards] = {
    "dots": {"a.tar": tar("a.txt", "a.seg.mask.png", "b..txt", "c.", "d", "e.TXT", "e.txt", ".f.txt", "g/.h.txt")},
    "dots in folders": {"a.tar": tar("x.y/a.txt", "x.y/a.b.txt", "x.y/b", "x.y.z/a.txt", "x/../a.txt", "../b.txt")},
    "folders": {"a.tar": tar("./a.txt", "a.txt", "b//c.txt", "b/c.txt", "./b/c.txt", "/d.txt", "b/d/e/f.txt")},
    "case": {"a.tar": tar("A.txt", "a.txt", "B.JPG", "B.jpg", "b.Jpg")},
    "spaces and signs": {"a.tar": tar("a b.txt", " c.txt", "d .txt", "e'\"%&;$.txt", "f\\g.txt", "h\ti.txt", "-j.txt")},
    "line ends": {"a.tar": tar("a\nb.txt", "c.t\nx", "d\n.txt", "e.txt\n", "f/\n/g.txt")},
    **{
        f"unicode, {form}": {"a.tar": tar("ké/ü.txt", "ké/ü.jpg", "ke\u0301.txt", "漢字/字.文", "🙂.txt", form=form)}
        for form in (USTAR, GNU, PAX)
    },
    "latin-1 names": {"a.tar": tar("a.txt", "kürz.txt", form=GNU, encoding="latin-1")},
    "long, ustar": {"a.tar": tar(f"{LONG[:150]}/a.txt", f"{LONG[:150]}/a.jpg", f"{'k' * 95}.txt", "b.txt")},
    "long, gnu": {"a.tar": tar(f"{LONG}a.txt", f"{LONG}a.jpg", f"{'k' * 300}.txt", "b.txt", form=GNU)},
    "long, pax": {"a.tar": tar(f"{LONG}a.txt", f"{LONG}a.jpg", f"{'ü' * 300}.txt", "b.txt", form=PAX)},
    "long links": {"a.tar": tar(f"{LONG}a.txt", (f"{LONG}b.txt", LINK), f"{LONG}a.jpg", "b.txt", form=GNU)},
    "global pax records": {"a.tar": tar("a.txt", "a.jpg", "b.txt", form=PAX, comment="made by a test")},
    "folders between samples": {
        "a.tar": tar(("d/", FOLDER), "d/a.txt", ("e.f/", FOLDER), "d/b.txt", ("g.txt/", FOLDER))
    },
    "a folder inside a sample": {"a.tar": tar("a.txt", ("x/", FOLDER), "a.jpg", "b.txt")},
    "links between samples": {"a.tar": tar("first.txt", ("l.txt", LINK), "b.txt", ("h.txt", HARD), "c.txt")},
    "links inside a sample": {"a.tar": tar("first.txt", "a.txt", ("a.png", LINK), ("a.gif", HARD), "a.jpg")},
    "hard links": {"a.tar": tar("first.txt", "first.jpg", "a.txt", ("a.png", HARD), "b.txt", ("c.txt", HARD))},
    "pipes and devices": {"a.tar": tar("a.txt", ("p.txt", FIFO), "b.txt", ("d.txt", DEVICE), "c.txt")},
    "meta members": {
        "a.tar": tar("__meta__/a.txt", "__x__", "__y__/z/b.txt", "a.txt", "__meta__.txt", "b/__meta__/c.txt", "__c.txt")
    },
    "meta inside a sample": {"a.tar": tar("a.txt", "__meta__/x.json", "a.jpg", "b.txt")},
    "no key inside a sample": {"a.tar": tar("a.txt", "README", "a.jpg", "b.txt")},
    "parts apart": {"a.tar": tar("a.txt", "b.txt", "a.jpg")},
    "a key in two tars": {"a.tar": tar("a.txt"), "b.tar": tar("b.txt", "a.txt")},
    "a part twice": {"a.tar": tar("a.txt", "a.txt", "b.txt")},
    "a tar without samples": {"a.tar": tar("README"), "b.tar": tar("a.txt")},
    "an empty tar": {"a.tar": tar(), "b.tar": tar("a.txt")},
    "no end": {"a.tar": tar("a.txt", "b.txt")[: 4 * 512]},
    "after the end": {"a.tar": tar("a.txt", "b.txt") + b"x" * 5000},
    "cut off": {"a.tar": tar("a.txt", "b.txt")[: 3 * 512 + 100]},
    "tgz": {"a.tar": tar("a.txt"), "b.tgz": gzip.compress(tar("b.txt"), mtime=0)},
    "compressed, called tar": {"a.tar": gzip.compress(tar("a.txt", "b.txt"), mtime=0)},
    "names of shards": {"ü b/x.y.tar": tar("a.txt"), "c d/'e\".tar": tar("b.txt"), "UP.TAR": tar("c.txt")},
    "braces in the names of shards": {"{1..2}.tar": tar("c.txt"), "{a,b}.tar": tar("d.txt")},
    "a folder called tar": {"c.tar/d.tar": tar("a.txt")},
    "order of shards": {
        name: tar(f"{name[:-4]}.txt")
        for name in ("10.tar", "2.tar", "a/1.tar", "B.tar", "a.tar", "a-b/1.tar", "a/b.tar")
    },
}


def write(root: Path, shards: Shards) -> Path:
    for name, data in shards.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


PREPARE = ["--non-interactive", "--no-progress", "--num-workers", "1", "--split-ratio", "1,0,0"]
PREPARE += ["--sample-type", "CrudeWebdataset"]

REFUSED = {  # by both: what ours says
    "latin-1 names": "a.tar: the name 'k\\udcfcrz.txt' at byte 1024 is not UTF-8. Write the tar again with UTF-8 names",
    "parts apart": "a.tar: the parts of the sample 'a' are not adjacent: txt, and after other samples jpg",
    "a key in two tars": "the sample key 'a' is in 'a.tar' and again in 'b.tar'",
    "a tar without samples": "a.tar: no samples before the end of the archive at byte 1024. Leave",
    "an empty tar": "a.tar: no samples before the end of the archive at byte 0. Leave it out with --exclude",
    "cut off": "cut off: member 'b.txt' at byte 1024 ends at byte 2048, the file has 1636 bytes",
}
LESS = {  # refused by ours, which says this; megatron-energon reads the rest, without the part
    "long links": "b.txt' is a symbolic link to 'first.txt'. Write the tar again with the files themselves: tar",
    "links between samples": "'l.txt' is a symbolic link to 'first.txt'",
    "links inside a sample": "'a.png' is a symbolic link to 'first.txt'",
    "pipes and devices": "'p.txt' is a pipe, not a file.",
    "a part twice": "'a.txt' is there twice in a row, with different content",
}
DIFFERENT = {  # what ours says, or "" if it reads the samples; what megatron-energon ends with
    "tgz": ("b.tgz: compressed tars cannot be read by range", "ReadError('truncated header')"),
    "compressed, called tar": ("a.tar: compressed tars cannot be read by range", "ReadError('truncated header')"),
    "a folder called tar": ("", "AssertionError('Shard c.tar has no samples.')"),
    "braces in the names of shards": ("", "AssertionError('Shard 1.tar has no samples.')"),
}


@pytest.fixture(scope="module")
def rival(run_rival: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what megatron-energon makes of each case: one run for all."""
    root = tmp_path_factory.mktemp("rival")
    jobs = [
        {"path": str(write(root / str(number), shards)), "prepare": PREPARE, "parts": ["train"], "lookup": []}
        for number, shards in enumerate(CASES.values())
    ]
    return dict(zip(CASES, ask_rival(run_rival, jobs), strict=True))


def test_hard_links_are_read_here_and_passed_over_there(tmp_path: Path, rival: dict[str, Any]):
    root = write(tmp_path, CASES["hard links"])
    output_of("prepare", root, *PREPARE)
    ours, theirs = read_with_ours(root, "train"), rival["hard links"]["samples"]["train"]
    parts = [[(sample["key"], *sample["fields"]["text"]) for sample in found] for found in (ours, theirs)]
    assert parts[0] == [("first", "txt", "jpg"), ("a", "txt", "png"), ("b", "txt"), ("c", "txt")]
    assert parts[1] == [("first", "txt", "jpg"), ("a", "txt"), ("b", "txt")]
    assert ours[1]["fields"]["text"]["png"] == ours[3]["fields"]["text"]["txt"] == "0: first.txt"


@pytest.mark.parametrize("name", [name for name in CASES if name != "hard links"])
def test_the_same_samples_or_a_documented_difference(name: str, tmp_path: Path, rival: dict[str, Any]):
    root = write(tmp_path, CASES[name])
    result = energon("prepare", root, *PREPARE)
    message, theirs = DIFFERENT.get(name, (REFUSED.get(name, LESS.get(name, "")), ""))
    assert result.exit_code == (1 if message else 0), result.output
    assert message in " ".join(result.output.split())
    if theirs:
        assert rival[name]["error"] == theirs
    elif message:
        assert bool(rival[name]["error"]) is (name in REFUSED)
    if message or theirs:
        assert not message or not (root / ".nv-meta").exists()
        return
    assert rival[name]["error"] == ""
    assert read_with_ours(root, "train") == rival[name]["samples"]["train"]
    for written in (*root.rglob("*.idx"), root / ".nv-meta/split.yaml"):
        assert written.read_bytes() == (Path(rival[name]["path"]) / written.relative_to(root)).read_bytes()

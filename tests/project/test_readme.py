"""The Python code of the README and the docs runs as it stands, and links lead somewhere."""

from __future__ import annotations

import io
import re
import sys
import tarfile
from pathlib import Path

import pytest
from pages import PAGES, README, blocks, name_of
from paths import REPOSITORY
from titan import stand_in

DATA, MORE, VIDEOS = "/data/captions", "/data/more", "/data/videos"  # the paths of datasets in the documents


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    from energon_bridge.tools.testing import create_captioning_test_dataset

    for name in ("captions", "more"):
        create_captioning_test_dataset(tmp_path / name)
    return tmp_path / "captions"


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from clips import write_video

    from energon_bridge.core.prepare import parse_ratio, prepare_dataset
    from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
    from energon_bridge.tools.testing import write_shard

    folder = tmp_path_factory.mktemp("docs") / "videos"
    folder.mkdir()
    film = write_video(folder / "film.mp4", options={"x264-params": "log-level=0"}, sound="aac").read_bytes()
    write_shard(folder / "0.tar", {str(n): {"mp4": film, "txt": b"what is it?"} for n in range(4)})
    yaml = render_dataset_yaml("VidQASample", {"video": "mp4", "context": "txt"})
    prepare_dataset(folder, split=parse_ratio("1,0,0"), dataset_yaml=yaml)
    return folder


@pytest.mark.parametrize(
    ("document", "line", "code"),
    [
        pytest.param(path, *block, id=f"{name_of(path)} line {block[0]}")
        for path in PAGES
        if path.name != "start.md"  # its programs and commands belong together: tests/project/test_docs.py
        for block in blocks("python", path)
    ],
)
def test_python_block(document, line, code, dataset, tmp_path, monkeypatch, request, capsys):
    proves = (DATA, MORE, VIDEOS, "assert ")
    assert any(text in code for text in proves), "a block that loads nothing and asserts nothing proves nothing"
    monkeypatch.chdir(tmp_path)  # blocks may write files
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = "\n" * (line - 1) + code.replace(DATA, str(dataset)).replace(MORE, str(dataset.parent / "more"))
    if VIDEOS in code:
        code = code.replace(VIDEOS, str(request.getfixturevalue("videos")))
    with monkeypatch.context() as patch:
        stand_in(patch)
        patch.setattr(sys, "meta_path", list(sys.meta_path))  # what a block installs goes with it
        exec(compile(code, str(document), "exec"), {"__name__": "__main__"})
    for name in [name for name in sys.modules if name.startswith("megatron.energon")]:
        del sys.modules[name]


def anchors(document: Path) -> set[str]:
    """Return what links to headings of a document are called, as GitHub does it."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


BESIDE = [REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]


@pytest.mark.parametrize("document", [*PAGES, *BESIDE], ids=name_of)
def test_links_lead_somewhere(document):
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_every_page_is_three_clicks_away_at_most():
    pages, found = {README}, {README}
    for _ in range(3):
        links = {
            (page.parent / link.partition("#")[0]).resolve()
            for page in pages
            for link in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", page.read_text())
            if not link.startswith("http")
        }
        pages = {page for page in links if page.exists()} - found
        found |= pages
    assert [page.name for page in PAGES if page not in found] == []


def write_raw_dataset(path: Path) -> None:
    from PIL import Image

    path.mkdir()
    for shard in range(10):
        with tarfile.open(path / f"shard_{shard}.tar", "w") as tar:
            for key in range(3):
                image = io.BytesIO()
                Image.new("RGB", (16, 16), (10 * shard, 20 * key, 0)).save(image, "JPEG")
                for part, data in (("jpg", image.getvalue()), ("txt", b"a caption")):
                    member = tarfile.TarInfo(f"{shard}{key}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))

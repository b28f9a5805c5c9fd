"""Pages of `energon preview --html`, in headless Chromium: what somebody sees, and that hostile data does nothing."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import previews
import pytest
from browser import Page, browser
from commands import answer, energon, output_of, refusal_of
from hostile import LONG
from keyed import write_mix
from paths import CONFIGS, REPOSITORY
from PIL import Image

from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

COUNT = 130
"""Captions: pages of 60, so that there is a last one."""
COLORS = """
[...document.querySelectorAll('h1, h3, .key, .token.learned, .token.special, .token.image')].map((one) => {
  let ground = one;
  while (getComputedStyle(ground).backgroundColor.endsWith(', 0)')) ground = ground.parentElement;
  return [getComputedStyle(one).color, getComputedStyle(ground).backgroundColor];
})
"""
"""The colours of texts of all kinds, and of what is behind them."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages-captions") / "captions"
    return create_captioning_test_dataset(folder, num_train=COUNT, num_val=0)


def pages_of(folder: Path, *arguments: object) -> Path:
    """Write pages, and return the one to open."""
    output_of("preview", *arguments, "--html", folder)
    return folder / "index.html"


@pytest.fixture(scope="module")
def mixed(captions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of captions and conversations, whose texts are searched in three files."""
    folder = tmp_path_factory.mktemp("pages-mixed")
    mix = previews.mix_of(folder / "mix.yaml", captions=captions, chats=previews.chats(folder / "chats.jsonl", 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("energon_bridge.tools.preview.pages._PER_SEARCH_FILE", 50)
        return pages_of(folder / "out", mix, "--samples", "all")


@pytest.fixture(scope="module")
def packed(captions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of two packed batches, on one rank."""
    packing = ("--encoder", "previews:encoder", "--batch-size", 2, "--packing-buffer-size", 10)
    return pages_of(tmp_path_factory.mktemp("pages-packed") / "out", captions, *packing, "--batches", 2)


def test_a_gallery_is_paged(page: Page, mixed: Path) -> None:
    page.open(mixed)
    assert page.texts("#count") == [f"{COUNT + 9} samples"]
    assert page.texts(".card .key") == [f"train-{n:05d}" for n in range(60)]
    assert page.texts(".card .excerpt")[7].endswith("picture 7")
    page.wait("document.images[0].naturalWidth === 16")
    page.click("#next")
    assert page.texts("#page") == ["page 2 of 3"]
    assert page.texts(".card .key")[0] == "train-00060"
    page.click("#next")
    assert page.texts(".card .key") == [*(f"train-{n:05d}" for n in range(120, COUNT)), *map(str, range(9))]
    assert page.run("document.querySelector('#next').disabled")
    page.run("history.back(); 0")
    page.wait("document.querySelector('#page')?.innerText === 'page 2 of 3'")
    assert page.problems() == []
    assert {address.split(":")[0] for address in page.requests()} == {"file"}


def test_a_search_finds_keys_and_texts(page: Page, mixed: Path) -> None:
    page.open(mixed)
    page.enter("#search", "PICTURE 12")
    assert page.texts("#count") == [f"11 of {COUNT + 9} samples"]
    assert page.texts(".card .key") == ["train-00012", *(f"train-{n:05d}" for n in range(120, COUNT))]
    page.enter("#search", "train-00033")
    assert page.texts(".card .key") == ["train-00033"]
    page.enter("#search", "nothing has this")
    assert page.texts(".card") == []
    assert "No sample has that" in page.texts("#grid")[0]
    page.enter("#search", "")
    page.enter("#dataset", "1")
    assert page.texts("#count") == [f"9 of {COUNT + 9} samples"]
    page.enter("#search", "turn 3")
    assert page.texts(".card .key") == ["2", "5", "8"]
    assert page.problems() == []


def test_a_conversation_has_its_turns(page: Page, mixed: Path) -> None:
    page.open(mixed, f"#/sample/{COUNT + 2}")
    assert page.texts("#key") == ["2"]
    assert page.texts(".turn .role") == ["user", "assistant", "user", "assistant"]
    assert page.texts(".turn .text") == [f"turn {turn} of 2" for turn in range(4)]
    page.click("main button:last-of-type")
    assert page.texts("#key") == ["3"]
    assert page.texts(".turn .role") == ["user", "assistant"]
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true})); 0")
    page.wait("document.querySelector('#key')?.innerText === '2'")


def test_a_sample_says_where_it_is_from(page: Page, captions: Path, mixed: Path) -> None:
    page.open(mixed, "#/sample/17")
    facts = dict(zip(page.texts(".facts dt"), page.texts(".facts dd"), strict=True))
    assert facts == {"dataset": str(captions), "shard": "train/shard_001.tar", "sample": "17", "bytes": "2,560"}
    assert page.texts(".panel h3") == ["image", "caption"]
    assert page.texts("figcaption") == ["16 × 16"]


def test_an_overview_has_shares_and_histograms(page: Page, captions: Path, mixed: Path) -> None:
    page.open(mixed, "#/overview")
    rows = [row.split("\t") for row in page.texts("#shares tbody tr")]
    assert [row[1:4] for row in rows] == [[str(COUNT), str(COUNT), "33.3 %"], ["9", "9", "66.7 %"]]
    names = page.texts(".chart h3")
    assert names == ["bytes", "characters of text", "width of pictures", "height of pictures", "turns"]
    assert page.texts(".chart .text") == ["all 16", "all 16"]
    bars = "[...document.querySelectorAll('.chart')].at(-1).querySelectorAll('rect')"
    heights = page.run(f"[...{bars}].map((bar) => Number(bar.getAttribute('height')))")
    assert heights == [150, 150, 150]  # two, three and four turns: three conversations each
    assert page.problems() == []


def test_a_mix_is_shown_over_a_run(page: Page, captions: Path, tmp_path: Path) -> None:
    """As `energon plan` forecasts it, with the weights moving."""
    chats = previews.chats(tmp_path / "chats.jsonl", 9)
    moving = {"schedule": "linear", "points": [[0, 0], [2000, 3]]}
    parts = [{"path": str(captions), "weight": 1}, {"path": str(chats), "weight": moving}]
    write_mix(tmp_path / "mix.yaml", train={"blend": parts})
    run = ("--batch-size", 2, "--world-size", 2, "--num-lanes", 4)
    out = pages_of(tmp_path / "out", tmp_path / "mix.yaml", "--over", 1000, *run)
    planned = answer("plan", tmp_path / "mix.yaml", "--steps", 1000, *run)
    page.open(out, "#/overview")
    rows = [row.split("\t") for row in page.texts("#plan tbody tr")]
    assert [int(row[3].replace(",", "")) for row in rows] == [leaf["draws"] for leaf in planned["leaves"]]
    assert [float(row[5]) for row in rows] == [round(leaf["epochs"], 2) for leaf in planned["leaves"]]
    lines = page.run("[...document.querySelectorAll('#schedule polyline')].map((line) => line.getAttribute('points'))")
    shares = [[1 - float(point.split(",")[1]) / 160 for point in line.split()] for line in lines]
    steps = [float(point.split(",")[0]) * 1000 / 900 for point in lines[1].split()]
    moved = [min(3.0, 3 * 4 * step / 2000) for step in steps]  # four draws a step
    assert len(steps) > 60
    assert steps == sorted(steps)
    assert steps[-1] == pytest.approx(1000)
    assert shares[1] == pytest.approx([weight / (1 + weight) for weight in moved], abs=2e-2)
    assert [1 - share for share in shares[1]] == pytest.approx(shares[0], abs=2e-3)
    assert page.problems() == []
    assert "energon plan MIX" in refusal_of("preview", captions, "--over", 5)


def test_a_pack_is_a_bar_with_its_tokens_below(page: Page, captions: Path, packed: Path) -> None:
    page.open(packed)
    (batch,) = [one for one in json.loads(energon_json(captions))["batches"] if one["step"] == 0]
    assert page.texts("h3") == [
        f"Row {number}: {row['length']} tokens, {len(row['segments'])} samples, {row['padding']} padding"
        for number, row in enumerate(batch["rows"])
    ]
    segments = [one for row in batch["rows"] for one in row["segments"]]
    assert page.texts(".segment .key") == [
        f"{one['key']} · {one['dataset']} · tokens {one['start']} to {one['start'] + one['length'] - 1}"
        for one in segments
    ]
    first = page.run("document.querySelector('.segment .tokens').textContent")
    assert first == "".join(token_text(one) for one in segments[0]["tokens"])
    learned = sum(one["label"] is not None for segment in segments for one in segment["tokens"])
    assert page.run("document.querySelectorAll('.segment .token.learned').length") == learned
    assert page.run("document.querySelectorAll('.segment .token.image img').length") == len(segments)
    assert page.run("document.querySelectorAll('.segment .token.special').length") == len(segments)
    widths = page.run(
        "[...document.querySelectorAll('.packbar')[0].children].map((one) => one.getBoundingClientRect().width)"
    )
    sizes = [one["length"] for one in batch["rows"][0]["segments"]]
    assert [round(width / widths[0], 1) for width in widths[: len(sizes)]] == [
        round(size / sizes[0], 1) for size in sizes
    ]
    assert page.texts(".token.padding")[1:] == [
        f"padding × {row['padding']}" for row in batch["rows"] if row["padding"]
    ]
    title = page.run("document.querySelector('.segment .token.learned').title")
    assert "learns" in title
    page.click(".segment .key a")
    assert page.texts("#key") == [segments[0]["key"]]
    page.go("#/batch/1")
    assert page.run("document.querySelector('#batch').selectedOptions[0].text") == "step 1, rank 0, microbatch 1"
    assert page.problems() == []


def energon_json(captions: Path) -> str:
    packing = ("--encoder", "previews:encoder", "--batch-size", 2, "--packing-buffer-size", 10)
    return energon("preview", captions, *packing, "--batches", 2, "--json").output


def token_text(token: Any) -> str:
    return f"{token['text']} × {token['count']}" if token["kind"] == "image" else token["text"]


def test_a_batch_of_any_type_names_its_samples(page: Page, captions: Path, tmp_path: Path) -> None:
    out = pages_of(
        tmp_path / "out", captions, "--encoder", "engine:DefaultTaskEncoder", "--batch-size", 3, "--batches", 1
    )
    page.open(out)
    keys = page.texts(".row .links a")
    assert len(keys) == 3
    assert page.texts(".row h3")[:4] == ["Row 0", "sample", "key", "image"]
    assert page.run("document.querySelectorAll('.row figure img').length") == 3
    page.click(".row:nth-of-type(2) .links a")
    assert page.texts("#key") == [keys[1]]
    assert page.problems() == []


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a dataset of a video with sound, a sound, and a video that is broken."""
    pytest.importorskip("av")
    from clips import write_sound, write_video

    folder = tmp_path_factory.mktemp("pages-films")
    film = write_video(
        folder / "film.mp4", options={"x264-params": "log-level=0"}, frames=100, sound="aac"
    ).read_bytes()
    sound = write_sound(folder / "sound.wav", codec="pcm_s16le", seconds=2.0).read_bytes()
    (folder / "data").mkdir()
    samples = {"a": {"mp4": film}, "b": {"wav": sound}, "c": {"mp4": film[:400]}}
    write_shard(folder / "data" / "0.tar", samples)
    prepare_dataset(folder / "data", split=parse_patterns(["train:.*"]), dataset_yaml=previews.CRUDE)
    return pages_of(folder / "out", folder / "data")


def test_a_video_plays_from_where_it_is_asked(page: Page, films: Path) -> None:
    page.open(films, "#/sample/0")
    page.wait("document.querySelector('video').readyState >= 1")
    assert page.run("document.querySelector('video').duration") == pytest.approx(4, abs=0.1)
    sought = page.run(
        "new Promise((done) => { const one = document.querySelector('video'); "
        "one.addEventListener('seeked', () => done(one.currentTime)); one.currentTime = 3; })"
    )
    assert sought == 3
    assert "video width 32, video height 24" in page.texts("figcaption")[0]
    page.go("#/sample/1")
    page.wait("document.querySelector('audio').readyState >= 1")
    assert page.run("document.querySelector('audio').duration") == pytest.approx(2, abs=0.01)
    assert page.problems() == []
    page.go("#/sample/2")
    assert "DecodeError" in page.texts(".error")[0]
    assert sorted(path.name for path in films.parent.glob("media/*/*")) == ["000000.mp4", "000001.wav"]


def test_cards_have_the_answer_and_what_is_wrong(page: Page, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(buffer, "png")
    picture = buffer.getvalue()
    questions = {"question": "Which colour?", "answer": "red"}
    samples: dict[str, dict[str, bytes]] = {
        "a": {"png": picture, "json": json.dumps(questions).encode()},
        "b": {"png": picture[:40], "json": json.dumps({**questions, "answer": "blue"}).encode()},
        "c": {"photo": picture, "json": json.dumps({"problem": "1 + 1", "solution": "2"}).encode()},
        "d": {"png": picture, "cls": b"7"},
        "e": {"png": picture, "json": b"{"},
    }
    (folder := tmp_path / "crude").mkdir()
    write_shard(folder / "s_0.tar", samples)
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=previews.CRUDE)
    choices = {"context": "Which?", "choices": ["one", "two"], "correct_choice_idx": 1}
    (classes := tmp_path / "choices").mkdir()
    write_shard(classes / "s_0.tar", {"f": {"png": picture, "json": json.dumps(choices).encode()}})
    fields = {"image": "png", **{name: f"json[{name}]" for name in choices}}
    typed = render_dataset_yaml("MultiChoiceVQASample", fields)
    prepare_dataset(classes, split=parse_patterns(["train:.*"]), dataset_yaml=typed)
    out = pages_of(tmp_path / "out", previews.mix_of(tmp_path / "mix.yaml", crude=folder, choices=classes))
    page.open(out)
    cards = dict(zip(page.texts(".card .key"), page.texts(".card"), strict=True))
    assert cards["a"].split() == ["a", "Which", "colour?", "red"]
    assert cards["d"].split() == ["d", "7"]
    assert cards["f"].split() == ["f", "Which?", "two"]
    assert cards["c"].split()[-4:] == ["1", "+", "1", "2"]
    assert cards["b"].split()[-1] == "blue"
    wrong = page.texts(".card .error")
    assert len(wrong) == 3
    assert "image" in wrong[0].lower()  # cut off
    assert wrong[1].startswith(f"not decoded: {len(picture)} bytes of .png")
    assert "photo" in wrong[1]
    assert "json" in wrong[2].lower()
    page.go("#/overview")
    assert sorted(page.texts("main > .error")) == [
        "1 sample did not load: number 4",
        "1 sample with a broken picture, sound or other value: number 1",
        "1 sample with pictures or other media that no decoder took: number 2",
    ]
    assert page.problems() == []


def test_hostile_data_does_nothing(page: Page, tmp_path: Path) -> None:
    jsonl, tars = previews.hostile_jsonl(tmp_path / "x.jsonl"), previews.hostile_dataset(tmp_path / "hostile")
    mix = previews.mix_of(tmp_path / "mix.yaml", jsonl=jsonl, tars=tars)
    out = pages_of(tmp_path / "out", mix)
    page.open(out)
    count = len(previews.KEYS) + 1 + 5
    seen = " ".join(page.texts(".card"))
    assert previews.HOSTILE in seen
    for number in range(count):
        page.go(f"#/sample/{number}")
        assert page.texts("main .error") == [] or number >= count - 2
    page.go("#/samples?q=%3Cscript")
    assert page.texts("#count") == [f"6 of {count} samples"]
    page.go("#/overview")
    page.go("#/sample/x%3Cimg%20src=x%20onerror=alert(1)%3E")
    page.go("#/<img src=x onerror=alert(1)>")
    assert page.run("typeof window.hacked") == "undefined"
    assert (
        page.run(
            "document.querySelectorAll('script:not([src])').length + document.querySelectorAll('[onerror]').length"
        )
        == 0
    )
    assert {address.split(":")[0] for address in page.requests()} == {"file"}
    assert all(str(tmp_path / "out") in address for address in page.requests())
    assert page.problems() == []


def test_scripts_that_got_in_would_be_refused(page: Page, mixed: Path) -> None:
    page.open(mixed)
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 1'})); "
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 1\">'); "
        "new Promise((done) => setTimeout(done, 100))"
    )
    assert page.run("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in problem for problem in page.problems())


def test_light_and_dark(page: Page, mixed: Path, packed: Path) -> None:
    shades = {}
    for dark in (False, True):
        page.dark(dark)
        for opened in (mixed, packed):
            page.open(opened)
            with Image.open(io.BytesIO(page.screenshot())) as image:
                assert image.size == (1280, 900)
                shades[dark, opened] = image.convert("L").resize((1, 1)).getpixel((0, 0))
        colors = page.run(COLORS)
        for ink, ground in colors:
            assert contrast(ink, ground) >= 4.5, (dark, ink, ground)
    page.dark(False)
    for opened in (mixed, packed):
        assert shades[False, opened] > 180 > 90 > shades[True, opened]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
def test_the_pictures_of_the_documentation(page: Page, tmp_path: Path) -> None:
    """ENERGON_SCREENSHOTS=docs/images writes them anew."""
    for name in ("sklearn", "lightning.pytorch", "transformers"):
        pytest.importorskip(name)
    from energon_bridge.training.digits import write_digits

    digits = tmp_path / "data" / "digits"
    write_digits(digits)
    yaml = render_dataset_yaml("CaptioningSample", {"image": "png", "caption": "txt"})
    prepare_dataset(digits, split=parse_patterns(["train:train/.*", "val:val/.*"]), dataset_yaml=yaml)
    packing = (
        "data.packing_buffer_size=32",
        "data.seq_length=96",
        "data.micro_batch_size=4",
        "data.global_batch_size=4",
    )
    settings = (f"data.path={digits}", f"run_dir={tmp_path / 'run'}", *packing)
    batches = pages_of(tmp_path / "batches", "--config", CONFIGS / "digits_tiny_llava.yaml", *settings)
    samples = pages_of(tmp_path / "samples", digits, "--samples", "all")
    for file in tmp_path.glob("*/data/*.js"):  # whose machine this is, nobody needs to know
        file.write_text(file.read_text().replace(f"{REPOSITORY}/", "").replace(f"{tmp_path}/", ""))
    out = Path(os.environ.get("ENERGON_SCREENSHOTS", tmp_path / "images"))
    out.mkdir(exist_ok=True)
    for name, opened, fragment, dark in (
        ("preview-batch.png", batches, "", False),
        ("preview-samples.png", samples, "#/samples?q=seven", True),
    ):
        page.dark(dark)
        page.open(opened, fragment)
        with Image.open(io.BytesIO(page.screenshot(1100, 640))) as image:
            image.convert("P", palette=Image.Palette.ADAPTIVE).save(out / name, optimize=True)
        assert str(tmp_path) not in page.run("document.body.innerText")
        assert 10_000 < (out / name).stat().st_size < 150_000
        assert page.problems() == []
    page.dark(False)


def contrast(ink: str, ground: str) -> float:
    """Return the contrast of two colours as WCAG has it."""

    def luminance(color: str) -> float:
        values = [int(value) / 255 for value in color.removeprefix("rgb(").removesuffix(")").split(",")[:3]]
        parts = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dim = sorted((luminance(ink), luminance(ground)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.skipif(not LONG, reason="takes a minute; ENERGON_LONG_TESTS=1")
def test_a_hundred_thousand_samples_open_at_once(page: Page, tmp_path: Path) -> None:
    text = "a conversation of many words " * 20
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    lines = (json.dumps({"messages": turns, "number": n}) + "\n" for n in range(100_000))
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    out = pages_of(tmp_path / "out", tmp_path / "chats.jsonl", "--samples", "all")
    start = time.monotonic()
    page.open(out)
    assert time.monotonic() - start < 2
    assert page.texts("#count") == ["100,000 samples"]
    page.enter("#search", "99999")
    assert page.texts(".card .key") == ["99999"]
    assert page.call("Runtime.getHeapUsage")["totalSize"] < 500e6


def test_a_missing_file_is_named(page: Page, captions: Path, tmp_path: Path) -> None:
    out = pages_of(tmp_path / "out", captions, "--samples", "all")
    (tmp_path / "out" / "data" / "samples-1.js").unlink()
    page.open(out, "#/samples?page=2")
    assert page.texts(".error") == ["data/samples-1.js is missing from this folder"]
    page.go("#/samples?page=3")
    assert len(page.texts(".card")) == COUNT - 120

"""The report at the end of a run: what it says is what happened, and hostile names do nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from browser import Page, browser
from forked import become_rank, free_port, run_forked
from hypothesis import given, strategies as st
from PIL import Image
from previews import CRUDE, HOSTILE

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import Plain, quiet_trainer

from energon_bridge import (
    Blender,
    DefaultTaskEncoder,
    EnergonMultiModalDataModule,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import DatasetMismatchError
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.report import recorder as report
from energon_bridge.tools.report.page import write_report
from energon_bridge.tools.report.recorder import MOST_SLOW, Curve, RankSummary, RunRecorder, gathered, summary
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard
from energon_bridge.trainers.lightning import RunReport

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


NAMES = ("pictures", "more")


class Read:
    """A page as somebody reads it: its texts, the rows of its tables, its charts."""

    def __init__(self, path: Path) -> None:
        page = path.read_text("utf-8")
        self.tags = Counter(
            re.findall(r"<([a-z]+)", page.partition('"use strict"')[0] + page.rpartition("</script>")[2])
        )
        data = re.findall(r'preview\.take\("meta",null,(.*)\);\n</script>', page)
        assert len(data) == 1
        assert "<" not in data[0]
        self.run = json.loads(data[0])["run"]
        blocks = [block for _, section in self.run["sections"] for block in section]
        self.rows = [[said(cell) for cell in row] for block in blocks if "rows" in block for row in block["rows"]]
        self.charts = {block["chart"]: block for block in blocks if "chart" in block}
        texts = [title for title, _ in self.run["sections"]] + [block for block in blocks if isinstance(block, str)]
        self.text = " ".join([*(f"{name} {value}" for name, value in self.run["facts"]), *texts, *self.charts])


def said(cell: Any) -> str:
    return (
        cell
        if isinstance(cell, str)
        else " ".join(
            [cell.get("text", ""), *cell.get("keys", ()), *(text for text, _ in cell.get("links", ()))]
        ).strip()
    )


class Model(Plain):
    """Its loss is 3 at first and then less, and NaN at step 5 if it is told so."""

    def __init__(self, *, fails_at: int = -1, nan: bool = False) -> None:
        super().__init__()
        self.fails_at, self.nan = fails_at, nan

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("out of luck")
        value = float("nan") if self.nan and self.global_step == 4 else 3.0 / (1 + self.global_step)
        return super().training_step(batch, batch_idx) * 0.0 + value


class Picky(DefaultTaskEncoder):
    """Fails on one sample in six, and skips another."""

    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.__key__[-5:])
        if number % 6 == 1:
            raise ValueError("does not suit me")
        if number % 6 == 2:
            raise SkipSample
        return sample


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Blender:
    folder = tmp_path_factory.mktemp("reported")
    paths = [create_captioning_test_dataset(folder / name, num_train=24, num_val=4) for name in NAMES]
    return Blender([(str(paths[0]), 0.75), (str(paths[1]), 0.25)])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def fit(mix: Any, folder: Path, model: Model | None = None, **settings: Any) -> RunReport:
    data = EnergonMultiModalDataModule(
        mix, None, None, micro_batch_size=2, num_workers=0, num_lanes=4, task_encoder=settings.pop("encoder", Picky())
    )
    callback = RunReport(folder / "report.html", title="A run")
    checkpoint = settings.pop("ckpt_path", None)
    trainer = quiet_trainer(folder, callbacks=[callback, *settings.pop("callbacks", ())], **settings)
    try:
        trainer.fit(model or Model(), datamodule=data, ckpt_path=checkpoint)
    finally:
        data.close()
    return callback


def test_a_report_says_what_happened(mix: Blender, tmp_path: Path) -> None:
    fit(mix, tmp_path, Model(nan=True), max_steps=20, accumulate_grad_batches=2)
    read = Read(tmp_path / "report.html")
    assert read.tags["script"] == 1
    assert not {"img", "link", "iframe"} & read.tags.keys()
    assert "steps 20" in " ".join(read.text.split())
    assert f"loss at the end {3 / 20:.4f}" in read.text
    assert "the loss in 1 steps." in read.text
    rows = {row[0]: row for row in read.rows if row}
    planned, delivered = ([float(rows[name][column].rstrip(" %")) for name in NAMES] for column in (1, 2))
    assert planned == [75.0, 25.0]
    assert sum(delivered) == pytest.approx(100, abs=0.2)
    assert delivered[0] == pytest.approx(75, abs=8)
    samples = [int(rows[name][4]) for name in NAMES]
    assert sum(samples) == 80
    skipped, failed = ([int(rows[name][column]) for name in NAMES] for column in (6, 7))
    reasons = {(Path(row[0]).name, row[1]): row[2:] for row in read.rows if len(row) == 4 and row[0].startswith("/")}
    for place, name in enumerate(NAMES):
        assert min(skipped[place], failed[place]) > 0
        assert reasons[name, "skipped by a hook (SkipSample)"] == [str(skipped[place]), "–"]
        assert reasons[name, "failed"] == [str(failed[place]), "–"]
        times, different = reasons[name, "failed in encode_sample: ValueError"]
        assert (times, 0 < int(different) <= min(4, failed[place])) == ("–", True)
    slow = [row for row in read.rows if row and row[0].endswith(" s") and "train-" in row[-1]]
    assert len(slow) == MOST_SLOW
    assert [float(row[0].split()[0]) for row in slow] == sorted(
        (float(row[0].split()[0]) for row in slow), reverse=True
    )


def test_a_report_is_shown_as_it_says(page: Page, mix: Blender, tmp_path: Path) -> None:
    fit(mix, tmp_path, Model(nan=True), max_steps=20, accumulate_grad_batches=2)
    read = Read(tmp_path / "report.html")
    page.open(tmp_path / "report.html")
    assert page.texts("#main > h2") == [title for title, _ in read.run["sections"]]
    assert list(zip(page.texts("dt"), page.texts("dd"), strict=True)) == [tuple(fact) for fact in read.run["facts"]]
    shown = page.run(
        "[...document.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((one) => one.textContent.trim()))"
    )
    assert shown == read.rows
    charts = page.run("[...document.querySelectorAll('svg')].map((one) => one.ariaLabel)")
    assert charts == [*read.charts]
    losses = read.charts["loss, steps 1 to 20"]
    points = page.run("document.querySelector('polyline').getAttribute('points')").split()
    drawn = [losses["low"] + (1 - float(p.split(",")[1]) / 160) * (losses["high"] - losses["low"]) for p in points]
    assert drawn == pytest.approx([value for _, value in losses["lines"][0]["points"]], abs=0.01)
    assert len(drawn) == 19  # of one step it is NaN
    assert page.run("document.querySelectorAll('#tabs a').length") == 0
    shown = page.run(
        "(() => { const chart = document.querySelector('svg'); const box = chart.getBoundingClientRect();"
        "chart.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right, clientY: box.top + 9}));"
        "return chart.querySelector('.told').textContent; })()"
    )
    assert shown == f"step 20: loss {3 / 20}"
    page.run("document.querySelector('svg .switch').dispatchEvent(new MouseEvent('click')); 0")
    points = page.run("document.querySelector('polyline').getAttribute('points')").split()
    low, high = math.log(losses["low"]), math.log(losses["high"])
    drawn = [math.exp(low + (1 - float(p.split(",")[1]) / 160) * (high - low)) for p in points]
    assert drawn == pytest.approx([value for _, value in losses["lines"][0]["points"]], rel=0.01)
    assert page.problems() == []
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'})); 0")
    assert page.run("window.hacked === undefined")


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1.0, 123456.789, 1e11])
def test_values_beside_charts_are_not_cut_off(page: Page, tmp_path: Path, scale: float) -> None:
    recorder = RunRecorder()
    for step in range(1, 60):
        recorder.rate.add(step, scale * 9.87654 / step)
    write_report(tmp_path / "report.html", [], recorder)
    page.open(tmp_path / "report.html")
    svg = "const svg = document.querySelector('svg'); const edge = svg.viewBox.baseVal.x;"
    left = f"(() => {{ {svg} return [...svg.querySelectorAll('text')].every((one) => one.getBBox().x >= edge); }})()"
    assert page.run(left)
    highest = float(page.run("document.querySelectorAll('svg text')[2].textContent"))
    assert highest == pytest.approx(scale * 9.87654, rel=1e-3)


def shares_in(path: Path) -> list[tuple[bool, list[float]]]:
    """Return of each line in the chart of shares whether it is dashed, and its values."""
    (chart,) = (chart for name, chart in Read(path).charts.items() if name.startswith("share of the draws"))
    return [(line["dashed"], [value for _, value in line["points"]]) for line in chart["lines"]]


def test_a_report_covers_the_run_from_its_beginning(mix: Blender, tmp_path: Path) -> None:
    """Also over a resume: what was seen before belongs to the report."""

    def options() -> dict[str, Any]:
        callback = ModelCheckpoint(tmp_path / "saved", filename="last", save_top_k=-1, every_n_train_steps=20)
        return {"encoder": DefaultTaskEncoder(), "enable_checkpointing": True, "callbacks": [callback]}

    fit(mix, tmp_path, max_steps=20, **options())
    (tmp_path / "report.html").unlink()
    checkpoint = tmp_path / "saved/last.ckpt"
    torch.load(checkpoint, weights_only=True)
    after = fit(mix, tmp_path, max_steps=48, ckpt_path=checkpoint, **options())
    losses = after._recorder.loss.points
    assert [int(point[0]) for point in losses] == list(range(1, 49))
    assert [point[2] for point in losses] == pytest.approx([3 / step for step in range(1, 49)])
    assert "steps 1 to 48" in (tmp_path / "report.html").read_text()
    lines = shares_in(tmp_path / "report.html")
    assert [dashed for dashed, _ in lines] == [False, True] * 2
    (first, second), planned = ([values for dashed, values in lines if dashed == kind] for kind in (False, True))
    assert np.allclose(planned, [[0.75, 0.75], [0.25, 0.25]], atol=1e-3)
    assert len(first) == len(second) == 47
    assert np.allclose(np.add(first, second), 1, atol=1e-2)
    assert np.mean(first) == pytest.approx(0.75, abs=0.06)


def test_a_resume_that_is_refused_leaves_the_report(mix: Blender, tmp_path: Path) -> None:
    def saving() -> dict[str, Any]:
        callback = ModelCheckpoint(tmp_path / "saved", filename="last", save_top_k=-1, every_n_train_steps=4)
        return {"callbacks": [callback], "enable_checkpointing": True}

    fit(mix, tmp_path, max_steps=4, **saving())
    page = (tmp_path / "report.html").read_bytes()
    other = create_captioning_test_dataset(tmp_path / "other", num_train=12, num_val=4)
    with pytest.raises(DatasetMismatchError):
        fit(str(other), tmp_path, max_steps=8, ckpt_path=tmp_path / "saved/last.ckpt", **saving())
    assert (tmp_path / "report.html").read_bytes() == page


def test_a_sample_that_failed_on_two_ranks_is_one(tmp_path: Path) -> None:
    data = create_captioning_test_dataset(tmp_path / "data", num_train=24, num_val=4)
    ranks = []
    for rank in range(2):
        workers = WorkerConfig(rank=rank, world_size=2, num_workers=0, num_lanes=4)
        dataset = get_train_dataset(data, batch_size=2, worker_config=workers, task_encoder=Picky())
        loader = EnergonDataloader(get_savable_loader(dataset))
        loader.loader.ban(["train-00003"], from_draw=0)
        for _ in range(60):
            next(loader)
        ranks.append(summary(RunRecorder(), loader))
        loader.close()
    write_report(tmp_path / "report.html", ranks, RunRecorder())
    told = {row[1]: row[2:] for row in Read(tmp_path / "report.html").rows if len(row) == 4}
    assert told["failed in encode_sample: ValueError"] == ["–", "4"], "1, 7, 13 and 19 of 24"
    assert int(told["withdrawn by ban"][0]) > 2


def test_looks_at_the_shares_are_bounded_and_added_up(tmp_path: Path) -> None:
    class Counting:
        def counters(self) -> list[dict[str, Any]]:
            self.draws = getattr(self, "draws", 0) + 1
            return [
                {"identity": "a", "draws": 3 * step, "parked": False},
                {"identity": "b", "draws": step, "parked": False},
            ]

    draws, loader = report.DrawCounts(), Counting()
    for step in range(1, 5001):
        draws.look(loader, step)
    assert len(draws.looks) <= report.MOST_LOOKS
    assert loader.draws < 8 * report.MOST_LOOKS
    assert draws.looks[-1][0] > 4900
    rows = tuple(
        report.DatasetRow(
            path=name,
            split_part="train",
            planned=None,
            num_samples=9,
            draws=9,
            counts=dict.fromkeys(report.COUNTERS, 1),
            identity=name,
        )
        for name in "ab"
    )
    ranks = [
        RankSummary(rank=rank, ranks=2, seconds=1.0, waited=0.0, datasets=rows, draws=tuple(draws.looks))
        for rank in (0, 1)
    ]
    write_report(tmp_path / "report.html", ranks, RunRecorder())
    (_, first), (_, second) = shares_in(tmp_path / "report.html")
    assert np.allclose(first, 0.75, atol=1e-2)
    assert np.allclose(second, 0.25, atol=1e-2)
    looks = [(step, {"a": 3 * step} | ({"b": step - 50} if step >= 50 else {})) for step in range(101)]
    planned = tuple(replace(row, planned=share) for row, share in zip(rows, (75.0, 25.0), strict=True))
    joined = RankSummary(rank=0, ranks=1, seconds=1.0, waited=0.0, datasets=planned, draws=tuple(looks))
    write_report(tmp_path / "report.html", [joined], RunRecorder())
    (chart,) = (chart for name, chart in Read(tmp_path / "report.html").charts.items() if name.startswith("share"))
    assert [line["points"][0][0] for line in chart["lines"] if line["dashed"]] == [0, 50], "b joined the mix then"
    assert "Joined the mix, whose shares are others since: b (at step 50)." in Read(tmp_path / "report.html").text
    assert "energon preview<" not in (tmp_path / "report.html").read_text()


class Validated(Model):
    """Its loss is that of the sample: large for one of them."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 100.0 * ("train-00007" in batch.__key__) + int(batch.__key__[0][-2:]) / 1000

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(7.0 - self.global_step / 4), batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_report_has_validation_learning_rate_and_the_highest_losses(mix: Blender, tmp_path: Path) -> None:
    settings = {"val_check_interval": 20, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    fit(mix, tmp_path, Validated(), encoder=DefaultTaskEncoder(), max_steps=40, **settings)
    read = Read(tmp_path / "report.html")
    (validation,) = (chart for name, chart in read.charts.items() if name.startswith("loss of validations"))
    assert validation["lines"][0]["points"] == [[20, 2.0], [40, -3.0]]
    (rate,) = (chart for name, chart in read.charts.items() if name.startswith("learning rate"))
    assert [value for _, value in rate["lines"][0]["points"][:3]] == [1.0, 0.5, 0.25]
    rows = next(blocks for title, blocks in read.run["sections"] if title.startswith("Highest"))[0]["rows"]
    losses = [float(row[0]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 100
    assert "train-00007" in said(rows[0][-1])
    # Each is linked to a page that shows what the dataset has: its picture and its caption.
    written = pages_of(tmp_path / "report-samples")
    for row in rows:
        keys = row[-1]["keys"]
        numbers = [to.removeprefix("report-samples/index.html#/sample/") for _, to in row[-1]["links"]]
        shown = [written[int(number)] for number in numbers]
        assert [f"{NAMES[one['part']]}: {one['key']}" for one in shown] == keys
        assert all(dict(one["facts"])["step"] == int(row[1].split(", ")[0]) for one in shown)
        for one in shown:
            fields = dict(one["fields"])
            with tarfile.open(Path(mix.items[one["part"]][0], one["shard"])) as shard:
                caption = shard.extractfile(f"{one['key']}.txt").read().decode()
                with Image.open(shard.extractfile(f"{one['key']}.png")) as image:
                    size = [image.width, image.height]
            assert fields["caption"] == [["t", caption]]
            assert fields["image"][0][2:] == size
            number = fields["image"][0][1]
            assert (tmp_path / f"report-samples/media/000/{number:06d}.jpg").is_file()


def test_a_sample_of_several_epochs_is_told_once_with_its_steps(tmp_path: Path) -> None:
    small = create_captioning_test_dataset(tmp_path / "small", num_train=3, num_val=1)
    settings = {"batch_size": 1, "worker_config": WorkerConfig(num_workers=0), "task_encoder": DefaultTaskEncoder()}
    loader = EnergonDataloader(get_savable_loader(get_train_dataset(small, **settings)))
    recorder = RunRecorder()
    recorder.start(loader)
    steps: dict[str, list[int]] = {}
    for step in range(1, 13):
        batch = next(loader)
        steps.setdefault(batch.__key__[0], []).append(step)
        recorder.microbatch(loader, batch, step, torch.tensor(9.0 if batch.__key__ == ["train-00001"] else 1.0))
    told = summary(recorder, loader)
    loader.close()
    assert told is not None
    write_report(tmp_path / "report.html", [told], recorder)
    sections = Read(tmp_path / "report.html").run["sections"]
    rows = next(blocks for name, blocks in sections if name.startswith("Highest"))[0]["rows"]
    found = {said(row[-1]): sorted(map(int, row[1].split(", "))) for row in rows}
    assert len(rows) == len(steps) == 3
    assert found == steps
    assert said(rows[0][-1]) == "train-00001"


def test_batches_without_keys_are_told_by_dataset_and_shard_and_withdrawn_samples_are_marked(tmp_path: Path) -> None:
    folders = [create_captioning_test_dataset(tmp_path / name, num_train=3, num_val=1) for name in ("one", "two")]
    (tmp_path / "mix.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        + "".join(f"      - {{weight: 1, path: {folder.name}}}\n" for folder in folders)
    )
    settings = {"batch_size": 1, "worker_config": WorkerConfig(num_workers=0), "task_encoder": DefaultTaskEncoder()}
    loader = EnergonDataloader(get_savable_loader(get_train_dataset(tmp_path / "mix.yaml", **settings)))
    recorder = RunRecorder()
    recorder.start(loader)
    shards: dict[str, str] = {}
    for step in range(1, 13):
        batch = next(loader)
        source = batch.__sources__[0]
        name = f"{Path(source.dataset_path).name}, {source.shard_name}, sample {source.index}"
        shards[name] = batch.__key__[0]
        recorder.microbatch(loader, {"__restore_key__": batch.__restore_key__}, step, torch.tensor(float(step)))
    (first, *_) = shards
    loader.loader.ban([shards[first]], dataset=str(tmp_path / first.partition(",")[0]))
    told = summary(recorder, loader)
    loader.close()
    assert told is not None
    write_report(tmp_path / "report.html", [told], recorder)
    sections = dict(Read(tmp_path / "report.html").run["sections"])
    slowest = next(blocks for name, blocks in sections.items() if name.startswith("Slowest"))[0]["rows"]
    assert {said(row[-1]) for row in slowest} == {*shards}
    highest = next(blocks for name, blocks in sections.items() if name.startswith("Highest"))[0]["rows"]
    marked = {row[-1]["keys"][0]: row[-1]["keys"][1:] for row in highest}
    assert marked.keys() == shards.keys()
    assert {name: mark for name, mark in marked.items() if mark} == {first: ["withdrawn by ban"]}


def pages_of(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of pages, by their numbers."""
    found: list[dict[str, Any]] = []
    for number in range(len([*folder.glob("data/samples-*.js")])):
        text = (folder / f"data/samples-{number}.js").read_text()
        found += json.loads(text.removeprefix(f'preview.take("samples",{number},').removesuffix(");\n"))
    return found


def test_data_that_is_gone_when_a_run_ends_leaves_a_report_that_says_so(tmp_path: Path) -> None:
    settings = {"batch_size": 2, "worker_config": WorkerConfig(num_workers=0), "task_encoder": DefaultTaskEncoder()}
    again = create_captioning_test_dataset(tmp_path / "again", num_train=24, num_val=4)
    loader = EnergonDataloader(get_savable_loader(get_train_dataset(again, **settings)))
    batch = next(iter(loader))
    recorder = RunRecorder()
    recorder.start(loader)
    recorder.microbatch(loader, batch, 1, torch.tensor(2.0))
    told = summary(recorder, loader)
    spec = loader.loader.spec
    loader.close()
    shutil.rmtree(again)
    assert told is not None
    write_report(tmp_path / "late.html", [told], recorder, spec=spec)
    read = Read(tmp_path / "late.html")
    assert "Their samples cannot be read any more, so there are no pages of them" in read.text
    assert any(batch.__key__[0] in row[-1] for row in read.rows)
    assert not (tmp_path / "late-samples").exists()


def test_what_grew_since_counts_as_it_was(tmp_path: Path) -> None:
    """A dataset that is made again with more samples is another one; the run goes on with it by adapting."""
    settings = {"batch_size": 2, "worker_config": WorkerConfig(num_workers=0), "task_encoder": DefaultTaskEncoder()}
    recorder = RunRecorder()
    state = None
    for first, size in ((1, 24), (21, 40)):
        shutil.rmtree(tmp_path / "grown", ignore_errors=True)
        grown = create_captioning_test_dataset(tmp_path / "grown", num_train=size, num_val=4)
        loader = EnergonDataloader(get_savable_loader(get_train_dataset(grown, **settings), on_mismatch="adapt"))
        if state is not None:
            loader.load_state_dict(state)
        recorder.start(loader)
        for step in range(first, first + 20):
            recorder.microbatch(loader, next(loader), step, torch.tensor(9.0 if step == 5 else 1.0))
            recorder.step(loader, step, None)
        loader.loader.ban(["train-00001"], from_draw=0)
        state = loader.state_dict()
        told = summary(recorder, loader)
        spec = loader.loader.spec
        loader.close()
    assert told is not None
    write_report(tmp_path / "report.html", [told], recorder, spec=spec)
    read = Read(tmp_path / "report.html")
    assert "samples delivered 80 " in read.text
    assert sorted(row[4] for row in read.rows if "grown#" in row[0]) == ["40", "40"]
    assert sum("left the mix, or changed" in row[0] for row in read.rows if "grown#" in row[0]) == 1
    assert "has changed since, have none" in read.text
    share = next(chart for name, chart in read.charts.items() if name.startswith("share"))
    assert all(0 <= value <= 1 for line in share["lines"] for _, value in line["points"])


def test_a_validation_after_training_is_in_the_report(mix: Blender, tmp_path: Path) -> None:
    options: Any = {"micro_batch_size": 2, "num_workers": 0, "num_lanes": 4, "task_encoder": DefaultTaskEncoder()}
    data = EnergonMultiModalDataModule(mix, None, None, **options)
    callback, model = RunReport(tmp_path / "report.html"), Validated()
    trainer = quiet_trainer(
        tmp_path, callbacks=[callback], max_steps=8, limit_val_batches=1, check_val_every_n_epoch=99
    )
    with closing(data):
        trainer.fit(model, datamodule=data)
        trainer.validate(model, datamodule=data, verbose=False)
    read = Read(tmp_path / "report.html")
    (validation,) = (chart for name, chart in read.charts.items() if name.startswith("loss of validations"))
    assert validation["lines"][0]["points"] == [[8, 5.0]]
    assert read.charts["loss, steps 1 to 8"]


def test_a_high_loss_is_found_among_the_higher_ones_of_the_beginning(tmp_path: Path) -> None:
    inner = SimpleNamespace(config=SimpleNamespace(dp_rank=0, dp_size=1))
    loader: Any = SimpleNamespace(loader=inner, wait_seconds=0.0, metrics=dict)
    losses = {step: 9.0 * 0.99**step for step in range(1, 401)}
    for step in (230, 231, 390):
        losses[step] += 1.0
    recorder = RunRecorder()
    for step, loss in losses.items():
        recorder.microbatch(loader, {"__key__": [f"step{step}"]}, step, torch.tensor(loss))
        if step == 235:
            state = json.loads(json.dumps(recorder.state_dict()))
            recorder = RunRecorder()
            recorder.load_state_dict(state)
    told = summary(recorder, loader)
    assert told is not None
    write_report(tmp_path / "report.html", [told], recorder)
    sections = Read(tmp_path / "report.html").run["sections"]
    rows = next(blocks for name, blocks in sections if name.startswith("Highest"))[0]["rows"]
    assert {said(row[-1]) for row in rows if float(row[3]) > 0.5} == {"step230", "step231", "step390"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_after_a_resume_on_other_ranks_nothing_is_told_twice(ranks: int, tmp_path: Path) -> None:
    """Lightning restores the state of the first rank on all."""

    class Loader:
        wait_seconds, replica = 0.0, None

        def __init__(self, rank: int) -> None:
            self.loader, self.config = self, SimpleNamespace(dp_rank=rank, dp_size=ranks)

        def metrics(self) -> dict[str, float]:
            return {}

    def record(recorder: RunRecorder, rank: int, steps: range) -> RankSummary:
        loader: Any = Loader(rank)
        recorder.start(loader)
        for step in steps:
            recorder.microbatch(loader, {"__key__": [f"rank{rank}-step{step}"]}, step, torch.tensor(float(step)))
            recorder.step(loader, step, 1.0, 0.1)
        told = summary(recorder, loader)
        assert told is not None
        return told

    before = RunRecorder()
    record(before, 0, range(1, 4))
    before.seconds = 100.0
    state = json.loads(json.dumps(before.state_dict()))
    recorders, summaries = [RunRecorder() for _ in range(ranks)], []
    for rank, recorder in enumerate(recorders):
        recorder.load_state_dict(state)
        summaries.append(record(recorder, rank, range(4, 6)))
    write_report(tmp_path / "report.html", summaries, recorders[0])
    sections = Read(tmp_path / "report.html").run["sections"]
    for title in ("Slowest", "Highest"):
        rows = next(blocks for name, blocks in sections if name.startswith(title))[0]["rows"]
        expected = [("0", f"rank0-step{step}") for step in range(1, 4)]
        expected += [(str(rank), f"rank{rank}-step{step}") for rank in range(ranks) for step in (4, 5)]
        assert Counter((row[2], said(row[-1])) for row in rows) == Counter(expected)
    assert [one.seconds > 99 for one in summaries] == [True] + [False] * (ranks - 1)


def test_a_slow_sample_is_found(mix: Blender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if sample.__key__ == "train-00007":
                clock[0] += 5.0
            return sample

    clock = [0.0]

    class Time:
        @staticmethod
        def perf_counter() -> float:
            clock[0] += 0.001
            return clock[0]

    for module in ("core.stream.pipeline", "core.stream.lane"):
        monkeypatch.setattr(f"energon_bridge.{module}.time", Time)
    fit(mix, tmp_path, max_steps=20, encoder=Slow())
    (first, *_) = [row for row in Read(tmp_path / "report.html").rows if row and "train-" in row[-1]]
    assert float(first[0].split()[0]) > 5
    assert "train-00007" in first[-1]


def test_a_run_that_fails_leaves_its_report(mix: Blender, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(mix, tmp_path, Model(fails_at=3), max_steps=6)
    read = Read(tmp_path / "report.html")
    assert "ended by RuntimeError" in read.text
    assert "steps 1 to 3" in (tmp_path / "report.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report-samples"}


def test_weights_that_were_changed_are_planned_as_they_were(mix: Blender) -> None:
    train = get_train_dataset(
        mix,
        batch_size=2,
        shuffle_buffer_size=10,
        max_samples_per_sequence=10,
        task_encoder=DefaultTaskEncoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    loader = EnergonDataloader(get_savable_loader(train))
    loader.loader.set_weights([0.0, 1.0], from_draw=100)
    for _ in range(100):
        next(loader)
    found = summary(RunRecorder(), loader)
    loader.close()
    assert found is not None
    planned = {Path(row.path).name: row.planned for row in found.datasets}
    assert planned["pictures"] == pytest.approx(100 * 75 / 200, abs=3)
    assert planned["pictures"] + planned["more"] == pytest.approx(100)


HOSTILE_KEYS = (
    "</code><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "\u202egnp.exe",
)


def test_hostile_names_do_nothing(page: Page, tmp_path: Path) -> None:
    recorder = RunRecorder()
    recorder.add_loss(1, 2.0)
    slow = (1.5, True, 1, 1, [*HOSTILE_KEYS, "cut \udcff off", HOSTILE])
    row = report.DatasetRow(
        path=f"/data/{HOSTILE}",
        split_part=HOSTILE,
        planned=100.0,
        num_samples=4,
        draws=4,
        counts=dict.fromkeys(report.COUNTERS, 2),
    )
    one = RankSummary(
        rank=0,
        ranks=1,
        seconds=2.0,
        waited=1.0,
        datasets=(row,),
        failures=((HOSTILE, HOSTILE, HOSTILE, 3, frozenset()),),
        slowest=(slow,),
    )
    path = tmp_path / "report.html"
    write_report(path, [one], recorder, title=HOSTILE, facts={HOSTILE: HOSTILE})
    page.open(path)
    assert page.run("window.hacked === undefined")
    assert page.run("document.querySelectorAll('script').length") == 1
    assert page.run("document.querySelectorAll('script[src], img, iframe, link').length") == 0
    assert page.texts("h1") == [HOSTILE]
    assert page.texts("code")[:3] == [HOSTILE_KEYS[0], HOSTILE_KEYS[1], "\N{REPLACEMENT CHARACTER}gnp.exe"]
    assert {address.split(":")[0] for address in page.requests()} == {"file"}
    assert page.problems() == []


def test_a_key_of_the_data_is_only_text(tmp_path: Path) -> None:
    """Through a whole run, from the name of a file in a tar."""
    folder = tmp_path / "data"
    folder.mkdir()
    key = "<script>alert(1)<\\script>"
    write_shard(folder / "0.tar", {key: {"txt": b"a"}, "b": {"txt": b"b"}})
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=CRUDE)
    fit(str(folder), tmp_path, max_steps=4, encoder=DefaultTaskEncoder())
    read = Read(tmp_path / "report.html")
    assert read.tags["script"] == 1
    assert any(key in row[-1] for row in read.rows if row)


def test_ranks_are_added_up(tmp_path: Path) -> None:
    port = free_port()

    def start(rank: int) -> list[RankSummary]:
        become_rank(rank, 3, port)
        dist.init_process_group("gloo", rank=rank, world_size=3)
        # The last one is a rank of a replica that another one loads for.
        own = RankSummary(rank=rank, ranks=2, seconds=10.0, waited=float(rank)) if rank < 2 else None
        found = gathered(own)
        dist.destroy_process_group()
        return found

    of_all = run_forked(3, start)
    assert all(found == of_all[0] for found in of_all)
    assert [one.rank for one in of_all[0]] == [0, 1]
    write_report(tmp_path / "report.html", of_all[0], RunRecorder())
    assert "data-parallel ranks 2" in Read(tmp_path / "report.html").text


def test_balance_is_shown_as_it_came_and_as_it_was_shared_out(tmp_path: Path) -> None:
    def loader_with(count: int, own: float, *sums: float) -> Any:
        inner = SimpleNamespace(balance_sums=(count, own, [*sums, 0.5]))
        return SimpleNamespace(loader=inner, wait_seconds=0.0)

    recorder = RunRecorder()
    recorder.start(loader_with(0, 0.0, 0.0, 0.0, 0.0, 0.0))
    recorder.step(loader_with(1, 10.0, 1.5, 1.0, 1.75, 1.25), 1, 3.0)
    recorder.step(loader_with(1, 10.0, 1.5, 1.0, 1.75, 1.25), 2, 2.0)  # nothing was exchanged meanwhile
    again = RunRecorder()
    again.load_state_dict(recorder.state_dict())
    again.step(loader_with(2, 30.0, 3.5, 2.25, 3.75, 2.25), 3, 1.0)  # of a process that began before
    again.step(loader_with(3, 20.0, 4.5, 3.25, 4.75, 3.25), 4, 1.0)
    found = {name: (curve.points[0][2], curve.mean) for name, curve in again.balance.items()}
    assert found["step_before"] == (1.5, pytest.approx((1.5 + 1.75 + 1.0) / 3))
    assert found["step"] == (1.0, pytest.approx((1.0 + 1.125 + 1.0) / 3))
    assert found["cost"] == (10.0, 20.0)
    ranks = [RankSummary(rank=rank, ranks=2, seconds=1.0, waited=0.0, cost=20.0 + 10 * rank) for rank in range(2)]
    write_report(tmp_path / "report.html", ranks, again)
    page = Read(tmp_path / "report.html")
    assert "1.417 as it came (dashed), 1.042 balanced" in page.text
    assert ["1", "30", "1.200"] in page.rows
    write_report(tmp_path / "plain.html", ranks, RunRecorder())
    assert "Balance" not in Read(tmp_path / "plain.html").text


def test_without_our_loader_there_are_the_losses(tmp_path: Path) -> None:
    callback = RunReport()
    trainer = quiet_trainer(tmp_path, max_steps=3, callbacks=[callback])
    trainer.fit(Model(), train_dataloaders=[1, 2, 3], val_dataloaders=[1])
    text = Read(tmp_path / "report.html").text
    assert "loss, steps 1 to 3" in text
    assert "Datasets" not in text


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.integers(2, 9))
def test_a_curve_keeps_sums_and_extremes(values: list[float], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MOST_POINTS", most)
        curve = Curve()
        for step, value in enumerate(values, 1):
            curve.add(step, value)
    assert len(curve.points) <= most
    assert sum(point[1] for point in curve.points) == len(values)
    at = 0
    for step, count, total, low, high in curve.points:
        part = values[at : at + int(count)]
        at += int(count)
        assert step == at
        assert (low, high) == (min(part), max(part))
        assert total == pytest.approx(sum(part), abs=1e-3)
        assert count == curve.per_point or at == len(values)

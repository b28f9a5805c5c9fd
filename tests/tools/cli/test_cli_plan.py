"""`energon plan`: its counts are those of a run, its shares and epochs those of the mix."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import answer, energon, refusal_of
from engine import text_dataset
from forecasts import MIXES, OPTIONS, SIZES, opened, ranks_of, run, write_mixes
from made import made_once
from object_server import serving

from energon_bridge import DefaultTaskEncoder, get_savable_loader, get_train_dataset
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.forecast.epochs import draws_per_leaf, share_curve
from energon_bridge.tools.forecast.planned_run import run_of_mix
from energon_bridge.tools.testing import write_shard

data = made_once(write_mixes)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (4, 21), (5, 13)])
@pytest.mark.parametrize("mix", MIXES)
def test_counts_are_those_of_a_run(data: Path, mix: str, ranks: int, steps: int) -> None:
    delivered = run(ranks_of(opened(data, mix), ranks), steps) if steps else []
    real = [rows for step in delivered for rows in step if rows is not None]
    counted = Counter(key[0] for rows in real for key, _ in rows)
    found = answer("plan", data / f"{mix}.yaml", "--steps", steps, *OPTIONS, "--num-lanes", 24, "--world-size", ranks)
    assert {leaf["identity"]: leaf["draws"] for leaf in found["leaves"] if leaf["draws"]} == counted
    assert found["draws"] == counted.total() == 2 * found["microbatches"]
    for leaf in found["leaves"]:
        assert leaf["epochs"] == leaf["draws"] / leaf["num_samples"]
        name = Path(leaf["path"]).name
        assert leaf["subset"] or leaf["num_samples"] == sum(SIZES[name])
        mean = sum(path.stat().st_size for path in Path(leaf["path"]).glob("train/*.tar")) / sum(SIZES[name])
        assert leaf["bytes"] == pytest.approx(leaf["draws"] * mean, abs=1)


@pytest.mark.parametrize("mix", MIXES)
def test_the_first_leaf_to_end(data: Path, mix: str) -> None:
    asked = run_of_mix(opened(data, mix))
    sizes = [leaf.num_samples for leaf in asked.spec.ordered]
    found = answer("plan", data / f"{mix}.yaml", "--steps", 3, *OPTIONS, "--num-lanes", 24)
    step = found["first_end"]
    before, after = draws_per_leaf(asked, step - 1), draws_per_leaf(asked, step)
    assert not any(drawn >= size for drawn, size in zip(before, sizes, strict=True))
    ended = {leaf.identity for leaf, drawn in zip(asked.spec.ordered, after, strict=True) if drawn >= leaf.num_samples}
    assert {found["leaves"][place]["identity"] for place in found["ends_first"]} == ended != set()


def test_the_curve_of_shares_goes_by_steps(data: Path) -> None:
    """Lanes make their global draws in turn, so a later draw may belong to an earlier step."""
    steps = [point.step for point in share_curve(run_of_mix(opened(data, "linear")), 200)]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 200)


def test_what_workers_need(data: Path) -> None:
    """By hand: 10 steps of 4 ranks and 2 samples, 5 ms of CPU each, in 20 s."""
    mix = data / "weights.yaml"
    asked = ("plan", mix, "--steps", 10, *OPTIONS, "--world-size", 4, "--cpu-per-sample", 5000, "--step-seconds", 2)
    assert answer(*asked)["needs"] == {"cores": pytest.approx(80 * 0.005 / 20)}
    asked = (*asked, "--engine", "ray", "--batch-bytes", 3_000_000)
    needs = {"cores": pytest.approx(0.02), "bytes_per_second": pytest.approx(3e6 * 40 / 20)}
    assert answer(*asked)["needs"] == needs
    assert row(energon(*asked).output, "cores for workers, on the Ray cluster") == ["0.01", "0.0"]
    output = refusal_of("plan", mix, "--steps", 10, *OPTIONS, "--engine", "ray", "--step-seconds", 2, code=2)
    assert "--cpu-per-sample, --batch-bytes is not given" in output


def row(output: str, name: str) -> list[str]:
    """Return the other cells of a row of a table."""
    (line,) = [line for line in output.splitlines() if line.strip("│ ").startswith(name)]
    return [cell.strip() for cell in line.strip("│ ").split("│")[1:]]


def test_one_table_says_what_a_run_needs(data: Path, tmp_path: Path) -> None:
    """By hand, from rates as `energon bench` measures them: 8 ranks, 2 samples each in steps of 0.1 s."""
    rates = [
        {"workers": workers, "samples_per_second": each, "cpu_per_sample": 0.01, "batch_bytes": 1 << 20}
        | {"samples_per_batch": 2.0, "trainer_memory": 300 << 20, "worker_memory": memory << 20}
        | {"waiting_memory": memory << 18}
        for workers, each, memory in ((0, 9.0, 0), (1, 8.0, 40), (4, 30.0, 20))
    ]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"rates": rates}))
    asked = ("plan", data / "a", "--steps", 10, *OPTIONS, "--world-size", 8, "--bench", bench, "--step-seconds", 0.1)
    needs = answer(*asked)["needs"]
    assert (needs["enough_workers"], needs["workers"]) == (3, 3)  # 20 samples a second, of 8
    assert needs["cores"] == pytest.approx(8 * 20 * 0.01)
    assert needs["memory"] == (300 + 3 * (40 + 10)) << 20
    assert needs["bytes_per_second"] == pytest.approx((1 << 20) * 80)
    said = energon(*asked, "--num-workers", 4).output
    assert row(said, "workers (3 are enough)") == ["4", "32"]
    assert row(said, "memory  ") == ["400.0 MiB", "3.1 GiB"]
    assert row(said, "memory that a worker adds") == ["20.0 MiB"]
    assert answer(*asked, "--num-workers", 0)["needs"]["memory"] == 300 << 20
    of = {"rates": rates, "mix": str(data / "a"), "batch_size": 2}
    bench.write_text(json.dumps(of))
    assert "was measured with" not in energon(*asked).output
    bench.write_text(json.dumps(of | {"mix": "s3://pics/b"}))
    assert "was measured with s3://pics/b" in energon(*asked).output
    bench.write_text(json.dumps(of | {"batch_size": 16}))
    assert "was measured with --batch-size 16, and the run has 2" in refusal_of(*asked, code=2)
    bench.write_text(json.dumps(of | {"packing_buffer_size": 8, "rates": [rates[0] | {"samples_per_batch": 6.5}]}))
    packs = answer(*asked)
    assert packs["draws"] == pytest.approx(6.5 * 80, abs=24)  # rounded in each lane
    assert packs["leaves"][0]["epochs"] == packs["draws"] / sum(SIZES["a"])
    assert packs["needs"]["cores"] == packs["draws"] * 0.01
    assert answer(*asked, "--samples-per-batch", 13)["draws"] == 13 * 80
    bench.write_text("[]")
    assert "is not what `energon bench --json` prints" in refusal_of(*asked, code=2)
    bench.write_text(json.dumps({"rates": [{"workers": 0}]}))
    assert "an older version of `energon bench`: run it again" in refusal_of(*asked, code=2)


class Bytes(DefaultTaskEncoder):
    """Leaves parts as they are."""

    decoder = None


def settled(asked: Sequence[object]) -> int:
    """Return how many requests there are, once threads and workers that a busy machine kept waiting made theirs."""
    count = -1
    while count < len(asked):
        count = len(asked)
        time.sleep(0.3)
    return count


@pytest.mark.parametrize(
    ("shards", "size", "batch_size", "ranks", "workers", "lanes"),
    [([200] * 8, 700, 4, 1, 0, 48), ([150] * 6, 40_000, 2, 2, 2, 24), ([900], 100, 3, 1, 2, 48)],
)
def test_requests_and_bytes_are_those_of_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: list[int],
    size: int,
    batch_size: int,
    ranks: int,
    workers: int,
    lanes: int,
) -> None:
    """Of 2,000 steps beside a server that counts, within 5 %, and what is made ahead and not delivered."""
    # No second requests beside slow ones: a busy machine makes any number of these.
    monkeypatch.setattr("energon_bridge.cloud.http._HEDGE_SECONDS", 600.0)
    throw = random.Random(size)
    (tmp_path / "data" / "train").mkdir(parents=True)
    number = itertools.count()
    for shard, count in enumerate(shards):
        samples = {f"{next(number):05d}": {"txt": throw.randbytes(throw.randrange(1, 2 * size))} for _ in range(count)}
        write_shard(tmp_path / "data" / "train" / f"{shard}.tar", samples)
    prepare_dataset(
        tmp_path / "data",
        split=parse_patterns(["train:train/.*"]),
        dataset_yaml=render_dataset_yaml("TextSample", {"text": "txt"}),
        key_index=False,
    )
    with serving(tmp_path / "data") as server:
        options = ["--batch-size", batch_size, "--num-workers", workers, "--num-lanes", lanes, "--world-size", ranks]
        asked = ("plan", server.url, "--steps", 2000, *options, "--step-seconds", 0.5)
        needs = answer(*asked)["needs"]
        for _ in range(3):  # a reading thread that a busy machine keeps waiting leaves its reads to others, which join
            asked_for = []
            at_start = 0
            for rank in range(ranks):
                config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers, num_lanes=lanes)
                spec = get_train_dataset(server.url, batch_size=batch_size, task_encoder=Bytes(), worker_config=config)
                server.asked.clear()  # what opening reads
                loader = get_savable_loader(spec)
                for step, _ in enumerate(itertools.islice(loader, 2000), start=1):
                    if step == needs["start_steps"]:
                        at_start += settled(server.asked)
                loader.close()
                asked_for += server.asked
            if needs["requests_of_run"] == pytest.approx(len(asked_for), rel=0.05):
                break
        said = energon(*asked).output
        day = answer("plan", server.url, "--steps", 2, *options, "--step-seconds", 43_200)["needs"]
    read = 0
    for path, span in asked_for:
        low, high = map(int, span.removeprefix("bytes=").split("-"))
        read += min(high + 1, (tmp_path / "data" / path.lstrip("/")).stat().st_size) - low
    assert needs["requests_of_run"] == pytest.approx(len(asked_for), rel=0.05)
    assert needs["store_bytes_of_run"] == pytest.approx(read, rel=0.05)
    assert needs["start_steps"] == -(-2 * lanes // ranks)
    ahead = 2 * ranks * max(1, workers) * needs["requests_of_start"] / (2 * lanes)  # microbatches that workers make
    assert 0.95 * needs["requests_of_start"] <= at_start <= 1.05 * needs["requests_of_start"] + ahead
    assert "requests_of_day" not in needs, "lanes read ahead at first: the steps of a day ask for less"
    assert "a day" not in said
    assert day["requests_of_day"] == pytest.approx(2 * day["requests_of_step"])
    assert row(said, "requests to the store a step")[1] == f"{needs['requests_of_step']:,.0f}"


def test_requests_of_shards_are_counted_beside_other_files(tmp_path: Path) -> None:
    text_dataset(tmp_path / "data", train=[40])
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(40)))
    energon("prepare", tmp_path / "lines.jsonl")
    with serving(tmp_path) as server:
        needs = {}
        for name, others in (("alone", []), ("both", ["lines.jsonl"])):
            blend = "".join(f"      - {{weight: 1, path: {server.url}/{one}}}\n" for one in ("data", *others))
            (tmp_path / f"{name}.yaml").write_text(
                "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n" + blend
            )
            asked = ("plan", tmp_path / f"{name}.yaml", "--steps", 96, *OPTIONS, "--step-seconds", 1)
            needs[name] = answer(*asked)["needs"]
        said = energon(*asked).output
    assert 0 < needs["both"]["store_bytes_of_run"] < needs["alone"]["store_bytes_of_run"]
    assert f"Requests and bytes of {server.url}/lines.jsonl are not counted" in said


def test_weights_as_written_and_as_shares(data: Path) -> None:
    leaves = answer("plan", data / "weights.yaml", "--steps", 9, *OPTIONS)["leaves"]
    assert [leaf["written"] for leaf in leaves] == ["3", "1", "0.5"]
    assert [leaf["share"] for leaf in leaves] == pytest.approx([3 / 4.5, 1 / 4.5, 0.5 / 4.5])
    leaves = answer("plan", data / "groups.yaml", "--steps", 9, *OPTIONS)["leaves"]
    assert [leaf["written"] for leaf in leaves] == ["1", "2", "2"]
    assert [leaf["share"] for leaf in leaves] == pytest.approx([1 / 3, 2 / 3 * 30 / 42, 2 / 3 * 12 / 42])
    found = answer("plan", data / "repetitions.yaml", "--steps", 9, *OPTIONS)
    assert [leaf["written"] for leaf in found["leaves"]] == ["× 3", "× 0.5", "× 0.7"]
    assert found["mix_epoch"] == pytest.approx(36 + 15 + 8.4)
    assert [leaf["share"] for leaf in found["leaves"]] == pytest.approx([36 / 59.4, 15 / 59.4, 8.4 / 59.4])
    (leaf,) = answer("plan", data / "a", "--steps", 9, *OPTIONS)["leaves"]
    assert (leaf["written"], leaf["share"]) == ("", 1.0)


def test_schedules_have_their_shares_at_start_points_and_end(data: Path) -> None:
    found = answer("plan", data / "linear.yaml", "--steps", 150, *OPTIONS, "--num-lanes", 24)
    assert [point["global_draw"] for point in found["schedule"]] == [0, 200, 300]
    assert [point["shares"][0] for point in found["schedule"]] == pytest.approx([2 / 3, 0.4, 0.4])
    assert [sum(point["shares"]) for point in found["schedule"]] == pytest.approx([1, 1, 1])
    # Draw 200 is draw 8 of lane 8, in its fifth microbatch: the 105th of the run.
    assert [point["step"] for point in found["schedule"]] == [0, 104, 150]
    short = answer("plan", data / "linear.yaml", "--steps", 50, *OPTIONS, "--num-lanes", 24)
    assert [point["global_draw"] for point in short["schedule"]] == [0, 100]
    assert answer("plan", data / "weights.yaml", "--steps", 50, *OPTIONS)["schedule"] == []


@pytest.mark.parametrize(
    ("options", "lanes", "because"),
    [
        (("--num-lanes", 7), 7, "as given"),
        (("--global-batch-size", 24), 48, "the 12 microbatches of a global batch"),
        (("--global-batch-size", 60, "--world-size", 6, "--num-workers", 7), 120, "the 30 microbatches"),
        ((), 48, "a multiple of 24 and of the world size 1"),
        (("--world-size", 5, "--num-workers", 25), 120, "a multiple of 24 and of the world size 5"),
    ],
)
def test_lanes_are_those_of_a_loader_and_explained(
    data: Path, options: tuple[object, ...], lanes: int, because: str
) -> None:
    found = answer("plan", data / "single.yaml", "--steps", 9, *OPTIONS, *options)
    assert found["num_lanes"] == lanes
    assert because in found["lanes_because"]
    names = {"--num-lanes": "num_lanes", "--world-size": "world_size", "--num-workers": "num_workers"}
    given = dict(zip(options[::2], options[1::2], strict=True))
    config = {names[name]: value for name, value in given.items() if name in names}
    if "--global-batch-size" in given:
        config["microbatches_per_global_batch"] = int(str(given["--global-batch-size"])) // 2
    world_size = config.pop("world_size", 1)
    spec = opened(data, "single")
    assert plan_run(spec, WorkerConfig(rank=0, world_size=world_size, **config)).num_lanes == lanes  # type: ignore[arg-type]


def test_the_table_says_it_in_words(data: Path) -> None:
    output = energon("plan", data / "linear.yaml", "--steps", 90, *OPTIONS, "--num-lanes", 24, "--world-size", 5).output
    assert "masked: 4.0% of the microbatches, as 5 ranks do not divide 24 lanes; 4 ranks would mask none" in output
    assert "[weight linear 0: 1 → 200: 3]" in output
    assert f"Repeated most: {data / 'a'} [train]" in output
    assert f"Ends first: {data / 'a'} [train], in step 1." in output
    assert "60.00%" in output
    output = energon("plan", data / "repetitions.yaml", "--steps", 297, *OPTIONS).output
    assert "mix epoch: 59.4 samples; 10.00 mix epochs in all" in output
    output = energon("plan", data / "subset.yaml", "--steps", 3, *OPTIONS).output
    assert f"{data / 'b'} [train] samples 6 to 24" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--steps", 3, "--batch-size", 2), "nowhere"),
        (("a", "--steps", 3), "--batch-size"),
        (("a", "--steps", 3, "--batch-size", 2, "--num-lanes", 3, "--world-size", 4), "cannot share 3 lanes"),
        (("a", "--steps", 3, "--batch-size", 2, "--global-batch-size", 7), "not a multiple of 2"),
        (("a", "--steps", 3, "--batch-size", 0), "batch_size must be"),
        (("a", "--steps", 3, "--batch-size", 2, "--split-part", "trian"), "trian"),
    ],
)
def test_mistakes_are_one_message(data: Path, arguments: tuple[object, ...], message: str) -> None:
    output = refusal_of("plan", data / str(arguments[0]), *arguments[1:])
    assert message in output
    assert output.startswith("Error: ")


def test_samples_without_batches(data: Path) -> None:
    found = answer("plan", data / "a", "--steps", 30, "--batch-size", "none")
    assert (found["batch_size"], found["draws"]) == (None, 30)


def test_it_says_how_well_a_run_mixes_and_warns_of_what_is_mixed_poorly(tmp_path: Path) -> None:
    folder = text_dataset(tmp_path / "sorted", train=[2000, 2000])
    well = answer("plan", folder, "--steps", 9, *OPTIONS)
    assert well["mixing"] == well["leaves"][0]["mixing"] >= 0.97
    poor = ("--num-lanes", 1, "--shuffle-buffer-size", 0, "--parallel-shard-iters", 1)
    assert answer("plan", folder, "--steps", 9, *OPTIONS, *poor)["mixing"] < 0.8
    output = energon("plan", folder, "--steps", 9, *OPTIONS, *poor).output
    assert "Mixing: 0." in output
    assert f"Poorly mixed: {folder} [train] (0." in output
    assert "--shuffle-buffer-size" in output
    assert "Poorly" not in energon("plan", folder, "--steps", 9, *OPTIONS).output
    unshuffled = energon("plan", folder, "--steps", 9, *OPTIONS, "--no-shuffle")
    assert "Mixing" not in unshuffled.output

"""`group_by`: one bucket on all ranks in each global batch, each sample as often, on any topology and after stops."""

from __future__ import annotations

import io
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from commands import output_of, refusal_of
from engine import SkippingEncoder, TensorEncoder, config_of, digest, loaders_of, numbers_of, text_dataset
from PIL import Image, ImageOps

from energon_bridge import AspectTiers, Blender, DefaultTaskEncoder, SampleDecoder, SkipSample, get_train_dataset
from energon_bridge.core.errors import (
    ConfigurationError,
    EmptyDatasetError,
    EnergonError,
    FatalSampleError,
    SettingMismatchError,
)
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.columns.making import add_column
from energon_bridge.tools.forecast.planned_run import run_of_mix
from energon_bridge.tools.testing import write_shard

TIERS = AspectTiers(area=512 * 512)
GROUP = 6
SHAPES = [(640, 480), (1000, 480), (300, 900), (512, 500)]


def number_of(sample: Any) -> int:
    return int(sample.text.split()[1])


def shape_of(number: int) -> tuple[int, int]:
    return SHAPES[(0, 0, 1, 0, 2, 0, 1, 0, 3, 0)[number % 10]]


def name_of(number: int) -> str:
    return "{}x{}".format(*TIERS.size_of(*shape_of(number)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    for name, counts in {"a": [150, 93], "b": [40, 20]}.items():
        path = str(text_dataset(folder / name, train=counts))
        add_column(path, "width", lambda sample: shape_of(number_of(sample))[0], made_of="width")
        add_column(path, "height", lambda sample: shape_of(number_of(sample))[1], made_of="height")
        add_column(path, "number", number_of, made_of="number")
    text_dataset(folder / "bare", train=[5])
    return folder


def opened(source: Any, encoder: Any = None, **kwargs: Any) -> DatasetSpec:
    settings: dict[str, Any] = {"batch_size": 4, "group_by": TIERS.group_by, "worker_config": config_of(1, 0)}
    source = str(source) if isinstance(source, Path) else source
    return get_train_dataset(source, task_encoder=encoder or TensorEncoder(), **(settings | kwargs))


def ranks_of(dataset: DatasetSpec, ranks: int = 1, workers: int = 0, group: int | None = GROUP) -> list[Any]:
    return loaders_of(dataset, ranks, workers, num_lanes=None, microbatches_per_global_batch=group)


def test_each_global_batch_has_one_bucket_and_each_sample_comes_as_often(data: Path) -> None:
    sizes = {"384x640": 3, "512x512": 8, "640x384": 5}
    dataset = opened(data / "a", bucket_batch_size=sizes)
    assert dataset.buckets is not None
    rows = dict(zip(dataset.buckets.names, dataset.buckets.rows, strict=True))
    assert rows == sizes | {"576x448": 4}
    names = Counter(name_of(number) for number in range(243))
    assert dict(zip(dataset.buckets.names, dataset.buckets.samples, strict=True)) == names
    (loader,) = ranks_of(dataset)
    batches = [numbers_of(batch) for batch in islice(loader, 100 * GROUP)]
    seen: Counter[int] = Counter()
    laps: Counter[str] = Counter()
    epoch = sum(count / rows[name] for name, count in names.items()) / GROUP
    for lap in range(100):
        parts = batches[lap * GROUP : lap * GROUP + GROUP]
        (name,) = {name_of(number) for part in parts for number in part}
        assert {len(part) for part in parts} == {rows[name]}
        laps[name] += 1
        seen.update(number for part in parts for number in part)
        for bucket, count in names.items():  # in proportion all along
            assert abs(laps[bucket] - (lap + 1) * count / rows[bucket] / GROUP / epoch) < 2.5
    for name, count in names.items():  # nothing is dropped where an epoch of the bucket ends
        times = [seen[number] for number in range(243) if name_of(number) == name]
        assert len(times) == count
        assert max(times) - min(times) <= 1


def test_a_bucket_is_the_stream_of_its_samples_alone(data: Path) -> None:
    dataset = opened(data / "a", bucket_batch_size="6 - width // 500", shuffle_buffer_size=100)
    assert dataset.buckets is not None
    (loader,) = ranks_of(dataset)
    batches = list(islice(loader, 45 * GROUP))
    for name, rows in zip(dataset.buckets.names, dataset.buckets.rows, strict=True):
        width, height = name.split("x")
        chosen = f"{TIERS.group_by[0]} == {width} and {TIERS.group_by[1]} == {height}"
        alone = opened(data / "a", filter=chosen, batch_size=rows, group_by=None, shuffle_buffer_size=100)
        own = [numbers for numbers in map(numbers_of, batches) if name_of(numbers[0]) == name]
        assert own == [numbers_of(batch) for batch in islice(loaders_of(alone, 1, 0, num_lanes=GROUP)[0], len(own))]


def test_weights_hold_over_all_buckets(data: Path) -> None:
    blend = Blender([(data / "a", 1), (Blender([(data / "b", 1)]), 3)])
    dataset = opened(blend, bucket_batch_size="2 + width // 300")
    (loader,) = ranks_of(dataset)
    drawn = Counter(
        leaf.dataset.path
        for batch in islice(loader, 600)
        for key in batch.__restore_key__[3]
        for leaf in dataset.leaves
        if leaf.identity == key[0]
    )
    assert drawn[str(data / "b")] / drawn.total() == pytest.approx(0.75, abs=0.02)
    twice = opened(Blender([(data / "a", 1), (data / "a", 1)]))
    assert len(twice.leaves) == len({leaf.identity for leaf in twice.leaves}) == 8


def test_a_sample_is_found_and_banned(data: Path) -> None:
    dataset = opened(data / "a")
    (loader,) = ranks_of(dataset)
    batch = next(iter(loader))
    assert digest(loader.restore_sample(json.loads(json.dumps(batch.__restore_key__)))) == digest(batch)
    gone = list(range(0, 240, 7))
    loader.ban([f"{number:05d}" for number in gone])
    later = {number for batch in islice(iter(loader), 250) for number in numbers_of(batch)}
    assert later == set(range(243)) - set(gone)
    with pytest.raises(ConfigurationError, match="from_draw"):
        loader.ban(["00001"], from_draw=5)
    with pytest.raises(ConfigurationError, match="group_by"):
        loader.set_weights([1])


def keys_in(*names: str) -> list[str]:
    return [f"{number:05d}" for number in range(243) if name_of(number) in names]


def named(batch: Any) -> str:
    (name,) = {name_of(number) for number in numbers_of(batch)}
    return name


def test_buckets_of_which_all_is_banned_leave_their_turns_to_the_others(data: Path) -> None:
    dataset = opened(data / "a", bucket_batch_size="2 + width // 400")
    assert dataset.buckets is not None
    (plain,) = ranks_of(dataset)
    unbanned = [named(batch) for batch in islice(plain, 80 * GROUP)]
    (loader,) = ranks_of(dataset)
    stream = iter(loader)
    begun = [named(batch) for batch in islice(stream, 9 * GROUP)]
    gone = ("384x640", "640x384")
    loader.ban(keys_in(*gone))
    names = begun + [named(batch) for batch in islice(iter(loader), 71 * GROUP)]
    moved = {}
    for lap in range(80):
        (before,), (after,) = (set(part[lap * GROUP : lap * GROUP + GROUP]) for part in (unbanned, names))
        if lap < 9 or before not in gone:
            assert after == before  # no other lap moves
        else:
            moved[lap] = after
    counts = Counter(moved.values())
    assert {*counts} == {"512x512", "576x448"}
    shares = {
        name: count / rows
        for name, count, rows in zip(dataset.buckets.names, dataset.buckets.samples, dataset.buckets.rows, strict=True)
        if name in counts
    }
    for name, share in shares.items():
        assert abs(counts[name] - len(moved) * share / sum(shares.values())) < 1.5
    with pytest.raises(EmptyDatasetError, match="nothing would be left"):
        loader.ban([f"{number:05d}" for number in range(243)])


def test_banned_buckets_are_the_same_on_any_topology_and_after_stops(data: Path) -> None:
    dataset = opened(
        Blender([(data / "a", 2), (data / "b", 1)]), SkippingEncoder(), bucket_batch_size="2 + width // 400"
    )
    bans = {21: keys_in("512x512"), 33: keys_in("576x448")[:1], 66: keys_in("576x448", "640x384")}
    (alone,) = ranks_of(dataset)
    expected: list[str] = []
    for end in (*bans, 120):
        batches = list(islice(iter(alone), end - len(expected)))
        expected += [digest(batch) for batch in batches]
        alone.ban(bans.get(end, []))
    assert {named(batch) for batch in batches} == {"384x640"}
    found: list[str] = []
    states: list[Any] = []
    for ranks, workers, steps in ((1, 1, 21), (3, 2, 4), (3, 0, 8), (1, 1, 9), (6, 0, 5), (2, 3, 12)):
        loaders = ranks_of(dataset, ranks, workers)
        for loader in loaders:
            if states:
                loader.restore_state_rank(json.loads(json.dumps(states)))
            loader.ban(bans.get(len(found), []))
        streams = [iter(loader) for loader in loaders]
        for _ in range(steps):
            row = [next(stream) for stream in streams]
            assert len({name_of(number) for batch in row for number in numbers_of(batch)}) == 1
            found += [digest(batch) for batch in row]
        states = [loader.save_state_rank() for loader in loaders]
    assert found == expected
    started, again = (ranks_of(opened(data / "a"))[0] for _ in range(2))
    for loader in (started, again):
        loader.ban(bans[21])
    again.seek(24)
    assert [digest(batch) for batch in islice(again, 36)] == [digest(batch) for batch in islice(started, 60)][24:]


class NoSquares(TensorEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if name_of(number_of(sample)) == "512x512":
            raise SkipSample
        return super().encode_sample(sample)


def test_a_bucket_of_which_hooks_skip_everything_is_named_and_a_ban_goes_on_without_it(data: Path) -> None:
    dataset = opened(data / "a", NoSquares())
    (loader,) = ranks_of(dataset)
    with pytest.raises(
        EmptyDatasetError, match=r"in a row from bucket 512x512, .* nothing is left of the bucket\. Ban"
    ):
        list(islice(loader, 20 * GROUP))
    state = loader.save_state_rank()
    (again,) = ranks_of(dataset)
    again.restore_state_rank(state)
    again.ban(keys_in("512x512"))
    assert {named(batch) for batch in islice(again, 20 * GROUP)} == {"384x640", "576x448", "640x384"}


def test_buckets_smaller_than_a_global_batch_are_named_once(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"384x640": 5, "640x384": 4}
    dataset = opened(data / "a", bucket_batch_size=sizes)
    assert dataset.buckets is not None
    assert next(zip(dataset.buckets.names, dataset.buckets.samples, strict=True)) == ("384x640", 24)
    for _ in range(2):
        ranks_of(dataset, 2)
    assert [record.getMessage() for record in caplog.records if "group_by" in record.getMessage()] == [
        "group_by: bucket 384x640 has 24 samples, fewer than the 30 of a global batch: a global batch repeats their "
        "samples. Make the tiers wider, lower bucket_batch_size, or leave them out by a filter"
    ]


def test_states_keep_to_their_buckets_and_global_batch(data: Path) -> None:
    dataset = opened(data / "a")
    (loader,) = ranks_of(dataset)
    list(islice(loader, 20))
    state = loader.save_state_rank()
    for other in (opened(data / "a", batch_size=5), opened(data / "a", group_by="width")):
        with pytest.raises((SettingMismatchError, EnergonError)):
            ranks_of(other)[0].restore_state_rank(state)
    said = r"the buckets \(group_by\) of so many rows a microbatch: 384x640: \d.*Resume with the group_by, batch_size"
    with pytest.raises(SettingMismatchError, match=said):
        ranks_of(opened(data / "a", group_by="width"))[0].restore_state_rank(state)
    with pytest.raises(ConfigurationError, match="global batch"):
        ranks_of(dataset, group=4)[0].restore_state_rank(state)
    for group in (None, 3, 2):  # parts of a lap have one bucket, too
        ranks_of(dataset, group=group)[0].restore_state_rank(state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_by": "number"}, None),
        ({"group_by": "weight"}, "no column 'weight'"),
        ({"group_by": "number / 0"}, "divisor"),
        ({"group_by": "aspect_width(width, height, 100, 64)"}, "no size"),
        ({"group_by": "aspect_width(width)"}, "cannot be computed"),
        ({"group_by": "sum(width)"}, "not allowed"),
        ({"batch_size": None}, "batch_size=None"),
        ({"packing_buffer_size": 9}, "packing_buffer_size"),
        ({"repeat": False}, "repeat=False"),
        ({"bucket_batch_size": "100 - width"}, "expected at least 1"),
        ({"bucket_batch_size": {"1x1": 3}}, "names no bucket"),
        ({"group_by": None, "bucket_batch_size": "3"}, "group_by"),
    ],
)
def test_mistakes_are_named(data: Path, settings: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert len(opened(data / "a", **settings).leaves) == 243
        return
    with pytest.raises(ConfigurationError, match=words):
        opened(data / "a", **settings)


def test_a_filter_protects_the_expressions_of_buckets(data: Path) -> None:
    """Number 0 would be a divisor, and number 9 have no sample in a microbatch."""
    with pytest.raises(ConfigurationError, match="divisor"):
        opened(data / "a", group_by="100 // number")
    dataset = opened(
        data / "a",
        group_by="100 // number // 10",
        bucket_batch_size="8 // number % 9 + number // number",
        filter="number >= 1 and number != 9 and 9 / number > 0",
    )
    wanted = Counter(str(100 // number // 10) for number in range(1, 243) if number != 9)
    assert dict(zip(dataset.buckets.names, dataset.buckets.samples, strict=True)) == wanted
    blender = Blender([(data / "a", 1), (data / "b", 1)], unit="100 // number")
    with pytest.raises(ConfigurationError, match="divisor"):
        opened(blender, group_by=None)
    assert len(opened(blender, group_by=None, filter="number > 0").leaves) == 2


def picture(width: int, height: int, orientation: int, form: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.new("RGB", (width, height), (width, height, orientation)).save(file, form, exif=exif)
    return file.getvalue()


class Pictures(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Batches of images as they are decoded."""

    def __init__(self, *, autorotate: bool) -> None:
        self.decoder = SampleDecoder(image_decode="torchrgb8", autorotate=autorotate)


@pytest.mark.parametrize("autorotate", [False, True])
def test_a_bucket_has_one_shape_however_images_lie(tmp_path: Path, autorotate: bool) -> None:
    sizes = [(40, 24), (24, 40)]
    files = {
        f"{number:02d}": {
            "jpg": picture(*sizes[number % 2], (1, 3, 6, 8)[number // 2 % 4], ("JPEG", "PNG", "WEBP")[number % 3])
        }
        for number in range(16)
    }
    write_shard(tmp_path / "0.tar", files)
    prepare_dataset(
        tmp_path,
        split=parse_patterns(["train:.*"]),
        dataset_yaml=render_dataset_yaml("ImageSample", {"image": "jpg"}),
    )

    def run() -> DatasetSpec:
        return opened(tmp_path, Pictures(autorotate=autorotate), group_by=("width", "height"))

    flags = {False: ["--image-size"], True: ["--image-size", "--autorotate"]}
    output_of("columns", "add", tmp_path, *flags[not autorotate])
    with pytest.raises(ConfigurationError, match=rf"--image-size{' --autorotate' * autorotate}$"):
        run()
    output_of("columns", "add", tmp_path, *flags[autorotate])
    dataset = run()
    turned = [  # as viewers show them, by Pillow
        ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size if autorotate else Image.open(io.BytesIO(data)).size
        for parts in files.values()
        for data in parts.values()
    ]
    wanted = Counter(f"{width}x{height}" for width, height in turned)
    assert dict(zip(dataset.buckets.names, dataset.buckets.samples, strict=True)) == wanted
    loader = ranks_of(dataset, group=2)[0]
    batches = [batch.image.shape[2:] for batch in islice(loader, 8)]  # stacked, so of one shape
    assert {f"{width}x{height}" for height, width in batches} == set(wanted)
    assert "--autorotate is for --image-size" in refusal_of("columns", "add", tmp_path, "--hash", "--autorotate")


def test_what_does_not_fit_buckets_says_so(data: Path) -> None:
    for mix, words in (
        (Blender([(data / "a", 1), (data / "b", 1)], unit="width"), "unit"),
        (Blender([(data / "a", None), (data / "b", None)]), "concat"),
        (Blender([(data / "a", 1), (data / "bare", 1)]), "no column"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            opened(mix)
    dataset = opened(data / "a", worker_config=config_of(1, 0, num_lanes=None, microbatches_per_global_batch=GROUP))
    with pytest.raises(ConfigurationError, match="group_by"):
        run_of_mix(dataset)

    class Several(TensorEncoder):
        def encode_batch(self, batch: Any) -> Any:
            yield batch
            yield batch

    with pytest.raises(FatalSampleError, match="make one of each"):
        next(iter(ranks_of(opened(data / "a", Several()))[0]))

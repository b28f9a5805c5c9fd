"""`energon preview`: what it shows is what is in the data, and what a run delivers, and hostile data does nothing."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import previews
import pytest
import torch
from commands import answer, energon, output_of, refusal_of
from conversations import conversations_dataset
from engine import ENCODERS, NEEDED, config_of, is_masked, loaders_of
from forecasts import MIXES, OPTIONS, opened, ranks_of, run, write_mixes
from keyed import KEYS, join, keyed_dataset, shards, shuffled, write_mix
from made import made_once
from paths import CONFIGS, REPOSITORY
from PIL import Image

from energon_bridge import DefaultTaskEncoder, SampleDecoder, get_savable_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.registry import load
from energon_bridge.models.av import AVDecoder
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.tools.forecast.planned_run import run_of_state
from energon_bridge.tools.preview.batches import TokenNames, delivered, shown
from energon_bridge.tools.preview.pages import histogram, write_pages
from energon_bridge.tools.preview.records import Clip, Picture, SampleRecord, ShownTurn, Text, fields_of, items_of
from energon_bridge.tools.preview.sample_source import SampleSource, shared_out
from energon_bridge.tools.preview.terminal import half_blocks, lines_of, lines_of_batch, waveform
from energon_bridge.tools.testing import create_captioning_test_dataset, write_shard

CONFIG = CONFIGS / "packed.yaml"
LANES = ("--num-lanes", 24)


data = made_once(write_mixes)


captions = made_once(create_captioning_test_dataset, num_train=30)


def source_of(path: Path) -> SampleSource:
    return SampleSource(get_train_dataset(path, batch_size=None, trust_remote_code=True))


def records_of(path: Path, limit: int | None = None) -> list[SampleRecord]:
    source = source_of(path)
    return list(source.records(source.in_order(limit), lambda record: record))


# Samples -------------------------------------------------------------------------------------------------------------


def test_samples_come_in_the_order_of_their_dataset(captions: Path) -> None:
    found = records_of(captions)
    assert [one.key for one in found] == [f"train-{n:05d}" for n in range(30)]
    assert [one.shard for one in found] == [f"train/shard_{n // 10:03d}.tar" for n in range(30)]
    (image,), (caption,) = (items for _, items in found[7].fields)
    assert isinstance(image, Picture)
    assert (image.width, image.height) == (16, 16)
    assert re.fullmatch(r"a \w+ picture 7", caption.text)


def test_samples_are_shown_by_key(data: Path, captions: Path, tmp_path: Path) -> None:
    """They are those that a walk through the dataset shows under the key."""
    walked = {one.key: one for one in records_of(captions)}
    shown = answer("preview", captions, "--key", "train-00017", "--key", "train-00003")
    assert shown["notes"] == ["2 samples by key, of 30 samples"]
    assert [(one["key"], one["index"], one["shard"]) for one in shown["samples"]] == [
        (key, walked[key].index, walked[key].shard) for key in ("train-00017", "train-00003")
    ]
    halves = (["0%", "50%"], ["50%", "100%"])
    parts = [{"path": str(captions), "weight": 1, "subset": {"range": half}} for half in halves]
    mix = write_mix(tmp_path / "twice.yaml", train={"blend": parts})
    assert [one["index"] for one in answer("preview", mix, "--key", "train-00017")["samples"]] == [17]
    missing = energon("preview", captions, "--key", "val-00003")
    assert "no sample has the key 'val-00003'. --split-part reads another part" in missing.output
    assert missing.exit_code == 1
    assert answer("preview", captions, "--key", "val-00003", "--split-part", "val")["samples"][0]["key"] == "val-00003"
    lines = tmp_path / "talks.jsonl"
    lines.write_text('{"text": "a"}\n{"text": "b"}\n')
    (line,) = answer("preview", lines, "--key", "1")["samples"]
    assert "b" in str(line["fields"])


def test_what_code_of_a_dataset_makes_is_shown(tmp_path: Path) -> None:
    (one, *_) = records_of(conversations_dataset(tmp_path / "c", num_train=3, num_val=1), 1)
    assert [name for name, _ in one.fields] == ["image", "context", "answers"]
    assert isinstance(one.fields[0][1][0], Picture)


def test_a_mix_shows_of_each_dataset_and_its_share(data: Path, captions: Path, tmp_path: Path) -> None:
    mix = previews.mix_of(
        tmp_path / "mix.yaml", a=data / "a", captions=captions, chats=previews.chats(tmp_path / "x.jsonl")
    )
    source = source_of(mix)
    assert [(part.num_samples, round(part.share, 3)) for part in source.parts()] == [(12, 0.167), (30, 0.333), (4, 0.5)]
    found = list(source.records(source.in_order(20), lambda record: Path(record.dataset).name))
    assert found == ["a"] * 8 + [captions.name] * 8 + ["x.jsonl"] * 4


@pytest.mark.parametrize(
    ("limit", "sizes", "expected"),
    [(5, [10, 10], [3, 2]), (100, [3, 4], [3, 4]), (10, [1, 100, 3], [1, 6, 3]), (1, [5, 5], [1, 0]), (None, [2], [2])],
)
def test_a_cut_takes_equal_numbers(limit: int | None, sizes: list[int], expected: list[int]) -> None:
    assert shared_out(limit, sizes) == expected


def test_conversations_are_turns(tmp_path: Path) -> None:
    found = records_of(previews.chats(tmp_path / "x.jsonl"))
    turns = [item for _, items in found[1].fields for item in items]
    assert turns == [
        ShownTurn("user", (Text("text", "turn 0 of 1"),)),
        ShownTurn("assistant", (Text("text", "turn 1 of 1"),)),
        ShownTurn("user", (Text("text", "turn 2 of 1"),)),
    ]
    assert found[1].sizes()["turns"] == [3]


def test_a_turn_is_shown_with_what_stands_beside_its_content() -> None:
    calls = [{"function": {"name": "zoom"}}]
    turns = [{"role": "assistant", "content": content, "tool_calls": calls, "name": None} for content in (None, "a")]
    beside = Text("json", json.dumps({"tool_calls": calls}, indent=2))
    assert list(items_of(turns)) == [
        ShownTurn("assistant", (beside,)),
        ShownTurn("assistant", (Text("text", "a"), beside)),
    ]


def test_what_does_not_load_is_shown_with_its_error(tmp_path: Path) -> None:
    found = {one.key: one for one in records_of(previews.hostile_dataset(tmp_path / "hostile"))}
    assert len(found) == 5
    for key, reason in (("3bomb", "pixels"), ("4none", "image")):
        errors = [item for item in found[key].items() if isinstance(item, Text) and item.kind == "error"]
        assert [reason in error.text for error in errors] == [True], (key, found[key])
    assert not found["0good"].error
    assert all(not isinstance(item, Text) or item.kind == "text" for item in found["0good"].items())


def test_what_cannot_be_decoded_fails_its_own_samples_only(tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"a": 1}\n{"a": }\n{"a": 3}\n')
    found = records_of(lines)
    assert [bool(one.error) for one in found] == [False, True, False]
    assert "DecodeError" in found[1].error
    path = create_captioning_test_dataset(tmp_path / "cut", num_train=40, num_val=0)
    shard = path / "train" / "shard_001.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    found = records_of(path)
    assert [one.index for one in found if one.error] == list(range(10, 20))
    assert "the last sample ends at byte" in found[15].error
    assert [one.key for one in found if not one.error] == [f"train-{n:05d}" for n in range(40) if n // 10 != 1]


def test_the_rows_of_a_join_are_shown_step_by_step(tmp_path: Path) -> None:
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 8, 12), exclude=["train/0.tar/k03"])
    keyed_dataset(tmp_path / "b", train=shards(shuffled(KEYS)[:15], 5, 10))
    mix = write_mix(tmp_path / "mix.yaml", train={"blend": [join({}, {"nonmatch": "skip"}, weight=2)]})
    steps = run(ranks_of(get_train_dataset(mix, batch_size=2, worker_config=config_of(1, 0)), 1), 5)
    found = answer("preview", mix, "--batch-size", 2, *LANES, "--step", 4)
    assert [key for _, _, key in keys_of(found)] == [key for _, key in steps[4][0] or ()]
    assert {one["error"] for one in found["samples"]} == {None}


def test_a_step_of_validation_is_shown(data: Path, tmp_path: Path) -> None:
    loader = get_savable_loader(get_val_dataset(data / "weights.yaml", batch_size=3, worker_config=config_of(1, 0)))
    batches = list(islice(loader, 4))
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    found = answer("preview", tmp_path / "state.json", "--step", 3)
    assert [key for _, _, key in keys_of(found)] == batches[3].__key__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, (Text("note", "3"),)),
        (b"123", (Text("note", "3 bytes"),)),
        (torch.tensor([1, 2]), (Text("note", "int64[2] = [1, 2]"),)),
        (torch.zeros(500), (Text("note", "float32[500]"),)),
        (["a", "b"], (Text("text", "a"), Text("text", "b"))),
        ({"a": [1]}, (Text("json", '{\n  "a": [\n    1\n  ]\n}'),)),
        ({(1, 2): 3}, (Text("note", "dict of (1, 2)"),)),
    ],
)
def test_values_are_named_or_shown(value: Any, expected: tuple[Any, ...]) -> None:
    assert items_of(value) == expected


def test_values_are_cut_and_images_shown_small() -> None:
    (text,) = items_of("x" * 100_000)
    assert isinstance(text, Text)
    assert len(text.text) < 21_000
    assert text.text.endswith("(80,000 more characters)")
    assert len(items_of(["x"] * 1000)) == 65
    circle: list[Any] = []
    circle.append(circle)
    assert items_of(circle) == (Text("note", "1 x list"),)
    (picture,), (array,) = items_of(Image.new("RGB", (2000, 1000))), items_of(torch.rand(3, 40, 20))
    assert isinstance(picture, Picture)
    assert (picture.width, picture.height, picture.image.size) == (2000, 1000, (320, 160))
    assert isinstance(array, Picture)
    assert (array.width, array.height) == (20, 40)


def test_sounds_are_players_and_waves(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from clips import write_sound, write_video

    wav = write_sound(tmp_path / "a.wav", codec="pcm_s16le", rate=16000, seconds=1.0).read_bytes()
    film = write_video(tmp_path / "film.mp4", options={"x264-params": "log-level=0"}, frames=5).read_bytes()
    ramp = np.concatenate([np.zeros(800), np.linspace(0, 1, 800)]).astype(np.float32)
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
    turns = [{"role": "user", "content": ["What?", part, {"type": "audio"}, {"type": "audio", "audio": (ramp, 16000)}]}]
    sample = {
        "wav": AVDecoder(wav, name="wav"),
        "film": AVDecoder(film, name="film.mp4"),
        "pair": (ramp, 8000),
        "sounds": [{"array": ramp, "sampling_rate": 8000}],
        "other": (np.zeros((3, 4)), 7),
        "bad": AVDecoder(wav[:20], name="bad.wav"),
        "turns": turns,
        "picture": [{"role": "user", "content": [{"type": "image", "image": b"bytes"}]}],
    }
    shown = dict(fields_of(sample))
    for name in ("wav", "pair", "sounds"):
        (clip,) = shown[name]
        assert isinstance(clip, Clip)
        assert (clip.kind, clip.suffix) == ("audio", "wav")
    (turn,) = shown["turns"]
    assert isinstance(turn, ShownTurn)
    assert [type(item) for item in turn.items] == [Text, Clip, Text, Clip]
    assert isinstance(turn.items[1], Clip)
    assert turn.items[1].stream == wav
    assert turn.items[2] == Text("text", "<audio>")
    assert shown["picture"] == (ShownTurn("user", (Text("text", "<image>"),)),)
    (pair,) = shown["pair"]
    assert isinstance(pair, Clip)
    assert AVDecoder(pair.stream).get_audio().audio_clips[0][0].numpy() == pytest.approx(ramp, abs=1e-4)  # type: ignore[index]
    assert not any(isinstance(item, Clip) for item in shown["other"])
    record = SampleRecord(
        dataset="d", key="k", shard="", index=0, fields=[(name, shown[name]) for name in ("pair", "film", "bad")]
    )
    lines = [line.plain for line in lines_of(record, columns=8)]
    wave = lines[lines.index("pair") + 2 : lines.index("film")]
    assert wave == ["        ▄█", "      ▄███", "  ▀▀▀▀    ", "          "]
    assert not any("▄" in line for line in lines[lines.index("film") :])
    assert any("DecodeError" in line for line in lines[lines.index("bad") :])
    named = [line.plain for line in lines_of(record, columns=0)]
    assert not any("█" in line for line in named)


def test_a_wave_goes_from_the_lowest_to_the_highest_sample() -> None:
    heard = np.concatenate([np.zeros(4), np.full(4, 0.25), np.full(4, -0.5), [0.5, -0.5, 0, 0]])
    assert [line.plain for line in waveform(heard, 4)] == ["   █", " █ █", "▀ ██", "  ██"]
    assert [line.plain for line in waveform(heard[:0], 4)] == [" ", " ", "▀", " "]


# Steps ---------------------------------------------------------------------------------------------------------------


def keys_of(found: Any) -> list[tuple[int, int, str]]:
    return [(one["rank"], one["row"], one["key"]) for one in found["samples"]]


@pytest.mark.parametrize(("mix", "ranks"), list(zip(MIXES, cycle([1, 3, 5])))[::2])
def test_a_step_of_a_mix_is_what_is_delivered(data: Path, mix: str, ranks: int) -> None:
    steps = run(ranks_of(opened(data, mix), ranks), 12)
    arguments = (data / f"{mix}.yaml", *OPTIONS, *LANES, "--world-size", ranks)
    for step in (0, 4, 11):
        rows = enumerate(steps[step])
        expected = [(rank, row, key) for rank, some in rows for row, (_, key) in enumerate(some or ())]
        assert keys_of(answer("preview", *arguments, "--step", step)) == expected


def test_steps_of_a_state_are_what_is_delivered(data: Path, tmp_path: Path) -> None:
    loaders = ranks_of(opened(data, "weights"), 2)
    steps = run(loaders, 9)
    torch.save([loader.save_state_rank() for loader in loaders], tmp_path / "state.pt")
    found = answer("preview", tmp_path / "state.pt", "--world-size", 2, "--steps", "3:5", "--rank", 1)
    assert keys_of(found) == [(1, row, key) for step in (3, 4) for row, (_, key) in enumerate(steps[step][1] or ())]
    assert {one["step"] for one in found["samples"]} == {3, 4}
    assert any(note.startswith("Exact") for note in found["notes"])


@pytest.mark.parametrize(
    ("name", "mix", "ranks"), [(name, *more) for name, more in zip(ENCODERS, cycle([("weights", 5), ("single", 2)]))]
)
def test_a_run_that_changed_its_ranks_is_shown_as_it_was_delivered(data: Path, name: str, mix: str, ranks: int) -> None:
    """Saved on three ranks, gone on with on others, with workers: packs, groups, generators, skips, masked batches."""
    dataset = opened(data, mix, ENCODERS[name](), **NEEDED.get(name, {}))
    loaders = ranks_of(dataset, 3)
    run_on(loaders, 10)
    state = merge([loader.save_state_rank() for loader in loaders])  # 30 microbatches: step 15 of 2, 6 and a bit of 5
    if ranks == 5:
        loaders = loaders_of(dataset, 2, 0, state=state)
        run_on(loaders, 5)
        state = merge(
            [loader.save_state_rank() for loader in loaders]
        )  # 40 microbatches: step 9 of 5 ranks begins at 44
        loaders = loaders_of(dataset, 4, 0, state=state)
        run_on(loaders, 2)
        state = merge([loader.save_state_rank() for loader in loaders])  # 48
    first = {2: 15, 5: 10}[ranks]
    columns = run_on(loaders_of(dataset, ranks, 2, state=state), 4)
    encoder = dataset.settings.task_encoder
    expected = [
        shown(columns[rank][step], encoder, step=first + step, rank=rank, num_lanes=24)
        for step in (1, 3)
        for rank in range(ranks)
    ]
    found = delivered(dataset, range(first + 1, first + 4), world_size=ranks, state=state)
    assert [one for one in found if one.step != first + 2] == expected
    masked = [is_masked(columns[rank][step]) for step in (1, 3) for rank in range(ranks)]
    assert [one.microbatch is None for one in expected] == masked
    # The samples that it names are those of the batches.
    names = SampleSource(dataset)
    drawn = [drawn for batch in found for drawn in batch.drawn()]
    loaded = list(names.records(drawn, lambda record: (record.facts["step"], record.facts["rank"], record.key)))
    rows = [(first + step, rank, columns[rank][step]) for step in (1, 2, 3) for rank in range(ranks)]
    for step, rank, batch in rows:
        keys = batch["__key__"] if isinstance(batch["__key__"], list) else [batch["__key__"]]
        said = [key for at, of, key in loaded if (at, of) == (step, rank)]
        assert said[:1] == (keys[:1] if not is_masked(batch) else [])
        assert name in ("packing", "prepost") or len(said) in (0, len(keys))


def run_on(loaders: list[Any], steps: int) -> list[list[Any]]:
    """Return what each rank delivers in some steps."""
    columns = [list(islice(loader, steps)) for loader in loaders]
    for loader in loaders:
        loader.close()
    return columns


PACKED = ("--encoder", "previews:encoder", "--batch-size", 2, "--packing-buffer-size", 10, "--num-workers", 0)


def test_a_packed_step_is_what_worker_processes_deliver(data: Path, captions: Path, tmp_path: Path) -> None:
    mix = previews.mix_of(tmp_path / "mix.yaml", captions=captions, again=captions)
    settings: dict[str, Any] = {"batch_size": 2, "packing_buffer_size": 10, "task_encoder": previews.encoder()}
    dataset = get_train_dataset(mix, worker_config=config_of(1, 2), **settings)
    loader = get_savable_loader(dataset)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    real = [next(batches) for _ in range(3)][-1]
    loader.close()
    for arguments in ((mix,), (tmp_path / "state.json", "--mix", mix), (tmp_path / "state.json",)):
        found = answer("preview", *arguments, *PACKED, *LANES, "--step", 5)
        (batch,) = found["batches"]
        assert (batch["step"], batch["rank"], batch["microbatch"]) == (5, 0, 5)
        keys = [one["key"] for row in batch["rows"] for one in row["segments"]]
        assert keys == real.sample_keys == [one["key"] for one in found["samples"]]
        tokenizer = previews.encoder().tokenizer
        for number, row in enumerate(batch["rows"]):
            assert [tuple(one[name] for name in ("dataset", "key", "start", "length")) for one in row["segments"]] == [
                tuple(one) for one in real.segments[number]
            ]
            assert row["padding"] == row["length"] - sum(one["length"] for one in row["segments"])
            for one in row["segments"]:
                assert sum(token["count"] for token in one["tokens"]) == one["length"]
                tokens = real.tokens[number, one["start"] : one["start"] + one["length"]].tolist()
                images = [token for token in one["tokens"] if token["kind"] == "image"]
                assert [image["count"] for image in images] == [tokens.count(3)] == [4]
                assert one["tokens"][0] == {"kind": "special", "text": tokenizer.words[1], "label": None, "count": 1}
                learned = [token["label"] for token in one["tokens"] if token["label"] is not None]
                place = slice(one["start"], one["start"] + one["length"])
                assert len(learned) == int(real.loss_mask[number, place].sum())
                (sample,) = [sample for sample in found["samples"] if sample["key"] == one["key"]][:1]
                (caption,) = next(field["items"] for field in sample["fields"] if field["name"] == "caption")
                assert " ".join(learned) == f"{caption['text']} </s>"


class Texts(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Its batches are lists of texts, or one text, which have no keys."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.together = together

    def batch(self, samples: list[Any]) -> Any:
        texts = [sample.caption for sample in samples]
        return " / ".join(texts) if self.together else texts


@pytest.mark.parametrize("together", [False, True])
def test_batches_that_are_lists_show_what_is_in_them(captions: Path, together: bool) -> None:
    spec = get_train_dataset(
        captions, batch_size=2, task_encoder=Texts(together=together), worker_config=config_of(1, 0)
    )
    loader = get_savable_loader(spec)
    batch = next(iter(loader))
    loader.close()
    (found,) = delivered(spec, range(1), world_size=1)
    texts = [batch] if together else batch
    lines = [line.plain.strip() for line in lines_of_batch(found, columns=0)]
    kind = "str of 1 row" if together else "list of 2 rows"
    rows = [line for number, text in enumerate(texts) for line in (f"row {number}", "value", text)]
    assert lines[:-1] == [f"step 0, rank 0: {kind}", *rows]


class Turning(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Turns images as EXIF says, and lays transparent ones on white."""

    decoder = SampleDecoder(autorotate=True)
    image_alpha = "white"


def test_pictures_are_shown_as_the_run_sees_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The sizes and colours are those that Pillow gives for the files, turned, on white."""
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {name: io.BytesIO() for name in ("turned", "clear")}
    Image.new("RGB", (8, 4), "red").save(files["turned"], "PNG", exif=exif)
    Image.new("RGBA", (6, 6), (0, 0, 0, 0)).save(files["clear"], "PNG")
    folder = tmp_path / "data"
    folder.mkdir()
    write_shard(folder / "0.tar", {key: {"png": file.getvalue(), "txt": b"a"} for key, file in files.items()})
    described = render_dataset_yaml("CaptioningSample", {"image": "png", "caption": "txt"})
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=described)
    spec = get_train_dataset(folder, batch_size=2, task_encoder=Turning(), worker_config=config_of(1, 0))
    loader = get_savable_loader(spec)
    next(iter(loader))
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    loader.close()
    run = run_of_state(loader.save_state_rank(), world_size=1)
    for source in (SampleSource(spec), SampleSource(run.spec, run.plan)):
        records = source.records(source.in_order(None), lambda record: record)
        shown = {one.key: next(items for name, items in one.fields if name == "image")[0] for one in records}
        assert (shown["turned"].width, shown["turned"].height) == (4, 8)
        assert shown["clear"].image.getpixel((3, 3)) == (255, 255, 255)
    answer("preview", tmp_path / "state.json", "--step", 0)
    assert [message for message in caplog.messages if message.startswith("images in part")] == []


def test_what_lies_before_a_state_is_refused(captions: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "packing_buffer_size": 10, "task_encoder": previews.encoder()}
    (loader,) = loaders_of(get_train_dataset(captions, worker_config=config_of(1, 0), **settings), 1, 0)
    run_on([loader], 3)
    (tmp_path / "state.json").write_text(json.dumps(loader.save_state_rank()))
    arguments = ("preview", tmp_path / "state.json", "--mix", captions, *PACKED, *LANES)
    early = energon(*arguments, "--step", 2)
    assert "step 2 is before the state, which is at step 3 of 1 ranks" in early.output
    between = energon(*arguments, "--world-size", 2, "--step", 5)
    assert "where no step of 2 ranks starts" in between.output
    unnamed = energon("preview", tmp_path / "state.json", "--step", 5)
    assert "`energon preview` with --config or --encoder" in unnamed.output
    assert {early.exit_code, between.exit_code, unnamed.exit_code} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to show"),
        (("state.json",), "state.json: no such file or folder"),
        ((__file__,), "--step S"),
        (("--encoder", "previews:encoder"), "give a dataset, a mix, or the states of a run"),
        (("--steps", "4:3", "x"), "not of the form A:B"),
        (("--samples", "0", "x"), "neither a number"),
        (("--batches", "2", "x"), "--batches is for batches: add --config, --encoder or --processor"),
        (("--key", "a", "--step", "2", "x"), "--key is for samples of a dataset or mix, without"),
        (("no-such-folder/",), "no-such-folder/: no such file or folder"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = energon("preview", *arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_what_a_configuration_decides_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    valued = {"split-part": "val", "batch-size": 7, "seed": 0, "num-workers": 4, "mix": "mix.yaml", "samples": 5}
    valued |= {"encoder": "previews:encoder", "packing-buffer-size": 4}
    given = [*((f"--{name}", value) for name, value in valued.items()), ("--no-shuffle",), ("--trust-remote-code",)]
    for option in [*given, ("--split-part", "train")]:
        for chosen in (("--config", CONFIG), (tmp_path,)):
            if option[0] != "--encoder" or chosen[0] == "--config":  # a folder with an encoder is data
                output = refusal_of("preview", *chosen, *option)
                said = f"{option[0]} has no effect on the training batches of a configuration or run"
                assert said in output


# The terminal --------------------------------------------------------------------------------------------------------


def test_the_terminal_obeys_nothing_in_the_data(tmp_path: Path) -> None:
    for path in (previews.hostile_dataset(tmp_path / "hostile"), previews.hostile_jsonl(tmp_path / "x.jsonl")):
        output = output_of("preview", path, "--samples", "all")
        assert [char for char in output if not char.isprintable() and char != "\n"] == []
    text = "\n".join(str(line) for one in records_of(tmp_path / "hostile") for line in lines_of(one, columns=20))
    assert "\\x1b[31mred" in text
    assert "\\x202e back" in text
    assert previews.HOSTILE in text


def test_pictures_are_drawn_with_half_blocks() -> None:
    image = Image.new("RGB", (10, 6), (255, 0, 0))
    image.paste((0, 0, 255), (0, 3, 10, 6))
    lines = list(half_blocks(image, 10))
    assert [str(line) for line in lines] == ["▀" * 10] * 3
    styles = ["rgb(255,0,0) on rgb(255,0,0)", "rgb(255,0,0) on rgb(0,0,255)", "rgb(0,0,255) on rgb(0,0,255)"]
    assert [str(line.spans[0].style) for line in lines] == styles


def test_no_pictures_where_nobody_looks(captions: Path) -> None:
    output = output_of("preview", captions, "--samples", 2)
    assert "picture 16 x 16" in output
    assert "▀" not in output
    assert "the first 2 of 30 samples" in output


def test_a_batch_in_the_terminal(captions: Path) -> None:
    output = output_of("preview", captions, *PACKED, *LANES, "--batches", 1)
    assert "step 0, rank 0, microbatch 0: MultiModalBatch of 2 rows" in output
    assert re.search(r"<s>.*\[<image> x 4\].*picture", output)
    dataset = get_train_dataset(captions, batch_size=2, packing_buffer_size=10, task_encoder=previews.encoder())
    (batch,) = delivered(dataset, range(1), world_size=1)
    lines = [str(line) for line in lines_of_batch(batch, columns=8)]
    assert sum("▀" in line for line in lines) > 0


@pytest.mark.parametrize("terminal", [True, False])
def test_learned_tokens_are_marked_in_a_terminal(
    captions: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = energon("preview", captions, *PACKED, *LANES, "--batches", 1, "--columns", 0).output
    learned = re.findall(r"\x1b\[4;32m([^\x1b]*)", shown)
    assert learned[:1] == ["token"] * terminal
    assert (len(learned) > 1) == ("carries loss: the model learns" in shown) == terminal


# Pages ---------------------------------------------------------------------------------------------------------------


def values_of(folder: Path, name: str) -> Any:
    """Return what a file of data gives to the page."""
    code = (folder / "data" / f"{name}.js").read_bytes().decode("ascii")
    found = re.fullmatch(r'preview\.take\("(\w+)",(\d+|null),(.*)\);\n', code)
    assert found, code[:200]
    return json.loads(found.group(3))


def test_pages_hold_all_samples(captions: Path, tmp_path: Path) -> None:
    result = energon("preview", captions, "--html", tmp_path / "out", "--samples", "all")
    assert result.output == f"30 samples: open {tmp_path / 'out' / 'index.html'}\n"
    meta = values_of(tmp_path / "out", "meta")
    assert (meta["count"], meta["parts"]) == (30, [{"name": str(captions), "samples": 30, "shown": 30, "share": 1.0}])
    samples = values_of(tmp_path / "out", "samples-0")
    assert [one["key"] for one in samples] == [f"train-{n:05d}" for n in range(30)]
    assert samples[4]["fields"][0] == ["image", [["p", 4, 16, 16]]]
    with Image.open(tmp_path / "out" / "media" / "000" / "000004.jpg") as image:
        assert image.size == (16, 16)
    files = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    own = {"index.html", "preview.css", "preview.js", "meta.js", "samples-0.js", "search-0.js"}
    assert files == own | {f"{n:06d}.jpg" for n in range(30)}


def test_names_and_texts_of_the_data_are_in_values_alone(tmp_path: Path) -> None:
    jsonl, tars = previews.hostile_jsonl(tmp_path / "x.jsonl"), previews.hostile_dataset(tmp_path / "hostile")
    mix = previews.mix_of(tmp_path / "mix.yaml", jsonl=jsonl, tars=tars)
    output_of("preview", mix, "--html", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert page == (REPOSITORY / "energon_bridge" / "tools" / "preview" / "page.html").read_text()
    assert "default-src 'none'; script-src 'self'" in page
    assert re.findall(r"<script[^>]*>", page) == ['<script src="preview.js">', '<script src="data/meta.js">']
    names = [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    allowed = r"index\.html|preview\.(css|js)|data/(meta|samples-\d+|search-\d+)\.js|media/\d{3}/\d{6}\.jpg"
    assert [name for name in names if not re.fullmatch(allowed, name)] == []
    assert previews.HOSTILE in json.dumps(values_of(tmp_path / "out", "samples-0"), ensure_ascii=False).replace(
        '\\"', '"'
    )
    script = (tmp_path / "out" / "preview.js").read_text()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "http:",
        "https:",
    ):
        assert way not in script.replace("http://www.w3.org/2000/svg", ""), way


def test_a_folder_of_something_else_is_left_alone(captions: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert "exists but is not a preview" in refusal_of("preview", captions, "--html", tmp_path / "mine")
    said = refusal_of("preview", captions, "--html", "s3://lake/look")
    assert "pages can only be written to a local folder" in said
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["thesis.tex"]
    output = refusal_of("preview", captions, "--html", tmp_path / "mine" / "thesis.tex" / "out")
    assert f"{tmp_path / 'mine' / 'thesis.tex' / 'out'}: cannot write the pages" in output


def test_an_earlier_preview_is_replaced_or_stays_whole(captions: Path, tmp_path: Path) -> None:
    for count in (20, 3):
        output_of("preview", captions, "--html", tmp_path / "out", "--samples", count)
    assert len(list((tmp_path / "out" / "media").rglob("*.jpg"))) == 3
    source = source_of(captions)

    def broken() -> Any:
        yield from source.in_order(5)
        raise ConfigurationError("stop")

    with pytest.raises(ConfigurationError, match="stop"):
        write_pages(tmp_path / "out", source, broken(), title="x")
    assert values_of(tmp_path / "out", "meta")["count"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("values", [[5], [1, 2, 3], list(range(1000)), [1, 10, 100_000], [0, 0, 7], [2**40, 3]])
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    found = histogram("x", values)
    edges, counts = found["edges"], found["counts"]
    assert edges == sorted(set(edges))
    assert counts == [sum(low <= value < high for value in values) for low, high in pairwise(edges)]
    assert sum(counts) == len(values)
    assert len(counts) <= 33


# Served --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(path: Path) -> Iterator[int]:
    """Serve the pages of a dataset in a process of its own; gives the port."""
    command = [sys.executable, "-m", "energon_bridge.tools.cli.main", "preview", str(path), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"30 samples: open http://127\.0\.0\.1:(\d+)/", line)
            assert found, line
            yield int(found.group(1))
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def asked(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_pages_are_served_to_this_machine_only(captions: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with served(captions) as port:
        status, page = asked(port, "/")
        assert (status, b"energon preview" in page) == (200, True)
        whole = asked(port, "/media/000/000004.jpg")[1]
        assert asked(port, "/media/000/000004.jpg", Range="bytes=10-19") == (206, whole[10:20])
        for path in ("/../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/data", "/media/"):
            assert asked(port, path)[0] == 404, path
        assert asked(port, "/", Host="evil.example")[0] == 400


def test_a_configuration_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "energon_bridge.training.run_data", None)
    load.cache_clear()  # it may have been imported before
    assert "pip install 'energon-bridge[lightning,hf]'" in energon("preview", "--config", CONFIG).output


def test_serving_names_what_is_missing(captions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'energon-bridge[view]'" in energon("preview", captions, "--serve").output


class Bytes:
    """A tokenizer of bytes, as those of pairs are for rare characters; 300: the end of one and begin of another."""

    def decode(self, tokens: list[int]) -> str:
        return b"".join(b"\x98\x80\xe4" if one == 300 else bytes([one]) for one in tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([*"a你!".encode()], ["a", "", "", "你", "!"]),
        ([*"😀".encode()], ["", "", "", "😀"]),
        ([*"é好".encode()], ["", "é", "", "", "好"]),
        ([0xF0, 0x9F, 300, 0xBD, 0xA0], ["", "", "", "", "😀你"]),
        ([0xF0, 0x9F, *b"a"], ["\ufffd", "\ufffd", "a"]),
        ([0xE4, *"你".encode()], ["\ufffd", "", "", "你"]),
        ([0xE4, None, 0xBD, 0xA0], ["\ufffd", None, "\ufffd", "\ufffd"]),
    ],
)
def test_a_character_of_several_tokens_is_shown_once(tokens: list[Any], expected: list[Any]) -> None:
    assert TokenNames(SimpleNamespace(tokenizer=Bytes())).texts(tokens) == expected

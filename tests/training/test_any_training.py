"""The training program on models that are encoded by their own processor: images, and sounds."""

from __future__ import annotations

import json
import shlex
import signal
import wave
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from clips import write_video
from commands import answer, output_of, refusal_of
from forked import start_forked
from paths import CONFIGS
from PIL import Image
from previews import mix_of
from recipes import crude_conversations

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from processors import HAS_ALL_TEXTS, planned, template_of, tiny_model, tiny_model_config, tiny_processor
from run_outputs import read_losses
from sources import convert, converted

from energon_bridge import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.storage import open_store
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.conversations.cooker import COOKERS
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.tools.columns.stored import read_columns, read_numbers
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.training import run as training
from energon_bridge.training.config import ModelConfig, RunConfig
from energon_bridge.training.config_file import load_config
from energon_bridge.training.module import VisionLanguageModule
from energon_bridge.training.presets import write_preset

TWINS = {
    "idefics3_instruct": ("images",),
    "mllama_instruct": ("images",),
    "qwen2_audio_instruct": ("audios",),
    "qwen2.5_omni_instruct": ("images", "audios", "videos"),
}
"""Recipes whose models are encoded by their own processor, and what their conversations have."""
MODELS = {"gemma3": ("Gemma3Processor", "images", 640), "qwen2_audio": ("Qwen2AudioProcessor", "audios", 200)}
STEPS = 4

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=MODELS)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(model_type)
    processor = tiny_processor(MODELS[model_type][0])
    processor.chat_template = template_of(processor)
    processor.save_pretrained(folder)
    tiny_model(tiny_model_config(model_type, processor)).save_pretrained(folder)
    return folder


def conversations(folder: Path, fields: Sequence[str], count: int = 16) -> Path:
    """Write a list of conversations with media in files, each of some of these kinds."""
    rows = []
    for number in range(count):
        field, answer = fields[number % len(fields)], ("red", "green", "blue")[number % 3]
        name = f"{number}.{ {'images': 'png', 'audios': 'wav', 'videos': 'mp4'}[field] }"
        if field == "images":
            Image.new("RGB", (60 + number, 50), answer).save(folder / name)
        elif field == "audios":
            with wave.open(str(folder / name), "wb") as out:
                out.setparams((1, 2, 16000, 0, "NONE", ""))
                tone = np.sin(np.arange(4000 + 100 * number) * (number % 3 + 1) / 5)
                out.writeframes((tone * 9000).astype("<i2").tobytes())
        else:
            write_video(folder / name, frames=8, rate=4, sound="aac")
        question = {"role": "user", "content": f"<{field.removesuffix('s')}> which?"}
        rows.append({"messages": [question, {"role": "assistant", "content": answer}], field: [name]})
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "list.jsonl"


@pytest.fixture(scope="module")
def data(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of conversations with media in files, converted."""
    folder = tmp_path_factory.mktemp("list")
    source = conversations(folder, [MODELS[model_type][1]])
    return converted(source, folder / "data", "--split-ratio", "3,1,0")


def configuration(model_type: str, model: Path, data: Path, run_dir: Path) -> RunConfig:
    values = yaml.safe_load((CONFIGS / "smoke.yaml").read_text())
    values["model"] = {"init": "random"}  # the rest is in the model's folder
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "smoke.yaml").write_text(yaml.safe_dump(values))
    settings = [f"data.path={data}", f"run_dir={run_dir}", f"train.max_steps={STEPS}", "train.log_interval=1"]
    settings += [f"model.name_or_path={model}", f"data.seq_length={MODELS[model_type][2]}", "validation.generate=false"]
    return load_config(run_dir / "smoke.yaml", settings)


def train_until(config: RunConfig, last: int) -> None:
    """Train, and die in the middle of a step."""
    original = VisionLanguageModule.training_step
    steps = iter(range(1000))

    def training_step(self: VisionLanguageModule, batch: object, batch_idx: int) -> object:
        if next(steps) >= last:
            signal.raise_signal(signal.SIGKILL)
        return original(self, batch, batch_idx)

    VisionLanguageModule.training_step = training_step  # type: ignore[method-assign,assignment]
    training.run(config)


def check_killed_and_resumed(whole: RunConfig, killed: RunConfig) -> None:
    training.run(whole)
    child = start_forked(partial(train_until, killed, 5))  # two microbatches are a step, each second step is saved
    assert child.result() == (False, f"no result, exit status {-signal.SIGKILL}")
    training.run(killed, resume=True)
    losses = [read_losses(config.run_dir) for config in (whole, killed)]
    assert losses[0] == losses[1]
    assert sorted(losses[0]) == list(range(1, STEPS + 1))
    assert losses[0][STEPS] < losses[0][1]


@pytest.mark.parametrize("name", TWINS)
def test_the_command_that_convert_shows_trains_a_twin_whatever_stops_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if "omni" in name:
        pytest.importorskip("torchvision")
    source = conversations(tmp_path, TWINS[name])
    output = convert(source, tmp_path / "data", "--split-ratio", "3,1,0")
    command = output.partition("Try it with a tiny model: ")[2].splitlines()[0]
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "energon_bridge.training", "--config"]
    shown = name if "audios" in TWINS[name] else "qwen2.5_vl_instruct"  # images are for any twin
    assert words[4] == f"configs/tiny/{shown}.yaml"
    assert f"{name}.yaml" in output
    own = [f"train.max_steps={STEPS}", "train.log_interval=1", "checkpoint.interval=2", "checkpoint.export=false"]
    if "audios" in TWINS[name]:
        own.append("data.packing_buffer_size=3")  # the model hears 30 seconds of each sound of a pack
    twin = words[4].replace(shown, name)
    runs = (load_config(twin, [*words[5:], *own, f"run_dir={tmp_path / name}"]) for name in ("whole", "killed"))
    with planned():
        check_killed_and_resumed(*runs)
    assert "skipped" not in caplog.text  # each sample was learned from


def test_a_processor_without_a_chat_template_is_named(model_type: str, model: Path, data: Path, tmp_path: Path) -> None:
    if model_type == "qwen2_audio":
        pytest.skip("its class has one of its own")
    template = model / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    try:
        with pytest.raises(ConfigurationError, match=r"processor has none: set data\.chat_template"):
            training.run(configuration(model_type, model, data, tmp_path))
    finally:
        template.write_text(text)


def test_columns_count_the_tokens_of_a_model_from_headers(model_type: str, model: Path, data: Path) -> None:
    kind = {"images": "image", "audios": "audio"}[MODELS[model_type][1]]
    output = output_of("columns", "add", data, "--processor", model, "--num-workers", 1)
    assert "Added tokens, image_tokens, video_tokens and audio_tokens of 16 samples" in output
    store = open_store(data)
    columns = read_columns(store)
    counted = {name: read_numbers(store, name, columns[name]) for name in ("tokens", f"{kind}_tokens", "video_tokens")}
    encoder = ChatTemplateTaskEncoder.from_pretrained(model, ChatConfig(seq_length=10_000))
    encoder.cookers = COOKERS
    dataset = get_val_dataset(data, batch_size=1, task_encoder=encoder, worker_config=WorkerConfig(num_workers=0))
    lengths = [batch.tokens.shape[1] for batch in get_loader(dataset)]
    assert lengths
    assert set(lengths) <= set(counted["tokens"].astype(int))
    assert (counted[f"{kind}_tokens"] > 0).all()
    assert (counted["video_tokens"] == 0).all()


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("tiny-qwen2-audio", ("audios",)),
        ("tiny-qwen2.5-vl", ("images", "videos")),
        ("tiny-qwen2.5-omni", ("images", "audios", "videos")),
    ],
)
def test_columns_count_sounds_and_videos_and_decode_nothing(
    preset: str, fields: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "omni" in preset:
        pytest.importorskip("torchvision")
        if not HAS_ALL_TEXTS:
            pytest.skip("transformers before 5.23")
    data = converted(conversations(tmp_path, fields, 9), tmp_path / "data", "--split-ratio", "1,0,0")
    model = tmp_path / "model"
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "image_size": 32}
    write_preset(ModelConfig(preset=preset, **sizes), model, lambda: ["which? red green blue user assistant"])
    with monkeypatch.context() as patch:
        for kind, name in ((AVDecoder, "get_audio_clips"), (AVDecoder, "get_video_clips"), (DeferredImage, "get")):
            assert hasattr(kind, name)
            patch.setattr(kind, name, lambda *a, **k: pytest.fail("decoded"))
        output_of("columns", "add", data, "--processor", model, "--num-workers", 1)
    store = open_store(data)
    columns = read_columns(store)
    names = ("tokens", "image_tokens", "audio_tokens", "video_tokens")
    counted = [tuple(row) for row in zip(*(read_numbers(store, name, columns[name]) for name in names), strict=True)]
    encoder = ChatTemplateTaskEncoder.from_pretrained(model, ChatConfig(seq_length=10_000))
    encoder.cookers = COOKERS
    none = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(data, split_part="train", batch_size=1, task_encoder=encoder, worker_config=none)
    tokens = [batch.tokens[0].tolist() for batch in get_loader(dataset)]
    media = [getattr(encoder.family, f"{kind}_token", None) for kind in ("image", "audio", "video")]
    ids = [encoder.tokenizer.convert_tokens_to_ids(token) if token else -1 for token in media]
    assert counted == [(len(of_sample), *map(of_sample.count, ids)) for of_sample in tokens]
    assert len(counted) == 9
    assert all(
        sum(column) > 0
        for name, column in zip(names, zip(*counted, strict=True), strict=True)
        if f"{name[:5]}s" in fields
    )


def test_lint_names_what_the_processor_of_a_model_refuses(tmp_path: Path) -> None:
    """Of Qwen2-VL: no image more than 200 times as wide as it is high (smart_resize of transformers)."""
    source = conversations(tmp_path, ("images",), 4)
    Image.new("RGB", (606, 3), "red").save(tmp_path / "2.png")
    data = converted(source, tmp_path / "data", "--split-ratio", "1,0,0")
    model = tmp_path / "model"
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "image_size": 32}
    write_preset(ModelConfig(preset="tiny-qwen2.5-vl", **sizes), model, lambda: ["which? red green blue"])
    assert "All 4 samples load" in output_of("lint", data, "--no-progress")
    refused = refusal_of("lint", data, "--processor", model, "--no-progress")
    assert f"train: {model} encodes " in refused
    assert ", 1 fail" in refused
    assert "'000000002': an image of 606 x 3 pixels is too narrow" in refused


def test_bench_measures_a_mix_of_types_as_a_model_gets_it(tmp_path: Path) -> None:
    captions = create_captioning_test_dataset(tmp_path / "captions", num_train=8, num_val=2)
    mix = mix_of(tmp_path / "mix.yaml", captions=captions, chats=crude_conversations(tmp_path / "chats"))
    model = tmp_path / "model"
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "image_size": 32}
    write_preset(ModelConfig(preset="tiny-qwen2.5-vl", **sizes), model, lambda: ["which? red green blue"])
    flags = ["--batch-size", 2, "--num-workers", 0, "--seconds", 0.2]
    assert "different sample types" in refusal_of("bench", mix, *flags)
    assert answer("bench", mix, *flags, "--processor", model)["rates"][0]["samples"] >= 2
    assert "give one of them" in refusal_of("bench", mix, *flags, "--processor", model, "--encoder", "a:b")


def test_a_preview_shows_samples_as_a_model_gets_them(model_type: str, model: Path, data: Path) -> None:
    (batch,) = answer("preview", data, "--processor", model, "--batch-size", 2, "--batches", 1)["batches"]
    encoder = ChatTemplateTaskEncoder.from_pretrained(model, ChatConfig(seq_length=10_000))
    encoder.cookers = COOKERS
    none = WorkerConfig(num_workers=0)
    made = next(iter(get_loader(get_train_dataset(data, batch_size=2, task_encoder=encoder, worker_config=none))))
    shown = {"pixel_values": made.pixel_values, **made.visual_inputs}
    shapes = {name: str(tuple(value.shape)) for name, value in shown.items() if value is not None}
    assert {one.partition(" ")[0]: one.partition(" ")[2].rpartition(" ")[0] for one in batch["inputs"]} == shapes
    is_audio = model_type == "qwen2_audio"
    token = encoder.family.processor.audio_token_id if is_audio else encoder.tokenizer.image_token_id
    for row, tokens in zip(batch["rows"], made.tokens.tolist(), strict=True):
        (run,) = (one["count"] for segment in row["segments"] for one in segment["tokens"] if one["kind"] == "image")
        assert run == tokens.count(token) > 1

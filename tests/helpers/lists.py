"""Lists of conversations, and what a small model learns from them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from clips import write_sound, write_video
from conversations import picture_of
from paths import CONFIGS

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from energon_bridge import TaskEncoder, WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.samples import Sample, edataclass
from energon_bridge.models.conversations.conversation import read_conversation
from energon_bridge.models.conversations.cooker import COOKERS
from energon_bridge.models.families.sound import sound_of
from energon_bridge.training.config_file import load_config
from energon_bridge.training.encoder import training_task_encoder
from energon_bridge.training.presets import ModelBundle, load_model, write_preset

CONFIG = load_config(CONFIGS / "tiny" / "qwen2.5_vl_instruct.yaml", ())
ALL_TRAIN = ("--split-ratio", "1,0,0")
TEXT = {"type": "text", "text": "color?"}
RED = {"role": "assistant", "content": "red"}
ASKED = [{"from": "human", "value": "a"}]
ZOOM = {"name": "zoom", "parameters": {"type": "object", "properties": {}}}
ZOOMS = json.dumps({"type": "function", "function": ZOOM})


def small_bundle(folder: Path) -> ModelBundle:
    """Write a small Qwen2.5-VL with random weights, and load it."""
    write_preset(CONFIG.model, folder, lambda: ["color? red film"] * 3)
    return load_model(str(folder), init="random")


def write_media(folder: Path) -> Path:
    """Write two pictures, a file without extension, a video of 2.4 s and two sounds of 0.5 s."""
    for color in ("red", "blue"):
        picture_of(color).resize((32, 32)).save(folder / f"{color}.png")
    (folder / "plain").write_bytes((folder / "red.png").read_bytes())
    write_video(folder / "film.mp4", frames=60)
    write_sound(folder / "a.wav", codec="pcm_s16le", rate=16000, seconds=0.5)
    write_sound(folder / "b.mp3", codec="libmp3lame", rate=16000, seconds=0.5)
    return folder


def listed(folder: Path, entries: Any) -> Path:
    path = folder / "list.json"
    path.write_text(json.dumps(entries if isinstance(entries, list) else [entries]))
    return path


def learned(path: Path, bundle: ModelBundle) -> list[tuple[str, str, dict[str, Any]]]:
    """Return what is shown and what is learned of each sample, with the inputs of its images and videos."""
    data = load_config(CONFIGS / "tiny" / "qwen2.5_vl_instruct.yaml", ["data.packing_buffer_size=null"]).data
    encoder = training_task_encoder(data, bundle)
    workers = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(path, split_part="train", batch_size=1, worker_config=workers, task_encoder=encoder)
    found = []
    for batch in get_loader(dataset):
        shown = bundle.tokenizer.decode(batch.tokens[0]).replace("<|im_start|>", "|").replace("<|im_end|>", "")
        for token, letter in (("<|image_pad|>", "i"), ("<|video_pad|>", "v"), ("<|vision_start|>", ""), ("\n", " ")):
            shown = shown.replace(token, letter)
        said = bundle.tokenizer.decode(batch.labels[0][batch.loss_mask[0].bool()])
        inputs = dict(batch.visual_inputs)
        if batch.pixel_values is not None:
            inputs["pixel_values"] = batch.pixel_values
        found.append((shown.replace("<|vision_end|>", ""), said, inputs))
    return found


def asked(*parts: Any, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, RED], **beside}


def inline(media: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode((media / 'red.png').read_bytes()).decode()}"


def talk(question: str, *more: Any, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, *(more or (RED,))], **beside}


def llava(question: str, **beside: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "red"}], **beside}


class Spoken(TaskEncoder[Any, Any, Any, Any]):
    """Delivers conversations as they are read."""

    decoder = SampleDecoder()
    cookers = COOKERS

    def encode_sample(self, sample: Any) -> Any:
        return Read(__key__=sample.__key__, content=read_conversation(sample))

    def batch(self, samples: Any) -> Any:
        return [sample.content for sample in samples]


class Heard(Spoken):
    """Takes the sounds of conversations, too."""

    def encode_sample(self, sample: Any) -> Any:
        made = super().encode_sample(sample)
        for sound in made.content.audios:
            sound_of(sound, rate=16000).get()
        return made


@edataclass
class Read(Sample):
    """A conversation."""

    content: Any

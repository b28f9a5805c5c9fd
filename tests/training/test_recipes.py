"""The recipes in configs/: they are valid, and their tiny twins differ from them as they say and train."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conversations import turns_of
from keyed import write_mix
from made import made_once
from paths import CONFIGS, REPOSITORY
from recipes import captions_dataset, crude_conversations, instruct_mix

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from run_outputs import read_losses, read_predictions, run_with_a_stop

from energon_bridge.core.errors import UnknownSplitError
from energon_bridge.training import run as training
from energon_bridge.training.assemble import assemble_llava
from energon_bridge.training.config import RunConfig
from energon_bridge.training.config_file import dump_config, load_config
from energon_bridge.training.presets import load_model

RECIPES = (
    *("llava15_pretrain", "llava15_instruct", "qwen2.5_vl_instruct"),
    *("idefics3_instruct", "mllama_instruct", "qwen2_audio_instruct", "qwen2.5_omni_instruct"),
)
FAMILIES = ("tiny-llava", "tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl")
SMALLER = {
    *("run_dir", "data.path", "data.micro_batch_size", "data.global_batch_size", "data.seq_length"),
    *("data.packing_buffer_size", "data.shuffle_buffer_size", "data.max_samples_per_sequence", "data.num_workers"),
    *("data.min_pixels", "data.max_pixels", "model.name_or_path", "model.preset", "model.init", "model.hidden_size"),
    *("model.num_layers", "model.num_heads", "model.image_size", "model.patch_size", "model.vocab_size"),
    # Weights drawn at random need larger steps, and fewer; and there is no GPU.
    *("optimizer.lr", "optimizer.warmup_steps", "train.max_steps", "validation.interval", "checkpoint.interval"),
    *("model.attn_implementation", "train.accelerator", "train.precision", "train.deterministic", "train.threads"),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def flat(config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, content in yaml.safe_load(dump_config(config)).items():
        values |= (
            {f"{section}.{key}": v for key, v in content.items()} if isinstance(content, dict) else {section: content}
        )
    return values


@pytest.mark.parametrize("name", RECIPES)
def test_a_twin_differs_from_its_recipe_in_size_only(name: str) -> None:
    real, twin = flat(recipe(name)), flat(recipe(f"tiny/{name}"))
    assert {key for key in real if real[key] != twin[key]} <= SMALLER
    for key in ("data.packing_buffer_size", "data.max_pixels"):
        assert (real[key] is None) == (twin[key] is None)
    assert all(twin[key] < real[key] for key in ("data.global_batch_size", "data.seq_length", "train.max_steps"))


def test_the_documentation_has_a_command_for_each_recipe() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "recipes.md").read_text()
    assert [name for name in RECIPES if f" --config configs/{name}.yaml" not in text] == []


# Training ------------------------------------------------------------------------------------------------------------


conversations = made_once(crude_conversations)


def train_with_a_stop(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[int, float]]:
    """Run, stop, go on; return the result and the losses."""
    result = run_with_a_stop(config, monkeypatch, at=12)
    losses = read_losses(config.run_dir)
    assert list(losses) == list(range(1, config.train.max_steps + 1))
    return result, losses


MODES = [("tiny-qwen2.5-vl", True), ("tiny-qwen3-vl", False)]
if os.environ.get("ENERGON_LONG_TESTS"):
    MODES = [(preset, packed) for preset in FAMILIES for packed in (True, False)]


@pytest.mark.parametrize(("preset", "packed"), MODES)
def test_each_family_trains_on_conversations_with_several_images(
    preset: str, packed: bool, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [f"model.preset={preset}", f"data.path={conversations}", f"run_dir={tmp_path / 'run'}"]
    if preset == "tiny-llava":
        own += ["data.min_pixels=null", "data.max_pixels=null", "data.chat_template=llava", "model.image_size=16"]
        own += ["model.freeze=[model.vision_tower]"]
    if not packed:
        own += ["data.packing_buffer_size=null", "data.micro_batch_size=4", "data.global_batch_size=8"]
        own += ["validation.generate=true", "validation.max_new_tokens=4"]
    config = recipe("tiny/qwen2.5_vl_instruct", *own)
    result, losses = train_with_a_stop(config, monkeypatch)
    assert losses[30] < 0.5 * losses[1]
    assert result.step == 30
    if not packed:
        predictions = read_predictions(tmp_path / "run")
        assert {p.key: p.expected for p in predictions} == {f"val-{n:03d}": turns_of(n)[0][1] for n in range(6)}
        assert result.read is not None


def test_the_instruct_twin_trains_on_the_real_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = instruct_mix(tmp_path / "data")
    config = recipe("tiny/llava15_instruct", f"data.path={mix}", f"run_dir={tmp_path / 'run'}")
    _, losses = train_with_a_stop(config, monkeypatch)
    assert losses[30] < 0.5 * losses[1]


def test_data_without_validation_is_refused_before_training_unless_none_is_wanted(tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": "color?"}, {"role": "assistant", "content": "red"}]}] * 20
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mix = write_mix(tmp_path / "mix.yaml", train={"path": "./text.jsonl"})
    frozen = "model.freeze=[model.vision_tower, model.language_model, lm_head]"
    own = [f"data.path={mix}", f"run_dir={tmp_path / 'run'}", "data.num_lanes=1", "train.max_steps=2", frozen]
    with pytest.raises(UnknownSplitError, match="val"):
        training.run(recipe("tiny/llava15_instruct", *own))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    own += ["validation.limit_batches=0", "validation.generate=true"]
    result = training.run(recipe("tiny/llava15_instruct", *own), overwrite=True)
    assert (result.step, result.read, result.validation_loss) == (2, None, None)
    # Nothing that is trained sees a text: the loss stays where it was, to the last bit.
    losses = read_losses(tmp_path / "run")
    assert losses[1] == losses[2] > 0


def tiny_start(data: Path, folder: Path) -> Path:
    """Write what the pretraining twin begins with: a language model that knows the captions, and a new projector."""
    from transformers import CLIPVisionModel, LlamaForCausalLM

    sizes = ["hidden_size=32", "num_layers=1", "num_heads=2", "image_size=16", "patch_size=8", "vocab_size=300"]
    own = [f"data.path={data}", f"run_dir={folder / 'first'}", "optimizer.lr=2e-2", "validation.interval=0"]
    own += ["model.name_or_path=null", "model.init=random", "model.freeze=[]", *(f"model.{size}" for size in sizes)]
    training.run(recipe("tiny/llava15_pretrain", *own))
    exported = load_model(str(folder / "first" / "export"), init="pretrained")
    language = LlamaForCausalLM(exported.model.config.text_config)
    language.model.load_state_dict(exported.model.model.language_model.state_dict())
    language.lm_head.load_state_dict(exported.model.lm_head.state_dict())
    tower = CLIPVisionModel(exported.model.config.vision_config)
    tower.load_state_dict(exported.model.model.vision_tower.state_dict())
    for part, name in ((language, "language"), (exported.tokenizer, "language"), (tower, "tower")):
        part.save_pretrained(folder / name)
    exported.image_processor.save_pretrained(folder / "tower")
    torch.manual_seed(1)
    assemble_llava(str(folder / "language"), str(folder / "tower"), folder / "start", vision_feature_layer=-1)
    return folder / "start"


def test_the_pretraining_twin_trains_the_projector_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = captions_dataset(tmp_path / "captions")
    start = tiny_start(data, tmp_path)
    own = [f"data.path={data}", f"model.name_or_path={start}", f"run_dir={tmp_path / 'run'}"]
    _, losses = train_with_a_stop(recipe("tiny/llava15_pretrain", *own), monkeypatch)
    assert losses[30] < 0.5 * losses[1]
    before, after = (
        load_model(str(folder), init="pretrained").model.state_dict() for folder in (start, tmp_path / "run" / "export")
    )
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if name.startswith("model.multi_modal_projector.")}

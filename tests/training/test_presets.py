"""Models by preset, by folder and by name: one way to load them all, and what of them is trained."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers")

from processors import planned

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.families import ProcessorFamily
from energon_bridge.training.config import ModelConfig
from energon_bridge.training.presets import PRESETS, ModelBundle, load_model, write_preset
from energon_bridge.training.run_model import freeze

SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 300}
MODEL_TYPES = {
    "tiny-llava": "llava",
    "tiny-qwen2-vl": "qwen2_vl",
    "tiny-qwen2.5-vl": "qwen2_5_vl",
    "tiny-qwen3-vl": "qwen3_vl",
}
PROCESSORS = {
    "tiny-idefics3": "idefics3",
    "tiny-mllama": "mllama",
    "tiny-qwen2-audio": "qwen2_audio",
    "tiny-qwen2.5-omni": "qwen2_5_omni_thinker",
}
"""Presets that are encoded by their own processor."""


def test_every_preset_is_tested() -> None:
    assert {*MODEL_TYPES, *PROCESSORS} == set(PRESETS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of each preset."""
    root = tmp_path_factory.mktemp("presets")
    for name in PRESETS:
        if name == "tiny-qwen2.5-omni" and find_spec("torchvision") is None:
            continue
        write_preset(ModelConfig(preset=name, **SIZES), root / name, lambda: ["the digit seven"] * 3)
    return {name: root / name for name in PRESETS}


@pytest.fixture
def own(folders: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    """Return the folder of a preset that is encoded by its own processor."""
    if not folders[request.param].exists():
        pytest.skip("its processor needs torchvision")
    return folders[request.param]


def load(folder: Path, **options: Any) -> ModelBundle:
    with planned():
        return load_model(str(folder), **{"init": "random", **options})


@pytest.mark.parametrize("preset", MODEL_TYPES)
def test_a_preset_is_a_folder_of_its_family_and_takes_its_images(folders: dict[str, Path], preset: str) -> None:
    bundle = load(folders[preset])
    model, tokenizer = bundle.model, bundle.tokenizer
    assert model.config.model_type == MODEL_TYPES[preset]
    assert type(bundle.image_processor).__name__.endswith("Pil")
    assert sum(parameter.numel() for parameter in model.parameters()) < 50_000
    ids = tokenizer.encode("the digit seven é", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the digit seven é"
    assert len(ids) < len("the digit seven é")
    special = {tokenizer.pad_token_id, tokenizer.eos_token_id, bundle.image_token_id}
    assert len(special) == 3
    assert max(special) < len(tokenizer) == model.config.text_config.vocab_size
    made = bundle.image_processor(images=[Image.new("RGB", (20, 32))], return_tensors="pt")
    grid = made.get("image_grid_thw")
    count = bundle.image_tokens if grid is None else int(grid.prod()) // bundle.image_processor.merge_size**2
    tokens = torch.tensor([[*ids, *[bundle.image_token_id] * (count or 0), *ids]])
    types = {} if grid is None else {"mm_token_type_ids": torch.eq(tokens, bundle.image_token_id).long()}
    logits = model(input_ids=tokens, **types, **made).logits
    assert logits.shape == (1, tokens.shape[1], len(tokenizer))
    logits.sum().backward()
    vision = [p.grad for name, p in model.named_parameters() if ".vis" in name and p.grad is not None]
    assert any(float(gradient.abs().max()) > 0 for gradient in vision)
    if preset != "tiny-llava":
        content = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}]
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        shown = "a <|vision_start|><|image_pad|><|vision_end|> b"
        assert text == f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("own", PROCESSORS, indirect=True)
def test_a_preset_takes_what_its_processor_made_of_all_kinds_of_media(own: Path) -> None:
    bundle = load(own)
    assert bundle.model.config.model_type == PROCESSORS[own.name]
    assert sum(parameter.numel() for parameter in bundle.model.parameters()) < 50_000
    assert isinstance(bundle.family, ProcessorFamily)
    kinds = list(bundle.family.counts)
    given: dict[str, Any] = {"image": Image.new("RGB", (50, 32)), "audio": np.ones(9000, np.float32)}
    given["video"] = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    processor = bundle.image_processor
    text = " and ".join(getattr(processor, f"{kind}_token") for kind in kinds)
    names = {"image": "images", "audio": "audio", "video": "videos"}
    made = processor(text=[text], return_tensors="pt", **{names[kind]: [given[kind]] for kind in kinds})
    for name, parameter in bundle.model.named_parameters():
        if name.endswith("_gate"):  # of MLlama's images, closed at first
            parameter.data.fill_(0.7)
    logits = bundle.model(**made).logits
    assert logits.shape == (1, made["input_ids"].shape[1], len(bundle.tokenizer))
    logits.sum().backward()
    seeing = [".vis"] * ("image" in kinds) + [".audio"] * ("audio" in kinds)
    for part in seeing:
        gradients = [p.grad for name, p in bundle.model.named_parameters() if part in name and p.grad is not None]
        assert any(float(gradient.abs().max()) > 0 for gradient in gradients)


def test_the_part_of_an_omni_model_that_writes_text_is_trained(folders: dict[str, Path], tmp_path: Path) -> None:
    """Folders of the hub have a part that speaks beside it."""
    if not folders["tiny-qwen2.5-omni"].exists():
        pytest.skip("its processor needs torchvision")
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    part = load(folders["tiny-qwen2.5-omni"])
    config = Qwen2_5OmniConfig(thinker_config=part.model.config.to_dict(), enable_audio_output=False)
    whole = Qwen2_5OmniForConditionalGeneration(config)
    for one in (whole, part.image_processor):
        one.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2_5_omni"
    loaded = load(tmp_path, init="pretrained")
    expected = whole.thinker.state_dict()
    assert loaded.image_token_id == part.image_token_id
    assert loaded.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.model.state_dict().items())


def test_the_template_of_the_processor_goes_before_that_of_the_tokenizer(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["tiny-qwen2.5-vl"], folder)
    tokenizer = load(folder).tokenizer
    text_only = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": text_only}))
    assert load(folder).tokenizer.chat_template == text_only
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    assert load(folder).tokenizer.chat_template == tokenizer.chat_template


def test_a_preset_keeps_its_tokenizer(folders: dict[str, Path]) -> None:
    folder = folders["tiny-llava"]
    first = load(folder)
    write_preset(ModelConfig(**SIZES), folder, lambda: pytest.fail("there is a tokenizer already"))
    second = load(folder, image_tokens_per_image=5)
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()
    assert (first.image_tokens, first.image_token_id) == (16, first.tokenizer.convert_tokens_to_ids("<image>"))
    assert second.image_tokens == 5


@pytest.mark.parametrize("preset", [*MODEL_TYPES, "tiny-idefics3", "tiny-mllama"])
def test_weights_of_a_local_folder_are_loaded_in_full_precision(
    folders: dict[str, Path], preset: str, tmp_path: Path
) -> None:
    bundle = load(folders[preset])
    for part in (bundle.model.to(torch.bfloat16), bundle.tokenizer, bundle.image_processor):
        part.save_pretrained(tmp_path)
    loaded = load(tmp_path, init="pretrained").model
    pairs = list(zip(bundle.model.parameters(), loaded.parameters(), strict=True))
    assert all(torch.equal(stored.float(), read) for stored, read in pairs)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in load(tmp_path).model.parameters()} == {torch.float32}


def test_what_cannot_be_loaded_or_frozen_is_named(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)cannot load model 'nobody/nothing'.*hf download.*preset"):
        load_model("nobody/nothing", init="pretrained")
    with pytest.raises(ConfigurationError, match=r"model\.attn_implementation=flash_attention_2\): .*FlashAttention2"):
        load(folders["tiny-llava"], attn_implementation="flash_attention_2")
    model = load(folders["tiny-llava"]).model
    with pytest.raises(ConfigurationError, match=r"no part 'model\.vision_towr'\. Did you mean 'model\.vision_tower'"):
        freeze(model, ["model.vision_towr"])
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is here")
def test_a_preset_that_needs_torchvision_is_refused_without_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tiny-qwen2.5-omni: the processor of this model needs torchvision"):
        write_preset(ModelConfig(preset="tiny-qwen2.5-omni"), tmp_path / "model", lambda: ["a"])


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (ModelConfig(preset="huge-llava"), "unknown model preset 'huge-llava'; presets: tiny-llava, tiny-qwen2-vl"),
        (ModelConfig(hidden_size=20), "model.hidden_size=20 must be a multiple of 2 times model.num_heads=4"),
        (ModelConfig(image_size=30), "model.image_size=30 must be a multiple of model.patch_size=8"),
        (ModelConfig(preset="tiny-qwen3-vl", hidden_size=24), "a multiple of 4 times model.num_heads=4"),
        (ModelConfig(preset="tiny-qwen2-vl", image_size=40), "a multiple of 2 times model.patch_size=8"),
    ],
)
def test_presets_that_cannot_be_built_are_refused(config: ModelConfig, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        write_preset(config, tmp_path / "model", lambda: ["a"])
    assert not (tmp_path / "model").exists()


# Parts that are not trained ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "patterns", "trained"),
    [
        ("tiny-llava", ["model.vision_tower", "model.language_model", "lm_head"], {"model.multi_modal_projector"}),
        ("tiny-llava", ["model.*", "lm_head.weight"], None),
        ("tiny-qwen2.5-vl", ["model.visual.patch_embed", "model.visual.blocks"], {"model.visual.merger"}),
        ("tiny-qwen3-vl", ["model.visual"], set()),
        ("tiny-qwen2-vl", [], {"model.visual.patch_embed", "model.visual.blocks", "model.visual.merger"}),
    ],
)
def test_what_is_named_is_not_trained(
    folders: dict[str, Path], preset: str, patterns: list[str], trained: set[str] | None
) -> None:
    model = load(folders[preset]).model
    if trained is None:
        with pytest.raises(ConfigurationError, match="leaves no parameter of LlavaFor"):
            freeze(model, patterns)
        return
    freeze(model, patterns)
    left = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    vision = {name for name in left if not name.startswith(("model.language_model", "lm_head"))}
    assert all(any(name.startswith(f"{part}.") for part in trained) for name in vision)
    assert all(any(name.startswith(f"{part}.") for name in vision) for part in trained)
    assert any(name.startswith("lm_head") for name in left) == ("lm_head" not in patterns)

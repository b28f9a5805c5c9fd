"""An untrained LLaVA model: a language model, a CLIP vision tower, and a randomly initialised projector.

The starting point of LLaVA's first stage, written in the layout of transformers, for `model.name_or_path`:

python -m energon_bridge.training.assemble lmsys/vicuna-7b-v1.5 openai/clip-vit-large-patch14-336 models/llava15_start
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from energon_bridge.core.errors import ConfigurationError, EnergonError
from energon_bridge.models.families.known_families import model_place

_IMAGE = "<image>"
_PAD = "<pad>"


def assemble_llava(language_model: str, vision_tower: str, folder: Path, *, vision_feature_layer: int = -2) -> None:
    """Write a LLaVA model assembled from two others.

    The tokenizer gets an image token, and a padding token if it has none; the projector is initialised from torch's
    global generator.

    Args:
        language_model: A folder or hub name: `lmsys/vicuna-7b-v1.5` in LLaVA-1.5.
        vision_tower: A folder or hub name of a CLIP model: `openai/clip-vit-large-patch14-336` in LLaVA-1.5.
        folder: Where to write to; it must not exist yet.
        vision_feature_layer: The layer of the tower whose features are taken; LLaVA-1.5 takes the last but one.

    Raises:
        ConfigurationError: One of them cannot be loaded, or the folder exists.
    """
    import torch
    from transformers import (
        AutoImageProcessor,
        AutoModelForCausalLM,
        AutoTokenizer,
        CLIPVisionModel,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    if folder.exists():
        raise ConfigurationError(f"{folder} already exists: choose another folder, or remove it")
    try:
        language_model, vision_tower = model_place(language_model), model_place(vision_tower)
        tokenizer = AutoTokenizer.from_pretrained(language_model)
        language: Any = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
        vision: Any = CLIPVisionModel.from_pretrained(vision_tower, dtype=torch.float32)
        image_processor = AutoImageProcessor.from_pretrained(vision_tower, backend="pil")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load {language_model!r} and {vision_tower!r}: {error}\nWithout a connection to the Hugging Face "
            "hub, use models in the cache (HF_HOME) or local folders"
        ) from error
    tokenizer.add_tokens([_IMAGE], special_tokens=True)
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": _PAD})
    if len(tokenizer) > language.get_input_embeddings().num_embeddings:
        language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    patches = (vision.config.image_size // vision.config.patch_size) ** 2
    config = LlavaConfig(
        vision_config=vision.config,
        text_config=language.config,
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
        image_seq_length=patches,
        vision_feature_layer=vision_feature_layer,
        vision_feature_select_strategy="default",
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model: Any = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(vision.state_dict())
    model.model.language_model.load_state_dict(language.get_decoder().state_dict())
    model.lm_head.load_state_dict(language.get_output_embeddings().state_dict())
    for part in (model, tokenizer, image_processor):
        part.save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m energon_bridge.training.assemble",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("language_model", help="a folder in the layout of transformers, or a hub name")
    parser.add_argument("vision_tower", help="the same, of a CLIP model")
    parser.add_argument("folder", type=Path, help="where to write the model; must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="seed of the projector")
    options = parser.parse_args(arguments)
    import torch

    torch.manual_seed(options.seed)
    try:
        assemble_llava(options.language_model, options.vision_tower, options.folder)
    except EnergonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

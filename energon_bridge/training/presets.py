"""Models by preset, by local folder or by hub name, through one code path.

A preset is a folder that this module writes into the run: model configuration, image processor and a tokenizer trained
on the captions of the dataset. From there it is loaded like any other folder, so a resumed run has the same tokenizer.

Everything here uses the Pillow image processors of transformers: the others need torchvision.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.conversation import ImageToken, MultiModalSampleConfig
from energon_bridge.task_encoder.families import Family
from energon_bridge.task_encoder.families.pretrained import load_pretrained
from energon_bridge.training.config import ModelConfig
from energon_bridge.training.tiny_models import PRESETS

_IMAGE = "<image>"

CHAT_FAMILIES = frozenset({"llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Models, by the `model_type` of their configuration, for which conversations can be rendered by a chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBundle:
    """A model with what turns samples into its inputs.

    `image_token_id` stands for an image in the token sequence, `image_tokens` times per image; None where that
    depends on the image. `family` says what a model of a known family makes of images and videos; None for others.
    """

    model: Any
    tokenizer: Any
    image_processor: Any
    image_token_id: int
    image_tokens: int | None
    family: Family | None = None

    @property
    def sample_config(self) -> MultiModalSampleConfig:
        """The sample configuration that fits the model."""
        return MultiModalSampleConfig(image_token=ImageToken(token_str=_IMAGE, token_id=self.image_token_id))


def write_preset(config: ModelConfig, folder: Path, captions: Callable[[], Iterable[str]]) -> None:
    """Write the folder of a preset in one step; an existing one is left as it is.

    Args:
        config: Names the preset and its sizes.
        folder: Where to write it.
        captions: Gives the texts that the tokenizer is trained on; only called where it is needed.

    Raises:
        ConfigurationError: There is no such preset, or its sizes do not fit together.
    """
    write = PRESETS.get(config.preset)
    if write is None:
        raise ConfigurationError(
            f"there is no model preset {config.preset!r}; presets: {', '.join(PRESETS)}. For a model of your own set "
            "model.name_or_path to its folder or hub name"
        )
    if folder.exists():
        return
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    write(config, temporary, captions())
    os.replace(temporary, folder)


def load_model(
    name_or_path: str,
    *,
    init: str,
    image_tokens_per_image: int | None = None,
    attn_implementation: str | None = None,
) -> ModelBundle:
    """Load model, tokenizer and image processor; the weights in float32, whatever precision they are stored in.

    Args:
        name_or_path: A local folder or a hub name.
        init: `pretrained` loads the weights, `random` draws them from torch's global generator.
        image_tokens_per_image: Overrides what the model's configuration says.
        attn_implementation: How attention is computed; None: as transformers chooses.

    Raises:
        ConfigurationError: Something cannot be loaded; says what to do without a connection.
    """
    import torch
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    if _is_path(name_or_path) and not Path(name_or_path).exists():
        raise ConfigurationError(
            f"model.name_or_path={name_or_path!r}: no such folder. Give the folder of a model as transformers saves "
            "it, a name of the Hugging Face hub, or a preset (model.name_or_path=null model.preset=tiny-llava)"
        )
    # Optimizers lose small steps on weights in bfloat16, which is what most are stored in; precision is the trainer's.
    options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    try:
        config = AutoConfig.from_pretrained(name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        image_processor = AutoImageProcessor.from_pretrained(name_or_path, backend="pil")
        family = None
        if config.model_type in CHAT_FAMILIES:
            # The template of the processor knows images; that of the tokenizer may be the language model's.
            pretrained = load_pretrained(name_or_path)
            family, tokenizer.chat_template = pretrained.family, pretrained.chat_template or tokenizer.chat_template
        if init == "random":
            model = AutoModelForImageTextToText.from_config(config, **options)
        else:
            model = AutoModelForImageTextToText.from_pretrained(name_or_path, **options)
    except ImportError as error:
        raise ConfigurationError(
            f"cannot load model {name_or_path!r} (model.attn_implementation={attn_implementation}): {error}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load model {name_or_path!r} (init={init}): {error}\n"
            "Without a connection to the Hugging Face hub use a model that is in the cache (HF_HOME), a local folder "
            "(model.name_or_path=/path/to/folder), or a preset (model.name_or_path=null model.preset=tiny-llava)"
        ) from error
    return ModelBundle(
        model=model.train(),  # pretrained ones come without dropout
        tokenizer=tokenizer,
        image_processor=image_processor,
        image_token_id=_image_token_id(config, tokenizer),
        image_tokens=image_tokens_per_image or _image_tokens(config),
        family=family,
    )


def _is_path(name: str) -> bool:
    """Whether a name can be none of the hub's, which have one slash at most."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def export_model(bundle: ModelBundle, folder: Path) -> None:
    """Write model, tokenizer and image processor as `load_model` reads them, in one step, in place of an older one."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    for part in (bundle.model, bundle.tokenizer, bundle.image_processor):
        part.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _image_token_id(config: Any, tokenizer: Any) -> int:
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    found = next((token_id for token_id in ids if token_id is not None), None)
    return int(tokenizer.convert_tokens_to_ids(_IMAGE) if found is None else found)


def _image_tokens(config: Any) -> int | None:
    """Return the tokens per image of models with a fixed grid of patches (the Llava family)."""
    vision = getattr(config, "vision_config", None)
    image_size, patch_size = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    strategy = getattr(config, "vision_feature_select_strategy", None)
    if strategy is None or not isinstance(image_size, int) or not isinstance(patch_size, int):
        return None
    return (image_size // patch_size) ** 2 + (1 if strategy == "full" else 0)

"""Find the family of a model of transformers from its configuration, and load its parts.

Models of a known type have a family of their own; any other trains through its own processor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from energon_bridge.core.errors import ConfigurationError, optional_packages
from energon_bridge.models.families.llava import FixedTokenFamily, llava_family, llava_next_family
from energon_bridge.models.families.processor import ProcessorFamily
from energon_bridge.models.families.qwen import QWEN_MODELS, QwenFamily, qwen_family
from energon_bridge.models.families.vision import Family

_LLAVAS = {"llava": llava_family, "llava_next": llava_next_family}
NATIVE = (*_LLAVAS, *QWEN_MODELS)
"""The types of models that have a family of their own, which needs no processor."""
# Outputs of a vision tower beyond its patches; towers not listed have a class token.
_CLASS_TOKENS = {"siglip_vision_model": 0, "siglip2_vision_model": 0}


def family_of(
    model_config: Any, tokenizer: Any, image_processor: Any, *, video_config: Mapping[str, Any] | None = None
) -> FixedTokenFamily | QwenFamily:
    """Return the family of a model.

    Args:
        model_config: The model's configuration: `model_type` and what its family needs.
        tokenizer: The model's tokenizer, for the text of the image token.
        image_processor: The model's image processor.
        video_config: The configuration of its video processor, for the bounds on the size of videos.

    Raises:
        ConfigurationError: The family is unknown.
    """
    kind = model_config.model_type
    if kind in QWEN_MODELS:
        least, largest = _video_bounds(video_config or {})
        return qwen_family(
            kind,
            image_processor,
            video_min_pixels=least,
            video_max_pixels=largest,
            tokens_per_second=getattr(model_config.vision_config, "tokens_per_second", None),
        )
    if kind in _LLAVAS:
        vision = model_config.vision_config
        token_id = getattr(model_config, "image_token_id", None) or model_config.image_token_index
        if kind == "llava_next":
            _check_pinpoints(model_config.image_grid_pinpoints, image_processor)
        return _LLAVAS[kind](
            image_processor,
            patch_size=vision.patch_size,
            feature_strategy=model_config.vision_feature_select_strategy,
            class_tokens=_CLASS_TOKENS.get(vision.model_type, 1),
            image_token=tokenizer.convert_ids_to_tokens(token_id),
        )
    raise ConfigurationError(
        f"there is no native family for models of type {kind!r}; known: {', '.join(NATIVE)}. Use "
        "ChatTemplateTaskEncoder.from_pretrained or for_processor, which call the model's own processor, or pass a "
        "FixedTokenFamily, or your own family, to ChatTemplateTaskEncoder"
    )


def _check_pinpoints(of_model: Sequence[Sequence[int]], image_processor: Any) -> None:
    of_processor = getattr(image_processor, "image_grid_pinpoints", None) or []
    if sorted(map(tuple, of_model)) != sorted(map(tuple, of_processor)):
        raise ConfigurationError(
            f"image_grid_pinpoints of the model ({of_model}) and of {type(image_processor).__name__} ({of_processor}) "
            "differ, so the model could not assemble the tiles: set those of the processor to the model's"
        )


def _video_bounds(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    size = config.get("size") or {}
    return (config.get("min_pixels") or size.get("shortest_edge"), config.get("max_pixels") or size.get("longest_edge"))


# Loading --------------------------------------------------------------------------------------------------------------
#
# What an encoder needs of a model, from a folder or the hub, part by part: whole processors need torchvision.
# Transformers loads the tokenizer and the Pillow image processor. Two settings are read from the processor's own files:
# its chat template, which overrides the tokenizer's, and the bounds on the size of videos.


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """A tokenizer, the family of its model, and the processor's chat template, if it has one."""

    tokenizer: Any
    family: Family | ProcessorFamily
    chat_template: str | None


def model_place(name_or_path: str | Path) -> str:
    """Return where to load a model from: its folder or name, or its folder in the cache if the hub does not answer.

    Transformers would ask six times for each of its files, in half a minute. Raises OSError for a model of neither.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    name = str(name_or_path)
    try:
        if not Path(name).is_dir():
            huggingface_hub.HfApi().model_info(name, timeout=_ANSWER_SECONDS)
    except (HfHubHTTPError, ValueError):
        pass  # it answers, or never will: transformers says more
    except Exception as error:
        if isinstance(cached := huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return str(Path(cached).parent)
        raise OSError(
            f"there is no such folder, it is not in the cache ({huggingface_hub.constants.HF_HUB_CACHE}), and the hub "
            f"does not answer: {error}"
        ) from error
    return name


_ANSWER_SECONDS = 10.0


def load_pretrained(name_or_path: str | Path) -> Pretrained:
    """Load the parts of a model that an encoder needs.

    Raises:
        ConfigurationError: A part cannot be loaded, or the model's processor does not read media among turns.
    """
    with optional_packages():
        from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

    model_type = ""
    try:
        name_or_path = model_place(name_or_path)
        model_config = AutoConfig.from_pretrained(name_or_path)
        model_type = model_config.model_type
        if model_type not in NATIVE:
            processor = AutoProcessor.from_pretrained(name_or_path)
            family = ProcessorFamily(processor=processor, model_config=model_config)
            return Pretrained(tokenizer=processor.tokenizer, family=family, chat_template=family.chat_template)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        image_processor = AutoImageProcessor.from_pretrained(name_or_path, backend="pil")
    except ImportError as error:
        raise ConfigurationError(_needed(str(name_or_path), model_type, str(error))) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load the tokenizer and image processor of {str(name_or_path)!r}: {error}\nWithout a connection to "
            "the Hugging Face hub, use a model in the cache (HF_HOME) or a local folder"
        ) from error
    video_config = _video_config(name_or_path)
    return Pretrained(
        tokenizer=tokenizer,
        family=family_of(model_config, tokenizer, image_processor, video_config=video_config),
        chat_template=_chat_template(name_or_path),
    )


_PACKAGES = ("torchvision", "torchaudio", "num2words")
_NEEDED = {"smolvlm": ("torchvision", "num2words")}
"""By type of model, what its processor asks for, of which transformers names one at a time."""


def _needed(name: str, model_type: str, complaint: str) -> str:
    """Return what is missing for a processor, and how to install it, from the complaint of transformers."""
    needed = {one for one in _PACKAGES if one in complaint.lower()} | {*_NEEDED.get(model_type, ())}
    missing = [one for one in _PACKAGES if one in needed and find_spec(one) is None]
    if not missing:
        return f"the processor of {name!r} needs a package: {complaint}"
    torch = f"torch=={version('torch').partition('+')[0]} " if any(one.startswith("torch") for one in missing) else ""
    return f"the processor of {name!r} needs {' and '.join(missing)}: `pip install {torch}{' '.join(missing)}`"


def _chat_template(name_or_path: str | Path) -> str | None:
    """Return the template of the processor: from its own file, or in older folders from a JSON file."""
    template = _read(name_or_path, "chat_template.jinja")
    if template is None and (text := _read(name_or_path, "chat_template.json")) is not None:
        template = json.loads(text).get("chat_template")
    return template


def _video_config(name_or_path: str | Path) -> Mapping[str, Any]:
    """Return the settings of the video processor; their file depends on the release that wrote the folder."""
    text = _read(name_or_path, "video_preprocessor_config.json")
    if text is not None:
        return dict(json.loads(text))
    text = _read(name_or_path, "processor_config.json")
    return {} if text is None else dict(json.loads(text).get("video_processor") or {})


def _read(name_or_path: str | Path, name: str) -> str | None:
    from transformers.utils import cached_file

    path = cached_file(
        str(name_or_path),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if path is None else Path(path).read_text("utf-8")

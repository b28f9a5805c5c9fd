"""Load what an encoder needs of a model from a folder or the hub, part by part: whole processors need torchvision.

Transformers loads the tokenizer and the Pillow image processor. Two settings are read from the processor's own files:
its chat template, which overrides the tokenizer's, and the bounds on the size of videos.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families.registry import family_of
from energon_bridge.task_encoder.families.vision import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """A tokenizer, the family of its model, and the processor's chat template, if it has one."""

    tokenizer: Any
    family: Family
    chat_template: str | None


def load_pretrained(name_or_path: str | Path) -> Pretrained:
    """Load the parts of a model that an encoder needs.

    Raises:
        ConfigurationError: A part cannot be loaded, or the model's family is unknown.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    try:
        model_config = AutoConfig.from_pretrained(name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        image_processor = AutoImageProcessor.from_pretrained(name_or_path, backend="pil")
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


def _chat_template(name_or_path: str | Path) -> str | None:
    """Return the template of the processor: from its own file, or in older folders from a JSON file."""
    template = _read(name_or_path, "chat_template.jinja")
    if template is None and (found := _read(name_or_path, "chat_template.json")) is not None:
        template = json.loads(found).get("chat_template")
    return template


def _video_config(name_or_path: str | Path) -> Mapping[str, Any]:
    """Return the settings of the video processor; their file depends on the release that wrote the folder."""
    found = _read(name_or_path, "video_preprocessor_config.json")
    if found is not None:
        return dict(json.loads(found))
    found = _read(name_or_path, "processor_config.json")
    return {} if found is None else dict(json.loads(found).get("video_processor") or {})


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

"""The model of a run: loaded, with some parts frozen.

That of a preset is written first, with a tokenizer that is trained on the texts of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from energon_bridge.core.datasets import get_loader, get_val_dataset
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.task_encoder import TaskEncoder
from energon_bridge.core.errors import ConfigurationError, did_you_mean
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.models.conversations.conversation import ChatSample, read_conversation
from energon_bridge.models.conversations.cooker import COOKERS
from energon_bridge.training.config import RunConfig
from energon_bridge.training.presets import ModelBundle, load_model, write_preset


def write_model_of_run(config: RunConfig, folder: Path) -> None:
    """Write the model of a run into a folder if the configuration names a preset."""
    if config.model.name_or_path is None:
        captions: Callable[[], Iterable[str]] = lambda: dataset_captions(  # noqa: E731
            config.data.path, limit=config.model.tokenizer_samples, **config.data.opening
        )
        write_preset(config.model, folder, captions)


def load_bundle(config: RunConfig, preset_folder: Path) -> ModelBundle:
    """Load the model of a run with its processors; random weights are drawn from the seed."""
    settings = config.model
    torch.manual_seed(key_of("weights", config.seed) >> 1)
    if settings.name_or_path is None:
        name = str(preset_folder)
        init = "random"
    else:
        name = settings.name_or_path
        init = settings.init
    bundle = load_model(
        name,
        init=init,
        image_tokens_per_image=settings.image_tokens_per_image,
        attn_implementation=settings.attn_implementation,
    )
    freeze(bundle.model, settings.freeze)
    if config.train.gradient_checkpointing:
        enable = getattr(bundle.model, "activation_checkpointing_enable", None)  # the newer name
        (enable or bundle.model.gradient_checkpointing_enable)({"use_reentrant": False})
    return bundle


# ---------------------------------------------------------------------------------------------------------------------
# The texts of a dataset, without its images; a preset's tokenizer is trained on them.


class _TextOnly(TaskEncoder[Any, list[str], list[str], list[str]]):
    """Keep the texts of a sample."""

    decoder = SampleDecoder(defer_images=True)  # images are not looked at
    cookers = COOKERS

    def encode_sample(self, sample: Any) -> list[str]:
        texts: list[Any] = []
        for name in ("caption", "context", "text", "answers", "sequence", "texts"):
            value = getattr(sample, name, None)
            texts += value if isinstance(value, list | tuple) else [value]
        if isinstance(sample, ChatSample):
            texts += [part.text for turn in read_conversation(sample).turns for part in turn.parts]
        return [text for text in texts if isinstance(text, str)]

    def batch(self, samples: list[list[str]]) -> list[str]:
        return [text for texts in samples for text in texts]


def dataset_captions(path: str, *, limit: int, split_part: str = "train", **opening: Any) -> list[str]:
    """Return the texts of up to `limit` samples, in split order: captions, questions, answers, documents.

    `opening` are other arguments of `get_val_dataset`.
    """
    batch_size = 64
    dataset = get_val_dataset(
        path,
        split_part=split_part,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=batch_size,
        limit=-(-limit // batch_size),
        task_encoder=_TextOnly(),
        **opening,
    )
    return [text for texts in get_loader(dataset) for text in texts]


# ---------------------------------------------------------------------------------------------------------------------
# Freezing parts of a model.
#
# A pattern is the path of a module (`model.vision_tower`); `*` matches anything, and everything below is frozen too.


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Freeze the parts of a model that match the patterns.

    Raises:
        ConfigurationError: A pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not matching:
            raise ConfigurationError(_unknown(model, pattern))
        for name in matching:
            parameters[name].requires_grad_(False)
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigurationError(
            f"model.freeze={list(patterns)} leaves no parameter of {type(model).__name__} to train: freeze less"
        )


def _unknown(model: Any, pattern: str) -> str:
    names = [name for name, _ in model.named_modules() if name]
    shallow = [name for name in names if name.count(".") < 2]
    hint = did_you_mean(pattern, names)
    return f"model.freeze: {type(model).__name__} has no part {pattern!r}.{hint} Top-level parts: {', '.join(shallow)}"

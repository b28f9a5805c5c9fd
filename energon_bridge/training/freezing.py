"""Parts of a model that are not trained, chosen by name.

A pattern names a part of the model by its path (`model.vision_tower`), in which `*` stands for anything, and takes all
that is below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from energon_bridge.errors import ConfigurationError


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Turn the gradients of the named parts of a model off.

    Raises:
        ConfigurationError: A pattern names nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not found:
            raise ConfigurationError(_unknown(model, pattern))
        for name in found:
            parameters[name].requires_grad_(False)
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigurationError(
            f"model.freeze={list(patterns)} leaves no parameter of {type(model).__name__} to train: take a part out"
        )


def _unknown(model: Any, pattern: str) -> str:
    names = [name for name, _ in model.named_modules() if name]
    shallow = [name for name in names if name.count(".") < 2]
    near = get_close_matches(pattern, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"model.freeze: {type(model).__name__} has no part {pattern!r}; {hint}Parts near the top: {', '.join(shallow)}"
    )

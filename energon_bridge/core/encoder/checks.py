"""Checks a task encoder when a dataset is made with it, for mistakes that would stay silent in training.

A hook with a misspelt name is never called, and samples stay unencoded. A name counts as misspelt if three things hold:
it is a letter or two away from the name of a hook that its class does not override, whatever the base classes do; it
has no leading underscore; and nothing in the class uses it. So helpers may have any name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

from energon_bridge.core.encoder.cooking import Cooker
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.hooks import ENCODER_HOOKS, Hook
from energon_bridge.core.encoder.task_encoder import AugmentTaskEncoder
from energon_bridge.core.errors import ConfigurationError

_NEEDED = (Hook.ENCODE.title, Hook.BATCH.title, Hook.ENCODE_BATCH.title, "decoder")
_LONG_NAME = 10
"""Letters of a name from which on two of them may be wrong."""


def check_encoder(encoder: Any) -> None:
    """Raise if a task encoder has an obvious mistake.

    Raises:
        ConfigurationError: It is a class, a hook cannot be called, an attribute has the wrong kind, or a name looks
            like that of a hook and is not.
    """
    if isinstance(encoder, type):
        name = encoder.__name__
        raise ConfigurationError(f"task_encoder is the class {name}; expected an instance: task_encoder={name}(…)")
    if missing := [name for name in _NEEDED if not hasattr(encoder, name)]:
        raise ConfigurationError(
            f"task_encoder is a {type(encoder).__name__} ({encoder!r:.80}) without {', '.join(missing)}; expected a "
            "task encoder: derive its class from DefaultTaskEncoder and override the hooks you need"
        )
    _check_decoder(encoder)
    _check_cookers(encoder)
    own = [kind for kind in type(encoder).__mro__ if kind.__module__.partition(".")[0] not in _NOT_THE_USERS]
    written = {name for kind in own for name in vars(kind)} | set(getattr(encoder, "__dict__", ()))
    for hook, arguments in ENCODER_HOOKS.items():
        if hook in written:
            _check_call(encoder, hook, arguments)
    _check_names(encoder, own, written)
    _check_builders(encoder, own)
    if isinstance(encoder, AugmentTaskEncoder):
        check_encoder(encoder.task_encoder)


_NOT_THE_USERS = (__name__.partition(".")[0], "builtins", "typing", "abc")


def _check_decoder(encoder: Any) -> None:
    decoder = encoder.decoder
    name = type(encoder).__name__
    if isinstance(decoder, type):
        raise ConfigurationError(
            f"{name}.decoder is the class {decoder.__name__}; expected an instance: decoder = {decoder.__name__}()"
        )
    if decoder is not None and not callable(getattr(decoder, "decode", None)):
        hint = f"SampleDecoder(image_decode={decoder!r})" if isinstance(decoder, str) else "SampleDecoder(…)"
        raise ConfigurationError(f"{name}.decoder is {decoder!r}; expected {hint}, or None for raw bytes")


def _check_cookers(encoder: Any) -> None:
    cookers = getattr(encoder, "cookers", None)
    name = type(encoder).__name__
    if cookers is None:
        return
    if not isinstance(cookers, Sequence) or isinstance(cookers, str):
        one = "one Cooker" if isinstance(cookers, Cooker) else f"{cookers!r:.80}"
        raise ConfigurationError(f"{name}.cookers is {one}; expected a list: cookers = [Cooker(…), …]")
    for number, cooker in enumerate(cookers):
        if not hasattr(cooker, "is_match"):
            called = getattr(cooker, "__name__", repr(cooker))
            raise ConfigurationError(f"{name}.cookers[{number}] is {called}; expected a Cooker: Cooker({called})")


def _check_call(encoder: Any, hook: str, arguments: tuple[str, ...]) -> None:
    function = getattr(encoder, hook)
    name = type(encoder).__name__
    expected = f"def {hook}(self, {', '.join(arguments)})"
    if not callable(function):
        raise ConfigurationError(f"{name}.{hook} is {function!r:.80}; expected a method: {expected}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{name}.{hook} cannot be called with ({', '.join(arguments)}): {error}; expected {expected}"
        ) from error
    except ValueError:
        return  # a builtin without a signature


def _check_names(encoder: Any, own: Sequence[type], written: set[str]) -> None:
    """Raise for names that look like misspelt hooks, `decoder` or `cookers`.

    A class may have such a name if it, or a class derived from it, overrides what is meant, too: then nothing is
    missing. Otherwise the hook of its base class would be called instead. A name that a base class has, too, is judged
    at that class.
    """
    lineage = type(encoder).__mro__
    instance = getattr(encoder, "__dict__", {})
    name = lineage[0].__name__
    there = set(instance)
    for wrong, value in instance.items():
        if (meant := _meant_attribute(wrong, value)) and meant not in written:
            raise ConfigurationError(f"{name} has an attribute {wrong}, which has no effect: rename it to {meant}")
    for kind in own:
        name = kind.__name__
        there = there | vars(kind).keys()
        above = {one for base in lineage[lineage.index(kind) + 1 :] for one in vars(base)}
        for wrong, value in vars(kind).items():
            is_method = isinstance(value, _METHODS)
            meant = _meant(wrong, ENCODER_HOOKS) if is_method else _meant_attribute(wrong, value)
            if meant is None or meant in there or wrong in above:
                continue
            if (is_method or meant in written) and any(wrong in _names_used(other, beside=wrong) for other in own):
                continue
            if not is_method:
                raise ConfigurationError(f"{name} has an attribute {wrong}, which has no effect: rename it to {meant}")
            raise ConfigurationError(
                f"{name}.{wrong} is never called, and {name} does not override the hook {meant}: rename it to "
                f"{meant}. If it is not meant as a hook, start its name with an underscore"
            )


def _meant_attribute(wrong: str, value: Any) -> str | None:
    """Return which of `decoder` and `cookers` an attribute is probably meant to be."""
    return next((meant for meant, is_one in _KINDS.items() if _meant(wrong, (meant,)) and is_one(value)), None)


def _check_builders(encoder: Any, own: Sequence[type]) -> None:
    """Raise for hooks of megatron-energon that only its drop-in has, unless the class uses them itself."""
    there = {name for kind in type(encoder).__mro__ if kind not in own for name in vars(kind)}  # of the drop-in
    for name in sorted(_BUILDERS & {name for kind in own for name in vars(kind)} - there):
        if any(name in _names_used(kind, beside=name) for kind in own):
            continue
        raise ConfigurationError(
            f"{type(encoder).__name__}.{name} is a hook of megatron-energon and never called here: use the other hooks "
            "of task encoders, or run the program with `python -m energon_bridge.compat`"
        )


_BUILDERS = {f"build_{what}" for what in ("train_datasets", "val_datasets", Hook.BATCH.title, Hook.ENCODE.title)}
_METHODS = (FunctionType, staticmethod, classmethod)
_KINDS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "decoder": lambda value: isinstance(value, SampleDecoder),
        "cookers": lambda value: (
            isinstance(value, Cooker)
            or (isinstance(value, (list, tuple)) and any(isinstance(one, Cooker) for one in value))
        ),
    }
)


def _meant(name: str, known: Mapping[str, Any] | Sequence[str]) -> str | None:
    """Return the known name that a name is probably a typo of; None if the name is known or private."""
    if name.startswith("_") or name in ENCODER_HOOKS or name in known:
        return None
    for right in known:
        plain, wanted = (text.lower().replace("_", "") for text in (name, right))
        if plain[:1] == wanted[:1] and _distance(plain, wanted) <= 1 + (len(wanted) >= _LONG_NAME):
            return right
    return None


def _distance(a: str, b: str) -> int:
    """Return the edit distance of two names: insertions, deletions, changes and swaps of neighbouring letters."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a):
        before, last, row = row, before, [i + 1]
        for j, other in enumerate(b):
            best = min(before[j] + (letter != other), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == b[j - 1] and a[i - 1] == other:
                best = min(best, last[j - 1] + 1)
            row.append(best)
    return row[-1]


def _names_used(kind: type, *, beside: str) -> Iterator[str]:
    """Yield the names of attributes and variables used in the methods of a class, except in one method."""
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if name != beside and isinstance(function, FunctionType):
            yield from _names_in(inspect.unwrap(function).__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant  # for getattr

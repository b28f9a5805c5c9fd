"""Names of megatron-energon that nothing stands behind here: they can be imported, and say so when they are used.

A class may be named in annotations, given type arguments, asked `isinstance` and derived from, all of which modules do
when they are imported; making an object of it, or using anything of it, raises NotProvidedError with what takes its
place. States of megatron-energon's loaders unpickle to empty objects, which a loader refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from energon_bridge.errors import NotProvidedError

PACKAGE = "megatron.energon"


def not_provided(name: str, advice: str) -> NotProvidedError:
    """Build the error for the use of a name; `advice` says what takes its place."""
    return NotProvidedError(f"{name} of megatron-energon has no counterpart in energon_bridge: {advice}.")


class NoSuchPart(NotProvidedError, AttributeError):  # noqa: N818 - never caught by this name
    """An inner part of megatron-energon is asked for, which `hasattr` may do."""


class Refusing(type):
    """The class of classes that can be named but not used."""

    __advice__: str
    __named__: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_provided(cls.__named__, cls.__advice__)

    def __getattr__(cls, name: str) -> NoReturn:
        refusal = not_provided(f"{cls.__named__}.{name}", cls.__advice__)
        if name.startswith("__"):  # what typing, inspect and others look for
            raise AttributeError(str(refusal))
        raise NoSuchPart(str(refusal)) if name.startswith("_") else refusal

    def __getitem__(cls, arguments: Any) -> Any:
        return cls


def refused_class(name: str, advice: str, **attributes: Any) -> type:
    """Return a class that refuses to be used; `attributes` are those that it has nevertheless."""
    namespace = {"__module__": PACKAGE, "__qualname__": name, "__named__": name, "__advice__": advice, **attributes}
    return Refusing(name, (), namespace)


def refused_function(name: str, advice: str) -> Callable[..., NoReturn]:
    """Return a function that refuses to be called."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise not_provided(name, advice)

    refused.__name__ = refused.__qualname__ = name
    refused.__module__ = PACKAGE
    refused.__doc__ = f"Not provided: {advice}."
    return refused


def refused_command(name: str, advice: str) -> Any:
    """Return a click command that refuses to be run, alone or in a group, whatever its arguments are."""
    import click  # importing `megatron.energon` does without it

    class Refused(click.Command):
        def main(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise not_provided(name, advice)

        def invoke(self, ctx: click.Context) -> NoReturn:
            raise click.ClickException(str(not_provided(name, advice)))

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return Refused(name, context_settings=settings, help=f"Not provided: {advice}.")


class ForeignState(dict[Any, Any]):
    """A state of megatron-energon, of which nothing is kept: a loader refuses it by name.

    A dict, since some of megatron-energon's states are, and pickles add their entries one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def state_class(name: str, module: str) -> type[ForeignState]:
    """Return the class that pickles of one kind of state unpickle to."""
    return type(name, (ForeignState,), {"__module__": f"{PACKAGE}.{module}", "__qualname__": name})

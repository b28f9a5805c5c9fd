"""Names of megatron-energon without a counterpart: they can be imported, and raise an error when used.

Modules may use such a class on import: in annotations, with type arguments, in `isinstance` and as a base. Creating an
object, or using an attribute, raises NotProvidedError, which says what to use instead. States of megatron-energon's
loaders unpickle to empty objects, which a loader rejects with an error that names them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from energon_bridge.errors import NotProvidedError

PACKAGE = "megatron.energon"


def not_provided(name: str, advice: str) -> NotProvidedError:
    """Build the error for the use of a name; `advice` says what to use instead."""
    return NotProvidedError(f"{name} of megatron-energon has no counterpart in energon_bridge: {advice}.")


class NoSuchPart(NotProvidedError, AttributeError):  # noqa: N818 - never caught by this name
    """An internal attribute of megatron-energon was accessed, perhaps by `hasattr`."""


class Refusing(type):
    """The class of classes that can be named but not used."""

    __advice__: str
    __named__: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_provided(cls.__named__, cls.__advice__)

    def __getattr__(cls, name: str) -> NoReturn:
        refusal = not_provided(f"{cls.__named__}.{name}", cls.__advice__)
        if name.startswith("__"):  # typing, inspect and others look for these
            raise AttributeError(str(refusal))
        raise NoSuchPart(str(refusal)) if name.startswith("_") else refusal

    def __getitem__(cls, arguments: Any) -> Any:
        return cls


def refused_class(name: str, advice: str, **attributes: Any) -> type:
    """Return a class that raises when used, except for the given `attributes`."""
    namespace = {"__module__": PACKAGE, "__qualname__": name, "__named__": name, "__advice__": advice, **attributes}
    return Refusing(name, (), namespace)


def refused_function(name: str, advice: str) -> Callable[..., NoReturn]:
    """Return a function that raises when called."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise not_provided(name, advice)

    refused.__name__ = refused.__qualname__ = name
    refused.__module__ = PACKAGE
    refused.__doc__ = f"Not provided: {advice}."
    return refused


def refused_command(name: str, advice: str) -> Any:
    """Return a click command that raises when run, alone or in a group, whatever its arguments."""
    import click  # importing `megatron.energon` does not need it

    class Refused(click.Command):
        def main(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise not_provided(name, advice)

        def invoke(self, ctx: click.Context) -> NoReturn:
            raise click.ClickException(str(not_provided(name, advice)))

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return Refused(name, context_settings=settings, help=f"Not provided: {advice}.")


class ForeignState(dict[Any, Any]):
    """A state of megatron-energon, without its content; loaders reject it with an error that names it.

    A dict, since some of megatron-energon's states are, and pickles add their entries one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def state_class(name: str, module: str) -> type[ForeignState]:
    """Return the class that one kind of state unpickles to."""
    return type(name, (ForeignState,), {"__module__": f"{PACKAGE}.{module}", "__qualname__": name})

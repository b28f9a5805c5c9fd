"""`python -m energon_bridge.compat [--trust-remote-code] (SCRIPT | -m MODULE) [ARGS…]`: run a program as it is.

`python -m energon_bridge.compat --refused` prints the names that raise when they are used, and what to use instead.

The program sees its own `sys.argv` and the `sys.path` that `python SCRIPT` or `python -m MODULE` would give it. Under
torchrun: `torchrun … -m energon_bridge.compat SCRIPT ARGS…`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from energon_bridge.compat import install
from energon_bridge.compat.table import refused

_USAGE = """\
usage: python -m energon_bridge.compat [--trust-remote-code] (SCRIPT | -m MODULE) [ARGS...]
       python -m energon_bridge.compat --refused"""
_TRUST = "--trust-remote-code"
_COMMANDS = "energon_bridge.tools.cli.main"
"""The module of `energon`, whose commands have a flag of their own for that: they get it, too."""


def main(arguments: Sequence[str]) -> None:
    """Run the program that the arguments name, as `__main__`, with `megatron.energon` given by energon_bridge."""
    rest = list(arguments)
    if rest in (["-h"], ["--help"]):
        sys.stdout.write(f"{_USAGE}\n")
        return
    if rest == ["--refused"]:
        sys.stdout.writelines(f"{name}: {advice}\n" for name, advice in refused().items())
        return
    trust = rest[:1] == [_TRUST]
    if trust:
        del rest[0]
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    install(trust_remote_code=trust)
    sys.argv = rest
    if is_module and rest[0] == _COMMANDS:
        _run_command(trust=trust)
        return
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(rest[0]):
        raise SystemExit(f"{rest[0]}: no such file\n{_USAGE}")
    # The first entry is where this module was looked for; a script's is its own folder.
    sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
    runpy.run_path(rest[0], run_name="__main__")


def _run_command(*, trust: bool) -> None:
    """Run `energon`; with `trust`, its commands behave as if they had been given that flag."""
    import click

    from energon_bridge.tools.cli.main import main as energon

    defaults: dict[str, Any] = {"trust_remote_code": trust}
    groups = {"columns": {"add": defaults}}
    by_command = {name: groups.get(name, defaults) for name in energon.list_commands(click.Context(energon))}
    energon(prog_name=f"python -m energon_bridge.compat -m {_COMMANDS}", default_map=by_command)


if __name__ == "__main__":
    main(sys.argv[1:])

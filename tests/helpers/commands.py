"""The `energon` command, run in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from energon_bridge.tools.cli.main import main


def energon(*arguments: object, answers: str = "") -> Result:
    """Run a command, with answers to what it asks."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=answers)


def output_of(*arguments: object, answers: str = "") -> str:
    """Run a command that succeeds; return what it prints."""
    result = energon(*arguments, answers=answers)
    assert result.exit_code == 0, result.output
    return result.output


def refusal_of(*arguments: object, answers: str = "", code: int = 1) -> str:
    """Run a command that fails; return what it prints."""
    result = energon(*arguments, answers=answers)
    assert result.exit_code == code, result.output
    return result.output


def answer(*arguments: object) -> Any:
    """Return what a command prints as JSON."""
    result = energon(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)

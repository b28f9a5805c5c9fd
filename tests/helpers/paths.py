"""Where the repository, the tests and what they share lie."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
REPOSITORY = TESTS.parent
HELPERS = TESTS / "helpers"
CONFIGS = REPOSITORY / "configs"
EXAMPLES = REPOSITORY / "examples"
FIXTURES = TESTS / "fixtures" / "energon-7.4.1"
"""Datasets that megatron-energon 7.4.1 prepared."""

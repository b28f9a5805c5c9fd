"""What is declared in several places agrees: versions, constraints, README, scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib

import pytest
from forked import run_program
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import REPOSITORY

SHELL_SCRIPTS = [
    ".ci/run",
    *(f"scripts/{name}" for name in ("bench", "check", "docs", "matrix", "peers-env", "quickstart", "release")),
    *("scripts/rival-env", "scripts/rival-tests", "scripts/test"),
]


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def constraints() -> dict[str, Requirement]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def requirements() -> list[str]:
    extras = project()["optional-dependencies"]
    return [*project()["dependencies"], *(line for extra in extras.values() for line in extra)]


@pytest.mark.parametrize("line", [line for line in requirements() if not line.startswith("energon-bridge[")])
def test_the_tested_version_is_in_the_declared_range(line):
    requirement = Requirement(line)
    pin = constraints()[canonicalize_name(requirement.name)]
    (version,) = (specifier.version for specifier in pin.specifier)
    assert requirement.specifier.contains(version), f"{line} does not allow {pin}"


def test_all_names_every_extra_but_a_few():
    """The client of `msc://` brings thirty packages of its own; Ray is 70 MB that a cluster has.

    torchcodec's wheel must fit the build of torch, and with pillow-heif parts that were bytes become images.
    """
    extras = project()["optional-dependencies"]
    (line,) = extras["all"]
    assert Requirement(line).extras == set(extras) - {"all", "dev", "docs", "heic", "msc", "ray", "torchcodec"}


def test_torchvision_is_nowhere():
    assert "torchvision" not in constraints()
    assert not [line for line in requirements() if "torchvision" in line]


def test_readme_installs_the_tested_torch():
    pin = str(constraints()["torch"])
    assert re.findall(r"torch==[\w.]+", (REPOSITORY / "README.md").read_text()) == [pin]


def test_readme_knows_every_extra():
    readme = (REPOSITORY / "README.md").read_text()
    extras = set(project()["optional-dependencies"]) - {"all"}
    assert [extra for extra in sorted(extras) if f"| `{extra}` |" not in readme] == []


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_script(script):
    path = REPOSITORY / script
    assert os.access(path, os.X_OK)
    assert "\nset -euo pipefail\n" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("script", SHELL_SCRIPTS[1:])
def test_help_of_a_shell_script_runs_nothing(script, tmp_path):
    """Of the programs that it could run, bash finds only what prints the help."""
    for program in ("basename", "bash", "dirname", "sed"):
        (tmp_path / program).symlink_to(shutil.which(program))
    command = [shutil.which("bash"), script, "--help"]
    ran = subprocess.run(command, cwd=REPOSITORY, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    second = (REPOSITORY / script).read_text().splitlines()[1]
    assert ran.stdout.startswith(second.removeprefix("# "))
    assert "set -euo" not in ran.stdout


@pytest.mark.parametrize("script", ["models.py", "reference.py"])
def test_help_of_a_script_that_writes_pages_writes_none(script):
    pages = {path: path.stat().st_mtime_ns for path in (REPOSITORY / "docs").rglob("*") if path.is_file()}
    ran = run_program([f"scripts/{script}", "--help"], REPOSITORY)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"usage: {script} [-h]")
    assert {path: path.stat().st_mtime_ns for path in pages} == pages


def test_the_changelog_has_a_place_for_the_next_change():
    headings = re.findall(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_the_changes_of_a_release_are_read_in_a_minute():
    """A merge that brings back the long notes of development fails here."""
    sections = re.split(r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections if len(section.splitlines()) > 50] == []

"""The documentation: the first page works as it stands, generated pages are fresh, and what pages name exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from forked import Program, free_port, import_for_training, rank_environment
from pages import DOCS, PAGES, blocks
from paths import REPOSITORY

import energon_bridge
from energon_bridge.training.config import RunConfig
from energon_bridge.training.config_file import data_settings

START = DOCS / "start.md"

# The first page ------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of the first page after the installation, each with the output that the page shows."""
    for _, block in blocks("console", START)[1:]:
        for command in block.removeprefix("$ ").split("\n$ "):
            first, *shown = command.strip().split("\n")
            yield first, shown


def run(command: str, folder: Path, *, kill_after: str | None = None) -> str:
    """Run a command of the page in a folder; with `kill_after`, until a line has this text."""
    name, *words = shlex.split(command)
    if name == "energon":
        words = ["-c", "from energon_bridge.tools.cli.main import main; main()", *words]
    if name != "torchrun":
        programs = [Program(words, folder)]
    else:  # as torchrun starts them; a real one is in training/test_torchrun.py
        port, (option, count, *words) = free_port(), words
        assert option == "--nproc-per-node"
        programs = [Program(words, folder, rank_environment(rank, int(count), port)) for rank in range(int(count))]
    lines = []
    for program in programs:
        for line in program.output:
            lines.append(line)
            if kill_after is not None and kill_after in line:
                program.kill()
    end = 0 if kill_after is None else -signal.SIGKILL
    assert {program.wait() for program in programs} == {end}, f"{command}\n{''.join(lines)}"
    return "".join(lines)


def plain(text: str) -> str:
    """Return lines without what differs from run to run and from machine to machine."""
    return re.sub(r"(loss|lr|read:?|data) +[-+.\de]+|\d+ samples/s|\d+/\d+ +|\d+ B\b", r"\1 …", text)


def test_the_first_page_works(tmp_path):
    """Its data, commands and outputs; the training of eight steps instead of 200 is killed after four."""
    import_for_training()
    (_, make_shapes), (_, load) = blocks("python", START)
    (tmp_path / "make_shapes.py").write_text(make_shapes)
    (tmp_path / "load.py").write_text(load)
    ((_, configuration),) = blocks("yaml", START)
    for key, value in {"max_steps": 8, "log_interval": 2, "interval": 2}.items():
        configuration = re.sub(rf"{key}: \d+", f"{key}: {value}", configuration)
    (tmp_path / "shapes.yaml").write_text(configuration)
    done = []
    for command, shown in commands():
        if "runs/whole" in command:
            continue  # tests/training/test_resume_training.py compares runs
        short = command.replace("step-0000150", "step-0000006").replace("--step 160", "--step 7")
        output = run(short, tmp_path, kill_after="step 4/8" if shown[-1:] == ["Killed"] else None)
        if "preview" in command and "--samples" in command:
            assert "  a red circle\n" in run("python load.py", tmp_path) + output
        for line in shown:
            if "energon_bridge.training" not in command:
                assert plain(line.replace("/home/you", str(tmp_path))) in plain(output), command
            elif "step" not in line and line != "Killed":
                assert plain(line) in plain(output), command
        done.append(command.split()[0])
    assert done == ["python", *["energon"] * 4, "python", "torchrun", *["energon"] * 2]
    assert sorted(path.name for path in (tmp_path / "runs/shapes/checkpoints").iterdir())[-1] == "step-0000008.ckpt"


# Pages that follow from the code -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", REPOSITORY / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_fresh(reference):
    if f"click=={version('click')}" not in (REPOSITORY / "constraints.txt").read_text().splitlines():
        pytest.skip("other versions of click lay out help in other ways")
    made = reference.pages()
    assert len(made) >= 13
    stale = [str(path.relative_to(DOCS)) for path, text in made.items() if path.read_text() != text]
    assert stale == [], "write them again: python scripts/reference.py"


def test_the_reference_has_every_public_name_once(reference):
    pages = "\n".join(reference.api_pages().values())
    named = re.findall(r"^::: energon_bridge\.([\w.]+)$", pages, re.MULTILINE)
    top = {*energon_bridge.__all__, "EnergonMultiModalDataModule"} - {"__version__"}
    assert sorted(name for name in named if "." not in name) == sorted(top)
    assert len(named) == len(set(named))


def test_the_menu_of_the_site_has_every_page_once():
    # mkdocs.yml as Zensical reads it; the changelog is copied in when the site is built
    def files(entry: object) -> Iterator[str]:
        match entry:
            case str():
                yield entry
            case dict():
                yield from files(list(entry.values()))
            case list():
                for inner in entry:
                    yield from files(inner)

    menu = list(files(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]))
    assert sorted(menu) == sorted([*(str(page.relative_to(DOCS)) for page in PAGES[1:]), "changelog.md"])


def test_a_page_has_one_name_everywhere():
    assert not re.search(r"^ *- .+: [\w/-]+\.md$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    where_next = (DOCS / "index.md").read_text().partition("## Where next")[2].partition("##")[0]
    links = dict(re.findall(r"\[([^]]+)\]\(([^)]+\.md)\)", where_next))
    assert {name: (DOCS / page).read_text().partition("\n")[0] for name, page in links.items()} == {
        name: f"# {name}" for name in links
    }
    assert len(links) > 25


def test_the_index_for_language_models_has_every_page_once():
    listed = re.findall(r"^- \[.+\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*(str(page.relative_to(DOCS)) for page in PAGES[1:]), "../CHANGELOG.md"])


def test_every_page_is_three_clicks_away():
    """A click opens a part of the menu, or a page."""

    def clicks(entry: object) -> int:
        match entry:
            case list():
                return max(map(clicks, entry))
            case dict():  # of one title
                (below,) = entry.values()
                return 1 if isinstance(below, str) else 1 + clicks(below)
        return 1

    assert clicks(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]) <= 3


# What pages say ------------------------------------------------------------------------------------------------------


def texts_of_the_package() -> set[str]:
    """Return all texts in the code; those with values in them, in the pieces between the values."""
    found = set()
    for path in (REPOSITORY / "energon_bridge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_messages_that_the_troubleshooting_page_explains_exist():
    page = (DOCS / "troubleshooting.md").read_text().partition("## Not an error")[0]
    rows = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    fragments = [fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row)]
    assert len(fragments) >= 25
    texts = texts_of_the_package()
    assert [fragment for fragment in fragments if not any(fragment in text for text in texts)] == []


SECTIONS = {
    field.name: {inner.name for inner in fields(value)}
    for field in fields(RunConfig())
    if is_dataclass(value := getattr(RunConfig(), field.name))
}
SECTIONS["data"] |= data_settings().keys()
NOT_OURS = {
    *("examples/multimodal", "configs/NAME.yaml", "configs/tiny/NAME.yaml"),  # Megatron-LM's; any of them
    *("data.data_sampler", "data.state_dict", "feedback.changes", "train.restore_state"),  # of objects
    "train.py",
}


def test_files_and_keys_that_the_pages_name_exist():
    named = set()
    for page in PAGES:
        files = re.findall(r"(?<![\w/.~-])(?:scripts|configs|examples|tests|benchmarks)/[\w./-]*\w", page.read_text())
        named |= {name for name in files if not (REPOSITORY / name).exists()}
        for section, key in re.findall(rf"(?<![\w/.])({'|'.join(SECTIONS)})\.(\w+)(?=[=`])", page.read_text()):
            named |= set() if key in SECTIONS[section] else {f"{section}.{key}"}
    assert named == NOT_OURS

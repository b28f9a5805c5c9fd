"""`megatron.energon` by energon_bridge: every public name, the import hook, and what it leaves alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import text_dataset
from forked import run_forked
from made import made_once
from paths import REPOSITORY, TESTS

from energon_bridge import WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset
from energon_bridge.compat import install, table
from energon_bridge.compat.__main__ import main
from energon_bridge.compat.surface import modules
from energon_bridge.core.errors import ConfigurationError, NotProvidedError, StateFormatError
from energon_bridge.tools.testing import create_captioning_test_dataset

NAMES: dict[str, list[str]] = json.loads((TESTS / "fixtures" / "energon-7.4.1-names.json").read_text())
DOCUMENT = REPOSITORY / "docs" / "reference" / "compat.md"


path = made_once(create_captioning_test_dataset, num_train=40, num_val=10)


def installed(function: Any) -> Any:
    """Return what a function returns in a process of its own, after `install()`."""

    def child(rank: int) -> Any:
        install()
        return function()

    return run_forked(1, child)[0]


# Names ---------------------------------------------------------------------------------------------------------------


def test_the_surface_is_that_of_the_fixture() -> None:
    assert {name: set(names) for name, names in modules().items()} == {
        name: set(names) for name, names in NAMES.items()
    }


@pytest.mark.rival
def test_the_fixture_is_that_of_the_package(run_rival: Callable[..., str]) -> None:
    assert json.loads(run_rival(Path(__file__).with_name("rival_names.py"))) == NAMES


@pytest.mark.rival
def test_names_that_modules_have_of_each_other_are_there(run_rival: Callable[..., str]) -> None:
    found = json.loads(run_rival(Path(__file__).with_name("rival_names.py"), "all"))
    assert "info_command" in found["cli.main"]
    assert "T_sample" in found["wrappers.map_dataset"]

    def missing() -> tuple[int, list[str]]:
        count, wrong = 0, []
        for module, names in found.items():
            imported = __import__(f"megatron.energon.{module}".rstrip("."), fromlist=["*"])
            count += len(names)
            wrong += [f"{module}.{name}" for name in names if not hasattr(imported, name)]
        return count, wrong

    count, wrong = installed(missing)
    assert count > 1000
    assert not wrong


def test_no_name_is_missing() -> None:
    """Every name of every module resolves to something, and what refuses says what to do instead."""

    def resolve_all() -> tuple[int, list[str]]:
        count, wrong = 0, []
        for module, names in NAMES.items():
            imported = __import__(f"megatron.energon.{module}".rstrip("."), fromlist=["*"])
            wrong += [f"{module}.{name}" for name in set(names) - set(dir(imported))]
            for name in names:
                value = getattr(imported, name)
                entry = table.describe(name, module)
                count += 1
                if entry.kind == "refused":
                    try:
                        value()
                    except NotProvidedError as error:
                        said = str(error)
                    else:
                        said = "it did not refuse"
                    wrong += [] if said.endswith(f"{entry.advice}.") else [f"{module}.{name}: {said}"]
        return count, wrong

    assert installed(resolve_all) == (sum(map(len, NAMES.values())), [])


def test_the_documented_table_is_the_real_one() -> None:
    text = DOCUMENT.read_text()
    assert table.render() in text, f"write the table of {DOCUMENT} anew: energon_bridge.compat.table.render()"


def test_what_is_ours_is_ours() -> None:
    def identities() -> list[bool]:
        import megatron.energon as theirs
        from megatron.energon.flavors import CaptioningSample, CrudeWebdataset
        from megatron.energon.flavors.captioning import CaptioningSample as Again
        from megatron.energon.flavors.crude import CrudeWebdataset as CrudeAgain
        from megatron.energon.task_encoder import cooking

        import energon_bridge

        return [
            theirs.Cooker is energon_bridge.Cooker is cooking.Cooker,
            CaptioningSample is Again is energon_bridge.CaptioningSample,
            CrudeWebdataset is CrudeAgain,
            theirs.MapDataset is theirs.wrappers.MapDataset,
            theirs.Blender is energon_bridge.Blender,  # only ours, found there all the same
            theirs.__version__.startswith("7.4.1+"),
            set(theirs.__all__) == set(NAMES[""]),
        ]

    assert all(installed(identities))


@pytest.mark.parametrize("statement", ["from megatron.energon import Coooker", "import megatron.energon.loaders"])
def test_what_neither_package_has_is_not_there(statement: str) -> None:
    def attempt() -> str:
        try:
            exec(statement)
        except ImportError as error:
            return type(error).__name__
        return "imported"

    assert installed(attempt) in ("ImportError", "ModuleNotFoundError")


def test_refused_classes_can_be_named_but_not_used() -> None:
    def use() -> list[str]:
        from megatron.energon import CaptioningWebdataset, Lazy, LimitDataset, SavableDataset
        from megatron.energon.wrappers.base import BaseWrapperDataset

        class Own(BaseWrapperDataset[int]):
            lazy: Lazy[int] | None = None
            dataset: SavableDataset[int] | None = None

        assert not isinstance(3, Own)
        assert CaptioningWebdataset.__sample_type__.__name__ == "CaptioningSample"
        messages = []
        for attempt in (
            lambda: Own(3),
            lambda: Own.anything,
            lambda: CaptioningWebdataset("x"),
            lambda: LimitDataset(3, 1),
        ):
            try:
                attempt()
            except ConfigurationError as error:
                messages.append(f"{type(error).__name__}: {error}")
        return messages

    messages = installed(use)
    assert [message.partition(" of")[0] for message in messages[:3]] == [
        "NotProvidedError: BaseWrapperDataset",
        "NotProvidedError: BaseWrapperDataset.anything",
        "NotProvidedError: making CaptioningWebdataset",
    ]
    assert messages[3].startswith("ConfigurationError: LimitDataset: expected a dataset from get_train_dataset")


# Importing -----------------------------------------------------------------------------------------------------------


def test_megatron_core_is_found_as_before() -> None:
    """Found and not imported, which takes seconds; tests of trainers import it."""
    before = importlib.util.find_spec("megatron.core")
    if before is None:
        pytest.skip("megatron-core is not installed")

    def found() -> tuple[str | None, bool]:
        import megatron
        import megatron.energon

        return importlib.util.find_spec("megatron.core").origin, getattr(megatron, "__file__", None) is None

    assert installed(found) == (before.origin, True)


def program(folder: Path, code: str) -> list[str]:
    """Run Python code in a process whose path holds only what a user's would, and return its lines."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}, {str(folder)!r}]\n{code}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_namespace_without_any_other_package_and_with_one_that_comes_later(tmp_path: Path) -> None:
    (tmp_path / "later/megatron/core").mkdir(parents=True)
    (tmp_path / "later/megatron/core/__init__.py").write_text("late = 1")
    code = f"""
from importlib.machinery import PathFinder
import lazy_loader
sys.path = [entry for entry in sys.path if "site-packages" not in entry]
assert PathFinder.find_spec("megatron") is None
from energon_bridge.compat import install
install()
import megatron.energon
sys.path.append({str(tmp_path / "later")!r})
from megatron.core import late
print(late, megatron.energon.__version__[:5], "torch" in sys.modules)
"""
    assert program(tmp_path, code) == ["1 7.4.1 False"]


def test_the_real_package_is_passed_over_or_too_late(tmp_path: Path) -> None:
    (tmp_path / "megatron/energon").mkdir(parents=True)
    (tmp_path / "megatron/energon/__init__.py").write_text("real = True")
    code = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from energon_bridge.compat import install
install()
install(trust_remote_code=True)
import megatron.energon
print(hasattr(megatron.energon, "real"))
"""
    said, found = program(tmp_path, code)
    assert said.startswith("megatron-energon is installed (")
    assert found == "False"
    code = """
import megatron.energon
from energon_bridge.compat import install
try:
    install()
except ValueError as error:
    print(error)
"""
    assert "is already imported, from" in program(tmp_path, code)[0]


@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_sees_its_own_arguments(as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("VALUE = 7")
    (tmp_path / "program.py").write_text(
        "import sys, own\nfrom megatron.energon import TaskEncoder\n"
        "open(sys.argv[1], 'w').write(f'{__name__} {own.VALUE} {sys.argv[2:]} {TaskEncoder.__module__}')\n"
    )

    def child(rank: int) -> None:
        sys.path[0] = str(tmp_path)  # the current directory of `python -m`
        main([*(["-m", "program"] if as_module else [str(tmp_path / "program.py")]), str(tmp_path / "out"), "--a", "b"])

    run_forked(1, child)
    assert (tmp_path / "out").read_text() == "__main__ 7 ['--a', 'b'] energon_bridge.core.encoder.task_encoder"


def test_commands_trust_what_the_drop_in_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = text_dataset(tmp_path / "data", train=[3])
    meta = data / ".nv-meta"
    loader = "sample_type: {__module__: megatron.energon, __class__: TextSample}\nsample_loader: loader.py\n"
    (meta / "dataset.yaml").write_text(loader)
    (meta / "loader.py").write_text("def sample_loader(raw):\n    return {'text': raw['txt']}\n")

    def run(*arguments: str) -> Any:
        named = ["shown"] * arguments[-1].startswith("columns")

        def child(rank: int) -> Any:
            with pytest.raises(SystemExit) as ended:
                main(
                    [*arguments[:-1], "-m", "energon_bridge.tools.cli.main", *arguments[-1].split(), str(data), *named]
                )
            return ended.value.code

        return run_forked(1, child)[0]

    trust = "--trust-remote-code"
    ends = [run("lint --no-progress"), run(trust, "lint --no-progress"), run(trust, "info")]
    ends.append(run(trust, "columns add --of builtins:repr"))
    out = capfd.readouterr()
    assert (ends, "All 3 samples load" in out.out) == ([1, 0, 0, 0], True), out


def test_refused_names_are_listed_with_what_takes_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--refused"])
    listed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    names = {name: module for module, names in NAMES.items() for name in names}

    def raised() -> dict[str, str]:
        found = {}
        for name in sorted(set(listed) & set(names)):
            value = getattr(import_module(f"megatron.energon.{names[name]}".rstrip(".")), name)
            with pytest.raises(NotProvidedError) as error:
                value()
            found[name] = str(error.value)
        return found

    messages = installed(raised)
    assert len(messages) > 150
    assert {name for name, message in messages.items() if not message.endswith(f"{listed[name]}.")} == set()


@pytest.mark.parametrize("arguments", [[], ["--trust-remote-code"], ["-x"], ["missing.py"]])
def test_wrong_arguments_say_what_is_right(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"usage: python -m energon_bridge\.compat"):
        main(arguments)


# States --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_states_of_megatron_energon_are_refused_by_name(workers: int, path: Path) -> None:
    if workers:
        pytest.importorskip("numpy._core", reason="numpy 2 pickled this state: numpy 1.26.0 cannot read it")
    file = TESTS / "fixtures" / f"energon-7.4.1-state-{workers}-workers.pt"

    def attempts() -> list[str]:
        loader = get_savable_loader(get_train_dataset(path, batch_size=2, worker_config=WorkerConfig(num_workers=0)))
        state = torch.load(file, weights_only=False)
        messages = []
        for states in (state, [state]):
            with pytest.raises(StateFormatError) as caught:
                loader.restore_state_rank(states)
            messages.append(str(caught.value))
        return [*messages, str(dict(state))]

    first, second, content = installed(attempts)
    assert first == second
    assert first.startswith("this is a state of megatron-energon (SavableDataLoaderState)")
    assert "start_at=" in first
    assert content == "{}"
    assert next(iter(get_loader(get_val_dataset(path, batch_size=2)))).__key__

"""The built wheel, installed without extras, imports, runs its command and loads a dataset.

The interpreter that tries it has the wheel in a virtual environment of its own and sees the packages of this one
through a guard that lets through only what the wheel's metadata requires, directly or not. So an import of lightning or
transformers that slipped into the base package fails here, and so does a base dependency that was forgotten. It is the
wheel without compiled parts, which needs more of Python; those of the other one are imported, too.
"""

from __future__ import annotations

import email.message
import email.policy
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from paths import CONFIGS, REPOSITORY

PROGRAM = """
import sys
from importlib import metadata

site_packages, dataset = sys.argv[1:]
sys.path.append(site_packages)  # behind the wheel's own

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

allowed, waiting = set(), ["energon-bridge"]
while waiting:
    name = canonicalize_name(waiting.pop())
    if name not in allowed:
        allowed.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
for module in [name for name in sys.modules if name.split(".")[0] == "packaging"]:
    del sys.modules[module]
forbidden = {
    module
    for module, owners in metadata.packages_distributions().items()
    if not any(canonicalize_name(owner) in allowed for owner in owners)
}
assert {"pytest", "lightning", "transformers"} <= forbidden, sorted(forbidden)


class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in forbidden:
            raise ModuleNotFoundError(f"{name} is no dependency of the base package", name=name)
        return None


sys.meta_path.insert(0, Guard())
import torch

import energon_bridge
from energon_bridge import WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset

config = WorkerConfig(num_workers=0)
batch = next(iter(get_loader(get_train_dataset(dataset, batch_size=2, worker_config=config))))
assert batch.image.dtype == torch.float32 and len(batch.caption) == 2, batch
loader = get_savable_loader(get_train_dataset(dataset, batch_size=2, worker_config=WorkerConfig(num_workers=1)))
next(iter(loader))
assert loader.save_state_rank()
loader.close()
assert list(get_loader(get_val_dataset(dataset, batch_size=2, worker_config=config)))
print(energon_bridge.__file__)
"""


@pytest.fixture(scope="module", params=["compiled", "without a compiler"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Return whether the compiled parts are in the wheel, which the package can do without."""
    compiler = (sysconfig.get_config_var("CC") or "").split(" ")[0]
    if request.param == "compiled" and not shutil.which(compiler):
        pytest.skip("there is no C compiler")
    return request.param == "compiled"


def build_wheel(source: Path, folder: Path, **environment: str) -> Path:
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(REPOSITORY / "energon_bridge", source / "energon_bridge", ignore=ignored, symlinks=True)
    shutil.copytree(CONFIGS, source / "configs")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    result = subprocess.run(build, capture_output=True, text=True, env={**os.environ, **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(compiled: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    return build_wheel(source, folder, **({} if compiled else {"CC": "/bin/false"}))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-I", str(wheel)]
    result = subprocess.run(install, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_contents(wheel, compiled):
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "energon_bridge").rglob("*.py")}
    assert sources <= set(names)
    assert {"energon_bridge/py.typed", "energon_bridge/core/registry.toml"} <= set(names)
    assert {f"energon_bridge/tools/preview/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    configs = {f"energon_bridge/{path.relative_to(REPOSITORY)}" for path in (CONFIGS).rglob("*.yaml")}
    assert configs == {name for name in names if name.endswith(".yaml")}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"energon_bridge"}
    libraries = [name for name in names if name.endswith(".so")]
    parts = ["energon_bridge/core/format/_tar.abi3.so", "energon_bridge/core/samples/_pixels.abi3.so"]
    assert sorted(libraries) == (parts if compiled else [])
    assert "cp311-abi3" in wheel.name


def test_a_release_for_other_systems_and_what_an_index_shows(tmp_path):
    """The wheel without compiled parts is for any system; on its page, links lead to the repository."""
    url = "https://example.org/somebody/energon_bridge"
    (tmp_path / "source").mkdir()
    wheel = build_wheel(tmp_path / "source", tmp_path, ENERGON_BRIDGE_PURE="1", ENERGON_BRIDGE_URL=url)
    assert wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(wheel)
    assert [name for name in archive.namelist() if name.endswith(".so")] == []
    (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    metadata = email.message_from_bytes(archive.read(name), policy=email.policy.default)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"Repository, {url}" in metadata.get_all("Project-URL")
    page = metadata.get_payload()
    links = re.findall(r"\]\(([^)#]+)", page)
    ours = [link.removeprefix(f"{url}/blob/v{metadata['Version']}/") for link in links if link.startswith(url)]
    assert len(ours) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert [link for link in ours if not (REPOSITORY / link).exists()] == []
    assert page.count("](") == (REPOSITORY / "README.md").read_text().count("](")


@pytest.mark.parametrize("compiled", ["without a compiler"], indirect=True)
def test_base_install_loads_a_dataset(installed, fixtures):
    call = [
        str(installed / "bin" / "python"),
        "-I",
        "-c",
        PROGRAM,
        sysconfig.get_path("purelib"),
        str(fixtures / "captioning"),
    ]
    result = subprocess.run(call, capture_output=True, text=True, cwd=installed)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip().startswith(str(installed))


TRAINING = """
import sys
from energon_bridge.core.format import _tar
from energon_bridge.core.samples import _pixels
from energon_bridge.training.__main__ import main

copy = ["--copy-configs", "configs"]
for arguments in (["--config", "configs/tiny/qwen2.5_vl_instruct.yaml", "data.paht=x"], copy, copy):
    print(main(arguments))
"""


@pytest.mark.parametrize("compiled", ["compiled"], indirect=True)
def test_training_finds_the_configurations_of_the_package(installed, tmp_path):
    environment = {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": "/usr/bin:/bin"}
    call = [str(installed / "bin" / "python"), "-c", TRAINING]
    result = subprocess.run(call, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert result.stdout.split() == ["2", "0", "2"]
    assert "Did you mean 'data.path'?" in result.stderr
    assert "does not exist yet" in result.stderr
    names = sorted(path.relative_to(REPOSITORY) for path in (CONFIGS).rglob("*.yaml"))
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.yaml")) == names


@pytest.mark.parametrize("compiled", ["compiled"], indirect=True)
def test_command_is_installed(installed, fixtures):
    environment = {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": "/usr/bin:/bin"}
    call = [str(installed / "bin/energon-bridge"), "info", str(fixtures / "captioning")]
    result = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=installed)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "captioning" in result.stdout
    other = (installed / "bin/energon").read_text()
    assert other == Path(call[0]).read_text()

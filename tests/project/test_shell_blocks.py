"""Every shell block of the README and of docs/ runs, in a folder with the data that the pages mention.

Training on several processes or with models of the hub is a dry run here. `NOT_RUN` says what does not run, and why.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sources
from click.testing import CliRunner
from forked import run_program
from keyed import mix_document
from pages import PAGES, blocks, name_of
from paths import REPOSITORY
from previews import mix_of
from recipes import captions_dataset, crude_conversations
from test_readme import write_raw_dataset

from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.tools.cli.main import main as energon
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.training.__main__ import main as training
from energon_bridge.training.config_file import find_config
from energon_bridge.training.digits import write_digits

NOT_RUN = {
    "./scripts/": "they make environments: .ci/run runs them",
    "pip install": "installs: .ci/run does it",
    "source .venv": "the environment of the line before it",
    "python -m venv": "installs",
    "python3.12 -m venv": "installs",
    "~/megatron/bin/pip": "installs",
    "ENERGON_MEGATRON_PYTHON": "tests/trainers/test_pretrain.py",
    "git clone": "the web",
    "python3.11 -m venv": "installs",
    "~/titan/bin/pip": "installs",
    "~/beside/bin/pip": "installs",
    "ENERGON_TITAN_PYTHON": "tests/trainers/test_titan_pretrain.py",
    "ENERGON_LONG_TESTS=1": "hours",
    "python benchmarks/": "tests/project/test_benchmarks.py, with less data",
    "python -m benchmarks": "tests/project/test_benchmarks.py, with less data",
    "energon_bridge.training.assemble": "models of the hub; tests/training/test_recipes.py has small ones",
    "export ENERGON_": "a setting",
    "sbatch": "tests/training/test_launch.py, with the commands of a cluster stood in for",
}
ELSEWHERE = {"docs/start.md": "tests/project/test_docs.py", "README.md line 11": "the same in docs/start.md"}
CHAINS = REPOSITORY / "tests/suites/chains.py"
STANDS_FOR = {
    " /data/": " {here}/data/",
    " /shared/": " {here}/shared/",
    "tests/suites/chains.py --chains 7000 --processes 2": f"{CHAINS} --chains 1 --processes 1",
    "$SLURM_ARRAY_TASK_ID/16": "0/1",  # every task must have run before the last line
    "3/16": "0/1",
    "--step 5123 --world-size 8 --global-batch-size 512": "--step 5 --world-size 1 --global-batch-size 4",
    "step-0005000.ckpt": "step-0000004.ckpt",
    "--step 5123": "--step 5",
    "checkpoints/step-1000/data.json": "state.json",
    "energon bench ": "energon bench --seconds 0.2 ",
    "s3://bucket/captions": "{here}/data/captions",
}


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a block: in a console those after the prompt, elsewhere all lines that are no comments."""
    block = block.replace("\\\n", " ")
    console = block.startswith("$ ")
    for line in block.splitlines():
        if line.strip() and not line.startswith("#") and (line.startswith("$ ") or not console):
            yield from line.removeprefix("$ ").split(" && ")


def cases() -> Iterator[Any]:
    for page in PAGES:
        for line, block in blocks("(?:shell|console)", page):
            name = f"{name_of(page)} line {line}"
            if not any(name.startswith(known) for known in ELSEWHERE):
                yield pytest.param(block, id=name)


# The folder of a reader ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every dataset, file and run that the blocks name, small."""
    world = tmp_path_factory.mktemp("world")
    create_captioning_test_dataset(world / "data/captions")
    for name in ("coyo", "smoke", "llava_pretrain_558k"):
        captions_dataset(world / "data" / name, num_train=96, num_val=8)
    for name in ("llava", "conversations"):
        crude_conversations(world / "data" / name)
    mix_of(world / "data/mix.yaml", coyo=world / "data/coyo", captions=world / "data/captions")
    write_digits(world / "data/digits", train_shards=2, val_shards=1)
    flags = ["--split-parts", "train:train/.*", "--split-parts", "val:val/.*", "--sample-type", "CaptioningSample"]
    flags += ["--field-map", '{"image": "png", "caption": "txt"}', "--non-interactive"]
    run_energon(["prepare", str(world / "data/digits"), *flags])
    write_raw_dataset(world / "data/raw")
    sources.llava(world, 12)
    sources.pairs(world / "photos", 8)
    sources.tars(world / "tars", 8)
    sources.parquet(world, 32)[0].rename(world / "big.parquet")
    sources.write_pictures(world, ["a.jpg", "b.jpg", "c.jpg"])
    quiz = [{"question": "Which?", "choices": ["a", "b"], "answer": 1, "note": "The second one is right."}] * 3
    (world / "quiz.json").write_text(json.dumps(quiz))
    (world / "metadata.csv").write_text("file_name,description\n" + "".join(f"{n}.jpg,face {n}\n" for n in "abc"))
    (world / "mine.py").write_text("def count_words(sample):\n    return len(sample.caption.split())\n")
    (world / "my_project").mkdir()
    (world / "my_project/encoders.py").write_text("from previews import encoder as make_encoder\n")
    (world / "train.py").write_text(
        "import sys, megatron.energon\nassert sys.argv[1:] == ['--its', '--own', 'arguments']\n"
    )
    (world / "llava_v1_5_mix665k.json").write_text((world / "llava.json").read_text())
    (world / "blip_laion_cc_sbu_558k.json").write_text((world / "llava.json").read_text())
    (world / "config.yaml").write_text(find_config("configs/smoke.yaml").read_text())
    loader = get_savable_loader(
        get_train_dataset(world / "data/coyo", batch_size=4, worker_config=WorkerConfig(num_workers=0))
    )
    (world / "state.json").write_text(json.dumps(loader.save_state_rank()))
    assert training(["--config", "configs/smoke.yaml", f"data.path={world}/data/smoke", f"run_dir={world}/runs/x"]) == 0
    return world


@pytest.fixture
def bucket(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a dataset and a mix into a bucket on this machine."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
    moto = pytest.importorskip("moto.server", reason="moto is not installed (extra dev)")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for path in (here / "data/raw").iterdir():
        client.upload_file(str(path), "bucket", f"datasets/captions/{path.name}")
    mix = json.dumps(mix_document(train={"path": "s3://bucket/datasets/captions"}))
    client.put_object(Bucket="bucket", Key="mixes/stage1.yaml", Body=mix.encode())
    client.close()
    yield
    server.stop()


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Return a copy of the world, which is the current folder."""
    here = tmp_path / "here"
    shutil.copytree(world, here)
    shutil.copytree(here / "data/raw", here / "shared/tars")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    return here


# Running -------------------------------------------------------------------------------------------------------------


def run_energon(arguments: list[str]) -> None:
    arguments, told = (arguments[:-2], arguments[-1]) if ">" in arguments else (arguments, None)
    result = CliRunner().invoke(energon, arguments, input="\n" * 9)  # Enter takes what a question proposes
    assert result.exit_code == 0, f"energon {shlex.join(arguments)}\n{result.output}"
    if told is not None:
        Path(told).write_text(result.stdout)


def run_training(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Train two steps of a tiny model on one process, and of all else show what would run, if its model is here."""
    arguments = words[next(n for n, word in enumerate(words) if word.endswith((".yaml", "--config"))) :]
    arguments = arguments if "--config" in arguments else ["--config", *arguments]
    tiny = words[0] == "python" and "/tiny/" in arguments[1]
    short = ["train.max_steps=2", "validation.limit_batches=1"] if tiny else ["--dry-run"]
    code = training([*arguments, *short])
    assert code == 0 or "model: " in capsys.readouterr().err, shlex.join(words)  # what a dry run lacks


def run_python(words: list[str]) -> None:
    words = words[words.index("-m") if "-m" in words else 1 :]
    if str(CHAINS) in words:  # its watch of hangs needs an interpreter of its own
        result = subprocess.run([sys.executable, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    else:
        result = run_program(words, Path.cwd())
    assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("block", list(cases()))
def test_shell_block(
    block: str, here: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if "energon prepare" in block:
        shutil.rmtree(here / "data/captions")
        shutil.copytree(here / "data/raw", here / "data/captions")
    if "energon convert" in block:
        for name in ("llava", "llava_pretrain_558k"):
            shutil.rmtree(here / "data" / name)
    if "s3://" in block:
        request.getfixturevalue("bucket")
    for said, meant in STANDS_FOR.items():
        block = block.replace(said, meant.format(here=here))
    for command in commands(block):
        if any(start in command for start in NOT_RUN):
            continue
        words = shlex.split(command, comments=True)
        while re.match(r"[A-Z]+=", words[0]):
            del words[0]
        if words[0] == "energon":
            run_energon(words[1:])
        elif any(word in words for word in ("energon_bridge.training", "scripts/launch/torchrun.sh")):
            run_training(words, capsys)
        else:
            run_python(words)


def test_what_does_not_run_is_in_the_pages() -> None:
    text = "".join(case.values[0] for case in cases())
    text += (REPOSITORY / "docs/start.md").read_text()
    assert [start for start in NOT_RUN if start not in text] == []

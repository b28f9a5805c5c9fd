"""The `energon` command: flags, the assistant, exit codes, and a fast start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import fsspec
import pytest
import yaml
from commands import energon, output_of, refusal_of
from keyed import KEYS, join, keyed_dataset, shards, write_mix
from sources import picture
from tar_builder import write_tar, write_texts

from energon_bridge import __version__
from energon_bridge.core.format.dataset import open_dataset
from energon_bridge.core.order.leaf_order import ORDER_VERSION
from energon_bridge.tools.cli.main import main
from energon_bridge.tools.cli.output import format_bytes
from energon_bridge.tools.testing import write_shard

PREPARE = ["prepare", "--non-interactive", "--no-progress"]


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Return a folder with four tars of two samples (jpg, json), not prepared."""
    root = tmp_path / "data"
    for number in range(4):
        members = []
        for key in (f"{number}a", f"{number}b"):
            content = {"caption": "a long caption " * 5, "list": [1, 2, 3, 4, 5], "deep": {"key": [key]}}
            members += [(f"{key}.jpg", b"\xff\xd8 not really"), (f"{key}.json", json.dumps(content).encode())]
        write_tar(root / f"s_{number}.tar", members)
    return root


def meta(root: Path, name: str) -> dict[str, object]:
    content: dict[str, object] = yaml.safe_load((root / ".nv-meta" / name).read_text())
    return content


# --- the group ----------------------------------------------------------------------------------------------------


ALONE = """
import json, sys
import click
from energon_bridge.tools.cli.main import main
assert sys.stdin is None
results = []
for line in json.loads(sys.argv[1]):
    try:
        main(line, standalone_mode=False)
        results.append(0)
    except SystemExit as end:
        results.append(end.code)
    except (click.ClickException, click.Abort) as error:
        results.append("question" if "asks a question" in str(error) else type(error).__name__)
print("RESULTS", json.dumps(results))
"""


def test_every_command_runs_with_stdin_closed(tars: Path, tmp_path: Path):
    """None waits for an answer: a command that lacks one stops."""
    root, run = str(tars), ["--batch-size", "2", "--world-size", "1"]
    flags = ["--sample-type", "CrudeWebdataset", "--split-ratio", "1,0,0", "--num-workers", "1"]
    (tmp_path / "failed.jsonl").write_text("")
    lines: list[tuple[list[str], object]] = [
        (["prepare", root], "question"),
        (["prepare", root, *flags], 0),
        (["prepare", root, *flags], "question"),
        (["prepare-media", root, "--media-metadata-by-glob", "*.png", "--num-workers", "1"], 0),
        (["info", root], 0),
        (["lint", root], 1),  # the pictures of these tars are none
        (["columns", "add", root, "--bytes", "--num-workers", "1"], 0),
        (["columns", "list", root], 0),
        (["convert", root, str(tmp_path / "out"), "--num-workers", "1"], 0),
        (["plan", root, "--steps", "4", *run], 0),
        (["which", root, "--step", "1", *run], 0),
        (["quarantine", "show", str(tmp_path / "failed.jsonl")], 0),
        (["preview", root], 0),
        (["bench", root, "--seconds", "0.2", *run], "ClickException"),
        (["checkpoint", "info", str(tmp_path / "none.pt")], "ClickException"),
        (["analyze-debug", str(tmp_path / "none.pt"), *run[2:]], "ClickException"),
        (["mount", root, str(tmp_path / "nowhere")], "ClickException"),
    ]
    assert {line[0] for line, _ in lines} == set(main.list_commands(click.Context(main)))
    call = shlex.join([sys.executable, "-c", ALONE, json.dumps([line for line, _ in lines])])
    done = subprocess.run(f"{call} <&-", shell=True, capture_output=True, text=True, check=True, timeout=100)
    found = json.loads(done.stdout.rpartition("RESULTS ")[2])
    assert list(zip(found, [line for line, _ in lines], strict=True)) == [(end, line) for line, end in lines]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("energon prev", "plain,preview"),
        ("energon preview --wor", "plain,--world-size"),
        ("energon info da", "file,da"),
    ],
)
def test_the_shell_completes(words: str, completed: str):
    given = {"_ENERGON_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    call = [sys.executable, "-c", "from energon_bridge.tools.cli.main import main; main(prog_name='energon')"]
    result = subprocess.run(call, env=os.environ | given, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [completed]


def test_version_and_help():
    assert energon("--version").output == (
        f"energon (energon_bridge), version {__version__}, order version {ORDER_VERSION}\n"
    )
    for arguments in ([], ["-h"], ["--help"]):
        output = energon(*arguments).output
        assert all(command in output for command in ("info", "lint", "prepare"))
    for command in ("info", "lint", "prepare"):
        output_of(command, "-h")


STARTS = """
import sys
from energon_bridge.tools.cli.main import main
for line in ("--version", "--help", "prepare --help", "info --help", "convert --help"):
    main(line.split(), standalone_mode=False)
    print("imported by", line, sorted({"torch", "lightning", "transformers", "PIL"} & set(sys.modules)))
"""


def test_the_command_starts_without_torch():
    result = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True)
    assert [line.partition("[")[2] for line in result.stdout.splitlines() if "imported by" in line] == ["]"] * 5


@pytest.mark.parametrize("command", ["prepare", "info", "lint"])
def test_errors_are_one_message_and_exit_code_1(tmp_path: Path, command: str):
    output = refusal_of(command, tmp_path / "nowhere")
    assert output == f"Error: {tmp_path / 'nowhere'}: no such folder. Check the path.\n"
    assert isinstance(energon("--debug", command, tmp_path / "nowhere").exception, FileNotFoundError)


# --- prepare with flags -------------------------------------------------------------------------------------------


def test_prepare_names_parts_that_only_case_tells_apart(tmp_path: Path):
    write_shard(tmp_path / "0.tar", {"a": {"jpg": picture(1), "txt": b"a"}, "b": {"JPG": picture(2), "txt": b"b"}})
    flags = ["--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"]
    output = output_of(*PREPARE, tmp_path, *flags, "--field-map", '{"image": "jpg,JPG", "caption": "txt"}')
    assert "Warning: JPG and jpg are different parts: name all of them in field maps and cookers." in output
    assert output_of("lint", tmp_path).endswith("All 2 samples load.\n")


def test_prepare_from_flags_alone(tars: Path):
    flags = ["--split-ratio", "2,1,1", "--sample-type", "CaptioningSample", "--num-workers", 2]
    output = output_of(*PREPARE, tars, *flags, "--field-map", '{"image": "jpg,png", "caption": "json[caption]"}')
    assert "Found 4 tar files; the first is s_0.tar, the last is s_3.tar." in output
    assert "train: 4 samples in 2 shards" in output
    assert output.endswith("Found the part types jpg, json.\nDone: 8 samples in 4 shards.\n")
    assert meta(tars, "dataset.yaml") == {
        "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
        "field_map": {"image": "jpg,png", "caption": "json[caption]"},
    }
    assert meta(tars, "split.yaml") == {
        "split_parts": {"train": ["s_{0..1}.tar"], "val": ["s_2.tar"], "test": ["s_3.tar"]},
        "exclude": [],
    }
    assert open_dataset(tars, split_part="train").num_samples == 4


def test_prepare_by_patterns_with_other_options(tars: Path):
    arguments = ["--split-parts", "train:s_[01]", "--split-parts", "held out:s_3", "--exclude", "s_2"]
    arguments += ["--no-key-index", "--sample-type", "CrudeWebdataset", "--dataset-yaml-name", "crude.yaml"]
    output_of(*PREPARE, tars, *arguments)
    assert meta(tars, "split.yaml")["split_parts"] == {"train": ["s_{0..1}.tar"], "held out": ["s_3.tar"]}
    assert meta(tars, "crude.yaml") == {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    assert not (tars / ".nv-meta/dataset.yaml").exists()
    assert not (tars / ".nv-meta/index.sqlite").exists()
    assert not (tars / "s_2.tar.idx").exists()


def test_prepare_twice_needs_force_or_a_yes(tars: Path):
    refusal_of(*PREPARE, tars, "--tar-index-only")  # there is no .info.json to follow
    output_of(*PREPARE, tars, "--split-ratio", "1,0,0")
    (tars / "s_1.tar.idx").unlink()
    result = energon(*PREPARE, tars, "--tar-index-only")
    assert (result.exit_code, result.output) == (0, "Indexed 8 samples in 4 shards.\n")
    assert (tars / "s_1.tar.idx").exists()
    assert "already prepared. Use --force-overwrite" in refusal_of(*PREPARE, tars, "--split-ratio", "0,1,0")
    refusal_of("prepare", tars, "--split-ratio", "0,1,0", "--skip-dataset-yaml", answers="n\n")
    assert meta(tars, "split.yaml")["split_parts"] == {"train": ["s_{0..3}.tar"], "val": [], "test": []}
    output_of("prepare", tars, "--split-ratio", "0,1,0", "--skip-dataset-yaml", answers="y\n")
    assert meta(tars, "split.yaml")["split_parts"] == {"train": [], "val": ["s_{0..3}.tar"], "test": []}
    (tars / ".nv-meta/.info.json").write_text("{")  # damaged
    refusal_of(*PREPARE, tars, "--split-ratio", "1,0,0")
    output_of(*PREPARE, tars, "--split-ratio", "0,0,1", "--force-overwrite")
    assert meta(tars, "split.yaml")["split_parts"] == {"train": [], "val": [], "test": ["s_{0..3}.tar"]}
    assert json.loads((tars / ".nv-meta/.info.json").read_text())["shard_counts"]["s_0.tar"] == 2


def test_a_folder_of_prepared_datasets_is_not_made_one_dataset_of(tmp_path: Path):
    for name in "ab":
        write_tar(tmp_path / f"all/{name}/0.tar", [(f"{name}.txt", b"a caption")])
        output_of(*PREPARE, tmp_path / "all" / name, "--split-ratio", "1,0,0")
    mix = "a, b in it are prepared datasets. Give one of them, or a mix, a file mix.yaml beside them: `splits: "
    mix += "{train: {datasets: [{path: a}, {path: b}]}}`"
    for command in (["info"], ["lint"], ["preview"], [*PREPARE, "--split-ratio", "1,0,0"]):
        result = energon(*command, tmp_path / "all")
        assert (result.exit_code, mix in result.output) == (1, True), result.output
    assert not (tmp_path / "all/.nv-meta").exists()
    output_of(*PREPARE, tmp_path / "all", "--split-ratio", "1,0,0", "--force-overwrite")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--non-interactive needs --split-ratio or --split-parts"),
        (["--split-ratio", "1,2"], "expected three numbers"),
        (["--split-ratio", "1,0,0", "--split-parts", "train:x"], "exclude each other"),
        (["--split-ratio", "1,0,0", "--field-map", "{}"], "--field-map needs --sample-type"),
        (["--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"], "needs a field map"),
        (["--split-ratio", "1,0,0", "--sample-type", "Captioning"], "CaptioningSample"),
        (["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", "{text: txt}"], "not valid JSON"),
        (["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '["txt"]'], "expected an object"),
        (
            ["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"txet": "txt"}'],
            "Did you mean 'text'",
        ),
        (["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--skip-dataset-yaml"], "exclude each other"),
    ],
)
def test_senseless_flags_are_refused_before_anything_is_written(tars: Path, arguments: list[str], message: str):
    output = refusal_of(*PREPARE, tars, *arguments)
    assert output.splitlines()[-1].startswith("Error: ")
    assert message in output
    assert sorted(path.name for path in tars.iterdir()) == [f"s_{number}.tar" for number in range(4)]


def test_defect_20_a_corrupt_tar_is_named_and_leaves_nothing_behind(tars: Path):
    for content, workers in ((b"", 1), (b"PK\x03\x04" * 300, 2)):
        (tars / "s_2.tar").write_bytes(content)
        output = refusal_of(*PREPARE, tars, "--split-ratio", "1,0,0", "--num-workers", workers)
        assert output.splitlines()[-1].startswith(f"Error: {tars}/s_2.tar: ")
        assert "at byte 0" in output
        assert sorted(path.name for path in tars.iterdir()) == [f"s_{number}.tar" for number in range(4)]
    output_of(*PREPARE, tars, "--split-ratio", "1,0,0", "--exclude", "s_2")


# --- the assistant ------------------------------------------------------------------------------------------------


def test_the_assistant_asks_ratio_class_and_fields(tars: Path):
    first = energon("prepare", tars, "--no-progress", answers="1,0,0\ny\n")
    number = next(line.split()[0] for line in first.output.splitlines() if line.strip().endswith("CaptioningSample"))
    answers = ["nonsense", "2,1,1", "y", "99", number]
    # The fields come in the order of the class: image, caption.
    answers += ["json[caption", "png", "json[captoin]", "jpg,png", "jpg", "json[caption]"]
    output = output_of("prepare", tars, "--no-progress", answers="\n".join(answers) + "\n")
    assert "expected three numbers" in output
    assert "Sample '0a' of s_0.tar has the parts jpg, json." in output
    assert '"caption": "a long caption a long cap..."' in output
    assert "Part types in the first shard: jpg, json" in output
    assert "cannot read the access 'json[caption'" in output
    assert "field `image`: nothing at 'png' in the first 2 samples of the first shard. They have the parts" in output
    assert "field `image`: nothing at 'json[captoin]'" in output
    assert "field `caption`: CaptioningSample declares it as str, but the part `jpg` is" in output
    assert meta(tars, "dataset.yaml")["field_map"] == {"image": "jpg,png", "caption": "json[caption]"}
    parts = {"train": ["s_{0..1}.tar"], "val": ["s_2.tar"], "test": ["s_3.tar"]}
    assert meta(tars, "split.yaml")["split_parts"] == parts


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([{"jpg", "txt", "json"}], {"image": "jpg", "caption": "txt"}),
        ([{"jpg", "txt"}, {"png", "txt"}], {"image": "jpg,png", "caption": "txt"}),
        ([{"jpg", "cls"}], {"image": "jpg", "label": "cls"}),
        ([{"mp4", "txt"}], {"video": "mp4", "context": "txt"}),
        ([{"jpg", "json"}], None),
        ([{"jpg", "mask.png", "txt"}], None),
    ],
)
def test_enter_gives_the_type_that_the_parts_fit(
    tmp_path: Path, samples: list[set[str]], expected: dict[str, str] | None
):
    write_shard(tmp_path / "0.tar", {f"{n}": dict.fromkeys(sorted(samples[n % len(samples)]), b"1") for n in range(4)})
    output = output_of("prepare", tmp_path, "--no-progress", "--split-ratio", "1,0,0", answers="\n" * 9)
    assert re.search(r"Number of the sample type \[\d+\]:", output)
    written = meta(tmp_path, "dataset.yaml")
    assert written.get("field_map") == expected
    assert (written.get("__class__") == "CrudeWebdataset") == (expected is None)


def test_other_parts_that_fit_are_named(tmp_path: Path):
    pictures = {f"{side}.jpg": picture(0) for side in ("left", "right", "mask")}
    write_shard(tmp_path / "0.tar", {f"{n}": {"txt": b"a caption", **pictures} for n in range(3)})
    flags = ["--no-progress", "--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"]
    output = output_of("prepare", tmp_path, *flags, answers="right.jpg\n\n")
    assert "image (torch.Tensor; mask.jpg, right.jpg would fit, too) [left.jpg]:" in output
    assert meta(tmp_path, "dataset.yaml")["field_map"] == {"image": "right.jpg", "caption": "txt"}


def test_the_assistant_asks_only_for_what_is_left_open(tars: Path):
    flags = ["--split-ratio", "1,0,0", "--sample-type", "ImageClassificationSample"]
    output_of("prepare", tars, *flags, answers="jpg\n\njson[deep][key][0]\n")
    assert meta(tars, "dataset.yaml")["field_map"] == {"image": "jpg", "label_name": "json[deep][key][0]"}


def test_the_assistant_leaves_dataset_yaml_out_or_makes_it_crude(tars: Path):
    assert "Write " in output_of("prepare", tars, answers="1,0,0\nn\n")
    assert not (tars / ".nv-meta/dataset.yaml").exists()
    number = next(
        line.split()[0]
        for line in energon("prepare", tars, answers="y\n1,0,0\ny\n").output.splitlines()
        if "CrudeWebdataset" in line
    )
    output_of("prepare", tars, answers=f"y\n1,0,0\ny\n{number}\n")
    assert meta(tars, "dataset.yaml")["__class__"] == "CrudeWebdataset"


def test_an_assistant_that_gets_no_answer_writes_nothing(tars: Path):
    output = refusal_of("prepare", tars, answers="1,0,0\n")
    assert "no terminal to answer it. Answer with options: --split-ratio 8,1,1, then --sample-type" in output
    assert sorted(path.name for path in tars.iterdir()) == [f"s_{number}.tar" for number in range(4)]


# --- info ---------------------------------------------------------------------------------------------------------


def test_info_shows_the_numbers(fixtures: Path):
    output = output_of("info", fixtures / "captioning")
    words = [line.split() for line in output.replace("│", " ").splitlines()]
    sized = format_bytes(sum(path.stat().st_size for path in (fixtures / "captioning").rglob("*.tar"))).split()
    for expected in (
        ["holds:", "24", "samples", "in", "4", "shards,", *sized],
        ["sample", "type:", "megatron.energon.CaptioningSample"],
        ["field:", "caption", "=", "json[caption]"],
        ["prepared", "by:", "energon", "7.4.1"],
        ["train", "12", "50.0%", "2", "0"],
        ["val", "6", "25.0%", "1", "0"],
    ):
        assert expected in words, output


def test_info_of_a_mix_counts_what_runs_have(tmp_path: Path):
    keyed_dataset(tmp_path / "a", train=shards(KEYS, 12, 8))
    keyed_dataset(tmp_path / "b", train=shards(KEYS[5:], 15))
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n' * 7)
    joiner = {"__module__": "theirs", "__function__": "joiner"}  # nobody imports it to count
    blend = [
        join({}, {"nonmatch": "skip"}, joiner=joiner, weight=1),
        {"path": "./a", "subset": {"range": ["0%", "80%"]}, "weight": 2},
        {"path": "./c.jsonl", "weight": 1},
    ]
    mix = write_mix(tmp_path / "mix.yaml", train={"blend": blend})
    output = output_of("info", mix)
    assert output.startswith(f"train: {15 + 16 + 7} samples\n")
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines()]
    assert [cells[3:5] for cells in rows if cells[1:] and cells[1].startswith(str(tmp_path)) and len(cells) == 6] == [
        ["20", "15"],
        ["15", "-"],
        ["20", "16"],
        ["7", "7"],
    ]
    leaves = json.loads(output_of("info", mix, "--json"))["splits"]["train"]
    assert [leaf["in_mix"] for leaf in leaves] == [15, None, 16, 7]
    plan = json.loads(output_of("plan", mix, "--steps", 1, "--batch-size", 1, "--json"))
    assert [leaf["num_samples"] for leaf in plan["leaves"]] == [15, 16, 7]
    write_mix(mix, train={"blend": [*blend, {"path": "./a", "subset": {"range": [0, 0]}, "weight": 1}]})
    assert output_of("info", mix).startswith("train: cannot be opened\n")


def test_defect_15_info_works_for_crude_and_legacy_datasets(fixtures: Path):
    assert "megatron.energon.CrudeWebdataset" in energon("info", fixtures / "crude").output
    legacy = fixtures / "vqa"
    (legacy / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: VQAWebdataset\nfield_map: {image: image.png, context: 'json[q]'}\n"
    )
    assert "megatron.energon.VQAWebdataset" in output_of("info", legacy)
    (legacy / ".nv-meta/dataset.yaml").unlink()
    assert "none (no dataset.yaml)" in energon("info", legacy).output


# --- lint ---------------------------------------------------------------------------------------------------------


def test_defect_15_lint_fails_on_a_broken_image_and_names_it(fixtures: Path):
    tar = fixtures / "captioning/parts/shard_002.tar"
    data = bytearray(tar.read_bytes())
    data[512:600] = bytes(88)  # the start of the JPEG of 00012
    tar.write_bytes(data)
    output = refusal_of("lint", fixtures / "captioning", "--no-progress")
    assert (
        f"{fixtures / 'captioning'}, val: shard 'parts/shard_002.tar', key '00012', part 'jpg': DecodeError" in output
    )
    assert output.endswith("Failed: 1 problem in 24 samples.\n")
    output_of("lint", fixtures / "captioning", "--no-progress", "--split-parts", "train,test")


def test_lint_of_an_undecodable_shard_continues_with_the_others(tmp_path: Path):
    root = write_texts(tmp_path, {f"{n}.tar": [f"{n}a", f"{n}b"] for n in range(3)})
    arguments = ["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    output_of(*PREPARE, root, *arguments)
    (root / "1.tar.idx").write_bytes(b"12345678")
    write_tar(root / "2.tar", [("2a.txt", b"\xff\xfe"), ("2b.txt", b"fine")])
    output = refusal_of("lint", root, "--no-progress", "--parallel", 2)
    assert "shard '1.tar': CorruptShardError" in output
    assert "shard '2.tar', key '2a', part 'txt': DecodeError" in output
    assert "The split part 'val' is empty." in output
    assert output.endswith("Failed: 2 problems; 4 of 6 samples could be checked.\n")


def test_lint_asks_for_trust(fixtures: Path):
    root = fixtures / "captioning"
    (root / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\nsample_loader: loader.py\n"
    )
    (root / ".nv-meta/loader.py").write_text(
        "def sample_loader(raw):\n    return {'image': raw['jpg'], 'caption': raw['txt']}\n"
    )
    assert "trust_remote_code=True" in refusal_of("lint", root, "--no-progress")
    output_of("lint", root, "--no-progress", "--trust-remote-code")


def test_temporary_files_of_a_dataset_behind_a_url_go_where_it_is_said(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[Path] = []
    here, make = tmp_path / "scratch", tempfile.mkdtemp
    here.mkdir()

    def recorded(*arguments: object, **settings: object) -> str:
        made.append(Path(make(*arguments, **settings)))  # type: ignore[call-overload]
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", recorded)
    memory = fsspec.filesystem("memory")
    memory.put(str(tars), "/scratched", recursive=True)
    flags = ["--sample-type", "CrudeWebdataset", "--split-ratio", "1,0,0", "--num-workers", "1"]
    output_of("prepare", "memory://scratched", *flags, "--tmp-path", here)
    assert made
    assert {folder.parent for folder in made} == {here}
    assert list(here.iterdir()) == []
    assert tempfile.gettempdir() != str(here)
    memory.rm("/scratched", recursive=True)
    assert "Invalid value for '--tmp-path'" in energon("prepare-media", tars, "--tmp-path", tmp_path / "none").output


def leaves(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from leaves(found, *names, name)
    else:
        yield " ".join(names), command


@pytest.mark.parametrize(("name", "command"), list(leaves(main, "energon")), ids=lambda value: str(value)[:30])
def test_every_help_text_has_an_example(name: str, command: click.Command) -> None:
    assert re.search(rf"^ *(Example:  )?{name} \S", command.help or "", re.MULTILINE), name

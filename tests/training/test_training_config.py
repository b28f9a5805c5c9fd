"""The configuration of a run: what is read, how values are converted, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import CONFIGS

from energon_bridge.core.errors import ConfigurationError, UnknownArgumentError
from energon_bridge.training.config import CheckpointConfig, DataConfig, RunConfig
from energon_bridge.training.config_file import dump_config, load_config, write_config

RECIPES = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("tiny/*.yaml")])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_the_configurations_in_the_repository_are_valid(path: Path) -> None:
    assert load_config(path) != RunConfig()


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("0.5", 0.5), ("2", 2.0)])
@pytest.mark.parametrize("source", ["file", "override"])
def test_a_learning_rate_is_a_number_however_it_is_written(
    tmp_path: Path, text: str, value: float, source: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"optimizer: {{lr: {text}}}" if source == "file" else "")
    lr = load_config(path, [] if source == "file" else [f"optimizer.lr={text}"]).optimizer.lr
    assert (lr, type(lr)) == (value, float)


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\ndata: {path: a, num_lanes: 3}\ncheckpoint:\n")
    config = load_config(path, ["data.path=123", "seed=2", "seed=3", "data.num_lanes=null", "data.shuffle_images=true"])
    assert config.seed == 3
    assert config.data == DataConfig(path="123", settings={"num_lanes": None}, shuffle_images=True)
    assert config.checkpoint == CheckpointConfig()


def test_values_may_contain_an_equals_sign_and_large_integers_stay_exact() -> None:
    assert load_config(None, ["data.path=s3://bucket?a=b"]).data.path == "s3://bucket?a=b"
    assert load_config(None, [f"seed={2**60 + 1}"]).seed == 2**60 + 1


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimizer.lrr=1", "optimizer.lr"),
        ("optimzer.lr=1", "optimizer"),
        ("num_workers=2", "data.num_workers"),
        ("run_dri=x", "run_dir"),
        (
            "validation.path=x",
            "data.path'. Validation reads its split part `val`; a mix has other data under splits: val",
        ),
        ("optimizer.max_steps=3", "train.max_steps"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_match(override: str, nearest: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"Did you mean '{nearest}"):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("data.micro_batch_size=1.5", "data.micro_batch_size must be int, got 1.5"),
        ("data.micro_batch_size=many", "must be int, got 'many'"),
        ("seed=true", "seed must be int, got True"),
        ("optimizer.lr=fast", "optimizer.lr must be float, got 'fast'"),
        ("optimizer.lr=null", "optimizer.lr must be float, got None"),
        ("data.shuffle_images=1", "data.shuffle_images must be bool, got 1"),
        ("data.ban_dataset=x", "data.ban_dataset=x limits data.ban, which is not set: name a file of keys"),
        ("data.num_lanes=[1]", "data.num_lanes must be int or null"),
        ("data=3", "data is a section"),
        ("seed", "must have the form section.key=value"),
        ("data.path.x=3", "is a value, not a section"),
        ("train.max_steps={", "not valid YAML"),
        ("data.micro_batch_size=0", "data.micro_batch_size must be at least 1"),
        ("data.global_batch_size=33", "not a multiple of data.micro_batch_size=32"),
        ("optimizer.lr=0", r"optimizer.lr must be a number above 0, got 0\.0"),
        ("optimizer.lr=-1e-3", r"optimizer.lr must be a number above 0, got -0\.001"),
        ("optimizer.lr=.inf", "optimizer.lr must be a number above 0, got inf"),
        ("optimizer.lr=.nan", "optimizer.lr must be a number above 0, got nan"),
        ("optimizer.min_lr=1.0", r"optimizer.min_lr must be between 0 and optimizer.lr=0\.\d+, got 1\.0"),
        ("optimizer.min_lr=-1e-9", "optimizer.min_lr must be between 0 and"),
        ("optimizer.warmup_steps=-1", "optimizer.warmup_steps must be at least 0, got -1"),
        ("optimizer.clip_norm=.nan", "optimizer.clip_norm must be at least 0, got nan"),
        ("optimizer.beta2=1.0", r"optimizer.beta2 must be at least 0 and below 1, got 1\.0"),
        ("data.balance=ranks", "data.balance must be 'none' or 'global_batch', got 'ranks'"),
        ("data.balance_patches=-1.0", "data.balance_patches must be at least 0, got -1"),
        ("data.balance_attention=0.1", "0.1 is a cost of batches, but nothing is balanced: set data.balance=glob"),
        ("run_dir=s3://lake/runs", "run_dir=s3://lake/runs: a run is written to a folder"),
        ("data.packing_buffer_size=0", "data.packing_buffer_size must be at least 1, got 0"),
        ("data.packing_buffer_size=some", "data.packing_buffer_size must be int or null, got 'some'"),
        (
            "data.packing_max_samples=4",
            "packing_max_samples=4 limits packs, but nothing is packed: set data.packing_bu",
        ),
        ("data.packing_max_images=4", "data.packing_max_images=4 limits packs, but nothing is packed"),
        ("data.packing_max_images=-1", "data.packing_max_images must be at least 1, got -1"),
        ("model.init=maybe", "'pretrained' or 'random', got 'maybe'"),
        ("model.freeze=lm_head", "model.freeze must be a list of strings, got 'lm_head'"),
        ("model.freeze=[1]", r"model.freeze must be a list of strings, got \[1\]"),
        ("data.max_pixels=0", "data.max_pixels must be at least 1, got 0"),
        ("data.max_num_images=0", "data.max_num_images must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_refused(override: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load_config(None, ["data.path=x", override])


def test_all_that_is_wrong_is_named_at_once_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("data: {path: x, micro_batch_size: some, seq_lenght: 4}\noptimizer: {lr: 0}\n")
    with pytest.raises(ConfigurationError) as caught:
        load_config(path, ["train.max_steps=0", "model.freeze=lm", "seed", "data.num_lanse=3"])
    assert str(caught.value).split("\n") == [
        "override 'seed' must have the form section.key=value",
        f"{path}: data.micro_batch_size must be int, got 'some' (str)",
        f"{path}: there is no configuration key 'data.seq_lenght'. Did you mean 'data.seq_length'?",
        "override data.num_lanse=3: there is no configuration key 'data.num_lanse'. Did you mean 'data.num_lanes'?",
        "override model.freeze=lm: model.freeze must be a list of strings, got 'lm' (str)",
        "train.max_steps must be at least 1, got 0",
        "optimizer.lr must be a number above 0, got 0.0",
    ]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["data.shuffle_images=true", "data.micro_batch_size=1"], "micro_batch_size of at least 2"),
        (["data.shuffle_images=true", "data.packing_buffer_size=100"], "cannot exchange the images of packs.*=null"),
        (["data.min_pixels=900", "data.max_pixels=800"], r"data\.min_pixels=900 is more than data\.max"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load_config(None, overrides)


@pytest.mark.parametrize(("text", "parts"), [("[a.b, 'c.*']", ("a.b", "c.*")), ("[]", ()), ("null", ())])
@pytest.mark.parametrize("source", ["file", "override"])
def test_lists_are_read_and_written(tmp_path: Path, text: str, parts: tuple[str, ...], source: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{freeze: {text}}}" if source == "file" else "")
    config = load_config(path, [] if source == "file" else [f"model.freeze={text}"])
    assert config.model.freeze == parts
    write_config(config, path)
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("- a", "must be a mapping of sections"),
        ("a: [", "not valid YAML"),
        ("data:\n\tpath: x", "use spaces$"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=complaint):
        load_config(path)


def test_a_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, ["optimizer.lr=1e-5", "data.num_lanes=48", "model.name_or_path=a/b", "run_dir=x y"])
    write_config(config, tmp_path / "run" / "config.yaml")
    assert load_config(tmp_path / "run" / "config.yaml") == config
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    assert "lr: 1.0e-05" in dump_config(config)


def test_gradients_are_accumulated_up_to_the_global_batch() -> None:
    config = RunConfig(data=DataConfig(micro_batch_size=4, global_batch_size=32))
    assert [config.accumulate(ranks) for ranks in (1, 2, 8)] == [8, 4, 1]
    with pytest.raises(ConfigurationError, match=r"cannot be divided between 3 data-parallel ranks.*multiple of 96"):
        RunConfig().accumulate(3)

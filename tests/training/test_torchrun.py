"""The training script under a real torchrun; everything else about several processes is tested without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import import_for_training, run_program
from paths import REPOSITORY

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from run_outputs import read_losses, read_predictions

from energon_bridge.tools.testing import create_captioning_test_dataset


@pytest.mark.slow
def test_two_processes_of_torchrun_train_and_validate_as_one(tmp_path: Path) -> None:
    import_for_training()
    dataset = create_captioning_test_dataset(tmp_path / "data", num_train=12, num_val=5)
    script = [str(REPOSITORY / "scripts" / "pretrain_vlm.py"), "--config", "configs/smoke.yaml"]  # the package's
    script += [f"data.path={dataset}", "train.max_steps=2", "data.num_workers=1"]
    one = run_program([*script, f"run_dir={tmp_path / 'one'}"], tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--start-method=fork", "--run-path"]  # what is imported here need not be imported in its processes
    two = run_program([*torchrun, *script, f"run_dir={tmp_path / 'two'}"], tmp_path)
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout
    assert two.stdout.startswith("validation samples read: ")
    losses = {name: read_losses(tmp_path / name) for name in ("one", "two")}
    assert list(losses["two"]) == [1, 2]
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4)
    keys = [[p.key for p in read_predictions(tmp_path / name)] for name in ("one", "two")]
    assert keys[0] == keys[1] == [f"val-{number:05d}" for number in range(5)]

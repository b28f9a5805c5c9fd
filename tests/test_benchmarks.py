"""The benchmarks run: every part once, over little data, with this package alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def test_every_part_runs(tmp_path):
    results = tmp_path / "results.json"
    options = "--systems ours --points text/raw --workers 0 --seconds 0.1 --warmup 0 --repetitions 1 --consumed 3"
    sizes = [
        "--scale",
        "0",
        "--batch-size",
        "4",
        "--datasets",
        "1",
        "3",
        "--cache",
        str(tmp_path / "cache"),
        "--json",
        str(results),
    ]
    call = [sys.executable, str(REPOSITORY / "benchmarks" / "run.py"), *options.split(), *sizes]
    result = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr

    measured = json.loads(results.read_text())
    assert [(m["kind"], m["mode"]) for m in measured["throughput"]] == [("text", "raw")]
    assert all(m["samples_per_s"] > 0 and m["cpu_us_per_sample"] > 0 for m in measured["throughput"])
    assert all(m["exact"] and m["state_bytes"] > 0 for m in measured["checkpoint"])
    assert [m["samples"] for m in measured["prepare"]] == [64]
    assert [m["start"] for m in measured["mixes"]] == ["first", "later"] * 2
    assert {m["datasets"] for m in measured["mixes"]} == {1, 3}
    assert all(m["first_batch_s"] > 0 and m["open_files"] > 0 and m["state_bytes"] > 0 for m in measured["mixes"])
    assert all(m["exact"] == m["frames"] and m["uniform_frames_per_s"] > 0 for m in measured["video"])
    for title in (
        "best number of workers",
        "Throughput",
        "Save and restore",
        "`energon prepare`",
        "Mixes",
        "Frames of videos",
    ):
        assert title in result.stdout
    assert str(tmp_path) not in result.stdout  # the tables go into docs/: no paths of the machine

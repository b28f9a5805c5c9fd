"""Metrics for Prometheus: what its own parser reads is what the loader says."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra prometheus)")

from prometheus_client.parser import text_string_to_metric_families

from energon_bridge import (
    Blender,
    DefaultTaskEncoder,
    EnergonDataloader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.trainers.prometheus import PrometheusExporter


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[EnergonDataloader]:
    paths = [create_captioning_test_dataset(tmp_path / name, num_train=24, num_val=0) for name in ("one", "two")]
    train = get_train_dataset(
        Blender([(str(path), 0.5) for path in paths]),
        batch_size=2,
        shuffle_buffer_size=10,
        max_samples_per_sequence=10,
        task_encoder=DefaultTaskEncoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    loader = EnergonDataloader(get_savable_loader(train))
    yield loader
    loader.close()


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return values by name and labels."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert {family.type for family in families} <= {"counter", "gauge"}
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def asked(exporter: PrometheusExporter) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_reads_what_the_loader_says(loader: EnergonDataloader) -> None:
    exporter = PrometheusExporter(port=0, labels={"rank": "3"})
    assert exporter.port is None
    for _ in range(10):
        next(loader)
    said = loader.metrics()
    exporter.update(said)
    found = read(asked(exporter))
    rank = ("rank", "3")
    assert found["energon_samples_total", (rank,)] == 20
    assert found["energon_epochs", (rank,)] == pytest.approx(20 / 48)
    each = [found["energon_dataset_samples_total", (("dataset", name), rank)] for name in ("one", "two")]
    assert each == [said["samples/one"], said["samples/two"]]
    assert found["energon_wait_seconds_total", (rank,)] == said["wait_seconds"] > 0
    assert len(found) == len(said) + 1  # and when it was said
    next(loader)
    assert read(asked(exporter)) == found  # until the loop says more
    exporter.update(loader.metrics())
    assert read(asked(exporter))["energon_samples_total", (rank,)] == 22
    port = exporter.port
    exporter.close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):  # noqa: PT011
        pass


def test_a_text_file_has_the_same(loader: EnergonDataloader, tmp_path: Path) -> None:
    folder = tmp_path / "collected"
    folder.mkdir()
    exporter = PrometheusExporter(textfile=folder / "energon.prom")
    next(loader)
    exporter.update(loader.metrics())
    text = (folder / "energon.prom").read_text()
    assert read(text)["energon_samples_total", ()] == 2
    assert "# HELP energon_samples_total Samples delivered.\n# TYPE energon_samples_total counter\n" in text
    assert [path.name for path in folder.iterdir()] == ["energon.prom"]


def test_names_from_the_data_stay_values(tmp_path: Path) -> None:
    exporter = PrometheusExporter(textfile=tmp_path / "x.prom")
    name = 'a"} 1\nevil{x="\\'
    exporter.update({f"samples/{name}": 4.0, "balance-step": 1.5})
    found = read((tmp_path / "x.prom").read_text())
    assert found.pop(("energon_last_update_timestamp_seconds", ())) > 0
    assert found == {("energon_dataset_samples_total", (("dataset", name),)): 4.0, ("energon_balance_step", ()): 1.5}


def test_an_alert_can_notice_a_loop_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1_700_000_000.0, 1_700_000_060.0])
    monkeypatch.setattr("energon_bridge.trainers.prometheus.time", SimpleNamespace(time=lambda: next(now)))
    exporter = PrometheusExporter(port=0)
    exporter.update({"batches": 1.0})
    updated = ("energon_last_update_timestamp_seconds", ())
    assert [read(asked(exporter))[updated] for _ in range(2)] == [1_700_000_000.0] * 2  # whenever it is asked
    exporter.update({"batches": 1.0})
    assert read(asked(exporter))[updated] == 1_700_000_060.0
    exporter.close()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="set a port"):
        PrometheusExporter()
    with pytest.raises(ConfigurationError, match=r"must end in \.prom"):
        PrometheusExporter(textfile=tmp_path / "metrics.txt")
    for label in ("dataset", "a-b", "__x"):
        with pytest.raises(ConfigurationError, match=f"'{label}' cannot be a label"):
            PrometheusExporter(port=0, labels={label: "x"})
    with pytest.raises(ConfigurationError, match="cannot write"):
        PrometheusExporter(textfile=tmp_path / "none" / "x.prom").update({})
    first = PrometheusExporter(port=0)
    first.update({})
    assert first.port is not None
    with pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*port=0 takes a free one"):
        PrometheusExporter(port=first.port).update({})
    first.close()

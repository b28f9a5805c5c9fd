"""What a loader did so far, for Prometheus: over HTTP, or as a text file for the collector of the node exporter.

The numbers are those of `EnergonDataloader.metrics()`, which the training loop hands over now and then; whoever asks
gets the last ones, and never touches the loader, which only the thread of the loop may. They are of one rank, and stay
behind while the loop waits: retries are counted with the microbatch that needed them. An alert on
`time() - energon_last_update_timestamp_seconds` notices a loop that waits, for whatever reason. Names are `energon_…`,
with `_total` for what only grows:

    energon_samples_total{rank="0"} 51200.0                             `samples`
    energon_dataset_samples_total{dataset="captions",rank="0"} 25600.0  `samples/captions`, of a mix
    energon_epochs{rank="0"} 1.7                                        `epochs`

What only grows begins again, or jumps, if a run is resumed; Prometheus knows how to count that.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energon_bridge.core.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_GROWING = {
    "samples": "Samples delivered.",
    "skipped": "Samples left out by SkipSample.",
    "errors": "Samples left out because they failed.",
    "excluded": "Samples left out because exclude lists them.",
    "bytes": "Bytes of the samples drawn.",
    "dropped": "Samples left out as too long.",
    "truncated": "Samples cut off as too long.",
    "split": "Samples split as too long.",
    "pieces": "Samples that split ones have become.",
    "draws": "Samples drawn, whatever became of them.",
    "batches": "Microbatches delivered.",
    "wait_seconds": "Time that the training loop waited for microbatches.",
    "make_seconds": "Time that all processes took to make microbatches.",
    "load_seconds": "Part of it: waiting for samples to be read and decoded.",
    "encode_seconds": "Part of it: hooks of the task encoder.",
    "batch_seconds": "Part of it: batching.",
    "worker_restarts": "Worker processes that were lost and started again.",
    "requests": "Requests to servers.",
    "request_retries": "Requests that were sent again.",
    "request_hedges": "Second requests for slow answers.",
    "request_bytes": "Bytes that servers have sent.",
    "request_seconds": "Time that reads waited for servers.",
    "stalled_reads": "Reads of files that took longer than read_timeout_seconds.",
    "cache_hits": "Blocks of 1 MiB that lay in the cache of the node.",
    "cache_hit_bytes": "Bytes that lay in the cache of the node.",
    "cache_misses": "Blocks of 1 MiB that had to be fetched.",
    "cache_miss_bytes": "Bytes that had to be fetched.",
}
_GAUGES = {
    "epochs": "Epochs of the data so far.",
    "ready": "Microbatches made and not yet taken.",
    "waiting_in_groups": "Samples drawn that wait in groups that are not full.",
    "last_update_timestamp_seconds": "When the loop last told its numbers, in seconds since 1970.",
    "wait_share": "Share of the time since the last update that the training loop waited for data.",
}
_OTHER = "As metrics() of the loader says."


class PrometheusExporter:
    """Hands the numbers of a loader to Prometheus.

        exporter = PrometheusExporter(port=9400, labels={"run": "vlm-7b"})
        for step, batch in enumerate(loader):
            ...
            if step % 50 == 0:
                exporter.update(loader.metrics())

    Under Lightning, `DataMonitor(export=exporter.update)` does it. The numbers are of one rank: on a node, give each
    another port or file, and its rank as a label.

    Args:
        port: Serve the numbers at `http://ADDRESS:PORT/metrics`, from the first `update` on; 0: any free port.
        address: Where to listen. The default is this machine only; `0.0.0.0` lets others ask.
        textfile: Write the numbers to this file at each `update`; its name must end in `.prom`.
        labels: Labels of every number, such as the run or the rank.

    Attributes:
        port: Where it listens; None before the first update, or without a port.

    Raises:
        ConfigurationError: There is neither port nor file, a name is wrong, or prometheus_client is not installed.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        address: str = "127.0.0.1",
        textfile: str | os.PathLike[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if port is None and textfile is None:
            raise ConfigurationError("PrometheusExporter: set a port to listen on, or a textfile to write, or both")
        self.textfile = None if textfile is None else Path(textfile)
        if self.textfile is not None and self.textfile.suffix != ".prom":
            raise ConfigurationError(
                f"PrometheusExporter: textfile={str(textfile)!r} must end in .prom, since the node exporter reads no "
                "others"
            )
        self._labels = {str(name): str(value) for name, value in (labels or {}).items()}
        wrong = [name for name in self._labels if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name)]
        if wrong or "dataset" in self._labels:
            raise ConfigurationError(
                f"PrometheusExporter: {(wrong or ['dataset'])[0]!r} cannot be a label: use letters, digits and _, not "
                "`dataset`, which names the datasets of a mix"
            )
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise ConfigurationError(
                "PrometheusExporter needs prometheus_client: pip install energon-bridge[prometheus]"
            ) from error
        self.port: int | None = None
        self._wanted = port
        self._address = address
        self._server: tuple[Any, threading.Thread] | None = None
        self._metrics: dict[str, float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take over the numbers that `EnergonDataloader.metrics()` returned; start to serve, and write the file.

        Raises:
            ConfigurationError: The port is taken, or the file cannot be written.
        """
        # One assignment: a request meanwhile sees all of the old or all of the new.
        self._metrics = {**metrics, "last_update_timestamp_seconds": time.time()}
        if self._wanted is not None and self._server is None:
            self._serve(self._wanted)
        if self.textfile is not None:
            from prometheus_client import write_to_textfile

            try:
                write_to_textfile(str(self.textfile), self._registry)
            except OSError as error:
                raise ConfigurationError(f"PrometheusExporter: cannot write {self.textfile}: {error}") from error

    def close(self) -> None:
        """Stop to serve; the file stays."""
        server = self._server
        self._server = None
        self.port = None
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join()

    def _serve(self, port: int) -> None:
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, self._address, registry=self._registry)
        except OSError as error:
            raise ConfigurationError(
                f"PrometheusExporter: cannot listen on {self._address}:{port}: {error}. Each rank of a node needs its "
                "own port; port=0 takes a free one"
            ) from error
        self._server = (server, thread)
        self.port = server.server_port

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers as prometheus_client has them; its registry calls this."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Metric] = {}
        for name, value in self._metrics.items():
            kind, _, dataset = name.partition("/")
            labels = ({"dataset": dataset} if dataset else {}) | self._labels
            full = f"energon_{'dataset_' if dataset else ''}{re.sub('[^a-zA-Z0-9_]', '_', kind)}"
            family = families.get(full)
            if family is None:
                growing = kind in _GROWING
                text = (_GROWING if growing else _GAUGES).get(kind, _OTHER)
                of_each = f"{text.rstrip('.')}, of each dataset." if dataset else text
                family = families[full] = (CounterMetricFamily if growing else GaugeMetricFamily)(
                    full, of_each, labels=list(labels)
                )
            family.add_metric(list(labels.values()), value)
        yield from families.values()

    def describe(self) -> list[Metric]:
        """Return nothing: which numbers there are depends on the loader."""
        return []

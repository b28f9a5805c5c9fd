"""`energon bench MIX`: how fast a dataset loads on this machine, stage by stage, and what limits it.

Three kinds of runs over the same training stream, each for some seconds after a warm-up: reading only (parts stay
bytes), everything in this process, and everything with more and more workers; with `--engine ray` then as many on a
cluster. The time per stage comes from the loader's `metrics()` in a run without workers, processor time from the
system, for all processes of this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import click

from energon_bridge.tools.cli.output import format_bytes, print_json, print_table
from energon_bridge.tools.cli.run_options import load_encoder, open_mix, run_options

if TYPE_CHECKING:
    from energon_bridge.core.stream.failures import FailureLog

_WARM_UP = 0.3
"""Part of each run, from its beginning, that is not counted."""
_ENOUGH_OF_BEST = 0.95
"""Part of the best rate that is enough: the fewest workers that reach it are recommended."""
_BUSY = 0.8
"""Part of the time from which on cores, or a process, count as the limit."""
_RUNS_DIFFER = 0.05
"""Part of the time for reading by which two runs may differ that do the same."""
_GOOD_FIT = 0.8
"""R² below which fitted weights are doubtful."""
_LOOKS = 4
"""How often in a run memory is measured."""
_FEWEST = 8
"""Batches of each worker, at least, before memory is measured last: by then as many wait as ever will."""
_CACHE = ("cache_hits", "cache_hit_bytes", "cache_misses", "cache_miss_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One run: its rate, processor seconds per sample, and seconds per stage and sample.

    `training_cpu` is the part of the time for which the training process itself was busy, `making` that for which
    workers made microbatches, `waiting` that for which they waited for the store; `cache_hits` and `cache_misses` are
    blocks of the node's cache. `batch_bytes` and `samples_per_batch` are those of a microbatch. Memory, in bytes, is
    the most that was seen: of the training process, what each worker adds, and the batches of each worker in shared
    memory.
    """

    workers: int
    samples: int
    samples_per_second: float
    bytes_per_second: float
    cpu_per_sample: float
    training_cpu: float
    making: float
    load: float
    encode: float
    batch: float
    requests: int
    bytes_per_request: float
    seconds_per_request: float
    waiting: float
    cache_hits: int = 0
    cache_hit_bytes: int = 0
    cache_misses: int = 0
    cache_miss_bytes: int = 0
    batch_bytes: int = 0
    samples_per_batch: float = 0.0
    trainer_memory: int = 0
    worker_memory: int = 0
    waiting_memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of all runs; `load_average` is that of the machine before them, `workers` the fewest that suffice.

    `cluster` is a run with the most workers on a Ray cluster, if it was asked for, and `cluster_limit` its limit.
    `mix`, `batch_size` and `packing_buffer_size` (0: no packs) say what was measured.
    """

    cores: int
    load_average: float
    reading: Rate
    rates: tuple[Rate, ...]
    workers: int
    limit: str
    advice: str
    cluster: Rate | None = None
    cluster_limit: str | None = None
    mix: str = ""
    batch_size: int = 0
    packing_buffer_size: int = 0


@click.command("bench")
@click.argument("mix", type=click.Path(), required=False)
@click.option("--seconds", type=click.FloatRange(min=0.2), default=5.0, show_default=True, help="Time for each run.")
@click.option(
    "--engine",
    type=click.Choice(["process", "ray"]),
    default="process",
    help="ray: also with --num-workers actors of the cluster at RAY_ADDRESS.",
)
@click.option("--encoder", help="Task encoder: MODULE:NAME of an object, or of what makes it.  [default: none]")
@click.option("--processor", metavar="MODEL", help="Encoder of this model.")
@click.option(
    "--packing-buffer-size", type=click.IntRange(min=1), help="Samples that wait to be packed, if the encoder packs."
)
@click.option(
    "--fit-cost",
    type=click.Path(),
    metavar="FILE",
    help="Instead, fit what microbatches cost to the times of a training run: its microbatches.jsonl.",
)
@run_options
def command(
    mix: str | None,
    seconds: float,
    engine: Literal["process", "ray"],
    encoder: str | None,
    processor: str | None,
    packing_buffer_size: int | None,
    fit_cost: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how fast MIX loads here: a dataset's folder or URL, or a metadataset's YAML file.

    Runs with 0, 1, 2, 4, ... workers, up to --num-workers. Nothing else should run on the machine; what the page cache
    holds is read from there.

    Example:  energon bench /data/captions --batch-size 32 --num-workers 8
              energon bench --fit-cost runs/default/microbatches.jsonl
    """
    if fit_cost is not None:
        if mix is not None:
            raise click.UsageError(f"--fit-cost reads a file of measured times, not a dataset: leave out {mix}")
        _print_cost(fit_cost, as_json=as_json)
        return
    if mix is None:
        raise click.UsageError("Missing argument 'MIX': a dataset or mix to measure (or --fit-cost FILE).")
    options |= {"packing_buffer_size": packing_buffer_size}
    result = bench(mix, options, seconds=seconds, encoder=load_encoder(encoder, processor), engine=engine)
    if as_json:
        print_json(asdict(result))
        return
    for line in report(result):
        click.echo(line)
    _print_rates(result)
    click.echo(f"Limit: {result.limit}")
    click.echo(f"Try: {result.advice}")
    if result.cluster_limit is not None:
        click.echo(f"Cluster: {result.cluster_limit}")


def bench(
    mix: str,
    options: dict[str, Any],
    *,
    seconds: float,
    encoder: Any = None,
    engine: Literal["process", "ray"] = "process",
) -> Measured:
    """Return how fast a mix loads on this machine, and what limits it; with engine "ray", also on the cluster.

    Raises:
        EnergonError: The mix cannot be loaded.
    """
    from energon_bridge.core.encoder import DefaultTaskEncoder
    from energon_bridge.core.encoder.decoder import SampleDecoder
    from energon_bridge.core.stream.failures import FailureLog
    from energon_bridge.core.stream.policy import ErrorPolicy
    from energon_bridge.core.worker_config import available_cores

    class Parts(SampleDecoder):
        unread_from = None

        def decode(self, part_name: str, data: Any) -> Any:
            # Fields are in JSON, and joiners may take texts.
            return super().decode(part_name, data) if part_name.endswith(("json", "txt")) else bytes(data)

    class Bytes(DefaultTaskEncoder):
        decoder = Parts(image_decode=None)

        def batch(self, samples: list[Any]) -> Any:  # of any types: the encoder that is measured may make one of them
            return {"samples": samples}

    cores = available_cores()
    load_average = os.getloadavg()[0]
    most = options["num_workers"]
    reading = _measure(mix, options | {"num_workers": 0, "packing_buffer_size": None}, Bytes(), seconds)
    said = FailureLog(messages=ErrorPolicy().messages, quarantine=None)
    rates = [
        _measure(mix, options | {"num_workers": workers}, encoder, seconds, said=said)
        for workers in numbers_of_workers(most)
    ]
    best = max(rate.samples_per_second for rate in rates)
    chosen = next(rate for rate in rates if rate.samples_per_second >= _ENOUGH_OF_BEST * best)
    limit, advice = judge(reading, rates, chosen, cores)
    cluster = _measure(mix, options, encoder, seconds, engine, said) if engine == "ray" and most else None
    return Measured(
        cores=cores,
        load_average=load_average,
        reading=reading,
        rates=tuple(rates),
        workers=chosen.workers,
        limit=limit,
        advice=advice,
        cluster=cluster,
        cluster_limit=None if cluster is None else judge_cluster(cluster, rates[-1]),
        mix=mix,
        batch_size=options["batch_size"],
        packing_buffer_size=options.get("packing_buffer_size") or 0,
    )


def _print_cost(path: str, *, as_json: bool) -> None:
    """Print the weights that fit the times of a run, ready to paste."""
    from energon_bridge.trainers.replica.costs import fit_times

    fit = fit_times(path)
    if as_json:
        print_json(asdict(fit))
        return
    cost = fit.cost
    click.echo(f"balance_cost={cost!r}")
    click.echo(f"Each microbatch takes another {1e3 * fit.constant:.3g} ms. R² = {fit.r_squared:.3f}.")
    if cost.tokens:
        attention = cost.attention / cost.tokens
        patches = cost.patches / cost.tokens
        click.echo(
            f"For the training script: data.balance_attention={attention:.4g} data.balance_patches={patches:.4g}"
        )
    if fit.r_squared < _GOOD_FIT:
        click.echo(
            "The fit is poor: time more microbatches, of more sizes, in one process on an idle machine. If it stays "
            "poor, balance will gain little."
        )


def numbers_of_workers(most: int) -> list[int]:
    """Return the numbers of workers to try: 0, the powers of two below the most, and the most."""
    return [0, *(1 << power for power in range(most.bit_length()) if 1 << power < most), *([most] if most else [])]


def _measure(
    mix: str,
    options: dict[str, Any],
    encoder: Any,
    seconds: float,
    engine: Literal["process", "ray"] = "process",
    said: FailureLog | None = None,
) -> Rate:
    """Measure one run; failures that `said` has are not logged again."""
    from energon_bridge.core.datasets import get_savable_loader
    from energon_bridge.core.stream.rows import size_of

    give_back_memory()  # that of the run before
    dataset = open_mix(mix, options, task_encoder=encoder, packing_buffer_size=options.get("packing_buffer_size"))
    if said is not None:
        vars(dataset)["failure_log"] = said  # the cached property, which each dataset would make anew
    with closing(
        get_savable_loader(dataset, worker_config=replace(dataset.worker_config, worker_engine=engine))
    ) as loader:
        began = time.perf_counter()
        stream = iter(loader)
        next(stream)  # opens files and starts workers
        while time.perf_counter() - began < _WARM_UP * seconds:
            next(stream)
        before = loader.metrics()
        used = _cpu()
        first = time.perf_counter()
        own = time.process_time()
        memory = [0, 0, 0]
        batches = 0
        for look in range(1, _LOOKS + 1):
            fewest = _FEWEST * options["num_workers"] if look == _LOOKS else 0
            while time.perf_counter() - first < seconds * look / _LOOKS or batches < fewest:
                batch = next(stream)
                batches += 1
            memory = list(map(max, memory, _memory(options["num_workers"])))
        took = time.perf_counter() - first
        own = time.process_time() - own
        after = loader.metrics()
        workers_used = _cpu() - used
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    samples = max(1, int(more["samples"]))
    requests = int(more.get("requests", 0))
    # Threads wait for the store side by side and ahead; batches wait for it at most as long as for their samples.
    waited = min(more["request_seconds"], more["load_seconds"]) if requests else 0.0
    return Rate(
        workers=options["num_workers"],
        samples=samples,
        samples_per_second=samples / took,
        bytes_per_second=more["bytes"] / took,
        cpu_per_sample=workers_used / samples,
        training_cpu=own / took,
        making=more["make_seconds"] / took / max(1, options["num_workers"]),
        load=more["load_seconds"] / samples,
        encode=more["encode_seconds"] / samples,
        batch=more["batch_seconds"] / samples,
        requests=requests,
        bytes_per_request=more["request_bytes"] / requests if requests else 0.0,
        seconds_per_request=more["request_seconds"] / requests if requests else 0.0,
        waiting=min(1.0, waited / more["make_seconds"]) if more["make_seconds"] else 0.0,
        **{name: int(more.get(name, 0)) for name in _CACHE},
        batch_bytes=size_of(batch, 0),
        samples_per_batch=samples / batches,
        trainer_memory=memory[0],
        worker_memory=memory[1],
        waiting_memory=memory[2],
    )


def give_back_memory() -> None:
    """Give memory that is free in this process back to the system, where its C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _memory(workers: int) -> tuple[int, int, int]:
    """Return the bytes of this process but for shared memory, and of each worker: its own, and those in shared memory.

    Zeros where the system has no /proc/PID/smaps_rollup.
    """
    import multiprocessing

    def pages(process: int | str) -> dict[str, int]:
        with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
        return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}

    try:
        own = pages("self")
        children = (
            [pages(process.pid) for process in multiprocessing.active_children() if process.pid] if workers else []
        )
    except (OSError, LookupError, ValueError):
        return 0, 0, 0
    waiting = sum(one["Pss_Shmem"] for one in (own, *children))
    added = sum(one["Pss_Anon"] for one in (own, *children)) - own["Anonymous"]  # shared pages count once
    return own["Rss"] - own["Pss_Shmem"], added // max(1, workers), waiting // max(1, workers)


def _cpu() -> float:
    """Return the processor seconds of this process and its running children."""
    import multiprocessing

    ticks = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for process in multiprocessing.active_children():
        try:
            with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
        except (
            OSError,
            IndexError,
        ):  # it has ended, or this system has no /proc: of the children that ended, all is known
            continue
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return total + ended.ru_utime + ended.ru_stime


def _stages(reading: Rate, alone: Rate) -> dict[str, float]:
    """Return the seconds per sample in each stage; images are decoded into the batch, so these two are one stage.

    Decoding is the difference of two runs: one that is lost in how much such runs differ is left out.
    """
    stages = {"reading": reading.load, "the hooks of the task encoder": alone.encode}
    decoding = alone.load + alone.batch - reading.load
    if decoding <= _RUNS_DIFFER * reading.load:
        return stages
    return {"reading": reading.load, "decoding and batching": decoding} | stages


_LONGER = "no limit on the samples of a slice (leave out max_samples_per_sequence)"
_CHEAPER = {
    "reading": f"fewer and longer ranges: {_LONGER}, larger shards; or more cores",
    "decoding and batching": "SampleDecoder(image_target=...) if images are made smaller anyway, uint8 images "
    "(image_decode='torchrgb8'), or more cores",
    "the hooks of the task encoder": "a profile of the hooks (python -m cProfile, num_workers=0), or more cores",
}


def judge(reading: Rate, rates: list[Rate], chosen: Rate, cores: int) -> tuple[str, str]:
    """Return the bottleneck of the best run, and the settings that would help."""
    stages = _stages(reading, rates[0])
    stage = max(stages, key=lambda name: stages[name])
    busy = chosen.cpu_per_sample * chosen.samples_per_second / cores
    largest = chosen.workers == rates[-1].workers
    if chosen.waiting > 0.5:
        more = "more --num-workers, " if largest else ""  # else they were tried, and did not help
        return (
            f"the store: {chosen.waiting:.0%} of the time is spent waiting for it",
            f"{more}{_LONGER}, shards of 100 MB and more, or a machine nearer to the store",
        )
    if busy > _BUSY:
        return f"the cores: {busy:.0%} of {cores} are busy, most of it with {stage}", _CHEAPER[stage]
    if chosen.workers and chosen.training_cpu > _BUSY:
        return (
            "the training process, which receives the batches: more workers do not help",
            "smaller batches in bytes, such as images as uint8 (SampleDecoder(image_decode='torchrgb8'))",
        )
    if largest and len(rates) > 1:
        return (
            f"the number of workers: the largest number tried, {chosen.workers}, is the fastest",
            "more --num-workers",
        )
    if stage == "reading" and busy * cores < _BUSY * max(1, chosen.workers):  # processes wait, they do not compute
        return (
            f"reading: it takes most of the time, and only {busy:.0%} of the cores are busy",
            f"fewer and longer ranges: {_LONGER}, larger shards; or a faster disk or store",
        )
    return (
        f"not the number of workers; most time goes to {stage}, and {busy:.0%} of the cores are busy",
        f"num_workers={chosen.workers}",
    )


def judge_cluster(cluster: Rate, local: Rate) -> str:
    """Return how workers on a cluster compare with as many processes here, and what limits them."""
    ratio = cluster.samples_per_second / local.samples_per_second
    said = f"{cluster.workers} workers there make {ratio:.2f} of the samples of {cluster.workers} processes here"
    if cluster.making > _BUSY:
        limit = f"making batches ({cluster.making:.0%} of their time): more --num-workers, if it has the cores"
    elif cluster.training_cpu > _BUSY:
        limit = "the training process: batches of fewer bytes"
    else:
        limit = f"the way here: they make batches in {cluster.making:.0%} of their time. Batches of fewer bytes"
    return f"{said}; the limit is {limit}"


def report(result: Measured) -> Iterator[str]:
    """Yield lines that report the cost of a sample, stage by stage."""
    costs = ", ".join(f"{name} {1e6 * took:,.0f} us" for name, took in _stages(result.reading, result.rates[0]).items())
    yield f"Time for a sample, without workers: {costs}"
    reading = result.reading
    if reading.requests:
        yield (
            f"Requests: {format_bytes(int(reading.bytes_per_request))} each, waited for "
            f"{1e3 * reading.seconds_per_request:.1f} ms; {reading.samples / reading.requests:.1f} samples per request"
        )
    blocks = reading.cache_hits + reading.cache_misses
    if blocks:
        yield (
            f"Node cache: {reading.cache_hits / blocks:.0%} of {blocks:,} blocks were there "
            f"({format_bytes(reading.cache_hit_bytes)}), {format_bytes(reading.cache_miss_bytes)} were fetched"
        )
    if result.load_average > result.cores + 1:
        yield (
            f"The machine was busy before this run (load {result.load_average:.1f}, {result.cores} cores): the rates "
            "are too low, and the advice may be wrong."
        )


def _note(rate: Rate, result: Measured) -> str:
    """Return the remark on a number of workers. If the largest tried is best, more workers might be better still."""
    if rate is result.cluster:
        return " on Ray"
    if rate.workers != result.workers:
        return ""
    return " (fastest)" if rate is result.rates[-1] else " (enough)"


_WHOLE = 10
"""Samples per second from which on a rate has no decimals."""


def _print_rates(result: Measured) -> None:
    print_table(
        ("workers", "samples/s", "bytes/s", "CPU per sample", "training process"),
        [
            (
                f"{rate.workers}{_note(rate, result)}",
                f"{rate.samples_per_second:{',.0f' if rate.samples_per_second >= _WHOLE else '.2g'}}",
                format_bytes(int(rate.bytes_per_second)),
                f"{1e6 * rate.cpu_per_sample:,.0f} us",
                f"{rate.training_cpu:.0%} busy",
            )
            for rate in (*result.rates, *([] if result.cluster is None else [result.cluster]))
        ],
    )

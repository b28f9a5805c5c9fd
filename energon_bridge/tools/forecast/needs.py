"""What a run needs of machines and stores: cores, workers, memory, network, requests.

Rates and memory are those that `energon bench` measured; requests are counted by `requests.py`.
"""

from __future__ import annotations

import math

from energon_bridge.tools.forecast.epochs import Forecast
from energon_bridge.tools.forecast.planned_run import Run
from energon_bridge.tools.forecast.requests import store_forecast


def cores_and_network(
    forecast: Forecast, cpu_per_sample: float | None, step_seconds: float, batch_bytes: int | None
) -> dict[str, float]:
    """Return the cores that all workers need, and the bytes a second over the network, where these are known."""
    needs: dict[str, float] = {}
    if cpu_per_sample is not None:
        needs["cores"] = 1e-6 * cpu_per_sample * forecast.draws / (forecast.steps * step_seconds)
        if batch_bytes is not None:
            needs["bytes_per_second"] = batch_bytes * forecast.microbatches / (forecast.steps * step_seconds)
    return needs


def workers_and_memory(
    forecast: Forecast, rates: list[dict[str, float]], step_seconds: float, workers: int | None
) -> dict[str, float]:
    """Return the workers of a rank that suffice, and the memory of as many, or of a number that was given.

    `rates` are those of `energon bench`, by number of workers; memory is in bytes.
    """
    one = next((rate for rate in rates if rate["workers"] == 1), rates[0])
    batches = forecast.microbatches / forecast.world_size / (forecast.steps * step_seconds)
    enough = math.ceil(batches * rates[0]["samples_per_batch"] / one["samples_per_second"])
    workers = enough if workers is None else workers
    like = rates[0]
    if workers:
        like = max((rate for rate in rates if rate["workers"] <= workers), key=lambda rate: rate["workers"])
        like = next((rate for rate in rates if rate["workers"]), like) if not like["workers"] else like
    each = like["worker_memory"] + like["waiting_memory"]
    return {
        "enough_workers": enough,
        "workers": workers,
        "trainer_memory": like["trainer_memory"],
        "worker_memory": like["worker_memory"],
        "waiting_memory": like["waiting_memory"],
        "memory": like["trainer_memory"] + workers * each,
    }


_TURNS = 2
"""Microbatches of each lane in which it reads its first draws, and then its rounds ahead: the burst of a run."""


def of_store(run: Run, forecast: Forecast, step_seconds: float) -> dict[str, float]:
    """Return the requests and bytes that a run asks stores for, and the bytes that a disk cache would hold."""
    asked_for = store_forecast(run, forecast.microbatches)
    if asked_for is None:
        return {}
    needs = {"disk_cache": sum(leaf.bytes / max(1.0, leaf.epochs) for leaf in forecast.leaves)}
    start = math.ceil(_TURNS * run.num_lanes * forecast.steps / forecast.microbatches)
    if start < forecast.steps and (first := store_forecast(run, _TURNS * run.num_lanes)) is not None:
        needs |= {"start_steps": start, "requests_of_start": first.requests + first.index_requests}
        needs |= {"store_bytes_of_start": first.bytes + first.index_bytes}
    steps_a_day = 86_400 / step_seconds
    lasts_a_day = forecast.steps >= steps_a_day  # the first steps of lanes ask for more, as they read ahead
    for name, samples, indexes in (
        ("requests", asked_for.requests, asked_for.index_requests),
        ("store_bytes", asked_for.bytes, asked_for.index_bytes),
    ):
        each = samples / forecast.steps
        needs |= {f"{name}_of_step": each, f"{name}_of_run": samples + indexes}
        needs |= {f"{name}_of_day": each * steps_a_day} if lasts_a_day else {}
    return needs

"""Warnings of settings that waste or spoil something: idle ranks or workers, small buffers and buckets, pixels; and of
microbatches of a pass that a training loop may not expect."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from energon_bridge.core.encoder.hooks import Hook, is_overridden
from energon_bridge.core.loader.position import FinitePass, Position
from energon_bridge.core.loader.run_data import epochs_by_leaf
from energon_bridge.core.loader.run_plan import IN_BUFFERS
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.samples.showing import counted
from energon_bridge.core.stream.failures import FailureLog
from energon_bridge.core.stream.lane_state import LaneBatch
from energon_bridge.core.worker_config import available_cores

logger = logging.getLogger(__name__)


def advise(position: Position) -> None:
    """Warn of ranks and workers that the lanes of the run, or the cores of the machine, cannot keep busy."""
    plan = position.plan
    config = plan.config
    spec = plan.data
    ownership = position.ownership
    if not spec.ends:
        spec.settings.conventions.check_ranks(ownership)
    if config.dp_rank:  # of all ranks, the first one says it
        return
    _say_crowded(config.num_workers, available_cores())
    _say_scaled_twice(spec.settings.task_encoder)
    if spec.ends:
        return
    lanes = ownership.num_lanes
    ranks = ownership.world_size
    if not ownership.even:
        logger.warning(
            "%d data-parallel ranks do not divide %d lanes, so %.0f %% of the microbatches are masked (the others "
            "do not change); %d ranks would waste none",
            *(ranks, lanes, 100 * ownership.masked_share, ownership.nearest_even_world_size()),
        )
    if spec.buckets is not None:
        buffers = lanes * (spec.settings.packing_buffer_size or 0)
        _say_repeated(spec.buckets.smaller(config.microbatches_per_global_batch or lanes, buffers), bool(buffers))
    buffer = spec.settings.packing_buffer_size
    if buffer is not None and plan.packs_by_epoch and spec.buckets is None:
        shortest, leaf = min(epochs_by_leaf(spec), key=lambda each: each[0])
        if lanes > 1 and IN_BUFFERS * lanes * buffer > shortest:
            mixed = len(spec.ordered) > 1
            _say_small(leaf.dataset.path, leaf.num_samples, int(shortest), lanes, plan.streams, buffer, mixed)
    busy = len(position.own_lanes)
    if config.num_workers > busy:  # no rank has more lanes than the first
        shared = counted(lanes, "lane"), counted(ranks, "rank")
        logger.warning("only %d of %d workers have a lane to load: %s, %s", busy, config.num_workers, *shared)


def say_more_rows(position: FinitePass, found: int, failure_log: FailureLog) -> None:
    """Warn once of a microbatch of a pass with more rows than its batch size, because a hook makes several of one."""
    spec = position.plan.data
    size = spec.rows
    if found <= size or position.plan.config.dp_rank:
        return
    listing = position.listing
    if listing is not None and listing.ends is not None:  # the encoder says how many rows a group has
        return
    encoder = spec.settings.task_encoder
    hook = Hook.PACK if spec.listed else Hook.ENCODE if is_overridden(encoder, Hook.ENCODE) else Hook.PREENCODE
    one = "pack" if spec.listed else "sample"
    fit = max(1, size * size // found)
    if failure_log.is_new("a pass", "more rows"):
        logger.warning(
            "%s of %s makes several rows of one %s: microbatches of a pass over %s are cut by %ss, so that all ranks "
            "make as many steps, and have more rows than batch_size=%d (the first such one %d)%s",
            *(hook.title, type(encoder).__name__, one, spec.leaves[0].dataset.path, one, size, found),
            f". For about {fit * found // size}, set batch_size={fit}" if fit < size else "",
        )


def say_masked(position: FinitePass, item: LaneBatch, failure_log: FailureLog) -> None:
    """Warn once of a masked microbatch of a pass that a training loop may take for a real one.

    Not of those whose loss mask is zero, nor of the copies that complete the last step of validation.
    """
    spec = position.plan.data
    completes = not item.counts
    carries = meta_field(item.batch, "__valid__") is not None
    weighs_nothing = isinstance(meta_field(item.batch, "loss_mask"), torch.Tensor)
    if carries and (weighs_nothing or (completes and not spec.shuffled)):
        return
    if failure_log.is_new("a pass", "masked"):
        logger.warning(
            "rank %d: a microbatch of the pass over %s %s. A copy of another one takes its place, so that all ranks "
            "make as many steps: %s",
            position.plan.config.dp_rank,
            spec.leaves[0].dataset.path,
            "does not exist on this rank" if completes else "has lost all its samples (skipped, failed or withdrawn)",
            "its `__valid__` is false, and it must have no loss (a `loss_mask` would be zero)"
            if carries
            else f"`__valid__` would say so, but {type(item.batch).__name__} cannot carry it: return a Batch, "
            "dataclass or dict from encode_batch",
        )


def say_waiting(position: Position, start: int, failure_log: FailureLog) -> None:
    """Say which samples come before those of new weights, that hold from global draw `start`; warn of them once."""
    if waiting := position.waiting().total():
        level = logging.WARNING if failure_log.is_new("set_weights", "waiting") else logging.INFO
        message = (
            "set_weights: from global draw %d on; %s that were drawn before wait in buffers of rank %d and come first: "
            "packs or groups have the new weights once these have gone"
        )
        logger.log(level, message, start, counted(waiting, "sample"), position.plan.config.dp_rank)


def _say_scaled_twice(encoder: Any) -> None:
    """Warn of a user's encoder that may call an image processor, which scales bytes, with images from 0 to 1."""
    form = getattr(encoder.decoder, "image_decode", None)
    is_own = str(type(encoder).encode_sample.__module__).startswith("energon_bridge.models.")  # makes bytes of floats
    if form is None or form.endswith("8") or form.startswith(("pil", "fast")) or is_own:
        return
    for name, value in getattr(encoder, "__dict__", {}).items():
        processor = getattr(value, "image_processor", value)
        if callable(processor) and getattr(processor, "do_rescale", False) is True:
            _say_once(
                f"{type(encoder).__name__} decodes images as numbers from 0 to 1 (image_decode={form!r}), and its "
                f"{type(processor).__name__} (`{name}`) divides by 255 (do_rescale): called with them, it makes nearly "
                "black pixels. Decode bytes (decoder = SampleDecoder(image_decode='pilrgb')), or call it with "
                "do_rescale=False"
            )


@cache
def _say_once(message: str) -> None:
    logger.warning("%s", message)


@cache
def _say_repeated(small: tuple[str, ...], packs: bool) -> None:
    """Warn once of buckets smaller than a global batch, or than their packing buffers."""
    if small:
        logger.warning(
            "group_by: %s: %s, or leave them out by a filter",
            "; ".join(small[:3]) + f"; and {len(small) - 3} more" * (len(small) > 3),
            "their epochs mix there. Lower packing_buffer_size or num_lanes"
            if packs
            else "a global batch repeats their samples. Make the tiers wider, lower bucket_batch_size",
        )


@cache
def _say_small(path: str, samples: int, draws: int, lanes: int, buffers: int, size: int, mixed: bool) -> None:
    """Warn once of buffers that together hold much of an epoch of a dataset, in which the run draws `draws` samples."""
    epoch = f"the {counted(draws, 'sample')} in an epoch of it"
    if mixed:
        epoch = f"the {counted(draws, 'sample')} that the mix draws in an epoch of it ({samples:,} of them its own)"
    consequence = (
        f"So the lanes share {counted(buffers, 'buffer')}, and a process encodes all samples of its lanes' buffers: "
        f"with more than {counted(buffers, 'process', 'processes')}, some do the same work"
        + "; samples of later epochs still come early"
        * (mixed and IN_BUFFERS * buffers * size > draws)
        if buffers < lanes
        else "Packs are filled from small parts of an epoch, and in a mix samples of later epochs come early"
    )
    logger.warning(
        "%s is small for packing: buffers of %d lanes (packing_buffer_size=%d) would hold %s samples at a time, more "
        "than an eighth of %s. %s. "
        "Fewer lanes (num_lanes of WorkerConfig or the data module, at least one for each rank) or a smaller buffer "
        "avoid it",
        *(path, lanes, size, f"{lanes * size:,}", epoch, consequence),
    )


@cache
def _say_crowded(workers: int, cores: int) -> None:
    """Warn once of more workers than there are cores."""
    if workers > cores:
        logger.warning(
            "num_workers=%d, but this process may use %s: more workers only slow each other down. Set num_workers "
            "to %d or less, or give the process more cores (--cpus-per-task of SLURM, the limits of a container)",
            workers,
            counted(cores, "core"),
            cores,
        )

"""The builders: from a path to a dataset for training or validation, and from a dataset to a loader.

The names and parameters are those that users of Megatron Energon know. `get_train_dataset` and `get_val_dataset` make a
`RunSettings` of their arguments, name by name: type checkers, editors, `help` and the reference pages read them there,
`git grep` of a name shows its way, and a test compares the lists with the record.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from energon_bridge.core.encoder.checks import check_encoder
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.task_encoder import DefaultTaskEncoder, decoder_of
from energon_bridge.core.errors import ConfigurationError, UnknownArgumentError, check_choice, did_you_mean
from energon_bridge.core.format.checksums import Checksums
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.position import OnMismatch
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.mix import DatasetOpener, MixLike, index_of_datasets, load_mix, open_mix_index
from energon_bridge.core.mix.leaves import OpenLeaf, open_leaves
from energon_bridge.core.order.leaf_order import DEFAULT_PARALLEL_SHARD_ITERS
from energon_bridge.core.registry import load
from energon_bridge.core.stores import CachePool
from energon_bridge.core.stream.policy import ErrorPolicy, Handler
from energon_bridge.core.stream.settings import RunSettings
from energon_bridge.core.stream.watchdog import WatchdogSettings
from energon_bridge.core.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

DEFAULT_SHUFFLE_BUFFER_SIZE = 100
DEFAULT_LENGTH_BUFFER = 256
"""Samples of a lane from which microbatches are selected by length, unless `packing_buffer_size` says otherwise."""

_UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "<default>"})()
_IGNORED_LOADER_ARGUMENTS = {
    "checkpoint_every_sec",
    "checkpoint_every_min_n_samples",
    "n_checkpoints",
    "gc_collect_every_n_steps",
}
"""Arguments of energon's loaders that have nothing to set here: states are exact and cost nothing to keep."""


def get_train_dataset(
    path: MixLike,
    *,
    split_part: str = "train",
    worker_config: WorkerConfig | None = None,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    max_tokens_per_microbatch: int | None = None,
    group_by: str | Sequence[str] | None = None,
    bucket_batch_size: str | Mapping[str, float] | None = None,
    shuffle_buffer_size: int | None = _UNSET,
    max_samples_per_sequence: int | None = _UNSET,
    parallel_shard_iters: int | None = None,
    shuffle_over_epochs_multiplier: int | None = 1,
    repeat: bool = True,
    virtual_epoch_length: int | None = None,
    task_encoder: Any = None,
    image_decode: str | None = None,
    dataset_config: str = "dataset.yaml",
    split_config: str = "split.yaml",
    trust_remote_code: bool = False,
    filter: str | None = None,  # noqa: A002 - the word of mixes, too
    checksums: Checksums = "sampled",
    error_policy: ErrorPolicy | None = None,
    handler: Handler | None = None,
    **kwargs: Any,
) -> DatasetSpec:
    """Open a prepared dataset for training: an endless, shuffled stream of microbatches.

    Examples:
        >>> dataset = get_train_dataset("data/captions", batch_size=4)
        >>> batch = next(iter(get_savable_loader(dataset)))
        >>> batch.image.shape, len(batch.caption)
        (torch.Size([4, 3, 16, 16]), 4)

    Args:
        path: Folder of a dataset prepared by `energon prepare`, or its URL; a `.jsonl` file; or a mix: a metadataset
            file, the same as a dict, a `Blender`, a list of (path, weight) pairs, or Megatron's `(prefixes, weights)`.
        split_part: Part of the split to read.
        worker_config: Who loads what; default: `WorkerConfig.default_worker_config()`.
        batch_size: Samples in a microbatch; None delivers samples.
        batch_drop_last: With `repeat=False`: leave out a last microbatch that is not full. Of no effect on an endless
            stream, whose microbatches are all full.
        packing_buffer_size: Encoded samples of a lane from which `select_samples_to_pack` selects packs, which
            `batch_size` then counts; None: nothing is packed. Of small data, lanes share such buffers.
        max_tokens_per_microbatch: Make microbatches of as many samples of similar length as fit into this number,
            padding included, by the encoder's `sample_length`. They are selected from `packing_buffer_size` samples of
            a lane (default 256), and `batch_size`, 1 or None, counts microbatches.
        group_by: Expressions over columns, such as `AspectTiers(…).group_by`: samples for which they give the same are
            a bucket, and all microbatches of a global batch, on all ranks, come from one. Buckets take turns in
            proportion to their samples, and nothing is dropped.
        bucket_batch_size: Samples in a microbatch of each bucket: an expression, such as `4194304 // (width * height)`,
            of whose values in a bucket the least counts, or numbers by the names of buckets; default: `batch_size`.
            With packs: about how many samples a microbatch takes, as numbers or `4096 / tokens` of each sample.
        shuffle_buffer_size: About how many samples of a lane are mixed at a time (default 100); None, 0 or 1: the
            slices are shuffled and read side by side, nothing more. It costs no memory beyond what is read at a time.
        max_samples_per_sequence: The most consecutive samples that are read in one direction, a slice. Slices are
            shorter where data is small, so that every lane has 64 of them in an epoch, down to one sample: small
            datasets are permuted as a whole. None, the default: no cap.
        parallel_shard_iters: A quarter of the slices that are read side by side (default 16). Fewer mix less, and each
            read is longer.
        shuffle_over_epochs_multiplier: Epochs that are shuffled as one (default 1); -1: without an end, so that a
            sample may come again at any time; None keeps the dataset's own order.
        repeat: False gives passes: an iterator ends when every sample has come (as often as `blend_epochized` says);
            the next one makes another pass, in another order. All ranks make the same number of steps; microbatches
            that complete the last step have `batch.__valid__` all false.
        virtual_epoch_length: Steps after which an iterator ends, on every rank; the next one continues. 0 or None:
            without an end.
        task_encoder: Default: `DefaultTaskEncoder()`.
        image_decode: Form of decoded images, such as "torchrgb8" or "pilrgb"; overrides the encoder's decoder.
        dataset_config: Name of the file in `.nv-meta` that says what a sample is.
        split_config: Name of the file in `.nv-meta` that says which shards belong to which split part.
        filter: Expression over columns, such as `tokens < 4096 and language == "en"`; only samples that fulfil it are
            read. Every dataset of a mix needs the columns (`energon columns add`).
        checksums: Which samples are compared with the checksums of `energon prepare --checksums` when they are read:
            "always" all, "sampled" one of 16, others in each epoch, "never" none. One that differs is a sample that
            cannot be read. Datasets without checksums are read as they are.
        error_policy: What becomes of samples that cannot be read, decoded or encoded; default: `ErrorPolicy()`.
        handler: Decides on each failed sample in the convention of webdataset, given the exception: True leaves the
            sample out, False or raising stops the run. The same as `ErrorPolicy(on_error=handler)`.
        trust_remote_code: Allow the dataset's `sample_loader.py` to run.

    Raises:
        DatasetError: The dataset cannot be used; a class of its own for each reason.
        ConfigurationError: An argument is wrong.
    """
    _refuse_unknown(get_train_dataset, kwargs)
    if shuffle_buffer_size is _UNSET or max_samples_per_sequence is _UNSET:
        shuffle_buffer_size = DEFAULT_SHUFFLE_BUFFER_SIZE if shuffle_buffer_size is _UNSET else shuffle_buffer_size
        max_samples_per_sequence = None if max_samples_per_sequence is _UNSET else max_samples_per_sequence
        logger.info(
            "%s: shuffle_buffer_size=%s, max_samples_per_sequence=%s",
            path,
            shuffle_buffer_size,
            max_samples_per_sequence,
        )
    settings = RunSettings(
        kind="train" if repeat else "passes",
        split_part=split_part,
        dataset_config=dataset_config,
        split_config=split_config,
        trust_remote_code=trust_remote_code,
        filter=filter,
        checksums=checksums,
        shuffle_over_epochs_multiplier=shuffle_over_epochs_multiplier,
        shuffle_buffer_size=0 if shuffle_buffer_size is None else shuffle_buffer_size,
        max_samples_per_sequence=max_samples_per_sequence,
        parallel_shard_iters=DEFAULT_PARALLEL_SHARD_ITERS if parallel_shard_iters is None else parallel_shard_iters,
        virtual_epoch_length=virtual_epoch_length or None,
        group_by=(group_by,) if isinstance(group_by, str) else tuple(group_by or ()),
        bucket_batch_size=bucket_batch_size,
        task_encoder=_encoder(task_encoder, image_decode),
        batch_size=batch_size,
        batch_drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        error_policy=_policy(error_policy, handler),
    )
    return _open(path, settings, worker_config)


def get_val_dataset(
    path: MixLike,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig | None = None,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    max_tokens_per_microbatch: int | None = None,
    limit: int | None = None,
    task_encoder: Any = None,
    image_decode: str | None = None,
    dataset_config: str = "dataset.yaml",
    split_config: str = "split.yaml",
    trust_remote_code: bool = False,
    filter: str | None = None,  # noqa: A002 - the word of mixes, too
    checksums: Checksums = "sampled",
    error_policy: ErrorPolicy | None = None,
    handler: Handler | None = None,
    **kwargs: Any,
) -> DatasetSpec:
    """Open a prepared dataset for validation: every sample once, in order, the same batches on any topology.

    Examples:
        >>> loader = get_savable_loader(get_val_dataset("data/captions", batch_size=4))
        >>> [int(batch.__valid__.sum()) for batch in loader]  # 10 samples
        [4, 4, 2]

    Args:
        limit: Steps after which a pass ends, on every rank.
        batch_drop_last: Leave out a last microbatch that is not full.
        packing_buffer_size: Samples in a section from which packs (or, with `max_tokens_per_microbatch`, microbatches)
            are selected; the ranks select all of a pass before its first step, and agree on their number.

    The others are those of `get_train_dataset`. All ranks make the same number of steps; rows that do not exist are
    marked in `batch.__valid__`.
    """
    _refuse_unknown(get_val_dataset, kwargs)
    settings = RunSettings(
        kind="finite",
        split_part=split_part,
        dataset_config=dataset_config,
        split_config=split_config,
        trust_remote_code=trust_remote_code,
        filter=filter,
        checksums=checksums,
        shuffle_over_epochs_multiplier=None,
        limit=limit,
        task_encoder=_encoder(task_encoder, image_decode),
        batch_size=batch_size,
        batch_drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        error_policy=_policy(error_policy, handler),
    )
    return _open(path, settings, worker_config)


def get_val_datasets(path: MixLike, **kwargs: Any) -> list[tuple[DatasetSpec, OpenLeaf]]:
    """Open the leaves of a mix for validation, each as a dataset of its own: for a loss per dataset.

    Examples:
        >>> mix = Blender([("data/captions", 1)])
        >>> for dataset, leaf in get_val_datasets(mix, batch_size=4):
        ...     print(leaf.dataset.num_samples, len(get_savable_loader(dataset)))
        10 3

    Arguments are those of `get_val_dataset`.
    """
    return apart(get_val_dataset(path, **kwargs))


def apart(whole: DatasetSpec) -> list[tuple[DatasetSpec, OpenLeaf]]:
    """Return the leaves of a dataset for validation, each as a dataset of its own."""
    parts = zip(whole.leaves, whole.mix.leaves, strict=True)
    return [
        (dataclasses.replace(whole, leaves=(leaf,), mix=dataclasses.replace(whole.mix, leaves=(described,))), leaf)
        for leaf, described in parts
    ]


def get_savable_loader(
    dataset: DatasetSpec | MixLike,
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int | None = None,
    start_at: int = 0,
    on_mismatch: OnMismatch = "refuse",
    cache_pool: CachePool | None = None,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    fail_on_timeout: bool = False,
    on_hang: Literal["wait", "replace"] = "wait",
    keep_until_done: bool = False,
    repeats: int = 1,
    **kwargs: Any,
) -> SavableDataLoader:
    """Return a loader over a dataset, whose position can be saved and restored.

    Examples:
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4))
        >>> batch = next(iter(loader))
        >>> state = loader.save_state_rank()
        >>> expected = next(iter(loader)).__key__
        >>> loader.restore_state_rank(state)  # or a new loader, in another process, with other workers
        >>> next(iter(loader)).__key__ == expected
        True

    Args:
        dataset: From `get_train_dataset` or `get_val_dataset`; or what these take, which is then read for training,
            one sample at a time and with default settings.
        worker_config: Default: the one the dataset was made with.
        prefetch_factor: Overrides that of the worker configuration.
        start_at: Step to start at, as if no sample before it had been skipped; nothing is read to get there.
        on_mismatch: What becomes of a state of another mix: "refuse" it, or "adapt" to it (`restore_state_rank`).
        cache_pool: Keeps files near that cookers and hooks need later; never changes what is delivered.
        watchdog_timeout_seconds: Time for a microbatch after which the log names the hook that runs, its sample and
            the place in the code, again at doubling intervals; None: never.
        watchdog_initial_timeout_seconds: The same for the first microbatch of a process; None: as for the others.
        fail_on_timeout: Stop with HookTimeoutError then; a process that cannot be interrupted is ended.
        on_hang: What becomes of a worker process then: "wait" for it, or "replace" it by one that starts from what was
            delivered. A sample that hangs (or kills) its worker three times in a row counts as one that failed.
        keep_until_done: For prompts of reinforcement learning: a state keeps what was delivered until `loader.done` or
            `loader.drop` names it, and after a restore that comes first. For `loader.again`, too.
        repeats: With `keep_until_done`: rollouts of each sample; it is done when `done` has named it so often.
    """
    ignored = kwargs.keys() & _IGNORED_LOADER_ARGUMENTS
    _refuse_unknown(get_savable_loader, {name: value for name, value in kwargs.items() if name not in ignored})
    if ignored:
        logger.info("get_savable_loader: ignoring %s, which is not needed here", ", ".join(sorted(ignored)))
    if not isinstance(dataset, DatasetSpec):
        dataset = get_train_dataset(dataset, batch_size=1, worker_config=worker_config)
    config = worker_config or dataset.worker_config
    if prefetch_factor is not None:
        config = dataclasses.replace(config, prefetch_factor=prefetch_factor)
    if cache_pool is not None:
        dataset = dataset.with_settings(cache_pool=cache_pool)
    check_choice("on_hang", on_hang, ("wait", "replace"))
    watchdog = None
    if watchdog_timeout_seconds is not None:
        watchdog = WatchdogSettings(
            timeout=watchdog_timeout_seconds,
            initial_timeout=watchdog_initial_timeout_seconds,
            fail=fail_on_timeout,
            replace=on_hang == "replace",
        )
    loader = SavableDataLoader(
        dataset,
        worker_config=config,
        on_mismatch=on_mismatch,
        watchdog=watchdog,
        keep_until_done=keep_until_done,
        repeats=repeats,
    )
    if start_at:
        loader.seek(start_at)
    return loader


def get_loader(
    dataset: DatasetSpec | MixLike,
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int | None = None,
    **kwargs: Any,
) -> SavableDataLoader:
    """Return a loader over a dataset, the same as `get_savable_loader` does; megatron-energon has two.

    Examples:
        >>> loader = get_loader(get_val_dataset("data/captions", batch_size=None))
        >>> sum(1 for sample in loader)
        10

    Args:
        dataset: From `get_train_dataset` or `get_val_dataset`.
        worker_config: Default: the one that the dataset was made with.
        prefetch_factor: Overrides that of the worker configuration.
        **kwargs: What else `get_savable_loader` takes.
    """
    known = {*arguments_of(get_savable_loader), *_IGNORED_LOADER_ARGUMENTS}
    _refuse_unknown(get_savable_loader, dict.fromkeys(kwargs.keys() - known), name="get_loader")
    return get_savable_loader(dataset, worker_config=worker_config, prefetch_factor=prefetch_factor, **kwargs)


def _open(source: MixLike, settings: RunSettings, worker_config: WorkerConfig | None) -> DatasetSpec:
    """Describe a mix and open its leaves, both with the help of its index if it has one."""
    part = settings.split_part
    index = open_mix_index(source, split_part=part)
    mix = load_mix(
        source,
        split_part=part,
        index=index,
        condition=settings.filter,
        dataset_config=settings.dataset_config,
        split_config=settings.split_config,
    )
    if not index.is_kept:
        index = index_of_datasets(mix, split_part=part)
    opener = DatasetOpener(
        trust_remote_code=settings.trust_remote_code,
        index=index,
        read_timeout_seconds=settings.error_policy.read_timeout_seconds,
    )
    unit = mix.unit if settings.kind == "train" and len(mix.leaves) > 1 else None
    leaves = open_leaves(mix, opener, shuffle_epochs=settings.shuffle_over_epochs_multiplier, unit=unit)
    index.save()
    if settings.max_tokens_per_microbatch is not None:
        buffer = settings.packing_buffer_size or DEFAULT_LENGTH_BUFFER
        settings = dataclasses.replace(settings, batch_size=1, packing_buffer_size=buffer)
    config = worker_config or WorkerConfig.default_worker_config()
    buckets = None
    if settings.group_by:
        cut = load("columns", "buckets").cut_into_buckets
        rows = settings.batch_size or 1
        sizes = settings.bucket_batch_size
        endless = settings.kind == "train"
        packs = settings.packing_buffer_size is not None
        decoder = decoder_of(settings.task_encoder)
        turns = decoder.turns_images if isinstance(decoder, SampleDecoder) else None
        leaves, buckets = cut(mix, leaves, settings.group_by, rows, sizes, endless=endless, packs=packs, turns=turns)
        settings = settings if packs else dataclasses.replace(settings, batch_size=max(buckets.rows))
    return DatasetSpec(leaves=leaves, buckets=buckets, mix=mix, settings=settings, worker_config=config)


def _encoder(task_encoder: Any, image_decode: str | None) -> Any:
    encoder = DefaultTaskEncoder() if task_encoder is None else task_encoder
    check_encoder(encoder)
    if image_decode is not None:
        encoder = copy.copy(encoder)  # the caller's encoder stays as it is
        encoder.decoder = SampleDecoder(image_decode=image_decode)
    return encoder


def _policy(policy: ErrorPolicy | None, handler: Handler | None) -> ErrorPolicy:
    policy = policy or ErrorPolicy()
    if handler is None:
        return policy
    if policy.on_error != "skip":
        raise ConfigurationError(
            f"handler={handler!r} and error_policy with on_error={policy.on_error!r} mean the same "
            "thing: pass only one of them"
        )
    return dataclasses.replace(policy, on_error=handler)


DATALOADER_WORDS = {
    "shuffle": "A training dataset is shuffled (shuffle_over_epochs_multiplier=None of get_train_dataset keeps its own "
    "order), and a validation dataset is in order.",
    "sampler": "The order is computed, and the ranks share it by themselves. Weights and epochs are those of a mix; "
    "filter= of get_train_dataset chooses samples by their columns.",
    "batch_sampler": "Batches have batch_size=… samples, or max_tokens_per_microbatch=… tokens of samples of similar "
    "length, both of get_train_dataset.",
    "drop_last": "It is batch_drop_last=… of get_train_dataset and get_val_dataset.",
    "collate_fn": "Override `batch` of a task encoder, and give that as task_encoder=… to get_train_dataset.",
}
"""What stands here for arguments of torch's DataLoader."""


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Return the names that a function takes by keyword, in order: for the words of errors."""
    return [name for name in function.__annotations__ if name not in ("return", "kwargs")]


def _refuse_unknown(function: Callable[..., Any], kwargs: dict[str, Any], *, name: str = "") -> None:
    for wrong in kwargs:
        known = [one for one in arguments_of(function) if one not in ("path", "dataset")]
        hint = did_you_mean(wrong, known) or f" It takes {', '.join(known)}."
        if wrong in WorkerConfig.__dataclass_fields__:
            hint = f" It is one of WorkerConfig: worker_config=WorkerConfig({wrong}=…)."
        elif wrong in DATALOADER_WORDS:
            hint = f" {DATALOADER_WORDS[wrong]}"
        elif wrong in arguments_of(get_train_dataset):
            hint = f" It is one of get_train_dataset: get_train_dataset(…, {wrong}=…)."
        raise UnknownArgumentError(f"{name or function.__name__} takes no argument {wrong!r}.{hint}")

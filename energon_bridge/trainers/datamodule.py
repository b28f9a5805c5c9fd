"""`EnergonMultiModalDataModule`: training and validation data for Lightning, Megatron-LM or your own loop.

The module finds out which part of the data this process loads, from rank and size of the *pure* data-parallel group:
the tensor-, context- and pipeline-parallel ranks of a replica load the same batches.

With a Lightning trainer, validation and test data end after each pass; elsewhere validation starts over at its end.
Lightning's checkpoints hold the state of the data twice, as the loader's and as this module's. Either may be missing,
and loading both has the same effect as loading one.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, get_args

from energon_bridge.core.dataloader import EnergonDataloader, MaskedMicrobatches, open_loader
from energon_bridge.core.datasets import (
    DATALOADER_WORDS,
    apart,
    arguments_of,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_bridge.core.encoder.checks import check_encoder
from energon_bridge.core.errors import (
    ConfigurationError,
    UnknownArgumentError,
    check_choice,
    check_number,
    did_you_mean,
)
from energon_bridge.core.format.checksums import Checksums
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.position import OnMismatch
from energon_bridge.core.loader.run_data import dataset_names
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.samples.sample import to_device
from energon_bridge.core.samples.showing import counted, described
from energon_bridge.core.stores import CachePool
from energon_bridge.core.stream.policy import ErrorPolicy, Handler
from energon_bridge.core.stream.settings import check_numbers
from energon_bridge.core.worker_config import WorkerConfig, trainer_groups
from energon_bridge.models.conversations.layout import MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.trainers.replica import (
    Balance,
    Exchange,
    Replica,
    StageKeys,
    check_data_parallel,
    groups,
    make_balance,
    make_replica,
)
from energon_bridge.trainers.replica.costs import BatchCost
from energon_bridge.trainers.roles import Roles
from energon_bridge.trainers.roles.roles import RoleLoader

logger = logging.getLogger(__name__)


def _lightning_base() -> type:
    """Return LightningDataModule from the package that the program uses; `object` if there is none."""
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        base: type = sys.modules["pytorch_lightning"].LightningDataModule
        return base
    try:
        from lightning.pytorch import LightningDataModule
    except ImportError:
        return object
    return LightningDataModule


ReplicaLoading = Literal["every_rank", "one_rank"]
"""Whether each rank of a replica loads its batches, or one loads them and sends them to the others."""
BalanceMode = Literal["none", "global_batch"]
"""Whether data-parallel ranks exchange the microbatches of a global batch, to have equal work."""

_Base: Any = _lightning_base()
_Arguments = ParamSpec("_Arguments")


def _names_checked(init: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Return a constructor whose error for an unknown name says the nearest one."""

    @wraps(init)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        check_names(kwargs)
        init(*args, **kwargs)

    return checked


class EnergonMultiModalDataModule(_Base):
    """Multimodal training and validation data.

    Examples:
        >>> data = EnergonMultiModalDataModule("data/captions", None, num_workers=0, task_encoder=DefaultTaskEncoder())
        >>> batch = next(data.train_dataloader())  # or Trainer().fit(model, data)

    Args:
        path: A prepared dataset.
        tokenizer: For the default task encoder; may be None with your own `task_encoder`.
        image_processor: The same; without one, the default task encoder takes only samples without images. Pass later
            arguments by keyword: Megatron-Bridge has no `image_processor` from version 0.6 on.
        seq_length: Longest token sequence.
        micro_batch_size: Samples per batch that the loader yields.
        global_batch_size: Samples per optimizer step, all ranks together; a multiple of `micro_batch_size` times the
            data-parallel size. It makes the order fit every legal number of ranks. 1, the default, means "not given".
        num_workers: Worker processes for training; 0 loads in this process.
        num_val_workers: The same for validation; default: `num_workers`.
        pin_memory: Copy batches to pinned memory if there is a GPU.
        shuffle_buffer_size: Samples among which the order is shuffled.
        max_samples_per_sequence: The most samples in a slice, the unit of shuffled reading; None: no cap.
        multimodal_sample_config: For the default task encoder.
        task_encoder: Encodes samples; default: `MultiModalTaskEncoder(tokenizer, image_processor, …)`.
        decoder_seq_length: Longest sequence of the decoder of an encoder-decoder model; it replaces `seq_length` in the
            default task encoder, whose tokens the decoder reads.
        packing_buffer_size: Encoded samples from which the task encoder selects packs; None: nothing is packed.
        validation_task_encoder: Encodes the validation samples; default: `task_encoder`.
        pg_collection: megatron-core's `ProcessGroupCollection`; its data-parallel group says which data to load.
        masked_microbatches: `refuse` (the default) or `allow` microbatches that do not exist, if the number of ranks
            does not divide `num_lanes`: allow them only if the loss weighs by the mask; see `EnergonDataloader`.
        replica_loading: Who loads if several ranks train on the same batches: `every_rank` by itself, or `one_rank` of
            the replica, which broadcasts to the others. All processes must then ask for the data in the same order.
        validate_each_dataset: Make `val_dataloader` return a list with an iterator per dataset of the mix, named by
            `validation_names`: for a loss per dataset.
        balance: `global_batch`: the data-parallel ranks share each global batch of training out, so that all have the
            same work (see `make_balance`). It needs `global_batch_size`; all processes must ask for the data in the
            same order; states exist after whole global batches only. `none`: each rank runs what it loads.
        balance_cost: A function of a batch, default `BatchCost()`, its tokens: see `make_balance`. With `roles`, of a
            batch without media.
        stage_keys: With `one_rank`: the fields of a batch that each pipeline stage gets; None: all fields.
        roles: From `make_roles`, where encoders and the language model have data-parallel ranks of their own. Batches
            are then dicts, with one for each role of this process.

    The others are those of `get_train_dataset` (from `batch_drop_last` on; those that `get_val_dataset` has are for
    validation too, except for `batch_drop_last`), of `WorkerConfig` (from `seed` on) and of `get_savable_loader` (from
    `on_mismatch` on, which is for training).

    Attributes:
        init_global_step: Optimizer steps before the restored state; 0 in a new run.
        train_dataloader_object, val_dataloader_object, test_dataloader_object: The iterators, once there are any.
        validation_names: Short names of the datasets, in the order of the validation iterators.

    Raises:
        UnknownArgumentError: A keyword that neither this module nor one of those three has.
        ConfigurationError: Values that contradict each other.
    """

    @_names_checked
    def __init__(
        self,
        path: str,
        tokenizer: Any,
        image_processor: Any = None,
        seq_length: int = 2048,
        micro_batch_size: int = 1,
        global_batch_size: int | None = 1,
        num_workers: int = 1,
        num_val_workers: int | None = None,
        pin_memory: bool = True,
        shuffle_buffer_size: int | None = 100,
        max_samples_per_sequence: int | None = None,
        multimodal_sample_config: MultiModalSampleConfig | None = None,
        task_encoder: Any | None = None,
        decoder_seq_length: int | None = None,
        packing_buffer_size: int | None = None,
        validation_task_encoder: Any | None = None,
        pg_collection: Any | None = None,
        *,
        masked_microbatches: MaskedMicrobatches = "refuse",
        replica_loading: ReplicaLoading = "every_rank",
        balance: BalanceMode = "none",
        balance_cost: Callable[[Any], float] | None = None,
        stage_keys: StageKeys | None = None,
        roles: Roles | None = None,
        validate_each_dataset: bool = False,
        # Of `get_train_dataset` and `get_val_dataset`.
        batch_drop_last: bool = False,
        max_tokens_per_microbatch: int | None = None,
        group_by: str | Sequence[str] | None = None,
        bucket_batch_size: str | Mapping[str, float] | None = None,
        parallel_shard_iters: int | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        repeat: bool = True,
        virtual_epoch_length: int | None = None,
        image_decode: str | None = None,
        dataset_config: str = "dataset.yaml",
        split_config: str = "split.yaml",
        trust_remote_code: bool = False,
        filter: str | None = None,  # noqa: A002 - the word of mixes, too
        checksums: Checksums = "sampled",
        error_policy: ErrorPolicy | None = None,
        handler: Handler | None = None,
        # Of `WorkerConfig`.
        seed: int = 0,
        seed_offset: int = 0,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        num_lanes: int | None = None,
        decode_threads: int | None = None,
        device: Any = None,
        buffer_bytes: int = 1 << 30,
        max_worker_restarts: int = 100,
        start_method: Literal["fork", "forkserver", "spawn"] = "fork",
        worker_engine: str | None = None,
        ray_options: dict[str, Any] | None = None,
        # Of `get_savable_loader`.
        on_mismatch: OnMismatch = "refuse",
        cache_pool: CachePool | None = None,
        watchdog_timeout_seconds: float | None = 60,
        watchdog_initial_timeout_seconds: float | None = None,
        fail_on_timeout: bool = False,
        on_hang: Literal["wait", "replace"] = "wait",
    ) -> None:
        super().__init__()
        self._train_dataset = partial(
            get_train_dataset,
            batch_drop_last=batch_drop_last,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            group_by=group_by,
            bucket_batch_size=bucket_batch_size,
            parallel_shard_iters=parallel_shard_iters,
            shuffle_over_epochs_multiplier=shuffle_over_epochs_multiplier,
            repeat=repeat,
            virtual_epoch_length=virtual_epoch_length,
            image_decode=image_decode,
            dataset_config=dataset_config,
            split_config=split_config,
            trust_remote_code=trust_remote_code,
            filter=filter,
            checksums=checksums,
            error_policy=error_policy,
            handler=handler,
        )
        self._val_dataset = partial(  # without batch_drop_last: each sample is evaluated
            get_val_dataset,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            image_decode=image_decode,
            dataset_config=dataset_config,
            split_config=split_config,
            trust_remote_code=trust_remote_code,
            filter=filter,
            checksums=checksums,
            error_policy=error_policy,
            handler=handler,
        )
        self._worker_config = partial(
            WorkerConfig,
            seed=seed,
            seed_offset=seed_offset,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            num_lanes=num_lanes,
            decode_threads=decode_threads,
            device=device,
            buffer_bytes=buffer_bytes,
            max_worker_restarts=max_worker_restarts,
            start_method=start_method,
            worker_engine=worker_engine,
            ray_options=ray_options,
        )
        self._open_loader = partial(
            get_savable_loader,
            cache_pool=cache_pool,
            watchdog_timeout_seconds=watchdog_timeout_seconds,
            watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
            fail_on_timeout=fail_on_timeout,
            on_hang=on_hang,
        )
        self._on_mismatch = on_mismatch
        _check_image_processor(image_processor)
        check_numbers(
            {
                "packing_buffer_size": packing_buffer_size,
                "max_tokens_per_microbatch": max_tokens_per_microbatch,
                "shuffle_buffer_size": shuffle_buffer_size,
                "max_samples_per_sequence": max_samples_per_sequence,
                "parallel_shard_iters": parallel_shard_iters,
                "virtual_epoch_length": virtual_epoch_length or None,
            }
        )
        check_choice("replica_loading", replica_loading, get_args(ReplicaLoading))
        check_choice("balance", balance, get_args(BalanceMode))
        if balance_cost is not None and not callable(balance_cost):
            raise ConfigurationError(
                f"balance_cost must be a function of a batch, such as BatchCost(), got {type(balance_cost).__name__}"
            )
        self.path = path
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.seq_length = seq_length
        self.decoder_seq_length = decoder_seq_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = 1 if global_batch_size is None else global_batch_size
        self.num_workers = num_workers
        self.num_val_workers = num_workers if num_val_workers is None else num_val_workers
        self.pin_memory = pin_memory
        self.shuffle_buffer_size = shuffle_buffer_size
        self.max_samples_per_sequence = max_samples_per_sequence
        self.packing_buffer_size = packing_buffer_size
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.multimodal_sample_config = multimodal_sample_config
        self.pg_collection = pg_collection
        self.masked_microbatches = masked_microbatches
        self.replica_loading = replica_loading
        self.balance = balance
        self.balance_cost = balance_cost or BatchCost()
        for name, least in _NUMBERS.items():
            where = f"EnergonMultiModalDataModule: {name}"
            setattr(self, name, check_number(where, getattr(self, name), least, optional=name not in _NEEDED))
        self.stage_keys = stage_keys
        self.roles = roles
        if roles is not None and (replica_loading == "one_rank" or validate_each_dataset):
            raise ConfigurationError(
                "roles: every rank loads what its role needs, so replica_loading='one_rank' and "
                "validate_each_dataset have no place beside them: leave them out"
            )
        self.validate_each_dataset = validate_each_dataset
        self.validation_names: list[str] = []
        self.task_encoder = task_encoder or MultiModalTaskEncoder(
            tokenizer, image_processor, multimodal_sample_config, decoder_seq_length or seq_length
        )
        self.validation_task_encoder = validation_task_encoder or self.task_encoder
        for encoder in (self.task_encoder, self.validation_task_encoder):
            check_encoder(encoder)
        self.init_global_step = 0
        self.train_dataloader_object: EnergonDataloader | None = None
        self.val_dataloader_object: EnergonDataloader | list[EnergonDataloader] | None = None
        self.test_dataloader_object: EnergonDataloader | None = None
        self._replica: Replica | None = None
        self._balance: Balance | None = None
        self._restored: dict[str, Any] | None = None  # the state that training data began from; None: the beginning
        self._opened_sizes: dict[str, int] = {}

    def __repr__(self) -> str:
        loaders = [("training", self.train_dataloader_object), ("validation", self.val_dataloader_object)]
        return described(
            f"{type(self).__name__} of {self.path}",
            [
                f"micro batch size {self.micro_batch_size}, global batch size "
                f"{'not given' if self.global_batch_size == 1 else self.global_batch_size}, "
                f"{counted(self.num_workers, 'worker')}, task encoder {type(self.task_encoder).__name__}",
                *(f"{name}: {'not opened yet' if loader is None else repr(loader)}" for name, loader in loaders),
            ],
        )

    # Lightning's own text would iterate the loaders, and take batches from them.
    __str__ = __repr__

    def _build_worker_config(self, num_workers: int, split: Literal["train", "val", "test"] = "train") -> WorkerConfig:
        """Return the worker configuration of this process; rank and size are those of the pure data-parallel group."""
        found: list[Any] = []
        if self.roles is None:  # with roles, the global groups are of one module, and may be set in part
            known = trainer_groups() if self.pg_collection is None else [groups]
            found = [self._mesh_group(), *(each.data_parallel_group(self.pg_collection) for each in known)]
        config = self._worker_config(
            num_workers=num_workers,
            **({} if self.roles is None else self.roles.place),
            data_parallel_group=next((group for group in found if group is not None), None),
            microbatches_per_global_batch=self._microbatches_per_global_batch(),
            pin_memory=None if self.pin_memory else False,
        )
        if self.pg_collection is not None and self.roles is None:
            by_group = config.data_parallel_group is not None
            check_data_parallel(config.dp_rank, config.dp_size, by_group=by_group, pg_collection=self.pg_collection)
        per_step = self.micro_batch_size * config.dp_size
        if self.global_batch_size != 1 and self.global_batch_size % per_step:
            raise ConfigurationError(
                f"global_batch_size={self.global_batch_size} cannot be divided between {config.dp_size} data-parallel "
                f"ranks of micro_batch_size={self.micro_batch_size}: it must be a multiple of {per_step}"
            )
        rank = config.dp_rank, config.dp_size
        logger.info("%s data of %s: data-parallel rank %d of %d, %d workers", split, self.path, *rank, num_workers)
        return config

    def datasets_provider(self, worker_config: WorkerConfig, split: Literal["train", "val"] = "val") -> Any:
        """Return the dataset of a split: endless and shuffled for `train`, finite and in order for `val`.

        Raises:
            ConfigurationError: There is no such split.
        """
        if split == "train":
            return self._train_dataset(
                self.path,
                split_part="train",
                worker_config=worker_config,
                batch_size=self.micro_batch_size,
                packing_buffer_size=self.packing_buffer_size,
                shuffle_buffer_size=self.shuffle_buffer_size,
                max_samples_per_sequence=self.max_samples_per_sequence,
                task_encoder=self.task_encoder,
            )
        if split == "val":
            return self._evaluated("val", worker_config)
        raise ConfigurationError(
            f"datasets_provider: Invalid value for split: expected 'train' or 'val', got {split!r}"
        )

    def _evaluated(self, split: Literal["val", "test"], worker_config: WorkerConfig) -> DatasetSpec:
        """Return the dataset of an evaluation split."""
        return self._val_dataset(
            self.path,
            split_part=split,
            worker_config=worker_config,
            batch_size=self.micro_batch_size,
            packing_buffer_size=self.packing_buffer_size,
            task_encoder=self.validation_task_encoder,
        )

    def build(self) -> tuple[EnergonDataloader, Any]:
        """Return the training iterator, and what `val_dataloader` returns."""
        return self.train_dataloader(), self.val_dataloader()

    def train_dataloader(self) -> EnergonDataloader:
        """Return the training iterator: the same object on every call.

        It is made again if `micro_batch_size` was changed before the first step, as Lightning's `scale_batch_size`
        does. With `overfit_batches` every epoch has the same batches.

        Raises:
            ConfigurationError: `micro_batch_size` was changed after the first step.
        """
        if self.train_dataloader_object is not None and self._size_changed("train") and not self._between_trials():
            self._refuse_other_size()
        dataloader: EnergonDataloader = self._opened("train", self._training)
        dataloader.repeat_epoch = bool(getattr(self._lightning(), "overfit_batches", 0))
        return dataloader

    def _training(self) -> EnergonDataloader:
        loader = open_loader(lambda: self._load("train", self.num_workers), self.replica, self._balancing())
        if self._restored is not None:
            loader.load_state_dict(self._restored)  # it may bring another num_lanes
        return EnergonDataloader(
            loader, length=self._epoch_length(loader), masked_microbatches=self.masked_microbatches
        )

    def _opened(self, split: str, open_split: Callable[[], Any]) -> Any:
        """Return the iterators of a split: the same ones, until `micro_batch_size` is changed."""
        name = f"{split}_dataloader_object"
        if getattr(self, name) is not None and self._size_changed(split):
            self._forget(split)
        if getattr(self, name) is None:
            setattr(self, name, open_split())
            self._opened_sizes[split] = self.micro_batch_size
        return getattr(self, name)

    def val_dataloader(self) -> Any:
        """Return the validation iterator, or the list of them: the same objects on every call.

        Without a Lightning trainer, `iter()` of them starts over at its end; `one_pass()` does not.
        """
        one_or_each = self.val_dataloaders if self.validate_each_dataset else lambda: self._finite("val")
        loaders = self._opened("val", one_or_each)
        for dataloader in loaders if isinstance(loaders, list) else [loaders]:
            dataloader.cycle = self._lightning() is None
        return loaders

    def val_dataloaders(self) -> list[EnergonDataloader]:
        """Return a new validation iterator for each dataset of the mix, in order: for a loss per dataset."""
        specs: list[DatasetSpec] = []

        def opened() -> list[str]:
            whole = self._evaluated("val", self._build_worker_config(self.num_val_workers, "val"))
            specs.extend(spec for spec, _ in apart(whole))
            datasets = [spec.leaves[0].dataset for spec in specs]
            return dataset_names([one.path for one in datasets], [one.split_part for one in datasets])

        if self.replica is None:
            self.validation_names = opened()
        else:
            self.validation_names = Exchange(self.replica).answer(opened)
        return [
            EnergonDataloader(open_loader(lambda n=n: self._open_loader(specs[n]), self.replica))
            for n in range(len(self.validation_names))
        ]

    def test_dataloader(self) -> EnergonDataloader | None:
        """Return an iterator over the `test` split for Lightning's `test`: one finite pass, in order.

        Returns:
            None without a Lightning trainer: Megatron's loops would evaluate on a third iterator.

        Raises:
            EnergonError: The dataset has no test split.
        """
        if self._lightning() is None:
            return None
        dataloader: EnergonDataloader = self._opened("test", lambda: self._finite("test"))
        return dataloader

    def predict_dataloader(self) -> EnergonDataloader | None:
        """Return the same for Lightning's `predict`."""
        return self.test_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Move the tensors of a batch to Lightning's device, and normalise byte pixels there."""
        moved = batch if str(device) == "cpu" else to_device(batch, device)
        if self.roles is not None:
            return {name: normalise_on_device(of_role) for name, of_role in moved.items()}
        return normalise_on_device(moved)

    def setup(self, stage: str) -> None:
        """Let a Lightning trainer keep its optimizer steps on the global batches (`GlobalBatches`); it calls this."""
        trainer = self._lightning()
        if stage != "fit" or trainer is None:
            return
        from energon_bridge.trainers.lightning import GlobalBatches

        if not any(isinstance(one, GlobalBatches) for one in trainer.callbacks):
            trainer.callbacks.append(GlobalBatches(self))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training data of the whole run; all data-parallel ranks must call this.

        Before there is a training iterator, it is the restored state or, in a new run, the beginning.

        Raises:
            ConfigurationError: `micro_batch_size` was changed after the first step.
        """
        trainer = self._lightning()
        step = self.init_global_step if trainer is None else int(trainer.global_step)
        train = self._restored
        if self.train_dataloader_object is not None:
            if self._size_changed("train"):
                self._refuse_other_size()
            train = self.train_dataloader_object.state_dict()
        found = {"global_step": step, "consumed_samples": self.consumed_samples, "train": train}
        return found if trainer is None else found | {"accumulate_grad_batches": int(trainer.accumulate_grad_batches)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`; before or after `train_dataloader()`, once or twice.

        A state from before the first batch moves the run back to its beginning.
        """
        if not state_dict:
            return
        self.init_global_step = int(state_dict["global_step"])
        self._restored = state_dict["train"]
        if self.train_dataloader_object is None:
            return
        if self._size_changed("train"):
            self._forget("train")
        elif self._restored is None:
            self.train_dataloader_object.rewind()
        else:
            self.train_dataloader_object.load_state_dict(self._restored)

    def ban(self, keys: Iterable[str], **options: Any) -> int:
        """Withdraw training samples (see `EnergonDataloader.ban`); after the state of the run has been restored."""
        return self.train_dataloader().ban(keys, **options)

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], **options: Any) -> int:
        """Change the weights of the training mix (see `EnergonDataloader.set_weights`); after a state is restored."""
        return self.train_dataloader().set_weights(weights, **options)

    def close(self) -> None:
        """Stop the worker processes of all iterators."""
        for split in ("train", "val", "test"):
            self._close(split)

    @property
    def replica(self) -> Replica | None:
        """The ranks around this one that get the same batches from one loader; None if every rank loads."""
        if self._replica is None and self.replica_loading == "one_rank":
            self._replica = make_replica(pg_collection=self.pg_collection, stage_keys=self.stage_keys)
        return self._replica

    def _balancing(self) -> Balance | None:
        """Return how the data-parallel ranks balance their microbatches; None if they do not."""
        if self._balance is None and self.balance == "global_batch" and self.roles is None:
            self._balance = make_balance(
                self.balance_cost, pg_collection=self.pg_collection, replica=self.replica, data_group=self._mesh_group()
            )
        return self._balance

    @property
    def consumed_samples(self) -> int:
        """Rows (packs, if samples are packed) that all data-parallel ranks have trained on, without masked ones."""
        state = self._restored
        if self.train_dataloader_object is not None and self.roles is not None:
            state = {"microbatches": self.train_dataloader_object.loader.microbatches}
        elif self.train_dataloader_object is not None:
            state = self.train_dataloader_object.save_state()
        size = self._opened_sizes.get("train", self.micro_batch_size)
        return size * int(state["microbatches"]) if state else 0

    def _lightning(self) -> Any:
        """Return the Lightning trainer that this module is attached to, or None."""
        return getattr(self, "trainer", None)

    def _size_changed(self, split: str) -> bool:
        return self._opened_sizes[split] != self.micro_batch_size

    def _refuse_other_size(self) -> None:
        """Raise if training has begun with another `micro_batch_size`."""
        trainer = self._lightning()
        if trainer is not None:
            steps = int(trainer.global_step) - self.init_global_step
        else:
            steps = 0 if self.train_dataloader_object is None else self.train_dataloader_object.batches
        if steps > 0:
            raise ConfigurationError(
                f"micro_batch_size was changed from {self._opened_sizes['train']} to {self.micro_batch_size} after "
                f"{counted(steps, 'step')} of training; it can only change before the first step. Set it back, or make "
                "a data module for a new run"
            )

    def _between_trials(self) -> bool:
        """Return whether a running fit asks for data though it has no step left: a tuner's, before its next trial."""
        trainer = self._lightning()
        return (
            trainer is not None and trainer.state.status == "running" and 0 <= trainer.max_steps <= trainer.global_step
        )

    def _forget(self, split: str) -> None:
        """Close the iterators of a split; they are made again on demand."""
        self._close(split)
        setattr(self, f"{split}_dataloader_object", None)

    def _close(self, split: str) -> None:
        loaders = getattr(self, f"{split}_dataloader_object")
        for dataloader in loaders if isinstance(loaders, list) else [loaders]:
            if dataloader is not None:
                dataloader.close()

    def _mesh_group(self) -> Any:
        """Return the data-parallel group of Lightning's `ModelParallelStrategy`; None without such a mesh."""
        if self.pg_collection is not None:
            return None
        try:
            mesh = getattr(getattr(getattr(self, "trainer", None), "strategy", None), "device_mesh", None)
        except RuntimeError:  # how the strategy says that there is none yet
            return None
        names = getattr(mesh, "mesh_dim_names", None) or ()
        return mesh["data_parallel"].get_group() if mesh is not None and "data_parallel" in names else None

    def _load(self, split: Literal["train", "val", "test"], num_workers: int) -> SavableDataLoader | RoleLoader:
        """Open the loader of a split."""
        worker_config = self._build_worker_config(num_workers, split)
        if split == "test":
            dataset = self._evaluated("test", worker_config)
        else:
            dataset = self.datasets_provider(worker_config, split)
        on_mismatch = self._on_mismatch if split == "train" else "refuse"  # a state is only ever of training data
        if self.roles is not None:
            cost = self.balance_cost if split == "train" and self.balance == "global_batch" else None
            return self.roles.loader(dataset, balance=cost, on_mismatch=on_mismatch, **self._open_loader.keywords)
        return self._open_loader(dataset, worker_config=worker_config, on_mismatch=on_mismatch)

    def _finite(self, split: Literal["val", "test"]) -> EnergonDataloader:
        """Return an iterator over an evaluation split."""
        return EnergonDataloader(open_loader(lambda: self._load(split, self.num_val_workers), self.replica))

    def _epoch_length(self, loader: Any) -> int | None:
        """Return the length of an epoch if a Lightning trainer is attached.

        Without a length, Lightning fetches one batch ahead, and its saved state is one batch too late. It also ends
        gradient accumulation with the epoch, so an epoch consists of whole optimizer steps.
        """
        trainer = self._lightning()
        if trainer is None:
            return None
        accumulate = int(getattr(trainer, "accumulate_grad_batches", 1))
        return max(1, math.ceil(len(loader) / accumulate)) * accumulate

    def _microbatches_per_global_batch(self) -> int | None:
        if self.global_batch_size == 1:
            return None
        if self.global_batch_size % self.micro_batch_size:
            raise ConfigurationError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        return self.global_batch_size // self.micro_batch_size


_NEEDED = {"seq_length": 1, "micro_batch_size": 1, "num_workers": 0}
_NUMBERS = {**_NEEDED, "global_batch_size": 1, "num_val_workers": 0, "decoder_seq_length": 1}
"""The least of the numbers that the module keeps; the needed ones cannot be None."""


def check_names(names: Iterable[str]) -> None:
    """Raise UnknownArgumentError for the first name that is no setting of the data module."""
    known = sorted(arguments_of(EnergonMultiModalDataModule.__init__))
    for name in names:
        if name not in known:
            hint = did_you_mean("micro_batch_size" if name == "batch_size" else name, known)
            hint = f" {DATALOADER_WORDS[name]}" if name in DATALOADER_WORDS else hint
            raise UnknownArgumentError(
                f"EnergonMultiModalDataModule has no argument {name!r}." + (hint or f" It takes {', '.join(known)}.")
            )


def _check_image_processor(image_processor: Any) -> None:
    """Raise if the value in the position of the image processor is not one."""
    if isinstance(image_processor, int | float | str):
        raise ConfigurationError(
            f"EnergonMultiModalDataModule: image_processor={image_processor!r} is a {type(image_processor).__name__}; "
            "expected an image processor, or None. By position the third argument is image_processor, which "
            "Megatron-Bridge does not have from version 0.6 on: give seq_length=…, micro_batch_size=… and what follows "
            "by keyword"
        )

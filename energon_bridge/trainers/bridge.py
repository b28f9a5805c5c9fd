"""The data of a run as Megatron-Bridge configures it: a validated configuration, a builder, and a provider.

    config = EnergonDatasetConfig(path="/data", seq_length=4096, micro_batch_size=1, task_encoder=…)
    config.finalize()
    train, valid, test = EnergonDatasetBuilder(config).build(DatasetBuildContext(1000, 100, 0, pg_collection=pg))

Names and defaults are those of its `EnergonDatasetConfig`, and its own task encoder configurations are accepted. Four
things differ on purpose: validation reads the split in order, and starts over at its end; each validation iterator
keeps its own position; a process group collection may have unset fields; the state fits any number of data-parallel
ranks (`read_rank_files` of `rank_files.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import ConfigurationError, check_number
from energon_bridge.trainers.bridge_encoders import (
    HFEnergonTaskEncoderConfig,
    NemotronOmniEnergonTaskEncoderConfig,
    QwenVLEnergonTaskEncoderConfig,
    declared_by_bridge,
)
from energon_bridge.trainers.datamodule import BalanceMode, EnergonMultiModalDataModule, ReplicaLoading, check_names
from energon_bridge.trainers.replica import StageKeys
from energon_bridge.trainers.replica.costs import BatchCost
from energon_bridge.trainers.roles import Roles
from energon_bridge.trainers.task_encoders import TaskEncoderConfig, TaskEncoderContext

__all__ = [
    "DatasetBuildContext",
    "EnergonDatasetBuilder",
    "EnergonDatasetConfig",
    "HFEnergonTaskEncoderConfig",
    "NemotronOmniEnergonTaskEncoderConfig",
    "QwenVLEnergonTaskEncoderConfig",
    "energon_train_valid_test_datasets_provider",
]

_SET_BY_BUILDER = frozenset({"batch_size", "split_part", "worker_config"})
_WITHOUT_EFFECT = frozenset({"persistent_workers"})

_PACK_BATCHES = (HFEnergonTaskEncoderConfig, QwenVLEnergonTaskEncoderConfig, NemotronOmniEnergonTaskEncoderConfig)
"""The declared encoders that can pack the samples of a microbatch."""


# Not frozen, unlike other configurations: Megatron-Bridge changes fields after they were made.
@dataclass(kw_only=True, slots=True)
class EnergonDatasetConfig:
    """The data of a run as plain values only, so that it can come from a file and be stored in a checkpoint.

    Args:
        path: A prepared dataset, or a file that describes a mix.
        seq_length: Longest sequence.
        micro_batch_size: Samples (with packing: packs) of a microbatch.
        task_encoder: Declares the task encoder, see `task_encoders`; or a task encoder itself.
        dataloader_type: `external`, the only one.
        num_workers: Worker processes for training.
        num_val_workers: The same for validation; None: `num_workers`.
        pin_memory: Copy batches to pinned memory if there is a GPU.
        data_sharding: Always on here.
        drop_last: Accepted without effect: training has no short microbatches, and validation keeps its last one.
        persistent_workers: Accepted without effect: workers live as long as the loader.
        trust_remote_code: Run code that comes with the dataset or with tokenizers; None and False do not.
        dataloader_save: Folder for the state of the data; None: Megatron-Bridge's own choice.
        dataloader_load: Folder to restore from.
        do_validation: Build validation data.
        do_test: There is no test data: must be False.
        shuffle_buffer_size: Samples among which the order is shuffled.
        max_samples_per_sequence: Maximum samples per slice, the unit of shuffled reading; None: no limit.
        packing_buffer_size: Samples from which packs are selected; None: nothing is packed.
        max_tokens_per_microbatch: Make microbatches of as many samples as fit into this number, padding included;
            batch sizes then count microbatches. None: of `micro_batch_size` samples.
        balance: `global_batch`: the data-parallel ranks exchange the microbatches of each global batch, so that all
            have the same work; needs `global_batch_size`. `none`: each runs what it loads.
        balance_cost: The weights of a microbatch's cost, as arguments of `BatchCost`: `tokens`, `attention`,
            `patches`, `patch_size`; or a function of the batch. None: its tokens.
        dataset_kwargs: More settings of `EnergonMultiModalDataModule` by name, such as `filter` or `start_method`:
            plain values.
        enable_in_batch_packing: Pack the samples of each microbatch into one row; only with the encoders that
            this module's configurations declare. `packing_buffer_size` chooses
            from more samples than one batch, and fills rows better.
        defer_in_batch_packing_to_step: The training step packs; batches stay as they are.
        in_batch_packing_pad_to_multiple_of: Each sample that is packed inside its batch is padded to a multiple of it.
        pad_to_max_length: Pad every row to `seq_length`: one shape for all batches, as pipelines need it.
        pad_to_multiple_of: Rows, and the samples of packs, are padded to a multiple of it.
        global_batch_size: Samples of an optimizer step; None: not given (see `EnergonMultiModalDataModule`).
        seed: Seed of the order.
        num_lanes: Logical streams of the run; see `WorkerConfig`.
        replica_loading: `every_rank` of a replica loads its batches, or `one_rank` does and sends them to the others.
        stage_keys: With `one_rank`: the fields of a batch that each pipeline stage gets.
    """

    path: str | Path | None = None
    seq_length: int
    micro_batch_size: int
    task_encoder: Any
    dataloader_type: str = "external"
    num_workers: int = 2
    num_val_workers: int | None = None
    pin_memory: bool = True
    data_sharding: bool = True
    drop_last: bool = True
    persistent_workers: bool = True
    trust_remote_code: bool | None = None
    dataloader_save: str | None = None
    dataloader_load: str | None = None
    do_validation: bool = True
    do_test: bool = False
    shuffle_buffer_size: int | None = 100
    max_samples_per_sequence: int | None = None
    packing_buffer_size: int | None = None
    max_tokens_per_microbatch: int | None = None
    balance: BalanceMode = "none"
    balance_cost: dict[str, float] | Callable[[Any], float] | None = None
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    enable_in_batch_packing: bool = False
    defer_in_batch_packing_to_step: bool = False
    in_batch_packing_pad_to_multiple_of: int = 1
    pad_to_max_length: bool = False
    pad_to_multiple_of: int = 128
    global_batch_size: int | None = None
    seed: int = 0
    num_lanes: int | None = None
    replica_loading: ReplicaLoading = "every_rank"
    stage_keys: StageKeys | None = None

    def validate(self) -> None:
        """Check that the values fit together.

        Raises:
            ConfigurationError: Names the first rule that is broken.
        """
        if not self.path:
            _refuse("path is empty: give a prepared dataset, or a file that describes a mix")
        for name in ("seq_length", "micro_batch_size", "pad_to_multiple_of", "in_batch_packing_pad_to_multiple_of"):
            _check_number(name, getattr(self, name), 1)
        optional = ("global_batch_size", "shuffle_buffer_size", "max_samples_per_sequence", "packing_buffer_size")
        for name in (*optional, "max_tokens_per_microbatch"):
            _check_number(name, getattr(self, name), 1, optional=True)
        _check_number("num_workers", self.num_workers, 0)
        _check_number("num_val_workers", self.num_val_workers, 0, optional=True)
        if self.dataloader_type != "external":
            _refuse(f"dataloader_type must be 'external', got {self.dataloader_type!r}")
        if self.do_test:
            _refuse("do_test=True, but there is no test data: evaluate on the validation data of another run")
        if not self.data_sharding:
            _refuse("data_sharding=False, but data-parallel ranks always divide the data: leave it out")
        self._check_packing()
        self._check_balance()
        if self.global_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            _refuse(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        if self.pad_to_max_length and self.seq_length % self.pad_to_multiple_of:
            _refuse(
                f"pad_to_max_length with seq_length={self.seq_length}, which is not a multiple of "
                f"pad_to_multiple_of={self.pad_to_multiple_of}: rows would be longer than seq_length"
            )
        self.task_encoder = declared_by_bridge(self.task_encoder)
        if not (isinstance(self.task_encoder, TaskEncoderConfig) or hasattr(self.task_encoder, "encode_sample")):
            _refuse(
                f"task_encoder is a {type(self.task_encoder).__name__}: pass a configuration with a method "
                "build(context), for example MultiModalTaskEncoderConfig, or a task encoder"
            )
        own = {entry.name for entry in fields(self)} - {"trust_remote_code"} - _WITHOUT_EFFECT
        if reserved := sorted((own | _SET_BY_BUILDER) & self.dataset_kwargs.keys()):
            _refuse(f"dataset_kwargs contains {', '.join(reserved)}: use the configuration's own fields instead")
        check_names(self.dataset_kwargs)
        for name, value in self.dataset_kwargs.items():
            _check_plain(f"dataset_kwargs[{name!r}]", value)

    def _check_packing(self) -> None:
        if self.packing_buffer_size is not None and self.micro_batch_size != 1:
            _refuse(
                f"packing_buffer_size with micro_batch_size={self.micro_batch_size}: packed sequences are trained one "
                "row at a time, set micro_batch_size=1"
            )
        buffered = self.packing_buffer_size is not None
        if buffered and (self.enable_in_batch_packing or self.defer_in_batch_packing_to_step):
            _refuse(
                "packing_buffer_size with enable_in_batch_packing or defer_in_batch_packing_to_step would pack twice: "
                "leave out the latter two"
            )
        if self._packs_batches() and not isinstance(declared_by_bridge(self.task_encoder), _PACK_BATCHES):
            _refuse(
                f"enable_in_batch_packing with a task encoder of type {type(self.task_encoder).__name__}: only "
                f"{', '.join(kind.__name__ for kind in _PACK_BATCHES)} pack inside a batch. Set packing_buffer_size "
                "instead, or let your encoder's batch do it"
            )

    def _check_balance(self) -> None:
        if self.balance != "none" and self.global_batch_size is None:
            _refuse(f"balance={self.balance!r} divides the microbatches of a global batch: set global_batch_size")
        cost: Any = self.balance_cost
        if isinstance(cost, Mapping):
            known = [entry.name for entry in fields(BatchCost)]
            if unknown := sorted(set(cost) - set(known)):
                _refuse(f"balance_cost has {', '.join(unknown)}; BatchCost takes {', '.join(known)}")
            BatchCost(**cost)
        elif cost is not None and not callable(cost):
            _refuse(f"balance_cost must be weights or a function of a batch, got {cost!r}")

    def _packs_batches(self) -> bool:
        return self.enable_in_batch_packing and not self.defer_in_batch_packing_to_step

    def finalize(self) -> None:
        """Check the values and derive those that depend on others. Idempotent."""
        self.validate()
        self.path = str(self.path)
        if self.num_val_workers is None:
            self.num_val_workers = self.num_workers


@dataclass(frozen=True, slots=True)
class DatasetBuildContext:
    """What the trainer passes when it builds the data.

    Args:
        train_samples: 0: build no training data; any other number: an endless stream.
        valid_samples: The same for validation.
        test_samples: Ignored: there is no test data.
        tokenizer: The run's tokenizer, for task encoders that use it.
        pg_collection: megatron-core's `ProcessGroupCollection`.
        roles: From `make_roles`, where the modules of a MIMO model have grids of their own.
    """

    train_samples: int
    valid_samples: int
    test_samples: int
    tokenizer: Any = None
    pg_collection: Any = None
    roles: Roles | None = None


class EnergonDatasetBuilder:
    """Builds the data that a configuration declares.

    Args:
        config: The configuration; it is finalized.

    Raises:
        ConfigurationError: Its values do not fit together.
    """

    def __init__(self, config: EnergonDatasetConfig) -> None:
        config.finalize()
        self.config = config

    def data_module(self, context: DatasetBuildContext) -> EnergonMultiModalDataModule:
        """Return the data module of the run: one task encoder for training and validation."""
        config = self.config
        encoder = config.task_encoder
        if isinstance(encoder, TaskEncoderConfig):
            encoder = encoder.build(
                TaskEncoderContext(
                    tokenizer=context.tokenizer,
                    seq_length=config.seq_length,
                    pad_to_multiple_of=config.pad_to_multiple_of,
                    pad_to_max_length=config.pad_to_max_length,
                    trust_remote_code=bool(config.trust_remote_code),
                    pack_batches_to_multiple_of=(
                        config.in_batch_packing_pad_to_multiple_of if config._packs_batches() else None
                    ),
                )
            )
        cost: Any = config.balance_cost
        return EnergonMultiModalDataModule(
            path=str(config.path),
            tokenizer=context.tokenizer,
            seq_length=config.seq_length,
            micro_batch_size=config.micro_batch_size,
            global_batch_size=config.global_batch_size,
            num_workers=config.num_workers,
            num_val_workers=config.num_val_workers,
            pin_memory=config.pin_memory,
            shuffle_buffer_size=config.shuffle_buffer_size,
            max_samples_per_sequence=config.max_samples_per_sequence,
            task_encoder=encoder,
            packing_buffer_size=config.packing_buffer_size,
            pg_collection=context.pg_collection,
            roles=context.roles,
            replica_loading=config.replica_loading,
            balance=config.balance,
            balance_cost=BatchCost(**cost) if isinstance(cost, Mapping) else cost,
            stage_keys=config.stage_keys,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            seed=config.seed,
            num_lanes=config.num_lanes,
            # What the dataset itself may run was said for the dataset.
            **{"trust_remote_code": bool(config.trust_remote_code)} | config.dataset_kwargs,
        )

    def build(self, context: DatasetBuildContext) -> tuple[EnergonDataloader | None, EnergonDataloader | None, None]:
        """Return iterators over the training and validation data (None if not wanted), and None for test data."""
        data = self.data_module(context)
        train = data.train_dataloader() if context.train_samples > 0 else None
        valid = data.val_dataloader() if context.valid_samples > 0 and self.config.do_validation else None
        return train, valid, None


def energon_train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int],
    dataset_config: EnergonDatasetConfig,
    tokenizer: Any = None,
    pg_collection: Any = None,
) -> tuple[EnergonDataloader | None, EnergonDataloader | None, None]:
    """Build the data of a run: the builder as a function."""
    train, valid, test = train_val_test_num_samples
    context = DatasetBuildContext(train, valid, test, tokenizer, pg_collection)
    return EnergonDatasetBuilder(dataset_config).build(context)


def _refuse(text: str) -> None:
    raise ConfigurationError(f"EnergonDatasetConfig: {text}")


def _check_number(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    check_number(f"EnergonDatasetConfig: {name}", value, least, optional=optional)


def _check_plain(where: str, value: Any) -> None:
    if isinstance(value, str | int | float | bool | Path | None):
        return
    if isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            _check_plain(f"{where}[{number}]", entry)
        return
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, entry in value.items():
            _check_plain(f"{where}[{key!r}]", entry)
        return
    _refuse(
        f"{where} is a {type(value).__name__}; only strings, numbers, paths, None and lists, tuples and dicts of them "
        "can be declared. Pass objects to EnergonMultiModalDataModule itself"
    )

"""The dataset provider of Megatron-LM's `pretrain`, with `--dataloader-type external`.

    from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider

    provider = train_valid_test_dataloaders_provider(lambda: EnergonMultiModalDataModule(...))
    pretrain(provider, model_provider, ModelType.encoder_or_decoder, forward_step, ...)

The loop's contract: it calls the provider on every rank (`is_distributed`), after loading the checkpoint, and once for
each model chunk with virtual pipeline parallelism (`shared_stream.py`). It expects iterators (nobody calls `iter` on
them), None for a split without data, and a length that is never 0. `next()` is one microbatch. The loop saves the
training iterator by its `save_state()`, one file per data-parallel rank (`rank_files.py`), but restores nothing. The
provider does, before the first batch and from the files of all ranks, so the number of ranks may have changed. The loop
cannot save the iterators of virtual pipeline stages; they need `resume="seek"`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.encoder.hooks import Hook, is_overridden
from energon_bridge.core.errors import ConfigurationError, StepMismatchError, check_choice
from energon_bridge.core.loader.saved_run import State
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.trainers.datamodule import EnergonMultiModalDataModule
from energon_bridge.trainers.rank_files import read_rank_files
from energon_bridge.trainers.replica.groups import data_parallel_group, parallel_place
from energon_bridge.trainers.shared_stream import Chunk, SharedStream

__all__ = ["Provider", "read_rank_files", "train_valid_test_dataloaders_provider"]

logger = logging.getLogger(__name__)

LoaderRanks = Literal["all", "tp0_pp_edges"]

Resume = Literal["files", "seek"]

Iterators = EnergonDataloader | Chunk | list[EnergonDataloader] | list[Chunk] | None


class Provider(Protocol):
    """The function that Megatron-LM's `pretrain` calls for its data iterators."""

    is_distributed: bool

    def __call__(
        self, train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
    ) -> tuple[Iterators, Iterators, None]: ...


def train_valid_test_dataloaders_provider(
    make_data: Callable[[], EnergonMultiModalDataModule],
    *,
    loader_ranks: LoaderRanks = "all",
    validation_sets: Literal["one", "each"] = "one",
    resume: Resume = "files",
    arguments: Callable[[], Any] | None = None,
) -> Provider:
    """Return the provider of a run.

    Args:
        make_data: Makes the data module; called once, after Megatron-LM has initialised its groups. Its
            `replica_loading` says whether the ranks of a replica load by themselves or one loads for all.
        loader_ranks: Ranks that get iterators. `all`: every rank must call `next()` once for each microbatch.
            `tp0_pp_edges`: tensor rank 0 of the first and the last pipeline stage, as in Megatron-LM's multimodal
            example, whose `get_batch` broadcasts over the tensor ranks; the others get None.
        validation_sets: `one` iterator over the validation data, or one for `each` dataset of the mix, in a list
            (Megatron-LM's `--multiple-validation-sets`).
        resume: How the training data finds the iteration of a checkpoint. `files`: by what Megatron-LM has saved.
            `seek`: by arithmetic, from the samples that the model has seen; nothing is read. That is exact where the
            task encoder skips no sample; encoders that pack or group are refused. It needs no `--dataloader-save`, with
            which runs that have virtual pipeline stages fail (Megatron-LM up to 0.19).
        arguments: Returns Megatron-LM's arguments; default: `megatron.training.get_args`. Looked at are `iteration`,
            `dataloader_load` or else `dataloader_save` (where the state of the data is; an option that the program
            adds, as for Megatron-LM's own saving), `micro_batch_size`, `global_batch_size`, `consumed_train_samples`,
            `data_parallel_size`, `gtp_weight_remat_size`, `full_validation` and the batch sizes of validation.

    Returns:
        A function of `(train_val_test_num_samples, vp_stage=None)` that returns `(train, valid, None)`. Of the numbers
        only 0 matters: there is no iterator then.

    Raises:
        ConfigurationError: The options do not fit together; when called, also arguments that are not those of the data.
        StateError: When called: the state of the data does not fit.
    """
    check_choice("loader_ranks", loader_ranks, get_args(LoaderRanks))
    check_choice("validation_sets", validation_sets, ("one", "each"))
    check_choice("resume", resume, get_args(Resume))
    run = _Run(make_data, loader_ranks, validation_sets == "each", resume, arguments or _megatron_arguments)

    def provider(
        train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
    ) -> tuple[Iterators, Iterators, None]:
        return run.iterators(train_val_test_num_samples, vp_stage)

    # An attribute of the function, which is where Megatron-LM looks for it.
    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider  # type: ignore[return-value]


@dataclass(eq=False)
class _Run:
    """State shared by the calls of one provider: the data module, and the streams that model chunks share."""

    _make_data: Callable[[], EnergonMultiModalDataModule]
    _loader_ranks: LoaderRanks
    _each: bool
    _resume: Resume
    _arguments: Callable[[], Any]
    _data: EnergonMultiModalDataModule | None = None
    _train: SharedStream | None = None
    _valid: list[SharedStream] | None = None

    def iterators(self, counts: Sequence[int | None], vp_stage: int | None) -> tuple[Iterators, Iterators, None]:
        if self._data is None:
            self._data = self._make_data()
            _check_sizes(self._data, self._arguments())
            if self._resume == "seek":
                _check_can_seek(self._data)
        if vp_stage is not None and self._arguments is _megatron_arguments:
            _check_not_saved(self._arguments())
        if not self._loads(self._data, vp_stage):
            return None, None, None
        train = valid = None
        if counts[0] != 0:
            train = self._read(self._training(self._data), vp_stage)
        if counts[1] != 0:
            read = [self._read(stream, vp_stage) for stream in self._validation(self._data)]
            valid = read if self._each else read[0]
        return train, valid, None  # type: ignore[return-value]  # lists of one kind

    def _loads(self, data: EnergonMultiModalDataModule, vp_stage: int | None) -> bool:
        """Whether this rank, or this model chunk, gets iterators."""
        if self._loader_ranks == "all":
            return True
        if data.replica_loading == "one_rank":
            raise ConfigurationError(
                "loader_ranks='tp0_pp_edges' leaves ranks without an iterator, but with replica_loading='one_rank' "
                "every rank of a replica takes part in every batch: use loader_ranks='all'"
            )
        if data.balance != "none":
            raise ConfigurationError(
                "loader_ranks='tp0_pp_edges' leaves ranks without an iterator, but with balance='global_batch' all "
                "processes must read the training data: use loader_ranks='all'"
            )
        tensor_rank, _ = parallel_place("tp", data.pg_collection)
        stage, stages = parallel_place("pp", data.pg_collection)
        chunks = _model_chunks()
        first = stage == 0 and not vp_stage
        last = stage == stages - 1 and (vp_stage is None or vp_stage == chunks - 1)
        return tensor_rank == 0 and (first or last)

    def _read(self, stream: SharedStream, vp_stage: int | None) -> EnergonDataloader | Chunk:
        return stream.dataloader if vp_stage is None else stream.reader()

    def _training(self, data: EnergonMultiModalDataModule) -> SharedStream:
        if self._train is None:
            train = data.train_dataloader()
            train.length = train.length or max(1, len(train.loader))
            self._restore(data, train)
            train.on_delivery = _with_pixels if data.roles is None else _roles_with_pixels
            self._train = SharedStream(train)
        return self._train

    def _validation(self, data: EnergonMultiModalDataModule) -> list[SharedStream]:
        if self._valid is None:
            dataloaders = data.val_dataloaders() if self._each else [data.val_dataloader()]
            microbatches = _microbatches_of_full_validation(self._arguments())
            for dataloader in dataloaders:
                dataloader.on_delivery = _with_pixels if data.roles is None else _roles_with_pixels
            for dataloader in dataloaders if microbatches else ():
                dataloader.length = -(-len(dataloader) // microbatches)
            self._valid = [SharedStream(dataloader) for dataloader in dataloaders]
        return self._valid

    def _restore(self, data: EnergonMultiModalDataModule, train: EnergonDataloader) -> None:
        """Continue from the files of the iteration that Megatron-LM has loaded, if it has loaded one."""
        arguments = self._arguments()
        iteration = getattr(arguments, "iteration", 0) or 0
        root = getattr(arguments, "dataloader_load", None) or getattr(arguments, "dataloader_save", None)
        if not iteration:
            return
        if self._resume == "seek":
            train.loader.seek(arguments.consumed_train_samples // (data.micro_batch_size * _data_ranks(arguments)))
            return
        if root is None:
            logger.warning(
                "the model continues from iteration %d, but the data starts from the beginning, because neither "
                "--dataloader-load nor --dataloader-save gives its state",
                iteration,
            )
            return
        consumed = getattr(arguments, "consumed_train_samples", None)

        def states() -> list[State]:
            found = read_rank_files(root, iteration, group=data_parallel_group(data.pg_collection))
            _check_consumed(found[0], consumed, data.micro_batch_size, f"{root}, iteration {iteration}")
            return found

        train.restore_state(states)


def _with_pixels(batch: Any) -> Any:
    """Convert pixels that were transferred as bytes to floats, on this rank's GPU if it has one."""
    if meta_field(batch, "pixel_norm") is None:
        return batch
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # without initialising CUDA
    return normalise_on_device(batch, torch.device("cuda", torch.cuda.current_device()) if in_use else None)


def _roles_with_pixels(step: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _with_pixels(batch) for name, batch in step.items()}


def _megatron_arguments() -> Any:
    """Return Megatron-LM's arguments, or None if it is not running."""
    # If it was never imported, there are no arguments.
    training = sys.modules.get("megatron.training")
    return None if training is None else training.get_args()


def _model_chunks() -> int:
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    size = None if parallel_state is None else parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return size or 1


def _check_sizes(data: EnergonMultiModalDataModule, arguments: Any) -> None:
    """Check that the batch sizes are those of Megatron-LM, which counts microbatches by its own."""
    for name in ("micro_batch_size", "global_batch_size", "eval_micro_batch_size"):
        asked = getattr(arguments, name, None)
        given = getattr(data, name.removeprefix("eval_"))
        if asked is None or given == asked or (name, given) == ("global_batch_size", 1):
            continue
        raise ConfigurationError(
            f"{name} is {asked} in the arguments of Megatron-LM but {given} in the data module: set both to the same "
            "value"
        )


def _check_can_seek(data: EnergonMultiModalDataModule) -> None:
    """Refuse encoders with which a step number does not determine the samples before it."""
    packs = data.packing_buffer_size is not None
    by_length = data.max_tokens_per_microbatch is not None
    if packs or by_length or is_overridden(data.task_encoder, Hook.GROUP):
        does = (
            "max_tokens_per_microbatch selects" if by_length else f"the task encoder {'packs' if packs else 'groups'}"
        )
        raise ConfigurationError(
            f"resume='seek' finds a step by counting samples, but {does} them, so their number differs from step to "
            "step: use resume='files' and --dataloader-save"
        )


def _check_not_saved(arguments: Any) -> None:
    """Refuse what would crash at the first checkpoint: each stage has an iterator, and only one can be saved."""
    if getattr(arguments, "dataloader_save", None):
        raise ConfigurationError(
            "--dataloader-save is given, but Megatron-LM cannot save the iterators of virtual pipeline stages (the "
            "first checkpoint fails: 'list' object has no attribute 'iterable'). Leave it out, and pass the provider "
            "resume='seek', which needs no state"
        )


def _microbatches_of_full_validation(arguments: Any) -> int:
    """Return how many microbatches a rank takes in an iteration of validation, 0 without `--full-validation`.

    There Megatron-LM makes as many iterations as the iterator is long, each of that many microbatches.
    """
    if not getattr(arguments, "full_validation", False):
        return 0
    # Sizes of their own for validation came with 0.18.
    micro, whole = (
        getattr(arguments, f"eval_{name}", None) or getattr(arguments, name)
        for name in ("micro_batch_size", "global_batch_size")
    )
    return max(1, whole // (micro * _data_ranks(arguments)))


def _data_ranks(arguments: Any) -> int:
    """Return how many ranks get microbatches of their own."""
    # From 0.19 on, `data_parallel_size` leaves out the peers of generalised tensor parallelism.
    return int(arguments.data_parallel_size) * int(getattr(arguments, "gtp_weight_remat_size", None) or 1)


def _check_consumed(state: State, consumed: int | None, micro_batch_size: int, where: str) -> None:
    """Raise for a state at another position than the model's."""
    if consumed is None or state["microbatches"] * micro_batch_size == consumed:
        return
    raise StepMismatchError(
        f"{where}: the data was saved after {state['microbatches']} microbatches of {micro_batch_size} samples, but "
        f"the model has seen {consumed} samples: the files belong to another run, or to another number of "
        "samples per step. Give the folder that belongs to the checkpoint"
    )

"""The dataset provider of Megatron-LM's `pretrain`, `--dataloader-type external`, and the files that keep its state.

    from energon_bridge.trainers.megatron_lm import train_valid_test_dataloaders_provider

    provider = train_valid_test_dataloaders_provider(lambda: EnergonMultiModalDataModule(...))
    pretrain(provider, model_provider, ModelType.encoder_or_decoder, forward_step, ...)

The loop's contract: it calls the provider on every rank (`is_distributed`), after loading the checkpoint, and once for
each model chunk with virtual pipeline parallelism. It expects iterators (nobody calls `iter` on them), None for a split
without data, and a length that is never 0. `next()` is one microbatch. The loop saves the training iterator by its
`save_state()`, one file per data-parallel rank (`read_rank_files`), but restores nothing. The provider does, before the
first batch and from the files of all ranks, so the number of ranks may have changed. The loop cannot save the iterators
of virtual pipeline stages; they need `resume="seek"`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.encoder.hooks import Hook, is_overridden
from energon_bridge.core.errors import (
    ConfigurationError,
    LoaderError,
    MissingRankError,
    StateError,
    StateFormatError,
    StepMismatchError,
    check_choice,
)
from energon_bridge.core.loader.document import State, read_lanes
from energon_bridge.core.loader.summary import read_states
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.trainers.datamodule import EnergonMultiModalDataModule
from energon_bridge.trainers.replica.groups import data_parallel_group, parallel_place

# ---------------------------------------------------------------------------------------------------------------------
# The files in which Megatron-LM and Megatron-Bridge keep the state of the data, one for each data-parallel rank.
#
# A file is what `torch.save({"dataloader_state_dict": state}, path)` writes, with `save_state()` of a rank as the
# state:
#
#     Megatron-LM      ROOT/iter_0000100/mp_rank_00/train_dataloader_dprank000.pt    (mp_rank_00_000 with pipelines)
#     Megatron-Bridge  ROOT/iter_0000100/train_dataloader_dprank000.pt
#
# A state holds the lanes of its rank. Together, the files of an iteration hold every lane exactly once, whatever the
# number of ranks was; so they are read together, and a run can resume on any number of ranks. Files left over from an
# earlier run in the same folder show up as duplicate lanes or as different steps, and raise an error.


T = TypeVar("T")

_NAME = re.compile(r"train_dataloader_dprank(\d+)\.pt")


def read_rank_files(root: str | os.PathLike[str], iteration: int, *, group: Any = None) -> list[State]:
    """Return the states of all ranks at an iteration, after checking that they are complete and of one run.

    Args:
        root: `--dataloader-save`, or the folder of Megatron-Bridge.
        iteration: Iteration of the checkpoint.
        group: Process group whose ranks all call this and share the reading, so that each file is read once and not by
            every rank; None reads all files here.

    Raises:
        StateFormatError: There are no files, one cannot be read, or a lane occurs twice.
        StepMismatchError: The files are from different steps.
        MissingRankError: Files are missing.
    """
    folder = Path(root) / f"iter_{iteration:07d}"
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    # Listed by one rank, because others may see new files later.
    files = _of_all(lambda: [] if rank else _files(folder), group)[0]
    states: list[Any] = [None] * len(files)
    for first, read in enumerate(_of_all(lambda: [_read(path) for path in files[rank::ranks]], group)):
        states[first::ranks] = read
    _check_one_run(folder, files, states)
    return states


def _of_all(make: Callable[[], T], group: Any) -> list[T]:
    """Return the results of all ranks of a group, in order; an error on one of them is raised on all."""
    if group is None or group.size() == 1:
        return [make()]
    own: T | StateError
    try:
        own = make()
    except StateError as error:
        own = error
    except Exception as error:  # the others wait for an answer
        own = StateFormatError(f"rank {group.rank()} of {group.size()} failed to read its files: {error!r}")
    answers: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(answers, own, group=group)
    for one in answers:
        if isinstance(one, StateError):
            raise one
    return answers


def _files(folder: Path) -> list[Path]:
    """Return the files of an iteration; raises if there is a gap in their numbers."""
    files = sorted(path for path in folder.rglob("train_dataloader_dprank*.pt") if _NAME.fullmatch(path.name))
    if not files:
        raise StateFormatError(
            f"{folder}: contains no state of the data (train_dataloader_dprank000.pt and so on). Give the folder of "
            "--dataloader-save; to start the data from the beginning, give none"
        )
    numbers = {int(path.name.removeprefix("train_dataloader_dprank").removesuffix(".pt")) for path in files}
    missing = sorted(set(range(max(numbers) + 1)) - numbers)
    if missing:
        raise MissingRankError(
            f"{folder}: train_dataloader_dprank{missing[0]:03d}.pt is missing, but the one of rank {max(numbers)} "
            f"exists: the checkpoint was not completely written or copied. Use an earlier one"
        )
    return files


def _read(path: Path) -> State:
    states = read_states([path])
    if len(states) > 1:
        raise StateFormatError(f"{path}: contains {len(states)} states; expected one in the file of a rank")
    return states[0]


def _check_one_run(folder: Path, files: Sequence[Path], states: Sequence[State]) -> None:
    owner: dict[int, Path] = {}
    for path, state in zip(files, states, strict=True):
        if state["microbatches"] != states[0]["microbatches"]:
            raise StepMismatchError(
                f"{folder}: {files[0].relative_to(folder)} was saved after {states[0]['microbatches']} microbatches of "
                f"the run, {path.relative_to(folder)} after {state['microbatches']}: one of them is left over from an "
                "earlier run in this folder. Delete it, or use another checkpoint"
            )
        for lane in read_lanes(state):
            if lane in owner:
                raise StateFormatError(
                    f"{folder}: lane {lane} is in {owner[lane].relative_to(folder)} and in "
                    f"{path.relative_to(folder)}: the files were written by different numbers of ranks, so some are "
                    "left over from an earlier run in this folder. Delete the older ones"
                )
            owner[lane] = path
    lanes = states[0]["num_lanes"]
    if len(owner) < lanes:
        raise MissingRankError(
            f"{folder}: the {len(files)} files hold {len(owner)} of the {lanes} lanes of the run, so files of more "
            "ranks are missing. The checkpoint was not completely written or copied. Use an earlier one"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The dataset provider of Megatron-LM's `pretrain`, with `--dataloader-type external`.


logger = logging.getLogger(__name__)

LoaderRanks = Literal["all", "tp0_pp_edges"]

Resume = Literal["files", "seek"]

# Model chunks ---------------------------------------------------------------------------------------------------------
#
# With virtual pipeline parallelism, one process has several model chunks. All must see the same microbatches, and each
# calls `next()` itself. They share one loader: the chunk that is ahead reads, and its batches wait for the others. A
# chunk that never asks (its stage needs no data) would let that queue grow forever, so a chunk that falls `LIMIT`
# microbatches behind is cut off.


LIMIT = 256
"""Maximum microbatches waiting for one chunk. The schedule lets chunks differ by about the number of pipeline
stages."""


class SharedStream:
    """Hands the batches of one dataloader to several readers."""

    def __init__(self, dataloader: EnergonDataloader) -> None:
        self.dataloader = dataloader
        self._waiting: list[deque[Any] | None] = []

    def reader(self) -> Chunk:
        """Return a reader that begins with the next batch."""
        self._waiting.append(deque())
        return Chunk(self, len(self._waiting) - 1)

    def take(self, number: int) -> Any:
        """Return the next batch of a reader."""
        own = self._waiting[number]
        if own is None:
            raise LoaderError(
                f"model chunk {number} is {LIMIT} microbatches behind the others: every chunk that needs data must "
                "call next() once per microbatch"
            )
        if own:
            return own.popleft()
        batch = next(self.dataloader)
        for other, waiting in enumerate(self._waiting):
            if other != number and waiting is not None:
                waiting.append(batch)
                if len(waiting) > LIMIT:
                    self._waiting[other] = None
        return batch

    def forget(self) -> None:
        """Drop waiting batches: the stream continues elsewhere."""
        self._waiting = [deque() for _ in self._waiting]


class Chunk:
    """The stream as one model chunk sees it, with the methods of `EnergonDataloader` that Megatron-LM looks for."""

    def __init__(self, stream: SharedStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        """Return the chunk itself: passes are those of the shared stream, which starts over at its end."""
        return self

    def __next__(self) -> Any:
        return self._stream.take(self._number)

    def __len__(self) -> int:
        return len(self._stream.dataloader)

    def save_state(self) -> Any:
        """Return the state of the shared stream: between steps, when all chunks have had the same batches."""
        return self._stream.dataloader.save_state()

    def restore_state(self, state: Any) -> None:
        """Continue all chunks from a state."""
        self._stream.dataloader.restore_state(state)
        self._stream.forget()


# The provider ---------------------------------------------------------------------------------------------------------

Iterators = EnergonDataloader | Chunk | list[EnergonDataloader] | list[Chunk] | None

Split = tuple[Iterators, Iterators, Iterators]


class Provider(Protocol):
    """What `pretrain` calls."""

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


class _Run:
    """State shared by the calls of one provider: the data module, and the streams that model chunks share."""

    def __init__(
        self,
        make_data: Callable[[], EnergonMultiModalDataModule],
        loader_ranks: LoaderRanks,
        each: bool,
        resume: Resume,
        arguments: Callable[[], Any],
    ) -> None:
        self._make_data = make_data
        self._loader_ranks = loader_ranks
        self._each = each
        self._resume = resume
        self._arguments = arguments
        self._data: EnergonMultiModalDataModule | None = None
        self._train: SharedStream | None = None
        self._valid: list[SharedStream] | None = None

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
        train_count = counts[0]
        valid_count = counts[1]
        train = valid = None
        if train_count != 0:
            train = self._read(self._training(self._data), vp_stage)
        if valid_count != 0:
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
            train.on_delivery = _with_pixels
            self._train = SharedStream(train)
        return self._train

    def _validation(self, data: EnergonMultiModalDataModule) -> list[SharedStream]:
        if self._valid is None:
            dataloaders = data.val_dataloaders() if self._each else [data.val_dataloader()]
            microbatches = _microbatches_of_full_validation(self._arguments())
            for dataloader in dataloaders:
                dataloader.on_delivery = _with_pixels
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
    if (batch.get("pixel_norm") if isinstance(batch, dict) else getattr(batch, "pixel_norm", None)) is None:
        return batch
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # without initialising CUDA
    return normalise_on_device(batch, torch.device("cuda", torch.cuda.current_device()) if in_use else None)


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

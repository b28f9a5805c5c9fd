"""The savable loader: delivers the microbatches of one rank and always knows the state of what it delivered.

Only the loader is stateful. Its `Position` has the number of microbatches the whole run has delivered and, for each
lane of its rank, the state that came along with the lane's last delivered microbatch. What workers or threads have made
ahead is not part of it, so saving asks nobody anything and restoring replays nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GenericAlias
from typing import Any, ClassVar, NoReturn, get_args

import torch
import torch.utils.data

from energon_bridge.core.errors import ConfigurationError, WrongUseError, check_choice, check_number
from energon_bridge.core.loader import saved_run
from energon_bridge.core.loader.advice import advise, say_waiting
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.delivery import Delivery, Iteration
from energon_bridge.core.loader.fits import read_all
from energon_bridge.core.loader.metrics import AT_ANY_TIME, flat_metrics, name_losses
from energon_bridge.core.loader.no_dataloader import DATASET_IS_NO_LOADER, NotForDataLoader
from energon_bridge.core.loader.opening import open_pipeline
from energon_bridge.core.loader.outstanding import Outstanding, check_keeps
from energon_bridge.core.loader.position import FinitePass, OnMismatch, Position
from energon_bridge.core.loader.ranks import merged_state, warn_of_other_beginnings
from energon_bridge.core.loader.run_plan import plan_run
from energon_bridge.core.loader.workers import Work
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.samples.showing import counted, described
from energon_bridge.core.stream.again import describe, restore_sample
from energon_bridge.core.stream.leaf import Leaf
from energon_bridge.core.stream.pipeline import Pipeline
from energon_bridge.core.stream.watchdog import WatchdogSettings
from energon_bridge.core.worker_config import WorkerConfig, trainer_groups

LOADER_IS_NO_DATASET = (
    "a loader of energon_bridge gives whole batches, in an order of its own, and starts the workers itself: iterate it "
    "as it is, `for batch in loader`, and not through torch.utils.data.DataLoader(loader). The number of samples in a "
    "batch goes to get_train_dataset(batch_size=…), that of workers to WorkerConfig(num_workers=…)"
)


class SavableDataLoader(NotForDataLoader, torch.utils.data.DataLoader[Any]):
    """Loads the microbatches of one data-parallel rank; its position can be saved and restored.

    Examples:
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4))
        >>> for step, batch in zip(range(3), loader):
        ...     pass
        >>> loader.metrics()["samples"]
        12
        >>> loader.seek(1000)  # at once: the order is arithmetic

    A training stream is endless, and every `iter()` continues where the last one stopped; with `repeat=False` it ends
    after each pass, and with a virtual epoch after so many steps. A validation stream is finite; every `iter()` starts
    it again (the first one after a restore continues from there).

    Args:
        dataset: From `get_train_dataset` or `get_val_dataset`.
        worker_config: Default: the one the dataset was made with.
        on_mismatch: What becomes of a state of another mix: "refuse" it, or "adapt" to it.
        watchdog: How long a microbatch may take; None: as long as it likes.
        keep_until_done: Keep what is delivered until `done` or `drop`.
        repeats: Rollouts of each sample that is kept.
    """

    _refusal: ClassVar[str] = LOADER_IS_NO_DATASET
    _delivery_kind: ClassVar[type[Delivery]] = Delivery
    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations of energon users give it type arguments

    def __init__(
        self,
        dataset: DatasetSpec,
        *,
        worker_config: WorkerConfig | None = None,
        on_mismatch: OnMismatch = "refuse",
        watchdog: WatchdogSettings | None = None,
        keep_until_done: bool = False,
        repeats: int = 1,
    ) -> None:
        self.watchdog = watchdog
        self.spec = dataset
        self.config = config = worker_config or dataset.worker_config
        self.on_mismatch = on_mismatch
        check_choice("on_mismatch", on_mismatch, get_args(OnMismatch))
        by_grids = getattr(dataset.settings.task_encoder, "runs_elsewhere", False)  # which know better than a trainer
        for groups in () if by_grids else trainer_groups():
            groups.check_data_parallel(config.dp_rank, config.dp_size, by_group=config.data_parallel_group is not None)
        dataset.check_types()
        self._delivery = self._delivery_kind(dataset, config, watchdog)
        self._compared = False
        repeats = check_number("repeats", repeats, 1)
        if keep_until_done:
            check_keeps(dataset)
            group = config.data_parallel_group
            self._position.out = Outstanding(repeats, dataset.rows, config.dp_rank, config.dp_size, group)
        elif repeats > 1:
            raise ConfigurationError(f"repeats={repeats} counts rollouts, with keep_until_done=True: pass both")
        workers = config.num_workers
        with warnings.catch_warnings():
            # DataLoader would warn of every loader that the machine has fewer cores; `advise` warns once.
            warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes")
            # Trainers check that a loader is a DataLoader, and read these attributes. No code of DataLoader ever runs.
            super().__init__(
                _NoSamples(),
                batch_size=None,
                num_workers=workers,
                prefetch_factor=config.prefetch_factor if workers else None,
                persistent_workers=bool(workers and dataset.ends and config.persistent_workers),
            )
        advise(self._position)

    # Delivering ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator type
        self._compare_beginnings()
        self._delivery.begin(persistent=self.persistent_workers)
        return Iteration(self._delivery)

    def _compare_beginnings(self) -> None:
        """Warn if the ranks of an endless run begin it at different places; once a loader."""
        config = self.config
        if self._compared or self.spec.ends or config.dp_size == 1 or config.serves is not None:
            return
        self._compared = True
        leaves = [leaf.identity for leaf in self._position.plan.leaves]
        run = f"{config.dp_size}/{key_of(config.run_seed, *leaves):016x}"
        warn_of_other_beginnings(run, self.microbatches, config.dp_rank)

    def __len__(self) -> int:
        """Return the steps of a finite stream or virtual epoch, or this rank's microbatches in an epoch of the data."""
        known = self.spec.settings.conventions.listing_has_length or not self.spec.listed

        def end() -> int:
            position = self._position
            if known and isinstance(position, FinitePass):
                return position.end
            return plan_run(self.spec, self.config).end_of_pass(0)

        return self.spec.num_batches(self.config.dp_size, end)

    def __reduce__(self) -> NoReturn:
        raise WrongUseError(
            "a loader cannot be pickled or copied, because it has workers and open files. Send its path, settings and "
            "WorkerConfig, and call get_savable_loader there. To send its position too, send the plain dict of "
            "loader.save_state_rank() and pass it to loader.restore_state_rank"
        )

    def __repr__(self) -> str:
        config = self.config
        position = self._position
        done = f"{counted(position.microbatches, 'microbatch', 'microbatches')} delivered by the run"
        lanes = "" if self.spec.ends else f", {counted(position.plan.num_lanes, 'lane')}"
        return described(
            f"{type(self).__name__} of rank {config.dp_rank} of {config.dp_size}, "
            f"{counted(config.num_workers, 'worker')}{lanes}, {done}",
            [repr(self.spec)],
        )

    def deliver(self) -> Any:
        """Return the next microbatch of this rank."""
        return self._delivery.next()

    @property
    def _position(self) -> Position:
        return self._delivery.position

    @property
    def ownership(self) -> Ownership:
        """Which rank delivers which lane, for the run as it was started or last restored."""
        return self._position.ownership

    @property
    def microbatches(self) -> int:
        """Microbatches that the whole run has delivered; of a finite stream, in this pass."""
        return self._position.microbatches

    @property
    def make_seconds(self) -> float:
        """Time that all processes took for the microbatches delivered since this loader was made."""
        return self._delivery.seconds[0]

    @property
    def pins(self) -> bool:
        """Whether batches are copied to pinned memory."""
        return self._delivery.pins

    def work(self, worker: int, barred: frozenset[tuple[int, int]], careful: bool) -> Work:
        """Return the work of a worker of this loader, beginning after what was delivered."""
        return self._delivery.work(worker, barred, careful)

    def leaves(self) -> Sequence[Leaf]:
        """Return the leaves of the mix, in the order of the run."""
        return self._position.plan.leaves

    def close(self) -> None:
        """Stop workers and threads; the next batch starts them again."""
        self._delivery.close()

    # State -----------------------------------------------------------------------------------------------------------

    def save_state_rank(self) -> saved_run.State:
        """Return the state of this rank: its lanes as delivered. Takes no communication."""
        return self._position.state()

    def snapshot(self) -> Callable[[], saved_run.State]:
        """Return a function that returns the state of this rank as it is now; it costs little until it is called."""
        return self._position.copied().state

    def counters(self) -> list[saved_run.State]:
        """Return what each leaf gave to this rank since the run began: a row of plain values for each.

        A sample counts when its microbatch is delivered, not when a worker has made it. A state keeps the counters, and
        `seek` clears them. From a state of all ranks rank 0 continues the sum of their counters, the other ranks begin
        at 0: so sums over the ranks are those of the run. `draws` and `epochs` are of the lanes of this rank.
        Where lanes share packing buffers, losses of a buffer count at once, and its draws as each lane takes its packs:
        at first, `errors` and `skipped` run ahead of `draws`.

        Returns:
            Per leaf: `path`, `num_samples`; `draws`, `epochs` (draws / num_samples); `samples` delivered; `skipped`,
            `errors`, `excluded`, `banned`; `bytes` of the samples drawn; too long for a pack: `dropped`, `truncated`,
            `split`, `pieces`; `encoded_again`, of this loader alone; and what `leaf_rows` names besides.
        """
        return self._position.rows()

    def metrics(self) -> dict[str, float]:
        """Return what this rank did so far as plain numbers by name; `flat_metrics` describes the others.

        Returns:
            Samples: `samples` delivered, `skipped` (SkipSample), `errors`, `excluded`, `banned`; too long for a pack:
            `dropped` (also skipped), `truncated`, `split`, and the `pieces` of the split ones. `bytes` of the samples
            drawn. `ready`: microbatches made and not yet taken. Times end in `_seconds`, sizes in `_bytes`.
            With `keep_until_done`: `until_done/out`, and since the run began `until_done/done`, `/again`, `/dropped`.
        """
        name_losses(self._position, self.spec.failure_log, least=AT_ANY_TIME)
        found = flat_metrics(self.counters(), self._delivery.pool, self._delivery.seconds)
        return found if self._position.out is None else found | self._position.out.metrics()

    def restore_state_rank(
        self, state: saved_run.State | Sequence[saved_run.State], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Continue from a state: that of this rank, a global one, or a list of states of several ranks.

        The number of ranks and workers may differ from those that saved it.

        Args:
            state: The state, or the states.
            on_mismatch: "refuse" a state of another mix, or "adapt": leaves that are in both continue exactly, new
                ones start, and those that are gone are kept in the state and continue if they return; a blend by
                repetitions begins an epoch. Default: what the loader was made with.

        Raises:
            StateError: One of its subclasses, saying what does not fit.
        """
        if on_mismatch is not None:
            check_choice("on_mismatch", on_mismatch, get_args(OnMismatch))
        saved = read_all(state if isinstance(state, (list, tuple)) else [state])
        before = self._position.plan.num_lanes
        self._position.go_on_from(saved, on_mismatch or self.on_mismatch)
        self._delivery.moved()
        if self._position.plan.num_lanes != before:
            advise(self._position)

    def seek(self, step: int) -> None:
        """Go to a step of the run, as if no sample before it had been skipped; only arithmetic, nothing is read."""
        self._position.seek(step)
        self._delivery.moved()

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], *, from_draw: int | None = None) -> int:
        """Change the weights of a blend while it runs; the change is part of the state. All ranks must call it alike.

        Args:
            weights: A weight (a number or a `WeightSchedule`) for each dataset, by its name in `metrics()` or its path
                (of a join, the name of its first dataset), or a list in order of the mix.
            from_draw: Global draw from which they hold, until a later change that was set before; default: the first
                one that no rank has made. What was drawn for packs and groups counts as made; how far that goes
                depends on the microbatches delivered, and not on stops.

        Returns:
            The global draw from which they hold.

        Raises:
            ConfigurationError: That draw has been made, the stream has no weights, or a dataset has none.
        """
        start = self._position.set_weights(weights, from_draw)
        self._delivery.stop()  # batches made ahead used the old weights
        say_waiting(self._position, start, self.spec.failure_log)
        return start

    def ban(
        self,
        keys: Iterable[str],
        *,
        from_draw: int | None = None,
        dataset: str | None = None,
        ignore_unknown: bool = False,
    ) -> int:
        """Withdraw samples during the run; the state records it. All ranks must call it alike.

        Draws whose samples are banned are made and counted (`banned`), but nothing is read for them, and no other draw
        moves. What was drawn before, and waits in a pack buffer or a group, still comes. Keys that are banned already
        are no mistake. A state that is restored brings its own bans.

        Args:
            keys: Keys of samples as they are in the dataset; of a JSONL file the numbers of lines, of a join the keys
                of its primary. `load_keys` reads them from a file.
            from_draw: Global draw from which they are banned (of draws that were made, nothing is taken back, and a
                warning names the first one left); default: the first one that some lane has not made. Passes that are
                packed or grouped: from the next pass on. Validation takes none: there they are banned at once.
            dataset: Path of the only dataset in which they are banned; default: all, also those that join later.
            ignore_unknown: Warn of keys that no dataset has, and record them, instead of refusing all.

        Returns:
            The global draw from which they are banned.

        Raises:
            ConfigurationError: A key is unknown, or the ranks cannot agree on a draw.
            EmptyDatasetError: Nothing would be left.
        """
        before = self._position.plan
        start = self._position.ban(keys, from_draw, dataset, ignore_unknown)
        if self._position.plan is not before:
            self._delivery.stop()  # batches made ahead contain them
            self._delivery.last = None  # and so does what a masked microbatch would repeat
        return start

    # Samples that are out --------------------------------------------------------------------------------------------

    @property
    def keeps_until_done(self) -> bool:
        """Whether what is delivered is kept until it is done."""
        return self._position.out is not None

    @property
    def outstanding(self) -> dict[tuple[Any, ...], int]:
        """The rollouts left of each sample that was delivered to this rank and is not done, by restore key, in order.

        After a restore, those that come again are among them.
        """
        return {key: out.left for key, out in sorted(self._kept.out.items(), key=lambda item: item[1])}

    def done(self, keys: Any, *, ignore_unknown: bool = False) -> None:
        """Say that samples are done: they never come again. Takes no communication.

        With `repeats`, each time that a key is given is one rollout. After a restore, keys of samples that have not
        come again yet are known, too.

        Args:
            keys: The `__restore_key__` of a batch or a sample, or several of them.
            ignore_unknown: Leave out keys that are not out.

        Raises:
            WrongUseError: A key is not out, or no restore key; nothing was changed.
        """
        self._kept.finish(keys, ignore_unknown=ignore_unknown)

    def again(self, keys: Any, *, ignore_unknown: bool = False) -> None:
        """Let samples that are out come again, before all others; all ranks must call it alike, some without keys.

        The arguments and errors are those of `done`.
        """
        self._kept.again(keys, ignore_unknown=ignore_unknown)

    def drop(self, keys: Any, *, ignore_unknown: bool = False) -> None:
        """Give samples that are out up, with all of their rollouts; they are counted, and never come again.

        The arguments and errors are those of `done`.
        """
        self._kept.drop(keys, ignore_unknown=ignore_unknown)

    @property
    def _kept(self) -> Outstanding:
        if self._position.out is None:
            raise WrongUseError("this loader does not keep what it delivers: pass keep_until_done=True when making it")
        return self._position.out

    def save_state_global(self, global_dst_rank: int | None = None) -> saved_run.State | None:
        """Return the state of the whole run; every rank must call it.

        Args:
            global_dst_rank: Only this global rank gets the state (others None); default: every rank gets it.
        """
        return merged_state(
            self.save_state_rank(), self.config.dp_size, self.config.data_parallel_group, global_dst_rank
        )

    def restore_state_global(self, state: saved_run.State | None, *, src_rank: int | None = None) -> None:
        """Continue from the state of a whole run.

        Args:
            state: The state; with `src_rank` needed on that global rank only.
            src_rank: Global rank that sends the state to the other ranks of the data-parallel group.
        """
        if src_rank is not None and self.config.dp_size > 1:
            box = [state]
            torch.distributed.broadcast_object_list(box, src=src_rank, group=self.config.data_parallel_group)
            state = box[0]
        if state is None:
            raise ConfigurationError("restore_state_global: pass a state, or the src_rank that sends one")
        self.restore_state_rank(state)

    def state_dict(self) -> saved_run.State:
        """Return the state of the whole run if the ranks can reach each other, else of this rank."""
        if self.config.dp_size > 1 and not torch.distributed.is_initialized():
            return self.save_state_rank()
        state = self.save_state_global()
        assert state is not None
        return state

    def load_state_dict(self, state: saved_run.State) -> None:
        """Continue from what `state_dict` returned, on any number of ranks."""
        self.restore_state_rank(state)

    # Samples ---------------------------------------------------------------------------------------------------------

    def can_restore_sample(self) -> bool:
        """Whether `restore_sample` works: always."""
        return True

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """Return the batch or sample with a `__restore_key__`, encoded again: the identical one."""
        return restore_sample(self._pipeline(), tuple(restore_key))

    def describe_restore_key(self, restore_key: tuple[Any, ...]) -> str:
        """Name the samples of the `__restore_key__` of a batch or sample: dataset, shard and key of each."""
        return describe(self._pipeline(), tuple(restore_key))

    def _pipeline(self) -> Pipeline:
        plan = self._position.plan
        return open_pipeline(plan, threads=0, delivered=range(len(plan.leaves)))


class _NoSamples(torch.utils.data.IterableDataset[Any]):
    """The `dataset` of a loader, for trainers that ask: no sampler can be put in its place, and it has no samples."""

    def __iter__(self) -> NoReturn:
        raise WrongUseError(DATASET_IS_NO_LOADER)

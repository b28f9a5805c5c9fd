"""The iterator that training loops hold: a savable loader behind `next()`.

Two kinds of loop use it. Megatron-LM only calls `next()`, for training and validation, and never expects an end.
Lightning calls `iter()` at the start of every epoch and every validation. So:

- Over an endless (training) loader, `iter()` returns the object itself: there is one stream, and asking again does not
  start a second one.
- Over a finite (validation) loader, `iter()` starts one pass from the beginning, and `next()` cycles through passes.
  A loader has one stream at a time, so starting a pass ends the cycle: the `next()` after it starts over.
- With `cycle=True`, `iter()` of a finite loader cycles, too: loops of Megatron-Bridge take an iterator once or twice
  and call `next()` on it for the whole run. Each iterator keeps its own position; if another one has used the loader in
  between, the loader is moved back. `one_pass()` then reads the data once.

If the number of ranks R does not divide the number of lanes L, some ranks get in some steps a microbatch that does not
exist: real rows, with `__valid__` all false and `loss_mask` zero. A loss averaged over microbatches without regard to
the mask would be silently wrong, so such an R raises an error unless the caller says that the loss weighs by the mask.

*Delivered* means returned by `next()`. Nothing is fetched ahead here, so the state is always that of the batches the
training step has seen. Lightning fetches ahead of a loader without a length, which is why there is `length`.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, Literal, Protocol, get_args

from energon_bridge.core.errors import (
    ConfigurationError,
    EmptyDatasetError,
    MaskedMicrobatchesError,
    WrongUseError,
    check_choice,
)
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.no_dataloader import NotForDataLoader
from energon_bridge.core.loader.savable import LOADER_IS_NO_DATASET
from energon_bridge.core.loader.saved_run import FORMAT
from energon_bridge.core.registry import load
from energon_bridge.core.samples.showing import counted, described

MaskedMicrobatches = Literal["refuse", "allow"]


def cyclic_iter(iterable: Iterable[Any]) -> Iterator[Any]:
    """Go through an iterable again and again.

    Examples:
        >>> from itertools import islice
        >>> list(islice(cyclic_iter("abc"), 5))
        ['a', 'b', 'c', 'a', 'b']

    Raises:
        EmptyDatasetError: A pass yields nothing, so cycling would never end.
    """
    while True:
        empty = True
        for item in iterable:
            empty = False
            yield item
        if empty:
            raise EmptyDatasetError(
                f"cannot cycle through {type(iterable).__name__}: a pass over it yields nothing. Check the split "
                "part (energon info shows how many samples it has) and, on many ranks, batch_drop_last"
            )


class LoadingReplica(Protocol):
    """The ranks that train on the same batches, one of which loads: `make_replica` makes it."""

    @property
    def is_source(self) -> bool:
        """Whether this rank loads."""


def open_loader(loader: Any, replica: LoadingReplica | None = None, balance: object | None = None) -> Any:
    """Return the loader of this rank: its own, or what `trainers/replica` makes for several ranks.

    Args:
        loader: A loader, or a function without arguments that opens one; it may itself be callable.
        replica: From `make_replica`; None: every rank loads.
        balance: From `make_balance`; None: each rank runs what it loads.
    """
    if replica is not None or balance is not None:
        return load("loading", "replica").open_loader(loader, replica, balance)
    return loader() if callable(loader) and not hasattr(loader, "__iter__") else loader


class EnergonDataloader(NotForDataLoader):
    """An iterator over a savable loader, with the state methods that Megatron-LM and Lightning look for.

    Examples:
        >>> loader = get_savable_loader(get_train_dataset("data/captions", batch_size=4))
        >>> train = EnergonDataloader(loader)
        >>> batch = next(train)
        >>> state = train.save_state()  # as Megatron-LM asks for it

    Args:
        loader: What `get_savable_loader` returns, or a function that returns it. Any iterable will do where no state is
            asked for.
        length: For an endless loader: the batches that `len()` reports, the length of a virtual epoch. The stream
            itself goes on. None leaves the object without a length, as Megatron-LM expects.
        masked_microbatches: Whether a training loader may deliver microbatches that do not exist, on a number of ranks
            that does not divide `num_lanes`. `refuse`, the default, raises at once, also after a restore (a state may
            bring another `num_lanes`). `allow` is for loops whose loss is a mean over the real microbatches, or tokens,
            of all ranks: by `__valid__`, or by `loss_mask` and its sum over the ranks, as Megatron-LM does with
            `--calculate-per-token-loss`.
        cycle: Let `iter()` of a finite loader start over at its end, for loops that only ever call `next()`.
        repeat_epoch: Let every `iter()` of an endless loader start over at the beginning of the run, so that all epochs
            have the same batches (Lightning's `overfit_batches`). The first one after a restore continues.
        on_delivery: Called with every batch; its return value is delivered. Its time does not count as waiting.
        replica: From `make_replica`: one rank of the replica loads and broadcasts every batch to the others, which may
            pass None as loader. Pass a function that opens the loader, so that an error while opening reaches all.
            Every rank of the replica must then make the same calls; only `save_state` and `len` need no communication.
            None, the default: every rank loads by itself.
        balance: From `make_balance`: the data-parallel ranks divide the microbatches of each global batch by cost. A
            state can then be saved after whole global batches only. None, the default: each rank runs what it loads.

    Attributes:
        loader: The loader.
        length: The `len()` of an endless loader, or None.
        wait_seconds: Time spent inside `next()`, all batches together.
        batches: Batches delivered.

    Raises:
        ConfigurationError: There is no loader, or the length is invalid.
        MaskedMicrobatchesError: There would be masked microbatches, but they are not allowed.
    """

    _refusal: ClassVar[str] = LOADER_IS_NO_DATASET

    def __init__(
        self,
        loader: Any,
        *,
        length: int | None = None,
        masked_microbatches: MaskedMicrobatches = "refuse",
        cycle: bool = False,
        repeat_epoch: bool = False,
        replica: LoadingReplica | None = None,
        balance: object | None = None,
        on_delivery: Callable[[Any], Any] | None = None,
    ) -> None:
        if loader is None and (replica is None or replica.is_source):
            raise ConfigurationError(
                "EnergonDataloader(None): for a split without data, use None itself, since trainers take any "
                "EnergonDataloader for data"
            )
        if isinstance(loader, DatasetSpec):
            raise WrongUseError(
                "EnergonDataloader takes a loader, not a dataset: EnergonDataloader(get_loader(dataset))"
            )
        if length is not None and length < 1:
            raise ConfigurationError(f"EnergonDataloader: length must be at least 1, got {length}")
        check_choice("EnergonDataloader: masked_microbatches", masked_microbatches, get_args(MaskedMicrobatches))
        self.loader = open_loader(loader, replica, balance)
        self._is_broadcast = getattr(self.loader, "is_broadcast", False)
        self.on_delivery = on_delivery
        self.masked_microbatches = masked_microbatches
        self.wait_seconds = 0.0
        self.batches = 0
        self.length = length
        self.cycle = cycle
        self.repeat_epoch = repeat_epoch
        self._turns = _Turns()
        self._stream: _Cycle | None = None
        self._began = 0
        self._refuse_masked()

    @property
    def endless(self) -> bool:
        """Whether the stream never ends: our loaders say so; of another iterable, one without a length is endless."""
        if self._is_broadcast:
            return bool(self.loader.endless)
        spec = getattr(self.loader, "spec", None)
        return not isinstance(self.loader, Sized) if spec is None else not spec.ends

    def __iter__(self) -> Iterator[Any]:
        """Return the one stream of an endless loader; over a finite one start a pass or, with `cycle`, a cycle."""
        if self.endless:
            if self.repeat_epoch and self.batches != self._began:
                self.rewind()
            return self
        if not self.cycle:
            return self.one_pass()
        # Unlike a generator, it goes on after an error.
        return map(self._next_of, itertools.repeat(_Cycle(self.loader, self._turns)))

    def __next__(self) -> Any:
        """Return the next batch; a finite loader starts again at its end.

        After an error, the next call continues after the last delivered batch (a validation pass starts over).

        Raises:
            EmptyDatasetError: The loader yields nothing at all.
        """
        if self._stream is None:
            self._refuse_masked()  # the loader itself may have been restored
            self._stream = _Cycle(self.loader, self._turns)
        return self._next_of(self._stream)

    def one_pass(self) -> Iterator[Any]:
        """Return an iterator over one pass of a finite loader, from the beginning.

        Raises:
            WrongUseError: The loader is endless.
        """
        if self.endless:
            raise WrongUseError("one_pass: this EnergonDataloader is endless; take as many batches from it as you need")
        self._stream = None
        self._turns.give(None)
        return self._one_pass()

    def rewind(self) -> None:
        """Go back to the beginning of the run; all ranks must call it alike."""
        self.loader.seek(0)
        self._moved()

    def __repr__(self) -> str:
        done = f"{counted(self.batches, 'batch', 'batches')} delivered since it was made"
        return described(f"{type(self).__name__}, {done}", [repr(self.loader)])

    def __len__(self) -> int:
        """Return the batches of a pass, or the virtual length of an endless loader.

        Raises:
            TypeError: The loader is endless and no length was given.
        """
        if self.length is not None:
            return self.length
        if self.endless:
            raise TypeError("this EnergonDataloader is endless and has no len(); set one with length=")
        return len(self.loader)

    def save_state(self) -> Any:
        """Return the state of this data-parallel rank (what Megatron-LM writes, one file per rank)."""
        state = self.loader.save_state_rank()
        # Ranks of a replica may write the same file at the same time, so equal states must give equal bytes. A pickle
        # also depends on which of its strings are the same object; values read from JSON do not.
        return json.loads(json.dumps(state)) if isinstance(state, dict) and state.get("format") == FORMAT else state

    def restore_state(self, state: Any) -> None:
        """Continue from a state of `save_state`; the next batch is the one that followed it.

        Args:
            state: The state, a list of the states of several ranks, or a function that returns one of these; if one
                rank of a replica loads, only that rank calls it, and its errors reach all ranks.
        """
        self.loader.restore_state_rank(state() if callable(state) and not self._is_broadcast else state)
        self._moved()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole run, gathered over the data-parallel ranks: all of them must call this."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`, written on any number of ranks; loading it twice changes nothing."""
        self.loader.load_state_dict(state)
        self._moved()

    def ban(
        self,
        keys: Iterable[str],
        *,
        from_draw: int | None = None,
        dataset: str | None = None,
        ignore_unknown: bool = False,
    ) -> int:
        """Withdraw samples during the run (see `SavableDataLoader.ban`); all ranks must call it alike."""
        loader = self.loader
        given = list(keys)
        draw = int(loader.ban(given, from_draw=from_draw, dataset=dataset, ignore_unknown=ignore_unknown))
        self._turns.bans.append(lambda: loader.ban(given, dataset=dataset, ignore_unknown=True))
        return draw

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any], *, from_draw: int | None = None) -> int:
        """Change the weights of a mix during the run (see `SavableDataLoader.set_weights`); all ranks alike."""
        return int(self.loader.set_weights(weights, from_draw=from_draw))

    def done(self, keys: Any, *, ignore_unknown: bool = False) -> None:
        """Say that samples are done (see `SavableDataLoader.done`)."""
        self.loader.done(keys, ignore_unknown=ignore_unknown)

    def again(self, keys: Any, *, ignore_unknown: bool = False) -> None:
        """Let samples come again (see `SavableDataLoader.again`); all ranks must call it alike."""
        self.loader.again(keys, ignore_unknown=ignore_unknown)

    def drop(self, keys: Any, *, ignore_unknown: bool = False) -> None:
        """Give samples up (see `SavableDataLoader.drop`)."""
        self.loader.drop(keys, ignore_unknown=ignore_unknown)

    def metrics(self) -> dict[str, float]:
        """Return what this rank has loaded and how long it waited, as plain numbers by name, for loggers.

        Returns:
            `batches` and `wait_seconds` since this object was made, and what the loader's own `metrics` has.
        """
        of_loader = getattr(self.loader, "metrics", None)
        found: dict[str, float] = {} if of_loader is None else of_loader()
        return {"batches": self.batches, "wait_seconds": self.wait_seconds} | found

    def close(self) -> None:
        """Stop the worker processes, if the loader has any."""
        self._stream = None
        self._turns.give(None)
        close = getattr(self.loader, "close", None)
        if close is not None:
            close()

    def _moved(self) -> None:
        """Forget the positions of the iterators, since the loader itself was moved."""
        self._stream = None
        self._turns.bans.clear()
        self._began = self.batches
        holder = self._turns.holder()
        if holder is not None:
            holder.forget()
        self._refuse_masked()

    def _next_of(self, stream: Iterator[Any]) -> Any:
        """Return the next batch of a stream over the loader; count it, and the time it took."""
        start = time.perf_counter()
        batch = next(stream)
        self.wait_seconds += time.perf_counter() - start
        self.batches += 1
        return batch if self.on_delivery is None else self.on_delivery(batch)

    def _refuse_masked(self) -> None:
        """Raise if a training loader would deliver masked microbatches and they are not allowed."""
        # Validation pads its last step on any number of ranks, so its loops must use the mask anyway.
        ownership = getattr(self.loader, "ownership", None)
        if self.masked_microbatches == "allow" or ownership is None or not self.endless:
            return
        ranks = ownership.world_size
        if ranks > 1 and getattr(self.loader, "keeps_until_done", False):
            raise MaskedMicrobatchesError(
                f"keep_until_done: where fewer samples come again than the run has ranks ({ranks}), some ranks get a "
                "masked microbatch: rows with __valid__ all false and loss_mask 0. Leave such rows out of what is "
                "learned, and pass masked_microbatches='allow'"
            )
        if ownership.even:
            return
        lanes = ownership.num_lanes
        raise MaskedMicrobatchesError(
            f"{ranks} data-parallel ranks do not divide the {lanes} lanes of this run (num_lanes, fixed when it "
            f"started), so {100 * ownership.masked_share:.1f} % of the microbatches would be masked: rows with "
            "__valid__ all false and loss_mask 0. A loss that ignores these would be wrong. Continue with "
            f"{ownership.nearest_even_world_size()} ranks (the nearest number that divides {lanes}), or, if the loss "
            "is a mean over the real microbatches of all ranks, pass masked_microbatches='allow'"
        )

    def _one_pass(self) -> Iterator[Any]:
        stream = iter(self.loader)
        while True:
            try:
                batch = self._next_of(stream)
            except StopIteration:
                return
            yield batch


class _Turns:
    """Tracks which of several iterators uses a loader, which can be at one position at a time."""

    def __init__(self) -> None:
        self.holder: Callable[[], _Cycle | None] = _nobody
        self.bans: list[Callable[[], int]] = []  # given since the loader was restored; older positions are void

    def give(self, cycle: _Cycle | None) -> None:
        """Give the loader to an iterator; the one that had it keeps its position."""
        holder = self.holder()
        if holder is not None:
            holder.leave()
        # Weak, or an unused loader and its workers would wait for the garbage collector.
        self.holder = _nobody if cycle is None else weakref.ref(cycle)


def _nobody() -> None:
    return None


class _Cycle:
    """Cycles through a loader, and keeps its position while other iterators use the loader."""

    __slots__ = ("__weakref__", "_loader", "_state", "_stream", "_turns")

    def __init__(self, loader: Any, turns: _Turns) -> None:
        self._loader = loader
        self._turns = turns
        self._stream: Iterator[Any] | None = None
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stream is None:
            self._turns.give(self)
            if self._state is not None:
                if getattr(self._loader, "keeps_until_done", False):
                    raise WrongUseError(
                        "keep_until_done: this iterator was left for a later one, and going back would deliver again "
                        "what is out: use one iterator at a time"
                    )
                self._loader.restore_state_rank(self._state)
                self._state = None
                for ban in self._turns.bans:
                    ban()
            self._stream = cyclic_iter(self._loader)
        try:
            return next(self._stream)
        except BaseException:
            self._stream = None  # a generator that raised has ended, but the data has not
            raise

    def leave(self) -> None:
        """Save the position, since another iterator will use the loader; plain iterables need none."""
        save = getattr(self._loader, "save_state_rank", None)
        if save is not None and self._stream is not None:
            self._state = save()
            self._stream = None

    def forget(self) -> None:
        """Forget the saved position: continue wherever the loader is."""
        self._state = self._stream = None

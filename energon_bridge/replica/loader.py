"""The loader of a replica in which one rank loads: the others get its batches, its state, its length and its errors.

Every message but the batches of a pass and its `end` is an answer that the source has worked out: how the loader is
after it was opened or restored, a state of the whole run. All ranks must therefore make the same calls in the same
order, except that `save_state_rank` and `len` ask nobody: the state of the source comes along with every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from energon_bridge.errors import WrongUseError
from energon_bridge.loader.document import read
from energon_bridge.loader.metrics import flat_metrics
from energon_bridge.loader.summary import leaf_rows
from energon_bridge.replica.balance import Balance, balanced
from energon_bridge.replica.exchange import Exchange
from energon_bridge.replica.groups import Replica
from energon_bridge.replica.structure import check_keys, select
from energon_bridge.topology import Ownership

State = dict[str, Any]


def open_loader(loader: Any, replica: Replica | None, balance: Balance | None = None) -> Any:
    """Return the loader that a rank holds: its own, or one that is fed by the source of its replica.

    Args:
        loader: A loader, or a function without arguments that opens one. With a replica it matters on the source only.
        replica: From `make_replica`; None: every rank loads.
        balance: From `make_balance`: the ranks that load share the microbatches of a global batch out by their costs,
            before these are broadcast; None: each runs what it loads.

    Raises:
        BroadcastError: The source could not open its loader; every rank raises.
    """
    if replica is None or not replica.links:
        return balanced(_opened(loader), balance)
    return BroadcastLoader(lambda: balanced(_opened(loader), balance), replica)


def _opened(loader: Any) -> Any:
    """Return a loader, or what a function returns; a loader may be callable, too."""
    return loader() if callable(loader) and not hasattr(loader, "__iter__") else loader


class BroadcastLoader:
    """A loader on every rank of a replica, of which one loads.

    Args:
        loader: A loader, or a function that opens one; not looked at on ranks that do not load.
        replica: Who loads and who is fed.

    Attributes:
        endless: Whether the stream never ends.
        ownership: Which data-parallel rank delivers which lane; None where the loader does not say.
    """

    def __init__(self, loader: Any, replica: Replica) -> None:
        self.replica = replica
        self._exchange = Exchange(replica)
        self._loader: Any = None
        self._state: State | None = None
        self._unfinished: str | None = None
        self._stream: Iterator[Any] | None = None
        self._length: int | None = None
        self._checked = False
        self.endless = True
        self.ownership: Ownership | None = None

        def opened() -> None:
            self._loader = _opened(loader)

        self._change(opened)

    # Delivering ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Start a pass, as `iter` of the source's loader does; every rank must."""
        self._stream = None
        while True:
            try:
                yield self._next()
            except StopIteration:
                return

    def __len__(self) -> int:
        """Return the length of the source's loader.

        Raises:
            TypeError: It has none.
        """
        if self._length is None:
            raise TypeError("the loader of this replica has no length")
        return self._length

    def _next(self) -> Any:
        exchange = self._exchange
        if not self.replica.is_source:
            message = exchange.receive()
            if "end" in message:
                raise StopIteration
            self._note(message)
            return message["batch"]
        try:
            if self._stream is None:
                self._stream = iter(self._loader)
            batch = next(self._stream)
            saved = self._saved()
            self._note(saved)
            if not self._checked:
                for keys in (self.replica.keys, *(link.keys for link in self.replica.links)):
                    check_keys(batch, keys)
                self._checked = True
            parcels = exchange.pack(lambda keys: {"batch": select(batch, keys), **saved})
        except StopIteration:
            exchange.send(exchange.pack(lambda keys: {"end": True}))
            raise
        except Exception as error:
            exchange.send_error(error)
            raise
        exchange.send(parcels)
        return select(batch, self.replica.keys)

    # State -----------------------------------------------------------------------------------------------------------

    def save_state_rank(self) -> State | None:
        """Return the state of the source after the last batch that this rank got. Takes no communication.

        Raises:
            WrongUseError: Just now it has none: its microbatches are balanced, and this global batch is not over.
        """
        if self._unfinished is not None:
            raise WrongUseError(self._unfinished)
        return self._state

    def counters(self) -> list[State]:
        """Return a row for each leaf with draws, epochs and counters, as `leaf_rows` describes."""
        return [] if self._state is None else leaf_rows(read(self._state))

    def metrics(self) -> dict[str, float]:
        """Return what the source did so far as plain numbers by name; what only the source knows is 0 elsewhere."""
        own = getattr(self._loader, "metrics", None)
        found: dict[str, float] = flat_metrics(self.counters()) if own is None else own()
        return found

    def restore_state_rank(self, state: Any, **kwargs: Any) -> None:
        """Continue from a state (see `SavableDataLoader.restore_state_rank`), which is taken from the source.

        It may be a function that returns the state: the source calls it, and its errors reach every rank.
        """
        self._change(lambda: self._loader.restore_state_rank(state() if callable(state) else state, **kwargs))

    def state_dict(self) -> State:
        """Return the state of the whole run; every rank of every replica must call it."""
        state: State = self._exchange.answer(lambda: self._loader.state_dict())
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of `state_dict`, which is taken from the source."""
        self._change(lambda: self._loader.load_state_dict(state))

    def seek(self, step: int) -> None:
        """Go to a step of the run (see `SavableDataLoader.seek`)."""
        self._change(lambda: self._loader.seek(step))

    def set_weights(self, weights: Any, *, from_draw: int | None = None) -> int:
        """Change the weights of a blend while it runs (see `SavableDataLoader.set_weights`)."""
        return int(self._exchange.answer(lambda: self._loader.set_weights(weights, from_draw=from_draw)))

    def close(self) -> None:
        """Stop the workers of the source, once the other ranks have got everything that it has sent."""
        if self.replica.is_source:
            self._exchange.flush()
            close = getattr(self._loader, "close", None)
            if close is not None:
                close()

    def _saved(self) -> State:
        """Return what the source says of its state: the state, or why it has none."""
        unfinished = getattr(self._loader, "unfinished", None)
        save = None if unfinished else getattr(self._loader, "save_state_rank", None)
        return {"state": None if save is None else save(), "unfinished": unfinished}

    def _note(self, saved: State) -> None:
        """Take over what the source says of its state; while it has none, the last one stands for the counters."""
        self._unfinished = saved["unfinished"]
        if self._unfinished is None:
            self._state = saved["state"]

    def _facts(self) -> State:
        """Return what the other ranks must know of the loader."""
        loader = self._loader
        spec, ownership = getattr(loader, "spec", None), getattr(loader, "ownership", None)
        has_length = hasattr(loader, "__len__")
        return {
            "endless": not has_length if spec is None else not spec.finite,
            "length": len(loader) if has_length else None,
            "lanes": None if ownership is None else (ownership.num_lanes, ownership.world_size, ownership.start),
            **self._saved(),
        }

    def _change(self, work: Callable[[], None]) -> None:
        """Do something to the source's loader, and let every rank know what it is like then."""

        def changed() -> State:
            work()
            return self._facts()

        facts = self._exchange.answer(changed)
        self.endless, self._length = facts["endless"], facts["length"]
        self._note(facts)
        lanes = facts["lanes"]
        self.ownership = lanes and Ownership(*lanes)
        self._stream = None

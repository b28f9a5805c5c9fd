"""A loader for replicas in which one rank loads: the others receive its batches, state, length and errors.

Apart from the batches of a pass and its `end`, every message is the source's answer to a call, such as opening,
restoring or saving. So all ranks must make the same calls in the same order. `save_state_rank` and `len` are the
exceptions: they communicate with nobody, because every batch carries the state of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from energon_bridge.core.errors import ConfigurationError, WrongUseError
from energon_bridge.core.loader.metrics import flat_metrics
from energon_bridge.core.loader.saved_run import leaf_rows, read
from energon_bridge.core.order.topology import Ownership
from energon_bridge.trainers.replica.balance import Balance, balanced
from energon_bridge.trainers.replica.exchange import Exchange
from energon_bridge.trainers.replica.groups import Replica
from energon_bridge.trainers.replica.structure import check_keys, select

DocumentState = dict[str, Any]


def open_loader(loader: Any, replica: Replica | None, balance: Balance | None = None) -> Any:
    """Return the loader of this rank: its own, or one that receives from the source of its replica.

    Args:
        loader: A loader, or a function without arguments that opens one. With a replica, only the source uses it.
        replica: From `make_replica`; None: every rank loads.
        balance: From `make_balance`: the ranks that load share the microbatches of a global batch out by their costs,
            before these are broadcast; None: each runs what it loads.

    Raises:
        BroadcastError: The source could not open its loader; every rank raises.
    """
    if replica is None or not replica.links:
        opened = _opened(loader)
        return opened if balance is None else balanced(_fit_to_share(opened), balance)
    return BroadcastLoader(lambda: balanced(_fit_to_share(_opened(loader)), balance), replica)


def _opened(loader: Any) -> Any:
    """Return the loader, or call the function that opens it; a loader may itself be callable."""
    return loader() if callable(loader) and not hasattr(loader, "__iter__") else loader


def _fit_to_share(loader: Any) -> Any:
    """Return a loader; raise if batches cannot be sent to other ranks: they are on a device, or kept until done."""
    if getattr(loader, "keeps_until_done", False):
        raise ConfigurationError(
            "keep_until_done: the rank that trains on a sample says that it is done, so each rank must load its own: "
            "leave out balance and replica_loading='one_rank'"
        )
    device = getattr(getattr(loader, "config", None), "device", None)
    if device is None:
        return loader
    raise ConfigurationError(
        f"WorkerConfig(device={str(device)!r}) copies batches to the device before ranks exchange them: leave it out "
        "with balance and replica_loading='one_rank'. They are then copied where the trainer moves its batch"
    )


class BroadcastLoader:
    """The loader on each rank of a replica in which one rank loads.

    Args:
        loader: A loader, or a function that opens one; ignored on ranks that do not load.
        replica: Who loads and who receives.

    Attributes:
        endless: Whether the stream never ends.
        ownership: Which data-parallel rank delivers which lane; None if the loader does not say.
    """

    is_broadcast: ClassVar[bool] = True  # how EnergonDataloader, which does not import this, tells

    def __init__(self, loader: Any, replica: Replica) -> None:
        self.replica = replica
        self._exchange = Exchange(replica)
        self._loader: Any = None
        self._state: DocumentState | None = None
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
        """Start a pass, like `iter` of the source's loader; every rank must call it."""
        self._stream = None
        while True:
            try:
                yield self._next()
            except StopIteration:
                return

    @property
    def source(self) -> Any:
        """The loader itself on the rank that loads; None on the others."""
        return self._loader

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

    def save_state_rank(self) -> DocumentState | None:
        """Return the state of the source after the last batch that this rank received, without communication.

        Raises:
            WrongUseError: There is none: microbatches are balanced, and the global batch is not complete.
        """
        if self._unfinished is not None:
            raise WrongUseError(self._unfinished)
        return self._state

    def counters(self) -> list[DocumentState]:
        """Return a row for each leaf with draws, epochs and counters, as `leaf_rows` describes."""
        return [] if self._state is None else leaf_rows(read(self._state))

    def metrics(self) -> dict[str, float]:
        """Return the counters of the source by name; those that only the source has are 0 on other ranks."""
        own = getattr(self._loader, "metrics", None)
        found: dict[str, float] = flat_metrics(self.counters()) if own is None else own()
        return found

    def restore_state_rank(self, state: Any, **kwargs: Any) -> None:
        """Continue from the source's state (see `SavableDataLoader.restore_state_rank`), whatever other ranks pass.

        It may be a function that returns the state: the source calls it, and its errors reach every rank.
        """
        self._change(lambda: self._loader.restore_state_rank(state() if callable(state) else state, **kwargs))

    def state_dict(self) -> DocumentState:
        """Return the state of the whole run; every rank of every replica must call it."""
        state: DocumentState = self._exchange.answer(lambda: self._loader.state_dict())
        return state

    def load_state_dict(self, state: DocumentState) -> None:
        """Continue from the source's `state_dict()`; other ranks' arguments are ignored."""
        self._change(lambda: self._loader.load_state_dict(state))

    def seek(self, step: int) -> None:
        """Go to a step of the run (see `SavableDataLoader.seek`)."""
        self._change(lambda: self._loader.seek(step))

    def set_weights(self, weights: Any, *, from_draw: int | None = None) -> int:
        """Change the weights of a blend while it runs (see `SavableDataLoader.set_weights`)."""
        return int(self._exchange.answer(lambda: self._loader.set_weights(weights, from_draw=from_draw)))

    def ban(self, keys: Any, **kwargs: Any) -> int:
        """Withdraw samples during the run (see `SavableDataLoader.ban`); the source's arguments count."""

        def banned() -> DocumentState:
            return {"draw": self._loader.ban(keys, **kwargs), **self._saved()}

        answer = self._exchange.answer(banned)
        self._note(answer)
        return int(answer["draw"])

    def close(self) -> None:
        """Stop the workers of the source, once the other ranks have received everything."""
        if self.replica.is_source:
            self._exchange.flush()
            close = getattr(self._loader, "close", None)
            if close is not None:
                close()

    def _saved(self) -> DocumentState:
        """Return the source's state, or why it has none."""
        unfinished = getattr(self._loader, "unfinished", None)
        save = None if unfinished else getattr(self._loader, "save_state_rank", None)
        return {"state": None if save is None else save(), "unfinished": unfinished}

    def _note(self, saved: DocumentState) -> None:
        """Take over the source's state; without one, keep the counters of the last."""
        self._unfinished = saved["unfinished"]
        if self._unfinished is None:
            self._state = saved["state"]

    def _facts(self) -> DocumentState:
        """Return the facts about the loader for the other ranks."""
        loader = self._loader
        spec = getattr(loader, "spec", None)
        ownership = getattr(loader, "ownership", None)
        has_length = hasattr(loader, "__len__")
        return {
            "endless": not has_length if spec is None else not spec.ends,
            "length": len(loader) if has_length else None,
            "lanes": None if ownership is None else (ownership.num_lanes, ownership.world_size, ownership.start),
            **self._saved(),
        }

    def _change(self, work: Callable[[], None]) -> None:
        """Run `work` on the source, which changes its loader, and send every rank what it must know of the loader."""

        def changed() -> DocumentState:
            work()
            return self._facts()

        facts = self._exchange.answer(changed)
        self.endless = facts["endless"]
        self._length = facts["length"]
        self._note(facts)
        lanes = facts["lanes"]
        self.ownership = lanes and Ownership(*lanes)
        self._stream = None

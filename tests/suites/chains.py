"""Chains: any mix, encoder and settings, stopped and resumed on any topologies, against an uninterrupted run.

A chain is drawn from a seed and a number, so a failure is repeated by both. The reference is a run on one rank without
workers; the same run then goes over several stops, each with its own number of ranks, workers, threads and microbatches
ahead, the state passing through files of several kinds. Weights, bans and feedback change at random moments, in the
reference after the same microbatch. Every real microbatch must have the digest that the reference has; a change must
hold from the same draw; and the state after each leg, merged over its ranks, must be that of the reference, with the
counters. Of passes, only digests and counters are compared: their last step may go beyond the end. In one of ten legs
microbatches are also made again by their restore keys, and loaders go back by a step.

One of ten has conversations with tiny images, sounds or videos, encoded by a model's own processor or natively. With
ENERGON_CHAIN_MEDIA=1 all have.

Runs without pytest too, on all cores, with nothing but what the package itself needs (media: with what they need):

    python tests/suites/chains.py --chains 2000 --processes 16 --seed 7
    python tests/suites/chains.py --seed 7 --first 123 --chains 1      # chain 123 of that run again
    python tests/suites/chains.py --chains 1000 --seed 7 --having group_by     # buckets; unit: tokens
    ENERGON_CHAIN_MEDIA=1 python tests/suites/chains.py --chains 1000 --seed 7
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import io
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import pprint
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path[1:1] = [str(tests / "helpers"), str(tests.parent)]  # and the package, where it is not installed
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork

import torch
from chain_cases import CHILDREN, NUMBERS, Chain, Event, Leg, drawn_chain, num_leaves, write_data
from engine import InProcessLoader, comparable, digest, is_masked, loaders_of
from talks import missing

from energon_bridge import EnergonError, cyclic_iter
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.loader.saved_run import read_lanes, read_leaves
from energon_bridge.trainers.feedback import DoReMi, MixFeedback

Bans = list[tuple[int, list[str]]]
"""Keys, and the global draw from which they are banned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something to compare after a microbatch.

    Args:
        microbatches: Those that the run has delivered.
        leg: Its number.
        event: What changes then; None: the leg ends.
        outcome: The global draw from which the change holds, or the class of the error; the state after a leg.
    """

    microbatches: int
    leg: int
    event: Event | None
    outcome: Any


# Running one ---------------------------------------------------------------------------------------------------------

CODECS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda state: state,
    "json": lambda state: json.loads(json.dumps(state)),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch": lambda state: _through_torch(state),
}


def _through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class DifferenceError(Exception):
    """A chain is not what the uninterrupted run is."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise DifferenceError(message)


def stepped(streams: Sequence[Iterator[Any]], loaders: Sequence[SavableDataLoader], leg: Leg, steps: int) -> list[str]:
    """Let all ranks deliver some steps, rank after rank; return the digests of the real microbatches, in order."""
    columns = []
    for loader, stream in zip(loaders, streams, strict=True):
        column = []
        for _ in range(steps):
            before = loader.save_state_rank() if leg.peeks else None
            batch = next(stream)
            column.append(None if is_masked(batch) else digest(batch))
            if leg.peeks:
                peek(loader, stream, batch, before)
        columns.append(column)
    return [found for row in zip(*columns, strict=True) for found in row if found is not None]


def peek(loader: SavableDataLoader, stream: Iterator[Any], batch: Any, before: Any) -> None:
    """Do what changes no run: make its last microbatch again by its key, stop the workers, draw, go back by a state."""
    if not (masked := is_masked(batch)):
        key = json.loads(json.dumps(batch.__restore_key__))  # as a log would have it
        check(digest(loader.restore_sample(key)) == digest(batch), f"{key} is another when it is restored")
    if loader.microbatches % 2:
        loader.close()
    random.random(), torch.rand(3)
    loader.restore_state_rank(before)  # below a running iterator
    again = next(stream if loader.spec.ends else iter(loader))
    check(masked or digest(again) == digest(batch), "a microbatch is another when its loader has gone back")


class Losses:
    """Feedback from losses that follow from the microbatches, each on one leaf of the mix.

    Args:
        leaves: Their number.
    """

    def __init__(self, leaves: int) -> None:
        names = [str(leaf) for leaf in range(leaves)]
        self._feedback = MixFeedback(DoReMi(reference=dict.fromkeys(names, 0.4)), dict.fromkeys(names, 1.0), every=1)

    def record(self, digests: Sequence[str]) -> None:
        for one in digests:
            name = str(int(one[:8], 16) % len(self._feedback.weights))
            part = SimpleNamespace(dataset=name, start=0, length=1)
            batch = SimpleNamespace(segments=[(part,)], loss_mask=torch.ones(1, 1))
            self._feedback.record(batch, torch.full((1, 1), int(one[8:14], 16) / 16**6))

    def step(self, set_weights: Callable[[list[Any]], int]) -> int | None:
        leaves = range(len(self._feedback.weights))
        loader = SimpleNamespace(set_weights=lambda weights: set_weights([weights[str(leaf)] for leaf in leaves]))
        return self._feedback.step(loader)

    def stopped(self) -> None:
        """Be saved and restored."""
        self._feedback.load_state_dict(json.loads(json.dumps(self._feedback.state_dict())))


def happened(loaders: list[SavableDataLoader], event: Event, losses: Losses, finite: bool = False) -> Any:
    """Change a run on all ranks; return the global draw from which it holds, or the class of the error."""
    state = merge([loader.save_state_rank() for loader in loaders])
    lanes = {} if finite else read_lanes(state)
    # Lanes that share a packing buffer draw together.
    count = state["settings"].get("packing_buffers") or loaders[0].ownership.num_lanes

    def undrawn() -> int:
        return max((lane.draw + (lane.taken > 0) - 1) * count + number % count + 1 for number, lane in lanes.items())

    def set_weights(weights: list[Any], later: int | None = None) -> int:
        return changed(lambda one: one.set_weights(weights, from_draw=given(undrawn(), later)))

    def ban(keys: list[str], later: int | None) -> int:
        shared = count < loaders[0].ownership.num_lanes
        first = None
        if not finite:
            first = undrawn() if shared else min(lane.draw * count + number for number, lane in lanes.items())
        start = 0 if later == -1 else given(first, later)
        start = None if finite or loaders[0].spec.buckets is not None else start
        return changed(lambda one: one.ban(keys, from_draw=start, ignore_unknown=True))

    def given(first: int | None, later: int | None) -> int | None:
        # One rank finds the draw itself, as several that can reach each other do.
        alone = len(loaders) == 1 and later is None
        return None if alone or first is None else first + (later or 0)

    def changed(change: Callable[[SavableDataLoader], int]) -> int:
        starts = {change(loader) for loader in loaders}
        check(len(starts) == 1, f"ranks change from draws {starts} on")
        return starts.pop()

    try:
        if event.kind == "feedback":
            return losses.step(set_weights)
        return {"weights": set_weights, "ban": ban}[event.kind](event.given, event.later)
    except EnergonError as error:
        return type(error).__name__


def run_leg(
    dataset: DatasetSpec, chain: Chain, number: int, states: list[Any], own: bool, losses: Losses
) -> tuple[list[str], list[Moment], list[Any]]:
    """Run a leg from the states before it; return digests, what happened, and the states after it."""
    leg = chain.legs[number]
    config = chain.run | {
        "prefetch_factor": leg.prefetch,
        "decode_threads": leg.threads,
        "buffer_bytes": leg.buffer_bytes,
        "device": leg.device,
    }
    kind = SavableDataLoader if leg.processes else InProcessLoader
    loaders = loaders_of(dataset, leg.ranks, leg.workers, kind=kind, **config)
    try:
        for rank, loader in enumerate(loaders if states else ()):
            loader.restore_state_rank(states[rank] if own else states)
        moments: list[Moment] = []
        found: list[str] = []
        done = 0
        # Passes start with their first iterator, so what happens before it comes first.
        early = [event for event in leg.events if chain.finite]
        for event in early:
            outcome = happened(loaders, event, losses, finite=True)
            moments.append(Moment(microbatches=0, leg=number, event=event, outcome=outcome))
        streams = [cyclic_iter(loader) for loader in loaders]
        for event in (*(event for event in leg.events if event not in early), None):
            until = leg.steps if event is None else event.after
            part = stepped(streams, loaders, leg, until - done)
            losses.record(part)
            found, done = found + part, until
            if event is not None:
                outcome = happened(loaders, event, losses)
                moments.append(Moment(microbatches=loaders[0].microbatches, leg=number, event=event, outcome=outcome))
        after = [loader.save_state_rank() for loader in loaders]
        if not chain.finite:
            moments.append(
                Moment(microbatches=loaders[0].microbatches, leg=number, event=None, outcome=comparable(merge(after)))
            )
        losses.stopped()
        return found, moments, after
    finally:
        for loader in loaders:
            loader.close()


def passed_on(leg: Leg, states: list[Any], own: bool) -> list[Any]:
    """Return states as the next leg gets them."""
    if not own:
        states = random.Random(leg.order).sample(states, len(states))
        half = len(states) // 2
        if leg.passing == "merged":
            states = [merge(states)]
        elif leg.passing == "parts" and half:
            states = [merge(states[half:]), merge(states[:half])]
    through = CODECS[leg.codec]
    return [through(state) for state in states]


def place_of(state: Any) -> tuple[int, int]:
    return int(state["epoch"]), int(state["microbatches"])


def reference_of(
    dataset: DatasetSpec, chain: Chain, last: Any, moments: Sequence[Moment], losses: Losses, count: int
) -> tuple[list[str], Any]:
    """Run without a stop up to where the last state of a chain stands; return the digests and the state there.

    Validation does not count its passes: it runs up to `count` microbatches.

    Raises:
        DifferenceError: A change holds from another draw, or the state after a leg is another.
    """
    config = dict(chain.run)
    if not chain.finite and not same_by_default(chain):
        config["num_lanes"] = last["num_lanes"]
    if chain.finite:  # so that its length is that of a pass
        dataset = dataset.with_settings(virtual_epoch_length=None)
    (loader,) = loaders_of(dataset, 1, 0, **config)
    try:
        found: list[str] = []
        if chain.finite:
            for moment in moments:
                if isinstance(moment.outcome, int):
                    loader.ban(moment.event.given, from_draw=moment.outcome, ignore_unknown=True)
        stream = cyclic_iter(loader)
        for moment in () if chain.finite else moments:
            batches: Iterator[Any] = itertools.islice(stream, moment.microbatches - len(found))
            part = [digest(batch) for batch in batches]
            found += part
            losses.record(part)
            if moment.event is not None:
                outcome = happened([loader], moment.event, losses)
                what = f"{moment.event.kind} after microbatch {moment.microbatches} (leg {moment.leg}) holds from draw"
                check(outcome == moment.outcome, f"{what} {moment.outcome}, uninterrupted from {outcome}")
            elif (state := comparable(loader.save_state_rank())) != moment.outcome:
                names = [name for name in state if state[name] != moment.outcome.get(name)]
                pairs = "; ".join(f"{name} {moment.outcome.get(name)}, uninterrupted {state[name]}" for name in names)
                raise DifferenceError(f"state after leg {moment.leg}: {pairs}")
        epoch, microbatches = place_of(last)
        while chain.finite and not (len(found) == count if chain.validation else reached(loader, epoch, microbatches)):
            batch = next(stream)
            if not is_masked(batch):
                found.append(digest(batch))
        return found, loader.save_state_rank()
    finally:
        loader.close()


def reached(loader: SavableDataLoader, epoch: int, microbatches: int) -> bool:
    """Whether a loader on one rank stands where several do, whose last step of a pass may have gone beyond its end."""
    state = loader.save_state_rank()
    if state["epoch"] != epoch or state["microbatches"] >= microbatches:
        return place_of(state) >= (epoch, microbatches)
    return microbatches > 0 and state["microbatches"] > 0 and state["microbatches"] >= len(loader)


def same_by_default(chain: Chain) -> bool:
    """Whether a run has as many lanes by default as one on one rank."""
    group, ranks = chain.run["microbatches_per_global_batch"], chain.legs[0].ranks
    return chain.run["num_lanes"] is not None or group is not None or 24 % ranks == 0


def counted(states: list[Any]) -> dict[str, dict[str, int]]:
    return {row["identity"]: row["counts"] for row in read_leaves(merge(states))}


def run_chain(data: Path, chain: Chain) -> str:
    """Run a chain and its reference; return what became of it: "same", or the class of the error that both raise.

    Raises:
        DifferenceError: They differ.
    """
    dataset = chain.open(data)
    found: list[str] = []
    ends: list[int] = []
    moments: list[Moment] = []
    states: list[Any] = []
    own = False
    losses = Losses(max(1, num_leaves(chain.tree)))
    for number, leg in enumerate(chain.legs):
        try:
            digests, more, after = run_leg(dataset, chain, number, states, own, losses)
        except EnergonError as error:
            return check_same_error(dataset, chain, number, moments, error)
        found += digests
        moments += more
        ends.append(len(found))
        check(len({place_of(state) for state in after}) == 1, f"leg {number}: ranks at {[*map(place_of, after)]}")
        later = chain.legs[number + 1 : number + 2]
        own = leg.passing == "own" and not chain.finite and [leg.ranks] == [one.ranks for one in later]
        states = passed_on(leg, after, own)
    losses = Losses(max(1, num_leaves(chain.tree)))
    expected, state = reference_of(dataset, chain, after[0], moments, losses, len(found))
    if found != expected:
        pairs = enumerate(itertools.zip_longest(found, expected))
        first = next(number for number, (one, other) in pairs if one != other)
        leg_number = next((number for number, end in enumerate(ends) if first < end), len(ends) - 1)
        raise DifferenceError(
            f"microbatch {first} (in leg {leg_number}; legs end at {ends}) differs; {len(found)} delivered, "
            f"{len(expected)} expected"
        )
    counts, uninterrupted = counted(after), counted([state])
    if chain.validation:  # where the last microbatches of a step do not exist, their skipped samples may be counted
        counts, uninterrupted = (
            {leaf: {"samples": one["samples"]} for leaf, one in every.items()} for every in (counts, uninterrupted)
        )
    check(counts == uninterrupted, f"counters {counts}, uninterrupted {uninterrupted}")
    return "same"


def check_same_error(
    dataset: DatasetSpec, chain: Chain, leg: int, moments: Sequence[Moment], error: EnergonError
) -> str:
    """An uninterrupted run must raise the same error, where a chain raises one: not all that is drawn can be run."""
    config = dict(chain.run)
    if not chain.finite and not same_by_default(chain):
        first, *others = loaders_of(dataset, chain.legs[0].ranks, 0, **chain.run)
        config["num_lanes"] = first.ownership.num_lanes
        for one in (first, *others):
            one.close()
    (loader,) = loaders_of(dataset, 1, 0, **config)
    steps = 3 * sum(leg.ranks * leg.steps for leg in chain.legs) + 50
    losses = Losses(max(1, num_leaves(chain.tree)))
    legs = [event for one in chain.legs[: leg + 1] for event in one.events]
    try:
        if chain.finite:
            for event in legs:
                happened([loader], event, losses, finite=True)
        stream = cyclic_iter(loader)
        for moment in () if chain.finite else moments:
            losses.record(
                [digest(batch) for batch in itertools.islice(stream, moment.microbatches - loader.microbatches)]
            )
            if moment.event is not None:
                happened([loader], moment.event, losses)
        begun, ranks = loader.microbatches, chain.legs[leg].ranks
        for event in chain.legs[leg].events if not chain.finite else ():
            until = begun + ranks * event.after  # it may be the error that the event would have prevented
            losses.record([digest(batch) for batch in itertools.islice(stream, until - loader.microbatches)])
            happened([loader], event, losses)
        for _ in itertools.islice(stream, steps):
            pass
    except EnergonError as same:
        if type(same) is type(error):
            return type(error).__name__
    finally:
        loader.close()
    raise DifferenceError(f"leg {leg} raised {type(error).__name__}: {error}") from error


# Making one that differs smaller -------------------------------------------------------------------------------------


def smaller(chain: Chain) -> Iterator[Chain]:
    """Give chains that are a little simpler."""
    legs = chain.legs
    for number in range(len(legs) if len(legs) > 1 else 0):
        yield replace(chain, legs=legs[:number] + legs[number + 1 :])
    for kind in CHILDREN:
        for number, child in enumerate(chain.tree.get(kind, ())):
            rest = [one for place, one in enumerate(chain.tree[kind]) if place != number]
            yield replace(chain, tree={name: value for name, value in child.items() if name not in NUMBERS.values()})
            yield replace(chain, tree=chain.tree | {kind: rest})
    for name in ("subset", "filter", "shuffle_over_epochs_multiplier"):
        yield replace(chain, tree={key: value for key, value in chain.tree.items() if key != name})
    for feature in chain.features:
        yield replace(chain, features=tuple(name for name in chain.features if name != feature))
    for base in ("default", "tensors"):
        if not chain.packs:
            yield replace(chain, base=base)
    plain: dict[str, Any] = {"max_samples_per_sequence": None, "shuffle_buffer_size": 0, "parallel_shard_iters": None}
    plain |= {"shuffle_over_epochs_multiplier": 1, "virtual_epoch_length": None, "batch_size": 1, "filter": None}
    for name, value in plain.items():
        if chain.settings.get(name, value) != value:
            yield replace(chain, settings=chain.settings | {name: value})
    easy: dict[str, Any] = {"workers": 0, "threads": 1, "prefetch": 1, "buffer_bytes": 1 << 30, "peeks": False}
    easy |= {"passing": "list", "codec": "plain", "order": 0, "events": (), "processes": False, "ranks": 1}
    for number, leg in enumerate(legs):
        changes: list[dict[str, Any]] = [{name: value} for name, value in easy.items() if getattr(leg, name) != value]
        changes += [{"events": (*leg.events[:at], *leg.events[at + 1 :])} for at in range(len(leg.events))]
        for steps in {leg.steps // 2, leg.steps - 1} if leg.steps else ():
            events = tuple(replace(event, after=min(event.after, steps)) for event in leg.events)
            changes.append({"steps": steps, "events": events})
        for change in changes:
            yield replace(chain, legs=(*legs[:number], replace(leg, **change), *legs[number + 1 :]))


def failure_of(data: Path, chain: Chain) -> str | None:
    """Return what is wrong with a chain, None if nothing is."""
    try:
        run_chain(data, chain)
    except DifferenceError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def minimised(data: Path, chain: Chain, tries: int = 400) -> tuple[Chain, str]:
    """Return the simplest chain found that still differs, and how."""
    why = failure_of(data, chain) or "it does not differ a second time"
    best, going = chain, True
    while going:
        going = False
        for candidate in smaller(best):
            tries -= 1
            found = failure_of(data, candidate) if candidate != best and tries > 0 else None
            # An error of another kind would be another failure, most likely of the candidate itself.
            if found is not None and found.split()[0] == why.split()[0]:
                best, why, going = candidate, found, True
                break
    return best, why


def shown(chain: Chain) -> str:
    return pprint.pformat(dataclasses.asdict(chain), sort_dicts=False, width=120, compact=True)


# Many ----------------------------------------------------------------------------------------------------------------


def tried(data: Path, seed: int, number: int, minimise: bool = True) -> tuple[int, str, str]:
    """Run a chain; return its number, what became of it ("differs" if it does), and a report if it differs."""
    chain = drawn_chain(seed, number)
    if (package := missing(chain.media)) is not None:
        return number, f"not run without {package}", ""
    try:
        return number, run_chain(data, chain), ""
    except Exception as error:
        report = f"--seed {seed} --first {number}: {type(error).__name__}: {error}\n{shown(chain)}"
    if minimise:
        small, why = minimised(data, chain)
        report += f"\nminimised: {why}\n{shown(small)}"
    return number, "differs", report


def quietly() -> None:
    """Say nothing of uneven ranks and idle workers, which are the point here."""
    logging.getLogger("energon_bridge").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)


def _in_process(data: str, seed: int, number: int, seconds: float) -> tuple[int, str, str]:
    faulthandler.dump_traceback_later(seconds, exit=True)  # of all threads; the parent names the chain
    try:
        return tried(Path(data), seed, number)
    finally:
        faulthandler.cancel_dump_traceback_later()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many chains on many processes; return 1 if one differs."""
    parser = argparse.ArgumentParser(description="Runs random chains of stops against uninterrupted runs.")
    parser.add_argument("--chains", type=int, default=200, help="how many")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: as many as there are cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first chain")
    parser.add_argument("--having", default="", help="only chains that have this in their description")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no more chains after so many")
    parser.add_argument("--seconds", type=float, default=300, help="after which a chain is a hang")
    given = parser.parse_args(arguments)
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    having = (n for n in itertools.count(given.first) if given.having in str(drawn_chain(given.seed, n)))
    numbers, last = itertools.islice(having, given.chains), given.first
    with tempfile.TemporaryDirectory(prefix="chains-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # of joins
        data = str(write_data(Path(folder) / "data"))
        pending: dict[Future[tuple[int, str, str]], int] = {}
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(given.processes, mp_context=context, initializer=quietly) as pool:
            while True:
                late = time.monotonic() - started > 60 * given.minutes
                for number in itertools.islice(numbers, 0 if late else 2 * given.processes - len(pending)):
                    pending[pool.submit(_in_process, data, given.seed, number, given.seconds)] = number
                if not pending:
                    break
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    number = pending.pop(future)
                    try:
                        _, outcome, report = future.result()
                    except Exception as error:
                        still = sorted([number, *pending.values()])
                        print(f"--seed {given.seed}: a process died or hung in one of the chains {still}: {error!r}")
                        return 1
                    outcomes[outcome] += 1
                    last = max(last, number)
                    if report:
                        print(report, flush=True)
    total, minutes = sum(outcomes.values()), (time.monotonic() - started) / 60
    rest = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    which = f"{given.first} to {last}" + f" with {given.having}" * bool(given.having)
    print(f"{total} chains of seed {given.seed}, {which}, in {minutes:.1f} minutes: {rest}")
    return int(outcomes["differs"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())

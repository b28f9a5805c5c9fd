"""Chains: any mix, encoder and settings, stopped and resumed on any topologies, against an uninterrupted run.

A chain is drawn from a seed and a number, so a failure is repeated by both. The reference is a run on one rank without
workers; the same run then goes over several stops, each with its own number of ranks, workers, threads and microbatches
ahead, the state passing through files of several kinds. Every real microbatch must have the digest that the reference
has, and the counters of the last state must be those of the reference.

Runs without pytest too, on all cores, with nothing but what the package itself needs:

    python tests/suites/chains.py --chains 2000 --processes 16 --seed 7
    python tests/suites/chains.py --seed 7 --first 123 --chains 1      # chain 123 of that run again
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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path[1:1] = [str(tests / "helpers"), str(tests.parent)]  # and the package, where it is not installed
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

import torch
from chain_cases import CHILDREN, NUMBERS, Chain, Change, Leg, Withdrawal, drawn_chain, write_data
from engine import digest, is_masked, loaders_of

from energon_bridge import EnergonError, cyclic_iter
from energon_bridge.loader.document import read_lanes, read_leaves
from energon_bridge.loader.fits import merge
from energon_bridge.loader.run_plan import DatasetSpec
from energon_bridge.loader.savable import SavableDataLoader

SECONDS = 300
"""After which a chain is a hang."""

Bans = list[tuple[int, list[str]]]
"""Keys, and the global draw from which they are banned."""

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
            batch = next(stream)
            column.append(None if is_masked(batch) else digest(batch))
            if leg.peeks:
                loader.save_state_rank()
        columns.append(column)
    return [found for row in zip(*columns, strict=True) for found in row if found is not None]


def set_weights(loaders: list[SavableDataLoader], change: Change) -> int:
    """Set weights on all ranks; return the global draw from which they hold."""
    states = [loader.save_state_rank() for loader in loaders]
    drawn = max(lane.draw + (lane.taken > 0) for state in states for lane in read_lanes(state).values())
    start = drawn * states[0]["num_lanes"] + change.later
    for loader in loaders:
        loader.set_weights(change.weights, from_draw=start)
    return start


def ban(loaders: list[SavableDataLoader], withdrawal: Withdrawal, finite: bool, bans: Bans) -> None:
    """Ban keys on all ranks; note from which global draw on."""
    start = None
    if not finite:
        states = [loader.save_state_rank() for loader in loaders]
        drawn = max(lane.draw + (lane.taken > 0) for state in states for lane in read_lanes(state).values())
        start = drawn * states[0]["num_lanes"] + withdrawal.later
        bans.append((start, withdrawal.keys))
    starts = {loader.ban(withdrawal.keys, from_draw=start, ignore_unknown=True) for loader in loaders}
    check(len(starts) == 1, f"ranks ban from draws {starts} on")
    if finite:
        bans.append((starts.pop(), withdrawal.keys))


def run_leg(
    dataset: DatasetSpec,
    chain: Chain,
    leg: Leg,
    states: list[Any],
    own: bool,
    changes: list[tuple[int, list[Any]]],
    bans: Bans,
) -> tuple[list[str], list[Any]]:
    """Run one leg from the states before it; return digests and the states after it."""
    config = chain.run | {
        "prefetch_factor": leg.prefetch,
        "decode_threads": leg.threads,
        "buffer_bytes": leg.buffer_bytes,
    }
    loaders = loaders_of(dataset, leg.ranks, leg.workers, **config)
    try:
        for rank, loader in enumerate(loaders if states else ()):
            loader.restore_state_rank(states[rank] if own else states)
        if leg.withdrawal is not None:
            ban(loaders, leg.withdrawal, chain.finite, bans)
        streams = [cyclic_iter(loader) for loader in loaders]
        found, rest = [], leg.steps
        if leg.change is not None:
            found, rest = stepped(streams, loaders, leg, leg.change.after), leg.steps - leg.change.after
            changes.append((set_weights(loaders, leg.change), leg.change.weights))
        found += stepped(streams, loaders, leg, rest)
        return found, [loader.save_state_rank() for loader in loaders]
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
    dataset: DatasetSpec, chain: Chain, last: Any, changes: Sequence[tuple[int, list[Any]]], bans: Bans
) -> tuple[list[str], Any]:
    """Return the digests of an uninterrupted run up to where the last state of a chain stands, and its state there."""
    config = dict(chain.run)
    if not chain.finite and not same_by_default(chain):
        config["num_lanes"] = last["num_lanes"]
    if chain.finite:  # so that its length is that of a pass
        dataset = replace(dataset, virtual_epoch_length=None)
    (loader,) = loaders_of(dataset, 1, 0, **config)
    try:
        for start, weights in changes:
            loader.set_weights(weights, from_draw=start)
        for start, keys in bans:
            loader.ban(keys, from_draw=start, ignore_unknown=True)
        stream, found = cyclic_iter(loader), []
        if not chain.finite:
            batches: Iterator[Any] = itertools.islice(stream, last["microbatches"])
            found = [digest(batch) for batch in batches]
        epoch, microbatches = place_of(last)
        while chain.finite and not reached(loader, epoch, microbatches):
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


def check_counts(dataset: DatasetSpec, chain: Chain, states: list[Any], expected: Any) -> None:
    """Compare the counters of a chain with those of an uninterrupted run."""
    found, uninterrupted = counted(states), counted([expected])
    if not chain.packs and not dataset.listed:
        check(found == uninterrupted, f"counters {found}, uninterrupted {uninterrupted}")
        return
    # How far a packing buffer is filled, and so what has been drawn and skipped, depends on where a chain is cut; the
    # ranks of a pass that is listed beforehand each count what they list.
    for identity, counts in found.items():
        pair = counts["samples"], uninterrupted[identity]["samples"]
        check(pair[0] == pair[1], f"samples of {identity} {pair[0]}, uninterrupted {pair[1]}")


def run_chain(data: Path, chain: Chain) -> str:
    """Run a chain and its reference; return what became of it: "same", or the class of the error that both raise.

    Raises:
        DifferenceError: They differ.
    """
    dataset = chain.open(data)
    found: list[str] = []
    ends: list[int] = []
    changes: list[tuple[int, list[Any]]] = []
    bans: Bans = []
    states: list[Any] = []
    own = False
    for number, leg in enumerate(chain.legs):
        try:
            digests, after = run_leg(dataset, chain, leg, states, own, changes, bans)
        except EnergonError as error:
            return check_same_error(dataset, chain, number, bans, error)
        found += digests
        ends.append(len(found))
        check(len({place_of(state) for state in after}) == 1, f"leg {number}: ranks at {[*map(place_of, after)]}")
        later = chain.legs[number + 1 : number + 2]
        own = leg.passing == "own" and not chain.finite and [leg.ranks] == [one.ranks for one in later]
        states = passed_on(leg, after, own)
    last = after[0]
    expected, state = reference_of(dataset, chain, last, changes, bans)
    if found != expected:
        pairs = enumerate(itertools.zip_longest(found, expected))
        first = next(number for number, (one, other) in pairs if one != other)
        leg_number = next((number for number, end in enumerate(ends) if first < end), len(ends) - 1)
        raise DifferenceError(
            f"microbatch {first} (in leg {leg_number}; legs end at {ends}) differs; {len(found)} delivered, "
            f"{len(expected)} expected"
        )
    check_counts(dataset, chain, after, state)
    return "same"


def check_same_error(dataset: DatasetSpec, chain: Chain, leg: int, bans: Bans, error: EnergonError) -> str:
    """An uninterrupted run must raise the same error, where a chain raises one: not all that is drawn can be run."""
    (loader,) = loaders_of(dataset, 1, 0, **chain.run)
    steps = 3 * sum(leg.ranks * leg.steps for leg in chain.legs) + 50
    try:
        for start, keys in bans:
            loader.ban(keys, from_draw=start, ignore_unknown=True)
        for _ in itertools.islice(cyclic_iter(loader), steps):
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
    easy |= {"passing": "list", "codec": "plain", "order": 0, "change": None, "withdrawal": None, "ranks": 1}
    for number, leg in enumerate(legs):
        changes = [{name: value} for name, value in easy.items() if getattr(leg, name) != value]
        changes += [{"steps": leg.steps // 2}, {"steps": leg.steps - 1}] if leg.steps else []
        for change in changes:
            if leg.change is None or "steps" not in change:
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
    warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    torch.set_num_threads(1)


def _in_process(data: str, seed: int, number: int) -> tuple[int, str, str]:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # of all threads; the parent names the chain
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
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no more chains after so many")
    given = parser.parse_args(arguments)
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    numbers = iter(range(given.first, given.first + given.chains))
    with tempfile.TemporaryDirectory(prefix="chains-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # of joins
        data = str(write_data(Path(folder) / "data"))
        pending: dict[Future[tuple[int, str, str]], int] = {}
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(given.processes, mp_context=context, initializer=quietly) as pool:
            while True:
                late = time.monotonic() - started > 60 * given.minutes
                for number in itertools.islice(numbers, 0 if late else 2 * given.processes - len(pending)):
                    pending[pool.submit(_in_process, data, given.seed, number)] = number
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
                    if report:
                        print(report, flush=True)
    total, minutes = sum(outcomes.values()), (time.monotonic() - started) / 60
    rest = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    print(f"{total} chains of seed {given.seed} from {given.first} on, in {minutes:.1f} minutes: {rest}")
    return int(outcomes["differs"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Damaged and hostile states: every one is refused with the field's name, in no time and without memory."""

from __future__ import annotations

import base64
import contextlib
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import NEEDED, text_dataset, train_dataset
from hostile import LONG, Note, damaged_value, limited, seed_of

from energon_bridge import SavableDataLoader, get_savable_loader
from energon_bridge.core.errors import EnergonError, StateError, StateFormatError
from energon_bridge.core.loader import saved_run
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.saved_run import LONGEST_COLUMN, decode_column, encode_column, encode_text, read, sign

SHARDS = [30, 41]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    for name in "ab":
        text_dataset(root / name, train=SHARDS if name == "a" else SHARDS[::-1])
    return root


def loader_of(data: Path) -> SavableDataLoader:
    """Return a loader of a mix with packs, for states that have all there can be in one."""
    mix = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"} | {
        "splits": {"train": {"blend": [{"weight": 1, "path": str(data / "a")}, {"weight": 2, "path": str(data / "b")}]}}
    }
    return get_savable_loader(train_dataset(mix, "packing", **NEEDED["packing"]))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def state(data: Path) -> Any:
    loader = loader_of(data)
    loader.set_weights([3, 1])
    loader.ban(["00003", "00017"], from_draw=100)
    loader.ban(["00005"], from_draw=100, dataset=str(data / "b"))
    for _, _ in zip(range(31), loader, strict=False):
        pass
    document = loader.save_state_rank()
    assert {"held", "buffers"} <= document["lanes"].keys()
    assert document["weights"]
    assert document["bans"]
    return document


def at(document: Any, path: str) -> tuple[Any, Any]:
    *before, last = path.split(".")
    for key in before:
        document = document[key]
    return document, int(last) if isinstance(document, list) else last


def changed(document: Any, path: str, value: Any) -> Any:
    """Return a state with another value in it, and the checksum that belongs to that."""
    out = merge([document]) | {"leaves": dict(document["leaves"]), "lanes": dict(document["lanes"])}
    out["settings"] = dict(document["settings"])
    for name in ("held_rows", "held_members"):
        out["lanes"][name] = list(document["lanes"][name])
    out["leaves"]["counts"] = dict(document["leaves"]["counts"])
    parent, last = at(out, path)
    parent[last] = value(parent[last]) if callable(value) else value
    return sign(out)


def column(change: Callable[[list[int]], list[int]]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        return encode_column(change(decode_column(text, 1 << 20, at_most=True).tolist()))

    return edit


def last_is(number: int) -> Callable[[str], str]:
    return column(lambda numbers: [*numbers[:-1], number])


BOMB = f"1,{base64.b64encode(zlib.compress(bytes(1 << 28), 9)).decode()}"
"""A column of 400 KB that unpacks to 256 MiB."""


def without(entries: dict[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in entries.items() if each != name}


DAMAGES: list[tuple[str, Any, str]] = [
    ("num_lanes", 2**60, "num_lanes should be a number from 1 to 1048576, found 1152921504606846976"),
    ("num_lanes", 10**400, "num_lanes should be a number from .* found a number of 1329 bits"),
    ("num_lanes", 24.0, "num_lanes should be a whole number, found 24.0"),
    ("microbatches", -1, "microbatches should be a number from 0"),
    ("microbatches", True, "microbatches should be a whole number, found True"),
    ("epoch", 2**60, "epoch should be a number"),
    ("epoch_steps", None, "epoch_steps should be a whole number, found None"),
    ("kind", "other", "kind should be one of train, passes, finite, found 'other'"),
    ("format_version", "4", "format_version should be a whole number"),
    ("format_version", -4, "format_version should be a whole number"),
    ("order_version", None, "order_version should be a whole number"),
    ("settings", 7, "settings should be a dict"),
    ("settings", {}, r"settings\.seed is missing"),
    ("settings.batch_size", -2, r"settings\.batch_size should be a number from 1"),
    ("settings.seed", b"x", "a field holds a value that no state can hold"),
    ("weights", 3, "weights should be a list"),
    ("weights", [[-1, [1, 1]]], "weights should be a number from 0"),
    ("weights", [[1, [1]]], "weights has 1 weights for 2 leaves"),
    ("weights", [[1, ["x", 2]]], "weights cannot be read"),
    ("weights", [[9, [1, 2]], [9, [1, 2]]], "weights should be in order"),
    ("bans", 7, "bans should be a list, found 7"),
    ("bans", [7], "bans should hold a global draw, a list of keys"),
    ("bans", [[7, "00003"]], "bans should hold a global draw, a list of keys"),
    ("bans", [[7, ["00003"], "x", "y"]], "bans should hold a global draw, a list of keys"),
    ("bans", [[-1, ["00003"]]], "bans should be a number from 0"),
    ("bans", [[True, ["00003"]]], "bans should be a whole number"),
    ("bans", [[2**60, ["00003"]]], "bans should be a number from 0"),
    ("bans", [[7, []]], "bans should hold non-empty strings"),
    ("bans", [[7, ["00003", 5]]], "bans should hold non-empty strings, found 5"),
    ("bans", [[7, [None]]], "bans should hold non-empty strings, found None"),
    ("bans", [[7, ["00003"], ""]], "bans should hold non-empty strings, found ''"),
    ("bans", [[9, ["00003"]], [7, ["00005"]]], "bans should be in order"),
    ("bans", [[9, ["00003"]], [9, ["00005"]]], "bans should be in order"),
    ("banned", 7, "banned should be a list, found 7"),
    ("banned", [7], "banned should hold an identity and two columns"),
    ("banned", lambda of: [of[0][:2]], "banned should hold an identity and two columns"),
    ("banned", lambda of: [[3, *of[0][1:]]], "banned should hold an identity and two columns"),
    ("banned", lambda of: [["x", *of[0][1:]]], "banned should name each leaf of the mix at most once, found 'x'"),
    ("banned", lambda of: [of[0], of[0]], "banned should name each leaf of the mix at most once"),
    ("banned", lambda of: [[of[0][0], encode_column([5, 5]), of[0][2]]], "samples in ascending order"),
    (
        "banned",
        lambda of: [[of[0][0], encode_column([]), encode_column([])]],
        "banned should hold samples in ascending",
    ),
    ("banned", lambda of: [[of[0][0], encode_column([3, 71]), of[0][2]]], "banned should have numbers from 0 to 70"),
    ("banned", lambda of: [[*of[0][:2], encode_column([100])]], r"banned has 1 integers, expected \d"),
    ("banned", lambda of: [[*of[0][:2], last_is(-1)(of[0][2])]], "banned should have numbers from 0 to"),
    ("banned", lambda of: [[of[0][0], BOMB, of[0][2]]], "banned unpacks to more than the"),
    ("leaves.identities", lambda ids: [ids[0], ids[0]], r"leaves\.identities should name each leaf once"),
    ("leaves.identities", [1, 2], r"leaves\.identities should be a list of strings"),
    ("leaves.identities", lambda ids: ids[:1], r"leaves\.\w+ has 2 strings, expected 1"),
    ("leaves.parked", 3, r"leaves\.parked should be a number from 0 to 2"),
    ("leaves.num_samples", last_is(0), r"leaves\.num_samples should have numbers from 1"),
    ("leaves.num_samples", last_is(2**60), r"leaves\.num_samples should have numbers from 1"),
    ("leaves.shares", encode_text(("1", "1/0")), r"leaves\.shares should hold fractions, found '1/0'"),
    ("leaves.shares", encode_text(("1", "1e999999999")), r"leaves\.shares should hold fractions"),
    ("leaves.subsets", encode_text(("", "5:9")), r"leaves\.subsets has '5:9' for 71 samples"),
    ("leaves.paths", "{{{", r"leaves\.paths cannot be unpacked"),
    ("leaves.paths", base64.b85encode(zlib.compress(b"[")).decode(), r"leaves\.paths is not a list of strings \("),
    ("leaves.paths", encode_text((1, 2)), r"leaves\.paths is not a list of strings\."),
    ("leaves.paths", encode_text(("a",)), r"leaves\.paths has 1 strings, expected 2"),
    ("leaves.counts.bytes", last_is(-5), r"leaves\.counts\.bytes should have numbers from 0"),
    ("leaves.counts.bytes", BOMB, r"leaves\.counts\.bytes unpacks to more than the 2 bytes"),
    ("leaves.counts", {}, r"leaves\.counts\.samples is missing"),
    ("leaves.counts", lambda of: without(of, "banned"), r"leaves\.counts\.banned is missing"),
    ("lanes.numbers", last_is(24), r"lanes\.numbers should have numbers from 0 to 23, found 24"),
    ("lanes.numbers", last_is(3), r"lanes\.numbers should be in ascending order"),
    ("lanes.numbers", BOMB, r"lanes\.numbers unpacks to more than the 24 bytes"),
    ("lanes.draws", last_is(-1), r"lanes\.draws should have numbers from 0 to 281474976710656, found -1"),
    ("lanes.draws", last_is(2**60), r"lanes\.draws should have numbers from"),
    ("lanes.draws", column(lambda numbers: numbers[1:]), r"lanes\.draws has 23 integers, expected 24"),
    ("lanes.draws", BOMB, r"lanes\.draws unpacks to more than the 24 bytes"),
    ("lanes.draws", "2,AAAA", r"lanes\.draws cannot be unpacked"),
    ("lanes.draws", "3,AAAA", r"lanes\.draws should be a column of integers, found '3,AAAA'"),
    ("lanes.draws", 5, r"lanes\.draws should be a column of integers, found 5"),
    ("lanes.microbatches", last_is(2**40), "lane 23 has delivered 1099511627776 microbatches"),
    ("lanes.taken", last_is(2**33), r"lanes\.taken should have numbers from"),
    ("lanes.buffers", last_is(-1), r"lanes\.buffers should have numbers from"),
    ("lanes.leaf_draws", last_is(2**50), r"lanes\.leaf_draws should have numbers from"),
    ("lanes.leaf_draws", last_is(2**40), r"lanes\.leaf_draws counts more draws from the leaves than the lane made"),
    ("lanes.leaf_draws", column(lambda numbers: numbers * 2), r"lanes\.leaf_draws unpacks to more than"),
    ("lanes.held", last_is(2**60), r"lanes\.held should have numbers from"),
    ("lanes.held", last_is(2**31), rf"should have \d+ integers, more than a state can hold \({LONGEST_COLUMN}\)"),
    (
        "lanes.held",
        column(lambda numbers: [*numbers[:-1], numbers[-1] + 1]),
        r"lanes\.held_rows\[0\] has \d+ integers, expected",
    ),
    ("lanes.held_rows", [], r"lanes\.held_rows should be a list of 3 columns"),
    ("lanes.held_rows.0", last_is(4), r"lanes\.held_rows\[0\] should have numbers from 0 to 3, found 4"),
    ("lanes.held_rows.1", last_is(0), r"lanes\.held_rows\[1\] should have numbers from 1"),
    ("lanes.held_rows.2", last_is(-2), r"lanes\.held_rows\[2\] should have numbers from -1"),
    ("lanes.held_members.0", last_is(2), r"lanes\.held_members\[0\] should have numbers from 0 to 1, found 2"),
    ("lanes.held_members.1", last_is(71), r"names sample 71 of .*, which has samples 0 to 70"),
    ("lanes.held_members.1", last_is(-1), r"lanes\.held_members\[1\] names sample -1"),
    ("lanes.held_members.2", last_is(-1), r"lanes\.held_members\[2\] should have numbers from 0"),
    ("lanes.held_members.3", last_is(-1), r"lanes\.held_members\[3\] should have numbers from 0"),
    ("lanes", {}, r"lanes\.numbers is missing"),
    ("lanes", lambda of: without(of, "held"), r"lanes\.held is missing"),
    ("lanes", lambda of: without(of, "buffers"), r"lanes\.buffers is missing"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGES, ids=[f"{i}-{d[0]}" for i, d in enumerate(DAMAGES)])
def test_the_field_is_named(data: Path, state: Any, path: str, value: Any, message: str) -> None:
    loader = loader_of(data)
    kept = loader.save_state_rank()
    try:
        damaged = changed(state, path, value)
    except TypeError:  # no JSON, so that it has no checksum
        damaged = state | {path.split(".")[0]: value}
    with pytest.raises(StateFormatError, match=message):
        loader.restore_state_rank(damaged)
    assert loader.save_state_rank() == kept


@pytest.mark.parametrize("path", ["microbatches", "epoch_steps", "settings.seed", "lanes.draws", "leaves.paths"])
def test_a_change_is_noticed_where_all_else_fits(data: Path, state: Any, path: str) -> None:
    values = {"lanes.draws": column(lambda numbers: [n + 1 for n in numbers]), "leaves.paths": encode_text(("x", "y"))}
    damaged = changed(state, path, values.get(path, lambda number: number + 24)) | {"checksum": state["checksum"]}
    with pytest.raises(StateFormatError, match=rf"checksum is '{state['checksum']}', the content gives '\w{{16}}'"):
        loader_of(data).restore_state_rank(damaged)
    read(sign(damaged))  # so it was the checksum and nothing else


def test_a_checksum_is_needed(state: Any) -> None:
    with pytest.raises(StateFormatError, match="checksum is None"):
        read({name: value for name, value in state.items() if name != "checksum"})
    read({name: state[name] for name in reversed(state)})  # in any order of its fields


def test_a_filter_may_have_several_lines(state: Any) -> None:
    subset = "0:71 where size > 1\nand size < 9"
    assert subset in [
        leaf["subset"] for leaf in read(changed(state, "leaves.subsets", encode_text((subset, "")))).leaves
    ]


def other_column(text: Any, chance: random.Random) -> Any:
    """Return a column with other numbers in it."""
    if not isinstance(text, str) or text[1:2] != ",":
        return text
    numbers = decode_column(text, 1 << 20, at_most=True).tolist() or [0]
    numbers[chance.randrange(len(numbers))] = chance.choice((-1, 0, 1, 23, 24, 10**6, 2**31, 2**48, 2**60))
    return encode_column(numbers)


def test_states_with_random_damage_are_refused_or_continue(data: Path, state: Any) -> None:
    seed, cases = seed_of("damaged states"), 20_000 if LONG else 250

    def job(note: Note) -> list[str]:
        loader = loader_of(data)
        wrong = []
        refused = 0
        for case in range(cases):
            chance = random.Random(f"{seed} {case}")
            damaged, what = damaged_value(state, chance, other_column)
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                damaged = sign(damaged) if chance.random() < 0.8 else damaged
            note(f"case {case}: {what}")
            try:
                loader.restore_state_rank(damaged)
                if case % 10 == 0:
                    next(iter(loader))
            except StateError as error:
                refused += 1
                wrong += [f"case {case}: {what}: a message of {len(str(error))} characters"] * (len(str(error)) > 4000)
            except EnergonError:
                pass  # of the sample
            except BaseException as error:
                wrong.append(f"case {case}: {what}: {error!r}")
        assert refused > cases // 3
        return wrong

    assert limited(job, seconds=1200 if LONG else 60, memory=1 << 30) == []


def test_restoring_unpacks_each_column_once(data: Path, state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def counting(text: object, *args: Any, **kwargs: Any) -> Any:
        seen.append(text)
        return decode_column(text, *args, **kwargs)

    loader = loader_of(data)
    monkeypatch.setattr(saved_run, "decode_column", counting)
    loader.restore_state_rank(state)
    counts, lanes = state["leaves"]["counts"].values(), state["lanes"].values()
    columns = [state["leaves"]["num_samples"], state["leaves"]["blocks"], *counts]
    columns += [one for entry in lanes for one in (entry if isinstance(entry, list) else [entry])]
    columns += [one for _, *entry in state["banned"] for one in entry]
    assert sorted(seen) == sorted(columns)

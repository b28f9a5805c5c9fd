"""Ready-made packing: nothing lost or twice, every limit kept, packs full, nobody waits for ever, policies counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from energon_bridge.core.encoder.hooks import TALLY, Setting
from energon_bridge.core.errors import ConfigurationError, OverLongSampleError, SkipSample
from energon_bridge.core.samples import TextSample
from energon_bridge.models.packing.packing import Packer, binding_limit

METHODS = ("best_fit", "first_fit_decreasing")
BUFFER = 1000

Draw = Callable[[np.random.Generator, int], np.ndarray[Any, np.dtype[np.int64]]]


def uniform(rng: np.random.Generator, count: int) -> Any:
    return np.stack([rng.integers(1, 4097, count), np.ones(count, dtype=np.int64)], axis=1)


def log_normal(rng: np.random.Generator, count: int) -> Any:
    tokens = rng.lognormal(6.2, 0.9, count).astype(np.int64).clip(1, 4096)
    return np.stack([tokens, np.ones(count, dtype=np.int64)], axis=1)


def image_heavy(rng: np.random.Generator, count: int) -> Any:
    """One to ten images of 256 tokens, and some text."""
    images = rng.geometric(0.35, count).clip(1, 10)
    text = rng.lognormal(4.5, 0.8, count).astype(np.int64).clip(1, 1000)
    return np.stack([images * 256 + text, images, np.ones(count, dtype=np.int64)], axis=1)


def many_resolutions(rng: np.random.Generator, count: int) -> Any:
    """One to four images of 64 to 1,024 patches each; four patches make a token."""
    images = rng.integers(1, 5, count)
    patches = np.array([rng.integers(64, 1025, number).sum() for number in images])
    text = rng.lognormal(5, 0.8, count).astype(np.int64).clip(1, 1000)
    return np.stack([patches // 4 + text, patches, images, np.ones(count, dtype=np.int64)], axis=1)


STREAMS: dict[str, tuple[Draw, dict[str, int]]] = {
    "uniform": (uniform, {"tokens": 4096, "samples": 64}),
    "log-normal": (log_normal, {"tokens": 4096, "samples": 64}),
    "image-heavy, tokens bind": (image_heavy, {"tokens": 4096, "images": 16, "samples": 32}),
    "image-heavy, images bind": (image_heavy, {"tokens": 4096, "images": 12, "samples": 32}),
    "image-heavy, patches bind": (many_resolutions, {"tokens": 4096, "patches": 8192, "images": 32, "samples": 64}),
}


def packer(limits: dict[str, int], **values: Any) -> Packer[Any]:
    return Packer(limits=limits, size_of=lambda sample: sample, **values)


def selections(packing: Packer[Any], draw: Draw, seed: int, buffer: int = BUFFER) -> Iterator[tuple[Any, Any, Any]]:
    """Fill a buffer, select, keep what is left over, for ever: (sizes, numbers, packs) of each selection."""
    rng = np.random.default_rng(seed)
    sizes = np.zeros((0, len(packing.limits)), dtype=np.int64)
    numbers = np.zeros(0, dtype=np.int64)
    drawn = 0
    while True:
        fresh = buffer - len(sizes)
        sizes = np.concatenate([sizes, draw(rng, fresh)])
        numbers = np.concatenate([numbers, np.arange(drawn, drawn + fresh)])
        drawn += fresh
        packs = packing.pack(sizes)
        yield sizes, numbers, packs
        kept = np.setdiff1d(np.arange(buffer), [position for pack in packs for position in pack])
        sizes, numbers = sizes[kept], numbers[kept]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stream", STREAMS)
def test_packs_are_full_and_nothing_is_lost(stream: str, method: Any) -> None:
    draw, limits = STREAMS[stream]
    packing = packer(limits, method=method)
    used = np.zeros(len(limits), dtype=np.int64)
    packs_made = 0
    delivered: list[int] = []
    everything = np.zeros(len(limits), dtype=np.int64)
    for number, (sizes, numbers, packs) in enumerate(selections(packing, draw, seed=1)):
        for pack in packs:
            total = sizes[pack].sum(axis=0)
            assert (total <= list(limits.values())).all()
            used += total
        packs_made += len(packs)
        delivered += [int(numbers[position]) for pack in packs for position in pack]
        everything = sizes
        if number == 14:
            waiting = set(numbers.tolist()) - set(delivered)
            break
    assert len(delivered) == len(set(delivered))
    assert sorted([*delivered, *waiting]) == list(range(len(delivered) + len(waiting)))
    binding = binding_limit(everything, list(limits.values()))
    assert used[binding] / (packs_made * list(limits.values())[binding]) >= 0.985


size_rows = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), max_size=60)
packers = st.builds(
    lambda method, fill, wait: packer(
        {"tokens": 20, "images": 7, "samples": 5}, method=method, min_fill=fill, max_wait=wait
    ),
    st.sampled_from(METHODS),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.integers(1, 32),
)


def sizes_of(rows: list[tuple[int, int]]) -> Any:
    return np.array([(*row, 1) for row in rows], dtype=np.int64).reshape(len(rows), 3)


@given(packers, size_rows, st.booleans())
def test_limits_are_kept_nothing_comes_twice_and_the_oldest_leaves(packing, rows, flush):
    sizes = sizes_of(rows)
    packs = packing.pack(sizes, flush=flush)
    placed = [position for pack in packs for position in pack]
    assert len(placed) == len(set(placed))
    assert all(pack and pack == sorted(pack) for pack in packs)
    assert all((sizes[pack].sum(axis=0) <= [20, 7, 5]).all() for pack in packs)
    oldest = -(-len(rows) // packing.max_wait)
    assert set(range(len(rows) if flush else oldest)) <= set(placed)
    assert packs == packing.pack(sizes.copy(), flush=flush)
    assert packs == sorted(packs)


@given(st.sampled_from(METHODS), st.lists(st.integers(0, 20), min_size=1, max_size=40))
def test_no_two_packs_could_be_one(method, tokens):
    sizes = np.array(tokens)[:, None]
    fills = sorted(int(sizes[pack].sum()) for pack in packer({"tokens": 20}, method=method).pack(sizes, flush=True))
    assert len(fills) == 1 or fills[0] + fills[1] > 20


@given(st.sampled_from(METHODS), size_rows, st.randoms(use_true_random=False))
def test_the_sizes_of_all_packs_do_not_depend_on_the_order(method, rows, random):
    shuffled = random.sample(rows, len(rows))
    packing = packer({"tokens": 20, "images": 7, "samples": 5}, method=method)

    def contents(given_rows: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        return sorted(sorted(given_rows[i] for i in pack) for pack in packing.pack(sizes_of(given_rows), flush=True))

    assert contents(rows) == contents(shuffled)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 99))
def test_no_sample_waits_longer_than_max_wait(max_wait, buffer, seed):
    """Halves and a bit: no two fit together, so that every pack is badly filled."""
    packing = packer({"tokens": 20}, max_wait=max_wait, min_fill=1.0)
    first_seen: dict[int, int] = {}
    for turn, (_, numbers, packs) in enumerate(
        selections(packing, lambda g, n: g.integers(11, 21, (n, 1)), seed, buffer)
    ):
        for number in numbers.tolist():
            first_seen.setdefault(number, turn)
        for pack in packs:
            assert all(turn - first_seen[int(numbers[position])] < max_wait for position in pack)
        assert packs
        if turn == 3 * max_wait:
            break


def text(length: int, key: str = "a") -> TextSample:
    return TextSample(__key__=key, text="x" * length)


def text_packer(**values: Any) -> Packer[TextSample]:
    return Packer(limits={"tokens": 10, "samples": 3}, size_of=lambda sample: len(sample.text), **values)


def test_select_returns_the_samples_themselves_oldest_pack_first() -> None:
    samples = [text(4, "a"), text(6, "b"), text(6, "c"), text(4, "d"), text(10, "e")]
    groups = text_packer().select(samples)
    assert sorted("".join(s.__key__ for s in group) for group in groups) in (["ab", "cd", "e"], ["ac", "bd", "e"])
    assert groups[0][0].__key__ == "a"


def test_badly_filled_packs_wait_for_what_comes_next() -> None:
    samples = [text(10, str(number)) for number in range(10)] + [text(6, "half")]
    packing = text_packer()
    assert "half" not in {s.__key__ for group in packing.select(samples) for s in group}
    assert "half" in {s.__key__ for group in packing.select(samples, flush=True) for s in group}


def test_a_sample_counts_one_under_samples() -> None:
    assert [len(group) for group in text_packer().select([text(1)] * 7, flush=True)] == [3, 3, 1]


@pytest.mark.parametrize(
    "forms",
    [[dict], [Counter], [dict, Counter], [lambda size: {name: np.int64(value) for name, value in size.items()}]],
    ids=["dicts", "other mappings", "both", "numbers of numpy"],
)
def test_sizes_may_have_any_form(forms: list[Any]) -> None:
    given = [{"images": 1, "tokens": 7}, {"tokens": 9, "images": 2, "samples": 2}, {"tokens": 3, "images": 0}]
    sizes = [forms[number % len(forms)](size) for number, size in enumerate(given)]
    packing = packer({"tokens": 9, "samples": 4, "images": 9})
    assert packing.sizes(sizes).tolist() == [[7, 1, 1], [9, 2, 2], [3, 1, 0]]
    assert packing.sizes([]).shape == (0, 3)


@pytest.mark.parametrize("form", [int, np.int64, lambda size: {"tokens": size}])
def test_with_one_limit_besides_samples_a_size_may_be_a_number(form: Any) -> None:
    assert packer({"samples": 4, "tokens": 9}).sizes([form(7), form(9)]).tolist() == [[1, 7], [1, 9]]
    assert packer({"tokens": 9}).sizes([form(7), form(9)]).tolist() == [[7], [9]]


def test_what_is_too_long_is_dropped_cut_or_split_and_counted() -> None:
    def cut(sample: TextSample, limits: Any) -> Iterator[TextSample]:
        for start in range(0, len(sample.text), limits["tokens"]):
            yield text(len(sample.text[start : start + limits["tokens"]]))

    counts = Counter[str]()
    with Setting(TALLY, counts):
        dropping, fits = text_packer(over_long="drop"), text(10)
        assert dropping.admit(fits) == [fits]
        assert not counts
        for _ in range(2):
            with pytest.raises(SkipSample, match="sample 'long' has 11 tokens, but a pack holds at most 10"):
                dropping.admit(text(11, "long"))
        assert counts == {"dropped": 2}
        cutting = text_packer(over_long="truncate", cut=lambda sample, limits: text(limits["tokens"]))
        assert [len(piece.text) for piece in cutting.admit(text(25))] == [10]
        assert [len(piece.text) for piece in text_packer(over_long="split", cut=cut).admit(text(25))] == [10, 10, 5]
    assert counts == {"dropped": 2, "truncated": 1, "split": 1, "pieces": 3}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "sample 'long' has 11 tokens, but a pack holds at most 10: raise the limit 'tokens'"),
        ({"over_long": "truncate", "cut": lambda sample, limits: sample}, "after `cut` .over_long='truncate'. sample"),
        ({"over_long": "split", "cut": lambda sample, limits: [sample]}, "after `cut` .over_long='split'. sample"),
    ],
)
def test_what_stays_too_long_stops_the_run(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OverLongSampleError, match=complaint):
        text_packer(**values).admit(text(11, "long"))


def test_a_sample_that_came_past_admit_is_named() -> None:
    with pytest.raises(OverLongSampleError, match="sample 'long' has 11 tokens"):
        text_packer(over_long="drop").select([text(3), text(11, "long")])


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"limits": {}}, "at least one limit"),
        ({"limits": {"tokens": 0}}, "Packer: the limit 'tokens' must be an integer from 1 to"),
        ({"limits": {"tokens": 2**31}}, "2147483648"),
        ({"method": "worst_fit"}, "Packer: method must be one of best_fit, first_fit_decreasing"),
        ({"min_fill": 1.5}, "min_fill must be .*, got 1.5"),
        ({"max_wait": 0}, "max_wait must be .*, got 0"),
        ({"max_wait": 33}, "Packer: max_wait must be 1 to 32 selections, got 33"),
        ({"over_long": "keep"}, "Packer: over_long must be one of drop, truncate, split, raise"),
        ({"over_long": "truncate"}, "over_long='truncate' needs `cut`"),
    ],
)
def test_settings_without_sense_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Packer(**{"limits": {"tokens": 1}, "size_of": len, **values})


@pytest.mark.parametrize(
    ("size", "complaint"),
    [(3, "must return a size for each of tokens, images"), ({"tokens": 3}, "no size under 'images' for sample 'a'")],
)
def test_sizes_must_be_given_for_every_limit(size: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Packer(limits={"tokens": 9, "images": 9}, size_of=lambda sample: size).select([text(3)])


@pytest.mark.parametrize("sizes", [[[-1]], [[21]], [1, 2], [[1, 2]]])
def test_sizes_that_no_pack_can_hold_are_refused(sizes: Any) -> None:
    with pytest.raises(ConfigurationError, match="size"):
        packer({"tokens": 20}).pack(np.array(sizes))
